"""jflux.matmul_all_to_all: every pair of axes, and what each becomes. What all products share:
test_ops_*.py."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import (
    PLATFORM,
    RANKS,
    check_gradients,
    check_values,
    compiled_text,
    fused_calls,
    make_mesh,
    run,
)

import jflux
from jflux._call.plans import Machine, Path
from jflux._ops.products import matmul_all_to_all
from jflux._stress.calls import Call, assert_close, exact, normal, operands, per_device

OP = "matmul_all_to_all"
EXCHANGE = functools.partial(Call, OP)
GPU = Machine("cuda", sm_count=132, link_gbps=320)
# Split and concatenated dimensions of a product of three: shards of rows and of columns, on either
# side, with rows in front of others and not.
WAYS = [(-1, -2), (-1, 0), (-2, -1), (0, -1), (1, 1), (0, 0), (-1, -1)]
ROWS_TO_OTHER_ROWS = [(0, 1), (1, 0)]


@pytest.mark.parametrize("split, concat", WAYS + ROWS_TO_OTHER_ROWS)
def test_every_way(split, concat):
    call = EXCHANGE(lead=(3, 5), k=24, n=16, dtype=jnp.bfloat16, split=split, concat=concat)
    for order in (range(RANKS), range(RANKS - 1, -1, -1)):
        check_values(call, make_mesh((RANKS,), order=order), "tp")
    if RANKS >= 3:
        check_values(call, make_mesh((3,)), "tp")
    check_gradients(call, make_mesh((RANKS,)), "tp")


@pytest.mark.parametrize("split, concat", WAYS)
def test_it_is_lax_to_the_bit(split, concat):
    """Nothing is summed on the way: small integers come out exactly as lax's."""
    mesh = make_mesh((RANKS,))
    call = EXCHANGE(lead=(2, 3), k=16, n=8, dtype=jnp.bfloat16, split=split, concat=concat)
    x, w = (np.round(2 * a.astype(np.float32)).astype(a.dtype) for a in operands(call, mesh, "tp"))

    def by_lax(x, w):
        return jax.lax.all_to_all(x @ w, "tp", split % 3, concat % 3, tiled=True)

    want = run(jax.jit(per_device(mesh, by_lax)), x, w)
    np.testing.assert_array_equal(run(jax.jit(per_device(mesh, call.bind("tp"))), x, w), want)


def test_one_axis_of_global_arrays():
    """Split and put together along one dimension: rank r's shard s becomes rank s's shard r."""
    x = normal(0, (RANKS * RANKS * 2, 10), jnp.bfloat16)
    w = normal(1, (10, 8), jnp.bfloat16)
    f = functools.partial(
        jflux.matmul_all_to_all, axis_name="tp", mesh=make_mesh((RANKS,)), split_axis=0,
        concat_axis=0,
    )  # fmt: skip
    x64 = x.astype(np.float64).reshape(RANKS, RANKS, 2, 10).swapaxes(0, 1).reshape(x.shape)
    want, scale = x64 @ w.astype(np.float64), abs(x64) @ abs(w.astype(np.float64))
    assert_close(run(jax.jit(f), x, w), want, scale, jnp.bfloat16, 10)


# ---- How calls are lowered -----------------------------------------------------------------------


@pytest.mark.parametrize("split, concat", WAYS)
def test_one_call(split, concat):
    mesh = make_mesh((RANKS,))
    call = EXCHANGE(lead=(2, 128), k=16, n=8, dtype=jnp.bfloat16, split=split, concat=concat)
    f = per_device(mesh, call.bind("tp"))
    assert fused_calls(compiled_text(f, *operands(call, mesh, "tp"))) == [OP]


@pytest.mark.parametrize("split, concat", ROWS_TO_OTHER_ROWS)
def test_rows_that_become_other_rows_are_decomposed(split, concat):
    mesh = make_mesh((RANKS,))
    call = EXCHANGE(lead=(2, 3), k=16, n=8, dtype=jnp.bfloat16, split=split, concat=concat)
    f = per_device(mesh, call.bind("tp"))
    assert fused_calls(compiled_text(f, *operands(call, mesh, "tp"))) == ["all_to_all"]


def _on_gpus(call, mesh):
    """The plan of one rank's call on GPUs, and the form in which they get it (None: as it is)."""
    ndim = len(call.lead) + 1
    params = matmul_all_to_all.Params(
        ("tp",), mesh.devices.size, call.split % ndim, call.concat % ndim, call.transpose_rhs,
        call.out_dtype,
    )  # fmt: skip
    arrays = [jax.ShapeDtypeStruct(a.shape[1:], a.dtype) for a in operands(call, mesh, "tp")]
    plan = matmul_all_to_all._op.plan(arrays, params, GPU)
    if plan.path == Path.DECOMPOSED:
        return plan, None
    return plan, matmul_all_to_all._canonical(arrays, params, GPU)


@pytest.mark.skipif(PLATFORM != "cpu", reason="asks what a GPU would be given")
@pytest.mark.parametrize("split, concat", WAYS)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("k, n", [(9, 8), (16, 8), (16, 12)])
def test_operands_as_gpus_are_given_them(k, n, transposed, split, concat):
    """k padded to whole vectors, ranks before leading rows, or a product and an exchange where the
    columns of a shard are no whole vectors: the results are the same."""
    mesh = make_mesh((RANKS,))
    call = EXCHANGE(
        lead=(2, 3), k=k, n=n, dtype=jnp.bfloat16, transpose_rhs=transposed, split=split,
        concat=concat,
    )  # fmt: skip
    plan, canonical = _on_gpus(call, mesh)
    if n == 12:
        assert plan.path == Path.DECOMPOSED and "no whole 16-byte vectors" in plan.reason
        return
    # Which dimension of rows takes part, if any, and is not the first.
    behind_others = {split % 3, concat % 3} & {1}
    assert (canonical is None) == (k == 16 and not behind_others)
    if canonical is None:
        return
    x, w = operands(call, mesh, "tp")
    f = per_device(mesh, lambda x, w: canonical(x, w)[0])
    assert fused_calls(compiled_text(f, x, w)) == [OP]
    want, scale = exact(call, mesh, "tp", x, w), exact(call, mesh, "tp", abs(x), abs(w))
    assert_close(run(jax.jit(f), x, w), want, scale, call.dtype, k)


def test_what_the_kernel_is_taken_for():
    """Many rows, in shards that are nearly whole tiles."""
    why = matmul_all_to_all.why_decomposed
    assert not why(2048, 512, 2048) and not why(128, 512, 512) and not why(1000, 512, 1000)
    assert why(256, 512, 256)  # few rows, each of which reads all of w
    assert why(72, 512, 576) and why(2048, 72, 2048)  # of 72 a tile computes 128


def test_results_of_another_type_are_exchanged_after_the_product():
    mesh = make_mesh((2,))
    many = functools.partial(EXCHANGE, lead=(1024,), k=64, n=256, dtype=jnp.bfloat16)
    assert _on_gpus(many(), mesh)[0].path == Path.FUSED
    plan, _ = _on_gpus(many(out=jnp.float32), mesh)
    assert plan.path == Path.DECOMPOSED and "results are float32" in plan.reason
