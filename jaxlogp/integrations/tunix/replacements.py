"""Replacements of functions of Tunix, with their signatures in versions 0.1.7 and 0.1.8."""

import dataclasses
import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxlogp import TokenLogProbs
from jaxlogp.integrations.tunix.head_calls import log_probs
from jaxlogp.integrations.tunix.model_head import ModelHead, hidden_and_head


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LogitsNotStored:
    """What `compute_per_token_logps(return_logits=True)` returns for logits: their entropy alone, [B, T]."""

    entropy: jax.Array

    def __jax_array__(self) -> jax.Array:
        """Refuses to be an array."""
        raise ValueError(
            "logits: expected only their entropy to be used, because jaxlogp stores no logits of Tunix models"
        )


def entropy_from_logits(stock: Any, logits: Any) -> jax.Array:
    """Returns the entropy that came in place of logits, or that of logits by the `stock` function."""
    return logits.entropy if isinstance(logits, LogitsNotStored) else stock(logits)


def completion_inputs(
    model: nnx.Module,
    prompt_tokens: jax.Array,
    completion_tokens: jax.Array,
    pad_id: int,
    eos_id: int,
    images: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    segment_positions: jax.Array | None = None,
) -> tuple[jax.Array, ModelHead, jax.Array]:
    """Returns (hidden states, head, targets) at the positions that predict completions.

    In packed examples, whose prompts are in `completion_tokens` too, these are all positions but the last.
    """
    from tunix.rl import common

    tokens, positions, attention_mask, padding = common.process_ids(
        prompt_tokens, completion_tokens, pad_id, eos_id, segment_ids, segment_positions
    )
    inputs = {"positions": positions, "attention_mask": attention_mask, "images": images}
    segments = padding if segment_ids is None else segment_ids
    if segments is not None and _takes(model, "segment_ids"):
        inputs["segment_ids"] = segments
    hidden, head = hidden_and_head(model, tokens, **inputs)
    keep = completion_tokens.shape[1] if segment_ids is None else tokens.shape[1] - 1
    return hidden[:, -keep - 1 : -1], head, tokens[:, -keep:]


@functools.partial(
    jax.jit,
    static_argnames=(
        "engine",
        "pad_id",
        "eos_id",
        "stop_gradient",
        "return_logits",
        "return_entropy",
        "temperature",
        "chunk_size",
    ),
)
def compute_per_token_logps(
    graphdef: Any,
    state: Any,
    prompt_tokens: jax.Array,
    completion_tokens: jax.Array,
    pad_id: int,
    eos_id: int,
    images: jax.Array | None = None,
    stop_gradient: bool = True,
    return_logits: bool = False,
    segment_ids: jax.Array | None = None,
    segment_positions: jax.Array | None = None,
    temperature: float = 1.0,
    return_entropy: bool = False,
    chunk_size: int = 0,
    *,
    engine: Any,
) -> Any:
    """Stands in for `tunix.rl.common.compute_per_token_logps`; `chunk_size` has nothing left to save.

    A temperature of 0 counts as 1, as in Tunix.
    """
    del chunk_size
    model = nnx.merge(graphdef, state)
    hidden, head, targets = completion_inputs(
        model, prompt_tokens, completion_tokens, pad_id, eos_id, images, segment_ids, segment_positions
    )
    with_entropy = return_logits or return_entropy
    options = {"temperature": float(temperature) or 1.0, "with_entropy": with_entropy}
    values = log_probs("compute_per_token_logps", hidden, head, targets, engine, **options)
    if segment_ids is not None:
        # Position t holds the log-prob of token t: nothing predicts the first one.
        values = TokenLogProbs(*(None if x is None else jnp.pad(x, ((0, 0), (1, 0))) for x in values))
    if stop_gradient:
        values = jax.lax.stop_gradient(values)
    if not with_entropy:
        return values.log_probs
    return values.log_probs, LogitsNotStored(values.entropy) if return_logits else values.entropy


@nnx.jit(static_argnames=("logits_to_keep", "engine"))
def get_per_token_logps(
    model: nnx.Module,
    input_tokens: jax.Array,
    positions: jax.Array,
    attn_mask: jax.Array,
    logits_to_keep: int,
    images: jax.Array | None = None,
    *,
    engine: Any,
) -> jax.Array:
    """Stands in for `tunix.rl.common.get_per_token_logps`, which DPO and ORPO call."""
    inputs = {"positions": positions, "attention_mask": attn_mask, "images": images}
    hidden, head = hidden_and_head(model, input_tokens, **inputs)
    hidden, targets = hidden[:, -logits_to_keep - 1 : -1], input_tokens[:, -logits_to_keep:]
    return log_probs("get_per_token_logps", hidden, head, targets, engine).log_probs


def supervised_sum(
    model: nnx.Module,
    input_tokens: jax.Array,
    input_mask: jax.Array,
    positions: jax.Array,
    attention_mask: jax.Array,
    images: jax.Array | None = None,
    *,
    engine: Any,
) -> tuple[jax.Array, jax.Array]:
    """Returns the negative log-likelihood of the tokens of `input_mask` but the first, as (sum, count)."""
    inputs = {"positions": positions, "attention_mask": attention_mask, "images": images}
    hidden, head = hidden_and_head(model, input_tokens, **inputs)
    weights = input_mask[:, 1:]
    values = log_probs("_default_loss_fn", hidden[:, :-1], head, input_tokens[:, 1:], engine, mask=weights != 0)
    return -jnp.sum(values.log_probs * weights), jnp.sum(weights)


def _takes(model: nnx.Module, name: str) -> bool:
    parameters = inspect.signature(model.__call__).parameters.values()
    return any(p.name == name or p.kind == inspect.Parameter.VAR_KEYWORD for p in parameters)
