"""Two checks on one GPU: 131072 tokens run with memory linear in N; the engine works inside shard_map over one device.

python -m benchmarks.hopper.long_and_sharded
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from benchmarks.beside_product import cases, compiled_or_said, say
from benchmarks.clock import settled_seconds
from benchmarks.engines import operands, programs
from jaxlogp import HopperEngine, linear_log_probs

ENGINE = HopperEngine()


def sharded() -> None:
    """Values and gradients over a mesh of one device are bitwise those of the plain call."""
    (case,) = cases(["256,1024"], tokens=300)
    mesh = jax.make_mesh((1,), ("tensor",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])

    def both(forward, hidden, weight):
        out, pull = jax.vjp(forward, hidden, weight)
        return out, pull(jax.tree.map(jnp.ones_like, out))

    def head(hidden, weight, targets, **options):
        return linear_log_probs(hidden, weight, targets, with_entropy=True, engine=ENGINE, **options)

    mapped = jax.shard_map(
        functools.partial(head, axis_name="tensor"), mesh=mesh, in_specs=(P(), P("tensor"), P()), out_specs=P()
    )
    found = [
        jax.jit(functools.partial(both, lambda h, w, f=function: f(h, w, case.targets)))(case.hidden, case.weight)
        for function in (mapped, head)
    ]
    pairs = zip(*map(jax.tree.leaves, found), strict=True)
    say(f"shard_map over one device equals the plain call, bitwise: {[bool((a == b).all()) for a, b in pairs]}")


def long() -> None:
    """Time and memory for few and for many tokens."""
    for tokens in (8192, 131072):
        (case,) = cases(["4096,151936"], tokens)
        both = compiled_or_said(programs(ENGINE), *operands(case))["fwd+bwd"]
        milliseconds = settled_seconds(both.call) * 1e3
        finite = np.isfinite(np.asarray(both.call()[0].log_probs)).all()
        say(f"N {tokens}: forward + backward {milliseconds:.0f} ms, {both.note}, finite {bool(finite)}")


if __name__ == "__main__":
    long()
    sharded()
