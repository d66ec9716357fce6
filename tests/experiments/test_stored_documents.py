"""Stored documents: bitwise round trips of both formats, damaged files, passes, and states that go on to the same."""

import dataclasses
import json
import os
import re
import struct

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from experiments.experience.document_list import DocumentList
from experiments.experience.limits import NO_LIMITS, Limits
from experiments.experience.stored import read_documents, write_documents
from jaxlogp import Document, Support
from tests.experiments.lines import write

FORMATS = pytest.mark.parametrize("suffix", ["jsonl", "safetensors"])
NAMES = ("advantages", "sampler_log_probs", "old_log_probs", "reward", "versions")


def random_documents(count, *, per_label, seed=0):
    """Documents of several runs of labels; some have none."""
    rng = np.random.default_rng(seed)
    documents = []
    for number in range(count):
        length = int(rng.integers(1, 40))
        labels = rng.random(length) < 0.4
        labels[0] = False
        size = int(labels.sum())
        # All bits of the significand, and subnormal numbers.
        log_probs = (-rng.exponential(size=(2, size)) * 10.0 ** rng.integers(-42, 3)).astype(np.float32)
        versions = rng.integers(0, 2**31, size).astype(np.int32)
        tokens = rng.integers(0, 2**31, length).astype(np.int32)
        advantages = rng.normal(size=size).astype(np.float32) if per_label else float(rng.normal())
        versions = versions if per_label else number
        documents.append(Document(tokens, labels, advantages, *log_probs, float(rng.normal()), versions))
    return documents


def with_supports(documents):
    """The documents, each label with up to three ids that it was drawn from."""
    rng = np.random.default_rng(1)
    made = []
    for document in documents:
        drawn = document.tokens[document.label_positions].tolist()
        kept = [list({token, *rng.integers(0, 2**31, rng.integers(0, 3)).tolist()}) for token in drawn]
        support = Support.from_lists(kept).part(0, len(kept))
        made.append(dataclasses.replace(document, support=support))
    return made


def bits(value):
    array = None if value is None else np.asarray(value)
    return None if array is None else (array.dtype.kind, array.shape, array.tobytes())


def assert_same(found, wanted):
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert one.tokens.dtype == np.int32 and one.tokens.tolist() == other.tokens.tolist()
        assert one.labels.tolist() == other.labels.tolist()
        for name in NAMES:
            assert bits(getattr(one, name)) == bits(getattr(other, name)), name
        assert [*map(bits, jax.tree.leaves(one.support))] == [*map(bits, jax.tree.leaves(other.support))]


@FORMATS
@pytest.mark.parametrize("per_label", [True, False])
def test_round_trip_is_bitwise(tmp_path, suffix, per_label):
    documents = random_documents(20, per_label=per_label)
    documents = with_supports(documents) if per_label else documents
    write_documents(path := tmp_path / f"a.{suffix}", documents)
    found, digest = read_documents(path)
    assert_same(found, documents)
    assert len(digest) == 64
    # Written once more, the file is the same.
    write_documents(path, found)
    assert read_documents(path)[1] == digest


@FORMATS
def test_supervised_documents_need_tokens_and_labels_alone(tmp_path, suffix):
    documents = [Document.of_completion([5], [6, 7]), Document.of_completion([8, 9], [1])]
    write_documents(path := tmp_path / f"a.{suffix}", documents)
    assert_same(read_documents(path)[0], documents)
    if suffix == "jsonl":
        first, second = '{"tokens": [5, 6, 7], "labels": [0, 1, 1]}\n', '{"tokens": [8, 9, 1], "labels": [0, 0, 1]}\n'
        assert path.read_text() == first + second
    else:
        assert set(safetensors.numpy.load_file(path)) == {"tokens", "labels", "offsets"}


@FORMATS
def test_values_of_other_dtypes_are_read_as_fp32(tmp_path, suffix):
    log_probs = np.array([-0.1, -0.7])
    exact = np.array([-0.5, -0.25], ml_dtypes.bfloat16).astype(np.float16)
    documents = [Document(np.array([5, 6, 7], np.uint8), np.array([False, True, True]), 1, log_probs, exact)]
    write_documents(path := tmp_path / f"a.{suffix}", documents)
    (found,), _ = read_documents(path)
    assert bits(found.sampler_log_probs) == bits(log_probs.astype(np.float32))
    assert bits(found.old_log_probs) == bits(np.array([-0.5, -0.25], np.float32)) and found.advantages == 1.0


@FORMATS
def test_versions_may_be_a_list(tmp_path, suffix):
    document = Document(np.array([5, 6, 7]), np.array([False, True, True]), versions=[3, 4])
    write_documents(path := tmp_path / f"a.{suffix}", [document, document])
    assert [each.versions.tolist() for each in read_documents(path)[0]] == [[3, 4], [3, 4]]


def test_arrays_of_other_systems(tmp_path):
    arrays = {
        "tokens": np.array([5, 6, 7, 8, 9], np.int64),
        "labels": np.array([0, 1, 1, 0, 1], np.uint8),
        "offsets": np.array([0, 3, 5], np.int32),
        "sampler_log_probs": np.array([-1.0, -2.0, -3.0], ml_dtypes.bfloat16),
        "advantages": np.array([0.5, -0.5], np.float32),
        "versions": np.array([1, 2, 3], np.int64),
    }
    safetensors.numpy.save_file(arrays, path := tmp_path / "a.safetensors")
    one, two = read_documents(path)[0]
    assert (one.tokens.tolist(), two.tokens.tolist()) == ([5, 6, 7], [8, 9])
    assert (one.sampler_log_probs.tolist(), two.sampler_log_probs.tolist()) == ([-1.0, -2.0], [-3.0])
    assert (one.advantages, two.advantages, one.reward) == (0.5, -0.5, 0.0)
    assert (one.versions.tolist(), two.versions.tolist()) == ([1, 2], [3])


def test_numbers_and_arrays_of_labels_may_mix(tmp_path):
    values = {"labels": np.array([False, True, True]), "sampler_log_probs": np.zeros(2, np.float32)}
    mixed = [
        Document(np.array([1, 2, 3], np.int32), advantages=np.array([1.0, 2.0], np.float32), versions=3, **values),
        Document(np.array([1, 2, 3], np.int32), advantages=0.5, versions=4, **values),
    ]
    write_documents(tmp_path / "a.jsonl", mixed)
    assert_same(read_documents(tmp_path / "a.jsonl")[0], mixed)
    write_documents(tmp_path / "a.safetensors", mixed)
    found = read_documents(tmp_path / "a.safetensors")[0]
    assert [each.advantages.tolist() for each in found] == [[1.0, 2.0], [0.5, 0.5]]
    assert [each.versions for each in found] == [3, 4]


def stored(path, limits=NO_LIMITS, **options):
    documents, digest = read_documents(path, limits)
    return DocumentList(documents, digest=digest, **options)


@FORMATS
def test_a_state_goes_on_to_the_same_documents(tmp_path, suffix):
    write_documents(path := tmp_path / f"a.{suffix}", documents := random_documents(5, per_label=True))
    source = stored(path, docs_per_call=2, epochs=2)
    calls, states = [], [json.loads(json.dumps(source.state()))]
    while (taken := source.next(None)) is not None:
        calls.append(taken.documents)
        states.append(json.loads(json.dumps(source.state())))
    assert [len(each) for each in calls] == [2] * 5 and source.next(None) is None
    assert_same([document for call in calls for document in call], [*documents, *documents])
    moved = path.rename(tmp_path / f"b.{suffix}")
    for number, state in enumerate(states):
        again = stored(moved, docs_per_call=2, epochs=2)
        again.restore(state)
        rest = []
        while (taken := again.next(None)) is not None:
            rest += taken.documents
        assert_same(rest, [document for call in calls[number:] for document in call])


def test_passes_end_or_do_not():
    documents = random_documents(3, per_label=False)
    numbers = {id(document): number for number, document in enumerate(documents)}
    once, endless = (DocumentList(documents, docs_per_call=2, epochs=epochs) for epochs in (1, None))
    assert [numbers[id(each)] for each in once.next(None).documents] == [0, 1]
    assert [numbers[id(each)] for each in once.next(None).documents] == [2]
    assert once.next(None) is None and once.next(None) is None
    taken = [numbers[id(each)] for _ in range(5) for each in endless.next(None).documents]
    assert taken == [0, 1, 2, 0, 1, 2, 0, 1, 2, 0]


@pytest.mark.bad_input
def test_refuses_a_state_of_another_file_and_numbers(tmp_path):
    write_documents(path := tmp_path / "a.jsonl", random_documents(2, per_label=False))
    state = stored(path, docs_per_call=1).state()
    write_documents(path, random_documents(2, per_label=False, seed=1))
    source = stored(path, docs_per_call=1)
    words = f"documents: expected those of digest {state['digest']}, got {source.digest}"
    with pytest.raises(ValueError, match=f"^{words}$"):
        source.restore(state)
    for options, words in (
        ({"docs_per_call": 0}, "docs_per_call: expected a number above 0, got 0"),
        ({"docs_per_call": 1, "epochs": 0}, "epochs: expected a number above 0, or None, got 0"),
    ):
        with pytest.raises(ValueError, match=f"^{words}$"):
            stored(path, **options)


GOOD = {"tokens": [5, 6, 7], "labels": [0, 1, 1], "sampler_log_probs": [-0.5, -0.1]}
ONCE = "support.ids: expected the token of each label once among its ids"
LINES = {
    "json": (b"{", "invalid JSON: Expecting property name"),
    "twice": (b'{"tokens": [1], "tokens": [1], "labels": [0]}', "key 'tokens' occurs twice in one object"),
    "missing": ({"tokens": [1]}, "keys: expected tokens, labels, got none named labels"),
    "half": ({**GOOD, "support_ids": [6, 7]}, "keys: expected support_ids and support_counts, got support_ids alone"),
    "counts": ({**GOOD, "support_ids": [6, 7], "support_counts": [1, 2]}, "ids: expected 3, the sum of counts, got 2"),
    "support": ({**GOOD, "support_ids": [6, 8], "support_counts": [1, 1]}, f"{ONCE}, got 7 0 times at position 2"),
    "unknown": ({**GOOD, "logprobs": []}, "keys: expected none but tokens, labels, sampler_log_probs, old_log_probs, "),
    "no tokens": ({"tokens": [], "labels": []}, "tokens: expected shape [length] with length > 0, got (0,)"),
    "lengths": ({**GOOD, "labels": [0, 1]}, "labels: expected booleans of shape (3,), got bool array of shape (2,)"),
    "no label": ({**GOOD, "labels": [0, 1, 2]}, "labels: expected 0 or 1 for each token, got [2]"),
    "first": ({**GOOD, "labels": [1, 1, 0]}, "labels: expected False for the first token, which nothing predicts"),
    "negative": ({**GOOD, "tokens": [5, -6, 7]}, "tokens: expected integers in [0, 2147483647], got [-6]"),
    "large": ({**GOOD, "tokens": [5, 2**31, 7]}, "tokens: expected integers in [0, 2147483647], got [2147483648]"),
    "fractions": ({**GOOD, "tokens": [5, 6.0, 7]}, "tokens: expected a list of integers, got [5, 6.0, 7]"),
    "booleans": ({**GOOD, "labels": [False, True, True]}, "labels: expected a list of integers, got [False, True, True]"),
    "no list": ({**GOOD, "sampler_log_probs": -0.5}, "sampler_log_probs: expected a list of numbers, got -0.5"),
    "null": ({**GOOD, "old_log_probs": None}, "old_log_probs: expected a list of numbers, got None"),
    "number": ({**GOOD, "old_log_probs": [-0.5]}, "old_log_probs: expected shape (2,) of the labels, got (1,)"),
    "positive": ({**GOOD, "sampler_log_probs": [-0.5, 0.1]}, "sampler_log_probs: expected log-probs of at most 0, got"),
    "infinite": (b'{"tokens": [1, 2], "labels": [0, 1], "old_log_probs": [-Infinity]}', "invalid JSON: -Infinity"),
    "fp32": ({**GOOD, "old_log_probs": [-0.5, -1e39]}, "old_log_probs: expected numbers that fp32 holds, got [-1e+39]"),
    "an integer": ({**GOOD, "advantages": [0, 10**400]}, "advantages: expected numbers that fp32 holds, got [1000"),
    "advantages": ({**GOOD, "advantages": [1.0]}, "advantages: expected shape (2,) of the labels, got (1,)"),
    "a text": ({**GOOD, "advantages": "1"}, "advantages: expected a number or a list of numbers, got '1'"),
    "reward": ({**GOOD, "reward": [1.0, 1.0]}, "reward: expected a number, got [1.0, 1.0]"),
    "a large one": ({**GOOD, "reward": 10**400}, "reward: expected a number, got 1000"),
    "versions": ({**GOOD, "versions": 0.5}, "versions: expected an integer, or integers of shape (2,) of the labels, got"),
    "of labels": ({**GOOD, "versions": [1]}, "versions: expected an integer, or integers of shape (2,) of the labels, got"),
    "long": ({"tokens": [1] * 5, "labels": [0] * 5}, "expected at most 4 tokens, the length of a row, got 5"),
    "vocabulary": ({**GOOD, "tokens": [5, 6, 100]}, "expected ids below 100, the size of the vocabulary, got 100"),
}  # fmt: skip


@pytest.mark.bad_input
@pytest.mark.parametrize(("line", "reason"), LINES.values(), ids=LINES)
def test_refuses_lines(tmp_path, line, reason):
    path = write(tmp_path / "a.jsonl", GOOD, line)
    with pytest.raises(ValueError, match=rf"^file {path}, line 2: {re.escape(reason)}.*\Z"):
        stored(path, docs_per_call=1, limits=Limits(4, 100))


FLAT = {
    "tokens": np.array([5, 6, 7, 8], np.int32),
    "labels": np.array([False, True, True, False]),
    "offsets": np.array([0, 3, 4], np.int64),
    "sampler_log_probs": np.array([-0.5, -0.1], np.float32),
    "reward": np.array([1.0, 0.0]),
}
ONE = FLAT | {"labels": np.array([False, True, False, False]), "sampler_log_probs": np.array([-0.5], np.float32)}
ONE["versions"] = np.array([1, 2], np.int64)
ROW = "expected at most 3 tokens, the length of a row"
EACH_LABEL = "expected 2 values, one for each label"
AMBIGUOUS = "advantages: expected not as many labels as documents"
EITHER = "expected 1 values, one for each label or 2 values, one"
ARRAYS = {
    "missing": ({"offsets": None}, "keys: expected tokens, labels, offsets, got none named offsets"),
    "unknown": ({"rewards": FLAT["reward"]}, "keys: expected none but tokens, labels, offsets, tokens"),
    "negative": ({"tokens": np.array([5, 6, -7, 8])}, "tokens: expected ids in [0, 2147483647], got [-7]"),
    "large": ({"tokens": np.array([5, 6, 2**31, 8])}, "tokens: expected ids in [0, 2147483647], got [2147483648]"),
    "dtype": ({"tokens": np.ones(4)}, "tokens: expected an integer dtype, got float64 array of shape (4,)"),
    "booleans": ({"tokens": np.ones(4, bool)}, "tokens: expected an integer dtype, got bool array of shape (4,)"),
    "axes": ({"tokens": np.ones((2, 2), np.int32)}, "tokens: expected one axis, got int32 array of shape (2, 2)"),
    "labels": ({"labels": np.array([0, 1, 2, 0])}, "labels: expected 0 or 1 for each token, got [2]"),
    "few labels": ({"labels": np.array([False, True])}, "labels: expected 4 values, one for each token, got 2"),
    "first": ({"labels": np.array([False, True, False, True])}, "documents[1]: labels: expected False for the first token"),
    "start": ({"offsets": np.array([1, 3, 4])}, "offsets: expected rising numbers from 0 to 4, the number of tokens, got"),
    "end": ({"offsets": np.array([0, 3, 5])}, "offsets: expected rising numbers from 0 to 4, the number of tokens, got"),
    "order": ({"offsets": np.array([0, 3, 2, 4])}, "offsets: expected rising numbers from 0 to 4, the number of tokens"),
    "empty": ({"offsets": np.array([0, 3, 3, 4])}, "offsets: expected rising numbers from 0 to 4, the number of tokens"),
    "no offset": ({"offsets": np.zeros(0, np.int32)}, "offsets: expected rising numbers from 0 to 4, the number of tokens"),
    "none": ({"offsets": np.array([0])}, "offsets: expected rising numbers from 0 to 4, the number of tokens"),
    "log-probs": ({"sampler_log_probs": np.zeros(4, np.float32)}, f"sampler_log_probs: {EACH_LABEL}, got 4"),
    "nan": ({"sampler_log_probs": np.array([np.nan, 0])}, "sampler_log_probs: expected finite numbers that fp32 holds, got"),
    "positive": ({"sampler_log_probs": np.array([0.5, 0])}, "documents[0]: sampler_log_probs: expected log-probs of at"),
    "integers": ({"sampler_log_probs": np.array([0, 0])}, "sampler_log_probs: expected a floating dtype, got int64 array"),
    "reward": ({"reward": np.ones(4)}, "reward: expected 2 values, one for each document, got 4"),
    "a large one": ({"reward": np.array([1, 1e39])}, "reward: expected finite numbers that fp32 holds, got [1.e+39]"),
    "rewards": ({"reward": np.array([1, np.inf])}, "documents[1]: reward: expected a finite number, got"),
    "ambiguous": ({"advantages": np.ones(2)}, f"{AMBIGUOUS} (or a .jsonl file), got 2 of both"),
    "versions": ({**ONE, "versions": np.ones(3, np.int64)}, f"versions: {EITHER} for each document, got 3"),
    "old": ({**ONE, "versions": np.array([1, -1])}, "documents[1]: versions: expected integers in [0, 2147483647], got"),
    "support": ({"support_ids": np.array([6, 7]), "support_counts": np.array([2])}, f"support_counts: {EACH_LABEL}, got 1"),
    "supports": ({"support_ids": np.array([6, 8]), "support_counts": np.array([1, 1])}, f"documents[0]: {ONCE}"),
    "long": ({"offsets": np.array([0, 4]), "reward": np.ones(1)}, f"documents[0]: {ROW}, got 4"),
}  # fmt: skip


@pytest.mark.bad_input
@pytest.mark.parametrize(("changes", "reason"), ARRAYS.values(), ids=ARRAYS)
def test_refuses_arrays(tmp_path, changes, reason):
    path = tmp_path / "a.safetensors"
    arrays = {name: array for name, array in {**FLAT, **changes}.items() if array is not None}
    safetensors.numpy.save_file(arrays, path)
    with pytest.raises(ValueError, match=rf"^file {path}, {re.escape(reason)}.*\Z"):
        read_documents(path, Limits(row_length=3))


@pytest.mark.bad_input
def test_refuses_files_that_are_cut_short_or_damaged(tmp_path):
    content = safetensors.numpy.save(FLAT)
    path = tmp_path / "a.safetensors"
    start = 8 + struct.unpack("<Q", content[:8])[0]
    for cut in (0, 4, 8, start - 1, start, len(content) - 1):
        path.write_bytes(content[:cut])
        with pytest.raises(ValueError, match=f"^file {path}: expected a whole safetensors file, got .*$"):
            read_documents(path)
    path.write_bytes(content + b"\0")
    with pytest.raises(ValueError, match=f"^file {path}: expected a whole safetensors file, got .*$"):
        read_documents(path)
    header = json.loads(content[8:start])
    header["labels"]["dtype"] = "F8_E4M3"
    changed = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(changed)) + changed + content[start:])
    with pytest.raises(ValueError, match=f"^file {path}, labels: expected one of BOOL, .*, F64, got F8_E4M3$"):
        read_documents(path)
    # Wherever a byte of the header is another one: refused in one sentence, or the same values under no other name.
    for position in range(start):
        path.write_bytes(content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :])
        try:
            read_documents(path)
        except ValueError as error:
            assert str(error).startswith(f"file {path}") and "\n" not in str(error)
    os.mkfifo(tmp_path / "b.safetensors")
    for name, seen in (("b.safetensors", "a pipe, socket or device"), ("c.safetensors", "No such file or directory")):
        with pytest.raises(ValueError, match=f"^file {tmp_path / name}: expected a readable file, got {seen}$"):
            read_documents(tmp_path / name)


@pytest.mark.bad_input
def test_refuses_to_write_what_could_not_be_read(tmp_path):
    one = Document(np.array([1, 2]), np.array([False, True]), np.ones(1, np.float32), np.zeros(1, np.float32))
    none = Document(np.array([1, 2]), np.array([False, False]))
    two = Document(np.array([1, 2, 3]), np.array([False, True, True]), np.ones(2, np.float32))
    column = Document(np.array([1, 2]), np.array([False, True]), columns={"ref_log_probs": np.zeros(1)})
    supported = dataclasses.replace(one, support=Support.from_lists([[2]]))
    rewarded = dataclasses.replace(one, reward=1e39)
    large = Document(np.array([1, 2]), np.array([False, True]), np.array([1e39]))
    for name, documents, words in (
        ("a.jsonl", [], "documents: expected at least one, got none"),
        ("a.npz", [one], "documents: expected a file .jsonl or .safetensors, got .*a.npz"),
        ("a.jsonl", [one, column], r"documents\[1\]: expected no further columns, got \['ref_log_probs'\]"),
        ("a.jsonl", [large], r"advantages: expected finite numbers that fp32 holds, got \[1.e\+39\]"),
        ("a.jsonl", [rewarded], r"reward: expected finite numbers that fp32 holds, got \[1.e\+39\]"),
        ("a.safetensors", [rewarded], r"reward: expected finite numbers that fp32 holds, got \[1.e\+39\]"),
        ("a.safetensors", [large], r"advantages: expected finite numbers that fp32 holds, got \[1.e\+39\]"),
        (
            "a.safetensors",
            [one, none],
            r"documents\[1\]: expected sampler_log_probs as in other documents \(or a .jsonl file\), got None",
        ),
        ("a.safetensors", [one, supported], "documents: expected a support in all or in none, got 1 of them"),
        ("a.safetensors", [two, none], rf"{AMBIGUOUS} \(or a .jsonl file\), got 2 of both"),
    ):
        with pytest.raises(ValueError, match=f"^{words}$"):
            write_documents(tmp_path / name, documents)
        assert not any(tmp_path.iterdir())
    write_documents(tmp_path / "a.jsonl", [one, none, two])
    assert_same(read_documents(tmp_path / "a.jsonl")[0], [one, none, two])
