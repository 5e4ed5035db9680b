"""What the scripts share that check kernels on GPUs by random calls: options, what was found, and
calls without waits."""

from __future__ import annotations

import argparse
import collections
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jflux import testing


def parser(description: str | None, *, calls: int, limit: float) -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--calls", type=int, default=calls)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--limit", type=float, default=limit, help="seconds")
    return options


class Checks:
    """Runs checks, each of which gives (name, form, largest error in its bounds), until `limit`
    seconds are over, many are wrong, or the device is lost."""

    def __init__(self, limit: float) -> None:
        self.until = time.monotonic() + limit
        self.found: dict[tuple[str, str], list[float]] = collections.defaultdict(list)
        self.wrong: list[str] = []
        self.alive = True

    def run(self, what: str, check: Callable[..., tuple[str, str, float]], *given: Any) -> None:
        """One check, unless the device is lost."""
        if not self.alive:
            return
        begin = time.monotonic()
        try:
            name, form, worst = check(*given)
            self.found[name, form].append(worst)
            print(f"{what}: right, {time.monotonic() - begin:.0f} s", flush=True)
        except Exception as error:
            self.wrong.append(f"{what}: {type(error).__name__}: {str(error)[:400]}")
            print(self.wrong[-1], flush=True)
            self.alive = not isinstance(error, jax.errors.JaxRuntimeError)

    def go_on(self) -> bool:
        return self.alive and time.monotonic() < self.until and len(self.wrong) < 12

    def report(self, name: str, form: str) -> int:
        """Prints the table, under these headings; an exit status."""
        print(f"\n{name:10} {form:30} calls  largest error / bound")
        for (of_name, of_form), errors in sorted(self.found.items()):
            print(f"{of_name:10} {of_form:30} {len(errors):5}  {max(errors):.2f}")
        print(f"{sum(map(len, self.found.values()))} calls right, {len(self.wrong)} wrong")
        return 1 if self.wrong or not self.found else 0


def check_waits(f: Callable[..., jax.Array], draw: Callable[[], tuple[Any, ...]]) -> None:
    """That values do come from the peers: of six calls without waits some are wrong."""
    wrong = 0
    for _ in range(6):
        args = draw()
        right = np.asarray(f(*args))
        testing.poison_workspaces()
        with testing.planted_faults(skip_waits=True, max_delay_us=5000):
            wrong += np.asarray(f(*args)).tobytes() != right.tobytes()
    assert wrong, "waits that are left out do not show"
