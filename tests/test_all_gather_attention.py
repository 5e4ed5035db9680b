"""Attention to the keys of all ranks in one kernel, through jflux.attention, against the definition
in float64. tests/cc/simt/all_gather_attention_test.cc runs the GPU kernel."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import PLATFORM, RANKS, compiled, compiled_text, examples, fused_calls, make_mesh, run
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from test_attention import LAYOUTS, Case, plain, weights_of

import jflux
from jflux import testing
from jflux._call.plans import Machine, Path
from jflux._ops.attention import all_gather_attention
from jflux._ops.attention._blockwise import Scores

pytestmark = pytest.mark.skipif(PLATFORM == "gpu", reason="float32: tests/attention_gpu.py")
SEQUENCE = P(None, "tp")
ROUNDING = {jnp.float32: 2e-5, jnp.bfloat16: 0.03, jnp.float16: 0.004}


def wanted(case, arrays, ids, weights):
    """(o, l) and gradients, in float64."""

    def loss(q, k, v):
        o, lse = plain(q, k, v, case.mask(ids), case.softcap)
        seen = jnp.where(lse > -jnp.inf, lse, 0)
        return jnp.vdot(o, weights[0]) + jnp.vdot(seen, weights[1]), (o, lse)

    with jax.enable_x64(True):
        arrays = [jnp.asarray(np.asarray(a, np.float64)) for a in arrays]
        f = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))
        (_, results), gradients = f(*arrays)
        return jax.tree.map(np.asarray, (results, gradients))


def found(case, arrays, ids, weights):
    def loss(q, k, v):
        o, lse = case.split(q, k, v, ids)
        seen = jnp.where(lse > -jnp.inf, lse, 0)
        wide = [jnp.asarray(w, jnp.float32) for w in weights]
        return jnp.vdot(o.astype(jnp.float32), wide[0]) + jnp.vdot(seen, wide[1]), (o, lse)

    f = compiled(jax.value_and_grad(loss, (0, 1, 2), has_aux=True), *arrays)
    assert fused_calls(f.as_text()).count(all_gather_attention.OP) == 1
    (_, results), gradients = run(f, *arrays)
    return results, gradients


def check(case, dtype=jnp.float32):
    *arrays, ids = case.operands()
    arrays = [jnp.asarray(a, dtype) for a in arrays]
    weights = weights_of(case)
    got, want = (f(case, arrays, ids, weights) for f in (found, wanted))
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        bound = ROUNDING[dtype] * max(1, np.max(np.abs(other), where=np.isfinite(other), initial=0))
        np.testing.assert_allclose(np.asarray(one, np.float64), other, atol=bound, rtol=0)


@st.composite
def cases(draw):
    layout = draw(st.sampled_from(LAYOUTS))
    own = draw(st.integers(1, 70)) * (2 if layout == "zigzag" else 1)
    groups = draw(st.integers(1, 2))
    return Case(
        world=draw(st.integers(2, min(RANKS, 4))), own=own, layout=layout,
        batch=draw(st.integers(1, 2)), groups=groups, heads=groups * draw(st.integers(1, 3)),
        width=draw(st.sampled_from([1, 5, 16])), causal=draw(st.booleans()),
        window=draw(st.none() | st.tuples(st.integers(0, 40), st.integers(0, 40))),
        segments=draw(st.booleans()), softcap=draw(st.none() | st.just(1.5)), form="gather",
        seed=draw(st.integers(0, 1000)),
    )  # fmt: skip


@examples(8)
@given(cases())
def test_values_and_gradients(case):
    check(case)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_16_bits(dtype):
    check(Case(world=2, own=150, width=8, window=(90, 0), segments=True), dtype)


@pytest.mark.parametrize("world", [n for n in (5, 8) if n <= RANKS])
def test_many_ranks(world):
    check(Case(world=world, own=6))


def call_of(case, **options):
    """jflux.attention of the ranks' parts, in their order."""

    def attend(q, k, v, *ids):
        ids = ids[0] if ids else None
        return jflux.attention(
            q, k, v, segment_ids=ids, axis_name="tp", causal=case.causal, layout=case.layout,
            window=case.window, **options,
        )  # fmt: skip

    def f(*arrays):
        return jax.shard_map(
            attend, mesh=make_mesh((case.world,)), in_specs=(SEQUENCE,) * len(arrays),
            out_specs=SEQUENCE,
        )(*arrays)  # fmt: skip

    return f


def operands(case, dtype=jnp.float32):
    return [jnp.asarray(a, dtype) for a in case.operands()[:3]]


def in_two_steps(f, *arrays):
    with jflux.config(always=False):
        g = compiled(f, *arrays)
        assert all_gather_attention.OP not in fused_calls(g.as_text())
        return jax.tree.map(np.asarray, g(*arrays))


def test_late_ranks_in_a_loop():
    case = Case(world=3, own=10, heads=2, groups=2)
    q, k, v = operands(case)
    call = call_of(case)

    def loop(q, k, v):
        return jax.lax.fori_loop(0, 6, lambda _, q: call(q, k, v), q)

    with testing.planted_faults(max_delay_us=2000):
        got = run(jax.jit(loop), q, k, v)
    np.testing.assert_allclose(got, in_two_steps(loop, q, k, v), rtol=1e-5, atol=1e-5)


def test_missing_waits_are_found():
    case = Case(world=2, own=64)
    f, arrays = jax.jit(call_of(case)), operands(case)
    jax.block_until_ready(f(*arrays))  # the workspace is there
    wrong = 0
    with testing.planted_faults(skip_waits=True, max_delay_us=20_000):
        for _ in range(4):
            testing.poison_workspaces()
            wrong += int(np.isnan(np.asarray(f(*arrays))).any())
    assert wrong > 0


def check_one_call(f, arrays):
    program = compiled(f, *arrays)
    assert fused_calls(program.as_text()).count(all_gather_attention.OP) == 1
    got = run(program, *arrays)
    np.testing.assert_allclose(got, in_two_steps(f, *arrays), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("batched", [(0, 0, 0), (0, None, None), (None, 1, 1)])
@pytest.mark.parametrize("segments", [False, True])
def test_vmap_is_one_call(batched, segments):
    case = Case(world=2, own=8, segments=segments)
    *arrays, ids = case.operands()
    rng = np.random.default_rng(1)
    arrays = [
        np.asarray(a, np.float32)
        if dim is None
        else np.moveaxis(rng.standard_normal((3, *a.shape)).astype(np.float32), 0, dim)
        for a, dim in zip(arrays, batched, strict=True)
    ]
    if segments:
        arrays.append(np.asarray(ids, np.int32))
    f = jax.vmap(call_of(case), (*batched, None)[: len(arrays)])
    check_one_call(f, arrays)


def test_vmap_over_segments():
    case = Case(world=2, own=8)
    arrays = operands(case)
    ids = np.sort(np.random.default_rng(2).integers(0, 3, (3, case.batch, case.length)), -1)
    arrays.append(jnp.asarray(ids, jnp.int32))
    f = jax.vmap(call_of(case), (None, None, None, 0))
    check_one_call(f, arrays)


def test_derivatives_of_the_primitive():
    """Which gradients of gradients take: those of the steps."""
    case = Case(world=2, own=6)
    arrays = operands(case)
    f = call_of(case)

    def squared(*arrays):
        g = jax.grad(lambda *a: jnp.sum(jnp.sin(f(*a))), (0, 1, 2))(*arrays)
        return sum(jnp.sum(a**2) for a in g)

    second = jax.grad(squared, (0, 1, 2))
    got = jax.tree.map(np.asarray, jax.jit(second)(*arrays))
    for one, other in zip(got, in_two_steps(second, *arrays), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4)


@pytest.mark.skipif(RANKS < 4, reason="needs four devices")
@pytest.mark.parametrize("axes", ["tp", "dp", ("dp", "tp"), ("tp", "dp")])
@pytest.mark.parametrize("check_vma", [True, False])
def test_meshes(axes, check_vma):
    """Groups side by side, and ranks along two axes."""
    mesh = make_mesh((2, 2), ("dp", "tp"), order=[3, 1, 0, 2])
    world = 4 if isinstance(axes, tuple) else 2
    spec = P("dp" if axes == "tp" else "tp" if axes == "dp" else None, axes)
    case = Case(world=world, own=6)
    q, k, v = operands(case)
    mask = case.mask(None)
    order = jflux.causal_positions(case.length, world)

    def attend(q, k, v):
        return jflux.attention(q, k, v, axis_name=axes, causal=True)

    f = jax.jit(
        jax.shard_map(attend, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec, check_vma=check_vma)
    )
    arrays = [a[:, order] for a in (q, k, v)]
    assert fused_calls(compiled_text(f, *arrays)) == [all_gather_attention.OP]
    got = run(f, *arrays)
    want = np.asarray(plain(q, k, v, mask)[0])[:, order]
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("segments", [False, True])
def test_in_plain_lax(segments):
    case = Case(world=2, own=6, segments=segments)
    *_, ids = case.operands()
    arrays = operands(case) + ([jnp.asarray(ids, jnp.int32)] if segments else [])
    with jflux.config(fused=False):
        f = jax.jit(call_of(case))
        assert fused_calls(f.lower(*arrays).compile().as_text()) == []
        got = f(*arrays)
    np.testing.assert_allclose(got, in_two_steps(call_of(case), *arrays), rtol=1e-5, atol=1e-5)


def test_eagerly():
    case = Case(world=2, own=6)
    arrays = operands(case)
    got = call_of(case)(*arrays)
    np.testing.assert_allclose(got, in_two_steps(call_of(case), *arrays), rtol=1e-5, atol=1e-5)


def test_explain():
    case = Case(world=2, own=6)
    text = str(jflux.explain(call_of(case), *operands(case)))
    assert all_gather_attention.OP in text and "keys and values arrive while it computes" in text
    with jflux.config(always=False):
        text = str(jflux.explain(call_of(case), *operands(case)))
    assert "on CPUs XLA's blocks are faster" in text


def test_what_takes_other_ways():
    """One rank, a ring, segments of 64 bits."""
    two, one = Case(world=2, own=6), Case(world=1, own=6)

    def calls(f, *arrays):
        return fused_calls(compiled_text(f, *arrays))

    assert all_gather_attention.OP in calls(call_of(two), *operands(two))
    assert all_gather_attention.OP not in calls(call_of(two, form="ring"), *operands(two))
    assert all_gather_attention.OP not in calls(call_of(one), *operands(one))
    with jax.enable_x64(True):
        ids = jnp.zeros((2, 12), jnp.int64)
        assert all_gather_attention.OP not in calls(call_of(two), *operands(two), ids)


def test_plans():
    def plan(
        length=4096, heads=32, groups=8, width=128, world=2, dtype="bfloat16", platform="cuda",
        heap=1 << 31, scale=1.0, **switches,
    ):  # fmt: skip
        shapes = [(1, length, h, width) for h in (heads, groups, groups)]
        arrays = [jax.ShapeDtypeStruct(s, jnp.dtype(dtype)) for s in shapes]
        params = all_gather_attention.Params(("tp",), world, Scores(scale), np.dtype(dtype), None)
        machine = Machine(platform, 0 if platform == "cpu" else 132, 320.0, heap)
        with jflux.config(**({"always": False} | switches)):
            return all_gather_attention._op.plan(arrays, params, machine)

    taken = plan()
    assert taken.path == Path.FUSED and taken.senders == 44
    assert 32 << 20 < taken.workspace_bytes < 33 << 20
    for other, why in (
        (plan(dtype="float32"), "float32"),
        (plan(width=264), "264 elements"),
        (plan(scale=-1.0), "the scale is -1.0"),
        (plan(heap=1 << 26), "more than a third"),
        (plan(world=9), "world"),
        (plan(platform="cpu"), "on CPUs"),
        (plan(platform="cpu", always=True, dtype="float64"), "float64"),
    ):
        assert other.path == Path.DECOMPOSED and why in other.reason, other
    cpu = functools.partial(plan, platform="cpu", always=True)
    assert cpu().path == Path.FUSED and cpu(width=5, dtype="float32").path == Path.FUSED


def test_no_room_in_the_heap(monkeypatch):
    """The operands are in the kernel's form then."""
    case = Case(world=2, own=6)
    arrays = operands(case)
    want = in_two_steps(call_of(case), *arrays)
    monkeypatch.setattr(jflux._heap, "reserve", lambda *_: "there is no room")
    with jflux.config(strict=False):
        got = jax.jit(call_of(case))(*arrays)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
