"""``jax_debug_nans`` finds NaNs in programs; on clean data, also outside jit, the library makes none."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlogp import (
    embedding_lookup,
    group_advantages,
    linear_log_probs,
    linear_policy_loss,
    log_probs_from_logits,
    masked_max,
    masked_mean,
    policy_loss,
)
from jaxlogp.head import ChunkedEngine
from jaxlogp.losses import gspo

pytestmark = pytest.mark.costly

RNG = np.random.default_rng(0)
HIDDEN, WEIGHT = (jnp.asarray(RNG.normal(size=shape), jnp.float32) for shape in ((6, 4), (32, 4)))
IDS, MASK = jnp.asarray(np.arange(6), jnp.int32), jnp.asarray(np.arange(6) < 4)
OLD, ADVANTAGES = (jnp.asarray(x, jnp.float32) for x in (np.full(6, -1.0), np.linspace(-1.0, 1.0, 6)))


def head(engine, hidden):
    result = linear_log_probs(hidden, WEIGHT, IDS, mask=MASK, with_entropy=True, engine=engine)
    return jnp.sum(result.log_probs) + jnp.sum(result.entropy)


CALLS = {
    "logits": lambda x: jnp.sum(log_probs_from_logits(x @ WEIGHT.T, IDS, mask=MASK, with_entropy=True).log_probs),
    "chunked": functools.partial(head, ChunkedEngine(token_chunk=4, vocab_tile=12)),
    "reference": functools.partial(head, "reference"),
    "fixed_order": functools.partial(head, "fixed_order"),
    "one pass": lambda x: linear_policy_loss(x, WEIGHT, IDS, OLD, ADVANTAGES, MASK)[0].mean(),
    "embedding": lambda x: jnp.sum(embedding_lookup(x, IDS) ** 2),
    "gspo": lambda x: policy_loss(
        x[:, 0], OLD, ADVANTAGES, MASK, loss=gspo(), document_ids=IDS // 2, num_documents=3
    ).mean(),
    "masked": lambda x: masked_mean(x) + masked_mean(x, jnp.zeros(x.shape, bool)),
    "advantages": lambda x: jnp.sum(group_advantages(x).advantages),
}


@pytest.mark.parametrize("name", CALLS)
def test_clean_data_makes_no_nan(name):
    with jax.debug_nans(True):
        assert np.isfinite(CALLS[name](HIDDEN))
        assert np.isfinite(jax.grad(CALLS[name])(HIDDEN)).all()
        assert masked_max(HIDDEN, jnp.zeros(HIDDEN.shape, bool)) == -np.inf


def test_and_a_nan_in_the_data_is_still_found():
    with jax.debug_nans(True), pytest.raises(FloatingPointError):
        CALLS["chunked"](HIDDEN.at[0, 0].set(jnp.inf))
