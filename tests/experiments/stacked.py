"""The arrays of a round's ranks, stacked along a first dimension, as tests want to read them."""

import jax
import numpy as np

from experiments.learner.packing import GlobalMicroBatch
from jaxlogp import MicroBatch


def stacked(each: GlobalMicroBatch) -> MicroBatch:
    """Micro-batches of all ranks as one."""
    return jax.tree.map(lambda *pieces: np.stack(pieces), *map(each.micro_batch, range(each.packing.ranks)))
