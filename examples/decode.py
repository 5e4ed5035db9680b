"""Decodes greedily with a tensor-parallel Llama, Mixtral or Qwen3, on jflux and on plain XLA, and
compares the two.

The model (llama_model.py) has a cache of keys and values, runs the prompt in one go, and then one
token of each sequence at a time, in a loop on the devices. Both runs have the same weights and take
turns; the table has the medians over `--rounds`::

    python examples/decode.py                                 # a small one; on GPUs 4 large layers
    python examples/decode.py --model llama-2-70b --layers 4 --batch 1 --steps 64
    python examples/decode.py --weights Llama-2-7b-hf --prompt 1,15043,29892 --end 2
    python examples/decode.py --model mixtral-8x7b --layers 4 --batch 8
    python examples/decode.py --weights Qwen3-30B-A3B         # or of another Qwen3, dense or MoE

Weights are random unless files are given: a directory with Hugging Face's `config.json` and
safetensors, or the files one by one, with the `config.json` beside them. Prints the tokens of the
first sequence, and how many differ between the two. In float32 none may; in bfloat16 two logits can
be equal but for rounding, and after the first token that differs so does what follows. Without a
GPU it runs on eight virtual devices, and wants a small model.

The small model takes 15 seconds on two cores, and prints there::

    0.4 M parameters in 2 layers of 128, float32, 8 (tp) cpu devices; batch 1, prompt 32, 64 tokens
               prefill ms   ms per token   tokens/s
       jflux        11.98          1.108      902.9
         XLA         3.72          1.326      754.0
    differing tokens: 0 of 64
    tokens: 200,159,53,168,154,115,25,229,60,25,115,159,58,92,154,92,...
"""

from __future__ import annotations

import argparse
import dataclasses
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
from llama_model import AXIS, CONFIGS, Config, Weights, check, programs

import jflux

CONTESTANTS = {"jflux": jflux, "XLA": jflux.reference}


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
) -> dict[str, Run]:
    """Decodes `steps` tokens after the prompt, int32 [b, s], with each contestant."""
    position = np.int32(prompt.shape[1])
    length = prompt.shape[1] + steps
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


def differing(runs: dict[str, Run]) -> tuple[int, int]:
    """How many tokens differ, where both have some, and of how many."""
    a, b = (run.tokens for run in runs.values())
    common = min(a.shape[1], b.shape[1])
    return int((a[:, :common] != b[:, :common]).sum()), a[:, :common].size


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
    parser.add_argument("--prompt-length", type=int, default=32, help="of random ones")
    parser.add_argument("--batch", type=int, default=1, help="sequences; one --prompt is for all")
    parser.add_argument("--steps", type=int, default=64, help="tokens to decode")
    parser.add_argument("--end", type=int, help="a token that ends a sequence")
    parser.add_argument("--ranks", type=int, help="devices to use; default: all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if min(args.batch, args.prompt_length, args.rounds) < 1 or args.steps < 2:
        parser.error("--batch, --prompt-length and --rounds must be at least 1, --steps 2")
    if args.layers is not None and args.layers < 1:
        parser.error("--layers must be at least 1")
    if args.ranks is not None and not 1 <= args.ranks <= jax.device_count():
        parser.error(f"--ranks {args.ranks}: there are {jax.device_count()} devices")
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
    dtype = jnp.dtype(args.dtype or config.dtype)
    return dataclasses.replace(config, layers=layers or config.layers, dtype=dtype)


def mesh_of(args: argparse.Namespace, config: Config) -> Mesh:
    """Raises ValueError if the model cannot be split over the devices."""
    devices = jax.devices()[: args.ranks]
    try:
        check(config, len(devices))
    except ValueError as e:
        fitting = [n for n in range(1, len(devices)) if splits(config, n)]
        advice = f"; --ranks {fitting[-1]} would do" if fitting else ""
        raise ValueError(f"{e}{advice}") from None
    return Mesh(np.array(devices), (AXIS,))


def splits(config: Config, ranks: int) -> bool:
    try:
        check(config, ranks)
    except ValueError:
        return False
    return True


def prompt_of(args: argparse.Namespace, config: Config) -> np.ndarray:
    """int32 [batch, s]; raises ValueError for what are no tokens."""
    if args.prompt is None:
        rng = np.random.default_rng(args.seed)
        return rng.integers(config.vocab, size=(args.batch, args.prompt_length), dtype=np.int32)
    tokens = args.prompt.split(",")
    if not all(token.strip().isdecimal() and int(token) < config.vocab for token in tokens):
        raise ValueError(
            f"--prompt {args.prompt}: give comma-separated tokens less than {config.vocab}"
        )
    return np.tile(np.array(tokens, np.int32), (args.batch, 1))


def main() -> None:
    args = parse_arguments()
    try:
        config = config_of(args)
        mesh = mesh_of(args, config)
        prompt = prompt_of(args, config)
        tensors = args.weights and llama_weights.open_safetensors(args.weights)
        if tensors:
            llama_weights.check_tensors(config, tensors)
    except (OSError, ModuleNotFoundError, ValueError) as e:
        raise SystemExit(f"decode.py: {e}") from None
    if tensors:
        weights = llama_weights.from_tensors(config, mesh, tensors)
    else:
        weights = llama_weights.random(config, mesh, jax.random.key(args.seed))
    count = sum(w.size for w in jax.tree.leaves(weights))
    print(
        f"{count / 1e6:.1f} M parameters in {config.layers} layers of {config.width}, "
        f"{jnp.dtype(config.dtype).name}, {mesh.size} (tp) {jax.default_backend()} devices; "
        f"batch {args.batch}, prompt {prompt.shape[1]}, {args.steps} tokens"
    )
    runs = decode(config, mesh, weights, prompt, steps=args.steps, rounds=args.rounds, end=args.end)
    print(table(runs))
    wrong, total = differing(runs)
    print(f"differing tokens: {wrong} of {total}")
    print("tokens:", ",".join(map(str, runs["jflux"].tokens[0])))
    if wrong and config.dtype == jnp.float32:
        raise SystemExit("jflux and XLA disagree in float32")


if __name__ == "__main__":
    main()
