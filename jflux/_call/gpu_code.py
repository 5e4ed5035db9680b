"""Which code of the kernels a GPU runs, and which ops have such code.

Kernels are compiled for two architectures (cc/gpu/machine.h): sm_90a, and, where they need nothing
that Hopper alone has, sm_80 with its PTX. A GPU of compute capability 9.0 runs the first; 8.x runs
the second, and so does 10.0 and later, whose driver compiles the PTX. Those that multiply float8
are compiled for sm_89 in place of sm_80: GPUs from 8.9 on run both. The table of ops says which
GPUs an op's kernels are for (cc/ops/registry.cc).
"""

from __future__ import annotations

import functools
import pathlib
import re

import jax
import numpy as np

from .. import _config, _native

HOPPER: int = _native.HOPPER_ARCH
FLOAT8: int = _native.FLOAT8_ARCH
PORTABLE: int = _native.PORTABLE_ARCH

#: Whether the portable code has passed all checks on a GPU that it is for (on an H100, by its PTX,
#: it has: docs/experiments/0044). Until then GPUs that would run it take `lax`, unless
#: ``jflux.config.unchecked_kernels``.
PORTABLE_IS_CHECKED = False

#: Why no record of jflux.selftest counts where nobody has looked for one.
NO_RECORD = "it has not passed here"
_DRIVER = pathlib.Path("/proc/driver/nvidia/version")


def why_not_of(
    gpus: tuple[int, int], arch: int, gpu: str, unchecked: bool, no_record: str = NO_RECORD
) -> str | None:
    """Why a GPU runs no kernel of an op, or None.

    Args:
      gpus: the first and the last architecture that the op's kernels are for.
      arch: of the code that the GPU runs.
      gpu: its name, for messages.
      unchecked: whether portable code is taken before it has been checked on a GPU.
      no_record: why no record of jflux.selftest counts; "" if one does (`selftest_record`).
    """
    if arch >= HOPPER:
        return None
    if not gpus[0] <= arch <= gpus[1]:
        return f"its kernels are for compute capability 9.0 (H100, H200), not for {gpu}"
    if no_record and not unchecked:
        return (
            f"its kernels are compiled for {gpu} and have not been checked there; python -m "
            f"jflux.selftest checks them ({no_record}), "
            "jflux.config(unchecked_kernels=True) takes them"
        )
    return None


def why_not(op: str, arch: int, gpu: str, no_record: str = NO_RECORD) -> str | None:
    """:func:`why_not_of` of an op by its name, as jflux is configured."""
    if arch >= HOPPER:
        return None
    return why_not_of(_native.lib.gpus(op), arch, gpu or "this GPU", is_switched_on(), no_record)


def is_switched_on() -> bool:
    """Whether portable code is taken, whatever has been checked on this machine."""
    return PORTABLE_IS_CHECKED or _config.config.unchecked_kernels


def by_whose_leave(arch: int, no_record: str) -> str:
    """Why a GPU takes portable code, as reasons of plans end; "" of Hopper's."""
    if arch >= HOPPER or PORTABLE_IS_CHECKED:
        return ""
    if _config.config.unchecked_kernels:
        return "; in portable code, which unchecked_kernels takes"
    return "" if no_record else "; in portable code, which jflux.selftest has checked here"


def arch_of(capability: str | None) -> int:
    """Of the code that a GPU of this compute capability runs; of an H100 where it is not known."""
    if capability in (None, "9.0"):
        return HOPPER
    return FLOAT8 if tuple(map(int, capability.split("."))) >= (8, 9) else PORTABLE


def why_not_multiplied(dtype: np.dtype, arch: int) -> str | None:
    """Why portable code of an architecture does not multiply operands of a type, or None."""
    if arch >= _native.FORMATS[dtype.name].portable_from:
        return None
    return f"operands are {dtype.name}, which GPUs multiply from compute capability 8.9 on"


def describe(device: jax.Device) -> str:
    """A GPU in words."""
    capability = getattr(device, "compute_capability", "unknown")
    return f"{device.device_kind} (compute capability {capability})"


def driver() -> str | None:
    """The version of the NVIDIA driver; None without one."""
    try:
        found = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", _DRIVER.read_text())
    except OSError:
        return None
    return found and found[0]


def gpus() -> list[jax.Device]:
    """Of this process."""
    try:
        return jax.local_devices(backend="cuda")
    except RuntimeError:
        return []


@functools.cache
def arch_here() -> int:
    """Of the code that this process's GPUs run, the least; of an H100 without any.

    Raises:
      RuntimeError: one of them runs none; says which and why.
    """
    found = [HOPPER]
    for device in gpus():
        capability = str(getattr(device, "compute_capability", "unknown"))
        if capability.split(".")[0] in ("5", "6", "7"):
            raise RuntimeError(f"{describe(device)}: kernels need 8.0 or later")
        try:
            found.append(_native.lib.cuda_arch(device.local_hardware_id))
        except RuntimeError as error:
            raise RuntimeError(
                f"{describe(device)} does not run jflux's kernels: {error}. A build from source "
                "may have none for it: JFLUX_CUDA=ON pip install . compiles them for all GPUs"
            ) from None
    return min(found)


def arch_wanted() -> int:
    """Of the code that this process's GPUs run, or are told to."""
    if (told := _config.config.current().arch) is not None:
        return told
    try:
        return arch_here()
    except RuntimeError:  # no kernel runs there, whichever
        return HOPPER


def runs_portable() -> bool:
    """Whether that is portable code."""
    return arch_wanted() < HOPPER


def gpu_here() -> str:
    """The name of this process's first GPU; "" without any."""
    return next((device.device_kind for device in gpus()), "")


def portable_ops() -> list[str]:
    """Names of the ops whose kernels have portable code."""
    names = {name.removeprefix("jflux_") for name, _, _ in _native.lib.targets()}
    return sorted(name for name in names if _native.lib.gpus(name)[0] == PORTABLE)


def report(
    arch: int, gpus: str, portable: list[str], taken: bool, no_record: str = NO_RECORD
) -> list[str]:
    """What `jflux.doctor` says of GPUs, if there is anything to say.

    Args:
      arch: of the code that they run.
      gpus: their names.
      portable: names of the ops that have such code.
      taken: whether these take their kernels, whatever has been checked.
      no_record: why no record of jflux.selftest counts; "" if one does.
    """
    if arch >= HOPPER:
        return []
    how = "run here with jflux.config(unchecked_kernels=True)"
    if taken or not no_record:
        how = "run here"
    first = (
        f"kernels: compiled for {gpus}, not checked here: please run python -m jflux.selftest "
        f"({no_record}), and report with the issue template 'jflux on another GPU'"
        if no_record
        else f"kernels: compiled for {gpus}, and checked here by python -m jflux.selftest"
    )
    return [first, f"  {how}: {', '.join(portable)}; other ops take lax"]
