"""DAPO's punishment of overlong completions: every length by the paper's three cases, and bad input."""

import functools

import jax
import numpy as np
import pytest

from jaxlogp import soft_overlong_punishment


def by_cases(length, limit, buffer):
    if length <= limit - buffer:
        return 0.0
    return (limit - buffer - length) / buffer if length <= limit and buffer else -1.0


@pytest.mark.parametrize("buffer", [0, 1, 7, 20])
@pytest.mark.parametrize("factor", [1.0, 0.25, 0.0])
def test_every_length_against_the_papers_cases(buffer, factor):
    lengths = np.arange(26)
    expected = [factor * by_cases(length, 20, buffer) for length in lengths]
    punishment = functools.partial(soft_overlong_punishment, max_length=20, buffer=buffer, factor=factor)
    for run in (punishment, jax.jit(punishment)):
        result = run(lengths)
        assert result.dtype == np.float32
        np.testing.assert_allclose(result, expected, atol=2.0**-24)  # one division and one product of at most 1
        assert not np.signbit(np.asarray(result)[: 20 - buffer]).any(), "no -0"


def test_lengths_of_any_shape_and_integer_dtype():
    lengths = np.uint8([[80, 90], [100, 255]])
    result = soft_overlong_punishment(lengths, max_length=100, buffer=20)
    np.testing.assert_array_equal(result, [[0.0, -0.5], [-1.0, -1.0]])


@pytest.mark.parametrize("kind", [np.uint8, np.int64])
def test_numbers_of_numpy_are_those_of_python(kind):
    """Those of uint8 would wrap in a difference, and those of int64 make a float64 result with x64."""
    lengths = np.int32([80, 90, 100, 255])
    with jax.enable_x64(True):
        result = soft_overlong_punishment(lengths, max_length=kind(100), buffer=kind(20))
    assert result.dtype == np.float32
    np.testing.assert_array_equal(result, [0.0, -0.5, -1.0, -1.0])


def test_the_largest_numbers_that_are_taken():
    most, largest = 2**31 - 1, float(np.finfo(np.float32).max)
    result = soft_overlong_punishment(np.int32([0, most]), max_length=most, buffer=most, factor=largest)
    np.testing.assert_array_equal(result, np.float32([0.0, -largest]))


LENGTHS = np.int32([1, 2])
BAD = {
    "lengths": lambda: soft_overlong_punishment([1], max_length=3, buffer=1),
    "lengths ": lambda: soft_overlong_punishment(np.float32([1]), max_length=3, buffer=1),
    "lengths  ": lambda: soft_overlong_punishment(-LENGTHS, max_length=3, buffer=1),
    "lengths   ": lambda: soft_overlong_punishment(np.array([2**31]), max_length=3, buffer=1),
    "max_length": lambda: soft_overlong_punishment(LENGTHS, max_length=0, buffer=0),
    "max_length ": lambda: soft_overlong_punishment(LENGTHS, max_length=2**31, buffer=1),
    "max_length  ": lambda: soft_overlong_punishment(LENGTHS, max_length=True, buffer=1),
    "max_length   ": lambda: soft_overlong_punishment(LENGTHS, max_length=3.0, buffer=1),
    "buffer": lambda: soft_overlong_punishment(LENGTHS, max_length=3, buffer=4),
    "buffer ": lambda: soft_overlong_punishment(LENGTHS, max_length=3, buffer=True),
    "factor": lambda: soft_overlong_punishment(LENGTHS, max_length=3, buffer=1, factor=-1.0),
    "factor ": lambda: soft_overlong_punishment(LENGTHS, max_length=3, buffer=1, factor=1e39),
    "factor  ": lambda: soft_overlong_punishment(LENGTHS, max_length=3, buffer=1, factor=10**400),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.bad_input
def test_bad_input_names_the_argument(name):
    with pytest.raises(ValueError, match=f"^{name.strip()}: expected .*, got "):
        BAD[name]()
