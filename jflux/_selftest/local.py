"""Random calls of ops of one rank, checked against numpy: sorts exactly, sums in float64. Each call
runs twice and must have the same bits."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jflux
from jflux import moe

from .. import _native, testing
from .._call import gpu_code
from .._call.plans import Path

#: How many calls of each kind. Numbers of calls choose among kernels, so that all of them run.
CALLS = 6
HALVES = (jnp.bfloat16, jnp.float16)


def _run(ops: str, f: Callable[..., Any], *args: Any) -> Any:
    """The results of a call, in numpy. Says so if a GPU that has code for one of these ops, whose
    names are separated by spaces, runs none."""
    jitted = jax.jit(f)
    with jflux.explaining() as calls:
        first, again = (jax.tree.map(np.asarray, jitted(*args)) for _ in range(2))
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(again), strict=True):
        if a.tobytes() != b.tobytes():
            raise AssertionError(f"{ops}: a second call has other bits")
    on_gpus = jax.default_backend() == "gpu"
    for op in (op for op in ops.split() if on_gpus and has_code(op)):
        of_op = [call.plan for call in calls if call.op == op]
        if not any(plan.path == Path.FUSED for plan in of_op):
            why = of_op[0].reason if of_op else "it was not called"
            raise AssertionError(f"{op}: no kernel ran: {why}")
    return first


def has_code(op: str) -> bool:
    """Whether the GPUs here run code of an op's kernels."""
    first, last = _native.lib.gpus(op)
    return first <= gpu_code.arch_here() <= last


def _same(what: str, found: Any, wanted: Any) -> None:
    if not np.array_equal(np.asarray(found), wanted):
        raise AssertionError(f"{what}: wrong")


def _draw_indices(rng: np.random.Generator) -> tuple[np.ndarray, int]:
    """Experts of tokens [T, k], -1 among them, and how many there are."""
    experts, k = int(rng.choice([1, 8, 60, 128, 720])), int(rng.integers(1, 9))
    tokens = int(rng.choice([1, 31, 1025, 4096]))
    return rng.integers(-1, experts, (tokens, k)).astype(np.int32), experts


def _sorted_slots(indices: np.ndarray) -> np.ndarray:
    """Numbers of the slots that have an expert, by expert."""
    slots = indices.reshape(-1)
    order = np.argsort(slots, kind="stable")
    return order[slots[order] >= 0]


def route(rng: np.random.Generator, _: int) -> None:
    indices, experts = _draw_indices(rng)
    found = _run("moe_route", functools.partial(moe.route, num_experts=experts), indices)
    order, slots = _sorted_slots(indices), indices.reshape(-1)
    counts = np.bincount(slots[order], minlength=experts)
    source, destination = (np.full(slots.size, -1) for _ in range(2))
    source[: len(order)] = order
    destination[order] = np.arange(len(order))
    _same("moe.route: counts", found.counts, counts)
    _same("moe.route: offsets", found.offsets, np.concatenate([[0], np.cumsum(counts)]))
    _same("moe.route: source", found.source, source)
    _same("moe.route: destination", found.destination, destination.reshape(indices.shape))


def rows(rng: np.random.Generator, number: int) -> None:
    indices, experts = _draw_indices(rng)
    tokens, k = indices.shape
    dtype, width = HALVES[number % 2], 8 * int(rng.choice([1, 17, 128]))
    x = rng.standard_normal((tokens, width)).astype(dtype)
    weights = rng.standard_normal((tokens, k)).astype(np.float32)

    def there_and_back(x: Any, indices: Any, weights: Any) -> Any:
        routing = moe.route(indices, experts)
        copies = moe.permute(x, routing)
        return copies, moe.unpermute(copies, routing, weights)

    copies, summed = _run("moe_rows", there_and_back, x, indices, weights)
    order = _sorted_slots(indices)
    wanted = np.zeros((tokens * k, width), x.dtype)
    wanted[: len(order)] = x[order // k]
    _same("moe.permute", copies, wanted)
    factors = np.where(indices >= 0, weights, 0).astype(np.float64)
    exact, size = (a.sum(1)[:, None] * b for a, b in _with_sizes(factors, x.astype(np.float64)))
    testing.assert_close(summed, exact, size, dtype, k)


def _with_sizes(*arrays: np.ndarray) -> tuple[tuple[np.ndarray, ...], ...]:
    """The arrays, and their magnitudes."""
    return arrays, tuple(np.abs(a) for a in arrays)


def gate(rng: np.random.Generator, _: int) -> None:
    tokens, experts = int(rng.choice([1, 31, 1025])), int(rng.choice([8, 64, 256]))
    k = int(rng.integers(1, 9))
    logits = rng.standard_normal((tokens, experts)).astype(np.float32)
    dy = rng.standard_normal((tokens, k)).astype(np.float32)

    def both(logits: Any, dy: Any) -> Any:
        def weights(logits: Any) -> Any:
            indices, weights = moe.top_k_softmax(logits, k)
            return weights, indices

        found, pull, indices = jax.vjp(weights, logits, has_aux=True)
        return indices, found, pull(dy)[0]

    indices, weights, gradient = _run("moe_gate", both, logits, dy)
    order = np.argsort(-logits, axis=1, kind="stable")[:, :k]
    _same("top_k_softmax: choices", indices, order)
    chosen = np.take_along_axis(logits, order, 1).astype(np.float64)
    e = np.exp(chosen - chosen.max(1, keepdims=True))
    p = e / e.sum(1, keepdims=True)
    slopes = np.zeros(logits.shape)
    np.put_along_axis(slopes, order, p * (dy - (p * dy).sum(1, keepdims=True)), 1)
    testing.assert_close(weights, p, np.full(p.shape, 4.0), np.float32, experts)
    testing.assert_close(gradient, slopes, np.full(slopes.shape, 32.0), np.float32, experts)


def decode(rng: np.random.Generator, number: int) -> None:
    dtype, width = HALVES[number % 2], (64, 128)[number // 2 % 2]
    groups, shared = int(rng.choice([1, 2, 4])), int(rng.choice([1, 4, 8]))
    q, k, v, lengths = _draw_caches(rng, dtype, width, groups, shared)
    found = _run("flash_decode", jflux.flash_decode, q, k, v, lengths)
    _check_decoded(found, q, k, v, lengths)


def decode_latent(rng: np.random.Generator, number: int) -> None:
    """Over a cache whose values are the first elements of keys."""
    dtype, shared = HALVES[number % 2], int(rng.choice([1, 16, 40, 80]))
    q, k, _, lengths = _draw_caches(rng, dtype, 576, 1, shared)
    f = functools.partial(jflux.flash_decode, value_width=512)
    found = _run("latent_decode", f, q, k, None, lengths)
    _check_decoded(found, q, k, k[..., :512], lengths)


def _draw_caches(
    rng: np.random.Generator, dtype: Any, width: int, groups: int, shared: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(queries, keys, values, lengths); `shared`: heads of queries for each of the cache."""
    batch, positions = int(rng.integers(1, 6)), int(rng.choice([64, 320, 2048]))
    q = rng.standard_normal((batch, groups * shared, width)).astype(dtype)
    k, v = (rng.standard_normal((batch, positions, groups, width)).astype(dtype) for _ in "kv")
    return q, k, v, rng.integers(1, positions + 1, batch).astype(np.int32)


def _check_decoded(
    found: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray, lengths: np.ndarray
) -> None:
    (batch, positions, groups, width), dtype = k.shape, q.dtype
    q64, k64, v64 = (a.astype(np.float64) for a in (q, k, v))
    k64, v64 = (a.transpose(0, 2, 1, 3) for a in (k64, v64))
    s = q64.reshape(batch, groups, -1, width) @ k64.swapaxes(2, 3) / np.sqrt(width)
    s = np.where(np.arange(positions) < lengths[:, None, None, None], s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    exact, size = ((p @ a).reshape(*q.shape[:2], -1) for a in (v64, np.abs(v64)))
    # Exponentials are rounded before they are multiplied, and tiny ones of float16 vanish.
    testing.assert_close(found, exact, 2 * size + 0.03, dtype, width)


def attention(rng: np.random.Generator, number: int) -> None:
    dtype, width = HALVES[number % 2], (64, 128, 256)[number // 2 % 3]
    groups, shared = int(rng.choice([1, 2])), int(rng.choice([1, 3]))
    batch, positions = int(rng.integers(1, 3)), int(rng.choice([129, 200, 400]))
    rows, heads = (batch, positions), groups * shared
    q, do = (rng.standard_normal((*rows, heads, width)).astype(dtype) for _ in "qo")
    k, v = (rng.standard_normal((*rows, groups, width)).astype(dtype) for _ in "kv")
    # Other kernels have a softcap. cuDNN takes none, nor sequences of such lengths.
    ways: tuple[dict[str, Any], ...] = ({"softcap": 3.0}, {"window": (150, 0)})

    def both(q: Any, k: Any, v: Any, do: Any) -> Any:
        found = []
        for way in ways:
            attend = functools.partial(jflux.attention, causal=True, layout="contiguous", **way)
            o, pull = jax.vjp(attend, q, k, v)
            found.append((o, *pull(do)))
        return found

    results = _run("flash_attention flash_attention_backward", both, q, k, v, do)
    for found, way in zip(results, ways, strict=True):
        _check_attention(found, q, k, v, do, **way)


def _check_attention(
    found: tuple[np.ndarray, ...],
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    do: np.ndarray,
    softcap: float | None = None,
    window: tuple[int, int] | None = None,
) -> None:
    """o, dq, dk and dv of causal attention."""
    (batch, positions, groups, width), dtype = k.shape, q.dtype
    shared, scale = q.shape[2] // groups, 1 / np.sqrt(width)
    q, do, k, v = (a.astype(np.float64).swapaxes(1, 2) for a in (q, do, k, v))
    k, v = (np.repeat(a, shared, 1) for a in (k, v))
    s, slope = q @ k.mT * scale, np.asarray(scale)
    if softcap is not None:
        bent = np.tanh(s / softcap)
        s, slope = softcap * bent, scale * (1 - bent**2)
    back = np.subtract.outer(np.arange(positions), np.arange(positions))
    allowed = (back >= 0) & (back <= (positions if window is None else window[0]))
    p = np.where(allowed, np.exp(s - s.max(-1, keepdims=True)), 0)
    p /= p.sum(-1, keepdims=True)
    o, dp = p @ v, do @ v.mT
    delta, slope = (o * do).sum(-1, keepdims=True), p * slope
    # What is rounded before it is multiplied: p, its gradients, and o in delta.
    sizes = slope * (np.abs(dp - delta) + (np.abs(o) * np.abs(do)).sum(-1, keepdims=True) / 4)
    ds = slope * (dp - delta)
    exact = o, ds @ k, ds.mT @ q, p.mT @ do
    size = p @ np.abs(v), sizes @ np.abs(k), sizes.mT @ np.abs(q), p.mT @ np.abs(do)
    for name, y, right, scale_of, of_keys in zip(
        ("o", "dq", "dk", "dv"), found, exact, size, (False, False, True, True), strict=True
    ):
        if of_keys:
            right, scale_of = (
                a.reshape(batch, groups, shared, positions, width).sum(2) for a in (right, scale_of)
            )
        right, scale_of = (a.swapaxes(1, 2) for a in (right, scale_of))
        try:
            testing.assert_close(y, right, 2 * scale_of + 0.03, dtype, positions)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None


def grouped(rng: np.random.Generator, number: int) -> None:
    dtype, groups = HALVES[number % 2], int(rng.choice([1, 3, 8]))
    sizes = rng.integers(0, 300, groups).astype(np.int32)
    sizes[0] += sizes.sum() == 0
    m, (k, n) = int(sizes.sum()), (8 * int(rng.choice([8, 17, 32])) for _ in "kn")
    x, w, dy = (
        rng.standard_normal(shape).astype(dtype) for shape in [(m, k), (groups, k, n), (m, n)]
    )

    def both(x: Any, w: Any, sizes: Any, dy: Any) -> Any:
        y, pull = jax.vjp(lambda x, w: jflux.grouped_matmul(x, w, sizes), x, w)
        return y, *pull(dy)

    found = _run("grouped_matmul grouped_matmul_dw", both, x, w, sizes, dy)
    x, w, dy = (a.astype(np.float64) for a in (x, w, dy))
    exact = _grouped(x, w, dy, sizes)
    size = _grouped(np.abs(x), np.abs(w), np.abs(dy), sizes)
    for y, right, scale, terms in zip(found, exact, size, (k, n, m), strict=True):
        testing.assert_close(y, right, scale, dtype, terms)


def _grouped(
    x: np.ndarray, w: np.ndarray, dy: np.ndarray, sizes: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The product of groups of rows, and the gradients of x and w."""
    parts = np.split(x, np.cumsum(sizes)[:-1]), np.split(dy, np.cumsum(sizes)[:-1])
    y = np.concatenate([rows @ one for rows, one in zip(parts[0], w, strict=True)])
    dx = np.concatenate([rows @ one.T for rows, one in zip(parts[1], w, strict=True)])
    return y, dx, np.stack([rows.T @ others for rows, others in zip(*parts, strict=True)])


def scaled(rng: np.random.Generator, number: int) -> None:
    types = [np.dtype(t) for t in (jnp.int8, jnp.float8_e4m3fn)]
    if jax.default_backend() == "gpu" and (arch := gpu_code.arch_here()) < gpu_code.HOPPER:
        types = [t for t in types if gpu_code.why_not_multiplied(t, arch) is None]
    dtype = types[number % len(types)]
    m, k, n = (16 * int(rng.choice([1, 8, 17, 40])) for _ in "mkn")
    x, w = (rng.standard_normal(shape).astype(np.float32) for shape in [(m, k), (n, k)])
    first = int(rng.integers(m + 1))  # rows of the first of two groups, whose w is half as large
    sizes = jnp.array([first, m - first], jnp.int32)

    def of_two(w: Any) -> Any:
        return jflux.Scaled(jnp.stack([w.values] * 2), jnp.stack([w.scale, 2 * w.scale]))

    def both(x: Any, w: Any) -> Any:
        operands = [jflux.quantize(a, dtype, block=(1, -1)) for a in (x, w)]
        y = jflux.matmul(*operands, transpose_rhs=True)
        of_groups = jflux.grouped_matmul(
            operands[0], of_two(operands[1]), sizes, transpose_rhs=True
        )
        return y, of_groups, *((one.values.astype(jnp.float32), one.scale) for one in operands)

    y, of_groups, *found = _run("quantize matmul grouped_matmul", both, x, w)
    for a, (values, scale) in zip((x, w), found, strict=True):
        most = np.float32(127 if dtype == np.int8 else jnp.finfo(dtype).max)
        of_rows = np.abs(a).max(-1, keepdims=True) / most
        ratio = np.clip(a / of_rows, -most, most)
        ratio = np.round(ratio) if dtype == np.int8 else ratio
        _same("quantize", scale, of_rows)
        _same("quantize", values, ratio.astype(dtype).astype(np.float32))
    x, w = (np.multiply(*one, dtype=np.float64) for one in found)
    exact, size = x @ w.T, np.abs(x) @ np.abs(w).T
    testing.assert_close(y, exact, size, y.dtype, k)
    times = np.where(np.arange(m) < first, 1, 2)[:, None]
    testing.assert_close(of_groups, times * exact, times * size, y.dtype, k)


KINDS = (route, rows, gate, decode, decode_latent, attention, grouped, scaled)


def check(seed: int, calls: int = CALLS) -> int:
    """Checks so many random calls of each kind, and returns how many they were.

    Raises:
      AssertionError: one was wrong, or ran no kernel on a GPU that has code for it.
    """
    for number in range(calls):
        for kind in KINDS:
            try:
                kind(np.random.default_rng([seed, number]), number)
            except AssertionError as error:
                raise AssertionError(f"{kind.__name__}, call {number}: {error}") from None
        jax.clear_caches()
    return calls * len(KINDS)
