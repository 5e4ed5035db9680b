"""Registers every FFI target of the library, and makes JAX primitives that lower to them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import dispatch
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jax.sharding import Mesh

from . import _config, _heap, _mesh

try:
    from . import _jflux
except ImportError as error:  # pragma: no cover - a broken install
    raise ImportError(
        f"jflux's native library is missing or does not load ({error}); reinstall with "
        "`pip install .` in a checkout (not from inside its source folder)"
    ) from error

# How JAX names a lowering's platform, and how XLA's FFI does.
_PLATFORMS = {"cpu": "cpu", "cuda": "CUDA"}


@functools.cache
def register_targets(platform: str) -> None:
    """Hands the library's handlers for `platform` ("cpu" or "cuda") to XLA.

    Called when an op is lowered: on the CPU the handlers' state type has to be registered before
    them, and what is registered before the CPU client exists is queued and replayed in the other
    order.
    """
    if platform == "cpu":
        from scipy.linalg import cython_blas

        blas = [_capsule_pointer(cython_blas.__pyx_capi__[name]) for name in ("sgemm", "dgemm")]
        _jflux.set_blas(*blas)
        jax.devices("cpu")
        types: Any = _jflux.call_site_type()
        jax.ffi.register_ffi_type("jflux_call_site", types, platform="cpu")
    for name, target_platform, stages in _jflux.targets():
        if target_platform == _PLATFORMS[platform]:
            _register_stages(name, platform, stages)


def register_handler(name: str, platform: str, stages: dict[str, Any]) -> None:
    """Registers a handler of someone else's, with what the library's own have beside `execute`."""
    own = next(stages for _, p, stages in _jflux.targets() if p == _PLATFORMS[platform])
    _register_stages(name, platform, {**own, **stages})


def _register_stages(name: str, platform: str, stages: dict[str, Any]) -> None:
    # Trait 1: may be recorded into a CUDA graph.
    traits = {"traits": 1} if platform == "cuda" else {}
    jax.ffi.register_ffi_target(name, stages, platform=_PLATFORMS[platform], **traits)


def _capsule_pointer(capsule: Any) -> int:
    import ctypes

    api = ctypes.pythonapi
    api.PyCapsule_GetName.restype = ctypes.c_char_p
    api.PyCapsule_GetName.argtypes = [ctypes.py_object]
    api.PyCapsule_GetPointer.restype = ctypes.c_void_p
    api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    return api.PyCapsule_GetPointer(capsule, api.PyCapsule_GetName(capsule))


def make_primitive(
    name: str,
    *,
    abstract_eval: Callable[..., Sequence[tuple[tuple[int, ...], np.dtype]]],
    reference: Callable[..., Any],
    not_fused: Callable[..., str | None],
    lax_is_faster: Callable[..., bool],
    launch: Callable[..., dict[str, Any]],
    batch: Callable[..., Any],
    is_reference: Callable[..., bool] = lambda *avals, params: False,
    adapt: Callable[..., Callable[..., Any] | None] = lambda *avals, params, platform: None,
    same_over: Callable[[Any], tuple[Any, ...]] = lambda params: (),
    target: Callable[[Any], str] | None = None,
    apart: Callable[..., Any] | None = None,
) -> Primitive:
    """A primitive `name(*operands, params)` with several results, all of the first operand's kind.

    Args:
      name: of the op; its FFI target is ``jflux_<name>``, unless `target` says otherwise.
      abstract_eval: (*avals, params=...) -> [(shape, dtype)] of the results.
      reference: (*operands, params=...) -> the results, in plain `lax`.
      is_reference: (*avals, params=...) -> whether `lax` has an op for just this.
      not_fused: (*avals, params=..., platform=...) -> why the kernel cannot take it, or None.
      lax_is_faster: (*avals, params=..., platform=..., mesh=...) -> whether measurements say so.
        The mesh is None where it is not known.
      adapt: (*avals, params=..., platform=...) -> a function (*operands) -> results that brings the
        operands into a form that the kernel takes and calls the primitive again, or None.
      launch: (*avals, params=..., platform=..., mesh=..., groups=...) -> what the handler takes
        beside `groups`, `site` and `world`; reserves what the call needs of the heap, if the mesh's
        devices are here.
      batch: the batching rule.
      same_over: params -> the axes that the results do not vary over any more.
      target: params -> the FFI target, of which messages then speak too.
      apart: (*operands, params=...) -> the results, by others of jflux's ops: called instead of the
        reference where `lax_is_faster` and the kernel could take the call.
    """
    primitive = Primitive(f"jflux_{name}")
    primitive.multiple_results = True
    # The group table names devices, so a lowering holds for its devices alone. Without this, JAX
    # reuses it for another mesh of the same shape.
    dispatch.prim_requires_devices_during_lowering.add(primitive)

    def abstract(*avals, params):
        # Results vary over the axes that the operands vary over; a bare shape would claim that
        # they do not, and check_vma=True would let wrong out_specs pass.
        manual = avals[0].manual_axis_type
        manual = manual.update(varying=manual.varying - frozenset(same_over(params)))
        return [
            avals[0].update(shape=shape, dtype=dtype, weak_type=False, manual_axis_type=manual)
            for shape, dtype in abstract_eval(*avals, params=params)
        ]

    primitive.def_abstract_eval(abstract)
    # Reached in eager shard_map, which evaluates one primitive at a time.
    primitive.def_impl(jax.jit(primitive.bind, static_argnames="params"))

    lower_reference = mlir.lower_fun(reference, multiple_results=True)
    lower_apart = mlir.lower_fun(apart or reference, multiple_results=True)

    def label_of(params):
        return name if target is None else f"{name}({target(params)})"

    def lower_fused(ctx, *operands, params, platform):
        avals = ctx.avals_in
        empty = any(0 in aval.shape for aval in (*avals, *ctx.avals_out))
        if not _config.config.fused or empty or is_reference(*avals, params=params):
            return lower_reference(ctx, *operands, params=params)
        which = {"params": params, "platform": platform}
        mesh = _mesh.concrete_mesh_of(ctx.module_context.axis_context, params.axis_names)
        slower = not _config.config.always and lax_is_faster(*avals, **which, mesh=mesh)
        if slower and apart is None:
            return lower_reference(ctx, *operands, params=params)
        reason: str | None
        if mesh is None:
            reason = "the mesh is abstract, so its devices are not known when the op is lowered"
        else:
            reason = not_fused(*avals, **which) or _heap.why_not_usable(platform, mesh)
        if slower:
            lower = lower_apart if reason is None else lower_reference
            return lower(ctx, *operands, params=params)
        if reason is not None:
            _config.fall_back(label_of(params), reason)
            return lower_reference(ctx, *operands, params=params)
        assert mesh is not None
        adapted = adapt(*avals, **which)
        if adapted is not None:
            return mlir.lower_fun(adapted, multiple_results=True)(ctx, *operands)
        register_targets(platform)
        _begin_module(ctx.module_context.module)
        table = _mesh.group_table(mesh, params.axis_names)
        attributes = launch(*avals, **which, mesh=mesh, groups=table)
        return jax.ffi.ffi_lowering(f"jflux_{name}" if target is None else target(params))(
            ctx,
            *operands,
            groups=table.ravel(),
            site=np.int64(ctx.module_context.new_channel()),
            world=np.int64(table.shape[1]),
            **attributes,
        )

    def lower_elsewhere(ctx, *operands, params):
        _config.fall_back(label_of(params), "jflux has kernels for CPUs and CUDA GPUs only")
        return lower_reference(ctx, *operands, params=params)

    mlir.register_lowering(primitive, lower_elsewhere)
    for platform in _PLATFORMS:
        rule = functools.partial(lower_fused, platform=platform)
        mlir.register_lowering(primitive, rule, platform=platform)
    batching.primitive_batchers[primitive] = functools.partial(batch, primitive)
    return primitive


def lowers_for_here(mesh: Mesh) -> bool:
    """Whether the mesh's devices belong to this program (and not to a topology to export for)."""
    device = mesh.devices.flat[0]
    return any(device is d for d in device.client.devices())


_last_module: Any = None


def _begin_module(module: Any) -> None:
    """Tells the library when the calls of another module begin (cc/runtime/ffi.h)."""
    global _last_module
    if module is not _last_module:
        _last_module = module
        _jflux.begin_module()
