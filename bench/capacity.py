"""A mixture of experts with a capacity, in plain JAX: GShard's form (arXiv 2006.16668), with a sort
in place of its one-hot masks. Each rank gives each expert CAPACITY times its even share of slots;
tokens beyond them are dropped. Of one rank, inside shard_map, with experts split over "x".
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .mixtures import Case

CAPACITY = 1.25


@jax.custom_vjp
def moved(rows: jax.Array, take: jax.Array, give: jax.Array) -> jax.Array:
    """Row `take[i]` of `rows` as row i, zeros where there is none; `give` is the way back, by which
    gradients are gathered too and not scattered."""
    return rows.at[take].get(mode="fill", fill_value=0)


moved.defvjp(
    lambda rows, take, give: (moved(rows, take, give), give),
    lambda give, d: (d.at[give].get(mode="fill", fill_value=0), None, None),
)


def slots_of(indices: jax.Array, experts: int, capacity: int) -> tuple[jax.Array, jax.Array]:
    """Where each choice [T k] goes among slots [E C], by a stable sort, and which choice each slot
    has; beyond the end where it has none."""
    chosen = indices.reshape(-1)
    order = jnp.argsort(chosen, stable=True)
    counts = jnp.bincount(chosen, length=experts)
    starts = jnp.cumsum(counts) - counts
    place = jnp.zeros_like(order).at[order].set(jnp.arange(order.size)) - starts[chosen]
    slot = jnp.where(place < capacity, chosen * capacity + place, experts * capacity)
    column = jnp.arange(capacity)
    there = jnp.where(column < counts[:, None], starts[:, None] + column, order.size)
    return slot, order.at[there.reshape(-1)].get(mode="fill", fill_value=order.size)


def capacity_of(case: Case, tokens: int) -> int:
    """Slots of an expert for so many tokens."""
    return math.ceil(CAPACITY * tokens * case.k / case.experts)


def chosen(case: Case, x: jax.Array, router: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The logits of a token's experts [T, k], and :func:`slots_of` its choices."""
    logits = x.astype(jnp.float32) @ router.astype(jnp.float32)
    values, indices = lax.top_k(logits, case.k)
    return values, *slots_of(indices, case.experts, capacity_of(case, x.shape[0]))


def einsum(case: Case, x: Any, router: Any, up: Any, down: Any, gate: Any) -> jax.Array:
    """The layer: x [T, d], router [d, E], gate and up [E/N, d, F], down [E/N, F, d]."""
    capacity = capacity_of(case, x.shape[0])
    values, slot, choice = chosen(case, x, router)
    weights = jax.nn.softmax(values).astype(x.dtype)
    rows = moved(jnp.repeat(x, case.k, 0), choice, slot).reshape(case.experts, capacity, -1)
    rows = lax.all_to_all(rows, "x", 0, 1, tiled=True)  # [E/N, N C, d]
    h = jax.nn.silu(jnp.einsum("ecd,edf->ecf", rows, gate)) * jnp.einsum("ecd,edf->ecf", rows, up)
    rows = lax.all_to_all(jnp.einsum("ecf,efd->ecd", h, down), "x", 1, 0, tiled=True)
    y = moved(rows.reshape(case.experts * capacity, -1), slot, choice)
    return jnp.einsum("tkd,tk->td", y.reshape(*weights.shape, -1), weights)


def kept(case: Case, x: jax.Array, router: jax.Array) -> jax.Array:
    """Which of a rank's choices [T, k] have a slot."""
    values, slot, _ = chosen(case, x, router)
    return (slot < case.experts * capacity_of(case, x.shape[0])).reshape(values.shape)
