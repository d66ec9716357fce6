"""The head of a Tunix model, and the hidden states that it reads."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxlogp.errors import describe, require


class ModelHead(NamedTuple):
    """The head of a Tunix model.

    Attributes:
        weight: [V, H] or [H, V].
        weight_layout: "vh" or "hv".
        bias: [V] or None.
        softcap: cap of the logits, or None.
        vocab_axis: mesh axis over which the model's sharding config splits V, or None.
        weight_axis: mesh axis over which it splits H, or None.
        token_axes: mesh axes over which it splits the rows of a batch.
        frozen: whether the model is trained by LoRA adapters, none of which are on the head.
        in_fp32: whether the model multiplies in fp32 although the weight is narrower.
    """

    weight: jax.Array
    weight_layout: str
    bias: jax.Array | None
    softcap: float | None
    vocab_axis: str | None
    weight_axis: str | None
    token_axes: tuple[str, ...]
    frozen: bool
    in_fp32: bool = False


def read_head(model: nnx.Module) -> ModelHead:
    """Returns the head of a Tunix model: Qwen 2 and 3, Llama 3, Gemma 2 and 3, and models built like these.

    Raises:
        ValueError: if the model has neither `lm_head` nor `embedder.input_embedding` (as in MaxText's models, whose head
            reads hidden states before the final norm), a LoRA adapter on the head, or a quantized head.
    """
    lm_head = getattr(model, "lm_head", None)
    embedder = getattr(model, "embedder", None)
    known = lm_head is not None or hasattr(embedder, "input_embedding")
    require(known, "model", "lm_head or embedder.input_embedding, as in Tunix's own models", type(model).__name__)
    module, name = (lm_head, "lm_head") if lm_head is not None else (embedder, "embedder")
    adapters = sorted(key for key in vars(module) if key.endswith(("_lora_a", "_lora_b")))
    require(not adapters, name, "a head without LoRA (leave it out of the provider's module_path)", adapters)
    if lm_head is None:
        weight, layout, bias = _array(embedder.input_embedding, "embedder.input_embedding"), "vh", None
    elif hasattr(lm_head, "kernel"):
        weight, layout = _array(lm_head.kernel, "lm_head.kernel"), "hv"
        bias = None if getattr(lm_head, "bias", None) is None else _array(lm_head.bias, "lm_head.bias")
    else:
        weight, layout, bias = _array(getattr(lm_head, "w", None), "lm_head.w"), "hv", None
    frozen = bool(jax.tree.leaves(nnx.state(model, nnx.LoRAParam)))
    axes = _axes(getattr(model, "config", None), layout)
    return ModelHead(weight, layout, bias, _softcap(model), *axes, frozen)


def hidden_and_head(
    model: Any, tokens: jax.Array, *, images: jax.Array | None = None, **inputs: Any
) -> tuple[jax.Array, ModelHead]:
    """Runs a copy of `model` without a cache, and returns what its head would have read, [B, T, H], and the head.

    The head of the copy is replaced by a function that hands its input on, so no logits are computed. What follows the head
    in the model, such as a soft cap, then runs on hidden states, and its result is not used.
    """
    # Changes of the caller's own module would travel out of nnx.jit.
    model = nnx.merge(*nnx.split(model))
    # Not every model takes images.
    inputs |= {"cache": None} if images is None else {"cache": None, "images": images}
    head = read_head(model)
    owner, name = (model, "lm_head") if getattr(model, "lm_head", None) is not None else (model.embedder, "decode")
    stock = getattr(owner, name)
    seen: list[tuple[jax.Array, jnp.dtype]] = []

    def hand_on(hidden: jax.Array) -> jax.Array:
        seen.append((hidden, jax.eval_shape(stock, hidden).dtype))
        return hidden

    object.__setattr__(owner, name, hand_on)
    model(tokens, **inputs)
    require(len(seen) == 1, "model", "a call that uses its head once", f"{len(seen)} uses")
    hidden, dtype = seen[0]
    # The product's dtype is the model's choice, by a cast or by promotion; fp32 of a narrower weight needs no copy of it.
    in_fp32 = dtype == jnp.float32 != head.weight.dtype
    weight = head.weight if in_fp32 else head.weight.astype(dtype)
    return hidden.astype(dtype), head._replace(weight=weight, in_fp32=in_fp32)


def _array(parameter: Any, name: str) -> jax.Array:
    value = parameter[...] if isinstance(parameter, nnx.Variable) else parameter
    require(isinstance(value, jax.Array), name, "an array (leave a quantized head out of module_path)", describe(value))
    return value


def _softcap(model: nnx.Module) -> float | None:
    cap = getattr(model, "final_logits_softcap", None) or getattr(
        getattr(model, "config", None), "final_logit_softcap", None
    )
    return None if cap is None else float(cap)


def _axes(config: Any, layout: str) -> tuple[str | None, str | None, tuple[str, ...]]:
    """Returns (vocab_axis, weight_axis, token_axes) of a model's sharding config, which may not exist."""
    sharding = getattr(config, "shd_config", None)
    if sharding is None:
        return None, None, ()
    vocab, hidden = sharding.emb_vd if layout == "vh" else reversed(sharding.emb_dv)
    names = [_names(entry) for entry in (vocab, hidden, sharding.act_btd[0])]
    vocab_axis, weight_axis = (axes[0] if len(axes) == 1 else None for axes in names[:2])
    return vocab_axis, weight_axis, names[2]


def _names(entry: Any) -> tuple[str, ...]:
    """Returns the mesh axes of one entry of a partition spec."""
    entries = entry if isinstance(entry, tuple) else (entry,)
    return tuple(name for name in entries if name is not None)
