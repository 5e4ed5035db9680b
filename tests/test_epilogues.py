"""Bias, activations and gating over one gather; bias and residual on what has been scattered."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import (
    FUSED_DTYPES,
    PLATFORM,
    RANKS,
    compiled_text,
    fused_calls,
    gpu_choices,
    make_mesh,
    run,
)
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jflux
from jflux import _ops as ops
from jflux._call import tuning_tables
from jflux._stress.calls import assert_close, normal, per_device, x64_if

BF16 = jnp.bfloat16
_ERF = np.vectorize(math.erf, otypes=[np.float64])
_K = math.sqrt(2 / math.pi)


def _sigmoid(x):
    return 0.5 * (1 + np.tanh(x / 2))


# Each with its derivative, in float64.
ACTIVATIONS = {
    None: (lambda x: x, np.ones_like),
    "relu": (lambda x: np.maximum(x, 0), lambda x: (x > 0) * 1.0),
    "silu": (
        lambda x: x * _sigmoid(x),
        lambda x: _sigmoid(x) * (1 + x * (1 - _sigmoid(x))),
    ),
    "gelu": (
        lambda x: x * (1 + _ERF(x / math.sqrt(2))) / 2,
        lambda x: (
            (1 + _ERF(x / math.sqrt(2))) / 2 + x * np.exp(-x * x / 2) / math.sqrt(2 * math.pi)
        ),
    ),
    "gelu_tanh": (
        lambda x: x * (1 + np.tanh(_K * (x + 0.044715 * x**3))) / 2,
        lambda x: (
            (1 + np.tanh(_K * (x + 0.044715 * x**3))) / 2
            + x
            / 2
            * (1 - np.tanh(_K * (x + 0.044715 * x**3)) ** 2)
            * _K
            * (1 + 3 * 0.044715 * x**2)
        ),
    ),
}


@pytest.fixture
def lenient():
    """GPUs have no kernels for float32."""
    with jflux.config(strict=PLATFORM == "cpu"):
        yield


def _has_kernel(module, dtype):
    return module is not jflux or np.dtype(dtype) in {np.dtype(d) for d in FUSED_DTYPES}


def _gather(module=jflux, **options):
    options = {"precision": "highest"} | options
    return functools.partial(module.all_gather_matmul, axis_name="tp", **options)


def _operands(rows, k, sizes, biased, dtype, transposed=False):
    """x, weights and biases (or None), [RANKS, ...] each; products are of order 1."""
    x = normal(0, (RANKS, rows, k), dtype)
    ws = [(normal(1 + i, (RANKS, k, n), np.float64) / k**0.5) for i, n in enumerate(sizes)]
    ws = [np.swapaxes(w, 1, 2) if transposed else w for w in ws]
    biases = [normal(20 + i, (RANKS, n), np.float32) for i, n in enumerate(sizes)]
    return (
        x,
        tuple(w.astype(dtype) for w in ws),
        tuple(b if has else None for b, has in zip(biases, biased, strict=True)),
    )


def _exact(x, ws, biases, activation, gated, transposed=False):
    """(the sums, all y, how large the terms of the sums are), in float64."""
    whole = x.astype(np.float64).reshape(-1, x.shape[-1])
    plain = [np.swapaxes(w, 1, 2) if transposed else w for w in ws]
    plain = [w.astype(np.float64) for w in plain]
    added = [0.0 if b is None else b.astype(np.float64)[:, None] for b in biases]
    sums = [whole @ w + b for w, b in zip(plain, added, strict=True)]
    sizes = [abs(whole) @ abs(w) + abs(b) for w, b in zip(plain, added, strict=True)]
    f, _ = ACTIVATIONS[activation]
    ys = [f(sums[0]) * sums[1]] if gated else [f(s) for s in sums]
    return whole, plain, sums, sizes, ys


def _check(y, want, sums, sizes, gated, dtype, k):
    """No activation's slope is above 1.2."""
    if gated:
        scale = 1.2 * (sizes[0] * abs(sums[1]) + sizes[1] * abs(sums[0])) + abs(want)
    else:
        scale = 1.2 * sizes[0] + abs(want)
    assert_close(y, want, scale, dtype, k)


@pytest.mark.parametrize("dtype", [BF16, np.float16, np.float32, np.float64], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("module", [jflux, jflux.reference], ids=["jflux", "lax"])
def test_values(module, biased, activation, dtype):
    if not _has_kernel(module, dtype):
        pytest.skip("no kernel")
    mesh, k = make_mesh((RANKS,)), 40
    x, ws, biases = _operands(5, k, [24], [biased], dtype)
    op = _gather(module, activation=activation)
    with x64_if(dtype):
        y = run(jax.jit(per_device(mesh, lambda x, w, b: op(x, w, bias=b))), x, ws[0], biases[0])
    _, _, sums, sizes, (want,) = _exact(x, ws, biases, activation, False)
    assert y.dtype == dtype
    _check(y, want, sums, sizes, False, dtype, k)


@pytest.mark.parametrize("out", [None, np.float32])
@pytest.mark.parametrize("biased", [(True, False), (False, False), (True, True)], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("rows, n", [(5, 24), (160, 130)])
def test_gated(rows, n, transposed, biased, out):
    mesh, k = make_mesh((RANKS,)), 40
    x, ws, biases = _operands(rows, k, [n, n], biased, BF16, transposed)
    op = _gather(
        activation="silu", gated=True, transpose_rhs=transposed, return_gathered=True,
        preferred_element_type=out,
    )  # fmt: skip
    y, gathered = run(
        jax.jit(per_device(mesh, lambda x, ws, bs: op(x, ws, bias=bs))), x, ws, biases
    )
    whole, _, sums, sizes, (want,) = _exact(x, ws, biases, "silu", True, transposed)
    assert y.dtype == (out or BF16)
    _check(y, want, sums, sizes, True, y.dtype, k)
    assert np.array_equal(gathered.astype(np.float64), np.broadcast_to(whole, gathered.shape))


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("dtype", [np.float32, BF16], ids=str)
@pytest.mark.parametrize("module", [jflux, jflux.reference], ids=["jflux", "lax"])
def test_gradients(module, dtype, activation, gated):
    if gated and activation is None:
        pytest.skip("a gate needs an activation")
    if not _has_kernel(module, dtype):
        pytest.skip("no kernel")
    mesh, rows, k, n = make_mesh((RANKS,)), 6, 40, 24
    biased = (True, True) if gated else (True, False)
    x, ws, biases = _operands(rows, k, [n, n], biased, dtype)
    op = _gather(module, activation=activation, gated=gated)
    count = 1 if gated else 2
    whole, plain, sums, sizes, _ = _exact(x, ws, biases, activation, gated)
    # The slope of relu jumps at 0. Nothing depends on sums that may be rounded to the other side.
    sure = [abs(s) > 0.02 * size for s, size in zip(sums, sizes, strict=True)]
    dys = tuple(
        normal(40 + i, (RANKS, RANKS * rows, n), dtype) * sure[i].astype(dtype)
        for i in range(count)
    )

    def gradients(x, ws, biases, dys):
        _, vjp = jax.vjp(lambda x, ws, biases: op(x, ws, bias=biases), x, ws, biases)
        return vjp(dys[0] if gated else dys)

    dx, dws, dbs = run(jax.jit(per_device(mesh, gradients)), x, ws, biases, dys)
    f, slope = ACTIVATIONS[activation]
    dy = [one.astype(np.float64) for one in dys]
    if gated:
        dsums = [dy[0] * slope(sums[0]) * sums[1], dy[0] * f(sums[0])]
    else:
        dsums = [d * slope(s) for d, s in zip(dy, sums, strict=True)]
    # What was saved for them is rounded, where slopes and values change at most as fast as sums.
    factor = 8
    parts = [d @ w.swapaxes(1, 2) for d, w in zip(dsums, plain, strict=True)]
    sizes = [(abs(d) + 1) @ abs(w).swapaxes(1, 2) for d, w in zip(dsums, plain, strict=True)]
    assert_close(
        dx, sum(parts).sum(0).reshape(x.shape), sum(sizes).sum(0).reshape(x.shape), dtype,
        RANKS * 2 * n, factor=factor,
    )  # fmt: skip
    for dw, d in zip(dws, dsums, strict=True):
        size = abs(whole).T @ (abs(d) + 1)
        assert_close(dw, whole.T @ d, size, dtype, len(whole), factor=factor)
    for db, d, has in zip(dbs, dsums, biased, strict=True):
        assert (db is not None) == has
        if has:
            assert_close(db, d.sum(1), (abs(d) + 1).sum(1), dtype, len(whole), factor=factor)


def _check_gradients(op, x, ws, biases, activation, gated, transposed=False):
    """y, and the gradients of x and of the weights, for dy = 1."""
    mesh, k = make_mesh((RANKS,)), x.shape[-1]

    def both(x, ws, biases):
        y, vjp = jax.vjp(lambda x, ws: op(x, ws, bias=biases), x, ws)
        return y, vjp(jax.tree.map(jnp.ones_like, y))

    ys, (dx, dws) = run(jax.jit(per_device(mesh, both)), x, ws, biases)
    whole, plain, sums, sizes, want = _exact(x, ws, biases, activation, gated, transposed)
    for y, one in zip((ys,) if gated else ys, want, strict=True):
        _check(y, one, sums, sizes, gated, y.dtype, k)
    f, slope = ACTIVATIONS[activation]
    dsums = [slope(sums[0]) * sums[1], f(sums[0])] if gated else [slope(s) for s in sums]
    parts = [d @ w.swapaxes(1, 2) for d, w in zip(dsums, plain, strict=True)]
    around = [(abs(d) + 1) @ abs(w).swapaxes(1, 2) for d, w in zip(dsums, plain, strict=True)]
    terms = RANKS * sum(s.shape[-1] for s in sums)
    assert_close(
        dx, sum(parts).sum(0).reshape(x.shape), sum(around).sum(0).reshape(x.shape), x.dtype,
        terms, factor=8,
    )  # fmt: skip
    for dw, d in zip(dws, dsums, strict=True):
        dw = np.swapaxes(dw, 1, 2) if transposed else dw
        size = abs(whole).T @ (abs(d) + 1)
        assert_close(dw, whole.T @ d, size, x.dtype, len(whole), factor=8)


@pytest.mark.parametrize(
    "choice", gpu_choices((256, 2, 8), (192, 2, 8), (192, 1, 16), (128, 2, 1)), ids=str
)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("rows, k, n", [(130, 584, 200), (64, 64, 64), (300, 1024, 72)])
def test_gated_in_several_tiles(rows, k, n, transposed, choice):
    """Whatever was chosen: more than a ring of stages, ragged rows and columns."""
    x, ws, biases = _operands(rows, k, [n, n], (True, False), BF16, transposed)
    op = _gather(activation="silu", gated=True, transpose_rhs=transposed)
    with tuning_tables.force(tuning_tables.Choice(*choice)):
        _check_gradients(op, x, ws, biases, "silu", True, transposed)


@pytest.mark.parametrize("choice", gpu_choices((256, 2, 8), (224, 2, 8), (160, 2, 4)), ids=str)
@pytest.mark.parametrize("rows", [130, 64])
def test_activated_in_several_tiles(rows, choice):
    """Two weights, of which one has a bias; saved sums are staged beside the results."""
    x, ws, biases = _operands(rows, 584, [264, 264], (True, False), BF16)
    with tuning_tables.force(tuning_tables.Choice(*choice)):
        _check_gradients(_gather(activation="gelu"), x, ws, biases, "gelu", False)


@pytest.mark.parametrize("weights", [1, 3])
@pytest.mark.parametrize("splits", gpu_choices(2, 4))
def test_where_k_is_split(splits, weights):
    biased = (True, False, True)[:weights]
    x, ws, biases = _operands(9, 1032, [264] * weights, biased, BF16)
    with tuning_tables.force(tuning_tables.Choice(128, 1, 1, splits)):
        _check_gradients(_gather(activation="gelu"), x, ws, biases, "gelu", False)


@pytest.mark.parametrize("lead, dimension", [((3, 40), 0), ((3, 40), 1), ((2, 2, 17), 1)], ids=str)
@pytest.mark.parametrize("gated", [False, True])
def test_any_dimension_is_gathered(lead, dimension, gated):
    """Rows that do not follow each other in y: against the reference."""
    mesh, k, n = make_mesh((RANKS,)), 64, 72
    x = normal(0, (RANKS, *lead, k), BF16)
    ws = tuple((normal(i, (RANKS, k, n), np.float64) / 8).astype(BF16) for i in (1, 2))

    def both(module):
        op = _gather(module, activation="silu", gated=gated, gather_dimension=dimension)

        def f(x, ws):
            y, vjp = jax.vjp(op, x, ws)
            return y, vjp(jax.tree.map(jnp.ones_like, y))

        return run(jax.jit(per_device(mesh, f)), x, ws)

    for a, b in zip(*map(jax.tree.leaves, (both(jflux), both(jflux.reference))), strict=True):
        b = b.astype(np.float64)
        assert np.abs(a.astype(np.float64) - b).max() <= 0.03 * np.abs(b).max()


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_special_values(activation):
    """NaN and infinities are what `jax.nn` makes of them."""
    mesh, special = make_mesh((RANKS,)), [np.nan, np.inf, -np.inf, 0.0, -0.0, 90.0, -90.0, -5.0]
    bias = np.array([special] * RANKS, np.float32)
    x, w = np.zeros((RANKS, 3, 8), BF16), np.zeros((RANKS, 8, 8), BF16)
    op = _gather(activation=activation)
    y = run(jax.jit(per_device(mesh, lambda x, w, b: op(x, w, bias=b))), x, w, bias)
    f = jflux._ops._epilogue.ACTIVATIONS.get(activation, lambda x: x)
    want = np.broadcast_to(np.asarray(f(jnp.array(special, jnp.float32)).astype(BF16)), y.shape)
    # 1 + tanh loses what is left of gelu_tanh(-5).
    np.testing.assert_allclose(y.astype(np.float32), want.astype(np.float32), rtol=0.02, atol=1e-6)


def test_the_reference_multiplies_in_its_operands_type():
    """Forward and backward: a float32 product would take several times as long on GPUs."""
    mesh, k, n = make_mesh((RANKS,)), 16, 8
    x, ws, _ = _operands(4, k, [n, n], (False, False), BF16)
    op = _gather(jflux.reference, activation="silu", gated=True)
    f = per_device(mesh, jax.grad(lambda x, ws: jnp.sum(op(x, ws).astype(jnp.float32)), (0, 1)))
    text = jax.jit(f).lower(x, ws).as_text()
    products = re.findall(r"dot_general.*: \((.*)\) ->", text)
    assert len(products) == 6 and not any("f32" in operands for operands in products)


def test_second_derivatives(lenient):
    """Of a gated product, against the reference's."""
    mesh, k, n = make_mesh((RANKS,)), 16, 8
    x, ws, biases = _operands(4, k, [n, n], (True, True), np.float32)

    def second(module):
        op = _gather(module, activation="gelu", gated=True)

        def first(x, ws):
            return jax.grad(lambda x, ws: jnp.sum(op(x, ws, bias=biases_of()) ** 2))(x, ws)

        def biases_of():
            i = jax.lax.axis_index("tp")
            return tuple(jnp.asarray(b)[i] for b in biases)

        return jax.grad(lambda x, ws: jnp.sum(first(x, ws) ** 2), argnums=(0, 1))

    got = run(jax.jit(per_device(mesh, second(jflux))), x, ws)
    want = run(jax.jit(per_device(mesh, second(jflux.reference))), x, ws)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-3 * abs(b).max())


def test_checkpoint_can_keep_sums_or_gather_again():
    """Whatever a policy keeps, gradients are the same, to the bit."""
    mesh, k, n = make_mesh((RANKS,)), 40, 24
    x, ws, biases = _operands(6, k, [n, n], (True, True), BF16)

    def loss(x, ws, biases):
        y = _gather(activation="silu", gated=True)(x, ws, bias=biases)
        return jnp.sum(y.astype(jnp.float32) ** 2)

    policies = {
        "nothing": jax.checkpoint_policies.nothing_saveable,
        "sums": jax.checkpoint_policies.save_only_these_names("jflux_preactivation"),
        "gathered": jax.checkpoint_policies.save_only_these_names("jflux_gathered"),
    }
    plain = run(jax.jit(per_device(mesh, jax.grad(loss, (0, 1, 2)))), x, ws, biases)
    for name, policy in policies.items():
        f = jax.grad(jax.checkpoint(loss, policy=policy), (0, 1, 2))
        again = run(jax.jit(per_device(mesh, f)), x, ws, biases)
        for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(again), strict=True):
            np.testing.assert_array_equal(a, b, err_msg=name)


@pytest.mark.parametrize(
    "kept, gathers",
    [
        (["jflux_gathered", "jflux_preactivation", "jflux_activated"], 2),
        (["jflux_gathered", "jflux_preactivation"], 3),
        (["jflux_gathered", "jflux_activated"], 3),
        ([], 3),
    ],
)
def test_checkpoint_of_an_mlp_multiplies_again_only_for_what_is_not_kept(kept, gathers):
    """One gather is the forward pass's, one is the second product's dx; a third is the first
    again."""
    mesh, k, n = make_mesh((RANKS,)), 64, 64
    x, ws, _ = _operands(32, k, [n, n], (False, False), BF16)

    @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names(*kept))
    def mlp(x, ws, down):
        h = _gather(activation="silu", gated=True)(x, ws)
        return jflux.matmul_reduce_scatter(h, down, axis_name="tp")

    def gradients(x, ws, down):
        y, vjp = jax.vjp(mlp, x, ws, down)
        return y, *vjp(y)

    down = normal(7, (RANKS, n, k), BF16)
    calls = fused_calls(compiled_text(per_device(mesh, gradients), x, ws, down))
    assert calls.count("all_gather_matmul") == gathers
    assert calls.count("matmul_reduce_scatter") == 2


def test_one_gather_and_no_more():
    """An activation costs no product and no gather of its own, in either direction."""
    mesh, k, n = make_mesh((RANKS,)), 64, 64
    x, ws, _ = _operands(32, k, [n, n], (False, False), BF16)
    op = _gather(activation="silu", gated=True)

    def gradients(x, ws):
        y, vjp = jax.vjp(op, x, ws)
        return vjp(y)

    text = compiled_text(per_device(mesh, gradients), x, ws)
    # On CPUs each weight has a product of its own.
    both = ["all_gather_matmul", "matmul_reduce_scatter"]
    assert sorted(fused_calls(text)) == both, PLATFORM


def test_vmapped(lenient):
    mesh, k, n = make_mesh((RANKS,)), 16, 8
    xs = normal(0, (RANKS, 3, 4, k), np.float32)
    w, b = normal(1, (RANKS, k, n), np.float32), normal(2, (RANKS, n), np.float32)
    op = _gather(activation="gelu")
    f = jax.vmap(lambda x, w, b: op(x, w, bias=b), in_axes=(0, None, None))
    got = run(jax.jit(per_device(mesh, f)), xs, w, b)
    for i in range(3):
        want = run(jax.jit(per_device(mesh, lambda x, w, b: op(x, w, bias=b))), xs[:, i], w, b)
        np.testing.assert_allclose(got[:, i], want, rtol=1e-6, atol=1e-6)


def test_empty():
    mesh = make_mesh((RANKS,))
    op = _gather(activation="silu", gated=True)
    for rows, n in ((0, 8), (4, 0)):
        ws = (np.zeros((RANKS, 8, n), BF16),) * 2
        y = run(jax.jit(per_device(mesh, op)), np.zeros((RANKS, rows, 8), BF16), ws)
        assert y.shape == (RANKS, RANKS * rows, n)


@pytest.mark.parametrize("module", [jflux, jflux.reference], ids=["jflux", "lax"])
def test_global_arrays(module, lenient):
    """Biases are sharded as the columns of their weights."""
    mesh = make_mesh((RANKS,))
    x = normal(0, (8 * RANKS, 16), np.float32)
    ws = tuple(normal(1 + i, (16, 8 * RANKS), np.float32) / 4 for i in range(2))
    b = normal(5, (8 * RANKS,), np.float32)
    op = functools.partial(module.all_gather_matmul, axis_name="tp", mesh=mesh, precision="highest")
    y = jax.jit(lambda x, ws, b: op(x, ws, bias=(b, None), activation="silu", gated=True))(
        jax.device_put(x, NamedSharding(mesh, P("tp", None))), ws, b
    )
    gate, up = (x.astype(np.float64) @ w.astype(np.float64) for w in ws)
    f, _ = ACTIVATIONS["silu"]
    np.testing.assert_allclose(y, f(gate + b) * up, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(activation="tanh"), "must be None or one of gelu, gelu_tanh, relu, silu"),
        (dict(activation="silu", gated=True), "needs an activation and two weights"),
        (dict(gated=True), "needs an activation and two weights"),
        (dict(bias=np.zeros(9, np.float32)), r"a bias has shape \(9,\), its product has 8 columns"),
        (dict(bias=(None, None)), "1 weights need as many biases"),
    ],
)
def test_wrong_arguments(options, message):
    mesh = make_mesh((RANKS,))
    x, w = np.zeros((RANKS, 4, 8), BF16), np.zeros((RANKS, 8, 8), BF16)
    with pytest.raises(ValueError, match=message):
        jax.jit(per_device(mesh, _gather(**options)))(x, w)


def test_gates_of_different_widths():
    mesh = make_mesh((RANKS,))
    ws = (np.zeros((RANKS, 8, 8), BF16), np.zeros((RANKS, 8, 16), BF16))
    with pytest.raises(ValueError, match=r"the weights have \[8, 16\] columns"):
        op = _gather(activation="silu", gated=True)
        jax.jit(per_device(mesh, op))(np.zeros((RANKS, 4, 8), BF16), ws)


# ---- matmul_reduce_scatter -----------------------------------------------------------------------


def _scatter(module=jflux, **options):
    options = {"precision": "highest"} | options
    return functools.partial(module.matmul_reduce_scatter, axis_name="tp", **options)


@pytest.mark.parametrize("dtype", [BF16, np.float16, np.float32, np.float64], ids=str)
@pytest.mark.parametrize("has", [(True, False), (False, True), (True, True)], ids=str)
@pytest.mark.parametrize("module", [jflux, jflux.reference], ids=["jflux", "lax"])
def test_added(module, has, dtype):
    """Values, and gradients of everything."""
    if not _has_kernel(module, dtype):
        pytest.skip("no kernel")
    mesh, rows, k, n = make_mesh((RANKS,)), 5, 40, 24
    x = normal(0, (RANKS, RANKS * rows, k), dtype)
    w = (normal(1, (RANKS, k, n), np.float64) / k**0.5).astype(dtype)
    bias = normal(2, (n,), np.float32) if has[0] else None
    residual = normal(3, (RANKS, rows, n), dtype) if has[1] else None
    dy = normal(4, (RANKS, rows, n), dtype)

    def both(x, w, residual, dy):
        def op(x, w, bias, residual):
            return _scatter(module)(x, w, bias=bias, residual=residual)

        y, vjp = jax.vjp(op, x, w, bias, residual)
        return y, vjp(dy)

    with x64_if(dtype):
        y, (dx, dw, dbias, dresidual) = run(jax.jit(per_device(mesh, both)), x, w, residual, dy)
    terms = x.astype(np.float64) @ w.astype(np.float64)
    sizes = (abs(x.astype(np.float64)) @ abs(w.astype(np.float64))).sum(0).reshape(y.shape)
    want = terms.sum(0).reshape(y.shape)
    for one in (bias, residual):
        if one is not None:
            want, sizes = want + one, sizes + abs(one.astype(np.float64))
    assert y.dtype == dtype
    assert_close(y, want, sizes, dtype, RANKS * k)
    whole = dy.astype(np.float64).reshape(-1, n)
    assert_close(
        dx, whole @ w.astype(np.float64).swapaxes(1, 2),
        abs(whole) @ abs(w.astype(np.float64)).swapaxes(1, 2), dtype, n,
    )  # fmt: skip
    x64 = x.astype(np.float64).swapaxes(1, 2)
    assert_close(dw, x64 @ whole, abs(x64) @ abs(whole), dtype, max(1, len(whole)))
    if has[0]:  # of all ranks, since they share it
        size = np.broadcast_to(abs(whole).sum(0), dbias.shape)
        want = np.broadcast_to(whole.sum(0), dbias.shape)
        assert_close(dbias, want, size, np.float32, max(1, len(whole)), factor=4)
    if has[1]:
        np.testing.assert_array_equal(dresidual, dy)


@pytest.mark.parametrize(
    "choice",
    gpu_choices((224, 2, 8), (192, 2, 8), (192, 1, 16), (160, 2, 4), (128, 1, 1)),
    ids=str,
)
@pytest.mark.parametrize(
    "lead, rows, k, n, terms, out, residual_dtype",
    [
        ((), 200, 136, 520, 1, BF16, BF16),  # tiles that ranks share; ragged columns
        ((), 256, 64, 384, 2, BF16, BF16),
        ((), 72, 64, 200, 1, np.float32, np.float32),
        ((), 130, 64, 72, 1, BF16, np.float32),
        ((2,), 128, 64, 72, 1, BF16, BF16),
        ((3,), 20, 64, 72, 2, BF16, BF16),
        ((), 9, 37, 13, 1, BF16, BF16),
    ],
    ids=str,
)
def test_added_in_several_tiles(lead, rows, k, n, terms, out, residual_dtype, choice):
    """A sum of several terms, in tiles of all shapes."""
    mesh = make_mesh((RANKS,))
    xs = tuple(normal(i, (RANKS, *lead, RANKS * rows, k), BF16) for i in range(terms))
    ws = tuple(
        (normal(7 + i, (RANKS, k, n), np.float64) / k**0.5).astype(BF16) for i in range(terms)
    )
    bias = normal(2, (n,), np.float32)
    residual = normal(3, (RANKS, *lead, rows, n), residual_dtype)
    op = _scatter(bias=bias, preferred_element_type=out)
    with tuning_tables.force(tuning_tables.Choice(*choice)):
        y = run(
            jax.jit(per_device(mesh, lambda xs, ws, r: op(xs, ws, residual=r))), xs, ws, residual
        )
    want = bias + residual.astype(np.float64)
    sizes = abs(bias) + abs(residual.astype(np.float64))
    for x, w in zip(xs, ws, strict=True):
        x, w = x.astype(np.float64), w.astype(np.float64)
        for rank in range(RANKS):
            parts = (f(x[rank]) @ f(w[rank]) for f in (np.asarray, np.abs))
            mine, size = (np.split(part, RANKS, -2) for part in parts)
            want, sizes = want + np.stack(mine), sizes + np.stack(size)
    assert y.dtype == out
    assert_close(y, want, sizes, out, RANKS * k * terms)


@pytest.mark.skipif(PLATFORM == "cpu", reason="what the CUDA kernel adds, XLA adds on CPUs")
def test_nothing_is_added_after_the_kernel():
    mesh, k, n = make_mesh((RANKS,)), 64, 64
    x, w = np.zeros((RANKS, 64 * RANKS, k), BF16), np.zeros((RANKS, k, n), BF16)
    residual = np.zeros((RANKS, 64, n), BF16)
    op = _scatter(bias=np.zeros(n, np.float32))
    with jflux.config(always=True):
        text = compiled_text(
            jax.jit(per_device(mesh, lambda x, w, r: op(x, w, residual=r))), x, w, residual
        )
    assert fused_calls(text) and not re.search(r"(bf16|f32)\S* add\(", text)


def test_added_to_nothing():
    """An empty product is zero."""
    mesh, rows, n = make_mesh((RANKS,)), 3, 8
    x, w = np.zeros((RANKS, RANKS * rows, 0), BF16), np.zeros((RANKS, 0, n), BF16)
    bias, residual = normal(2, (n,), np.float32), normal(3, (RANKS, rows, n), BF16)
    op = _scatter(bias=bias)
    y = run(jax.jit(per_device(mesh, lambda x, w, r: op(x, w, residual=r))), x, w, residual)
    np.testing.assert_array_equal(y, (residual.astype(np.float32) + bias).astype(BF16))


def test_a_shared_bias_gets_the_sum_of_all_gradients(lenient):
    mesh, k, n = make_mesh((RANKS,)), 16, 8
    x, w = normal(0, (4 * RANKS, k * RANKS), np.float32), normal(1, (k * RANKS, n), np.float32)
    bias, residual = normal(2, (n,), np.float32), normal(3, (4 * RANKS, n), np.float32)

    def loss(bias, residual):
        y = jflux.matmul_reduce_scatter(
            x, w, axis_name="tp", mesh=mesh, bias=bias, residual=residual, precision="highest"
        )
        return jnp.sum(y**2), y

    (_, y), (dbias, dresidual) = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(
        bias, residual
    )
    want = x.astype(np.float64) @ w.astype(np.float64) + bias + residual
    np.testing.assert_allclose(y, want, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(dbias, 2 * want.sum(0), rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(dresidual, 2 * want, rtol=1e-4, atol=1e-3)


@pytest.mark.skipif(RANKS < 4, reason="needs ranks that share a bias")
@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_reduce_scatter"])
def test_the_gradient_of_a_shared_bias_is_summed_in_float32(op):
    mesh = make_mesh((2, 2), ("data", "tp"))
    gathers = op == "all_gather_matmul"
    x, w, bias = np.ones((2, 4, 8), BF16), np.ones((8, 16), BF16), np.zeros(16, BF16)
    x_spec = P("data", "tp", None) if gathers else P("data", None, "tp")
    w_spec, bias_spec = (P(None, "tp"), P("tp")) if gathers else (P("tp", None), P())

    def loss(bias):
        def f(x, w, bias):
            y = getattr(jflux, op)(x[0], w, axis_name="tp", bias=bias)
            return jax.lax.psum(jnp.sum(y.astype(np.float32)), ("data", "tp"))

        specs = (x_spec, w_spec, bias_spec)
        return jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=P())(x, w, bias)

    gradient = jax.jit(jax.grad(loss))
    text = gradient.lower(bias).as_text()
    sums = re.findall(r"stablehlo.all_reduce.*?\}\) : \(.*?\) -> tensor<(.*?)>", text, re.DOTALL)
    assert "16xf32" in sums or "8xf32" in sums
    assert not [one for one in sums if "bf16" in one]
    np.testing.assert_array_equal(gradient(bias), np.full(16, 8))


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(bias=np.zeros(9, np.float32)), r"the bias has shape \(9,\), y has 8 columns"),
        (dict(residual=np.zeros((3, 8), BF16)), r"the residual has shape \(3, 8\), y has \(4, 8\)"),
    ],
)
def test_what_cannot_be_added(options, message):
    mesh = make_mesh((RANKS,))
    x, w = np.zeros((RANKS, 4 * RANKS, 8), BF16), np.zeros((RANKS, 8, 8), BF16)
    with pytest.raises(ValueError, match=message):
        jax.jit(per_device(mesh, _scatter(**options)))(x, w)


def test_names():
    assert set(ACTIVATIONS) - {None} == set(jflux._ops._epilogue.ACTIVATIONS)
    assert ops.products.all_gather_matmul.PREACTIVATION == "jflux_preactivation"
    assert ops.products.all_gather_matmul.ACTIVATED == "jflux_activated"
