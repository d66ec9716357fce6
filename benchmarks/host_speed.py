"""What one process of a large run does on its host in a step, beside what its devices do; no device is needed.

    python -m benchmarks.host_speed
    python -m benchmarks.host_speed --ranks 64 --documents 32 --tokens 4096 --row-length 8192 --rows 4

The first process of a run with so many data ranks goes through one step, with completions of random tokens in the place of
a model, and a reward function that takes no time. What the other processes tell it is its own answer again, through the
same JSON. Beside it stands the same step of one process that has all ranks.
"""

import contextlib
import functools
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

import jax
import numpy as np

from experiments.command_line import run_command
from experiments.config import RolloutConfig
from experiments.models.huggingface.own_tokenizers import pretrained_form
from experiments.runs.processes import Processes
from experiments.sampling.completer import Completer
from experiments.sampling.packing import Packing
from experiments.sampling.prompts import PromptOrder, Sizes
from experiments.sampling.rollout import Rollouts
from experiments.sampling.sampler import Samples
from experiments.tasks import make_task
from experiments.tasks.rewards import rewards_of
from experiments.tasks.tokenizer import NUM_SPECIAL, ByteTokenizer
from experiments.training.diagnosis import require_finite_inputs
from jaxlogp.errors import require

PROMPT_TOKENS = 16
"""Of a prompt at most."""


@dataclass(frozen=True)
class HostSpeedConfig:
    """Options of the benchmark."""

    ranks: tuple[int, ...] = (8, 64, 512)
    """Data ranks of a run."""
    ranks_per_process: int = 8
    """Of which a process has so many."""
    documents: int = 48
    """Of a step, for each rank."""
    generations: int = 8
    """Completions of a prompt."""
    tokens: int = 700
    """Of a completion."""
    rows: int = 16
    """Of a micro-batch."""
    row_length: int = 2048
    """Of a micro-batch."""
    repeats: int = 3
    """Steps, of which the fastest counts."""

    def __post_init__(self) -> None:
        sizes = (
            self.ranks_per_process,
            self.documents,
            self.generations,
            self.tokens,
            self.rows,
            self.repeats,
            *self.ranks,
        )
        require(min(sizes) >= 1, "options", "numbers of at least 1", min(sizes))
        group = f"a multiple of {self.generations} completions a prompt"
        require(self.documents % self.generations == 0, "documents", group, self.documents)
        longest = self.tokens + PROMPT_TOKENS
        require(
            self.row_length >= longest, "row_length", f"at least {longest}, a prompt and a completion", self.row_length
        )
        for ranks in self.ranks:
            expected = f"multiples of the {self.ranks_per_process} ranks of a process"
            require(ranks % self.ranks_per_process == 0, "ranks", expected, ranks)


class Parts(NamedTuple):
    """Seconds of a step.

    Attributes:
      rollout: prompts encoded, completions decoded, documents made.
      rounds: documents dealt to the ranks, cut into rounds, and checked.
      arrays: of the ranks that the process has.
    """

    rollout: float
    rounds: float
    arrays: float


@dataclass(frozen=True)
class Result:
    """Seconds by number of ranks: of a process with its part of them, and of one that has all."""

    seconds: dict[int, tuple[Parts, Parts]]
    markdown: str


class FirstOf(Processes):
    """The first of several processes, of which all say the same."""

    def __init__(self, count: int) -> None:
        super().__init__(0, count, None)

    def gather(self, what: str, value: Any) -> list[Any]:
        """The value, read as often as there are processes."""
        said = json.dumps([what, value])
        return [json.loads(said)[1] for _ in range(self.count)]


@contextlib.contextmanager
def as_first_of(count: int) -> Iterator[None]:
    """What asks for the processes is told that it is the first of so many."""
    here = FirstOf(count) if count > 1 else Processes()
    with contextlib.ExitStack() as stack:
        for user in ("completer", "scorer"):
            stack.enter_context(mock.patch(f"experiments.sampling.{user}.processes", lambda: here))
        yield


def rollouts_of(config: HostSpeedConfig, ranks: int) -> tuple[Rollouts, Packing]:
    """Rollouts of a whole step without a model, and what packs them."""
    tokenizer, task = pretrained_form(ByteTokenizer()), make_task("addition:3")
    count = config.documents * ranks
    drawn = np.random.default_rng(0).integers(NUM_SPECIAL, NUM_SPECIAL + 256, (count, config.tokens), dtype=np.int32)
    log_probs, lengths = np.full(drawn.shape, -1.0, np.float32), np.full(count, config.tokens, np.int32)
    sizes = Sizes(prompt=PROMPT_TOKENS, completion=config.tokens, row=config.row_length, rows=config.rows)
    rewards = rewards_of(lambda example, completion: float(len(completion) % 2))
    completer = Completer(lambda *_: Samples(drawn, log_probs, log_probs, lengths), rewards, tokenizer, sizes)
    options = RolloutConfig(prompts_per_rollout=count // config.generations, num_generations=config.generations)
    made = Rollouts(PromptOrder(task, 0, None), completer, options, "group", jax.random.key(0))
    return made, Packing(ranks, config.rows, config.row_length, tokenizer.vocab_size, tokenizer.pad_id)


def step(rollouts: Rollouts, packing: Packing, ranks_here: int) -> Parts:
    """Seconds of one step."""
    started = time.perf_counter()
    documents = rollouts.next(None, 0)
    rollout = time.perf_counter()
    rounds = packing.rounds(documents)
    require_finite_inputs(rounds)
    packed = time.perf_counter()
    for each in rounds:
        for rank in range(ranks_here):
            each.micro_batch(rank)
    return Parts(rollout - started, packed - rollout, time.perf_counter() - packed)


def fastest(config: HostSpeedConfig, ranks: int, ranks_here: int) -> Parts:
    """The fastest of the steps, after one that is not counted."""
    rollouts, packing = rollouts_of(config, ranks)
    with as_first_of(ranks // ranks_here):
        return min([step(rollouts, packing, ranks_here) for _ in range(1 + config.repeats)][1:], key=sum)


def markdown(config: HostSpeedConfig, seconds: dict[int, tuple[Parts, Parts]]) -> str:
    """The table."""
    lines = [
        f"Seconds of a step on the host, {config.documents} documents of {config.tokens} tokens a rank, "
        f"{config.ranks_per_process} ranks a process; in brackets one process with all ranks.",
        "",
        "| ranks | documents | rollout | rounds | arrays | together | of one process |",
        "|---|---|---|---|---|---|---|",
    ]
    for ranks, (mine, whole) in seconds.items():
        cells = [f"{a:.3f} ({b:.3f})" for a, b in zip((*mine, sum(mine)), (*whole, sum(whole)), strict=True)]
        cells.append(f"{sum(mine) / sum(whole):.2f}")
        lines.append(f"| {ranks} | {ranks * config.documents} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(config: HostSpeedConfig) -> Result:
    """Measures every number of ranks, and prints the table."""
    measure = functools.partial(fastest, config)
    seconds = {ranks: (measure(ranks, config.ranks_per_process), measure(ranks, ranks)) for ranks in config.ranks}
    result = Result(seconds, markdown(config, seconds))
    print(result.markdown)
    return result


if __name__ == "__main__":
    run_command(HostSpeedConfig, main, program="benchmarks.host_speed", description=__doc__)
