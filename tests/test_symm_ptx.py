"""The kernels of tests/symm_kernels.py and two examples, compiled by Triton, on the host: their PTX
in tests/ptx_machine.py, with ranks, blocks and threads in random orders."""

import random
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import PLATFORM, RANKS, make_mesh
from ptx_machine import Block, Memory, Program, Trap

from jflux import _native
from jflux._call.forms import Call, WhyNot
from jflux._call.plans import Machine, Plan
from jflux._own_kernels import buffer_layout, symm_check
from jflux._own_kernels import symm_call as symm_call
from jflux._stress.calls import per_device

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples" / "python_kernels"))

pytestmark = pytest.mark.skipif(PLATFORM == "gpu", reason="they run on GPUs: tests/symm_gpu.py")

STATE = {"skip_waits": 0, "max_delay": 4, "timeout": 32, "warn_left": 40, "fault": 56}
STATE |= {"warning": 64, "abort": 72}
SIGNATURE, OP = 0xAB_CDEF12, 7
MASK = (1 << 64) - 1


@pytest.fixture(scope="module")
def kernels():
    pytest.importorskip("triton")
    import symm_kernels

    return symm_kernels


class Ranks:
    """A group of ranks with a workspace each, full of NaN, and one kernel."""

    def __init__(self, f, arrays, world, *, seed=0, timeout=10**9, skip_waits=False, wrap=None):
        self.params = _params(f, arrays, world)
        self.results = self.params.results
        compiled, ptx = _compile(self.params, arrays)
        # A machine as slow as this one looks at the clock more often.
        ptx = ptx.replace("mov.u32 left, 2048;", "mov.u32 left, 16;")
        if wrap is not None:  # the count of a wait's polls
            assert str(2**30 - 1) in ptx
            ptx = ptx.replace(str(2**30 - 1), str(wrap - 1))
        self.programs, self.threads = [Program(ptx)] * world, compiled.threads
        self.signatures = [SIGNATURE] * world
        self.shared_bytes = compiled.shared_bytes
        self.rng, self.clock, self.memory = random.Random(seed), [1000], Memory(1 << 24)
        total = _native.lib.custom_workspace_bytes(
            buffer_layout.data_bytes(self.params.buffers), self.params.num_signals
        )
        self.total, self.where = total, buffer_layout.Workspace.of_total(total)
        self.bases = [self.memory.allocate(total) for _ in range(world)]
        self.states, self.records = [], []
        for base in self.bases:
            data = slice(base + self.where.data_offset(0), base + total)
            self.memory.data[data] = b"\xff" * (data.stop - data.start)
            state, records = self.memory.allocate(4096), self.memory.allocate(1024)
            self.states.append(state)
            self.records.append(records)
            self.memory.write(state + STATE["skip_waits"], int(skip_waits), 4)
            self.memory.write(state + STATE["max_delay"], 1, 4)
            self.memory.write(state + STATE["timeout"], timeout)
            self.memory.write(state + STATE["warn_left"], timeout // 2)
            self.memory.write(state + STATE["fault"], records)
            self.memory.write(state + STATE["warning"], records + 256)
            self.memory.write(state + STATE["abort"], records + 512)
        self.calls, self.lateness = 0, [0, 0, 60, 300]  # in turns

    def call(self, xs):
        """xs: one array for each rank -> the first result of each; or the ranks that trapped."""
        self.calls += 1
        mark, results, running = self.memory.top, [], []
        shape, dtype = self.results[0]
        for rank, x in enumerate(xs):
            x_at = self.memory.allocate(x.nbytes)
            self.memory.data[x_at : x_at + x.nbytes] = x.tobytes()
            y_at = self.memory.allocate(int(np.prod(shape)) * dtype.itemsize, 0xEE)
            results.append(y_at)
            arguments = [
                self.states[rank], self.calls, OP, self.signatures[rank], self.where.signal_bytes,
                rank, self.where.half_bytes, *self.bases, x_at, y_at, 0, 0,
            ]  # fmt: skip
            late = self.rng.choice(self.lateness)
            for _ in range(self.params.grid):
                block = Block(
                    self.programs[rank], arguments, self.memory, self.clock,
                    blocks=self.params.grid, threads=self.threads, shared_bytes=self.shared_bytes,
                )  # fmt: skip
                running.append([rank, late, block])
        trapped = []
        for turn in range(100_000):
            if not running:
                break
            self.rng.shuffle(running)
            for entry in list(running):
                rank, late, block = entry
                if turn < late or self.rng.random() < 0.3:
                    continue
                try:
                    if not block.step(self.rng):
                        running.remove(entry)
                except Trap:
                    trapped.append(rank)
                    running.remove(entry)
        assert not running, "it does not end"
        if trapped:
            return sorted(set(trapped))
        got = []
        for y_at in results:
            data = bytes(self.memory.data[y_at : y_at + int(np.prod(shape)) * dtype.itemsize])
            got.append(np.frombuffer(data, dtype).reshape(shape))
        self.memory.top = mark
        return got

    def word(self, rank, offset):
        return self.memory.read(self.bases[rank] + offset)

    def written_outside(self, rank):
        data = self.memory.data[self.bases[rank] : self.bases[rank] + self.total]
        whole = np.frombuffer(bytes(data), np.uint8)
        return symm_check.written_outside(
            self.params.buffers, self.params.num_signals, self.total,
            lambda at, count: whole[at : at + count],
        )  # fmt: skip


def _params(f, arrays, world):
    mesh = make_mesh((world,))
    stacked = [jax.ShapeDtypeStruct((world, *a.shape), a.dtype) for a in arrays]
    ((_, params),) = symm_check._calls_in(jax.make_jaxpr(per_device(mesh, f))(*stacked).jaxpr)
    return params


def _compile(params, arrays):
    import triton

    kept, compile_ = [], triton.compile
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton, "compile", lambda *a, **k: kept.append(compile_(*a, **k)) or kept[-1])
        compiled = symm_call.compile_call(arrays, params)
    return compiled, kept[-1].asm["ptx"]


def _draw(seed, world, shape, dtype):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(dtype) for _ in range(world)]


def _expected(kernels, name, xs):
    """In float64."""
    wide = [x.astype(np.float64) for x in xs]
    n = len(wide)
    match name:
        case "ring":
            return [wide[i - 1] for i in range(n)]
        case "pull":
            return [sum(wide)] * n
        case "count":
            parts = sum(x.reshape(kernels.PROGRAMS, kernels.BLOCK).sum(0) for x in wide)
            return [np.tile(parts, kernels.PROGRAMS)] * n
        case "root":
            return [wide[1]] * n
        case "flag":
            return [3 * wide[i - 1] for i in range(n)]
        case "packets":
            shifted = [wide[(i + 1) % n].copy() for i in range(n)]
            for x in shifted:
                x[-1] = 0
            return shifted


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", ["ring", "pull", "count", "root", "flag", "packets"])
def test_every_function(kernels, name, world):
    """Three calls: both halves of the workspace, and one of them again."""
    if world > RANKS:
        pytest.skip("not so many devices")
    size = kernels.BLOCK * kernels.PROGRAMS
    array = jax.ShapeDtypeStruct((size,), np.float32)
    ranks = Ranks(lambda x: kernels.call_right(name, x, "tp"), [array], world, seed=world)
    for number in range(1, 4):
        xs = _draw(number, world, (size,), np.float32)
        ys = ranks.call(xs)
        for y, exact in zip(ys, _expected(kernels, name, xs), strict=True):
            np.testing.assert_allclose(y, exact, rtol=1e-5, atol=1e-5)
        for rank in range(world):
            assert ranks.word(rank, 0) == number << 24  # the epoch, and no id
            assert ranks.word(rank, 16) == ranks.word(rank, 24) == 0  # stop, inside
            assert ranks.written_outside(rank)[0] == ""


@pytest.mark.parametrize("name, adds", [("ring", False), ("packets", False), ("count", True)])
def test_only_signal_add_needs_atomics_on_peers_memory(kernels, name, adds):
    """A kernel that uses it is refused on GPUs that have none; others are taken there."""
    array = jax.ShapeDtypeStruct((kernels.BLOCK * kernels.PROGRAMS,), np.float32)
    call = Call([array], _params(lambda x: kernels.call_right(name, x, "tp"), [array], 2))
    for why in ("", "GPU 0 has none on GPU 1's"):
        taken = symm_call._takes(call, Machine("cuda", sm_count=132, no_atomics=why))
        assert isinstance(taken, WhyNot if adds and why else Plan)
        if isinstance(taken, WhyNot):
            assert why in taken.reason and "nvidia-smi topo -p2p a" in taken.reason


@pytest.mark.parametrize("name", ["ring", "pull", "count", "packets"])
def test_without_waits_it_is_wrong(kernels, name):
    size = kernels.BLOCK * kernels.PROGRAMS
    array = jax.ShapeDtypeStruct((size,), np.float32)
    for seed in range(10):
        xs = _draw(seed, 2, (size,), np.float32)
        ranks = Ranks(
            lambda x: kernels.call_right(name, x, "tp"), [array], 2, seed=seed, skip_waits=True
        )
        pairs = zip(ranks.call(xs), _expected(kernels, name, xs), strict=True)
        if any(not np.allclose(y, exact, atol=1e-5) for y, exact in pairs):
            return
    raise AssertionError("the values came from nowhere")


def test_the_all_reduce_of_the_examples(kernels):
    import all_reduce

    array = jax.ShapeDtypeStruct((1024,), np.float16)
    ranks = Ranks(lambda x: all_reduce.all_reduce(x, axis_name="tp"), [array], 2)
    for number in range(2):
        xs = _draw(number, 2, (1024,), np.float16)
        for y in ranks.call(xs):
            exact = sum(x.astype(np.float32) for x in xs).astype(np.float16)
            np.testing.assert_array_equal(y, exact)


def test_the_all_to_all_of_the_examples(kernels):
    import all_to_all

    array = jax.ShapeDtypeStruct((2, 301), jnp.bfloat16)
    ranks = Ranks(lambda x: all_to_all.all_to_all(x, axis_name="tp"), [array], 2)
    for number in range(2):
        xs = _draw(number, 2, (2, 301), jnp.bfloat16)
        for rank, y in enumerate(ranks.call(xs)):
            np.testing.assert_array_equal(y, np.stack([x[rank] for x in xs]))


@pytest.mark.parametrize(
    "place, text", [(259, "12 bytes after the end of 'first'"), (-5, "17 bytes before 'first'")]
)
def test_a_write_outside_is_found(kernels, place, text):
    array = jax.ShapeDtypeStruct((kernels.BLOCK,), np.float32)
    ranks = Ranks(lambda x: kernels.call_outside(x, "tp", place), [array], 2)
    ranks.call(_draw(0, 2, (kernels.BLOCK,), np.float32))
    assert text in ranks.written_outside(0)[0]


@pytest.mark.parametrize("way", ["signal", "count", "packets"])
def test_a_wait_ends_at_its_deadline(kernels, way):
    """Each rank traps, and its record says for whom it waited."""
    array = jax.ShapeDtypeStruct((kernels.BLOCK,), np.float32)
    ranks = Ranks(lambda x: kernels.call_stuck(x, "tp", way), [array], 2, timeout=300_000)
    assert ranks.call(_draw(0, 2, (kernels.BLOCK,), np.float32)) == [0, 1]
    set_ = 1 << 24 | SIGNATURE & 0xFFFFFF
    for rank in range(2):
        peer, item, expected = {
            "signal": (1 - rank, 3, set_),
            "count": (rank, 3, 1 << 24 | 2),
            "packets": (0, MASK, set_),
        }[way]
        record = [ranks.memory.read(ranks.records[rank] + 8 * i) for i in range(6)]
        seen = 1 << 24 | 1 if way == "count" else 0
        assert record == [1, OP | rank << 32, peer, item, expected, seen]
        if way != "packets":  # half of the time before
            warning = [ranks.memory.read(ranks.records[rank] + 256 + 8 * i) for i in range(6)]
            assert warning == record
        assert ranks.word(rank, 16) == 1


def test_a_deadline_stays_when_the_polls_count_from_zero_again(kernels):
    """After 2^30 polls; here after 128."""
    array = jax.ShapeDtypeStruct((kernels.BLOCK,), np.float32)
    ranks = Ranks(
        lambda x: kernels.call_stuck(x, "tp", "signal"), [array], 2, timeout=300_000, wrap=128
    )
    assert ranks.call(_draw(0, 2, (kernels.BLOCK,), np.float32)) == [0, 1]


def test_ranks_that_run_different_calls_are_told(kernels):
    array = jax.ShapeDtypeStruct((kernels.BLOCK * kernels.PROGRAMS,), np.float32)
    ranks = Ranks(lambda x: kernels.call_right("ring", x, "tp"), [array], 2, timeout=10**8)
    ranks.memory.write(ranks.bases[1], 6 << 24)  # as if rank 1 had made six calls more
    assert 0 in ranks.call(_draw(0, 2, array.shape, np.float32))
    kind, who = (ranks.memory.read(ranks.records[0] + 8 * i) for i in range(2))
    assert (kind, who) == (2, OP)


def _differing(f, arrays, **options):
    """Two ranks in one workspace, rank 1 with a call of `arrays[1]`, and what their signals are."""
    groups = [Ranks(f, [array], 2, **options) for array in arrays]
    ranks, other = groups
    assert ranks.total == other.total
    ranks.programs[1] = other.programs[1]
    ranks.signatures = [
        symm_call._signature([array], group.params)
        for array, group in zip(arrays, groups, strict=True)
    ]
    signals = [1 << 24 | signature & 0xFFFFFF for signature in ranks.signatures]
    assert signals[0] != signals[1]
    return ranks, [np.ones(array.shape, array.dtype) for array in arrays], signals


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name, way", [("ring", "shapes"), ("ring", "types"), ("pull", "shapes")])
def test_ranks_that_differ_are_told_at_once(kernels, name, way, seed):
    """Both of them, by the other one's signature, long before the deadline."""
    size = kernels.BLOCK * kernels.PROGRAMS
    arrays = [
        jax.ShapeDtypeStruct((size,), np.float32),
        jax.ShapeDtypeStruct((2 * size,), np.float32)
        if way == "shapes"
        else jax.ShapeDtypeStruct((size,), jnp.bfloat16),
    ]
    ranks, xs, signals = _differing(
        lambda x: kernels.call_right(name, x, "tp"), arrays, seed=seed, timeout=10**12
    )
    assert ranks.call(xs) == [0, 1]
    for rank in range(2):
        record = [ranks.memory.read(ranks.records[rank] + 8 * i) for i in range(6)]
        assert record[:3] == [2, OP | rank << 32, 1 - rank]
        assert record[4:] == [signals[rank], signals[1 - rank]]


def test_packets_of_another_call_are_not_waited_for(kernels):
    """The hello of their sender tells. (Rank 0 waits for its own packets, up to the deadline.)"""
    arrays = [jax.ShapeDtypeStruct((kernels.BLOCK,), dtype) for dtype in (np.float32, np.int32)]
    ranks, xs, signals = _differing(
        lambda x: kernels.call_stuck(x, "tp", "packets"), arrays, timeout=300_000
    )
    ranks.lateness = [0]
    assert ranks.call(xs) == [0, 1]
    records = [[ranks.memory.read(at + 8 * i) for i in range(6)] for at in ranks.records]
    assert records[0] == [1, OP, 0, MASK, signals[0], 0]
    assert records[1] == [2, OP | 1 << 32, 0, MASK, signals[1], signals[0]]
