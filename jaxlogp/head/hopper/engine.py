"""Engine ``hopper``: Pallas kernels on Mosaic GPU for NVIDIA Hopper (compute capability 9), logits never stored.

Forward: one product whose epilogue leaves four numbers a token and vocabulary tile. Backward, by vocabulary chunks: the
product again, turned into dz [tokens, chunk] in bf16, then dH += dz · W_chunk in fp32 and dW_chunk = dzᵀ · H, which is
complete and rounded once.

Tokens whose mask is False are moved behind the others and left out of every product, whole row tiles at a time.

Log-probs and entropies are bitwise the same run to run, in every program (with or without the backward, plain or inside of
``shard_map``), in every batch and at every place in it, and for every number of vocabulary shards whose first rows are
multiples of the tile's columns (256): see :mod:`jaxlogp.head.fold`. A row of the hidden gradient does not depend on
the other rows nor on how many there are: vocabulary chunks have a width that depends on V alone. It does depend on the
shards, whose contributions a float psum adds; a weight gradient depends on the batch, over which it sums.

With a gradient filter the forward's tile maxima decide which blocks of dz count, and all three kernels of the backward walk
over lists of them (:mod:`jaxlogp.head.hopper.work_lists`); a row of the hidden gradient then does depend on the rows that
share its block.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxlogp._compat import union_of_varying_axes, vary_over
from jaxlogp.errors import require
from jaxlogp.head.fold import MOST_TILES, block_tokens, fold_blocks
from jaxlogp.head.gradient_filter import GradientFilter, check_filter, kept_blocks
from jaxlogp.head.hopper._pallas_compat import why_not_available
from jaxlogp.head.hopper.forward import forward_statistics
from jaxlogp.head.hopper.gradient_products import (
    add_hidden_gradient,
    finish_hidden_gradient,
    hidden_gradient_sums,
    uninitialised,
    write_weight_gradient,
)
from jaxlogp.head.hopper.logit_gradient import chunk_gradient
from jaxlogp.head.hopper.tiles import FILTERED, HeadTiles, head_tiles
from jaxlogp.head.hopper.work_lists import block_shape, gradient_plan, group_rows, product_plan
from jaxlogp.head.live_rows import live_rows, select_live
from jaxlogp.head.projection import HeadOptions
from jaxlogp.head.row_scalars import RowScalars, row_scalars
from jaxlogp.reduce import WeightedSum
from jaxlogp.stats import Normaliser, TokenLogProbs
from jaxlogp.targets import LocalTargets, mask_cotangents

# Bytes that the tokens of the forward may take at a time: their tile statistics, and their hidden states where they are
# packed; and that a block of them may take where that is too much for all (a loop over blocks holds more than one).
WHOLE_BYTES, BLOCK_BYTES = 88 * 2**20, 56 * 2**20
# Most vocabulary columns of one chunk of dz; constant, so that the order in which dH is summed is. Takes 416 MiB at 8192
# tokens, and grows with them.
CHUNK_COLUMNS = 26624


@dataclasses.dataclass(frozen=True)
class HopperEngine:
    """Mosaic GPU kernels for Hopper.

    Attributes:
      tiles: tile shapes; None takes the table's entry for the hidden size and the device, or smaller ones for a filter.
      chunk: vocabulary columns a chunk of the backward, a multiple of 256; None takes at most 26624, chunks of equal width.
      interpret: runs the kernels on the CPU (for tests) instead of compiling them.
      num_sms: persistent blocks; None asks the device.
      gradient_filter: None, or which blocks of the gradient are left out: 128 tokens times 256 columns unless ``tiles``
        are given (64 tokens when interpreted).
    """

    tiles: HeadTiles | None = None
    chunk: int | None = None
    interpret: Any = None
    num_sms: int | None = None
    gradient_filter: GradientFilter | None = None
    name = "hopper"
    reduces_gradients = False
    masks_hidden = True

    def __post_init__(self) -> None:
        """Refuses what is no gradient filter."""
        check_filter(self.gradient_filter)

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
        tiles = self.head_tiles(weight)
        if weight.shape[0] % 8:
            return f"it needs a number of weight rows that is a multiple of 8, got {weight.shape[0]}"
        if hidden.shape[-1] % tiles.forward.depth:
            return f"it needs a hidden size that is a multiple of {tiles.forward.depth}, got {hidden.shape[-1]}"
        most = MOST_TILES * tiles.forward.columns
        if options.vocab_size > most:
            return f"it needs a vocabulary of at most {most}, got {options.vocab_size}"
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
        self._require_operands(hidden, weight, bias, options)
        return _log_probs(hidden, weight, bias, targets, options, self)

    def skipped_tiles(
        self,
        hidden: Float[Array, "tokens hidden"],
        weight: Float[Array, "vocab hidden"],
        bias: Float[Array, " vocab"] | None,
        targets: LocalTargets,
        options: HeadOptions,
    ) -> WeightedSum:
        """Blocks of this shard that the backward leaves out, and all that it would compute without a filter.

        Every token of the mask counts as having a cotangent; blocks of masked tokens alone are never computed.

        Raises:
          ValueError: the engine has no gradient filter, or the kernels cannot take these operands.
        """
        require(self.gradient_filter is not None, "engine", "an engine with a gradient_filter", repr(self))
        self._require_operands(hidden, weight, bias, options)
        _, normaliser, peaks = _statistics(hidden, weight, bias, targets, options, self)
        kept = _kept(self, weight, peaks, targets, normaliser, targets.mask.astype(jnp.float32), None, options.all_live)
        tokens = row_multiple(self.head_tiles(weight), self.interpret)
        live = whole_rows(jnp.sum(targets.mask, dtype=jnp.int32), tokens) // tokens
        total = kept.shape[0] * live
        return WeightedSum((total - jnp.sum(kept, dtype=jnp.int32)).astype(jnp.float32), total)

    def _require_operands(self, hidden: Array, weight: Array, bias: Array | None, options: HeadOptions) -> None:
        reason = self.why_not(hidden, weight, bias, options, check_device=False)
        if reason is not None:
            raise ValueError(f"engine: expected operands that 'hopper' takes, but {reason}")

    def head_tiles(self, weight: Array) -> HeadTiles:
        """The tile shapes of a call."""
        if self.tiles is not None:
            return self.tiles
        if self.gradient_filter is not None:
            return FILTERED
        return head_tiles(weight.shape[1], jax.devices()[0].device_kind)

    def num_blocks(self) -> int:
        """Persistent blocks of a kernel."""
        if self.num_sms is not None:
            return self.num_sms
        device = jax.devices()[0]
        return 132 if device.platform != "gpu" else int(device.core_count)

    def chunk_columns(self, vocab: int, tiles: HeadTiles) -> int:
        """Vocabulary columns of a chunk of the backward.

        Raises:
          ValueError: ``chunk`` does not cut at tiles of all kernels.
        """
        tile, group = tiles.logit_gradient.columns, group_rows(tiles.d_weight, self.interpret)
        whole = math.lcm(tile, tiles.d_hidden.depth * tiles.d_hidden_parts, group)
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


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _log_probs(
    hidden: Array, weight: Array, bias: Array | None, targets: LocalTargets, options: HeadOptions, engine: HopperEngine
) -> TokenLogProbs:
    return _forward(hidden, weight, bias, targets, options, engine)[0]


def _statistics(
    hidden: Array, weight: Array, bias: Array | None, targets: LocalTargets, options: HeadOptions, engine: HopperEngine
) -> tuple[TokenLogProbs, Normaliser, Array | None]:
    """Values, normaliser and, for a gradient filter, the largest logit of every tile and packed token [tiles, padded]."""
    tokens, config = hidden.shape[0], engine.head_tiles(weight).forward
    axes = union_of_varying_axes(hidden, weight)
    # Statistics take 16 bytes a token and vocabulary tile: many tokens go block by block.
    per_token = -(-weight.shape[0] // config.columns) * 16 + (0 if options.all_live else 2 * hidden.shape[1])
    blocks = 1 if tokens * per_token <= WHOLE_BYTES else -(-tokens * per_token // BLOCK_BYTES)
    multiple = row_multiple(engine.head_tiles(weight), engine.interpret)
    block = block_tokens(tokens, blocks, multiple)
    rows = live_rows(targets.mask, -(-tokens // block) * block, options.all_live)
    narrow = hidden.astype(jnp.bfloat16)
    if options.all_live:
        # Filled up once, and not in every block.
        narrow = rows.pack(narrow, 0)
    bias_operand = None if bias is None else bias.astype(jnp.float32)

    def statistics(start, column, live):
        return forward_statistics(
            rows.pack_block(narrow, 0, start, block),
            weight,
            bias_operand,
            column,
            targets.width,
            options,
            config,
            engine.num_blocks(),
            engine.interpret,
            live,
        )

    keep_maxima = engine.gradient_filter is not None
    return fold_blocks(statistics, rows, block, targets, options, axes, keep_maxima)


def _forward(
    hidden: Array, weight: Array, bias: Array | None, targets: LocalTargets, options: HeadOptions, engine: HopperEngine
):
    result, normaliser, peaks = _statistics(hidden, weight, bias, targets, options, engine)
    return result, (hidden, weight, bias, targets, normaliser, peaks)


def _kept(
    engine: HopperEngine,
    weight: Array,
    peaks: Array,
    targets: LocalTargets,
    normaliser: Normaliser,
    g_log_probs: Array,
    g_entropy: Array | None,
    all_live: bool,
) -> Array:
    """Which blocks [tiles, blocks of packed tokens] of dz count."""
    tiles = engine.head_tiles(weight)
    shape = block_shape(tiles, row_multiple(tiles, engine.interpret), engine.interpret)
    padded = -(-targets.mask.shape[0] // shape.tokens) * shape.tokens
    rows = live_rows(targets.mask, padded, all_live)

    def pack(x, fill):
        return rows.pack(x, fill).reshape(-1, shape.tokens)

    # The forward's tiles may be narrower than a block.
    narrow = shape.columns // tiles.forward.columns
    peaks = jnp.pad(peaks[:, :padded], [(0, -peaks.shape[0] % narrow), (0, 0)], constant_values=-jnp.inf)
    peaks = jnp.max(peaks.reshape(-1, narrow, padded), axis=1).reshape(-1, padded // shape.tokens, shape.tokens)
    normaliser = Normaliser(pack(normaliser.max, 0), pack(normaliser.log_sum_exp, 0), None)
    # What stands behind the last live token, computed or not, has no cotangent.
    cotangents = (None if x is None else pack(jnp.where(targets.mask, x, 0.0), 0) for x in (g_log_probs, g_entropy))
    tile_of_target = pack(targets.column, -1) // shape.columns
    return kept_blocks(engine.gradient_filter, peaks, tile_of_target, normaliser, *cotangents)


def _backward(options: HeadOptions, engine: HopperEngine, residuals: tuple, g: TokenLogProbs):
    hidden, weight, bias, targets, normaliser, peaks = residuals
    g_log_probs, g_entropy = mask_cotangents(g, targets)
    scalars = row_scalars(normaliser, g_log_probs, g_entropy, targets.column, options)
    kept = None
    if peaks is not None:
        kept = _kept(engine, weight, peaks, targets, normaliser, g_log_probs, g_entropy, options.all_live)
    d_hidden, d_weight, d_bias = head_gradients(hidden, weight, bias, targets, scalars, options, engine, kept)
    return d_hidden, d_weight, d_bias, None


class _Plans(NamedTuple):
    """Work lists of the three kernels and the blocks [blocks of tokens, tiles] behind them, of one chunk or of each."""

    gradient: Array | None
    d_hidden: Array | None
    d_weight: Array | None
    kept: Array | None


_NO_PLANS = _Plans(None, None, None, None)


def _plans(kept: Array, tiles: HeadTiles, chunks: int, chunk: int, hidden_size: int, interpret: Any) -> _Plans:
    """The work lists of every chunk, stacked: made at once, because each is little work."""
    shape = block_shape(tiles, row_multiple(tiles, interpret), interpret)
    per_chunk = chunk // shape.columns
    kept = jnp.pad(kept, [(0, chunks * per_chunk - kept.shape[0]), (0, 0)])

    def column_tiles(config):
        return -(-hidden_size // config.columns)

    def of_chunk(kept):
        rows = kept.T
        repeats = [
            shape.tokens // group_rows(tiles.d_hidden, interpret),
            shape.columns // group_rows(tiles.d_weight, interpret),
        ]
        return _Plans(
            gradient_plan(rows, shape, tiles.logit_gradient, interpret),
            product_plan(rows, repeats[0], column_tiles(tiles.d_hidden), tiles.d_hidden, interpret),
            product_plan(kept, repeats[1], column_tiles(tiles.d_weight), tiles.d_weight, interpret),
            rows,
        )

    return jax.vmap(of_chunk)(kept.reshape(chunks, per_chunk, -1))


def head_gradients(
    hidden: Float[Array, "tokens hidden"],
    weight: Float[Array, "vocab hidden"],
    bias: Float[Array, " vocab"] | None,
    targets: LocalTargets,
    scalars: RowScalars,
    options: HeadOptions,
    engine: HopperEngine,
    kept: Bool[Array, "tiles blocks"] | None = None,
) -> tuple[Array, Array, Array | None]:
    """Gradients of hidden, weight and bias from the scalars of dz: three products, by vocabulary chunks.

    Args:
      hidden: [tokens, H].
      weight: bf16 [V_local, H].
      bias: [V_local] or None.
      targets: targets as this shard sees them; tokens whose mask is False are left out and get exact zeros.
      scalars: what dz is made of, a value per token.
      options: static options of the call.
      engine: tile shapes and chunk width.
      kept: which blocks of dz count; None means all.
    """
    tiles, num_sms, interpret = engine.head_tiles(weight), engine.num_blocks(), engine.interpret
    config, multiple = tiles.logit_gradient, row_multiple(tiles, interpret)
    axes = union_of_varying_axes(hidden, weight)
    (tokens, hidden_size), vocab = hidden.shape, weight.shape[0]
    padded = -(-tokens // multiple) * multiple
    rows = live_rows(targets.mask, padded, options.all_live)
    packed, scalars = rows.pack(hidden.astype(jnp.bfloat16), 0), scalars.pack(rows)
    live = whole_rows(rows.count, multiple)
    chunk = engine.chunk_columns(vocab, tiles)
    chunks = -(-vocab // chunk)
    bias_operand = None if bias is None else jnp.pad(bias.astype(jnp.float32), (0, chunks * chunk - vocab))
    # Work lists name output tiles of one part.
    parts = tiles.d_hidden_parts if kept is None else 1
    d_hidden = hidden_gradient_sums(padded, hidden_size, tiles.d_hidden, parts)
    if kept is None:
        d_weight = jax.new_ref(uninitialised(weight.shape, weight.dtype, interpret))
    else:
        # Vocabulary tiles of which no block counts are never written.
        d_weight = jax.new_ref(jnp.zeros(weight.shape, weight.dtype))
        plans = _plans(kept, tiles, chunks, chunk, hidden_size, interpret)

    def chunk_step(index, d_bias):
        plan = _NO_PLANS if kept is None else _Plans(*(x[index] for x in plans))
        shape = None if kept is None else block_shape(tiles, multiple, interpret)
        gradient = chunk_gradient(
            packed,
            weight,
            bias_operand,
            scalars,
            targets.width,
            index,
            chunk,
            options,
            config,
            num_sms,
            interpret,
            live,
            plan.gradient,
        )
        add_hidden_gradient(
            d_hidden,
            gradient,
            weight,
            index,
            tiles.d_hidden,
            num_sms,
            interpret,
            live,
            plan=plan.d_hidden,
            plan_steps=None if shape is None else shape.columns // tiles.d_hidden.depth,
            parts=parts,
        )
        write_weight_gradient(
            d_weight,
            gradient,
            packed,
            index,
            tiles.d_weight,
            num_sms,
            interpret,
            live,
            plan=plan.d_weight,
            plan_steps=None if shape is None else shape.tokens // tiles.d_weight.depth,
        )
        if bias is None:
            return None
        if shape is not None:
            written = jnp.repeat(jnp.repeat(plan.kept, shape.tokens, axis=0), shape.columns, axis=1)
            gradient = jnp.where(written, gradient, jnp.zeros((), gradient.dtype))
        return d_bias.at[index].set(jnp.sum(select_live(gradient, live), axis=0, dtype=jnp.float32))

    d_bias = None if bias is None else vary_over(jnp.zeros((chunks, chunk), jnp.float32), axes)
    d_bias = lax.fori_loop(0, chunks, chunk_step, d_bias)
    if bias is not None:
        d_bias = d_bias.reshape(-1)[:vocab].astype(bias.dtype)
    d_hidden = rows.unpack(finish_hidden_gradient(d_hidden, hidden_size, parts).astype(hidden.dtype))
    return vary_over(d_hidden, axes), vary_over(jax.freeze(d_weight), axes), d_bias


_log_probs.defvjp(_forward, _backward)
