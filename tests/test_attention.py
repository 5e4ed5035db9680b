"""jflux.attention against the definition over the whole sequence on one device, in float64."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import RANKS, examples, make_mesh
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import jflux
from jflux import _config, testing
from jflux._call.forms import Call
from jflux._call.plans import Machine
from jflux._ops.attention import (
    _blockwise,
    _passes,
    _sequence_form,
    _sinks,
    all_gather_attention,
    flash_attention,
)

pytestmark = pytest.mark.skipif(jax.default_backend() == "gpu", reason="float64")

LAYOUTS = ("zigzag", "striped", "contiguous")
FORMS = ("gather", "ring", "ulysses")
SEQUENCE = P(None, "tp")


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """So that a part of a short sequence has several, and one that is not full."""
    monkeypatch.setattr(_blockwise, "_MOST", 8)


@dataclasses.dataclass
class Case:
    world: int
    own: int  # positions of a rank
    layout: str = "zigzag"
    batch: int = 2
    heads: int = 4
    groups: int = 2
    width: int = 5
    causal: bool = True
    window: tuple[int | None, int | None] | None = None
    segments: bool = False
    softcap: float | None = None
    alibi: bool = False
    table: tuple[bool, bool] | None = None  # a bias: of each sequence, of each head
    form: str = "auto"
    seed: int = 0
    size: float = 1.0  # of queries and keys

    @property
    def length(self):
        return self.world * self.own

    def operands(self):
        """q, k, v, segment ids (or None), in the order of the sequence."""
        rng = np.random.default_rng(self.seed)
        heads = (self.heads, self.groups, self.groups)
        arrays = [rng.standard_normal((self.batch, self.length, h, self.width)) for h in heads]
        ids = np.sort(rng.integers(3, size=(self.batch, self.length)), 1)
        q, k, v = arrays
        return self.size * q, self.size * k, v, ids if self.segments else None

    def mask(self, ids):
        i, j = np.arange(self.length)[:, None], np.arange(self.length)[None]
        mask = np.ones((1, 1, self.length, self.length), bool)
        if self.causal:
            mask = mask & (j <= i)
        if self.window is not None:
            left, right = (self.length if w is None else w for w in self.window)
            mask = mask & (j >= i - left) & (j <= i + right)
        return mask if ids is None else mask & (ids[:, None, :, None] == ids[:, None, None, :])

    def expected(self, q, k, v, ids):
        return plain(q, k, v, self.mask(ids), self.softcap, self.of_slopes())

    def sinks(self):
        return np.random.default_rng(self.seed + 50).standard_normal(self.heads)

    def slopes(self):
        rng = np.random.default_rng(self.seed + 60)
        return rng.standard_normal(self.heads) if self.alibi else None

    def of_slopes(self):
        if not self.alibi:
            return 0
        i, j = np.arange(self.length)[:, None], np.arange(self.length)
        return self.slopes()[:, None, None] * (j - i)

    def bias(self):
        if self.table is None:
            return None
        own = (
            n if each else 1 for n, each in zip((self.batch, self.heads), self.table, strict=True)
        )
        rng = np.random.default_rng(self.seed + 70)
        return rng.standard_normal((*own, self.length, self.length))

    def split(
        self, q, k, v, ids, sinks=None, bias=None, *, mesh=None, check_vma=True, module=jflux,
        **options,
    ):  # fmt: skip
        """(o, l) of the sequence, from ranks that each have a part of it."""
        world, layout = self.world, self.layout
        given = dict(causal=self.causal, window=self.window, softcap=self.softcap, form=self.form)
        given |= {"layout": layout, "return_lse": True, "axis_name": "tp"}
        given |= {"alibi_slopes": self.slopes()}
        arrays = [a for a in (q, k, v, ids) if a is not None]
        arrays = [jflux.reorder_for_causal(a, world, layout=layout) for a in arrays]

        def call(sinks, bias, q, k, v, ids=None):
            more = {"segment_ids": ids, "sinks": sinks, "bias": bias}
            return module.attention(q, k, v, **(given | more | options))

        f = jax.shard_map(
            call, mesh=mesh or make_mesh((world,)), in_specs=(P(), P(), *[SEQUENCE] * len(arrays)),
            out_specs=(SEQUENCE, SEQUENCE), check_vma=check_vma,
        )  # fmt: skip
        return tuple(jflux.restore_order(a, world, layout=layout) for a in f(sinks, bias, *arrays))


def plain(q, k, v, mask, softcap=None, bias=0):
    """(attention, log-sum-exp [B, S, H]) by the definition."""
    group = q.shape[2] // k.shape[2]
    k, v = jnp.repeat(k, group, 2), jnp.repeat(v, group, 2)
    scores = jnp.einsum("bshd,bthd->bhst", q, k) / q.shape[3] ** 0.5
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    scores += bias
    top = jax.lax.stop_gradient(jnp.max(scores, -1, keepdims=True, where=mask, initial=-1e30))
    p = jnp.where(mask, jnp.exp(jnp.where(mask, scores, top) - top), 0)
    total = jnp.sum(p, -1, keepdims=True)
    safe = jnp.where(total > 0, total, 1)
    lse = jnp.where(total > 0, jnp.log(safe) + top, -jnp.inf)[..., 0]
    return jnp.einsum("bhst,bthd->bshd", p / safe, v), lse.swapaxes(1, 2)


def plain_with_sinks(q, k, v, sinks, mask, softcap=None, bias=0):
    """:func:`plain` where the softmax has one more column, which is dropped."""
    group = q.shape[2] // k.shape[2]
    k, v = jnp.repeat(k, group, 2), jnp.repeat(v, group, 2)
    scores = jnp.einsum("bshd,bthd->bhst", q, k) / q.shape[3] ** 0.5
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    scores = jnp.where(mask, scores + bias, -jnp.inf)
    column = jnp.broadcast_to(sinks[:, None, None], (*scores.shape[:-1], 1))
    scores = jnp.concatenate([scores, column], -1)
    o = jnp.einsum("bhst,bthd->bshd", jax.nn.softmax(scores)[..., :-1], v)
    return o, jax.nn.logsumexp(scores, -1).swapaxes(1, 2)


def weighted(f, weights, ids):
    """A scalar of both results, with the results."""

    def loss(q, k, v):
        o, lse = f(q, k, v, ids)
        seen = jnp.where(lse > -jnp.inf, lse, 0)
        return jnp.vdot(o, weights[0]) + jnp.vdot(seen, weights[1]), (o, lse)

    return jax.value_and_grad(loss, (0, 1, 2), has_aux=True)


def weights_of(case):
    rng = np.random.default_rng(case.seed + 100)
    shape = (case.batch, case.length, case.heads)
    return rng.standard_normal((*shape, case.width)), rng.standard_normal(shape)


def check(case, f=None):
    """Both results and the gradients of both."""
    *arrays, ids = case.operands()
    weights = weights_of(case)
    got = jax.jit(weighted(f or case.split, weights, ids))(*arrays)
    want = jax.jit(weighted(case.expected, weights, ids))(*arrays)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-10)


@st.composite
def cases(draw):
    layout = draw(st.sampled_from(LAYOUTS))
    own = draw(st.integers(1, 13)) * (2 if layout == "zigzag" else 1)
    world, form = draw(st.integers(1, min(8, RANKS))), draw(st.sampled_from(FORMS))
    groups = draw(st.sampled_from([world, 2 * world]) if form == "ulysses" else st.integers(1, 3))
    softcap = draw(st.none() | st.just(1.5))
    return Case(
        world=world, own=own, layout=layout, form=form,
        size=draw(st.sampled_from([1.0, 40.0])), batch=draw(st.integers(1, 2)),
        heads=groups * draw(st.integers(1, 2)),
        groups=groups, width=draw(st.integers(1, 9)), causal=draw(st.booleans()),
        window=draw(st.none() | st.tuples(*[st.none() | st.integers(0, 9)] * 2)),
        segments=draw(st.booleans()), softcap=softcap,
        table=draw(st.none() | st.tuples(st.booleans(), st.booleans())),
        alibi=softcap is None and draw(st.booleans()),
        seed=draw(st.integers(0, 99)),
    )  # fmt: skip


@examples(6)
@given(case=cases())
def test_attention_is_that_of_the_whole_sequence(case):
    check(case)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_eight_ranks(layout, form):
    check(Case(world=min(8, RANKS), own=4, layout=layout, form=form, heads=8))


def test_one_device_needs_no_mesh():
    case = Case(world=1, own=19, window=(6, 0), softcap=2.0)

    def call(q, k, v, ids):
        return jflux.attention(q, k, v, causal=True, window=(6, 0), softcap=2.0, return_lse=True)

    check(case, call)


def test_a_query_without_keys_is_zero_and_has_no_gradient():
    q, k, v, _ = Case(world=2, own=8).operands()
    # Queries from 4 on are of segments that no key is of, and the others have one key each.
    at = jnp.arange(16)
    own = np.tile(np.arange(16), (2, 1))
    queries, keys = _blockwise.Positions(at, own), _blockwise.Positions(at, own + 100 * (own >= 4))
    o, lse = _blockwise.forward(q, queries, k, v, keys, _blockwise.Scores(1.0))
    np.testing.assert_allclose(o[:, :4], np.repeat(v, 2, 2)[:, :4])
    assert not o[:, 4:].any() and np.isneginf(lse[:, 4:]).all()
    do = np.ones_like(o)
    delta = _blockwise.delta_of(o, lse, do, np.where(np.isneginf(lse), np.nan, 1))
    dq, dk, dv = _blockwise.backward(q, queries, k, v, keys, _blockwise.Scores(1.0), lse, do, delta)
    assert not any(d[:, 4:].any() for d in (dq, dk, dv))
    np.testing.assert_allclose(dv[:, :4], 2)
    np.testing.assert_allclose(dq[:, :4], np.repeat(k, 2, 2)[:, :4], rtol=1e-12)


@pytest.mark.parametrize("form", ["gather", "ring"])
def test_large_scores_do_not_overflow(form):
    """Nor do gradients."""
    check(Case(world=2, own=12, form=form, size=300.0))


@pytest.mark.parametrize("form", ["gather", "ring"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_nan_reaches_all_that_attend_to_it_and_nothing_else(form, dtype):
    """In o, l and the gradients of o: no rank takes it for a part without keys."""
    case = Case(world=2, own=12, layout="contiguous", causal=False, form=form)
    heads, group = np.s_[0, :, :2], np.s_[0, :, :1]  # which attend to it, and their keys'
    row = np.s_[0, 17, :1]
    # Of q, k and v: where o, l, dq, dk and dv are NaN.
    where = [
        (row, row, row, group, group),
        (heads, heads, heads, group, group),
        (np.s_[0, :, :2, 1], None, heads, group, None),
    ]
    for operand, places in enumerate(where):
        *arrays, _ = case.operands()
        arrays[operand][0, 17, 0, 1] = np.nan
        arrays = [a.astype(dtype) for a in arrays]

        def loss(*arrays):
            o, lse = case.split(*arrays, None)
            return jnp.sum(o), (o, lse)

        gradients, results = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(*arrays)
        for got, place in zip((*results, *gradients), places, strict=True):
            want = np.zeros(got.shape, bool)
            if place is not None:
                want[place] = True
            np.testing.assert_array_equal(np.isnan(got), want)


def test_one_program_for_other_lengths_of_segments():
    case = Case(world=2, own=10, segments=True)
    f = jax.jit(case.split)
    *arrays, ids = case.operands()
    for seed in range(3):
        ids = np.sort(np.random.default_rng(seed).integers(4, size=ids.shape), 1)
        for one, other in zip(f(*arrays, ids), case.expected(*arrays, ids), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-10)
    assert f._cache_size() == 1


def test_ranks_that_come_late():
    case = Case(world=min(3, RANKS), own=6, segments=True)  # gathered: a ring is XLA's
    for _ in range(2):
        testing.poison_workspaces()
        with testing.planted_faults(max_delay_us=3000):
            check(case)


@pytest.mark.parametrize("form", FORMS)
def test_without_types_of_variation(form):
    case = Case(world=2, own=6, form=form, segments=True)
    check(case, functools.partial(case.split, check_vma=False))


@pytest.mark.parametrize("form", FORMS)
def test_keys_that_are_the_same_on_all_ranks_get_the_sum_of_gradients(form):
    case = Case(world=2, own=6, form=form, layout="contiguous", causal=False)
    q, k, v, _ = case.operands()
    k, v = k[:, :6], v[:, :6]
    mesh = make_mesh((2,))

    def split(q, k, v):
        f = functools.partial(
            jflux.attention, axis_name="tp", causal=False, layout="contiguous", form=form
        )
        return jax.shard_map(f, mesh=mesh, in_specs=(SEQUENCE, P(), P()), out_specs=SEQUENCE)(
            q, k, v
        )

    def whole(q, k, v):
        return case.expected(q, jnp.tile(k, (1, 2, 1, 1)), jnp.tile(v, (1, 2, 1, 1)), None)[0]

    weight = weights_of(case)[0]
    for got, want in zip(
        jax.jit(jax.grad(lambda *a: jnp.vdot(split(*a), weight), (0, 1, 2)))(q, k, v),
        jax.jit(jax.grad(lambda *a: jnp.vdot(whole(*a), weight), (0, 1, 2)))(q, k, v),
        strict=True,
    ):
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("wrap", ["remat", "scan", "vmap", "saved by name"])
def test_transforms(wrap):
    case = Case(world=2, own=6, batch=1, window=(7, 0))
    weights = weights_of(case)
    *arrays, _ = case.operands()

    def loss(f):
        def of(q, k, v):
            if wrap == "remat":
                o = jax.checkpoint(lambda *a: f(*a, None)[0])(q, k, v)
            elif wrap == "saved by name":
                policy = jax.checkpoint_policies.save_only_these_names(_passes.ATTENTION)
                o = jax.checkpoint(lambda *a: f(*a, None)[0], policy=policy)(q, k, v)
            elif wrap == "scan":
                o, _ = jax.lax.scan(lambda q, _: (f(q, k, v, None)[0], None), q, None, length=3)
            else:
                several = [jnp.stack([a, 2 * a]) for a in (q, k, v)]
                o = jnp.sum(jax.vmap(lambda *a: f(*a, None)[0])(*several), 0)
            return jnp.vdot(o, weights[0])

        return jax.value_and_grad(of, (0, 1, 2))

    got, want = (jax.jit(loss(f))(*arrays) for f in (case.split, case.expected))
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-10)


def test_a_saved_result_is_not_computed_again():
    case = Case(world=2, own=6)
    q, k, v, _ = case.operands()

    def passes(policy):
        f = jax.checkpoint(lambda *a: jnp.sum(case.split(*a, None)[0] ** 2), policy=policy)
        text = str(jax.make_jaxpr(jax.grad(f, (0, 1, 2)))(q, k, v))
        return [
            text.count(f"jflux_{op}[") for op in (all_gather_attention.OP, flash_attention.BACKWARD)
        ]

    named = jax.checkpoint_policies.save_only_these_names(_passes.ATTENTION)
    assert passes(None) == [2, 1] and passes(named) == [1, 1]


FORWARD = {
    "gathered": {}, "ring": {"form": "ring", "alibi": True}, "one rank": {"world": 1},
    "window, documents": {"window": (3, 0), "segments": True},
    "softcap": {"softcap": 1.5, "causal": False},
}  # fmt: skip


@pytest.mark.parametrize("options", FORWARD.values(), ids=FORWARD)
def test_forward_mode(options, caplog):
    """Tangents of both results, for some operands or all, by `jvp` and by `linearize`; and the
    gradient of the tangents, the tangents of the gradient, and those of a batch."""
    case = Case(**{"world": min(3, RANKS), "own": 4, "width": 3} | options)
    q, k, v, ids = case.operands()
    moved = Case(**dataclasses.asdict(case) | {"seed": 7}).operands()[:3]

    def of(f):
        def both(q, k, v):
            o, lse = f(q, k, v, ids)
            return o, jnp.where(lse > -jnp.inf, lse, 0)

        def loss(q, k, v):
            o, lse = both(q, k, v)
            return jnp.sum(jnp.sin(o)) + jnp.sum(lse**2)

        def slope(q, k, v):
            return jax.jvp(loss, (q, k, v), moved)[1]

        def run(q, k, v):
            found = [
                jax.jvp(both, (q, k, v), moved)[1],
                jax.jvp(lambda v: both(q, k, v), (v,), moved[2:])[1],
            ]
            if ids is not None or case.softcap is not None:
                return found
            _, linear = jax.linearize(both, q, k, v)
            return [
                *found,
                jax.vmap(linear)(*(jnp.stack([a, 2 * a]) for a in moved)),
                jax.grad(slope, (0, 1, 2))(q, k, v),
                jax.jvp(jax.grad(loss, (0, 1, 2)), (q, k, v), moved)[1],
            ]

        return run

    with caplog.at_level("INFO", logger="jflux"):
        _config._said.clear()
        got = jax.jit(of(case.split))(q, k, v)
    want = jax.jit(of(case.expected))(q, k, v)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-9)
    assert sum("in forward mode" in r.message for r in caplog.records) == 1


REFERENCE = {
    "zigzag": {"window": (7, 0), "segments": True, "alibi": True},
    "striped": {"layout": "striped", "form": "ring", "softcap": 1.5},
    "contiguous": {"layout": "contiguous", "causal": False, "segments": True, "size": 40.0},
    "one rank": {"world": 1, "own": 18, "window": (6, 0)},
}


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("options", REFERENCE.values(), ids=REFERENCE)
def test_the_reference(options, check_vma):
    case = Case(**{"world": min(3, RANKS), "own": 6} | options)
    f = functools.partial(case.split, module=jflux.reference, check_vma=check_vma)
    check(case, f)
    assert "jflux_" not in str(jax.make_jaxpr(f)(*case.operands()))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_reference_sums_in_float32(dtype):
    case = Case(world=2, own=8, width=16)
    *arrays, _ = (None if a is None else jnp.asarray(a, dtype) for a in case.operands())
    o, lse = jax.jit(functools.partial(case.split, module=jflux.reference))(*arrays, None)
    want, want_lse = case.expected(*(a.astype(jnp.float64) for a in arrays), None)
    close = {jnp.float32: 2e-6, jnp.bfloat16: 2.0**-7}[dtype]
    assert o.dtype == dtype and lse.dtype == jnp.float32
    np.testing.assert_allclose(np.asarray(o, np.float64), want, rtol=close, atol=close)
    np.testing.assert_allclose(lse, want_lse, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("form", FORMS)
def test_ranks_of_vmap(form):
    """All on one device, as with `lax`'s collectives."""
    case = Case(world=3, own=4, layout="contiguous", form=form, heads=6, groups=3)
    *arrays, _ = case.operands()
    parts = [np.stack(np.split(a, 3, 1)) for a in arrays]
    f = jax.vmap(
        functools.partial(
            jflux.attention, axis_name="i", layout="contiguous", causal=True, form=form,
        ),
        axis_name="i",
    )  # fmt: skip
    with jflux.config(strict=False):  # no kernel takes such an axis
        got = np.concatenate(f(*parts), 1)
    np.testing.assert_allclose(got, case.expected(*arrays, None)[0], rtol=1e-9, atol=1e-10)


def test_an_axis_is_named_once():
    q = jnp.zeros((1, 8, 4, 4))
    x, indices, weights = jnp.zeros((4, 8)), jnp.zeros((4, 1), int), jnp.ones((4, 1))

    def attend():
        return jflux.attention(q, q, q, axis_name="tp", heads_axis="tp")

    def dispatch():
        return jflux.moe_dispatch(
            x, indices, weights, num_experts=4, axis_name="tp", node_axis=("dp", "tp")
        ).rows

    mesh = make_mesh((1, 2), ("dp", "tp"))
    for f in (attend, dispatch):
        f = jax.shard_map(f, mesh=mesh, in_specs=(), out_specs=P(("dp", "tp")), check_vma=False)
        with pytest.raises(ValueError, match="a mesh axis may be named once, got .*'tp'.*'tp'"):
            jax.eval_shape(f)
    with pytest.raises(ValueError, match="a mesh axis may be named once"):
        jflux.attention(q, q, q, axis_name="tp", heads_axis="tp", mesh=mesh)


ALONG_HEADS = [(groups, form, jflux) for groups in (1, 2, 4) for form in FORMS]


@pytest.mark.parametrize(
    ("groups", "form", "module"),
    [*ALONG_HEADS, *((2, form, jflux.reference) for form in ("gather", "ulysses"))],
    ids=lambda value: getattr(value, "__name__", str(value)),
)  # fmt: skip
def test_heads_along_another_axis(groups, form, module):
    if RANKS < 4:
        pytest.skip("four ranks")
    case = Case(world=2, own=8, heads=4, groups=groups, segments=True, form=form)
    mesh = make_mesh((2, 2), ("tp", "heads"))
    both = P(None, ("tp", "heads"))

    def split(q, k, v, ids):
        arrays = [jflux.reorder_for_causal(a, 2) for a in (q, k, v, ids)]

        def call(q, k, v, ids):
            return module.attention(
                q, k, v, axis_name="tp", heads_axis="heads", causal=True, segment_ids=ids,
                return_lse=True, form=form,
            )  # fmt: skip

        f = jax.shard_map(call, mesh=mesh, in_specs=(both,) * 4, out_specs=(both, both))
        return tuple(jflux.restore_order(a, 2) for a in f(*arrays))

    check(case, split)


@pytest.mark.parametrize("form", ["ring", "ulysses"])
def test_ranks_along_two_axes(form):
    if RANKS < 4:
        pytest.skip("four ranks")
    case = Case(world=4, own=4, form=form)
    mesh = make_mesh((2, 2), ("a", "b"))
    both = P(None, ("b", "a"))

    def split(q, k, v, ids):
        f = jax.shard_map(
            functools.partial(
                jflux.attention, axis_name=("b", "a"), causal=True, return_lse=True, form=form
            ),
            mesh=mesh, in_specs=(both,) * 3, out_specs=(both, both),
        )  # fmt: skip
        arrays = [jflux.reorder_for_causal(a, 4) for a in (q, k, v)]
        return tuple(jflux.restore_order(a, 4) for a in f(*arrays))

    check(case, split)


@pytest.mark.parametrize("module", [jflux, jflux.reference], ids=["jflux", "reference"])
def test_global_arrays(module):
    case = Case(world=2, own=6, batch=2, segments=True)
    names = ("data", "tp") if RANKS >= 4 else ("tp",)
    mesh = make_mesh((2, 2) if RANKS >= 4 else (2,), names)

    def split(q, k, v, ids):
        arrays = [jflux.reorder_for_causal(a, 2) for a in (q, k, v, ids)]
        spec = P("data") if "data" in names else None
        both = module.attention(
            *arrays[:3], axis_name="tp", causal=True, segment_ids=arrays[3], return_lse=True,
            mesh=mesh, q_spec=spec,
        )  # fmt: skip
        return tuple(jflux.restore_order(a, 2) for a in both)

    check(case, split)


@pytest.mark.parametrize("shape", [(0, 4), (2, 0)])
def test_nothing_to_attend_to(shape):
    mesh = make_mesh((2,))
    q, k = jnp.zeros((*shape, 4, 3)), jnp.zeros((*shape, 2, 3))
    f = jax.shard_map(
        functools.partial(jflux.attention, axis_name="tp", causal=True, layout="striped"),
        mesh=mesh, in_specs=(SEQUENCE,) * 3, out_specs=SEQUENCE,
    )  # fmt: skip
    out = f(q, k, k) if shape[1] else jax.eval_shape(f, q, k, k)
    assert out.shape == q.shape


def test_many_keys_go_around_a_ring(monkeypatch):
    case = Case(world=2, own=6)
    *arrays, ids = case.operands()
    assert "ppermute" not in str(jax.make_jaxpr(case.split)(*arrays, ids))
    monkeypatch.setattr(_sequence_form, "MOST_GATHERED", 2 * 2 * 12 * 2 * 5 * 8 - 1)
    assert "ppermute" in str(jax.make_jaxpr(case.split)(*arrays, ids))


def chosen(
    differentiated, batch=1, length=32768, heads=32, groups=8, width=128, ranks=4, causal=True,
    kind="NVIDIA H200", form="auto", layout="zigzag", **others,
):  # fmt: skip
    """(reason, form) of a call of bfloat16."""
    of = _blockwise.Scores(1.0, causal=causal)
    params = _sequence_form.SplitCall(
        form, ranks, layout, of, differentiated=differentiated, **others
    )
    shapes = ((batch, length // ranks, n, width) for n in (heads, groups))
    call = Call([jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes], params)
    plan, found = _sequence_form.choose(call, Machine("cuda", device_kind=kind))
    return plan.reason, found


OWN = {"layout": "contiguous"}


# (call, form alone, form where JAX differentiates, what the reason says then)
WHICH_FORM = [
    # Timed with gradients: docs/experiments/0058. 32 heads over 8, and 64 over 8.
    ({}, "gather", "ulysses", r"are exchanged \(Ulysses\): with gradients that"),
    ({"length": 131072}, "gather", "ulysses", "on 4 ranks"),
    ({"ranks": 2}, "gather", "gather", "put in order, .* from 4 ranks and 8192 positions"),
    ({"length": 8192}, "gather", "ulysses", "on 4 ranks"),
    ({"length": 4096}, "gather", "gather", "keys and values are gathered: exchanged heads"),
    ({"batch": 4, "length": 8192, "heads": 64}, "gather", "ulysses", "on 4 ranks"),
    ({"layout": "striped"}, "gather", "ulysses", "less time"),
    (OWN, "ulysses", "ulysses", "in contiguous order the last of the ranks that gather"),
    ({**OWN, "ranks": 2}, "ulysses", "ulysses", ""),
    ({**OWN, "length": 8192}, "ulysses", "ulysses", ""),
    ({**OWN, "length": 4096}, "gather", "gather", "from 262144 queries of all heads on"),
    ({**OWN, "batch": 4, "length": 8192, "heads": 64, "ranks": 2}, "ulysses", "ulysses", ""),
    ({**OWN, "kind": "NVIDIA H100 80GB HBM3"}, "ulysses", "ulysses", ""),
    # What has not been timed.
    ({"groups": 4, "heads": 64}, "gather", "gather", "moves 2.12 times as much, .* up to 1.12"),
    ({**OWN, "groups": 2, "ranks": 2}, "gather", "gather", "moves 4.25 times as much"),
    ({**OWN, "kind": "NVIDIA A100-SXM4-80GB"}, "gather", "gather", "on H100 and H200 alone"),
    ({**OWN, "width": 64}, "gather", "gather", "for 128 elements of a head and up to 4 ranks"),
    ({**OWN, "ranks": 8}, "gather", "gather", "up to 4 ranks"),
    ({**OWN, "ranks": 3}, "gather", "gather", "3 ranks do not split 32 heads over 8"),
    ({**OWN, "causal": False}, "gather", "gather", "with a causal mask alone"),
    ({**OWN, "why_no_cudnn": "there is a window"}, "gather", "gather", "there is a window"),
    ({**OWN, "return_lse": True}, "gather", "gather", "without `heads_axis` and `return_lse`"),
    ({**OWN, "along_heads": True}, "gather", "gather", "without `heads_axis`"),
    ({**OWN, "processes": 2}, "gather", "gather", "in one process"),
    # A bias, of whole sequences.
    ({"has_bias": True, "ranks": 2, "length": 64}, "ulysses", "ulysses", "cuDNN has a bias"),
    ({"has_bias": True, "length": 1 << 20}, "ulysses", "ulysses", "cuDNN has a bias"),
    ({"has_bias": True, "ranks": 3}, "gather", "gather", "3 ranks do not split"),
    # Too many keys, whatever else.
    ({**OWN, "length": 1 << 20}, "ring", "ring", "gathered they have 4294967296 bytes, more"),
    # What is asked for.
    ({"form": "ulysses", "length": 64}, "ulysses", "ulysses", "ulysses is asked for"),
    ({**OWN, "form": "gather"}, "gather", "gather", "gather is asked for"),
    ({"form": "ring", "length": 64}, "ring", "ring", "ring is asked for"),
]  # fmt: skip


def test_which_form():
    for call, alone, differentiated, reason in WHICH_FORM:
        assert chosen(False, **call)[1] == alone, call
        said, form = chosen(True, **call)
        assert form == differentiated, call
        assert re.search(reason, said), said


@pytest.mark.parametrize("type_", ["int8", "uint8", "int16", "uint32", "int64", "uint64"])
@pytest.mark.parametrize("form", ["gather", "ring"])
def test_segments_of_any_integers(type_, form):
    case = Case(world=2, own=10, segments=True, form=form)
    q, k, v, ids = case.operands()
    want = case.expected(q, k, v, ids)
    for x64, dtype, close in ((False, np.float32, 1e-5), (True, np.float64, 1e-12)):
        with jax.enable_x64(x64):
            f = jax.jit(lambda q, k, v, ids: case.split(q, k, v, ids))
            got = f(*(a.astype(dtype) for a in (q, k, v)), ids.astype(type_))
        for one, other in zip(got, want, strict=True):
            np.testing.assert_allclose(one, other, rtol=close, atol=close)


def test_numbers_of_numpy():
    case = Case(world=1, own=12, window=(3, 1), softcap=2.0)
    options = {"softcap": np.float32(2.0), "scale": np.float64(5**-0.5), "causal": np.bool_(True)}

    def call(q, k, v, ids):
        return jflux.attention(q, k, v, window=tuple(np.array([3, 1])), return_lse=True, **options)

    check(case, call)
    q, k, v, _ = Case(world=1, own=12, causal=False, window=(3, 3)).operands()
    want = jflux.attention(q, k, v, window=3)
    np.testing.assert_array_equal(jflux.attention(q, k, v, window=np.int64(3)), want)


@pytest.mark.parametrize("form", ["gather", "ring"])
@pytest.mark.parametrize("wide", [(1 << 31) - 1, (1 << 31) + 5, 1 << 40, (1 << 63) - 1])
def test_windows_of_more_positions_than_there_are(wide, form):
    case = Case(world=2, own=6, causal=False, form=form)
    *arrays, ids = case.operands()
    for window, same in (((wide, 2), (None, 2)), ((1, wide), (1, None)), (wide, (None, None))):
        got, want = (jax.jit(functools.partial(case.split, window=w))(*arrays, ids)
                     for w in (window, same))  # fmt: skip
        for one, other in zip(got, want, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-12)


@pytest.mark.parametrize("name", ["scale", "softcap"])
def test_numbers_that_are_not_known(name):
    q, k, v, _ = Case(world=1, own=4).operands()
    decode = functools.partial(jflux.flash_decode, q[:, 0], k, v, np.array([4, 4]))
    cache = jflux.KVCache(k, v, np.zeros(2, np.int32))
    grow = functools.partial(jflux.attend_to_cache, cache, q[:, :1], k[:, :1], v[:, :1])
    attend = functools.partial(jflux.attention, q, k, v)
    for op, f in (("attention", attend), ("flash_decode", decode), ("attend_to_cache", grow)):
        says = rf"jflux.{op}: {name} must be known when the call is traced, got float64\[\]"
        with pytest.raises(TypeError, match=says):
            jax.eval_shape(lambda x, f=f: f(**{name: x}), 0.5)


@pytest.mark.parametrize("form", ["gather", "ring"])
def test_padding_that_is_not_a_number(form):
    """In a segment of its own it reaches no other position, forward and backward, whatever its
    cotangents are. A value that is attended to reaches who does, and the gradients of what they
    attend to."""
    case = Case(world=2, own=6, form=form)
    q, k, v, _ = case.operands()
    ids = np.repeat([[0, 1, 2], [0, 3, 3]], [3, 6, 3], axis=1)
    padding = (ids == 2)[..., None, None]
    spoilt = [np.where(padding, np.nan, a) for a in (q, k, v)]
    infinite = np.array(v)
    infinite[1, 4, 0] = np.inf

    def both(module, *arrays, out=padding):
        def loss(*arrays):
            o, lse = case.split(*arrays, ids, module=module, softcap=1.5)
            return jnp.sum(jnp.sin(jnp.where(out, 0, o))), (o, lse)

        return jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(*arrays)

    def run(module):
        return both(module, *spoilt), both(module, *spoilt, out=False), both(module, q, k, infinite)

    (want, _), gradients = jax.jit(functools.partial(both, jflux))(q, k, v)
    reached, attended = (np.zeros((2, 12, heads), bool) for heads in (case.heads, case.groups))
    reached[1, 4:, : case.heads // case.groups] = True  # it is causal
    attended[1, 3:, 0] = True
    for module in (jflux, jflux.reference):
        found = jax.jit(run, static_argnums=0)(module)
        ((loss, (o, _)), got), (_, of_padding), ((_, (of_inf, _)), nan) = found
        np.testing.assert_allclose(loss, want)
        np.testing.assert_array_equal(np.isnan(o), np.broadcast_to(padding, o.shape))
        for a, mask in ((of_inf, reached), *zip(nan, (reached, attended, attended), strict=True)):
            np.testing.assert_array_equal(np.isnan(a), np.broadcast_to(mask[..., None], a.shape))
        for one, other, third, right in zip(got, of_padding, nan, gradients, strict=True):
            np.testing.assert_allclose(one, right, atol=1e-12)
            np.testing.assert_allclose(np.where(padding, 0, other), right, atol=1e-12)
            np.testing.assert_allclose(third[0], right[0], atol=1e-12)


# ---- Sinks ---------------------------------------------------------------------------------------


def check_sinks(case, f=None, wrap=lambda f: f, **options):
    """Both results and the gradients of both, those of the sinks and of a bias too."""
    *arrays, ids = case.operands()
    weights = weights_of(case)

    def loss(f):
        def of(*arrays):
            results = wrap(f)(*arrays)
            return sum(map(jnp.vdot, results, weights)), results

        return jax.jit(jax.value_and_grad(of, range(5), has_aux=True))

    def split(q, k, v, sinks, bias):
        return (f or case.split)(q, k, v, ids, sinks, bias, **options)

    def expected(q, k, v, sinks, bias):
        bias = case.of_slopes() + (0 if bias is None else bias)
        return plain_with_sinks(q, k, v, sinks, case.mask(ids), case.softcap, bias)

    got, want = (loss(f)(*arrays, case.sinks(), case.bias()) for f in (split, expected))
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-10)


@examples(6)
@given(case=cases())
def test_a_sink_is_one_more_column_of_the_softmax(case):
    check_sinks(case)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("world", [n for n in (2, 3) if n <= RANKS])
def test_a_sink_counts_once_and_not_once_on_each_rank(world, form, check_vma):
    heads = {"heads": 2 * world, "groups": world, "table": (False, True)}
    check_sinks(Case(world=world, own=4, form=form, width=3, **heads), check_vma=check_vma)


@pytest.mark.parametrize("segments", [False, True])
def test_sinks_of_the_reference(segments):
    case = Case(world=2, own=4, segments=segments, window=(5, 0), softcap=1.5, table=(True, False))
    check_sinks(case, module=jflux.reference)


@pytest.mark.parametrize(
    "policy", [None, jax.checkpoint_policies.save_only_these_names(_passes.ATTENTION)]
)
@pytest.mark.parametrize("shared", [False, True])
def test_sinks_under_vmap_and_remat(shared, policy):
    """Of each element, or of all together."""
    case = Case(world=2, own=4, batch=1, width=3, table=(False, True))

    def wrap(f):
        f = jax.checkpoint(f, policy=policy)

        def both(q, k, v, *others):
            arrays = [jnp.stack([a, 2 * a]) for a in (q, k, v)]
            others = others if shared else [jnp.stack([a, -a]) for a in others]
            axes = (0, 0, 0, *[None if shared else 0] * 2)
            return [jnp.sum(a, 0) for a in jax.vmap(f, axes)(*arrays, *others)]

        return both

    check_sinks(case, wrap=wrap)


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_forward_mode_of_sinks(form, alone):
    case = Case(world=2, own=4, width=3, form=form, window=(5, 0), table=(False, False))
    *arrays, ids = case.operands()
    arrays = [jnp.asarray(a) for a in (*arrays, case.sinks(), case.bias())]
    rng = np.random.default_rng(1)
    moved = [jnp.asarray(rng.standard_normal(a.shape)) for a in arrays]

    def tangents(f):
        if alone:
            return jax.jvp(lambda *others: f(*arrays[:3], *others), arrays[3:], moved[3:])
        return jax.jvp(f, arrays, moved)

    got = jax.jit(lambda: tangents(lambda q, k, v, *a: case.split(q, k, v, ids, *a)))()
    mask = case.mask(ids)
    want = jax.jit(lambda: tangents(lambda *a: plain_with_sinks(*a[:4], mask, bias=a[4])))()
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("moves", [True, False])
@pytest.mark.parametrize("module", [jflux, jflux.reference])
def test_sinks_go_with_their_heads(module, moves):
    """Along `heads_axis` they are those of all heads; along another axis, those of the rank's. So
    are slopes."""
    if RANKS < 4:
        pytest.skip("four ranks")
    options = {"heads_axis": "heads"} if moves else {"q_spec": P(None, None, "heads")}
    options["layout"] = "contiguous"
    case = Case(world=2, own=8, groups=2 - moves, segments=True, layout="contiguous", alibi=True)
    case = dataclasses.replace(case, table=(moves, True))

    def call(q, k, v, ids, sinks, bias):
        return module.attention(
            q, k, v, axis_name="tp", causal=True, segment_ids=ids, sinks=sinks, bias=bias,
            return_lse=True, mesh=make_mesh((2, 2), ("tp", "heads")),
            alibi_slopes=case.slopes(), **options,
        )  # fmt: skip

    check_sinks(case, call)


def test_rows_without_keys_and_sinks_that_are_none():
    """A head for each: both, a NaN, no keys, neither, no sink."""
    o = jnp.array([[3.0, 4], [np.nan, np.nan], [0, 0], [0, 0], [1, 2]])
    lse = jnp.array([0.25, np.nan, -np.inf, -np.inf, 0.5])
    sinks = jnp.array([0.25, 1, 2, -np.inf, -np.inf])

    @jax.jit
    def run(o, lse, sinks):
        def loss(*rows):
            results = _sinks.added(*rows)
            return sum(jnp.sum(jnp.where(jnp.isfinite(a), a, 0)) for a in results), results

        (_, results), gradients = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(o, lse, sinks)
        return *results, *gradients

    got, total, do, of_lse, of_sinks = map(np.asarray, run(o, lse, sinks))
    np.testing.assert_array_equal(got, [[1.5, 2], [np.nan, np.nan], [0, 0], [0, 0], [1, 2]])
    np.testing.assert_allclose(total, [0.25 + np.log(2), np.nan, 2, -np.inf, 0.5])
    finite = [0, 2, 3, 4]
    np.testing.assert_allclose(do[finite, 0], [0.5, 0, 0, 1])
    np.testing.assert_allclose(of_lse[finite], [0.5 + 7 / 4, 0, 0, 1])
    np.testing.assert_allclose(of_sinks[finite], [0.5 - 7 / 4, 1, 0, 0])


@pytest.mark.parametrize("form", FORMS)
def test_slopes_are_constants(form):
    """They have no gradient, beside those of queries, keys and values of another width."""
    case = Case(world=2, own=4, form=form, causal=False, alibi=True, segments=True)
    q, k, v, ids = case.operands()
    v = np.concatenate([v, v], -1)

    def run(f):
        def loss(*arrays):
            return sum(jnp.sum(jnp.sin(a)) for a in f(*arrays))

        return jax.jit(jax.grad(loss, (0, 1, 2, 3)))(q, k, v, case.slopes())

    def split(q, k, v, slopes):
        call = functools.partial(case.split, mesh=make_mesh((2,)), module=jflux)
        return call(q, k, v, ids, alibi_slopes=slopes)

    got = run(split)
    want = run(lambda q, k, v, _: case.expected(q, k, v, ids))
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-10)
    assert not got[3].any()


@pytest.mark.parametrize("module", [jflux, jflux.reference])
def test_padding_that_is_not_a_number_reaches_no_sink_and_no_bias(module):
    options = {"layout": "contiguous", "alibi": True, "table": (True, True)}
    case = Case(world=2, own=4, groups=1, heads=2, **options)
    q, k, v, _ = case.operands()
    ids = np.repeat([[0, 1], [0, 0]], [5, 3], axis=1)
    padding = (ids == 1)[..., None, None]

    def run(*arrays):
        def loss(*others):
            o, _ = case.split(*arrays, ids, *others, module=module)
            return jnp.sum(jnp.sin(jnp.where(padding, 0, o)))

        return jax.grad(loss, (0, 1))(case.sinks(), case.bias())

    spoilt = [np.where(padding, np.nan, a) for a in (q, k, v)]
    for one, other in zip(jax.jit(run)(*spoilt), jax.jit(run)(q, k, v), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12)


@pytest.mark.parametrize("way", ["gather", "ring", "ulysses", "heads", "global", "reference"])
@pytest.mark.parametrize(("queries", "keys"), [(3, 5), (4, 1)])
@pytest.mark.parametrize("world", [n for n in (1, 2, 3) if n <= RANKS])
def test_keys_of_another_sequence(world, queries, keys, way):
    check_keys_of_another_sequence(world, queries, keys, way)


@pytest.mark.parametrize("way", [*FORMS, "heads", "global", "reference"])
@pytest.mark.parametrize("values", [3, 6])
@pytest.mark.parametrize("world", [n for n in (1, 2, 3) if n <= RANKS])
def test_values_of_another_width(world, values, way):
    check_keys_of_another_sequence(world, 3, 5, way, values=values)


def check_keys_of_another_sequence(world, queries, keys, way, *, return_lse=True, values=4):
    """Results and gradients of all, of this many queries and keys of a rank, of 4 elements."""
    heads, mesh = 2 * world, make_mesh((world,))
    rng, split = np.random.default_rng([world, queries]), P(None, "tp")
    shapes = ((2, world * n, heads, d) for n, d in ((queries, 4), (keys, 4), (keys, values)))
    q, k, v = (jnp.asarray(rng.standard_normal(shape)) for shape in shapes)
    module = jflux.reference if way == "reference" else jflux
    axis = "heads_axis" if way == "heads" else "axis_name"
    options = {axis: "tp", "return_lse": return_lse}
    if way == "global":
        options["mesh"] = mesh
    if way in FORMS:
        options["form"] = way
    f = functools.partial(module.attention, **options)
    if way != "global":
        f = jax.shard_map(f, mesh=mesh, in_specs=split, out_specs=split)

    def both(f):
        def loss(*operands):
            results = f(*operands)
            return sum(jnp.sum(jnp.sin(a)) for a in jax.tree.leaves(results)), results

        return jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(q, k, v)

    def whole(*operands):
        o, lse = plain(*operands, mask=True)
        return (o, lse) if return_lse else o

    for one, other in zip(*map(jax.tree.leaves, (both(f), both(whole))), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"sinks": np.zeros(2)}, ValueError, r"sinks must be \[H\].* 4 heads .* got \(2,\)"),
        ({"sinks": 0.0}, ValueError, r"got \(\); the same for all heads is jnp.full\(4, x\)"),
        ({"bias": np.zeros((4, 4))}, ValueError, r"bias must be \[1 or B, 1 or H, S, T\] of wh"),
        ({"bias": np.zeros((1, 2, 4, 4))}, ValueError, r"\(1, 4, 4, 4\) .* got \(1, 2, 4, 4\)"),
        ({"bias": np.ones((1, 1, 4, 4), bool)}, TypeError, "bias must be floating, got bool"),
        ({"alibi_slopes": np.zeros(2)}, ValueError, r"alibi_slopes must be \[H\].* 4 heads"),
        ({"alibi_slopes": np.zeros(4), "softcap": 5.0}, ValueError, "not go with softcap=5.0"),
        ({"alibi_slopes": np.zeros(4), "scale": 0}, ValueError, "not go with a scale of 0"),
        ({"sinks": np.zeros(4, int)}, TypeError, "sinks must be floating, got int64; cast them"),
        ({"q": (1, 4, 3, 4)}, ValueError, "3 heads of queries must be a multiple of 2"),
        ({"q": (4, 4, 4)}, ValueError, r"q must be \[B, S/N, heads, D\]"),
        ({"v": (1, 4, 1, 4)}, ValueError, r"same B and D, and k and v \[B, T/N, G, E\] all but"),
        (
            {"k": (1, 6, 2, 4), "v": (1, 6, 2, 4)},
            ValueError,
            "causal is about the positions of one sequence, but q has 4 and k 6 of them",
        ),
        (
            {"k": (1, 6, 2, 4), "v": (1, 6, 2, 4), "causal": False, "alibi_slopes": np.zeros(4)},
            ValueError,
            "alibi_slopes is about the positions of one sequence",
        ),
        ({"k": np.zeros((1, 4, 2, 4), np.float32)}, TypeError, "must have one type"),
        ({"segment_ids": np.zeros((1, 5), int)}, ValueError, r"segment_ids must be \[B, S/N\]"),
        ({"segment_ids": np.zeros((1, 4))}, TypeError, "segment_ids must be integers"),
        ({"form": "star"}, ValueError, "form='star' must be one of auto, gather, ring, ulysses"),
        ({"layout": "snake"}, ValueError, "must be one of contiguous, zigzag, striped"),
        ({"window": -1}, ValueError, "must be a number of positions, 0 or more"),
        ({"window": (1, 2, 3)}, ValueError, r"or two: \(left, right\)"),
        ({"softcap": 0.0}, ValueError, "softcap=0.0 must be greater than 0"),
    ],
)
def test_refuses(change, error, message):
    given = {"q": (1, 4, 4, 4), "k": (1, 4, 2, 4), "v": (1, 4, 2, 4)} | change
    given = {
        name: np.zeros(value) if name in "qkv" and isinstance(value, tuple) else value
        for name, value in given.items()
    }
    with pytest.raises(error, match="jflux.attention: .*" + message):
        jflux.attention(**{"causal": True} | given)


def test_a_sequence_that_ranks_do_not_divide():
    q, k = np.zeros((1, 5, 4, 4)), np.zeros((1, 5, 2, 4))
    mesh = make_mesh((2,))
    for layout in LAYOUTS:
        with pytest.raises(ValueError, match="jflux.attention: .*do not divide its dimension 1"):
            jflux.attention(q, k, k, axis_name="tp", layout=layout, mesh=mesh)


def test_zigzag_wants_two_parts():
    f = jax.shard_map(
        functools.partial(jflux.attention, axis_name="tp"), mesh=make_mesh((2,)),
        in_specs=(SEQUENCE,) * 3, out_specs=SEQUENCE,
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"S/N must be even, got q \(1, 3, 2, 4\)"):
        jax.eval_shape(f, *[jnp.zeros((1, 6, 2, 4))] * 3)
