"""Runs a head under shard_map on simulated devices and compares raw bytes: -0.0 differs from 0.0, NaN payloads count.

The same harness runs the library's fixed-order engine, its fast engine and a naive program, so that "equal" is known to
mean something: the last two must fail.
"""

import functools
import itertools
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxlogp import TokenLogProbs, VocabShards, linear_log_probs
from jaxlogp.head import ChunkedEngine, FixedOrderEngine
from jaxlogp.invariance import ReductionOrder

HIDDEN = 32
ORDER = ReductionOrder(granules=24, vocab_tile=128, row_block=64)
FIXED = FixedOrderEngine(ORDER)
FIXED_EIGHT = FixedOrderEngine(ReductionOrder(granules=8, vocab_tile=64, row_block=128))
CHUNKED = ChunkedEngine(token_chunk=64, vocab_tile=128)
NAIVE = "naive"
TARGET_FIELDS = ("targets", "mask", "g_lp", "g_entropy")


class Setting(NamedTuple):
    """What a compiled program depends on besides the mesh; hashable. ``around`` is what surrounds the head in it."""

    engine: object = FIXED
    vocab: int = 1027
    options: tuple = ()
    around: str = "nothing"


def case(vocab, tokens, dtype=jnp.float32, family="normal", seed=0):
    """hidden, weight, bias, targets, mask and cotangents; families differ in values only, never in shapes.

    normal: logits of a few units. confident: logits of ±60, one-hot rows. shifted: bias -1e4 everywhere, -inf on some ids.
    tiny: logits of 1e-20, far below the last bit of anything they are added to.
    """
    rng = np.random.default_rng(seed)
    spread, shift = {"normal": (0.4, 0.0), "confident": (4.0, 0.0), "shifted": (0.4, -1e4), "tiny": (1e-20, 0.0)}[
        family
    ]
    bias = rng.normal(size=vocab) * (1e-20 if family == "tiny" else 1.0) + shift
    if family == "shifted":
        bias[5::50] = -np.inf
    targets = rng.integers(0, vocab, tokens)
    targets[targets % 50 == 5] += 1
    return {
        "hidden": jnp.asarray(rng.normal(size=(tokens, HIDDEN)), dtype),
        "weight": jnp.asarray(rng.normal(0.0, spread, (vocab, HIDDEN)), dtype),
        "bias": jnp.asarray(bias, dtype),
        "targets": jnp.asarray(np.minimum(targets, vocab - 1), jnp.int32),
        "mask": jnp.asarray(rng.random(tokens) > 0.1),
        "g_lp": jnp.asarray(rng.normal(size=tokens), jnp.float32),
        "g_entropy": jnp.asarray(rng.normal(size=tokens), jnp.float32),
    }


def tensor_mesh(size):
    return jax.make_mesh((size,), ("tensor",), axis_types=(AxisType.Auto,), devices=jax.devices()[:size])


def shards_of(setting, size):
    if isinstance(setting.engine, FixedOrderEngine):
        return setting.engine.order.shards(setting.vocab, size)
    return VocabShards.even(setting.vocab, size)


def naive_log_probs(hidden, weight, targets, mask, bias, shards):
    """The textbook program: local logits, pmax, psum of exponentials, everything left to autodiff."""
    start, width = (
        jnp.asarray(values, jnp.int32)[lax.axis_index("tensor")] for values in (shards.starts, shards.widths)
    )
    column = jnp.arange(weight.shape[0], dtype=jnp.int32)
    logits = hidden.astype(jnp.float32) @ weight.astype(jnp.float32).T + bias.astype(jnp.float32)[None, :]
    logits = jnp.where((column < width)[None, :], logits, -jnp.inf)
    maximum = lax.pmax(lax.stop_gradient(jnp.max(logits, axis=-1)), "tensor")
    exp = jnp.exp(logits - maximum[:, None])
    total = lax.psum(jnp.sum(exp, axis=-1), "tensor")
    onehot = (column + start)[None, :] == targets[:, None]
    target = lax.psum(jnp.sum(jnp.where(onehot & (column < width)[None, :], logits, 0.0), axis=-1), "tensor")
    finite = jnp.where(jnp.isneginf(logits), 0.0, logits)
    mean = lax.psum(jnp.sum(exp * finite, axis=-1), "tensor") / total
    lse = maximum + jnp.log(total)
    return TokenLogProbs(jnp.where(mask, target - lse, 0.0), jnp.where(mask, lse - mean, 0.0))


def objective(setting, shards, hidden, weight, bias, targets, mask, g_lp, g_entropy):
    def head(hidden, weight, bias):
        if setting.engine == NAIVE:
            return naive_log_probs(hidden, weight, targets, mask, bias, shards)
        return linear_log_probs(
            hidden, weight, targets, mask=mask, bias=bias, with_entropy=True, axis_name="tensor", vocab=shards,
            engine=setting.engine, **dict(setting.options),
        )  # fmt: skip

    result = (jax.checkpoint(head) if setting.around == "checkpoint" else head)(hidden, weight, bias)
    return jnp.sum(result.log_probs * g_lp + result.entropy * g_entropy), result


def in_a_batch(local, around):
    """The same call as the first of two, the second with the tokens the other way round: both at a time, or in turn."""

    def run(hidden, weight, bias, *tokens):
        both = jax.tree.map(lambda x: jnp.stack([x, x[::-1]]), (hidden, *tokens))

        def one(batch):
            return local(batch[0], weight, bias, *batch[1:])

        found = jax.vmap(one)(both) if around == "vmap" else lax.map(one, both)
        return jax.tree.map(lambda x: x[0], found)

    return run


PROGRAMS = itertools.count()


@functools.cache
def program(setting, size, tokens, dtype):
    """Values and gradients by one compiled program over ``size`` vocabulary shards; it is traced once, whatever the data."""
    shards = shards_of(setting, size)
    specs = (P(), P("tensor"), P("tensor"), P(), P(), P(), P())
    local = jax.grad(functools.partial(objective, setting, shards), argnums=(0, 1, 2), has_aux=True)
    if setting.around in ("vmap", "scan"):
        local = in_a_batch(local, setting.around)
    mapped = jax.shard_map(local, mesh=tensor_mesh(size), in_specs=specs, out_specs=(specs[:3], P()))

    def run(*arrays):
        return mapped(*arrays)

    # chex tells functions apart by their names and source.
    run.__name__ = f"program_{next(PROGRAMS)}"
    return jax.jit(chex.assert_max_traces(run, n=1))


def run(setting, size, data):
    """NumPy results by name: log_probs, entropy, hidden, weight, bias (the last three are gradients)."""
    shards = shards_of(setting, size)
    rows = shards.shard_rows(data["weight"]), shards.shard_rows(data["bias"])
    tokens = [data[name] for name in TARGET_FIELDS]
    (hidden, weight, bias), result = program(setting, size, data["hidden"].shape[:-1], data["hidden"].dtype)(
        data["hidden"], *rows, *tokens
    )
    found = {
        "log_probs": result.log_probs,
        "entropy": result.entropy,
        "hidden": hidden,
        "weight": shards.unshard_rows(weight),
        "bias": shards.unshard_rows(bias),
    }
    return {name: np.asarray(value) for name, value in found.items()}


def broken(seen, wanted, names=None):
    """Names of the results whose bytes differ."""
    names = wanted if names is None else names
    return [name for name in names if seen[name].tobytes() != wanted[name].tobytes()]


def assert_same_bytes(seen, wanted, names=None):
    """chex names the values that differ; NaN equals NaN and 0.0 equals -0.0 there, so the bytes are compared as well."""
    names = sorted(wanted) if names is None else names
    chex.assert_trees_all_equal({name: seen[name] for name in names}, {name: wanted[name] for name in names})
    assert broken(seen, wanted, names) == []
