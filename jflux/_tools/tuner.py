"""Measures which configuration of the GPU kernels is the fastest for a call, and remembers it.

jflux.tune("all_gather_matmul", m=8192, n=49152, k=12288)
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from .. import _config, _heap, _native
from .._call import explain, gpu_code, plans, tuning_tables
from .._call.plans import Machine, Plan
from .._call.tuning_tables import DECOMPOSED, Choice, Key
from .._ops._collective import Collective
from .._ops._scaled import Scales
from .._ops._spec import OpSpec, all_ops
from .._ops.products import _product_plan, matmul
from .._ranks import meshes
from . import trials
from .trials import Trial


@dataclasses.dataclass(frozen=True)
class Result:
    """What was measured.

    Attributes:
      key: the call.
      seconds: of a call, the median over rounds, for each choice and for "decomposed",
        XLA's product and a collective: the mean of calls on normal numbers and on zeros.
      best: the choice that calls like this take from now on.
    """

    key: Key
    seconds: dict[Choice | str, float]
    best: Choice | str

    def __str__(self) -> str:
        lines = [str(self.key)]
        for choice, seconds in sorted(self.seconds.items(), key=lambda item: item[1]):
            mark = "  <- taken" if choice == self.best else ""
            lines.append(f"  {_label(choice):28} {seconds * 1e6:9.1f} us{mark}")
        return "\n".join(lines)


def _alone(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, w, *, axis_name, **options: function(x, w, **options)


#: The product on one rank, as one over an axis of one rank.
_MATMUL = OpSpec(
    name=matmul.OP,
    function=_alone(matmul.matmul),
    reference=_alone(matmul.matmul),
    communication=lambda ndim, **_: Collective("all_reduce"),
    product="after",
    tuned=True,
)


def tuned_ops() -> Mapping[str, OpSpec]:
    """The ops whose kernels have configurations to choose from, by name."""
    found = {name: spec for name, spec in all_ops().items() if spec.tuned}
    return {**found, _MATMUL.name: _MATMUL}


def spec_of(op: str) -> OpSpec:
    """Of one of :func:`tuned_ops`; raises ValueError for another name."""
    ops = tuned_ops()
    if op not in ops:
        raise ValueError(f"jflux.tune: {op=} must be one of {', '.join(ops)}")
    return ops[op]


def mesh_of(op: str, mesh: Mesh) -> Mesh:
    """The mesh of an op's calls: for a product on one rank, a device of this process."""
    if op != _MATMUL.name or mesh.size == 1:
        return mesh
    one = np.array(jax.local_devices()[:1]).reshape((1,) * len(mesh.axis_names))
    return Mesh(one, mesh.axis_names)


def tune(
    op: str,
    *,
    m: int,
    n: int,
    k: int,
    mesh: Mesh | None = None,
    axis_name: meshes.AxisName = "tp",
    dtype: Any = jnp.bfloat16,
    scales: str | None = None,
    transpose_rhs: bool = False,
    rounds: int = 5,
    save: bool = True,
    least_gain: float = 0.0,
    threads: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> Result:
    """Times the whole overlapped op with every configuration that could be the fastest, on all
    ranks in lockstep, and XLA's product and a collective ("decomposed") beside them; calls of this
    shape take the fastest from then on.

    With several processes, all of them must call it, with the same arguments.

    Args:
      op: the name of an op that multiplies; "matmul", on one device, if operands have scales. Of
        all-to-alls, the first way in which its documentation calls it is timed; what is chosen
        holds for other shards of the same size too.
      m: rows of the gathered x, or of x before the scatter, or of y.
      n: columns of w, over all ranks for all_gather_matmul.
      k: columns of x, over all ranks for matmul_reduce_scatter and matmul_all_reduce.
      mesh: by default all devices, along `axis_name`.
      axis_name: the ranks' axis, or a tuple of them.
      dtype: of x, w and y. If it has 8 bits, of x and w; y is bfloat16.
      scales: of x and w, if they have any: "tensor", "row" (of w: column) or "block" (1 x 128 of x,
        128 x 128 of w). Calls by tensor and by row have one kernel, and one choice.
      transpose_rhs: w is stored [n, k]. If it has 8 bits it always is: kernels take no other.
      rounds: how often each candidate is timed that is not clearly slower in the first two.
      save: also writes the choice to the user's table ($JFLUX_TUNING_DIR, else the user's cache
        directory), where later processes find it.
      least_gain: the share of its time by which another choice must beat the heuristic's.
      threads: that compile candidates at the same time; 1 where there are several processes.
      progress: called with (steps done, steps in all), from 0 to all of them; a step compiles a
        candidate, or runs one.

    Returns:
      All times, and the choice.

    Raises:
      ValueError: for an unknown op, sizes that the ranks do not divide, or a call that no kernel
        takes, and so has nothing to choose: says why.
      RuntimeError: where there is nothing to choose: no GPUs with kernels, or one rank.
    """
    spec = spec_of(op)
    trial = trial_of(spec, axis_name, dtype, scales, transpose_rhs)
    if not _heap._cuda_usable():
        why = _heap._why_no_cuda() if jax.default_backend() == "gpu" else "there is no GPU"
        raise RuntimeError(f"jflux.tune chooses among kernels for GPUs, and {why}")
    arch = gpu_code.arch_here() if spec is _MATMUL else _heap.kernel_arch()
    no_record = gpu_code.NO_RECORD
    if arch < gpu_code.HOPPER:
        no_record = _heap.no_record_of_local_ops() if spec is _MATMUL else _heap.no_record()
    if why := gpu_code.why_not(op, arch, gpu_code.gpu_here(), no_record):
        raise RuntimeError(f"jflux.tune: {op}: {why}")
    if mesh is None:
        mesh = jax.make_mesh((jax.device_count(),), meshes.as_tuple(axis_name))
    mesh = mesh_of(op, mesh)
    if _ranks(mesh, axis_name) == 1 and spec is not _MATMUL:
        raise RuntimeError("jflux.tune: one rank has no communication, and so nothing to choose")
    gpu = mesh.devices.flat[0].device_kind
    check_divides(spec, m, n, k, _ranks(mesh, axis_name))
    plan = plan_of(trial, m, n, k, mesh, dtype)
    if plan.path != plans.Path.FUSED:
        raise ValueError(f"jflux.tune: {op} of {m} x {n} x {k} has no kernel: {plan.reason}")
    if spec is _MATMUL:  # which needs no heap
        sm_count = getattr(mesh.devices.flat[0], "core_count", None)
        machine = Machine("cuda", sm_count=sm_count or plans.USUAL_SM_COUNT)
    else:
        machine = plans.machine_of("cuda", mesh)
    tried: list[Choice | str] = [*candidates(plan.key, machine), DECOMPOSED]
    seconds = measure(
        trial, tried, m=m, n=n, k=k, mesh=mesh, dtype=dtype, rounds=rounds, threads=threads,
        progress=progress,
    )  # fmt: skip
    best = pick(seconds, least_gain)
    entry = {str(plan.key): tuning_tables.as_json(best)}
    if save and jax.process_index() == 0:
        tuning_tables.store(tuning_tables.user_path(gpu), entry)
    tuning_tables.remember(gpu, entry)
    jax.clear_caches()  # what was lowered before does not know
    return Result(plan.key, seconds, best)


def trial_of(
    spec: OpSpec,
    axis_name: meshes.AxisName,
    dtype: Any,
    scales: str | None,
    transpose_rhs: bool,
) -> Trial:
    """The call that is timed. Raises ValueError for scales that there are not, or that `dtype` does
    not have."""
    is_narrow = jnp.dtype(dtype).itemsize == 1
    if scales is not None and (scales not in trials.SCALES or not is_narrow):
        raise ValueError(
            f"jflux.tune: {scales=} must be one of {', '.join(trials.SCALES)}, of operands of 8 "
            f"bits, or None; dtype is {jnp.dtype(dtype)}"
        )
    return Trial(spec, axis_name, transpose_rhs or is_narrow, scales=scales)


def plan_of(trial: Trial, m: int, n: int, k: int, mesh: Mesh, dtype: Any) -> Plan:
    """What the kernel does for a call of these global sizes, if it takes the call."""
    x_spec, w_spec, y_spec = trial.partition
    f = jax.jit(
        jax.shard_map(
            trial.function(), mesh=mesh, in_specs=(x_spec, w_spec), out_specs=y_spec,
            check_vma=False,
        )
    )  # fmt: skip
    with _config.override(always=True, configuration=None):
        calls = explain.explain(f, *trial.shapes(m, n, k, mesh, dtype))
    found = (call.plan for call in calls if call.op == trial.spec.name)
    return next(found, plans.unsupported("lax takes such operands"))


#: First every candidate is timed in so many rounds, on normal numbers. One that takes so much
#: longer than the fastest is not timed again: rounds differ by a few percent.
_FIRST_ROUNDS, _WORTH_MORE = 2, 1.1
_KINDS = ("", ", zeros")  # of operands


def measure(
    trial: Trial,
    tried: Sequence[Choice | str],
    *,
    m: int,
    n: int,
    k: int,
    mesh: Mesh,
    dtype: Any = jnp.bfloat16,
    rounds: int = 5,
    threads: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> dict[Choice | str, float]:
    """Seconds of a call with each choice, one after the other and on all ranks in lockstep: the
    mean of calls on normal numbers and on zeros. Loops of the former are limited by the chip's
    power, which hides the differences between choices where it is no limit; models are in between
    (docs/experiments/0009). Of choices that are clearly slower, seconds on normal numbers."""
    normal = trial.operands(m, n, k, mesh, dtype)
    operands = dict(zip(_KINDS, (normal, jax.tree.map(jnp.zeros_like, normal)), strict=True))
    iterations = trials.iterations_for(0.02, 2.0 * m * n * k / _ranks(mesh, trial.axis))
    x_spec, w_spec, y_spec = trial.partition
    steps_of_a_choice = len(_KINDS) * (1 + rounds)
    done, total = 0, (1 + steps_of_a_choice) * len(tried)
    if rounds > _FIRST_ROUNDS:
        total += (1 + _FIRST_ROUNDS) * len(tried)

    def step(count: int = 1) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, total)

    switches = dataclasses.asdict(_config.config.current())  # which other threads do not have

    def program_of(choice: Choice | str) -> Any:
        body = trials.loop(trial.function(), iterations)
        with _config.override(**switches), tuning_tables.force(choice):
            return trials.compiled(body, mesh, (x_spec, w_spec), y_spec, *normal)

    def seconds_of(
        choices: Sequence[Choice | str], rounds: int, kinds: Sequence[str] = _KINDS
    ) -> dict[Choice | str, float]:
        runs = {
            _label(choice) + kind: trials.run_of(programs[choice], *operands[kind])
            for choice in choices
            for kind in kinds
        }
        timings = trials.interleave(runs, iterations, rounds, step)
        return {
            choice: sum(timings[_label(choice) + kind].median for kind in kinds) / len(kinds)
            for choice in choices
        }

    step(0)
    programs: dict[Choice | str, Any] = {}
    if jax.process_count() > 1:  # which must compile in one order
        threads = 1
    kernels = [choice for choice in tried if choice != DECOMPOSED]
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        for choice, program in zip(kernels, pool.map(program_of, kernels), strict=True):
            programs[choice] = program
            step()
    if DECOMPOSED in tried:  # while no other program compiles: XLA times its products' algorithms
        programs[DECOMPOSED] = program_of(DECOMPOSED)
        step()
    if rounds <= _FIRST_ROUNDS:
        return seconds_of(tried, rounds)
    seconds = seconds_of(tried, _FIRST_ROUNDS, _KINDS[:1])
    fastest = min(seconds.values())
    kept = [choice for choice in tried if seconds[choice] <= _WORTH_MORE * fastest]
    step((len(tried) - len(kept)) * steps_of_a_choice)
    return seconds | seconds_of(kept, rounds)


def _ranks(mesh: Mesh, axis_name: meshes.AxisName) -> int:
    return math.prod(mesh.shape[name] for name in meshes.as_tuple(axis_name))


def check_divides(spec: OpSpec, m: int, n: int, k: int, ranks: int) -> None:
    """Raises for global sizes that the ranks do not divide."""
    layout = spec.layout(2, **spec.ways[0])
    names = {"x": ("m", "k"), "y": ("m", "n"), "w": ("k", "n")}
    sizes = {"m": m, "n": n, "k": k}
    for array, dimension in {**layout.rows, **layout.others}.items():
        if dimension is None:
            continue
        name = names[array][dimension]
        if sizes[name] % ranks != 0:
            raise ValueError(
                f"jflux.tune: {name}={sizes[name]} is not a multiple of the {ranks} ranks"
            )


_MOST_IN_ONE_GROUP = 4096  # rows


def candidates(key: Key, machine: Machine) -> list[Choice]:
    """What is worth a try: every compiled tile, with the heuristic's raster group and those around
    it, as far as they are different to the kernel. The heuristic's own choice comes first."""

    def planned(choice: Choice | None) -> Choice | None:
        """What the kernel makes of a choice; None if it cannot."""
        call = native_call(key) | (dataclasses.asdict(choice) if choice else {})
        try:
            native = machine.native_plan(kernel_of(key), call)
        except ValueError:
            return None
        return Choice(*(native[field.name] for field in dataclasses.fields(Choice)))

    first = planned(None)
    assert first is not None
    tried: list[Choice] = []
    for tile in tuning_tables.compiled():
        rows = _native.TILE_ROWS * tile.cluster_m
        most = -(-key.rows // rows)
        if tile.cluster_m > 1 and key.rows <= _native.TILE_ROWS:
            continue  # half of each cluster would compute nothing
        near = max(1, first.group_m * first.cluster_m // tile.cluster_m)
        groups = {near // 2, near, 2 * near, min(16, most)} - {0}
        # One raster group of all rows; with one row of tiles every group is. Of one rank, many rows
        # of clusters are as good.
        if 1 < most and key.ranks > 1 and key.rows <= _MOST_IN_ONE_GROUP:
            groups.add(0)
        tried += [
            dataclasses.replace(tile, group_m=group)
            for group in sorted(groups)
            if group <= max(1, min(16, most))
        ]
    if key.rows <= _native.TILE_ROWS:
        tried += [Choice(128, 1, 1, splits) for splits in (2, 4)]
    found = [first]
    for choice in map(planned, tried):
        if choice is not None and choice not in found:
            found.append(choice)
    return found


def native_call(key: Key) -> dict[str, int]:
    """A call of this key, as the native plan function reads it."""
    names = key.dtype.split(".")
    x, w, y = (jnp.dtype(name) for name in (names * 3 if len(names) == 1 else names))
    return _product_plan.Sizes(
        key.op, key.ranks, 1, key.rows // key.ranks, key.k, key.n, x, y, key.transpose_rhs,
        w_dtype=None if w == x else w, scales=Scales[key.scales.upper() or "NONE"],
    ).native()  # fmt: skip


def kernel_of(key: Key) -> str:
    """The op whose kernel, and whose native plan, a call of this key has."""
    return "all_gather_matmul" if key.op == matmul.OP else key.op


def pick(seconds: Mapping[Choice | str, float], least_gain: float = 0.0) -> Choice | str:
    """The fastest; "decomposed" only if it is faster than every kernel. The first, which is the
    heuristic's, if the fastest does not save `least_gain` of its time."""
    best = min(seconds, key=lambda choice: (seconds[choice], choice == DECOMPOSED))
    first = next(iter(seconds))
    return best if seconds[best] <= (1 - least_gain) * seconds[first] else first


def _label(choice: Choice | str) -> str:
    if isinstance(choice, str):
        return choice
    split = f" split {choice.splits}" if choice.splits > 1 else ""
    return f"tile 128x{choice.tile_n} cluster {choice.cluster_m} group {choice.group_m}{split}"
