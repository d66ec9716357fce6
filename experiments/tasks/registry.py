"""Tasks by name: the text of a command line option becomes a task."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.named import call_named, import_named, is_module_name
from experiments.tasks.arithmetic import Addition, Comparison
from experiments.tasks.jsonl import JsonlFormat, load_jsonl
from experiments.tasks.prompted import PromptedTask
from experiments.tasks.protocol import SPLITS, Example, SizedTask, Split, Task, TaskFailed, check_example, check_task
from experiments.tasks.reasoning_gym import ReasoningGymTask
from experiments.tasks.word_problems import WordProblems
from jaxlogp.errors import describe, require

SIZED_TASKS: dict[str, type[SizedTask]] = {task.family: task for task in (Addition, Comparison, WordProblems)}
DEFAULT_FORMAT = JsonlFormat()
TASK_FORMS = (
    *(f"{family}[:SIZE]" for family in SIZED_TASKS),
    "reasoning_gym:NAME",
    "jsonl:PATH",
    "module:name of your own",
)


@dataclass(frozen=True)
class NamedTask(PromptedTask):
    """A user's task under the text that names it, module:name, and what it found there: the task, or what made it.

    One from Python has its own name, and is found nowhere.
    """

    text: str = ""
    found: Any = None

    @property
    def name(self) -> str:
        return self.text

    def example(self, index: int, split: Split) -> Example:
        """The task's; TaskFailed if it raised, or gave none."""
        try:
            example = self.task.example(index, split)
            check_example(example, "example")
        except Exception as error:
            at = f"task {self.name!r}, example({index}, {split!r})"
            raise TaskFailed(f"{at}: {type(error).__name__}: {error}") from error
        return example


def make_task(spec: str, *, seed: int = 0, form: JsonlFormat = DEFAULT_FORMAT) -> Task:
    """Makes the task that a text names, one of `TASK_FORMS`: a task of our own with its size if another than its default is
    wanted ("addition:3"), a data set of reasoning-gym ("reasoning_gym:chain_sum"), a file ("jsonl:questions.jsonl"), or
    an object of a module ("package.module:name"): a `Task`, or a class or function without arguments that makes one.

    The seed says which examples are drawn, in which order. It moves no prompt from one split to the other, and has no
    effect on a file, whose order is that of its lines. There is an example in either split.

    Raises:
        ValueError: the text names no task, its argument is bad, or the task cannot be made.

    Example:
        >>> make_task("addition:3").name
        'addition:3'
    """
    family, colon, argument = spec.partition(":")
    if family in SIZED_TASKS:
        kind = SIZED_TASKS[family]
        options = {"size": _size(spec, argument, kind.max_size)} if colon else {}
        task = kind(seed=seed, **options)
    elif family == "reasoning_gym" and argument:
        task = ReasoningGymTask(argument, seed=seed)
    elif family == "jsonl" and argument:
        task = load_jsonl(argument, form)
    else:
        task = _named_task(spec)
    if family != "jsonl":
        form.require_default()
    for split in SPLITS:
        task.example(0, split)
    return task


def names_user_task(spec: str) -> bool:
    """Returns True if a text is module:name, and no family is called like the module."""
    return is_module_name(spec) and spec.partition(":")[0] not in (*SIZED_TASKS, "reasoning_gym", "jsonl")


def full_name(spec: str) -> str:
    """The name of the task that a text names, with its size, or with the absolute path of a file, which is not read.

    Example:
        >>> full_name("addition")
        'addition:2'
    """
    family, _, argument = spec.partition(":")
    if family == "jsonl":
        return f"jsonl:{Path(argument).resolve()}"
    return make_task(spec).name if family in SIZED_TASKS else spec


def _named_task(spec: str) -> NamedTask:
    expected = f"one of {', '.join(TASK_FORMS)}"
    found = import_named("--task", spec, expected)
    task = call_named("--task", spec, expected, found) if callable(found) and not _is_task(found) else found
    require(_is_task(task), "--task", expected, f"{spec!r}, which is no task but {describe(task)}")
    check_task(task, f"task {spec!r}")
    return NamedTask(task, text=spec, found=found)


def _is_task(value: Any) -> bool:
    # A class has the attributes of its objects.
    return isinstance(value, Task) and not isinstance(value, type)


def _size(spec: str, argument: str, largest: int) -> int:
    if not re.fullmatch("0*[0-9]{1,9}", argument, re.ASCII) or not 1 <= int(argument) <= largest:
        raise ValueError(f"task {spec!r}: expected a size from 1 to {largest} after the colon, got {argument!r}")
    return int(argument)
