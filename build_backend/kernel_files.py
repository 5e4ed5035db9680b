"""The files of the library's GPU kernels, by the GPUs that they are for. Used by CMake and Bazel.

kernel_files.py GPUS FOLDER prints those for GPUS, hopper, portable or float8, between semicolons.
It first writes the files of instances to FOLDER: what rows of cc/ops/registry.cc say.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
REGISTRY = ROOT / "cc/ops/registry.cc"

_ROW = re.compile(r"^ *FOLDER\((\w+), k(\w+), (.*)\)$")
_INSTANCE = re.compile(r"INSTANCE\((\w+), (\w+)\)")
_TEXT = """\
// Written by build_backend/kernel_files.py.
#include "ops/{op}/{op}_sm90.cuh"

template struct jflux::GemmFamily<jflux::{name}Instances, jflux::DType::k{format}, {layout}>;
"""
# Names of files for some GPUs alone, of a folder for others too.
_ONLY = {"_sm80": "portable", "_sm89": "float8", "_sm90": "hopper"}
# What the layouts of w are to GemmFamily.
_LAYOUTS = {
    "kn": "false",
    "nk": "true",
    "nk_blocks": "true, jflux::Scales::kOfBlocks",
    "nk_quantizing": "true, jflux::Scales::kOfSums, true",
    "nk_blocks_quantizing": "true, jflux::Scales::kOfBlocks, true",
}


def rows() -> Iterator[tuple[str, str, list[tuple[str, str]]]]:
    """Of each folder of cc/ops its ops' name, GPUs, and instances: format and layout of w."""
    table = re.sub(r" *\\\n( {4,})?", lambda found: "" if found[1] else "\n", REGISTRY.read_text())
    for line in table.splitlines():
        if row := _ROW.match(line):
            yield row[1], row[2].lower(), _INSTANCE.findall(row[3])


def kernel_files(folder: Path, wanted: str) -> Iterator[Path]:
    """The .cu files for GPUs of this kind; instances are written to `folder`."""
    for path in sorted(ROOT.glob("cc/runtime/*.cu")):
        if _ONLY.get(path.stem[-5:], "portable") == wanted:
            yield path
    for name, gpus, instances in rows():
        op = re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()
        for path in sorted(ROOT.glob(f"cc/ops/{op}/*.cu")):
            if _ONLY.get(path.stem[-5:], gpus) == wanted:
                yield path
        for number, layout in instances if wanted == "hopper" else ():
            path = folder / f"{op}_{number.lower()}_{layout}_sm90.cu"
            text = _TEXT.format(op=op, name=name, format=number, layout=_LAYOUTS[layout])
            if not path.exists() or path.read_text() != text:  # else it would be compiled again
                folder.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
            yield path


if __name__ == "__main__":
    print(*kernel_files(Path(sys.argv[2]), sys.argv[1]), sep=";")
