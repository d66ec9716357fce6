"""A run that is killed again and again, and ends as if it had not been.

    python -m benchmarks.trials.kills --kills 40 --terms 4
    python -m benchmarks.trials.kills --kills 10 --terms 2 --processes 2
    python -m benchmarks.trials.kills --kills 10 --terms 1 --supervised

A tiny run is started as a process of its own and stopped by SIGKILL at random moments of three kinds (in the warm start,
while a checkpoint is being written, at any time), resumed by the command line, killed again, until it has had its share
of kills; then it goes on to its end. Other runs get SIGTERM or SIGINT instead. Parameters, optimizer state, counters,
metrics.jsonl and samples.jsonl are compared with those of a run that nobody stopped, bit for bit, but for times.

With several processes one of them gets the signal, and the others have to end too: after SIGKILL within 30 seconds, and the
first process, which JAX's coordinator is in, then names it.
"""

import argparse
import functools
import json
import random
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import jax

from benchmarks.trials.processes import SUPERVISED, TINY, Ended, main_of, start, start_together, stop_when, wait
from benchmarks.trials.saved_arrays import array_digests
from experiments.loop.load import load_run
from experiments.runs.checkpoint import complete_steps
from experiments.runs.environment import versions_text
from experiments.runs.files import UNFINISHED

TIMES = {"data_wait_seconds", "rollout_seconds", "step_seconds", "tokens_per_second", "seconds"}
"""Of metrics.jsonl, what is no result."""
MOMENTS = ("warm start", "saving", "saving", "saving", "saving", "any")
MAX_UNSTOPPED = 5
"""Runs in a row that end before their signal; more are no accident."""
LAST_SECONDS = 30.0
"""After which no process of a run may be left where another was killed."""
CODES = {signal.SIGKILL: -9, signal.SIGTERM: 143, signal.SIGINT: 130}


@dataclass
class Trial:
    """One run with what was done to it."""

    name: str
    number: signal.Signals
    moments: list[str] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    in_flight: int = 0
    faults: list[str] = field(default_factory=list)

    def expect(self, good: bool, fault: str) -> None:
        """Notes a fault."""
        if not good:
            self.faults.append(fault)

    def row(self) -> str:
        """Of the table."""
        kinds = ", ".join(f"{self.moments.count(kind)} {kind}" for kind in dict.fromkeys(self.moments))
        steps = " ".join("w" if step < 0 else str(step) for step in self.steps)
        end = "; ".join(self.faults) or "equal"
        return (
            f"| {self.name} | {self.number.name} | {len(self.moments)} | {kinds} | {self.in_flight} | {steps} | {end} |"
        )


class Run:
    """A run folder that is trained by one process after the other, or by several at a time."""

    def __init__(
        self, out: Path, name: str, steps: int, cache: Path, processes: int = 1, *, supervised: bool = False
    ) -> None:
        self.path, self._out, self._steps, self._cache = out / name, out, steps, cache
        self._processes, self._supervised = processes, supervised

    def start(self) -> list[subprocess.Popen]:
        """The command that begins the run, or goes on with it, as one process or several."""
        options = ["--schedule.steps", str(self._steps), "--out", str(self._out), "--name", self.path.name]
        own = [*SUPERVISED, "--data.path", str(self._sums())] if self._supervised else TINY
        arguments = [*own, *options, "--mesh", f"data={self._processes}"]
        if self.checkpoints.exists() and (self.path / "config.json").exists():
            arguments = ["--resume", str(self.path), "--quiet"]
        main = main_of("experiments.sft" if self._supervised else "experiments.grpo")
        if self._processes == 1:
            return [start(arguments, self._cache, main=main)]
        return start_together(arguments, self._cache, self._processes, main=main)

    def _sums(self) -> Path:
        """A file to learn from."""
        path = self._out / "sums.jsonl"
        if not path.exists():
            lines = [{"prompt": f"{a}+{b}=", "completion": str(a + b)} for a in range(10) for b in range(10)]
            path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        return path

    @property
    def checkpoints(self) -> Path:
        """Its folder of checkpoints."""
        return self.path / "checkpoints"

    def saved(self) -> int:
        """The newest complete step; -1 in the warm start."""
        return max(complete_steps(self.checkpoints), default=-1) if self.checkpoints.exists() else -1

    def being_saved(self) -> set[str]:
        """Names of checkpoints that are not complete yet; not those that are being removed."""
        try:
            names = [entry.name for entry in self.checkpoints.iterdir() if UNFINISHED.search(entry.name)]
        except OSError:
            return set()
        newest = self.saved()
        return {name for name in names if int(name.partition(".")[0]) > newest}

    def records(self) -> list[dict]:
        """metrics.jsonl without times."""
        lines = (self.path / "metrics.jsonl").read_text().splitlines()
        return [{k: v for k, v in json.loads(line).items() if k not in TIMES} for line in lines]

    def samples(self) -> str:
        """samples.jsonl."""
        return (self.path / "samples.jsonl").read_text()

    def warm_start_lines(self) -> int:
        """How far the warm start has come."""
        try:
            return (self.path / "metrics.jsonl").read_bytes().count(b"\n")
        except OSError:
            return 0

    def state(self) -> tuple[dict[str, tuple], dict]:
        """The digest of every array, and every counter, of the newest checkpoint, and the scores."""
        # As evaluations read it: an intact one.
        step = self.checkpoints / str(load_run(self.path).step)
        manifest = json.loads((step / "manifest.json").read_text())
        # The log says what was evaluated. A run that is stopped between its last step and the evaluation saves before it.
        record = manifest["content"]["record"]
        progress = {name: value for name, value in record["progress"].items() if name != "evaluated"}
        summary = json.loads((self.path / "summary.json").read_text())
        scores = {"before": summary["before"], "after": summary["after"]}
        return array_digests(step), {
            "progress": progress,
            "learner": record["learner"],
            "feed": record["feed"],
            **scores,
        }


def moment_of(
    kind: str, run: Run, chance: random.Random, usual: Callable[[], float]
) -> tuple[Callable[[], bool], float]:
    """When a process is stopped: a condition, and seconds after it."""
    old = run.being_saved()
    if kind == "saving":
        # Not the first one that comes: up to three checkpoints are let pass.
        wanted = run.saved() + chance.randint(1, 3)
        return lambda: run.saved() >= wanted - 1 and bool(run.being_saved() - old), chance.uniform(0.0, 0.008)
    if kind == "warm start":
        lines = chance.randint(0, 11)
        return lambda: run.path.exists() and run.warm_start_lines() >= lines, chance.uniform(0.0, 0.02)
    after = chance.uniform(0.0, usual())
    started = time.monotonic()
    return lambda: time.monotonic() - started >= after, 0.0


def stop(trial: Trial, run: Run, chance: random.Random, usual: Callable[[], float]) -> Ended:
    """Starts or resumes the run, stops it once, and notes how it took that; `usual` says how many seconds one takes."""
    kind = chance.choice([each for each in MOMENTS if each != "warm start" or run.saved() < 0])
    if trial.number != signal.SIGKILL and kind == "any" and run.saved() < 0:
        kind = "warm start"
    old = run.being_saved()
    moment, delay = moment_of(kind, run, chance, usual)
    processes = run.start()
    victim = chance.choice(processes)
    sent = stop_when(victim, moment, delay, trial.number)
    stopped = time.monotonic()
    ends = {process: wait(process) for process in processes}
    ended = ends[victim]
    trial.expect(not any(end.traceback for end in ends.values()), f"traceback after {kind}")
    for process, end in ends.items():
        if trial.number == signal.SIGKILL and process is not victim:
            seconds = time.monotonic() - stopped
            trial.expect(
                (end.code != 0 and seconds < LAST_SECONDS) == (ended.code != 0), f"{end.code} after {seconds:.0f} s"
            )
            if process is processes[0] and kind == "saving" and ended.code != 0:
                # In a line after JAX's sentence; on a busy machine others may be late too.
                named = rf"unhealthy \(stopped sending heartbeats\):\n(\d+\n)*{processes.index(victim)}\n"
                trial.expect(bool(re.search(named, end.errors)), f"not named: {end.errors[:2000]}")
        elif process is not victim:
            trial.expect(end.code == ended.code, f"exit codes {end.code} and {ended.code}")
    if not sent or ended.code == 0:
        trial.expect(ended.code == 0, f"exit code {ended.code} without a signal: {ended.last}")
        return ended
    trial.moments.append(kind)
    trial.steps.append(run.saved())
    if trial.number == signal.SIGKILL:
        trial.in_flight += bool(run.being_saved() - old)
    else:
        last = ends[processes[0]].last
        trial.expect(trial.number.name in last and "--resume" in last, f"last line {last!r}")
    trial.expect(ended.code == CODES[trial.number], f"exit code {ended.code} after {trial.number.name} ({kind})")
    return ended


def to_the_end(trial: Trial, run: Run) -> None:
    """Resumes without a signal."""
    for ended in map(wait, run.start()):
        trial.expect(ended.code == 0, f"exit code {ended.code}: {ended.last}")


def compare(trial: Trial, run: Run, whole: Run) -> None:
    """Notes what differs from the run that nobody stopped."""
    arrays, counts = run.state()
    wanted_arrays, wanted_counts = whole.state()
    same = arrays.keys() == wanted_arrays.keys()
    odd = [name for name in arrays if arrays[name] != wanted_arrays.get(name)]
    trial.expect(same and not odd, f"{len(odd)} arrays differ")
    for name, value in wanted_counts.items():
        trial.expect(counts[name] == value, f"{name} differs")
    trial.expect(run.records() == whole.records(), "metrics.jsonl differs")
    trial.expect(run.samples() == whole.samples(), "samples.jsonl differs")


def trials(
    out: Path,
    kills: int,
    terms: int,
    steps: int,
    seed: int,
    processes: int = 1,
    per_run: int = 5,
    *,
    supervised: bool = False,
) -> list[Trial]:
    """Runs that are stopped, each compared with one that is not.

    Args:
        out: folder for run folders and compiled programs.
        kills: SIGKILLs in all.
        terms: SIGTERMs, and SIGINTs.
        steps: optimizer steps of the run.
        seed: of the moments.
        processes: of every run.
        per_run: signals that a run gets at most.
        supervised: whether they are runs of `experiments.sft`.

    Raises:
        RuntimeError: signals that stop no run.
    """
    chance, cache = random.Random(seed), out / "cache"

    def run_of(name: str) -> Run:
        return Run(out, name, steps, cache, processes, supervised=supervised)

    whole = run_of("whole")

    def to_end(run: Run) -> float:
        started = time.monotonic()
        for ended in map(wait, run.start()):
            assert ended.code == 0, ended.last
        return time.monotonic() - started

    to_end(whole)
    # The second has compiled programs. It is run where its time is asked for.
    usual = functools.cache(lambda: to_end(run_of("again")))
    done = []
    unstopped = 0
    for number, wanted in ((signal.SIGKILL, kills), (signal.SIGTERM, terms), (signal.SIGINT, terms)):
        while wanted > 0:
            trial = Trial(f"{len(done) + 1}", number)
            run = run_of(f"run-{trial.name}")
            while len(trial.moments) < min(wanted, per_run) and stop(trial, run, chance, usual).code != 0:
                pass
            if run.saved() < steps or not (run.path / "summary.json").exists():
                to_the_end(trial, run)
            compare(trial, run, whole)
            print(trial.row(), flush=True)
            wanted -= len(trial.moments)
            done.append(trial)
            unstopped = 0 if trial.moments else unstopped + 1
            if unstopped == MAX_UNSTOPPED:
                raise RuntimeError(f"{number.name} has stopped none of {unstopped} runs in a row")
    return done


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--terms", type=int, default=4, help="of SIGTERM and of SIGINT each")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--supervised", action="store_true", help="runs of experiments.sft")
    options = parser.parse_args()
    # To read what a mesh of so many devices has saved.
    jax.config.update("jax_num_cpu_devices", options.processes)
    print(f"{versions_text()}; seed {options.seed}, {options.steps} steps, {options.processes} processes\n")
    print(
        "| run | signal | stops | moments | in flight | newest step after each (w: warm start) | against the whole run |"
    )
    print("|---|---|---|---|---|---|---|", flush=True)
    given = {name: getattr(options, name) for name in ("kills", "terms", "steps", "seed", "processes")}
    with tempfile.TemporaryDirectory() as folder:
        done = trials(Path(folder), supervised=options.supervised, **given)
    good = sum(not trial.faults for trial in done)
    print(
        f"\n{good} of {len(done)} runs end bitwise equal, after {sum(len(trial.moments) for trial in done)} stops, ",
        end="",
    )
    print(f"{sum(trial.in_flight for trial in done)} of them SIGKILLs while a checkpoint was being written.")
    raise SystemExit(good != len(done))


if __name__ == "__main__":
    main()
