"""Mixtures whose sums travel in 8 bits (`wire=`): bits, errors, derivatives, plans."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import make_mesh, run
from jax.sharding import PartitionSpec as P
from test_wire import _in_rows

import jflux
from jflux import moe
from jflux._call import forms
from jflux._stress.calls import normal

RANKS, TOKENS, K, EXPERTS, WIDTH = 3, 7, 2, 6, 200


@pytest.fixture(autouse=True)
def at_any_size():
    with jflux.config(always=True):
        yield


def _choices(seed=0):
    """(indices, weights) of all ranks' tokens; some slots have no expert."""
    rng = np.random.default_rng(seed)
    each = [rng.permutation(EXPERTS)[:K] for _ in range(RANKS * TOKENS)]
    indices = np.stack(each).astype(np.int32)
    indices[3], indices[5, 1] = -1, -1
    return indices, rng.uniform(0.2, 1, indices.shape).astype(np.float32)


def _layer(call, *, check_vma=True, fused=True, **dispatch):
    """call(rows, combine, x) on one rank, after a dispatch of x: global arrays in and out."""

    def local(x, indices, weights):
        options = {"num_experts": EXPERTS, "axis_name": "ep", **dispatch}
        d = jflux.moe_dispatch(x, indices, weights, **options)
        combine = functools.partial(
            jflux.moe_combine, handle=d.handle, weights=weights, axis_name="ep"
        )
        return call(d.rows, combine)

    f = jax.shard_map(
        local, mesh=make_mesh((RANKS,), ("ep",)), in_specs=P("ep"), out_specs=P("ep"),
        check_vma=check_vma,
    )  # fmt: skip

    def of(*operands):
        with jflux.config(fused=fused):
            return run(jax.jit(f), *operands)

    return of


KINDS = {
    "slots": {},
    "kernel": {"partial_sums": True},
    "ragged": {"partial_sums": True, "fused": False},
    "capacity": {"partial_sums": True, "capacity": 4},
}
each_kind = pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)


@pytest.mark.parametrize(("wire", "dtype"), [("int8", np.float32), ("float8_e4m3fn", jnp.bfloat16)])
def test_rows_of_slots(wire, dtype):
    """Each comes back as it is quantised, also from the rank itself: to the bit."""
    x = normal(0, (RANKS * TOKENS, WIDTH), dtype)
    x[4, 130] = np.nan

    def call(rows, combine):
        given = jnp.asarray(rows)
        blocks = jnp.pad(given.astype(jnp.float32), ((0, 0), (0, 56))).reshape(-1, 2, 128)
        sent = jflux.Format(wire, (1, 128), power_of_two=False).quantize(blocks).dequantize()
        sent = sent.reshape(-1, 256)[:, :WIDTH]
        return combine(given, wire=wire), combine(sent)

    y, want = _layer(call)(x, *_choices())
    assert y.dtype == dtype and np.isnan(y[4, 128:]).all() and np.isfinite(y[4, :128]).all()
    want = want.astype(dtype).astype(np.float32)
    np.testing.assert_array_equal(y.astype(np.float32), want)


def test_sums_are_quantised_once():
    """A token whose weights are ones: its sum on each rank is rounded, and these are added."""
    x = normal(0, (RANKS * TOKENS, WIDTH), np.float32)
    indices, _ = _choices()
    y = _layer(lambda rows, combine: combine(3 * rows, wire="int8"), partial_sums=True)(
        x, indices, np.ones(indices.shape, np.float32)
    )
    owners = np.where(indices >= 0, indices // (EXPERTS // RANKS), -1)
    want = np.zeros_like(x)
    for t, ranks in enumerate(owners):
        for rank in dict.fromkeys(ranks[ranks >= 0]):
            total = np.float32((ranks == rank).sum()) * (3 * x[t])
            want[t] += _in_rows(total[None], "int8")[0]
    np.testing.assert_allclose(y, want, rtol=1e-6, atol=1e-6)


@each_kind
def test_values_and_gradients(options):
    """Near the exact ones; those of an exact combine without grad_wire, and near them with one."""
    x, ct = (normal(i, (RANKS * TOKENS, WIDTH), jnp.bfloat16) for i in range(2))

    def call(rows, combine):
        def of(wire, grad_wire=None):
            f = lambda y, w: combine(y, weights=w, wire=wire, grad_wire=grad_wire)  # noqa: E731
            y, pull = jax.vjp(f, rows, combine.keywords["weights"])
            own = jax.lax.dynamic_slice_in_dim(ct, jax.lax.axis_index("ep") * TOKENS, TOKENS)
            d_rows, d_weights = pull(own.astype(y.dtype))
            tangent = jax.jvp(lambda r: f(r, combine.keywords["weights"]), (rows,), (rows,))[1]
            return y, d_rows, d_weights, tangent

        return of(None), of("int8"), of("int8", "int8")

    exact, got, both = _layer(call, **options)(x, *_choices())

    def error(a, b):
        a, b = (c.astype(np.float64) for c in (a, b))
        return np.sqrt(np.sum((a - b) ** 2) / np.sum(b**2))

    assert 4e-3 < error(got[0], exact[0]) < 8e-3
    assert error(got[3], exact[3]) < 3e-3  # sums on a rank are rounded to 16 bits, or not
    for one, other in zip(got[1:3], exact[1:3], strict=True):
        one, other = one.astype(np.float32), other.astype(np.float32)
        if options.get("fused", True) and "partial_sums" in options:
            np.testing.assert_array_equal(one, other)  # the same dispatch in one kernel
        np.testing.assert_allclose(one, other, rtol=1e-2, atol=1e-5)
    np.testing.assert_array_equal(both[0], got[0])
    for one, other in zip(both[1:], exact[1:], strict=True):
        assert 2e-3 < error(one, other) < 1e-2


@pytest.mark.parametrize("kind", ["kernel", "ragged", "slots"])
def test_derivatives_of_derivatives(kind):
    """They pass straight through the rounding of a grad_wire."""
    x = normal(0, (RANKS * TOKENS, WIDTH), np.float32)

    def call(rows, combine):
        def of(**wires):
            of_sums = jax.grad(lambda r: jnp.sum(jnp.sin(combine(r, **wires))))
            forward = jax.jvp(of_sums, (rows,), (jnp.cos(rows),))[1]
            return forward, jax.grad(lambda r: jnp.sum(of_sums(r) ** 2))(rows)

        return of(), of(wire="int8", grad_wire="int8")

    exact, got = _layer(call, **KINDS[kind])(x, *_choices())
    for one, other in zip(got, exact, strict=True):
        assert 1e-3 < np.linalg.norm(one - other) / np.linalg.norm(other) < 3e-2


@pytest.fixture
def by_all_to_all(monkeypatch):
    """-> a function after which no kernel is taken, though handles are a kernel's."""

    def start():
        monkeypatch.setattr(forms, "native_plan", lambda *_, **__: forms.WhyNot("a test"))
        jax.clear_caches()  # the plan is not in the key of what was lowered before

    yield start
    jax.clear_caches()


@pytest.mark.parametrize(
    ("more", "wire", "width", "dtype"),
    [
        ({"capacity": 4}, "int8", WIDTH, np.float32),
        ({"layout": "masked", "alignment": 4}, "float8_e4m3fn", 48, jnp.bfloat16),
        ({"alignment": 2}, "float8_e4m3fn", 1032, np.float16),
    ],
    ids=["capacity", "masked", "wide"],
)
def test_all_forms_have_the_same_bits(more, wire, width, dtype, by_all_to_all):
    """One kernel, a ragged exchange after a dispatch in steps, and an all-to-all. With a grad_wire
    the gradients too."""
    x = normal(0, (RANKS * TOKENS, width), dtype)
    x[4, width - 1], x[9, 0] = np.inf, np.nan

    def call(rows, combine):
        f = functools.partial(combine, wire=wire, grad_wire=wire)
        y, pull = jax.vjp(f, rows * rows)
        return y, f(y=rows, residual=x[:TOKENS]), pull(y)

    layer = functools.partial(_layer, call, partial_sums=True, **more)
    with jflux.explaining() as calls:
        kernel = layer()(x, *_choices())
    assert f"one kernel, with places for 21 tokens on each rank, sums in {wire}" in str(calls)
    with jflux.explaining() as calls:
        steps = layer(fused=False)(x, *_choices())
    assert f"rows in {wire}, in a ragged_all_to_all" in str(calls)
    by_all_to_all()
    with jflux.explaining() as calls:
        others = layer()(x, *_choices())
    assert "an all-to-all of quantised sums: a test" in str(calls)
    steps, others, kernel = jax.tree.map(
        lambda a: a.astype(np.float32), (steps, others, kernel)
    )  # of which a NaN equals another one
    for form in (steps, others):
        jax.tree.map(np.testing.assert_array_equal, form, kernel)


def test_between_nodes_alone():
    """With a node_axis what one node sends another is quantised."""
    x = normal(0, (4 * TOKENS, WIDTH), np.float32)
    indices = np.random.default_rng(0).integers(0, 8, (4 * TOKENS, K)).astype(np.int32)
    weights = np.ones(indices.shape, np.float32)

    def local(x, indices, weights):
        options = {"axis_name": "ep", "node_axis": "node"}
        d = jflux.moe_dispatch(x, indices, weights, num_experts=8, **options)
        options |= {"handle": d.handle, "weights": weights}
        return jflux.moe_combine(d.rows, **options, wire="int8"), jflux.moe_combine(
            d.rows, **options
        )

    axes = ("node", "ep")
    f = jax.shard_map(local, mesh=make_mesh((2, 2), axes), in_specs=P(axes), out_specs=P(axes))
    y, exact = run(jax.jit(f), x, indices, weights)
    error = np.sqrt(np.mean((y - exact) ** 2) / np.mean(exact**2))
    assert 3e-3 < error < 8e-3


# ---- Products ------------------------------------------------------------------------------------


def _experts(exchange, wires, dtype=np.float32):
    """Gradients of x, w and weights, and y, of dispatch_grouped_matmul and its combine."""

    def layer(x, up, down, indices, weights):
        h, handle = jflux.dispatch_grouped_matmul(
            x, up, indices, num_experts=EXPERTS, activation="relu", axis_name="ep",
            exchange=exchange,
        )  # fmt: skip
        return jflux.grouped_matmul_combine(h, down, handle, weights, axis_name="ep", **wires)

    own = P("ep")
    f = jax.shard_map(layer, mesh=make_mesh((RANKS,), ("ep",)), in_specs=(own,) * 5, out_specs=own)

    def both(x, up, down, indices, weights):
        y, pull = jax.vjp(lambda *a: f(*a[:3], indices, a[3]), x, up, down, weights)
        return y, pull(jnp.cos(3 * x))

    width = 256  # whole blocks, as the sums' kernel takes
    x = normal(0, (RANKS * TOKENS, width), dtype)
    up, down = normal(1, (EXPERTS, width, 16), dtype), normal(2, (EXPERTS, 16, width), dtype)
    return run(jax.jit(both), x, up, down, *_choices())


@pytest.mark.parametrize("exchange", ["gather", "dispatch"])
def test_products(exchange):
    exact, of_exact = _experts(exchange, {})
    y, gradients = _experts(exchange, {"wire": "int8"})
    error = np.sqrt(np.mean((y - exact) ** 2) / np.mean(exact**2))
    assert 2e-3 < error < 8e-3
    for one, other in zip(gradients, of_exact, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-3)
    _, gradients = _experts(exchange, {"wire": "int8", "grad_wire": "int8"})
    for one, other in zip(gradients, of_exact, strict=True):
        assert 1e-3 < np.linalg.norm(one - other) / np.linalg.norm(other) < 2e-2


HIDDEN = 6  # units of a rank


def _tensor_parallel(width, wire, ranks=RANKS, call=moe.grouped_matmul_reduce_scatter, **options):
    """f(h, w, weights, chosen) of experts whose hidden units are split over ranks, and operands
    whose sums are exact in any order: XLA joins products and sums, or does not."""
    split = P(None, "tp")
    tokens = 8 * ranks

    def local(h, w, weights, chosen):
        routing = moe.route(chosen, EXPERTS)
        return call(h, w, routing, weights, axis_name="tp", wire=wire, **options)

    f = jax.shard_map(
        local, mesh=make_mesh((ranks,)), in_specs=(split, split, P(), P()),
        out_specs=P("tp") if call is moe.grouped_matmul_reduce_scatter else P(),
    )  # fmt: skip
    rng = np.random.default_rng(0)
    chosen = rng.integers(0, EXPERTS, (tokens, K)).astype(np.int32)
    chosen[3], chosen[5, 1] = -1, -1
    shapes = (tokens * K, ranks * HIDDEN), (EXPERTS, ranks * HIDDEN, width), chosen.shape
    h, w, weights = (rng.integers(-8, 9, shape).astype(np.float32) for shape in shapes)
    return f, (h, w, weights / 8, chosen)


@pytest.mark.parametrize("wire", ["float8_e4m3fn", "int8"])
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_tensor_parallel_sums(wire, dtype):
    """The kernel: near the exact sums, and the bits of the steps, also where a block has a NaN."""
    f, (h, w, weights, chosen) = _tensor_parallel(256, wire)
    exact, _ = _tensor_parallel(256, None)
    args = h.astype(dtype), w.astype(dtype), weights, chosen
    with jflux.explaining() as calls:
        y, want = (run(jax.jit(g), *args).astype(np.float64) for g in (f, exact))
    assert f"one kernel multiplies, sums and scatters, sums in {wire}" in str(calls)
    step = {"int8": 1, "float8_e4m3fn": 4}[wire]
    assert 3e-3 * step < np.linalg.norm(y - want) / np.linalg.norm(want) < 8e-3 * step
    h[7] = np.nan
    for width in (256, 128):
        args = h.astype(dtype), w[..., :width].astype(dtype), weights, chosen
        y = run(jax.jit(f), *args).astype(np.float32)
        with jflux.config(fused=False):
            steps = run(jax.jit(f), *args)
        assert np.isnan(y).any() and np.isfinite(y).any()
        np.testing.assert_array_equal(y, steps.astype(np.float32))


def test_tensor_parallel_sums_in_steps():
    """Rows that are no whole blocks; the all-reduce; reports."""
    f, args = _tensor_parallel(WIDTH, "int8", ranks=2)
    whole, _ = _tensor_parallel(WIDTH, "int8", 2, moe.grouped_matmul_all_reduce)
    exact, _ = _tensor_parallel(WIDTH, None, ranks=2)
    with jflux.explaining() as calls:
        got = run(jax.jit(lambda *a: (f(*a), whole(*a))), *args)
    told = "\n".join(map(str, calls))
    assert "a grouped product, and a reduce-scatter in int8" in told
    assert "a wire's blocks are parts of rows: n must be a multiple of 128" in told
    want = run(jax.jit(exact), *args)
    for y, once in zip(got, (np.sqrt(0.5), np.sqrt(1.5)), strict=True):
        error = np.sqrt(np.mean((y - want) ** 2) / np.mean(want**2))
        assert 4e-3 * once < error < 8e-3 * once
    scattered, summed = jflux.wire_report(lambda *a: (f(*a), whole(*a)), *args)
    assert scattered.op == "moe.grouped_matmul_reduce_scatter" and 2e-3 < scattered.error < 8e-3
    assert summed.op == "all_reduce"


# ---- Plans, reports ------------------------------------------------------------------------------


def test_small_calls_are_exact():
    x = normal(0, (RANKS * TOKENS, WIDTH), np.float32)
    call = lambda rows, combine: combine(rows, wire="int8")  # noqa: E731
    exact = _layer(lambda rows, combine: combine(rows), partial_sums=True)
    args = (x, *_choices())
    with jflux.config(always=False), jflux.explaining() as calls:
        y = _layer(call, partial_sums=True)(*args)
    np.testing.assert_array_equal(y, exact(*args))
    assert "exact: 11200 bytes reach a rank, for which a quantised wire does not pay" in str(calls)
    with jflux.explaining() as calls:
        _layer(call, partial_sums=True)(*args)
    assert "sums in int8" in str(calls)
    with pytest.raises(ValueError, match="wire='int4' must be None or one of"):
        _layer(lambda rows, combine: combine(rows, wire="int4"))(*args)


def test_report():
    x = normal(0, (RANKS * TOKENS, WIDTH), jnp.bfloat16)
    indices, weights = _choices()

    def layer(x, indices, weights):
        options = {"axis_name": "ep"}
        d = jflux.moe_dispatch(x, indices, weights, num_experts=EXPERTS, **options)
        return jflux.moe_combine(d.rows, d.handle, weights=weights, wire="float8_e4m3fn", **options)

    f = jax.shard_map(layer, mesh=make_mesh((RANKS,), ("ep",)), in_specs=P("ep"), out_specs=P("ep"))
    (call,) = jflux.wire_report(f, x, indices, weights)
    assert call.op == "moe_combine" and call.times == 1 and 1e-2 < call.error < 2.8e-2
