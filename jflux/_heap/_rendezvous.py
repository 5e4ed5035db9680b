"""How processes meet: through the key-value store of ``jax.distributed``.

store    Keys are written once and never deleted. JAX's coordinator keeps them.
writers  :func:`exchange`: each process writes its own key. :func:`claim`: all processes write one
         key, and the first one wins.
waiters  :func:`exchange` waits for the key of every process; a read returns what was written
         before it in the store's order.
reset    Never. A new heap uses new names: they contain its generation.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax


def exchange(
    name: str, value: str, processes: Iterable[int], deadline_seconds: float
) -> dict[int, str]:
    """Publishes `value` under `name` and returns the value of each process.

    Raises:
      RuntimeError: if a process publishes nothing within the deadline, or 60 seconds if that is
        longer.
    """
    client = _store()
    timeout_ms = int(max(deadline_seconds, 60.0) * 1000)
    client.key_value_set(f"jflux/{name}/{jax.process_index()}", value)
    theirs = {}
    for process in processes:
        try:
            theirs[process] = client.blocking_key_value_get(f"jflux/{name}/{process}", timeout_ms)
        except jax.errors.JaxRuntimeError as error:
            raise RuntimeError(
                f"process {process} did not come to make the symmetric heap within "
                f"{timeout_ms / 1000:g} s: every process must lower the call, or call "
                "jflux.init(); jflux.init(deadline_seconds=...) gives it longer"
            ) from error
    return theirs


def claim(name: str, value: str) -> str:
    """Writes `value` under `name` unless another process has; returns what is there."""
    client = _store()
    try:
        client.key_value_set(f"jflux/{name}", value)
    except jax.errors.JaxRuntimeError as error:
        if "ALREADY_EXISTS" not in str(error):
            raise
        return client.blocking_key_value_get(f"jflux/{name}", 60_000)
    return value


def _store() -> Any:
    from jax._src import distributed  # there is no public name for the store

    client = distributed.global_state.client
    if client is None:
        raise RuntimeError(
            "several processes, but jax.distributed.initialize() was not called: jflux's "
            "processes meet through its key-value store"
        )
    return client
