"""Forks of a process that has a heap.

A fork has copies of XLA's clients and of jflux's tables, and none of their threads. Neither can run
there, and what the fork does must not reach the heap, whose memory it shares.

At the fork, in the child:

- The process is marked, so that a call that is lowered, `init` and `shutdown` say what is wrong.
- JAX's caches miss in every thread, so that a call that was compiled before is lowered again.
- What has threads of its own is never destroyed: XLA's clients, and MLIR's thread pool. The
  destructors, at exit, would join threads that are not there.

The parent's clients end as they would without jflux, as by ``jax.extend.backend.clear_backends``.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from typing import Any

import jax

from .. import _config, _jax_internals

_clients: list[weakref.ref[Any]] = []  # of the platforms that have a heap, while they live
_threads: Any = None  # MLIR's
_has_heap = False
_parent: int | None = None


def watch(platform: str) -> None:
    """The process has a heap on this platform from now on."""
    global _has_heap, _threads
    _has_heap = True
    if (mlir := _jax_internals.THREADS.get()) is not None:
        _threads = mlir.global_thread_pool
    client = jax.devices(platform)[0].client
    if not any(client is known() for known in _clients):
        _clients.append(weakref.ref(client, _clients.remove))


def is_fork() -> bool:
    """Whether the process was forked from one that had a heap."""
    return _parent is not None


def check() -> None:
    """Raises in such a process.

    Raises:
      RuntimeError: says what to do instead.
    """
    if is_fork():
        raise RuntimeError(
            f"this process was forked from process {_parent} after jflux had made its symmetric "
            "heap there: a fork has none of XLA's and jflux's threads and can run no call. Fork "
            "before the first jflux call, or start processes otherwise: "
            'multiprocessing.get_context("spawn") or "forkserver"'
        )


def _after_in_child() -> None:
    global _parent
    if not _has_heap:
        return
    _parent = os.getppid()
    for kept in (*(client() for client in _clients), _threads):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
    _config.override_for_good(forked=True)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_in_child)
