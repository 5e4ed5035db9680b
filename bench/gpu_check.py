"""Checks, stresses and times the kernels on this host's GPUs; the table comes last.

python -m bench.gpu_check [--ranks 4] [--lists flux]
    [--sections values,tiles,gemm,choices,epilogues,stacked]
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import functools
import itertools
import os
import sys
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("NCCL_NVLS_ENABLE", "0")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jflux
import jflux.testing
from bench import products, shapes
from jflux._call import plans, tuning_tables
from jflux._call.tuning_tables import Choice
from jflux._ops._epilogue import Epilogue
from jflux._ops._spec import OpSpec, all_ops
from jflux._ops._spec import products as products_of
from jflux._tools import trials, tuner
from jflux._tools.trials import Trial


def mesh_of(ranks: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:ranks]), ("tp",))


def check_product(
    op: str, ranks: int, m: int, n: int, k: int, dtype: Any, seed: int, way: int = 0,
    lead: tuple[int, ...] = (), transpose_rhs: bool = False, **options: Any,
) -> float:  # fmt: skip
    """The largest error, in its bounds, of one call on fresh random operands against float64. m, n
    and k are global."""
    spec, mesh = all_ops()[op], mesh_of(ranks)
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((*lead, m, k)).astype(dtype)
    w = rng.standard_normal((k, n)).astype(dtype)
    shift = {name: axis - 2 for name, axis in spec.ways[way].items()}  # from the last dimension
    layout = spec.layout(x.ndim, transpose_rhs=transpose_rhs, **shift)

    def spec_of(ndim: int, dimension: int | None) -> P:
        return P(*("tp" if i == dimension else None for i in range(ndim)))

    x_spec, w_spec = spec_of(x.ndim, layout.rows["x"]), spec_of(2, layout.others["w"])
    y_spec: Any = spec_of(x.ndim, layout.rows["y"])
    if options.get("return_gathered"):
        y_spec = (y_spec, P())
    f = jax.jit(
        jax.shard_map(
            lambda x, w: spec.function(
                x, w, axis_name="tp", transpose_rhs=transpose_rhs, **shift, **options
            ),
            mesh=mesh, in_specs=(x_spec, w_spec), out_specs=y_spec, check_vma=False,
        )
    )  # fmt: skip

    def put(a: np.ndarray, s: P) -> jax.Array:
        return jax.device_put(a, NamedSharding(mesh, s))

    jflux.testing.poison_workspaces()
    result = f(put(x, x_spec), put(w.T if transpose_rhs else w, w_spec))
    worst = 0.0
    if options.get("return_gathered"):
        result, gathered = result
        worst = 0.0 if np.array_equal(np.asarray(gathered), x) else np.inf
    x64, w64 = x.astype(np.float64), w.astype(np.float64)
    out = options.get("preferred_element_type") or dtype
    return max(
        worst, jflux.testing.error_in_bounds(result, x64 @ w64, np.abs(x64) @ np.abs(w64), out, k)
    )


#: Sizes of a rank: whole tiles, ragged ones, and less than one.
SIZES = [(256, 512, 256), (64, 256, 512), (40, 264, 136), (7, 8, 8), (333, 1000, 520)]


def cases_of(spec: OpSpec, ranks: int) -> Iterator[tuple[int, int, int, Any, dict[str, Any]]]:
    """Global m, n, k, the type and options of calls of a product."""
    for way in range(len(spec.ways)):
        for dtype, transpose in itertools.product((jnp.bfloat16, jnp.float16), (False, True)):
            for m, n, k in SIZES:
                sizes = (m * ranks, n * ranks, k * ranks)
                yield *sizes, dtype, dict(transpose_rhs=transpose, way=way)
        wide = dict(preferred_element_type=jnp.float32)
        for m, n, k, dtype, options in (
            (128, 512, 256, jnp.bfloat16, dict(lead=(3,))),
            (24, 72, 64, jnp.bfloat16, dict(lead=(2, 2))),
            (1, 13, 37, jnp.bfloat16, {}),
            (256, 512, 256, jnp.bfloat16, wide),
            (1024, 1024, 1024, jnp.bfloat16, {}),
            (1000, 1096, 968, jnp.float16, {}),
        ):
            yield m * ranks, n * ranks, k * ranks, dtype, dict(way=way, **options)


def section_values(ranks: int) -> list[str]:
    """Calls of every product against float64."""
    cases = [(spec.name, *case) for spec in products_of() for case in cases_of(spec, ranks)]
    gathered = dict(return_gathered=True)
    cases += [
        (shapes.AG, 100 * ranks, 256 * ranks, 512, jnp.bfloat16, gathered),
        (shapes.AG, 40 * ranks, 256 * ranks, 200, jnp.bfloat16, dict(lead=(3,), **gathered)),
        (shapes.AG, 512 * ranks, 2048 * ranks, 1024, jnp.bfloat16, gathered),
    ]
    # Enough of y that its tiles travel; k of a rank is one k-block of the main loop, or several.
    cases += [
        (shapes.AR, m * ranks, n, k * ranks, dtype, dict(transpose_rhs=transpose))
        for dtype, transpose in itertools.product((jnp.bfloat16, jnp.float16), (False, True))
        for m, n, k in [(256, 4104, 64), (384, 3080, 136), (1024, 1096, 520), (128, 8192, 2048)]
    ]
    lines, bad = [], 0
    for i, (op, m, n, k, dtype, options) in enumerate(cases):
        error = check_product(op, ranks, m, n, k, dtype, seed=i, **dict(options))
        ok = error <= 1
        bad += not ok
        verdict = "ok " if ok else "BAD"
        line = f"{verdict} {op} {m}x{n}x{k} {np.dtype(dtype).name} {options} {error:.3f}"
        print(line, flush=True)
        if not ok:
            lines.append(line)
    return [f"values, {ranks} ranks: {len(cases) - bad} of {len(cases)} right", *lines]


WITH_SUMS = dict(results=("y", "sums"), epilogue=Epilogue(biased=(True,), activation="relu"))

# How a product leaves its kernel: its options, and the shape of x's rows.
WAYS = {
    "plain": (dict(), lambda m: (m,)),
    "float32": (dict(out_dtype=jnp.float32), lambda m: (m,)),
    "scattered rows": (dict(), lambda m: (5, m // 5)),
    "sums too": (WITH_SUMS, lambda m: (m,)),
    "scattered rows, sums too": (WITH_SUMS, lambda m: (5, m // 5)),
}


@functools.lru_cache(maxsize=2)
def exact_product(m: int, n: int, k: int, dtype):
    """Random x and w, a bias, and in float64 x @ w and |x| @ |w|."""
    rng = np.random.default_rng(m)
    x, w = rng.standard_normal((m, k)).astype(dtype), rng.standard_normal((k, n)).astype(dtype)
    x64, w64 = x.astype(np.float64), w.astype(np.float64)
    return x, w, rng.standard_normal(n).astype(np.float32), x64 @ w64, np.abs(x64) @ np.abs(w64)


def check_alone(m, n, k, dtype, transpose: bool, choice: Choice | None, way: str) -> float:
    """One product by one configuration (None: what is chosen) against float64."""
    options, rows_of = WAYS[way]
    x, w, bias, want, scale = exact_product(m, n, k, dtype)
    operands = [x.reshape(*rows_of(m), k), w.T.copy() if transpose else w]
    operands += [bias] if "epilogue" in options else []
    f = jax.shard_map(
        products.product_alone(transpose, **options), mesh=mesh_of(1), in_specs=P(), out_specs=P(),
        check_vma=False,
    )  # fmt: skip
    with tuning_tables.force(choice) if choice else contextlib.nullcontext():
        found = jax.jit(f)(*operands)
    if "epilogue" in options:
        wanted, scale = (np.maximum(want + bias, 0), want + bias), scale + np.abs(bias)
    else:
        found, wanted = (found,), (want,)
    return max(
        jflux.testing.error_in_bounds(np.asarray(y).reshape(m, n), right, scale, dtype, k)
        for y, right in zip(found, wanted, strict=True)
    )


def section_tiles() -> list[str]:
    """The product alone in every configuration that is compiled, against float64."""
    sizes = [(128, 256, 64), (256, 256, 128), (384, 1000, 520), (2048, 2048, 2048)]
    several = [(2900, 5000, 64), (2900, 5000, 136), (1500, 9000, 1032)]  # tiles for each CTA
    all_kinds = list(itertools.product((jnp.bfloat16, jnp.float16), (False, True)))
    kinds = {way: all_kinds if way == "plain" else all_kinds[::3] for way in WAYS}
    configurations = [
        (size, way, choice, *kind)
        for size, way in [*itertools.product(several, WAYS), *((size, "plain") for size in sizes)]
        for choice in (None, *tuning_tables.compiled())
        for kind in kinds[way]
    ]
    lines, count = [], 0
    for (m, n, k), way, choice, dtype, transpose in configurations:
        error = check_alone(m, n, k, dtype, transpose, choice, way)
        verdict = "ok " if error <= 1 else "BAD"
        line = (
            f"{verdict} {m}x{n}x{k} {np.dtype(dtype).name} {transpose=} {choice} {way} {error:.3f}"
        )
        print(line, flush=True)
        count += 1
        if error > 1:
            lines.append(line)
    return [f"tiles: {count - len(lines)} of {count} right", *lines]


def section_gemm(names: list[str], rounds: int, zeros: bool, chosen: bool) -> list[str]:
    """The speed of the product alone in that of XLA's; with `chosen`, of what is chosen only."""
    lines = []
    for m, n, k in products.of_one_rank(names):
        choices = [] if chosen else tuning_tables.compiled()
        if choices and m <= 128:
            choices += [Choice(128, 1, 1, splits) for splits in (2, 4)]
        row = products.measure(m, n, k, jnp.bfloat16, zeros=zeros, rounds=rounds, choices=choices)
        g, g_nk = row["G"]["median"], row["G nk"]["median"]
        kn, nk = products.speeds(row)
        line = (
            f"gemm {m:5} {n:6} {k:6}  G {g * 1e3:7.3f}, w [n, k] {g_nk * 1e3:7.3f} ms; "
            f"of their speed: as chosen {kn:.3f}, w [n, k] {nk:.3f}"
        )
        for c in choices:
            split = f"/{c.splits}" if c.splits > 1 else ""
            line += f", {c.tile_n}/{c.cluster_m}{split} {g / row[str(c)]['median']:.3f}"
        print(line, flush=True)
        lines.append(line)
    return lines


def section_choices(ranks: int, names: list[str], rounds: int) -> list[str]:
    """The overlapped ops with each configuration, and decomposed, in milliseconds."""
    mesh, lines = mesh_of(ranks), []
    machine = plans.machine_of("cuda", mesh)
    for shape in itertools.chain(*(shapes.LISTS[name] for name in names)):
        m, n, k = shape.m, shape.n, shape.k
        trial = Trial(shape.spec)
        plan = tuner.plan_of(trial, m, n, k, mesh, jnp.bfloat16)
        chosen, *others = tuner.candidates(plan.key, machine)
        seconds = tuner.measure(
            trial,
            [chosen, tuning_tables.DECOMPOSED, *others],
            m=m,
            n=n,
            k=k,
            mesh=mesh,
            rounds=rounds,
        )
        line = f"choices {shape.op[:10]} {m:5} {n:6} {k:6}"
        for choice, t in seconds.items():
            mark = "*" if choice == chosen else ""
            name = (
                choice
                if isinstance(choice, str)
                else "/".join(map(str, tuning_tables.as_json(choice)))
            )
            line += f" {mark}{name} {t * 1e3:.3f}"
        print(line, flush=True)
        lines.append(line)
    return lines


def section_stacked(ranks: int, names: list[str], rounds: int) -> list[str]:
    """J and S with weights stacked for `lax.scan`, as models scan over their layers, and with one
    weight in a loop: XLA passes a slice by its address, and may capture the call anew each time."""
    layers, lines = 16, []
    mesh = mesh_of(ranks)
    for shape in itertools.chain(*(shapes.LISTS[name] for name in names)):
        if shape.m < 64 * ranks:
            continue
        trial = Trial(shape.spec)
        x, w = trial.operands(shape.m, shape.n, shape.k, mesh, jnp.bfloat16)
        x_spec, w_spec, y_spec = trial.partition
        put = NamedSharding(mesh, P(None, *w_spec))
        stack = jax.jit(lambda w: jnp.stack([w] * layers), out_shardings=put)
        many = stack(w)
        runs = {}
        for name, is_reference in (("J", False), ("S", True)):
            op = trial.function(is_reference)

            def scan(x, many, op=op):
                def layer(x, one):
                    y = op(x, one)
                    # The next call depends on this one.
                    corner = y[:1, :1].astype(x.dtype)
                    return jax.lax.dynamic_update_slice(x, corner, (0, 0)), y[0, 0]

                return jax.lax.scan(layer, x, many)[1].reshape(1, -1)

            for kind, f, b, spec, out in (
                ("scan", scan, many, P(None, *w_spec), P("tp", None)),
                ("loop", trials.loop(op, layers), w, w_spec, y_spec),
            ):
                program = trials.compiled(f, mesh, (x_spec, spec), out, x, b)
                runs[f"{name} {kind}"] = trials.run_of(program, x, b)
        t = trials.interleave(runs, layers, rounds)
        line = f"stacked {shape.op} {shape.m:5} {shape.n:6} {shape.k:6} "
        line += ", ".join(f"{name} {timing.median * 1e3:7.3f} ms" for name, timing in t.items())
        print(line, flush=True)
        lines.append(line)
    return lines


def section_epilogues(ranks: int, rounds: int) -> list[str]:
    """What follows a product: in the kernel, by XLA after it, and not at all."""
    mesh, lines = mesh_of(ranks), []
    d, h, rows, columns = 8192, 28672, P("tp", None), P(None, "tp")

    def gather(x, w, **options):
        return jflux.all_gather_matmul(x, w, axis_name="tp", **options)

    def scatter(x, w, **options):
        return jflux.matmul_reduce_scatter(x, w, axis_name="tp", **options)

    def gate(x, w):
        return gather(x, w[:2], activation="silu", gated=True)

    def gate_after(x, w):
        first, second = (y.astype(jnp.float32) for y in gather(x, w[:2]))
        return (jax.nn.silu(first) * second).astype(x.dtype)

    def gelu(x, w):
        return gather(x, w[0], bias=w[2], activation="gelu_tanh")

    def gelu_after(x, w):
        return jax.nn.gelu(gather(x, w[0]).astype(jnp.float32) + w[2]).astype(x.dtype)

    def add(x, w):
        return scatter(x, w[0], bias=w[2], residual=w[1])

    def add_after(x, w):
        return (scatter(x, w[0]).astype(jnp.float32) + w[2] + w[1]).astype(x.dtype)

    up = ((d, h), columns), ((d, h), columns), ((h,), P("tp"))
    for m in (512, 2048, 8192):
        down = ((h, d), rows), ((m, d), rows), ((d,), P(None))
        for name, x_shape, x_spec, weights, bare, kernel, after, y_spec in [
            ("gate", (m, d), rows, up, lambda x, w: gather(x, w[:2])[0], gate, gate_after, columns),
            ("gelu", (m, d), rows, up, lambda x, w: gather(x, w[0]), gelu, gelu_after, columns),
            ("add", (m, h), columns, down, lambda x, w: scatter(x, w[0]), add, add_after, rows),
        ]:
            x = trials.normal(mesh, x_spec, x_shape, jnp.bfloat16, seed=0)
            w = tuple(
                trials.normal(mesh, spec, shape, jnp.bfloat16, seed=i, scale=0.01)
                for i, (shape, spec) in enumerate(weights, 1)
            )
            specs = x_spec, tuple(spec for _, spec in weights)
            iterations = trials.iterations_for(0.02, 4.0 * m * d * h / ranks)
            runs = {
                kind: trials.run_of(
                    trials.compiled(trials.loop(f, iterations), mesh, specs, y_spec, x, w), x, w
                )
                for kind, f in (("bare", bare), ("kernel", kernel), ("after", after))
            }
            t = trials.interleave(runs, iterations, rounds)
            line = f"epilogue {name} {m:5}: "
            line += ", ".join(f"{kind} {timing.median * 1e3:.3f} ms" for kind, timing in t.items())
            print(line, flush=True)
            lines.append(line)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=jax.device_count())
    parser.add_argument("--sections", default="values,tiles,gemm")
    parser.add_argument("--lists", default="flux")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--zeros", action="store_true",
        help="time products of zeros (section gemm): how fast they are where power is no limit",
    )  # fmt: skip
    parser.add_argument(
        "--chosen", action="store_true", help="time no other configurations (section gemm)"
    )
    parser.add_argument("--deadline", type=float, default=10.0)
    parser.add_argument("--stuck", type=float, default=300.0, help="seconds until a stack dump")
    args = parser.parse_args()
    faulthandler.dump_traceback_later(args.stuck, exit=True)
    jflux.init(heap_bytes=4 << 30, deadline_seconds=args.deadline)
    jflux.config.update(strict=True, always=True)
    sections = {
        "values": lambda: section_values(args.ranks),
        "tiles": section_tiles,
        "gemm": lambda: section_gemm(args.lists.split(","), args.rounds, args.zeros, args.chosen),
        "choices": lambda: section_choices(args.ranks, args.lists.split(","), args.rounds),
        "epilogues": lambda: section_epilogues(args.ranks, args.rounds),
        "stacked": lambda: section_stacked(args.ranks, args.lists.split(","), args.rounds),
    }
    summary = []
    for name in args.sections.split(","):
        if name not in sections:
            parser.error(f"no section {name!r}; there are {', '.join(sections)}")
        summary += sections[name]()
    print("\n".join(["", *summary]))
    sys.exit(any("BAD" in line for line in summary))


if __name__ == "__main__":
    main()
