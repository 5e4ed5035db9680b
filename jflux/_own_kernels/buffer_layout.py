"""Where the workspace buffers of a call lie in the data of its half."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

#: Of a buffer's first byte (_ALIGN of jflux/triton.py).
ALIGN = 128
#: Before, between and after buffers: bytes that nobody writes, where :func:`jflux.symm.check` looks
#: for what was written outside a buffer.
GUARD_BYTES = 1024


@dataclasses.dataclass(frozen=True)
class Buffer:
    """One rank's copy of a workspace buffer.

    Attributes:
      name: of the kernel's parameter.
      shape, dtype: of its contents.
      offset: of its first byte in the data of a half.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    offset: int

    @property
    def end(self) -> int:
        """Of its last byte, plus 1."""
        return self.offset + math.prod(self.shape) * self.dtype.itemsize


def lay_out(workspace: Mapping[str, Any]) -> tuple[Buffer, ...]:
    """The buffers, one after the other, with guards around them."""
    buffers = []
    at = GUARD_BYTES
    for name, array in workspace.items():
        buffer = Buffer(name, tuple(array.shape), np.dtype(array.dtype), at)
        buffers.append(buffer)
        at = -(-(buffer.end + GUARD_BYTES) // ALIGN) * ALIGN
    return tuple(buffers)


def data_bytes(buffers: tuple[Buffer, ...]) -> int:
    """Of a half, that the buffers and their guards take."""
    return buffers[-1].end + GUARD_BYTES if buffers else 0


@dataclasses.dataclass(frozen=True)
class Workspace:
    """A workspace of a given size (WorkspaceLayout of cc/core/layout.h).

    Attributes:
      signal_bytes, half_bytes: of one half.
    """

    signal_bytes: int
    half_bytes: int

    @classmethod
    def of_total(cls, total: int) -> Workspace:
        half = 1 << 16
        while True:
            signals = max(4096, half // 512)
            if 1024 + 2 * signals + 2 * half >= total:
                return cls(signals, half)
            half *= 2

    def signal_offset(self, epoch: int) -> int:
        return 1024 + epoch % 2 * self.signal_bytes

    def data_offset(self, epoch: int) -> int:
        return 1024 + 2 * self.signal_bytes + epoch % 2 * self.half_bytes
