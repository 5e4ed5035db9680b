"""What the processes of a run tell each other, through JAX's key-value store."""

from __future__ import annotations

import itertools
import json
from typing import Any

import jax

from .._heap import _rendezvous

SECONDS = 1800  # a peer may be compiling, or waiting for a deadline


class Together:
    """All processes call the same methods in the same order."""

    def __init__(self) -> None:
        self._count = itertools.count()
        self.process, self.processes = jax.process_index(), jax.process_count()

    def exchange(self, value: Any) -> list[Any]:
        """What each process has passed, in their order: anything that JSON knows.

        Raises:
          RuntimeError: a process did not come.
        """
        if self.processes == 1:
            return [value]
        key = f"stress/{next(self._count)}"
        _rendezvous.key_value_set(f"{key}/{self.process}", json.dumps(value))
        return [json.loads(self._of(key, p)) for p in range(self.processes)]

    def _of(self, key: str, process: int) -> str:
        value = _rendezvous.wait(f"{key}/{process}", SECONDS)
        if value is None:
            raise RuntimeError(f"process {process} did not come within {SECONDS} s ({key})")
        return value

    def first(self, value: Any) -> Any:
        """What process 0 has passed."""
        return self.exchange(value)[0]
