"""Decodes greedily with a tensor-parallel Llama, Mixtral or Qwen3, on jflux and on plain XLA, and
compares the two.

The model (llama_model.py) has a cache of keys and values, runs the prompt in one go, and then one
token of each sequence at a time, in a loop on the devices. Both runs have the same weights and take
turns; the table has the medians over `--rounds`::

    python examples/decode.py                                 # a small one; on GPUs 4 large layers
    python examples/decode.py --model llama-2-70b --layers 4 --batch 1 --steps 64
    python examples/decode.py --weights Llama-2-7b-hf --prompt 1,15043,29892 --end 2
    python examples/decode.py --model mixtral-8x7b --layers 4 --batch 8
    python examples/decode.py --positions 131072 --context-parallel 2  # a long cache, on GPUs
    python examples/decode.py --weights Qwen3-30B-A3B         # or of another Qwen3, dense or MoE

Weights are random unless files are given: a directory with Hugging Face's `config.json` and
safetensors, or the files one by one, with the `config.json` beside them. Weights in 8 bits with a
scale for each 128 x 128, as Qwen3-8B-FP8's, stay so; activations are quantised for them. Without a
GPU it runs on eight virtual devices, and wants a small model.

Then both get jflux's tokens, and their logits are compared. Where two logits are equal but for
rounding, each may choose another token, and from there on write another text; logits on the same
tokens differ by rounding alone. More than that ends the script with an error. At last come the
tokens of the first sequence.

With `--context-parallel` the mesh has a second axis, "cp". The cache's positions are split over it,
and so is the prompt; heads and hidden units are split over the other axis, "tp".

The small model takes 20 seconds on two cores, and prints there::

    0.4 M parameters in 2 layers of 128, float32, 8 (tp) cpu devices; batch 1, prompt 32, 64 tokens
               prefill ms   ms per token   tokens/s
       jflux        11.73          2.278      438.9
         XLA         6.53          1.569      637.5
    logits on the same tokens: at most 5.5e-06 standard deviations apart, tolerance 7.1e-05
    tokens: 200,159,53,168,154,115,25,229,60,25,115,159,58,92,154,92,...
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import time
from pathlib import Path

# Virtual devices where there is no GPU; has no effect where there are some.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import llama_weights
import numpy as np
from jax.sharding import Mesh
from llama_model import AXIS, CONFIGS, Config, Weights, check, logits_program, programs

import jflux.nn

CONTESTANTS = {"jflux": jflux, "XLA": jflux.reference}
CONTEXT_AXIS = "cp"

# How far two logits may be apart, in standard deviations of the logits, after one layer. In
# bfloat16, random models of 2 and 24 layers were apart by .04 and .09; in float32 by 5e-6.
TOLERANCE = {"bfloat16": 0.1, "float16": 0.0125, "float32": 5e-5}


@dataclasses.dataclass
class Run:
    """What one contestant made of the prompt, [b, taken], and seconds of each round."""

    tokens: np.ndarray
    prefill: list[float]
    decode: list[float]


def decode(
    config: Config,
    mesh: Mesh,
    weights: Weights,
    prompt: np.ndarray,
    *,
    steps: int,
    rounds: int = 1,
    end: int | None = None,
    length: int | None = None,
) -> dict[str, Run]:
    """Decodes `steps` tokens after the prompt, int32 [b, s], with each contestant, in a cache of
    `length` positions, by default as many as there are tokens."""
    position = np.int32(prompt.shape[1])
    length = length or prompt.shape[1] + steps
    made = {
        name: programs(ops, config, mesh, length=length, steps=steps - 1, end=end)
        for name, ops in CONTESTANTS.items()
    }
    runs: dict[str, Run] = {}
    for turn in range(rounds + 1):  # the first compiles, and does not count
        for name, (start, go_on) in made.items():
            begin = time.perf_counter()
            token, cache = jax.block_until_ready(start(weights, prompt))
            middle = time.perf_counter()
            rest, taken, cache = jax.block_until_ready(go_on(weights, cache, token, position))
            done = time.perf_counter()
            del cache  # before the next one makes its own
            tokens = np.concatenate([np.asarray(token)[:, None], np.asarray(rest)], axis=1)
            run = runs.setdefault(name, Run(tokens[:, : int(taken) + 1], [], []))
            if turn:
                run.prefill.append(middle - begin)
                run.decode.append(done - middle)
    return runs


@dataclasses.dataclass
class Comparison:
    """By how much the contestants' logits on the same tokens differ, in standard deviations.

    Attributes:
      largest: over all tokens.
      judged: what must not exceed `tolerance`. With experts the median over the tokens of each
        one's largest: where two experts are equal but for rounding, each contestant may choose
        another, and such a token has other logits.
    """

    largest: float
    judged: float
    tolerance: float

    def __str__(self) -> str:
        if self.judged == self.largest:
            how, rest = f"at most {self.largest:.1e}", ""
        else:
            how, rest = f"a median of {self.judged:.1e}", f"; at most {self.largest:.1e}"
        return f"{how} standard deviations apart, tolerance {self.tolerance:.1e}{rest}"


def compare(
    config: Config,
    mesh: Mesh,
    weights: Weights,
    prompt: np.ndarray,
    tokens: np.ndarray,
    *,
    length: int | None = None,
) -> Comparison:
    """Runs the prompt [b, s], and then all but the last of `tokens` [b, t], with each contestant.
    Arguments are as for `decode`."""
    text = np.concatenate([prompt, tokens[:, :-1]], 1)
    length = length or text.shape[1] + 1
    ours, theirs = (
        np.asarray(
            logits_program(ops, config, mesh, prompt=prompt.shape[1], length=length)(weights, text)
        )
        for ops in CONTESTANTS.values()
    )
    apart = np.abs(ours - theirs).max(-1) / theirs.std(-1)  # [b, t]
    largest = float(apart.max())
    judged = float(np.median(apart)) if config.experts else largest
    return Comparison(largest, judged, tolerance(config))


def tolerance(config: Config) -> float:
    """Rounding in each layer moves the logits in another direction."""
    name = jnp.dtype(config.dtype).name
    exact = jax.config.jax_default_matmul_precision in ("float32", "highest")
    if name == "float32" and jax.default_backend() == "gpu" and not exact:
        name = "float16"  # products round their operands to TF32, which has as many digits
    return TOLERANCE[name] * math.sqrt(config.layers)


def table(runs: dict[str, Run]) -> str:
    lines = [f"{'':>8} {'prefill ms':>12} {'ms per token':>14} {'tokens/s':>10}"]
    for name, run in runs.items():
        batch, taken = run.tokens.shape
        start, each = np.median(run.prefill), np.median(run.decode) / max(1, taken - 1)
        lines.append(f"{name:>8} {1e3 * start:12.2f} {1e3 * each:14.3f} {batch / each:10.1f}")
    return "\n".join(lines)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--model",
        help=f"one of {', '.join(CONFIGS)}, or a config.json; default: that beside the weights",
    )
    parser.add_argument("--layers", type=int, help="the first layers alone")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"))
    parser.add_argument(
        "--weights", type=Path, nargs="+", help="safetensors, their index json, or their directory"
    )
    parser.add_argument("--prompt", help="token ids, comma-separated; default: random ones")
    parser.add_argument(
        "--prompt-length", type=int, help="of random ones; default: 32, or what fills --positions"
    )
    parser.add_argument("--batch", type=int, default=1, help="sequences; one --prompt is for all")
    parser.add_argument("--steps", type=int, default=64, help="tokens to decode")
    parser.add_argument("--end", type=int, help="a token that ends a sequence")
    parser.add_argument(
        "--positions", type=int, help="of the cache; default: as the prompt and --steps need"
    )
    parser.add_argument(
        "--context-parallel", type=int, default=1, metavar="N",
        help="split the cache's positions over N of the ranks, and the heads over --ranks / N",
    )  # fmt: skip
    parser.add_argument("--ranks", type=int, help="devices to use; default: all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.prompt_length is None:
        args.prompt_length = 32 if args.positions is None else args.positions - args.steps
    if min(args.batch, args.rounds) < 1 or args.steps < 2:
        parser.error("--batch and --rounds must be at least 1, --steps 2")
    if args.prompt_length < 1:
        parser.error("--prompt-length must be at least 1, and --positions more than --steps")
    if args.layers is not None and args.layers < 1:
        parser.error("--layers must be at least 1")
    if args.ranks is not None and not 1 <= args.ranks <= jax.device_count():
        parser.error(f"--ranks {args.ranks}: there are {jax.device_count()} devices")
    ranks = args.ranks or jax.device_count()
    if args.context_parallel < 1 or ranks % args.context_parallel:
        parser.error(f"--context-parallel {args.context_parallel} must divide {ranks} ranks")
    return args


def config_of(args: argparse.Namespace) -> Config:
    """Raises OSError or ValueError if the files do not say what the model is."""
    model, layers = args.model, args.layers
    if args.weights is not None:
        first = args.weights[0]
        beside = (first if first.is_dir() else first.parent) / "config.json"
        if model is None and not beside.exists():
            raise FileNotFoundError(f"no {beside}; download it, or say what --model this is")
        model = model or beside
    elif model is None and jax.default_backend() == "cpu":
        model = "tiny"
    elif model is None:
        model, layers = "llama-2-70b", layers or 4
    if model not in CONFIGS and not Path(model).is_file():
        raise FileNotFoundError(f"no file {model}; --model is one of {', '.join(CONFIGS)}, or one")
    config = CONFIGS.get(model) or llama_weights.config_from_json(Path(model))
    if args.weights is not None and beside.exists():
        said = llama_weights.config_from_json(beside)
        if dataclasses.replace(said, dtype=config.dtype) != config:
            raise ValueError(f"{beside} is not of --model {model}; leave --model out")
    return dataclasses.replace(
        config,
        layers=layers or config.layers,
        dtype=jnp.dtype(args.dtype or config.dtype),
        context_axis=CONTEXT_AXIS if args.context_parallel > 1 else None,
    )


def mesh_of(args: argparse.Namespace, config: Config) -> Mesh:
    """Raises ValueError if the model cannot be split over the devices."""
    devices, context = np.array(jax.devices()[: args.ranks]), args.context_parallel
    try:
        check(config, len(devices) // context, context)
    except ValueError as e:
        fitting = [n for n in range(context, len(devices), context) if splits(config, n, context)]
        advice = f"; --ranks {fitting[-1]} would do" if fitting else ""
        raise ValueError(f"{e}{advice}") from None
    if context == 1:
        return Mesh(devices, (AXIS,))
    return Mesh(devices.reshape(context, -1), (CONTEXT_AXIS, AXIS))


def splits(config: Config, ranks: int, context: int) -> bool:
    try:
        check(config, ranks // context, context)
    except ValueError:
        return False
    return True


def model_of(args: argparse.Namespace) -> tuple[Config, Mesh]:
    """The model, and where it is; raises OSError or ValueError if the files do not say it."""
    config = config_of(args)
    return config, mesh_of(args, config)


def weights_of(args: argparse.Namespace, config: Config, mesh: Mesh) -> Weights:
    """Raises OSError, ModuleNotFoundError or ValueError if files of weights do not fit."""
    if args.weights is None:
        return llama_weights.random(config, mesh, jax.random.key(args.seed))
    tensors = jflux.nn.open_safetensors(args.weights)
    return llama_weights.from_tensors(config, mesh, tensors)


def describe(config: Config, mesh: Mesh, weights: Weights) -> str:
    count = sum(w.size for w in jax.tree.leaves(weights))
    ranks = " x ".join(f"{size} ({name})" for name, size in mesh.shape.items())
    return (
        f"{count / 1e6:.1f} M parameters in {config.layers} layers of {config.width}, "
        f"{jnp.dtype(config.dtype).name}, {ranks} {jax.default_backend()} devices"
    )


def prompt_of(args: argparse.Namespace, config: Config) -> np.ndarray:
    """int32 [batch, s]; raises ValueError for what are no tokens, or too many."""
    length = args.prompt_length if args.prompt is None else args.prompt.count(",") + 1
    if args.positions is not None and length + args.steps > args.positions:
        raise ValueError(
            f"--positions {args.positions} has no room for {length} tokens of the prompt and "
            f"{args.steps} steps"
        )
    if args.prompt is None:
        rng = np.random.default_rng(args.seed)
        return rng.integers(config.vocab, size=(args.batch, length), dtype=np.int32)
    tokens = args.prompt.split(",")
    if not all(token.strip().isdecimal() and int(token) < config.vocab for token in tokens):
        raise ValueError(
            f"--prompt {args.prompt}: give comma-separated tokens less than {config.vocab}"
        )
    return np.tile(np.array(tokens, np.int32), (args.batch, 1))


def main() -> None:
    args = parse_arguments()
    try:
        config, mesh = model_of(args)
        prompt = prompt_of(args, config)
        weights = weights_of(args, config, mesh)
    except (OSError, ModuleNotFoundError, ValueError) as e:
        raise SystemExit(f"decode.py: {e}") from None
    cache = "" if args.positions is None else f", {args.positions} positions"
    print(
        f"{describe(config, mesh, weights)}; "
        f"batch {args.batch}, prompt {prompt.shape[1]}, {args.steps} tokens{cache}"
    )
    options = {"steps": args.steps, "rounds": args.rounds, "end": args.end}
    runs = decode(config, mesh, weights, prompt, length=args.positions, **options)
    print(table(runs))
    tokens = runs["jflux"].tokens
    found = compare(config, mesh, weights, prompt, tokens, length=args.positions)
    print(f"logits on the same tokens: {found}")
    print("tokens:", ",".join(map(str, tokens[0])))
    if not found.judged <= found.tolerance:  # NaN too
        raise SystemExit("jflux and XLA disagree")


if __name__ == "__main__":
    main()
