"""`wire=` in jflux.nn: functions, layers, mixtures, and the dot_general of other layers."""

import functools

import jax
import numpy as np
import pytest
from harness import make_mesh, run
from jax.sharding import PartitionSpec as P

import jflux
import jflux.nn as jnn
from jflux._stress.calls import normal

RANKS, WIDTH, HIDDEN, HEADS = 2, 64, 128, 4
WIRES = {"wire": "int8", "grad_wire": "int8"}


@pytest.fixture(autouse=True)
def at_any_size():
    with jflux.config(unchecked_kernels=True, always=True):
        yield


def _error(y, exact):
    y, exact = (np.asarray(a, np.float64) for a in (y, exact))
    return np.sqrt(np.mean((y - exact) ** 2) / np.mean(exact**2))


def _travels_quantised(found):
    """Whether an explanation has an op with a wire, or an exchange of bytes."""
    return "in int8" in found or "all_to_all  uint8" in found


def _weights(*shapes):
    return [
        normal(i, s, np.float32) / np.sqrt(s[0]).astype(np.float32) for i, s in enumerate(shapes)
    ]


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_mlps_and_attention(sequence_parallel):
    """Of global arrays and inside shard_map the same bits; the first products are as without, and
    so are gradients, but for a grad_wire."""
    mesh = make_mesh((RANKS,))
    x, *weights = _weights((8, WIDTH), (WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH))
    projections = [
        *_weights(*[(WIDTH, HEADS, WIDTH // HEADS)] * 3), normal(7, (HEADS, 16, WIDTH), np.float32)
    ]  # fmt: skip
    of = {"axis_name": "tp", "sequence_parallel": sequence_parallel, "mesh": mesh}

    def layers(x, weights, projections, **options):
        gate, up, down = weights
        return (
            jnn.mlp(x, up, down, **of, **options),
            jnn.gated_mlp(x, gate, up, down, **of, **options),
            jnn.attention(x[None], *projections, **of, **options)[0],
        )

    def pulled(x, wires):
        y, pull = jax.vjp(functools.partial(layers, **wires), x, weights, projections)
        return y, pull(y)[0]

    ways = {}, {"wire": "int8"}, {"wire": "int8", "grad_wire": "float8_e4m3fn"}
    exact, wired, both = run(jax.jit(lambda x: [pulled(x, wires) for wires in ways]), x)
    most = 8e-3 * np.sqrt(0.5 + (not sequence_parallel))
    for one, other, third in zip(exact[0], wired[0], both[0], strict=True):
        assert 2e-3 < _error(other, one) < most
        np.testing.assert_array_equal(other, third)
    assert _error(wired[1], exact[1]) < 2e-2  # of other results
    report = jflux.wire_report(lambda x: layers(x, weights, projections, wire="int8"), x)
    op = "matmul_reduce_scatter" if sequence_parallel else "matmul_all_reduce"
    assert [call.op for call in report] == [op] * 3


@pytest.mark.parametrize("exchange", ["gather", "dispatch", "fused"])
def test_mixtures(exchange):
    x, router = normal(0, (4, 8, WIDTH), np.float32), normal(1, (WIDTH, 4), np.float32)
    up, down = (w / 8 for w in (normal(2, (4, WIDTH, 16), np.float32),
                                normal(3, (4, 16, WIDTH), np.float32)))  # fmt: skip
    f = functools.partial(
        jnn.mixture, k=2, axis_name="tp", expert_axis="ep", exchange=exchange,
        mesh=make_mesh((2, 2), ("ep", "tp")),
    )  # fmt: skip
    exact, y = run(
        jax.jit(lambda *a: (f(*a).y, f(*a, wire="int8", grad_wire="int8").y)), x, router, up, down
    )
    assert 2e-3 < _error(y, exact) < 1.2e-2
    calls = jflux.wire_report(functools.partial(f, wire="int8"), x, router, up, down)
    assert {call.op for call in calls} == {
        "gather": {"reduce_scatter"}, "dispatch": {"moe_combine", "reduce_scatter"},
        "fused": {"moe.grouped_matmul_reduce_scatter"},
    }[exchange]  # fmt: skip


def test_layers_of_linen():
    """They have the fields, and hand them on."""
    pytest.importorskip("flax.linen")
    from jflux.nn import linen as jlinen

    x = normal(0, (1, 8, WIDTH), np.float32)
    with jax.set_mesh(make_mesh((RANKS,))):
        for layer in (
            jlinen.RowParallelDense(WIDTH, **WIRES),
            jlinen.MLP(HIDDEN, **WIRES),
            jlinen.Attention(HEADS, **WIRES),
            jlinen.MoE(4, 16, k=2, **WIRES),
        ):
            params = jax.eval_shape(layer.init, jax.random.key(0), x)
            assert _travels_quantised(str(jflux.explain(layer.apply, params, x)))
    with pytest.raises(TypeError, match="wire"):
        jlinen.ColumnParallelDense(WIDTH, **WIRES)


def test_layers_of_nnx():
    nnx = pytest.importorskip("flax.nnx")
    from jflux.nn import nnx as jnnx

    x = normal(0, (1, 8, WIDTH), np.float32)
    with jax.set_mesh(make_mesh((RANKS,))):
        rngs = nnx.Rngs(0)
        for layer in (
            jnnx.RowParallelDense(WIDTH, WIDTH, rngs=rngs, **WIRES),
            jnnx.MLP(WIDTH, HIDDEN, rngs=rngs, **WIRES),
            jnnx.Attention(HEADS, WIDTH, rngs=rngs, **WIRES),
            jnnx.MoE(WIDTH, 4, 16, 2, rngs=rngs, sows=False, **WIRES),
        ):
            graph, state = nnx.split(layer)
            f = lambda state, x, graph=graph: nnx.merge(graph, state)(x)  # noqa: E731
            assert _travels_quantised(str(jflux.explain(f, state, x)))


def test_the_dot_general_of_other_layers():
    x, w = normal(0, (8, WIDTH), np.float32), normal(1, (WIDTH, WIDTH), np.float32)
    dot = jnn.TensorParallel("tp", x_spec=P(), **WIRES).dot_general(("mlp", "embed"))
    with jax.set_mesh(make_mesh((RANKS,))):
        found = str(jflux.explain(lambda x, w: dot(x, w, (((1,), (0,)), ((), ()))), x, w))
    assert "matmul_reduce_scatter" in found and _travels_quantised(found)
