"""How far a command is, on stderr: tqdm's bar where it is installed, else a line now and then."""

from __future__ import annotations

import sys
import time

SECONDS_BETWEEN_LINES = 20.0


class Progress:
    """Of something that takes `total` units, such as seconds or calls.

    Args:
      total: what `at` reaches at the end.
      unit: its name.
      title: of the bar.
      show: False prints nothing, as in all processes of a job but one.
    """

    def __init__(self, total: float, unit: str, title: str = "", show: bool = True) -> None:
        self._total, self._unit, self._title, self._show = total, unit, title, show
        self._said, self._bar = time.monotonic(), None
        if show:
            try:
                from tqdm import tqdm

                form = "{desc}{percentage:3.0f}%|{bar}| {n:.0f}/{total:.0f} {unit}{postfix}"
                self._bar = tqdm(
                    total=total, unit=unit, desc=f"{title} " if title else "", file=sys.stderr,
                    bar_format=form,
                )  # fmt: skip
            except ImportError:
                pass

    def at(self, done: float, note: str = "") -> None:
        """So many units are done."""
        if self._bar is not None:
            self._bar.set_postfix_str(note, refresh=False)
            self._bar.update(min(done, self._total) - self._bar.n)
        elif self._show and time.monotonic() - self._said > SECONDS_BETWEEN_LINES:
            self._said = time.monotonic()
            parts = f"{done:.0f} of {self._total:.0f} {self._unit}", note
            title = f"{self._title}: " if self._title else ""
            print(title + ", ".join(filter(None, parts)), file=sys.stderr, flush=True)

    def close(self) -> None:
        """Leaves the bar as it is."""
        if self._bar is not None:
            self._bar.close()
