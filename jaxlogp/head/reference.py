"""Engine ``reference``: materializes the logits of all tokens. Simple, but memory-hungry."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxlogp._stats import Normaliser, TokenLogProbs, all_reduce, finish, logit_gradient, tile_stats
from jaxlogp.head.call import HeadCall, HeadGradients, HeadWeight, weight_gradient
from jaxlogp.head.engine import Engine
from jaxlogp.head.projection import HeadSpec, dot, finish_logits, product_gradient


class _Kept(NamedTuple):
    """What the backward needs: the logits of all tokens, and their normaliser."""

    logits: Float[Array, "tokens vocab"]
    normaliser: Normaliser


@dataclasses.dataclass(frozen=True)
class ReferenceEngine(Engine):
    """Materializes [tokens, V] fp32 logits in the forward and their gradient in the backward."""

    name = "reference"

    def why_not_second_derivative(self) -> str | None:
        """Returns None: every step is plain JAX."""
        return None

    def forward(self, call: HeadCall) -> tuple[TokenLogProbs, _Kept]:
        """Computes log-probs, entropy and lse from stored logits."""
        logits = materialised_logits(call.hidden, call.weight, call.bias, call.spec, call.weight_layout)
        local = tile_stats(logits, call.targets.column, _valid(call), call.with_entropy)
        stats, targets = all_reduce(local, call.axis_name, call.targets.codes), call.targets
        values, normaliser = finish(stats, targets.mask, call.vocab_size, targets.invalid)
        return values, _Kept(logits, normaliser)

    def backward(self, call: HeadCall, kept: _Kept, g: TokenLogProbs) -> HeadGradients:
        """Computes three products over all tokens and columns at once."""
        column, dtype = call.targets.column, call.operand_dtype
        gradient = logit_gradient(kept.logits, column, _valid(call), kept.normaliser, g.log_probs, g.entropy)
        gradient = product_gradient(gradient, kept.logits, call.spec)
        d_bias = None if call.bias is None else jnp.sum(gradient, axis=0)
        rounded = gradient.astype(dtype)
        d_hidden = dot(rounded, call.weight.astype(dtype), contract=(1, call.vocab_dim)).astype(
            call.hidden_gradient_dtype
        )
        d_weight = weight_gradient(call, rounded, call.hidden.astype(dtype)).astype(call.weight_gradient_dtype)
        return HeadGradients(d_hidden, d_weight, d_bias)


def materialised_logits(
    hidden: Float[Array, "tokens hidden"],
    weight: HeadWeight,
    bias: Float[Array, " vocab"] | None,
    spec: HeadSpec,
    weight_layout: str = "vh",
) -> Float[Array, "tokens vocab"]:
    """Computes the final fp32 logits."""
    dtype = spec.operand_dtype(weight)
    contract = (1, 1 if weight_layout == "vh" else 0)
    return finish_logits(dot(hidden.astype(dtype), weight.astype(dtype), contract), bias, spec)


def _valid(call: HeadCall) -> Bool[Array, " vocab"]:
    return jnp.arange(call.num_columns, dtype=jnp.int32) < call.targets.width
