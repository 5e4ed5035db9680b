"""Sets up JAX before any test imports it: the GPUs where there are some, else 8 virtual CPUs."""

import glob
import os
import zlib

import jaxlib.version

_GPUS = len(glob.glob("/dev/nvidia[0-9]*"))
if _GPUS == 1:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # one rank has nobody to talk to
if _GPUS <= 1:
    # Tests compile thousands of small programs and run each once or twice. What XLA_FLAGS has
    # already comes later and so prevails: .ci/nightly compiles as users do.
    fast = ["--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true"]
    if jaxlib.version.__version_info__ < (0, 11):
        fast.append("--xla_cpu_use_fusion_emitters=false")
    os.environ["XLA_FLAGS"] = " ".join([*fast, os.environ.get("XLA_FLAGS", "")])
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
import suite_times  # noqa: E402

import jflux  # noqa: E402
from jflux import _config, _heap  # noqa: E402
from jflux._call import explain, ffi_targets, plans  # noqa: E402
from jflux._ops._spec import all_ops  # noqa: E402
from jflux._ops.products import matmul_all_reduce  # noqa: E402
from jflux._ranks import meshes  # noqa: E402

# How many examples a property gets, as a percentage of what harness.examples is told. Both tiers
# are deterministic; HYPOTHESIS_PROFILE=nightly draws new examples.
_SETTINGS = {
    "deadline": None,
    "suppress_health_check": list(hypothesis.HealthCheck),
    "print_blob": True,
}
_SAME = _SETTINGS | {"derandomize": True, "database": None}
hypothesis.settings.register_profile("short", max_examples=35, **_SAME)
hypothesis.settings.register_profile("full", max_examples=100, **_SAME)
hypothesis.settings.register_profile("nightly", max_examples=2000, **_SETTINGS)


def pytest_report_header() -> str:
    return f"jax {jax.__version__} on {len(jax.devices())} x {jax.devices()[0].device_kind}"


#: Of the sets of parameters of a test function, the short tier runs the first of each op, and one
#: in SHORT of the others.
SHORT = 32


def pytest_addoption(parser: pytest.Parser) -> None:
    full = "run all: every set of parameters, and tests marked slow"
    parser.addoption("--full", action="store_true", help=full)
    one_in = f"of the sets of parameters after an op's first run one in N, by default {SHORT}"
    parser.addoption("--one-in", type=int, metavar="N", help=one_in)
    budget = "fail if the short tier takes more time or memory than it may"
    parser.addoption("--within-budget", action="store_true", help=budget)


def pytest_configure(config: pytest.Config) -> None:
    short = not config.getoption("full")
    profile = os.environ.get("HYPOTHESIS_PROFILE", "short" if short else "full")
    hypothesis.settings.load_profile(profile)
    budgets = short and jax.default_backend() == "cpu"
    within_budget = config.getoption("within_budget")
    config.pluginmanager.register(suite_times.SuiteTimes(budgets, within_budget))


def ops_of(item: pytest.Item) -> list[str]:
    """The ops among the parameters of a test, which are names or calls."""
    values = item.callspec.params.values() if hasattr(item, "callspec") else ()
    names = [value if isinstance(value, str) else getattr(value, "op", None) for value in values]
    return [name for name in names if isinstance(name, str) and name in all_ops()]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    full = config.getoption("full")
    one_in = config.getoption("one_in") or (1 if full else SHORT)
    # Whoever names a test wants all of it.
    named = tuple(arg.partition("::")[2] for arg in config.args if "::" in arg)
    seen: set[tuple[str, ...]] = set()
    chosen, left_out = [], []
    for item in items:
        function = item.nodeid.partition("[")[0]
        # By name: every N-th would choose the same value of a parameter that has N values.
        first = (function, *ops_of(item))
        runs = first not in seen or zlib.crc32(item.nodeid.encode()) % one_in == 0
        runs = runs and (full or item.get_closest_marker("slow") is None)
        runs = runs or item.nodeid.partition("::")[2].startswith(named or "::")
        (chosen if runs else left_out).append(item)
        seen.add(first)
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


#: Settings of the heap that tests share. A worker on CPUs has those of eight devices, and tests
#: write all that is in them.
HEAP = {} if jax.default_backend() == "gpu" else {"heap_bytes": 192 << 20}


@pytest.fixture
def own_heap():
    """A function that makes a heap with other settings; the default one is back afterwards."""

    def init(**settings) -> None:
        jflux.shutdown()
        jflux.init(**HEAP | settings)

    yield init
    jflux.shutdown()
    jflux.init(**HEAP)


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
    jflux.init(**HEAP)
    yield


@pytest.fixture
def lowered_without_gpus(monkeypatch):
    """A function (f, *args) -> (the calls that f becomes, its program), lowered for GPUs that are
    not here, the smallest of which has 114 multiprocessors."""
    machine = plans.Machine(
        "cuda", sm_count=114, link_gbps=320.0, heap_bytes=2 << 30, is_here=False
    )
    monkeypatch.setattr(_heap, "why_not_usable", lambda platform, mesh, table: None)
    monkeypatch.setattr(plans, "machine_of", lambda platform, mesh: machine)
    monkeypatch.setattr(meshes, "belongs_here", lambda mesh: False)
    monkeypatch.setattr(ffi_targets, "register_targets", lambda platform: None)

    def lower(f, *args):
        recorder = explain._Recorder()
        with _config.override(always=True, strict=True, recorder=recorder):
            traced = jax.jit(f).trace(*args)
            return recorder.calls, traced.lower(lowering_platforms=("cuda",)).as_text()

    return lower
