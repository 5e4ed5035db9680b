"""A short benchmark: a few calls, by jflux's kernels and in `lax`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jflux
from jflux import moe

from .._ops._spec import all_ops
from .._tools import trials

ITERATIONS, ROUNDS = 20, 5
#: (op, bytes of a rank's x).
COLLECTIVES = (("all_reduce", 8 << 10), ("all_reduce", 4 << 20), ("all_gather", 1 << 20))
#: (op, m, n, k), of all ranks.
PRODUCTS = (
    ("all_gather_matmul", 4096, 8192, 4096),
    ("matmul_reduce_scatter", 4096, 4096, 8192),
)  # fmt: skip
#: Tokens, choices of each, experts.
ROUTE = (4096, 8, 64)
#: Sequences, positions, heads of queries, heads of keys, elements.
DECODE = (16, 4096, 32, 8, 128)

Row = tuple[str, float, float]


def _time(
    name: str, f: Callable[[Any, Any], Any], mesh: Mesh, in_specs: Any, out_specs: Any, *args: Any
) -> Row:
    """Microseconds of a call of one rank's x and w in `lax`, and by jflux's kernel. Calls of a loop
    wait for each other by one element, whose copy is part of both times."""
    runs = {}
    for column, switches in (("lax", {"fused": False}), ("jflux", {"always": True})):
        with jflux.config(**switches):
            body = trials.loop(f, ITERATIONS)
            program = trials.compiled(body, mesh, in_specs, out_specs, *args)
        runs[column] = trials.run_of(program, *args)
    times = trials.interleave(runs, ITERATIONS, ROUNDS)
    return name, 1e6 * times["lax"].median, 1e6 * times["jflux"].median


def over_ranks(mesh: Mesh) -> Iterator[Row]:
    """Of collectives and products over the mesh's axis "tp", in bfloat16."""
    for op, size in COLLECTIVES:
        spec = all_ops()[op]
        x = trials.normal(mesh, P("tp"), (mesh.size * size // 2,), jnp.bfloat16, seed=1)

        def collective(x: Any, w: Any, spec: Any = spec) -> Any:
            return spec.on(x, axis_name="tp", **spec.ways[0])

        label = f"{op}, {size >> 10} KB of a rank"
        yield _time(label, collective, mesh, (P("tp"), P()), P("tp"), x, jnp.zeros(()))
    for op, m, n, k in PRODUCTS:
        trial = trials.Trial(all_ops()[op])
        x, w = trial.operands(m, n, k, mesh, jnp.bfloat16)
        *in_specs, y_spec = trial.partition
        label = f"{op}, {m} x {n} x {k}"
        yield _time(label, trial.function(), mesh, tuple(in_specs), y_spec, x, w)


def of_one_rank() -> Iterator[Row]:
    """Of local ops, on the first GPU."""
    mesh = Mesh(np.array(jax.devices()[:1]), ("tp",))
    rng = np.random.default_rng(0)
    tokens, k, experts = ROUTE
    indices = jnp.asarray(rng.integers(0, experts, (tokens, k)), jnp.int32)

    def route(x: Any, w: Any) -> Any:
        return moe.route(x, experts).destination % experts

    label = f"moe.route, {tokens} x {k} of {experts}"
    yield _time(label, route, mesh, (P(), P()), P(), indices, jnp.zeros(()))

    def normal(*shape: int) -> Any:
        make = jax.jit(lambda: jax.random.normal(jax.random.key(len(shape)), shape, jnp.bfloat16))
        return make()

    batch, positions, heads, groups, width = DECODE
    cache = normal(batch, positions, groups, width)
    caches = (cache, cache, jnp.full(batch, positions, jnp.int32))

    def decode(q: Any, caches: Any) -> Any:
        return jflux.flash_decode(q, *caches)

    label = f"flash_decode, {batch} x {positions}, {heads} heads"
    yield _time(label, decode, mesh, (P(), P()), P(), normal(batch, heads, width), caches)
