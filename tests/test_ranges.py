"""Log-probs are at most 0 and entropies in [0, log V] without tolerance, where rounding alone would leave that range."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlogp import linear_log_probs, log_probs_from_logits
from jaxlogp.head import ChunkedEngine

ROWS, VOCAB = 1000, 257


def by_engine(engine):
    weight = np.eye(VOCAB, dtype=np.float32)
    return lambda z: linear_log_probs(z, weight, jnp.zeros(ROWS, jnp.int32), with_entropy=True, engine=engine)


PATHS = {
    "logits": lambda z: log_probs_from_logits(z, jnp.zeros(ROWS, jnp.int32), with_entropy=True),
    "reference": by_engine("reference"),
    "chunked": by_engine(ChunkedEngine(token_chunk=64, vocab_tile=16)),
}


@pytest.mark.parametrize("path", PATHS)
def test_near_uniform_and_near_one_hot_rows_stay_in_range(path):
    # log S - U / S is log V minus half the variance of the logits, 5e-9: its rounding, about 5e-7, decides in every row.
    z = np.random.default_rng(0).normal(0.0, 1e-4, (ROWS, VOCAB)).astype(np.float32)
    z[ROWS // 2 :, 0] += np.linspace(10.0, 30.0, ROWS // 2, dtype=np.float32)
    result = jax.jit(PATHS[path])(z)
    assert (np.asarray(result.log_probs) <= 0).all() and (np.asarray(result.entropy) >= 0).all()
    assert (np.asarray(result.entropy) <= np.log(np.float32(VOCAB))).all()
