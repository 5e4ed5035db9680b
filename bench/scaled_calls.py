"""The contestants of :mod:`bench.scaled`, as functions of one rank, and their operands."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jflux
from jflux._ops._quantize import largest
from jflux._tools import trials
from jflux._tools.trials import Trial

from .collectives import CAPTURED
from .shapes import AG, RS, Shape

E4M3 = jnp.float8_e4m3fn
MATMUL = "matmul"  # of one rank

#: Type, and what shares a scale of x [m, k] and of w [n, k].
FORMS: dict[str, tuple[Any, tuple[int, int], tuple[int, int]]] = {
    "tensor": (E4M3, (-1, -1), (-1, -1)),
    "row": (E4M3, (1, -1), (1, -1)),
    "block": (E4M3, (1, 128), (128, 128)),
    "int8": (jnp.int8, (1, -1), (1, -1)),
}

# ---- What a user could write ---------------------------------------------------------------------


def by_hand(x: jax.Array, dtype: Any, rows: bool) -> jflux.Scaled:
    """x [m, k], quantised by a scale for each row, or one over all ranks."""
    wide = x.astype(jnp.float32)
    most = jnp.max(jnp.abs(wide), 1, keepdims=True) if rows else lax.pmax(_most(wide), "tp")
    scale = most / largest(np.dtype(dtype))
    return jflux.Scaled((wide / scale).astype(dtype), scale)


def _most(x: jax.Array) -> jax.Array:
    return jnp.max(jnp.abs(x), keepdims=True)


def plain(x: jflux.Scaled, w: jflux.Scaled) -> jax.Array:
    """x [m, k], w [n, k]: a product of 8 bits by 8 bits, and its scales."""
    whole = x.dtype == jnp.int8
    y = lax.dot_general(
        x.values, w.values, (((1,), (1,)), ((), ())),
        preferred_element_type=jnp.int32 if whole else jnp.bfloat16,
    )  # fmt: skip
    return (y.astype(jnp.float32) * x.scale * w.scale.T).astype(jnp.bfloat16)


def pattern(x: jflux.Scaled, w: jflux.Scaled) -> jax.Array:
    """The same by scales of tensors, written as XLA matches it."""
    wide = [a.values.astype(jnp.bfloat16) * a.scale[0, 0].astype(jnp.bfloat16) for a in (x, w)]
    return lax.dot_general(*wide, (((1,), (1,)), ((), ())))


def gathered(x: Any) -> Any:
    """All ranks' rows, and their scales if each has one."""
    if not isinstance(x, jflux.Scaled):
        return lax.all_gather(x, "tp", tiled=True)
    return jflux.Scaled(gathered(x.values), x.scale if x.scale.shape[0] == 1 else gathered(x.scale))


def scattered(y: jax.Array) -> jax.Array:
    return lax.psum_scatter(y, "tp", scatter_dimension=0, tiled=True)


def sequence(op: str, product: Callable[..., Any]) -> Callable[..., Any]:
    """The product of (x, w) of one rank, and what travels before or after it."""
    if op == AG:
        return lambda x, w: product(gathered(x), w)
    return (lambda x, w: scattered(product(x, w))) if op == RS else product


# ---- Contestants ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Contestant:
    """A function of one rank's (x, w).

    Attributes:
      form: of the operands: one of FORMS, and with " alone" what its product sees; "16" ([k, n]
        weights); or "sent", what travels.
      quantizes: x is bfloat16, and w of this form.
      options: of XLA.
    """

    f: Callable[[Any, Any], jax.Array]
    form: str
    quantizes: bool = False
    options: dict[str, Any] | None = None


def contestants(op: str, ranks: int) -> dict[str, Contestant]:
    """By name, in the table's order."""
    ours = jflux.matmul if op == MATMUL else Trial(Shape(op, 0, 0, 0).spec).function()
    ours = functools.partial(ours, transpose_rhs=True)
    found, alone = {}, " alone" if ranks > 1 else ""
    if ranks > 1:
        trial = Trial(Shape(op, 0, 0, 0).spec)
        in_order = sequence(op, plain)
        found |= {
            "S16": Contestant(trial.function(reference=True), "16"),
            "J16": Contestant(trial.function(), "16"),
            "S8": Contestant(in_order, "tensor"),
            "S8 captured": Contestant(in_order, "tensor", options=CAPTURED),
            "S8 pattern": Contestant(sequence(op, pattern), "tensor"),
            "S8q": Contestant(lambda x, w: in_order(by_hand(x, E4M3, False), w), "tensor", True),
            "S8row": Contestant(lambda x, w: in_order(by_hand(x, E4M3, True), w), "row", True),
            "S8 int8": Contestant(in_order, "int8"),
            "C8": Contestant(lambda x, w: gathered(x) if op == AG else scattered(x), "sent"),
            "C8 jflux": Contestant(lambda x, w: _sent_by_jflux(op, x), "sent"),
        }
    else:
        found["S16"] = Contestant(lambda x, w: x @ w, "16")
    found |= {
        "G8": Contestant(plain, f"tensor{alone}"),
        "G8 pattern": Contestant(pattern, f"tensor{alone}"),
        "G8 int8": Contestant(plain, f"int8{alone}"),
    }
    for form, (dtype, block, _) in FORMS.items():
        found[f"J8 {form}"] = Contestant(ours, form)
        if form in ("row", "block"):
            quantize = functools.partial(jflux.quantize, dtype=dtype, block=block)
            found[f"J8q {form}"] = Contestant(
                lambda x, w, quantize=quantize: ours(quantize(x), w), form, True
            )
    return found


def _sent_by_jflux(op: str, x: jax.Array) -> jax.Array:
    if op == AG:
        return jflux.all_gather(x, axis_name="tp", tiled=True)
    return jflux.reduce_scatter(x, axis_name="tp", scatter_dimension=0, tiled=True)


class Data:
    """Operands of one shape over a mesh, each made when it is asked for first."""

    def __init__(self, shape: Shape, mesh: Mesh) -> None:
        self.shape, self.mesh, self.ranks = shape, mesh, mesh.devices.size
        if shape.op == MATMUL:
            self.x_spec = self.w_spec = self.y_spec = P(None, None)
        else:
            self.x_spec, self.w_spec, self.y_spec = Trial(shape.spec, transpose_rhs=True).partition
        wide = functools.partial(trials.normal, mesh, dtype=jnp.bfloat16)
        m, n, k = shape.m, shape.n, shape.k
        self.x = wide(self.x_spec, (m, k), seed=1)
        self.w = wide(self.w_spec, (n, k), seed=2, scale=float(k**-0.5))
        self._made: dict[str, tuple[Any, Any]] = {}

    def run(self, f: Callable[..., Any], in_specs: Any, out_specs: Any, *args: Any) -> Any:
        """Once, which is no reason to try several algorithms."""
        options: dict[str, str | bool] = {"xla_gpu_autotune_level": "0"}
        return trials.compiled(f, self.mesh, in_specs, out_specs, *args, options=options)(*args)

    def of(self, contestant: Contestant) -> tuple[Any, Any, Any, Any, P]:
        """(x, w, x's sharding, w's, y's)."""
        form, stacked = contestant.form, P("tp", None)
        if form not in self._made:
            self._made[form] = self._make(form)
        x, w = self._made[form]
        x_spec, w_spec, y_spec = self.x_spec, self.w_spec, self.y_spec
        if form == "16":
            w_spec = P(*w_spec[::-1])
        elif form.endswith(("alone", "sent")):
            y_spec = stacked
            x_spec = x_spec if form != "sent" and self.shape.op == RS else stacked
        if contestant.quantizes:
            x = self.x
        return x, w, x_spec, w_spec, y_spec

    def _make(self, form: str) -> tuple[Any, Any]:
        if form == "16":
            return self.x, jnp.swapaxes(self.w, 0, 1)
        if form == "sent":
            x, w = self.scaled("tensor")
            if self.shape.op == AG:  # as bytes: not every collective has types of 8-bit floats
                return lax.bitcast_convert_type(x.values, jnp.int8), w
            size = (self.ranks * self.shape.m, self.shape.n)
            return trials.normal(self.mesh, P("tp", None), size, jnp.bfloat16, seed=3), w
        if form.endswith("alone"):
            x, w = self.scaled(form.removesuffix(" alone"))
            if self.shape.op == AG:
                x = self.run(gathered, self.x_spec, P("tp", None), x)
            return x, w
        return self.scaled(form)

    def scaled(self, form: str) -> tuple[jflux.Scaled, jflux.Scaled]:
        """Each rank's part, quantised by itself; by tensor all ranks' x have one scale. A scale
        that ranks do not share has an entry for each of them in the global array."""
        if form not in self._made:
            dtype, x_block, w_block = FORMS[form]
            one_scale = form == "tensor" and self.ranks > 1

            def quantized(x: jax.Array, w: jax.Array) -> tuple[Any, Any]:
                scale = by_hand(x, dtype, False).scale if one_scale else None
                return (
                    jflux.quantize(x, dtype, block=x_block, scale=scale),
                    jflux.quantize(w, dtype, block=w_block),
                )

            specs = self.x_spec, self.w_spec
            self._made[form] = self.run(quantized, specs, specs, self.x, self.w)
        return self._made[form]

    def wanted(self, form: str) -> jax.Array:
        """The float32 product of the operands dequantised."""

        def product(x: Any, w: Any) -> jax.Array:
            wide = [a.dequantize() for a in (x, w)]
            return lax.dot_general(*wide, (((1,), (1,)), ((), ())), precision="highest")

        x, w = self.scaled(form)
        f = sequence(self.shape.op, product)
        return self.run(f, (self.x_spec, self.w_spec), self.y_spec, x, w)

    def error(self, y: jax.Array, want: jax.Array) -> float:
        """The largest, in units of bfloat16's rounding of |y| + 1. Rows that a loop has changed do
        not count: the first of each rank's x."""
        step = self.shape.m // self.ranks

        def largest_error(y: jax.Array, want: jax.Array) -> jax.Array:
            found = jnp.abs(y.astype(jnp.float32) - want) / (2.0**-8 * (jnp.abs(want) + 1))
            changed = jnp.arange(y.shape[0]) % step == 0
            return jnp.max(jnp.where(changed[:, None], 0, found)).reshape(1)

        specs = (self.y_spec, self.y_spec)
        return float(np.max(self.run(largest_error, specs, P("tp"), y, want)))
