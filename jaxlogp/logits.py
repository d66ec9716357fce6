"""Log-probs and entropy of given logits, whole or sharded over the vocabulary."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Integer

from jaxlogp._compat import (
    AxisName,
    automatic_axes,
    leading_spec,
    refuse_unchecked_gradient,
    require_varying,
    union_of_varying_axes,
    vary_over,
)
from jaxlogp.errors import (
    describe,
    require,
    require_floating,
    require_ids_in_range,
    require_positive,
)
from jaxlogp.stats import Normaliser, TokenLogProbs, all_reduce, finish, logit_gradient, tile_stats
from jaxlogp.targets import LocalTargets, check_targets, localise, mask_cotangents
from jaxlogp.vocab import VocabShards, local_shard


def log_probs_from_logits(
    logits: Float[Array, "*tokens vocab"],
    targets: Integer[Array, "*tokens"],
    mask: Bool[Array, "*tokens"] | None = None,
    *,
    temperature: float = 1.0,
    with_entropy: bool = False,
    axis_name: AxisName | None = None,
    vocab: VocabShards | None = None,
) -> TokenLogProbs:
    """Log-probs of the targets, and entropies, of softmax(logits / temperature).

    z = logits / T in fp32; lse = logsumexp(z) over the whole vocabulary; log_prob = z[target] - lse;
    entropy = lse - Σ p z. Inside ``shard_map``, with ``axis_name``, the maximum takes one pmax and the sums take one
    psum. The gradient is g (onehot - p) + g_H p (Σ p z - z), cast once to the logits' dtype. Reverse mode only.

    Targets and mask must be the same on all ranks of ``axis_name``; a token where they are not gets NaN.

    Args:
      logits: [*tokens, V], or the local shard [*tokens, V_local] under ``axis_name``; fp32, bf16 or fp16.
      targets: [*tokens], integer token ids of the whole vocabulary.
      mask: [*tokens], bool; False gives exactly 0 with exactly zero gradient, whatever the id and the logits there.
      temperature: T, a Python number > 0.
      with_entropy: also return the entropy; no additional collective either way.
      axis_name: mesh axis over which the vocabulary is sharded.
      vocab: the shards; None means equal ones. Uneven shards are padded to vocab.max_width columns.

    Returns:
      TokenLogProbs of fp32 arrays [*tokens] in nats; entropy is None unless asked for.

    Raises:
      ValueError: wrong shapes or dtypes, temperature <= 0, a vocabulary that does not match; an active target outside
        of [0, V) where the values are known. Under ``jax.jit`` such a token's log-prob and gradient are NaN. Also
        raised for logits that do not vary over ``axis_name``, and when a sharded call is differentiated under
        ``shard_map(check_vma=False)``.

    Example:
      >>> logits = jnp.array([[0.1, -0.2, 1.7, 0.3, 1.2, -0.5]])
      >>> print(f"{float(log_probs_from_logits(logits, jnp.array([4])).log_probs[0]):.5f}")
      -1.33958

    References:
      RL-Align/RL-Kernel pull request 103 (tensor-parallel-invariant selected log-probs).
    """
    require_floating(logits, "logits")
    require(logits.ndim >= 1 and logits.shape[-1] > 0, "logits", "shape [*tokens, V] with V > 0", describe(logits))
    require_positive(temperature, "temperature")
    tokens, rows = logits.shape[:-1], logits.shape[-1]
    shard = local_shard(rows, axis_name, vocab, "logits")
    require_varying(logits, axis_name, "logits")
    labels = check_targets(targets, mask, tokens, shard.vocab_size)
    require_ids_in_range(targets, shard.vocab_size, "targets", labels)

    def run(logits, targets, mask):
        local = localise(targets.reshape(-1), mask.reshape(-1), shard)
        result = _flat(
            logits.reshape(-1, rows),
            local,
            temperature=temperature,
            with_entropy=with_entropy,
            axis_name=axis_name,
            vocab_size=shard.vocab_size,
        )
        return jax.tree.map(lambda x: x.reshape(tokens), result)

    return automatic_axes(run, logits, targets, jnp.asarray(labels), out_specs=leading_spec(logits, len(tokens)))


# One program also outside of jit, like the head's.
@functools.partial(jax.jit, static_argnames=("temperature", "with_entropy", "axis_name", "vocab_size"))
def _flat(
    logits: Float[Array, "tokens columns"],
    targets: LocalTargets,
    temperature: float,
    with_entropy: bool,
    axis_name: AxisName | None,
    vocab_size: int,
) -> TokenLogProbs:
    # With every operand cast to varying over all axes in use, the cast's transpose is the one psum its gradient needs.
    axes = union_of_varying_axes(logits, *targets) | ({axis_name} if axis_name is not None else set())
    logits = vary_over(refuse_unchecked_gradient(logits, axis_name), axes)
    return _selected(logits, targets, (temperature, with_entropy, axis_name, vocab_size))


def _valid(columns: int, targets: LocalTargets) -> Bool[Array, " columns"]:
    return jnp.arange(columns, dtype=jnp.int32) < targets.width


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _selected(logits: Array, targets: LocalTargets, options: tuple) -> TokenLogProbs:
    return _selected_forward(logits, targets, options)[0]


def _selected_forward(
    logits: Array, targets: LocalTargets, options: tuple
) -> tuple[TokenLogProbs, tuple[Array, LocalTargets, Normaliser]]:
    temperature, with_entropy, axis_name, vocab_size = options
    scaled = logits.astype(jnp.float32) / temperature
    local = tile_stats(scaled, targets.column, _valid(logits.shape[-1], targets), with_entropy)
    result, normaliser = finish(all_reduce(local, axis_name, targets.codes), targets.mask, vocab_size, targets.invalid)
    return result, (logits, targets, normaliser)


def _selected_backward(options: tuple, residuals: tuple, g: TokenLogProbs) -> tuple[Array, None]:
    logits, targets, normaliser = residuals
    scaled = logits.astype(jnp.float32) / options[0]
    g_log_probs, g_entropy = mask_cotangents(g, targets)
    valid = _valid(logits.shape[-1], targets)
    gradient = logit_gradient(scaled, targets.column, valid, normaliser, g_log_probs, g_entropy)
    return (gradient / options[0]).astype(logits.dtype), None


_selected.defvjp(_selected_forward, _selected_backward)
