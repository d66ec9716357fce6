"""Options of prompts, answers and rewards."""

from dataclasses import dataclass

from experiments.tasks.jsonl import JsonlOptions


@dataclass(frozen=True)
class DataConfig(JsonlOptions):
    """How examples are put to the model. Keys, patterns and verifier belong to task jsonl:PATH alone."""

    system: str | None = None
    """System message before every prompt; needs a chat template."""
    instruction: str | None = None
    """Text appended to every prompt, after an empty line."""
    extract: tuple[str, ...] = ()
    """Where the answer is in a completion: whole, tag (<answer>…</answer>), boxed (\\boxed{…}), answer_is, last_number. The
    first that finds something decides; none leaves it to the task."""


@dataclass(frozen=True)
class RewardConfig:
    """The reward of a completion: a weighted sum. Held-out scores are exact match whatever it is."""

    functions: tuple[str, ...] = ("correct",)
    """correct (the task's verdict), tags (all of it is <think>…</think><answer>…</answer>), pattern (all of it matches),
    ended (by an end token), short (1 - tokens / length beyond length, else 0), or a name of one's own."""
    weights: tuple[float, ...] | None = None
    """One for each function; None for 1.0 each."""
    pattern: str | None = None
    """Regular expression of the function pattern; a dot matches line breaks too."""
    length: int | None = None
    """Tokens of the function short."""
