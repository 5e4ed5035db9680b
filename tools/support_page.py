"""Makes docs/support.md, "What runs where": each op's paths by format, GPU and hosts, as the code
plans them, and on what hardware each has been checked, as docs/verified.md has it.

python tools/support_page.py            writes the page
python tools/support_page.py --check    fails if the page is another
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import os
import pathlib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jflux
from jflux import _native
from jflux._call import gpu_code, plans, primitives
from jflux._call.forms import Call
from jflux._call.plans import Machine, Path, Plan
from jflux._ops._spec import OpSpec, all_ops
from jflux._ranks.node_levels import Levels
from jflux._tools import trials
from jflux._tools.trials import Trial

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGE, CHECKED = ROOT / "docs" / "support.md", ROOT / "docs" / "verified.md"

RANKS = 4
HALVES = ("float16", "bfloat16")
EIGHT_BITS = ("float8_e4m3fn", "float8_e5m2", "int8")
#: Formats of operands, by which the page names them: types, and whether they have scales (of any
#: kind).
FORMATS: dict[str, tuple[tuple[str, ...], bool]] = {
    "16 bits": (HALVES, False),
    "float32": (("float32",), False),
    "float64": (("float64",), False),
    "8 bits": (EIGHT_BITS, False),
    "8 bits with scales": (EIGHT_BITS, True),
}
HOPPER = Machine("cuda", sm_count=132, link_gbps=320.0)
PORTABLE = Machine("cuda", sm_count=108, link_gbps=320.0, arch=gpu_code.FLOAT8, no_record="")
#: Two nodes of two ranks each.
NODES = Levels(("tp",), (("tp", RANKS),), ((0, 1), (2, 3)))
Place = tuple[Machine, Levels | None]
MACHINES: dict[str, Place] = {
    "9.0": (HOPPER, None),
    "8.0 and later": (PORTABLE, None),
    "CPU": (Machine("cpu"), None),
}
PLACES = MACHINES | {"9.0, several hosts": (HOPPER, NODES)}

#: Which functions take the kernels that are of no op over ranks in `all_ops`.
OTHERS = {
    "activation_gradient": "gradients of products of experts with an activation",
    "all_gather_attention": "`attention`",
    "all_gather_grouped_matmul": "`moe.all_gather_grouped_matmul`",
    "decode_merge": "`flash_decode`, `attend_to_cache` over ranks",
    "flash_attention": "`attention`, `ulysses_attention`",
    "flash_attention_backward": "their gradients",
    "flash_decode": "`flash_decode`, `attend_to_cache`",
    "grouped_matmul": "`grouped_matmul`",
    "grouped_matmul_dw": "its gradient of the weights",
    "grouped_matmul_dw_scaled": "its gradient of the weights, in a recipe",
    "grouped_matmul_reduce_scatter": "`moe.grouped_matmul_reduce_scatter`",
    "grouped_matmul_scaled": "`grouped_matmul` of operands with scales",
    "latent_decode": "`flash_decode` of latent caches",
    "matmul": "`matmul` of operands with scales",
    "moe_combine": "`moe_combine` with partial sums",
    "moe_dispatch": "`moe_dispatch` with partial sums",
    "moe_gate": "`moe.top_k_softmax` and its like",
    "moe_gate_gradient": "their gradients",
    "moe_route": "`moe.route`",
    "moe_rows": "`moe.permute`, `moe.unpermute`",
    "quantize": "`quantize`",
}
#: Kernels whose plans take types that are no formats of operands.
TYPES = {"moe_route": "int32", "moe_dispatch": "16 bits, float32"}
#: The row of docs/verified.md that has an op, by a word of its first cell; others are products or
#: collectives.
ROWS = {"ragged_all_to_all": "ragged_all_to_all"}


# ---- What the code plans -------------------------------------------------------------------------


@contextlib.contextmanager
def planned_on(places: Mapping[str, Place]) -> Iterator[dict[str, list[tuple[str, Plan]]]]:
    """Calls that are lowered inside are planned for each place, and noted there: (op, plan)."""
    found: dict[str, list[tuple[str, Plan]]] = {name: [] for name in places}

    def plan_call(op: Any, avals: Any, avals_out: Any, params: Any, *_: Any) -> Any:
        for name, (machine, levels) in places.items() if not op.is_local else ():
            plan, _ = primitives.choose_on(op, Call(avals, params, levels), machine)
            found[name].append((op.name, plan))
        return primitives.Planned(plans.reference("planned"))

    with (
        mock.patch.object(primitives, "plan_call", plan_call),
        jflux.config(always=True, strict=False),
    ):
        yield found


def lower(spec: OpSpec, dtype: str, scales: str | None, mesh: Mesh) -> None:
    """Lowers a call of an op, of a size that suits every kernel."""
    size = 512 * mesh.size
    if spec.product is None:
        x = jax.ShapeDtypeStruct((size, size), np.dtype(dtype))
        f: Any = lambda x: spec.on(x, axis_name="tp", **spec.ways[0])  # noqa: E731
        operands, specs, y_spec = (x,), (P("tp"),), P("tp")
    else:
        trial = Trial(spec, transpose_rhs=True, scales=scales)
        *specs_, y_spec = trial.partition
        operands, specs = trial.shapes(size, size, size, mesh, np.dtype(dtype)), tuple(specs_)
        # Sums of 8 bits are no result without a type of their own.
        narrow = np.dtype(dtype).itemsize == 1 and scales is None
        f = trial.function(**{"preferred_element_type": "bfloat16"} if narrow else {})
    mapped = jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=y_spec, check_vma=False)
    with jax.enable_x64(True):
        jax.jit(mapped).lower(*operands)


WORDS = {
    Path.FUSED: "kernel", Path.TWO_LEVEL: "two-level", Path.REFERENCE: "reference",
    Path.DECOMPOSED: "XLA's product and a collective",
}  # fmt: skip


def paths_of(spec: OpSpec, dtype: str, scaled: bool, mesh: Mesh) -> dict[str, str]:
    """How calls of a type run in each of `PLACES`, with the scales that run best there: one of
    `WORDS`, in the order of `Path`."""
    last = len(Path) - 1
    best = dict.fromkeys(PLACES, last)
    for scales in trials.SCALES if scaled else (None,):
        with planned_on(PLACES) as calls:
            lower(spec, dtype, scales, mesh)
        for place, planned in calls.items():
            found = [list(Path).index(plan.path) for op, plan in planned if op == spec.name]
            best[place] = min([best[place], *found])
    return {place: WORDS[list(Path)[index]] for place, index in best.items()}


def cells(spec: OpSpec, mesh: Mesh) -> dict[str, str]:
    """In each of `PLACES`: formats by how they run."""
    by_path: dict[str, Any] = {place: collections.defaultdict(list) for place in PLACES}
    for name, (types, scaled) in FORMATS.items():
        if scaled and spec.product is None:
            continue
        of_types = {dtype: paths_of(spec, dtype, scaled, mesh) for dtype in types}
        for place, (machine, _) in PLACES.items():
            paths = {dtype: path[place] for dtype, path in of_types.items()}
            if len(set(paths.values())) == 1:  # else each type has a name of its own
                paths = {name: paths[types[0]]}
            elif scaled:
                paths = {f"{dtype} with scales": path for dtype, path in paths.items()}
            for named, path in paths.items():
                is_tf32 = named == "float32" and spec.product is not None and machine.on_gpus
                named = "float32 as TF32" if is_tf32 and path == "kernel" else named
                by_path[place][path].append(named)
    return {place: _in_words(paths) for place, paths in by_path.items()}


def _in_words(by_path: Mapping[str, Sequence[str]]) -> str:
    if len(by_path) == 1:
        (path,) = by_path
        return f"{path}: all"
    return "; ".join(f"{path}: {', '.join(names)}" for path, names in by_path.items())


def ops_over_ranks(mesh: Mesh) -> list[list[str]]:
    rows = []
    for name, spec in all_ops().items():
        rows.append([f"`{name}`", *cells(spec, mesh).values(), checked(name)])
    return rows


def types_of(op: str, platform: str) -> str:
    """Of the operands that a kernel takes, in words."""
    if op in TYPES:
        return TYPES[op] if platform == "cuda" or _native.dtypes(op, platform) else ""
    types = {dtype.name for dtype in _native.dtypes(op, platform)}
    found = []
    for name, (members, scaled) in FORMATS.items():
        if not scaled and types & set(members):
            few = [m for m in members if m in types]
            found.append(name if len(few) == len(members) else ", ".join(few))
    return ", ".join(found)


def other_kernels() -> list[list[str]]:
    rows = []
    for op, who in OTHERS.items():
        first, last = _native.lib.gpus(op)
        on_gpus = types_of(op, "cuda")
        cells = [
            on_gpus if first <= arch <= last else "none"
            for arch in (gpu_code.HOPPER, gpu_code.PORTABLE)
        ]
        rows.append([f"`{op}`", who, *cells, types_of(op, "cpu") or "none"])
    return rows


# ---- What has been checked -----------------------------------------------------------------------


def hardware() -> Mapping[str, dict[str, str]]:
    """The table "What has run" of docs/verified.md: by the first cell of a row, what has run by
    heading."""
    text = CHECKED.read_text()
    part = text[text.index("## What has run") :].split("\n## ")[0]
    lines = [line.strip().strip("|").split("|") for line in part.splitlines() if line[:1] == "|"]
    heading, _, *rows = [[c.strip() for c in line] for line in lines]
    return {row[0]: dict(zip(heading[1:], row[1:], strict=True)) for row in rows}


def checked(op: str) -> str:
    """The last day for each model of GPU, in one process and in several."""
    spec = all_ops()[op]
    kind = ROWS.get(op, "collectives" if spec.product is None else "products")
    (row,) = [row for name, row in hardware().items() if name.strip("`") == kind]
    last: dict[str, str] = {}
    for said in row.values():
        for gpu, day in re.findall(r"\b([A-Z]+\d+\w*): (\d\d-\d\d)", said):
            last[gpu] = max(day, last.get(gpu, ""))
    return ", ".join(f"{gpu} {last[gpu]}" for gpu in sorted(last, reverse=True))


# ---- The page ------------------------------------------------------------------------------------


def table(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heading, ["---"] * len(heading), *rows]
    return "\n".join(f"| {' | '.join(cells)} |".replace("|  |", "| |") for cells in lines)


PAGE_TEXT = """# What runs where

Made by `python tools/support_page.py` from what the code plans, and from [what has run](verified.md#what-has-run); do not edit.

| word | means |
|---|---|
| kernel | one kernel of jflux |
| two-level | XLA's collectives between nodes, jflux's kernels inside them ([hosts](guide/hosts.md)) |
| reference | no kernel takes it: the same function in `jax.lax`, with a log line that says why; in strict mode an error |
| 16 bits | float16, bfloat16 |
| 8 bits | float8_e4m3fn, float8_e5m2, int8; [with scales](guide/eight_bits.md): a `jflux.Scaled` |

A kernel here is one that a call of a fitting size and shape can take. Which calls take it is in [Dispatch](guide/dispatch.md).

## GPUs

{gpus}

{record}

## Ops over ranks

The last column has the days of 2026 on which values were last compared with float64, by GPU. What
these days do not cover, such as 8 bits on H100, is in [Not run yet](verified.md#not-run-yet).

{ops}

In the column "8.0 and later" {float8} are those of GPUs from 8.9 on; on others XLA multiplies them.
`precision` that forbids TF32 takes the reference. `halo_exchange` is XLA's collective-permutes, or with `unchecked_kernels` one
`all_to_all`. `dispatch_grouped_matmul` and `grouped_matmul_combine` are made of the ops here. `custom_call` and `symm.call` run
where their kernels do.

## Other kernels

Types of the operands that a kernel takes. Other calls, and all where there is none, are made of other kernels of this page and
XLA's operations: `moe_dispatch` of counting sorts, a `ragged_all_to_all` and gathers, `attention` of cuDNN's or XLA's.

{others}

Over several hosts:

| | |
|---|---|
| `attention` | keys are gathered, or travel in a ring; or heads are exchanged |
| `flash_decode`, `attend_to_cache` | parts are gathered, then merged |
| `moe_dispatch`, `moe_combine` | rows travel by the reference |
| `grouped_matmul`, `matmul`, `quantize`, `moe.route` | nothing travels |
| `custom_call`, `symm.call` | none |

## Ranks, hosts and processes

{ranks}

## Software

| | |
|---|---|
| Linux, Python | 3.11 and later |
| JAX | 0.10 to 0.12; GPU runs are of JAX 0.11.2 and Python 3.12 |
| build | nvcc of CUDA 12.5 or later |
| CUDA graphs | XLA captures kernels, in one process and in several |
"""  # noqa: E501


def gpus() -> str:
    hopper = f"sm_{gpu_code.HOPPER}a: wgmma, TMA, clusters"
    portable = f"sm_{gpu_code.PORTABLE}: mma.sync, cp.async"
    of_float8 = f"products of float8 sm_{gpu_code.FLOAT8}"
    state = "taken" if gpu_code.PORTABLE_IS_CHECKED else "after `python -m jflux.selftest`"
    return table(
        ["compute capability", "GPUs", "code", "taken", "checked on hardware"],
        [
            ["9.0", "H100, H200", hopper, "always", "yes"],
            ["9.0", "GH200", hopper, "always", "never run"],
            ["8.0, 8.6", "A100, A10, RTX 30", portable, state,
             "never run there; on Hopper, by its PTX"],
            ["8.9", "L4, L40S, RTX 40", f"{portable}; {of_float8}", state,
             "never run there; on Hopper, by its PTX"],
            ["10.0, 12.0, later", "B200, RTX 50",
             "the PTX of both, which the driver compiles. Nothing is written for tcgen05",
             state, "never run there; on Hopper"],
            ["below 8.0; AMD, TPU", "V100, T4, ...", "reference", "", "CPUs run the reference"],
        ],
    )  # fmt: skip


RECORD = """The [self-test](guide/dispatch.md#other-gpus) checks the kernels of GPUs other than Hopper on a machine, and lets it take them.
`jflux.config(unchecked_kernels=True)` takes them without it."""  # noqa: E501


def ranks() -> str:
    most = _native.MAX_RANKS
    return table(
        ["", "kernels", "checked on hardware"],
        [
            [f"2 to {most} ranks of a node", "yes", "2, 3 and 4 GPUs; 8 ranks that share 4"],
            [f"more than {most} ranks of a node", "no: reference", ""],
            ["GPUs joined by NVLink", "yes", "yes"],
            ["GPUs with peer access over PCIe",
             "yes; few CTAs send at a time, and without native atomics none of `signal_add`",
             "never run; plans and refusals on CPUs"],
            ["GPUs without peer access", "no: reference, and the reason", "on CPUs"],
            ["several hosts", "inside each: the column \"several hosts\" above",
             "two nodes on one host; never over a network"],
            ["one process for all GPUs", "yes", "yes"],
            ["one process for each GPU", "yes", "yes, 2 and 4"],
            ["several processes with several GPUs each", "yes", "as two nodes of two GPUs"],
            ["processes in different PID namespaces of a host", "a node each", "on CPUs"],
            ["processes with different versions of jflux", "no: reference", "on CPUs"],
        ],
    )  # fmt: skip


def page() -> str:
    """The page's text. Needs two devices."""
    mesh = Mesh(np.array(jax.devices()[:RANKS]), ("tp",))
    named = {name.removeprefix("jflux_") for name, _, _ in _native.lib.targets()}
    users = {op for op in named if _native.lib.gpus(op)[0] < gpu_code.PORTABLE}
    unknown = named - users - set(OTHERS) - set(all_ops())
    if unknown:
        raise AssertionError(f"OTHERS of tools/support_page.py lacks {sorted(unknown)}")
    heading = ["op", *PLACES, "checked"]
    others = ["kernel", "of", *MACHINES]
    rows = _native.FORMATS.values()
    late = [row.name for row in rows if row.portable_from > gpu_code.PORTABLE]
    return PAGE_TEXT.format(
        gpus=gpus(), record=RECORD, float8=" and ".join(late),
        ops=table(heading, ops_over_ranks(mesh)),
        others=table(others, other_kernels()), ranks=ranks(),
    )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    text = page()
    if args.check:
        return int(PAGE.read_text() != text)
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", RANKS)
    sys.exit(main())
