"""Recipe: how a product of 16 bits or more, and its derivatives, are made in 8 bits."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from .._call.forms import ShapeDtype
from . import _scaled
from ._lax import several
from ._quantize import quantize, scale_shape
from ._scaled import BLOCK, TYPES, Operand, Scaled

#: The name that `jax.checkpoint` policies know the quantised copy of x by, where it is not moved.
QUANTIZED = "jflux_quantized"
#: The type of products of what was quantised, where a recipe has none of 8 bits.
WIDE = jnp.bfloat16


@dataclasses.dataclass(frozen=True)
class Format:
    """How an operand is quantised: arguments of :func:`jflux.quantize`.

    Attributes:
      dtype: of the values.
      block: how many (rows, elements of what a product sums over) share a scale.
      power_of_two: scales are powers of two, so that quantising again in other blocks rounds
        nothing, but for values that become too small.
    """

    dtype: DTypeLike
    block: tuple[int, int]
    power_of_two: bool = True

    def __post_init__(self) -> None:
        dtype = np.dtype(self.dtype)
        if dtype not in TYPES:
            names = ", ".join(t.name for t in TYPES)
            raise TypeError(f"jflux.Format: dtype={dtype} is not one of {names}")
        _check_block("Format", self.block)
        object.__setattr__(self, "dtype", dtype)
        object.__setattr__(self, "block", tuple(self.block))

    def quantize(self, a: jax.Array, **options: Any) -> Any:
        """a [..., rows, columns], columns being summed over."""
        return quantize(a, self.dtype, block=self.block, power_of_two=self.power_of_two, **options)

    def shapes(self, shape: tuple[int, ...]) -> tuple[ShapeDtype, ShapeDtype]:
        """Of the values and of the scale of an array."""
        return (shape, self.dtype), (scale_shape(shape, self.block), np.dtype(np.float32))

    def of_rows(
        self, a: jax.Array, transpose: bool = False, scale: jax.Array | None = None
    ) -> tuple[Scaled, Scaled | None]:
        """a [..., columns], of which all leading dimensions are rows; with `transpose` also
        [columns, rows]. By this scale [1, 1], if it is given."""
        flat = in_rows(a)
        found = self.quantize(flat, transpose=transpose, scale=scale)
        one, turned = found if transpose else (found, None)
        lead = a.shape[:-1] if self.block[0] == 1 else (1,) * (a.ndim - 1)
        scale = one.scale.reshape(*lead, one.scale.shape[-1])
        return Scaled(one.values.reshape(a.shape), scale), turned


def in_rows(a: jax.Array) -> jax.Array:
    """[..., columns] -> [rows, columns]."""
    return a.reshape(math.prod(a.shape[:-1]), a.shape[-1])


def _check_block(of: str, block: Any) -> None:
    rows, summed = block
    if rows not in (-1, 1, BLOCK) or summed not in (-1, BLOCK):
        raise ValueError(
            f"jflux.{of}: {block=} must be (-1, 1 or {BLOCK}, -1 or {BLOCK}): a product takes a "
            f"scale out of the sum over {BLOCK} elements, or over all"
        )


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How a product ``y = x @ w`` of 16 bits or more is made in 8 bits, and its gradients. Every
    dense product takes one, as ``recipe=``.

    Operands are quantised, and multiplied as :class:`jflux.Scaled`; gradients are those of the
    same product without rounding (straight through), made of quantised operands too::

        y  = q(x) @ q(w)         x [m, k] by `x`, w [n, k] by `w`
        dx = q(dy) @ q(w)^T      dy [m, n] by `dy`, w [k, n] by `w`
        dw = q(x)^T @ q(dy)      x [k, m] and dy [n, m] by `dw`, of one each

    Each is quantised in blocks of what its product sums over, which is last above. Between forward
    and backward a rank keeps x's copy, moved as y's product moves it, in 8 bits, of which the
    backward pass makes that for dw; and w, or, of a :class:`QuantizedWeight`, its copy for dx.

    ================  ====================  ==============  ====================  ==================
    recipe            x                     w               dy                    dw
    ================  ====================  ==============  ====================  ==================
    `Recipe.tensor`   e4m3, a scale         a scale         e5m2, a scale         scales by tensor
    `Recipe.row`      e4m3, by row          by row          e5m2, by row          bfloat16
    `Recipe.block`    e4m3, 1 x 128         128 x 128       e4m3, 1 x 128         1 x 128 of tokens
    ================  ====================  ==============  ====================  ==================

    `tensor` is what others call current scaling; `row` is torchao's rowwise_with_gw_hp, and `block`
    the recipe of DeepSeek-V3 (arXiv 2412.19437, section 3.3). Their scales are powers of two.

    Attributes:
      x: of x's rows; its block has (1, or -1 for all) rows, as has dy's.
      w: of w.
      dy: of dy's rows.
      dw: of x^T and of dy^T, or None: x's copy and dy are multiplied in bfloat16, where dy
        is what the rank has: quantised if it came from other ranks, else as it was.
      precision: of y's product, unless the call names one; as in `lax.dot_general`.
      gradient_precision: of the products of 8 bits for dx and dw.
    """

    x: Format
    w: Format
    dy: Format
    dw: tuple[Format, Format] | None
    precision: lax.Precision | None = None
    gradient_precision: lax.Precision | None = None

    tensor: ClassVar[Recipe]
    row: ClassVar[Recipe]
    block: ClassVar[Recipe]

    def __post_init__(self) -> None:
        for name in ("x", "dy"):
            if (block := getattr(self, name).block)[0] == BLOCK:
                raise ValueError(f"jflux.Recipe: {name} has {block=}, which must have 1 or -1 rows")
        if self.dw is not None:
            object.__setattr__(self, "dw", tuple(self.dw))

    def quantize_weight(self, w: jax.Array, *, transpose_rhs: bool = False) -> QuantizedWeight:
        """w quantised once for many products: those of all microbatches of a step.

        Products take the result in place of w, and of ``recipe=`` and ``transpose_rhs=``. Its
        gradient is that of w, in w's type::

            def loss(w, microbatches):
                w = jflux.Recipe.block.quantize_weight(w)  # outside the scan
                return jnp.sum(jax.lax.map(lambda x: product(x, w), microbatches))

        Args:
          w: [..., k, n], or [..., n, k] with `transpose_rhs`; leading dimensions are those of a
            stack of weights, for a scan over layers.

        Examples:
          >>> w = jflux.Recipe.block.quantize_weight(jnp.ones((256, 128)))
          >>> jflux.matmul(jnp.ones((4, 256)), w).shape
          (4, 128)
        """
        one, other = self.w.quantize(lax.stop_gradient(w), transpose=True)
        forward, backward = (one, other) if transpose_rhs else (other, one)
        return QuantizedWeight(w, forward, backward, self, transpose_rhs)

    def delayed(self, amax_history_length: int = 1024) -> DelayedScaling:
        """The state before the first step of scaling by earlier steps, of a recipe whose scales are
        all by tensor.

        Raises:
          ValueError: for another one.
        """
        if {form.block for form in (self.x, self.w, self.dy, *(self.dw or ()))} != {(-1, -1)}:
            raise ValueError(
                "jflux.Recipe.delayed: delayed scaling has scales of tensors alone, as "
                f"jflux.Recipe.tensor has, not those of {self}"
            )
        lengths = {"scale": 1, "history": amax_history_length}
        arrays: Any = {
            name: jnp.full(lengths[name.rpartition("_")[2]], name.endswith("scale"), jnp.float32)
            for name in STATE
        }
        return DelayedScaling(**arrays, recipe=self)


# Tensor cores keep fewer bits of sums of 8-bit floats than float32 has. Of long sums less is lost
# if each 128 terms are added in float32, as blocks are.
_PRECISE: Any = {"gradient_precision": lax.Precision.HIGHEST}
_X, _DY = Format(jnp.float8_e4m3fn, (-1, -1)), Format(jnp.float8_e5m2, (-1, -1))
Recipe.tensor = Recipe(x=_X, w=_X, dy=_DY, dw=(_X, _DY), **_PRECISE)
_X, _DY = Format(jnp.float8_e4m3fn, (1, -1)), Format(jnp.float8_e5m2, (1, -1))
Recipe.row = Recipe(x=_X, w=_X, dy=_DY, dw=None, **_PRECISE)
_X, _W = Format(jnp.float8_e4m3fn, (1, BLOCK)), Format(jnp.float8_e4m3fn, (BLOCK, BLOCK))
Recipe.block = Recipe(x=_X, w=_W, dy=_X, dw=(_X, _X))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedWeight:
    """What :meth:`jflux.Recipe.quantize_weight` returns: a weight and its quantised copies.

    Attributes:
      w: the weight, which products read nothing of; gradients are its own.
      forward: [..., n, k], for y.
      backward: [..., k, n], for dx.
      recipe: by which it was quantised.
      transpose_rhs: whether w is [n, k].
    """

    w: jax.Array
    forward: Scaled
    backward: Scaled
    recipe: Recipe = dataclasses.field(metadata={"static": True})
    transpose_rhs: bool = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """w's shape."""
        return tuple(self.w.shape)

    @property
    def ndim(self) -> int:
        """How many dimensions w has."""
        return self.w.ndim

    @property
    def dtype(self) -> np.dtype:
        """w's type."""
        return np.dtype(self.w.dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedActivation:
    """The x of a product and its quantised copy by the recipe's `x`. The product reads the copy
    alone; gradients are those of x."""

    x: jax.Array
    copy: Scaled

    @property
    def shape(self) -> tuple[int, ...]:
        """x's shape."""
        return tuple(self.x.shape)

    @property
    def ndim(self) -> int:
        """How many dimensions x has."""
        return self.x.ndim

    @property
    def dtype(self) -> np.dtype:
        """x's type."""
        return np.dtype(self.x.dtype)


@dataclasses.dataclass(frozen=True)
class QuantizesActivation:
    """What jflux.nn passes as the recipe of a product with an activation whose y is the x of
    another one by the same recipe: y is a :class:`QuantizedActivation`."""

    recipe: Recipe


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DelayedScaling:
    """Scales of x, w and dy from their largest values in earlier steps: what products take as
    ``recipe=`` in place of `Recipe.tensor`. No scale then waits for the array that it is of.

    The state of one product (FP8 Formats for Deep Learning, arXiv 2209.05433; the arrays, and what
    becomes of them, are those of ``flax.linen.Fp8DirectDotGeneralOp``). A scale is the largest of
    the history, over the largest value of the type. **Its gradient is its next value**, and does
    not depend on y's cotangent but by the history of dy::

        state = jflux.Recipe.tensor.delayed()
        dw, state = jax.grad(lambda w, state: loss(x, w, recipe=state), (0, 1))(w, state)

    On all ranks it is the same: the histories have the largest of all. As of every operand that
    ranks share, its gradient is the sum of theirs, of which one has the value and the others zero.
    So one state is used once in a step; over microbatches it is carried from one to the next.

    Attributes:
      input_scale, kernel_scale, output_grad_scale: float32 [1], of the step before.
      input_amax_history, kernel_amax_history, output_grad_amax_history: float32 [length].
      recipe: types of values, and whether scales are powers of two.
    """

    input_scale: jax.Array
    kernel_scale: jax.Array
    output_grad_scale: jax.Array
    input_amax_history: jax.Array
    kernel_amax_history: jax.Array
    output_grad_amax_history: jax.Array
    recipe: Recipe = dataclasses.field(metadata={"static": True})


#: What the arrays of a :class:`DelayedScaling` are of: scales first, then histories.
STATE = tuple(field.name for field in dataclasses.fields(DelayedScaling) if field.name != "recipe")

#: What a product takes as its w.
Weight = Operand | QuantizedWeight
#: What a call takes as its recipe.
AnyRecipe = Recipe | DelayedScaling


def of_call(
    op: str, recipe: AnyRecipe | None, x: Any, w: Any, transpose_rhs: bool
) -> AnyRecipe | None:
    """The recipe of a call: the given one, or its weights'.

    Args:
      x, w: the operands, each of which may be several.

    Raises:
      TypeError, ValueError: where they do not fit.
    """
    ws = several(w)
    quantized = [one for one in ws if isinstance(one, QuantizedWeight)]
    if isinstance(recipe, DelayedScaling):
        if quantized:
            raise ValueError(f"jflux.{op}: w is quantised already, and {recipe=} has a scale of w")
        _check_wide(op, x, ws)
        return recipe
    if isinstance(recipe, QuantizesActivation):  # of jflux.nn alone
        of_call(op, recipe.recipe, x, w, transpose_rhs)
        return recipe
    if recipe is not None and not isinstance(recipe, Recipe):
        raise TypeError(
            f"jflux.{op}: recipe must be a jflux.Recipe, such as jflux.Recipe.block, got {recipe!r}"
        )
    for one in quantized:
        recipe = one.recipe if recipe is None else recipe
        if one.recipe != recipe:
            raise ValueError(
                f"jflux.{op}: w was quantised by {one.recipe}, and the call has {recipe=}"
            )
        if one.transpose_rhs != transpose_rhs:
            raise ValueError(
                f"jflux.{op}: w was quantised with transpose_rhs={one.transpose_rhs}, and the call "
                f"has {transpose_rhs=}"
            )
    if recipe is not None:
        _check_wide(op, x, ws)
    return recipe


def check_quantize(op: str, quantize: Any, preferred_element_type: DTypeLike | None) -> None:
    """Raises for a call's `quantize` that is no format, or beside a type of y."""
    if quantize is None:
        return
    if not isinstance(quantize, Format):
        raise TypeError(f"jflux.{op}: quantize must be a jflux.Format, got {quantize!r}")
    if preferred_element_type is not None and np.dtype(preferred_element_type) != np.float32:
        raise ValueError(
            f"jflux.{op}: with quantize, y is computed in float32, not "
            f"{np.dtype(preferred_element_type)}: leave preferred_element_type out"
        )


def quantized(form: Format, y: Any, with_gathered: bool = False) -> Any:
    """y, which may be several, quantised; `with_gathered`: of a pair of that and the gathered x."""
    if with_gathered:
        return quantized(form, y[0]), y[1]
    return jax.tree.map(form.quantize, y)


def _check_wide(op: str, x: Any, ws: Any) -> None:
    for name, each in (("x", several(x)), ("w", ws)):
        for one in each:
            dtype = getattr(one, "dtype", None)
            if dtype is None or not _is_wide(dtype):
                what = type(one).__name__ if dtype is None else dtype
                raise TypeError(
                    f"jflux.{op}: with a recipe {name} is of a real floating type, of 16 bits at "
                    f"least, which the recipe quantises; got {what}"
                )


def _is_wide(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.floating)) and np.dtype(dtype).itemsize > 1


def specs(name: str, operand: Any, spec: PartitionSpec, mesh: Any) -> Any:
    """:func:`_scaled.specs`, also of a :class:`QuantizedWeight`."""

    def of_one(one: Any) -> Any:
        if not isinstance(one, QuantizedWeight):
            return _scaled.specs(name, one, spec, mesh)
        entries = (*spec, *[None] * (one.ndim - len(spec)))
        turned = PartitionSpec(*entries[:-2], entries[-1], entries[-2])
        of_copies = (spec, turned) if one.transpose_rhs else (turned, spec)
        forward, backward = (
            _scaled.specs(name, copy, of_copy, mesh)
            for copy, of_copy in zip((one.forward, one.backward), of_copies, strict=True)
        )
        return dataclasses.replace(one, w=spec, forward=forward, backward=backward)  # type: ignore[arg-type]

    return jax.tree.map(of_one, operand, is_leaf=is_operand)


def is_operand(one: Any) -> bool:
    """Whether it is an operand of several arrays."""
    return isinstance(one, Scaled | QuantizedWeight)
