"""jflux.fuse: what it finds, what it leaves alone, and that functions stay what they were."""

import functools
import time

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import PLATFORM, RANKS, examples, make_mesh
from hypothesis import strategies as st
from jax import lax
from jax.sharding import PartitionSpec as P

import jflux

pytestmark = pytest.mark.skipif(PLATFORM == "gpu", reason="kernels of GPUs take no float64")

N = 2
TP = functools.partial(make_mesh, (N,))


def of_ranks(f, *args, mesh=None, axes="tp", check_vma=True):
    """f on each rank's part [0] of arrays [ranks, ...], which every rank has of its own."""
    mesh = mesh or TP()
    specs = tuple(P(axes) for _ in args)

    def per_rank(*args):
        return jax.tree.map(lambda y: y[None], f(*(a[0] for a in args)))

    return jax.shard_map(
        per_rank, mesh=mesh, in_specs=specs, out_specs=P(axes), check_vma=check_vma
    )


def normal(*shape, ranks=N, dtype=jnp.float64, seed=0):
    """[ranks, *shape], of a size for which sums stay near 1."""
    rng = np.random.default_rng([seed, *shape])
    return jnp.asarray(rng.normal(size=(ranks, *shape)) / np.sqrt(shape[-1]), dtype)


def ops(found):
    return [one.op for one in found if one.taken and one.hidden]


def same(a, b, rtol=1e-12):
    for one, other in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol, rtol * 10)


def check(f, args, wanted, **options):
    """f on ranks: the ops that stand for its collectives, values, and gradients both ways."""
    with jax.enable_x64(True):
        plain = of_ranks(f, *args, **options)
        fused = jflux.fuse(plain)
        assert ops(fused.report(*args)) == wanted
        same(jax.jit(plain)(*args), jax.jit(fused)(*args))

        def loss(f):
            return lambda *args: sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(f(*args)))

        every = tuple(range(len(args)))
        exact = jax.jit(jax.grad(loss(plain), every))(*args)
        same(exact, jax.jit(jax.grad(loss(fused), every))(*args))
        same(exact, jax.jit(jflux.fuse(jax.grad(loss(plain), every)))(*args))


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


# ---- What it finds -------------------------------------------------------------------------------


def gather(x, axis=1, name="tp"):
    return lax.all_gather(x, name, axis=axis, tiled=True)


def scatter(x, axis=1, name="tp"):
    return lax.psum_scatter(x, name, scatter_dimension=axis, tiled=True)


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


@pytest.mark.parametrize("equation", GATHERED)
def test_einsums_of_a_gathered_array(equation):
    shapes = GATHERED[equation]
    args = [normal(*shape, seed=i) for i, shape in enumerate(shapes)]
    x = 1 if equation.startswith("df") else 0

    def f(*args):
        args = list(args)
        args[x] = gather(args[x])
        return jnp.einsum(equation, *args)

    check(f, args, [] if "bde" in equation else ["all_gather_matmul"])


SCATTERED = {
    "bsf,fd->bsd": ((2, 4, 8), (8, 6)),
    "bsf,df->bsd": ((2, 4, 8), (6, 8)),
    "bshe,hed->bsd": ((2, 4, 2, 3), (2, 3, 6)),
    "bshe,dhe->bsd": ((2, 4, 2, 3), (6, 2, 3)),
    "fd,bsf->bsd": ((8, 6), (2, 4, 8)),
    "bsf,fd->dsb": ((2, 4, 8), (8, 6)),
}


@pytest.mark.parametrize("equation", SCATTERED)
@pytest.mark.parametrize("summed", ["scatter", "psum"])
def test_einsums_before_a_sum(equation, summed):
    args = [normal(*shape, seed=i) for i, shape in enumerate(SCATTERED[equation])]
    collective = scatter if summed == "scatter" else lambda y: lax.psum(y, "tp") / 1
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
    "max": lambda x: jnp.maximum(x, 0),
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
        wanted = {"swish": "silu", "max": "relu"}.get(name, name)
        assert f"activation='{wanted}'" in text and ("gated=True" in text) is (one is f)
        assert "dot_general" not in text and "logistic" not in text


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


def test_an_activation_whose_operand_is_used_again():
    def f(x, w):
        y = gather(x) @ w
        return jax.nn.silu(y), y

    args = [normal(2, 3, 8), normal(8, 6)]
    check(f, args, ["all_gather_matmul"])
    assert "activation=" not in str(jax.make_jaxpr(jflux.fuse(of_ranks(f, *args)))(*args))


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


def test_exchanges_that_make_partial_sums():
    def f(x, w, v):
        y = heads(x, 2, 1) @ w  # a part of the contracted dimension on each rank
        z = heads(x @ v, 1, 2)
        return y, z, jnp.sum(heads(x, 2, 1))

    args = [normal(2, 4, 8), normal(4, 6), normal(8, 6)]
    check(f, args, ["all_to_all_matmul", "matmul_all_to_all"])


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


ALONE = {
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


# ---- Functions stay functions --------------------------------------------------------------------


def _layer(x, p):
    """One layer of a model, x [b, s / N, d], in which everything occurs."""
    h = gather(x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6))
    y = jax.nn.silu(h @ p["gate"]) * (h @ p["up"])
    return x + scatter(y @ p["down"])


def _params(layers=None, d=8, f=6):
    lead = () if layers is None else (layers,)
    shapes = {"gate": (d, f), "up": (d, f), "down": (f, d)}
    return {k: normal(*lead, *s, seed=i) for i, (k, s) in enumerate(shapes.items())}


def _model(x, params, wrap=lambda f: f):
    def body(x, p):
        return wrap(_layer)(x, p), None

    return lax.scan(body, x, params)[0]


def _on_ranks(f):
    def per_rank(x, params):
        return f(x[0], jax.tree.map(lambda a: a[0], params))[None]

    specs = (P("tp"), P("tp"))
    return jax.shard_map(per_rank, mesh=TP(), in_specs=specs, out_specs=P("tp"))


@jax.custom_vjp
def _gated(x, p):
    return _layer(x, p)


_gated.defvjp(
    lambda x, p: (_layer(x, p), (x, p)),
    lambda saved, dy: jax.vjp(_layer, *saved)[1](dy),
)

WRAPPERS = {
    "plain": lambda f: f,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "policy": functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable),
    "cond": lambda f: lambda x, p: lax.cond(p["up"][0, 0] > 9, lambda x, p: x, f, x, p),
    "while": lambda f: lambda x, p: lax.fori_loop(0, 2, lambda i, x: f(x, p), x),
    "custom_vjp": lambda f: _gated,
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_bodies_of_equations(name):
    x, params = normal(2, 3, 8), _params(2)
    plain = _on_ranks(functools.partial(_model, wrap=WRAPPERS[name]))
    fused = jflux.fuse(plain)
    assert ops(fused.report(x, params)) == ["all_gather_matmul", "matmul_reduce_scatter"]
    same(jax.jit(plain)(x, params), jax.jit(fused)(x, params))
    assert "all_gather[" not in str(jax.make_jaxpr(fused)(x, params))

    def loss(f):
        return lambda x, params: jnp.sum(jnp.sin(f(x, params)))

    exact = jax.jit(jax.grad(loss(plain), (0, 1)))(x, params)
    same(exact, jax.jit(jax.grad(loss(fused), (0, 1)))(x, params))
    step = jflux.fuse(jax.grad(loss(plain), (0, 1)))
    same(exact, jax.jit(step)(x, params))
    taken = ops(step.report(x, params))
    assert taken.count("all_gather_matmul") >= 2 and taken.count("matmul_reduce_scatter") >= 2


TRANSFORMATIONS = {
    "jit": lambda f: jax.jit(f),
    "jvp": lambda f: lambda x, p: jax.jvp(lambda x: f(x, p), (x,), (jnp.cos(x),))[1],
    "vmap": lambda f: lambda x, p: jax.vmap(lambda a: f(a * x, p))(jnp.arange(1.0, 4)),
    "vmap of weights": lambda f: (
        lambda x, p: jax.vmap(lambda a: f(x, jax.tree.map(lambda w: a * w, p)))(jnp.arange(1.0, 4))
    ),
    "grad": lambda f: lambda x, p: jax.grad(lambda x: jnp.sum(jnp.sin(f(x, p))))(x),
    "grad of grad": lambda f: (
        lambda x, p: jax.grad(
            lambda x: jnp.sum(jax.grad(lambda x: jnp.sum(jnp.sin(f(x, p))))(x) ** 2)
        )(x)
    ),
    "linearize": lambda f: lambda x, p: jax.linearize(lambda x: f(x, p), x)[1](jnp.cos(x)),
    "checkpoint": lambda f: jax.checkpoint(f),
    "scan": lambda f: lambda x, p: lax.scan(lambda c, a: (f(c * a, p), c), x, jnp.ones(2))[0],
}


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_transformations_before_and_after(name):
    x, params = normal(2, 3, 8), _params()
    plain, change = _on_ranks(_layer), TRANSFORMATIONS[name]
    exact = jax.jit(change(plain))(x, params)
    same(exact, jax.jit(change(jflux.fuse(plain)))(x, params), 1e-10)
    same(exact, jax.jit(jflux.fuse(change(plain)))(x, params), 1e-10)
    same(exact, jax.jit(change(_on_ranks(jflux.fuse(_layer))))(x, params), 1e-10)


def test_without_jit_and_twice():
    x, params = normal(2, 3, 8), _params(2)
    plain = _on_ranks(_model)
    fused = jflux.fuse(plain)
    for seed in (0, 1):
        x = normal(2, 3, 8, seed=seed)
        same(plain(x, params), fused(x, params))


def test_traces_are_remembered():
    traced = []

    def f(x, p, scale):
        traced.append(scale)
        return _layer(x, p) * scale

    on_ranks = _on_ranks(functools.partial(f, scale=2.0))
    fused = jflux.fuse(on_ranks)
    x, params = normal(2, 3, 8), _params()
    for _ in range(3):
        fused(x, params)
    assert len(traced) == 1
    fused(normal(2, 5, 8), params)
    assert len(traced) == 2


def test_arguments_and_results():
    seen = {}

    def f(tree, kind, *rest, flag=False, scale=1.0):
        seen.update(kind=kind, flag=flag, scale=scale, rest=rest)
        return {"y": tree["a"] * scale, "none": None}, (kind == "k", 3)

    fused = jflux.fuse(f)
    out = fused({"a": jnp.ones(2), "b": None}, "k", np.float32(2), flag=True, scale=3)
    assert seen["kind"] == "k" and seen["flag"] is True and seen["scale"] == 3
    assert seen["rest"][0].dtype == jnp.float32
    assert out[0]["none"] is None and out[0]["y"].tolist() == [3, 3] and int(out[1][1]) == 3
    assert fused.__name__ == "f"

    class Model:
        @jflux.fuse
        def __call__(self, x):
            return x + 1

    assert int(Model()(jnp.zeros((), int))) == 1
    with pytest.raises(TypeError, match="f must be a function, got int"):
        jflux.fuse(3)
    with pytest.raises(ValueError, match="skip='all_gathr' must be a line such as"):
        jflux.fuse(f, skip="all_gathr")


def test_donated_arguments_and_weak_types():
    x, params = normal(2, 3, 8), _params()
    step = jax.jit(jflux.fuse(_on_ranks(_layer)), donate_argnums=0)
    text = step.lower(x, params).as_text()
    assert "donor" in text or "alias" in text
    weak = jax.make_jaxpr(jflux.fuse(lambda x: x * 2))(1.0)
    assert weak.out_avals[0].weak_type


def test_effects_and_keys_keep_their_order():
    def f(x, w):
        jax.debug.print("first {}", x[0, 0, 0], ordered=False)
        h = gather(x)
        y = h @ w
        key = jax.random.key(0)
        y = y + jax.random.normal(key, y.shape)
        jax.debug.print("second {}", y[0, 0, 0])
        return y + (h @ (w * jax.random.normal(jax.random.fold_in(key, 1), w.shape)))

    args = [normal(2, 3, 8), normal(8, 6)]
    plain = of_ranks(f, *args)
    fused = jflux.fuse(plain)
    assert ops(fused.report(*args)) == ["all_gather_matmul"]
    same(plain(*args), jax.jit(fused)(*args))
    text = str(jax.make_jaxpr(fused)(*args))
    assert text.index("first") < text.index("second")


def test_only_and_skip():
    x, params = normal(2, 3, 8), _params()
    plain = _on_ranks(_layer)
    for options, wanted in (
        ({"only": "all_gather_matmul"}, ["all_gather_matmul"]),
        ({"skip": ["all_gather_matmul", "all_gather"]}, ["matmul_reduce_scatter"]),
    ):
        fused = jflux.fuse(plain, **options)
        assert ops(fused.report(x, params)) == wanted
        same(plain(x, params), jax.jit(fused)(x, params))
    line = gather.__code__.co_firstlineno + 1
    report = jflux.fuse(plain, skip=f"test_fuse.py:{line}").report(x, params)
    left, taken = report
    assert (left.taken, left.reason) == (False, "`only` or `skip` leaves it out") and taken.taken
    assert f"test_fuse.py:{line}" in left.where


def test_a_report_says_what_happens():
    shape = jax.ShapeDtypeStruct
    x, params = (
        shape((2, 2, 512, 256), jnp.float32),
        {
            "gate": shape((2, 4, 256, 64), jnp.float32),
            "up": shape((2, 4, 256, 64), jnp.float32),
            "down": shape((2, 4, 64, 256), jnp.float32),
        },
    )
    report = jflux.fuse(_on_ranks(_model)).report(x, params)
    text = str(report)
    assert "all_gather + 2 dot_general + silu + mul -> all_gather_matmul  (1.00 MiB beside" in text
    assert "float32[2, 512, 256], 4 times" in text
    assert text.endswith("8 of 8 collectives are jflux's; 8.00 MiB reach a rank beside products")
    assert repr(report) == text
    empty = jflux.fuse(jnp.sin).report(jnp.ones(2))
    assert str(empty) == "no collective over an axis of a shard_map"


def test_an_error_names_the_line(monkeypatch):
    def fails(*args, **options):
        raise ValueError("no")

    from jflux._fuse.rules import scattered_products

    monkeypatch.setattr(scattered_products, "matmul_reduce_scatter", fails)
    x, params = normal(2, 3, 8), _params()
    with pytest.raises(ValueError, match="no") as caught:
        jflux.fuse(_on_ranks(_layer))(x, params)
    note = caught.value.__notes__[0]
    assert "jflux.matmul_reduce_scatter for the collective at" in note and "test_fuse.py" in note


@pytest.mark.parametrize(
    "switch",
    [("jax_numpy_dtype_promotion", "strict"), ("jax_numpy_rank_promotion", "raise"),
     ("jax_check_tracer_leaks", True), ("jax_enable_checks", True), ("jax_debug_nans", True)],
)  # fmt: skip
def test_strict_switches(switch):
    x, params = normal(2, 3, 8), _params()

    def layer(x, p):
        h = gather(x)
        return x + scatter(jnp.sin(h @ p["gate"]) @ p["down"])

    before = getattr(jax.config, switch[0])
    jax.config.update(*switch)
    try:
        plain = _on_ranks(layer)
        exact = jax.jit(plain)(x, params)
        same(exact, jax.jit(jflux.fuse(plain))(x, params))
        same(exact, jflux.fuse(plain)(x, params))
    finally:
        jax.config.update(switch[0], before)


def test_a_mesh_of_two_axes_and_a_nested_shard_map():
    mesh = make_mesh((2, 2), ("dp", "tp"))
    x, w = normal(4, 4, 8, ranks=1)[0], normal(8, 6, ranks=1)[0]

    def outer(x, w):
        def inner(x, w):
            return lax.psum_scatter(gather(x) @ w, "tp", scatter_dimension=1, tiled=True)

        specs = (P(None, "tp"), P(None, "tp"))
        inside = jax.shard_map(
            inner, in_specs=specs, out_specs=P(None, "tp"), axis_names={"tp"}, check_vma=False
        )
        return inside(jnp.sin(x), w)

    plain = jax.shard_map(
        outer, mesh=mesh, in_specs=(P("dp"), P()), out_specs=P("dp"), axis_names={"dp"},
        check_vma=False,
    )  # fmt: skip
    fused = jflux.fuse(plain)
    with jax.set_mesh(mesh):
        assert ops(fused.report(x, w)) == ["all_gather_matmul"]
        same(jax.jit(plain)(x, w), jax.jit(fused)(x, w))


def test_ten_thousand_equations_take_two_seconds():
    def f(x, w):
        for _ in range(1000):
            h = gather(x)
            y = jnp.sin(h @ w) * 2 + 1
            y = jnp.cos(y) - y
            x = x + scatter(y @ w.T) * 0.5
        return x

    x, w = normal(1, 2, 4), normal(4, 4)
    fused = jflux.fuse(of_ranks(f, x, w))
    jaxpr = jax.make_jaxpr(of_ranks(f, x, w))(x, w)
    (equation,) = [e for e in jaxpr.eqns if e.primitive.name == "shard_map"]
    assert len(equation.params["jaxpr"].eqns) > 10_000
    from jflux._fuse.planning import Planner
    from jflux._fuse.sites import Scope

    start = time.process_time()
    plan = Planner().plan(jaxpr, Scope({}, "cpu", lambda op, equation: True))
    took = time.process_time() - start
    assert not plan.is_same and took < 2, took
    del fused


# ---- Random models -------------------------------------------------------------------------------


@st.composite
def models(draw):
    """(f of x [b, s, d] and weights [d, d], how many weights)."""
    weights = []

    def w():
        weights.append(None)
        return len(weights) - 1

    def block():
        kind = draw(st.sampled_from(["mlp", "gated", "sum", "two terms", "twice", "plain"]))
        i, j, k = w(), w(), w()
        act = draw(st.sampled_from([jnp.sin, jax.nn.silu, jax.nn.gelu, lambda x: x]))
        forms = st.sampled_from(["bsd,de->bse", "bsd,ed->bse"])
        one, other = draw(forms), draw(forms)
        flat = draw(st.booleans())

        def f(x, ws):
            if kind == "plain":
                return x + act(jnp.einsum(one, x, ws[i]))
            if kind == "sum":
                y = lax.psum(jnp.einsum(one, act(x), ws[i]), "tp")
                return x + y if y.shape == x.shape else x
            h = gather(x)
            if flat:
                y = (h.reshape(-1, h.shape[-1]) @ ws[i]).reshape(h.shape)
            else:
                y = jnp.einsum(one, h, ws[i])
            y = act(y)
            if kind in ("gated", "twice"):
                y = y * jnp.einsum(other, h, ws[j])
            if kind == "twice":
                y = y + h
            z = jnp.einsum(other, y, ws[k])
            if kind == "two terms":
                z = z + jnp.einsum(other, h, ws[j])
            return x + scatter(z)

        around = draw(st.sampled_from(["plain", "jit", "checkpoint", "cond", "vjp"]))
        if around == "cond":
            return lambda x, ws: lax.cond(True, f, f, x, ws)
        if around == "vjp":
            g = jax.custom_vjp(f)
            g.defvjp(lambda x, ws: (f(x, ws), (x, ws)), lambda s, dy: jax.vjp(f, *s)[1](dy))
            return g
        return WRAPPERS[around](f)

    blocks = [block() for _ in range(draw(st.integers(1, 3)))]
    loop = draw(st.booleans())

    def model(x, *ws):
        def all_blocks(x, _=None):
            for one in blocks:
                x = one(x, ws)
            return x, None

        return lax.scan(all_blocks, x, None, length=2)[0] if loop else all_blocks(x)[0]

    return model, len(weights)


@hypothesis.given(models(), st.sampled_from([(2,), (3,), (2, 2)]), st.booleans())
@examples(8)
def test_random_models(model, shape, check_vma):
    if np.prod(shape) > RANKS:
        return
    f, count = model
    names = ("tp",) if len(shape) == 1 else ("dp", "tp")
    mesh, ranks = make_mesh(shape, names), int(np.prod(shape))
    x = normal(2, 3, 6, ranks=ranks)
    ws = [normal(6, 6, ranks=ranks, seed=i + 1) for i in range(count)]
    args = (x, *ws)
    plain = of_ranks(f, *args, mesh=mesh, axes=names, check_vma=check_vma)
    fused = jflux.fuse(plain)
    same(jax.jit(plain)(*args), jax.jit(fused)(*args), 1e-10)

    def loss(f):
        return lambda *args: jnp.sum(jnp.sin(f(*args)))

    every = tuple(range(count + 1))
    exact = jax.jit(jax.grad(loss(plain), every))(*args)
    same(exact, jax.jit(jax.grad(loss(fused), every))(*args), 1e-9)
    same(exact, jax.jit(jflux.fuse(jax.grad(loss(plain), every)))(*args), 1e-9)
