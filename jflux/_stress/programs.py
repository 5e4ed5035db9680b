"""Random programs of several calls, some of which wait for each other: run and checked."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from .. import _config, _heap, _native
from .._call import primitives, tuning_tables
from .._ops._spec import OpSpec, ops_with_checked_kernels
from .._ranks import meshes
from . import attention, calls, cases, collectives, mixtures, products
from .cases import Case, Data

INPUTS = (0, 1, 0)  # which operands each run takes: what comes twice must have the same bits


class Wrong(AssertionError):
    """A result that is not what it must be."""

    def __init__(self, what: str, case: str, why: str) -> None:
        super().__init__(what, case, why)  # by which pickle makes it again
        self.what, self.case, self.why = what, case, why

    def __str__(self) -> str:
        return f"{self.case}: {self.what}: {self.why}"


@dataclasses.dataclass
class Program:
    """Some cases in one jitted function.

    Attributes:
      data: operands and outputs of each case, for both inputs.
      looped: whether it is one loop over all of INPUTS, and not a call for each.
      choice: the configuration of the products' kernels on GPUs, if it is forced.
      run: (which run) -> all results, dispatched.
    """

    mesh: Mesh
    axis_name: Any
    cases: list[Case]
    data: list[tuple[Data, Data]]
    looped: bool
    choice: Any
    run: Callable[[int], Any]

    def __str__(self) -> str:
        shape = ", ".join(f"{name}={size}" for name, size in self.mesh.shape.items())
        order = [d.id for d in self.mesh.devices.flat]
        return f"mesh ({shape}) of devices {order}, groups along {self.axis_name}" + (
            f", {self.choice}" if self.choice else ""
        )

    @property
    def runs(self) -> int:
        """How often `run` is called."""
        return 1 if self.looped else len(INPUTS)


def orders(seed: int, devices: list[Any], node: Mapping[int, int]) -> list[list[Any]]:
    """A few orders of the devices, the nodes one after the other: each brings groups of its own,
    and the heap workspaces for each.

    Args:
      node: of each device, by its id.
    """
    rng, found = random.Random(f"{seed}/orders"), []
    for _ in range(4):
        shuffled = rng.sample(devices, len(devices))
        nodes = list(dict.fromkeys(node.get(d.id, 0) for d in shuffled))
        found.append(sorted(shuffled, key=lambda d: nodes.index(node.get(d.id, 0))))
    return found


def _shapes(devices: int) -> list[tuple[int, ...]]:
    sizes = [n for n in range(1, devices + 1) if devices % n == 0]
    found = {(devices,), *((a, devices // a) for a in sizes)}
    found |= {(a, b, devices // a // b) for a, b in itertools.product(sizes, sizes)
              if devices % (a * b) == 0}  # fmt: skip
    return sorted(found)


def _place(
    rng: random.Random, some_orders: list[list[Any]], platform: str, inside: bool = False
) -> cases.Place:
    """A mesh over all devices, or, in one process, over some, and the axes of its groups.

    Args:
      inside: whether groups should lie inside nodes.
    """
    levels: Any = None
    for attempt in range(1000):
        devices = rng.choice(some_orders)
        if jax.process_count() == 1 and rng.random() < 0.3:
            devices = devices[: rng.randint(2, len(devices))]
        shape = rng.choice(_shapes(len(devices)))
        names = ("a", "b", "c")[: len(shape)]
        mesh = Mesh(np.array(devices).reshape(shape), names)
        axis_name = rng.choice([*names, tuple(rng.sample(names, len(names)))])
        if not 1 < calls.world_of(mesh, axis_name) <= _native.MAX_RANKS:
            continue
        table = meshes.group_table(mesh, calls.as_tuple(axis_name))
        levels = primitives.levels_over(platform, mesh, calls.as_tuple(axis_name))
        fits = levels is None or not (isinstance(levels, str) or (inside and attempt < 500))
        if fits and _heap.why_not_usable(platform, mesh, table) is None:
            break
    else:  # then the call says why no kernel takes it
        mesh, axis_name = Mesh(np.array(devices), ("a",)), "a"
    wide = platform == "cpu" and rng.random() < 0.2
    most = (1 << 28, 1 << 23) if platform == "cuda" else (1 << 23, 1 << 19)
    return cases.Place(mesh, axis_name, platform, *most, wide, levels is not None)


def draw_choice(rng: random.Random, platform: str) -> Any:
    """A configuration that is compiled, or none."""
    if platform != "cuda" or rng.random() < 0.5:
        return None
    choice = rng.choice(tuning_tables.compiled())
    if (choice.tile_n, choice.cluster_m) == (128, 1):
        choice = dataclasses.replace(choice, splits=rng.choice([1, 2, 4]))
    return dataclasses.replace(choice, group_m=rng.choice([0, 1, 3, choice.group_m]))


def draw_case(rng: random.Random, place: cases.Place, spec: OpSpec | None = None) -> Case:
    """A case of this op, or of any, or of XLA's."""
    if spec is not None:
        return (collectives.collective if spec.product is None else products.product)(
            rng, place, spec=spec
        )
    kinds: list[Any] = [products.product] * 12 + [products.large_sum]
    kinds += [collectives.collective] * 6 + [collectives.xla] * 6
    kinds += [collectives.all_reduce, collectives.norm, collectives.one_exchange] * 2
    kinds += [
        collectives.quantized_sum, collectives.quantized_exchange, products.quantized_scatter
    ]  # fmt: skip
    kinds += [collectives.there_and_back] * 2
    kinds += [mixtures.experts, mixtures.merge]
    kinds += [attention.attention, attention.decoding, attention.ulysses]
    kinds += [products.scaled] * 2
    kinds += [products.quantized] * products.quantized_is_checked(place)
    kinds += [mixtures.scaled_groups]
    # Over nodes rows travel by a reference.
    in_8_bits = [mixtures.quantized_combine, mixtures.quantized_experts]
    kinds += [mixtures.dispatch, *in_8_bits] * (not place.spans)
    return rng.choice(kinds)(rng, place)


def put(array: np.ndarray, mesh: Mesh) -> jax.Array:
    """An array [*mesh, ...] that every process has whole."""
    sharding = NamedSharding(mesh, P(*mesh.axis_names))
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def draw(
    rng: random.Random, some_orders: list[list[Any]], platform: str, *, number: int, most_calls: int
) -> Program:
    """A program. Its first case is of the op whose turn it is."""
    specs = ops_with_checked_kernels(platform)
    spec = specs[number % len(specs)]
    inside = spec.name in collectives.INSIDE_NODES
    place = _place(rng, some_orders, platform, inside)
    drawn = [draw_case(rng, place, None if inside and place.spans else spec)]
    drawn += [draw_case(rng, place) for _ in range(rng.randint(0, most_calls - 1))]
    chained = [rng.random() < 0.5 for _ in drawn]
    looped, chunked = rng.random() < 0.25, rng.choice([None, None, True])
    choice = draw_choice(rng, platform)
    data = []
    for case in drawn:
        seed = rng.randrange(1 << 30)
        data.append((case.make(seed), case.make(seed + 100)))

    def body(*operands: Any) -> list[Any]:
        results: list[Any] = []
        for case, chain, own in zip(drawn, chained, operands, strict=True):
            if chain and results:
                # Zero, but XLA cannot know: this call comes after the previous one.
                last = jax.tree.leaves(results[-1])[0].ravel()[0].astype(jnp.float32)
                x = own[0] + jnp.where(last > 1e30, 1, 0).astype(own[0].dtype)
                own = (x, *own[1:])
            results.append(case.body(*own))
        return results

    def loop(*operands: Any) -> Any:
        return lax.scan(lambda _, each: (None, body(*each)), None, operands)[1]

    @contextlib.contextmanager
    def settings() -> Iterator[None]:
        with (
            calls.x64_if(*[jnp.float64] * place.wide),
            tuning_tables.force(choice) if choice else contextlib.nullcontext(),
            _config.override(chunked=True) if chunked else contextlib.nullcontext(),
        ):
            yield

    lead = place.mesh.devices.ndim
    with calls.x64_if(*[jnp.float64] * place.wide):
        if looped:
            inputs = [
                [
                    tuple(
                        put(np.stack([both[i][0][j] for i in INPUTS], lead), place.mesh)
                        for j in range(len(both[0][0]))
                    )
                    for both in data
                ]
            ]
        else:
            inputs = [
                [tuple(put(a, place.mesh) for a in both[i][0]) for both in data] for i in (0, 1)
            ]
    jitted = jax.jit(calls.per_device(place.mesh, loop if looped else body, check_vma=False))

    def run(which: int) -> Any:
        with settings():
            return jitted(*inputs[0 if looped else INPUTS[which]])

    return Program(place.mesh, place.axis_name, drawn, data, looped, choice, run)


# ---- Checks --------------------------------------------------------------------------------------


def _shards(y: jax.Array, lead: int) -> Iterator[tuple[tuple[int, ...], np.ndarray]]:
    """(place in the mesh, data) of each shard that this process has."""
    for shard in y.addressable_shards:
        at = tuple(s.start or 0 for s in shard.index[:lead])
        yield at, np.asarray(shard.data).reshape(y.shape[lead:])


def check(program: Program, results: list[Any]) -> dict[str, str]:
    """Compares all results, those of each run, with what they must be.

    Returns:
      Digests of the results that all ranks of a group have alike, by case, result and group.

    Raises:
      Wrong: a result is wrong, or two runs on equal operands differ, or two ranks.
    """
    lead = program.mesh.devices.ndim
    groups = calls.groups_of(program.mesh, program.axis_name)
    group_of = {at: i for i, group in enumerate(groups) for at in group}
    digests: dict[str, str] = {}
    for index, case in enumerate(program.cases):
        for k in range(len(program.data[index][0][1])):
            first: dict[tuple[int, ...], bytes] = {}
            for which, turn in enumerate(INPUTS):
                output = program.data[index][turn][1][k]
                y = jax.tree.leaves(results[0 if program.looped else which][index])[k]
                for at, data in _shards(y, lead):
                    got = data[which] if program.looped else data
                    _check_one(case, output, at, got)
                    if case.is_xlas:  # no promise of jflux's: NCCL may add in another order
                        continue
                    if turn == INPUTS[0] and first.setdefault(at, got.tobytes()) != got.tobytes():
                        raise Wrong("bits between runs", case.name, f"they differ on rank {at}")
                    if output.same:
                        _same(digests, f"{index}/{k}/{which}/{group_of[at]}", got, case)
    return digests


def _check_one(case: Case, output: cases.Output, at: Any, got: np.ndarray) -> None:
    try:
        calls.assert_close(got, output.want[at], output.scale[at], output.dtype, output.terms)
    except AssertionError as error:
        raise Wrong("values", case.name, f"rank {at}: {error}") from None


def _same(digests: dict[str, str], key: str, got: np.ndarray, case: Case) -> None:
    digest = hashlib.sha256(got.tobytes()).hexdigest()[:16]
    if digests.setdefault(key, digest) != digest:
        raise Wrong("bits between ranks", case.name, "two ranks of a group differ")


def check_between(program: Program, found: list[Mapping[str, str]]) -> None:
    """The digests of all processes: of one group they must be equal.

    Raises:
      Wrong: they are not.
    """
    known: dict[str, str] = {}
    for digests in found:
        for key, digest in digests.items():
            if known.setdefault(key, digest) != digest:
                case = program.cases[int(key.partition("/")[0])]
                raise Wrong("bits between ranks", case.name, "two processes of a group differ")


def calls_of(program: Program) -> dict[str, int]:
    """How many calls of each op all runs of the program make."""
    counts: dict[str, int] = {}
    for case in program.cases:
        counts[case.op] = counts.get(case.op, 0) + len(INPUTS)
    return counts
