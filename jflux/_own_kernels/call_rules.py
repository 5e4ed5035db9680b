"""What calls of users' own kernels share: `jflux.custom_call` and `jflux.symm.call`."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad

from .. import _native
from .._call import plans
from .._call.forms import ShapeDtype, WhyNot
from .._call.plans import Plan
from .._ranks import meshes
from . import compiling


def results_of(structs: Sequence[Any]) -> tuple[ShapeDtype, ...]:
    """Shapes and types of arrays, or of what has them."""
    return tuple((tuple(s.shape), np.dtype(s.dtype)) for s in structs)


def checked_results(title: str, got: Any, wanted: Sequence[ShapeDtype]) -> list[Any]:
    """The results of a reference, a pytree, which must be those of the call."""
    arrays = jax.tree.leaves(got)
    if (shapes := results_of(arrays)) != wanted:
        raise ValueError(f"jflux.{title}: the reference has results {shapes}, not {wanted}")
    return arrays


def with_vjp(
    forward: Callable[..., Any], vjp: Callable[..., Any] | None, params: Any
) -> Callable[..., Any]:
    """A function of arrays whose reverse mode is `vjp`: (args, results, cotangents,
    **params.keywords()) -> cotangents of `args`. None: it has none but its own."""
    if vjp is None:
        return forward

    def saved(*arrays: Any) -> Any:
        results = forward(*arrays)
        return results, (arrays, results)

    def backward(kept: Any, cotangents: Any) -> Any:
        got = vjp(*kept, cotangents, **params.keywords())
        return tuple(meshes.vary(ct, meshes.varying(a)) for ct, a in zip(got, kept[0], strict=True))

    differentiable = jax.custom_vjp(forward)
    differentiable.defvjp(saved, backward)
    # Around the custom_vjp, whose cotangents are of arrays that vary: the primitive is inside it.
    return lambda *arrays: differentiable(*meshes.vary_together(params.axis_names, *arrays))


def refuse_derivatives(primitive: Primitive, title: Callable[[Any], str]) -> None:
    """Says what to do where a call without `vjp` is differentiated."""

    def jvp(primals: Any, tangents: Any, *, params: Any) -> Any:
        raise NotImplementedError(
            f"jflux.{title(params)} has no derivative: pass vjp= for reverse mode, or wrap the "
            "call in jax.lax.stop_gradient"
        )

    ad.primitive_jvps[primitive] = jvp


def signature_of(arrays: Sequence[Any], results: Sequence[ShapeDtype], *fields: Any) -> int:
    """Of what the ranks must agree on, in 32 bits."""
    operands = [(array.shape, np.dtype(array.dtype).name) for array in arrays]
    named = [(shape, dtype.name) for shape, dtype in results]
    text = repr((*fields, operands, named))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little")


def plan(reason: str, world: int, data_bytes: int, num_signals: int) -> Plan | WhyNot:
    """Of a call that has a kernel."""
    if world > _native.MAX_RANKS:
        return WhyNot(
            f"{world} ranks, jflux has heaps for up to {_native.MAX_RANKS}", unsupported=True
        )
    total = _native.lib.custom_workspace_bytes(data_bytes, num_signals)
    return plans.fused(reason, {"workspace_bytes": total})


def module_attributes(
    compiled: compiling.Compiled, title: str, grid: int, values: Sequence[int]
) -> dict[str, Any]:
    """Loads a kernel: what its handler, `compiling.TARGET`, is told of it.

    Args:
      values: who has compiled it, and what it is launched with.
    """
    compiling.load(compiled, title, grid)
    return {
        "module": compiled.key,
        "name": title,
        "blocks": np.int64(grid),
        "values": np.array(values, np.int64),
    }
