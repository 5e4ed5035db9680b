"""What the tests of split caches share: the definitions in numpy, in float64."""

import itertools

import numpy as np


def draw(*shapes, seed=0, dtype=np.float64):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def plain(q, k, v, lengths, window=None, softcap=None, scale=None, sinks=None, alibi_slopes=None):
    """(attention, log-sum-exp) of q [b, h, d] to the first positions of k [b, s, g, d] and v [b, s,
    g, e], whose last one is q's own. With sinks [h] the softmax has one more column, which is
    dropped."""
    q, k, v = (np.asarray(a, np.float64) for a in (q, k, v))
    out, lse = np.zeros((*q.shape[:2], v.shape[3])), np.full(q.shape[:2], -np.inf)
    scale = q.shape[2] ** -0.5 if scale is None else scale
    for b, h in itertools.product(*map(range, q.shape[:2])):
        group = h // (q.shape[1] // k.shape[2])
        start = 0 if window is None else max(0, lengths[b] - 1 - window)
        at = slice(start, lengths[b])
        if start == lengths[b] and sinks is None:
            continue
        scores = k[b, at, group] @ q[b, h] * scale
        if softcap is not None:
            scores = softcap * np.tanh(scores / softcap)
        if alibi_slopes is not None:
            scores = scores + alibi_slopes[h] * np.arange(start + 1 - lengths[b], 1)
        if sinks is not None:
            scores = np.append(scores, sinks[h])
        if scores.max() == -np.inf:  # of a sink alone
            continue
        weights = np.exp(scores - scores.max())
        out[b, h] = weights[: lengths[b] - start] @ v[b, at, group] / weights.sum()
        lse[b, h] = np.log(weights.sum()) + scores.max()
    return out, lse


def plain_tokens(q, k, v, lengths, *args, **options):
    """:func:`plain` of q [b, t, h, d], the last t tokens of the sequences."""
    tokens = q.shape[1]
    ends = [np.maximum(np.asarray(lengths) - tokens + 1 + i, 0) for i in range(tokens)]
    each = [plain(q[:, i], k, v, end, *args, **options) for i, end in enumerate(ends)]
    return [np.stack(a, 1) for a in zip(*each, strict=True)]


def written(cache, new, positions):
    """By the definition, in numpy."""
    cache = np.array(cache)
    if positions.ndim == 1:
        positions = positions[:, None] + np.arange(new.shape[1])
    for b, t in np.ndindex(positions.shape):
        if 0 <= positions[b, t] < cache.shape[1]:
            cache[b, positions[b, t]] = new[b, t]
    return cache


def paged(a, world, size, seed=0, spare=2):
    """The cache a [b, s, ...] in shuffled pages: [world * pages, size, ...], and the block table
    [b, world * P] of pages on each rank. Pages that no sequence has are NaN."""
    b, s = a.shape[:2]
    each = s // world // size
    rng = np.random.default_rng(seed)
    pages, tables = [], []
    for part in np.split(a, world, 1):
        order = rng.permutation(b * each + spare)[: b * each]
        of_rank = np.full((b * each + spare, size, *a.shape[2:]), np.nan, a.dtype)
        of_rank[order] = part.reshape(b * each, size, *a.shape[2:])
        pages.append(of_rank)
        tables.append(order.reshape(b, each))
    return np.concatenate(pages), np.concatenate(tables, 1).astype(np.int32)


def allocated(table, lengths, size, free):
    """A block table [b, world * P] with a page for each of the first `lengths` [b] positions, from
    those that each rank has `free`, a list for each. What is not needed is given back."""
    table, each = table.copy(), table.shape[1] // len(free)
    for b, p in np.ndindex(table.shape):
        needed = p * size < lengths[b]
        if needed and table[b, p] < 0:
            table[b, p] = free[p // each].pop()
        elif not needed and table[b, p] >= 0:
            free[p // each].append(table[b, p])
            table[b, p] = -1
    return table
