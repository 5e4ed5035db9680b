"""What GPUs would run, on a machine without any: random calls of all ops and their gradients,
lowered for GPUs of one host. A change of Python code that should leave GPUs' programs as they are
can be tried by comparing two of its results:

git stash; python tests/gpu_programs.py before.json; git stash pop
python tests/gpu_programs.py after.json --compare before.json

Says how many programs call which kernel, and then which programs differ.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import difflib
import json
import os
import pathlib
import random
import re
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

if __name__ == "__main__":  # pytest has its own devices
    os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp

import jflux
from jflux import _config, _heap, _native
from jflux._call import ffi_targets, gpu_code, plans, primitives
from jflux._call.plans import Machine
from jflux._ops.attention import _cudnn
from jflux._stress import calls, cases, programs

H100S = Machine("cuda", sm_count=132, link_gbps=320.0, heap_bytes=2 << 30, is_here=False)


class Library:
    """A native library that says that it has kernels for GPUs."""

    def __init__(self, lib: Any) -> None:
        self._lib = lib

    def __getattr__(self, name: str) -> Any:
        return (lambda: True) if name == "built_with_cuda" else getattr(self._lib, name)


@contextlib.contextmanager
def as_on_gpus() -> Iterator[None]:
    """Calls are planned and lowered as on one host of H100s. They cannot be run."""
    with contextlib.ExitStack() as stack:
        for module, name, value in (
            (_native, "lib", Library(_native.lib)),
            (_heap, "why_not_usable", lambda *_: None),
            (plans, "machine_of", lambda *_: H100S),
            (primitives, "levels_over", lambda *_: None),
            (gpu_code, "arch_here", lambda: gpu_code.HOPPER),
            (ffi_targets, "register_targets", lambda _: None),
            (_cudnn, "why_not", lambda *_: None),
            (_cudnn, "_is_recent_gpu", lambda: True),
        ):
            stack.enter_context(mock.patch.object(module, name, value))
        yield


def lowered(case: cases.Case, operands: Any, gradient: bool) -> str:
    """StableHLO of a call, or of the gradient of its first operand."""

    def loss(x: Any, *others: Any) -> Any:
        results = jax.tree.leaves(case.body(x, *others))
        return sum(jnp.sum(y.astype(jnp.float32)) for y in results)

    f = calls.per_device(case.mesh, jax.grad(loss) if gradient else case.body, check_vma=False)
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in operands]
    text = jax.jit(f).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    return re.sub(r"site = \d+", "site", text)  # a number of the process


def all_programs(count: int, seed: int = 0) -> Iterator[tuple[str, str]]:
    """(call, StableHLO) of so many random calls, each with and without jflux.config(always=True),
    and of the gradients of a third of them, as far as they have any."""
    specs = programs.ops_with_checked_kernels("cpu")
    for i in range(count):
        # What is drawn depends on it, too.
        with jflux.config(unchecked_kernels=True):
            found = list(_programs_of_call(i, seed, specs[i // 2 % len(specs)] if i % 2 else None))
        yield from found
        if i % 50 == 49:
            jax.clear_caches()


def _programs_of_call(i: int, seed: int, spec: Any) -> Iterator[tuple[str, str]]:
    rng = random.Random(f"{seed}/{i}")
    place = dataclasses.replace(programs._place(rng, [jax.devices()], "cpu"), platform="cuda")
    case = programs.draw_case(rng, place, spec)
    operands, _ = case.make(i)
    for always in (False, True):
        with as_on_gpus(), _config.override(always=always, strict=False):
            with calls.x64_if(*(a.dtype for a in operands)):
                for gradient in (False, True)[: 1 + (i % 3 == 0 and case.has_gradient)]:
                    what = f"{i} {'gradient of ' if gradient else ''}{case.name}, {always=}"
                    yield what, lowered(case, operands, gradient)


def kernels_of(text: str) -> set[str]:
    """Of jflux and of cuDNN, in a program."""
    return set(re.findall(r"@(jflux_\w+|__cudnn\$\w+)\(", text))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--compare", type=pathlib.Path, help="an earlier result")
    parser.add_argument("--calls", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    found = dict(all_programs(args.calls, args.seed))
    args.out.write_text(json.dumps(found))
    counts = collections.Counter(kernel for text in found.values() for kernel in kernels_of(text))
    for kernel, count in sorted(counts.items()):
        print(f"{count:6} {kernel}")
    print(f"{len(found):6} programs")
    if args.compare is None:
        return 0
    before = json.loads(args.compare.read_text())
    changed = [what for what in before.keys() | found.keys() if before.get(what) != found.get(what)]
    for what in sorted(changed):
        print(f"differs: {what}")
    for what in sorted(changed)[:1]:
        texts = [(r.get(what) or "").splitlines() for r in (before, found)]
        print("\n".join(difflib.unified_diff(*texts, "before", "after", lineterm="", n=0)))
    print(f"{len(changed)} of {len(found)} programs differ")
    return int(bool(changed))


if __name__ == "__main__":
    sys.exit(main())
