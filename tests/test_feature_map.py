"""Every row of docs/feature_map.md names a test that exists or says "missing", and only names of this project that exist.

The tests of the repository are found in the syntax trees of their files: nothing is imported or run.
"""

import ast
import functools
import inspect
import re
from pathlib import Path
from typing import NamedTuple

import pytest

import experiments
import jaxlogp
from experiments.grpo import GrpoConfig
from experiments.options import flat_fields, option_name
from jaxlogp.policy.metrics import METRICS

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "feature_map.md").read_text(encoding="utf-8")
FEATURES, DEVIATIONS = ("feature", "here", "test", "differs"), ("no.", "what differs", "reason")
NAMESPACES = jaxlogp, jaxlogp.losses, jaxlogp.head, jaxlogp.invariance, experiments
# Of Python, in remarks of the second column.
OTHERS = {"ValueError"}
CODE, DEVIATION = re.compile(r"`([^`]+)`"), re.compile(r"\bD\d+\b")


class Row(NamedTuple):
    """The cells of a table of features."""

    feature: str
    here: str
    test: str
    differs: str


def tables(page: str, header: tuple[str, ...]) -> list[list[tuple[str, ...]]]:
    """The rows of every table with these columns."""
    found = []
    for block in page.split("\n\n"):
        rows = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in block.splitlines()]
        if rows[0] == header:
            assert all(len(row) == len(header) for row in rows), block
            found.append(rows[2:])
    return found


def features(page: str) -> list[Row]:
    return [Row(*row) for table in tables(page, FEATURES) for row in table]


@functools.cache
def node_ids(path: str) -> dict[str, bool]:
    """The tests of a file by node id, with True for those with parameters."""
    found = {}

    def walk(body: list[ast.stmt], prefix: str) -> None:
        for each in body:
            if isinstance(each, ast.ClassDef):
                walk(each.body, f"{prefix}{each.name}::")
            elif isinstance(each, ast.FunctionDef) and each.name.startswith("test_"):
                found[prefix + each.name] = any("parametrize" in ast.unparse(mark) for mark in each.decorator_list)

    walk(ast.parse((ROOT / path).read_text(encoding="utf-8")).body, f"{path}::")
    return found


def is_test(node_id: str) -> bool:
    path = node_id.partition("::")[0]
    if not (path.startswith("tests/") and (ROOT / path).is_file()):
        return False
    name, bracket, _ = node_id.partition("[")
    return node_ids(path).get(name, False) if bracket else name in node_ids(path)


@functools.cache
def options() -> frozenset[str]:
    return frozenset(map(option_name, flat_fields(GrpoConfig)))


def resolved(name: str) -> object | None:
    """What a dotted name stands for in one of the namespaces, or None."""
    for namespace in NAMESPACES:
        thing = namespace
        for part in name.split("."):
            thing = getattr(thing, part, None)
        if thing is not None:
            return thing
    return None


def is_ours(code: str) -> bool:
    """Whether there is such an option, metric or name, with such parameters: ``name(one=, other=)``."""
    if code.startswith("--"):
        return code in options()
    call = re.fullmatch(r"([\w.]+)(?:\(([^)]*)\))?", code)
    if call is None:
        return False
    name, arguments = call.groups()
    if arguments is None:
        return name in METRICS or name in OTHERS or resolved(name) is not None
    named, thing = re.findall(r"(\w+)=", arguments), resolved(name)
    return bool(named) and callable(thing) and set(named) <= set(inspect.signature(thing).parameters)


def faults(row: Row) -> list[str]:
    """What is wrong with a row."""
    named, missing = CODE.findall(row.test), row.here.startswith("missing")
    found = [f"no such test: {test}" for test in named if not is_test(test)]
    found += [f"no such name: {code}" for code in CODE.findall(row.here) if not is_ours(code)]
    if not missing and not named:
        found.append('neither a test nor "missing"')
    if not missing and not CODE.search(row.here):
        found.append('neither a name nor "missing"')
    if CODE.sub("", row.test).strip() or DEVIATION.sub("", row.differs).strip():
        found.append("more than tests, or more than numbers of deviations")
    return found


def test_every_row_names_what_exists():
    rows = features(PAGE)
    assert len(rows) > 100 and sum(row.here.startswith("missing") for row in rows) > 10
    wrong = {row.feature: found for row in rows if (found := faults(row))}
    assert wrong == {}


def test_no_feature_is_listed_twice_in_a_table():
    for table in tables(PAGE, FEATURES):
        names = [feature for feature, *_ in table]
        assert len(set(names)) == len(names)


def test_every_deviation_has_a_row_and_a_reason():
    (listed,) = tables(PAGE, DEVIATIONS)
    numbers = [number for number, *_ in listed]
    assert numbers == [f"D{n}" for n in range(1, len(listed) + 1)] and all(reason for *_, reason in listed)
    assert {number for row in features(PAGE) for number in DEVIATION.findall(row.differs)} == set(numbers)


GOOD = Row("f", "`VocabShards.even` `--loss.engine`", "`tests/test_vocab.py::test_explicit_uneven_ranges`", "D1")
CASE = "tests/test_vocab.py::test_errors_say_what_was_seen[hole]"
FINE = {
    "as it is": {},
    "parameters": {"here": "`linear_log_probs(bias=, softcap=)`"},
    "a metric": {"here": "`ratio_new_old`"},
    "a case": {"test": f"`{CASE}`"},
    "a method": {"test": "`tests/test_embedding.py::Variants::test_one_dimensional_ids`"},
    "missing": {"here": "missing", "test": "", "differs": ""},
}
BAD = {
    "a renamed test": ({"test": "`tests/test_vocab.py::test_explicit_even_ranges`"}, "no such test: "),
    "a test of another file": ({"test": "`tests/test_drift.py::test_explicit_uneven_ranges`"}, "no such test: "),
    "no such file": ({"test": "`tests/test_vocabulary.py::test_explicit_uneven_ranges`"}, "no such test: "),
    "a case of a test without any": ({"test": GOOD.test[:-1] + "[1]`"}, "no such test: "),
    "a method without its class": ({"test": "`tests/test_embedding.py::test_one_dimensional_ids`"}, "no such test: "),
    "an unknown name": ({"here": "`VocabShards.odd`"}, "no such name: VocabShards.odd"),
    "an unknown option": ({"here": "`--loss.motor`"}, "no such name: --loss.motor"),
    "an unknown parameter": ({"here": "`linear_log_probs(biases=)`"}, "no such name: linear_log_probs"),
    "an unknown name in a remark": ({"here": "missing: see `nothing`", "test": ""}, "no such name: nothing"),
    "no test": ({"test": ""}, 'neither a test nor "missing"'),
    "no name": ({"here": "yes"}, 'neither a name nor "missing"'),
    "a test in words": ({"test": f"{GOOD.test} and others"}, "more than tests"),
}


@pytest.mark.parametrize("name", FINE)
def test_a_right_row_has_no_fault(name):
    assert faults(GOOD._replace(**FINE[name])) == []


@pytest.mark.parametrize("name", BAD)
def test_a_wrong_row_is_found(name):
    changes, words = BAD[name]
    (found,) = faults(GOOD._replace(**changes))
    assert found.startswith(words)
