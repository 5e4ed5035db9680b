"""jflux.checkpoint_policies: what is kept, and what the backward pass computes again."""

import functools
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from harness import PLATFORM, RANKS, compiled_text, dots, fused_calls, make_mesh, run
from jax._src.ad_checkpoint import saved_residuals
from jax.sharding import PartitionSpec as P
from layers import assert_near, in_float64

import jflux
from jflux import checkpoint_policies as policies
from jflux._stress.calls import normal

pytestmark = pytest.mark.usefixtures("small_sums")
ROWS, D, H, K = 2 * RANKS, 16, 8 * RANKS, 12
ARGS = (
    normal(0, (ROWS, D), jnp.bfloat16),
    normal(1, (D, H), jnp.bfloat16),
    normal(2, (H, D), jnp.bfloat16),
    normal(3, (D, K), jnp.bfloat16),
)
SPECS = (P("tp"), P(None, "tp"), P("tp"), P())


def _loss(ops, policy=None):
    """A block of two of jflux's products, one of XLA's, and one of two activations."""

    def block(x, up, down, head):
        h = ops.all_gather_matmul(x, up, axis_name="tp", activation="silu")
        y = jnp.tanh(ops.matmul_reduce_scatter(h, down, axis_name="tp"))
        scores = jnp.einsum("ri,si->rs", y, y)
        return jnp.sum(jnp.sin(scores)) + jnp.sum(jnp.sin(y @ head))

    if policy is not None:
        block = jax.checkpoint(block, policy=policy)
    mesh = make_mesh((RANKS,))

    def loss(*args):
        mapped = jax.shard_map(
            lambda *a: block(*a)[None], mesh=mesh, in_specs=SPECS, out_specs=P("tp")
        )
        return jnp.sum(mapped(*args))

    return loss


def _step(ops, policy=None):
    return jax.value_and_grad(_loss(ops, policy), (0, 1, 2, 3))


#: By policy: calls of each product, forward and backward.
CALLS = {
    jax.checkpoint_policies.everything_saveable: 2,
    jax.checkpoint_policies.dots_saveable: 3,
    jax.checkpoint_policies.nothing_saveable: 3,
    policies.products_saveable: 2,
    policies.products_with_no_batch_dims_saveable: 2,
    policies.products_saveable_gathering_again: 2,
}
EACH = pytest.mark.parametrize(
    "policy",
    CALLS,
    ids=["everything", "dots", "nothing", "products", "no batch dims", "gathering again"],
)


@EACH
def test_what_runs_again(policy):
    text = compiled_text(_step(jflux, policy), *ARGS)
    calls = Counter(fused_calls(text))
    assert calls["all_gather_matmul"] == CALLS[policy]
    assert calls["matmul_reduce_scatter"] >= 2  # its y is needed again where it was not kept
    again = policy is policies.products_saveable_gathering_again
    if policy in (policies.products_saveable, policies.products_with_no_batch_dims_saveable):
        assert calls == {"all_gather_matmul": 2, "matmul_reduce_scatter": 2}
        assert "all-gather" not in text
    if again:
        assert text.count(" all-gather(") + text.count("all-gather-start(") == 1


@pytest.mark.skipif(PLATFORM != "cpu", reason="elsewhere products have other names")
def test_products_of_xla():
    """Kept, and made again, with jflux's."""
    numbers = {p: dots(compiled_text(_step(jflux, p), *ARGS)) for p in CALLS}
    kept = numbers[jax.checkpoint_policies.everything_saveable]
    assert numbers[policies.products_saveable] == kept
    assert numbers[jax.checkpoint_policies.nothing_saveable] == kept + 2


def test_batch_dimensions():
    """A product of two activations."""

    def attention(q, k):
        return jnp.sum(jnp.sin(jnp.einsum("bqd,bkd->bqk", q, k)))

    q = jnp.ones((2, 3, 4))
    kept = [
        len(saved_residuals(jax.checkpoint(attention, policy=policy), q, q))
        for policy in (policies.products_saveable, policies.products_with_no_batch_dims_saveable)
    ]
    assert kept == [3, 2]


@EACH
def test_values(policy):
    got = run(jax.jit(_step(jflux, policy)), *ARGS)
    want = in_float64(_step(jflux.reference), *ARGS)
    assert_near(got, want, roundings=60)


def test_what_is_kept():
    """What an activation takes and returns, with the gathered x or without it."""

    def kept(policy):
        found = saved_residuals(_loss(jflux, policy), *ARGS)
        return Counter(
            (aval.shape, aval.dtype.name) for aval, why in found if "argument" not in why
        )

    gathered = ((RANKS * ROWS, D), "bfloat16")
    sums = ((RANKS * ROWS, H // RANKS), "bfloat16")
    all_kept, less = (
        kept(policies.products_saveable),
        kept(policies.products_saveable_gathering_again),
    )
    assert all_kept[gathered] == less[gathered] + 1
    assert all_kept[sums] == less[sums] == 2  # what the activation takes, and what it returns
    assert not kept(jax.checkpoint_policies.nothing_saveable)


def test_together_with_policies_of_jax():
    both = jax.checkpoint_policies.save_from_both_policies(
        policies.products_saveable, jax.checkpoint_policies.save_only_these_names("mine")
    )
    calls = Counter(fused_calls(compiled_text(_step(jflux, both), *ARGS)))
    assert calls == {"all_gather_matmul": 2, "matmul_reduce_scatter": 2}


@pytest.mark.parametrize(
    "op, shapes, options",
    [
        ("all_to_all_matmul", ((RANKS, 4), (4 * RANKS, 4)), {"split_axis": 0, "concat_axis": 1}),
        ("matmul_all_to_all", ((4, 4), (4, 8 * RANKS)), {"split_axis": 1, "concat_axis": 0}),
        ("matmul_all_reduce", ((128 * RANKS, 8), (8, 8)), {}),
    ],
)
def test_each_other_product_is_kept(op, shapes, options):
    mesh = make_mesh((RANKS,))
    args = [normal(i, (RANKS, *shape), jnp.bfloat16) for i, shape in enumerate(shapes)]

    def calls(policy):
        @functools.partial(jax.checkpoint, policy=policy)
        def loss(x, w):
            return jnp.sum(jnp.sin(getattr(jflux, op)(x, w, axis_name="tp", **options)))

        def step(x, w):
            value, gradients = jax.value_and_grad(loss, (0, 1))(x[0], w[0])
            return value[None], [g[None] for g in gradients]

        mapped = jax.shard_map(
            step, mesh=mesh, in_specs=P("tp"), out_specs=P("tp"), check_vma=False
        )
        # As lowered: XLA:CPU of jaxlib 0.10 drops the barrier between a call and its repetition,
        # and makes one of both where their operands are arguments of the program.
        return jax.jit(mapped).lower(*args).as_text().count(f"@jflux_{op}(")

    assert calls(jax.checkpoint_policies.dots_saveable) == 2
    for policy in (policies.products_saveable, policies.products_saveable_gathering_again):
        assert calls(policy) == 1
