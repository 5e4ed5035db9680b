"""What the processes of a run tell each other, through JAX's key-value store."""

from __future__ import annotations

import itertools
import json
from typing import Any

import jax
from jax._src.distributed import global_state

SECONDS = 1800  # a peer may be compiling, or waiting for a deadline


class Together:
    """All processes call the same methods in the same order."""

    def __init__(self) -> None:
        self._count = itertools.count()
        self.process, self.processes = jax.process_index(), jax.process_count()

    def exchange(self, value: Any) -> list[Any]:
        """What each process has passed, in their order: anything that JSON knows.

        Raises:
          jax.errors.JaxRuntimeError: a process did not come.
        """
        if self.processes == 1:
            return [value]
        key = f"jflux/stress/{next(self._count)}"
        store = global_state.client
        assert store is not None
        store.key_value_set(f"{key}/{self.process}", json.dumps(value))
        return [
            json.loads(store.blocking_key_value_get(f"{key}/{p}", SECONDS * 1000))
            for p in range(self.processes)
        ]

    def first(self, value: Any) -> Any:
        """What process 0 has passed."""
        return self.exchange(value)[0]
