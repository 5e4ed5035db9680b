"""Types that JAX gives arrays inside shard_map: what varies over which mesh axis."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import PRODUCTS, make_mesh, of_way
from jax import lax
from jax.sharding import PartitionSpec as P

import jflux
from jflux._ops._spec import all_ops, collectives
from jflux._ranks import meshes
from jflux.nn import _shared_gather as _shared_gather_of_nn

pytestmark = pytest.mark.wide  # see conftest.strict

close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)


def _normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


# ---- vmap of shard_map, over a mesh axis ---------------------------------------------------------


def _of_product(op):
    spec = all_ops()[op]
    options = spec.ways[0]
    x, w, y = spec.partition("tp", **options)

    def f(a, w):
        return spec.function(a, w, axis_name="tp", **options)

    return f, (_normal(0, 8, 6), _normal(1, 6, 4)), (x, w), y


def _grouped(x, w):
    return jflux.grouped_matmul(x, w, np.array([3, 5]), activation="silu")


def _attention(q, k):
    return jflux.attention(q, k, k, axis_name="tp")


#: name: (f, operands, their specs, the result's).
CALLS = {
    **{op: _of_product(op) for op in PRODUCTS},
    "grouped_matmul": (
        _grouped,
        (_normal(0, 8, 6), _normal(1, 2, 6, 4)),
        (P(), P(None, None, "tp")),
        P(None, "tp"),
    ),
    "attention": (
        _attention,
        (_normal(0, 1, 8, 2, 4), _normal(1, 1, 8, 2, 4)),
        (P(None, "tp"), P(None, "tp")),
        P(None, "tp"),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_batch_over_a_mesh_axis(name):
    """Gradients of vmap(shard_map), and vmap of gradients; of one operand all have the same."""
    f, operands, in_specs, out_specs = CALLS[name]
    one = jax.shard_map(f, mesh=make_mesh((2, 2), ("data", "tp")), in_specs=in_specs,
                        out_specs=out_specs)  # fmt: skip

    def loss(*operands):
        return jnp.sum(one(*operands) ** 2)

    gradients = jax.grad(loss, (0, 1))

    @functools.partial(jax.jit, static_argnums=0)
    def both(dims, *operands):
        batched = jax.vmap(loss, dims, spmd_axis_name="data")
        return (
            jax.grad(lambda *operands: jnp.sum(batched(*operands)), (0, 1))(*operands),
            jax.vmap(gradients, dims, spmd_axis_name="data")(*operands),
        )

    for dims in ((0, None), (None, 0))[: 1 if name == "attention" else 2]:
        given = [np.stack([a, a / 2]) if d == 0 else a for a, d in zip(operands, dims, strict=True)]
        each = [
            jax.jit(gradients)(
                *(a if d is None else a[i] for a, d in zip(given, dims, strict=True))
            )
            for i in range(2)
        ]
        stacked = [np.stack(ds) for ds in zip(*each, strict=True)]
        of_sum, of_each = both(dims, *given)
        for got, want, d in zip(of_sum, stacked, dims, strict=True):
            close(got, want if d == 0 else want.sum(0))
        jax.tree.map(close, list(of_each), stacked)


# ---- Operands that vary over different axes ------------------------------------------------------

#: What an operand may vary over, on a mesh with these axes.
SUBSETS = ((), ("data",), ("tp",), ("data", "tp"))


def _product_call(op):
    call = of_way(op, 0, lead=(3,), k=8, n=8, dtype=jnp.float32)
    return call.bind("tp"), (call.x_shape(2), call.w_shape(2))


def _collective_call(spec):
    return functools.partial(spec.on, axis_name="tp", **spec.ways[0]), ((2, 2, 3),)


def _with_norm(op):
    def f(*operands):
        *operands, residual, scale = operands
        norm = jflux.RMSNorm(scale)
        return getattr(jflux, op)(*operands, axis_name="tp", residual=residual, norm=norm)

    return f


#: name: (f, operands' shapes).
ALIGNED = {
    **{op: _product_call(op) for op in PRODUCTS},
    **{spec.name: _collective_call(spec) for spec in collectives()},
    "grouped_matmul": (_grouped, ((8, 6), (2, 6, 4))),
    "attention": (_attention, ((1, 4, 2, 4), (1, 4, 2, 4))),
}
#: Sums: op: shapes of the operands before a residual and a norm's scale.
SUMS = {"all_reduce": ((8, 4),), "matmul_all_reduce": ((8, 6), (6, 4))}


def _check_types(f, shapes, axes, expected):
    """Of results, tangents, cotangents and batches, of operands that vary over these axes."""

    def local(*arrays):
        arrays = [meshes.vary(a, names) for a, names in zip(arrays, axes, strict=True)]
        ys, dys = jax.jvp(f, arrays, arrays)
        same, transpose = jax.vjp(f, *arrays)
        for y in jax.tree.leaves((f(*arrays), ys, dys, same)):
            assert meshes.varying(y) == expected
        for a, ct in zip(arrays, transpose(ys), strict=True):
            assert meshes.varying(ct) == meshes.varying(a)
        for batched in range(len(arrays)):
            given = [a[None] if i == batched else a for i, a in enumerate(arrays)]
            dims = [0 if i == batched else None for i in range(len(arrays))]
            for y in jax.tree.leaves(jax.vmap(f, dims)(*given)):
                assert meshes.varying(y) == expected
        return ()

    mesh = make_mesh((2, 2), ("data", "tp"))
    f_of_ranks = jax.shard_map(local, mesh=mesh, in_specs=P(), out_specs=())
    jax.eval_shape(f_of_ranks, *(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes))


@pytest.mark.parametrize("name", ALIGNED)
def test_operands_that_vary_over_different_axes(name):
    f, shapes = ALIGNED[name]
    for axes in itertools.product(SUBSETS, repeat=len(shapes)):
        union = frozenset().union(*axes)
        if name in SUMS:
            union -= {"tp"}
        elif name != "grouped_matmul":  # which has no axis of its own
            union |= {"tp"}
        _check_types(f, shapes, axes, union)


@pytest.mark.parametrize("op", SUMS)
def test_operands_that_are_the_same_on_all_ranks(op):
    f, shapes = _with_norm(op), SUMS[op]
    others = ((),) * (len(shapes) - 1)
    for axes in itertools.product(SUBSETS, SUBSETS[:2], SUBSETS[:2]):
        union = frozenset().union(*axes) - {"tp"}
        _check_types(f, (*shapes, (8, 4), (4,)), (axes[0], *others, *axes[1:]), union)


# ---- Several results, of which some have no gradient ---------------------------------------------

WIDE, LONG = P(None, "tp"), P("tp")


def _shared_gather(m, x, a, b):
    options = {"axis_name": "tp", "gather_dimension": 0, "transpose_rhs": False}
    if m is not jflux:
        return m.all_gather_matmul(x, (a, b), axis_name="tp")
    y, gathered = _shared_gather_of_nn.first(x, a, **options)
    return y, _shared_gather_of_nn.next_one(x, gathered, b, **options)


#: name: (function of jflux or its references and operands, operands, their specs, results).
SEVERAL = {
    "shared gather": (
        _shared_gather,
        (_normal(0, 8, 6), _normal(1, 6, 4), _normal(2, 6, 4)),
        (LONG, WIDE, WIDE),
        2,
    ),
    "gated": (
        lambda m, x, *ws: m.all_gather_matmul(
            x, ws, axis_name="tp", gated=True, activation="silu", return_gathered=True
        ),
        (_normal(0, 8, 6), _normal(1, 6, 4), _normal(2, 6, 4)),
        (LONG, WIDE, WIDE),
        2,
    ),
    "two weights": (
        lambda m, x, *ws: m.all_gather_matmul(x, ws, axis_name="tp", return_gathered=True),
        (_normal(0, 8, 6), _normal(1, 6, 4), _normal(2, 6, 2)),
        (LONG, WIDE, WIDE),
        3,
    ),
    "exchanged": (
        lambda m, x, w: m.all_to_all_matmul(
            x, w, axis_name="tp", split_axis=0, concat_axis=1, return_exchanged=True
        ),
        (_normal(0, 8, 6), _normal(1, 6, 4)),
        (WIDE, P()),
        2,
    ),
    "norm": (
        lambda m, x, w, r, s: m.matmul_all_reduce(
            x, w, axis_name="tp", residual=r, norm=jflux.RMSNorm(s)
        ),
        (_normal(0, 8, 6), _normal(1, 6, 4), _normal(2, 8, 4), _normal(3, 4)),
        (WIDE, LONG, P(), P()),
        2,
    ),
}


@pytest.mark.parametrize("name", SEVERAL)
def test_results_without_a_gradient(name):
    """Each result alone has one; the others are unused, or under stop_gradient."""
    f, operands, specs, count = SEVERAL[name]
    mesh = make_mesh((2, 2), ("data", "tp"))

    def gradients(m, used, others_are_used):
        def loss(*operands):
            results = jax.tree.leaves(f(m, *operands))
            total = jnp.sum(jnp.sin(results[used]))
            if others_are_used:
                total += sum(jnp.sum(lax.stop_gradient(y)) for y in results)
            return total

        grad = jax.grad(loss, tuple(range(len(operands))))
        return jax.shard_map(grad, mesh=mesh, in_specs=specs, out_specs=specs)

    @functools.partial(jax.jit, static_argnums=0)
    def every(m, *operands):
        choices = itertools.product(range(count), (False, True))
        return [gradients(m, *choice)(*operands) for choice in choices]

    jax.tree.map(close, every(jflux, *operands), every(jflux.reference, *operands))
