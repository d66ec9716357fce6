"""Ids of every integer dtype mean the same in every public function: ranges are checked before the cast to int32."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from jaxlogp import (
    Document,
    VocabShards,
    drift_report,
    embedding_lookup,
    linear_log_probs,
    linear_policy_loss,
    log_probs_from_logits,
    pack_documents,
    policy_loss,
    policy_metrics,
    sharded_embedding_lookup,
    sharded_linear_log_probs,
)
from jaxlogp.head import ChunkedEngine, GradientFilter, skipped_tiles
from jaxlogp.losses import grpo_paper, gspo
from tests import oracle

pytestmark = pytest.mark.costly

# 2^16 + 6: in a dtype of 8 or 16 bits the size of the vocabulary would wrap to 6.
VOCAB, HIDDEN = 65542, 2
IDS = np.array([0, 5, 7, 100, 120, 6])
TOKENS = IDS.size
ALL = np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64


def dtypes(*default):
    """All, those of the default lane by name; 8, 16 and 64 bits and both signs are among them."""
    return [pytest.param(x, marks=[] if x in default else pytest.mark.slow, id=x.__name__) for x in ALL]


@functools.cache
def data():
    rng = np.random.default_rng(0)
    names = ("old", "advantages", "new")
    tokens = {name: jnp.asarray(-rng.random(TOKENS) - 1.0, jnp.float32) for name in names}
    return tokens | {
        "hidden": jnp.asarray(rng.normal(size=(TOKENS, HIDDEN)), jnp.float32),
        "weight": jnp.asarray(rng.normal(size=(VOCAB, HIDDEN)), jnp.float32),
        "logits": jnp.asarray(rng.normal(size=(TOKENS, VOCAB)), jnp.float32),
        "mask": jnp.asarray([True, True, True, True, False, True]),
    }


@functools.cache
def mesh():
    return jax.make_mesh((1, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:2])


def policy(ids, loss, function=policy_loss, **options):
    d = data()
    given = d["new"], d["old"], d["advantages"], d["mask"]
    return function(*given, loss=loss, document_ids=ids, num_documents=200, **options)


def fused(targets, ids=None, loss=None):
    d = data()
    documents = {} if ids is None else {"document_ids": ids, "num_documents": 200}
    given = d["hidden"], d["weight"], targets, d["old"], d["advantages"], d["mask"]
    return linear_policy_loss(*given, loss=loss, **documents)


def head(ids, **options):
    return linear_log_probs(data()["hidden"], data()["weight"], ids, **options)


# Functions of ids that work on traced ones, and whether an id out of range gives a result at all (NaN or a marked one).
TRACED = {
    "log_probs_from_logits": lambda ids: log_probs_from_logits(data()["logits"], ids).log_probs,
    "linear_log_probs": lambda ids: head(ids).log_probs,
    "linear_log_probs, zero": lambda ids: head(ids, out_of_vocab="zero").log_probs,
    "sharded_linear_log_probs": lambda ids: (
        sharded_linear_log_probs(data()["hidden"], data()["weight"], ids, mesh=mesh()).log_probs
    ),
    "linear_policy_loss, targets": lambda ids: fused(ids)[1].log_probs,
    "linear_policy_loss, documents": lambda ids: fused(jnp.zeros(TOKENS, jnp.int32), ids, gspo())[0].sum,
    "skipped_tiles": lambda ids: (
        skipped_tiles(
            data()["hidden"], data()["weight"], ids, engine=ChunkedEngine(gradient_filter=GradientFilter())
        ).sum
    ),
    "embedding_lookup": lambda ids: embedding_lookup(data()["weight"], ids),
    "sharded_embedding_lookup": lambda ids: sharded_embedding_lookup(data()["weight"], ids, mesh=mesh()),
    "policy_loss, gspo": lambda ids: policy(ids, gspo()).sum,
    "policy_loss, grpo_paper": lambda ids: policy(ids, grpo_paper()).sum,
    "policy_metrics": lambda ids: policy(ids, gspo(), policy_metrics)["ratio_new_old"],
    "VocabShards.owners": lambda ids: VocabShards.even(VOCAB, 3).owners(ids),
}


def packed(ids):
    document = Document.of_completion(ids[:1], ids[1:], np.zeros(TOKENS - 1))
    return pack_documents([document], rows=1, row_length=8)[0].tokens


# Functions of known ids.
HOST = {
    "drift_report": lambda ids: np.array(
        drift_report(np.arange(6.0), np.zeros(6), ids, vocab=VocabShards.even(VOCAB, 3)).worst_owner
    ),
    "pack_documents": packed,
}


def same(seen, wanted):
    np.testing.assert_array_equal(np.asarray(seen), np.asarray(wanted))


def close(seen, wanted):
    """Another program may add up the exponentials in another order; ids that wrapped would differ by far more."""
    np.testing.assert_allclose(np.asarray(seen), np.asarray(wanted), rtol=0, atol=oracle.fp32_bound(1.0, VOCAB))


@functools.cache
def expected(name):
    run = {**TRACED, **HOST}[name]
    ids = IDS.astype(np.int32)
    return np.asarray(jax.jit(lambda: run(ids))() if name in TRACED else run(ids))


@pytest.mark.parametrize("dtype", dtypes(np.uint16, np.int64))
@pytest.mark.parametrize("name", [*TRACED, *HOST])
def test_every_dtype_gives_the_results_of_int32(name, dtype):
    """NumPy ids outside of jit, in 64 bits without x64 as well: jnp.asarray alone would wrap them."""
    run, ids = {**TRACED, **HOST}[name], IDS.astype(dtype)
    if name.startswith("sharded_"):
        # Outside of jit a shard_map runs operation by operation, which takes half a minute.
        close(jax.jit(lambda: run(ids))(), expected(name))
    else:
        close(run(ids), expected(name))


@pytest.mark.parametrize("dtype", dtypes(np.uint8))
@pytest.mark.parametrize("name", TRACED)
def test_and_under_jit(name, dtype):
    with jax.enable_x64(np.dtype(dtype).itemsize == 8):
        ids = jnp.asarray(IDS, dtype)
        assert ids.dtype == dtype
        close(jax.jit(TRACED[name])(ids), expected(name))


# By name: what an id out of range gives where the values are not known; NaN where nothing is said.
OUTSIDE = {"linear_log_probs, zero": 0.0, "VocabShards.owners": -1}
NO_RANGE = {"skipped_tiles"}


@pytest.mark.parametrize(
    "value, dtype", [(2**32 + 3, np.int64), pytest.param(2**32 - 5, np.uint32, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", [name for name in TRACED if name not in NO_RANGE])
def test_a_wide_id_is_out_of_range_and_not_what_it_wraps_to(name, value, dtype):
    ids = IDS.astype(dtype)
    ids[1] = value
    with jax.enable_x64(np.dtype(dtype).itemsize == 8):
        seen = np.asarray(jax.jit(TRACED[name])(jnp.asarray(ids)))
    seen = seen[1] if seen.shape[:1] == (TOKENS,) else seen
    same(seen, np.full(seen.shape, OUTSIDE.get(name, np.nan)))


@pytest.mark.bad_input
@pytest.mark.parametrize("value, dtype", [(2**32 + 3, np.int64), (2**32 - 5, np.uint32), (2**63 + 3, np.uint64)])
@pytest.mark.parametrize("name", [name for name in (*TRACED, *HOST) if name not in NO_RANGE])
def test_a_known_wide_id_is_named(name, value, dtype):
    ids = IDS.astype(dtype)
    ids[1] = value
    if name in OUTSIDE:
        seen = np.asarray(TRACED[name](ids))[1]
        same(seen, np.full(seen.shape, OUTSIDE[name]))
        return
    with pytest.raises(ValueError, match=str(value)):
        {**TRACED, **HOST}[name](ids)
