"""The trainer and its tasks; ``from experiments import Config, resume, train`` are the entry points from Python."""

# Nothing is imported here: until `experiments.entry` has the signals, Ctrl-C ends a command in a traceback.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from experiments.config import Config
    from experiments.experience.experience import Experience, Policy
    from experiments.loop.resume import resume
    from experiments.loop.run import train
    from experiments.sampling.options import SamplingOptions

__all__ = ["Config", "Experience", "Policy", "SamplingOptions", "resume", "train"]

_WAY_IN = {
    "Config": "experiments.config",
    "Experience": "experiments.experience.experience",
    "Policy": "experiments.experience.experience",
    "SamplingOptions": "experiments.sampling.options",
    "resume": "experiments.loop.resume",
    "train": "experiments.loop.run",
}


def __getattr__(name: str) -> object:
    # On demand, so that importing only a task or a model does not load the trainer.
    if name not in _WAY_IN:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_WAY_IN[name]), name)
