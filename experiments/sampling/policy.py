"""The policy that a source draws from: free prompts, completed by the sampler of the run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from flax import nnx
from jaxtyping import Float, Int

from experiments.sampling.completer import Draw, stopped_at
from experiments.sampling.pick import DrawOptions
from experiments.sampling.prompts import Sizes
from experiments.tasks.tokenizer import Tokenizer
from jaxlogp import Document
from jaxlogp.errors import require

SHORTEST = 8
"""Fewest tokens that prompts are padded to."""


class Generation(NamedTuple):
    """What was drawn after a prompt: ids with the end token, their log-probs in nats, and why it ended: "stop" (an end token
    or a stop text) or "length"."""

    ids: Int[np.ndarray, " tokens"]
    log_probs: Float[np.ndarray, " tokens"]
    finish_reason: Literal["stop", "length"]


@dataclass(frozen=True)
class SamplingOptions:
    """How a policy draws, at the temperature of the run.

    Attributes:
        max_new_tokens: largest number of tokens, end token included.
        greedy: take the likeliest token.
        top_k: draw among this many likeliest tokens; None for all.
        top_p: draw among the fewest likeliest tokens whose probabilities sum to this; 1 for all.
        min_p: draw among tokens at least this many times as likely as the likeliest; 0 for all.
        stop: texts each of which ends a completion.
    """

    max_new_tokens: int
    greedy: bool = False
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()


class Generator:
    """Draws completions of free prompts; programs are kept by their shapes and options.

    Args:
        make_draw: makes a draw for sizes and options.
        tokenizer: text to ids and back.
        temperature: of the run.
        key: of the run's draws, into which seeds are folded.
    """

    def __init__(
        self,
        make_draw: Callable[[Sizes, DrawOptions], Draw],
        tokenizer: Tokenizer,
        temperature: float,
        key: jax.Array,
    ) -> None:
        self._make_draw, self.tokenizer, self._temperature, self._key = make_draw, tokenizer, temperature, key
        self._draws: dict[tuple[Sizes, DrawOptions], Draw] = {}

    def generate(
        self,
        params: nnx.State,
        prompts: Sequence[Sequence[int]],
        options: SamplingOptions,
        copies: int,
        seed: tuple[int, ...],
    ) -> list[Generation]:
        """See `Policy.generate`."""
        require(len(prompts) > 0, "prompts", "at least one", len(prompts))
        require(copies >= 1, "copies", "at least 1", copies)
        for number, prompt in enumerate(prompts):
            require(len(prompt) > 0, f"prompts[{number}]", "at least one id", "none")
            lowest, highest, size = min(prompt), max(prompt), self.tokenizer.vocab_size
            require(0 <= lowest and highest < size, f"prompts[{number}]", f"ids in [0, {size})", (lowest, highest))
        lengths = [len(prompt) for prompt in prompts]
        width, rows = _power_of_two(max(*lengths, SHORTEST)), _power_of_two(len(prompts))
        padded = np.full((rows, width), self.tokenizer.pad_id, np.int32)
        for row, prompt in enumerate(prompts):
            padded[row, : len(prompt)] = prompt
        # The rows behind the last are its prompt again.
        padded[len(prompts) :] = padded[len(prompts) - 1]
        lengths += [lengths[-1]] * (rows - len(prompts))
        key = self._key
        for number in seed:
            key = jax.random.fold_in(key, number)
        drawn = self._draw_for(width, options)(params, padded, np.array(lengths, np.int32), copies, key)
        count = len(prompts) * copies
        ends = drawn.lengths[:count].tolist()
        rows_of = zip(drawn.tokens[:count], drawn.log_probs[:count], ends, strict=True)
        return [self._ended(tokens[:end], log_probs[:end], options.stop) for tokens, log_probs, end in rows_of]

    def _draw_for(self, width: int, options: SamplingOptions) -> Draw:
        how = DrawOptions(self._temperature, options.greedy, options.top_k, options.top_p, options.min_p)
        require(options.max_new_tokens >= 1, "max_new_tokens", "at least 1", options.max_new_tokens)
        key = Sizes(width, options.max_new_tokens, width + options.max_new_tokens, 1), how
        if key not in self._draws:
            self._draws[key] = self._make_draw(*key)
        return self._draws[key]

    def _ended(self, tokens: np.ndarray, log_probs: np.ndarray, stop: tuple[str, ...]) -> Generation:
        count = stopped_at(self.tokenizer, tokens.tolist(), stop)
        if count is not None:
            return Generation(tokens[:count], log_probs[:count], "stop")
        return Generation(tokens, log_probs, "stop" if int(tokens[-1]) in self.tokenizer.eos_ids else "length")


class SamplerPolicy:
    """See `experiments.experience.experience.Policy`."""

    def __init__(
        self,
        generator: Generator,
        params: nnx.State,
        version: int,
        log_probs: Callable[[Sequence[Document]], list[np.ndarray]],
    ) -> None:
        self._generator, self.version = generator, version
        self._params: Any = params
        self._log_probs, self.tokenizer = log_probs, generator.tokenizer

    @property
    def params(self) -> nnx.State:
        """The parameters.

        Raises:
            ValueError: if the step has ended.
        """
        self._require_open()
        return self._params

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        options: SamplingOptions,
        *,
        copies: int = 1,
        seed: tuple[int, ...] = (),
    ) -> list[Generation]:
        """See `Policy`."""
        return self._generator.generate(self.params, prompts, options, copies, seed)

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


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
