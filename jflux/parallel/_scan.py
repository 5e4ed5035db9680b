"""A loop over layers whose weights are gathered, and their gradients scattered, one layer ahead.

Of layer l, with P its parameters as they are stored, W gathered over z, and -> what one iteration
of a loop hands to the next (arXiv 2305.13525, sections IV-B to IV-D)::

    forward     W[l+1] = gather(P[l+1])  ->          beside  x = layer(x, W[l])
    backward    W[l-1] = gather(P[l-1])  ->          beside  dx, dW[l] = the gradient of layer l
                dP[l+1] = scatter(-> dW[l+1])

so that in each iteration the collectives depend on nothing that is computed there, nor does that
depend on them. An iteration of the backward loop runs its layer forward again, from the layer's
input, which is all that is kept; and the gathered weights of the last layers, if so many are
cached.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from .._ranks.meshes import vary
from . import _product
from ._scheme import DEFAULT, Scheme, together, tracks_vma

#: (x, weights, *args) -> x
Layer = Callable[..., Any]

Tree = TypeVar("Tree")


def save_gathered(*args: Any, **kwargs: Any) -> bool:
    """A policy for `jax.checkpoint`: gathered weights are kept for the backward pass, everything
    else is computed again (arXiv 2305.13525, section IV-D)."""
    return jax.checkpoint_policies.save_only_these_names(_product.WEIGHT)(*args, **kwargs)


def scan(
    layer: Layer,
    x: Tree,
    params: Any,
    *args: Any,
    specs: Any,
    scheme: Scheme = DEFAULT,
    remat: bool = True,
    unroll: int = 1,
) -> Tree:
    """``for l in range(layers): x = layer(x, params[l], *args)``, as one loop.

    `layer` calls the functions of this module on its weights, which it may get gathered over z
    already. While it runs, the next layer's are gathered; in the backward pass also, and there the
    last one's gradients are scattered. ``scheme.overlap`` says which of this is done, and for how
    many layers gathered weights are kept. The sums over data come once, after the loop.

    Args:
      layer: (x, weights, *args) -> x, of the same shapes and types. It must not use arrays of an
        enclosing function, except constants: pass them as `args`.
      x: what enters the first layer; an array, or a pytree of them.
      params: a pytree of arrays [layers, ...], one rank's part. The sums over data are in their
        types.
      args: what all layers share, such as a mask or positions.
      specs: the pytree of PartitionSpecs that `params` has among `jax.shard_map`'s `in_specs`:
        dimensions that are split over z are gathered. Its axes along z come last in an entry.
      scheme: the mesh axes; that of a layer's weights, or its transpose.
      remat: only each layer's input is kept for the backward pass, and the layer runs again there,
        as under `jax.checkpoint` (which is what runs under ``check_vma=False``, with no weights
        gathered ahead). Otherwise what a layer wants to keep is kept, and its gathered
        weights too.
      unroll: how many layers one iteration of the loop has, as in `lax.scan`. XLA copies what one
        iteration hands to the next, such as gathered weights: half as often with two.

    Returns:
      What leaves the last layer.

    Raises:
      ValueError: params of different lengths, or none; a spec where z does not come last.
      NameError: outside ``shard_map``.
    """
    leaves = jax.tree.leaves(params)
    lengths = {leaf.shape[0] if leaf.ndim else 0 for leaf in leaves}
    if len(lengths) != 1 or 0 in lengths:
        raise ValueError(
            "jflux.parallel.scan: params must be arrays [layers, ...] of one length, got "
            f"{[leaf.shape for leaf in leaves]}"
        )
    args = jax.tree.map(lambda a: a if hasattr(a, "dtype") else jnp.asarray(a), args)
    dimensions = jax.tree.map(
        functools.partial(_gathered_dimension, scheme), params, _like(params, specs)
    )
    loop = Loop(layer, scheme, tuple(jax.tree.leaves(dimensions)), lengths.pop(), unroll)
    if tracks_vma(scheme):
        params = jax.tree.map(lambda p: vary(p, scheme.names("data", "z")), params)
        x = _vary_as_result(loop, x, params, args)
    if remat and tracks_vma(scheme):
        return _rematerialised(loop, x, params, args)
    return loop.forward(x, params, args, remat)


def _like(params: Any, specs: Any) -> Any:
    """`specs` as a pytree whose leaves match those of `params`."""
    is_spec = lambda s: isinstance(s, PartitionSpec)  # noqa: E731
    leaves = jax.tree.leaves(specs, is_leaf=is_spec)
    structure: Any = jax.tree.structure(params)
    if len(leaves) != structure.num_leaves:
        raise ValueError(
            f"jflux.parallel.scan: specs has {len(leaves)} PartitionSpecs, params "
            f"{structure.num_leaves} arrays"
        )
    return jax.tree.unflatten(structure, leaves)


def _gathered_dimension(scheme: Scheme, param: jax.Array, spec: PartitionSpec) -> int:
    """Which dimension of one layer's parameter is split over z; -1 if none is."""
    z = scheme.names("z")
    for dimension, entry in enumerate(spec):
        names = entry if isinstance(entry, tuple) else (entry,)
        if not z or not set(z) & set(names):
            continue
        if names[-len(z) :] != z or dimension == 0:
            raise ValueError(
                f"jflux.parallel.scan: {z} must come last in an entry of {spec}, and not split the "
                "layers"
            )
        return dimension - 1
    return -1


@dataclasses.dataclass(frozen=True)
class Loop:
    """What does not change: the layer, and how many there are.

    Attributes:
      dimensions: for each leaf of the parameters, which of a layer's dimensions is gathered, or -1.
    """

    layer: Layer
    scheme: Scheme
    dimensions: tuple[int, ...]
    layers: int
    unroll: int

    @property
    def kept(self) -> int:
        """How many layers' gathered weights the backward pass finds; the last one's always."""
        return min(max(1, self.scheme.overlap.cached_layers), self.layers)

    def gather(self, params: Any) -> Any:
        """One layer's weights."""
        return self._where_split(_product.gather, params)

    def scatter(self, gradients: Any) -> Any:
        """`gather`, transposed."""
        return self._where_split(_product.scatter, gradients)

    def _where_split(self, collective: Callable[..., Any], tree: Any) -> Any:
        leaves, structure = jax.tree.flatten(tree)
        moved = [
            leaf if dimension < 0 else collective(leaf, scheme=self.scheme, dimension=dimension)
            for leaf, dimension in zip(leaves, self.dimensions, strict=True)
        ]
        return jax.tree.unflatten(structure, moved)

    def forward(self, x: Any, params: Any, args: tuple[Any, ...], remat: bool) -> Any:
        """The loop, for JAX to differentiate."""

        def one(x: Any, param: Any) -> Any:
            return self.layer(x, self.gather_after(x, param), *args), None

        if remat or not self.scheme.overlap.all_gather:
            # What is gathered outside of the checkpoint would be kept, of every layer.
            one = jax.checkpoint(one) if remat else one
            return self.over(one, x, params, 0, self.layers)[0]

        def body(carry: Any, param: Any) -> Any:
            x, w = carry
            after = self.gather(param)
            return (self.layer(x, w, *args), after), None

        carry = (x, self.gather(_at(params, 0)))
        (x, w), _ = self.over(body, carry, params, 1, self.layers)
        return self.layer(x, w, *args)

    def over(
        self, body: Any, carry: Any, xs: Any, start: int, stop: int, reverse: bool = False
    ) -> Any:
        """`lax.scan` over a slice of xs; no results where it is empty."""
        if start == stop:
            return carry, None
        xs = _slice(xs, start, stop)
        return lax.scan(body, carry, xs, reverse=reverse, unroll=min(self.unroll, stop - start))

    def gather_after(self, x: Any, params: Any) -> Any:
        """The weights, but not before x is there."""
        _, params = together((x, params))
        return self.gather(params)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rematerialised(loop: Loop, x: Any, params: Any, args: tuple[Any, ...]) -> Any:
    return _forward(loop, x, params, args)[0]


def _forward(loop: Loop, x: Any, params: Any, args: tuple[Any, ...]) -> Any:
    ahead = loop.scheme.overlap.all_gather
    first_kept, last = loop.layers - loop.kept, loop.layers - 1

    def body(keep: bool, carry: Any, at: Any) -> Any:
        (x, w), (here, there) = carry, at
        after = loop.gather(there) if ahead else None
        w = w if ahead else loop.gather_after(x, here)
        return (loop.layer(x, w, *args), after), (x, w) if keep else x

    carry = (x, loop.gather(_at(params, 0)) if ahead else None)
    pairs = (_slice(params, 0, last), _slice(params, 1, loop.layers))
    carry, inputs = loop.over(functools.partial(body, False), carry, pairs, 0, first_kept)
    carry, kept = loop.over(functools.partial(body, True), carry, pairs, first_kept, last)
    x, w = carry
    w = w if ahead else loop.gather_after(x, _at(params, last))
    return loop.layer(x, w, *args), (inputs, kept, x, w, params, args)


def _backward(loop: Loop, residuals: Any, dx: Any) -> Any:
    inputs, kept, x, w, params, args = residuals
    overlap = loop.scheme.overlap
    first_kept, last = loop.layers - loop.kept, loop.layers - 1
    leaves, structure = jax.tree.flatten(args)
    inexact = [jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in leaves]
    dargs = [jnp.zeros_like(leaf) for leaf, is_ in zip(leaves, inexact, strict=True) if is_]
    dparams = []  # slices [layers, ...], from the last

    def step(carry: Any, x: Any, w: Any) -> Any:
        """The gradient of one layer; and that of the layer after it is scattered."""
        dx, pending, dargs = carry
        done = None if pending is None else loop.scatter(pending)

        def call(x: Any, w: Any, floats: Any) -> Any:
            rest = iter(floats)
            every = [next(rest) if is_ else a for is_, a in zip(inexact, leaves, strict=True)]
            return loop.layer(x, w, *jax.tree.unflatten(structure, every))

        floats = [leaf for leaf, is_ in zip(leaves, inexact, strict=True) if is_]
        dx, dw, more = jax.vjp(call, x, w, floats)[1](dx)
        if not overlap.reduce_scatter:
            dx, done = together((dx, loop.scatter(dw)))
            dw = None
        return (dx, dw, [a + b for a, b in zip(dargs, more, strict=True)]), done

    def with_kept(carry: Any, at: Any) -> Any:
        return step(carry, *at)

    def with_gathered(carry: Any, at: Any) -> Any:
        (state, w), (x, here, before) = carry, at
        after = loop.gather(before) if overlap.all_gather else None
        w = w if overlap.all_gather else loop.gather_after(state[0], here)
        state, done = step(state, x, w)
        return (state, after), done

    state, done = step((dx, None, dargs), x, w)
    dparams.append(_stack(done))
    state, done = loop.over(with_kept, state, kept, 0, last - first_kept, reverse=True)
    dparams.append(done)
    if first_kept:
        w = loop.gather(_at(params, first_kept - 1)) if overlap.all_gather else None
        at = (_slice(inputs, 1, first_kept), _slice(params, 1, first_kept), params)
        (state, w), done = loop.over(with_gathered, (state, w), at, 0, first_kept - 1, reverse=True)
        dparams.append(done)
        w = w if overlap.all_gather else loop.gather_after(state[0], _at(params, 0))
        state, done = step(state, _at(inputs, 0), w)
        dparams.append(_stack(done))
    dx, pending, dargs = state
    if pending is not None:
        dparams.append(_stack(loop.scatter(pending)))
    slices = [one for one in reversed(dparams) if one is not None]
    rest = iter(dargs)
    of_args = [next(rest) if is_ else None for is_ in inexact]
    return (
        dx,
        jax.tree.map(lambda *arrays: jnp.concatenate(arrays), *slices),
        jax.tree.unflatten(structure, of_args),
    )


_rematerialised.defvjp(_forward, _backward)


def _slice(tree: Any, start: int, stop: int) -> Any:
    return jax.tree.map(lambda a: a[start:stop], tree)


def _at(tree: Any, index: int) -> Any:
    return jax.tree.map(lambda a: a[index], tree)


def _stack(tree: Any) -> Any:
    """One layer's as a slice; None stays None."""
    return None if tree is None else jax.tree.map(lambda a: a[None], tree)


def _vary_as_result(loop: Loop, x: Any, params: Any, args: tuple[Any, ...]) -> Any:
    """x with the type of a layer's result, which it must have inside a loop."""
    while True:  # what varies over an axis may make something else vary over it in the next layer
        y = jax.eval_shape(lambda x: loop.layer(x, loop.gather(_at(params, 0)), *args), x)
        varying = [sorted(b.manual_axis_type.varying, key=str) for b in jax.tree.leaves(y)]
        leaves, structure = jax.tree.flatten(x)
        wider = [vary(a, tuple(names)) for a, names in zip(leaves, varying, strict=True)]
        if all(a is b for a, b in zip(leaves, wider, strict=True)):
            return x
        x = jax.tree.unflatten(structure, wider)
