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
SHARED = TileConfig(rows=128, columns=256, depth=64, stages=4, group=16)
SHARED_PAIR = dataclasses.replace(SHARED, cluster=2)


def _grouped(config: TileConfig, group: int) -> TileConfig:
    return dataclasses.replace(config, group=group)


@dataclasses.dataclass(frozen=True)
class HeadTiles:
    """The configurations of all kernels of one head call.

    Attributes:
        forward: log-probs and entropies.
        exponentials: the same with the exponentials written, for gradients in the forward pass.
        logit_gradient: dz by vocabulary chunks.
        d_hidden: dz · W.
        d_weight: dzᵀ · H in two steps.
        d_hidden_parts: how many parts of a vocabulary chunk dH sums apart. With a small hidden size the output has few
            tiles, and two parts of each keep all blocks busy; a number that depended on the tokens would change the bits of
            dH.
        windows_apart: whether one pass sums dH apart for each window of the vocabulary, as wide as a chunk of the backward,
            in one kernel call, instead of d_hidden_parts of one window after the other: the tiles of all windows fill the
            blocks but for the last of many rounds. Where the output of a window takes little more than a whole number of
            them.
        one_pass_d_weight: dzᵀ · H in one pass. Where many chunks of few tokens each are summed, in fp32, warpgroups that
            alternate hide the epilogue, twice as long and more often.
    """

    forward: TileConfig = SHARED_PAIR
    exponentials: TileConfig = SHARED_PAIR
    logit_gradient: TileConfig = SHARED_PAIR
    d_hidden: TileConfig = SHARED_PAIR
    d_weight: TileConfig = SHARED
    d_hidden_parts: int = 1
    windows_apart: bool = False
    one_pass_d_weight: TileConfig = SHARED


# Small blocks, so that a gradient filter can leave many out.
FILTERED = HeadTiles(*[ALTERNATE_PAIR] * 5)

_MIDDLE = HeadTiles(
    forward=_grouped(SHARED_PAIR, 32),
    exponentials=_grouped(ALTERNATE_PAIR, 32),
    logit_gradient=_grouped(ALTERNATE_PAIR, 32),
    d_weight=_grouped(SHARED, 32),
    d_hidden_parts=2,
    one_pass_d_weight=_grouped(SHARED, 32),
)

# Device, then (smallest hidden size, tiles), largest first. With a large hidden size products take the card's power, and
# tiles that read least win; with a small one the epilogues count, and warpgroups that alternate hide them.
# Measured on one NVIDIA H200: benchmarks/results/head_gpu_log.md.
TABLE: dict[str, tuple[tuple[int, HeadTiles], ...]] = {
    "NVIDIA H200": (
        (3072, HeadTiles()),
        (2304, dataclasses.replace(_MIDDLE, windows_apart=True, one_pass_d_weight=ALTERNATE_PAIR)),
        (1536, _MIDDLE),
        (
            0,
            HeadTiles(
                forward=_grouped(ALTERNATE_PAIR, 128),
                exponentials=_grouped(ALTERNATE_PAIR, 32),
                logit_gradient=_grouped(ALTERNATE_PAIR, 32),
                d_hidden_parts=2,
            ),
        ),
    ),
}


def head_tiles(hidden_size: int, device: str = "NVIDIA H200") -> HeadTiles:
    """The entry for a hidden size on a device, that of the H200 where the device has none."""
    entries = TABLE.get(device, TABLE["NVIDIA H200"])
    return next(tiles for smallest, tiles in entries if hidden_size >= smallest)
