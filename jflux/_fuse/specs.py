"""How the arrays of a body outside of `shard_map` are split over a mesh: as their types say
(Explicit axes), or as far as constraints and the arguments' shardings tell (Auto axes)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from .bodies import Atom, Body, equations_of, inner_bodies, type_of
from .views import View

#: The mesh axes of each dimension.
Spec = tuple[tuple[Any, ...], ...]
CONSTRAINTS = ("reshard", "sharding_constraint")
#: Primitives whose result has the sharding of their operands, which have its shape, or are scalars.
ELEMENTWISE = frozenset(
    """abs add add_any and ceil clamp convert_element_type copy cos div eq erf erfc erf_inv exp exp2
    expm1 floor ge gt integer_pow is_finite le log log1p logistic lt max min mul name ne neg
    nextafter not or pow rem round rsqrt select_n sign sin sqrt square stop_gradient sub tan tanh
    xor""".split()
)

#: Primitives that run a body once.
CALLS = ("jit", "closed_call", "custom_jvp_call")

#: Primitives whose results have as many dimensions as the first operand, and are parts of it along
#: some.
PARTS = frozenset(
    """cumlogsumexp cummax cummin cumprod cumsum dynamic_slice pad reduce_precision rev slice
    split""".split()
)


def normal(spec: Any, ndim: int, mesh: Any) -> Spec | None:
    """A PartitionSpec as a Spec, without axes of one rank; None: it says nothing about a dimension,
    or of sums."""
    if getattr(spec, "unreduced", None) or getattr(spec, "reduced", None):
        return None
    entries: list[tuple[Any, ...]] = []
    for entry in (*spec, *[None] * (ndim - len(spec))):
        if entry is PartitionSpec.UNCONSTRAINED:
            return None
        axes = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
        entries.append(tuple(axis for axis in axes if mesh.shape[axis] > 1))
    return tuple(entries)


def partition_spec(spec: Spec) -> PartitionSpec:
    return PartitionSpec(
        *((axes[0] if len(axes) == 1 else axes) if axes else None for axes in spec)
    )


def of_sharding(sharding: Any, ndim: int, mesh: Any) -> Spec | None:
    """None: not known, or over another mesh."""
    if not isinstance(sharding, NamedSharding) or not _is_same(sharding.mesh, mesh):
        return None
    return normal(sharding.spec, ndim, mesh)


def _mesh_of(sharding: Any) -> Any:
    return sharding.mesh if isinstance(sharding, NamedSharding) else None


def _is_same(one: Any, other: Any) -> bool:
    """Whether two meshes are one; of an abstract one as far as is known."""
    if one == other:
        return True
    if other is None or (isinstance(one, Mesh) and isinstance(other, Mesh)):
        return False
    first, second = (getattr(mesh, "abstract_mesh", mesh) for mesh in (one, other))
    return bool(first == second)


class Specs:
    """What is known of a body's arrays.

    Attributes:
      mesh: the mesh; None: none is known.
    """

    def __init__(self, body: Body, given: Mapping[Var, Spec], mesh: Any) -> None:
        self.body, self.mesh = body, mesh
        self._known = dict(given)
        self._calls: dict[Any, list[Spec | None]] = {}
        self._typed = self._explicit_mesh()
        if self._typed is not None:
            self.mesh = self._typed
            return
        for equation in body.equations:  # any constraint names the mesh
            if self.mesh is None and equation.primitive.name in CONSTRAINTS:
                self.mesh = _mesh_of(equation.params.get("sharding"))
        if self.mesh is not None:
            for of_products in (False, True):  # what the program says counts first
                self._forward(of_products)
                self._backward()

    @property
    def is_explicit(self) -> bool:
        """Whether types say how arrays are split."""
        return self._typed is not None

    def of(self, atom: Atom) -> Spec | None:
        """How an array is split; None: not known."""
        ndim = type_of(atom).ndim
        if self._typed is not None:
            return normal(type_of(atom).sharding.spec, ndim, self.mesh)
        if isinstance(atom, Literal):
            return ((),) * ndim
        return self._known.get(atom)

    def of_arguments(self, equation: JaxprEqn, body: Jaxpr) -> tuple[dict[Var, Spec], Any]:
        """What is known of the arguments of a body of an equation, and the mesh."""
        if self._typed is not None or equation.primitive.name == "while":
            return {}, self.mesh
        operands = equation.invars[len(equation.invars) - len(body.invars) :]
        shardings = equation.params.get("in_shardings", (None,) * len(operands))
        meshes = [mesh for mesh in map(_mesh_of, shardings) if mesh is not None]
        mesh = meshes[0] if self.mesh is None and meshes else self.mesh
        given: dict[Var, Spec] = {}
        for var, atom, sharding in zip(body.invars, operands, shardings, strict=True):
            spec = of_sharding(sharding, type_of(var).ndim, mesh)
            spec = self.of(atom) if spec is None and self.mesh is not None else spec
            if spec is not None:
                given[var] = spec[len(spec) - type_of(var).ndim :]  # one step of a scan
        return given, mesh

    def _explicit_mesh(self) -> Any:
        for atom in (*self.body.jaxpr.invars, *self.body.maker):
            mesh = getattr(getattr(type_of(atom), "sharding", None), "mesh", None)
            if mesh is not None and not mesh.empty:
                is_explicit = all(kind == AxisType.Explicit for kind in mesh.axis_types)
                return mesh if is_explicit else None
        return None

    def _set(self, atom: Atom, spec: Spec | None) -> None:
        if spec is not None and isinstance(atom, Var):
            self._known.setdefault(atom, spec)

    def _forward(self, of_products: bool) -> None:
        for equation in self.body.equations:
            name = equation.primitive.name
            if name in CONSTRAINTS:
                self._set(equation.outvars[0], _constraint(equation, self.mesh))
            elif name in ELEMENTWISE:
                self._set(equation.outvars[0], self._of_operands(equation))
            elif name == "dot_general":
                if of_products:
                    self._set(equation.outvars[0], self._of_product(equation))
            elif name in (*CALLS, "scan", "remat2", "checkpoint"):
                self._of_call(equation)
            elif name in PARTS or len(equation.invars) == len(equation.outvars) == 1:
                if (spec := self.of(equation.invars[0])) is not None:
                    for result in equation.outvars:
                        self._set(result, _of_view(equation, result, spec, self.mesh))

    def _backward(self) -> None:
        for equation in reversed(self.body.equations):
            name = equation.primitive.name
            if name == "transpose" and (spec := self.of(equation.outvars[0])) is not None:
                came_from = equation.params["permutation"]
                before = (spec[came_from.index(i)] for i in range(len(spec)))
                self._set(equation.invars[0], tuple(before))
            if name not in (*CONSTRAINTS, *ELEMENTWISE) and not _is_elementwise(equation):
                continue
            shape = type_of(equation.outvars[0]).shape
            known = (spec for var in equation.outvars if (spec := self.of(var)) is not None)
            spec = next(known, None)
            for atom in (*equation.invars, *equation.outvars):
                if isinstance(atom, Var) and type_of(atom).shape == shape:
                    self._set(atom, spec)

    def _of_operands(self, equation: JaxprEqn) -> Spec | None:
        shape = type_of(equation.outvars[0]).shape
        for atom in equation.invars:
            if isinstance(atom, Var) and type_of(atom).shape == shape and self.of(atom) is not None:
                return self.of(atom)
        return None

    def _of_product(self, equation: JaxprEqn) -> Spec | None:
        """Where no axis is in two of its dimensions."""
        lhs, rhs = (self.of(atom) for atom in equation.invars)
        if lhs is None or rhs is None:
            return None
        spec = natural(equation, lhs, rhs)
        axes = [axis for entry in spec for axis in entry]
        return spec if len(axes) == len(set(axes)) else None

    def _of_call(self, equation: JaxprEqn) -> None:
        ((_, (inner_body,)),) = inner_bodies(equation)
        body = equations_of(inner_body)
        given, mesh = self.of_arguments(equation, body)
        key = id(equation), tuple(given.get(var) for var in body.invars)
        if key not in self._calls:
            inner = Specs(Body(body), given, mesh)
            self._calls[key] = [inner.of(atom) for atom in body.outvars]
        for var, spec in zip(equation.outvars, self._calls[key], strict=True):
            if spec is not None:
                more = type_of(var).ndim - len(spec)  # all steps of a scan
                self._set(var, (*((),) * more, *spec))


def _is_elementwise(equation: JaxprEqn) -> bool:
    """Whether it is a call, such as that of `jax.nn.silu`, of elementwise equations alone, whose
    results have one shape."""
    if equation.primitive.name not in CALLS or not equation.outvars:
        return False
    ((_, (body,)),) = inner_bodies(equation)
    shape = type_of(equation.outvars[0]).shape
    inner = equations_of(body).eqns
    results = (var for one in (equation, *inner) for var in one.outvars)
    return all(type_of(var).shape in (shape, ()) for var in results) and all(
        one.primitive.name in ELEMENTWISE or _fills(one) or _is_elementwise(one) for one in inner
    )


def _fills(equation: JaxprEqn) -> bool:
    """Whether it makes an array of a scalar."""
    is_broadcast = equation.primitive.name == "broadcast_in_dim"
    return is_broadcast and type_of(equation.invars[0]).shape == ()


def natural(equation: JaxprEqn, lhs: Spec, rhs: Spec) -> Spec:
    """How a product's result is split if each of its dimensions is as in the operand."""
    (of_lhs, of_rhs), (batch, of_batch) = equation.params["dimension_numbers"]
    rows = (axes for i, axes in enumerate(lhs) if i not in (*of_lhs, *batch))
    columns = (axes for i, axes in enumerate(rhs) if i not in (*of_rhs, *of_batch))
    return (*(lhs[i] for i in batch), *rows, *columns)


def _constraint(equation: JaxprEqn, mesh: Any) -> Spec | None:
    if equation.params.get("unconstrained_dims"):
        return None
    sharding = equation.params.get("sharding") or equation.params.get("dst_sharding")
    return of_sharding(sharding, type_of(equation.outvars[0]).ndim, mesh)


def _of_view(equation: JaxprEqn, result: Var, spec: Spec, mesh: Any) -> Spec | None:
    """Of a result of the first operand alone. Of a view, a dimension is split as the first of the
    source's dimensions that it begins with."""
    aval, shape = type_of(equation.invars[0]), type_of(result).shape
    if not aval.size:
        return None
    if equation.primitive.name in PARTS:
        whole = [a == b for a, b in zip(aval.shape, shape, strict=True)]
        return spec if all(w or not axes for w, axes in zip(whole, spec, strict=True)) else None
    if equation.primitive.name == "broadcast_in_dim":
        new: list[tuple[Any, ...]] = [()] * len(shape)
        given = [1] * len(shape)
        for i, at in enumerate(equation.params["broadcast_dimensions"]):
            given[at] = aval.shape[i]
            new[at] = spec[i]  # of size 1 none is split
        # A bias says nothing about the rows that it is added to.
        return tuple(new) if tuple(given) == shape else None
    if equation.primitive.name.startswith("reduce_") and "axes" in equation.params:
        gone = equation.params["axes"]
        kept = tuple(axes for i, axes in enumerate(spec) if i not in gone)
        return None if any(spec[i] for i in gone) else kept
    view = View.of(aval.shape).through(equation)
    if view is None:
        return None
    source = [view.atoms.resolve(dimension) for dimension in view.source]
    axes_of = {
        dimension[0]: axes for dimension, axes in zip(source, spec, strict=True) if dimension
    }
    found: list[tuple[Any, ...]] = []
    for dimension in view.resolved():
        if any(axes_of.get(atom) for atom in dimension[1:]):
            return None  # in strides
        axes = axes_of.get(dimension[0], ()) if dimension else ()
        if axes and view.atoms.sizes[dimension[0]] % ranks_of(mesh, axes):
            return None
        found.append(axes)
    return tuple(found)


def ranks_of(mesh: Any, axes: Sequence[Any]) -> int:
    return math.prod(mesh.shape[axis] for axis in axes)
