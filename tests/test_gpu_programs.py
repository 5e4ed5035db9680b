"""Programs for GPUs can be lowered without one, and say what they would call."""

import jax
import pytest
from gpu_programs import all_programs, as_on_gpus, kernels_of
from harness import PLATFORM, make_mesh
from jax.sharding import PartitionSpec as P

import jflux
from jflux import _native

pytestmark = pytest.mark.skipif(PLATFORM == "gpu", reason="what is lowered there is run there")


@pytest.fixture(scope="module")
def programs():
    return dict(all_programs(60))


def test_calls_of_all_kinds_are_lowered(programs):
    calls = [what for what in programs if "gradient" not in what]
    assert len(calls) == 2 * 60 and len(programs) == 120 + 2 * 20
    found = set().union(*map(kernels_of, programs.values()))
    products = {f"jflux_{op}" for op in ("all_gather_matmul", "matmul_reduce_scatter")}
    assert products | {"jflux_all_reduce", "jflux_all_to_all", "jflux_ragged_all_to_all"} <= found
    # Kernels for CPUs alone are not among them, and without `always` some calls take none.
    assert any(kernels_of(text) for text in programs.values())
    assert any(not kernels_of(text) for what, text in programs.items() if "always=False" in what)


def test_they_are_the_same_again(programs):
    again = dict(all_programs(12))
    assert again == {what: programs[what] for what in again}


def test_what_a_call_becomes():
    f = jax.shard_map(
        lambda x, w: jflux.all_gather_matmul(x, w, axis_name="tp"),
        mesh=make_mesh((2,)), in_specs=(P("tp"), P(None, "tp")), out_specs=P(None, "tp"),
    )  # fmt: skip
    x, w = (jax.ShapeDtypeStruct(s, "bfloat16") for s in ((4096, 8192), (8192, 8192)))

    def text():
        return jax.jit(f).trace(x, w).lower(lowering_platforms=("cuda",)).as_text()

    with as_on_gpus():
        assert _native.lib.built_with_cuda()
        assert kernels_of(text()) == {"jflux_all_gather_matmul"}
        jax.clear_caches()
        with jflux.config(fused=False):
            assert kernels_of(text()) == set()
    jax.clear_caches()
