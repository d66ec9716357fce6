"""Invariance over programs: what surrounds the head (jax.checkpoint, jax.vmap, a scan, no jit) changes no bit."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from jaxlogp import linear_log_probs
from jaxlogp.head.fixed_order import stats
from jaxlogp.head.fixed_order.stats import sum_columns
from jaxlogp.invariance.exact import one_minus_square, product, scaled
from jaxlogp.invariance.order import fold_halves, fold_tree
from tests.invariance.harness import FIXED, Setting, assert_same_bytes, broken, case, run

pytestmark = pytest.mark.costly

TOKENS = 72
SMALL, MEDIUM = Setting(FIXED, 257), Setting(FIXED, 1027)
RNG = np.random.default_rng(2)
TERMS = (RNG.random((64, 352)) * np.exp2(-RNG.integers(0, 40, (64, 352)))).astype(np.float32)


def check(setting, size, around, dtype=jnp.float32):
    """Against the head alone on one shard, whose bytes are those of any number."""
    data = case(setting.vocab, TOKENS, dtype)
    assert_same_bytes(run(setting._replace(around=around), size, data), run(setting, 1, data))


def test_vmap_around_the_head_changes_no_bit():
    check(MEDIUM, 1, "vmap")


def narrow_results(around):
    """Values and gradients outside of shard_map, 40 tokens of 24 features: there float sums over a tile broke."""
    data = case(257, 40)

    def head(hidden, weight, bias):
        return linear_log_probs(
            hidden, weight, data["targets"], mask=data["mask"], bias=bias, with_entropy=True, engine=FIXED
        )

    def total(hidden, weight, bias):
        found = around(head)(hidden, weight, bias)
        return jnp.sum(found.log_probs * data["g_lp"] + found.entropy * data["g_entropy"]), found

    run = jax.jit(jax.grad(total, argnums=(0, 1, 2), has_aux=True))
    gradients, found = run(data["hidden"][:, :24], data["weight"][:, :24], data["bias"])
    names = ("hidden", "weight", "bias", "log_probs", "entropy")
    return {name: np.asarray(x) for name, x in zip(names, (*gradients, found.log_probs, found.entropy), strict=True)}


def test_checkpoint_around_the_head_changes_no_bit():
    assert_same_bytes(narrow_results(jax.checkpoint), narrow_results(lambda head: head))


@pytest.mark.slow
@pytest.mark.parametrize(
    "setting, size, dtype, around",
    [
        (MEDIUM, 1, jnp.float32, "scan"),
        (SMALL, 4, jnp.bfloat16, "checkpoint"),
        (MEDIUM, 4, jnp.float32, "vmap"),
    ],
    ids=["fp32 V=1027, TP 1, scan", "bf16 V=257, TP 4, checkpoint", "fp32 V=1027, vmap"],
)
def test_what_surrounds_the_head_changes_no_bit_in_other_programs(setting, size, dtype, around):
    check(setting, size, around, dtype)


def values_one_and_two_at_a_time(tokens=TOKENS):
    """Forward only: log-probs and entropies of a batch as one of two under vmap, and alone."""
    data = case(1027, tokens)

    def head(hidden):
        return linear_log_probs(hidden, data["weight"], data["targets"], with_entropy=True, engine=FIXED)

    both = jnp.stack([data["hidden"], data["hidden"][::-1]])
    two, one = jax.jit(jax.vmap(head))(both), jax.jit(head)(both[0])
    two = jax.tree.map(lambda x: x[0], two)
    return [{"log_probs": np.asarray(x.log_probs), "entropy": np.asarray(x.entropy)} for x in (two, one)]


@pytest.mark.slow
def test_a_plain_sum_over_a_tile_breaks_under_vmap(monkeypatch):
    """The negative control: the order of a float sum is the surrounding program's."""
    assert_same_bytes(*values_one_and_two_at_a_time())
    monkeypatch.setattr(stats, "sum_columns", lambda terms: jnp.sum(terms, axis=-1))
    # Other shapes, because the head keeps its traced programs.
    assert "entropy" in broken(*values_one_and_two_at_a_time(TOKENS + 1))


@pytest.mark.slow
def test_values_without_entropy_and_without_gradients_are_the_same():
    """Another compiled program, forward only, down to one operation at a time outside of jit."""
    data = case(MEDIUM.vocab, TOKENS)
    wanted = run(MEDIUM, 1, data)["log_probs"]
    args = data["hidden"], data["weight"], data["targets"]
    options = {"mask": data["mask"], "bias": data["bias"], "engine": FIXED}
    for function in (jax.jit(linear_log_probs, static_argnames="engine"), linear_log_probs):
        assert np.asarray(function(*args, **options).log_probs).tobytes() == wanted.tobytes()


# --- the parts: with and without jit, one at a time and many -----------------------------------------------


PARTS = {
    "sum_columns": (sum_columns, (TERMS,)),
    "fold_halves": (fold_halves, (TERMS,)),
    "fold_tree": (lambda x: fold_tree(x, jnp.add), (TERMS[:37],)),
    "product before an addition": (lambda x, y: product(x, y) + y, (TERMS, TERMS[::-1])),
    "scaled before an addition": (lambda x, y: scaled(x, 0.7) + y, (TERMS, TERMS[::-1])),
    "one_minus_square": (one_minus_square, (TERMS,)),
}


class Parts(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True)
    @parameterized.named_parameters((name, *part) for name, part in PARTS.items())
    def test_no_program_changes_a_bit(self, function, arrays):
        batches = [np.stack([x, x[::-1]]) for x in arrays]
        wanted = np.asarray(jax.jit(jax.vmap(function))(*batches)[0])
        seen = np.asarray(self.variant(function)(*arrays))
        chex.assert_trees_all_equal(seen, wanted)
        assert seen.tobytes() == wanted.tobytes()


def test_a_sum_over_columns_has_no_order():
    wanted = np.asarray(sum_columns(TERMS))
    orders = [RNG.permutation(TERMS.shape[1]) for _ in range(5)]
    for order in orders:
        assert np.asarray(sum_columns(TERMS[:, order])).tobytes() == wanted.tobytes()
    floats = [np.add.accumulate(TERMS[:, order], axis=1)[:, -1] for order in orders]
    assert any(x.tobytes() != floats[0].tobytes() for x in floats), "a sum of floats must show its order here"


@pytest.mark.parametrize("columns", [1, 16, 352, 1024, 4096])
def test_a_sum_over_columns_is_accurate_and_does_not_overflow(columns):
    rng = np.random.default_rng(columns)
    rows = [np.ones(columns), -np.ones(columns), np.exp(-rng.exponential(4.0, columns)), -rng.random(columns)]
    terms = np.asarray(rows, np.float32)
    seen, wanted = np.asarray(sum_columns(terms)), terms.astype(np.float64).sum(axis=1)
    # Two conversions and an addition; a term is rounded at 2^-2 bits, where 2^(30 - bits) columns fit into int32.
    bits = 30 - (columns - 1).bit_length()
    assert (np.abs(seen - wanted) <= 3 * 2.0**-24 * np.abs(wanted) + columns * 2.0 ** (-2 * bits - 1)).all()
    assert seen[0] == columns == -seen[1]
