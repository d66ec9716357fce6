"""Policy losses as objects made of orthogonal parts, presets of published losses, and values as unreduced sums."""

from jaxlogp.losses.correction import MAX_LOG_WEIGHT, Correction
from jaxlogp.losses.documents import DocumentLayout
from jaxlogp.losses.loss import LossTokens, PolicyLoss, loss_tokens, policy_loss, reduce_losses, weighted_losses
from jaxlogp.losses.objectives import (
    Clipped,
    GammaWeight,
    LogLikelihood,
    Objective,
    SoftGate,
    StopGradientWeight,
    Unclipped,
)
from jaxlogp.losses.presets import (
    PRESETS,
    cispo,
    dapo,
    dr_grpo,
    gmpo,
    gpg,
    grpo,
    grpo_paper,
    gspo,
    gspo_token,
    kl_cov,
    register_loss,
    reinforce,
    sapo,
    vespo,
)
from jaxlogp.losses.ratios import MAX_LOG_RATIO, kl_k1, kl_k2, kl_k3, log_ratio, ratio
from jaxlogp.losses.rejection import Rejection

__all__ = [
    "cispo",
    "Clipped",
    "Correction",
    "dapo",
    "DocumentLayout",
    "dr_grpo",
    "GammaWeight",
    "gmpo",
    "gpg",
    "grpo",
    "grpo_paper",
    "gspo",
    "gspo_token",
    "kl_cov",
    "kl_k1",
    "kl_k2",
    "kl_k3",
    "log_ratio",
    "LogLikelihood",
    "loss_tokens",
    "LossTokens",
    "MAX_LOG_RATIO",
    "MAX_LOG_WEIGHT",
    "Objective",
    "policy_loss",
    "PolicyLoss",
    "PRESETS",
    "ratio",
    "reduce_losses",
    "register_loss",
    "reinforce",
    "Rejection",
    "sapo",
    "SoftGate",
    "StopGradientWeight",
    "Unclipped",
    "vespo",
    "weighted_losses",
]
