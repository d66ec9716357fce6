"""VocabShards: the one validated object that says which rank owns which token id."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlogp import VocabShards, embedding_lookup

UNEVEN_17 = ((0, 2), (2, 7), (7, 13), (13, 17))


def test_even_split_gives_the_remainder_to_the_first_ranks():
    assert VocabShards.even(10, 4).ranges == ((0, 3), (3, 6), (6, 8), (8, 10))
    shards = VocabShards.even(257, 8)
    assert shards.ranges[0] == (0, 33)
    assert shards.ranges[7] == (225, 257)
    assert VocabShards.even(5, 5).ranges == ((0, 1), (1, 2), (2, 3), (3, 4), (4, 5))


@pytest.mark.parametrize("vocab_size", [17, 257, 1027, 4099, 128257])
@pytest.mark.parametrize("num_shards", [1, 2, 3, 4, 8])
def test_even_split_covers_the_vocabulary_once(vocab_size, num_shards):
    shards = VocabShards.even(vocab_size, num_shards)
    widths = [end - start for start, end in shards.ranges]
    assert (shards.vocab_size, shards.num_shards, shards.max_width) == (vocab_size, num_shards, max(widths))
    assert shards.ranges[0][0] == 0 and shards.ranges[-1][1] == vocab_size
    assert all(left[1] == right[0] for left, right in zip(shards.ranges, shards.ranges[1:], strict=False))
    assert widths == sorted(widths, reverse=True) and widths[0] - widths[-1] <= 1


@pytest.mark.parametrize("vocab_size", [257, 32256, 49952, 128257, 151936])
@pytest.mark.parametrize("num_shards", [1, 2, 3, 4, 8])
def test_aligned_shards_begin_at_multiples_of_a_tile_and_only_the_last_is_shorter(vocab_size, num_shards):
    shards = VocabShards.aligned(vocab_size, num_shards)
    *others, last = shards.widths
    assert shards.num_shards == num_shards and sum(shards.widths) == vocab_size
    if vocab_size == 257 and num_shards > 2:
        assert shards == VocabShards.even(vocab_size, num_shards)
        return
    assert all(start % 256 == 0 for start in shards.starts)
    # No wider than even shards rounded up to whole tiles: nobody computes more than a tile a rank in addition.
    assert set(others) <= {shards.max_width} and 0 < last <= shards.max_width < vocab_size / num_shards + 256


def test_aligned_shards_of_the_vocabulary_of_qwen():
    # Half of it, 75968 rows, is no multiple of 256.
    assert VocabShards.aligned(151936, 2).ranges == ((0, 76032), (76032, 151936))
    assert VocabShards.aligned(1000, 3, 16).widths == (336, 336, 328)
    # 3 · 512 rows of the first shards would be more than there are.
    assert VocabShards.aligned(1500, 4) == VocabShards.even(1500, 4)
    # Two shards of 256 rows leave none for the third.
    assert VocabShards.aligned(512, 3) == VocabShards.even(512, 3)


def test_explicit_uneven_ranges():
    shards = VocabShards.from_ranges(UNEVEN_17, 17)
    assert shards.ranges == UNEVEN_17
    assert (shards.vocab_size, shards.num_shards, shards.max_width) == (17, 4, 6)
    # Any sequence of pairs of integers is accepted, and gives the same (equal, equally hashed) object.
    again = VocabShards.from_ranges([list(pair) for pair in UNEVEN_17], 17)
    assert again == shards and hash(again) == hash(shards)
    assert shards != VocabShards.even(17, 4)


def test_shards_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        VocabShards.even(10, 4).vocab_size = 11


@pytest.mark.parametrize("ranges", [VocabShards.even(257, 8).ranges, UNEVEN_17], ids=["even", "uneven"])
def test_every_id_has_its_owner(ranges):
    shards = VocabShards.from_ranges(ranges, ranges[-1][1])
    ids = np.arange(-2, shards.vocab_size + 2)
    expected = np.full(ids.shape, -1, np.int32)
    for rank, (start, end) in enumerate(shards.ranges):
        expected[(ids >= start) & (ids < end)] = rank
    for run in (shards.owners, jax.jit(shards.owners)):
        owners = run(jnp.asarray(ids, jnp.int32))
        assert owners.dtype == jnp.int32
        np.testing.assert_array_equal(owners, expected)
    edges = jnp.asarray([edge for start, end in shards.ranges for edge in (start, end - 1)], jnp.int32)
    np.testing.assert_array_equal(shards.owners(edges), np.repeat(np.arange(shards.num_shards), 2))


def test_masked_ids_have_no_owner():
    ids = jnp.asarray([[3, -100, 16], [99, 0, 7]], jnp.int32)
    mask = jnp.asarray([[True, False, True], [False, False, True]])
    owners = VocabShards.from_ranges(UNEVEN_17, 17).owners(ids, mask)
    np.testing.assert_array_equal(owners, [[1, -1, 3], [-1, -1, 2]])


@pytest.mark.parametrize("rest, dtype", [((), jnp.float32), ((3,), jnp.bfloat16), ((2, 3), jnp.float32)])
@pytest.mark.parametrize(
    "shards", [VocabShards.from_ranges(UNEVEN_17, 17), VocabShards.aligned(17, 3, 6)], ids=["uneven", "aligned"]
)
def test_shard_rows_puts_each_block_first_and_zeros_behind(shards, rest, dtype):
    rows = 1 + np.arange(17 * int(np.prod(rest))).reshape(17, *rest)
    weight = jnp.asarray(rows, dtype)
    padded = shards.shard_rows(weight)
    assert padded.shape == (shards.num_shards * 6, *rest) and padded.dtype == dtype
    for rank, (start, end) in enumerate(shards.ranges):
        block = padded[rank * 6 : (rank + 1) * 6]
        np.testing.assert_array_equal(block[: end - start], weight[start:end])
        assert not np.asarray(block[end - start :], np.float32).any()
    np.testing.assert_array_equal(shards.unshard_rows(padded), weight)


def test_shard_rows_of_an_exact_split_changes_nothing():
    weight = jnp.arange(24, dtype=jnp.float32).reshape(12, 2)
    np.testing.assert_array_equal(VocabShards.even(12, 4).shard_rows(weight), weight)


@pytest.mark.parametrize("shards", [VocabShards.from_ranges(UNEVEN_17, 17), VocabShards.aligned(17, 4, 5)])
def test_shard_rows_carries_gradients_back_to_the_rows_alone(shards):
    padded = (shards.num_shards * shards.max_width, 2)
    cotangent = jnp.asarray(np.random.default_rng(0).normal(size=padded), jnp.float32)
    gradient = jax.grad(lambda w: jnp.sum(shards.shard_rows(w) * cotangent))(jnp.zeros((17, 2), jnp.float32))
    np.testing.assert_array_equal(gradient, shards.unshard_rows(cotangent))


# Every error names the argument, what was expected and what was seen; a bad pair of ranges names both ranges.
ERRORS = {
    "no vocabulary": (lambda: VocabShards.even(0, 2), ["vocab_size", "expected", "0"]),
    "negative vocabulary": (lambda: VocabShards.even(-5, 2), ["vocab_size", "expected", "-5"]),
    "tiles of no rows": (lambda: VocabShards.aligned(10, 2, 0), ["multiple", "expected", "0"]),
    "more aligned shards than ids": (lambda: VocabShards.aligned(3, 4), ["num_shards", "expected", "3", "4"]),
    "no shards": (lambda: VocabShards.even(10, 0), ["num_shards", "expected", "0"]),
    "negative shards": (lambda: VocabShards.even(10, -3), ["num_shards", "expected", "-3"]),
    "more shards than ids": (lambda: VocabShards.even(3, 4), ["num_shards", "expected", "3", "4"]),
    "a vocabulary of no ids": (lambda: VocabShards.from_ranges([(0, 3)], 0), ["vocab_size", "expected", "0"]),
    "no ranges": (lambda: VocabShards.from_ranges([], 10), ["ranges", "expected"]),
    "unsorted": (lambda: VocabShards.from_ranges([(5, 10), (0, 5)], 10), ["ranges", "expected", "(5, 10)", "(0, 5)"]),
    "overlap": (lambda: VocabShards.from_ranges([(0, 6), (4, 10)], 10), ["ranges", "expected", "(0, 6)", "(4, 10)"]),
    "nested": (
        lambda: VocabShards.from_ranges([(0, 8), (2, 4), (8, 10)], 10),
        ["ranges", "expected", "(0, 8)", "(2, 4)"],
    ),
    "hole": (lambda: VocabShards.from_ranges([(0, 4), (6, 10)], 10), ["ranges", "expected", "(0, 4)", "(6, 10)"]),
    "hole at the start": (lambda: VocabShards.from_ranges([(1, 4), (4, 10)], 10), ["ranges", "expected", "(1, 4)"]),
    "hole at the end": (lambda: VocabShards.from_ranges([(0, 4), (4, 9)], 10), ["ranges", "expected", "(4, 9)", "10"]),
    "beyond the end": (lambda: VocabShards.from_ranges([(0, 4), (4, 11)], 10), ["ranges", "expected", "(4, 11)", "10"]),
    "negative start": (lambda: VocabShards.from_ranges([(-2, 4), (4, 10)], 10), ["ranges", "expected", "(-2, 4)"]),
    "empty range": (lambda: VocabShards.from_ranges([(0, 4), (4, 4), (4, 10)], 10), ["ranges", "expected", "(4, 4)"]),
    "reversed range": (lambda: VocabShards.from_ranges([(0, 4), (10, 4)], 10), ["ranges", "expected", "(10, 4)"]),
    "rows of another vocabulary": (
        lambda: VocabShards.even(10, 4).shard_rows(jnp.zeros((11, 2), jnp.float32)),
        ["weight", "expected", "10", "11"],
    ),
    "padded rows of another width": (
        lambda: VocabShards.even(10, 4).unshard_rows(jnp.zeros((10, 2), jnp.float32)),
        ["padded", "expected", "12", "10"],
    ),
    "mask of another shape": (
        lambda: VocabShards.even(10, 4).owners(jnp.zeros((3,), jnp.int32), jnp.ones((2,), bool)),
        ["mask", "expected", "(3,)", "(2,)"],
    ),
    "ids that are not integers": (
        lambda: VocabShards.even(10, 4).owners(jnp.zeros((3,), jnp.float32)),
        ["token_ids", "expected", "float32"],
    ),
}


@pytest.mark.bad_input
@pytest.mark.parametrize("name", ERRORS)
def test_errors_say_what_was_seen(name):
    build, fragments = ERRORS[name]
    with pytest.raises(ValueError) as raised:
        build()
    missing = [fragment for fragment in fragments if fragment not in str(raised.value)]
    assert not missing, f"{missing} not in {raised.value}"


@pytest.mark.bad_input
@pytest.mark.parametrize(
    "function",
    [
        VocabShards.even(10, 4).owners,
        lambda ids: embedding_lookup(jnp.ones((10, 2)), ids),
    ],
    ids=["owners", "embedding_lookup"],
)
def test_no_ids_at_all_and_lists_are_refused(function):
    with pytest.raises(ValueError, match="^token_ids: expected at least one element, got an empty array"):
        function(jnp.zeros((0, 3), jnp.int32))
    with pytest.raises(ValueError, match="^token_ids: expected an array of an integer dtype, got list"):
        function([1, 2])
