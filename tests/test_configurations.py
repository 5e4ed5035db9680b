"""Every configuration of the GPU's main loop: shapes for which cc/gpu/gemm_config.h chooses it."""

import jax.numpy as jnp
import pytest
from harness import OPS, RANKS, Call, check_values, make_mesh

# Total rows (ragged) and columns, on GPUs with 132 SMs: the tile's columns, CTAs in a cluster.
SHAPES = {
    "128": (124, 128 * 132),
    "128, whole tiles": (512, 12288),
    "256": (124, 256 * 132),
    "256, clusters": (252, 256 * 66),
}


@pytest.mark.gpu
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "dtype, out, transpose_rhs", [(jnp.bfloat16, None, False), (jnp.float16, jnp.float32, True)]
)
def test_every_configuration(op, shape, dtype, out, transpose_rhs):
    rows, n = SHAPES[shape]
    call = Call(
        op, lead=(rows // RANKS,), k=72, n=n, dtype=dtype, out=out, transpose_rhs=transpose_rhs
    )
    check_values(call, make_mesh((RANKS,)), "tp")
