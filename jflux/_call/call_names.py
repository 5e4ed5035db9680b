"""Names the calls of a program, the same in all of its processes. CPUs only.

XLA:CPU runs independent calls in any order, so the ranks of a call find each other by its name
(cc/runtime/cpu_call.h). Within a process XLA tells calls apart. Across processes a name must follow
from the program alone: what else a process has compiled, how often and with which options, differs.

When JAX has lowered a program, each call in it gets an attribute `site` of its own: a hash of all
of the program's calls, and the call's place among them. JAX lowers a function that is called twice
once, and XLA inlines it later. Such a function is copied first, if there are calls in it.
"""

from __future__ import annotations

import contextvars
import functools
import hashlib
import itertools
import json
from collections.abc import Iterator
from typing import Any

import jax
from jax.extend.mlir import ir

from .. import _jax_internals

#: `site` is hash << CALL_BITS | place (cc/runtime/cpu_call.cc), and positive in 64 bits.
CALL_BITS = 20

#: The targets of the calls of the program that is being lowered, if they will be named.
_targets: contextvars.ContextVar[list[str] | None] = contextvars.ContextVar(
    "jflux_targets", default=None
)
_CONFIG = "mhlo.backend_config"
#: The attribute in which an operation names a function.
_CALLEE = {"func.call": "callee", "stablehlo.composite": "decomposition"}


def name_calls(module: ir.Module) -> int:
    """Gives each of the module's calls a name of its own, and returns how many there are."""
    functions = {
        ir.StringAttr(op.attributes["sym_name"]).value: op.operation
        for op in module.body.operations
        if op.operation.name == "func.func"
    }
    calls: list[Any] = []
    symbols, seen = ir.SymbolTable(module.operation), set()

    @functools.cache
    def has_calls(name: str) -> bool:
        return any(
            _is_call(op) or ((callee := _callee(op, functions)) is not None and has_calls(callee))
            for op in _operations(functions[name])
        )

    def visit(name: str) -> None:
        """In the order of the program, which does not depend on what JAX has lowered once."""
        seen.add(name)
        for op in _operations(functions[name]):
            if _is_call(op):
                calls.append(op)
            callee = _callee(op, functions)
            if callee is None or not has_calls(callee):
                continue
            if callee in seen:
                copy = functions[callee].clone(ir.InsertionPoint(module.body))
                callee = ir.StringAttr(symbols.insert(copy)).value
                functions[callee] = copy
                op.attributes[_CALLEE[op.name]] = ir.FlatSymbolRefAttr.get(callee)
            visit(callee)

    with module.context, ir.Location.unknown():
        for name in [name for name, op in functions.items() if _is_public(op)]:
            if has_calls(name):
                visit(name)
        if len(calls) >> CALL_BITS:
            raise RuntimeError(f"a program of {len(calls)} calls of jflux")
        configs = [_config_of(op) for op in calls]
        of_program = hashlib.sha256()
        for op, config in zip(calls, configs, strict=True):
            del config["site"]  # as lowered, which is once for all copies
            said = [str(op.attributes["call_target_name"]), *(str(v.type) for v in op.operands)]
            said += [f"{name}={config[name]}" for name in sorted(config)]
            of_program.update(json.dumps(said).encode())
        program = int.from_bytes(of_program.digest()[:8], "big") >> (CALL_BITS + 1)
        for place, (op, config) in enumerate(zip(calls, configs, strict=True)):
            site = ir.IntegerAttr.get(ir.IntegerType.get_signless(64), program << CALL_BITS | place)
            op.attributes[_CONFIG] = ir.DictAttr.get({**config, "site": site})
    return len(calls)


def _operations(function: Any) -> Iterator[Any]:
    """All of a function, in order, also of the regions of its operations."""
    for region in function.regions:
        for op in itertools.chain.from_iterable(region.blocks):
            yield op.operation
            yield from _operations(op.operation)


def _is_public(function: Any) -> bool:
    visibility = "sym_visibility"
    return visibility not in function.attributes or (
        ir.StringAttr(function.attributes[visibility]).value == "public"
    )


def _callee(op: Any, functions: dict[str, Any]) -> str | None:
    """The function to which an operation refers."""
    if op.name not in _CALLEE:
        return None
    name = ir.FlatSymbolRefAttr(op.attributes[_CALLEE[op.name]]).value
    return name if name in functions else None


def _is_call(op: Any) -> bool:
    if op.name != "stablehlo.custom_call" or _CONFIG not in op.attributes:
        return False
    return {"site", "groups", "world", "workspace_bytes"} <= _config_of(op).keys()


def _config_of(op: Any) -> dict[str, Any]:
    config = op.attributes[_CONFIG]
    attributes: Any = config if isinstance(config, ir.DictAttr) else ()
    return {named.name: named.attr for named in attributes}


def name_when_lowered() -> None:
    """Has JAX name the calls of each module that it lowers for the CPUs of several processes."""
    mlir = _jax_internals.LOWERING.get()
    if mlir is None:
        return
    lower = mlir.lower_jaxpr_to_module

    @functools.wraps(lower)
    def lower_and_name(*args: Any, **params: Any) -> Any:
        if not _has_peers() or "cpu" not in params.get("platforms", ()):
            return lower(*args, **params)
        targets: list[str] = []
        token = _targets.set(targets)
        try:
            result = lower(*args, **params)
        finally:
            _targets.reset(token)
        if name_calls(result.module) == 0 and targets:
            raise RuntimeError(
                f"jflux does not find its calls of {targets[0]} in what JAX {jax.__version__} has "
                "lowered, and without names processes would wait for each other in vain"
            )
        return result

    mlir.lower_jaxpr_to_module = lower_and_name


def _has_peers() -> bool:
    """Whether there are other processes."""
    return jax.distributed.is_initialized() and jax.process_count() > 1


def expect(target: str) -> None:
    """A call of an FFI target becomes part of the program that is being lowered."""
    if (targets := _targets.get()) is not None:
        targets.append(target)


def why_not(platform: str) -> str | None:
    """Why the calls that are being lowered for a platform will have no names, or None: they will,
    or need none. Without names, processes would wait for each other in vain."""
    if platform != "cpu" or _targets.get() is not None or not _has_peers():
        return None
    return f"JAX {jax.__version__} lowers programs in a way in which jflux cannot name their calls"
