"""The specification of each op. Other modules, tests and benchmarks iterate over the specs of all
ops (`all_ops`) instead of naming ops."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import PartitionSpec

from .._call import plans
from ._collective import Collective


@dataclasses.dataclass(frozen=True)
class Layout:
    """Which dimension of each array of a call the ranks split, by the name of the argument or
    result. None means that every rank has the whole array.

    Attributes:
      rows: of arrays with x's leading dimensions.
      others: of arrays without: weights, biases, a norm's factors.
    """

    rows: Mapping[str, int | None]
    others: Mapping[str, int | None] = dataclasses.field(default_factory=dict)


def _no_call(*operands: Any, **options: Any) -> Any:
    raise NotImplementedError("no gradient of another op calls this one")


def _x_alone(x: Any, axis_name: Any) -> tuple[Any, ...]:
    return (x,)


@dataclasses.dataclass(frozen=True)
class OpSpec:
    """One op.

    Attributes:
      name: in Python, in C++ and in messages.
      function: the public one.
      reference: the same in plain `lax`.
      communication: (ndim, **options) -> the collective, of an x with so many dimensions.
      product: "after", if the collective's result is multiplied with w (``f(x) @ w``), "before", if
        it takes the product (``f(x @ w)``), None, if there is no w.
      dimension: name of the option that says which dimension of rows travels, if there is one.
      dtypes: by platform ("cpu", "cuda"), the types that the kernels take; empty: all.
      ways: options with which to call it on a matrix x, one for each way that its kernels work.
      call: the op on one rank's operands that were checked, for the gradients of other ops.
      gradient: the ops of jflux that its gradient calls.
      sizes: global m, n, k that are worth timing.
      tuned: whether its kernels have configurations to choose from.
      checked_on_gpus: whether its GPU kernels have run on a GPU and been compared with the
        reference. Until then GPUs take the reference, unless ``jflux.config.unchecked_kernels``.
      operands: of an op without w: (x, axis_name) -> the operands of a call that moves x as
        `communication` says.
      most_bytes: of an op without w: (ranks) -> up to so many bytes of x its kernels are chosen on
        GPUs.
    """

    name: str
    function: Callable[..., Any]
    reference: Callable[..., Any]
    communication: Callable[..., Collective]
    product: str | None = None
    dimension: str | None = None
    dtypes: Mapping[str, frozenset[np.dtype]] = dataclasses.field(default_factory=dict)
    ways: tuple[Mapping[str, Any], ...] = ({},)
    call: Callable[..., Any] = _no_call
    gradient: tuple[str, ...] = ()
    sizes: tuple[tuple[int, int, int], ...] = ()
    tuned: bool = False
    checked_on_gpus: bool = True
    operands: Callable[[Any, Any], tuple[Any, ...]] = _x_alone
    most_bytes: Callable[[int], int] | None = None

    def takes(self, platform: str, dtype: Any) -> bool:
        """Whether the kernels take operands of this type. `platform`: as JAX or jflux names it."""
        dtypes = self.dtypes.get("cuda" if platform == "gpu" else platform, frozenset())
        return not dtypes or np.dtype(dtype) in dtypes

    def on(self, x: Any, *, axis_name: Any, reference: bool = False, **options: Any) -> Any:
        """The result of the op without w, or of its reference, for a rank's x."""
        function = self.reference if reference else self.function
        return function(*self.operands(x, axis_name), axis_name=axis_name, **options)

    # ---- Where the ranks' parts of global arrays are -------------------------------------------

    def layout(self, ndim: int, *, transpose_rhs: bool = False, **options: Any) -> Layout:
        """The layout of x, w and y of a product. `ndim` is the number of x's dimensions."""
        collective, last = self.communication(ndim, **options), ndim - 1
        k_axis, n_axis = (1, 0) if transpose_rhs else (0, 1)
        x: int | None
        w: int | None
        y: int | None
        if self.product == "after":
            x = collective.concat
            if collective.kind == "all_gather":
                w, y = n_axis, last
            elif collective.split == last:  # y is a partial sum, the same shape on every rank
                w, y = k_axis, None
            else:
                w, y = None, collective.split
        elif collective.sums():
            x, w, y = last, k_axis, collective.split
        else:  # the product is split along one dimension, and y along another
            x, w = collective.concat, None
            if collective.concat == last:
                x, w = None, n_axis
            y = collective.split
        return Layout({"x": x, "y": y}, {"w": w})

    def partition(
        self, axis: Any, *, transpose_rhs: bool = False, **options: Any
    ) -> tuple[PartitionSpec, PartitionSpec, PartitionSpec]:
        """How matrices x, w and y are sharded over a mesh axis."""
        layout = self.layout(2, transpose_rhs=transpose_rhs, **options)

        def spec(dimension: int | None) -> PartitionSpec:
            return PartitionSpec(*(axis if i == dimension else None for i in range(2)))

        return spec(layout.rows["x"]), spec(layout.others["w"]), spec(layout.rows["y"])

    # ---- What it means, in numpy -----------------------------------------------------------------

    def exact(self, xs: Sequence[Any], ws: Sequence[Any], **options: Any) -> list[Any]:
        """y of each rank of a group, from all ranks' x and w [k, n]."""
        collective = self.communication(np.ndim(xs[0]), **options)
        if self.product == "after":
            return [x @ w for x, w in zip(collective.exact(xs), ws, strict=True)]
        return collective.exact([x @ w for x, w in zip(xs, ws, strict=True)])

    def exact_vjp(
        self, xs: Sequence[Any], ws: Sequence[Any], dys: Sequence[Any], **options: Any
    ) -> tuple[list[Any], list[Any]]:
        """(dx, dw) of each rank, from all ranks' x, w and dy."""
        collective = self.communication(np.ndim(xs[0]), **options)
        rows = tuple(range(np.ndim(xs[0]) - 1))
        if self.product == "after":
            multiplied, dproducts = collective.exact(xs), list(dys)
        else:
            multiplied, dproducts = list(xs), collective.transposed().exact(dys)
        dxs = [d @ w.T for d, w in zip(dproducts, ws, strict=True)]
        dws = [np.tensordot(x, d, (rows, rows)) for x, d in zip(multiplied, dproducts, strict=True)]
        return (collective.transposed().exact(dxs) if self.product == "after" else dxs), dws


@functools.cache
def all_ops() -> Mapping[str, OpSpec]:
    """The specs of all ops by name: those that files of this folder's folders have, as `SPECS`."""
    found: dict[str, OpSpec] = {}
    package = importlib.import_module(__package__)
    names = [m.name for m in pkgutil.walk_packages(package.__path__, f"{__package__}.")]
    for name in sorted(names, key=lambda name: name.rpartition(".")[2]):
        specs = getattr(importlib.import_module(name), "SPECS", ())
        found |= {spec.name: spec for spec in specs}
    return found


def products() -> list[OpSpec]:
    """The ops that multiply."""
    return [spec for spec in all_ops().values() if spec.product is not None]


def collectives() -> list[OpSpec]:
    """The ops that only communicate."""
    return [spec for spec in all_ops().values() if spec.product is None]


def ops_with_checked_kernels(platform: str) -> list[OpSpec]:
    """The ops whose kernels this platform takes as jflux is configured."""
    return [
        spec
        for spec in all_ops().values()
        if platform == "cpu" or plans.why_unchecked(spec.checked_on_gpus) is None
    ]
