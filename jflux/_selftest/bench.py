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
    rng, experts = np.random.default_rng(0), 64
    indices = jnp.asarray(rng.integers(0, experts, (4096, 8)), jnp.int32)

    def route(x: Any, w: Any) -> Any:
        return moe.route(x, experts).destination % experts

    yield _time(
        "moe.route, 4096 x 8 of 64", route, mesh, (P(), P()), P(), indices, jnp.zeros(())
    )  # fmt: skip

    def normal(*shape: int) -> Any:
        return jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)

    caches = (normal(16, 4096, 8, 128), normal(16, 4096, 8, 128), jnp.full(16, 4096, jnp.int32))

    def decode(q: Any, caches: Any) -> Any:
        return jflux.flash_decode(q, *caches)

    yield _time(
        "flash_decode, 16 x 4096, 32 heads", decode, mesh, (P(), P()), P(),
        normal(16, 32, 128), caches,
    )  # fmt: skip
