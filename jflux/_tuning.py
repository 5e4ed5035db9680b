"""Which configuration of the GPU kernels a call takes: what was measured for it, or the heuristic.

A tuning table is a dictionary from calls to choices, kept as JSON. Three are asked in turn: the
user's, which `jflux.tune` writes; the one that ships for this model of GPU; and, where neither
knows the call, the heuristic of cc/gpu/gemm_config.h decides.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import re
import tempfile
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from . import _heap, _jflux
from ._version import __version__

APART = "apart"  # instead of a choice: XLA's product and a collective, not the kernel


@dataclasses.dataclass(frozen=True)
class Choice:
    """A configuration of the GPU kernels.

    Attributes:
      tile_n: columns of a tile, which has 128 rows.
      cluster_m: CTAs one below the other that share the loading of w.
      group_m: rows of clusters that share a sweep over w; 0: all do, whichever rank's they are.
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
    """

    op: str
    ranks: int
    rows: int
    n: int
    k: int
    dtype: str
    transpose_rhs: bool

    def __str__(self) -> str:
        layout = "nk" if self.transpose_rhs else "kn"
        return (
            f"{self.op} {self.dtype} ranks={self.ranks} rows={self.rows} n={self.n} k={self.k} "
            f"w={layout}"
        )


Table = dict[str, Any]  # str(Key) -> [tile_n, cluster_m, group_m, splits] or "apart"


def compiled() -> list[Choice]:
    """The configurations that there are kernels for, each with a usual group."""
    return [Choice(*c) for c in _jflux.choices()]


def heuristic(key: Key, sm_count: int, link_gbps: float = 0) -> Choice:
    """For GPUs with so many multiprocessors, whose links carry so much (0: as an H200's)."""
    rows = key.rows // key.ranks
    return Choice(*_jflux.choose(key.op, key.ranks, 1, rows, key.k, key.n, sm_count, link_gbps))


def _is_possible(entry: Any) -> bool:
    """Whether an entry of a table is one, and the kernels can do it."""
    if not isinstance(entry, list):
        return entry == APART
    numbers = len(entry) == 4 and all(type(number) is int for number in entry)
    return numbers and _jflux.is_possible(tuple(entry))


def _possible(choices: Any, path: pathlib.Path) -> Table:
    """The entries that are possible, with a warning if there are others."""
    if not isinstance(choices, dict):
        raise ValueError(f"{path} is not a tuning table (it has no choices): delete it")
    possible = {key: entry for key, entry in choices.items() if _is_possible(entry)}
    if len(possible) < len(choices):
        warnings.warn(
            f"{path}: {len(choices) - len(possible)} of {len(choices)} entries are ignored, since "
            "no kernel takes them: run jflux.tune again for these calls",
            stacklevel=1,
        )
    return possible


def as_json(choice: Choice | str) -> Any:
    """As tables keep it."""
    return choice if isinstance(choice, str) else list(dataclasses.astuple(choice))


_forced: list[Choice | str] = []


@contextlib.contextmanager
def force(choice: Choice | str) -> Iterator[None]:
    """Calls that are lowered inside take this choice, whatever was measured."""
    _forced.append(choice)
    try:
        yield
    finally:
        _forced.pop()


def lookup(key: Key, gpu: str | None) -> Choice | str | None:
    """What is known of this call: a choice, :data:`APART`, or nothing, as where there is no GPU."""
    if _forced or gpu is None:
        return _forced[-1] if _forced else None
    for table in (_user_table(gpu), shipped_table(gpu)):
        found = table.get(str(key))
        if found is not None:
            return found if found == APART else Choice(*found)
    return None


def slug(gpu: str) -> str:
    return re.sub(r"\W+", "_", gpu.strip().lower())


@functools.cache
def shipped_table(gpu: str) -> Table:
    """The table that comes with jflux for this model of GPU; empty if there is none."""
    path = pathlib.Path(__file__).parent / "tables" / f"{slug(gpu)}.json"
    return _possible(json.loads(path.read_text())["choices"], path) if path.exists() else {}


# ---- The user's table ----------------------------------------------------------------------------


def user_path(gpu: str) -> pathlib.Path:
    """Where `jflux.tune` writes: $JFLUX_TUNING_DIR, else the user's cache directory."""
    base = os.environ.get("JFLUX_TUNING_DIR")
    if not base:
        cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        base = os.path.join(cache, "jflux")
    return pathlib.Path(base) / f"tuning-{slug(gpu)}.json"


def _writer() -> dict[str, str]:
    """Who writes a table: this version, and the tiles that it has kernels for."""
    tiles = " ".join(f"{c.tile_n}/{c.cluster_m}" for c in compiled())
    return {"jflux": __version__, "tiles": tiles}


def load(path: pathlib.Path) -> Table:
    """The choices in a file; none from a file of another version of jflux, or one with other tiles,
    which has not measured these."""
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is not a tuning table ({error}): delete it") from error
    if not isinstance(content, dict) or not _writer().items() <= content.items():
        return {}
    return _possible(content.get("choices"), path)


def store(path: pathlib.Path, choices: Table) -> None:
    """Adds choices to a file, in one step."""
    merged = {**load(path), **choices}
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as f:
        json.dump({**_writer(), "choices": dict(sorted(merged.items()))}, f, indent=1)
        f.write("\n")
    os.replace(f.name, path)


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


def key_of(op: str, world: int, per_rank: int, n: int, k: int, dtype: Any, nk: bool) -> Key:
    return Key(op, world, world * per_rank, n, k, np.dtype(dtype).name, nk)
