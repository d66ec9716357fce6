"""What of a run draws and scores: for commands that read a run, and the larger part of what trains one."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np
from flax import nnx

from experiments.config import Config, validate
from experiments.experience.prompts import Sizes, sizes_for
from experiments.loop.evaluation import Evaluation
from experiments.loop.model_source import Origin, origin_of
from experiments.sampling.policy import Generator, SamplerPolicy, SamplingOptions
from experiments.tasks import Rewards, Task
from experiments.tasks.configured import configured_rewards, task_for
from experiments.tasks.tokenizer import Tokenizer
from experiments.training.modes import InvariantMode, Mode, PlainMode
from jaxlogp import Document


@dataclass(frozen=True)
class Inference:
    """What draws completions and scores them.

    Attributes:
        config: the options, resolved.
        origin: the model that the run began with.
        backend: how it is computed; it has the parameters until they are taken.
        sizes: most tokens of a prompt, of a completion and of a row.
    """

    config: Config
    task: Task
    rewards: Rewards
    origin: Origin
    backend: Mode
    sizes: Sizes
    generator: Generator
    evaluation: Evaluation

    @property
    def tokenizer(self) -> Tokenizer:
        """Text to ids and back."""
        return self.origin.tokenizer

    @property
    def mesh(self) -> jax.sharding.Mesh:
        """The device mesh of the training."""
        return self.backend.mesh

    def policy_of(self, params: nnx.State) -> SamplerPolicy:
        """Returns a policy that draws by these parameters, and does not score documents."""

        def log_probs(documents: Sequence[Document]) -> list[np.ndarray]:
            raise NotImplementedError("the policy of an evaluation does not score documents")

        return SamplerPolicy(self.generator, params, 0, log_probs, jax.random.key(self.config.seed))


def make_inference(
    config: Config,
    task: Task | None = None,
    rewards: Rewards | None = None,
    model: nnx.Module | None = None,
    *,
    origin: Origin | None = None,
    restored: bool = False,
) -> Inference:
    """Makes what draws and scores.

    Args:
        config: the options.
        task: your own task instead of the one that ``config.task`` names.
        rewards: your own rewards instead of those that ``config.reward`` names.
        model: your own model instead of the decoder that ``config.model`` describes.
        origin: the model, where the caller has made it of the same options.
        restored: whether a checkpoint will bring the parameters: none are drawn or read.

    Raises:
        ValueError: if an option is out of range, a task unknown, or a mesh does not match.
    """
    mesh = validate(config)
    config = config.resolved()
    task = task_for(config) if task is None else task
    rewards = configured_rewards(config.reward, task) if rewards is None else rewards
    origin = origin or origin_of(config, task, model, restored=restored)
    backend = (InvariantMode if config.invariant else PlainMode)(config, origin)
    sizes = sizes_for(task, origin.tokenizer, config.rollout, config.schedule, mesh, backend.leaf_rows)
    options = SamplingOptions(sizes.completion, temperature=1.0, stop=config.rollout.stop)
    return Inference(
        config=config,
        task=task,
        rewards=rewards,
        origin=origin,
        backend=backend,
        sizes=sizes,
        generator=Generator(backend.draw, origin.tokenizer, config.rollout.temperature, sizes.row),
        evaluation=Evaluation(task, rewards, config.evaluation.num_prompts, sizes.prompt, options),
    )
