"""The real Hopper kernels, forward and backward, on the CPU through JAX's Mosaic GPU interpreter, against the oracle."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlogp import linear_log_probs
from jaxlogp.head.hopper import HopperEngine
from jaxlogp.head.hopper import engine as hopper_engine
from jaxlogp.head.hopper._pallas_compat import interpreter, why_not_available
from jaxlogp.head.hopper.forward import forward_statistics
from jaxlogp.head.hopper.tiles import ALTERNATE, SHARED_PAIR, HeadTiles
from jaxlogp.head.projection import HeadOptions
from tests import hopper_case, oracle

pytestmark = pytest.mark.skipif(why_not_available() is not None, reason=str(why_not_available()))

# The products of bf16 operands are exact in fp32, so values differ by a few roundings of sums of H and V terms.
VALUE_ERROR = 1e-5
# dz is rounded to bf16 (2^-9 at most, 2^-9 / sqrt(3) on average) before the products, and the results once more.
GRADIENT_ERROR = 5e-3
ALL_OPTIONS = {"temperature": 0.7, "logit_scale": 1.3, "softcap": 5.0}


def engine(**changes):
    return HopperEngine(**{"interpret": interpreter(), "num_sms": 2, "chunk": 256, **changes})


def options(vocab, **changes):
    return HeadOptions(**{"vocab_size": vocab, "with_entropy": True, **changes})


@pytest.mark.parametrize("with_entropy", [False, True], ids=["log-probs", "entropy"])
@pytest.mark.parametrize("extra", [{}, ALL_OPTIONS], ids=["plain", "temperature, scale, soft cap, bias"])
def test_values_and_gradients_match_the_oracle(with_entropy, extra):
    # 70 tokens and 600 columns: neither fills its last tile, and the last of three chunks is short.
    data = hopper_case.case(70, 64, 600, bias=bool(extra))
    settings = options(600, with_entropy=with_entropy, **extra)
    result, gradients = hopper_case.run(data, hopper_case.local_targets(data), engine(), settings)
    assert (result.entropy is None) == (not with_entropy)
    hopper_case.check(result, gradients, hopper_case.expected(data, settings), VALUE_ERROR, GRADIENT_ERROR)


@pytest.mark.parametrize("vocab", [104, 256, 264])
def test_vocabularies_around_one_tile(vocab):
    data = hopper_case.case(5, 64, vocab, seed=1)
    settings = options(vocab)
    result, gradients = hopper_case.run(data, hopper_case.local_targets(data), engine(), settings)
    hopper_case.check(result, gradients, hopper_case.expected(data, settings), VALUE_ERROR, GRADIENT_ERROR)


def test_shared_tiles_and_several_steps():
    shared = dataclasses.replace(SHARED_PAIR, stages=2)
    tiles = HeadTiles(forward=shared, logit_gradient=shared, d_hidden=shared, d_weight=shared)
    data = hopper_case.case(40, 320, 512, seed=2)
    settings = options(512)
    result, gradients = hopper_case.run(data, hopper_case.local_targets(data), engine(tiles=tiles), settings)
    hopper_case.check(result, gradients, hopper_case.expected(data, settings), VALUE_ERROR, GRADIENT_ERROR)


def test_masked_tokens_are_exactly_zero_and_touch_nothing_else():
    data = hopper_case.case(20, 64, 272, seed=3)
    data["mask"] = jnp.arange(20) % 3 != 0
    settings = options(272)
    wanted = hopper_case.expected(data, settings)
    data["hidden"] = jnp.where(data["mask"][:, None], data["hidden"], jnp.nan)
    result, gradients = hopper_case.run(data, hopper_case.local_targets(data), engine(), settings)
    hopper_case.check(result, gradients, wanted, VALUE_ERROR, GRADIENT_ERROR)
    masked = ~np.asarray(data["mask"])
    for values in (result.log_probs, result.entropy, gradients[0]):
        assert not np.asarray(values)[masked].any()
    again = {**data, "g_lp": jnp.where(data["mask"], data["g_lp"], 7.0)}
    _, same = hopper_case.run(again, hopper_case.local_targets(data), engine(), settings)
    for left, right in zip(gradients[:2], same[:2], strict=True):
        np.testing.assert_array_equal(np.asarray(left, np.float32), np.asarray(right, np.float32))
    # A broken row of the weight reaches every token that is computed, and still none without a label.
    data["weight"] = data["weight"].at[5].set(jnp.nan)
    _, broken = hopper_case.run(data, hopper_case.local_targets(data), engine(), settings)
    assert np.isnan(np.asarray(broken[0], np.float32)[~masked]).all()
    assert not np.asarray(broken[0], np.float32)[masked].any()


def test_hidden_states_are_not_copied_for_their_mask():
    # A block of them is gathered at a time; a selection of all would stay in memory beside it.
    data = hopper_case.case(70, 64, 272)

    def forward(hidden, mask):
        return linear_log_probs(hidden, data["weight"], data["targets"], mask=mask, engine=engine())

    program = str(jax.make_jaxpr(forward)(data["hidden"], data["mask"]))
    assert "bf16[70,64]" in program
    assert "bf16[70,64] = select_n" not in program


def test_without_a_mask_nothing_is_moved_and_no_bit_changes():
    data = hopper_case.case(70, 64, 272, seed=4)
    local = hopper_case.local_targets(data)
    wanted = hopper_case.run(data, local, engine(), options(272))
    got = hopper_case.run(data, local, engine(), options(272, all_live=True))
    for left, right in zip(jax.tree.leaves(wanted), jax.tree.leaves(got), strict=True):
        np.testing.assert_array_equal(np.asarray(left, np.float32), np.asarray(right, np.float32))


@pytest.mark.parametrize("all_live", [False, True])
def test_blocks_of_tokens_change_no_bit(monkeypatch, all_live):
    data = hopper_case.case(150, 64, 272, seed=5)
    if not all_live:
        data["mask"] = jnp.arange(150) % 3 != 0
        data["hidden"] = jnp.where(data["mask"][:, None], data["hidden"], jnp.nan)
    local, settings = hopper_case.local_targets(data), options(272, all_live=all_live)
    forward = lambda: jax.jit(lambda h, w: engine().log_probs(h, w, None, local, settings))  # noqa: E731
    wanted = forward()(data["hidden"], data["weight"])
    monkeypatch.setattr(hopper_engine, "WHOLE_BYTES", 4096)
    monkeypatch.setattr(hopper_engine, "BLOCK_BYTES", 4096)
    got = forward()(data["hidden"], data["weight"])
    for left, right in zip(jax.tree.leaves(wanted), jax.tree.leaves(got), strict=True):
        np.testing.assert_array_equal(np.asarray(left), np.asarray(right))


@pytest.mark.parametrize("shift", [-50.0, -1e4])
def test_all_negative_logits(shift):
    data = hopper_case.case(6, 64, 264, seed=4)
    data["bias"] = jnp.full(264, shift, jnp.float32)
    settings = options(264)
    result, gradients = hopper_case.run(data, hopper_case.local_targets(data), engine(), settings)
    # A logit near the shift is rounded to half a unit of 2^-23 |shift|, and so is the target's.
    bound = VALUE_ERROR + 2.0**-23 * abs(shift)
    hopper_case.check(result, gradients[:2] + (None,), hopper_case.expected(data, settings), bound, GRADIENT_ERROR)


def test_a_confident_target_keeps_its_small_gradient():
    data = hopper_case.case(4, 64, 256, seed=5)
    weight = np.asarray(data["weight"], np.float32)
    weight[7] = 1.0
    hidden = np.full((4, 64), 11 / 64, np.float32)
    data.update(weight=jnp.asarray(weight, jnp.bfloat16), hidden=jnp.asarray(hidden, jnp.bfloat16))
    data["targets"] = jnp.full(4, 7, jnp.int32)
    settings = options(256, with_entropy=False)
    wanted = hopper_case.expected(data, settings)
    assert np.exp(wanted[0][0]).min() > 1 - 2.0**-5, "p must be near 1"
    result, gradients = hopper_case.run(data, hopper_case.local_targets(data), engine(), settings)
    hopper_case.check(result, gradients, wanted, VALUE_ERROR, GRADIENT_ERROR)


def test_target_outside_of_the_vocabulary_keeps_the_softmax_term():
    data = hopper_case.case(6, 64, 256, seed=6)
    data["targets"] = data["targets"].at[3].set(999)
    settings = options(256)
    result, gradients = hopper_case.run(data, hopper_case.local_targets(data), engine(), settings)
    assert result.log_probs[3] == 0.0
    hopper_case.check(result, gradients, hopper_case.expected(data, settings), VALUE_ERROR, GRADIENT_ERROR)


def test_padding_rows_of_an_uneven_shard_are_masked():
    data = hopper_case.case(6, 64, 272, seed=7)
    data["targets"] = data["targets"] % 200
    settings = options(200)
    result, gradients = hopper_case.run(data, hopper_case.local_targets(data, width=200), engine(), settings)
    real = {**data, "weight": data["weight"][:200]}
    values, wanted = hopper_case.expected(real, settings)
    assert oracle.scaled_error(result.log_probs, values[0]) < VALUE_ERROR
    assert oracle.relative_error(gradients[0], wanted.hidden) < GRADIENT_ERROR
    assert oracle.relative_error(gradients[1][:200], wanted.weight) < GRADIENT_ERROR
    assert not np.asarray(gradients[1][200:], np.float32).any()


def test_tile_statistics_are_bitwise_those_of_a_shard_and_of_a_part_of_the_batch():
    data = hopper_case.case(128, 64, 1024, seed=8)
    column = data["targets"]

    def statistics(hidden, weight, column):
        count = jnp.int32(weight.shape[0])
        return np.asarray(
            forward_statistics(hidden, weight, None, column, count, options(1024), ALTERNATE, 2, interpreter())
        )

    whole = statistics(data["hidden"], data["weight"], column)
    for shards in (2, 4):
        width = 1024 // shards
        for shard in range(shards):
            rows = slice(shard * width, (shard + 1) * width)
            local = jnp.where((column >= rows.start) & (column < rows.stop), column - rows.start, -1)
            part = statistics(data["hidden"], data["weight"][rows], local)
            np.testing.assert_array_equal(part, whole[rows.start // 256 : rows.stop // 256])
    np.testing.assert_array_equal(statistics(data["hidden"][64:], data["weight"], column[64:]), whole[:, :, 64:])


@pytest.mark.parametrize(
    "hidden_size, vocab, dtype, word",
    [(72, 256, jnp.bfloat16, "64"), (64, 257, jnp.bfloat16, "multiple of 8"), (64, 256, jnp.float32, "float32")],
)
@pytest.mark.bad_input
def test_what_the_kernels_cannot_take_is_refused_with_the_reason(hidden_size, vocab, dtype, word):
    data = hopper_case.case(4, hidden_size, vocab)
    data["weight"] = data["weight"].astype(dtype)
    with pytest.raises(ValueError, match=f"'hopper' takes.*{word}"):
        hopper_case.run(data, hopper_case.local_targets(data), engine(), options(vocab))


@pytest.mark.bad_input
@pytest.mark.parametrize("chunk", [0, -256, 300])
def test_a_chunk_that_cuts_tiles_is_refused(chunk):
    data = hopper_case.case(4, 64, 600)
    with pytest.raises(ValueError, match=f"chunk: expected None or a positive multiple of 256, .* got {chunk}"):
        hopper_case.run(data, hopper_case.local_targets(data), engine(chunk=chunk), options(600))


def test_without_a_hopper_gpu_the_reason_says_so():
    data = hopper_case.case(4, 64, 256)
    reason = HopperEngine().why_not(data["hidden"], data["weight"], None, options(256))
    assert "GPU" in reason and "cpu" in reason


def test_the_kernels_lower_for_cuda_without_a_gpu():
    data = hopper_case.case(64, 1024, 520, bias=True)
    local = hopper_case.local_targets(data)
    traced = hopper_case.run.trace(data, local, HopperEngine(), options(520, **ALL_OPTIONS))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 5
    assert jax.default_backend() == "cpu"
