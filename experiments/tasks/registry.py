"""Tasks by name: the text of a command line option becomes a task."""

import re
from pathlib import Path

from experiments.tasks.addition import Addition
from experiments.tasks.comparison import Comparison
from experiments.tasks.jsonl import DEFAULT_FORMAT, JsonlFormat, load_jsonl
from experiments.tasks.letter_counting import LetterCounting
from experiments.tasks.protocol import SPLITS, SizedTask, Task
from experiments.tasks.reasoning_gym import ReasoningGymTask
from experiments.tasks.rewriting import Reversal, Sorting
from experiments.tasks.word_problems import WordProblems

SIZED_TASKS: dict[str, type[SizedTask]] = {
    task.family: task for task in (Addition, Comparison, LetterCounting, Reversal, Sorting, WordProblems)
}
TASK_FORMS = (*(f"{family}[:SIZE]" for family in SIZED_TASKS), "reasoning_gym:NAME", "jsonl:PATH")


def make_task(spec: str, *, seed: int = 0, form: JsonlFormat = DEFAULT_FORMAT) -> Task:
    """Makes the task that a text names, one of `TASK_FORMS`: a task of our own with its size if another than its default is
    wanted ("addition:3"), a data set of reasoning-gym ("reasoning_gym:chain_sum"), or a file ("jsonl:questions.jsonl").

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
        made = SIZED_TASKS[family]
        task = made(seed=seed, **({"size": _size(spec, argument, made.max_size)} if colon else {}))
    elif family == "reasoning_gym" and argument:
        task = ReasoningGymTask(argument, seed=seed)
    elif family == "jsonl" and argument:
        task = load_jsonl(argument, form)
    else:
        raise ValueError(f"task: expected one of {', '.join(TASK_FORMS)}; got {spec!r}")
    if family != "jsonl":
        form.require_default()
    for split in SPLITS:
        task.example(0, split)
    return task


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


def _size(spec: str, argument: str, largest: int) -> int:
    if not re.fullmatch("0*[0-9]{1,9}", argument, re.ASCII) or not 1 <= int(argument) <= largest:
        raise ValueError(f"task {spec!r}: expected a size from 1 to {largest} after the colon, got {argument!r}")
    return int(argument)
