"""Tensor parallelism in up to three dimensions, beside data parallelism (arXiv 2305.13525)."""

from ._grid import Grid as Grid
from ._layers import conv as conv
from ._layers import dense as dense
from ._layers import embed as embed
from ._layers import group_norm as group_norm
from ._layers import layer_norm as layer_norm
from ._layers import rms_norm as rms_norm
from ._product import gather as gather
from ._scan import save_gathered as save_gathered
from ._scan import scan as scan
from ._scheme import NO_OVERLAP as NO_OVERLAP
from ._scheme import Overlap as Overlap
from ._scheme import Scheme as Scheme

__all__ = [
    "NO_OVERLAP",
    "Grid",
    "Overlap",
    "Scheme",
    "conv",
    "dense",
    "embed",
    "gather",
    "group_norm",
    "layer_norm",
    "rms_norm",
    "save_gathered",
    "scan",
]
