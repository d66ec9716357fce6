"""check_invariance: it must find what breaks, and say where and by how much."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlogp import check_invariance
from jaxlogp.invariance.check import compare_bits

TOKENS, HIDDEN, VOCAB = 24, 32, 256
RNG = np.random.default_rng(0)
DATA = (
    jnp.asarray(RNG.normal(size=(TOKENS, HIDDEN)), jnp.float32),
    jnp.asarray(RNG.normal(size=(VOCAB, HIDDEN)), jnp.float32),
    jnp.asarray(RNG.integers(0, VOCAB, TOKENS), jnp.int32),
)


def exact(hidden, weight, targets):
    """A function without any sum: nothing can change it."""
    return hidden[:, 0] + weight[targets, 0]


def check(function, **options):
    return check_invariance(function, *DATA, num_shards=options.pop("num_shards", ()), **options)


def by_name(report):
    return {difference.change: difference for difference in report.differences}


def test_a_function_that_nothing_can_change_passes():
    report = check(exact, num_shards=(2, 8))
    assert report.broken == report.not_run == () and report.num_non_finite == 0
    assert len(report.differences) == 19 and "0 of 19 changes made a difference; 0 not run" in str(report)


def another_when_traced_by(*tracers):
    """Stands for a function whose bits the surrounding program decides."""
    return lambda h, w, t: exact(h, w, t) * jnp.float32(1.5 if type(h).__name__ in tracers else 1.0)


BROKEN = {
    "the batch": (
        lambda h, w, t: exact(h, w, t) + jnp.sum(h) * 0 + len(t) * 1e-3,
        {"one token", "every token twice", "others NaN"},
    ),
    "the position": (
        lambda h, w, t: exact(h, w, t) + jnp.arange(len(t), dtype=jnp.float32) * 1e-3,
        {"reversed", "zeros before"},
    ),
    "the neighbour": (lambda h, w, t: exact(h, w, t) + 1e-3 * jnp.roll(h[:, 1], 1), {"permuted", "others NaN"}),
    "the largest of all": (lambda h, w, t: exact(h, w, t) + 1e-6 * jnp.max(h), {"others 1000 times larger"}),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_depends_on_something_else_is_found(name):
    function, found = BROKEN[name]
    assert found <= set(check(function).broken)


def test_a_difference_of_jit_is_found():
    def function(h, w, t):
        return exact(h, w, t) + (0.0 if isinstance(h, jax.core.Tracer) else 1e-3)

    assert check(function).broken == ("without jit",)


def test_a_difference_of_the_program_around_it_is_found():
    assert check(another_when_traced_by("BatchTracer")).broken == ("under jax.vmap",)
    differentiated = another_when_traced_by("LinearizeTracer", "JVPTracer")
    assert check(differentiated).broken == ("gradient under jax.checkpoint",)


def test_a_wrong_sharded_function_is_found_and_named():
    def wrong(hidden, weight, targets):
        return exact(hidden, weight, targets) * np.float32(1 + 2**-20)

    report = check(exact, sharded={2: wrong}, num_shards=(2, 4))
    assert report.broken == ("vocabulary over 2 devices",)
    difference = by_name(report)["vocabulary over 2 devices"]
    assert 8 <= difference.max_ulps <= 16 and not difference.equal
    assert f"{difference.worst_token}: {difference.value:.9g}, was {difference.reference:.9g}" in str(report)


def test_more_devices_than_there_are_is_said_and_is_no_pass():
    report = check(exact, num_shards=(4096,))
    assert report.not_run == ("vocabulary over 4096 devices",) and not report.differences[-1].equal
    assert "NOT RUN: 8 cpu device(s)" in str(report)


def test_a_vector_for_each_token_may_be_compared():
    report = check(lambda h, w, t: h * 2.0)
    assert report.broken == () and "gradient under jax.checkpoint" not in by_name(report)


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.float16])
def test_distances_are_units_in_the_last_place(dtype):
    wanted = np.asarray([1.0, -1.0, 0.0, 3.0], dtype)
    bits = wanted.view(f"i{wanted.dtype.itemsize}").copy()
    bits[1] += 5
    seen = bits.view(dtype)
    difference = compare_bits("x", seen, wanted, np.array([10, 11, 12, 13]))
    assert (difference.num_differing, difference.max_ulps, difference.worst_token) == (1, 5, 11)
    assert difference.reference == -1.0 and difference.value < -1.0


def test_across_zero_and_signed_zeros():
    tiny = np.float32(np.finfo(np.float32).smallest_subnormal)
    across = compare_bits("x", np.array([tiny]), np.array([-tiny]), np.array([0]))
    assert across.max_ulps == 2
    zeros = compare_bits("x", np.float32([-0.0]), np.float32([0.0]), np.array([0]))
    assert zeros.num_differing == 1 and zeros.max_ulps == 0 and not zeros.equal


def test_nan_against_a_number_is_the_worst_and_nan_against_itself_shows_nothing():
    wanted = np.float32([1.0, np.nan, 2.0])
    itself = compare_bits("x", wanted.copy(), wanted, np.arange(3))
    assert (itself.num_differing, itself.num_non_finite, itself.equal) == (0, 1, False)
    seen = np.float32([5.0, np.nan, np.nan])
    difference = compare_bits("x", seen, wanted, np.arange(3))
    assert difference.max_ulps is None and difference.worst_token == 2
    assert difference.num_differing == difference.num_non_finite == 2
    assert "NaN" in str(check(lambda h, w, t: exact(h, w, t) + 0 * jnp.roll(h[:, 0], 1)))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_function_that_is_not_finite_does_not_pass(bad):
    def function(h, w, t):
        return jnp.where(jnp.max(h, axis=1) > 2.0, jnp.float32(bad), exact(h, w, t))

    hot = np.flatnonzero(np.max(np.asarray(DATA[0]), axis=1) > 2.0)
    report = check(function)
    assert (report.num_non_finite, report.first_non_finite) == (len(hot), hot[0]) and len(hot) > 1
    assert by_name(report)["run again"].num_non_finite == len(hot) and "run again" in report.broken
    assert by_name(report)["run again"].num_differing == 0
    assert f"NOT FINITE: {len(hot)} tokens of the unchanged batch, first {hot[0]}" in str(report)


def test_a_function_of_nan_alone_breaks_under_every_change():
    report = check(lambda h, w, t: exact(h, w, t) * jnp.float32(np.nan))
    assert len(report.broken) == len(report.differences) - len(report.not_run) and report.num_non_finite == TOKENS


def test_float64_of_far_ends_is_no_small_distance():
    """Their distance in floats is beyond int64."""
    difference = compare_bits("x", np.array([1e300]), np.array([-1e300]), np.array([0]))
    assert difference.max_ulps > 2**63


def test_padding_leaves_float64_as_it_is():
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        data = rng.normal(size=(TOKENS, HIDDEN)), rng.normal(size=(VOCAB, HIDDEN)), rng.integers(0, VOCAB, TOKENS)
        report = check_invariance(exact, *data, num_shards=())
    assert report.broken == ()


def test_what_jax_cannot_map_or_differentiate_is_not_run_and_says_why():
    def function(h, w, t):
        return jax.pure_callback(lambda h: np.asarray(h)[:, 0], jax.ShapeDtypeStruct(t.shape, h.dtype), h)

    report = check(function)
    assert set(report.not_run) == {"under jax.vmap", "gradient under jax.checkpoint"} and report.broken == ()
    assert "NOT RUN: ValueError" in str(report) or "NOT RUN: NotImplementedError" in str(report)


BAD = {
    "hidden": lambda h, w, t: check_invariance(exact, h[:4], w, t[:4]),
    "weight": lambda h, w, t: check_invariance(exact, h, w[:, :3], t),
    "targets": lambda h, w, t: check_invariance(exact, h, w, t[:3]),
    "chunk": lambda h, w, t: check_invariance(exact, h, w, t, chunk=0),
    "function": lambda h, w, t: check_invariance(lambda h, w, t: jnp.sum(h), h, w, t),
    "function ": lambda h, w, t: check_invariance(lambda h, w, t: t, h, w, t),
    "weight ": lambda h, w, t: check_invariance(exact, h, w[:255], t % 255, num_shards=(2,)),
}


@pytest.mark.bad_input
@pytest.mark.parametrize("name", BAD)
def test_bad_input_names_the_argument(name):
    with pytest.raises(ValueError, match=f"^{name.strip()}: expected "):
        BAD[name](*DATA)
