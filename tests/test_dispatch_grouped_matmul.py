"""jflux.dispatch_grouped_matmul and grouped_matmul_combine by both exchanges, against every expert
on every token in float64."""

import functools

import gpu_programs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import LATENCY_HIDING, PLATFORM, RANKS, compiled_text, fused_calls, make_mesh, run
from jax import lax
from jax.sharding import PartitionSpec as P
from test_expert_parallel import KINDS, choices

import jflux
from jflux import _config, testing
from jflux._call import explain
from jflux._call.plans import Machine, Path
from jflux._ops._epilogue import ACTIVATIONS
from jflux._ops.experts import (
    all_gather_grouped_matmul,
    dispatch_grouped_matmul,
    grouped_matmul_reduce_scatter,
)
from jflux._ranks import meshes
from jflux._stress.calls import per_device, x64_if

pytestmark = pytest.mark.wide

H, F = 8, 6  # rows of 16 bytes and more, which the kernels of a dispatch take
EXCHANGES = dispatch_grouped_matmul.EXCHANGES
# ranks, tokens, k, experts of a rank
SIZES = ((1, 5, 2, 4), (2, 7, 3, 2), (3, 5, 2, 1), (min(4, RANKS), 6, 3, 2))


def operands(seed, kind, size, gated=True):
    """x, choices, weights, (gate, up) or (up,), and down, of each rank."""
    ranks, tokens, k, local = size
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((ranks, tokens, H))
    indices = choices(rng, kind, ranks, tokens, k, ranks * local)
    inner = [rng.standard_normal((ranks, local, H, F)) / 3 for _ in range(1 + gated)]
    down = rng.standard_normal((ranks, local, F, H)) / 3
    return x, indices, rng.random((ranks, tokens, k)), inner, down


def layer(x, indices, weights, inner, down, exchange=None, activation="silu", **options):
    """On one rank."""
    num_experts = down.shape[0] * lax.axis_size("tp")
    pair = inner if len(inner) == 2 else inner[0]
    h, handle = jflux.dispatch_grouped_matmul(
        x, pair, indices, num_experts=num_experts, axis_name="tp", exchange=exchange,
        activation=activation, gated=len(inner) == 2, **options,
    )  # fmt: skip
    return jflux.grouped_matmul_combine(h, down, handle, weights, axis_name="tp", **options)


def dense(x, indices, weights, inner, down, activation="silu"):
    """The same of all ranks' tokens, with every expert for every token."""
    first, *second = (jnp.einsum("nth,ehf->ntef", x, w.reshape(-1, *w.shape[2:])) for w in inner)
    h = first if activation is None else ACTIVATIONS[activation](first)
    h = h * second[0] if second else h
    y = jnp.einsum("ntef,efh->nteh", h, down.reshape(-1, *down.shape[2:]))
    one_hot = jax.nn.one_hot(indices, y.shape[2], dtype=x.dtype)
    return jnp.einsum("ntk,ntke,nteh->nth", weights, one_hot, y)


def with_gradients(f):
    """(x, indices, weights, inner, down, ct) -> y, its tangent, and four gradients."""

    def all_of(x, indices, weights, inner, down, ct):
        def one(x, weights, inner, down):
            return f(x, indices, weights, inner, down)

        args = x, weights, inner, down
        y, pull = jax.vjp(one, *args)
        return y, jax.jvp(one, args, jax.tree.map(jnp.cos, args))[1], *pull(ct)

    return all_of


def compare(got, want, bound=1e-11):
    """Sums are rounded as their largest terms are."""
    for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        largest = max(1.0, float(np.abs(b).max(initial=0)))
        np.testing.assert_allclose(a, b, rtol=bound, atol=bound * largest)


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize(
    "size, gated, dtype",
    [*((size, True, np.float64) for size in SIZES), (SIZES[1], False, np.float32)],
    ids=str,
)
def test_a_layer_and_its_derivatives(size, gated, dtype, exchange):
    """The second size has more choices than experts on a rank, the third one expert on each."""
    options = {"activation": "silu" if gated else "gelu_tanh"}
    f = functools.partial(layer, exchange=exchange, **options)
    f = jax.jit(per_device(make_mesh(size[:1]), with_gradients(f)))
    plain = jax.jit(with_gradients(functools.partial(dense, **options)))
    for seed, kind in enumerate(KINDS):
        args = operands(seed, kind, size, gated)
        args = (*args, np.cos(args[0]))
        narrow = jax.tree.map(lambda a: a.astype(dtype) if a.dtype == np.float64 else a, args)
        with x64_if(dtype):
            got = run(f, *narrow)
        with x64_if(np.float64):
            compare(got, plain(*args), 1e-11 if dtype == np.float64 else 3e-5)


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("size", SIZES[1:], ids=str)
def test_rows_lie_expert_after_expert(size, exchange):
    ranks, tokens, k, local = size

    def f(x, indices, w):
        y, handle = jflux.dispatch_grouped_matmul(
            x, w, indices, num_experts=ranks * local, axis_name="tp", exchange=exchange
        )
        return y, handle.group_sizes

    f = jax.jit(per_device(make_mesh((ranks,)), f))
    for seed, kind in enumerate(KINDS):
        x, indices, _, (w,), _ = operands(seed, kind, size, gated=False)
        with x64_if(np.float64):
            y, sizes = run(f, x, indices, w)
        assert y.shape == (ranks, min(k, local) * ranks * tokens, F) and sizes.dtype == np.int32
        want = np.zeros(y.shape)
        for rank in range(ranks):
            row = 0
            for e in range(local):
                chose = (indices == rank * local + e).any(2)
                assert sizes[rank, e] == chose.sum()
                for token in x[chose]:
                    want[rank, row] = token @ w[rank, e]
                    row += 1
        np.testing.assert_allclose(y, want, atol=1e-12)


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_rows_without_weights_count_once(exchange):
    size = SIZES[1]

    def f(x, indices, inner, down):
        return layer(x, indices, None, inner, down, exchange=exchange)

    f = jax.jit(per_device(make_mesh(size[:1]), f))
    for kind in ("random", "duplicates"):
        x, indices, weights, inner, down = operands(3, kind, size)
        earlier = np.tril(np.ones(2 * indices.shape[-1:], bool), -1)
        repeated = ((indices[..., None] == indices[..., None, :]) & earlier).any(-1)
        with x64_if(np.float64):
            want = dense(x, indices, 1.0 - repeated, inner, down)
            compare(run(f, x, indices, inner, down), want)


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("dtype, out", [(jnp.bfloat16, None), (jnp.float16, jnp.float32)])
def test_half_precision_and_transposed_weights(exchange, dtype, out):
    size = SIZES[3]
    x, indices, weights, inner, down = operands(4, "random", size)
    x, *ws = (np.asarray(a).astype(dtype) for a in (x, *inner, down))
    turned = [w.swapaxes(2, 3) for w in ws]
    f = functools.partial(layer, exchange=exchange, transpose_rhs=True, preferred_element_type=out)
    f = jax.jit(per_device(make_mesh(size[:1]), f))
    y = run(f, x, indices, weights.astype(np.float32), turned[:2], turned[2])
    assert y.dtype == (out or dtype)
    x, *ws = (a.astype(np.float64) for a in (x, *ws))
    with x64_if(np.float64):
        want = np.asarray(dense(x, indices, weights, ws[:2], ws[2]))
    error = np.abs(y.astype(np.float64) - want).max() / np.abs(want).max()
    assert error < (1e-2 if out is None else 2e-3), error


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_late_ranks_and_other_choices_of_one_program(exchange):
    size = SIZES[3]
    f = jax.jit(per_device(make_mesh(size[:1]), functools.partial(layer, exchange=exchange)))
    with testing.planted_faults(max_delay_us=2000), x64_if(np.float64):
        for seed, kind in enumerate(KINDS * 2):
            args = operands(seed, kind, size)
            compare(run(f, *args), dense(*args))


# ---- Transforms ----------------------------------------------------------------------------------


def test_two_layers_under_remat_and_scan_with_other_choices():
    """Of different experts, in each of three steps. Gradients by both exchanges and in plain lax
    are those of the dense form."""
    ranks, tokens, k = min(3, RANKS), 5, 2
    sizes = [(ranks, tokens, k, local) for local in (2, 3)]
    drawn = [operands(seed, "random", size) for seed, size in enumerate(sizes)]
    x = drawn[0][0]
    trained = [d[2:] for d in drawn]
    indices = [
        np.stack([operands(10 * s + step, "random", size)[1] for step in range(3)], 1)
        for s, size in enumerate(sizes)
    ]

    def gradients(one):
        def loss(x, trained, indices):
            @jax.checkpoint
            def step(x, indices):
                for i, its in zip(indices, trained, strict=True):
                    x = x + one(x, i, *its)
                return x, jnp.sum(jnp.sin(x))

            return jnp.sum(lax.scan(step, x, indices)[1])

        return jax.grad(loss, (0, 1))

    with x64_if(np.float64):
        steps_first = [np.moveaxis(i, 1, 0) for i in indices]
        want = jax.jit(gradients(dense))(x, trained, steps_first)
        for exchange in EXCHANGES:
            one = functools.partial(layer, exchange=exchange)
            f = per_device(make_mesh((ranks,)), gradients(one))
            f = jax.jit(f, compiler_options=LATENCY_HIDING)
            compare(run(f, x, trained, indices), want)
            with jflux.config(fused=False, strict=False):
                compare(f(x, trained, indices), want)


@pytest.mark.skipif(RANKS < 4, reason="two groups of two ranks")
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_batches_and_groups_side_by_side(exchange):
    size, batches = (2, 5, 3, 4), 2
    drawn = [
        [operands(2 * g + b, "some without", size)[:3] for b in range(batches)] for g in (0, 1)
    ]
    *_, inner, down = operands(9, "random", size)
    # [groups, ranks, batches, ...]
    x, indices, weights = (
        np.stack([np.stack([d[i] for d in group], 1) for group in drawn]) for i in range(3)
    )

    def f(x, indices, weights, inner, down):
        def one(x, indices, weights):
            return layer(x, indices, weights, inner, down, exchange=exchange)

        return jax.vmap(one)(x, indices, weights)

    f = jax.jit(per_device(make_mesh((2, 2), ("dp", "tp")), f))
    with x64_if(np.float64):
        twice = jax.tree.map(lambda a: np.stack([a, a]), (inner, down))
        y = run(f, x, indices, weights, *twice)
        for g, group in enumerate(drawn):
            for b, own in enumerate(group):
                compare(y[g, :, b], dense(*own, inner, down))


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_types_under_check_vma(exchange):
    """The gradient of what is the same on all ranks is summed over them."""
    size = SIZES[1]
    args = operands(5, "random", size)

    def f(x, indices, weights, inner, down, scale):
        def loss(scale):
            y = layer(
                x[0] * scale, indices[0], weights[0], [w[0] for w in inner], down[0], exchange
            )
            return lax.psum(jnp.sum(y**2), "tp")

        return jax.grad(loss)(scale)

    f = jax.shard_map(f, mesh=make_mesh(size[:1]), in_specs=(*[P("tp")] * 5, P()), out_specs=P())
    with x64_if(np.float64):
        x, *rest = args
        want = jax.grad(lambda scale: jnp.sum(dense(x * scale, *rest) ** 2))(1.5)
        compare(jax.jit(f)(*args, 1.5), want)


# ---- What is chosen ------------------------------------------------------------------------------


def test_which_exchange(monkeypatch):
    for (experts, world, k, columns, *few), share, exchange in (
        ((8, 2, 2, 28672), 0.79, "dispatch"),  # Mixtral
        ((8, 4, 2, 28672), 0.46, "dispatch"),
        ((8, 4, 2, 2048), 0.46, "gather"),
        ((8, 4, 2, 2048, 127), 0.46, "dispatch"),  # all tiles would wait for all tokens
        ((8, 8, 2, 2048), 0.25, "dispatch"),
        ((128, 2, 8, 1536), 1.0, "gather"),  # Qwen3
        ((128, 2, 8, 1536, 64), 1.0, "gather"),
        ((128, 8, 8, 1536), 0.67, "gather"),
        ((128, 8, 8, 1536, 64), 0.67, "dispatch"),  # 8192 tokens of all ranks
        ((128, 2, 8, 3072), 1.0, "gather"),  # Qwen3-235B
        ((256, 8, 8, 4096), 0.66, "dispatch"),  # DeepSeek-V3
        ((256, 32, 8, 4096), 0.23, "dispatch"),
        ((4, 1, 1, 4096), 1.0, "gather"),
        ((4, 2, 4, 4096), 1.0, "gather"),
        ((64, 4, 1, 8), 0.25, "dispatch"),
    ):
        assert round(dispatch_grouped_matmul.share_of_ranks(experts, world, k), 2) == share
        with _config.override(always=False):
            (rows,) = few or [128]
            call = experts, world, k, columns, rows
            monkeypatch.setattr(meshes, "platform", lambda: "gpu")
            pays, why = dispatch_grouped_matmul.pays_to_gather(*call)
            assert pays == (exchange == "gather"), why
            assert f"{k} of {experts}, lie on {share:.2f} of {world} ranks" in why
            # CPUs have one kernel for any number of rows.
            if columns <= 2048:
                monkeypatch.setattr(meshes, "platform", lambda: "cpu")
                assert dispatch_grouped_matmul.pays_to_gather(*call)[0] == (share >= 0.45)


def test_how_many_rows_a_rank_has_on_average():
    """T k, of N T min(k, E / N) slots."""
    for (world, k, experts), owners in (
        ((2, 2, 4), 2),
        ((8, 8, 16), 8),
        ((8, 2, 1), 4),  # Mixtral: 2 T of 8 T
        ((4, 8, 2), 1),  # all experts
        ((2, 3, 2), 1),
        ((8, 9, 1), 1),
    ):
        assert dispatch_grouped_matmul.owners_of(world, k, experts) == owners


@pytest.mark.parametrize("tokens, path", [(1024, Path.FUSED), (512, Path.DECOMPOSED)])
def test_gpus_plan_for_the_rows_that_experts_have(tokens, path):
    """Of Mixtral on 8 ranks: an expert has T / 4 rows from each, and 256 suffice."""
    mesh = make_mesh((8,))

    def f(x, w, down, indices):
        y, handle = jflux.dispatch_grouped_matmul(
            x, w, indices, num_experts=8, axis_name="tp", exchange="gather"
        )
        return jflux.grouped_matmul_combine(y, down, handle, axis_name="tp")

    shapes = [
        jax.ShapeDtypeStruct((8, *shape), dtype)
        for shape, dtype in (
            ((tokens, 512), jnp.bfloat16), ((1, 512, 1024), jnp.bfloat16),
            ((1, 1024, 512), jnp.bfloat16), ((tokens, 2), jnp.int32),
        )
    ]  # fmt: skip
    recorder = explain._Recorder()
    with gpu_programs.as_on_gpus(), _config.override(always=False, recorder=recorder):
        jax.jit(per_device(mesh, f)).trace(*shapes).lower(lowering_platforms=("cuda",))
    (plan,) = (call.plan for call in recorder.calls if call.op == grouped_matmul_reduce_scatter.OP)
    assert plan.path == path, plan


def test_ops_of_a_program_and_what_explain_says():
    size = (2, 6, 2, 2)
    args = jax.tree.map(lambda a: a.astype("f4") if a.dtype == np.float64 else a,
                        operands(6, "random", size))  # fmt: skip
    f = per_device(make_mesh(size[:1]), layer)
    kernels = set(fused_calls(compiled_text(f, *args)))
    report = str(jflux.explain(f, *args))
    assert "gather: the experts of a token, 2 of 4, lie on 0.83 of 2 ranks" in report
    if PLATFORM == "cpu":
        assert {
            all_gather_grouped_matmul.OP,
            grouped_matmul_reduce_scatter.OP,
        } <= kernels and "moe_dispatch" not in kernels
        assert "one kernel gathers and multiplies" in report
        assert "one kernel multiplies, sums and scatters" in report
    for_one = per_device(make_mesh(size[:1]), functools.partial(layer, exchange="dispatch"))
    found = jflux.explain(for_one, *args)
    assert found[0].op == dispatch_grouped_matmul.OP and found[0].plan.path == Path.DECOMPOSED
    assert found[0].plan.reason == "dispatch: the caller's choice"
    assert not {all_gather_grouped_matmul.OP, grouped_matmul_reduce_scatter.OP} & {
        call.op for call in found
    }
    if PLATFORM == "cpu":
        assert {"moe_dispatch", "moe_combine"} <= set(fused_calls(compiled_text(for_one, *args)))
    with jflux.config(fused=False, strict=False):
        assert not fused_calls(compiled_text(f, *args))


def test_explain_tells_of_a_loop_once():
    size = (2, 6, 2, 2)
    args = operands(6, "random", size)

    def f(x, indices, weights, inner, down):
        def step(x, _):
            return jax.checkpoint(layer)(x, indices, weights, inner, down), None

        return jax.grad(lambda x: jnp.sum(lax.scan(step, x, None, length=3)[0]))(x)

    with x64_if(np.float64):
        found = jflux.explain(per_device(make_mesh(size[:1]), f), *args)
    assert [call.op for call in found].count(dispatch_grouped_matmul.OP) == 1


def test_plans_are_for_the_rows_that_a_rank_has():
    """Half of the slots, with experts that are split over two ranks."""
    bf16, i32, world = jnp.dtype(jnp.bfloat16), jnp.int32, 2
    machine = Machine("cuda", 132, 320.0, 1 << 32)

    def plans(tokens, owners, experts=8, k=2, width=1024):
        def array(*shape, dtype=bf16):
            return jax.ShapeDtypeStruct(shape, dtype)

        slots = world * tokens * k
        own = array(experts + 1, dtype=i32), array(world * tokens, k, dtype=i32)
        own = *own, array(slots, dtype=i32)
        w = array(experts, width, width)
        params = all_gather_grouped_matmul.Params(("tp",), world, False, bf16, owners=owners)
        gather = all_gather_grouped_matmul._op.plan(
            [array(tokens, width), w, *own], params, machine
        )
        params = grouped_matmul_reduce_scatter.Params(("tp",), world, False, bf16, owners)
        arrays = [array(slots, width), w, array(world * tokens, k, dtype=jnp.float32), *own]
        return gather, grouped_matmul_reduce_scatter._op.plan(arrays, params, machine)

    for tokens in (1024, 2048, 4096, 8192):
        for whole, half in zip(plans(tokens, 1), plans(2 * tokens, 2), strict=True):
            assert whole.path == half.path
            assert whole.config.get("parts") == half.config.get("parts")
    assert plans(4096, 1)[0].config["parts"] > plans(4096, 2)[0].config["parts"]
    assert plans(1024, 2)[0].config["parts"] == 0 < plans(1024, 1)[0].config["parts"]


# ---- Operands that do not fit --------------------------------------------------------------------


def _refused(error, match, **changes):
    given = {
        "x": np.zeros((4, H), "f4"), "w": np.zeros((2, H, F), "f4"),
        "topk_indices": np.zeros((4, 2), "i4"), "num_experts": 4, "axis_name": "tp",
    } | changes  # fmt: skip

    def f():
        return jflux.dispatch_grouped_matmul(**given)[0]

    with pytest.raises(error, match=match):
        jax.eval_shape(jax.shard_map(f, mesh=make_mesh((2,)), in_specs=(), out_specs=P("tp")))


def test_operands_of_a_dispatch_that_do_not_fit():
    op = "jflux.dispatch_grouped_matmul: "
    _refused(ValueError, op + r"x must be floating \[T, H\].*int32", x=np.zeros((4, H), "i4"))
    _refused(TypeError, op + "topk_indices must be integers, got float32",
             topk_indices=np.zeros((4, 2), "f4"))  # fmt: skip
    _refused(ValueError, op + r"topk_indices must have shape \[T, k\] with the T=4",
             topk_indices=np.zeros((5, 2), "i4"))  # fmt: skip
    _refused(ValueError, op + "topk_indices.*which must be from 1 to",
             topk_indices=np.zeros((4, 5), "i4"))  # fmt: skip
    _refused(ValueError, op + "num_experts=5 must be a positive multiple of the 2", num_experts=5)
    _refused(ValueError, op + r"w must have three dimensions, the first of the 4 experts of a "
             r"rank \(num_experts=8 over 2 ranks\), got \(2, 8, 6\)", num_experts=8)  # fmt: skip
    _refused(ValueError, op + "w must have three dimensions", w=np.zeros((H, F), "f4"))
    _refused(ValueError, "has 5 columns", x=np.zeros((4, 5), "f4"))
    _refused(ValueError, "gated=True", w=[np.zeros((2, H, F), "f4")] * 2)
    _refused(ValueError, op + "exchange='ring' must be None or one of", exchange="ring")


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_operands_of_a_combine_that_do_not_fit(exchange):
    def refused(error, match, **changes):
        def f(x, w, indices):
            y, handle = jflux.dispatch_grouped_matmul(
                x, w, indices, num_experts=4, axis_name="tp", exchange=exchange
            )
            given = {"h": y, "w": np.zeros((2, F, H), "f4"), "handle": handle} | changes
            return jflux.grouped_matmul_combine(**given, axis_name="tp")

        args = np.zeros((2, 4, H), "f4"), np.zeros((2, 2, H, F), "f4"), np.zeros((2, 4, 2), "i4")
        with pytest.raises(error, match="jflux.grouped_matmul_combine: " + match):
            jax.eval_shape(per_device(make_mesh((2,)), f), *args)

    refused(ValueError, r"h must be floating \[R, F\] with the R=16.*\(15, 6\)",
            h=np.zeros((15, F), "f4"))  # fmt: skip
    refused(ValueError, "h must be floating.*int32", h=np.zeros((16, F), "i4"))
    refused(ValueError, r"w must have three dimensions, the first of the 2 experts.*\(3, 6, 8\)",
            w=np.zeros((3, F, H), "f4"))  # fmt: skip
    refused(ValueError, r"weights must be floating \(4, 2\)", weights=np.zeros((4, 3), "f4"))
    refused(TypeError, "handle must be what jflux.dispatch_grouped_matmul returned, got int",
            handle=3)  # fmt: skip


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_combine_over_the_axes_in_another_order(exchange):
    """Ranks would take each other's rows."""

    def f(x, w, indices):
        y, handle = jflux.dispatch_grouped_matmul(
            x, w, indices, num_experts=4, axis_name=("a", "b"), exchange=exchange
        )
        return jflux.grouped_matmul_combine(y, jnp.swapaxes(w, 1, 2), handle, axis_name=("b", "a"))

    mesh = make_mesh((2, 2), ("a", "b"))
    args = np.zeros((8, H), "f4"), np.zeros((4, H, F), "f4"), np.zeros((8, 2), "i4")
    g = jax.shard_map(f, mesh=mesh, in_specs=P(("a", "b")), out_specs=P(("a", "b")))
    with pytest.raises(
        ValueError, match=r"the dispatch was over \('a', 'b'\): it must be the same"
    ):
        jax.eval_shape(g, *args)


def test_outside_of_shard_map():
    with pytest.raises(NameError):
        jflux.dispatch_grouped_matmul(
            np.zeros((4, H), "f4"), np.zeros((2, H, F), "f4"), np.zeros((4, 2), "i4"),
            num_experts=4, axis_name="tp",
        )  # fmt: skip
