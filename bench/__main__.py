"""Times the ops on this host's GPUs and writes the figures as JSON.

python -m bench --ranks 4 --lists flux,attention --out bench/results/4xh200.json
python -m bench --ranks 4 --processes 4 ...      one process per GPU
python -m bench --ranks 2 --lists llm,decode --add bench/results/2xh100.json --limit 240
                                                 only what the file lacks, as far as the time goes
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import sys

from . import command


def main() -> int:
    args = command.parse(__doc__, lists="flux")
    if args.processes > 1 and args.process is None:
        return command.spawn(args, "bench")
    command.initialize(args)
    import jax
    import numpy as np
    from jax.sharding import Mesh

    import jflux

    from . import harness, peers, shapes

    jflux.init(heap_bytes=8 << 30)
    jflux.config.update(strict=True)
    mesh = Mesh(np.array(jax.devices()[: args.ranks]), ("tp",))
    others = peers.start(filter(None, args.peers.split(",")), peers.PEERS, mesh)

    def measure(shape: shapes.Shape) -> command.Row:
        try:
            timings = harness.measure(shape, mesh, args.rounds, others=others)
        except peers.Unavailable as e:  # a peer that has begun, and then broke off
            print(f"{shape}: {e}; again, without peers", file=sys.stderr)
            timings = harness.measure(shape, mesh, args.rounds)
        return dataclasses.asdict(shape) | {
            name: dataclasses.asdict(timing) for name, timing in timings.items()
        }

    table = command.Table(
        "rows", shapes.of_row, lambda _: harness.HEADING, lambda row: harness.line(row, args.ranks)
    )
    asked = itertools.chain(*(shapes.of(name, args.ranks) for name in args.lists.split(",")))
    table.measure(args, {shape: functools.partial(measure, shape) for shape in asked})
    for peer in others:
        peer.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
