"""Engine ``reference``: the logits of all tokens are materialised. Simple, and as hungry as the programs it replaces."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxlogp.head.projection import HeadOptions, dot, finish_logits, product_gradient
from jaxlogp.stats import TokenLogProbs, all_reduce, finish, logit_gradient, tile_stats
from jaxlogp.targets import LocalTargets, mask_cotangents


@dataclasses.dataclass(frozen=True)
class ReferenceEngine:
    """Materialises [tokens, V] fp32 logits in the forward and their gradient in the backward."""

    name = "reference"
    reduces_gradients = False
    masks_hidden = False

    def log_probs(
        self,
        hidden: Float[Array, "tokens hidden"],
        weight: Float[Array, "vocab hidden"],
        bias: Float[Array, " vocab"] | None,
        targets: LocalTargets,
        options: HeadOptions,
    ) -> TokenLogProbs:
        """Log-probs and entropy of flat tokens; all operands typed as varying over every axis in play."""
        return _log_probs(hidden, weight, bias, targets, options)


def materialised_logits(hidden: Array, weight: Array, bias: Array | None, options: HeadOptions) -> Array:
    """Final fp32 logits [tokens, V]."""
    products = dot(*_operands(hidden, weight, options), contract=(1, 1))
    return finish_logits(products, bias, options)


def _operands(hidden: Array, weight: Array, options: HeadOptions) -> tuple[Array, Array]:
    dtype = options.operand_dtype(weight)
    return hidden.astype(dtype), weight.astype(dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _log_probs(hidden: Array, weight: Array, bias: Array | None, targets: LocalTargets, options: HeadOptions):
    return _forward(hidden, weight, bias, targets, options)[0]


def _valid(weight: Array, targets: LocalTargets) -> Array:
    return jnp.arange(weight.shape[0], dtype=jnp.int32) < targets.width


def _forward(hidden: Array, weight: Array, bias: Array | None, targets: LocalTargets, options: HeadOptions):
    logits = materialised_logits(hidden, weight, bias, options)
    local = tile_stats(logits, targets.column, _valid(weight, targets), options.with_entropy)
    stats = all_reduce(local, options.axis_name, targets.codes)
    result, normaliser = finish(stats, targets.mask, options.vocab_size, targets.invalid)
    return result, (hidden, weight, bias, logits, targets, normaliser)


def _backward(options: HeadOptions, residuals: tuple, g: TokenLogProbs):
    hidden, weight, bias, logits, targets, normaliser = residuals
    g_log_probs, g_entropy = mask_cotangents(g, targets)
    gradient = logit_gradient(logits, targets.column, _valid(weight, targets), normaliser, g_log_probs, g_entropy)
    gradient = product_gradient(gradient, logits, options)
    d_bias = None if bias is None else jnp.sum(gradient, axis=0).astype(bias.dtype)
    hidden_operand, weight_operand = _operands(hidden, weight, options)
    rounded = gradient.astype(weight_operand.dtype)
    d_hidden = dot(rounded, weight_operand, contract=(1, 0)).astype(hidden.dtype)
    d_weight = dot(rounded, hidden_operand, contract=(0, 0)).astype(weight.dtype)
    return d_hidden, d_weight, d_bias, None


_log_probs.defvjp(_forward, _backward)
