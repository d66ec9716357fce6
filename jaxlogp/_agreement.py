"""Check that all shards of a mesh axis hold the same ids, inside a psum that runs anyway.

Types cannot tell: all-gathered ids are typed as varying over the axis though they are equal. So each bit of an id
becomes a counter, several counters are packed into a word, and the words are added in that psum. Over n shards a
counter ends at 0 or n if the ids are equal; any other value reveals a difference, to all shards alike. Exact for every
n and all ids.
"""

from functools import reduce

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from jaxlogp._compat import AxisName

ID_BITS = 24
"""Bits of a code; ids from 2^24 - 3 on are not distinguished from each other."""


def id_codes(ids: Int[Array, "*tokens"], counts: Bool[Array, "*tokens"]) -> Int[Array, "*tokens"]:
    """int32 codes in [0, 2^24): 0 where an id does not count, 1 for a negative id, else id + 2."""
    return jnp.where(counts, jnp.clip(ids, -1, 2**ID_BITS - 3) + 2, 0)


def counters(codes: Int[Array, "*tokens"], axis_name: AxisName, word_bits: int) -> Int[Array, "words ..."]:
    """The words to sum over the axis; every sum stays below 2^word_bits.

    Args:
        codes: int32, from :func:`id_codes`.
        axis_name: mesh axis of the surrounding ``shard_map``.
        word_bits: bits of a word: 24 for words that travel as fp32, 31 as int32, 16 as uint16.
    """
    width, places = _layout(axis_name, word_bits)
    words = []
    for first in range(0, ID_BITS, places):
        bits = [((codes >> bit) & 1) << width * place for place, bit in enumerate(range(first, first + places))]
        words.append(reduce(jnp.bitwise_or, bits))
    return jnp.stack(words)


def same_ids(sums: Int[Array, "words ..."], axis_name: AxisName, word_bits: int) -> Bool[Array, "*tokens"]:
    """Whether all shards had the same code, from the sums of :func:`counters`; the same on all shards."""
    width, places = _layout(axis_name, word_bits)
    shards = lax.axis_size(axis_name)
    counts = jnp.stack([(sums >> width * place) & (2**width - 1) for place in range(places)])
    return jnp.all((counts == 0) | (counts == shards), axis=(0, 1))


def _layout(axis_name: AxisName, word_bits: int) -> tuple[int, int]:
    """Bits per counter, and counters per word."""
    width = int(lax.axis_size(axis_name)).bit_length()
    return width, word_bits // width
