"""A run from its options to its result, for callers from Python and for the command line."""

import contextlib
import dataclasses
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flax import nnx

from experiments.config import Config, require_types, validate
from experiments.experience.experience import ExperienceSource, Policy
from experiments.experience.own_source import resolve_source
from experiments.loop.assemble import Setup
from experiments.loop.evaluation import Scores
from experiments.loop.find_model import with_own_model
from experiments.loop.found import Found, find_parts, resolve_task
from experiments.loop.loop import Outcome, resume_hint
from experiments.loop.memory import peak_bytes, size
from experiments.loop.plan import set_up_what_fits
from experiments.loop.run_parts import NOTHING_OWN, RewardPairs, UserParts
from experiments.loop.session import Resumption, run_to_end
from experiments.loop.supervised import SupervisedFile
from experiments.models.dtype_choice import DtypeChoice, dtype_here
from experiments.models.huggingface.export import write_files
from experiments.models.mesh import parse_mesh
from experiments.models.pretrained import small_files
from experiments.presets import require_preset
from experiments.processes import processes
from experiments.runs.config_file import save_config
from experiments.runs.console import HeldOut, RunConsole
from experiments.runs.ends import AlreadyFinished, RunEnded
from experiments.runs.files import write_json
from experiments.runs.folder import LONGEST_NAME_BYTES, RunFolder, is_folder_name, read_metrics
from experiments.runs.identity import require_settings
from experiments.runs.lock import RunLock
from experiments.tasks import Reward, Rewards, Task
from experiments.tasks.registry import names_user_task
from jaxlogp.errors import require


@dataclass(frozen=True)
class Result:
    """The result of a run.

    Attributes:
        before: held-out scores after the warm start.
        after: held-out scores at the end.
        run: the run folder.
        metrics: every record of metrics.jsonl.
        setup: what the run consisted of; its learner has parameters and optimizer state.
        steps: optimizer steps.
        seconds: wall-clock time, set-up excluded.
    """

    before: Scores
    after: Scores
    run: RunFolder
    metrics: list[dict[str, Any]]
    setup: Setup
    steps: int
    seconds: float

    def __repr__(self) -> str:
        return "\n".join(
            (
                f"run folder: {self.run.path}",
                f"optimizer steps: {self.steps}",
                *(f"{name}: {score}" for name, score in self.held_out.items()),
                f"seconds: {self.seconds:.1f}",
            )
        )

    @property
    def params(self) -> nnx.State:
        """The trained parameters."""
        return self.setup.params

    @property
    def held_out(self) -> dict[str, HeldOut]:
        """Held-out scores by name."""
        after = self.after.named()
        # A resume may have changed how many samples there are.
        return {name: HeldOut(before, after[name]) for name, before in self.before.named().items() if name in after}


@dataclass(frozen=True)
class Run:
    """A run that is set up but not begun, from the newest checkpoint or that of `step`. The first process has the lock."""

    setup: Setup
    folder: RunFolder
    lock: RunLock | None
    dtype: DtypeChoice
    resumption: Resumption | None = None
    step: int | None = None

    def finish(self) -> Result:
        """Warm start (or resume), evaluation, reinforcement learning, evaluation; writes the run folder as it goes."""
        with self.lock or contextlib.nullcontext():
            return self._finish()

    def _finish(self) -> Result:
        started, setup = time.perf_counter(), self.setup
        console = RunConsole(setup.config.quiet, setup.config.log_every)
        for warning in setup.warnings:
            console.warn(warning)
        try:
            outcome = run_to_end(setup, self.folder, console, self.resumption, self.step)
        except AlreadyFinished:
            raise
        except RunEnded:
            if processes().first:
                _draw_curves(self.folder, read_metrics(self.folder.metrics).records)
            raise
        except BaseException:
            console.ending(resume_hint(self.folder, setup.config))
            raise
        return _finish(self, console, outcome, time.perf_counter() - started)


def set_up(config: Config, user: UserParts = NOTHING_OWN) -> Run:
    """Makes a run and its folder; nothing is trained yet."""
    require_settings()
    require_types(config, "config")
    require_preset(config)
    name, source = resolve_source(config.source, user.source)
    config = dataclasses.replace(config, source=name)
    validate(config)
    config = with_own_model(config, user.model)
    # What a run began with it keeps, whatever device it is resumed on.
    dtype, chooses_remat = dtype_here(config.model.dtype), config.model.remat == "auto"
    config = _with_lasting_base(config.resolved())
    both = user.task is not None and (config.supervised or names_user_task(config.task))
    expected = "no task of your own where train is given one, and no file to learn from"
    require(not both, "--task", expected, config.task)
    task = resolve_task(config, user.task)
    path = Path(processes().from_first("run folder", lambda: str(_new_path(config, task))))
    found = find_parts(config, user, task, source)
    found.report(path, dtype)
    found, setup = set_up_what_fits(found, chooses_remat=chooses_remat)
    folder, lock = _made_by_first(path, found)
    return Run(setup, folder, lock, dtype)


def _made_by_first(path: Path, found: Found) -> tuple[RunFolder, RunLock | None]:
    here = processes()
    made = _made(path, found) if here.first else (RunFolder(path), None)
    here.gather("run folder made", None)
    expected = "a folder that all processes see, on a file system that they share"
    require(made[0].config.is_file(), "--out", expected, f"{path}, which process {here.index} does not see")
    return made


def _made(path: Path, found: Found) -> tuple[RunFolder, RunLock]:
    def fill(folder: RunFolder) -> None:
        if found.model.pretrained is not None:
            # All but the weights, so that the run can be resumed, scored and exported without the original.
            write_files(folder.model, small_files(found.model.pretrained))
        save_config(folder.config, found.config)

    folder = RunFolder.create(path.parent, path.name, fill, found.parts)
    return folder, RunLock(folder.lock)


def train(
    config: Config,
    *,
    task: Task | None = None,
    reward: Reward | RewardPairs | Rewards | None = None,
    model: nnx.Module | None = None,
    source: ExperienceSource | Callable[[Policy, int], Any] | None = None,
) -> Result:
    """Trains a policy and writes a run folder.

    To continue a run, use `experiments.loop.resume.resume`.

    Args:
        config: the options, as on the command line.
        task: your own task (see `experiments.tasks.Task`); None for the one that ``config.task`` names.
        reward: function from an example and its completion to a finite number; or pairs of such a function and its weight,
            whose weighted sum is the reward; None for those that ``config.reward`` names. Held-out scores are the task's
            verdict regardless of the reward.
        model: your own Flax model (see `experiments.models.protocol.Model`); None for the decoder that ``config.model``
            describes. It is not modified: ``nnx.update(model, result.params)`` puts the trained parameters into it.
        source: where documents come from: a function from a `Policy` and the number of calls before to documents (see
            `experiments.experience`), or an object with next, state and restore; None for the one that ``config.source``
            names, or for prompts of the task.

    Returns:
        Scores before and after, the run folder, the log, and what the run consisted of.

    Raises:
        ValueError: if an option, a file, a mesh or a run folder cannot be used; the message names it in one line.
        RunEnded: if a signal or a guard ended the run early; the message tells in one line what was kept.
    """
    return set_up(config, UserParts(task, reward, model, source)).finish()


def _with_lasting_base(config: Config) -> Config:
    """The options with an absolute path: a resume before the first checkpoint needs the model on disk again, and with
    adapters every resume."""
    path = config.model.path
    if path is None or not Path(path).exists():
        return config
    return dataclasses.replace(config, model=dataclasses.replace(config.model, path=str(Path(path).resolve())))


def _finish(run: Run, console: RunConsole, outcome: Outcome, seconds: float) -> Result:
    setup = run.setup
    head = setup.learner.gradients.head_run
    assert head is not None, "traced at the start"
    # The log is complete: no process reads it before the first has closed it.
    peaks = processes().gather("finished", peak_bytes(setup.mesh.local_devices))
    peak = max((each for each in peaks if each is not None), default=None)
    facts = {
        "task": setup.task.name,
        "loss": "cross-entropy" if setup.config.supervised else setup.config.loss.name,
        "mesh": str(parse_mesh(setup.config.mesh)),
        "optimizer steps": outcome.steps,
        "documents seen": setup.learner.version,
        "head": f"{head.path}, engine {head.engine} ({head.reason}), gradient {head.gradient}",
        "attention": f"{setup.attention.implementation} ({setup.attention.reason})",
        "sampler": setup.backend.sampler,
        "dtype": str(run.dtype),
        **({} if peak is None else {"peak memory": f"{size(peak)} per device"}),
        "seconds": round(seconds, 1),
    }
    before, after = outcome.before, outcome.after
    scores = {"before": before._asdict(), "after": after._asdict(), "data ended": outcome.exhausted}
    records = read_metrics(run.folder.metrics).records
    if processes().first:
        _draw_curves(run.folder, records)
        write_json(run.folder.summary, {**facts, **scores})
    result = Result(before, after, run.folder, records, setup, outcome.steps, seconds)
    console.summary(facts, run.folder.path, result.held_out)
    console.ending(resume_hint(run.folder, setup.config, finished=True))
    return result


def _draw_curves(folder: RunFolder, records: list[dict[str, Any]]) -> None:
    # Matplotlib takes half a second to import: not before the first step.
    from experiments.runs.plots import plot_runs

    plot_runs([records], folder.curves)


def _new_path(config: Config, task: Task | SupervisedFile) -> Path:
    name = _default_name(config, task.name) if config.name is None else config.name
    require(is_folder_name(name), "--name", "the name of a folder", repr(name))
    size = len(os.fsencode(name))
    require(size <= LONGEST_NAME_BYTES, "--name", f"at most {LONGEST_NAME_BYTES} bytes", size)
    try:
        path = Path(config.out).resolve() / name
        there = next(each for each in path.parents if each.exists())
        require(there.is_dir(), "--out", "a folder, or where one can be made", f"{there}, which is not a folder")
        require(not path.exists(), "run folder", "a path that does not exist yet", path)
    except OSError as error:
        raise ValueError(
            f"--out: expected a path that can be made, got {config.out[:80]}…: {error.strerror}"
        ) from error
    try:
        # Tried now: the run folder is made when all programs are compiled.
        os.rmdir(tempfile.mkdtemp(dir=there))
    except FileNotFoundError:
        require(False, "--out", "a folder, or where one can be made", f"{there}, where none can be made")
    except OSError as error:
        # Not the name that was tried, which nobody has given.
        raise OSError(error.errno, error.strerror, str(there)) from error
    return path


def _default_name(config: Config, task: str) -> str:
    family, _, rest = task.partition(":")
    task = f"{family}-{Path(rest).stem}" if family in ("jsonl", "sft") else task
    task = "".join(c if c.isalnum() or c in "-_." else "-" for c in task).strip(".-")[-40:]
    task = task if config.preset is None else f"{config.preset}-{task}"
    loss = "" if config.supervised else f"-{config.loss.name}"
    return f"{task}{loss}-seed{config.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
