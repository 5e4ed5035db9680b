"""What a run has done, as JSON that can be attached to a bug."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import platform
import sys
from collections import Counter
from typing import Any

import jax
import jaxlib

import jflux

from .. import _heap, _native


def environment() -> dict[str, Any]:
    """Versions, devices and links."""
    devices = jax.devices()
    name = _heap.default_platform()
    variables = ("XLA_FLAGS", "JAX_PLATFORMS", "CUDA_VISIBLE_DEVICES", "CUDA_MODULE_LOADING")
    return {
        "jflux": jflux.__version__,
        "cuda_kernels": bool(_native.lib.built_with_cuda()),
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "backend": getattr(devices[0].client, "platform_version", ""),
        "devices": [[d.id, d.device_kind, d.process_index] for d in devices],
        "processes": jax.process_count(),
        "heap": {
            "backend": _heap.backend_in_use(),
            "bytes_per_device": _heap.heap_bytes(name) if _heap.backend_in_use() else 0,
            "deadline_seconds": _heap.deadline_seconds(),
        },
        "nodes": {str(d): n for d, n in _heap.node_of(name).items()},
        "links": [
            dict(zip(("device", "peer", "push_gbps", "pull_gbps", "flag_us"), link, strict=True))
            for link in _heap.links(name)
        ],
        "variables": {name: os.environ[name] for name in variables if name in os.environ},
    }


@dataclasses.dataclass
class Report:
    """What a run has done so far.

    Attributes:
      arguments: of the command.
      calls: by op, that were right.
      failure: the first one; None: there was none.
      running: the programs of the batch that is under way; empty when the run has ended.
    """

    arguments: dict[str, Any]
    environment: dict[str, Any] = dataclasses.field(default_factory=environment)
    seconds: float = 0.0
    batches: int = 0
    programs: int = 0
    calls: Counter[str] = dataclasses.field(default_factory=Counter)
    failure: dict[str, Any] | None = None
    running: list[str] = dataclasses.field(default_factory=list)

    def write(self, path: pathlib.Path | None) -> None:
        """Writes it, in one step. It is written before each batch too, so that a run that was
        killed leaves what it was doing."""
        if path is None:
            return
        text = json.dumps({**dataclasses.asdict(self), "calls": dict(self.calls)}, indent=1)
        beside = path.with_name(f"{path.name}.{os.getpid()}")
        beside.write_text(text + "\n")
        os.replace(beside, path)

    def summary(self) -> str:
        """One line."""
        kinds = Counter(kind for _, kind, _ in self.environment["devices"])
        devices = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
        counts = ", ".join(f"{count} {op}" for op, count in sorted(self.calls.items()))
        return (
            f"{sum(self.calls.values())} calls right ({counts}) in {self.programs} programs, on "
            f"{devices}, {self.environment['processes']} process(es): {self.seconds:.0f} s "
            f"(seed {self.arguments['seed']})"
        )


def repeat(arguments: dict[str, Any], batch: int) -> str:
    """The command that makes one batch again."""
    options = ("seed", "in_flight", "most_calls", "max_delay_us")
    said = " ".join(f"--{name.replace('_', '-')} {arguments[name]}" for name in options)
    return f"{os.path.basename(sys.executable)} -m jflux.stress {said} --batch {batch}"
