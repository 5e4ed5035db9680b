"""Every configuration of the GPU's main loop that is compiled, whatever would be chosen."""

import jax.numpy as jnp
import pytest
from harness import OPS, RANKS, Call, check_values, make_mesh

from jflux import _tuning


@pytest.mark.gpu
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("choice", _tuning.compiled(), ids=str)
@pytest.mark.parametrize(
    "dtype, out, transpose_rhs", [(jnp.bfloat16, None, False), (jnp.float16, jnp.float32, True)]
)
@pytest.mark.parametrize("rows", [130, 256])
def test_every_configuration(op, choice, dtype, out, transpose_rhs, rows):
    """Ragged rows and whole tiles, ragged columns, one sweep of all, and groups of one row of tiles
    and of several."""
    mesh = make_mesh((RANKS,))
    for group, n in ((0, 2056), (0, 18 * 256), (1, 2056), (3, 18 * 256)):
        call = Call(op, lead=(rows,), k=136, n=n, dtype=dtype, out=out, transpose_rhs=transpose_rhs)
        with _tuning.force(_tuning.Choice(choice.tile_n, choice.cluster_m, group)):
            check_values(call, mesh, "tp", seed=group)


@pytest.mark.gpu
@pytest.mark.parametrize("tile_n", [128, 192])
@pytest.mark.parametrize("splits", [2, 3, 8, 16])
def test_splits_of_k(tile_n, splits):
    """Also more splits than there are blocks of k, and rows that leave parts of a tile empty."""
    mesh = make_mesh((RANKS,))
    for rows, k in ((1, 8), (5, 136), (16, 520), (31, 2056), (60, 1024), (200, 264)):
        for dtype, out in ((jnp.bfloat16, None), (jnp.float16, jnp.float32)):
            call = Call("all_gather_matmul", lead=(rows,), k=k, n=520, dtype=dtype, out=out)
            with _tuning.force(_tuning.Choice(tile_n, 1, 2, splits)):
                check_values(call, mesh, "tp", seed=splits)
