"""Ops that are one kernel where that pays, and else a few steps, each of them another op: what the
plans of these ops share."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from .. import _config
from .._ranks.node_levels import Levels
from . import plans
from .plans import Arrays, Machine, Plan


@dataclasses.dataclass(frozen=True)
class Steps:
    """The steps of an op.

    Attributes:
      words: what plans call them.
    """

    words: str

    def plan(self, why: str) -> Plan:
        """The plan of a call that takes the steps."""
        return plans.decomposed(f"{self.words}: {why}")

    def plan_two_level(self, arrays: Arrays, params: Any, machine: Machine, levels: Levels) -> Plan:
        """The rule `plan_two_level` of `primitives.Rules`."""
        return self.plan(f"{levels}, and the kernel reaches the ranks of one node only")

    def native_plan(
        self, op: str, call: Mapping[str, int], machine: Machine, *, fills: str | None = None
    ) -> dict[str, int] | Plan:
        """The native plan of a call, or the plan of the steps, if the kernel does not take it.

        Args:
          fills: what fills the workspace, in words, for an op whose workspace grows with its
            operands. Such a workspace may take a third of the heap, so that other calls find room,
            the steps' calls among them.
        """
        try:
            native = machine.native_plan(op, call)
        except ValueError as refused:
            return self.plan(str(refused))
        too_much = native["workspace_bytes"] > machine.heap_bytes // 3
        if fills is None or _config.config.always or not too_much:
            return native
        return self.plan(
            machine.why_no_room(f"the {fills} take", native["workspace_bytes"], "a third")
        )
