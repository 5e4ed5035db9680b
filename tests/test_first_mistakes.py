"""What somebody who is new to jflux gets wrong, and what is said then: each message names what to
do next."""

import contextlib
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import PLATFORM, PRODUCTS, make_mesh, of_way
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jflux
import jflux.nn
from jflux import _config
from jflux._stress.calls import per_device

RANKS = 2
x, w = jnp.zeros((4, 8)), jnp.zeros((8, 4))


@pytest.fixture(autouse=True)
def as_users_have_it():
    """Without the suite's `strict`: GPUs have no kernels for float32."""
    with _config.override(strict=False):
        yield


def _zeros(*shape):
    return jnp.zeros((RANKS, *shape))


# ---- Outside of shard_map ------------------------------------------------------------------------

LENGTHS = jnp.zeros(1, jnp.int32)
CACHE = jnp.zeros((1, 4, 2, 8))
CHOICES = jnp.zeros((4, 1), jnp.int32)
SPLIT, TRANSPOSED = {"split_axis": 1, "concat_axis": 0}, {"transpose_rhs": True}


@pytest.mark.parametrize(
    "call",
    [
        lambda **k: jflux.all_reduce(x, **k),
        lambda **k: jflux.all_gather(x, **k),
        lambda **k: jflux.reduce_scatter(x, **k),
        lambda **k: jflux.all_to_all(x, split_axis=0, concat_axis=1, **k),
        lambda **k: jflux.halo_exchange(x, halo=1, **k),
        lambda **k: jflux.flash_decode(CACHE[:, 0], CACHE, CACHE, LENGTHS, **k),
        lambda **k: jflux.update_cache(CACHE, CACHE[:, :1], LENGTHS, **k),
        lambda **k: jflux.moe_dispatch(x, CHOICES, CHOICES * 1.0, num_experts=2, **k),
        lambda **k: jflux.dispatch_grouped_matmul(x, w[None], CHOICES, num_experts=2, **k),
    ],
    ids="all_reduce all_gather reduce_scatter all_to_all halo_exchange flash_decode update_cache "
    "moe_dispatch dispatch_grouped_matmul".split(),
)
def test_ops_of_one_ranks_arrays_need_shard_map(call):
    with pytest.raises(NameError, match="axis_name='tp' needs a jax.shard_map around the call"):
        jax.jit(lambda: call(axis_name="tp"))()
    mesh = make_mesh((RANKS,))
    with pytest.raises(NameError, match="axis_name='ep' must be an axis of .*the call: 'tp'"):
        per_device(mesh, lambda _: call(axis_name="ep"))(_zeros(1))


@pytest.mark.parametrize(
    "call",
    [
        lambda x, w, names: jflux.all_gather_matmul(x, w, axis_name=names),
        lambda x, w, names: jflux.matmul_all_reduce(x, w, axis_name=names),
        lambda x, w, names: jflux.all_reduce(x, axis_name=names),
        lambda x, w, names: jflux.all_gather(x, axis_name=names),
        lambda x, w, names: jflux.attention(*[x[None, :, None]] * 3, axis_name=names),
    ],
    ids="all_gather_matmul matmul_all_reduce all_reduce all_gather attention".split(),
)
def test_axes_in_a_list_are_those_in_a_tuple(call):
    mesh = make_mesh((RANKS,))
    x, w = (jax.random.normal(jax.random.key(i), (RANKS, 8, 8)) for i in range(2))

    def run(names):
        def loss(x, w):
            return jnp.sin(per_device(mesh, lambda x, w: call(x, w, names))(x, w)).sum()

        return jax.jit(jax.value_and_grad(loss))(x, w)

    for got, want in zip(run(["tp"]), run("tp"), strict=True):
        np.testing.assert_array_equal(got, want)
    with pytest.raises(ValueError, match="a mesh axis may be named once, got .'tp', 'tp'."):
        run(["tp", "tp"])


# ---- One rank's shapes, and global ones ----------------------------------------------------------


@pytest.mark.parametrize("k, asks", [(16, True), (4, True), (9, False)])
def test_a_product_of_a_whole_array_and_a_part_asks_how_they_are_split(k, asks):
    f = per_device(
        make_mesh((RANKS,)), lambda x, w: jflux.matmul_reduce_scatter(x, w, axis_name="tp")
    )
    with pytest.raises(ValueError, match="do not contract.*Shapes are one rank's") as error:
        f(_zeros(4, 8), _zeros(k, 4))
    assert ("in in_specs, x is P(None, 'tp'), w is P('tp', None)" in str(error.value)) == asks


@pytest.mark.parametrize(
    "op, x, w, options, specs",
    [
        ("all_gather_matmul", (3, 4, 8), (16, 4), {}, "P(None, 'tp', None), w is P(None, 'tp')"),
        ("matmul_all_reduce", (4, 8), (4, 16), TRANSPOSED, "P(None, 'tp'), w is P(None, 'tp')"),
        ("matmul_all_to_all", (4, 8), (16, 4), SPLIT, "P('tp', None), w is P(None, None)"),
        ("all_to_all_matmul", (4, 8), (8, 4), SPLIT, "P('tp', None), w is P('tp', None)"),
    ],
)
def test_a_product_names_the_specs_that_it_wants(op, x, w, options, specs):
    f = per_device(
        make_mesh((RANKS,)),
        lambda x, w: getattr(jflux, op)(x, w, axis_name="tp", **options),
    )
    with pytest.raises(ValueError, match=f"do not contract.*{re.escape(specs)}"):
        f(_zeros(*x), _zeros(*w))


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: jflux.all_reduce(x, "tp"), "jflux.all_reduce takes x by position, and all else"),
        (lambda: jflux.all_gather_matmul(x, w, ("a", "b")), r"axis_name=\('a', 'b'\)"),
        (lambda: jflux.attention(x, x, x, "tp"), "jflux.attention takes q, k, v by pos.*me='tp'"),
        (lambda: jflux.nn.mlp(x, w, w, "tp"), "jflux.nn.mlp takes x, up, down by position"),
        (lambda: jflux.moe.z_loss(x, "tp"), "jflux.moe.z_loss takes logits by position"),
    ],
    ids="all_reduce all_gather_matmul attention mlp z_loss".split(),
)
def test_an_axis_by_position(call, message):
    with pytest.raises(TypeError, match=message):
        call()


@pytest.mark.parametrize("window", [-1, (3, -1), (None, -1), (1, 2, 3)])
def test_a_window_says_how_a_side_is_left_open(window):
    q = jax.random.normal(jax.random.key(0), (1, 4, 1, 8))
    with pytest.raises(ValueError, match="0 or more.*, of which None leaves a side open"):
        jflux.attention(q, q, q, window=window)
    open_ = jflux.attention(q, q, q, window=(None, 0))
    np.testing.assert_allclose(open_, jflux.attention(q, q, q, causal=True), rtol=1e-5)


def test_an_epilogue_of_global_shape_says_what_a_rank_has():
    mesh = make_mesh((RANKS,))
    f = per_device(mesh, lambda x, w, b: jflux.all_gather_matmul(x, w, axis_name="tp", bias=b))
    with pytest.raises(ValueError, match=r"bias has shape \(8,\).*4 columns on each rank"):
        f(_zeros(4, 8), _zeros(8, 4), _zeros(8))
    f = per_device(
        mesh, lambda x, w, r: jflux.matmul_reduce_scatter(x, w, axis_name="tp", residual=r)
    )
    with pytest.raises(ValueError, match=r"residual has shape \(4, 4\), y has \(2, 4\) on each"):
        f(_zeros(4, 8), _zeros(8, 4), _zeros(4, 4))


def test_a_spec_is_no_string():
    with pytest.raises(TypeError, match=r"x_spec='data' must be.*PartitionSpec, such as P\("):
        jflux.all_gather_matmul(x, w, axis_name="tp", mesh=make_mesh((RANKS,)), x_spec="data")


# ---- The heap ------------------------------------------------------------------------------------


@pytest.mark.skipif(PLATFORM != "cpu", reason="a CPU's heap is made again quickly")
def test_init_after_the_first_call_names_what_differs(own_heap):
    own_heap(heap_bytes=None)
    with pytest.raises(RuntimeError, match="before the first op is lowered") as error:
        jflux.init(heap_bytes=1 << 24)
    assert re.findall(r"exists with (\S+);.*with (\S+),", str(error.value)) == [
        ("heap_bytes=None", f"heap_bytes={1 << 24}")
    ]


# ---- Mixtures of experts -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "x, indices, experts, error, message",
    [
        ((1, 4, 8), CHOICES, 2, ValueError, r"x.reshape\(-1, H\)"),
        ((4, 8), CHOICES * 1.0, 2, TypeError, r"jax.lax.top_k returns \(values, indices\)"),
        ((4, 8), CHOICES, 1, ValueError, "num_experts=1.*counts the experts of all"),
    ],
)
def test_tokens_and_choices(x, indices, experts, error, message):
    def dispatch(x):
        options = {"num_experts": experts, "axis_name": "tp"}
        return jflux.moe_dispatch(x, indices, CHOICES * 1.0, **options).rows

    with pytest.raises(error, match=message):
        per_device(make_mesh((RANKS,)), dispatch)(_zeros(*x))


# ---- Flax ----------------------------------------------------------------------------------------


def _mesh(*names):
    devices = np.array(jax.devices()[: 2 ** len(names)])
    if devices.size < 2 ** len(names):
        pytest.skip(f"{2 ** len(names)} devices, and there are {devices.size}")
    return Mesh(devices.reshape((2,) * len(names)), names)


@pytest.mark.parametrize(
    "names, axes, says",
    [
        (
            (),
            ("embed", "mlp"),
            "there is no mesh: call the model under jax.set_mesh.*makes parameters alone",
        ),
        (("model",), ("embed", "mlp"), r"axis_name='tp' is no axis of the mesh, \('model',\)"),
        (("tp",), ("width", "hidden"), r"neither the rules nor the mesh have \['width', 'hidden'"),
        (("tp",), (), r'dot_general\(\("embed", "mlp"\)\) names its dimensions'),
        (("tp",), ("embed", "mlp"), None),
    ],
)
def test_a_dot_general_without_effect_says_so(names, axes, says, caplog):
    nnx = pytest.importorskip("flax.nnx")
    import jflux.nn

    _config._said.clear()
    dot = jflux.nn.TensorParallel("tp").dot_general(axes)
    with (
        jax.set_mesh(_mesh(*names)) if names else contextlib.nullcontext(),
        caplog.at_level("WARNING"),
    ):
        layer = nnx.Linear(8, 4, dot_general=dot, rngs=nnx.Rngs(0))
        call = nnx.jit(lambda layer, x: layer(x))
        if not names:  # as a model is made that has its mesh later
            call(layer, x[:1])
            assert not caplog.records
        call(layer, x)
    said = [r.message for r in caplog.records if "is lax.dot_general" in r.message]
    assert [bool(re.search(says, message)) for message in said] == [True] if says else not said


@pytest.mark.parametrize(
    "names, make, message",
    [
        ((), lambda nn, **k: nn.MLP(8, 16, **k), "make the layer under jax.set_mesh"),
        (("model",), lambda nn, **k: nn.MLP(8, 16, **k), r"axis_name='tp'.*axes \('model',\)"),
        (("tp",), lambda nn, **k: nn.MLP(8, 15, **k), r"2 ranks .*'tp'.* the 15 of 'mlp'"),
        (("tp",), lambda nn, **k: nn.Attention(3, 12, **k), "do not divide the 3 of 'heads'"),
        (
            ("tp",),
            lambda nn, **k: nn.Attention(2, 12, num_kv_heads=1, **k),
            r'the 1 of .kv_heads.*axes=\("embed", "heads", None, "kv"\)',
        ),
        (("tp",), lambda nn, **k: nn.Embed(5, 8, **k), "the 5 of 'vocab'.*make the table larger"),
        (
            ("tp", "ep"),
            lambda nn, **k: nn.MoE(8, 3, 16, 1, expert_axis="ep", **k),
            "2 ranks .*'ep'.* do not divide the 3 of 'expert'",
        ),
        (
            ("tp",),
            lambda nn, **k: nn.MLP(8, 16, rules=(("mlp", "tp"), ("embed", "fsdp")), **k),
            r"by the rules 'embed', .*, is split over \['fsdp'\], .* axes \('tp',\)",
        ),
    ],
    ids="mesh axis mlp heads kv_heads vocab expert rule".split(),
)
def test_nnx_layers_that_have_no_place_on_the_mesh(names, make, message):
    nnx = pytest.importorskip("flax.nnx")
    import jflux.nn.nnx

    with jax.set_mesh(_mesh(*names)) if names else contextlib.nullcontext():
        with pytest.raises(ValueError, match=f"^jflux.nn.nnx: .*{message}"):
            make(jflux.nn.nnx, rngs=nnx.Rngs(0))


def test_the_other_axes_of_keys_and_values_are_a_remedy():
    nnx = pytest.importorskip("flax.nnx")
    import jflux.nn.nnx

    mesh = _mesh("tp")
    with jax.set_mesh(mesh):
        layer = jflux.nn.nnx.Attention(
            2, 12, num_kv_heads=1, axes=("embed", "heads", None, "kv"), rngs=nnx.Rngs(0)
        )
        y = nnx.jit(lambda layer, x: layer(x))(layer, jnp.ones((1, 4, 12)))
    assert layer.query.kernel[...].sharding.spec[1] == "tp"
    assert jnp.isfinite(y).all()


@pytest.mark.parametrize("name, shape", [("query", "[d, heads, c]"), ("out", "[heads, c, d]")])
def test_attention_takes_kernels_of_three_dimensions(name, shape):
    import jflux.nn

    kernels = dict.fromkeys(("query", "key", "value"), jnp.ones((8, 2, 4)))
    kernels |= {"out": jnp.ones((2, 4, 8))} | {name: jnp.ones((8, 8))}
    message = re.escape(f"{name} must be {shape}, got (8, 8); reshape")
    with pytest.raises(ValueError, match=message):
        jflux.nn.attention(jnp.ones((1, 4, 8)), *kernels.values(), axis_name="tp")


def test_reordering_an_array_without_that_dimension():
    for reorder in (jflux.reorder_for_causal, jflux.restore_order):
        with pytest.raises(ValueError, match=r"x has shape \(16,\), and no dimension axis=1"):
            reorder(jnp.zeros(16), RANKS)
        assert reorder(jnp.zeros(16), RANKS, axis=0).shape == (16,)


def test_a_gated_mlp_has_a_function_of_its_own():
    with pytest.raises(TypeError, match="jflux.nn.gated_mlp takes a gate and an up"):
        jflux.nn.mlp(x, (w, w), w.T, axis_name="tp", mesh=make_mesh((RANKS,)))


def test_a_sum_of_what_all_ranks_have_gets_a_warning(caplog):
    """Once, where types tell, and not of one rank's. What is not summed shows it by its shape, and
    one factor may be the same on all ranks."""

    def lines(op, *specs, ranks=RANKS, check_vma=True):
        _config._said.clear()
        caplog.clear()
        rows = 8 * ranks if op == "all_to_all_matmul" or specs[1] != P() else 8
        arrays = (jnp.zeros((4 * ranks, 8)), jnp.zeros((rows, 8)))
        if op == "all_reduce":
            f, arrays = functools.partial(jflux.all_reduce, axis_name="tp"), arrays[:1]
        elif op == "all_reduce with a residual":
            f, arrays = (lambda x: jflux.all_reduce(x, axis_name="tp", residual=x * 0)), arrays[:1]
        else:
            f = of_way(op, lead=(4,), k=8, n=8).bind("tp")
        split = P() if "all_reduce" in op else P("tp")
        f = jax.shard_map(
            f, mesh=make_mesh((ranks,)), in_specs=specs[: len(arrays)], out_specs=split,
            check_vma=check_vma,
        )  # fmt: skip
        for _ in range(2):
            jax.eval_shape(f, *arrays)
        return [r.message for r in caplog.records if "same on all ranks" in r.message]

    for op in (*PRODUCTS, "all_reduce", "all_reduce with a residual"):
        found = lines(op, P(), P())
        if op in ("matmul_reduce_scatter", "matmul_all_reduce", "all_reduce with a residual"):
            (line,) = found
            assert line.startswith(f"jflux.{op.split()[0]}: x {(4 * RANKS, 8)}")
            assert f"along 'tp': the sum over ranks has its term {RANKS} times" in line
            assert not lines(op, P(), P(), ranks=1)
            assert not lines(op, P(), P(), check_vma=False)
            assert "all_reduce" in op or not lines(op, P(), P("tp"))
        else:
            assert not found
