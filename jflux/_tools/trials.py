"""One op on random operands over a mesh: what is timed, tuned and recorded."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from .. import _native
from .._ops._quantize import quantize
from .._ops._scaled import Scaled
from .._ops._spec import OpSpec


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds per call: the median over rounds, and the quartiles."""

    median: float
    low: float
    high: float


#: By what operands have a scale: what shares an entry of x's scale, [m, k], and of that of a w that
#: is stored [n, k].
SCALES: dict[str, tuple[tuple[int, int], tuple[int, int]]] = {
    "tensor": ((-1, -1), (-1, -1)),
    "row": ((1, -1), (1, -1)),
    "block": ((1, 128), (128, 128)),
}


@dataclasses.dataclass(frozen=True)
class Trial:
    """One way to call a product on matrices, over a mesh axis.

    Attributes:
      spec: the op.
      axis: the mesh axis, or a tuple of them.
      transpose_rhs: w is stored [n, k].
      way: which of the op's ways.
      scales: of operands of 8 bits, one of `SCALES`; None: operands have none.
    """

    spec: OpSpec
    axis: Any = "tp"
    transpose_rhs: bool = False
    way: int = 0
    scales: str | None = None

    @property
    def options(self) -> dict[str, Any]:
        """How the op is called on one rank's x and w."""
        return {
            "axis_name": self.axis, "transpose_rhs": self.transpose_rhs,
            **self.spec.ways[self.way],
        }  # fmt: skip

    @property
    def partition(self) -> tuple[P, P, P]:
        """How x, w and y are sharded."""
        return self.spec.partition(
            self.axis, transpose_rhs=self.transpose_rhs, **self.spec.ways[self.way]
        )

    def function(self, reference: bool = False, **options: Any) -> Callable[..., Any]:
        """The op, or its reference, of one rank's x and w."""
        op = self.spec.reference if reference else self.spec.function
        return functools.partial(op, **self.options, **options)

    def operands(self, m: int, n: int, k: int, mesh: Mesh, dtype: Any) -> tuple[Any, Any]:
        """Global x [m, k] and w [k, n] (or [n, k]), whose product is of order 1. With scales each
        rank's part has its own. Kernels multiply an x of float8_e5m2 by float8_e4m3fn."""
        x_spec, w_spec, _ = self.partition
        types = (jnp.bfloat16, jnp.bfloat16) if self.scales else (dtype, _type_of_w(dtype))
        x = normal(mesh, x_spec, (m, k), types[0], seed=1)
        w_shape, scale = self._w_shape(n, k), float(1 / np.sqrt(k))
        w = normal(mesh, w_spec, w_shape, types[1], seed=2, scale=scale)
        return self._quantized(mesh, dtype)(x, w) if self.scales else (x, w)

    def shapes(self, m: int, n: int, k: int, mesh: Mesh, dtype: Any) -> tuple[Any, Any]:
        """Shapes, types and shardings of :meth:`operands`."""
        x_spec, w_spec, _ = self.partition
        types = (jnp.bfloat16, jnp.bfloat16) if self.scales else (dtype, _type_of_w(dtype))
        x: Any = jax.ShapeDtypeStruct((m, k), types[0])
        w: Any = jax.ShapeDtypeStruct(self._w_shape(n, k), types[1])
        if self.scales:
            x, w = jax.eval_shape(self._quantized(mesh, dtype), x, w)

        def sharded(operand: Any, spec: P) -> Any:
            sharding = NamedSharding(mesh, spec)
            return jax.tree.map(
                lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), operand
            )

        return sharded(x, x_spec), sharded(w, w_spec)

    def _w_shape(self, n: int, k: int) -> tuple[int, int]:
        return (n, k) if self.transpose_rhs else (k, n)

    def quantize(self, x: Any, w: Any, *, dtype: Any) -> tuple[Scaled, Scaled]:
        """One rank's x and w, with `scales`."""
        assert self.scales is not None and self.transpose_rhs
        x_block, w_block = SCALES[self.scales]
        wq = quantize(w, _type_of_w(dtype), block=w_block)
        return quantize(x, dtype, block=x_block), wq

    def _quantized(self, mesh: Mesh, dtype: Any) -> Callable[..., tuple[Scaled, Scaled]]:
        """A function of global x and w."""
        f, specs = functools.partial(self.quantize, dtype=dtype), self.partition[:2]
        return jax.jit(
            jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=specs, check_vma=False)
        )


def _type_of_w(dtype: Any) -> Any:
    """Of a w that is multiplied by an x of this type."""
    return jnp.float8_e4m3fn if dtype == jnp.float8_e5m2 else dtype


def normal(
    mesh: Mesh, spec: P, shape: tuple[int, ...], dtype: Any, *, seed: int, scale: float = 1.0
) -> jax.Array:
    """Normal random numbers, made on the devices."""
    make = jax.jit(
        lambda key: (jax.random.normal(key, shape, jnp.float32) * scale).astype(dtype),
        out_shardings=NamedSharding(mesh, spec),
    )
    return make(jax.random.key(seed))


#: XLA makes a graph of a loop's body if it has five commands, and launches those of a shorter one
#: call by call, which takes the host 10 to 20 us a call.
CALLS_IN_A_BODY = 4


def with_corner(a: Any, y: Any) -> Any:
    """`a`, whose first element is y's. Of an operand with a scale that is the first value, and the
    scale comes after y too."""
    if isinstance(a, Scaled):
        first = a.scale[:1, :1] + 0 * y[:1, :1].astype(jnp.float32)
        return Scaled(with_corner(a.values, y), with_corner(a.scale, first))
    corner = y[(slice(0, 1),) * y.ndim].reshape((1,) * a.ndim).astype(a.dtype)
    return lax.dynamic_update_slice(a, corner, (0,) * a.ndim)


def loop(
    op: Callable[[jax.Array, jax.Array], jax.Array],
    iterations: int,
    linked: Callable[[Any, Any], Any] = with_corner,
) -> Callable[..., Any]:
    """`iterations` calls in a row; each one's input takes an element of the last one's output, by
    `linked`. w may be a pytree."""

    def step(carry: Any) -> Any:
        x, w, y = carry
        # x varies with y: no call can be left out or moved. A w that is padded does so too, or XLA
        # would pad it once for all calls.
        is_padded = isinstance(w, jax.Array) and any(
            size * w.dtype.itemsize % _native.VECTOR_BYTES for size in w.shape
        )
        x, w = linked(x, y), linked(w, y) if is_padded else w
        return x, w, op(x, w)

    def steps(count: int, carry: Any) -> Any:
        for _ in range(count):
            carry = step(carry)
        return carry

    def run(x: Any, w: Any) -> Any:
        rounds, first = divmod(iterations - 1, CALLS_IN_A_BODY)
        carry = steps(first, (x, w, op(x, w)))
        return lax.fori_loop(0, rounds, lambda _, carry: steps(CALLS_IN_A_BODY, carry), carry)[2]

    return run


def lowered(
    f: Callable[..., Any],
    mesh: Mesh,
    in_specs: Any,
    out_specs: Any,
    *args: Any,
    check_vma: bool = False,
) -> Any:
    """A function of one rank, lowered for these operands."""
    mapped = jax.shard_map(
        f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma
    )
    return jax.jit(mapped).lower(*args)


def compiled(
    f: Callable[..., Any],
    mesh: Mesh,
    in_specs: Any,
    out_specs: Any,
    *args: Any,
    options: dict[str, str | bool] | None = None,
    check_vma: bool = False,
) -> Any:
    """A function of one rank, compiled for these operands, with these options of XLA."""
    program = lowered(f, mesh, in_specs, out_specs, *args, check_vma=check_vma)
    return program.compile(compiler_options=options)


def compile_at_once(
    programs: Mapping[str, Any], threads: int = 8, options: dict[str, str | bool] | None = None
) -> dict[str, Any]:
    """Compiles lowered programs, with these options of XLA, several at the same time in one
    process. Not for those with products of XLA's that are compared with others: XLA tries its
    products' algorithms on the device while it compiles, and would find them slowed down by one
    another."""
    threads = threads if jax.process_count() == 1 else 1
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        compiled = pool.map(lambda p: p.compile(compiler_options=options), programs.values())
        return dict(zip(programs, compiled, strict=True))


def run_of(program: Callable[..., Any], *args: Any) -> Callable[[], None]:
    """Runs it and waits for it, as `interleave` takes it."""

    def run() -> None:
        jax.block_until_ready(program(*args))

    return run


def iterations_for(seconds: float, flops: float) -> int:
    """How many calls of so many operations fill about so many seconds."""
    return int(min(200, max(5, seconds / (flops / 600e12 + 30e-6))))


def slowest(seconds: float) -> float:
    """Of all processes. (One process waits for all of its devices anyway.)"""
    if jax.process_count() == 1:
        return seconds
    from jax.experimental import multihost_utils

    return float(np.max(multihost_utils.process_allgather(np.float32(seconds))))


def balanced_orders(count: int, rounds: int) -> list[list[int]]:
    """In which order so many contestants run in each round. One that follows another which took
    little power finds the clock faster, by up to 4 %. So in `count` rounds, or twice as many if
    that is odd, each follows each other one once, or twice: a balanced design (E. J. Williams,
    Australian Journal of Scientific Research A 2, 149, 1949)."""
    first = [(i + 1) // 2 if i % 2 else -(i // 2) for i in range(count)]  # 0, 1, -1, 2, -2, ...
    orders = [[(place + shift) % count for place in first] for shift in range(count)]
    if count % 2:
        orders = [o for order in orders for o in (order, order[::-1])]
    return [orders[i % len(orders)] for i in range(rounds)]


def interleave(
    runs: Mapping[str, Callable[[], object]],
    iterations: int,
    rounds: int,
    progress: Callable[[], None] | None = None,
) -> dict[str, Timing]:
    """Times all contestants in turn, `rounds` times, in `balanced_orders`, so that clocks and
    temperature are the same for all. All processes get the same figures: those of the slowest.
    `progress` is called (1 + rounds) * len(runs) times: before the rounds each one warms up."""
    progress = progress or (lambda: None)
    for run in runs.values():
        run()
        run()
        progress()
    samples: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    for order in balanced_orders(len(names), rounds):
        for name in (names[i] for i in order):
            run = runs[name]
            start = time.perf_counter()
            run()
            samples[name].append(slowest(time.perf_counter() - start) / iterations)
            progress()
    result = {}
    for name, values in samples.items():
        low, mid, high = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
        result[name] = Timing(mid, low, high)
    return result
