"""Reads a model's layers out of a Flax module, linen or nnx. Flax is needed only here."""

from __future__ import annotations

import contextlib
import itertools
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax

from .model import Layer, Model

_NAMES = ("kernel", "embedding", "weight")  # of the parameters that count
# Parts of the layers of jflux.nn: those that read the x of the layer, and what is made of it.
_FIRST = ("query", "key", "value", "gate", "up")
_LAST = ("out", "down")


def read(
    module: Any, *example: Any, batch: int | None = None, rows: int | None = None,
    name: str | None = None, splits_x: tuple[tuple[str, int], ...] = (), checkpoint: int = 1,
) -> Model:  # fmt: skip
    """The layers of a Flax module, in the order in which a call runs them.

    The module is called with the shapes of `example`, nothing is computed. What counts is every
    module with a parameter "kernel", "embedding" or "weight" of two or more dimensions: dense
    layers (several input or output dimensions are taken together), convolutions and embeddings.
    A layer that reads the very array that an earlier one has read is oriented as that one is
    (queries, keys and values; the halves of a gated MLP); any other one is transposed if the layer
    before it is not. A table that is also the output head (`attend`) counts as the head alone.

    An nnx module may go without `example`, if it cannot be called here, say. Its layers are then
    those of its attributes, as declared, every second one transposed, of `rows` rows each.

    A weight counts once, however often it is used. linen's `nn.scan` is understood. Not seen:
    parameters of other names (positions, recurrent cells, the experts of a mixture), and the
    grouping of convolutions, which divides k.

    Args:
      example: arguments of a call: arrays or `jax.ShapeDtypeStruct`; the first dimension of the
        first one is the batch.
      batch: samples of a training step over all ranks; by default those of `example`.
      rows: only without `example`: rows of one sample.
      name: by default the module's class.
      splits_x, checkpoint: see :class:`jflux.plan.Model`.

    Raises:
      ImportError: Flax is not installed.
      TypeError: not a Flax module, or a linen module without `example`.
      ValueError: there are no layers in it, or the call of an nnx module runs other weights than it
        has (inside `nnx.scan` or `nnx.vmap`, say).
    """
    try:
        from flax import linen, nnx
    except ImportError as error:
        raise ImportError("jflux.plan.read needs Flax: pip install flax") from error
    if isinstance(module, linen.Module):
        if not example:
            raise TypeError("jflux: a linen module is read by calling it: pass example arguments")
        calls: list[_Call] | None = _call_linen(module, example)
    elif isinstance(module, nnx.Module):
        calls = _call_nnx(module, example) if example else None
    else:
        raise TypeError(f"jflux: {type(module)} is neither a linen nor an nnx module")
    if calls is not None:
        samples = example[0].shape[0]
        layers = _oriented(calls, samples)
    else:
        if rows is None or batch is None:
            raise TypeError("jflux: without example arguments, rows and batch must be given")
        samples, layers = batch, _declared(module, rows)
    if not layers:
        raise ValueError(f"jflux: {type(module).__name__} has no layers that count")
    return Model(
        tuple(layers), batch or samples, name or type(module).__name__, splits_x, checkpoint
    )


class _Call:
    """One call of a layer: what kind it is, its weight's shape, what went in and came out."""

    def __init__(self, owner: Any, kind: str, shape: tuple[int, ...], x: Any, y: Any, name: str):
        # `x` is kept so that no other array gets its id.
        self.owner, self.kind, self.shape, self.x, self.y, self.name = (
            owner,
            kind,
            shape,
            x,
            y,
            name,
        )
        self.count = 1


def _kind(module: Any, method: str) -> str:
    if method == "attend":
        return "attend"
    name = type(module).__name__
    if "Conv" in name:
        return "conv"
    return "embed" if "Embed" in name else "dense"


def _call_linen(module: Any, example: tuple[Any, ...]) -> list[_Call]:
    from flax import linen

    calls: list[_Call] = []

    def intercept(run: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        y = run(*args, **kwargs)
        inner = context.module
        if context.method_name not in ("__call__", "attend") or not args:
            return y
        own = inner.variables.get("params", {})
        if isinstance(inner, ours):
            shapes = {
                product: linen.meta.unbox(own[product]["kernel"]).shape
                for product in (*_FIRST, *_LAST)
                if product in own
            }
            for product, x in _reads(shapes, args[0]):
                path = (*inner.path, product)
                calls.append(
                    _Call((path, "kernel"), "dense", shapes[product], x, y, "/".join(path))
                )
        for key in _NAMES:
            weight: Any = linen.meta.unbox(own.get(key))
            if getattr(weight, "ndim", 0) >= 2 and hasattr(args[0], "shape"):
                kind = _kind(inner, context.method_name)
                name = "/".join(inner.path) or type(inner).__name__
                calls.append(_Call((inner.path, key), kind, weight.shape, args[0], y, name))
        return y

    keys = {name: jax.random.key(0) for name in ("params", "dropout")}
    ours = _ours("linen")
    with linen.intercept_methods(intercept):
        variables = jax.eval_shape(module.init, keys, *example)
    params = linen.meta.unbox(variables["params"])
    for call in calls:  # of repeated layers the call has seen one; the parameters are stacked
        path, key = call.owner
        at = params
        for name in path:
            at = at[name]
        call.count = max(1, math.prod(at[key].shape) // math.prod(call.shape))
    return calls


def _ours(flavour: str) -> tuple[type[Any], ...]:
    """jflux.nn's layers of several products, whose kernels are read without a call of their own."""
    layers = sys.modules.get(f"jflux.nn.{flavour}")
    return (layers.Attention, layers.MLP) if layers else ()


def _reads(shapes: dict[str, tuple[int, ...]], x: Any) -> Iterator[tuple[str, Any]]:
    """Each product of such a layer, in the order in which they run, and what it reads."""
    for product in (name for name in _FIRST if name in shapes):
        yield product, x
    for product in (name for name in _LAST if name in shapes):
        yield product, jax.ShapeDtypeStruct((*x.shape[:-1], *shapes[product][:-1]), x.dtype)


def _call_nnx(module: Any, example: tuple[Any, ...]) -> list[_Call]:
    from flax import nnx

    calls: list[_Call] = []
    paths: dict[int, str] = {}

    def run(module: Any, *args: Any) -> Any:
        paths.update({id(inner): path for path, inner, _, _ in _weights(module)})
        return module(*args)

    with contextlib.ExitStack() as stack:
        for kind in {*_ours("nnx"), *(type(inner) for _, inner, _, _ in _weights(module))}:
            for method in ("__call__", "attend"):
                if hasattr(kind, method):
                    stack.enter_context(_recorded(kind, method, calls))
        nnx.eval_shape(run, module, *example)
    for call in calls:
        call.name = paths.get(call.owner[0], call.name)
    ran = sum(math.prod(call.shape) for call in {c.owner: c for c in calls}.values())
    has = sum(math.prod(shape) for _, _, _, shape in _weights(module))
    if ran != has:
        raise ValueError(
            f"jflux: the call of {type(module).__name__} ran layers of {ran} weights, and it "
            f"has {has}: read it without example arguments, or list its layers by hand"
        )
    return calls


@contextlib.contextmanager
def _recorded(kind: type, method: str, calls: list[_Call]) -> Iterator[None]:
    """Calls of the class's method are noted, as long as the block runs."""
    inherited = method not in vars(kind)
    original = getattr(kind, method)
    kept: list[Any] = []  # so that no other module gets its id

    def record(self: Any, *args: Any, **kwargs: Any) -> Any:
        y = original(self, *args, **kwargs)
        if type(self) is kind and args:
            products: dict[str, Any] = {}
            if kind in _ours("nnx"):
                products = {product: getattr(self, product, None) for product in (*_FIRST, *_LAST)}
                products = {
                    product: inner for product, inner in products.items() if inner is not None
                }
                kept.extend(products.values())
            shapes = {product: inner.kernel.shape for product, inner in products.items()}
            for product, x in _reads(shapes, args[0]):
                of = (id(products[product]), "kernel")
                calls.append(_Call(of, "dense", shapes[product], x, y, product))
            for key in _NAMES:
                weight: Any = getattr(self, key, None)
                if getattr(weight, "ndim", 0) >= 2:
                    kept.append(self)
                    name = type(self).__name__
                    of = (id(self), key)
                    calls.append(_Call(of, _kind(self, method), weight.shape, args[0], y, name))
        return y

    setattr(kind, method, record)
    try:
        yield
    finally:
        if inherited:
            delattr(kind, method)
        else:
            setattr(kind, method, original)


def _weights(module: Any) -> Iterator[tuple[str, Any, str, tuple[int, ...]]]:
    """(path, module, parameter, shape) of all that count, as declared; shared ones once."""
    from flax import nnx

    seen: set[int] = set()

    def walk(at: Any, path: str) -> Iterator[tuple[str, Any, str, tuple[int, ...]]]:
        if id(at) in seen:
            return
        seen.add(id(at))
        if isinstance(at, nnx.Module):
            for key in _NAMES:
                weight = getattr(at, key, None)
                if not isinstance(weight, nnx.Variable) or id(weight) in seen:
                    continue
                if weight.ndim >= 2:
                    seen.add(id(weight))
                    yield path or type(at).__name__, at, key, weight.shape
        if isinstance(at, list | tuple | nnx.List):
            inner: list[tuple[Any, Any]] = list(enumerate(at))
        elif isinstance(at, dict):
            inner = list(at.items())
        elif isinstance(at, nnx.Module):
            inner = list(vars(at).items())
        else:
            return
        for key, value in inner:
            if isinstance(value, nnx.Module | list | tuple | dict):
                yield from walk(value, f"{path}/{key}" if path else str(key))

    return walk(module, "")


def _declared(module: Any, rows: int) -> list[Layer]:
    layers: list[Layer] = []
    flipped = False
    for path, inner, _, shape in _weights(module):
        kind = _kind(inner, "__call__")
        if kind == "embed":
            layers.append(_table(shape, rows, path))
            continue
        taps = math.prod(shape[:-2]) if kind == "conv" else 1
        inputs = getattr(inner, "in_features", None)
        k = inputs if isinstance(inputs, int) else math.prod(inputs or shape[:1])
        k = shape[-2] if kind == "conv" else k
        n = math.prod(shape) // (taps * k)
        layers.append(Layer(k, n, rows, transposed=flipped, taps=taps, name=path))
        flipped = not flipped
    return layers


def _table(shape: tuple[int, ...], rows: int, name: str) -> Layer:
    """An embedding. Its output is split over y, as the first layer's input is."""
    return Layer(shape[0], shape[1], rows, transposed=True, lookup=True, name=name)


def _oriented(calls: list[_Call], samples: int) -> list[Layer]:
    heads = {call.owner for call in calls if call.kind == "attend"}
    orientation: dict[int, bool] = {}  # by the id of what a layer reads
    seen: set[Any] = set()
    flipped = False
    found: list[tuple[Layer, int]] = []
    for call in calls:
        if call.owner in seen or (call.kind == "embed" and call.owner in heads):
            continue
        seen.add(call.owner)
        if call.kind == "embed":
            rows = max(1, math.prod(call.x.shape) // samples)
            found.append((_table(call.shape, rows, call.name), call.count))
            continue
        transposed = orientation.setdefault(id(call.x), flipped)
        flipped = not transposed
        found.append((_layer(call, samples, transposed), call.count))
    layers: list[Layer] = []
    for count, run in itertools.groupby(found, lambda pair: pair[1]):
        layers += [layer for layer, _ in run] * count
    return layers


def _layer(call: _Call, samples: int, transposed: bool) -> Layer:
    shape, x, y = call.shape, call.x.shape, call.y.shape
    if call.kind == "conv":
        return Layer(
            shape[-2], shape[-1], max(1, math.prod(y[:-1]) // samples), transposed,
            rows_in=max(1, math.prod(x[:-1]) // samples), taps=math.prod(shape[:-2]),
            name=call.name,
        )  # fmt: skip
    if call.kind == "attend":
        k, n = shape[1], shape[0]
    else:
        # So many of the weight's dimensions are contracted with the last ones of x.
        most = range(len(shape) - 1, 0, -1)
        contracted = next((i for i in most if x[-i:] == shape[:i]), 1)
        k, n = math.prod(shape[:contracted]), math.prod(shape[contracted:])
    rows = max(1, math.prod(x) // k // samples)
    return Layer(k, n, rows, transposed, name=call.name)
