"""Every engine keeps the same contract: one suite, by engine and capability, against the float64 oracle.

Tests specific to an engine (tiles, work lists, availability, lowering for a GPU) are in test_<engine>_*.py. The
Hopper kernels run in JAX's Mosaic GPU interpreter, which needs JAX 0.11; for the Triton kernels a plain stand-in runs
here, and test_triton_kernels.py runs this file again with the kernels' source in Triton's interpreter. That calls with
and without jit agree is in tests/test_variants.py.
"""

import contextlib

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from jaxlogp import linear_log_probs
from jaxlogp.head import ChunkedEngine, record_head_runs
from tests import oracle
from tests.head import cases
from tests.head.cases import ALL_OPTIONS, ENGINES, GRADIENT_ERROR, HIDDEN, TOKENS, VALUE_ERROR, VOCAB, Entry

SLOW = pytest.mark.slow
BF16, FP16, FP32 = jnp.bfloat16, jnp.float16, jnp.float32


def params(entries, slow=()):
    """Entries as parameters: those that are missing here are skipped with the reason, those named in ``slow`` are slow."""

    def marks(entry):
        skip = pytest.mark.skipif(entry.missing is not None, reason=f"NOT RUN: {entry.name}: {entry.missing}")
        return [skip, *([SLOW] if entry.name in slow else [])]

    return [pytest.param(entry, id=entry.name, marks=marks(entry)) for entry in entries]


def engines(slow=()):
    return pytest.mark.parametrize("entry", params(ENGINES, slow))


def check(entry, data, **options):
    """Values and gradients of the engine against float64."""
    result, gradients = cases.run(data, entry.engine, **options)
    wanted = cases.expected(data, **options)
    cases.check(result, gradients, wanted, gradient_error=cases.gradient_error(data, **options))
    return result, gradients


# --- values and gradients -----------------------------------------------------------------------------------------


@engines()
@pytest.mark.parametrize(
    "with_entropy, options",
    [(False, {}), (True, ALL_OPTIONS)],
    ids=["log-probs", "entropy, all options, bias"],
)
def test_values_and_gradients_match_the_oracle(entry, with_entropy, options):
    data = entry.case(bias=bool(options))
    result, gradients = check(entry, data, **({} if with_entropy else {"with_entropy": False}), **options)
    assert (result.entropy is None) == (not with_entropy)
    assert (gradients.bias is None) == (not options)


@SLOW
@engines()
@pytest.mark.parametrize(
    "options", [{"temperature": 0.7, "logit_scale": -1.3}, {"softcap": 5.0}], ids=["factors", "softcap"]
)
def test_factors_without_a_soft_cap_and_a_soft_cap_without_factors(entry, options):
    data = entry.case(bias=False, seed=1)
    result, _ = check(entry, data, **options)
    for left_out in options:
        without = cases.expected(data, **{name: options[name] for name in options if name != left_out})[0][0]
        assert oracle.scaled_error(result.log_probs, without) > 1e-2, "every option must change the result"


SIZES = [
    *(Entry(f"chunked {t} x {v}", ChunkedEngine(t, v)) for t, v in [(1, 512), (64, 7), (512, 1), (999, 999)]),
    *(Entry(f"triton window {w}", cases.triton(window=w), (BF16,)) for w in (64, 192, None)),
]


@pytest.mark.parametrize("entry", params(SIZES, slow=("chunked 64 x 7", "triton window 64", "triton window 192")))
def test_sizes_of_chunks_and_windows_do_not_change_the_result(entry):
    check(entry, entry.case((70,), seed=2))


@pytest.mark.parametrize("vocab", [1, 65, *(pytest.param(n, marks=SLOW) for n in (8, 63, 64, 127, 129, 257))])
@pytest.mark.parametrize("entry", params([e for e in ENGINES if e.name in ("reference", "chunked", "triton")]))
def test_vocabularies_around_tiles_and_windows(entry, vocab):
    check(entry, entry.case((5,), vocab=vocab, bias=False, seed=3))


# --- layouts ------------------------------------------------------------------------------------------------------


@engines()
def test_a_weight_of_the_other_layout(entry):
    """[H, V]: its gradient comes back as [H, V], and the other results are bitwise those of [V, H]."""
    # A vocabulary of tests above, whose program runs here too, except where a layout needs multiples of 64.
    data = entry.case(vocab=320 if entry.name == "hopper" else VOCAB, seed=13)
    turned = {**data, "weight": data["weight"].T}
    result, gradients = cases.run(turned, entry.engine, weight_layout="hv", **ALL_OPTIONS)
    assert gradients.weight.shape == turned["weight"].shape
    wanted = cases.expected(data, **ALL_OPTIONS)
    turned_back = gradients._replace(weight=gradients.weight.T)
    cases.check(result, turned_back, wanted, gradient_error=cases.gradient_error(data))
    if entry.name != "reference":
        # Its products are XLA's own, which may sum another layout in another order.
        plain, of_plain = cases.run(data, entry.engine, **ALL_OPTIONS)
        cases.same_bits((result, gradients.hidden, gradients.bias), (plain, of_plain.hidden, of_plain.bias))


# --- dtypes -------------------------------------------------------------------------------------------------------

MIXES = {
    # name: hidden dtype, weight dtype, fp32_head, dtype in which hidden enters the product
    "bf16 x bf16": (BF16, BF16, False, BF16),
    "fp32 x bf16": (FP32, BF16, False, BF16),
    "bf16 x fp32": (BF16, FP32, False, FP32),
    "bf16 x bf16, fp32 head": (BF16, BF16, True, FP32),
    "fp16 x fp16": (FP16, FP16, False, FP16),
    "bf16 x fp16": (BF16, FP16, False, FP16),
    "fp32 x fp16": (FP32, FP16, False, FP16),
    "fp32 x fp16, fp32 head": (FP32, FP16, True, FP32),
    "fp32 x bf16, fp32 head": (FP32, BF16, True, FP32),
}
# Every engine multiplies these in the default run, and the others in the slow lane; what it refuses costs nothing.
QUICK_MIXES = {"bf16 x bf16", "fp32 x bf16, fp32 head"}


def quick(entry, name):
    hidden_dtype, weight_dtype, fp32_head, _ = MIXES[name]
    return name in QUICK_MIXES or not entry.takes(hidden_dtype, weight_dtype, fp32_head)


def mix(name, **changes):
    hidden_dtype, weight_dtype, _, product_dtype = MIXES[name]
    data = cases.case(dtypes=(hidden_dtype, weight_dtype), bias=weight_dtype, seed=4, **changes)
    return data, {**data, "hidden": data["hidden"].astype(product_dtype)}


@pytest.mark.parametrize(
    "entry, name",
    [
        pytest.param(
            *param.values,
            name,
            id=f"{name}-{param.id}",
            marks=[*param.marks, *([] if quick(*param.values, name) else [SLOW])],
        )
        for param in params(ENGINES)
        for name in MIXES
    ],
)
def test_dtype_mixes(entry, name):
    hidden_dtype, weight_dtype, fp32_head, product_dtype = MIXES[name]
    data, operands = mix(name)
    options = {"fp32_head": True} if fp32_head else {}
    if not entry.takes(hidden_dtype, weight_dtype, fp32_head):
        with pytest.raises(ValueError, match=f"engine: expected .*'{entry.name}' takes"):
            cases.run(data, entry.engine, **options)
        return
    result, gradients = cases.run(data, entry.engine, **options)
    cases.check(result, gradients, cases.expected(operands))
    assert [x.dtype for x in gradients] == [hidden_dtype, weight_dtype, weight_dtype]
    if fp32_head and hidden_dtype == FP32:
        # True fp32 operands: the hidden gradient, which is returned in fp32, is of that quality too.
        error = oracle.relative_error(gradients.hidden, cases.expected(operands)[1].hidden)
        assert error < cases.FP32_GRADIENT_ERROR
        rounded = cases.expected({**data, "hidden": data["hidden"].astype(weight_dtype)})[0][0]
        error = oracle.scaled_error(result.log_probs, rounded)
        assert error > 10 * VALUE_ERROR, "the flag must keep the hidden states unrounded"


@pytest.mark.parametrize("entry", params([entry for entry in ENGINES if FP16 in entry.weights]))
@pytest.mark.parametrize("exponent", range(9))
def test_fp16_gradients_of_small_cotangents(entry, exponent):
    """A step's denominator stands in the cotangents; the smallest number of fp16 is 6e-8."""
    data, operands = mix("fp32 x fp16")
    scale = 10.0**-exponent
    data.update(g_lp=data["g_lp"] * jnp.float32(scale), g_entropy=data["g_entropy"] * jnp.float32(scale))
    _, gradients = cases.run(data, entry.engine)
    wanted = cases.expected({**data, "hidden": operands["hidden"]})[1]
    # The hidden gradient is returned in fp32. Those of weight and bias end in fp16, whose numbers are 2^-24 apart near zero.
    assert oracle.relative_error(gradients.hidden, wanted.hidden) < GRADIENT_ERROR
    for actual, want in ((gradients.weight, wanted.weight), (gradients.bias, wanted.bias)):
        nearest = 2.0**-25 * want.size**0.5 / np.linalg.norm(want)
        assert oracle.relative_error(actual, want) < GRADIENT_ERROR + nearest


# --- masks and targets --------------------------------------------------------------------------------------------


@engines()
@pytest.mark.parametrize("invalid", [np.nan, np.inf])
def test_masked_tokens_are_exactly_zero_and_touch_nothing_else(entry, invalid):
    data = entry.case(seed=5)
    mask = np.ones(TOKENS, bool)
    mask[0, 1] = mask[1, 0] = mask[1, 4] = False
    data["mask"] = jnp.asarray(mask)
    clean = check(entry, data)
    data["targets"] = data["targets"].at[0, 1].set(-100).at[1, 0].set(99_999).at[1, 4].set(99)
    data["hidden"] = jnp.where(data["mask"][..., None], data["hidden"], invalid)
    data["g_lp"] = jnp.where(data["mask"], data["g_lp"], 7.0)  # a cotangent at a masked token has no effect
    result, gradients = cases.run(data, entry.engine)
    for values in (*jax.tree.leaves(result), gradients.hidden):
        assert not np.asarray(values, np.float32)[~mask].any()
    cases.same_bits((result, gradients), clean)


@engines()
def test_an_all_masked_batch_is_zero(entry):
    data = entry.case()
    data.update(mask=jnp.zeros(TOKENS, bool), hidden=data["hidden"] * jnp.asarray(np.nan, entry.dtype))
    for values in jax.tree.leaves(cases.run(data, entry.engine)):
        assert not np.asarray(values, np.float32).any()


@engines()
def test_out_of_vocab_zero_keeps_the_softmax_term_and_the_entropy(entry):
    data = entry.case(seed=6)
    data["mask"] = data["mask"].at[0, 3].set(False)
    inside, _ = cases.run(data, entry.engine, out_of_vocab="zero")
    data["targets"] = data["targets"].at[0, 1].set(VOCAB).at[1, 2].set(-1).at[1, 3].set(99_999).at[0, 3].set(-100)
    # The gradient is -p g: not zero, and the same as if the token had no column of its own.
    result, _ = check(entry, data, out_of_vocab="zero")
    for index in ((0, 1), (1, 2), (1, 3)):
        assert result.log_probs[index] == 0.0
    np.testing.assert_array_equal(result.entropy, inside.entropy)


@pytest.mark.bad_input
@engines()
@pytest.mark.parametrize("bad", [-1, VOCAB, 99_999])
def test_an_active_target_out_of_range_is_named_with_its_position(entry, bad):
    data = entry.case()
    data["targets"] = data["targets"].at[1, 3].set(bad)
    with pytest.raises(ValueError) as raised:
        cases.call(data, entry.engine)
    for fragment in ("targets", str(bad), "(1, 3)", str(VOCAB)):
        assert fragment in str(raised.value), raised.value


@engines()
def test_under_jit_an_active_target_out_of_range_gives_nan_for_that_token_only(entry):
    data = entry.case(seed=7)
    clean, clean_gradients = cases.run(data, entry.engine)
    bad = np.zeros(TOKENS, bool)
    bad[1, 3] = True
    data["targets"] = data["targets"].at[1, 3].set(VOCAB)
    result, gradients = cases.run(data, entry.engine)
    np.testing.assert_array_equal(np.isnan(result.log_probs), bad)
    np.testing.assert_array_equal(np.isnan(np.asarray(gradients.hidden, np.float32)).all(axis=-1), bad)
    cases.same_bits(result.log_probs[~bad], clean.log_probs[~bad])
    cases.same_bits(gradients.hidden[~bad], clean_gradients.hidden[~bad])
    cases.same_bits(result.entropy, clean.entropy)


# --- extreme logits -----------------------------------------------------------------------------------------------


@engines()
@pytest.mark.parametrize("shift", [-50.0, -1e4])
def test_all_negative_logits_do_not_underflow(entry, shift):
    data = entry.case(seed=8)
    data["bias"] = data["bias"] + jnp.float32(shift)
    result, gradients = cases.run(data, entry.engine)
    # Product + bias is rounded to |shift| 2^-24 in each logit, which no later step can undo. Nothing else may be of the
    # shift's size: an entropy from lse - Σ p z would collect the rounding of 264 large terms and miss the bound.
    unit = abs(shift) * 2.0**-24
    bounds = max(VALUE_ERROR, 2 * unit), max(cases.gradient_error(data), 4 * unit)
    cases.check(result, gradients, cases.expected(data), *bounds)


@engines()
def test_columns_of_minus_infinity_carry_no_probability_and_no_gradient(entry):
    data = entry.case(seed=9)
    gone = np.r_[64:128, 130, 256:VOCAB]  # a whole tile of 64 columns, one column, and the second tile of 256 columns
    data["bias"] = data["bias"].at[gone].set(-jnp.inf)
    data["targets"] = jnp.where(jnp.isin(data["targets"], jnp.asarray(gone, jnp.int32)), 5, data["targets"])
    result, gradients = cases.run(data, entry.engine)
    keep = np.setdiff1d(np.arange(VOCAB), gone)
    kept = {**data, "weight": data["weight"][keep], "bias": data["bias"][keep]}
    kept["targets"] = jnp.asarray(np.searchsorted(keep, np.asarray(data["targets"])), jnp.int32)
    of_kept = gradients._replace(weight=gradients.weight[keep], bias=gradients.bias[keep])
    cases.check(result, of_kept, cases.expected(kept), gradient_error=cases.gradient_error(data))
    assert not np.asarray(gradients.weight[gone], np.float32).any()
    # Such a column as a target has log-prob -inf, and spoils no entropy.
    data["targets"] = data["targets"].at[0, 3].set(70)
    result, gradients = cases.run(data, entry.engine)
    assert np.isneginf(result.log_probs[0, 3]) and np.isfinite(result.entropy).all()
    # The one-hot drops out, as for a target that no column owns.
    kept["targets"] = kept["targets"].at[0, 3].set(len(keep))
    wanted, error = cases.expected(kept)[1], cases.gradient_error(data)
    of_kept = gradients._replace(weight=gradients.weight[keep], bias=gradients.bias[keep])
    for gradient, want in zip(of_kept, wanted, strict=True):
        assert oracle.relative_error(gradient, want) < error
    assert not np.asarray(gradients.weight[gone], np.float32).any() and not np.asarray(gradients.bias[gone]).any()


@pytest.mark.filterwarnings("ignore:overflow encountered in matmul")  # of the interpreter of the Hopper kernels
@engines()
@pytest.mark.parametrize("factor", [4.0, -4.0])
def test_a_product_that_overflows_is_nan_under_a_soft_cap(entry, factor):
    """tanh would make ±inf a finite ±cap, of the wrong sign where a partial sum overflowed."""
    data, bad = entry.case(seed=14), np.zeros(TOKENS, bool)
    bad[1, 3] = True
    data["weight"] = data["weight"].at[5, 0].set(factor)
    clean, clean_gradients = cases.run(data, entry.engine, **ALL_OPTIONS)
    hidden = data["hidden"].at[1, 3, 0].set(3e38)
    result, gradients = cases.run({**data, "hidden": hidden}, entry.engine, **ALL_OPTIONS)
    for values, of_clean in zip(result[:2], clean[:2], strict=True):
        np.testing.assert_array_equal(np.isnan(values), bad)
        cases.same_bits(values[~bad], of_clean[~bad])
    np.testing.assert_array_equal(np.isnan(np.asarray(gradients.hidden, np.float32)).all(axis=-1), bad)
    cases.same_bits(gradients.hidden[~bad], clean_gradients.hidden[~bad])
    assert np.isnan(np.asarray(gradients.weight, np.float32)).all() and np.isnan(gradients.bias).all()
    # Without a label the token touches nothing; likewise without a cotangent, but the Hopper kernels read masks only.
    unused = [{"mask": jnp.asarray(~bad)}]
    if entry.name != "hopper":
        unused.append({name: jnp.where(bad, 0.0, data[name]) for name in ("g_lp", "g_entropy")})
    for changes in unused:
        _, wanted = cases.run({**data, **changes}, entry.engine, **ALL_OPTIONS)
        _, gradients = cases.run({**data, **changes, "hidden": hidden}, entry.engine, **ALL_OPTIONS)
        assert not np.asarray(gradients.hidden, np.float32)[bad].any()
        cases.same_bits(gradients, wanted)


@engines()
def test_a_confident_target_keeps_its_small_gradient(entry):
    count = TOKENS[0] * TOKENS[1]
    tokens, targets = np.arange(count), 13 * np.arange(count)
    hidden, weight = np.zeros((count, HIDDEN)), np.zeros((VOCAB, HIDDEN))
    hidden[tokens, tokens] = 1.0
    weight[targets, tokens] = 14.0
    data, _ = mix("bf16 x bf16")
    data.update(
        hidden=jnp.asarray(hidden.reshape(*TOKENS, HIDDEN), BF16),
        weight=jnp.asarray(weight, BF16),
        bias=jnp.zeros_like(data["bias"]),
        targets=jnp.asarray(targets.reshape(TOKENS), jnp.int32),
        g_lp=jnp.ones(TOKENS, jnp.float32),
        g_entropy=jnp.zeros(TOKENS, jnp.float32),
    )
    _, gradients = cases.run(data, entry.engine)
    wanted = cases.expected(data)[1]
    # 14 (1 - p) = 3e-3; p rounded to bf16 before the one-hot is subtracted would make it exactly 0.
    own = oracle.f64(gradients.hidden).reshape(count, HIDDEN)[tokens, tokens]
    assert oracle.relative_error(own, wanted.hidden.reshape(count, HIDDEN)[tokens, tokens]) < GRADIENT_ERROR
    own = oracle.f64(gradients.weight)[targets, tokens]
    assert oracle.relative_error(own, wanted.weight[targets, tokens]) < GRADIENT_ERROR


# --- programs and meshes ------------------------------------------------------------------------------------------


@engines(slow=("reference", "fixed_order", "triton"))
def test_a_frozen_weight_gives_the_same_hidden_gradient(entry):
    data = entry.case()
    both = cases.run(data, entry.engine)[1].hidden

    def objective(hidden):
        weight, bias = (jax.lax.stop_gradient(data[name]) for name in ("weight", "bias"))
        result = cases.call({**data, "hidden": hidden, "weight": weight, "bias": bias}, entry.engine)
        return jnp.sum(result.log_probs * data["g_lp"] + result.entropy * data["g_entropy"])

    alone = jax.jit(jax.grad(objective))(data["hidden"])
    # The same products in another program: in fp32 each is within the bound of float64, 16 bits may differ by one rounding.
    bound = 2 * cases.FP32_GRADIENT_ERROR if entry.dtype == FP32 else 2.0**-8
    assert oracle.relative_error(alone, oracle.f64(both)) < bound


@pytest.mark.parametrize("entry", params([entry for entry in ENGINES if not entry.fp32_products]))
def test_without_a_mask_no_bit_changes(entry):
    """The kernels' engines pack tokens by their mask; without one nothing is moved."""
    data = entry.case()
    cases.same_bits(cases.run({**data, "mask": None}, entry.engine), cases.run(data, entry.engine))


# The Hopper kernels over Auto axes: test_hopper_one_pass_sharded.py.
SHARDED = [
    pytest.param(*each.values, kind, id=f"{kind.name}-{each.id}", marks=[*each.marks, *marks])
    for kind, marks in ((AxisType.Auto, [SLOW]), (AxisType.Explicit, []))
    for each in params(ENGINES, slow=("hopper", "triton"))
    if kind == AxisType.Explicit or each.id != "hopper"
]


@pytest.mark.parametrize("entry, axis_type", SHARDED)
def test_uneven_vocabulary_shards_and_data_ranks(entry, axis_type):
    mesh, shards = entry.make_mesh(axis_type), entry.shards(VOCAB, entry.mesh[1])
    data = entry.case((6, 4), seed=10)
    data["mask"] = data["mask"].at[1, 2].set(False)
    data["hidden"] = data["hidden"].at[1, 2].set(np.nan)
    together = cases.interpreted_together() if entry.name == "hopper" else contextlib.nullcontext()
    with jax.set_mesh(mesh), together:
        result, gradients = jax.block_until_ready(
            cases.run_sharded(data, engine=entry.engine, mesh=mesh, shards=shards)
        )
    cases.check(result, gradients, cases.expected(data), gradient_error=cases.gradient_error(data))


@pytest.mark.parametrize("entry", params([entry for entry in ENGINES if entry.name in ("chunked", "fixed_order")]))
def test_fp16_gradients_of_data_ranks_that_need_different_scales(entry):
    """The cotangents of the second rank are smaller: where ranks are summed first, one scale has to serve both."""
    data = cases.case((6, 4), dtypes=(FP32, FP16), bias=FP32, seed=10)
    # fp16 ends 2^37 below the largest scaled cotangent, and a rank's own scale has no end.
    smaller = {"fixed_order": 2.0**-6, "chunked": 2.0**-30}[entry.name]
    small = jnp.asarray(np.repeat([1.0, smaller], 3), jnp.float32)[:, None]
    data.update(g_lp=data["g_lp"] * small, g_entropy=data["g_entropy"] * small)
    mesh, shards = entry.make_mesh(AxisType.Explicit), entry.shards(VOCAB, entry.mesh[1])
    with jax.set_mesh(mesh):
        _, gradients = cases.run_sharded(data, engine=entry.engine, mesh=mesh, shards=shards)
    wanted = cases.expected({**data, "hidden": data["hidden"].astype(FP16)})[1]
    # dz is rounded to fp16 (2^-11), and so is the weight's gradient at the end.
    for rank in (slice(0, 3), slice(3, 6)):
        assert oracle.relative_error(np.asarray(gradients.hidden)[rank], wanted.hidden[rank]) < GRADIENT_ERROR
    assert oracle.relative_error(gradients.weight, wanted.weight) < GRADIENT_ERROR
    assert oracle.relative_error(gradients.bias, wanted.bias) < GRADIENT_ERROR


@engines()
def test_what_ran_is_recorded_and_new_numbers_are_not_traced_again(entry):
    chex.clear_trace_counter()
    run = jax.jit(chex.assert_max_traces(lambda *operands: forward(entry, *operands), n=1))
    with record_head_runs() as runs:
        for seed in (11, 12):
            data = entry.case(seed=seed)
            result = run(*(data[name] for name in OPERANDS))
            cases.check_values(result, cases.expected(data)[0])
    assert [(x.path, x.engine, x.num_vocab_shards) for x in runs] == [("linear_log_probs", entry.name, 1)]


OPERANDS = ("hidden", "weight", "bias", "targets")


def forward(entry, hidden, weight, bias, targets):
    return linear_log_probs(hidden, weight, targets, bias=bias, with_entropy=True, engine=entry.engine)
