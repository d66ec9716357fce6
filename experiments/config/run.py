"""Every option of a run; ``python -m experiments.grpo --help`` prints these lines."""

import dataclasses
from dataclasses import dataclass, field

from experiments.config.correction import CorrectionConfig, RejectionConfig
from experiments.config.data import DataConfig, RewardConfig
from experiments.config.guards import GuardsConfig
from experiments.config.loss import LossConfig
from experiments.config.model import ModelConfig
from experiments.config.optimizer import OptimizerConfig
from experiments.config.reports import CheckpointConfig, DriftConfig, EvaluationConfig
from experiments.config.rollout import RolloutConfig
from experiments.config.schedule import ScheduleConfig
from experiments.config.warm_start import WARM_START_STEPS, WarmStartConfig
from experiments.invariant.options import InvarianceConfig
from experiments.models.lora import LoraConfig
from jaxlogp.losses import PolicyLoss

SUPERVISED = "sft:"
"""Before the path of a file, in the place of a task: a run that learns from its documents."""
STORED = "stored:"
"""Before the path of a file of documents, in the place of the module:name of a source."""
COMPLETION_OF_LOADED_MODEL = 256
"""Default longest completion of a model from disk, in tokens, as in TRL."""


@dataclass(frozen=True)
class Config:
    """Policy loss on a verifiable task, from a warm-started small decoder or from a model on disk."""

    preset: str | None = None
    """Named defaults, which --help shows together with this option; other options override them.
    smollm2: SmolLM2-135M-Instruct (extra smollm2) on word problems."""
    task: str = "addition"
    """Task: addition, comparison or word_problems (each also with :SIZE).
    Or reasoning_gym:NAME, jsonl:PATH, or module:name of your own (docs/your_data.md)."""
    source: str | None = None
    """Documents to train on: module:name of a function (policy, step) -> documents, or of a class (docs/own_rollouts.md).
    Or stored:PATH, a file of documents with log-probs. None: prompts of the task, completed and rewarded."""
    seed: int = 0
    """Seed of parameters, data order and sampling."""
    out: str = "runs"
    """Folder in which run folders are made."""
    name: str | None = None
    """Name of the run folder. None: composed from task, loss, seed and time."""
    mesh: str = "data=1,fsdp=1,sequence=1,tensor=1"
    """Device mesh: data and fsdp split the documents, sequence the tokens of a row, tensor vocabulary and features.
    fsdp and sequence also split parameters and optimizer state. One of the sizes may be -1: the remaining devices."""
    invariant: bool = False
    """Bitwise equal on every mesh and in any number of processes, sampler and trainer included; several times slower."""
    quiet: bool = False
    """Print only warnings and the final scores."""
    log_every: int | None = None
    """Steps between printed rows, in a pipe or a file. None: about 40 rows per run, 10 per warm start.
    The first and the last step always have a row. A terminal shows one line instead, which is redrawn."""
    model: ModelConfig = field(default_factory=ModelConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    data: DataConfig = field(default_factory=DataConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    rejection: RejectionConfig = field(default_factory=RejectionConfig)
    invariance: InvarianceConfig = field(default_factory=InvarianceConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    drift: DriftConfig = field(default_factory=DriftConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    guards: GuardsConfig = field(default_factory=GuardsConfig)

    @property
    def supervised(self) -> bool:
        """Whether the run learns from the documents of a file, instead of from completions."""
        return self.task.startswith(SUPERVISED)

    @property
    def reads_sampler(self) -> bool:
        """Whether the loss compares the sampler's log-probs with the trainer's at the time of sampling."""
        return self.correction.level is not None or self.rejection.reads_sampler

    def policy_loss(self, longest_completion: int) -> PolicyLoss:
        """Returns the loss with its correction and rejection; arguments and errors are those of `LossConfig.policy_loss`."""
        loss = self.loss.policy_loss(longest_completion)
        correction, rejection = self.correction.correction(), self.rejection.rejection()
        return dataclasses.replace(loss, correction=correction, rejection=rejection)

    def resolved(self) -> "Config":
        """Returns the options with every value filled in that follows from others or from the device."""
        rollout, completions = self.rollout, self.rollout.prompts_per_rollout * self.rollout.num_generations
        schedule = self.schedule.resolved(own_source=self.source is not None, supervised=self.supervised)
        if rollout.rescore is None:
            # 0 documents a step takes a whole rollout.
            several = schedule.epochs_per_rollout > 1 or schedule.docs_per_step % completions != 0
            rescore = (self.reads_sampler or several) and not self.supervised
            rollout = dataclasses.replace(rollout, rescore=rescore)
        warm_start = self.warm_start
        if warm_start.max_steps is None:
            steps = WARM_START_STEPS if self.model.path is None and not self.supervised else 0
            warm_start = dataclasses.replace(warm_start, max_steps=steps)
        model, invariance = self.model.resolved(self.invariant), self.invariance
        if self.invariant:
            dtype = "float32" if model.fp32_head else model.dtype
            invariance = invariance.resolved(dtype, small_vocabulary=self.model.has_task_vocabulary)
        loaded = self.model.path is not None
        if loaded and rollout.max_new_tokens is None:
            rollout = dataclasses.replace(rollout, max_new_tokens=COMPLETION_OF_LOADED_MODEL)
        rates = {"loaded": loaded, "adapters": self.lora.rank > 0, "supervised": self.supervised}
        optimizer = self.optimizer.resolved(**rates)
        drift = dataclasses.replace(self.drift, every=0) if self.supervised else self.drift
        resolved = {"loss": self.loss.resolved(), "optimizer": optimizer}
        resolved |= {
            "drift": drift,
            "schedule": schedule,
            "model": model,
            "rollout": rollout,
            "warm_start": warm_start,
            "invariance": invariance,
        }
        return dataclasses.replace(self, **resolved)
