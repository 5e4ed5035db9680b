"""Other grouped products, timed in the same rounds as jflux's where they are installed.

T  tokamax.ragged_dot (JAX, Pallas), by the kernel that it chooses; T f+b: forward and backward
P  PyTorch's grouped_mm, called from Python, in a process of its own

Each is compared with a product for each group before it is timed. DeepEP is none of them: it
moves tokens, and has no binding for JAX.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from . import peers
from .peers import Run, Unavailable

Product = Callable[..., jax.Array]


class Peer(Protocol):
    def products(self) -> dict[str, Product]:
        """By column, of (x, w, sizes): what JAX compiles and times with the others."""

    def runs(self, sizes: np.ndarray, k: int, n: int, iterations: int) -> dict[str, Run]:
        """By column, what runs so many calls and waits for them; raises `Unavailable`."""

    def close(self) -> None: ...


class Tokamax:
    def __init__(self) -> None:
        if importlib.util.find_spec("tokamax") is None:
            raise Unavailable("tokamax: not installed")
        try:
            import tokamax
        except ImportError as e:  # of what it needs
            raise Unavailable(f"tokamax: {e}") from e
        self.ragged_dot = tokamax.ragged_dot
        self._check()

    def _check(self) -> None:
        sizes = jnp.array([100, 0, 28], jnp.int32)
        x, w = (
            jax.random.normal(jax.random.key(i), shape, jnp.bfloat16)
            for i, shape in enumerate(((128, 64), (3, 64, 64)))
        )
        try:
            y = jax.jit(self.ragged_dot)(x, w, sizes)
        except Exception as e:  # whatever its kernels find missing here
            raise Unavailable(f"tokamax: {type(e).__name__}: {e}".splitlines()[0]) from e
        error = float(jnp.max(jnp.abs(y - lax.ragged_dot(x, w, sizes))))
        if not error < 0.5:  # of numbers up to 40
            raise RuntimeError(f"tokamax.ragged_dot is off by {error}")

    def products(self) -> dict[str, Product]:
        return {"T": self.ragged_dot}

    def runs(self, sizes: np.ndarray, k: int, n: int, iterations: int) -> dict[str, Run]:
        return {}

    def close(self) -> None:
        pass


class Torch:
    def __init__(self) -> None:
        self.workers = peers.Torch(Mesh(np.array(jax.devices()[:1]), ("tp",)))

    def products(self) -> dict[str, Product]:
        return {}

    def runs(self, sizes: np.ndarray, k: int, n: int, iterations: int) -> dict[str, Run]:
        command: dict[str, Any] = {"op": "grouped_matmul", "sizes": sizes.tolist(), "k": k, "n": n}
        return {"P": self.workers.runs(command, iterations)}

    def close(self) -> None:
        self.workers.close()


PEERS: dict[str, Callable[[], Peer]] = {"tokamax": Tokamax, "torch": Torch}
