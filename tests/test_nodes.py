"""Which devices share a node, and which calls run kernels (jflux/_heap/_nodes.py)."""

import dataclasses
import itertools
import json

import numpy as np
import pytest

from jflux._heap import _nodes
from jflux._heap._nodes import Facts, Job, Outcome


def facts(process, host="h", devices=2, names=None, **more):
    ids = tuple(range(process * devices, (process + 1) * devices))
    return Facts(process, host, ids, names or ("",) * devices, 1 << 20, build="1", **more)


def test_facts_travel_as_text():
    one = facts(3, names=("a", "b"), unusable="none", sm_count=132)
    assert Facts.load(one.dump()) == one
    assert Outcome.load(Outcome("why", 3.5).dump()) == Outcome("why", 3.5)
    assert "heap_bytes" in json.loads(one.dump())


def test_processes_of_one_host_share_a_node():
    all_facts = [facts(0, "x"), facts(1, "y"), facts(2, "x"), facts(3, "y")]
    assert _nodes.processes_of_nodes(all_facts) == {0: (0, 2), 2: (0, 2), 1: (1, 3), 3: (1, 3)}
    assert _nodes.node_of(all_facts) == {0: 0, 1: 0, 4: 0, 5: 0, 2: 1, 3: 1, 6: 1, 7: 1}


def test_names_split_a_host():
    by_process = [facts(0, names=("a", "a")), facts(1, names=("b", "b")), facts(2)]
    assert _nodes.processes_of_nodes(by_process) == {0: (0,), 1: (1,), 2: (2,)}
    assert list(_nodes.node_of(by_process).values()) == [0, 0, 1, 1, 2, 2]
    by_device = [facts(p, devices=4, names=("a", "b", "a", "b")) for p in range(2)]
    assert _nodes.processes_of_nodes(by_device) == {0: (0, 1), 1: (0, 1)}
    assert list(_nodes.node_of(by_device).values()) == [0, 1] * 4


def test_names_of_devices():
    assert _nodes.names_of(None, 3) == ("", "", "")
    assert _nodes.names_of("n1", 2) == ("n1", "n1")
    assert _nodes.names_of(["a", "b"], 2) == ("a", "b")
    with pytest.raises(ValueError, match="node has 2 names, and this process has 3 devices"):
        _nodes.names_of(["a", "b"], 3)


def test_this_host_is_the_same_for_all_its_processes():
    assert _nodes.this_host() == _nodes.this_host() and len(_nodes.this_host()) > 8


def job(*all_facts, **failures):
    outcomes = {
        f.process: Outcome(failures.get(f"p{f.process}", ""), 300.0 - f.process) for f in all_facts
    }
    return Job.of(all_facts, outcomes)


def test_the_verdict_is_about_the_devices_of_the_call():
    """Not about other nodes of the job."""
    table = np.array([[0, 1], [2, 3]])
    assert job(facts(0), facts(1), facts(2)).why_not(table) is None
    broken = job(facts(0), facts(1), facts(2, unusable="too old"), p1="no peer access")
    assert broken.why_not(table) == "process 1: no peer access"
    assert broken.why_not(np.array([[0, 1]])) is None
    assert broken.why_not(np.array([[0, 4]])) == "process 2: too old"
    assert "device 9 was not there" in broken.why_not(np.array([[0, 9]]))
    assert job(facts(0), p0="no peer access").why_not(table[:1]) == "no peer access"


def test_builds_of_one_call_must_agree():
    other = dataclasses.replace(facts(1), build="2")
    mixed = job(facts(0), other)
    assert mixed.why_not(np.array([[0, 1], [2, 3]])) == (
        "processes have different versions of jflux (1, 2)"
    )
    assert mixed.why_not(np.array([[2, 3]])) is None


def test_all_plan_for_the_least():
    one = job(
        facts(0, sm_count=132),
        dataclasses.replace(facts(1, sm_count=78), heap_bytes=1000),
        facts(2),
    )
    assert (one.heap_bytes, one.sm_count, one.link_gbps) == (1000, 78, 298.0)
    assert job(facts(0)).sm_count == 0


def test_a_process_that_did_not_come_stops_all():
    here = facts(0)
    alone = Job.of([here], {0: Outcome("process 1 did not come")}, absent="process 1 did not come")
    assert alone.why_not(np.array([[0, 1]])) == "process 1 did not come"


def test_every_process_gives_the_same_verdict():
    """Whatever the order in which it heard of the others."""
    all_facts = [facts(0, "x"), facts(1, "y"), facts(2, "x", unusable="old")]
    outcomes = {p: Outcome() for p in range(3)}
    tables = [np.array(t) for t in ([[0, 1]], [[0, 4]], [[2, 3], [0, 1]])]
    verdicts = {
        tuple(Job.of(order, outcomes).why_not(t) for t in tables)
        for order in itertools.permutations(all_facts)
    }
    assert verdicts == {(None, "process 2: old", None)}
