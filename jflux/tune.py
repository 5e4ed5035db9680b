"""``python -m jflux.tune``: :func:`jflux.tune` for a list of shapes, or for those of a model.

(``jflux.tune`` itself is the function, from jflux/_tools/tuner.py.)
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import pathlib
import sys
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from . import _config
from ._call import tuning_tables
from ._tools import language_models, trials, tuner
from ._tools.language_models import Product
from ._tools.progress import Progress
from ._tools.tuner import tune


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jflux.tune",
        description="Measures which configuration is the fastest, and remembers it.",
    )
    parser.add_argument(
        "shapes", nargs="*", metavar="OP:M,N,K",
        help="global sizes, such as all_gather_matmul:8192,49152,12288",
    )  # fmt: skip
    add = parser.add_argument
    add(
        "--model",
        help=f"instead of shapes: all products of {', '.join(language_models.MODELS)}, or of "
        "several of them, with commas",
    )
    add("--config", type=pathlib.Path, help="the same, of a Hugging Face config.json")
    add("--tokens", default="512,2048,8192", help="rows of a model's products (%(default)s)")
    add("--layers-only", action="store_true", help="no product of a model's head")
    add("--training", action="store_true", help="also the products of a model's gradients")
    add("--dry-run", action="store_true", help="prints the shapes, and measures nothing")
    add("--ranks", type=int, default=0, help="the first so many devices; all")
    add(
        "--dtype", default="bfloat16",
        choices=["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8"],
    )  # fmt: skip
    add("--scales", choices=list(trials.SCALES), help="that operands of 8 bits have")
    add("--unchecked", action="store_true", help="also kernels of jflux.config.unchecked_kernels")
    add("--transpose-rhs", action="store_true", help="w of OP:M,N,K is stored [n, k]")
    add("--rounds", type=int, default=5)
    add("--threads", type=int, default=1, help="that compile at the same time")
    add("--least-gain", type=float, default=0.0, help="see jflux.tune (%(default)s)")
    add("--limit", type=float, default=math.inf, help="seconds: what does not fit is named")
    add(
        "--out",
        type=pathlib.Path,
        help="writes here, not to the user's table, and leaves out what is there already",
    )
    return parser


def _of_shape(text: str, transpose_rhs: bool) -> Product:
    op, _, sizes = text.partition(":")
    try:
        m, n, k = map(int, sizes.split(","))
    except ValueError:
        raise ValueError(f"{text!r} is not OP:M,N,K") from None
    return Product(op, m, n, k, transpose_rhs, "")


def _asked(args: argparse.Namespace, ranks: int) -> list[Product]:
    """The calls that the arguments name."""
    if bool(args.shapes) + (args.model is not None) + (args.config is not None) != 1:
        raise ValueError("name shapes, or a model with --model or --config: one of the three")
    if args.shapes:
        return [_of_shape(text, args.transpose_rhs) for text in args.shapes]
    try:
        tokens = [int(rows) for rows in args.tokens.split(",")]
    except ValueError:
        tokens = [0]
    if min(tokens) < 1:
        raise ValueError(f"--tokens {args.tokens!r} is no list of numbers, such as 512,2048")
    if args.config:
        models = [language_models.of_config(args.config)]
    else:
        models = [language_models.named(name) for name in args.model.split(",")]
    found = (
        product
        for rows in tokens
        for sizes in models
        for product in language_models.products(sizes, [rows], ranks, training=args.training)
        if product.layer != "head" or not args.layers_only
    )
    # Models share some; what a layer is called makes no difference.
    return list({dataclasses.replace(one, layer=""): one for one in found}.values())


def _why_not(product: Product, ranks: int) -> str | None:
    """Why a model's product cannot be tuned over so many ranks."""
    try:
        spec = tuner.spec_of(product.op)
        tuner.check_divides(spec, product.m, product.n, product.k, ranks)
    except ValueError as error:
        return str(error)
    return None


def _list(asked: Sequence[Product], ranks: int) -> None:
    for product in asked:
        why = _why_not(product, ranks)
        print(f"{product}{f'; skipped: {why}' if why else ''}")


def _key(product: Product, args: argparse.Namespace, mesh: Mesh) -> str | None:
    """By which a table knows the call; None if no kernel takes it."""
    spec, mesh = tuner.spec_of(product.op), tuner.mesh_of(product.op, mesh)
    tuner.check_divides(spec, product.m, product.n, product.k, mesh.size)
    dtype = jnp.dtype(args.dtype)
    trial = tuner.trial_of(spec, "tp", dtype, args.scales, product.transpose_rhs)
    plan = tuner.plan_of(trial, product.m, product.n, product.k, mesh, dtype)
    return None if plan.key is None else str(plan.key)


def _is_in(path: pathlib.Path, product: Product, args: argparse.Namespace, mesh: Mesh) -> bool:
    """Whether a table has the call already."""
    known = tuning_tables.load(path)
    try:
        return bool(known) and _key(product, args, mesh) in known
    except ValueError:  # which tuning it will say
        return False


def _tune(product: Product, args: argparse.Namespace, mesh: Mesh, title: str) -> None:
    bar: Progress | None = None

    def progress(done: int, total: int) -> None:
        nonlocal bar
        if bar is None:
            bar = Progress(total, "steps", title, show=jax.process_index() == 0)
        bar.at(done)

    try:
        result = tune(
            product.op, m=product.m, n=product.n, k=product.k, mesh=mesh,
            dtype=jnp.dtype(args.dtype), scales=args.scales, transpose_rhs=product.transpose_rhs,
            rounds=args.rounds, save=args.out is None, least_gain=args.least_gain,
            threads=args.threads, progress=progress,
        )  # fmt: skip
    finally:
        if bar is not None:
            bar.close()
    print(result, flush=True)
    if args.out is not None and jax.process_index() == 0:
        tuning_tables.store(args.out, {str(result.key): tuning_tables.as_json(result.best)})


def main(argv: list[str] | None = None) -> int:
    """Tunes the calls that the arguments name; 1 where there is nothing to choose. Of a model,
    calls that no kernel takes are skipped, with a line that says why."""
    parser = _parser()
    args = parser.parse_args(argv)
    ranks = args.ranks or jax.device_count()
    try:
        asked = _asked(args, ranks)
    except ValueError as error:
        parser.error(str(error))
    if args.dry_run:
        _list(asked, ranks)
        return 0
    mesh = Mesh(np.array(jax.devices()[: args.ranks or None]), ("tp",))
    with _config.override(unchecked_kernels=args.unchecked or _config.config.unchecked_kernels):
        return _tune_all(asked, args, mesh)


def _tune_all(asked: Sequence[Product], args: argparse.Namespace, mesh: Mesh) -> int:
    """What `main` returns."""
    begun, longest = time.monotonic(), 0.0
    for i, product in enumerate(asked, 1):
        if args.out is not None and _is_in(args.out, product, args, mesh):
            continue
        start = time.monotonic()
        if trials.slowest(start - begun) + longest > args.limit:
            print(f"no time for {len(asked) - i + 1} products, from {product} on", file=sys.stderr)
            return 0
        title = f"{i}/{len(asked)} {product.op} {product.m} x {product.n} x {product.k}"
        try:
            _tune(product, args, mesh, title)
        except RuntimeError as error:
            print(error, file=sys.stderr)
            return 1
        except ValueError as error:
            print(error, file=sys.stderr)
            if args.shapes:
                return 1
        longest = max(longest, time.monotonic() - start)
    return 0


if __name__ == "__main__":
    sys.exit(main())
