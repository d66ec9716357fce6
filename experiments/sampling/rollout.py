"""Rollouts: prompts in, groups of sampled, scored completions out, dealt to the data ranks as packed micro-batches."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import grain
import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from experiments.config import RolloutConfig, ScheduleConfig
from experiments.runs.folder import Sample
from experiments.sampling.sampler import make_sampler
from experiments.tasks import Example, Split, Task
from experiments.tasks.tokenizer import Tokenizer
from jaxlogp import Document, MicroBatch, group_advantages, pack_documents
from jaxlogp.errors import require

SHORTEST_ROW = 64
"""Tokens of a packed row that is not given: short documents share rows."""


class Sizes(NamedTuple):
    """Static sizes of prompts (start token included), completions (end token included) and packed rows, in tokens."""

    prompt: int
    completion: int
    row: int


def sizes_for(task: Task, rollout: RolloutConfig, schedule: ScheduleConfig, *, share_rows: bool = True) -> Sizes:
    """Bounds of the task, or those of the options; a document has to fit into a packed row.

    A row that no other document may share is by default no longer than the longest one.

    Raises:
      ValueError: the longest document does not fit into ``schedule.row_length``.
    """
    prompt = 1 + (rollout.max_prompt_tokens or task.max_prompt_tokens)
    completion = rollout.max_new_tokens or task.max_answer_tokens + 1
    longest = prompt + completion
    row = schedule.row_length or (max(longest, SHORTEST_ROW) if share_rows else longest)
    require(longest <= row, "--schedule.row-length", f"at least {longest}, the longest document of this task", row)
    return Sizes(prompt, completion, row)


def encode_prompt(tokenizer: Tokenizer, example: Example, sizes: Sizes) -> list[int]:
    """Start token and prompt.

    Raises:
      ValueError: the prompt is longer than the bound.
    """
    tokens = [tokenizer.bos_id, *tokenizer.encode(example.prompt)]
    expected = f"prompts of at most {sizes.prompt - 1} tokens"
    require(len(tokens) <= sizes.prompt, "--rollout.max-prompt-tokens", expected, f"{len(tokens) - 1}")
    return tokens


class Completions(NamedTuple):
    """Sampled completions of a list of examples, one each."""

    prompts: list[list[int]]
    tokens: list[np.ndarray]
    log_probs: list[np.ndarray]
    texts: list[str]
    rewards: np.ndarray


class Sampler:
    """Completes examples with the current parameters, in batches of one static shape.

    Args:
      graph: graph definition of the decoder.
      task: scores completions.
      tokenizer: text to tokens and back.
      sizes: static sizes of prompts and completions.
      mesh: rows are split over its "data" axis where it divides them.
      temperature: divisor of the logits.
      greedy: take the likeliest token instead of drawing.
      fp32_head: as in the trainer.
    """

    def __init__(
        self,
        graph: nnx.GraphDef,
        task: Task,
        tokenizer: Tokenizer,
        sizes: Sizes,
        mesh: Mesh,
        *,
        temperature: float,
        greedy: bool = False,
        fp32_head: bool = False,
    ) -> None:
        self._task, self._tokenizer, self._sizes, self._mesh = task, tokenizer, sizes, mesh
        self._draw = make_sampler(
            graph,
            max_new_tokens=sizes.completion,
            temperature=temperature,
            greedy=greedy,
            eos_id=tokenizer.eos_id,
            pad_id=tokenizer.pad_id,
            fp32_head=fp32_head,
        )

    def complete(self, params: nnx.State, examples: list[Example], key: jax.Array) -> Completions:
        """Draws one completion for each example and scores it."""
        prompts = [encode_prompt(self._tokenizer, example, self._sizes) for example in examples]
        lengths = np.array([len(prompt) for prompt in prompts], np.int32)
        padded = np.full((len(prompts), self._sizes.prompt), self._tokenizer.pad_id, np.int32)
        for row, prompt in zip(padded, prompts, strict=True):
            row[: len(prompt)] = prompt
        spec = P("data") if len(prompts) % self._mesh.shape["data"] == 0 else P()
        where = NamedSharding(self._mesh, spec)
        samples = self._draw(params, *jax.device_put((padded, lengths), where), key)
        tokens, log_probs, ends = jax.device_get(samples)
        drawn = [row[:end] for row, end in zip(tokens, ends, strict=True)]
        texts = [self._tokenizer.decode(row.tolist()) for row in drawn]
        rewards = [self._task.reward(example, text) for example, text in zip(examples, texts, strict=True)]
        scored = [row[:end] for row, end in zip(log_probs, ends, strict=True)]
        return Completions(prompts, drawn, scored, texts, np.array(rewards, np.float32))


def readable(examples: list[Example], completions: Completions) -> list[Sample]:
    """Records for samples.jsonl."""
    rows = zip(examples, completions.texts, completions.rewards.tolist(), strict=True)
    return [Sample(example.prompt, text, example.answer, reward) for example, text, reward in rows]


class PromptOrder:
    """Training prompts in a seeded order; its whole state is one integer, the number of prompts taken.

    A task with a finite number of examples is shuffled anew in every pass; others are read by index.
    """

    def __init__(self, task: Task, seed: int, epochs: int | None, cursor: int = 0) -> None:
        self._task, self.cursor = task, cursor
        count = task.num_examples("train")
        finite = "a task with a finite number of training prompts, such as jsonl:PATH"
        require(epochs is None or count is not None, "--schedule.epochs", f"None, or {finite}", epochs)
        self._order = None if count is None else grain.MapDataset.range(count).seed(seed).shuffle().repeat(epochs)
        self._end = None if epochs is None else count * epochs

    def take(self, number: int) -> list[Example]:
        """The next examples; fewer, then none, when the data ends."""
        stop = self.cursor + number if self._end is None else min(self.cursor + number, self._end)
        taken = [self._task.example(self._index(position), "train") for position in range(self.cursor, stop)]
        self.cursor = stop
        return taken

    def _index(self, position: int) -> int:
        return position if self._order is None else int(self._order[position])


def held_out_examples(task: Task, number: int) -> list[Example]:
    """The first ``number`` examples of the held-out split, or all there are."""
    split: Split = "held_out"
    count = task.num_examples(split)
    return [task.example(index, split) for index in range(number if count is None else min(number, count))]


def deal(documents: list[Document], ranks: int, block: int = 1) -> list[list[Document]]:
    """The documents of each rank: blocks of consecutive documents, dealt in turn."""
    return [
        [document for position, document in enumerate(documents) if position // block % ranks == rank]
        for rank in range(ranks)
    ]


class RolloutStreams:
    """One endless (or ending) stream of packed micro-batches per data rank, fed by rollouts on demand.

    A rollout is sampled when all streams have run dry; its documents are dealt to the ranks in turn. Documents that a step
    leaves over stay queued for the next one, and belong to the checkpoint.

    Args:
      rollout: makes the documents of the next rollout; an empty list means that the data has ended.
      num_ranks: data ranks.
      rows: rows of a micro-batch.
      row_length: tokens of a row.
      pad_id: padding token.
      block: documents that a rank is dealt at a time.
      share_rows: whether documents may share a row.
    """

    def __init__(
        self,
        rollout: Callable[[], list[Document]],
        num_ranks: int,
        rows: int,
        row_length: int,
        pad_id: int,
        *,
        block: int = 1,
        share_rows: bool = True,
    ) -> None:
        self._rollout, self._block = rollout, block
        self._packing = {"rows": rows, "row_length": row_length, "pad_id": pad_id, "share_rows": share_rows}
        self.queues: list[deque[Document]] = [deque() for _ in range(num_ranks)]
        self.seconds = 0.0
        self._ended = False

    def streams(self) -> list[Iterator[MicroBatch]]:
        """Fresh iterators, one a rank; they share the queues."""
        return [self._stream(rank) for rank in range(len(self.queues))]

    def padding(self) -> MicroBatch:
        """A micro-batch without documents."""
        return self._pack([])[0]

    def queued(self) -> list[list[dict[str, Any]]]:
        """The queues as plain JSON values."""
        return [[_to_json(document) for document in queue] for queue in self.queues]

    def restore(self, queued: list[list[dict[str, Any]]]) -> None:
        """Takes over the queues of a checkpoint; on another number of ranks the documents are dealt anew."""
        documents = [_from_json(values) for queue in queued for values in queue]
        if len(queued) == len(self.queues):
            self.queues = [deque(_from_json(values) for values in queue) for queue in queued]
        else:
            self._deal(documents)

    def _deal(self, documents: list[Document]) -> None:
        for queue, dealt in zip(self.queues, deal(documents, len(self.queues), self._block), strict=True):
            queue.extend(dealt)

    def _pack(self, documents: list[Document]) -> tuple[MicroBatch, tuple[Document, ...]]:
        return pack_documents(documents, **self._packing)

    def _stream(self, rank: int) -> Iterator[MicroBatch]:
        while True:
            # On the first rank's turn only: a rollout in the middle of a round would put more documents into a step on
            # one mesh than on another. The other ranks pass with an empty micro-batch.
            if rank == 0 and not any(self.queues):
                started = time.perf_counter()
                self._deal(self._rollout())
                self.seconds += time.perf_counter() - started
                self._ended = not any(self.queues)
            if self._ended:
                return
            micro_batch, rest = self._pack(list(self.queues[rank]))
            self.queues[rank] = deque(rest)
            yield micro_batch


def documents_from(
    completions: Completions, num_generations: int, scale_rewards: str, model_version: int
) -> tuple[list[Document], float]:
    """Documents with their group advantages, and the share of groups whose rewards are all alike."""
    rewards = completions.rewards.reshape(-1, num_generations)
    groups = group_advantages(rewards, scale_rewards=scale_rewards)
    advantages = np.asarray(groups.advantages).reshape(-1).tolist()
    documents = [
        Document(
            tokens=np.concatenate([np.array(prompt, np.int32), tokens]),
            prompt_length=len(prompt),
            old_log_probs=log_probs,
            advantage=advantage,
            reward=reward,
            model_version=model_version,
        )
        for prompt, tokens, log_probs, advantage, reward in zip(
            completions.prompts,
            completions.tokens,
            completions.log_probs,
            advantages,
            completions.rewards.tolist(),
            strict=True,
        )
    ]
    return documents, float(np.mean(np.asarray(groups.degenerate)))


def _to_json(document: Document) -> dict[str, Any]:
    # A float32 becomes a Python float, and JSON's shortest form of it, without losing a bit.
    values = vars(document)
    return {**values, "tokens": document.tokens.tolist(), "old_log_probs": document.old_log_probs.tolist()}


def _from_json(values: dict[str, Any]) -> Document:
    tokens = np.array(values["tokens"], np.int32)
    return Document(**{**values, "tokens": tokens, "old_log_probs": np.array(values["old_log_probs"], np.float32)})
