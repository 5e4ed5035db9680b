"""Sets up JAX before any test imports it: the GPUs where there are some, else 8 virtual CPUs."""

import glob
import os
import zlib

_GPUS = len(glob.glob("/dev/nvidia[0-9]*"))
if _GPUS == 1:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # one rank has nobody to talk to
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)
# Nothing here uses NVLink multicast, so NCCL need not set it up either.
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
# Some tests start processes that use the same GPUs.
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", ".25")

import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402

import jflux  # noqa: E402
from jflux._ops import matmul_all_reduce  # noqa: E402

# CI is deterministic. HYPOTHESIS_PROFILE=nightly draws new examples, many more of them (see
# harness.examples).
_SETTINGS = {
    "deadline": None,
    "suppress_health_check": list(hypothesis.HealthCheck),
    "print_blob": True,
}
hypothesis.settings.register_profile("ci", derandomize=True, database=None, **_SETTINGS)
hypothesis.settings.register_profile("nightly", **_SETTINGS)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_report_header() -> str:
    return f"jax {jax.__version__} on {len(jax.devices())} x {jax.devices()[0].device_kind}"


def pytest_addoption(parser: pytest.Parser) -> None:
    about = "run every test function, with its first set of parameters and one in N of the others"
    parser.addoption("--one-in", type=int, default=1, metavar="N", help=about)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    seen: set[str] = set()
    chosen, left_out = [], []
    for item in items:
        function = item.nodeid.partition("[")[0]
        # By name: every N-th would choose the same value of a parameter that has N values.
        is_one = zlib.crc32(item.nodeid.encode()) % config.getoption("one_in") == 0
        (chosen if is_one or function not in seen else left_out).append(item)
        seen.add(function)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = chosen

    if jax.default_backend() != "gpu":
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no GPU"))


@pytest.fixture(autouse=True)
def strict(request):
    """A call that should be fused, and quietly is not, fails. Small calls take the kernels too.

    Of files marked `wide`, whose operands are float32 and float64, GPUs run what they have kernels
    for, and the rest in XLA without rounding products to TensorFloat-32."""
    wide = jax.default_backend() == "gpu" and request.node.get_closest_marker("wide") is not None
    precision = "highest" if wide else None
    with (
        jflux.config(strict=not wide, always=True, unchecked_kernels=True),
        jax.default_matmul_precision(precision),
    ):
        yield


@pytest.fixture
def own_heap():
    """A function that makes a heap with other settings; the default one is back afterwards."""

    def init(**settings) -> None:
        jflux.shutdown()
        jflux.init(**settings)

    yield init
    jflux.shutdown()
    jflux.init()


@pytest.fixture(scope="module")
def small_sums():
    """matmul_all_reduce sums y of any size in its kernel."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(matmul_all_reduce, "MOST_BYTES", 0)
        jax.clear_caches()  # the figure is not in the key of what was lowered before
        yield
    jax.clear_caches()


@pytest.fixture(scope="session", autouse=True)
def heap():
    jflux.init()
    yield
