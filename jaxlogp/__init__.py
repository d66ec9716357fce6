"""jaxlogp: log-probs, entropies and policy losses for reinforcement-learning post-training on JAX."""

from jaxlogp.accumulate import CollectedStep as CollectedStep
from jaxlogp.accumulate import DocumentSchedule as DocumentSchedule
from jaxlogp.accumulate import FinishedStep as FinishedStep
from jaxlogp.accumulate import Progress as Progress
from jaxlogp.accumulate import StepSums as StepSums
from jaxlogp.advantages import GroupAdvantages as GroupAdvantages
from jaxlogp.advantages import group_advantages as group_advantages
from jaxlogp.advantages import leave_one_out_advantages as leave_one_out_advantages
from jaxlogp.documents import Document as Document
from jaxlogp.documents import MicroBatch as MicroBatch
from jaxlogp.documents import clamp_document_ids as clamp_document_ids
from jaxlogp.documents import labels_per_document as labels_per_document
from jaxlogp.documents import next_token_targets as next_token_targets
from jaxlogp.documents import pack_documents as pack_documents
from jaxlogp.embedding import embedding_lookup as embedding_lookup
from jaxlogp.embedding import sharded_embedding_lookup as sharded_embedding_lookup
from jaxlogp.head.api import head_logits as head_logits
from jaxlogp.head.api import linear_log_probs as linear_log_probs
from jaxlogp.head.api import sharded_linear_log_probs as sharded_linear_log_probs
from jaxlogp.head.chunked import ChunkedEngine as ChunkedEngine
from jaxlogp.head.engines import HeadRun as HeadRun
from jaxlogp.head.engines import record_head_runs as record_head_runs
from jaxlogp.head.reference import ReferenceEngine as ReferenceEngine
from jaxlogp.logits import log_probs_from_logits as log_probs_from_logits
from jaxlogp.metrics import METRICS as METRICS
from jaxlogp.metrics import PolicyMetricTerms as PolicyMetricTerms
from jaxlogp.metrics import policy_metric_terms as policy_metric_terms
from jaxlogp.metrics import policy_metrics as policy_metrics
from jaxlogp.metrics import reward_terms as reward_terms
from jaxlogp.metrics import staleness_terms as staleness_terms
from jaxlogp.policy import kl_k3 as kl_k3
from jaxlogp.policy import log_ratio as log_ratio
from jaxlogp.policy import policy_loss as policy_loss
from jaxlogp.policy import ratio as ratio
from jaxlogp.reduce import WeightedSum as WeightedSum
from jaxlogp.reduce import masked_count as masked_count
from jaxlogp.reduce import masked_max as masked_max
from jaxlogp.reduce import masked_mean as masked_mean
from jaxlogp.reduce import masked_min as masked_min
from jaxlogp.reduce import masked_sum as masked_sum
from jaxlogp.reduce import weighted_sum as weighted_sum
from jaxlogp.stats import TokenLogProbs as TokenLogProbs
from jaxlogp.vocab import VocabShards as VocabShards

__version__ = "0.1.0"
