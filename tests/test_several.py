"""Several weights over one gather, and several products scattered once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import PLATFORM, RANKS, compiled_text, dots, fused_calls, make_mesh, run
from jax.sharding import PartitionSpec as P

import jflux
from jflux._call import tuning_tables
from jflux._call.plans import Machine, Path
from jflux._ops import products as ops
from jflux._stress.calls import assert_close, normal, per_device

BF16 = jnp.bfloat16
# Columns of each weight, or k of each term: whole tiles and not, aligned and not, more than the
# kernels take at once.
SIZES = [(8, 24, 16), (256, 264), (7, 130), (8, 16, 8, 24, 32)]


def _gather(module=jflux, **options):
    options = {"precision": "highest"} | options
    return functools.partial(module.all_gather_matmul, axis_name="tp", **options)


def _scatter(module=jflux, **options):
    options = {"precision": "highest"} | options
    return functools.partial(module.matmul_reduce_scatter, axis_name="tp", **options)


def _weights(seed, shapes, transposed, dtype=BF16):
    """[RANKS, *shape] each, the last two dimensions swapped if transposed."""
    ws = [normal(seed + i, (RANKS, *shape), dtype) for i, shape in enumerate(shapes)]
    return tuple(np.swapaxes(w, 1, 2).copy() if transposed else w for w in ws)


def _whole(x):
    """What every rank gathers of x [RANKS, rows, k], in float64."""
    return x.astype(np.float64).reshape(-1, x.shape[-1])


def _plain(w, transposed):
    w = w.astype(np.float64)
    return np.swapaxes(w, 1, 2) if transposed else w


@pytest.mark.parametrize("out", [None, np.float32])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("rows", [5, 160])
def test_gather_values_and_gradients(rows, sizes, transposed, out):
    mesh, k = make_mesh((RANKS,)), 40
    x = normal(0, (RANKS, rows, k), BF16)
    ws = _weights(1, [(k, n) for n in sizes], transposed)
    op = _gather(transpose_rhs=transposed, return_gathered=True, preferred_element_type=out)
    ys, gathered = run(jax.jit(per_device(mesh, op)), x, ws)
    whole = _whole(x)
    np.testing.assert_array_equal(
        gathered.astype(np.float64), np.broadcast_to(whole, gathered.shape)
    )
    for y, w in zip(ys, (_plain(w, transposed) for w in ws), strict=True):
        assert y.dtype == (out or BF16)
        assert_close(y, whole @ w, abs(whole) @ abs(w), y.dtype, k)

    dys = tuple(normal(9 + i, y.shape, BF16) for i, y in enumerate(ys))

    def gradients(x, ws, dys):
        op = _gather(transpose_rhs=transposed)
        return jax.vjp(op, x, ws)[1](dys)

    dx, dws = run(jax.jit(per_device(mesh, gradients)), x, ws, dys)
    parts = [(dy.astype(np.float64), _plain(w, transposed)) for dy, w in zip(dys, ws, strict=True)]
    want = sum(dy @ w.swapaxes(1, 2) for dy, w in parts).sum(0).reshape(x.shape)
    scale = sum(abs(dy) @ abs(w).swapaxes(1, 2) for dy, w in parts).sum(0).reshape(x.shape)
    assert_close(dx, want, scale, BF16, RANKS * sum(sizes))
    for dw, (dy, _) in zip(dws, parts, strict=True):
        assert_close(_plain(dw, transposed), whole.T @ dy, abs(whole).T @ abs(dy), BF16, len(whole))


@pytest.mark.parametrize("out", [None, np.float32])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("rows", [5, 160])
def test_scatter_values_and_gradients(rows, sizes, transposed, out):
    mesh, n = make_mesh((RANKS,)), 40
    xs = tuple(normal(i, (RANKS, RANKS * rows, k), BF16) for i, k in enumerate(sizes))
    ws = _weights(9, [(k, n) for k in sizes], transposed)
    op = _scatter(transpose_rhs=transposed, preferred_element_type=out)
    y = run(jax.jit(per_device(mesh, op)), xs, ws)
    plain = [_plain(w, transposed) for w in ws]
    x64 = [x.astype(np.float64) for x in xs]
    want = sum(x @ w for x, w in zip(x64, plain, strict=True)).sum(0).reshape(y.shape)
    scale = sum(abs(x) @ abs(w) for x, w in zip(x64, plain, strict=True)).sum(0).reshape(y.shape)
    assert y.dtype == (out or BF16)
    assert_close(y, want, scale, y.dtype, RANKS * sum(sizes))

    dy = normal(20, y.shape, BF16)

    def gradients(xs, ws, dy):
        return jax.vjp(_scatter(transpose_rhs=transposed), xs, ws)[1](dy)

    dxs, dws = run(jax.jit(per_device(mesh, gradients)), xs, ws, dy)
    whole = _whole(dy)
    for dx, dw, x, w in zip(dxs, dws, x64, plain, strict=True):
        assert_close(dx, whole @ w.swapaxes(1, 2), abs(whole) @ abs(w).swapaxes(1, 2), BF16, n)
        x = x.swapaxes(1, 2)
        assert_close(_plain(dw, transposed), x @ whole, abs(x) @ abs(whole), BF16, len(whole))


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(264, 8), (72, 264), (8, 264)], ids=str)
def test_clusters_that_share_the_k_of_several_terms(sizes):
    """Of a later term perhaps one CTA has nothing; of the first all have some, or none share."""
    mesh, rows, n = make_mesh((RANKS,)), 5, 136
    xs = tuple(normal(i, (RANKS, RANKS * rows, k), BF16) for i, k in enumerate(sizes))
    ws = _weights(9, [(k, n) for k in sizes], False)
    with tuning_tables.force(tuning_tables.Choice(128, 1, 1, 2)):
        y = run(jax.jit(per_device(mesh, _scatter())), xs, ws)
    x64, w64 = ([a.astype(np.float64) for a in arrays] for arrays in (xs, ws))
    want = sum(x @ w for x, w in zip(x64, w64, strict=True)).sum(0).reshape(y.shape)
    scale = sum(abs(x) @ abs(w) for x, w in zip(x64, w64, strict=True)).sum(0).reshape(y.shape)
    assert_close(y, want, scale, BF16, RANKS * sum(sizes))


@pytest.mark.skipif(PLATFORM != "cpu", reason="asks what a GPU would be given")
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("sizes", [(16,), (7, 130), (8, 24), (8, 16, 8, 24, 32)], ids=str)
def test_operands_as_gpus_are_given_them(sizes, transposed):
    """Padded to whole vectors, or copied together, as for CUDA: the results are the same."""
    mesh, k = make_mesh((RANKS,)), 9
    x = normal(0, (RANKS, 5, k), BF16)
    ws = _weights(1, [(k, n) for n in sizes], transposed)
    xs = tuple(normal(i, (RANKS, RANKS * 5, k), BF16) for i, k in enumerate(sizes))
    vs = _weights(9, [(k, 12) for k in sizes], transposed)

    def as_on_gpus(module, params, operands):
        machine = Machine("cuda", sm_count=132, link_gbps=320)
        assert module._op.plan(operands, params, machine).path == Path.FUSED
        canonical = module._canonical(operands, params, machine)
        assert canonical is not None  # k = 9 and n = 12 are not whole vectors
        return canonical(*operands)

    def gather(x, *ws):
        params = ops.all_gather_matmul.Params(
            ("tp",), RANKS, 0, ("y", "gathered"), transposed, np.dtype(BF16)
        )
        return as_on_gpus(ops.all_gather_matmul, params, (x, *ws))

    def scatter(*operands):
        params = ops.matmul_reduce_scatter.Params(("tp",), RANKS, 0, transposed, np.dtype(BF16))
        return as_on_gpus(ops.matmul_reduce_scatter, params, operands)

    *ys, gathered = run(jax.jit(per_device(mesh, gather)), x, *ws)
    whole = _whole(x)
    np.testing.assert_array_equal(gathered[0].astype(np.float64), whole)
    for y, w in zip(ys, (_plain(w, transposed) for w in ws), strict=True):
        assert_close(y, whole @ w, abs(whole) @ abs(w), BF16, k)
    (y,) = run(jax.jit(per_device(mesh, scatter)), *xs, *vs)
    terms = [(x.astype(np.float64), _plain(v, transposed)) for x, v in zip(xs, vs, strict=True)]
    want = sum(x @ v for x, v in terms).sum(0).reshape(y.shape)
    scale = sum(abs(x) @ abs(v) for x, v in terms).sum(0).reshape(y.shape)
    assert_close(y, want, scale, BF16, RANKS * sum(sizes))


def test_one_call_each_way():
    """One gather serves all weights, forward and backward, and nothing is copied together."""
    mesh = make_mesh((RANKS,))
    x = normal(0, (RANKS, 8, 16), BF16)
    ws = _weights(1, [(16, 8), (16, 24)], False)
    ys = (np.ones((RANKS, RANKS * 8, 8), BF16), np.ones((RANKS, RANKS * 8, 24), BF16))
    forward = compiled_text(per_device(mesh, _gather()), x, ws)
    assert fused_calls(forward) == ["all_gather_matmul"]

    def both(x, ws, dys):
        ys, vjp = jax.vjp(_gather(), x, ws)
        return ys, vjp(dys)

    text = compiled_text(per_device(mesh, both), x, ws, ys)
    assert sorted(fused_calls(text)) == ["all_gather_matmul", "matmul_reduce_scatter"]
    assert dots(text) <= 2  # the weights' gradients, which XLA may merge


def test_remat_gives_the_same():
    mesh = make_mesh((RANKS,))
    x = normal(0, (RANKS, 8, 16), BF16)
    ws = _weights(1, [(16, 8), (16, 24)], False)

    def gradients(op):
        def loss(x, ws):
            return sum((y.astype(jnp.float32) ** 2).sum() for y in op(x, ws))

        return run(jax.jit(per_device(mesh, jax.grad(loss, argnums=(0, 1)))), x, ws)

    kept, again = gradients(_gather()), gradients(jax.checkpoint(_gather()))
    for a, b in zip(jax.tree.leaves(kept), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("x_axis, w_axes", [(0, None), (None, (0, 1)), (1, (0, None)), (0, (1, 1))])
def test_vmap(x_axis, w_axes):
    mesh, batch = make_mesh((RANKS,)), 3
    x_shape, w_shapes = [4, 16], [[16, 8], [16, 24]]
    w_axes = w_axes or (None, None)
    if x_axis is not None:
        x_shape.insert(x_axis, batch)
    for shape, axis in zip(w_shapes, w_axes, strict=True):
        if axis is not None:
            shape.insert(axis, batch)
    x = normal(0, (RANKS, *x_shape), BF16)
    ws = tuple(normal(1 + i, (RANKS, *shape), BF16) for i, shape in enumerate(w_shapes))
    mapped = jax.vmap(_gather(), in_axes=(x_axis, w_axes))
    ys = run(jax.jit(per_device(mesh, mapped)), x, ws)
    for i in range(batch):
        one_x = x if x_axis is None else np.take(x, i, axis=x_axis + 1)
        whole = _whole(one_x)
        for y, w, axis in zip(ys, ws, w_axes, strict=True):
            one_w = (w if axis is None else np.take(w, i, axis=axis + 1)).astype(np.float64)
            assert_close(y[:, i], whole @ one_w, abs(whole) @ abs(one_w), BF16, 16)


@pytest.mark.parametrize("batched", ["x", "w", "both", "one x"])
def test_vmap_of_a_scatter(batched):
    mesh, batch = make_mesh((RANKS,)), 3
    x_axes = {"x": (0, 0), "w": (None, None), "both": (0, 0), "one x": (0, None)}[batched]
    w_axes = (0, 0) if batched in ("w", "both") else (None, None)
    xs, ws = [], []
    for i, (k, x_axis, w_axis) in enumerate(zip((8, 16), x_axes, w_axes, strict=True)):
        lead = [() if axis is None else (batch,) for axis in (x_axis, w_axis)]
        xs.append(normal(i, (RANKS, *lead[0], RANKS * 4, k), BF16))
        ws.append(normal(5 + i, (RANKS, *lead[1], k, 24), BF16))
    mapped = jax.vmap(_scatter(), in_axes=(x_axes, w_axes))
    y = run(jax.jit(per_device(mesh, mapped)), tuple(xs), tuple(ws))
    for i in range(batch):
        want = scale = 0
        for x, w, x_axis, w_axis in zip(xs, ws, x_axes, w_axes, strict=True):
            one_x = (x if x_axis is None else x[:, i]).astype(np.float64)
            one_w = (w if w_axis is None else w[:, i]).astype(np.float64)
            want = want + (one_x @ one_w).sum(0)
            scale = scale + (abs(one_x) @ abs(one_w)).sum(0)
        shape = (RANKS, 4, 24)
        assert_close(y[:, i], want.reshape(shape), scale.reshape(shape), BF16, RANKS * 24)


@pytest.mark.parametrize("module", [jflux, jflux.reference])
def test_global_arrays(module):
    mesh = make_mesh((RANKS,))
    x = normal(0, (RANKS * 3, 16), BF16)
    ws = [normal(1, (16, RANKS * 8), BF16), normal(2, (16, RANKS * 24), BF16)]
    ys, gathered = run(jax.jit(_gather(module, mesh=mesh, return_gathered=True)), x, ws)
    np.testing.assert_array_equal(gathered, x)
    for y, w in zip(ys, ws, strict=True):
        assert_close(y, *_product(x, w), BF16, 16)
    back = [np.ascontiguousarray(w.T) for w in ws]
    dx = run(jax.jit(_scatter(module, mesh=mesh)), [np.asarray(y) for y in ys], back)
    terms = [_product(np.asarray(y), w) for y, w in zip(ys, back, strict=True)]
    want, scale = (sum(parts) for parts in zip(*terms, strict=True))
    factor = 1 if module is jflux else RANKS / 2
    assert_close(dx, want, scale, BF16, RANKS * 32, factor=factor)


def _product(x, w):
    x, w = x.astype(np.float64), w.astype(np.float64)
    return x @ w, abs(x) @ abs(w)


@pytest.mark.skipif(RANKS < 4, reason="needs two groups of two")
def test_check_vma():
    """Weights that are the same on all ranks of another axis, and one that is not."""
    mesh = make_mesh((2, RANKS // 2), ("dp", "tp"))
    x = normal(0, (2, RANKS // 2 * 3, 16), BF16)
    ws = (normal(1, (16, RANKS // 2 * 8), BF16), normal(2, (2, 16, RANKS // 2 * 8), BF16))

    def body(x, w1, w2):
        y1, y2 = _gather()(x[0], (w1, w2[0]))
        for y in (y1, y2):
            assert jax.typeof(y).manual_axis_type.varying == {"dp", "tp"}
        return y1[None], y2[None]

    f = jax.shard_map(
        body,
        mesh=mesh,
        in_specs=(P("dp", "tp"), P(None, "tp"), P("dp", None, "tp")),
        out_specs=P("dp", None, "tp"),
    )
    y1, y2 = run(jax.jit(f), x, *ws)
    for d in range(2):
        assert_close(y1[d], *_product(x[d], ws[0]), BF16, 16)
        assert_close(y2[d], *_product(x[d], ws[1][d]), BF16, 16)


def test_empty_ones_among_them():
    mesh = make_mesh((RANKS,))
    x, w = normal(0, (RANKS, 3, 8), BF16), normal(1, (RANKS, 8, 16), BF16)

    def gather(x, w):  # shard_map takes no empty operands from outside
        return _gather(return_gathered=True)(x, (w[:, :0], w, w[:, :0]))

    (none, y, _), gathered = run(jax.jit(per_device(mesh, gather)), x, w)
    whole = _whole(x)
    assert none.shape == (RANKS, len(whole), 0)
    assert_close(y, whole @ w.astype(np.float64), abs(whole) @ abs(w.astype(np.float64)), BF16, 8)
    np.testing.assert_array_equal(gathered[0].astype(np.float64), whole)

    def only_gathered(x, w):
        return _gather(return_gathered=True)(x, w[:, :0])[1]

    gathered = run(jax.jit(per_device(mesh, only_gathered)), x, w)
    np.testing.assert_array_equal(gathered[-1].astype(np.float64), whole)

    def gradient(x, w):
        return jax.grad(lambda x: gather(x, w)[0][1].astype(jnp.float32).sum())(x)

    dx = run(jax.jit(per_device(mesh, gradient)), x, w)
    rows = w.astype(np.float64).sum((0, 2))
    scale = abs(w.astype(np.float64)).sum((0, 2))
    shape = x.shape
    assert_close(dx, np.broadcast_to(rows, shape), np.broadcast_to(scale, shape), BF16, 16 * RANKS)

    tall = normal(2, (RANKS, RANKS * 3, 8), BF16)

    def scatter(x, w):
        return _scatter()((x[:, :0], x), (w[:0], w))

    y = run(jax.jit(per_device(mesh, scatter)), tall, w)
    t, w = tall.astype(np.float64), w.astype(np.float64)
    want, scale = ((a @ b).sum(0).reshape(y.shape) for a, b in ((t, w), (abs(t), abs(w))))
    assert_close(y, want, scale, BF16, 8 * RANKS)


def test_errors():
    mesh = make_mesh((RANKS,))

    def trace(op, *args):
        jax.jit(per_device(mesh, op)).trace(*args)

    x, w = np.zeros((RANKS, RANKS, 8), BF16), np.zeros((RANKS, 8, 16), BF16)
    with pytest.raises(ValueError, match="empty sequence of weights"):
        trace(lambda x: _gather()(x, ()), x)
    with pytest.raises(ValueError, match=r"x .*8\) and w \(9, 16\) do not contract"):
        trace(_gather(), x, (w, np.zeros((RANKS, 9, 16), BF16)))
    with pytest.raises(TypeError, match="several .* of one type, got bfloat16, float32"):
        trace(_gather(), x, (w, w.astype(np.float32)))
    with pytest.raises(ValueError, match="equally many, got 2 and 1"):
        trace(_scatter(), (x, x), (w,))
    with pytest.raises(ValueError, match=r"cannot be summed: all but k"):
        trace(_scatter(), (x, x), (w, np.zeros((RANKS, 8, 24), BF16)))
    with pytest.raises(ValueError, match=r"cannot be summed: all but k"):
        trace(_scatter(), (x, x.astype(np.float32)), (w, w.astype(np.float32)))
