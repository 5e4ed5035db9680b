"""jflux.config, and how a call says that it took its reference."""

import logging
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import PLATFORM, PRODUCTS, compiled_text, fused_calls, make_mesh, of_way

import jflux
from jflux import _config
from jflux._call import explain
from jflux._call.plans import Machine, Path
from jflux._ops.products import _product_plan
from jflux._stress.calls import Call, operands, per_device

GPU = Machine("cuda", sm_count=132, link_gbps=320)

# A type that no kernel takes.
CALL = Call("all_gather_matmul", lead=(2,), k=3, n=2, dtype=np.dtype("int32"))


def _lower(call=CALL, ranks=2):
    mesh = make_mesh((ranks,))
    return jax.jit(per_device(mesh, call.bind("tp"))).lower(*operands(call, mesh, "tp"))


def test_strict_raises_with_op_and_reason():
    with pytest.raises(NotImplementedError, match=r"jflux.all_gather_matmul.*int32.*strict"):
        _lower()


def test_it_shows_the_switches_of_the_thread():
    with jflux.config(strict=True, fused=False):
        assert "strict=True" in repr(jflux.config) and "fused=False" in repr(jflux.config)
    assert "fused=True" in repr(jflux.config)


def test_default_logs_each_reason_once(caplog, monkeypatch):
    monkeypatch.setattr(_config, "_said", set())
    with jflux.config(strict=False), caplog.at_level(logging.WARNING, logger="jflux"):
        _lower()
        _lower()
        assert len(caplog.records) == 1
        assert "jflux.all_gather_matmul takes its lax reference: operands are int32" in caplog.text
        _lower(Call("matmul_reduce_scatter", lead=(2,), k=3, n=2, dtype=np.dtype("int32")))
        assert len(caplog.records) == 2
        _lower(Call("all_gather_matmul", lead=(2,), k=3, n=2, dtype=np.dtype("int16")))
        assert len(caplog.records) == 3


def test_nothing_is_said_where_there_is_nothing_to_fuse(caplog):
    """One rank, in strict mode too; and no log from calls that are fused."""
    with caplog.at_level(logging.DEBUG, logger="jflux"):
        _lower(ranks=1)
        _lower(Call("all_gather_matmul", dtype=jnp.bfloat16))
        x = jnp.zeros((2, 4, 4), jnp.bfloat16)
        w = jnp.zeros((2, 4, 4), jnp.bfloat16)
        f = per_device(make_mesh((2,)), Call("all_gather_matmul", dtype=jnp.bfloat16).bind("tp"))
        jax.jit(lambda x, w: jax.vjp(f, x, w)[1](f(x, w))).lower(x, w)
    assert not caplog.records


def test_an_axis_of_vmap_is_a_fallback(caplog, monkeypatch):
    monkeypatch.setattr(_config, "_said", set())
    x = jnp.ones((2, 3, 4), jnp.bfloat16)

    def f(x):
        return jflux.all_gather_matmul(x, jnp.eye(4, dtype=x.dtype), axis_name="i")

    with pytest.raises(NotImplementedError, match=r"axis 'i' is not a mesh's.*strict"):
        jax.vmap(f, axis_name="i")(x)
    with jflux.config(strict=False), caplog.at_level(logging.WARNING, logger="jflux"):
        assert jax.vmap(f, axis_name="i")(x).shape == (2, 6, 4)
    assert "axis 'i' is not a mesh's" in caplog.text


@pytest.mark.parametrize("op", PRODUCTS)
def test_platforms_without_kernels_take_the_reference(op):
    call, mesh = of_way(op, dtype=jnp.bfloat16), make_mesh((2,))
    f = jax.jit(per_device(mesh, call.bind("tp")))
    args = operands(call, mesh, "tp")
    with pytest.raises(NotImplementedError, match="CPUs and CUDA GPUs only"):
        f.trace(*args).lower(lowering_platforms=("tpu",))
    with jflux.config(strict=False):
        text = f.trace(*args).lower(lowering_platforms=("tpu",)).as_text()
    assert "jflux" not in text.replace("jit_jflux", "") and "dot_general" in text


@pytest.mark.parametrize("op", PRODUCTS)
def test_few_rows_are_decomposed_on_gpus(op):
    # Of sizes that need no padding: a call that does stays in one kernel.
    call, mesh = of_way(op, k=256, n=256, dtype=jnp.bfloat16), make_mesh((2,))
    f = jax.jit(per_device(mesh, call.bind("tp")))
    with jflux.config(always=False):
        (first, *_) = explain.explain(f, *operands(call, mesh, "tp"))
    decomposed = PLATFORM == "gpu" or call.collective.kind == "all_reduce"  # of small sums
    assert first.op == op and (first.plan.path == Path.DECOMPOSED) == decomposed


def test_few_rows():
    def slower(m):
        return _product_plan.why_decomposed(m, GPU, fewest=64)

    assert slower(4) and slower(63) and slower(129) and slower(511)
    assert not slower(64) and not slower(128) and not slower(512) and not slower(8193)


def test_a_few_rows_beyond_whole_tiles():
    def slower(m, ranks, width):
        return _product_plan.why_decomposed(m, GPU, fewest=64, ranks=ranks, width=width)

    # As measured: 4 rows that take as long as 256, an eighth of the product.
    assert slower(2052, 2, 24576) and not slower(2048, 2, 24576)
    assert slower(2052, 2, 14336) and slower(1100, 2, 14336) and not slower(666, 2, 5520)
    # The tiles are full, or nearly so; there is more to hide; or too few rows for it to matter.
    assert not slower(4092, 2, 24576) and not slower(996, 2, 24576)
    assert not slower(2052, 4, 12288) and not slower(2052, 2, 4096)
    assert not slower(84, 2, 24576)
    # Whole tiles that are an odd number, which clusters of two do not have to take.
    assert not slower(128 * 9, 3, 24576)


def test_rows_of_more_than_two_ranks_that_share_tiles():
    def slower(m, ranks=4, width=12288, gathers=True):
        return _product_plan.why_decomposed(
            m, GPU, fewest=64, ranks=ranks, width=width, gathers=gathers
        )

    # As measured on four: all tiles wait for all rows.
    assert slower(2052) and slower(1332, width=5520)
    assert not slower(996) and not slower(4092) and not slower(2048)
    assert not slower(666, ranks=2, width=5520) and not slower(2052, gathers=False)


@pytest.mark.parametrize("rows", [1332, 2052])
def test_rows_that_share_tiles_of_operands_that_are_padded(rows):
    """cuBLAS takes 4 times as long where k or n is no multiple of 8; the kernel pads."""

    def slower(n, k):
        x, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((rows // 4, k), (k, n)))
        return _product_plan.why_decomposed(
            rows, GPU, fewest=64, ranks=4, width=n, alignment=_product_plan.alignment([x], [w]),
            gathers=True,
        )  # fmt: skip

    assert slower(5520, 4104) and slower(5520, 4096)
    assert not slower(5501, 4104) and not slower(5520, 4099) and not slower(5501, 4099)


@pytest.mark.parametrize("rows", [2, 14, 28])
def test_few_rows_of_operands_whose_rows_are_odd_units(rows):
    """cuBLAS takes 1.8 times as long as with whole lines, the kernel does not."""

    def slower(n, k):
        x, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((rows, k), (k, n)))
        return _product_plan.why_decomposed(
            rows, GPU, fewest=64, alignment=_product_plan.alignment([x], [w])
        )

    assert not slower(5520, 4104) and not slower(4104, 5520)
    assert slower(8192, 4096) and slower(5520, 4096) and slower(5501, 4099)


@pytest.mark.parametrize("ranks", [3, 4, 8])
def test_rows_in_one_raster_group_are_the_kernel_s(ranks):
    def group_of(rows_per_rank):
        sizes = _product_plan.Sizes(
            "all_gather_matmul", ranks, 1, rows_per_rank, 4096, 4096, np.dtype(jnp.bfloat16),
            np.dtype(jnp.bfloat16), False,
        )  # fmt: skip
        return GPU.native_plan("all_gather_matmul", sizes.native())["group_m"]

    rows = _product_plan.MOST_IN_ONE_GROUP // (ranks - 1)
    assert group_of(rows) == 0 and group_of(rows + 1) > 0


def test_fused_off_takes_the_reference_silently(caplog):
    call, mesh = Call("all_gather_matmul", dtype=jnp.bfloat16), make_mesh((2,))
    f = per_device(mesh, call.bind("tp"))
    args = operands(call, mesh, "tp")
    with jflux.config(fused=False), caplog.at_level(logging.DEBUG, logger="jflux"):
        assert fused_calls(compiled_text(lambda *a: f(*a), *args)) == []
    assert not caplog.records
    assert fused_calls(compiled_text(lambda *a: f(*a), *args)) == ["all_gather_matmul"]


def test_switches_reach_functions_that_are_already_compiled():
    """One jitted function, in and out of other settings: each use is lowered for its own."""
    call, mesh = Call("all_gather_matmul", dtype=jnp.bfloat16), make_mesh((2,))
    args = operands(call, mesh, "tp")
    f = jax.jit(per_device(mesh, call.bind("tp")))

    def ops():
        return fused_calls(f.lower(*args).compile().as_text())

    for _ in range(2):
        assert ops() == ["all_gather_matmul"]
        with jflux.config(fused=False):
            assert ops() == []
    assert ops() == ["all_gather_matmul"]

    g = jax.jit(per_device(mesh, CALL.bind("tp")))
    integers = operands(CALL, mesh, "tp")
    with jflux.config(strict=False):
        jax.block_until_ready(g(*integers))
    with pytest.raises(NotImplementedError, match="strict"):
        g(*integers)


def test_update_reaches_functions_that_are_already_compiled():
    call, mesh = Call("all_gather_matmul", dtype=jnp.bfloat16), make_mesh((2,))
    args = operands(call, mesh, "tp")
    f = jax.jit(per_device(mesh, call.bind("tp")))
    try:
        for fused, want in ((True, ["all_gather_matmul"]), (False, []), (True, [call.op])):
            jflux.config.update(fused=fused)
            jax.block_until_ready(f(*args))
            assert fused_calls(f.lower(*args).compile().as_text()) == want
    finally:
        jflux.config.update(fused=True)


def test_context_restores_nested_and_after_errors():
    assert jflux.config.strict  # by the fixture
    with jflux.config(strict=False):
        with jflux.config(fused=False):
            assert (jflux.config.strict, jflux.config.fused) == (False, False)
        assert (jflux.config.strict, jflux.config.fused) == (False, True)
        with pytest.raises(KeyError), jflux.config(strict=True):
            raise KeyError
        assert not jflux.config.strict
    assert jflux.config.strict


def test_update():
    with jflux.config(strict=False):
        jflux.config.update(fused=False)
        assert not jflux.config.fused
        jflux.config.update(fused=True)


@pytest.mark.parametrize(
    "transform",
    [
        jax.jit,
        lambda f: jax.jit(jax.vmap(f)),
        lambda f: jax.grad(jax.checkpoint(lambda x: f(x).sum())),
        lambda f: lambda x: jax.lax.scan(lambda c, a: (c, f(a)), 0, x),
        lambda f: lambda x: jax.eval_shape(per_device(make_mesh((2,)), f), x),
    ],
    ids="jit vmap checkpoint scan shard_map".split(),
)
def test_a_block_inside_a_traced_function_is_an_error(transform):
    """Its calls are lowered after the block has been left."""

    def f(x):
        with jflux.config(fused=False):
            return x * 2

    with pytest.raises(RuntimeError, match=r"config\(fused=False\) has no effect.*around the call"):
        transform(f)(jnp.ones((2, 3)))
    assert jflux.config.fused


def test_a_block_inside_eager_transformations():
    """Which lower each call at once. So does what is computed while something is traced."""

    def f(*args):
        with jflux.config(strict=False):  # no kernel takes these
            return CALL.bind("tp")(*args)

    mesh = make_mesh((2,))
    args = operands(CALL, mesh, "tp")
    with pytest.raises(NotImplementedError, match="strict"):
        per_device(mesh, CALL.bind("tp"))(*args)
    per_device(mesh, f)(*args)

    def g(x):
        with jflux.config(fused=False):
            return x * 2

    assert jax.vmap(jax.grad(g))(jnp.ones(3)).sum() == 6

    @jax.jit
    def h(x):
        with jax.ensure_compile_time_eval():
            return x + g(jnp.ones(3))

    assert h(1.0).sum() == 9


def test_unknown_switch():
    with pytest.raises(ValueError, match="'strcit' is not a switch of jflux.config"):
        jflux.config.update(strcit=True)
    with pytest.raises(ValueError, match="'strcit'"), jflux.config(strcit=True):
        pass
    # Nothing of a call with a wrong name took place.
    with pytest.raises(ValueError, match="'strcit'"):
        jflux.config.update(fused=False, strcit=True)
    assert jflux.config.fused


@pytest.mark.parametrize("value", ["no", 0, None])
def test_a_switch_is_on_or_off(value):
    with pytest.raises(TypeError, match="jflux.config: fused=.* must be True or False"):
        jflux.config.update(fused=value)
    with pytest.raises(TypeError, match="must be True"), jflux.config(fused=value):
        pass
    assert jflux.config.fused is True


def test_said_once_from_several_threads(caplog, monkeypatch):
    monkeypatch.setattr(_config, "_said", set())

    def lower():  # switches are a thread's own
        with jflux.config(strict=False, always=True):
            _lower()

    with caplog.at_level(logging.WARNING, logger="jflux"):
        threads = [threading.Thread(target=lower) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert 1 <= len(caplog.records) <= 4
