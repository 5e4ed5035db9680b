"""Measures which configuration of the GPU kernels is the fastest for a call, and remembers it.

jflux.tune("all_gather_matmul", m=8192, n=49152, k=12288)
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from . import _heap, _jflux, _mesh, _trial, _tuning
from ._ops._product import CUDA_TILE_ROWS
from ._ops.all_gather_matmul import all_gather_matmul
from ._ops.matmul_all_reduce import are_few_rows, check_tuned, matmul_all_reduce
from ._ops.matmul_all_to_all import matmul_all_to_all
from ._ops.matmul_reduce_scatter import matmul_reduce_scatter
from ._tuning import APART, Choice, Key

_OPS: dict[str, Callable[..., Any]] = {
    "all_gather_matmul": all_gather_matmul,
    "matmul_reduce_scatter": matmul_reduce_scatter,
    "matmul_all_reduce": matmul_all_reduce,
    "matmul_all_to_all": matmul_all_to_all,
}


@dataclasses.dataclass(frozen=True)
class Result:
    """What was measured.

    Attributes:
      key: the call.
      seconds: of a call, the median over rounds, for each choice and for "apart", XLA's product
        and a collective: the mean of calls on normal numbers and on zeros.
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


def tune(
    op: str,
    *,
    m: int,
    n: int,
    k: int,
    mesh: Mesh | None = None,
    axis_name: _mesh.AxisName = "tp",
    dtype: Any = jnp.bfloat16,
    transpose_rhs: bool = False,
    rounds: int = 5,
    save: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> Result:
    """Times the whole overlapped op with every configuration that could be the fastest, on all
    ranks in lockstep, and XLA's product and a collective ("apart") beside them; calls of this shape
    take the fastest from then on.

    With several processes, all of them must call it, with the same arguments.

    Args:
      op: "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", or
        "matmul_all_to_all", whose columns are split; what is chosen holds for other pieces of the
        same size too.
      m: rows of the gathered x, or of x before the scatter, or of y.
      n: columns of w, over all ranks for all_gather_matmul.
      k: columns of x, over all ranks for matmul_reduce_scatter and matmul_all_reduce.
      mesh: by default all devices, along `axis_name`.
      axis_name: the ranks' axis, or a tuple of them.
      dtype: of x, w and y.
      transpose_rhs: w is stored [n, k].
      rounds: how often each candidate is timed.
      save: also writes the choice to the user's table ($JFLUX_TUNING_DIR, else the user's cache
        directory), where later processes find it.
      progress: called with (steps done, steps in all), from 0 to all of them; a step compiles a
        candidate, or runs one.

    Returns:
      All times, and the choice.

    Raises:
      ValueError: for an unknown op, sizes that the ranks do not divide, or a matmul_all_reduce that
        is no one kernel, and has nothing to choose.
      RuntimeError: where there is nothing to choose: no GPUs with kernels, or one rank.
    """
    if op not in _OPS:
        raise ValueError(f"jflux.tune: {op=} must be one of {', '.join(_OPS)}")
    if not _heap._cuda_usable():
        why = _heap._why_no_cuda() if jax.default_backend() == "gpu" else "there is no GPU"
        raise RuntimeError(f"jflux.tune chooses among kernels for GPUs, and {why}")
    if mesh is None:
        mesh = jax.make_mesh((jax.device_count(),), _mesh.as_tuple(axis_name))
    gpu, sm_count = mesh.devices.flat[0].device_kind, _mesh.core_count(mesh)
    ranks = _ranks(mesh, axis_name)
    if ranks == 1:
        raise RuntimeError("jflux.tune: one rank is a plain product, with nothing to choose")
    key = key_of(op, m, n, k, ranks, dtype, transpose_rhs)
    if op == "matmul_all_reduce":
        check_tuned(m, n, key.k, ranks, jnp.dtype(dtype))
    tried: list[Choice | str] = [*candidates(key, sm_count, _heap.link_gbps()), APART]
    seconds = measure(
        op, tried, m=m, n=n, k=k, mesh=mesh, axis_name=axis_name, dtype=dtype,
        transpose_rhs=transpose_rhs, rounds=rounds, progress=progress,
    )  # fmt: skip
    best = pick(seconds)
    entry = {str(key): _tuning.as_json(best)}
    if save and jax.process_index() == 0:
        _tuning.store(_tuning.user_path(gpu), entry)
    _tuning.remember(gpu, entry)
    jax.clear_caches()  # what was lowered before does not know
    return Result(key, seconds, best)


def measure(
    op: str,
    tried: Sequence[Choice | str],
    *,
    m: int,
    n: int,
    k: int,
    mesh: Mesh,
    axis_name: _mesh.AxisName,
    dtype: Any = jnp.bfloat16,
    transpose_rhs: bool = False,
    rounds: int = 5,
    progress: Callable[[int, int], None] | None = None,
) -> dict[Choice | str, float]:
    """Seconds of a call with each choice, in turn and on all ranks in lockstep: the mean of calls
    on normal numbers and on zeros. Loops of the former are limited by the chip's power, which hides
    what tells choices apart where it is no limit; models are in between (docs/design/0009)."""
    normal = _trial.operands(op, m, n, k, mesh, axis_name, dtype, transpose_rhs)
    zeros = jax.tree.map(jnp.zeros_like, normal)
    ranks = _ranks(mesh, axis_name)
    iterations = _trial.iterations_for(0.02, 2.0 * m * n * k / ranks)
    x_spec, w_spec, y_spec = _trial.specs(op, axis_name, transpose_rhs)
    done = itertools.count()
    total = len(tried) + (1 + rounds) * 2 * len(set(tried))

    def step() -> None:
        if progress is not None:
            progress(next(done), total)

    step()
    runs = {}
    for choice in tried:
        options = _trial.options(op)
        f = functools.partial(_OPS[op], axis_name=axis_name, transpose_rhs=transpose_rhs, **options)
        body = _trial.loop(f, iterations)
        with _tuning.force(choice):
            program = _trial.compiled(body, mesh, (x_spec, w_spec), y_spec, *normal)
        runs[_label(choice)] = _trial.run_of(program, *normal)
        runs[f"{_label(choice)}, zeros"] = _trial.run_of(program, *zeros)
        step()
    timings = _trial.interleave(runs, iterations, rounds, step)
    return {
        choice: sum(timings[_label(choice) + kind].median for kind in ("", ", zeros")) / 2
        for choice in tried
    }


def _ranks(mesh: Mesh, axis_name: _mesh.AxisName) -> int:
    return math.prod(mesh.shape[name] for name in _mesh.as_tuple(axis_name))


def key_of(op: str, m: int, n: int, k: int, ranks: int, dtype: Any, transpose_rhs: bool) -> Key:
    """The key of a call of global sizes."""
    sums = op in ("matmul_reduce_scatter", "matmul_all_reduce")
    split = {"m": m, "k": k} if sums else {"m": m, "n": n}
    for name, size in split.items():
        if size % ranks != 0:
            raise ValueError(f"jflux.tune: {name}={size} is not a multiple of the {ranks} ranks")
    if sums:
        k //= ranks
    else:
        n //= ranks
    return _tuning.key_of(op, ranks, m // ranks, n, k, dtype, transpose_rhs)


_MOST_IN_ONE_SWEEP = 4096  # rows


def candidates(key: Key, sm_count: int, link_gbps: float = 0) -> list[Choice]:
    """What is worth a try: every compiled tile, with the heuristic's group and those around it. The
    heuristic's own choice comes first."""
    first = _tuning.heuristic(key, sm_count, link_gbps)
    found = [first]
    if key.op == "matmul_all_reduce" and are_few_rows(key.rows, key.n, key.ranks):
        return [first, dataclasses.replace(first, splits=1 if first.splits == 2 else 2)]
    for tile in _tuning.compiled():
        rows = CUDA_TILE_ROWS * tile.cluster_m
        most = -(-key.rows // rows)
        if tile.cluster_m > 1 and key.rows <= CUDA_TILE_ROWS:
            continue  # half of each cluster would compute nothing
        near = max(1, first.group_m * first.cluster_m // tile.cluster_m)
        groups = {near // 2, near, 2 * near, min(16, most)} - {0}
        # One sweep of all rows; with one row of tiles every sweep is.
        if 1 < most and key.rows <= _MOST_IN_ONE_SWEEP:
            groups.add(0)
        for group in sorted(groups):
            choice = dataclasses.replace(tile, group_m=group)
            if group <= max(1, min(16, most)) and choice not in found:
                found.append(choice)
    if key.rows <= CUDA_TILE_ROWS:
        possible = [splits for splits in (2, 4) if splits <= _jflux.most_splits(key.op)]
        sharing = (Choice(128, 1, 1, splits) for splits in possible)
        found += [c for c in sharing if c not in found]
    return found


def pick(seconds: Mapping[Choice | str, float]) -> Choice | str:
    """The fastest; "apart" only if it is faster than every kernel."""
    return min(seconds, key=lambda choice: (seconds[choice], choice == APART))


def _label(choice: Choice | str) -> str:
    if isinstance(choice, str):
        return choice
    split = f" split {choice.splits}" if choice.splits > 1 else ""
    return f"tile 128x{choice.tile_n} cluster {choice.cluster_m} group {choice.group_m}{split}"
