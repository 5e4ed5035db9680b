"""jflux.explain: reports and data; what it does not do; switches of several threads."""

import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import PLATFORM, PRODUCTS, RANKS, compiled_text, fused_calls, make_mesh, of_way
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jflux
from jflux import _config
from jflux._call import explain, tuning_tables
from jflux._call.plans import Machine, Path
from jflux._call.primitives import plan_call
from jflux._ops._spec import collectives
from jflux._ops.products import _product, all_gather_matmul
from jflux._stress.calls import Call, operands, per_device

CALL = Call("all_gather_matmul", lead=(6,), k=16, n=24, dtype=jnp.bfloat16)


def _program(call=CALL, ranks=RANKS):
    mesh = make_mesh((ranks,))
    return per_device(mesh, call.bind("tp")), operands(call, mesh, "tp")


@pytest.mark.parametrize("op", PRODUCTS)
def test_report_and_data_of_a_fused_call(op, small_sums):
    rows = 128 * RANKS if of_way(op).collective.kind == "all_reduce" else 6
    call = of_way(op, lead=(rows,), k=16, n=24, dtype=jnp.bfloat16)
    f, args = _program(call)
    found = jflux.explain(f, *args)
    report = str(found)
    assert repr(found) == report
    (one,) = found
    assert (one.op, one.plan.path) == (op, Path.FUSED)

    def described(shape):
        return f"bfloat16[{', '.join(map(str, shape))}]"

    assert one.operands == (described(call.x_shape(RANKS)), described(call.w_shape(RANKS)))
    assert one.results == (described(call.y_shape(RANKS)),)
    lines = report.splitlines()
    assert lines[0] == f"{op}  {', '.join(one.operands)} -> {one.results[0]}"
    assert "  path    fused" in lines and f"  reason  {one.plan.reason}" in lines
    assert any(line.startswith("  heap    ") and line.endswith(" MiB per rank") for line in lines)
    if PLATFORM == "gpu":
        assert any(line.startswith("  config  tiles 128 x ") for line in lines)


@pytest.mark.parametrize("spec", collectives(), ids=lambda spec: spec.name)
def test_collectives_have_kernels_up_to_a_size(spec):
    mesh = make_mesh((RANKS,))
    f = per_device(mesh, functools.partial(spec.on, axis_name="tp", **spec.ways[0]))
    (one,) = explain.explain(f, np.zeros((RANKS, RANKS, 16), np.float32))
    assert (one.op, one.plan.path) == (spec.name, Path.FUSED)
    assert one.plan.reason
    if spec.most_bytes is None:
        return
    with jflux.config(always=False):
        most = spec.most_bytes(RANKS)
        shape = (RANKS, RANKS, most // 4)  # of each rank's x
        (large,) = explain.explain(f, jax.ShapeDtypeStruct(shape, np.float32))
    assert large.plan.path == Path.REFERENCE and "faster" in large.plan.reason


@pytest.mark.parametrize("op", PRODUCTS)
def test_a_decomposed_call_and_its_collective(op):
    """Both are listed: the op with the reason, and what it became."""
    f, args = _program(of_way(op, lead=(6,), k=16, n=24, dtype=jnp.bfloat16))
    with jflux.config(always=False), tuning_tables.force(tuning_tables.DECOMPOSED):
        first, second = explain.explain(f, *args)
    assert (first.op, first.plan.path) == (op, Path.DECOMPOSED)
    assert (second.op, second.plan.path) == (of_way(op).collective.kind, Path.FUSED)
    assert "  path    decomposed" in str(first) and "heap" not in str(first)


def test_the_reference_and_why():
    f, args = _program(Call("all_gather_matmul", dtype=np.dtype("int32")))
    with jflux.config(strict=False):
        (one,) = explain.explain(f, *args)
    assert one.plan.path == Path.REFERENCE and one.plan.unsupported and "int32" in one.plan.reason
    with jflux.config(fused=False):
        (one,) = explain.explain(f, *args)
    assert (one.plan.path, one.plan.reason) == (Path.REFERENCE, "jflux.config(fused=False)")
    with pytest.raises(NotImplementedError, match="int32.*strict is on"):
        explain.explain(f, *args)


def test_a_padded_call_says_so():
    """As GPUs get it: the plan of the call that is bound again."""
    machine = Machine("cuda", sm_count=132, link_gbps=320)
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((1024, 1001), (1001, 512))]
    params = all_gather_matmul.Params(("tp",), 2, 0, ("y",), False, np.dtype(jnp.bfloat16))
    assert all_gather_matmul._op.plan(arrays, params, machine).path == Path.FUSED
    bound = []

    def record(*operands, params):
        bound.append((operands, params))
        return [jnp.zeros((2048, operands[1].shape[1]), jnp.bfloat16)]

    canonical = all_gather_matmul._canonical(arrays, params, machine)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(all_gather_matmul._primitive, "bind", record)
        (y,) = jax.eval_shape(canonical, *arrays)
    ((padded, changed),) = bound
    assert y.shape == (2048, 512) and padded[0].shape == (1024, 1024)
    plan = all_gather_matmul._op.plan(padded, changed, machine)
    assert plan.path == Path.FUSED and _product.PADDED in plan.reason
    call = explain.Explained("all_gather_matmul", (), (), plan)
    assert "  reason  k and n are padded, to rows of whole 64 bytes; " in str(call)
    assert "  config  tiles 128 x " in str(call)


def test_what_is_lowered_once_is_listed_once():
    mesh, op = make_mesh((RANKS,)), jax.jit(CALL.bind("tp"))

    def body(x, w):
        first = op(x, w)
        return jax.lax.fori_loop(0, 5, lambda i, y: y + op(x * i.astype(x.dtype), w), first)

    found = explain.explain(per_device(mesh, body), *operands(CALL, mesh, "tp"))
    assert {call.op for call in found} == {CALL.op} and len(found) <= 2
    assert str(explain.explain(lambda x: x + 1, 1.0)) == "no call of a jflux op"


def test_lines_of_the_program_and_how_often_they_run():
    mesh, bound = make_mesh((RANKS,)), CALL.bind("tp")
    inner = jax.jit(bound)

    def body(x, w):
        y = sum(inner(x + i, w) for i in range(3))

        def step(carry, _):
            return carry + bound(x + carry[:6, :16], w), None

        return jax.lax.scan(step, y, length=5)[0] + bound(x, w) + bound(x * 2, w[:, :8]).sum()

    first = body.__code__.co_firstlineno
    equal, other = jflux.explain(per_device(mesh, body), *operands(CALL, mesh, "tp"))
    assert (equal.times, other.times) == (3 + 5 + 1, 1)
    places = [line.removeprefix(f"{__file__}:").split(" ")[0] for line in equal.lines]
    assert [int(place) - first for place in places] == [1, 4, 6]
    assert equal.lines[1].endswith(".step)") or equal.lines[1].endswith("(step)")
    report = str(equal).splitlines()
    assert report[0].endswith(", 9 times")
    assert report[1:4] == [f"  line    {line}" for line in equal.lines]
    assert len(other.lines) == 1 and "times" not in str(other)


def test_calls_with_other_parameters_are_others():
    def body(x):
        first = jflux.all_gather(x, axis_name="tp", tiled=True)
        second = jflux.all_gather(x, axis_name="tp", axis=1, tiled=True)
        return first.sum() + second.sum() + jflux.all_gather(x, axis_name="tp", tiled=True).sum()

    f = jax.shard_map(body, mesh=make_mesh((RANKS,)), in_specs=P("tp"), out_specs=P(),
                      check_vma=False)  # fmt: skip
    found = jflux.explain(f, np.ones((RANKS, 4), np.float32))
    assert [call.times for call in found] == [2, 1]


def test_what_a_decomposed_call_is_made_of_follows_it():
    call = of_way("matmul_reduce_scatter", lead=(6,), k=16, n=16, dtype=jnp.bfloat16)
    mesh, bound = make_mesh((RANKS,)), call.bind("tp")

    def body(x, w):
        return jax.lax.fori_loop(0, 4, lambda _, y: y + bound(x, w), 0 * x[:6])

    with jflux.config(always=False), tuning_tables.force(tuning_tables.DECOMPOSED):
        first, second = jflux.explain(per_device(mesh, body), *operands(call, mesh, "tp"))
    assert (first.op, second.op) == ("matmul_reduce_scatter", "reduce_scatter")
    assert first.times == 4 and len(first.lines) == 1
    assert (second.times, second.lines) == (1, ())  # JAX lowers it once, whoever becomes it


class WithoutAHash:
    """As modules of Equinox are: functions with arrays among their fields."""

    __hash__ = None

    def __init__(self, f, w):
        self.f, self.w = f, w

    def __call__(self, x):
        return self.f(x, self.w)


def test_a_module_that_has_no_hash():
    f, (x, w) = _program()
    (call,) = jflux.explain(WithoutAHash(f, w), x)
    assert call.op == CALL.op


def test_of_flax():
    nnx = pytest.importorskip("flax.nnx")
    f, args = _program()
    (call,) = jflux.explain(nnx.jit(f), *args)
    assert call.op == CALL.op


def test_blocks_in_blocks_and_gradients():
    """Lines of what a gradient is of; each program has its own."""
    mesh = make_mesh((RANKS,))

    def of(name):
        def local(x):
            return jnp.sin(jflux.all_reduce(x, axis_name="tp"))

        return jax.shard_map(local, mesh=mesh, in_specs=P("tp"), out_specs=P())

    x = np.ones((RANKS, 4), np.float32)
    with jflux.explaining() as outer:
        with jflux.explaining() as inner:
            jax.jit(jax.grad(lambda x: of("a")(x).sum()))(x)
        jax.jit(lambda x: of("b")(x * 2))(x)
    assert len(inner) == 1 and list(outer)[:1] == list(inner) and len(outer) == 2
    for call in outer:
        assert call.times == 1 and len(call.lines) == 1 and ".local)" in call.lines[0]


def test_what_a_block_compiles():
    """Whoever jits it, and whether or not it was compiled before; with a heap, since it runs."""
    bound, mesh = CALL.bind("tp"), make_mesh((RANKS,))
    f, args = per_device(mesh, lambda x, w: bound(x, w)), operands(CALL, mesh, "tp")
    jitted = jax.jit(f)
    want = np.asarray(jitted(*args), np.float32)
    with jflux.explaining() as calls:
        assert not calls and str(calls) == "no call of a jflux op"
        first = np.asarray(jitted(*args), np.float32)
        assert [call.op for call in calls] == [CALL.op]
        second = np.asarray(jitted(*args), np.float32)
        assert len(calls) == 1 and calls[0].plan.path == Path.FUSED
        assert str(calls) == repr(calls) == str(calls[0])
        assert calls[0].times == 1 and calls[0].lines == (jflux.explain(f, *args)[0].lines)
    np.testing.assert_array_equal(first, want)
    np.testing.assert_array_equal(second, want)
    jitted(*args)
    assert len(calls) == 1
    (alone,) = jflux.explain(jitted, *args)
    assert alone == calls[0]


def test_no_block_where_it_would_have_no_effect():
    def f(x):
        with jflux.explaining():
            return x

    with pytest.raises(RuntimeError, match=r"jflux.explaining\(\) has no effect inside a function"):
        jax.jit(f)(1.0)


def test_gradients_are_explained_too():
    f, (x, w) = _program()

    def loss(x, w):
        return jnp.sum(f(x, w).astype(jnp.float32) ** 2)

    found = explain.explain(jax.grad(loss, (0, 1)), x, w)
    assert sorted(call.op for call in found) == sorted([CALL.op, *CALL.spec.gradient])


def test_shapes_alone_will_do():
    f, args = _program()
    sharding = NamedSharding(make_mesh((RANKS,)), P("tp"))
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding) for a in args]
    assert explain.explain(jax.jit(f), *shapes) == explain.explain(f, *args)


def test_nothing_runs_and_nothing_is_kept():
    """Programs that were compiled stay in use, and others are not replaced by a recorded one."""
    ran = []
    f, args = _program()

    def tells(x, w):
        jax.debug.callback(lambda: ran.append(1))
        return f(x, w)

    jitted = jax.jit(tells)
    explain.explain(jitted, *args)
    jax.effects_barrier()
    assert ran == []
    jax.block_until_ready(jitted(*args))
    jax.effects_barrier()
    assert ran == [1]
    size = jitted._cache_size()
    first, second = explain.explain(jitted, *args), explain.explain(jitted, *args)
    assert first == second and len(first) == 1  # also where it had been lowered before
    assert jitted._cache_size() == size
    assert fused_calls(compiled_text(jitted, *args)) == [CALL.op]


@pytest.mark.parametrize("f, name", [(3, "int"), ("x", "str"), (None, "NoneType")])
def test_what_is_no_function(f, name):
    with pytest.raises(TypeError, match=rf"jflux.explain: f must be a function .*, got {name}$"):
        jflux.explain(f, 1.0)


def test_what_cannot_be_jitted():
    def needs_values(x):
        return x if x > 0 else -x

    with pytest.raises(TypeError, match=r"jflux.explain: f cannot be jitted.*needs the values"):
        jflux.explain(needs_values, 1.0)


def test_no_mesh_is_known():
    """The rules of a lowering, of a call whose devices are not known."""
    op, results = all_gather_matmul._op, [jnp.zeros((2, 2))]
    plan = plan_call(op, [jnp.zeros((2, 2))], results, None, "cpu").plan
    assert plan.unsupported and "mesh is abstract" in plan.reason
    plan = plan_call(op, [jnp.zeros((0, 2))], results, None, "cpu").plan
    assert (plan.path, plan.unsupported) == (Path.REFERENCE, False) and "empty" in plan.reason


# ---- Threads -------------------------------------------------------------------------------------


def test_threads_with_different_switches_get_different_programs():
    """One jitted function in two threads at a time, each with its own switches."""
    f, args = _program()
    jitted, meet, seen, errors = jax.jit(f), threading.Barrier(2), {}, []

    def work(fused):
        try:
            with jflux.config(fused=fused, strict=fused, always=True):
                for _ in range(3):
                    meet.wait(60)
                    text = jitted.lower(*args).compile().as_text()
                    seen.setdefault(fused, []).append(fused_calls(text))
                    assert (jflux.config.fused, jflux.config.strict) == (fused, fused)
                    (call,) = explain.explain(jitted, *args)
                    assert (call.plan.path == Path.FUSED) == fused
        except BaseException as error:
            errors.append(error)
            meet.abort()

    threads = [threading.Thread(target=work, args=(fused,)) for fused in (True, False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors[0]
    assert seen == {True: [[CALL.op]] * 3, False: [[]] * 3}
    assert fused_calls(jitted.lower(*args).compile().as_text()) == [
        CALL.op
    ]  # as this thread has it


def test_a_forced_choice_of_another_thread_is_not_seen():
    f, args = _program()
    inside, go_on, seen = threading.Event(), threading.Event(), []

    def work():
        with jflux.config(always=False), tuning_tables.force(tuning_tables.DECOMPOSED):
            seen.append(explain.explain(f, *args)[0].plan.path)
            inside.set()
            assert go_on.wait(60)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert inside.wait(60)
        assert _config.config.current().configuration is None
        assert explain.explain(f, *args)[0].plan.path == Path.FUSED
    finally:
        go_on.set()
        thread.join()
    assert seen == [Path.DECOMPOSED]
