"""Parts of a run that its options do not describe, recorded when it begins and compared by whatever opens it again.

They are the user's own task, rewards, model and source, the file of examples, and the small files of a model from disk.
"""

import hashlib
import inspect
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from flax import nnx

from experiments.config import Config
from experiments.learner.model_source import ModelSource, UserModel
from experiments.models.pretrained import small_files
from experiments.named import OWN
from experiments.processes import processes
from experiments.runs.identity import RunParts
from experiments.tasks import Reward, Rewards, Task
from experiments.tasks.prompted import PromptedTask
from experiments.tasks.protocol import data_digest
from experiments.tasks.registry import NamedTask
from experiments.tasks.rewards import CORRECT, REWARDS, find_reward
from jaxlogp.errors import require

RewardPairs = Sequence[tuple[Reward, float]]
"""Reward functions with their weights."""


@dataclass(frozen=True)
class UserParts:
    """What a caller brings of its own; see `experiments.loop.run.train`."""

    task: Task | None = None
    reward: Reward | RewardPairs | Rewards | None = None
    model: nnx.Module | None = None
    source: Any = None


NOTHING_OWN = UserParts()


def parts_of(
    config: Config, task: Task, user: UserParts, rewards: Rewards | None, source: Any, model: ModelSource
) -> RunParts:
    """Returns the parts of a run; `rewards` and `source` are the caller's own, None for those of the options."""
    code = {**_task_code(task, user.task), **_reward_code(config.reward.functions, rewards)}
    if isinstance(model, UserModel):
        code[f"model {_without_own(config.model.own)}"] = (model.found, type(model.model))
    if source is not None:
        code[f"source {_without_own(config.source)}"] = (source,)
    sources = {name: _source_digest(values) for name, values in code.items()}
    parts = RunParts(
        examples=data_digest(task),
        task=None if user.task is None else type(user.task).__name__,
        rewards=None if rewards is None else tuple((term.name, float(term.weight)) for term in rewards.terms),
        files=files_of(model),
        sources=tuple((name, digest) for name, digest in sources.items() if digest is not None),
    )
    processes().require_same("parts of the run", {name: str(value) for name, value in asdict(parts).items()})
    return parts


def _task_code(task: Task, own_task: Task | None) -> dict[str, tuple[Any, ...]]:
    if own_task is not None:
        return {f"task {type(own_task).__name__}": (type(own_task),)}
    # --data puts other words around it.
    named = task.task if type(task) is PromptedTask else task
    return {f"task {named.name}": (named.found, type(named.task))} if isinstance(named, NamedTask) else {}


def _reward_code(names: Sequence[str], rewards: Rewards | None) -> dict[str, tuple[Any, ...]]:
    if rewards is not None:
        return {f"reward {term.name}": (term.function,) for term in rewards.terms}
    return {f"reward {name}": (find_reward(name),) for name in names if name not in (CORRECT, *REWARDS)}


def _without_own(name: str | None) -> str:
    return (name or "").removeprefix(OWN)


def require_own_task(saved: RunParts, own_task: Task | None) -> None:
    """Refuses to take the options' task for one passed from Python, or the other way round, before the task is looked up."""
    name = None if own_task is None else type(own_task).__name__
    require(
        name == saved.task,
        "task",
        _wanted("task", saved.task),
        "none of your own" if name is None else f"your own task {name}",
    )


def require_same_parts(saved: RunParts, now: RunParts) -> list[str]:
    """Refuses a resume with other parts, and returns a warning for each function or class whose source code has changed."""
    wanted, given = (None if rewards is None else _listed(rewards) for rewards in (saved.rewards, now.rewards))
    require(
        saved.rewards == now.rewards,
        "reward",
        _wanted("reward", wanted),
        "none of your own" if given is None else f"your own reward {given}",
    )
    require(now.examples == saved.examples, "--task", *_examples(saved, now))
    require_same_files(saved, now.files)
    return changed_since(saved, now)


def files_of(model: ModelSource) -> tuple[tuple[str, str], ...]:
    small = {} if model.pretrained is None else small_files(model.pretrained)
    return tuple(sorted((name, _sha256(data)) for name, data in small.items()))


def require_same_files(saved: RunParts, now: Sequence[tuple[str, str]]) -> None:
    """Raises ValueError if a config.json, tokenizer or template is not the one that the run began with."""
    then, found = dict(saved.files), dict(now)
    for name in sorted(then.keys() | found.keys()):
        expected = f"the {name} that the run began with (sha256 {then.get(name)})"
        got = f"a different one (sha256 {found[name]})" if name in found else "none"
        require(found.get(name) == then.get(name), "model", expected, got)


def changed_since(saved: RunParts, now: RunParts) -> list[str]:
    """Returns a warning for other examples, and for each of the caller's functions and classes whose source has changed."""
    then = dict(saved.sources)
    changed = [name for name, digest in now.sources if name in then and then[name] != digest]
    warnings = [f"the source code of {name} has changed since the run began" for name in changed]
    if now.examples != saved.examples:
        expected, got = _examples(saved, now)
        warnings.append(f"--task: expected {expected}, got {got}")
    return warnings


def _wanted(part: str, named: str | None) -> str:
    if named is None:
        return f"the options' {part}, as the run began"
    return f"your own {part} {named}, as the run began (from Python: {part}=)"


def _examples(saved: RunParts, now: RunParts) -> tuple[str, str]:
    return f"the examples that the run began with (sha256 {saved.examples})", f"others (sha256 {now.examples})"


def _listed(rewards: tuple[tuple[str, float], ...]) -> str:
    return ", ".join(f"{name} (weight {str(weight).removesuffix('.0')})" for name, weight in rewards)


def _source_digest(values: Sequence[Any]) -> str | None:
    """The sha256 of the source code of functions, classes and objects of these; None where none can be read."""
    texts = [text for value in values if (text := _source_code(value)) is not None]
    return _sha256("\n".join(texts).encode()) if texts else None


def _source_code(value: Any) -> str | None:
    """None where it cannot be read, and of a lambda, whose source is the lines around it."""
    if getattr(value, "__name__", None) == "<lambda>":
        return None
    try:
        return inspect.getsource(value if hasattr(value, "__name__") else type(value))
    except (OSError, TypeError):
        return None


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
