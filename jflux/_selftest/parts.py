"""The parts of the self-test. Each runs in a process of its own, returns what it says, or raises.

GPUs that wait for a check take their portable code in all of them, as they would with a record
(`selftest_record`); kernels of single ops that are not checked stay away.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jflux

from .. import _heap, _native, _version, doctor, stress
from .._call import gpu_code
from .._call.plans import Path, Plan
from .._ops._spec import OpSpec, all_ops, ops_with_checked_kernels
from . import bench, local
from .report import Machine

#: Seconds after which a call without one of its ranks must end.
DEADLINE = 2.0
#: Of random programs: minutes on GPUs, calls on CPUs.
MINUTES, CALLS_ON_CPUS = 1.5, 40
#: Enough for a planted fault to show.
CALLS_WITH_FAULT = 200

Found = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Part:
    """One part.

    Attributes:
      name: in the report.
      run: returns `said`, and some parts `machine`, `lines` or `rows` for the report.
      limit: seconds that its process may take.
      says: a pattern of what the process must have printed.
    """

    name: str
    run: Callable[[], Found]
    limit: float
    says: str | None = None


def machine() -> Found:
    """Versions and GPUs."""
    platform = _heap.default_platform()
    if platform not in ("cpu", "cuda"):
        raise RuntimeError(f"on {platform} every op takes its lax reference")
    if platform == "cuda" and (why := _heap._why_no_cuda()):
        raise RuntimeError(why)
    devices = jax.devices()
    on_gpus = platform == "cuda"
    cuda = " ".join(str(getattr(devices[0].client, "platform_version", "")).split())
    driver = (gpu_code.driver() or "") if on_gpus else ""
    versions = [*doctor._versions(), *_gpu_lines()]
    if on_gpus:
        versions.append(f"driver {driver or 'not known'}; {cuda}")
    found = Machine(
        versions=tuple(versions),
        platform=platform,
        kinds=tuple(sorted({device.device_kind for device in devices})),
        devices=len(devices),
        arch=gpu_code.arch_here() if on_gpus else 0,
        driver=driver,
        jflux=_version.__version__,
    )
    return {"said": f"{len(devices)} devices", "machine": dataclasses.asdict(found)}


def heap() -> Found:
    """The symmetric heap: its probe writes and reads over each link."""
    with jflux.config(strict=True):
        jflux.init()
    why = _heap.why_no_heap(_heap.default_platform())
    if why is not None:
        raise RuntimeError(why)
    links = len(_heap.links(_heap.default_platform()))
    said = f"made; data of {links} links verified" if links else "made"
    return {"said": said, "lines": list(doctor._heap_lines())}


def _gpu_lines() -> list[str]:
    named = [gpu_code.describe(device) for device in jax.devices() if device.platform == "gpu"]
    if not named:
        return [f"devices: {jax.device_count()} of the CPU"]
    kinds = ", ".join(f"{named.count(kind)} x {kind}" for kind in sorted(set(named)))
    return [f"GPUs: {kinds}, which run code for sm_{gpu_code.arch_here()}"]


def ops() -> Found:
    """A small call of every op with a checked kernel, whose kernel must run if there is code."""
    count = 0
    jflux.config.update(always=True)
    for spec in ops_with_checked_kernels(jax.default_backend()):
        for dtype in (jnp.bfloat16, jnp.float16, jnp.float32):
            with jflux.explaining() as calls:
                doctor._try(spec, np.dtype(dtype))
            kernel = runs_kernels(spec.name, [(call.op, call.plan) for call in calls])
            if spec.takes("cuda", dtype) and local.has_code(spec.name) and not kernel:
                raise AssertionError(f"{spec.name}: no kernel ran: {calls}")
            count += kernel
    return {"said": f"{count} calls of {len(all_ops())} ops by kernels are right"}


def runs_kernels(op: str, calls: Sequence[tuple[str, Plan]]) -> bool:
    """Whether calls (op, plan) of a program run a kernel of the op, or of a collective that it is
    decomposed into: a matmul_all_reduce of few bytes is."""
    return any(name == op and plan.path in (Path.FUSED, Path.DECOMPOSED) for name, plan in calls)


def local_ops() -> Found:
    """Ops of one rank."""
    return {"said": f"{local.check(seed=0)} calls right"}


def _stress(*arguments: str) -> tuple[int, dict[str, Any]]:
    """The exit status of jflux.stress, and its report."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "stress.json"
        how_long = "20"
        status = stress.main([
            "--seed", "1", "--report", str(path), "--deadline-seconds", how_long, *arguments
        ])  # fmt: skip
        return status, json.loads(path.read_text())


def values() -> Found:
    """Random programs with late ranks and poisoned workspaces, against float64."""
    on_cpus = jax.default_backend() == "cpu"
    how_long = ("--calls", f"{CALLS_ON_CPUS}") if on_cpus else ("--minutes", f"{MINUTES}")
    status, report = _stress(*how_long)
    if status:
        raise AssertionError((report["failure"] or {}).get("message", "jflux.stress failed"))
    if not on_cpus and not _native.lib.cuda_launches():
        raise AssertionError("no kernel ran")
    return {"said": f"{sum(report['calls'].values())} calls right"}


def planted() -> Found:
    """The same without waits for peers, which must be found."""
    status, report = _stress("--calls", f"{CALLS_WITH_FAULT}", "--plant-fault")
    if not status or not report["failure"]:
        raise AssertionError(f"ranks did not wait, and {CALLS_WITH_FAULT} calls were right")
    failure = report["failure"]
    return {"said": f"found in batch {failure['batch']}: {failure['what']}"}


def _missing(op: str) -> Found:
    """A call that rank 1 does not make."""
    jflux.init(deadline_seconds=DEADLINE)
    spec = all_ops()[op]
    mesh = Mesh(np.array(jax.devices()[:4]), ("tp",))
    rows = 128 * mesh.size  # whole tiles on every rank

    def body(x: Any, w: Any) -> Any:
        def call(x: Any, w: Any) -> Any:
            return _call(spec, x, w)

        y = jax.eval_shape(call, x, w)
        absent = lax.axis_index("tp") == 1
        return lax.cond(absent, lambda x, w: jnp.zeros(y.shape, y.dtype), call, x, w)

    mapped = jax.shard_map(
        body, mesh=mesh, in_specs=(P("tp"), P()), out_specs=P("tp"), check_vma=False
    )
    x, w = jnp.ones((rows * mesh.size, 64), jnp.bfloat16), jnp.ones((64, 64), jnp.bfloat16)
    with jflux.config(always=True):
        program = jax.jit(mapped).lower(x, w).compile()
    start = time.monotonic()
    try:
        jax.block_until_ready(program(x, w))
    except Exception as error:  # XLA's, whose type depends on the platform
        print(error)  # the CPU's error names the rank; on GPUs the process has printed it before
        return {"said": f"an error after {time.monotonic() - start:.1f} s"}
    raise AssertionError("a call without rank 1 has ended well")


def _call(spec: OpSpec, x: Any, w: Any) -> Any:
    if spec.product is None:
        return spec.on(x @ w, axis_name="tp", **spec.ways[0])
    return spec.function(x, w, axis_name="tp", **spec.ways[0])


def missing_reduce() -> Found:
    return _missing("all_reduce")


def missing_product() -> Found:
    return _missing("all_gather_matmul")


def benchmark() -> Found:
    """Times beside those of `lax`."""
    rows: list[bench.Row] = []
    if jax.device_count() > 1:
        rows += bench.over_ranks(Mesh(np.array(jax.devices()[: _native.MAX_RANKS]), ("tp",)))
    rows += bench.of_one_rank()
    return {"said": f"{len(rows)} rows", "rows": rows}


def _says_who(op: str) -> str:
    return rf"{re.escape(f'jflux.{op}')}: rank [0-9, ]+ waited {DEADLINE:g} s for rank 1\b"


FIRST = Part("machine", machine, 240)  # drivers compile PTX at its first use
OTHERS = (
    Part("heap", heap, 120),
    Part("ops", ops, 120),
    Part("local ops", local_ops, 120),
    Part("random programs", values, 60 * MINUTES + 90),
    Part("a planted fault", planted, 120),
    Part("no rank: reduce", missing_reduce, 60, _says_who("all_reduce")),
    Part("no rank: product", missing_product, 60, _says_who("all_gather_matmul")),
    Part("benchmark", benchmark, 150),
)
ALL = {part.name: part for part in (FIRST, *OTHERS)}


def for_machine(machine: Machine) -> list[Part]:
    """The parts after the first that a machine can run: one device has nobody to talk to, and the
    times of virtual devices say nothing."""
    out: set[str] = set()
    if machine.devices < 2:
        out |= {part.name for part in OTHERS} - {"heap", "local ops", "benchmark"}
    if machine.platform == "cpu":
        out |= {"ops", "benchmark"}
    return [part for part in OTHERS if part.name not in out]
