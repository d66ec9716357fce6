"""The trainer, its tasks and its studies; ``from experiments import Config, train`` is the way in from Python."""

from typing import Any

_WAY_IN = {"Config": "experiments.config", "train": "experiments.training.run"}


def __getattr__(name: str) -> Any:
    # On demand: a task or a model alone shall not load the trainer.
    if name not in _WAY_IN:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_WAY_IN[name]), name)
