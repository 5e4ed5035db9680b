"""``python -m jflux.plan``: ranks the grids of a model on a machine."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys

from . import machine as machines
from . import models, show
from .model import Model
from .predict import Extensions
from .search import rank
from .training import Training


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jflux.plan",
        description="Ranks all grids of ranks by the communication that a training step needs.",
    )
    add = parser.add_argument
    add("--model", default="gpt-20b", help=f"one of {', '.join(models.MODELS)}")
    add("--gpus", type=int, required=True)
    add(
        "--machine", default="perlmutter",
        help=f"one of {', '.join(machines.MACHINES)}, a JSON file, or `measured`: by this host's "
        "links",
    )  # fmt: skip
    add("--gpus-per-node", type=int)
    add("--intra", type=float, help="GB/s between two GPUs of a node")
    add("--inter", type=float, help="GB/s between two nodes")
    add("--memory", type=float, help="GB of a GPU")
    add("--tokens", type=int, help="of one step, of a language model; 4 Mi")
    add("--batch", type=int, help="samples of one step, instead")
    add("--microbatches", type=int, default=1)
    add("--no-checkpoint", action="store_true", help="keep all activations")
    add("--cache-gathered", action="store_true", help="keep all gathered weights")
    add("--agnostic", action="store_true", help="one bandwidth for every axis")
    add("--latency", action="store_true", help="count the steps of the rings")
    add("--by-size", action="store_true", help="bandwidths from the machine's tables")
    add("--overlap", type=float, default=0.0, help="share of products that hide; 0 to 1")
    add("--recompute", action="store_true", help="count the second forward pass")
    add("--straddling", action="store_true", help="groups across a border are between nodes")
    add("--two-level", action="store_true", help="all-reduces across nodes as jflux's ops do them")
    add("--all", action="store_true", help="also grids that do not fit into memory")
    add("--top", type=int, default=10, help="how many to show")
    add("--refused", action="store_true", help="also what was refused, and why")
    add("--json", action="store_true", help="JSON instead of a table")
    add("--out", help="draws the table into this file; needs matplotlib")
    return parser


def _model(args: argparse.Namespace) -> Model:
    if args.tokens is not None and args.model.startswith("unet"):
        raise ValueError(f"{args.model} has no tokens: give --batch")
    given = {} if args.tokens is None else {"tokens": args.tokens}
    model = models.named(args.model, **given)
    return model if args.batch is None else model.with_batch(args.batch)


def _machine(args: argparse.Namespace) -> machines.Machine:
    if args.machine == "measured":
        machine = machines.measured()
    elif args.machine.endswith(".json"):
        machine = machines.Machine.load(args.machine)
    else:
        machine = machines.named(args.machine)
    given = {
        name: value * scale
        for name, scale in (("gpus_per_node", 1), ("intra", 1e9), ("inter", 1e9), ("memory", 1e9))
        if (value := getattr(args, name)) is not None
    }
    return dataclasses.replace(machine, **given)


def main(argv: list[str] | None = None) -> int:
    """Prints the ranking of all grids; 1 for arguments that make none."""
    args = _parser().parse_args(argv)
    try:
        ranking = rank(
            _model(args), args.gpus, _machine(args), aware=not args.agnostic, fits=not args.all,
            extensions=Extensions(
                latency=args.latency, bandwidth_by_size=args.by_size, overlap=args.overlap,
                recompute=args.recompute, straddling=args.straddling, two_level=args.two_level,
            ),
            training=Training(
                checkpoint=not args.no_checkpoint, cache_gathered=args.cache_gathered,
                microbatches=args.microbatches,
            ),
        )  # fmt: skip
        if args.out:
            show.draw(ranking, args.out, args.top)
    except (ValueError, RuntimeError, ImportError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    refused = [(str(grid), why) for grid, why in ranking.refused()] if args.refused else []
    if args.json:
        found = {
            "model": ranking.model.name, "gpus": args.gpus, "aware": ranking.aware,
            "machine": dataclasses.asdict(ranking.machine),
            "extensions": dataclasses.asdict(ranking.extensions),
            "training": dataclasses.asdict(ranking.training),
            "grids": len(ranking), "refused": ranking.refusals,
            "plans": [plan.as_json() for plan in ranking[: args.top]],
        }  # fmt: skip
        if args.refused:
            found["why_refused"] = dict(refused)
        print(json.dumps(found, indent=1))
        return 0
    print(ranking.model.describe())
    print(show.title(ranking))
    print(f"{len(ranking)} grids, {ranking.refusals} more refused")
    print(show.table(ranking, args.top))
    for grid, why in refused:
        print(f"{grid}: {why}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
