"""pytest_test: runs pytest files against the jflux that Bazel built, not an installed one."""

load("@local_python//:defs.bzl", "PYTHON")

def pytest_test(name, srcs, data = [], platforms = "cpu", **kwargs):
    """`platforms` is where JAX is to run: its own JAX_PLATFORMS."""
    native.sh_test(
        name = name,
        srcs = ["//tools:run_pytest.sh"],
        args = [PYTHON, platforms] + ["$(location %s)" % src for src in srcs],
        data = srcs + data + ["//tools:bazel_site/sitecustomize.py"],
        **kwargs
    )
