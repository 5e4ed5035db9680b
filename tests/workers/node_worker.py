"""One of several processes on emulated nodes: node_worker.py SCENARIO ..., as peer_worker.py.

Each process names its node in ``jflux.init(node=...)``. Heaps are those of nodes then: what crosses
between them goes through XLA's own collectives.
"""

import os
import sys
import traceback

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from peer_worker import args, check_matmul_all_reduce, check_products, product, start, training

import jflux
from jflux import _config
from jflux._call.plans import Path

NODE_TP = ("node", "tp")


def mesh_of(shape, names):
    return Mesh(np.array(jax.devices()).reshape(shape), names)


def path_of(mesh, axis="tp", op="all_gather_matmul"):
    """Of one call over a mesh, and the reason."""
    f, operands, *_ = product(op, mesh, axis)
    plan = jflux.explain(f, *operands)[0].plan
    return plan.path, plan.reason


def everything(nodes, ranks):
    """All ops over two levels, in two orders of devices; inside nodes; and between them."""
    everyone = mesh_of((-1,), ("tp",))
    path, reason = path_of(everyone)
    assert (path, f"{nodes} nodes of" in reason) == (Path.TWO_LEVEL, True), (path, reason)
    with _config.override(node_chunks=2):
        check_products(everyone, rows=4, k=7)
    check_matmul_all_reduce(everyone, 16 * nodes * ranks, 24, 4096)
    devices = np.array(jax.devices()).reshape(nodes, ranks)
    check_products(Mesh(devices.T.ravel(), ("tp",)))
    over_both(mesh_of((nodes, ranks), NODE_TP))
    if ranks > 1:
        inside = mesh_of((nodes, ranks), NODE_TP)
        assert path_of(inside, "tp")[0] == Path.FUSED
        check_products(inside, "tp", rows=2)


def over_both(mesh):
    """A pair of products over a tuple of axes, and its gradient, against one device."""
    ranks = mesh.size
    rng = np.random.default_rng(0)
    x, w1, w2 = (rng.standard_normal(s).astype(np.float32) for s in ((2, 6), (6, 3), (3, 6)))
    x, w1, w2 = np.tile(x, (ranks, 1)), np.tile(w1, (1, ranks)), np.tile(w2, (ranks, 1))

    def loss(x, w1, w2):
        h = jflux.all_gather_matmul(x, w1, axis_name=NODE_TP, activation="silu")
        y = jflux.matmul_reduce_scatter(h, w2, axis_name=NODE_TP)
        return jax.lax.psum((y**2).sum(), NODE_TP)

    specs = (P(NODE_TP), P(None, NODE_TP), P(NODE_TP))
    f = jax.shard_map(loss, mesh=mesh, in_specs=specs, out_specs=P())
    place = [jax.sharding.NamedSharding(mesh, spec) for spec in specs]
    arrays = [
        jax.make_array_from_callback(a.shape, s, lambda index, a=a: a[index])
        for a, s in zip((x, w1, w2), place, strict=True)
    ]
    # GPUs have no kernels for float32, and XLA would round its products to TensorFloat-32.
    strict = jflux.config(strict=args.platform == "cpu")
    with strict, jax.default_matmul_precision("highest"):
        grads = jax.jit(jax.grad(f, argnums=(0, 1, 2)))(*arrays)

    def plain(x, w1, w2):
        return ((jax.nn.silu(x @ w1) @ w2) ** 2).sum()

    wants = jax.jit(jax.grad(plain, argnums=(0, 1, 2)))(x, w1, w2)
    for grad, want in zip(grads, wants, strict=True):
        for shard in grad.addressable_shards:
            mine = np.asarray(want)[shard.index]
            bound = 2e-4 * np.abs(want).max()
            np.testing.assert_allclose(np.asarray(shard.data), mine, rtol=1e-3, atol=bound)


def each_its_node():
    """A process is a node."""
    jflux.init(node=f"node {args.process}", deadline_seconds=60)
    everything(args.processes, args.devices)


def two_on_a_node():
    """Two processes share a node, and its heap."""
    jflux.init(node=f"node {args.process // 2}", deadline_seconds=60)
    everything(args.processes // 2, 2 * args.devices)


def interleaved():
    """Processes 0 and 2 are on one node, 1 and 3 on the other."""
    jflux.init(node=f"node {args.process % 2}", deadline_seconds=60)
    everyone = mesh_of((-1,), ("tp",))
    assert path_of(everyone)[0] == Path.TWO_LEVEL
    check_products(everyone, rows=2)
    training()


def uneven():
    """The last process is alone on its node: no two levels, and all processes say so."""
    jflux.init(node="alone" if args.process == args.processes - 1 else "together")
    everyone = mesh_of((-1,), ("tp",))
    with jflux.config(strict=False):
        path, reason = path_of(everyone)
        assert path == Path.REFERENCE, path
        print("reason:", reason)
        check_products(everyone, rows=2)


SCENARIOS = {f.__name__: f for f in (each_its_node, two_on_a_node, interleaved, uneven)}

if __name__ == "__main__":
    start()
    jflux.config.update(strict=True, always=True, unchecked_kernels=True)
    try:
        SCENARIOS[args.scenario]()
    except BaseException:
        traceback.print_exc()
        sys.stdout.flush()
        os._exit(1)  # at once: jax.distributed would wait for those that wait for this one
    print("ok", args.scenario, flush=True)
    jax.distributed.shutdown()  # waits for the others
    os._exit(0)
