"""Whether completions have room for the answers, said before the run: it would else train to its end for nothing."""

from experiments.config import Config
from experiments.experience.prompts import answer_length
from experiments.tasks import Example, Rewards, Task
from experiments.tasks.protocol import right_only_as_written
from experiments.tasks.rewards import CORRECT
from experiments.tasks.tokenizer import Tokenizer
from jaxlogp.errors import require

MANY = 2000
"""Training examples that are looked at, where they can be counted; of the others, those that are held out."""


def warn_of_long_answers(
    config: Config, task: Task, held_out: list[Example], tokenizer: Tokenizer, rewards: Rewards | None
) -> str | None:
    """A warning of answers that are longer than completions may be, end token included; None where all fit.

    The bound that a task gives has room for its own answers. Examples without an answer's text say nothing.

    Raises:
        ValueError: no completion can be right, and nothing else is rewarded.
    """
    room = config.rollout.max_new_tokens
    if room is None:
        return None
    count = task.num_examples("train") or 0
    examples = [*held_out, *(task.example(index, "train") for index in range(min(count, MANY)))]
    found = [answer_length(tokenizer, each) for each in examples if each.answer.strip()]
    lengths = [length for length in found if length is not None]
    long = sum(length >= room for length in lengths)
    if not long:
        return None
    if right_only_as_written(task) and rewards is None and config.reward.functions == (CORRECT,):
        # A completion without an end token is right too, but for this option no token of it is trained on.
        least = min(lengths) + config.rollout.mask_truncated
        require(least <= room, "--rollout.max-new-tokens", f"at least {least}, for the shortest answer", room)
    return (
        f"--rollout.max-new-tokens {room}: too few for {long} of {len(lengths)} answers; the longest needs "
        f"{max(lengths) + 1}, end token included"
    )
