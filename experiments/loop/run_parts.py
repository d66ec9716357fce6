"""Parts of a run that its options do not describe, recorded when it begins and compared by whatever opens it again.

They are the caller's own task, rewards and model, the file of examples, and the small files of a model from disk.
"""

import hashlib
import inspect
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from flax import nnx

from experiments.experience.own_source import source_name
from experiments.models.pretrained import Pretrained, small_files
from experiments.processes import processes
from experiments.runs.identity import RunParts
from experiments.tasks import Reward, Rewards, Task
from experiments.tasks.protocol import data_digest
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
    task: Task, user: UserParts, rewards: Rewards | None, source: Any, pretrained: Pretrained | None
) -> RunParts:
    """The parts of a run; `rewards` and `source` are the caller's, as they have been found.

    Raises:
        ValueError: if the processes of a run have different parts.
    """
    own: dict[str, Any] = {} if user.task is None else {f"task {type(user.task).__name__}": type(user.task)}
    if rewards is not None:
        own |= {f"reward {term.name}": term.function for term in rewards.terms}
    if user.model is not None:
        own[f"model {type(user.model).__name__}"] = type(user.model)
    if source is not None:
        own[f"source {source_name(source)}"] = source
    sources = {name: _source_digest(value) for name, value in own.items()}
    files = {} if pretrained is None else {name: _sha256(data) for name, data in small_files(pretrained).items()}
    parts = RunParts(
        examples=data_digest(task),
        task=None if user.task is None else type(user.task).__name__,
        rewards=None if rewards is None else tuple((term.name, float(term.weight)) for term in rewards.terms),
        files=tuple(sorted(files.items())),
        sources=tuple((name, digest) for name, digest in sources.items() if digest is not None),
    )
    processes().require_same("parts of the run", {name: str(value) for name, value in asdict(parts).items()})
    return parts


def require_own_task(saved: RunParts, own_task: Task | None) -> None:
    """Refuses to take a built-in task for the caller's own, or the other way round; comes before the task is looked up.

    Raises:
        ValueError: if the run began with another kind of task.
    """
    name = None if own_task is None else type(own_task).__name__
    require(
        name == saved.task,
        "task",
        _wanted("task", saved.task),
        "none of your own" if name is None else f"your own task {name}",
    )


def require_same_parts(saved: RunParts, now: RunParts) -> list[str]:
    """Compares the parts of a run that is resumed with those that it began with.

    Returns:
        A warning for each function or class whose source code has changed.

    Raises:
        ValueError: if anything but source code is different; names it.
    """
    wanted, given = (None if rewards is None else _listed(rewards) for rewards in (saved.rewards, now.rewards))
    require(
        saved.rewards == now.rewards,
        "reward",
        _wanted("reward", wanted),
        "none of your own" if given is None else f"your own reward {given}",
    )
    require(now.examples == saved.examples, "--task", *_examples(saved, now))
    require_same_files(saved, now)
    return changed_since(saved, now)


def require_same_files(saved: RunParts, now: RunParts) -> None:
    """Raises ValueError if a config.json, tokenizer or template is not the one that the run began with."""
    then, found = dict(saved.files), dict(now.files)
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


def _source_digest(value: Any) -> str | None:
    """The sha256 of the source code; None where it cannot be read, and of a lambda, whose source is the lines around it."""
    if getattr(value, "__name__", None) == "<lambda>":
        return None
    try:
        return _sha256(inspect.getsource(value if hasattr(value, "__name__") else type(value)).encode())
    except (OSError, TypeError):
        return None


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
