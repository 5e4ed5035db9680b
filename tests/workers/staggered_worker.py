"""One rank of tests/test_staggered.py: makes one call, the last rank after `--late` seconds.

Prints "right", "WRONG" or "error: " and the error.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import sys
import time

import jax

from workers.common import join, leave_last

parser = argparse.ArgumentParser(description=__doc__)
for name in ("ranks", "rank", "port", "gpus"):
    parser.add_argument(f"--{name}", type=int, required=True)
for name in ("deadline", "warn", "late"):
    parser.add_argument(f"--{name}", type=float, required=True, help="seconds")
parser.add_argument("--op", required=True)
args = parser.parse_args()

join(args)

# These look at the devices.
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax._src.distributed import global_state  # noqa: E402
from jax.sharding import Mesh, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import jflux  # noqa: E402
from jflux import testing  # noqa: E402
from jflux._ops.products import matmul_all_reduce  # noqa: E402

ROWS, K, N = 128 * args.ranks, 64, 256


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(jnp.bfloat16)


def put(array):
    """[ranks, ...]"""
    sharding = NamedSharding(MESH, P("tp"))
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def call(x, w):
    x, w = x[0], w[0]
    if args.op == "matmul_all_reduce":
        y = jflux.matmul_all_reduce(x, w, axis_name="tp")
    else:  # of x alone
        y = jflux.all_reduce(x, axis_name="tp", algorithm=args.op)
    return y[None]


MESH = Mesh(np.array(jax.devices()), ("tp",))
faulthandler.enable()
jflux.init(deadline_seconds=args.deadline, warn_seconds=args.warn)
jflux.config.update(strict=True, always=True, unchecked_kernels=True)
matmul_all_reduce.MOST_BYTES = 0  # it sums in its kernel
x, w = normal(0, args.ranks, ROWS, K), normal(1, args.ranks, K, N)
x64, w64 = x.astype(np.float64), w.astype(np.float64)
product = args.op == "matmul_all_reduce"
want = np.einsum("rmk,rkn->mn", x64, w64) if product else x64.sum(0)
scale = np.einsum("rmk,rkn->mn", abs(x64), abs(w64)) if product else abs(x64).sum(0)

f = jax.jit(jax.shard_map(call, mesh=MESH, in_specs=P("tp"), out_specs=P("tp"), check_vma=False))
operands = put(x), put(w)
f = f.lower(*operands).compile()
global_state.client.wait_at_barrier("compiled", 120_000)
if args.rank == args.ranks - 1:
    time.sleep(args.late)
try:
    y = np.asarray(f(*operands).addressable_shards[0].data)[0].astype(np.float64)
    bound = testing.tolerance(jnp.bfloat16, K * args.ranks) * scale * args.ranks
    print("right" if (abs(y - want) <= bound).all() else "WRONG")
except Exception as error:
    print("error:", str(error).replace("\n", " "))
time.sleep(0.2)  # what a thread of the library has to say
sys.stdout.flush()
leave_last(args.rank)
os._exit(0)
