"""Blocks dealt evenly to programs, and what they found put together, against NumPy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.models.attention.shares import deal_blocks, put_together
from tests.oracle import fp32_bound


@pytest.mark.costly
@given(blocks=st.lists(st.integers(0, 40), min_size=1, max_size=6), more=st.integers(1, 9), fewest=st.integers(1, 5))
def test_every_block_is_dealt_once_and_shares_are_alike(blocks, more, fewest):
    number = len(blocks) + more
    dealt = jax.tree.map(np.asarray, deal_blocks(jnp.asarray(blocks, jnp.int32), number, fewest))
    needed = dealt.of_owner[-1]
    assert needed <= number and dealt.of_owner[0] == 0
    assert (dealt.owner[needed:] == len(blocks)).all()
    largest = max(fewest, -(-sum(blocks) // more))
    for owner, owned in enumerate(blocks):
        first, last = dealt.of_owner[owner : owner + 2]
        assert last > first and (dealt.owner[first:last] == owner).all()
        spans = list(zip(dealt.begin[first:last], dealt.end[first:last], strict=True))
        assert [block for begin, end in spans for block in range(begin, end)] == list(range(owned))
        assert all(end - begin == largest for begin, end in spans[:-1]) and spans[-1][1] - spans[-1][0] <= largest


def test_what_shares_found_is_weighted_by_their_sums():
    rng = np.random.default_rng(0)
    # Owners of two rows each with one, three and two shares; two more shares were not needed.
    of_owner, together, heads, size = [0, 1, 4, 6], 2, 3, 16
    mixed = rng.normal(size=(8, together, heads, size)).astype(np.float32)
    log_sums = rng.uniform(-30, 30, (8, together, heads)).astype(np.float32)
    # A row that read nothing in a share stores no mean, and what was not needed nothing at all.
    log_sums[2, 1], mixed[2, 1] = -np.inf, np.nan
    log_sums[6:], mixed[6:] = np.nan, np.nan
    out = put_together(*map(jnp.asarray, (mixed, log_sums, np.int32(of_owner))), jnp.float32, interpret=True)
    for owner, (first, last) in enumerate(zip(of_owner, of_owner[1:], strict=False)):
        of_sums, means = log_sums[first:last].astype(np.float64), mixed[first:last].astype(np.float64)
        weights = np.exp2(of_sums - of_sums.max(axis=0))[..., None]
        means = np.where(weights > 0, means, 0.0)
        exact = (weights * means).sum(axis=0) / weights.sum(axis=0)
        # Each weight is off by the rounding of an exponent of at most 60, and by exp2's own; sums by their additions.
        relative = fp32_bound(1.0, 60 + 4 * (last - first))
        bound = relative * (weights * np.abs(means)).sum(axis=0) / weights.sum(axis=0)
        assert (np.abs(np.asarray(out[owner * together :][:together], np.float64) - exact) <= bound).all()


def test_a_share_that_is_not_finite_spoils_its_row_alone():
    mixed, log_sums = np.ones((4, 1, 2, 16), np.float32), np.zeros((4, 1, 2), np.float32)
    mixed[1, 0, 0], log_sums[1, 0, 0] = np.nan, np.nan
    out = put_together(*map(jnp.asarray, (mixed, log_sums, np.int32([0, 2, 4]))), jnp.float32, interpret=True)
    assert np.isnan(out[0, 0]).all() and np.isfinite(out[0, 1]).all() and np.isfinite(out[1]).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_result_has_the_dtype_that_is_asked_for(dtype):
    mixed, log_sums = jnp.ones((2, 1, 1, 16)), jnp.zeros((2, 1, 1))
    assert put_together(mixed, log_sums, jnp.int32([0, 2]), jnp.dtype(dtype), interpret=True).dtype == dtype
