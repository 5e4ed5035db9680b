"""Plans of calls whose groups lie on several nodes: `_two_level` has the forms that they choose."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Protocol

from .. import _config
from .._call import plans
from .._call.plans import MEASURED_TFLOPS, Arrays, Machine, Path, Plan
from .._ranks.node_levels import Levels
from .products import _product_plan

#: The rate at which a rank sends to other nodes, with one 400 Gb/s network card for each GPU. This
#: figure and the three below it are assumptions, not measurements.
NODE_BYTES_PER_SECOND = 50e9
#: Seconds that a collective between nodes takes whatever its bytes, and one inside a node.
NODE_LATENCY = 10e-6
INSIDE_LATENCY = 5e-6
#: Seconds that one more chunk costs: a kernel's start and end, and a transfer's.
CHUNK_SECONDS = 20e-6
#: Rows of a product below which it is not worth a kernel of its own.
FEWEST_ROWS = 512
MOST_CHUNKS = 8


@dataclasses.dataclass(frozen=True)
class Step:
    """A product over two levels does this for each node: one product, and the transfer of its data.

    Attributes:
      rows: of the product.
      flops: operations of the product on each rank.
      nbytes: bytes that each rank sends to another node in this step.
      divided: size of the dimension that chunks are parts of, in one rank's shard.
      own: whether the own node's product needs no transfer, and hides one.
    """

    rows: int
    flops: float
    nbytes: float
    divided: int
    own: bool = True

    @property
    def product_seconds(self) -> float:
        return self.flops / (MEASURED_TFLOPS * 1e12)

    @property
    def transfer_seconds(self) -> float:
        return self.nbytes / NODE_BYTES_PER_SECOND


class PlanRule(Protocol):
    """The same as `primitives.PlanRule`, which this module cannot import."""

    def __call__(self, arrays: Arrays, params: Any, machine: Machine) -> Plan: ...


class TwoLevelPlanRule(Protocol):
    """The same as `primitives.TwoLevelPlanRule`."""

    def __call__(self, arrays: Arrays, params: Any, machine: Machine, levels: Levels) -> Plan: ...


class StepRule(Protocol):
    """(operands' types, params, levels) -> the step of a product."""

    def __call__(self, arrays: Arrays, params: Any, levels: Levels) -> Step: ...


def chunks_of(step: Step) -> int:
    """How many chunks a step is cut into: a pure function. The number divides `step.divided`.
    Chunks are whole tiles of rows if possible.

    A pipeline of products and transfers takes the time of the slower of both, and at its start or
    end one chunk of the faster one, which nothing hides. More chunks make that chunk shorter. If
    the product for the own node hides a whole transfer, one chunk is enough.
    """
    product, transfer = step.product_seconds, step.transfer_seconds
    if step.own and transfer <= product:
        return 1
    wanted = round(math.sqrt(min(product, transfer) / CHUNK_SECONDS))
    most = max(1, min(wanted, step.rows // FEWEST_ROWS, MOST_CHUNKS))
    even = [c for c in range(1, most + 1) if step.divided % c == 0]
    return max([c for c in even if step.divided // c % _product_plan.TILE_ROWS == 0] or even)


def plan_product(step: Step, params: Any, levels: Levels) -> Plan:
    """The plan of a product over two levels: a pure function, but for the thread's switches."""
    if step.rows < FEWEST_ROWS and _product_plan.why_kernel(params) is None:
        return plans.decomposed(
            f"{levels}, and {step.rows} rows of the product for each are fewer than {FEWEST_ROWS}"
        )
    forced = _config.config.current().node_chunks
    chunks = chunks_of(step) if forced is None else math.gcd(forced, step.divided)
    return two_level(
        levels,
        f"the product for each in {chunks} chunk{'s' if chunks > 1 else ''}, by an assumed "
        f"{NODE_BYTES_PER_SECOND / 1e9:.0f} GB/s of a rank between nodes",
        chunks=chunks,
    )


def two_level(levels: Levels, words: str, **config: int) -> Plan:
    """XLA's collectives between nodes and jflux's ops inside them run the call."""
    sizes = {"nodes": levels.count, "ranks": levels.local}
    return Plan(Path.TWO_LEVEL, f"{levels}; {words}", config={**sizes, **config})


def lax_alone(levels: Levels) -> Plan:
    """The plan of a collective that has nobody to talk to inside its node."""
    return plans.reference(f"{levels}: nothing of it runs inside a node")


def reference_inside(
    plan: PlanRule,
    arrays: Arrays,
    params: Any,
    machine: Machine,
    levels: Levels,
) -> Plan | None:
    """The plan of a call whose ranks inside a node would take the reference, by the op's own plan
    rule: all of it takes that, and for the same reason."""
    if levels.local == 1:
        return None
    part = dataclasses.replace(params, axis_names=(levels.inside,), world=levels.local)
    found = plan(arrays, part, machine)
    return found if found.path == Path.REFERENCE else None


def plan_rule(plan: PlanRule, step: StepRule) -> TwoLevelPlanRule:
    """The two-level plan rule of a product, for `primitives.Rules`.

    Args:
      plan: the op's plan rule for ranks of one node.
      step: what it does for one node's data.
    """

    def rule(arrays: Arrays, params: Any, machine: Machine, levels: Levels) -> Plan:
        if (found := reference_inside(plan, arrays, params, machine, levels)) is not None:
            return found
        return plan_product(step(arrays, params, levels), params, levels)

    return rule
