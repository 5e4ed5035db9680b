"""MaxText's Llama, and the same with jflux in all its layers: loss and gradients side by side.

    python examples/maxtext_llama.py [--devices 8] [--ranks 4] [--scan] [--remat full] [--context 2]

MaxText is not changed: a `jflux.nn.TensorParallel` takes the place of its quantization object, and
its layers (attention, MLP) call the ops as their `dot_general`. With `--context` the sequence is
split over MaxText's axis "context" too, and `ContextAttention` attends in place of MaxText's own
`AttentionOp`. The configuration is MaxText's
base.yml, made small. Needs the package `maxtext`: `tools/test_maxtext.sh` installs it, and what it
imports, into an environment of its own. Runs on the CPU, which takes two minutes. It prints::

    loss: MaxText 5.9554477, with jflux 5.9554482
    gradients: 21, largest difference / largest element: 6.8e-07
    all_gather_matmul: 12 calls in the program
    matmul_reduce_scatter: 16 calls in the program
"""

from __future__ import annotations

import argparse
import os
import pathlib
import tempfile
from unittest import mock

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("DECOUPLE_GCLOUD", "TRUE")  # MaxText: no Google Cloud

import jax
import jax.numpy as jnp
import maxtext
from flax import linen as nn
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from maxtext.common.common_types import MODEL_MODE_TRAIN, AttentionType
from maxtext.configs import pyconfig
from maxtext.layers import attention_op, attentions
from maxtext.models.models import Transformer
from maxtext.utils import maxtext_utils

import jflux.nn

#: MaxText's axis whose ranks split activations by sequence between layers.
AXIS = "tensor_sequence"
#: Its axis whose ranks have parts of the sequence while attending too.
CONTEXT_AXIS = "context"
#: Its default configuration.
BASE = str(pathlib.Path(maxtext.__file__).parent / "configs" / "base.yml")


class ContextAttention(attention_op.AttentionOp):
    """MaxText's attention over a sequence that is split over "context", by `jflux.attention`. In
    decoding, and of kinds of attention that jflux has not, it is MaxText's own."""

    def __call__(self, query, key, value, segment_ids, positions, model_mode, *rest, **options):
        kinds = (AttentionType.GLOBAL, AttentionType.LOCAL_SLIDING)
        more = [*rest, *options.values()]
        beside = any(a is not None for a in jax.tree.leaves(more))
        if model_mode != MODEL_MODE_TRAIN or self.attention_type not in kinds or beside:
            return super().__call__(
                query, key, value, segment_ids, positions, model_mode, *rest, **options
            )
        local = self.attention_type == AttentionType.LOCAL_SLIDING
        return jflux.attention(
            query, key, value, axis_name=CONTEXT_AXIS, causal=True, segment_ids=segment_ids,
            layout="zigzag" if self.config.context_parallel_load_balance else "contiguous",
            window=(self.sliding_window_size - 1, 0) if local else None,
            softcap=self.attn_logits_soft_cap or None, scale=1.0,  # MaxText scales the queries
            mesh=self.mesh, q_spec=P(("data", "fsdp"), None, AXIS),
        )  # fmt: skip


def options_of(devices: int, ranks: int, context: int = 1, **changes):
    """What MaxText is told of a small Llama, on devices // (ranks context) x context x ranks."""
    options = {
        "run_name": "jflux", "base_output_directory": tempfile.gettempdir(),
        "enable_checkpointing": False, "dataset_type": "synthetic", "log_config": False,
        "decoder_block": "llama2", "mlp_activations": ["silu", "linear"],
        "attention": "dot_product", "base_emb_dim": 64, "base_mlp_dim": 128,
        "base_num_query_heads": 8, "base_num_kv_heads": 4, "head_dim": 8,
        "base_num_decoder_layers": 2, "vocab_size": 256, "max_target_length": 32,
        "per_device_batch_size": 1.0, "dtype": "float32", "weight_dtype": "float32",
        "matmul_precision": "highest", "scan_layers": False, "remat_policy": "none",
        "ici_fsdp_parallelism": devices // ranks // context,
        "ici_context_parallelism": context, "ici_tensor_sequence_parallelism": ranks,
    }  # fmt: skip
    return {**options, **changes}


def config_of(*sizes: int, **changes):
    """MaxText's configuration of `options_of` the same arguments."""
    return pyconfig.initialize(["", BASE], **options_of(*sizes, **changes))


def mesh_of(config, devices: int) -> Mesh:
    """MaxText's own mesh."""
    return Mesh(maxtext_utils.create_device_mesh(config, jax.devices()[:devices]), config.mesh_axes)


def model_of(config, mesh: Mesh, quant) -> Transformer:
    """MaxText's model: `quant` is None, or what stands in for a quantization."""
    return Transformer(config, mesh, quant, rngs=nnx.Rngs(params=0, dropout=1))


def step_of(model: Transformer):
    """(parameters, the function (parameters, tokens) -> (loss, gradients))."""
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    config = model.config
    ranks = config.ici_context_parallelism if config.context_parallel_load_balance else 1

    def loss(params, tokens):
        model = nnx.merge(graph, params, rest, copy=True)  # as MaxText's own step does
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1] - 1), tokens[:, 1:].shape)
        inputs, targets, positions = (  # MaxText's own order for a balanced context
            jflux.reorder_for_causal(a, ranks) for a in (tokens[:, :-1], tokens[:, 1:], positions)
        )
        logits = model(
            inputs, positions, decoder_segment_ids=jnp.ones_like(positions), enable_dropout=False
        )
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1)
        return -chosen.mean()

    return params, jax.value_and_grad(loss)


def quantization(recipe: str | None = None) -> jflux.nn.TensorParallel:
    """What takes the place of MaxText's; with a recipe, by its name, products are in 8 bits."""
    return jflux.nn.TensorParallel(AXIS, x_spec=P(("data", "fsdp"), CONTEXT_AXIS), recipe=recipe)


def results(config, mesh: Mesh, *quants):
    """Of the model with each of these in place of MaxText's quantization, None for none, and of the
    same parameters: the loss, the gradients by name, and the text of the compiled program."""
    shape = config.global_batch_size_to_train_on, config.max_target_length + 1
    tokens = jax.random.randint(jax.random.key(2), shape, 0, config.vocab_size)
    found = []
    with jax.set_mesh(mesh), nn.logical_axis_rules(config.logical_axis_rules):
        # A model with a quantization draws its parameters in another order.
        params, plain = step_of(model_of(config, mesh, None))
        ours = ContextAttention if config.ici_context_parallelism > 1 else attention_op.AttentionOp
        for quant in quants:
            step = plain
            if quant is not None:
                with mock.patch.object(attentions, "AttentionOp", ours):  # while layers are made
                    _, step = step_of(model_of(config, mesh, quant))
            compiled = jax.jit(step).lower(params, tokens).compile()
            loss, gradients = compiled(params, tokens)
            leaves, _ = jax.tree_util.tree_flatten_with_path(gradients)
            named = {jax.tree_util.keystr(path): leaf for path, leaf in leaves}
            found.append((float(loss), named, compiled.as_text()))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--scan", action="store_true", help="MaxText's scan over layers")
    parser.add_argument("--remat", default="none", help="MaxText's remat_policy")
    parser.add_argument("--context", type=int, default=1, help="ranks that share a sequence")
    recipes = [f"jflux_fp8_{name}" for name in ("tensor", "row", "block")]
    parser.add_argument("--recipe", choices=recipes, help="jflux's products in 8 bits")
    args = parser.parse_args()
    changes = {"scan_layers": args.scan, "remat_policy": args.remat}
    config = config_of(args.devices, args.ranks, args.context, **changes)
    mesh = mesh_of(config, args.devices)
    plain, fused = results(config, mesh, None, quantization(args.recipe))
    print(f"loss: MaxText {plain[0]:.7f}, with jflux {fused[0]:.7f}")
    worst = max(float(abs(fused[1][name] - g).max() / abs(g).max()) for name, g in plain[1].items())
    print(f"gradients: {len(plain[1])}, largest difference / largest element: {worst:.1e}")
    for op in ("all_gather_matmul", "matmul_reduce_scatter"):
        count = fused[2].count('target="jflux_' + op)
        print(f"{op}: {count} calls in the program")


if __name__ == "__main__":
    main()
