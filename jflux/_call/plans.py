"""Which path a call takes: decided once, when it is lowered, as plain data.

A call of an op has a :class:`Plan`, made by a pure function of the call, the :class:`Machine` and
what was measured for the call. The plan's numbers travel to the handler as FFI attributes; nothing
after it decides again. :func:`jflux.explain` prints plans.
"""

from __future__ import annotations

import dataclasses
import enum
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from .. import _config, _heap, _native
from .._ranks import meshes
from .._ranks.node_levels import Levels
from . import gpu_code

#: The operands of a call, or their types, in order.
Arrays = Sequence[Any]


class Path(enum.StrEnum):
    """How a call runs: one kernel of jflux's; XLA's product and a collective; XLA's collectives
    between nodes and jflux's ops inside them; or plain `lax`."""

    FUSED = "fused"
    DECOMPOSED = "decomposed"
    TWO_LEVEL = "two-level"
    REFERENCE = "reference"


@dataclasses.dataclass(frozen=True)
class Plan:
    """What one call does.

    Attributes:
      path: how it runs.
      reason: why, in words.
      config: the kernel's configuration, by the names of the native plan (tile_n, cluster_m,
        group_m, splits, and portable for that main loop; algorithm; chunked). Of two levels: nodes,
        ranks on each, and chunks. Empty for other paths, and for products on CPUs.
      senders: store warps or send warps that send to peers at a time; 0: all.
      workspace_bytes: of the symmetric heap, on each rank.
      key: by which tuning tables know the call; None for other ops.
      unsupported: no kernel takes the call, which an op's user may not expect: it is logged, and an
        error in strict mode.
      levels: of two levels: how the ranks lie on nodes.
    """

    path: Path
    reason: str
    config: Mapping[str, int] = dataclasses.field(default_factory=dict)
    senders: int = 0
    workspace_bytes: int = 0
    key: Any = None
    unsupported: bool = False
    levels: Levels | None = None

    @property
    def choice(self) -> np.ndarray:
        """The configuration of a product's kernel, as its handler takes it."""
        names = ("tile_n", "cluster_m", "group_m", "splits")
        last = ("portable",) if "portable" in self.config else ()
        return np.array([self.config.get(name, 0) for name in (*names, *last)], np.int64)


def reference(reason: str) -> Plan:
    """`lax` runs the call, which is as fast, or has no need of a kernel."""
    return Plan(Path.REFERENCE, reason)


def unsupported(reason: str) -> Plan:
    """`lax` runs the call, since no kernel takes it."""
    return Plan(Path.REFERENCE, reason, unsupported=True)


#: Why calls on other platforms take the reference.
NO_KERNELS = "jflux has kernels for CPUs and CUDA GPUs only"


def why_symbolic(arrays: Arrays) -> str | None:
    """Why kernels do not take arrays of these shapes, or None: `jax.export` may leave a dimension
    open, and a kernel's configuration and workspace go by numbers."""
    for array in arrays:
        for size in array.shape:
            if not isinstance(size, int):
                return f"a dimension is symbolic ({size}), and kernels are planned for numbers"
    return None


def why_unchecked(checked_on_gpus: bool) -> str | None:
    """Why GPUs do not take a kernel of their own, or None: it has not been compared with
    float64 there, or may be slower, and ``jflux.config.unchecked_kernels`` does not ask for it."""
    if checked_on_gpus or _config.config.unchecked_kernels:
        return None
    return (
        "its GPU kernel has not passed all checks on GPUs; "
        "jflux.config(unchecked_kernels=True) takes it"
    )


def decomposed(reason: str) -> Plan:
    """XLA's product and a collective run the call."""
    return Plan(Path.DECOMPOSED, reason)


def fused(reason: str, native: Mapping[str, int], key: Any = None) -> Plan:
    """A kernel runs the call as the native plan says."""
    others = ("senders", "workspace_bytes", "fits_norm")
    return Plan(
        Path.FUSED,
        reason,
        config={name: value for name, value in native.items() if name not in others},
        senders=native.get("senders", 0),
        workspace_bytes=native["workspace_bytes"],
        key=key,
    )


def in_portable_code(plan: Plan, arch: int, no_record: str) -> Plan:
    """A plan whose reason says so where a kernel runs portable code."""
    by = gpu_code.by_whose_leave(arch, no_record) if plan.path == Path.FUSED else ""
    return dataclasses.replace(plan, reason=plan.reason + by) if by else plan


#: How a reason ends that is a want of room.
MORE_HEAP = "jflux.init(heap_bytes=...) gives it more"

#: What an NVLink of an H200 carries in copies as long as the probe's, in 1e9 bytes a second, and
#: what such a GPU multiplies in a long kernel, in 1e12 operations a second: of the GPUs that the
#: thresholds were measured on.
MEASURED_LINK_GBPS = 320.0
MEASURED_TFLOPS = 670.0
#: These GPUs, all of whose links carried three quarters of that and more.
MEASURED_GPUS = ("NVIDIA H100 80GB HBM3", "NVIDIA H200")
#: What a collective in chunks gets out of a link, of what the probe does.
CHUNKS_OF_LINK = 290 / 320


@dataclasses.dataclass(frozen=True)
class Machine:
    """The numbers of one device and its links that plans depend on.

    Attributes:
      platform: "cpu" or "cuda".
      sm_count: multiprocessors; 0 on CPUs.
      link_gbps: what the slowest link between two devices carries, as the heap's probe measured it,
        in 1e9 bytes a second; 0 where it is not known.
      heap_bytes: of the symmetric heap, on each device.
      device_kind: the GPU's name, by which tuning tables are found; "" on CPUs.
      arch: of the kernels' code that the GPU runs (`gpu_code`).
      is_here: whether the devices belong to this program, and not to a topology to export for.
      no_record: why no record of jflux.selftest counts; "" if one does (`selftest_record`). Nobody
        asks on Hopper.
      no_atomics: why GPUs have no atomic operations on peers' memory; "" if they have.
    """

    platform: str
    sm_count: int = 0
    link_gbps: float = 0.0
    heap_bytes: int = 1 << 31
    device_kind: str = ""
    arch: int = gpu_code.HOPPER
    is_here: bool = True
    no_record: str = gpu_code.NO_RECORD
    no_atomics: str = ""

    @property
    def on_gpus(self) -> bool:
        return self.platform == "cuda"

    @property
    def links(self) -> float:
        """What its links carry, in that of the measured ones: 1, 1/2, 1/4, ... A probe's readings
        differ from run to run, and plans should not (Machine::LinkShare of cc/gpu/machine.h)."""
        if self.link_gbps <= 0:
            return 1.0
        return min(1.0, 2.0 ** round(math.log2(self.link_gbps / MEASURED_LINK_GBPS)))

    @property
    def balanced_columns(self) -> float:
        """Columns of w for which sending a row by itself, in chunks, takes as long as multiplying
        it: 2 k bytes over a link, and 2 k n operations."""
        return MEASURED_TFLOPS * 1e3 / (MEASURED_LINK_GBPS * CHUNKS_OF_LINK * self.links)

    def native_plan(self, op: str, call: Mapping[str, int]) -> dict[str, int]:
        """:func:`jflux._native.plan` for this machine."""
        return _native.plan(op, call, self.sm_count, self.link_gbps, self.arch)

    def why_no_room(self, what: str, taken: int, share: str) -> str:
        """Why a kernel is not taken whose workspace has more than such calls' share of the heap.

        Args:
          what: needs the workspace, with a verb.
          taken: its bytes.
          share: of the heap, in words.
        """
        return (
            f"{what} {taken} bytes of a heap of {self.heap_bytes}, more than {share}; {MORE_HEAP}"
        )

    def why_no_kernel(self, op: str) -> str | None:
        """Why it has no kernel of an op, or None."""
        if not self.on_gpus:
            return None
        return gpu_code.why_not(op, self.arch, self.device_kind, self.no_record)


#: Multiprocessors of an H100 or H200, for devices that cannot be asked.
USUAL_SM_COUNT = 132


def machine_of(platform: str, mesh: Mesh) -> Machine:
    """The machine that calls over this mesh run on: the same in all processes, which must plan the
    same. Makes the heap, whose probe measures links, if the devices are here."""
    is_here = meshes.belongs_here(mesh)
    if platform == "cpu":
        return Machine(platform, heap_bytes=_heap.heap_bytes(platform), is_here=is_here)
    first: Any = mesh.devices.flat[0]
    own = 0 if is_here else int(getattr(first, "core_count", None) or 0)
    kinds = {device.device_kind for device in mesh.devices.flat}
    capability = getattr(first, "compute_capability", None)
    arch = _config.config.current().arch
    if arch is None:
        arch = _heap.kernel_arch() if is_here else gpu_code.arch_of(capability)
    is_portable = is_here and arch < gpu_code.HOPPER
    machine = Machine(
        platform=platform,
        sm_count=(_heap.sm_count() if is_here else own) or USUAL_SM_COUNT,
        link_gbps=_heap.link_gbps() if is_here else 0.0,
        heap_bytes=_heap.heap_bytes(platform),
        device_kind=first.device_kind if is_here and len(kinds) == 1 else "",
        arch=arch,
        is_here=is_here,
        no_record=_heap.no_record() if is_portable else gpu_code.NO_RECORD,
        no_atomics=_heap.no_atomics() if is_here else "",
    )
    if machine.links < 1 and machine.device_kind in MEASURED_GPUS and jax.process_index() == 0:
        _config.say_once(
            logging.WARNING,
            f"the slowest link between these GPUs carried {machine.link_gbps:.0f} GB/s when the "
            f"heap was made, where {machine.device_kind} carry 240 or more: calls are planned for "
            "slow links. If other programs used them then, jflux.shutdown() and jflux.init() read "
            "them again; python -m jflux.doctor shows each link.",
        )
    return machine
