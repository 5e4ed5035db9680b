"""Whether GPUs have atomic operations on each other's memory, which most have over NVLink and not
over PCIe. jflux's own kernels need none; jflux.triton's ``signal_add`` does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

#: (from, to, loads and stores, atomics), by ordinals: of the GPUs that a process sees
#: (lib.cuda_peers).
Peer = tuple[int, int, bool, bool]
#: (from, to, push GB/s, pull GB/s, microseconds), by global device ids (lib.heap_links).
Link = tuple[int, int, float, float, float]

#: No PCIe link of today's GPUs carries as much, in 1e9 bytes a second: what does is NVLink.
FASTER_THAN_PCIE = 130.0


def why_no_atomics(
    peers: Sequence[Peer], links: Sequence[Link], ordinals: Mapping[int, int]
) -> str:
    """Why kernels must not use atomic operations on the memory of this process's GPUs' peers; "" if
    they may.

    CUDA tells of GPUs that the process sees. Of one that another process has, it is not known
    which of these it is, if any: then all that are seen must have them, or the link must be faster
    than PCIe.

    Args:
      peers: what CUDA says.
      links: of this process's GPUs.
      ordinals: of this process's GPUs, by global device id.
    """
    of_pair = {(source, to): atomics for source, to, _, atomics in peers}
    for source, to, push, _, _ in links:
        here = ordinals[source]
        if to in ordinals:
            if not of_pair.get((here, ordinals[to]), False):
                return f"GPU {here} has none on GPU {ordinals[to]}'s"
            continue
        seen = [atomics for (own, _), atomics in of_pair.items() if own == here]
        if push < FASTER_THAN_PCIE and not (seen and all(seen)):
            return (
                f"GPU {here} may have none on device {to}'s, which another process has: its link "
                f"carries {push:.0f} GB/s, as PCIe does"
            )
    return ""
