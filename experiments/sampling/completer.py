"""Completions of examples: prompts encoded, tokens drawn by one of two draws, completions decoded and rewarded."""

import bisect
from collections.abc import Callable, Sequence
from copy import copy
from typing import NamedTuple, Protocol, overload

import jax
import numpy as np
from flax import nnx

from experiments.runs.folder import Sample
from experiments.runs.processes import processes
from experiments.sampling.prompts import Sizes, answer_length, encode_prompt
from experiments.sampling.sampler import Samples
from experiments.sampling.scorer import Scorer
from experiments.tasks import Completion, Example, Rewards
from experiments.tasks.protocol import prompt_text
from experiments.tasks.tokenizer import Tokenizer
from jaxlogp import Document


class Draw(Protocol):
    """Draws completions: `experiments.sampling.cached_draw`, or leaf by leaf `experiments.sampling.leaf_draw`."""

    def __call__(
        self, params: nnx.State, prompts: np.ndarray, lengths: np.ndarray, copies: int, key: jax.Array
    ) -> Samples:
        """`copies` completions of every prompt in adjacent rows, as NumPy arrays.

        Args:
            params: parameters of the decoder.
            prompts: int32 [B, P], right-padded.
            lengths: int32 [B].
            copies: completions per prompt.
            key: a JAX random key.
        """

    def memory(self, params: nnx.State, prompts: int, copies: int) -> int | None:
        """Most bytes of a device that it takes beside the parameters, from its programs, which are compiled for it before
        their first call; None where they are many small ones.

        Args:
            params: arrays, or their shapes, dtypes and places.
            prompts: how many.
            copies: completions per prompt.
        """


class Texts(Sequence[Completion]):
    """Completions, each decoded when it is first read: of several processes each reads its part, and few others."""

    def __init__(self, decode: Callable[[np.ndarray], Completion], rows: Sequence[np.ndarray]) -> None:
        self._decode, self._rows = decode, rows
        self._decoded: dict[int, Completion] = {}
        self._numbers = range(len(rows))

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, place: int) -> Completion: ...
    @overload
    def __getitem__(self, place: slice) -> "Texts": ...
    def __getitem__(self, place: int | slice) -> "Completion | Texts":
        if isinstance(place, slice):
            part = copy(self)
            part._numbers = self._numbers[place]
            return part
        number = self._numbers[place]
        if number not in self._decoded:
            self._decoded[number] = self._decode(self._rows[number])
        return self._decoded[number]


class Completions(NamedTuple):
    """Sampled completions, one or several of each example in adjacent rows, with their rewards.

    Attributes:
        prompts: ids of the prompts.
        tokens: ids of the completions, including end tokens.
        log_probs: of these tokens, in nats.
        texts: the completions as text.
        ended: bool [N], whether an end token or a stop text ended it.
        empty: bool [N], whether its text is.
        rewards: [N], the weighted sums.
        parts: [N, K], the value of each reward function.
    """

    prompts: list[list[int]]
    tokens: list[np.ndarray]
    log_probs: list[np.ndarray]
    texts: Texts
    ended: np.ndarray
    empty: np.ndarray
    rewards: np.ndarray
    parts: np.ndarray

    @property
    def mean_length(self) -> float:
        """Mean number of tokens, end tokens included."""
        return float(np.mean([len(tokens) for tokens in self.tokens]))

    @property
    def truncated_share(self) -> float:
        """Share without an end token."""
        return float(np.mean(~self.ended))

    def documents(self) -> list[Document]:
        """What was drawn, without advantages."""
        return [
            Document.of_completion(np.array(prompt, np.int32), tokens, log_probs, reward=float(reward))
            for prompt, tokens, log_probs, reward in zip(
                self.prompts, self.tokens, self.log_probs, self.rewards, strict=True
            )
        ]

    def first(self, number: int) -> "Completions":
        """The first completions only."""
        return Completions(*(column[:number] for column in self))


class Completer:
    """Completes examples with given parameters, and rewards the completions.

    Args:
        draw: draws the tokens.
        rewards: rewards completions.
        tokenizer: text to tokens and back.
        sizes: bounds of prompts and completions.
        stop: texts each of which ends a completion.
    """

    def __init__(
        self, draw: Draw, rewards: Rewards, tokenizer: Tokenizer, sizes: Sizes, stop: tuple[str, ...] = ()
    ) -> None:
        self.draw, self._tokenizer, self._sizes, self._stop = draw, tokenizer, sizes, stop
        self.rewards = Scorer(rewards)

    def complete(self, params: nnx.State, examples: list[Example], key: jax.Array, *, copies: int = 1) -> Completions:
        """Draws `copies` completions for each example and rewards them.

        Raises:
            ValueError: a prompt that cannot be encoded.
            RewardNotFinite: of a reward function.
            RewardFailed: it raised, or returned no number.
        """
        prompts = [encode_prompt(self._tokenizer, example, self._sizes) for example in examples]
        padded = np.full((len(prompts), self._sizes.prompt), self._tokenizer.pad_id, np.int32)
        for row, prompt in zip(padded, prompts, strict=True):
            row[: len(prompt)] = prompt
        lengths = np.array([len(prompt) for prompt in prompts], np.int32)
        samples = self.draw(params, padded, lengths, copies, key)
        drawn = [row[:end] for row, end in zip(samples.tokens, samples.lengths.tolist(), strict=True)]
        texts = Texts(self._completion, drawn)

        def facts(numbers: range) -> list[tuple[int, bool, bool]]:
            return [(text.num_tokens, text.ended, not text) for text in map(texts.__getitem__, numbers)]

        known = processes().each_its_part("completions", len(drawn), facts)
        counts, ended, empty = (np.array(column) for column in zip(*known, strict=True))
        tokens, scored = (
            [row[:count] for row, count in zip(rows, counts.tolist(), strict=True)]
            for rows in (drawn, samples.log_probs)
        )
        repeated = [example for example in examples for _ in range(copies)]
        prompts = [prompt for prompt in prompts for _ in range(copies)]
        return Completions(prompts, tokens, scored, texts, ended, empty, *self.rewards.score(repeated, texts))

    def fits(self, example: Example) -> bool:
        """Whether a completion can be the example's answer with an end token."""
        length = answer_length(self._tokenizer, example)
        return length is not None and length < self._sizes.completion

    def _completion(self, row: np.ndarray) -> Completion:
        tokens = row.tolist()
        count = stopped_at(self._tokenizer, tokens, self._stop)
        text = self._tokenizer.decode(tokens[:count])
        if count is not None:
            return Completion(text, num_tokens=count, ended=True)
        return Completion(text, num_tokens=len(tokens), ended=tokens[-1] in self._tokenizer.eos_ids)


def stopped_at(tokenizer: Tokenizer, tokens: list[int], stop: tuple[str, ...]) -> int | None:
    """Returns the number of tokens up to the one that completes a stop text; None without one."""

    def has_stop(count: int) -> bool:
        text = tokenizer.decode(tokens[:count])
        return any(each in text for each in stop)

    if not stop or not has_stop(len(tokens)):
        return None
    return bisect.bisect_left(range(1, len(tokens) + 1), True, key=has_stop) + 1


def readable(examples: list[Example], completions: Completions, names: tuple[str, ...]) -> list[Sample]:
    """Records for samples.jsonl, one completion per example; `names` are those of the reward functions."""
    return [
        Sample(
            prompt_text(example.prompt),
            str(text),
            example.answer,
            reward,
            dict(zip(names, parts, strict=True)),
            text.num_tokens,
            text.ended,
        )
        for example, text, reward, parts in zip(
            examples, completions.texts, completions.rewards.tolist(), completions.parts.tolist(), strict=True
        )
    ]
