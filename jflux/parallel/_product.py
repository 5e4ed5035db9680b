"""Algorithm 1 of arXiv 2305.13525: a product on an x by y by z grid, forward and backward.

Of the rank (i, j, k) along (x, y, z), with W split further over z into W^::

    forward    W_ji = all-gather_z(W^_ji)             [k/y, n/x]
               O_ki = all-reduce_y(I_kj W_ji)         [m/(data z), n/x]

    backward   dI_kj = all-reduce_x(dO_ki W_ji^T)     [m/(data z), k/y]
               dW^_ji = reduce-scatter_z(I_kj^T dO_ki)    [k/(y z), n/x]

and the sum of dW^ over data, which `shard_map` adds because W^ does not vary over it.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from .._ops import _lax
from .._ops._collective import Collective
from .._ranks.meshes import vary
from ._scheme import DEFAULT, Scheme, all_reduce, together, tracks_vma

#: The name that `jax.checkpoint` policies know gathered weights by.
WEIGHT = "jflux_weight"


class Local(Protocol):
    """One rank's part of a product: bilinear in I and W, with W's rows in dimension -2."""

    def __call__(self, i: jax.Array, w: jax.Array) -> jax.Array: ...

    def summed(self, scheme: Scheme, i: jax.Array, w: jax.Array) -> jax.Array:
        """I W, summed over y."""

    def input_gradient(self, scheme: Scheme, i: Any, w: jax.Array, do: jax.Array) -> jax.Array:
        """dO W^T, summed over x."""

    def weight_gradient(self, i: jax.Array, w: Any, do: jax.Array) -> jax.Array:
        """I^T dO, of this rank's rows."""


@dataclasses.dataclass(frozen=True)
class Dense:
    """[..., k] times [k, n]."""

    precision: Any = None

    def __call__(self, i: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.matmul(i, w, precision=self.precision)

    def summed(self, scheme: Scheme, i: jax.Array, w: jax.Array) -> jax.Array:
        names = scheme.names("y")
        if not names:
            return self(i, w)
        return scheme.ops.matmul_all_reduce(i, w, axis_name=names, precision=self.precision)

    def input_gradient(self, scheme: Scheme, i: Any, w: jax.Array, do: jax.Array) -> jax.Array:
        names = scheme.names("x")
        if not names:
            return self(do, w.T)
        return scheme.ops.matmul_all_reduce(
            do, w, axis_name=names, transpose_rhs=True, precision=self.precision
        )

    def weight_gradient(self, i: jax.Array, w: Any, do: jax.Array) -> jax.Array:
        rows = tuple(range(i.ndim - 1))
        return _lax.dot_general(i, do, ((rows, rows), ((), ())), precision=self.precision)


@dataclasses.dataclass(frozen=True)
class Convolution:
    """[batch, *space, k] with [*taps, k, n]: `lax.conv_general_dilated`'s options."""

    strides: tuple[int, ...]
    padding: Any
    input_dilation: tuple[int, ...]
    kernel_dilation: tuple[int, ...]
    precision: Any = None

    def __call__(self, i: jax.Array, w: jax.Array) -> jax.Array:
        space = tuple(range(1, i.ndim - 1))
        last = i.ndim - 1
        taps = tuple(range(w.ndim - 2))
        return lax.conv_general_dilated(
            i, w, self.strides, self.padding, self.input_dilation, self.kernel_dilation,
            dimension_numbers=lax.ConvDimensionNumbers(
                (0, last, *space), (w.ndim - 1, w.ndim - 2, *taps), (0, last, *space)
            ),
            precision=self.precision,
        )  # fmt: skip

    def summed(self, scheme: Scheme, i: jax.Array, w: jax.Array) -> jax.Array:
        return all_reduce(scheme, self(i, w), "y")

    def input_gradient(self, scheme: Scheme, i: Any, w: jax.Array, do: jax.Array) -> jax.Array:
        varying = jax.typeof(w).manual_axis_type.varying
        _, transpose = jax.vjp(lambda i: self(i, w), vary(i, tuple(sorted(varying, key=str))))
        return all_reduce(scheme, transpose(do)[0], "x")

    def weight_gradient(self, i: jax.Array, w: Any, do: jax.Array) -> jax.Array:
        return jax.vjp(lambda w: self(i, w), w)[1](do)[0]


def gather(w: jax.Array, *, scheme: Scheme = DEFAULT, dimension: int = -2) -> jax.Array:
    """A weight, of which each rank along z has a block: [..., k/(y z), n/x] -> [..., k/y, n/x].

    The layers of this module do so themselves, unless it has been done.

    Args:
      w: one rank's part.
      scheme: whose z is gathered.
      dimension: where the blocks lie side by side.
    """
    names = scheme.names("z")
    if names:
        w = Collective("all_gather", concat=dimension % w.ndim).lax(w, names)
    return checkpoint_name(w, WEIGHT)


def scatter(dw: jax.Array, *, scheme: Scheme, dimension: int = -2) -> jax.Array:
    """The sum over z of a gathered weight's gradient, each rank its block: `gather`, transposed."""
    names = scheme.names("z")
    if not names:
        return dw
    return Collective("reduce_scatter", split=dimension % dw.ndim).lax(dw, names)


def product(local: Local, scheme: Scheme, i: jax.Array, w: jax.Array, gathered: bool) -> jax.Array:
    """O of I and W^, or of I and W if that is gathered already."""
    if not tracks_vma(scheme):
        return local.summed(scheme, i, w if gathered else gather(w, scheme=scheme))
    others = jax.typeof(i).manual_axis_type.varying | jax.typeof(w).manual_axis_type.varying
    mine = scheme.names("data", "z", "y", "x")
    others = tuple(sorted(others.difference(mine), key=str))
    i = vary(_same_along_x(scheme, i), (*scheme.names("data", "z", "y"), *others))
    w = vary(w, (*mine, *others))
    return _product(local, scheme, gathered, i, w)


def check_same(what: str, scheme: Scheme, roles: tuple[str, ...], x: jax.Array) -> None:
    """Raises for an input that differs along axes where a layer takes it to be the same. (Where
    types do not tell, nothing can.)"""
    varying = jax.typeof(x).manual_axis_type.varying
    different = [n for n in scheme.names(*roles) if n in varying and lax.axis_size(n) > 1]
    if different:
        raise ValueError(
            f"jflux.parallel: the input of this {what} must be the same on all ranks along "
            f"{different}. Has the layer before it the same scheme? Then one of them takes "
            "scheme.transposed"
        )


def _same_along_x(scheme: Scheme, i: jax.Array) -> jax.Array:
    varying = jax.typeof(i).manual_axis_type.varying
    different = tuple(name for name in scheme.names("x") if name in varying)
    check_same("product", scheme, ("x",), i)
    return _lax.psum(i, different) if different else i  # over one rank: of another type


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _product(local: Local, scheme: Scheme, gathered: bool, i: Any, w: Any) -> jax.Array:
    return local.summed(scheme, i, w if gathered else gather(w, scheme=scheme))


def _forward(local: Local, scheme: Scheme, gathered: bool, i: Any, w: Any) -> Any:
    w = w if gathered else gather(w, scheme=scheme)
    return local.summed(scheme, i, w), (i, w)


def _backward(local: Local, scheme: Scheme, gathered: bool, residuals: Any, do: Any) -> Any:
    i, w = residuals
    # dO is the same along y; what it is multiplied with is not.
    wide = vary(do, scheme.names("y"))
    di = local.input_gradient(scheme, i, w, wide)
    if not scheme.overlap.all_reduce:
        di, i, wide = together((di, i, wide))
    dw = local.weight_gradient(i, w, wide)
    if gathered:
        return di, dw
    dw = scatter(dw, scheme=scheme)
    if not scheme.overlap.reduce_scatter:
        di, dw = together((di, dw))
    return di, dw


_product.defvjp(_forward, _backward)
