"""The devices of a program, where the mesh of a shard_map is abstract.

``jit(op)(x, w)`` of arrays that lie on devices, and ``shard_map(mesh=mesh.abstract_mesh)``, are
traced over a mesh without devices. JAX knows them when it lowers the program: it takes them from
the arguments, and position i of the mesh is device i of that order, in all processes. A lowering
rule inside the shard_map is not told. That of shard_map itself is, so jflux listens to it.
"""

from __future__ import annotations

import contextvars
from typing import Any

import numpy as np
from jax.interpreters import mlir
from jax.sharding import AbstractMesh, Mesh

from .. import _jax_internals

_devices: contextvars.ContextVar[tuple[Any, ...] | None] = contextvars.ContextVar(
    "jflux_devices", default=None
)


def concrete(mesh: AbstractMesh, context: mlir.ModuleContext) -> Mesh | None:
    """The mesh with the devices of the program that is being lowered; None where it has none yet: a
    program that is lowered from shapes alone, or to be exported."""
    devices = _devices.get()
    exported = context.lowering_parameters.for_export
    if devices is None or exported or len(devices) != mesh.size:
        return None
    array = np.empty(len(devices), object)
    array[:] = devices
    return Mesh(array.reshape(mesh.axis_sizes), mesh.axis_names, axis_types=mesh.axis_types)


def _remember() -> None:
    """Has the rule of shard_map leave the program's devices here, and lower as it always does."""
    of_shard_map = _jax_internals.SHARD_MAP.get()
    of_all = _jax_internals.LOWERINGS.get()
    if of_shard_map is None or of_all is None:
        return
    primitive = of_shard_map.shard_map_p
    lower = of_all._lowerings[primitive].rule

    def lower_and_tell(ctx: Any, *operands: Any, **params: Any) -> Any:
        around: Any = getattr(ctx.module_context, "axis_context", None)
        if not hasattr(around, "device_assignment"):  # inside another shard_map
            return lower(ctx, *operands, **params)
        token = _devices.set(around.device_assignment)
        try:
            return lower(ctx, *operands, **params)
        finally:
            _devices.reset(token)

    mlir.register_lowering(primitive, lower_and_tell)


_remember()
