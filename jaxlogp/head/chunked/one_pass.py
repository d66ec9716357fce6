"""Values and gradients in one pass over chunks of tokens, on any device: each chunk's logits serve both.

For each chunk, one product gives the logits; these give the log-probs, with one pmax and one psum of token-sized
vectors over the vocabulary shards; the loss gives their cotangents; then dH = dz · W and dW += dzᵀ · H. Three products
instead of four.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from jaxlogp._compat import vary_over
from jaxlogp._stats import TokenLogProbs, all_reduce, finish, logit_gradient, tile_stats
from jaxlogp._targets import LocalTargets, mask_cotangents
from jaxlogp.head.call import HeadCall, HeadGradients, weight_gradient
from jaxlogp.head.engine import LossCotangents
from jaxlogp.head.live_rows import live_rows
from jaxlogp.head.projection import dot, finish_logits, product_gradient

# Most fp32 logits of one chunk of tokens, 256 MiB.
CHUNK_ELEMENTS = 2**26


def values_and_gradients(
    call: HeadCall, cotangents: LossCotangents, tokens: Any, token_chunk: int
) -> tuple[TokenLogProbs, HeadGradients]:
    """Log-probs, entropy and lse, the same on all vocabulary shards, and this shard's gradients.

    Args:
        call: the call; chunks without a label are skipped.
        cotangents: gives the loss's cotangents for the values of a chunk of tokens.
        tokens: pytree of arrays [tokens, ...] that ``cotangents`` needs; padded with zeros.
        token_chunk: upper bound of the tokens in a chunk; fewer where their logits would take more than 256 MiB.
    """
    return _OnePass(call, cotangents, tokens, token_chunk).run()


class _OnePass:
    """Live tokens packed into chunks of one size, and the loop over them."""

    def __init__(self, call: HeadCall, cotangents: LossCotangents, tokens: Any, token_chunk: int) -> None:
        count, vocab = call.hidden.shape[0], call.num_columns
        most = max(min(token_chunk, CHUNK_ELEMENTS // vocab), 1)
        self.chunks = -(-count // most)
        self.size = -(-count // self.chunks)
        self.call, self.cotangents = call, cotangents
        self.rows = rows = live_rows(call.packing_mask, self.chunks * self.size)
        invalid, codes = call.targets.invalid, call.targets.codes
        self.targets = call.targets._replace(
            column=rows.pack(call.targets.column, -1),
            mask=rows.pack(call.targets.mask, False),
            invalid=None if invalid is None else rows.pack(invalid, False),
            codes=None if codes is None else rows.pack(codes, 0),
        )
        self.tokens = jax.tree.map(lambda x: rows.pack(x, 0), tokens)
        self.hidden = rows.pack(call.hidden.astype(call.operand_dtype), 0)
        self.weight = call.weight.astype(call.operand_dtype)
        self.valid = jnp.arange(vocab, dtype=jnp.int32) < call.targets.width

    def run(self) -> tuple[TokenLogProbs, HeadGradients]:
        call, rows, filled = self.call, self.rows, self.chunks * self.size
        zeros = jnp.zeros(filled, jnp.float32)
        values = TokenLogProbs(zeros, zeros if call.with_entropy else None, zeros)
        gradients = HeadGradients(
            jnp.zeros((filled, call.hidden.shape[1]), call.hidden_gradient_dtype),
            jnp.zeros(call.weight.shape, jnp.float32),
            None if call.bias is None else jnp.zeros(call.bias.shape, jnp.float32),
        )
        # The all-reduces make values the same on all vocabulary shards; what follows from a shard's columns differs.
        values = jax.tree.map(lambda x: vary_over(x, call.value_axes), values)
        gradients = jax.tree.map(lambda x: vary_over(x, call.axes), gradients)
        live_chunks = -(-rows.count // self.size)
        values, gradients = lax.fori_loop(0, live_chunks, self._chunk, (values, gradients))
        values = jax.tree.map(rows.unpack, values)
        d_weight = gradients.weight.astype(call.weight_gradient_dtype)
        return values, HeadGradients(rows.unpack(gradients.hidden), d_weight, gradients.bias)

    def _chunk(self, index: Array, carry: tuple[TokenLogProbs, HeadGradients]) -> tuple[TokenLogProbs, HeadGradients]:
        values, gradients = carry
        call, start = self.call, index * self.size

        def part(x):
            return lax.dynamic_slice_in_dim(x, start, self.size)

        def put(x, new):
            return lax.dynamic_update_slice_in_dim(x, new.astype(x.dtype), start, axis=0)

        hidden, targets = part(self.hidden), self._targets_of(part)
        logits = finish_logits(dot(hidden, self.weight, contract=(1, 1 - call.vocab_dim)), call.bias, call.spec)
        local = tile_stats(logits, targets.column, self.valid, call.with_entropy)
        stats = all_reduce(local, call.axis_name, targets.codes)
        new, normaliser = finish(stats, targets.mask, call.vocab_size, targets.invalid)
        g = mask_cotangents(self.cotangents(new, jax.tree.map(part, self.tokens)), targets)
        gradient = logit_gradient(logits, call.onehot_column(targets.column), self.valid, normaliser, *g)
        gradient = product_gradient(gradient, logits, call.spec)
        rounded = gradient.astype(call.operand_dtype)
        d_bias = None if call.bias is None else gradients.bias + jnp.sum(gradient, axis=0)
        return jax.tree.map(put, values, new), HeadGradients(
            put(gradients.hidden, dot(rounded, self.weight, contract=(1, call.vocab_dim))),
            gradients.weight + weight_gradient(call, rounded, hidden),
            d_bias,
        )

    def _targets_of(self, part: Any) -> LocalTargets:
        width = self.targets.width
        return jax.tree.map(part, self.targets._replace(width=None))._replace(width=width)
