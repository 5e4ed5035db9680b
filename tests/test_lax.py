"""jflux.lax: `jax.lax`'s signatures, results and gradients, and what goes to `lax` itself."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import PLATFORM, RANKS, make_mesh
from jax import lax
from jax.sharding import PartitionSpec as P

import jflux
from jflux._call.plans import Path
from jflux._ranks import meshes

COUNTS = [n for n in (2, 4) if n <= RANKS]
DTYPE = jnp.float32 if PLATFORM == "gpu" else jnp.float64


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(PLATFORM != "gpu"):
        yield


def over_ranks(f, world, check_vma=True):
    """f of each rank's [0] of an array [world, ...]."""

    def local(x):
        return jax.tree.map(lambda y: jnp.asarray(y)[None], f(x[0]))

    return jax.shard_map(
        local, mesh=make_mesh((world,)), in_specs=P("tp"), out_specs=P("tp"), check_vma=check_vma
    )


#: f(module, x [world, 4 world, 3] of a rank, world), and the op that it takes.
CALLS = {
    "all_to_all": (lambda m, x, n: m.all_to_all(x, "tp", 1, 2, tiled=True), "all_to_all"),
    "all_to_all, not tiled": (lambda m, x, n: m.all_to_all(x, "tp", 0, 0), "all_to_all"),
    "all_gather": (lambda m, x, n: m.all_gather(x, "tp"), "all_gather"),
    "all_gather, tiled": (lambda m, x, n: m.all_gather(x, "tp", axis=1, tiled=True), "all_gather"),
    "psum_scatter": (
        lambda m, x, n: m.psum_scatter(x, "tp", scatter_dimension=1, tiled=True), "reduce_scatter",
    ),
    "psum_scatter, not tiled": (lambda m, x, n: m.psum_scatter(x, ("tp",)), "reduce_scatter"),
    "psum": (lambda m, x, n: m.psum(x, "tp"), "all_reduce"),
    "psum of a tree": (lambda m, x, n: m.psum({"a": x, "b": x[0]}, ("tp",))["b"], "all_reduce"),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("world", COUNTS)
def test_values_and_gradients_are_laxs(world, name):
    call, op = CALLS[name]
    rng = np.random.default_rng(world)
    x = jnp.asarray(rng.standard_normal((world, world, 4 * world, 3)), DTYPE)

    def both(module):
        f = over_ranks(lambda x: call(module, x, world), world)

        def loss(x):
            y = f(x)
            return jnp.sum(jnp.sin(y)), y

        return jax.jit(jax.value_and_grad(loss, has_aux=True))

    rtol = 1e-12 if DTYPE == jnp.float64 else 1e-5
    for one, other in zip(*map(jax.tree.leaves, (both(jflux.lax)(x), both(lax)(x))), strict=True):
        np.testing.assert_allclose(one, other, rtol, rtol)
    found = {c.op: c.plan.path for c in jflux.explain(both(jflux.lax), x)}
    assert found[op] == Path.FUSED


def test_groups():
    groups = [[0, 1], [2, 3]]
    x = jnp.arange(4 * 2 * 6.0, dtype=DTYPE).reshape(4, 2, 6)
    options = {"axis_index_groups": groups, "tiled": True}

    def every(module):
        def f(x):
            return (
                module.all_gather(x, "tp", **options),
                module.all_to_all(x, "tp", 0, 1, **options),
                module.psum_scatter(x, "tp", **options),
                module.psum(x, "tp", axis_index_groups=groups),
            )

        return jax.jit(over_ranks(f, 4, check_vma=False))(x)

    for one, other in zip(every(jflux.lax), every(lax), strict=True):
        np.testing.assert_allclose(one, other)


def test_what_no_kernel_takes_is_laxs_and_no_error():
    """In strict mode too, which tests are in, and where jflux's functions stand in their place."""

    def f(module, x):
        count = module.psum(1, "tp")
        assert count == 2 and isinstance(count, int)
        return (
            module.psum(x > 1, "tp"),
            module.psum(jnp.int32(x.sum()), "tp"),
            module.psum_scatter(x.astype(jnp.int32), "tp"),
            jax.vmap(lambda a: module.psum(a, "v"), axis_name="v")(x),
        )

    x = jnp.arange(4.0, dtype=DTYPE).reshape(2, 2)
    got, want = (
        jax.jit(over_ranks(lambda x, m=m: f(m, x), 2, check_vma=False))(x) for m in (jflux.lax, lax)
    )
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


def test_constants_weak_types_complex_numbers_and_groups_of_other_sizes():

    def f(module, x):
        assert not jflux.lax._takes_ranks("tp", [[0], [1, 2, 3]])
        assert not jflux.lax._takes("all_gather", x + 0j)  # its gradient is a sum
        size = int(module.psum(np.ones((), np.float32), "tp"))
        weak = jax.jit(lambda y: jnp.where(y.sum() > 0, 1.0, 2.0))(x)
        return (
            jnp.zeros(size),
            module.all_gather(weak, "tp") * jnp.bfloat16(2),
        )

    x = jnp.arange(8.0, dtype=DTYPE).reshape(4, 2)
    got, want = (
        jax.jit(over_ranks(lambda x, m=m: f(m, x), 4, check_vma=False))(x) for m in (jflux.lax, lax)
    )
    for one, other in zip(got, want, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(np.asarray(one, np.float64), np.asarray(other, np.float64))


def test_types_without_a_kernel_on_gpus(monkeypatch):
    monkeypatch.setattr(meshes, "platform", lambda: "gpu")
    ops = {"psum": "all_reduce", "psum_scatter": "reduce_scatter", "all_gather": "all_gather"}
    for dtype, sums in ((jnp.int32, False), (jnp.bfloat16, True)):
        takes = [jflux.lax._takes(op, jnp.ones(2, dtype)) for op in ops.values()]
        assert takes == [sums, sums, True]


def test_in_the_place_of_laxs_functions(monkeypatch):
    """Nothing calls itself for ever, whether kernels take the calls or not."""
    x = jnp.arange(2 * 2 * 8.0, dtype=DTYPE).reshape(2, 2, 8)
    numbers = lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), (0,), (0,))

    def f(x):
        rows = lax.all_gather(x, "tp", tiled=True)
        w, sizes = jnp.ones((2, 8, 4), x.dtype), jnp.array([1, 2], jnp.int32)
        return (
            rows,
            lax.psum_scatter(rows, "tp", tiled=True),
            lax.all_to_all(x, "tp", 0, 1, tiled=True),
            lax.psum(x, "tp") + lax.psum(1, "tp"),
            lax.psum(x.astype(jnp.int32), "tp"),
            lax.ragged_dot(rows, w, sizes),
            lax.ragged_dot_general(rows, w, sizes, numbers),
        )

    def run(**switches):
        with jflux.config(**switches):
            return jax.jit(over_ranks(lambda x: f(x), 2, check_vma=False))(x)

    want = run()
    for name in jflux.lax.__all__:
        monkeypatch.setattr(lax, name, getattr(jflux.lax, name))
    # No kernel of a GPU takes a ragged product of float32.
    for got in (run(strict=PLATFORM == "cpu"), run(fused=False, strict=False)):
        for one, other in zip(got, want, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6)


@pytest.mark.parametrize("name", jflux.lax.__all__)
def test_signatures(name):
    """Whatever `lax` takes by position or by name; jflux's may take more."""
    ours, theirs = (inspect.signature(getattr(m, name)).parameters for m in (jflux.lax, lax))
    for parameter in theirs.values():
        own = ours[parameter.name]
        assert (own.kind, own.default) == (parameter.kind, parameter.default), parameter
