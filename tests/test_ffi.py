"""What the ops lower to: one custom call each, and products more in each backward pass."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import (
    DEVICES,
    PLATFORM,
    PRODUCTS,
    RANKS,
    compiled_text,
    dots,
    fused_calls,
    kernel_rows,
    make_mesh,
    of_way,
)
from jax.sharding import PartitionSpec as P

import jflux
from jflux import _native
from jflux._call import ffi_targets
from jflux._ops._spec import all_ops
from jflux._stress.calls import Call, operands, per_device

pytestmark = pytest.mark.usefixtures("small_sums")
GATHER = Call("all_gather_matmul", lead=(6,), k=16, n=12, dtype=jnp.bfloat16)
SCATTER = Call("matmul_reduce_scatter", lead=(6,), k=16, n=12, dtype=jnp.bfloat16)


def each_call_of_a_kernel(test):
    """By `call`: each product, in each of its ways, of sizes that its kernel takes everywhere."""
    rows = {op: (kernel_rows(op),) for op in PRODUCTS}
    calls = [
        of_way(op, way, lead=rows[op], k=16, n=24, dtype=jnp.bfloat16)
        for op in PRODUCTS
        for way in range(len(all_ops()[op].ways))
    ]
    return pytest.mark.parametrize("call", calls, ids=lambda call: f"{call.op} {call}")(test)


def _check_vma(call):
    """Whether gradients take the op's own collectives only without tracked types: what all ranks
    have the same of needs none with them (test_matmul_all_reduce.py)."""
    return call.collective.kind != "all_reduce"


def _products_for_gradients(call):
    """How many XLA computes: that for dw, and that for dx if no kernel computes it."""
    return 1 if set(call.spec.gradient) & set(PRODUCTS) else 2


def _collectives(text: str) -> int:
    names = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
    return sum(text.count(f" {name}(") + text.count(f" {name}-start(") for name in names)


def _program(call, mesh=None, **options):
    mesh = mesh or make_mesh((RANKS,))
    return per_device(mesh, call.bind("tp"), **options), operands(call, mesh, "tp")


@each_call_of_a_kernel
@pytest.mark.parametrize("check_vma", [True, False])
def test_forward_is_one_custom_call_and_nothing_else(call, check_vma):
    f, args = _program(call, check_vma=check_vma)
    text = compiled_text(f, *args)
    assert fused_calls(text) == [call.op]
    assert _collectives(text) == 0
    if PLATFORM == "cpu":  # elsewhere products have other names
        assert dots(text) == 0


@each_call_of_a_kernel
@pytest.mark.parametrize("transpose_rhs", [False, True])
def test_backward_is_the_dual_call_and_the_products(call, transpose_rhs):
    call = dataclasses.replace(call, transpose_rhs=transpose_rhs)
    f, (x, w) = _program(call, check_vma=_check_vma(call))

    def step(x, w, dy):
        y, pull = jax.vjp(f, x, w)
        return y, *pull(dy)

    text = compiled_text(step, x, w, jnp.zeros((RANKS, *call.y_shape(RANKS)), call.dtype))
    assert sorted(fused_calls(text)) == sorted([call.op, *call.spec.gradient])
    assert _collectives(text) == 0
    if PLATFORM == "cpu":
        assert dots(text) == _products_for_gradients(call)
        if _products_for_gradients(call) == 1 and not call.is_exchange:
            # No copy of the weight: transposing is the kernel's business.
            assert "bf16[24,16]" not in text or "bf16[16,24]" not in text


@each_call_of_a_kernel
def test_gradient_of_x_alone(call):
    """A frozen weight: the product for dw is not made, nor is x kept for it."""
    f, (x, w) = _program(call, check_vma=_check_vma(call))

    def step(x, w, dy):
        y, pull = jax.vjp(lambda x: f(x, w), x)
        return y, *pull(dy)

    text = compiled_text(step, x, w, jnp.zeros((RANKS, *call.y_shape(RANKS)), call.dtype))
    assert sorted(fused_calls(text)) == sorted([call.op, *call.spec.gradient])
    if PLATFORM == "cpu":
        assert dots(text) == _products_for_gradients(call) - 1


@each_call_of_a_kernel
@pytest.mark.parametrize("batched", ["x", "w"])
def test_vmap_of_one_operand_is_one_call(call, batched):
    """A batch of x is one more leading dimension, a batch of w one wider w."""
    if batched == "w" and call.collective.kind == "all_reduce":
        pytest.skip("one call sums the product with one w")
    mesh = make_mesh((RANKS,))
    x, w = operands(call, mesh, "tp")
    axes = (0 if "x" in batched else None, 0 if "w" in batched else None)
    arrays = [
        np.stack([a] * 3, axis=1) if name in batched else a
        for name, a in zip("xw", (x, w), strict=True)
    ]
    f = per_device(mesh, jax.vmap(call.bind("tp"), in_axes=axes))
    text = compiled_text(f, *arrays)
    assert fused_calls(text) == [call.op]
    assert " while(" not in text


def test_equal_calls_are_one():
    """The ops are pure: XLA may share and drop calls."""
    mesh = make_mesh((RANKS,))
    op = GATHER.bind("tp")
    args = operands(GATHER, mesh, "tp")
    text = compiled_text(per_device(mesh, lambda x, w: (op(x, w), op(x + 0, w))[0]), *args)
    assert len(fused_calls(text)) == 1


def test_mlp_is_two_calls_forward_and_two_back():
    """What Megatron's sequence-parallel layer needs: no other communication."""
    mesh = make_mesh((RANKS,))

    def mlp(x, w1, w2):
        h = jax.nn.gelu(jflux.all_gather_matmul(x, w1, axis_name="tp"))
        return jflux.matmul_reduce_scatter(h, w2, axis_name="tp")

    f = jax.shard_map(mlp, mesh=mesh, in_specs=(P("tp"), P(None, "tp"), P("tp")), out_specs=P("tp"))
    x, w1, w2 = (jnp.ones(s, jnp.bfloat16) for s in ((8 * RANKS, 16), (16, 32), (32, 16)))

    def step(x, w1, w2):
        return jax.value_and_grad(lambda *a: jnp.sum(f(*a).astype(jnp.float32) ** 2), (0, 1, 2))(
            x, w1, w2
        )

    assert fused_calls(compiled_text(f, x, w1, w2)) == [GATHER.op, SCATTER.op]
    text = compiled_text(step, x, w1, w2)
    assert sorted(fused_calls(text)) == sorted(2 * [GATHER.op, SCATTER.op])
    if PLATFORM == "cpu":
        assert dots(text) == 2


def test_group_table_in_the_program_is_the_mesh_of_the_call():
    for order in ([1, 0], [0, 1], [RANKS - 1, 0]):
        f, args = _program(GATHER, make_mesh((2,), order=order))
        ids = ", ".join(str(DEVICES[i].id) for i in order)
        text = jax.jit(f).lower(*args).as_text()
        assert f"groups = dense<[{ids}]>" in text or f"groups = array<i64: {ids}>" in text


# ---- Types under check_vma -----------------------------------------------------------------------


@pytest.mark.parametrize("op", PRODUCTS)
def test_results_vary_over_the_axis_and_what_operands_vary_over(op):
    spec, mesh, seen = all_ops()[op], make_mesh((2, RANKS // 2), ("dp", "tp")), []
    own = frozenset() if of_way(op).collective.kind == "all_reduce" else frozenset({"tp"})
    x_spec, w_spec, _ = spec.partition("tp", **spec.ways[0])

    def body(x, w):
        f = functools.partial(spec.function, axis_name="tp", **spec.ways[0])
        for operand in (x, jax.lax.pcast(x, "dp", to="varying")):
            seen.append(jax.typeof(f(operand, w)).manual_axis_type.varying)
        return jax.lax.pcast(x, "dp", to="varying")

    shape = jnp.zeros((2 * RANKS, 2 * RANKS), jnp.bfloat16)
    f = jax.shard_map(body, mesh=mesh, in_specs=(x_spec, w_spec), out_specs=P(("dp", "tp")))
    jax.eval_shape(f, shape, shape)
    assert seen == [own, own | {"dp"}]


@pytest.mark.parametrize(
    "op", [op for op in PRODUCTS if of_way(op).collective.kind != "all_reduce"]
)
@pytest.mark.parametrize("specs", [(P(), P()), (P("dp"), P()), (P(), P("dp"))])
def test_wrong_out_specs_are_refused(op, specs):
    """A result that varies over the axis cannot be passed off as replicated on it."""
    mesh, call = make_mesh((2, RANKS // 2), ("dp", "tp")), of_way(op)
    f = jax.shard_map(call.bind("tp"), mesh=mesh, in_specs=specs, out_specs=P("dp"))
    world = RANKS // 2
    shapes = [
        (2 * shape[0] if spec == P("dp") else shape[0], shape[1])
        for shape, spec in zip((call.x_shape(world), call.w_shape(world)), specs, strict=True)
    ]
    with pytest.raises(ValueError, match="tp"):
        jax.eval_shape(f, *(jnp.zeros(shape, jnp.float32) for shape in shapes))


def test_result_types():
    mesh = make_mesh((RANKS,))
    for op in PRODUCTS:
        for out in (None, jnp.float32):
            f = per_device(mesh, of_way(op, dtype=jnp.bfloat16, out=out).bind("tp"))
            y = jax.eval_shape(f, *operands(of_way(op, dtype=jnp.bfloat16), mesh, "tp"))
            assert y.dtype == (out or jnp.bfloat16)
            assert not y.weak_type


# ---- Targets -------------------------------------------------------------------------------------


def test_every_op_has_a_target_on_the_cpu():
    names = {(name, platform) for name, platform, _ in _native.lib.targets()}
    for op in all_ops():
        assert (f"jflux_{op}", "cpu") in names
        assert not _native.lib.built_with_cuda() or (f"jflux_{op}", "CUDA") in names


def _call_target(x, w, groups, result, **wrong):
    """The CPU target by hand, with a table, a plan or attributes that jflux would not have made.

    An attribute that is `wrong` may be None: then it is left out.
    """
    ffi_targets.register_targets("cpu")
    number = _native.dtype_number(x.dtype)
    sizes = {"world": len(groups), "outer": 1, "inner": x.shape[0], "k": x.shape[1], "n": 5}
    types = {"dtype": number, "out_dtype": number, "transpose_rhs": 0}
    plan = _native.plan("all_gather_matmul", sizes | types, 0, 0.0)
    own = {
        "activation": np.int64(0), "biased": np.zeros(1, np.int64), "choice": np.zeros(4, np.int64),
        "gated": False, "groups": np.array(groups, np.int64), "inner": np.int64(x.shape[0]),
        "outer": np.int64(1), "quantize": np.int64(0), "senders": np.int64(0),
        "site": np.int64(1), "scales": np.int64(0), "sm_count": np.int64(0), "sums": False,
        "transpose_rhs": False,
        "workspace_bytes": np.int64(plan["workspace_bytes"]), "world": np.int64(len(groups)),
    }  # fmt: skip
    attributes = {name: value for name, value in (own | wrong).items() if value is not None}
    return jax.ffi.ffi_call("jflux_all_gather_matmul", result)(x, w, **attributes)


@pytest.mark.skipif(PLATFORM != "cpu", reason="calls the CPU's handler")
@pytest.mark.parametrize(
    "groups, result, wrong, message",
    [
        ([6, 7], (6, 5), {}, "in none of the call's groups"),
        ([0, 1], (7, 5), {}, "operands do not fit"),
        ([0, 12345], (6, 5), {}, "device 12345 is not part of the symmetric heap"),
        ([0, 1], (6, 5), {"choice": np.array([192, 2, 8, 1])}, "malformed plan"),
        ([0, 1], (6, 5), {"choice": np.zeros(3, np.int64)}, "malformed plan"),
        ([0, 1], (6, 5), {"workspace_bytes": np.int64(64)}, "and its plan has one of 64"),
        ([0, 1], (6, 5), {"world": np.int64(0)}, "`groups` is no table"),
        ([0, 1], (6, 5), {"world": np.int64(9)}, "`groups` is no table"),
        ([0, 1, 2], (9, 5), {"world": np.int64(2)}, "`groups` is no table"),
    ],
)
def test_malformed_calls_are_errors(groups, result, wrong, message):
    x, w, shape = jnp.zeros((3, 4)), jnp.zeros((4, 5)), jax.ShapeDtypeStruct(result, jnp.float32)
    f = jax.jit(lambda x, w: _call_target(x, w, groups, shape, **wrong))
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(f(x, w))


@pytest.mark.skipif(PLATFORM != "cpu", reason="calls the CPU's handler")
@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"gated": None}, "attribute `gated` is missing"),
        ({"world": None}, "attribute `world` is missing"),
        ({"gated": np.int64(0)}, "attribute `gated` is no bool"),
        ({"inner": np.int32(3)}, "attribute `inner` is no int64"),
        ({"inner": 3.0}, "attribute `inner` is no int64"),
        ({"biased": np.int64(0)}, "attribute `biased` is no array of int64"),
        ({"choice": np.zeros(4, np.int32)}, "attribute `choice` is no array of int64"),
        ({"rows": np.int64(3)}, "attribute `rows` is unknown"),
        ({"gated": None, "rows": np.int64(3)}, "attribute `gated` is missing"),
    ],
)
def test_attributes_go_by_name(wrong, message):
    x, w, shape = jnp.zeros((3, 4)), jnp.zeros((4, 5)), jax.ShapeDtypeStruct((6, 5), jnp.float32)
    f = jax.jit(lambda x, w: _call_target(x, w, [0, 1], shape, **wrong))
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"jflux: all_gather_matmul: {message}"):
        jax.block_until_ready(f(x, w))


@pytest.mark.skipif(PLATFORM != "cpu", reason="GPUs have no such threads")
@each_call_of_a_kernel
def test_xla_goes_on_as_it_would_by_itself(call):
    """It flushes subnormal numbers, also on the threads of jflux that it goes on with."""
    call = dataclasses.replace(call, dtype=jnp.float32)
    f, args = _program(call)
    g = jax.jit(lambda x, w, scale: f(x, w) * scale * scale)
    for _ in range(50):
        y = np.asarray(g(*args, np.float32(3e-20)))
        assert (np.abs(y[y != 0]) >= np.finfo(np.float32).tiny).all()
    assert (y == 0).any() and (y != 0).any()  # both sides of the limit are there


@pytest.mark.parametrize(
    "flags, found",
    [
        ("", None),
        ("--xla_gpu_command_buffer_scheduling_mode=LHS", None),
        ("--xla_a=1 --xla_gpu_command_buffer_scheduling_mode=CONCURRENT --xla_b", True),
        ("--xla_gpu_command_buffer_scheduling_mode=concurrent", True),
        ("--xla_a=1 " * 40 + "--xla_gpu_command_buffer_scheduling_mode=concurrent", True),
        (  # the last one counts
            "--xla_gpu_command_buffer_scheduling_mode=CONCURRENT "
            "--xla_gpu_command_buffer_scheduling_mode=SERIALIZE",
            None,
        ),
    ],
)
@pytest.mark.parametrize("in_a_file", [False, True])
def test_the_flag_that_lets_kernels_overlap_is_seen(flags, found, in_a_file, tmp_path):
    if in_a_file:
        (tmp_path / "flags").write_text(flags)
        flags = str(tmp_path / "flags")
    assert (ffi_targets.concurrent_flag(flags) is not None) == bool(found)
