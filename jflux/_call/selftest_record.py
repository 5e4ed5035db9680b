"""What `python -m jflux.selftest` has found on this machine: a file for each model of GPU, beside
the tuning tables.

GPUs that run portable code (`gpu_code`) take `lax` until somebody has checked the kernels there. A
record says that the self-test has passed: from then on this machine takes them without
``jflux.config.unchecked_kernels``. It counts for the driver and the version of jflux that it names.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib

from .. import _version
from . import gpu_code, user_files


@dataclasses.dataclass(frozen=True)
class Key:
    """What a record holds for.

    Attributes:
      gpu: the model's name.
      driver: its version.
      jflux: the version.
      arch: of the kernels' code that the GPUs run.
    """

    gpu: str
    driver: str
    jflux: str
    arch: int


@dataclasses.dataclass(frozen=True)
class Found:
    """What a record says.

    Attributes:
      devices: on how many GPUs the self-test has passed; 0: no record counts.
      why: no record counts; "" if one does.
    """

    devices: int = 0
    why: str = ""


#: What a key's fields are called in messages.
_NAMES = {"gpu": "on", "driver": "with driver", "jflux": "with jflux", "arch": "with code for sm_"}


def path(gpu: str) -> pathlib.Path:
    """Of the record of a model of GPU."""
    return user_files.folder() / f"selftest-{user_files.slug(gpu)}.json"


def found(text: str | None, key: Key) -> Found:
    """What a record's text says of GPUs, driver and version as in `key`. None: there is no file."""
    if text is None:
        return Found(why=gpu_code.NO_RECORD)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict) or type(content.get("devices")) is not int:
        return Found(why="its record cannot be read")
    for name, wanted in dataclasses.asdict(key).items():
        has = content.get(name)
        if has != wanted:
            what = _NAMES[name]
            space = "" if what.endswith("_") else " "
            return Found(why=f"it passed {what}{space}{has}, and this is {wanted}")
    if content["devices"] < 1:
        return Found(why="its record cannot be read")
    return Found(devices=content["devices"])


def key_here() -> Key | str:
    """The key of this process's GPUs; or why they have none."""
    kinds = sorted({device.device_kind for device in gpu_code.gpus()})
    if len(kinds) != 1:
        return f"this process has GPUs of several models ({', '.join(kinds)})"
    driver = gpu_code.driver()
    if driver is None:
        return "the driver's version is not known"
    return Key(kinds[0], driver, _version.__version__, gpu_code.arch_here())


@functools.cache
def here() -> Found:
    """What the record says of this process's GPUs, as it was when the process asked first."""
    if gpu_code.arch_here() >= gpu_code.HOPPER:
        return Found(why="no portable code runs here")
    key = key_here()
    if isinstance(key, str):
        return Found(why=key)
    try:
        file = path(key.gpu)
        return found(file.read_text() if file.is_file() else None, key)
    except (OSError, UnicodeDecodeError) as error:
        return Found(why=f"its record cannot be read ({error})")


def store(key: Key, devices: int, day: str) -> pathlib.Path:
    """Writes that the self-test has passed on so many GPUs.

    Raises:
      OSError: the file cannot be written.
    """
    file = path(key.gpu)
    user_files.write_json(file, {**dataclasses.asdict(key), "devices": devices, "day": day})
    return file


def remove(gpu: str) -> bool:
    """Removes the record of a model of GPU, of any driver and version; whether there was one."""
    try:
        path(gpu).unlink()
    except OSError:
        return False
    return True
