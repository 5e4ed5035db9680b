"""``jflux.explain``: which path each call of a function takes, and why."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from .. import _config
from .plans import Plan


@dataclasses.dataclass(frozen=True)
class Explained:
    """One call of an op in a lowered function.

    Attributes:
      op: its name.
      operands, results: shapes and types of one rank's, such as "bfloat16[1024, 4096]".
      plan: the path that the call takes, its configuration, and the reason in words.
    """

    op: str
    operands: tuple[str, ...]
    results: tuple[str, ...]
    plan: Plan

    def __str__(self) -> str:
        lines = [f"{self.op}  {', '.join(self.operands)} -> {', '.join(self.results)}"]
        lines.append(f"  path    {self.plan.path}")
        if "tile_n" in self.plan.config:  # of other ops the reason says all
            c = self.plan.config
            sends = self.plan.workspace_bytes > 0
            senders = f", {self.plan.senders or 'all'} senders" if sends else ""
            lines.append(
                f"  config  tiles 128 x {c['tile_n']}, clusters of {c['cluster_m']}, raster groups "
                f"of {c['group_m'] or 'all'} rows of clusters, k in {c['splits']}{senders}"
            )
        if self.plan.workspace_bytes:
            lines.append(f"  heap    {self.plan.workspace_bytes / (1 << 20):.2f} MiB per rank")
        lines.append(f"  reason  {self.plan.reason}")
        return "\n".join(lines)


class Explanation(tuple[Explained, ...]):
    """The calls of a function, in the order in which they are lowered. Prints as a report."""

    def __str__(self) -> str:
        if not self:
            return "no call of a jflux op"
        return "\n".join(str(call) for call in self)

    __repr__ = __str__  # what a session or a notebook shows


def explain(f: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Which path each call of jflux's ops in ``f(*args, **kwargs)`` takes, and why: data that
    prints as a report. `f` is lowered. Nothing runs, and no compiled program is used or kept.

    Equal calls in a function that is jitted inside `f`, or in the body of a loop, are lowered, and
    listed, once.

    Args:
      f: a function that `jax.jit` takes, jitted or not.
      *args, **kwargs: its arguments: arrays, or `jax.ShapeDtypeStruct` with shardings.

    Returns:
      The calls: an :class:`Explanation`, a tuple of :class:`Explained`.

    Raises:
      TypeError: `f` is not a function that can be jitted.

    Examples:
      >>> mesh = jax.sharding.Mesh(jax.devices(), "tp")
      >>> f = functools.partial(jflux.all_gather_matmul, axis_name="tp", mesh=mesh)
      >>> (call,) = jflux.explain(f, jnp.ones((64, 32)), jnp.ones((32, 128)))
      >>> call.op, str(call.plan.path)
      ('all_gather_matmul', 'fused')
    """
    if not callable(f):
        raise TypeError(
            f"jflux.explain: f must be a function that jax.jit takes, got {type(f).__name__}"
        )
    lower = getattr(f, "lower", None)
    if lower is None:
        lower = jax.jit(f).lower
    recorder = _Recorder()
    with _config.override(recorder=recorder):  # another key of JAX's caches: it lowers anew
        try:
            lower(*args, **kwargs)
        except jax.errors.ConcretizationTypeError as error:
            raise TypeError(
                "jflux.explain: f cannot be jitted, since it needs the values of its arguments; "
                f"explain the jitted parts of it: {error}"
            ) from error
    return Explanation(recorder.calls)


class _Recorder:
    """Collects the calls of one lowering. Equal to itself alone, as keys of caches must be."""

    def __init__(self) -> None:
        self.calls: list[Explained] = []


def _describe(aval: Any) -> str:
    return f"{aval.dtype.name}[{', '.join(map(str, aval.shape))}]"


def describe(avals: Sequence[Any]) -> str:
    """Shapes and types of one rank's arrays, in words."""
    return ", ".join(map(_describe, avals))


def note(op: str, operands: Sequence[Any], results: Sequence[Any], plan: Plan) -> None:
    """Tells an `explain` that runs in this thread of a call."""
    recorder = _config.config.current().recorder
    if recorder is not None:
        recorder.calls.append(
            Explained(op, tuple(map(_describe, operands)), tuple(map(_describe, results)), plan)
        )


def note_once(op: str, operands: Sequence[Any], results: Sequence[Any], plan: Plan) -> None:
    """:func:`note` of a call that runs as several ops, and is known where it is traced: equal
    calls are noted once, since JAX may trace one several times."""
    recorder = _config.config.current().recorder
    if recorder is not None:
        note(op, operands, results, plan)
        if recorder.calls[-1] in recorder.calls[:-1]:
            recorder.calls.pop()
