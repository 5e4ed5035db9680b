"""jflux.all_gather_matmul: values, gradients, batching, global arrays, errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import (
    FUSED_DTYPES,
    HALVES,
    RANKS,
    Call,
    assert_close,
    assert_same_values,
    calls,
    check_gradients,
    check_values,
    exact,
    examples,
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

OP = "all_gather_matmul"
GATHER = functools.partial(Call, OP)


@examples(120)
@given(place=meshes(), call=calls(OP), check_vma=st.booleans())
def test_values(place, call, check_vma):
    check_values(call, *place, check_vma=check_vma)


@examples(20)
@given(place=meshes(), call=calls(OP))
def test_values_of_reference(place, call):
    check_values(call, *place, module=jflux.reference)


@examples(30)
@given(place=meshes(), call=calls(OP).filter(lambda c: not c.gathered), check_vma=st.booleans())
def test_gradients(place, call, check_vma):
    check_gradients(call, *place, check_vma=check_vma)


@examples(10)
@given(place=meshes(), call=calls(OP).filter(lambda c: not c.gathered))
def test_gradients_of_reference(place, call):
    check_gradients(call, *place, module=jflux.reference)


# Shards of several chunks (256 KiB) with a ragged last one, rows and columns of several tiles
# (128 x 1024 on the CPU), tiles that straddle two ranks' rows, and chunks that end inside a row.
@pytest.mark.parametrize(
    "call",
    [
        GATHER(lead=(129,), k=1031, n=17, dtype=jnp.bfloat16, gathered=True),
        GATHER(lead=(3,), k=9, n=2100, dtype=jnp.bfloat16),
        GATHER(lead=(30,), k=4500, n=1030, dtype=jnp.float16, transpose_rhs=True),
        GATHER(lead=(3, 5, 41), k=700, n=33, dimension=1, dtype=jnp.bfloat16, gathered=True),
        GATHER(lead=(2, 67), k=2050, n=5, dimension=0, dtype=jnp.float16, out=jnp.float32),
        GATHER(lead=(150,), k=460, n=1025, dtype=jnp.float32),
        GATHER(lead=(40,), k=1100, n=3, dtype=jnp.float64, gathered=True),
    ],
    ids=str,
)
def test_several_chunks_and_tiles(call):
    if call.dtype not in FUSED_DTYPES:
        pytest.skip("takes the reference here")
    if RANKS > 3:
        check_values(call, make_mesh((3,), order=(2, 0, 3)), "tp")
    if RANKS <= 3 or call.k * call.n < 100_000:
        check_values(call, make_mesh((RANKS,)), "tp")


@pytest.mark.parametrize("out", [None, jnp.float32])
@pytest.mark.parametrize("dtype", HALVES, ids=lambda d: np.dtype(d).name)
def test_rounding_and_special_values(dtype, out):
    """With one term per element there is one rounding, to nearest, ties to even; also of numbers
    that are subnormal, or too large, in the type; infinities and NaN stay what they are."""
    mesh = make_mesh((2,))
    call = GATHER(lead=(40,), k=1, n=70, dtype=dtype, out=out)
    x, w = special_values(call, mesh)
    y = run(jax.jit(per_device(mesh, call.bind("tp"))), x, w)
    whole = x.reshape(80, 1).astype(np.float32)
    with np.errstate(all="ignore"):
        want = np.stack([whole * w[r].astype(np.float32) for r in range(2)]).astype(y.dtype)
    assert_same_values(y, want)


def test_gradients_of_several_tiles():
    call = GATHER(lead=(70,), k=150, n=140, dtype=jnp.bfloat16)
    check_gradients(call, make_mesh((RANKS,)), "tp")


def test_gradient_through_gathered_x():
    """The cotangent of the gathered x takes part: dx = (dy @ w^T + dg) summed over ranks."""
    call, mesh = GATHER(lead=(2, 3), k=5, n=4, gathered=True, dtype=jnp.bfloat16), make_mesh((2,))
    x, w = operands(call, mesh, "tp")
    dy = normal(2, (2, *call.y_shape(2)), call.dtype)
    dg = normal(3, (2, *call.full(2), call.k), call.dtype)
    f = per_device(mesh, call.bind("tp"))
    dx, dw = run(jax.jit(lambda x, w, d: jax.vjp(f, x, w)[1](d)), x, w, (dy, dg))
    x64, w64, dy64, dg64 = (a.astype(np.float64) for a in (x, w, dy, dg))
    whole = np.concatenate(x64, axis=1)
    dwhole = sum(dy64[r] @ w64[r].T + dg64[r] for r in range(2))
    scale = sum(abs(dy64[r]) @ abs(w64[r]).T + abs(dg64[r]) for r in range(2))
    split = functools.partial(np.split, indices_or_sections=2, axis=1)
    assert_close(dx, np.stack(split(dwhole)), np.stack(split(scale)), call.dtype, 8, factor=2)
    want = np.stack([np.tensordot(whole, dy64[r], ((0, 1), (0, 1))) for r in range(2)])
    scale = np.stack([np.tensordot(abs(whole), abs(dy64[r]), ((0, 1), (0, 1))) for r in range(2)])
    assert_close(dw, want, scale, call.dtype, 12)


def test_unused_results():
    """y alone, the gathered x alone, and neither."""
    call, mesh = GATHER(gathered=True, dtype=jnp.bfloat16), make_mesh((RANKS,))
    x, w = operands(call, mesh, "tp")
    y_want, gathered_want = exact(call, mesh, "tp", x, w)
    scale = exact(call, mesh, "tp", abs(x), abs(w))[0]
    op = call.bind("tp")
    y = run(jax.jit(per_device(mesh, lambda x, w: op(x, w)[0])), x, w)
    assert_close(y, y_want, scale, call.dtype, call.k)
    gathered = run(jax.jit(per_device(mesh, lambda x, w: op(x, w)[1])), x, w)
    np.testing.assert_array_equal(gathered.astype(np.float64), gathered_want)
    assert run(jax.jit(per_device(mesh, lambda x, w: (op(x, w), x)[1])), x, w).shape == x.shape


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
    results = jax.tree.leaves(run(jax.jit(per_device(mesh, f)), *arrays))
    for b, case in enumerate(cases):
        x, w = (case[i] if "xw"[i] in batched else cases[0][i] for i in range(2))
        want = exact(call, mesh, "tp", x, w)
        scale = exact(call, mesh, "tp", abs(x), abs(w))
        y_want, y_scale = (want[0], scale[0]) if call.gathered else (want, scale)
        assert_close(results[0][:, b], y_want, y_scale, call.dtype, call.k)
        if call.gathered:
            np.testing.assert_array_equal(results[1][:, b].astype(np.float64), want[1])


# ---- Replicated operands -------------------------------------------------------------------------


@pytest.mark.parametrize("replicated", ["x", "w", "xw"])
def test_replicated_operand_gets_the_sum_of_gradients(replicated):
    """An operand that all ranks share has one gradient: the sum over ranks, as lax's has."""
    n, mesh = RANKS, make_mesh((RANKS,))
    x = normal(0, (4, 6) if "x" in replicated else (n * 4, 6), jnp.bfloat16)
    w = normal(1, (6, 5) if "w" in replicated else (6, n * 5), jnp.bfloat16)
    dy = normal(2, (n * 4, n * 5), jnp.bfloat16)
    specs = (P() if "x" in replicated else P("tp"), P() if "w" in replicated else P(None, "tp"))
    f = jax.shard_map(
        lambda x, w: jflux.all_gather_matmul(x, w, axis_name="tp"),
        mesh=mesh, in_specs=specs, out_specs=P(None, "tp"),
    )  # fmt: skip
    y, dx, dw = run(jax.jit(lambda x, w, dy: (f(x, w), *jax.vjp(f, x, w)[1](dy))), x, w, dy)

    def plain(x, w):
        x = jnp.tile(x, (n, 1)) if "x" in replicated else x
        return x @ (jnp.tile(w, (1, n)) if "w" in replicated else w)

    with jax.enable_x64(True):
        for wrap, check in ((np.asarray, True), (np.abs, False)):
            y64, pull = jax.vjp(plain, *(jnp.asarray(wrap(a), jnp.float64) for a in (x, w)))
            grads = [np.asarray(g) for g in pull(jnp.asarray(wrap(dy), jnp.float64))]
            if check:
                want = [np.asarray(y64), *grads]
            else:
                scale = [np.asarray(y64), *grads]
    for got, a, b, terms in zip((y, dx, dw), want, scale, (6, 5 * n, 4 * n), strict=True):
        assert_close(got, a, b, jnp.bfloat16, terms, factor=n)


# ---- Global arrays -------------------------------------------------------------------------------


def _check_global(f, x, w, y_spec=None):
    y = jax.jit(f)(x, w)
    x64, w64 = np.asarray(x, np.float64), np.asarray(w, np.float64)
    assert_close(y, x64 @ w64, abs(x64) @ abs(w64), jnp.bfloat16, x.shape[-1])
    if y_spec is not None:
        expected = jax.sharding.NamedSharding(y.sharding.mesh, y_spec)
        assert y.sharding.is_equivalent_to(expected, y.ndim), y.sharding


def test_global_arrays_with_a_given_mesh():
    x, w = normal(0, (RANKS * 3, 10), jnp.bfloat16), normal(1, (10, RANKS * 2), jnp.bfloat16)
    for order in (range(RANKS), range(RANKS - 1, -1, -1)):
        mesh = make_mesh((RANKS,), order=order)
        f = functools.partial(jflux.all_gather_matmul, axis_name="tp", mesh=mesh)
        _check_global(f, x, w, P(None, "tp"))


def test_global_arrays_in_the_ambient_mesh():
    x, w = normal(0, (2, RANKS * 3, 10), jnp.bfloat16), normal(1, (10, RANKS * 2), jnp.bfloat16)
    with jax.set_mesh(make_mesh((RANKS,))):
        f = functools.partial(jflux.all_gather_matmul, axis_name="tp")
        _check_global(f, x, w, P(None, None, "tp"))


@pytest.mark.parametrize("axis_type", [AxisType.Explicit, AxisType.Auto])
def test_global_arrays_that_know_their_mesh(axis_type):
    mesh = make_mesh((2, RANKS // 2), ("dp", "tp"), axis_type=axis_type)
    x, w = normal(0, (4, RANKS * 3, 10), jnp.bfloat16), normal(1, (10, RANKS * 2), jnp.bfloat16)
    with jax.set_mesh(mesh):
        x = jax.device_put(x, jax.NamedSharding(mesh, P("dp", "tp", None)))
        w = jax.device_put(w, jax.NamedSharding(mesh, P(None, "tp")))
        x_spec = None if axis_type == AxisType.Explicit else P("dp")
        f = functools.partial(jflux.all_gather_matmul, axis_name="tp", x_spec=x_spec)
        _check_global(f, x, w, P("dp", None, "tp"))


def test_global_arrays_gradient_gathered_and_transposed():
    mesh = make_mesh((2, RANKS // 2), ("dp", "tp"))
    x, w = normal(0, (4, RANKS * 3, 10), jnp.bfloat16), normal(1, (RANKS * 2, 10), jnp.bfloat16)
    op = functools.partial(
        jflux.all_gather_matmul, axis_name="tp", mesh=mesh, x_spec=P("dp"),
        return_gathered=True, transpose_rhs=True, gather_dimension=1,
        preferred_element_type=jnp.float32,
    )  # fmt: skip
    y, gathered = run(jax.jit(op), x, w)
    np.testing.assert_array_equal(gathered, x)
    x64, w64 = x.astype(np.float64), w.astype(np.float64)
    assert y.dtype == np.float32
    assert_close(y, x64 @ w64.T, abs(x64) @ abs(w64).T, np.float32, 10)
    dy = normal(2, y.shape, np.float32)
    dx, dw = run(jax.jit(lambda x, w: jax.vjp(lambda *a: op(*a)[0], x, w)[1](dy)), x, w)
    assert_close(dx, dy @ w64, abs(dy) @ abs(w64), x.dtype, w.shape[0])
    rows = ((0, 1), (0, 1))
    scale = np.tensordot(abs(dy), abs(x64), rows)
    assert_close(dw, np.tensordot(dy, x64, rows), scale, x.dtype, 4 * RANKS * 3)


def test_gather_dimension_zero_of_global_arrays():
    x, w = normal(0, (RANKS * 2, 3, 10), jnp.bfloat16), normal(1, (10, RANKS * 2), jnp.bfloat16)
    mesh = make_mesh((RANKS,))
    f = functools.partial(jflux.all_gather_matmul, axis_name="tp", mesh=mesh, gather_dimension=0)
    _check_global(f, x, w, P(None, None, "tp"))


# ---- What the kernels do not take ----------------------------------------------------------------


def test_one_rank_is_a_dot():
    check_values(GATHER(lead=(5,), gathered=True, dtype=jnp.bfloat16), make_mesh((1,)), "tp")
    check_values(GATHER(lead=(5,)), make_mesh((1, RANKS), ("tp", "dp")), "tp")


@pytest.mark.parametrize("rows, k, n", [(0, 3, 4), (2, 0, 4), (2, 3, 0)])
def test_nothing_to_compute(rows, k, n):
    """Empty operands, made inside the body: shard_map takes none from outside."""
    mesh = make_mesh((RANKS,))
    op = GATHER(gathered=True).bind("tp")
    f = per_device(mesh, lambda x, w: op(x[:rows, :k], w[:k, :n]))
    y, gathered = run(jax.jit(f), *operands(GATHER(lead=(3,), k=3, n=4), mesh, "tp"))
    assert y.shape == (RANKS, rows * RANKS, n) and not y.any()
    assert gathered.shape == (RANKS, rows * RANKS, k)


@pytest.mark.parametrize("dtypes", [("int32", "int32"), ("bfloat16", "float32")])
def test_types_without_a_kernel_take_the_reference(dtypes):
    mesh = make_mesh((RANKS,))
    call = GATHER(lead=(3,))
    x, w = (
        np.round(4 * a).astype(jnp.dtype(d))
        for a, d in zip(operands(call, mesh, "tp"), dtypes, strict=True)
    )
    f = per_device(mesh, call.bind("tp"))
    with pytest.raises(NotImplementedError, match=rf"all_gather_matmul.*{dtypes[0]}"):
        jax.jit(f).lower(x, w)
    with jflux.config(strict=False):
        y = run(jax.jit(f), x, w)
    assert y.dtype == jnp.result_type(*dtypes)
    np.testing.assert_array_equal(y, exact(call, mesh, "tp", x, w))  # small integers are exact


def test_named_vmap_takes_the_reference():
    """An axis that vmap names is no mesh axis: there are no ranks."""
    x, w = normal(0, (3, 4, 5), np.float32), normal(1, (3, 5, 2), np.float32)
    f = functools.partial(jflux.all_gather_matmul, axis_name="i", precision="highest")
    with jflux.config(strict=False):
        y = run(jax.jit(jax.vmap(f, axis_name="i")), x, w)
    whole = x.reshape(12, 5).astype(np.float64)
    want = np.stack([whole @ w[i] for i in range(3)])
    scale = np.stack([abs(whole) @ abs(w[i]) for i in range(3)])
    assert_close(y, want, scale, np.float32, 5)


# ---- Errors --------------------------------------------------------------------------------------


def _trace(x, w, **options):
    with x64_if(x.dtype):
        f = per_device(make_mesh((2,)), functools.partial(jflux.all_gather_matmul, **options))
        jax.eval_shape(f, jnp.zeros((2, *x.shape), x.dtype), jnp.zeros((2, *w.shape), w.dtype))


@pytest.mark.parametrize(
    "x, w, options, message",
    [
        ((4, 5), (6, 7), {}, r"x \(4, 5\) and w \(6, 7\) do not contract.*5 columns.*takes 6"),
        ((4, 5), (5, 7), {"transpose_rhs": True}, r"do not contract.*takes 7.*transpose_rhs=True"),
        ((5,), (5, 7), {}, r"x must have shape \[\.\.\., rows, k\], got \(5,\)"),
        ((4, 5), (5,), {}, r"w must have shape \[k, n\], got \(5,\)"),
        ((4, 5), (2, 5, 7), {}, r"w must have shape \[k, n\], got \(2, 5, 7\)"),
        ((4, 5), (5, 7), {"gather_dimension": 1}, r"gather_dimension=1 .*\(4, 5\)"),
        ((4, 5), (5, 7), {"gather_dimension": -1}, r"gather_dimension=-1 .*\(4, 5\)"),
        ((4, 5), (5, 7), {"gather_dimension": 2}, r"gather_dimension=2 .*\(4, 5\)"),
        ((4, 5), (5, 7), {"gather_dimension": -3}, r"gather_dimension=-3 .*\(4, 5\)"),
    ],
)
def test_operands_that_do_not_fit(x, w, options, message):
    with pytest.raises(ValueError, match=rf"all_gather_matmul: .*{message}"):
        _trace(np.zeros(x, np.float32), np.zeros(w, np.float32), axis_name="tp", **options)


def test_operands_that_are_no_arrays():
    with pytest.raises(TypeError, match="all_gather_matmul: x must be an array, got list"):
        jflux.all_gather_matmul([[1.0]], np.zeros((1, 1)), axis_name="tp")
    with pytest.raises(TypeError, match="all_gather_matmul: w must be an array, got float"):
        jflux.all_gather_matmul(np.zeros((1, 1)), 1.0, axis_name="tp")


def test_options_are_keyword_only():
    with pytest.raises(TypeError):
        jflux.all_gather_matmul(np.zeros((1, 1)), np.zeros((1, 1)), "tp")


def test_no_mesh():
    with pytest.raises(ValueError, match="mesh"):
        jflux.all_gather_matmul(jnp.zeros((4, 4)), jnp.zeros((4, 4)), axis_name="tp")
    with pytest.raises(ValueError, match=r"axis_name='ep'.*\('tp',\)"):
        jflux.all_gather_matmul(
            jnp.zeros((4, 4)), jnp.zeros((4, 4)), axis_name="ep", mesh=make_mesh((2,))
        )


def test_global_operands_that_do_not_fit():
    mesh = make_mesh((2,))
    f = functools.partial(jflux.all_gather_matmul, axis_name="tp", mesh=mesh)
    with pytest.raises(ValueError, match=r"x \(.*5\) and w \(6.* do not contract"):
        f(jnp.zeros((4, 5)), jnp.zeros((6, 4)))
