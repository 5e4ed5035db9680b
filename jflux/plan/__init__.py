"""Which grid of ranks to train on: the communication model of AxoNN (arXiv 2305.13525, section V).

    import jflux.plan

    ranking = jflux.plan.rank("gpt-80b", 1024, "perlmutter")
    print(ranking.best.grid, ranking.best.communication)
    mesh = jflux.plan.rank(model, jax.device_count(), jflux.plan.measured()).best.mesh()

``python -m jflux.plan --help`` prints the ranking as a table and draws it. docs/guide/plan.md has
equations and what they say of the paper's own models.
"""

from . import equations as equations
from .equations import Breakdown as Breakdown
from .machine import MACHINES as MACHINES
from .machine import Machine as Machine
from .machine import measured as measured
from .model import Layer as Layer
from .model import Model as Model
from .model import alternate as alternate
from .models import MODELS as MODELS
from .models import gpt as gpt
from .models import llama as llama
from .models import named as named
from .models import unet as unet
from .predict import Extensions as Extensions
from .reading import read as read
from .search import NoGrid as NoGrid
from .search import Plan as Plan
from .search import Ranking as Ranking
from .search import grids as grids
from .search import rank as rank
from .show import draw as draw
from .show import table as table
from .training import Memory as Memory
from .training import Training as Training

__all__ = [
    "MACHINES",
    "MODELS",
    "Breakdown",
    "Extensions",
    "Layer",
    "Machine",
    "Memory",
    "Model",
    "NoGrid",
    "Plan",
    "Ranking",
    "Training",
    "alternate",
    "draw",
    "equations",
    "gpt",
    "grids",
    "llama",
    "measured",
    "named",
    "rank",
    "read",
    "table",
    "unet",
]
