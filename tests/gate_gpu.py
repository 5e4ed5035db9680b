"""Compares the gate's kernels with lax on one GPU, and times both; microseconds of a call:

python tests/gate_gpu.py [--rounds 7] [--calls 32]

    gate      (indices, weights) of logits in float32
    gradient  the same, and the logits' gradient
    bytes     what is read and written once, at MEMORY bytes a second

Each program has so many calls, on logits of their own. Of a softmax all choices must be the same.
"""

from __future__ import annotations

import argparse
import functools
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jflux
from jflux import moe
from jflux._tools import trials

MEMORY = 4e12
DEEPSEEK = functools.partial(moe.group_limited_top_k, num_groups=8, top_groups=4, scale=2.5)
CASES = {
    "128 tokens, E 128, k 8": (128, 128, 8, moe.top_k_softmax),
    "8192, 128, 8": (8192, 128, 8, moe.top_k_softmax),
    "32768, 128, 8": (32768, 128, 8, moe.top_k_softmax),
    "8192, 8, 2": (8192, 8, 2, moe.top_k_softmax),
    "8192, 256, 8": (8192, 256, 8, moe.top_k_softmax),
    "8192, 256, 8, sigmoid": (8192, 256, 8, moe.top_k_sigmoid),
    "8192, 256, 8, groups": (8192, 256, 8, DEEPSEEK),
}


def gate(f: Any, k: int, every: list[jax.Array], _: Any) -> Any:
    return [f(logits, k) for logits in every]


def gradient(f: Any, k: int, every: list[jax.Array], ct: jax.Array) -> Any:
    def one(logits: jax.Array) -> Any:
        weights, pull, indices = jax.vjp(lambda x: f(x, k)[::-1], logits, has_aux=True)
        return indices, weights, *pull(ct)

    return [one(logits) for logits in every]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--calls", type=int, default=32)
    args = parser.parse_args()
    print(f"{'':24}{'gate':>8}{'lax':>8}{'bytes':>8}{'gradient':>12}{'lax':>8}{'bytes':>8}")
    failed = False
    for name, (tokens, experts, k, f) in CASES.items():
        rng = np.random.default_rng(tokens + experts)
        draw = functools.partial(rng.standard_normal, dtype=np.float32)
        every = [jnp.asarray(draw((tokens, experts))) for _ in range(args.calls)]
        ct = jnp.asarray(draw((tokens, k)))
        runs, results = {}, {}
        for what in (gate, gradient):
            for fused in (True, False):
                # A function of its own, since JAX keeps what it has lowered.
                step = functools.partial(what, f, k)
                with jflux.config(fused=fused):
                    program = jax.jit(step).lower(every, ct).compile()
                results[what, fused] = program(every, ct)
                runs[what.__name__, fused] = trials.run_of(program, every, ct)
        for what in (gate, gradient):
            for own, lax in zip(results[what, True], results[what, False], strict=True):
                same = float(jnp.mean(own[0] == lax[0]))
                apart = [float(jnp.abs(a - b).max()) for a, b in zip(own[1:], lax[1:], strict=True)]
                if same < (1 if f is moe.top_k_softmax else 0.999):
                    failed = True
                    print(f"{name}: {what.__name__}, {same} of the choices are lax's")
                elif same == 1 and max(apart) > 1e-4:
                    failed = True
                    print(f"{name}: {what.__name__}, apart by {apart}")
        us = {
            n: t.median * 1e6 for n, t in trials.interleave(runs, args.calls, args.rounds).items()
        }
        read, chosen = 4 * tokens * experts, 8 * tokens * k
        once, again = read + chosen, read + 12 * tokens * k
        print(
            f"{name:24}{us['gate', True]:8.1f}{us['gate', False]:8.1f}{once / MEMORY * 1e6:8.1f}"
            f"{us['gradient', True]:12.1f}{us['gradient', False]:8.1f}"
            f"{(once + again) / MEMORY * 1e6:8.1f}"
        )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
