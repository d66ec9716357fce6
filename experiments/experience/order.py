"""The order of training data: shuffled anew in every pass."""

import numpy as np


class EpochOrder:
    """A permutation of `count` things for each pass over them, from a seed."""

    def __init__(self, count: int, seed: int) -> None:
        self._count, self._seed = count, seed
        self._epoch, self._order = -1, np.arange(0)

    def __getitem__(self, position: int) -> int:
        """Returns the thing at a position, counted over all passes."""
        epoch, place = divmod(position, self._count)
        if epoch != self._epoch:
            # By the bits themselves, which every version of NumPy draws alike; what permutation() makes of them may change.
            bits = np.random.Philox([self._seed, epoch]).random_raw(self._count)
            self._epoch, self._order = epoch, np.argsort(bits, kind="stable")
        return int(self._order[place])
