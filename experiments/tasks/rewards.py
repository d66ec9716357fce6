"""Rewards: functions of an example and a completion, several with weights, whose weighted sum a group is compared by.

A function takes (example, completion) and returns a finite number. The completion is a `Completion`: text that also knows
how many tokens it has and whether an end token ended it. `REWARDS` holds those that the command line knows by name, in
addition to "correct", the verdict of the task; a function of your own is module:name there.
"""

import math
import numbers
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
from jaxtyping import Float

from experiments.named import import_named
from experiments.tasks.protocol import Example, Task, prompt_text
from jaxlogp.errors import describe, require

CORRECT = "correct"
_LARGEST = float(np.finfo(np.float32).max)
_THINK_ANSWER = re.compile(
    r"\s*<think>((?:[^<]|<(?!/?think>|/?answer>))*)</think>"
    r"\s*<answer>((?:[^<]|<(?!/?think>|/?answer>))*)</answer>\s*"
)


class RewardNotFinite(ValueError):
    """A reward that is a number, but not one that fp32 can hold; its step is refused."""


class RewardFailed(ValueError):
    """A reward function that raised, or returned no number: an error in it, which ends the run."""


class Completion(str):
    """The text of a completion, its number of tokens, end token included, and whether an end token ended it; else it was
    cut at the longest length."""

    num_tokens: int
    ended: bool

    def __new__(cls, text: str, *, num_tokens: int, ended: bool) -> Self:
        self = super().__new__(cls, text)
        self.num_tokens, self.ended = num_tokens, ended
        return self


Reward = Callable[[Example, Completion], float]
"""Scores a completion of an example, by any finite number."""


Completions = Sequence[Completion] | Mapping[int, Completion]
"""Completions by number."""


class RewardTerm(NamedTuple):
    """One summand of the reward: weight × function."""

    name: str
    function: Reward
    weight: float = 1.0


class Scored(NamedTuple):
    """Rewards of N completions: the weighted sums, and what each of K functions said."""

    rewards: Float[np.ndarray, " N"]
    parts: Float[np.ndarray, "N K"]


@dataclass(frozen=True)
class Rewards:
    """r = Σ_k w_k f_k(example, completion).

    Raises:
        ValueError: no term, a name that occurs twice, or a weight that is not a finite number.

    Example:
        >>> short = RewardTerm("short", lambda example, completion: len(completion) < 3, 0.5)
        >>> rewards = Rewards((RewardTerm("right", lambda example, completion: completion == example.answer), short))
        >>> said = [Completion(text, num_tokens=len(text), ended=True) for text in ("4", "4 or 5")]
        >>> rewards.score([Example("2+2=", "4")] * 2, said).rewards.tolist()
        [1.5, 0.0]
    """

    terms: tuple[RewardTerm, ...]

    def __post_init__(self) -> None:
        require(len(self.terms) > 0, "reward", "at least one function", "none")
        require(
            len(set(self.names)) == len(self.names), "reward", "functions of different names", ", ".join(self.names)
        )
        for term in self.terms:
            require(callable(term.function), "reward", f"a function for {term.name!r}", type(term.function).__name__)
            is_weight = _is_number(term.weight) and _finite(term.weight) is not None
            require(is_weight, "reward", f"a finite weight for {term.name!r}", repr(term.weight))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(term.name for term in self.terms)

    @property
    def weights(self) -> Float[np.ndarray, " K"]:
        return np.array([term.weight for term in self.terms], np.float64)

    def score(self, examples: Sequence[Example], completions: Sequence[Completion]) -> Scored:
        """Scores completions, one for each example.

        Raises:
            RewardFailed: a function raised, or returned no number; names it, the document and what was raised.
            RewardNotFinite: a function returned a number that is not finite, or the sum is not.
        """
        count = len(completions)
        require(len(examples) == count, "examples", f"{count}, one for each completion", len(examples))
        return self.weighted(examples, completions, self.parts(examples, completions, range(count)))

    def parts(self, examples: Sequence[Example], completions: Completions, numbers: Sequence[int]) -> list[list[float]]:
        """Returns what each function says of the completions with these numbers; raises as `score`."""
        return [
            [_call(term, number, examples[number], completions[number]) for term in self.terms] for number in numbers
        ]

    def weighted(
        self, examples: Sequence[Example], completions: Completions, parts: Sequence[Sequence[float]]
    ) -> Scored:
        """Computes rewards from their parts, one row for each completion; raises as `score`."""
        said = np.array(parts, np.float64).reshape(len(parts), len(self.terms))
        rewards = said @ self.weights
        for number, reward in enumerate(rewards.tolist()):
            if _finite(reward) is None:
                document = _described(number, examples[number], completions[number])
                raise RewardNotFinite(f"reward: expected a finite sum for {document}, got {reward}")
        return Scored(rewards.astype(np.float32), said.astype(np.float32))


def rewards_for(task: Task, names: Sequence[str], weights: Sequence[float] | None, options: "RewardOptions") -> Rewards:
    """Rewards by their names, each of weight 1.0 unless `weights` says another; "correct" is the task's verdict, and
    module:name a function of the user's.
    """
    weights = [1.0] * len(names) if weights is None else weights
    require(len(weights) == len(names), "--reward.weights", f"{len(names)} weights, one per function", len(weights))
    for option, functions in (("pattern", {"pattern"}), ("length", {"short", "overlong"}), ("buffer", {"overlong"})):
        expected = f"no value without the reward {' or '.join(sorted(functions))}"
        value = getattr(options, option)
        require(value is None or functions & set(names), f"--reward.{option}", expected, value)
    terms = []
    for name, weight in zip(names, weights, strict=True):
        if name == CORRECT:
            terms.append(RewardTerm(name, task.verify, weight))
        elif name in REWARDS:
            terms.append(RewardTerm(name, REWARDS[name](options), weight))
        else:
            terms.append(RewardTerm(name.partition(":")[2], find_reward(name), weight))
    return Rewards(tuple(terms))


def find_reward(name: str) -> Reward:
    """Returns the function that `--reward.functions` names as module:name; raises ValueError if there is none."""
    known = ", ".join((CORRECT, *REWARDS))
    expected = f"some of {known}, or module:name of a function of an example and a completion"
    found = import_named("--reward.functions", name, expected)
    is_function = callable(found) and not isinstance(found, type)
    require(is_function, "--reward.functions", expected, f"{name!r}, which is {describe(found)}")
    return found


def rewards_of(functions: Reward | Sequence[tuple[Reward, float]] | Rewards) -> Rewards:
    """Returns the rewards of functions, named as in Python; raises ValueError for anything else, or as `Rewards`."""
    if isinstance(functions, Rewards):
        return functions
    pairs: Any = functions if isinstance(functions, list | tuple) else [(functions, 1.0)]
    are_pairs = all(isinstance(each, tuple) and len(each) == 2 and callable(each[0]) for each in pairs)
    require(are_pairs, "reward", "a function, or pairs of a function and its weight", repr(functions))
    return Rewards(tuple(RewardTerm(_name(function), function, weight) for function, weight in pairs))


@dataclass(frozen=True)
class RewardOptions:
    """What functions of `REWARDS` need: "pattern" a regular expression, "short" and "overlong" numbers of tokens."""

    pattern: str | None = None
    length: int | None = None
    buffer: int | None = None


def _pattern(options: RewardOptions) -> Reward:
    expected = "a regular expression for the reward pattern"
    if options.pattern is None:
        raise ValueError(f"--reward.pattern: expected {expected}, got None")
    try:
        compiled = re.compile(options.pattern, re.DOTALL)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"--reward.pattern: expected {expected}, got {options.pattern!r}: {error}") from None
    return lambda example, completion: float(compiled.fullmatch(completion) is not None)


def _short(options: RewardOptions) -> Reward:
    length = options.length
    require(length is not None and length >= 1, "--reward.length", "at least 1 token for the reward short", length)
    return lambda example, completion: min(0.0, 1.0 - completion.num_tokens / length)


def _overlong(options: RewardOptions) -> Reward:
    length, buffer = options.length, options.buffer
    require(length is not None and length >= 1, "--reward.length", "at least 1 token for the reward overlong", length)
    good = buffer is not None and 1 <= buffer <= length
    require(good, "--reward.buffer", f"a number of tokens in [1, {length}] for the reward overlong", buffer)
    return lambda example, completion: 0.0 - min(max((completion.num_tokens - length) / buffer + 1.0, 0.0), 1.0)


REWARDS: dict[str, Callable[[RewardOptions], Reward]] = {
    "tags": lambda options: lambda example, completion: float(_THINK_ANSWER.fullmatch(completion) is not None),
    "pattern": _pattern,
    "ended": lambda options: lambda example, completion: float(completion.ended),
    "short": _short,
    "overlong": _overlong,
}
"""Functions by name: 1.0 where the whole completion is <think>…</think><answer>…</answer>, each tag once; where it matches
--reward.pattern as a whole; where an end token ended it; 1 - tokens / length where it is longer than --reward.length, else
0.0; and `jaxlogp.soft_overlong_punishment` of its tokens with the largest length --reward.length."""


def _name(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__).strip("<>")


def _described(number: int, example: Example, completion: Completion) -> str:
    prompt, text = prompt_text(example.prompt)[:200], str(completion)[:200]
    return f"document {number} (prompt {prompt!r}, completion {text!r})"


def _call(term: RewardTerm, number: int, example: Example, completion: Completion) -> float:
    expected = f"reward {term.name!r}: expected a finite number for {_described(number, example, completion)}"
    try:
        value = term.function(example, completion)
    # Whatever it raises, the reader needs to know for which example.
    except Exception as error:
        raise RewardFailed(f"{expected}, got {type(error).__name__}: {error}") from error
    if not _is_number(value):
        raise RewardFailed(f"{expected}, got {value!r}")
    finite = _finite(value)
    if finite is None:
        raise RewardNotFinite(f"{expected}, got {value!r}")
    return finite


def _is_number(value: Any) -> bool:
    """A real number; a scalar of JAX or NumPy is one, a string, a list, None is none."""
    if isinstance(value, numbers.Real | np.bool_):
        return True
    return getattr(value, "ndim", None) == 0 and getattr(value, "dtype", np.dtype(object)).kind in "biufV"


def _finite(value: Any) -> float | None:
    try:
        number = float(value)
    except (OverflowError, TypeError, ValueError):
        return None
    return number if math.isfinite(number) and abs(number) <= _LARGEST else None
