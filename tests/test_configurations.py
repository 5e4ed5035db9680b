"""Every configuration of the GPU's main loop that is compiled, whatever would be chosen."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import OPS, RANKS, check_values, make_mesh

import jflux
from jflux import testing
from jflux._call import tuning_tables
from jflux._stress.calls import Call


@pytest.mark.gpu
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("choice", tuning_tables.compiled(), ids=str)
@pytest.mark.parametrize(
    "dtype, out, transpose_rhs", [(jnp.bfloat16, None, False), (jnp.float16, jnp.float32, True)]
)
@pytest.mark.parametrize("rows", [130, 256])
def test_every_configuration(op, choice, dtype, out, transpose_rhs, rows):
    """Ragged rows and whole tiles, ragged columns, one raster group of all, and groups of one row
    of tiles and of several."""
    mesh = make_mesh((RANKS,))
    for group, n in ((0, 2056), (0, 18 * 256), (1, 2056), (3, 18 * 256)):
        call = Call(op, lead=(rows,), k=136, n=n, dtype=dtype, out=out, transpose_rhs=transpose_rhs)
        with tuning_tables.force(tuning_tables.Choice(choice.tile_n, choice.cluster_m, group)):
            check_values(call, mesh, "tp", seed=group)


@pytest.mark.gpu
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("choice", tuning_tables.compiled(), ids=str)
def test_several_waves(op, choice):
    """More tiles than are computed at a time, and a k of more blocks than there are stages: store
    warps need tickets to send (TicketSemaphore), and not all CTAs send rows. Late ranks."""
    mesh = make_mesh((RANKS,))
    for seed, (rows, out) in enumerate([(512, None), (450, jnp.float32)]):
        call = Call(op, lead=(rows,), k=392, n=4360, dtype=jnp.bfloat16, out=out)
        with (
            tuning_tables.force(tuning_tables.Choice(choice.tile_n, choice.cluster_m, 2)),
            testing.planted_faults(max_delay_us=2000 * seed),
        ):
            check_values(call, mesh, "tp", seed=seed)


@pytest.mark.gpu
@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_reduce_scatter"])
@pytest.mark.parametrize("splits", [2, 4])
@pytest.mark.parametrize("rows", [1, 5, 16, 33, 64, 65])
def test_clusters_that_share_k(op, splits, rows):
    """Also too little of k, rows that leave parts of a tile empty, and too many rows."""
    mesh = make_mesh((RANKS,))
    for k, n in ((8, 520), (72, 2056), (136, 64), (200, 520), (1000, 136 * 128 + 8)):
        for dtype, out, transpose_rhs in (
            (jnp.bfloat16, None, False),
            (jnp.float16, jnp.float32, True),
        ):
            call = Call(
                op, lead=(rows,), k=k, n=n, dtype=dtype, out=out, transpose_rhs=transpose_rhs
            )
            with tuning_tables.force(tuning_tables.Choice(128, 1, 1, splits)):
                check_values(call, mesh, "tp", seed=rows)


@pytest.mark.gpu
@pytest.mark.parametrize("of_w", [(1, -1), (128, 128), (1, 128)], ids=str)
def test_matmul_by_every_choice(of_w):
    """Of operands with scales; a choice that they do not have is fitted. Several waves, ragged
    tiles, and few rows whose k CTAs share."""
    blocks = ((1, of_w[1]), of_w)
    choices = [dataclasses.replace(c, group_m=3) for c in tuning_tables.compiled()]
    choices += [tuning_tables.Choice(128, 1, 1, splits) for splits in (2, 4)]
    for rows, n, k in ((700, 4368, 400), (2048, 4096, 512), (40, 1040, 784)):
        wide = (jax.random.normal(jax.random.key(i), (a, k)) for i, a in enumerate((rows, n)))
        x, w = (
            jflux.quantize(a, jnp.float8_e4m3fn, block=block)
            for a, block in zip(wide, blocks, strict=True)
        )
        exact = [np.asarray(a.dequantize(), np.float64) for a in (x, w)]
        want, terms = exact[0] @ exact[1].T, np.abs(exact[0]) @ np.abs(exact[1]).T
        for choice in choices:
            with tuning_tables.force(choice):
                f = jax.jit(lambda x, w: jflux.matmul(x, w, transpose_rhs=True))
                (call,) = jflux.explain(f, x, w)
                assert call.plan.config["group_m"] == choice.group_m
                shares_k = rows <= 128 and of_w != (1, 128)
                assert call.plan.config["splits"] == (choice.splits if shares_k else 1)
                y = np.asarray(f(x, w))
            testing.assert_close(y, want, terms, y.dtype, k)
