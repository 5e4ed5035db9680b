"""Every op of the registry under jit, grad, vmap, scan, while_loop, cond, remat and donation."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import (
    OPS,
    RANKS,
    assert_close,
    each_call,
    exact_vjp,
    fused_calls,
    make_mesh,
    normal,
    of_way,
    operands,
    per_device,
    run,
)
from jax import lax
from jax.sharding import PartitionSpec as P
from layers import VMA, assert_near, check_product, in_float64

import jflux
from jflux import testing
from jflux._ops._spec import all_ops, collectives
from jflux._ops.collectives.all_reduce import ALGORITHMS
from jflux._ops.products import matmul_all_reduce

EACH = each_call(lead=(3,), k=8, n=8, dtype=jnp.bfloat16)


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
        assert_near(results, in_float64(_reference(self, transform, **options), *args), roundings=8)


@functools.cache
def _reference(case, transform, **options):
    return jax.jit(case.program(transform, jflux.reference, **options))


def _product(call, way):
    def op(module, x, w):
        return call.bind("tp", module)(x, w)

    return Case(f"{call.op} {way}", op, (call.x_shape(WORLD), call.w_shape(WORLD)))


def _collective(spec, way):
    return lambda module, x: spec.on(x, axis_name="tp", reference=module is jflux.reference, **way)


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
    *(
        _product(of_way(op, way, lead=(3,), k=8, n=8, dtype=jnp.bfloat16), way)
        for op in OPS
        for way in range(len(all_ops()[op].ways))
    ),
    *(
        Case(f"{spec.name} {i}", _collective(spec, way), ((WORLD, WORLD, 3),))
        for spec in collectives()
        for i, way in enumerate(spec.ways)
    ),
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
    guide/operations.md.)"""

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


# ---- Products: derivatives and vmap --------------------------------------------------------------


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
            check_product(y[:, i, j], call, mesh, x[:, i, j], w[:, i])


@EACH
def test_vmap_out_axes(call):
    mesh = make_mesh((RANKS,))
    x = normal(0, (RANKS, 4, *call.x_shape(RANKS)), call.dtype)
    w = normal(1, (RANKS, *call.w_shape(RANKS)), call.dtype)
    f = jax.vmap(call.bind("tp"), in_axes=(0, None), out_axes=-1)
    y = run(jax.jit(per_device(mesh, f)), x, w)
    for b in range(4):
        check_product(y[..., b], call, mesh, x[:, b], w)


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
