"""Files that are not what they should be: each is a clear error, or a line in the log."""

import contextlib
import logging
import os
import stat

import pytest

import jflux
from jflux import _config
from jflux._call import tuning_tables
from jflux.plan import Machine
from jflux.plan.__main__ import main as plan

GPU = "NVIDIA H200"
KEY = tuning_tables.Key("all_gather_matmul", 2, 1024, 4096, 8192, "bfloat16", False)
ENTRY = {str(KEY): [256, 2, 8, 1]}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("JFLUX_TUNING_DIR", str(tmp_path / "tuning"))
    monkeypatch.setattr(tuning_tables, "_agreed", {})
    _config._said.clear()
    yield tmp_path / "tuning"
    _config._said.clear()


def _directory(path):
    path.mkdir(parents=True)


def _pipe(path):
    path.parent.mkdir(parents=True)
    os.mkfifo(path)


def _device(path):
    path.parent.mkdir(parents=True)
    path.symlink_to("/dev/zero")


def _binary(path):
    path.parent.mkdir(parents=True)
    path.write_bytes(bytes(range(256)))


def _link_to_itself(path):
    path.parent.mkdir(parents=True)
    path.symlink_to(path)


def _file_in_place_of_the_folder(path):
    path.parent.write_text("")


def _not_readable(path):
    path.parent.mkdir(parents=True)
    path.write_text("{}")
    path.chmod(0)
    if os.access(path, os.R_OK):
        pytest.skip("this user reads everything")


BAD_FILES = [
    _directory, _pipe, _device, _binary, _link_to_itself, _file_in_place_of_the_folder,
    _not_readable,
]  # fmt: skip


@pytest.mark.parametrize("make", BAD_FILES)
def test_a_tuning_table_that_is_none(make, folder, caplog):
    """Reading it is a line in the log, and the heuristic decides; so it is with writing, if that is
    not possible. The process has what it measured."""
    path = tuning_tables.user_path(GPU)
    make(path)
    with caplog.at_level(logging.WARNING, "jflux"):
        assert tuning_tables.load(path) == {}
        assert tuning_tables._user_table(GPU) == {}
    (line,) = [r.getMessage() for r in caplog.records]
    assert line.startswith(f"tuning table {path}, line 1: ignored, since it ")
    caplog.clear()
    with caplog.at_level(logging.WARNING, "jflux"):
        tuning_tables.store(path, ENTRY)
    if make in (_directory, _file_in_place_of_the_folder):
        (line,) = [r.getMessage() for r in caplog.records]
        assert f"tuning table {path} cannot be written (" in line and "JFLUX_TUNING_DIR" in line
    else:  # replaced by a table
        assert stat.S_ISREG(path.lstat().st_mode) and tuning_tables.load(path) == ENTRY
    if path.parent.is_dir():  # nothing is left over
        assert [p.name for p in path.parent.iterdir()] == [path.name]
    tuning_tables.remember(GPU, ENTRY)
    assert tuning_tables.lookup(KEY, GPU) == tuning_tables.Choice(256, 2, 8, 1)


@pytest.mark.parametrize("make", [_directory, _binary, _link_to_itself, _not_readable])
def test_a_machine_file_that_is_none(make, tmp_path, capsys):
    path = tmp_path / "folder" / "machine.json"
    make(path)
    with pytest.raises((ValueError, OSError), match=str(path)):
        Machine.load(path)
    assert plan(["--gpus", "16", "--machine", str(path)]) == 1
    assert str(path) in capsys.readouterr().err


@pytest.mark.parametrize(
    "fields, why",
    [
        ({"gpus_per_node": True}, "gpus_per_node=True must be a positive int"),
        ({"gpus_per_node": 2.0}, "gpus_per_node=2.0 must be a positive int"),
        ({"intra": "fast"}, "not supported"),
        ({"intra": float("inf")}, "intra=inf must be positive, and finite"),
        ({"intra": float("nan")}, "intra=nan must be positive, and finite"),
        ({"inter": float("inf")}, "inter=inf must not be negative, nor infinite"),
        ({"memory": 10**400}, "must be positive, and finite"),
        ({"name": 5}, "name=5 must be a string"),
        ({"intra_by_size": ((1.0, float("nan")),)}, "must be pairs > 0"),
    ],
)
def test_machines_of_odd_numbers(fields, why):
    good = {"name": "m", "gpus_per_node": 8, "intra": 1e11, "inter": 0.0, "memory": 4e10}
    with pytest.raises((ValueError, TypeError), match=why):
        Machine(**{**good, "flops": 1e14, **fields})


SETTINGS = [{"deadline_seconds": v} for v in (0, -1.0, float("nan"), float("inf"), 1e10)]
SETTINGS += [{"heap_bytes": v} for v in (0, -8)]


@pytest.mark.parametrize("settings", SETTINGS)
def test_settings_of_the_heap(settings):
    (name,) = settings
    with pytest.raises(ValueError, match=name):
        jflux.init(**settings)
    with contextlib.suppress(RuntimeError):
        jflux.init()  # the heap of before is still there
