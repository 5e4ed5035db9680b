"""What the test files share: meshes, calls of the products, what they should give, and how exactly.

Every device gets operands of its own: an array over a mesh of shape S whose local part has shape L
is drawn as S + L, so that a rank that reads a wrong peer's data, or another group's, shows.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.sharding import Mesh

import jflux
from jflux import testing
from jflux._ops._spec import all_ops, products
from jflux._stress.calls import (
    HALVES,
    Call,
    assert_close,
    coarser,
    exact,
    groups_of,
    normal,
    operands,
    per_device,
    world_of,
    x64_if,
)

PLATFORM = jax.default_backend()
DEVICES = jax.devices()[: 4 if PLATFORM == "gpu" else 8]
RANKS = len(DEVICES)
DTYPES = (*HALVES, jnp.float32, jnp.float64)
FUSED_DTYPES = HALVES if PLATFORM == "gpu" else DTYPES
PRODUCTS = tuple(spec.name for spec in products())
#: Products whose results differ from rank to rank, so that each has a gradient of its own.
OPS = tuple(
    spec.name for spec in products() if spec.communication(2, **spec.ways[0]).kind != "all_reduce"
)


def examples(count: int) -> Callable[[Any], Any]:
    """How many examples a property gets: `count` in the full tier (conftest.py has the others)."""
    percent = hypothesis.settings().max_examples
    return hypothesis.settings(max_examples=max(3, count * percent // 100))


#: Compiler options: XLA moves what does not depend on each other. On CPUs, which have another
#: scheduler, those that let independent operations run at once.
LATENCY_HIDING = {
    "xla_gpu_enable_latency_hiding_scheduler": True,
    "xla_cpu_enable_concurrency_optimized_scheduler": True,
}


def gpu_choices(*choices: Any) -> list[Any]:
    """Tiles, or whatever else only the GPU kernels are told. The CPU back end ignores them: there,
    one stands for all."""
    return list(choices[: 1 if PLATFORM == "cpu" else None])


# ---- Meshes ------------------------------------------------------------------------------------


def make_mesh(
    shape: tuple[int, ...],
    names: tuple[str, ...] = ("tp",),
    *,
    order: Any = None,
    axis_type: Any = jax.sharding.AxisType.Auto,
) -> Mesh:
    """A mesh over the first devices, or over those that `order` (indices) names. Where there are
    fewer GPUs the test is skipped."""
    if PLATFORM == "gpu" and math.prod(shape) > RANKS:
        pytest.skip(f"a mesh of {math.prod(shape)}, and there are {RANKS} GPUs")
    chosen = [DEVICES[i] for i in (range(math.prod(shape)) if order is None else order)]
    devices = np.array(chosen[: math.prod(shape)]).reshape(shape)
    return Mesh(devices, names, axis_types=(axis_type,) * len(names))


SHAPES = [(n,) for n in range(1, 9)]
SHAPES += [(2, 2), (2, 3), (3, 2), (1, 4), (2, 4), (4, 2), (2, 2, 2)]
SHAPES = [s for s in SHAPES if math.prod(s) <= RANKS]


@st.composite
def drawn_meshes(draw: Any) -> tuple[Mesh, Any]:
    """A mesh over some devices in any order, and the axis or axes (in any order) of its groups."""
    shape = draw(st.sampled_from(SHAPES))
    names = ("a", "b", "c")[: len(shape)]
    mesh = make_mesh(shape, names, order=draw(st.permutations(range(RANKS))))
    axis_name = draw(
        st.one_of(
            st.sampled_from(names),
            st.permutations(names).map(tuple),
            st.sampled_from(list(itertools.permutations(names, min(2, len(names))))),
        )
    )
    return mesh, axis_name


# ---- Calls -------------------------------------------------------------------------------------


def of_way(op: str, way: int = 0, **fields: Any) -> Call:
    """A call of one of the op's ways."""
    options = all_ops()[op].ways[way]
    if "split_axis" in options:  # of a matrix; from the end they hold for more dimensions too
        axes = {"split": options["split_axis"] - 2, "concat": options["concat_axis"] - 2}
        return Call(op, **(axes | fields))
    return Call(op, **fields)


def each_call(ops: Sequence[str] = PRODUCTS, **fields: Any) -> pytest.MarkDecorator:
    """Parametrises a test by `call`: each product, in each of its ways."""
    found = {
        op if way == 0 else f"{op}-{way}": of_way(op, way, **fields)
        for op in ops
        for way in range(len(all_ops()[op].ways))
    }
    return pytest.mark.parametrize("call", found.values(), ids=found.keys())


def kernel_rows(op: str) -> int:
    """Rows of a shard that the op's kernels take on every platform. A sum for all ranks takes a
    whole tile for each rank on GPUs, and any size with the fixture `small_sums`."""
    kind = all_ops()[op].communication(2, **all_ops()[op].ways[0]).kind
    return 128 * RANKS if kind == "all_reduce" else 6


SIZES = st.one_of(st.integers(1, 9), st.sampled_from([13, 16, 17, 31, 32, 64, 65, 129, 140]))


@st.composite
def calls(draw: Any, op: str, dtypes: Any = FUSED_DTYPES) -> Call:
    lead = tuple(draw(st.lists(st.integers(1, 4), max_size=2))) + (draw(SIZES),)
    dtype = draw(st.sampled_from(dtypes))
    axes = st.integers(-len(lead) - 1, len(lead))
    return Call(
        op=op,
        lead=lead,
        dimension=draw(st.integers(-len(lead) - 1, len(lead) - 1).filter(lambda d: d != -1)),
        k=draw(SIZES),
        n=draw(SIZES),
        dtype=dtype,
        out=draw(st.sampled_from([None, None, jnp.float32])),
        transpose_rhs=draw(st.booleans()),
        gathered=op == "all_gather_matmul" and draw(st.booleans()),
        split=draw(axes),
        concat=draw(axes),
    )


def special_values(call: Call, mesh: Mesh) -> tuple[np.ndarray, np.ndarray]:
    """Operands of very different sizes, with zeros, infinities and NaN among them."""
    arrays = []
    for seed, array in enumerate(operands(call, mesh, mesh.axis_names)):
        rng = np.random.default_rng(100 + seed)
        # Products span the type: the smallest are subnormal in it, the largest overflow.
        limits = jnp.finfo(call.dtype)
        low, high = (np.log2(float(v)) / 2 for v in (limits.smallest_subnormal, limits.max))
        wide = array.astype(np.float64) * 2.0 ** rng.uniform(low, high, array.shape)
        for value in (0.0, -0.0, np.inf, -np.inf, np.nan, float(limits.max)):
            wide[rng.random(array.shape) < 0.01] = value
        arrays.append(wide.astype(call.dtype))
    return arrays[0], arrays[1]


def run(f: Callable[..., Any], *args: Any) -> Any:
    """``f(*args)`` in numpy, from poisoned workspaces. Runs twice: the bits must be the same."""
    results = []
    for _ in range(2):
        testing.poison_workspaces()
        results.append(jax.tree.map(np.asarray, jax.block_until_ready(f(*args))))
    for first, second in zip(*map(jax.tree.leaves, results), strict=True):
        assert first.dtype == second.dtype and first.tobytes() == second.tobytes(), (
            "two runs on the same operands differ"
        )
    return results[0]


# ---- What calls should give: numpy, in float64 ---------------------------------------------------


def exact_vjp(
    call: Call, mesh: Mesh, axis_name: Any, x: np.ndarray, w: np.ndarray, dy: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """dx and dw of every device for the cotangent `dy` of y alone."""
    x, w, dy = (a.astype(np.float64) for a in (x, w, dy))
    if call.transpose_rhs:
        w = np.swapaxes(w, -1, -2)
    dx, dw = np.full(x.shape, np.nan), np.full(w.shape, np.nan)
    for group in groups_of(mesh, axis_name):
        arrays = ([a[at] for at in group] for a in (x, w, dy))
        dxs, dws = call.spec.exact_vjp(*arrays, **call.options)
        for at, one_dx, one_dw in zip(group, dxs, dws, strict=True):
            dx[at], dw[at] = one_dx, one_dw
    return dx, np.swapaxes(dw, -1, -2) if call.transpose_rhs else dw


def check_values(
    call: Call, mesh: Mesh, axis_name: Any, *, module: Any = jflux, seed: int = 0, **options: Any
) -> None:
    """Runs the call on every device of the mesh, and compares with `exact`."""
    world = world_of(mesh, axis_name)
    x, w = operands(call, mesh, axis_name, seed)
    with x64_if(call.dtype, call.out):
        result = run(jax.jit(per_device(mesh, call.bind(axis_name, module), **options)), x, w)
    want = exact(call, mesh, axis_name, x, w)
    y, y_want = result, want
    if call.gathered:
        y, gathered = result
        y_want, gathered_want = want
        assert gathered.dtype == np.dtype(call.dtype)
        np.testing.assert_array_equal(gathered.astype(np.float64), gathered_want)
    assert y.dtype == call.out_dtype
    scale = exact(call, mesh, axis_name, np.abs(x), np.abs(w))
    scale = scale[0] if call.gathered else scale
    # XLA's reduce-scatter rounds after each rank's part; jflux sums in float32.
    sums = call.collective.sums()
    factor = max(1, world / 2) if module is jflux.reference and sums else 1
    assert_close(
        y, y_want, scale, coarser(call.dtype, call.out_dtype), call.terms(world), factor=factor
    )


def check_gradients(
    call: Call, mesh: Mesh, axis_name: Any, *, module: Any = jflux, seed: int = 0, **options: Any
) -> None:
    """The vjp of the call on every device, compared with `exact_vjp`."""
    world = world_of(mesh, axis_name)
    x, w = operands(call, mesh, axis_name, seed)
    dy = normal(seed + 2, mesh.devices.shape + call.y_shape(world), call.out_dtype)
    f = per_device(mesh, call.bind(axis_name, module), **options)

    def pull(x, w, dy):
        return jax.vjp(lambda x, w: f(x, w), x, w)[1](dy)

    assert not call.gathered
    with x64_if(call.dtype, call.out):
        dx, dw = run(jax.jit(pull), x, w, dy)
    assert dx.dtype == x.dtype and dw.dtype == w.dtype
    rows = call.multiplied_rows(world)
    terms = call.n if call.collective.sums() else call.n * world
    dx_factor = dw_factor = 1.0
    if module is jflux.reference:
        # XLA's reduce-scatter rounds after each rank's part, and XLA:CPU sums some layouts of
        # bfloat16 products in bfloat16.
        dx_factor = max(1, world / 2) if call.is_gather else 1
        dw_factor = 1 + math.sqrt(rows)
    dx_want, dw_want = exact_vjp(call, mesh, axis_name, x, w, dy)
    dx_scale, dw_scale = exact_vjp(call, mesh, axis_name, np.abs(x), np.abs(w), np.abs(dy))
    kind = np.float32 if call.out_dtype == np.float32 and call.dtype == jnp.float64 else call.dtype
    assert_close(dx, dx_want, dx_scale, kind, terms, factor=dx_factor)
    assert_close(dw, dw_want, dw_scale, kind, rows, factor=dw_factor)


def assert_same_values(got: np.ndarray, want: np.ndarray) -> None:
    """Equal, NaN for NaN; but what is subnormal in float32 may be flushed to zero, as XLA does."""
    got, want = got.astype(np.float32), want.astype(np.float32)
    tiny = np.abs(want) < np.finfo(np.float32).tiny
    np.testing.assert_array_equal(np.where(tiny, 0, got), np.where(tiny, 0, want))
    assert (np.abs(got[tiny]) < np.finfo(np.float32).tiny).all()


# ---- Programs ------------------------------------------------------------------------------------


def compiled(f: Callable[..., Any], *args: Any) -> Any:
    """The program of ``f(*args)``, to be called and looked at: one compilation for both."""
    return jax.jit(f).lower(*args).compile()


def compiled_text(f: Callable[..., Any], *args: Any) -> str:
    return compiled(f, *args).as_text()


def fused_calls(text: str) -> list[str]:
    """The ops of a compiled program, in order of its text."""
    return re.findall(r'custom_call_target="jflux_(\w+)"', text)


def dots(text: str) -> int:
    return len(re.findall(r" dot\(", text))
