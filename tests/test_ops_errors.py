"""Every product of the registry: bad operands, and what the kernels do not take."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import PRODUCTS, RANKS, check_values, each_call, make_mesh, of_way, run

import jflux
from jflux._call import explain
from jflux._call.plans import Path
from jflux._ops._spec import all_ops
from jflux._stress.calls import assert_close, exact, normal, operands, per_device

EACH_OP = pytest.mark.parametrize("op", PRODUCTS)
#: Ops by the option that names a dimension of rows, and those that name two of the product.
BY_DIMENSION = [op for op in PRODUCTS if all_ops()[op].dimension is not None]
BY_AXES = [op for op in PRODUCTS if "split_axis" in all_ops()[op].ways[0]]


def _op(op, **options):
    spec = all_ops()[op]
    return functools.partial(spec.function, **({"axis_name": "tp", **spec.ways[0]} | options))


def _trace(op, x, w, **options):
    """The op on two ranks, whose operands have these shapes."""
    f = per_device(make_mesh((2,)), _op(op, **options))
    jax.eval_shape(f, jnp.zeros((2, *x)), jnp.zeros((2, *w)))


def _fails(op, x, w, message, **options):
    with pytest.raises(ValueError, match=rf"jflux\.{op}: .*{message}"):
        _trace(op, x, w, **options)


# ---- Operands that do not fit --------------------------------------------------------------------


@EACH_OP
@pytest.mark.parametrize(
    "x, w, options, message",
    [
        ((4, 5), (6, 8), {}, r"x \(\d, (\d+)\) and w \(6, 8\) do not contract: x has \1 .*takes 6"),
        ((4, 5), (5, 8), {"transpose_rhs": True}, r"do not contract.*takes 8.*transpose_rhs=True"),
        ((5,), (5, 8), {}, r"x must have shape \[\.\.\., rows, k\], got \(5,\)"),
        ((4, 5), (5,), {}, r"w must have shape \[k, n\], got \(5,\)"),
        ((4, 5), (2, 5, 8), {}, r"w must have shape \[k, n\], got \(2, 5, 8\)"),
    ],
)
def test_shapes(op, x, w, options, message):
    _fails(op, x, w, message, **options)


@pytest.mark.parametrize("dimension", [1, -1, 2, -3])
@pytest.mark.parametrize("op", BY_DIMENSION)
def test_dimensions_that_do_not_travel(op, dimension):
    name = all_ops()[op].dimension
    _fails(op, (4, 5), (5, 8), rf"{name}={dimension} .*\(4, 5\)", **{name: dimension})
    with pytest.raises(TypeError, match=f"{op}: {name} must be an int, got 'm'"):
        _trace(op, (4, 5), (5, 8), **{name: "m"})


@pytest.mark.parametrize("op", BY_AXES)
def test_axes_that_the_product_has_not(op):
    for name, axis in (("split_axis", 2), ("concat_axis", -3)):
        message = rf"{name}={axis} must name a dimension .*\(4, 5\)"
        _fails(op, (4, 5), (5, 8), message, **{name: axis})
        with pytest.raises(TypeError, match=f"{op}: {name} must be an int, got 'n'"):
            _trace(op, (4, 5), (5, 8), **{name: "n"})


@EACH_OP
def test_sizes_that_the_ranks_do_not_divide(op):
    """The message names the dimension, its size, the ranks and both shapes."""
    spec, split = all_ops()[op], all_ops()[op].communication(2, **all_ops()[op].ways[0]).split
    if split is None:
        pytest.skip("nothing is split")
    which = spec.dimension or "split_axis"
    x, w = ((7, 6), (6, 8)) if split == 0 else ((4, 6), (6, 7))
    what = "rows" if split == 0 else "columns"
    _fails(op, x, w, rf"7 {what} in its {which}=.*, which the 2 ranks.*axis_name='tp'.*\({x[0]}, 6")
    if spec.dimension is not None:  # of more leading dimensions
        for dimension in (0, 1):
            shape = [4, 4, 6]
            shape[dimension] = 7
            _fails(
                op, tuple(shape), (6, 4), rf"7 rows in its {which}={dimension}, which the 2 ranks",
                **{which: dimension},
            )  # fmt: skip


@EACH_OP
def test_operands_that_are_no_arrays(op):
    with pytest.raises(TypeError, match=f"{op}: x must be an array, got list"):
        _op(op)([[1.0]], np.zeros((1, 1)))
    with pytest.raises(TypeError, match=f"{op}: w must be an array, got float"):
        _op(op)(np.zeros((1, 1)), 1.0)


@EACH_OP
def test_precision_that_there_is_not(op):
    """Also where a kernel would not look at it."""
    call, mesh = of_way(op), make_mesh((2,))
    x, w = operands(call, mesh, "tp")
    jax.eval_shape(per_device(mesh, _op(op, precision="highest")), x, w)
    with pytest.raises(ValueError, match="[Pp]recision"):
        jax.eval_shape(per_device(mesh, _op(op, precision="hi")), x, w)


@EACH_OP
def test_options_are_keyword_only(op):
    with pytest.raises(TypeError, match=rf"jflux.{op} takes x, w by position.*axis_name='tp'"):
        all_ops()[op].function(np.zeros((1, 1)), np.zeros((1, 1)), "tp")


@EACH_OP
def test_no_mesh(op):
    x = w = jnp.zeros((4, 4))
    with pytest.raises(ValueError, match="outside shard_map and there is no mesh"):
        _op(op)(x, w)
    with pytest.raises(ValueError, match=r"axis_name='ep'.*\('tp',\)"):
        _op(op, axis_name="ep", mesh=make_mesh((2,)))(x, w)


@EACH_OP
def test_global_operands_that_do_not_fit(op):
    """Sizes in the message are those of a rank."""
    spec, mesh = all_ops()[op], make_mesh((2,))
    f = _op(op, mesh=mesh)
    with pytest.raises(ValueError, match=rf"{op}: x \(.*6?.*\) and w \(.*\) do not contract"):
        f(jnp.zeros((4, 6)), jnp.zeros((8, 4)))
    layout = spec.layout(2, **spec.ways[0])
    if (dimension := layout.rows["x"]) is not None:
        shape = [4, 4]
        shape[dimension] = 5
        w = jnp.zeros((shape[1], 4))
        message = rf"{op}: x has shape \(.*do not divide its dimension {dimension}"
        with pytest.raises(ValueError, match=message):
            f(jnp.zeros(shape), w)
    if (dimension := layout.rows["y"]) is not None:
        rows, columns = (5, 4) if dimension == 0 else (4, 5)
        with pytest.raises(ValueError, match=r"5 (rows|columns).*2 ranks|w has shape \(4, 5\)"):
            f(jnp.zeros((rows, 4)), jnp.zeros((4, columns)))


# ---- What the kernels do not take ----------------------------------------------------------------


@each_call(lead=(5,), dtype=jnp.bfloat16)
def test_one_rank_is_a_dot(call):
    check_values(call, make_mesh((1,)), "tp")
    check_values(call, make_mesh((1, RANKS), ("tp", "dp")), "tp")


@pytest.mark.parametrize("empty", ["rows", "k", "n"])
@each_call(lead=(3,), k=3, n=4)
def test_nothing_to_compute(call, empty):
    """Empty operands, made inside the body: shard_map takes none from outside."""
    mesh = make_mesh((RANKS,))
    n_axis = 0 if call.transpose_rhs else 1

    def body(x, w):
        x = x[:0] if empty == "rows" else x[:, :0] if empty == "k" else x
        w = jax.lax.slice_in_dim(w, 0, 0, axis=1 - n_axis) if empty == "k" else w
        w = jax.lax.slice_in_dim(w, 0, 0, axis=n_axis) if empty == "n" else w
        return call.bind("tp")(x, w)

    y = run(jax.jit(per_device(mesh, body)), *operands(call, mesh, "tp"))
    rows, columns = call.y_shape(RANKS)
    want = (0 if empty == "rows" else rows, 0 if empty == "n" else columns)
    assert y.shape == (RANKS, *want) and not y.any()


@pytest.mark.parametrize("dtypes", [("int32", "int32"), ("bfloat16", "float32")])
@EACH_OP
def test_types_without_a_kernel_take_the_reference(op, dtypes):
    mesh, call = make_mesh((RANKS,)), of_way(op, lead=(3,))
    x, w = (
        np.round(4 * a).astype(jnp.dtype(d))
        for a, d in zip(operands(call, mesh, "tp"), dtypes, strict=True)
    )
    f = jax.jit(per_device(mesh, call.bind("tp")))
    with jflux.config(strict=False):
        y, calls = run(f, x, w), explain.explain(f, x, w)
    # An op may leave the product to XLA, whose sum a kernel may still take.
    if calls[0].plan.path == Path.REFERENCE or any(c.plan.unsupported for c in calls):
        with pytest.raises(NotImplementedError, match=rf"jflux\.\w+ takes its lax .*{dtypes[0]}"):
            f.lower(x, w)
    else:
        assert calls[0].plan.path == Path.DECOMPOSED and dtypes[0] in calls[0].plan.reason
    assert y.dtype == jnp.result_type(*dtypes)
    np.testing.assert_array_equal(y, exact(call, mesh, "tp", x, w))  # small integers are exact


@each_call(lead=(2,), k=5, n=2)
def test_named_vmap_takes_the_reference(call):
    """An axis that vmap names is no mesh axis: there are no ranks."""
    world = 3
    x = normal(0, (world, *call.x_shape(world)), np.float32)
    w = normal(1, (world, *call.w_shape(world)), np.float32)
    f = jax.vmap(call.bind("i"), axis_name="i")
    with pytest.raises(NotImplementedError, match=rf"{call.op}.*axis 'i' is not a mesh's.*strict"):
        f(x, w)
    with jflux.config(strict=False):
        y = run(jax.jit(f), x, w)
    arrays = [list(a.astype(np.float64)) for a in (x, w)]
    want = np.stack(call.spec.exact(*arrays, **call.options))
    scale = np.stack(call.spec.exact(*([abs(a) for a in one] for one in arrays), **call.options))
    assert_close(y, want, scale, np.float32, call.terms(world))
