"""What ``python -m jflux.doctor --report`` adds to the doctor's lines, so that they can be posted:
GPUs, driver, settings, tables and what the failed program said, without names of hosts, users or
folders."""

from __future__ import annotations

import getpass
import importlib.metadata
import os
import re
import socket
from collections.abc import Iterator

import jax

from .. import _config
from .._call import gpu_code, tuning_tables

_PACKAGES = re.compile(r"(flax|numpy|optax|orbax-checkpoint|jax-cuda.*|nvidia-(nccl|nvshmem).*)")
_VARIABLES = re.compile(r"(JFLUX|XLA|JAX|CUDA|NCCL|NVSHMEM)_\w+")
_PRIVATE = re.compile(r"ADDRESS|HOST|IFNAME|KEY|PASS|SECRET|TOKEN|USER")


def scrub(text: str) -> str:
    """Without the names of this host and user, and with the last part alone of absolute paths."""
    text = re.sub(r"(?<![\w.~])~?(?:/[\w.+@%-]+)+/([\w.+@%-]*)", r"<path>/\1", text)
    host = socket.gethostname()
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # of a container that has no such user
        user = ""
    names = {host: "<host>", host.partition(".")[0]: "<host>", user: "<user>"}
    for name, instead in names.items():
        if name:
            text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", instead, text)
    return text


def _scrub_all(text: str) -> str:
    """Also without addresses; of texts that have no versions, which look the same."""
    return re.sub(r"(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?(?![\w.])", "<address>", scrub(text))


def _packages() -> Iterator[str]:
    found = {}
    for one in importlib.metadata.distributions():
        name = (one.metadata["Name"] or "").lower()
        if _PACKAGES.fullmatch(name):
            found[name] = one.version
    yield f"packages: {', '.join(f'{name} {found[name]}' for name in sorted(found)) or 'none'}"


def _gpus() -> Iterator[str]:
    gpus = [d for d in jax.local_devices() if d.platform == "gpu"]
    kinds = {f"{d.device_kind}, capability {d.compute_capability}" for d in gpus}
    named = "; ".join(sorted(kinds)) or "none"
    yield f"driver: {gpu_code.driver() or 'none'}; GPUs of this process: {named}"


def _settings() -> Iterator[str]:
    switches = _config.config.current()
    shown = ", ".join(f"{name} {getattr(switches, name)}" for name in ("strict", "always", "fused"))
    yield f"switches: {shown}"
    for name in sorted(os.environ):
        if _VARIABLES.fullmatch(name) and not _PRIVATE.search(name):
            yield f"variable: {name}={_scrub_all(os.environ[name])}"


def _tables() -> Iterator[str]:
    for gpu in sorted({d.device_kind for d in jax.local_devices() if d.platform == "gpu"}):
        own, shipped = (
            tuning_tables.load(tuning_tables.user_path(gpu)),
            tuning_tables.shipped_table(gpu),
        )
        yield f"tuned calls of {gpu}: {len(own)} of the user's table, {len(shipped)} shipped"


def settings() -> list[str]:
    """Packages, GPUs, switches, variables and tables of this process."""
    return [*_packages(), *_gpus(), *_settings(), *_tables()]


def last_fault(log: str, most: int = 5) -> list[str]:
    """The last lines of a program's output in which jflux speaks, each once."""
    said = [line.strip() for line in log.splitlines() if re.search(r"\bjflux[.:]", line)]
    latest = list(dict.fromkeys(reversed(said)))[:most]
    return [_scrub_all(line) for line in reversed(latest)]
