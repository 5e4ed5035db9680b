"""Logical axis names, and which mesh axes they stand for."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from typing import Any

from .._ranks.meshes import AxisName, as_tuple, axes_of

Rules = Sequence[tuple[str, Any]]


def logical_axis_rules(
    axis_name: AxisName = "tp",
    *,
    embed: AxisName | None = None,
    expert_axis: AxisName | None = None,
    **others: AxisName | None,
) -> tuple[tuple[str, Any], ...]:
    """Flax's rules for the logical axes of jflux's layers.

    =============  =====================================  ============
    logical axis   dimension                              mesh axis
    =============  =====================================  ============
    ``mlp``        the hidden units of an MLP             `axis_name`
    ``heads``      heads of queries                       `axis_name`
    ``kv_heads``   heads of keys and values               `axis_name`
    ``vocab``      the vocabulary                         `axis_name`
    ``expert``     the experts of a mixture               `expert_axis`
    ``embed``      the width of the residual stream       `embed`
    ``kv``         the elements of a head                 none
    =============  =====================================  ============

    For ``flax.linen.logical_axis_rules``, ``flax.linen.logical_to_mesh_sharding`` and
    ``flax.nnx.logical_axis_rules``. Each name has one rule. Of two rules for one name linen takes
    the first and NNX the last, so pass `embed` and `others` here in place of adding rules.

    Args:
      axis_name: the mesh axis of tensor parallelism, or a tuple of them.
      embed: a mesh axis over which weights are stored in parts too, as in fully sharded data
        parallelism (FSDP). XLA gathers a weight where it is used.
      expert_axis: that of expert parallelism.
      others: mesh axes of further logical names, such as ``layers="stage"``, or others for names
        of the table.

    Raises:
      ValueError: `embed` has a mesh axis that is in `axis_name` or `expert_axis` too, which splits
        another dimension of the same weights.
    """
    split = ("mlp", "heads", "kv_heads", "vocab")
    for name, axis in (("axis_name", axis_name), ("expert_axis", expert_axis)):
        if set(axes_of(embed)) & set(axes_of(axis)):
            raise ValueError(
                f"jflux.nn.logical_axis_rules: {embed=} must have no mesh axis of {name}={axis!r}, "
                "which splits another dimension of the same weights"
            )
    rules: dict[str, Any] = {name: axis_name for name in split}
    return tuple((rules | {"expert": expert_axis, "embed": embed, "kv": None} | others).items())


def ambient_rules() -> Rules:
    """Those of Flax's context, if somebody has imported Flax."""
    flax_spmd = sys.modules.get("flax.core.spmd")
    return () if flax_spmd is None else flax_spmd.get_logical_axis_rules()


def mesh_axes(
    names: Sequence[Any], rules: Rules, axes_of_mesh: Collection[Any] | None = None
) -> list[tuple[Any, ...]]:
    """The axes of the mesh that each dimension is split over, of dimensions with these names; None:
    of any mesh.

    A name that no rule has is that of a mesh axis, or of a dimension that is not split. Of several
    rules for one name the first one counts whose mesh axes no other dimension has taken: Flax's
    meaning (flax.linen.logical_to_mesh_axes)."""
    found: list[tuple[Any, ...] | None] = [None] * len(names)
    for logical, target in rules:
        axes = _as_axes(target)
        taken = [axis for one in found if one is not None for axis in one]
        if logical in names and not any(axis in taken for axis in axes):
            at = names.index(logical)
            found[at] = axes if found[at] is None else found[at]
    split = [_as_axes(names[i]) if one is None else one for i, one in enumerate(found)]
    if axes_of_mesh is None:
        return split
    return [tuple(axis for axis in axes if axis in axes_of_mesh) for axes in split]


def ambiguous(names: Sequence[Any], rules: Rules, axes_of_mesh: Collection[Any]) -> str | None:
    """The first of these names that two rules split differently over the mesh; None: there is
    none."""
    for name in names:
        targets = [_as_axes(target) for logical, target in rules if logical == name]
        if len({tuple(axis for axis in axes if axis in axes_of_mesh) for axes in targets}) > 1:
            return str(name)
    return None


def _as_axes(target: Any) -> tuple[Any, ...]:
    if target is None:
        return ()
    return tuple(target) if isinstance(target, list) else as_tuple(target)
