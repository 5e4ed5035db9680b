"""Gates of one kernel (jflux/_ops/experts/moe_gate.py), and their gradient, in the types that GPUs
have kernels for, against numpy in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import PLATFORM, fused_calls, make_mesh
from jax.sharding import PartitionSpec as P

import jflux
from jflux import moe
from jflux._ops.experts import moe_gate

EPS = {"bfloat16": 2.0**-8, "float16": 2.0**-10, "float32": 2.0**-18}
SCALE = 2.5


def run(f, *operands, kernels):
    """f of the operands, whose program has these kernels on GPUs."""
    program = jax.jit(f).lower(*operands).compile()
    found = fused_calls(program.as_text())
    assert sorted(found) == sorted(kernels if PLATFORM == "gpu" else []), found
    return jax.tree.map(np.asarray, program(*operands))


def gate(score, normalize, **options):
    function = moe.top_k_softmax if score == "softmax" else moe.top_k_sigmoid
    return functools.partial(function, normalize=normalize, scale=SCALE, **options)


def drawn(shape, dtype, *, masked):
    """(logits, of which some are equal, and mask)."""
    tokens, experts, _ = shape
    rng = np.random.default_rng([*shape, len(dtype)])
    logits = 2 * rng.standard_normal((tokens, experts))
    logits = np.where(rng.random(logits.shape) < 0.3, np.round(2 * logits) / 2, logits)
    logits = np.where(rng.random(logits.shape) < 0.02, -np.inf, logits)
    mask = rng.random(tokens) < 0.7
    if masked:
        logits[~mask] = np.nan
    logits += 0.0  # 0 is larger than -0
    return logits.astype(jnp.dtype(dtype)), mask if masked else None, rng


def sigmoid(x):
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-x))


SHAPES = [(37, 128, 8), (1, 1, 1), (9, 7, 7), (5, 60, 3), (3, 1024, 17), (5000, 8, 2)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_values_and_gradients(shape, score, normalize, dtype):
    k = shape[2]
    logits, mask, rng = drawn(shape, dtype, masked=k > 1)
    bias = rng.standard_normal(shape[1]).astype(np.float32) if score == "sigmoid" else None
    options = {"bias": bias} if score == "sigmoid" else {}
    ct = rng.standard_normal((shape[0], k)).astype(np.float32)

    def both(logits, mask, ct):
        f = functools.partial(gate(score, normalize, **options), k=k, mask=mask)
        (indices, weights), pull = jax.vjp(f, logits)
        return indices, weights, pull((np.zeros(indices.shape, jax.dtypes.float0), ct))[0]

    kernels = ["moe_gate", "moe_gate_gradient"]
    indices, weights, gradient = run(both, logits, mask, ct, kernels=kernels)
    assert gradient.dtype == jnp.dtype(dtype)

    real = np.ones(shape[0], bool) if mask is None else mask
    assert (indices[~real] == -1).all() and not weights[~real].any()
    assert not gradient[~real].astype(np.float32).any()
    wide = logits[real].astype(np.float64)
    indices, weights, gradient, ct = (a[real] for a in (indices, weights, gradient, ct))
    choice = wide if bias is None else sigmoid(wide) + bias
    want = np.argsort(-choice, 1, kind="stable")[:, :k]
    if bias is None:
        np.testing.assert_array_equal(indices, want)
    else:  # of sums that differ by their rounding any may be chosen
        best, found = (np.take_along_axis(choice, i, 1) for i in (want, indices))
        np.testing.assert_allclose(found, best, atol=1e-6)
        assert all(len(set(row)) == k for row in indices)

    scores = sigmoid(wide) if score == "sigmoid" else np.exp(wide)
    chosen = np.take_along_axis(scores, indices, 1)
    sums = chosen if normalize else scores if score == "softmax" else np.ones((len(wide), 1))
    total = sums.sum(1, keepdims=True)
    np.testing.assert_allclose(weights, SCALE * chosen / total, rtol=2e-5)
    # By the chain rule, of scores / total.
    own = np.zeros_like(scores)
    np.put_along_axis(own, indices, SCALE * ct / total, 1)
    through = -(SCALE * ct * chosen).sum(1, keepdims=True) / total**2
    if normalize:
        np.put_along_axis(own, indices, SCALE * ct / total + through, 1)
    elif score == "softmax":
        own += through
    slope = scores * sigmoid(-wide) if score == "sigmoid" else scores
    size = np.abs(weights * ct).sum(1, keepdims=True)
    error = np.abs(gradient.astype(np.float64) - own * slope)
    assert (error <= EPS[dtype] * np.abs(own * slope) + 2e-5 * size + 2.0**-24).all()


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalize", [True, False])
def test_derivatives_of_every_order_and_mode(score, normalize):
    """Against JAX's own of the definition."""
    logits, mask, _ = drawn((4, 6, 3), "float32", masked=True)
    logits = np.where(np.isinf(logits), -3, logits)

    def defined(logits):
        real = jnp.where(mask[:, None], logits, 0)
        _, indices = jax.lax.top_k(jax.lax.stop_gradient(real), 3)
        weights = moe_gate.weights_of(score, real, indices, normalize, SCALE)
        return moe_gate.of_real_tokens(indices, weights, mask)

    def loss(f, logits):
        return jnp.sum(jnp.sin(f(logits)[1]))

    own = functools.partial(gate(score, normalize), k=3, mask=mask)
    for order in (jax.grad, jax.jacfwd, jax.hessian, lambda f: jax.jacrev(jax.jacrev(f))):
        got, want = (jax.jit(order(functools.partial(loss, f)))(logits) for f in (own, defined))
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dims", [(0, None), (1, 0)])
def test_batches(dims):
    """Of one bias, and of one each."""
    rng = np.random.default_rng(1)
    logits = np.round(rng.standard_normal((2, 5, 3, 8)), 1)[:, :, : 3 if dims[1] is None else 2]
    bias = rng.standard_normal((2, 8)).astype(np.float32)
    logits = jnp.asarray(np.moveaxis(logits[:, :, 0], 0, dims[0]), jnp.float32)

    def f(logits, bias):
        return moe.top_k_sigmoid(logits, 3, bias=bias)

    given = bias[0] if dims[1] is None else bias
    got = jax.jit(jax.vmap(f, dims))(logits, given)
    for i in range(2):
        want = f(jnp.take(logits, i, dims[0]), bias[i if dims[1] == 0 else 0])
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a[i], b, rtol=1e-6)


def test_ranks_choose_for_their_own_tokens():
    mesh = make_mesh((2,))
    logits, mask, _ = drawn((6, 8, 2), "float32", masked=True)

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(P("tp"), P("tp"), P()), out_specs=P("tp")
    )
    def f(logits, mask, bias):
        return moe.top_k_sigmoid(logits, 2, mask=mask, bias=bias)

    def loss(f, logits):
        return jnp.sum(f(logits, mask, np.arange(8.0))[1] ** 2)

    def alone(logits, mask, bias):
        return moe.top_k_sigmoid(logits, 2, mask=mask, bias=bias)

    got, want = (
        jax.jit(jax.value_and_grad(functools.partial(loss, g)))(logits) for g in (f, alone)
    )
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("shape", [(23, 256, 8, 8, 4), (7, 31, 5, 31, 5), (6, 60, 3, 1, 1)])
def test_groups(shape, score):
    """The best groups' experts alone; of scores that differ by their rounding any is the best."""
    *shape, groups, top = shape
    logits, mask, rng = drawn(shape, "float32", masked=True)
    bias = rng.standard_normal(shape[1]).astype(np.float32)
    options = {"num_groups": groups, "top_groups": top, "score": score, "scale": SCALE}

    def f(logits, mask):
        return moe.group_limited_top_k(logits, shape[2], bias=bias, mask=mask, **options)

    indices, _ = run(f, logits, mask, kernels=["moe_gate"])
    assert (indices[~mask] == -1).all()
    wide, indices = logits[mask].astype(np.float64), indices[mask]
    scores = np.exp(wide) / np.exp(wide).sum(1, keepdims=True)
    choice = (sigmoid(wide) if score == "sigmoid" else scores) + bias
    grouped = np.sort(choice.reshape(len(wide), groups, -1), -1)[:, :, ::-1]
    of_groups = grouped[:, :, : 2 if score == "sigmoid" else 1].sum(-1)
    allowed = np.argsort(-of_groups, 1, kind="stable")[:, :top]
    group = np.arange(shape[1]) // (shape[1] // groups)
    is_allowed = (group[None, :, None] == allowed[:, None, :]).any(-1)
    want = -np.sort(-np.where(is_allowed, choice, -np.inf), 1)[:, : shape[2]]
    np.testing.assert_allclose(np.take_along_axis(choice, indices, 1), want, atol=1e-6)
    assert all(len(set(row)) == shape[2] for row in indices)


def test_calls_that_no_kernel_takes():
    reasons = {
        "33 of 64 experts": (np.zeros((4, 64), np.float32), 33),
        "2 of 1025 experts": (np.zeros((4, 1025), np.float32), 2),
        "an operand is empty": (np.zeros((0, 8), np.float32), 2),
    }
    for reason, (logits, k) in reasons.items():
        with jflux.config(strict=True):
            indices, weights = run(lambda x, k=k: moe.top_k_softmax(x, k), logits, kernels=[])
        assert indices.shape == weights.shape == (len(logits), k)
        params = moe_gate.Params(k, "softmax", True, 1.0, logits.shape[1], logits.dtype)
        if PLATFORM == "gpu":
            assert reason in moe_gate._why_not([logits], params, "cuda")
