"""The trainer: one state, fed by rollouts, updated once per step; evaluation, checkpoints and resuming."""

import functools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from experiments.config import Config, validate
from experiments.models.ahead import Ahead
from experiments.models.dtype_choice import capability_of
from experiments.models.mesh import document_axis
from experiments.refusal import NotFinite, Refusal
from experiments.runs.checkpoint import restore_template
from experiments.runs.console import RunConsole
from experiments.runs.folder import MetricsWriter
from experiments.runs.processes import processes
from experiments.runs.store import FollowedStore, RunStore, SavedRun
from experiments.sampling.completer import Completer, Completions, Draw
from experiments.sampling.packing import Packing, Round
from experiments.sampling.pick import DrawOptions
from experiments.sampling.prompts import PromptOrder, sizes_for
from experiments.sampling.queue import DocumentQueue
from experiments.sampling.rollout import RolloutCounts, Rollouts
from experiments.tasks import Rewards, Task
from experiments.tasks.configured import configured_rewards, task_for
from experiments.tasks.rewards import RewardFailed, RewardNotFinite
from experiments.training import scoring
from experiments.training.diagnosis import require_finite_inputs, why_refused
from experiments.training.drift import DriftWatch, StepDrift
from experiments.training.evaluation import Evaluation, ExactMatch
from experiments.training.modes import InvariantMode, PlainMode
from experiments.training.objectives import CrossEntropy, PolicyObjective
from experiments.training.origin import Origin, fingerprint, origin_of
from experiments.training.update import AppliedStep, TrainState, Update
from experiments.training.warm_start import WarmStart, WorkedExamples, warm_start_optimizer
from experiments.training.watch import Watch, over_median, with_norm
from jaxlogp import Document, DocumentSchedule
from jaxlogp.errors import EngineUnavailable, require
from jaxlogp.head import HeadRun

CHECK_PROMPTS = 512
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
    documents_seen: int = 0
    refused: int = 0
    drift_step: int = 0
    evaluated: int = -1
    norms: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class StepResult:
    """What a step has done.

    Attributes:
        metrics: values by name.
        refusal: why the update was refused; None if it was applied.
        drift: the drift report, where one was due.
        warnings: what the console should say of the step.
    """

    metrics: Mapping[str, Any]
    refusal: str | None = None
    drift: StepDrift | None = None
    warnings: tuple[str, ...] = ()


class _Taken(NamedTuple):
    """What a step trains on, or why it is refused; the counts of what was drawn for it, and how long that took."""

    rounds: list[Round]
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
        temperature = config.rollout.temperature
        loss = config.loss.policy_loss(self.sizes.completion)
        self.objective = PolicyObjective(loss, config.loss.metrics, document_axis(self.mesh))
        self.sums = self._mode.sums(self.objective, temperature)
        self.update = Update(
            config.optimizer.optimizer(config.schedule.steps), self.sums.place, self.sums.compiler_options
        )
        # A copy, or a second reference, would keep a large model's first parameters on the devices next to the state.
        self.state = self.update.init(self._mode.params)
        del self._mode.params
        self.frozen, self.sampled_frozen = self._mode.frozen, self._mode.sampled_frozen
        # Parameters of the frozen reference; set after the warm start where a KL is wanted.
        self.reference: nnx.State | None = None
        self._packing = Packing(
            ranks,
            self.sizes.rows,
            self.sizes.row,
            origin.vocab_size,
            self.tokenizer.pad_id,
            share_rows=self._mode.leaf_rows is None,
        )
        self.key = jax.random.key(config.seed)
        self.prompts = PromptOrder(self.task, config.seed, config.schedule.epochs)
        self.rollouts = Rollouts(
            self.prompts,
            self._completer(config.rollout.draw_options()),
            config.rollout,
            config.loss.advantages,
            jax.random.fold_in(self.key, 1),
        )
        self._evaluation = Evaluation(self.task, self.rewards, config.evaluation.num_prompts, self._completer, self.key)
        self.progress = Progress()
        self._step_watch = Watch(config.guards, self.sizes.completion)
        dtype = None if origin.decoder is None else origin.decoder.dtype
        self._watch = DriftWatch(self.sums, self._mode.vocab, self.tokenizer, f"mesh {mesh}", dtype)
        self._step_packing = replace(self._packing, columns=self._columns())
        self.queue = DocumentQueue()
        self._trace()
        found = (origin.warning, slower_head(self.sums.head_run, dtype))
        self.warnings = [text for text in found if text is not None]

    def _completer(self, options: DrawOptions) -> Completer:
        draw = self._mode.draw(self.tokenizer, self.sizes, options)
        return Completer(draw, self.rewards, self.tokenizer, self.sizes, self.config.rollout.stop)

    def _columns(self) -> tuple[str, ...]:
        rescored = scoring.RESCORED_COLUMNS if self.config.rollout.rescore else ()
        return (*rescored, *((scoring.REFERENCE_COLUMN,) if self._kl_in_loss else ()))

    @property
    def exhausted(self) -> bool:
        """Whether the training data has ended."""
        return self.prompts.exhausted and not self.queue.documents

    @property
    def evaluation_draw(self) -> Draw:
        """What completes held-out prompts."""
        return self._evaluation.draw

    @property
    def num_held_out(self) -> int:
        """Number of prompts of an evaluation, which is that of the options unless the task has fewer."""
        return self._evaluation.num_prompts

    @property
    def _kl_in_loss(self) -> bool:
        return self.objective.loss.kl_coefficient != 0.0

    @property
    def has_reference(self) -> bool:
        """Whether a copy of the parameters that training began with is kept."""
        return self._kl_in_loss or self.config.evaluation.kl

    def _trace(self) -> None:
        """Refuses a named engine that cannot run here, before training starts."""
        engine = self.config.loss.engine
        try:
            self.sums.trace(self.state.params, self._padding())
        except EngineUnavailable as error:
            if engine == "auto":
                raise
            require(False, "--loss.engine", "an engine that can run here", f"{engine}: {error}")

    def _padding(self) -> Round:
        return self._known_lse([self._step_packing.padding()])[0]

    def ahead(self) -> tuple[Ahead, Ahead] | None:
        """The programs of a micro-batch and of the update, compiled before the first step; None with `--invariant`."""
        micro_batch = self.sums.ahead(self.state.params, self._padding())
        return None if micro_batch is None else (micro_batch, self.update.ahead(self.state, micro_batch.results))

    @property
    def warm_start_to_come(self) -> bool:
        """Whether the run begins with a warm start that has not ended."""
        return self.config.warm_start.max_steps > 0 and self.progress.evaluated < 0

    def warm_start_moments(self) -> Any:
        """Shapes and dtypes of the state of the warm start's optimizer."""
        return jax.eval_shape(warm_start_optimizer(self.config.warm_start).init, self.state.params)

    # Warm start

    def warm_start(self, console: RunConsole, metrics: MetricsWriter, between: Callable[[], None]) -> None:
        """Supervised learning of answers until sampled exact match reaches the target, or the largest number of steps;
        `between` is called after each and may raise."""
        examples = WorkedExamples(PromptOrder(self.task, self.config.seed + 1, None), self.tokenizer, self.sizes)
        checks = PromptOrder(self.task, self.config.seed + 2, None).take(CHECK_PROMPTS)
        phase = WarmStart(
            self.config.warm_start,
            self._mode.sums(CrossEntropy(), 1.0),
            examples,
            self._packing,
            functools.partial(self._evaluation.exact_match_on, checks),
        )
        params = self.state.params
        # Without the optimizer's state: the warm start has an optimizer of its own. Nobody reads this until it has ended.
        self.state = TrainState(params, None)
        params = phase.run(params, console, metrics, between)
        self.state = self.update.init(params)
        self._freeze_reference()

    def _freeze_reference(self) -> None:
        # A copy: the next step takes over the memory of the parameters.
        self.reference = jax.tree.map(jnp.copy, self.state.params) if self.has_reference else None

    # Reinforcement learning

    def _take(self) -> _Taken:
        """Draws the documents of the next step, and packs them; what is drawn beyond them waits for the one after.

        All of a step is drawn before any of it is packed, so that the rounds do not depend on where a rollout ends.

        Raises:
            RewardFailed: a reward function is broken; nothing has been taken of the data.
        """
        number, started, counts = self.config.schedule.docs_per_step, time.perf_counter(), RolloutCounts()
        source = self.rollouts.made, self.prompts.cursor, self.queue.documents
        try:
            while self.queue.lacks(number):
                drawn = self.rollouts.next(self.state.params, self.progress.documents_seen)
                counts += drawn.counts
                if not drawn.groups:
                    break
                self.queue.add(self._scored(drawn.documents))
            seconds = time.perf_counter() - started
            rounds = self._rounds(number or len(self.queue.documents))
            require_finite_inputs(rounds)
            return _Taken(rounds, counts, seconds, time.perf_counter() - started)
        except RewardFailed:
            self.rollouts.made, self.prompts.cursor, self.queue.documents = source
            raise
        except RewardNotFinite as error:
            refusal = Refusal(str(error))
        except NotFinite as error:
            # Of parameters that are not finite no log-prob is.
            unsound = self.unsound()
            refusal = error.refusal if unsound is None else Refusal(unsound)
        seconds = time.perf_counter() - started
        return _Taken([], counts, seconds, seconds, refusal)

    def _scored(self, documents: list[Document]) -> list[Document]:
        """The documents with the columns that the loss needs."""
        if self.config.rollout.rescore:
            documents = scoring.rescored(documents, self.sums, self.state.params, self._packing)
        if self._kl_in_loss:
            documents = scoring.with_reference(documents, self.sums, self.reference, self._packing)
        return documents

    def _rounds(self, number: int) -> list[Round]:
        """Rounds until their documents reach the number, or until none waits."""
        # The last round of a step would hold more documents on one mesh than on another.
        at_most = number if self.config.invariant else None
        collected = DocumentSchedule(number).collect(
            [self.queue.rounds(self._step_packing, at_most)],
            padding=self._step_packing.padding(),
            all_reduce=processes().require_equal_counts,
        )
        return [each for (each,) in collected.micro_batches]

    def _known_lse(self, rounds: list[Round]) -> list[Round]:
        """Rounds, without log-sum-exps that come from other parameters than those about to be updated."""
        if not self.config.rollout.rescore:
            return rounds
        # A gradient filter needs the largest logits of a forward pass.
        takes_lse = self.objective.takes_lse and self.config.loss.gradient_filter is None
        if takes_lse and scoring.on_policy(rounds, self.progress.documents_seen):
            return rounds
        return [each.leaving_out(scoring.ON_POLICY_COLUMNS) for each in rounds]

    def train_step(self) -> StepResult | None:
        """One optimizer step, or its refusal: whatever is not finite, parameters and optimizer state stay as they are.

        Returns:
            What it has done; None if the data had ended before it.

        Raises:
            RewardFailed: a reward function is broken; nothing has been taken of the data, as if the step had not begun.
        """
        started = time.perf_counter()
        taken = self._take()
        if taken.refusal is not None:
            return self._result({}, taken, started)
        if not taken.rounds:
            return None
        rounds = self._known_lse(taken.rounds)
        drift = self._drift(rounds)
        total = self.sums.sums_of(self.state.params, rounds, self.progress.documents_seen)
        self.state, applied = self.update(self.state, total)
        applied = jax.device_get(applied)
        if not applied.applied:
            taken = taken._replace(refusal=why_refused(applied.sound, self.state, rounds, self.update, self.sums))
        documents = sum(each.num_documents for each in rounds)
        self.progress.documents_seen += documents
        values = {
            **self._values_of(applied),
            "num_documents": documents,
            "micro_batches": len(rounds),
            "tokens": sum(each.num_tokens for each in rounds),
            "data_wait_seconds": taken.wait_seconds,
        }
        return self._result(values, taken, started, drift)

    def _result(
        self, values: dict[str, Any], taken: _Taken, started: float, drift: StepDrift | None = None
    ) -> StepResult:
        """Counts a step that is over, and adds the metrics that every step has."""
        progress, refused = self.progress, taken.refusal is not None
        refusal = taken.refusal.sentence(self.tokenizer) if taken.refusal else None
        progress.step += 1
        progress.refused = progress.refused + 1 if refused else 0
        seconds = time.perf_counter() - started - (0.0 if drift is None else drift.seconds)
        values = {
            **values,
            "update_applied": int(not refused),
            **({"refused": refusal} if refused else {}),
            "documents_seen": progress.documents_seen,
            "rollout_seconds": taken.rollout_seconds,
            "step_seconds": seconds,
            "tokens_per_second": values.get("tokens", 0) / seconds,
            **taken.counts.metrics(),
        }
        warnings = self._step_watch.warnings(progress.step, values, taken.counts)
        return StepResult(values, refusal, drift, tuple(warnings))

    def unsound(self) -> str | None:
        """A phrase that names what of parameters and optimizer state is not finite; None where all is."""
        return self.update.unsound(self.state)

    def differing_copies(self) -> str | None:
        """A phrase that names a parameter, or a part of the optimizer state, of which devices hold different copies."""
        return self._mode.replicas.differing(self.state._asdict())

    def _drift(self, rounds: list[Round]) -> StepDrift | None:
        """The drift report of the next step, where one is due and the step has tokens for it."""
        every, last, step = self.config.drift.every, self.progress.drift_step, self.progress.step + 1
        if every == 0 or (last > 0 and step < last + every):
            return None
        drift = self._watch.report(self.state.params, rounds, self.progress.documents_seen)
        if drift is not None:
            self.progress.drift_step = step
        return drift

    def _values_of(self, applied: AppliedStep) -> dict[str, Any]:
        head_run, norm = self.sums.head_run, float(applied.grad_norm)
        assert head_run is not None, "a micro-batch has been traced"
        ratio = over_median(self.progress.norms, norm)
        self.progress.norms = with_norm(self.progress.norms, norm)
        return {
            **{name: value.item() for name, value in applied.metrics.items()},
            "loss": float(applied.loss),
            "grad_norm": norm,
            "grad_norm_over_median": ratio,
            "drift_max": None if np.isneginf(applied.drift) else float(applied.drift),
            "learning_rate": float(applied.learning_rate),
            "attention": self.attention_run.implementation,
            "head_path": head_run.path,
            "head_engine": head_run.engine,
            "head_reason": head_run.reason,
            "head_gradient": head_run.gradient,
        }

    # Evaluation

    def evaluate(self, metrics: MetricsWriter | None = None) -> ExactMatch:
        """Exact match on the held-out prompts with the current parameters; the same random numbers every time.

        Raises:
            RewardFailed: a reward function, or the task's verdict, is broken.
            RewardNotFinite: of one of them.
        """
        started = time.perf_counter()
        evaluated = self._evaluation.of(self.state.params)
        if metrics is not None:
            values = evaluated.metrics()
            if self.config.evaluation.kl:
                values["kl_reference"] = self._kl_to_reference(evaluated.sampled)
            values["seconds"] = time.perf_counter() - started
            metrics.write(self.progress.step, "eval", values)
            metrics.write_samples(self.progress.step, "held_out", evaluated.samples)
            self.progress.evaluated = self.progress.step
        return evaluated.exact_match

    def _kl_to_reference(self, drawn: Completions) -> float:
        """KL(policy ‖ reference) at temperature 1, in nats per token of completions that the policy has sampled."""
        at_one = self.config.rollout.temperature == 1.0
        sums = self.sums if at_one else self._mode.sums(self.objective, 1.0)
        return scoring.kl_to(self.reference, drawn.documents(), sums, self.state.params, self._packing)

    # Checkpoints

    def saved_arrays(self) -> dict[str, Any]:
        """What a checkpoint holds as arrays: parameters, optimizer state, and the reference where there is one."""
        leaves = jax.tree.leaves(self.state.opt_state)
        arrays = {
            "params": nnx.to_pure_dict(self.state.params),
            "opt_state": {f"{index:04d}": leaf for index, leaf in enumerate(leaves)},
        }
        if self.reference is not None:
            arrays["reference"] = nnx.to_pure_dict(self.reference)
        return arrays

    def save(self, store: RunStore | FollowedStore, before: ExactMatch) -> None:
        """Saves parameters, optimizer state, reference, counters, prompt order and queued documents; see `RunStore.save`."""
        extra = {
            "progress": dict(vars(self.progress)),
            "rollouts": self.rollouts.made,
            "cursor": self.prompts.cursor,
            "queued": self.queue.to_json(),
            "before": before._asdict(),
            "frozen": fingerprint(self.frozen),
        }
        store.save(self.progress.step, self.saved_arrays(), extra)

    def restore(
        self, store: RunStore | FollowedStore | SavedRun, console: RunConsole, step: int | None = None
    ) -> ExactMatch:
        """Restores the newest intact checkpoint, or that of a step, on this mesh; returns the scores from before training.

        Raises:
            ValueError: no such checkpoint, or one that this run cannot go on from.
        """
        if self.has_reference:
            self.reference = self.state.params
        restored = store.restore(restore_template(self.saved_arrays(), self.mesh), step)
        for warning in restored.warnings:
            console.warn(warning)
        arrays = restored.arrays
        params, reference = (
            jax.tree.unflatten(jax.tree.structure(self.state.params), jax.tree.leaves(arrays[name]))
            if name in arrays
            else None
            for name in ("params", "reference")
        )
        structure = jax.tree.structure(self.state.opt_state)
        opt_state = jax.tree.unflatten(structure, [leaf for _, leaf in sorted(arrays["opt_state"].items())])
        self.state = self.update.place(TrainState(params, opt_state))
        self.reference = None if reference is None else self.sums.place(reference)
        extra = restored.extra
        same = extra["frozen"] == fingerprint(self.frozen)
        if not same:
            raise ValueError(
                "model: its frozen parameters differ from those that the run began with; pass the same model"
            )
        self.progress = Progress(**extra["progress"])
        self.rollouts.made, self.prompts.cursor = extra["rollouts"], extra["cursor"]
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
