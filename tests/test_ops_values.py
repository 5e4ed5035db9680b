"""Every product of the registry: values and gradients, batching, replicated operands."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import (
    FUSED_DTYPES,
    PLATFORM,
    PRODUCTS,
    RANKS,
    assert_same_values,
    calls,
    check_gradients,
    check_values,
    drawn_meshes,
    each_call,
    examples,
    make_mesh,
    of_way,
    run,
    special_values,
)
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import jflux
from jflux._ops._spec import all_ops
from jflux._stress.calls import HALVES, Call, assert_close, exact, normal, operands, per_device

pytestmark = pytest.mark.usefixtures("small_sums")
EACH_OP = pytest.mark.parametrize("op", PRODUCTS)


@EACH_OP
@examples(80)
@given(place=drawn_meshes(), data=st.data(), check_vma=st.booleans())
def test_values(op, place, data, check_vma):
    check_values(data.draw(calls(op)), *place, check_vma=check_vma)


@EACH_OP
@examples(15)
@given(place=drawn_meshes(), data=st.data())
def test_values_of_reference(op, place, data):
    check_values(data.draw(calls(op)), *place, module=jflux.reference)


@EACH_OP
@examples(25)
@given(place=drawn_meshes(), data=st.data(), check_vma=st.booleans())
def test_gradients(op, place, data, check_vma):
    call = data.draw(calls(op).filter(lambda call: not call.gathered))
    check_gradients(call, *place, check_vma=check_vma)


@EACH_OP
@examples(8)
@given(place=drawn_meshes(), data=st.data())
def test_gradients_of_reference(op, place, data):
    call = data.draw(calls(op).filter(lambda call: not call.gathered))
    check_gradients(call, *place, module=jflux.reference)


# Rows and columns of several tiles (128 x 1024 on the CPU, 128 x 192 on GPUs) that end with ragged
# ones, and tiles that straddle two ranks' rows; a dimension in front of others, whose shards are
# not adjacent rows.
TILES = [
    {"lead": (129,), "k": 131, "n": 17, "dtype": jnp.bfloat16},
    {"lead": (3,), "k": 9, "n": 2100, "dtype": jnp.bfloat16},
    {"lead": (100,), "k": 500, "n": 1030, "dtype": jnp.float16, "transpose_rhs": True},
    {"lead": (3, 5, 41), "k": 70, "n": 33, "dimension": 1, "dtype": jnp.bfloat16},
    {"lead": (2, 67), "k": 205, "n": 5, "dimension": 0, "dtype": jnp.float16, "out": jnp.float32},
    {"lead": (150,), "k": 125, "n": 1025, "dtype": jnp.float32},
    {"lead": (40,), "k": 1100, "n": 3, "dtype": jnp.float64},
]
# An all-gather's shards travel in chunks of 256 KiB: several with a ragged last one, and chunks
# that end inside a row.
CHUNKS = [
    {"lead": (129,), "k": 1031, "n": 17, "dtype": jnp.bfloat16, "gathered": True},
    {"lead": (30,), "k": 4500, "n": 1030, "dtype": jnp.float16, "transpose_rhs": True},
    {"lead": (3, 5, 41), "k": 700, "n": 33, "dimension": 1, "dtype": jnp.bfloat16,
     "gathered": True},
    {"lead": (2, 67), "k": 2050, "n": 5, "dimension": 0, "dtype": jnp.float16, "out": jnp.float32},
    {"lead": (40,), "k": 1100, "n": 3, "dtype": jnp.float64, "gathered": True},
]  # fmt: skip
# An all-to-all's shards of rows and of columns; leading rows as they are, and as whole tiles.
SHARDS = [
    {"lead": (129,), "k": 131, "n": 24, "dtype": jnp.bfloat16},
    {"lead": (300,), "k": 40, "n": 200, "dtype": jnp.bfloat16, "split": -2, "concat": -1},
    {"lead": (3,), "k": 9, "n": 1032, "dtype": jnp.bfloat16},
    {"lead": (130,), "k": 500, "n": 1032, "dtype": jnp.float16, "transpose_rhs": True},
    {"lead": (260,), "k": 64, "n": 264, "dtype": jnp.float16, "split": 0, "concat": 0},
    {"lead": (70,), "k": 64, "n": 392, "dtype": jnp.bfloat16, "split": -1, "concat": -1},
    {"lead": (3, 41), "k": 70, "n": 40, "dtype": jnp.bfloat16, "split": 1, "concat": -1},
    {"lead": (2, 67), "k": 205, "n": 16, "dtype": jnp.float16, "split": -1, "concat": -2},
    {"lead": (3, 128), "k": 64, "n": 200, "dtype": jnp.bfloat16, "split": -1, "concat": -2},
    {"lead": (2, 256), "k": 64, "n": 72, "dtype": jnp.bfloat16, "split": -2, "concat": -1},
    {"lead": (3, 128), "k": 64, "n": 136, "dtype": jnp.bfloat16, "split": 1, "concat": 1},
    {"lead": (2, 128, 3), "k": 64, "n": 24, "dtype": jnp.bfloat16, "split": 1, "concat": -1},
    {"lead": (150,), "k": 125, "n": 1025, "dtype": jnp.float32},
    {"lead": (40,), "k": 1100, "n": 3, "dtype": jnp.float64, "split": -2, "concat": -1},
    {"lead": (40,), "k": 72, "n": 24, "dtype": jnp.bfloat16, "out": jnp.float32},
]
LARGE = {"all_gather_matmul": TILES[1:2] + CHUNKS + TILES[5:6], "matmul_all_to_all": SHARDS}


@pytest.mark.parametrize(
    "call",
    [Call(op, **fields) for op in PRODUCTS for fields in LARGE.get(op, TILES)],
    ids=lambda call: f"{call.op} {call}",
)
def test_several_tiles(call):
    if call.dtype not in FUSED_DTYPES:
        pytest.skip("takes the reference here")
    if RANKS > 3:
        check_values(call, make_mesh((3,), order=(2, 0, 3)), "tp")
    if RANKS <= 3 or call.k * call.n < 100_000:
        check_values(call, make_mesh((RANKS,)), "tp")


@each_call(lead=(70,), k=150, n=40, dtype=jnp.bfloat16)
def test_gradients_of_several_tiles(call):
    check_gradients(call, make_mesh((RANKS,)), "tp")


@pytest.mark.parametrize("out", [None, jnp.float32])
@pytest.mark.parametrize("dtype", HALVES, ids=lambda d: np.dtype(d).name)
@EACH_OP
def test_rounding_and_special_values(op, dtype, out):
    """With one term per element there is one rounding, to nearest, ties to even, before a product
    travels. Subnormal numbers, infinities and NaN stay what they are. Sums are in float32, in rank
    order, and rounded once."""
    mesh, call = make_mesh((RANKS,)), of_way(op, lead=(5,), k=1, n=16, dtype=dtype, out=out)
    if call.is_exchange and call.multiplies_after:  # columns put together are several terms
        call = dataclasses.replace(call, split=-1, concat=-2)
    if call.collective.sums() and PLATFORM != "cpu":
        pytest.skip("a GPU need not round its own part before the sum")
    x, w = special_values(call, mesh)
    y = run(jax.jit(per_device(mesh, call.bind("tp"))), x, w)
    wide_x, wide_w = (list(a.astype(np.float32)) for a in (x, w))
    with np.errstate(all="ignore"):
        if call.multiplies_after:
            wide_x = call.collective.exact(wide_x)
        products = [(a * b).astype(y.dtype) for a, b in zip(wide_x, wide_w, strict=True)]
        if not call.multiplies_after:
            products = call.collective.exact([p.astype(np.float32) for p in products])
        want = np.stack(products).astype(y.dtype)
    assert_same_values(y, want)


# ---- Batching: vmap over x, over w, over both ----------------------------------------------------


@EACH_OP
@examples(20)
@given(
    data=st.data(),
    batched=st.sampled_from(["x", "w", "xw"]),
    position=st.integers(0, 2),
    world=st.integers(2, RANKS),
)
def test_vmap(op, data, batched, position, world):
    small = calls(op, dtypes=HALVES).filter(lambda c: max(*c.lead, c.k, c.n) < 20)
    call, mesh = data.draw(small), make_mesh((world,))
    cases = [operands(call, mesh, "tp", seed=10 * i) for i in range(3)]
    axes = [None, None]
    arrays = list(cases[0])
    for i, name in enumerate("xw"):
        if name in batched:
            axes[i] = min(position, cases[0][i].ndim - 1 - 1)
            arrays[i] = np.stack([c[i] for c in cases], axis=1 + axes[i])
    f = jax.vmap(call.bind("tp"), in_axes=tuple(axes))
    results = jax.tree.leaves(run(jax.jit(per_device(mesh, f)), *arrays))
    for b, case in enumerate(cases):
        x, w = (case[i] if "xw"[i] in batched else cases[0][i] for i in range(2))
        want = exact(call, mesh, "tp", x, w)
        scale = exact(call, mesh, "tp", abs(x), abs(w))
        y_want, y_scale = (want[0], scale[0]) if call.gathered else (want, scale)
        assert_close(results[0][:, b], y_want, y_scale, call.dtype, call.terms(world))
        if call.gathered:
            np.testing.assert_array_equal(results[1][:, b].astype(np.float64), want[1])


# ---- Replicated operands -------------------------------------------------------------------------


@pytest.mark.parametrize("replicated", ["x", "w", "xw"])
@each_call(lead=(3,), k=6, n=4, dtype=jnp.bfloat16)
def test_replicated_operand_gets_the_sum_of_gradients(call, replicated):
    """An operand that all ranks share has one gradient: the sum over ranks, as lax's has."""
    mesh = make_mesh((RANKS,))
    arrays = list(operands(call, mesh, "tp"))
    for i, name in enumerate("xw"):
        if name in replicated:
            arrays[i] = arrays[i][:1]
    specs = tuple(P() if name in replicated else P("tp") for name in "xw")
    dy = normal(2, (RANKS, *call.y_shape(RANKS)), jnp.bfloat16)

    def pulled(module):
        def local(x, w):
            return call.bind("tp", module)(x[0], w[0])[None]

        f = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P("tp"))
        return jax.jit(lambda x, w, dy: (f(x, w), *jax.vjp(f, x, w)[1](dy)))

    got = run(pulled(jflux), *arrays, dy)
    with jax.enable_x64(True):
        want, scale = (
            [np.asarray(a) for a in pulled(jflux.reference)(*wide)]
            for wide in (
                [np.asarray(a, np.float64) for a in (*arrays, dy)],
                [np.abs(np.asarray(a, np.float64)) for a in (*arrays, dy)],
            )
        )
    # Sums over ranks of rounded gradients.
    rows = call.multiplied_rows(RANKS)
    terms = (call.terms(RANKS), call.n * RANKS * RANKS, rows * RANKS)
    for mine, exact_one, size, count in zip(got, want, scale, terms, strict=True):
        assert_close(mine, exact_one, size, jnp.bfloat16, count, factor=RANKS)


def test_registry_names_every_op_that_jflux_has():
    """What is exported by name is in the registry, and in `jflux.reference`."""
    for name, spec in all_ops().items():
        assert getattr(jflux, name) is spec.function
        assert getattr(jflux.reference, name) is spec.reference
        assert set(spec.gradient) <= set(all_ops())
        for way in spec.ways:
            assert spec.communication(2, **way).shape((8, 8), 2)
