"""The ops under jit, grad, vmap, scan, while_loop, cond, checkpoint and donation; and among other
collectives, many in flight."""

import dataclasses
import functools
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import (
    PLATFORM,
    RANKS,
    Call,
    assert_close,
    check_values,
    compiled_text,
    dots,
    exact,
    exact_vjp,
    fused_calls,
    make_mesh,
    normal,
    operands,
    per_device,
    run,
)
from jax import lax
from jax.sharding import PartitionSpec as P

import jflux
from jflux import testing
from jflux._ops import matmul_all_reduce
from jflux._ops.all_reduce import ALGORITHMS

GATHER = Call("all_gather_matmul", lead=(3,), k=8, n=6, dtype=jnp.bfloat16)
SCATTER = Call("matmul_reduce_scatter", lead=(3,), k=8, n=6, dtype=jnp.bfloat16)
EXCHANGE = Call("matmul_all_to_all", lead=(3,), k=8, n=8, dtype=jnp.bfloat16)
EACH = pytest.mark.parametrize("call", [GATHER, SCATTER, EXCHANGE], ids=lambda c: c.op)
VMA = pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "no_vma"])


def _check(y, call, mesh, x, w, factor=1.0):
    world = mesh.devices.size
    scale = exact(call, mesh, "tp", np.abs(x), np.abs(w))
    assert_close(
        y, exact(call, mesh, "tp", x, w), scale, call.dtype, call.terms(world), factor=factor
    )


# A layer over global arrays: y = tanh(x @ w1) @ w2, x and y [m, d] sharded by rows over "tp".
def _layer(x, w1, w2):
    h = jnp.tanh(jflux.all_gather_matmul(x, w1, axis_name="tp"))
    return jflux.matmul_reduce_scatter(h, w2, axis_name="tp")


LAYER_SPECS = (P("tp"), P(None, "tp"), P("tp"))


def _layer_operands(m=3 * RANKS, d=8, f=2 * RANKS, dtype=jnp.bfloat16, layers=None):
    lead = () if layers is None else (layers,)
    return (
        normal(0, (m, d), dtype),
        (normal(1, (*lead, d, f), np.float64) / np.sqrt(d)).astype(dtype),
        (normal(2, (*lead, f, d), np.float64) / np.sqrt(f)).astype(dtype),
    )


def _float64(f, *args):
    """`f` of the operands in float64, on global arrays: what the sharded program should give."""
    with jax.enable_x64(True):
        args = [jnp.asarray(np.asarray(a, np.float64)) for a in args]
        return jax.tree.map(np.asarray, jax.jit(f)(*args))


def _assert_near(got, want, dtype=jnp.bfloat16, roundings=30):
    """For chains of products: relative to the largest element, allowing for several roundings."""
    unit = float(jnp.finfo(dtype).eps)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        g = np.asarray(g, np.float64)
        assert g.shape == w.shape
        assert np.abs(g - w).max() <= roundings * unit * max(np.abs(w).max(), unit)


# ---- Every op, transformed -----------------------------------------------------------------------

WORLD = min(RANKS, 4)


@dataclasses.dataclass(frozen=True)
class Case:
    """A call of any op, of operands in bfloat16."""

    name: str
    op: Any  # a function of a module (jflux or its reference) and one rank's operands
    shapes: tuple[tuple[int, ...], ...]  # of these
    shared: int = 0  # so many operands, the last ones, are the same on all ranks
    ranks: int = WORLD
    target: str | None = None  # what it compiles to; by default what its name begins with

    def __str__(self):
        return self.name

    @property
    def own(self):
        return len(self.shapes) - self.shared

    def operands(self, seed=0):
        leads = [(self.ranks,)] * self.own + [()] * self.shared
        shapes = [lead + shape for lead, shape in zip(leads, self.shapes, strict=True)]
        return [normal(seed + i, shape, jnp.bfloat16) for i, shape in enumerate(shapes)]

    @property
    def specs(self):
        return (P("tp"),) * self.own + (P(),) * self.shared

    def put(self, arrays):
        """On the devices."""
        mesh = make_mesh((self.ranks,))
        shardings = [jax.NamedSharding(mesh, spec) for spec in self.specs]
        return [jax.device_put(a, to) for a, to in zip(arrays, shardings, strict=True)]

    def program(self, transform, module=jflux, **options):
        """The transformed op on all ranks; the first dimension of its results is theirs."""
        body = transform(functools.partial(self.op, module))

        def local(*args):
            results = body(*(a[0] for a in args[: self.own]), *args[self.own :])
            return jax.tree.map(lambda y: jnp.asarray(y)[None], results)

        mesh = make_mesh((self.ranks,))
        return jax.shard_map(local, mesh=mesh, in_specs=self.specs, out_specs=P("tp"), **options)

    def check(self, results, transform, args, **options):
        """Against the reference in float64."""
        _assert_near(results, _float64(_reference(self, transform, **options), *args), roundings=8)


@functools.cache
def _reference(case, transform, **options):
    return jax.jit(case.program(transform, jflux.reference, **options))


def _product(call):
    def op(module, x, w):
        return call.bind("tp", module)(x, w)

    return Case(call.op, op, (call.x_shape(WORLD), call.w_shape(WORLD)))


def _op(name, **options):
    return lambda module, *args: getattr(module, name)(*args, axis_name="tp", **options)


def _with_norm(name, norm, operands):
    """The op of so many operands; a residual and the norm's factors come after them."""

    def op(module, *args):
        residual, *factors = args[operands:]
        options = {"residual": residual, "norm": norm(*factors)}
        return getattr(module, name)(*args[:operands], axis_name="tp", **options)

    return op


RMS, LAYER = jflux.RMSNorm, jflux.LayerNorm
ROWS, WIDTH = (4, 64), (64,)
TILES = ((128 * WORLD, 8), (8, 8))
CASES = (
    *map(_product, (GATHER, SCATTER, EXCHANGE)),
    Case("all_gather", _op("all_gather", axis=1, tiled=True), ((3, 8),)),
    Case("reduce_scatter", _op("reduce_scatter", scatter_dimension=1), ((3, WORLD, 8),)),
    Case("all_to_all", _op("all_to_all", split_axis=0, concat_axis=1, tiled=True), ((WORLD, 6),)),
    *(Case(f"all_reduce {a}", _op("all_reduce", algorithm=a), ((3, 8),)) for a in ALGORITHMS),
    Case("all_reduce RMSNorm", _with_norm("all_reduce", RMS, 1), (ROWS, ROWS, WIDTH), 2),
    Case("all_reduce LayerNorm", _with_norm("all_reduce", LAYER, 1), (ROWS, ROWS, WIDTH, WIDTH), 3),
    Case(
        "matmul_all_reduce summed", _op("matmul_all_reduce"), ((3, 8), (8, 16)), target="all_reduce"
    ),
    Case("matmul_all_reduce tiles", _op("matmul_all_reduce"), TILES),
    Case("matmul_all_reduce few rows", _op("matmul_all_reduce"), ((32, 8), (8, 8200)), ranks=2),
    Case(
        "matmul_all_reduce tiles LayerNorm",
        _with_norm("matmul_all_reduce", LAYER, 2),
        (*TILES, (128 * WORLD, 8), (8,), (8,)),
        3,
    ),
)


@pytest.fixture
def small_tiles(monkeypatch):
    """Products are summed tile by tile from fewer bytes on."""
    monkeypatch.setattr(matmul_all_reduce, "MOST_BYTES", 2048)


@pytest.fixture(params=CASES, ids=str)
def case(request, small_tiles):
    return request.param


def _plain(op):
    return op


def _and_gradients(f):
    """Results, and the gradient for them as their own cotangents."""

    def both(*args):
        y, pull = jax.vjp(f, *args)
        return y, pull(y)

    return both


def _over_a_batch(f):
    """vmap over the first operand, in another order for each example."""

    def batched(x, *rest):
        xs = jnp.stack([jnp.roll(x, i) for i in range(3)])
        return jax.vmap(f, in_axes=(0,) + (None,) * len(rest))(xs, *rest)

    return batched


def _own_size(ys):
    return sum(jnp.sum(jnp.abs(y.astype(jnp.float32))) for y in jax.tree.leaves(ys))


def _size(ys):
    """On all ranks the same."""
    return lax.psum(_own_size(ys), "tp")


def _while_loop(op):
    """Until what comes has reached some size in all. (The predicate comes from the body: docs/
    design/0005, "Loops".)"""

    def f(x, *rest):
        first = op(x, *rest)
        enough = 3.5 * _size(first)

        def step(state):
            i, ys, own, _ = state
            new = op(jnp.roll(x, i), *rest)
            own += _own_size(new)
            ys = jax.tree.map(lambda y, n: y / 2 + n, ys, new)
            return i + 1, ys, own, lax.psum(own, "tp") < enough

        start = (1, first, _own_size(first), enough > 0)
        return lax.while_loop(lambda state: state[3], step, start)[:2]

    return f


def _cond(op):
    def f(x, *rest):
        return lax.cond(_size(x) > 1, op, lambda x, *rest: op(2 * x, *rest), x, *rest)

    return f


def _scan(op):
    """Each step's operand depends on what came before."""

    def f(x, *rest):
        def step(x, _):
            ys = op(x, *rest)
            mean = sum(jnp.mean(y) for y in jax.tree.leaves(ys))
            return jnp.roll(x, 1) * jnp.cos(mean), ys

        return lax.scan(step, x, None, length=3)[1]

    return f


TRANSFORMS = {
    "while_loop": _while_loop,
    "cond and gradient": lambda op: _and_gradients(_cond(op)),
    "scan and gradient": lambda op: _and_gradients(_scan(op)),
    "checkpoint and gradient": lambda op: _and_gradients(jax.checkpoint(op)),
    "vmap of gradients": lambda op: _over_a_batch(_and_gradients(op)),
    "gradient of vmap": lambda op: _and_gradients(_over_a_batch(op)),
}


@VMA
def test_jit_and_eager(case, check_vma):
    args = case.operands()
    f = case.program(_plain, check_vma=check_vma)
    results = run(jax.jit(f), *args)
    case.check(results, _plain, args, check_vma=check_vma)
    jax.tree.map(np.testing.assert_array_equal, f(*args), results)


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms(case, transform):
    f, args = TRANSFORMS[transform], case.operands()
    case.check(run(jax.jit(case.program(f)), *args), f, args)


def test_gradients_without_vma(case):
    args = case.operands()
    results = run(jax.jit(case.program(_and_gradients, check_vma=False)), *args)
    case.check(results, _and_gradients, args, check_vma=False)


def test_compiled_ahead_of_time_and_several_executions_in_flight(case):
    """One program dispatched again and again before any result is waited for."""
    each = [case.operands(seed) for seed in range(12)]
    compiled = jax.jit(case.program(_plain)).lower(*each[0]).compile()
    assert fused_calls(compiled.as_text()) == [case.target or case.name.split()[0]]
    jax.block_until_ready(compiled(*each[0]))
    testing.poison_workspaces()
    for args, results in zip(each, [compiled(*args) for args in each], strict=True):
        case.check(results, _plain, args)


def test_donated_operands(case):
    """Operands in buffers that results may take over, while peers may still read what was sent."""

    def and_twice(op):
        return lambda *args: (op(*args), [a * 2 for a in args[: case.own]])

    f = jax.jit(case.program(and_twice), donate_argnums=range(case.own))
    arrays = case.operands()
    for _ in range(5):
        testing.poison_workspaces()
        args = case.put(arrays)
        results = f(*args)
        assert all(a.is_deleted() for a in args[: case.own])
        case.check(results, and_twice, arrays)


def test_every_op_in_one_program(small_tiles):
    """In any order, as none depends on another one; and several executions in flight."""
    cases = [case for case in CASES if case.ranks == WORLD]
    each = [[case.operands(seed) for case in cases] for seed in range(3)]

    @jax.jit
    def f(args):
        return [case.program(_plain)(*a) for case, a in zip(cases, args, strict=True)]

    for args, results in zip(each, [f(args) for args in each], strict=True):
        for case, a, y in zip(cases, args, results, strict=True):
            case.check(y, _plain, a)


def test_lowered_together_and_compiled_in_another_order():
    mesh = make_mesh((RANKS,))
    cases = []
    for n in (3, 4, 5):
        call = Call("all_gather_matmul", lead=(2,), k=4, n=n, dtype=jnp.bfloat16)
        op = jax.jit(call.bind("tp"))
        args = operands(call, mesh, "tp", seed=n)
        f = per_device(mesh, lambda x, w, op=op: (op(x, w), op(x * 2, w), op(x * 4, w)))
        cases.append((call, args, jax.jit(f).lower(*args)))
    compiled = [(call, args, lowered.compile()) for call, args, lowered in reversed(cases)]
    pending = [(call, args, f(*args)) for _ in range(3) for call, args, f in compiled]
    for call, (x, w), ys in pending:
        for power, y in enumerate(ys):
            _check(np.asarray(y, np.float64) / 2**power, call, mesh, x, w)


# ---- Derivatives ---------------------------------------------------------------------------------


@VMA
@pytest.mark.parametrize("transform", ["grad", "value_and_grad", "vjp"])
def test_layer_gradients(check_vma, transform):
    mesh = make_mesh((RANKS,))
    args = _layer_operands()
    f = jax.shard_map(
        _layer, mesh=mesh, in_specs=LAYER_SPECS, out_specs=P("tp"), check_vma=check_vma
    )

    def loss(f, *args):
        return jnp.sum(jnp.sin(f(*args).astype(jnp.promote_types(args[0].dtype, jnp.float32))))

    def take(f, *args):
        numbers = (0, 1, 2)
        if transform == "grad":
            return jax.grad(functools.partial(loss, f), numbers)(*args)
        if transform == "value_and_grad":
            return jax.value_and_grad(functools.partial(loss, f), numbers)(*args)
        y, pull = jax.vjp(f, *args)
        return y, pull(jnp.cos(y))

    got = run(jax.jit(functools.partial(take, f)), *args)
    want = _float64(functools.partial(take, lambda x, w1, w2: jnp.tanh(x @ w1) @ w2), *args)
    _assert_near(got, want)


@EACH
def test_gradient_with_respect_to_one_operand(call):
    mesh = make_mesh((RANKS,))
    x, w = operands(call, mesh, "tp")
    dy = normal(5, (RANKS, *call.y_shape(RANKS)), call.dtype)
    f = per_device(mesh, call.bind("tp"))
    want = exact_vjp(call, mesh, "tp", x, w, dy)
    scale = exact_vjp(call, mesh, "tp", *map(np.abs, (x, w, dy)))
    dx = run(jax.jit(lambda x, w, dy: jax.vjp(lambda x: f(x, w), x)[1](dy)[0]), x, w, dy)
    assert_close(dx, want[0], scale[0], call.dtype, call.n * RANKS)
    dw = run(jax.jit(lambda x, w, dy: jax.vjp(lambda w: f(x, w), w)[1](dy)[0]), x, w, dy)
    assert_close(dw, want[1], scale[1], call.dtype, 3 * RANKS)


@pytest.mark.skipif(PLATFORM != "cpu", reason="float32 takes the reference")
def test_second_derivatives():
    """Reverse over reverse: the gradient of a squared gradient."""
    mesh = make_mesh((RANKS,))
    args = _layer_operands(dtype=np.float32)
    f = jax.shard_map(_layer, mesh=mesh, in_specs=LAYER_SPECS, out_specs=P("tp"))

    def outer(f, *args):
        def inner(x, w1, w2):
            return jnp.sum(jnp.sin(f(x, w1, w2)))

        return jax.grad(lambda *a: sum(jnp.sum(g**2) for g in jax.grad(inner, (0, 1, 2))(*a)))(
            *args
        )

    got = run(jax.jit(functools.partial(outer, f)), *args)
    want = _float64(functools.partial(outer, lambda x, w1, w2: jnp.tanh(x @ w1) @ w2), *args)
    _assert_near(got, want, np.float32, roundings=200)


@EACH
def test_forward_mode_is_an_error(call):
    mesh = make_mesh((RANKS,))
    x, w = operands(call, mesh, "tp")
    f = per_device(mesh, call.bind("tp"))
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jit(lambda x, w: jax.jvp(f, (x, w), (x, w))).lower(x, w)


# ---- vmap ----------------------------------------------------------------------------------------


@EACH
def test_gradient_of_vmap(call):
    mesh = make_mesh((RANKS,))
    cases = [operands(call, mesh, "tp", seed=7 * i) for i in range(2)]
    xs, ws = (np.stack([c[i] for c in cases], axis=1) for i in range(2))
    dys = normal(9, (RANKS, 2, *call.y_shape(RANKS)), call.dtype)
    op = call.bind("tp")
    for in_axes in ((0, 0), (0, None), (None, 0)):
        args = [a if axis == 0 else a[:, 0] for a, axis in zip((xs, ws), in_axes, strict=True)]
        f = per_device(mesh, jax.vmap(op, in_axes=in_axes))
        dx, dw = run(jax.jit(lambda x, w, dy, f=f: jax.vjp(f, x, w)[1](dy)), *args, dys)
        want, scale = [], []
        for b in range(2):
            x = xs[:, b] if in_axes[0] == 0 else xs[:, 0]
            w = ws[:, b] if in_axes[1] == 0 else ws[:, 0]
            want.append(exact_vjp(call, mesh, "tp", x, w, dys[:, b]))
            scale.append(exact_vjp(call, mesh, "tp", abs(x), abs(w), abs(dys[:, b])))
        for i, got in enumerate((dx, dw)):
            parts = [np.stack([p[i] for p in z], axis=1) for z in (want, scale)]
            if in_axes[i] is None:
                parts = [p.sum(axis=1) for p in parts]
            assert_close(got, *parts, call.dtype, 2 * 6 * RANKS, factor=2)


@EACH
def test_nested_vmap(call):
    mesh = make_mesh((RANKS,))
    x = normal(0, (RANKS, 2, 3, *call.x_shape(RANKS)), call.dtype)
    w = normal(1, (RANKS, 2, *call.w_shape(RANKS)), call.dtype)
    op = call.bind("tp")
    f = jax.vmap(jax.vmap(op, in_axes=(0, None)), in_axes=(0, 0))
    y = run(jax.jit(per_device(mesh, f)), x, w)
    for i in range(2):
        for j in range(3):
            _check(y[:, i, j], call, mesh, x[:, i, j], w[:, i])


@EACH
def test_vmap_out_axes(call):
    mesh = make_mesh((RANKS,))
    x = normal(0, (RANKS, 4, *call.x_shape(RANKS)), call.dtype)
    w = normal(1, (RANKS, *call.w_shape(RANKS)), call.dtype)
    f = jax.vmap(call.bind("tp"), in_axes=(0, None), out_axes=-1)
    y = run(jax.jit(per_device(mesh, f)), x, w)
    for b in range(4):
        _check(y[..., b], call, mesh, x[:, b], w)


@EACH
@pytest.mark.parametrize("batched", ["x", "w", "xw"])
def test_vmap_over_nothing(call, batched):
    """A batch of size 0 has a result of that size."""
    mesh = make_mesh((RANKS,))
    x, w = operands(call, mesh, "tp")
    axes = (0 if "x" in batched else None, 0 if "w" in batched else None)

    def body(x, w):
        x = jnp.stack([x] * 2)[:0] if "x" in batched else x
        w = jnp.stack([w] * 2)[:0] if "w" in batched else w
        y = jax.vmap(call.bind("tp"), in_axes=axes)(x, w)
        return y, jnp.zeros(1)

    y, _ = run(jax.jit(per_device(mesh, body)), x, w)
    assert y.shape == (RANKS, 0, *call.y_shape(RANKS))


# ---- Control flow --------------------------------------------------------------------------------


@VMA
def test_scan_over_layers_and_its_gradient(check_vma):
    mesh = make_mesh((RANKS,))
    x, w1, w2 = _layer_operands(layers=5)

    def model(layer, x, w1, w2):
        return lax.scan(lambda h, ws: (h + layer(h, *ws), None), x, (w1, w2))[0]

    f = jax.shard_map(
        functools.partial(model, _layer),
        mesh=mesh, in_specs=(P("tp"), P(None, None, "tp"), P(None, "tp")), out_specs=P("tp"),
        check_vma=check_vma,
    )  # fmt: skip

    def step(f, x, w1, w2):
        y, pull = jax.vjp(f, x, w1, w2)
        return y, pull(y)

    got = run(jax.jit(functools.partial(step, f)), x, w1, w2)
    plain = functools.partial(model, lambda x, w1, w2: jnp.tanh(x @ w1) @ w2)
    _assert_near(got, _float64(functools.partial(step, plain), x, w1, w2), roundings=60)


@VMA
def test_while_loop_with_a_predicate_that_all_ranks_share(check_vma):
    mesh = make_mesh((RANKS,))
    args = _layer_operands()

    def model(layer, total, x, w1, w2):
        def again(state):
            return (state[0] < 7) & (state[2] < 1e9)

        def body(state):
            i, x, _ = state
            x = x + layer(x, w1, w2)
            return i + 1, x, total(jnp.sum(x.astype(jnp.float32) ** 2))

        start = jnp.zeros((), jnp.float32)
        return lax.while_loop(again, body, (0, x, start))[1]

    f = jax.shard_map(
        functools.partial(model, _layer, lambda s: lax.psum(s, "tp")),
        mesh=mesh, in_specs=LAYER_SPECS, out_specs=P("tp"), check_vma=check_vma,
    )  # fmt: skip
    plain = functools.partial(model, lambda x, w1, w2: jnp.tanh(x @ w1) @ w2, lambda s: s)
    _assert_near(run(jax.jit(f), *args), _float64(plain, *args), roundings=60)


@VMA
@pytest.mark.parametrize("predicate", [True, False])
def test_cond_with_a_predicate_that_all_ranks_share(check_vma, predicate):
    """Another op, and another shape, in each branch; and the gradient through it."""
    mesh = make_mesh((RANKS,))
    args = _layer_operands()

    def sharded(flag, x, w1, w2):
        def no(x, w1, w2):
            return 2 * _layer(x[:, ::-1], w1, w2)

        return lax.cond(flag, _layer, no, x, w1, w2)

    def plain(flag, x, w1, w2):
        def layer(x, w1, w2):
            return jnp.tanh(x @ w1) @ w2

        return lax.cond(flag, layer, lambda x, *w: 2 * layer(x[:, ::-1], *w), x, w1, w2)

    f = jax.shard_map(
        sharded, mesh=mesh, in_specs=(P(), *LAYER_SPECS), out_specs=P("tp"), check_vma=check_vma
    )

    def step(f, x, w1, w2):
        y, pull = jax.vjp(functools.partial(f, jnp.asarray(predicate)), x, w1, w2)
        return y, pull(y)

    got = run(jax.jit(functools.partial(step, f)), *args)
    _assert_near(got, _float64(functools.partial(step, plain), *args))


def test_loop_with_calls_of_several_trip_counts():
    """Two loops, one inside the other, over the same inner jit: many calls of one site."""
    mesh = make_mesh((RANKS,))
    call = Call("all_gather_matmul", lead=(2,), k=4, n=4, dtype=jnp.bfloat16)
    inner = jax.jit(call.bind("tp"))

    def body(x, w):
        def outer(total, i):
            def add(j, total):
                return total + inner((x * (i + j)).astype(x.dtype), w).astype(jnp.float32)

            return lax.fori_loop(0, 3, add, total), inner(x * i.astype(x.dtype), w)

        zero = inner(x * 0, w).astype(jnp.float32)
        total, each = lax.scan(outer, zero, jnp.arange(4.0))
        return total, each, inner(x, w)

    x, w = operands(call, mesh, "tp")
    total, each, last = run(jax.jit(per_device(mesh, body)), x, w)
    _check(last, call, mesh, x, w)
    for i in range(4):
        want = exact(call, mesh, "tp", (x * np.asarray(i, x.dtype)), w)
        scale = exact(call, mesh, "tp", abs(x * np.asarray(i, x.dtype)), abs(w))
        assert_close(each[:, i], want, scale, call.dtype, 4)
    pairs = sum(i + j for i in range(4) for j in range(3))
    want = pairs * exact(call, mesh, "tp", x, w)
    scale = pairs * exact(call, mesh, "tp", abs(x), abs(w))
    assert_close(total, want, scale, call.dtype, 4, factor=2)


# ---- checkpoint ----------------------------------------------------------------------------------

POLICIES = {
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "everything": jax.checkpoint_policies.everything_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
    "gathered": jax.checkpoint_policies.save_only_these_names("jflux_gathered"),
    "y": jax.checkpoint_policies.save_only_these_names("y"),
    "all but gathered": jax.checkpoint_policies.save_anything_except_these_names("jflux_gathered"),
}


@pytest.mark.parametrize("policy", POLICIES)
@VMA
def test_checkpoint_values(policy, check_vma):
    mesh = make_mesh((RANKS,))
    args = _layer_operands()
    layer = jax.checkpoint(_layer, policy=POLICIES[policy])
    f = jax.shard_map(
        lambda x, *w: layer(layer(x, *w), *w),
        mesh=mesh, in_specs=LAYER_SPECS, out_specs=P("tp"), check_vma=check_vma,
    )  # fmt: skip

    def plain(x, w1, w2):
        for _ in range(2):
            x = jnp.tanh(x @ w1) @ w2
        return x

    def step(f, *args):
        y, pull = jax.vjp(f, *args)
        return y, pull(y)

    got = run(jax.jit(functools.partial(step, f)), *args)
    _assert_near(got, _float64(functools.partial(step, plain), *args))


# y and both gradients of a y that is used linearly: what the backward pass wants again, if it was
# not kept, is the gathered x alone.
@pytest.mark.parametrize(
    "policy, gathers_again",
    [("nothing", True), ("gathered", False), ("everything", False)],
)
def test_recomputation_has_no_product(policy, gathers_again):
    mesh = make_mesh((RANKS,))
    f = per_device(mesh, jax.checkpoint(GATHER.bind("tp"), policy=POLICIES[policy]))
    x, w = operands(GATHER, mesh, "tp")
    dy = normal(5, (RANKS, *GATHER.y_shape(RANKS)), GATHER.dtype)

    def step(x, w, dy):
        y, pull = jax.vjp(f, x, w)
        return y, *pull(dy)

    text = compiled_text(step, x, w, dy)
    assert sorted(fused_calls(text)) == [GATHER.op, SCATTER.op]
    if PLATFORM == "cpu":
        assert dots(text) == 1  # dw
        assert (" all-gather(" in text) == gathers_again
    y, dx, dw = run(jax.jit(step), x, w, dy)
    _check(y, GATHER, mesh, x, w)
    want = exact_vjp(GATHER, mesh, "tp", x, w, dy)
    scale = exact_vjp(GATHER, mesh, "tp", *map(np.abs, (x, w, dy)))
    assert_close(dx, want[0], scale[0], GATHER.dtype, 6 * RANKS)
    assert_close(dw, want[1], scale[1], GATHER.dtype, 3 * RANKS)


def test_recomputation_of_matmul_reduce_scatter_is_dropped():
    """Its gradient needs x, w and dy, not its result: nothing is computed again."""
    mesh = make_mesh((RANKS,))
    f = per_device(mesh, jax.checkpoint(SCATTER.bind("tp"), policy=POLICIES["nothing"]))
    x, w = operands(SCATTER, mesh, "tp")

    def step(x, w, dy):
        y, pull = jax.vjp(f, x, w)
        return y, *pull(dy)

    text = compiled_text(step, x, w, normal(5, (RANKS, *SCATTER.y_shape(RANKS)), SCATTER.dtype))
    assert sorted(fused_calls(text)) == [GATHER.op, SCATTER.op]


@pytest.mark.parametrize("policy", ["nothing", "gathered"])
def test_checkpoint_inside_scan(policy):
    mesh = make_mesh((RANKS,))
    x, w1, w2 = _layer_operands(layers=3)
    layer = jax.checkpoint(_layer, policy=POLICIES[policy])

    def model(layer, x, w1, w2):
        return lax.scan(lambda h, ws: (h + layer(h, *ws), None), x, (w1, w2))[0]

    f = jax.shard_map(
        functools.partial(model, layer),
        mesh=mesh, in_specs=(P("tp"), P(None, None, "tp"), P(None, "tp")), out_specs=P("tp"),
    )  # fmt: skip

    def step(f, x, w1, w2):
        y, pull = jax.vjp(f, x, w1, w2)
        return y, pull(y)

    got = run(jax.jit(functools.partial(step, f)), x, w1, w2)
    plain = functools.partial(model, lambda x, w1, w2: jnp.tanh(x @ w1) @ w2)
    _assert_near(got, _float64(functools.partial(step, plain), x, w1, w2), roundings=60)


# ---- Donation ------------------------------------------------------------------------------------


def test_donated_state_of_a_training_loop():
    mesh = make_mesh((RANKS,))
    args = _layer_operands()
    f = jax.shard_map(_layer, mesh=mesh, in_specs=LAYER_SPECS, out_specs=P("tp"))

    def step(f, x, w1, w2):
        g1, g2 = jax.grad(lambda *w: jnp.mean(f(x, *w).astype(jnp.float32) ** 2), (0, 1))(w1, w2)
        return w1 - g1, w2 - g2

    jitted = jax.jit(functools.partial(step, f), donate_argnums=(1, 2))
    x, *ws = (
        jax.device_put(a, jax.NamedSharding(mesh, s))
        for a, s in zip(args, LAYER_SPECS, strict=True)
    )
    for _ in range(4):
        ws = jitted(x, *ws)

    def plain(x, w1, w2):
        def layer(x, w1, w2):
            return jnp.tanh(x @ w1) @ w2

        for _ in range(4):
            g1, g2 = jax.grad(lambda *w: jnp.mean(layer(x, *w) ** 2), (0, 1))(w1, w2)
            w1, w2 = w1 - g1, w2 - g2
        return w1, w2

    _assert_near(list(ws), list(_float64(plain, *args)), roundings=60)


# ---- Many in flight, among other collectives -----------------------------------------------------


def _mixture(x, ws, calls):
    """Independent calls of both ops between psum, all_gather and products, as a scheduler may run
    them in any order."""
    total, parts = jnp.zeros(x.shape, jnp.float32), []
    for i in range(calls):
        h = jnp.tanh(x * (1 + i / 8)).astype(x.dtype)
        up = jflux.all_gather_matmul(h, ws[0], axis_name="tp")
        parts.append(jflux.matmul_reduce_scatter(up, ws[1], axis_name="tp"))
        parts.append(h @ ws[2])
        if i % 3 == 0:
            parts.append(lax.psum(h, "tp"))
        if i % 4 == 0:
            parts.append(lax.all_gather(h, "tp", axis=0, tiled=True)[: h.shape[0]])
        if i % 5 == 0:
            parts.append(lax.psum_scatter(jnp.tile(h, (RANKS, 1)), "tp", tiled=True))
    return total + sum(p.astype(jnp.float32) for p in parts)


@VMA
def test_independent_calls_among_other_collectives(check_vma):
    """The mixture that deadlocks a handler which blocks, or which completes inline."""
    mesh = make_mesh((RANKS,))
    rows, d = 16, 64
    x = normal(0, (RANKS * rows, d), jnp.bfloat16)
    ws = [(normal(i + 1, (d, d), np.float64) / 8).astype(jnp.bfloat16) for i in range(3)]
    calls = 24
    f = jax.jit(
        jax.shard_map(
            functools.partial(_mixture, calls=calls),
            mesh=mesh,
            in_specs=(P("tp"), [P(None, "tp"), P("tp"), P()]),
            out_specs=P("tp"),
            check_vma=check_vma,
        )  # fmt: skip
    )
    results = []
    for i in range(8):
        results.append(f(x, ws))
        if i % 3 == 0:
            results[-1].block_until_ready()

    def plain(x, w0, w1, w2):
        shards = x.reshape(RANKS, rows, d)
        total = jnp.zeros_like(shards)
        for i in range(calls):
            h = jnp.tanh(shards * (1 + i / 8))
            total += (h @ w0) @ w1 + h @ w2
            total += h.sum(0) * (i % 3 == 0) + h[:1] * (i % 4 == 0) + h.sum(0) * (i % 5 == 0)
        return total.reshape(x.shape)

    want = _float64(plain, x, *ws)
    for y in results:
        _assert_near(y, want)
        np.testing.assert_array_equal(np.asarray(y), np.asarray(results[0]))


def test_equal_programs_in_flight():
    """Two compilations of one program: their calls carry the same names."""
    mesh = make_mesh((RANKS,))
    op = GATHER.bind("tp")
    fs = [jax.jit(per_device(mesh, lambda x, w: op(x, w))) for _ in range(3)]
    arrays = [operands(GATHER, mesh, "tp", seed=s) for s in range(3)]
    results = [(i, f(*arrays[i])) for _ in range(5) for i, f in enumerate(fs)]
    for i, y in results:
        _check(np.asarray(y), GATHER, mesh, *arrays[i])


def test_several_groups_with_different_work():
    """Two groups of one program, one of which has a loop twice as long: no group waits for
    another, and calls are not mixed up."""
    if RANKS < 4:
        pytest.skip("needs four devices")
    mesh = make_mesh((2, 2), ("dp", "tp"), order=(3, 1, 0, 2))
    x, w = operands(GATHER, mesh, "tp")
    inner = GATHER.bind("tp")

    def body(x, w):
        count = 3 + 3 * lax.axis_index("dp")

        def add(i, y):  # dependent on i, or XLA takes the call out of the loop
            return y + inner(jnp.where(i % 2 == 0, x, 2 * x), w).astype(jnp.float32)

        return lax.fori_loop(0, count, add, inner(x, w).astype(jnp.float32))

    y = run(jax.jit(per_device(mesh, body)), x, w)
    want = exact(GATHER, mesh, "tp", x, w)
    scale = exact(GATHER, mesh, "tp", abs(x), abs(w))
    for dp, count in enumerate((1 + 4, 1 + 9)):
        assert_close(y[dp], count * want[dp], count * scale[dp], GATHER.dtype, GATHER.k)


def test_threads_that_compile_and_run():
    """Several Python threads, each with programs whose calls XLA inlines several times."""
    mesh = make_mesh((RANKS,))
    errors = []

    def work(thread):
        try:
            for n in range(4):
                call = Call("all_gather_matmul", lead=(2,), k=4, n=2 + n, dtype=jnp.bfloat16)
                inner = jax.jit(call.bind("tp"))
                f = per_device(mesh, lambda x, w, op=inner: [op(x * s, w) for s in (1, 2, 4, 8)])
                x, w = operands(call, mesh, "tp", seed=10 * thread + n)
                for _ in range(3):
                    for power, y in enumerate(jax.jit(f)(x, w)):
                        _check(np.asarray(y, np.float64) / 2**power, call, mesh, x, w)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors[0]


def test_all_products_share_workspaces():
    """Shapes and ops in turns over the same workspaces: no call reads what another one left."""
    mesh = make_mesh((RANKS,))
    for _ in range(2):
        for rows in (1, 5, 2):
            for op in (GATHER.op, SCATTER.op, EXCHANGE.op):
                check_values(Call(op, lead=(rows,), k=7, n=rows, dtype=jnp.bfloat16), mesh, "tp")
