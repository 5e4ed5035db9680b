"""What an op does to its products before it rounds them: bias, activation, gating."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .. import _native
from .._call.forms import ShapeDtype
from . import _lax, _scaled
from ._lax import several
from ._scaled import BLOCK, Scaled, Scales

if TYPE_CHECKING:
    from ._recipe import Format


@jax.custom_jvp
def _normal_cdf(x: jax.Array) -> jax.Array:
    return 0.5 * lax.erfc(-x * np.sqrt(0.5).astype(x.dtype))


# erfc's own derivative fails in shard_map under JAX 0.12.
@_normal_cdf.defjvp
def _normal_cdf_jvp(primals: Any, tangents: Any) -> Any:
    (x,), (dx,) = primals, tangents
    density = jnp.exp(-x * x / 2) * np.sqrt(0.5 / np.pi).astype(x.dtype)
    return _normal_cdf(x), density * dx


#: The names that `jax.checkpoint` policies know what an activation is applied to by, and what it
#: returns.
PREACTIVATION = "jflux_preactivation"
ACTIVATED = "jflux_activated"

#: By name; "gelu" is the exact one, "gelu_tanh" its usual approximation. Those of
#: cc/core/activation.h.
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": lambda x: x * _normal_cdf(x),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
}


@dataclasses.dataclass(frozen=True)
class Epilogue:
    """``y_i = activation(product_i + bias_i)``, or, gated, one
    ``y = activation(product_0 + bias_0) * (product_1 + bias_1)``.

    Its operands are the biases, and, where products have scales, that of their rows and that of
    each one's columns (`_scaled.of_rows`, `_scaled.of_columns`).

    Attributes:
      biased: which products have a bias.
      scales: of the products' operands.
      quantize: how each y, which is computed in float32, is quantised: then it is two results,
        values and scale.
    """

    biased: tuple[bool, ...]
    activation: str | None = None
    gated: bool = False
    scales: Scales = Scales.NONE
    quantize: Format | None = None

    @property
    def results(self) -> int:
        """How many results all y are."""
        count = 1 if self.gated else len(self.biased)
        return count if self.quantize is None else 2 * count

    def shapes(self, sums: Sequence[ShapeDtype]) -> list[ShapeDtype]:
        """Of all y, from those of the sums."""
        if self.quantize is None:
            return list(sums[: self.results])
        of_each = (self.quantize.shapes(shape) for shape, _ in sums[: self.results // 2])
        return [one for both in of_each for one in both]

    def quantized(self, ys: Sequence[jax.Array]) -> list[jax.Array]:
        """The results of these y."""
        if self.quantize is None:
            return list(ys)
        each = (self.quantize.quantize(y) for y in ys)
        return [array for y in each for array in (y.values, y.scale)]

    def as_scaled(self, results: Sequence[Any]) -> list[Any]:
        """All y of their results."""
        if self.quantize is None:
            return list(results)
        pairs = zip(results[::2], results[1::2], strict=True)
        return [Scaled(values, scale) for values, scale in pairs]

    def why_quantized_after(
        self, x: Any, ws: Sequence[Any], rows: int, arch: int = _native.HOPPER_ARCH
    ) -> str | None:
        """Why no kernel that multiplies these quantises its results, of so many rows, or None.
        `arch`: of the kernels' code."""
        if self.quantize is None:
            return None
        if arch < _native.HOPPER_ARCH:
            return "only Hopper's kernels quantise their results"
        if rows <= _native.TILE_ROWS:  # measured: docs/experiments/0056
            return f"{rows} rows take less time in narrow tiles, and `quantize` after them"
        of, block = np.dtype(self.quantize.dtype), self.quantize.block
        types = {np.dtype(a.dtype) for a in (x, *ws)} | {of}
        if block != (1, BLOCK) or types != {np.dtype(jnp.float8_e4m3fn)}:
            names = ", ".join(np.dtype(a.dtype).name for a in (x, *ws))
            return (
                f"kernels that quantise their results make float8_e4m3fn in blocks of (1, {BLOCK}) "
                f"of operands of that type, not {of.name} in blocks of {block} of {names}"
            )
        if self.scales is Scales.OF_VECTORS:
            return f"kernels that quantise take blocks of k of w only for {BLOCK} columns each"
        return None

    @property
    def number(self) -> int:
        """The activation's, in cc/core/activation.h."""
        return _native.number_of(self.activation, _native.ACTIVATIONS)

    def attributes(self, sums: bool = False) -> dict[str, Any]:
        """The FFI attributes of several weights (cc/ops/all_gather_matmul/weights_ffi.h). `sums`:
        whether what the activation is applied to is a result."""
        return {
            "activation": np.int64(self.number),
            "biased": np.array(self.biased, np.int64),
            "gated": bool(self.gated),
            "quantize": np.int64(0 if self.quantize is None else 1 + self.quantize.power_of_two),
            "scales": np.int64(self.scales.in_kernels),
            "sums": sums,
        }

    def before(self) -> Epilogue | None:
        """The same without the activation."""
        needed = any(self.biased) or self.scales
        return Epilogue(self.biased, scales=self.scales) if needed else None

    def exact(self, out: np.dtype) -> np.dtype:
        """The type of products before it: that of y, or that of sums if there are scales."""
        return sum_dtype(out) if self.scales else out

    def split(self, operands: Sequence[Any]) -> tuple[Sequence[Any], Any, Sequence[Any]]:
        """(biases, scale of rows, scales of columns) of its operands."""
        biases = sum(self.biased)
        if not self.scales:
            return operands[:biases], None, [None] * len(self.biased)
        return operands[:biases], operands[biases], operands[biases + 1 :]


def of_each(bias: Any, products: int) -> tuple[Any, ...]:
    """The bias of each product, as calls are given them: None for none."""
    return (None,) * products if bias is None else several(bias)


def constants(biases: Sequence[Any]) -> tuple[Any, ...]:
    """The bias of each product of results that are quantised: to differentiate one raises."""
    given = _constants(*(b for b in biases if b is not None))
    rest = iter(given)
    return tuple(None if b is None else next(rest) for b in biases)


@_scaled.without_derivative(
    "jflux: a result that is quantised has no derivative: where biases are constants, pass "
    "jax.lax.stop_gradient of them"
)
def _constants(*biases: jax.Array) -> tuple[jax.Array, ...]:
    return biases


def check(
    op: str, products: int, bias: Any, activation: str | None, gated: bool
) -> Epilogue | None:
    """The epilogue of a call with so many weights, if it has one; raises for one that makes no
    sense. `bias` is a sequence."""
    if activation is not None and activation not in ACTIVATIONS:
        raise ValueError(
            f"jflux.{op}: {activation=} must be None or one of {', '.join(ACTIVATIONS)}"
        )
    if gated and (products != 2 or activation is None):
        raise ValueError(
            f"jflux.{op}: gated=True needs an activation and two weights (the gate's and the "
            f"other's), got {activation=} and {products}"
        )
    if len(bias) != products:
        raise ValueError(
            f"jflux.{op}: {products} weights need as many biases (None for none), got {len(bias)}"
        )
    biased = tuple(b is not None for b in bias)
    if not any(biased) and activation is None:
        return None
    return Epilogue(biased, activation, gated)


def check_shapes(op: str, columns: Sequence[int], bias: Sequence[Any], gated: bool) -> None:
    """Raises for biases and gates that do not fit the products, of so many columns each."""
    for n, b in zip(columns, bias, strict=True):
        if b is not None and tuple(b.shape) != (n,):
            raise ValueError(
                f"jflux.{op}: a bias has shape {tuple(b.shape)}, its product has {n} columns "
                "on each rank"
            )
    if gated and columns[0] != columns[1]:
        raise ValueError(f"jflux.{op}: gated=True, but the weights have {columns} columns")


def sum_dtype(out: np.dtype) -> np.dtype:
    """The type that epilogues compute in, and other sums of this type: float32, or float64."""
    if out.itemsize == 1:  # JAX promotes no 8-bit float, and nothing smaller
        return np.dtype(np.float32)
    with jax.numpy_dtype_promotion("standard"):  # a user's "strict" is for the user's arrays
        return jnp.promote_types(out, jnp.float32)


def apply(
    epilogue: Epilogue, products: Sequence[jax.Array], operands: Sequence[jax.Array], out: np.dtype
) -> tuple[list[jax.Array], list[jax.Array]]:
    """(all y, all sums of a product and its bias), rounded to `out`, y perhaps quantised. Scales of
    blocks are in the products already."""
    wide = sum_dtype(out)
    biases, of_rows, of_columns = epilogue.split(operands)
    rest, sums = iter(biases), []
    for product, biased, columns in zip(products, epilogue.biased, of_columns, strict=True):
        total = product.astype(wide)
        if epilogue.scales and not epilogue.scales.has_blocks:
            total = total * of_rows * in_rows(columns, product)
        if biased:
            total += in_rows(next(rest).astype(wide), product)
        sums.append(total)
    ys = [y.astype(out) for y in _activate(epilogue, sums)]
    return epilogue.quantized(ys), [s.astype(out) for s in sums]


def of_products(
    x: jax.Array,
    ws: Sequence[jax.Array],
    operands: Sequence[jax.Array],
    epilogue: Epilogue | None,
    out: np.dtype,
    precision: lax.PrecisionLike,
    transpose_rhs: bool,
) -> tuple[list[jax.Array], list[jax.Array]]:
    """(all y, all sums) of an x on one rank and several w, in `lax`."""
    if epilogue is None:
        ys = [_lax.matmul(x, w, out, precision, transpose_rhs) for w in ws]
        return ys, ys
    _, of_rows, of_columns = epilogue.split(operands)
    if epilogue.scales.has_blocks:
        products = [
            _scaled.product(x, w, of_rows, scale, precision, transpose_rhs)
            for w, scale in zip(ws, of_columns, strict=True)
        ]
    else:
        exact = epilogue.exact(out)
        products = [_lax.matmul(x, w, exact, precision, transpose_rhs) for w in ws]
    return apply(epilogue, products, operands, out)


def tangents(
    epilogue: Epilogue, sums: Sequence[jax.Array], dsums: Sequence[jax.Array]
) -> list[jax.Array]:
    """Those of all y, in the type of the sums, from those of the sums."""
    out, wide = sums[0].dtype, sum_dtype(sums[0].dtype)
    primals, moving = ([a.astype(wide) for a in each] for each in (sums, dsums))
    _, dys = jax.jvp(lambda sums: _activate(epilogue, sums), (primals,), (moving,))
    return [dy.astype(out) for dy in dys]


def gradient(
    epilogue: Epilogue, sums: Sequence[jax.Array], dys: Sequence[jax.Array | None]
) -> list[jax.Array]:
    """The gradient of each sum, in its type. A dy that is None is zero."""
    wide = sum_dtype(sums[0].dtype)
    ys, vjp = jax.vjp(lambda sums: _activate(epilogue, sums), [s.astype(wide) for s in sums])
    (dsums,) = vjp(
        [
            jnp.zeros_like(y) if dy is None else dy.astype(wide)
            for y, dy in zip(ys, dys, strict=True)
        ]
    )
    return [d.astype(s.dtype) for d, s in zip(dsums, sums, strict=True)]


def bias_gradients(
    epilogue: Epilogue | None, dsums: Sequence[Any], types: Sequence[Any]
) -> list[jax.Array | None]:
    """Those of its operands, of these types: of biases, sums over all rows; none of scales. What is
    None is zero, or not wanted."""
    if epilogue is None:
        return []
    mine = [d for d, biased in zip(dsums, epilogue.biased, strict=True) if biased]
    of_biases = [
        None if d is None or b is None else sum_of_rows(d).astype(b.dtype)
        for d, b in zip(mine, types[: len(mine)], strict=True)
    ]
    return of_biases + [None] * (len(types) - len(mine))


def sum_of_rows(d: jax.Array) -> jax.Array:
    """[..., n] -> [n], in the type that epilogues compute in."""
    return jnp.sum(d, tuple(range(d.ndim - 1)), dtype=sum_dtype(d.dtype))


def check_added(op: str, shape: Sequence[int], bias: Any, residual: Any) -> None:
    """Raises for a bias or a residual that does not fit y."""
    if bias is not None and tuple(bias.shape) != (shape[-1],):
        raise ValueError(
            f"jflux.{op}: the bias has shape {tuple(bias.shape)}, y has {shape[-1]} columns "
            "on each rank"
        )
    if residual is not None and tuple(residual.shape) != tuple(shape):
        raise ValueError(
            f"jflux.{op}: the residual has shape {tuple(residual.shape)}, y has {tuple(shape)} "
            "on each rank"
        )


def in_rows(a: jax.Array, y: jax.Array) -> jax.Array:
    """An array of y's last dimensions, with as many dimensions as y: JAX may be told to refuse what
    NumPy does (``jax_numpy_rank_promotion``)."""
    return jnp.expand_dims(a, tuple(range(y.ndim - a.ndim)))


def add(y: jax.Array, added: Sequence[jax.Array]) -> jax.Array:
    """y and what is added to it, in y's type."""
    if not added:
        return y
    wide = sum_dtype(y.dtype)
    total = y.astype(wide)
    for one in added:
        total += in_rows(one.astype(wide), y)
    return total.astype(y.dtype)


def _activate(epilogue: Epilogue, sums: Sequence[jax.Array]) -> list[jax.Array]:
    if epilogue.activation is None:
        return list(sums)
    activation = ACTIVATIONS[epilogue.activation]
    if epilogue.gated:
        gate, other = sums
        return [activation(gate) * other]
    return [activation(s) for s in sums]
