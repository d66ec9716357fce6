"""Log-probs on a support against float64, their exact zeros, over vocabulary shards, and the memory they take."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxlogp import (
    Support,
    VocabShards,
    linear_log_probs,
    linear_policy_loss,
    policy_loss,
    sharded_linear_log_probs,
)
from jaxlogp.head import record_head_runs, registry
from jaxlogp.head.support.engine import SupportEngine
from jaxlogp.losses import grpo, gspo
from tests import oracle
from tests.head import support_case
from tests.head.support_case import ALL_OPTIONS, VALUE_ERROR, Values, case, check, expected, gradients

# bf16 gradients are rounded once, by 2^-9 an entry at most.
BF16_ERROR = 2.0**-9


@pytest.fixture
def small_blocks(monkeypatch):
    """Several blocks of ids, the last not full, and of columns, the last overlapping the one before it."""
    monkeypatch.setattr(registry, "AUTOMATIC_ON_SUPPORT", (SupportEngine(block_elements=256, block_columns=10),))


@pytest.mark.parametrize("layout", ["vh", "hv"])
@pytest.mark.parametrize("options", [{}, ALL_OPTIONS], ids=["plain", "all options"])
def test_values_and_gradients_match_the_oracle(options, layout):
    data = case()
    wanted = expected(data, **options)
    given = data if layout == "vh" else {**data, "weight": data["weight"].T}
    seen = gradients(given, weight_layout=layout, **options)
    check(seen if layout == "vh" else seen._replace(weight=seen.weight.T), wanted)


@pytest.mark.parametrize("layout", ["vh", "hv"])
def test_blocks_of_ids_and_columns_change_nothing(small_blocks, layout):
    data = case()
    given = data if layout == "vh" else {**data, "weight": data["weight"].T}
    seen = gradients(given, weight_layout=layout, **ALL_OPTIONS)
    check(seen if layout == "vh" else seen._replace(weight=seen.weight.T), expected(data, **ALL_OPTIONS))


@pytest.mark.parametrize("layout", ["vh", "hv"])
def test_nothing_of_uninitialised_gradients_is_left(monkeypatch, layout):
    monkeypatch.setattr(jax.lax, "empty", lambda shape, dtype: jnp.full(shape, jnp.nan, dtype))
    # A size of its own, for which nothing has been traced before.
    monkeypatch.setattr(registry, "AUTOMATIC_ON_SUPPORT", (SupportEngine(block_columns=7),))
    data = case()
    seen = gradients(data if layout == "vh" else {**data, "weight": data["weight"].T}, weight_layout=layout)
    assert np.isfinite(np.asarray(seen.hidden)).all() and np.isfinite(np.asarray(seen.weight)).all()


@pytest.mark.parametrize("dtypes", [("bfloat16", "bfloat16"), ("float32", "bfloat16"), ("bfloat16", "float32")])
def test_narrow_operands_have_exact_products(dtypes):
    """Hidden states are rounded to the weight's dtype; values are those of float64 on these operands."""
    data = case(dtype=jnp.dtype(dtypes[0]), weight_dtype=jnp.dtype(dtypes[1]))
    seen = gradients(data)
    rounded = {**data, "hidden": data["hidden"].astype(dtypes[1])}
    assert (seen.hidden.dtype, seen.weight.dtype) == dtypes
    check(seen, expected(rounded), BF16_ERROR)


def test_fp32_head_rounds_no_hidden_state():
    data = case(weight_dtype=jnp.bfloat16)
    check(gradients(data, fp32_head=True), expected(data), BF16_ERROR)


def test_fp16_keeps_small_gradients():
    """A cotangent of 1e-6 would leave fp16 products of 0."""
    data = case(dtype=jnp.float16)
    small = {name: 1e-6 * data[name] for name in ("g_lp", "g_entropy")}
    seen, wanted = gradients({**data, **small}), expected({**data, **small})
    # Of the two only the gradients of hidden and weight are stored in fp16, whose steps are 2^-24 there.
    assert oracle.relative_error(seen.bias, wanted.bias) < support_case.GRADIENT_ERROR
    for name in ("hidden", "weight"):
        assert np.abs(oracle.f64(getattr(seen, name)) - getattr(wanted, name)).max() <= 2.0**-24, name


def test_the_whole_vocabulary_gives_the_numbers_of_the_full_head():
    data = case(vocab=96)
    everything = [np.random.default_rng(1).permutation(96).tolist() for _ in data["lists"]]
    whole = {**data, "lists": everything, "support": Support.from_lists(everything, shape=(3, 8))}
    seen = gradients(whole, **ALL_OPTIONS)
    full = gradients({**data, "support": None}, **ALL_OPTIONS)
    # Two fp32 computations, each within the contract's bound of float64.
    check(seen, support_case.Values(*map(oracle.f64, full)), 2 * support_case.GRADIENT_ERROR)
    check(full, expected(whole, **ALL_OPTIONS))


@pytest.mark.parametrize("options", [{}, ALL_OPTIONS], ids=["plain", "all options"])
def test_one_id_gives_exactly_zero_and_no_gradient(options):
    data = case()
    lists = [[int(target)] for target in data["targets"].reshape(-1)]
    seen = gradients({**data, "support": Support.from_lists(lists, capacity=40, shape=(3, 8))}, **options)
    assert not any(np.asarray(values).any() for values in seen._replace(lse=0.0))
    assert np.asarray(seen.lse)[data["mask"]].all()


def test_tokens_without_ids_and_masked_tokens_are_exactly_zero():
    """Whatever their hidden states and targets hold, and whatever ids a masked token has."""
    data = case()
    dead = (data["support"].counts == 0) | ~data["mask"]
    assert 5 < dead.sum() < 10
    hostile = {
        **data,
        "hidden": jnp.where(dead[..., None], jnp.nan, data["hidden"]),
        "targets": np.where(dead, -100, data["targets"]),
        "g_lp": jnp.where(dead, jnp.nan, data["g_lp"]),
        "g_entropy": jnp.where(dead, jnp.nan, data["g_entropy"]),
    }
    starts = np.cumsum(data["support"].counts.reshape(-1)) - data["support"].counts.reshape(-1)
    ids = data["support"].ids.copy()
    ids[starts[6] : starts[7]] = 10**6
    hostile["support"] = Support(ids, data["support"].counts)
    clean, seen = _gradients_of_values(data), _gradients_of_values(hostile)
    for values in (seen.log_probs, seen.entropy, seen.lse, seen.hidden):
        assert not np.asarray(values)[dead].any()
    for name in ("log_probs", "hidden", "weight", "bias"):
        np.testing.assert_array_equal(getattr(seen, name), getattr(clean, name), err_msg=name)


def _gradients_of_values(data):
    """As `gradients`, by the pullback: a sum of NaN times 0 has no gradient to look at."""

    def values(hidden, weight, bias):
        options = {"bias": bias, "support": data["support"], "with_entropy": True, "with_lse": True}
        return linear_log_probs(hidden, weight, data["targets"], data["mask"], **options)

    result, pull_back = jax.vjp(values, data["hidden"], data["weight"], data["bias"])
    return support_case.Values(*result, *pull_back(type(result)(data["g_lp"], data["g_entropy"], jnp.zeros((3, 8)))))


def test_rows_that_no_support_names_are_not_read_and_have_no_gradient():
    data = case()
    live = (data["support"].counts > 0) & data["mask"]
    alive = zip(data["lists"], live.reshape(-1), strict=True)
    named = np.isin(np.arange(60), np.concatenate([kept for kept, counts in alive if counts]).astype(int))
    assert 0 < (~named).sum() < 20
    hostile = {
        **data,
        "weight": jnp.where(named[:, None], data["weight"], jnp.nan),
        "bias": jnp.where(named, data["bias"], jnp.nan),
    }
    seen = gradients(hostile)
    assert not np.asarray(seen.weight)[~named].any() and not np.asarray(seen.bias)[~named].any()
    check(seen, expected(data))


def test_a_frozen_head_has_the_gradient_of_hidden_alone():
    data = case()
    seen = gradients(data, frozen_head=True)
    check(seen, expected(data)._replace(weight=np.zeros((60, 24)), bias=np.zeros(60)))


def test_a_removed_target_has_exact_zeros():
    """A bias of -inf removes the column: its log-prob is a constant -inf, as in the full head."""
    data = case()
    token = (0, 2)
    bias = data["bias"].at[data["targets"][token]].set(-jnp.inf)
    seen = gradients({**data, "bias": bias, "g_entropy": jnp.zeros((3, 8))})
    assert seen.log_probs[token] == -np.inf and np.isfinite(seen.entropy).all()
    assert seen.bias[data["targets"][token]] == 0.0
    assert all(np.isfinite(values).all() for values in (seen.hidden, seen.weight, seen.bias))


# --- over shards ---------------------------------------------------------------------------------------------------

SPECS = {"hidden": P(), "weight": P("tensor"), "bias": P("tensor"), "targets": P(), "mask": P(), "g_lp": P()}
SPECS |= {"g_entropy": P(), "support": P()}


def mesh(data_ranks, vocab_ranks):
    devices = jax.devices()[: data_ranks * vocab_ranks]
    return jax.make_mesh((data_ranks, vocab_ranks), ("data", "tensor"), (AxisType.Auto,) * 2, devices=devices)


def over_ranks(data, shards, data_ranks=1, specs=SPECS, **options):
    """`gradients` in a shard_map; the gradient is taken inside."""

    def local(given):
        return gradients(given, axis_name="tensor", vocab=shards, **options)

    out = support_case.Values(*(specs["g_lp"],) * 3, specs["hidden"], P("tensor"), P("tensor"))
    given = {name: data[name] for name in specs}
    given |= {name: shards.shard_rows(data[name]) for name in ("weight", "bias")}
    mapped = jax.shard_map(local, mesh=mesh(data_ranks, shards.num_shards), in_specs=(specs,), out_specs=out)
    seen = jax.jit(mapped)(given)
    return seen._replace(weight=shards.unshard_rows(seen.weight), bias=shards.unshard_rows(seen.bias))


@pytest.mark.parametrize(
    "shards",
    [
        VocabShards.even(60, 1),
        VocabShards.even(60, 2),
        VocabShards.from_ranges([(0, 3), (3, 30), (30, 31), (31, 60)], 60),
    ],
    ids=lambda shards: str(shards.num_shards),
)
def test_shards_give_the_unsharded_numbers(shards):
    """With four ranks most supports have no id on one of them."""
    data = case()
    check(over_ranks(data, shards, **ALL_OPTIONS), expected(data, **ALL_OPTIONS))


def test_one_id_over_shards_gives_exactly_zero():
    data = case()
    lists = [[int(target)] for target in data["targets"].reshape(-1)]
    data["support"] = Support.from_lists(lists, shape=(3, 8))
    seen = over_ranks(data, VocabShards.even(60, 4))
    assert not any(np.asarray(values).any() for values in seen._replace(lse=0.0))


def test_every_data_rank_has_its_own_support():
    """Rows over two data ranks and the vocabulary over two: each rank's ids stand in its part of the flat ids."""
    data = case(tokens=(4, 6))
    halves = [Support.from_lists(data["lists"][at : at + 12], capacity=120, shape=(2, 6)) for at in (0, 12)]
    data["support"] = jax.tree.map(lambda *parts: np.concatenate(parts), *halves)
    specs = {name: P("data") if spec == P() else spec for name, spec in SPECS.items()}
    check(over_ranks(data, VocabShards.even(60, 2), 2, specs), expected(data))


@pytest.mark.costly
@pytest.mark.parametrize("explicit", [False, True], ids=["sharded", "plain with Explicit axes"])
def test_global_functions_split_the_support_with_the_tokens(explicit):
    data = case(tokens=(4, 6))
    wanted, lists = expected(data, **ALL_OPTIONS), data["lists"]
    axes = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Explicit,) * 2)
    operands = [data[name] for name in ("hidden", "weight", "bias")]
    specs = P("data", None, None), P("tensor", None), P("tensor")
    placed = [jax.device_put(x, jax.NamedSharding(axes, spec)) for x, spec in zip(operands, specs, strict=True)]
    given = {"mask": data["mask"], "with_entropy": True, "with_lse": True, **ALL_OPTIONS}

    def values(hidden, weight, bias):
        options = {**given, "bias": bias, "support": Support.from_lists(lists, capacity=200, shape=(4, 6))}
        if explicit:
            return linear_log_probs(hidden, weight, data["targets"], **options)
        return sharded_linear_log_probs(hidden, weight, data["targets"], mesh=axes, **options)

    def total(*operands):
        found = values(*operands)
        return jnp.sum(found.log_probs * data["g_lp"]) + jnp.sum(found.entropy * data["g_entropy"])

    with jax.set_mesh(axes):
        found = values(*placed)
        hidden, weight, bias = jax.grad(total, argnums=(0, 1, 2))(*placed)
    check(Values(found.log_probs, found.entropy, found.lse, hidden, weight, bias), wanted)


def test_tokens_split_over_the_vocabulary_axis():
    """Sequence parallelism: hidden states of a part of the tokens, targets and support of all."""
    data = case()
    seen = over_ranks(data, VocabShards.even(60, 2), specs={**SPECS, "hidden": P(None, "tensor")}, sequence_dim=1)
    check(seen, expected(data))


def test_supports_that_differ_between_shards_give_nan():
    data = case()
    other = [list(kept) for kept in data["lists"]]
    token, masked = 7, next(i for i, kept in enumerate(other) if kept and not data["mask"].flat[i])
    # Two other ids of the same sum; a masked token may have any.
    rest = [kept for kept in other[token] if kept != data["targets"].flat[token]]
    spare = [i for i in range(60) if i not in other[token]]
    first, second = next((i, j) for i in spare for j in spare if i < j and i + j == rest[0] + rest[1])
    other[token] = [int(data["targets"].flat[token]), first, second, *rest[2:]]
    other[masked][0] = next(i for i in range(60) if i not in other[masked])
    size = data["support"].ids.size
    both = [data["support"], Support.from_lists(other, capacity=size, shape=(3, 8))]
    data["support"] = jax.tree.map(lambda *parts: np.concatenate(parts), *both)
    shards = VocabShards.even(60, 2)

    def local(given):
        # Of varying type, as values of differing supports are.
        support = Support(given["ids"], given["counts"])
        options = {"bias": given["bias"], "support": support, "axis_name": "tensor", "vocab": shards}
        return linear_log_probs(given["hidden"], given["weight"], given["targets"], given["mask"], **options).log_probs

    given = {name: data[name] for name in ("hidden", "weight", "bias", "targets", "mask")}
    given |= {"ids": data["support"].ids, "counts": data["support"].counts}
    specs = {name: SPECS.get(name, P("tensor")) for name in given}
    mapped = jax.shard_map(local, mesh=mesh(1, 2), in_specs=(specs,), out_specs=P("tensor"))
    log_probs = np.asarray(jax.jit(mapped)(given)).reshape(2, -1)
    for seen in log_probs:
        assert np.flatnonzero(np.isnan(seen)).tolist() == [token]


# --- what is not known before the program runs -----------------------------------------------------------------------


def broken_supports():
    """name: (support with one wrong token, which token, whether its entropy is known all the same)."""
    support = case()["support"]
    counts, ids = support.counts.reshape(-1), support.ids
    starts = np.cumsum(counts) - counts
    token = 7
    first = slice(starts[token], starts[token] + counts[token])
    target = case()["targets"].flat[token]
    missing, outside, twice = ids.copy(), ids.copy(), ids.copy()
    spare = [i for i in range(60) if i not in ids[first]]
    missing[first][ids[first] == target] = spare[0]
    other = np.flatnonzero(ids[first] != target)[0]
    outside[first][other] = 60
    twice[first][other] = target
    alone = ids.copy()
    alone[starts[4]] = 60
    last = np.flatnonzero(counts)[-1]
    return {
        "no target": (Support(missing, support.counts), token, True),
        "an id outside": (Support(outside, support.counts), token, False),
        "a negative id": (Support(np.where(outside == 60, -1, outside), support.counts), token, False),
        "one id, outside": (Support(alone, support.counts), 4, False),
        "the target twice": (Support(twice, support.counts), token, False),
        "more ids than the capacity": (Support(ids[: counts.sum() - 1], support.counts), int(last), False),
    }


BROKEN = broken_supports()


def check_broken(name, numbers):
    """Only the wrong token of a support is NaN in what ``numbers`` gives, and the others keep their bits."""
    support, token, has_entropy = BROKEN[name]
    data = case()
    clean, seen = numbers(data), numbers({**data, "support": support})
    broken = np.arange(24) == token
    assert np.isnan(seen.log_probs.reshape(-1)[token]) and np.isnan(seen.hidden.reshape(24, -1)[token]).all()
    assert np.isnan(seen.entropy.reshape(-1)[token]) != has_entropy
    for values, others in zip(seen[:4], clean[:4], strict=True):
        values, others = (np.asarray(x).reshape(24, -1)[~broken] for x in (values, others))
        np.testing.assert_array_equal(values, others)


@pytest.mark.parametrize("name", BROKEN)
def test_under_jit_a_broken_support_gives_nan_for_its_token_alone(name):
    check_broken(name, gradients)


@pytest.mark.parametrize("count", [-1, 2**31 - 1])
def test_under_jit_a_count_that_misplaces_ids_gives_nan(count):
    data = case()
    counts = data["support"].counts.copy()
    counts.flat[2] = count
    seen = gradients({**data, "support": Support(data["support"].ids, counts)})
    live = data["mask"] & (counts != 0)
    after = np.arange(24).reshape(3, 8) >= 2
    assert np.isnan(np.asarray(seen.log_probs)[live & after]).all()


@pytest.mark.bad_input
def test_known_ids_and_options_are_refused():
    data = case()
    call = functools.partial(linear_log_probs, data["hidden"], data["weight"], data["targets"], data["mask"])
    messages = {
        "no target": r"^support.ids: expected the target \d+ among the ids of the token at position \(0, 7\), got \[",
        "an id outside": r"^support.ids: expected ids in \[0, 60\), got 60 of the token at position \(0, 7\)",
        "a negative id": r"^support.ids: expected ids in \[0, 60\), got -1 of the token at position \(0, 7\)",
        "the target twice": r"^support.ids: expected distinct ids in a token, got \d+ twice .* position \(0, 7\)",
        "more ids than the capacity": r"^support.ids: expected a capacity of at least \d+, the sum of counts, got \d+",
    }
    for name, message in messages.items():
        with pytest.raises(ValueError, match=message):
            call(support=BROKEN[name][0])
    with pytest.raises(ValueError, match=messages["the target twice"]):
        # Also where the targets are not known.
        options = {"mask": data["mask"], "support": BROKEN["the target twice"][0]}
        jax.eval_shape(lambda x: linear_log_probs(data["hidden"], data["weight"], x, **options), data["targets"])
    support = data["support"]
    for changes, message in (
        ({"support": [1]}, "^support: expected a Support, got list"),
        ({"support": Support(support.ids, support.counts.reshape(-1))}, r"^support.counts: expected shape \(3, 8\)"),
        ({"support": Support(support.ids[:0], support.counts)}, r"^support.ids: expected shape \[capacity\]"),
        ({"support": Support(support.ids * 1.0, support.counts)}, "^support.ids: expected .* integer dtype"),
        ({"support": Support(support.ids, -support.counts)}, r"^support.counts: .* at least 0, got -1 at .*\(0, 0\)"),
        ({"support": support, "out_of_vocab": "zero"}, "^out_of_vocab: expected 'error' with a support"),
        ({"support": support, "engine": "chunked"}, "^engine: expected a call that 'chunked' takes, got one on a sup"),
        ({"engine": SupportEngine()}, "^engine: expected a call that 'support' takes, got one without"),
    ):
        with pytest.raises(ValueError, match=message):
            call(**changes)
    lists = [*data["lists"][:-1], [(int(data["targets"].flat[-1]) + 1) % 60]]
    missing = Support.from_lists(lists, capacity=support.ids.size, shape=(3, 8))
    with pytest.raises(
        ValueError, match=r"^support.ids: expected the target \d+ among the ids of the token at .*\(2, 7\)"
    ):
        sharded_linear_log_probs(data["hidden"], data["weight"], data["targets"], mesh=mesh(1, 2), support=missing)


@pytest.mark.bad_input
def test_a_second_derivative_is_refused():
    data = case()

    def total(hidden):
        options = {"support": data["support"]}
        return linear_log_probs(hidden, data["weight"], data["targets"], data["mask"], **options).log_probs.sum()

    with pytest.raises(ValueError, match="^engine: expected one whose gradient can be differentiated again"):
        jax.grad(lambda hidden: jnp.sum(jax.grad(total)(hidden)))(data["hidden"])


def test_the_engine_is_recorded():
    data = case()
    with record_head_runs() as runs:
        linear_log_probs(data["hidden"], data["weight"], data["targets"], data["mask"], support=data["support"])
    reason = "auto; support_kernels not used: it needs an NVIDIA GPU of compute capability 8.0 or more, "
    reason += "the default device is cpu (cpu)"
    assert [(run.engine, run.reason, run.num_vocab_shards) for run in runs] == [("support", reason, 1)]


# --- losses ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "loss",
    [grpo(), grpo(entropy_coefficient=0.1, z_loss_coefficient=0.01), gspo()],
    ids=["grpo", "with entropy and z", "gspo"],
)
def test_a_policy_loss_is_that_of_the_log_probs(loss):
    """Tokens without ids are no labels: they are in neither the sum nor the count."""
    data = case()
    rng = np.random.default_rng(5)
    old = jnp.asarray(np.minimum(expected(data).log_probs + rng.normal(0.0, 0.2, (3, 8)), 0.0), jnp.float32)
    advantages = jnp.asarray(rng.normal(size=(3, 8)), jnp.float32)
    operands = data["hidden"], data["weight"], data["bias"]
    given = old, advantages

    def in_one_call(hidden, weight, bias):
        options = {"bias": bias, "support": data["support"], "loss": loss}
        return linear_policy_loss(hidden, weight, data["targets"], *given, data["mask"], **options)[0]

    def in_two(hidden, weight, bias):
        options = {"bias": bias, "support": data["support"], "with_entropy": True}
        values = linear_log_probs(hidden, weight, data["targets"], data["mask"], **options)
        mask = data["mask"] & (data["support"].counts > 0)
        return policy_loss(
            values.log_probs, *given, mask, loss=loss, entropy=values.entropy, lse=lse_of(hidden, weight, bias)
        )

    def lse_of(hidden, weight, bias):
        raw = jnp.einsum("bth,vh->btv", hidden, weight, precision="highest") + bias[None, None]
        kept = np.zeros((24, 60), bool)
        for row, ids in zip(kept, data["lists"], strict=True):
            row[ids or 0] = True
        return jax.nn.logsumexp(jnp.where(kept.reshape(3, 8, 60), raw, -jnp.inf), axis=-1)

    totals = [jax.jit(function)(*operands) for function in (in_one_call, in_two)]
    assert int(totals[0].count) == int(totals[1].count)
    assert abs(float(totals[0].sum - totals[1].sum)) < 24 * VALUE_ERROR
    grads = [jax.jit(jax.grad(lambda *x: f(*x).sum, (0, 1, 2)))(*operands) for f in (in_one_call, in_two)]  # noqa: B023
    for seen, wanted in zip(*grads, strict=True):
        # Two fp32 computations, each within the contract's bound.
        assert oracle.relative_error(seen, oracle.f64(wanted)) < 2 * support_case.GRADIENT_ERROR


# --- size --------------------------------------------------------------------------------------------------------------

SHAPE = re.compile(r"\b([a-z]+\d+|pred)\[([\d,]+)\]")
TOKENS, WIDTH, VOCAB, CAPACITY = 64, 128, 4096, 512


@functools.cache
def compiled(on_support, dtype):
    """The program of values and gradients, for tokens × V = 64 × 4096."""

    def objective(hidden, weight, targets, support):
        options = {"support": support} if on_support else {"engine": "reference"}
        result = linear_log_probs(hidden, weight, targets, with_entropy=True, **options)
        return result.log_probs.sum() + result.entropy.sum()

    arrays = jax.ShapeDtypeStruct((TOKENS, WIDTH), dtype), jax.ShapeDtypeStruct((VOCAB, WIDTH), dtype)
    ids = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((TOKENS,), (CAPACITY,), (TOKENS,)))
    targets, flat, counts = ids
    traced = jax.jit(jax.value_and_grad(objective, (0, 1))).trace(*arrays, targets, Support(flat, counts))
    return traced.lower().compile()


def sizes(program):
    found = set(SHAPE.findall(program.as_text()))
    return {(dtype, tuple(int(size) for size in shape.split(","))) for dtype, shape in found}


def has_logits(program):
    """Whether there is an array of at least tokens × V numbers, other than one of the weight's rows."""
    return any(math.prod(shape) >= TOKENS * VOCAB and WIDTH not in shape for _, shape in sizes(program))


def test_nothing_of_the_size_of_the_logits():
    assert not has_logits(compiled(True, jnp.float32)) and has_logits(compiled(False, jnp.float32))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_nothing_of_the_size_of_the_weight_but_its_gradient(dtype):
    """The gradient, a result and no temporary, is summed for the rows alone that are named."""
    blocks_of_ids = 4 * 4 * CAPACITY * WIDTH
    assert compiled(True, dtype).memory_analysis().temp_size_in_bytes < blocks_of_ids < 4 * VOCAB * WIDTH


def test_no_fp32_copy_of_a_bf16_weight():
    """One fp32 array of the weight's size is needed, the sums of its gradient: the forward has none."""
    data = jax.ShapeDtypeStruct((TOKENS, WIDTH), jnp.bfloat16), jax.ShapeDtypeStruct((VOCAB, WIDTH), jnp.bfloat16)
    targets, flat, counts = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((TOKENS,), (CAPACITY,), (TOKENS,)))

    def forward(hidden, weight, targets, support):
        return linear_log_probs(hidden, weight, targets, support=support).log_probs

    found = sizes(jax.jit(forward).lower(*data, targets, Support(flat, counts)).compile())
    assert ("bf16", (VOCAB, WIDTH)) in found, "the weight itself must be found"
    assert max(math.prod(shape) for dtype, shape in found if dtype == "f32") <= CAPACITY * WIDTH


def test_only_a_logit_of_each_id_is_kept_between_forward_and_backward():
    data = case(width=200)

    def values(hidden, weight):
        return linear_log_probs(hidden, weight, data["targets"], data["mask"], support=data["support"]).log_probs

    _, pull_back = jax.vjp(values, data["hidden"], data["weight"])
    kept = {leaf.size for leaf in jax.tree.leaves(pull_back) if hasattr(leaf, "size")}
    assert max(kept - {24 * 200, 60 * 200}) <= data["support"].ids.size


def test_the_mean_error_is_that_of_fp32_sums():
    """H = 2048: a product of rounded or TF32 operands would be off by 2^-11 of a logit, not by a few times 2^-24."""
    data = case(width=2048)
    seen, wanted = gradients(data), expected(data)
    magnitude = np.abs(oracle.f64(data["hidden"])).max() * np.abs(oracle.f64(data["weight"])).sum(axis=1).max()
    error = np.abs(oracle.f64(seen.lse) - wanted.lse).max()
    assert error < min(oracle.fp32_bound(magnitude, 64), VALUE_ERROR)
