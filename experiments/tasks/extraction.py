r"""Where the answer is in a completion: rules by name, tried in the order in which they are given.

- `whole`: all of it.
- `tag`: what stands between the last <answer> and </answer>.
- `boxed`: what stands in the last \boxed{…}, without LaTeX's spaces and text commands.
- `answer_is`: what follows the last "answer is" or "answer:", up to the end of its sentence or line.
- `last_number`: the last number, as `experiments.tasks.numbers` reads them.

The first rule that finds its mark decides, whether its text then is right or wrong. All of them take time in proportion to
the completion.
"""

import re
from collections.abc import Callable, Sequence

from experiments.tasks.numbers import last_number_text

_ANSWER_IS = re.compile(r"\banswer(?: is\b|:| =)", re.IGNORECASE)
_SENTENCE_END = re.compile(r"\n|[.!?](?=\s|$)")
_LATEX_SPACE = re.compile(r"\\[,;:! ]|\\quad|\\(?:text|mathrm|mbox)\b")


def extract_answer(completion: str, rules: Sequence[str]) -> str | None:
    """Returns the answer in a completion, or None; the rules are known ones.

    Example:
        >>> extract_answer("6 * 7 = 42. The answer is 42 apples.", ("boxed", "answer_is"))
        '42 apples'
    """
    return next((found for rule in rules if (found := RULES[rule](completion)) is not None), None)


def _tag(completion: str) -> str | None:
    end = completion.rfind("</answer>")
    start = completion.rfind("<answer>", 0, max(end, 0))
    return None if end < 0 or start < 0 else completion[start + len("<answer>") : end].strip()


def _boxed(completion: str) -> str | None:
    start = completion.rfind(r"\boxed{")
    if start < 0:
        return None
    start += len(r"\boxed{")
    depth = 1
    for position in range(start, len(completion)):
        depth += {"{": 1, "}": -1}.get(completion[position], 0)
        if depth == 0:
            return _LATEX_SPACE.sub("", completion[start:position].replace("{,}", ",")).strip()
    return None


def _answer_is(completion: str) -> str | None:
    last = None
    for match in _ANSWER_IS.finditer(completion):
        last = match
    if last is None:
        return None
    rest = completion[last.end() :].lstrip(" \t\r\n:=*")
    end = _SENTENCE_END.search(rest)
    return rest[: end.start() if end else None].strip(" \t\r*")


RULES: dict[str, Callable[[str], str | None]] = {
    "whole": lambda completion: completion,
    "tag": _tag,
    "boxed": _boxed,
    "answer_is": _answer_is,
    "last_number": last_number_text,
}
"""Rules by name."""
