"""Two checks on one GPU: 131072 tokens run with memory linear in N; the engine inside of shard_map over one device.

python benchmarks/hopper/long_and_sharded.py
"""

import time

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxlogp._compat import vary_over
from jaxlogp.head.hopper import HopperEngine
from jaxlogp.head.projection import HeadOptions
from jaxlogp.targets import LocalTargets

ENGINE = HopperEngine()


def both(hidden, weight, targets, options):
    local = LocalTargets(targets, targets >= 0, None, jnp.int32(weight.shape[0]))
    out, pull = jax.vjp(lambda h, w: ENGINE.log_probs(h, w, None, local, options), hidden, weight)
    return out, pull(jax.tree.map(jnp.ones_like, out))


def sharded():
    mesh = jax.make_mesh((1,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))
    options = HeadOptions(with_entropy=True, vocab_size=1024, axis_name="tensor")
    hidden = jax.random.normal(jax.random.key(0), (300, 256), jnp.bfloat16)
    weight = jax.random.normal(jax.random.key(1), (1024, 256), jnp.bfloat16) * 0.1
    targets = jnp.arange(300, dtype=jnp.int32)

    def local(hidden, weight, targets):
        hidden, weight, targets = (vary_over(x, {"tensor"}) for x in (hidden, weight, targets))
        out, (d_hidden, d_weight) = both(hidden, weight, targets, options)
        return out.log_probs[None], d_hidden[None], d_weight

    specs = (P(), P("tensor"), P())
    outs = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=(P("tensor"),) * 3))(
        hidden, weight, targets
    )
    plain, (d_hidden, d_weight) = jax.jit(lambda *a: both(*a, HeadOptions(with_entropy=True, vocab_size=1024)))(
        hidden, weight, targets
    )
    same = [
        bool((a.reshape(b.shape) == b).all()) for a, b in zip(outs, (plain.log_probs, d_hidden, d_weight), strict=True)
    ]
    print("shard_map over one device equals the plain call, bitwise:", same, flush=True)


def long():
    for tokens in (8192, 131072):
        options = HeadOptions(with_entropy=True, vocab_size=151936)
        hidden = jax.random.normal(jax.random.key(0), (tokens, 4096), jnp.bfloat16)
        weight = (jax.random.normal(jax.random.key(1), (151936, 4096), jnp.bfloat16) * 0.03).astype(jnp.bfloat16)
        targets = jax.random.randint(jax.random.key(2), (tokens,), 0, 151936, jnp.int32)
        run = jax.jit(lambda *a: both(*a, options)).lower(hidden, weight, targets).compile()
        jax.block_until_ready(run(hidden, weight, targets))
        start = time.perf_counter()
        out, _ = jax.block_until_ready(run(hidden, weight, targets))
        took, memory = time.perf_counter() - start, run.memory_analysis().temp_size_in_bytes / 2**30
        finite = bool(jnp.isfinite(out.log_probs).all())
        print(f"N {tokens}: forward + backward {took * 1e3:.0f} ms, temp {memory:.2f} GiB, finite {finite}", flush=True)


if __name__ == "__main__":
    long()
    sharded()
