"""What a user can switch, and how jflux says that it took another path."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator

logger = logging.getLogger("jflux")


@dataclasses.dataclass
class Config:
    """Process-wide switches, read when an op is lowered. Use ``with jflux.config(strict=True):``.

    Attributes:
      strict: a call that would fall back to its `lax` reference raises instead of logging once.
      fused: False takes the reference everywhere, to compare or to bisect a problem.
    """

    strict: bool = False
    fused: bool = True

    def update(self, **changes: bool) -> None:
        """Sets the named switches for the rest of the process."""
        for name, value in changes.items():
            if name not in {f.name for f in dataclasses.fields(self)}:
                raise ValueError(f"{name!r} is not a switch of jflux.config: {self}")
            setattr(self, name, value)

    @contextlib.contextmanager
    def __call__(self, **changes: bool) -> Iterator[None]:
        before = dataclasses.asdict(self)
        self.update(**changes)
        try:
            yield
        finally:
            self.update(**before)


config = Config()
_said: set[tuple[str, str]] = set()


def fall_back(op: str, reason: str) -> None:
    """Notes that `op` takes its reference: an error in strict mode, else one line per reason."""
    message = f"jflux.{op} takes its lax reference: {reason}"
    if config.strict:
        raise NotImplementedError(f"{message} (jflux.config.strict is on)")
    if (op, reason) not in _said:
        _said.add((op, reason))
        logger.warning("%s", message)
