"""What a resume makes of a damaged checkpoint or run folder: never wrong numbers, never a traceback.

    python -m benchmarks.trials.corruption --checkpoint 250 --folder 60

Every case damages a fresh copy and resumes it in this process: `RunFolder.open`, the lock, and `RunWriter.restore`, which
is what `--resume` does. All arrays and all lines of the logs are then compared with what had been saved. Then every file
that a run writes is written, and everything outside of the folder compared with what it was. Cases of the newest
checkpoint have a state of a few arrays; those of the folder are done to the run of a tiny trainer. A refusal counts if
the command line would end in one sentence with exit code 2 or 3; a fault is anything on standard error or any other
exception.
"""

import dataclasses
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.trials.corruption import attempt as trial
from benchmarks.trials.corruption import cases
from benchmarks.trials.processes import tiny_config
from experiments.command_line import run_command
from experiments.loop.run import train
from experiments.runs.checkpoint import complete_steps, restore, restore_template
from experiments.runs.config_file import save_config
from experiments.runs.environment import versions_text
from experiments.runs.folder import RunFolder
from experiments.runs.lock import RunLock
from experiments.runs.run_writer import RunWriter
from jaxlogp.errors import require

OPTIONS = (
    "--checkpoint.every 2 --evaluation.every 2 --evaluation.num-prompts 8 --rollout.prompts-per-rollout 8 "
    "--schedule.rows 16 --schedule.steps 4 --warm-start.batch-size 16 --warm-start.max-steps 4"
).split()
"""Of the run that is damaged, beside those that all trials share."""


@dataclass(frozen=True)
class CorruptionConfig:
    """Options of the trial."""

    checkpoint: int = 250
    """Corruptions of the newest checkpoint, at least; every damage of every file is made once in any case."""
    folder: int = 60
    """Corruptions of the run folder, at least; likewise."""
    seed: int = 0
    """Seed of what is random about them."""
    out: str | None = None
    """Markdown file for the result."""


@dataclass(frozen=True)
class Subject:
    """A good run folder, the template of its arrays, and what is in it."""

    path: Path
    template: Any
    saved: trial.Saved


def small(parent: Path) -> Subject:
    """A run of two checkpoints whose state is a few arrays."""
    folder = RunFolder.create(parent, "small")
    save_config(folder.config, tiny_config(*OPTIONS))
    table = jax.random.normal(jax.random.key(0), (64, 48))
    state = {"table": table, "half": table.astype(jnp.bfloat16), "count": jnp.int32(3), "key": jnp.zeros(2, jnp.uint32)}
    with RunLock(folder.lock), RunWriter(folder, 2, trial.identity_here(folder)) as writer:
        writer.begin()
        for step in (10, 20):
            for each in range(step - 9, step + 1):
                writer.write(each, "train", {"loss": 1.0 / each})
            writer.write_samples(step, "held_out", [trial.SAMPLE])
            state = jax.tree.map(lambda leaf: leaf + 1, state)
            writer.save(step, state, **trial.COUNTERS)
    return _subject(folder, restore_template(state, jax.make_mesh((1,), ("data",))))


def tiny(parent: Path) -> Subject:
    """The run of a trainer, four steps and two checkpoints."""
    result = train(dataclasses.replace(tiny_config(*OPTIONS), out=str(parent), name="tiny"))
    arrays = result.setup.learner.saved().arrays
    return _subject(result.run, restore_template(arrays, result.setup.mesh))


def _subject(folder: RunFolder, template: Any) -> Subject:
    states, logs = {}, {}
    steps = complete_steps(folder.checkpoints)
    for step in steps:
        restored = restore(folder.checkpoints, template, step)
        states[step], marks = trial.arrays_of(restored.arrays), restored.record.logs
        sizes = {folder.metrics: marks.metrics.size, folder.samples: marks.samples.size}
        logs[step] = {path.name: path.read_bytes()[:size] for path, size in sizes.items()}
    return Subject(folder.path, template, trial.Saved(states, logs, steps[-1]))


def outcomes(subject: Subject, chosen: Iterable[cases.Case], parent: Path, seed: int) -> list[trial.Outcome]:
    """Each case on a copy of its own."""
    results = []
    for number, case in enumerate(chosen):
        place = parent / f"case-{number}"
        folder, canary = place / "run", place / "canary"
        shutil.copytree(subject.path, folder, symlinks=True)
        (canary / "folder").mkdir(parents=True)
        (canary / "file").write_text("not of the run")
        case.apply(folder, canary, np.random.default_rng((seed, number)))
        before = _content(canary)
        outcome = trial.attempt(folder, subject.template, subject.saved)
        if _content(canary) != before:
            outcome = trial.Outcome(trial.SILENT, "wrote outside of the run folder")
        results.append(outcome)
        shutil.rmtree(place)
    return results


def _content(folder: Path) -> dict[Path, bytes | None]:
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def table(chosen: list[cases.Case], results: list[trial.Outcome]) -> str:
    """Markdown: a row for each place and damage, a column for each verdict."""
    counts: dict[tuple[str, str], Counter[str]] = {}
    for case, outcome in zip(chosen, results, strict=True):
        # Orbax names files by chance.
        place = re.sub("[0-9a-f]{32}", "*", case.place)
        counts.setdefault((place, case.name.replace("_", " ")), Counter())[outcome.verdict] += 1
    rows = ["| what | damage | " + " | ".join(trial.VERDICTS) + " |", "|" + "---|" * (2 + len(trial.VERDICTS))]
    for (place, name), verdicts in counts.items():
        rows.append(f"| {place} | {name} | " + " | ".join(str(verdicts[each] or "") for each in trial.VERDICTS) + " |")
    total = Counter(outcome.verdict for outcome in results)
    rows.append(f"| **all {len(results)}** | | " + " | ".join(f"**{total[each]}**" for each in trial.VERDICTS) + " |")
    return "\n".join(rows)


def main(config: CorruptionConfig) -> dict[str, Counter[str]]:
    """Runs both parts; returns their verdicts.

    Raises:
        ValueError: an option out of range.
    """
    for option in ("checkpoint", "folder", "seed"):
        require(getattr(config, option) >= 0, option, "at least 0", getattr(config, option))
    parts, verdicts = [], {}
    with tempfile.TemporaryDirectory() as name:
        for title, number, make in (
            ("newest checkpoint", config.checkpoint, small),
            ("run folder", config.folder, tiny),
        ):
            subject = make(Path(name))
            newest = Path("checkpoints") / str(subject.saved.newest)
            step = make is small
            chosen = cases.of_the_newest_step(subject.path, newest, number) if step else cases.of_the_folder(number)
            results = outcomes(subject, chosen, Path(name), config.seed)
            for case, outcome in zip(chosen, results, strict=True):
                if outcome.verdict in (trial.SILENT, trial.TRACEBACK):
                    print(f"{outcome.verdict}: {case.place}, {case.name}: {outcome.words}")
            parts.append(f"## {len(results)} corruptions of the {title}\n\n{table(chosen, results)}")
            verdicts[title] = Counter(outcome.verdict for outcome in results)
    command = f"python -m benchmarks.trials.corruption --checkpoint {config.checkpoint} --folder {config.folder}"
    head = f"# Corrupted checkpoints and run folders\n\nCommand: `{command} --seed {config.seed}`. {versions_text()}."
    text = "\n\n".join([head, *parts]) + "\n"
    print(text)
    if config.out is not None:
        Path(config.out).write_text(text, encoding="utf-8")
    return verdicts


if __name__ == "__main__":
    run_command(CorruptionConfig, main, program="benchmarks.trials.corruption", description=__doc__)
