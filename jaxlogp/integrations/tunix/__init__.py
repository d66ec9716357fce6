"""Tunix on jaxlogp: its log-probs and entropies without [tokens, vocabulary] logits.

    from jaxlogp.integrations import tunix as jaxlogp_tunix

    jaxlogp_tunix.install()  # once, before a learner or trainer is built
    ...
    print(jaxlogp_tunix.report())

`install` replaces the functions of Tunix that compute log-probs: those of GRPO, PPO, DPO and ORPO, of the reference and
the old policy, and the loss of supervised fine-tuning. Everything else stays Tunix's. Needs the extra `tunix`.
"""

from jaxlogp.integrations.tunix.plugin import Report, install, installed, report, uninstall
from jaxlogp.integrations.tunix.policy_loss import policy_loss_fn

__all__ = ["install", "installed", "policy_loss_fn", "Report", "report", "uninstall"]
