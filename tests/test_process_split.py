"""A function in two processes of four devices: the fixed order gives the bytes of one process, and failures are reported."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlogp import check_invariance, linear_log_probs
from jaxlogp.invariance.processes import run_in_processes
from tests.invariance.log_prob_functions import FIXED, naive

FUNCTIONS = "tests.invariance.log_prob_functions"


@functools.cache
def data():
    keys = jax.random.split(jax.random.key(0), 3)
    hidden = jax.random.normal(keys[0], (16, 32))
    weight = jax.random.normal(keys[1], (264, 32)) * 3.0 / 32**0.5
    return hidden, weight, jax.random.randint(keys[2], (16,), 0, 264)


@pytest.mark.slow
def test_the_fixed_order_gives_the_bytes_of_one_process():
    wanted = np.asarray(linear_log_probs(*data(), engine=FIXED).log_probs)
    seen = run_in_processes(f"{FUNCTIONS}:fixed_order", *data())
    assert seen.tobytes() == wanted.tobytes()


@pytest.mark.slow
def test_naive_jax_does_not_and_the_report_says_so():
    """The control. bf16 travels too."""
    hidden, weight, targets = data()
    bf16 = hidden.astype(jnp.bfloat16), weight.astype(jnp.bfloat16), targets
    report = check_invariance(naive, *bf16, num_shards=(), path=f"{FUNCTIONS}:naive")
    assert "two processes of 4 devices" in report.broken
    difference = report.differences[-1]
    # The same numbers up to the order of sums of 264 fp32 terms.
    assert abs(difference.value - difference.reference) < 1e-4


def test_a_process_that_fails_is_told_with_its_words():
    with pytest.raises(RuntimeError, match="process . ended with status 1: .*no_such_function"):
        run_in_processes(f"{FUNCTIONS}:no_such_function", *data())


@pytest.mark.slow
def test_processes_that_take_too_long_are_ended():
    with pytest.raises(RuntimeError, match="no result after 0.5 seconds"):
        run_in_processes(f"{FUNCTIONS}:naive", *data(), timeout=0.5)


@pytest.mark.bad_input
@pytest.mark.parametrize("path, rows, argument", [(FUNCTIONS, 264, "path"), ("a:b", 263, "weight")])
def test_bad_input_names_the_argument(path, rows, argument):
    hidden, weight, targets = data()
    with pytest.raises(ValueError, match=f"^{argument}: expected "):
        run_in_processes(path, hidden, weight[:rows], targets)
