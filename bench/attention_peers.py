"""Other attentions, timed in the same rounds as jflux's where they are installed.

TE      Transformer Engine's context parallelism (JAX, cuDNN), keys gathered; TE ring: around a
        ring. The sequence is in zigzag order, as jflux's is
FA3     flash-attn3-jax, FlashAttention-3 in JAX: the whole on one GPU, divided by the ranks

Each is compared with jflux's attention, or with `jax.nn`'s on one GPU, before it is timed. Cases
with windows, softcaps or heads of 256 elements are left out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from .peers import Unavailable

Attention = Callable[[jax.Array, jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class Call:
    """What a form has to know of q [B, S, H, D], and of k and v in one array [2, B, S, G, D]."""

    batch: int
    positions: int
    width: int
    causal: bool


class Peer(Protocol):
    #: Whether it takes the arrays of one GPU, and not those that are split over all.
    on_one: bool

    def forms(self, call: Call) -> dict[str, Attention]:
        """By column, a function of global arrays."""

    def context(self) -> contextlib.AbstractContextManager[Any]:
        """Where it is traced."""


def _module(name: str, package: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as e:
        if e.name == name.split(".")[0]:
            raise Unavailable(f"{package}: not installed") from e
        raise Unavailable(f"{package}: {e}") from e
    except (ImportError, OSError, RuntimeError) as e:  # of the libraries that it loads
        raise Unavailable(f"{package}: {type(e).__name__}: {e}".splitlines()[0]) from e


class TransformerEngine:
    on_one = False

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.api = _module("transformer_engine.jax.attention", "Transformer Engine")
        self.sharding = _module("transformer_engine.jax.sharding", "Transformer Engine")

    def forms(self, call: Call) -> dict[str, Attention]:
        strategies = self.api.CPStrategy
        columns = {"TE": strategies.ALL_GATHER, "TE ring": strategies.RING}
        return {column: self._form(call, strategy) for column, strategy in columns.items()}

    def _form(self, call: Call, strategy: Any) -> Attention:
        api = self.api
        mask = api.AttnMaskType.CAUSAL_MASK if call.causal else api.AttnMaskType.NO_MASK

        def attend(q: jax.Array, kv: jax.Array) -> jax.Array:
            one_segment = jnp.ones((call.batch, call.positions), jnp.int32)
            return api.fused_attn(
                (q, kv[0], kv[1]), None,
                api.SequenceDescriptor.from_segment_ids_and_pos(one_segment), None,
                attn_bias_type=api.AttnBiasType.NO_BIAS, attn_mask_type=mask,
                qkv_layout=api.QKVLayout.BSHD_BSHD_BSHD,
                softmax_type=api.AttnSoftmaxType.VANILLA_SOFTMAX,
                scaling_factor=call.width**-0.5, dropout_probability=0.0, is_training=True,
                context_parallel_strategy=strategy,
                context_parallel_causal_load_balanced=call.causal,
                context_parallel_axis=self.mesh.axis_names[0],
            )  # fmt: skip

        return attend

    @contextlib.contextmanager
    def context(self) -> Any:
        resource = self.sharding.MeshResource(cp_resource=self.mesh.axis_names[0])
        # It looks for the mesh where this puts it, and `jax.set_mesh` does not.
        with self.mesh, self.sharding.global_shard_guard(resource):
            yield


class FlashAttention3:
    on_one = True

    def __init__(self, mesh: Mesh) -> None:
        self.flash_mha = _module("flash_attn3_jax", "flash-attn3-jax").flash_mha

    def forms(self, call: Call) -> dict[str, Attention]:
        def attend(q: jax.Array, kv: jax.Array) -> jax.Array:
            return self.flash_mha(q, kv[0], kv[1], is_causal=call.causal)

        return {"FA3": attend}

    def context(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()


PEERS: dict[str, Callable[[Mesh], Peer]] = {
    "transformer_engine": TransformerEngine,
    "flash_attn3": FlashAttention3,
}


def program(
    peer: Peer, name: str, f: Attention, want: jax.Array, loop: Attention, *arrays: jax.Array
) -> Any:
    """`loop` compiled, once `f` gives what is wanted of these arrays.

    Raises:
      Unavailable: it does not take them here.
      RuntimeError: it gives something else.
    """
    try:
        with peer.context():
            y = jax.jit(f)(*arrays)
            compiled = jax.jit(loop).lower(*arrays).compile()
    except Exception as e:  # whatever it finds missing here
        raise Unavailable(f"{name}: {type(e).__name__}: {e}".splitlines()[0]) from e
    error = float(jnp.max(jnp.abs(y.astype(jnp.float32) - want.astype(jnp.float32))))
    if not error < 0.1:  # of means of normal numbers, in bfloat16
        raise RuntimeError(f"{name} is off by {error}")
    return compiled
