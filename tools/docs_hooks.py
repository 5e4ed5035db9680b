"""MkDocs hooks.

Links of docs/ to files outside of it, such as ../cc/core/signal.h, lead to the file on GitHub. A
site has no such page: there they lead to `repo_url`, if mkdocs.yml has one, and else they are text.

What lists all ops is made from the code, so that an op is documented where it is defined:

  {{ ops of jflux matmul }}       an entry for each op that jflux/__init__.py imports from
                                  jflux/_ops, if its name has "matmul"
  {{ ops of jflux others }}       for each of the others
  {{ ops of jflux.reference }}    for each reference
  {{ table of ops }}              the table in README.md
"""

from __future__ import annotations

import os
import pathlib
import posixpath
import re
from typing import Any

_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(((?:\.\./)+[^)#\s]+)(#[^)\s]*)?\)")


_LIST = re.compile(r"^{{ ops of ([\w.]+)(?: (matmul|others))? }}$", re.M)
_IMPORT = re.compile(r"^from \._ops\.\w+ import \w+ as (\w+)$", re.M)
_FILES = {"jflux": "jflux/__init__.py", "jflux.reference": "jflux/reference.py"}
_ROOT = pathlib.Path(__file__).parents[1]


def _entries(request: re.Match[str]) -> str:
    names = _IMPORT.findall((_ROOT / _FILES[request[1]]).read_text())
    if request[2]:
        names = [name for name in names if ("matmul" in name) == (request[2] == "matmul")]
    return "\n\n".join(f"::: {request[1]}.{name}" for name in names)


def _table(folder: str) -> str:
    """The table of README.md whose heading is Ops, for a page in `folder` of docs/."""
    section = (_ROOT / "README.md").read_text().split("\n## Ops\n")[1].split("\n## ")[0]
    table = "\n".join(line for line in section.splitlines() if line.startswith("|"))
    return table.replace("](docs/", f"]({posixpath.relpath('.', folder or '.')}/")


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Called by MkDocs for each page."""
    folder = posixpath.dirname(page.file.src_uri)
    markdown = _LIST.sub(_entries, markdown).replace("{{ table of ops }}", _table(folder))
    root = os.path.basename(config["docs_dir"])

    def outside(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(root, folder, link[2]))
        if path.split("/")[0] == root:
            return link[0]
        if not config["repo_url"]:
            return link[1]
        return f"[{link[1]}]({config['repo_url'].rstrip('/')}/blob/main/{path}{link[3] or ''})"

    return _LINK.sub(outside, markdown)
