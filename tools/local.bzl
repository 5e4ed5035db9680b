"""Repositories made of what is installed on this machine. Nothing is downloaded.

    JFLUX_PYTHON  the interpreter that has jax, nanobind and pytest; without it the one that
                  ./test.sh has set up in .venv, or else python3
    JFLUX_CUDA    AUTO (the default: builds the GPU kernels where there is an NVIDIA driver), ON or
                  OFF
"""

def _python(ctx):
    if ctx.os.environ.get("JFLUX_PYTHON"):
        return ctx.os.environ["JFLUX_PYTHON"]
    venv = ctx.path(str(ctx.path(Label("//:WORKSPACE")).dirname) + "/.venv/bin/python")
    return str(venv if venv.exists else ctx.which("python3"))

def _python_impl(ctx):
    program = "\n".join([
        "import importlib.util as u, os, sys, sysconfig",
        "package = lambda name: os.path.dirname(u.find_spec(name).origin)",
        "print(sys.executable)",
        "print(sysconfig.get_path('include'))",
        "print(os.path.join(package('jaxlib'), 'include'))",
        "print(package('nanobind'))",
    ])
    found = ctx.execute([_python(ctx), "-c", program])
    if found.return_code:
        fail("Run ./test.sh first, or set JFLUX_PYTHON to a Python with jaxlib and nanobind:\n" +
             found.stderr)
    executable, headers, ffi, nanobind = found.stdout.strip().split("\n")
    ctx.symlink(headers, "python")
    ctx.symlink(ffi, "ffi")
    ctx.symlink(nanobind, "nanobind")
    ctx.file("defs.bzl", "PYTHON = %r\n" % executable)
    ctx.file("BUILD.bazel", """
package(default_visibility = ["//visibility:public"])

cc_library(
    name = "ffi",
    hdrs = glob(["ffi/xla/**/*.h"]),
    includes = ["ffi"],
)

cc_library(
    name = "nanobind",
    srcs = ["nanobind/src/nb_combined.cpp"],
    hdrs = glob(["python/**/*.h", "nanobind/include/**/*.h"]),
    textual_hdrs = glob([
        "nanobind/src/*.h",
        "nanobind/src/*.cpp",
        "nanobind/ext/robin_map/include/**/*.h",
    ], exclude = ["nanobind/src/nb_combined.cpp"]),
    copts = ["-fno-strict-aliasing", "-w"],
    defines = ["NDEBUG", "NB_COMPACT_ASSERTIONS"],
    includes = ["python", "nanobind/include", "nanobind/ext/robin_map/include"],
)
""")

local_python = repository_rule(
    implementation = _python_impl,
    environ = ["JFLUX_PYTHON", "PATH"],
    local = True,
)

def _cuda_impl(ctx):
    mode = (ctx.os.environ.get("JFLUX_CUDA") or "AUTO").upper()
    nvcc = ""
    if mode == "AUTO":
        finder = ctx.path(Label("//:build_backend/find_driver.py"))
        if ctx.execute([_python(ctx), str(finder)]).return_code:
            mode = "OFF"
    if mode != "OFF":
        finder = ctx.path(Label("//:build_backend/find_nvcc.py"))
        nvcc = ctx.execute([_python(ctx), str(finder)]).stdout.strip()
    if mode == "ON" and not nvcc:
        fail("JFLUX_CUDA=ON, but no nvcc 12.5 or later was found")
    if not nvcc:
        ctx.file("defs.bzl", "NVCC = None\nHOPPER = []\nPORTABLE = []\nFLOAT8 = []\n")
        ctx.file("BUILD.bazel", """
cc_library(
    name = "cudart",
    visibility = ["//visibility:public"],
)
""")
        return

    # nvcc may be a wrapper script: it knows best where its headers and libraries are.
    probe = ctx.execute([nvcc, "--dryrun", "-x", "cu", "-c", "/dev/null"])
    top = [line[len("#$ TOP="):] for line in probe.stderr.split("\n") if line.startswith("#$ TOP=")]
    root = ctx.path(top[0])
    lib = root.get_child("lib64")
    if not lib.exists:
        lib = root.get_child("lib")
    ctx.symlink(root.get_child("include"), "include")
    ctx.symlink(lib.get_child("libcudart_static.a"), "libcudart_static.a")
    ctx.path(Label("//:cc/ops/registry.cc"))  # after a change to it files are asked for again
    program = ctx.path(Label("//:build_backend/kernel_files.py"))
    defs = "NVCC = %r\n" % nvcc
    for gpus in ("hopper", "portable", "float8"):
        found = ctx.execute([_python(ctx), str(program), gpus, str(ctx.path("instances"))])
        if found.return_code:
            fail(found.stderr)
        defs += "%s = %r\n" % (gpus.upper(), [
            "@local_cuda//:instances/" + file.split("/instances/")[1] if "/instances/" in file else
            "//:cc/" + file.split("/cc/")[-1]
            for file in found.stdout.strip().split(";")
        ])
    ctx.file("defs.bzl", defs)
    ctx.file("BUILD.bazel", """
exports_files(glob(["instances/*.cu"]))

cc_library(
    name = "cudart",
    srcs = ["libcudart_static.a"],
    hdrs = glob(["include/**"]),
    defines = ["JFLUX_WITH_CUDA=1"],
    includes = ["include"],
    linkopts = ["-ldl", "-lpthread", "-lrt"],
    visibility = ["//visibility:public"],
)
""")

local_cuda = repository_rule(
    implementation = _cuda_impl,
    environ = ["CUDACXX", "CUDA_HOME", "CUDA_PATH", "JFLUX_CUDA", "JFLUX_PYTHON", "PATH"],
    local = True,
)

def _gpus_impl(ctx):
    # With one GPU alone there is no group, and tests/conftest.py chooses the CPU.
    ctx.file("BUILD.bazel", "")
    ctx.file("defs.bzl", "HAVE_GPUS = %s\n" % ctx.path("/dev/nvidia1").exists)

local_gpus = repository_rule(implementation = _gpus_impl, local = True)
