"""Programs that another process has lowered."""

from __future__ import annotations

from .. import _heap
from .._own_kernels import custom_call
from . import ffi_targets


def register() -> None:
    """Makes this process ready to run programs that another process has lowered: deserialized by
    `jax.export`, or compiled ahead of time and serialized
    (`jax.experimental.serialize_executable`). Call it before such a program is loaded. A process
    that lowers its programs itself does not need it.

    Two things are done, on JAX's default platform, which are otherwise done when a call is lowered:

    - The FFI handlers of all ops are registered with XLA, and those of the custom calls that
      :func:`jflux.register_custom_call` has made known so far.
    - The symmetric heap is made, as by :func:`jflux.init`, which comes first if it is to have other
      settings. With several processes all of them must call it.

    Such a program keeps the path that each call took where it was lowered, and the global ids of
    the devices. Here the devices must have the same ids. On CPUs a call finds its workspace when it
    runs, and on GPUs of one process when it is loaded. A job of several processes on GPUs has
    workspaces only for what each process has lowered: there a program from elsewhere ends in an
    error that says so.

    Raises:
      RuntimeError: the heap cannot be made; says why. Such a program has no reference to take.
    """
    platform = _heap.default_platform()
    if platform not in ffi_targets.PLATFORMS:
        return
    if why := _heap.why_no_heap(platform):
        raise RuntimeError(
            f"jflux.register: programs that were lowered elsewhere cannot run here, since the "
            f"symmetric heap cannot be made: {why}"
        )
    ffi_targets.register_targets(platform)
    custom_call.register_handlers(platform)
