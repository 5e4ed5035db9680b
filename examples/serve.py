"""Serves requests with a tensor-parallel Llama, Mixtral or Qwen3: continuous batching over a paged
cache, prompts in chunks, sampling; on jflux and on plain XLA.

There are so many slots, and a pool of pages of keys and values. A request gets a free slot and
the pages that it may need, gives them back when its answer ends, and the next one has them: nobody
waits for the longest answer of a batch (continuous batching, Orca, OSDI 2022, section 3.1; pages,
arXiv 2309.06180, section 4). While a slot has a prompt to read, a step has up to `--chunk` tokens
of it, and one token of each slot that answers rides along (chunked prefill, arXiv 2308.16369); else
a step has one token of each::

    python examples/serve.py                                # a small one; on GPUs 4 large layers
    python examples/serve.py --weights Qwen3-8B --slots 64 --requests 256 --pages 4096
    python examples/serve.py --temperature 0.8 --top-k 40

Not a server: what a server would call. Requests are random, and all of them are there at the
beginning. Prompts and answers have different lengths, and both runs the same ones. Without sampling
the first answers must be those of each request alone, in a cache of its own (`--checked`).

The small model takes ten seconds on two cores, and prints there::

    0.4 M parameters in 2 layers of 128, float32, 8 (tp) cpu devices
    12 requests; 4 slots, 32 pages of 16 positions
                   steps    tokens/s   of them answers
       jflux          59      2315.6             762.1
         XLA          59      3326.3            1094.7
    the answers to 3 requests are those of each alone
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import time
from collections import deque
from pathlib import Path
from typing import Any

# Virtual devices where there is no GPU; has no effect where there are some.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import decode
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from llama_model import (
    AXIS,
    CONFIGS,
    Config,
    Weights,
    after_attention,
    greedy,
    logits_of,
    operands,
    own_rows,
    per_rank,
    scales_of,
    specs,
    split_heads,
)

import jflux

# ---- What the devices run ------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Shape:
    """Of a service.

    Attributes:
      slots: requests that are answered at a time.
      chunk: tokens of a prompt in a step, at most; up to 16 are attention's kernel's.
      page: positions of a page.
      pages: of the pool, of each layer.
      positions: the most that a request has, its answer among them.
    """

    slots: int
    chunk: int
    page: int
    pages: int
    positions: int

    @property
    def entries(self) -> int:
        """Pages of the longest request."""
        return -(-self.positions // self.page)


def step(
    ops: Any,
    config: Config,
    weights: Weights,
    cache: list[Any],
    tokens: jax.Array,
    counts: jax.Array,
    lengths: jax.Array,
    table: jax.Array,
    temperature: jax.Array,
    key: jax.Array,
    *,
    top_k: int,
) -> tuple[jax.Array, list[Any]]:
    """Runs the next tokens of each slot.

    Args:
      cache: of each layer this rank's keys and values, [pages, page, groups, head_dim] each.
      tokens: int32 [slots, T], the same on all ranks, as all that follows.
      counts: int32 [slots], how many of them a slot has: none if it is empty.
      lengths: int32 [slots], how many positions it had before.
      table: int32 [slots, entries], its pages.
      temperature: float32 [slots]; 0: the most likely token.

    Returns:
      The token that follows the last one of each slot, int32 [slots], and the cache.
    """
    slots, width = tokens.shape
    position = lengths[:, None] + jnp.arange(width)
    norm = jflux.RMSNorm(weights["layers"][0]["attention_norm"], config.epsilon)
    embedded = own_rows(weights["embed"], tokens.reshape(-1))
    x, h = ops.all_reduce(embedded, axis_name=AXIS, norm=norm)
    new_cache = []
    for w, scale, pages in zip(weights["layers"], scales_of(weights), cache, strict=True):
        to: Any = {"preferred_element_type": h.dtype}
        qkv = jflux.matmul(*operands(h, w["qkv"]), **to).reshape(slots, width, -1)
        q, k, v = jax.vmap(lambda a, at, w=w: split_heads(config, w, a[None], at))(qkv, position)
        q = q.reshape(slots, width, -1, config.head_dim)
        k, v = (jnp.moveaxis(a[:, 0], 1, 2) for a in (k, v))
        kv = jflux.KVCache(*pages, lengths, table)
        o, kv = ops.attend_to_cache(kv, q, k, v, counts)
        new_cache.append((kv.keys, kv.values))
        x, h = after_attention(ops, config, w, o.reshape(slots * width, -1), x, scale)
    last = h.reshape(slots, width, -1)[jnp.arange(slots), jnp.maximum(counts - 1, 0)]
    return sample(ops, logits_of(weights, last), temperature, key, top_k), new_cache


def sample(
    ops: Any, logits: jax.Array, temperature: jax.Array, key: jax.Array, top_k: int
) -> jax.Array:
    """A token for each row of logits [slots, v/ranks], int32 [slots], drawn from the softmax of
    logits / temperature: the largest of these plus Gumbel noise, so that no rank needs the others'
    logits. `top_k`: of the so many most likely ones; 0: of all."""
    noise = jax.random.gumbel(jax.random.fold_in(key, lax.axis_index(AXIS)), logits.shape)
    drawn = logits / jnp.maximum(temperature, 1e-6)[:, None] + noise
    if top_k:
        own = lax.top_k(logits, min(top_k, logits.shape[1]))[0]
        every = ops.all_gather(own, axis_name=AXIS, axis=1, tiled=True)
        least = lax.top_k(every, min(top_k, every.shape[1]))[0][:, -1:]
        drawn = jnp.where(logits >= least, drawn, -jnp.inf)
    return greedy(ops, jnp.where(temperature[:, None] > 0, drawn, logits))


def program(ops: Any, config: Config, mesh: Mesh, *, top_k: int) -> Any:
    """`step` of global arrays, to which the cache is given away. It is compiled once for steps of
    one token, and once for those of a chunk."""
    pages = [(P(None, None, AXIS),) * 2] * config.layers

    def run(*args):
        return step(ops, config, *args, top_k=top_k)

    given = (specs(config), pages, *(P() for _ in range(6)))
    return jax.jit(per_rank(run, mesh, given, (P(), pages)), donate_argnums=1)


# ---- Who is served -------------------------------------------------------------------------------


@dataclasses.dataclass
class Request:
    """A prompt, and how many tokens its answer has at most."""

    prompt: list[int]
    most: int
    answer: list[int] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Slot:
    """A request that is being answered: its pages, and how many of its tokens are in them."""

    request: Request
    pages: list[int]
    length: int = 0

    def next_tokens(self, most: int) -> list[int]:
        """Of the prompt; after it the answer's last one."""
        rest = self.request.prompt[self.length : self.length + most]
        return rest or self.request.answer[-1:]


class Service:
    """Requests and their slots, on the host.

    Attributes:
      read, written: tokens of prompts, and of answers, so far.
      steps: of the devices.
    """

    def __init__(
        self, ops: Any, config: Config, mesh: Mesh, weights: Weights, shape: Shape, *,
        temperature: float = 0.0, top_k: int = 0, end: int | None = None, seed: int = 0,
    ) -> None:  # fmt: skip
        self._shape, self._weights, self._end = shape, weights, end
        self._program = program(ops, config, mesh, top_k=top_k)
        sharding = jax.sharding.NamedSharding(mesh, P(None, None, AXIS))
        size = (shape.pages, shape.page, config.groups(mesh.shape[AXIS]), config.head_dim)
        zeros = jax.jit(lambda: jnp.zeros(size, config.dtype), out_shardings=sharding)
        self._cache = [(zeros(), zeros()) for _ in range(config.layers)]
        self._temperature = np.full(shape.slots, temperature, np.float32)
        self._key = jax.random.key(seed)
        self._waiting: deque[Request] = deque()
        self._slots: list[Slot | None] = [None] * shape.slots
        self._free = list(range(shape.pages))
        self.read = self.written = self.steps = 0

    def add(self, request: Request) -> None:
        """Raises ValueError for one that will never have room."""
        needed = len(request.prompt) + request.most
        if not request.prompt or request.most < 1 or needed > self._shape.positions:
            raise ValueError(
                f"a prompt of {len(request.prompt)} tokens and an answer of {request.most} do not "
                f"fit {self._shape.positions} positions"
            )
        self._waiting.append(request)

    def run(self) -> None:
        """Until nobody waits."""
        while self._waiting or any(self._slots):
            self.advance()

    def advance(self) -> None:
        """One step of all slots."""
        self._admit()
        shape, active = self._shape, [(i, s) for i, s in enumerate(self._slots) if s is not None]
        reads = any(s.length < len(s.request.prompt) for _, s in active)
        tokens = np.zeros((shape.slots, shape.chunk if reads else 1), np.int32)
        counts, lengths = np.zeros((2, shape.slots), np.int32)
        table = np.full((shape.slots, shape.entries), -1, np.int32)
        for i, slot in active:
            new = slot.next_tokens(tokens.shape[1])
            tokens[i, : len(new)], counts[i], lengths[i] = new, len(new), slot.length
            table[i, : len(slot.pages)] = slot.pages
        key = jax.random.fold_in(self._key, self.steps)
        found, self._cache = self._program(
            self._weights, self._cache, tokens, counts, lengths, table, self._temperature, key
        )
        self.steps += 1
        found = np.asarray(found)
        for i, slot in active:
            slot.length += int(counts[i])
            self.read += int(min(counts[i], max(0, len(slot.request.prompt) - lengths[i])))
            if slot.length >= len(slot.request.prompt):
                self._answer(i, slot, int(found[i]))

    def _answer(self, i: int, slot: Slot, token: int) -> None:
        slot.request.answer.append(token)
        self.written += 1
        if len(slot.request.answer) == slot.request.most or token == self._end:
            self._free += slot.pages
            self._slots[i] = None

    def _admit(self) -> None:
        """Those who wait, in order, as far as there are slots and pages."""
        for i, slot in enumerate(self._slots):
            if slot is not None or not self._waiting:
                continue
            request = self._waiting[0]
            count = -(-(len(request.prompt) + request.most) // self._shape.page)
            if count > len(self._free):
                return
            pages, self._free = self._free[:count], self._free[count:]
            self._slots[i] = Slot(self._waiting.popleft(), pages)


# ---- The script ----------------------------------------------------------------------------------


def requests_of(args: argparse.Namespace, config: Config) -> list[Request]:
    """Random prompts, and answers of random lengths, from a quarter of the most on."""
    rng = np.random.default_rng(args.seed)

    def length(most: int) -> int:
        return int(rng.integers(max(1, most // 4), most + 1))

    return [
        Request(rng.integers(config.vocab, size=length(args.prompt)).tolist(), length(args.answer))
        for _ in range(args.requests)
    ]


def check_alone(config: Config, mesh: Mesh, weights: Weights, requests: list[Request]) -> None:
    """Raises SystemExit for an answer that is not the most likely one of its request alone. Where
    two tokens are equally likely but for rounding, either is."""
    for request in requests:
        prompt = np.array([request.prompt], np.int32)
        answer = np.array([request.answer], np.int32)
        text = np.concatenate([prompt, answer[:, :-1]], 1)
        logits = np.asarray(
            decode.logits_program(
                jflux, config, mesh, prompt=prompt.shape[1], length=text.shape[1] + 1
            )(weights, text)
        )[0]
        chosen = logits[np.arange(len(request.answer)), request.answer]
        below = (logits.max(-1) - chosen) / logits.std(-1)
        if not (below <= decode.tolerance(config)).all():  # NaN too
            raise SystemExit(f"an answer is {below.max():.2e} standard deviations below the best")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--model", help=f"one of {', '.join(CONFIGS)}, or a config.json")
    add("--layers", type=int, help="the first layers alone")
    add("--dtype", choices=("float32", "bfloat16", "float16"))
    add("--weights", type=Path, nargs="+", help="as of decode.py; default: random ones")
    add("--ranks", type=int, help="devices to use; default: all")
    add("--requests", type=int, default=12)
    add("--prompt", type=int, default=48, help="the most tokens of a prompt")
    add("--answer", type=int, default=32, help="the most tokens of an answer")
    add("--slots", type=int, default=4, help="requests at a time")
    add("--chunk", type=int, default=16, help="tokens of a prompt in a step")
    add("--page", type=int, default=16, help="positions of a page")
    add("--pages", type=int, default=32, help="of the pool")
    add("--temperature", type=float, default=0.0, help="0: the most likely token")
    add("--top-k", type=int, default=0, help="sample from the so many most likely; 0: from all")
    add("--end", type=int, help="a token that ends an answer")
    add("--checked", type=int, default=3, help="answers to compare with those of a request alone")
    add("--seed", type=int, default=0)
    args = parser.parse_args()
    args.context_parallel = 1
    sizes = ("requests", "prompt", "answer", "slots", "chunk", "page", "pages")
    if low := [name for name in sizes if getattr(args, name) < 1]:
        parser.error(f"--{low[0]} must be at least 1")
    if args.pages * args.page < args.prompt + args.answer:
        parser.error("--pages times --page must hold one request, --prompt and --answer")
    return args


def main() -> None:
    args = parse_arguments()
    try:
        config, mesh = decode.model_of(args)
        weights = decode.weights_of(args, config, mesh)
    except (OSError, ModuleNotFoundError, ValueError) as e:
        raise SystemExit(f"serve.py: {e}") from None
    print(decode.describe(config, mesh, weights))
    sizes = f"{args.slots} slots, {args.pages} pages of {args.page} positions"
    print(f"{args.requests} requests; {sizes}")
    shape = Shape(args.slots, args.chunk, args.page, args.pages, args.prompt + args.answer)
    options: Any = {
        "temperature": args.temperature, "top_k": args.top_k, "end": args.end, "seed": args.seed,
    }  # fmt: skip
    print(f"{'':>8} {'steps':>11} {'tokens/s':>11} {'of them answers':>17}")
    answered: dict[str, list[Request]] = {}
    for name, ops in decode.CONTESTANTS.items():
        service = Service(ops, config, mesh, weights, shape, **options)
        first = Request([0] * min(args.prompt, 2), min(args.answer, 2))  # compiles both programs
        service.add(first)
        service.run()
        answered[name] = requests_of(args, config)
        for request in answered[name]:
            service.add(request)
        read, written, steps = service.read, service.written, service.steps
        begin = time.perf_counter()
        service.run()
        seconds = time.perf_counter() - begin
        read, written = service.read - read, service.written - written
        print(
            f"{name:>8} {service.steps - steps:11} {(read + written) / seconds:11.1f} "
            f"{written / seconds:17.1f}"
        )
    if args.temperature == 0 and args.checked:
        for requests in answered.values():
            check_alone(config, mesh, weights, requests[: args.checked])
        print(f"the answers to {min(args.checked, args.requests)} requests are those of each alone")


if __name__ == "__main__":
    main()
