"""Derivatives of primitives in both modes, written once for all ops.

The tangents of a product are linear in those of its operands, and there are two programs for the
map: forward mode wants it, reverse mode its transpose, and each is fused in its own way
(``all_gather(dx) @ w`` one way, ``psum_scatter(dy @ w^T)`` back). JAX would transpose the first
one equation by equation, and communicate twice. So the map is one equation, `jflux_tangents`,
whose lowering is the first program and whose transpose is the second one.

    primitive  -- jvp -->         forward: the results, and what is kept
                                  jflux_tangents(what is kept, tangents)
    jflux_tangents -- transpose --> backward(what is kept, cotangents)
    primitive -- transpose -->    backward, of an op that is linear in some of its operands

An op that is no primitive but a function of other ops has the first two: see `differentiated`. One
that computes in another way where it is differentiated: see `if_differentiated`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import checkify
from jax.extend.core import Primitive, unmapped_aval
from jax.interpreters import ad, batching, mlir, xla

from .. import _jax_internals
from .._ranks import meshes


@dataclasses.dataclass(frozen=True)
class Derivatives:
    """What an op's derivatives are made of, in terms of its primitive's operands and results. An
    array that is None is zero, or not wanted.

    Attributes:
      forward: (operands, params) -> (results, what is kept of them): a pytree of arrays.
      tangents: (kept, operands' tangents, params) -> those of the results.
      backward: (kept, results' cotangents, wanted, params) -> the operands' cotangents. `wanted`:
        the operands' types, or None.
      kept: (operands, params) -> what `forward` keeps, of an op that is linear in the operands that
        are None, as far as `backward` needs it for these; raises `not_linear` for one that is not.
    """

    forward: Callable[[Sequence[Any], Any], tuple[Sequence[Any], Any]]
    tangents: Callable[[Any, Sequence[Any], Any], Sequence[Any]]
    backward: Callable[[Any, Sequence[Any], Sequence[Any], Any], Sequence[Any]]
    kept: Callable[[Sequence[Any], Any], Any]


@dataclasses.dataclass(frozen=True)
class _Tangents:
    """The linear map of one call.

    Attributes:
      derivatives: of the op.
      params: of the call.
      given: which operands have a tangent.
      real: which results have one: those of other types than floats have none.
      structure: of what is kept.
      axes: the mesh axes that any of the operands varies over.
    """

    derivatives: Derivatives
    params: Any
    given: tuple[bool, ...]
    real: tuple[bool, ...]
    structure: Any
    axes: frozenset[Any]

    @property
    def leaves(self) -> int:
        """How many arrays are kept."""
        return self.structure.num_leaves

    def forward(self, kept: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
        kept = jax.tree.unflatten(self.structure, kept)
        every = spread(tangents, self.given)
        results = self.derivatives.tangents(kept, every, self.params)
        return [y for y, real in zip(results, self.real, strict=True) if real]

    def backward(
        self, kept: Sequence[Any], cotangents: Sequence[Any], wanted: Sequence[Any]
    ) -> list[Any]:
        kept = jax.tree.unflatten(self.structure, kept)
        every = spread(cotangents, self.real)
        results = self.derivatives.backward(kept, every, spread(wanted, self.given), self.params)
        return [d for d, given in zip(results, self.given, strict=True) if given]


@dataclasses.dataclass(frozen=True)
class _Batched:
    """A linear map of a batch: operands' batch dimensions are `dims`, results' are 0."""

    one: Any
    dims: tuple[int | None, ...]

    @property
    def leaves(self) -> int:
        return self.one.leaves

    @property
    def axes(self) -> frozenset[Any]:
        return self.one.axes

    def forward(self, kept: Sequence[Any], tangents: Sequence[Any]) -> Any:
        dims = self.dims[: self.leaves], self.dims[self.leaves :]
        return jax.vmap(self.one.forward, in_axes=tuple(map(list, dims)))(
            list(kept), list(tangents)
        )

    def backward(
        self, kept: Sequence[Any], cotangents: Sequence[Any], wanted: Sequence[Any]
    ) -> list[Any]:
        types = [
            None if w is None else _without(w, d)
            for w, d in zip(wanted, self.dims[self.leaves :], strict=True)
        ]
        given = [ct for ct in cotangents if ct is not None]
        mask = [ct is not None for ct in cotangents]

        def one(kept: Any, given: Any) -> Any:
            return self.one.backward(kept, spread(given, mask), types)

        dims = (list(self.dims[: self.leaves]), 0)
        results = jax.vmap(one, in_axes=dims)(list(kept), given)
        return [
            None if y is None else jnp.sum(y, 0) if d is None else jnp.moveaxis(y, 0, d)
            for y, d in zip(results, self.dims[self.leaves :], strict=True)
        ]


def _without(aval: Any, dimension: int | None) -> Any:
    if dimension is None:
        return aval
    shape = tuple(size for i, size in enumerate(aval.shape) if i != dimension)
    return jax.ShapeDtypeStruct(shape, aval.dtype)


def spread(some: Sequence[Any], where: Sequence[bool]) -> list[Any]:
    """Arrays at the places that are True, None at the others."""
    rest = iter(some)
    return [next(rest) if is_there else None for is_there in where]


def total(parts: Sequence[Any]) -> Any:
    """The sum of those that are not None; None if there is none."""
    there = [part for part in parts if part is not None]
    return sum(there[1:], there[0]) if there else None


def none_if_zero(tangent: Any) -> Any:
    """A tangent or cotangent of JAX's, with None for one that is known to be zero."""
    return None if type(tangent) is ad.Zero else tangent


def jvp_of_moved(f: Callable[..., Any], primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
    """``jax.jvp`` of f(*primals) in those that have a tangent, which is neither None nor zero."""
    moving = [none_if_zero(t) for t in tangents]
    moved = [t is not None for t in moving]

    def of_moved(*some: Any) -> Any:
        rest = iter(some)
        return f(*(next(rest) if m else a for a, m in zip(primals, moved, strict=True)))

    some = tuple(a for a, m in zip(primals, moved, strict=True) if m)
    return jax.jvp(of_moved, some, tuple(t for t in moving if t is not None))


def is_real(dtype: Any) -> bool:
    """Whether arrays of the type have derivatives."""
    return bool(jnp.issubdtype(dtype, jnp.inexact))


# ---- The primitive of all linear maps: what is kept, then the tangents that there are ------------

#: The name of the primitive.
NAME = "jflux_tangents"


class _TangentsPrimitive(Primitive):
    """Under ``jax.vmap(..., spmd_axis_name=)`` operands that have a batch vary over one axis more
    than where the equation was made. Then all of them do, as an op's (`primitives.OpPrimitive`)."""

    def bind(self, *operands: Any, linear: Any, results: tuple[Any, ...]) -> Any:
        more = meshes.varying(operands) - linear.axes
        operands = tuple(meshes.vary(a, more) for a in operands)
        return super().bind(*operands, linear=linear, results=results)


_primitive = _TangentsPrimitive(NAME)
_primitive.multiple_results = True
# Its lowering has calls of ops: a lowering for these devices alone, as theirs.
_jax_internals.lower_for_its_devices(_primitive)


@_primitive.def_abstract_eval
def _abstract(*avals: Any, linear: Any, results: tuple[Any, ...]) -> list[Any]:
    more = frozenset().union(*(a.manual_axis_type.varying for a in avals)) - linear.axes
    types = (r.manual_axis_type for r in results)
    return [
        r.update(manual_axis_type=t.update(varying=t.varying | more))
        for r, t in zip(results, types, strict=True)
    ]


def _apply(*operands: Any, linear: Any, results: tuple[Any, ...]) -> Any:
    def forward(*operands: Any) -> Any:
        return linear.forward(operands[: linear.leaves], operands[linear.leaves :])

    tangents = meshes.unsharded_inside(forward, results)(*operands)
    # A tangent varies as its primal does, whichever operands it is made of.
    return [
        meshes.vary(t, r.manual_axis_type.varying) for t, r in zip(tangents, results, strict=True)
    ]


_primitive.def_impl(functools.partial(xla.apply_primitive, _primitive))
mlir.register_lowering(_primitive, mlir.lower_fun(_apply, multiple_results=True))


def _jvp(primals: Any, tangents: Any, *, linear: Any, results: tuple[Any, ...]) -> Any:
    """Linear in the last operands; in those that are kept it is differentiated as it is written."""
    kept, given = primals[: linear.leaves], primals[linear.leaves :]
    parts = []
    mask = [type(t) is not ad.Zero for t in tangents[: linear.leaves]]
    if any(mask):
        changing = [a for a, changes in zip(kept, mask, strict=True) if changes]
        still = [a for a, changes in zip(kept, mask, strict=True) if not changes]

        def of_kept(*changing: Any) -> Any:
            moved, rest = iter(changing), iter(still)
            every = [next(moved) if changes else next(rest) for changes in mask]
            return _apply(*every, *given, linear=linear, results=results)

        moving = [t for t, changes in zip(tangents, mask, strict=False) if changes]
        ys, dys = jax.jvp(of_kept, tuple(changing), tuple(moving))
        parts.append(dys)
    else:
        ys = _primitive.bind(*primals, linear=linear, results=results)
    moving = tangents[linear.leaves :]
    if any(type(t) is not ad.Zero for t in moving):
        dense = [ad.instantiate_zeros(t) for t in moving]
        parts.append(_primitive.bind(*kept, *dense, linear=linear, results=results))
    return ys, [total(each) for each in zip(*parts, strict=True)]


def _transpose(cotangents: Any, *operands: Any, linear: Any, results: tuple[Any, ...]) -> list[Any]:
    kept, tangents = operands[: linear.leaves], operands[linear.leaves :]
    cotangents = [none_if_zero(ct) for ct in cotangents]
    wanted = [t.aval if ad.is_undefined_primal(t) else None for t in tangents]
    if all(ct is None for ct in cotangents):
        found: Sequence[Any] = [None] * len(tangents)
    else:
        backward = functools.partial(linear.backward, wanted=wanted)
        found = meshes.unsharded_inside(backward, wanted)(kept, cotangents)
    return [None] * linear.leaves + _with_zeros(found, wanted)


def _with_zeros(cotangents: Sequence[Any], wanted: Sequence[Any]) -> list[Any]:
    """As JAX takes them: each varies as its operand does."""
    return [
        None
        if aval is None
        else ad.Zero(aval)
        if ct is None
        else meshes.vary(ct, aval.manual_axis_type.varying)
        for ct, aval in zip(cotangents, wanted, strict=True)
    ]


def _batch(operands: Any, dims: Any, *, linear: Any, results: tuple[Any, ...]) -> Any:
    size = next(a.shape[d] for a, d in zip(operands, dims, strict=True) if d is not None)
    wide = tuple(unmapped_aval(size, 0, aval) for aval in results)
    batched = _Batched(linear, tuple(dims))
    ys = _primitive.bind(*operands, linear=batched, results=wide)
    return ys, [0] * len(ys)


def check_for_nan(primitive: Primitive, first: int | None = None) -> None:
    """Has ``checkify.float_checks`` look at the primitive's results, or the first so many, as at
    those of JAX's own. They hold no rows then that may be anything."""
    internals = _jax_internals.CHECKIFY.get()
    if internals is None:
        return

    def check(*given: Any, **params: Any) -> Any:
        count = 2 if isinstance(given[0], checkify.Error) else 3  # the oldest pass no context
        *context, error, enabled = given[:count]
        params = {name: _filled(value) for name, value in params.items()}
        results = primitive.bind(*given[count:], **params)
        if first == 0:
            return error, results
        looked_at = internals.check_nans(primitive, *context, error, enabled, results[:first])
        return looked_at, results

    internals.error_checks[primitive] = check


def _filled(params: Any) -> Any:
    """Parameters of a call without rows that may be anything (``fill=False``)."""
    if isinstance(params, _Batched):
        return dataclasses.replace(params, one=_filled(params.one))
    if isinstance(params, _Tangents):
        return dataclasses.replace(params, params=_filled(params.params))
    is_filled = getattr(params, "fill", True)
    return params if is_filled else dataclasses.replace(params, fill=True)


check_for_nan(_primitive)
ad.primitive_jvps[_primitive] = _jvp
ad.primitive_transposes[_primitive] = _transpose
batching.primitive_batchers[_primitive] = _batch


# ---- The primitives of ops, and functions --------------------------------------------------------


def _linearized(
    derivatives: Derivatives, operands: Sequence[Any], tangents: Sequence[Any], params: Any
) -> tuple[Sequence[Any], list[Any]]:
    """(results, their tangents: None for results of other types than floats). A tangent that is
    None is zero."""
    results, kept = derivatives.forward(operands, params)
    return results, tangents_of(derivatives, results, kept, tangents, params)


def tangents_of(
    derivatives: Derivatives,
    results: Sequence[Any],
    kept: Any,
    tangents: Sequence[Any],
    params: Any,
) -> list[Any]:
    """The tangents of results that are there, as one linear map: None for those of other types than
    floats. An operand's tangent that is None is zero."""
    leaves, structure = jax.tree.flatten(kept)
    given = tuple(t is not None for t in tangents)
    types = [jax.typeof(y) for y in results]
    real = tuple(is_real(t.dtype) for t in types)
    axes = meshes.varying((leaves, [t for t in tangents if t is not None]))
    linear = _Tangents(derivatives, params, given, real, structure, axes)
    dys = _primitive.bind(
        *leaves,
        *(t for t in tangents if t is not None),
        linear=linear,
        results=tuple(t for t in types if is_real(t.dtype)),
    )
    return spread(dys, real)


def differentiate(primitive: Primitive, derivatives: Derivatives) -> None:
    """Gives an op's primitive its derivatives."""

    def jvp(primals: Any, tangents: Any, *, params: Any) -> Any:
        tangents = [none_if_zero(t) for t in tangents]
        results, dys = _linearized(derivatives, primals, tangents, params)
        return results, [
            ad.Zero(jax.typeof(y).to_tangent_aval()) if dy is None else dy
            for y, dy in zip(results, dys, strict=True)
        ]

    def transpose(cotangents: Any, *operands: Any, params: Any) -> list[Any]:
        wanted = [a.aval if ad.is_undefined_primal(a) else None for a in operands]
        cotangents = [none_if_zero(ct) for ct in cotangents]
        if all(ct is None for ct in cotangents):
            return [None if aval is None else ad.Zero(aval) for aval in wanted]
        known = [None if ad.is_undefined_primal(a) else a for a in operands]

        def backward(known: Sequence[Any], cotangents: Sequence[Any]) -> Sequence[Any]:
            return derivatives.backward(derivatives.kept(known, params), cotangents, wanted, params)

        found = meshes.unsharded_inside(backward, wanted)(known, cotangents)
        return _with_zeros(found, wanted)

    ad.primitive_jvps[primitive] = jvp
    ad.primitive_transposes[primitive] = transpose


def differentiated(
    function: Callable[..., Sequence[Any]],
    *,
    kept: Callable[[Sequence[Any], Any], Any],
    tangents: Callable[[Any, Sequence[Any], Any], Sequence[Any]],
    backward: Callable[[Any, Sequence[Any], Sequence[Any], Any], Sequence[Any]],
    forward: Callable[..., tuple[Sequence[Any], Any]] | None = None,
    axes: Callable[[Any], meshes.AxisName | None] = lambda params: params,
) -> Callable[..., Sequence[Any]]:
    """A function with derivatives, for one that is no primitive: JAX sees its equations.

    Args:
      function: ``(params, *operands) -> results``, floating arrays. Operands are arrays; those that
        are other pytrees, of integers, have no tangents.
      kept: (operands, params) -> what `tangents` and `backward` need.
      tangents, backward: as in :class:`Derivatives`.
      forward: (the function with derivatives, operands, params) -> (results, what is kept), where
        that is not of the operands alone.
      axes: params -> the mesh axes of the call. As those of a primitive
        (`primitives.OpPrimitive`), operands are cast to vary over these, and alike.
    """

    @functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
    def call(params: Any, *operands: Any) -> Sequence[Any]:
        return tuple(function(params, *operands))

    # The results of a jvp come from a call, so that they have derivatives too.
    def own_forward(operands: Sequence[Any], params: Any) -> tuple[Sequence[Any], Any]:
        if forward is not None:
            return forward(call, operands, params)
        return call(params, *operands), kept(operands, params)

    derivatives = Derivatives(
        forward=own_forward,
        tangents=tangents,
        backward=backward,
        kept=kept,
    )

    def jvp(params: Any, operands: Sequence[Any], given: Sequence[Any]) -> Any:
        given = [None if _is_nothing(t) else t for t in given]
        results, dys = _linearized(derivatives, operands, given, params)
        return tuple(results), tuple(dys)

    call.defjvp(jvp, symbolic_zeros=True)

    def aligned(params: Any, *operands: Any) -> Sequence[Any]:
        return call(params, *_aligned(axes(params), operands))

    return aligned


def if_differentiated(
    function: Callable[..., Sequence[Any]],
    instead: Callable[..., Sequence[Any]],
    axis_name: meshes.AxisName | None,
) -> Callable[..., Sequence[Any]]:
    """`function`, and `instead` where JAX differentiates the call, in either mode. Both compute the
    same, and `instead` has derivatives.

    Args:
      function, instead: ``(*operands) -> results``, as :func:`differentiated` takes them.
      axis_name: the mesh axes of the call; operands are cast as there.
    """

    @jax.custom_jvp
    def call(*operands: Any) -> Sequence[Any]:
        return tuple(function(*operands))

    def jvp(operands: Sequence[Any], given: Sequence[Any]) -> Any:
        given = [None if _is_nothing(t) else t for t in given]
        return jvp_of_moved(lambda *all_: tuple(instead(*all_)), operands, given)

    call.defjvp(jvp, symbolic_zeros=True)
    return lambda *operands: call(*_aligned(axis_name, operands))


def _aligned(axis_name: meshes.AxisName | None, operands: Any) -> Any:
    """Operands that vary over the axes of a call, and alike."""
    leaves, structure = jax.tree.flatten(operands)
    leaves = meshes.vary_together(meshes.axes_of(axis_name), *leaves)
    return jax.tree.unflatten(structure, leaves)


def _is_nothing(tangent: Any) -> bool:
    """Whether it is known to be zero, or is that of a pytree of integers."""
    is_zero = isinstance(tangent, jax.custom_derivatives.SymbolicZero)
    return is_zero or not jax.tree_util.all_leaves((tangent,))


def not_linear(op: str, why: str) -> NotImplementedError:
    """The error of a transpose of a call that is not linear in the operands to transpose."""
    return NotImplementedError(
        f"jflux.{op} cannot be transposed here: {why}. For gradients use jax.vjp or jax.grad; to "
        "transpose, fix all operands but one with functools.partial"
    )
