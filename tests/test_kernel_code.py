"""tools/kernel_code.py: what listings of a library's machine code say, and what they must not."""

import importlib.util
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[1] / "tools"
GEMM = "_ZN5jflux13GatherKernel8INS_12GemmConfig80I6__halfLb0EEEEEvNS_4ArgsE"
SORT = (
    "_ZN5jflux44_GLOBAL__N__8b5fd0a4_11_moe_gate_cu_2367707510SortKernelI6__halfLi32EEEvNS0_4ArgsE"
)


@pytest.fixture(scope="module")
def code():
    if not TOOLS.exists():
        pytest.skip("the tools are not here")
    spec = importlib.util.spec_from_file_location("kernel_code", TOOLS / "kernel_code.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def usage(*functions):
    """As cuobjdump -res-usage prints (arch, symbol, stack)."""
    lines = []
    for arch, symbol, stack in functions:
        lines += [
            "", "Fatbin elf code:", "================", f"arch = {arch}", "",
            "Resource usage:", " Common:", "  GLOBAL:0", f" Function {symbol}:",
            f"  REG:168 STACK:{stack} SHARED:1024 LOCAL:0 CONSTANT[0]:4608 TEXTURE:0",
        ]  # fmt: skip
    return "\n".join(lines)


#: As cuobjdump -sass prints a kernel: its main loop is from 0x20 to 0x60, and a wait behind the end
#: jumps back into it.
SASS = f"""
	code for sm_80
		Function : {GEMM}
	.headerflags    @"EF_CUDA_SM80"
        /*0000*/                   STL [R1+0x8], R4 ;                       /* 0x00000004ff097424 */
                                                                            /* 0x000fe200078e00ff */
        /*0010*/                   LDGSTS.E.BYPASS.128 [R3], [R4.64] ;      /* 0x00000004ff097424 */
        /*0020*/                   LDSM.16.M88.4 R8, [R5] ;                 /* 0x00000004ff097424 */
        /*0030*/               @P0 BRA 0x90 ;                               /* 0x00000004ff097424 */
        /*0040*/                   HMMA.16816.F32 R12, R8, R10, R12 ;       /* 0x00000004ff097424 */
        /*0050*/                   HMMA.16816.F32 R16, R8, R11, R16 ;       /* 0x00000004ff097424 */
        /*0060*/              @!P1 BRA 0x20 ;                               /* 0x00000004ff097424 */
        /*0070*/                   LDL R0, [R1+0x8] ;                       /* 0x00000004ff097424 */
        /*0080*/                   EXIT ;                                   /* 0x00000004ff097424 */
        /*0090*/                   STL [R1+0x8], R4 ;                       /* 0x00000004ff097424 */
        /*00a0*/                   BRA 0x40 ;                               /* 0x00000004ff097424 */
		..........
"""


def test_names_of_kernels(code):
    assert code.name_of(GEMM) == "GatherKernel8"
    assert code.name_of(SORT) == "SortKernel"
    assert code.name_of("_ZN5jflux4FillENS_4ArgsE") == "Fill"
    assert code.name_of("plain") == "plain"


def test_a_stack_is_allowed_by_name(code):
    found = code.functions(usage(("sm_80", GEMM, 24), ("sm_90a", GEMM, 40), ("sm_90a", SORT, 0)))
    assert [f.arch for f in found] == ["sm_80", "sm_90a", "sm_90a"]
    assert [(f.kernel, f.stack) for f in found[1:]] == [("GatherKernel8", 40), ("SortKernel", 0)]
    assert code.wrong_stacks(found, {"GatherKernel8": 40}) == []
    (grown,) = code.wrong_stacks(found, {"GatherKernel8": 32})
    assert "40 bytes of stack in sm_90a" in grown and "allows 32" in grown and GEMM in grown
    (unknown,) = code.wrong_stacks(found, {})
    assert "allows 0" in unknown
    stale = code.wrong_stacks(found, {"GatherKernel8": 40, "SortKernel": 8, "Gone": 8})
    assert [line.split(",")[0].split(" has ")[1] for line in stale] == ["SortKernel", "Gone"]


@pytest.mark.parametrize(
    "was, doctored, wrong",
    [
        ("", "", None),
        ("LDSM.16.M88.4", "LDS.128", "no LDSM"),
        ("HMMA.16816.F32", "FFMA", "no HMMA"),
        ("LDSM.16.M88.4 R8, [R5]", "LDSM R8, [R5] ;\n /*0028*/  LDL.64 R8, [R1+0x10]", "1 times"),
        # Then the jump from behind the end makes the only loop.
        ("BRA 0x20", "BRA 0x80", "from 0x40 to 0xa0 loads and stores the stack 2 times"),
    ],
)
def test_a_main_loop(code, was, doctored, wrong):
    loop = code.MainLoop("GatherKernel8", "sm_80", "80I6__half", "HMMA", ("LDGSTS", "LDSM"))
    sass = SASS.replace(was, doctored) if was else SASS
    found = code.wrong_loops(loop, code.code_of(sass)[GEMM])
    if wrong is None:
        assert found == []
    else:
        assert len(found) == 1 and wrong in found[0]


def test_multiplications_outside_any_loop(code):
    loop = code.MainLoop("GatherKernel8", "sm_80", "", "HMMA")
    straight = "\n".join(line for line in SASS.splitlines() if "BRA" not in line)
    (found,) = code.wrong_loops(loop, code.code_of(straight)[GEMM])
    assert "HMMA is in no loop" in found


def test_architectures(code, monkeypatch):
    monkeypatch.setattr(code, "PTX", ("sm_80",))  # sm_89 is read in the same way
    monkeypatch.setattr(code, "ARCHS", ("sm_80", "sm_90a"))
    both = code.functions(usage(("sm_80", GEMM, 0), ("sm_90a", GEMM, 0), ("sm_90a", SORT, 0)))
    elf = "ELF file    1: x.1.sm_80.cubin\nELF file    2: x.2.sm_90.cubin\n"
    ptx = "PTX file    1: x.1.sm_80.ptx\n"
    assert code.wrong_archs(both, elf, ptx) == []
    assert "PTX is for []" in code.wrong_archs(both, elf, "")[0]
    assert "PTX is for ['sm_90a']" in code.wrong_archs(both, elf, ptx.replace("80", "90a"))[0]
    assert "2 files" in code.wrong_archs(both, elf + "ELF file 3: y.1.sm_80.cubin", ptx)[0]
    of_86 = code.functions(usage(("sm_86", GEMM, 0), ("sm_90a", GEMM, 0)))
    assert "machine code is for ['sm_86', 'sm_90a']" in code.wrong_archs(of_86, elf, ptx)[0]
    alone = code.functions(usage(("sm_80", GEMM, 0), ("sm_90a", SORT, 0)))
    assert code.wrong_archs(alone, elf, ptx) == [f"{GEMM} is for sm_80 and not for sm_90a"]


def test_the_tables(code):
    stack = code.read_stack(code.STACK.read_text())
    assert stack == dict(sorted(stack.items())) and min(stack.values()) > 0
    assert {loop.arch for loop in code.MAIN_LOOPS} == set(code.ARCHS)


def test_without_cuobjdump_a_notice(code, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(code, "find_cuobjdump", lambda: None)
    monkeypatch.setattr(sys, "argv", ["kernel_code", str(tmp_path)])
    assert code.main() == 0 and capsys.readouterr().out.startswith("NOTICE: no cuobjdump")
