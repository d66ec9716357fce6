"""The forward of the Hopper engine: log-probs, entropies and lse, a block of tokens at a time."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxlogp._stats import Normaliser, TokenLogProbs
from jaxlogp.head.call import HeadCall
from jaxlogp.head.fold import block_tokens, fold_blocks
from jaxlogp.head.hopper.forward import forward_statistics
from jaxlogp.head.hopper.operands import Operands
from jaxlogp.head.hopper.settings import HopperSettings, row_multiple
from jaxlogp.head.live_rows import live_rows

# Bytes that the tokens of the forward may take at a time: their tile statistics, and their hidden states where they are
# packed; and that a block of them may take where that is too much for all (a loop over blocks holds more than one).
WHOLE_BYTES, BLOCK_BYTES = 88 * 2**20, 56 * 2**20


class KeptStatistics(NamedTuple):
    """What the backward reads of each token, and for a gradient filter the largest logits [tiles, packed tokens]."""

    normaliser: Normaliser
    peaks: Float[Array, "tiles padded"] | None


def head_values(call: HeadCall, engine: HopperSettings) -> tuple[TokenLogProbs, KeptStatistics]:
    """Values of all tokens, and what the backward needs of them."""
    hidden, targets = call.hidden, call.targets
    tokens, tiles = hidden.shape[0], engine.head_tiles(hidden.shape[1])
    config = tiles.forward
    columns = -(-call.num_columns // config.columns) * config.columns
    # Statistics take 16 bytes a token and vocabulary tile: many tokens go block by block.
    per_token = columns // config.columns * 16 + (0 if call.all_live else 2 * hidden.shape[1])
    blocks = 1 if tokens * per_token <= WHOLE_BYTES else -(-tokens * per_token // BLOCK_BYTES)
    block = block_tokens(tokens, blocks, row_multiple(tiles, engine.interpret))
    rows = live_rows(targets.mask, -(-tokens // block) * block, call.all_live)
    narrow = hidden.astype(jnp.bfloat16)
    if call.all_live:
        # Filled up once, and not in every block.
        narrow = rows.pack(narrow, 0)
    operands, launch = Operands.of(call, narrow, columns), engine.launch(config)

    def statistics(start, column, live):
        here = operands.with_hidden(rows.pack_block(narrow, 0, start, block))
        return forward_statistics(here, column, launch, with_entropy=call.with_entropy, live=live)

    values, normaliser, peaks = fold_blocks(call, statistics, rows, block, engine.gradient_filter is not None)
    return values, KeptStatistics(normaliser, peaks)
