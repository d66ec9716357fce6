"""The array type of arguments."""

import jax
import numpy as np

AnyArray = jax.Array | np.ndarray
"""What functions take: JAX arrays, traced or not, and NumPy arrays. What they return is a `jax.Array`."""
