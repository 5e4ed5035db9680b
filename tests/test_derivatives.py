"""Derivatives in both modes, of any order, and transposes: every op against its reference."""

import dataclasses
import functools
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import PLATFORM, RANKS, compiled_text, fused_calls, make_mesh, run
from jax._src.ad_checkpoint import saved_residuals
from jax.sharding import PartitionSpec as P
from layers import VMA, assert_near, in_float64, norm_call, op_call, over_a_batch

import jflux
from jflux._ops.products import matmul_all_reduce
from jflux._stress.calls import normal, x64_if

WORLD = min(RANKS, 4)
DTYPE = jnp.float64 if PLATFORM == "cpu" else jnp.bfloat16
pytestmark = pytest.mark.usefixtures("some_tiles")


@pytest.fixture(scope="module")
def some_tiles():
    """Products are summed tile by tile from fewer bytes on."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(matmul_all_reduce, "MOST_BYTES", 256)
        jax.clear_caches()
        yield
    jax.clear_caches()


@dataclasses.dataclass(frozen=True)
class Case:
    """A call of any op.

    Attributes:
      op: of a module (jflux or its reference) and one rank's operands.
      shapes: of these.
      shared: so many operands, the last ones, are the same on all ranks.
      linear: which operands it is linear in, each by itself.
      forward: the ops that the tangent for all operands takes, beside that of the values.
      backward: the ops that a gradient takes, beside that of the values.
    """

    name: str
    op: Any
    shapes: tuple[tuple[int, ...], ...]
    shared: int = 0
    linear: tuple[int, ...] = ()
    forward: tuple[str, ...] = ()
    backward: tuple[str, ...] = ()

    def __str__(self):
        return self.name

    @property
    def own(self):
        return len(self.shapes) - self.shared

    def operands(self, seed=0):
        leads = [(WORLD,)] * self.own + [()] * self.shared
        shapes = [lead + shape for lead, shape in zip(leads, self.shapes, strict=True)]
        return [normal(seed + i, shape, DTYPE) for i, shape in enumerate(shapes)]

    def program(self, transform, module=jflux, **options):
        """The transformed op on all ranks; the first dimension of its results is theirs."""
        body = transform(functools.partial(self.op, module))

        def local(*args):
            results = body(*(a[0] for a in args[: self.own]), *args[self.own :])
            return jax.tree.map(lambda y: jnp.asarray(y)[None], results)

        specs = (P("tp"),) * self.own + (P(),) * self.shared
        mesh = make_mesh((WORLD,))
        return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P("tp"), **options)

    def check(self, transform, **options):
        """jflux's results against the reference's in float64."""
        args = self.operands()
        with x64_if(DTYPE):
            got = run(jax.jit(self.program(transform, **options)), *args)
        reference = self.program(transform, jflux.reference, **options)
        want = in_float64(reference, *args)
        if DTYPE == jnp.bfloat16:
            assert_near(got, want, DTYPE, 60, run(jax.jit(reference), *args))
        else:
            assert_near(got, want, DTYPE, 1000)


def _gather(**options):
    return lambda module, x, *ws: module.all_gather_matmul(x, ws, axis_name="tp", **options)


def _gather_biased(**options):
    def op(module, x, gate, up, b, c):
        return module.all_gather_matmul(x, (gate, up), bias=(b, c), axis_name="tp", **options)

    return op


def _scatter_all(module, x, v, w, u, bias, residual):
    return module.matmul_reduce_scatter(
        (x, v), (w, u), bias=bias, residual=residual, axis_name="tp"
    )


GATE = ((2, 4), (4, 3), (4, 3), (3,), (3,))
AGM, MRS = ("all_gather_matmul",), ("matmul_reduce_scatter",)
# Shards that are exchanged have whole 16-byte vectors of columns: for others GPUs have no kernel.
CASES = (
    Case("all_gather_matmul", op_call("all_gather_matmul"), ((2, 4), (4, 3)), 0, (0, 1), AGM, MRS),
    Case(
        "all_gather_matmul transposed, gathered",
        op_call("all_gather_matmul", transpose_rhs=True, return_gathered=True),
        ((2, 4), (3, 4)), 0, (0,), AGM, MRS,
    ),
    Case(
        "all_gather_matmul of three",
        _gather(), ((2, 4), (4, 3), (4, 2), (4, 1)), 0, (0,), AGM, MRS,
    ),
    Case("all_gather_matmul biased", _gather_biased(), GATE, 0, (), AGM, MRS),
    Case("all_gather_matmul silu", _gather_biased(activation="silu"), GATE, 0, (), AGM, MRS),
    Case(
        "all_gather_matmul gated",
        _gather_biased(activation="gelu", gated=True), GATE, 0, (), AGM, MRS,
    ),
    Case(
        "matmul_reduce_scatter",
        op_call("matmul_reduce_scatter"), ((8, 3), (3, 4)), 0, (0, 1), MRS, AGM,
    ),
    Case(
        "matmul_reduce_scatter of two, added",
        _scatter_all, ((8, 3), (8, 2), (3, 4), (2, 4), (4,), (8 // WORLD, 4)), 0, (), MRS, AGM,
    ),
    Case(
        "all_to_all_matmul", op_call("all_to_all_matmul", split_axis=0, concat_axis=1),
        ((8, 8), (8 * WORLD, 3)), 0, (0, 1), ("all_to_all_matmul",), ("matmul_all_to_all",),
    ),
    Case(
        "all_to_all_matmul of columns, exchanged",
        op_call("all_to_all_matmul", split_axis=1, concat_axis=0, return_exchanged=True),
        ((2, 8 * WORLD), (8, 3)), 0, (0,),
        ("all_to_all_matmul",), ("matmul_all_to_all", "all_to_all"),
    ),
    Case(
        "matmul_all_to_all", op_call("matmul_all_to_all", split_axis=1, concat_axis=0),
        ((2, 3), (3, 8 * WORLD)), 0, (0, 1), ("matmul_all_to_all",), ("all_to_all_matmul",),
    ),
    Case(
        "matmul_all_to_all of rows",
        op_call("matmul_all_to_all", split_axis=0, concat_axis=1, transpose_rhs=True),
        ((8, 3), (8, 3)), 0, (0, 1), ("matmul_all_to_all",), ("all_to_all_matmul",),
    ),
    Case("matmul_all_reduce summed", op_call("matmul_all_reduce"), ((3, 4), (4, 5)), 0, (0, 1)),
    Case(
        "matmul_all_reduce tiles", op_call("matmul_all_reduce"), ((4 * WORLD, 3), (3, 8)), 0, (0, 1)
    ),
    Case(
        "matmul_all_reduce LayerNorm", norm_call("matmul_all_reduce", jflux.LayerNorm, 2),
        ((4, 3), (3, 4), (4, 4), (4,), (4,)), 3,
    ),
    Case(
        "all_reduce RMSNorm", norm_call("all_reduce", jflux.RMSNorm, 1), ((4, 5), (4, 5), (5,)), 2,
    ),
    Case("all_reduce", op_call("all_reduce"), ((3, 4),), 0, (0,)),
    Case("all_gather", op_call("all_gather"), ((3, 4),), 0, (0,)),
    Case("reduce_scatter", op_call("reduce_scatter", tiled=True), ((8, 3),), 0, (0,)),
    Case(
        "all_to_all",
        op_call("all_to_all", split_axis=0, concat_axis=1, tiled=True), ((8, 3),), 0, (0,),
    ),
)  # fmt: skip
EACH = pytest.mark.parametrize("case", CASES, ids=str)
#: One of each kind, with all that an op can have after its product.
SOME = pytest.mark.parametrize(
    "case",
    [
        case
        for case in CASES
        if case.name.endswith(
            ("gated", "added", "exchanged", "rows", "LayerNorm", "reduce_scatter")
        )
    ],
    ids=str,
)
LINEAR = pytest.mark.parametrize("case", [c for c in CASES if c.linear], ids=str)
PRODUCTS = pytest.mark.parametrize("case", [c for c in CASES if c.forward], ids=str)


def _tangents(args):
    return tuple(jnp.cos(3 * a) for a in args)


def _loss(f):
    """Nonlinear in the results."""
    return lambda *args: sum(jnp.sum(jnp.sin(y) * y) for y in jax.tree.leaves(f(*args)))


def _all(args):
    return tuple(range(len(args)))


def _jvp(f):
    return lambda *args: jax.jvp(f, args, _tangents(args))


def _jvp_of_each(f):
    """With respect to one operand, the others having no tangent at all."""

    def each(*args):
        found = []
        for i, (a, t) in enumerate(zip(args, _tangents(args), strict=True)):

            def one(a, i=i):
                return f(*args[:i], a, *args[i + 1 :])

            found.append(jax.jvp(one, (a,), (t,))[1])
        return found

    return each


def _linearize(f):
    def both(*args):
        y, pushforward = jax.linearize(f, *args)
        return y, pushforward(*_tangents(args))

    return both


def _jvp_of_gradient(f):
    def second(*args):
        return jax.jvp(jax.grad(_loss(f), _all(args)), args, _tangents(args))

    return second


def _gradient_of_jvp(f):
    def second(*args):
        return jax.grad(_loss(lambda *args: _jvp(f)(*args)), _all(args))(*args)

    return second


def _third(f):
    def third(*args):
        return jax.jvp(_gradient_of_jvp(f), args, _tangents(args))[1]

    return third


def _batch_of_tangents(f):
    """Several directions, of a few operands: what jacfwd does."""

    def batch(*args):
        directions = [jnp.stack([t, 2 * t, jnp.sin(t)]) for t in _tangents(args)]
        pushforward = jax.linearize(f, *args)[1]
        return jax.vmap(pushforward)(*directions)

    return batch


def _transpose_of_a_batch(f):
    """The transpose of a batch of tangents, in place: what reverse over a batch does."""

    def transposed(*args):
        directions = [jnp.stack([t, 2 * t]) for t in _tangents(args)]
        pushforward = jax.vmap(jax.linearize(f, *args)[1])
        dys = pushforward(*directions)
        return jax.linear_transpose(pushforward, *directions)(dys)

    return transposed


def _scan(f):
    def steps(x, *rest):
        def step(x, _):
            ys = f(x, *rest)
            mean = sum(jnp.mean(y) for y in jax.tree.leaves(ys))
            return jnp.roll(x, 1) * jnp.cos(mean), mean

        return jax.lax.scan(step, x, None, length=2)

    return steps


def _both(*transforms):
    return lambda f: lambda *args: [transform(f)(*args) for transform in transforms]


OF_EACH_OP = {
    "first": _both(_jvp_of_each, _linearize, _batch_of_tangents),
    "second": _both(_jvp_of_gradient, _gradient_of_jvp),
}
OF_SOME_OPS = {
    "third": _third,
    "transpose of a batch of tangents": _transpose_of_a_batch,
    "scan": lambda f: _both(_jvp, _jvp_of_gradient)(_scan(f)),
    "checkpoint": lambda f: _both(_jvp, _jvp_of_gradient)(jax.checkpoint(f)),
    "scan of checkpoint": lambda f: _gradient_of_jvp(_scan(jax.checkpoint(f))),
    "vmap": lambda f: _both(_jvp, _gradient_of_jvp)(over_a_batch(f)),
}


@pytest.mark.parametrize("transform", OF_EACH_OP)
@EACH
def test_against_the_reference(case, transform):
    case.check(OF_EACH_OP[transform])


@pytest.mark.parametrize("transform", OF_SOME_OPS)
@SOME
def test_transforms_against_the_reference(case, transform):
    case.check(OF_SOME_OPS[transform])


@PRODUCTS
def test_without_vma(case):
    case.check(_both(_jvp, _gradient_of_jvp), check_vma=False)


@EACH
def test_hessian(case):
    def hessian(f):
        return lambda *args: jax.hessian(_loss(f), argnums=tuple({0, len(args) - 1}))(*args)

    case.check(hessian)


@LINEAR
@VMA
def test_linear_transpose(case, check_vma):
    """In each operand that the op is linear in, the others being fixed."""

    def transposed(f):
        def each(*args):
            found = []
            for i in case.linear:

                def one(a, i=i):
                    return f(*args[:i], a, *args[i + 1 :])

                dys = jax.tree.map(jnp.cos, one(args[i]))
                found.append(jax.linear_transpose(one, args[i])(dys))
            return found

        return each

    case.check(transposed, check_vma=check_vma)


def test_hessian_of_global_arrays():
    """From outside: through shard_map, the layers' activation in between."""
    mesh = make_mesh((WORLD,))
    x, w = normal(0, (2 * WORLD, 3), DTYPE), normal(1, (3, WORLD), DTYPE)

    def f(module, x, w):
        y = module.all_gather_matmul(x, w, axis_name="tp", mesh=mesh, activation="silu")
        return jnp.sum(jnp.sin(module.matmul_reduce_scatter(y, w.T, axis_name="tp", mesh=mesh)))

    with x64_if(DTYPE):
        got = run(jax.jit(jax.hessian(functools.partial(f, jflux), (0, 1))), x, w)
    want = in_float64(jax.hessian(functools.partial(f, jflux.reference), (0, 1)), x, w)
    assert_near(got, want, DTYPE, roundings=60 if DTYPE == jnp.bfloat16 else 1000)


def _sum_of_gathered(module, x, w):
    y, gathered = module.all_gather_matmul(
        x, w, axis_name="tp", return_gathered=True, preferred_element_type=np.float32
    )
    return y, gathered


@pytest.mark.parametrize("types", [("int8", "float32"), ("complex64", "complex64")], ids="-".join)
@pytest.mark.parametrize("case", [c for c in CASES if c.linear == (0, 1)], ids=str)
def test_other_types(case, types):
    """Whole numbers have no tangent, and nothing is rounded to them; complex ones are no special
    case. The kernels take neither."""
    x, w = ((3 * a).astype(t) for a, t in zip(case.operands(), types, strict=True))

    def both(f):
        def both(x, w):
            def of_w(w):
                return f(x, w)

            y, dy = jax.jvp(of_w, (w,), (w + 1,))
            return y, dy, jax.vjp(of_w, w)[1](jnp.cos(y))

        return both

    with jflux.config(strict=False):
        got = jax.jit(case.program(both))(x, w)
    want = jax.jit(case.program(both, jflux.reference))(x, w)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", ["int8", "bfloat16"])
def test_a_gathered_x_of_another_type_than_y(dtype):
    """It has a tangent of its own type, or none."""
    x, w = normal(0, (WORLD, 2, 4), np.float32), normal(1, (WORLD, 4, 3), np.float32)
    x, w = (3 * x).astype(dtype), w.astype("float32" if dtype == "int8" else dtype)

    def f(module):
        def f(x, w):
            tangents = (np.zeros(x.shape, jax.dtypes.float0), w) if dtype == "int8" else (x, w)
            _, dys = jax.jvp(
                functools.partial(_sum_of_gathered, module),
                (x[0], w[0]),
                jax.tree.map(lambda t: t[0], tangents),
            )
            return [dy[None] for dy in dys if dy.dtype != jax.dtypes.float0]

        mesh = make_mesh((WORLD,))
        return jax.shard_map(f, mesh=mesh, in_specs=(P("tp"), P("tp")), out_specs=P("tp"))

    with jflux.config(strict=False):
        got = jax.jit(f(jflux))(x, w)
    want = jax.jit(f(jflux.reference))(x, w)
    assert len(got) == (1 if dtype == "int8" else 2)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a.astype("float32"), b.astype("float32"), rtol=1e-2, atol=1e-2)


def test_tangents_alone_run_on_the_mesh_that_they_are_called_on():
    """A function whose values nobody wants has the tangents' equation and no other, and JAX reuses
    what it has lowered."""
    x, w = normal(0, (WORLD * WORLD, WORLD * 3), DTYPE), normal(1, (WORLD * 3, 4), DTYPE)

    def tangents(x, w):
        op = functools.partial(jflux.matmul_reduce_scatter, axis_name="tp")
        return jax.jvp(op, (x, w), (x, w))[1]

    specs = P(None, "tp"), P("tp")
    mesh = make_mesh((WORLD,)).abstract_mesh
    f = jax.jit(jax.shard_map(tangents, mesh=mesh, in_specs=specs, out_specs=P("tp")))
    for order in (range(WORLD), (*range(1, WORLD), 0)):
        mesh = make_mesh((WORLD,), order=order)
        with x64_if(DTYPE):
            args = (
                jax.device_put(a, jax.NamedSharding(mesh, spec))
                for a, spec in zip((x, w), specs, strict=True)
            )
            got = np.asarray(f(*args))
        assert_near(got, 2 * x.astype(np.float64) @ w.astype(np.float64), DTYPE, roundings=60)


# ---- Errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case, why",
    [(c, "it has an activation") for c in CASES if "silu" in c.name]
    + [(c, "it has a norm") for c in CASES if "Norm" in c.name]
    + [(c, "not in both at once") for c in CASES if c.linear == (0, 1)],
    ids=str,
)
def test_what_is_not_linear_cannot_be_transposed(case, why):
    def transposed(f):
        def both(*args):
            return jax.linear_transpose(f, *args)(jax.tree.map(jnp.zeros_like, f(*args)))

        return both

    with pytest.raises(NotImplementedError, match=why):
        jax.jit(case.program(transposed)).lower(*case.operands())


# ---- What they lower to --------------------------------------------------------------------------


def _text(case, transform, **options):
    return compiled_text(case.program(transform, **options), *case.operands())


def _collectives(text):
    names = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
    return sum(text.count(f" {name}(") + text.count(f" {name}-start(") for name in names)


@PRODUCTS
def test_forward_mode_takes_one_call_more(case):
    text = _text(case, _jvp, check_vma=False)
    assert fused_calls(text) == [*case.forward] * 2
    assert _collectives(text) == 0


@PRODUCTS
@pytest.mark.parametrize("remat", [False, True])
def test_reverse_mode_takes_the_transposed_call(case, remat):
    """Also behind `linearize`, whose tangents are one equation."""

    def pull(f):
        f = jax.checkpoint(f, policy=jax.checkpoint_policies.everything_saveable) if remat else f

        def both(*args):
            y, pushforward = jax.linearize(f, *args)
            return y, jax.linear_transpose(pushforward, *args)(y)

        return both

    text = _text(case, pull, check_vma=False)
    assert Counter(fused_calls(text)) == Counter([*case.forward, *case.backward])
    # The cotangent of a gathered x is scattered by XLA.
    assert _collectives(text) == ("gathered" in case.name)


@pytest.mark.parametrize(
    "name, kept",
    [
        ("all_gather_matmul", [(2 * WORLD, 4), (4, 3)]),
        ("all_gather_matmul biased", [(2 * WORLD, 4), (4, 3), (4, 3)]),
        ("all_gather_matmul gated", [(2 * WORLD, 4), (4, 3), (4, 3), *[(2 * WORLD, 3)] * 2]),
        ("matmul_reduce_scatter", [(8, 3), (3, 4)]),
        ("matmul_reduce_scatter of two, added", [(8, 3), (8, 2), (3, 4), (2, 4)]),
        ("all_to_all_matmul", [(8 // WORLD, 8 * WORLD), (8 * WORLD, 3)]),
        ("matmul_all_to_all", [(2, 3), (3, 8 * WORLD)]),
    ],
)
def test_what_is_kept_for_the_backward_pass(name, kept):
    (case,) = (c for c in CASES if c.name == name)
    f = case.program(lambda f: f)

    def loss(*args):
        return sum(jnp.sum(y) for y in jax.tree.leaves(f(*args)))

    sizes = [int(np.prod(aval.shape)) for aval, _ in saved_residuals(loss, *case.operands())]
    assert Counter(sizes) == Counter(WORLD * int(np.prod(shape)) for shape in kept)
