"""cuDNN's attention over a part of the keys: all that jflux knows of JAX's internals for it.

JAX's public ``jax.nn.dot_product_attention`` rounds the log-sum-exp to the operands' type, and
differentiates it as a constant. The primitives below it give float32, and the backward one takes
the output and the log-sum-exp as operands. Given those over *all* keys of the queries, it computes
what one part of the keys contributes to the gradients (arXiv 2307.08691, algorithm 2)::

    p = exp(scale q k^T - l)    ds = p (do v^T - rowsum(do o))    dv = p^T do    dk = scale ds^T q

The operand lists are those of jax/_src/cudnn/fused_attention_stablehlo.py in JAX 0.10 to 0.12.
:func:`why_not` compares them with the installed JAX's, so another JAX takes the other path.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.custom_batching
import jax.numpy as jnp

from ... import _config
from ..._call import plans
from ..._ranks import meshes
from ..._ranks.meshes import vary, varying

#: Whether these calls have been compared with float64 on a GPU (tests/test_attention_half.py).
CHECKED_ON_GPUS = True

_MOST_WIDTH = 128  # elements of a head; cuDNN has kernels for more on some GPUs
_MULTIPLE = 64  # of queries and keys of a call; cuDNN pads others, which has not been checked

NO_GPU = "cuDNN runs on GPUs"
OLD_GPU = "cuDNN's attention needs compute capability 8.0"

# The arguments and results of JAX's wrappers of the two primitives.
_ARRAYS = (
    "query", "key", "value", "bias", "q_seqlen", "kv_seqlen", "q_offsets", "kv_offsets",
    "page_table_k", "page_table_v",
)  # fmt: skip
_RESULTS = ("activation", "fwd_output", "grad_output")
_OPTIONS = (
    "scale", "seed", "dropout_rate", "variadic_args", "mask_type", "layout",
    "sliding_window_length",
)  # fmt: skip
#: (forward, backward) by JAX version.
_KNOWN = {
    "0.10, 0.11": (_ARRAYS + _OPTIONS + ("is_training",), _ARRAYS + _RESULTS + _OPTIONS),
    "0.12": (
        (*_ARRAYS, "score_mod_args", *_OPTIONS, "score_mod", "is_training"),
        (*_ARRAYS, *_RESULTS, "score_mod_args", *_OPTIONS, "score_mod"),
    ),
}


def why_not(q: jax.Array, k: jax.Array, chunks: int) -> str | None:
    """Why these calls do not take q [B, s, H, D] and k [B, t, G, D], each cut into so many chunks,
    on the default devices; None: they do."""
    if meshes.platform() != "gpu":
        return NO_GPU
    if not _config.config.fused:
        return "jflux.config.fused is off"
    return why_not_operands(q, *(a.shape[1] // chunks for a in (q, k))) or _why_not_here(q, k)


def why_not_one_call(
    q: Any, k: Any, is_causal: bool, window: int | tuple[int, int] | None
) -> str | None:
    """Why `jax.nn.dot_product_attention` cannot use cuDNN for queries q [..., S, H, D] and keys k
    [..., T, G, D]; None: it can."""
    if meshes.platform() != "gpu":
        return NO_GPU
    if window is not None and not is_causal:
        return "cuDNN has no windows to the right"
    why = why_not_operands(q, q.shape[-3], k.shape[-3])
    return why or (None if _is_recent_gpu() else OLD_GPU)


def why_not_bias(q: Any, bias: Any) -> str | None:
    """Why one call of cuDNN that takes queries q does not take a bias [1 or B, 1 or H, S, T] beside
    them; None: it does.

    cuDNN has had the gradient of one [1, H, S, T] from the first (openxla/xla#11967), and JAX 0.10
    and later asks for that of others. float32 beside bfloat16 has given NaN (jax-ml/jax#32242).
    """
    if bias.dtype != q.dtype:
        return f"cuDNN takes a bias of q's type, {q.dtype}, got {bias.dtype}; cast it"
    if bias.shape[0] != 1:
        return "the gradient that cuDNN has of a bias of each sequence has not been checked"
    return None


@functools.cache
def _is_recent_gpu() -> bool:
    try:
        return bool(_internals().check_compute_capability("8.0"))
    except (ImportError, AttributeError):
        return True  # JAX keeps it elsewhere, and says itself what is missing


def why_not_operands(q: Any, *lengths: int) -> str | None:
    """:func:`why_not`, as far as it depends on the operands. `lengths`: of calls' queries and
    keys."""
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"cuDNN takes bfloat16 and float16, got {q.dtype}"
    if q.shape[-1] % 8 != 0 or q.shape[-1] > _MOST_WIDTH:
        return f"a head must have a multiple of 8 elements, up to {_MOST_WIDTH}, got {q.shape[-1]}"
    if odd := [length for length in lengths if length % _MULTIPLE != 0]:
        return f"parts of the sequence must be multiples of {_MULTIPLE}, got {odd[0]}"
    return None


def _why_not_here(q: jax.Array, k: jax.Array) -> str | None:
    """:func:`why_not`, as far as it depends on JAX, cuDNN and the GPU."""
    if why := why_not_jax() or plans.why_unchecked(CHECKED_ON_GPUS):
        return why
    internals = _internals()
    try:
        version = internals.check_cudnn_version()
        layout = internals.AttentionLayout.BTNH.value
        internals.check_is_flash_attention(q, k, k, layout, version, False, True)
    except (NotImplementedError, RuntimeError) as error:
        return str(error)
    if not _is_recent_gpu():
        return OLD_GPU
    return None


@functools.cache
def why_not_jax() -> str | None:
    """Why this file cannot use the internals of the installed JAX, or None if it can."""
    try:
        internals = _internals()
        names = tuple(
            tuple(inspect.signature(f).parameters)
            for f in (
                internals._dot_product_attention_fwd_impl,
                internals._dot_product_attention_bwd_impl,
            )
        )
        for name in (
            "_dot_product_attention_fwd_p_wrapper", "_dot_product_attention_bwd_p_wrapper",
            "MaskType", "AttentionLayout", "check_cudnn_version", "check_is_flash_attention",
            "check_compute_capability",
        ):  # fmt: skip
            getattr(internals, name)
    except (ImportError, AttributeError) as error:
        return f"JAX {jax.__version__} has other internals: {error}"
    if names not in _KNOWN.values():
        return f"JAX {jax.__version__} calls cuDNN's attention with other operands"
    return None


def _internals() -> Any:
    """JAX's module with the primitives of cuDNN's attention. The first call imports it, so that
    jflux can be imported beside a JAX that lacks it."""
    from jax._src.cudnn import fused_attention_stablehlo

    return fused_attention_stablehlo


def _options(scale: float, causal: bool) -> dict[str, Any]:
    internals = _internals()
    mask = internals.MaskType.CAUSAL if causal else internals.MaskType.NO_MASK
    options = {
        "scale": scale, "seed": 0, "dropout_rate": 0.0, "variadic_args": (False, False),
        "mask_type": mask, "layout": internals.AttentionLayout.BTNH.value,
        "sliding_window_length": None,
    }  # fmt: skip
    takes = inspect.signature(internals._dot_product_attention_fwd_impl).parameters
    return options | ({"score_mod": None} if "score_mod" in takes else {})


def _unused(q: jax.Array) -> list[jax.Array]:
    """The bias, lengths, offsets and page tables of no use here."""
    return [jnp.zeros(0, q.dtype)] * (len(_ARRAYS) - 3)


def _call(f: Callable[..., Any], *operands: jax.Array) -> Any:
    """``f(*operands)`` of arrays [B, ...] of one type of variation, which the primitives' results
    have from one operand; under ``vmap`` once, with a larger B."""
    axes = varying(operands)
    batched = jax.custom_batching.custom_vmap(f)

    @batched.def_vmap
    def rule(size: int, in_batched: Any, *arrays: Any) -> Any:
        folded = []
        for a, has_axis in zip(arrays, in_batched, strict=True):
            full = a if has_axis else jnp.broadcast_to(a, (size, *a.shape))
            folded.append(full.reshape(size * full.shape[1], *full.shape[2:]))
        results = tuple(a.reshape(size, -1, *a.shape[1:]) for a in batched(*folded))
        return results, (True,) * len(results)

    return batched(*(vary(a, axes) for a in operands))


def forward(
    q: jax.Array, k: jax.Array, v: jax.Array, *, scale: float, causal: bool
) -> tuple[jax.Array, jax.Array]:
    """Attention of q [B, s, H, D] over k, v [B, t, G, D], all in bfloat16 or float16.

    Args:
      scale: of the scores.
      causal: query i attends to keys 0 to i, which is what cuDNN means for s = t.

    Returns:
      (o [B, s, H, D] of q's type, log-sum-exp [B, s, H] of the scaled scores, natural, float32).
    """
    options = _options(scale, causal) | {"is_training": True}
    bind = _internals()._dot_product_attention_fwd_p_wrapper.bind

    def call(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        return tuple(bind(q, k, v, *_unused(q), **options))

    o, lse = _call(call, q, k, v)
    return o, lse.swapaxes(1, 2)


def backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    o: jax.Array,
    lse: jax.Array,
    do: jax.Array,
    *,
    scale: float,
    causal: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The part of the gradients that these keys contribute, for o, its cotangent do [B, s, H, D]
    and lse [B, s, H] over *all* keys of the queries.

    Returns:
      (dq [B, s, H, D], dk, dv [B, t, G, D]), of q's type. Over several parts of the keys, dq is the
      sum.
    """
    options = _options(scale, causal)
    bind = _internals()._dot_product_attention_bwd_p_wrapper.bind

    def call(q: jax.Array, k: jax.Array, v: jax.Array, *results: jax.Array) -> Any:
        return tuple(bind(q, k, v, *_unused(q), *results, **options))

    dq, dk, dv = _call(call, q, k, v, lse.swapaxes(1, 2), o, do)
    return dq, dk, dv
