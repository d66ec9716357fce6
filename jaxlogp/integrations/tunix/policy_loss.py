"""Losses of `jaxlogp.losses` as policy losses of Tunix."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxlogp import PolicyLoss, policy_metrics
from jaxlogp.errors import require
from jaxlogp.head.registry import EngineChoice
from jaxlogp.integrations.tunix import head_calls
from jaxlogp.integrations.tunix.replacements import completion_inputs

# Options of Tunix's loss that a PolicyLoss has its own for.
TUNIX_LOSS_OPTIONS = (
    "epsilon",
    "epsilon_high",
    "epsilon_c",
    "loss_algo",
    "loss_agg_mode",
    "kl_loss_mode",
    "kl_clamp_value",
)


def policy_loss_fn(loss: PolicyLoss, *, engine: EngineChoice = "auto") -> Callable[..., Any]:
    """Returns a policy loss for `tunix.rl.function_registry.register_policy_loss_fn`.

    The model's head, the loss and its gradient are one call of :func:`jaxlogp.linear_policy_loss`. The coefficient of the
    KL is `loss.kl_coefficient` or, if that is 0, Tunix's `beta`; the temperature is Tunix's. Other options of Tunix's
    loss have to keep their defaults, since `loss` has its own.

    Denominators are those of all ranks, because Tunix's arrays are global. Over micro-batches they are those of the step in
    Tunix 0.1.8, which adds sums and counts. Tunix 0.1.7 averages the gradients of micro-batches: with a reduction by
    documents or by a constant length, and micro-batches of equally many rows, that is the same; with reduction "labels"
    each micro-batch has its own denominator.

    Args:
        loss: a loss of `jaxlogp.losses`.
        engine: a name or an engine object, as in :func:`jaxlogp.linear_policy_loss`.

    Returns:
        A function (model, train_example, algo_config, pad_id, eos_id) that returns (loss, metrics) in Tunix 0.1.7 and a
        `LossOutput` in 0.1.8. It raises `ValueError` for packed examples, importance weights of the sampler, and options
        that it would ignore.

    Raises:
        ValueError: if the loss has a grad_divisor, because Tunix divides the gradient.
    """
    require(loss.grad_divisor is None, "loss.grad_divisor", "None: Tunix divides the gradient", loss.grad_divisor)

    def jaxlogp_loss(
        model: nnx.Module, train_example: Any, algo_config: Any, pad_id: int, eos_id: int, **kwargs: Any
    ) -> Any:
        del kwargs
        _refuse_ignored(train_example, algo_config)
        configured = _with_kl(loss, algo_config, train_example)
        ids = (train_example.prompt_ids, train_example.completion_ids)
        hidden, head, targets = completion_inputs(model, *ids, pad_id, eos_id)
        mask = train_example.completion_mask != 0
        advantages = train_example.advantages.astype(jnp.float32)
        old, reference = train_example.old_per_token_logps, train_example.ref_per_token_logps
        operands = (targets, old, advantages, mask)
        temperature = float(algo_config.temperature) or 1.0
        options = {"loss": configured, "temperature": temperature, "with_entropy": True, "ref_log_probs": reference}
        total, values = head_calls.policy_loss(f"policy loss {loss.name}", hidden, head, operands, engine, **options)
        values = jax.lax.stop_gradient(values)
        given = {"level": "with_entropy", "loss": configured, "entropy": values.entropy, "ref_log_probs": reference}
        metrics = policy_metrics(values.log_probs, old, advantages, mask, **given)
        return loss_output(total.sum, total.count, metrics=_renamed(metrics))

    return jaxlogp_loss


def loss_output(total: jax.Array, count: jax.Array, eps: float | None = None, metrics: dict | None = None) -> Any:
    """Returns a sum and its count as this version of Tunix takes a loss: divided in 0.1.7, a `LossOutput` in 0.1.8."""
    from tunix.sft import utils

    if hasattr(utils, "LossOutput"):
        primary = utils.WeightedMetric(total, count, eps=eps)
        return utils.LossOutput(primary_loss=primary, aux_metrics=metrics or {})
    mean = total / (count + eps) if eps is not None else total / jnp.maximum(count, 1)
    return mean if metrics is None else (mean, metrics)


def _with_kl(loss: PolicyLoss, algo_config: Any, train_example: Any) -> PolicyLoss:
    beta = float(getattr(algo_config, "beta", None) or 0.0)
    if loss.kl_coefficient == 0.0 and beta != 0.0 and train_example.ref_per_token_logps is not None:
        return dataclasses.replace(loss, kl_coefficient=beta)
    expected = f"0 or the loss's kl_coefficient {loss.kl_coefficient}"
    require(beta in (0.0, loss.kl_coefficient) or loss.kl_coefficient == 0.0, "beta", expected, beta)
    return loss


def _refuse_ignored(train_example: Any, algo_config: Any) -> None:
    packed = getattr(train_example, "segment_ids", None) is not None
    require(not packed, "train_example.segment_ids", "None: losses of jaxlogp take examples that are not packed", "ids")
    weighted = getattr(train_example, "sampler_is_weights", None) is not None
    require(not weighted, "train_example.sampler_is_weights", "None: the loss would ignore them", "weights")
    defaults = {field.name: field.default for field in dataclasses.fields(algo_config)}
    for name in TUNIX_LOSS_OPTIONS:
        default = defaults.get(name)
        value = getattr(algo_config, name, default)
        # The constructor derives some from others: epsilon_high from epsilon.
        derived = name == "epsilon_high" and value == getattr(algo_config, "epsilon", None)
        same = derived or value == default
        require(same, name, f"Tunix's default {default!r}, because the policy loss has its own options", repr(value))


def _renamed(metrics: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Adds the names under which Tunix's learners log and display metrics; the KL is 0 without a reference, as in Tunix."""
    kl = metrics.get("kl_new_ref", jnp.zeros((), jnp.float32))
    return metrics | {"kl": kl, "pg_clipfrac": metrics["clipped_ratio_fraction"]}
