"""cuda_library: a cc_library of .cu files, compiled by nvcc. Empty where there is no nvcc."""

load("@local_cuda//:defs.bzl", "NVCC")

FLAGS = [
    "-std=c++17",
    "-O3",
    "--expt-relaxed-constexpr",
    "-Xcompiler=-fPIC,-fvisibility=hidden",
]

# For Hopper, and for other GPUs sm_80 with its PTX: of float8, sm_89.
SM_90A = ["-gencode=arch=compute_90a,code=sm_90a"]
PORTABLE = ["-gencode=arch=compute_80,code=[compute_80,sm_80]"]
FLOAT8 = ["-gencode=arch=compute_89,code=[compute_89,sm_89]"]

def _objects_impl(ctx):
    contexts = [dep[CcInfo].compilation_context for dep in ctx.attr.deps]
    outputs = []
    for source in ctx.files.hopper_srcs + ctx.files.portable_srcs + ctx.files.float8_srcs:
        output = ctx.actions.declare_file(source.short_path.replace("../", "") + ".pic.o")
        args = ctx.actions.args()
        args.add_all(FLAGS + SM_90A)
        if source in ctx.files.portable_srcs:
            args.add_all(PORTABLE)
        if source in ctx.files.float8_srcs:
            args.add_all(FLOAT8)
        for context in contexts:
            args.add_all(context.defines, format_each = "-D%s")
            args.add_all(context.includes, before_each = "-I")
            args.add_all(context.quote_includes, before_each = "-I")
            args.add_all(context.system_includes, before_each = "-isystem")
        args.add_all(["-c", source, "-o", output])
        ctx.actions.run(
            executable = NVCC,
            arguments = [args],
            inputs = depset([source], transitive = [context.headers for context in contexts]),
            outputs = [output],
            mnemonic = "Nvcc",
            progress_message = "Compiling " + source.short_path,
            use_default_shell_env = True,
        )
        outputs.append(output)
    return [DefaultInfo(files = depset(outputs))]

_objects = rule(
    implementation = _objects_impl,
    attrs = {
        "hopper_srcs": attr.label_list(allow_files = [".cu"]),
        "portable_srcs": attr.label_list(allow_files = [".cu"]),
        "float8_srcs": attr.label_list(allow_files = [".cu"]),
        "deps": attr.label_list(providers = [CcInfo]),
    },
)

def cuda_library(name, hopper_srcs, portable_srcs, float8_srcs, deps = [], **kwargs):
    srcs = []
    if NVCC:
        srcs = [name + "_objects"]
        _objects(
            name = srcs[0],
            hopper_srcs = hopper_srcs,
            portable_srcs = portable_srcs,
            float8_srcs = float8_srcs,
            deps = deps,
        )
    native.cc_library(name = name, srcs = srcs, deps = deps, **kwargs)
