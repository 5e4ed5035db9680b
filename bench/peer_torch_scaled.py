"""PyTorch's products of operands with scales, of a worker of :mod:`bench.peer_torch`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

E4M3_MAX = 448.0
BLOCK = 128

#: What shares a scale of x [m, k] and of w [n, k]; 0 is all.
BLOCKS = {
    "tensor": ((0, 0), (0, 0)),
    "row": ((1, 0), (1, 0)),
    "block": ((1, BLOCK), (BLOCK, BLOCK)),
}

#: The largest error in units of bfloat16's rounding of |y| + 1, as in bench/scaled.py.
LIMIT = 16


def in_blocks(a: Any, block: tuple[int, int]) -> Any:
    """[rows, columns] -> [blocks, rows of one, blocks, columns of one]."""
    (rows, columns), (by, bx) = a.shape, block
    by, bx = by or rows, bx or columns
    return a.view(rows // by, by, columns // bx, bx)


def quantized(a: Any, block: tuple[int, int], world: int = 1) -> tuple[Any, Any]:
    """float8_e4m3fn values, and a scale for each block; all ranks have one if it is all of `a`."""
    import torch
    import torch.distributed as dist

    blocks = in_blocks(a.float(), block)
    most = blocks.abs().amax((1, 3), keepdim=True)
    if most.numel() == 1 and world > 1:
        dist.all_reduce(most, dist.ReduceOp.MAX)
    scale = most / E4M3_MAX
    return (blocks / scale).to(torch.float8_e4m3fn).view(a.shape), scale[:, 0, :, 0]


def dequantized(values: Any, scale: Any, block: tuple[int, int]) -> Any:
    return (in_blocks(values.float(), block) * scale[:, None, :, None]).view(values.shape)


def product_of(x: Any, sx: Any, w: Any, sw: Any, scales: str) -> Callable[[], Any]:
    """One product alone; blocks are cuBLASLt's own, of CUDA 12.9 on."""
    import torch

    if scales == "block":
        f = torch.nn.functional
        sx = sx.t().contiguous().t()  # [m, k / 128], m fastest
        sw = f.pad(sw, (0, -sw.shape[1] % 4)).t()  # [k / 128, n / 128], k fastest, in fours
        return lambda: f.scaled_mm(
            x, w.t(), sx, f.ScalingType.BlockWise1x128, sw, f.ScalingType.BlockWise128x128,
            swizzle_a=f.SwizzleType.NO_SWIZZLE, swizzle_b=f.SwizzleType.NO_SWIZZLE,
            output_dtype=torch.bfloat16,
        )  # fmt: skip
    return lambda: torch._scaled_mm(
        x, w.t(), sx, sw.t(), out_dtype=torch.bfloat16, use_fast_accum=True
    )


def call_of(
    op: str, m: int, n: int, k: int, scales: str, rank: int, world: int
) -> Callable[[], Any]:
    """One call of the op, or of "matmul" on each rank by itself, on normal random operands, which
    has been seen to be right. w is stored [n, k]."""
    import torch
    import torch.distributed as dist

    group = dist.group.WORLD.group_name
    torch.manual_seed(rank)
    rows, columns, inner = m, n, k
    if op == "all_gather_matmul":
        rows, columns = m // world, n // world
    elif op == "matmul_reduce_scatter":
        inner = k // world
    x_block, w_block = BLOCKS[scales]

    def normal(*size: int) -> Any:
        return torch.randn(*size, dtype=torch.bfloat16, device="cuda")

    shared = world if op != "matmul" else 1
    x, sx = quantized(normal(rows, inner), x_block, shared)
    w, sw = quantized(normal(columns, inner) * k**-0.5, w_block, shared)
    wide, w_wide = dequantized(x, sx, x_block), dequantized(w, sw, w_block)
    if scales == "tensor":  # one of [1, 1] beside one row would be taken for that of a row
        sx, sw = sx.view(()), sw.view(())
    if op == "all_gather_matmul":
        every = torch.empty(m, k, device="cuda")
        dist.all_gather_into_tensor(every, wide)
        want = every @ w_wide.t()
        call = lambda: torch.ops.symm_mem.fused_all_gather_scaled_matmul(  # noqa: E731
            x, [w.t()], sx, [sw.t()], gather_dim=0, group_name=group, biases=[None],
            result_scales=[None], out_dtypes=[torch.bfloat16], use_fast_accum=[True],
        )[1][0]  # fmt: skip
    elif op == "matmul_reduce_scatter":
        want = torch.empty(m // world, n, device="cuda")
        dist.reduce_scatter_tensor(want, wide @ w_wide.t())
        call = lambda: torch.ops.symm_mem.fused_scaled_matmul_reduce_scatter(  # noqa: E731
            x, w.t(), sx, sw.t(), "sum", 0, 0, group, [m, n], None, None, torch.bfloat16, True
        )
    else:
        want = wide @ w_wide.t()
        call = product_of(x, sx, w, sw, scales)
    error = ((call() - want).abs() / (2.0**-8 * (want.abs() + 1))).max().item()
    if not error < LIMIT:
        raise RuntimeError(f"PyTorch's {op} by {scales} has an error of {error:.3g} roundings")
    return call
