"""Supports made on the host: three forms of the ids give one support, and what is wrong is named."""

import jax
import numpy as np
import pytest

from jaxlogp import Support

IDS, COUNTS, OFFSETS = [7, 3, 9, 5], [1, 0, 2, 1], [0, 1, 1, 3, 4]
LISTS = [[7], [], [3, 9], [5]]
FORMS = {
    "lists": lambda **options: Support.from_lists(LISTS, **options),
    "arrays": lambda **options: Support.from_lists([np.array(ids, np.int16) for ids in LISTS], **options),
    "offsets": lambda **options: Support.from_offsets(IDS, OFFSETS, **options),
    "counts": lambda **options: Support.from_counts(np.array(COUNTS, np.uint8), np.array(IDS, np.uint64), **options),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_support(form):
    support = FORMS[form](capacity=6)
    assert support.ids.dtype == support.counts.dtype == np.int32
    assert support.ids.tolist() == [*IDS, -1, -1] and support.counts.tolist() == COUNTS
    assert FORMS[form]().ids.size == 4
    rows = FORMS[form](capacity=6, shape=(2, 2))
    assert rows.counts.tolist() == [[1, 0], [2, 1]] and rows.ids.tolist() == support.ids.tolist()


def test_neighbours_may_have_the_same_ids_and_parts_their_padding():
    first, second = Support.from_lists([[7], [3, 9]], capacity=8), Support.from_lists([[9], [9, 11]])
    both = Support.concatenate([first, second])
    assert both.counts.tolist() == [1, 2, 1, 2] and both.ids.tolist() == [7, 3, 9, 9, 9, 11]


def test_counts_keep_their_shape():
    assert Support.from_counts(np.array([[1, 0], [2, 1]]), IDS).counts.shape == (2, 2)


@pytest.mark.parametrize(
    "support",
    [Support.from_lists([[], []]), Support.from_offsets([], [0, 0, 0]), Support.from_counts([0, 0], [])],
    ids=["lists", "offsets", "counts"],
)
def test_no_ids_at_all(support):
    assert support.ids.tolist() == [-1] and support.counts.tolist() == [0, 0]


def test_a_support_is_a_pytree_of_two_arrays():
    support = Support.from_lists(LISTS)
    doubled = jax.tree.map(lambda x: 2 * x, support)
    assert isinstance(doubled, Support) and doubled.ids.tolist() == [14, 6, 18, 10]
    assert len(jax.tree.leaves(support)) == 2


ERRORS = {
    "twice": (lambda: Support.from_lists([[1], [4, 2, 4]]), r"^ids: .*distinct ids in a token, got 4 twice .* \(1,\)$"),
    "negative": (lambda: Support.from_lists([[1], [2, -1]]), r"^ids: expected ids in \[0, .*, got -1 .* \(1,\)$"),
    "large": (
        lambda: Support.from_lists([[1], [2**31]]),
        r"^ids: expected ids in \[0, 2147483648\), got 2147483648 of",
    ),
    "larger": (lambda: Support.from_counts([1], np.array([2**64 - 1], np.uint64)), r"^ids: expected ids in \[0, "),
    "fraction": (lambda: Support.from_lists([[1.5]]), "^ids: expected an array of an integer dtype"),
    "capacity": (lambda: FORMS["lists"](capacity=3), "^capacity: .* at least 4, the number of ids, got int 3"),
    "no integer": (lambda: FORMS["lists"](capacity=6.0), "^capacity: .* at least 4, the number of ids, got float"),
    "shape": (lambda: FORMS["lists"](shape=(3, 2)), r"^shape: expected one of 4 tokens, got \(3, 2\)"),
    "offsets end": (lambda: Support.from_offsets(IDS, [0, 1, 3]), r"^offsets: .* from 0 to 4.*, got 3 from 0 to 3"),
    "offsets start": (lambda: Support.from_offsets(IDS, [1, 4]), "^offsets: .*, got 2 from 1 to 4"),
    "no offsets": (lambda: Support.from_offsets([], []), "^offsets: .*, got none"),
    "offsets fall": (
        lambda: Support.from_offsets(IDS, [0, 3, 2, 4]),
        r"^offsets: .* after a larger, got \[3 2\] of token 1",
    ),
    "counts sum": (lambda: Support.from_counts([1, 2], IDS), "^ids: expected 3, the sum of counts, got 4"),
    "negative count": (lambda: Support.from_counts([5, -1], IDS), r"^counts: .* at least 0, got -1 at position \(1,\)"),
    "two dimensions": (lambda: Support.from_counts([1, 1], [[1, 2]]), "^ids: expected one dimension, got int64 array"),
}


@pytest.mark.bad_input
@pytest.mark.parametrize("name", ERRORS)
def test_what_is_wrong_is_named(name):
    call, message = ERRORS[name]
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.bad_input
@pytest.mark.parametrize(
    "call, argument",
    [
        (lambda support: support.part(-1, 2), "start, stop"),
        (lambda support: support.part(0, 4), "start, stop"),
        (lambda support: support.of_tokens(np.array([-1])), "index"),
        (lambda support: support.of_tokens(np.array([3])), "index"),
        (lambda support: support.from_lists([7, 3, 5]), "ids"),
        (lambda support: support.from_lists(7), "ids"),
    ],
)
def test_tokens_that_are_not_there_are_refused(call, argument):
    with pytest.raises(ValueError, match=f"^{argument}: expected "):
        call(Support.from_lists([[7], [3, 5], [2]]))
