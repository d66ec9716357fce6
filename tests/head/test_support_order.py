"""Engine ``fixed_order`` on a support: float64, exact zeros, and bits that no mesh, batch or order of the ids changes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxlogp import Support, linear_log_probs
from jaxlogp.head import FixedOrderEngine, record_head_runs
from jaxlogp.head.fixed_order import on_support
from jaxlogp.invariance import ReductionOrder
from tests.head.support_case import ALL_OPTIONS, Values, case, check, expected, gradients
from tests.head.test_support import BF16_ERROR, BROKEN, check_broken, mesh, over_ranks

ORDER = ReductionOrder()
VOCAB, SHAPE = 60, (3, 8)
numbers = functools.partial(gradients, engine="fixed_order")


def assert_equal_bits(seen, wanted):
    for name, one, other in zip(Values._fields, seen, wanted, strict=True):
        np.testing.assert_array_equal(np.asarray(one).view(np.int32), np.asarray(other).view(np.int32), err_msg=name)


def taken(data, order, spare=9):
    """The tokens of a case in another order, or some of them, as one row."""
    lists = [data["lists"][place] for place in order]
    rows = {
        name: np.asarray(data[name]).reshape(24, -1)[order]
        for name in ("hidden", "targets", "mask", "g_lp", "g_entropy")
    }
    rows = {name: x[None] if name == "hidden" else x[:, 0][None] for name, x in rows.items()}
    support = Support.from_lists(lists, capacity=sum(map(len, lists)) + spare, shape=(1, len(order)))
    return {**data, **rows, "lists": lists, "support": support}


@pytest.mark.parametrize("options", [{}, ALL_OPTIONS], ids=["plain", "all options"])
@pytest.mark.parametrize("layout", ["vh", "hv"])
def test_values_and_gradients_match_the_oracle(options, layout):
    data = case()
    given = data if layout == "vh" else {**data, "weight": data["weight"].T}
    seen = numbers(given, weight_layout=layout, **options)
    check(seen if layout == "vh" else seen._replace(weight=seen.weight.T), expected(data, **options))


@pytest.mark.costly
def test_narrow_operands_have_exact_products():
    data = case(dtype=jnp.bfloat16)
    seen = numbers(data)
    assert seen.hidden.dtype == seen.weight.dtype == jnp.bfloat16
    check(seen, expected(data), BF16_ERROR)


@pytest.mark.costly
def test_gradients_over_forty_orders_of_magnitude():
    """Every sum has a scale of its own: a large cotangent of one token takes no bit from a small one of another."""
    data = case()
    data["g_lp"] = data["g_lp"] * jnp.asarray(10.0 ** np.linspace(-20, 20, 24).reshape(SHAPE), jnp.float32)
    data["g_entropy"] = jnp.zeros(SHAPE)
    seen, wanted = numbers(data), expected(data)
    for place in np.ndindex(*SHAPE):
        bound = 2e-5 * np.abs(wanted.hidden[place]).max()
        np.testing.assert_allclose(seen.hidden[place], wanted.hidden[place], rtol=0, atol=bound)


@pytest.mark.parametrize("num_shards", [2, *(pytest.param(number, marks=pytest.mark.costly) for number in (3, 4))])
def test_bits_do_not_depend_on_the_vocabulary_mesh(num_shards):
    data = case()
    seen = over_ranks(data, ORDER.shards(VOCAB, num_shards), engine="fixed_order", **ALL_OPTIONS)
    assert_equal_bits(seen, numbers(data, **ALL_OPTIONS))


@pytest.mark.costly
def test_bits_do_not_depend_on_data_ranks():
    """Rows over two data ranks, which share one weight: its gradient is a sum over both."""
    data = case(tokens=(4, 6))
    halves = [Support.from_lists(data["lists"][at : at + 12], capacity=120, shape=(2, 6)) for at in (0, 12)]
    names = ("hidden", "targets", "mask", "g_lp", "g_entropy", "support")
    split = {**data, "support": jax.tree.map(lambda *parts: np.concatenate(parts), *halves)}
    specs = {name: P("data") if name in names else P("tensor") for name in (*names, "weight", "bias")}
    seen = over_ranks(split, ORDER.shards(VOCAB, 2), 2, specs, engine="fixed_order")
    assert_equal_bits(seen, numbers(data))


@pytest.mark.costly
def test_bits_depend_on_no_other_token_and_on_no_order():
    data, rng = case(), np.random.default_rng(3)
    whole, order = numbers(data), rng.permutation(24)
    turned = {**data, "lists": [rng.permutation(kept).astype(int).tolist() for kept in data["lists"]]}
    seen = numbers(taken(turned, order, spare=50))
    for name in ("log_probs", "entropy", "lse", "hidden"):
        flat = np.asarray(getattr(whole, name)).reshape(24, -1)[order]
        np.testing.assert_array_equal(np.asarray(getattr(seen, name)).reshape(24, -1), flat, err_msg=name)
    np.testing.assert_array_equal(seen.weight, whole.weight)
    np.testing.assert_array_equal(seen.bias, whole.bias)
    some = numbers(taken(data, order[:5]))
    np.testing.assert_array_equal(np.asarray(some.log_probs)[0], np.asarray(whole.log_probs).reshape(-1)[order[:5]])
    np.testing.assert_array_equal(np.asarray(some.hidden)[0], np.asarray(whole.hidden).reshape(24, -1)[order[:5]])


@pytest.mark.costly
def test_bits_do_not_depend_on_the_blocks(monkeypatch):
    """Blocks of 8 ids: most tokens have ids in two, and a sum is carried after each."""
    data = case()
    whole = numbers(data, **ALL_OPTIONS)
    monkeypatch.setattr(on_support, "BLOCK", 8)
    # An option that changes nothing else, for a program that has not been compiled yet.
    assert_equal_bits(numbers(data, frozen_head=False, **ALL_OPTIONS), whole)


MANY = 40_000
"""Terms of one sum: the limbs of each average 2^17, so that 2^31 is passed at 16,384 terms."""


@pytest.mark.costly
def test_a_token_of_more_ids_than_the_integers_hold_at_once():
    data = case(tokens=(1, 8), width=4, vocab=MANY, most=3)
    data |= {"lists": [list(range(MANY)), *[[]] * 7]}
    data["support"] = Support.from_lists(data["lists"], shape=(1, 8))
    check(numbers(data), expected(data))


@pytest.mark.costly
def test_a_row_of_more_tokens_than_the_integers_hold_at_once():
    """Every token has row 0 and its target, so that dW[0] = -Σ g p_0 hidden, whose terms have one sign."""
    rng = np.random.default_rng(0)
    hidden, targets = rng.uniform(1.0, 2.0, (MANY, 4)).astype(np.float32), rng.integers(1, VOCAB, MANY).astype(np.int32)
    weight = rng.normal(0.0, 0.1, (VOCAB, 4)).astype(np.float32)
    support = Support(np.stack([np.zeros(MANY, np.int32), targets], axis=1).reshape(-1), np.full(MANY, 2, np.int32))

    def total(weight):
        given = {"support": support, "engine": "fixed_order"}
        return linear_log_probs(jnp.asarray(hidden), weight, targets, **given).log_probs.sum()

    logits = np.einsum("nh,nh->n", *(x.astype(np.float64) for x in (hidden, weight[targets] - weight[:1])))
    wanted = -(1.0 / (1.0 + np.exp(logits))) @ hidden.astype(np.float64)
    np.testing.assert_allclose(jax.jit(jax.grad(total))(jnp.asarray(weight))[0], wanted, rtol=2e-5)


def test_one_id_gives_exactly_zero_and_no_gradient():
    data = case()
    lists = [[int(target)] for target in data["targets"].reshape(-1)]
    seen = numbers({**data, "support": Support.from_lists(lists, capacity=40, shape=SHAPE)}, **ALL_OPTIONS)
    assert not any(np.asarray(values).any() for values in seen._replace(lse=0.0))


def test_what_no_support_names_is_not_read_and_has_no_gradient():
    data = case()
    live = (data["support"].counts > 0) & data["mask"]
    kept = [ids for ids, alive in zip(data["lists"], live.reshape(-1), strict=True) if alive]
    named = np.isin(np.arange(VOCAB), np.concatenate(kept))
    assert 0 < (~named).sum() < 20
    hostile = {
        **data,
        "hidden": jnp.where(live[..., None], data["hidden"], jnp.nan),
        "weight": jnp.where(named[:, None], data["weight"], jnp.nan),
        "bias": jnp.where(named, data["bias"], jnp.nan),
    }
    seen = numbers(hostile)
    assert not any(np.asarray(x)[~live].any() for x in (seen.log_probs, seen.entropy, seen.hidden))
    assert not np.asarray(seen.weight)[~named].any() and not np.asarray(seen.bias)[~named].any()
    check(seen, expected(data))


def test_a_frozen_head_has_the_gradient_of_hidden_alone():
    data = case()
    check(numbers(data, frozen_head=True), expected(data)._replace(weight=np.zeros((60, 24)), bias=np.zeros(60)))


@pytest.mark.parametrize("name", BROKEN)
def test_under_jit_a_broken_support_gives_nan_for_its_token_alone(name):
    check_broken(name, numbers)


def test_operands_that_are_not_finite_give_nan():
    data = case()
    place = next(place for place in np.ndindex(*SHAPE) if len(data["lists"][place[0] * 8 + place[1]]) > 1)
    data["hidden"] = data["hidden"].at[place].set(jnp.inf)
    seen = numbers(data)
    assert np.isnan(seen.log_probs[place]) and np.isnan(seen.hidden[place]).all() and np.isnan(seen.weight).any()
    # Without a cotangent such a token adds nothing.
    seen = numbers(data | {name: data[name].at[place].set(0.0) for name in ("g_lp", "g_entropy")})
    assert np.isnan(seen.log_probs[place]) and np.isfinite(seen.weight).all() and np.isfinite(seen.hidden).all()


def test_the_engine_is_recorded_and_takes_the_vocabulary_too():
    data = case()
    call = functools.partial(linear_log_probs, data["hidden"], data["weight"], data["targets"], data["mask"])
    with record_head_runs() as runs:
        call(support=data["support"], engine=FixedOrderEngine())
        call(engine=FixedOrderEngine())
    assert [run.engine for run in runs] == ["fixed_order", "fixed_order"]


@pytest.mark.bad_input
def test_a_hidden_state_that_varies_over_the_vocabulary_axis_is_refused():
    data, shards = case(), ORDER.shards(VOCAB, 2)

    def local(hidden, weight):
        def total(hidden):
            options = {"support": data["support"], "axis_name": "tensor", "vocab": shards, "engine": "fixed_order"}
            return linear_log_probs(hidden, weight, data["targets"], data["mask"], **options).log_probs.sum()

        return jax.grad(total)(jax.lax.pcast(hidden, "tensor", to="varying"))

    specs = P(), P("tensor")
    mapped = jax.shard_map(local, mesh=mesh(1, 2), in_specs=specs, out_specs=P("tensor"))
    with pytest.raises(ValueError, match="^hidden: expected an array that is the same on all vocabulary shards"):
        jax.jit(mapped)(data["hidden"], shards.shard_rows(data["weight"]))
