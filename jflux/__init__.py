"""jflux: tensor-parallel operations for JAX whose communication hides inside the computation."""

import importlib
from typing import TYPE_CHECKING

from . import _checkout as _checkout  # first: it may take all else from elsewhere
from . import checkpoint_policies as checkpoint_policies
from . import moe as moe
from . import reference as reference
from . import symm as symm
from ._attention.attention import attention as attention
from ._attention.cache import update_cache as update_cache
from ._attention.decoding import KVCache as KVCache
from ._attention.decoding import attend_to_cache as attend_to_cache
from ._attention.decoding import fill_cache as fill_cache
from ._attention.flash_decode import flash_decode as flash_decode
from ._attention.layouts import causal_positions as causal_positions
from ._attention.layouts import reorder_for_causal as reorder_for_causal
from ._attention.layouts import restore_order as restore_order
from ._attention.merging import merge_attention as merge_attention
from ._attention.ulysses import ulysses_attention as ulysses_attention
from ._config import config as config
from ._custom import custom_call as custom_call
from ._custom import include_dir as include_dir
from ._custom import library_path as library_path
from ._custom import register_custom_call as register_custom_call
from ._experts.dispatch import moe_combine as moe_combine
from ._experts.dispatch import moe_dispatch as moe_dispatch
from ._experts.products import dispatch_grouped_matmul as dispatch_grouped_matmul
from ._experts.products import grouped_matmul_combine as grouped_matmul_combine
from ._explain import explain as explain
from ._flops import flops as flops
from ._heap import heap_report as heap_report
from ._heap import init as init
from ._heap import shutdown as shutdown
from ._norm import LayerNorm as LayerNorm
from ._norm import RMSNorm as RMSNorm
from ._ops.all_gather_matmul import all_gather_matmul as all_gather_matmul
from ._ops.all_reduce import all_reduce as all_reduce
from ._ops.all_to_all_matmul import all_to_all_matmul as all_to_all_matmul
from ._ops.exchange import all_gather as all_gather
from ._ops.exchange import all_to_all as all_to_all
from ._ops.exchange import reduce_scatter as reduce_scatter
from ._ops.grouped_matmul import grouped_matmul as grouped_matmul
from ._ops.matmul_all_reduce import matmul_all_reduce as matmul_all_reduce
from ._ops.matmul_all_to_all import matmul_all_to_all as matmul_all_to_all
from ._ops.matmul_reduce_scatter import matmul_reduce_scatter as matmul_reduce_scatter
from ._ops.ragged_all_to_all import ragged_all_to_all as ragged_all_to_all
from ._register import register as register
from ._tuner import tune as tune
from ._version import __version__ as __version__

_LATER = ("nn", "parallel", "plan", "timeline")  # imported when they are first used

if TYPE_CHECKING:
    from . import nn as nn
    from . import parallel as parallel
    from . import plan as plan
    from . import timeline as timeline
else:

    def __getattr__(name: str) -> object:
        if name in _LATER:
            return importlib.import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *_LATER})
