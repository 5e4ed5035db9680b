"""What a quantised wire costs in precision: the calls of a program, on the arrays that it runs."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ... import _config
from ..._call import explain
from .. import _wire
from .._scaled import BLOCK


@dataclasses.dataclass(frozen=True)
class WireCall:
    """Equal calls of a program, of all ranks and all times that they ran.

    Attributes:
      op, operand, wire, line: which call: its operands' types and where it is in the program.
      times: how often a rank ran it.
      error: of the results, relative, root mean square: |y - exact| / |exact|.
      flushed: the share of the numbers that a rank quantises first, other than zeros, that became
        zeros: those of the operand, and of a product those of its sums.
      not_finite: how many numbers of the results are not finite where the exact ones are.
    """

    op: str
    operand: str
    wire: str
    line: str
    times: int
    error: float
    flushed: float
    not_finite: int


class WireReport(list[WireCall]):
    """The calls, one in a line as a string."""

    def __str__(self) -> str:
        lines = [
            f"{c.op}  {c.operand} in {c.wire}, {c.times} times: error {c.error:.2e}, "
            f"{c.flushed:.2%} flushed to zero, {c.not_finite} not finite  {c.line}".rstrip()
            for c in self
        ]
        return "\n".join(lines) or "no call with a wire"

    __repr__ = __str__


def wire_report(f: Callable[..., Any], *args: Any, **kwargs: Any) -> WireReport:
    """Runs ``f(*args, **kwargs)``, and says of each call with `wire=` what quantising its data has
    done: besides the call itself the exact one runs, and both results are compared.

    Calls of derivatives are not among them. A call with so few bytes that it travels as it is has
    an error of 0.

    Args:
      f: a function of arrays, jitted or not; with ``jax.shard_map`` in it, or called under a mesh.

    Returns:
      A list of :class:`jflux.WireCall`, in the order in which they are traced.

    Raises:
      RuntimeError: inside a function that JAX is tracing.

    Examples:
      >>> mesh = jax.sharding.Mesh(jax.devices()[:2], "tp")
      >>> f = functools.partial(jflux.all_reduce, axis_name="tp", wire="int8")
      >>> f = jax.shard_map(f, mesh=mesh, in_specs=P("tp"), out_specs=P())
      >>> with jflux.config(always=True):
      ...   (call,) = jflux.wire_report(f, jnp.linspace(-1, 1, 512))
      >>> call.op, call.operand, call.times, 0 < call.error < 0.01, call.flushed < 0.01
      ('all_reduce', 'float32[256]', 1, True, True)
    """
    _config.check_not_staging("jflux.wire_report")
    recorder = _Recorder()
    with _config.override(wires=recorder):
        jax.block_until_ready(jax.jit(f)(*args, **kwargs))
        jax.effects_barrier()
    return recorder.report()


# ---- What calls note -----------------------------------------------------------------------------

#: op, operand, wire, line
_Key = tuple[str, str, str, str]


class _Recorder:
    """Sums over ranks and calls, which callbacks of several threads add to."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: dict[_Key, np.ndarray] = {}

    def expect(self, key: _Key) -> None:
        """Gives the calls the order in which they are traced."""
        self._sums.setdefault(key, np.zeros(6))

    def add(self, key: _Key, sums: Any, ranks: int) -> None:
        with self._lock:
            self._sums[key] += np.append(np.asarray(sums, np.float64), 1 / ranks)

    def report(self) -> WireReport:
        return WireReport(
            WireCall(
                *key, times=round(times), error=float(np.sqrt(error / exact)) if exact else 0.0,
                flushed=float(flushed / nonzero) if nonzero else 0.0, not_finite=int(not_finite),
            )
            for key, (error, exact, flushed, nonzero, not_finite, times) in self._sums.items()
        )  # fmt: skip


def is_wanted() -> bool:
    return _config.config.current().wires is not None


def note(
    op: str,
    x: jax.Array,
    wire: str,
    y: jax.Array,
    exact: jax.Array,
    ranks: int,
    operands: Sequence[jax.Array] | None = None,
) -> None:
    """Notes one rank's call, with the result y and what it is without a wire.

    Args:
      x: what is quantised first.
      operands: of the call; by default x.
    """
    recorder = _config.config.current().wires
    key = (op, explain.describe([x] if operands is None else operands), wire, explain.line_now())
    recorder.expect(key)
    x, y, exact = (lax.stop_gradient(a).astype(jnp.float32) for a in (x, y, exact))
    flat = x.ravel()
    blocks = jnp.pad(flat, (0, -flat.size % BLOCK)).reshape(-1, BLOCK)
    values = _wire.format_of(wire).quantize(blocks).dequantize()
    counts = jnp.isfinite(y) & jnp.isfinite(exact)
    sums = [
        jnp.sum(jnp.where(counts, y - exact, 0) ** 2),
        jnp.sum(jnp.where(counts, exact, 0) ** 2),
        jnp.sum((values == 0) & (blocks != 0)),
        jnp.sum(blocks != 0),
        jnp.sum(~jnp.isfinite(y) & jnp.isfinite(exact)),
    ]
    stacked = jnp.stack([a.astype(jnp.float32) for a in sums])
    jax.debug.callback(lambda sums: recorder.add(key, sums, ranks), stacked)
