"""What a task is, and how its prompts are divided into train and held-out.

The split is a property of the prompt: a hash of its text decides. No prompt can therefore be in both splits, whatever
the seed, the index or the size of the run, and nobody has to keep lists apart.
"""

import hashlib
import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, runtime_checkable

from jaxlogp.errors import describe, require

Split = Literal["train", "held_out"]

SPLITS: tuple[Split, ...] = ("train", "held_out")
HELD_OUT_ONE_IN = 10
MAX_ATTEMPTS = 1000


class Message(NamedTuple):
    """One turn of a conversation."""

    role: str
    content: str


Prompt = str | tuple[Message, ...]
"""What the model reads: a text, or a conversation, which only a model with a chat template can read."""


@dataclass(frozen=True)
class Example:
    """One prompt and its reference answer.

    Args:
        prompt: what the model reads.
        answer: what it should write, without an end marker.
        source: what the task, or a reward, needs to score other answers, or None.
    """

    prompt: Prompt
    answer: str
    source: Any | None = None


def prompt_text(prompt: Prompt) -> str:
    """A prompt for readers, and for the hash of its split: a text as it is, of a conversation every turn with its role.

    Example:
        >>> prompt_text((Message("user", "2+2?"), Message("assistant", "4"), Message("user", "times 3?")))
        'user: 2+2?\\n\\nassistant: 4\\n\\nuser: times 3?'
    """
    if isinstance(prompt, str):
        return prompt
    return "\n\n".join(f"{message.role}: {message.content}" for message in prompt)


class TaskFailed(ValueError):
    """A task that raised, gave no example, or one that the model cannot read: an error in it, which ends the run."""


@runtime_checkable
class Task(Protocol):
    """A source of examples with a reward that a program can check."""

    @property
    def name(self) -> str:
        """The text from which `make_task` makes this task again."""

    @property
    def alphabet(self) -> str | None:
        """Every character that prompts and answers may contain; None when that is any text at all."""

    @property
    def max_prompt_tokens(self) -> int:
        """Length that no prompt exceeds: characters, or UTF-8 bytes where `alphabet` is None."""

    @property
    def max_answer_tokens(self) -> int:
        """Length that no answer exceeds, in the same unit and without an end marker."""

    def num_examples(self, split: Split) -> int | None:
        """Number of examples of the split; None when every index has one (they repeat once the prompts run out)."""

    def example(self, index: int, split: Split) -> Example:
        """The example at `index`: the same one on every call and in every process.

        Raises:
            ValueError: the index is negative or not an integer, or the split is unknown or has no such example.
        """

    def verify(self, example: Example, completion: str) -> float:
        """The task's verdict: 1.0 when the completion answers the example, else 0.0. Held-out scores are means of it."""


MEMBERS = ("name", "alphabet", "max_prompt_tokens", "max_answer_tokens", "num_examples", "example", "verify")
"""What every task has."""


def data_digest(task: Task) -> str | None:
    """sha256 of a task's data, where it has some that can change: its attribute ``digest``; else None."""
    return getattr(task, "digest", None)


def exact_answers(task: Task) -> bool:
    """Whether no completion is right but the answer's own text: a task's attribute ``exact``, False where it has none."""
    return getattr(task, "exact", False)


def split_of(family: str, prompt: str) -> Split:
    """The split that a prompt belongs to, from the first 8 bytes of a SHA-256; about one in ten is held out.

    The family is without a size, so that a prompt held out at one size is held out at every size.

    Example:
        >>> split_of("addition", "37+48=")
        'train'
    """
    digest = hashlib.sha256(f"{family}\n{prompt}".encode()).digest()
    return "held_out" if int.from_bytes(digest[:8], "big") % HELD_OUT_ONE_IN == 0 else "train"


def check_task(task: Task, whose: str) -> None:
    """Compares sizes and first examples of a task with what `Task` says.

    Raises:
        ValueError: if one of them is something else, or the task raises; `whose` names the task.
    """
    try:
        sizes = {name: getattr(task, name) for name in ("max_prompt_tokens", "max_answer_tokens")}
        counts = {split: task.num_examples(split) for split in SPLITS}
        require(isinstance(task.name, str), whose, "a name that is a text", describe(task.name))
        for name, size in sizes.items():
            require(_is_number_from(0, size), whose, f"{name} to be an integer of at least 0", describe(size))
        for split, count in counts.items():
            is_count = count is None or _is_number_from(1, count)
            require(
                is_count, whose, f"num_examples({split!r}) to be an integer of at least 1, or None", describe(count)
            )
            check_example(task.example(0, split), f"{whose}, example(0, {split!r})")
    except ValueError:
        raise
    except Exception as error:
        raise ValueError(f"{whose}: expected sizes and examples, got {type(error).__name__}: {error}") from error


def check_example(example: Any, whose: str) -> None:
    """Raises ValueError unless a task has given an example."""
    require(isinstance(example, Example), whose, "an experiments.tasks.Example", describe(example))
    prompt = example.prompt
    is_conversation = (
        isinstance(prompt, tuple) and len(prompt) > 0 and all(isinstance(each, Message) for each in prompt)
    )
    require(
        isinstance(prompt, str) or is_conversation, whose, "a prompt of text, or a tuple of Message", describe(prompt)
    )
    require(isinstance(example.answer, str), whose, "an answer that is a text", describe(example.answer))


def _is_number_from(lowest: int, value: Any) -> bool:
    return not isinstance(value, bool) and hasattr(value, "__index__") and value >= lowest


def check_split(split: str) -> None:
    require(split in SPLITS, "split", f"one of {', '.join(SPLITS)}", repr(split))


def check_seed(seed: int) -> None:
    require(isinstance(seed, int) and not isinstance(seed, bool), "seed", "an integer", repr(seed))


def check_index(task: Task, index: int, split: Split) -> None:
    """Raises ValueError unless the split exists and has an example at the index."""
    count = task.num_examples(split)
    is_index = not isinstance(index, bool) and hasattr(index, "__index__") and index >= 0
    require(is_index, "index", "an integer of at least 0", repr(index))
    require(count is None or index < count, "index", f"less than {count} ({split} of {task.name})", index)


def draw_example(
    task: Task,
    seed: int,
    index: int,
    split: Split,
    candidate: Callable[[random.Random], Example | None],
    belongs_to: Callable[[Example], Split],
) -> Example:
    """Draws candidates until one belongs to the split, passing over None; ValueError after `MAX_ATTEMPTS` attempts.

    Every attempt has its own generator, seeded by the text (name, seed, split, index, attempt), so that an example
    depends on nothing that was drawn before it.
    """
    check_index(task, index, split)
    for attempt in range(MAX_ATTEMPTS):
        example = candidate(random.Random(f"{task.name} {seed} {split} {int(index)} {attempt}"))
        if example is not None and belongs_to(example) == split:
            return example
    raise ValueError(
        f"task {task.name!r}: expected a {split} prompt among {MAX_ATTEMPTS} draws, got none; "
        "it has too few different prompts, choose a larger task"
    )


@dataclass(frozen=True)
class SizedTask(ABC):
    """A task that draws its prompts from a random generator, with one number that says how hard they are.

    What the size counts, from 1 to `max_size`, is up to the task. Another seed gives other examples, of the same splits.
    """

    size: int
    seed: int = 0

    family: ClassVar[str]
    alphabet: ClassVar[str]
    max_size: ClassVar[int] = 64

    def __post_init__(self) -> None:
        check_seed(self.seed)
        is_size = isinstance(self.size, int) and not isinstance(self.size, bool) and 1 <= self.size <= self.max_size
        require(is_size, f"{self.family} size", f"an integer from 1 to {self.max_size}", repr(self.size))

    @property
    def name(self) -> str:
        return f"{self.family}:{self.size}"

    @property
    @abstractmethod
    def max_prompt_tokens(self) -> int: ...

    @property
    @abstractmethod
    def max_answer_tokens(self) -> int: ...

    @property
    def exact(self) -> bool:
        return type(self).verify is SizedTask.verify

    @abstractmethod
    def candidate(self, generator: random.Random) -> Example:
        """Draws an example of either split."""

    def belongs_to(self, example: Example) -> Split:
        return split_of(self.family, prompt_text(example.prompt))

    def num_examples(self, split: Split) -> int | None:
        check_split(split)
        return None

    def example(self, index: int, split: Split) -> Example:
        return draw_example(self, self.seed, index, split, self.candidate, self.belongs_to)

    def verify(self, example: Example, completion: str) -> float:
        return float(completion.strip() == example.answer)
