"""jflux.fuse: what it finds in functions of ranks, and what it leaves alone."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fused import N, check, gather, normal, of_ranks, ops, same, scatter
from harness import PLATFORM, make_mesh
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import jflux

pytestmark = pytest.mark.skipif(PLATFORM == "gpu", reason="kernels of GPUs take no float64")


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


# ---- What it finds -------------------------------------------------------------------------------


X, W = (2, 3, 8), (8, 6)

#: Products of a gathered x [b, s, d], a head's output [b, s, h, e] among them.
GATHERED = {
    "bsd,df->bsf": ((2, 3, 8), (8, 6)),
    "bsd,fd->bsf": ((2, 3, 8), (6, 8)),
    "bsd,dhe->bshe": ((2, 3, 8), (8, 2, 3)),
    "bsd,hde->bshe": ((2, 3, 8), (2, 8, 3)),
    "bsd,hed->bshe": ((2, 3, 8), (2, 3, 8)),
    "bsd,cdf->cbsf": ((2, 3, 8), (2, 8, 3)),
    "bshe,hed->bsd": ((2, 3, 2, 4), (2, 4, 6)),
    "bshe,dhe->bsd": ((2, 3, 2, 4), (6, 2, 4)),
    "bshe,ehd->bsd": ((2, 3, 2, 4), (4, 2, 6)),
    "df,bsd->bsf": ((8, 6), (2, 3, 8)),
    "bsd,df->fsb": ((2, 3, 8), (8, 6)),
    "bsd,bde->bse": ((2, 3, 8), (2, 8, 3)),  # a batch dimension
}
#: Of which no op is taken.
NOT_FUSED = {"bsd,bde->bse", "bsd,df->fsb"}


@pytest.mark.parametrize("equation", GATHERED)
def test_einsums_of_a_gathered_array(equation):
    shapes = GATHERED[equation]
    args = [normal(*shape, seed=i) for i, shape in enumerate(shapes)]
    x = 1 if equation.startswith("df") else 0

    def f(*args):
        args = list(args)
        args[x] = gather(args[x])
        return jnp.einsum(equation, *args)

    check(f, args, [] if equation in NOT_FUSED else ["all_gather_matmul"])


SCATTERED = {
    "bsf,fd->bsd": ((2, 4, 8), (8, 6)),
    "bsf,df->bsd": ((2, 4, 8), (6, 8)),
    "bshe,hed->bsd": ((2, 4, 2, 3), (2, 3, 6)),
    "bshe,dhe->bsd": ((2, 4, 2, 3), (6, 2, 3)),
    "fd,bsf->bsd": ((8, 6), (2, 4, 8)),
    "bsf,fd->sbd": ((2, 4, 8), (8, 6)),
    "bhse,hed->bsd": ((2, 2, 4, 3), (2, 3, 6)),
}


@pytest.mark.parametrize("equation", SCATTERED)
@pytest.mark.parametrize("summed", ["scatter", "psum"])
def test_einsums_before_a_sum(equation, summed):
    args = [normal(*shape, seed=i) for i, shape in enumerate(SCATTERED[equation])]
    positions = equation.rpartition(">")[2].index("s")
    collective = (
        functools.partial(scatter, axis=positions)
        if summed == "scatter"
        else lambda y: lax.psum(y, "tp") / 1
    )
    op = "matmul_reduce_scatter" if summed == "scatter" else "matmul_all_reduce"

    def f(*args):
        y = collective(jnp.einsum(equation, *args))
        return y if summed == "scatter" else lax.pcast(y, "tp", to="varying")

    check(f, args, [op])


def test_products_of_one_gather_share_it():
    def f(x, q, k, v):
        h = gather(x)
        a = jnp.sin(h @ q)
        return a * (h @ k) + h @ (v * 2) + jnp.sum(h)  # the gathered array is used too

    args = [normal(2, 3, 8), *(normal(8, 6, seed=i) for i in range(3))]
    check(f, args, ["all_gather_matmul"])
    (found,) = jflux.fuse(of_ranks(f, *args)).report(*args).taken
    assert found.before == ("all_gather", "dot_general", "dot_general", "dot_general")


def test_a_weight_that_needs_another_product_of_the_gather():
    def f(x, q, k):
        h = gather(x)
        first = h @ q
        return first + h @ (k + jnp.sum(first))

    args = [normal(2, 3, 8), normal(8, 6), normal(8, 6, seed=1)]
    check(f, args, ["all_gather_matmul"])
    (found,) = jflux.fuse(of_ranks(f, *args)).report(*args).taken
    assert found.before == ("all_gather", "dot_general")


def test_sums_of_products_and_a_residual():
    def f(x, a, b, w, v):
        return x + scatter(a @ w + (b @ v))

    args = [normal(2, 2, 6), normal(2, 4, 8), normal(2, 4, 3), normal(8, 6), normal(3, 6)]
    check(f, args, ["matmul_reduce_scatter"])
    (found,) = jflux.fuse(of_ranks(f, *args)).report(*args).taken
    assert sorted(found.before) == ["add", "add", "dot_general", "dot_general", "reduce_scatter"]


@pytest.mark.parametrize("summed", ["scatter", "psum"])
def test_a_residual_in_a_wider_type(summed):
    def f(x, w, r):
        y = scatter(x @ w) if summed == "scatter" else lax.psum(x @ w, "tp")
        r = r[:, : y.shape[1]] if summed == "scatter" else lax.psum(r, "tp")
        total = (y.astype(jnp.float32) + r.astype(jnp.float32)).astype(jnp.bfloat16)
        return lax.pcast(total, "tp", to="varying") if summed == "psum" else total

    args = [normal(*s, dtype=jnp.bfloat16) for s in ((2, 4, 8), (8, 6), (2, 4, 6))]
    plain = of_ranks(f, *args)
    fused = jflux.fuse(plain)
    (found,) = [one for one in fused.report(*args).taken if "dot_general" in one.before]
    assert "add" in found.before

    def both(f):
        def loss(*args):
            y = f(*args).astype(jnp.float32)
            return jnp.sum(jnp.sin(y)), y

        return jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(*args)

    for exact, got in zip(*map(jax.tree.leaves, (both(plain), both(fused))), strict=True):
        np.testing.assert_allclose(*(np.asarray(a, np.float32) for a in (got, exact)), 2e-2, 2e-2)


def _sum_is_used(y, r):
    total = y.astype(jnp.float32) + r.astype(jnp.float32)
    return total.astype(jnp.bfloat16), jnp.sin(total)


def _stays_wide(y, r):
    return y.astype(jnp.float32) + r.astype(jnp.float32)


def _no_cast(y, r):
    return (y.astype(jnp.float32) + jnp.sin(r.astype(jnp.float32))).astype(jnp.bfloat16)


def _with_itself(y, r):
    wide = y.astype(jnp.float32)
    return (wide + wide).astype(jnp.bfloat16) + r


@pytest.mark.parametrize("after", [_sum_is_used, _stays_wide, _no_cast, _with_itself])
def test_wider_sums_that_are_no_residual(after):
    args = [normal(*s, dtype=jnp.bfloat16) for s in ((2, 4, 8), (8, 6), (2, 2, 6))]
    plain = of_ranks(lambda x, w, r: after(scatter(x @ w), r), *args)
    fused = jflux.fuse(plain)
    assert "added=()" in str(jax.make_jaxpr(fused)(*args))
    for exact, got in zip(*map(jax.tree.leaves, (plain(*args), fused(*args))), strict=True):
        np.testing.assert_allclose(*(np.asarray(a, np.float32) for a in (got, exact)), 2e-2, 2e-2)


@pytest.mark.parametrize("summed", [lambda y: lax.psum(y, "tp"), scatter])
def test_names_of_what_is_summed(summed):
    """They become those of the sum, and policies find them."""
    x, w = normal(4, 8), normal(8, 6)

    def f(x, w):
        return jnp.sin(summed(checkpoint_name(x @ w, "part"))).astype(x.dtype)

    op = "matmul_reduce_scatter" if summed is scatter else "matmul_all_reduce"
    check(f, (x, w), [op])
    policy = jax.checkpoint_policies.save_only_these_names("part")
    check(jax.checkpoint(f, policy=policy), (x, w), [op])
    jaxpr = str(jax.make_jaxpr(jflux.fuse(of_ranks(f, x, w)))(x, w))
    assert "name=part" in jaxpr and "dot_general" not in jaxpr


def test_a_residual_of_a_sum_for_all_ranks():
    def f(x, w, r):
        same_on_all = lax.pmax(r, "tp") if False else lax.psum(r, "tp")
        return lax.pcast(lax.psum(x @ w, "tp") + same_on_all, "tp", to="varying")

    args = [normal(2, 4, 8), normal(8, 6), normal(2, 4, 6)]
    check(f, args, ["matmul_all_reduce"])
    # Without types of variation nobody knows that the array is the same on all ranks.
    fused = jflux.fuse(of_ranks(lambda x, w, r: lax.psum(x @ w, "tp") + r, *args, check_vma=False))
    (found,) = fused.report(*args).taken
    assert found.before == ("dot_general", "psum")


def test_through_views_and_casts():
    def f(x, w):
        h = gather(x).reshape(-1, 2, 4).astype(jnp.float32)  # [b s, 2, 4]
        y = lax.dot_general(h, w.astype(jnp.float32), (((1, 2), (1, 0)), ((), ())))
        y = y.reshape(2, -1, 6).swapaxes(0, 1)  # [s, b, 6]
        return y, jnp.sum(h, 0)

    args = [normal(2, 3, 8), normal(4, 2, 6)]
    plain = of_ranks(f, *args)
    fused = jflux.fuse(plain)
    assert ops(fused.report(*args)) == ["all_gather_matmul"]
    same(plain(*args), jax.jit(fused)(*args), 1e-6)
    text = str(jax.make_jaxpr(fused)(*args))
    assert "f32[2,3,2,4]" in text or "f32[2,3,8]" in text  # the cast comes before the gather


ACTIVATIONS = {
    "silu": jax.nn.silu,
    "swish": lambda x: x * jax.nn.sigmoid(x),
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": jax.nn.gelu,
    "relu": jax.nn.relu,
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_epilogues(name):
    act = ACTIVATIONS[name]

    def f(x, w, b, v, c):
        h = gather(x)
        return act(h @ w + b) * (h @ v + c)

    def alone(x, w, b, v, c):
        return act(gather(x) @ w + b) + jnp.sum(v) + jnp.sum(c)

    args = [normal(2, 3, 8), *(normal(*s, seed=i) for i, s in enumerate([(8, 6), (6,)] * 2))]
    for one in (f, alone):
        if name != "gelu":  # whose own derivative fails in shard_map under JAX 0.12
            check(one, args, ["all_gather_matmul"])
        plain = of_ranks(one, *args)
        same(jax.jit(plain)(*args), jax.jit(jflux.fuse(plain))(*args))
        text = str(jax.make_jaxpr(jflux.fuse(of_ranks(one, *args)))(*args))
        wanted = {"swish": "silu"}.get(name, name)
        assert f"activation='{wanted}'" in text and ("gated=True" in text) is (one is f)
        assert "dot_general" not in text and "logistic" not in text


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_gate_whose_products_are_needed_again(check_vma):
    def f(x, w, v):
        h = gather(x)
        up, gate = h @ v, h @ w
        return jax.nn.silu(gate) * up, jnp.sin(gate), up + jnp.sum(h)

    args = [normal(2, 3, 8), normal(8, 6), normal(8, 6, seed=1)]
    check(f, args, ["all_gather_matmul"], check_vma=check_vma)
    step = jax.grad(lambda *args: sum(map(jnp.sum, of_ranks(f, *args)(*args))), (0, 1, 2))
    for one in (of_ranks(f, *args), step):
        text = str(jax.make_jaxpr(jflux.fuse(one))(*args))
        assert "results=('y', 'sums', 'gathered')" in text and "gated=True" in text


@pytest.mark.parametrize("silu", [jax.nn.silu, lambda y: y * jax.nn.sigmoid(y)])
def test_an_activation_whose_product_is_needed_again(silu):
    def f(x, w):
        y = gather(x) @ w
        return silu(y), jnp.sin(y)

    args = [normal(2, 3, 8), normal(8, 6)]
    check(f, args, ["all_gather_matmul"])
    text = str(jax.make_jaxpr(jflux.fuse(of_ranks(f, *args)))(*args))
    assert "results=('y', 'sums')" in text and "activation='silu'" in text


def test_an_activation_in_float32():
    def f(x, w, v):
        h = gather(x)
        gate, up = ((h @ w).astype(jnp.float32) for w in (w, v))
        return (jax.nn.silu(gate) * up).astype(jnp.bfloat16)

    args = [normal(*s, dtype=jnp.bfloat16, seed=i) for i, s in enumerate([X, W, W])]
    plain = of_ranks(f, *args)
    text = str(jax.make_jaxpr(jflux.fuse(plain))(*args))
    assert "gated=True" in text and "logistic" not in text
    exact, fused = plain(*args), jflux.fuse(plain)(*args)
    np.testing.assert_allclose(*(np.asarray(a, np.float32) for a in (exact, fused)), 2e-2, 2e-2)
    step = jax.grad(lambda *args: jnp.sum(plain(*args).astype(jnp.float32)), (0, 1, 2))
    assert "results=('y', 'sums', 'gathered')" in str(jax.make_jaxpr(jflux.fuse(step))(*args))


def test_biases_and_no_activation():
    def f(x, q, k, v, b, c):
        h = gather(x)
        k = jnp.einsum("bsd,dhe->bshe", h, k) + c
        other = jnp.exp(h @ v)  # no op's activation
        return jnp.sin(h @ q + b), k, other, (h @ q)[..., 0] * 2

    args = [normal(2, 3, 8), normal(8, 6), normal(8, 2, 3), normal(8, 5), normal(6), normal(2, 3)]
    check(f, args, ["all_gather_matmul"])
    text = str(jax.make_jaxpr(jflux.fuse(of_ranks(f, *args)))(*args))
    assert "biased=(True, True, False, False)" in text or "biased=(" in text


def _mean(y):
    return jnp.mean(y, -1, keepdims=True)


def _fast_variance(y):
    return jnp.maximum(0, _mean(lax.square(y)) - lax.square(_mean(y)))


def _of_row(y, s):
    return y * lax.rsqrt(jnp.mean(y * y) + 1e-5) * s


NORMS = {
    "flax rms": lambda y, s, b: y * (lax.rsqrt(_mean(lax.square(y)) + 1e-6) * s),
    "haiku rms": lambda y, s, b: s * lax.rsqrt(_mean(y**2) + 1e-5) * y,
    "quotient": lambda y, s, b: y / jnp.sqrt(_mean(y * y) + 1e-5) * s,
    "rows": lambda y, s, b: jax.vmap(jax.vmap(_of_row, (0, None)), (0, None))(y, s),
    "flax layer": lambda y, s, b: (y - _mean(y)) * (lax.rsqrt(_fast_variance(y) + 1e-6) * s) + b,
    "layer": lambda y, s, b: (
        (y - _mean(y)) * lax.rsqrt(jnp.var(y, -1, keepdims=True) + 1e-5) * s + b
    ),
}


@pytest.mark.parametrize("name", NORMS)
def test_norms_of_a_sum(name):
    def f(x, w, s, b):
        s, b = (lax.psum(a, "tp") / N for a in (s, b))
        y = lax.psum(x @ w, "tp")
        return lax.pcast(y + jnp.sin(NORMS[name](y, s, b)), "tp", to="varying")

    args = [normal(2, 4, 8), normal(8, 6), normal(6), normal(6, seed=1)]
    check(f, args, ["matmul_all_reduce"])
    text = str(jax.make_jaxpr(jflux.fuse(of_ranks(f, *args)))(*args))
    assert "rsqrt" not in text and ("'layer'" if "layer" in name else "'rms'") in text


def test_other_sums_of_rows_are_no_norms():
    def f(x, w, s):
        y = lax.psum(x @ w, "tp")
        a = y * lax.rsqrt(jnp.mean(y * y, 1, keepdims=True) + 1e-5) * s  # of columns
        b = y * lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) * 2 + 1e-5) * s
        c = y * lax.rsqrt(jnp.sum(y * y, -1, keepdims=True) + 1e-5) * s
        return a + b + c

    args = [normal(2, 4, 8), normal(8, 6), normal(6)]
    check(f, args, ["matmul_all_reduce"])
    assert str(jax.make_jaxpr(jflux.fuse(of_ranks(f, *args)))(*args)).count("rsqrt") == 3


def heads(x, split, concat):
    return lax.all_to_all(x, "tp", split, concat, tiled=True)


def test_exchanges_of_heads():
    def f(x, wq, wk, wo):
        q = heads(jnp.einsum("bsd,dhe->bshe", x, wq), 2, 1)
        k = heads((x @ wk).reshape(*x.shape[:2], 4, 3), 2, 1)
        y = heads(jnp.sin(q) * k, 1, 2)
        return jnp.einsum("bshe,hed->bsd", y, wo)

    args = [normal(2, 4, 8), normal(8, 4, 3), normal(8, 12), normal(4, 3, 8)]
    check(f, args, ["matmul_all_to_all", "matmul_all_to_all", "all_to_all_matmul"])


def test_ulysses_in_plain_jax_becomes_the_op():
    """The same exchanges around the same attention, forward and backward."""

    def plain(*arrays):
        y = jax.nn.dot_product_attention(*(heads(a, 2, 1) for a in arrays), is_causal=True)
        return heads(y, 1, 2)

    def step(f, *args):
        def loss(*args):
            return jnp.sum(jnp.sin(of_ranks(f, *args)(*args)))

        return jax.value_and_grad(loss, (0, 1, 2))

    ours = functools.partial(jflux.ulysses_attention, axis_name="tp", causal=True)
    args = [normal(2, 6, h, 8, seed=i) for i, h in enumerate((4, 2, 2))]
    fused, by_hand = jflux.fuse(step(plain, *args)), step(ours, *args)
    assert [one.op for one in fused.report(*args) if one.taken] == ["all_to_all"] * 8
    found, wanted = (
        [dataclasses.replace(call, lines=()) for call in jflux.explain(f, *args)]
        for f in (fused, by_hand)
    )
    assert found == wanted and len(found) == 4
    same(jax.jit(fused)(*args), jax.jit(by_hand)(*args))


def test_exchanges_that_make_partial_sums():
    def f(x, w, v):
        y = heads(x, 2, 1) @ w  # a part of the contracted dimension on each rank
        z = heads(x @ v, 1, 2)
        return y, z, jnp.sum(heads(x, 2, 1))

    args = [normal(2, 4, 8), normal(4, 6), normal(8, 6)]
    check(f, args, ["all_to_all_matmul", "matmul_all_to_all"])


def test_collectives_that_are_left():
    def f(x, w, sizes):
        y = lax.ragged_dot(jnp.sin(x), w, sizes)
        y = y + lax.all_gather(x, "tp")[0] @ w[0]  # not tiled
        y = y + lax.psum_scatter(jnp.stack([y, y]), "tp", scatter_dimension=0)
        groups = lax.psum(jnp.cos(x), "tp", axis_index_groups=[[0], [1]])
        return y + jnp.sum(groups), lax.all_to_all(jnp.exp(x), "tp", 0, 1, tiled=True)

    x, w = normal(4, 8), normal(3, 8, 6)
    sizes = jnp.asarray([[1, 2, 1], [0, 3, 0]], jnp.int32)
    plain = of_ranks(f, x, w, sizes, check_vma=False)
    fused = jflux.fuse(plain)
    found = fused.report(x, w, sizes)
    names = ["grouped_matmul", "all_gather", "reduce_scatter", "all_reduce", "all_to_all"]
    assert [one.op for one in found] == names and all(one.taken for one in found)
    same(jax.jit(plain)(x, w, sizes), jax.jit(fused)(x, w, sizes))
    large = jax.ShapeDtypeStruct((2, 1 << 23, 8), jnp.float64)
    (found,) = jflux.fuse(of_ranks(lambda x: lax.psum(x, "tp") * 0 + x, large)).report(large)
    assert not found.taken and found.reason == "what is summed has other uses"


def test_ragged_exchanges_are_taken():
    def f(module, x, offsets, sizes):
        out = jnp.zeros((8, *x.shape[1:]), x.dtype) + x[0, 0] * 0
        at = jnp.full(2, 4) * lax.axis_index("tp")
        return module.ragged_all_to_all(x, out, offsets, sizes, at, sizes, axis_name="tp")

    x, offsets = normal(4, 3), jnp.asarray([[0, 2], [0, 2]], jnp.int32)
    sizes = jnp.full((2, 2), 2, jnp.int32)
    plain, ours = (
        of_ranks(functools.partial(f, module), x, offsets, sizes) for module in (lax, jflux)
    )
    fused = jflux.fuse(plain)
    (found,) = fused.report(x, offsets, sizes).taken
    assert found.op == "ragged_all_to_all"
    same(jax.jit(ours)(x, offsets, sizes), jax.jit(fused)(x, offsets, sizes))


# ---- What it leaves alone ------------------------------------------------------------------------


def _contracted(x, w):
    return jnp.einsum("bsd,bsf->df", gather(x), w)


def _used_twice(x, w):
    y = x @ w
    return scatter(y) + jnp.sum(y)


def _rounded(x, w):
    return scatter((x @ w).astype(jnp.float32).astype(jnp.float64))


def _groups(x, w):
    return lax.all_gather(x, "tp", axis=1, tiled=True, axis_index_groups=[[1, 0]]) @ w


def _not_tiled(x, w):
    return lax.all_gather(x, "tp", axis=1) @ w


def _columns(x, w):
    return scatter(x @ w, 2)


def _another_type(x, w):
    h = gather(x)
    return h.astype(jnp.float32) @ w.astype(jnp.float32), jnp.sum(h)


def _mixed(x, w):
    return lax.dot_general(gather(x), w.astype(jnp.float32), (((2,), (0,)), ((), ())))


def _itself(x, w):
    h = gather(x[0], 0)
    return h @ h.T


def _transposed(x, w):
    return jnp.einsum("df,bsd->fbs", w, gather(x))


def _of_a_weight(x, w):
    return jnp.einsum("df,bsd->bsf", gather(w), x)


ALONE = {
    _of_a_weight: "the product's result would be transposed",
    _transposed: "the product's result would be transposed",
    _contracted: "the gathered dimension is contracted",
    _used_twice: "the product has other uses",
    _rounded: "the product is rounded to float32, and summed in float64",
    _groups: "the collective has axis_index_groups",
    _not_tiled: "the collective is not tiled",
    _columns: "columns of the product are scattered",
    _another_type: "its result is also used in the type before its cast",
    _mixed: "the product's operands are float64 and float32",
    _itself: "the weight is computed from its result",
}


@pytest.mark.parametrize("f", ALONE, ids=lambda f: f.__name__[1:])
def test_look_alikes_are_left_alone(f):
    rows = 6 if f is _contracted else 8
    args = [normal(2, 3, 8), normal(2, 6, 6) if f is _contracted else normal(rows, 6)]
    if f in (_used_twice, _rounded, _columns):
        args = [normal(2, 4, 8), normal(8, 6)]
    plain = of_ranks(f, *args, check_vma=f is not _groups)
    skip = ("all_gather", "reduce_scatter")
    fused = jflux.fuse(plain, skip=skip)
    (found,) = fused.report(*args)
    assert (found.taken, found.reason) == (False, ALONE[f])
    assert str(jax.make_jaxpr(plain)(*args)) == str(jax.make_jaxpr(fused)(*args))


def test_an_axis_of_vmap_and_an_axis_of_one_rank():
    def f(x, w):
        return gather(x, 0) @ w

    x, w = normal(3, 8, ranks=4), normal(8, 6, ranks=4)
    report = jflux.fuse(f).report
    found = jax.vmap(lambda x, w: report(x, w) and x, axis_name="tp")
    del found
    mapped = jax.vmap(jflux.fuse(f), axis_name="tp")(x, w)
    same(mapped, jax.vmap(f, axis_name="tp")(x, w))
    one = of_ranks(f, x[:1], w[:1], mesh=make_mesh((1,)))
    (found,) = jflux.fuse(one).report(x[:1], w[:1])
    assert not found.taken and found.reason == "the axis has one rank"


def test_other_functions_stay_the_same_equation_for_equation():
    def f(tree, n, *, key):
        def body(carry, x):
            return lax.cond(x[0] > 0, jnp.sin, jnp.cos, carry) @ tree["w"], x.sum()

        x, sums = lax.scan(jax.checkpoint(body), tree["x"], jnp.ones((n, 2)))
        noise = jax.random.normal(key, x.shape)
        jax.debug.print("{}", sums)
        with jax.named_scope("name"):
            return {"y": jax.nn.relu(x + noise) * 2.0, "n": None}, jax.vmap(jnp.sin)(sums)

    tree = {"x": jnp.ones((4, 4), jnp.float32), "w": jnp.eye(4, dtype=jnp.float32)}
    key = jax.random.key(0)
    f = functools.partial(f, n=3)
    plain = jax.make_jaxpr(functools.partial(f, key=key))(tree)
    fused = jax.make_jaxpr(functools.partial(jflux.fuse(f), key=key))(tree)
    assert plain.pretty_print(source_info=True, name_stack=True) == fused.pretty_print(
        source_info=True, name_stack=True
    )
