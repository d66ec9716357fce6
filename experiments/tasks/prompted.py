"""A task asked in other words: a system message and an instruction around its prompts, and rules for where answers are.

The task keeps its examples, its split and its verdict; so a data set whose answers are bare numbers can be put to a chat
model, which writes sentences around them.
"""

from dataclasses import dataclass, replace

from experiments.tasks.extraction import RULES, extract_answer
from experiments.tasks.protocol import Example, Message, Prompt, Split, Task, data_digest, exact_answers
from jaxlogp.errors import require

SEPARATOR = "\n\n"


@dataclass(frozen=True)
class PromptedTask:
    """A task with other prompts, whose verdict is about the answer within a completion.

    A `system` message comes before every conversation; it turns a text into one. The `instruction` is appended to every
    prompt after an empty line, or to the user's last message. `extract` names rules of `experiments.tasks.extraction`.
    """

    task: Task
    system: str | None = None
    instruction: str | None = None
    extract: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for rule in self.extract:
            require(rule in RULES, "extract", f"one of {', '.join(RULES)}", repr(rule))

    @property
    def name(self) -> str:
        return self.task.name

    @property
    def alphabet(self) -> str | None:
        # What is added to its prompts does not change the model's vocabulary.
        return self.task.alphabet

    @property
    def max_prompt_tokens(self) -> int:
        system = 0 if self.system is None else len(self.system.encode())
        instruction = 0 if self.instruction is None else len((SEPARATOR + self.instruction).encode())
        return self.task.max_prompt_tokens + system + instruction

    @property
    def max_answer_tokens(self) -> int:
        return self.task.max_answer_tokens

    @property
    def digest(self) -> str | None:
        return data_digest(self.task)

    @property
    def exact(self) -> bool:
        # Where an answer is looked for in a completion, more stands around it.
        return exact_answers(self.task)

    def num_examples(self, split: Split) -> int | None:
        return self.task.num_examples(split)

    def example(self, index: int, split: Split) -> Example:
        """The task's, asked in these words; a conversation must have no system message yet, and end with its user."""
        example = self.task.example(index, split)
        return replace(example, prompt=self._prompt(example.prompt))

    def verify(self, example: Example, completion: str) -> float:
        """The task's verdict about the answer that the rules find; 0.0 where they find none."""
        answer = extract_answer(completion, self.extract) if self.extract else completion
        return 0.0 if answer is None else self.task.verify(example, answer)

    def _prompt(self, prompt: Prompt) -> Prompt:
        if self.instruction is not None:
            prompt = _instructed(prompt, self.instruction)
        if self.system is None:
            return prompt
        messages = (Message("user", prompt),) if isinstance(prompt, str) else prompt
        if messages[0].role == "system":
            raise ValueError("--data.system: expected prompts without a system message, got one that has its own")
        return (Message("system", self.system), *messages)


def _instructed(prompt: Prompt, instruction: str) -> Prompt:
    if isinstance(prompt, str):
        return prompt + SEPARATOR + instruction
    *before, last = prompt
    if last.role != "user":
        raise ValueError(f"--data.instruction: expected conversations that end with their user, got {last.role!r}")
    return (*before, Message("user", last.content + SEPARATOR + instruction))
