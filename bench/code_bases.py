"""Times training steps of models of other libraries, with jflux and without; the table comes last.

python -m bench.code_bases --ranks 4 --out bench/results/4xh100_code_bases.json [--only gemma]

The models are the samples of docs/guide/code_bases.md, as wide as Llama-3-8B, in bfloat16: loss and
gradients of 4 sequences of 2048 tokens over all GPUs. A library that is not installed, or needs an
older JAX, is left out.

    llama  two MLPs of Equinox, Haiku, Haliax and EasyDeL; two decoder layers of Levanter and gemma
    tiny   the samples as they are, but on one axis, for a machine without GPUs

    S            the library alone: XLA splits its products, of weights that lie as J's
    S scheduled  the same with the latency-hiding scheduler
    R            J's program with XLA's collectives (`jflux.config(fused=False)`)
    J            with jflux

Losses and gradients are compared before anything is timed. MiB are what a step takes beside
weights, gradients and the heap.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import pathlib
import re
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

import jflux
from jflux._tools import trials

from . import command
from .xla import SCHEDULED

PAGE = pathlib.Path(__file__).resolve().parents[1] / "docs" / "guide" / "code_bases.md"
#: By section of the page: what it imports, and the name of its distribution.
LIBRARIES = {
    "Equinox": ("equinox", "equinox"),
    "Haiku": ("haiku", "dm-haiku"),
    "Haliax": ("haliax", "haliax"),
    "Levanter": ("levanter", "levanter"),
    "gemma": ("gemma", "gemma"),
    "EasyDeL": ("easydel", "easydel"),
}
#: Those that run with JAX 0.10 alone.
OLDER_JAX = ("Haliax", "Levanter")


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What the page's first block calls so, in capitals, in this order."""

    data: int = 1
    batch: int = 4
    length: int = 32
    width: int = 64
    hidden: int = 256
    heads: int = 8
    kv_heads: int = 4
    dtype: str = "float32"

    @property
    def tolerances(self) -> tuple[float, float]:
        """Of the loss, and of all gradients together, relative to their length."""
        return (2e-2, 5e-2) if self.dtype == "bfloat16" else (2e-6, 2e-5)


LISTS = {
    "llama": Sizes(1, 4, 2048, 4096, 14336, 32, 8, "bfloat16"),
    "tiny": Sizes(),
}


def blocks() -> dict[str, list[str]]:
    """Samples of the page's sections that have some; "": those before the first."""
    title, *sections = re.split(r"^## ", PAGE.read_text(), flags=re.M)
    parts = {"": title} | {one.partition("\n")[0]: one for one in sections}
    found = {
        name: re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)
        for name, text in parts.items()
    }
    return {name: samples for name, samples in found.items() if samples}


def with_sizes(first_block: str, sizes: Sizes, ranks: int) -> str:
    """The page's first block, of a model of these sizes on so many devices."""
    values = ", ".join(
        f"jnp.{value}" if name == "dtype" else str(value)
        for name, value in dataclasses.asdict(sizes).items()
    )
    names = ", ".join(name.upper() for name in dataclasses.asdict(sizes))
    text, count = re.subn(rf"^{names} = .*$", f"{names} = {values}", first_block, flags=re.M)
    text, devices = re.subn(r"jax\.devices\(\)", f"jax.devices()[:{ranks}]", text)
    if (count, devices) != (1, 1):
        raise RuntimeError(f"{PAGE.name} has other sizes than {names}")
    return text


def with_steps(sample: str) -> str:
    """A sample whose lines ``want = f(x)`` and ``found = f(x)`` hand f and x to ``measured``."""
    line, other = r"^( *)(want|found) = (.+)\(([^()]*)\)$", r'\1\2 = measured("\2", \3, \4)'
    text, count = re.subn(line, other, sample, flags=re.M)
    if count != 2:
        raise RuntimeError(f"a sample of {PAGE.name} has {count} steps, not two")
    return text


class Steps:
    """What a sample's two steps are compiled to.

    Attributes:
      programs: by contestant.
      args: what they are called with.
      calls: jflux's ops in J, and the path of each.
    """

    def __init__(self) -> None:
        self.programs: dict[str, Any] = {}
        self.args: tuple[Any, ...] = ()
        self.calls: list[tuple[str, str]] = []

    def __call__(self, name: str, f: Any, *args: Any) -> Any:
        """Compiles a step for its contestants, and runs the first one."""
        self.args = args
        if name == "want":
            lowered = f.lower(*args)
            self.programs["S"] = lowered.compile()
            if jax.default_backend() == "gpu":
                self.programs["S scheduled"] = lowered.compile(compiler_options=SCHEDULED)
            return self.programs["S"](*args)
        with jflux.explaining() as calls:
            self.programs["J"] = f.lower(*args).compile()
        self.calls = [(call.op, str(call.plan.path)) for call in calls]
        with jflux.config(fused=False):
            self.programs["R"] = f.lower(*args).compile()
        return self.programs["J"](*args)


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes modules of packages that are not installed: whatever is imported from them is a class
    that can be called, and has every attribute."""

    class _Type(type):
        def __getattr__(cls, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return cls

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:  # a decorator returns what it is given
            return args[0] if len(args) == 1 and callable(args[0]) else cls

    _Anything = _Type("Anything", (), {})

    def __init__(self, packages: tuple[str, ...]) -> None:
        self.packages = packages

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if any(f"{name}.".startswith(f"{package}.") for package in self.packages):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__getattr__ = functools.partial(getattr, self._Anything)  # type: ignore[method-assign]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


#: EasyDeL imports the first two and gemma the others, and the samples use none.
UNUSED = ("ray", "google.cloud", "tensorflow", "clu")


def distance(found: Any, want: Any) -> tuple[float, float]:
    """Of (loss, gradients): the losses', and the gradients' by the length of those wanted."""

    @jax.jit
    def squares(found: list[jax.Array], want: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
        pairs = zip(found, want, strict=True)
        wide = [(a.astype(jnp.float32), b.astype(jnp.float32)) for a, b in pairs]
        of_both = [jnp.stack([jnp.sum((a - b) ** 2), jnp.sum(b**2)]) for a, b in wide]
        apart, whole = sum(of_both, jnp.zeros(2))
        return apart, whole

    def arrays(tree: Any) -> list[jax.Array]:
        return [a for a in jax.tree.leaves(tree) if isinstance(a, jax.Array)]

    apart, whole = squares(arrays(found[1]), arrays(want[1]))
    loss = abs(float(found[0]) / float(want[0]) - 1)
    return loss, float(jnp.sqrt(apart / whole))


def temporary(program: Any) -> float:
    """MiB, of a compiled step: JAX's, or one that a library wraps."""
    program = getattr(program, "compiled", program)
    return float(program.memory_analysis().temp_size_in_bytes) / 2**20


STEPS = 3  # in a row; the host is ahead of the GPUs


def _repeated(program: Any) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        for _ in range(STEPS):
            out = program(*args)
        return out

    return run


def step_of(library: str, sizes: Sizes, ranks: int) -> tuple[Steps, Any, Any]:
    """Runs a sample: its two steps compiled, and the (loss, gradients) of each."""
    texts, steps = blocks(), Steps()
    ((first,), (sample,)) = texts[""], texts[library]
    names: dict[str, Any] = {"__name__": "sample", "measured": steps, "print": lambda *_: None}
    exec(with_sizes(first, sizes, ranks), names)
    exec(with_steps(sample), names)
    return steps, names["want"], names["found"]


def measure(library: str, sizes: Sizes, ranks: int, rounds: int) -> dict[str, Any]:
    """One row of the table.

    Raises:
      RuntimeError: the model with jflux computes something else, or takes no op.
    """
    steps, want, found = step_of(library, sizes, ranks)
    loss, gradients = distance(found, want)
    if not (loss <= sizes.tolerances[0] and gradients <= sizes.tolerances[1]):
        raise RuntimeError(f"{library}: losses are {loss:.2g} apart, gradients {gradients:.2g}")
    if not any(path == "fused" for _, path in steps.calls):
        raise RuntimeError(f"{library}: no op of jflux is taken: {steps.calls}")
    row = {
        "case": {"name": library} | dataclasses.asdict(sizes),
        "version": importlib.metadata.version(LIBRARIES[library][1]),
        "loss": {"S": float(want[0]), "J": float(found[0])},
        "error": gradients,
        "calls": steps.calls,
        "MiB": {name: temporary(program) for name, program in steps.programs.items()},
    }
    del want, found
    runs = {
        name: trials.run_of(_repeated(program), *steps.args)
        for name, program in steps.programs.items()
    }
    timings = trials.interleave(runs, STEPS, rounds)
    return row | {name: dataclasses.asdict(timing) for name, timing in timings.items()}


def why_not(library: str) -> str:
    """Why a library cannot be timed here; empty: it can."""
    if importlib.util.find_spec(LIBRARIES[library][0]) is None:
        return "is not installed"
    if library in OLDER_JAX and jax.__version_info__ >= (0, 11):
        return f"does not run with JAX {jax.__version__}"
    return ""


XLA = ("S", "S scheduled", "R")
HEADING = (
    "library | version | S ms | S scheduled ms | R ms | J ms | J / S | J / best | MiB, S | MiB, R "
    "| MiB, J | loss, S | loss, J | gradients apart | fused | not fused"
)


def _listed(row: Mapping[str, Any], fused: bool) -> str:
    """Such as "2 all_gather_matmul": what is alike is one call."""
    found = collections.Counter(op for op, path in row["calls"] if (path == "fused") == fused)
    return ", ".join(f"{count} {op}" for op, count in found.items())


def cells(row: Mapping[str, Any]) -> list[str]:
    """One row of the table under HEADING."""
    ms = {name: row[name]["median"] * 1e3 for name in (*XLA, "J") if name in row}
    best = min(ms[name] for name in XLA if name in ms)
    return [
        row["case"]["name"], row["version"],
        *(f"{ms[name]:.2f}" if name in ms else "" for name in (*XLA, "J")),
        f"{ms['J'] / ms['S']:.3f}", f"{ms['J'] / best:.3f}",
        *(f"{row['MiB'][name]:.0f}" for name in "SRJ"),
        *(f"{row['loss'][name]:.5f}" for name in "SJ"), f"{row['error']:.1e}",
        _listed(row, fused=True), _listed(row, fused=False),
    ]  # fmt: skip


TABLE = command.Table(
    "code_bases", lambda row: row["case"]["name"], lambda _: HEADING, command.joined(cells)
)


def main() -> int:
    options = command.parser(__doc__)
    options.add_argument("--lists", default="llama", choices=LISTS, help="which sizes")
    options.add_argument("--only", default=",".join(LIBRARIES), help="these libraries")
    args = options.parse_args()
    sys.meta_path.append(_Absent(UNUSED))  # those that are installed are found before
    if jax.default_backend() == "gpu":
        jflux.init(heap_bytes=4 << 30)
    wanted = {}
    for library in args.only.split(","):
        if why := why_not(library):
            print(f"{library} {why}", file=sys.stderr)
            continue
        wanted[library] = functools.partial(
            measure, library, LISTS[args.lists], args.ranks, args.rounds
        )
    if not wanted:
        return 1
    TABLE.measure(args, wanted)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
