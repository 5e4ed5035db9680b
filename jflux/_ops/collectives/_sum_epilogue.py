"""The epilogue of a sum over ranks: a residual is added, and rows are normalised and quantised."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad

from ..._call.derivatives import none_if_zero, not_linear
from ..._call.forms import ShapeDtype
from ..._ranks import meshes
from .. import _epilogue, _norm, _quantize
from .._recipe import Format
from .._scaled import Scaled


@dataclasses.dataclass(frozen=True)
class SumEpilogue:
    """What follows a sum over ranks: a residual may be added, and rows may be normalised, and these
    quantised, in blocks of one row. Operands are the residual and the norm's factors, where the
    call has them."""

    residual: bool = False
    norm: str | None = None
    epsilon: float = 0.0
    quantize: Format | None = None

    def shapes(self, shape: tuple[int, ...], dtype: np.dtype) -> list[ShapeDtype]:
        """Of the results of a sum of this shape: it, and its rows normalised, or values and scale
        of these."""
        if self.norm is None:
            return [(shape, dtype)]
        if self.quantize is None:
            return [(shape, dtype)] * 2
        scale = _quantize.scale_shape(shape, self.quantize.block)
        return [(shape, dtype), (shape, self.quantize.dtype), (scale, np.dtype(np.float32))]

    def of_call(self, results: Sequence[jax.Array]) -> Any:
        """What a call returns."""
        y, *normalised = results
        if not normalised:
            return y
        return y, normalised[0] if self.quantize is None else Scaled(*normalised)

    def factors(self, added: Sequence[Any]) -> Sequence[Any]:
        return added[self.residual :]


def check(op: str, shape: Sequence[int], residual: Any, norm: Any, quantize: Any) -> None:
    """Raises for what cannot follow a sum of this shape."""
    if quantize is not None:
        if not isinstance(quantize, Format):
            raise TypeError(
                f"jflux.{op}: quantize must be a jflux.Format, got {type(quantize).__name__}"
            )
        if norm is None:
            raise ValueError(f"jflux.{op}: quantize is for normalised rows, and there is no norm")
        if len(shape) < 2:
            raise ValueError(
                f"jflux.{op}: quantize takes rows [..., rows, columns], and the sum has shape "
                f"{tuple(shape)}"
            )
    if residual is not None and tuple(residual.shape) != tuple(shape):
        raise ValueError(
            f"jflux.{op}: the residual has shape {tuple(residual.shape)}, the sum {tuple(shape)}"
        )
    if norm is not None:
        if not shape:
            raise ValueError(f"jflux.{op}: a norm needs rows, and the sum is a number")
        _norm.check(op, norm, shape[-1])


def quantized_after(call: Any, quantize: Format | None, *args: Any, **options: Any) -> Any:
    """``call(*args, **options)``, of which the rows are quantised after it, if a block has several:
    they may be of other calls of a batch, or of other ranks. Else None."""
    if quantize is None or quantize.block[0] == 1:
        return None
    y, normalised = call(*args, **options)
    return y, quantize.quantize(normalised)


def operands(
    op: str,
    axis_names: tuple[Any, ...],
    residual: Any,
    norm: _norm.Norm | None,
    quantize: Format | None,
) -> tuple[SumEpilogue, list[jax.Array]]:
    """A call's epilogue and its operands, which must be the same on all ranks of the axes."""
    added = [] if residual is None else [jnp.asarray(residual)]
    added += [] if norm is None else [jnp.asarray(f) for f in norm.factors]
    for array in added:
        if meshes.varying(array) & frozenset(axis_names):
            raise ValueError(
                f"jflux.{op}: a residual and a norm's factors must be the same on all ranks of "
                f"{axis_names}, and one of shape {tuple(array.shape)} varies over them"
            )
    epilogue = SumEpilogue(
        residual=residual is not None,
        norm=None if norm is None else norm.name,
        epsilon=0.0 if norm is None else norm.epsilon,
        quantize=quantize,
    )
    return epilogue, added


def apply(epilogue: SumEpilogue, y: Any, added: Sequence[Any]) -> list[jax.Array]:
    """All results of a sum y, in plain `lax`."""
    y = _epilogue.add(y, added[: epilogue.residual])
    if epilogue.norm is None:
        return [y]
    normalised = _norm.apply(epilogue.norm, epilogue.epsilon, y, *epilogue.factors(added))
    return [y, *quantized(epilogue, normalised)]


def quantized(epilogue: SumEpilogue, normalised: jax.Array) -> list[jax.Array]:
    """The normalised rows as results: they, or their values and scale."""
    if epilogue.quantize is None:
        return [normalised]
    found = epilogue.quantize.quantize(normalised)
    return [found.values, found.scale]


def tangents(
    op: str,
    epilogue: SumEpilogue,
    y: jax.Array,
    dy: jax.Array | None,
    added: Sequence[jax.Array],
    dadded: Sequence[Any],
) -> list[jax.Array]:
    """The tangents of all results, of which y is the first, from the tangents of the sum and of the
    operands. None stands for zero."""
    if epilogue.quantize is not None:
        raise TypeError(
            f"jflux.{op} has no derivative with quantize: where its operands are constants, pass "
            "jax.lax.stop_gradient of them"
        )
    dy = jnp.zeros_like(y) if dy is None else dy
    if epilogue.residual and dadded[0] is not None:
        dy += dadded[0].astype(dy.dtype)
    if epilogue.norm is None:
        return [dy]
    factors = epilogue.factors(added)
    dfactors = [
        jnp.zeros_like(f) if d is None else d
        for f, d in zip(factors, epilogue.factors(dadded), strict=True)
    ]
    # Only y is kept for the backward pass.
    normalise = jax.checkpoint(functools.partial(_norm.apply, epilogue.norm, epilogue.epsilon))
    _, dnormalised = jax.jvp(normalise, (y, *factors), (dy, *dfactors))
    return [dy, dnormalised]


def transpose(
    op: str, epilogue: SumEpilogue, cotangents: Sequence[Any], added: Sequence[Any]
) -> tuple[Any, list[Any]]:
    """(the cotangent of the sum, cotangents of the operands that follow it). None stands for a
    cotangent of zero, and for an operand that is no `ad.UndefinedPrimal`, which wants none."""
    if epilogue.norm is not None:
        raise not_linear(op, "it has a norm")
    (ct,) = map(none_if_zero, cotangents)
    return ct, [
        None
        if not ad.is_undefined_primal(a)
        else ad.Zero(a.aval)
        if ct is None
        else ct.astype(a.aval.dtype)
        for a in added
    ]
