"""jflux.matmul_all_to_all: values, gradients, batching, global arrays, errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import (
    FUSED_DTYPES,
    HALVES,
    PLATFORM,
    RANKS,
    Call,
    assert_close,
    assert_same_values,
    calls,
    check_gradients,
    check_values,
    compiled_text,
    exact,
    examples,
    fused_calls,
    make_mesh,
    meshes,
    normal,
    operands,
    per_device,
    run,
    special_values,
    x64_if,
)
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jflux
from jflux import _ops as ops

OP = "matmul_all_to_all"
EXCHANGE = functools.partial(Call, OP)
# Split and concatenated dimensions of a product of three: pieces of rows and of columns, on either
# side, with rows in front of others and not.
WAYS = [(-1, -2), (-1, 0), (-2, -1), (0, -1), (1, 1), (0, 0), (-1, -1)]
ROWS_TO_OTHER_ROWS = [(0, 1), (1, 0)]


@examples(120)
@given(place=meshes(), call=calls(OP), check_vma=st.booleans())
def test_values(place, call, check_vma):
    check_values(call, *place, check_vma=check_vma)


@examples(20)
@given(place=meshes(), call=calls(OP))
def test_values_of_reference(place, call):
    check_values(call, *place, module=jflux.reference)


@examples(30)
@given(place=meshes(), call=calls(OP), check_vma=st.booleans())
def test_gradients(place, call, check_vma):
    check_gradients(call, *place, check_vma=check_vma)


@examples(10)
@given(place=meshes(), call=calls(OP))
def test_gradients_of_reference(place, call):
    check_gradients(call, *place, module=jflux.reference)


@pytest.mark.parametrize("split, concat", WAYS + ROWS_TO_OTHER_ROWS)
def test_every_way(split, concat):
    call = EXCHANGE(lead=(3, 5), k=24, n=16, dtype=jnp.bfloat16, split=split, concat=concat)
    for order in (range(RANKS), range(RANKS - 1, -1, -1)):
        check_values(call, make_mesh((RANKS,), order=order), "tp")
    if RANKS >= 3:
        check_values(call, make_mesh((3,)), "tp")
    check_gradients(call, make_mesh((RANKS,)), "tp")


@pytest.mark.parametrize("split, concat", WAYS)
def test_it_is_lax_to_the_bit(split, concat):
    """Nothing is summed on the way: small integers come out exactly as lax's."""
    mesh = make_mesh((RANKS,))
    call = EXCHANGE(lead=(2, 3), k=16, n=8, dtype=jnp.bfloat16, split=split, concat=concat)
    x, w = (np.round(2 * a.astype(np.float32)).astype(a.dtype) for a in operands(call, mesh, "tp"))

    def plain(x, w):
        return jax.lax.all_to_all(x @ w, "tp", split % 3, concat % 3, tiled=True)

    want = run(jax.jit(per_device(mesh, plain)), x, w)
    np.testing.assert_array_equal(run(jax.jit(per_device(mesh, call.bind("tp"))), x, w), want)


# Pieces of several tiles (128 x 1024 on the CPU, 128 x 192 on GPUs), that end with ragged ones.
@pytest.mark.parametrize(
    "call",
    [
        EXCHANGE(lead=(129,), k=131, n=24, dtype=jnp.bfloat16),
        EXCHANGE(lead=(300,), k=40, n=200, dtype=jnp.bfloat16, split=-2, concat=-1),
        EXCHANGE(lead=(3,), k=9, n=1032, dtype=jnp.bfloat16),
        EXCHANGE(lead=(130,), k=500, n=1032, dtype=jnp.float16, transpose_rhs=True),
        EXCHANGE(lead=(260,), k=64, n=264, dtype=jnp.float16, split=0, concat=0),
        EXCHANGE(lead=(70,), k=64, n=392, dtype=jnp.bfloat16, split=-1, concat=-1),
        # Leading rows: as they are, and in blocks of whole tiles.
        EXCHANGE(lead=(3, 41), k=70, n=40, dtype=jnp.bfloat16, split=1, concat=-1),
        EXCHANGE(lead=(2, 67), k=205, n=16, dtype=jnp.float16, split=-1, concat=-2),
        EXCHANGE(lead=(3, 128), k=64, n=200, dtype=jnp.bfloat16, split=-1, concat=-2),
        EXCHANGE(lead=(2, 256), k=64, n=72, dtype=jnp.bfloat16, split=-2, concat=-1),
        EXCHANGE(lead=(3, 128), k=64, n=136, dtype=jnp.bfloat16, split=1, concat=1),
        EXCHANGE(lead=(2, 128, 3), k=64, n=24, dtype=jnp.bfloat16, split=1, concat=-1),
        EXCHANGE(lead=(150,), k=125, n=1025, dtype=jnp.float32),
        EXCHANGE(lead=(40,), k=1100, n=3, dtype=jnp.float64, split=-2, concat=-1),
        EXCHANGE(lead=(40,), k=72, n=24, dtype=jnp.bfloat16, out=jnp.float32),
    ],
    ids=str,
)
def test_several_tiles(call):
    if call.dtype not in FUSED_DTYPES:
        pytest.skip("takes the reference here")
    if RANKS > 3:
        check_values(call, make_mesh((3,), order=(2, 0, 3)), "tp")
    if RANKS <= 3 or call.k * call.n < 100_000:
        check_values(call, make_mesh((RANKS,)), "tp")


def test_gradients_of_several_tiles():
    for split, concat in ((-1, -2), (-2, -1)):
        call = EXCHANGE(lead=(70,), k=150, n=40, dtype=jnp.bfloat16, split=split, concat=concat)
        check_gradients(call, make_mesh((RANKS,)), "tp")


@pytest.mark.parametrize("dtype", HALVES, ids=lambda d: np.dtype(d).name)
def test_special_values(dtype):
    """Subnormal numbers, infinities and NaN of products with one term arrive as they are."""
    mesh = make_mesh((RANKS,))
    call = EXCHANGE(lead=(5,), k=1, n=16, dtype=dtype)
    x, w = special_values(call, mesh)
    y = run(jax.jit(per_device(mesh, call.bind("tp"))), x, w)
    with np.errstate(all="ignore"):
        products = [(a.astype(np.float32) * b.astype(np.float32)).astype(dtype)
                    for a, b in zip(x, w, strict=True)]  # fmt: skip
    pieces = [np.split(p, RANKS, axis=-1) for p in products]
    want = np.stack([np.concatenate([p[r] for p in pieces]) for r in range(RANKS)])
    assert_same_values(y, want)


# ---- How calls are lowered -----------------------------------------------------------------------


@pytest.mark.parametrize("split, concat", WAYS)
def test_one_call(split, concat):
    mesh = make_mesh((RANKS,))
    call = EXCHANGE(lead=(2, 128), k=16, n=8, dtype=jnp.bfloat16, split=split, concat=concat)
    f = per_device(mesh, call.bind("tp"))
    assert fused_calls(compiled_text(f, *operands(call, mesh, "tp"))) == [OP]


@pytest.mark.parametrize("split, concat", ROWS_TO_OTHER_ROWS)
def test_rows_that_become_other_rows_are_a_product_and_an_exchange(split, concat):
    mesh = make_mesh((RANKS,))
    call = EXCHANGE(lead=(2, 3), k=16, n=8, dtype=jnp.bfloat16, split=split, concat=concat)
    f = per_device(mesh, call.bind("tp"))
    assert fused_calls(compiled_text(f, *operands(call, mesh, "tp"))) == ["all_to_all"]


def _as_on_gpus(call, mesh):
    """The function that a call becomes before it reaches the CUDA kernel, or None."""
    params = ops.matmul_all_to_all.Params(
        ("tp",), mesh.devices.size, call.split % (len(call.lead) + 1),
        call.concat % (len(call.lead) + 1), call.transpose_rhs, call.out_dtype,
    )  # fmt: skip
    x, w = (jax.ShapeDtypeStruct(a.shape[1:], a.dtype) for a in operands(call, mesh, "tp"))
    return ops.matmul_all_to_all._adapt(x, w, params=params, platform="cuda")


@pytest.mark.skipif(PLATFORM != "cpu", reason="asks what a GPU would be given")
@pytest.mark.parametrize("split, concat", WAYS)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("k, n", [(9, 8), (16, 8), (16, 12)])
def test_operands_as_gpus_are_given_them(k, n, transposed, split, concat):
    """k padded to whole units, ranks before leading rows, or a product and an exchange where the
    columns of a piece are no whole units: the results are the same."""
    mesh = make_mesh((RANKS,))
    call = EXCHANGE(
        lead=(2, 3), k=k, n=n, dtype=jnp.bfloat16, transpose_rhs=transposed, split=split,
        concat=concat,
    )  # fmt: skip
    adapted = _as_on_gpus(call, mesh)
    # Which dimension of rows takes part, if any, and is not the first.
    apart = {split % 3, concat % 3} & {1}
    assert (adapted is None) == (k == 16 and n == 8 and not apart)
    if adapted is None:
        return
    x, w = operands(call, mesh, "tp")
    text = compiled_text(per_device(mesh, lambda x, w: adapted(x, w)[0]), x, w)
    assert fused_calls(text) == [OP if n == 8 else "all_to_all"]
    y = run(jax.jit(per_device(mesh, lambda x, w: adapted(x, w)[0])), x, w)
    want, scale = exact(call, mesh, "tp", x, w), exact(call, mesh, "tp", abs(x), abs(w))
    assert_close(y, want, scale, call.dtype, k)


def test_what_the_kernel_is_taken_for():
    """Many rows, in pieces that are nearly whole tiles."""
    faster = ops.matmul_all_to_all.kernel_is_faster
    assert faster(2048, 512, 2048) and faster(128, 512, 512) and faster(1000, 512, 1000)
    assert not faster(256, 512, 256)  # few rows, each of which reads all of w
    assert not faster(72, 512, 576) and not faster(2048, 72, 2048)  # of 72 a tile computes 128


@pytest.mark.skipif(PLATFORM != "cpu", reason="asks what a GPU would be given")
def test_results_of_another_type_are_exchanged_after_the_product():
    mesh = make_mesh((2,))
    many = functools.partial(EXCHANGE, lead=(1024,), k=64, n=256, dtype=jnp.bfloat16)
    assert _as_on_gpus(many(), mesh) is None
    assert _as_on_gpus(many(out=jnp.float32), mesh) is not None


# ---- Batching: vmap over x, over w, over both ----------------------------------------------------


@examples(30)
@given(
    call=calls(OP, dtypes=HALVES).filter(lambda c: max(*c.lead, c.k, c.n) < 20),
    batched=st.sampled_from(["x", "w", "xw"]),
    position=st.integers(0, 2),
    world=st.integers(2, RANKS),
)
def test_vmap(call, batched, position, world):
    mesh = make_mesh((world,))
    cases = [operands(call, mesh, "tp", seed=10 * i) for i in range(3)]
    axes = [0, 0]
    arrays = []
    for i, name in enumerate("xw"):
        if name in batched:
            axes[i] = min(position, cases[0][i].ndim - 1 - 1)
            arrays.append(np.stack([c[i] for c in cases], axis=1 + axes[i]))
        else:
            axes[i] = None
            arrays.append(cases[0][i])
    f = jax.vmap(call.bind("tp"), in_axes=tuple(axes))
    y = run(jax.jit(per_device(mesh, f)), *arrays)
    for b, case in enumerate(cases):
        x, w = (case[i] if "xw"[i] in batched else cases[0][i] for i in range(2))
        scale = exact(call, mesh, "tp", abs(x), abs(w))
        want = exact(call, mesh, "tp", x, w)
        assert_close(y[:, b], want, scale, call.dtype, call.k)


# ---- Replicated operands -------------------------------------------------------------------------


@pytest.mark.parametrize("replicated", ["x", "w", "xw"])
def test_replicated_operand_gets_the_sum_of_gradients(replicated):
    """An operand that all ranks share has one gradient: the sum over ranks, as lax's has."""
    n, mesh = RANKS, make_mesh((RANKS,))
    x = normal(0, (3 if "x" in replicated else n * 3, 6), jnp.bfloat16)
    w = normal(1, (6, n * 5 if "w" in replicated else n * n * 5), jnp.bfloat16)
    dy = normal(2, (n * n * 3, 5), jnp.bfloat16)
    specs = (P() if "x" in replicated else P("tp"), P() if "w" in replicated else P(None, "tp"))

    def mapped(module):
        return jax.shard_map(
            lambda x, w: module.matmul_all_to_all(
                x, w, axis_name="tp", split_axis=1, concat_axis=0
            ),
            mesh=mesh, in_specs=specs, out_specs=P("tp"),
        )  # fmt: skip

    def pulled(f):
        return jax.jit(lambda x, w, dy: (f(x, w), *jax.vjp(f, x, w)[1](dy)))

    results = run(pulled(mapped(jflux)), x, w, dy)
    with jax.enable_x64(True):
        wide = [[np.asarray(f(a), np.float64) for a in (x, w, dy)] for f in (np.asarray, np.abs)]
        want, scale = (
            [np.asarray(a) for a in pulled(mapped(jflux.reference))(*args)] for args in wide
        )
    for got, a, b, terms in zip(results, want, scale, (6, 5 * n, 3 * n), strict=True):
        assert_close(got, a, b, jnp.bfloat16, terms, factor=n)


# ---- Global arrays -------------------------------------------------------------------------------


def _check_global(f, x, w, y_spec):
    y = jax.jit(f)(x, w)
    x64, w64 = np.asarray(x, np.float64), np.asarray(w, np.float64)
    assert_close(y, x64 @ w64, abs(x64) @ abs(w64), jnp.bfloat16, x.shape[-1])
    expected = jax.sharding.NamedSharding(y.sharding.mesh, y_spec)
    assert y.sharding.is_equivalent_to(expected, y.ndim), y.sharding


TO_COLUMNS = {"split_axis": -1, "concat_axis": -2}
TO_ROWS = {"split_axis": -2, "concat_axis": -1}


@pytest.mark.parametrize("way, y_spec", [(TO_COLUMNS, P(None, "tp")), (TO_ROWS, P("tp"))])
def test_global_arrays_with_a_given_mesh(way, y_spec):
    x, w = normal(0, (RANKS * 3, 10), jnp.bfloat16), normal(1, (10, RANKS * 4), jnp.bfloat16)
    for order in (range(RANKS), range(RANKS - 1, -1, -1)):
        mesh = make_mesh((RANKS,), order=order)
        f = functools.partial(jflux.matmul_all_to_all, axis_name="tp", mesh=mesh, **way)
        _check_global(f, x, w, y_spec)


def test_global_arrays_in_the_ambient_mesh():
    x = normal(0, (2, RANKS * 3, 10), jnp.bfloat16)
    w = normal(1, (10, RANKS * 4), jnp.bfloat16)
    with jax.set_mesh(make_mesh((RANKS,))):
        f = functools.partial(jflux.matmul_all_to_all, axis_name="tp", **TO_COLUMNS)
        _check_global(f, x, w, P(None, None, "tp"))


@pytest.mark.parametrize("axis_type", [AxisType.Explicit, AxisType.Auto])
@pytest.mark.parametrize(
    "way, y_spec", [(TO_COLUMNS, P("dp", None, "tp")), (TO_ROWS, P("dp", "tp"))]
)
def test_global_arrays_that_know_their_mesh(axis_type, way, y_spec):
    mesh = make_mesh((2, RANKS // 2), ("dp", "tp"), axis_type=axis_type)
    x = normal(0, (4, RANKS * 3, 10), jnp.bfloat16)
    w = normal(1, (10, RANKS * 4), jnp.bfloat16)
    x_in, w_in = (P("dp", "tp"), P()) if way == TO_COLUMNS else (P("dp"), P(None, "tp"))
    with jax.set_mesh(mesh):
        x = jax.device_put(x, jax.NamedSharding(mesh, x_in))
        w = jax.device_put(w, jax.NamedSharding(mesh, w_in))
        x_spec = None if axis_type == AxisType.Explicit else P("dp")
        f = functools.partial(jflux.matmul_all_to_all, axis_name="tp", x_spec=x_spec, **way)
        _check_global(f, x, w, y_spec)


@pytest.mark.parametrize("way", [TO_COLUMNS, TO_ROWS])
def test_global_arrays_gradient_and_transposed(way):
    mesh = make_mesh((2, RANKS // 2), ("dp", "tp"))
    x = normal(0, (4, RANKS * 3, 10), jnp.bfloat16)
    w = normal(1, (RANKS * 4, 10), jnp.bfloat16)
    op = functools.partial(
        jflux.matmul_all_to_all, axis_name="tp", mesh=mesh, x_spec=P("dp"), transpose_rhs=True,
        preferred_element_type=jnp.float32, **way,
    )  # fmt: skip
    y = run(jax.jit(op), x, w)
    x64, w64 = x.astype(np.float64), w.astype(np.float64)
    assert y.dtype == np.float32
    assert_close(y, x64 @ w64.T, abs(x64) @ abs(w64).T, np.float32, 10)
    dy = normal(2, y.shape, np.float32)
    dx, dw = run(jax.jit(lambda x, w: jax.vjp(op, x, w)[1](dy)), x, w)
    assert_close(dx, dy @ w64, abs(dy) @ abs(w64), x.dtype, w.shape[0])
    rows = ((0, 1), (0, 1))
    scale = np.tensordot(abs(dy), abs(x64), rows)
    assert_close(dw, np.tensordot(dy, x64, rows), scale, x.dtype, 4 * RANKS * 3)


def test_one_axis_of_global_arrays():
    """Split and put together along one dimension: rank r's piece s becomes rank s's piece r."""
    x = normal(0, (RANKS * RANKS * 2, 10), jnp.bfloat16)
    w = normal(1, (10, 8), jnp.bfloat16)
    f = functools.partial(
        jflux.matmul_all_to_all, axis_name="tp", mesh=make_mesh((RANKS,)), split_axis=0,
        concat_axis=0,
    )  # fmt: skip
    x64 = x.astype(np.float64).reshape(RANKS, RANKS, 2, 10).swapaxes(0, 1).reshape(x.shape)
    want, scale = x64 @ w.astype(np.float64), abs(x64) @ abs(w.astype(np.float64))
    assert_close(run(jax.jit(f), x, w), want, scale, jnp.bfloat16, 10)


# ---- What the kernels do not take ----------------------------------------------------------------


def test_one_rank_is_a_dot():
    check_values(EXCHANGE(lead=(5,), dtype=jnp.bfloat16), make_mesh((1,)), "tp")
    check_values(EXCHANGE(lead=(5,)), make_mesh((1, RANKS), ("tp", "dp")), "tp")


@pytest.mark.parametrize("rows, k, n", [(0, 3, 4), (2, 0, 4), (2, 3, 0)])
@pytest.mark.parametrize("split, concat", [(-1, -2), (-2, -1)])
def test_nothing_to_compute(rows, k, n, split, concat):
    """Empty operands, made inside the body: shard_map takes none from outside."""
    mesh = make_mesh((RANKS,))
    call = EXCHANGE(lead=(3,), k=3, n=4, split=split, concat=concat)
    by_columns = split == -1
    f = per_device(
        mesh,
        lambda x, w: call.bind("tp")(
            x[: rows if by_columns else rows * RANKS, :k],
            w[:k, : n * RANKS if by_columns else n],
        ),
    )
    y = run(jax.jit(f), *operands(call, mesh, "tp"))
    assert y.shape[1:] == ((RANKS * rows, n) if by_columns else (rows, RANKS * n))
    assert not y.any()


@pytest.mark.parametrize("dtypes", [("int32", "int32"), ("bfloat16", "float32")])
def test_types_without_a_kernel_take_the_reference(dtypes):
    mesh = make_mesh((RANKS,))
    call = EXCHANGE(lead=(3,))
    x, w = (
        np.round(4 * a).astype(jnp.dtype(d))
        for a, d in zip(operands(call, mesh, "tp"), dtypes, strict=True)
    )
    f = per_device(mesh, call.bind("tp"))
    with pytest.raises(NotImplementedError, match=rf"matmul_all_to_all.*{dtypes[0]}"):
        jax.jit(f).lower(x, w)
    with jflux.config(strict=False):
        y = run(jax.jit(f), x, w)
    assert y.dtype == jnp.result_type(*dtypes)
    np.testing.assert_array_equal(y, exact(call, mesh, "tp", x, w))  # small integers are exact


def test_named_vmap_takes_the_reference():
    """An axis that vmap names is no mesh axis: there are no ranks."""
    x, w = normal(0, (3, 4, 5), np.float32), normal(1, (3, 5, 6), np.float32)
    f = functools.partial(
        jflux.matmul_all_to_all, axis_name="i", split_axis=1, concat_axis=0, precision="highest"
    )
    with jflux.config(strict=False):
        y = run(jax.jit(jax.vmap(f, axis_name="i")), x, w)

    def moved(products):
        return products.reshape(3, 4, 3, 2).transpose(2, 0, 1, 3).reshape(3, 12, 2)

    x, w = x.astype(np.float64), w.astype(np.float64)
    assert_close(y, moved(x @ w), moved(abs(x) @ abs(w)), np.float32, 5)


# ---- Errors --------------------------------------------------------------------------------------


def _trace(x, w, **options):
    options = {"axis_name": "tp", **TO_COLUMNS} | options
    with x64_if(x.dtype):
        f = per_device(make_mesh((2,)), functools.partial(jflux.matmul_all_to_all, **options))
        jax.eval_shape(f, jnp.zeros((2, *x.shape), x.dtype), jnp.zeros((2, *w.shape), w.dtype))


@pytest.mark.parametrize(
    "x, w, options, message",
    [
        ((4, 5), (6, 8), {}, r"x \(4, 5\) and w \(6, 8\) do not contract.*5 columns.*takes 6"),
        ((4, 5), (5, 7), {"transpose_rhs": True}, r"do not contract.*takes 7.*transpose_rhs=True"),
        ((5,), (5, 8), {}, r"x must have shape \[\.\.\., rows, k\], got \(5,\)"),
        ((4, 5), (5,), {}, r"w must have shape \[k, n\], got \(5,\)"),
        ((4, 5), (2, 5, 8), {}, r"w must have shape \[k, n\], got \(2, 5, 8\)"),
        ((4, 5), (5, 8), {"split_axis": 2}, r"split_axis=2 must name a dimension .*\(4, 5\)"),
        ((4, 5), (5, 8), {"concat_axis": -3}, r"concat_axis=-3 must name a dimension .*\(4, 5\)"),
        ((4, 5), (5, 7), {}, r"has 7 columns in its split_axis=-1, .*2 ranks.*axis_name='tp'.*w"),
        ((3, 5), (5, 8), TO_ROWS, r"has 3 rows in its split_axis=-2, .*2 ranks.*\(3, 5\)"),
    ],
)
def test_operands_that_do_not_fit(x, w, options, message):
    with pytest.raises(ValueError, match=rf"matmul_all_to_all: .*{message}"):
        _trace(np.zeros(x, np.float32), np.zeros(w, np.float32), **options)


def test_operands_that_are_no_arrays():
    op = functools.partial(jflux.matmul_all_to_all, axis_name="tp", **TO_COLUMNS)
    with pytest.raises(TypeError, match="matmul_all_to_all: x must be an array, got list"):
        op([[1.0]], np.zeros((1, 1)))
    with pytest.raises(TypeError, match="matmul_all_to_all: w must be an array, got float"):
        op(np.zeros((1, 1)), 1.0)
    with pytest.raises(TypeError, match="matmul_all_to_all: split_axis must be an int, got 'n'"):
        jflux.matmul_all_to_all(
            np.zeros((1, 1)), np.zeros((1, 1)), axis_name="tp", split_axis="n", concat_axis=0
        )


def test_options_are_keyword_only():
    with pytest.raises(TypeError):
        jflux.matmul_all_to_all(np.zeros((1, 1)), np.zeros((1, 1)), "tp", 1, 0)


def test_no_mesh():
    op = functools.partial(jflux.matmul_all_to_all, jnp.zeros((4, 4)), jnp.zeros((4, 4)))
    with pytest.raises(ValueError, match="mesh"):
        op(axis_name="tp", **TO_COLUMNS)
    with pytest.raises(ValueError, match=r"axis_name='ep'.*\('tp',\)"):
        op(axis_name="ep", mesh=make_mesh((2,)), **TO_COLUMNS)


def test_global_operands_that_do_not_fit():
    mesh = make_mesh((2,))
    f = functools.partial(jflux.matmul_all_to_all, axis_name="tp", mesh=mesh, **TO_COLUMNS)
    with pytest.raises(ValueError, match=r"x \(4, 6\) and w \(8, 4\) do not contract"):
        f(jnp.zeros((4, 6)), jnp.zeros((8, 4)))
    with pytest.raises(ValueError, match=r"x has shape \(5, 4\).*do not divide its dimension 0"):
        f(jnp.zeros((5, 4)), jnp.zeros((4, 4)))
    with pytest.raises(ValueError, match=r"5 columns.*2 ranks"):
        f(jnp.zeros((4, 4)), jnp.zeros((4, 5)))
