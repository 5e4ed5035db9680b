"""jflux.nn's functions of arrays: values and gradients, in float64, against plain computations on
one device; inside shard_map and on global arrays."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import DEVICES, RANKS, compiled_text, fused_calls, make_mesh
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import jflux
import jflux.nn as jnn

pytestmark = pytest.mark.skipif(jax.default_backend() == "gpu", reason="float64")

BATCH, POSITIONS, WIDTH = 2, 24, 8
X, WHOLE = P(None, "tp", None), P()
COLUMNS, ROWS, SPLIT = P(None, "tp"), P("tp", None), P("tp")
COUNTS = [n for n in (2, 3, 8) if n <= RANKS]


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


def draw(*shapes):
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape) / shape[-1] ** 0.5 for shape in shapes]


def value_and_gradients(f, operands, mesh=None):
    """f, and the gradients of a weighted sum of its elements."""

    def run(cotangent, *operands):
        y, pull = jax.vjp(f, *operands)
        if mesh is not None and AxisType.Explicit in mesh.axis_types:
            cotangent = jax.sharding.reshard(cotangent, jax.typeof(y).sharding)
        return y, *pull(cotangent)

    y = jax.eval_shape(f, *operands)
    cotangent = np.random.default_rng(1).standard_normal(y.shape)
    return jax.tree.map(np.asarray, jax.jit(run)(cotangent, *operands))


def assert_same(got, want):
    for index, (one, other) in enumerate(zip(got, want, strict=True)):
        np.testing.assert_allclose(
            one, other, rtol=1e-9, atol=1e-10 * max(1, abs(other).max()), err_msg=f"{index=}"
        )


def check(f, plain, operands, specs, out_spec, world, ways=("vma", "no vma", "auto", "explicit")):
    """`f` takes operands and keywords `axis_name`, and on global arrays `x_spec`."""
    want = value_and_gradients(plain, operands)
    f = functools.partial(f, axis_name="tp")
    for way in ways:
        if way in ("vma", "no vma"):
            mesh = make_mesh((world,))
            mapped = jax.shard_map(
                f, mesh=mesh, in_specs=specs, out_specs=out_spec, check_vma=way == "vma"
            )
            got = value_and_gradients(mapped, operands)
        else:
            kind = AxisType.Auto if way == "auto" else AxisType.Explicit
            data = 2 if 2 * world <= RANKS else 1
            devices = np.array(DEVICES[: data * world]).reshape(data, world)
            mesh = Mesh(devices, ("data", "tp"), axis_types=(kind, kind))
            with jax.set_mesh(mesh):
                got = value_and_gradients(
                    functools.partial(f, x_spec=P("data")), list(map(jnp.asarray, operands)), mesh
                )
        assert_same(got, want)


# ---- MLPs ----------------------------------------------------------------------------------------


def _mlp_operands(world, gated):
    d, h = WIDTH, 2 * world
    x, *weights = draw((BATCH, POSITIONS, d), (d, h), (h,), (h, d), (d,), (d, h), (h,))
    specs = [X, COLUMNS, SPLIT, ROWS, WHOLE, COLUMNS, SPLIT]
    return [x, *weights][: 7 if gated else 5], tuple(specs[: 7 if gated else 5])


def _mlp(x, up, up_bias, down, down_bias, *gate, **options):
    options |= {"up_bias": up_bias, "down_bias": down_bias, "residual": x}
    if not gate:
        return jnn.mlp(x, up, down, **options)
    return jnn.gated_mlp(x, gate[0], up, down, gate_bias=gate[1], **options)


def _plain_mlp(x, up, up_bias, down, down_bias, *gate):
    h = x @ up + up_bias
    h = jax.nn.silu(x @ gate[0] + gate[1]) * h if gate else jax.nn.gelu(h, approximate=True)
    return x + h @ down + down_bias


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("world", COUNTS)
def test_mlp(world, gated):
    operands, specs = _mlp_operands(world, gated)
    ways = ("vma", "no vma", "auto", "explicit") if world == 3 else ("vma", "auto")
    check(_mlp, _plain_mlp, operands, specs, X, world, ways)


@pytest.mark.parametrize("gated", [False, True])
def test_mlp_of_whole_activations(gated):
    operands, specs = _mlp_operands(2, gated)
    f = functools.partial(_mlp, sequence_parallel=False)
    check(f, _plain_mlp, operands, (WHOLE, *specs[1:]), WHOLE, 2)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_products_of_whole_activations_with_weights_split_twice(kind):
    """Over the data axis too, as in fully sharded data parallelism."""
    mesh = Mesh(np.array(DEVICES[:4]).reshape(2, 2), ("data", "tp"), axis_types=(kind, kind))
    x, *ws = draw((BATCH, POSITIONS, WIDTH), (WIDTH, 6), (WIDTH, 4))
    want = tuple(x @ w for w in ws)
    put = lambda a, *spec: jax.device_put(a, jax.NamedSharding(mesh, P(*spec)))  # noqa: E731
    f = functools.partial(
        jnn.column_parallel, axis_name="tp", sequence_parallel=False, x_spec=P("data")
    )
    with jax.set_mesh(mesh):
        ys = jax.jit(f)(put(x, "data"), tuple(put(w, "data", "tp") for w in ws))
        assert [y.sharding.spec[-1] for y in ys] == ["tp", "tp"]
        transposed = put(ws[0].T, "tp", "data")
        y = jax.jit(functools.partial(f, transpose_rhs=True))(put(x, "data"), transposed)
    assert_same((*ys, y), (*want, want[0]))


def test_mlp_is_two_fused_calls():
    mesh = make_mesh((4,))
    operands, specs = _mlp_operands(4, True)
    f = functools.partial(_mlp, axis_name="tp")
    mapped = jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=X)
    calls = fused_calls(compiled_text(mapped, *operands))
    # Without a GPU, weights that share a gather are one.
    assert calls == ["all_gather_matmul", "matmul_reduce_scatter"]


# ---- Attention -----------------------------------------------------------------------------------


def _attention_operands(heads, kv_heads, c=4):
    d = WIDTH
    shapes = [(d, heads, c), (d, kv_heads, c), (d, kv_heads, c), (heads, c, d)]
    biases = [(heads, c), (kv_heads, c), (kv_heads, c), (d,)]
    return draw((BATCH, POSITIONS, d), *shapes, *biases)


def _attention(x, *weights, **options):
    options = {"core": _core} | options
    return jnn.attention(x, *weights[:4], bias=weights[4:], residual=x, **options)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_attention_of_halves_by_its_default_core(dtype):
    """JAX's own fails for float16 on CPUs, once it is compiled."""
    operands = [jnp.asarray(a, dtype) for a in _attention_operands(4, 2)]
    f = functools.partial(
        _attention, core=None, is_causal=True, axis_name="tp", mesh=make_mesh((2,))
    )
    y = jax.jit(f)(*operands)
    wide = [jnp.asarray(a, jnp.float32) for a in operands]
    assert y.dtype == dtype
    bound = 32 * float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(np.asarray(y, np.float32), jax.jit(f)(*wide), rtol=bound, atol=bound)


def _core(q, k, v, *, mask=None, is_causal=False):
    """In float64 throughout: JAX's own has its softmax in float32."""
    k, v = (jnp.repeat(a, q.shape[-2] // a.shape[-2], axis=a.ndim - 2) for a in (k, v))
    scores = jnp.einsum("...shc,...thc->...hst", q, k) * q.shape[-1] ** -0.5
    if is_causal:
        scores = jnp.where(jnp.tri(scores.shape[-1], dtype=bool), scores, -jnp.inf)
    if mask is not None:
        scores = jnp.where(mask, scores, -jnp.inf)
    return jnp.einsum("...hst,...thc->...shc", jax.nn.softmax(scores), v)


def _plain_attention(x, wq, wk, wv, wo, bq, bk, bv, bo, *, rotate=None, **options):
    q, k, v = (jnp.einsum("bsd,dhc->bshc", x, w) + b for w, b in ((wq, bq), (wk, bk), (wv, bv)))
    if rotate:
        q, k = rotate(q), rotate(k)
    o = _core(q, k, v, **options)
    return x + jnp.einsum("bshc,hcd->bsd", o, wo) + bo


def _attention_specs(kv_is_whole):
    heads, bias = P(None, "tp", None), ROWS
    kv, kv_bias = (WHOLE, WHOLE) if kv_is_whole else (heads, bias)
    return (X, heads, kv, kv, P("tp", None, None), bias, kv_bias, kv_bias, WHOLE)


@pytest.mark.parametrize(
    "world, heads, kv_heads",
    [
        (2, 4, 4),
        (8, 8, 8),
        (3, 6, 3),
        (4, 8, 2),  # of every two ranks' queries one head
        (3, 6, 2),  # which ends within a rank
        (4, 4, 1),
    ],
)
def test_attention(world, heads, kv_heads):
    if world > RANKS:
        pytest.skip("too few devices")
    options = {"is_causal": True, "rotate": jnn.Rotary()}
    whole = kv_heads % world != 0
    f = functools.partial(_attention, num_kv_heads=kv_heads, **options)
    plain = functools.partial(_plain_attention, **options)
    ways = ("vma", "no vma", "auto", "explicit") if kv_heads == 2 else ("vma", "auto")
    operands = _attention_operands(heads, kv_heads)
    check(f, plain, operands, _attention_specs(whole), X, world, ways)


def test_attention_with_a_mask():
    mask = np.tri(POSITIONS, dtype=bool)[None, None] & (np.arange(POSITIONS) % 5 != 2)
    mask |= np.eye(POSITIONS, dtype=bool)
    masks = np.concatenate([mask, np.ones_like(mask)])
    operands = _attention_operands(4, 2)
    for one in (mask, masks):
        f = functools.partial(_attention, mask=jnp.asarray(one))
        plain = functools.partial(_plain_attention, mask=one)
        ways = ("vma", "auto") if one is masks else ("auto",)
        check(f, plain, operands, _attention_specs(False), X, 2, ways)


def test_attention_of_one_sequence_and_without_biases():
    x, *weights = _attention_operands(4, 2)
    f = functools.partial(jnn.attention, is_causal=True, core=_core)
    zeros = [np.zeros_like(w) for w in weights[4:]]

    def plain(x, *weights):
        return _plain_attention(x[None], *weights, *zeros, is_causal=True)[0] - x

    specs = (P("tp", None), *_attention_specs(False)[1:5])
    check(f, plain, [x[0], *weights[:4]], specs, P("tp", None), 2, ("vma",))


def test_the_attention_of_jax():
    with jax.enable_x64(False):
        operands = [jnp.asarray(a, jnp.float32) for a in _attention_operands(4, 2)]
        mesh = make_mesh((2,))
        f = functools.partial(_attention, core=None, is_causal=True, axis_name="tp", mesh=mesh)
        y = jax.jit(f)(*operands)
        np.testing.assert_allclose(y, _plain_attention(*operands, is_causal=True), atol=1e-5)


def test_rotary_is_a_rotation_by_position():
    (x,) = draw((POSITIONS, 2, 8))
    y = jnn.Rotary()(x)
    np.testing.assert_allclose(y[0], x[0])
    np.testing.assert_allclose((y**2).sum(-1), (x**2).sum(-1))
    shifted = jnn.Rotary()(x, 7 + jnp.arange(POSITIONS))
    dots = [np.einsum("shc,thc->hst", a, a) for a in map(np.asarray, (y, shifted))]
    np.testing.assert_allclose(*dots, atol=1e-9)


def test_rotary_of_llama_31():
    """Angles by the three cases of its published code: short waves, long ones, those between."""
    scaling = jnn.RotaryScaling(factor=8.0, original_max_position_embeddings=64)
    frequencies, want = 100.0 ** (-np.arange(8) / 8), []
    for frequency in frequencies:
        wave = 2 * np.pi / frequency
        if wave < 64 / 4:
            want.append(frequency)
        elif wave > 64 / 1:
            want.append(frequency / 8)
        else:
            smooth = (64 / wave - 1) / (4 - 1)
            want.append((1 - smooth) * frequency / 8 + smooth * frequency)
    assert 1 < sum(a not in (b, b / 8) for a, b in zip(want, frequencies, strict=True)) < 7
    x = np.concatenate([np.ones((1, 1, 8)), np.zeros((1, 1, 8))], -1)  # turned: cos, sin
    turned = jnn.Rotary(theta=100.0, scaling=scaling)(x, np.array([1.0]))
    np.testing.assert_allclose(turned[0, 0], [*np.cos(want), *np.sin(want)], atol=1e-12)
    linear = jnn.RotaryScaling(factor=4.0, original_max_position_embeddings=0)
    (x,) = draw((POSITIONS, 2, 8))
    at = np.arange(POSITIONS) / 4
    np.testing.assert_allclose(jnn.Rotary(scaling=linear)(x), jnn.Rotary()(x, at), atol=1e-12)


def test_rotary_of_a_part_of_each_head():
    (x,) = draw((2, POSITIONS, 2, 8))
    y = jnn.Rotary(width=6)(x)
    np.testing.assert_array_equal(y[..., 6:], x[..., 6:])
    np.testing.assert_array_equal(y[..., :6], jnn.Rotary()(x[..., :6]))
    for wrong in (7, 10):
        with pytest.raises(ValueError, match=f"width={wrong} must be even, and at most the 8"):
            jnn.Rotary(width=wrong)(x)
    with pytest.raises(ValueError, match="theta=-5 must be greater than 0"):
        jnn.Rotary(theta=-5)
    assert np.isfinite(jnn.Rotary(theta=10**10)(x)).all()
    with pytest.raises(ValueError, match="factor=0 must be greater than 0"):
        jnn.RotaryScaling(factor=0)
    with pytest.raises(ValueError, match="low_freq_factor=4.0 must be less than"):
        jnn.RotaryScaling(low_freq_factor=4.0)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"x": (2, 2, 24, 8)}, "x must be"),
        ({"query": (8, 16)}, "query must be .* reshape a matrix to it"),
        ({"bias": (None,)}, "bias must be four"),
    ],
)
def test_attention_that_does_not_fit(change, message):
    x, query, key, value, out, *_ = _attention_operands(4, 4)
    arrays = {"x": x, "query": query, "key": key, "value": value, "out": out}
    arrays |= {k: v if k == "bias" else np.zeros(v) for k, v in change.items()}
    with pytest.raises(ValueError, match=message):
        jnn.attention(**arrays, axis_name="tp", mesh=make_mesh((2,)))


# ---- The vocabulary ------------------------------------------------------------------------------


@pytest.mark.parametrize("world, sequence_parallel", [(2, True), (3, True), (3, False), (8, True)])
def test_embed(world, sequence_parallel):
    (table,) = draw((world * 5, WIDTH))
    tokens = np.random.default_rng(0).integers(0, len(table), (BATCH, POSITIONS))
    specs, out = (ROWS,), X if sequence_parallel else WHOLE

    def f(table, **options):
        return jnn.embed(jnp.asarray(tokens), table, sequence_parallel=sequence_parallel, **options)

    ways = ("vma", "no vma", "auto", "explicit") if world == 3 else ("vma", "auto")
    check(f, lambda table: table[tokens], [table], specs, out, world, ways)


def test_embed_of_tokens_that_do_not_exist():
    (table,) = draw((8, WIDTH))
    tokens = jnp.asarray([[-1, 8, 7, 0]])
    y = jnn.embed(tokens, jnp.asarray(table), axis_name="tp", mesh=make_mesh((2,)))
    np.testing.assert_array_equal(
        y, np.stack([0 * table[0], 0 * table[0], table[7], table[0]])[None]
    )


def _plain_cross_entropy(logits, targets, label_smoothing=0.0, z_loss=0.0):
    log_p = jax.nn.log_softmax(logits)
    target = jnp.take_along_axis(log_p, targets[..., None], -1)[..., 0]
    loss = -(1 - label_smoothing) * target - label_smoothing * log_p.mean(-1)
    return loss + z_loss * jax.nn.logsumexp(logits, -1) ** 2


@pytest.mark.parametrize(
    "world, options",
    [(2, {}), (3, {}), (3, {"label_smoothing": 0.1, "z_loss": 0.01}), (8, {"z_loss": 1.0})],
    ids=str,
)
def test_cross_entropy(world, options):
    rng = np.random.default_rng(0)
    logits = 10 * rng.standard_normal((BATCH, POSITIONS, world * 5)) + 300
    targets = rng.integers(0, world * 5, (BATCH, POSITIONS))

    def f(logits, **where):
        return jnn.cross_entropy(logits, jnp.asarray(targets), **options, **where)

    plain = functools.partial(_plain_cross_entropy, targets=targets, **options)
    ways = ("vma", "no vma", "auto", "explicit") if world == 3 else ("vma", "auto")
    check(f, plain, [logits], (P(None, None, "tp"),), WHOLE, world, ways)


def test_cross_entropy_of_tokens_that_cannot_be():
    """A vocabulary is padded with logits of minus infinity."""
    logits = np.random.default_rng(0).standard_normal((5, 16))
    logits[:, 13:] = -np.inf
    targets = jnp.arange(5) + 8
    f = functools.partial(jnn.cross_entropy, axis_name="tp", mesh=make_mesh((4,)))
    got = value_and_gradients(lambda a: f(a, targets), [logits])
    want = value_and_gradients(lambda a: _plain_cross_entropy(a, targets), [logits[:, :13]])
    assert_same([got[0], got[1][:, :13]], want)
    assert (got[1][:, 13:] == 0).all()


def test_cross_entropy_of_targets_that_do_not_count():
    """Out of range: NaN, for that position alone. `ignore_index`: nothing, even of a NaN."""
    logits = np.random.default_rng(0).standard_normal((5, 8))
    logits[0] = np.nan
    targets = np.array([-100, 8, -1, 3, 7])

    def f(logits, **options):
        return jnn.cross_entropy(logits, targets, axis_name="tp", mesh=make_mesh((2,)), **options)

    def ignoring(logits):
        return f(logits, ignore_index=-100, z_loss=0.1, label_smoothing=0.1)

    loss = f(logits)
    np.testing.assert_array_equal(np.isnan(loss), [True, True, True, False, False])
    np.testing.assert_allclose(loss[3:], _plain_cross_entropy(logits, targets)[3:])
    loss, pull = jax.jit(lambda a: jax.vjp(ignoring, a))(logits)
    np.testing.assert_array_equal(np.isnan(loss), [False, True, True, False, False])
    (gradient,) = pull(jnp.ones(5))
    assert loss[0] == 0 and not gradient[0].any() and not np.isnan(gradient).any()
    np.testing.assert_allclose(gradient[3:].sum(-1), 0.2 * jax.nn.logsumexp(logits[3:], -1))


def test_cross_entropy_of_whole_logits():
    targets = jnp.zeros(3, int)
    for names, spec, fits in (
        ("tp", P(), False), (("dp", "tp"), P(None, "tp"), False), ("tp", P(None, "tp"), True)
    ):  # fmt: skip
        f = jax.shard_map(
            functools.partial(jnn.cross_entropy, targets=targets, axis_name=names),
            mesh=make_mesh((2, 2), ("dp", "tp")), in_specs=spec, out_specs=P(),
        )  # fmt: skip
        if fits:
            jax.eval_shape(f, np.zeros((3, 8)))
            continue
        with pytest.raises(ValueError, match="type says that all . ranks have the same"):
            jax.eval_shape(f, np.zeros((3, 8)))


def _equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda p: hasattr(p, "eqns")
        ):
            if hasattr(inner, "eqns"):
                yield from _equations(getattr(inner, "jaxpr", inner))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_cross_entropy_never_gathers_the_logits(dtype):
    mesh, rows, vocabulary = make_mesh((4,)), 16, 4096
    logits = jnp.zeros((rows, vocabulary), dtype)
    targets = jnp.zeros(rows, jnp.int32)

    def per_rank(logits, targets):
        return jax.value_and_grad(
            lambda logits: jnn.cross_entropy(logits, targets, axis_name="tp").mean()
        )(logits)

    mapped = jax.shard_map(
        per_rank, mesh=mesh, in_specs=(COLUMNS, WHOLE), out_specs=(WHOLE, COLUMNS)
    )
    loss, gradient = jax.jit(mapped)(logits, targets)
    np.testing.assert_allclose(loss, np.log(vocabulary), rtol=1e-6)
    assert loss.dtype == jnp.float32 and gradient.dtype == dtype
    text = compiled_text(mapped, logits, targets)
    assert fused_calls(text) == ["all_reduce"]
    for collective in ("all-gather", "all-to-all", "reduce-scatter", "collective-permute"):
        assert collective not in text
    # The maximum is XLA's all-reduce; the other two numbers are the other one. The gradient has
    # none.
    sizes = {
        e.primitive.name: [v.aval.size for v in e.invars]
        for e in _equations(jax.make_jaxpr(mapped)(logits, targets).jaxpr)
        if e.primitive.name in ("pmax", "psum", "psum_invariant", "jflux_all_reduce", "all_gather")
    }
    assert sizes == {"pmax": [rows], "jflux_all_reduce": [2 * rows]}, sizes


def test_shapes_of_cross_entropy():
    with pytest.raises(ValueError, match="must have the shape of targets"):
        jnn.cross_entropy(jnp.zeros((2, 8)), jnp.zeros((3,), int), axis_name="tp")


def test_importing_it_does_not_import_flax():
    import subprocess
    import sys

    code = (
        "import jflux.nn, sys; assert 'flax' not in sys.modules; jflux.nn.TensorParallel()\n"
        "assert not hasattr(jflux.nn, 'nowhere') and 'flax' not in sys.modules\n"
        "jflux.nn.linen.MLP, jflux.nn.nnx.MLP"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_switching_the_kernels_off_changes_nothing():
    operands, specs = _mlp_operands(2, True)
    with jflux.config(fused=False):
        check(_mlp, _plain_mlp, operands, specs, X, 2, ("vma",))
