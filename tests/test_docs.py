"""What the documents say is so: their samples run, their links lead somewhere, and the pictures
show the orders of cc/core/tile_order.h."""

import ast
import doctest
import functools
import importlib
import importlib.util
import inspect
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import PLATFORM, make_mesh
from jax import lax
from jax.sharding import PartitionSpec as P

import jflux
from jflux._ops._spec import all_ops
from jflux._stress.calls import normal

ROOT = Path(__file__).resolve().parents[1]
DOCS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])

pytestmark = pytest.mark.skipif(
    not (ROOT / "README.md").exists(), reason="the documents are not here"
)


# By page, what must hold when its samples have run.
SAMPLES = {
    "README.md": [
        "expected = jax.nn.gelu(x.astype('float32') @ w.astype('float32'), approximate=False)",
        "assert abs(y - expected).max() < 0.01 * abs(expected).max()",
        "assert value > 0 and gradient.shape == x.shape",
        "assert [one.op for one in jflux.fuse(step).report(x, w) if one.hidden]"
        " == ['all_gather_matmul', 'matmul_reduce_scatter']",
    ],
    "docs/quickstart.md": ["assert abs(y - expected).max() < 0.05"],
    "docs/api/index.md": ["assert jflux.__version__ and {functools, jnp, P}"],
    "docs/guide/calling.md": [
        "assert all(jnp.isfinite(a).all() for a in (y, h, z))",
        "assert (in_parts == y).all()",
        "fused = [] if jax.__version_info__ < (0, 11) else ['fused']  # the compiler's thread",
        "assert [str(call.plan.path) for call in parts] == fused",
    ],
    "docs/guide/eight_bits.md": ["assert y.dtype == jnp.bfloat16 and (y == 512).all()"],
    "docs/guide/expert_parallelism.md": [
        "assert y.shape == x.shape and bool(jnp.isfinite(y).all())"
    ],
    "docs/guide/hosts.md": ["assert jflux.heap_report().platform == 'cpu'"],
    "docs/guide/long_sequences.md": [
        "assert of_sinks.shape == (4,) and (of_sinks < 0).all()",
        "assert f'positions must be at most {length - 1}, got {length}' in error.get()",
        "assert y.shape == (2, 4, 8) and list(lengths) == [length, 10]",
        "wanted = jflux.restore_order(in_order[1], ranks)[1, :9]",
        "assert (cache[0][1, :9] == wanted).all() and not cache[0][1, 9:].any()",
        "assert o.shape == (2, 3, 4, 8) and list(kv_cache.lengths) == [length + 3, 12]",
        "assert (kv_cache.keys[1, :9] == wanted).all() and not kv_cache.keys[1, 12:].any()",
        "x, *weights = (jnp.ones(s) for s in ((1, 16, 4), *[(4, 64)] * 3, (64, 4)))",
        "np.testing.assert_allclose(attend(x, *weights), 4 * 64, rtol=1e-5)",
    ],
    "docs/guide/moe.md": [
        "assert all(jnp.isfinite(g).all() for g in jax.tree.leaves((loss, gradients, weights)))",
        "alike = placement == placement[0]",
        "assert all((a[alike] == a[0]).all() for a in map(np.asarray, weights))",
        "assert mesh.shape['ep'] == 1 or after < before and placement is newer",
    ],
    "docs/guide/recipes.md": [
        "assert losses[-1] < losses[0] - 1 and linen_losses[-1] < linen_losses[0]",
        "assert np.allclose(fsdp_losses, losses, rtol=1e-2)",
        "specs = [a.sharding.spec for a in (kernel, fsdp_optimizer.opt_state[0].mu.blocks.mlp.up"
        ".kernel[...])]",
        "assert specs == 2 * [P(None, 'data', 'tp')]",
        "assert abs(in_parts - before) < 1e-2 * before",  # bfloat16, other sums
        "assert here < before - .3 and abs(here - there) < 1e-2 * here",
        "leaf = lambda model: model.blocks.mlp.up.kernel[...].sharding",
        "assert leaf(model).mesh.shape['tp'] == min(4, jax.device_count())",
        "assert leaf(restored).mesh.shape['tp'] == min(2, jax.device_count())",
        "assert leaf(model).spec == leaf(restored).spec == P(None, None, 'tp')",
        "assert state.params['params']['MLP_0']['up']['kernel'].value.sharding.spec[1] == 'tp'",
        "def plain(w):",
        "    y, sizes = batches, (-1, *up.shape[2:])",
        "    for a, b in zip(w[0].reshape(sizes), w[1].reshape(-1, *down.shape[2:])):",
        "        y = y + jax.nn.gelu(y @ a, approximate=False) @ b",
        "    return jnp.mean(y**2)",
        "",
        "want = jax.value_and_grad(plain)((up, down))",
        "found = piped_loss, piped_gradients",
        "alike = lambda a, b: np.allclose(a, b, rtol=1e-3, atol=1e-5)",
        "assert all(jax.tree.leaves(jax.tree.map(alike, found, want)))",
    ],
    "docs/guide/python_kernels.md": [
        "from jax.sharding import PartitionSpec as P",
        "x = jnp.arange(512. * mesh.size)",
        "y = jax.jit(jax.shard_map(shift, mesh=mesh, in_specs=P('x'), out_specs=P('x')))(x)",
        "assert (y == jnp.roll(x, 512)).all()",
    ],
    "docs/tutorials/gpt.md": [
        "assert np.allclose(fused_value, value, rtol=1e-5)",
        "same = lambda a, b: np.allclose(a, b, atol=1e-5)",
        "assert all(jax.tree.leaves(jax.tree.map(same, fused_gradients, gradients)))",
        "taken = [site.op for site in report if site.taken and site.hidden]",
        "assert taken.count('all_gather_matmul') >= 4 <= taken.count('matmul_reduce_scatter')",
        "assert [call.op for call in calls] == ['all_gather_matmul', 'matmul_reduce_scatter'] * 2",
    ],
    "docs/tutorials/gspmd.md": [
        "assert np.allclose(fused_value, value, rtol=1e-5)",
        "same = lambda a, b: np.allclose(a, b, atol=1e-6)",
        "assert all(jax.tree.leaves(jax.tree.map(same, fused_gradients, gradients)))",
        "taken = [site.op for site in report if site.taken and site.hidden]",
        "assert taken.count('all_gather_matmul') >= 2 <= taken.count('matmul_reduce_scatter')",
        "want = x + jax.nn.silu(x @ params[0]['up']) @ params[0]['down']",
        "assert np.allclose(y, want, atol=1e-4)",
    ],
    "docs/tutorials/deepep.md": ["assert abs(one - other).max() < 1e-4 and abs(one).max() > 1"],
    "docs/tutorials/transformer_engine.md": [
        "assert [call.op for call in calls] == ['all_gather_matmul', 'matmul_reduce_scatter']",
        "assert y.shape == x.shape and abs(y - x).max() > 0",
    ],
    "docs/guide/parallel.md": [
        "assert all(jnp.isfinite(g).all() for g in jax.tree.leaves(gradients))"
    ],
}


# Pages whose samples are a few lines of a program that the reader has: by page, such a program
# before them, and what must hold after each; None: it wants GPUs, and is compiled only.
BEFORE = """
import os
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
)
import jax, jax.numpy as jnp, numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec as P
import jflux
mesh = Mesh(jax.devices(), "tp")
n = mesh.size
x, w = jnp.ones((16 * n, 32)), jnp.ones((32, 16 * n))
specs = {"in_specs": (P("tp"), P(None, "tp")), "out_specs": P(None, "tp")}
layer = lambda x, w: jflux.all_gather_matmul(x, w, axis_name="tp")
f = jitted = jax.jit(jax.shard_map(layer, mesh=mesh, **specs))
"""
FRAGMENTS = {
    "docs/guide/debugging.md": ("step = f", [None, "assert (y == 32).all()"]),
    "docs/guide/dispatch.md": (
        "import types\nstep, params, batch = f, x, w\n"
        "trainer = types.SimpleNamespace(train_step=lambda w: f(x, w))",
        ["assert call.op == 'all_gather_matmul'", "assert len(calls) == 1", None],
    ),
    "docs/guide/fuse.md": (
        "loss_of = lambda w, x: (jitted(x, w) ** 2).sum()\nstep, params, batch = loss_of, w, x\n"
        "shardings = (jax.NamedSharding(mesh, P(None, 'tp')), jax.NamedSharding(mesh, P('tp')))",
        ["", "", "assert step(params, batch)[0] > 0", "assert report == ()"],
    ),
    "docs/guide/heap.md": ("", ["assert jflux.heap_report().limit == 4 << 30", "f(x, w)"]),
    "docs/guide/operations.md": (
        "layer, size, enough, shapes = lambda x: x + 1, jnp.max, 3 * n, (x, w)\n"
        "arrays = [jax.device_put(a, jax.NamedSharding(mesh, s))"
        " for a, s in zip((x, w), specs['in_specs'])]",
        [
            "assert (y == 32).all()",
            "run = lambda x: loop((x, 0 * x[0, 0], jnp.array(True)))[0]\n"
            "x = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=P('tp'), out_specs=P('tp')))(x)\n"
            "assert (x == 3).all()",  # each rank's own: 2, then 2 + 3
        ],
    ),
    "docs/guide/ops.md": (
        "block = lambda x: f(x, w).sum()",
        [
            "assert jax.grad(block)(x).shape == x.shape",
            "halves = {'in_specs': (P(None, 'tp'), P('tp')), 'out_specs': P()}\n"
            "y = jax.jit(jax.shard_map(layer, mesh=mesh, **halves))(x, w)\n"
            "assert abs(y / 32 - 1).max() < 1e-2",
            "halves['out_specs'] = P('tp')\n"
            "y = jax.jit(jax.shard_map(layer, mesh=mesh, **halves))(x, w)\n"
            "assert abs(y / 32 - 1).max() < 1e-2",
            "grid = Mesh(np.array(jax.devices()).reshape(2, -1), ('x', 'y'))\n"
            "u, on_grid = jnp.arange(64.0).reshape(8, 8), P('x', 'y')\n"
            "f = jax.shard_map(laplacian, mesh=grid, in_specs=on_grid, out_specs=on_grid)\n"
            "v = jnp.pad(jnp.pad(u, ((1, 1), (0, 0)), 'wrap'), ((0, 0), (1, 1)), 'edge')\n"
            "want = v[2:, 1:-1] + v[:-2, 1:-1] + v[1:-1, 2:] + v[1:-1, :-2] - 4 * u\n"
            "assert (jax.jit(f)(u) == want).all()",
        ],
    ),
    "docs/guide/plan.md": ("", ["assert ranking.best.grid.ranks == 1024"]),
    "docs/guide/profiling.md": (
        "step, params, batch = f, x, w",
        ["", "assert any('jflux_all_gather_matmul' in name for _, name in times)", None],
    ),
    "docs/guide/troubleshooting.md": ("", ["assert (f(x, w) == 32).all()"]),
}
#: Its sample needs the library that examples/custom_kernel compiles; test_custom_call.py runs that.
COMPILED = ["docs/guide/device_primitives.md"]


def _blocks(name: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", (ROOT / name).read_text(), re.M | re.S)


def test_every_page_with_samples_is_run():
    pages = {str(doc.relative_to(ROOT)) for doc in DOCS}
    have = {name for name in pages if _blocks(name)}
    others = {"docs/guide/nn.md", "docs/guide/code_bases.md"}  # test_nn_docs.py, test_code_bases.py
    assert have == {*SAMPLES, *FRAGMENTS, *COMPILED, *others}


@pytest.mark.parametrize("name", FRAGMENTS)
def test_the_fragments_run(name, tmp_path):
    before, checks = FRAGMENTS[name]
    parts = []
    for block, check in zip(_blocks(name), checks, strict=True):
        parts += [f"compile({block!r}, {name!r}, 'exec')"] if check is None else [block, check]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    env["JAX_PLATFORMS"] = "cpu"
    program = "\n".join([BEFORE, before, *parts])
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, cwd=tmp_path, capture_output=True, text=True,
        timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", SAMPLES)
def test_the_samples_run(name, tmp_path):
    """All of them, one after the other, as one program."""
    pytest.importorskip("triton" if "kernels" in name else "flax")
    blocks = _blocks(name)
    assert blocks
    checks = SAMPLES[name]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    program = tmp_path / "samples.py"  # Triton reads the source of its kernels
    program.write_text("\n".join([*blocks, *checks]))
    done = subprocess.run(
        [sys.executable, str(program)], env=env, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    assert "takes its lax reference" not in done.stderr, done.stderr


#: Functions of jflux that compute with arrays.
FUNCTIONS = {
    name: function
    for name, function in vars(jflux).items()
    if inspect.isfunction(function) and re.match(r"jflux\._ops\.", function.__module__)
} | {"explain": jflux.explain, "fuse": jflux.fuse, "flops": jflux.flops, "Rotary": jflux.nn.Rotary}


@pytest.mark.skipif(jax.device_count() != 8, reason="what they print is of eight devices")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_examples_of_docstrings_run(name, capsys):
    start = dict(functools=functools, jax=jax, jnp=jnp, P=P, jflux=jflux)
    examples = doctest.DocTestFinder(recurse=False).find(FUNCTIONS[name], name, globs=start)
    assert examples and examples[0].examples, f"jflux.{name} has no example"
    assert doctest.DocTestRunner().run(examples[0]).failed == 0, capsys.readouterr().out


@pytest.mark.parametrize("doc", DOCS, ids=lambda d: str(d.relative_to(ROOT)))
def test_links_and_paths(doc):
    """Links, and what looks like a file of this repository."""
    text = doc.read_text()
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert (doc.parent / target).exists(), target
    folders = "build_backend|cc|docs|examples|jflux|tests|tools|bench"
    for path in re.findall(rf"`((?:{folders})/[\w./]+)`", text):
        if "foo_bar" not in path:  # the op that docs/adding_an_op.md adds
            assert (ROOT / path).exists(), path


@functools.cache
def _names_of_code() -> frozenset[str]:
    """All words of the sources, less the comments of C++, and what its macros make of them."""
    names: set[str] = set()
    for folder in ("cc", "jflux", "tests"):
        for source in (ROOT / folder).rglob("*.*"):
            if source.suffix in (".py", ".h", ".cc", ".cu", ".cuh"):
                text = source.read_text()
                text = text if source.suffix == ".py" else re.sub(r"//.*", "", text)
                names.update(re.findall(r"\w+", text))
                names.update(
                    f"{op}Kernel" for op in re.findall(r"JFLUX_GEMM_KERNEL\((\w+)\)", text)
                )
    return frozenset(names)


CODE_PAGES = [*sorted(ROOT.glob("docs/internals/*.md")), ROOT / "docs/guide/profiling.md"]


@pytest.mark.parametrize("page", CODE_PAGES, ids=lambda p: p.stem)
def test_names_of_the_code_exist(page):
    """Functions, types and constants that internals name, as C++ writes them, and kernels."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    spans = " ".join(re.findall(r"`([^`\n]+)`", text))
    names = set(re.findall(r"\b(?:k[A-Z]|[A-Z][a-z])\w+", spans))
    assert names <= _names_of_code(), names - _names_of_code()


def test_pages_keep_to_their_kind():
    """Internals have up to 150 lines, decisions 60 and three headings, and README 900 words."""
    for page in ROOT.glob("docs/internals/*.md"):
        assert len(page.read_text().splitlines()) <= 150, page
    for page in ROOT.glob("docs/decisions/[0-9]*.md"):
        text = page.read_text()
        assert len(text.splitlines()) <= 60, page
        assert re.findall(r"^## (Context|Decision|Consequences)$", text, re.M) == [
            "Context", "Decision", "Consequences"
        ], page  # fmt: skip
    words = [w for w in (ROOT / "README.md").read_text().split() if re.search(r"\w", w)]
    assert len(words) <= 900


@pytest.mark.parametrize("folder", ["decisions", "experiments"])
def test_indices_name_every_page(folder):
    index = (ROOT / "docs" / folder / "index.md").read_text()
    pages = sorted(page.name for page in ROOT.glob(f"docs/{folder}/[0-9]*.md"))
    assert pages and re.findall(r"\((\d{4}-[\w-]+\.md)\)", index) == pages


def _texts(source: Path) -> str:
    """What a file's string literals say, with a line break where a name or a number comes in."""
    text = source.read_text()
    if source.suffix == ".py":
        found = []
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                parts = [p.value if isinstance(p, ast.Constant) else "\n" for p in node.values]
                found.append("".join(parts))
        return "\n".join(found)
    literal = r'"((?:[^"\\\n]|\\.)*)"'
    joined = re.sub(r'(?<!\\)"\s*\n\s*"', "", text)  # adjacent literals
    found = [m.replace('\\"', '"') for m in re.findall(literal, joined)]
    return re.sub(r"%[-.\d]*(?:ll)?[a-z]", "\n", "\n".join(found))


def _messages(page: Path) -> list[str]:
    """The first cells of the tables of messages."""
    found, inside = [], False
    for line in page.read_text().splitlines():
        inside = line.startswith("|") and (inside or line.startswith("| message |"))
        if inside and (code := re.match(r"\| `([^`]+)` \|", line)):
            found.append(code[1])
    return found


def _texts_of_code() -> dict[Path, str]:
    """By file."""
    patterns = ("jflux/**/*.py", "cc/**/*.cc", "cc/**/*.cu", "cc/runtime/*.h")
    return {path: _texts(path) for pattern in patterns for path in ROOT.glob(pattern)}


def _is_said(message: str, texts: dict[Path, str]) -> bool:
    """Whether each part between two "..." stands in the string literals of one file."""
    parts = [part.strip() for part in message.split("...") if len(part.strip()) > 3]
    assert parts, message
    return any(all(part in text for part in parts) for text in texts.values())


def test_quoted_messages_are_those_of_the_code():
    texts = _texts_of_code()
    messages = _messages(ROOT / "docs" / "guide" / "troubleshooting.md")
    assert len(messages) > 25
    for message in messages:
        assert _is_said(message, texts), message


def test_injected_faults_have_tests():
    """Each row names tests that there are, and quotes what the code says."""
    texts, named = _texts_of_code(), set()
    page = (ROOT / "docs" / "internals" / "faults.md").read_text()
    rows = [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        for line in page.splitlines()
        if line.startswith("| ") and not line.startswith("| fault |")
    ]
    assert len(rows) > 30 and {len(row) for row in rows} == {4}
    for fault, _, seen, tests in rows:
        found = re.findall(r"`([\w/]+)\.(py|cc)(?:::(\w+))?`", tests)
        assert found or "](" in tests, fault
        for file, kind, name in found:
            folder = ROOT / "tests" / ("" if kind == "py" else "cc")
            source = (folder / f"{file}.{kind}").read_text()
            pattern = rf"^def {name}\(" if kind == "py" else rf"^TEST\({name}\)"
            assert not name or re.search(pattern, source, re.M), (fault, name)
            named.add(file)
        for message in re.findall(r"`([^`]+)`", seen):
            assert message.startswith("jflux.init") or _is_said(message, texts), message
    assert len(named) > 20


def test_a_message_that_nobody_prints_is_noticed(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("| message | reason |\n|---|---|\n| `gone ... away` | x |\n\n| `other` |\n")
    assert _messages(page) == ["gone ... away"]
    source = tmp_path / "a.cc"
    source.write_text('f("rank %d went "\n  "away", "say \\"x\\"");')
    assert _texts(source) == 'rank \n went away\nsay "x"'
    source = tmp_path / "a.py"
    source.write_text('f(f"rank {r} went "\n  "away")')
    assert "rank \n went away" in _texts(source)


ORDERS = """
#include <cstdio>
#include <initializer_list>
#include "core/tile_order.h"
int main() {
  for (int rows = 1; rows <= 12; ++rows) {
    for (int tile_m = 1; tile_m <= 5; ++tile_m) {
      const jflux::TileGrid grid{(4 * rows + tile_m - 1) / tile_m, 1, 1};
      for (int rank = 0; rank < 4; ++rank) {
        const auto gather = jflux::GatherOrder::Make(grid, rank, 4, rows, tile_m);
        const auto scatter = jflux::ScatterOrder::Make(grid, rank, 4, rows, tile_m);
        for (int t = 0; t < grid.tiles_m; ++t) std::printf("%d ", gather.At(t).m);
        std::printf("\\n");
        for (int t = 0; t < grid.tiles_m; ++t) std::printf("%d ", scatter.At(t).m);
        std::printf("\\n");
      }
    }
  }
}
"""


def test_pictures_show_the_orders_of_the_kernels(tmp_path):
    pictures = _pictures()
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    (tmp_path / "orders.cc").write_text(ORDERS)
    command = [compiler, "-std=c++17", f"-I{ROOT}/cc", "orders.cc", "-o", "orders"]
    subprocess.run(command, cwd=tmp_path, check=True)
    printed = subprocess.run([tmp_path / "orders"], capture_output=True, text=True, check=True)

    at = iter(printed.stdout.splitlines())
    for rows in range(1, 13):
        for tile_m in range(1, 6):
            for rank in range(4):
                for order in (pictures.gather_order, pictures.scatter_order):
                    want = [int(tile) for tile in next(at).split()]
                    assert order(rank, rows, tile_m) == want, (rows, tile_m, rank, order)
    assert next(at, None) is None


def _pictures():
    pytest.importorskip("matplotlib")
    spec = importlib.util.spec_from_file_location("pictures", ROOT / "docs" / "make_pictures.py")
    pictures = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pictures)
    return pictures


def test_pictures_show_the_parts_of_the_ops():
    pictures = _pictures()
    assert sorted(pictures.PARTS) == sorted(op for op in all_ops() if "matmul" in op)
    for op, parts in pictures.PARTS.items():
        spec = all_ops()[op]
        layout = spec.layout(2, **spec.ways[0])
        assert {**layout.rows, "w": layout.others["w"]} == parts, op


@pytest.mark.parametrize("layout", ["zigzag", "striped", "contiguous"])
def test_pictures_show_the_orders_of_positions(layout):
    pictures = _pictures()
    positions = jflux.causal_positions(pictures.POSITIONS, pictures.WORLD, layout=layout)
    assert pictures.layout_order(layout) == list(positions)


def _choices() -> list[tuple[str, str]]:
    """What the page on choosing puts side by side."""
    page = ROOT / "docs" / "guide" / "choosing.md"
    text = page.read_text() if page.exists() else ""
    return re.findall(r"^\| `(.*lax\..*)` \| `(jflux\..*)` \|$", text, re.M)


CHOICES = _choices()


@pytest.mark.skipif(PLATFORM == "gpu", reason="float32, for which GPUs have no kernels")
@pytest.mark.parametrize("plain, ours", CHOICES, ids=[b.partition("(")[0] for _, b in CHOICES])
def test_each_choice_means_what_it_replaces(plain, ours):
    """Values, and gradients by all operands."""
    n, m, k = 4, 16, 8
    mesh = make_mesh((n,))
    names = {
        "rows": (m // n, k), "columns": (m, k // n), "w": (k, k), "w_columns": (k, k // n),
        "w_rows": (k // n, k), "experts": (3, k, k),
    }  # fmt: skip
    operands = {name: normal(i, (n, *s), np.float32) for i, (name, s) in enumerate(names.items())}

    def value(code, operands):
        def on_one_rank(operands):
            scope = {name: array[0] for name, array in operands.items()}
            scope |= {"sizes": jnp.array([1, 0, 3]), "lax": lax, "jax": jax, "jflux": jflux}
            return eval(code, scope)[None]

        return jax.shard_map(on_one_rank, mesh=mesh, in_specs=P("tp"), out_specs=P("tp"))(operands)

    want, got = (jax.jit(functools.partial(value, code))(operands) for code in (plain, ours))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)

    def loss(code, operands):
        y = value(code, operands)
        return jnp.sum(jnp.sin(jnp.arange(y.size)).reshape(y.shape) * y)

    want, got = (jax.jit(jax.grad(functools.partial(loss, c)))(operands) for c in (plain, ours))
    for name in names:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-4, atol=1e-4, err_msg=name)


def test_choices_are_found():
    assert len(CHOICES) == 13


@pytest.mark.parametrize("doc", DOCS, ids=lambda d: str(d.relative_to(ROOT)))
def test_names_of_jflux_exist(doc):
    """Dotted names in code; OP stands for any op."""
    for name in sorted(set(re.findall(r"`(jflux(?:\.[A-Za-z]\w*)+)", doc.read_text()))):
        try:
            assert _exists(name) or name == "jflux.OP", name
        except ImportError as error:  # of another package
            pytest.skip(f"{name}: {error}")


def _exists(name: str) -> bool:
    """Whether a module, or something in one, has this name; fields of a class count."""
    found: object = importlib.import_module("jflux")
    path = name.split(".")[1:]
    for i, part in enumerate(path):
        if not hasattr(found, part):
            try:
                importlib.import_module(".".join(["jflux", *path[: i + 1]]))
            except ModuleNotFoundError as error:
                if not (error.name or "").startswith("jflux"):
                    raise
                return part in getattr(found, "__dataclass_fields__", {})
        if not hasattr(found, part):
            return False
        found = getattr(found, part)
    return True


def test_performance_is_what_the_results_say():
    done = subprocess.run(
        [sys.executable, "-m", "bench.render", "--check"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
