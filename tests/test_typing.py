"""What a type checker knows of results. mypy checks this file too (pyproject.toml): it has to agree
with each `assert_type`, and with what the calls return when they are traced."""

import inspect
from collections.abc import Callable
from typing import Any, assert_type, get_overloads, get_type_hints

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jflux
import jflux.nn

Pair = tuple[jax.Array, jax.Array]


def products(x: jax.Array, w: jax.Array) -> None:
    y = assert_type(jflux.all_gather_matmul(x, w, axis_name="tp"), jax.Array)
    assert y.shape == (8, 4)
    both = jflux.all_gather_matmul(x, w, axis_name="tp", return_gathered=True)
    assert len(assert_type(both, Pair)) == 2
    ys = jflux.all_gather_matmul(x, (w, w, w), axis_name="tp")
    assert len(assert_type(ys, tuple[jax.Array, ...])) == 3
    ys, gathered = jflux.all_gather_matmul(x, (w, w, w), axis_name="tp", return_gathered=True)
    assert len(assert_type(ys, tuple[jax.Array, ...])) == 3
    assert assert_type(gathered, jax.Array).shape == (8, 4)
    gated = jflux.all_gather_matmul(x, (w, w), axis_name="tp", activation="silu", gated=True)
    assert assert_type(gated, jax.Array).shape == (8, 4)
    y, _ = jflux.all_gather_matmul(
        x, (w, w), axis_name="tp", activation="silu", gated=True, return_gathered=True
    )
    assert assert_type(y, jax.Array).shape == (8, 4)
    y = assert_type(jflux.matmul_reduce_scatter(x, w, axis_name="tp"), jax.Array)
    norm = jflux.RMSNorm(jnp.ones(4))
    y = assert_type(jflux.matmul_all_reduce(x, w, axis_name="tp"), jax.Array)
    assert len(assert_type(jflux.matmul_all_reduce(x, w, axis_name="tp", norm=norm), Pair)) == 2
    rows = jflux.Format(jnp.int8, (1, -1))
    two = jflux.matmul_all_reduce(x, w, axis_name="tp", norm=norm, quantize=rows)
    assert assert_type(two, tuple[jax.Array, jflux.Scaled])[1].dtype == jnp.int8
    w = jnp.ones((8, 4))
    y = jflux.all_to_all_matmul(x, w, axis_name="tp", split_axis=-2, concat_axis=-1)
    assert assert_type(y, jax.Array).shape == (2, 4)
    both = jflux.all_to_all_matmul(
        x, w, axis_name="tp", split_axis=-2, concat_axis=-1, return_exchanged=True
    )
    assert len(assert_type(both, Pair)) == 2


def collectives(x: jax.Array, w: jax.Array) -> None:
    tree = {"a": x, "b": w}
    assert_type(jflux.all_gather(x, axis_name="tp"), jax.Array)
    assert_type(jflux.reduce_scatter(tree, axis_name="tp", tiled=True), dict[str, jax.Array])
    assert_type(jflux.all_reduce(tree, axis_name="tp"), dict[str, jax.Array])
    padded = jflux.halo_exchange(tree, axis_name="tp", halo=(1, 0), mode="wrap")
    assert assert_type(padded, dict[str, jax.Array])["a"].shape == (5, 4)
    y = jflux.halo_exchange(x, axis=(0,), axis_name=("tp",), halo=[(2, 0)], mode=["edge"])
    assert assert_type(y, jax.Array).shape == (6, 4)
    norm = jflux.LayerNorm(jnp.ones(4))
    assert len(assert_type(jflux.all_reduce(x, axis_name="tp", norm=norm), Pair)) == 2
    two = jflux.all_reduce(x, axis_name="tp", norm=norm, quantize=jflux.Format(jnp.int8, (1, -1)))
    assert assert_type(two, tuple[jax.Array, jflux.Scaled])[1].dtype == jnp.int8


def layers(x: jax.Array, w: jax.Array) -> None:
    assert_type(jflux.nn.column_parallel(x, w, axis_name="tp"), jax.Array)
    ys = jflux.nn.column_parallel(x, (w, w), axis_name="tp")
    assert len(assert_type(ys, tuple[jax.Array, ...])) == 2
    heads: tuple[jax.Array, ...] = (w[:, None],) * 3
    cache = assert_type(jflux.nn.init_cache(1, 8, 1, 4), jflux.KVCache)
    q, k, v = heads
    y = jflux.nn.attention(x, q, k, v, jnp.ones((1, 4, 4)), axis_name="tp")
    assert assert_type(y, jax.Array).shape == (4, 4)
    x, out = x[None], jnp.ones((1, 4, 4))
    made = jflux.nn.attention(x, q, k, v, out, axis_name="tp", cache=cache, prefill=True)
    assert isinstance(assert_type(made, tuple[jax.Array, jflux.KVCache])[1], jflux.KVCache)
    x = x[..., None, :]
    o = assert_type(jflux.attention(x, x, x, axis_name="tp"), jax.Array)
    assert o.shape == x.shape
    assert len(assert_type(jflux.attention(x, x, x, axis_name="tp", return_lse=True), Pair)) == 2
    lengths = jnp.array([3])
    o = assert_type(jflux.flash_decode(x[:, 0], x, x, lengths, axis_name="tp"), jax.Array)
    assert o.shape == (1, 1, 4)
    new = jflux.update_cache((x, x), (x, x), lengths, axis_name="tp")
    assert len(assert_type(new, Pair)) == 2


@pytest.mark.parametrize("calls", [products, collectives, layers])
def test_results(calls: Callable[[jax.Array, jax.Array], None]) -> None:
    """Are what the types say: on two ranks, nothing runs."""
    mesh = Mesh(jax.devices()[:2], "tp")
    f = jax.shard_map(calls, mesh=mesh, in_specs=(P("tp"), P()), out_specs=None, check_vma=False)
    with jflux.config(fused=False):
        jax.eval_shape(f, jnp.ones((8, 4)), jnp.ones((4, 4)))


@pytest.mark.parametrize(
    "function",
    [
        jflux.all_gather_matmul,
        jflux.matmul_all_reduce,
        jflux.all_to_all_matmul,
        jflux.all_reduce,
        jflux.attention,
        jflux.flash_decode,
        jflux.nn.column_parallel,
        jflux.nn.attention,
    ],
)
def test_overloads_have_all_parameters(function: Callable[..., Any]) -> None:
    """An option that no overload has would be an error to a type checker."""
    overloads = get_overloads(function)
    assert len(overloads) > 2
    (others,) = {inspect.get_annotations(one)["options"] for one in overloads}
    assert others == "Unpack[Options]"
    options = function.__wrapped__.__globals__["Options"]  # type: ignore[attr-defined]
    of_all = get_type_hints(options)
    for one in overloads:
        own = inspect.signature(one).parameters.keys() - {"options"}
        assert not own & of_all.keys()
        assert own | of_all.keys() == inspect.signature(function).parameters.keys()
