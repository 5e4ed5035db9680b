"""Which exchange a mixture takes, by which tokens come to the ranks of their experts, and why."""

from __future__ import annotations

import jax

from .._ops.experts import moe_dispatch
from .._ops.experts.dispatch_grouped_matmul import LEAST_SHARE, share_of_ranks
from .._ranks import meshes

#: The caller's words for it.
EXCHANGES = ("auto", "gather", "dispatch", "fused")

#: Where dispatch and combine are several ops each, all tokens go to all ranks if a token's experts
#: lie on at least this share of the ranks. An estimate.
LEAST_SHARE_IN_OPS = 0.5
#: Up to so many tokens of all ranks a dispatch in one kernel is not slower than a gather, wherever
#: experts lie: of 28 layers on 2 and 4 x H200 forward .98 of a gather's time in the mean, with
#: gradients .98 (.89 to 1.04); of more tokens 1.14 and 1.09 (bench/results/4xh200_experts.json).
FEW_TOKENS = 8192


def planned(
    exchange: str,
    x: jax.ShapeDtypeStruct,
    k: int,
    slots: int,
    ep: meshes.AxisName,
    capacity: int | None,
) -> tuple[str, str]:
    """(the exchange of a call, why). It depends on shapes, types and switches alone, which are the
    same on all ranks.

    Args:
      exchange: the caller's choice.
      x: what a dispatch would take, [T, d].
      k: experts of a token.
      slots: experts of all ranks, or physical slots.
      ep: the mesh axes that experts are split over.
      capacity: as the call has it.
    """
    if exchange != "auto":
        return exchange, "the caller's choice"
    if not ep:
        return "gather", "all ranks have all experts"
    ranks, k = meshes.axis_size(ep), min(k, slots)
    why_not = moe_dispatch.why_no_kernel(x, k, num_experts=slots, capacity=capacity, axis_name=ep)
    least = LEAST_SHARE if why_not is None else LEAST_SHARE_IN_OPS
    tokens = ranks * x.shape[0]
    if why_not is None and tokens <= FEW_TOKENS:
        return "dispatch", f"{tokens} tokens are few: a dispatch is one kernel each way"
    share = share_of_ranks(slots, ranks, k)
    how = "one kernel each way" if why_not is None else f"several ops, since {why_not}"
    return "gather" if share >= least else "dispatch", (
        f"the experts of a token, {k} of {slots}, lie on {share:.2f} of {ranks} ranks, and a "
        f"dispatch ({how}) is worth it below {least}"
    )
