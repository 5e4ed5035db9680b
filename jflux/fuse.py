"""``python -m jflux.fuse script.py [arguments]``: a script whose jitted functions are fused, or,
with ``--report``, what :func:`jflux.fuse` finds in them.

(``jflux.fuse`` itself is the function, from jflux/_fuse/fuse.py.)
"""

from __future__ import annotations

import argparse
import functools
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax

from ._fuse.fuse import Fused, fuse


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jflux.fuse",
        description="Runs a script, in which every function that jax.jit gets is fused.",
    )
    add = parser.add_argument
    add("--report", action="store_true", help="leave functions as they are, and print, of each, "
        "which collectives jflux would take and why not the others")  # fmt: skip
    add("--first", action="store_true", help="with --report: end after the first function that "
        "has a collective, before it runs")  # fmt: skip
    add("--only", action="append", metavar="OP", help="as jflux.fuse's argument; may be repeated")
    add("--skip", action="append", default=[], metavar="OP")
    add("--cpus", type=int, metavar="N", help="run on N virtual CPU devices, without a GPU")
    add("script", help="a file")
    add("arguments", nargs=argparse.REMAINDER, help="the script's")
    return parser


class _FoundError(Exception):
    """The first report has been printed."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command."""
    options = _parser().parse_args(argv)
    if options.cpus:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", options.cpus)
    printed: set[tuple[str, str]] = set()

    def change(f: Callable[..., Any]) -> Callable[..., Any]:
        fused = fuse(f, only=options.only, skip=options.skip)
        if not options.report:
            return fused

        @functools.wraps(f)
        def reported(*args: Any, **kwargs: Any) -> Any:
            _print(fused, args, kwargs, printed, options.first)
            return f(*args, **kwargs)

        return reported

    jit = jax.jit

    def fused_jit(f: Callable[..., Any] | None = None, **of_jit: Any) -> Any:
        if f is None:
            return functools.partial(fused_jit, **of_jit)
        if "in_shardings" in of_jit:  # which the inner jit says
            f = jit(f, in_shardings=of_jit["in_shardings"])
        return jit(change(f), **of_jit)

    argv_before, path_before = sys.argv, sys.path[:]
    sys.argv = [options.script, *options.arguments]
    sys.path.insert(0, os.path.dirname(os.path.abspath(options.script)))
    jax.jit = fused_jit  # what the script and the libraries that it imports call
    try:
        runpy.run_path(options.script, run_name="__main__")
    except _FoundError:
        pass
    finally:
        jax.jit, sys.argv, sys.path[:] = jit, argv_before, path_before
    return 0


def _print(
    fused: Fused, args: Any, kwargs: Any, printed: set[tuple[str, str]], first: bool
) -> None:
    """The report of a call, unless an equal one of the function has been printed."""
    report = fused.report(*args, **kwargs)
    if not report:
        return
    name, text = getattr(fused, "__name__", "a function"), str(report)
    if (name, text) not in printed:
        printed.add((name, text))
        print(f"{name}:\n{text}\n", flush=True)
    if first:
        raise _FoundError


if __name__ == "__main__":
    sys.exit(main())
