"""Rewards of completions, each decoded and judged by one of the processes and known to all of them.

A reward function may be slow, or answer differently when it is asked twice: with several processes no completion is
scored by two.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool

from experiments.models.tokenizer import Tokenizer
from experiments.processes import processes
from experiments.sampling.policy import Generation
from experiments.tasks import Completion, Example, Rewards
from experiments.tasks.protocol import prompt_text
from experiments.tasks.rewards import RewardFailed, RewardNotFinite, Scored

_RAISED = {error.__name__: error for error in (RewardFailed, RewardNotFinite)}


class Verdicts(NamedTuple):
    """What is known of N completions: their rewards by each of several judges, and which have no text."""

    scored: tuple[Scored, ...]
    empty: Bool[np.ndarray, " N"]


class _Completions(dict[int, Completion]):
    """Completions by number, each decoded when it is first asked for."""

    def __init__(self, tokenizer: Tokenizer, generations: Sequence[Generation]) -> None:
        super().__init__()
        self._tokenizer, self._generations = tokenizer, generations

    def __missing__(self, number: int) -> Completion:
        self[number] = to_completion(self._tokenizer, self._generations[number])
        return self[number]


def to_completion(tokenizer: Tokenizer, generation: Generation) -> Completion:
    text = tokenizer.decode(generation.ids.tolist())
    return Completion(text, num_tokens=len(generation.ids), ended=generation.finish_reason == "stop")


def score(
    tokenizer: Tokenizer, examples: Sequence[Example], generations: Sequence[Generation], *judges: Rewards
) -> Verdicts:
    """Scores completions, one for each example; RewardFailed and RewardNotFinite in one process are raised in all."""
    here, completions = processes(), _Completions(tokenizer, generations)
    answers = here.gather("rewards", _judge(here.own_indices(len(generations)), examples, completions, judges))
    for error, _ in answers:
        if error is not None:
            kind, text = error
            raise _RAISED[kind](text)
    empty, *parts = zip(*here.interleave([rows for _, rows in answers]), strict=True)
    scored = (judge.weighted(examples, completions, said) for judge, said in zip(judges, parts, strict=True))
    return Verdicts(tuple(scored), np.array(empty))


def _judge(
    numbers: range, examples: Sequence[Example], completions: _Completions, judges: Sequence[Rewards]
) -> tuple[Any, Any]:
    """Returns what was raised, and for each number whether there is no text and what each judge's functions say."""
    try:
        parts = [judge.parts(examples, completions, numbers) for judge in judges]
    except (RewardFailed, RewardNotFinite) as error:
        if processes().count == 1:
            raise
        # The others wait for this process, and are to end, or to refuse the step, as it does.
        return (type(error).__name__, str(error)), []
    return None, list(zip([not completions[number] for number in numbers], *parts, strict=True))


class Sample(NamedTuple):
    """One completion: the prompt, the sampled text, the expected answer, the reward (the sum and its parts by function),
    the number of sampled tokens, and whether an end token ended them."""

    prompt: str
    completion: str
    answer: str
    reward: float
    rewards: Mapping[str, float]
    num_tokens: int
    ended: bool


def to_samples(
    tokenizer: Tokenizer,
    examples: Sequence[Example],
    generations: Sequence[Generation],
    scored: Scored,
    names: Sequence[str],
) -> list[Sample]:
    """Makes records for samples.jsonl of the first completions, one for each example; `names` are those of the rewards."""
    samples = []
    rows = zip(examples, generations, scored.rewards.tolist(), scored.parts.tolist(), strict=False)
    for example, generation, reward, parts in rows:
        text = to_completion(tokenizer, generation)
        said = dict(zip(names, parts, strict=True))
        prompt = prompt_text(example.prompt)
        samples.append(Sample(prompt, str(text), example.answer, reward, said, text.num_tokens, text.ended))
    return samples
