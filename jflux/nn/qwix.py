"""jflux's products as a provider of `Qwix <https://github.com/google/qwix>`_: rules say by regular
expressions which layers of a Flax model take them, and by which recipe. Needs the package qwix."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax

try:
    import qwix
except ImportError as error:
    raise ImportError("jflux.nn.qwix needs Qwix: pip install qwix") from error

from .._ops import _lax
from .._ops._recipe import Recipe
from ._dot_general import TensorParallel


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule(qwix.QuantizationRule):
    """Which layers, as ``qwix.QuantizationRule`` says it (`module_path`, a regular expression, and
    `op_names`), and how.

    Attributes:
      recipe: a :class:`jflux.Recipe`, or its name, as in :class:`jflux.nn.TensorParallel`. None:
        the ops, in the operands' type.
      mesh_axes: names of the dimensions of these layers' kernels, as in
        :meth:`jflux.nn.TensorParallel.dot_general`. Products of other arrays, with another number
        of dimensions, stay as they are.
    """

    recipe: Recipe | str | None = None
    mesh_axes: tuple[Any, ...] = ()


class Provider(qwix.QuantizationProvider):
    """For ``qwix.quantize_model``::

        rules = [
            Rule(module_path=".*/(gate|up)", recipe=jflux.Recipe.block, mesh_axes=("embed", "mlp")),
            Rule(module_path=".*/down", recipe=jflux.Recipe.block, mesh_axes=("mlp", "embed")),
        ]
        model = qwix.quantize_model(model, Provider(rules))

    The ``dot_general`` of a layer that a rule matches is a :class:`jflux.nn.DotGeneral` with its
    gradients; other operations stay as they are.

    Args:
      rules: the first that matches counts.
      of: the mesh axis of the ranks, and what else the products are told.
    """

    def __init__(self, rules: Sequence[Rule], of: TensorParallel | None = None):
        super().__init__(rules)
        self._of = TensorParallel() if of is None else of

    def dot_general(
        self, lhs: Any, rhs: Any, dimension_numbers: Any, *args: Any, **options: Any
    ) -> jax.Array:
        """As `lax.dot_general`."""
        rule, _ = self._get_current_rule_and_op_id("dot_general")
        dot: Any = _lax.dot_general
        if isinstance(rule, Rule) and len(rule.mesh_axes) == rhs.ndim:
            dot = dataclasses.replace(self._of, recipe=rule.recipe).dot_general(rule.mesh_axes)
        return dot(lhs, rhs, dimension_numbers, *args, **options)

    def get_intercept_map(self) -> Mapping[str, Any]:
        """What Qwix has called in place of what."""
        return super().get_intercept_map() | {"jax.lax.dot_general": self.dot_general}
