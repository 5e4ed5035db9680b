"""The private names of JAX that jflux uses, and what it does without each.

A JAX to come may lack any of them. `import jflux` does not fail then: what needs the name does what
`without` says, and the log says so once. ``python -m jflux.doctor`` lists what is missing, and
docs/internals/jax.md what would replace each name. cuDNN's attention has a file of its own,
_attention/cudnn.py.
"""

from __future__ import annotations

import dataclasses
import importlib
import logging
from typing import Any

import jax
from jax.extend.core import Primitive

from . import _config


@dataclasses.dataclass(frozen=True)
class Internal:
    """Private names of one of JAX's modules.

    Attributes:
      module, names: where JAX has them.
      without: what jflux does where one is missing.
    """

    module: str
    names: tuple[str, ...]
    without: str

    def why_missing(self) -> str | None:
        """Which name the installed JAX lacks; None: it has them all."""
        try:
            module = importlib.import_module(self.module)
        except ImportError:
            return f"JAX {jax.__version__} has no {self.module}"
        for name in self.names:
            if not hasattr(module, name):
                return f"JAX {jax.__version__} has no {self.module}.{name}"
        return None

    def get(self) -> Any:
        """The module, if it has the names. Else None, and a line in the log says what follows."""
        if why := self.why_missing():
            _config.say_once(logging.WARNING, f"jflux: {why}: {self.without}")
            return None
        return importlib.import_module(self.module)


_ABSTRACT = "calls over an abstract mesh take their lax reference"

#: Primitives whose lowerings JAX makes anew for other devices.
DEVICES = Internal(
    "jax._src.dispatch", ("prim_requires_devices_during_lowering",),
    "calls that exchange data take their lax reference",
)  # fmt: skip
#: The table of checks by primitive, and what a check is made of.
CHECKIFY = Internal(
    "jax._src.checkify", ("error_checks", "check_nans", "assert_func", "FailedCheckError"),
    "jax.experimental.checkify finds no errors in jflux's calls",
)  # fmt: skip
#: The primitive of shard_map.
SHARD_MAP = Internal("jax._src.shard_map", ("shard_map_p",), _ABSTRACT)
#: Lowering rules by primitive.
LOWERINGS = Internal("jax.interpreters.mlir", ("_lowerings",), _ABSTRACT)
#: The function that lowers a program.
LOWERING = Internal(
    "jax._src.interpreters.mlir", ("lower_jaxpr_to_module",),
    "calls on CPUs of several processes take their lax reference",
)  # fmt: skip
#: MLIR's threads.
THREADS = Internal(
    "jax._src.interpreters.mlir", ("global_thread_pool",),
    "a fork of a process that has a heap may hang when it exits",
)  # fmt: skip
#: The client of the key-value store of jax.distributed.
STORE = Internal("jax._src.distributed", ("global_state",), "several processes cannot meet")

ALL = (DEVICES, CHECKIFY, SHARD_MAP, LOWERINGS, LOWERING, THREADS, STORE)


def lower_for_its_devices(primitive: Primitive) -> None:
    """Has JAX lower the primitive anew for other devices, since its lowering names them. Where JAX
    cannot be told, calls take their reference (`primitives.plan_call`)."""
    if (dispatch := DEVICES.get()) is not None:
        dispatch.prim_requires_devices_during_lowering.add(primitive)
