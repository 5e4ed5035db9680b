"""Reads the machine code of a build's kernels: python tools/kernel_code.py BUILD_FOLDER [--update].

Fails where the code is not what these tables say:

  kernel_stack.tsv  kernels that may have a stack, and its bytes at most; others have none. ptxas
                    spills registers there, and puts arrays there that are indexed by a number it
                    does not know. --update writes the file anew: look at what has grown
  MAIN_LOOPS        what the main loops of products and of attention multiply and load by, and how
                    often they may use the stack
  ARCHS, PTX        what the library is compiled for. A GPU of compute capability 8.x runs sm_80's
                    code as it is, and later ones what the driver makes of its PTX

Nothing is compiled: libjflux_core.so is read by cuobjdump, which comes with CUDA and with Triton.
Without one, a line that begins with NOTICE says so.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import pathlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence

PTX = ("sm_80", "sm_89")  # the second one of float8
ARCHS = (*PTX, "sm_90a")  # all have code for the last

STACK = pathlib.Path(__file__).with_name("kernel_stack.tsv")


@dataclasses.dataclass(frozen=True)
class MainLoop:
    """The main loop of a kernel: the shortest loops around the instruction that multiplies.

    Attributes:
      kernel: its name.
      arch: of its code.
      part: of the mangled name of the instance that is read: its operands' type.
      multiply: the instruction that multiplies.
      others: further instructions that the kernel has: how operands come.
      stack: loads and stores of the stack that a loop may have.
    """

    kernel: str
    arch: str
    part: str
    multiply: str
    others: tuple[str, ...] = ()
    stack: int = 0


_TMA, _ASYNC = ("UTMALDG",), ("LDGSTS", "LDSM")
MAIN_LOOPS = (
    MainLoop("AllGatherMatmulKernel", "sm_90a", "GemmConfigI13__nv_bfloat16", "HGMMA", _TMA),
    MainLoop("AllGatherMatmulKernel", "sm_90a", "GemmConfigI13__nv_fp8_e4m3", "QGMMA", _TMA),
    MainLoop("AllGatherMatmulKernel", "sm_90a", "GemmConfigIaL", "IGMMA", _TMA),
    MainLoop("MatmulReduceScatterKernel", "sm_90a", "GemmConfigI6__half", "HGMMA", _TMA),
    MainLoop("GroupedMatmulKernel", "sm_90a", "GemmConfigI13__nv_bfloat16", "HGMMA"),
    MainLoop("ForwardKernel", "sm_90a", "__nv_bfloat16", "HGMMA", _TMA),
    # Three in 64 multiplications, around the wait for rows.
    MainLoop("AllGatherMatmulKernel80", "sm_80", "GemmConfig80I13__nv_bfloat16", "HMMA", _ASYNC, 3),
    MainLoop("AllGatherMatmulKernel80", "sm_80", "GemmConfig80If", "HMMA", _ASYNC, 3),
    MainLoop("MatmulReduceScatterKernel80", "sm_80", "GemmConfig80I6__half", "HMMA", _ASYNC, 3),
    MainLoop("AllGatherMatmulKernel80", "sm_80", "GemmConfig80IaL", "IMMA", _ASYNC, 3),
    MainLoop("AllGatherMatmulKernel80", "sm_89", "GemmConfig80I13__nv_fp8_e4m3", "QMMA", _ASYNC, 3),
    MainLoop("MatmulReduceScatterKernel80", "sm_80", "GemmConfig80IaL", "IMMA", _ASYNC, 3),
    MainLoop("MatmulReduceScatterWireKernel80", "sm_80", "GemmConfig80I6__half", "HMMA", _ASYNC, 1),
    MainLoop("MatmulReduceScatterWireKernel80", "sm_80", "GemmConfig80IaL", "IMMA", _ASYNC),
    MainLoop("MatmulReduceScatterWireKernel80", "sm_89", "GemmConfig80I13__nv_fp8", "QMMA", _ASYNC),
    MainLoop("MatmulReduceScatterKernel80", "sm_89", "GemmConfig80I13__nv_fp8", "QMMA", _ASYNC, 3),
    MainLoop("MatmulKernel80", "sm_80", "GemmConfig80IaL", "IMMA", _ASYNC),
    MainLoop("MatmulKernel80", "sm_89", "GemmConfig80I13__nv_fp8_e4m3", "QMMA", _ASYNC),
    MainLoop("GroupedMatmulKernel80", "sm_80", "GemmConfig80I13__nv_bfloat16", "HMMA", _ASYNC),
    MainLoop("GroupedMatmulKernel80", "sm_80", "GemmConfig80IaL", "IMMA", _ASYNC),
    MainLoop("GroupedMatmulKernel80", "sm_89", "GemmConfig80I13__nv_fp8_e4m3", "QMMA", _ASYNC),
    # Four around the report of a wrong page.
    MainLoop("LatentDecodeKernel80", "sm_80", "__nv_bfloat16", "HMMA", _ASYNC, 4),
    MainLoop("ForwardKernel80", "sm_80", "ForwardShape80I13__nv_bfloat16Li128E", "HMMA", _ASYNC),
    # Around the wait for keys.
    MainLoop(
        "AllGatherAttentionKernel80", "sm_80", "ForwardShape80I6__halfLi128E", "HMMA", _ASYNC, 4
    ),
    MainLoop("GroupedMatmulDwKernel80", "sm_80", "GemmConfig80I13__nv_bfloat16", "HMMA", _ASYNC),
    MainLoop("BackwardKernel80", "sm_80", "BackwardShape80I13__nv_bfloat16Li128E", "HMMA", _ASYNC),
)
#: Loads and stores of the stack.
_OF_STACK = ("LDL", "STL")


# ---- What cuobjdump lists ------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Function:
    """A kernel's instance in the code of an architecture."""

    arch: str
    symbol: str
    stack: int

    @property
    def kernel(self) -> str:
        return name_of(self.symbol)


def name_of(symbol: str) -> str:
    """The name of a function, without its namespaces and template arguments."""
    name, rest = symbol, symbol.removeprefix("_Z").removeprefix("N")
    while found := re.match(r"\d+|S_|Sa|St", rest):
        if not found[0].isdigit():
            rest = rest[len(found[0]) :]
            continue
        end = len(found[0]) + int(found[0])
        name, rest = rest[len(found[0]) : end], rest[end:]
    return name


def functions(usage: str) -> list[Function]:
    """Of the listing of ``cuobjdump -res-usage``."""
    found, arch, symbol = [], "", ""
    for line in usage.splitlines():
        if match := re.match(r"arch = (\S+)", line):
            arch = match[1]
        elif match := re.match(r" Function (\S+):$", line):
            symbol = match[1]
        elif symbol and (match := re.search(r"\bSTACK:(\d+) .*\bLOCAL:(\d+)", line)):
            found.append(Function(arch, symbol, int(match[1]) + int(match[2])))
            symbol = ""
    return found


_INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+ )?([A-Z][\w.]*)(.*?);", re.M)


#: Its address, its name with what follows dots, its operands.
Instruction = tuple[int, str, str]


def code_of(sass: str) -> dict[str, list[Instruction]]:
    """Of the listing of ``cuobjdump -sass``: instructions by function."""
    parts = re.split(r"^\s+Function : (\S+)$", sass, flags=re.M)
    return {
        symbol: [(int(a, 16), name, rest) for a, name, rest in _INSTRUCTION.findall(text)]
        for symbol, text in zip(parts[1::2], parts[2::2], strict=True)
    }


def loops_around(code: Sequence[Instruction], multiply: str) -> Iterator[list[Instruction]]:
    """For each instruction that multiplies the shortest loop around it, from the target of a branch
    back to the branch; none twice. (Longer ones are jumps back from code behind the kernel's end.)
    """
    spans = []
    for address, name, rest in code:
        found = re.search(r"0x([0-9a-f]+)", rest)
        if name.split(".")[0] == "BRA" and found and int(found[1], 16) < address:
            spans.append((int(found[1], 16), address))
    shortest = set()
    for at in (address for address, name, _ in code if name.split(".")[0] == multiply):
        around = [span for span in spans if span[0] <= at <= span[1]]
        if around:
            shortest.add(min(around, key=lambda span: span[1] - span[0]))
    for first, last in sorted(shortest):
        yield [one for one in code if first <= one[0] <= last]


# ---- What is wrong -------------------------------------------------------------------------------


def most_stack(found: Iterable[Function]) -> dict[str, Function]:
    """By kernel the instance with the most."""
    most: dict[str, Function] = {}
    for function in found:
        if function.stack > 0 and function.stack > most.get(function.kernel, _NONE).stack:
            most[function.kernel] = function
    return dict(sorted(most.items()))


_NONE = Function("", "", 0)


def wrong_stacks(found: Iterable[Function], allowed: Mapping[str, int]) -> list[str]:
    most = most_stack(found)
    grown = [
        f"{kernel} has {one.stack} bytes of stack in {one.arch}, and {STACK.name} allows "
        f"{allowed.get(kernel, 0)}: {one.symbol}"
        for kernel, one in most.items()
        if one.stack > allowed.get(kernel, 0)
    ]
    return grown + [
        f"{STACK.name} has {kernel}, and no kernel of that name has a stack"
        for kernel in allowed
        if kernel not in most
    ]


def wrong_loops(loop: MainLoop, code: Sequence[Instruction]) -> list[str]:
    where = f"{loop.kernel} of {loop.arch}, {loop.part}"
    names = {name.split(".")[0] for _, name, _ in code}
    wrong = [f"{where}: no {name}" for name in (loop.multiply, *loop.others) if name not in names]
    loops = list(loops_around(code, loop.multiply))
    if loop.multiply in names and not loops:
        wrong.append(f"{where}: {loop.multiply} is in no loop")
    for body in loops:
        uses = sum(name.split(".")[0] in _OF_STACK for _, name, _ in body)
        if uses > loop.stack:
            wrong.append(
                f"{where}: the loop from {body[0][0]:#x} to {body[-1][0]:#x} loads and stores the "
                f"stack {uses} times, not {loop.stack}"
            )
    return wrong


def wrong_archs(found: Sequence[Function], elf: str, ptx: str) -> list[str]:
    """Of the listings of ``-res-usage``, ``-lelf`` and ``-lptx``."""
    wrong = []
    archs, ptx_archs = {f.arch for f in found}, re.findall(r"\.(sm_\w+)\.ptx", ptx)
    if archs != set(ARCHS):
        wrong.append(f"machine code is for {sorted(archs)}, not {sorted(ARCHS)}")
    if set(ptx_archs) != set(PTX):
        wrong.append(f"PTX is for {sorted(set(ptx_archs))}, not {sorted(PTX)}")
    of_last = {f.symbol for f in found if f.arch == ARCHS[-1]}
    for arch in PTX:
        files, with_ptx = len(re.findall(rf"\.{arch}\.cubin", elf)), ptx_archs.count(arch)
        if files != with_ptx:
            wrong.append(f"{files} files have code for {arch}, and {with_ptx} PTX")
        alone = {f.symbol for f in found if f.arch == arch} - of_last
        wrong += [f"{symbol} is for {arch} and not for {ARCHS[-1]}" for symbol in sorted(alone)]
    return wrong


# ---- The library ---------------------------------------------------------------------------------


def find_cuobjdump() -> str | None:
    """On the PATH, beside nvcc, or of Triton."""
    if on_path := shutil.which("cuobjdump"):
        return on_path
    folders = []
    if nvcc := shutil.which("nvcc"):
        folders.append(pathlib.Path(nvcc).resolve().parent)
    triton = importlib.util.find_spec("triton")
    if triton is not None and triton.origin is not None:
        folders.append(pathlib.Path(triton.origin).parent / "backends/nvidia/bin")
    found = (folder / "cuobjdump" for folder in folders)
    return next((str(path) for path in found if path.exists()), None)


class Library:
    """What cuobjdump lists of a library."""

    def __init__(self, path: pathlib.Path, cuobjdump: str):
        self.path, self.cuobjdump = path, cuobjdump
        self.functions = functions(self.listed("-res-usage"))

    def listed(self, *options: str) -> str:
        return subprocess.run(
            [self.cuobjdump, *options, str(self.path)], check=True, capture_output=True, text=True
        ).stdout

    def instance(self, loop: MainLoop) -> str | None:
        """The symbol of the first instance that a row means."""
        return next(
            (
                f.symbol
                for f in self.functions
                if (f.arch, f.kernel) == (loop.arch, loop.kernel) and loop.part in f.symbol
            ),
            None,
        )

    def wrong(self) -> list[str]:
        wrong = wrong_archs(self.functions, self.listed("-lelf"), self.listed("-lptx"))
        wrong += wrong_stacks(self.functions, read_stack(STACK.read_text()))
        for arch in ARCHS:
            chosen = {loop: self.instance(loop) for loop in MAIN_LOOPS if loop.arch == arch}
            symbols = ",".join(symbol for symbol in chosen.values() if symbol)
            code = code_of(self.listed("-sass", "-arch", arch, "-fun", symbols)) if symbols else {}
            for loop, symbol in chosen.items():
                if symbol is None:
                    wrong.append(f"no {loop.kernel} of {arch} has {loop.part} in its name")
                else:
                    wrong += wrong_loops(loop, code.get(symbol, []))
        return wrong


def read_stack(text: str) -> dict[str, int]:
    rows = (line.split("\t") for line in text.splitlines() if not line.startswith("#"))
    return {kernel: int(most) for kernel, most in rows}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--update", action="store_true")
    args = parser.parse_args()
    cuobjdump = find_cuobjdump()
    if cuobjdump is None:
        print("NOTICE: no cuobjdump is here: the kernels' machine code is not read")
        return 0
    library = Library(args.folder / "libjflux_core.so", cuobjdump)
    if args.update:
        rows = [f"{kernel}\t{f.stack}" for kernel, f in most_stack(library.functions).items()]
        STACK.write_text("\n".join(["# Written by tools/kernel_code.py --update.", *rows]) + "\n")
    wrong = library.wrong()
    for line in wrong:
        print(line)
    print(f"machine code of {len(library.functions)} functions: {len(wrong)} findings")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
