"""Backward of attention: two kernels, which compute the probabilities again from the stored sums.

Each sums what it owns in registers, in a fixed order: the results have the same bits in every run.
"""

from jaxtyping import Array, Float

from experiments.models.attention.hopper.bounds import Bounds
from experiments.models.attention.hopper.key_gradient import key_gradient
from experiments.models.attention.hopper.query_gradient import query_gradient
from experiments.models.attention.hopper.settings import Settings


def backward(
    queries: Float[Array, "B T N D"],
    keys: Float[Array, "B T K D"],
    values: Float[Array, "B T K D"],
    out: Float[Array, "B T N D"],
    sums: Float[Array, "B N T"],
    d_out: Float[Array, "B T N D"],
    bounds: Bounds,
    settings: Settings,
) -> tuple[Float[Array, "B T N D"], Float[Array, "B T K D"], Float[Array, "B T K D"]]:
    """Returns dq, dk and dv of what `forward` returned, for the gradient `d_out` of its result."""
    dq, deltas = query_gradient(queries, keys, values, out, sums, d_out, bounds, settings)
    dk, dv = key_gradient(queries, keys, values, sums, d_out, deltas, bounds, settings)
    return dq, dk, dv
