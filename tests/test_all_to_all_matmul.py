"""all_to_all_matmul: what is special to it; the rest is tested with all ops."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import (
    FUSED_DTYPES,
    PLATFORM,
    RANKS,
    check_values,
    compiled_text,
    fused_calls,
    make_mesh,
    run,
)

import jflux
from jflux._call.plans import Machine, Path
from jflux._ops.products import all_to_all_matmul as op
from jflux._stress.calls import HALVES, Call, exchanged, operands, per_device

OP = "all_to_all_matmul"
WAYS = [(-2, -1), (-1, -2), (-1, -1), (-2, -2)]


@pytest.mark.parametrize("split, concat", WAYS)
@pytest.mark.parametrize("sizes", [dict(lead=(5,), k=13, n=7), dict(lead=(2, 3), k=8, n=16)])
def test_the_exchanged_x_is_returned(split, concat, sizes):
    call = Call(OP, **sizes, split=split, concat=concat, dtype=jnp.bfloat16)
    mesh = make_mesh((RANKS,))
    x, w = operands(call, mesh, "tp")
    f = jax.jit(per_device(mesh, call.bind("tp", return_exchanged=True)))
    y, got = run(f, x, w)
    want = exchanged("all_to_all", list(x), tiled=True, split_axis=split, concat_axis=concat)
    np.testing.assert_array_equal(got, np.stack(want))
    alone = run(jax.jit(per_device(mesh, call.bind("tp"))), x, w)
    np.testing.assert_array_equal(y, alone)


def test_gradient_through_the_exchanged_x():
    """Its cotangent goes back by an all_to_all of its own."""
    dtype = FUSED_DTYPES[0] if PLATFORM == "gpu" else jnp.float32
    call = Call(OP, lead=(4,), k=8, n=16, split=-2, concat=-1, dtype=dtype)
    mesh = make_mesh((RANKS,))
    x, w = operands(call, mesh, "tp")

    def loss(module, x, w):
        f = per_device(mesh, call.bind("tp", module, return_exchanged=True))
        y, exchanged = f(x, w)
        return jnp.sum(jnp.sin(y.astype(jnp.float32))) + jnp.sum(exchanged.astype(jnp.float32) ** 2)

    got, want = (
        jax.grad(functools.partial(loss, module), (0, 1))(x, w)
        for module in (jflux, jflux.reference)
    )
    for a, b in zip(got, want, strict=True):
        tolerance = 0.1 if PLATFORM == "gpu" else 1e-4
        np.testing.assert_allclose(
            a.astype(np.float32), b.astype(np.float32), rtol=tolerance, atol=tolerance
        )


def test_checkpoint_exchanges_again_without_a_product():
    call = Call(OP, lead=(4,), k=8, n=16, split=-2, concat=-1, dtype=HALVES[0])
    mesh = make_mesh((RANKS,))
    f = jax.checkpoint(per_device(mesh, call.bind("tp")))
    x, w = operands(call, mesh, "tp")
    text = compiled_text(jax.grad(lambda w: jnp.sum(jnp.sin(f(x, w).astype(jnp.float32)))), w)
    assert fused_calls(text).count(OP) + fused_calls(text).count("all_to_all") == 2


def test_a_split_of_columns_has_no_global_form():
    x, w = jnp.zeros((4 * RANKS, 8 * RANKS)), jnp.zeros((8 * RANKS, 8))
    with pytest.raises(ValueError, match=r"split_axis=1 must name one of x's leading dimensions"):
        jflux.all_to_all_matmul(
            x, w, split_axis=1, concat_axis=0, axis_name="tp", mesh=make_mesh((RANKS,))
        )


GPU = Machine("cuda", sm_count=132, link_gbps=320)


def _plan(x, w, split, concat, world=2, **changes):
    dtype = np.dtype(jnp.bfloat16)
    params = op.Params(("tp",), world, split, concat, ("y",), False, dtype)
    arrays = [jax.ShapeDtypeStruct(shape, dtype) for shape in (x, w)]
    return op._op.plan(arrays, op.dataclasses.replace(params, **changes), GPU)


def test_plans_on_gpus():
    with jflux.config(always=False):
        assert _plan((4096, 4096), (8192, 4096), 0, 1).path == Path.FUSED
        assert _plan((2048, 8192), (4096, 4096), 1, 0).path == Path.FUSED
        few = _plan((512, 4096), (8192, 4096), 0, 1)
        assert few.path == Path.DECOMPOSED and "256 rows" in few.reason
        padded = _plan((1100, 8192), (4096, 4096), 1, 0)
        assert padded.path == Path.FUSED  # 1152 of 1100
        padded = _plan((600, 8192), (4096, 4096), 1, 0, world=8)
        assert padded.path == Path.FUSED  # 640 of 600
        padded = _plan((130, 8192), (4096, 4096), 1, 0, world=8)
        assert padded.path == Path.DECOMPOSED and "more than an eighth larger" in padded.reason
    wide = _plan((4096, 4096), (8192, 4096), 0, 1, out_dtype=np.dtype(np.float32))
    assert wide.path == Path.DECOMPOSED and "float32" in wide.reason


@pytest.mark.skipif(PLATFORM == "cpu", reason="CPUs take every shape as it is")
@pytest.mark.parametrize("split, concat", WAYS[:3])
def test_padded_and_straddling_shards(split, concat):
    for sizes in (dict(lead=(40,), k=12, n=20), dict(lead=(3, 24), k=16, n=24)):
        call = Call(OP, **sizes, split=split, concat=concat, dtype=jnp.bfloat16)
        check_values(call, make_mesh((RANKS,)), "tp")
