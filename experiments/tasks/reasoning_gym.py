"""Tasks from the data sets of the reasoning-gym package, by name.

The package is optional: pip install -e ".[tasks]". Tried with reasoning-gym 0.1.25.

What it offers and what is used of it differ in four points.

- **Reward.** Its scores pay partial credit, for example for text that merely contains the answer. Here only a score of
  exactly 1.0 is a reward. A scorer that raises an exception has met text that is no answer: reward 0.0.
- **No evaluation of text.** Some scorers hand the answer to `eval` or to SymPy's parser, which runs it as a program.
  Model text is never run, so a data set whose module mentions such a function is refused unless its scorer was read
  and found to keep away from it (`SCORER_READ`).
- **Reproducible examples.** Data sets in `NOT_REPRODUCIBLE` give other examples in another process, with the same
  seed, and are refused. So is one that scores nonsense as right, its own answer as wrong, or has no answers.
- **A pool.** Some data sets prepare all their examples in advance, so examples are drawn from the first `POOL_SIZE` of
  a data set and repeat after a while. They are generated when first asked for and then kept. Most take far below a
  millisecond each; acre takes two seconds to start, and futoshiki, sokoban and zebra_puzzles take a tenth of a second
  for each, of which a held-out example needs ten on average.
"""

import difflib
import inspect
import random
import re
from typing import Any

from experiments.extras import import_extra
from experiments.tasks.protocol import Example, Split, check_seed, check_split, draw_example, split_of

POOL_SIZE = 10_000
SAMPLE_SIZE = 32
NONSENSE = ("", "?", "nan")

RUNS_TEXT = re.compile(
    r"(?<!re\.)\b(?:eval|exec|compile|__import__|parse_expr|sympify)\(|\b(?:sympy|pickle|subprocess|importlib)\b"
)
SCORER_READ = (
    "advanced_geometry",
    "basic_arithmetic",
    "bf",
    "bitwise_arithmetic",
    "number_sorting",
    "polynomial_equations",
    "simple_equations",
)
NOT_REPRODUCIBLE = (
    "codeio",
    "intermediate_integration",
    "isomorphic_strings",
    "knight_swap",
    "list_functions",
    "polynomial_multiplication",
    "ransom_note",
    "word_ladder",
)


class ReasoningGymTask:
    """One data set of reasoning-gym, at its default difficulty.

    Making the task generates `SAMPLE_SIZE` examples. The longest prompt and the longest answer among them become the
    limits `max_prompt_tokens` and `max_answer_tokens`; longer examples are passed over when drawing. The source of an
    example is the data set's own entry.
    """

    alphabet = None

    def __init__(self, dataset: str, *, seed: int = 0) -> None:
        check_seed(seed)
        self.name = f"reasoning_gym:{dataset}"
        self._seed = seed
        self._dataset = _create(self.name, dataset, seed)
        self._entries: dict[int, dict[str, Any]] = {}
        sample = [example for index in range(SAMPLE_SIZE) if (example := self._pooled(index)) is not None]
        self._check(sample)
        self.max_prompt_tokens = max(len(example.prompt.encode()) for example in sample)
        self.max_answer_tokens = max(len(example.answer.encode()) for example in sample)

    def num_examples(self, split: Split) -> int | None:
        check_split(split)
        return None

    def example(self, index: int, split: Split) -> Example:
        return draw_example(self, self._seed, index, split, self._candidate, self._belongs_to)

    def verify(self, example: Example, completion: str) -> float:
        """1.0 when the data set scores the completion, without white space around it, as exactly 1.0."""
        if example.source is None:
            raise ValueError(f"example: expected one made by task {self.name!r}, got one without a source")
        try:
            score = self._dataset.score_answer(answer=completion.strip(), entry=example.source)
        except Exception:
            # Scorers parse model text and differ in what they let through; __init__ has seen this one work.
            return 0.0
        return float(score == 1.0)

    def _belongs_to(self, example: Example) -> Split:
        return split_of(self.name, example.prompt)

    def _candidate(self, generator: random.Random) -> Example | None:
        example = self._pooled(generator.randrange(POOL_SIZE))
        if example is None or len(example.prompt.encode()) > self.max_prompt_tokens:
            return None
        return example if len(example.answer.encode()) <= self.max_answer_tokens else None

    def _pooled(self, index: int) -> Example | None:
        """The example at `index` of the pool, or None where the data set has no answer to compare with."""
        if index not in self._entries:
            self._entries[index] = self._dataset[index]
        entry = self._entries[index]
        if not isinstance(entry["answer"], str) or not entry["answer"].strip():
            return None
        return Example(entry["question"], entry["answer"], entry)

    def _check(self, sample: list[Example]) -> None:
        if not sample:
            raise ValueError(f"task {self.name!r}: refused, it has no reference answers")
        for example in sample:
            if self.verify(example, example.answer) != 1.0:
                raise ValueError(f"task {self.name!r}: refused, one of its own answers scores less than 1.0")
            for nonsense in NONSENSE:
                if self.verify(example, nonsense) == 1.0:
                    raise ValueError(f"task {self.name!r}: refused, {nonsense!r} for an answer scores 1.0")


def _create(task: str, dataset: str, seed: int) -> Any:
    reasoning_gym = import_extra("reasoning_gym", f"task {task!r}", "tasks")
    known = reasoning_gym.factory.DATASETS
    if dataset not in known:
        close = difflib.get_close_matches(dataset, known, n=5, cutoff=0.5)
        hint = f"close: {', '.join(close)}" if close else "none is close"
        raise ValueError(f"task {task!r}: expected one of the {len(known)} data sets of reasoning-gym; {hint}")
    if dataset in NOT_REPRODUCIBLE:
        raise ValueError(f"task {task!r}: refused, its examples differ from process to process with the same seed")
    source = inspect.getsource(inspect.getmodule(known[dataset][0]))
    if dataset not in SCORER_READ and (found := RUNS_TEXT.search(source)):
        word = found.group().rstrip("(")
        raise ValueError(f"task {task!r}: refused, scoring with it might run model text as a program ({word})")
    try:
        return reasoning_gym.create_dataset(dataset, size=POOL_SIZE, seed=seed)
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"task {task!r}: expected a data set that needs no options, got: {error}") from error
