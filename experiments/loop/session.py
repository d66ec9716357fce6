"""A run from its open folder to its end: signals caught, checkpoints restored, and the loop."""

import signal
from collections.abc import Callable

from experiments.config import Config
from experiments.config.changes import fixed_values
from experiments.loop.assemble import Setup
from experiments.loop.loop import Loop, Outcome, Progress, resume_hint
from experiments.models.mesh import parse_mesh
from experiments.processes import processes
from experiments.runs.config_file import load_config
from experiments.runs.console import RunConsole
from experiments.runs.folder import RunFolder, read_metrics
from experiments.runs.identity import Identity, RunParts, identity_of
from experiments.runs.signals import caught_signals
from experiments.runs.stops import Interrupted
from experiments.runs.store import open_store
from jaxlogp.errors import require

OnResume = Callable[[Setup, Progress], None]
"""Called with the progress of a run that has been restored, before anything is written; what it raises ends the resume."""


def run_to_end(
    setup: Setup,
    folder: RunFolder,
    console: RunConsole,
    on_resume: OnResume | None = None,
    step: int | None = None,
) -> Outcome:
    """Runs the warm start or restores, then takes steps, evaluates and saves up to the last one.

    SIGTERM and SIGINT are answered between two steps: a checkpoint is written, then `Interrupted` raised. In the warm
    start nothing is kept: a resume begins it again, and arrives at the same bits.

    Args:
        setup: what the run consists of.
        folder: its folder.
        console: what it prints.
        on_resume: None for a run that begins.
        step: of the checkpoint to go on from; None for the newest.

    Raises:
        Interrupted: a signal; the message says what is kept, and the command that goes on.
        GuardAbort: numbers that cannot be trained on, or a broken reward function; likewise.
        ValueError: a run folder that cannot be continued.
    """
    try:
        identity = identity_of_run(folder, setup.config)
        with (
            caught_signals() as signals,
            open_store(folder, setup.config.checkpoint.keep, identity) as store,
        ):
            loop = Loop(setup, folder, console, store, signals)
            if on_resume is not None and store.begun:
                loop.restore(step)
            else:
                _require_unbegun(folder)
                store.begin()
            if on_resume is not None:
                on_resume(setup, loop.progress)
            for line in store.take_up():
                console.warn(line)
            if on_resume is not None:
                store.record_resume(loop.progress.step)
                begins_again = ", which has no checkpoint yet: the warm start begins again"
                at = begins_again if loop.before is None else f" at step {loop.progress.step}"
                console.say(f"resumed {folder.path}{at}")
            return loop.run()
    except KeyboardInterrupt:
        sentence = f"SIGINT twice: stopped at once; {resume_hint(folder, setup.config)}"
        # No other process knows of it: they would wait for this one.
        processes().end(128 + signal.SIGINT, sentence, caused_here=True)
        raise Interrupted(signal.SIGINT, sentence) from None


def identity_of_run(folder: RunFolder, config: Config) -> Identity:
    """What a run is, where it lies being no part of it."""
    options = fixed_values(load_config(folder.config, Config))
    options = {field: value for field, value in options.items() if field not in ("name", "out")}
    # The bits of an invariant run are the same on every mesh.
    mesh = "any" if config.invariant else str(parse_mesh(config.mesh))
    return identity_of(options, mesh, load_config(folder.parts, RunParts))


def _require_unbegun(folder: RunFolder) -> None:
    made = sum(record["kind"] == "train" for record in read_metrics(folder.metrics).records)
    require(made == 0, "checkpoints", f"at least one complete step in {folder.checkpoints}", f"none after {made} steps")
