"""Tile shapes of the Hopper kernels: constants by (hidden size, device), never by the number of tokens or shard width.

A configuration that depended on the batch or on the shard would change the order of summation with it, and with the order
the last bits of the log-probs.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class TileConfig:
    """How one kernel cuts its product; see :mod:`jaxlogp.head.hopper.product`.

    Attributes:
      rows: rows of an output tile.
      columns: columns of the output tile.
      depth: how much of the contracted dimension one pipeline step covers.
      stages: pipeline steps in flight.
      group: tiles of the row dimension that are walked before the next column of tiles, so that both operands of the
        blocks in flight stay in the second-level cache.
      cluster: blocks that walk neighbouring row tiles together, each copy of the right operand feeding all of them.
      alternate: whether the two consumer warpgroups take whole tiles in turn, or share each.
    """

    rows: int = 128
    columns: int = 256
    depth: int = 64
    stages: int = 4
    group: int = 16
    alternate: bool = False
    cluster: int = 1

    @property
    def share(self) -> int:
        """Rows of the tile that one warpgroup multiplies."""
        return self.rows if self.alternate else self.rows // 2


ALTERNATE = TileConfig(rows=64, columns=256, depth=64, stages=5, group=16, alternate=True)
ALTERNATE_PAIR = dataclasses.replace(ALTERNATE, cluster=2)
SHARED_PAIR = TileConfig(rows=128, columns=256, depth=64, stages=4, group=16, cluster=2)


@dataclasses.dataclass(frozen=True)
class HeadTiles:
    """The configurations of all kernels of one head call."""

    forward: TileConfig = ALTERNATE
    logit_gradient: TileConfig = ALTERNATE_PAIR
    d_hidden: TileConfig = ALTERNATE_PAIR
    d_weight: TileConfig = ALTERNATE_PAIR


# (device, hidden size), or None for every other size. Measured on one NVIDIA H200: benchmarks/results/head_gpu_log.md.
TABLE: dict[tuple[str, int | None], HeadTiles] = {("NVIDIA H200", None): HeadTiles()}


def head_tiles(hidden_size: int, device: str = "NVIDIA H200") -> HeadTiles:
    """The entry for a hidden size on a device, falling back to the device's default and then to the H200's."""
    for key in ((device, hidden_size), (device, None)):
        if key in TABLE:
            return TABLE[key]
    return TABLE["NVIDIA H200", None]
