"""Plans of calls whose groups lie on several nodes: `_two_level` has the forms that they choose."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from .. import _config
from .._call import forms
from .._call.forms import AttributesRule, Call, CanonicalRule, Form, Run, Takes, WhyNot
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


#: (operands' types, params, levels) -> the step of a product.
StepRule = Callable[[Arrays, Any, Levels], Step]


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


def plan_product(step: Step, params: Any, levels: Levels) -> Plan | WhyNot:
    """The plan of a product over two levels, or why it has none: a pure function, but for the
    thread's switches."""
    if step.rows < FEWEST_ROWS and _product_plan.why_kernel(params) is None:
        return WhyNot(
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
    return Plan(Path.TWO_LEVEL, f"{levels}; {words}", config={**sizes, **config}, levels=levels)


def levels_of(plan: Plan) -> Levels:
    """The levels of a call that runs over two."""
    assert plan.levels is not None
    return plan.levels


def over_nodes(plan: Callable[[Call, Machine], Plan | WhyNot]) -> Takes:
    """Of a form over two levels, which takes calls whose ranks lie on several nodes alone."""

    def takes(call: Call, machine: Machine) -> Plan | WhyNot | None:
        return None if call.levels is None else plan(call, machine)

    return takes


def collective(
    inside: Callable[[Call, Machine], Plan | WhyNot], plan: Callable[[Call], Plan]
) -> Takes:
    """Of the form over two levels of a collective.

    Args:
      inside: whether the kernel takes the call by the ranks of a node. If it does not, `lax` takes
        all of the call, for the same reason.
      plan: of the call.
    """

    def takes(call: Call, machine: Machine) -> Plan | WhyNot:
        assert call.levels is not None
        if call.levels.local == 1:
            return WhyNot(f"{call.levels}: nothing of it runs inside a node")
        found = inside(call.inside, machine)
        return found if isinstance(found, WhyNot) else plan(call)

    return over_nodes(takes)


def forms_of_product(
    product: _product_plan.Product,
    step: StepRule,
    *,
    attributes: AttributesRule,
    canonical: CanonicalRule,
    two_level: Run,
    decomposed: Run,
) -> tuple[Form, ...]:
    """The forms of a product: one kernel; over two levels, what `step` says for one node's data;
    and decomposed."""

    def takes(call: Call, machine: Machine) -> Plan | WhyNot:
        assert call.levels is not None
        if why := product.reference(call, machine):
            return why
        return plan_product(step(call.arrays, call.params, call.levels), call.params, call.levels)

    return (
        forms.kernel(product.kernel, attributes, canonical=canonical),
        Form(over_nodes(takes), two_level),
        Form(product.decomposed, decomposed),
    )
