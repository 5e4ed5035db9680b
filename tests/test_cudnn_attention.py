"""jflux.attention composed of cuDNN's, against the definition in float64. Its two calls are
replaced by their definitions here; tests/test_attention_half.py runs them on GPUs."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import PLATFORM, RANKS, examples, make_mesh
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from test_attention import (
    LAYOUTS,
    Case,
    check,
    check_keys_of_another_sequence,
    plain_with_sinks,
    weights_of,
)

import jflux
import jflux.nn
from jflux import _config
from jflux._call import explain, plans
from jflux._ops.attention import (
    _chunk_calls,
    _cudnn,
    _cudnn_by_chunks,
    _one_device,
    _passes,
    _sequence_form,
)
from jflux._ops.attention._blockwise import Scores
from jflux._ops.attention.sequence_layouts import causal_positions, in_ranks, in_sequence
from jflux._ranks import meshes

pytestmark = pytest.mark.skipif(jax.default_backend() == "gpu", reason="float64")

#: (layout, causal) that cuDNN's calls make up.
TAKEN = [("zigzag", True), ("contiguous", True), *((layout, False) for layout in LAYOUTS)]


def scores_of(q, k, scale, causal):
    s = scale * jnp.einsum("bshd,bthd->bsht", q, jnp.repeat(k, q.shape[2] // k.shape[2], 2))
    if not causal:
        return s
    assert q.shape[1] == k.shape[1]
    return jnp.where(np.tri(q.shape[1], dtype=bool)[:, None], s, -jnp.inf)


def forward(q, k, v, *, scale, causal):
    s = scores_of(q, k, scale, causal)
    lse = jax.nn.logsumexp(s, -1)
    v = jnp.repeat(v, q.shape[2] // k.shape[2], 2)
    return jnp.einsum("bsht,bthd->bshd", jnp.exp(s - lse[..., None]), v), lse


def backward(q, k, v, o, lse, do, *, scale, causal):
    groups, group = k.shape[2], q.shape[2] // k.shape[2]
    p = jnp.exp(scores_of(q, k, scale, causal) - lse[..., None])
    dp = jnp.einsum("bshd,bthd->bsht", do, jnp.repeat(v, group, 2))
    ds = scale * p * (dp - jnp.sum(do * o, -1)[..., None])
    dq = jnp.einsum("bsht,bthd->bshd", ds, jnp.repeat(k, group, 2))
    both = jnp.einsum("bsht,bshd->bthd", ds, q), jnp.einsum("bsht,bshd->bthd", p, do)
    return dq, *(jnp.sum(a.reshape(*a.shape[:2], groups, group, -1), 3) for a in both)


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


@pytest.fixture
def calls(monkeypatch):
    """The calls of cuDNN, as (name, batch, queries, keys, causal), where every one is taken."""
    seen = []

    def noted(f, name):
        def call(q, k, *others, **options):
            seen.append((name, q.shape[0], q.shape[1], k.shape[1], options["causal"]))
            return f(q, k, *others, **options)

        return call

    monkeypatch.setattr(_cudnn, "why_not", lambda q, k, length: None)
    monkeypatch.setattr(_cudnn, "forward", noted(forward, "forward"))
    monkeypatch.setattr(_cudnn, "backward", noted(backward, "backward"))
    return seen


# ---- Values and gradients ------------------------------------------------------------------------


def without_lse(case, mesh=None, **options):
    """o of the sequence, from ranks that each have a part of it."""
    given = dict(causal=case.causal, layout=case.layout, form=case.form, axis_name="tp")
    f = jax.shard_map(
        lambda sinks, *arrays: jflux.attention(*arrays, sinks=sinks, **given),
        mesh=mesh or make_mesh((case.world,)), in_specs=(P(), *[P(None, "tp")] * 3),
        out_specs=P(None, "tp"), **options,
    )  # fmt: skip

    def call(q, k, v, sinks=None):
        arrays = [jflux.reorder_for_causal(a, case.world, layout=case.layout) for a in (q, k, v)]
        return jflux.restore_order(f(sinks, *arrays), case.world, layout=case.layout)

    return call


def check_without_lse(case, f=None, wrap=lambda f: f):
    """The result, and its gradients."""
    *arrays, _ = case.operands()
    weights = weights_of(case)[0]

    def loss(f):
        def of(*arrays):
            o = wrap(f)(*arrays)
            return jnp.vdot(o, weights), o

        return jax.value_and_grad(of, (0, 1, 2), has_aux=True)

    got = jax.jit(loss(f or without_lse(case)))(*arrays)
    want = jax.jit(loss(lambda *a: case.expected(*a, None)[0]))(*arrays)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-10)


@st.composite
def cases(draw):
    layout, causal = draw(st.sampled_from(TAKEN))
    groups = draw(st.integers(1, 3))
    return Case(
        world=draw(st.sampled_from([n for n in (1, 2, 3, 4) if n <= RANKS])), layout=layout,
        own=draw(st.integers(1, 7)) * (2 if layout == "zigzag" else 1), causal=causal,
        batch=draw(st.integers(1, 2)), heads=groups * draw(st.integers(1, 2)), groups=groups,
        width=draw(st.integers(1, 9)), form=draw(st.sampled_from(["gather", "ring"])),
        seed=draw(st.integers(0, 99)),
    )  # fmt: skip


@examples(8)
@given(case=cases())
def test_attention_is_that_of_the_whole_sequence(calls, case):
    calls.clear()
    check_without_lse(case)
    assert {call[0] for call in calls} == {"forward", "backward"}


@pytest.mark.parametrize("form", ["gather", "ring"])
@pytest.mark.parametrize(("layout", "causal"), TAKEN)
def test_eight_ranks(calls, layout, causal, form):
    check_without_lse(Case(world=min(8, RANKS), own=4, layout=layout, causal=causal, form=form))
    assert {call[0] for call in calls} == {"forward", "backward"}


@pytest.mark.parametrize("form", ["gather", "ring", "ulysses"])
@pytest.mark.parametrize(("queries", "keys"), [(3, 5), (4, 1)])
@pytest.mark.parametrize("world", [n for n in (1, 2, 3) if n <= RANKS])
def test_keys_of_another_sequence(calls, world, queries, keys, form):
    check_keys_of_another_sequence(world, queries, keys, form, return_lse=False)
    assert {call[0] for call in calls} == {"forward", "backward"}


@pytest.mark.parametrize("form", ["gather", "ring"])
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_gradients_of_the_log_sum_exp_are_those_of_blocks(calls, layout, form):
    check(Case(world=min(3, RANKS), own=6, layout=layout, form=form))
    assert {call[0] for call in calls} == {"forward"}


@pytest.mark.parametrize(
    "change", [{"window": (3, 0)}, {"softcap": 2.0}, {"segments": True}, {"layout": "striped"}]
)
def test_what_has_other_masks_or_scores_stays_in_blocks(calls, change):
    check(Case(world=2, own=4, **change))
    assert not calls


def of_sinks(f, case):
    """o of f(q, k, v, sinks) and its gradients, and what the definition has for them."""
    *arrays, _ = case.operands()
    weights = weights_of(case)[0]

    def run(f):
        def loss(*arrays):
            o = f(*arrays)
            return jnp.vdot(o, weights), o

        return jax.jit(jax.grad(loss, (0, 1, 2, 3), has_aux=True))(*arrays, case.sinks())

    return run(f), run(lambda *a: plain_with_sinks(*a, case.mask(None))[0])


@pytest.mark.parametrize("form", ["gather", "ring"])
@pytest.mark.parametrize(("layout", "causal"), TAKEN)
@pytest.mark.parametrize("world", [n for n in (3, 1) if n <= RANKS])
def test_sinks_need_nothing_of_cudnn(calls, world, layout, causal, form):
    """Its backward pass is given o and the log-sum-exp with sinks."""
    case = Case(world=world, own=4, layout=layout, causal=causal, form=form, width=3)
    results = of_sinks(without_lse(case), case)
    for one, other in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-10)
    assert {call[0] for call in calls} == {"forward", "backward"}


def test_sinks_of_one_device_are_added_to_what_cudnn_gives(calls):
    case = Case(world=1, own=8, width=3)

    def attend(q, k, v, sinks):
        return _one_device.attend(q, k, v, is_causal=True, sinks=sinks)

    for one, other in zip(*map(jax.tree.leaves, of_sinks(attend, case)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-10)
    assert {call[0] for call in calls} == {"forward", "backward"}


BIAS = {
    "gathered": ({"form": "gather"}, r"cuDNN has one of a rank's heads alone \(form='ulysses'\)"),
    "float32": ({"dtype": jnp.float32}, "a bias of q's type, bfloat16, got float32; cast it"),
    "sequences": ({"batch": 2}, "of a bias of each sequence has not been checked"),
    "log-sum-exp": ({"return_lse": True}, "one call of cuDNN has no log-sum-exp"),
}


@pytest.mark.parametrize(("change", "reason"), BIAS.values(), ids=BIAS)
def test_a_bias_that_cudnn_does_not_take_is_a_warning(change, reason, monkeypatch):
    monkeypatch.setattr(meshes, "platform", lambda: "gpu")
    monkeypatch.setattr(_cudnn, "_is_recent_gpu", lambda: True)
    monkeypatch.setattr(_cudnn, "_why_not_here", lambda q, k: None)
    options = {"axis_name": "tp", "causal": True, "dtype": jnp.bfloat16, "batch": 1} | change
    batch = options.pop("batch")
    bias = jax.ShapeDtypeStruct((batch, 2, 256, 256), options.pop("dtype"))

    def run(q, bias):
        return jflux.attention(q, q, q, bias=bias, **options)

    split = P(None, "tp")
    f = jax.shard_map(run, mesh=make_mesh((2,)), in_specs=(split, P()), out_specs=split)
    with jflux.config(strict=True), pytest.raises(NotImplementedError, match=reason):
        jax.eval_shape(f, jax.ShapeDtypeStruct((batch, 256, 2, 64), jnp.bfloat16), bias)


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("one_device", [False, True])
def test_one_call_of_cudnn_gets_a_bias_of_each_head(one_device, heads, monkeypatch):
    """JAX's function, which needs cuDNN, is replaced."""
    monkeypatch.setattr(meshes, "platform", lambda: "gpu")
    monkeypatch.setattr(_cudnn, "_is_recent_gpu", lambda: True)
    seen = []

    def of_jax(q, k, v, **options):
        seen.append((options["implementation"], options["bias"].shape))
        return q

    monkeypatch.setattr(_one_device, "_of_jax", of_jax)
    q, bias = jnp.zeros((3, 64, 2, 64), jnp.bfloat16), jnp.zeros((1, heads, 64, 64), jnp.bfloat16)
    with jflux.config(strict=True):
        if one_device:
            _one_device.attend(q, q, q, is_causal=True, bias=bias)
        else:
            jflux.attention(q, q, q, causal=True, bias=bias)
    assert seen == [("cudnn", (1, 2, 64, 64))]


@pytest.mark.parametrize("op", ["attention", "ulysses_attention", "one device"])
def test_slopes_that_make_heads_too_long_are_a_warning(op, monkeypatch):
    """Of 128 elements for cuDNN, where no kernel takes more."""
    monkeypatch.setattr(meshes, "platform", lambda: "gpu")
    f = functools.partial(_one_device.attend, alibi_slopes=np.ones(2))
    if op != "one device":
        f = functools.partial(getattr(jflux, op), axis_name="tp", alibi_slopes=np.ones(2))
        split = P(None, "tp")
        f = jax.shard_map(f, mesh=make_mesh((1,)), in_specs=(split,) * 3, out_specs=split)
    with jflux.config(strict=True):
        for width in (112, 136):
            jax.eval_shape(f, *[jax.ShapeDtypeStruct((1, 64, 2, width), jnp.bfloat16)] * 3)
        with pytest.raises(NotImplementedError, match="with alibi_slopes a head must .* got 136"):
            jax.eval_shape(f, *[jax.ShapeDtypeStruct((1, 64, 2, 128), jnp.bfloat16)] * 3)


@pytest.mark.parametrize("one_device", [False, True])
def test_sinks_that_no_kernel_takes_are_a_warning(one_device, monkeypatch, caplog):
    """One call of cuDNN has a window, but no sinks. Its other calls have no window."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(_cudnn, "_is_recent_gpu", lambda: True)
    monkeypatch.setattr(_cudnn, "_why_not_here", lambda q, k: None)

    def run(length=64, **options):
        if one_device:
            f = functools.partial(_one_device.attend, is_causal=True, local_window_size=(9, 0))
        else:
            f = functools.partial(jflux.attention, causal=True, window=(9, 0))
        given = dict.fromkeys("qkv", jax.ShapeDtypeStruct((1, length, 2, 64), jnp.bfloat16))
        jax.eval_shape(lambda q, k, v: f(q, k, v, **options), **given)

    _config._said.clear()
    with jflux.config(strict=True):
        run(length=65, sinks=np.zeros(2))  # cuDNN has none without sinks either
        with pytest.raises(NotImplementedError, match="one call of cuDNN takes no sinks"):
            run(sinks=np.zeros(2))
    with jflux.config(strict=False), caplog.at_level("WARNING", logger="jflux"):
        run(sinks=np.zeros(2))
    (said,) = (r.message for r in caplog.records)
    assert said.startswith("jflux.attention takes its lax reference: one call of cuDNN takes no")


@pytest.mark.parametrize("form", ["gather", "ring"])
@pytest.mark.parametrize("wrap", ["remat", "scan", "vmap", "saved by name", "no types"])
def test_transforms(calls, wrap, form):
    case = Case(world=2, own=6, batch=1, form=form)
    named = jax.checkpoint_policies.save_only_these_names(_passes.ATTENTION)

    def wrapped(f):
        if wrap == "remat":
            return jax.checkpoint(f)
        if wrap == "saved by name":
            return jax.checkpoint(f, policy=named)
        if wrap == "scan":
            return lambda q, k, v: jax.lax.scan(lambda q, _: (f(q, k, v), None), q, None, length=3)[
                0
            ]
        if wrap == "vmap":
            return lambda *a: jnp.sum(jax.vmap(f)(*(jnp.stack([x, 2 * x]) for x in a)), 0)
        return f

    f = without_lse(case, check_vma=wrap != "no types")
    check_without_lse(case, f, wrapped)


@pytest.mark.parametrize("form", ["gather", "ring"])
def test_keys_that_are_the_same_on_all_ranks_get_the_sum_of_gradients(calls, form):
    case = Case(world=2, own=6, form=form, causal=False, layout="contiguous")
    q, k, v, _ = case.operands()
    f = jax.shard_map(
        functools.partial(jflux.attention, axis_name="tp", layout="contiguous", form=form),
        mesh=make_mesh((2,)), in_specs=(P(None, "tp"), P(), P()), out_specs=P(None, "tp"),
    )  # fmt: skip

    def whole(q, k, v):
        return case.expected(q, *(jnp.tile(a, (1, 2, 1, 1)) for a in (k, v)), None)[0]

    def gradients(f):
        return jax.grad(lambda *a: jnp.vdot(f(*a), weights_of(case)[0]), (0, 1, 2))

    operands = q, k[:, :6], v[:, :6]
    got, want = (jax.jit(gradients(g))(*operands) for g in (f, whole))
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-10)
    assert calls


def test_queries_that_differ_along_another_axis(calls):
    if RANKS < 4:
        pytest.skip("four ranks")
    case = Case(world=2, own=6, batch=2)
    q, k, v, _ = case.operands()
    both, shared = P("data", "tp"), P(None, "tp")
    f = jax.shard_map(
        functools.partial(jflux.attention, axis_name="tp", causal=True),
        mesh=make_mesh((2, 2), ("data", "tp")), in_specs=(both, shared, shared), out_specs=both,
    )  # fmt: skip

    def call(q, k, v):
        return jflux.restore_order(f(*(jflux.reorder_for_causal(a, 2) for a in (q, k, v))), 2)

    def whole(q, k, v):
        return case.expected(q, *(jnp.repeat(a, 2, 0) for a in (k, v)), None)[0]

    def gradients(f):
        return jax.grad(lambda *a: jnp.vdot(f(*a), weights_of(case)[0]), (0, 1, 2))

    got, want = (jax.jit(gradients(g))(q, k[:1], v[:1]) for g in (call, whole))
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-10)
    assert calls


# ---- Heads that are exchanged where JAX differentiates -------------------------------------------


def heads_if_differentiated(call, machine):
    """In place of `_sequence_form.choose`, for calls that leave their form open."""
    return plans.decomposed(""), "ulysses" if call.params.differentiated else "gather"


@pytest.fixture
def exchanges(calls, monkeypatch):
    monkeypatch.setattr(_sequence_form, "choose", heads_if_differentiated)
    return calls


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("world", "groups"), [(2, 2), (2, 1), (4, 4), (4, 2)])
def test_exchanged_heads(exchanges, layout, world, groups):
    if world > RANKS:
        pytest.skip("four ranks")
    case = Case(world=world, own=4, layout=layout, groups=groups, width=3)
    check_without_lse(case)
    one = (case.batch, case.length, case.length, True)
    assert exchanges == [("forward", *one), ("backward", *one)]


def test_forward_alone_gathers(exchanges):
    case = Case(world=2, own=6)
    *arrays, ids = case.operands()
    f = jax.jit(without_lse(case))
    np.testing.assert_allclose(f(*arrays), case.expected(*arrays, ids)[0], rtol=1e-9, atol=1e-10)
    assert [call[2:4] for call in exchanges] == [(3, 3), (3, 6), (3, 3)]
    assert "all_to_all" not in str(jax.make_jaxpr(f)(*arrays))


@pytest.mark.parametrize(
    "wrap", ["remat", "saved by name", "scan", "vmap", "no types", "jit", "global arrays"]
)
def test_transforms_of_exchanged_heads(exchanges, wrap):
    case = Case(world=2, own=4, batch=1, width=3)
    named = jax.checkpoint_policies.save_only_these_names(_passes.ATTENTION)
    wraps = {
        "remat": jax.checkpoint,
        "saved by name": functools.partial(jax.checkpoint, policy=named),
        "scan": lambda f: lambda q, k, v: jax.lax.scan(
            lambda q, _: (f(q, k, v), None), q, None, length=2
        )[0],
        "vmap": lambda f: lambda *a: jnp.sum(
            jax.vmap(f)(*(jnp.stack([x, 2 * x]) for x in a)), 0
        ),
        "jit": jax.jit,
    }  # fmt: skip

    def on_global_arrays(q, k, v):
        arrays = [jflux.reorder_for_causal(a, 2) for a in (q, k, v)]
        o = jflux.attention(*arrays, axis_name="tp", causal=True, mesh=make_mesh((2,)))
        return jflux.restore_order(o, 2)

    f = without_lse(case, check_vma=wrap != "no types")
    if wrap == "global arrays":
        f = on_global_arrays
    check_without_lse(case, f, wraps.get(wrap, lambda f: f))
    assert ("backward", *exchanges[-1][1:]) == exchanges[-1]
    kept = sum(name == "forward" and length == case.length for name, _, length, *_ in exchanges)
    assert kept >= 1


def test_a_policy_saves_the_results_of_exchanged_heads(exchanges):
    """Attention is not computed again: as many products as without `checkpoint`."""
    case = Case(world=2, own=4, batch=1, width=3)
    policy = jax.checkpoint_policies.save_only_these_names(_passes.ATTENTION)
    *arrays, _ = case.operands()

    def products(wrap):
        f = wrap(without_lse(case))
        text = str(jax.make_jaxpr(jax.grad(lambda *a: jnp.sum(jnp.sin(f(*a)))))(*arrays))
        return text.count("dot_general")

    saved = products(functools.partial(jax.checkpoint, policy=policy))
    assert saved == products(lambda f: f) < products(jax.checkpoint)


def test_sinks_of_exchanged_heads(exchanges):
    """Each rank has those of its heads, and the gradient is of all."""
    case = Case(world=2, own=4, width=3)
    for one, other in zip(
        *map(jax.tree.leaves, of_sinks(without_lse(case), case)), strict=True
    ):  # fmt: skip
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-10)
    assert [call[2] for call in exchanges] == [8, 8]


@pytest.mark.parametrize("moving", [(0, 1, 2), (1,)])
def test_forward_mode_of_exchanged_heads(exchanges, moving):
    case = Case(world=2, own=4, width=3)
    *arrays, ids = case.operands()
    rng = np.random.default_rng(1)
    tangents = [rng.standard_normal(arrays[i].shape) for i in moving]

    def moved(f):
        def of(*some):
            return f(*(some[moving.index(i)] if i in moving else a for i, a in enumerate(arrays)))

        return jax.jit(lambda: jax.jvp(of, [arrays[i] for i in moving], tangents))()

    got, want = moved(without_lse(case)), moved(lambda *a: case.expected(*a, ids)[0])
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-10)


def test_second_derivatives_of_exchanged_heads(exchanges):
    case = Case(world=2, own=2, batch=1, heads=2, width=2)
    *arrays, ids = case.operands()

    def curvature(f):
        def slope(q):
            return jax.grad(lambda q: jnp.sum(jnp.sin(f(q, *arrays[1:]))))(q)

        return jax.jit(lambda q: jax.jvp(slope, [q], [jnp.cos(q)])[1])(arrays[0])

    got, want = curvature(without_lse(case)), curvature(lambda *a: case.expected(*a, ids)[0])
    np.testing.assert_allclose(got, want, rtol=1e-8, atol=1e-9)


def test_gpus_exchange_heads_with_gradients_and_say_why(monkeypatch):
    """On devices that have been timed; nothing runs."""
    monkeypatch.setattr(meshes, "platform", lambda: "gpu")
    monkeypatch.setattr(meshes, "device_kind", lambda: "NVIDIA H200")
    monkeypatch.setattr(_cudnn, "_why_not_here", lambda q, k: None)
    ranks = min(4, RANKS)
    spec = P(None, "tp")
    q, k = (jax.ShapeDtypeStruct((1, 32768, heads, 128), jnp.bfloat16) for heads in (32, 8))

    def traced(layout, form="auto", gradients=True):
        f = jax.shard_map(
            functools.partial(
                jflux.attention, axis_name="tp", causal=True, layout=layout, form=form
            ),
            mesh=make_mesh((ranks,)), in_specs=(spec,) * 3, out_specs=spec,
        )  # fmt: skip
        if gradients:
            f = jax.grad(lambda *a, f=f: jnp.sum(f(*a).astype(jnp.float32)))
        with _config.override(recorder=(told := explain._Recorder())):
            jaxpr = str(jax.make_jaxpr(f)(q, k, k))
        (reason,) = {c.plan.reason for c in told.calls if c.op == "attention"}
        return jaxpr, reason

    jaxpr, reason = traced("contiguous")
    assert "all_to_all" in jaxpr and reason.startswith("heads are exchanged (Ulysses): in contig")
    jaxpr, reason = traced("contiguous", "gather")
    assert "all_to_all" not in jaxpr and reason == "gather is asked for"
    jaxpr, reason = traced("zigzag", gradients=False)
    assert "all_to_all" not in jaxpr
    if ranks == 4:
        assert reason == "keys and values are gathered: without gradients that takes less time"
        assert "all_to_all" in traced("zigzag")[0]


# ---- Chunks --------------------------------------------------------------------------------------


def chunks_in_order(layout, ranks, chunks):
    """The chunks of the sequence, [ranks, chunks], that each rank has."""
    return causal_positions(ranks * chunks, ranks, layout=layout).reshape(ranks, chunks)


def seen(chunk_calls, rank, own, keys, *place):
    """How often each pair (chunk of queries, chunk of keys) of the sequence is attended to."""
    counts = {}
    for call in chunk_calls.unmasked:
        chunk, start, used = (int(a[place]) for a in (call.chunk, call.start, call.used))
        assert 0 <= start and start + call.width <= len(keys)
        for key in keys[start : start + call.width] if used else ():
            pair = own[rank][chunk], key
            counts[pair] = counts.get(pair, 0) + 1
    return counts


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("ranks", range(2, 18))
def test_calls_have_all_earlier_chunks_once(layout, ranks):
    gathered, around = (
        f(layout, ranks, True) for f in (_chunk_calls.over_all_keys, _chunk_calls.over_peer_keys)
    )
    own = chunks_in_order(layout, ranks, gathered.chunks)
    for rank in range(ranks):
        want = {(i, j): 1 for i in own[rank] for j in range(i)}
        assert seen(gathered, rank, own, range(own.size), rank) == want
        # Around a ring the causal call over the own keys is all of them.
        got = {(i, j): 1 for i in own[rank] for j in own[rank] if j < i}
        for holder in set(range(ranks)) - {rank}:
            got |= seen(around, rank, own, own[holder], rank, holder)
        assert got == want


def test_zigzag_ranks_compute_the_same_and_nothing_else(calls):
    for ranks, sizes in {2: [2, 1], 4: [4, 2, 1], 5: [5, 2, 1, 1], 8: [8, 4, 2, 1]}.items():
        of_rank = _chunk_calls.over_all_keys("zigzag", ranks, True)
        assert [call.width for call in of_rank.unmasked] == sizes
        assert all(call.used.all() for call in of_rank.unmasked)
        assert sum(sizes) == 2 * ranks - 1  # (early + late): r + (2 N - 1 - r)
    case = Case(world=2, own=6)
    jax.make_jaxpr(without_lse(case))(*case.operands()[:3])
    assert calls == [
        ("forward", 4, 3, 3, True), ("forward", 2, 3, 6, False), ("forward", 2, 3, 3, False)
    ]  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_orders_of_the_sequence(layout):
    ranks, length = 3, 12
    at = causal_positions(length, ranks, layout=layout)[None]
    in_order = np.arange(length)[None]
    np.testing.assert_array_equal(in_sequence(at, ranks, layout), in_order)
    np.testing.assert_array_equal(in_ranks(in_order, ranks, layout), at)


# ---- What cuDNN takes ----------------------------------------------------------------------------


def test_the_installed_jax_has_the_known_internals():
    assert _cudnn.why_not_jax() is None


def test_other_internals_are_not_called(monkeypatch):
    _cudnn.why_not_jax.cache_clear()
    internals = _cudnn._internals()
    monkeypatch.setattr(internals, "_dot_product_attention_bwd_impl", lambda query, key: None)
    assert "with other operands" in _cudnn.why_not_jax()
    _cudnn.why_not_jax.cache_clear()
    monkeypatch.delattr(internals, "_dot_product_attention_bwd_impl")
    assert "has other internals" in _cudnn.why_not_jax()
    _cudnn.why_not_jax.cache_clear()


@pytest.mark.parametrize(
    ("dtype", "width", "length", "why"),
    [
        (jnp.bfloat16, 128, 64, None),
        (jnp.float16, 8, 4096, None),
        (jnp.float32, 64, 64, "takes bfloat16 and float16, got float32"),
        (jnp.bfloat16, 60, 64, "a multiple of 8 elements, up to 128, got 60"),
        (jnp.bfloat16, 136, 64, "a multiple of 8 elements, up to 128, got 136"),
        (jnp.bfloat16, 64, 96, "multiples of 64, got 96"),
    ],
)
def test_operands_that_cudnn_takes(dtype, width, length, why):
    got = _cudnn.why_not_operands(jax.ShapeDtypeStruct((1, length, 2, width), dtype), length)
    assert got == why if why is None else why in got


def test_not_on_cpus_and_not_unchecked(monkeypatch):
    q = jnp.zeros((1, 128, 2, 64), jnp.bfloat16)
    why = _cudnn_by_chunks.why_not(q, q, Scores(1.0, causal=True), "zigzag", 2, None)
    assert why == "cuDNN runs on GPUs"
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(_cudnn, "CHECKED_ON_GPUS", False)
    with jflux.config(unchecked_kernels=False):
        why = _cudnn_by_chunks.why_not(q, q, Scores(1.0, causal=True), "zigzag", 2, None)
    assert "has not passed all checks on GPUs" in why
    with jflux.config(fused=False):
        why = _cudnn_by_chunks.why_not(q, q, Scores(1.0, causal=True), "zigzag", 2, None)
    assert why == "jflux.config.fused is off"


@pytest.mark.parametrize(
    ("dtype", "length", "options", "takes"),
    [
        (jnp.bfloat16, 128, {"is_causal": True}, True),
        (jnp.float16, 64, {"is_causal": True, "local_window_size": (32, 0)}, True),
        (jnp.bfloat16, 64, {"local_window_size": (32, 0)}, False),
        (jnp.bfloat16, 64, {"mask": np.ones((1, 1, 64, 64), bool)}, False),
        (jnp.bfloat16, 65, {}, False),
        (jnp.float32, 64, {}, False),
    ],
)
@pytest.mark.parametrize("lead", [(), (2,)])
def test_attention_of_one_device_is_cudnns_where_it_takes_the_call(
    monkeypatch, dtype, length, options, takes, lead
):
    """JAX's default keeps all scores."""
    taken = []
    plainly = jax.nn.dot_product_attention

    def attend(*operands, implementation, **options):
        taken.append(implementation)
        return plainly(*operands, **options)

    monkeypatch.setattr(_one_device, "_of_jax", attend)
    q = jnp.zeros((*lead, length, 2, 64), dtype)
    _one_device.attend(q, q, q, **options)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(_cudnn, "_is_recent_gpu", lambda: True)
    with _config.override(recorder=(told := explain._Recorder())):
        _one_device.attend(q, q, q, **options)
        monkeypatch.setattr(_cudnn, "_is_recent_gpu", lambda: False)
        _one_device.attend(q, q, q, **options)
    scores = "JAX's attention, which keeps all scores: "
    reasons = [call.plan.reason for call in told.calls]
    assert reasons[0].startswith("one call of cuDNN" if takes else scores)
    assert reasons[-1].startswith(scores)
    assert taken == [None, "cudnn" if takes else None, None]


@pytest.mark.skipif(PLATFORM != "cpu", reason="devices that are not the default ones")
def test_cpus_beside_gpus_take_no_kernel_of_gpus(monkeypatch):
    """A mesh of CPUs on a host whose default devices are GPUs."""
    operands = [jnp.zeros((1, 128 * RANKS, 2, 64), jnp.bfloat16)] * 3
    weights = [jnp.zeros(s, jnp.bfloat16) for s in ((32, 8, 8), (32, 8, 8), (32, 8, 8), (8, 8, 32))]
    mesh, sequence = make_mesh((RANKS,)), P(None, "tp")
    heads, out = P(None, "tp"), P("tp")
    split = jax.shard_map(
        functools.partial(jflux.attention, axis_name="tp", causal=True, layout="contiguous"),
        mesh=mesh, in_specs=(sequence,) * 3, out_specs=sequence,
    )  # fmt: skip
    layer = jax.shard_map(
        lambda x, *w: jflux.nn.attention(x, *w, axis_name="tp"), mesh=mesh,
        in_specs=(sequence, heads, heads, heads, out), out_specs=sequence,
    )  # fmt: skip
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(_cudnn, "_is_recent_gpu", lambda: True)
    monkeypatch.setattr(_cudnn, "_why_not_here", lambda q, k: None)
    jax.block_until_ready(jax.jit(split)(*operands))
    x = jnp.zeros((1, 64 * RANKS, 32), jnp.bfloat16)
    jax.block_until_ready(jax.jit(layer)(x, *weights))


@pytest.mark.parametrize("in_axes", [None, (0, 0, 0), (1, None, 0), (None, 2, 2)])
@pytest.mark.parametrize("causal", [False, True])
def test_operands_of_jaxs_primitives(monkeypatch, causal, in_axes):
    """Their order, names and shapes; they compute the definition here."""
    internals = _cudnn._internals()

    def primitive(f, name):
        allowed = set(inspect.signature(getattr(internals, name)).parameters)

        class Bind:
            @staticmethod
            def bind(q, k, v, *others, scale, mask_type, layout, **options):
                assert set(options) <= allowed and layout == internals.AttentionLayout.BTNH.value
                unused, results = others[:7], others[7:]
                assert all(a.size == 0 for a in unused)
                if results:
                    activation, o, do = results
                    results = o, activation.swapaxes(1, 2), do
                causal = mask_type == internals.MaskType.CAUSAL
                one, *more = f(q, k, v, *results, scale=scale, causal=causal)
                return [one, *more] if results else [one, more[0].swapaxes(1, 2)]

        return Bind

    for name, f in {"fwd": forward, "bwd": backward}.items():
        name = f"_dot_product_attention_{name}"
        monkeypatch.setattr(internals, f"{name}_p_wrapper", primitive(f, f"{name}_impl"))
    rng = np.random.default_rng(0)
    sizes = {"q": 4, "k": 2, "v": 2}
    q, k, v = (jnp.asarray(rng.standard_normal((2, 6, heads, 5))) for heads in sizes.values())

    def both(forward, backward):
        def of(q, k, v):
            o, lse = forward(q, k, v, scale=0.7, causal=causal)
            return o, lse, backward(q, k, v, o, lse, jnp.sin(o), scale=0.7, causal=causal)

        return of

    got, want = both(_cudnn.forward, _cudnn.backward), both(forward, backward)
    arrays = (q, k, v)
    if in_axes is not None:
        got, want = (jax.vmap(f, in_axes) for f in (got, want))
        arrays = [
            a if axis is None else jnp.stack([a, 2 * a], axis)
            for a, axis in zip(arrays, in_axes, strict=True)
        ]
    got, want = jax.jit(got)(*arrays), want(*arrays)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("form", ["gather", "ring", "auto"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_lowers_to_cudnns_calls(monkeypatch, dtype, form):
    """For CUDA, without a GPU: the operands of JAX's primitives are as they want them."""
    monkeypatch.setattr(_cudnn, "why_not", lambda q, k, length: None)
    if form == "auto":
        monkeypatch.setattr(_sequence_form, "choose", heads_if_differentiated)
    case = Case(world=2, own=128, heads=4, groups=2, width=64, form=form)
    f = without_lse(case)

    @jax.checkpoint
    def layer(q, k, v):
        return f(q, k, v)

    def loss(q, k, v):
        several = jax.vmap(layer, (0, None, None))(jnp.stack([q, 2 * q]), k, v)
        last, _ = jax.lax.scan(lambda q, _: (layer(q, k, v), None), q, None, length=2)
        return jnp.sum(several.astype(jnp.float32)) + jnp.sum(last.astype(jnp.float32))

    operands = [jax.ShapeDtypeStruct(a.shape, dtype) for a in case.operands()[:3]]
    traced = jax.jit(jax.grad(loss, (0, 1, 2))).trace(*operands)
    with jflux.config(strict=False):  # the mesh's devices are CPUs, so gathers are lax's
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "@__cudnn$fmhaSoftmax(" in text and "@__cudnn$fmhaSoftmaxBackward(" in text
    assert ("all_to_all" in text) == (form == "auto")
