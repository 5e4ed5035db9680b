"""Checks jflux.symm on GPUs, and times it; a table comes last:

python tests/symm_gpu.py [--times 20] [--seed 0] [--limit 540] [--skip shared,times]
    [--lines TEXT]

Every kernel of tests/symm_kernels.py and of examples/python_kernels against its reference, with
fresh inputs each time: poisoned workspaces, late ranks, second calls and graph replays
(jflux.symm.check); products, and what ranks compute that share the GPUs, against float64.
Kernels that write outside must be found. Waits that nobody satisfies must end at their deadline, in
processes of their own, and ranks that call with different shapes or types long before it. Each
section is a process; after a kernel that has failed, the rest of the section goes on in a new one.
Needs Triton, and at least two GPUs; "shared" and "differ" take one too.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "examples" / "python_kernels")]

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--times", type=int, default=20)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--limit", type=float, default=540, help="seconds; what is left over is named")
parser.add_argument("--skip", default="", help="sections, with commas")
parser.add_argument("--only", default="", help="sections, with commas")
parser.add_argument("--lines", default="", help="only lines whose name has this")
parser.add_argument("--worker", help=argparse.SUPPRESS)
parser.add_argument("--done", default="[]", help=argparse.SUPPRESS)
parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
parser.add_argument("--ranks", type=int, default=0, help=argparse.SUPPRESS)
parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
args = parser.parse_args()

os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # for the processes beside this one

import jax  # noqa: E402

if (args.worker or "").startswith(("shared-rank", "differ-rank")):
    jax.distributed.initialize(
        f"127.0.0.1:{args.port}",
        args.ranks,
        args.rank,
        local_device_ids=[args.rank % int(os.environ["SYMM_GPUS"])],
    )

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax import lax  # noqa: E402
from jax.sharding import Mesh  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import jflux  # noqa: E402

AXIS = "x"
TRY, ROW = "TRY\t", "ROW\t"
NEW_PROCESS = 3  # exit status: a kernel has failed, and this process's GPUs are of no use any more
DONE: list[str] = json.loads(args.done)
BEGUN = time.monotonic()


def struct(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def left() -> float:
    return args.limit - (time.monotonic() - BEGUN)


def check(f: Any, *structs: Any, **options: Any) -> str:
    report = jflux.symm.check(f, *structs, **options)
    assert report.kernels or jax.default_backend() != "gpu", "no kernel ran"
    return str(report)


def attempt(name: str, f: Any) -> None:
    """Runs one check, and prints its line of the table."""
    if name in DONE or args.lines not in name:
        return
    if left() < 15:
        print(f"{ROW}{name}\tLEFT OUT: no time", flush=True)
        return
    print(f"{TRY}{name}", flush=True)
    try:
        text = str(f())
    except Exception as error:
        traceback.print_exc()
        text = f"FAILED: {type(error).__name__}: {str(error)[:300]}"
    text = text.replace("\n", " ").replace("\t", " ")
    print(f"{ROW}{name}\t{text}", flush=True)
    if any(sign in text for sign in ("CUDA_ERROR", "jflux.symm.call(", "this process has failed")):
        if text.startswith("FAILED"):
            sys.stdout.flush()
            os._exit(NEW_PROCESS)


# ---- Values ------------------------------------------------------------------------------------


def check_kernels(mesh: Mesh) -> None:
    import symm_kernels as kernels

    size = kernels.BLOCK * kernels.PROGRAMS
    for name in kernels.NAMES:
        for dtype in (jnp.float32, jnp.bfloat16):

            def f(x: Any, name: str = name) -> Any:
                return kernels.call_right(name, x, AXIS)

            attempt(
                f"{name} {np.dtype(dtype).name}",
                lambda f=f, dtype=dtype: check(
                    f, struct(size, dtype=dtype), mesh=mesh, times=args.times, seed=args.seed
                ),
            )


def check_examples(mesh: Mesh) -> None:
    import all_gather_matmul
    import all_reduce
    import all_to_all
    import halo_exchange

    options = {"mesh": mesh, "seed": args.seed, "times": args.times}
    n = mesh.size
    for elements, dtype in ((4096, jnp.float16), (1024, jnp.bfloat16), (16384, jnp.float16)):
        attempt(
            f"all_reduce {elements} {np.dtype(dtype).name}",
            lambda e=elements, d=dtype: check(all_reduce.all_reduce, struct(e, dtype=d), **options),
        )
    for rows, columns in ((64, 1000), (9, 37), (200, 4096)):
        attempt(
            f"halo_exchange {rows} x {columns}",
            lambda r=rows, c=columns: check(halo_exchange.halo_mean, struct(r, c), **options),
        )
    for part in (100 * 300, 1, 12345, 1 << 20):
        attempt(
            f"all_to_all {part}",
            lambda p=part: check(
                all_to_all.all_to_all, struct(n, p, dtype=jnp.bfloat16), tolerance=0, **options
            ),
        )
    for tma in (True, False):
        for rows, k, columns in ((128, 256, 256), (256, 1024, 512), (1024, 4096, 4096)):
            attempt(
                f"all_gather_matmul {rows} x {k} x {columns}, {'TMA' if tma else 'pointers'}",
                lambda r=rows, k=k, c=columns, t=tma: check(
                    functools.partial(all_gather_matmul.all_gather_matmul, tma=t),
                    struct(r, k, dtype=jnp.float16),
                    struct(k, c, dtype=jnp.float16),
                    **options | {"times": 2, "tolerance": 2e-3, "steps": 2},
                ),
            )
    attempt("all_gather_matmul against float64", lambda: float64_matmul(mesh))


def float64_matmul(mesh: Mesh) -> str:
    import all_gather_matmul
    from running import on_devices

    rng = np.random.default_rng(args.seed)
    worst = 0.0
    for tma in (True, False):
        f = on_devices(mesh, functools.partial(all_gather_matmul.all_gather_matmul, tma=tma))
        for _ in range(3):
            x = rng.standard_normal((mesh.size, 256, 512)).astype(np.float16)
            w = rng.standard_normal((mesh.size, 512, 512)).astype(np.float16)
            for y in (f(x, w), f(x, w)):
                for rank in range(mesh.size):
                    a, b = x.reshape(-1, 512).astype(np.float64), w[rank].astype(np.float64)
                    scale = np.abs(a) @ np.abs(b)
                    allowed = jflux.testing.tolerance(jnp.float16, 512) * scale
                    got = np.asarray(y[rank], np.float64)
                    error = np.max(np.nan_to_num(np.abs(got - a @ b) / allowed, nan=np.inf))
                    worst = max(worst, float(error))
    assert worst <= 1, f"{worst} times what float16 sums may have"
    return f"12 products, the largest error is {worst:.2g} of what float16 sums may have"


def check_transforms(mesh: Mesh) -> None:
    import all_reduce
    import symm_kernels as kernels
    from running import on_devices

    size = kernels.BLOCK * kernels.PROGRAMS
    rng = np.random.default_rng(args.seed)

    def ring(x: Any) -> Any:
        return kernels.call_right("ring", x, AXIS)

    def draw(*shape: int) -> Any:
        return rng.standard_normal((mesh.size, *shape)).astype(np.float32)

    def compare(f: Any, *arrays: Any) -> str:
        got = jax.tree.leaves(on_devices(mesh, f)(*arrays))
        with jflux.config(fused=False):
            want = jax.tree.leaves(on_devices(mesh, f)(*arrays))
        for y, z in zip(got, want, strict=True):
            np.testing.assert_allclose(
                np.asarray(y, np.float64), np.asarray(z, np.float64), rtol=1e-2, atol=1e-2
            )
        return "as the reference"

    attempt("vmap", lambda: compare(jax.vmap(ring), draw(3, size)))
    attempt(
        "checkpoint",
        lambda: compare(jax.checkpoint(lambda x: ring(ring(x * 2) + 1)), draw(size)),
    )
    attempt(
        "gradients in a scan",
        lambda: compare(
            jax.grad(
                lambda x: jnp.sum(
                    lax.scan(
                        lambda c, _: (all_reduce.all_reduce(c) / mesh.size, None), x, length=5
                    )[0].astype(jnp.float32)
                )
            ),
            draw(4096).astype(np.float16),
        ),
    )
    attempt(
        "cond",
        lambda: compare(lambda x: lax.cond(True, ring, lambda x: ring(-x), x), draw(size)),
    )

    def beside() -> str:
        """Calls of several kernels and of jflux's ops, whose workspaces are shared, in a loop."""
        k = 256

        def step(c: Any, x: Any) -> Any:
            y = kernels.call_right("pull", x, AXIS)
            z = kernels.call_right("packets", y, AXIS)
            w = jnp.eye(k, dtype=jnp.bfloat16)
            rows = z[:512].reshape(2, k).astype(jnp.bfloat16)
            a = jflux.all_gather_matmul(rows, w, axis_name=AXIS)
            b = jflux.all_reduce(z.astype(jnp.bfloat16), axis_name=AXIS)
            return c + 1, (y, z, a, b, kernels.call_right("count", x, AXIS))

        return compare(lambda x: lax.scan(step, 0, x)[1], draw(40, size))

    attempt("beside other ops in a loop", beside)

    def replays() -> str:
        f = on_devices(mesh, lambda x: lax.scan(lambda c, x: (c, 2 * ring(x)), 0, x)[1])
        steps = 200
        x = draw(steps, size)
        jax.block_until_ready(f(x))
        before = jflux._native.lib.cuda_launches()
        got = np.asarray(f(x))
        launches = jflux._native.lib.cuda_launches() - before
        np.testing.assert_array_equal(got, 2 * np.roll(x, 1, 0))
        return f"{launches} launches by handlers for {steps * mesh.size} calls"

    attempt("replays", replays)

    def other_mesh(devices: Any) -> str:
        return check(ring, struct(size), mesh=Mesh(devices, AXIS), times=3, seed=args.seed)

    attempt("devices in another order", lambda: other_mesh(list(mesh.devices.flat)[::-1]))


def check_sources(mesh: Mesh) -> None:
    """Kernels in CUDA C++ that NVRTC compiles."""
    import cuda_source
    from running import on_devices

    rng = np.random.default_rng(args.seed)

    def values() -> str:
        f = on_devices(
            mesh, lambda x: lax.scan(lambda c, x: (c, cuda_source.scaled_shift(x, 1.5)), 0, x)[1]
        )
        for size in (1, 7, 1000, 12345, 1 << 20):
            for _ in range(max(2, args.times // 5)):
                x = rng.standard_normal((mesh.size, 10, size)).astype(np.float32)
                with jflux.testing.planted_faults(max_delay_us=500):
                    np.testing.assert_array_equal(f(x), np.roll(x, 1, 0) * np.float32(1.5))
        return "five sizes are right, in a scan, with late ranks"

    def broken() -> None:
        source = cuda_source.SOURCE.replace("my_pe(ctx)", "nobody(ctx)")
        call = jflux.custom_call(
            "scaled_shift",
            struct(4),
            axis_name=AXIS,
            data_bytes=16,
            num_signals=1,
            reference=cuda_source.reference,
            source=source,
        )
        on_devices(mesh, lambda x: call(x, n=4, scale=1.0))(jnp.zeros((mesh.size, 4)))

    attempt("a CUDA source", values)
    attempt("a source that does not compile", lambda: expect(ValueError, "nobody", broken))


# ---- What must fail ----------------------------------------------------------------------------


def expect(error: type[Exception], text: str, f: Any) -> str:
    try:
        f()
    except error as found:
        assert text in str(found), f"it said: {found}"
        return f"found: {str(found)[-160:]}"
    raise AssertionError(f"no {error.__name__}")


def check_faults(mesh: Mesh) -> None:
    import symm_kernels as kernels

    def outside(place: int) -> Any:
        def f(x: Any) -> Any:
            return kernels.call_outside(x, AXIS, place)

        return lambda: jflux.symm.check(f, struct(kernels.BLOCK), mesh=mesh, times=1)

    attempt(
        "a write after a buffer",
        lambda: expect(AssertionError, "after the end of 'first'", outside(kernels.BLOCK + 3)),
    )
    attempt(
        "a write before a buffer",
        lambda: expect(AssertionError, "before 'first'", outside(-5)),
    )
    attempt(
        "a signal that there is not",
        lambda: expect(
            AssertionError,
            "signal 1 was set",
            lambda: jflux.symm.check(
                lambda x: kernels.call_signal_outside(x, AXIS),
                struct(kernels.BLOCK),
                mesh=mesh,
                times=1,
            ),
        ),
    )
    attempt(
        "a grid that is not resident",
        lambda: expect(
            ValueError,
            "of which a GPU holds",
            lambda: jax.jit(
                jax.shard_map(
                    lambda x: kernels.call_copy(x, AXIS, grid=100_000, block=128),
                    mesh=mesh,
                    in_specs=P(AXIS),
                    out_specs=P(AXIS),
                )
            )(jnp.zeros(mesh.size * 100_000 * 128, jnp.float16)),
        ),
    )
    for way in ("signal", "count", "packets"):
        attempt(f"a wait for a {way} that nobody sends", functools.partial(stuck, way))


def stuck(way: str) -> str:
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, str(Path(__file__).resolve()), "--worker", f"stuck-{way}"],
        capture_output=True,
        text=True,
        timeout=120,
        env=dict(os.environ, XLA_PYTHON_CLIENT_MEM_FRACTION=".1"),
    )
    output = done.stdout + done.stderr
    lines = [line for line in output.splitlines() if "waited 2 s for rank" in line]
    assert lines and "jflux.symm.call(stuck_" in lines[0], output[-1500:]
    assert "NOT STUCK" not in output, output[-500:]
    return f"{time.monotonic() - begin:.0f} s: {lines[0][:110]}"


def stuck_worker(way: str) -> None:
    import symm_kernels as kernels

    jflux.init(deadline_seconds=2)
    mesh = Mesh(jax.devices()[:8], AXIS)
    f = jax.shard_map(
        lambda x: kernels.call_stuck(x, AXIS, way), mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS)
    )
    jax.block_until_ready(jax.jit(f)(jnp.ones(mesh.size * kernels.BLOCK, jnp.float32)))
    print("NOT STUCK")


# ---- Ranks in processes of their own -----------------------------------------------------------


def together(worker: str, ranks: int, gpus: int, seconds: float) -> list[str]:
    """What `ranks` processes of a worker say, which share so many GPUs. None of them is left."""
    from workers.common import environment, free_port

    env = environment("gpu", 1)
    env |= {
        "SYMM_GPUS": str(gpus),
        "XLA_PYTHON_CLIENT_MEM_FRACTION": f"{0.4 / -(-ranks // gpus):.3f}",
        "NCCL_NVLS_ENABLE": "0",
    }
    # Processes share the tuning of products, and wait for each other: by program.
    env["XLA_FLAGS"] += " --xla_gpu_shard_autotuning=false"
    script = [sys.executable, str(Path(__file__).resolve()), "--worker", worker]
    script += ["--ranks", str(ranks), "--port", str(free_port())]
    end = time.monotonic() + seconds
    with contextlib.ExitStack() as stack:
        # A pipe that is full would hold up a process that is read last.
        logs = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(ranks)]
        processes = []
        for rank, log in enumerate(logs):
            process = subprocess.Popen(
                [*script, "--rank", str(rank)], env=env, text=True,
                stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip
            stack.callback(process.wait)
            stack.callback(process.kill)  # before it is waited for; nothing, if it has ended
            processes.append(process)
        late = set()
        for rank in reversed(range(ranks)):  # see leave_last of workers/common.py
            try:
                processes[rank].communicate(timeout=max(1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                late.add(rank)
                processes[rank].kill()
                processes[rank].wait()
        for log in logs:
            log.seek(0)
        return [log.read() + "\nNOT ENDED" * (rank in late) for rank, log in enumerate(logs)]


def sharing(gpus: int, ranks: int = 0) -> tuple[int, int]:
    """(ranks, GPUs that they share): `ranks`, or two on each GPU; four at least, eight at most."""
    ranks = ranks or min(8, max(4, 2 * gpus))
    return ranks, max(1, min(gpus, ranks // 2))


def check_shared(gpus: int) -> None:
    ranks, gpus = sharing(gpus, args.ranks)

    def run() -> str:
        outputs = together("shared-rank", ranks, gpus, min(150, left() - 5))
        wrong = [o for o in outputs if "SHARED RANK IS RIGHT" not in o]
        assert not wrong, wrong[0][-1500:]
        return f"{ranks} ranks on {gpus} GPUs, {outputs[0].split('RIGHT: ')[1].strip()}"

    attempt("ranks that share GPUs", run)


def shared_worker() -> None:
    import all_reduce
    import halo_exchange
    import symm_kernels as kernels

    mesh = Mesh(jax.devices(), AXIS)
    size, n = kernels.BLOCK * kernels.PROGRAMS, mesh.size
    calls = 0

    def compare(f: Any, shape: tuple[int, ...], dtype: Any, want: Any, tolerance: float) -> None:
        """`want` (all ranks' x, float64) -> all ranks' y. Every process draws the same x."""
        nonlocal calls

        def body(x: Any) -> Any:
            return lax.scan(lambda c, x: (c, f(x[0])[None]), 0, x)[1]

        specs = P(None, AXIS)
        program = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=specs))
        for seed in range(4):
            rng = np.random.default_rng(seed)
            x = rng.standard_normal((5, n, *shape)).astype(dtype)
            wide = jax.sharding.NamedSharding(mesh, specs)
            y = program(jax.make_array_from_callback(x.shape, wide, lambda at, x=x: x[at]))
            (shard,) = y.addressable_shards
            exact = np.stack([want(step.astype(np.float64)) for step in x])[shard.index]
            np.testing.assert_allclose(
                np.asarray(shard.data, np.float64), exact, rtol=tolerance, atol=tolerance
            )
            calls += 5

    def total(x: Any) -> Any:
        return np.broadcast_to(x.sum(0), x.shape)

    def parts(x: Any) -> Any:
        summed = x.reshape(n, kernels.PROGRAMS, kernels.BLOCK).sum((0, 1))
        return np.broadcast_to(np.tile(summed, kernels.PROGRAMS), x.shape)

    def mean(x: Any) -> Any:
        flat = x.reshape(-1, x.shape[-1])
        return sum(np.roll(flat, i, 0) for i in range(-2, 3)).reshape(x.shape) / 5

    def call(name: str) -> Any:
        return lambda x: kernels.call_right(name, x, AXIS)

    compare(call("ring"), (size,), np.float32, lambda x: np.roll(x, 1, 0), 0)
    compare(call("pull"), (size,), np.float32, total, 1e-5)
    compare(call("count"), (size,), np.float32, parts, 1e-5)
    compare(call("root"), (size,), np.float32, lambda x: np.broadcast_to(x[1], x.shape), 0)
    compare(all_reduce.all_reduce, (4096,), np.float16, total, 4e-3)
    compare(halo_exchange.halo_mean, (64, 1000), np.float32, mean, 1e-5)
    print(f"SHARED RANK IS RIGHT: {calls} calls equal float64", flush=True)


# ---- Ranks that differ -------------------------------------------------------------------------

#: Of waits, and in which ranks that differ must be told, in seconds.
DIFFER_DEADLINE, TOLD_WITHIN = 60, 10
#: Name -> a kernel, and rank 1's x: its elements, in those of rank 0's, and its type. Both ranks'
#: calls take a workspace of one size: else they would meet in none, and end at the deadline.
DIFFERENT = {
    "shapes": ("ring", 2, jnp.float32),
    "types": ("ring", 1, jnp.bfloat16),
    "shapes-of-packets": ("packets", 2, jnp.float32),
}
ENDED = "ENDED\t"


def check_differ(gpus: int) -> None:
    def run(way: str) -> str:
        outputs = together(f"differ-rank-{way}", 2, gpus, min(120, left() - 5))
        return told(outputs, f"{DIFFERENT[way][0]}_kernel")

    for way in DIFFERENT:
        attempt(f"ranks with different {way}, on {gpus} GPUs", functools.partial(run, way))


def told(outputs: list[str], kernel: str) -> str:
    """What two ranks were told that call a kernel with different operands.

    Raises:
      AssertionError: one of them was told something else, or not at once.
    """
    seconds, messages = [], []
    for rank, output in enumerate(outputs):
        ended = re.search(rf"^{ENDED}([\d.]+)$", output, re.MULTILINE)
        assert ended, f"rank {rank} has not ended: {output[-1500:]}"
        seconds.append(float(ended[1]))
        assert seconds[-1] < TOLD_WITHIN, f"rank {rank} ended after {ended[1]} s: {output[-1500:]}"
        message = re.search(
            rf"jflux\.symm\.call\({kernel}\): rank {rank} expects call (\d+) "
            rf"with signature (\w+), but rank {1 - rank} sent call \1 with signature (?!\2)(\w+) .*"
            "The ranks run different calls",
            output,
        )
        assert message, f"rank {rank} was told: {output[-1500:]}"
        messages.append(message)
    (_, own, other), (_, *others) = (message.groups() for message in messages)
    assert others == [other, own], f"rank 0 has {own} and {other}, rank 1 {others}"
    return f"{max(seconds):.1f} s: {messages[0][0]}"


def differ_worker(way: str) -> None:
    """A call of equal operands, which is right, and then one of operands that differ."""
    import symm_kernels as kernels
    from jax._src import distributed
    from workers.common import leave_last

    jflux.init(deadline_seconds=DIFFER_DEADLINE)
    jflux.config.update(strict=True)
    mesh = Mesh(jax.devices(), AXIS)
    sharding = jax.sharding.NamedSharding(mesh, P(AXIS))
    name, *other = DIFFERENT[way]

    def call(x: Any) -> Any:
        return kernels.call_right(name, x, AXIS)

    f = jax.jit(jax.shard_map(call, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS)))

    def ones(times: int, dtype: Any) -> Any:
        x = np.ones(mesh.size * times * kernels.BLOCK * kernels.PROGRAMS, dtype)
        return jax.make_array_from_callback(x.shape, sharding, lambda at: x[at])

    equal, different = ones(1, np.float32), ones(*(other if args.rank else (1, np.float32)))
    programs = [f.lower(x).compile() for x in (equal, different)]
    distributed.global_state.client.wait_at_barrier("compiled", 60_000)
    (shard,) = programs[0](equal).addressable_shards
    assert (np.asarray(shard.data)[:-1] == 1).all()  # the last packet is masked out
    begin = time.monotonic()
    try:
        jax.block_until_ready(programs[1](different))
        print("NOT TOLD")
    except jax.errors.JaxRuntimeError as error:
        print(error)
        print(f"{ENDED}{time.monotonic() - begin:.1f}", flush=True)
    leave_last(args.rank)
    sys.stdout.flush()
    os._exit(0)  # at once: the GPU is of no use any more


# ---- Times -------------------------------------------------------------------------------------


def check_times(mesh: Mesh) -> None:
    import all_gather_matmul
    import all_reduce
    import all_to_all
    import halo_exchange
    import symm_kernels as kernels
    from running import microseconds

    rng = np.random.default_rng(args.seed)

    def arrays(*structs: Any) -> list[Any]:
        return [
            jnp.asarray(rng.standard_normal((mesh.size, *s.shape)) * 0.1, s.dtype) for s in structs
        ]

    def measure(name: str, f: Any, *structs: Any) -> None:
        attempt(f"us: {name}", lambda: f"{microseconds(mesh, f, arrays(*structs)):.2f}")

    small = struct(4096, dtype=jnp.float16)
    measure("all_reduce 8 KB, Triton", all_reduce.all_reduce, small)
    measure("all_reduce 8 KB, jflux", lambda x: jflux.all_reduce(x, axis_name=AXIS), small)
    measure("all_reduce 8 KB, lax", lambda x: lax.psum(x, AXIS), small)
    measure("copy 8 KB, symm.call", lambda x: kernels.call_copy(x, AXIS), small)
    attempt("us: copy 8 KB, bare Triton in a graph", bare_copy)

    x, w = struct(1024, 4096, dtype=jnp.float16), struct(4096, 4096, dtype=jnp.float16)
    ways: list[tuple[str, dict[str, Any]]] = [
        ("TMA", {}),
        ("TMA, 3 stages", {"num_stages": 3}),
        ("pointers", {"tma": False}),
        ("pointers, 3 stages", {"tma": False, "num_stages": 3}),
    ]
    if mesh.size == 2:
        ways.append(("TMA, 2 senders", {"senders": 2}))
    for name, options in ways:
        measure(
            f"all_gather_matmul 1024 x 4096 x 4096, Triton, {name}",
            functools.partial(all_gather_matmul.all_gather_matmul, **options),
            x,
            w,
        )
    measure(
        "all_gather_matmul, jflux",
        lambda x, w: jflux.all_gather_matmul(x, w, axis_name=AXIS),
        x,
        w,
    )
    measure(
        "all_gather_matmul, lax",
        lambda x, w: all_gather_matmul.reference(x, w, axis_name=AXIS),
        x,
        w,
    )
    attempt("us: all_gather_matmul, Pallas (bfloat16)", lambda: pallas(mesh))
    both = struct(mesh.size * 1024, 4096, dtype=jnp.float16)
    measure("the product alone, XLA", lambda x, w: x @ w, both, w)
    stencil = struct(64, 1000)
    measure("halo_exchange 64 x 1000, Triton", halo_exchange.halo_mean, stencil)
    measure(
        "halo_exchange 64 x 1000, lax",
        lambda x: halo_exchange.reference(x, axis_name=AXIS, REACH=2),
        stencil,
    )
    rows = struct(mesh.size, 256, 4096, dtype=jnp.bfloat16)
    measure("all_to_all 2 MB a part, Triton", all_to_all.all_to_all, rows)
    measure("all_to_all 2 MB a part, lax", lambda x: all_to_all.reference(x, axis_name=AXIS), rows)


def pallas(mesh: Mesh, rows: int = 1024, k: int = 4096, columns: int = 4096) -> str:
    """The same product by JAX's own example for Mosaic GPU, with the faster of its configurations:
    microseconds, as `running.microseconds` takes them, or why there are none."""
    sys.path.append(str(HERE.parent))
    from bench import peers, shapes

    shape = shapes.Shape(shapes.AG, mesh.size * rows, mesh.size * columns, k)

    def seconds(calls: int) -> float:
        run = peer.run_of(shape, calls)
        times = []
        for _ in range(20):
            begin = time.perf_counter()
            run()
            times.append(time.perf_counter() - begin)
        return min(times)

    try:
        peer = peers.Pallas(Mesh(mesh.devices, "tp"))
        return f"{(seconds(200) - seconds(100)) / 100 * 1e6:.2f}"
    except peers.Unavailable as why:
        return f"not timed: {why}"


BARE = """
import time, torch, triton, triton.language as tl
@triton.jit
def copy(x, y, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at))
x = torch.randn(4096, device='cuda', dtype=torch.float16); y = torch.empty_like(x)
stream = torch.cuda.Stream()
with torch.cuda.stream(stream):
    copy[(4,)](x, y, BLOCK=1024, num_warps=4)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(500): copy[(4,)](x, y, BLOCK=1024, num_warps=4)
    graph.replay(); torch.cuda.synchronize()
    times = []
    for _ in range(10):
        begin = time.perf_counter(); graph.replay(); torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
print(f'{min(times) / 500 * 1e6:.2f}')
"""


def bare_copy() -> str:
    done = subprocess.run(
        [sys.executable, "-c", BARE_FILE_RUNNER, BARE], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-800:]
    return done.stdout.strip()


# Triton reads a kernel's source from its file.
BARE_FILE_RUNNER = """
import pathlib, runpy, sys, tempfile
with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder) / "bare.py"
    path.write_text(sys.argv[1])
    runpy.run_path(str(path))
"""


SECTIONS = {
    "kernels": check_kernels,
    "faults": check_faults,
    "transforms": check_transforms,
    "sources": check_sources,
    "times": check_times,
    "examples": check_examples,
    "shared": lambda mesh: check_shared(mesh.size),
    "differ": lambda mesh: check_differ(min(2, mesh.size)),
}


def worker(name: str) -> None:
    if name == "shared-rank":
        shared_worker()
    elif name.startswith("differ-rank-"):
        differ_worker(name.removeprefix("differ-rank-"))
    elif name.startswith("stuck-"):
        stuck_worker(name.removeprefix("stuck-"))
    else:
        if jax.default_backend() == "gpu":
            jflux.init(deadline_seconds=20)
        SECTIONS[name](Mesh(jax.devices()[:8], AXIS))


def run_section(name: str) -> list[tuple[str, str]]:
    """The lines of a section."""
    rows: list[tuple[str, str]] = []
    for _ in range(12):
        if left() < 20:
            rows.append((name, "LEFT OUT: no time"))
            break
        done = json.dumps([row for row, _ in rows])
        command = [sys.executable, str(Path(__file__).resolve()), "--worker", name]
        command += ["--done", done, "--times", str(args.times), "--seed", str(args.seed)]
        command += ["--limit", f"{left() - 5:.0f}", "--ranks", str(args.ranks)]
        command += ["--lines", args.lines]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        watch = threading.Timer(left(), process.kill)
        watch.start()
        assert process.stdout is not None
        tried = f"{name}, process"
        for line in process.stdout:
            if line.startswith(TRY):
                tried = line.removeprefix(TRY).rstrip("\n")
                continue
            if line.startswith(ROW):
                row, text = line.removeprefix(ROW).rstrip("\n").split("\t", 1)
                rows.append((row, text))
                line = f"[{time.monotonic() - BEGUN:4.0f} s] {name}: {row}: {text}\n"
            print(line, end="", flush=True)
        status = process.wait()
        watch.cancel()
        if status == 0:
            break
        if status != NEW_PROCESS:
            rows.append((tried, f"FAILED: the process ended with {status}"))
        if tried == f"{name}, process":
            break
    return rows


def main() -> int:
    if args.worker is not None:
        worker(args.worker)
        return 0
    chosen = [s for s in args.only.split(",") if s] or list(SECTIONS)
    rows = []
    for name in chosen:
        if name not in args.skip.split(","):
            rows += run_section(name)
    if not rows:
        parser.error(f"no line of {', '.join(chosen)} has {args.lines!r} in its name")
    width = max(len(name) for name, _ in rows)
    print(f"\nseed {args.seed}, {args.times} times, {time.monotonic() - BEGUN:.0f} s")
    for name, text in rows:
        print(f"{name:{width}}  {text[:150]}")
    failed = [name for name, text in rows if text.startswith(("FAILED", "LEFT OUT"))]
    print(
        f"{len(rows) - len(failed)} of {len(rows)} lines are right; not right: {failed or 'none'}"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
