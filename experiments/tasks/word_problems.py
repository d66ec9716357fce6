"""Word problems of grade school: a short story with two to four steps of arithmetic, answered by a number.

The numbers of a story, in their order, decide its split: no held-out problem repeats the numbers of a training problem, with
whatever names and things.
"""

import random
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

from experiments.tasks.extraction import extract_answer
from experiments.tasks.numbers import same_number
from experiments.tasks.protocol import SPLITS, Example, SizedTask, Split, check_index, check_split, split_of

NUM_EXAMPLES: dict[Split, int] = {"train": 8192, "held_out": 1024}
EXTRACT = ("boxed", "answer_is", "last_number")
"""Where an answer is looked for."""
LARGEST = 400
"""No quantity of a story is larger."""

NAMES = (
    "Ada", "Ben", "Carla", "David", "Emma", "Felix", "Grace", "Hugo", "Iris", "Jonas", "Kira", "Leo", "Maria", "Nina",
    "Omar", "Paul", "Rosa", "Sam", "Tara", "Victor",
)  # fmt: skip
THINGS = (
    "apples", "books", "buttons", "candles", "coins", "cookies", "eggs", "flowers", "marbles", "muffins", "oranges",
    "pencils", "shells", "stamps", "stickers", "tomatoes",
)  # fmt: skip
HOLDERS = ("bags", "baskets", "boxes", "jars", "trays")
TIMES = {2: "twice", 3: "three times", 4: "four times"}


@dataclass
class Story:
    """A story as it is told: sentences, their numbers and the calculation of each step so far, what the hero has now, and
    the newest turn, which is not told twice in a row."""

    draw: random.Random
    sentences: list[str] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    work: list[str] = field(default_factory=list)
    amount: int = 0
    last: "Turn | None" = None

    def __post_init__(self) -> None:
        self.hero, self.friend = self.draw.sample(NAMES, 2)
        self.things = self.draw.choice(THINGS)

    def tell(self, sentence: str, *numbers: int) -> None:
        self.sentences.append(sentence)
        self.numbers.extend(numbers)

    def step(self, sign: str, number: int) -> None:
        before = self.amount
        self.amount = {"+": before + number, "-": before - number, "*": before * number, "/": before // number}[sign]
        self.work.append(f"{before} {sign} {number} = {self.amount}")


@dataclass(frozen=True)
class WordProblems(SizedTask):
    """Problems of two to `size` steps, all equally likely; of one step where `size` is 1.

    The answer of an example is worked: the calculations, then "The answer is" and the number. A completion is right when the
    number that `EXTRACT` finds in it is the right one. There are `NUM_EXAMPLES` of each split; another seed gives others.

    Example:
        >>> example = WordProblems(2).example(0, "train")
        >>> print(example.prompt)
        Grace has 2 baskets with 3 shells each. Hugo has 37 shells. How many shells do Grace and Hugo have in all?
        >>> print(example.answer)
        2 * 3 = 6. 6 + 37 = 43. The answer is 43.
    """

    size: int = 4

    family: ClassVar[str] = "word_problems"
    alphabet: ClassVar[str] = "ABCDEFGHIJKLMNOPRSTVabcdefghijklmnopqrstuvwxyz0123456789 .,?$+-*/="
    max_size: ClassVar[int] = 4

    @property
    def max_prompt_tokens(self) -> int:
        return self._longest[0]

    @property
    def max_answer_tokens(self) -> int:
        return self._longest[1]

    @cached_property
    def _longest(self) -> tuple[int, int]:
        examples = [self.example(index, split) for split in SPLITS for index in range(NUM_EXAMPLES[split])]
        return max(len(each.prompt) for each in examples), max(len(each.answer) for each in examples)

    @cached_property
    def _drawn(self) -> dict[tuple[Split, int], Example]:
        return {}

    def example(self, index: int, split: Split) -> Example:
        check_index(self, index, split)
        # All of them are drawn at the start of a run, for their lengths.
        if (split, index) not in self._drawn:
            self._drawn[split, index] = super().example(index, split)
        return self._drawn[split, index]

    def num_examples(self, split: Split) -> int:
        check_split(split)
        return NUM_EXAMPLES[split]

    def belongs_to(self, example: Example) -> Split:
        """Returns the split that the hash of the numbers says, which are the example's source."""
        return split_of(self.family, " ".join(map(str, example.source)))

    def candidate(self, generator: random.Random) -> Example:
        story = Story(generator)
        steps = generator.randint(min(2, self.size), self.size)
        if steps > 1 and generator.random() < 0.5:
            _begin_with_product(story)
        else:
            _begin(story)
        ending = generator.choice(ENDINGS)
        while len(story.work) < steps - 1:
            _turn(story)
        ending(story)
        return Example(
            " ".join(story.sentences), f"{'. '.join(story.work)}. The answer is {story.amount}.", tuple(story.numbers)
        )

    def verify(self, example: Example, completion: str) -> float:
        """1.0 when the number that `EXTRACT` finds is that of the worked answer."""
        answer = extract_answer(completion, EXTRACT)
        wanted = extract_answer(example.answer, ("answer_is",))
        return float(answer is not None and same_number(answer, wanted))


def _begin(story: Story) -> None:
    story.amount = story.draw.randint(6, 60)
    story.tell(f"{story.hero} has {story.amount} {story.things}.", story.amount)


def _begin_with_product(story: Story) -> None:
    holders, count, each = story.draw.choice(HOLDERS), story.draw.randint(2, 9), story.draw.randint(3, 12)
    story.amount = count
    story.tell(f"{story.hero} has {count} {holders} with {each} {story.things} each.", count, each)
    story.step("*", each)


@dataclass(frozen=True)
class Turn:
    """Something that happens in a story: one step, with a sentence about it."""

    sign: str
    sentence: str

    def is_possible(self, amount: int) -> bool:
        if self.sign == "-":
            return amount >= 4
        return amount <= (LARGEST // 4 if self.sign == "*" else LARGEST - 40)

    def number(self, story: Story) -> int:
        if self.sign == "*":
            return story.draw.choice(list(TIMES))
        return story.draw.randint(2, 40 if self.sign == "+" else min(40, story.amount - 2))


TURNS = (
    Turn("+", "{hero} buys {number} more."),
    Turn("+", "Then {friend} gives {hero} {number} {things}."),
    Turn("-", "{hero} gives {number} of the {things} to {friend}."),
    Turn("-", "On the way home {hero} loses {number} of them."),
    Turn("*", "A week later {hero} has {times} as many {things}."),
)


def _turn(story: Story) -> None:
    possible = [turn for turn in TURNS if turn.is_possible(story.amount) and turn is not story.last]
    story.last = story.draw.choice(possible)
    number = story.last.number(story)
    words = {"hero": story.hero, "friend": story.friend, "things": story.things, "times": TIMES.get(number)}
    story.tell(story.last.sentence.format(number=number, **words), number)
    story.step(story.last.sign, number)


def _how_many(story: Story) -> None:
    _turn(story)
    story.tell(f"How many {story.things} does {story.hero} have now?")


def _in_all(story: Story) -> None:
    number = story.draw.randint(5, 60)
    story.tell(f"{story.friend} has {number} {story.things}.", number)
    story.tell(f"How many {story.things} do {story.hero} and {story.friend} have in all?")
    story.step("+", number)


def _shares(story: Story) -> None:
    divisors = [number for number in range(2, 11) if story.amount % number == 0 and story.amount > number]
    if not divisors:
        return _how_many(story)
    number = story.draw.choice(divisors)
    story.tell(f"{story.hero} shares the {story.things} equally among {number} children.", number)
    story.tell(f"How many {story.things} does each child get?")
    story.step("/", number)


def _sells(story: Story) -> None:
    number = story.draw.randint(2, 9)
    story.tell(f"{story.hero} sells all of the {story.things} for ${number} each.", number)
    story.tell(f"How many dollars does {story.hero} get?")
    story.step("*", number)


ENDINGS = (_how_many, _in_all, _shares, _sells)
