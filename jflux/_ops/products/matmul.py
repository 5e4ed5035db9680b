"""matmul: a product on one rank, for operands that XLA has no product for."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from ... import _config
from ..._call import gpu_code, local_ops, plans, tuning_tables
from ..._call.forms import Call, Form, Op, ShapeDtype, WhyNot
from ..._call.plans import USUAL_SM_COUNT, Arrays, Machine, Path, Plan
from ..._call.primitives import make_primitive
from .. import _epilogue, _lax, _recipe, _scaled
from .._epilogue import Epilogue
from .._lax import several
from .._recipe import AnyRecipe, Format, Weight
from .._scaled import Operand, Scaled, Scales
from . import _by_recipe, _product, _product_plan

OP = "matmul"


def matmul(
    x: Operand,
    w: Weight | Sequence[Weight],
    *,
    transpose_rhs: bool = False,
    bias: jax.Array | Sequence[jax.Array | None] | None = None,
    activation: str | None = None,
    gated: bool = False,
    preferred_element_type: DTypeLike | None = None,
    precision: lax.PrecisionLike = None,
    recipe: AnyRecipe | None = None,
    quantize: Format | None = None,
) -> Any:
    """``x @ w`` on one rank; operands may have scales::

        x [..., m, k]   w [k, n]   ->   y [..., m, n]

    A product of scaled operands sums their values in float32, or int8 in int32. If neither scale
    has several entries along k, the sum is multiplied by x's scale and by w's. Otherwise every 128
    of k are summed and multiplied so by themselves, and the products added in float32 (DeepSeek-V3,
    arXiv 2412.19437, section 3.3.2). On Hopper a kernel does it for float8_e4m3fn and an x of
    float8_e5m2, and without blocks for int8, where k and n are multiples of 16; a w [k, n] is
    transposed first. On other GPUs one does it without blocks, for float8 from compute capability
    8.9 on. What it does not take, and operands without scales, are `lax.dot_general`'s, blocks in a
    loop.

    Args:
      x: [..., m, k]; an array or a :class:`jflux.Scaled`, or what stands for one: a pair (values,
        scale), a `qwix.QArray` without zero point, Transformer Engine's tensor with one scale.
      w: [k, n], or [n, k] with `transpose_rhs`. Or a tuple or list of such, of any n each. Operands
        with and without a scale do not mix.
      transpose_rhs: w holds the transposed weight.
      bias, activation, gated: as in :func:`jflux.all_gather_matmul`.
      preferred_element_type: the type of y; by default bfloat16 of scaled operands, and without
        scales that of :func:`jflux.all_gather_matmul`.
      precision: as in `lax.dot_general`.
      recipe: a :class:`jflux.Recipe`, or a :class:`jflux.DelayedScaling`, by which x and w are
        quantised, and what gradients need; w may be already, by `Recipe.quantize_weight`.
      quantize: as in :func:`jflux.all_gather_matmul`.

    Returns:
      y, or a tuple of them if w is several and not gated.

    Raises:
      ValueError, TypeError: operands that do not fit, when the call is traced; or when a product of
        scaled operands is differentiated.

    Examples:
      >>> x = jflux.quantize(jnp.ones((8, 256)), jnp.float8_e4m3fn, block=(1, 128))
      >>> w = jflux.quantize(jnp.ones((256, 128)), jnp.float8_e4m3fn, block=(128, 128))
      >>> y = jflux.matmul(x, w)
      >>> y.dtype, float(y[0, 0])
      (dtype(bfloat16), 256.0)
    """
    recipe = _recipe.of_call(OP, recipe, x, w, transpose_rhs)
    _recipe.check_quantize(OP, quantize, preferred_element_type)
    x, w = _scaled.of_product(OP, x, w)
    if quantize is not None and (not isinstance(x, Scaled) or quantize.block[0] != 1):
        y = matmul(
            x, w, transpose_rhs=transpose_rhs, bias=bias, activation=activation, gated=gated,
            preferred_element_type=jnp.float32, precision=precision, recipe=recipe,
        )  # fmt: skip
        return _recipe.quantized(quantize, y)
    ws = several(w)
    if not ws:
        raise ValueError("jflux.matmul: w is an empty sequence of weights")
    biases = _epilogue.of_each(bias, len(ws))
    epilogue = _epilogue.check(OP, len(ws), biases, activation, gated)
    for one in ws:
        _product.check_operands(OP, x, one, -2, "the second to last dimension")
        if x.shape[-1] != one.shape[1 if transpose_rhs else 0]:
            raise ValueError(
                f"jflux.matmul: x {x.shape} and w {tuple(one.shape)} do not contract "
                f"({transpose_rhs=})"
            )
    columns = [_product.columns(one, transpose_rhs) for one in ws]
    _epilogue.check_shapes(OP, columns, biases, gated)
    if quantize is not None:
        preferred_element_type = jnp.float32
        epilogue = dataclasses.replace(epilogue or Epilogue((False,) * len(ws)), quantize=quantize)
        biases = _epilogue.constants(biases)
    if preferred_element_type is None:
        preferred_element_type = _product.default_dtype("all_gather_matmul", x, ws)
    out = _product.out_dtype(OP, (x, *ws), preferred_element_type, precision)
    if recipe is not None:
        return _by_recipe.product(
            OP, x, w, recipe=recipe, transpose_rhs=transpose_rhs, out=out, precision=precision,
            bias=bias, activation=activation, gated=gated,
        )  # fmt: skip
    is_one = gated or not isinstance(w, tuple | list)
    given = [b for b in biases if b is not None]
    options = (given, epilogue, out, precision, transpose_rhs)
    ys = _with_scales(x, ws, *options) if isinstance(x, Scaled) else _in_lax(x, ws, *options)
    ys = ys if quantize is None or epilogue is None else epilogue.as_scaled(ys)
    return ys[0] if is_one else tuple(ys)


def _in_lax(
    x: Operand,
    ws: Sequence[Operand],
    biases: Sequence[jax.Array],
    epilogue: Epilogue | None,
    out: np.dtype,
    precision: lax.PrecisionLike,
    transpose_rhs: bool,
) -> Sequence[jax.Array]:
    wide = out if epilogue is None else _epilogue.sum_dtype(out)
    ys = [_lax.matmul(x, one, wide, precision, transpose_rhs) for one in ws]
    return ys if epilogue is None else _epilogue.apply(epilogue, ys, biases, out)[0]


# ---- Of operands with scales ---------------------------------------------------------------------


def of_kernels(x: jax.Array, w: jax.Array, scales: Sequence[jax.Array], params: Any) -> jax.Array:
    """The product that a call over ranks is made of, where no kernel takes all of it: of x and w,
    and, if they have any, their scales as kernels take them.

    Args:
      params: has `out_dtype`, `precision` and `transpose_rhs`.
    """
    if not scales:
        return _lax.product(x, w, scales, params)
    of_rows, of_columns = scales
    return matmul(
        *_scaled.as_operands(x, w, of_rows, of_columns, params.transpose_rhs),
        transpose_rhs=params.transpose_rhs, preferred_element_type=params.out_dtype,
        precision=params.precision,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Params:
    """A call, less its operands: x [rows, k], each w, and what its epilogue takes."""

    epilogue: Epilogue
    out_dtype: np.dtype
    precision: Any
    transpose_rhs: bool


def _with_scales(
    x: Scaled,
    ws: Sequence[Scaled],
    biases: Sequence[jax.Array],
    epilogue: Epilogue | None,
    out: np.dtype,
    precision: lax.PrecisionLike,
    transpose_rhs: bool,
) -> Sequence[jax.Array]:
    x, *ws = _scaled.constants(x, *ws)
    wide = _epilogue.sum_dtype(out)
    biases = [jnp.asarray(b).astype(wide) for b in biases]
    why = _scaled.why_no_kernel(x, *ws, transpose_rhs=transpose_rhs, takes_vectors=True)
    if why or any(0 in one.shape for one in (x, *ws)):
        if why:
            _config.fall_back(OP, why)
        return _in_lax(x, ws, biases, epilogue, out, precision, transpose_rhs)
    epilogue = epilogue or Epilogue((False,) * len(ws))
    scales = _scaled.scales_of(x, *ws, transpose_rhs=transpose_rhs, precision=precision)
    of_rows = _scaled.of_rows(x, scales)
    of_columns = [_scaled.of_columns(one, transpose_rhs, scales) for one in ws]
    params = Params(dataclasses.replace(epilogue, scales=scales), out, precision, transpose_rhs)
    k = x.shape[-1]
    ys = _primitive.bind(
        x.values.reshape(-1, k), *(one.values for one in ws), *biases,
        of_rows.reshape(-1, of_rows.shape[-1]), *of_columns, params=params,
    )  # fmt: skip
    return [y.reshape(*x.shape[:-1], y.shape[-1]) for y in ys]


def _split(operands: Sequence[Any], params: Params) -> tuple[Sequence[Any], Sequence[Any]]:
    """(ws, operands of the epilogue) of what follows x."""
    count = len(params.epilogue.biased)
    return operands[:count], operands[count:]


def _shapes(arrays: Arrays, params: Params) -> list[ShapeDtype]:
    x, *operands = arrays
    ws, _ = _split(operands, params)
    sums: list[ShapeDtype] = [
        ((x.shape[0], _product.columns(w, params.transpose_rhs)), params.out_dtype) for w in ws
    ]
    return params.epilogue.shapes(sums)


def _reference(arrays: Arrays, params: Params) -> list[jax.Array]:
    x, *operands = arrays
    ws, after = _split(operands, params)
    ys, _ = _epilogue.of_products(
        x, ws, after, params.epilogue, params.out_dtype, params.precision, params.transpose_rhs
    )
    return ys


def _why_not(arrays: Arrays, params: Params, platform: str) -> str | None:
    x, *operands = arrays
    ws, _ = _split(operands, params)
    if len(ws) > _product.MAX_WEIGHTS:
        return f"{len(ws)} weights, the kernel takes up to {_product.MAX_WEIGHTS}"
    if params.epilogue.gated and params.epilogue.scales is Scales.OF_VECTORS:
        return "the kernel takes no gate where each column of w has scales of blocks"
    for w in ws:
        if why := _product.kernel_takes(x, w, params.out_dtype, 1, platform, OP):
            return why
        if why := _product.why_imprecise(params.precision, params.epilogue.scales, x.dtype):
            return why
        if not _product_plan.in_vectors([x], [w]):
            vector = _product_plan.vector(x.dtype)
            return f"x is {x.shape} and w {w.shape}; the kernel takes multiples of {vector}"
    return params.epilogue.why_quantized_after(x, ws, _product.total_rows(x))


def _why_not_portable(arrays: Arrays, params: Params, platform: str) -> str | None:
    x, *operands = arrays
    ws, _ = _split(operands, params)
    arch, own = gpu_code.arch_wanted(), params.epilogue
    if why := _product.why_not_portable(x.dtype, own.scales, arch):
        return why
    return own.why_quantized_after(x, ws, _product.total_rows(x), arch)


def _takes_quantized(call: Call, machine: Machine) -> Plan | None:
    return None if call.params.epilogue.quantize is None else plans.decomposed("")


def _quantized_after(arrays: Arrays, params: Params, plan: Plan) -> list[jax.Array]:
    """A call in float32, which has a plan of its own, and `quantize`."""
    epilogue = dataclasses.replace(params.epilogue, quantize=None)
    ys = _primitive.bind(*arrays, params=dataclasses.replace(params, epilogue=epilogue))
    return params.epilogue.quantized(ys)


def _prepare(arrays: Arrays, params: Params) -> list[Any]:
    """Tensor cores take operands of 8 bits along k alone. The kernel reads the scales of columns
    of one block of k together."""
    x, *operands = arrays
    ws, after = _split(operands, params)
    if params.epilogue.scales is Scales.OF_VECTORS:
        of_columns = [scale.T for scale in after[-len(ws) :]]
        after = [*after[: -len(ws)], *of_columns]
    if params.epilogue.scales is Scales.PROMOTED:
        biases, of_rows, each = params.epilogue.split(after)
        of_rows, of_blocks = _scaled.repeated(of_rows, each, x.shape[-1])
        after = [*biases, of_rows, *of_blocks]
    return [x, *(w if params.transpose_rhs else w.T for w in ws), *after]


def _sizes(arrays: Arrays, params: Params) -> _product_plan.Sizes:
    """Of the call as the kernel has it, with each w stored [n, k]."""
    x, *operands = arrays
    ws, _ = _split(operands, params)
    return _product_plan.Sizes(
        op=OP,
        world=1,
        outer=1,
        inner=x.shape[0],
        k=x.shape[1],
        n=sum(_product.columns(w, params.transpose_rhs) for w in ws),
        dtype=x.dtype,
        out_dtype=params.out_dtype,
        transpose_rhs=True,
        gated=params.epilogue.gated,
        w_dtype=None if ws[0].dtype == x.dtype else ws[0].dtype,
        scales=params.epilogue.scales.in_kernels,
        quantizes=params.epilogue.quantize is not None,
    )


def _plan(arrays: Arrays, params: Params) -> Plan | WhyNot:
    """By what was measured for the call on this GPU. The kernel is all_gather_matmul's, of one
    rank, and so is what a configuration means for it. If nothing was measured C++ chooses."""
    sizes = _sizes(arrays, params)
    tuned = tuning_tables.lookup(sizes.key, gpu_code.gpu_here())
    kernel = "jflux.config(always=True)" if _config.config.always else None
    machine = Machine("cuda", sm_count=USUAL_SM_COUNT, arch=gpu_code.arch_wanted())
    if slower := _product_plan.why_slower(machine, lambda: None, tuned, kernel):
        return slower
    call, of, is_portable = sizes.native(), "heuristic", machine.arch < gpu_code.HOPPER
    if isinstance(tuned, tuning_tables.Choice):
        call, of = call | dataclasses.asdict(tuned), "tuning table"
    elif not is_portable:
        return Plan(Path.FUSED, f"configuration of the {of}", key=sizes.key)
    native = machine.native_plan("all_gather_matmul", call)
    names = [field.name for field in dataclasses.fields(tuning_tables.Choice)]
    config = {name: native[name] for name in names + ["portable"] * is_portable}
    return Plan(Path.FUSED, f"configuration of the {of}", config, key=sizes.key)


def _attributes(arrays: Arrays, params: Params, plan: Plan) -> dict[str, Any]:
    return params.epilogue.attributes() | {"choice": plan.choice}


def _flops(arrays: Arrays, params: Params) -> int:
    x, *operands = arrays
    ws, _ = _split(operands, params)
    return sum(_product.flops(x, w, params.transpose_rhs) for w in ws)


def _batch(primitive: Any, operands: Any, dims: Any, *, params: Params) -> Any:
    x, *rest = operands
    of_rows = len(operands) - 1 - len(params.epilogue.biased)
    if {i for i, d in enumerate(dims) if d is not None} != {0, of_rows}:
        return _product.bind_one_by_one(primitive, operands, dims, params=params)
    # A batch of rows is more rows.
    count = x.shape[dims[0]]
    flat = list(operands)
    for i in (0, of_rows):
        flat[i] = jnp.moveaxis(flat[i], dims[i], 0)
        flat[i] = flat[i].reshape(-1, flat[i].shape[-1])
    ys = primitive.bind(*flat, params=params)
    return [y.reshape(count, -1, y.shape[-1]) for y in ys], [0] * len(ys)


_primitive = make_primitive(
    Op(
        name=OP,
        result_shapes=_shapes,
        reference=_reference,
        forms=(
            local_ops.kernel(
                OP,
                why_not=_why_not,
                attributes=_attributes,
                why_not_portable=_why_not_portable,
                checked_on_gpus=True,
                on_cpus=False,
                is_optional=True,
                prepare=_prepare,
                plan=_plan,
            ),
            Form(_takes_quantized, _quantized_after, "quantised after"),
        ),
        batch=_batch,
        flops=_flops,
        is_local=True,
        is_split_by_xla=True,
    )
)
