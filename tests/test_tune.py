"""jflux.tune and the tables that it writes. Choosing is tested anywhere, measuring on GPUs."""

import collections
import dataclasses
import functools
import itertools
import json
import logging
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import PLATFORM, PRODUCTS, RANKS, compiled_text, fused_calls, make_mesh, of_way
from harness import operands as call_operands
from workers.common import environment

import jflux
from jflux import _config
from jflux._call import explain, gpu_code, tuning_tables
from jflux._call.plans import Machine
from jflux._call.tuning_tables import DECOMPOSED, Choice, Key
from jflux._ops._spec import all_ops, products
from jflux._ops.products import all_gather_matmul, matmul, matmul_reduce_scatter
from jflux._stress.calls import per_device
from jflux._tools import trials, tuner

E4M3 = np.dtype(jnp.float8_e4m3fn)
GPU = "NVIDIA H200"
MACHINE = Machine("cuda", sm_count=132, link_gbps=320)
KEY = Key("all_gather_matmul", 4, 8192, 12288, 12288, "bfloat16", False)


def heuristic(key, machine=MACHINE):
    """What the kernel does if nothing was measured."""
    native = machine.native_plan(key.op, tuner.native_call(key))
    return Choice(*(native[field.name] for field in dataclasses.fields(Choice)))


@pytest.fixture
def own_tables(tmp_path, monkeypatch):
    monkeypatch.setenv("JFLUX_TUNING_DIR", str(tmp_path))
    monkeypatch.setattr(tuning_tables, "_agreed", {})
    return tmp_path


@pytest.mark.parametrize("op", PRODUCTS)
def test_sizes_that_the_ranks_do_not_divide(op):
    spec = all_ops()[op]
    layout = spec.layout(2, **spec.ways[0])
    tuner.check_divides(spec, 8, 8, 8, 4)
    names = {"x": ("m", "k"), "y": ("m", "n"), "w": ("k", "n")}
    for array, dimension in {**layout.rows, **layout.others}.items():
        if dimension is not None:
            sizes = dict.fromkeys("mnk", 8) | {names[array][dimension]: 9}
            with pytest.raises(ValueError, match="9 is not a multiple of the 4 ranks"):
                tuner.check_divides(spec, *(sizes[name] for name in "mnk"), 4)


@pytest.mark.parametrize("op", [spec.name for spec in products() if spec.tuned])
def test_key_of_a_call_is_what_tune_stores(op, own_tables, monkeypatch):
    """A choice under the key of a plan reaches the call's lowering, and no other call's."""
    call = of_way(op, lead=(256,), k=64, n=24, dtype=jnp.bfloat16)
    if call.collective.kind == "all_reduce":  # large enough for its kernel
        call = of_way(op, lead=(512,), k=64, n=8192, dtype=jnp.bfloat16)
    mesh, asked = make_mesh((2,)), []
    monkeypatch.setattr(tuning_tables, "lookup", lambda key, gpu: asked.append(key))
    f = jax.jit(per_device(mesh, call.bind("tp")))
    (found,) = explain.explain(f, *call_operands(call, mesh, "tp"))
    assert found.plan.key == asked[-1] and found.plan.key.op == op
    key = found.plan.key
    assert (key.ranks, key.dtype, key.transpose_rhs) == (2, "bfloat16", False)
    assert str(key) == f"{op} bfloat16 ranks=2 rows={key.rows} n={key.n} k={key.k} w=kn"
    assert tuning_tables._KEY.fullmatch(str(key))


OPS = {module.OP: module._op for module in (all_gather_matmul, matmul_reduce_scatter)}


def planned(op, scales, machine=MACHINE):
    """The plan on GPUs of a call of 8 bits with such scales, as `jflux.tune` makes it."""
    spec = tuner.spec_of(op)
    trial = tuner.trial_of(spec, "tp", E4M3, scales, transpose_rhs=True)
    mesh = tuner.mesh_of(op, make_mesh((2,)))
    specs = trial.partition
    f = jax.shard_map(
        trial.function(), mesh=mesh, in_specs=specs[:2], out_specs=specs[2], check_vma=False
    )
    traced = jax.make_jaxpr(f)(*trial.shapes(1024, 1024, 2048, mesh, E4M3))
    equations = traced.jaxpr.eqns[0].params["jaxpr"].eqns
    (call,) = (one for one in equations if one.primitive.name == f"jflux_{op}")
    arrays, params = [v.aval for v in call.invars], call.params["params"]
    if op == "matmul":
        return matmul._plan(arrays, params)
    return OPS[op].plan(arrays, params, machine)


@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_reduce_scatter", "matmul"])
def test_calls_with_scales(op, own_tables, monkeypatch):
    """Keys tell scales apart that kernels do. A choice under a key reaches such calls alone, and
    is fitted to the scales."""
    with monkeypatch.context() as patch:
        patch.setattr(tuning_tables, "lookup", lambda key, gpu: Choice(224, 2, 4))
        keys, tiles = zip(
            *((p.key, p.config["tile_n"]) for p in map(planned, [op] * 3, trials.SCALES)),
            strict=True,
        )
    tensor, row, block = keys
    formats = ".".join([E4M3.name] * 2 + ["bfloat16"])
    ranks = 1 if op == "matmul" else 2
    n, k = {"all_gather_matmul": (512, 2048), "matmul_reduce_scatter": (1024, 1024)}.get(
        op, (1024, 2048)
    )
    assert tensor == row == Key(op, ranks, 1024, n, k, formats, True, "of_sums")
    assert block == dataclasses.replace(row, scales="of_blocks")
    assert tiles == (224, 224, 192)  # there is no room for sums of blocks
    path = tuning_tables.user_path(GPU)
    tuning_tables.store(path, {str(row): [128, 1, 4, 1], str(block): DECOMPOSED})
    assert len(tuning_tables.load(path)) == 2
    assert tuning_tables.lookup(row, GPU) == Choice(128, 1, 4)
    assert tuning_tables.lookup(block, GPU) == DECOMPOSED
    assert tuning_tables.lookup(dataclasses.replace(row, scales=""), GPU) is None
    for key in (row, block):
        found = tuner.candidates(key, MACHINE)
        compiled = {c.tile_n for c in tuning_tables.compiled()}
        fits = {128, 160, 192} | ({256} if op != "matmul_reduce_scatter" else set())  # for gates
        assert {c.tile_n for c in found} == {c for c in compiled if key == row or c in fits}
        assert len(set(found)) == len(found) and (ranks > 1 or all(c.group_m for c in found))
    monkeypatch.setattr(tuning_tables, "lookup", lambda key, gpu: Choice(100, 1, 1))
    with pytest.raises(ValueError, match="no kernel takes the configuration"):
        planned(op, "row")


@pytest.mark.parametrize("op", ["matmul_reduce_scatter", "matmul"])
def test_calls_with_scales_take_what_was_fastest(op, own_tables, monkeypatch):
    kind = jax.devices()[0].device_kind
    machine = dataclasses.replace(MACHINE, device_kind=kind)
    monkeypatch.setattr(tuner._heap, "_cuda_usable", lambda: True)
    monkeypatch.setattr(tuner._heap, "kernel_arch", lambda: gpu_code.HOPPER)
    monkeypatch.setattr(gpu_code, "gpu_here", lambda: kind)
    monkeypatch.setattr(tuner.plans, "machine_of", lambda *_: machine)
    monkeypatch.setattr(tuner, "plan_of", lambda trial, *_: planned(op, trial.scales))
    tried = []

    def measure(trial, choices, **_):
        tried.extend(choices)
        return {choice: 2.0 if choice != choices[-2] else 1.0 for choice in choices}

    monkeypatch.setattr(tuner, "measure", measure)
    before = [planned(op, scales, machine).choice.tolist() for scales in trials.SCALES]
    result = jflux.tune(
        op, m=1024, n=1024, k=2048, mesh=make_mesh((2,)), dtype=E4M3, scales="row", save=False
    )
    assert tried[-1] == DECOMPOSED and result.best == tried[-2]
    after = [planned(op, scales, machine).choice.tolist() for scales in trials.SCALES]
    assert after == [tuning_tables.as_json(result.best)] * 2 + before[2:] != before


def test_candidates():
    compiled = {(c.tile_n, c.cluster_m) for c in tuning_tables.compiled()}
    for rows in (64, 512, 8192):
        key = dataclasses.replace(KEY, rows=rows)
        found = tuner.candidates(key, MACHINE)
        assert found[0] == heuristic(key)
        assert len(set(found)) == len(found)
        assert {(c.tile_n, c.cluster_m) for c in found} <= compiled
        if rows > 128:
            assert {(c.tile_n, c.cluster_m) for c in found} == compiled
        assert all(c.group_m <= 1 or c.group_m * c.cluster_m * 128 < 2 * rows for c in found)
        assert any(c.group_m == 0 for c in found) == (128 < rows <= 4096)


def test_pick():
    a, b = Choice(192, 2, 8), Choice(128, 1, 16)
    assert tuner.pick({a: 2.0, b: 1.0, DECOMPOSED: 3.0}) == b
    assert tuner.pick({a: 2.0, b: 1.0, DECOMPOSED: 0.9}) == DECOMPOSED
    assert tuner.pick({a: 2.0, b: 1.0, DECOMPOSED: 1.0}) == b
    # The first is the heuristic's, and is kept where the fastest gains too little.
    assert tuner.pick({a: 1.0, b: 0.995, DECOMPOSED: 3.0}, 0.01) == a
    assert tuner.pick({a: 1.0, b: 0.98, DECOMPOSED: 0.995}, 0.01) == b
    assert tuner.pick({a: 1.0, b: 0.995, DECOMPOSED: 3.0}) == b


def test_slow_links_make_raster_groups_shorter():
    usual, slow_links = heuristic(KEY), dataclasses.replace(MACHINE, link_gbps=50)
    for gbps in (390, 270):
        assert heuristic(KEY, dataclasses.replace(MACHINE, link_gbps=gbps)) == usual
    slow = heuristic(KEY, slow_links)
    assert 0 < slow.group_m < usual.group_m
    assert tuner.candidates(KEY, slow_links)[0] == slow


def test_tables(own_tables, monkeypatch):
    """The user's before the shipped one, and both kept apart by GPU."""
    monkeypatch.setattr(tuning_tables, "shipped_table", lambda gpu: {str(KEY): [128, 1, 4, 1]})
    assert tuning_tables.lookup(KEY, GPU) == Choice(128, 1, 4)
    tuning_tables.remember(GPU, {str(KEY): [192, 2, 3, 1]})
    assert tuning_tables.lookup(KEY, GPU) == Choice(192, 2, 3)
    assert tuning_tables.lookup(KEY, "another GPU") == Choice(128, 1, 4)
    tuning_tables.remember(GPU, {str(KEY): DECOMPOSED})
    assert tuning_tables.lookup(KEY, GPU) == DECOMPOSED
    with tuning_tables.force(Choice(192, 2, 1)):
        assert tuning_tables.lookup(KEY, GPU) == Choice(192, 2, 1)
    assert tuning_tables.lookup(dataclasses.replace(KEY, rows=64), GPU) is None


def entry(rows):
    return str(dataclasses.replace(KEY, rows=rows))


def test_files(own_tables):
    path = tuning_tables.user_path(GPU)
    assert path == own_tables / "tuning-nvidia_h200.json"
    assert tuning_tables.load(path) == {}
    tuning_tables.store(path, {entry(1): [256, 2, 8, 1]})
    tuning_tables.store(path, {entry(2): DECOMPOSED})
    assert tuning_tables.load(path) == {entry(1): [256, 2, 8, 1], entry(2): DECOMPOSED}
    assert json.loads(path.read_text())["kernels"] == tuning_tables.KERNELS


# ---- Tables that are wrong: each part is ignored, with one line in the log -----------------------


@pytest.fixture
def logged(caplog, monkeypatch):
    """A function -> the lines that were logged."""
    monkeypatch.setattr(_config, "_said", set())
    caplog.set_level(logging.WARNING, logger="jflux")
    return lambda: [record.getMessage() for record in caplog.records]


def table(**changes):
    return {**tuning_tables._writer(), "choices": {str(KEY): [192, 2, 8, 1]}} | changes


@pytest.mark.parametrize(
    "text, line, why",
    [
        ("{", 1, "it is not JSON"),
        ('{\n "kernels": 1\n "tiles": 2}', 3, "it is not JSON"),
        (json.dumps(table(choices=[])), 1, "it has no `choices`"),
        ("[]", 1, "it has no `choices`"),
        (json.dumps(table(kernels=0)), 1, "it was measured with other kernels (kernels 0)"),
        (json.dumps(table(tiles="192/2")), 1, "it was measured with other kernels (tiles '192/2')"),
        ('{"choices": {}}', 1, "it was measured with other kernels (kernels None, tiles None)"),
    ],
)
def test_a_table_that_cannot_be_used(own_tables, logged, text, line, why):
    path = tuning_tables.user_path(GPU)
    path.write_text(text)
    for _ in range(2):
        assert tuning_tables.load(path) == {} and tuning_tables.lookup(KEY, GPU) is None
    (message,) = logged()
    assert message.startswith(f"tuning table {path}, line {line}: ignored, since {why}")
    assert message.endswith("run jflux.tune again, or delete it")


@pytest.mark.parametrize("content", [b"\xff\xfe", None], ids=["no text", "a folder"])
def test_a_table_that_cannot_be_read(own_tables, logged, content):
    path = tuning_tables.user_path(GPU)
    path.mkdir() if content is None else path.write_bytes(content)
    assert tuning_tables.load(path) == {}
    (message,) = logged()
    why = "it is no file" if content is None else "it cannot be read"
    assert message.startswith(f"tuning table {path}, line 1: ignored, since {why}")


@pytest.mark.parametrize(
    "key, wrong, why",
    [
        (entry(2).replace("all_gather_matmul", "no_such_op"), DECOMPOSED,
         "'no_such_op' is not an op of this version"),
        ("all_gather_matmul", DECOMPOSED, "'all_gather_matmul' names no call"),
        (entry(2) + " ", DECOMPOSED, "names no call"),
        *((entry(2), wrong, "is neither four numbers nor 'decomposed'") for wrong in (
            "lax", None, 128, True, {}, [], [192, 2, 8], [128, 1, 1, 1, 1], [128, 1, 1, "1"],
            [128, True, 1, 1], [128.0, 1, 1, 1],
                [128, 1, -1, 1],
        )),
        *((entry(2), wrong, "no kernel has the configuration") for wrong in (
            [100, 1, 1, 1], [256, 1, 1, 1], [128, 1, 4097, 1], [128, 1, 1, 3],
            [128, 2, 1, 2], [192, 1, 1, 2],
        )),
    ],
)  # fmt: skip
def test_an_entry_that_cannot_be_used(own_tables, logged, key, wrong, why):
    """The others stay. The line is that of the entry in the file."""
    good = {str(KEY): [192, 2, 8, 1], entry(1): [128, 1, 0, 4], entry(3): DECOMPOSED}
    path = tuning_tables.user_path(GPU)
    path.write_text(
        json.dumps({**tuning_tables._writer(), "choices": {**good, key: wrong}}, indent=1)
    )
    number = next(
        i for i, line in enumerate(path.read_text().splitlines(), 1) if f'"{key}"' in line
    )
    assert tuning_tables.load(path) == good and tuning_tables.lookup(KEY, GPU) == Choice(192, 2, 8)
    (message,) = logged()
    assert message.startswith(f"tuning table {path}, line {number}: ignored, since ")
    assert why in message
    tuning_tables.store(path, {entry(4): DECOMPOSED})
    assert tuning_tables.load(path) == {**good, entry(4): DECOMPOSED} and len(logged()) == 1


def test_a_lowering_with_a_wrong_table_takes_the_heuristic(own_tables, logged, monkeypatch):
    """No exception reaches the call: the table is read while it is planned."""
    tuning_tables.user_path(GPU).write_text("{")
    params = all_gather_matmul.Params(("tp",), 4, 0, ("y",), False, np.dtype(jnp.bfloat16))
    arrays = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((2048, 12288), (12288, 12288))]
    machine = dataclasses.replace(MACHINE, device_kind=GPU)
    monkeypatch.setattr(tuning_tables, "shipped_table", lambda gpu: {})
    with jflux.config(always=False):
        plan = all_gather_matmul._op.plan(arrays, params, machine)
    assert "configuration of the heuristic" in plan.reason and plan.key == KEY
    assert len(logged()) == 1


def test_shipped_tables_are_of_compiled_configurations():
    from pathlib import Path

    for path in Path(tuning_tables.__file__).parent.glob("tables/*.json"):
        choices = json.loads(path.read_text())["choices"]
        assert tuning_tables.shipped_table(path.stem) == choices != {}


@pytest.fixture
def measured(monkeypatch):
    """A function (times by choice, options) -> what `tuner.measure` gives, the rounds in which
    each choice was timed, and the progress. What is compiled says which choice was forced."""
    monkeypatch.setattr(trials, "iterations_for", lambda *_: 2)

    def run(times, **options):
        rounds, seen, compiled, compiling = collections.Counter(), [], [], []

        def compile_(*_, **__):
            choice = _config.config.current().configuration
            compiling.append(choice)
            time.sleep(0.01)
            assert choice != DECOMPOSED or compiling == [DECOMPOSED]
            compiling.remove(choice)
            compiled.append((choice, _config.config.current().always))
            return choice

        def interleave(runs, iterations, count, step):
            found = {}
            for name, choice in runs.items():
                for _ in range(1 + count):
                    step()
                rounds[choice] += count
                found[name] = trials.Timing(times[choice], 0, 0)
            return found

        monkeypatch.setattr(trials, "compiled", compile_)
        monkeypatch.setattr(trials, "run_of", lambda program, *_: program)
        monkeypatch.setattr(trials, "interleave", interleave)
        trial = trials.Trial(all_ops()["all_gather_matmul"])
        seconds = tuner.measure(
            trial, list(times), m=256 * RANKS, n=256 * RANKS, k=64, mesh=make_mesh((RANKS,)),
            progress=lambda *step: seen.append(step), **options,
        )  # fmt: skip
        return seconds, rounds, seen, compiled

    return run


TIMES = {Choice(192, 2, 8): 2.0, Choice(128, 1, 16): 1.0, Choice(128, 2, 4): 1.05, DECOMPOSED: 3.0}


def test_what_is_clearly_slower_is_not_timed_again(measured):
    seconds, rounds, seen, _ = measured(TIMES, rounds=5)
    assert seconds == TIMES and list(seconds) == list(TIMES)
    slow, best, near, decomposed = TIMES
    assert (rounds[slow], rounds[decomposed]) == (2, 2)
    assert rounds[best] == rounds[near] == 2 + 2 * 5  # normal numbers, and zeros
    # Compiling each, then each run of it, warming up included.
    total = len(TIMES) * (1 + (1 + 2) + 2 * (1 + 5))
    assert seen[0] == (0, total) and seen[-1] == (total, total)
    assert all(a[0] < b[0] for a, b in itertools.pairwise(seen))
    _, rounds, seen, _ = measured(TIMES, rounds=2)
    total = len(TIMES) * (1 + 2 * (1 + 2))
    assert set(rounds.values()) == {2 * 2} and seen[-1] == (total, total)


@pytest.mark.parametrize("threads", [1, 4])
def test_each_candidate_is_compiled_with_its_own_choice(measured, threads):
    """And the switches of the thread that asks. XLA's product by itself, wherever it stands: XLA
    times the algorithms of its products while it compiles."""
    for always, times in ((False, TIMES), (True, dict(reversed(TIMES.items())))):
        with jflux.config(always=always):
            *_, compiled = measured(times, rounds=1, threads=threads)
        assert {(choice, always) for choice in TIMES} == set(compiled)
        assert len(compiled) == len(TIMES)


def test_measuring_on_what_is_here(monkeypatch):
    monkeypatch.setattr(trials, "iterations_for", lambda *_: 2)
    tried, seen = [Choice(192, 2, 8), Choice(128, 1, 16), DECOMPOSED], []
    trial = trials.Trial(all_ops()["all_gather_matmul"])
    seconds = tuner.measure(
        trial, tried, m=256 * RANKS, n=256 * RANKS, k=64, mesh=make_mesh((RANKS,)), rounds=3,
        threads=2, progress=lambda *step: seen.append(step),
    )  # fmt: skip
    assert list(seconds) == tried and all(s > 0 for s in seconds.values())
    assert seen[-1][0] == seen[-1][1]


@pytest.mark.parametrize("op, scales", [("all_gather_matmul", "row"), ("matmul", "block")])
def test_measuring_operands_with_scales(op, scales, monkeypatch):
    monkeypatch.setattr(trials, "iterations_for", lambda *_: 2)
    tried = [Choice(192, 2, 8), DECOMPOSED]
    trial = tuner.trial_of(tuner.spec_of(op), "tp", E4M3, scales, transpose_rhs=False)
    mesh = tuner.mesh_of(op, make_mesh((RANKS,)))
    sizes = {"m": 16 * RANKS, "n": 16 * RANKS, "k": 256}
    with jflux.config(strict=False):  # CPUs have few kernels for 8 bits
        seconds = tuner.measure(trial, tried, **sizes, mesh=mesh, dtype=E4M3, rounds=1)
    assert list(seconds) == tried and all(s > 0 for s in seconds.values())
    x, w = trial.operands(**sizes, mesh=mesh, dtype=E4M3)
    linked = trials.with_corner(x, jnp.full((4, 4), 3, jnp.bfloat16))
    assert (x.dtype, w.shape, float(linked.values[0, 0])) == (E4M3, (sizes["n"], 256), 3)
    assert np.array_equal(linked.scale, x.scale)  # which only comes later


def test_wrong_arguments():
    tuned = ", ".join([*(name for name, spec in all_ops().items() if spec.tuned), "matmul"])
    with pytest.raises(ValueError, match=f"op='all_gather' must be one of {tuned}$"):
        jflux.tune("all_gather", m=8, n=8, k=8)
    for options in ({"scales": "row"}, {"scales": "column", "dtype": E4M3}):
        with pytest.raises(ValueError, match="must be one of tensor, row, block, of operands of 8"):
            jflux.tune("all_gather_matmul", m=8, n=8, k=8, **options)
    if PLATFORM == "cpu":
        with pytest.raises(RuntimeError, match="kernels for GPUs, and there is no GPU"):
            jflux.tune("all_gather_matmul", m=8, n=8, k=8)


def _command(*args):
    return subprocess.run(
        [sys.executable, "-m", "jflux.tune", *args],
        env=environment(PLATFORM, RANKS), timeout=120, text=True, capture_output=True,
    )  # fmt: skip


def test_command_says_what_is_wrong():
    done = _command("all_gather_matmul:1024,2048")
    assert done.returncode == 2 and "is not OP:M,N,K" in done.stderr
    if PLATFORM == "cpu":
        done = _command("all_gather_matmul:1024,2048,512")
        assert done.returncode == 1 and "there is no GPU" in done.stderr


@pytest.mark.gpu
def test_all_reduce(own_tables):
    """What is chosen is what a call takes; a small one has nothing to choose."""
    m, n, k = 512 * RANKS, 4096, 512 * RANKS
    result = jflux.tune("matmul_all_reduce", m=m, n=n, k=k, rounds=3)
    x, w = (
        jax.ShapeDtypeStruct((RANKS, *shape), jnp.bfloat16)
        for shape in ((m, k // RANKS), (k // RANKS, n))
    )
    f = functools.partial(jflux.matmul_all_reduce, axis_name="tp")
    with jflux.config(always=False):
        text = jax.jit(per_device(make_mesh((RANKS,)), f)).lower(x, w).as_text()
    if result.best == DECOMPOSED:
        assert "jflux_matmul_all_reduce" not in text
    else:
        numbers = ", ".join(map(str, tuning_tables.as_json(result.best)))
        assert "jflux_matmul_all_reduce" in text and f"choice = dense<[{numbers}]>" in text
    if RANKS == 2:  # few rows, whose kernel's CTAs may share k
        few = jflux.tune("matmul_all_reduce", m=64, n=8192, k=2048, rounds=3)
        assert {c.splits for c in few.seconds if c != DECOMPOSED} == {1, 2}
    with pytest.raises(ValueError, match="has no kernel: y has .* a product and an all_reduce"):
        jflux.tune("matmul_all_reduce", m=16, n=n, k=k)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "op", [op for op in PRODUCTS if of_way(op).collective.kind != "all_reduce"]
)
def test_tuned_calls_take_what_was_fastest(op, own_tables):
    m, n, k = 256 * RANKS, 512 * RANKS, 512 * RANKS
    seen = []
    result = jflux.tune(
        op, m=m, n=n, k=k, rounds=3, progress=lambda done, total: seen.append((done, total))
    )
    assert seen[0][0] == 0 and seen[-1][0] == seen[-1][1] > len(result.seconds)
    assert result.seconds[result.best] == min(result.seconds.values())
    stored = tuning_tables.load(tuning_tables.user_path(jax.devices()[0].device_kind))
    assert stored == {str(result.key): tuning_tables.as_json(result.best)}
    # A call of these sizes takes it, another one does not.
    mesh = make_mesh((RANKS,))
    trial = trials.Trial(all_ops()[op])
    sharded = jax.shard_map(
        trial.function(), mesh=mesh, in_specs=trial.partition[:2], out_specs=trial.partition[2],
        check_vma=False,
    )  # fmt: skip
    x, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((m, k), (k, n)))
    with jflux.config(always=False):
        text = compiled_text(sharded, x, w)
    assert (op in fused_calls(text)) == (result.best != DECOMPOSED)
    if result.best != DECOMPOSED:
        numbers = ", ".join(map(str, tuning_tables.as_json(result.best)))
        assert f"choice = dense<[{numbers}]>" in text


@pytest.mark.gpu
@pytest.mark.parametrize("scales", ["row", "block"])
@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_reduce_scatter", "matmul"])
def test_tuned_calls_with_scales(op, scales, own_tables):
    m = n = k = 512 * RANKS
    result = jflux.tune(op, m=m, n=n, k=k, dtype=E4M3, scales=scales, rounds=3)
    assert result.key.scales == {"row": "of_sums", "block": "of_blocks"}[scales]
    assert len(result.seconds) > 3 and all(s > 0 for s in result.seconds.values())
    stored = tuning_tables.load(tuning_tables.user_path(jax.devices()[0].device_kind))
    assert stored == {str(result.key): tuning_tables.as_json(result.best)}
    mesh = tuner.mesh_of(op, make_mesh((RANKS,)))
    trial = tuner.trial_of(tuner.spec_of(op), "tp", E4M3, scales, transpose_rhs=True)
    *in_specs, y_spec = trial.partition
    f = jax.shard_map(
        trial.function(), mesh=mesh, in_specs=tuple(in_specs), out_specs=y_spec, check_vma=False
    )
    with jflux.config(always=False, strict=False):
        text = jax.jit(f).lower(*trial.shapes(m, n, k, mesh, E4M3)).as_text()
    numbers = ", ".join(map(str, tuning_tables.as_json(result.best)))
    taken = f"@jflux_{op}(" in text and f"choice = dense<[{numbers}]>" in text
    assert taken == (result.best != DECOMPOSED)
