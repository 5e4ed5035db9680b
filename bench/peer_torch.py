"""PyTorch's symmetric-memory ops on one GPU, as a worker that bench/peers.py commands.

Reads one JSON object a line: {"op", "m", "n", "k", "iterations"} makes the operands and answers
"ready"; {"run": true} runs so many calls and answers "done". Ends with its input.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable


def call_of(op: str, m: int, n: int, k: int, rank: int, world: int) -> Callable[[], object]:
    """One call of the op on normal random operands, bf16."""
    import torch
    import torch.distributed as dist
    import torch.distributed._symmetric_memory as symm_mem

    group = dist.group.WORLD.group_name
    torch.manual_seed(rank)

    def normal(rows, columns):
        return torch.randn(rows, columns, dtype=torch.bfloat16, device="cuda")

    if op == "all_gather_matmul":
        x = symm_mem.empty(m // world, k, dtype=torch.bfloat16, device="cuda")
        symm_mem.rendezvous(x, group)
        x.copy_(normal(m // world, k))
        ws = [normal(k, n // world)]
        return lambda: torch.ops.symm_mem.fused_all_gather_matmul(x, ws, 0, group)
    x, w = normal(m, k // world), normal(k // world, n)
    return lambda: torch.ops.symm_mem.fused_matmul_reduce_scatter(x, w, "sum", 0, group)


def captured(call: Callable[[], object]) -> Callable[[], object]:
    """The call as a CUDA graph."""
    import torch

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def main() -> None:
    rank, world, port = map(int, sys.argv[1:4])
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what the libraries print is no answer
    import torch
    import torch.distributed as dist
    import torch.distributed._symmetric_memory as symm_mem

    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world,
        device_id=torch.device("cuda", rank),
    )  # fmt: skip
    symm_mem.enable_symm_mem_for_group(dist.group.WORLD.group_name)
    call: Callable[[], object] = lambda: None  # noqa: E731
    iterations = 0
    out.write("ready\n")
    for line in sys.stdin:
        command = json.loads(line)
        if "op" in command:
            iterations = command.pop("iterations")
            graph = command.pop("graph")
            call = call_of(**command, rank=rank, world=world)
            call()  # its first run compiles and rendezvous
            torch.cuda.synchronize()
            if graph:
                call = captured(call)
            out.write("ready\n")
        else:
            for _ in range(iterations):
                call()
            torch.cuda.synchronize()
            out.write("done\n")
    os._exit(0)  # a group's end waits for peers


if __name__ == "__main__":
    main()
