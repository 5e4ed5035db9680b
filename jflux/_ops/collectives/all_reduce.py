"""all_reduce: wrapper, gradients, and how it lowers. Kernels: cc/ops/all_reduce."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, Required, TypedDict, TypeVar, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import ad

from ... import _native
from ..._call import forms, plans
from ..._call.derivatives import none_if_zero
from ..._call.forms import Call, Form, Op, WhyNot
from ..._call.plans import Arrays, Machine, Plan
from ..._call.primitives import make_primitive
from ..._ranks import meshes
from ..._ranks.meshes import AxisName
from .. import _epilogue, _lax, _norm, _scaled, _two_level, _two_level_plan, _wire
from .._collective import Collective
from .._recipe import Format
from .._scaled import Scaled
from .._spec import OpSpec
from ..products import _product, _product_plan
from . import _quantized_exchange, _quantized_sum, _sum_epilogue, exchange, wire_report
from ._sum_epilogue import SumEpilogue

OP = "all_reduce"
ALGORITHMS = _native.ALL_REDUCE_ALGORITHMS


@dataclasses.dataclass(frozen=True)
class Params:
    """A call, less its operands: x, the residual if there is one, and the norm's factors.

    Attributes:
      wire, grad_wire: formats that data travel in, and those of derivatives; None: x's type.
    """

    axis_names: tuple[Any, ...]
    world: int
    algorithm: str | None
    epilogue: SumEpilogue = SumEpilogue()
    prepared: str | None = None
    wire: str | None = None
    grad_wire: str | None = None

    @property
    def is_exact(self) -> bool:
        """Whether no data of it or of its derivatives are quantised."""
        return self.wire is None and self.grad_wire is None

    def without_epilogue(self) -> Params:
        """The sum alone."""
        return dataclasses.replace(self, epilogue=SumEpilogue())

    def without_wire(self) -> Params:
        return dataclasses.replace(self, wire=None)

    def of_derivative(self) -> Params:
        """The sum of tangents or cotangents."""
        return dataclasses.replace(self.without_epilogue(), wire=self.grad_wire)

    def prepared_by(self, step: str, **changes: Any) -> Params:
        """The call that is left after this step, in words, with these changes."""
        steps = step if self.prepared is None else f"{self.prepared}; {step}"
        return dataclasses.replace(self, prepared=steps, **changes)


Tree = TypeVar("Tree")


class Options(TypedDict, total=False):
    """Arguments on which the type of the result does not depend."""

    axis_name: Required[AxisName]
    residual: jax.Array | None
    algorithm: str | None
    axis_index_groups: Sequence[Sequence[int]] | None
    wire: str | None
    grad_wire: str | None


@overload
def all_reduce(
    x: Tree, *, norm: None = ..., quantize: None = ..., **options: Unpack[Options]
) -> Tree: ...
@overload
def all_reduce(
    x: jax.Array, *, norm: _norm.Norm, quantize: None = ..., **options: Unpack[Options]
) -> tuple[jax.Array, jax.Array]: ...
@overload
def all_reduce(
    x: jax.Array, *, norm: _norm.Norm, quantize: Format, **options: Unpack[Options]
) -> tuple[jax.Array, Scaled]: ...
@overload
def all_reduce(
    x: Any, *, norm: _norm.Norm | None, quantize: Format | None = ..., **options: Unpack[Options]
) -> Any: ...
@meshes.axis_by_name
def all_reduce(
    x: Any,
    *,
    axis_name: AxisName,
    residual: jax.Array | None = None,
    norm: _norm.Norm | None = None,
    quantize: Format | None = None,
    algorithm: str | None = None,
    axis_index_groups: Sequence[Sequence[int]] | None = None,
    wire: str | None = None,
    grad_wire: str | None = None,
) -> Any:
    """``lax.psum(x, axis_name)``, with the latency of one exchange, or two, where x is small; and
    what follows it in a transformer: a residual in the same kernel, rows normalised there too where
    all data go to all ranks at once.

    Inside ``jax.shard_map``, per rank along `axis_name`: the sum of all ranks' x, the same bits on
    every rank. Each rank writes its data straight into the others' memory: up to 1 MiB in packets
    that carry their own flags, so that there is no barrier and no signal to wait for (the idea of
    NCCL's LL protocol), above in chunks that signals announce. Sums are in float32 (float64 for
    float64), in rank order, and rounded once, after the residual has been added. Above 8 MiB (up
    to four ranks: 16 MiB), and for types that the kernels do not take, it is ``lax.psum``.

    Differentiable like ``lax.psum``: under ``check_vma=True`` the result does not vary over
    `axis_name`, and its gradient goes to every rank as it is; otherwise the gradient is summed too.

    Args:
      x: an array of any shape, or a pytree of such, each of which is one call; float16, bfloat16,
        float32 or float64. Other types take the reference.
      axis_name: a mesh axis, or a tuple of them.
      residual: of x's shape, of any type and the same on all ranks of the axis: added to the sum (x
        is one array, then). Of x's type the kernel adds it before the sum is rounded; of another
        one XLA adds it to the rounded sum. The result has x's type.
      norm: a :class:`jflux.RMSNorm` or :class:`jflux.LayerNorm` of the sum's rows [..., width],
        whose scale and bias are [width], of any type. The kernel takes those of x's type or
        float32.
      quantize: a :class:`jflux.Format`, by which the normalised rows, as x's type holds them, are
        quantised: ``quantize.quantize(normalised)``, bit for bit, which the next product takes.
        The kernel that normalises rows of 16 bits does it for a scale by row, or for each 128
        elements; else :func:`jflux.quantize` follows. There is no derivative then.
      algorithm: "one_shot" (all data to all ranks: one latency), "two_shot" (a reduce-scatter and
        an all-gather: two latencies, fewer bytes), "half_butterfly" or "butterfly" (between pairs
        of ranks, for links that do not join all of them: log2(N) steps and log2(N) times the data,
        or twice the steps and as many bytes as two_shot; their sums are in another order),
        "chunked" (as two_shot, in chunks that signals announce instead of packets: half the bytes
        on the links, and two fences more), or None, which chooses by size and ranks.
      axis_index_groups: groups of the ranks, as positions along `axis_name`, each rank once and all
        groups of one size: a sum in each of them. The result then varies over `axis_name`, and
        residual and norm need to be the same in a group only.
      wire: "float8_e4m3fn" or "int8": data travel quantised, in blocks of 128 elements of the
        flattened x, each with a float32 scale (as :func:`jflux.quantize`, of rows of 128), for an
        x of bfloat16, float16 or float32. Of N shards of x each rank sums one: the others' parts as
        they were quantised, its own as it is, in rank order, in float32. The sums are quantised
        again, and all ranks, their owner too, have the same bits. A block with a NaN or an infinity
        becomes NaN as a whole. The kernel adds a residual; norm and `quantize` follow in XLA. Below
        a size for which it does not pay the sum is exact (:func:`jflux.explain` says so), unless
        ``algorithm="chunked"`` or ``jflux.config(always=True)`` asks for it. (Quantised sums:
        EQuARX, arXiv 2506.17615, and FlashInfer's ``quantized_all_reduce``, whose owners keep
        their sums as they are, so that ranks differ.)
      grad_wire: likewise, of the sums of tangents and cotangents, which are exact by default.
        Derivatives are those of an exact sum (straight through).

    Returns:
      The sum, of x's shape and type; with `norm` a pair: the sum, and its rows normalised, with
      `quantize` as a :class:`jflux.Scaled`.

    Raises:
      ValueError: for an unknown algorithm or wire, a residual or a norm that does not fit, groups
        that are none, or an algorithm other than "chunked" with a wire, when the call is traced.
      TypeError: for a norm or a format that is none, a derivative with `quantize`, or a wire for
        an x of another type, when the call is traced.
      NameError: outside ``shard_map``.
      NotImplementedError: when it is lowered with ``jflux.config.strict``, for one that no kernel
        takes, or that finds no room in the symmetric heap.
      jax.errors.JaxRuntimeError: a peer did not come within the deadline (see :func:`jflux.init`).

    Examples:
      >>> mesh = jax.sharding.Mesh(jax.devices(), "tp")
      >>> f = functools.partial(jflux.all_reduce, axis_name="tp")
      >>> f = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P("tp"), out_specs=P()))
      >>> f(jnp.arange(8.0)).tolist()
      [28.0]
    """
    if algorithm is not None and algorithm not in ALGORITHMS:
        raise ValueError(
            f"jflux.all_reduce: {algorithm=} must be None or one of {', '.join(ALGORITHMS)}"
        )
    _wire.check(OP, x, wire, grad_wire, algorithm)
    if residual is not None or norm is not None or quantize is not None:
        x = jnp.asarray(x)
        x = x.astype(jnp.int32) if x.dtype == bool else x  # as lax.psum
        _sum_epilogue.check(OP, x.shape, residual, norm, quantize)
    if results := _sum_epilogue.quantized_after(
        all_reduce, quantize, x, axis_name=axis_name, residual=residual, norm=norm,
        algorithm=algorithm, axis_index_groups=axis_index_groups, wire=wire, grad_wire=grad_wire,
    ):  # fmt: skip
        return results
    if _product.is_for_lax(OP, axis_name, *jax.tree.leaves(x), residual):
        return reference(
            x, axis_name=axis_name, residual=residual, norm=norm, quantize=quantize,
            axis_index_groups=axis_index_groups, wire=wire, grad_wire=grad_wire,
        )  # fmt: skip
    names, world = meshes.ranks_of(axis_name, axis_index_groups)
    params = Params(names, world, algorithm, wire=wire, grad_wire=grad_wire)
    if residual is not None or norm is not None:
        epilogue, added = _sum_epilogue.operands(OP, params.axis_names, residual, norm, quantize)
        _product.warn_if_same(OP, axis_name, "x", x)
        x, *added = _product.constant_if_whole(x.dtype, x, *added)
        return epilogue.of_call(_call(dataclasses.replace(params, epilogue=epilogue), x, added))

    def one(array: Any) -> jax.Array:
        array = jnp.asarray(array)
        if jax.typeof(array).weak_type:  # a number, which stays one
            return reference(array, axis_name=axis_name, axis_index_groups=axis_index_groups)
        if array.dtype == bool:  # as lax.psum
            array = array.astype(jnp.int32)
        return _call(params, array)[0]

    return jax.tree.map(one, x)


def _call(params: Params, x: jax.Array, added: Sequence[jax.Array] = ()) -> list[jax.Array]:
    """:func:`bind`, of which :func:`jflux.wire_report` is told."""
    results = bind(params, x, added)
    if params.wire is not None and wire_report.is_wanted():
        exact, *_ = bind(params.without_wire(), x, added)
        wire_report.note(OP, x, params.wire, results[0], exact, params.world)
    return results


def reference(
    x: Any,
    *,
    axis_name: AxisName,
    residual: jax.Array | None = None,
    norm: _norm.Norm | None = None,
    quantize: Format | None = None,
    algorithm: str | None = None,
    axis_index_groups: Sequence[Sequence[int]] | None = None,
    wire: str | None = None,
    grad_wire: str | None = None,
) -> Any:
    """``psum(x)``: arguments and results are those of :func:`jflux.all_reduce`; any type that
    `lax.psum` takes will do, the algorithm does not matter, and the sum is rounded to x's type
    before a residual is added. With `wire` it is quantised at any size, and rounded after a
    residual of x's type has been added, as in the kernel."""
    _wire.check(f"reference.{OP}", x, wire, grad_wire, None)
    del algorithm
    added = [] if residual is None else [residual]
    if wire is None and grad_wire is None:
        y = _epilogue.add(_sum(x, axis_name, axis_index_groups), added)
    else:
        ranks, _ = meshes.ranks_of(axis_name, axis_index_groups)

        def one(x: Any) -> jax.Array:
            x = jnp.asarray(x)
            if jax.typeof(x).weak_type:  # a number, which stays one
                return _sum(x, axis_name, axis_index_groups)
            return _quantized_sum.reference(x, ranks, wire, grad_wire, added)

        y = jax.tree.map(one, x)
    if norm is None:
        return y
    normalised = _norm.apply(norm.name, norm.epsilon, y, *norm.factors)
    return y, normalised if quantize is None else quantize.quantize(normalised)


def _sum(x: Any, axis_name: AxisName, axis_index_groups: Sequence[Sequence[int]] | None) -> Any:
    """`lax.psum`, which takes no groups under ``check_vma=True``. It is plain `lax`, and casts."""
    if axis_index_groups is None:
        return _lax.psum(x, axis_name)
    ranks, _ = meshes.ranks_of(axis_name, axis_index_groups)

    def one(x: Any) -> jax.Array:
        x = jnp.asarray(x)
        (x,) = meshes.vary_together(axis_name, x.astype(jnp.int32) if x.dtype == bool else x)
        return Collective("all_reduce").lax(x, ranks)

    return jax.tree.map(one, x)


def _jvp(primals: Any, tangents: Any, *, params: Params) -> Any:
    (x, *added), (dx, *dadded) = primals, [none_if_zero(t) for t in tangents]
    results = bind(params, x, added)
    dy = None if dx is None else bind(params.of_derivative(), dx)[0]
    return results, _sum_epilogue.tangents(OP, params.epilogue, results[0], dy, added, dadded)


def bind(params: Params, x: jax.Array, added: Sequence[jax.Array] = ()) -> list[jax.Array]:
    """The results of the primitive: the sum, and its normalised rows if there is a norm, or values
    and scale of these."""
    return _primitive.bind(x, *added, params=params)


def _result(arrays: Arrays, params: Params) -> list[Any]:
    return params.epilogue.shapes(arrays[0].shape, arrays[0].dtype)


def _reference(arrays: Arrays, params: Params) -> list[Any]:
    (x, *added), epilogue = arrays, params.epilogue
    if params.wire is None:
        y = Collective("all_reduce").lax(x, params.axis_names)
    else:
        y = _quantized_sum.quantized_sum(x, params.axis_names, params.wire)
        y = _quantized_sum.rounded(y, x.dtype, added[: epilogue.residual])
        added = added[epilogue.residual :]
        epilogue = dataclasses.replace(epilogue, residual=False)
    return _sum_epilogue.apply(epilogue, y, added)


def _unsupported(x: Any, params: Params) -> str | None:
    if why := _native.why_not_dtypes(OP, "cuda", x.dtype):
        return why
    if params.world > _product.MAX_RANKS:
        return f"{params.world} ranks, the kernels take up to {_product.MAX_RANKS}"
    if x.size >= 1 << 31:
        return f"{x.size} elements, the kernels take fewer than 2^31"
    return None


def most_bytes(ranks: int) -> int:
    """The most bytes of x for which GPUs take the kernels, a power of two."""
    number = _native.dtype_number(np.float32)
    most = 0
    for bits in range(10, 31):
        call = {"world": ranks, "count": (1 << bits) // 4, "dtype": number, "width": 0}
        if _native.plan(OP, call | {"algorithm": -1}, 0, 0.0)["algorithm"] < 0:
            break
        most = 1 << bits
    return most


def _native_plan(x: Any, params: Params, machine: Machine, algorithm: str | None) -> dict[str, int]:
    width = 0 if params.epilogue.norm is None else x.shape[-1]
    call = {
        "world": params.world,
        "count": x.size,
        "dtype": _native.dtype_number(x.dtype),
        "width": width,
        "algorithm": -1 if algorithm is None else ALGORITHMS.index(algorithm),
    }
    if params.wire is not None:
        call["wire"] = _native.dtype_number(params.wire)
    return machine.native_plan(OP, call)


def _takes(call: Call, machine: Machine) -> Plan | WhyNot:
    (x, *_), params = call.arrays, call.params
    kernel = _product_plan.why_kernel(params)
    collectives = "lax.psum is" if params.wire is None else "XLA's collectives are"
    large = WhyNot(f"{x.size * x.dtype.itemsize} bytes, for which {collectives} faster")
    if why := _unsupported(x, params):
        is_large = params.world <= _product.MAX_RANKS and x.size * x.dtype.itemsize > most_bytes(
            params.world
        )
        chosen_by_size = kernel is None and params.algorithm is None
        return large if chosen_by_size and is_large else WhyNot(why, unsupported=True)
    chosen = _native_plan(x, params, machine, params.algorithm)
    if chosen["algorithm"] < 0:
        if (exact := _exact_instead(x, params, machine)) is not None:
            return _takes(dataclasses.replace(call, params=exact), machine)
        if kernel is None:
            return large
        chosen = _native_plan(x, params, machine, "chunked")
    algorithm = ALGORITHMS[chosen["algorithm"]]
    # No error for want of room, where nobody has asked for the kernel.
    if kernel is None and params.algorithm is None and algorithm == "chunked":
        alone = _native_plan(x, params.without_epilogue(), machine, algorithm)
        if alone["workspace_bytes"] > machine.heap_bytes // 2:
            return WhyNot(
                machine.why_no_room("chunks would take", alone["workspace_bytes"], "half")
            )
    by = "as asked for" if params.algorithm else f"chosen for {x.size * x.dtype.itemsize} bytes"
    words = f"{algorithm}{f' in {params.wire}' if params.wire else ''}, {by}"
    return plans.fused(f"{words}; {params.prepared}" if params.prepared else words, chosen)


def _exact_instead(x: Any, params: Params, machine: Machine) -> Params | None:
    """The call without its wire, if that is faster and the wire was not asked for at any size."""
    if params.wire is None or params.algorithm:
        return None
    why = why_exact(x, params, machine)
    return None if why is None else params.prepared_by(why, wire=None)


def why_exact(x: Any, params: Params, machine: Machine) -> str | None:
    """Why a sum of such an x travels as it is, whatever its wire, or None."""
    if params.world > _product.MAX_RANKS:  # over several nodes, or by the reference
        size = x.size * x.dtype.itemsize
        return None if params.algorithm else _quantized_exchange.why_exact(size)
    if _product_plan.why_kernel(params) or not _native_plan(x, params, machine, None).get("exact"):
        return None
    return f"exact: {x.size * x.dtype.itemsize} bytes, for which a quantised wire does not pay"


def _takes_in_nodes(call: Call, machine: Machine) -> Plan | WhyNot:
    """Whether the call is summed over two levels: inside nodes data travel as they are."""
    return _takes(dataclasses.replace(call, params=call.params.without_wire()), machine)


def _plan_two_level(call: Call) -> Plan:
    (x, *_), params, levels = call.arrays, call.params, call.levels
    assert levels is not None
    # Whole arrays between nodes save one of two steps inside them; else a rank sends its part.
    more = (levels.count - 1) * (1 - 1 / levels.local) * x.size * x.dtype.itemsize
    whole = (
        params.algorithm is not None
        or more < _two_level_plan.INSIDE_LATENCY * _two_level_plan.NODE_BYTES_PER_SECOND
    )
    steps = "inside nodes and then between them" if whole else "scattered inside nodes between"
    config = {"whole": int(whole)}
    if params.wire is not None:
        # There is no native plan of a sum between nodes.
        exact = (
            None if params.algorithm else _quantized_exchange.why_exact(x.size * x.dtype.itemsize)
        )
        steps += f"; {exact}" if exact else f", there in {params.wire}"
        config["exact"] = int(exact is not None)
    return _two_level_plan.two_level(levels, f"summed {steps}", **config)


def _two_level_form(arrays: Arrays, params: Params, plan: Plan) -> list[Any]:
    x, *added = arrays
    levels = _two_level_plan.levels_of(plan)
    epilogue, names = params.epilogue, (levels.inside,)
    residual = [a.ravel() for a in added[: epilogue.residual]]
    transfers = _two_level.Transfers(levels, None if plan.config.get("exact") else params.wire)
    if plan.config["whole"]:
        inside = dataclasses.replace(
            params.without_epilogue().without_wire(), axis_names=names, world=levels.local
        )
        y = transfers.sum(bind(inside, x)[0].ravel(), residual)
    else:
        flat, *residual = (jnp.pad(a, (0, -x.size % levels.local)) for a in (x.ravel(), *residual))
        part = exchange.bind("reduce_scatter", flat, names, levels.local, 0, None)
        own = [_two_level.own_block(a, levels) for a in residual]
        part = transfers.sum(part, own)
        y = exchange.bind("all_gather", part, names, levels.local, None, 0)[: x.size]
    rest = dataclasses.replace(epilogue, residual=False)
    return _sum_epilogue.apply(rest, y.reshape(x.shape), epilogue.factors(added))


def _canonical(arrays: Arrays, params: Params, machine: Machine) -> Any:
    """Leaves out a wire that does not pay, and leaves to XLA what the kernels do not add or
    normalise, and to `jflux.quantize` what they do not quantise."""
    x, *added = arrays
    exact = _exact_instead(x, params, machine)
    if exact is not None:
        return lambda x, *added: bind(exact, x, added)
    epilogue = params.epilogue
    chosen = _native_plan(x, params, machine, params.algorithm)
    takes_residual = not epilogue.residual or added[0].dtype == x.dtype
    dtypes = {f.dtype for f in epilogue.factors(added)}
    # Unless it is asked for, two-shot leaves rows to XLA: in the kernel all ranks normalise all of
    # them with few threads, which takes longer from 256 KiB on 4 ranks on (docs/experiments/0007).
    in_kernel = chosen["algorithm"] == ALGORITHMS.index("one_shot")
    takes_norm = epilogue.norm is None or (
        (in_kernel or params.algorithm == "two_shot")
        and (dtypes == {x.dtype} or dtypes == {np.dtype(np.float32)} and x.dtype != np.float64)
        and bool(chosen["fits_norm"])
    )
    takes_quantize = epilogue.quantize is None or x.dtype.itemsize == 2
    if takes_residual and takes_norm and takes_quantize:
        return None

    def after_the_kernel(x: Any, *added: Any) -> list[Any]:
        if takes_residual and takes_norm:
            wide = params.prepared_by(
                "jflux.quantize follows it", epilogue=dataclasses.replace(epilogue, quantize=None)
            )
            y, normalised = bind(wide, x, added)
            return [y, *_sum_epilogue.quantized(epilogue, normalised)]
        summed = params.without_epilogue().prepared_by(
            "XLA adds the residual and normalises after it"
        )
        if not takes_residual:
            return _sum_epilogue.apply(epilogue, bind(summed, x)[0], added)
        with_residual = params.prepared_by(
            "XLA normalises the rows after it", epilogue=SumEpilogue(epilogue.residual)
        )
        (y,) = bind(with_residual, x, added[: epilogue.residual])
        rest = dataclasses.replace(epilogue, residual=False)
        return _sum_epilogue.apply(rest, y, epilogue.factors(added))

    return after_the_kernel


def _attributes(arrays: Arrays, params: Params, plan: Plan) -> dict[str, Any]:
    to = params.epilogue.quantize
    return {
        "algorithm": np.int64(plan.config["algorithm"]),
        "epsilon": np.float64(params.epilogue.epsilon),
        "norm": np.int64(_native.number_of(params.epilogue.norm, _native.NORMS)),
        "residual": params.epilogue.residual,
        "quantize_block": np.int64(0 if to is None else to.block[1]),
        "power_of_two": to is not None and to.power_of_two,
        "wire": np.int64(-1 if params.wire is None else _native.dtype_number(params.wire)),
        "part": np.int64(_native.WIRE_PARTS.index("sum")),
    }


def _batch(primitive: Any, operands: Any, dims: Any, *, params: Params) -> Any:
    if len(operands) == 1 and params.is_exact:
        return primitive.bind(*operands, params=params), dims
    count = 1 + params.epilogue.residual
    rows, factors = operands[:count], operands[count:]
    bind = functools.partial(primitive.bind, params=params)
    size_of_one = math.prod(n for i, n in enumerate(rows[0].shape) if i != dims[0])
    # A block has elements of one call of the batch only.
    cuts_blocks = not params.is_exact and size_of_one % _scaled.BLOCK != 0
    if cuts_blocks or any(d is not None for d in dims[len(rows) :]):
        return _product.batch_one_by_one(bind, operands, dims)
    size = next(a.shape[d] for a, d in zip(rows, dims, strict=False) if d is not None)
    rows = [
        jnp.broadcast_to(a, (size, *a.shape)) if d is None else jnp.moveaxis(a, d, 0)
        for a, d in zip(rows, dims, strict=False)
    ]
    results = bind(*rows, *factors)
    return results, [0] * len(results)


def _transpose(cotangents: Any, x: Any, *added: Any, params: Params) -> list[Any]:
    ct, dadded = _sum_epilogue.transpose(OP, params.epilogue, cotangents, added)
    if not ad.is_undefined_primal(x):
        return [None, *dadded]
    dx = ad.Zero(x.aval) if ct is None else of_each(params, ct, x.aval)
    return [dx, *dadded]


def of_each(params: Params, ct: jax.Array, aval: Any) -> jax.Array:
    """The cotangent of each rank's x of this type, for one of the sum."""
    has_subgroups = meshes.has_subgroups(params.axis_names)  # each rank's result is of its group
    if (
        not has_subgroups and aval.manual_axis_type.varying
    ):  # types are tracked: x varies over the axes
        return lax.pcast(ct, params.axis_names, to="varying")
    return bind(params.of_derivative(), ct)[0]


_op = Op(
    name=OP,
    result_shapes=_result,
    reference=_reference,
    forms=(
        forms.kernel(_takes, _attributes, canonical=_canonical),
        Form(_two_level_plan.collective(_takes_in_nodes, _plan_two_level), _two_level_form),
    ),
    batch=_batch,
    varying=lambda params: None if meshes.has_subgroups(params.axis_names) else 1,
    same_over=lambda params: params.axis_names,
)
_primitive = make_primitive(_op)
ad.primitive_jvps[_primitive] = _jvp
ad.primitive_transposes[_primitive] = _transpose

SPECS = (
    OpSpec(
        name=OP,
        function=all_reduce,
        reference=reference,
        communication=lambda ndim, **_: Collective("all_reduce"),
        dtypes={platform: _native.dtypes(OP, platform) for platform in ("cpu", "cuda")},
        gradient=(OP,),
        most_bytes=most_bytes,
    ),
)
