"""Which configuration of the GPU kernels a call takes: what was measured for it.

A tuning table is a dictionary from calls to choices, kept as JSON. Two are asked one after the
other: the user's, which `jflux.tune` writes, and the one that ships for this model of GPU. Where
neither knows the call, the heuristic of cc/gpu/gemm_choice.h decides.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import jax

from .. import _config, _heap, _native
from . import user_files
from .user_files import slug as slug

DECOMPOSED = "decomposed"  # instead of a choice: XLA's product and a collective, not the kernel


# The generation of the kernels, which tables carry. Raise it when a change to them could make
# another choice the fastest, and measure the shipped tables again.
KERNELS = 1


@dataclasses.dataclass(frozen=True)
class Choice:
    """A configuration of the GPU kernels.

    Attributes:
      tile_n: columns of a tile, which has 128 rows.
      cluster_m: CTAs one below the other that share the loading of w.
      group_m: rows of clusters in a raster group, which is traversed over all columns before the
        next; 0: all rows are one group, whichever rank's they are.
      splits: of k, each computed by another CTA of a cluster: 2, for tiles of 128 columns and few
        rows, or 4, in all_gather_matmul.
    """

    tile_n: int
    cluster_m: int
    group_m: int
    splits: int = 1


@dataclasses.dataclass(frozen=True)
class Key:
    """What a choice was measured for; sizes are one rank's, as the kernel sees them.

    Attributes:
      rows: of all ranks.
      n: columns of w, of all weights if they are several.
      k: of x, of all terms if they are several.
      dtype: of x and w, and that or a wider one of y; "x.w.y" for a type that no result has.
      scales: of the operands, as `Scales` of jflux/_ops/_scaled.py names them; "": they have none.
    """

    op: str
    ranks: int
    rows: int
    n: int
    k: int
    dtype: str
    transpose_rhs: bool
    scales: str = ""

    def __str__(self) -> str:
        layout = "nk" if self.transpose_rhs else "kn"
        return (
            f"{self.op} {self.dtype} ranks={self.ranks} rows={self.rows} n={self.n} k={self.k} "
            f"w={layout}{self.scales and f' scales={self.scales}'}"
        )


_KEY = re.compile(
    r"(\w+) ([\w.]+) ranks=\d+ rows=\d+ n=\d+ k=\d+ w=(kn|nk)"
    r"( scales=of_(sums|blocks|vectors))?"
)

Table = dict[str, Any]  # str(Key) -> [tile_n, cluster_m, group_m, splits] or "decomposed"


def compiled() -> list[Choice]:
    """The configurations that there are kernels for, each with a usual group."""
    return [Choice(*c) for c in _native.lib.choices()]


def _why_not(key: str, entry: Any) -> str | None:
    """Why an entry of a table cannot be used, or None."""
    match = _KEY.fullmatch(key)
    if match is None:
        return f"{_short(repr(key))} names no call"
    if not _native.dtypes(match[1], "cuda"):
        return f"{match[1]!r} is not an op of this version"
    if entry == DECOMPOSED:
        return None
    numbers = isinstance(entry, list) and len(entry) == 4
    if not numbers or not all(type(n) is int and 0 <= n < 1 << 31 for n in entry):
        return f"{_short(json.dumps(entry))} is neither four numbers nor {DECOMPOSED!r}"
    if not _native.lib.is_possible(tuple(entry)):
        return f"no kernel has the configuration {entry}"
    return None


def _short(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200]}..."


def _warn(path: pathlib.Path, line: int, why: str) -> None:
    _config.say_once(
        logging.WARNING,
        f"tuning table {path}, line {line}: ignored, since {why}; "
        "run jflux.tune again, or delete it",
    )


def _usable(text: str, path: pathlib.Path) -> Table:
    """The entries of a table's text that this build can use. Each other one is logged, with its
    line."""
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        _warn(path, error.lineno, f"it is not JSON ({error.msg})")
        return {}
    except (ValueError, RecursionError) as error:  # too long a number, or too deep
        _warn(path, 1, f"it cannot be read ({error})")
        return {}
    if not isinstance(content, dict) or not isinstance(content.get("choices"), dict):
        _warn(path, 1, "it has no `choices`")
        return {}
    wrong = [name for name, value in _writer().items() if content.get(name) != value]
    if wrong:
        found = ", ".join(f"{name} {_short(repr(content.get(name)))}" for name in wrong)
        _warn(path, 1, f"it was measured with other kernels ({found})")
        return {}
    usable, lines = {}, text.splitlines()
    for key, entry in content["choices"].items():
        why = _why_not(key, entry)
        if why is None:
            usable[key] = entry
        else:
            quoted = json.dumps(key)
            line = next((i for i, text in enumerate(lines, 1) if quoted in text), 1)
            _warn(path, line, why)
    return usable


def as_json(choice: Choice | str) -> Any:
    """As tables keep it."""
    return choice if isinstance(choice, str) else list(dataclasses.astuple(choice))


@contextlib.contextmanager
def force(choice: Choice | str) -> Iterator[None]:
    """Products that are lowered inside, in this thread, take this choice, whatever was measured."""
    with _config.override(configuration=choice):
        yield


def lookup(key: Key, gpu: str) -> Choice | str | None:
    """What is known of this call: a choice, :data:`DECOMPOSED`, or nothing, as where there is no
    GPU (""). A choice that was forced comes first."""
    forced = _config.config.current().configuration
    if forced is not None or not gpu:
        return forced
    for table in (_user_table(gpu), shipped_table(gpu)):
        found = table.get(str(key))
        if found is not None:
            return found if found == DECOMPOSED else Choice(*found)
    return None


@functools.cache
def shipped_table(gpu: str) -> Table:
    """The table that comes with jflux for this model of GPU; empty if there is none."""
    path = pathlib.Path(__file__).parent / "tables" / f"{slug(gpu)}.json"
    return _usable(path.read_text(), path) if path.exists() else {}


# ---- The user's table ----------------------------------------------------------------------------


def user_path(gpu: str) -> pathlib.Path:
    """Where `jflux.tune` writes: $JFLUX_TUNING_DIR, else the user's cache directory."""
    return user_files.folder() / f"tuning-{slug(gpu)}.json"


def _writer() -> dict[str, Any]:
    """What a table holds for: the kernels' generation, and the tiles that they are compiled for."""
    tiles = " ".join(f"{c.tile_n}/{c.cluster_m}" for c in compiled())
    return {"kernels": KERNELS, "tiles": tiles}


def load(path: pathlib.Path) -> Table:
    """The choices in a file that this build can use. Nothing in a file is an error: what cannot be
    used is logged, with its line."""
    try:
        if path.exists() and not path.is_file():  # a pipe would be waited for
            _warn(path, 1, "it is no file")
            return {}
        return _usable(path.read_text(), path)
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        _warn(path, 1, f"it cannot be read ({error})")
        return {}


def store(path: pathlib.Path, choices: Table) -> None:
    """Adds choices to a file, in one step. What it has that this build cannot use goes. A file that
    cannot be written is logged: the choices were measured all the same, and this process has them.
    """
    merged = {**load(path), **choices}
    try:
        user_files.write_json(path, {**_writer(), "choices": dict(sorted(merged.items()))})
    except OSError as error:
        _config.say_once(
            logging.WARNING,
            f"tuning table {path} cannot be written ({error}); set JFLUX_TUNING_DIR to a folder "
            "that can",
        )


_agreed: dict[str, Table] = {}


def _user_table(gpu: str) -> Table:
    """What is in the user's table. Ranks that take different configurations cannot work together,
    so with several processes it is what the first one to ask has found."""
    if gpu not in _agreed:
        found = load(user_path(gpu))
        if jax.process_count() > 1:
            found = json.loads(_heap.claim(f"tuning/{slug(gpu)}", json.dumps(found)))
        _agreed[gpu] = found
    return _agreed[gpu]


def remember(gpu: str, choices: Table) -> None:
    """From now on, calls that are lowered take these choices."""
    _agreed[gpu] = {**_user_table(gpu), **choices}
