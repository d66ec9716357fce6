"""The array type of arguments, and the dtype that they are computed in."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

AnyArray = jax.Array | np.ndarray
"""What functions take: JAX arrays, traced or not, and NumPy arrays. What they return is a `jax.Array`."""


def compute_dtype(*values: Float[AnyArray, "*shape"]) -> jnp.dtype:
    """float64 if any of the values is, otherwise float32: sums and exponentials never run in 16 bits."""
    return jnp.dtype(jnp.float64 if any(jnp.result_type(x) == jnp.float64 for x in values) else jnp.float32)
