"""How processes meet: through the key-value store of ``jax.distributed``.

store    Keys are written once and never deleted. JAX's coordinator keeps them.
writers  :func:`gather`: each process writes its own key, and the first of them one for all, unless
         another one has given up on it.
         :func:`claim`: all processes write one key, and the first write wins.
waiters  :func:`gather`: the first process waits for the key of every other one, which wait for its
         answer. Who waits in vain writes the answer. So all of them learn the same, also of a
         process that did not come. A wait is many of a second each: Python handles signals in
         between, and a key may end it.
reset    Never. Another heap uses other names: they contain its attempt.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from collections.abc import Collection, Mapping
from typing import Any

import jax

from .. import _config, _jax_internals

#: Shortest time in which processes meet, in seconds: they compile at different speeds.
LEAST_SECONDS = 60.0
#: How long one call of the store may wait: until then Python handles no signal.
TURN_SECONDS = 1.0


@dataclasses.dataclass(frozen=True)
class Patience:
    """How long processes wait for each other, in seconds: until a warning, and until they give
    up."""

    warn: float
    give_up: float

    @classmethod
    def of(cls, warn_seconds: float, deadline_seconds: float) -> Patience:
        return cls(warn_seconds, max(deadline_seconds, LEAST_SECONDS))


class Absent(RuntimeError):
    """Processes that did not come.

    Attributes:
      processes: their numbers.
    """

    def __init__(self, processes: Collection[int], seconds: float) -> None:
        self.processes, self._seconds = tuple(processes), seconds
        super().__init__(self.processes, seconds)  # by which pickle makes it again

    def __str__(self) -> str:
        names = ", ".join(map(str, self.processes))
        several = "es" if len(self.processes) > 1 else ""
        return (
            f"process{several} {names} did not come to make the symmetric heap within "
            f"{self._seconds:g} s: every process must lower the call, or call jflux.init(); "
            "jflux.init(deadline_seconds=...) gives it longer"
        )


class Abandoned(Absent):
    """A process that came has gone."""

    def __init__(self, why: str) -> None:
        RuntimeError.__init__(self, why)
        self.processes = ()

    def __str__(self) -> str:
        return str(self.args[0])


def gather(
    name: str, value: str, processes: Collection[int], patience: Patience, over: str | None = None
) -> dict[int, str]:
    """Publishes `value` under `name` and returns the value of each process: the same everywhere.

    Args:
      over: a key that ends the wait, where there is one.

    Raises:
      Absent: a process published nothing in time. All raise it, the late process too.
      Abandoned: `over` has a value, which says why.
    """
    me, leader = jax.process_index(), min(processes)
    if len(processes) == 1:
        return {me: value}
    if me == leader:
        found: dict[int, str | None] = {me: value}
        end = time.monotonic() + patience.give_up
        for process in processes:
            if process != me:
                left = dataclasses.replace(patience, give_up=end - time.monotonic())
                found[process] = _wait(f"{name}/{process}", [process], left, over)
        # Another answer may be there: of this process, before its store's reply was lost, or of
        # others that have given up.
        all_of_them = claim(f"{name}/all", json.dumps(found))
    else:
        key_value_set(f"{name}/{me}", value)
        twice = Patience(patience.warn, 2 * patience.give_up)
        answer = _wait(f"{name}/all", [leader], twice, over)
        # A leader that comes later must not believe that all are there.
        all_of_them = answer or claim(f"{name}/all", json.dumps({leader: None}))
    values: Mapping[str, str | None] = json.loads(all_of_them)
    absent = [int(process) for process, v in values.items() if v is None]
    if absent:
        raise Absent(absent, patience.give_up)
    return {int(process): v for process, v in values.items() if v is not None}


def claim(name: str, value: str) -> str:
    """Writes `value` under `name` unless another process has; returns what is there."""
    found = value if key_value_set(name, value) else look(name)
    assert found is not None  # keys are never deleted
    return found


def key_value_set(name: str, value: str) -> bool:
    """Writes `value` under `name`; False if there is a value."""
    try:
        _store().key_value_set(f"jflux/{name}", value)
    except jax.errors.JaxRuntimeError as error:
        if "ALREADY_EXISTS" not in str(error):
            raise
        return False
    return True


def look(name: str) -> str | None:
    """What is under `name` now; None if there is nothing."""
    try:
        return _store().key_value_try_get(f"jflux/{name}")
    except jax.errors.JaxRuntimeError as error:
        if "NOT_FOUND" not in str(error):
            raise
        return None


def wait(name: str, seconds: float) -> str | None:
    """The value under `name`, or None if nothing comes in time (which may be over)."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        timeout_ms = max(1, int(1000 * min(left, TURN_SECONDS)))
        try:
            return _store().blocking_key_value_get(f"jflux/{name}", timeout_ms)
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
    return look(name)


def _wait(name: str, awaited: Collection[int], patience: Patience, over: str | None) -> str | None:
    """As `wait`. Says once in between that it waits."""
    start = time.monotonic()
    warned = False
    while (waited := time.monotonic() - start) < patience.give_up:
        until = patience.give_up if warned or patience.warn < waited else patience.warn
        value = wait(name, min(until, patience.give_up, waited + TURN_SECONDS) - waited)
        if value is not None:
            return value
        if over is not None and (why := look(over)) is not None:
            if (value := look(name)) is not None:  # it came first
                return value
            raise Abandoned(why)
        if not warned and patience.warn <= time.monotonic() - start < patience.give_up:
            warned = True
            _config.say_once(
                logging.WARNING,
                f"jflux has waited {patience.warn:g} s for process "
                f"{', '.join(map(str, awaited))} to meet ({name}); it gives up after "
                f"{patience.give_up:g} s",
            )
    return look(name)


def is_connected() -> bool:
    """Whether the store is there: not after ``jax.distributed.shutdown``."""
    return jax.distributed.is_initialized()


def _store() -> Any:
    distributed = _jax_internals.STORE.get()
    if distributed is None:
        raise RuntimeError(
            f"{_jax_internals.STORE.why_missing()}: jflux's processes meet through its store"
        )
    client = distributed.global_state.client
    if client is None:
        raise RuntimeError(
            "several processes, but jax.distributed.initialize() was not called: jflux's "
            "processes meet through its key-value store"
        )
    return client
