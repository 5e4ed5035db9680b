"""jflux.nn.load: weights of safetensors files, of which each rank reads its part."""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import PLATFORM, make_mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jflux
import jflux.nn
from jflux.nn import Tensor
from jflux.nn._tensors import Source, bind, of_array

D, H, G, C, F, LAYERS = 8, 4, 2, 2, 12, 2
ROOT = "model.layers.{i}"
QKV = [Tensor(f"{ROOT}.self_attn.{x}_proj.weight") for x in "qkv"]
NAMES = {
    "embed": "model.embed_tokens.weight",
    "head": Tensor("model.embed_tokens.weight").T,  # tied
    "layers/{i}/qkv": Tensor.concatenate(QKV).T,
    "layers/{i}/query": QKV[0].T.split(1, H),
    "layers/{i}/norm": Tensor(f"{ROOT}.norm.weight").apply(lambda w: w + 1),
    "layers/{i}/gate": Tensor(f"{ROOT}.gate_up.weight")[:F].T,
    "layers/{i}/up": Tensor(f"{ROOT}.gate_up.weight").split(0, 2)[1:].merge(0).T,
    "experts": Tensor("experts.{e}.{i}.weight").T.stack(e=3).stack(i=LAYERS),
}
SPECS = {
    "embed": P("tp"), "head": P(None, "tp"), "qkv": P(None, "tp"), "query": P(None, "tp"),
    "norm": P(), "gate": P(None, "tp"), "up": P(None, "tp"), "experts": P(None, None, None, "tp"),
}  # fmt: skip


def tensors_of():
    shapes = {"model.embed_tokens.weight": (16, D)}
    for i in range(LAYERS):
        shapes |= {f"model.layers.{i}.self_attn.q_proj.weight": (H * C, D)}
        shapes |= {f"model.layers.{i}.self_attn.{x}_proj.weight": (G * C, D) for x in "kv"}
        shapes |= {f"model.layers.{i}.norm.weight": (D,)}
        shapes |= {f"model.layers.{i}.gate_up.weight": (2 * F, D)}
        shapes |= {f"experts.{e}.{i}.weight": (F, D) for e in range(3)}
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def wanted(t):
    def layer(i):
        q, k, v = (t[f"model.layers.{i}.self_attn.{x}_proj.weight"] for x in "qkv")
        both = t[f"model.layers.{i}.gate_up.weight"]
        return {
            "qkv": np.concatenate([q, k, v]).T, "query": q.T.reshape(D, H, C),
            "norm": 1 + t[f"model.layers.{i}.norm.weight"], "gate": both[:F].T, "up": both[F:].T,
        }  # fmt: skip

    experts = [[t[f"experts.{e}.{i}.weight"].T for e in range(3)] for i in range(LAYERS)]
    embed = t["model.embed_tokens.weight"]
    layers = [layer(i) for i in range(LAYERS)]
    return {"embed": embed, "head": embed.T, "layers": layers, "experts": np.array(experts)}


def like(tree, mesh=None, dtype=np.float32):
    def one(path, leaf):
        name = next(key.key for key in reversed(path) if hasattr(key, "key"))
        sharding = None if mesh is None else NamedSharding(mesh, SPECS[name])
        return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=sharding)

    return jax.tree_util.tree_map_with_path(one, tree)


def same(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(np.asarray(a), b)


@pytest.fixture
def folder(tmp_path):
    """Two files and an index, and a file that it does not list."""
    save = pytest.importorskip("safetensors.numpy").save_file
    tensors = tensors_of()
    files = {"a.safetensors": list(tensors)[::2], "b.safetensors": list(tensors)[1::2]}
    for file, names in files.items():
        save({name: tensors[name] for name in names}, tmp_path / file)
    listed = {name: file for file, names in files.items() for name in names}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": listed}))
    (tmp_path / "other.safetensors").write_text("")
    return tmp_path


def test_a_folder_an_index_and_files(folder):
    want = wanted(tensors_of())
    mesh = make_mesh((2,))
    got = jflux.nn.load(folder, like(want, mesh), NAMES)
    same(got, want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(like(want, mesh)), strict=True):
        assert a.sharding == b.sharding
    files = [str(folder / f"{name}.safetensors") for name in "ab"]
    same(jflux.nn.load(files, like(want), NAMES), want)
    same(jflux.nn.load(folder / "model.safetensors.index.json", like(want), NAMES), want)


def test_types_leaves_that_stay_and_progress():
    tensors, seen = tensors_of(), []
    tree = like(wanted(tensors), dtype=jnp.bfloat16) | {"step": 7}
    got = jflux.nn.load(
        tensors, tree, NAMES | {"step": None}, progress=lambda all: seen.extend(all) or all
    )
    assert got["step"] == 7 and len(seen) == len(jax.tree.leaves(tree))
    assert got["embed"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(
        np.asarray(got["embed"]), tensors["model.embed_tokens.weight"].astype(jnp.bfloat16)
    )


class Counted:
    """An array that counts the elements that are read of it."""

    def __init__(self, array):
        self.array, self.shape, self.dtype, self.read = array, array.shape, array.dtype, 0

    def __getitem__(self, index):
        part = self.array[index]
        self.read += part.size
        return part


@pytest.mark.skipif(PLATFORM == "gpu" or jax.device_count() < 4, reason="four devices")
def test_each_rank_reads_its_part_once():
    mesh = make_mesh((2, 2), ("data", "tp"))
    tensors = {name: Counted(array) for name, array in tensors_of().items()}
    want = wanted({name: one.array for name, one in tensors.items()})
    del want["head"], want["experts"]
    for layer in want["layers"]:
        del layer["query"], layer["up"]
    same(jflux.nn.load(tensors, like(want, mesh), NAMES, unused=["experts.*"]), want)
    for name, one in tensors.items():
        used = one.array.size // (2 if "gate_up" in name else 1)
        assert one.read == (0 if "experts" in name else used), name


def test_parts_of_arrays_are_those_of_the_whole():
    array = np.arange(4 * 6 * 4).reshape(24, 4)
    parts = array.reshape(4, 6, 4)
    source = Source(lambda name: of_array(array))
    made = {
        "split": (Tensor("x").split(0, 4), parts),
        "merge": (Tensor("x").merge(0), array.reshape(96)),
        "repeat": (Tensor("x").repeat(1, 3), np.repeat(array, 3, 1)),
        "transpose": (Tensor("x").split(0, 4).transpose(1, 2, 0), parts.transpose(1, 2, 0)),
        "concatenate": (
            Tensor.concatenate(["x", Tensor("x")[6:12]]), np.concatenate([array, array[6:12]]),
        ),
        "stack": (Tensor("x").stack(e=2), np.stack([array, array])),
        "heads": (
            Tensor("x").split(0, 4).repeat(0, 2).merge(0).T,
            np.repeat(parts, 2, 0).reshape(48, 4).T,
        ),
    }  # fmt: skip
    rng = np.random.default_rng(1)
    for name, (tensor, want) in made.items():
        lazy = bind(tensor, source, {})
        assert lazy.shape == want.shape, name
        for _ in range(20):
            bounds = [sorted(rng.choice(n + 1, 2, replace=False)) for n in want.shape]
            index = tuple(slice(int(a), int(b)) for a, b in bounds)
            np.testing.assert_array_equal(lazy.read(index), want[index], err_msg=name)


def test_what_does_not_fit_is_named_before_anything_is_read():
    layer = "model.layers.0"
    wrong = {  # tensors that are others, entries that are gone, and what is said
        r"no tensor model.embed_tokens.weight \(nor of 1 more\)": (
            {"model.embed_tokens.weight": None, "experts.1.0.weight": None}, (),
        ),
        "nothing is made of .* tensor extra; name it": ({"extra": (2,)}, ()),
        r"leaf layers/0/qkv \(nor of 1 more\)": ({}, ["layers/{i}/qkv"]),
        rf"layers/0/norm has the shape \(8,\), and {layer}.norm.weight \(3,\) make \(3,\)": (
            {f"{layer}.norm.weight": (3,)}, (),
        ),
        r"layers/0/qkv .*k_proj.weight \(4, 7\), .* do not fit: arrays .* concatenated": (
            {f"{layer}.self_attn.k_proj.weight": (4, 7)}, (),
        ),
        "layers/0/up .* do not fit: dimension 0 .* as 2 equal parts": (
            {f"{layer}.gate_up.weight": (2 * F + 1, D)}, (),
        ),
    }  # fmt: skip
    for error, (changes, gone) in wrong.items():
        tensors = tensors_of() | {name: s and np.zeros(s) for name, s in changes.items()}
        tensors = {name: Counted(one) for name, one in tensors.items() if one is not None}
        names = {path: of for path, of in NAMES.items() if path not in gone}
        with pytest.raises(ValueError, match=error):
            jflux.nn.load(tensors, like(wanted(tensors_of())), names)
        assert not any(one.read for one in tensors.values())


def test_files_that_are_not_there_or_not_whole(tmp_path, monkeypatch):
    pytest.importorskip("safetensors")
    with pytest.raises(FileNotFoundError, match=r"no \*.safetensors in"):
        jflux.nn.load(tmp_path, {}, {})
    with pytest.raises(FileNotFoundError, match="no file .*gone.safetensors"):
        jflux.nn.load(tmp_path / "gone.safetensors", {}, {})
    odd = tmp_path / "odd.safetensors"
    odd.write_text("x")
    with pytest.raises(ValueError, match="odd.safetensors is no safetensors file"):
        jflux.nn.load(odd, {}, {})
    index = tmp_path / "a.safetensors.index.json"
    wrong = {
        "{": "is no JSON",
        "{}": "lists no files",
        '{"weight_map": {"a": "../x"}}': "beside it",
    }
    for text, error in wrong.items():
        index.write_text(text)
        with pytest.raises(ValueError, match=error):
            jflux.nn.load(index, {}, {})
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ModuleNotFoundError, match="pip install safetensors"):
        jflux.nn.open_safetensors(odd)


# ---- 8 bits --------------------------------------------------------------------------------------


def test_weights_in_8_bits(tmp_path):
    """As `jflux.Scaled` where the model has one, else dequantised."""
    save = pytest.importorskip("safetensors.numpy").save_file
    mesh = make_mesh((2,))
    scaled = jflux.quantize(
        jnp.asarray(np.random.default_rng(0).normal(size=(256, 384)).astype(np.float32)),
        jnp.float8_e4m3fn, block=(128, 128), power_of_two=True,
    )  # fmt: skip
    tensors = {"w": np.asarray(scaled.values), "w_scale_inv": np.asarray(scaled.scale)}
    save(tensors, tmp_path / "model.safetensors")
    sharding = NamedSharding(mesh, P(None, "tp"))
    leaf = jax.ShapeDtypeStruct((384, 256), jnp.float32, sharding=sharding)
    in_8_bits = jflux.Scaled(
        jax.ShapeDtypeStruct((384, 256), jnp.float8_e4m3fn, sharding=sharding),
        jax.ShapeDtypeStruct((3, 2), jnp.float32, sharding=sharding),
    )
    names = {"plain": Tensor("w").T, "scaled": Tensor("w").T}
    got = jflux.nn.load(tmp_path, {"plain": leaf, "scaled": in_8_bits}, names)
    np.testing.assert_array_equal(got["plain"], scaled.T.dequantize())
    np.testing.assert_array_equal(got["scaled"].dequantize(), scaled.T.dequantize())
    assert got["scaled"].values.sharding == sharding
    half = {"part": Tensor("w")[128:].split(0, 1).merge(0)}
    like_half = jflux.Scaled(
        jax.ShapeDtypeStruct((128, 384), jnp.float8_e4m3fn),
        jax.ShapeDtypeStruct((1, 3), jnp.float32),
    )
    part = jflux.nn.load(tensors, {"part": like_half}, half)["part"]
    np.testing.assert_array_equal(part.dequantize(), scaled.dequantize()[128:])
    with pytest.raises(ValueError, match="w is in 8 bits, and there is no w_scale_inv"):
        jflux.nn.load({"w": tensors["w"]}, {"plain": leaf}, names)
    with pytest.raises(ValueError, match=r"w_scale_inv has the shape \(1, 1\), not \(2, 3\)"):
        jflux.nn.load(tensors | {"w_scale_inv": np.ones((1, 1))}, {"plain": leaf}, names)


# ---- Flax ----------------------------------------------------------------------------------------


def test_models_of_nnx_and_linen():
    nnx, nn = pytest.importorskip("flax.nnx"), pytest.importorskip("flax.linen")
    mesh = make_mesh((2,))
    rng = np.random.default_rng(0)
    t = {"mlp.up.weight": rng.normal(size=(16, 8)), "mlp.down.weight": rng.normal(size=(8, 16))}
    t = {name: one.astype(np.float32) for name, one in t.items()}
    made = {n: Tensor(f"mlp.{n}.weight").T for n in ("up", "down")}
    names = {f"{n}/kernel": one for n, one in made.items()}

    def make():
        return jflux.nn.nnx.MLP(8, 16, use_bias=False, rngs=nnx.Rngs(0))

    graph, state = nnx.get_abstract_model(make, mesh)
    model = nnx.merge(graph, jflux.nn.load(t, state, names))
    same([model.up.kernel[...], model.down.kernel[...]], [one.T for one in t.values()])
    assert model.up.kernel[...].sharding.spec == P(None, "tp")

    layer = jflux.nn.linen.MLP(16, use_bias=False)
    with jax.set_mesh(mesh):
        shapes = jax.eval_shape(layer.init, jax.random.key(0), jnp.zeros((1, 4, 8)))
    rules = jflux.nn.logical_axis_rules("tp")
    shardings = nn.logical_to_mesh_sharding(nn.get_partition_spec(shapes), mesh, rules)
    split = jax.tree.map(
        lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s),
        nn.unbox(shapes), nn.unbox(shardings),
    )  # fmt: skip
    params = jflux.nn.load(t, split, {f"params/{name}": one for name, one in names.items()})
    same([params["params"][n]["kernel"] for n in ("up", "down")], [one.T for one in t.values()])
