"""jflux.plan: the paper's equations by hand, the search against brute force, what is refused."""

import dataclasses
import itertools
import json
import math
import re
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jflux.plan as plan
from jflux.parallel import Grid
from jflux.plan import __main__ as cli
from jflux.plan import equations as eq
from jflux.plan import machine as machines
from jflux.plan import paper, predict, search, training
from jflux.plan.equations import Axes
from jflux.plan.model import Layer, Model

ROOT = Path(__file__).resolve().parents[1]
NODES = plan.Machine("nodes", 4, intra=300.0, inter=100.0, memory=1e30, flops=1e3)

SMALL = Model(
    plan.alternate([Layer(8, 24, 4), Layer(24, 8, 4), Layer(8, 48, 4), Layer(48, 8, 4)]),
    batch=24,
    name="small",
)
powers = st.sampled_from([1, 2, 4, 8])
some_grids = st.builds(Grid, powers, powers, powers, powers)


def axes(grid: Grid) -> Axes:
    return Axes(*grid.sizes)


class TestEquations:
    """Section V, by hand."""

    def test_collectives(self):
        """Equations 1 to 3: four ranks of 800 bytes at 100 bytes/s."""
        assert eq.all_gather(4, 800, 100) == 3 * 8
        assert eq.reduce_scatter(4, 800, 100) == 0.75 * 8
        assert eq.all_reduce(4, 800, 100) == 2 * 0.75 * 8

    def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather(self):
        for ranks in (1, 2, 3, 8):
            parts = eq.reduce_scatter(ranks, 960, 7) + eq.all_gather(ranks, 960 / ranks, 7)
            assert eq.all_reduce(ranks, 960, 7) == pytest.approx(parts)

    def test_collectives_of_one_rank_take_no_time(self):
        for op in (eq.all_gather, eq.reduce_scatter, eq.all_reduce):
            assert op(1, 1e9, 1.0, latency=5.0) == 0

    @pytest.mark.parametrize(
        "name, value",
        [
            # 2 x 4 x 8 x 3 ranks, m = 64, k = 32, n = 16, one byte an element, 1 byte/s.
            ("all_gather_z", 7 * 32 * 16 / (2 * 4 * 8)),
            ("reduce_scatter_z", 7 / 8 * 32 * 16 / (2 * 4)),
            ("all_reduce_y", 2 * 3 / 4 * 64 * 16 / (8 * 2)),
            ("all_reduce_x", 2 * 1 / 2 * 64 * 32 / (8 * 4)),
            ("all_reduce_data", 2 * 2 / 3 * 32 * 16 / (2 * 4 * 8)),
        ],
    )
    def test_of_a_layer(self, name, value):
        """Equations 4 to 8."""
        grid = Grid(2, 4, 8, 3)
        first = 64 if name in ("all_reduce_y", "all_reduce_x") else 32
        second = 32 if name == "all_reduce_x" else 16
        assert getattr(eq, name)(first, second, grid, 1, itemsize=1) == pytest.approx(value)
        assert getattr(eq, name)(first, second, grid, 4) == pytest.approx(value * 2 / 4)
        ones = eq.agnostic_bandwidths(1)
        times = eq.layer_times(64, 32, 16, grid, ones, itemsize=1, gradient_itemsize=1)
        assert getattr(times, name) == pytest.approx(value)

    def test_the_sum_of_a_layer(self):
        """Equation 9."""
        times = eq.layer_times(64, 32, 16, Grid(2, 4, 8, 3), Axes(1, 2, 3, 4))
        assert times.total() == sum(times)

    def test_transposed_layers_swap_sizes_and_bandwidths(self):
        plain = eq.layer_times(64, 32, 16, Grid(4, 2, 8, 3), Axes(2, 1, 3, 4))
        swapped = eq.layer_times(64, 32, 16, Grid(2, 4, 8, 3), Axes(1, 2, 3, 4), transposed=True)
        assert swapped == plain

    @given(some_grids)
    def test_an_axis_of_one_rank_has_no_collective(self, grid):
        times = eq.layer_times(64, 32, 16, grid, eq.agnostic_bandwidths(1))
        assert (times.all_gather_z == 0) == (times.reduce_scatter_z == 0) == (grid.z == 1)
        assert (times.all_reduce_y == 0) == (grid.y == 1)
        assert (times.all_reduce_x == 0) == (grid.x == 1)
        assert (times.all_reduce_data == 0) == (grid.data == 1)

    @pytest.mark.parametrize(
        "sizes, want",
        [
            # Figure 5: one ring over eight GPUs on two nodes of four.
            ((8, 1, 1, 1), (100, 100 / 4, 100 / 4, 100 / 4)),
            ((1, 8, 1, 1), (300, 100, 100 / 4, 100 / 4)),
            # Figure 6: two rings of four share what there is between two nodes.
            ((2, 4, 1, 1), (300, 100 / 2, 100 / 4, 100 / 4)),
            # Within a node, and never more rings than a node has GPUs.
            ((2, 2, 1, 1), (300, 300, 300, 300)),
            ((2, 2, 2, 2), (300, 300, 100 / 4, 100 / 4)),
            ((1, 1, 4, 8), (300, 300, 300, 100 / 4)),
            ((1, 1, 32, 1), (300, 300, 100, 100 / 4)),
        ],
    )
    def test_bandwidths(self, sizes, want):
        """Equation 10 on nodes of four; an axis of one rank has a value that nobody uses."""
        assert eq.aware_bandwidths(Axes(*sizes), 4, 300, 100) == pytest.approx(want)
        assert eq.agnostic_bandwidths(7) == (7, 7, 7, 7)

    def test_groups_of_the_hierarchy(self):
        """Section V-B: which GPUs form a group along x, and along y, of eight; figure 6."""
        if jax.device_count() < 8:
            pytest.skip("needs 8 devices")
        order = {d: i for i, d in enumerate(jax.devices())}

        def groups(grid: Grid, axis: str) -> list[tuple[int, ...]]:
            devices = np.vectorize(order.get)(grid.mesh().devices)
            at = ("data", "z", "y", "x").index(axis)
            rows = np.moveaxis(devices, at, -1).reshape(-1, getattr(grid, axis))
            return sorted(map(tuple, rows.tolist()))

        assert groups(Grid(2, 2, 2, 1), "x") == [(0, 1), (2, 3), (4, 5), (6, 7)]
        assert groups(Grid(2, 2, 2, 1), "y") == [(0, 2), (1, 3), (4, 6), (5, 7)]
        assert groups(Grid(2, 4, 1, 1), "y") == [(0, 2, 4, 6), (1, 3, 5, 7)]

    def test_arrays_of_grids(self):
        sizes = search.grids(64)
        many = eq.aware_bandwidths(Axes(*sizes.T), 4, 300.0, 100.0)
        times = eq.layer_times(64, 32, 16, Axes(*sizes.T), many, transposed=True)
        for i, row in enumerate(sizes.tolist()):
            one = eq.aware_bandwidths(Axes(*row), 4, 300.0, 100.0)
            assert tuple(b[i] for b in many) == pytest.approx(one)
            assert times.total()[i] == pytest.approx(
                eq.layer_times(64, 32, 16, Axes(*row), one, transposed=True).total()
            )


def by_equations(model: Model, machine: plan.Machine, grid: Grid, aware: bool) -> float:
    """Equation 9 over all layers, with no code of the search."""
    one = machine.inter if grid.ranks > machine.gpus_per_node else machine.intra
    bandwidths = eq.agnostic_bandwidths(one)
    if aware:
        node = machine.gpus_per_node
        bandwidths = eq.aware_bandwidths(grid, node, machine.intra, machine.inter)
    return sum(
        eq.layer_times(
            model.batch * layer.rows / grid.data, layer.k, layer.n, grid, bandwidths,
            transposed=layer.transposed,
        ).total()
        for layer in model.layers
    )  # fmt: skip


class TestPrediction:
    @given(some_grids, st.booleans())
    def test_is_what_the_equations_say(self, grid, aware):
        for model in (SMALL, plan.named("gpt-5b", vocabulary=0)):
            times = predict.communication(model, NODES, axes(grid), aware=aware)
            assert times.total() == pytest.approx(by_equations(model, NODES, grid, aware))

    @pytest.mark.parametrize("gpus", [1, 2, 4])
    def test_on_one_node_both_models_agree(self, gpus):
        aware = plan.rank(SMALL, gpus, NODES)
        agnostic = plan.rank(SMALL, gpus, NODES, aware=False)
        assert [p.grid for p in aware] == [p.grid for p in agnostic]
        assert np.array_equal(aware.communication(), agnostic.communication())

    def test_one_gpu_does_not_talk(self):
        for extensions in (plan.Extensions(), plan.Extensions(latency=True, recompute=True)):
            assert plan.rank(SMALL, 1, NODES, extensions=extensions).best.communication == 0

    def test_times_are_of_the_axis_they_run_along(self):
        """A transposed layer's forward all-reduce runs along x."""
        model = Model((Layer(8, 24, 4, transposed=True),), batch=2)
        times = predict.communication(model, NODES, Axes(2, 1, 1, 1))
        assert times.all_reduce_y == 0
        assert times.all_reduce_x == pytest.approx(2 / 300 * (1 / 2) * 2 * 8 * 24)

    def test_megatron(self):
        """x alone is Megatron-LM's tensor parallelism: four all-reduces of [m, h] a block."""
        model = plan.gpt("g", layers=1, hidden=64, heads=4, tokens=4096, vocabulary=0)
        times = predict.communication(model, NODES, Axes(4, 1, 1, 1))
        assert times.total() == pytest.approx(4 * eq.all_reduce(4, 2 * 4096 * 64, 300))
        assert times.all_reduce_x == times.total()

    def test_weights_alone_depend_on_z_times_data(self):
        """2 (1 - 1/(G_z G_data)) of the weights, however split: why the agnostic model has ties."""
        for z, data in ((32, 1), (16, 2), (4, 8), (1, 32)):
            times = predict.communication(SMALL, NODES, Axes(1, 1, z, data), aware=False)
            assert times.total() == pytest.approx(2 * (1 - 1 / 32) * 2 * SMALL.weights / 100)

    def test_a_convolution(self):
        layer = Layer(4, 6, rows=16, rows_in=64, taps=9)
        times = predict.communication(Model((layer,), batch=8), NODES, Axes(2, 2, 1, 2))
        m_in, m_out = 8 * 64 / 2, 8 * 16 / 2
        assert times.all_reduce_y == pytest.approx(2 * 0.5 * 2 * m_out * 6 / 2 / 300)
        assert times.all_reduce_x == pytest.approx(2 * 0.5 * 2 * m_in * 4 / 2 / 300)
        assert times.all_reduce_data == pytest.approx(2 * 0.5 * 2 * 9 * 4 * 6 / 4 / (100 / 4))
        assert Model((layer,), batch=8).flops == 3 * 8 * 2 * 16 * 9 * 4 * 6

    def test_an_embedding_has_no_input_gradient(self):
        table = Layer(1000, 8, 4, transposed=True, lookup=True)
        times = predict.communication(Model((table,), batch=8), NODES, Axes(2, 2, 1, 1))
        assert times.all_reduce_y == 0 and times.all_reduce_x > 0
        assert table.flops == 0

    def test_computation(self):
        """6 flops a weight and token, 8 with the second forward pass of checkpointing."""
        model = plan.named("gpt-5b", vocabulary=0)
        flops = model.weights * (1 << 22)
        plain = plan.Training(checkpoint=False)
        assert predict.compute(model, NODES, 64, plain) == pytest.approx(6 * flops / 64 / 1e3)
        assert predict.compute(model, NODES, 64) == pytest.approx(8 * flops / 64 / 1e3)


class TestExtensions:
    GRID = Axes(2, 2, 4, 2)
    MACHINE = dataclasses.replace(NODES, intra_latency=0.25, inter_latency=2.0)

    def total(self, machine=MACHINE, model=SMALL, grid=GRID, training=training.PAPER, **given):
        extensions = plan.Extensions(**given)
        return predict.communication(
            model, machine, grid, extensions=extensions, training=training
        ).total()  # fmt: skip

    def test_latency_counts_the_steps_of_the_rings(self):
        # Of each of four layers: z gathers and scatters in 3 steps each, between nodes; x and y
        # reduce in 2 steps inside one; data reduces in 2 between nodes.
        steps = 4 * (2.0 * (3 + 3 + 2) + 0.25 * (2 + 2))
        assert self.total(latency=True) - self.total() == pytest.approx(steps)

    def test_bandwidth_by_size(self):
        flat = dataclasses.replace(
            self.MACHINE, intra_by_size=((1, 300), (1e9, 300)), inter_by_size=((1, 100),)
        )
        assert self.total(flat, bandwidth_by_size=True) == pytest.approx(self.total())
        assert self.total(bandwidth_by_size=True) == self.total()  # no tables
        slow = dataclasses.replace(self.MACHINE, intra_by_size=((1e4, 3.0), (1e6, 300.0)))
        assert self.total(slow) == self.total()
        # x reduces 2 bytes * m * k / (z * y): 1e5 of them, halfway between the two.
        model = Model((Layer(250, 8, rows=1000),), batch=1)
        times = predict.communication(
            model, slow, Axes(4, 1, 5, 1), extensions=plan.Extensions(bandwidth_by_size=True)
        )
        assert times.all_reduce_x == pytest.approx(2 * 0.75 * 1e5 / 30)
        # An all-gather goes by what it gives: 2 bytes * k * n.
        times = predict.communication(
            Model((Layer(250, 200),), batch=4), slow, Axes(1, 1, 4, 1),
            extensions=plan.Extensions(bandwidth_by_size=True),
        )  # fmt: skip
        assert times.all_gather_z == pytest.approx(0.75 * 1e5 / 30)
        assert times.reduce_scatter_z == pytest.approx(times.all_gather_z)

    def test_overlap_hides_what_the_products_last(self):
        slow = dataclasses.replace(self.MACHINE, flops=1e-9)  # products that last for ever
        hidden = predict.communication(
            SMALL, slow, self.GRID, extensions=plan.Extensions(overlap=1.0)
        )
        plain = predict.communication(SMALL, slow, self.GRID)
        assert hidden.all_gather_z == hidden.reduce_scatter_z == 0
        assert hidden.all_reduce_data == plain.all_reduce_data
        # Forward all-reduces stay: y of plain layers, x of transposed ones.
        assert 0 < hidden.all_reduce_y < plain.all_reduce_y
        totals = [self.total(overlap=share) for share in (0.0, 0.3, 0.6, 1.0)]
        assert totals == sorted(totals, reverse=True) and totals[0] == self.total()

    def test_recompute(self):
        once = predict.communication(SMALL, NODES, self.GRID)
        more = plan.Extensions(recompute=True)
        twice = predict.communication(SMALL, NODES, self.GRID, extensions=more)
        assert twice.all_gather_z == pytest.approx(2 * once.all_gather_z)
        assert twice.reduce_scatter_z == once.reduce_scatter_z
        cached = plan.Training(cache_gathered=True)
        kept = predict.communication(SMALL, NODES, self.GRID, extensions=more, training=cached)
        assert kept.all_gather_z == once.all_gather_z
        assert kept.all_reduce_x == twice.all_reduce_x > once.all_reduce_x
        assert self.total(recompute=True, training=plan.Training(checkpoint=False)) == self.total()

    def test_straddling(self):
        assert self.total(straddling=True) == self.total()
        three = Axes(3, 1, 4, 1)
        assert eq.within_node(three, 4).x and not eq.within_node(three, 4, straddling=True).x
        assert self.total(straddling=True, grid=three) > self.total(grid=three)
        assert eq.within_node(Axes(3, 2, 1, 1), 8, straddling=True) == (True,) * 4  # one node

    def test_ranks_on_a_node(self):
        """Of each axis, x innermost: on nodes of 8."""
        cases = {
            (16, 1, 1, 1): (8, 1, 1, 1),
            (2, 8, 2, 1): (2, 4, 1, 1),
            (4, 2, 4, 2): (4, 2, 1, 1),  # nodes are full
            (3, 4, 1, 1): (3, 1, 1, 1),  # nodes would have two and two thirds
            (12, 1, 1, 1): (1, 1, 1, 1),  # eight and four
        }
        for sizes, want in cases.items():
            assert eq.ranks_on_a_node(Axes(*sizes), 8) == want

    def test_two_levels(self):
        """An all-reduce over 2 nodes of 4: scattered and gathered inside, a quarter between."""
        model, grid = Model((Layer(250, 8, rows=1000),), batch=1), Axes(8, 1, 1, 1)
        nbytes = 2 * 250 * 1000
        for latency in (False, True):
            times = predict.communication(
                model, self.MACHINE, grid,
                extensions=plan.Extensions(two_level=True, latency=latency),
            )  # fmt: skip
            inside = 2 * 0.75 * nbytes / self.MACHINE.intra
            between = nbytes / 4 / (self.MACHINE.inter / 4)  # all four GPUs of a node send
            steps = 2 * 3 * 0.25 + 2 * 2.0 if latency else 0
            assert times.all_reduce_x == pytest.approx(inside + between + steps)
        inside_nodes = Axes(2, 2, 4, 2)
        assert self.total(two_level=True, grid=inside_nodes) == self.total(grid=inside_nodes)

    def test_microbatches_repeat_what_weights_need(self):
        parts = plan.Training(microbatches=3)
        one = predict.communication(SMALL, NODES, self.GRID)
        many = predict.communication(SMALL, NODES, self.GRID, training=parts)
        assert many.all_gather_z == pytest.approx(3 * one.all_gather_z)
        assert many.reduce_scatter_z == pytest.approx(3 * one.reduce_scatter_z)
        assert many.all_reduce_x == pytest.approx(one.all_reduce_x)
        assert many.all_reduce_data == one.all_reduce_data

    def test_what_makes_no_sense(self):
        with pytest.raises(ValueError, match="overlap=1.5"):
            plan.Extensions(overlap=1.5)
        with pytest.raises(ValueError, match="one of the two"):
            plan.Extensions(latency=True, bandwidth_by_size=True)


class TestMemory:
    def test_by_hand(self):
        model = Model((Layer(8, 24, 4), Layer(24, 8, 4, transposed=True)), batch=16, checkpoint=2)
        found = training.memory(model, Axes(2, 2, 2, 2), plan.Training())
        weights = 8 * 24 * 2
        assert found.weights == 2 * weights / 8
        assert found.gradients == 2 * weights / 8
        assert found.optimizer == 12 * weights / 8
        assert found.gathered == (2 + 2) * 8 * 24 / 4
        rows = 16 / 2 * 4 / 2  # of a rank
        inputs, outputs = (8 / 2, 24 / 2), (24 / 2, 8 / 2)  # columns of a rank
        assert found.activations == 2 * rows * (inputs[0] + sum(inputs) + sum(outputs))
        assert found.total() == sum(found)
        every = training.memory(model, Axes(2, 2, 2, 2), plan.Training(checkpoint=False))
        assert every.activations == 2 * rows * (sum(inputs) + sum(outputs))

    def test_a_transformer_without_checkpointing(self):
        """About 34 bytes a token and hidden unit (arXiv 2205.05198), less masks and norms."""
        model = plan.gpt("g", layers=10, hidden=64, heads=4, tokens=2048, vocabulary=0)
        kept = training.memory(model, Axes(1, 1, 1, 1), plan.Training(checkpoint=False))
        assert kept.activations == 32 * 10 * 2048 * 64

    @given(some_grids, st.sampled_from(["x", "y", "z", "data"]))
    def test_more_ranks_never_need_more(self, grid, axis):
        more = dataclasses.replace(grid, **{axis: 2 * getattr(grid, axis)})
        for how in (plan.Training(), plan.Training(checkpoint=False, cache_gathered=True)):
            before = training.memory(SMALL, axes(grid), how)
            after = training.memory(SMALL, axes(more), how)
            for name in ("weights", "gradients", "optimizer", "activations"):
                assert getattr(after, name) <= getattr(before, name)
            if grid.z > 1:
                assert after.gathered <= before.gathered

    @given(some_grids)
    def test_what_saves_memory(self, grid):
        def total(**given) -> float:
            return training.memory(SMALL, axes(grid), plan.Training(**given)).total()

        assert total(microbatches=2) <= total()
        assert total(cache_gathered=True) >= total()
        big = plan.named("gpt-5b")
        kept = training.memory(big, axes(grid), plan.Training(checkpoint=False)).activations
        assert training.memory(big, axes(grid), plan.Training()).activations < kept


class TestSearch:
    @pytest.mark.parametrize("ranks", [1, 2, 7, 12, 32, 60])
    def test_grids_are_all_of_them(self, ranks):
        divisors = [d for d in range(1, ranks + 1) if ranks % d == 0]
        want = [g for g in itertools.product(divisors, repeat=4) if math.prod(g) == ranks]
        assert list(map(tuple, search.grids(ranks).tolist())) == want

    @pytest.mark.parametrize("ranks, count", [(100_000, 56 * 56), (98_304, 816 * 4)])
    def test_how_many(self, ranks, count):
        """Powers p^e split in (e + 3 choose 3) ways."""
        assert len(search.grids(ranks)) == count

    @pytest.mark.parametrize("aware", [True, False])
    @pytest.mark.parametrize("gpus", [1, 6, 8, 12, 24])
    def test_against_brute_force(self, gpus, aware):
        model = dataclasses.replace(SMALL, splits_x=(("heads", 4),))
        want = {}
        for sizes in search.grids(gpus).tolist():
            x, y, z, data = sizes
            fits = model.batch % (z * data) == 0 and 4 % x == 0
            for layer in model.layers:
                rows, columns = (x, y) if layer.transposed else (y, x)
                fits &= layer.k % (rows * z) == 0 and layer.n % columns == 0
            if fits:
                want[Grid(*sizes)] = by_equations(model, NODES, Grid(*sizes), aware)
        ranking = plan.rank(model, gpus, NODES, aware=aware)
        assert {p.grid: p.communication for p in ranking} == pytest.approx(want)
        times = [p.communication for p in ranking]
        assert np.all(np.diff(times) >= -1e-8 * np.array(times[1:]))
        assert [p.place for p in ranking] == list(range(1, len(ranking) + 1))
        assert ranking.best.grid == ranking[0].grid == min(ranking, key=lambda p: p.place).grid

    def test_equal_times_are_ordered_by_memory(self):
        """x and y cost the same here, and y splits the input that checkpointing keeps."""
        model = Model(plan.alternate([Layer(8, 8, 4)] * 2), batch=8, checkpoint=2)
        ranking = plan.rank(model, 2, NODES)
        split = [p for p in ranking if p.grid.tensor == 2 and p.grid.z == 1]
        assert [p.grid for p in split] == [Grid(1, 2), Grid(2, 1)]
        assert split[0].communication == pytest.approx(split[1].communication)
        assert split[0].memory.total() < split[1].memory.total()

    def test_every_grid_is_ranked_or_refused(self):
        ranking = plan.rank(plan.named("gpt-20b", tokens=1 << 16), 32)
        refused = dict(ranking.refused())
        assert len(refused) == ranking.refusals
        assert {p.grid for p in ranking} | set(refused) == {
            Grid(*sizes) for sizes in search.grids(32).tolist()
        }
        assert all(refused.values())
        for p in ranking:
            assert ranking.why_not(p.grid) is None

    def test_reasons(self):
        ranking = plan.rank(plan.named("gpt-20b", tokens=1 << 16), 32)
        why = ranking.why_not(Grid(16, 1, 2, 1))
        assert why == "heads: 56 does not divide by x = 16"
        why = ranking.why_not(Grid(1, 1, 1, 32))
        assert why.startswith("it needs 323.0 GB of 40.0 per GPU (weights 40.2, gradients 40.2, ")
        assert ranking.why_not(Grid(2, 2, 2, 2)) == "2x2x2x2 has 16 ranks, not 32"
        with pytest.raises(KeyError, match="1x1x1x32 is not in the ranking"):
            ranking.find(Grid(1, 1, 1, 32))
        few = plan.rank(plan.named("gpt-20b", tokens=1 << 15), 32)
        assert "the batch of 16 does not divide by z * data = 32" in few.why_not(Grid(1, 1, 32, 1))
        small = plan.rank(SMALL, 16, NODES)
        assert "rows of [8, 24]: 8 does not divide by y * z = 16" in small.why_not(Grid(1, 4, 4, 1))
        turned = plan.rank(Model((Layer(6, 8, transposed=True),), batch=8), 4, NODES)
        assert turned.why_not(Grid(1, 1, 4)) == "rows of [6, 8]: 6 does not divide by x * z = 4"
        assert "columns of [8, 24]: 24 does not divide by x = 16" in small.why_not(Grid(16))

    def test_nothing_divides(self):
        with pytest.raises(plan.NoGrid, match="none of 4 grids divides. The nearest, 1x1x1x7: the"):
            plan.rank("gpt-80b", 7)

    def test_nothing_fits(self):
        with pytest.raises(plan.NoGrid, match=r"grids divide, and none fits.*1x1x4x1: it needs"):
            plan.rank(plan.named("gpt-80b", tokens=1 << 15), 4)
        with pytest.raises(plan.NoGrid, match=r"none fits.*; more microbatches would need less$"):
            plan.rank("gpt-20b", 32)
        parts = plan.Training(microbatches=16)
        assert len(plan.rank("gpt-20b", 32, training=parts)) > 10
        found = plan.rank(plan.named("gpt-80b", tokens=1 << 15), 4, fits=False)
        assert found.best.memory.total() > found.machine.memory

    def test_wrong_arguments(self):
        with pytest.raises(ValueError, match="no model 'gpt-6b'; there are gpt-5b"):
            plan.rank("gpt-6b", 8)
        with pytest.raises(ValueError, match="no machine 'abacus'"):
            plan.rank("gpt-5b", 8, "abacus")
        with pytest.raises(ValueError, match="several nodes of 4.*no bandwidth between nodes"):
            plan.rank(SMALL, 8, dataclasses.replace(NODES, inter=0.0))
        with pytest.raises(ValueError, match="does not divide by 5 microbatches"):
            plan.rank(SMALL, 4, NODES, training=plan.Training(microbatches=5))
        with pytest.raises(ValueError, match="ranks=0"):
            plan.rank(SMALL, 0, NODES)
        assert len(plan.rank(SMALL, 4, dataclasses.replace(NODES, inter=0.0))) > 1

    @pytest.mark.parametrize("gpus", [100_000, 98_304, 83_160])
    def test_a_hundred_thousand_gpus_in_ten_seconds(self, gpus):
        """83,160 has the most grids of all numbers below 100,000: 25,600."""
        model = plan.gpt("g", layers=96, hidden=27720, heads=120, tokens=2048 * gpus)
        everything = plan.Extensions(latency=True, overlap=0.5, recompute=True, straddling=True)
        everything = dataclasses.replace(everything, two_level=True)
        start = time.perf_counter()
        ranking = plan.rank(model, gpus, "h200", fits=False, extensions=everything)
        assert time.perf_counter() - start < 10
        assert len(ranking) + ranking.refusals == len(search.grids(gpus))
        assert ranking[-1].communication > ranking.best.communication

    def test_slices(self):
        ranking = plan.rank(SMALL, 16, NODES)
        assert [p.place for p in ranking[1:4]] == [2, 3, 4]
        assert ranking[-1].place == len(ranking)
        with pytest.raises(IndexError):
            ranking[len(ranking)]

    def test_the_mesh(self):
        best = plan.rank(SMALL, jax.device_count(), NODES).best
        mesh = best.mesh()
        assert mesh.axis_names == ("data", "z", "y", "x")
        assert mesh.devices.shape == best.grid.sizes[::-1]
        assert best.step == best.compute + best.communication


class TestModels:
    @pytest.mark.parametrize(
        "name, size",
        [("gpt-5b", 5), ("gpt-10b", 10), ("gpt-20b", 20), ("gpt-40b", 40), ("gpt-80b", 80),
         ("gpt-3-175b", 175), ("llama-2-70b", 70)],
    )  # fmt: skip
    def test_weights(self, name, size):
        """Table I, and names."""
        assert plan.named(name).weights / 1e9 == pytest.approx(size, rel=0.05)

    @pytest.mark.parametrize(
        "name, size",
        [("unet-250m", 0.25), ("unet-500m", 0.5), ("unet-1b", 1), ("unet-2b", 2), ("unet-4b", 4)],
    )
    def test_unets(self, name, size):
        """Table II, whose architecture is not wholly known."""
        assert plan.named(name).weights / 1e9 == pytest.approx(size, rel=0.25)

    def test_a_block_of_gpt(self):
        qkv, projection, up, down = plan.named("gpt-20b").layers[:4]
        assert (qkv.k, qkv.n, qkv.transposed) == (7168, 21504, False)
        assert (projection.k, projection.n, projection.transposed) == (7168, 7168, True)
        assert (up.k, up.n, up.transposed) == (7168, 28672, False)
        assert (down.k, down.n, down.transposed) == (28672, 7168, True)
        assert plan.named("gpt-20b").batch * qkv.rows == 1 << 22

    @pytest.mark.parametrize("name", plan.MODELS)
    def test_every_model_has_a_grid(self, name):
        assert len(plan.rank(name, 1024, "h200", fits=False)) > 10

    def test_what_makes_no_sense(self):
        with pytest.raises(ValueError, match="whole sequences"):
            plan.named("gpt-5b", tokens=1000)
        with pytest.raises(ValueError, match="k=0"):
            Layer(0, 4)
        with pytest.raises(ValueError, match="no layers"):
            Model((), 4)
        with pytest.raises(ValueError, match="batch=0"):
            Model((Layer(4, 4),), 0)


class TestMachines:
    LINKS = [(0, 1, 390.0, 102.0, 2.6), (1, 0, 361.0, 110.0, 2.8)]

    def test_of_the_probe(self):
        found = machines.from_links(self.LINKS, plan.MACHINES["h200"])
        assert (found.gpus_per_node, found.intra, found.name) == (2, 361e9, "measured")
        assert found.intra_latency == pytest.approx(1.4e-6)
        assert found.inter == plan.MACHINES["h200"].inter
        assert machines.from_links(self.LINKS, found, inter=5e9).inter == 5e9
        with pytest.raises(RuntimeError, match="one GPU"):
            machines.from_links([], found)

    def test_measured(self):
        if jax.default_backend() != "gpu":
            with pytest.raises(RuntimeError, match="no links to measure here: no GPUs"):
                plan.measured()
        else:
            assert plan.measured().intra > 1e9

    def test_of_a_file(self, tmp_path):
        path = tmp_path / "machine.json"
        for machine in plan.MACHINES.values():
            path.write_text(json.dumps(dataclasses.asdict(machine)))
            assert plan.Machine.load(path) == machine
        for text in ("{", '{"name": "x", "gpus": 3}', "[]"):
            path.write_text(text)
            with pytest.raises(ValueError, match="does not describe a machine"):
                plan.Machine.load(path)

    def test_what_makes_no_sense(self):
        for field, value in (("gpus_per_node", 0), ("intra", 0), ("inter", -1), ("memory", 0)):
            with pytest.raises(ValueError, match=field):
                dataclasses.replace(NODES, **{field: value})
        with pytest.raises(ValueError, match="growing bytes"):
            dataclasses.replace(NODES, intra_by_size=((2, 1), (1, 1)))


class TestCommand:
    ARGS = ["--model", "gpt-20b", "--gpus", "32", "--tokens", "65536"]

    def test_table(self, capsys):
        assert cli.main([*self.ARGS, "--top", "3"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0] == "gpt-20b: 129 layers, 20.10 G weights, batch 32"
        assert lines[1] == "gpt-20b, 32 GPUs of perlmutter (8 nodes), placement-aware"
        assert lines[2] == "32 grids, 24 more refused"
        assert len(lines) == 4 + 3 and lines[4].split()[:3] == ["1", "1x1x32x1", "0.779"]

    def test_json(self, capsys):
        more = ["--json", "--refused", "--agnostic", "--recompute", "--overlap", "0.5"]
        assert cli.main([*self.ARGS, *more, "--top", "2"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert len(found["plans"]) == 2 and len(found["why_refused"]) == found["refused"] == 24
        assert not found["aware"] and found["extensions"]["recompute"]
        first = found["plans"][0]
        assert first["communication_s"] == pytest.approx(sum(first["times_s"].values()))
        assert first["grid"].keys() == {"x", "y", "z", "data"}

    def test_refused(self, capsys):
        assert cli.main([*self.ARGS, "--refused"]) == 0
        assert "16x2x1x1: heads: 56 does not divide by x = 16" in capsys.readouterr().out

    def test_machine(self, tmp_path, capsys):
        path = tmp_path / "mine.json"
        path.write_text(json.dumps(dataclasses.asdict(NODES)))
        given = ["--machine", str(path), "--gpus-per-node", "2", "--intra", "3", "--inter", "5",
                 "--memory", "64", "--json"]  # fmt: skip
        assert cli.main([*self.ARGS, *given]) == 0
        machine = json.loads(capsys.readouterr().out)["machine"]
        assert machine["gpus_per_node"] == 2 and machine["name"] == "nodes"
        assert (machine["intra"], machine["inter"], machine["memory"]) == (3e9, 5e9, 64e9)

    @pytest.mark.parametrize(
        "more, text",
        [
            (["--model", "gpt"], "no model 'gpt'"),
            (["--machine", "nowhere.json"], "nowhere.json"),
            (["--model", "unet-1b"], "give --batch"),
            (["--memory", "1"], "none fits"),
            (["--latency", "--by-size"], "one of the two"),
            (["--out", "/nowhere/at/all.png"], "/nowhere/at/all.png"),
        ],
    )
    def test_errors_are_one_line(self, more, text, capsys):
        assert cli.main([*self.ARGS, *more]) == 1
        found = capsys.readouterr()
        assert text in found.err and not found.out

    def test_picture(self, tmp_path):
        pytest.importorskip("matplotlib")
        path = tmp_path / "plan.png"
        assert cli.main([*self.ARGS, "--out", str(path)]) == 0
        assert path.read_bytes().startswith(b"\x89PNG")

    def test_picture_without_matplotlib(self, monkeypatch, capsys):
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
        assert cli.main([*self.ARGS, "--out", "plan.png"]) == 1
        assert "pip install matplotlib" in capsys.readouterr().err


class TestPaper:
    """Section V-C, as docs/guide/plan.md tells it."""

    def test_first_by_either_model(self):
        aware, agnostic = paper.section_v_c()
        assert len(aware) == len(agnostic) == 32
        assert aware.best.grid == Grid(1, 1, 32, 1)
        assert paper.places(aware, aware.best.grid) == (1, 1)
        assert paper.places(agnostic, aware.best.grid) == (13, 14)
        assert paper.shared(aware, agnostic) == 1

    @pytest.mark.parametrize("intra", [50e9, 100e9, 200e9])
    def test_what_four_and_two_of_five_imply(self, intra):
        machine = dataclasses.replace(paper.PERLMUTTER, intra=intra)
        assert 1 <= paper.shared(*paper.section_v_c(paper.TOKENS, machine)) <= 3

    def test_long_rings(self):
        """Latency bounds z where the equations alone give it all ranks."""
        assert plan.rank("gpt-80b", 1024).best.grid == Grid(1, 1, 1024, 1)
        for more in ({}, {"recompute": True, "overlap": 0.5}):
            extensions = plan.Extensions(latency=True, **more)
            assert plan.rank("gpt-80b", 1024, extensions=extensions).best.grid.z == 64

    @pytest.fixture
    def document(self):
        path = ROOT / "docs" / "guide" / "plan.md"
        if not path.exists():
            pytest.skip("the documents are not here")
        return path

    def test_the_document(self, document):
        assert paper.main([str(document), "--check"]) == 0
        text = document.read_text()
        assert f"{len(search.grids(1024))} for 1024 GPUs" in text
        aware, _ = paper.section_v_c()
        assert f"{len(aware)} of {len(search.grids(32))} grids divide and fit" in text

    def test_the_sample_of_the_document(self, document, capsys):
        (sample,) = re.findall(r"^```python\n(.*?)^```$", document.read_text(), re.M | re.S)
        exec(sample, {})
        assert "1x1x1024x1 3.06" in capsys.readouterr().out

    def test_the_commands_of_the_document(self, document, tmp_path, monkeypatch):
        pytest.importorskip("matplotlib")
        monkeypatch.chdir(tmp_path)
        commands = re.findall(r"^python -m jflux.plan (--model .*)$", document.read_text(), re.M)
        assert len(commands) == 2
        for command in commands:
            assert cli.main(command.split()) == 0

    def test_the_document_is_filled(self, tmp_path):
        pytest.importorskip("matplotlib")
        (tmp_path / "img").mkdir()
        document = tmp_path / "plan.md"
        document.write_text(
            "".join(f"<!-- {name} -->\nold\n<!-- end of {name} -->\n" for name in paper.TABLES)
        )
        assert paper.main([str(document), "--check"]) == 1
        assert paper.main([str(document)]) == 0
        assert "old" not in document.read_text() and len(list(tmp_path.glob("img/*.png"))) == 2
        with pytest.raises(ValueError, match="no <!-- ranking -->"):
            paper.fill("")


def test_importing_jflux_imports_no_more_than_before():
    code = (
        "import sys, jflux\n"
        "later = {f'jflux.{name}' for name in ('nn', 'parallel', 'plan', 'timeline')}\n"
        "bad = {'flax', 'matplotlib', *later} & set(sys.modules); assert not bad, bad\n"
        "jflux.plan.rank, jflux.parallel.Grid, jflux.timeline.record, jflux.nn.mlp\n"
        "assert later <= set(sys.modules) and {'plan', 'all_reduce'} <= set(dir(jflux))\n"
        "assert not hasattr(jflux, 'nowhere')\n"
        "bad = {'flax', 'matplotlib'} & set(sys.modules); assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=120)
