"""Sets up JAX before any test imports it: the GPUs where there are some, else 8 virtual CPUs."""

import glob
import os

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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if jax.default_backend() != "gpu":
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no GPU"))


@pytest.fixture(autouse=True)
def strict():
    """A call that should be fused, and quietly is not, fails. Small calls take the kernels too."""
    with jflux.config(strict=True, always=True):
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


@pytest.fixture(scope="session", autouse=True)
def heap():
    jflux.init()
    yield
