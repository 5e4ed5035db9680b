"""Names of calls that all processes of a program share (jflux/_call/call_names.py)."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import PLATFORM, make_mesh
from jax.sharding import PartitionSpec as P

import jflux
from jflux._call import call_names

pytestmark = pytest.mark.skipif(PLATFORM != "cpu", reason="GPUs' calls need no names")

PLACES = (1 << call_names.CALL_BITS) - 1


def _program(made_once, n=8):
    """Calls in functions that are called twice, one of them in a loop; and its operands.

    Args:
      made_once: JAX lowers each of these functions once; else once for each use.
    """

    def op():
        return jax.jit(lambda x, w: jflux.all_gather_matmul(x, w, axis_name="tp"))

    one, mesh = op(), make_mesh((2,))

    def inner(x, w):
        return (one if made_once else op())(x, w)

    def loop(x, w):
        start = jnp.zeros((4, w.shape[1]), x.dtype)
        return jax.lax.fori_loop(0, 3, lambda i, y: y + inner(x + i, w), start)

    f = jax.shard_map(
        lambda x, w: inner(x, w) - 3 * inner(x * x, w) + loop(x, w),
        mesh=mesh, in_specs=(P("tp"), P(None, "tp")), out_specs=P(None, "tp"), check_vma=False,
    )  # fmt: skip
    outer = jax.jit(f)

    def whole(x, w):
        return outer(x, w) + (outer if made_once else jax.jit(f))(2 * x, w)

    x, w = np.arange(16.0).reshape(4, 4), np.arange(4.0 * n).reshape(4, n)
    return jax.jit(whole), (x.astype(np.float32), w.astype(np.float32))


def _sites(lowered):
    return [int(site) for site in re.findall(r"\bsite = (\d+)", lowered.as_text())]


def test_each_call_has_a_name_of_its_own():
    named, lowered_once = [], []
    for made_once in (True, False):
        f, operands = _program(made_once)
        lowered = f.lower(*operands)
        lowered_once.append(len(_sites(lowered)))
        assert len(set(_sites(lowered))) < 6
        call_names.name_calls(lowered.compiler_ir())
        named.append(sorted(_sites(lowered)))
        assert [site & PLACES for site in named[-1]] == list(range(6))
        assert len({site & ~PLACES for site in named[-1]}) == 1
        np.testing.assert_array_equal(lowered.compile()(*operands), f(*operands))
    assert named[0] == named[1] and lowered_once[0] < lowered_once[1]


def test_another_program_has_other_names():
    sites = []
    for n in (8, 12):
        f, operands = _program(True, n)
        lowered = f.lower(*operands)
        call_names.name_calls(lowered.compiler_ir())
        sites.append(set(_sites(lowered)))
    assert not sites[0] & sites[1]
