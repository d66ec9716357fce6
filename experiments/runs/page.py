"""A page in Markdown about one run, or several seeds of one: what it was, before and after, samples, cost, drift.

Every number is read from the run folders. Nothing of a page depends on where the folders are.
"""

import math
import re
import shlex
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from experiments.runs.config_file import read_config, read_object
from experiments.runs.folder import RunFolder, read_metrics, read_samples
from jaxlogp.errors import require

MAY_DIFFER = ("seed", "name", "out", "quiet")
"""Options in which the runs of one page may differ."""
WINDOW = 10
"""Optimizer steps at either end over which a metric of single steps is averaged."""
HELD_OUT = {
    "exact match, temperature 1": ("exact_match_sampled", ".3f"),
    "exact match, greedy": ("exact_match_greedy", ".3f"),
    "tokens of a completion, temperature 1": ("completion_length_sampled", ".1f"),
    "tokens of a completion, greedy": ("completion_length_greedy", ".1f"),
    "share truncated, temperature 1": ("truncated_share_sampled", ".3f"),
    "share truncated, greedy": ("truncated_share_greedy", ".3f"),
    "KL to the first policy [nats per token]": ("kl_reference", ".2e"),
}
TRAINING = {
    "reward": ("reward_mean", ".3f"),
    "entropy [nats per token]": ("entropy_labelled", ".3f"),
    "tokens of a completion": ("completion_length_mean", ".1f"),
    "share truncated": ("truncated_share", ".3f"),
    "share of groups without a difference": ("degenerate_groups", ".3f"),
    "KL of old and new policy [nats per token]": ("kl_new_old_labelled", ".2e"),
    "gradient norm": ("grad_norm", ".3f"),
}
DRIFT = ("p50", "p90", "p99", "p99_9", "max")


@dataclass(frozen=True)
class RunRecord:
    """What a run folder holds, as plain values.

    Attributes:
        config: the options.
        env: versions, devices and command.
        metrics: records of metrics.jsonl.
        samples: records of samples.jsonl.
    """

    config: dict[str, Any]
    env: dict[str, Any]
    metrics: list[dict[str, Any]]
    samples: list[dict[str, Any]]

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Reads a run folder.

        Raises:
            ValueError: no run folder, a damaged one, or one without a step.
        """
        folder = RunFolder.open(path)
        metrics = read_metrics(folder.metrics).records
        require(any(record["kind"] == "train" for record in metrics), "run", "one with optimizer steps", folder.path)
        return cls(read_config(folder.config), read_object(folder.env), metrics, read_samples(folder.samples))

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        """The records of one kind, in their order."""
        return [record for record in self.metrics if record["kind"] == kind]

    @property
    def seconds(self) -> float:
        """Wall time of optimizer steps, their rollouts, drift reports and evaluations; start and compilation of the sampler
        before the first of them included, saving not."""
        names = {"train": "step_seconds", "eval": "seconds", "drift": "seconds"}
        return math.fsum(record.get(names.get(record["kind"], ""), 0.0) for record in self.metrics)


def read_runs(paths: Sequence[str]) -> list[RunRecord]:
    """The records of runs that differ in their seeds alone.

    Raises:
        ValueError: as `RunRecord.read`, or runs with different options.
    """
    require(len(paths) > 0, "runs", "at least one run folder", "none")
    runs = [RunRecord.read(path) for path in paths]
    first = runs[0].config
    for path, run in zip(paths, runs, strict=True):
        differ = [name for name in first if name not in MAY_DIFFER and run.config.get(name) != first[name]]
        require(not differ, "runs", "runs that differ in their seeds alone", f"{path} with another {', '.join(differ)}")
    return sorted(runs, key=lambda run: run.config["seed"])


def page(runs: Sequence[RunRecord], *, title: str, figure: str | None = None, samples: int = 3) -> str:
    """The page.

    Args:
        runs: of `read_runs`.
        title: its heading.
        figure: of the curves, as the page refers to it.
        samples: number of held-out prompts shown with their completions before and after, of the first run.
    """
    parts = [f"# {title}", _what(runs), f"```bash\n{command(runs[0].env['command'])}\n```"]
    if figure is not None:
        parts.append(f"![Curves over the optimizer steps]({figure})")
    parts += ["## Held-out prompts, before → after", _before_and_after(runs)]
    parts += [f"## Training, first {WINDOW} → last {WINDOW} steps", _first_and_last(runs)]
    parts += ["## Sampler against trainer", _drift(runs), "## Cost", _cost(runs)]
    parts += _samples(runs[0], samples)
    return "\n\n".join(part for part in parts if part) + "\n"


def command(arguments: Sequence[str]) -> str:
    """A command line without what belongs to the machine: interpreter, output folder and directories of paths.

    Example:
        >>> command(["/usr/bin/python3", "-m", "experiments.grpo", "--seed", "1", "--out", "/tmp/x", "--model.path=/m/a"])
        'python -m experiments.grpo --seed 1 --model.path=a'
    """
    kept, given = ["python"], iter(arguments[1:])
    for each in given:
        option, equals, value = each.partition("=")
        if option in ("--out", "--name"):
            if not equals:
                next(given, None)
            continue
        tail = value if equals else each
        tail = Path(tail).name if tail.startswith("/") else tail
        kept.append(f"{option}={tail}" if equals else tail)
    return shlex.join(kept)


def _what(runs: Sequence[RunRecord]) -> str:
    config, env = runs[0].config, runs[0].env
    kinds = ", ".join(f"{count} × {kind}" for kind, count in env["devices"]["kinds"].items())
    versions = ", ".join(f"{name} {version}" for name, version in env["versions"].items() if version)
    revision = env["git"]["revision"]
    code = "revision unknown" if revision is None else f"revision {revision[:10]}"
    code += ", with changes" if env["git"]["dirty"] else ""
    seeds = ", ".join(str(run.config["seed"]) for run in runs)
    steps = ", ".join(str(steps) for steps in sorted({run.of_kind("train")[-1]["step"] for run in runs}))
    preset = "" if config["preset"] is None else f"Preset `{config['preset']}`, task"
    return (
        f"{preset or 'Task'} `{config['task']}`, loss `{config['loss']['name']}`, {steps} optimizer steps, "
        f"seed{'s' * (len(runs) > 1)} {seeds}.\n{kinds}; {versions}; {code}. All options are in config.json of each run."
    )


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _pairs(
    runs: Sequence[RunRecord],
    metrics: Mapping[str, tuple[str, str]],
    ends: Callable[[RunRecord, str], tuple[float, float] | None],
) -> str:
    """A table of `first → last` by seed, with the mean over seeds; metrics that a run lacks are left out."""
    rows = []
    for label, (metric, form) in metrics.items():
        found = [ends(run, metric) for run in runs]
        pairs = [pair for pair in found if pair is not None]
        if len(pairs) < len(runs):
            continue
        mean = tuple(statistics.fmean(side) for side in zip(*pairs, strict=True))
        shown = pairs if len(runs) == 1 else [*pairs, mean]
        rows.append([label, *(f"{format(first, form)} → {format(last, form)}" for first, last in shown)])
    seeds = [f"seed {run.config['seed']}" for run in runs]
    return _table(["", *seeds, *(["mean"] if len(runs) > 1 else [])], rows)


def _before_and_after(runs: Sequence[RunRecord]) -> str:
    def ends(run: RunRecord, metric: str) -> tuple[float, float] | None:
        records = [record for record in run.of_kind("eval") if record.get(metric) is not None]
        return (records[0][metric], records[-1][metric]) if records else None

    return _pairs(runs, HELD_OUT, ends)


def _first_and_last(runs: Sequence[RunRecord]) -> str:
    def ends(run: RunRecord, metric: str) -> tuple[float, float] | None:
        values = [record[metric] for record in run.of_kind("train") if record.get(metric) is not None]
        return (statistics.fmean(values[:WINDOW]), statistics.fmean(values[-WINDOW:])) if values else None

    return _pairs(runs, TRAINING, ends)


def _drift(runs: Sequence[RunRecord]) -> str:
    """The newest report of every run, and its worst token."""
    reports = [(run.config["seed"], run.of_kind("drift")[-1]) for run in runs if run.of_kind("drift")]
    if not reports:
        return "No report was made."
    header = [
        "newest report",
        "step",
        "tokens",
        *(name.replace("_", ".") for name in DRIFT),
        "ratio outside [0.9, 1.1]",
    ]
    rows = [
        [f"seed {seed}", str(each["step"]), f"{each['tokens']:,}", *(f"{each[name]:.2g}" for name in DRIFT),
         f"{each['share_outside']:.2%}"]
        for seed, each in reports
    ]  # fmt: skip
    worst = max((record for run in runs for record in run.of_kind("drift")), key=lambda record: record["max"])
    words = (
        f"The worst token of all reports, {worst['max']:.3g} nats at step {worst['step']}: {_quoted(worst['worst_token'])} "
        f"after {_quoted(worst['worst_context'])}, log-prob {worst['worst_trainer']:.4g} of the trainer and "
        f"{worst['worst_sampler']:.4g} of the sampler, owned by vocabulary shard {worst['worst_owner']}."
    )
    return "|Δ log-prob| in nats, quantiles and maximum.\n\n" + _table(header, rows) + "\n\n" + words


def _cost(runs: Sequence[RunRecord]) -> str:
    header = ["", "minutes", "of them rollouts", "tokens/s of a step, median", "resumed"]
    rows = []
    for run in runs:
        steps = run.of_kind("train")
        rollouts = math.fsum(record["rollout_seconds"] for record in steps)
        speed = statistics.median(record["tokens_per_second"] for record in steps)
        resumed = str(len(run.env.get("resumes", [])))
        minutes = [f"{seconds / 60:.1f}" for seconds in (run.seconds, rollouts)]
        rows.append([f"seed {run.config['seed']}", *minutes, f"{speed:,.0f}", resumed])
    return "Optimizer steps with their rollouts, and evaluations.\n\n" + _table(header, rows)


def _samples(run: RunRecord, number: int) -> list[str]:
    """Held-out prompts that were wrong before and are right after come first."""
    held_out = [sample for sample in run.samples if sample["phase"] == "held_out"]
    if not held_out or number == 0:
        return []
    first, last = (
        {sample["prompt"]: sample for sample in held_out if sample["step"] == step}
        for step in (held_out[0]["step"], held_out[-1]["step"])
    )
    both = [(before, last[prompt]) for prompt, before in first.items() if prompt in last]
    both.sort(key=lambda pair: pair[0]["reward"] - pair[1]["reward"])
    parts = [f"## Samples before and after, seed {run.config['seed']}, temperature 1"]
    parts.append("Those whose reward grew most come first; they are examples, not an average.")
    for before, after in both[:number]:
        parts += [f"**Prompt** (answer: {_inline(before['answer'])})", _fenced(before["prompt"])]
        for label, sample in (("Before", before), ("After", after)):
            parts += [f"{label}, step {sample['step']}, reward {sample['reward']:g}:", _fenced(sample["completion"])]
    return parts


def _fenced(text: str) -> str:
    """A block of text; whatever a model writes stays inside."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text}\n{fence}"


def _inline(text: str) -> str:
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    ticks = "`" * (longest + 1)
    return f"{ticks} {' '.join(text.split())} {ticks}"


def _quoted(text: str | None) -> str:
    return "nothing" if text is None else _inline(text)
