"""What of a run draws and scores: for commands that read a run, and the larger part of what trains one."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np
from flax import nnx

from experiments.config import Config, RolloutConfig, validate
from experiments.experience.prompts import LengthLimits
from experiments.learner.model_source import ModelSource
from experiments.learner.objectives import CrossEntropy
from experiments.learner.packing import Packing
from experiments.learner.scoring import log_probs_of
from experiments.loop.backends import RunBackend, make_backend
from experiments.loop.evaluation import AnswerEvaluation, Evaluation
from experiments.loop.find_model import find_model
from experiments.loop.supervised import LossEvaluation, SupervisedFile, find_sizes, find_task
from experiments.models.tokenizer import Tokenizer
from experiments.sampling.options import SamplingOptions
from experiments.sampling.policy import SamplerPolicy, Samplers
from experiments.tasks import Rewards, Task
from jaxlogp import Document


@dataclass(frozen=True)
class Inference:
    """What draws completions and scores documents. The backend has the parameters until they are taken."""

    config: Config
    task: Task | SupervisedFile
    rewards: Rewards | None
    model: ModelSource
    backend: RunBackend
    sizes: LengthLimits
    packing: Packing
    samplers: Samplers
    evaluation: Evaluation

    @property
    def tokenizer(self) -> Tokenizer:
        return self.model.tokenizer

    @property
    def mesh(self) -> jax.sharding.Mesh:
        return self.backend.mesh

    @property
    def key(self) -> jax.Array:
        return jax.random.key(self.config.seed)

    def policy_of(self, params: nnx.State) -> SamplerPolicy:
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
    sizes: LengthLimits | None = None,
) -> Inference:
    """Makes what draws and scores; no parameters are drawn or read if a checkpoint will bring `restored` ones.

    Your own task and rewards stand in for those that the options name; `model` is one made of the same options, or your own;
    `sizes` are those of the run, if they are known.
    """
    mesh = validate(config)
    config = config.resolved()
    task = find_task(config) if task is None else task
    model = model or find_model(config, task, None, restored=restored)
    tokenizer = model.tokenizer
    backend, sizes = make_backend(config, model), sizes or find_sizes(config, task, tokenizer)
    if isinstance(task, SupervisedFile):
        rewards = None
        held_out = task.load(tokenizer).documents["held_out"]
        evaluation = LossEvaluation(held_out, config.evaluation.num_prompts)
    else:
        rewards = config.reward.rewards(task) if rewards is None else rewards
        refills = model.decoder is not None and not config.invariant
        rows = completions_at_a_time(config.rollout, backend.rollout_ranks) if refills else config.rollout.rows
        options = SamplingOptions(sizes.completion, temperature=1.0, stop=config.rollout.stop, rows=rows)
        asked = config.evaluation
        evaluation = AnswerEvaluation(task, rewards, asked.num_prompts, sizes.prompt, options, asked.samples)
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


def completions_at_a_time(rollout: RolloutConfig, ranks: int) -> int:
    """Returns how many completions a rank draws at a time; an evaluation as many as a rollout, so that it takes no more."""
    return rollout.rows or math.ceil(rollout.prompts_per_rollout * rollout.num_generations / ranks)
