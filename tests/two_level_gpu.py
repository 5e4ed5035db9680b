"""Two levels on the GPUs of one host, which are told to be nodes: python tests/two_level_gpu.py

    --nodes 2           equally many GPUs each: with two GPUs a node has one, and XLA multiplies
    --trace FOLDER      takes profiles, in a folder that exists; without it there are none

Values of all ops against float64; then, for large products, what the compiled program's schedule
has between the start and the end of each transfer, how long transfers and products overlap in a
profile, and the time beside the reference's. Between these nodes is NVLink, or what NCCL is told to
use: the figures say whether things overlap, and not how fast a network is. Ends with status 1 if a
value is wrong, or if an op's transfers have no product beside them.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import glob
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # no NVLink multicast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jflux
from jflux import _config, testing
from jflux._call.plans import Path
from jflux._ops._spec import collectives, products

TP = "tp"


def check_values(mesh: Mesh) -> bool:
    """Small calls of every op, in one and two chunks, and their gradients' ops by themselves."""
    right, ranks = True, mesh.size
    rng = np.random.default_rng(0)
    for spec in products():
        for way in spec.ways:
            x_spec, w_spec, y_spec = spec.partition(TP, **way)
            for chunks, (m, n, k) in ((1, (128, 64, 32)), (2, (512, 264, 136))):
                m, n, k = m * ranks, n * ranks, k * ranks
                x, w = (rng.standard_normal(s).astype(jnp.bfloat16) for s in ((m, k), (k, n)))
                f = jax.shard_map(
                    functools.partial(spec.function, axis_name=TP, **way), mesh=mesh,
                    in_specs=(x_spec, w_spec), out_specs=y_spec,
                )  # fmt: skip
                with _config.override(node_chunks=chunks):
                    y = jax.jit(lambda x, w, f=f: f(x, w))(x, w)
                x64, w64 = x.astype(np.float64), w.astype(np.float64)
                error = np.abs(np.asarray(y, np.float64) - x64 @ w64)
                bound = testing.tolerance(jnp.bfloat16, k) * (abs(x64) @ abs(w64))
                right &= told(
                    f"{spec.name} {way or ''} {chunks} chunks", bool((error <= bound).all())
                )
    x = rng.integers(-8, 9, (ranks, 4 * ranks, 64)).astype(jnp.bfloat16)  # sums are exact
    for spec in collectives():
        if spec.name == "ragged_all_to_all":  # it has no two-level form
            continue
        for way in spec.ways:
            f = functools.partial(spec.on, axis_name=TP, **way)
            g = functools.partial(spec.reference, axis_name=TP, **way)
            got, want = (
                np.asarray(
                    jax.jit(
                        jax.shard_map(
                            lambda x, op=op: op(x[0])[None], mesh=mesh, in_specs=P(TP),
                            out_specs=P(TP), check_vma=False,
                        )
                    )(x)
                )
                for op in (f, g)
            )  # fmt: skip
            right &= told(f"{spec.name} {way or ''}", got.tobytes() == want.tobytes())
    return right


def told(what: str, right: bool) -> bool:
    print(f"{'right' if right else 'WRONG'}  {what}", flush=True)
    return right


# ---- The schedule --------------------------------------------------------------------------------


def scheduled(text: str) -> Iterator[str]:
    """The instructions of a scheduled program in their order, those of CUDA graphs too, and of
    kernels that XLA keeps together with the slices that they read."""
    bodies: dict[str, list[str]] = {}
    entry: list[str] = []
    for header, body in re.findall(r"^(\S[^\n]*) \{\n(.*?)^\}", text, re.M | re.S):
        name = header.removeprefix("ENTRY ").split()[0]
        bodies[name] = body.splitlines()
        if header.startswith("ENTRY"):
            entry = bodies[name]

    def walk(lines: list[str]) -> Iterator[str]:
        for line in lines:
            called = re.search(r"\b(?:call\(.*to_apply|kind=kCustom, calls)=(%?[\w.-]+)", line)
            if called and called[1] in bodies:
                yield from walk(bodies[called[1]])
            else:
                yield line

    yield from walk(entry)


def overlapped(text: str) -> list[tuple[str, int]]:
    """Each transfer between nodes, and how many products lie between its start and its end."""
    under_way: dict[str, int] = {}
    found = []
    for line in scheduled(text):
        name = re.match(r"\s*(?:ROOT )?(%?[\w.-]+) = ", line)
        if name is None:
            continue
        if re.search(r"\b(collective-permute|all-gather|all-to-all|async)-start\(", line):
            under_way[name[1]] = 0
        elif done := re.search(r"-done\((?:[^%]*)(%?[\w.-]+)", line):
            if done[1] in under_way:
                found.append((done[1], under_way.pop(done[1])))
        elif re.search(r'custom_call_target="(jflux_\w*matmul|__cublas)|gemm|\bdot\(', line):
            under_way = {start: count + 1 for start, count in under_way.items()}
    return found


# ---- A profile -----------------------------------------------------------------------------------


def seconds_of_both(folder: str) -> list[tuple[str, float, float, float]]:
    """(GPU, seconds of NCCL's kernels, of products, of both at once) of a profile."""
    from jax.profiler import ProfileData

    found = []
    for path in glob.glob(f"{folder}/**/*.xplane.pb", recursive=True):
        for plane in ProfileData.from_file(path).planes:
            if not plane.name.startswith("/device:GPU"):
                continue
            spans: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
            for line in plane.lines:
                if not line.name.startswith("Stream"):
                    continue
                for event in line.events:
                    is_nccl = "nccl" in event.name.lower()
                    if is_nccl or re.search(r"gemm|jflux|cutlass|nvjet|Gemm", event.name):
                        spans[is_nccl].append((event.start_ns, event.start_ns + event.duration_ns))
            both = sum(
                max(0.0, min(a[1], b[1]) - max(a[0], b[0]))
                for a in spans[True]
                for b in spans[False]
            )
            sums = [sum(end - start for start, end in spans[kind]) for kind in (True, False)]
            found.append((plane.name, sums[0] / 1e9, sums[1] / 1e9, both / 1e9))
    return found


# ---- Large products ------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Large:
    """A product, and m, n and k of all ranks."""

    op: str
    m: int
    n: int
    k: int


LARGE = (
    Large("all_gather_matmul", 8192, 8192, 8192),
    Large("matmul_reduce_scatter", 8192, 8192, 8192),
    Large("matmul_all_reduce", 8192, 8192, 8192),
    Large("matmul_all_to_all", 8192, 12288, 4096),
    Large("all_to_all_matmul", 8192, 8192, 8192),
)


def milliseconds(f: Callable[..., Any], *args: Any, calls: int = 20) -> float:
    jax.block_until_ready(f(*args))
    start = time.perf_counter()
    for _ in range(calls):
        y = f(*args)
    jax.block_until_ready(y)
    return (time.perf_counter() - start) / calls * 1e3


def run_large(mesh: Mesh, call: Large, scale: int, trace: str | None) -> bool:
    spec = next(s for s in products() if s.name == call.op)
    x_spec, w_spec, y_spec = spec.partition(TP, **spec.ways[0])
    shapes = (call.m // scale, call.k // scale), (call.k // scale, call.n // scale)
    x, w = (
        jax.device_put(
            np.random.default_rng(i).standard_normal(shape).astype(jnp.bfloat16),
            NamedSharding(mesh, s),
        )
        for i, (shape, s) in enumerate(zip(shapes, (x_spec, w_spec), strict=True))
    )

    def compiled(op: Callable[..., Any]) -> Any:
        f = jax.shard_map(
            functools.partial(op, axis_name=TP, **spec.ways[0]), mesh=mesh,
            in_specs=(x_spec, w_spec), out_specs=y_spec,
        )  # fmt: skip
        return jax.jit(f).lower(x, w).compile()

    some_overlap = True
    for chunks in (1, 2, 4):
        with _config.override(node_chunks=chunks):
            two = compiled(spec.function)
        found = overlapped(two.as_text())
        beside = [count for _, count in found]
        some_overlap &= any(beside) or chunks == 1
        line = f"{call.op} {chunks} chunks: {milliseconds(two, x, w):.3f} ms"
        line += f", reference {milliseconds(compiled(spec.reference), x, w):.3f} ms"
        print(f"{line}; products beside each of {len(found)} transfers: {beside}", flush=True)
        if trace:
            with tempfile.TemporaryDirectory(dir=trace, prefix=f"{call.op}-{chunks}-") as folder:
                with jax.profiler.trace(folder):
                    for _ in range(5):
                        y = two(x, w)
                    jax.block_until_ready(y)
                for gpu, nccl, product, both in seconds_of_both(folder):
                    print(
                        f"  {gpu}: NCCL {nccl * 1e3:.2f} ms, products {product * 1e3:.2f} ms, "
                        f"both at once {both * 1e3:.2f} ms"
                    )
    return some_overlap


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--trace", metavar="FOLDER")
    parser.add_argument("--scale", type=int, default=1, help="divides m, n and k of large products")
    args = parser.parse_args()
    devices = jax.devices()
    local = len(devices) // args.nodes
    devices = devices[: args.nodes * local]
    names = [f"node {i // local}" for i in range(len(devices))]
    names += ["rest"] * (len(jax.devices()) - len(names))
    jflux.init(node=names)
    jflux.config.update(always=True)
    mesh = Mesh(np.array(devices), (TP,))
    print(f"{args.nodes} nodes of {local} x {devices[0].device_kind}, {jax.__version__=}")
    x, w = (jax.ShapeDtypeStruct((64 * len(devices),) * 2, jnp.bfloat16) for _ in range(2))
    f = jax.shard_map(
        functools.partial(jflux.all_gather_matmul, axis_name=TP), mesh=mesh,
        in_specs=(P(TP), P(None, TP)), out_specs=P(None, TP),
    )  # fmt: skip
    call = jflux.explain(f, x, w)[0]
    if call.plan.path != Path.TWO_LEVEL:
        print(f"not a two-level call:\n{call}")
        return 1
    right = check_values(mesh)
    hides = {call.op: run_large(mesh, call, args.scale, args.trace) for call in LARGE}
    # CPUs have no asynchronous transfers.
    alone = [op for op, some in hides.items() if not some and jax.default_backend() != "cpu"]
    print("values right" if right else "values NOT RIGHT")
    if alone:
        print(f"no product beside the transfers, in 2 or in 4 chunks, of {', '.join(alone)}")
    return 0 if right and not alone else 1


if __name__ == "__main__":
    sys.exit(main())
