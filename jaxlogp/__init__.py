"""Log-probs, entropies and policy losses for reinforcement-learning post-training on JAX.

Nine functions do most of the work:

* `linear_log_probs`: log-probs and entropies of tokens straight from hidden states and the head's weight.
* `linear_policy_loss`: a policy loss of these, whose gradient is computed in the same pass.
* `linear_kl`: the KL or Jensen-Shannon divergence of two heads over the whole vocabulary.
* `log_probs_from_logits`: the same values where logits exist already.
* `policy_loss`: a loss of `jaxlogp.losses` from log-probs, as a sum and the count that divides it.
* `group_advantages`: advantages of completions of one prompt.
* `pack_documents`: documents as rows of a micro-batch, with targets and masks.
* `policy_metrics`: KL, ratios, clipping, entropy and rewards.
* `check_invariance`: which changes of batch, mesh and program change a log-prob's bits.

With a mesh there are `sharded_linear_log_probs`, `sharded_linear_policy_loss`, `sharded_linear_kl`,
`sharded_log_probs_from_logits` and `sharded_embedding_lookup`. Losses are in `jaxlogp.losses`, engines and what writing
one takes in `jaxlogp.head`, sums of a fixed order in `jaxlogp.invariance`.
"""

from jaxlogp import losses
from jaxlogp._embedding import embedding_lookup, sharded_embedding_lookup
from jaxlogp._logits import log_probs_from_logits, sharded_log_probs_from_logits
from jaxlogp._reduce import (
    WeightedSum,
    masked_count,
    masked_max,
    masked_mean,
    masked_min,
    masked_sum,
    weighted_sum,
)
from jaxlogp._stats import TokenLogProbs
from jaxlogp._vocab import VocabShards
from jaxlogp.head.api import head_logits, linear_log_probs, sharded_linear_log_probs
from jaxlogp.head.divergence import linear_kl, sharded_linear_kl
from jaxlogp.head.policy_loss import linear_policy_loss, sharded_linear_policy_loss
from jaxlogp.head.support.ids import Support
from jaxlogp.invariance.check import InvarianceReport, check_invariance
from jaxlogp.invariance.drift import DriftReport, drift_report
from jaxlogp.losses.loss import PolicyLoss, policy_loss
from jaxlogp.losses.ratios import kl_k1, kl_k2, kl_k3, log_ratio, ratio
from jaxlogp.policy.accumulate import DocumentSchedule, StepSums
from jaxlogp.policy.advantages import (
    GroupAdvantages,
    active_group_advantages,
    batch_advantages,
    decoupled_advantages,
    greedy_baseline_advantages,
    group_advantages,
    leave_one_out_advantages,
    length_weighted_advantages,
)
from jaxlogp.policy.documents import Document, MicroBatch, Trajectory, pack_documents
from jaxlogp.policy.metrics import (
    PolicyMetricTerms,
    policy_metric_terms,
    policy_metrics,
    reward_terms,
    staleness_terms,
)
from jaxlogp.policy.rewards import soft_overlong_punishment
from jaxlogp.policy.selection import (
    clip_cov_advantages,
    entropy_threshold,
    high_covariance_labels,
    high_entropy_advantages,
    label_covariances,
)

__all__ = [
    "active_group_advantages",
    "batch_advantages",
    "check_invariance",
    "clip_cov_advantages",
    "decoupled_advantages",
    "Document",
    "DocumentSchedule",
    "drift_report",
    "DriftReport",
    "embedding_lookup",
    "entropy_threshold",
    "greedy_baseline_advantages",
    "group_advantages",
    "GroupAdvantages",
    "head_logits",
    "high_covariance_labels",
    "high_entropy_advantages",
    "InvarianceReport",
    "kl_k1",
    "kl_k2",
    "kl_k3",
    "label_covariances",
    "leave_one_out_advantages",
    "length_weighted_advantages",
    "linear_kl",
    "linear_log_probs",
    "linear_policy_loss",
    "log_probs_from_logits",
    "log_ratio",
    "losses",
    "masked_count",
    "masked_max",
    "masked_mean",
    "masked_min",
    "masked_sum",
    "MicroBatch",
    "pack_documents",
    "policy_loss",
    "policy_metric_terms",
    "policy_metrics",
    "PolicyLoss",
    "PolicyMetricTerms",
    "ratio",
    "reward_terms",
    "sharded_embedding_lookup",
    "sharded_linear_kl",
    "sharded_linear_log_probs",
    "sharded_linear_policy_loss",
    "sharded_log_probs_from_logits",
    "soft_overlong_punishment",
    "staleness_terms",
    "StepSums",
    "Support",
    "TokenLogProbs",
    "Trajectory",
    "VocabShards",
    "weighted_sum",
    "WeightedSum",
]

__version__ = "0.1.0"
