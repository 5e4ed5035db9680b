"""jflux: tensor-parallel operations for JAX whose communication hides inside the computation."""

import importlib
from typing import TYPE_CHECKING

from . import _checkout as _checkout  # first: it may take all else from elsewhere
from . import checkpoint_policies as checkpoint_policies
from . import lax as lax
from . import moe as moe
from . import reference as reference
from . import symm as symm
from ._call.explain import explain as explain
from ._call.explain import explaining as explaining
from ._call.flops import flops as flops
from ._call.register import register as register
from ._config import config as config
from ._fuse.fuse import fuse as fuse
from ._heap import heap_report as heap_report
from ._heap import init as init
from ._heap import shutdown as shutdown
from ._ops._norm import LayerNorm as LayerNorm
from ._ops._norm import RMSNorm as RMSNorm
from ._ops._quantize import quantize as quantize
from ._ops._recipe import DelayedScaling as DelayedScaling
from ._ops._recipe import Format as Format
from ._ops._recipe import QuantizedWeight as QuantizedWeight
from ._ops._recipe import Recipe as Recipe
from ._ops._scaled import Scaled as Scaled
from ._ops.attention.attention import attention as attention
from ._ops.attention.flash_decode import flash_decode as flash_decode
from ._ops.attention.kv_cache import KVCache as KVCache
from ._ops.attention.kv_cache import attend_to_cache as attend_to_cache
from ._ops.attention.kv_cache import fill_cache as fill_cache
from ._ops.attention.merge_attention import merge_attention as merge_attention
from ._ops.attention.sequence_layouts import causal_positions as causal_positions
from ._ops.attention.sequence_layouts import reorder_for_causal as reorder_for_causal
from ._ops.attention.sequence_layouts import restore_order as restore_order
from ._ops.attention.ulysses_attention import ulysses_attention as ulysses_attention
from ._ops.attention.update_cache import update_cache as update_cache
from ._ops.collectives.all_reduce import all_reduce as all_reduce
from ._ops.collectives.exchange import all_gather as all_gather
from ._ops.collectives.exchange import all_to_all as all_to_all
from ._ops.collectives.exchange import reduce_scatter as reduce_scatter
from ._ops.collectives.halo_exchange import halo_exchange as halo_exchange
from ._ops.collectives.ragged_all_to_all import ragged_all_to_all as ragged_all_to_all
from ._ops.collectives.wire_report import WireCall as WireCall
from ._ops.collectives.wire_report import wire_report as wire_report
from ._ops.experts.dispatch_grouped_matmul import dispatch_grouped_matmul as dispatch_grouped_matmul
from ._ops.experts.dispatch_grouped_matmul import grouped_matmul_combine as grouped_matmul_combine
from ._ops.experts.moe_dispatch import moe_combine as moe_combine
from ._ops.experts.moe_dispatch import moe_dispatch as moe_dispatch
from ._ops.products.all_gather_matmul import all_gather_matmul as all_gather_matmul
from ._ops.products.all_to_all_matmul import all_to_all_matmul as all_to_all_matmul
from ._ops.products.grouped_matmul import grouped_matmul as grouped_matmul
from ._ops.products.matmul import matmul as matmul
from ._ops.products.matmul_all_reduce import matmul_all_reduce as matmul_all_reduce
from ._ops.products.matmul_all_to_all import matmul_all_to_all as matmul_all_to_all
from ._ops.products.matmul_reduce_scatter import matmul_reduce_scatter as matmul_reduce_scatter
from ._own_kernels.custom_call import custom_call as custom_call
from ._own_kernels.custom_call import include_dir as include_dir
from ._own_kernels.custom_call import library_path as library_path
from ._own_kernels.custom_call import register_custom_call as register_custom_call
from ._tools.tuner import tune as tune
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
