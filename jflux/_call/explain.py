"""``jflux.explain``: which path each call of a function takes, and why; ``jflux.explaining``: the
same of what a block of Python compiles."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr

from .. import _config
from .plans import Plan

#: Files whose lines are not the program's; and those of other libraries.
_NOT_THE_PROGRAM = (
    *(os.path.join(os.path.dirname(f), "") for f in (jax.__file__, os.path.dirname(__file__))),
    "<frozen ",
)
_LIBRARIES = tuple(
    os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "purelib", "platlib")
)


@dataclasses.dataclass(frozen=True)
class Explained:
    """One call of an op in a lowered function.

    Attributes:
      op: its name.
      operands, results: shapes and types of one rank's, such as "bfloat16[1024, 4096]".
      plan: the path that the call takes, its configuration, and the reason in words.
      lines: of the program, such as "model.py:41 (block)": those of equal calls are together.
      times: how often these run in one call of the function, as far as loops have a length: a
        branch counts as if it were taken, and so does what XLA leaves out. 1 of calls that another
        call became, and of :func:`jflux.explaining`.
    """

    op: str
    operands: tuple[str, ...]
    results: tuple[str, ...]
    plan: Plan
    lines: tuple[str, ...] = ()
    times: int = 1

    def __str__(self) -> str:
        times = f", {self.times} times" if self.times > 1 else ""
        lines = [f"{self.op}  {', '.join(self.operands)} -> {', '.join(self.results)}{times}"]
        lines += [f"  line    {line}" for line in self.lines]
        lines.append(f"  path    {self.plan.path}")
        if "tile_n" in self.plan.config:  # of other ops the reason says all
            c = self.plan.config
            sends = self.plan.workspace_bytes > 0
            senders = f", {self.plan.senders or 'all'} senders" if sends else ""
            lines.append(
                f"  config  tiles 128 x {c['tile_n']}, clusters of {c['cluster_m']}, raster groups "
                f"of {c['group_m'] or 'all'} rows of clusters, k in {c['splits']}{senders}"
            )
        if self.plan.workspace_bytes:
            lines.append(f"  heap    {self.plan.workspace_bytes / (1 << 20):.2f} MiB per rank")
        lines.append(f"  reason  {self.plan.reason}")
        return "\n".join(lines)


class Explanation(tuple[Explained, ...]):
    """The calls of a function, in the order in which they are lowered. Prints as a report."""

    def __str__(self) -> str:
        return _report(self)

    __repr__ = __str__  # what a session or a notebook shows


class Calls(list[Explained]):
    """The calls that :func:`jflux.explaining` has seen so far, in the order in which they were
    lowered. Prints as a report."""

    def __str__(self) -> str:
        return _report(self)

    __repr__ = __str__


def _report(calls: Sequence[Explained]) -> str:
    return "\n".join(map(str, calls)) or "no call of a jflux op"


def explain(f: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Which path each call of jflux's ops in ``f(*args, **kwargs)`` takes, and why: data that
    prints as a report. `f` is lowered. Nothing runs, and no compiled program is used or kept.

    Equal calls in a function that is jitted inside `f`, or in the body of a loop, are lowered, and
    listed, once, with how often they run.

    Args:
      f: a function that `jax.jit` takes, jitted or not.
      *args, **kwargs: its arguments: arrays, or `jax.ShapeDtypeStruct` with shardings.

    Returns:
      The calls: an :class:`Explanation`, a tuple of :class:`Explained`.

    Raises:
      TypeError: `f` is not a function that can be jitted.

    Examples:
      >>> mesh = jax.sharding.Mesh(jax.devices(), "tp")
      >>> f = functools.partial(jflux.all_gather_matmul, axis_name="tp", mesh=mesh)
      >>> (call,) = jflux.explain(f, jnp.ones((64, 32)), jnp.ones((32, 128)))
      >>> call.op, str(call.plan.path)
      ('all_gather_matmul', 'fused')
    """
    if not callable(f):
        raise TypeError(
            f"jflux.explain: f must be a function that jax.jit takes, got {type(f).__name__}"
        )
    jitted: Any = f
    if not callable(getattr(f, "lower", None)):  # a function of its own: f may have no hash
        jitted = jax.jit(lambda *args, **kwargs: f(*args, **kwargs))
    recorder, places = _Recorder(), _Places()
    with _config.override(recorder=recorder):  # another key of JAX's caches: it lowers anew
        try:
            traced: Any = jitted.trace(*args, **kwargs) if hasattr(jitted, "trace") else None
            if hasattr(traced, "jaxpr"):  # not of Flax's nnx.jit
                traced.lower()
                places.add_all(traced.jaxpr)
            else:
                jitted.lower(*args, **kwargs)
        except jax.errors.ConcretizationTypeError as error:
            raise TypeError(
                "jflux.explain: f cannot be jitted, since it needs the values of its arguments; "
                f"explain the jitted parts of it: {error}"
            ) from error
    return Explanation(places.of(key, call) for key, call in recorder.lowered)


@contextlib.contextmanager
def explaining() -> Iterator[Calls]:
    """:func:`jflux.explain` of what runs in a ``with`` block, for programs that call `jax.jit` by
    themselves: the list that the block gets has the calls of all functions that JAX lowers in it,
    in this thread, and grows with them.

    What was compiled before is compiled again for the block, so that its calls are seen too, and
    what is compiled in it is not used after it: put a step or two into it, not a training run. A
    function that runs twice in it is lowered, and listed, once.

    Raises:
      RuntimeError: inside a function that JAX is tracing, which is lowered after the block.

    Examples:
      >>> mesh = jax.sharding.Mesh(jax.devices(), "tp")
      >>> f = jax.jit(functools.partial(jflux.all_gather_matmul, axis_name="tp", mesh=mesh))
      >>> with jflux.explaining() as calls:
      ...   y = f(jnp.ones((64, 32)), jnp.ones((32, 128)))
      >>> [(call.op, str(call.plan.path)) for call in calls]
      [('all_gather_matmul', 'fused')]
    """
    _config.check_not_staging("jflux.explaining()")
    outer = _config.config.current().recorder
    recorder = _Recorder({}, outer if outer is not None and outer.runs else None)
    with _config.override(recorder=recorder):
        yield recorder.calls


#: The calls of a program that are equal: their op, operands and parameters.
_Key = tuple[str, tuple[str, ...], Any]


class _Places:
    """Where equal calls are in a program, and how often they run."""

    def __init__(self) -> None:
        self.lines: dict[_Key, dict[str, None]] = {}
        self.times: collections.Counter[_Key] = collections.Counter()

    def add(self, key: _Key, line: str, times: int = 1) -> None:
        self.lines.setdefault(key, {}).update({line: None} if line else {})
        self.times[key] += times

    def add_all(self, jaxpr: Any, line: str = "", times: int = 1) -> None:
        """The calls of a body, closed or not, which runs so often at this line."""
        for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
            here = _line_of(equation.source_info.traceback) or line
            label = getattr(equation.primitive, "label", None)  # of an OpPrimitive
            if label is not None:
                params, avals = equation.params["params"], [a.aval for a in equation.invars]
                self.add(_key(label(params), avals, params), here, times)
            length = equation.params["length"] if equation.primitive.name == "scan" else 1
            for value in equation.params.values():
                for body in value if isinstance(value, tuple | list) else (value,):
                    if isinstance(body, Jaxpr | ClosedJaxpr):
                        self.add_all(body, here, times * length)

    def of(self, key: _Key, call: Explained) -> Explained:
        """A call with what is known of those like it: of one that another became, nothing."""
        if key not in self.lines:
            return call
        return dataclasses.replace(call, lines=tuple(self.lines[key]), times=self.times[key])


class _Recorder:
    """Collects calls. Equal to itself alone, as keys of caches must be.

    Attributes:
      calls: those that have been lowered.
      lowered: the same, with their keys.
      traced: the lines of calls that have been traced and not lowered; None: of `explain`, which
        has the program, and runs nothing.
      outer: of a block around this one.
    """

    def __init__(
        self, traced: dict[_Key, list[str]] | None = None, outer: _Recorder | None = None
    ) -> None:
        self.calls, self.traced, self.outer = Calls(), traced, outer
        self.lowered: list[tuple[_Key, Explained]] = []

    @property
    def runs(self) -> bool:
        """Whether what is lowered may run."""
        return self.traced is not None

    def add(self, key: _Key, call: Explained) -> None:
        if self.traced is not None:
            lines = call.lines or tuple(dict.fromkeys(self.traced.pop(key, ())))
            call = dataclasses.replace(call, lines=lines)
        self.calls.append(call)
        self.lowered.append((key, call))
        if self.outer is not None:
            self.outer.add(key, call)


def tracing(label: Callable[[Any], str], params: Any, operands: Sequence[Any]) -> None:
    """Tells an `explaining` of a call that is traced. `label`: of parameters, the op."""
    recorder = _config.config.current().recorder
    if recorder is not None and recorder.traced is not None:
        key = _key(label(params), [jax.typeof(a) for a in operands], params)
        # Of a gradient it is the line of what it is the gradient of.
        if line := _line_of(source_info_util.current().traceback) or line_now():
            recorder.traced.setdefault(key, []).append(line)


def _key(op: str, operands: Sequence[Any], params: Any) -> _Key:
    return op, tuple(map(_describe, operands)), params


def _line_of(traceback: Any) -> str:
    """The innermost line of the program in a traceback of JAX's; empty: there is none."""
    frames = traceback.frames if traceback is not None else ()
    return _innermost((f.file_name, f.line_num, f.function_name) for f in frames)


def line_now() -> str:
    """The innermost line of the program that runs."""
    frames, frame = [], sys._getframe()
    while frame is not None:
        code = frame.f_code
        frames.append((code.co_filename, frame.f_lineno, code.co_qualname))
        frame = frame.f_back  # type: ignore[assignment]
    return _innermost(frames)


def _innermost(frames: Iterable[tuple[str, int, str]]) -> str:
    """Of (file, line, function), the innermost first: a line that is nobody's library, or else one
    of another library than JAX and jflux."""
    found = ""
    for file, line, function in frames:
        if file.startswith(_NOT_THE_PROGRAM):
            continue
        found = found or f"{file}:{line} ({function})"
        if not file.startswith(_LIBRARIES):
            return f"{file}:{line} ({function})"
    return found


def _describe(aval: Any) -> str:
    return f"{aval.dtype.name}[{', '.join(map(str, aval.shape))}]"


def describe(avals: Sequence[Any]) -> str:
    """Shapes and types of one rank's arrays, in words."""
    return ", ".join(map(_describe, avals))


def note(op: str, operands: Sequence[Any], results: Sequence[Any], plan: Plan, params: Any) -> None:
    """Tells an `explain` or `explaining` that runs in this thread of a call that is lowered."""
    recorder = _config.config.current().recorder
    if recorder is not None:
        call = Explained(op, tuple(map(_describe, operands)), tuple(map(_describe, results)), plan)
        recorder.add((op, call.operands, params), call)


def note_once(op: str, operands: Sequence[Any], results: Sequence[Any], plan: Plan) -> None:
    """:func:`note` of a call that runs as several ops, and is known where it is traced: equal
    calls are noted once, since JAX may trace one several times."""
    recorder = _config.config.current().recorder
    if recorder is None:
        return
    call = Explained(op, tuple(map(_describe, operands)), tuple(map(_describe, results)), plan)
    if all(dataclasses.replace(one, lines=(), times=1) != call for one in recorder.calls):
        line = line_now()
        call = dataclasses.replace(call, lines=(line,) if line else ())
        recorder.add((op, call.operands, None), call)
