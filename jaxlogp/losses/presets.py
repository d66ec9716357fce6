"""Published policy losses by name, as functions that return a `PolicyLoss`, and a registry of them.

Defaults are those of the papers, except that KL and entropy are off; docs/losses.md lists where a preset differs from its
paper. Every preset also takes the fields of `PolicyLoss` from `kl_coefficient` to `grad_divisor`. In the formulas
D is the number of labels and M the number of documents of the whole step, N_d the labels of document d, r_t and R_d the
ratios of a token and of a document, A_t and A_d their advantages, and

    clipped(r, A) = min(r A, min(max(r, 1 - epsilon), 1 + epsilon_high) A), with `delta` at least delta A where A < 0.
"""

from collections.abc import Callable
from typing import Any

from jaxlogp.errors import require
from jaxlogp.losses.loss import PolicyLoss
from jaxlogp.losses.objectives import (
    Clipped,
    DivergenceMask,
    GammaWeight,
    LogLikelihood,
    SoftGate,
    StopGradientWeight,
    Unclipped,
    require_above_0,
)
from jaxlogp.losses.options import suggest_options

GSPO_WEIGHTINGS = ("document", "length")
SHARED_OPTIONS = (
    "kl_coefficient",
    "kl_estimator",
    "kl_unbiased",
    "entropy_coefficient",
    "entropy_weights",
    "z_loss_coefficient",
    "correction",
    "rejection",
    "grad_divisor",
)
_preset = suggest_options(SHARED_OPTIONS)


@_preset
def grpo(
    *, epsilon: float = 0.2, epsilon_high: float | None = None, delta: float | None = None, **shared: Any
) -> PolicyLoss:
    """Returns GRPO as the token mean over the step (TRL's `dapo` and `bnpo`, verl's `token-mean`).

    The paper's own reduction is that of `grpo_paper`. TRL's `bnpo` is the mean over a batch, which is the whole step here.

    L = -(1 / D) Σ_t m_t clipped(r_t, A_t).

    Args:
        epsilon: distance of the lower bound from 1, as in `Clipped`.
        epsilon_high: distance of the upper bound from 1, as in `Clipped`.
        delta: largest ratio where A < 0, as in `Clipped`.
        **shared: fields of `PolicyLoss` from `kl_coefficient` to `grad_divisor`.

    References:
        DeepSeekMath, arXiv:2402.03300; DAPO (the token mean), arXiv:2503.14476.
    """
    return PolicyLoss("grpo", objective=Clipped(epsilon, epsilon_high, delta), **shared)


@_preset
def grpo_paper(
    *, epsilon: float = 0.2, epsilon_high: float | None = None, delta: float | None = None, **shared: Any
) -> PolicyLoss:
    """Returns GRPO as in its paper (TRL's `grpo`, verl's `seq-mean-token-mean`), with equal weight for every document.

    L = -(1 / M) Σ_d (1 / N_d) Σ_t m_t clipped(r_t, A_t). The paper adds 0.04 times the k3 KL to the reference.

    Args:
        epsilon: distance of the lower bound from 1, as in `Clipped`.
        epsilon_high: distance of the upper bound from 1, as in `Clipped`.
        delta: largest ratio where A < 0, as in `Clipped`.
        **shared: fields of `PolicyLoss` from `kl_coefficient` to `grad_divisor`.

    References:
        DeepSeekMath, arXiv:2402.03300.
    """
    objective = Clipped(epsilon, epsilon_high, delta)
    return PolicyLoss("grpo_paper", objective=objective, reduction="document_mean", **shared)


@_preset
def gspo(
    *,
    weighting: str = "document",
    epsilon: float | None = None,
    epsilon_high: float | None = None,
    **shared: Any,
) -> PolicyLoss:
    """Returns GSPO, with one ratio and one clip decision for a whole document.

    L = -(1 / M) Σ_d clipped(R_d, A_d) with weighting "document", as in the paper, and
    L = -(1 / M) Σ_d N_d clipped(R_d, A_d) with "length". R_d is the geometric mean of the ratios of d, so it stays much
    closer to 1 than they do: the bounds of GRPO would hardly ever clip it.

    Args:
        weighting: "document" or "length".
        epsilon: distance of the lower bound from 1, as in `Clipped`; None for 3e-4 with weighting "document" and 0.2 with
            "length".
        epsilon_high: distance of the upper bound from 1, as in `Clipped`; None for `epsilon`, or for 4e-4 if `epsilon` is
            None and weighting is "document".
        **shared: fields of `PolicyLoss` from `kl_coefficient` to `grad_divisor`.

    Raises:
        ValueError: if the weighting is unknown.

    References:
        Group Sequence Policy Optimization, arXiv:2507.18071.
    """
    require(weighting in GSPO_WEIGHTINGS, "weighting", f"one of {GSPO_WEIGHTINGS}", repr(weighting))
    alike = weighting == "document"
    if epsilon is None:
        epsilon, default_high = (3e-4, 4e-4) if alike else (0.2, 0.2)
        epsilon_high = default_high if epsilon_high is None else epsilon_high
    reduction = "document_mean" if alike else "documents"
    objective = Clipped(epsilon, epsilon_high)
    return PolicyLoss("gspo", ratio="sequence", objective=objective, reduction=reduction, **shared)


@_preset
def gspo_token(*, epsilon: float = 3e-4, epsilon_high: float = 4e-4, **shared: Any) -> PolicyLoss:
    """Returns GSPO-token: the document's ratio with a clip decision and an advantage for every label.

    L = -(1 / M) Σ_d (1 / N_d) Σ_t m_t clipped(s_t, A_t) with s_t = sg(R_d) π_t / sg(π_t), where sg stops gradients: s_t has
    the value of R_d and the gradient of label t alone. With one advantage per document this is `gspo`.

    Args:
        epsilon: distance of the lower bound from 1, as in `Clipped`.
        epsilon_high: distance of the upper bound from 1, as in `Clipped`.
        **shared: fields of `PolicyLoss` from `kl_coefficient` to `grad_divisor`.

    References:
        Group Sequence Policy Optimization, arXiv:2507.18071, section 4.3.
    """
    objective = Clipped(epsilon, epsilon_high)
    return PolicyLoss("gspo_token", ratio="sequence_token", objective=objective, reduction="document_mean", **shared)


@_preset
def gmpo(*, epsilon: float = 0.4, epsilon_high: float | None = None, **shared: Any) -> PolicyLoss:
    """Returns GMPO: the geometric mean of a document's ratios, each of which is clipped before.

    L = -(1 / M) Σ_d A_d exp((1 / N_d) Σ_t m_t l_t), with l_t = min(log r_t, epsilon_high) where A_t > 0 and
    max(log r_t, -epsilon) where A_t < 0.

    Args:
        epsilon: distance of the lower bound of log r_t from 0, in nats, above 0.
        epsilon_high: distance of the upper bound of log r_t from 0, in nats, above 0; None for `epsilon`.
        **shared: fields of `PolicyLoss` from `kl_coefficient` to `grad_divisor`.

    References:
        Geometric-Mean Policy Optimization, arXiv:2507.20673.
    """
    bounds = epsilon, epsilon if epsilon_high is None else epsilon_high
    for name, bound in zip(("epsilon", "epsilon_high"), bounds, strict=True):
        require_above_0(name, bound)
    parts = {"objective": Unclipped(), "reduction": "document_mean", "log_clip": bounds}
    return PolicyLoss("gmpo", ratio="sequence", **parts, **shared)


@_preset
def vespo(
    *,
    power_positive: float = 2.0,
    decay_positive: float = 3.0,
    power_negative: float = 3.0,
    decay_negative: float = 2.0,
    **shared: Any,
) -> PolicyLoss:
    """Returns VESPO, whose weight is a smooth function of the product of a document's ratios, without gradient.

    L = -(1 / D) Σ_t m_t sg(φ(W_d)) A_t log π_t with W_d = Π_t r_t over document d and φ(W) = W^k exp(λ (1 - W)). The ratios
    are to be those to the sampler: its log-probs are the old ones.

    Args:
        power_positive: k where A ≥ 0, as in `GammaWeight`.
        decay_positive: λ where A ≥ 0, as in `GammaWeight`.
        power_negative: k elsewhere, as in `GammaWeight`.
        decay_negative: λ elsewhere, as in `GammaWeight`.
        **shared: fields of `PolicyLoss` from `kl_coefficient` to `grad_divisor`.

    References:
        Variational Sequence-level Soft Policy Optimization, arXiv:2602.10693.
    """
    objective = GammaWeight(power_positive, decay_positive, power_negative, decay_negative)
    return PolicyLoss("vespo", ratio="product", objective=objective, **shared)


@_preset
def dapo(*, epsilon: float = 0.2, epsilon_high: float = 0.28, delta: float | None = None, **shared: Any) -> PolicyLoss:
    """Returns DAPO's loss, the token mean over the step with a higher upper bound (clip-higher).

    L = -(1 / D) Σ_t m_t clipped(r_t, A_t). Overlong filtering belongs in the mask, dynamic sampling in the data.

    Args:
        epsilon: distance of the lower bound from 1, as in `Clipped`.
        epsilon_high: distance of the upper bound from 1, as in `Clipped`.
        delta: largest ratio where A < 0, as in `Clipped`.
        **shared: fields of `PolicyLoss` from `kl_coefficient` to `grad_divisor`.

    References:
        DAPO, arXiv:2503.14476.
    """
    return PolicyLoss("dapo", objective=Clipped(epsilon, epsilon_high, delta), **shared)


@_preset
def dr_grpo(
    *, length: int, epsilon: float = 0.2, epsilon_high: float | None = None, delta: float | None = None, **shared: Any
) -> PolicyLoss:
    """Returns Dr. GRPO's loss, sums over documents divided by a constant, so that length changes no token's weight.

    L = -(1 / M) Σ_d (1 / length) Σ_t m_t clipped(r_t, A_t), for advantages not divided by a standard deviation.

    Args:
        length: tokens of the longest completion that is sampled.
        epsilon: distance of the lower bound from 1, as in `Clipped`.
        epsilon_high: distance of the upper bound from 1, as in `Clipped`.
        delta: largest ratio where A < 0, as in `Clipped`.
        **shared: fields of `PolicyLoss` from `kl_coefficient` to `grad_divisor`.

    References:
        Understanding R1-Zero-like training, arXiv:2503.20783.
    """
    objective = Clipped(epsilon, epsilon_high, delta)
    return PolicyLoss("dr_grpo", objective=objective, reduction="constant_length", length=length, **shared)


@_preset
def cispo(*, max_weight: float = 5.0, min_weight: float = 0.0, **shared: Any) -> PolicyLoss:
    """Returns CISPO, whose importance weight is bounded and has no gradient, so that every token's log-prob has one.

    L = -(1 / D) Σ_t m_t sg(min(max(r_t, min_weight), max_weight)) A_t log π_t.

    Args:
        max_weight: largest importance weight, as in `StopGradientWeight`.
        min_weight: smallest importance weight, as in `StopGradientWeight`.
        **shared: fields of `PolicyLoss` from `kl_coefficient` to `grad_divisor`.

    References:
        MiniMax-M1, arXiv:2506.13585; The Art of Scaling RL Compute (the value 5), arXiv:2510.13786.
    """
    return PolicyLoss("cispo", objective=StopGradientWeight(max_weight, min_weight), **shared)


@_preset
def dppo_tv(
    *, epsilon: float = 0.15, epsilon_high: float | None = None, max_weight: float = 20.0, **shared: Any
) -> PolicyLoss:
    """Returns DPPO-Binary-TV, which stops a label by the change of its probability, not by its ratio.

    L = -(1 / D) Σ_t m_t sg(min(r_t, max_weight)) A_t log π_t, m_t = 0 where π_t - π_old,t is above epsilon_high and A_t > 0,
    or below -epsilon and A_t < 0. The old policy is to be the sampler's.

    Args:
        epsilon: largest fall of a probability, above 0.
        epsilon_high: largest rise of a probability, above 0; None for `epsilon`.
        max_weight: largest importance weight, as in `DivergenceMask`.
        **shared: fields of `PolicyLoss` from `kl_coefficient` to `grad_divisor`.

    References:
        Rethinking the Trust Region in LLM Reinforcement Learning (DPPO), arXiv:2602.04879.
    """
    return PolicyLoss("dppo_tv", objective=DivergenceMask("tv", epsilon, epsilon_high, max_weight), **shared)


@_preset
def dppo_kl(
    *, epsilon: float = 0.05, epsilon_high: float | None = None, max_weight: float = 20.0, **shared: Any
) -> PolicyLoss:
    """Returns DPPO-Binary-KL: `dppo_tv` with the KL of the label's probabilities in the place of their difference.

    L = -(1 / D) Σ_t m_t sg(min(r_t, max_weight)) A_t log π_t, m_t = 0 where the KL of `DivergenceMask` is above
    epsilon_high, A_t > 0 and π_t > π_old,t, or above epsilon, A_t < 0 and π_t < π_old,t. The old policy is to be the
    sampler's.

    Args:
        epsilon: largest KL where A < 0, in nats, above 0.
        epsilon_high: largest KL where A > 0, in nats, above 0; None for `epsilon`.
        max_weight: largest importance weight, as in `DivergenceMask`.
        **shared: fields of `PolicyLoss` from `kl_coefficient` to `grad_divisor`.

    References:
        Rethinking the Trust Region in LLM Reinforcement Learning (DPPO), arXiv:2602.04879.
    """
    return PolicyLoss("dppo_kl", objective=DivergenceMask("kl", epsilon, epsilon_high, max_weight), **shared)


@_preset
def sapo(*, temperature_positive: float = 1.0, temperature_negative: float = 1.05, **shared: Any) -> PolicyLoss:
    """Returns SAPO, with a smooth gate on each token's ratio in place of the clip.

    L = -(1 / M) Σ_d (1 / N_d) Σ_t m_t (4 / τ_t) σ(τ_t (r_t - 1)) A_t.

    Args:
        temperature_positive: τ where A > 0, as in `SoftGate`.
        temperature_negative: τ elsewhere, as in `SoftGate`.
        **shared: fields of `PolicyLoss` from `kl_coefficient` to `grad_divisor`.

    References:
        Soft Adaptive Policy Optimization, arXiv:2511.20347.
    """
    objective = SoftGate(temperature_positive, temperature_negative)
    return PolicyLoss("sapo", objective=objective, reduction="document_mean", **shared)


@_preset
def reinforce(**shared: Any) -> PolicyLoss:
    """Returns REINFORCE over whole documents, for samples of the policy itself, without ratio or clip; also RLOO's loss.

    L = -(1 / M) Σ_d Σ_t m_t A_t log π_t.

    Args:
        **shared: fields of `PolicyLoss` from `kl_coefficient` to `grad_divisor`.

    References:
        R. J. Williams, "Simple statistical gradient-following algorithms for connectionist reinforcement learning",
        1992; Back to Basics (RLOO), arXiv:2402.14740.
    """
    return PolicyLoss("reinforce", objective=LogLikelihood(), reduction="documents", **shared)


@_preset
def gpg(**shared: Any) -> PolicyLoss:
    """Returns GPG's loss: REINFORCE as the token mean over the step, for advantages from `active_group_advantages`.

    L = -(1 / D) Σ_t m_t A_t log π_t.

    Args:
        **shared: fields of `PolicyLoss` from `kl_coefficient` to `grad_divisor`.

    References:
        GPG: A Simple and Strong Reinforcement Learning Baseline for Model Reasoning, arXiv:2504.02546.
    """
    return PolicyLoss("gpg", objective=LogLikelihood(), **shared)


@_preset
def kl_cov(*, drift_coefficient: float = 1.0, **shared: Any) -> PolicyLoss:
    """Returns KL-Cov's loss: no clip, and a penalty on the drift of the labels of the largest covariance.

    L = -(1 / D) Σ_t m_t (r_t A_t - drift_coefficient p_t |log r_t|), p_t = 1 for the labels given as `penalized`, which are
    those of `high_covariance_labels`.

    Args:
        drift_coefficient: weight of |log r_t|, at least 0 (`ppo_kl_coef` in verl).
        **shared: fields of `PolicyLoss` from `kl_coefficient` to `grad_divisor`.

    References:
        The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models, arXiv:2505.22617.
    """
    return PolicyLoss("kl_cov", objective=Unclipped(), drift_coefficient=drift_coefficient, **shared)


PRESETS: dict[str, Callable[..., PolicyLoss]] = {
    function.__name__: function
    for function in (
        grpo,
        grpo_paper,
        gspo,
        gspo_token,
        gmpo,
        vespo,
        dapo,
        dr_grpo,
        cispo,
        dppo_tv,
        dppo_kl,
        sapo,
        reinforce,
        gpg,
        kl_cov,
    )
}
"""Functions of keyword arguments that return a `PolicyLoss`, by name."""


def register_loss(name: str, function: Callable[..., PolicyLoss]) -> None:
    """Adds your own loss to `PRESETS`.

    Args:
        name: name of the loss, an identifier that no other loss has.
        function: function of keyword arguments that returns a `PolicyLoss`.

    Raises:
        ValueError: if the name is taken or not an identifier, or the object cannot be called.

    Example:
        >>> from jaxlogp.losses import PRESETS, grpo, register_loss
        >>> register_loss("tight_grpo", lambda **shared: grpo(epsilon=0.05, **shared))
        >>> PRESETS.pop("tight_grpo")().objective
        Clipped(epsilon=0.05, epsilon_high=None, delta=None)
    """
    require(isinstance(name, str) and name.isidentifier(), "name", "an identifier", repr(name))
    require(name not in PRESETS, "name", f"a name other than {tuple(PRESETS)}", repr(name))
    require(callable(function), "function", "a function that gives a PolicyLoss", repr(function))
    PRESETS[name] = function
