"""The head and the logits path under real shard_map on 8 simulated devices: equal to the unsharded float64 oracle."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxlogp import (
    VocabShards,
    linear_log_probs,
    linear_policy_loss,
    log_probs_from_logits,
    sharded_linear_log_probs,
)
from jaxlogp.head import ChunkedEngine
from jaxlogp.losses import grpo
from tests import oracle
from tests.head import cases

# fp32 on the same inputs, against float64 (contract): the all-reduce adds at most 8 more roundings of 2^-24.
VALUE_ERROR = 1e-5
GRADIENT_ERROR = 2e-5
# The logits path has no product in front: fp32 state, 2e-6 (contract A).
STATE_ERROR = 2e-6
HIDDEN = 16
CHUNKED = ChunkedEngine(token_chunk=16, vocab_tile=100)
SHARDINGS = {
    **{f"V={vocab} TP={size}": VocabShards.even(vocab, size) for vocab in (257, 1027) for size in (1, 2, 3, 4, 8)},
    "2/5/6/4 of 17": VocabShards.from_ranges(((0, 2), (2, 7), (7, 13), (13, 17)), 17),
}


def tensor_mesh(size):
    return jax.make_mesh((size,), ("tensor",), axis_types=(AxisType.Auto,), devices=jax.devices()[:size])


def case(shards, tokens=24, seed=0, hidden_size=HIDDEN):
    """Targets sit on both edges of every shard; two tokens are masked and carry ids no shard owns."""
    rng = np.random.default_rng(seed)
    edges = [edge for start, end in shards.ranges for edge in (start, end - 1)]
    targets = np.concatenate([edges, rng.integers(0, shards.vocab_size, tokens - len(edges))]).astype(np.int32)
    mask = np.ones(tokens, bool)
    mask[-2:], targets[-2:] = False, (-100, 99_999)
    return {
        "hidden": jnp.asarray(rng.normal(size=(tokens, hidden_size)), jnp.float32),
        "weight": jnp.asarray(rng.normal(0.0, 0.5, (shards.vocab_size, hidden_size)), jnp.float32),
        "bias": jnp.asarray(rng.normal(size=shards.vocab_size), jnp.float32),
        "targets": jnp.asarray(targets),
        "mask": jnp.asarray(mask),
        "g_lp": jnp.asarray(rng.normal(size=tokens), jnp.float32),
        "g_entropy": jnp.asarray(rng.normal(size=tokens), jnp.float32),
    }


def objective(hidden, weight, bias, targets, mask, g_lp, g_entropy, **options):
    result = linear_log_probs(hidden, weight, targets, mask=mask, bias=bias, with_entropy=True, **options)
    return jnp.sum(result.log_probs * g_lp + result.entropy * g_entropy), result


SPECS = (P(), P("tensor"), P("tensor"), P(), P(), P(), P())


def blocks(data, shards):
    """The positional arguments of `objective`, with the rows of the weight and the bias in blocks of one width."""
    rows = shards.shard_rows(data["weight"]), shards.shard_rows(data["bias"])
    return (data["hidden"], *rows, *(data[name] for name in ("targets", "mask", "g_lp", "g_entropy")))


def inside(shards, engine, **kwargs):
    """The gradient is taken by the function that shard_map runs."""
    local = jax.grad(
        functools.partial(objective, axis_name="tensor", vocab=shards, engine=engine), argnums=(0, 1, 2), has_aux=True
    )
    mapped = jax.shard_map(
        local, mesh=tensor_mesh(shards.num_shards), in_specs=SPECS, out_specs=(SPECS[:3], P()), **kwargs
    )

    def run(data):
        gradients, result = mapped(*blocks(data, shards))
        hidden, weight, bias = gradients
        return result, oracle.HeadGradients(hidden, shards.unshard_rows(weight), shards.unshard_rows(bias))

    return run


def outside(shards, engine, **kwargs):
    """The gradient is taken through shard_map, from the outside."""
    mapped = jax.shard_map(
        functools.partial(objective, axis_name="tensor", vocab=shards, engine=engine),
        mesh=tensor_mesh(shards.num_shards),
        in_specs=SPECS,
        out_specs=P(),
        **kwargs,
    )

    def run(data):
        def total(hidden, weight, bias):
            return mapped(*blocks({**data, "hidden": hidden, "weight": weight, "bias": bias}, shards))

        gradient = jax.grad(total, argnums=(0, 1, 2), has_aux=True)
        gradients, result = gradient(data["hidden"], data["weight"], data["bias"])
        return result, oracle.HeadGradients(*gradients)

    return run


def check(result, gradients, data):
    args = (data["hidden"], data["weight"], data["targets"])
    log_probs, entropy = oracle.head_log_probs(*args, data["mask"], data["bias"])
    wanted = oracle.head_gradients(*args, data["g_lp"], data["g_entropy"], data["mask"], data["bias"])
    assert oracle.scaled_error(result.log_probs, log_probs) < VALUE_ERROR
    assert oracle.scaled_error(result.entropy, entropy) < VALUE_ERROR
    for name, gradient in gradients._asdict().items():
        error = oracle.relative_error(gradient, getattr(wanted, name))
        # A hidden gradient summed never or once too often would be wrong by a factor, not by 2e-5.
        assert error < GRADIENT_ERROR, f"{name}: {error}"
    masked = ~np.asarray(data["mask"])
    for values in (result.log_probs, result.entropy, gradients.hidden):
        assert not np.asarray(values)[masked].any()


# In the default run every number of shards once or more; the other vocabularies are slow.
SLOW_SHARDINGS = {"V=1027 TP=2", "V=1027 TP=3", "V=1027 TP=4", "V=1027 TP=8", "V=257 TP=1"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW_SHARDINGS else []) for name in SHARDINGS]
)
def test_values_and_gradients_equal_the_unsharded_ones(name):
    data = case(SHARDINGS[name])
    check(*jax.jit(inside(SHARDINGS[name], CHUNKED, check_vma=True))(data), data)


def test_bias_with_a_wider_hidden_state():
    """The contract's own case: H = 64, V = 521, bias, eight shards of uneven width."""
    shards = VocabShards.even(521, 8)
    data = case(shards, seed=7, hidden_size=64)
    check(*jax.jit(inside(shards, CHUNKED))(data), data)


@pytest.mark.parametrize(
    "engine", [pytest.param("reference", marks=pytest.mark.slow), CHUNKED], ids=["reference", "chunked"]
)
@pytest.mark.parametrize("name", ["V=257 TP=3", "2/5/6/4 of 17"])
def test_gradient_taken_outside_the_shard_map(name, engine):
    data = case(SHARDINGS[name], seed=1)
    check(*jax.jit(outside(SHARDINGS[name], engine))(data), data)


@pytest.mark.costly
def test_bf16_gradients_do_not_lose_accuracy_with_the_number_of_shards():
    """The hidden gradient is a sum over shards: added in bf16 it would collect a rounding a shard."""
    errors = {}
    for size in (1, 8):
        shards = SHARDINGS[f"V=257 TP={size}"]
        data = case(SHARDINGS["V=257 TP=8"], seed=7)
        for name in ("hidden", "weight", "bias"):
            data[name] = data[name].astype(jnp.bfloat16)
        _, gradients = jax.jit(inside(shards, CHUNKED))(data)
        args = (data["hidden"], data["weight"], data["targets"], data["g_lp"], data["g_entropy"])
        wanted = oracle.head_gradients(*args, data["mask"], data["bias"])
        assert gradients.hidden.dtype == gradients.weight.dtype == jnp.bfloat16
        errors[size] = [oracle.relative_error(seen, want) for seen, want in zip(gradients[:2], wanted[:2], strict=True)]
    # Both end in a rounding to bf16 (2^-9 an entry, contract: 5e-3 in norm), whatever the number of shards.
    assert max(errors[1] + errors[8]) < 5e-3, errors
    for one, eight in zip(errors[1], errors[8], strict=True):
        assert eight < 1.2 * one, errors


@pytest.mark.bad_input
def test_differentiation_without_replication_types_is_refused():
    shards = SHARDINGS["V=257 TP=2"]
    data = case(shards)
    with pytest.raises(ValueError, match="check_vma"):
        jax.jit(inside(shards, CHUNKED, check_vma=False))(data)
    # The forward alone needs no replication types and is right.
    mapped = jax.shard_map(
        functools.partial(objective, axis_name="tensor", vocab=shards, engine=CHUNKED),
        mesh=tensor_mesh(2),
        in_specs=SPECS,
        out_specs=P(),
        check_vma=False,
    )
    _, result = jax.jit(mapped)(*blocks(data, shards))
    log_probs, entropy = oracle.head_log_probs(
        data["hidden"], data["weight"], data["targets"], data["mask"], data["bias"]
    )
    assert oracle.scaled_error(result.log_probs, log_probs) < VALUE_ERROR
    assert oracle.scaled_error(result.entropy, entropy) < VALUE_ERROR


def test_out_of_vocab_zero_over_shards():
    shards = SHARDINGS["V=257 TP=3"]
    data = case(shards, seed=3)
    data["targets"] = data["targets"].at[0].set(257).at[5].set(-1)
    local = functools.partial(objective, axis_name="tensor", vocab=shards, engine=CHUNKED, out_of_vocab="zero")
    gradient = jax.grad(local, argnums=(0, 1, 2), has_aux=True)
    mapped = jax.shard_map(gradient, mesh=tensor_mesh(3), in_specs=SPECS, out_specs=(SPECS[:3], P()))
    (hidden, weight, bias), result = jax.jit(mapped)(*blocks(data, shards))
    assert result.log_probs[0] == 0.0 and result.log_probs[5] == 0.0
    check(result, oracle.HeadGradients(hidden, shards.unshard_rows(weight), shards.unshard_rows(bias)), data)


def test_masks_that_differ_between_shards_spoil_no_other_token():
    """In one pass shards meet in every chunk, which must hold the same tokens on all of them."""
    shards = SHARDINGS["V=257 TP=2"]
    data = case(shards)
    masks = np.ones((2, 24), bool)
    masks[0, [0, 3, 7]] = masks[1, [0, 10]] = False
    options = {"loss": grpo(), "axis_name": "tensor", "vocab": shards, "engine": CHUNKED, "out_of_vocab": "zero"}

    def local(hidden, weight, bias, targets, mask):
        def total(weight):
            columns = jnp.zeros(24), jnp.ones(24), mask[0]
            loss, values = linear_policy_loss(hidden, weight, targets, *columns, bias=bias, **options)
            return loss.sum, values.log_probs

        # Without a gradient there is no such pass.
        (loss, log_probs), _ = jax.value_and_grad(total, has_aux=True)(weight)
        return loss[None], log_probs[None]

    specs = (*SPECS[:4], P("tensor"))
    mapped = jax.shard_map(local, mesh=tensor_mesh(2), in_specs=specs, out_specs=P("tensor"))
    head = blocks(data, shards)[:3]
    targets = jnp.clip(data["targets"], 0, shards.vocab_size - 1)
    loss, log_probs = jax.jit(mapped)(*head, targets, jnp.asarray(masks))
    wanted, _ = oracle.head_log_probs(data["hidden"], data["weight"], targets, masks.any(axis=0), data["bias"])
    differ = masks[0] != masks[1]
    for mine in np.asarray(log_probs):
        np.testing.assert_array_equal(np.isnan(mine), differ)
        assert oracle.scaled_error(mine[~differ], wanted[~differ]) < VALUE_ERROR
    assert np.isnan(loss).all()


@pytest.mark.parametrize("whose", ["hidden", "targets", "mask"])
def test_ranks_with_models_of_their_own_need_no_axis_name(whose):
    """One operand that varies beside the weight tells them from shards of one vocabulary."""
    data = case(SHARDINGS["V=257 TP=2"])
    given = {name: jnp.stack([data[name]] * 2) for name in ("hidden", "targets", "mask")}
    place = {name: P("tensor") if name == whose else P() for name in given}

    def local(weight, given):
        arrays = {name: x[0] for name, x in given.items()}
        return linear_log_probs(weight=weight, engine=CHUNKED, **arrays).log_probs[None]

    mapped = jax.shard_map(local, mesh=tensor_mesh(2), in_specs=(P("tensor"), place), out_specs=P("tensor"))
    assert jax.eval_shape(mapped, data["weight"][:256], given).shape == (2, 24)


# --- given logits ------------------------------------------------------------------------------------------

KNOWN = np.array([0.1, -0.2, 1.7, 0.3, 1.2, -0.5])
KNOWN_TARGET, KNOWN_LOG_PROB = 4, -1.3395806963
OWNER_LOCAL, AVERAGED = -0.4632642102, -0.6322267505


def sharded_logits_run(shards, with_entropy=False):
    """Columns cut by the ranges; narrower shards are padded behind with columns that must never count."""

    def run(logits, targets):
        columns = jnp.moveaxis(shards.shard_rows(jnp.moveaxis(logits, -1, 0)), 0, -1)
        return jax.shard_map(
            lambda z, t: log_probs_from_logits(z, t, axis_name="tensor", vocab=shards, with_entropy=with_entropy),
            mesh=tensor_mesh(shards.num_shards),
            in_specs=(P(None, "tensor"), P()),
            out_specs=P(),
        )(columns, targets)

    return jax.jit(run)


@pytest.mark.parametrize(
    "ranges", [((0, 6),), ((0, 3), (3, 6)), ((0, 2), (2, 4), (4, 6)), ((0, 1), (1, 5), (5, 6))], ids=str
)
def test_the_known_example_for_any_sharding(ranges):
    shards = VocabShards.from_ranges(ranges, 6)
    result = sharded_logits_run(shards)(jnp.asarray(KNOWN[None], jnp.float32), jnp.asarray([KNOWN_TARGET], jnp.int32))
    assert oracle.scaled_error(result.log_probs, np.array([KNOWN_LOG_PROB])) < STATE_ERROR


def test_the_wrong_reductions_are_told_apart():
    """The negative controls: what a shard-local lse, and an average of local lse's, would give on two shards."""
    local = [oracle.log_sum_exp(KNOWN[start:end]) for start, end in ((0, 3), (3, 6))]
    owner_local = KNOWN[KNOWN_TARGET] - local[1]
    averaged = KNOWN[KNOWN_TARGET] - np.mean(local)
    assert owner_local == pytest.approx(OWNER_LOCAL, abs=1e-9)
    assert averaged == pytest.approx(AVERAGED, abs=1e-9)
    shards = VocabShards.from_ranges(((0, 3), (3, 6)), 6)
    result = sharded_logits_run(shards)(jnp.asarray(KNOWN[None], jnp.float32), jnp.asarray([KNOWN_TARGET], jnp.int32))
    for wrong in (owner_local, averaged):
        assert abs(float(result.log_probs[0]) - wrong) > 0.5


DTYPES = (jnp.float32, jnp.float16, jnp.bfloat16)
VOCABULARIES, SIZES = (17, 257, 1027, 4099, 128257), (1, 2, 3, 4, 8)
# In the default run four sizes, four vocabularies and every dtype; the grid of contract A is slow.
QUICK = {(17, 8), (257, 1), (1027, 4), (4099, 3)}


def in_grid(vocab, size, dtype):
    """Every vocabulary and every size meet every dtype, and the smallest vocabulary has all three at each size."""
    return vocab == 17 or dtype == DTYPES[(VOCABULARIES.index(vocab) + size) % 3]


GRID = [
    pytest.param(VocabShards.even(vocab, size), dtype, marks=[] if (vocab, size) in QUICK else pytest.mark.slow)
    for vocab in VOCABULARIES
    for size in SIZES
    for dtype in DTYPES
    if in_grid(vocab, size, dtype)
]
GRID += [(SHARDINGS["2/5/6/4 of 17"], dtype) for dtype in DTYPES]


def grid_name(value):
    return f"V={value.vocab_size},TP={value.num_shards}" if isinstance(value, VocabShards) else value.__name__


@pytest.mark.parametrize("shards, dtype", GRID, ids=grid_name)
def test_sharded_logits_and_their_gradient(shards, dtype):
    data = case(shards, seed=4)
    rng = np.random.default_rng(5)
    logits = jnp.asarray(rng.normal(0.0, 3.0, (24, shards.vocab_size)), dtype)
    targets, mask = data["targets"], data["mask"]

    def local(z, t, m, g_lp, g_entropy):
        def total(z):
            result = log_probs_from_logits(
                z, t, mask=m, temperature=0.7, with_entropy=True, axis_name="tensor", vocab=shards
            )
            return jnp.sum(result.log_probs * g_lp + result.entropy * g_entropy), result

        return jax.grad(total, has_aux=True)(z)

    @jax.jit
    def run(z):
        columns = jnp.moveaxis(shards.shard_rows(jnp.moveaxis(z, -1, 0)), 0, -1)
        gradient, result = jax.shard_map(
            local,
            mesh=tensor_mesh(shards.num_shards),
            in_specs=(P(None, "tensor"), P(), P(), P(), P()),
            out_specs=(P(None, "tensor"), P()),
        )(columns, targets, mask, data["g_lp"], data["g_entropy"])
        return result, jnp.moveaxis(shards.unshard_rows(jnp.moveaxis(gradient, -1, 0)), 0, -1)

    result, gradient = run(logits)
    log_probs, entropy = oracle.scaled_logits_log_probs(logits, targets, mask, 0.7)
    wanted = oracle.scaled_logits_gradient(logits, targets, data["g_lp"], data["g_entropy"], mask, 0.7)
    assert oracle.scaled_error(result.log_probs, log_probs) < STATE_ERROR
    assert oracle.scaled_error(result.entropy, entropy) < STATE_ERROR
    # bf16 and fp16 gradients are rounded once at the end: contract 5e-3.
    assert gradient.dtype == dtype
    assert oracle.relative_error(gradient, wanted) < (GRADIENT_ERROR if dtype == jnp.float32 else 5e-3)


# --- collectives -------------------------------------------------------------------------------------------

COLLECTIVES = ("psum", "pmax", "pmin", "all_gather", "all_to_all", "ppermute", "reduce_scatter")


def collectives(jaxpr):
    """Names of the collectives of a jaxpr, inner ones included."""
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive.name.startswith(COLLECTIVES):
            found.append(equation.primitive.name.removesuffix("_invariant"))
        for inner in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
        ):
            if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                found += collectives(inner if hasattr(inner, "eqns") else inner.jaxpr)
    return found


def traced_collectives(entry, with_entropy, gradient):
    """Collectives of a call over 2 data ranks and 2 vocabulary shards, in order of their names."""
    data, shards = entry.case((4, 4)), entry.shards(cases.VOCAB, 2)
    mesh = data_tensor_mesh((2, 2), AxisType.Auto)

    def values(hidden, weight, bias, targets):
        options = {"with_entropy": with_entropy, "out_of_vocab": "zero", "engine": entry.engine}
        return linear_log_probs(hidden, weight, targets, bias=bias, axis_name="tensor", vocab=shards, **options)

    def total(hidden, weight, bias, targets):
        result = values(hidden, weight, bias, targets)
        return jnp.sum(result.log_probs if result.entropy is None else result.log_probs + result.entropy)

    tokens, rows = P("data"), P("tensor")
    specs, out_specs = (tokens, rows, rows), tokens
    function, out_specs = (jax.grad(total, (0, 1, 2)), specs) if gradient else (values, tokens)
    mapped = jax.shard_map(function, mesh=mesh, in_specs=(*specs, tokens), out_specs=out_specs)
    weight, bias = (shards.shard_rows(data[name]) for name in ("weight", "bias"))
    return sorted(collectives(jax.make_jaxpr(mapped)(data["hidden"], weight, bias, data["targets"]).jaxpr))


def engines():
    for entry in cases.ENGINES:
        skip = pytest.mark.skipif(entry.missing is not None, reason=f"NOT RUN: {entry.name}: {entry.missing}")
        yield pytest.param(entry, id=entry.name, marks=skip)


@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("entry", list(engines()))
def test_entropy_adds_no_collective(entry, gradient):
    """Forward one maximum and one sum; backward one sum of each gradient, which fixed_order sends in two steps."""
    of_gradients = ["psum"] * 3 + (["all_to_all"] * 3 if entry.name == "fixed_order" else [])
    expected = sorted(["pmax", "psum", *(of_gradients if gradient else [])])
    for with_entropy in (False, True):
        assert traced_collectives(entry, with_entropy, gradient) == expected


# --- global arrays -----------------------------------------------------------------------------------------


def data_tensor_mesh(sizes, axis_type):
    return jax.make_mesh(sizes, ("data", "tensor"), axis_types=(axis_type,) * 2)


def global_case(vocab, seed=6):
    data = case(VocabShards.even(vocab, 2), seed=seed)
    tokens = {key: data[key].reshape(4, 6, *data[key].shape[1:]) for key in data if key not in ("weight", "bias")}
    return {**data, **tokens}


def global_gradients(data, mesh, shards, **options):
    def total(hidden, weight, bias):
        result = sharded_linear_log_probs(
            hidden, weight, data["targets"], mesh=mesh, vocab=shards, mask=data["mask"], bias=bias, with_entropy=True,
            engine=CHUNKED, **options,
        )  # fmt: skip
        return jnp.sum(result.log_probs * data["g_lp"] + result.entropy * data["g_entropy"]), result

    gradients, result = jax.grad(total, argnums=(0, 1, 2), has_aux=True)(data["hidden"], data["weight"], data["bias"])
    return result, oracle.HeadGradients(*gradients)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
def test_a_head_sharded_over_the_data_axis_too_equals_the_replicated_one(axis_type):
    mesh, shards, data = data_tensor_mesh((2, 4), axis_type), VocabShards.even(256, 4), global_case(256)
    with jax.set_mesh(mesh):
        replicated = jax.jit(lambda d: global_gradients(d, mesh, shards))(data)
        result, gradients = jax.jit(lambda d: global_gradients(d, mesh, shards, weight_axis="data"))(data)
    check(result, gradients, data)
    for seen, wanted in zip(jax.tree.leaves((result, gradients)), jax.tree.leaves(replicated), strict=True):
        # The same local program after the gather, but compiled around others: each is within the bound of float64.
        assert oracle.relative_error(seen, wanted) < 2 * GRADIENT_ERROR


def test_inputs_already_placed_on_the_mesh_keep_working():
    mesh, shards, data = data_tensor_mesh((2, 4), AxisType.Auto), VocabShards.even(256, 4), global_case(256)
    placed = dict(data)
    placed["weight"] = jax.device_put(data["weight"], NamedSharding(mesh, P("tensor")))
    placed["hidden"] = jax.device_put(data["hidden"], NamedSharding(mesh, P("data")))
    result, gradients = jax.jit(lambda d: global_gradients(d, mesh, shards))(placed)
    check(result, gradients, data)
    assert gradients.weight.sharding.is_equivalent_to(placed["weight"].sharding, 2)
