"""Options that a resume may change."""

from collections.abc import Mapping
from typing import Any

from experiments.config.run import Config
from experiments.options import flat_fields, option_name, replaced, value_of

_CHANGEABLE = {
    *("mesh", "rollout.mesh", "quiet", "log_every", "schedule.steps", "optimizer.learning_rate"),
    *("evaluation", "checkpoint", "drift", "guards"),
}
# With it a checkpoint holds the policy that training began with; one that was saved without it cannot bring it back.
_FIXED = ("evaluation.kl",)


def may_change(field: str) -> bool:
    """Returns True if a resume may change an option: the place and length of the run and its reports, not its identity."""
    return field not in _FIXED and not _CHANGEABLE.isdisjoint({field, field.partition(".")[0]})


def fixed_values(config: Config) -> dict[str, Any]:
    """Returns all other options by dotted name, which a run keeps from its start."""
    return {field: value_of(config, field) for field in flat_fields(Config) if not may_change(field)}


def changed(stored: Config, changes: Mapping[str, Any]) -> Config:
    """Returns the options of a run with the changes of a resume by dotted name; equal values are no change.

    One ValueError names all options that may not change and have values other than the run's.

    Example:
        >>> changed(Config(), {"schedule.steps": 2000, "loss.name": "grpo"}).schedule.steps
        2000
    """
    given = replaced(stored, changes)
    # "auto" and None stand for what the run made of them.
    resolved = given.resolved()
    same = {
        field for field in changes if value_of(stored, field) in (value_of(given, field), value_of(resolved, field))
    }
    refused = [field for field in changes if field not in same and not may_change(field)]
    if refused:
        listed = "; ".join(
            f"{option_name(field)}: the run has {_shown(value_of(stored, field))}, given {_shown(value_of(given, field))}"
            for field in refused
        )
        raise ValueError(f"--resume: these options cannot be changed: {listed}; start a new run to change them")
    return replaced(stored, {field: value for field, value in changes.items() if field not in same})


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) or "none" if isinstance(value, tuple) else str(value)
