"""Division of [tokens, vocab] into blocks of token chunks and vocabulary tiles."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array


class BlockSizes(NamedTuple):
    """Tokens and vocabulary columns of a block."""

    token_chunk: int
    vocab_tile: int


SMALL, OF_A_GPU = BlockSizes(512, 2048), BlockSizes(8192, 4096)


def usual_sizes() -> BlockSizes:
    """Returns the sizes for the default device: the products of small blocks leave most of a GPU idle."""
    return OF_A_GPU if jax.devices()[0].platform == "gpu" else SMALL


@dataclasses.dataclass(frozen=True)
class Blocks:
    """How [tokens, vocab] is divided into blocks; static."""

    tokens: int
    vocab: int
    chunk: int
    tile: int

    @classmethod
    def of(cls, sizes: BlockSizes, tokens: int, vocab: int) -> "Blocks":
        return cls(tokens, vocab, min(sizes.token_chunk, tokens), min(sizes.vocab_tile, vocab))

    @property
    def num_chunks(self) -> int:
        return -(-self.tokens // self.chunk)

    @property
    def num_tiles(self) -> int:
        return -(-self.vocab // self.tile)

    def chunks(self, x: Array, fill: float | int) -> Array:
        """[tokens, ...] as [num_chunks, chunk, ...], padded at the end."""
        padding = [(0, self.num_chunks * self.chunk - self.tokens)] + [(0, 0)] * (x.ndim - 1)
        padded = jnp.pad(x, padding, constant_values=fill) if padding[0][1] else x
        return padded.reshape(self.num_chunks, self.chunk, *x.shape[1:])

    def unchunk(self, x: Array) -> Array:
        return x.reshape(-1, *x.shape[2:])[: self.tokens]

    def tile_columns(self, index: Array, width: Array) -> tuple[Array, Array, Array]:
        """First column of a tile, which of its columns no earlier tile has covered, and which of those are real ids."""
        start = jnp.minimum(index * self.tile, self.vocab - self.tile)
        columns = start + jnp.arange(self.tile, dtype=jnp.int32)
        own = columns >= index * self.tile
        return start, own, own & (columns < width)
