"""Programs that are compiled for GPUs that are not here: what XLA makes of them."""

import collections
import contextlib
import functools
import math
import re
from unittest import mock

import gpu_programs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import topologies
import two_level_gpu
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jflux
import jflux.nn
from jflux import _config, _native, parallel
from jflux._call import primitives
from jflux._ops._spec import products
from jflux._ranks import meshes, node_levels

RANKS = 4


def mesh_of(count, axis):
    """H100s of one host."""
    try:
        return Mesh(np.array(topologies.h100s(count)), (axis,))
    except RuntimeError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def mesh():
    return mesh_of(RANKS, "tp")


@contextlib.contextmanager
def nodes_of_two():
    def levels_over(platform, mesh, axis_names):
        nodes = {device.id: i // 2 for i, device in enumerate(mesh.devices.flat)}
        table = meshes.group_table(mesh, axis_names)
        return node_levels.levels_of(table, nodes, axis_names, mesh.shape)

    with gpu_programs.as_on_gpus(), mock.patch.object(primitives, "levels_over", levels_over):
        yield


def compiled(f, *shapes, mock_kernels=True):
    """Without kernels where this build may have none."""
    options = topologies.COMPILER_OPTIONS | {"xla_gpu_mock_custom_calls": mock_kernels}
    return jax.jit(f).lower(*shapes).compile(compiler_options=options)


def operand(mesh, spec, *shape):
    """Of all ranks, bfloat16, to compile for."""
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))


def product(mesh, spec, m, n, k):
    """(function, operands) of all ranks."""
    way = spec.ways[0]
    *specs, result = spec.partition("tp", **way)
    f = jax.shard_map(
        functools.partial(spec.function, axis_name="tp", **way), mesh=mesh, in_specs=tuple(specs),
        out_specs=result,
    )  # fmt: skip
    return f, [operand(mesh, specs[0], m, k), operand(mesh, specs[1], k, n)]


@pytest.mark.parametrize("chunks", [1, 2, 4])
@pytest.mark.parametrize("call", two_level_gpu.LARGE, ids=lambda call: call.op)
def test_transfers_between_nodes_run_beside_products(mesh, call, chunks):
    """Each of them, but for the last one of a sum, after which there is no product."""
    (spec,) = (spec for spec in products() if spec.name == call.op)
    f, operands = product(mesh, spec, call.m, call.n, call.k)
    with nodes_of_two(), _config.override(node_chunks=chunks, always=True):
        text = compiled(f, *operands).as_text()
    beside = [count for _, count in two_level_gpu.overlapped(text)]
    if call.op == "matmul_all_reduce":
        assert all(beside[:-1]) and len(beside) == (chunks if chunks > 1 else 0)
    else:
        assert all(beside) and len(beside) == chunks


def test_what_is_compiled_for_others_makes_no_heap(mesh):
    """Of GPUs, where there may be none. Only a build without kernels needs `lax`."""
    (spec,) = (spec for spec in products() if spec.name == "all_gather_matmul")
    f, operands = product(mesh, spec, 8192, 8192, 8192)
    assert not meshes.belongs_here(mesh)
    with jflux.config(strict=False):
        (call,) = jflux.explain(f, *operands)
        program = compiled(f, *operands, mock_kernels=False)
    kernels = re.findall(r'custom_call_target="jflux_(\w+)"', program.as_text())
    if _native.lib.built_with_cuda():
        assert call.plan.path == "fused" and kernels == ["all_gather_matmul"]
    else:
        assert "no CUDA kernels" in call.plan.reason and not kernels
    rows = 8192 // RANKS
    assert program.memory_analysis().output_size_in_bytes == 2 * 8192 * rows


@pytest.mark.parametrize("head_dim", [128, 192])
def test_attention_of_a_layer_keeps_no_scores(mesh, head_dim):
    """Heads are split, and the sequence is whole while it attends: cuDNN's form, or jflux's."""
    width, heads, length = 2048, 16, 8192

    def gradient(x, *weights):
        def loss(x):
            y = jflux.nn.attention(x, *weights, axis_name="tp", is_causal=True)
            return jnp.sum(y.astype(jnp.float32))

        return jax.grad(loss)(x)

    sequence, columns, rows = P(None, "tp"), P(None, "tp"), P("tp")
    f = jax.shard_map(
        gradient, mesh=mesh, in_specs=(sequence, columns, columns, columns, rows),
        out_specs=sequence,
    )  # fmt: skip
    operands = [
        operand(mesh, sequence, 1, length, width),
        *[operand(mesh, columns, width, heads, head_dim)] * 3,
        operand(mesh, rows, heads, head_dim, width),
    ]
    with gpu_programs.as_on_gpus():
        program = compiled(f, *operands)
    kernels = r"__cudnn\$fmha\w+" if head_dim == 128 else r"jflux_flash_attention\w*"
    assert len(re.findall(rf'custom_call_target="{kernels}"', program.as_text())) == 2
    scores_of_a_head = 4 * length**2
    assert program.memory_analysis().temp_size_in_bytes < scores_of_a_head


@pytest.mark.parametrize(("gradients", "alone"), [(False, 0), (True, 2)])
def test_a_ring_sends_beside_attention(mesh, gradients, alone):
    """Of 2 GiB of keys and values, for which a ring is taken. The backward pass has two transfers
    in each step, and one at its end: the larger ones of the steps have a product beside them."""

    def attend(q, k, v):
        return jflux.attention(q, k, v, axis_name="tp", causal=True)

    def all_gradients(*operands):
        return jax.grad(lambda *a: jnp.sum(attend(*a).astype(jnp.float32)), (0, 1, 2))(*operands)

    spec, length = P(None, "tp"), 1 << 18
    f = jax.shard_map(
        all_gradients if gradients else attend, mesh=mesh, in_specs=(spec,) * 3,
        out_specs=(spec,) * 3 if gradients else spec,
    )  # fmt: skip
    operands = [operand(mesh, spec, 1, length, 16, 128)] * 3
    with gpu_programs.as_on_gpus():
        text = compiled(f, *operands).as_text()
    started = re.findall(
        r"= [^\n]* collective-permute-start\(.*? collective-permute-done\(", text, re.S
    )
    assert len(started) == 2 + gradients * 2
    assert all("__cudnn$fmha" in between for between in started)
    assert len(re.findall(r" collective-permute\(", text)) == alone


# docs/guide/parallel.md compares the two: 8 MLPs, of 4 sequences, over 2 x 4 ranks.
LAYERS, WIDTH, HIDDEN, BATCH, LENGTH = 8, 4096, 16384, 4, 4096


def layers_of_nn(grid):
    """Of `jflux.nn`, with weights split over a second axis too, as `embed=` does."""
    mesh = Mesh(grid.reshape(2, 4), ("fsdp", "tp"))

    def loss(params, x):
        @jax.checkpoint
        def layer(x, weights):
            return jflux.nn.mlp(
                x, *weights, axis_name="tp", residual=x, mesh=mesh, x_spec=P("fsdp")
            ), None

        return jnp.mean(lax.scan(layer, x, params)[0].astype(jnp.float32) ** 2)

    params = [
        operand(mesh, P(None, "fsdp", "tp"), LAYERS, WIDTH, HIDDEN),
        operand(mesh, P(None, "tp", "fsdp"), LAYERS, HIDDEN, WIDTH),
    ]
    return loss, params, operand(mesh, P("fsdp", "tp"), BATCH, LENGTH, WIDTH)


def layers_of_parallel(grid):
    mesh = Mesh(grid.reshape(2, 4), ("z", "x"))
    scheme = parallel.Scheme(y=None, data=None)
    turned = scheme.transposed

    def layer(x, weights):
        up, down = weights
        h = jax.nn.gelu(parallel.dense(x, up, scheme=scheme))
        return x + parallel.dense(h, down, scheme=turned)

    specs = [P(None, *one.weight_spec()) for one in (scheme, turned)]

    def loss(params, x):
        y = parallel.scan(layer, x, params, specs=specs, scheme=scheme)
        return lax.pmean(jnp.mean(y.astype(jnp.float32) ** 2), "z")

    sequences = scheme.input_spec(3)
    loss = jax.shard_map(loss, mesh=mesh, in_specs=(specs, sequences), out_specs=P())
    params = [
        operand(mesh, specs[0], LAYERS, WIDTH, HIDDEN),
        operand(mesh, specs[1], LAYERS, HIDDEN, WIDTH),
    ]
    return loss, params, operand(mesh, sequences, BATCH, LENGTH, WIDTH)


@pytest.mark.parametrize(
    ("layers", "gathered", "kernels", "temporaries"),
    [
        (layers_of_nn, 2 * LAYERS, {"all_gather_matmul": 24, "matmul_reduce_scatter": 16}, 700),
        # The last layer's weights are kept; nobody asks for the gradient of the first one's input.
        # jaxlib 0.11 wants 1632 MiB, 0.12 the page's 1520.
        (layers_of_parallel, 2 * LAYERS - 1, {"matmul_all_reduce": 15}, 1650),
    ],
)
def test_weights_in_parts(layers, gathered, kernels, temporaries):
    """They are gathered in both passes, and their gradients scattered, in their own type; a device
    holds a part of each, and in MiB what the page says."""
    f, params, x = layers(mesh_of(8, "all").devices)
    shardings = jax.tree.map(lambda a: a.sharding, params)
    gradient = jax.jit(jax.grad(f), out_shardings=shardings)
    with gpu_programs.as_on_gpus():
        program = gradient.lower(params, x).compile(
            compiler_options=topologies.COMPILER_OPTIONS | {"xla_gpu_mock_custom_calls": True}
        )
    a_part = WIDTH * HIDDEN // 8
    assert calls_of(program.as_text()) == {
        ("all-gather", "bf16", 2 * a_part): 2 * gathered,
        ("reduce-scatter", "bf16", a_part): 2 * LAYERS,
        **{(f"jflux_{name}",): count for name, count in kernels.items()},
    }  # fmt: skip
    memory = program.memory_analysis()
    weights = 2 * 2 * LAYERS * a_part
    rows = 2 * BATCH * LENGTH * WIDTH // (8 if layers is layers_of_nn else 2)
    assert memory.argument_size_in_bytes == weights + rows
    assert memory.output_size_in_bytes == pytest.approx(weights, rel=1e-3)
    assert 0.9 * temporaries < memory.temp_size_in_bytes / 2**20 < temporaries


def calls_of(text):
    """How often a program calls kernels, and collectives over arrays; a loop's body counts as often
    as it runs."""
    runs = dict(re.findall(r"while\(.*body=%([\w.]+).*known_trip_count\":{\"n\":\"(\d+)", text))
    found, times = collections.Counter(), 1
    for line in text.splitlines():
        if begun := re.match(r"(?:ENTRY )?%([\w.]+) \(", line):
            times = int(runs.get(begun[1], 1))
        collective = re.search(r"= ([^%]*) (all-gather|all-reduce|reduce-scatter)(-start)?\(", line)
        if collective:
            results = re.findall(r"(\w+)\[([\d,]+)\]", collective[1])
            half = len(results) // 2 if collective[3] else 0  # of operands and results
            for dtype, shape in results[half:]:
                found[collective[2], dtype, math.prod(map(int, shape.split(",")))] += times
        elif kernel := re.search(r'custom_call_target="(jflux_\w+)"', line):
            found[(kernel[1],)] += times
    return found


@pytest.mark.parametrize("exchange", ["dispatch", "gather"])
def test_a_layer_of_experts_on_eight(exchange):
    """DeepSeek-V3's, of 8192 tokens, and its gradients: a token's row travels once to a rank, and
    no array has more than the rows of all choices."""
    mesh = mesh_of(8, "ep")
    width, hidden, experts, k, tokens = 7168, 2048, 256, 8, 8192

    def gradients(x, router, up, gate, down):
        def loss(x, up, gate, down):
            y = jflux.nn.mixture(
                x, router, up, down, gate, k=k, expert_axis="ep", exchange=exchange
            ).y
            return jnp.sum(y.astype(jnp.float32))

        return jax.grad(loss, (0, 1, 2, 3))(x, up, gate, down)

    own = P("ep")
    f = jax.shard_map(
        gradients, mesh=mesh, in_specs=(own, P(), own, own, own), out_specs=own, check_vma=False
    )
    operands = [
        operand(mesh, own, 8, tokens // 8, width), operand(mesh, P(), width, experts),
        *[operand(mesh, own, experts, width, hidden)] * 2,
        operand(mesh, own, experts, hidden, width),
    ]  # fmt: skip
    with gpu_programs.as_on_gpus(), _config.override(always=False):
        program = compiled(f, *operands)
    kernels = set(re.findall(r'custom_call_target="jflux_(\w+)"', program.as_text()))
    assert {"grouped_matmul", "grouped_matmul_dw"} <= kernels
    assert ({"moe_dispatch", "moe_combine"} <= kernels) == (exchange == "dispatch")
    assert "ragged_all_to_all" not in kernels
    rows = 2 * width * tokens * k
    assert program.memory_analysis().temp_size_in_bytes < 6 * rows
