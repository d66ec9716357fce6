"""Settings of the Hopper engine, and the sizes that follow from them."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxlogp.errors import require
from jaxlogp.head.gradient_filter import GradientFilter, check_filter
from jaxlogp.head.hopper.operands import Launch
from jaxlogp.head.hopper.tiles import FILTERED, HeadTiles, TileConfig, head_tiles
from jaxlogp.head.hopper.work_lists import group_rows

# Most vocabulary columns of one chunk of dz; constant, so that the order in which dH is summed is. Takes 416 MiB at 8192
# tokens, and grows with them.
CHUNK_COLUMNS = 26624


@dataclasses.dataclass(frozen=True)
class HopperSettings:
    """What the kernels are told; :class:`jaxlogp.head.HopperEngine` explains the fields."""

    tiles: HeadTiles | None = None
    chunk: int | None = None
    interpret: Any = None
    num_sms: int | None = None
    gradient_filter: GradientFilter | None = None
    check_device: bool = True

    def __post_init__(self) -> None:
        """Refuses what is no gradient filter."""
        check_filter(self.gradient_filter)

    def head_tiles(self, hidden_size: int) -> HeadTiles:
        """The tile shapes of a call."""
        if self.tiles is not None:
            return self.tiles
        if self.gradient_filter is not None:
            return FILTERED
        return head_tiles(hidden_size, jax.devices()[0].device_kind)

    def num_blocks(self) -> int:
        """Persistent blocks of a kernel."""
        if self.num_sms is not None:
            return self.num_sms
        device = jax.devices()[0]
        return 132 if device.platform != "gpu" else int(device.core_count)

    def launch(self, config: TileConfig) -> Launch:
        """How a kernel of such tiles is launched."""
        return Launch(config, self.num_blocks(), self.interpret)

    def chunk_columns(self, vocab: int, tiles: HeadTiles) -> int:
        """Vocabulary columns of a chunk of the backward.

        Raises:
            ValueError: ``chunk`` does not cut at tiles of all kernels.
        """
        tile, group = tiles.logit_gradient.columns, group_rows(tiles.d_weight, self.interpret)
        whole = math.lcm(tile, tiles.d_hidden.depth * tiles.d_hidden_parts, group, tiles.d_weight.columns)
        if self.chunk is not None:
            expected = f"None or a positive multiple of {whole}, which is whole tiles"
            require(self.chunk > 0 and self.chunk % whole == 0, "chunk", expected, self.chunk)
            return self.chunk
        pieces = -(-vocab // CHUNK_COLUMNS)
        return -(-vocab // (pieces * whole)) * whole


def row_multiple(tiles: HeadTiles, interpret: Any) -> int:
    """Tokens are padded to a multiple of it: whole tiles in every kernel, clusters of them on a GPU."""
    configs = tiles.forward, tiles.exponentials, tiles.logit_gradient, tiles.d_hidden
    rows = [config.rows * (config.cluster if interpret is None else 1) for config in configs]
    return math.lcm(*rows, tiles.d_weight.depth, tiles.one_pass_d_weight.depth)


def whole_rows(live: Int[Array, ""], multiple: int) -> Int[Array, ""]:
    """Rows of all tiles with a live one, at least one tile: what one kernel leaves out no other may read."""
    return jnp.maximum(-(-live // multiple), 1) * multiple
