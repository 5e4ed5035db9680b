"""What the ops that put communication into a grouped product share: how a call is planned, and its
batching rule. Where no kernel takes a call, it is decomposed into the steps."""

from __future__ import annotations

from typing import Any

from .. import _config, _dispatch
from .._dispatch import Machine, Plan
from .._levels import Levels
from .._ops import _grouped_primitives, _product


def native_plan(
    op: str, call: dict[str, Any], machine: Machine, *, gated: bool, what: str
) -> dict[str, Any] | str:
    """The native plan of a call, with the tile that a test forces, or why there is none. `what`
    takes the workspace, for the message."""
    tile = _grouped_primitives.forced_tile(gated)
    if tile.size and machine.on_gpus:
        call = call | {"tile_n": int(tile[0]), "cluster_m": int(tile[1])}
    try:
        native = machine.native_plan(op, call)
    except ValueError as refused:
        return str(refused)
    if not _config.config.always and native["workspace_bytes"] > machine.heap_bytes // 3:
        return (
            f"the {what} take {native['workspace_bytes']} bytes, more than a third of a heap of "
            f"{machine.heap_bytes}"
        )
    return native


def two_steps(why: str) -> Plan:
    return _dispatch.decomposed(f"two steps: {why}")


def plan_two_level(arrays: Any, params: Any, machine: Machine, levels: Levels) -> Plan:
    return two_steps(f"{levels}, and the kernel reaches one node's ranks")


def batch(primitive: Any, operands: Any, dims: Any, *, params: Any) -> Any:
    return _product.batch_one_by_one(
        lambda *one: primitive.bind(*one, params=params), operands, dims
    )
