"""Engine ``hopper``: Pallas kernels on Mosaic GPU for NVIDIA Hopper (compute capability 9), logits never stored.

Forward: one product whose epilogue leaves four numbers a token and vocabulary tile. Backward, by vocabulary chunks: the
product again, turned into dz [tokens, chunk] in bf16, then dH += dz · W_chunk in fp32 and dW_chunk = dzᵀ · H, which is
complete and rounded once.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxlogp._compat import union_of_varying_axes, vary_over
from jaxlogp.head.hopper._pallas_compat import why_not_available
from jaxlogp.head.hopper.forward import forward_statistics
from jaxlogp.head.hopper.logit_gradient import chunk_gradient, row_scalars
from jaxlogp.head.hopper.tiles import HeadTiles, head_tiles
from jaxlogp.head.hopper.weight_gradient import add_hidden_gradient, uninitialised, write_weight_gradient
from jaxlogp.head.projection import HeadOptions
from jaxlogp.logits import LocalTargets, mask_cotangents
from jaxlogp.stats import TileStats, TokenLogProbs, all_reduce, finish

# Bytes of the tile statistics of one block of tokens.
STATISTICS_BYTES = 80 * 2**20
# Bytes of one chunk of dz; it may also take as much as the hidden states do.
CHUNK_BYTES = 416 * 2**20


@dataclasses.dataclass(frozen=True)
class HopperEngine:
    """Mosaic GPU kernels for Hopper.

    Attributes:
      tiles: tile shapes; None takes the table's entry for the hidden size and the device.
      chunk: vocabulary columns a chunk of the backward; None sizes it by memory.
      interpret: runs the kernels on the CPU (for tests) instead of compiling them.
      num_sms: persistent blocks; None asks the device.
    """

    tiles: HeadTiles | None = None
    chunk: int | None = None
    interpret: Any = None
    num_sms: int | None = None
    name = "hopper"

    def why_not(
        self, hidden: Any, weight: Any, bias: Any, options: HeadOptions, check_device: bool = True
    ) -> str | None:
        """Why this engine cannot take a call, or None when it can.

        Args:
          hidden: [tokens, H] (or anything with its shape and dtype).
          weight: [V_local, H].
          bias: [V_local] or None.
          options: the options of the call.
          check_device: also look at the default device (not when lowering for another machine).
        """
        reason = why_not_available()
        if reason is not None:
            return reason
        if check_device and self.interpret is None:
            device = jax.devices()[0]
            if device.platform != "gpu":
                return f"it needs an NVIDIA Hopper GPU, the default device is {device.platform}"
            capability = str(getattr(device, "compute_capability", "unknown"))
            if capability != "9.0":
                return f"it needs compute capability 9.0 (Hopper), {device.device_kind} has {capability}"
        if weight.dtype != jnp.bfloat16:
            return f"it needs a bfloat16 weight, got {weight.dtype}"
        if options.fp32_head and hidden.dtype != jnp.bfloat16:
            return f"fp32_head needs {hidden.dtype} operands, the kernels multiply bfloat16"
        tiles = self._tiles(weight)
        if weight.shape[0] % 8:
            return f"it needs a number of weight rows that is a multiple of 8, got {weight.shape[0]}"
        if hidden.shape[-1] % tiles.forward.depth:
            return f"it needs a hidden size that is a multiple of {tiles.forward.depth}, got {hidden.shape[-1]}"
        return None

    def log_probs(
        self,
        hidden: Float[Array, "tokens hidden"],
        weight: Float[Array, "vocab hidden"],
        bias: Float[Array, " vocab"] | None,
        targets: LocalTargets,
        options: HeadOptions,
    ) -> TokenLogProbs:
        """Log-probs and entropy of flat tokens; all operands typed as varying over every axis in play.

        Args:
          hidden: [tokens, H], cast to bf16 for the product; its gradient comes back in its own dtype.
          weight: bf16 [V_local, H].
          bias: [V_local] or None.
          targets: targets as this shard sees them.
          options: static options of the call.

        Returns:
          TokenLogProbs of fp32 [tokens].

        Raises:
          ValueError: the kernels cannot take these operands; the sentence says why (see :meth:`why_not`).
        """
        reason = self.why_not(hidden, weight, bias, options, check_device=False)
        if reason is not None:
            raise ValueError(f"engine: expected operands that 'hopper' takes, but {reason}")
        return _log_probs(hidden, weight, bias, targets, options, self)

    def _tiles(self, weight: Array) -> HeadTiles:
        return head_tiles(weight.shape[1]) if self.tiles is None else self.tiles

    def _blocks(self) -> int:
        if self.num_sms is not None:
            return self.num_sms
        device = jax.devices()[0]
        return 132 if device.platform != "gpu" else int(device.core_count)

    def _chunk(self, tokens: int, hidden_size: int, vocab: int, tile: int) -> int:
        if self.chunk is not None:
            return self.chunk
        most = max(CHUNK_BYTES // (2 * tokens), hidden_size)
        pieces = -(-vocab // most)
        even = -(-vocab // pieces)
        return -(-even // tile) * tile


def _row_multiple(tiles: HeadTiles, interpret: Any) -> int:
    """Tokens are padded to a multiple of it: whole tiles in every kernel, clusters of them on a GPU."""
    configs = tiles.forward, tiles.logit_gradient, tiles.d_hidden
    rows = [config.rows * (config.cluster if interpret is None else 1) for config in configs]
    return math.lcm(*rows, tiles.d_weight.depth)


def _pad(x: Array, multiple: int, fill: float | int) -> Array:
    extra = -x.shape[0] % multiple
    return jnp.pad(x, [(0, extra)] + [(0, 0)] * (x.ndim - 1), constant_values=fill) if extra else x


def _operands(hidden: Array, bias: Array | None, targets: LocalTargets, rows: int) -> tuple:
    padded = _pad(hidden.astype(jnp.bfloat16), rows, 0)
    return padded, None if bias is None else bias.astype(jnp.float32), _pad(targets.column, rows, -1)


def fold_tiles(partials: Float[Array, "tiles 4 tokens"], column: Array, with_entropy: bool) -> TileStats:
    """Statistics of all tiles together, per token."""
    maxima, sums, shifted, target = (partials[:, place] for place in range(4))
    maximum = jnp.max(maxima, axis=0)
    distance = maxima - maximum[None, :]
    factor = jnp.exp(distance)
    total = jnp.sum(factor * sums, axis=0)
    weighted = jnp.sum(factor * (shifted + distance * sums), axis=0) if with_entropy else None
    return TileStats(maximum, total, weighted, jnp.sum(target, axis=0), (column >= 0).astype(jnp.float32))


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _log_probs(
    hidden: Array, weight: Array, bias: Array | None, targets: LocalTargets, options: HeadOptions, engine: HopperEngine
) -> TokenLogProbs:
    return _forward(hidden, weight, bias, targets, options, engine)[0]


def _forward(
    hidden: Array, weight: Array, bias: Array | None, targets: LocalTargets, options: HeadOptions, engine: HopperEngine
):
    tokens, config = hidden.shape[0], engine._tiles(weight).forward
    axes = union_of_varying_axes(hidden, weight)
    # Statistics take 16 bytes a token and vocabulary tile: many tokens go block by block.
    blocks = -(-tokens * -(-weight.shape[0] // config.columns) * 16 // STATISTICS_BYTES)
    multiple = _row_multiple(engine._tiles(weight), engine.interpret)
    block = -(-tokens // (blocks * multiple)) * multiple
    padded, bias_operand, column = _operands(hidden, bias, targets, blocks * block)

    def block_step(operands):
        hidden, column = operands
        partials = forward_statistics(
            hidden, weight, bias_operand, column, targets.width, options, config, engine._blocks(), engine.interpret
        )
        return fold_tiles(partials, column, options.with_entropy)

    if blocks == 1:
        local = block_step((padded, column))
    else:
        local = lax.map(block_step, (padded.reshape(blocks, block, -1), column.reshape(blocks, block)))
    local = jax.tree.map(lambda x: vary_over(x.reshape(-1)[:tokens], axes), local)
    stats = all_reduce(local, options.axis_name)
    result, normaliser = finish(stats, targets.mask, options.vocab_size, targets.poison)
    return result, (hidden, weight, bias, targets, normaliser)


def _backward(options: HeadOptions, engine: HopperEngine, residuals: tuple, g: TokenLogProbs):
    hidden, weight, bias, targets, normaliser = residuals
    config = engine._tiles(weight).logit_gradient
    multiple = _row_multiple(engine._tiles(weight), engine.interpret)
    axes = union_of_varying_axes(hidden, weight)
    padded, bias_operand, column = _operands(hidden, bias, targets, multiple)
    (tokens, hidden_size), vocab = padded.shape, weight.shape[0]
    g_log_probs, g_entropy = mask_cotangents(g, targets)
    rows = row_scalars(normaliser, g_log_probs, g_entropy, targets.column, options)
    # Padding tokens have all scalars 0: dz = exp2(0) * 0.
    rows = type(rows)(*(_pad(x, multiple, 0) for x in rows))._replace(target=column)
    chunk = engine._chunk(tokens, hidden_size, vocab, config.columns)
    chunks = -(-vocab // chunk)
    if bias is not None:
        bias_operand = jnp.pad(bias_operand, (0, chunks * chunk - vocab))
    num_sms, interpret, tiles = engine._blocks(), engine.interpret, engine._tiles(weight)
    # Whole tiles of columns: the accumulator is read by plain loads, which must not run past the end of a row.
    d_hidden = jax.new_ref(jnp.zeros((tokens, hidden_size + -hidden_size % tiles.d_hidden.columns), jnp.float32))
    d_weight = jax.new_ref(uninitialised(weight.shape, weight.dtype, interpret))

    def chunk_step(index, d_bias):
        gradient = chunk_gradient(
            padded, weight, bias_operand, rows, targets.width, index, chunk, options, config, num_sms, interpret
        )
        add_hidden_gradient(d_hidden, gradient, weight, index, tiles.d_hidden, num_sms, interpret)
        write_weight_gradient(d_weight, gradient, padded, index, tiles.d_weight, num_sms, interpret)
        if bias is None:
            return None
        return d_bias.at[index].set(jnp.sum(gradient, axis=0, dtype=jnp.float32))

    d_bias = None if bias is None else jnp.zeros((chunks, chunk), jnp.float32)
    d_bias = lax.fori_loop(0, chunks, chunk_step, d_bias)
    if bias is not None:
        d_bias = vary_over(d_bias.reshape(-1)[:vocab].astype(bias.dtype), axes)
    d_hidden = vary_over(jax.freeze(d_hidden)[: hidden.shape[0], :hidden_size].astype(hidden.dtype), axes)
    return d_hidden, vary_over(jax.freeze(d_weight), axes), d_bias, None


_log_probs.defvjp(_forward, _backward)
