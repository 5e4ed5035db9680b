"""What a user can switch, and how jflux says that it took another path."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator

import jax

logger = logging.getLogger("jflux")


@dataclasses.dataclass
class Config:
    """Process-wide switches, read when an op is lowered. Use ``with jflux.config(strict=True):``.

    Attributes:
      strict: a call that would fall back to its `lax` reference raises instead of logging once.
      always: takes the fused kernel also where a product and a collective, or `lax`, are faster.
      fused: False takes the reference everywhere, to compare or to bisect a problem.
    """

    strict: bool = False
    always: bool = False
    fused: bool = True

    def update(self, **changes: bool) -> None:
        """Sets the named switches for the rest of the process, and drops what JAX has compiled
        with other ones."""
        before = dataclasses.asdict(self)
        self._set(changes)
        if dataclasses.asdict(self) != before:
            jax.clear_caches()

    @contextlib.contextmanager
    def __call__(self, **changes: bool) -> Iterator[None]:
        """Sets the named switches inside the ``with`` block. What was compiled outside is not
        used inside, and the other way round."""
        before = dataclasses.asdict(self)
        self._set(changes)
        try:
            with _switches(tuple(dataclasses.asdict(self).items())):
                yield
        finally:
            self._set(before)

    def _set(self, changes: dict[str, bool]) -> None:
        switches = {f.name for f in dataclasses.fields(self)}
        for name in changes:
            if name not in switches:
                raise ValueError(f"{name!r} is not a switch of jflux.config, which has {switches}")
        for name, value in changes.items():
            setattr(self, name, value)


config = Config()
_switches = jax.make_user_context(default_value=None)  # part of the key of JAX's caches
_said: set[tuple[str, str]] = set()


def fall_back(op: str, reason: str) -> None:
    """Notes that `op` takes its reference, unless that was asked for: an error in strict mode, else
    one line per reason."""
    if not config.fused:
        return
    message = f"jflux.{op} takes its lax reference: {reason}"
    if config.strict:
        raise NotImplementedError(f"{message} (jflux.config.strict is on)")
    if (op, reason) not in _said:
        _said.add((op, reason))
        logger.warning("%s", message)
