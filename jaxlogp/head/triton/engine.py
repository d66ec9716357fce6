"""Engine ``triton``: Triton kernels through jax-triton, for NVIDIA GPUs of compute capability 8 and 9.0; no logits stored.

Forward: one product whose epilogue writes four numbers per token and vocabulary tile; these are added exactly, as
integers (:mod:`jaxlogp.head.fold`). Backward: :mod:`jaxlogp.head.triton.gradients`.

The weight is read, and its gradient written, as it lies, [V, H] or [H, V]; log-probs and entropies have the same bits
in both, gradients the bits that XLA's products give.

Operands enter the products in the weight's dtype, bf16 or fp16, and accumulate in fp32; dz is rounded to that dtype
after the one-hot is subtracted in fp32. The range of fp16 is small: scaling the loss so that dz does not vanish is up
to the caller, as in any fp16 training.

Tokens whose mask is False are moved after the others and skipped in the forward's products, whole row tiles at a time;
so are tokens without a cotangent in the backward, by quarters of the rows.

The kernels use no atomics, split no sum over programs and choose nothing by timing: log-probs and entropies are bitwise
equal from run to run, in every program, in every batch and at every position in it, and for every number of vocabulary
shards whose first rows are multiples of the tile's columns. Gradients are bitwise equal from run to run of one compiled
program; how XLA sums in its products depends on their shapes, hence on the batch.
"""

import dataclasses
import math

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxlogp._mosaic_gpu import why_not_available
from jaxlogp._stats import Normaliser, TokenLogProbs
from jaxlogp.errors import require
from jaxlogp.head.call import HeadCall, HeadGradients
from jaxlogp.head.engine import Engine
from jaxlogp.head.fold import MOST_TILES, block_tokens, fold_blocks
from jaxlogp.head.live_rows import live_rows
from jaxlogp.head.row_scalars import row_scalars
from jaxlogp.head.triton import launch
from jaxlogp.head.triton.availability import (
    device_capability,
    why_not_capability,
    why_not_device,
    why_not_installed,
)
from jaxlogp.head.triton.gradients import Kernels, head_gradients
from jaxlogp.head.triton.launch import TileFunctions
from jaxlogp.head.triton.operands import Launch, Operands
from jaxlogp.head.triton.tiles import STATISTICS_BYTES, TABLE, WINDOW_MULTIPLE, HeadTiles

DTYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))
# Numbers of 16 bits in one load of 16 bytes: the last dimension of both operands is a multiple of it.
LOADED = 8


@dataclasses.dataclass(frozen=True)
class TritonEngine(Engine):
    """Runs Triton kernels on NVIDIA GPUs.

    Attributes:
        tiles: tile shapes; None for the table's entry for the device.
        window: vocabulary columns per window of the backward, a multiple of 64; None to derive it from the constants of the
            tile table.
        capability: compute capability times ten to compile for, regardless of the default device; None for that of the
            device.
        functions: stand-ins for the kernels without a GPU (for tests: :mod:`tests.head.triton_plain`); None launches the
            kernels.
    """

    tiles: HeadTiles | None = None
    window: int | None = None
    capability: int | None = None
    functions: TileFunctions | None = None
    name = "triton"
    masks_hidden = True

    def __post_init__(self):
        window, multiple = self.window, WINDOW_MULTIPLE
        valid = window is None or (window > 0 and window % multiple == 0)
        require(valid, "window", f"None or a positive multiple of {multiple}", repr(window))

    def why_not(self, call: HeadCall) -> str | None:
        """Checks the device, then the dtypes and sizes, then whether jax-triton can be imported."""
        return self._why_not_here() or self._why_not_operands(call) or self._why_not_imported()

    def why_not_automatic(self, call: HeadCall) -> str | None:
        """Refuses Hopper GPUs where ``hopper``, which is faster, can run, and several GPUs, where it has not been tested."""
        if device_capability() == 90 and why_not_available() is None:
            return "on Hopper GPUs it is used by name only"
        return "it has not been tested over several GPUs; name it to use it" if call.num_shards > 1 else None

    def forward(self, call: HeadCall) -> tuple[TokenLogProbs, Normaliser]:
        """Runs one product, with hidden cast to the weight's dtype."""
        hidden, targets = call.hidden, call.targets
        tokens, config = hidden.shape[0], self.head_tiles().forward
        # Statistics take 16 bytes per token and vocabulary tile: many tokens are processed block by block.
        blocks = -(-tokens * -(-call.num_columns // config.columns) * 16 // STATISTICS_BYTES)
        block = block_tokens(tokens, blocks, self.row_multiple())
        rows = live_rows(targets.mask, -(-tokens // block) * block, call.all_live)
        operands = Operands.of(call, rows.pack(hidden.astype(call.weight.dtype), 0))

        def statistics(start, column, live):
            bounds = jnp.stack([jnp.zeros_like(live), targets.width, live]).astype(jnp.int32)
            here = operands._replace(hidden=lax.dynamic_slice_in_dim(operands.hidden, start, block))
            launched = Launch(config, self.capability)
            return self._functions().forward_statistics(here, column, bounds, call.with_entropy, launched)

        values, normaliser, _ = fold_blocks(call, statistics, rows, block)
        return values, normaliser

    def backward(self, call: HeadCall, kept: Normaliser, g: TokenLogProbs) -> HeadGradients:
        """Runs :mod:`jaxlogp.head.triton.gradients`."""
        scalars = row_scalars(kept, g.log_probs, g.entropy, call.targets.column, call.spec)
        launched = Launch(self.head_tiles().gradient, self.capability)
        kernels = Kernels(self._functions(), launched, g.entropy is not None)
        # Not from the scalars, where a row of NaN logits has 0 * NaN. A NaN cotangent counts: its target is invalid.
        wanted = g.log_probs != 0.0 if g.entropy is None else (g.log_probs != 0.0) | (g.entropy != 0.0)
        return head_gradients(call, scalars, wanted, kernels, self.row_multiple(), self.window)

    def why_not_known_lse(self, call: HeadCall) -> str | None:
        """Returns None: every call can take an lse."""
        del call
        return None

    def backward_of_lse(self, call: HeadCall, lse: Float[Array, " tokens"], g: TokenLogProbs) -> HeadGradients:
        """Runs the backward alone, with lse in place of the largest logit and 1 as the sum of exponentials."""
        return self.backward(call, Normaliser(lse, jnp.zeros_like(lse), None), g)

    def _why_not_operands(self, call: HeadCall) -> str | None:
        hidden, weight = call.hidden, call.weight
        if weight.dtype not in DTYPES:
            return f"it needs a bfloat16 or float16 weight, got {weight.dtype} (the kernels multiply 16-bit operands)"
        if call.spec.fp32_head and hidden.dtype != weight.dtype:
            return f"fp32_head needs {hidden.dtype} x {weight.dtype} in fp32, the kernels multiply 16-bit operands"
        if hidden.shape[-1] % LOADED:
            return f"it needs a hidden size that is a multiple of {LOADED}, got {hidden.shape[-1]}"
        if call.weight_layout == "hv" and call.num_columns % LOADED:
            columns = f"a number of vocabulary columns that is a multiple of {LOADED}"
            return f"it needs, for a weight [H, V], {columns}, got {call.num_columns}"
        most = MOST_TILES * self.head_tiles().forward.columns
        return f"it needs a vocabulary of at most {most}, got {call.vocab_size}" if call.vocab_size > most else None

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
        """The multiple to which tokens are padded: whole tiles in both kernels."""
        tiles = self.head_tiles()
        return math.lcm(tiles.forward.rows, tiles.gradient.rows)

    def _functions(self) -> TileFunctions:
        return launch if self.functions is None else self.functions
