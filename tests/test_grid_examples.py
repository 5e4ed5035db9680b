"""The models that the examples train on a grid equal themselves on one device."""

import dataclasses
import functools
import re

import jax
import numpy as np
import pytest
from example_runs import ON_GPU, ROOT, losses, run_example
from jax.sharding import PartitionSpec as P

from jflux.parallel import NO_OVERLAP, Grid, Scheme

needs_eight = pytest.mark.skipif(
    ON_GPU or jax.device_count() < 8, reason="float64 on eight virtual devices"
)


@pytest.fixture(autouse=True)
def examples(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    for module in ("optax", "matplotlib"):
        pytest.importorskip(module)


def gpt(scheme):
    """(loss of ops, `Param`s, batch, its specs)."""
    pytest.importorskip("flax")
    import grid_gpt_model as model

    config = model.Config(layers=3, heads=4, head_dim=6, vocab=264, dtype=np.float64)
    text = np.random.default_rng(0).integers(0, 256, (8, 13)).astype(np.int32)
    loss = lambda ops: functools.partial(model.loss, ops, config, scheme)  # noqa: E731
    specs = (scheme.rows_spec(),) * 2
    return loss, model.parameters(config, scheme), (text[:, :-1], text[:, 1:]), specs


def unet(scheme):
    import train_unet
    import unet_model as model

    config = model.Config(
        channels=8, levels=2, blocks=1, groups=4, heads=4, image_channels=4, dtype=np.float64
    )
    batch = next(train_unet.batches(config, 4, 8, seed=0))
    loss = lambda ops: functools.partial(model.loss, ops, config, scheme)  # noqa: E731
    batch = tuple(a.astype(np.float64) for a in batch)
    return loss, model.parameters(config, scheme), batch, model.batch_specs(scheme)


@functools.cache
def on_one_device(model):
    from grid_ops import Plain

    loss, params, batch, _ = model(Scheme())
    return jax.jit(jax.value_and_grad(loss(Plain)))(weights(params), *batch)


def weights(params):
    """No zeros, from which gradients would not go further."""
    from grid_training import initial

    return initial(
        jax.tree.map(lambda p: dataclasses.replace(p, deviation=p.deviation or 0.1), params),
        seed=0,
        dtype=np.float64,
    )


@needs_eight
@pytest.mark.parametrize(
    "model, grid, scheme",
    [
        (gpt, Grid(2, 2, 2), Scheme()),
        (gpt, Grid(1, 2, 2, 2), Scheme()),
        (gpt, Grid(2, 2, 2), Scheme(overlap=NO_OVERLAP)),
        (unet, Grid(2, 2, 2), Scheme()),
        (unet, Grid(4, 2), Scheme()),
    ],
    ids=["gpt 2x2x2x1", "gpt 1x2x2x2", "gpt without overlap", "unet 2x2x2x1", "unet 4x2x1x1"],
)
def test_gradients_equal_those_on_one_device(model, grid, scheme):
    from grid_ops import OnGrid
    from grid_training import on_grid

    with jax.enable_x64(True):
        loss, params, batch, specs = model(scheme)
        mapped = on_grid(loss(OnGrid), grid, params, specs, P())
        got = jax.jit(jax.value_and_grad(mapped))(weights(params), *batch)
        want = on_one_device(model)
    assert got[0].dtype == np.float64
    np.testing.assert_allclose(got[0], want[0], rtol=1e-11)
    compared = jax.tree.leaves_with_path(want[1])
    for (path, wanted), found in zip(compared, jax.tree.leaves(got[1]), strict=True):
        where = jax.tree_util.keystr(path)
        wanted = np.asarray(wanted)
        assert np.abs(wanted).max() > 1e-6, where
        np.testing.assert_allclose(
            found, wanted, rtol=0, atol=1e-9 * np.abs(wanted).max(), err_msg=where
        )


def gap(out):
    return float(re.search(r"largest difference between the loss curves: (\S+)", out)[1])


@needs_eight
def test_train_gpt_on_a_grid(tmp_path):
    pytest.importorskip("flax")
    tiny = "--grid 1,2,2,2 --steps 15 --batch 8 --seq 32 --layers 2 --width 64".split()
    out = run_example("train_gpt.py", *tiny, devices=8, cwd=tmp_path)
    for name in ("grid", "one device"):
        first, last, _ = losses(name, out)
        assert 5 < first < 7 and last < first - 1, out
    # Sums in another order; see test_train_gpt.
    assert gap(out) < 5e-5 and "1x2x2x2 (x, y, z, data) cpu devices" in out
    assert "sample:\ndef __init__(" in out
    assert (tmp_path / "out" / "loss.png").stat().st_size > 10_000


@needs_eight
def test_train_unet(tmp_path):
    tiny = "--grid 1,2,2,2 --steps 12 --batch 8 --image 8 --channels 16 --levels 2".split()
    out = run_example("train_unet.py", *tiny, "--no-overlap", devices=8, cwd=tmp_path)
    for name in ("grid", "one device"):
        first, last, _ = losses(name, out)
        assert 0.7 < first < 1.3 and last < first, out
    assert gap(out) < 1e-5
    assert (tmp_path / "out" / "unet_loss.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    "script, args, message",
    [
        ("train_gpt", "--grid 99,99,1,1", "takes 9801 devices, there are"),
        ("train_gpt", "--grid 2,x", 'a grid is "x,y,z,data"'),
        ("train_gpt", "--grid 1,1,1,1 --data 2", "the last number of --grid"),
        ("train_gpt", "--no-overlap", "is for --grid"),
        ("train_gpt", "--grid 2 --width 16", "1 heads do not split over x = 2"),
        ("train_gpt", "--grid 1,1,1,2 --batch 3", "a batch of 3 does not split over data z = 2"),
        ("train_unet", "--grid 0", "x=0"),
        ("train_unet", "--grid 2 --channels 25", "25 channels do not split over x z = 2"),
        ("train_unet", "--grid 1 --image 18", "18 pixels"),
        ("train_unet", "--steps 0", "must be positive"),
    ],
)
@pytest.mark.skipif(jax.device_count() < 2, reason="a grid of two")
def test_what_does_not_fit(script, args, message, monkeypatch, capsys):
    if script == "train_gpt":
        pytest.importorskip("flax")
    module = pytest.importorskip(script)
    monkeypatch.setattr("sys.argv", [script, *args.split()])
    with pytest.raises(SystemExit):
        module.parse_arguments()
    assert message in " ".join(capsys.readouterr().err.split())
