"""Every device primitive, by threads, warps and blocks: custom_primitives/, compiled out of tree.

JFLUX_TEST_PRIMITIVES names a library that is built already, for hosts without a compiler.
"""

import compilers
import custom_primitives
import jax
import numpy as np
import pytest
from custom_primitives import AREAS, SOURCES, every_primitive, exact, reference, x_shape
from harness import PLATFORM, RANKS, make_mesh, run

from jflux import _native, testing
from jflux._stress.calls import per_device

WORLDS = [n for n in (1, 2, 3, 4, 8) if n <= RANKS]


@pytest.fixture(scope="module", autouse=True)
def library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("custom_primitives")
    path = compilers.library_of(SOURCES, "every_primitive", folder, custom_primitives.LIBRARY)
    custom_primitives.load(str(path))


def _draw(mesh, axis_name, count, *lead):
    world = np.prod([mesh.shape[name] for name in axis_name])
    shape = (*mesh.devices.shape, *lead, *x_shape(world, count))
    return np.random.default_rng(count).integers(-(2**31), 2**31, shape, np.int32)


def _call(mesh, axis_name=("tp",), f=every_primitive):
    return jax.jit(per_device(mesh, lambda x: f(x, axis_name=axis_name)))


@pytest.mark.parametrize("world", WORLDS)
def test_values(world):
    mesh = make_mesh((world,), order=range(RANKS - 1, RANKS - 1 - world, -1))
    f, plain = _call(mesh), _call(mesh, f=reference)
    for count in (1, 2, 37, 256, 1001):
        x = _draw(mesh, ("tp",), count)
        want = exact(mesh, ("tp",), x)
        for factor in (1, -1, 3):
            np.testing.assert_array_equal(run(f, factor * x), factor * want)
        np.testing.assert_array_equal(plain(x), want)


@pytest.mark.parametrize("axis_name", [("a",), ("b",), ("b", "a")], ids=str)
def test_groups(axis_name):
    mesh = make_mesh((2, RANKS // 2), ("a", "b"))
    x = _draw(mesh, axis_name, 19)
    np.testing.assert_array_equal(run(_call(mesh, axis_name), x), exact(mesh, axis_name, x))


def test_in_a_loop_with_late_ranks():
    """On GPUs XLA captures the loop's body, and replays find new data and new epochs."""
    mesh, steps = make_mesh((RANKS,)), 24
    x = _draw(mesh, ("tp",), 5, steps)

    def body(x):
        def step(count, x):
            # Other inputs and other uses, or XLA would not make graphs of the calls.
            return count + 1, [every_primitive(x * s, axis_name="tp") * 2 for s in (1, -1, 3, 5)]

        return jax.lax.scan(step, 0, x)[1]

    f = jax.jit(per_device(mesh, body))
    want = np.stack([exact(mesh, ("tp",), x[:, i]) for i in range(steps)], axis=1)
    run(f, x)
    before = _native.lib.cuda_launches()
    ys = run(f, x)
    launches = _native.lib.cuda_launches() - before
    with testing.planted_faults(max_delay_us=2000):
        late = run(f, x)
    for factor, y, z in zip((1, -1, 3, 5), ys, late, strict=True):
        np.testing.assert_array_equal(y, 2 * factor * want)
        np.testing.assert_array_equal(z, 2 * factor * want)
    if PLATFORM == "gpu":
        assert launches <= 2 * RANKS * steps * 4 / 4


@pytest.mark.skipif(RANKS < 2, reason="there is nobody to wait for")
def test_waits_that_are_left_out():
    mesh = make_mesh((RANKS,))
    x = _draw(mesh, ("tp",), 300)
    f, want = _call(mesh), exact(mesh, ("tp",), x)
    np.testing.assert_array_equal(run(f, x), want)
    testing.poison_workspaces()
    with testing.planted_faults(skip_waits=True, max_delay_us=20_000):
        wrong = np.asarray(f(x)) != want
    # Of all ways to send, in the shards that come first. What is later may be in time.
    assert all(wrong[:, 0, :, area].any() for area in range(AREAS))
    np.testing.assert_array_equal(run(f, x), want)
