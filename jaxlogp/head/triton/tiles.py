"""Tile shapes of the Triton kernels and sizes of the backward's windows: constants, never found by timing.

The tile decides the order in which a token's statistics are summed, so it depends on the device alone: not on the
number of tokens, nor on the width of a shard.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class TileConfig:
    """How one kernel divides hidden · weightᵀ: one output tile per program.

    Attributes:
        rows: tokens per tile.
        columns: vocabulary columns per tile.
        depth: how much of the hidden size one step covers.
        warps: warps per program.
        stages: steps in flight.
        group: row tiles that are visited before the next column of tiles, so that both operands of the programs in flight
            stay in the second-level cache.
    """

    rows: int = 128
    columns: int = 256
    depth: int = 64
    warps: int = 8
    stages: int = 3
    group: int = 16


@dataclasses.dataclass(frozen=True)
class HeadTiles:
    """The configurations of both kernels of a head call. Tokens are padded to a multiple of both numbers of rows."""

    forward: TileConfig = TileConfig()
    gradient: TileConfig = TileConfig()


THREE_STAGES = TileConfig(stages=3)
FOUR_STAGES = TileConfig(stages=4)

# By compute capability, times ten. Before 9.0 n stages take (n - 1) 48 KiB of shared memory: 96 KiB of 99 with three,
# 144 of 163 with four. From 9.0 on they take n 48 KiB, 192 of 227. Registers and spills:
# benchmarks/results/head_triton_log.md.
TABLE: dict[int, HeadTiles] = {
    80: HeadTiles(FOUR_STAGES, FOUR_STAGES),
    86: HeadTiles(THREE_STAGES, THREE_STAGES),
    87: HeadTiles(FOUR_STAGES, FOUR_STAGES),
    89: HeadTiles(THREE_STAGES, THREE_STAGES),
    90: HeadTiles(FOUR_STAGES, FOUR_STAGES),
}

# Bytes of the tile statistics of one block of tokens.
STATISTICS_BYTES = 80 * 2**20
# Bytes of one window of dz, [tokens, columns].
WINDOW_BYTES = 240 * 2**20
# Fewest columns of a window, however many tokens there are: a narrower one spends more on adding to dH than on its
# product.
WINDOW_COLUMNS = 4096
# Rows of dz are then aligned as a matrix product prefers.
WINDOW_MULTIPLE = 64
# The products of the backward take 1/4, 2/4, 3/4 or all of the rows: the smallest share that holds every row with a
# gradient.
ROW_PARTS = 4


def window_columns(tokens: int, vocab: int) -> int:
    """Columns of a window: as few windows as the constants allow, as narrow as their number allows, or all columns."""
    most = max(WINDOW_BYTES // (2 * tokens), WINDOW_COLUMNS) // WINDOW_MULTIPLE * WINDOW_MULTIPLE
    pieces = -(-vocab // most)
    return min(-(-vocab // (pieces * WINDOW_MULTIPLE)) * WINDOW_MULTIPLE, vocab)


def row_parts(tokens: int, multiple: int) -> tuple[int, ...]:
    """The numbers of rows, ascending multiples of ``multiple``, from which the backward's products choose."""
    tiles = tokens // multiple
    return tuple(sorted({-(-tiles * part // ROW_PARTS) * multiple for part in range(1, ROW_PARTS + 1)}))
