"""Prompts: their order, their maximum length, and the static sizes that follow from it."""

import functools
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Int

from experiments.experience.options import RolloutConfig, ScheduleConfig
from experiments.experience.order import EpochOrder
from experiments.models.mesh import MeshSpec
from experiments.models.tokenizer import Tokenizer
from experiments.tasks import Example, Prompt, Split, Task
from experiments.tasks.protocol import SPLITS, TaskFailed, prompt_text
from jaxlogp.errors import require

MICRO_BATCH_TOKENS = {"cpu": 1024}
"""Tokens of a micro-batch by platform, where its rows are not given. On a CPU intermediate results beyond 32 MB take new
pages of memory in every call, and the system's work on them takes over half of the time of a larger micro-batch."""
MANY_TOKENS = 16_384
"""The same for all other platforms."""
ENCODED = 16_384
"""Number of prompts whose ids, of 4 bytes each, are remembered."""


class LengthLimits(NamedTuple):
    """Static sizes, in tokens: of prompts (special tokens included), of completions (end token included) and of packed rows;
    and the rows of a micro-batch on one data rank."""

    prompt: int
    completion: int
    row: int
    rows: int


def length_limits(
    task: Task,
    tokenizer: Tokenizer,
    rollout: RolloutConfig,
    schedule: ScheduleConfig,
    mesh: MeshSpec,
    leaf_rows: int | None = None,
) -> LengthLimits:
    """The task's bounds, or those of the options; a document has to fit into a packed row.

    A row length that is not given is that of the longest document, because the cost of attention is quadratic in it,
    and enough padding for the mesh to divide it. A number of rows that is not given is `leaf_rows`, or divides the
    documents of a step, each as long as a row, into equal micro-batches.
    """
    longest = longest_prompt(task, tokenizer)
    prompt = rollout.max_prompt_tokens or longest
    # Refused here, and not in the first rollout.
    countable = task.num_examples("train") is not None
    seen = longest if countable else max(_num_tokens(tokenizer, task.example(0, split).prompt) for split in SPLITS)
    require(seen <= prompt, "--rollout.max-prompt-tokens", f"at least {seen}, for the prompts of this task", prompt)
    completion = rollout.max_new_tokens or task.max_answer_tokens + 1
    longest = prompt + completion
    row = row_length_for(longest, schedule, mesh, "this task")
    step = schedule.docs_per_step or rollout.prompts_per_rollout * rollout.num_generations
    return LengthLimits(prompt, completion, row, schedule.rows or leaf_rows or rows_for(row, -(-step // mesh.ranks)))


def row_length_for(longest: int, schedule: ScheduleConfig, mesh: MeshSpec, whose: str) -> int:
    """Returns the tokens of a row: those of the options, or of the longest document with padding for the mesh."""
    row = schedule.row_length or -(-longest // mesh.sequence) * mesh.sequence
    expected = f"a number that {mesh.sequence} sequence ranks divide"
    require(row % mesh.sequence == 0, "--schedule.row-length", expected, row)
    require(longest <= row, "--schedule.row-length", f"at least {longest}, the longest document of {whose}", row)
    return row


def rows_for(row_length: int, documents: int) -> int:
    """Returns rows that divide documents, each as long as a row, into equal micro-batches."""
    tokens = MICRO_BATCH_TOKENS.get(jax.default_backend(), MANY_TOKENS)
    micro_batches = -(-documents * row_length // tokens)
    return -(-documents // micro_batches)


def longest_prompt(task: Task, tokenizer: Tokenizer) -> int:
    """Tokens of the longest prompt where the examples can be counted, else a bound on it."""
    counts = {split: task.num_examples(split) for split in SPLITS}
    if None not in counts.values():
        prompts = (task.example(index, split).prompt for split, count in counts.items() for index in range(count))
        return max(_num_tokens(tokenizer, prompt) for prompt in prompts)
    prompt = task.example(0, "train").prompt
    if isinstance(prompt, str):
        return tokenizer.longest_prompt(task.max_prompt_tokens)
    # A token is at least a byte of text, or part of what the template puts around the messages.
    return len(encode(tokenizer, tuple(each._replace(content="") for each in prompt))) + task.max_prompt_tokens


def _num_tokens(tokenizer: Tokenizer, prompt: Prompt) -> int:
    """Tokens of a prompt; ValueError that quotes a text without ids."""
    try:
        return len(encode(tokenizer, prompt))
    except ValueError as error:
        if isinstance(prompt, str):
            raise ValueError(f"prompt {prompt[:80]!r}: {error}") from error
        raise


def encode(tokenizer: Tokenizer, prompt: Prompt) -> list[int]:
    """The prompt as the model reads it: a text by the tokenizer's own rule, a conversation by the chat template.

    It is remembered: the start of a run encodes every prompt for its length, and each rollout and evaluation asks again.
    """
    return _encoded(tokenizer, prompt if isinstance(prompt, str) else tuple(prompt)).tolist()


@functools.lru_cache(ENCODED)
def _encoded(tokenizer: Tokenizer, prompt: Prompt) -> Int[np.ndarray, " tokens"]:
    if isinstance(prompt, str):
        ids = tokenizer.encode_prompt(prompt)
    else:
        ids = tokenizer.encode_messages([message._asdict() for message in prompt])
    return np.array(ids, np.int32)


def encode_prompt(tokenizer: Tokenizer, example: Example, longest: int) -> list[int]:
    """The prompt of an example; TaskFailed if it has no ids, or more than `longest` of them."""
    try:
        tokens = encode(tokenizer, example.prompt)
    except ValueError as error:
        raise TaskFailed(f"prompt {prompt_text(example.prompt)[:80]!r}: {error}") from error
    if len(tokens) > longest:
        raise TaskFailed(
            f"--rollout.max-prompt-tokens: expected prompts of at most {longest} tokens, got {len(tokens)}"
        )
    return tokens


def encode_answer(tokenizer: Tokenizer, example: Example) -> list[int]:
    """The answer of an example with an end token; TaskFailed if it has no ids."""
    try:
        return [*tokenizer.encode(example.answer), tokenizer.eos_ids[0]]
    except ValueError as error:
        raise TaskFailed(f"answer {example.answer[:80]!r}: {error}") from error


def answer_length(tokenizer: Tokenizer, example: Example) -> int | None:
    """Tokens of an example's answer, without an end token; None where it has characters that the model does not have."""
    try:
        return len(tokenizer.encode(example.answer))
    except ValueError:
        return None


def fits_completion(tokenizer: Tokenizer, example: Example, max_new_tokens: int) -> bool:
    """Returns True if a completion can be the example's answer with an end token."""
    length = answer_length(tokenizer, example)
    return length is not None and length < max_new_tokens


class PromptStream:
    """Training prompts in a seeded order; its whole state is one integer, the number of prompts taken.

    A task with a finite number of examples is shuffled anew in every pass; others are read by index.
    """

    def __init__(self, task: Task, seed: int, epochs: int | None) -> None:
        self._task, self.cursor = task, 0
        count = task.num_examples("train")
        finite = "a task with a finite number of training prompts, such as jsonl:PATH"
        require(epochs is None or count is not None, "--schedule.epochs", f"None, or {finite}", epochs)
        self._order = None if count is None else EpochOrder(count, seed)
        self._end = None if epochs is None else count * epochs

    def take(self, number: int) -> list[Example]:
        """The next examples; fewer, then none, when the data ends."""
        stop = self.cursor + number if self._end is None else min(self.cursor + number, self._end)
        positions, order = range(self.cursor, stop), self._order
        indices = positions if order is None else [order[position] for position in positions]
        taken = [self._task.example(index, "train") for index in indices]
        self.cursor = stop
        return taken


def held_out_examples(task: Task, number: int) -> list[Example]:
    """The first ``number`` examples of the held-out split, or all if there are fewer."""
    split: Split = "held_out"
    count = task.num_examples(split)
    return [task.example(index, split) for index in range(number if count is None else min(number, count))]
