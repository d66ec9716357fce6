"""Plain calls, without shard_map, on arrays of a mesh whose axes are Explicit, as jax.make_mesh makes them."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxlogp import (
    VocabShards,
    embedding_lookup,
    group_advantages,
    head_logits,
    kl_k3,
    leave_one_out_advantages,
    linear_log_probs,
    linear_policy_loss,
    log_probs_from_logits,
    masked_count,
    masked_max,
    masked_mean,
    masked_min,
    policy_loss,
    policy_metrics,
    sharded_embedding_lookup,
    sharded_linear_log_probs,
    weighted_sum,
)
from jaxlogp.head import ChunkedEngine, GradientFilter, skipped_tiles
from jaxlogp.losses import gspo
from tests import oracle

pytestmark = pytest.mark.costly

ROWS, LENGTH, HIDDEN, VOCAB, UNEVEN = 4, 3, 8, 24, 26
# The same formula, partitioned: sums of at most 26 terms in another order. In the gradient of squared logits, Σ|x| of the
# terms is up to 70 times 1 + |Σx|; everything else is well below it.
ERROR = oracle.fp32_bound(70.0, 26)


@functools.cache
def mesh():
    return jax.make_mesh((2, 4), ("data", "tensor"))


@functools.cache
def host():
    rng = np.random.default_rng(0)
    tokens = ROWS, LENGTH
    return {
        "hidden": rng.normal(size=(*tokens, HIDDEN)).astype(np.float32),
        "weight": rng.normal(size=(VOCAB, HIDDEN)).astype(np.float32),
        "uneven": rng.normal(size=(UNEVEN, HIDDEN)).astype(np.float32),
        "logits": rng.normal(size=(*tokens, VOCAB)).astype(np.float32),
        "targets": rng.integers(0, VOCAB, tokens).astype(np.int32),
        "mask": np.arange(ROWS * LENGTH).reshape(tokens) % 4 > 0,
        "old": -rng.random(tokens).astype(np.float32),
        "new": -rng.random(tokens).astype(np.float32),
        "advantages": rng.normal(size=tokens).astype(np.float32),
        "documents": np.repeat(np.arange(ROWS, dtype=np.int32)[:, None], LENGTH, 1),
    }


# The whole weight on every device, or its rows split over an axis; everything else split over "data".
SPECS = {"weight": P(), "uneven": P("data")}


def placed(name, spec=None):
    spec = SPECS.get(name, P("data")) if spec is None else spec
    return jax.device_put(jnp.asarray(host()[name]), NamedSharding(mesh(), spec))


def policy(d, function=policy_loss, **options):
    given = d["new"], d["old"], d["advantages"], d["mask"]
    return function(*given, loss=gspo(), document_ids=d["documents"], num_documents=ROWS, **options)


def head(d, weight="weight", function=linear_log_probs, **options):
    return function(d["hidden"], d[weight], d["targets"], mask=d["mask"], with_entropy=True, **options)


def fused(d):
    given = d["hidden"], d["weight"], d["targets"], d["old"], d["advantages"], d["mask"]
    loss, values = linear_policy_loss(*given)
    return loss, jax.lax.stop_gradient(values)


# By name: what to call on the arrays by name, and which of these arrays have a gradient.
FILTERED = ChunkedEngine(token_chunk=4, vocab_tile=8, gradient_filter=GradientFilter())
CALLS = {
    "log_probs_from_logits": (
        lambda d: log_probs_from_logits(d["logits"], d["targets"], mask=d["mask"], with_entropy=True),
        ["logits"],
    ),
    "embedding_lookup": (lambda d: embedding_lookup(d["weight"], d["targets"]) ** 2, ["weight"]),
    "embedding_lookup, in a fixed order": (
        lambda d: embedding_lookup(d["weight"], d["targets"], fixed_order=True) ** 2,
        ["weight"],
    ),
    "sharded_embedding_lookup": (
        lambda d: sharded_embedding_lookup(d["weight"], d["targets"], mesh=mesh()) ** 2,
        ["weight"],
    ),
    "sharded_embedding_lookup, uneven": (
        lambda d: sharded_embedding_lookup(d["uneven"], d["targets"], mesh=mesh()) ** 2,
        ["uneven"],
    ),
    "VocabShards.owners": (lambda d: VocabShards.even(VOCAB, 5).owners(d["targets"], d["mask"]), []),
    "VocabShards.shard_rows": (lambda d: VocabShards.even(UNEVEN, 4).shard_rows(d["uneven"]) ** 2, ["uneven"]),
    "weighted_sum": (lambda d: weighted_sum(d["new"] ** 2, d["mask"]), ["new"]),
    "masked_mean": (lambda d: masked_mean(d["new"] ** 2, d["mask"]), ["new"]),
    "masked_max and so on": (
        lambda d: [function(d["new"], d["mask"]) for function in (masked_max, masked_min, masked_count)],
        [],
    ),
    "group_advantages": (lambda d: group_advantages(d["new"]).advantages ** 2, ["new"]),
    "leave_one_out_advantages": (lambda d: leave_one_out_advantages(d["new"]).advantages ** 2, ["new"]),
    "policy_loss": (policy, ["new"]),
    "policy_metrics": (lambda d: policy(d, policy_metrics), []),
    "kl_k3": (lambda d: kl_k3(d["new"], d["old"], d["mask"]), ["new"]),
    "head_logits": (lambda d: head_logits(d["hidden"], d["weight"]) ** 2, ["hidden", "weight"]),
    "linear_log_probs": (head, ["hidden", "weight"]),
    "linear_log_probs, fixed_order": (lambda d: head(d, engine="fixed_order"), ["hidden", "weight"]),
    "linear_policy_loss": (fused, ["hidden", "weight"]),
    "skipped_tiles": (lambda d: skipped_tiles(d["hidden"], d["weight"], d["targets"], engine=FILTERED), []),
    "sharded_linear_log_probs": (lambda d: head(d, function=sharded_linear_log_probs, mesh=mesh()), ["hidden"]),
    "sharded_linear_log_probs, uneven": (
        lambda d: head(d, "uneven", sharded_linear_log_probs, mesh=mesh()),
        ["hidden", "uneven"],
    ),
}


def gradients(function, names, arrays):
    """Of the sum of the floating results with respect to the arrays of ``names``."""

    def total(some):
        leaves = jax.tree.leaves(function({**arrays, **some}))
        return sum(jnp.sum(x) for x in leaves if jnp.issubdtype(x.dtype, jnp.floating))

    return jax.grad(total)({name: arrays[name] for name in names})


def close(seen, wanted):
    for a, b in zip(jax.tree.leaves(seen), jax.tree.leaves(wanted), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=ERROR, atol=ERROR)


@functools.cache
def arrays(of_mesh):
    return {key: placed(key) if of_mesh else jnp.asarray(x) for key, x in host().items()}


@functools.cache
def expected(name):
    function, names = CALLS[name]
    both = {"values": function} | ({"gradients": functools.partial(gradients, function, names)} if names else {})
    return jax.jit(lambda d: {key: run(d) for key, run in both.items()})(arrays(False))


QUICK = {"embedding_lookup", "masked_mean", "group_advantages", "policy_loss", "linear_log_probs", "linear_policy_loss"}
NAMES = [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in CALLS]


@pytest.mark.parametrize("name", NAMES)
def test_a_plain_call_under_jit_gives_the_results_of_one_device(name):
    """With its gradients, in the context of the mesh and without one (where jit must keep what a program does not use)."""
    function, names = CALLS[name]
    both = {"values": function} | ({"gradients": functools.partial(gradients, function, names)} if names else {})
    for context in (jax.set_mesh(mesh()), contextlib.nullcontext()):
        with context:
            run = jax.jit(lambda d: {key: run(d) for key, run in both.items()}, keep_unused=True)
            close(run(arrays(True)), expected(name))


# Outside of jit every operation is compiled by itself, and a shard_map would take half a minute.
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow)
        for name in CALLS
        if not name.startswith("sharded_")
    ],
)
def test_a_plain_call_outside_of_jit_gives_the_values_of_one_device(name):
    close(CALLS[name][0](arrays(True)), expected(name)["values"])
