"""The arrays of a checkpoint as Orbax has written them, whatever else the trainer keeps with them."""

import hashlib
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp


def read_arrays(step: Path) -> dict[str, np.ndarray]:
    """Returns the arrays in the folder of a step, by their paths."""
    checkpointer, folder = ocp.PyTreeCheckpointer(), step / "arrays"
    tree = checkpointer.metadata(folder).item_metadata.tree
    as_numpy = {path: ocp.RestoreArgs(restore_type=np.ndarray) for path in tree}
    return checkpointer.restore(folder, item=dict.fromkeys(tree, 0), restore_args=as_numpy)


def array_digests(step: Path) -> dict[str, tuple[str, tuple[int, ...], str]]:
    """Returns dtype, shape and sha256 of the arrays in the folder of a step, by their paths."""
    return {
        path: (str(array.dtype), array.shape, hashlib.sha256(array.tobytes()).hexdigest())
        for path, array in read_arrays(step).items()
    }
