"""Programs for GPUs can be lowered without one, and say what they would call."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_programs import all_programs, as_on_gpus, kernels_of
from harness import PLATFORM, make_mesh
from jax.sharding import PartitionSpec as P

import jflux
import jflux.nn as jnn
from jflux import _native
from jflux._ops.attention import _one_device
from jflux._ranks import meshes

pytestmark = pytest.mark.skipif(PLATFORM == "gpu", reason="what is lowered there is run there")


@pytest.fixture(scope="module")
def programs():
    return dict(all_programs(60))


def test_calls_of_all_kinds_are_lowered(programs):
    calls = [what for what in programs if "gradient" not in what]
    assert len(calls) == 2 * 60 and len(programs) == 120 + 2 * 20
    found = set().union(*map(kernels_of, programs.values()))
    products = {f"jflux_{op}" for op in ("all_gather_matmul", "matmul_reduce_scatter")}
    assert products | {"jflux_all_reduce", "jflux_all_to_all", "jflux_ragged_all_to_all"} <= found
    # Kernels for CPUs alone are not among them, and without `always` some calls take none.
    assert any(kernels_of(text) for text in programs.values())
    assert any(not kernels_of(text) for what, text in programs.items() if "always=False" in what)


def test_they_are_the_same_again(programs):
    again = dict(all_programs(12))
    assert again == {what: programs[what] for what in again}


def test_what_a_call_becomes():
    f = jax.shard_map(
        lambda x, w: jflux.all_gather_matmul(x, w, axis_name="tp"),
        mesh=make_mesh((2,)), in_specs=(P("tp"), P(None, "tp")), out_specs=P(None, "tp"),
    )  # fmt: skip
    x, w = (jax.ShapeDtypeStruct(s, "bfloat16") for s in ((4096, 8192), (8192, 8192)))

    def text():
        return jax.jit(f).trace(x, w).lower(lowering_platforms=("cuda",)).as_text()

    with as_on_gpus():
        assert _native.lib.built_with_cuda()
        assert kernels_of(text()) == {"jflux_all_gather_matmul"}
        jax.clear_caches()
        with jflux.config(fused=False):
            assert kernels_of(text()) == set()
    jax.clear_caches()


def test_what_has_n_columns_is_padded_as_the_weights_are():
    """Also where its type has other bytes: a float32 bias, and what is added to a float32 y."""
    x, w = jnp.zeros((8, 13), jnp.float16), jnp.zeros((13, 2), jnp.float16)
    y = jnp.zeros((8, 2), jnp.float32)

    def f(x, w, y):
        gathered = jflux.all_gather_matmul(
            x, w, axis_name="tp", bias=jnp.ones(2, jnp.float32), activation="relu"
        )
        summed = jflux.matmul_reduce_scatter(
            jnp.concatenate([x, x]), w, axis_name="tp", residual=y,
            preferred_element_type=jnp.float32,
        )  # fmt: skip
        return gathered, summed

    mapped = jax.shard_map(f, mesh=make_mesh((2,)), in_specs=P(), out_specs=P(), check_vma=False)
    with as_on_gpus():
        program = jax.jit(mapped).trace(x, w, y).lower(lowering_platforms=("cuda",)).as_text()
    jax.clear_caches()
    calls = re.findall(r"custom_call @jflux_(\w+)\(.* : \((.*)\) ->", program)
    found = {op: re.findall(r"[x<](\d+)x([a-z]\w+)>", operands) for op, operands in calls}
    assert found["all_gather_matmul"][1:] == [("32", "f16"), ("32", "f32")]
    assert found["matmul_reduce_scatter"][1:] == [("32", "f16"), ("32", "f32")]


def test_quantised_activations_are_in_no_array_of_16_bits():
    """Of an MLP by a recipe: not what it activates, nor the gradients of both sums. dy's bytes
    become those of the copies."""
    block = jflux.Recipe.block

    def loss(x, *weights):
        return jnp.sum(jnn.gated_mlp(x, *weights, axis_name="tp", recipe=block).astype("float32"))

    columns, rows = P(None, "tp"), P("tp")
    f = jax.shard_map(
        jax.grad(loss, (0, 1, 2, 3)), mesh=make_mesh((2,)),
        in_specs=(rows, columns, columns, rows), out_specs=(rows, columns, columns, rows),
        check_vma=False,
    )  # fmt: skip
    shapes = ((1024, 512), (512, 1536), (512, 1536), (1536, 512))
    with as_on_gpus(), jflux.config(unchecked_kernels=True):
        traced = jax.jit(f).trace(*(jax.ShapeDtypeStruct(s, "bfloat16") for s in shapes))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    jax.clear_caches()
    calls = re.findall(r"custom_call @jflux_(\w+)\(.*?\) (\{.*\}) : \((.*)\) -> (.*)", text)
    sums = "tensor<1024x768xbf16>"
    read = [(op, operands) for op, _, operands, _ in calls if sums in operands]
    of_dy = f"tensor<1024x768xui16>, {sums}, {sums}"
    assert read == [("quantize", f"{sums}, {sums}"), ("quantize", of_dy)]
    assert [attributes for _, attributes, operands, _ in calls if operands == of_dy][0].count(
        "output_operand_aliases"
    )
    made = [op for op, _, _, results in calls for _ in range(results.count(sums))]
    assert made == ["all_gather_matmul"] * 3  # gate, up, and dy


@pytest.mark.parametrize("length, width", [(512, 192), (500, 128)])
@pytest.mark.parametrize("window", [None, 64])
def test_ulysses_keeps_no_scores_of_calls_that_cudnn_does_not_take(
    length, width, window, monkeypatch
):
    """On 8 ranks a head of 32768 positions has 4 GiB of them."""
    monkeypatch.setattr(meshes, "platform", lambda: "gpu")

    def loss(q, k, v):
        o = jflux.ulysses_attention(q, k, v, axis_name="tp", causal=True, window=window)
        return jnp.sum(o.astype(jnp.float32))

    f = jax.shard_map(
        jax.grad(loss, (0, 1, 2)), mesh=make_mesh((2,)), in_specs=P(None, "tp"),
        out_specs=P(None, "tp"),
    )  # fmt: skip
    q, k = (jax.ShapeDtypeStruct((1, length, heads, width), "bfloat16") for heads in (8, 2))
    with as_on_gpus():
        text = jax.jit(f).trace(q, k, k).lower(lowering_platforms=("cuda",)).as_text()
    kernels = {"jflux_flash_attention", "jflux_flash_attention_backward"}
    assert kernels <= kernels_of(text)
    assert f"{length}x{length}x" not in text
    jax.clear_caches()


@pytest.mark.parametrize("name", ["sinks", "alibi_slopes"])
@pytest.mark.parametrize("op", ["ulysses_attention", "attention"])
def test_sinks_and_slopes_take_the_kernels_of_attention_without_them(op, name, monkeypatch):
    """And no scores of a whole sequence."""
    monkeypatch.setattr(meshes, "platform", lambda: "gpu")

    def loss(per_head, q, k, v):
        options = {"window": 64, "causal": True, "axis_name": "tp", name: per_head}
        return jnp.sum(getattr(jflux, op)(q, k, v, **options).astype(jnp.float32))

    width = 64 if name == "sinks" else 128  # of which cuDNN takes no longer heads
    q, k = (jax.ShapeDtypeStruct((1, 512, heads, width), "bfloat16") for heads in (8, 2))
    of_heads, texts = jax.ShapeDtypeStruct((8,), "float32"), []
    # Without them Ulysses takes one call of cuDNN.
    for given in (of_heads, None) if op == "attention" else (of_heads,):
        f = jax.shard_map(
            jax.grad(loss, (0, 1, 2, 3) if given else (1, 2, 3)),
            mesh=make_mesh((2,)), in_specs=(P(), *[P(None, "tp")] * 3),
            out_specs=(*([P()] if given else []), *[P(None, "tp")] * 3),
        )  # fmt: skip
        with as_on_gpus():
            traced = jax.jit(f).trace(given, q, k, k)
            texts.append(traced.lower(lowering_platforms=("cuda",)).as_text())
        jax.clear_caches()
    assert "jflux_flash_attention_backward" in kernels_of(texts[0])
    assert len({frozenset(kernels_of(text)) for text in texts}) == 1
    assert "512x512x" not in texts[0]


def test_kernels_of_decoding():
    """By the widths; slopes beside a cache without values have none, which strict mode says."""
    lengths = np.array([9, 2])

    def text_of(width, groups, **options):
        q, k = (
            jax.ShapeDtypeStruct(shape, "bfloat16")
            for shape in ((2, 4, width), (2, 128, groups, width))
        )
        f = jax.jit(functools.partial(jflux.flash_decode, **options))
        v = None if "value_width" in options else k
        with as_on_gpus(), jflux.config(strict=True):
            return f.trace(q, k, v, lengths).lower(lowering_platforms=("cuda",)).as_text()

    slopes = np.ones(4)
    assert "jflux_flash_decode" in kernels_of(text_of(64, 2))
    assert "jflux_flash_decode" in kernels_of(text_of(64, 2, alibi_slopes=slopes))
    assert "jflux_latent_decode" in kernels_of(text_of(576, 1, value_width=512))
    for options, why in (
        ({"value_width": 512, "alibi_slopes": slopes}, "the kernel takes no alibi_slopes"),
        ({"value_width": 256}, r"keys and values have \(576, 256\) elements"),
    ):
        with pytest.raises(NotImplementedError, match=why):
            text_of(576, 1, **options)
    jax.clear_caches()


@pytest.mark.parametrize("lead", [(), (1,)])
def test_attention_of_one_device_has_a_kernel_without_a_batch_too(lead, monkeypatch):
    monkeypatch.setattr(meshes, "platform", lambda: "gpu")
    q, k = (jnp.zeros((*lead, 100, heads, 192), jnp.bfloat16) for heads in (4, 2))
    with as_on_gpus():
        f = jax.jit(_one_device.attend, static_argnames="is_causal")
        traced = f.trace(q, k, k, is_causal=True)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert traced.out_info.shape == q.shape
    assert kernels_of(text) == {"jflux_flash_attention"}
    jax.clear_caches()


@pytest.mark.parametrize(
    "k, v, dtype, message",
    [
        ((100, 2, 192), (100, 2, 192), jnp.float32, "dtype should be"),
        ((100, 2, 192), (100, 2, 128), jnp.bfloat16, "value shape should be"),
        ((100, 2, 128), (100, 2, 128), jnp.bfloat16, "query shape should be"),
        ((100, 3, 192), (100, 3, 192), jnp.bfloat16, "must be a multiple of key/value heads"),
    ],
)
def test_attention_of_one_device_refuses_on_gpus_what_it_refuses_on_cpus(
    k, v, dtype, message, monkeypatch
):
    """The kernel takes operands as they are."""
    q, k, v = jnp.zeros((1, 100, 4, 192), jnp.bfloat16), jnp.zeros((1, *k)), jnp.zeros((1, *v))
    k = k.astype(jnp.bfloat16)
    for platform in ("cpu", "gpu"):
        monkeypatch.setattr(meshes, "platform", lambda platform=platform: platform)
        with as_on_gpus(), pytest.raises(ValueError, match=message):
            _one_device.attend(q, k, v.astype(dtype))
