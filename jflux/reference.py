"""The ops in plain `lax`: their specification, and what runs where no kernel does.

Each function has the signature of the op of the same name, documented there, and means the same.
"""

# ruff: noqa: F401
from ._ops.attention.attention import reference as attention
from ._ops.attention.flash_decode import reference as flash_decode
from ._ops.attention.kv_cache import attend_to_cache_reference as attend_to_cache
from ._ops.attention.kv_cache import fill_cache_reference as fill_cache
from ._ops.attention.ulysses_attention import reference as ulysses_attention
from ._ops.attention.update_cache import reference as update_cache
from ._ops.collectives.all_reduce import reference as all_reduce
from ._ops.collectives.exchange import all_gather_reference as all_gather
from ._ops.collectives.exchange import all_to_all_reference as all_to_all
from ._ops.collectives.exchange import reduce_scatter_reference as reduce_scatter
from ._ops.collectives.halo_exchange import reference as halo_exchange
from ._ops.collectives.ragged_all_to_all import reference as ragged_all_to_all
from ._ops.products.all_gather_matmul import reference as all_gather_matmul
from ._ops.products.all_to_all_matmul import reference as all_to_all_matmul
from ._ops.products.grouped_matmul import reference as grouped_matmul
from ._ops.products.matmul_all_reduce import reference as matmul_all_reduce
from ._ops.products.matmul_all_to_all import reference as matmul_all_to_all
from ._ops.products.matmul_reduce_scatter import reference as matmul_reduce_scatter
