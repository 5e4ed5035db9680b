"""The ops as the ``dot_general`` of layers that exist."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from .. import _config
from .._ops import _lax
from .._ops._recipe import AnyRecipe, DelayedScaling, Recipe
from .._ops.products.all_gather_matmul import all_gather_matmul
from .._ops.products.matmul import matmul
from .._ops.products.matmul_all_reduce import matmul_all_reduce
from .._ops.products.matmul_reduce_scatter import matmul_reduce_scatter
from .._ranks import global_arrays, meshes
from .._ranks.meshes import AxisName
from . import _rules, _shared_gather
from ._einsum import Einsum

#: Recipes by the names that they have as quantizations of MaxText.
QUANTIZATIONS = {
    "jflux_fp8_tensor": Recipe.tensor,
    "jflux_fp8_row": Recipe.row,
    "jflux_fp8_block": Recipe.block,
}

Entries = list[tuple[Any, ...]]  # for each dimension, the mesh axes that it is split over


@dataclasses.dataclass(frozen=True)
class TensorParallel:
    """Brings the ops into a model of Flax layers that knows nothing of jflux::

        tp = jflux.nn.TensorParallel("tp")
        nn.Dense(4 * d, dot_general=tp.dot_general(("embed", "mlp")))
        nn.Dense(d, dot_general=tp.dot_general(("mlp", "embed")))

    It has the ``dot_general_cls`` of MaxText's quantization objects, and can stand in for one.

    JAX tells a layer how an array is sharded only under explicit sharding. Under automatic
    sharding (`AxisType.Auto`) nothing is known inside ``jit``, and inside ``shard_map`` an array is
    one rank's: there the kernel's axes have to be said, as they are above, and activations are
    taken to be split by sequence position, as `sequence_parallel` says.

    Attributes:
      axis_name: the mesh axis of the ranks, or a tuple of them.
      sequence_parallel: between a row-parallel layer and the next column-parallel one, activations
        are split over the ranks by sequence position. False: they are the same on all ranks.
        Where types tell how x is sharded, or `out_sharding` how the result is to be, those count.
      sequence_dimension: of x as the product sees it, [..., k]: which dimension that is.
      rules: which mesh axes logical names stand for, as Flax takes them. By default those of
        Flax's context (``flax.linen.logical_axis_rules``), or if there are none
        :func:`jflux.nn.logical_axis_rules`. Names of mesh axes stand for themselves.
      x_spec: on global arrays under automatic sharding: how x is sharded beside `axis_name`, such
        as ``P("data")``.
      mesh: for global arrays; by default the ambient mesh (`jax.set_mesh`), or an array's own.
      share_gathers: under ``jit``, column-parallel products of the same x (the same Python object:
        queries, keys and values) share one gather, which is in the first one's product. Not with
        a recipe.
      recipe: a :class:`jflux.Recipe`, or the name of one as a quantization: "jflux_fp8_tensor",
        "jflux_fp8_row" or "jflux_fp8_block". Products of split kernels are made in 8 bits by it,
        forward and backward; also those that exchange nothing, and those of one rank.
      amax_history_length: with `Recipe.tensor`: scales are those of so many earlier steps
        (:class:`jflux.DelayedScaling`). Their state is in the modules that :meth:`dot_general_cls`
        makes, or in :class:`jflux.nn.nnx.DelayedDotGeneral`.
      wire, grad_wire: of row-parallel products, as in :func:`jflux.nn.row_parallel`.
    """

    axis_name: AxisName = "tp"
    sequence_parallel: bool = True
    sequence_dimension: int = -2
    rules: _rules.Rules | None = None
    x_spec: PartitionSpec | None = None
    mesh: Mesh | AbstractMesh | None = None
    share_gathers: bool = True
    recipe: AnyRecipe | str | None = None
    amax_history_length: int | None = None
    wire: str | None = None
    grad_wire: str | None = None

    # What MaxText asks of an object that it takes for a quantization.
    quant_mode: ClassVar[str] = "train"
    needs_apply_rngs: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.rules is not None:  # so that it can be hashed, as modules' fields are
            rules = tuple((k, tuple(v) if isinstance(v, list) else v) for k, v in self.rules)
            object.__setattr__(self, "rules", rules)
        if isinstance(self.recipe, str):
            if self.recipe not in QUANTIZATIONS:
                raise ValueError(
                    f"jflux.nn.TensorParallel: recipe={self.recipe!r} must be a jflux.Recipe, or "
                    f"one of {', '.join(QUANTIZATIONS)}"
                )
            object.__setattr__(self, "recipe", QUANTIZATIONS[self.recipe])
        if self.amax_history_length is not None:
            if not isinstance(self.recipe, Recipe):
                raise ValueError("jflux.nn.TensorParallel: amax_history_length= goes with a recipe")
            self.recipe.delayed(self.amax_history_length)  # which says if it cannot be

    def dot_general(self, mesh_axes: Sequence[Any] = ()) -> DotGeneral:
        """For ``nn.Dense(dot_general=...)`` and ``nnx.Linear(dot_general=...)``.

        Args:
          mesh_axes: names of the kernel's dimensions, of mesh axes or logical ones; none: what the
            kernel's type says, under explicit sharding.
        """
        if self.amax_history_length is not None:
            raise ValueError(
                "jflux.nn.TensorParallel: a dot_general by earlier steps has state: pass "
                "dot_general_cls=, or a jflux.nn.nnx.DelayedDotGeneral"
            )
        return DotGeneral(self, tuple(mesh_axes))

    def dot_general_cls(self, mesh_axes: Sequence[Any] = ()) -> Callable[[], Any]:
        """For ``dot_general_cls=...``, and as MaxText calls it: makes :meth:`dot_general`'s result,
        as a linen module if there is Flax (MaxText wraps it in ``nnx.bridge.ToNNX``)."""
        dot = DotGeneral(self, tuple(mesh_axes))
        try:
            from . import linen
        except ImportError:
            return lambda: self.dot_general(mesh_axes)
        if self.amax_history_length is None:
            return functools.partial(linen.DotGeneralModule, dot)
        return functools.partial(
            linen.Fp8DirectDotGeneralOp, amax_history_length=self.amax_history_length, dot=dot
        )

    def einsum(self, mesh_axes: Sequence[Any] = ()) -> Callable[..., jax.Array]:
        """A ``jnp.einsum`` whose products of activations and a kernel take the ops, for
        ``nnx.Einsum(einsum_op=...)`` and models that write einsums themselves::

            q_einsum = tp.einsum(("heads", "embed", None))  # of kernels [N, D, H]
            q = q_einsum("BTD,NDH->BTNH", x, w)

        Dimensions may be in any order, the kernel the first operand or the second, and there may
        be several of each kind, also "..." in x. Other equations, such as those of a mixture's
        experts, which MaxText asks this for, are `jnp.einsum`'s.

        Args:
          mesh_axes: names of the kernel's dimensions as it is in the equation, as for
            :meth:`dot_general`; none: `jnp.einsum`.
        """
        return Einsum(self.dot_general(), tuple(mesh_axes)) if mesh_axes else jnp.einsum


@dataclasses.dataclass(frozen=True)
class DotGeneral:
    """`jax.lax.dot_general` which takes the fused op for a product whose kernel, the second
    operand, is split over the ranks. See :class:`TensorParallel`, which makes it.

    ====================  ==========================  =====================================
    kernel [k, n]         x [..., s, k]               op
    ====================  ==========================  =====================================
    split by columns      split by sequence position  :func:`jflux.all_gather_matmul`
    split by columns      the same on all ranks       `lax.dot_general`: nothing to exchange
                                                      (:func:`jflux.matmul` with a recipe)
    split by rows         result split by sequence    :func:`jflux.matmul_reduce_scatter`
    split by rows         result the same everywhere  :func:`jflux.matmul_all_reduce`
    anything else                                     `lax.dot_general`
    ====================  ==========================  =====================================

    k and n may be several dimensions each, as in ``DenseGeneral``; the first one of them is the one
    that is split. Of global arrays, a sequence that the ranks do not divide is taken to be the same
    on all ranks. Without a mesh that has the axis, everything is `lax.dot_general`.
    """

    of: TensorParallel
    mesh_axes: tuple[Any, ...] = ()

    def __call__(
        self,
        lhs: Any,
        rhs: Any,
        dimension_numbers: Any,
        precision: Any = None,
        preferred_element_type: Any = None,
        *,
        out_sharding: Any = None,
        **others: Any,
    ) -> jax.Array:
        options = {"precision": precision, "preferred_element_type": preferred_element_type}
        product = None if others else _as_product(lhs, rhs, dimension_numbers)
        call = None if product is None else self._plan(product, lhs, rhs, out_sharding)
        if call is not None:
            return call(**options)
        if product is None and self.mesh_axes and self._is_split(lhs, rhs):
            _config.fall_back(
                "nn.DotGeneral",
                f"the product of {lhs.dtype}{list(lhs.shape)} and a kernel "
                f"{rhs.dtype}{list(rhs.shape)} by {dimension_numbers} is not x [..., k] times "
                "[k, n] or [n, k], of one floating type",
            )
        if out_sharding is not None:
            others["out_sharding"] = out_sharding
        return _lax.dot_general(lhs, rhs, dimension_numbers, **options, **others)

    def with_state(self, arrays: Mapping[str, jax.Array]) -> DotGeneral:
        """The same with the arrays of its :class:`jflux.DelayedScaling`."""
        recipe = self.of.recipe
        assert isinstance(recipe, Recipe)
        state = DelayedScaling(**arrays, recipe=recipe)
        of = dataclasses.replace(self.of, recipe=state, amax_history_length=None)
        return DotGeneral(of, self.mesh_axes)

    def _plan(
        self, product: Product, lhs: Any, rhs: Any, out_sharding: Any
    ) -> Callable[..., jax.Array] | None:
        """The op to call, with `lax.dot_general`'s options; None: no op."""
        of, names = self.of, meshes.as_tuple(self.of.axis_name)
        manual, mesh = meshes.is_bound(names), self._mesh_of(lhs, rhs)
        if mesh is None or any(name not in mesh.axis_names for name in names):
            if math.prod(lhs.shape[: product.lead]) == 1:
                return None  # MaxText makes its model outside of the mesh, by calls of one row
            if mesh is None:
                _say(
                    "there is no mesh: call the model under jax.set_mesh(mesh). A call that makes "
                    "parameters alone, as MaxText's abstract one, says this too; "
                    "jflux.explaining() lists the ops of the steps"
                )
            else:
                _say(f"axis_name={of.axis_name!r} is no axis of the mesh, {mesh.axis_names}")
            return None
        world = math.prod(mesh.shape[name] for name in names)
        kernel = self._kernel(rhs, mesh)
        if world == 1 and of.recipe is None:
            return None
        if kernel is None:
            _say(
                'the type of a kernel does not say how it is split: dot_general(("embed", "mlp")) '
                "names its dimensions"
            )
            return None
        at_k, at_n = product.first_k, product.first_n
        split = [i for i, axes in enumerate(kernel) if set(names) <= set(axes)]
        if split not in ([at_k], [at_n]):
            return None
        by_rows = split == [at_k]
        sequence = product.lead + 1 + of.sequence_dimension
        if of.sequence_dimension >= 0:
            sequence = of.sequence_dimension
        if by_rows:
            known = _entries(out_sharding, product.lead + product.columns)
        else:
            known = _visible(lhs, names)
        if known is not None:
            here = [i for i, axes in enumerate(known[: product.lead]) if set(names) <= set(axes)]
            sequence_parallel, sequence = bool(here), (here or [sequence])[0]
        else:
            sequence_parallel = of.sequence_parallel
        if not 0 <= sequence < product.lead:
            return None
        if not manual:
            if rhs.shape[split[0]] % world:
                reason = f"{world} ranks do not divide dimension {split[0]} of a kernel {rhs.shape}"
                _config.fall_back("nn.DotGeneral", reason)
                return None
            sequence_parallel &= lhs.shape[sequence] % world == 0
        if not by_rows and not sequence_parallel and of.recipe is None:
            return None
        form = Form(
            product,
            by_rows,
            sequence,
            sequence_parallel,
            of.axis_name,
            of.recipe,
            of.wire,
            of.grad_wire,
        )
        if manual:
            specs: Any = None
            run = functools.partial(_call, form)
        else:
            specs = self._specs(form, lhs, rhs, mesh)
            run = functools.partial(self._over_global_arrays, form, specs, mesh, out_sharding)
        share = not by_rows and of.share_gathers and all((*lhs.shape, *rhs.shape))
        share = share and of.recipe is None
        if not share or not _shared_gather.may_share(lhs):
            return functools.partial(run, {"lhs": lhs, "rhs": rhs})
        how = (names, sequence, mesh, specs and specs["gathered"])
        return functools.partial(_shared, run, lhs, rhs, how)

    def _is_split(self, lhs: Any, rhs: Any) -> bool:
        """Whether the names of the kernel's dimensions split it over ranks."""
        names, mesh = meshes.as_tuple(self.of.axis_name), self._mesh_of(lhs, rhs)
        if mesh is None or any(name not in mesh.axis_names for name in names):
            return False
        if math.prod(mesh.shape[name] for name in names) == 1 or len(self.mesh_axes) != rhs.ndim:
            return False
        return any(set(names) <= set(axes) for axes in self._kernel(rhs, mesh) or ())

    def _mesh_of(self, *arrays: Any) -> Any:
        """That of the `shard_map` around the call, or of global arrays; None: it is not known."""
        if meshes.is_bound(meshes.as_tuple(self.of.axis_name)):
            return jax.sharding.get_abstract_mesh()
        try:
            return global_arrays._mesh_for(self.of.mesh, *arrays)
        except ValueError:
            return None

    def _kernel(self, rhs: Any, mesh: Any) -> Entries | None:
        """How the kernel is split, as far as that is known."""
        if not self.mesh_axes:
            return _visible(rhs, meshes.as_tuple(self.of.axis_name))
        if len(self.mesh_axes) != rhs.ndim:
            raise ValueError(
                f"jflux.nn.DotGeneral: mesh_axes={self.mesh_axes} must name the {rhs.ndim} "
                f"dimensions of the kernel, which has shape {rhs.shape}"
            )
        rules = self.of.rules
        if rules is None:
            rules = _rules.ambient_rules() or _rules.logical_axis_rules(self.of.axis_name)
        known = {None, *mesh.axis_names, *(name for name, _ in rules)}
        unknown = [name for name in self.mesh_axes if name not in known]
        kernel = _rules.mesh_axes(self.mesh_axes, rules, mesh.axis_names)
        if unknown and not any(kernel):
            _say(f"mesh_axes={self.mesh_axes}: neither the rules nor the mesh have {unknown}")
        return kernel

    def _specs(self, form: Form, lhs: Any, rhs: Any, mesh: Any) -> dict[str, PartitionSpec]:
        """How the product's global arrays are sharded: lhs, rhs, y and the gathered lhs."""
        names, product = meshes.as_tuple(self.of.axis_name), form.product
        sequence = form.sequence if form.sequence_parallel else None
        lead = product.lead
        given = _entries(global_arrays._spec(lhs, self.of.x_spec), lhs.ndim) or []
        rows = [tuple(n for n in axes if n not in names) for axes in given[:lead]]
        scattered = [(*axes, *names) if i == sequence else axes for i, axes in enumerate(rows)]
        for i, axes in enumerate(scattered):
            # A batch of one, as models are initialised with, is not split.
            if lhs.shape[i] % math.prod(mesh.shape.get(n, 1) for n in axes):
                rows[i], scattered[i] = (), names if i == sequence else ()
        k_dims: Entries = [()] * product.contracted
        n_dims: Entries = [()] * product.columns
        if form.by_rows:
            lhs_in, out = [*rows, names, *k_dims[1:]], [*scattered, *n_dims]
        else:
            lhs_in, out = [*scattered, *k_dims], [*rows, names, *n_dims[1:]]
        kernel: Entries = [()] * rhs.ndim
        kernel[product.first_k if form.by_rows else product.first_n] = names
        entries = {"lhs": lhs_in, "rhs": kernel, "y": out, "gathered": [*rows, ()]}
        return {name: _spec_of(of) for name, of in entries.items()}

    def _over_global_arrays(
        self,
        form: Form,
        specs: Mapping[str, PartitionSpec],
        mesh: Any,
        out_sharding: Any,
        operands: Mapping[str, Any],
        results: Any = "y",
        **options: Any,
    ) -> Any:
        if isinstance(form.recipe, DelayedScaling):  # whose arrays are operands
            operands, specs = (
                {**operands, "recipe": form.recipe},
                {**specs, "recipe": PartitionSpec()},
            )
        made = global_arrays.with_specs(
            lambda **operands: _call(form, operands, results, **options), "nn.DotGeneral", operands,
            {name: specs[name] for name in operands}, axis_name=self.of.axis_name, mesh=mesh,
            out_specs=jax.tree.map(lambda name: specs[name], results),
        )  # fmt: skip
        if out_sharding is None or AxisType.Explicit not in mesh.axis_types:
            return made
        y, *gathered = made if isinstance(made, tuple) else (made,)
        y = jax.sharding.reshard(y, out_sharding)
        return (y, *gathered) if gathered else y


def _say(why: str) -> None:
    """Why a product of a `DotGeneral` takes no op, once: a user has asked for one."""
    _config.say_once(logging.WARNING, f"jflux.nn.DotGeneral is lax.dot_general: {why}")


def _shared(
    run: Callable[..., Any], lhs: jax.Array, rhs: jax.Array, how: Any, **options: Any
) -> jax.Array:
    """A product that gathers lhs, or takes it from one that did."""
    gathered = _shared_gather.recall(lhs, rhs, how)
    if gathered is not None:
        return run({"lhs": lhs, "rhs": rhs, "gathered": gathered}, **options)
    y, gathered = run({"lhs": lhs, "rhs": rhs}, ("y", "gathered"), **options)
    _shared_gather.remember(lhs, how, gathered, y)
    return y


@dataclasses.dataclass(frozen=True)
class Form:
    """A product, and which op it takes.

    Attributes:
      by_rows: the kernel is split by rows; else by columns.
      sequence: the dimension of the rows that the ranks split between layers.
      sequence_parallel: whether they do.
    """

    product: Product
    by_rows: bool
    sequence: int
    sequence_parallel: bool
    axis_name: AxisName
    recipe: Any
    wire: str | None
    grad_wire: str | None


@dataclasses.dataclass(frozen=True)
class Product:
    """``[*rows, *k] x [*k, *n] -> [*rows, *n]``, or with ``transposed`` of a kernel [*n, *k].

    Attributes:
      lead, contracted, columns: how many dimensions are rows, k and n.
    """

    lead: int
    contracted: int
    columns: int
    transposed: bool

    @property
    def first_k(self) -> int:
        """The first of the kernel's dimensions that are contracted."""
        return self.columns if self.transposed else 0

    @property
    def first_n(self) -> int:
        return 0 if self.transposed else self.contracted


def _as_product(lhs: Any, rhs: Any, dimension_numbers: Any) -> Product | None:
    """What a `dot_general` is, if it is such a product of arrays of one floating type."""
    (lhs_k, rhs_k), batch = dimension_numbers
    lhs_k, rhs_k = tuple(lhs_k), tuple(rhs_k)
    if any(map(tuple, batch)) or not all(
        hasattr(a, "dtype") and hasattr(a, "ndim") for a in (lhs, rhs)
    ):
        return None
    if not jnp.issubdtype(lhs.dtype, jnp.floating) or lhs.dtype != rhs.dtype:
        return None
    count = len(lhs_k)
    lead, columns = lhs.ndim - count, rhs.ndim - count
    if count:  # jnp.einsum writes "btnh,nhd->btd" as (3, 2), (1, 0)
        lhs_k, rhs_k = zip(*sorted(zip(lhs_k, rhs_k, strict=True)), strict=True)
    if not count or not lead or not columns or lhs_k != tuple(range(lead, lhs.ndim)):
        return None
    if rhs_k == tuple(range(count)):
        return Product(lead, count, columns, False)
    if rhs_k == tuple(range(columns, rhs.ndim)):
        return Product(lead, count, columns, True)
    return None


def _call(form: Form, operands: Mapping[str, jax.Array], results: Any = "y", **options: Any) -> Any:
    """The op on one rank's operands: y, or with results = ("y", "gathered") lhs [*rows, k] of all
    ranks too, which the operands may have."""
    product, lhs, rhs = form.product, operands["lhs"], operands["rhs"]
    at = product.columns if product.transposed else product.contracted
    x = lhs.reshape(*lhs.shape[: product.lead], math.prod(lhs.shape[product.lead :]))
    w = rhs.reshape(math.prod(rhs.shape[:at]), math.prod(rhs.shape[at:]))
    options |= {"transpose_rhs": product.transposed}
    if form.recipe is not None:
        options["recipe"] = operands.get("recipe", form.recipe)
    gathered: list[jax.Array] = []
    if not form.by_rows and not form.sequence_parallel:
        y = matmul(x, w, **options)
        return y.reshape(*y.shape[:-1], *_columns(product, rhs))
    options["axis_name"] = form.axis_name
    if form.by_rows:
        options |= {"wire": form.wire, "grad_wire": form.grad_wire}
    if form.by_rows and form.sequence_parallel:
        y = matmul_reduce_scatter(x, w, scatter_dimension=form.sequence, **options)
    elif form.by_rows:
        y = matmul_all_reduce(x, w, **options)
    elif "gathered" in operands:
        options["gather_dimension"] = form.sequence
        y = _shared_gather.next_one(x, operands["gathered"], w, **options)
    elif results == "y":
        y = all_gather_matmul(x, w, gather_dimension=form.sequence, **options)
    else:
        y, *gathered = _shared_gather.first(x, w, gather_dimension=form.sequence, **options)
    y = y.reshape(*y.shape[:-1], *_columns(product, rhs))
    return (y, *gathered) if gathered else y


def _columns(product: Product, rhs: Any) -> tuple[int, ...]:
    """n, as the dimensions that it is."""
    return tuple(
        rhs.shape[: product.columns] if product.transposed else rhs.shape[product.contracted :]
    )


def _visible(array: Any, names: tuple[Any, ...]) -> Entries | None:
    """How a type says that an array is sharded; None if it does not tell of these axes."""
    sharding = getattr(jax.typeof(array), "sharding", None)
    if sharding is None or sharding.mesh.empty:
        return None
    types: Mapping[Any, Any] = dict(
        zip(sharding.mesh.axis_names, sharding.mesh.axis_types, strict=True)
    )
    if any(types.get(name) != AxisType.Explicit for name in names):
        return None
    return _entries(sharding, array.ndim)


def _entries(sharding: Any, ndim: int) -> Entries | None:
    """The mesh axes of each dimension of a NamedSharding or a PartitionSpec; None of None."""
    spec = getattr(sharding, "spec", sharding)
    if spec is None:
        return None
    entries = [() if e is None else meshes.as_tuple(e) for e in spec]
    return [*entries, *([()] * (ndim - len(entries)))]


def _spec_of(entries: Sequence[tuple[Any, ...]]) -> PartitionSpec:
    return PartitionSpec(*(axes or None for axes in entries))
