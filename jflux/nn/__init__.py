"""jflux.nn: tensor-parallel layers of jflux's ops.

The functions here take arrays. Layers with parameters are in `jflux.nn.linen` and `jflux.nn.nnx`,
which need Flax and are imported when they are first used. :class:`TensorParallel` brings the ops
into models that exist, as their layers' ``dot_general``; `jflux.nn.qwix` does it by Qwix's rules.
"""

import importlib
from typing import TYPE_CHECKING

from .._ops.products.ragged_dot import ragged_dot as ragged_dot
from .._ops.products.ragged_dot import ragged_dot_general as ragged_dot_general
from ._attention import attention as attention
from ._attention_fn import attention_fn as attention_fn
from ._cache import cache_specs as cache_specs
from ._cache import init_cache as init_cache
from ._dense import column_parallel as column_parallel
from ._dense import gated_mlp as gated_mlp
from ._dense import mlp as mlp
from ._dense import row_parallel as row_parallel
from ._dot_general import DotGeneral as DotGeneral
from ._dot_general import TensorParallel as TensorParallel
from ._load import load as load
from ._load import open_safetensors as open_safetensors
from ._moe import MixtureOutput as MixtureOutput
from ._moe import mixture as mixture
from ._rotary import Rotary as Rotary
from ._rotary import RotaryScaling as RotaryScaling
from ._rules import logical_axis_rules as logical_axis_rules
from ._tensors import Tensor as Tensor
from ._vocabulary import cross_entropy as cross_entropy
from ._vocabulary import embed as embed

if TYPE_CHECKING:
    from . import linen as linen
    from . import nnx as nnx
    from . import qwix as qwix
else:

    def __getattr__(name: str) -> object:
        if name in ("linen", "nnx", "qwix"):
            return importlib.import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
