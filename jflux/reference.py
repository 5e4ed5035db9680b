"""The ops in plain `lax`: their specification, and what runs where no kernel does.

Each function has the signature of the op of the same name, documented there, and means the same.
"""

# ruff: noqa: F401
from ._attention.attention import reference as attention
from ._attention.cache import reference as update_cache
from ._attention.decoding import attend_to_cache_reference as attend_to_cache
from ._attention.decoding import fill_cache_reference as fill_cache
from ._attention.flash_decode import reference as flash_decode
from ._attention.ulysses import reference as ulysses_attention
from ._ops.all_gather_matmul import reference as all_gather_matmul
from ._ops.all_reduce import reference as all_reduce
from ._ops.all_to_all_matmul import reference as all_to_all_matmul
from ._ops.exchange import all_gather_reference as all_gather
from ._ops.exchange import all_to_all_reference as all_to_all
from ._ops.exchange import reduce_scatter_reference as reduce_scatter
from ._ops.grouped_matmul import reference as grouped_matmul
from ._ops.matmul_all_reduce import reference as matmul_all_reduce
from ._ops.matmul_all_to_all import reference as matmul_all_to_all
from ._ops.matmul_reduce_scatter import reference as matmul_reduce_scatter
from ._ops.ragged_all_to_all import reference as ragged_all_to_all
