"""PyTorch's symmetric-memory ops on one GPU: a worker that bench/peers.py commands.

Reads one JSON object a line. {"op", "m", "n", "k"} makes operands, compares one call with
PyTorch's own sequence, and answers "ready", or what is wrong; so does {"op": "grouped_matmul",
"sizes", "k", "n"} with a product for each group, and {"op": "attention", "batch", ...} of
bench/portable_attention.py. With "scales", operands are of 8 bits (bench/peer_torch_scaled.py).
Each may have a "name". {"calls": n} with the same name runs so many, and answers "done". Ends with
its input.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable

from . import peer_torch_scaled


def call_of(op: str, m: int, n: int, k: int, rank: int, world: int) -> Callable[[], object]:
    """One call of the op on normal random operands, bf16, which has been seen to be right."""
    import torch
    import torch.distributed as dist
    import torch.distributed._symmetric_memory as symm_mem

    group = dist.group.WORLD.group_name
    torch.manual_seed(rank)

    def normal(rows, columns, scale=1.0):
        return torch.randn(rows, columns, dtype=torch.bfloat16, device="cuda") * scale

    if op == "all_gather_matmul":
        x = symm_mem.empty(m // world, k, dtype=torch.bfloat16, device="cuda")
        symm_mem.rendezvous(x, group)
        x.copy_(normal(m // world, k))
        w = normal(k, n // world, k**-0.5)
        call = lambda: torch.ops.symm_mem.fused_all_gather_matmul(x, [w], 0, group)[1][0]  # noqa: E731
        gathered = torch.empty(m, k, dtype=torch.bfloat16, device="cuda")
        dist.all_gather_into_tensor(gathered, x)
        want = gathered @ w
    else:
        x, w = normal(m, k // world), normal(k // world, n, k**-0.5)
        call = lambda: torch.ops.symm_mem.fused_matmul_reduce_scatter(x, w, "sum", 0, group)  # noqa: E731
        want = torch.empty(m // world, n, dtype=torch.bfloat16, device="cuda")
        dist.reduce_scatter_tensor(want, x @ w)
    error = (call() - want).abs().max().item()
    if not error < 0.1:
        raise RuntimeError(f"PyTorch's {op} is off by {error}")
    return call


def grouped_call_of(sizes: list[int], k: int, n: int) -> Callable[[], object]:
    """One grouped product on normal random operands, bf16, which has been seen to be right."""
    import torch

    torch.manual_seed(0)
    x = torch.randn(sum(sizes), k, dtype=torch.bfloat16, device="cuda")
    w = torch.randn(len(sizes), n, k, dtype=torch.bfloat16, device="cuda") * k**-0.5
    w = w.transpose(1, 2)  # as its documentation lays weights
    ends = torch.tensor(sizes, device="cuda").cumsum(0).to(torch.int32)
    # Older releases have it by its private name alone.
    product = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm
    call = lambda: product(x, w, offs=ends)  # noqa: E731
    want = torch.cat([a @ b for a, b in zip(x.split(sizes), w, strict=True)])
    error = (call() - want).abs().max().item()
    if not error < 0.1:
        raise RuntimeError(f"PyTorch's grouped_mm is off by {error}")
    return call


def attention_call_of(
    batch: int, length: int, heads: int, groups: int, width: int, causal: bool, backward: bool
) -> Callable[[], object]:
    """FlashAttention-2, forward, or the backward pass alone, bf16; one head has been seen to be
    right."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    torch.manual_seed(0)

    def normal(count):
        a = torch.randn(batch, length, count, width, dtype=torch.bfloat16, device="cuda")
        return a.transpose(1, 2).requires_grad_(backward)

    q, k, v = normal(heads), normal(groups), normal(groups)

    def call(q, k, v):
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=causal, enable_gqa=heads != groups
            )

    o = call(q, k, v)
    with torch.no_grad():
        scores = q[:1, 0, :512].float() @ k[:1, 0].float().mT * width**-0.5
        if causal:
            scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
        want = scores.softmax(-1) @ v[:1, 0].float()
        error = (o[:1, 0, :512] - want).abs().max().item()
    if not error < 0.05:
        raise RuntimeError(f"PyTorch's attention is off by {error}")
    if not backward:
        return lambda: call(q, k, v)
    do = torch.randn_like(o)
    return lambda: torch.autograd.grad(o, (q, k, v), do, retain_graph=True)


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
    out.write("ready\n")
    made: dict[str | None, Callable[[], object]] = {}
    for line in sys.stdin:
        command = json.loads(line)
        name = command.pop("name", None)
        if "op" in command:
            made.pop(name, None)  # its operands, before others
            try:
                if command["op"] == "grouped_matmul":
                    made[name] = grouped_call_of(command["sizes"], command["k"], command["n"])
                elif command["op"] == "attention":
                    del command["op"]
                    made[name] = attention_call_of(**command)
                else:
                    make = peer_torch_scaled.call_of if "scales" in command else call_of
                    made[name] = make(**command, rank=rank, world=world)
                answer = "ready"
            except Exception as e:
                answer = f"{type(e).__name__}: {e}".splitlines()[0]
        else:
            for _ in range(command["calls"]):
                made[name]()
            answer = "done"
        torch.cuda.synchronize()
        out.write(answer + "\n")
    os._exit(0)  # a group's own end waits for the others


if __name__ == "__main__":
    main()
