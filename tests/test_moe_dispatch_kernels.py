"""A dispatch and a combine in one kernel each, against the form of several ops, bit for bit where
sums have one order, and against a dense form in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import LATENCY_HIDING, PLATFORM, RANKS, compiled_text, fused_calls, make_mesh, run
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from test_expert_parallel import KINDS, choices, dense, expected, layer

import jflux
from jflux import _config
from jflux._call import explain, forms, plans
from jflux._ops.experts import _dispatch_primitives
from jflux._ops.experts._dispatch_primitives import KernelHandle
from jflux._stress.calls import per_device, x64_if

WIDTH = 16
# ranks, tokens, k, experts of a rank
SIZES = ((2, 7, 3, 2), (3, 5, 4, 3), (RANKS, 6, 2, 1))
WAYS = (
    {"alignment": 4},
    {"capacity": 3},
    {"layout": "masked"},
    {"capacity": 2, "alignment": 4, "layout": "masked"},
)


def _operands(seed, kind, ranks, tokens, k, experts, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((ranks, tokens, WIDTH)).astype(dtype)
    weights = rng.random((ranks, tokens, k)).astype(np.float32)
    return x, choices(rng, kind, ranks, tokens, k, experts), weights


def _both(f, *args):
    """f, which is jitted: (by one kernel, by several ops)."""
    in_one = run(f, *args)
    with jflux.config(fused=False, strict=False):
        return in_one, run(f, *args)


@pytest.fixture
def by_gathers(monkeypatch):
    """The kernels are not taken, and the handle is theirs."""
    monkeypatch.setattr(forms, "native_plan", lambda *_, **__: forms.WhyNot("a test"))
    jax.clear_caches()  # the plan is not in the key of what was lowered before
    yield
    jax.clear_caches()


def _check_rows(size, way, dtype):
    mesh, experts = make_mesh(size[:1]), size[0] * size[3]

    def f(x, indices, weights):
        d = jflux.moe_dispatch(
            x, indices, weights, num_experts=experts, axis_name="tp", partial_sums=True, **way
        )
        y = jflux.moe_combine(d.rows, d.handle, axis_name="tp")
        return d.rows, d.group_sizes, d.padded_sizes, d.weights, d.statistics, y

    f = jax.jit(per_device(mesh, f))
    for seed, kind in enumerate(KINDS):
        args = _operands(seed, kind, *size[:3], experts, dtype=dtype)
        got, want = _both(f, *args)
        for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("way", range(len(WAYS)))
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_rows_and_sums_have_the_same_bits(size, way):
    _check_rows(size, WAYS[way], (jnp.bfloat16, np.float32, np.float16)[way % 3])


def test_rows_where_no_kernel_is_taken(by_gathers):
    for size, way in zip(SIZES, WAYS[1:], strict=True):
        _check_rows(size, way, np.float32)


# ---- A layer, and its gradients ------------------------------------------------------------------


def _layer_and_gradients(options):
    def f(x, indices, weights, w, ct):
        def one(x, weights, w):
            return layer(x, indices, weights, w, partial_sums=True, **options)

        y, pull = jax.vjp(one, x, weights, w)
        tangents = jax.jvp(one, (x, weights, w), (x, weights, w))[1]
        return y, tangents, *pull(ct)

    return f


def _check_layer(size, options):
    ranks, tokens, _, local = size
    experts = ranks * local
    rng = np.random.default_rng(3)
    w = (rng.standard_normal((experts, WIDTH, WIDTH)) / 4).astype(np.float32)
    ct = rng.standard_normal((ranks, tokens, WIDTH)).astype(np.float32)
    f = jax.jit(per_device(make_mesh((ranks,)), _layer_and_gradients(options)))
    for seed, kind in enumerate(KINDS):
        x, indices, weights = _operands(seed, kind, *size[:3], experts)
        _, kept = expected(indices, experts, options.get("capacity"))
        with jax.default_matmul_precision("highest"):  # GPUs round float32 operands
            got = run(f, x, indices, weights, w.reshape(ranks, local, WIDTH, WIDTH), ct)
        with x64_if(np.float64):

            def plain(x, weights, w, indices=indices, kept=kept):
                return dense(x, indices, weights, w, kept)

            wide = [a.astype(np.float64) for a in (x, weights, w)]
            y, pull = jax.vjp(plain, *wide)
            want = (y, jax.jvp(plain, tuple(wide), tuple(wide))[1], *pull(ct.astype(np.float64)))
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a.reshape(b.shape), b, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    "size, options",
    [
        (SIZES[0], {"alignment": 4, "scaled": True}),
        (SIZES[0], {"layout": "masked", "capacity": 3}),
        (SIZES[1], {}),
        (SIZES[2], {"capacity": 2, "scaled": True}),
    ],
    ids=str,
)
def test_a_layer_and_its_gradients(size, options):
    _check_layer(size, options)


def test_a_layer_where_no_kernel_is_taken(by_gathers):
    _check_layer(SIZES[1], {"capacity": 3})


def test_layers_under_remat_and_scan():
    """Two layers a step, with a residual, whose calls share a workspace."""
    ranks, tokens, k, experts = 2, 5, 3, 4
    rng = np.random.default_rng(5)
    w = (rng.standard_normal((ranks, 2, WIDTH, WIDTH)) / 4).astype(np.float32)
    args = (*_operands(5, "random", ranks, tokens, k, experts), w)

    def f(x, indices, weights, w):
        def loss(x, weights, w):
            @jax.checkpoint
            def step(x, shift):
                for i in range(2):
                    moved = (indices + shift + i) % experts
                    x = layer(x, moved, weights, w, residual=x, partial_sums=True)
                return x, jnp.sum(jnp.sin(x))

            return jnp.sum(jax.lax.scan(step, x, jnp.arange(3))[1])

        return jax.grad(loss, (0, 1, 2))(x, weights, w)

    program = jax.jit(per_device(make_mesh((ranks,)), f), compiler_options=LATENCY_HIDING)
    for a, b in zip(*_both(program, *args), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)


def test_batches_and_several_groups():
    """vmap of the calls, on a mesh of two groups."""
    if RANKS < 4:
        pytest.skip("two groups of two ranks")
    mesh = make_mesh((2, 2), ("dp", "tp"))
    x, indices, weights = (
        np.stack([np.stack([a[:2], a[2:]]), np.stack([a[2:], a[:2]])], 2)
        for a in _operands(6, "some without", 4, 5, 3, 4)
    )

    def f(x, indices, weights):
        def one(x, indices, weights):
            d = jflux.moe_dispatch(
                x, indices, weights, num_experts=4, axis_name="tp", partial_sums=True
            )
            return jflux.moe_combine(2 * d.rows, d.handle, axis_name="tp")

        return jax.vmap(one)(x, indices, weights)

    got, want = _both(jax.jit(per_device(mesh, f)), x, indices, weights)
    np.testing.assert_array_equal(got, want)


# ---- Which form is taken -------------------------------------------------------------------------


def _handle_of(**options):
    seen = []

    def f(x, indices, weights):
        d = jflux.moe_dispatch(x, indices, weights, num_experts=4, axis_name="tp", **options)
        seen.append(d.handle)
        y = jflux.moe_combine(d.rows, d.handle, axis_name="tp")
        return y

    args = _operands(7, "random", 2, 5, 3, 4)
    return compiled_text(per_device(make_mesh((2,)), f), *args), seen[0]


def test_two_kernels_and_nothing_else():
    """Statistics that nobody reads leave no trace."""
    text, handle = _handle_of(partial_sums=True)
    assert isinstance(handle, KernelHandle)
    assert sorted(fused_calls(text)) == ["moe_combine", "moe_dispatch"]


def test_other_forms():
    assert not isinstance(_handle_of()[1], KernelHandle)
    with jflux.config(fused=False, strict=False):
        assert not isinstance(_handle_of(partial_sums=True)[1], KernelHandle)


def test_the_tables_of_many_tokens_do_not_fit():
    indices = jax.ShapeDtypeStruct((8192, 8), np.int32)
    found = []

    def f(x):
        options = {"capacity": -1, "alignment": 1, "stride": 0}
        for rows in (8192, 4096):
            few = indices.update(shape=(rows, 8))
            params = _dispatch_primitives.Params(("tp",), 2, 128, 100, **options)
            found.append(_dispatch_primitives.why_not(x[:rows], few, params))
        return x

    x = jax.ShapeDtypeStruct((2, 8192, WIDTH), jnp.bfloat16)
    jax.eval_shape(per_device(make_mesh((2,)), f), x)
    assert "the tables of 128 experts and 16384 tokens do not fit" in found[0]
    assert found[1] is None


def _dispatched(ranks, tokens, width, num_experts, k, **options):
    """What `explain` notes of a dispatch of so many tokens of each rank."""

    def f(x, indices, weights):
        return jflux.moe_dispatch(
            x, indices, weights, num_experts=num_experts, axis_name="tp", **options
        ).rows

    mesh = make_mesh((ranks,))
    shapes = [((tokens, width), jnp.bfloat16), ((tokens, k), np.int32), ((tokens, k), np.float32)]
    operands = [
        jax.ShapeDtypeStruct((ranks, *shape), dtype, sharding=NamedSharding(mesh, P("tp")))
        for shape, dtype in shapes
    ]
    with _config.override(always=False):
        return explain.explain(per_device(mesh, f), *operands)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_workspace_has_as_many_tokens_of_all_ranks_on_any_number_of_them(ranks):
    """In halves of 256 MiB: their signals do not count."""
    params = _dispatch_primitives.Params(("tp",), ranks, 8 // ranks, 1 << 15, -1, 1, 0)
    tokens = 16384 // ranks
    x = jax.ShapeDtypeStruct((tokens, 7168), jnp.bfloat16)
    call = _dispatch_primitives._call((x, jax.ShapeDtypeStruct((tokens, 2), np.int32)), params)
    with _config.override(always=False):
        assert _dispatch_primitives._why_not(call, x.dtype) is None
        assert "more than" in _dispatch_primitives._why_not(call | {"tokens": 2 * tokens}, x.dtype)


def test_signals_do_not_crowd_out_the_kernel():
    """Of 8 ranks' 512 tokens, whose rows take 128 MiB, and signals of eight parts of each 513."""
    dispatch = _dispatch_primitives.Params(("tp",), 8, 32, 1 << 15, -1, 1, 0)
    y = jax.ShapeDtypeStruct((1 << 15, 7168), jnp.bfloat16)
    part = jax.ShapeDtypeStruct((512, 8), np.int32)
    combine = _dispatch_primitives.CombineParams(dispatch, y.dtype)

    def planned(heap_bytes):
        machine = plans.Machine("cuda", 132, 320.0, heap_bytes)
        with _config.override(always=False):
            return _dispatch_primitives._combine_op.plan([y, part], combine, machine)

    wide, narrow, none = (planned(mib << 20) for mib in (2048, 1024, 256))
    assert wide.path == narrow.path == plans.Path.FUSED
    assert (wide.config["parts"], narrow.config["parts"]) == (8, 4)
    assert narrow.workspace_bytes <= (1 << 30) // 3
    assert none.path == plans.Path.DECOMPOSED and "take 134480896 bytes" in none.reason


@pytest.mark.skipif(PLATFORM != "cpu", reason="a heap of 8 MiB")
def test_rows_that_a_third_of_the_heap_does_not_hold_are_cut(own_heap):
    """Into calls of a part of each row, which use its workspace one after the other."""
    rng = np.random.default_rng(11)
    x = rng.standard_normal((2, 64, 4096)).astype(np.float32)
    weights = rng.random((2, 64, 3)).astype(np.float32)
    indices = choices(rng, "random", 2, 64, 3, 4)

    def f(x, indices, weights):
        d = jflux.moe_dispatch(
            x, indices, weights, num_experts=4, partial_sums=True, axis_name="tp"
        )
        y = jflux.moe_combine(d.rows * 2, d.handle, weights=weights, axis_name="tp")
        return d.rows, d.group_sizes, d.weights, y

    def gradients(x, indices, weights):
        def loss(x, weights):
            return jnp.sum(jnp.sin(f(x, indices, weights)[-1]))

        return jax.grad(loss, (0, 1))(x, weights)

    both = [per_device(make_mesh((2,)), g) for g in (f, gradients)]
    with _config.override(always=False):
        whole = [run(jax.jit(g), x, indices, weights) for g in both]
        own_heap(heap_bytes=8 << 20)
        jax.clear_caches()  # of programs that were planned with the other heap
        found = explain.explain(both[0], x, indices, weights)
        in_parts = [run(jax.jit(g), x, indices, weights) for g in both]
    of_calls = [c.plan for c in found if c.op in ("moe_dispatch", "moe_combine")]
    assert [p.path for p in of_calls] == ["decomposed", "fused"] * 2
    for plan, calls in zip(of_calls[::2], (4, 2), strict=True):
        start = f"{calls} calls of a part of each row, since the places of tokens take"
        assert plan.reason.startswith(start)
        assert "jflux.init(heap_bytes=...) gives it more" in plan.reason
    jax.tree.map(np.testing.assert_array_equal, in_parts, whole)


def test_a_dispatch_that_is_no_kernel_says_why():
    (call, *others) = _dispatched(2, 16384, 7168, 8, 2, partial_sums=True)
    assert call.op == "moe_dispatch" and call.plan.path == "decomposed"
    assert "places for 32768 tokens take 1075840000 bytes" in call.plan.reason
    assert "jflux.config(always=True) takes the kernel" in call.plan.reason
    assert {other.op for other in others} >= {"ragged_all_to_all"}
    (call, *_) = _dispatched(2, 8, 7, 4, 2, partial_sums=True)
    assert "a row is no multiple of 16 bytes" in call.plan.reason
    # Without partial sums nobody asks for the kernel.
    assert "moe_dispatch" not in {call.op for call in _dispatched(2, 8, 8, 4, 2)}


@pytest.mark.skipif(PLATFORM != "cpu", reason="a failed call ends the process")
def test_a_dropped_slot_can_be_an_error():
    x, indices, weights = _operands(8, "one rank", 2, 6, 2, 4)

    def f(x, indices, weights):
        return jflux.moe_dispatch(
            x, indices, weights, num_experts=4, axis_name="tp", partial_sums=True, capacity=1,
            on_overflow="error",
        ).rows  # fmt: skip

    with pytest.raises(
        jax.errors.JaxRuntimeError, match=r"jflux.moe_dispatch: \d+ of the slots .*capacity larger"
    ):
        jax.block_until_ready(jax.jit(per_device(make_mesh((2,)), f))(x, indices, weights))
