"""Log-prob functions that processes of test_process_split.py take by name."""

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from jaxlogp import sharded_linear_log_probs
from jaxlogp.head import FixedOrderEngine
from jaxlogp.invariance import ReductionOrder

FIXED = FixedOrderEngine(ReductionOrder(granules=24, vocab_tile=128, row_block=64))


def naive(hidden, weight, targets):
    """Without this library."""
    logits = jnp.dot(hidden, weight.T, preferred_element_type=jnp.float32, precision=jax.lax.Precision.HIGHEST)
    return jnp.take_along_axis(jax.nn.log_softmax(logits), targets[:, None], axis=1)[:, 0]


def fixed_order(hidden, weight, targets):
    """With the vocabulary over every device of every process."""
    mesh = jax.make_mesh((len(jax.devices()),), ("tensor",), axis_types=(AxisType.Auto,))
    return sharded_linear_log_probs(hidden, weight, targets, mesh=mesh, token_axes=(), engine=FIXED).log_probs
