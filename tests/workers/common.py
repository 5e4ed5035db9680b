"""Runs the worker programs of the tests, alone or several together, on virtual CPUs or GPUs."""

from __future__ import annotations

import argparse
import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

import jflux

HERE = pathlib.Path(__file__).resolve().parent


def xla_flags(devices: int) -> str:
    """Those of this process, and so many devices of the CPU: what comes last prevails."""
    return f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"


def environment(platform: str, devices: int) -> dict[str, str]:
    """For a process that has `devices` of the CPU's; a GPU process sees all and takes its own."""
    env = dict(os.environ)
    # The jflux of this process, installed or in a checkout.
    found = str(pathlib.Path(jflux.__file__).resolve().parents[1])
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [found, env.get("PYTHONPATH")]))
    # Host callbacks of GPU programs need the CPU platform too.
    env["JAX_PLATFORMS"] = {"cpu": "cpu", "gpu": "cuda,cpu"}[platform]
    env["XLA_FLAGS"] = xla_flags(devices)
    # Enough for small programs, beside the memory of this process and of others that run tests.
    env["XLA_PYTHON_CLIENT_MEM_FRACTION"] = ".1"
    return env


def run_alone(scenario: str, *, platform: str, devices: int, timeout: float = 120) -> str:
    """Output of ``fault_worker.py SCENARIO``, which must end by itself and well."""
    command = [sys.executable, str(HERE / "fault_worker.py"), scenario, str(devices)]
    process = subprocess.Popen(
        command, env=environment(platform, devices), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGABRT)  # it says where its threads are
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)
        process.kill()
        output, _ = process.communicate()
        raise AssertionError(f"not ended after {timeout} s; it had said:\n{output}") from None
    assert process.returncode == 0, f"ended with {process.returncode}:\n{output}"
    return output


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def leave_last(process: int) -> None:
    """A worker's last call. Process 0 serves the others' coordination, without which JAX ends them;
    so it stays until its input is closed, which is when all others have ended."""
    if process == 0:
        sys.stdin.read()


def expect_error(f: Callable[..., Any], *args: Any) -> None:
    """Calls f, and prints the error that it ends in, and when."""
    start = time.monotonic()
    try:
        jax.block_until_ready(f(*args))
        print("no error")
    except Exception as error:
        print("error:", str(error).replace("\n", " "))
    print(f"seconds: {time.monotonic() - start:.1f}", flush=True)


def join(args: argparse.Namespace) -> None:
    """Meets the other ranks of a worker that has one device."""
    if args.gpus == 0:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        f"127.0.0.1:{args.port}", args.ranks, args.rank,
        local_device_ids=[args.rank % args.gpus] if args.gpus else None,
    )  # fmt: skip


def run_together(
    scenario: str,
    *,
    platform: str,
    processes: int,
    devices: int = 1,
    timeout: float = 150,
    options: Sequence[str] = (),
    prefix: Sequence[str] = (),
    worker: str = "peer_worker.py",
) -> list[tuple[int, str]]:
    """(exit status, output) of each of so many runs of a worker at once.

    Args:
      options: more of its arguments.
      prefix: a command that runs it.
      worker: its file.
    """
    port = free_port()
    running = []
    for process in range(processes):
        command = [
            *prefix, sys.executable, str(HERE / worker), scenario, "--platform", platform,
            "--process", str(process), "--processes", str(processes),
            "--devices", str(devices), "--port", str(port), *options,
        ]  # fmt: skip
        running.append(
            subprocess.Popen(
                command,
                env=environment(platform, devices),
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        )
    end = time.monotonic() + timeout
    results = []
    try:
        for process in reversed(running):  # see leave_last
            output, _ = process.communicate(timeout=max(1, end - time.monotonic()))
            results.insert(0, (process.returncode, output))
    finally:
        for process in running:
            if process.poll() is None:
                process.send_signal(signal.SIGABRT)  # then it says where its threads are
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(5)
                process.kill()
                output, _ = process.communicate()
                print(f"killed after {timeout} s; it had said:\n{output}")
    return results
