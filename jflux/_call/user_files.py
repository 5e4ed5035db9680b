"""Files that jflux keeps in the user's cache directory: tuning tables, and what
`python -m jflux.selftest` has found."""

from __future__ import annotations

import json
import os
import pathlib
import re
import tempfile
from typing import Any


def folder() -> pathlib.Path:
    """$JFLUX_TUNING_DIR, else jflux's folder in the user's cache directory."""
    base = os.environ.get("JFLUX_TUNING_DIR")
    if not base:
        cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        base = os.path.join(cache, "jflux")
    return pathlib.Path(base)


def slug(gpu: str) -> str:
    """A GPU's name as files have it."""
    return re.sub(r"\W+", "_", gpu.strip().lower())


def write_json(path: pathlib.Path, content: Any) -> None:
    """Writes a file, in one step.

    Raises:
      OSError: it cannot be written. What was there stays.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as f:
        json.dump(content, f, indent=1)
        f.write("\n")
    try:
        os.replace(f.name, path)
    except OSError:
        pathlib.Path(f.name).unlink(missing_ok=True)
        raise
