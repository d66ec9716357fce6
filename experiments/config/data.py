"""Options of prompts, answers and rewards."""

from dataclasses import dataclass

from experiments.tasks.jsonl import JsonlOptions


@dataclass(frozen=True)
class DataConfig(JsonlOptions):
    """Presentation of examples to the model. Keys, patterns and verifier belong to task jsonl:PATH alone."""

    system: str | None = None
    """System message before every prompt; needs a chat template."""
    instruction: str | None = None
    """Text appended to every prompt, after an empty line."""
    extract: tuple[str, ...] = ()
    """Part of a completion that is the answer: whole, tag (<answer>…</answer>), boxed (\\boxed{…}), answer_is, last_number.
    The first of several that finds something decides. Empty: the task decides."""


@dataclass(frozen=True)
class RewardConfig:
    """Reward of a completion, a weighted sum. Does not affect held-out scores, which are exact match."""

    functions: tuple[str, ...] = ("correct",)
    """correct (the task's verdict), ended (by an end token), pattern, short, tags, or module:name of your own function.
    pattern: --reward.pattern matches the whole completion. tags: it is <think>…</think><answer>…</answer>.
    short: 0 up to --reward.length tokens, 1 - tokens / length beyond."""
    weights: tuple[float, ...] | None = None
    """Weight of each function. None: 1.0 each."""
    pattern: str | None = None
    """Regular expression of the function pattern; a dot matches line breaks as well."""
    length: int | None = None
    """Number of tokens of the function short."""
