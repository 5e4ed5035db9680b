"""jflux.attention in float32 and in the half types, on any platform, against float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import PLATFORM, RANKS, make_mesh
from jax.sharding import PartitionSpec as P

import jflux
from jflux._ops.attention import _alibi, _cudnn, all_gather_attention

SEQUENCE = P(None, "tp")


def exact(q, k, v, do, causal=True, sinks=None, slopes=None, bias=None):
    """(o, l) of attention, and the gradients of o's sum weighted by do, in float64. With sinks the
    softmax has one more column, which is dropped. Sinks and a bias have the last gradients."""
    q, k, v, do = (np.asarray(a, np.float64) for a in (q, k, v, do))
    group, (batch, length, groups, width) = q.shape[2] // k.shape[2], k.shape
    k, v = np.repeat(k, group, 2), np.repeat(v, group, 2)
    s = np.einsum("bshd,bthd->bhst", q, k) / width**0.5
    if slopes is not None:
        at = np.arange(length)
        s += np.asarray(slopes, np.float64)[:, None, None] * (at - at[:, None])
    if bias is not None:
        s += np.asarray(bias, np.float64)
    if causal:
        s = np.where(np.tri(length, dtype=bool), s, -np.inf)
    if sinks is not None:
        column = np.broadcast_to(np.asarray(sinks)[:, None, None], (*s.shape[:-1], 1))
        s = np.concatenate([s, column], -1)
    top = s.max(-1)
    lse = np.log(np.exp(s - top[..., None]).sum(-1)) + top
    p, of_sink = np.split(np.exp(s - lse[..., None]), [length], -1)
    o = np.einsum("bhst,bthd->bshd", p, v)
    dp = np.einsum("bshd,bthd->bhst", do, v)
    delta = np.sum(p * dp, -1, keepdims=True)
    d_bias = p * (dp - delta)
    ds = d_bias / width**0.5
    dq, dk = np.einsum("bhst,bthd->bshd", ds, k), np.einsum("bhst,bshd->bthd", ds, q)
    dv = np.einsum("bhst,bshd->bthd", p, do)
    dk, dv = (a.reshape(batch, length, groups, group, -1).sum(3) for a in (dk, dv))
    others = [] if sinks is None else [-np.sum(of_sink * delta, (0, 2, 3))]
    if bias is not None:
        shared = tuple(d for d in (0, 1) if bias.shape[d] == 1)
        others.append(np.sum(d_bias, shared, keepdims=True))
    return (o, lse.swapaxes(1, 2)), (dq, dk, dv, *others)


def drawn(shape, dtype, seed, keys=None, values=None):
    """q, k, v and a cotangent of o, for (B, S, H, G, D); keys and values have S positions, too,
    unless `keys` says how many, and values D elements, unless `values` does."""
    batch, queries, heads, groups, width = shape
    keys, values = keys or queries, values or width
    rng = np.random.default_rng(seed)
    rows = ((queries, heads, width), (keys, groups, width), (keys, groups, values))
    return [
        jnp.asarray(rng.standard_normal((batch, *row)), dtype)
        for row in (*rows, (queries, heads, values))
    ]


def check(
    operands, world, *, return_lse=True, layout="zigzag", sinks=None, slopes=None, bias=None,
    **options,
):  # fmt: skip
    """o, the log-sum-exp where it is returned, and the gradients of o."""
    *operands, do = operands
    attend = functools.partial(
        jflux.attention, axis_name="tp", return_lse=return_lse, layout=layout,
        alibi_slopes=slopes, **options,
    )  # fmt: skip
    f = jax.shard_map(
        lambda others, *arrays: attend(*arrays, **others), mesh=make_mesh((world,)),
        in_specs=(P(), *[SEQUENCE] * 3), out_specs=SEQUENCE,
    )  # fmt: skip
    others = {name: a for name, a in (("sinks", sinks), ("bias", bias)) if a is not None}

    def loss(q, k, v, *given):
        arrays = [jflux.reorder_for_causal(a, world, layout=layout) for a in (q, k, v)]
        got = f(dict(zip(others, given, strict=True)), *arrays)
        got = [jflux.restore_order(a, world, layout=layout) for a in (got if return_lse else [got])]
        return jnp.sum(got[0].astype(jnp.float32) * do.astype(jnp.float32)), got

    with jax.default_matmul_precision("float32"):
        given = [*operands, *others.values()]
        gradient = jax.grad(loss, tuple(range(len(given))), has_aux=True)
        gradients, (o, *lse) = jax.jit(gradient)(*given)
    causal = options["causal"]
    (want, want_lse), want_gradients = exact(*operands, do, causal, sinks, slopes, bias)
    dtype = operands[0].dtype
    assert o.dtype == dtype
    of_bias = 0 if slopes is None else 4 * 2.0**-24 * o.shape[1]  # of biases in float32
    # Probabilities are rounded to the type before they multiply values, and so is the result.
    unit = max(float(jnp.finfo(dtype).eps), 1e-6, of_bias)
    np.testing.assert_allclose(np.asarray(o, np.float64), want, rtol=2 * unit, atol=2 * unit)
    for one in lse:
        assert one.dtype == jnp.float32
        np.testing.assert_allclose(one, want_lse, rtol=1e-5, atol=1e-5 + of_bias)
    for a, one, other in zip(given, gradients, want_gradients, strict=True):
        assert one.dtype == a.dtype
        atol = 8 * max(float(jnp.finfo(a.dtype).eps), unit) * np.abs(other).max()
        np.testing.assert_allclose(np.asarray(one, np.float64), other, rtol=0, atol=atol)


@pytest.mark.parametrize("form", ["gather", "ring"])
@pytest.mark.parametrize("world", [n for n in (1, 2, 3) if n <= RANKS])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_sums_are_in_float32(dtype, world, form):
    check(drawn((1, 96, 4, 2, 32), dtype, world), world, causal=True, form=form)


@pytest.mark.parametrize("form", ["gather", "ring"])
@pytest.mark.parametrize("world", [n for n in (2, 1, 3) if n <= RANKS])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32, jnp.float16])
@pytest.mark.parametrize("of", [jnp.float32, jnp.bfloat16])
def test_sinks(of, dtype, world, form):
    """Some take almost all weight, some almost none."""
    operands = drawn((1, 96 * world, 4, 2, 64), dtype, world)
    sinks = jnp.asarray([1.5, -2, 7, -20], of)
    check(operands, world, causal=True, form=form, sinks=sinks)


@pytest.mark.parametrize("form", ["gather", "ring", "ulysses"])
@pytest.mark.parametrize("width", [64, 128] if PLATFORM == "gpu" else [24])
@pytest.mark.parametrize("world", [n for n in (2, 1, 4) if n <= RANKS])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32, jnp.float16])
def test_slopes(dtype, world, width, form):
    """Of 64 elements by cuDNN and of 128 by jflux's kernels, on GPUs, where they get 16 more."""
    operands = drawn((1, 192 * world, 4, 4, width), dtype, world)
    options = {"return_lse": form == "ring", "form": form}
    slopes = jnp.asarray([0.5, 2**-0.5, 0.3, 2.0**-8])
    check(operands, world, causal=True, slopes=slopes, **options)


@pytest.mark.parametrize("form", ["auto", "gather", "ring"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("of", [(1, 8), (1, 1), (2, 8), (2, 1)])
@pytest.mark.parametrize("world", [n for n in (2, 1, 4) if n <= RANKS])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_bias(dtype, world, of, causal, form):
    """On GPUs "auto" is one call of cuDNN, if all sequences have the bias."""
    length = 64 * world
    rng, operands = np.random.default_rng(1), drawn((2, length, 8, 4, 64), dtype, world)
    bias = jnp.asarray(rng.standard_normal((*of, length, length)), dtype)
    options = {"layout": "striped", "return_lse": form == "ring", "form": form}
    with jflux.config(strict=form == "auto" and of[0] == 1):
        check(operands, world, causal=causal, bias=bias, **options)


@pytest.mark.parametrize("length", [1 << 12, 1 << 16])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_slopes_at_late_positions(dtype, length):
    """Scores of the last queries with keys of all ages. Without a gradient or a sum over keys, so
    an error is the bias's own."""
    heads, width, scale = 8, 96, 96**-0.5
    at = np.r_[0:64, length // 2 : length // 2 + 64, length - 128 : length].astype(np.int32)
    q, k, _, _ = drawn((1, 256, heads, 1, width), dtype, 1)
    slopes = jnp.asarray(2.0 ** -np.arange(0.5, heads), jnp.float32)

    @jax.jit
    def scores(q, k):
        q, k = _alibi.extended(q, at, k, at, slopes, scale, length)
        with jax.default_matmul_precision("float32"):
            return scale * jnp.einsum("bshd,btgd->hst", q, k, preferred_element_type=jnp.float32)

    want = scale * np.einsum("bshd,btgd->hst", *(np.asarray(a, np.float64) for a in (q, k)))
    want += np.asarray(slopes, np.float64)[:, None, None] * (at - at[:, None]).astype(np.float64)
    error = np.abs(np.asarray(scores(q, k), np.float64) - want).max()
    assert error <= min(1e-2, 4 * 2.0**-24 * length), error


@pytest.mark.parametrize("form", ["gather", "ring", "ulysses", "auto"])
@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(192, 64), (24, 320)])
@pytest.mark.parametrize("world", [n for n in (2, 1, 4) if n <= RANKS])
def test_keys_of_another_sequence(world, queries, keys, return_lse, form):
    operands = drawn((2, queries * world, 8, 4, 64), jnp.bfloat16, world, keys * world)
    options = {"form": form, "return_lse": return_lse, "layout": "contiguous"}
    check(operands, world, causal=False, **options)


@pytest.mark.parametrize("form", ["gather", "ring", "ulysses"])
@pytest.mark.parametrize("values", [128, 200] if PLATFORM == "gpu" else [16, 40])
@pytest.mark.parametrize("world", [n for n in (2, 1, 4) if n <= RANKS])
def test_values_of_another_width(world, values, form):
    """On GPUs by jflux's kernels, since cuDNN takes up to 128 elements."""
    width, own = (192, 192) if PLATFORM == "gpu" else (24, 24)
    operands = drawn((2, own * world, 4, 4, width), jnp.bfloat16, world, values=values)
    check(operands, world, causal=True, layout="contiguous", form=form)


@pytest.mark.parametrize("form", ["gather", "ring"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_large_scores_do_not_overflow(dtype, form):
    """Some hundreds: float16 ends at the exponential of 11, float32 at that of 88."""
    q, k, v, do = drawn((1, 96, 4, 2, 32), dtype, 5)
    check((100 * q, k, v, do), min(2, RANKS), causal=True, form=form)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("op", ["attention", "ulysses_attention"])
def test_windows_on_one_rank(op, causal):
    """cuDNN's have no right side."""
    q, k, v, _ = drawn((2, 160, 4, 2, 64), jnp.bfloat16, 3)
    options = {"causal": causal, "window": (20, 9)}
    if op == "ulysses_attention":
        f = functools.partial(jflux.ulysses_attention, axis_name="tp", **options)
        specs = {"in_specs": (SEQUENCE,) * 3, "out_specs": SEQUENCE}
        got = jax.jit(jax.shard_map(f, mesh=make_mesh((1,)), **specs))(q, k, v)
    else:
        got = jax.jit(functools.partial(jflux.attention, **options))(q, k, v)
    wide = (a.astype(jnp.float32) for a in (q, k, v))
    with jax.default_matmul_precision("float32"):
        want = jflux.reference.attention(*wide, **options)
    unit = float(jnp.finfo(jnp.bfloat16).eps)
    np.testing.assert_allclose(np.asarray(got, np.float32), want, rtol=2 * unit, atol=2 * unit)


@pytest.mark.skipif(PLATFORM != "gpu", reason="cuDNN runs on GPUs")
@pytest.mark.parametrize("sinks", [None, (0.5, -2.0, 3.0, 0.0, 1.0, -9.0, 8.0, 1.0)])
@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("form", ["gather", "ring"])
@pytest.mark.parametrize(
    ("layout", "causal"), [("zigzag", True), ("contiguous", True), ("zigzag", False)]
)
@pytest.mark.parametrize("world", [n for n in (1, 2, 4) if n <= RANKS])
@pytest.mark.parametrize(
    ("dtype", "width", "chunk"), [(jnp.bfloat16, 128, 128), (jnp.float16, 64, 192)]
)
def test_parts_by_cudnn(
    monkeypatch, dtype, width, chunk, world, layout, causal, form, return_lse, sinks
):
    called = []
    for name in ("forward", "backward"):
        f = getattr(_cudnn, name)
        monkeypatch.setattr(_cudnn, name, lambda *a, f=f, **o: called.append(f) or f(*a, **o))
    # As for longer sequences.
    monkeypatch.setattr(all_gather_attention, "MOST_POSITIONS_FOR_GRADIENTS", 0)
    shape = (2, 2 * chunk * world, 8, 2, width)
    with jflux.config(unchecked_kernels=True):
        check(
            drawn(shape, dtype, world), world, causal=causal, layout=layout, form=form,
            return_lse=return_lse, sinks=None if sinks is None else jnp.array(sinks),
        )  # fmt: skip
    in_one_call = (
        not return_lse and sinks is None and (world == 1 or not (causal or form == "ring"))
    )
    own = return_lse and world > 1 and causal and form == "gather"  # not one part of cuDNN's
    assert bool(called) == (not in_one_call and not own)


@pytest.mark.parametrize("form", ["gather", "ring"])
@pytest.mark.parametrize("width", [64, 128, 256] if PLATFORM == "gpu" else [16])
@pytest.mark.parametrize("world", [n for n in (2, 1, 4) if n <= RANKS])
def test_padding_that_is_not_a_number(world, width, form):
    """The same bits as of zeros there, in o and all gradients of the other segments."""
    length = 384 if PLATFORM == "gpu" else 48
    *arrays, do = drawn((2, length, 4, 2, width), jnp.bfloat16, 9)
    ids = np.tile(np.arange(length) // (length // 2), (2, 1))
    ids[1, length - 5 :] = 7
    padding = jnp.asarray(np.stack([ids[0] == 1, ids[1] == 7]))[..., None, None]
    do = jnp.where(padding, 0, do)
    f = jax.shard_map(
        lambda q, k, v, ids: jflux.attention(
            q, k, v, segment_ids=ids, axis_name="tp", causal=True, layout="contiguous", form=form
        ),
        mesh=make_mesh((world,)), in_specs=SEQUENCE, out_specs=SEQUENCE,
    )  # fmt: skip

    @jax.jit
    def both(fill, *arrays):
        def loss(*arrays):
            o = f(*(jnp.where(padding, fill.astype(a.dtype), a) for a in arrays), jnp.asarray(ids))
            return jnp.sum(jnp.where(padding, 0, o * do).astype(jnp.float32)), o

        gradients, o = jax.grad(loss, (0, 1, 2), has_aux=True)(*arrays)
        return [jnp.where(padding, 0, a) for a in (o, *gradients)]

    zeros, *others = (both(jnp.float32(fill), *arrays) for fill in (0, np.nan, np.inf))
    assert all(np.isfinite(np.asarray(a, np.float32)).all() and np.any(a) for a in zeros)
    for other in others:
        for one, want in zip(other, zeros, strict=True):
            np.testing.assert_array_equal(np.asarray(one, np.float32), np.asarray(want, np.float32))
