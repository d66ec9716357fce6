"""Engine of log-probs on a support whose bits repeat: its sums are those of `jaxlogp.head.support.kernels`."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxlogp._stats import TileStats
from jaxlogp.head.call import HeadCall
from jaxlogp.head.support.engine import SupportHead
from jaxlogp.head.triton.availability import device_capability

LEAST_CAPABILITY = 80
# Numbers of 16 bits in one load of 16 bytes.
LOADED = 8


@dataclasses.dataclass(frozen=True)
class SupportKernelEngine(SupportHead):
    """Sums by Triton kernels through Pallas, on NVIDIA GPUs of compute capability 8.0 and more, for a weight [V, H].

    The kernels add in an order that the support alone decides, without atomics: values and gradients of one compiled
    program have the same bits in every call. The gradient of the weight is written once, in its dtype.

    Attributes:
        interpret: whether to run the kernels in Pallas' interpreter, on any device.
    """

    interpret: bool = False
    name = "support_kernels"

    def why_not(self, call: HeadCall) -> str | None:
        """Checks the device, then the layout and sizes of the operands."""
        return self._why_not_here() or self._why_not_operands(call)

    def _why_not_here(self) -> str | None:
        if self.interpret:
            return None
        device, capability = jax.devices()[0], device_capability()
        if capability is not None and capability >= LEAST_CAPABILITY:
            return None
        seen = f"{device.platform} ({device.device_kind})"
        return f"it needs an NVIDIA GPU of compute capability 8.0 or more, the default device is {seen}"

    def _why_not_operands(self, call: HeadCall) -> str | None:
        if call.weight_layout != "vh":
            return "it needs a weight [V, H], not [H, V]"
        width = call.hidden.shape[-1]
        return None if width % LOADED == 0 else f"it needs a hidden size that is a multiple of {LOADED}, got {width}"

    def _statistics(self, call: HeadCall, logits: Float[Array, " capacity"]) -> TileStats:
        from jaxlogp.head.support.kernels import token_statistics

        row, runs = call.support.row, call.support.runs
        return token_statistics(logits, row, call.targets.column, runs, call.with_entropy, self.interpret)

    def _hidden_gradient(self, call: HeadCall, gradient: Float[Array, " capacity"]) -> Float[Array, "tokens hidden"]:
        from jaxlogp.head.support.kernels import hidden_gradient

        row, runs = call.support.row, call.support.runs
        dtype = call.hidden_gradient_dtype
        return hidden_gradient(call.weight, row, gradient, runs, call.targets.invalid, dtype, self.interpret)

    def _weight_gradients(
        self, call: HeadCall, gradient: Float[Array, " capacity"]
    ) -> tuple[Float[Array, "vocab hidden"], Float[Array, " vocab"] | None]:
        from jaxlogp.head.support.kernels import find_runs, weight_gradient

        row, order = _order_by_row(call.support.row)
        token, dz = call.support.token[order], gradient[order]
        runs = find_runs(row, call.num_columns)
        hidden, dtype = call.hidden.astype(call.operand_dtype), call.weight_gradient_dtype
        d_weight = weight_gradient(hidden, token, dz, row, runs, dtype, self.interpret)
        if call.bias is None:
            return d_weight, None
        # The bias is the weight of a hidden state of ones.
        ones = jnp.ones((hidden.shape[0], LOADED), jnp.float32) + jnp.zeros_like(gradient[0])
        return d_weight, weight_gradient(ones, token, dz, row, runs, jnp.float32, self.interpret)[:, 0]


def _order_by_row(row: Int[Array, " capacity"]) -> tuple[Int[Array, " capacity"], Int[Array, " capacity"]]:
    """Returns the rows in order, and the place that each came from, ascending for one row."""
    # XLA has a radix sort on GPUs for unsigned keys with one 32-bit value.
    index = jnp.arange(row.shape[0], dtype=jnp.int32) + jnp.zeros_like(row[0])
    ordered, order = lax.sort((row.astype(jnp.uint32), index), num_keys=1, is_stable=True)
    return ordered.astype(jnp.int32), order
