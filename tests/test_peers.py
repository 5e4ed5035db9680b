"""Atomic operations on peers' memory, of machines that are not here: who has them, what says so,
and which kernels are refused without (jflux/_heap/_peers.py)."""

import itertools

import numpy as np
import pytest

from jflux import _heap, _native, doctor
from jflux._call.plans import Machine
from jflux._heap import _nodes, _peers
from jflux._own_kernels import compiling

NVLINK, PCIE = 320.0, 22.0
WITHOUT = "GPU 0 has none on GPU 1's"


def peers(gpus, atomics):
    """What CUDA says of so many GPUs."""
    return [(a, b, True, atomics) for a, b in itertools.permutations(range(gpus), 2)]


def links(own, devices, gbps):
    return [(a, b, gbps, gbps, 3.0) for a in own for b in devices if a != b]


@pytest.mark.parametrize("gbps", [PCIE, NVLINK])
def test_gpus_of_one_process(gbps):
    """What CUDA says counts, whatever the links carry."""
    ordinals = {10: 0, 11: 1}
    of_two = links([10, 11], [10, 11], gbps)
    assert _peers.why_no_atomics(peers(2, True), of_two, ordinals) == ""
    assert _peers.why_no_atomics(peers(2, False), of_two, ordinals) == WITHOUT
    # GPUs that the job does not use do not count.
    mixed = peers(2, True) + [(0, 2, True, False), (2, 0, True, False)]
    assert _peers.why_no_atomics(mixed, of_two, ordinals) == ""


@pytest.mark.parametrize(
    "seen, atomics, gbps, has",
    [
        (2, True, PCIE, True),  # all that it sees have them
        (2, False, PCIE, False),
        (1, True, PCIE, False),  # it sees its own alone
        (1, True, NVLINK, True),
        (2, False, NVLINK, True),  # the slow pair is another one
    ],
)
def test_gpus_of_other_processes(seen, atomics, gbps, has):
    why = _peers.why_no_atomics(peers(seen, atomics), links([0], [0, 1], gbps), {0: 0})
    assert (why == "") == has
    assert has or "device 1's, which another process has" in why and "22 GB/s" in why


def test_all_processes_know():
    facts = [_nodes.Facts(p, "h", (p,), ("",), 1) for p in range(2)]
    outcomes = {0: _nodes.Outcome("", PCIE), 1: _nodes.Outcome("", PCIE, WITHOUT)}
    assert _nodes.Outcome.load(outcomes[1].dump()) == outcomes[1]
    job = _nodes.Job.of(facts, outcomes)
    assert job.no_atomics == f"process 1: {WITHOUT}"
    assert job.why_not(np.array([[0, 1]])) is None  # jflux's own kernels run
    assert _nodes.Job.of(facts[:1], {0: outcomes[1]}).no_atomics == WITHOUT
    assert _nodes.Job.of(facts[:1], {0: outcomes[0]}).no_atomics == ""


def test_what_ptx_has_atomics_on_peers():
    found = compiling._ATOMICS.search
    assert found("red.relaxed.sys.global.add.u64 [%rd1], 1;")
    assert found("@p atom.global.sys.relaxed.add.u32 %r1, [%rd1], %r2;")
    assert not found("atom.acq_rel.sys.global.cas.b64 %rd1, [%rd2], 0, 1;")  # a rank's own fault
    assert not found("atom.global.gpu.relaxed.add.u64 %rd1, [%rd2], 1;")
    assert not found("st.relaxed.sys.global.u64 [%rd1], %rd2;")


def test_the_doctor_says_it(monkeypatch):
    monkeypatch.setattr(_heap, "default_platform", lambda: "cuda")
    monkeypatch.setattr(_heap, "_why_no_cuda", lambda: None)
    monkeypatch.setattr(doctor.jflux, "init", lambda: None)
    for name, value in {"backend_in_use": "cuda", "deadline_seconds": 30.0}.items():
        monkeypatch.setattr(_heap, name, lambda value=value: value)
    monkeypatch.setattr(_heap, "heap_bytes", lambda platform: 1 << 30)
    monkeypatch.setattr(_heap, "links", lambda platform: links([0, 1], [0, 1], PCIE))
    for why in ("", WITHOUT):
        monkeypatch.setattr(_heap, "no_atomics", lambda why=why: why)
        said = "\n".join(doctor._heap_lines())
        assert "to device 1: 22/22" in said
        assert (why in said and "signal_add" in said) == (why != "")


@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_reduce_scatter"])
def test_few_send_at_a_time_over_pcie(op):
    """Links of a machine that is not here: few CTAs fill one of PCIe's."""
    fields = {"world": 4, "outer": 1, "inner": 4096, "k": 8192, "n": 4096, "transpose_rhs": 0}
    fields |= {name: _native.dtype_number(np.dtype("float16")) for name in ("dtype", "out_dtype")}
    by_nvlink, by_pcie = (
        Machine("cuda", sm_count=132, link_gbps=gbps).native_plan(op, fields)["senders"]
        for gbps in (NVLINK, PCIE)
    )
    assert 1 <= by_pcie <= 12 and by_pcie < by_nvlink and by_nvlink >= 8
