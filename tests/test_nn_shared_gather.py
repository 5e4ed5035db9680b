"""Products of one x share its gather in models whose layers know nothing of it: how many gathers
are left, that values and gradients are those of the plain model, and that no tracer is kept."""

import functools
import gc
import logging
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import DEVICES, compiled, compiled_text, fused_calls, make_mesh
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jflux.nn as jnn
from jflux import _config
from jflux.nn import _shared_gather

nn = pytest.importorskip("flax.linen")

from flax import nnx  # noqa: E402

# On GPUs, float32 is for the reference.
pytestmark = pytest.mark.skipif(jax.default_backend() == "gpu", reason="float32")

GATHER, SCATTER = "all_gather_matmul", "matmul_reduce_scatter"
LAST = (((2,), (0,)), ((), ()))
D, HIDDEN, HEADS, KV_HEADS, HEAD = 16, 48, 8, 4, 4
SHARE = pytest.mark.parametrize("share", [True, False])


def draw(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def mesh_of():
    return Mesh(np.array(DEVICES).reshape(2, 4), ("data", "tp"))


def assert_close(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        b = np.asarray(b)
        np.testing.assert_allclose(a, b, atol=1e-5 * max(1, abs(b).max()))


def count(text):
    calls = fused_calls(text)
    return calls.count(GATHER), calls.count(SCATTER)


@pytest.fixture(autouse=True)
def nothing_is_kept():
    yield
    gc.collect()
    assert _shared_gather._entries.of == {}


# ---- A Llama of Flax's own layers ----------------------------------------------------------------


class Block(nn.Module):
    dot: type = staticmethod(lambda *axes: None)

    @nn.compact
    def __call__(self, x, _=None):
        def dense(name, features, *axes, **options):
            return nn.DenseGeneral(
                features, use_bias=False, name=name, dot_general=self.dot(*axes), **options
            )

        h = nn.RMSNorm()(x)
        q = dense("query", (HEADS, HEAD), "embed", "heads", "kv")(h)
        k, v = (
            dense(name, (KV_HEADS, HEAD), "embed", "kv_heads", "kv")(h) for name in ("key", "value")
        )
        o = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + dense("out", D, "heads", "kv", "embed", axis=(-2, -1))(o)
        h = nn.RMSNorm()(x)
        gate, up = (
            nn.Dense(HIDDEN, name=name, dot_general=self.dot("embed", "mlp"))(h)
            for name in ("gate", "up")
        )
        return x + dense("down", D, "mlp", "embed")(nn.silu(gate) * up), None


class Llama(nn.Module):
    dot: type = staticmethod(lambda *axes: None)
    how: str = "loop"

    @nn.compact
    def __call__(self, x):
        block = Block
        if "remat" in self.how:
            policy = None
            if "names" in self.how:
                policy = jax.checkpoint_policies.save_only_these_names("jflux_gathered")
            block = nn.remat(Block, policy=policy, prevent_cse=False)
        if "scan" not in self.how:
            for i in range(2):
                x, _ = block(self.dot, name=f"layer_{i}")(x)
            return x
        axes = {"params": 0}
        return nn.scan(block, axes, split_rngs={"params": True}, length=2)(self.dot)(x, None)[0]


def loss_of(apply):
    def loss(params, x):
        y = apply(params, x)
        return jnp.vdot(y, jnp.cos(jnp.arange(y.size, dtype=y.dtype)))

    return loss


def dots(share, **options):
    tp = jnn.TensorParallel("tp", x_spec=P("data"), share_gathers=share, **options)
    return lambda *axes: tp.dot_general(axes)


# By layer and pass: q, k, v, gate and up gather x, out and down scatter; backward, the gradient of
# each of the first scatters, and those of the last two gather. Recomputed: gathers again.
COUNTS = {
    ("loop", "forward", True): (4, 4),
    ("loop", "backward", True): (4 + 4, 4 + 10),
    ("scan", "forward", False): (5, 2),
    ("scan", "forward", True): (2, 2),
    ("scan", "backward", False): (5 + 2, 2 + 5),
    ("scan", "backward", True): (2 + 2, 2 + 5),
    ("scan remat", "backward", True): (2 + 2 + 2, 2 + 1 + 5),
    ("scan remat names", "backward", True): (2 + 2 + 2, 2 + 1 + 5),
}


@pytest.mark.parametrize(
    "how, share",
    [
        ("loop", True),
        ("scan", False),
        ("scan", True),
        ("scan remat", True),
        ("scan remat names", True),
    ],
)
def test_a_linen_llama(how, share):
    x = draw(2, 24, D)
    plain = Llama(how=how)
    params = jax.tree.map(np.asarray, jax.jit(plain.init)(jax.random.key(0), x))
    want = jax.jit(jax.value_and_grad(loss_of(plain.apply), (0, 1)))(params, x)
    loss = loss_of(Llama(dots(share), how).apply)
    step = jax.value_and_grad(loss, (0, 1))
    with jax.set_mesh(mesh_of()):
        backward = compiled(step, params, x)
        assert_close(backward(params, x), want)
        for what in ("forward", "backward"):
            counts = COUNTS.get((how, what, share))
            if counts is not None:
                program = backward if what == "backward" else compiled(loss, params, x)
                assert count(program.as_text()) == counts


class Products(nnx.Module):
    """All products of a layer but the attention's own, in NNX."""

    def __init__(self, dot, rngs):
        linear = functools.partial(nnx.Linear, use_bias=True, rngs=rngs)
        self.parts = nnx.List(
            [linear(D, HIDDEN, dot_general=dot("embed", "mlp")) for _ in range(3)]
        )
        self.down = linear(HIDDEN, D, dot_general=dot("mlp", "embed"))

    def __call__(self, x):
        a, b, c = (part(x) for part in self.parts)
        return self.down(nnx.silu(a) * b + c)


@SHARE
def test_nnx(share):
    x = draw(2, 24, D)
    plain = Products(lambda *axes: lax.dot_general, nnx.Rngs(0))
    fused = Products(dots(share), nnx.Rngs(0))

    def step_of(module):
        graph, state = nnx.split(module)
        loss = loss_of(lambda state, x: nnx.merge(graph, state)(x))
        return jax.value_and_grad(loss, (0, 1)), jax.tree.map(np.asarray, state)

    step, state = step_of(plain)
    want = jax.jit(step)(state, x)
    with jax.set_mesh(mesh_of()):
        step, state = step_of(fused)
        program = compiled(step, state, x)
        assert_close(program(state, x), want)
        gathers = 1 if share else 3
        assert count(program.as_text()) == (gathers + 1, 1 + 3)


def test_less_temporary_memory():
    """The gathered arrays are kept for the gradients: two in each layer instead of five."""
    x = draw(2, 512, D)
    params = jax.tree.map(np.asarray, jax.jit(Llama().init)(jax.random.key(0), x[:, :8]))

    def temporary(share):
        step = jax.value_and_grad(loss_of(Llama(dots(share)).apply))
        return jax.jit(step).lower(params, x).compile().memory_analysis().temp_size_in_bytes

    with jax.set_mesh(mesh_of()):
        less = temporary(False) - temporary(True)
    gathered = x.nbytes // 2  # of one device: half of the batch
    assert less >= 2 * 3 * gathered * 0.5, less


# ---- Transforms ----------------------------------------------------------------------------------


def products(share=True, mesh=None):
    dot = jnn.TensorParallel("tp", share_gathers=share, mesh=mesh).dot_general((None, "tp"))
    return lambda x, *ws: [dot(x, w, LAST) for w in ws]


def operands():
    return draw(2, 8, 16), draw(16, 24, seed=1), draw(16, 8, seed=2), draw(16, 8, seed=3)


def plain_products(x, *ws):
    return [x @ w for w in ws]


def total(of):
    return lambda *args: sum(jnp.sum(jnp.sin(y)) for y in of(*args))


@pytest.mark.parametrize("check_vma", [True, False])
def test_inside_shard_map(check_vma):
    args, mesh = operands(), make_mesh((4,))
    specs = (P(None, "tp"), *[P(None, "tp")] * 3)
    mapped = jax.shard_map(
        lambda *args: products()(*args), mesh=mesh, in_specs=specs, out_specs=P(None, None, "tp"),
        check_vma=check_vma,
    )  # fmt: skip
    step = compiled(jax.value_and_grad(total(mapped), (0, 1, 2, 3)), *args)
    want = jax.jit(jax.value_and_grad(total(plain_products), (0, 1, 2, 3)))(*args)
    assert_close(step(*args), want)
    assert count(step.as_text()) == (1, 3)


def test_weights_that_the_data_axis_shares():
    """Inside shard_map over data and ranks, where a gradient is summed over the data axis too."""
    args, mesh = operands(), mesh_of()
    specs = (P("data", "tp"), *[P(None, "tp")] * 3)
    mapped = jax.shard_map(
        lambda *args: products()(*args), mesh=mesh, in_specs=specs,
        out_specs=P("data", None, "tp"),
    )  # fmt: skip
    step = jax.grad(total(mapped), (0, 1, 2, 3))
    assert_close(jax.jit(step)(*args), jax.grad(total(plain_products), (0, 1, 2, 3))(*args))


@pytest.mark.parametrize("inner, outer", [(2, 0), (1, 0), (2, 2), (2, 1), (0, 0), (0, 3)])
def test_gradients_of_gradients(inner, outer):
    """Also where the inner one is of a later product alone, and uses the gathered x."""
    args = operands()

    def second(of):
        def first(*args):
            g = jax.grad(total(of), inner)(*args)
            return jnp.vdot(g, jnp.cos(jnp.arange(g.size, dtype=g.dtype).reshape(g.shape)))

        return jax.jit(jax.grad(first, outer))

    with jax.set_mesh(make_mesh((4,))):
        got = second(products())(*args)
    assert_close(got, second(plain_products)(*args))


def test_vmap():
    x, *ws = operands()
    xs, per = np.stack([x, 2 * x]), np.stack([ws[1], ws[1] + 1])
    with jax.set_mesh(make_mesh((4,))):
        for in_axes, last in (((0, None, None), ws[1]), ((None, None, 0), per)):
            rows = xs if in_axes[0] == 0 else x
            f = jax.vmap(lambda x, a, b: tuple(products()(x, a, b)), in_axes)
            want = jax.vmap(lambda x, a, b: tuple(plain_products(x, a, b)), in_axes)
            assert_close(jax.jit(f)(rows, ws[0], last), want(rows, ws[0], last))


def test_what_agrees_shares_and_what_does_not_gathers():
    x, *ws = operands()
    with jax.set_mesh(mesh_of()):
        of = lambda **options: jnn.TensorParallel("tp", **options).dot_general((None, "tp"))  # noqa: E731
        same, other = of(), of(x_spec=P("data"))
        gathers = lambda f: count(compiled_text(f, x, *ws))[0]  # noqa: E731
        assert gathers(lambda x, a, b, c: [same(x, w, LAST) for w in (a, b, c)]) == 1
        assert gathers(lambda x, a, b, c: [same(x, a, LAST), other(x, b, LAST)]) == 2
        assert gathers(lambda x, a, b, c: [same(x, a, LAST), same(x + 1, b, LAST)]) == 2
        # A first product alone gives back no gathered x.
        alone = compiled_text(lambda x, a, b, c: same(x, a, LAST), x, *ws)
        call = next(line for line in alone.splitlines() if GATHER in line and "custom-call" in line)
        assert "f32[2,8,16]" not in call.split("custom-call(")[0]


@pytest.mark.parametrize("around", [lambda f: f, jax.checkpoint], ids=["jit", "checkpoint"])
def test_casts_and_constraints_of_one_x_are_one(around):
    x, *ws = (np.rint(a) for a in operands())  # products that bfloat16 has exactly
    assert all(np.abs(x @ w).max() <= 256 for w in ws)
    mesh = make_mesh((4,))
    of, put = products(), lambda x: lax.with_sharding_constraint(x, P(None, "tp"))

    def f(x, a, b, c):
        cast = [x.astype(jnp.bfloat16) for _ in range(2)]
        cast[1] = put(cast[1])
        low = [of(h, w.astype(h.dtype))[0] for h, w in zip(cast, (a, b), strict=True)]
        return sum(y.astype(jnp.float32).sum() for y in (*low, *of(put(x), c), *of(x, c)))

    with jax.set_mesh(mesh):
        assert count(compiled_text(around(f), x, *ws))[0] == 2  # of each type
        got = jax.jit(around(f))(x, *ws)
    assert got == sum((x @ w).sum() for w in (*ws, ws[2]))


def test_types_of_later_products():
    x, *ws = (jnp.asarray(a, jnp.bfloat16) for a in operands())
    dot = jnn.TensorParallel("tp", mesh=make_mesh((4,))).dot_general((None, "tp"))

    def f(x, a, b, c):
        return dot(x, a, LAST), dot(x, b, LAST), dot(x, c, LAST, None, jnp.float32)

    a, b, c = jax.jit(f)(x, *ws)
    assert (a.dtype, b.dtype, c.dtype) == (jnp.bfloat16, jnp.bfloat16, jnp.float32)
    grads = jax.jit(jax.grad(lambda *args: sum(y.sum() for y in f(*args)), (0, 3)))(x, *ws)
    assert [g.dtype for g in grads] == [jnp.bfloat16] * 2


# ---- Traces --------------------------------------------------------------------------------------


BODIES = {
    "scan": lambda f, *args: lax.scan(lambda c, _: (c + f(*args), None), 0.0, None, length=2)[0],
    "cond": lambda f, *args: lax.cond(args[0][0, 0, 0] > 9, lambda: 0.0, lambda: f(*args)),
    "checkpoint": lambda f, *args: jax.checkpoint(f)(*args),
    "checkpoint of x outside": lambda f, x, *ws: jax.checkpoint(lambda *ws: f(x, *ws))(*ws),
    "jit": lambda f, *args: jax.jit(f)(*args),
    "grad": lambda f, *args: jnp.vdot(jax.grad(f, 1)(*args), args[1]),
    "grad of another": lambda f, x, *ws: jnp.vdot(jax.grad(lambda w: f(x, w))(ws[0]), ws[1]),
}


@pytest.mark.parametrize("body", BODIES)
def test_an_inner_trace_shares_nothing_with_the_outer_one(body):
    """x of the outer trace is used before, in, and after a body that is a trace of its own."""
    x, a, b, c = operands()

    def f(of):
        def product(x, *ws):
            return sum(jnp.sin(y).sum() for y in of(x, *ws))

        def f(x, a, b, c):
            return product(x, a) + BODIES[body](product, x, b, c) + product(x, c)

        return jax.jit(jax.value_and_grad(f, (0, 1, 2, 3)))

    with jax.set_mesh(make_mesh((4,))):
        assert_close(f(products())(x, a, b, c), f(plain_products)(x, a, b, c))


def test_no_tracer_outlives_its_trace():
    x, *ws = operands()
    with jax.set_mesh(make_mesh((4,))):
        jax.make_jaxpr(jax.grad(total(products())))(x, *ws)
        jax.make_jaxpr(lambda *args: jax.vmap(products(), (None, None, 0))(*args))(
            x, ws[0], np.stack(ws[1:])
        )
        assert _shared_gather._entries.of == {}
        gc.collect()
        assert not [o for o in gc.get_objects() if isinstance(o, _shared_gather._Entry)]
        with jax.checking_leaks():
            jax.make_jaxpr(products())(x, *ws)
            jax.make_jaxpr(jax.grad(total(products())))(x, *ws)


def test_without_jit_nothing_is_kept():
    x, *ws = operands()
    with jax.set_mesh(make_mesh((4,))):
        ys = products()(jnp.asarray(x), *ws)
        assert _shared_gather._entries.of == {}
        grads = jax.grad(total(products()))(jnp.asarray(x), *ws)
    assert_close(ys, plain_products(x, *ws))
    assert_close(grads, jax.grad(total(plain_products))(x, *ws))


def test_after_an_exception_a_thread_keeps_few():
    x, *ws = operands()

    def fails(x, *ws):
        y = products()(x, *ws)[0] + 1
        raise RuntimeError(f"on purpose {y.shape}")

    with jax.set_mesh(make_mesh((4,))):
        for _ in range(2 * _shared_gather.MOST):
            with pytest.raises(RuntimeError, match="on purpose"):
                jax.jit(lambda *args: fails(*args))(x, *ws)
        assert len(_shared_gather._entries.of) <= _shared_gather.MOST
        assert_close(jax.jit(products())(x, *ws), plain_products(x, *ws))
    _shared_gather._entries.of.clear()


# ---- A JAX with other internals ------------------------------------------------------------------


def _no_finalizer(*args):
    return types.SimpleNamespace(atexit=True)


#: By what a JAX to come might do: the name in _shared_gather.py through which it is pretended.
OTHERWISE = {
    "all traces are one": ("get_opaque_trace_state", lambda: None),
    "the state is not there": ("get_opaque_trace_state", None),
    "traces take no attribute": ("_own", lambda array: None),
    "tracers hold their array elsewhere": ("_inner", lambda tracer: None),
    "equations have other fields": ("_equation", lambda tracer: None),
    "results outlive their trace": ("weakref", types.SimpleNamespace(finalize=_no_finalizer)),
}


@pytest.fixture
def other_internals(monkeypatch, caplog):
    """A function that pretends one of OTHERWISE."""

    def pretend(what):
        monkeypatch.setattr(_shared_gather, *OTHERWISE[what])
        monkeypatch.setattr(_config, "_said", set())
        _shared_gather.is_safe.cache_clear()
        caplog.clear()

    with caplog.at_level(logging.WARNING, logger="jflux"):
        yield pretend
    monkeypatch.undo()
    _shared_gather.is_safe.cache_clear()


def test_this_jax_is_safe(caplog):
    _shared_gather.is_safe.cache_clear()
    with jax.checking_leaks(), jax.disable_jit():
        assert _shared_gather.is_safe()
    assert not caplog.records


def test_other_internals_are_noticed(other_internals, monkeypatch, caplog):
    for what in OTHERWISE:
        other_internals(what)
        assert not _shared_gather.is_safe() and not _shared_gather.is_safe(), what
        assert len(caplog.records) == 1 and "do not share its gather" in caplog.text, what
        assert _shared_gather._entries.of == {}, what
        monkeypatch.undo()


def test_with_other_internals_each_product_gathers(other_internals, caplog):
    other_internals("all traces are one")
    args = operands()
    with jax.set_mesh(make_mesh((4,))):
        step = compiled(jax.value_and_grad(total(products()), (0, 1, 2, 3)), *args)
        got = step(*args)
    assert_close(got, jax.value_and_grad(total(plain_products), (0, 1, 2, 3))(*args))
    assert count(step.as_text())[0] == 3
    assert len(caplog.records) == 1
