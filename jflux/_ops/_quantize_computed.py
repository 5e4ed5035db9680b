"""quantize of what is computed from several arrays as they are read: of an activation, or of its
gradients, which then are in no array of 16 bits. Kernels: cc/ops/quantize.

The copies of a pair of arrays, which a product sums over both, are one array `in_turns`.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive

from .. import _native
from .._call import forms, local_ops
from .._call.forms import Op, ShapeDtype
from .._call.plans import Arrays
from .._call.primitives import make_primitive
from . import _epilogue, _quantize
from ._epilogue import Epilogue
from ._recipe import Format, in_rows
from ._scaled import BLOCK, Scaled
from .products import _product


class Source(enum.IntEnum):
    """What is quantised (cc/ops/quantize/quantize.h: QuantizeSource)."""

    #: x.
    GIVEN = 0
    #: activation(x), or activation(gate) * x, of (x) or (gate, x).
    ACTIVATED = 1
    #: The gradient of x, of (dy, x).
    GRADIENT = 2
    #: Those of gate and x, of (dy, gate, x). The copies in turns are in dy's place.
    GRADIENTS = 3
    #: Two arrays: (x, x). The copies are in turns.
    PAIR = 4

    @property
    def is_pair(self) -> bool:
        return self in (Source.GRADIENTS, Source.PAIR)


@dataclasses.dataclass(frozen=True)
class Params:
    """A call, less its operands, which have one shape [rows, columns] and type.

    Results are the copy (of GRADIENTS in 16 bits, two values each), its scale, and, with
    `transpose`, those of the transpose of each array.
    """

    source: Source
    activation: str | None
    form: Format
    transpose: bool

    @property
    def plain(self) -> _quantize.Params:
        """The call on what is computed."""
        dtype, block = np.dtype(self.form.dtype), (self.form.block[0], self.form.block[1])
        return _quantize.Params(dtype, block, self.transpose, self.form.power_of_two, False)


def is_taken(form: Format, *arrays: Any) -> bool:
    """Whether kernels quantise so what they compute of arrays of such types."""
    wide = {jnp.dtype(a.dtype) for a in arrays}
    return form.block == (1, BLOCK) and wide <= {jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)}


def activated(epilogue: Epilogue, sums: Sequence[jax.Array], form: Format) -> Scaled:
    """``form.of_rows`` of the activated sums [..., columns]."""
    params = Params(Source.ACTIVATED, epilogue.activation, form, transpose=False)
    values, scale = _activated.bind(*map(in_rows, sums), params=params)
    shape = sums[0].shape
    return Scaled(values.reshape(shape), scale.reshape(*shape[:-1], scale.shape[-1]))


def gradients(
    epilogue: Epilogue, sums: Sequence[jax.Array], dy: jax.Array, form: Format, transpose: bool
) -> tuple[Scaled, Sequence[Scaled | None]]:
    """``form.of_rows`` of the gradients of sums [..., columns]: (the copy, of two sums `in_turns`,
    their transposes)."""
    *lead, columns = dy.shape
    arrays = [in_rows(a) for a in (dy, *sums)]
    if len(sums) == 1:
        params = Params(Source.GRADIENT, epilogue.activation, form, transpose)
        values, scale, *turned = _activated.bind(*arrays, params=params)
    else:
        params = Params(Source.GRADIENTS, epilogue.activation, form, transpose)
        of_dy = lax.bitcast_convert_type(arrays[0], jnp.uint16)
        pairs, scale, *turned = _gradients.bind(of_dy, *arrays[1:], params=params)
        values = lax.bitcast_convert_type(pairs, form.dtype)
    one = Scaled(values.reshape(*lead, len(sums) * columns), scale.reshape(*lead, scale.shape[-1]))
    if not transpose:
        return one, [None] * len(sums)
    return one, [Scaled(*turned[i : i + 2]) for i in range(0, len(turned), 2)]


def pair(a: Any, b: Any, form: Format) -> Scaled:
    """The copies of two arrays [rows, columns] in turns."""
    return Scaled(*_pair.bind(a, b, params=Params(Source.PAIR, None, form, transpose=False)))


def in_turns(a: Scaled, b: Scaled) -> Scaled:
    """[rows, 2 columns]: 128 columns of a, 128 of b, and so on. Scales are of 128 columns."""

    def joined(a: jax.Array, b: jax.Array, size: int) -> jax.Array:
        both = [one.reshape(one.shape[0], -1, size) for one in (a, b)]
        return jnp.stack(both, 2).reshape(a.shape[0], -1)

    return Scaled(joined(a.values, b.values, BLOCK), joined(a.scale, b.scale, 1))


# ---- The primitives ------------------------------------------------------------------------------


def _computed(arrays: Arrays, params: Params) -> Sequence[jax.Array]:
    """What is quantised."""
    source, (first, *sums) = params.source, arrays
    if source is Source.PAIR:
        return arrays
    gated = len(arrays) == 2 if source is Source.ACTIVATED else source is Source.GRADIENTS
    epilogue = Epilogue((False,) * (1 + gated), params.activation, gated)
    if source is Source.ACTIVATED:
        return _epilogue.apply(epilogue, arrays, (), first.dtype)[0]
    if source is Source.GRADIENTS:
        first = lax.bitcast_convert_type(first, sums[0].dtype)
    return _epilogue.gradient(epilogue, sums, [first])


def _made(
    quantize: Callable[[Arrays, _quantize.Params], Sequence[jax.Array]],
    arrays: Arrays,
    params: Params,
) -> Sequence[jax.Array]:
    each = [quantize([a], params.plain) for a in _computed(arrays, params)]
    if not params.source.is_pair:
        return each[0]
    copy = in_turns(*(Scaled(*one[:2]) for one in each))
    values = copy.values
    if params.source is Source.GRADIENTS:
        pairs = values.reshape(*arrays[0].shape, 2)
        values = lax.bitcast_convert_type(pairs, jnp.uint16)
    return [values, copy.scale, *(a for one in each for a in one[2:])]


def _shapes(arrays: Arrays, params: Params) -> Sequence[ShapeDtype]:
    copy, scale, *turned = _quantize.result_shapes([arrays[-1]], params.plain)
    if not params.source.is_pair:
        return [copy, scale, *turned]
    (rows, columns), dtype = copy
    (down, across), wide = scale
    values = ((rows, columns), np.dtype(np.uint16)), ((rows, 2 * columns), dtype)
    return [values[params.source is Source.PAIR], ((down, 2 * across), wide), *turned, *turned]


def _why_not(arrays: Arrays, params: Params, platform: str) -> str | None:
    if params.source is not Source.PAIR and not is_taken(params.form, arrays[-1]):
        return "kernels compute what they quantise of 16 bits, in blocks (1, 128)"
    if len({a.dtype for a in arrays[-2:]}) > 1:
        return "the kernels take arrays of one type"
    if params.source.is_pair and arrays[-1].shape[1] % BLOCK:
        return f"the kernels take pairs of whole blocks of {BLOCK} columns"
    return _quantize.why_not([arrays[-1]], params.plain, platform)


def _why_not_portable(arrays: Arrays, params: Params, platform: str) -> str | None:
    if params.source is Source.PAIR:
        return None
    return "only Hopper's kernels compute what they quantise"


def _attributes(arrays: Arrays, params: Params, plan: Any) -> dict[str, Any]:
    number = _native.number_of(params.activation, _native.ACTIVATIONS)
    return _quantize.attributes(params.plain, params.source, number)


def _batch(primitive: Any, operands: Any, dims: Any, *, params: Params) -> Any:
    bind = functools.partial(primitive.bind, params=params)
    return _product.batch_one_by_one(bind, operands, dims)


def _make(aliases: Mapping[int, int]) -> Primitive:
    op = Op(
        name=_quantize.OP,
        result_shapes=_shapes,
        reference=functools.partial(_made, _quantize.in_lax),
        forms=(
            local_ops.kernel(
                _quantize.OP,
                why_not=_why_not,
                attributes=_attributes,
                why_not_portable=_why_not_portable,
                checked_on_gpus=True,
                on_cpus=False,
                is_optional=True,
                aliases=aliases,
            ),
            forms.decomposed(lambda arrays, params, plan: _made(_quantize.bind, arrays, params)),
        ),
        batch=_batch,
        is_local=True,
        is_split_by_xla=True,
    )
    return make_primitive(op)


_activated, _pair = _make({}), _make({})
_gradients = _make({0: 0})  # dy's bytes become those of the copy, tile by tile
