"""Imported first: in a checkout, where Python finds the source folder, `import jflux` is the
installed jflux.

``pip install .`` puts the native library beside the installed copy, not beside the sources. Python
started in the checkout looks there first, as ``python -m jflux.doctor`` and a program on standard
input do. If the installed copy has the same Python files, this package becomes that one. Otherwise
the import says what to do: no code may run that is not what lies here.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import PathFinder
from pathlib import Path

_NATIVE = "_jflux"


def use_installed(name: str) -> None:
    """Has the package `name`, which is being imported, take its modules from where its native
    library is.

    Raises:
      ImportError: there is none, or other code is there; says what to do.
    """
    package = sys.modules[name]
    if importlib.util.find_spec(f"{name}.{_NATIVE}") is not None:
        return
    here = Path(package.__path__[0]).resolve()
    installed = _installed(name, here)
    if installed is None:
        raise ImportError(
            f"jflux's native library is missing in {here}, and no other jflux is installed for "
            f"{sys.executable}: `pip install .` in a checkout"
        )
    for source in sorted(here.rglob("*.py")):
        relative = source.relative_to(here)
        other = installed / relative
        if not other.is_file() or other.read_bytes() != source.read_bytes():
            raise ImportError(
                f"{here} is a checkout, and the jflux that is installed, {installed}, has another "
                f"{relative}: leave this folder to use that one, or `pip install .` here again"
            )
    package.__path__[:] = [str(installed)]
    package.__file__ = str(installed / "__init__.py")


def _installed(name: str, here: Path) -> Path | None:
    """The folder of the first package of this name with a native library, other than `here`."""
    for entry in sys.path:
        spec = PathFinder.find_spec(name, [entry])
        if spec is None or spec.origin is None:  # a folder without code
            continue
        for folder in spec.submodule_search_locations or ():
            if Path(folder).resolve() != here and PathFinder.find_spec(
                f"{name}.{_NATIVE}", [folder]
            ):
                return Path(folder).resolve()
    return None


use_installed(__name__.rpartition(".")[0])
