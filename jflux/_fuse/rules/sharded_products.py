"""Products of global arrays, outside of `shard_map`, whose operands are gathered or whose results
are summed as their shardings say: a `shard_map` of the collective and the products, in which the
other rules find the op."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import JaxprEqn, Literal, Var

from ..bodies import Atom, Body, type_of
from ..evaluate import as_in, evaluate
from ..sites import Context, Declined, Site
from ..specs import CONSTRAINTS, Spec, Specs, natural, partition_spec, ranks_of
from .summands import ADDS, NAME, named

OP = "op"


@dataclasses.dataclass(frozen=True)
class Needs:
    """What a product wants of its operands to be computed by each rank alone.

    Attributes:
      operands: how each has to be split.
      gathered: (operand, its dimension, axes) that it has too many; None: none.
      summed: axes over which the product is a part of a sum.
      scattered: the result's dimension that is split over these; None: none.
      result: how the result is split.
    """

    operands: tuple[Spec, Spec]
    gathered: tuple[int, int, tuple[Any, ...]] | None
    summed: tuple[Any, ...]
    scattered: int | None
    result: Spec


def _needs(equation: JaxprEqn, specs: Specs) -> Needs | str | None:
    """None: nothing is exchanged, or nothing is known."""
    given = [specs.of(atom) for atom in equation.invars]
    result = specs.of(equation.outvars[0])
    known = [spec for spec in (*given, result) if spec is not None]
    if not any(axes for spec in known for axes in spec):
        return None
    if result is None or len(known) < 3:
        names = ("first operand", "second operand", "result")
        unknown = [n for n, spec in zip(names, (*given, result), strict=True) if spec is None]
        return f"how its {unknown[-1]} is split is not known"
    contracted, batch = equation.params["dimension_numbers"]
    wanted = [list(spec) for spec in given if spec is not None]
    summed: tuple[Any, ...] = ()
    for i, j in zip(*contracted, strict=True):
        both = _common(wanted[0][i], wanted[1][j])
        if wanted[0][i] and wanted[1][j] and not both:
            return "its operands are split differently where they are contracted"
        wanted[0][i] = wanted[1][j] = both  # one may be gathered, before the call
        summed += both
    if any(wanted[0][i] != wanted[1][j] for i, j in zip(*batch, strict=True)):
        return "its operands are split differently along batch dimensions"
    as_it_is = natural(equation, tuple(wanted[0]), tuple(wanted[1]))
    places = [(0, i) for i in batch[0]]
    for side in (0, 1):
        free = range(len(wanted[side]))
        places += [(side, i) for i in free if i not in (*contracted[side], *batch[side])]
    gathers: list[tuple[int, int, tuple[Any, ...]]] = []
    scattered = None
    for at, (has, wants, (side, i)) in enumerate(zip(as_it_is, result, places, strict=True)):
        if has == wants:
            continue
        if has[: len(wants)] == wants and i not in batch[side]:
            gathers.append((side, i, has[len(wants) :]))
            wanted[side][i] = wants
        elif wants[: len(has)] == has and set(wants[len(has) :]) == set(summed):
            scattered, summed = at, wants[len(has) :]
        else:
            return "its result is split in another way than its operands"
    operands = tuple(wanted[0]), tuple(wanted[1])
    # Of several gathers the one beside the product is that of the larger array. Others, as those of
    # weights that are split over data-parallel ranks (FSDP), come before the call.
    gathered = max(gathers, key=lambda one: type_of(equation.invars[one[0]]).size, default=None)
    return Needs(operands, gathered, summed, scattered, result)


def _common(one: tuple[Any, ...], other: tuple[Any, ...]) -> tuple[Any, ...]:
    """The axes with which both begin."""
    pairs = zip(one, other, strict=False)
    return tuple(axis for axis, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


@dataclasses.dataclass(frozen=True)
class _Gather:
    """An array that is gathered along one dimension.

    Attributes:
      before: how it is split; `after`: when it is gathered.
      constraint: the equation that says so; None: its products do.
    """

    source: Atom
    before: Spec
    dimension: int
    axes: tuple[Any, ...]
    constraint: int | None

    @property
    def after(self) -> Spec:
        spec = list(self.before)
        spec[self.dimension] = spec[self.dimension][: -len(self.axes)]
        return tuple(spec)


def find_constraint(body: Body, index: int, context: Context) -> Site | Declined | None:
    """Of an array that is brought from one sharding to another, and then multiplied."""
    specs, equation = context.specs, body.equations[index]
    if specs is None or specs.mesh is None:
        return None
    (source,), (result,) = equation.invars, equation.outvars
    before, after = specs.of(source), specs.of(result)
    if isinstance(source, Literal) or before is None or after is None or before == after:
        return None
    changed = [i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
    (dimension, *more) = changed
    kept = len(after[dimension])
    if more or before[dimension][:kept] != after[dimension]:
        return None
    gather = _Gather(source, before, dimension, before[dimension][kept:], index)
    return _of_gather(body, index, gather, result, context)


def find_product(body: Body, index: int, context: Context) -> Site | Declined | None:
    """Of a product whose operand is gathered, or which is summed, as its result's sharding says."""
    specs, equation = context.specs, body.equations[index]
    if specs is None or specs.mesh is None:
        return None
    needs = _needs(equation, specs)
    if needs is None:
        return None
    if isinstance(needs, str):
        return Declined(OP, index, needs)
    if needs.summed:  # an operand that is gathered, too, is so before
        return _of_sum(body, index, needs, context)
    if needs.gathered is None:
        return None
    side, dimension, axes = needs.gathered
    source, before = equation.invars[side], list(needs.operands[side])
    before[dimension] += axes
    if not isinstance(source, Var):
        return None
    gather = _Gather(source, tuple(before), dimension, axes, None)
    return _of_gather(body, index, gather, source, context)


def _of_gather(
    body: Body, index: int, gather: _Gather, multiplied: Var, context: Context
) -> Site | Declined | None:
    """All products of the gathered array."""
    specs = context.specs
    assert specs is not None
    same = {multiplied: None}  # in the order of the program
    if gather.constraint is not None:  # others may say the same of the same array
        for user in body.users.get(cast(Var, gather.source), ()):
            if user == Body.RESULT or not context.is_free(user):
                continue
            other = body.equations[user]
            if other.primitive.name in CONSTRAINTS:
                same |= {var: None for var in other.outvars if specs.of(var) == gather.after}
    products: list[tuple[JaxprEqn, int, Needs]] = []
    members = [] if gather.constraint is None else [cast(int, body.made_by(var)) for var in same]
    users = [(var, user) for var in same for user in body.users.get(var, ())]
    for var, user in sorted(users, key=lambda one: one[1]):
        if user == Body.RESULT or body.equations[user].primitive.name != "dot_general":
            continue
        equation = body.equations[user]
        side = list(equation.invars).index(var)
        needs = _needs(equation, specs)
        if not isinstance(needs, Needs) or not context.is_free(user) or user in members:
            continue
        both = [*members, user]
        takes = _takes(needs, side, gather)
        if takes and not context.depend_on([equation.invars[1 - side]], both):
            products.append((equation, side, needs))
            members.append(user)
    turns = [_turn(body, equation.outvars[0], context) for equation, _, _ in products]
    members += [turn for turn in turns if turn is not None]
    if all(needs.summed for _, _, needs in products):
        return None
    kept = [] if gather.constraint is None else [v for v, user in users if user not in members]
    kept = list(dict.fromkeys(kept))

    def local(x: jax.Array, *ws: jax.Array) -> list[jax.Array]:
        h = lax.all_gather(x, gather.axes, axis=gather.dimension, tiled=True)
        made = []
        for (equation, side, needs), turn, w in zip(products, turns, ws, strict=True):
            y = _multiply(equation, (w, h) if side else (h, w))
            y = y if turn is None else lax.transpose(y, body.equations[turn].params["permutation"])
            made.append(lax.psum(y, needs.summed) if needs.summed else y)
        return [*made, *[h] * len(kept)]

    inputs = (gather.source, *(e.invars[1 - side] for e, side, _ in products))
    outputs: list[Var] = []
    out_specs: list[Spec] = []
    for (equation, _, needs), turn in zip(products, turns, strict=True):
        last = equation if turn is None else body.equations[turn]
        order = range(len(needs.result)) if turn is None else last.params["permutation"]
        outputs.append(last.outvars[0])
        out_specs.append(tuple(needs.result[i] for i in order))
    outputs += kept
    out_specs += [gather.after] * len(kept)
    in_specs = (gather.before, *(needs.operands[1 - side] for _, side, needs in products))
    return _site(body, index, members, inputs, in_specs, outputs, out_specs, local, context)


def _turn(body: Body, result: Var, context: Context) -> int | None:
    """The transpose of a product's result, if nothing else takes it."""
    user = body.only_user(result)
    is_turned = user is not None and body.equations[user].primitive.name == "transpose"
    return user if is_turned and context.is_free(cast(int, user)) else None


def _takes(needs: Needs, side: int, gather: _Gather) -> bool:
    """Whether a product takes the gathered array: as rows, or, where its products' shardings say
    what is gathered, along what is contracted too (for the gradient of a weight)."""
    if needs.scattered is not None or needs.operands[side] != gather.after:
        return False
    if gather.constraint is not None:
        return needs.gathered is None and not needs.summed
    if needs.gathered is not None:
        return not needs.summed and needs.gathered == (side, gather.dimension, gather.axes)
    return True


def _of_sum(body: Body, index: int, needs: Needs, context: Context) -> Site | Declined:
    """A product, or a sum of several, that is summed over ranks."""
    specs = context.specs
    assert specs is not None
    (result,) = body.equations[index].outvars
    terms, members, spec, scattered = [(index, needs)], [index], needs.result, needs.scattered
    names: list[str] = []
    while (user := body.only_user(result)) is not None and context.is_free(user):
        equation = body.equations[user]
        if equation.primitive.name in CONSTRAINTS:
            after = specs.of(equation.outvars[0])
            if after is None or (after != spec and scattered is not None):
                break
            if after != spec and (scattered := _scattered(spec, after, needs.summed)) is None:
                break
            spec = after
        elif equation.primitive.name in ADDS and equation.invars[0] is not equation.invars[1]:
            other = next(atom for atom in equation.invars if atom is not result)
            more = _alike(body, other, user, needs, context)
            if more is None or spec != needs.result:
                break
            terms.append(more)
            members.append(more[0])
        elif equation.primitive.name == NAME:
            names.append(equation.params["name"])
        else:
            break
        members.append(user)
        (result,) = equation.outvars
    if (turn := _turn(body, result, context)) is not None:
        order = body.equations[turn].params["permutation"]
        members.append(turn)
        (result,) = body.equations[turn].outvars
        spec = tuple(spec[i] for i in order)
        scattered = None if scattered is None else order.index(scattered)
    inputs = [atom for term, _ in terms for atom in body.equations[term].invars]
    in_specs = [spec for _, one in terms for spec in one.operands]

    def local(*arrays: jax.Array) -> list[jax.Array]:
        pairs = zip(arrays[::2], arrays[1::2], strict=False)
        parts = [
            _multiply(body.equations[term], pair)
            for (term, _), pair in zip(terms, pairs, strict=False)
        ]
        total = parts[0]
        for part in parts[1:]:
            total = lax.add(total, part)
        total = total if turn is None else lax.transpose(total, order)
        if scattered is None:
            return [lax.psum(total, needs.summed)]
        axes = needs.summed
        return [lax.psum_scatter(total, axes, scatter_dimension=scattered, tiled=True)]

    return _site(body, index, members, inputs, in_specs, [result], [spec], local, context, names)


def _alike(
    body: Body, atom: Atom, user: int, needs: Needs, context: Context
) -> tuple[int, Needs] | None:
    """Another product, which only `user` takes, and which is summed over the same axes."""
    index = body.made_by(atom)
    if index is None or body.equations[index].primitive.name != "dot_general":
        return None
    assert context.specs is not None and isinstance(atom, Var)
    more = _needs(body.equations[index], context.specs)
    if not isinstance(more, Needs):
        return None
    is_alike = (more.summed, more.scattered, more.result) == (
        needs.summed,
        needs.scattered,
        needs.result,
    )
    is_alone = body.only_user(atom) == user and context.is_free(index)
    return (index, more) if is_alike and is_alone else None


def _scattered(before: Spec, after: Spec, axes: tuple[Any, ...]) -> int | None:
    """The one dimension that `after` splits over these axes, too."""
    changed = [i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
    if len(changed) != 1 or after[changed[0]] != (*before[changed[0]], *axes):
        return None
    return changed[0]


def _divides(aval: ShapedArray, spec: Spec, mesh: Any) -> bool:
    return not any(n % ranks_of(mesh, axes) for n, axes in zip(aval.shape, spec, strict=True))


def _multiply(equation: JaxprEqn, operands: Sequence[jax.Array]) -> jax.Array:
    params = equation.params
    return lax.dot_general(
        operands[0], operands[1], params["dimension_numbers"], precision=params["precision"],
        preferred_element_type=params["preferred_element_type"],
    )  # fmt: skip


def _before_transpose(
    body: Body, atom: Atom, spec: Spec
) -> tuple[Atom, Spec, tuple[int, ...] | None]:
    """(what it is the transpose of, how that is split, the permutation), so that a rank's part is
    transposed where the rules see it. Not of what a site may have together with the transpose."""
    found = body.before_transpose(atom)
    if found is None or _may_be_sum(body, found[0]):
        return atom, spec, None
    source, order = found
    return source, tuple(spec[order.index(i)] for i in range(len(order))), order


def _may_be_sum(body: Body, atom: Atom) -> bool:
    """Whether it is a product, or a sum of several, that a site may have."""
    index = body.made_by(atom)
    if index is None:
        return False
    equation = body.equations[index]
    if equation.primitive.name == "dot_general":
        return True
    passes = equation.primitive.name in (*ADDS, *CONSTRAINTS, NAME)
    return passes and any(_may_be_sum(body, one) for one in equation.invars)


def _site(
    body: Body,
    index: int,
    members: Sequence[int],
    inputs: Sequence[Atom],
    in_specs: Sequence[Spec],
    outputs: Sequence[Var],
    out_specs: Sequence[Spec],
    local: Callable[..., list[jax.Array]],
    context: Context,
    names: Sequence[str] = (),
) -> Site | Declined:
    """Of what `local` makes of each rank's parts. `names`: of the only result, by
    `checkpoint_name`."""
    specs = context.specs
    assert specs is not None
    if any(isinstance(atom, Literal) for atom in inputs):
        return Declined(OP, index, "an operand is a constant")
    mesh = specs.mesh
    pairs = zip((*inputs, *outputs), (*in_specs, *out_specs), strict=True)
    if not all(_divides(type_of(atom), spec, mesh) for atom, spec in pairs):
        return Declined(OP, index, "the mesh does not divide its operands or its result")
    sources = [_before_transpose(body, *one) for one in zip(inputs, in_specs, strict=True)]
    inputs, in_specs, orders = zip(*sources, strict=True)
    wanted = [partition_spec(spec) for spec in in_specs]

    def of_sources(*arrays: jax.Array) -> list[jax.Array]:
        pairs = zip(arrays, orders, strict=True)
        return local(*(a if order is None else lax.transpose(a, order) for a, order in pairs))

    def call(*arrays: jax.Array) -> list[jax.Array]:
        if specs.is_explicit:
            arrays = tuple(map(jax.reshard, arrays, wanted))
        made = jax.shard_map(
            of_sources, mesh=mesh, in_specs=tuple(wanted),
            out_specs=[partition_spec(spec) for spec in out_specs], check_vma=False,
        )(*arrays)  # fmt: skip
        if names:
            made = [named(made[0], names)]
        if not specs.is_explicit:
            return made
        types = [type_of(var).sharding.spec for var in outputs]  # with axes of one rank
        return [jax.reshard(a, spec) for a, spec in zip(made, types, strict=True)]

    with as_in(body.equations[index]):
        jaxpr = jax.make_jaxpr(call)(*map(type_of, inputs))
    plan = context.plan(jaxpr)
    sites = [site for one in plan.walk() for site in one.sites if site.hidden]
    if not sites:
        first = next(one for inner in plan.walk() for one in inner.declined)
        return Declined(first.op, index, first.reason)
    return Site(
        sites[0].op, index, tuple(members), tuple(inputs), tuple(outputs),
        lambda *arrays: evaluate(plan, jaxpr.consts, arrays),
        hidden=sum(site.hidden for site in sites),
    )  # fmt: skip
