"""Everything that a run consists of, made from its options."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import jax
from flax import nnx

from experiments.config import Config
from experiments.experience.experience import ExperienceSource
from experiments.experience.own_source import OwnSource
from experiments.experience.prompts import PromptOrder
from experiments.experience.rollouts import Rollouts
from experiments.learner.learner import Learner
from experiments.learner.objectives import PolicyObjective
from experiments.learner.packing import Packing
from experiments.loop.feed import DocumentFeed
from experiments.loop.inference import Inference, make_inference
from experiments.loop.model_source import Origin
from experiments.loop.warm_start import WarmStart, WorkedExamples
from experiments.models.attention import AttentionRun
from experiments.models.dtype_choice import capability_of
from experiments.models.mesh import document_axis, parse_mesh
from experiments.runs.console import RunConsole
from experiments.runs.folder import MetricsWriter
from experiments.sampling.policy import SamplerPolicy, SamplingOptions
from experiments.tasks import Rewards, Task
from jaxlogp.errors import EngineUnavailable, require
from jaxlogp.head import HeadRun
from jaxlogp.policy.documents import SAMPLER_COLUMN

CHECK_PROMPTS = 512
OWN_SOURCE = 4
"""First number of the seeds of a source of the caller's own, in front of those that it gives."""
FASTEST_ON_GPU = ("hopper", "triton")


@dataclass(frozen=True)
class Setup(Inference):
    """Everything that a run consists of.

    Attributes:
        attention: the implementation of attention over micro-batches, and why it.
        source: where documents come from.
    """

    attention: AttentionRun
    learner: Learner
    source: ExperienceSource

    @property
    def params(self) -> nnx.State:
        """The present parameters, until the next step takes over their memory."""
        return self.learner.state.params

    @property
    def warnings(self) -> list[str]:
        """What the console should say before the run."""
        dtype = None if self.origin.decoder is None else self.origin.decoder.dtype
        found = self.origin.warning, slower_head(self.learner.gradients.head_run, dtype)
        return [text for text in found if text is not None]

    def policy(self) -> SamplerPolicy:
        """Returns the policy of the present parameters, from which a source draws."""
        learner, key = self.learner, jax.random.key(self.config.seed)
        key = key if self.config.source is None else jax.random.fold_in(key, OWN_SOURCE)
        return SamplerPolicy(self.generator, self.params, learner.version, learner.log_probs, key)

    def feed(self) -> DocumentFeed:
        """Returns what gives the documents of each step."""
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
            self.backend,
            WorkedExamples(PromptOrder(task, seed + 1, None), self.tokenizer, self.sizes.prompt),
            replace(self.learner.packing, columns=()),
            lambda params, step: self.evaluation.exact_match_on(checks, self.policy_of(params), step),
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
        task: see `make_inference`.
        rewards: likewise.
        model: likewise.
        origin: likewise.
        restored: likewise.
        source: your own source, which ``config.source`` names.

    Raises:
        ValueError: as `make_inference`, and if an engine cannot run here.
    """
    base = make_inference(config, task, rewards, model, origin=origin, restored=restored)
    ranks, sizes = parse_mesh(config.mesh).ranks, base.sizes
    return Setup(
        **vars(base),
        attention=base.origin.attention_run(ranks * sizes.rows, sizes.row, base.mesh),
        learner=_learner(base, ranks),
        source=_rollouts(base) if source is None else _own_source(base, source),
    )


def _learner(base: Inference, ranks: int) -> Learner:
    config, origin, backend, sizes = base.config, base.origin, base.backend, base.sizes
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


def _own_source(base: Inference, source: Any) -> OwnSource:
    assert base.config.source is not None, "the options name it"
    return OwnSource(source, base.config.source, vocab_size=base.origin.vocab_size, row_length=base.sizes.row)


def _rollouts(base: Inference) -> Rollouts:
    config, rollout = base.config, base.config.rollout
    prompts = PromptOrder(base.task, config.seed, config.schedule.epochs)
    filters = {"top_k": rollout.top_k, "top_p": rollout.top_p, "min_p": rollout.min_p}
    sampling = SamplingOptions(base.sizes.completion, stop=rollout.stop, **filters)
    return Rollouts(prompts, base.rewards, rollout, sampling, base.sizes.prompt, config.loss.advantages)


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
