"""The epilogue of a sum over ranks: a residual is added, and rows are normalised."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad

from ..._call.derivatives import none_if_zero, not_linear
from ..._ranks import meshes
from .. import _epilogue, _norm


@dataclasses.dataclass(frozen=True)
class SumEpilogue:
    """What follows a sum over ranks: a residual may be added, and rows may be normalised. Operands
    are the residual and the norm's factors, where the call has them."""

    residual: bool = False
    norm: str | None = None
    epsilon: float = 0.0

    @property
    def results(self) -> int:
        """The sum, and its rows normalised."""
        return 1 if self.norm is None else 2

    def factors(self, added: Sequence[Any]) -> Sequence[Any]:
        return added[self.residual :]


def check(op: str, shape: Sequence[int], residual: Any, norm: Any) -> None:
    """Raises for what cannot follow a sum of this shape."""
    if residual is not None and tuple(residual.shape) != tuple(shape):
        raise ValueError(
            f"jflux.{op}: the residual has shape {tuple(residual.shape)}, the sum {tuple(shape)}"
        )
    if norm is not None:
        if not shape:
            raise ValueError(f"jflux.{op}: a norm needs rows, and the sum is a number")
        _norm.check(op, norm, shape[-1])


def operands(
    op: str, axis_names: tuple[Any, ...], residual: Any, norm: _norm.Norm | None
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
    )
    return epilogue, added


def apply(epilogue: SumEpilogue, y: Any, added: Sequence[Any]) -> list[jax.Array]:
    """All results of a sum y, in plain `lax`."""
    y = _epilogue.add(y, added[: epilogue.residual])
    if epilogue.norm is None:
        return [y]
    return [y, _norm.apply(epilogue.norm, epilogue.epsilon, y, *epilogue.factors(added))]


def tangents(
    epilogue: SumEpilogue,
    y: jax.Array,
    dy: jax.Array | None,
    added: Sequence[jax.Array],
    dadded: Sequence[Any],
) -> list[jax.Array]:
    """The tangents of all results, of which y is the first, from the tangents of the sum and of the
    operands. None stands for zero."""
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
