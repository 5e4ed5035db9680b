"""The rules, in the order in which they look at a body."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..sites import Rule
from ..specs import CONSTRAINTS
from . import (
    collectives,
    exchanged_products,
    gathered_products,
    scattered_products,
    sharded_products,
    summed_products,
)

#: By the name of the collective's primitive; the first rule that finds something has it.
RULES: Sequence[Mapping[str, Rule]] = (
    {"all_gather": gathered_products.find},
    {"reduce_scatter": scattered_products.find},
    {"psum": summed_products.find, "psum_invariant": summed_products.find},
    {"all_to_all": exchanged_products.find_after},
    {"all_to_all": exchanged_products.find_before},
    collectives.RULES,
)

#: The same outside of `shard_map`.
GLOBAL_RULES: Sequence[Mapping[str, Rule]] = (
    dict.fromkeys(CONSTRAINTS, sharded_products.find_constraint),
    {"dot_general": sharded_products.find_product},
)

#: The ops that rules take.
OPS = (
    gathered_products.OP, scattered_products.OP, summed_products.OP, exchanged_products.after.OP,
    exchanged_products.before.OP, *collectives.OPS,
)  # fmt: skip
