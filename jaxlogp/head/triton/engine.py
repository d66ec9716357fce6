"""Engine ``triton``: Triton kernels through jax-triton, for NVIDIA GPUs of compute capability 8 and 9.0; no logits stored.

Forward: one product whose epilogue leaves four numbers a token and vocabulary tile; they are folded exactly, as integers
(:mod:`jaxlogp.head.fold`). Backward: :mod:`jaxlogp.head.triton.gradients`.

Operands enter the products in the weight's dtype, bf16 or fp16, and accumulate in fp32; dz is rounded to that dtype, after
the one-hot was subtracted in fp32. fp16 has few exponents: scaling the loss so that dz does not vanish is the caller's
part, as in any fp16 training.

Tokens whose mask is False are moved behind the others and left out of the forward's products, whole row tiles at a time;
so are tokens without a cotangent in the backward, by quarters of the rows.

The kernels have no atomics, split no sum over programs and choose nothing by timing: log-probs and entropies are bitwise
the same run to run, in every program, in every batch and at every place in it, and for every number of vocabulary shards
whose first rows are multiples of the tile's columns. Gradients are the same run to run of one compiled program; how XLA
sums in its products depends on their shapes, hence on the batch.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxlogp._compat import union_of_varying_axes
from jaxlogp.head.fold import MOST_TILES, block_tokens, fold_blocks
from jaxlogp.head.live_rows import live_rows
from jaxlogp.head.projection import HeadOptions
from jaxlogp.head.row_scalars import row_scalars
from jaxlogp.head.triton import launch
from jaxlogp.head.triton.availability import (
    device_capability,
    why_not_capability,
    why_not_device,
    why_not_installed,
)
from jaxlogp.head.triton.gradients import head_gradients
from jaxlogp.head.triton.launch import TileFunctions
from jaxlogp.head.triton.tiles import STATISTICS_BYTES, TABLE, HeadTiles
from jaxlogp.stats import TokenLogProbs
from jaxlogp.targets import LocalTargets, mask_cotangents

DTYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))


@dataclasses.dataclass(frozen=True)
class TritonEngine:
    """Triton kernels for NVIDIA GPUs.

    Attributes:
      tiles: tile shapes; None takes the table's entry for the device.
      window: vocabulary columns a window of the backward; None takes what the table's constants allow.
      capability: compute capability times ten to compile for, whatever the default device is; None asks the device.
      functions: what stands for the kernels where there is no GPU (for tests: :mod:`tests.head.triton_plain`); None
        launches them.
    """

    tiles: HeadTiles | None = None
    window: int | None = None
    capability: int | None = None
    functions: TileFunctions | None = None
    name = "triton"
    reduces_gradients = False
    masks_hidden = True

    def why_not(self, hidden: Any, weight: Any, bias: Any, options: HeadOptions) -> str | None:
        """Why this engine cannot take a call, or None when it can.

        Args:
          hidden: [tokens, H] (or anything with its shape and dtype).
          weight: [V_local, H].
          bias: [V_local] or None.
          options: the options of the call.
        """
        return self._why_not_here() or self._why_not_operands(hidden, weight, options) or self._why_not_imported()

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
          hidden: [tokens, H], cast to the weight's dtype for the product; its gradient comes back in its own dtype.
          weight: bf16 or fp16 [V_local, H].
          bias: [V_local] or None.
          targets: targets as this shard sees them.
          options: static options of the call.

        Returns:
          TokenLogProbs of fp32 [tokens].

        Raises:
          ValueError: the kernels cannot take these operands, or cannot run here; the sentence says why
            (see :meth:`why_not`).
        """
        reason = self.why_not(hidden, weight, bias, options)
        if reason is not None:
            raise ValueError(f"engine: expected operands and a device that 'triton' takes, but {reason}")
        return _log_probs(hidden, weight, bias, targets, options, self)

    def _why_not_operands(self, hidden: Any, weight: Any, options: HeadOptions) -> str | None:
        if weight.dtype not in DTYPES:
            return f"it needs a bfloat16 or float16 weight, got {weight.dtype} (the kernels multiply 16-bit operands)"
        if options.fp32_head and hidden.dtype != weight.dtype:
            return f"fp32_head needs {hidden.dtype} x {weight.dtype} in fp32, the kernels multiply 16-bit operands"
        if weight.shape[1] % 8:
            return f"it needs a hidden size that is a multiple of 8, got {weight.shape[1]}"
        most = MOST_TILES * self.head_tiles().forward.columns
        if options.vocab_size > most:
            return f"it needs a vocabulary of at most {most}, got {options.vocab_size}"
        return None

    def _why_not_here(self) -> str | None:
        if self.functions is not None:
            return None
        return why_not_device() if self.capability is None else why_not_capability(self.capability)

    def _why_not_imported(self) -> str | None:
        return None if self.functions is not None else why_not_installed()

    def head_tiles(self) -> HeadTiles:
        """The tile shapes of a call."""
        if self.tiles is not None:
            return self.tiles
        capability = device_capability() if self.capability is None else self.capability
        return TABLE.get(capability, HeadTiles())

    def row_multiple(self) -> int:
        """Tokens are padded to a multiple of it: whole tiles in both kernels."""
        tiles = self.head_tiles()
        return math.lcm(tiles.forward.rows, tiles.gradient.rows)


def _functions(engine: TritonEngine) -> TileFunctions:
    return launch if engine.functions is None else engine.functions


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _log_probs(
    hidden: Array, weight: Array, bias: Array | None, targets: LocalTargets, options: HeadOptions, engine: TritonEngine
) -> TokenLogProbs:
    return _forward(hidden, weight, bias, targets, options, engine)[0]


def _forward(
    hidden: Array, weight: Array, bias: Array | None, targets: LocalTargets, options: HeadOptions, engine: TritonEngine
):
    tokens, config = hidden.shape[0], engine.head_tiles().forward
    axes = union_of_varying_axes(hidden, weight)
    # Statistics take 16 bytes a token and vocabulary tile: many tokens go block by block.
    blocks = -(-tokens * -(-weight.shape[0] // config.columns) * 16 // STATISTICS_BYTES)
    multiple = engine.row_multiple()
    block = block_tokens(tokens, blocks, multiple)
    rows = live_rows(targets.mask, -(-tokens // block) * block, options.all_live)
    packed = rows.pack(hidden.astype(weight.dtype), 0)
    bias_operand = None if bias is None else bias.astype(jnp.float32)

    def statistics(start, column, live):
        bounds = jnp.stack([jnp.zeros_like(live), targets.width, live]).astype(jnp.int32)
        here = lax.dynamic_slice_in_dim(packed, start, block)
        return _functions(engine).forward_statistics(
            here, weight, bias_operand, column, bounds, options, config, engine.capability
        )

    result, normaliser, _ = fold_blocks(statistics, rows, block, targets, options, axes)
    return result, (hidden, weight, bias, targets, normaliser)


def _backward(options: HeadOptions, engine: TritonEngine, residuals: tuple, g: TokenLogProbs):
    hidden, weight, bias, targets, normaliser = residuals
    g_log_probs, g_entropy = mask_cotangents(g, targets)
    scalars = row_scalars(normaliser, g_log_probs, g_entropy, targets.column, options)
    config, multiple, capability = engine.head_tiles().gradient, engine.row_multiple(), engine.capability
    # Not from the scalars, where a row of NaN logits has 0 NaN. A cotangent of NaN counts: a target is out of range there.
    wanted = g_log_probs != 0.0 if g_entropy is None else (g_log_probs != 0.0) | (g_entropy != 0.0)
    operands = hidden, weight, bias, targets, scalars, wanted, options
    return *head_gradients(*operands, _functions(engine), config, multiple, engine.window, capability), None


_log_probs.defvjp(_forward, _backward)
