r"""Numbers in text, read by a grammar and compared as exact rationals. Nothing that a model wrote is ever evaluated.

A number is, with an optional sign and a currency sign before it,

- digits, with or without commas between groups of three: 1234, 1,234;
- a decimal: 3.50, .5, 1,234.5, each also with an exponent of at most two digits: 1.2e3;
- a fraction of whole numbers, alone or after a whole one: 3/4, 3 / 4, 1 1/2, \frac{3}{4};

and an optional percent sign after it, which changes nothing: 50% is 50. A minus is a sign where no letter, digit or closing
bracket comes before it: "5-3" holds 5 and 3. Other commas separate numbers: "1,2" holds 1 and 2. What stands inside of a
word (x2, H2O) or of a longer chain (3.4.5, 1/2/2020) is no number, nor are more than 40 digits in a row; a fraction over
zero is a number without a value.

Every repetition of the grammar is bounded and begins at one place only, so the time grows as the length of the text.
"""

import re
from fractions import Fraction

from jaxlogp.errors import require

_WHOLE = r"(?:\d{1,3}(?:,\d{3}){1,12}|\d{1,40})"
_NUMBER = re.compile(
    rf"""
    (?<!\w)(?<!\d[./])(?<!\d[eE][-+])
    (?P<sign>(?<![)\]}}])[-+])? (?:[$€£¥](?P<inner_sign>[-+])?)?
    (?:
        \\[dt]?frac\{{(?P<over>\d{{1,40}})\}}\{{(?P<under>\d{{1,40}})\}}
      | (?:(?P<ones>\d{{1,9}})[ ])?(?P<numerator>{_WHOLE})[ ]?/[ ]?(?P<denominator>{_WHOLE})(?!\.\d)
      | (?P<decimal>{_WHOLE}(?:\.\d{{1,40}})?|\.\d{{1,40}})(?P<exponent>[eE][-+]?\d{{1,2}})?
    )
    (?![\d_]|[./]\d|[eE][-+]?\d)
    (?:[ ]?\\?%)?
    """,
    re.ASCII | re.VERBOSE,
)
_MINUS = str.maketrans({"\N{MINUS SIGN}": "-", "\N{FULLWIDTH HYPHEN-MINUS}": "-"})


def numbers_in(text: str) -> list[Fraction | None]:
    """The values of all numbers of a text, in order; None for a fraction with a denominator of zero.

    Example:
        >>> [str(value) for value in numbers_in("7 boxes of 1,200 make -$8,400.50, or 3/4 of it")]
        ['7', '1200', '-16801/2', '3/4']
    """
    return [_value(match) for match in _NUMBER.finditer(text.translate(_MINUS))]


def last_number_text(text: str) -> str | None:
    """The last number of a text as it is written there, or None.

    Example:
        >>> last_number_text("12 + 30 makes $42.00 in all.")
        '$42.00'
    """
    found = None
    # One character is replaced by one, so the places are those of the text as it was.
    for match in _NUMBER.finditer(text.translate(_MINUS)):
        found = match
    return None if found is None else text[found.start() : found.end()]


def same_number(text: str, reference: str) -> bool:
    """Whether the only number of a text, such as "42 apples", is that of the reference, which has exactly one.

    A text with no number, or with several, is not right.

    Example:
        >>> same_number("$1,050.00", "1050"), same_number("1/3", "0.33")
        (True, False)
    """
    wanted = only_number(reference)
    require(wanted is not None, "reference", "text with exactly one number", repr(reference[:80]))
    return only_number(text) == wanted


def only_number(text: str) -> Fraction | None:
    """The value of the only number of a text; None where there is none, several, or one that has no value."""
    values = numbers_in(text)
    return values[0] if len(values) == 1 else None


def _value(match: re.Match[str]) -> Fraction | None:
    part = match.groupdict()
    if part["decimal"] is not None:
        value = Fraction(_digits(part["decimal"]) + (part["exponent"] or ""))
    else:
        over, under = part["over"] or part["numerator"], part["under"] or part["denominator"]
        denominator = int(_digits(under))
        if denominator == 0:
            return None
        value = int(part["ones"] or 0) + Fraction(int(_digits(over)), denominator)
    return -value if "-" in (part["sign"], part["inner_sign"]) else value


def _digits(text: str) -> str:
    return text.replace(",", "")
