"""A rank's part of flash decoding: primitives, which are GPU kernels (cc/ops/flash_decode, and
cc/ops/latent_decode where values are the first elements of keys) where these take the call, and
plain `lax` elsewhere."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import ad

from ... import _native
from ..._call import gpu_code, local_ops
from ..._call.forms import Op, ShapeDtype
from ..._call.plans import Arrays, Plan
from ..._call.primitives import make_primitive
from ..._ranks import meshes
from .. import _scaled
from .._epilogue import sum_dtype
from .._scaled import Scaled
from ..products import _product
from . import update_cache
from ._blockwise import default_precision, pairs_flops

OP, LATENT = "flash_decode", "latent_decode"
WIDTHS = (64, 128, 256)  # elements of a head that the kernel takes
WIDTHS_PORTABLE = (64, 128)  # in 99 KiB of shared memory
LATENT_WIDTHS = (576, 512)  # of keys and values: those of DeepSeek-V2 and later

#: XLA's form cuts the product with the values into splits of at least FEWEST_POSITIONS positions,
#: at most MOST_SPLITS of all sequences together.
MOST_SPLITS = 64
FEWEST_POSITIONS = 512

#: The kernel (cc/ops/flash_decode): the multiprocessors of a GPU, bytes of shared memory of one,
#: and the fewest positions that are worth a team of warps.
_MULTIPROCESSORS = 132
_SHARED_BYTES = 228 << 10
_FEWEST_OF_A_TEAM = 64
_MOST_WARPS = 8  # of a team
_MOST_ROUNDS = 4  # of more, merging would cost more than a full last round saves
_QUERIES_OF_A_CTA = 64  # of latent_decode, of which a multiprocessor runs one
#: Of more tokens, attention of one device is the faster way.
MOST_TOKENS = 16


@dataclasses.dataclass(frozen=True)
class Params:
    """A call, less its operands q, k[, v], bounds[, scales of k, of v][, block_table][, slopes].

    Attributes:
      value_width: how many first elements of a key are its value, and then there is no v and no
        scale of v; 0: there is.
      scaled: k and v are of 8 bits, and have scales [..., 1]: of each row, or [1, 1, G, 1].
      paged: there is a block_table.
      alibi: there are slopes.
      capacity: positions of all ranks' parts.
      scale, softcap: of the scores; no softcap: 0.
      splits: parts of a sequence that different warps attend to.
      precision: JAX's default for products where the call was traced: the reference is traced when
        the program is lowered.
    """

    capacity: int
    scale: float
    softcap: float
    splits: int
    scaled: bool = False
    paged: bool = False
    alibi: bool = False
    precision: str | None = None
    value_width: int = 0


#: A cache of keys, or of values.
Cache = jax.Array | Scaled


def attend(
    q: jax.Array,
    k: Cache,
    v: Cache | None,
    bounds: jax.Array,
    block_table: jax.Array | None,
    slopes: jax.Array | None,
    *,
    capacity: int,
    scale: float,
    softcap: float | None,
    value_width: int = 0,
) -> jax.Array:
    """Attention of q [B, T, H, D] to the positions `bounds` (:func:`bounds_of`) of k [B, S, G, D]
    and v [B, S, G, E], or of the pages [pages, page size, G, ...] that `block_table` [B, P] names
    (-1: there is none): [B, T, H, E + 1], the output and after it the log-sum-exp, in float32 or
    float64. All integers are int32. A sequence whose end is not from 0 to `capacity` is an error,
    or NaN. The slopes [H] are those of ALiBi. Without v values are the first `value_width` elements
    of keys."""
    positions = _positions(k, block_table)
    slopes = None if slopes is None else slopes.astype(sum_dtype(q.dtype))
    is_scaled = isinstance(k, Scaled)
    splits = splits_of(q.shape, k.shape[2], positions, is_scaled, v is None)
    params = Params(
        capacity, float(scale), float(softcap or 0), splits, is_scaled, block_table is not None,
        slopes is not None, default_precision(), int(value_width),
    )  # fmt: skip
    caches = [k] if v is None else [k, v]
    values = [a.values if isinstance(a, Scaled) else a for a in caches]
    scales = [a.scale for a in caches if isinstance(a, Scaled)]
    given = [a for a in (block_table, slopes) if a is not None]
    operands = map(jnp.asarray, (q, *values, bounds, *scales, *given))
    primitive = _flash_decode if v is not None else _latent_decode
    return primitive.bind(*operands, params=params)[0]


def check_scales(op: str, caches: Mapping[str, Any]) -> None:
    """Raises where a cache [B, S, G, D] is not of 8 bits, or has no scale of its rows or heads."""
    for name, a in caches.items():
        if not isinstance(a, Scaled):
            raise TypeError(f"{op}: {name} must be a jflux.Scaled, as the other cache is")
        rows, heads = (*a.shape[:3], 1), (1, 1, a.shape[2], 1)
        if a.scale.shape not in (rows, heads):
            raise ValueError(
                f"{op}: the scale of {name} must be {rows}, or {heads}, got {a.scale.shape}"
            )
        _scaled.of(op.removeprefix("jflux."), name, a)
    names, types = list(caches), [a.dtype.name for a in caches.values()]
    if len(set(types)) > 1:
        raise TypeError(f"{op}: {' and '.join(names)} must have one type, got {', '.join(types)}")


def _operands(arrays: Any, params: Params) -> tuple[Any, Any, Any, Any, Any, Any]:
    """(q, k, v, bounds, block_table, slopes)."""
    *arrays, slopes = arrays if params.alibi else (*arrays, None)
    q, k, *rest = arrays
    v = None if params.value_width else rest.pop(0)
    bounds, *rest = rest
    if params.scaled:
        k, v = Scaled(k, rest[0]), None if v is None else Scaled(v, rest[1])
    return q, k, v, bounds, rest[-1] if params.paged else None, slopes


def bounds_of(
    first_own: jax.Array, ends: jax.Array, window: tuple[int, int] | None, origin: Any, tokens: int
) -> jax.Array:
    """int32 [B, 4], in positions of the whole sequences: where the window of the first token
    begins, before 0 perhaps; where the sequences end, `ends` [B]; where this rank's part begins;
    and what follows the first token's own position, `first_own` [B].

    Token i of `tokens` is at `first_own` + i, and attends to nothing if that is not before the end.
    """
    first = jnp.full_like(ends, -tokens)
    if window is not None:  # from -tokens on, since less may not be an int32
        first = first_own - jnp.minimum(window[0], first_own + tokens)
    return jnp.stack([first, ends, jnp.full_like(ends, origin), first_own + 1], -1)


def _positions(k: Cache, block_table: jax.Array | None) -> int:
    """How many positions a rank's part of a cache has, whole or in pages."""
    return k.shape[1] * (1 if block_table is None else block_table.shape[1])


def dequantized(cache: Cache, dtype: Any) -> jax.Array:
    """The cache, in this type if it is of 8 bits."""
    return cache.dequantize(dtype) if isinstance(cache, Scaled) else cache


def attend_reference(
    q: jax.Array,
    k: Cache,
    v: Cache | None,
    bounds: jax.Array,
    block_table: jax.Array | None,
    slopes: jax.Array | None,
    *,
    capacity: int,
    scale: float,
    softcap: float | None,
    value_width: int = 0,
) -> jax.Array:
    """:func:`attend` in plain `lax`."""
    may_be_read, dtype = None, sum_dtype(q.dtype)
    q = q.astype(dtype) if isinstance(k, Scaled) else q
    caches = [dequantized(a, dtype) for a in (k, v) if a is not None]
    if block_table is not None:
        caches, may_be_read = update_cache.read_pages(caches, block_table, OP)
    keys, values = caches if v is not None else (caches[0], caches[0][..., :value_width])
    batch, tokens, heads, width = q.shape
    first, end, origin, own = (bounds[:, i, None, None] for i in range(4))
    position = origin + jnp.arange(keys.shape[1], dtype=jnp.int32)
    token = jnp.arange(tokens, dtype=jnp.int32)[:, None]
    attended = (position >= first + token) & (position < own + token) & (own + token <= end)
    if may_be_read is not None:
        attended &= may_be_read[:, None]
    rows = q if tokens == 1 else q.swapaxes(1, 2)  # the tokens of a head together
    rows = rows.reshape(batch, heads * tokens, width)
    out, lse = attend_to_local_keys(
        rows, keys, values, attended, slopes, position - (own - 1 + token), scale=scale,
        softcap=softcap,
    )  # fmt: skip
    pair = jnp.concatenate([out, lse[..., None]], -1)
    if tokens == 1:
        pair = pair[:, None]
    else:
        pair = pair.reshape(batch, heads, tokens, pair.shape[-1]).swapaxes(1, 2)
    is_length = (end >= 0) & (end <= capacity)
    return jnp.where(is_length[..., None], pair, jnp.nan)


@functools.cache
def splits_of(
    q_shape: tuple[int, ...], groups: int, positions: int, scaled: bool, latent: bool = False
) -> int:
    """Into how many parts the kernel splits a sequence: as many as have teams of warps that run at
    once; or a few more or less, so that the last of several rounds of teams is full too. Of
    latent_decode a CTA takes the place of a team."""
    batch, tokens, heads, width = q_shape
    queries = heads // groups * tokens
    if latent:
        blocks, at_once = -(-queries // _QUERIES_OF_A_CTA), _MULTIPROCESSORS
    else:
        blocks, at_once = teams_of(queries, width, scaled)
    teams = max(1, batch * groups * blocks)
    most = min(-(-positions // _FEWEST_OF_A_TEAM), max(_MOST_ROUNDS, at_once // teams))
    if most <= 1 or teams >= _MOST_ROUNDS * at_once:
        return 1
    rounds = [-(-teams * splits // at_once) / splits for splits in range(1, most + 1)]
    # Merging costs something: the fewest parts of those that take about the least time.
    return next(i for i, time in enumerate(rounds, 1) if time <= 1.05 * min(rounds))


def teams_of(queries: int, width: int, scaled: bool) -> tuple[int, int]:
    """How many teams of warps the kernel has for the queries that share a head of the cache, and
    how many teams a GPU runs at once: `LaunchFor` and `kStages` in cc/ops/flash_decode."""
    wide = width > 128
    few = 2 if scaled else 4  # warps
    n = next(n for n in (1, 2, 4) if 8 * n * few >= queries or n == (2 if wide else 4))
    warps = -(-queries // (8 * n))
    blocks = max(1, -(-warps // _MOST_WARPS))
    team = max(1, -(-warps // blocks))
    teams = 2 if team == 1 else 1  # of a CTA
    if scaled:
        ring = (33 if wide else 17) << 10
    else:
        ring = (48 if wide else 32) << 10
    by_memory = _SHARED_BYTES // (teams * (team * 16 * n * width + ring) + (1 << 10))
    warps_at_once = 12 if n * width <= 256 else 8  # which its registers allow
    by_registers = warps_at_once // (team * teams)
    return blocks, _MULTIPROCESSORS * teams * max(1, min(by_memory, by_registers))


# ---- In plain lax --------------------------------------------------------------------------------


def attend_to_local_keys(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    attended: jax.Array,
    slopes: jax.Array | None,
    ahead: jax.Array,
    *,
    scale: float,
    softcap: float | None,
) -> tuple[jax.Array, jax.Array]:
    """Attention of q [B, H, D] to the positions of k [B, S, G, D] and v [B, S, G, E] where
    `attended`.

    Args:
      q: of T tokens, rows [B, H T, D]: those of a head side by side.
      attended: bool [B, T, S].
      slopes: ALiBi's [H], which are constants.
      ahead: int32 [B, T, S], by how much a key's position is more than its query's.

    Returns:
      The output [B, H T, E] and the log-sum-exp [B, H T], both float32 or float64.
    """
    read = jnp.any(attended, 1)
    # Results of a custom_jvp have one type, as their tangents, which are of `read` too.
    scores = _scores_of(*meshes.vary_alike(q, k, read)) * scale
    shape = scores.shape
    tokens = attended.shape[1]
    scores = scores.reshape(len(q), shape[1] // max(tokens, 1), *attended.shape[1:])
    if softcap is not None:  # whose derivative at a NaN is one
        scores = softcap * jnp.tanh(jnp.where(attended[:, None], scores, 0) / softcap)
    if slopes is not None:
        slopes = lax.stop_gradient(slopes).astype(scores.dtype)
        scores += slopes[:, None, None] * ahead[:, None]
    scores = jnp.where(attended[:, None], scores, -jnp.inf).reshape(shape)
    highest = lax.stop_gradient(jnp.max(scores, -1, initial=-jnp.inf))
    base = jnp.where(highest == -jnp.inf, 0, highest)
    weights = jnp.exp(scores - base[..., None])
    total = jnp.sum(weights, -1)
    any_counts = total != 0  # NaN counts
    safe = jnp.where(any_counts, total, 1)
    # A weight of zero does not keep a NaN out.
    out = _weighted_sum(weights, jnp.where(read[..., None, None], v, 0))
    lse = jnp.where(any_counts, jnp.log(safe) + base, -jnp.inf)
    return out / safe[..., None], lse


# Products with the cache as it lies in memory, [B, S, G D]. With G as a batch dimension between S
# and D, XLA would transpose the cache first, which reads and writes all of it. Here the row of a
# head of queries has G D columns, with zeros outside its own head of keys, and is multiplied with
# all of them. That is H operations for each byte of a cache of 16-bit numbers.


@jax.custom_jvp
def _scores_of(q: jax.Array, k: jax.Array, read: jax.Array) -> jax.Array:
    """:func:`_scores`. Its derivatives take zeros for the keys that no query attends to, by `read`
    [B, S]. The scores themselves are masked, so they need no such copy of the cache."""
    return _scores(q, k)


@_scores_of.defjvp
def _scores_jvp(primals: Any, tangents: Any) -> Any:
    (q, k, read), (dq, dk, _) = primals, tangents
    clean = jnp.where(read[..., None, None], k, 0)
    return _scores(q, k), _scores(dq, clean) + _scores(q, dk)


def _scores(q: jax.Array, k: jax.Array) -> jax.Array:
    """q k, [B, H, S], of q [B, H, D] and k [B, S, G, D]."""
    (b, h, d), (s, g) = q.shape, k.shape[1:3]
    rows = jnp.where(_own_group(h, g), q[:, :, None], 0).reshape(b, h, g * d)
    wide = sum_dtype(q.dtype)
    return jnp.einsum("bhx,bsx->bhs", rows, k.reshape(b, s, g * d), preferred_element_type=wide)


def _weighted_sum(weights: jax.Array, v: jax.Array) -> jax.Array:
    """[B, H, E], of weights [B, H, S] and v [B, S, G, E]. In parts, since one sequence's long sum
    would keep few of a GPU's multiprocessors busy."""
    (b, h, s), (g, d) = weights.shape, v.shape[2:]
    splits = _splits(b, s)
    weights = weights.astype(v.dtype).reshape(b, h, splits, s // splits)
    v = v.reshape(b, splits, s // splits, g * d)
    wide = sum_dtype(v.dtype)
    all_groups = jnp.einsum("bhps,bpsx->bphx", weights, v, preferred_element_type=wide)
    all_groups = jnp.sum(all_groups, 1).reshape(b, h, g, d)
    return jnp.sum(jnp.where(_own_group(h, g), all_groups, 0), 2)


def _own_group(heads: int, groups: int) -> np.ndarray:
    """Whether a head of queries belongs to a head of keys: bool [H, G, 1]."""
    own = np.arange(heads)[:, None] // (heads // groups) == np.arange(groups)
    return own[..., None]


@functools.cache
def _splits(batch: int, length: int) -> int:
    """How many equal splits `length` positions are summed in."""
    splits = 1
    while (
        2 * splits * batch <= MOST_SPLITS
        and length % (2 * splits) == 0
        and length >= 2 * splits * FEWEST_POSITIONS
    ):
        splits *= 2
    return splits


# ---- The primitive -------------------------------------------------------------------------------


def _reference(arrays: Arrays, params: Params) -> list[jax.Array]:
    with jax.default_matmul_precision(params.precision):
        pair = attend_reference(
            *_operands(arrays, params), capacity=params.capacity, scale=params.scale,
            softcap=params.softcap or None, value_width=params.value_width,
        )  # fmt: skip
    return [pair, *(jnp.zeros(shape, dtype) for shape, dtype in _shapes(arrays, params)[1:])]


def _check_lengths(arrays: Arrays, params: Params) -> Arrays:
    """The operands, if their lengths are right; else the call's error."""
    _, k, _, bounds, table, _ = _operands(arrays, params)
    check = jax.ffi.ffi_call(f"jflux_{OP}", jax.ShapeDtypeStruct(bounds.shape, bounds.dtype))
    positions = _positions(k, table)
    if not bounds.size or not positions:
        return arrays
    bounds = check(bounds, capacity=np.int64(params.capacity), positions=np.int64(positions))
    at = 2 if params.value_width else 3
    return *arrays[:at], bounds, *arrays[at + 1 :]


def _shapes(arrays: Arrays, params: Params) -> Sequence[ShapeDtype]:
    """The result, and with several splits their results, which the kernel needs room for."""
    queries, dtype = arrays[0].shape[:3], sum_dtype(arrays[0].dtype)
    columns = (params.value_width or arrays[2].shape[3]) + 1
    several = [((params.splits, *queries, columns), dtype)] if params.splits > 1 else []
    return [((*queries, columns), dtype), *several]


def _why_not(arrays: Arrays, params: Params, platform: str) -> str | None:
    q, k, v, *_ = arrays
    if why := _why_not_alike(arrays, params):
        return why
    if q.shape[3] not in WIDTHS:
        return f"heads have {q.shape[3]} elements, the kernel takes {WIDTHS}"
    if v.shape != k.shape:
        return f"values have {v.shape[3]} elements, and keys {k.shape[3]}"
    if params.scaled and k.dtype != jnp.float8_e4m3fn:
        return f"the caches are {k.dtype}, the kernel takes float8_e4m3fn"
    if params.scaled and arrays[4].shape != arrays[5].shape:
        return "one cache has a scale for each row, and the other one not"
    return None


def _why_not_latent(arrays: Arrays, params: Params, platform: str) -> str | None:
    if why := _why_not_alike(arrays, params):
        return why
    widths = arrays[0].shape[3], params.value_width
    if widths != LATENT_WIDTHS:
        return f"keys and values have {widths} elements, the kernel takes {LATENT_WIDTHS}"
    if params.scaled:
        return "the cache is of 8 bits"
    if params.alibi:
        return "the kernel takes no alibi_slopes"
    return None


def _why_not_alike(arrays: Arrays, params: Params) -> str | None:
    """What both kernels do not take."""
    q, k, *_ = arrays
    if why := _native.why_not_dtypes(LATENT if params.value_width else OP, "cuda", q.dtype):
        return why
    if q.shape[1] > MOST_TOKENS:
        return f"{q.shape[1]} tokens, the kernel takes up to {MOST_TOKENS}"
    if 0 in q.shape or 0 in k.shape:
        return "an operand is empty"
    return None


def _why_not_portable(arrays: Arrays, params: Params, platform: str) -> str | None:
    q, *_ = arrays
    if q.shape[3] not in WIDTHS_PORTABLE:
        return (
            f"heads have {q.shape[3]} elements, the kernel takes {WIDTHS_PORTABLE} on GPUs other "
            "than Hopper"
        )
    return None


def _flops(arrays: Arrays, params: Params) -> int:
    """The FLOPs for all positions of this rank. Tracing does not know the lengths."""
    q, k, v, _, table, _ = _operands(arrays, params)
    widths = q.shape[3] + (params.value_width or v.shape[3])
    return pairs_flops(q, _positions(k, table)) * widths // max(1, 2 * q.shape[3])


def _batch(primitive: Any, operands: Any, dims: Any, *, params: Params) -> Any:
    def bind(*operands: Any) -> Any:
        return primitive.bind(*operands, params=params)

    if params.paged or params.scaled or None in dims:  # pages, scales of heads are of all sequences
        return _product.batch_one_by_one(bind, operands, dims)
    count = operands[0].shape[dims[0]]
    merged = [
        jnp.moveaxis(a, d, 0).reshape(-1, *np.delete(a.shape, d)[1:])
        for a, d in zip(operands, dims, strict=True)
    ]
    pair, *of_splits = bind(*merged)
    pair = pair.reshape(count, -1, *pair.shape[1:])
    of_splits = [a.reshape(a.shape[0], count, -1, *a.shape[2:]) for a in of_splits]
    return [pair, *of_splits], [0, *(1 for _ in of_splits)]


def _jvp(primals: Any, tangents: Any, *, params: Params) -> Any:
    """Values and tangents by XLA's form: the kernel has no forward mode."""
    # What is quantised is constant.
    count = 1 if params.scaled else 2 if params.value_width else 3
    values, others = primals[:count], primals[count:]

    def f(*values: Any) -> Any:
        return _reference((*values, *others), params)

    return jax.jvp(f, values, tuple(ad.instantiate_zeros(t) for t in tangents[:count]))


def _attributes(arrays: Arrays, params: Params, plan: Plan) -> dict[str, Any]:
    return {
        "capacity": np.int64(params.capacity),
        "scale": np.float64(params.scale),
        "softcap": np.float64(params.softcap),
        "splits": np.int64(params.splits),
        "paged": params.paged,
        "alibi": params.alibi,
    }


def _attributes_latent(arrays: Arrays, params: Params, plan: Plan) -> dict[str, Any]:
    return _attributes(arrays, params, plan) | {"portable": gpu_code.runs_portable()}


def _primitive_of(name: str, why_not: Any, why_not_portable: Any, attributes: Any) -> Any:
    primitive = make_primitive(
        Op(
            name=name,
            result_shapes=_shapes,
            reference=_reference,
            forms=(
                local_ops.kernel(
                    name,
                    why_not=why_not,
                    why_not_portable=why_not_portable,
                    attributes=attributes,
                    checked_on_gpus=True,
                    on_cpus=False,
                ),
                local_ops.checked_on_cpus(_reference, _check_lengths),
            ),
            batch=_batch,
            flops=_flops,
            is_local=True,
            values=1,
        )
    )
    ad.primitive_jvps[primitive] = _jvp
    return primitive


_flash_decode = _primitive_of(OP, _why_not, _why_not_portable, _attributes)
_latent_decode = _primitive_of(LATENT, _why_not_latent, local_ops.takes_all, _attributes_latent)
