"""jflux: tensor-parallel operations for JAX whose communication hides inside the computation."""

from . import checkpoint_policies as checkpoint_policies
from . import reference as reference
from ._config import config as config
from ._custom import custom_call as custom_call
from ._custom import include_dir as include_dir
from ._custom import library_path as library_path
from ._custom import register_custom_call as register_custom_call
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
from ._tuner import tune as tune
from ._version import __version__ as __version__
