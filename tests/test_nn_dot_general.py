"""jflux.nn.TensorParallel: which op it takes for which product, and that models of Flax's own
layers compute the same with it as without."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import DEVICES, compiled_text, fused_calls, make_mesh
from jax import lax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import jflux
import jflux.nn as jnn
from jflux.nn import _rules

nn = pytest.importorskip("flax.linen")

from flax import nnx  # noqa: E402

# On GPUs, float32 is for the reference.
pytestmark = pytest.mark.skipif(jax.default_backend() == "gpu", reason="float32")

GATHER, SCATTER, REDUCE = "all_gather_matmul", "matmul_reduce_scatter", "all_reduce"
LAST = (((2,), (0,)), ((), ()))  # what Dense asks for, of x [b, s, k]


def mesh_of(axis_type=AxisType.Auto, shape=(2, 4)):
    devices = np.array(DEVICES[: np.prod(shape)]).reshape(shape)
    return Mesh(devices, ("data", "tp"), axis_types=(axis_type,) * 2)


def draw(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def calls_of(f, *args):
    return fused_calls(compiled_text(f, *args))


def assert_close(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        b = np.asarray(b)
        np.testing.assert_allclose(a, b, atol=1e-5 * max(1, abs(b).max()))


# ---- Which op ------------------------------------------------------------------------------------

#: Equations of Gemma, Llama and others: the kernel's axes, and the op.
EINSUMS = {
    "BTD,DF->BTF": ((None, "tp"), GATHER),
    "BTD,FD->BTF": (("tp", None), GATHER),
    "BTD,NDH->BTNH": (("tp", None, None), GATHER),  # contracted in its middle
    "BTD,CFD->CBTF": ((None, "tp", None), GATHER),  # fused gates
    "...D,DNH->...NH": ((None, "tp", None), GATHER),
    "BTNH,NHD->BTD": (("tp", None, None), SCATTER),
    "BTF,FD->BTD": (("tp", None), SCATTER),
    "NHD,BTNH->BTD": (("tp", None, None), SCATTER),  # the kernel first
    "BTNH,HND->BTD": ((None, "tp", None), SCATTER),
}
_SIZES = dict(zip("BTDNHFC", (2, 8, 16, 4, 6, 24, 2), strict=True))


@pytest.mark.parametrize("equation", EINSUMS)
def test_einsums(equation):
    """In any order, with gradients; each takes one op."""
    axes, op = EINSUMS[equation]
    terms = equation.replace("...", "BT").split("->")[0].split(",")
    one, other = (draw(*(_SIZES[c] for c in term), seed=i) for i, term in enumerate(terms))
    einsum = jnn.TensorParallel("tp").einsum(axes)

    def loss(einsum, one, other):
        return jnp.sum(jnp.sin(einsum(equation, one, other, precision="highest")))

    with jax.set_mesh(make_mesh((4,))):
        f = functools.partial(einsum, equation)
        assert_close(jax.jit(f)(one, other), np.einsum(equation, one, other))
        assert calls_of(f, one, other) == [op]
        got = jax.jit(jax.grad(functools.partial(loss, einsum), (0, 1)))(one, other)
    assert_close(got, jax.grad(functools.partial(loss, jnp.einsum), (0, 1))(one, other))


@pytest.mark.parametrize(
    ("equation", "axes", "specs", "shapes"),
    [
        ("BTD,DF->TBF", (None, "tp"), (P(None, "tp"), P(None, "tp"), P(None, None, "tp")),
         ((2, 8, 16), (16, 24))),
        ("NBTH,DHN->TBD", (None, None, "tp"), (P("tp"), P(None, None, "tp"), P("tp")),
         ((4, 2, 8, 6), (16, 6, 4))),
    ],
)  # fmt: skip
def test_einsums_of_ranks_whose_result_is_in_another_order(equation, axes, specs, shapes):
    """The sequence is x's dimension -2, wherever the result has it."""
    x, w = draw(*shapes[0]), draw(*shapes[1], seed=1)
    einsum = jnn.TensorParallel("tp").einsum(axes)
    f = functools.partial(einsum, equation, precision="highest")
    mapped = jax.shard_map(f, mesh=make_mesh((4,)), in_specs=specs[:2], out_specs=specs[2])
    assert_close(jax.jit(mapped)(x, w), np.einsum(equation, x, w))


def test_einsums_types_sizes_and_names():
    tp, w = jnn.TensorParallel("tp"), draw(4, 5).astype(jnp.bfloat16)
    einsum = tp.einsum((None, "tp"))
    assert einsum("bsd,df->bsf", jnp.full((2, 3, 4), 2.0), w).dtype == jnp.bfloat16  # a weak type
    assert einsum("bsd,df->bsf", draw(2, 3, 4), w).dtype == jnp.float32
    assert einsum("bsd,df->bsf", draw(2, 3, 1), w).shape == (2, 3, 5)
    with pytest.raises(ValueError, match="must name the 2 dimensions of the kernel"):
        tp.einsum(("tp",))("bsd,df->bsf", draw(2, 3, 4), w)


def test_equations_that_are_no_product_are_einsums_own(monkeypatch):
    """Experts, a sum, a diagonal, three operands; without names all of them."""
    tp = jnn.TensorParallel("tp")
    assert tp.einsum() is jnp.einsum
    einsum = tp.einsum(("tp", None, None))
    a, b, c = draw(4, 3, 5), draw(4, 5, 6, seed=1), draw(6, 6, seed=2)
    with jax.set_mesh(make_mesh((4,))):
        for equation, operands in (
            ("ebk,ekn->ebn", (a, b)), ("ebk,fkn->ebf", (a, b)), ("nn,ekn->ek", (c, b)),
            ("ebk,ekn,nm->ebm", (a, b, c)), ("ebk,ekn", (a, b)),
        ):  # fmt: skip
            got = jax.jit(functools.partial(einsum, equation, precision="highest"))(*operands)
            assert_close(got, jnp.einsum(equation, *operands, precision="highest"))
            assert not calls_of(functools.partial(einsum, equation), *operands)
        layer = nnx.Einsum(
            "btd,ndh->btnh", (4, 16, 6), rngs=nnx.Rngs(0), precision="highest",
            einsum_op=einsum,
        )  # fmt: skip
        plain = nnx.Einsum("btd,ndh->btnh", (4, 16, 6), rngs=nnx.Rngs(0), precision="highest")
        x = draw(2, 8, 16)
        assert calls_of(lambda x: layer(x), x) == [GATHER]
        assert_close(jax.jit(lambda x: layer(x))(x), plain(x))


#: x's shape, the kernel's, dimension numbers: all the forms that are products.
FORMS = {
    "dense": ((2, 8, 16), (16, 24), LAST),
    "rows alone": ((8, 16), (16, 24), (((1,), (0,)), ((), ()))),
    "heads": ((2, 8, 16), (16, 4, 6), LAST),
    "from heads": ((2, 8, 4, 4), (4, 4, 24), (((2, 3), (0, 1)), ((), ()))),
    "transposed": ((2, 8, 16), (24, 16), (((2,), (1,)), ((), ()))),
    "from heads, transposed": ((2, 8, 4, 4), (8, 3, 4, 4), (((2, 3), (2, 3)), ((), ()))),
}


def axes_of(form, split):
    """mesh_axes of a kernel whose first n ("columns") or first k ("rows") is split."""
    _, kernel, ((_, contracted), _) = FORMS[form]
    first = [d for d in range(len(kernel)) if (d in contracted) == (split == "rows")][0]
    return tuple("tp" if d == first else None for d in range(len(kernel)))


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("split", ["columns", "rows"])
@pytest.mark.parametrize("form", FORMS)
def test_products_whose_kernel_axes_are_said(form, split, sequence_parallel):
    x_shape, kernel_shape, numbers = FORMS[form]
    x, kernel = draw(*x_shape), draw(*kernel_shape, seed=1)
    tp = jnn.TensorParallel("tp", sequence_parallel=sequence_parallel)
    dot = tp.dot_general(axes_of(form, split))
    want = lax.dot_general(x, kernel, numbers, precision="highest")
    with jax.set_mesh(make_mesh((4,))):
        f = jax.jit(lambda x, w: dot(x, w, numbers, precision="highest"))
        assert_close(f(x, kernel), want)
        op = {"columns": [GATHER], "rows": [SCATTER]}[split]
        if not sequence_parallel:
            op = [] if split == "columns" else [REDUCE]
        assert calls_of(f, x, kernel) == op
        assert f(x, kernel).dtype == want.dtype


@pytest.mark.parametrize(
    "x_spec, kernel_spec, out, calls, spec",
    [
        (P("data", "tp"), P(None, "tp"), None, [GATHER], P("data", None, "tp")),
        (P("data"), P(None, "tp"), None, [], P("data", None, "tp")),
        (P("tp"), P(None, "tp"), None, [GATHER], P(None, None, "tp")),
        (P("data", None, "tp"), P("tp"), None, [SCATTER], P("data", "tp", None)),
        (P("data", None, "tp"), P("tp"), P("data"), [REDUCE], P("data", None, None)),
        (P(None, None, "tp"), P("tp"), P("tp", "data"), [SCATTER], P("tp", "data", None)),
        (P("data", "tp"), P("data", "tp"), None, [GATHER], P("data", None, "tp")),
        (P("data"), P(), None, [], P("data", None, None)),
    ],
)
def test_what_types_say(x_spec, kernel_spec, out, calls, spec):
    """Under explicit sharding nothing has to be said."""
    mesh = mesh_of(AxisType.Explicit)
    dot = jnn.TensorParallel("tp").dot_general()
    with jax.set_mesh(mesh):
        x = jax.device_put(draw(4, 8, 16), jax.NamedSharding(mesh, x_spec))
        kernel = jax.device_put(draw(16, 24), jax.NamedSharding(mesh, kernel_spec))
        f = jax.jit(lambda x, w: dot(x, w, LAST, out_sharding=out))
        assert calls_of(f, x, kernel) == calls
        y = f(x, kernel)
    assert_close(y, draw(4, 8, 16) @ draw(16, 24))
    assert y.sharding.is_equivalent_to(jax.NamedSharding(mesh, spec), 3), y.sharding


def test_heads_under_explicit_sharding():
    mesh = mesh_of(AxisType.Explicit)
    dot = jnn.TensorParallel("tp").dot_general()
    numbers = FORMS["from heads"][2]
    put = lambda a, *spec: jax.device_put(a, jax.NamedSharding(mesh, P(*spec)))  # noqa: E731
    with jax.set_mesh(mesh):
        x, wq = put(draw(2, 8, 16), "data", "tp"), put(draw(16, 4, 6), None, "tp")
        wo = put(draw(4, 6, 16, seed=2), "tp")

        def f(x, wq, wo):
            return dot(dot(x, wq, LAST), wo, numbers)

        y = jax.jit(f)(x, wq, wo)
        assert calls_of(f, x, wq, wo) == [GATHER, SCATTER]
        assert y.sharding.spec == P("data", "tp", None)
    assert_close(y, np.einsum("bsd,dhc,hce->bse", *map(np.asarray, (x, wq, wo))))


@pytest.mark.parametrize(
    "lhs, rhs, numbers, options",
    [
        ((4, 8), (8, 8), (((1,), (0,)), ((), ())), {"axes": (None, None)}),
        ((2, 3, 4), (2, 4, 8), (((2,), (1,)), ((0,), (0,))), {"axes": (None,) * 3}),
        ((4, 8), (8, 8), (((1,), (0,)), ((), ())), {"axes": ("tp", "tp")}),
        ((4, 8), (8, 8), (((1,), (0,)), ((), ())), {"axis": "other"}),
        ((2, 4, 4, 2), (4, 2, 8), (((2, 3), (0, 1)), ((), ())), {"axes": (None, "tp", None)}),
    ],
)
def test_what_it_leaves_alone(lhs, rhs, numbers, options):
    x, w = draw(*lhs), draw(*rhs, seed=1)
    axes = options.get("axes", (None,) * (len(rhs) - 1) + ("tp",))
    dot = jnn.TensorParallel(options.get("axis", "tp")).dot_general(axes)
    with jax.set_mesh(make_mesh((2,))):
        assert calls_of(lambda x, w: dot(x, w, numbers), x, w) == []
        assert_close(dot(x, w, numbers), lax.dot_general(x, w, numbers))


@pytest.mark.parametrize(
    "lhs, rhs, numbers, dtype",
    [
        ((2, 3, 4), (2, 4, 8), (((2,), (1,)), ((0,), (0,))), np.float32),  # a batch
        ((4, 8), (4, 8), (((0,), (0,)), ((), ())), np.float32),  # not x's last dimension
        ((2, 4, 8), (8, 4, 8), (((1, 2), (1, 0)), ((), ())), np.float32),  # in another order
        ((8,), (8, 8), (((0,), (0,)), ((), ())), np.float32),  # no rows
        ((4, 8), (8,), (((1,), (0,)), ((), ())), np.float32),  # no columns
        ((4, 8), (8, 8), (((1,), (0,)), ((), ())), np.int32),
    ],
)
def test_a_kernel_that_is_split_for_nothing_is_said(lhs, rhs, numbers, dtype, caplog):
    x, w = draw(*lhs).astype(dtype), draw(*rhs, seed=1).astype(dtype)
    dot = jnn.TensorParallel("tp").dot_general((None,) * (len(rhs) - 1) + ("tp",))
    with jax.set_mesh(make_mesh((2,))):
        with pytest.raises(NotImplementedError, match="is not x .* times .*strict is on"):
            dot(x, w, numbers)
        with jflux.config(strict=False):
            assert_close(dot(x, w, numbers), lax.dot_general(x, w, numbers))
    assert f"nn.DotGeneral takes its lax reference: the product of {np.dtype(dtype)}" in caplog.text


@pytest.mark.parametrize("rows", [False, True])
def test_einsums_contract_in_any_order(rows):
    """`jnp.einsum` writes an output projection with the last contracted dimension first."""
    equation = "btnh,nhd->btd" if rows else "bnht,nhd->btd"
    dot = jnn.TensorParallel("tp").dot_general(("tp", None, None))
    seen = []

    def noted(*args, **options):
        seen.append(args[2][0])
        return dot(*args, **options)

    x, w = draw(2, 8, 4, 6), draw(4, 6, 16, seed=1)
    with jax.set_mesh(make_mesh((2,))), jflux.config(strict=rows):
        if not rows:
            x = np.moveaxis(x, 1, 3)

        def f(x, w):
            return jnp.einsum(equation, x, w, _dot_general=noted)

        calls = calls_of(f, x, w)
        assert_close(jax.jit(f)(x, w), np.einsum(equation, x, w))
    assert calls == ([SCATTER] if rows else []) and seen


def test_without_a_mesh_and_on_one_rank():
    dot = jnn.TensorParallel("tp").dot_general((None, "tp"))
    x, w = draw(1, 3, 4), draw(4, 5)
    want = x @ w
    assert_close(dot(x, w, LAST), want)
    with jax.set_mesh(make_mesh((1,))):
        assert_close(dot(x, w, LAST), want)
    with jax.set_mesh(make_mesh((2,), ("other",))):
        assert_close(dot(x, w, LAST), want)


def test_types_of_results():
    x, w = (jnp.asarray(a, jnp.bfloat16) for a in (draw(2, 8, 16), draw(16, 24)))
    dot = jnn.TensorParallel("tp", mesh=make_mesh((4,))).dot_general((None, "tp"))
    assert dot(x, w, LAST).dtype == jnp.bfloat16
    assert dot(x, w, LAST, None, jnp.float32).dtype == jnp.float32


def test_a_sequence_that_the_ranks_do_not_divide():
    """Such as one token: it is whole on all ranks."""
    x, w = draw(2, 1, 16), draw(16, 8)
    with jax.set_mesh(make_mesh((4,))):
        for axes, calls in (((None, "tp"), []), (("tp", None), [REDUCE])):
            dot = jnn.TensorParallel("tp").dot_general(axes)
            assert calls_of(lambda x, w, dot=dot: dot(x, w, LAST), x, w) == calls
            assert_close(dot(x, w, LAST), x @ w)


def test_a_kernel_that_the_ranks_do_not_divide():
    dot = jnn.TensorParallel("tp").dot_general((None, "tp"))
    x, w = draw(2, 8, 16), draw(16, 6)
    with jax.set_mesh(make_mesh((4,))):
        with pytest.raises(NotImplementedError, match="4 ranks do not divide dimension 1"):
            dot(x, w, LAST)
        with jflux.config(strict=False):
            assert_close(dot(x, w, LAST), x @ w)


def test_names_that_are_too_few():
    dot = jnn.TensorParallel("tp", mesh=make_mesh((2,))).dot_general(("mlp",))
    with pytest.raises(ValueError, match=r"mesh_axes=\('mlp',\) must name the 2 dimensions"):
        dot(draw(2, 8, 16), draw(16, 8), LAST)


def test_inside_shard_map():
    """Flax's own layers, made with one rank's features."""
    tp, mesh = jnn.TensorParallel("tp"), make_mesh((4,))
    up = nn.Dense(6, use_bias=False, dot_general=tp.dot_general(("embed", "mlp")))
    down = nn.Dense(16, use_bias=False, dot_general=tp.dot_general(("mlp", "embed")))
    x, w1, w2 = draw(2, 8, 16), draw(16, 24), draw(24, 16)

    def mlp(x, w1, w2):
        h = nn.gelu(up.apply({"params": {"kernel": w1}}, x))
        return down.apply({"params": {"kernel": w2}}, h)

    specs = (P(None, "tp"), P(None, "tp"), P("tp", None))
    mapped = jax.shard_map(mlp, mesh=mesh, in_specs=specs, out_specs=P(None, "tp"))
    assert_close(jax.jit(mapped)(x, w1, w2), nn.gelu(x @ w1) @ w2)
    assert calls_of(mapped, x, w1, w2) == [GATHER, SCATTER]


# ---- Names ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "names",
    [("embed", "mlp"), ("mlp", "embed"), ("embed", "heads", "kv"), ("x", None), ("embed", "norm")],
)
def test_rules_mean_what_they_mean_to_flax(names):
    rules = [
        ("mlp", ("fsdp_transpose", "tensor")),
        ("heads", "tensor"),
        ("embed", ("fsdp", "fsdp_transpose")),
        ("embed", "fsdp"),
        ("kv", None),
        ("norm", "tensor"),
    ]
    axes = ("data", "fsdp", "fsdp_transpose", "tensor")
    want = nn.logical_to_mesh_axes(names, rules)
    want = [() if e is None else e if isinstance(e, tuple) else (e,) for e in want]
    assert _rules.mesh_axes(names, rules, axes) == want


def test_where_rules_come_from():
    x, w = draw(2, 8, 16), draw(16, 24)

    def calls(**options):
        dot = jnn.TensorParallel("tp", **options).dot_general(("in", "out"))
        return calls_of(lambda x, w: dot(x, w, LAST), x, w)

    with jax.set_mesh(make_mesh((4,))):
        assert calls() == []
        assert calls(rules=[("out", ["tp"])]) == [GATHER]
        with nn.logical_axis_rules([("in", "tp")]):
            assert calls() == [SCATTER]
            assert calls(rules=[("out", "tp")]) == [GATHER]


# ---- Models --------------------------------------------------------------------------------------


class LinenBlock(nn.Module):
    """Of Flax's own layers alone."""

    dot_general: type = staticmethod(lambda *axes: None)

    @nn.compact
    def __call__(self, x):
        of = self.dot_general
        attention = nn.MultiHeadDotProductAttention(
            8, qkv_dot_general=of("embed", "heads", "kv"),
            out_dot_general=of("heads", "kv", "embed"),
        )  # fmt: skip
        x = x + attention(nn.LayerNorm()(x), mask=nn.make_causal_mask(x[..., 0]))
        h = nn.gelu(nn.Dense(48, dot_general=of("embed", "mlp"))(nn.LayerNorm()(x)))
        return x + nn.Dense(16, dot_general=of("mlp", "embed"))(h)


class LinenTransformer(nn.Module):
    block: nn.Module

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(32, 16)(tokens)
        for _ in range(2):
            x = self.block.copy(name=None, parent=self)(x)
        return nn.LayerNorm()(x)


def loss_and_gradient(apply, *args):
    def loss(params, tokens):
        y = apply(params, tokens)
        return jnp.vdot(y, jnp.cos(jnp.arange(y.size, dtype=y.dtype))), y

    return jax.jit(jax.value_and_grad(loss, has_aux=True))(*args)


def test_a_linen_transformer():
    tokens = np.random.default_rng(0).integers(0, 32, (2, 24))
    plain = LinenTransformer(LinenBlock())
    params = jax.tree.map(np.asarray, jax.jit(plain.init)(jax.random.key(0), tokens))
    want = loss_and_gradient(plain.apply, params, tokens)

    tp = jnn.TensorParallel("tp", x_spec=P("data"))
    fused = LinenTransformer(LinenBlock(lambda *axes: tp.dot_general(axes)))
    with jax.set_mesh(mesh_of()):
        assert_close(loss_and_gradient(fused.apply, params, tokens), want)
        # Queries, keys and values share a gather.
        block = [GATHER, SCATTER, GATHER, SCATTER]
        text = compiled_text(fused.apply, params, tokens)
        assert sorted(fused_calls(text)) == sorted(2 * block)
        # Nothing else is exchanged: activations stay where the ops leave them.
        for op in ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "permute"):
            assert f"{op}(" not in text and f"{op}-start(" not in text
        # The same parameters come out of it.
        made = jax.jit(fused.init)(jax.random.key(0), tokens[:1, :1])
        assert_close(made, params)


class NNXBlock(nnx.Module):
    def __init__(self, rngs, **dots):
        self.norm = nnx.LayerNorm(16, rngs=rngs)
        self.attention_norm = nnx.LayerNorm(16, rngs=rngs)
        up, down = dots.get("up", lax.dot_general), dots.get("down", lax.dot_general)
        self.attention = nnx.MultiHeadAttention(
            8, 16, decode=False, rngs=rngs,
            qkv_dot_general=dots.get("qkv"), out_dot_general=dots.get("out"),
        )  # fmt: skip
        self.up = nnx.Linear(16, 48, dot_general=up, rngs=rngs)
        self.down = nnx.Linear(48, 16, dot_general=down, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


def test_an_nnx_transformer():
    x = draw(2, 24, 16)
    plain = NNXBlock(nnx.Rngs(0))
    tp = jnn.TensorParallel("tp", x_spec=P("data"))
    fused = NNXBlock(
        nnx.Rngs(0), up=tp.dot_general(("embed", "mlp")), down=tp.dot_general(("mlp", "embed")),
        qkv=tp.dot_general(("embed", "heads", "kv")), out=tp.dot_general(("heads", "kv", "embed")),
    )  # fmt: skip

    def apply_of(module):
        graph, state = nnx.split(module)

        def apply(params, x):
            return nnx.merge(graph, params)(x)

        return apply, jax.tree.map(np.asarray, state)

    want = loss_and_gradient(*apply_of(plain), x)
    with jax.set_mesh(mesh_of()):
        apply, state = apply_of(fused)
        assert_close(loss_and_gradient(apply, state, x), want)
        calls = calls_of(apply, state, x)
        assert sorted(calls) == sorted(2 * [GATHER, SCATTER])


def test_nnx_under_explicit_sharding():
    """Types say everything; nnx.Linear passes on how its result is to be."""
    mesh, x = mesh_of(AxisType.Explicit), draw(2, 24, 16)
    dot = jnn.TensorParallel("tp").dot_general()

    def split(*names):
        return {"kernel_metadata": {"out_sharding": names}}

    with jax.set_mesh(mesh):
        up = nnx.Linear(
            16, 48, use_bias=False, dot_general=dot, rngs=nnx.Rngs(0), **split(None, "tp")
        )
        down = nnx.Linear(
            48, 16, use_bias=False, dot_general=dot, rngs=nnx.Rngs(1), **split("tp", None)
        )
        graph, state = nnx.split((up, down))

        def f(state, x):
            up, down = nnx.merge(graph, state)
            return down(nnx.gelu(up(x)), out_sharding=P("data", "tp", None))

        sharded = jax.device_put(x, jax.NamedSharding(mesh, P("data", "tp")))
        y = jax.jit(f)(state, sharded)
        assert calls_of(f, state, sharded) == [GATHER, SCATTER]
        assert y.sharding.spec == P("data", "tp", None)
    w1, w2 = (np.asarray(layer.kernel[...]) for layer in (up, down))
    assert_close(y, nnx.gelu(x @ w1) @ w2)


# ---- As MaxText calls it -------------------------------------------------------------------------


class DenseGeneral(nn.Module):
    """The calling side of MaxText's layer of this name, in linen."""

    features: tuple
    kernel_axes: tuple
    axis: tuple = (-1,)
    quant: object = None

    @nn.compact
    def __call__(self, x):
        axis = tuple(a % x.ndim for a in self.axis)
        init = nn.with_logical_partitioning(nn.initializers.normal(0.1), self.kernel_axes)
        shape = tuple(x.shape[a] for a in axis) + self.features
        kernel = self.param("kernel", init, shape, jnp.float32)
        numbers = ((axis, tuple(range(len(axis)))), ((), ()))
        if self.quant is None:
            return lax.dot_general(x, kernel, numbers)
        assert self.quant.quant_mode == "train"
        dot_general = self.quant.dot_general_cls(mesh_axes=self.kernel_axes)()
        return dot_general(x, kernel, numbers, precision=None)


class Attention(nn.Module):
    quant: object = None

    @nn.compact
    def __call__(self, x):
        dense = functools.partial(DenseGeneral, quant=self.quant)
        q, k, v = (
            dense((4, 8), ("embed", axis, "kv"), name=name)(x)
            for name, axis in (("query", "q_heads"), ("key", "kv_heads"), ("value", "kv_heads"))
        )
        o = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        return dense((16,), ("heads", "kv", "embed"), (-2, -1), name="out")(o)


RULES = (
    ("q_heads", ["tensor", "tensor_sequence"]),
    ("heads", ["tensor", "tensor_sequence"]),
    ("kv_heads", ["tensor", "tensor_sequence"]),
    ("embed", ["fsdp"]),
    ("kv", []),
)


def test_maxtext_in_linen():
    """Its names, its rules, its context; with the kernel split over another axis too."""
    x = draw(2, 8, 16)
    plain = Attention()
    params = jax.tree.map(np.asarray, nn.unbox(jax.jit(plain.init)(jax.random.key(0), x)))
    want = loss_and_gradient(plain.apply, params, x)
    quant = jnn.TensorParallel("tensor_sequence", x_spec=P("fsdp"))
    mesh = Mesh(np.array(DEVICES).reshape(2, 1, 4), ("fsdp", "tensor", "tensor_sequence"))
    fused = Attention(quant)
    with jax.set_mesh(mesh), nn.logical_axis_rules(RULES):
        assert_close(loss_and_gradient(fused.apply, params, x), want)
        assert calls_of(fused.apply, params, x) == [GATHER, SCATTER]
        assert_close(nn.unbox(jax.jit(fused.init)(jax.random.key(0), x)), params)


def test_maxtext_in_nnx():
    """It wraps the dot_general, a linen module, and initialises it with one row."""
    quant = jnn.TensorParallel("tp")
    axes = ("embed", "mlp")
    x, kernel = draw(2, 8, 16), draw(16, 24)
    with jax.set_mesh(make_mesh((4,))):
        module = quant.dot_general_cls(mesh_axes=axes)()
        dot = nnx.bridge.ToNNX(module, rngs=nnx.Rngs(0))
        numbers = (((1,), (0,)), ((), ()))
        dot.lazy_init(jnp.zeros((1, 16)), jnp.asarray(kernel), numbers, precision=None)
        graph, state = nnx.split(dot)

        def f(state, x, w):
            return nnx.merge(graph, state)(x, w, LAST, precision=None, mutable=["aqt"])

        assert_close(jax.jit(f)(state, x, kernel), x @ kernel)
        assert calls_of(f, state, x, kernel) == [GATHER]
    assert not jax.tree.leaves(nnx.state(dot, nnx.Param))


def test_dot_general_cls_of_flax():
    tp, x = jnn.TensorParallel("tp"), draw(2, 8, 16)
    layer = nn.Dense(24, dot_general_cls=tp.dot_general_cls(mesh_axes=("embed", "mlp")))
    params = nn.Dense(24).init(jax.random.key(0), x)
    params = jax.tree.map(np.asarray, params)
    with jax.set_mesh(make_mesh((4,))):
        assert jax.tree.structure(layer.init(jax.random.key(0), x)) == jax.tree.structure(params)
        assert calls_of(layer.apply, params, x) == [GATHER]
        assert_close(layer.apply(params, x), nn.Dense(24).apply(params, x))
        linear = nnx.LinearGeneral(
            16, 24, dot_general_cls=tp.dot_general_cls((None, "tp")), rngs=nnx.Rngs(0)
        )
        y = linear(jnp.asarray(x))
    assert_close(y, x @ np.asarray(linear.kernel[...]))
