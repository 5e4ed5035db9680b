"""What surrounds the kernels of attention (jflux/_ops/attention/flash_attention.py): which blocks
they skip, what their handlers are given, and what takes their place.
tests/cc/simt/flash_attention_test.cc runs the kernels themselves."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_programs import Library
from harness import PLATFORM, examples, make_mesh
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import jflux
from jflux import _config, _native
from jflux._ops.attention import _blockwise, all_gather_attention, flash_attention
from jflux._ops.attention._blockwise import Positions, Scores
from jflux._ops.attention.sequence_layouts import own_positions

WINDOWS = st.none() | st.tuples(st.integers(0, 40), st.integers(0, 40))


def pairs(queries, keys, scores):
    """Which pairs have a score: bool [1 or B, s, t], from their meaning."""
    i, j = (np.atleast_2d(np.asarray(p.positions)) for p in (queries, keys))
    i, j = i[:, :, None], j[:, None]
    allowed = np.ones(np.broadcast_shapes(i.shape, j.shape), bool)
    if scores.causal:
        allowed &= j <= i
    if scores.window is not None:
        left, right = scores.window
        allowed &= (i - left <= j) & (j <= i + right)
    if queries.segments is not None:
        allowed = allowed & (queries.segments[:, :, None] == keys.segments[:, None])
    return allowed


@st.composite
def parts(draw):
    """Queries and keys of some ranks of a split sequence, or at any positions."""
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    batch = draw(st.integers(1, 2))
    layout = draw(st.sampled_from(["contiguous", "zigzag", "striped", "any"]))
    lengths = [draw(st.sampled_from([2, 14, 48, 66, 98])) for _ in range(2)]

    def positions(length):
        if layout == "any":
            by_batch = (batch,) if draw(st.booleans()) else ()
            return rng.integers(0, 200, (*by_batch, length)).astype(np.int32)
        ranks = draw(st.integers(1, 4))
        return np.asarray(own_positions(rng.integers(ranks), length, ranks, layout))

    def segments(length):
        ids = rng.integers(-2, 3, (batch, length)).astype(np.int32)
        return np.sort(ids, 1) if sort else ids

    some, sort = draw(st.booleans()), draw(st.booleans())
    return [Positions(positions(n), segments(n) if some else None) for n in lengths]


@examples(60)
@given(parts(), st.booleans(), WINDOWS, st.sampled_from([(8, 8), (16, 4), (4, 32)]))
def test_blocks_are_skipped_if_no_pair_has_a_score(both, causal, window, sizes):
    queries, keys = both
    scores = Scores(1.0, None, causal, window)
    kinds = np.asarray(flash_attention.block_kinds(queries, keys, scores, sizes))
    allowed = pairs(queries, keys, scores)
    rows, columns = (-(-n // size) for n, size in zip(allowed.shape[1:], sizes, strict=True))
    assert kinds.shape == (len(allowed), rows, columns)
    for b, r, c in np.ndindex(kinds.shape):
        block = allowed[b, r * sizes[0] : (r + 1) * sizes[0], c * sizes[1] : (c + 1) * sizes[1]]
        if kinds[b, r, c] == 0:
            assert not block.any()
        if kinds[b, r, c] == 2:
            assert block.all() and block.shape[1] == sizes[1]


def test_a_causal_sequence_skips_half_of_its_blocks():
    part = Positions(jnp.arange(64), None)
    kinds = np.asarray(flash_attention.block_kinds(part, part, Scores(1.0, causal=True), (16, 16)))
    assert kinds.tolist() == [[[1, 0, 0, 0], [2, 1, 0, 0], [2, 2, 1, 0], [2, 2, 2, 1]]]


def test_rows_of_blocks_by_their_cost():
    kinds = jnp.asarray([[[1, 0, 0], [2, 1, 0]], [[0, 0, 0], [2, 2, 1]]], jnp.int8)
    same, order = flash_attention.by_cost(kinds)
    assert same is kinds and order.dtype == jnp.int32
    assert order.tolist() == [3, 1, 0, 2]
    # Of rows with as many, those with the most in some columns come first.
    kinds = jnp.asarray([[[0, 1, 1], [1, 1, 0], [1, 0, 1], [2, 2, 2], [1, 2, 0]]], jnp.int8)
    assert flash_attention.by_cost(kinds)[1].tolist() == [3, 0, 1, 2, 4]
    assert flash_attention.by_cost(kinds, kinds[..., :2])[1].tolist() == [3, 1, 4, 0, 2]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("kind", ["forward", "dkv", "dq"])
@pytest.mark.parametrize("window", [None, (4096, 0)])
@pytest.mark.parametrize("width", [128, 256])
def test_ctas_have_as_much_to_do(rank, kind, window, width):
    """Of a zigzag sequence on two ranks, by cc/ops/flash_attention's NextItem."""
    length, ctas = 8192, 132
    queries, others = (own_positions(jnp.int32(r), length, 2, "zigzag") for r in (rank, 1 - rank))
    keys = jnp.concatenate([queries, others])
    scores = Scores(1.0, causal=True, window=window)
    parts = Positions(queries, None), Positions(keys, None)
    kinds = flash_attention.block_kinds(*parts, scores, flash_attention.block_sizes(kind, width))
    heads = 8 if kind == "dkv" else 32
    kinds, order = flash_attention.by_cost(kinds.swapaxes(1, 2) if kind == "dkv" else kinds)
    cost = np.repeat(np.count_nonzero(np.asarray(kinds)[0][np.asarray(order)], -1), heads)
    rounds = np.pad(cost, (0, -len(cost) % ctas)).reshape(-1, ctas)
    rounds[1::2] = rounds[1::2, ::-1]
    work = rounds.sum(0)
    assert work.max() <= 1.04 * work.mean()


@pytest.mark.parametrize(
    "scores",
    [
        Scores(1.0),
        Scores(1.0, causal=True),
        Scores(1.0, causal=True, window=(5, 3)),
        Scores(1.0, window=(5, 3)),
    ],
)
def test_the_span_of_differences_is_the_mask(scores):
    low, high = flash_attention.differences(scores)
    part = Positions(np.arange(20), None)
    difference = np.arange(20) - np.arange(20)[:, None]
    np.testing.assert_array_equal(
        (low <= difference) & (difference <= high), pairs(part, part, scores)[0]
    )


# ---- Programs ------------------------------------------------------------------------------------


@pytest.fixture
def with_cuda(monkeypatch):
    """A build that says it has GPU kernels: enough to lower programs, not to run them."""
    monkeypatch.setattr(_native, "lib", Library(_native.lib))


def arrays(dtype=jnp.bfloat16, width=64, length=300, segments=False):
    rng = np.random.default_rng(0)
    q = jnp.asarray(rng.standard_normal((2, length, 4, width)), dtype)
    k, v = (jnp.asarray(rng.standard_normal((2, length, 2, width)), dtype) for _ in range(2))
    ids = jnp.asarray(np.sort(rng.integers(0, 3, (2, length)), 1), jnp.int32) if segments else None
    return q, k, v, ids


def program(f, *operands):
    return f.trace(*operands).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("segments", [False, True])
def test_gpus_get_two_custom_calls(with_cuda, segments):
    *operands, ids = arrays(segments=segments)

    def loss(q, k, v):
        o = jflux.attention(q, k, v, causal=True, window=64, softcap=9.0, segment_ids=ids)
        return jnp.sum(o.astype(jnp.float32) ** 2)

    text = program(jax.jit(jax.grad(loss, (0, 1, 2))), *operands)
    calls = [line for line in text.splitlines() if "custom_call @jflux_" in line]
    assert [c.split("@jflux_")[1].split("(")[0] for c in calls] == [
        flash_attention.OP,
        flash_attention.BACKWARD,
    ]
    forward, backward = calls
    positions, numbers = "tensor<1x384xi32>", "tensor<2x384xi32>"
    assert forward.count(positions) == 2 and forward.count(numbers) == 2 * segments
    b = 2 if segments else 1
    assert f"tensor<{b}x3x3xi8>" in forward
    assert f"tensor<{b}x3x5xi8>" in backward and backward.count(f"tensor<{b}x3x5xi8>") == 2
    assert backward.count("tensor<2x4x384xf32>") == 2
    assert "softcap = 9.0" in forward and "low = -64" in forward and "span = 64" in forward


def loss(q, k, v):
    o = jflux.attention(q, k, v, causal=True, softcap=9.0)
    return jnp.sum(o.astype(jnp.float32) ** 2)


@pytest.mark.parametrize("width", [128, 136, 256])
def test_backward_kernels_of_any_width(with_cuda, width):
    *operands, _ = arrays(width=width)
    text = program(jax.jit(jax.grad(loss, (0, 1, 2))), *operands)
    lines = [line for line in text.splitlines() if "custom_call @jflux_" in line]
    calls = [line.split("@jflux_")[1].split("(")[0] for line in lines]
    assert calls == [flash_attention.OP, flash_attention.BACKWARD]


@pytest.mark.parametrize(("width", "by_keys"), [(128, "3x5"), (136, "5x5")])
def test_blocks_of_the_backward_pass(with_cuda, width, by_keys):
    *operands, _ = arrays(width=width)
    text = program(jax.jit(jax.grad(loss, (0, 1, 2))), *operands)
    (call,) = (line for line in text.splitlines() if f"@jflux_{flash_attention.BACKWARD}(" in line)
    kinds = call.split(" : (")[1].count(f"tensor<1x{by_keys}xi8>")
    assert kinds == (2 if by_keys == "3x5" else 1) and "tensor<1x3x5xi8>" in call


def test_ranks_get_them_too(with_cuda):
    *operands, _ = arrays(length=256)
    spec, cpus = P(None, "tp"), PLATFORM == "cpu"
    op = flash_attention.OP if cpus else all_gather_attention.OP

    def attend(q, k, v):
        return jflux.attention(q, k, v, axis_name="tp", causal=True, layout="striped")

    for check_vma in (False, True):
        f = jax.jit(
            jax.shard_map(
                attend,
                mesh=make_mesh((2,)),
                in_specs=(spec,) * 3,
                out_specs=spec,
                check_vma=check_vma,
            )
        )
        with jflux.config(strict=not cpus):  # where gathers are lax's; GPUs' kernel gathers itself
            text = program(f, *operands)
        assert text.count(f"custom_call @jflux_{op}(") == 1


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"dtype": jnp.float32}, "operands are float32"),
        ({"width": 12}, "heads have 12 elements"),
        ({"width": 264}, "heads have 264 elements, the kernel takes a multiple of 8, up to 256"),
    ],
)
def test_what_no_kernel_takes(with_cuda, change, says):
    q, k, v, _ = arrays(length=4, **change)
    assert says in flash_attention.plan(q, k, v, Scores(1.0)).reason
    f = jax.jit(lambda *a: jflux.attention(*a, causal=True, window=2))
    assert "jflux_" not in program(f, q, k, v)


def test_what_no_kernel_takes_is_said_once(with_cuda, monkeypatch, caplog):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    _config._said.clear()
    q, k, v, _ = arrays(length=4, width=264)
    with caplog.at_level("INFO", logger="jflux"):
        for window in (2, 3):
            program(
                jax.jit(lambda *a, w=window: jflux.attention(*a, causal=True, window=w)), q, k, v
            )
    (said,) = (r.message for r in caplog.records if "runs in XLA's operations" in r.message)
    assert said.startswith("jflux.attention ") and "heads have 264 elements" in said


def test_a_scale_that_no_kernel_takes(with_cuda):
    q, k, v, _ = arrays()
    assert "the scale is -1.0" in flash_attention.plan(q, k, v, Scores(-1.0)).reason
    assert flash_attention.plan(q, k, v, Scores(1.0)).path == "fused"


def test_padding_of_the_backward_pass():
    """Queries without keys, and rows that are none, add nothing to any gradient."""
    q, k, v, _ = arrays(length=5)
    lse = jnp.zeros((2, 5, 4)).at[0, 1, 2].set(-jnp.inf).at[1, 3, 0].set(2.0)
    delta = jnp.ones((2, 5, 4))
    at = jnp.arange(5, dtype=jnp.int32)[None]
    given = (q, k, v, q, lse, delta, at, at)
    params = flash_attention.Params.of(Scores(1.0), "float32")
    _, _, _, _, base, delta, *_ = flash_attention._prepare_backward(given, params)
    assert base.shape == delta.shape == (2, 4, 128)
    assert np.isposinf(base[0, 2, 1]) and np.isposinf(base[:, :, 5:]).all()
    np.testing.assert_allclose(base[1, 0, 3], 2 / math.log(2), rtol=1e-6)
    assert not delta[:, :, 5:].any()


# ---- Transformations -----------------------------------------------------------------------------


@pytest.mark.parametrize("by_batch", [False, True])
def test_vmap_is_one_call_of_more_sequences(by_batch):
    rng = np.random.default_rng(1)
    shapes = [(3, 2, 6, 4, 8), (3, 2, 9, 2, 8), (3, 2, 9, 2, 8)]
    q, k, v = (rng.standard_normal(s).astype(np.float32) for s in shapes)
    shape = (3, 2, 6) if by_batch else (6,)
    at = np.sort(rng.integers(0, 9, shape).astype(np.int32), -1)
    ids = np.sort(rng.integers(0, 2, (3, 2, 9)).astype(np.int32), -1)
    keys = jnp.arange(9, dtype=jnp.int32)
    scores = Scores(0.5, causal=True)

    def attend(q, k, v, at, ids):
        part = Positions(at, ids[:, :6])
        o, lse = flash_attention.forward(q, part, k, v, Positions(keys, ids), scores, q.dtype)
        return (
            o,
            lse,
            *flash_attention.backward(q, part, k, v, Positions(keys, ids), scores, lse, o, lse),
        )

    batched = jax.vmap(attend, (0, 0, 0, 0 if by_batch else None, 0))
    got = batched(q, k, v, at, ids)
    each = [
        attend(*a[:3], at[i] if by_batch else at, a[3])
        for i, a in enumerate(zip(q, k, v, ids, strict=True))
    ]
    for one, *others in zip(got, *each, strict=True):
        np.testing.assert_allclose(one, np.stack(others), rtol=1e-5, atol=1e-6)
    assert str(jax.make_jaxpr(batched)(q, k, v, at, ids)).count("jflux_flash_attention[") == 1


def test_the_precision_is_that_of_the_trace():
    q, k, v, _ = arrays(jnp.float32, length=4)

    def attend(q, k, v):
        with jax.default_matmul_precision("highest"):
            return jflux.attention(q, k, v, causal=True, window=2)

    def loss(*a):
        return jnp.sum(attend(*a))

    for f in (attend, jax.grad(loss, (0, 1, 2))):
        text = jax.jit(f).lower(q, k, v).as_text()
        products = [line for line in text.splitlines() if "dot_general" in line]
        assert products and all("HIGHEST" in line for line in products)


def test_derivatives_are_those_of_the_blocks():
    rng = np.random.default_rng(2)
    q, k, v, dq, dk, dv = (rng.standard_normal((1, 5, 2, 4)).astype(np.float32) for _ in range(6))
    part, scores = Positions(jnp.arange(5, dtype=jnp.int32), None), Scores(0.5, causal=True)

    def by_kernel(*a):
        return flash_attention.forward(a[0], part, a[1], a[2], part, scores, a[0].dtype)

    def by_blocks(*a):
        return _blockwise.forward(a[0], part, a[1], a[2], part, scores)

    got, want = (jax.jvp(f, (q, k, v), (dq, dk, dv)) for f in (by_kernel, by_blocks))
    jax.tree.map(np.testing.assert_array_equal, got, want)
