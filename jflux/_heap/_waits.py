"""Waits in native code that let Python handle signals."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


def on_a_thread(work: Callable[..., Any], *args: Any) -> Any:
    """``work(*args)``, which may wait for kernels, and these for peers. The main thread waits for a
    thread that does it: it handles signals meanwhile, and goes on if a handler raises."""
    if threading.current_thread() is not threading.main_thread():
        return work(*args)
    result: Any = None
    failure: BaseException | None = None

    def run() -> None:
        nonlocal result, failure
        try:
            result = work(*args)
        except BaseException as error:
            failure = error

    thread = threading.Thread(target=run, name="jflux-wait", daemon=True)
    thread.start()
    thread.join()
    if failure is not None:
        raise failure
    return result
