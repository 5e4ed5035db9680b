"""The transformation of functions."""

from __future__ import annotations

import collections
import enum
import functools
import os
import sys
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, JaxprEqn
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from .._ranks import meshes
from .bodies import equations_of, type_of, where
from .evaluate import evaluate
from .planning import BodyPlan, Planner
from .report import Report
from .rules import OPS
from .sites import Scope
from .specs import of_sharding

# Lines of this package are not the user's.
source_info_util.register_exclusion(os.path.dirname(__file__))

#: Traces that a fused function remembers.
MOST = 64


def fuse(
    f: Callable[..., Any],
    *,
    only: Collection[str] | None = None,
    skip: Collection[str] = (),
) -> Fused:
    """f, with jflux's ops in place of its products and collectives::

        step = jax.jit(jflux.fuse(step))

    f is traced, as by `jax.checkpoint`, and the jaxpr is searched for collectives over axes of
    ``jax.shard_map`` that stand beside a product: in `shard_map`'s body and the bodies of loops,
    branches, ``jax.jit``, `jax.checkpoint` and functions with derivatives of their own.

    ====================================================  ======================================
    in the program, through transposes, reshapes, casts   becomes
    ====================================================  ======================================
    `all_gather`, which one or several products multiply  :func:`jflux.all_gather_matmul`
    sum of products, then `psum_scatter`; plus an array   :func:`jflux.matmul_reduce_scatter`
    product, then `psum`; plus an array; then a norm      :func:`jflux.matmul_all_reduce`
    `all_to_all` and a product, in either order           :func:`jflux.all_to_all_matmul`,
                                                          :func:`jflux.matmul_all_to_all`
    small collectives that are left; ragged products      jflux's
    ====================================================  ======================================

    All else stays as it is, equation for equation. Results are those of f but for rounding: the ops
    sum in float32, and round once.

    Fuse the whole step, derivatives and all: what the backward pass gathers and scatters is found
    as the forward pass' is. In ``jax.grad(jflux.fuse(loss))`` the ops' own derivatives take its
    place. `fuse` composes with all of JAX's transformations.

    Args:
      f: a function of pytrees, and of modules of Flax NNX, which it may change. Arrays in its
        arguments are traced, and all else, Python's numbers too, goes to it as it is. `jax.jit`
        goes around `fuse` if it has ``compiler_options``.
      only: the ops to take, such as "all_gather_matmul", or lines of the program, as reports name
        them ("model.py:120"): nothing else changes. None: all.
      skip: ops and lines to leave as they are.

    Returns:
      The function, with a method `report`: which sites were found, and why others were not.

    Raises:
      TypeError: f is no function.
      ValueError: an op that does not exist.

    Examples:
      >>> mesh = jax.sharding.Mesh(jax.devices(), "tp")
      >>> def layer(x, w):
      ...     return jax.lax.all_gather(x, "tp", tiled=True) @ w
      >>> specs = P("tp"), P(None, "tp")
      >>> layer = jax.shard_map(layer, mesh=mesh, in_specs=specs, out_specs=P(None, "tp"))
      >>> layer = jflux.fuse(layer)
      >>> [site.op for site in layer.report(jnp.ones((64, 32)), jnp.ones((32, 128)))]
      ['all_gather_matmul']
      >>> jax.jit(layer)(jnp.ones((64, 32)), jnp.ones((32, 128))).shape
      (64, 128)
    """
    if not callable(f):
        raise TypeError(f"jflux.fuse: f must be a function, got {type(f).__name__}")
    only = None if only is None else _checked("only", only)
    return Fused(f, only, _checked("skip", skip))


def _checked(name: str, wanted: Collection[str]) -> tuple[str, ...]:
    wanted = (wanted,) if isinstance(wanted, str) else tuple(wanted)
    for one in wanted:
        if one not in OPS and ":" not in one:
            raise ValueError(
                f"jflux.fuse: {name}={one!r} must be a line such as 'model.py:120', or one of "
                f"{', '.join(OPS)}"
            )
    return wanted


class Fused:
    """A function whose collectives are jflux's. Made by :func:`jflux.fuse`."""

    def __init__(
        self, f: Callable[..., Any], only: tuple[str, ...] | None, skip: tuple[str, ...]
    ) -> None:
        functools.update_wrapper(self, f, updated=())
        self._f, self._only, self._skip = f, only, skip
        self._functions: collections.OrderedDict[Hashable, _Flat] = collections.OrderedDict()
        self._plans: collections.OrderedDict[Hashable, tuple[Any, BodyPlan]]
        self._plans = collections.OrderedDict()

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        if getattr(jax.config, "jax_disable_jit", False):  # for who wants to see values
            return self._f(*args, **kwargs)
        if _have_modules(args, kwargs):
            from flax import nnx

            pure, state = _of_state(self._f, args, kwargs)
            result, after = Fused(pure, self._only, self._skip)(state)
            nnx.update((args, kwargs), after)
            return result
        jaxpr, plan, arrays, tree = self._planned(args, kwargs)
        results = map(_as_array, evaluate(plan, jaxpr.consts, arrays))
        return jax.tree.unflatten(tree, list(results))

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        if instance is None:
            return self
        bound: Any = functools.partial(self, instance)
        bound.report = functools.partial(self.report, instance)
        return bound

    def report(self, /, *args: Any, **kwargs: Any) -> Report:
        """What is found in a call. Nothing runs.

        Args:
          *args, **kwargs: of the function; `jax.ShapeDtypeStruct` may stand for arrays.

        Returns:
          The sites, in the order of the program: a :class:`Report`, which prints as a table.
        """
        if _have_modules(args, kwargs):
            pure, state = _of_state(self._f, args, kwargs)
            return Fused(pure, self._only, self._skip).report(state)
        _, plan, _, _ = self._planned(args, kwargs)
        return Report.of(plan)

    def _planned(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, BodyPlan, list[Any], Any]:
        """(the jaxpr, its plan, the arrays that it takes, the results' tree)."""
        leaves, tree = jax.tree.flatten((args, kwargs))
        is_array = tuple(map(_is_array, leaves))
        arrays = [leaf for leaf, is_ in zip(leaves, is_array, strict=True) if is_]
        others = [leaf for leaf, is_ in zip(leaves, is_array, strict=True) if not is_]
        values = tuple(map(_value, others))
        key = None if _CHANGES in values else (tree, is_array, values)
        flat = _remembered(
            self._functions, key, lambda: _Flat(self._f, tree, is_array, tuple(others))
        )
        jaxpr, shapes = jax.make_jaxpr(flat, return_shape=True)(*arrays)
        mesh = jax.sharding.get_abstract_mesh()
        axes = {name: mesh.shape[name] for name in mesh.manual_axes}
        scope = Scope(axes, meshes.platform(), self._wants)
        shardings = tuple(map(_sharding, arrays))
        planned_by = id(jaxpr.jaxpr), tuple(axes.items()), scope.platform, shardings
        # Beside its jaxpr, whose id would be another's once it is gone.
        _, plan = _remembered(
            self._plans, planned_by, lambda: (jaxpr, _plan(jaxpr, scope, shardings))
        )
        return jaxpr, plan, arrays, jax.tree.structure(shapes)

    def _wants(self, op: str, equation: JaxprEqn) -> bool:
        line = where(equation).rpartition(" (")[0]  # less the function's name

        def is_in(wanted: Sequence[str]) -> bool:
            return any(one in (op, line) or line.endswith(f"/{one}") for one in wanted)

        return (self._only is None or is_in(self._only)) and not is_in(self._skip)


def _sharding(array: Any) -> NamedSharding | None:
    """Of an array, or of what stands for one, as far as it is known."""
    sharding = None if isinstance(array, jax.core.Tracer) else getattr(array, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) else None


def _plan(jaxpr: ClosedJaxpr, scope: Scope, shardings: Sequence[NamedSharding | None]) -> BodyPlan:
    arguments = zip(equations_of(jaxpr).invars, shardings, strict=True)
    known = {var: sharding for var, sharding in arguments if sharding is not None}
    meshes_of = {sharding.mesh for sharding in known.values()}
    mesh = meshes_of.pop() if len(meshes_of) == 1 else None
    given = {var: of_sharding(s, type_of(var).ndim, mesh) for var, s in known.items()}
    specs = {var: spec for var, spec in given.items() if spec is not None}
    return Planner().plan(jaxpr, scope, specs, mesh)


def _have_modules(*args: Any) -> bool:
    """Whether there is a module of NNX among the arguments. As a pytree it is copied, and what the
    function does to it would be lost."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return False
    kinds = tuple(getattr(nnx, name) for name in ("Object", "Module") if hasattr(nnx, name))

    def is_module(node: Any) -> bool:
        return isinstance(node, kinds)

    return any(map(is_module, jax.tree.leaves(args, is_leaf=is_module)))


def _of_state(f: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Callable[..., Any], Any]:
    """f as a function of the state of its arguments, modules of NNX among them: (that state) ->
    (f's results, the state afterwards); and the state."""
    from flax import nnx

    graphdef, state = nnx.split((args, kwargs))

    @functools.wraps(f, updated=())
    def pure(state: Any) -> Any:
        args, kwargs = nnx.merge(graphdef, state)
        return f(*args, **kwargs), nnx.state((args, kwargs), nnx.Variable)

    return pure, state


def _is_array(leaf: Any) -> bool:
    """Whether a leaf of the arguments is traced."""
    if isinstance(leaf, np.ndarray | np.generic):
        return leaf.dtype.kind not in "OSUMm"
    return isinstance(leaf, jax.Array | jax.ShapeDtypeStruct)


def _as_array(result: Any) -> Any:
    """A result that the program has as a number is one too, as it is under `jax.jit`."""
    return result if isinstance(result, jax.Array) else jnp.asarray(result)


#: Stands for an object that may change, so that no trace with it is remembered.
_CHANGES = object()
_FIXED = (str, bytes, type(None), enum.Enum, np.dtype, Mesh, AbstractMesh, PartitionSpec)


def _value(leaf: Any) -> Hashable:
    """What tells a leaf that is no array from others."""
    if isinstance(leaf, bool | int | float | complex):
        return type(leaf), repr(leaf)  # 0.0 is not -0.0, and NaN is NaN
    return (type(leaf), leaf) if isinstance(leaf, _FIXED) else _CHANGES


class _Flat:
    """f as a function of its arrays alone. JAX remembers its traces as long as it exists."""

    def __init__(
        self, f: Callable[..., Any], tree: Any, is_array: Sequence[bool], others: Sequence[Any]
    ) -> None:
        functools.update_wrapper(self, f, updated=())
        self._f, self._tree, self._is_array, self._others = f, tree, is_array, others

    def __call__(self, *arrays: Any) -> Any:
        of_arrays, others = iter(arrays), iter(self._others)
        leaves = [next(of_arrays if is_ else others) for is_ in self._is_array]
        args, kwargs = jax.tree.unflatten(self._tree, leaves)
        return self._f(*args, **kwargs)


def _remembered(
    known: collections.OrderedDict[Hashable, Any], key: Hashable, make: Callable[[], Any]
) -> Any:
    """What `known` has under the key, or what is made now; not remembered under None. What was not
    asked for the longest is forgotten."""
    found = known.pop(key, None)
    if found is None:
        found = make()
    if key is not None:
        known[key] = found
        while len(known) > MOST:
            known.popitem(last=False)
    return found
