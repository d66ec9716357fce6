"""The task and the rewards that options describe."""

from dataclasses import fields

from experiments.config import Config, DataConfig, RewardConfig
from experiments.options import refused_as
from experiments.tasks.jsonl import JsonlFormat
from experiments.tasks.prompted import PromptedTask
from experiments.tasks.protocol import Task
from experiments.tasks.registry import make_task
from experiments.tasks.rewards import RewardOptions, Rewards, rewards_for


def task_for(config: Config) -> Task:
    """The task that ``config.task`` names, asked as ``config.data`` says.

    Raises:
        ValueError: a name or an option that cannot be used, or a file with a bad line.
    """
    form = _format(config.data)
    return _asked(make_task(config.task, seed=config.seed, form=form), config.data)


def own_task(task: Task, data: DataConfig) -> Task:
    """A task of the caller's own, asked as options say.

    Raises:
        ValueError: an unknown rule, or an option that belongs to files.
    """
    _format(data).require_default()
    return _asked(task, data)


def _asked(task: Task, data: DataConfig) -> Task:
    if data.system is None and data.instruction is None and not data.extract:
        return task
    with refused_as("data"):
        return PromptedTask(task, data.system, data.instruction, data.extract)


def configured_rewards(options: RewardConfig, task: Task) -> Rewards:
    """The rewards that options name.

    Raises:
        ValueError: as `rewards_for`.
    """
    return rewards_for(task, options.functions, options.weights, RewardOptions(options.pattern, options.length))


def _format(data: DataConfig) -> JsonlFormat:
    with refused_as("data"):
        return JsonlFormat(**{each.name: getattr(data, each.name) for each in fields(JsonlFormat)})
