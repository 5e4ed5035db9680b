"""MkDocs hooks.

The site's name has the version of jflux/_version.py, and the site has two files of the repository's
root as pages: CHANGELOG.md and CONTRIBUTING.md. Experiments and decisions, which mkdocs.yml keeps
out of the navigation, lead back to their index page.

Links of docs/ to other files outside of it, such as ../cc/core/signal.h, lead to the file on
GitHub. A site has no such page: there they lead to `repo_url`, if mkdocs.yml has one, and else they
are text.

What lists all ops is made from the code, so that an op is documented where it is defined:

  {{ ops of jflux matmul }}       an entry for each op that jflux/__init__.py imports from
                                  jflux/_ops/products or collectives, if its name has "matmul"
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

from mkdocs.structure.files import File

_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)#:\s]+)(#[^)\s]*)?\)")

_LIST = re.compile(r"^{{ ops of ([\w.]+)(?: (matmul|others))? }}$", re.M)
_IMPORT = re.compile(r"^from \._ops\.(?:products|collectives)\.\w+ import \w+ as (\w+)$", re.M)
_FILES = {"jflux": "jflux/__init__.py", "jflux.reference": "jflux/reference.py"}
_ROOT = pathlib.Path(__file__).parents[1]
#: Files of the repository's root, and their pages.
_PAGES = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
#: Folders whose pages are in no navigation but that of their index page.
_OUT_OF_NAV = ("decisions", "experiments")


def on_config(config: Any) -> None:
    """Called by MkDocs when it has read mkdocs.yml."""
    version = re.search(r'"(.+)"', (_ROOT / "jflux" / "_version.py").read_text())
    config.site_name += f" {version[1]}"


def on_files(files: Any, config: Any) -> None:
    """Called by MkDocs when it has found the pages."""
    for name, page in _PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(_ROOT / name)))


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
    here = posixpath.dirname(page.file.src_uri)
    markdown = _LIST.sub(_entries, markdown).replace("{{ table of ops }}", _table(here))
    docs = os.path.basename(config["docs_dir"])
    folder = "" if page.file.src_uri in _PAGES.values() else posixpath.join(docs, here)

    def moved(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, link[2]))
        if path in _PAGES or path.startswith(f"{docs}/"):
            target = _PAGES.get(path, posixpath.relpath(path, docs))
            return f"[{link[1]}]({posixpath.relpath(target, here or '.')}{link[3] or ''})"
        if not config["repo_url"]:
            return link[1]
        return f"[{link[1]}]({config['repo_url'].rstrip('/')}/blob/main/{path}{link[3] or ''})"

    markdown = _LINK.sub(moved, markdown)
    if here in _OUT_OF_NAV and page.file.name != "index":
        title, rest = markdown.split("\n", 1)
        markdown = f"{title}\n\n[All {here}](index.md)\n{rest}"
    return markdown
