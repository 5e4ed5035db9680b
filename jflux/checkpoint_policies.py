"""Policies for ``jax.checkpoint`` that know jflux's products, as ``jax.checkpoint_policies`` knows
JAX's: what the forward pass keeps, so that the backward pass need not compute it again.

``jax.checkpoint_policies.dots_saveable`` names `dot_general` alone, and has every fused product run
again. With ``jax.checkpoint_policies.save_from_both_policies`` those of this module and JAX's are
one.
"""

from __future__ import annotations

from typing import Any

import jax

from ._call import derivatives
from ._ops._recipe import QUANTIZED
from ._ops._spec import products
from ._ops.products._product import PRODUCT
from ._ops.products.all_gather_matmul import ACTIVATED, GATHERED, PREACTIVATION
from ._ops.products.all_to_all_matmul import EXCHANGED

_PRODUCTS = frozenset(f"jflux_{spec.name}" for spec in products()) | {derivatives.NAME}
_RESULTS = (PRODUCT, PREACTIVATION, ACTIVATED, QUANTIZED)
_results_saveable = jax.checkpoint_policies.save_only_these_names(*_RESULTS)
# Products by a recipe may be of several operations.
_moved_saveable = jax.checkpoint_policies.save_only_these_names(GATHERED, EXCHANGED)
_names_saveable = jax.checkpoint_policies.save_only_these_names(*_RESULTS, GATHERED, EXCHANGED)


def products_saveable(prim: Any, *avals: Any, **params: Any) -> bool:
    """Keeps all that products make: `dots_saveable`, and jflux's products.

    Of jflux's it keeps y, what an activation was applied to, and the gathered or exchanged x, each
    only where the backward pass needs it, and of those by a recipe the quantised x. Nothing is
    multiplied or sent again.
    """
    of_jax = jax.checkpoint_policies.dots_saveable(prim, *avals, **params)
    return _is_product(prim, *avals, **params) or of_jax


def products_with_no_batch_dims_saveable(prim: Any, *avals: Any, **params: Any) -> bool:
    """Keeps what products with weights make, and not those of two activations, as in attention:
    `dots_with_no_batch_dims_saveable`, and jflux's products, which have no batch dimensions."""
    of_jax = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    return _is_product(prim, *avals, **params) or of_jax(prim, *avals, **params)


def products_saveable_gathering_again(prim: Any, *avals: Any, **params: Any) -> Any:
    """As `products_saveable`, but for the gathered or exchanged x: the backward pass communicates
    again, without a product, and a rank keeps 1/N as much of it."""
    of_jax = jax.checkpoint_policies.dots_saveable(prim, *avals, **params)
    return of_jax or _results_saveable(prim, *avals, **params)


def of_fused(policy: Any, prim: Any, *avals: Any, **params: Any) -> Any:
    """What a policy that knows JAX's primitives says of jflux's (`jflux.fuse`): of what products
    make, what it says of a product with a weight; of a gathered or exchanged x, what it says of an
    all-gather."""
    if _results_saveable(prim, *avals, **params):
        dimensions = (((1,), (0,)), ((), ()))
        return policy(jax.lax.dot_general_p, *avals, dimension_numbers=dimensions)
    if _moved_saveable(prim, *avals, **params):
        return policy(jax.lax.all_gather_p, *avals)
    return policy(prim, *avals, **params)


def _is_product(prim: Any, *avals: Any, **params: Any) -> bool:
    return prim.name in _PRODUCTS or _names_saveable(prim, *avals, **params)


__all__ = [
    "products_saveable",
    "products_saveable_gathering_again",
    "products_with_no_batch_dims_saveable",
]
