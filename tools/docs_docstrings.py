"""Griffe extension: constructors of linen modules, which are dataclasses without a decorator; and
what docstrings have of reStructuredText (left), as Markdown (right).

:func:`jflux.init`     a link to that entry of the API reference
:data:`APART`          code: not a public name
text::  + a block      text:  + a block
a, b: of both          (in Args) an entry for each
Raises (when so):      Raises:
Raises: As ...         (no list of exceptions) a note
====  ====             a table, whose columns are those of the rulers
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:func|class|data|meth|mod|attr):`~?([\w.]+)`")
_BLOCK = re.compile(r"::(?=\s*\n)")
_GROUP = re.compile(r"^( +)(\*{0,2}\w+(?:, \*{0,2}\w+)+): (.*(?:\n\1 +.*)*)", re.M)
_WHEN = re.compile(r"^Raises \([^)\n]*\):$", re.M)
_RAISES = re.compile(r"^Raises:(?=\n +As )", re.M)
_RULER = r"^=+(?: +=+)+$"
_TABLE = re.compile(rf"{_RULER}\n(.*)\n{_RULER}\n((?:.*\n)+?){_RULER}", re.M)


def _table(match: re.Match[str]) -> str:
    starts = [part.start() for part in re.finditer("=+", match[0].split("\n", 1)[0])]
    ends = [*starts[1:], None]

    def row(line: str) -> str:
        cells = [line[a:b].strip() for a, b in zip(starts, ends, strict=True)]
        return f"| {' | '.join(cells)} |"

    lines = [match[1], "", *match[2].splitlines()]
    rows = [row(line) for line in lines]
    rows[1] = "|---" * len(starts) + "|"
    return "\n".join(rows)


def as_markdown(text: str) -> str:
    """One docstring."""

    def group(match: re.Match[str]) -> str:
        return "\n".join(f"{match[1]}{name}: {match[3]}" for name in match[2].split(", "))

    def role(match: re.Match[str]) -> str:
        name = match[1]
        return f"[`{name}`][{name}]" if name.startswith("jflux.") else f"`{name}`"

    text = _RAISES.sub("Errors:", _WHEN.sub("Raises:", _GROUP.sub(group, text)))
    return _BLOCK.sub(":", _ROLE.sub(role, _TABLE.sub(_table, text)))


class Docstrings(griffe.Extension):
    """Rewrites every docstring when it has been read, and marks dataclasses."""

    def on_class_members(self, *, cls: griffe.Class, **_: Any) -> None:
        """Called by Griffe for each class when its members are known."""
        if cls.module.path == "jflux.nn.linen":
            names = ("dataclasses", "dataclass")
            decorator = griffe.ExprAttribute([griffe.ExprName(n, cls.module) for n in names])
            decorator.values[1].parent = decorator.values[0]
            cls.decorators.append(griffe.Decorator(decorator, lineno=None, endlineno=None))

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called by Griffe for each module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
