"""Weights from the files of a checkpoint, each rank's part alone."""

from __future__ import annotations

import dataclasses
import fnmatch
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from .._ops._scaled import BLOCK, Scaled
from ._tensors import Index, Lazy, Source, Tensor, as_tensor, bind, dequantized, of_array

Tree = TypeVar("Tree")
Paths = str | PathLike[str] | Sequence[str | PathLike[str]]

#: Of weights in 8 bits: the type, and the ending of the name of their scales, one for each square
#: of 128 rows and columns, as DeepSeek-V3's and Qwen3's files have them.
EIGHT_BITS = np.dtype(jnp.float8_e4m3fn)
SCALES = "_scale_inv"


def load(
    checkpoint: Paths | Mapping[str, Any],
    like: Tree,
    names: Mapping[str, str | Tensor | None],
    *,
    unused: Sequence[str] = (),
    progress: Callable[[Sequence[Any]], Iterable[Any]] | None = None,
) -> Tree:
    """The weights of a model from a checkpoint of Hugging Face's, in safetensors files.

    Each process reads the parts of its own devices, as `like` says how arrays are split::

        names = {
            "embed/embedding": "model.embed_tokens.weight",
            "blocks/{i}/mlp/up/kernel": Tensor("model.layers.{i}.mlp.up_proj.weight").T,
            "blocks/{i}/mlp/down/kernel": Tensor("model.layers.{i}.mlp.down_proj.weight").T,
        }
        graph, like = nnx.get_abstract_model(lambda: Model(nnx.Rngs(0)), mesh)
        model = nnx.merge(graph, jflux.nn.load("Llama-3.1-8B", like, names))

    Args:
      checkpoint: a folder with safetensors files (those that its ``*.safetensors.index.json``
        lists, or else all), such a file or index, several of them, or tensors by name: of
        :func:`jflux.nn.open_safetensors`, or arrays.
      like: a pytree of arrays or of `jax.ShapeDtypeStruct`: shapes, types and shardings of the
        result. A leaf without a sharding gets its array on JAX's default device. A
        :class:`jflux.Scaled` stays in 8 bits; its tensors have scales of blocks
        (``NAME_scale_inv``) in the checkpoint. Other leaves are dequantised.
      names: by the path of a leaf, what it is made of: a tensor's name, a
        :class:`jflux.nn.Tensor`, or None for a leaf that stays as it is. A path is the leaf's keys
        with "/" between them, without Flax's last "value". ``{i}`` in one stands for any one key.
        Of several entries the first one that fits counts. A tensor may make several leaves, such
        as an embedding and the head that is tied to it.
      unused: names of tensors that may stay unread, with "*" for any text.
      progress: gets the sequence of all leaves, and returns what is iterated over: `tqdm.tqdm`.

    Returns:
      `like` with arrays as leaves.

    Raises:
      FileNotFoundError: if a file is not there.
      ModuleNotFoundError: if the package safetensors is not installed.
      ValueError: before anything is read: if a leaf has no entry in `names`, a tensor is not in
        the checkpoint, makes an array of another shape, or is not used.
    """
    tensors = checkpoint if isinstance(checkpoint, Mapping) else open_safetensors(checkpoint)
    opened = _Opened(tensors)
    with_paths, tree = jax.tree_util.tree_flatten_with_path(like, is_leaf=_is_scaled)
    leaves = [_planned(opened, path_of(path), leaf, names) for path, leaf in with_paths]
    opened.check(unused)
    read = (leaf() for leaf in (leaves if progress is None else progress(leaves)))
    loaded: Tree = jax.tree.unflatten(tree, read)
    return loaded


def path_of(path: Sequence[Any]) -> str:
    keys = jax.tree_util.keystr(tuple(path), simple=True, separator="/").split("/")
    return "/".join(keys[:-1] if keys[-1] == "value" and len(keys) > 1 else keys)


def _is_scaled(leaf: Any) -> bool:
    return isinstance(leaf, Scaled)


@dataclasses.dataclass
class _Opened:
    """The tensors of a checkpoint.

    Attributes:
      used: their names, as leaves ask for them.
      missing: of these those that are not there; `unknown`: leaves without an entry; `wrong`: what
        does not fit.
    """

    tensors: Mapping[str, Any]
    used: set[str] = dataclasses.field(default_factory=set)
    missing: dict[str, None] = dataclasses.field(default_factory=dict)
    unknown: list[str] = dataclasses.field(default_factory=list)
    wrong: list[str] = dataclasses.field(default_factory=list)

    def tensor(self, name: str) -> Lazy:
        self.used.add(name)
        if name not in self.tensors:
            self.missing[name] = None
            raise KeyError(name)
        return of_array(self.tensors[name])

    def values(self, name: str) -> Lazy:
        """In 8 bits, if they are so."""
        found = self.tensor(name)
        if name + SCALES in self.tensors and len(found.shape) == 2:
            self.scales(name)
        elif getattr(self.tensors[name], "dtype", None) == EIGHT_BITS:
            self.wrong.append(f"{name} is in 8 bits, and there is no {name + SCALES}")
            raise KeyError(name)
        return found

    def scales(self, name: str) -> Lazy:
        scale, values = self.tensor(name + SCALES), of_array(self.tensors[name])
        wanted = tuple(-(-size // BLOCK) for size in values.shape)
        if scale.shape != wanted:
            self.wrong.append(
                f"{name + SCALES} has the shape {scale.shape}, not {wanted}: one scale for each "
                f"{BLOCK} x {BLOCK}"
            )
            raise KeyError(name)
        return scale

    def floats(self, name: str) -> Lazy:
        values = self.values(name)
        scaled = name + SCALES in self.used
        return dequantized(values, self.scales(name), BLOCK) if scaled else values

    def check(self, unused: Sequence[str]) -> None:
        if self.unknown:
            raise ValueError(f"`names` has no entry for the leaf {_first(self.unknown)}")
        if self.missing:
            raise ValueError(f"the checkpoint has no tensor {_first(list(self.missing))}")
        if self.wrong:
            raise ValueError(_first(self.wrong, "; and there are {} more such"))
        rest = [
            name
            for name in self.tensors
            if name not in self.used and not any(fnmatch.fnmatchcase(name, one) for one in unused)
        ]
        if rest:
            raise ValueError(
                f"nothing is made of the checkpoint's tensor {_first(rest)}; name it in `unused` "
                "if the model has none"
            )


def _first(names: Sequence[str], more: str = " (nor of {} more)") -> str:
    return names[0] + (more.format(len(names) - 1) if len(names) > 1 else "")


def _planned(
    opened: _Opened, path: str, leaf: Any, names: Mapping[str, str | Tensor | None]
) -> Callable[[], Any]:
    """Makes the leaf when it is called. What is wrong is in `opened` then."""
    entry = _entry(path, names)
    if entry is None:
        opened.unknown.append(path)
        return lambda: leaf
    given, places = entry
    if given is None:
        return lambda: leaf
    tensor, parts = as_tensor(given), [(opened.floats, 1, leaf)]
    if isinstance(leaf, Scaled):
        parts = [(opened.values, 1, leaf.values), (opened.scales, BLOCK, leaf.scale)]
    made: list[Callable[[], jax.Array]] = []
    for opens, block, part in parts:
        asked: dict[str, Lazy] = {}

        def found(name: str, opens: Any = opens, asked: Any = asked) -> Lazy:
            asked[name] = opens(name)
            return asked[name]

        try:
            lazy = bind(tensor, Source(found, block), places)
            why = "" if lazy.shape == tuple(part.shape) else f"make {lazy.shape}"
        except KeyError:  # it is said
            return lambda: leaf
        except (ValueError, IndexError) as e:
            why = f"do not fit: {e}"
        if why:
            of = ", ".join(f"{name} {one.shape}" for name, one in asked.items())
            opened.wrong.append(f"{path} has the shape {tuple(part.shape)}, and {of} {why}")
            return lambda: leaf
        made.append(_placed(lazy, part))
    if isinstance(leaf, Scaled):
        return lambda: Scaled(*(one() for one in made))
    return made[0]


def _entry(
    path: str, names: Mapping[str, str | Tensor | None]
) -> tuple[str | Tensor | None, dict[str, str]] | None:
    """What a leaf is made of, and what stands for the names in braces."""
    for pattern, given in names.items():
        pieces = re.split(r"\{(\w+)\}", pattern)
        regex = "".join(
            f"(?P<{piece}>[^/]+)" if i % 2 else re.escape(piece) for i, piece in enumerate(pieces)
        )
        if match := re.fullmatch(regex, path):
            return given, match.groupdict()
    return None


def _placed(lazy: Lazy, like: Any) -> Callable[[], jax.Array]:
    """Reads an array's parts, each of them once."""

    def made() -> jax.Array:
        read: dict[tuple[tuple[int, int], ...], np.ndarray] = {}

        def part(index: Any) -> np.ndarray:
            bounds = [i.indices(n)[:2] for i, n in zip(index, lazy.shape, strict=True)]
            key = tuple(bounds)
            if key not in read:
                at: Index = tuple(slice(*each) for each in bounds)
                read[key] = np.ascontiguousarray(lazy.read(at)).astype(like.dtype, copy=False)
            return read[key]

        sharding = getattr(like, "sharding", None)
        if sharding is None:
            return jnp.asarray(part([slice(None)] * len(lazy.shape)))
        return jax.make_array_from_callback(lazy.shape, sharding, part)

    return made


# ---- Files ---------------------------------------------------------------------------------------


def open_safetensors(paths: Paths) -> dict[str, Any]:
    """The tensors of a folder, an index, or files, by name, as :func:`jflux.nn.load` takes them.

    Nothing is read before a part is taken: each has a shape, and takes slices.

    Raises:
      FileNotFoundError: if one of the files is not there.
      ModuleNotFoundError: if the package safetensors is not installed.
      ValueError: if one is no safetensors file, or no index.
    """
    try:
        from safetensors import SafetensorError, safe_open
    except ModuleNotFoundError as e:
        raise ModuleNotFoundError(f"{e}; to read files: pip install safetensors") from None
    given = [paths] if isinstance(paths, str | PathLike) else paths
    found: dict[str, Any] = {}
    for file in files_of([Path(path) for path in given]):
        try:
            opened = safe_open(file, framework="np")
        except SafetensorError as e:
            raise ValueError(f"{file} is no safetensors file ({e}); download it again") from None
        found |= {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
        found |= _in_8_bits(file)
    return found


def files_of(paths: Sequence[Path]) -> list[Path]:
    """The safetensors files that are meant: those given, those that a `.index.json` lists, and of a
    folder those that its index lists or, without one, all."""
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            found = sorted(path.glob("*.safetensors.index.json"))
            found = found or sorted(path.glob("*.safetensors"))
            if not found:
                raise FileNotFoundError(f"no *.safetensors in {path}; give the folder with them")
            files.extend(files_of(found))
        elif path.suffix == ".json":
            files.extend(path.parent / name for name in _listed(path))
        else:
            files.append(path)
    for file in files:
        if not file.is_file():
            raise FileNotFoundError(f"no file {file}; give all of the model's, or their folder")
    return files


def _listed(index: Path) -> list[str]:
    try:
        listed = json.loads(index.read_text())
    except (ValueError, RecursionError) as e:  # not UTF-8, or not JSON
        raise ValueError(f"{index} is no JSON file ({e}); download it again") from None
    listed = listed.get("weight_map") if isinstance(listed, dict) else None
    if not isinstance(listed, dict) or not listed:
        raise ValueError(f"{index} lists no files; give a *.safetensors.index.json")
    if odd := [n for n in listed.values() if not isinstance(n, str) or Path(n).name != n]:
        raise ValueError(f"{index} lists {str(odd[0])[:200]!r}, which is no file beside it")
    return sorted(set(listed.values()))


def _in_8_bits(file: Path) -> dict[str, np.ndarray]:
    """The float8_e4m3fn tensors of a file, which its NumPy reader has no type for."""
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(size))
    return {
        name: np.memmap(
            file, EIGHT_BITS, "r", 8 + size + said["data_offsets"][0], tuple(said["shape"])
        )
        for name, said in header.items()
        if said.get("dtype") == "F8_E4M3"
    }
