"""linear_log_probs on one device: both portable engines against the float64 oracle, values and gradients."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlogp import ChunkedEngine, TokenLogProbs, head_logits, linear_log_probs, record_head_runs
from tests import oracle

# Contract bounds, against float64 on the same inputs. fp32: products of H terms, exp and log cost a few 2^-24.
VALUE_ERROR = 1e-5
GRADIENT_ERROR = 2e-5
# bf16 operands: their products are exact in fp32, so values stay at fp32 quality (contract: 2e-5).
BF16_VALUE_ERROR = 2e-5
# bf16 gradients: dz is rounded to 2^-9 before the product and the result once more.
BF16_GRADIENT_ERROR = 5e-3

TOKENS, HIDDEN, VOCAB = (2, 5), 16, 257
CHUNKED = ChunkedEngine(token_chunk=4, vocab_tile=64)  # neither divides 10 tokens or 257 columns
ENGINES = pytest.mark.parametrize("engine", ["reference", CHUNKED], ids=["reference", "chunked"])
ALL_OPTIONS = (("temperature", 0.7), ("logit_scale", 1.3), ("softcap", 5.0))


def case(tokens=TOKENS, hidden_size=HIDDEN, vocab=VOCAB, dtypes=(jnp.float32, jnp.float32), bias=False, seed=0):
    rng = np.random.default_rng(seed)
    targets = rng.integers(0, vocab, tokens).astype(np.int32)
    targets.flat[:2] = 0, vocab - 1
    return {
        "hidden": jnp.asarray(rng.normal(size=(*tokens, hidden_size)), dtypes[0]),
        "weight": jnp.asarray(rng.normal(0.0, 0.5, (vocab, hidden_size)), dtypes[1]),
        "bias": jnp.asarray(rng.normal(size=vocab), dtypes[1]) if bias else None,
        "targets": jnp.asarray(targets),
        "mask": jnp.ones(tokens, bool),
        "g_lp": jnp.asarray(rng.normal(size=tokens), jnp.float32),
        "g_entropy": jnp.asarray(rng.normal(size=tokens), jnp.float32),
    }


@functools.partial(jax.jit, static_argnames=("engine", "with_entropy", "options"))
def value_and_gradients(hidden, weight, bias, targets, mask, g_lp, g_entropy, *, engine, with_entropy=True, options=()):
    def objective(h, w, b):
        result = linear_log_probs(
            h, w, targets, mask=mask, bias=b, with_entropy=with_entropy, engine=engine, **dict(options)
        )
        total = jnp.sum(result.log_probs * g_lp)
        return (total + jnp.sum(result.entropy * g_entropy) if with_entropy else total), result

    gradients, result = jax.grad(objective, argnums=(0, 1, 2), has_aux=True)(hidden, weight, bias)
    return result, oracle.HeadGradients(*gradients)


def expected(data, options=(), with_entropy=True, hidden=None):
    options = {key: value for key, value in dict(options).items() if key in oracle.Head._fields}
    head = oracle.Head(**options)
    hidden = data["hidden"] if hidden is None else hidden
    args = (hidden, data["weight"], data["targets"])
    values = oracle.head_log_probs(*args, data["mask"], data["bias"], head)
    g_entropy = data["g_entropy"] if with_entropy else None
    return values, oracle.head_gradients(*args, data["g_lp"], g_entropy, data["mask"], data["bias"], head)


def check(result, gradients, wanted, value_error=VALUE_ERROR, gradient_error=GRADIENT_ERROR):
    (log_probs, entropy), wanted_gradients = wanted
    assert isinstance(result, TokenLogProbs)
    assert result.log_probs.dtype == jnp.float32
    assert oracle.scaled_error(result.log_probs, log_probs) < value_error
    if result.entropy is not None:
        assert result.entropy.dtype == jnp.float32
        assert oracle.scaled_error(result.entropy, entropy) < value_error
    for name, gradient in gradients._asdict().items():
        if gradient is not None:
            error = oracle.relative_error(gradient, getattr(wanted_gradients, name))
            assert error < gradient_error, f"{name}: {error}"


@ENGINES
@pytest.mark.parametrize("with_entropy", [False, True], ids=["log-probs", "entropy"])
@pytest.mark.parametrize("options", [(), ALL_OPTIONS], ids=["plain", "temperature, scale, soft cap, bias"])
def test_values_and_gradients_match_the_oracle(engine, with_entropy, options):
    data = case(bias=bool(options))
    result, gradients = value_and_gradients(**data, engine=engine, with_entropy=with_entropy, options=options)
    assert (result.entropy is None) == (not with_entropy)
    check(result, gradients, expected(data, options, with_entropy))


@pytest.mark.parametrize("option", [("temperature", 0.7), ("logit_scale", 1.3), ("softcap", 5.0)], ids=lambda o: o[0])
def test_each_option_alone_with_the_chunked_engine(option):
    data = case(seed=1)
    result, gradients = value_and_gradients(**data, engine=CHUNKED, options=(option,))
    check(result, gradients, expected(data, (option,)))
    assert oracle.scaled_error(result.log_probs, expected(data)[0][0]) > 1e-2, "the option must change the result"


DTYPES = {
    # name: hidden dtype, weight dtype, fp32_head, dtype in which hidden enters the product, hidden-gradient bound
    "bf16 x bf16": (jnp.bfloat16, jnp.bfloat16, False, jnp.bfloat16, BF16_GRADIENT_ERROR),
    "fp32 x bf16": (jnp.float32, jnp.bfloat16, False, jnp.bfloat16, BF16_GRADIENT_ERROR),
    "bf16 x fp32": (jnp.bfloat16, jnp.float32, False, jnp.float32, BF16_GRADIENT_ERROR),
    "bf16 x bf16, fp32 head": (jnp.bfloat16, jnp.bfloat16, True, jnp.float32, BF16_GRADIENT_ERROR),
    "fp16 x fp16": (jnp.float16, jnp.float16, False, jnp.float16, BF16_GRADIENT_ERROR),
    "fp32 x fp16": (jnp.float32, jnp.float16, False, jnp.float16, BF16_GRADIENT_ERROR),
    "fp32 x fp16, fp32 head": (jnp.float32, jnp.float16, True, jnp.float32, GRADIENT_ERROR),
    # True fp32 operands: the hidden gradient is returned in fp32 and must be of fp32 quality.
    "fp32 x bf16, fp32 head": (jnp.float32, jnp.bfloat16, True, jnp.float32, GRADIENT_ERROR),
}


@ENGINES
@pytest.mark.parametrize("name", DTYPES)
def test_dtype_mixes(engine, name):
    hidden_dtype, weight_dtype, fp32_head, product_dtype, hidden_bound = DTYPES[name]
    data = case(dtypes=(hidden_dtype, weight_dtype), bias=True, seed=2)
    result, gradients = value_and_gradients(**data, engine=engine, options=(("fp32_head", fp32_head),))
    wanted = expected(data, hidden=data["hidden"].astype(product_dtype))
    check(result, gradients, wanted, BF16_VALUE_ERROR, BF16_GRADIENT_ERROR)
    assert oracle.relative_error(gradients.hidden, wanted[1].hidden) < hidden_bound
    assert gradients.hidden.dtype == hidden_dtype
    assert gradients.weight.dtype == weight_dtype and gradients.bias.dtype == weight_dtype
    if name == "fp32 x bf16, fp32 head":
        rounded = expected(data, hidden=data["hidden"].astype(jnp.bfloat16))[0][0]
        error = oracle.scaled_error(result.log_probs, rounded)
        assert error > 10 * BF16_VALUE_ERROR, "the flag must keep the hidden states unrounded"


@ENGINES
@pytest.mark.parametrize("invalid", [np.nan, np.inf])
def test_masked_tokens_are_exactly_zero_and_touch_nothing_else(engine, invalid):
    data = case(bias=True, seed=3)
    mask = np.ones(TOKENS, bool)
    mask[0, 1] = mask[1, 0] = mask[1, 4] = False
    data["mask"] = jnp.asarray(mask)
    clean, clean_gradients = value_and_gradients(**data, engine=engine)
    data["targets"] = data["targets"].at[0, 1].set(-100).at[1, 0].set(99_999).at[1, 4].set(99)
    data["hidden"] = jnp.where(data["mask"][..., None], data["hidden"], invalid)
    data["g_lp"] = jnp.where(data["mask"], data["g_lp"], 7.0)  # a cotangent at a masked token has no effect
    result, gradients = value_and_gradients(**data, engine=engine)
    for values in (result.log_probs, result.entropy, gradients.hidden):
        assert not np.asarray(values)[~mask].any()
    chex.assert_trees_all_equal(result, clean)
    chex.assert_trees_all_equal(gradients, clean_gradients)
    check(result, gradients, expected(data))


@ENGINES
def test_an_all_masked_batch_is_zero(engine):
    data = case(bias=True)
    data["mask"] = jnp.zeros(TOKENS, bool)
    data["hidden"] = data["hidden"] * jnp.nan
    result, gradients = value_and_gradients(**data, engine=engine)
    for values in (*result, *gradients):
        np.testing.assert_array_equal(values, np.zeros(values.shape))


def test_token_shapes_are_a_matter_of_layout():
    data = case(seed=4)
    result, gradients = value_and_gradients(**data, engine=CHUNKED)
    tokens = ("hidden", "targets", "mask", "g_lp", "g_entropy")
    flat = {**data, **{key: data[key].reshape(10, *data[key].shape[2:]) for key in tokens}}
    flat_result, flat_gradients = value_and_gradients(**flat, engine=CHUNKED)
    chex.assert_shape(list(flat_result), (10,))
    chex.assert_shape(flat_gradients.hidden, (10, HIDDEN))
    # The same arithmetic; only what the compiler fuses around it may differ, a few 2^-24.
    for seen, wanted in zip((*result, *gradients[:2]), (*flat_result, *flat_gradients[:2]), strict=True):
        assert oracle.relative_error(seen.reshape(wanted.shape), wanted) < 1e-6


@ENGINES
def test_a_frozen_weight_gives_the_same_hidden_gradient(engine):
    data = case(seed=5)

    def objective(hidden):
        weight = jax.lax.stop_gradient(data["weight"])
        result = linear_log_probs(hidden, weight, data["targets"], engine=engine)
        return jnp.sum(result.log_probs * data["g_lp"])

    gradient = jax.jit(jax.grad(objective))(data["hidden"])
    assert oracle.relative_error(gradient, expected(data, with_entropy=False)[1].hidden) < GRADIENT_ERROR


@ENGINES
def test_out_of_vocab_zero_keeps_the_softmax_term_and_the_entropy(engine):
    data = case(bias=True, seed=6)
    mask = data["mask"].at[0, 3].set(False)
    inside, _ = value_and_gradients(**{**data, "mask": mask}, engine=engine, options=(("out_of_vocab", "zero"),))
    data.update(mask=mask, targets=data["targets"].at[0, 1].set(VOCAB).at[1, 2].set(-1).at[0, 3].set(-100))
    result, gradients = value_and_gradients(**data, engine=engine, options=(("out_of_vocab", "zero"),))
    assert result.log_probs[0, 1] == 0.0 and result.log_probs[1, 2] == 0.0
    np.testing.assert_array_equal(result.entropy, inside.entropy)
    check(result, gradients, expected(data))

    # The log-prob gradient alone is -p g: not zero, and the same as if the token had no target column at all.
    data["g_entropy"] = jnp.zeros_like(data["g_entropy"])
    _, alone = value_and_gradients(**data, engine=engine, options=(("out_of_vocab", "zero"),))
    logits = oracle.head_logits(data["hidden"], data["weight"], data["bias"])
    for index in ((0, 1), (1, 2)):
        wanted = -float(data["g_lp"][index]) * oracle.softmax(logits[index][None])[0] @ oracle.f64(data["weight"])
        assert oracle.relative_error(alone.hidden[index], wanted) < GRADIENT_ERROR


@pytest.mark.bad_input
@ENGINES
@pytest.mark.parametrize("bad", [-1, VOCAB, 99_999])
def test_an_active_target_out_of_range_is_named_with_its_position(engine, bad):
    data = case()
    targets = data["targets"].at[1, 3].set(bad)
    with pytest.raises(ValueError) as raised:
        linear_log_probs(data["hidden"], data["weight"], targets, engine=engine)
    for fragment in ("targets", str(bad), "(1, 3)", str(VOCAB)):
        assert fragment in str(raised.value), raised.value


@ENGINES
def test_under_jit_an_active_target_out_of_range_gives_nan_for_that_token_only(engine):
    data = case(bias=True)
    clean, _ = value_and_gradients(**data, engine=engine)
    result, _ = value_and_gradients(**{**data, "targets": data["targets"].at[1, 3].set(VOCAB)}, engine=engine)
    bad = np.zeros(TOKENS, bool)
    bad[1, 3] = True
    np.testing.assert_array_equal(np.isnan(result.log_probs), bad)
    np.testing.assert_array_equal(np.asarray(result.log_probs)[~bad], np.asarray(clean.log_probs)[~bad])
    np.testing.assert_array_equal(result.entropy, clean.entropy)


@pytest.mark.parametrize(
    "engine, name", [("auto", "chunked"), ("chunked", "chunked"), ("reference", "reference"), (CHUNKED, "chunked")]
)
def test_the_engine_that_ran_is_recorded(engine, name):
    data = case()
    with record_head_runs() as runs:
        jax.eval_shape(lambda h: linear_log_probs(h, data["weight"], data["targets"], engine=engine), data["hidden"])
    assert [(run.path, run.engine, run.num_vocab_shards) for run in runs] == [("linear_log_probs", name, 1)]


def test_head_logits_are_the_logits_before_the_temperature():
    data = case(bias=True, seed=14)
    logits = head_logits(data["hidden"], data["weight"], bias=data["bias"], logit_scale=1.3, softcap=5.0)
    wanted = oracle.head_logits(data["hidden"], data["weight"], data["bias"], oracle.Head(1.0, 1.3, 5.0))
    assert logits.dtype == jnp.float32
    assert oracle.scaled_error(logits, wanted) < VALUE_ERROR


class Variants(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True)
    def test_the_default_call(self):
        data = case(seed=7)
        run = self.variant(lambda h, w, t: linear_log_probs(h, w, t, with_entropy=True))
        result = run(data["hidden"], data["weight"], data["targets"])
        wanted = jax.tree.map(lambda x: x.astype(np.float32), TokenLogProbs(*expected(data)[0]))
        chex.assert_trees_all_close(result, wanted, rtol=VALUE_ERROR, atol=VALUE_ERROR)


# --- chunks, tiles and extreme logits ----------------------------------------------------------------------

CHUNKS = [(1, 512), (7, 64), (64, 7), (512, 1), (1000, 1000)]


@pytest.mark.parametrize("token_chunk, vocab_tile", CHUNKS)
def test_chunk_and_tile_sizes_do_not_change_the_result(token_chunk, vocab_tile):
    data = case((70,), bias=True, seed=8)
    engine = ChunkedEngine(token_chunk=token_chunk, vocab_tile=vocab_tile)
    result, gradients = value_and_gradients(**data, engine=engine)
    check(result, gradients, expected(data))


@ENGINES
@pytest.mark.parametrize("shift", [-50.0, -1e4])
def test_all_negative_logits_do_not_underflow(engine, shift):
    data = case(bias=True, seed=9)
    data["bias"] = data["bias"] + jnp.float32(shift)
    result, gradients = value_and_gradients(**data, engine=engine)
    # Product + bias is rounded to |shift| * 2^-24 in each logit, which no later step can undo. Nothing else may be of
    # the shift's size: an entropy from lse - sum(p z) would collect the rounding of 257 large terms and miss the bound.
    unit = abs(shift) * 2**-24
    check(result, gradients, expected(data), max(VALUE_ERROR, 2 * unit), max(GRADIENT_ERROR, 4 * unit))


@ENGINES
def test_columns_of_minus_infinity_carry_no_probability(engine):
    data = case(bias=True, seed=10)
    data["bias"] = data["bias"].at[64:128].set(-jnp.inf)  # one whole tile of the chunked engine
    data["targets"] = jnp.where((data["targets"] >= 64) & (data["targets"] < 128), 5, data["targets"])
    result, gradients = value_and_gradients(**data, engine=engine)
    keep = np.r_[0:64, 128:VOCAB]
    kept = {**data, "weight": data["weight"][keep], "bias": data["bias"][keep]}
    kept["targets"] = jnp.where(data["targets"] >= 128, data["targets"] - 64, data["targets"])
    (log_probs, entropy), wanted = expected(kept)
    assert oracle.scaled_error(result.log_probs, log_probs) < VALUE_ERROR
    assert oracle.scaled_error(result.entropy, entropy) < VALUE_ERROR
    assert oracle.relative_error(gradients.hidden, wanted.hidden) < GRADIENT_ERROR
    assert oracle.relative_error(gradients.weight[keep], wanted.weight) < GRADIENT_ERROR
    assert not np.asarray(gradients.weight[64:128]).any()


@ENGINES
def test_a_confident_target_keeps_its_small_gradient(engine):
    data = case(dtypes=(jnp.bfloat16, jnp.bfloat16), seed=11)
    tokens = np.arange(10)
    targets = 20 * tokens
    hidden, weight = np.zeros((10, HIDDEN)), np.zeros((VOCAB, HIDDEN))
    hidden[tokens, tokens] = 1.0
    weight[targets, tokens] = 14.0
    data.update(
        hidden=jnp.asarray(hidden.reshape(*TOKENS, HIDDEN), jnp.bfloat16),
        weight=jnp.asarray(weight, jnp.bfloat16),
        targets=jnp.asarray(targets.reshape(TOKENS), jnp.int32),
        g_lp=jnp.ones(TOKENS, jnp.float32),
    )
    _, gradients = value_and_gradients(**data, engine=engine, with_entropy=False)
    wanted = expected(data, with_entropy=False)[1]
    own = np.asarray(gradients.hidden, np.float64).reshape(10, HIDDEN)[tokens, tokens]
    # 14 (1 - p) = 3e-3; p rounded to bf16 before the one-hot is subtracted would make it exactly 0.
    assert oracle.relative_error(own, wanted.hidden.reshape(10, HIDDEN)[tokens, tokens]) < BF16_GRADIENT_ERROR
    own = np.asarray(gradients.weight, np.float64)[targets, tokens]
    assert oracle.relative_error(own, wanted.weight[targets, tokens]) < BF16_GRADIENT_ERROR


def test_accumulator_error_does_not_grow_with_the_number_of_chunks():
    # 512 tokens in 1 or 128 chunks, 257 columns in 1 or 65 tiles. Both runs end in one rounding to bf16 (relative
    # 2^-9); a bf16 accumulator would add a rounding a chunk, about sqrt(128) times that.
    data = case((512,), dtypes=(jnp.bfloat16, jnp.bfloat16), seed=12)
    wanted = expected(data)[1]
    errors = {}
    for sizes in ((512, 257), (4, 4)):
        engine = ChunkedEngine(token_chunk=sizes[0], vocab_tile=sizes[1])
        _, gradients = value_and_gradients(**data, engine=engine)
        errors[sizes] = [
            oracle.relative_error(gradients.hidden, wanted.hidden),
            oracle.relative_error(gradients.weight, wanted.weight),
        ]
    for one, many in zip(errors[512, 257], errors[4, 4], strict=True):
        assert one < BF16_GRADIENT_ERROR
        assert many < 1.2 * one, errors


def test_a_vocabulary_of_262144():
    data = case((3,), hidden_size=8, vocab=262_144, seed=13)
    engine = ChunkedEngine(token_chunk=8, vocab_tile=60_000)
    check(*value_and_gradients(**data, engine=engine), expected(data))
