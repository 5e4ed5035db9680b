"""What the kernels did, and when: recorded on the GPUs, shown as a picture or in Perfetto.

    from jflux import timeline as timelines

    with timelines.record() as timeline:
        jax.block_until_ready(f(x, w))
    timeline.save("timeline.json")  # open in https://ui.perfetto.dev
    timeline.plot("timeline.png")   # needs matplotlib
    print(timeline.summary())

``python -m jflux.timeline --help`` does this for one op and shape.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import _heap, _native
from ._heap._waits import on_a_thread
from ._ops._spec import products
from ._tools.trials import Trial

# cc/gpu/device_state.h
KINDS = (
    "wait for rows", "multiply", "epilogue", "wait for partial tiles", "send", "store", "copy",
    "wait to send",
)  # fmt: skip
_EVENT = np.dtype(
    [("begin_ns", "u8"), ("end_ns", "u8"), ("call", "u4"), ("kind", "u2"), ("sm", "u2"),
     ("a", "i4"), ("b", "i4")]
)  # fmt: skip
_COLORS = {"multiply": "#5b8db8", "epilogue": "#8bc48a"}  # what the two consumers do
# Who does what, of the roles of cc/gpu/gemm_sm90.cuh.
_ROLES = ("send warp", "tile scheduler", "MMA warpgroups", "store warp")
_ROLE_OF = {
    "send": 0, "copy": 0, "wait for rows": 1, "wait for partial tiles": 1, "store": 3,
    "wait to send": 3,
}  # fmt: skip


@dataclasses.dataclass
class Timeline:
    """Events of each of this process's GPUs.

    Attributes:
      events: {device id: structured array with begin_ns, end_ns (of the host's clock, to
        which the GPUs' timers are set when recording starts: to a few microseconds), call
        (a number that grows from call to call), kind (an index into :data:`KINDS`), sm, and two
        numbers that the kind explains: tile row and tile column; of "send" and "copy" the peer, and
        the chunk or tile row}.
      missed: how many events found no room.
    """

    events: dict[int, np.ndarray] = dataclasses.field(default_factory=dict)
    missed: int = 0

    def start_ns(self) -> int:
        """When the first event of all GPUs began, in ns of their global timer.

        Raises:
          ValueError: nothing was recorded.
        """
        if not any(len(e) for e in self.events.values()):
            raise ValueError("the timeline is empty: no jflux kernel ran while it was recorded")
        return min(int(e["begin_ns"].min()) for e in self.events.values() if len(e))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes Chrome's trace format, which Perfetto opens: a process for each GPU, a thread for
        each SM and role."""
        zero = self.start_ns()
        trace: list[dict[str, Any]] = []
        for device, events in self.events.items():
            trace.append(_name("process_name", f"GPU {device}", device))
            for e in events:
                kind = KINDS[e["kind"]] if e["kind"] < len(KINDS) else f"kind {e['kind']}"
                role = _ROLE_OF.get(kind, 2)
                sends = kind in ("send", "copy")
                names = ("peer", "chunk or tile row") if sends else ("tile row", "tile column")
                trace.append(
                    {
                        "name": kind,
                        "ph": "X",
                        "ts": (int(e["begin_ns"]) - zero) / 1e3,
                        "dur": max(0, int(e["end_ns"]) - int(e["begin_ns"])) / 1e3,
                        "pid": device,
                        "tid": 4 * int(e["sm"]) + role,
                        "args": {
                            "call": int(e["call"]),
                            names[0]: int(e["a"]),
                            names[1]: int(e["b"]),
                        },
                    }
                )
            for sm in sorted(set(events["sm"].tolist())):
                for role, name in enumerate(_ROLES):
                    trace.append(_name("thread_name", f"SM {sm:3} {name}", device, 4 * sm + role))
        with open(path, "w") as f:
            json.dump({"traceEvents": trace, "displayTimeUnit": "ns"}, f)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draws a panel for each GPU: what each SM did. White is waiting for operands."""
        from matplotlib.collections import PolyCollection
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch

        zero = self.start_ns()
        figure = Figure(figsize=(12, 2.4 * len(self.events) + 0.6), layout="constrained")
        axes = np.atleast_1d(figure.subplots(len(self.events), 1, sharex=True))
        for axis, (device, events) in zip(axes, self.events.items(), strict=True):
            for kind, color in _COLORS.items():
                e = events[events["kind"] == KINDS.index(kind)]
                begin = (e["begin_ns"] - zero) / 1e3
                end = (e["end_ns"] - zero) / 1e3
                low, high = e["sm"] - 0.45, e["sm"] + 0.45
                corners = np.stack(
                    [
                        np.stack(p, -1)
                        for p in ((begin, low), (end, low), (end, high), (begin, high))
                    ],
                    axis=1,
                )
                axis.add_collection(PolyCollection(list(corners), facecolors=color))
            sends = events[events["kind"] == KINDS.index("send")]
            if len(sends):
                last = (int(sends["end_ns"].max()) - zero) / 1e3
                axis.axvline(last, color="#6d597a", linestyle="--", linewidth=1)
            axis.autoscale_view()
            axis.set_ylabel(f"GPU {device}, SM")
        axes[-1].set_xlabel("us (dashed: the last own chunk has left)")
        handles = [Patch(color=color, label=kind) for kind, color in _COLORS.items()]
        figure.legend(handles=handles, loc="outside upper center", ncols=len(handles))
        figure.savefig(path, dpi=110)

    def summary(self) -> str:
        """For each GPU: when its parts ended, and what its consumers and senders did till then.
        Consumers that take tiles in turn multiply half of the time each; those that share tiles
        of 224 or 256 columns, at the same time."""
        zero = self.start_ns()
        lines = []
        for device, events in self.events.items():
            sms = len(set(events["sm"].tolist()))
            by_kind = {k: events[events["kind"] == i] for i, k in enumerate(KINDS)}
            span = (int(events["end_ns"].max()) - int(events["begin_ns"].min())) / 1e3
            begin = (int(events["begin_ns"].min()) - zero) / 1e3
            parts = [f"GPU {device}: {begin:.1f} to {begin + span:.1f} us"]
            for kind, e in by_kind.items():
                if not len(e):
                    continue
                total = float((e["end_ns"] - e["begin_ns"]).sum()) / 1e3
                roles = 2 if kind in _COLORS else 1
                last = (int(e["end_ns"].max()) - zero) / 1e3
                each = total / len(e)
                share = total / (span * sms * roles) if span > 0 else 0.0
                parts.append(f"{kind} {share:.1%} ({len(e)} of {each:.2f} us, last at {last:.1f})")
            lines.append("; ".join(parts))
        if self.missed:
            lines.append(f"{self.missed} events found no room: record(max_events=...)")
        return "\n".join(lines)


def _name(what: str, name: str, device: int, thread: int | None = None) -> dict[str, Any]:
    event = {"name": what, "ph": "M", "pid": device, "args": {"name": name}}
    return event if thread is None else {**event, "tid": thread}


def _need_kernels() -> None:
    if not _heap._cuda_usable():
        raise RuntimeError("jflux.timeline records what CUDA kernels do, and there are none here")


@contextlib.contextmanager
def record(max_events: int = 1 << 18) -> Iterator[Timeline]:
    """Records what jflux's kernels do inside the ``with`` block, on this process's GPUs.

    No jflux call may be running when the block begins; it ends with a wait for the GPUs. Compiled
    functions need not be compiled again.

    Args:
      max_events: room on each GPU, 32 bytes for each.

    Raises:
      RuntimeError: without GPUs that jflux has kernels for.
    """
    _need_kernels()
    _heap._ensure("cuda")
    timeline = Timeline()
    on_a_thread(_native.lib.cuda_timeline_start, max_events)
    try:
        yield timeline
        for device in jax.local_devices():
            read = _native.lib.cuda_timeline_read
            raw, missed = on_a_thread(read, device.id, max_events)
            events = np.frombuffer(raw, _EVENT)
            if len(events):
                timeline.events[device.id] = np.sort(events, order="begin_ns")
            timeline.missed += missed
    finally:
        on_a_thread(_native.lib.cuda_timeline_stop)


def main() -> None:
    """Records one call, and writes its trace and its picture."""
    import jflux

    parser = argparse.ArgumentParser(
        prog="python -m jflux.timeline", description="Records one call of an op on all GPUs."
    )
    specs = {spec.name: spec for spec in products()}
    parser.add_argument("--op", default="all_gather_matmul", choices=list(specs))
    for name, value in (("m", 8192), ("n", 49152), ("k", 12288)):
        parser.add_argument(f"--{name}", type=int, default=value, help="global")
    parser.add_argument("--out", default="timeline", help="writes OUT.json and OUT.png")
    args = parser.parse_args()
    try:
        _need_kernels()  # before a CPU multiplies shapes of this size
    except RuntimeError as error:
        sys.exit(str(error))
    mesh = jax.make_mesh((jax.device_count(),), ("tp",))
    trial = Trial(specs[args.op])
    x_spec, w_spec, y_spec = trial.partition
    x, w = trial.operands(args.m, args.n, args.k, mesh, jnp.bfloat16)
    jflux.config.update(always=True)
    f = jax.jit(
        jax.shard_map(
            trial.function(), mesh=mesh, in_specs=(x_spec, w_spec), out_specs=y_spec,
            check_vma=False,
        )
    )  # fmt: skip
    for _ in range(3):
        jax.block_until_ready(f(x, w))
    with record() as timeline:
        jax.block_until_ready(f(x, w))
    timeline.save(f"{args.out}.json")
    timeline.plot(f"{args.out}.png")
    print(timeline.summary())


if __name__ == "__main__":
    main()
