"""Numbers per token from which, with the logits, the backward kernels compute the gradient of the logits.

dz = p (A + B (z - max)) + g onehot, with A = -g + g_H Σ p (z - max) and B = -g_H.
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array

from jaxlogp._stats import Normaliser
from jaxlogp.head.live_rows import LiveRows
from jaxlogp.head.projection import HeadSpec


class RowScalars(NamedTuple):
    """What the epilogue needs of each token, fp32 [tokens]; target is int32, the target's row of the weight or -1."""

    maximum: Array
    log2_sum: Array
    constant: Array
    slope: Array
    onehot: Array
    target: Array

    def pack(self, rows: LiveRows) -> "RowScalars":
        """Those of live tokens first; places without a token get zeros and no target, so that dz = exp2(0) * 0."""
        return RowScalars(*(rows.pack(x, 0) for x in self))._replace(target=rows.pack(self.target, -1))


def row_scalars(
    normaliser: Normaliser, g_log_probs: Array, g_entropy: Array | None, column: Array, spec: HeadSpec
) -> RowScalars:
    """The scalars of dz, with the factors of :func:`jaxlogp.head.projection.product_gradient` except the soft cap's."""
    factor = spec.logit_scale / spec.temperature
    constant, slope = -g_log_probs, jnp.zeros_like(g_log_probs)
    if g_entropy is not None:
        constant, slope = constant + g_entropy * normaliser.mean, -g_entropy
    scaled = (x * factor for x in (constant, slope, g_log_probs))
    return RowScalars(normaliser.max, normaliser.log_sum_exp * math.log2(math.e), *scaled, column)
