"""``python -m jflux.doctor``: what jflux finds on this machine, and what it will do with it."""

from __future__ import annotations

import itertools
import platform
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jflux

from . import _heap, _jflux, _trial, testing
from ._ops import _product, exchange, matmul_all_to_all


def _versions() -> Iterator[str]:
    build = "with CUDA kernels" if _jflux.built_with_cuda() else "without CUDA kernels"
    try:
        from ._build_info import CUDA_DETAIL

        build += f" ({CUDA_DETAIL})"
    except ImportError:
        pass
    yield f"jflux {jflux.__version__}, built {build}"
    yield (
        f"jax {jax.__version__}, jaxlib {jaxlib.__version__}, "
        f"Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    )


def _devices() -> Iterator[str]:
    devices = jax.devices()
    kinds = sorted({d.device_kind for d in devices})
    yield (
        f"devices: {len(devices)} x {', '.join(kinds)} ({jax.default_backend()}), "
        f"{jax.process_count()} process(es)"
    )


def _heap_lines() -> Iterator[str]:
    name = _heap._default_platform()
    if name not in ("cpu", "cuda"):
        yield f"heap: none; on {name} every op takes its lax reference"
        return
    if name == "cuda" and (reason := _heap._why_no_cuda()):
        yield f"heap: none: {reason}"
        return
    try:
        jflux.init()
    except Exception as error:  # whatever it is, the user should read it here
        yield f"heap: FAILED: {error}"
        return
    mib = _heap.heap_bytes(name) >> 20
    yield (
        f"heap: back end {_heap.backend_in_use()}, {mib} MiB per device, "
        f"deadline {_heap.deadline_seconds():g} s"
    )
    links = _jflux.cuda_heap_links()
    for source in sorted({link[0] for link in links}):
        mine = [link for link in links if link[0] == source]
        peers = ", ".join(f"{to}: {push:.0f}/{pull:.0f}" for _, to, push, pull, _ in mine)
        slowest = max(us for *_, us in mine)
        yield (
            f"  links of device {source}, push/pull GB/s to device {peers}; "
            f"flag there and back {slowest:.1f} us; copies verified"
        )


def _try(op: str, dtype: jnp.dtype) -> str:
    """Runs the op on all devices: "ok", or what went wrong."""
    devices = jax.devices()[: _product.MAX_RANKS]
    ranks = len(devices)
    mesh = Mesh(np.array(devices), ("tp",))
    rng = np.random.default_rng(0)
    x = rng.standard_normal((8 * ranks, 16 * ranks)).astype(dtype)
    w = rng.standard_normal((16 * ranks, 8 * ranks)).astype(dtype)
    options = {"axis_name": "tp", "precision": "highest"} | _trial.options(op)
    x_spec, w_spec, y_spec = _trial.specs(op, "tp")
    f = jax.shard_map(
        lambda x, w: getattr(jflux, op)(x, w, **options),
        mesh=mesh, in_specs=(x_spec, w_spec), out_specs=y_spec,
    )  # fmt: skip
    y = np.asarray(jax.jit(f)(x, w))
    x64, w64 = x.astype(np.float64), w.astype(np.float64)
    testing.assert_close(y, x64 @ w64, np.abs(x64) @ np.abs(w64), dtype, 16 * ranks)
    return "ok"


# Whether a product and a collective are faster for so many rows in all, in whole tiles of columns.
_OPS: dict[str, Callable[[int, int], bool]] = {
    "all_gather_matmul": lambda m, _: _product.apart_is_faster("all_gather_matmul", m),
    "matmul_reduce_scatter": lambda m, _: _product.apart_is_faster("matmul_reduce_scatter", m),
    "matmul_all_to_all": lambda m, ranks: (
        not matmul_all_to_all.kernel_is_faster(m // ranks, _product.CUDA_TILE_ROWS, m // ranks)
    ),
}


def _fused(op: str, platform: str, ranks: int) -> str:
    """ "fused", and for how many rows, where it is not for others."""
    if platform != "cuda":
        return "fused"
    most = ranks << 16
    sizes = [ranks << i for i in range(17)]
    runs = []
    for slower, group in itertools.groupby(sizes, lambda m: _OPS[op](m, ranks)):
        those = list(group)
        if not slower:
            first, last = those[0], those[-1]
            runs.append(f"from {first} rows on" if last == most else f"for {first} to {last}")
    return f"fused {' and '.join(runs)}"


def _ops() -> Iterator[str]:
    name = _heap._default_platform()
    ranks = jax.device_count()
    for op in _OPS:
        for dtype in (jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64):
            if dtype == jnp.float64 and not jax.config.read("jax_enable_x64"):
                continue
            spec = jax.ShapeDtypeStruct((8, 8), dtype)
            if ranks == 1:
                why: str | None = "one device: a plain product"
            elif name not in ("cpu", "cuda"):
                why = f"no kernels for {name}"
            else:
                why = _product.kernel_takes(spec, spec, np.dtype(dtype), min(ranks, 8), name)
                why = why or (_heap._why_no_cuda() if name == "cuda" else None)
            path = f"reference ({why})" if why else _fused(op, name, ranks)
            try:
                # Other processes would have to take part in a trial.
                verdict = _try(op, dtype) if jax.process_count() == 1 else "not tried"
            except Exception as error:
                verdict = f"FAILED: {error}"
            yield f"  {op:22} {np.dtype(dtype).name:9} {path}: {verdict}"


# x of a rank is [ranks, 1000]. How an op is called, and what the ranks should have, from all x and
# all sums, both float64: [ranks, ...] of what differs, or what all have.
_COLLECTIVES: dict[str, tuple[dict[str, Any], Callable[[np.ndarray, np.ndarray], np.ndarray]]] = {
    "all_reduce": ({}, lambda x, total: np.broadcast_to(total, x.shape)),
    "all_gather": ({}, lambda x, total: np.broadcast_to(x, (len(x), *x.shape))),
    "reduce_scatter": ({}, lambda x, total: total),
    "all_to_all": ({"split_axis": 0, "concat_axis": 0}, lambda x, total: x.swapaxes(0, 1)),
}


def _try_collective(op: str, dtype: np.dtype) -> str:
    """Runs it on all devices: "ok", or what went wrong."""
    devices = jax.devices()[: _product.MAX_RANKS]
    ranks, mesh = len(devices), Mesh(np.array(devices), ("tp",))
    x = np.random.default_rng(0).standard_normal((ranks, ranks, 1000)).astype(dtype)
    options, expected = _COLLECTIVES[op]
    f = jax.shard_map(
        lambda x: getattr(jflux, op)(x[0], axis_name="tp", **options)[None],
        mesh=mesh, in_specs=P("tp"), out_specs=P("tp"), check_vma=False,
    )  # fmt: skip
    y, x64 = np.asarray(jax.jit(f)(x)), x.astype(np.float64)
    want, size = (expected(a, a.sum(0)) for a in (x64, np.abs(x64)))
    testing.assert_close(y, want, size, dtype, ranks)
    return "ok"


def _most_mib(op: str) -> int:
    """Up to which power of two of MiB an op's kernels are chosen."""
    if op != "all_reduce":
        return exchange.MOST_BYTES >> 20
    ranks = min(jax.device_count(), _product.MAX_RANKS)
    sizes = itertools.takewhile(
        lambda mib: _jflux.choose_all_reduce(ranks, mib << 20) >= 0, (1 << i for i in range(20))
    )
    return max(sizes)


def _collectives() -> Iterator[str]:
    name = _heap._default_platform()
    if jax.device_count() == 1 or name not in ("cpu", "cuda"):
        path = "reference (one device, or no kernels)"
    elif name == "cuda" and (why := _heap._why_no_cuda()):
        path = f"reference ({why})"
    else:
        path = ""
    for op in _COLLECTIVES:
        most = _most_mib(op)
        for dtype in (jnp.bfloat16, jnp.float16, jnp.float32):
            try:
                alone = jax.process_count() == 1
                verdict = _try_collective(op, np.dtype(dtype)) if alone else "not tried"
            except Exception as error:
                verdict = f"FAILED: {error}"
            which = path or f"kernels up to {most} MiB"
            yield f"  {op:22} {np.dtype(dtype).name:9} {which}: {verdict}"


def report() -> Iterator[str]:
    """The lines that the command prints."""
    yield from _versions()
    yield from _devices()
    yield from _heap_lines()
    yield "ops on these devices:"
    yield from _ops()
    yield from _collectives()
    if _heap.backend_in_use():
        taken = _heap.usage(_heap._default_platform())
        yield f"heap: the calls above took {taken / (1 << 20):.1f} MiB per device"


def main() -> int:
    jflux.config.update(always=True)  # tiny operands would take lax
    failed = False
    for line in report():
        print(line, flush=True)
        failed |= "FAILED" in line
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
