"""jflux.plan.read: layers of Flax modules against those written by hand."""

import sys

import jax
import jax.numpy as jnp
import pytest
from harness import RANKS, make_mesh

import jflux.plan as plan
from jflux.plan.model import Layer

TOKENS = jax.ShapeDtypeStruct((8, 16), jnp.int32)
H, V = 64, 1000


def shapes(model: plan.Model) -> list[tuple]:
    return [(a.k, a.n, a.rows, a.transposed, a.taps, a.lookup) for a in model.layers]


def block(rows: int = 16) -> list[tuple]:
    """Queries, keys, values, output, and an MLP."""
    dense = [(H, H, False), (H, H, False), (H, H, False), (H, H, True), (H, 4 * H, False)]
    return [(k, n, rows, t, 1, False) for k, n, t in [*dense, (4 * H, H, True)]]


GATED = [  # grouped queries, and a gated MLP
    (k, n, 16, t, 1, False)
    for k, n, t in [
        (H, H, False), (H, H // 2, False), (H, H // 2, False), (H, H, True),
        (H, 4 * H, False), (H, 4 * H, False), (4 * H, H, True),
    ]
]  # fmt: skip
LOOKUP = (V, H, 16, True, 1, True)
HEAD = (H, V, 16, False, 1, False)


class TestLinen:
    @pytest.fixture
    def nn(self):
        pytest.importorskip("flax")
        from flax import linen

        return linen

    def test_a_transformer(self, nn):
        class Transformer(nn.Module):
            @nn.compact
            def __call__(self, tokens):
                x = nn.Embed(V, H)(tokens)
                for _ in range(2):
                    x = x + nn.MultiHeadDotProductAttention(num_heads=4)(nn.LayerNorm()(x))
                    x = x + nn.Dense(H)(nn.gelu(nn.Dense(4 * H)(nn.LayerNorm()(x))))
                return nn.Dense(V)(x)

        model = plan.read(Transformer(), TOKENS, splits_x=(("heads", 4),), checkpoint=6)
        assert shapes(model) == [LOOKUP, *block(), *block(), HEAD]
        assert (model.name, model.batch, model.checkpoint) == ("Transformer", 8, 6)
        assert plan.read(Transformer(), TOKENS, batch=64, name="t").batch == 64
        assert plan.rank(model, 8, "h200").best.grid.ranks == 8

    def test_scanned_layers_and_a_tied_head(self, nn):
        class Block(nn.Module):
            @nn.compact
            def __call__(self, x, _):
                return x + nn.Dense(H)(nn.gelu(nn.Dense(4 * H)(x))), None

        class Scanned(nn.Module):
            @nn.compact
            def __call__(self, tokens):
                embed = nn.Embed(V, H)
                blocks = nn.scan(
                    nn.remat(Block), variable_axes={"params": 0}, split_rngs={"params": True},
                    length=5,
                )  # fmt: skip
                x, _ = blocks()(embed(tokens), None)
                return embed.attend(x)

        assert shapes(plan.read(Scanned(), TOKENS)) == [*block()[4:] * 5, HEAD]

    def test_jflux_layers(self, nn):
        """Their kernels are read without a call of their own; in a scan too."""
        layers = pytest.importorskip("jflux.nn.linen")

        class Block(nn.Module):
            @nn.compact
            def __call__(self, x, _=None):
                x = layers.Attention(4, num_kv_heads=2)(x)
                return layers.MLP(4 * H, gated=True)(x, residual=x), None

        class Transformer(nn.Module):
            @nn.compact
            def __call__(self, tokens):
                embed = layers.Embed(V, H)
                x, _ = Block()(embed(tokens))
                repeated = nn.scan(
                    Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=2,
                    metadata_params={nn.PARTITION_NAME: None},
                )  # fmt: skip
                return embed.attend(repeated()(x, None)[0])

        with jax.set_mesh(make_mesh((min(2, RANKS),))):
            model = plan.read(Transformer(), TOKENS)
        assert shapes(model) == [*(GATED * 3), HEAD]
        assert model.layers[3].name == "Block_0/Attention_0/out"

    def test_convolutions(self, nn):
        class Net(nn.Module):
            @nn.compact
            def __call__(self, x):
                x = nn.Conv(32, (3, 3), strides=2)(nn.Conv(16, (3, 3))(x))
                return nn.Dense(10)(x.reshape(x.shape[0], -1))

        model = plan.read(Net(), jax.ShapeDtypeStruct((4, 8, 8, 3), jnp.float32))
        want = [(3, 16, 64, False, 9, False), (16, 32, 16, True, 9, False)]
        assert shapes(model) == [*want, (512, 10, 1, False, 1, False)]
        assert [a.input_rows for a in model.layers] == [64, 64, 1]

    def test_needs_an_example(self, nn):
        with pytest.raises(TypeError, match="pass example arguments"):
            plan.read(nn.Dense(4))

    def test_nothing_to_read(self, nn):
        with pytest.raises(ValueError, match="LayerNorm has no layers"):
            plan.read(nn.LayerNorm(), jnp.zeros((2, 4)))


class TestNnx:
    @pytest.fixture
    def nnx(self):
        pytest.importorskip("flax")
        from flax import nnx

        return nnx

    @pytest.fixture
    def transformer(self, nnx):
        class Block(nnx.Module):
            def __init__(self, rngs):
                self.attention = nnx.MultiHeadAttention(4, H, decode=False, rngs=rngs)
                self.up = nnx.Linear(H, 4 * H, rngs=rngs)
                self.down = nnx.Linear(4 * H, H, rngs=rngs)

            def __call__(self, x):
                x = x + self.attention(x)
                return x + self.down(nnx.gelu(self.up(x)))

        class Transformer(nnx.Module):
            def __init__(self, rngs):
                self.embed = nnx.Embed(V, H, rngs=rngs)
                self.blocks = nnx.List([Block(rngs) for _ in range(2)])
                self.head = nnx.Linear(H, V, rngs=rngs)

            def __call__(self, tokens, remat=False):
                x = self.embed(tokens)
                for b in self.blocks:
                    x = nnx.remat(lambda b, x: b(x))(b, x) if remat else b(x)
                return self.head(x)

        return Transformer

    def test_a_transformer(self, nnx, transformer):
        want = [LOOKUP, *block(), *block(), HEAD]
        before = nnx.Linear.__call__
        model = plan.read(transformer(nnx.Rngs(0)), TOKENS)
        assert shapes(model) == want
        assert model.layers[1].name == "blocks/0/attention/query"
        assert nnx.Linear.__call__ is before
        abstract = nnx.eval_shape(lambda: transformer(nnx.Rngs(0)))
        assert shapes(plan.read(abstract, TOKENS)) == want

    def test_jflux_layers(self, nnx):
        layers = pytest.importorskip("jflux.nn.nnx")

        class Block(nnx.Module):
            def __init__(self, rngs):
                self.attention = layers.Attention(4, H, num_kv_heads=2, rngs=rngs)
                self.mlp = layers.MLP(H, 4 * H, gated=True, rngs=rngs)

            def __call__(self, x):
                return self.mlp(self.attention(x))

        class Transformer(nnx.Module):
            def __init__(self, rngs):
                self.embed = layers.Embed(V, H, rngs=rngs)
                self.blocks = nnx.List([Block(rngs) for _ in range(2)])

            def __call__(self, tokens):
                x = self.embed(tokens)
                for block in self.blocks:
                    x = block(x)
                return self.embed.attend(x)

        before = layers.MLP.__call__
        with jax.set_mesh(make_mesh((min(2, RANKS),))):
            model = plan.read(Transformer(nnx.Rngs(0)), TOKENS)
        assert shapes(model) == [*GATED, *GATED, HEAD]
        assert model.layers[4].name == "blocks/0/mlp/gate"
        assert layers.MLP.__call__ is before

    def test_rematerialized(self, nnx, transformer):
        class Outer(nnx.Module):
            def __init__(self, rngs):
                self.inner = transformer(rngs)

            def __call__(self, tokens):
                return self.inner(tokens, remat=True)

        want = [LOOKUP, *block(), *block(), HEAD]
        assert shapes(plan.read(Outer(nnx.Rngs(0)), TOKENS)) == want

    def test_as_declared(self, nnx):
        """Without a call: kernels of the module's own count too."""

        class Own(nnx.Module):
            def __init__(self, k, n):
                self.kernel = nnx.Param(jnp.zeros((k, n)))

        class Net(nnx.Module):
            def __init__(self, rngs):
                self.table = nnx.Embed(V, H, rngs=rngs)
                self.up = Own(H, 4 * H)
                self.down = Own(4 * H, H)
                self.convolution = nnx.Conv(H, 8, (3, 3), rngs=rngs)
                self.again = self.up

        model = plan.read(Net(nnx.Rngs(0)), rows=16, batch=8)
        assert shapes(model) == [LOOKUP, *block()[4:], (H, 8, 16, False, 9, False)]
        with pytest.raises(TypeError, match="rows and batch must be given"):
            plan.read(Net(nnx.Rngs(0)))

    def test_a_call_that_runs_something_else(self, nnx):
        class Lazy(nnx.Module):
            def __init__(self, rngs):
                self.used, self.unused = (nnx.Linear(4, 4, rngs=rngs) for _ in range(2))

            def __call__(self, x):
                return self.used(x)

        with pytest.raises(ValueError, match="ran layers of 16 weights, and it has 32"):
            plan.read(Lazy(nnx.Rngs(0)), jnp.zeros((2, 4)))


def test_not_a_module():
    pytest.importorskip("flax")
    with pytest.raises(TypeError, match="neither a linen nor an nnx module"):
        plan.read(object())


def test_without_flax(monkeypatch):
    monkeypatch.setitem(sys.modules, "flax", None)
    with pytest.raises(ImportError, match="pip install flax"):
        plan.read(object())


def test_alternate():
    layers = plan.alternate([Layer(2, 4), Layer(4, 2), Layer(2, 4)])
    assert [layer.transposed for layer in layers] == [False, True, False]
