"""``jflux.explain``: which path each call of a function takes, and why; ``jflux.explaining``: the
same of what a block of Python compiles."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr

from .. import _config
from .plans import Plan

#: Folders whose lines are not the program's.
_NOT_THE_PROGRAM = tuple(
    os.path.join(os.path.dirname(file), "") for file in (jax.__file__, os.path.dirname(__file__))
)


@dataclasses.dataclass(frozen=True)
class Explained:
    """One call of an op in a lowered function.

    Attributes:
      op: its name.
      operands, results: shapes and types of one rank's, such as "bfloat16[1024, 4096]".
      plan: the path that the call takes, its configuration, and the reason in words.
      lines: of the program, such as "model.py:41 (block)": those of equal calls are together.
      times: how often they run in one call of the function, as far as loops have a length. Of
        :func:`jflux.explaining` how often they were traced.
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
    if not hasattr(f, "lower"):  # a function of its own: f may have no hash
        jitted = jax.jit(lambda *args, **kwargs: f(*args, **kwargs))
    recorder = _Recorder()
    with _config.override(recorder=recorder):  # another key of JAX's caches: it lowers anew
        try:
            if not hasattr(jitted, "trace"):
                jitted.lower(*args, **kwargs)
                return Explanation(recorder.calls)
            traced = jitted.trace(*args, **kwargs)
            traced.lower()
        except jax.errors.ConcretizationTypeError as error:
            raise TypeError(
                "jflux.explain: f cannot be jitted, since it needs the values of its arguments; "
                f"explain the jitted parts of it: {error}"
            ) from error
    places = _Places()
    places.add_all(traced.jaxpr)
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
    recorder = _Recorder(_Places())
    with _config.override(recorder=recorder):
        yield recorder.calls


#: The calls of a program that are equal: their op, and their operands.
_Key = tuple[str, tuple[str, ...]]


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
                avals = [atom.aval for atom in equation.invars]
                self.add(_key(label(equation.params["params"]), avals), here, times)
            length = equation.params["length"] if equation.primitive.name == "scan" else 1
            for value in equation.params.values():
                for body in value if isinstance(value, tuple | list) else (value,):
                    if isinstance(body, Jaxpr | ClosedJaxpr):
                        self.add_all(body, here, times * length)

    def of(self, key: _Key, call: Explained) -> Explained:
        """A call that became of those of a key."""
        if key not in self.lines:  # noted by `note_once`
            return call
        return dataclasses.replace(call, lines=tuple(self.lines[key]), times=self.times[key])


class _Recorder:
    """Collects calls. Equal to itself alone, as keys of caches must be.

    Attributes:
      calls: those that have been lowered.
      lowered: the same, with the calls of the program that they are of. One may become several.
      now: the one that is lowered now.
      traced: where calls are traced; None: nobody asks, and nothing runs.
    """

    def __init__(self, traced: _Places | None = None) -> None:
        self.calls, self.traced = Calls(), traced
        self.lowered: list[tuple[_Key, Explained]] = []
        self.now: _Key | None = None

    @property
    def runs(self) -> bool:
        """Whether what is lowered may run."""
        return self.traced is not None

    def add(self, key: _Key, call: Explained) -> None:
        if self.traced is not None:
            call = self.traced.of(key, call)
        self.calls.append(call)
        self.lowered.append((key, call))


@contextlib.contextmanager
def lowering(op: str, operands: Sequence[Any]) -> Iterator[None]:
    """While a call is lowered, with all that it becomes."""
    recorder = _config.config.current().recorder
    if recorder is None or recorder.now is not None:
        yield
        return
    recorder.now = _key(op, operands)
    try:
        yield
    finally:
        recorder.now = None


def tracing(label: Callable[[Any], str], params: Any, operands: Sequence[Any]) -> None:
    """Tells an `explaining` of a call that is traced. `label`: of parameters, the op."""
    recorder = _config.config.current().recorder
    if recorder is not None and recorder.traced is not None and recorder.now is None:
        avals = [jax.typeof(a) for a in operands]
        recorder.traced.add(_key(label(params), avals), _line_now())


def _key(op: str, operands: Sequence[Any]) -> _Key:
    return op, tuple(map(_describe, operands))


def _line_of(traceback: Any) -> str:
    """The innermost line of the program in a traceback of JAX's; empty: there is none."""
    for frame in traceback.frames if traceback is not None else ():
        if _is_the_programs(frame.file_name):
            return f"{frame.file_name}:{frame.line_num} ({frame.function_name})"
    return ""


def _line_now() -> str:
    """The innermost line of the program that runs."""
    frame: Any = sys._getframe()
    while frame is not None:
        code = frame.f_code
        if _is_the_programs(code.co_filename):
            return f"{code.co_filename}:{frame.f_lineno} ({code.co_qualname})"
        frame = frame.f_back
    return ""


def _is_the_programs(file: str) -> bool:
    return not file.startswith((*_NOT_THE_PROGRAM, "<"))


def _describe(aval: Any) -> str:
    return f"{aval.dtype.name}[{', '.join(map(str, aval.shape))}]"


def describe(avals: Sequence[Any]) -> str:
    """Shapes and types of one rank's arrays, in words."""
    return ", ".join(map(_describe, avals))


def note(op: str, operands: Sequence[Any], results: Sequence[Any], plan: Plan) -> None:
    """Tells an `explain` or `explaining` that runs in this thread of a call."""
    recorder = _config.config.current().recorder
    if recorder is not None:
        key = _key(op, operands)
        call = Explained(op, key[1], tuple(map(_describe, results)), plan)
        recorder.add(recorder.now or key, call)


def note_once(op: str, operands: Sequence[Any], results: Sequence[Any], plan: Plan) -> None:
    """:func:`note` of a call that runs as several ops, and is known where it is traced: equal
    calls are noted once, since JAX may trace one several times."""
    recorder = _config.config.current().recorder
    if recorder is None:
        return
    call = Explained(op, tuple(map(_describe, operands)), tuple(map(_describe, results)), plan)
    if all(dataclasses.replace(one, lines=(), times=1) != call for one in recorder.calls):
        line = _line_now()
        recorder.add((op, call.operands), dataclasses.replace(call, lines=(line,) if line else ()))
