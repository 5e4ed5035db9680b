"""Each parser of text from outside, on mutations of the files in tests/corpus: a result, or an
error that names the file. HYPOTHESIS_PROFILE=nightly draws other mutations, and many more."""

import json
import logging
import math
import pathlib
import sys
import tempfile

import numpy as np
import pytest
from harness import examples
from hypothesis import example, given
from hypothesis import strategies as st

import jflux.nn
from jflux import _config, timeline
from jflux._call import tuning_tables
from jflux.nn._load import files_of
from jflux.plan import Machine
from jflux.plan.__main__ import main as plan

HERE = pathlib.Path(__file__).parent
CORPUS = HERE / "corpus"
sys.path.insert(0, str(HERE.parent / "examples"))

# What JSON allows, and programs seldom expect; and what it does not allow.
TOKENS = [
    b"null", b"true", b"[]", b"{}", b"[[]]", b'""', b'"x"', b"-1", b"0", b"0.5", b"1e999", b"-0.0",
    b"NaN", b"Infinity", b"1" * 400, b"9" * 5000, b"4294967296", b"9223372036854775808",
    b"[" * 100_000, b'{"a":' * 5000, b'"\\ud800"', b'"\\u0000"', b"\x00", b"\xff", b"\xef\xbb\xbf",
    b",", b":", b'"', b"}", b"]", b"..", b"/",
]  # fmt: skip


def corpus(kind: str) -> list[bytes]:
    return [file.read_bytes() for file in sorted((CORPUS / kind).iterdir())]


@st.composite
def mutated(draw, kind: str) -> bytes:
    """A file of the corpus after a few edits: of bytes, or of a value of its JSON."""
    files = corpus(kind)
    text = draw(st.sampled_from(files))
    for _ in range(draw(st.integers(0, 4))):
        edit = draw(
            st.sampled_from(["insert", "delete", "value", "value", "value", "cut", "splice"])
        )
        at = draw(st.integers(0, len(text)))
        end = min(len(text), at + draw(st.integers(0, 40)))
        if edit == "insert":
            text = text[:at] + draw(st.sampled_from(TOKENS) | st.binary(max_size=4)) + text[at:]
        elif edit == "delete":
            text = text[:at] + text[end:]
        elif edit == "cut":
            text = text[:at]
        elif edit == "splice":
            other = draw(st.sampled_from(files))
            text = text[:at] + other[draw(st.integers(0, len(other))) :]
        else:
            text = _other_value(draw, text)
    return text


def _other_value(draw, text: bytes) -> bytes:
    """The same document with a token in the place of one of its values."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return text
    path, here = [], content
    while isinstance(here, dict | list) and here and (not path or draw(st.booleans())):
        keys = sorted(here) if isinstance(here, dict) else range(len(here))
        path.append(draw(st.sampled_from(list(keys))))
        here = here[path[-1]]
    if not path:
        return draw(st.sampled_from(TOKENS))
    here = content
    for key in path[:-1]:
        here = here[key]
    here[path[-1]] = "@@@"
    return json.dumps(content).encode().replace(b'"@@@"', draw(st.sampled_from(TOKENS)), 1)


FOLDER = tempfile.TemporaryDirectory(prefix="jflux-fuzz-")  # goes with the process


def written(text: bytes, suffix: str = ".json") -> pathlib.Path:
    path = pathlib.Path(FOLDER.name) / f"file{suffix}"
    path.write_bytes(text)
    return path


def is_clear(error: Exception, path: pathlib.Path) -> bool:
    """It names the file, and is no error from deep inside."""
    return str(path) in str(error) and len(str(error)) < 2000


@pytest.fixture(autouse=True)
def no_memory():
    _config._said.clear()
    yield
    _config._said.clear()


def _of_this_build(text: bytes) -> bytes:
    writer = tuning_tables._writer()
    return text.replace(b'"VERSION"', str(writer["kernels"]).encode()).replace(
        b"TILES", writer["tiles"].encode()
    )


def _table(entry: str) -> bytes:
    key = "all_gather_matmul bfloat16 ranks=2 rows=1024 n=4096 k=8192 w=kn"
    return f'{{"kernels": "VERSION", "tiles": "TILES", "choices": {{"{key}": {entry}}}}}'.encode()


@given(mutated("tuning"))
@example(_table("9" * 5000))  # more digits than Python reads
@example(_table("[" * 100_000))  # deeper than Python reads
@example(_table("[256, 2, 8, 4294967296]"))  # no int32
@example(_table('"\\ud800"'))
@examples(150)
def test_tuning_tables(text):
    path = written(_of_this_build(text))
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("jflux").addHandler(handler)
    try:
        found = tuning_tables.load(path)
    finally:
        logging.getLogger("jflux").removeHandler(handler)
    for key, entry in found.items():
        assert tuning_tables._why_not(key, entry) is None
    for line in lines:
        assert f"tuning table {path}, line " in line and len(line) < 2000
        line.encode()  # a log file can have it


@given(mutated("machine"))
@examples(150)
def test_machine_files(text):
    path = written(text)
    try:
        machine = Machine.load(path)
    except ValueError as error:
        assert is_clear(error, path), error
        return
    assert isinstance(machine.name, str) and 0 < machine.intra < math.inf
    for pairs in (machine.intra_by_size, machine.inter_by_size):
        assert all(0 < number < math.inf for pair in pairs for number in pair)


@given(mutated("machine"))
@examples(30)
def test_the_planner_says_what_is_wrong_with_a_machine_file(text):
    assert plan(["--gpus", "16", "--machine", str(written(text)), "--top", "1"]) in (0, 1)


@given(mutated("index"))
@examples(100)
def test_indices_of_safetensors(text):
    path = written(text, ".safetensors.index.json")
    (path.parent / "a.safetensors").touch()
    try:
        files = files_of([path])
    except (ValueError, FileNotFoundError) as error:
        assert is_clear(error, path) or str(path.parent) in str(error), error
        return
    assert files and all(file.is_file() and file.parent == path.parent for file in files)


@given(mutated("config"))
@example((CORPUS / "config/llama.json").read_bytes().replace(b"1e-05", b'""'))
@examples(100)
def test_configs_of_models(text):
    llama_weights = pytest.importorskip("llama_weights")
    path = written(text)
    try:
        config = llama_weights.config_from_json(path)
    except ValueError as error:
        assert is_clear(error, path), error
        return
    sizes = (config.layers, config.width, config.hidden, config.heads, config.vocab)
    for size in (*sizes, config.head_dim, config.units(0)):
        assert type(size) is int and size > 0
    assert config.head_size or config.width % config.heads == 0
    assert config.heads % config.kv_heads == 0
    assert math.isfinite(config.epsilon) and math.isfinite(config.theta)


@given(mutated("safetensors"))
@examples(100)
def test_safetensors_files(text):
    pytest.importorskip("safetensors")
    path = written(text, ".safetensors")
    try:
        tensors = jflux.nn.open_safetensors(path)
    except ValueError as error:
        assert is_clear(error, path), error
        return
    for tensor in tensors.values():
        tensor[:] if tensor.get_shape() else tensor


EVENTS = st.lists(
    st.tuples(
        st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1),
        st.integers(0, 2**16 - 1) | st.integers(0, len(timeline.KINDS) - 1),
        st.integers(0, 2**16 - 1), st.integers(-(2**31), 2**31 - 1),
        st.integers(-(2**31), 2**31 - 1),
    ), max_size=8,
)  # fmt: skip


@given(EVENTS)
@example([(5, 3, 0, 1, 0, 0, 0)])  # ends before it begins
@example([(0, 1, 0, 65535, 0, 0, 0)])  # a kind that there is not
@examples(60)
def test_timelines(events):
    """What a device has written is shown, whatever it is."""
    raw = np.array(events, timeline._EVENT).tobytes()
    found = timeline.Timeline({0: np.frombuffer(raw, timeline._EVENT)} if events else {})
    path = pathlib.Path(FOLDER.name) / "timeline.json"
    if not events:
        with pytest.raises(ValueError, match="the timeline is empty"):
            found.save(path)
        return
    found.save(path)
    trace = json.loads(path.read_text())["traceEvents"]
    spans = [event for event in trace if event["ph"] == "X"]
    assert len(spans) == len(events)
    assert all(span["ts"] >= 0 and 0 <= span["dur"] < 2**64 for span in spans)
    assert found.summary()
