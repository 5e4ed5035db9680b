"""Which GPUs run which kernels: the choice, its words, and the code in the built library."""

import dataclasses
import functools
import itertools
import pathlib
import re
import runpy
import shutil
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import pytest
from harness import make_mesh
from jax.sharding import PartitionSpec as P

import jflux
from jflux import _heap, _native
from jflux._call import ffi_targets, gpu_code, local_ops, plans, primitives, selftest_record
from jflux._call.forms import Call, choose
from jflux._call.gpu_code import FLOAT8, HOPPER, PORTABLE
from jflux._call.plans import Machine
from jflux._ops._spec import all_ops
from jflux._ops.attention import all_gather_attention, flash_attention
from jflux._ops.collectives import all_reduce
from jflux._ops.experts import routing

ROOT = pathlib.Path(__file__).resolve().parents[1]
#: The architectures of kernels of portable code, and of an op's user.
EVERY, USERS = ((least, 2**31 - 1) for least in (PORTABLE, 0))
#: Ops with kernels for compute capability 8.0 and later.
PORTABLE_OPS = (
    "activation_gradient", "all_gather", "all_gather_attention", "all_gather_grouped_matmul",
    "all_gather_matmul", "all_reduce", "all_to_all", "all_to_all_matmul", "decode_merge",
    "flash_attention", "flash_attention_backward", "flash_decode", "grouped_matmul",
    "grouped_matmul_dw", "grouped_matmul_reduce_scatter", "grouped_matmul_scaled", "latent_decode",
    "matmul", "matmul_all_reduce", "matmul_all_to_all", "matmul_reduce_scatter", "moe_combine",
    "moe_dispatch", "moe_gate", "moe_gate_gradient", "moe_route", "moe_rows", "quantize",
    "ragged_all_to_all", "reduce_scatter",
)  # fmt: skip


def of_ops():
    """Of all ops of the library."""
    names = {name.removeprefix("jflux_") for name, _, _ in _native.lib.targets()}
    return {name: _native.lib.gpus(name) for name in names | set(all_ops()) | set(PORTABLE_OPS)}


def test_each_op_says_which_gpus_its_kernels_are_for():
    gpus = of_ops()
    assert {name for name, of in gpus.items() if of == EVERY} == set(PORTABLE_OPS)
    hopper = {name for name, of in gpus.items() if of == (HOPPER, HOPPER)}
    assert hopper <= {"grouped_matmul_dw_scaled"}
    assert _native.lib.gpus("grouped_matmul_dw_scaled") == (HOPPER, HOPPER)
    # Whose kernels are their users'.
    others = set(gpus) - hopper - set(PORTABLE_OPS)
    assert {name for name, of in gpus.items() if of == USERS} == others
    assert others <= {"node_exchange", "module_call", "in_range"}
    assert set(gpu_code.portable_ops()) <= set(PORTABLE_OPS)


def test_the_choice():
    why_not = gpu_code.why_not_of
    for gpus in (USERS, EVERY, (HOPPER, HOPPER)):
        for unchecked in (False, True):
            assert why_not(gpus, HOPPER, "an H100", unchecked) is None
    assert why_not((HOPPER, HOPPER), PORTABLE, "an A100", True) == (
        "its kernels are for compute capability 9.0 (H100, H200), not for an A100"
    )
    for gpus in (USERS, EVERY):
        assert why_not(gpus, PORTABLE, "a B200", True) is None
        why = why_not(gpus, PORTABLE, "a B200", False, "it passed with driver 1")
        assert "have not been checked there" in why and "(it passed with driver 1)" in why
        assert why_not(gpus, PORTABLE, "a B200", False, "") is None
    assert "not for a B200" in why_not((HOPPER, HOPPER), PORTABLE, "a B200", False, "")


def test_the_code_of_a_gpu_that_is_not_here():
    for capability, arch in (("9.0", HOPPER), (None, HOPPER), ("8.0", PORTABLE), ("8.6", PORTABLE),
                             ("8.9", FLOAT8), ("10.0", FLOAT8), ("12.0", FLOAT8)):  # fmt: skip
        assert gpu_code.arch_of(capability) == arch


@dataclasses.dataclass
class Gpu:
    compute_capability: str
    device_kind: str = "a GPU"
    local_hardware_id: int = 0


@pytest.fixture
def gpus(monkeypatch):
    """Sets this process's GPUs, and the code that each of them runs."""

    def set_(capabilities, archs):
        found = [Gpu(c, local_hardware_id=i) for i, c in enumerate(capabilities)]
        monkeypatch.setattr(gpu_code, "gpus", lambda: found)

        def cuda_arch(ordinal):
            if archs[ordinal] is None:
                raise RuntimeError("no kernel image")
            return archs[ordinal]

        lib = types.SimpleNamespace(
            built_with_cuda=lambda: True, cuda_arch=cuda_arch, gpus=_native.lib.gpus
        )
        monkeypatch.setattr(_native, "lib", lib)
        monkeypatch.setattr(_heap, "lib", lib)
        forget()

    def forget():
        for cached in (gpu_code.arch_here, _heap._why_no_cuda, selftest_record.here):
            cached.cache_clear()

    yield set_
    forget()


def test_the_code_of_this_process(gpus):
    gpus([], [])
    assert gpu_code.arch_here() == HOPPER
    gpus(["9.0", "9.0"], [90, 90])
    assert gpu_code.arch_here() == HOPPER and _heap._why_no_cuda() is None
    gpus(["9.0", "8.0"], [90, 80])
    assert gpu_code.arch_here() == PORTABLE and _heap._why_no_cuda() is None
    gpus(["7.5"], [80])
    assert _heap._why_no_cuda() == "a GPU (compute capability 7.5): kernels need 8.0 or later"
    gpus(["9.0"], [None])
    assert _heap._why_no_cuda() == (
        "a GPU (compute capability 9.0) does not run jflux's kernels: no kernel image. "
        "A build from source may have none for it: JFLUX_CUDA=ON pip install . compiles them for "
        "all GPUs"
    )


def test_what_a_source_build_compiles():
    finder = runpy.run_path(str(ROOT / "build_backend" / "find_architectures.py"))
    assert finder["architectures"](["9.0", "9.0"]) == "90a-real"
    for capabilities in ([], ["8.0"], ["9.0", "8.6"], ["10.0"]):
        assert finder["architectures"](capabilities) == "80;90a-real"


@pytest.mark.parametrize("unchecked", [False, True])
def test_local_ops(gpus, unchecked):
    x = jax.ShapeDtypeStruct((64,), jnp.int32)
    few, many = (
        routing.Params(num_experts=experts, capacity=-1) for experts in (64, routing._MOST_EXPERTS)
    )

    def plan_of(form, params):
        return choose([form], Call([x], params), Machine("cuda"))[0]

    route = local_ops.kernel(
        "moe_route", why_not=routing._why_not, why_not_portable=routing._why_not_portable,
        attributes=None, checked_on_gpus=True,
    )  # fmt: skip
    of_hopper = local_ops.kernel(
        "grouped_matmul_dw_scaled", why_not=routing._why_not, attributes=None, checked_on_gpus=True
    )
    with jflux.config(unchecked_kernels=unchecked):
        gpus(["9.0"], [90])
        for params in (few, many):
            assert plan_of(route, params).path == "fused"
        gpus(["12.0"], [80])
        plan = plan_of(route, few)
        assert (plan.path == "fused") == unchecked
        assert unchecked or "compiled for a GPU and have not been checked" in plan.reason
        plan = plan_of(route, many)
        assert plan.path == "reference" and plan.unsupported
        assert not unchecked or "the kernel takes up to 720 on GPUs other" in plan.reason
        plan = plan_of(of_hopper, few)
        assert "kernels are for compute capability 9.0" in plan.reason and plan.unsupported


def test_local_ops_of_a_recorded_machine(gpus, monkeypatch, tmp_path):
    monkeypatch.setenv("JFLUX_TUNING_DIR", str(tmp_path))
    monkeypatch.setattr(gpu_code, "driver", lambda: "580.1")
    form = local_ops.kernel(
        "moe_route", why_not=local_ops.takes_all, attributes=None, checked_on_gpus=True
    )

    def plan_on(capability, arch):
        gpus([capability], [arch])
        return choose([form], Call([], None), Machine("cuda"))[0]

    with jflux.config(unchecked_kernels=False):
        assert "(it has not passed here)" in plan_on("8.0", 80).reason
        selftest_record.store(selftest_record.key_here(), 1, "2026-11-30")
        plan = plan_on("8.0", 80)
        assert plan.path == "fused"
        assert plan.reason.endswith("in portable code, which jflux.selftest has checked here")
        assert "portable" not in plan_on("9.0", 90).reason
        # Processes of a job would have to know of each other.
        monkeypatch.setattr(jax, "process_count", lambda: 2)
        plan = plan_on("8.0", 80)
        assert plan.path == "reference" and "after jflux.init()" in plan.reason
        monkeypatch.setattr(jax, "process_count", lambda: 1)
        monkeypatch.setattr(gpu_code, "driver", lambda: "580.2")
        assert "it passed with driver 580.1, and this is 580.2" in plan_on("8.0", 80).reason
        selftest_record.path("a GPU").write_text("{")
        assert "its record cannot be read" in plan_on("8.0", 80).reason
    with jflux.config(unchecked_kernels=True):
        assert plan_on("8.0", 80).reason.endswith("which unchecked_kernels takes")


def with_cuda(monkeypatch):
    """Makes a library without GPU kernels say that it has them."""
    names = {name: getattr(_native.lib, name) for name in dir(_native.lib)}
    lib = types.SimpleNamespace(**names | {"built_with_cuda": lambda: True})
    monkeypatch.setattr(_native, "lib", lib)


def calls_on(arch, monkeypatch, f, *args):
    """The calls of a function over a mesh, as GPUs plan them that run this code."""
    machine = Machine("cuda", sm_count=108, link_gbps=250, device_kind="an A100", arch=arch)
    found = []

    def plan_call(op, avals, avals_out, params, platform, mesh):
        found.append((op.name, primitives.choose_on(op, Call(avals, params), machine)[0]))
        return primitives.Planned(plans.reference("planned"))

    monkeypatch.setattr(primitives, "plan_call", plan_call)
    jax.clear_caches()
    jax.jit(f).lower(*args)
    return dict(found)


@pytest.mark.skipif(jax.device_count() < 2, reason="one device")
def test_ops_with_portable_code_take_it(monkeypatch):
    mesh = make_mesh((2,))

    def five(x, w):
        y = jflux.all_gather_matmul(x, w, axis_name="tp")
        y = jflux.matmul_all_to_all(y, w, axis_name="tp", split_axis=1, concat_axis=0)
        y = jflux.all_to_all_matmul(y, w, axis_name="tp", split_axis=0, concat_axis=1)
        y = jflux.matmul_all_reduce(y, jnp.ones((1024, 8192), y.dtype), axis_name="tp")
        return jflux.all_reduce(y[:64, :64], axis_name="tp")

    f = jax.shard_map(five, mesh=mesh, in_specs=(P("tp"), P()), out_specs=P(), check_vma=False)
    x, w = (jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16) for _ in range(2))
    with jflux.config(unchecked_kernels=True, always=True):
        planned = calls_on(PORTABLE, monkeypatch, f, x, w)
    assert {plan.path for plan in planned.values()} == {"fused"}, planned
    for op in set(planned) - {"all_reduce"}:
        tile_n, cluster_m, _, splits, portable = planned[op].choice
        assert (tile_n, cluster_m, splits, portable) == (128, 1, 1, 1)
    with jflux.config(unchecked_kernels=False):
        planned = calls_on(PORTABLE, monkeypatch, f, x, w)
    for op in ("all_reduce", "all_gather_matmul"):
        assert "unchecked_kernels=True" in planned[op].reason


@pytest.mark.parametrize("no_record", ["", "it passed with driver 1, and this is 2"])
def test_ops_over_ranks_of_a_recorded_machine(no_record, monkeypatch):
    """The job's record is a number of the machine, which all processes know."""
    for name, value in {"kernel_arch": PORTABLE, "no_record": no_record, "sm_count": 108,
                        "link_gbps": 250.0, "no_atomics": ""}.items():  # fmt: skip
        monkeypatch.setattr(_heap, name, lambda value=value: value)
    machine = plans.machine_of("cuda", make_mesh((1,)))
    assert machine.no_record == no_record
    with jflux.config(unchecked_kernels=False):
        why = machine.why_no_kernel("all_reduce")
        assert why is None if not no_record else no_record in why
        assert "compute capability 9.0" in machine.why_no_kernel("grouped_matmul_dw_scaled")
        fused = plans.Plan(plans.Path.FUSED, "because")
        said = plans.in_portable_code(fused, machine.arch, machine.no_record).reason
        by = "" if no_record else "; in portable code, which jflux.selftest has checked here"
        assert said == f"because{by}"
        assert plans.in_portable_code(fused, HOPPER, "") is fused
        other = plans.reference("lax is as fast")
        assert plans.in_portable_code(other, machine.arch, "") is other


@pytest.mark.skipif(jax.device_count() < 2, reason="one device")
@pytest.mark.parametrize("op", [jflux.all_gather_matmul, jflux.matmul_reduce_scatter])
def test_what_portable_products_multiply(op, monkeypatch):
    """16 bits, and float32 as TF32 where the precision allows it; on Hopper XLA has that."""
    mesh = make_mesh((2,))

    def plan_on(arch, dtype, **options):
        f = functools.partial(op, axis_name="tp", **options)
        f = jax.shard_map(f, mesh=mesh, in_specs=P(), out_specs=P("tp"), check_vma=False)
        x, w = (jax.ShapeDtypeStruct((256, 256), dtype) for _ in range(2))
        with jflux.config(unchecked_kernels=True, always=True):
            (plan,) = calls_on(arch, monkeypatch, f, x, w).values()
        return plan

    for dtype in (jnp.bfloat16, jnp.float16, jnp.float32):
        plan = plan_on(PORTABLE, dtype)
        assert plan.path == "fused" and plan.config["portable"] == 1, plan
    assert "portable" not in plan_on(HOPPER, jnp.bfloat16).config
    exact = plan_on(PORTABLE, jnp.float32, precision="highest")
    assert exact.path == "reference" and "precision=highest forbids" in exact.reason
    with jax.default_matmul_precision("float32"):
        assert plan_on(PORTABLE, jnp.float32).path == "reference"
    on_hopper = plan_on(HOPPER, jnp.float32)
    assert on_hopper.path == "reference" and "half of the rate" in on_hopper.reason
    in_16_bits = {"preferred_element_type": jnp.bfloat16}
    for arch, dtype, taken in ((PORTABLE, jnp.int8, True), (PORTABLE, jnp.float8_e4m3fn, False),
                               (FLOAT8, jnp.float8_e4m3fn, True)):  # fmt: skip
        plan = plan_on(arch, dtype, **in_16_bits)
        assert (plan.path == "fused") == taken
        assert taken or "from compute capability 8.9 on" in plan.reason
    exact = plan_on(FLOAT8, jnp.float8_e4m3fn, precision="highest", **in_16_bits)
    assert exact.path == "decomposed" and "fewer bits" in exact.reason


def scaled(dtype, block):
    """x and w, with scales of such blocks of k."""
    return [
        jax.eval_shape(
            functools.partial(jflux.quantize, dtype=dtype, block=of_one),
            jax.ShapeDtypeStruct((256, 256), jnp.float32),
        )
        for of_one in (block, (128, 128) if block[1] == 128 else block[::-1])
    ]


@pytest.mark.skipif(jax.device_count() < 2, reason="one device")
@pytest.mark.parametrize("op", [jflux.all_gather_matmul, jflux.matmul_reduce_scatter])
def test_scales_in_portable_code(op, monkeypatch):
    """Of rows, columns and tensors: those of blocks, and quantised results, are Hopper's."""
    mesh = make_mesh((2,))

    def plan_on(arch, dtype, block, **options):
        f = functools.partial(op, axis_name="tp", **options)
        f = jax.shard_map(f, mesh=mesh, in_specs=P(), out_specs=P("tp"), check_vma=False)
        with jflux.config(unchecked_kernels=True, always=True):
            return calls_on(arch, monkeypatch, f, *scaled(dtype, block))[op.__name__]

    for block in ((1, -1), (-1, -1)):
        for arch, dtype in ((PORTABLE, jnp.int8), (FLOAT8, jnp.int8), (FLOAT8, jnp.float8_e4m3fn)):
            assert plan_on(arch, dtype, block).config["portable"] == 1
    plan = plan_on(PORTABLE, jnp.float8_e4m3fn, (1, -1))
    assert plan.path == "decomposed" and "compute capability 8.9" in plan.reason
    plan = plan_on(FLOAT8, jnp.float8_e4m3fn, (1, 128))
    assert plan.path == "decomposed" and "Hopper's kernels alone" in plan.reason
    if op is jflux.all_gather_matmul:
        form = jflux.Format(jnp.float8_e4m3fn, (1, 128))
        assert plan_on(FLOAT8, jnp.float8_e4m3fn, (1, -1), quantize=form).path == "fused"


def test_matmul_in_portable_code(monkeypatch):
    """The plan names the portable loop, and what it does not take is XLA's."""
    with_cuda(monkeypatch)

    def plan_on(arch, dtype, block, **options):
        monkeypatch.setattr(gpu_code, "arch_here", lambda: arch)
        with jflux.config(unchecked_kernels=True):
            f = functools.partial(jflux.matmul, **options)
            return calls_on(arch, monkeypatch, f, *scaled(dtype, block))["matmul"]

    for arch, dtype in ((PORTABLE, jnp.int8), (FLOAT8, jnp.int8), (FLOAT8, jnp.float8_e4m3fn)):
        plan = plan_on(arch, dtype, (1, -1))
        assert plan.path == "fused" and list(plan.choice)[::2] == [128, 2, 1], plan
    assert list(plan_on(HOPPER, jnp.float8_e4m3fn, (1, -1)).choice) == [0, 0, 0, 0]
    plan = plan_on(PORTABLE, jnp.float8_e4m3fn, (1, -1))
    assert plan.path == "reference" and "compute capability 8.9" in plan.reason
    plan = plan_on(FLOAT8, jnp.float8_e4m3fn, (1, 128))
    assert plan.path == "reference" and "Hopper's kernels alone" in plan.reason
    form = jflux.Format(jnp.float8_e4m3fn, (1, 128))
    plan = plan_on(FLOAT8, jnp.float8_e4m3fn, (1, -1), quantize=form)
    assert plan.path == "decomposed" and "only Hopper's kernels quantise" in plan.reason


def test_grouped_matmul_with_scales_in_portable_code(monkeypatch):
    """As `matmul`; what its kernels do not take are products of values in bfloat16, of int8 the
    reference."""
    with_cuda(monkeypatch)

    def plan_on(arch, dtype, block, **options):
        monkeypatch.setattr(gpu_code, "arch_here", lambda: arch)
        x, w = scaled(dtype, block)
        ws = jax.eval_shape(lambda w: jax.tree.map(lambda a: jnp.stack([a, a]), w), w)
        f = functools.partial(jflux.grouped_matmul, **options)
        with jflux.config(unchecked_kernels=True):
            sizes = jax.ShapeDtypeStruct((2,), jnp.int32)
            return calls_on(arch, monkeypatch, f, x, ws, sizes)["grouped_matmul_scaled"]

    for arch, dtype in ((PORTABLE, jnp.int8), (FLOAT8, jnp.int8), (FLOAT8, jnp.float8_e4m3fn)):
        for block in ((1, -1), (-1, -1)):
            plan = plan_on(arch, dtype, block)
            assert plan.path == "fused" and "portable code" in plan.reason, plan
    plan = plan_on(PORTABLE, jnp.float8_e4m3fn, (1, -1))
    assert plan.path == "decomposed" and "compute capability 8.9" in plan.reason
    for dtype, path in ((jnp.float8_e4m3fn, "decomposed"), (jnp.int8, "reference")):
        plan = plan_on(FLOAT8, dtype, (1, 128))
        assert plan.path == path
    assert plan_on(HOPPER, jnp.float8_e4m3fn, (1, 128)).path == "fused"
    form = jflux.Format(jnp.float8_e4m3fn, (1, 128))
    plan = plan_on(FLOAT8, jnp.float8_e4m3fn, (1, -1), quantize=form)
    assert plan.path == "decomposed" and "only Hopper's kernels quantise" in plan.reason


@pytest.mark.parametrize("arch", [PORTABLE, HOPPER])
def test_a_latent_cache_in_portable_code(arch, monkeypatch):
    """The handler is told which of two kernels to launch."""
    with_cuda(monkeypatch)
    monkeypatch.setattr(gpu_code, "arch_here", lambda: arch)
    monkeypatch.setattr(ffi_targets, "register_targets", lambda _: None)
    q, k, lengths = (
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in (
            ((2, 16, 576), jnp.bfloat16), ((2, 128, 1, 576), jnp.bfloat16), ((2,), jnp.int32)
        )
    )  # fmt: skip
    f = jax.jit(functools.partial(jflux.flash_decode, value_width=512))
    with jflux.config(unchecked_kernels=True, strict=True):
        text = f.trace(q, k, None, lengths).lower(lowering_platforms=("cuda",)).as_text()
    (line,) = (a for a in text.splitlines() if "@jflux_latent_decode(" in a)
    assert f"portable = {'false' if arch == HOPPER else 'true'}" in line


@pytest.mark.skipif(jax.device_count() < 2, reason="one device")
def test_attention_in_portable_code(monkeypatch):
    """The forward pass over ranks; cuDNN is not asked about on this platform. The plan's machine
    counts, and not this process's GPUs: it may be a topology."""
    f = functools.partial(jflux.attention, axis_name="tp", causal=True, softcap=30.0)
    f = jax.shard_map(f, mesh=make_mesh((2,)), in_specs=P(None, "tp"), out_specs=P(None, "tp"))
    qkv = [jax.ShapeDtypeStruct((1, 512, 4, 128), jnp.bfloat16) for _ in range(3)]
    params = flash_attention.Params(flash_attention.Scores(0.1), jnp.dtype(jnp.bfloat16), None)

    def is_portable(plan):
        return all_gather_attention._attributes(qkv, params, plan)["portable"]

    for unchecked in (True, False):
        with jflux.config(unchecked_kernels=unchecked, always=True):
            plan = calls_on(PORTABLE, monkeypatch, f, *qkv)["all_gather_attention"]
        assert (plan.path == "fused") == unchecked
        assert unchecked or "unchecked_kernels=True" in plan.reason
        assert is_portable(plan) == unchecked
    monkeypatch.setattr(gpu_code, "arch_here", lambda: PORTABLE)
    plan = calls_on(HOPPER, monkeypatch, f, *qkv)["all_gather_attention"]
    assert plan.senders > 0 and not is_portable(plan)


@pytest.mark.parametrize("unchecked", [False, True])
def test_passes_of_attention_in_portable_code(monkeypatch, unchecked):
    q, k = (jax.ShapeDtypeStruct((1, 256, heads, 128), jnp.bfloat16) for heads in (4, 2))
    params = flash_attention.Params(flash_attention.Scores(0.1), q.dtype, None)

    def plan_on(arch, op):
        monkeypatch.setattr(gpu_code, "arch_here", lambda: arch)
        return choose(op.forms, Call([q, k, k], params), Machine("cuda"))[0]

    with_cuda(monkeypatch)
    with jflux.config(unchecked_kernels=unchecked):
        for op in (flash_attention._FORWARD, flash_attention._BACKWARD):
            plan = plan_on(PORTABLE, op)
            assert plan.path == ("fused" if unchecked else "reference")
            assert ("unchecked_kernels takes" in plan.reason) == unchecked
            assert plan_on(HOPPER, op).path == "fused"


@pytest.mark.skipif(jax.device_count() < 2, reason="one device")
def test_a_dispatch_in_portable_code_has_smaller_tables(monkeypatch):
    """A CTA has 96 KiB for them, not 224."""
    mesh = make_mesh((2,))

    def there_and_back(x, indices, weights, num_experts):
        d = jflux.moe_dispatch(
            x, indices, weights, num_experts=num_experts, axis_name="tp", partial_sums=True
        )
        return jflux.moe_combine(d.rows, d.handle, axis_name="tp")

    def planned(arch, tokens, experts):
        f = functools.partial(there_and_back, num_experts=experts)
        f = jax.shard_map(f, mesh=mesh, in_specs=P("tp"), out_specs=P("tp"), check_vma=False)
        columns = ((256, jnp.bfloat16), (4, jnp.int32), (4, jnp.float32))
        operands = [jax.ShapeDtypeStruct((2 * tokens, n), dtype) for n, dtype in columns]
        with jflux.config(unchecked_kernels=True, always=True):
            return calls_on(arch, monkeypatch, f, *operands)

    for arch in (PORTABLE, HOPPER):
        found = planned(arch, 1024, 64)
        assert found["moe_dispatch"].path == found["moe_combine"].path == "fused"
    assert planned(HOPPER, 4096, 256)["moe_dispatch"].path == "fused"
    found = planned(PORTABLE, 4096, 256)
    assert found["moe_dispatch"].path == "decomposed" and found["moe_combine"].path == "fused"
    assert "do not fit into an SM's shared memory" in found["moe_dispatch"].reason


@pytest.mark.parametrize("arch", [PORTABLE, HOPPER])
def test_a_norm_needs_clusters(arch):
    x = jax.ShapeDtypeStruct((8, 1024), jnp.bfloat16)
    machine = Machine("cuda", sm_count=108, link_gbps=250, arch=arch)
    call = {"world": 2, "count": x.size, "dtype": _native.dtype_number(x.dtype), "width": 1024,
            "algorithm": -1}  # fmt: skip
    plan = machine.native_plan(all_reduce.OP, call)
    assert bool(plan["fits_norm"]) == (arch == HOPPER) and plan["algorithm"] >= 0
    assert Machine("cpu").native_plan(all_reduce.OP, call)["fits_norm"]


def test_what_the_doctor_says():
    assert gpu_code.report(HOPPER, "an H100", ["all_reduce"], False) == []
    portable = ["all_reduce", "moe_route"]
    for taken, no_record in itertools.product((False, True), ("it passed with driver 1", "")):
        first, second = gpu_code.report(PORTABLE, "an A100", portable, taken, no_record)
        assert first.startswith("kernels: compiled for an A100, ")
        if no_record:
            assert "run python -m jflux.selftest (it passed with driver 1)" in first
            assert "'jflux on another GPU'" in first
        else:
            assert first.endswith("and checked here by python -m jflux.selftest")
        assert second.endswith(": all_reduce, moe_route; other ops take lax")
        assert ("unchecked_kernels=True" in second) == (no_record != "" and not taken)
    template = ROOT / ".github/ISSUE_TEMPLATE/another_gpu.yml"
    assert template.read_text().startswith("name: jflux on another GPU\n")


# ---- What is compiled ----------------------------------------------------------------------------


def symbols(library, arch):
    """Sources that functions of the library's code for `arch` come from, and all functions."""
    listed = subprocess.run(
        ["cuobjdump", "--dump-elf-symbols", "-arch", arch, library],
        check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    # FUNC and ENTRY of CUDA 13 are STT_FUNC and STO_ENTRY of CUDA 12.
    functions = re.findall(r"^(?:STT_)?FUNC .*ENTRY +(\S+)$", listed, re.M)
    named = (re.search(r"_GLOBAL__N__[0-9a-f]+_\d+_(\w+?)_cu_", f) for f in functions)
    return {match[1] for match in named if match}, functions


@pytest.mark.skipif(
    not _native.lib.built_with_cuda() or shutil.which("cuobjdump") is None,
    reason="needs a build with CUDA, and cuobjdump",
)
def test_the_library_has_the_code_that_ops_declare(tmp_path):
    library = pathlib.Path(_native.lib.__file__).with_name("libjflux_core.so")
    files = subprocess.run(
        [sys.executable, ROOT / "build_backend/kernel_files.py", "portable", tmp_path],
        check=True, capture_output=True, text=True,
    ).stdout.strip().split(";")  # fmt: skip
    portable = {pathlib.Path(f).stem for f in files if "/cc/ops/" in f}
    # Those of the portable main loop have no names that tell their file.
    portable = {stem for stem in portable if not stem.endswith("_sm80")}
    products = ("23AllGatherMatmul", "27MatmulReduceScatter", "14Matmul", "21GroupedMatmul")

    def loops(functions, named):
        return {p for p in products for f in functions if f"{p}Kernel80I" in f and named in f}

    for arch in ("sm_80", "sm_90a"):
        sources, functions = symbols(library, arch)
        assert portable <= sources and loops(functions, "") == set(products)
        assert any("MatmulKernelI" in f for f in functions) == (arch == "sm_90a")
    assert loops(symbols(library, "sm_89")[1], "fp8_e4m3") == set(products)
    ptx = subprocess.run(
        ["cuobjdump", "--list-ptx", library], check=True, capture_output=True, text=True
    ).stdout
    assert set(re.findall(r"sm_(\w+)\.ptx", ptx)) == {"80", "89"}
