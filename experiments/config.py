"""Every option of a run, the rules that span sections, and what a resume may change.

Each section is in the package that it configures. ``python -m experiments.grpo --help`` prints the docstrings.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from experiments.experience.options import STORED, EvaluationConfig, RolloutConfig, ScheduleConfig
from experiments.invariant.options import InvarianceConfig
from experiments.learner.loss_options import CorrectionConfig, LossConfig, RejectionConfig
from experiments.learner.optimizers import OptimizerConfig
from experiments.learner.options import WARM_START_STEPS, DriftConfig, GuardsConfig, WarmStartConfig
from experiments.models.lora import ADAPTABLE, LoraConfig
from experiments.models.mesh import MeshSpec, parse_mesh
from experiments.models.options import ModelConfig
from experiments.options import AtLeast, check_ranges, flat_fields, option_errors, option_name, replaced, value_of
from experiments.runs.config_file import from_json, to_json
from experiments.runs.options import CheckpointConfig
from experiments.tasks.options import DataConfig, RewardConfig
from jaxlogp.errors import describe, require
from jaxlogp.losses import PolicyLoss
from jaxlogp.policy.algorithms import OVER_BATCH

SUPERVISED = "sft:"
"""Before the path of a file, in the place of a task: a run that learns from its documents."""
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
    seed: Annotated[int, AtLeast(0)] = 0
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
    log_every: Annotated[int | None, AtLeast(1)] = None
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
        parts = {"correction": self.correction.correction(), "rejection": self.rejection.rejection()}
        return replace(self.loss.policy_loss(longest_completion), **parts)

    def skips_documents(self) -> bool:
        """Whether documents whose advantages are all 0 are not computed; ValueError as of `LossConfig.skips`."""
        return not self.supervised and self.loss.skips(self.policy_loss(1))

    def resolved(self) -> "Config":
        """Returns the options with every value filled in that follows from others or from the device."""
        rollout, completions = self.rollout, self.rollout.prompts_per_rollout * self.rollout.num_generations
        schedule = self.schedule.resolved(own_source=self.source is not None, supervised=self.supervised)
        if rollout.rescore is None:
            # 0 documents a step takes a whole rollout. What other sources give need not be drawn with present parameters.
            several = schedule.epochs_per_rollout > 1 or schedule.docs_per_step % completions != 0
            several = several and self.source is None
            rescore = (self.reads_sampler or several) and not self.supervised
            rollout = replace(rollout, rescore=rescore)
        warm_start = self.warm_start
        if warm_start.max_steps is None:
            steps = WARM_START_STEPS if self.model.path is None and not self.supervised else 0
            warm_start = replace(warm_start, max_steps=steps)
        loaded = self.model.path is not None
        if loaded and rollout.max_new_tokens is None:
            rollout = replace(rollout, max_new_tokens=COMPLETION_OF_LOADED_MODEL)
        model, invariance = self.model.resolved(self.invariant), self.invariance
        if self.invariant:
            dtype = "float32" if model.fp32_head else model.dtype
            sizes = {"rows": schedule.rows, "row_length": schedule.row_length or rollout.max_new_tokens}
            invariance = invariance.resolved(dtype, small_vocabulary=self.model.has_task_vocabulary, **sizes)
        loss = self.loss.resolved()
        if loss.on_support is None:
            loss = replace(loss, on_support=rollout.filters and self.source is None)
        rates = {"loaded": loaded, "adapters": self.lora.rank > 0, "supervised": self.supervised}
        return replace(
            self,
            loss=loss,
            optimizer=self.optimizer.resolved(**rates),
            drift=replace(self.drift, every=0) if self.supervised else self.drift,
            schedule=schedule,
            model=model,
            rollout=rollout,
            warm_start=warm_start,
            invariance=invariance,
        )


def require_types(config: Config, place: str) -> None:
    """Refuses what is no Config, or has an option of another type: from Python nothing else has compared them."""
    require(isinstance(config, Config), place, "an experiments.Config", describe(config))
    from_json(to_json(config), Config, place)


def validate(config: Config) -> MeshSpec:
    """Checks every option that has a range, and returns the mesh that ``config.mesh`` describes.

    The ValueError for an option out of range names it as typed on the command line, with expected and given value.
    """
    _validate_values(config)
    mesh = parse_mesh(config.mesh)
    with option_errors("rollout"):
        rollout_mesh = parse_mesh(config.rollout.mesh or "")
    expected = "no sequence ranks, since a rollout has one token of a row at a time"
    require(rollout_mesh.sequence == 1, "--rollout.mesh", expected, config.rollout.mesh)
    check_ranges(config)
    _validate_unused(config)
    loss = config.policy_loss(1)
    config.loss.selection()
    config.loss.entropy_control()
    learns = config.loss.advantages != "none" or not loss.vanishes_without_advantage
    expected = "others for a loss that has no KL and no entropy bonus, where no document would learn"
    require(learns, "--loss.advantages", expected, "none")
    if config.loss.moving_reference() is not None:
        has_kl = config.loss.has_kl(loss) or config.reward.kl_coefficient > 0.0
        expected = "None without --loss.kl-coefficient or --reward.kl-coefficient"
        require(has_kl, "--loss.reference-every", expected, config.loss.reference_every)
    config.skips_documents()
    _validate_source(config)
    _validate_supervised(config)
    _validate_filter(config)
    config.loss.head_engine()
    # Checks them.
    config.rollout.sampling_options(config.rollout.max_new_tokens or 1)
    _validate_support(config)
    _validate_lora(config)
    _validate_exact_kl(config)
    config.resolved().optimizer.optimizer(config.schedule.steps)
    if config.invariant:
        _validate_invariant(config, mesh)
    return mesh


def _validate_values(config: Config) -> None:
    """Checks what holds for every number and every text."""
    for name in flat_fields(Config):
        option, value = option_name(name), value_of(config, name)
        if isinstance(value, int):
            require(abs(value) < 2**31, option, "a number below 2^31", value)
        # The losses have ranges of their own, some of them open.
        if isinstance(value, float) and not name.startswith("loss."):
            require(math.isfinite(value), option, "a finite number", value)
        for text in value if isinstance(value, tuple) else (value,):
            require(not isinstance(text, str) or "\0" not in text, option, "text without a null character", repr(text))


def _validate_unused(config: Config) -> None:
    """Refuses options that would do nothing."""
    model, rollout = config.model, config.rollout
    same = config.invariant or config.invariance == InvarianceConfig()
    require(same, "--invariance", "no other options without --invariant", "other options")
    resamples = rollout.resample_degenerate or rollout.max_resamples == RolloutConfig.max_resamples
    expected = "None or True with --correction or --rejection, which compare the trainer's log-probs with the sampler's"
    require(not config.reads_sampler or rollout.rescore is not False, "--rollout.rescore", expected, False)
    expected = "no value without --rollout.resample-degenerate"
    require(resamples, "--rollout.max-resamples", expected, rollout.max_resamples)
    resolved = config.resolved()
    divided = resolved.schedule.epochs_per_rollout == 1 or resolved.schedule.docs_per_step != 0
    require(divided, "--schedule.docs-per-step", "at least 1 with --schedule.epochs-per-rollout", 0)
    advantages = resolved.loss.advantages
    expected = "none over a whole rollout with --rollout.resample-degenerate, which puts groups of several together"
    fits = not rollout.resample_degenerate or advantages not in OVER_BATCH
    require(fits, "--loss.advantages", expected, advantages)
    expected = "no value without --model.path, whose chat template it switches off"
    require(model.chat_template or model.path is not None, "--model.no-chat-template", expected, "the option")
    expected = "none of the reward's parts with --reward.kl-coefficient, which is subtracted from their sum"
    whole = config.reward.kl_coefficient == 0.0 or advantages != "decoupled"
    require(whole, "--loss.advantages", expected, advantages)
    warm_start = config.warm_start
    skipped = warm_start.max_steps is None and resolved.warm_start.max_steps == 0 and not config.supervised
    expected = "no options without --warm-start.max-steps, since a model from disk has no warm start by itself"
    require(not skipped or warm_start == WarmStartConfig(), "--warm-start", expected, "other options")
    same = config.reward.kl_coefficient > 0.0 or config.reward.kl_estimator == RewardConfig.kl_estimator
    expected = "no value without --reward.kl-coefficient"
    require(same, "--reward.kl-estimator", expected, config.reward.kl_estimator)


def _validate_exact_kl(config: Config) -> None:
    option, kind = "--loss.kl-estimator", config.loss.exact_kl
    if kind is None:
        return
    expected = "k1, k2 or k3 with --rejection, which takes labels out of the loss, its KL included"
    require(config.rejection == RejectionConfig(), option, expected, kind)
    expected = "k1, k2 or k3 with --invariant, whose head has no divergence"
    require(not config.invariant, option, expected, kind)
    expected = "k1, k2 or k3 with --loss.on-support, whose policies have no other ids"
    require(not config.resolved().loss.on_support, option, expected, kind)


def _validate_source(config: Config) -> None:
    """Refuses options of the built-in rollouts with a source of one's own, and asks for what only its caller knows."""
    rollout, schedule = config.rollout, config.schedule
    if config.source is None:
        return
    require(schedule.row_length is not None, "--schedule.row-length", "the longest document, with --source", None)
    expected = "no value with --source, which draws by itself"
    stored = config.source.startswith(STORED)
    require(stored or schedule.epochs is None, "--schedule.epochs", expected, schedule.epochs)
    # Already resolved, it is that of the loss.
    of_loss = replace(config.loss, advantages=None).resolved().advantages
    require(config.loss.advantages in (None, of_loss), "--loss.advantages", expected, config.loss.advantages)
    for name in _OF_ROLLOUTS:
        value = getattr(rollout, name)
        require(value == getattr(RolloutConfig(), name), option_name(f"rollout.{name}"), expected, value)
    expected = "no options with --source, which rewards by itself"
    require(config.reward == RewardConfig(), "--reward", expected, "other options")


def _validate_supervised(config: Config) -> None:
    """Refuses options of reinforcement learning in a run that learns from documents."""
    if not config.supervised:
        return
    default = Config(task=config.task, model=config.model)
    expected = "no options in supervised learning, which samples nothing"
    require(config.source is None, "--source", expected, config.source)
    for section in _OF_REINFORCEMENT:
        value = getattr(config, section)
        if section == "loss":
            value = replace(value, **{name: getattr(default.loss, name) for name in _OF_HEAD})
        same = value in (getattr(default, section), getattr(default.resolved(), section))
        require(same, f"--{section.replace('_', '-')}", expected, "other options")
    require(not config.evaluation.kl, "--evaluation.kl", expected, True)
    samples = config.evaluation.samples
    require(samples == 1, "--evaluation.samples", "1 in supervised learning, which samples nothing", samples)
    require(config.schedule.docs_per_step != 0, "--schedule.docs-per-step", "at least 1 in supervised learning", 0)
    passes = config.schedule.epochs_per_rollout
    require(passes == 1, "--schedule.epochs-per-rollout", "1 in supervised learning (see --schedule.epochs)", passes)


def _validate_invariant(config: Config, mesh: MeshSpec) -> None:
    expected = "no sequence ranks with --invariant, whose leaves are whole rows"
    require(mesh.sequence == 1, "--mesh", expected, config.mesh)
    rows, leaf = config.schedule.rows, config.invariance.leaf_rows
    expected = f"None or {leaf} with --invariant, whose micro-batches are leaves (--invariance.leaf-rows)"
    require(None in (rows, leaf) or rows == leaf, "--schedule.rows", expected, rows)
    engine, attention = config.loss.engine, config.model.attention
    require(engine == "auto", "--loss.engine", "auto with --invariant, which brings its own", engine)
    repeatable = attention in ("auto", "repeatable", "einsum")
    require(repeatable, "--model.attention", "auto, repeatable or einsum with --invariant", attention)
    accumulate = config.schedule.accumulate
    require(accumulate == "float32", "--schedule.accumulate", "float32 with --invariant", accumulate)
    drawn = config.rollout.rows
    require(drawn is None, "--rollout.rows", "None with --invariant, which draws as many rows as a leaf has", drawn)
    expected = "no value with --invariant, whose sampler computes what the trainer computes"
    require(not config.rollout.int8_weights, "--rollout.int8-weights", expected, True)


def _validate_filter(config: Config) -> None:
    threshold, engine, option = config.loss.gradient_filter, config.loss.engine, "--loss.gradient-filter"
    if threshold is None:
        return
    require(0.0 <= threshold < 1.0, option, "None or a number in [0, 1)", threshold)
    require(not config.invariant, option, "None with --invariant, whose engine has no filter", threshold)
    filtered = engine in ("auto", "hopper", "chunked")
    require(filtered, option, f"None with --loss.engine {engine} (hopper and chunked have a filter)", threshold)


def _validate_support(config: Config) -> None:
    require(config.loss.support_room >= 1, "--loss.support-room", "at least 1", config.loss.support_room)
    if not config.resolved().loss.on_support:
        expected, room = f"{LossConfig.support_room} without --loss.on-support", config.loss.support_room
        require(room == LossConfig.support_room, "--loss.support-room", expected, room)
        return
    option, engine, threshold = "--loss.on-support", config.loss.engine, config.loss.gradient_filter
    expected = "no value without --rollout.top-k, --rollout.top-p or --rollout.min-p, where all tokens are drawn"
    require(config.source is not None or config.rollout.filters, option, expected, True)
    expected = "auto with --loss.on-support, which brings its own (False: log-probs of the whole vocabulary)"
    require(engine == "auto", "--loss.engine", expected, engine)
    expected = "None with --loss.on-support, whose gradient is that of the ids alone"
    require(threshold is None, "--loss.gradient-filter", expected, threshold)


def _validate_lora(config: Config) -> None:
    lora = config.lora
    if lora.rank == 0:
        same = lora == LoraConfig()
        require(same, "--lora", "no other options without --lora.rank, which is 0", "other options")
        return
    expected = "0 for a model that is not from disk (--model.path): there is no trained base to adapt"
    require(config.model.path is not None, "--lora.rank", expected, lora.rank)
    expected = "0 with --invariant, whose bits were shown for whole models alone"
    require(not config.invariant, "--lora.rank", expected, lora.rank)
    expected = f"different names among {', '.join(ADAPTABLE)} (the head is one matrix for every engine of the head)"
    known = lora.modules and len(set(lora.modules)) == len(lora.modules) and set(lora.modules) <= set(ADAPTABLE)
    require(bool(known), "--lora.modules", expected, " ".join(lora.modules) or "none")


_OF_ROLLOUTS = (
    *("prompts_per_rollout", "num_generations", "stop", "mask_truncated", "resample_degenerate"),
    *("top_k", "top_p", "min_p", "int8_weights"),
)
_OF_REINFORCEMENT = ("data", "rollout", "reward", "loss", "correction", "rejection", "warm_start", "drift")
_OF_HEAD = ("engine", "token_chunk", "vocab_tile", "gradient_filter")

_CHANGEABLE = {
    *("mesh", "rollout.mesh", "rollout.rows", "quiet", "log_every", "schedule.steps", "optimizer.learning_rate"),
    *("evaluation", "checkpoint", "drift", "guards"),
    # Where it lies, if there is one; what it is, a checkpoint's counters know.
    "loss.teacher",
}
# With it a checkpoint holds the policy that training began with; one that was saved without it cannot bring it back.
_FIXED = ("evaluation.kl",)

# What a run has chosen by the memory of its devices, and keeps.
_CHOSEN = (("model.remat", "auto"), ("schedule.rows", None))


def is_changeable(name: str) -> bool:
    """Returns True if a resume may change an option: the place and length of the run and its reports, not its identity."""
    return name not in _FIXED and not _CHANGEABLE.isdisjoint({name, name.partition(".")[0]})


def identity_options(config: Config) -> dict[str, Any]:
    """Returns all other options by dotted name, which a run keeps from its start."""
    return {name: value_of(config, name) for name in flat_fields(Config) if not is_changeable(name)}


def apply_changes(stored: Config, changes: Mapping[str, Any]) -> Config:
    """Returns the options of a run with the changes of a resume by dotted name; equal values are no change.

    One ValueError names all options that may not change and have values other than the run's.

    Example:
        >>> apply_changes(Config(), {"schedule.steps": 2000, "loss.name": "grpo"}).schedule.steps
        2000
    """
    given = replaced(stored, changes)
    require_types(given, "changes")
    # "auto" and None stand for what the run made of them.
    resolved = given.resolved()
    changed = {
        name: value
        for name, value in changes.items()
        if value_of(stored, name) not in (value_of(given, name), value_of(resolved, name))
        and (name, value) not in _CHOSEN
    }
    refused = [
        f"{option_name(name)}: the run has {_shown(value_of(stored, name))}, given {_shown(value_of(given, name))}"
        for name, value in changed.items()
        if not is_changeable(name) or (name == "loss.teacher" and None in (value, stored.loss.teacher))
    ]
    if refused:
        listed = "; ".join(refused)
        raise ValueError(f"--resume: these options cannot be changed: {listed}; start a new run to change them")
    return replaced(stored, changed)


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) or "none" if isinstance(value, tuple) else str(value)
