"""The trainer: one state, fed by rollouts, updated once per step; evaluation, checkpoints and resuming."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any, NamedTuple

import jax
from flax import nnx

from experiments.config import Config, validate
from experiments.experience.counts import RolloutCounts
from experiments.experience.own_source import OwnSource, SourceFailed
from experiments.experience.prompts import PromptOrder, sizes_for
from experiments.experience.rollouts import Rollouts
from experiments.learner.drift import StepDrift
from experiments.learner.learner import Learner, StepResult
from experiments.learner.objectives import CrossEntropy, PolicyObjective
from experiments.learner.packing import Packing
from experiments.models.dtype_choice import capability_of
from experiments.models.mesh import document_axis
from experiments.refusal import NotFinite, Refusal
from experiments.runs.checkpoint import restore_template
from experiments.runs.console import RunConsole
from experiments.runs.folder import MetricsWriter
from experiments.runs.processes import processes
from experiments.runs.store import FollowedStore, RunStore, SavedRun
from experiments.sampling.policy import Generator, SamplerPolicy, SamplingOptions
from experiments.tasks import Rewards, Task
from experiments.tasks.configured import configured_rewards, task_for
from experiments.tasks.rewards import RewardFailed
from experiments.training.evaluation import Evaluation, ExactMatch
from experiments.training.modes import InvariantMode, PlainMode
from experiments.training.origin import Origin, fingerprint, origin_of
from experiments.training.queue import DocumentQueue
from experiments.training.warm_start import WarmStart, WorkedExamples, warm_start_optimizer
from experiments.training.watch import Watch, over_median, with_norm
from jaxlogp import Document, DocumentSchedule
from jaxlogp.errors import EngineUnavailable, require
from jaxlogp.head import HeadRun
from jaxlogp.policy.documents import SAMPLER_COLUMN

CHECK_PROMPTS = 512
OWN_SOURCE = 4
"""First number of the seeds of a source of the caller's own, in front of those that it gives."""
FASTEST_ON_GPU = ("hopper", "triton")


@dataclass
class Progress:
    """The counters of a run, saved with every checkpoint as JSON.

    Attributes:
        refused: steps in a row, up to the newest, whose update was refused.
        drift_step: step of the newest drift report.
        evaluated: step of the newest evaluation in the log; -1 before the first.
        norms: the newest gradient norms.
    """

    step: int = 0
    refused: int = 0
    drift_step: int = 0
    evaluated: int = -1
    norms: list[float] = field(default_factory=list)


class StepRecord(NamedTuple):
    """What the log and the console say of a step: values by name, why its update was refused, the drift report, warnings."""

    metrics: Mapping[str, Any]
    refusal: str | None = None
    drift: StepDrift | None = None
    warnings: tuple[str, ...] = ()


class _Taken(NamedTuple):
    """What a step trains on, or why it is refused; the counts of what was drawn for it, and how long that took."""

    documents: list[Document]
    counts: RolloutCounts
    rollout_seconds: float
    wait_seconds: float
    refusal: Refusal | None = None


class Trainer:
    """Everything a run needs, made from its options.

    Args:
        config: the options.
        task: your own task instead of the one that ``config.task`` names.
        rewards: your own rewards instead of those that ``config.reward`` names.
        model: your own model instead of the decoder that ``config.model`` describes.
        origin: the model, where the caller has made it of the same options.
        restored: whether `restore` will bring the parameters: none are drawn or read.
        source: your own source, which ``config.source`` names; None for a run that is only read.

    Attributes:
        origin: the model that the run began with.
        frozen: what of it is not trained.
        sampled_frozen: the same where rollouts are drawn.
        warnings: what the console should say before the run.
        attention_run: the implementation of attention over micro-batches, and why it.
        sampler: how completions are drawn, and why so.

    Raises:
        ValueError: an option out of range, an unknown task, a mesh that does not match, an engine that cannot run here.
    """

    def __init__(
        self,
        config: Config,
        task: Task | None = None,
        rewards: Rewards | None = None,
        model: nnx.Module | None = None,
        *,
        origin: Origin | None = None,
        restored: bool = False,
        source: Any = None,
    ) -> None:
        mesh = validate(config)
        ranks = mesh.ranks
        self.config = config = config.resolved()
        self.task = task_for(config) if task is None else task
        self.rewards = configured_rewards(config.reward, self.task) if rewards is None else rewards
        self.origin = origin = origin or origin_of(config, self.task, model, restored=restored)
        self.tokenizer = origin.tokenizer
        self._mode = (InvariantMode if config.invariant else PlainMode)(config, origin)
        self.mesh = self._mode.mesh
        self.sizes = sizes_for(self.task, self.tokenizer, config.rollout, config.schedule, mesh, self._mode.leaf_rows)
        self.attention_run = origin.attention_run(ranks * self.sizes.rows, self.sizes.row, self.mesh)
        self.sampler = self._mode.sampler
        # What a source of one's own draws may be as long as a row.
        loss = config.policy_loss(self.sizes.completion if config.source is None else self.sizes.row)
        self._kl_in_loss = loss.kl_coefficient != 0.0
        packing = Packing(
            ranks,
            self.sizes.rows,
            self.sizes.row,
            origin.vocab_size,
            self.tokenizer.pad_id,
            share_rows=self._mode.leaf_rows is None,
            columns=(SAMPLER_COLUMN,) if config.rollout.rescore else (),
        )
        dtype = None if origin.decoder is None else origin.decoder.dtype
        try:
            self.learner = Learner(
                self._mode,
                PolicyObjective(loss, config.loss.metrics, document_axis(self.mesh)),
                config.optimizer.optimizer(config.schedule.steps),
                packing,
                temperature=config.rollout.temperature,
                needs_reference=self._kl_in_loss,
                labels={"reduction": f"mesh {mesh}", "dtype": dtype},
            )
        except EngineUnavailable as error:
            engine = config.loss.engine
            require(engine == "auto", "--loss.engine", "an engine that can run here", f"{engine}: {error}")
            raise
        self.frozen, self.sampled_frozen = self._mode.frozen, self._mode.sampled_frozen
        self.key = jax.random.key(config.seed)
        self.source = self._rollouts() if config.source is None else self._own_source(config.source, source)
        self.generator = Generator(self._mode.draw, self.tokenizer, config.rollout.temperature, self.sizes.row)
        options = SamplingOptions(self.sizes.completion, temperature=1.0, stop=config.rollout.stop)
        limits = config.evaluation.num_prompts, self.sizes.prompt
        self.evaluation = Evaluation(self.task, self.rewards, *limits, options)
        self.progress = Progress()
        self._step_watch = Watch(config.guards, self.sizes.completion)
        self.queue = DocumentQueue()
        found = (origin.warning, slower_head(self.learner.gradients.head_run, dtype))
        self.warnings = [text for text in found if text is not None]

    def _rollouts(self) -> Rollouts:
        config, rollout = self.config, self.config.rollout
        prompts = PromptOrder(self.task, config.seed, config.schedule.epochs)
        filters = {"top_k": rollout.top_k, "top_p": rollout.top_p, "min_p": rollout.min_p}
        sampling = SamplingOptions(self.sizes.completion, stop=rollout.stop, **filters)
        return Rollouts(prompts, self.rewards, rollout, sampling, self.sizes.prompt, config.loss.advantages)

    def policy(self, params: nnx.State | None = None) -> SamplerPolicy:
        """A policy that draws by the present parameters, or by others."""
        params = self.learner.state.params if params is None else params
        key = self.key if self.config.source is None else jax.random.fold_in(self.key, OWN_SOURCE)
        return SamplerPolicy(self.generator, params, self.learner.version, self.learner.log_probs, key)

    def _own_source(self, name: str, source: Any) -> OwnSource | None:
        """None for a command that only reads the run."""
        if source is None:
            return None
        limits = {"vocab_size": self.origin.vocab_size, "row_length": self.sizes.row}
        return OwnSource(source, name, **limits)

    @property
    def exhausted(self) -> bool:
        """Whether the training data has ended."""
        return self.source.exhausted and not self.queue.documents

    @property
    def has_reference(self) -> bool:
        """Whether a copy of the parameters that training began with is kept."""
        return self._kl_in_loss or self.config.evaluation.kl

    @property
    def warm_start_to_come(self) -> bool:
        """Whether the run begins with a warm start that has not ended."""
        return self.config.warm_start.max_steps > 0 and self.progress.evaluated < 0

    def warm_start_moments(self) -> Any:
        """Shapes and dtypes of the state of the warm start's optimizer."""
        return jax.eval_shape(warm_start_optimizer(self.config.warm_start).init, self.learner.state.params)

    # Warm start

    def warm_start(self, console: RunConsole, metrics: MetricsWriter, between: Callable[[], None]) -> None:
        """Supervised learning of answers until sampled exact match reaches the target, or the largest number of steps;
        `between` is called after each and may raise."""
        examples = WorkedExamples(PromptOrder(self.task, self.config.seed + 1, None), self.tokenizer, self.sizes.prompt)
        checks = PromptOrder(self.task, self.config.seed + 2, None).take(CHECK_PROMPTS)
        phase = WarmStart(
            self.config.warm_start,
            self._mode.gradients(CrossEntropy(), 1.0),
            examples,
            replace(self.learner.packing, columns=()),
            lambda params, step: self.evaluation.exact_match_on(checks, self.policy(params), step),
        )
        self.learner.begin(phase.run(self.learner.release(), console, metrics, between))
        if self.has_reference:
            self.learner.freeze_reference()

    # Reinforcement learning

    def _take(self) -> _Taken:
        """Draws the documents of the next step, and packs them; what is drawn beyond them waits for the one after.

        All of a step is drawn before any of it is packed, so that the rounds do not depend on where a rollout ends.

        Raises:
            RewardFailed: a reward function is broken; nothing has been taken of the data.
            SourceFailed: a source is; likewise.
        """
        number, started, counts = self.config.schedule.docs_per_step, time.perf_counter(), RolloutCounts()
        before, waiting = self.source.state(), self.queue.documents
        policy, refusal = self.policy(), None
        try:
            while refusal is None and self.queue.lacks(number):
                experience = self.source.next(policy)
                if experience is None:
                    break
                counts, refusal = counts + experience.counts, experience.refusal
                self.queue.add(self._rescored(experience.documents))
        except (RewardFailed, SourceFailed):
            self.source.restore(before)
            self.queue.documents = waiting
            raise
        except NotFinite as error:
            refusal = error.refusal
        finally:
            policy.end()
        seconds = time.perf_counter() - started
        if refusal is not None:
            return _Taken([], counts, seconds, seconds, self.learner.explain(refusal))
        documents = self._collected(number or len(self.queue.documents))
        return _Taken(documents, counts, seconds, time.perf_counter() - started)

    def _rescored(self, documents: Sequence[Document]) -> Sequence[Document]:
        """The documents, with the trainer's log-probs as the old ones where the options ask for it."""
        if not self.config.rollout.rescore:
            return documents
        pairs = zip(documents, self.learner.log_probs(documents), strict=True)
        return [replace(document, old_log_probs=log_probs) for document, log_probs in pairs]

    def _collected(self, number: int) -> list[Document]:
        """The documents of the micro-batches that reach the number, or all that wait."""
        packing = self.learner.packing
        # The last round of a step would hold more documents on one mesh than on another.
        at_most = number if self.config.invariant else None
        collected = DocumentSchedule(number).collect(
            [self.queue.rounds(packing, at_most)],
            padding=packing.padding(),
            all_reduce=processes().require_equal_counts,
        )
        return [document for (each,) in collected.micro_batches for document in each.documents]

    def train_step(self) -> StepRecord | None:
        """One optimizer step, or its refusal: whatever is not finite, parameters and optimizer state stay as they are.

        Returns:
            What it has done; None if the data had ended before it.

        Raises:
            RewardFailed: a reward function is broken; nothing has been taken of the data, as if the step had not begun.
        """
        started = time.perf_counter()
        taken = self._take()
        if taken.refusal is not None:
            return self._record(StepResult(refusal=taken.refusal), taken, started)
        if not taken.documents:
            return None
        return self._record(self.learner.step(taken.documents, report_drift=self._drift_is_due), taken, started)

    @property
    def _drift_is_due(self) -> bool:
        every, last = self.config.drift.every, self.progress.drift_step
        return every > 0 and (last == 0 or self.progress.step + 1 >= last + every)

    def _record(self, result: StepResult, taken: _Taken, started: float) -> StepRecord:
        """Counts a step that is over, and adds the metrics that every step has."""
        progress, drift, values = self.progress, result.drift, dict(result.metrics)
        refusal = None if result.refusal is None else result.refusal.sentence(self.tokenizer)
        progress.step += 1
        progress.refused = 0 if refusal is None else progress.refused + 1
        if drift is not None:
            progress.drift_step = progress.step
        if values:
            norm = values["grad_norm"]
            values["grad_norm_over_median"] = over_median(progress.norms, norm)
            progress.norms = with_norm(progress.norms, norm)
            values |= {"attention": self.attention_run.implementation, "data_wait_seconds": taken.wait_seconds}
        seconds = time.perf_counter() - started - (0.0 if drift is None else drift.seconds)
        values |= {
            "update_applied": int(refusal is None),
            **({} if refusal is None else {"refused": refusal}),
            "documents_seen": self.learner.version,
            "rollout_seconds": taken.rollout_seconds,
            "step_seconds": seconds,
            "tokens_per_second": values.get("tokens", 0) / seconds,
            **taken.counts.metrics(),
        }
        warnings = self._step_watch.warnings(progress.step, values, taken.counts)
        return StepRecord(values, refusal, drift, tuple(warnings))

    # Evaluation

    def evaluate(self, metrics: MetricsWriter | None = None) -> ExactMatch:
        """Exact match on the held-out prompts with the current parameters; the same random numbers every time.

        Raises:
            RewardFailed: a reward function, or the task's verdict, is broken.
            RewardNotFinite: of one of them.
        """
        started = time.perf_counter()
        evaluated = self.evaluation.of(self.policy())
        if metrics is not None:
            values = evaluated.metrics()
            if self.config.evaluation.kl:
                values["kl_reference"] = self.learner.kl_to_reference(evaluated.documents)
            values["seconds"] = time.perf_counter() - started
            metrics.write(self.progress.step, "eval", values)
            metrics.write_samples(self.progress.step, "held_out", evaluated.samples)
            self.progress.evaluated = self.progress.step
        return evaluated.exact_match

    # Checkpoints

    def save(self, store: RunStore | FollowedStore, before: ExactMatch) -> None:
        """Saves parameters, optimizer state, reference, counters, prompt order and queued documents; see `RunStore.save`."""
        extra = {
            "progress": dict(vars(self.progress)),
            "version": self.learner.version,
            "source": self.source.state(),
            "queued": self.queue.to_json(),
            "before": before._asdict(),
            "frozen": fingerprint(self.frozen),
        }
        store.save(self.progress.step, self.learner.arrays(), extra)

    def restore(
        self, store: RunStore | FollowedStore | SavedRun, console: RunConsole, step: int | None = None
    ) -> ExactMatch:
        """Restores the newest intact checkpoint, or that of a step, on this mesh; returns the scores from before training.

        Raises:
            ValueError: no such checkpoint, or one that this run cannot go on from.
        """
        arrays = self.learner.arrays()
        if self.has_reference:
            arrays["reference"] = arrays["params"]
        restored = store.restore(restore_template(arrays, self.mesh), step)
        for warning in restored.warnings:
            console.warn(warning)
        extra = restored.extra
        same = extra["frozen"] == fingerprint(self.frozen)
        if not same:
            raise ValueError(
                "model: its frozen parameters differ from those that the run began with; pass the same model"
            )
        self.learner.restore(restored.arrays, extra["version"])
        self.progress = Progress(**extra["progress"])
        if self.source is not None:
            self.source.restore(extra["source"])
        self.queue = DocumentQueue.from_json(extra["queued"])
        return ExactMatch(**extra["before"])


def slower_head(head_run: HeadRun | None, dtype: str | None) -> str | None:
    """A warning where no engine was named and a slower one runs than a GPU could use, or None.

    Args:
        head_run: the head call of the trainer.
        dtype: that the head multiplies; None for a model of the caller's own.
    """
    if jax.default_backend() != "gpu" or head_run is None or head_run.reason == "named by the caller":
        return None
    if head_run.engine in FASTEST_ON_GPU:
        return None
    capability, advice = capability_of(jax.devices()[0]), []
    # The candidates with --loss.gradient-filter are a sequence, without triton.
    filtered = not head_run.reason.startswith("auto")
    if filtered and capability != (9, 0):
        advice.append("a run without --loss.gradient-filter")
    if capability == (9, 0) and jax.__version_info__ < (0, 11):
        advice.append("JAX 0.11 or newer (Python 3.12 or newer)")
    if capability == (9, 0) and dtype == "float32":
        advice.append("--model.dtype bfloat16")
    if not filtered and capability is not None and capability[0] == 8 and find_spec("jax_triton") is None:
        advice.append('pip install -e ".[triton]"')
    remedy = f"; try {' and '.join(advice)}" if advice else ""
    return f"the head runs on engine {head_run.engine}, slower than the kernels for GPUs: {head_run.reason}{remedy}"
