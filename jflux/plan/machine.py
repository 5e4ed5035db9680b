"""Machines: how many GPUs a node has, what their links carry, and how much memory there is."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib

_MOST = 1e100  # what is above it is a mistake, and its products are infinite


@dataclasses.dataclass(frozen=True)
class Machine:
    """Nodes of equal GPUs.

    Attributes:
      name: for people.
      gpus_per_node: G_node of the paper.
      intra: bytes/s between two GPUs of a node, one way (beta_intra).
      inter: bytes/s between two nodes, one way, over all their network cards (beta_inter); 0 where
        there is one node only.
      memory: bytes of a GPU.
      flops: floating-point operations/s that matrix products reach on a GPU. Only computation
        times and overlap credit use it.
      intra_latency, inter_latency: seconds of one step of a ring. Only the latency extension uses
        them.
      intra_by_size, inter_by_size: pairs of (bytes, bytes/s) by growing bytes: the bandwidth of a
        collective whose whole buffer has so many: what a rank puts in, or what it gets from an
        all-gather. Only that extension uses them; where there are none,
        `intra` and `inter` hold for every size.
    """

    name: str
    gpus_per_node: int
    intra: float
    inter: float
    memory: float
    flops: float
    intra_latency: float = 0.0
    inter_latency: float = 0.0
    intra_by_size: tuple[tuple[float, float], ...] = ()
    inter_by_size: tuple[tuple[float, float], ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise ValueError(f"jflux: name={self.name!r} must be a string")
        if type(self.gpus_per_node) is not int or not 1 <= self.gpus_per_node < _MOST:
            raise ValueError(f"jflux: gpus_per_node={self.gpus_per_node!r} must be a positive int")
        for field in ("intra", "memory", "flops"):
            if not 0 < getattr(self, field) < _MOST:
                raise ValueError(
                    f"jflux: {field}={getattr(self, field)!r} must be positive, and finite"
                )
        for field in ("inter", "intra_latency", "inter_latency"):
            if not 0 <= getattr(self, field) < _MOST:
                raise ValueError(
                    f"jflux: {field}={getattr(self, field)!r} must not be negative, nor infinite"
                )
        for field in ("intra_by_size", "inter_by_size"):
            pairs = getattr(self, field)
            sizes = [size for size, _ in pairs]
            if sizes != sorted(set(sizes)) or not all(0 < n < _MOST for p in pairs for n in p):
                raise ValueError(f"jflux: {field} must be pairs > 0, of growing bytes; got {pairs}")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Machine:
        """The machine that a JSON file describes: an object with this class's attributes.

        Raises:
          OSError: the file cannot be read.
          ValueError: it does not describe one; names the file.
        """
        try:
            found = json.loads(pathlib.Path(path).read_text())
            for field in ("intra_by_size", "inter_by_size"):
                if field in found:
                    found[field] = tuple((float(a), float(b)) for a, b in found[field])
            return cls(**found)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            why = str(error).removeprefix("jflux: ")[:500]
            raise ValueError(f"jflux: {path} does not describe a machine: {why}") from error


# XLA's all-reduce of bf16 on 4 x H200, in one program: 2 (G - 1)/G bytes over its time.
_H200_ALL_REDUCE = tuple(
    (kib * 1024.0, 1.5 * kib * 1024 / (us * 1e-6))
    for kib, us in (
        (8, 21.1), (32, 18.9), (128, 20.3), (256, 25.3), (512, 27.5), (1024, 34.7), (2048, 40.6),
        (4096, 63.1), (8192, 73.7), (16384, 110.8),
    )
)  # fmt: skip

# The paper names nodes, memory, network cards and peak rates (section VI), and no bandwidths; those
# of links inside a node are the vendors'. Products are taken to reach 0.75 of the peak rate, on
# H100 and H200 the 0.66 that was measured (docs/performance.md). Latencies between nodes are
# assumptions.
MACHINES = {
    machine.name: machine
    for machine in (
        # 4 NVLink3 of 25 GB/s between every two of four A100; 4 Slingshot cards of 25 GB/s.
        Machine("perlmutter", 4, 100e9, 100e9, 40e9, 0.75 * 312e12, 3e-6, 10e-6),
        # Eight GCDs; one 50 GB/s Infinity Fabric link between neighbours; 4 Slingshot cards.
        Machine("frontier", 8, 50e9, 100e9, 64e9, 0.75 * 192e12, 4e-6, 10e-6),
        # NVLink4: 361 GB/s of stores to one peer and a flag in 1.32 us, measured on 4 x H200; 8
        # network cards of 400 Gb/s.
        Machine("h200", 8, 361e9, 400e9, 141e9, 0.66 * 989e12, 1.32e-6, 10e-6, _H200_ALL_REDUCE),
        Machine("h200x4", 4, 361e9, 200e9, 141e9, 0.66 * 989e12, 1.32e-6, 10e-6, _H200_ALL_REDUCE),
        Machine("h100", 8, 361e9, 400e9, 80e9, 0.66 * 989e12, 1.32e-6, 10e-6),
    )
}


def named(name: str) -> Machine:
    """The machine of that name.

    Raises:
      ValueError: there is no such name.
    """
    if name not in MACHINES:
        raise ValueError(f"jflux: no machine {name!r}; there are {', '.join(MACHINES)}")
    return MACHINES[name]


def measured(like: Machine | str = "h200", *, inter: float | None = None) -> Machine:
    """The machine that this process runs on, as the heap's probe found it.

    The probe copies between every two GPUs of this host when the heap is made (what
    ``python -m jflux.doctor`` prints). The slowest push counts, and half of the longest flag round
    trip. It knows nothing of other hosts, of memory or of rates of products: those are taken from
    `like`.

    Args:
      inter: bytes/s between two nodes, if you know it.

    Raises:
      RuntimeError: there are no links that could be measured.
    """
    from .. import _heap

    base = named(like) if isinstance(like, str) else like
    why = "no GPUs" if _heap.default_platform() != "cuda" else _heap._why_no_cuda()
    if why:
        raise RuntimeError(f"jflux: no links to measure here: {why}")
    _heap._ensure("cuda")
    return from_links(_heap.links("cuda"), base, inter=inter)


def from_links(
    links: list[tuple[int, int, float, float, float]], like: Machine, *, inter: float | None = None
) -> Machine:
    """A machine of the probe's (device, peer, push GB/s, pull GB/s, round trip us).

    Raises:
      RuntimeError: the list is empty.
    """
    if not links:
        raise RuntimeError("jflux: no links to measure here: there is one GPU")
    return dataclasses.replace(
        like,
        name="measured",
        gpus_per_node=len({device for device, *_ in links}),
        intra=1e9 * min(push for _, _, push, _, _ in links),
        inter=like.inter if inter is None else inter,
        intra_latency=max(us for *_, us in links) / 2e6,
    )
