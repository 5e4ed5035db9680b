"""Plans are pure functions of (call, machine, tuned entry): what GPUs would do, without one."""

import dataclasses
import logging
import pathlib
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import PLATFORM, each_call, make_mesh

import jflux
from jflux import _config, _native
from jflux._call import plans, tuning_tables
from jflux._call.plans import Machine, Path
from jflux._call.tuning_tables import DECOMPOSED, Choice
from jflux._ops.attention import all_gather_attention, decode_merge
from jflux._ops.collectives import all_reduce, exchange
from jflux._ops.experts import (
    _dispatch_primitives,
    all_gather_grouped_matmul,
    grouped_matmul_reduce_scatter,
)
from jflux._ops.products import (
    _product,
    _product_plan,
    all_gather_matmul,
    matmul_all_reduce,
    matmul_all_to_all,
    matmul_reduce_scatter,
)
from jflux._stress.calls import Call, operands, per_device

GPU = Machine("cuda", sm_count=132, link_gbps=320.0, heap_bytes=2 << 30)
SLOW = dataclasses.replace(GPU, link_gbps=40.0)
CPU = Machine("cpu")
SMALL_HEAP = dataclasses.replace(GPU, heap_bytes=64 << 20)
TWO, FOUR = 2, 4


@pytest.fixture(autouse=True)
def as_users_have_it():
    """Without the suite's `always`, which takes kernels for every call."""
    with _config.override(always=False):
        yield


def _array(shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def gather(rows, n, k, ranks=TWO, dtype=jnp.bfloat16, **changes):
    """The types and parameters of a call whose ranks have so many rows in all, and n columns."""
    out = np.dtype(changes.pop("out", dtype))
    params = all_gather_matmul.Params(("tp",), ranks, 0, ("y",), False, out, **changes)
    return (
        all_gather_matmul._op.plan,
        [_array((rows // ranks, k), dtype), _array((k, n), dtype)],
        params,
    )


def scatter(rows, n, k, ranks=TWO, dtype=jnp.bfloat16, **changes):
    params = matmul_reduce_scatter.Params(("tp",), ranks, 0, False, np.dtype(dtype), **changes)
    return matmul_reduce_scatter._op.plan, [_array((rows, k), dtype), _array((k, n), dtype)], params


def columns(rows, n, k, ranks=TWO, dtype=jnp.bfloat16, **changes):
    """matmul_all_to_all of so many rows of a rank."""
    out = np.dtype(changes.pop("out", dtype))
    params = matmul_all_to_all.Params(("tp",), ranks, 1, 0, False, out, **changes)
    return matmul_all_to_all._op.plan, [_array((rows, k), dtype), _array((k, n), dtype)], params


def summed(rows, n, k, ranks=TWO, dtype=jnp.bfloat16, **changes):
    """matmul_all_reduce."""
    sums = all_reduce.Params(("tp",), ranks, None)
    params = matmul_all_reduce.Params(sums, False, np.dtype(dtype), None, **changes)
    return matmul_all_reduce._op.plan, [_array((rows, k), dtype), _array((k, n), dtype)], params


def reduced(elements, ranks=TWO, dtype=jnp.bfloat16, algorithm=None):
    params = all_reduce.Params(("tp",), ranks, algorithm)
    return all_reduce._op.plan, [_array((elements,), dtype)], params


def gathered(elements, ranks=TWO, dtype=jnp.bfloat16):
    params = exchange.Params(("tp",), ranks, None, 0)
    return (
        exchange._ops["all_gather"].plan,
        [_array((elements,), dtype)],
        params,
    )


def plan_of(call, machine=GPU, tuned=None):
    plan, arrays, params = call
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning_tables, "lookup", lambda key, gpu: tuned)
        return plan(arrays, params, machine)


FUSED, LAX = Path.FUSED, Path.REFERENCE  # DECOMPOSED is Path's too
F32 = np.float32
BF16 = np.dtype(jnp.bfloat16)


@pytest.mark.parametrize(
    "call, machine, tuned, path, reason",
    [
        # Products: the heuristic's rows, and what padding costs.
        (gather(8192, 24576, 12288), GPU, None, FUSED, "configuration of the heuristic"),
        (gather(32, 24576, 12288), GPU, None, DECOMPOSED, "32 rows are fewer than 64"),
        (gather(256, 24576, 12288), GPU, None, DECOMPOSED, "256 rows: from 129 to 511"),
        (scatter(256, 12288, 24576), GPU, None, FUSED, "configuration of the heuristic"),
        (scatter(256, 12288, 24576, FOUR), GPU, None, FUSED, "configuration of the heuristic"),
        (scatter(300, 12288, 24576, FOUR), GPU, None, DECOMPOSED, "300 rows: from 129 to 511"),
        (scatter(28, 4104, 5520, FOUR), GPU, None, FUSED, "configuration of the heuristic"),
        (gather(2052, 24576, 12288), GPU, None, DECOMPOSED, "252 rows of padding in tiles of 256"),
        (gather(2052, 24576, 12288), SLOW, None, FUSED, "heuristic"),  # more to hide
        (gather(1332, 5520, 4104, FOUR), GPU, None, DECOMPOSED, "204 rows of padding"),
        (gather(1332, 5501, 4099, FOUR), GPU, None, FUSED, "heuristic"),  # XLA's takes 4 times G
        (scatter(2052, 24576, 49152), GPU, None, DECOMPOSED, "252 rows of padding"),
        (scatter(2052, 24575, 49151), GPU, None, FUSED, "heuristic"),
        (scatter(8192, 12288, 24576), GPU, None, FUSED, "configuration of the heuristic"),
        (scatter(32, 12288, 24576), GPU, None, DECOMPOSED, "32 rows are fewer than 64"),
        (columns(2048, 1024, 4096), GPU, None, FUSED, "configuration of the heuristic"),
        (columns(256, 1024, 4096), GPU, None, DECOMPOSED, "256 rows, fewer than 512"),
        (columns(2048, 144, 4096), GPU, None, DECOMPOSED, "2048 x 72 in whole tiles of 128 x 128"),
        # A tuned entry comes before the heuristic.
        (gather(32, 24576, 12288), GPU, Choice(192, 2, 8), FUSED, "tuning table for this GPU"),
        (gather(8192, 24576, 12288), GPU, DECOMPOSED, DECOMPOSED, "in a tuning table"),
        (columns(256, 1024, 4096), GPU, Choice(128, 1, 4), FUSED, "tuning table"),
        # Sums for all: by size, by rows of a rank, and by room in the heap.
        (summed(512, 1024, 256, FOUR), GPU, None, DECOMPOSED, "y has 1048576 bytes; up to 4194304"),
        (summed(4096, 8192, 1024, FOUR), GPU, None, FUSED, "configuration of the heuristic"),
        (summed(4098, 8192, 1024, FOUR), GPU, None, DECOMPOSED, "4 ranks do not divide 4098 rows"),
        (summed(4100, 8192, 1024, FOUR), GPU, None, DECOMPOSED, "of a rank are no whole tiles"),
        (summed(4096, 8192, 1024, FOUR), SMALL_HEAP, None, DECOMPOSED,
         "of a heap of 67108864, more than half"),
        # Collectives: packets, chunks, and lax.
        (gathered(1000), GPU, None, FUSED, "4000 bytes reach a rank, in LL packets"),
        (gathered(1 << 20), GPU, None, FUSED, "in chunks that signals announce"),
        (gathered(1 << 26), GPU, None, LAX, "bytes reach a rank, for which lax is faster"),
        (gathered(1 << 24), SMALL_HEAP, None, LAX, "a third"),
        (reduced(4096), GPU, None, FUSED, "one_shot, chosen for 8192 bytes"),
        (reduced(4096, algorithm="two_shot"), GPU, None, FUSED, "two_shot, as asked for"),
        (reduced(1 << 25), GPU, None, LAX, "67108864 bytes, for which lax.psum is faster"),
        (reduced(1 << 22), dataclasses.replace(GPU, heap_bytes=1 << 20), None, LAX, "than half"),
        # What no kernel takes, and what CPUs do.
        (gather(8192, 24576, 1024, dtype=F32), GPU, None, LAX, "operands are float32"),
        (gather(8, 16, 16, dtype=F32), CPU, None, FUSED, "CPU back end runs every call"),
        (gather(8, 16, 16), CPU, DECOMPOSED, DECOMPOSED, "in a tuning table"),
    ],
)  # fmt: skip
def test_path_and_reason(call, machine, tuned, path, reason):
    plan = plan_of(call, machine, tuned)
    assert (plan.path, reason in plan.reason) == (path, True), plan
    again = plan_of(call, machine, tuned)
    assert again == plan  # nothing is remembered
    if path == Path.FUSED:
        assert plan.workspace_bytes > 0
        if isinstance(tuned, Choice):
            assert {**dataclasses.asdict(tuned)}.items() <= dict(plan.config).items()
    else:
        assert plan.workspace_bytes == 0


def test_only_unsupported_calls_are_errors_in_strict_mode():
    assert plan_of(gather(8192, 24576, 1024, dtype=F32)).unsupported
    assert not plan_of(gather(8, 24576, 1024, dtype=F32)).unsupported  # few rows: decomposed anyway
    assert plan_of(reduced(64, dtype=np.int32)).unsupported
    assert not plan_of(reduced(1 << 25, dtype=np.int32)).unsupported
    assert not plan_of(gathered(1 << 26)).unsupported
    assert plan_of(gather(1024, 64, 64, ranks=16)).reason.startswith("16 ranks, kernels take up")


def test_slow_links_make_raster_groups_shorter_and_thresholds_higher():
    usual, slow = (plan_of(gather(8192, 12288, 12288, FOUR), m) for m in (GPU, SLOW))
    assert 0 < slow.config["group_m"] < usual.config["group_m"]
    assert SLOW.balanced_columns == 8 * GPU.balanced_columns
    assert dataclasses.replace(GPU, link_gbps=0.0).links == GPU.links == 1.0  # not known: as usual
    assert [dataclasses.replace(GPU, link_gbps=g).links for g in (390, 300, 170, 45)] == [
        1, 1, 0.5, 0.125,
    ]  # fmt: skip


@pytest.mark.parametrize(
    "call",
    [gather(2048, 8192, 1001), scatter(2048, 8190, 1001), columns(2048, 2048, 1001)],
    ids=["gather", "scatter", "columns"],
)
def test_calls_that_are_padded_are_planned_by_the_sizes_that_the_kernel_sees(call):
    plan = plan_of(call)
    assert plan.path == Path.FUSED and plan.key.k == 1024 and plan.key.n % 8 == 0


def test_leading_rows_are_planned_in_rank_order():
    params = matmul_reduce_scatter.Params(("tp",), 2, 1, False, np.dtype(jnp.bfloat16))
    arrays = [_array((64, 48, 1024)), _array((1024, 2048))]
    plan = matmul_reduce_scatter._op.plan(arrays, params, GPU)
    assert plan.path == Path.FUSED and plan.key.rows == 64 * 48


@pytest.fixture
def lowered_for_gpus(lowered_without_gpus):
    """A function (call) -> (the calls that it becomes, its program)."""

    def lower(call):
        mesh = make_mesh((2,))
        return lowered_without_gpus(per_device(mesh, call.bind("tp")), *operands(call, mesh, "tp"))

    return lower


@pytest.mark.parametrize(
    "sizes",
    [
        {"lead": (5,), "k": 16, "n": 24},
        {"lead": (5,), "k": 9, "n": 20},
        {"lead": (3, 40), "k": 16, "n": 24},
        {"lead": (3, 40), "k": 9, "n": 24, "transpose_rhs": True},
        {"lead": (2, 128), "k": 64, "n": 64},
    ],
    ids=str,
)
@each_call(dtype=jnp.bfloat16)
def test_operands_of_any_size_get_into_the_form_that_gpus_take(call, sizes, lowered_for_gpus):
    call = dataclasses.replace(call, **sizes)
    calls, text = lowered_for_gpus(call)
    last = calls[-1].plan
    assert last.path == Path.FUSED and last.workspace_bytes > 0
    if call.op != calls[-1].op:  # decomposed
        assert calls[0].plan.path == DECOMPOSED
        return
    assert len(calls) == 1 and f"@jflux_{call.op}" in text
    assert f"workspace_bytes = {last.workspace_bytes} : i64" in text
    assert "sm_count = 114 : i64" in text
    if sizes["k"] == 9:
        assert _product.PADDED in last.reason or _product.RANK_MAJOR in last.reason
        assert last.key.k * last.key.dtype.itemsize % _product_plan.PADDED_TO == 0
    assert last.config["tile_n"] > 0 and last.key.k % 8 == 0


@pytest.mark.usefixtures("lowered_for_gpus")
def test_grids_of_collectives_go_by_the_smallest_gpu():
    f = jax.jit(per_device(make_mesh((2,)), lambda x: jflux.all_gather(x, axis_name="tp")))
    with _config.override(always=True, strict=True):
        traced = f.trace(jax.ShapeDtypeStruct((2, 64), jnp.bfloat16))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "@jflux_all_gather" in text and "sm_count = 114 : i64" in text


def test_what_must_be_padded_becomes_whole_64_bytes():
    assert [_product_plan.padded(n, BF16) for n in (1, 9, 31, 4099)] == [32, 32, 32, 4128]
    assert [_product_plan.padded(n, BF16) for n in (8, 4104, 8192)] == [8, 4104, 8192]  # no copies
    plan = plan_of(scatter(16364, 4099, 5501, FOUR))
    assert (plan.key.n, plan.key.k) == (4128, 5504)


@pytest.mark.parametrize(
    "call",
    [summed(4096, 8192, 1024, FOUR), gathered(1 << 22), reduced(1 << 22)],
    ids=["matmul_all_reduce", "all_gather", "all_reduce"],
)
def test_a_want_of_room_says_what_gives_more(call):
    assert plan_of(call).path == Path.FUSED
    plan = plan_of(call, dataclasses.replace(GPU, heap_bytes=8 << 20))
    assert plan.path != Path.FUSED and "of a heap of 8388608" in plan.reason
    assert plan.reason.endswith("jflux.init(heap_bytes=...) gives it more")


def test_a_prepared_call_takes_the_kernel_whatever_is_faster():
    plan = plan_of(gather(16, 64, 64, prepared=_product.PADDED), tuned=DECOMPOSED)
    assert plan.path == Path.FUSED and plan.reason.startswith(_product.PADDED)
    with _config.override(always=True):
        plan = plan_of(gather(16, 64, 64))
    assert plan.path == Path.FUSED and plan.reason.startswith("jflux.config(always=True)")


# ---- Links ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind, gbps, said",
    [
        ("NVIDIA H100 80GB HBM3", 94.0, True),
        ("NVIDIA H100 80GB HBM3", 277.0, False),
        ("NVIDIA H200", 0.0, False),  # one GPU
        ("NVIDIA L40S", 25.0, False),  # over PCIe
    ],
)
def test_links_that_seem_slow_are_told_of(monkeypatch, caplog, kind, gbps, said):
    """Once, since every call asks what the machine is."""
    monkeypatch.setattr(_config, "_said", set())
    monkeypatch.setattr(plans.meshes, "belongs_here", lambda mesh: True)
    heap = {"link_gbps": gbps, "sm_count": 132, "kernel_arch": 90, "no_atomics": ""}
    for name, value in heap.items():
        monkeypatch.setattr(plans._heap, name, lambda value=value: value)
    device = types.SimpleNamespace(device_kind=kind, compute_capability="9.0")
    mesh = types.SimpleNamespace(devices=np.array([device]))
    with caplog.at_level(logging.WARNING, logger="jflux"):
        for _ in range(2):
            assert plans.machine_of("cuda", mesh).link_gbps == gbps
    lines = [r.message for r in caplog.records if "slowest link" in r.message]
    assert len(lines) == said
    assert not said or "carried 94 GB/s" in lines[0] and "jflux.doctor" in lines[0]


# ---- With two, four and eight GPUs ---------------------------------------------------------------


def _first(holds, start=1):
    """The first power of two from which on it holds; None: it never does."""
    sizes = [start << i for i in range(28)]
    beyond = [size for size in sizes if not holds(size)]
    return next((s for s in sizes if not beyond or s > beyond[-1]), None)


def _bytes(n):
    return "never" if n is None else f"{n >> 20} MiB" if n >= 1 << 20 else f"{n >> 10} KiB"


def _rows_by_ranks():
    """The rows of the table in docs/guide/dispatch.md, by their first words."""

    def sums(ranks, size):
        return plan_of(reduced(size // 2, ranks))

    def gathers(ranks, size):
        return plan_of(gathered(size // 2, ranks))

    def is_sum_by(name, ranks, size):
        plan = sums(ranks, size)
        return plan.path == Path.REFERENCE or (
            all_reduce.ALGORITHMS.index(name) <= plan.config["algorithm"]
        )

    def is_placed(ranks, tokens):
        params = _dispatch_primitives.Params(
            ("ep",), ranks, 256 // ranks, ranks * tokens * 8, -1, 1, 0
        )
        x, indices = _array((tokens, 7168)), _array((tokens, 8), np.int32)
        return (
            _dispatch_primitives._why_not(_dispatch_primitives._call((x, indices), params), x.dtype)
            is None
        )

    def merged_by_owner(ranks, sequences):
        parts = _array((64 * sequences, 129), np.float32)
        params = decode_merge.Params(("cp",), ranks, False, parts.dtype)
        return decode_merge._op.plan([parts], params, GPU).config.get("by_owner") != 0

    def routed(tokens, experts, k):
        return [_array(s, np.int32) for s in ((experts + 1,), (tokens, k), (tokens * k,))]

    def gathered_tokens(ranks, tokens, machine=GPU):
        w = _array((128, 4096, 1536 // ranks))
        arrays = [_array((max(1, tokens // ranks), 4096)), w, w, *routed(tokens, 128, 8)]
        params = all_gather_grouped_matmul.Params(
            ("tp",), ranks, False, w.dtype, "silu", gated=True
        )
        return all_gather_grouped_matmul._op.plan(arrays, params, machine)

    def is_gathered(ranks, tokens):
        return gathered_tokens(ranks, tokens).path == Path.FUSED

    def has_own_tokens_first(ranks, tokens):
        large = dataclasses.replace(GPU, heap_bytes=4 << 30)
        return gathered_tokens(ranks, tokens, large).config.get("parts", 0) > 0

    def is_scattered(ranks, tokens):
        h, w = _array((2 * tokens, 14336 // ranks)), _array((8, 14336 // ranks, 4096))
        arrays = [h, w, _array((tokens, 2), np.float32), *routed(tokens, 8, 2)]
        params = grouped_matmul_reduce_scatter.Params(("tp",), ranks, False, w.dtype)
        return grouped_matmul_reduce_scatter._op.plan(arrays, params, GPU).path == Path.FUSED

    def least(is_kernel, ranks):
        return next(t for t in (1 << i for i in range(5, 20)) if is_kernel(ranks, t))

    def text(f, form=str):
        return [form(f(ranks)) for ranks in (2, 4, 8)]

    return {
        "`all_reduce`: two_shot": [
            "never" if first is None or sums(r, first).config["algorithm"] != 1 else _bytes(first)
            for r in (2, 4, 8)
            for first in [_first(lambda s, r=r: is_sum_by("two_shot", r, s), 1 << 10)]
        ],
        "`all_reduce`: chunked": text(
            lambda r: _first(lambda s: is_sum_by("chunked", r, s), 1 << 10), _bytes
        ),
        "`all_reduce`: XLA's": text(
            lambda r: _first(lambda s: sums(r, s).path == Path.REFERENCE, 1 << 10), _bytes
        ),
        "`all_gather`: chunks": text(
            lambda r: _first(lambda s: gathers(r, s).config.get("chunked", 1), 1 << 10), _bytes
        ),
        "`all_gather`: XLA's": text(
            lambda r: _first(lambda s: gathers(r, s).path == Path.REFERENCE, 1 << 10), _bytes
        ),
        "`matmul_all_reduce`": text(
            lambda r: next(
                rows
                for rows in (64, 128, 256, 512, 1024, 2048)
                if all(
                    plan_of(summed(m, 8192, 8192, r)).path == Path.FUSED
                    for m in (rows << i for i in range(4))
                )
            )
        ),
        "`moe_dispatch`": text(lambda r: _first(lambda t: not is_placed(r, t))),
        "`moe.all_gather_grouped_matmul`": text(lambda r: least(is_gathered, r)),
        "Its tiles of own tokens first": text(lambda r: least(has_own_tokens_first, r)),
        "`moe.grouped_matmul_reduce_scatter`": text(lambda r: least(is_scattered, r)),
        "`flash_decode`": text(lambda r: _first(lambda b: merged_by_owner(r, b))),
        "`jflux.attention`": text(
            lambda r: _first(lambda s: s // r > all_gather_attention.MOST_POSITIONS_FOR_GRADIENTS)
        ),
    }


def test_the_page_says_what_changes_with_the_number_of_ranks():
    page = (pathlib.Path(__file__).resolve().parents[1] / "docs/guide/dispatch.md").read_text()
    found = {
        cells[1].strip(): [cell.strip() for cell in cells[2:5]]
        for cells in (line.split("|") for line in page.splitlines() if line.count("|") == 5)
    }
    for start, wanted in _rows_by_ranks().items():
        (row,) = (cells for name, cells in found.items() if name.startswith(start))
        assert row == wanted, start


# ---- Numbers that both languages use -------------------------------------------------------------


def test_constants_of_the_native_module():
    """Docs, messages and docstrings have these by number, and so would a kernel that changed."""
    assert (_native.MAX_RANKS, _native.MAX_WEIGHTS) == (8, 4)
    assert (_native.TILE_ROWS, _native.VECTOR_BYTES) == (128, 16)
    assert set(_native.ACTIVATIONS) == {"relu", "silu", "gelu", "gelu_tanh"}
    assert _native.number_of(None, _native.NORMS) == 0
    assert [_native.number_of(n, _native.NORMS) for n in _native.NORMS] == [1, 2]
    assert _native.ALL_REDUCE_ALGORITHMS == all_reduce.ALGORITHMS


def test_formats_of_the_native_module():
    """What an op says of a type follows from the table of formats and from the op's entry."""
    halves, singles = {"float16", "bfloat16"}, {"float32", "float64"}
    eights = {"float8_e4m3fn", "float8_e5m2", "int8"}
    assert set(_native.FORMATS) == halves | singles | eights | {"int32"}
    assert [_native.dtype_number(d) for d in _native.FORMATS] == list(range(8))
    sums = {"float64": "float64", "int8": "int32", "int32": "int32"}
    for name, row in _native.FORMATS.items():
        assert row.bits == 8 * np.dtype(name).itemsize
        assert (row.hopper is not None) == (name in halves | eights)
        assert (row.portable is not None) == (name in halves | eights | {"float32"})
        assert row.accumulator == sums.get(name, "float32")
        assert row.is_wide == (name in halves | singles)
    assert _product.DTYPES["cpu"] == {np.dtype(d) for d in halves | singles}
    assert _product.DTYPES["cuda"] == {np.dtype(d) for d in halves}

    def why_not(*call):
        return _native.why_not_dtypes("grouped_matmul", *call)

    assert why_not("cuda", BF16) is why_not("cuda", BF16, F32) is why_not("cpu", F32) is None
    assert why_not("cuda", BF16, "float16") == (
        "results are float16, the kernels give bfloat16, float32"
    )
    assert why_not("cuda", F32) == "operands are float32, the kernels take float16, bfloat16"
    assert why_not("cpu", "int8").startswith("operands are int8, the kernels take float16, ")
    assert _native.why_not_dtypes("matmul_all_to_all", "cuda", BF16, F32) == (
        "results are float32, the kernels give bfloat16"
    )


def test_few_rows_are_the_same_in_both_languages():
    """The native plan of a sum for all takes the few rows that Python gives it, and not more."""
    fields = {"world": 2, "outer": 1, "k": 64, "n": 12288, "transpose_rhs": 0}
    types = dict.fromkeys(("dtype", "out_dtype"), _native.dtype_number(jnp.bfloat16))
    for rows in (32, 34, 64, 128):
        assert matmul_all_reduce.are_few_rows(rows, 12288, 2)
        call = {**fields, **types, "inner": rows // 2}
        assert GPU.native_plan("matmul_all_reduce", call)["workspace_bytes"] > 0
    assert not matmul_all_reduce.are_few_rows(130, 12288, 2)
    with pytest.raises(ValueError, match="matmul_all_reduce: each rank must have"):
        GPU.native_plan("matmul_all_reduce", {**fields, **types, "inner": 65})


def test_an_op_that_there_is_not():
    with pytest.raises(ValueError, match="no_such_op"):
        _native.plan("no_such_op", {}, 0, 0.0)


@pytest.mark.skipif(PLATFORM != "cpu", reason="is about a machine without GPUs")
def test_lowered_for_a_platform_that_is_not_here(caplog):
    """As `jax.export` does for several platforms: the other one gets the reference."""
    call = Call("all_gather_matmul", lead=(4,), k=8, n=4, dtype=jnp.bfloat16)
    mesh = make_mesh((2,))
    f = jax.jit(per_device(mesh, call.bind("tp")))
    with jflux.config(strict=False):
        traced = f.trace(*operands(call, mesh, "tp"))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "all_gather" in text and "jflux_" not in text
    assert "it is lowered for cuda, and the mesh's devices are cpu devices" in caplog.text


def _taken(op, **call):
    return _native.plan(op, call, GPU.sm_count, GPU.link_gbps)["workspace_bytes"]


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_what_a_call_takes_of_the_heap(ranks):
    """Sums, exchanges and dispatches, as docs/guide/heap.md has them: a power of two from there."""
    size, bf16, tokens, row_bytes = 1 << 20, _native.dtype_number(jnp.bfloat16), 4096, 14336
    large = {"world": ranks, "count": 4 * size, "dtype": bf16, "width": 0}
    small = large | {"count": size // 8}
    one, two, chunked = map(all_reduce.ALGORITHMS.index, ("one_shot", "two_shot", "chunked"))
    moved = {"world": ranks, "tokens": tokens, "slots": 8, "row_bytes": row_bytes, "rows": 1 << 16}
    sent = moved | {"experts": 1, "capacity": -1, "alignment": 1, "stride": 0}
    few = moved | {"tokens": 512, "row_bytes": 4096}
    parts = _native.plan("moe_combine", few, GPU.sm_count, GPU.link_gbps)["parts"]
    assert parts == 4
    for taken, least in (
        (_taken("all_reduce", algorithm=one, **small), 4 * ranks * (size // 4)),
        (_taken("all_reduce", algorithm=two, **small), 8 * (size // 4)),
        (_taken("all_reduce", algorithm=chunked, **large), 4 * (ranks - 1) / ranks * 8 * size),
        (_taken("all_gather", world=ranks, shard_bytes=size // ranks, chunked=0), 4 * size),
        (_taken("all_gather", world=ranks, shard_bytes=size, chunked=1), 2 * (ranks - 1) * size),
        (_taken("moe_combine", **moved), 2 * ranks * tokens * row_bytes),
        (_taken("moe_dispatch", **sent), 2 * ranks * tokens * (row_bytes + 8 * 8)),
        (_taken("moe_combine", **few), ranks * 512 * parts * (8 << 10)),
    ):
        header_and_signals = taken / 512 + (1 << 10)
        assert least <= taken <= 2 * least + header_and_signals
    sums = ("| 2 times x on 2 ranks, 4 times on more |", "one_shot 4 N times x, two_shot 8 times x")
    page = (pathlib.Path(__file__).resolve().parents[1] / "docs/guide/heap.md").read_text()
    assert all(words in page for words in sums)
