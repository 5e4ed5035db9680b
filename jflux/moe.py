"""jflux.moe: routing for mixtures of experts: gates, the order of rows, and losses.

A layer's path::

    indices, weights = jflux.moe.top_k_softmax(logits, k)         # gate
    routing = jflux.moe.route(indices, num_experts)               # whose row goes where
    rows = jflux.moe.permute(x, routing)                          # [T k, H], expert after expert
    h = jflux.grouped_matmul(rows, (gate, up), routing.counts, activation="silu", gated=True)
    y = jflux.moe.unpermute(jflux.grouped_matmul(h, down, routing.counts), routing, weights)
"""

from ._ops.experts.all_gather_grouped_matmul import (
    all_gather_grouped_matmul as all_gather_grouped_matmul,
)
from ._ops.experts.gates import group_limited_top_k as group_limited_top_k
from ._ops.experts.gates import top_k_sigmoid as top_k_sigmoid
from ._ops.experts.gates import top_k_softmax as top_k_softmax
from ._ops.experts.grouped_matmul_reduce_scatter import (
    grouped_matmul_all_reduce as grouped_matmul_all_reduce,
)
from ._ops.experts.grouped_matmul_reduce_scatter import (
    grouped_matmul_reduce_scatter as grouped_matmul_reduce_scatter,
)
from ._ops.experts.losses import load_balancing_loss as load_balancing_loss
from ._ops.experts.losses import z_loss as z_loss
from ._ops.experts.placement import place as place
from ._ops.experts.placement import place_weights as place_weights
from ._ops.experts.placement import sum_replicas as sum_replicas
from ._ops.experts.placement_choice import choose_placement as choose_placement
from ._ops.experts.placement_choice import rank_loads as rank_loads
from ._ops.experts.routing import Routing as Routing
from ._ops.experts.routing import Statistics as Statistics
from ._ops.experts.routing import count as count
from ._ops.experts.routing import permute as permute
from ._ops.experts.routing import route as route
from ._ops.experts.routing import statistics as statistics
from ._ops.experts.routing import unpermute as unpermute
