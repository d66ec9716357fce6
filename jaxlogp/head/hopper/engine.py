"""Engine ``hopper``: Pallas kernels on Mosaic GPU for NVIDIA Hopper (compute capability 9), logits never stored.

Forward: one product whose epilogue leaves four numbers per token and vocabulary tile. Backward, by vocabulary chunks: the
product again, turned into dz [tokens, chunk] in bf16, then dH += dz · W_chunk in fp32 and dW_chunk = dzᵀ · H, which is
complete and rounded once.

Tokens whose mask is False are moved after the others and skipped by every product, whole row tiles at a time.

Log-probs and entropies are bitwise the same run to run, in every program (with or without the backward, plain or inside of
``shard_map``), in every batch and at every place in it, and for every number of vocabulary shards whose first rows are
multiples of the tile's columns (256), as those of ``VocabShards.aligned`` are: see :mod:`jaxlogp.head.fold`. A row of
the hidden gradient does not depend on the other rows nor on how many there are: vocabulary chunks have a width that
depends on V alone. It does depend on the shards, whose contributions a float psum adds; a weight gradient depends on the
batch, over which it sums.

With a gradient filter the forward's tile maxima decide which blocks of dz count, and all three kernels of the backward walk
over lists of them (:mod:`jaxlogp.head.hopper.work_lists`); a row of the hidden gradient then does depend on the rows that
share its block.

The weight is read, and its gradient written, as it lies, [V, H] or [H, V]: products take either operand from either side.
Only the filter wants [V, H]: its work lists for dW name blocks of the vocabulary as rows.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxlogp._mosaic_gpu import why_not_available
from jaxlogp._reduce import WeightedSum
from jaxlogp._stats import Normaliser, TokenLogProbs
from jaxlogp.head.call import HeadCall, HeadGradients
from jaxlogp.head.engine import Engine, LossCotangents
from jaxlogp.head.fold import MOST_TILES
from jaxlogp.head.hopper.gradients import counting_blocks, head_gradients
from jaxlogp.head.hopper.one_pass import values_and_gradients
from jaxlogp.head.hopper.settings import HopperSettings, row_multiple, whole_rows
from jaxlogp.head.hopper.values import KeptStatistics, head_values
from jaxlogp.head.row_scalars import row_scalars

# Rows of 16 bytes for the copy engine; where columns are the minor dimension of the weight, whole swizzled lines.
COLUMNS_MULTIPLE = {"vh": 8, "hv": 64}


@dataclasses.dataclass(frozen=True)
class HopperEngine(HopperSettings, Engine):
    """Runs Mosaic GPU kernels on NVIDIA Hopper.

    Attributes:
        tiles: tile shapes; None for the table's entry for the hidden size and the device, or smaller ones with a filter.
        chunk: vocabulary columns per chunk of the backward, a multiple of 256; None for chunks of equal width of at most
            26624.
        interpret: whether to run the kernels on the CPU (for tests) instead of compiling them.
        num_sms: number of persistent blocks; None for the number of SMs of the device.
        gradient_filter: None, or the rule by which blocks of the gradient are skipped: 128 tokens times 256 columns unless
            ``tiles`` are given (64 tokens when interpreted).
        check_device: whether to refuse calls if the default device is no Hopper GPU; False to lower for another machine.
    """

    name = "hopper"
    masks_hidden = True

    def why_not(self, call: HeadCall) -> str | None:
        """Checks the device, then the installed JAX, then dtypes and sizes that the kernels do not take."""
        return self._why_not_here() or why_not_available() or self._why_not_operands(call)

    def _why_not_here(self) -> str | None:
        if not self.check_device or self.interpret is not None:
            return None
        device = jax.devices()[0]
        if device.platform != "gpu":
            return f"it needs an NVIDIA Hopper GPU, the default device is {device.platform}"
        capability = str(getattr(device, "compute_capability", "unknown"))
        if capability != "9.0":
            return f"it needs compute capability 9.0 (Hopper), {device.device_kind} has {capability}"
        return None

    def _why_not_operands(self, call: HeadCall) -> str | None:
        hidden, weight = call.hidden, call.weight
        if call.weight_layout != "vh" and self.gradient_filter is not None:
            return "its gradient filter takes a weight [V, H], not [H, V]"
        if weight.dtype != jnp.bfloat16:
            return f"it needs a bfloat16 weight, got {weight.dtype}"
        if call.spec.fp32_head and hidden.dtype != jnp.bfloat16:
            return f"fp32_head needs {hidden.dtype} operands, the kernels multiply bfloat16"
        forward = self.head_tiles(hidden.shape[-1]).forward
        multiple = COLUMNS_MULTIPLE[call.weight_layout]
        if call.num_columns % multiple:
            return f"it needs a number of vocabulary columns that is a multiple of {multiple}, got {call.num_columns}"
        if hidden.shape[-1] % forward.depth:
            return f"it needs a hidden size that is a multiple of {forward.depth}, got {hidden.shape[-1]}"
        most = MOST_TILES * forward.columns
        return f"it needs a vocabulary of at most {most}, got {call.vocab_size}" if call.vocab_size > most else None

    def forward(self, call: HeadCall) -> tuple[TokenLogProbs, KeptStatistics]:
        """Runs one product, with hidden cast to bf16."""
        return head_values(call, self)

    def backward(self, call: HeadCall, kept: KeptStatistics, g: TokenLogProbs) -> HeadGradients:
        """Computes dz by vocabulary chunks, and the two products after it."""
        scalars = row_scalars(kept.normaliser, g.log_probs, g.entropy, call.targets.column, call.spec)
        blocks = None if kept.peaks is None else counting_blocks(call, self, kept, g)
        return head_gradients(call, self, scalars, g.entropy is not None, blocks)

    def why_not_one_pass(self, call: HeadCall, entropy_cotangent: bool) -> str | None:
        """Refuses a filter or a soft cap."""
        del entropy_cotangent
        if self.gradient_filter is not None:
            return "its gradient filter needs the maxima of all tiles first"
        if call.spec.softcap is not None:
            return "it keeps exponentials instead of logits, from which the slope of a soft cap is too coarse"
        return None

    def one_pass(
        self, call: HeadCall, cotangents: LossCotangents, tokens: Any, old_log_probs: Float[Array, " tokens"] | None
    ) -> tuple[TokenLogProbs, HeadGradients]:
        """Runs :mod:`jaxlogp.head.hopper.one_pass`."""
        return values_and_gradients(call, self, cotangents, tokens, old_log_probs)

    def why_not_known_lse(self, call: HeadCall) -> str | None:
        """Refuses a gradient filter."""
        del call
        return None if self.gradient_filter is None else "its gradient filter needs the maxima of all tiles first"

    def backward_of_lse(self, call: HeadCall, lse: Float[Array, " tokens"], g: TokenLogProbs) -> HeadGradients:
        """Runs the backward alone, with lse in place of the largest logit and 1 as the sum of exponentials."""
        return self.backward(call, KeptStatistics(Normaliser(lse, jnp.zeros_like(lse), None), None), g)

    def skipped_tiles(self, call: HeadCall) -> WeightedSum:
        """Counts the blocks of this shard that the backward skips, and those that it would compute without a filter.

        Every token of the mask counts as having a cotangent; blocks of masked tokens alone are never computed.
        """
        _, kept = self.forward(call)
        mask = call.targets.mask
        counting = counting_blocks(call, self, kept, TokenLogProbs(mask.astype(jnp.float32), None))
        tokens = row_multiple(self.head_tiles(call.hidden.shape[-1]), self.interpret)
        live = whole_rows(jnp.sum(mask, dtype=jnp.int32), tokens) // tokens
        total = counting.shape[0] * live
        return WeightedSum((total - jnp.sum(counting, dtype=jnp.int32)).astype(jnp.float32), total)
