"""The policy that a source draws from: free prompts, completed by the samplers of the run."""

import bisect
import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from flax import nnx
from jaxtyping import Bool, Float, Int

from experiments.models.tokenizer import Tokenizer
from experiments.processes import processes
from experiments.sampling.options import SamplingOptions
from experiments.sampling.sampler import Sampler, Samples
from jaxlogp import Document, Support
from jaxlogp.errors import require

SHORTEST = 8
"""Fewest tokens that prompts are padded to."""


class Generation(NamedTuple):
    """What was drawn after a prompt: ids with the end token, their log-probs in nats, and why it ended: "stop" (an end token
    or a stop text) or "length". Where it is recorded, also the support of each token, over which its log-prob then is,
    whether it was cut (`experiments.sampling.support`), and its probability in the whole distribution."""

    ids: Int[np.ndarray, " tokens"]
    log_probs: Float[np.ndarray, " tokens"]
    finish_reason: Literal["stop", "length"]
    support: Support | None = None
    cut: Bool[np.ndarray, " tokens"] | None = None
    mass: Float[np.ndarray, " tokens"] | None = None


class Shape(NamedTuple):
    """What a program draws: completions of prompts, padded to so many tokens, as options say."""

    prompts: int
    tokens: int
    copies: int
    options: SamplingOptions


def apart_from_greedy(drawn: list[Generation], copies: int) -> tuple[list[Generation], list[Generation]]:
    """Returns the completions of prompts without the last of each one's `copies`, and these (`greedy_last`)."""
    return [each for place, each in enumerate(drawn, 1) if place % copies], drawn[copies - 1 :: copies]


class Samplers:
    """The samplers of a run, one for each kind of completion, for rows of at least the trainer's `row_length` tokens."""

    def __init__(
        self,
        make_sampler: Callable[[SamplingOptions, int], Sampler],
        tokenizer: Tokenizer,
        temperature: float,
        row_length: int,
    ) -> None:
        self._make_sampler, self.tokenizer = make_sampler, tokenizer
        self._temperature, self._row_length = temperature, row_length
        self._samplers: dict[tuple[SamplingOptions, int], Sampler] = {}

    def find(self, options: SamplingOptions, prompt_tokens: int) -> Sampler:
        """Returns the sampler of prompts padded to so many tokens; it does not know of stop texts."""
        temperature = self._temperature if options.temperature is None else options.temperature
        row_length = max(self._row_length, prompt_tokens + options.max_new_tokens)
        key = replace(options, temperature=temperature, stop=()), row_length
        if key not in self._samplers:
            self._samplers[key] = self._make_sampler(*key)
        return self._samplers[key]

    def lower(self, params: nnx.State, shape: Shape) -> Callable[[], int | None]:
        """Lowers what draws completions of this shape, as `Sampler.lower`."""
        return self.find(shape.options, shape.tokens).lower(params, shape.prompts, shape.tokens, shape.copies)


class SamplerPolicy:
    """The `Policy` of the built-in samplers; seeds are folded into `key`, one by one."""

    def __init__(
        self,
        samplers: Samplers,
        params: nnx.State,
        version: int,
        log_probs: Callable[[Sequence[Document]], list[np.ndarray]],
        key: jax.Array,
        reference_log_probs: Callable[[Sequence[Document]], list[np.ndarray]] | None = None,
    ) -> None:
        self._samplers, self.version, self._key = samplers, version, key
        self._params: Any = params
        self._log_probs, self.tokenizer = log_probs, samplers.tokenizer
        self._reference_log_probs = reference_log_probs

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        options: SamplingOptions,
        *,
        copies: int = 1,
        seed: tuple[int, ...] = (),
        pad_to: tuple[int, int] | None = None,
    ) -> list[Generation]:
        self._require_open()
        require(len(prompts) > 0, "prompts", "at least one", len(prompts))
        require(copies >= 1, "copies", "at least 1", copies)
        for number, prompt in enumerate(prompts):
            require(len(prompt) > 0, f"prompts[{number}]", "at least one id", "none")
            lowest, highest, size = min(prompt), max(prompt), self.tokenizer.vocab_size
            require(0 <= lowest and highest < size, f"prompts[{number}]", f"ids in [0, {size})", (lowest, highest))
        padded, lengths = _padded(prompts, pad_to, self.tokenizer.pad_id)
        key = functools.reduce(jax.random.fold_in, seed, self._key)
        samples = self._samplers.find(options, padded.shape[1])(self._params, padded, lengths, copies, key)
        ends = samples.lengths[: len(prompts) * copies].tolist()
        tokens = [row[:end] for row, end in zip(samples.tokens, ends, strict=False)]
        stops = self._stops(tokens, options.stop)
        return [self._generation(samples, row, end, stops[row]) for row, end in enumerate(ends)]

    def log_probs(self, documents: Sequence[Document]) -> list[Float[np.ndarray, " labels"]]:
        self._require_open()
        return self._log_probs(documents)

    def reference_log_probs(self, documents: Sequence[Document]) -> list[Float[np.ndarray, " labels"]]:
        self._require_open()
        require(self._reference_log_probs is not None, "policy", "one that has a reference", "one without")
        assert self._reference_log_probs is not None, "just required"
        return self._reference_log_probs(documents)

    def end(self) -> None:
        self._params = None

    def _require_open(self) -> None:
        kept = f"one of version {self.version} whose step is over"
        require(self._params is not None, "policy", "that of this step", kept)

    def _stops(self, rows: list[np.ndarray], stop: tuple[str, ...]) -> list[int | None]:
        """Returns numbers of tokens up to the one that completes a stop text, each worked out by one of the processes."""
        if not stop:
            return [None] * len(rows)

        def stops(numbers: range) -> list[int | None]:
            return [stopped_at(self.tokenizer, rows[number].tolist(), stop) for number in numbers]

        return processes().split_map("stop texts", len(rows), stops)

    def _generation(self, samples: Samples, row: int, end: int, stop: int | None) -> Generation:
        """Returns what was drawn in a row, up to the token that completes a stop text."""
        ended = stop is not None or int(samples.tokens[row, end - 1]) in self.tokenizer.eos_ids
        end = end if stop is None else stop
        drawn = samples.tokens[row, :end], samples.log_probs[row, :end], "stop" if ended else "length"
        if samples.support is None:
            return Generation(*drawn)
        ids, counts, cut, mass = (x[row] for x in samples.support)
        return Generation(*drawn, Support(ids, counts).part(0, end), cut[:end], mass[:end])


def stopped_at(tokenizer: Tokenizer, tokens: list[int], stop: tuple[str, ...]) -> int | None:
    """Returns the number of tokens up to the one that completes a stop text; None without one."""

    def has_stop(count: int) -> bool:
        text = tokenizer.decode(tokens[:count])
        return any(each in text for each in stop)

    if not has_stop(len(tokens)):
        return None
    return bisect.bisect_left(range(1, len(tokens) + 1), True, key=has_stop) + 1


def _padded(
    prompts: Sequence[Sequence[int]], pad_to: tuple[int, int] | None, pad_id: int
) -> tuple[Int[np.ndarray, "rows width"], Int[np.ndarray, " rows"]]:
    """Returns the prompts, right-padded, and their lengths; rows behind the last are its prompt again."""
    lengths = [len(prompt) for prompt in prompts]
    rows, width = pad_to or (_power_of_two(len(prompts)), _power_of_two(max(*lengths, SHORTEST)))
    require(len(prompts) <= rows, "pad_to", f"at least {len(prompts)} prompts", rows)
    require(max(lengths) <= width, "pad_to", f"at least {max(lengths)} tokens, for the longest prompt", width)
    padded = np.full((rows, width), pad_id, np.int32)
    for row, prompt in zip(padded, prompts, strict=False):
        row[: len(prompt)] = prompt
    padded[len(prompts) :] = padded[len(prompts) - 1]
    return padded, np.array(lengths + [lengths[-1]] * (rows - len(prompts)), np.int32)


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
