"""What a user can switch, and how jflux says which path a call takes."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.extend import core

logger = logging.getLogger("jflux")


@dataclasses.dataclass(frozen=True)
class Switches:
    """What decides about calls beside their operands. What `with` blocks change is part of the key
    of JAX's caches; a change for the process drops them.

    Attributes:
      strict, always, fused, unchecked_kernels: see :class:`Config`.
      configuration: the one that products take, whatever was measured; None: what is planned.
      chunked: whether exchanges travel in chunks, whatever their size; None: what is planned.
      node_chunks: into how many chunks products over two levels are cut, as far as they divide;
        None: what is planned.
      wires: where calls with a quantised wire are noted (:func:`jflux.wire_report`); None: nowhere.
      recorder: where plans are noted (:func:`jflux.explain`); None: nowhere.
      arch: of the kernels' code that GPUs run (jflux/_call/gpu_code.py): Hopper's run the portable
        code too, for tests; None: the best that there is.
      forked: whether the process is a fork of the one that has compiled (jflux/_heap/_fork.py).
    """

    strict: bool = False
    always: bool = False
    fused: bool = True
    unchecked_kernels: bool = False
    configuration: Any = None
    chunked: bool | None = None
    node_chunks: int | None = None
    wires: Any = None
    recorder: Any = None
    arch: int | None = None
    forked: bool = False


# What `with` blocks of this thread change of the process-wide switches: (name, value) by name.
_context = jax.make_user_context(default_value=())


class Config:
    """Switches, read when an op is lowered. ``with jflux.config(strict=True):`` sets them in this
    thread for the block, ``jflux.config.update(strict=True)`` for the rest of the process.

    Attributes:
      strict: a call that no kernel takes raises instead of running its `lax` reference.
      always: takes the fused kernel also where the decomposed form, or `lax`, is faster.
      fused: False takes the reference everywhere, to compare or to bisect a problem.
      unchecked_kernels: also takes GPU kernels that have not been compared with float64 on a GPU,
        or may be slower there. By default an op that has such kernels takes its reference, and
        says so.
    """

    _NAMES = ("strict", "always", "fused", "unchecked_kernels")

    def __init__(self) -> None:
        self._process = Switches()

    def __repr__(self) -> str:
        now = self.current()
        return f"jflux.config({', '.join(f'{name}={getattr(now, name)}' for name in self._NAMES)})"

    def current(self) -> Switches:
        """The switches of the calling thread."""
        return dataclasses.replace(self._process, **dict(_context.value))

    @property
    def strict(self) -> bool:
        return self.current().strict

    @property
    def always(self) -> bool:
        return self.current().always

    @property
    def fused(self) -> bool:
        return self.current().fused

    @property
    def unchecked_kernels(self) -> bool:
        return self.current().unchecked_kernels

    def update(self, **changes: bool) -> None:
        """Sets the named switches for the rest of the process, and drops what JAX has compiled
        with other ones.

        Raises:
          ValueError: for a name that is not a switch.
          TypeError: for a value that is not True or False.
        """
        self._check(changes)
        before, self._process = self._process, dataclasses.replace(self._process, **changes)
        if self._process != before:
            jax.clear_caches()

    @contextlib.contextmanager
    def __call__(self, **changes: bool) -> Iterator[None]:
        """Sets the named switches inside the ``with`` block, in this thread. What was compiled
        outside is not used inside, and the other way round.

        Raises:
          ValueError: for a name that is not a switch.
          TypeError: for a value that is not True or False.
          RuntimeError: inside a function that JAX is tracing, which is lowered after the block.
        """
        self._check(changes)
        named = ", ".join(f"{name}={on}" for name, on in changes.items())
        check_not_staging(f"jflux.config({named})", ". jflux.reference has single calls in lax")
        with override(**changes):
            yield

    def _check(self, changes: dict[str, bool]) -> None:
        for name, on in changes.items():
            if name not in self._NAMES:
                raise ValueError(
                    f"{name!r} is not a switch of jflux.config, which has {self._NAMES}"
                )
            if not isinstance(on, bool | np.bool_):  # a string that says no is true
                raise TypeError(f"jflux.config: {name}={on!r} must be True or False")


config = Config()


def _is_staging() -> bool:
    """Whether JAX records what this thread runs, to lower it later. Eager ``vmap``, ``grad`` and
    ``shard_map`` lower each call at once, and so does ``jax.ensure_compile_time_eval``."""
    is_under_jit = getattr(core, "unsafe_am_i_under_a_jit_DO_NOT_USE", None)
    if is_under_jit is None:  # a JAX to come: the block has no effect there, and nobody says so
        return False
    return bool(is_under_jit()) and not getattr(jax.config, "eager_constant_folding", False)


def check_not_staging(block: str, more: str = "") -> None:
    """Raises RuntimeError where a block would have no effect."""
    if _is_staging():
        raise RuntimeError(
            f"{block} has no effect inside a function that JAX traces (jax.jit, jax.checkpoint, a "
            "loop's body, ...): its calls are lowered after the block is left. Put the block "
            f"around the call of the jitted function: `with {block}: f(x)`{more}"
        )


@contextlib.contextmanager
def override(**changes: Any) -> Iterator[None]:
    """Sets fields of :class:`Switches` inside the block, in this thread."""
    try:
        with _context(_with(changes)):
            yield
    finally:
        if _for_good:  # set inside: the context is now as it was before
            _context(_with(_for_good)).__enter__()


def _with(changes: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    """The context of this thread with changes, as `_context` holds it."""
    return tuple(sorted((dict(_context.value) | changes).items()))


_for_good: dict[str, Any] = {}


def override_for_good(**changes: Any) -> None:
    """:func:`override` until the process ends: in this thread, also after it leaves blocks that it
    is in, and in threads to come."""
    _for_good.update(changes)
    _context.set_global(_with(_for_good))
    _context(_with(_for_good)).__enter__()


_said: set[tuple[str, str]] = set()
_MOST_SAID = 1000  # reasons may have shapes, of which a server sees new ones for ever


def say_once(level: int, message: str) -> None:
    """Logs a line, unless the process has logged it before; after very many others, again."""
    if (logging.getLevelName(level), message) not in _said:
        if len(_said) >= _MOST_SAID:
            _said.clear()
        _said.add((logging.getLevelName(level), message))
        logger.log(level, "%s", message)


def fall_back(op: str, reason: str, path: str = "reference") -> None:
    """Notes that no kernel takes a call of `op`, so that it runs its `lax` reference, or the
    decomposed form: one line per reason on the logger `jflux`.

    Raises:
      NotImplementedError: in strict mode.
    """
    if not config.fused:
        return
    what = "takes its lax reference" if path == "reference" else "is decomposed"
    message = f"jflux.{op} {what}: {reason}"
    if config.strict:
        raise NotImplementedError(f"{message} (jflux.config.strict is on)")
    say_once(logging.WARNING, message)
