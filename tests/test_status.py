"""Failed calls on the CPU: the status of the exception says of what kind the failure is."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import PLATFORM, make_mesh

import jflux
from jflux._stress.calls import per_device

pytestmark = pytest.mark.skipif(PLATFORM == "gpu", reason="GPUs tell XLA of no kinds")
MESH = make_mesh((2,))


def summed(**options):
    f = per_device(MESH, lambda x: jflux.all_reduce(x, axis_name="tp", **options))
    return jax.jit(f), np.ones((2, 64), np.float32)


@contextlib.contextmanager
def fails(status, text):
    with pytest.raises(jax.errors.JaxRuntimeError, match=text) as caught:
        yield
    assert str(caught.value).startswith(f"{status}: "), caught.value


def test_no_heap(own_heap):
    f, x = summed()
    f(x)
    jflux.shutdown()
    with fails("FAILED_PRECONDITION", "heap is not initialised.*call jflux.init"):
        jax.block_until_ready(f(x))


def test_a_heap_that_has_become_too_small(own_heap):
    """Lowered with room; without, it would have been another path (test_heap.py)."""
    f, x = summed()
    f(x)
    own_heap(heap_bytes=4096)
    with fails("RESOURCE_EXHAUSTED", "the call needs .*heap_bytes"):
        jax.block_until_ready(f(x))


def test_a_rank_that_does_not_come(own_heap):
    own_heap(deadline_seconds=1)

    def body(x):
        return jax.lax.cond(
            jax.lax.axis_index("tp") == 0,
            lambda x: jflux.all_gather(x, axis_name="tp"),
            lambda x: jnp.zeros((2, *x.shape)) + x,
            x,
        )

    f = jax.jit(per_device(MESH, body, check_vma=False))
    with fails("DEADLINE_EXCEEDED", "rank 0 waited 1 s for rank 1"):
        jax.block_until_ready(f(np.ones((2, 4), np.float32)))
