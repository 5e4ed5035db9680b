"""jflux.moe: routing for mixtures of experts: gates, the order of rows, and losses.

A layer's path::

    indices, weights = jflux.moe.top_k_softmax(logits, k)         # gate
    routing = jflux.moe.route(indices, num_experts)               # whose row goes where
    rows = jflux.moe.permute(x, routing)                          # [T k, H], expert after expert
    h = jflux.grouped_matmul(rows, (gate, up), routing.counts, activation="silu", gated=True)
    y = jflux.moe.unpermute(jflux.grouped_matmul(h, down, routing.counts), routing, weights)
"""

from ._gates import group_limited_top_k as group_limited_top_k
from ._gates import top_k_sigmoid as top_k_sigmoid
from ._gates import top_k_softmax as top_k_softmax
from ._losses import load_balancing_loss as load_balancing_loss
from ._losses import z_loss as z_loss
from ._routing import Routing as Routing
from ._routing import Statistics as Statistics
from ._routing import count as count
from ._routing import permute as permute
from ._routing import route as route
from ._routing import statistics as statistics
from ._routing import unpermute as unpermute
from ._tensor_parallel import all_gather_grouped_matmul as all_gather_grouped_matmul
from ._tensor_parallel import grouped_matmul_all_reduce as grouped_matmul_all_reduce
from ._tensor_parallel import grouped_matmul_reduce_scatter as grouped_matmul_reduce_scatter
