"""jflux.tune and the tables that it writes. Choosing is tested anywhere, measuring on GPUs."""

import functools
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from harness import (
    OPS,
    PLATFORM,
    RANKS,
    Call,
    compiled_text,
    fused_calls,
    make_mesh,
    per_device,
)
from harness import operands as call_operands
from workers.common import environment

import jflux
from jflux import _heap, _jflux, _trial, _tuner, _tuning
from jflux._tuning import APART, Choice

SMS = 132
GPU = "NVIDIA H200"
KEY = _tuner.key_of("all_gather_matmul", 8192, 49152, 12288, 4, jnp.bfloat16, False)


@pytest.fixture
def own_tables(tmp_path, monkeypatch):
    monkeypatch.setenv("JFLUX_TUNING_DIR", str(tmp_path))
    monkeypatch.setattr(_tuning, "_agreed", {})
    return tmp_path


def test_keys_are_of_one_rank():
    assert (KEY.rows, KEY.n, KEY.k) == (8192, 12288, 12288)
    key = _tuner.key_of("matmul_reduce_scatter", 8192, 12288, 49152, 4, jnp.float16, True)
    assert (key.rows, key.n, key.k) == (8192, 12288, 12288)
    assert str(key) == ("matmul_reduce_scatter float16 ranks=4 rows=8192 n=12288 k=12288 w=nk")
    for sizes in ((8191, 49152, 12288), (8192, 49151, 12288)):
        with pytest.raises(ValueError, match="is not a multiple of the 4 ranks"):
            _tuner.key_of("all_gather_matmul", *sizes, 4, jnp.bfloat16, False)


def test_key_of_a_call_is_the_key_of_its_sizes(own_tables, monkeypatch):
    """What the lowering asks for is what tune stores."""
    asked = []

    def lookup(key, gpu):
        asked.append(key)

    monkeypatch.setattr(_tuning, "lookup", lookup)
    monkeypatch.setattr("jflux._ffi.lowers_for_here", lambda mesh: True)
    monkeypatch.setattr("jflux._heap.reserve", lambda *args: None)  # of what is taken instead
    mesh = make_mesh((2,))
    with jflux.config(always=False):
        for op in OPS:
            call = Call(op, lead=(1, 4), k=16, n=24, dtype=jnp.bfloat16)
            f = jax.jit(per_device(mesh, call.bind("tp")))
            f.trace(*call_operands(call, mesh, "tp")).lower(lowering_platforms=("cuda",))
        x, w = (jax.ShapeDtypeStruct((2, *s), jnp.bfloat16) for s in ((256, 16), (16, 8200)))
        f = functools.partial(jflux.matmul_all_reduce, axis_name="tp")
        jax.jit(per_device(mesh, f)).trace(x, w).lower(lowering_platforms=("cuda",))
    assert asked == [
        _tuner.key_of("all_gather_matmul", 8, 48, 16, 2, jnp.bfloat16, False),
        _tuner.key_of("matmul_reduce_scatter", 8, 24, 32, 2, jnp.bfloat16, False),
        _tuner.key_of("matmul_all_to_all", 8, 48, 16, 2, jnp.bfloat16, False),
        _tuner.key_of("matmul_all_reduce", 256, 8200, 32, 2, jnp.bfloat16, False),
    ]


def test_candidates():
    compiled = {(c.tile_n, c.cluster_m) for c in _tuning.compiled()}
    for rows in (64, 512, 8192):
        key = _tuner.key_of("all_gather_matmul", rows, 49152, 12288, 4, jnp.bfloat16, False)
        found = _tuner.candidates(key, SMS)
        assert found[0] == _tuning.heuristic(key, SMS)
        assert len(set(found)) == len(found)
        assert {(c.tile_n, c.cluster_m) for c in found} <= compiled
        if rows > 128:
            assert {(c.tile_n, c.cluster_m) for c in found} == compiled
        assert all(c.group_m <= 1 or c.group_m * c.cluster_m * 128 < 2 * rows for c in found)
        assert any(c.group_m == 0 for c in found) == (128 < rows <= 4096)


def test_pick():
    a, b = Choice(192, 2, 8), Choice(128, 1, 16)
    assert _tuner.pick({a: 2.0, b: 1.0, APART: 3.0}) == b
    assert _tuner.pick({a: 2.0, b: 1.0, APART: 0.9}) == APART
    assert _tuner.pick({a: 2.0, b: 1.0, APART: 1.0}) == b


def test_slow_links_make_sweeps_shorter():
    usual = _tuning.heuristic(KEY, SMS)
    assert _tuning.heuristic(KEY, SMS, 390) == _tuning.heuristic(KEY, SMS, 270) == usual
    slow = _tuning.heuristic(KEY, SMS, 50)
    assert 0 < slow.group_m < usual.group_m
    assert _tuner.candidates(KEY, SMS, 50)[0] == slow


def test_the_slowest_link_counts(monkeypatch):
    links = [(0, 1, 390.0, 102.0, 2.6), (1, 0, 361.0, 110.0, 2.8)]
    monkeypatch.setattr(_heap, "_ensure", lambda platform: None)
    monkeypatch.setattr(_jflux, "cuda_heap_links", lambda: links)
    monkeypatch.setattr(_heap, "_agreed_links", {})
    assert _heap.link_gbps() == 361.0
    links.clear()
    assert _heap.link_gbps() == 361.0  # until there is another heap
    monkeypatch.setattr(_heap, "_agreed_links", {})
    assert _heap.link_gbps() == 0


def test_tables(own_tables, monkeypatch):
    """The user's before the shipped one, and both kept apart by GPU."""
    monkeypatch.setattr(_tuning, "shipped_table", lambda gpu: {str(KEY): [128, 1, 4, 1]})
    assert _tuning.lookup(KEY, GPU) == Choice(128, 1, 4)
    _tuning.remember(GPU, {str(KEY): [192, 2, 3, 1]})
    assert _tuning.lookup(KEY, GPU) == Choice(192, 2, 3)
    assert _tuning.lookup(KEY, "another GPU") == Choice(128, 1, 4)
    _tuning.remember(GPU, {str(KEY): APART})
    assert _tuning.lookup(KEY, GPU) == APART
    with _tuning.force(Choice(192, 2, 1)):
        assert _tuning.lookup(KEY, GPU) == Choice(192, 2, 1)
    other = _tuner.key_of("all_gather_matmul", 64, 49152, 12288, 4, jnp.bfloat16, False)
    assert _tuning.lookup(other, GPU) is None


def test_files(own_tables):
    path = _tuning.user_path(GPU)
    assert path == own_tables / "tuning-nvidia_h200.json"
    assert _tuning.load(path) == {}
    _tuning.store(path, {"a": [256, 2, 8, 1]})
    _tuning.store(path, {"b": APART})
    assert _tuning.load(path) == {"a": [256, 2, 8, 1], "b": APART}
    content = json.loads(path.read_text())
    assert content["jflux"] == jflux.__version__
    for other in ({**content, "jflux": "0.0.0"}, {**content, "tiles": "192/2"}, {"choices": {}}):
        path.write_text(json.dumps(other))
        assert _tuning.load(path) == {}  # other kernels
    for broken in ("{", json.dumps({**content, "choices": []})):
        path.write_text(broken)
        with pytest.raises(ValueError, match=r"nvidia_h200.json is not a tuning table.*delete"):
            _tuning.load(path)


def test_entries_that_no_kernel_takes_are_ignored(own_tables):
    good = {"a": APART, "b": [128, 1, 0, 4], "c": [256, 2, 4096, 1], str(KEY): [192, 2, 8, 1]}
    bad = [
        "lax", None, 128, True, {}, [], [192, 2, 8], [128, 1, 1, 1, 1], [128, 1, 1, "1"],
        [128, True, 1, 1], [128.0, 1, 1, 1], [100, 1, 1, 1], [256, 1, 1, 1], [128, 1, -1, 1],
        [128, 1, 4097, 1], [128, 1, 1, 3], [128, 2, 1, 2], [192, 1, 1, 2],
    ]  # fmt: skip
    path = _tuning.user_path(GPU)
    _tuning.store(path, {**good, **{f"bad {i}": entry for i, entry in enumerate(bad)}})
    said = rf"nvidia_h200.json: {len(bad)} of {len(good) + len(bad)} entries .*run jflux.tune again"
    with pytest.warns(UserWarning, match=said) as warned:
        assert _tuning.load(path) == good
        assert _tuning.lookup(KEY, GPU) == Choice(192, 2, 8)
    assert len({str(w.message) for w in warned}) == 1
    with pytest.warns(UserWarning, match=said):
        _tuning.store(path, {"d": APART})
    assert _tuning.load(path) == {**good, "d": APART}  # and no warning


def test_shipped_tables_are_of_compiled_configurations():
    from pathlib import Path

    for path in Path(_tuning.__file__).parent.glob("tables/*.json"):
        choices = json.loads(path.read_text())["choices"]
        assert _tuning.shipped_table(path.stem) == choices != {}


def test_progress_is_of_all_that_takes_time(monkeypatch):
    """Compiling each candidate, then each run of it, on both kinds of operands."""
    monkeypatch.setattr(_trial, "iterations_for", lambda *_: 2)
    tried, rounds, seen = [Choice(192, 2, 8), Choice(128, 1, 16), APART], 3, []
    seconds = _tuner.measure(
        "all_gather_matmul", tried, m=256 * RANKS, n=256 * RANKS, k=64, mesh=make_mesh((RANKS,)),
        axis_name="tp", rounds=rounds, progress=lambda *step: seen.append(step),
    )  # fmt: skip
    assert list(seconds) == tried
    total = len(tried) * (1 + 2 * (1 + rounds))
    assert seen == [(done, total) for done in range(total + 1)]


def test_wrong_arguments():
    with pytest.raises(
        ValueError, match="must be one of all_gather_matmul, matmul_reduce_scatter, "
    ):
        jflux.tune("all_gather", m=8, n=8, k=8)
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
    if result.best == APART:
        assert "jflux_matmul_all_reduce" not in text
    else:
        numbers = ", ".join(map(str, _tuning.as_json(result.best)))
        assert "jflux_matmul_all_reduce" in text and f"choice = dense<[{numbers}]>" in text
    if RANKS == 2:  # few rows, whose kernel's CTAs may share k
        few = jflux.tune("matmul_all_reduce", m=64, n=8192, k=2048, rounds=3)
        assert {c.splits for c in few.seconds if c != APART} == {1, 2}
    with pytest.raises(ValueError, match="is a product and an all_reduce"):
        jflux.tune("matmul_all_reduce", m=16, n=n, k=k)


@pytest.mark.gpu
@pytest.mark.parametrize("op", OPS)
def test_tuned_calls_take_what_was_fastest(op, own_tables):
    m, n, k = 256 * RANKS, 512 * RANKS, 512 * RANKS
    seen = []
    result = jflux.tune(
        op, m=m, n=n, k=k, rounds=3, progress=lambda done, total: seen.append((done, total))
    )
    assert seen[0][0] == 0 and seen[-1][0] == seen[-1][1] > len(result.seconds)
    assert result.seconds[result.best] == min(result.seconds.values())
    stored = _tuning.load(_tuning.user_path(jax.devices()[0].device_kind))
    assert stored == {str(result.key): _tuning.as_json(result.best)}
    # A call of these sizes takes it, another one does not.
    mesh = make_mesh((RANKS,))
    by_k = op == "matmul_reduce_scatter"
    per_rank = {"k": k // RANKS, "n": n} if by_k else {"k": k, "n": n // RANKS}
    call = Call(op, lead=(m // RANKS,), dtype=jnp.bfloat16, **per_rank)
    x, w = call_operands(call, mesh, "tp")
    with jflux.config(always=False):
        text = compiled_text(per_device(mesh, call.bind("tp")), x, w)
    assert (op in fused_calls(text)) == (result.best != APART)
    if result.best != APART:
        numbers = ", ".join(map(str, _tuning.as_json(result.best)))
        assert f"choice = dense<[{numbers}]>" in text
