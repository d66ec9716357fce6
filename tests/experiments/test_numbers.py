"""Numbers in model text: a table of cases, exact comparison, and fuzzed text that neither raises nor takes long."""

import sys
import time
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.tasks.extraction import RULES, extract_answer
from experiments.tasks.numbers import last_number_text, numbers_in, only_number, same_number

NUMBERS = {
    "": "", "none here": "", "42": "42", "007": "7", "-5": "-5", "+5": "5", "\N{MINUS SIGN}5": "-5", "5-3": "5 3",
    "5 - 3": "5 3", "(5)-3": "5 3", "=-3": "-3", "10\N{EN DASH}12": "10 12", "1,234": "1234",
    "1,234,567.25": "4938269/4", "1,23": "1 23", "1,2345": "1 2345", "12,345,67": "12345 67", "1 000": "1 0",
    "3.50": "7/2", ".5": "1/2", "5.": "5", "It is 5. Or 6.": "5 6", "3.4.5": "", "1.2e3": "1200", "5E-1": "1/2",
    "1e500": "", "1e-500": "", "1e-3/2": "",
    "3/4": "3/4", "-3 / 4": "-3/4", "1 1/2": "3/2", "-1 1/2": "-3/2", "1/2/2020": "", "1/0": "None",
    r"\frac{3}{4}": "3/4", r"-\dfrac{3}{4}": "-3/4", r"\frac{3}{0}": "None", "1,000/10": "100", "$5": "5",
    "-$5.25": "-21/4", "$-5": "-5", "US$5": "5", "5 €": "5", "50%": "50", r"50\%": "50", "7.5 %": "15/2", "x2": "",
    "H2O": "", "1_000": "", "10am": "10", "5kg": "5", "3^2": "3 2", "**42**": "42", "42\N{SUPERSCRIPT TWO}": "42",
    "\N{ARABIC-INDIC DIGIT THREE}": "", "9" * 40: "9" * 40, "9" * 41: "",
}  # fmt: skip


@pytest.mark.parametrize("text", NUMBERS)
def test_numbers_of_a_text(text):
    assert " ".join(map(str, numbers_in(text))) == NUMBERS[text]


@pytest.mark.parametrize(
    ("text", "reference", "same"),
    [
        ("42", "42", True), ("42 apples", "42.0", True), ("$1,050", "1050", True), ("6 * 7 = 42", "42", False),
        ("", "42", False), ("-42", "42", False), ("0.1", "1/10", True), ("0.3333333333333333", "1/3", False),
        ("9007199254740993", "9007199254740992", False), ("50%", "50", True), ("50%", "0.5", False),
        ("1/0", "0", False),
    ],
)  # fmt: skip
def test_same_number(text, reference, same):
    assert same_number(text, reference) is same


@pytest.mark.parametrize(
    ("completion", "rule", "answer"),
    [
        (" 42\n", "whole", " 42\n"), ("<answer>1</answer> no: <answer> 2 </answer>.", "tag", "2"),
        ("</answer> 3 <answer>", "tag", None), ("<answer>3", "tag", None), (r"\boxed{1", "boxed", None),
        (r"so \boxed{1} or \boxed{\frac{3}{4}}.", "boxed", r"\frac{3}{4}"),
        (r"\boxed{1{,}200\,\text{ apples}}", "boxed", "1,200{ apples}"), ("none", "last_number", None),
        ("The answer is 3. No, the answer is **4.5 apples**. Right?", "answer_is", "4.5 apples"),
        ("Final Answer: 7\nBye 8", "answer_is", "7"), ("Answer:\n 7", "answer_is", "7"), ("The answer is", "answer_is", ""),
        ("answering is 5", "answer_is", None), ("3 + 4 = $7.00 in all", "last_number", "$7.00"),
    ],
)  # fmt: skip
def test_rules_find_answers(completion, rule, answer):
    assert extract_answer(completion, (rule,)) == answer


def test_the_first_rule_that_finds_something_decides():
    text = r"The answer is 5. \boxed{no}"
    assert extract_answer(text, ("tag", "boxed", "answer_is")) == "no"
    assert extract_answer(text, ("tag", "answer_is", "boxed")) == "5"
    assert extract_answer("no", ("tag", "last_number")) is None


@pytest.mark.bad_input
def test_refuses_a_reference_without_exactly_one_number():
    with pytest.raises(ValueError, match="^reference: expected text with exactly one number, got '1 or 2'"):
        same_number("1", "1 or 2")


PIECES = ["1", "23", "456", *",./ -$%e\\{}\n:x_()", "frac", "boxed", "<answer>", "</answer>", "answer", " is "]
PIECES += ["\N{MINUS SIGN}", "\N{ARABIC-INDIC DIGIT THREE}", "\ud800"]
ANY_CHARACTER = st.integers(0, sys.maxunicode).map(chr)


@given(st.lists(st.one_of(st.sampled_from(PIECES), ANY_CHARACTER), max_size=30).map("".join))
def test_any_text_is_read_without_an_exception(text):
    for value in numbers_in(text):
        assert value is None or isinstance(value, Fraction)
    last = last_number_text(text)
    # The last number alone is still one number, so a verdict about it is about what was found.
    assert last is None or (last in text and len(numbers_in(last)) == 1)
    for rule in RULES:
        answer = extract_answer(text, (rule,))
        assert answer is None or same_number(answer, "1") in (True, False)


@given(st.integers(-(10**12), 10**12), st.integers(1, 10**6), st.integers(0, 6))
def test_numbers_come_back(numerator, denominator, places):
    assert only_number(f"it is {numerator:,} then") == numerator
    assert only_number(f"{numerator}/{denominator}") == Fraction(numerator, denominator)
    decimal = f"{Decimal(numerator).scaleb(-places):,.{places}f}"
    assert only_number(f"${decimal}!") == Fraction(numerator, 10**places)


REPEATED = ["9", "1,", "1/", "1 ", "-", "1.1", "\\frac{1}{", "1,111", " ", "answer is ", "\\boxed{", "<answer>"]
REPEATED += ["Answer:\n", "1 1/"]


def test_time_grows_as_the_length():
    """A quadratic search would take 64 times as long for 8 times the text: minutes for some of these."""
    started = time.process_time()
    for piece in REPEATED:
        text = piece * (100_000 // len(piece))
        for rule in RULES:
            extract_answer(text, (rule,))
    assert time.process_time() - started < 10.0, "0.6 s on an idle machine"
