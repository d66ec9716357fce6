"""linear_policy_loss equals policy_loss of linear_log_probs, costs one product less, and has each of its psums once."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxlogp import VocabShards, linear_log_probs, linear_policy_loss
from jaxlogp.head import record_head_runs
from jaxlogp.head.chunked import one_pass as chunked_one_pass
from jaxlogp.losses import cispo, dapo, dr_grpo, grpo, grpo_paper, gspo, kl_cov, reinforce, sapo
from tests import oracle
from tests.head import policy_problem
from tests.head.policy_problem import (
    DOCUMENTS,
    LENGTH,
    OPTIONS,
    ROWS,
    VOCAB,
    compare,
    one_call,
    problem,
    run,
    two_calls,
)

SLOW = pytest.mark.slow
LOSSES = {
    "grpo": grpo(),
    "grpo, entropy, k3": grpo(entropy_coefficient=0.1, kl_coefficient=0.2),
    "dapo": dapo(),
    "dr_grpo": dr_grpo(length=9),
    "grpo_paper, k1": grpo_paper(kl_coefficient=0.2, kl_estimator="k1"),
    "cispo": cispo(),
    "sapo, k2": sapo(kl_coefficient=0.2, kl_estimator="k2"),
    "reinforce": reinforce(),
    "grpo_paper, token mean of the entropy": grpo_paper(entropy_coefficient=0.1, entropy_weights="labels"),
    "kl_cov": kl_cov(drift_coefficient=0.5),
    "gspo, entropy": gspo(entropy_coefficient=0.1),
    "gspo by length, wide bounds": gspo(weighting="length", epsilon=0.2, epsilon_high=0.3),
}


@pytest.fixture(autouse=True)
def several_chunks(monkeypatch):
    """Chunks of 20 tokens: three of 16 of them in the case of 48."""
    monkeypatch.setattr(chunked_one_pass, "CHUNK_ELEMENTS", 20 * VOCAB)


# --- one call equals two ------------------------------------------------------------------------------------------


# In the default run each part of a loss once; grpo and gspo by length meet float64 below.
SLOW_LOSSES = {"grpo", "dapo", "dr_grpo", "reinforce", "gspo by length, wide bounds"}


@pytest.mark.parametrize("name", [pytest.param(name, marks=SLOW if name in SLOW_LOSSES else []) for name in LOSSES])
def test_value_and_gradients_are_those_of_the_two_steps(name):
    data = problem()
    actual = run(one_call, data, LOSSES[name], **OPTIONS)
    compare(actual, run(two_calls, data, LOSSES[name], **OPTIONS))
    assert np.isfinite(actual[0].sum) and np.abs(np.asarray(actual[2].weight)).max() > 0
    masked = ~np.asarray(data["mask"])
    assert not np.asarray(actual[2].hidden)[masked].any() and not np.asarray(actual[1].log_probs)[masked].any()


@pytest.mark.parametrize("entropy_coefficient", [0.0, 0.1])
def test_grpo_against_float64(entropy_coefficient):
    data = problem()
    loss, values, gradients = run(one_call, data, grpo(entropy_coefficient=entropy_coefficient), **OPTIONS)
    mask, head = np.asarray(data["mask"]), oracle.Head(**OPTIONS)
    arguments = data["hidden"], data["weight"], data["targets"]
    log_probs, entropy = oracle.head_log_probs(*arguments, mask, data["bias"], head)
    wanted = oracle.grpo(log_probs, data["old"], data["advantages"], mask)
    g_entropy = np.where(mask, -entropy_coefficient / mask.sum(), 0.0)
    from_hidden = oracle.head_gradients(*arguments, 3 * wanted.gradient, 3 * g_entropy, mask, data["bias"], head)
    assert abs(float(loss.mean()) - (wanted.loss - entropy_coefficient * entropy.sum() / mask.sum())) < 1e-5
    assert oracle.scaled_error(values.log_probs, log_probs) < 1e-5
    for name, gradient in gradients._asdict().items():
        assert oracle.relative_error(gradient, getattr(from_hidden, name)) < 2e-5, name


@pytest.mark.parametrize(
    "loss, engine, dtype",
    [
        (grpo, "chunked", jnp.float32),
        (grpo, "chunked", jnp.bfloat16),
        (gspo, "chunked", jnp.float32),
        (grpo, "reference", jnp.float16),
    ],
)
def test_the_z_loss_against_float64(loss, engine, dtype):
    """In one pass and in two steps: 0.3 times the weighted squares of lse, whose slope is 0.6 w lse."""
    data = problem(dtype=dtype, bias=dtype == jnp.float32)
    with_z = loss(z_loss_coefficient=0.3)
    total, _, gradients = run(one_call, data, with_z, engine=engine, **OPTIONS)
    plain, _, of_plain = run(one_call, data, loss(), engine=engine, **OPTIONS)
    mask, ids, head = np.asarray(data["mask"]), np.asarray(data["ids"]), oracle.Head(**OPTIONS)
    clean = np.where(mask[..., None], oracle.f64(data["hidden"]), 0.0)
    lse = np.where(mask, oracle.log_sum_exp(oracle.head_logits(clean, data["weight"], data["bias"], head)), 0.0)
    labels = np.bincount(ids[mask], minlength=len(DOCUMENTS))
    weights = np.where(mask, 1.0 / mask.sum() if loss is grpo else 1 / np.maximum(labels, 1)[ids] / len(DOCUMENTS), 0.0)
    assert abs(float(total.mean()) - float(plain.mean()) - (0.3 * weights * lse**2).sum()) < 1e-5
    operands = data["hidden"], data["weight"], data["targets"], np.zeros(mask.shape), None, mask, data["bias"], head
    wanted = oracle.head_gradients(*operands, lse_cotangent=3 * 0.6 * weights * lse)
    for name, gradient in gradients._asdict().items():
        if gradient is not None:
            # Of the size of either gradient: in 16 bits both runs round dz and the gradient, and one the sum with the
            # targets' rows, five roundings of at most eps / 2 each that do not line up.
            without, want = oracle.f64(getattr(of_plain, name)), getattr(wanted, name)
            size = np.linalg.norm(without) + np.linalg.norm(want)
            error = np.linalg.norm(oracle.f64(gradient) - without - want) / size
            assert error < max(2e-5, float(jnp.finfo(dtype).eps)), name


@pytest.mark.bad_input
def test_the_z_loss_is_refused_where_the_order_of_sums_is_fixed():
    with pytest.raises(ValueError, match="^loss.z_loss_coefficient: expected 0 with engine fixed_order"):
        one_call(problem(), grpo(z_loss_coefficient=0.1), engine="fixed_order")


def test_on_policy_with_a_z_loss():
    data, lse = on_policy(problem(options=OPTIONS), **OPTIONS)
    loss = grpo(z_loss_coefficient=0.3)
    known = jax.jit(lambda x: policy_problem.differentiated(x, lambda y: one_call(y, loss, lse=lse, **OPTIONS)))(data)
    compare(known, run(one_call, data, loss, **OPTIONS))


def test_a_z_loss_over_shards():
    data, loss = problem(), grpo(z_loss_coefficient=0.3)
    compare(sharded(data, loss, (2, 3), **OPTIONS), run(one_call, data, loss, **OPTIONS))


def test_a_document_in_two_rows_against_float64():
    data = problem()
    loss, _, gradients = run(one_call, data, gspo(weighting="length", epsilon=0.2, epsilon_high=0.2), **OPTIONS)
    mask, head = np.asarray(data["mask"]), oracle.Head(**OPTIONS)
    arguments = data["hidden"], data["weight"], data["targets"]
    log_probs, _ = oracle.head_log_probs(*arguments, mask, data["bias"], head)
    wanted = oracle.gspo(log_probs, data["old"], data["advantages"], mask, data["ids"], len(DOCUMENTS))
    from_hidden = oracle.head_gradients(*arguments, 3 * wanted.gradient, None, mask, data["bias"], head)
    assert abs(float(loss.mean()) - wanted.loss) < 1e-5
    for name, gradient in gradients._asdict().items():
        assert oracle.relative_error(gradient, getattr(from_hidden, name)) < 2e-5, name


def test_bf16_operands():
    data = problem(dtype=jnp.bfloat16, bias=False, seed=1)
    loss = grpo(entropy_coefficient=0.1)
    # Both round dz and the gradients to bf16, in different places.
    compare(run(one_call, data, loss, **OPTIONS), run(two_calls, data, loss, **OPTIONS), gradient_error=5e-3)


def test_without_jit():
    data = problem()
    compare(
        policy_problem.differentiated(data, lambda x: one_call(x, grpo(), **OPTIONS)),
        run(one_call, data, grpo(), **OPTIONS),
    )


def test_no_label_at_all():
    data = problem()
    loss, values, gradients = run(one_call, {**data, "mask": jnp.zeros_like(data["mask"])}, grpo(), **OPTIONS)
    assert float(loss.sum) == 0.0 and int(loss.count) == 0
    for x in (*gradients, values.log_probs):
        assert not np.asarray(x).any()


@pytest.mark.parametrize("loss", [grpo_paper(), gspo()], ids=lambda loss: loss.name)
def test_a_label_with_a_wrong_document_makes_its_loss_and_gradient_nan(loss):
    data = problem()
    place = tuple(np.argwhere(np.asarray(data["mask"]))[0])
    data["ids"] = data["ids"].at[place].set(99)
    total, _, gradients = run(one_call, data, loss, **OPTIONS)
    assert np.isnan(total.sum) and np.isnan(np.asarray(gradients.hidden)[place]).all()


# --- how it is computed -------------------------------------------------------------------------------------------


def products(function, data):
    """Matrix products in the program, one in a loop counted once."""
    return str(jax.make_jaxpr(function)(data)).count("dot_general")


def test_three_products_with_the_gradient_and_one_without():
    data = problem()
    loss = grpo()
    assert products(lambda x: one_call(x, loss)[0].sum, data) == 1
    assert products(lambda x: policy_problem.differentiated(x, lambda y: one_call(y, loss)), data) == 3
    assert products(lambda x: policy_problem.differentiated(x, lambda y: two_calls(y, loss, "chunked")), data) == 4
    known = jnp.zeros((ROWS, LENGTH), jnp.float32)
    assert products(lambda x: policy_problem.differentiated(x, lambda y: one_call(y, loss, lse=known)), data) == 3
    assert products(lambda x: one_call(x, loss, lse=known)[0].sum, data) == 0


@pytest.mark.parametrize("cotangent", [0.0, -2.5, 1e-6])
def test_the_gradient_is_scaled_by_the_cotangent_of_the_sum(cotangent):
    data = problem()

    def pulled_back(data, cotangent):
        total, pull = jax.vjp(
            lambda h, w: one_call({**data, "hidden": h, "weight": w}, grpo())[0].sum, data["hidden"], data["weight"]
        )
        return pull(jnp.asarray(cotangent, total.dtype))

    for actual, one in zip(jax.jit(pulled_back)(data, cotangent), jax.jit(pulled_back)(data, 1.0), strict=True):
        np.testing.assert_allclose(actual, cotangent * np.asarray(one), rtol=3e-7)  # two products


@pytest.mark.parametrize("loss", [grpo(entropy_coefficient=0.1), gspo(entropy_coefficient=0.1)], ids=lambda x: x.name)
def test_the_entropy_of_a_loss_with_a_bonus_is_returned(loss):
    values = jax.jit(lambda x: one_call(x, loss, **OPTIONS)[1])(data := problem())
    operands = data["hidden"], data["weight"], data["targets"], data["mask"], data["bias"]
    _, entropy = oracle.head_log_probs(*operands, oracle.Head(**OPTIONS))
    assert oracle.scaled_error(values.entropy, entropy) < 1e-5 and values.lse is None


@pytest.mark.parametrize("loss", [grpo(entropy_coefficient=0.4), gspo(entropy_coefficient=0.4)], ids=lambda x: x.name)
def test_the_factor_of_an_entropy_bonus_reaches_one_pass_and_two_steps(loss):
    data = problem()
    product = dataclasses.replace(loss, entropy_coefficient=0.1)
    compare(run(one_call, data, loss, entropy_scale=0.25), run(two_calls, data, product))


def from_log_probs(name, loss=grpo(), **options):
    """The loss plus the sum of a value, and the values."""

    def total(data):
        loss_sum, values = one_call(data, loss, with_entropy=True, with_lse=True, **options)
        return loss_sum.mean() + (0.0 if name is None else jnp.sum(getattr(values, name))), values

    return total


def gradient_of(function, data, **options):
    return jax.grad(lambda weight: function({**data, "weight": weight}), **options)(data["weight"])


@pytest.mark.bad_input
@pytest.mark.parametrize(
    "name, loss, wrap",
    [
        ("entropy", grpo(), lambda f: f),
        ("entropy", gspo(), jax.jit),
        ("lse", grpo(), jax.checkpoint),
        (
            "log_probs",
            grpo(),
            lambda f: lambda x: jax.lax.scan(lambda c, _: (c + f(x)[0], None), 0.0, None, 2)[0:1] * 2,
        ),
    ],
)
def test_a_gradient_through_the_values_is_refused(name, loss, wrap):
    """It used to be 0: an entropy bonus on values.entropy, or a z-loss on values.lse, did nothing."""
    with pytest.raises(ValueError, match=f"^values.{name}: expected no gradient through it, .* constant"):
        gradient_of(lambda x: wrap(from_log_probs(name, loss))(x)[0], problem())


def in_shard_map(function):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])

    def local(data):
        loss, values = function(data)
        return jax.lax.pmean(loss, "data"), values

    tokens = {name: P("data") for name in ("hidden", *policy_problem.LABELS)} | {"weight": P(), "bias": P()}
    return jax.shard_map(local, mesh=mesh, in_specs=(tokens,), out_specs=(P(), P("data")))


def in_scan(function):
    def scanned(data):
        def step(total, _):
            loss, values = function(data)
            return total + loss, values

        return jax.lax.scan(step, 0.0, None, length=2)

    return scanned


@pytest.mark.costly
@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint, in_scan, in_shard_map], ids=lambda wrap: wrap.__name__)
def test_values_that_are_only_reported_do_not_disturb_the_gradient(wrap):
    data = problem()

    def reported(data):
        return gradient_of(lambda x: wrap(from_log_probs(None))(x), data, has_aux=True)

    plain = jax.jit(lambda x: gradient_of(lambda y: wrap(lambda z: (one_call(z, grpo())[0].mean(), ()))(y)[0], x))
    gradient, values = jax.jit(reported)(data)
    assert np.isfinite(values.entropy).all() and np.asarray(values.lse).any()
    if wrap is not in_shard_map:  # out_specs of no values
        np.testing.assert_array_equal(gradient, plain(data))


@pytest.mark.parametrize(
    "loss, changes, words",
    [
        (grpo(), {}, "in one pass"),
        (grpo(entropy_coefficient=0.1), {}, "in one pass"),
        (grpo(), {"lse": np.zeros((ROWS, LENGTH), np.float32)}, "from the known log-sum-exp"),
        (gspo(), {}, "in two steps: the ratio of a document needs"),
        (grpo(), {"engine": "reference"}, "in two steps: it has no one-pass gradient"),
        (grpo(), {"engine": "fixed_order"}, "in two steps: it sums gradients over mesh axes in its own order"),
    ],
)
def test_the_way_to_the_gradient_is_recorded(loss, changes, words):
    data = problem()
    # The parameters are NumPy's, so that collecting them compiles nothing.
    changes = {name: jnp.asarray(value) if name == "lse" else value for name, value in changes.items()}
    with record_head_runs() as runs:
        jax.eval_shape(lambda x: one_call(x, loss, **changes)[0].sum, data)
    assert len(runs) == 1 and runs[0].path == "linear_policy_loss" and runs[0].gradient.startswith(words)


def test_fp16_operands_take_two_steps():
    data = problem(dtype=jnp.float16, bias=False)
    with record_head_runs() as runs:
        actual = run(one_call, data, grpo(), temperature=0.7)
    assert "fp16" in runs[0].gradient
    compare(actual, run(two_calls, data, grpo(), temperature=0.7), gradient_error=5e-3)


@pytest.mark.parametrize("narrow", ["hidden", "weight"])
@pytest.mark.parametrize("known_lse", [False, True])
def test_fp16_gradients_of_large_sums_and_small_cotangents(narrow, known_lse):
    """The gradient of the sum is beyond fp16's 65504 and that of the scaled sum within it: rounded first, it was inf."""
    data = problem(bias=False, options={})
    data[narrow] = data[narrow].astype(jnp.float16)
    options = {"fp32_head": True, "engine": "chunked"}
    values = linear_log_probs(
        data["hidden"], data["weight"], data["targets"], mask=data["mask"], with_lse=True, **options
    )
    data = {**data, "old": values.log_probs, "advantages": jnp.full((ROWS, LENGTH), 3e5, jnp.float32)}
    if known_lse:
        options["lse"] = values.lse

    def small(hidden, weight):
        return 1e-5 * one_call({**data, "hidden": hidden, "weight": weight}, grpo(), **options)[0].sum

    gradients = jax.jit(jax.grad(small, (0, 1)))(data["hidden"], data["weight"])
    mask = np.asarray(data["mask"])
    g = np.where(mask, -3e5 * 1e-5, 0.0)
    wanted = oracle.head_gradients(data["hidden"], data["weight"], data["targets"], g, None, mask)
    assert [x.dtype for x in gradients] == [data["hidden"].dtype, data["weight"].dtype]
    for name, gradient in zip(("hidden", "weight"), gradients, strict=True):
        # fp32 products and one rounding to fp16, 2^-11 of each entry.
        bound = 2.0**-11 if name == narrow else 2e-5
        assert oracle.relative_error(gradient, getattr(wanted, name)) < bound, name


# --- a target that a bias of -inf has removed -----------------------------------------------------------------------


REMOVED = ["grpo, z-loss", "gspo by length, wide bounds", "reinforce"]
REMOVED += [pytest.param(name, marks=SLOW) for name in ("grpo", "dapo", "cispo", "sapo, k2")]


@pytest.mark.parametrize("name", REMOVED)
def test_a_removed_target(name):
    """Its ratio is 0, so losses of ratios are finite. reinforce is infinite, and the one-hot drops out of its gradient."""
    named = LOSSES | {"grpo, z-loss": grpo(z_loss_coefficient=0.3)}
    data, loss = problem(options={}), dataclasses.replace(named[name], kl_coefficient=0.0)
    if name == "reinforce":
        loss = dataclasses.replace(loss, reduction=grpo().reduction)
    data["advantages"] = data["advantages"].at[0, 0].set(0.5).at[0, 1].set(0.0)
    data["targets"] = (data["targets"] % 7).at[0, :2].set(jnp.array([7, 8]))
    data["bias"] = data["bias"].at[7:9].set(-jnp.inf)
    total, values, gradients = run(one_call, data, loss, with_lse=True)
    mask = np.asarray(data["mask"])
    assert np.isneginf(values.log_probs[0, :2]).all() and np.isfinite(np.asarray(values.log_probs)[mask][2:]).all()
    for name_of, gradient in gradients._asdict().items():
        assert np.isfinite(gradient).all(), name_of
    assert not np.asarray(gradients.bias[7:9]).any() and not np.asarray(gradients.weight[7:9]).any()
    if name != "reinforce":
        assert np.isfinite(total.sum)
        return
    assert np.isposinf(total.sum)
    # In the kept columns a target that no column owns; of the gradient -A / count, times 3.
    kept = np.r_[0:7, 9:VOCAB]
    targets = np.searchsorted(kept, np.asarray(data["targets"]))
    targets[0, :2] = VOCAB
    g = np.where(mask, -3.0 * np.where(mask, data["advantages"], 0.0) / mask.sum(), 0.0)
    wanted = oracle.head_gradients(data["hidden"], data["weight"][kept], targets, g, None, mask, data["bias"][kept])
    on_policy = {**data, "old": values.log_probs}
    known = jax.jit(lambda x: policy_problem.differentiated(x, lambda x: one_call(x, loss, lse=values.lse)))(on_policy)
    for found in (gradients, known[2]):
        of_kept = found.hidden, found.weight[kept], found.bias[kept]
        for gradient, want in zip(of_kept, wanted, strict=True):
            assert oracle.relative_error(gradient, want) < 2e-5


# --- on policy ----------------------------------------------------------------------------------------------------


def on_policy(data, **options):
    """The case with old log-probs that the head itself gives, and its log-sum-exp, garbage where masked."""
    operands = data["hidden"], data["weight"], data["targets"]
    values = linear_log_probs(
        *operands, mask=data["mask"], bias=data["bias"], with_lse=True, engine="chunked", **options
    )
    return {**data, "old": values.log_probs}, jnp.where(data["mask"], values.lse, jnp.nan)


@pytest.mark.parametrize("options", [{}, {"softcap": 5.0}, OPTIONS], ids=["plain", "soft cap", "all options"])
def test_on_policy_with_the_log_sum_exp(options):
    data, lse = on_policy(problem(options=options), **options)

    def known(x):
        return one_call({**data, **x}, grpo(), lse=x["lse"], **options)

    actual = jax.jit(lambda x: policy_problem.differentiated(x, known))({**data, "lse": lse})
    compare(actual, run(two_calls, data, grpo(), **options))
    assert not np.asarray(actual[2].hidden)[~np.asarray(data["mask"])].any()


def test_on_policy_stores_no_logits():
    tokens, vocab = 1024, 32768
    floats, ids = jax.ShapeDtypeStruct((tokens,), jnp.float32), jax.ShapeDtypeStruct((tokens,), jnp.int32)
    operands = [jax.ShapeDtypeStruct((rows, 64), jnp.float32) for rows in (tokens, vocab)]
    arguments = *operands, ids, floats, floats, jax.ShapeDtypeStruct((tokens,), jnp.bool_), floats

    def mean(*x):
        return linear_policy_loss(*x[:-1], lse=x[-1], engine="chunked")[0].mean()

    memory = jax.jit(jax.grad(mean, (0, 1))).lower(*arguments).compile().memory_analysis().temp_size_in_bytes
    assert memory < 0.2 * 4 * tokens * vocab, memory


def test_a_product_that_overflows_is_nan_under_a_soft_cap():
    """In one pass, on one device and over shards."""
    data, bad = problem(), np.zeros((ROWS, LENGTH), bool)
    bad[0, 1] = True
    data["weight"] = data["weight"].at[5, 0].set(-4.0)
    data["hidden"] = data["hidden"].at[0, 1, 0].set(3e38)
    for seen in (run(one_call, data, grpo(), **OPTIONS), sharded(data, grpo(), (2, 3), **OPTIONS)):
        loss, values, gradients = seen
        assert np.isnan(loss.sum)
        np.testing.assert_array_equal(np.isnan(values.log_probs), bad)
        np.testing.assert_array_equal(np.isnan(gradients.hidden).all(axis=-1), bad)
        assert np.isnan(gradients.weight).all() and np.isnan(gradients.bias).all()


# --- vocabulary shards and data ranks -----------------------------------------------------------------------------


def sharded(data, loss, sizes, check_vma=True, outside=False, lse=None, **options):
    """(loss sum, log-probs, gradients) over a mesh (data, tensor): tokens by rows, the vocabulary in uneven shards."""
    shards = VocabShards.even(VOCAB, sizes[1])
    devices = jax.devices()[: sizes[0] * sizes[1]]
    mesh = jax.make_mesh(sizes, ("data", "tensor"), axis_types=(AxisType.Auto,) * 2, devices=devices)
    options |= {"axis_name": "tensor", "vocab": shards}
    if loss.needs_documents:
        options["document_axis_name"] = "data"

    def total(hidden, weight, bias, labels):
        known = {} if lse is None else {"lse": labels.pop("lse")}
        loss_sum, values = one_call(
            {**labels, **dict(zip(policy_problem.HEAD, (hidden, weight, bias), strict=True))}, loss, **options, **known
        )
        # Documents that data ranks share are counted once by the loss itself.
        return 3.0 * loss_sum.psum("data").mean(), (loss_sum.psum("data"), values)

    labels = {name: data[name] for name in policy_problem.LABELS} | ({} if lse is None else {"lse": lse})
    split, rows = P("data"), P("tensor")
    head_specs = split, rows, rows
    local = total if outside else jax.grad(total, (0, 1, 2), has_aux=True)
    first = P() if outside else head_specs
    specs = {"mesh": mesh, "in_specs": (*head_specs, split), "out_specs": (first, (P(), split)), "check_vma": check_vma}
    mapped = jax.shard_map(local, **specs)

    def run(hidden, weight, bias, labels):
        def whole(hidden, weight, bias):
            return mapped(hidden, shards.shard_rows(weight), shards.shard_rows(bias), labels)

        if outside:
            return jax.grad(whole, (0, 1, 2), has_aux=True)(hidden, weight, bias)
        (d_hidden, *rest), aux = whole(hidden, weight, bias)
        return (d_hidden, *map(shards.unshard_rows, rest)), aux

    gradients, (loss_sum, values) = jax.jit(run)(*(data[name] for name in policy_problem.HEAD), labels)
    return loss_sum, values, oracle.HeadGradients(*gradients)


@pytest.mark.parametrize(
    "name, sizes, outside",
    [
        ("grpo, entropy, k3", (2, 4), False),
        ("grpo, entropy, k3", (1, 3), True),
        ("gspo by length, wide bounds", (2, 3), True),
        ("kl_cov", (2, 3), False),
        pytest.param("gspo, entropy", (2, 4), False, marks=SLOW),
        pytest.param("grpo_paper, k1", (2, 3), False, marks=SLOW),
        pytest.param("dr_grpo", (4, 2), True, marks=SLOW),
    ],
)
def test_vocabulary_shards_and_data_ranks_give_the_unsharded_result(name, sizes, outside):
    data = problem()
    compare(
        sharded(data, LOSSES[name], sizes, outside=outside, **OPTIONS), run(two_calls, data, LOSSES[name], **OPTIONS)
    )


@pytest.mark.parametrize("outside", [False, pytest.param(True, marks=SLOW)])
def test_on_policy_over_shards(outside):
    data, lse = on_policy(problem(options={}))
    compare(sharded(data, grpo(), (2, 3), outside=outside, lse=lse), run(two_calls, data, grpo()))


@pytest.mark.bad_input
def test_differentiation_without_replication_types_is_refused():
    with pytest.raises(ValueError, match="check_vma=True"):
        sharded(problem(), grpo(), (2, 3), check_vma=False)


def all_reduces(text):
    """Result types of the all-reduces of a lowered module; a type of scalars is left out."""
    found = re.findall(r'"stablehlo.all_reduce".*?\) : \(.*?\) -> \(?(tensor<\S+?>)', text, flags=re.DOTALL)
    return sorted(x for x in found if re.search(r"<\d", x))


def test_collectives_of_a_step():
    """Forward: the maximum and one sum of everything else. Backward: dHidden over the vocabulary, dWeight over the data."""
    data = problem(bias=False)
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:8])
    shards = VocabShards.even(VOCAB, 4)

    def local(hidden, weight, labels, gradient):
        def mean(hidden, weight):
            problem = {**labels, "hidden": hidden, "weight": weight, "bias": None}
            return one_call(problem, grpo(), axis_name="tensor", vocab=shards)[0].psum("data").mean()

        return jax.grad(mean, (0, 1))(hidden, weight) if gradient else mean(hidden, weight)

    labels = {name: data[name] for name in policy_problem.LABELS}
    specs = P("data"), P("tensor"), P("data")

    def lowered(gradient):
        out_specs = specs[:2] if gradient else P()
        mapped = jax.shard_map(lambda *x: local(*x, gradient), mesh=mesh, in_specs=specs, out_specs=out_specs)
        return jax.jit(mapped).lower(data["hidden"], shards.shard_rows(data["weight"]), labels)

    tokens, columns = ROWS * LENGTH // 2, shards.max_width
    forward, both = all_reduces(lowered(False).as_text()), all_reduces(lowered(True).as_text())
    added = [f"tensor<{tokens}x{policy_problem.HIDDEN}xf32>", f"tensor<{columns}x{policy_problem.HIDDEN}xf32>"]
    assert len(forward) == 2, forward
    assert [x for x in both if x in added] == sorted(added) and len(both) == 4, both
    # What XLA makes of them: no collective more.
    compiled = lowered(True).compile().as_text()
    assert not re.search("all-gather|reduce-scatter|all-to-all|collective-permute", compiled)


# --- bad input ----------------------------------------------------------------------------------------------------


@pytest.mark.bad_input
@pytest.mark.parametrize(
    "changes, message",
    [
        ({"lse": np.zeros((ROWS, LENGTH), np.float32), "with_entropy": True}, "lse: expected None along with entropy"),
        ({"lse": np.zeros(ROWS * LENGTH, np.float32)}, "lse: expected a floating-point array of shape"),
        (
            {"lse": np.zeros((ROWS, LENGTH), np.float32), "engine": "reference"},
            "lse: expected None where engine, call or loss",
        ),
        ({"engine": "none such"}, "engine: expected"),
    ],
)
def test_bad_input(changes, message):
    with pytest.raises(ValueError, match=message):
        one_call(problem(), grpo(), **changes)


@pytest.mark.bad_input
@pytest.mark.parametrize("name, argument", [("old", "old_log_probs"), ("advantages", "advantages")])
def test_arrays_of_another_shape_are_refused(name, argument):
    data = problem()
    with pytest.raises(ValueError, match=f"{argument}: expected"):
        one_call({**data, name: data[name].reshape(-1)}, grpo())
