"""Calls of the products with everything that tests draw, and what they should give: exactly, and
how far from that they may be.

Every device gets operands of its own: an array over a mesh of shape S whose local part has shape L
is drawn as S + L, so that a rank that reads a wrong peer's data, or another group's, shows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jflux

from .. import testing
from .._ops._collective import Collective
from .._ops._spec import OpSpec, all_ops

HALVES = (jnp.bfloat16, jnp.float16)


# ---- Meshes --------------------------------------------------------------------------------------


def as_tuple(axis_name: Any) -> tuple[Any, ...]:
    """The axes of a group."""
    return axis_name if isinstance(axis_name, tuple) else (axis_name,)


def world_of(mesh: Mesh, axis_name: Any) -> int:
    """Ranks of a group."""
    return math.prod(mesh.shape[name] for name in as_tuple(axis_name))


def groups_of(mesh: Mesh, axis_name: Any) -> list[list[tuple[int, ...]]]:
    """The mesh coordinates of each group's ranks, in rank order."""
    along = as_tuple(axis_name)
    others = [n for n in mesh.axis_names if n not in along]
    groups = []
    for fixed in itertools.product(*(range(mesh.shape[n]) for n in others)):
        group = []
        for moving in itertools.product(*(range(mesh.shape[n]) for n in along)):
            at = dict(zip(others, fixed, strict=True)) | dict(zip(along, moving, strict=True))
            group.append(tuple(at[n] for n in mesh.axis_names))
        groups.append(group)
    return groups


def exchanged(
    op: str,
    xs: list[np.ndarray],
    tiled: bool = False,
    axis: int = 0,
    scatter_dimension: int = 0,
    split_axis: int = 0,
    concat_axis: int = 0,
) -> list[np.ndarray]:
    """What each rank has after an all_gather, reduce_scatter (summed in float32 at least) or
    all_to_all of all ranks' x."""
    world = len(xs)

    def shards(x: np.ndarray, at: int) -> list[np.ndarray]:
        parts = np.split(x, world, axis=at)
        return parts if tiled else [p.squeeze(at) for p in parts]

    def together(parts: list[np.ndarray], at: int) -> np.ndarray:
        return np.concatenate(parts, at) if tiled else np.stack(parts, at)

    if op == "all_gather":
        return [together(xs, axis)] * world
    if op == "reduce_scatter":
        wide = [x.astype(np.promote_types(x.dtype, np.float32)) for x in xs]
        return shards(sum(wide[1:], wide[0]), scatter_dimension)
    sent = [shards(x, split_axis) for x in xs]
    return [together([s[rank] for s in sent], concat_axis) for rank in range(world)]


def per_device(mesh: Mesh, body: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """`body` on every device, over arrays [*mesh shape, *local shape]."""
    lead = mesh.devices.ndim
    spec = P(*mesh.axis_names)

    def local(*args: Any) -> Any:
        args = jax.tree.map(lambda a: a.reshape(a.shape[lead:]), args)
        return jax.tree.map(lambda y: y.reshape((1,) * lead + y.shape), body(*args))

    return jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, **options)


# ---- Calls ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of one product. `lead` and k or n are the shape of one shard: of x, if it travels,
    else of the product ``x @ w``. `dimension` is the one that is gathered or scattered; `split` and
    `concat` are those of an all-to-all."""

    op: str
    lead: tuple[int, ...] = (4,)
    k: int = 16
    n: int = 8
    dimension: int = -2
    dtype: Any = jnp.float32
    out: Any = None
    transpose_rhs: bool = False
    gathered: bool = False
    split: int = -1
    concat: int = -2

    def __str__(self) -> str:
        fields = [str(self.lead), f"k={self.k}", f"n={self.n}", np.dtype(self.dtype).name]
        if self.is_exchange:
            fields.append(f"{self.split}->{self.concat}")
        return " ".join(fields)

    @property
    def spec(self) -> OpSpec:
        """What jflux knows of its op."""
        return all_ops()[self.op]

    @property
    def options(self) -> dict[str, int]:
        """What its collective needs to know."""
        if self.spec.dimension is not None:
            return {self.spec.dimension: self.dimension}
        if "split_axis" in self.spec.ways[0]:
            return {"split_axis": self.split, "concat_axis": self.concat}
        return {}

    @property
    def collective(self) -> Collective:
        """Its exchange."""
        return self.spec.communication(len(self.lead) + 1, **self.options)

    @property
    def is_gather(self) -> bool:
        """Whether it gathers."""
        return self.collective.kind == "all_gather"

    @property
    def is_exchange(self) -> bool:
        """Whether it is an all-to-all."""
        return self.collective.kind == "all_to_all"

    @property
    def multiplies_after(self) -> bool:
        """Whether x travels, and not the product."""
        return self.spec.product == "after"

    @property
    def out_dtype(self) -> np.dtype:
        """Of y."""
        return np.dtype(self.out or self.dtype)

    def _travels(self, world: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of what goes into the collective, and of what comes out."""
        shard = (*self.lead, self.k if self.multiplies_after else self.n)
        shapes = []
        for dimension in (self.collective.split, self.collective.concat):
            shape = list(shard)
            if dimension is not None:
                shape[dimension] *= world
            shapes.append(tuple(shape))
        return shapes[0], shapes[1]

    def full(self, world: int) -> tuple[int, ...]:
        """The leading dimensions of the larger side."""
        return max((shape[:-1] for shape in self._travels(world)), key=math.prod)

    def x_shape(self, world: int) -> tuple[int, ...]:
        """Of one device's x."""
        sent, _ = self._travels(world)
        return sent if self.multiplies_after else (*sent[:-1], self.k)

    def w_shape(self, world: int) -> tuple[int, int]:
        """Of one device's w."""
        sent, received = self._travels(world)
        k, n = (received[-1], self.n) if self.multiplies_after else (self.k, sent[-1])
        return (n, k) if self.transpose_rhs else (k, n)

    def y_shape(self, world: int) -> tuple[int, ...]:
        """Of one device's y."""
        _, received = self._travels(world)
        return (*received[:-1], self.n) if self.multiplies_after else received

    def multiplied_rows(self, world: int) -> int:
        """Rows of a rank's product."""
        sent, received = self._travels(world)
        return math.prod((received if self.multiplies_after else sent)[:-1])

    def bind(self, axis_name: Any, module: Any = jflux, **options: Any) -> Callable[..., Any]:
        """The op as a function of x and w."""
        options = {**self.options, "transpose_rhs": self.transpose_rhs} | options
        # On GPUs the reference would multiply float32 in tf32 by default.
        options |= {"preferred_element_type": self.out, "precision": "highest"}
        if self.gathered:
            options["return_gathered"] = True
        return functools.partial(getattr(module, self.op), axis_name=axis_name, **options)

    def terms(self, world: int) -> int:
        """How many products are summed in one element of y."""
        k = self.w_shape(world)[1 if self.transpose_rhs else 0]
        return k * world if self.collective.sums() else k


def normal(seed: int, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Standard normal numbers, rounded to `dtype`; times 42 if that is int8."""
    values = np.random.default_rng(seed).standard_normal(shape)
    if np.dtype(dtype) == np.int8:
        values = np.clip(np.round(42 * values), -128, 127)
    return values.astype(np.dtype(dtype))


def operands(call: Call, mesh: Mesh, axis_name: Any, seed: int = 0) -> tuple[np.ndarray, ...]:
    """x and w for every device."""
    world, shape = world_of(mesh, axis_name), mesh.devices.shape
    return (
        normal(seed, shape + call.x_shape(world), call.dtype),
        normal(seed + 1, shape + call.w_shape(world), call.dtype),
    )


@contextlib.contextmanager
def x64_if(*dtypes: Any) -> Iterator[None]:
    """JAX's 64-bit mode where one of the types needs it, and nowhere else."""
    if any(np.dtype(d) == np.float64 for d in dtypes if d is not None):
        with jax.enable_x64(True):
            yield
    else:
        yield


# ---- What they should give: numpy, in float64 ----------------------------------------------------


def exact(call: Call, mesh: Mesh, axis_name: Any, x: np.ndarray, w: np.ndarray) -> Any:
    """y of every device, or (y, gathered x)."""
    world, shape = world_of(mesh, axis_name), mesh.devices.shape
    x, w = x.astype(np.float64), w.astype(np.float64)
    if call.transpose_rhs:
        w = np.swapaxes(w, -1, -2)
    y = np.full(shape + call.y_shape(world), np.nan)
    gathered = None
    if call.gathered:
        gathered = np.full(shape + (*call.full(world), call.k), np.nan)
    for group in groups_of(mesh, axis_name):
        xs, ws = [x[at] for at in group], [w[at] for at in group]
        for at, one in zip(group, call.spec.exact(xs, ws, **call.options), strict=True):
            y[at] = one
        if gathered is not None:
            for at, one in zip(group, call.collective.exact(xs), strict=True):
                gathered[at] = one
    return (y, gathered) if call.gathered else y


def coarser(*dtypes: Any) -> np.dtype:
    """Which of the types says how exact a product is: sums of float64 that travel as float32 are
    no better than float32, and bfloat16 operands that are kept in float32 are multiplied there."""
    kinds = [np.dtype(d) for d in dtypes]
    return kinds[1] if kinds[1] == np.float32 else kinds[0]


def assert_close(
    got: Any, want: np.ndarray, scale: np.ndarray, dtype: Any, terms: int, *, factor: float = 1
) -> None:
    """``|got - want| <= tolerance(dtype, terms) * scale`` everywhere, `scale` being the same
    computation on absolute values; plus what the smallest numbers of the type are apart."""
    got = np.asarray(got)
    assert got.shape == want.shape, f"shape {got.shape}, expected {want.shape}"
    smallest = float(jnp.finfo(dtype).smallest_subnormal)
    bound = factor * testing.tolerance(dtype, terms) * scale + 8 * smallest
    error = np.abs(got.astype(np.float64) - want)
    bad = ~(error <= bound)  # NaN is bad
    if bad.any():
        at = tuple(int(i) for i in np.unravel_index(int(np.argmax(bad)), bad.shape))
        raise AssertionError(
            f"{int(bad.sum())} of {bad.size} elements are off; the first is at {at}: "
            f"{got[at]} for {want[at]}, off by {error[at]}, allowed {bound[at]}"
        )
