"""What of a run draws and scores: for commands that read a run, and the larger part of what trains one."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np
from flax import nnx

from experiments.config import Config, validate
from experiments.experience.prompts import Sizes, sizes_for
from experiments.learner.model_source import ModelSource
from experiments.learner.objectives import CrossEntropy
from experiments.learner.packing import Packing
from experiments.learner.scoring import log_probs_of
from experiments.loop.backends import RunBackend, make_backend
from experiments.loop.evaluation import AnswerEvaluation, Evaluation
from experiments.loop.find_model import find_model
from experiments.loop.supervised import LossEvaluation, SupervisedFile, find_task
from experiments.models.tokenizer import Tokenizer
from experiments.sampling.options import SamplingOptions
from experiments.sampling.policy import SamplerPolicy, Samplers
from experiments.tasks import Rewards, Task
from jaxlogp import Document


@dataclass(frozen=True)
class Inference:
    """What draws completions and scores them.

    Attributes:
        config: the options, resolved.
        model: the model that the run began with.
        backend: how it is computed; it has the parameters until they are taken.
        sizes: most tokens of a prompt, of a completion and of a row.
        rewards: None of a supervised run.
        packing: how documents become micro-batches to score.
    """

    config: Config
    task: Task | SupervisedFile
    rewards: Rewards | None
    model: ModelSource
    backend: RunBackend
    sizes: Sizes
    packing: Packing
    samplers: Samplers
    evaluation: Evaluation

    @property
    def tokenizer(self) -> Tokenizer:
        """Text to ids and back."""
        return self.model.tokenizer

    @property
    def mesh(self) -> jax.sharding.Mesh:
        """The device mesh of the training."""
        return self.backend.mesh

    @property
    def key(self) -> jax.Array:
        """The key of the run's random numbers."""
        return jax.random.key(self.config.seed)

    def policy_of(self, params: nnx.State) -> SamplerPolicy:
        """Returns a policy that draws and scores by these parameters."""

        def log_probs(documents: Sequence[Document]) -> list[np.ndarray]:
            gradients = self.backend.gradients(CrossEntropy(), self.config.rollout.temperature)
            return log_probs_of(documents, gradients, params, self.packing)

        return SamplerPolicy(self.samplers, params, 0, log_probs, self.key)


def make_inference(
    config: Config,
    task: Task | SupervisedFile | None = None,
    rewards: Rewards | None = None,
    *,
    model: ModelSource | None = None,
    restored: bool = False,
) -> Inference:
    """Makes what draws and scores.

    Args:
        config: the options.
        task: your own task instead of the one that ``config.task`` names.
        rewards: your own rewards instead of those that ``config.reward`` names.
        model: the model, where the caller has made it of the same options, or brings one.
        restored: whether a checkpoint will bring the parameters: none are drawn or read.

    Raises:
        ValueError: if an option is out of range, a task unknown, or a mesh does not match.
    """
    mesh = validate(config)
    config = config.resolved()
    task = find_task(config) if task is None else task
    model = model or find_model(config, task, None, restored=restored)
    tokenizer = model.tokenizer
    backend = make_backend(config, model)
    if isinstance(task, SupervisedFile):
        rewards, sizes = None, task.sizes(tokenizer, config.schedule, mesh, backend.leaf_rows)
        held_out = task.load(tokenizer).documents["held_out"]
        evaluation = LossEvaluation(held_out, config.evaluation.num_prompts)
    else:
        rewards = config.reward.rewards(task) if rewards is None else rewards
        sizes = sizes_for(task, tokenizer, config.rollout, config.schedule, mesh, backend.leaf_rows)
        options = SamplingOptions(sizes.completion, temperature=1.0, stop=config.rollout.stop)
        evaluation = AnswerEvaluation(task, rewards, config.evaluation.num_prompts, sizes.prompt, options)
    shapes = mesh.ranks, sizes.rows, sizes.row, model.vocab_size, tokenizer.pad_id
    return Inference(
        config=config,
        task=task,
        rewards=rewards,
        model=model,
        backend=backend,
        sizes=sizes,
        packing=Packing(*shapes, share_rows=backend.leaf_rows is None),
        samplers=Samplers(backend.make_sampler, tokenizer, config.rollout.temperature, sizes.row),
        evaluation=evaluation,
    )
