"""Everything that a run consists of, made from its options."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import jax
from flax import nnx

from experiments.config import Config, validate
from experiments.experience.experience import ExperienceSource
from experiments.experience.own_source import OwnSource
from experiments.experience.prompts import PromptOrder, Sizes, sizes_for
from experiments.experience.rollouts import Rollouts
from experiments.learner.learner import Learner
from experiments.learner.objectives import CrossEntropy, PolicyObjective
from experiments.learner.packing import Packing
from experiments.loop.evaluation import Evaluation
from experiments.loop.feed import DocumentFeed
from experiments.loop.warm_start import WarmStart, WorkedExamples
from experiments.models.attention import AttentionRun
from experiments.models.dtype_choice import capability_of
from experiments.models.mesh import document_axis
from experiments.runs.console import RunConsole
from experiments.runs.folder import MetricsWriter
from experiments.sampling.policy import Generator, SamplerPolicy, SamplingOptions
from experiments.tasks import Rewards, Task
from experiments.tasks.configured import configured_rewards, task_for
from experiments.tasks.tokenizer import Tokenizer
from experiments.training.modes import InvariantMode, Mode, PlainMode
from experiments.training.origin import Origin, origin_of
from jaxlogp.errors import EngineUnavailable, require
from jaxlogp.head import HeadRun
from jaxlogp.policy.documents import SAMPLER_COLUMN

CHECK_PROMPTS = 512
OWN_SOURCE = 4
"""First number of the seeds of a source of the caller's own, in front of those that it gives."""
FASTEST_ON_GPU = ("hopper", "triton")


@dataclass(frozen=True)
class Setup:
    """Everything that a run consists of.

    Attributes:
        config: the options, resolved.
        origin: the model that the run began with.
        backend: how it is computed.
        attention: the implementation of attention over micro-batches, and why it.
        source: where documents come from; None for a source of the caller's own that is not there, of a run that is read.
    """

    config: Config
    task: Task
    rewards: Rewards
    origin: Origin
    backend: Mode
    sizes: Sizes
    attention: AttentionRun
    learner: Learner
    generator: Generator
    evaluation: Evaluation
    source: ExperienceSource | None

    @property
    def tokenizer(self) -> Tokenizer:
        """Text to ids and back."""
        return self.origin.tokenizer

    @property
    def mesh(self) -> jax.sharding.Mesh:
        """The device mesh of the training."""
        return self.backend.mesh

    @property
    def warnings(self) -> list[str]:
        """What the console should say before the run."""
        dtype = None if self.origin.decoder is None else self.origin.decoder.dtype
        found = self.origin.warning, slower_head(self.learner.gradients.head_run, dtype)
        return [text for text in found if text is not None]

    def policy(self, params: nnx.State | None = None) -> SamplerPolicy:
        """Returns a policy that draws by the present parameters, or by others."""
        params = self.learner.state.params if params is None else params
        key = jax.random.key(self.config.seed)
        key = key if self.config.source is None else jax.random.fold_in(key, OWN_SOURCE)
        return SamplerPolicy(self.generator, params, self.learner.version, self.learner.log_probs, key)

    def feed(self) -> DocumentFeed:
        """Returns what gives the documents of each step."""
        assert self.source is not None, "a run that trains has a source"
        config = self.config
        options = {"exact": config.invariant, "rescore": bool(config.rollout.rescore)}
        return DocumentFeed(self.source, self.learner.packing, config.schedule.docs_per_step, **options)

    def warm_start(self, console: RunConsole, metrics: MetricsWriter, between: Callable[[], None]) -> None:
        """Trains on answers until sampled exact match reaches the target, or for the largest number of steps; `between` is
        called after each and may raise."""
        seed, task = self.config.seed, self.task
        checks = PromptOrder(task, seed + 2, None).take(CHECK_PROMPTS)
        phase = WarmStart(
            self.config.warm_start,
            self.backend.gradients(CrossEntropy(), 1.0),
            WorkedExamples(PromptOrder(task, seed + 1, None), self.tokenizer, self.sizes.prompt),
            replace(self.learner.packing, columns=()),
            lambda params, step: self.evaluation.exact_match_on(checks, self.policy(params), step),
        )
        self.learner.begin(phase.run(self.learner.release(), console, metrics, between))


def assemble(
    config: Config,
    task: Task | None = None,
    rewards: Rewards | None = None,
    model: nnx.Module | None = None,
    *,
    origin: Origin | None = None,
    restored: bool = False,
    source: Any = None,
) -> Setup:
    """Makes everything that a run needs.

    Args:
        config: the options.
        task: your own task instead of the one that ``config.task`` names.
        rewards: your own rewards instead of those that ``config.reward`` names.
        model: your own model instead of the decoder that ``config.model`` describes.
        origin: the model, where the caller has made it of the same options.
        restored: whether a checkpoint will bring the parameters: none are drawn or read.
        source: your own source, which ``config.source`` names; None for a run that is only read.

    Raises:
        ValueError: if an option is out of range, a task unknown, a mesh does not match, or an engine cannot run here.
    """
    mesh = validate(config)
    config = config.resolved()
    task = task_for(config) if task is None else task
    rewards = configured_rewards(config.reward, task) if rewards is None else rewards
    origin = origin or origin_of(config, task, model, restored=restored)
    backend = (InvariantMode if config.invariant else PlainMode)(config, origin)
    sizes = sizes_for(task, origin.tokenizer, config.rollout, config.schedule, mesh, backend.leaf_rows)
    options = SamplingOptions(sizes.completion, temperature=1.0, stop=config.rollout.stop)
    return Setup(
        config=config,
        task=task,
        rewards=rewards,
        origin=origin,
        backend=backend,
        sizes=sizes,
        attention=origin.attention_run(mesh.ranks * sizes.rows, sizes.row, backend.mesh),
        learner=_learner(config, origin, backend, sizes, mesh.ranks),
        generator=Generator(backend.draw, origin.tokenizer, config.rollout.temperature, sizes.row),
        evaluation=Evaluation(task, rewards, config.evaluation.num_prompts, sizes.prompt, options),
        source=_source(config, task, rewards, origin, sizes, source),
    )


def _learner(config: Config, origin: Origin, backend: Mode, sizes: Sizes, ranks: int) -> Learner:
    # What a source of one's own draws may be as long as a row.
    loss = config.policy_loss(sizes.completion if config.source is None else sizes.row)
    packing = Packing(
        ranks,
        sizes.rows,
        sizes.row,
        origin.vocab_size,
        origin.tokenizer.pad_id,
        share_rows=backend.leaf_rows is None,
        columns=(SAMPLER_COLUMN,) if config.rollout.rescore else (),
    )
    dtype = None if origin.decoder is None else origin.decoder.dtype
    try:
        return Learner(
            backend,
            PolicyObjective(loss, config.loss.metrics, document_axis(backend.mesh)),
            config.optimizer.optimizer(config.schedule.steps),
            packing,
            temperature=config.rollout.temperature,
            keeps_reference=config.evaluation.kl,
            labels={"reduction": f"mesh {config.mesh}", "dtype": dtype},
        )
    except EngineUnavailable as error:
        engine = config.loss.engine
        require(engine == "auto", "--loss.engine", "an engine that can run here", f"{engine}: {error}")
        raise


def _source(
    config: Config, task: Task, rewards: Rewards, origin: Origin, sizes: Sizes, source: Any
) -> ExperienceSource | None:
    if config.source is not None:
        limits = {"vocab_size": origin.vocab_size, "row_length": sizes.row}
        return None if source is None else OwnSource(source, config.source, **limits)
    rollout = config.rollout
    prompts = PromptOrder(task, config.seed, config.schedule.epochs)
    filters = {"top_k": rollout.top_k, "top_p": rollout.top_p, "min_p": rollout.min_p}
    sampling = SamplingOptions(sizes.completion, stop=rollout.stop, **filters)
    return Rollouts(prompts, rewards, rollout, sampling, sizes.prompt, config.loss.advantages)


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
