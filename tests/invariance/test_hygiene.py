"""A row with NaN, inf, 1e30, denormals or an invalid id changes no bit of another row, in values or gradients."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.invariance.harness import CHUNKED, FIXED, Setting, broken, case, run

pytestmark = pytest.mark.costly

TOKENS, VOCAB = 72, 1027
SLOW = pytest.mark.slow
SETTING = Setting(FIXED, VOCAB)
# The fast path keeps the others' bits as well: within one program a row of a product is its own.
EVERY_PATH = pytest.mark.parametrize("setting", [SETTING, Setting(CHUNKED, VOCAB)], ids=["fixed order", "chunked"])
EVERY_PATH_AND_SIZE = pytest.mark.parametrize(
    "setting, size",
    [(SETTING, 1), (SETTING, 4), (Setting(CHUNKED, VOCAB), 1), pytest.param(Setting(CHUNKED, VOCAB), 4, marks=SLOW)],
    ids=["fixed order, TP 1", "fixed order, TP 4", "chunked, TP 1", "chunked, TP 4"],
)
ROW = 5
OTHERS = np.arange(TOKENS) != ROW
HOSTILE = {"nan": np.nan, "inf": np.inf, "-inf": -np.inf, "1e30": 1e30, "-1e30": -1e30, "denormal": 1e-42}


def good(active):
    data = case(VOCAB, TOKENS)
    return {**data, "mask": data["mask"].at[ROW].set(active)}


def with_row(data, value):
    return {**data, "hidden": data["hidden"].at[ROW].set(value)}


def others(results):
    """What the other rows got; the sums over tokens (gradients of weight and bias) are not theirs alone."""
    return {name: results[name][OTHERS] for name in ("log_probs", "entropy", "hidden")}


@EVERY_PATH_AND_SIZE
@pytest.mark.parametrize("value", HOSTILE.values(), ids=HOSTILE)
def test_an_active_hostile_row_changes_no_other_row(value, size, setting):
    data = good(active=True)
    wanted, seen = run(setting, size, data), run(setting, size, with_row(data, value))
    assert broken(others(seen), others(wanted)) == []
    if value == 1e-42:
        assert np.isfinite(seen["log_probs"][ROW]) and np.isfinite(seen["weight"]).all()
    elif not np.isfinite(value):
        assert np.isnan(seen["log_probs"][ROW]), "a row that is not finite must say so"


@EVERY_PATH
@pytest.mark.parametrize("value", HOSTILE.values(), ids=HOSTILE)
def test_a_masked_hostile_row_changes_nothing_at_all(value, setting):
    data = good(active=False)
    hostile = {**with_row(data, value), "targets": data["targets"].at[ROW].set(-100)}
    wanted = run(setting, 1, data)
    assert broken(run(setting, 1, hostile), wanted) == []
    assert not any(wanted[name][ROW].any() for name in ("log_probs", "entropy", "hidden"))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_an_active_row_without_cotangent_reaches_no_gradient(value):
    """0 * NaN: the product of the weight's gradient must not see the row."""
    data = good(active=True)
    data["g_lp"], data["g_entropy"] = (data[name].at[ROW].set(0.0) for name in ("g_lp", "g_entropy"))
    wanted, seen = run(SETTING, 1, data), run(SETTING, 1, with_row(data, value))
    assert broken(seen, wanted, ["weight", "bias"]) == []
    assert not seen["hidden"][ROW].any()


@EVERY_PATH_AND_SIZE
@pytest.mark.parametrize("bad", [-1, VOCAB, -(2**31), 2**31 - 1])
def test_a_bad_id_changes_no_other_row(bad, size, setting):
    data = good(active=True)
    wanted, seen = run(setting, size, data), run(setting, size, {**data, "targets": data["targets"].at[ROW].set(bad)})
    assert broken(others(seen), others(wanted)) == []
    assert np.isnan(seen["log_probs"][ROW]) and np.isnan(seen["hidden"][ROW]).all()
    assert seen["entropy"][ROW] == wanted["entropy"][ROW], "entropy does not depend on the target"


@EVERY_PATH
def test_logits_of_six_million_are_logits_like_others(setting):
    """fp32 steps by 0.5 there: the largest one takes all, and its log-prob is exactly 0."""
    data = good(active=True)
    data["bias"] = jnp.zeros_like(data["bias"])
    data["hidden"] = data["hidden"].at[ROW].set(0.0).at[ROW, 0].set(6e6)
    data["weight"] = data["weight"].at[:, 0].set(0.5).at[data["targets"][ROW], 0].set(1.0).at[7, 0].set(-1.0)
    seen = run(setting, 1, data)
    assert seen["log_probs"][ROW] == seen["entropy"][ROW] == 0.0
    assert all(np.isfinite(value).all() for value in seen.values())
    other = run(setting, 1, {**data, "targets": data["targets"].at[ROW].set(7)})
    assert other["log_probs"][ROW] == -12e6


def test_a_hostile_row_of_the_weight_reaches_every_token_on_every_mesh():
    """An id with weight NaN is in every softmax: nothing may hide it."""
    data = good(active=True)
    data["weight"] = data["weight"].at[700].set(jnp.nan)
    for size in (1, 4):
        seen = run(SETTING, size, data)
        mask = np.asarray(data["mask"])
        assert np.isnan(seen["log_probs"][mask]).all() and not seen["log_probs"][~mask].any()
        assert not seen["hidden"][~mask].any()


@pytest.mark.slow
@given(
    seed=st.integers(0, 2**32 - 1),
    scale=st.floats(-8, 8),
    active=st.floats(0, 1),
    hostile=st.lists(st.tuples(st.integers(0, TOKENS - 1), st.sampled_from(sorted(HOSTILE))), max_size=3),
)
@settings(max_examples=15)
def test_any_values_and_masks_give_the_same_bytes_on_four_shards(seed, scale, active, hostile):
    """Hostile rows included, their own results too, with any NaN taken for any other: its sign is not promised."""
    data = case(VOCAB, TOKENS, seed=seed)
    data["hidden"] = data["hidden"] * jnp.float32(2.0**scale)
    for row, name in hostile:
        data["hidden"] = data["hidden"].at[row].set(HOSTILE[name])
    data["mask"] = jnp.asarray(np.random.default_rng(seed).random(TOKENS) < active)
    wanted, seen = run(SETTING, 1, data), run(SETTING, 4, data)
    finite = {name: np.nan_to_num(value, nan=7.0) for name, value in wanted.items()}
    assert broken({name: np.nan_to_num(value, nan=7.0) for name, value in seen.items()}, finite) == []
