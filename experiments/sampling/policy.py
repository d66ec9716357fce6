"""The policy that a source draws from: free prompts, completed by the sampler of the run."""

import bisect
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import jax
import numpy as np
from flax import nnx
from jaxtyping import Float, Int

from experiments.processes import processes
from experiments.sampling.sample_token import DrawOptions
from experiments.sampling.sampler import Samples
from experiments.tasks.tokenizer import Tokenizer
from jaxlogp import Document
from jaxlogp.errors import require

SHORTEST = 8
"""Fewest tokens that prompts are padded to."""


class Sampler(Protocol):
    """Draws completions: `experiments.sampling.cached_draw`, or leaf by leaf `experiments.invariant.leaf_sampler`."""

    def __call__(
        self, params: nnx.State, prompts: np.ndarray, lengths: np.ndarray, copies: int, key: jax.Array
    ) -> Samples:
        """Draws `copies` completions of every prompt, in adjacent rows, as NumPy arrays.

        Prompts are int32 [B, P], right-padded, and `lengths` int32 [B].
        """

    def memory(self, params: nnx.State, prompts: int, tokens: int, copies: int) -> int | None:
        """Returns the most bytes it takes per device beside the parameters, of which shapes, dtypes and places are enough.

        Its programs for [`prompts`, `tokens`] are compiled for that before their first call; None if they are many small
        ones.
        """


class Generation(NamedTuple):
    """What was drawn after a prompt: ids with the end token, their log-probs in nats, and why it ended: "stop" (an end token
    or a stop text) or "length"."""

    ids: Int[np.ndarray, " tokens"]
    log_probs: Float[np.ndarray, " tokens"]
    finish_reason: Literal["stop", "length"]


@dataclass(frozen=True)
class SamplingOptions:
    """How a policy draws.

    Attributes:
        max_new_tokens: largest number of tokens, end token included.
        temperature: divisor of the logits; None for that of the run, which the trainer divides by.
        greedy: take the likeliest token.
        top_k: draw among this many likeliest tokens; None for all.
        top_p: draw among the fewest likeliest tokens whose probabilities sum to this; 1 for all.
        min_p: draw among tokens at least this many times as likely as the likeliest; 0 for all.
        stop: texts each of which ends a completion.
    """

    max_new_tokens: int
    temperature: float | None = None
    greedy: bool = False
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()


class Shape(NamedTuple):
    """What a program draws: completions of prompts, padded to so many tokens, as options say."""

    prompts: int
    tokens: int
    copies: int
    options: SamplingOptions


class Generator:
    """Draws completions of free prompts; programs are kept by their shapes and options.

    `make_sampler` takes the largest number of new tokens, the tokens of a row, and options. `temperature` is that of the
    run, and `row_length` the tokens of the trainer's rows, the least of a row here.
    """

    def __init__(
        self,
        make_sampler: Callable[[int, int, DrawOptions], Sampler],
        tokenizer: Tokenizer,
        temperature: float,
        row_length: int,
    ) -> None:
        self._make_sampler, self.tokenizer, self._temperature = make_sampler, tokenizer, temperature
        self._row_length = row_length
        self._samplers: dict[tuple[int, int, DrawOptions], Sampler] = {}

    def memory(self, params: nnx.State, shape: Shape) -> int | None:
        prompts, tokens, copies, options = shape
        return self._sampler_for(tokens, options).memory(params, prompts, tokens, copies)

    def generate(
        self,
        params: nnx.State,
        key: jax.Array,
        prompts: Sequence[Sequence[int]],
        options: SamplingOptions,
        copies: int,
        pad_to: tuple[int, int] | None,
    ) -> list[Generation]:
        """Draws completions, as `Policy.generate` describes."""
        require(len(prompts) > 0, "prompts", "at least one", len(prompts))
        require(copies >= 1, "copies", "at least 1", copies)
        for number, prompt in enumerate(prompts):
            require(len(prompt) > 0, f"prompts[{number}]", "at least one id", "none")
            lowest, highest, size = min(prompt), max(prompt), self.tokenizer.vocab_size
            require(0 <= lowest and highest < size, f"prompts[{number}]", f"ids in [0, {size})", (lowest, highest))
        padded, lengths = _padded(prompts, pad_to, self.tokenizer.pad_id)
        drawn = self._sampler_for(padded.shape[1], options)(params, padded, lengths, copies, key)
        count = len(prompts) * copies
        ends = drawn.lengths[:count].tolist()
        rows = [
            (ids[:end], scored[:end]) for ids, scored, end in zip(drawn.tokens, drawn.log_probs, ends, strict=False)
        ]
        stops = self._stops([ids for ids, _ in rows], options.stop)
        return [self._generation(*row, stop) for row, stop in zip(rows, stops, strict=True)]

    def _generation(self, ids: np.ndarray, log_probs: np.ndarray, stop: int | None) -> Generation:
        """Returns what was drawn, up to the token that completes a stop text."""
        ended = stop is not None or int(ids[-1]) in self.tokenizer.eos_ids
        return Generation(ids[:stop], log_probs[:stop], "stop" if ended else "length")

    def _sampler_for(self, prompt_tokens: int, options: SamplingOptions) -> Sampler:
        temperature = self._temperature if options.temperature is None else options.temperature
        how = DrawOptions(temperature, options.greedy, options.top_k, options.top_p, options.min_p)
        require(options.max_new_tokens >= 1, "max_new_tokens", "at least 1", options.max_new_tokens)
        key = options.max_new_tokens, max(self._row_length, prompt_tokens + options.max_new_tokens), how
        if key not in self._samplers:
            self._samplers[key] = self._make_sampler(*key)
        return self._samplers[key]

    def _stops(self, rows: list[np.ndarray], stop: tuple[str, ...]) -> list[int | None]:
        """Returns numbers of tokens up to the one that completes a stop text, each worked out by one of the processes."""
        if not stop:
            return [None] * len(rows)

        def stops(numbers: range) -> list[int | None]:
            return [stopped_at(self.tokenizer, rows[number].tolist(), stop) for number in numbers]

        return processes().each_its_part("stop texts", len(rows), stops)


class SamplerPolicy:
    """The `Policy` of the built-in sampler.

    `version` is the number of documents that `params` have been trained on. `log_probs` computes those of documents by the
    trainer's forward pass. Seeds are folded into `key`, one number after the other.
    """

    def __init__(
        self,
        generator: Generator,
        params: nnx.State,
        version: int,
        log_probs: Callable[[Sequence[Document]], list[np.ndarray]],
        key: jax.Array,
    ) -> None:
        self._generator, self.version, self._key = generator, version, key
        self._params: Any = params
        self._log_probs, self.tokenizer = log_probs, generator.tokenizer

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        options: SamplingOptions,
        *,
        copies: int = 1,
        seed: tuple[int, ...] = (),
        pad_to: tuple[int, int] | None = None,
    ) -> list[Generation]:
        """See `Policy`."""
        self._require_open()
        key = functools.reduce(jax.random.fold_in, seed, self._key)
        return self._generator.generate(self._params, key, prompts, options, copies, pad_to)

    def log_probs(self, documents: Sequence[Document]) -> list[Float[np.ndarray, " labels"]]:
        """See `Policy`."""
        self._require_open()
        return self._log_probs(documents)

    def end(self) -> None:
        """Ends it with its step."""
        self._params = None

    def _require_open(self) -> None:
        kept = f"one of version {self.version} whose step is over"
        require(self._params is not None, "policy", "that of this step", kept)


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
