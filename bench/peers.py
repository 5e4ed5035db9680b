"""Other implementations of the ops, timed in the same rounds as jflux where they are installed.

P  Pallas's `all_gather_lhs_matmul` (JAX, Mosaic GPU), in the fastest of some configurations
T  PyTorch's `torch.ops.symm_mem.fused_all_gather_matmul` and `fused_matmul_reduce_scatter`, called
   from Python, one process for each GPU

Each is compared with the sequential op before it is timed.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jflux import reference
from jflux._tools import trials
from jflux._tools.trials import Trial

from .shapes import AG, RS, Shape

Run = Callable[[], None]


class Unavailable(Exception):
    """Why a peer cannot run here, or cannot take a shape."""


class Peer(Protocol):
    name: str

    def run_of(self, shape: Shape, iterations: int) -> Run:
        """What runs so many calls and waits for them; raises `Unavailable`."""

    def close(self) -> None: ...


class Pallas:
    """In this process, on all of its GPUs."""

    name = "P"

    def __init__(self, mesh: Mesh) -> None:
        if jax.process_count() > 1 or mesh.devices.size != jax.device_count():
            raise Unavailable("Pallas: needs one process that drives all GPUs of the mesh")
        try:
            from jax.experimental.pallas.ops.gpu import collective_matmul_mgpu as module
        except ImportError as e:
            raise Unavailable(f"Pallas: {e}") from e
        self.mesh, self.module = mesh, module

    def run_of(self, shape: Shape, iterations: int) -> Run:
        if shape.op != AG:
            raise Unavailable("Pallas: has no such op")
        trial = Trial(shape.spec)
        specs = trial.partition
        operands = trial.operands(shape.m, shape.n, shape.k, self.mesh, jnp.bfloat16)

        def program(f: Callable[..., Any]) -> Any:
            return trials.compiled(f, self.mesh, specs[:2], specs[2], *operands)

        want = program(lambda x, w: reference.all_gather_matmul(x, w, axis_name="tp"))(*operands)
        found, reasons = [], set()
        for config in self._configs():
            op = functools.partial(
                self.module.all_gather_lhs_matmul, axis_name="tp", config=config,
                dtype=jnp.bfloat16,
            )  # fmt: skip
            try:
                once = program(op)
            except (ValueError, NotImplementedError) as e:
                reasons.add(str(e).splitlines()[0])
                continue
            error = float(jnp.max(jnp.abs(once(*operands) - want)))
            if not error < 0.1:
                raise RuntimeError(f"Pallas at {shape}, {config}: off by {error}")
            found.append((_seconds(trials.run_of(once, *operands)), op))
        if not found:
            raise Unavailable(f"Pallas: {'; '.join(reasons)}")
        _, fastest = min(found, key=lambda one: one[0])
        return trials.run_of(program(trials.loop(fastest, iterations)), *operands)

    def _configs(self) -> list[Any]:
        dimension = self.module.MatmulDimension
        return [
            self.module.TuningConfig(
                tile_m=m, tile_n=n, tile_k=64, max_concurrent_steps=4,
                grid_minor_dim=dimension.M, grid_tile_width=8, wg_dimension=wg,
            )
            for m, n, wg in ((128, 128, dimension.N), (64, 256, dimension.M))
        ]  # fmt: skip

    def close(self) -> None:
        pass


def _seconds(run: Run) -> float:
    """The shortest of a few calls."""
    run()
    times = []
    for _ in range(5):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


class Torch:
    """One worker for each GPU."""

    name = "T"
    worker = (sys.executable, "-m", "bench.peer_torch")

    def __init__(self, mesh: Mesh) -> None:
        if jax.process_count() > 1:
            raise Unavailable("PyTorch: needs one process here, beside which it starts its own")
        if importlib.util.find_spec("torch") is None:
            raise Unavailable("PyTorch: not installed")
        world = mesh.devices.size
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        self.workers = [
            subprocess.Popen(
                [*self.worker, *map(str, (rank, world, port))],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                text=True, env=os.environ | {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"},
            )
            for rank in range(world)
        ]  # fmt: skip
        self._expect("ready", 120)

    def run_of(self, shape: Shape, iterations: int) -> Run:
        if not self.workers:
            raise Unavailable("PyTorch: its workers have ended")
        if shape.op not in (AG, RS):
            raise Unavailable("PyTorch: has no such op")
        command = {"op": shape.op, "m": shape.m, "n": shape.n, "k": shape.k}
        return self.runs(command, iterations)

    def runs(self, command: dict[str, Any], iterations: int) -> Run:
        """Of the call that the workers make of this command (bench/peer_torch.py)."""
        if not self.workers:
            raise Unavailable("PyTorch: its workers have ended")
        self._tell(command)
        self._expect("ready", 120)

        def run() -> None:
            self._tell({"calls": iterations, "name": command.get("name")})
            self._expect("done", 60)

        return run

    def _tell(self, command: dict[str, Any]) -> None:
        for worker in self.workers:
            assert worker.stdin is not None
            try:
                worker.stdin.write(json.dumps(command) + "\n")
                worker.stdin.flush()
            except BrokenPipeError as e:
                self.close()
                raise Unavailable("PyTorch: its worker ended") from e

    def _expect(self, answer: str, seconds: float) -> None:
        """From all workers. Without an answer they are of no use any more; with another one, which
        says what they cannot do, they are."""
        others = set()
        for worker in self.workers:
            assert worker.stdout is not None
            there, _, _ = select.select([worker.stdout], [], [], seconds)
            got = worker.stdout.readline().strip() if there else ""
            if not got:
                self.close()
                what = "its worker ended" if there else f"no answer in {seconds} s"
                raise Unavailable(f"PyTorch: {what}")
            others |= {got} - {answer}
        if others:
            raise Unavailable(f"PyTorch: {min(others)}")

    def close(self) -> None:
        for worker in self.workers:
            worker.kill()
            worker.wait()
        self.workers = []


PEERS: dict[str, Callable[[Mesh], Peer]] = {"pallas": Pallas, "torch": Torch}


P = TypeVar("P")


def start(names: Iterable[str], makers: Mapping[str, Callable[..., P]], *given: Any) -> list[P]:
    """Of the names that have a maker, those that can run here; says why others cannot."""
    found = []
    for name in names:
        try:
            found.append(makers[name](*given))
        except Unavailable as e:
            print(e, file=sys.stderr)
    return found
