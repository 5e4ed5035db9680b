"""Checks that the roles of the first warpgroup of the GEMM kernels use no registers that they have
given away: python tools/role_registers.py libjflux_core.so

ptxas gives all threads of a kernel as many registers as the multiplying ones need. The first
warpgroup keeps kLoaderRegisters of them (cc/gpu/gemm_smem.cuh), and what it reads beyond them is
another thread's. Nothing says so when it is compiled; this reads the machine code, from where a
kernel gives registers away to where it ends, along all jumps. Needs cuobjdump and nvdisasm, which
come with CUDA.
"""

from __future__ import annotations

import argparse
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator

LIMIT = 56  # kLoaderRegisters
LABEL = re.compile(r"\.L_x_\d+")
ENDS = re.compile(r"(?:BRA|BRX|EXIT|RET|JMP)\b")  # without a predicate: what follows is not reached


def kernels(library: str) -> Iterator[tuple[str, list[str]]]:
    """Each function's name, and its instructions and labels."""
    with tempfile.TemporaryDirectory() as folder:
        extract = ["cuobjdump", "-xelf", "all", str(pathlib.Path(library).resolve())]
        subprocess.run(extract, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        for cubin in sorted(pathlib.Path(folder).iterdir()):
            listing = subprocess.run(
                ["nvdisasm", "-c", str(cubin)], check=True, capture_output=True, text=True
            ).stdout
            for part in listing.split("\n.text.")[1:]:
                name, _, body = part.partition(":\n")
                lines = (
                    re.sub(r"/\*[0-9a-f]{4,}\*/", "", line).strip() for line in body.split("\n")
                )
                yield name, [line for line in lines if line]


def highest_register(code: list[str]) -> tuple[int, str] | None:
    """The highest register after registers were given away, and the instruction that names it; None
    if none are."""
    labels = {line[:-1]: i for i, line in enumerate(code) if line.endswith(":")}
    todo = [i + 1 for i, line in enumerate(code) if "USETMAXREG.DEALLOC" in line]
    if not todo:
        return None
    seen, worst = set(), (0, "")
    while todo:
        i = todo.pop()
        if i in seen or i >= len(code) or "USETMAXREG" in code[i]:
            continue
        seen.add(i)
        line = code[i]
        registers = [int(r) + bool(wide) for r, wide in re.findall(r"\bR(\d+)\b(\.64)?", line)]
        worst = max(worst, (max(registers, default=0), line))
        targets = [] if line.endswith(":") else LABEL.findall(line)
        if line.startswith("BRX") and not targets:
            raise ValueError(f"unknown targets: {line}")
        todo += [labels[target] for target in targets]
        if not ENDS.match(line):
            todo.append(i + 1)
    return worst


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("library")
    found = {}
    for name, code in kernels(parser.parse_args().library):
        if highest := highest_register(code):
            found[name] = highest
    bad = {name: highest for name, highest in found.items() if highest[0] >= LIMIT}
    for name, (register, line) in bad.items():
        print(f"R{register} in {line!r} of {name}")
    most = max((register for register, _ in found.values()), default=0)
    print(f"{len(found)} kernels give registers away; R{most} is the highest that they use then")
    return bool(bad) or not found


if __name__ == "__main__":
    sys.exit(main())
