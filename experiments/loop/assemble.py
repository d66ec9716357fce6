"""Everything that a run consists of, made from its options."""

from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import jax
from flax import nnx

from experiments.config import Config
from experiments.experience.document_list import DocumentList
from experiments.experience.experience import ExperienceSource
from experiments.experience.limits import Limits
from experiments.experience.options import STORED
from experiments.experience.own_source import OwnSource
from experiments.experience.prompts import LengthLimits, PromptStream
from experiments.experience.rollouts import Rollouts
from experiments.experience.stored import read_documents
from experiments.learner.exact_kl import ExactKL
from experiments.learner.learner import Learner
from experiments.learner.model_source import ModelSource
from experiments.learner.objectives import CrossEntropy, PolicyObjective
from experiments.loop.evaluation import AnswerEvaluation
from experiments.loop.feed import DocumentFeed
from experiments.loop.inference import Inference, make_inference
from experiments.loop.supervised import SupervisedFile
from experiments.loop.teacher import load_teacher
from experiments.models.attention import AttentionRun
from experiments.models.dtype_choice import capability_of
from experiments.models.mesh import document_axis
from experiments.sampling.policy import SamplerPolicy, Shape
from experiments.tasks import Rewards, Task
from jaxlogp.errors import EngineUnavailable, require
from jaxlogp.head import HeadRun
from jaxlogp.policy.documents import SAMPLER_COLUMN

MINIBATCHES = 3
"""Added to the seed of a run: the seed of the order of documents in several passes over a rollout."""
SELECTION = 5
"""Added to the seed of a run: the seed of the labels that --loss.name clip_cov draws."""
OWN_SOURCE = 4
"""First number of the seeds of a source of the caller's own, in front of those that it gives."""
FASTEST_ON_GPU = ("hopper", "triton")


@dataclass(frozen=True)
class Setup(Inference):
    """Everything that a run consists of."""

    attention: AttentionRun
    learner: Learner
    source: ExperienceSource

    @property
    def shapes(self) -> dict[str, Shape]:
        """What is drawn, by its name in the account of memory."""
        shapes = {"rollout": self.source.shape} if isinstance(self.source, Rollouts) else {}
        return shapes | ({"evaluation": self.evaluation.shape} if isinstance(self.evaluation, AnswerEvaluation) else {})

    @property
    def params(self) -> nnx.State:
        """The present parameters, until the next step takes over their memory."""
        return self.learner.state.params

    @property
    def warnings(self) -> list[str]:
        dtype = None if self.model.decoder is None else self.model.decoder.dtype
        found = self.model.warning, slower_head(self.learner.gradients.head_run, dtype)
        return [text for text in found if text is not None]

    def policy_of(self, params: nnx.State) -> SamplerPolicy:
        """Returns a policy that draws and scores by these parameters, if present by the learner's program."""
        if params is not self.params:
            return super().policy_of(params)
        return SamplerPolicy(self.samplers, params, self.learner.version, self.learner.log_probs, self.key)

    def policy(self) -> SamplerPolicy:
        """Returns the policy of the present parameters, from which a source draws."""
        key = self.key if self.config.source is None else jax.random.fold_in(self.key, OWN_SOURCE)
        learner = self.learner
        scores = learner.log_probs, key, learner.reference_log_probs
        return SamplerPolicy(self.samplers, learner.state.params, learner.version, *scores)

    def feed(self) -> DocumentFeed:
        config = self.config
        return DocumentFeed(
            self.source,
            self.learner.packing,
            config.schedule.docs_per_step,
            exact=config.invariant,
            rescore=bool(config.rollout.rescore),
            epochs=config.schedule.epochs_per_rollout,
            seed=config.seed + MINIBATCHES,
        )

    @property
    def warms_up(self) -> bool:
        return bool(self.config.warm_start.max_steps)


def assemble(
    config: Config,
    task: Task | None = None,
    rewards: Rewards | None = None,
    *,
    model: ModelSource | None = None,
    restored: bool = False,
    sizes: LengthLimits | None = None,
    source: Any = None,
) -> Setup:
    """Makes everything that a run needs, as `make_inference` does; `source` is your own, which ``config.source`` names."""
    base = make_inference(config, task, rewards, model=model, restored=restored, sizes=sizes)
    ranks, sizes = base.packing.ranks, base.sizes
    return Setup(
        **vars(base),
        attention=base.model.attention_run(ranks * sizes.rows, sizes.row, base.mesh),
        learner=_learner(base),
        source=_built_in_source(base) if base.config.source is None else _own_source(base, source),
    )


def _learner(base: Inference) -> Learner:
    config, model, backend = base.config, base.model, base.backend
    columns = (SAMPLER_COLUMN,) if config.rollout.rescore else ()
    dtype = None if model.decoder is None else model.decoder.dtype
    try:
        return Learner(
            backend,
            CrossEntropy() if config.supervised else _policy_objective(base),
            config.optimizer.optimizer(config.schedule.steps),
            replace(base.packing, columns=columns, support_capacity=_support_capacity(base)),
            backend.take_params(),
            temperature=config.rollout.temperature,
            skips=config.skips_documents(),
            selection=config.loss.selection(),
            entropy_control=config.loss.entropy_control(),
            seed=config.seed + SELECTION,
            keeps_reference=config.evaluation.kl or config.reward.kl_coefficient > 0.0,
            moving_reference=config.loss.moving_reference(),
            teacher=load_teacher(config, model, base.packing.ranks * base.sizes.rows, base.sizes.row, base.mesh),
            labels={"reduction": f"mesh {config.mesh}", "dtype": dtype},
        )
    except EngineUnavailable as error:
        engine = config.loss.engine
        require(engine == "auto", "--loss.engine", "an engine that can run here", f"{engine}: {error}")
        raise


def _support_capacity(base: Inference) -> int | None:
    """Returns the ids of a micro-batch, enough for the longest document of a sampler; None without --loss.on-support."""
    if not base.config.loss.on_support:
        return None
    return base.packing.rows * base.packing.row_length * min(base.config.loss.support_room, base.model.vocab_size)


def _policy_objective(base: Inference) -> PolicyObjective:
    # What a source of one's own draws may be as long as a row.
    longest = base.sizes.completion if base.config.source is None else base.sizes.row
    config, scales = base.config, base.config.loss.entropy_target is not None
    loss, kind, exact = config.policy_loss(longest), config.loss.exact_kl, None
    if kind is not None:
        loss, exact = ExactKL.in_place_of(loss, kind)
    return PolicyObjective(loss, config.loss.metrics, document_axis(base.mesh), scales, exact)


def _built_in_source(base: Inference) -> ExperienceSource:
    task, config = base.task, base.config
    if not isinstance(task, SupervisedFile):
        return _rollouts(base, task)
    found, schedule = task.load(base.tokenizer), config.schedule
    order = {"docs_per_call": schedule.docs_per_step, "epochs": schedule.epochs, "seed": config.seed}
    return DocumentList(found.documents["train"], digest=found.digest, **order)


def _own_source(base: Inference, source: Any) -> OwnSource:
    name, schedule = base.config.source, base.config.schedule
    assert name is not None, "the options name it"
    limits = {"vocab_size": base.model.vocab_size, "row_length": base.sizes.row}
    if name.startswith(STORED):
        stored, digest = read_documents(name.removeprefix(STORED), Limits(**limits))
        # Their versions are those of the run that drew them.
        documents = [replace(document, versions=0) for document in stored]
        call = schedule.docs_per_step or len(documents)
        source = DocumentList(documents, docs_per_call=call, epochs=schedule.epochs, digest=digest)
    return OwnSource(source, name, support_capacity=_support_capacity(base), **limits)


def _rollouts(base: Inference, task: Task) -> Rollouts:
    config, rollout = base.config, base.config.rollout
    prompts = PromptStream(task, config.seed, config.schedule.epochs)
    assert base.rewards is not None, "completions are rewarded"
    recording = {"record_support": bool(config.loss.on_support), "support_room": config.loss.support_room}
    sampling = rollout.sampling_options(base.sizes.completion, **recording)
    return Rollouts(prompts, base.rewards, rollout, sampling, base.sizes.prompt, config.loss.advantages, config.reward)


def slower_head(head_run: HeadRun | None, dtype: str | None) -> str | None:
    """A warning where no engine was named and a slower one runs than a GPU could use; the head multiplies in `dtype`."""
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
