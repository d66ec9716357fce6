"""What options and caller name, found and compared between the processes, before anything is compiled."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.config import Config, RewardConfig
from experiments.experience.prompts import LengthLimits
from experiments.learner.model_source import DecoderSource, ModelSource
from experiments.loop.assemble import Setup, assemble
from experiments.loop.find_model import find_model
from experiments.loop.run_parts import RewardPairs, UserParts, parts_of
from experiments.loop.start_report import print_start_report
from experiments.loop.supervised import SupervisedFile, find_sizes, find_task
from experiments.models.dtype_choice import DtypeChoice
from experiments.options import flat_fields, option_name, replaced, value_of
from experiments.processes import processes
from experiments.runs.config_file import to_json
from experiments.runs.console import RunConsole
from experiments.runs.environment import versions_text
from experiments.runs.identity import RunParts
from experiments.tasks import Reward, Rewards, Task
from experiments.tasks.protocol import data_digest
from experiments.tasks.rewards import rewards_of
from jaxlogp.errors import require


@dataclass(frozen=True)
class Found:
    """Rewards and source are the caller's; None for those of the options."""

    config: Config
    task: Task | SupervisedFile
    rewards: Rewards | None
    source: Any
    model: ModelSource
    sizes: LengthLimits
    parts: RunParts

    def report(self, folder: Path, dtype: DtypeChoice) -> None:
        print_start_report(self.config, self.task, self.model, self.sizes, folder, dtype, self.rewards)

    def assemble(self, *, restored: bool = False) -> Setup:
        given = {"model": self.model, "restored": restored, "sizes": self.sizes, "source": self.source}
        with RunConsole(self.config.quiet).waiting("making model, learner and sampler"):
            return assemble(self.config, self.task, self.rewards, **given)

    def with_options(
        self, *, remat: str | None = None, rows: int | None = None, at_a_time: int | None = None
    ) -> "Found":
        """Returns the same with another recomputation, of a decoder, rows of a micro-batch, or completions at a time."""
        changes = {"model.remat": remat, "schedule.rows": rows, "rollout.rows": at_a_time}
        config = replaced(self.config, {name: value for name, value in changes.items() if value is not None})
        sizes = self.sizes if rows is None else self.sizes._replace(rows=rows)
        if remat is None:
            return dataclasses.replace(self, config=config, sizes=sizes)
        assert isinstance(self.model, DecoderSource), "no other model has a choice"
        model = dataclasses.replace(self.model, decoder=dataclasses.replace(self.model.decoder, remat=remat))
        return dataclasses.replace(self, config=config, model=model, sizes=sizes)


def find_parts(
    config: Config, user: UserParts, task: Task | SupervisedFile, source: Any, *, restored: bool = False
) -> Found:
    """Finds rewards and model, and compares them between the processes."""
    rewards = resolve_rewards(config, user.reward)
    require(rewards is None or not config.supervised, "reward", "none in supervised learning", "your own")
    config = dataclasses.replace(config, task=task.name)
    require_same_run(config, task)
    with RunConsole(config.quiet).waiting("reading the model's tables and the task's prompts"):
        model = find_model(config, task, user.model, restored=restored)
        parts = parts_of(config, task, user, rewards, source, model)
        sizes = find_sizes(config, task, model.tokenizer)
    return Found(config, task, rewards, source, model, sizes, parts)


def require_same_run(config: Config, task: Task | SupervisedFile) -> None:
    """Refuses processes that would not compute the same run: with other versions, options or data."""
    # What one of them prints is its own affair.
    options = {
        option_name(field): to_json(value_of(config, field))
        for field in flat_fields(Config)
        if field not in ("quiet", "log_every")
    }
    processes().require_same(
        "options", {**options, "versions": versions_text(), "the examples' sha256": data_digest(task)}
    )


def resolve_task(config: Config, task: Task | None) -> Task | SupervisedFile:
    """The task that options name, or the caller's own, asked as options say."""
    return find_task(config) if task is None else config.data.user_task(task)


def resolve_rewards(config: Config, reward: Reward | RewardPairs | Rewards | None) -> Rewards | None:
    if reward is None:
        return None
    expected = "no other options where train is given a reward"
    require(config.reward == RewardConfig(), "--reward", expected, "other options")
    return rewards_of(reward)
