"""Programs that are compiled for GPUs that are not here: what XLA makes of them."""

import contextlib
import functools
import re
from unittest import mock

import gpu_programs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import topologies
import two_level_gpu
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jflux
import jflux.nn
from jflux import _config, _levels, _lowering, _mesh, _native
from jflux._ops._spec import products

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
        table = _mesh.group_table(mesh, axis_names)
        return _levels.levels_of(table, nodes, axis_names, mesh.shape)

    with gpu_programs.as_on_gpus(), mock.patch.object(_lowering, "levels_over", levels_over):
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
    assert not _mesh.belongs_here(mesh)
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
