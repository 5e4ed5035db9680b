"""jflux.fuse: functions stay what they were, under all transformations; random models."""

import functools
import runpy
import time

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fused import gather, normal, of_ranks, ops, same, scatter
from harness import PLATFORM, RANKS, examples, make_mesh
from hypothesis import strategies as st
from jax import lax
from jax.sharding import PartitionSpec as P

import jflux

pytestmark = pytest.mark.skipif(PLATFORM == "gpu", reason="kernels of GPUs take no float64")


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


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
    return jax.shard_map(per_rank, mesh=make_mesh((2,)), in_specs=specs, out_specs=P("tp"))


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


def _gradient(f):
    return jax.grad(lambda x, params: jnp.sum(jnp.sin(f(x, params))), (0, 1))


def test_rules_of_functions_with_derivatives_of_their_own():
    x, params = normal(2, 3, 8), _params()
    plain = _on_ranks(_gated)
    step = _gradient(jflux.fuse(plain))
    same(jax.jit(_gradient(plain))(x, params), jax.jit(step)(x, params))
    text = str(jax.make_jaxpr(step)(x, params))
    assert " all_gather[" not in text and " reduce_scatter[" not in text
    assert text.count("jflux_matmul_reduce_scatter[") == 3  # in the rules for y and for gradients


def test_policies_of_checkpoints_are_kept():
    x, params = normal(2, 3, 8), _params()
    exact = jax.jit(_gradient(_on_ranks(_layer)))(x, params)

    def multiplies(policy):
        f = jflux.fuse(_on_ranks(jax.checkpoint(_layer, policy=policy)))
        same(exact, jax.jit(_gradient(f))(x, params))
        return str(jax.make_jaxpr(_gradient(f))(x, params)).count("results=('y'")

    # Forward, again, and that of dy: with the policy only x is gathered again.
    assert multiplies(None) == 3 and multiplies(jax.checkpoint_policies.dots_saveable) == 2


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
    line = f"fused.py:{gather.__code__.co_firstlineno + 1}"
    report = jflux.fuse(plain, skip=line).report(x, params)
    left, taken = report
    assert (left.taken, left.reason) == (False, "`only` or `skip` leaves it out") and taken.taken
    assert line in left.where


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
    before, after = report.picture.splitlines()[1:]
    assert before == (
        "  before  all_gather > 2 dot_general > silu > mul > dot_general > reduce_scatter > add"
    ) or sorted(before.split(" > ")) == sorted(
        "  before  all_gather > dot_general > silu > dot_general > mul > dot_general > "
        "reduce_scatter > add".split(" > ")
    )
    assert after == "  after   all_gather_matmul > matmul_reduce_scatter"
    empty = jflux.fuse(jnp.sin).report(jnp.ones(2))
    assert str(empty) == "no collective that jflux has an op for"


def test_an_error_names_the_line(monkeypatch):
    def fails(*args, **options):
        raise ValueError("no")

    from jflux._fuse.rules import scattered_products

    monkeypatch.setattr(scattered_products, "matmul_reduce_scatter", fails)
    x, params = normal(2, 3, 8), _params()
    with pytest.raises(ValueError, match="no") as caught:
        jflux.fuse(_on_ranks(_layer))(x, params)
    note = caught.value.__notes__[0]
    assert "jflux.matmul_reduce_scatter for the collective at" in note and "fused.py" in note


def test_a_rule_that_fails_leaves_the_program_as_it_is(monkeypatch, caplog):
    def fails(*args):
        raise KeyError("no")

    from jflux._fuse import planning

    monkeypatch.setattr(planning, "RULES", [{"all_gather": fails}])
    x, params = normal(2, 3, 8), _params()
    plain = _on_ranks(_layer)
    fused = jflux.fuse(plain)
    with jflux.config(strict=False):
        same(plain(x, params), fused(x, params))
        (found,) = fused.report(x, params)
    assert (found.taken, found.reason) == (False, "jflux failed: KeyError: 'no'")
    assert "jflux.fuse leaves the all_gather at" in caplog.text
    with jflux.config(strict=True), pytest.raises(KeyError):
        jflux.fuse(plain).report(x, params)


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


SCRIPT = """
import sys
import jax, jax.numpy as jnp
from jax.sharding import PartitionSpec as P
mesh = jax.sharding.Mesh(jax.devices()[:2], "tp")
specs = {"in_specs": (P("tp"), P(None, "tp")), "out_specs": P(None, "tp")}

@jax.jit
def step(x, w):
    return jax.shard_map(
        lambda x, w: jax.lax.all_gather(x, "tp", tiled=True) @ w, mesh=mesh, **specs
    )(x, w)

x, w = jnp.ones((8, 4)), jnp.ones((4, 8))
print(sys.argv[1:], step(x, w).sum(), "all_gather_matmul" in step.lower(x, w).as_text())
"""


def test_the_command(tmp_path, capsys):
    main = runpy.run_module("jflux.fuse", run_name="the command")["main"]
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    jit = jax.jit
    assert main([str(script), "--steps", "3"]) == 0
    assert capsys.readouterr().out == "['--steps', '3'] 256.0 True\n"
    assert main(["--report", str(script)]) == 0
    report, last = capsys.readouterr().out.split("\n\n")
    assert report.startswith("step:\n") and "train.py:11" in report and "False" in last
    assert main(["--report", "--first", "--skip", "all_gather_matmul", str(script)]) == 0
    out = capsys.readouterr().out
    assert "all_gather -> all_gather  (`only` or `skip` leaves it out)" in out and "256" not in out
    assert jax.jit is jit


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
