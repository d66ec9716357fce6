"""One process of the two-process run; also imported by the test, which runs ``results`` in a process with 8 devices.

    python -m tests.invariance.two_processes RANK PROCESSES PORT OUT

Writes the results of process 0 to OUT (.npz), and the processes' messages about differing orders to OUT.refusals.
"""

import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxlogp import linear_log_probs
from jaxlogp.head import FixedOrderEngine
from jaxlogp.invariance import ReductionOrder, fixed_order_sum

VOCAB, HIDDEN, TOKENS = 1027, 32, 256
ENGINE = FixedOrderEngine(ReductionOrder(granules=24, vocab_tile=128, row_block=64))
NAMES = ("log_probs", "entropy", "hidden", "weight", "fixed_order_sum", "psum")


def arrays():
    rng = np.random.default_rng(0)
    return (
        rng.normal(size=(TOKENS, HIDDEN)).astype(np.float32),
        rng.normal(0.0, 0.4, (VOCAB, HIDDEN)).astype(np.float32),
        rng.integers(0, VOCAB, TOKENS).astype(np.int32),
    )


def results(data, tensor):
    """Values and gradients on a (data, tensor) mesh, and one sum over all devices by either kind of all-reduce."""
    mesh = jax.make_mesh((data, tensor), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    shards = ENGINE.order.shards(VOCAB, tensor)

    def local(hidden, weight, targets):
        def objective(hidden, weight):
            found = linear_log_probs(
                hidden, weight, targets, with_entropy=True, axis_name="tensor", vocab=shards, engine=ENGINE,
                out_of_vocab="zero",
            )  # fmt: skip
            return jnp.sum(found.log_probs) + 0.1 * jnp.sum(found.entropy), found

        gradients, found = jax.grad(objective, argnums=(0, 1), has_aux=True)(hidden, weight)
        rank = jax.lax.axis_index(("data", "tensor")).astype(jnp.float32)
        part = jnp.sin(hidden * (1.0 + rank))
        sums = fixed_order_sum(part, ("data", "tensor")), jax.lax.psum(part, ("data", "tensor"))
        return found.log_probs, found.entropy, *gradients, *sums

    split, rows, whole = P("data"), P("tensor"), P()
    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=(split, rows, split), out_specs=(split, split, split, rows, whole, whole)
    )
    replicate = NamedSharding(mesh, whole)
    hidden, weight, targets = arrays()
    weight = np.asarray(shards.shard_rows(jnp.asarray(weight)))
    put = [
        jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), lambda index, x=x: x[index])
        for x, spec in ((hidden, split), (weight, rows), (targets, split))
    ]
    # Waits for every device of this process: the next program, or the end, must not meet a collective under way.
    found = jax.block_until_ready(jax.jit(lambda *args: mapped(*args), out_shardings=(replicate,) * len(NAMES))(*put))
    found = dict(zip(NAMES, (np.asarray(x.addressable_data(0)) for x in found), strict=True))
    return {**found, "weight": np.asarray(shards.unshard_rows(jnp.asarray(found["weight"])))}


def main(rank, processes, port, out):
    chex.set_n_cpu_devices(4)
    jax.distributed.initialize(f"127.0.0.1:{port}", processes, rank, initialization_timeout=60)
    try:
        ENGINE.order.check_across_processes()
        refused = "nothing"
        try:
            ReductionOrder(granules=24 if rank == 0 else 8).check_across_processes()
        except ValueError as error:
            refused = str(error)
        with open(f"{out}.refusal{rank}", "w", encoding="utf-8") as file:
            file.write(refused)
        found = {f"{data}x{tensor}/{k}": v for data, tensor in MESHES for k, v in results(data, tensor).items()}
        if rank == 0:
            np.savez(out, **found)
    finally:
        jax.distributed.shutdown()


MESHES = ((1, 8), (4, 2))

if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
