"""The triton engine against the oracle. As it is, the kernels' plain stand-in runs, so everything but the kernels is shown;
with TRITON_INTERPRET=1 the kernels' own source runs in Triton's interpreter (tests/test_triton_kernels.py does so)."""

import os
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlogp import linear_log_probs, linear_policy_gradients, record_head_runs, sharded_linear_log_probs
from jaxlogp.head import registry as engines
from jaxlogp.head.projection import HeadOptions
from jaxlogp.head.triton import TritonEngine, availability, launch, tiles
from jaxlogp.head.triton import engine as engine_module
from jaxlogp.head.triton.tiles import TABLE, HeadTiles, TileConfig
from tests import hopper_case, oracle, triton_case
from tests import triton_plain as plain

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
# The products of 16-bit operands are exact in fp32, so values differ by a few roundings of sums of H and V terms.
VALUE_ERROR = 1e-5
# dz is rounded to bf16 (2^-9 at most, 2^-9 / sqrt(3) on average) before the products, and the results once more.
GRADIENT_ERROR = 5e-3
ALL_OPTIONS = {"temperature": 0.7, "logit_scale": 1.3, "softcap": 5.0}
SLOW = pytest.mark.slow
SMALL = HeadTiles(
    TileConfig(rows=16, columns=64, depth=32, group=3), TileConfig(rows=32, columns=64, depth=16, group=2)
)


@pytest.fixture(autouse=True, scope="module")
def kernels():
    """Where kernels are launched, the interpreter takes them."""
    if INTERPRET:
        with triton_case.interpreted_launches():
            yield
    else:
        yield


def engine(**changes):
    functions = launch if INTERPRET else plain
    return TritonEngine(**{"tiles": SMALL, "window": 128, "functions": functions, **changes})


def options(vocab, **changes):
    return HeadOptions(**{"vocab_size": vocab, "with_entropy": True, **changes})


def check(data, settings, value_error=VALUE_ERROR, **changes):
    result, gradient = hopper_case.run(data, hopper_case.local_targets(data), engine(**changes), settings)
    hopper_case.check(result, gradient, hopper_case.expected(data, settings), value_error, GRADIENT_ERROR)
    return result, gradient


@pytest.mark.parametrize("with_entropy", [pytest.param(False, marks=SLOW), True], ids=["log-probs", "entropy"])
@pytest.mark.parametrize("extra", [{}, ALL_OPTIONS], ids=["plain", "temperature, scale, soft cap, bias"])
def test_values_and_gradients_match_the_oracle(with_entropy, extra):
    # Neither 70 tokens, 600 columns nor a hidden size of 40 fills its last tile, and the last of five windows overlaps.
    data = hopper_case.case(70, 40, 600, bias=bool(extra))
    result, gradient = check(data, options(600, with_entropy=with_entropy, **extra))
    assert (result.entropy is None) == (not with_entropy)
    assert (gradient[2] is None) == (not extra)


@SLOW
@SLOW
@pytest.mark.parametrize("option", [("temperature", 0.7), ("logit_scale", -1.3), ("softcap", 5.0)], ids=lambda o: o[0])
def test_each_option_alone(option):
    data = hopper_case.case(9, 32, 136, seed=1)
    settings = options(136, **dict([option]))
    result, _ = check(data, settings)
    without = hopper_case.expected(data, options(136))[0][0]
    assert oracle.scaled_error(result.log_probs, without) > 1e-2, "the option must change the result"


@pytest.mark.parametrize("vocab", [1, 65, *(pytest.param(n, marks=SLOW) for n in (63, 64, 127, 129, 257))])
def test_vocabularies_around_tiles_and_windows(vocab):
    check(hopper_case.case(5, 32, vocab, seed=2), options(vocab))


@SLOW
@pytest.mark.parametrize("window", [320, None, 64])
def test_windows_of_any_width(window):
    check(hopper_case.case(40, 32, 328, seed=3, bias=True), options(328), window=window)


@pytest.mark.parametrize(
    "dtypes, fp32_head",
    [
        ((jnp.float32, jnp.bfloat16), False),
        pytest.param((jnp.bfloat16, jnp.bfloat16), True, marks=SLOW),
        pytest.param((jnp.bfloat16, jnp.float16), False, marks=SLOW),
        pytest.param((jnp.float16, jnp.float16), False, marks=SLOW),
        pytest.param((jnp.float32, jnp.float16), False, marks=SLOW),
    ],
)
def test_dtype_mixes(dtypes, fp32_head):
    data = hopper_case.case(20, 32, 136, bias=True, seed=4)
    data.update(hidden=data["hidden"].astype(dtypes[0]), weight=data["weight"].astype(dtypes[1]))
    if dtypes[0] == jnp.float32:
        data["hidden"] = data["hidden"] + 2.0**-10
    settings = options(136, fp32_head=fp32_head)
    result, gradient = hopper_case.run(data, hopper_case.local_targets(data), engine(), settings)
    rounded = {**data, "hidden": data["hidden"].astype(dtypes[1])}
    hopper_case.check(result, gradient, hopper_case.expected(rounded, settings), VALUE_ERROR, GRADIENT_ERROR)
    assert [x.dtype for x in gradient] == [*dtypes, jnp.float32]


@pytest.mark.parametrize("invalid", [np.nan, pytest.param(np.inf, marks=SLOW)])
def test_masked_tokens_are_exactly_zero_and_touch_nothing_else(invalid):
    data = hopper_case.case(50, 32, 136, bias=True, seed=5)
    data["mask"] = jnp.arange(50) % 3 != 0
    _, clean_gradient = clean = check(data, options(136))
    masked = ~np.asarray(data["mask"])
    bad = {**data, "g_lp": jnp.where(data["mask"], data["g_lp"], 7.0)}
    bad["hidden"] = jnp.where(data["mask"][:, None], data["hidden"], invalid)
    bad["targets"] = jnp.where(data["mask"], data["targets"], jnp.arange(50, dtype=jnp.int32) * 99 - 100)
    result, gradient = hopper_case.run(bad, hopper_case.local_targets(bad), engine(), options(136))
    for values in (*result, gradient[0]):
        assert not np.asarray(values, np.float32)[masked].any()
    for left, right in zip((*result, *gradient), (*clean[0], *clean_gradient), strict=True):
        np.testing.assert_array_equal(np.asarray(left, np.float32), np.asarray(right, np.float32))


@SLOW
def test_an_all_masked_batch_is_zero():
    data = hopper_case.case(6, 32, 72, bias=True)
    data.update(mask=jnp.zeros(6, bool), hidden=data["hidden"] * jnp.bfloat16(np.nan))
    result, gradient = hopper_case.run(data, hopper_case.local_targets(data), engine(), options(72))
    for values in (*result, *gradient):
        assert not np.asarray(values, np.float32).any()


@pytest.mark.parametrize("live", [65, *(pytest.param(n, marks=SLOW) for n in (0, 1, 64, 128, 129, 193, 200))])
def test_only_tokens_with_a_cotangent_reach_the_products(live):
    # 200 tokens are 7 tiles of 32 rows, so the products take 64, 128, 192 or 224 rows.
    data = hopper_case.case(200, 32, 136, bias=True, seed=6)
    order = np.random.default_rng(0).permutation(200)
    wanted = jnp.asarray(order < live)
    data.update(g_lp=jnp.where(wanted, data["g_lp"], 0.0), g_entropy=jnp.where(wanted, data["g_entropy"], 0.0))
    result, gradient = check(data, options(136))
    assert not np.asarray(gradient[0], np.float32)[~np.asarray(wanted)].any()
    # A token whose logits are NaN spoils no gradient as long as it has no cotangent.
    data["hidden"] = jnp.where(wanted[:, None], data["hidden"], jnp.bfloat16(np.nan))
    _, same = hopper_case.run(data, hopper_case.local_targets(data), engine(), options(136))
    for left, right in zip(gradient, same, strict=True):
        np.testing.assert_array_equal(np.asarray(left, np.float32), np.asarray(right, np.float32))


@pytest.mark.parametrize("shift", [-1e4, pytest.param(-50.0, marks=SLOW)])
def test_all_negative_logits(shift):
    data = hopper_case.case(6, 32, 136, seed=7)
    data["bias"] = jnp.full(136, shift, jnp.float32)
    # A logit near the shift is rounded to half a unit of 2^-23 |shift|, and so is the target's. The bias's own gradient,
    # a sum that cancels to nothing, is left out.
    result, gradient = hopper_case.run(data, hopper_case.local_targets(data), engine(), options(136))
    bound = VALUE_ERROR + 2.0**-23 * abs(shift)
    wanted = hopper_case.expected(data, options(136))
    hopper_case.check(result, gradient[:2] + (None,), wanted, bound, GRADIENT_ERROR)


@SLOW
def test_columns_of_minus_infinity_carry_no_probability():
    data = hopper_case.case(12, 32, 200, bias=True, seed=8)
    data["bias"] = data["bias"].at[64:128].set(-jnp.inf).at[130].set(-jnp.inf)  # a whole tile, and one column
    gone = ((data["targets"] >= 64) & (data["targets"] < 128)) | (data["targets"] == 130)
    data["targets"] = jnp.where(gone, 5, data["targets"])
    result, gradient = hopper_case.run(data, hopper_case.local_targets(data), engine(), options(200))
    keep = np.r_[0:64, 128:130, 131:200]
    kept = {**data, "weight": data["weight"][keep], "bias": data["bias"][keep]}
    kept["targets"] = jnp.asarray(np.searchsorted(keep, np.asarray(data["targets"])), jnp.int32)
    values, wanted = hopper_case.expected(kept, options(200))
    assert oracle.scaled_error(result.log_probs, values[0]) < VALUE_ERROR
    assert oracle.scaled_error(result.entropy, values[1]) < VALUE_ERROR
    assert oracle.relative_error(gradient[0], wanted.hidden) < GRADIENT_ERROR
    assert oracle.relative_error(gradient[1][keep], wanted.weight) < GRADIENT_ERROR
    assert not np.delete(np.asarray(gradient[1], np.float32), keep, axis=0).any()
    # Such a column as a target has log-prob -inf, and spoils nothing else.
    data["targets"] = data["targets"].at[3].set(70)
    result, _ = hopper_case.run(data, hopper_case.local_targets(data), engine(), options(200))
    assert np.isneginf(result.log_probs[3]) and np.isfinite(result.entropy).all()


@SLOW
def test_a_confident_target_keeps_its_small_gradient():
    data = hopper_case.case(4, 64, 256, seed=5)
    weight = np.asarray(data["weight"], np.float32)
    weight[7] = 1.0
    hidden = np.full((4, 64), 11 / 64, np.float32)
    data.update(weight=jnp.asarray(weight, jnp.bfloat16), hidden=jnp.asarray(hidden, jnp.bfloat16))
    data["targets"] = jnp.full(4, 7, jnp.int32)
    settings = options(256, with_entropy=False)
    assert np.exp(hopper_case.expected(data, settings)[0][0]).min() > 1 - 2.0**-5, "p must be near 1"
    check(data, settings)


def test_target_outside_of_the_vocabulary_keeps_the_softmax_term():
    data = hopper_case.case(6, 32, 136, seed=9)
    data["targets"] = data["targets"].at[3].set(999).at[4].set(-7)
    result, _ = check(data, options(136))
    assert result.log_probs[3] == 0.0 and result.log_probs[4] == 0.0


def test_under_jit_an_active_target_out_of_range_gives_nan_for_that_token_only():
    data = hopper_case.case(6, 32, 136, seed=10)
    ids = data["targets"].at[2].set(136)
    run = jax.jit(lambda t: linear_log_probs(data["hidden"], data["weight"], t, with_entropy=True, engine=engine()))
    clean, result = run(data["targets"]), run(ids)
    np.testing.assert_array_equal(np.isnan(result.log_probs), np.arange(6) == 2)
    keep = np.arange(6) != 2
    np.testing.assert_array_equal(np.asarray(result.log_probs)[keep], np.asarray(clean.log_probs)[keep])
    np.testing.assert_array_equal(result.entropy, clean.entropy)


def test_padding_rows_of_an_uneven_shard_are_masked():
    data = hopper_case.case(6, 32, 272, bias=True, seed=11)
    data["targets"] = data["targets"] % 200
    local = hopper_case.local_targets(data, width=200)
    result, gradient = hopper_case.run(data, local, engine(), options(200))
    real = {**data, "weight": data["weight"][:200], "bias": data["bias"][:200]}
    values, wanted = hopper_case.expected(real, options(200))
    assert oracle.scaled_error(result.log_probs, values[0]) < VALUE_ERROR
    assert oracle.scaled_error(result.entropy, values[1]) < VALUE_ERROR
    assert oracle.relative_error(gradient[0], wanted.hidden) < GRADIENT_ERROR
    for index, name in ((1, "weight"), (2, "bias")):
        assert oracle.relative_error(gradient[index][:200], getattr(wanted, name)) < GRADIENT_ERROR
        assert not np.asarray(gradient[index][200:], np.float32).any()


@pytest.mark.parametrize("shards", [3, pytest.param(2, marks=SLOW)])
def test_vocabulary_shards(shards):
    # 200 does not divide by 3: two shards of 67 and one of 66, each laid out in 67 rows.
    data = hopper_case.case(24, 32, 200, bias=True, seed=12)
    data["mask"] = jnp.arange(24) % 4 != 1
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, shards), ("data", "tensor"), axis_types=auto, devices=jax.devices()[: 2 * shards])

    @jax.jit
    def both(hidden, weight, bias):
        def objective(hidden, weight, bias):
            out = sharded_linear_log_probs(
                hidden, weight, data["targets"], mesh=mesh, mask=data["mask"], bias=bias, with_entropy=True,
                engine=engine(window=64),
            )  # fmt: skip
            return jnp.sum(out.log_probs * data["g_lp"]) + jnp.sum(out.entropy * data["g_entropy"]), out

        return jax.grad(objective, argnums=(0, 1, 2), has_aux=True)(hidden, weight, bias)

    gradient, result = both(data["hidden"], data["weight"], data["bias"])
    hopper_case.check(result, gradient, hopper_case.expected(data, options(200)), VALUE_ERROR, GRADIENT_ERROR)


def test_without_a_mask_nothing_is_moved_and_no_bit_changes():
    data = hopper_case.case(70, 32, 136, seed=4)
    local = hopper_case.local_targets(data)
    wanted, got = (hopper_case.run(data, local, engine(), options(136, all_live=known)) for known in (False, True))
    for left, right in zip(jax.tree.leaves(wanted), jax.tree.leaves(got), strict=True):
        np.testing.assert_array_equal(np.asarray(left, np.float32), np.asarray(right, np.float32))


@SLOW
def test_blocks_of_tokens(monkeypatch):
    data = hopper_case.case(100, 32, 136, seed=13)
    data["mask"] = jnp.arange(100) % 2 == 0
    monkeypatch.setattr(engine_module, "STATISTICS_BYTES", 3 * 16 * 40)
    check(data, options(136))


@pytest.mark.skipif(not INTERPRET, reason="the stand-in's products are those of the whole call")
@SLOW
def test_tile_statistics_are_bitwise_those_of_a_shard_and_of_a_part_of_the_batch():
    data = hopper_case.case(64, 32, 256, seed=14)
    column = data["targets"]

    def statistics(hidden, weight, column):
        bounds = jnp.asarray([0, weight.shape[0], hidden.shape[0]], jnp.int32)
        return np.asarray(
            launch.forward_statistics(hidden, weight, None, column, bounds, options(256), SMALL.forward, None)
        )

    whole = statistics(data["hidden"], data["weight"], column)
    for shard in range(2):
        rows = slice(shard * 128, (shard + 1) * 128)
        local = jnp.where((column >= rows.start) & (column < rows.stop), column - rows.start, -1)
        part = statistics(data["hidden"], data["weight"][rows], local)
        np.testing.assert_array_equal(part, whole[rows.start // 64 : rows.stop // 64])
    np.testing.assert_array_equal(statistics(data["hidden"][32:], data["weight"], column[32:]), whole[:, :, 32:])


# --- the choice of the engine, sizes, and what is refused ----------------------------------------------------


class NoKernels:
    """Results of the kernels' shapes, so that what stands between them can be looked at."""

    @staticmethod
    def forward_statistics(hidden, weight, bias, column, bounds, options, config, capability):
        return jnp.ones((-(-weight.shape[0] // config.columns), 4, hidden.shape[0]), jnp.float32)

    @staticmethod
    def window_gradient(hidden, weight, bias, scalars, bounds, window, options, config, capability):
        return jnp.zeros((hidden.shape[0], window), weight.dtype)


def test_no_array_of_tokens_times_vocabulary():
    tokens, hidden_size, vocab = 8192, 1024, 151936
    fake = TritonEngine(tiles=TABLE[90], functions=NoKernels)

    def objective(hidden, weight, targets):
        return jnp.sum(linear_log_probs(hidden, weight, targets, with_entropy=True, engine=fake).log_probs)

    shapes = [(tokens, hidden_size), (vocab, hidden_size)]
    operands = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    operands.append(jax.ShapeDtypeStruct((tokens,), jnp.int32))
    text = jax.jit(jax.grad(objective, argnums=(0, 1))).lower(*operands).as_text()
    sizes = [
        np.prod([int(n) for n in shape.split("x")[:-1]])
        for shape in set(re.findall(r"tensor<((?:\d+x)+[a-z0-9]+)>", text))
    ]
    window = tiles.window_columns(tokens, vocab)
    assert tokens * window * 2 <= 240 * 2**20 and vocab % window, "several windows, the last one overlapping"
    assert max(sizes) == vocab * hidden_size, "the weight's gradient is the largest"


@pytest.mark.parametrize("tokens, vocab", [(128, 1), (8192, 151936), (32768, 151936), (131072, 262144)])
def test_windows_are_aligned_and_overlap_little(tokens, vocab):
    window = tiles.window_columns(tokens, vocab)
    pieces = -(-vocab // window)
    assert window == vocab or window % 64 == 0
    assert 0 <= pieces * window - vocab < 64 * pieces
    assert window * tokens * 2 <= max(240 * 2**20, tokens * 2 * 4096)


def test_row_parts():
    assert tiles.row_parts(128, 128) == (128,)
    assert tiles.row_parts(1024, 128) == (256, 512, 768, 1024)
    assert tiles.row_parts(640, 128) == (256, 384, 512, 640)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    "hidden_size, vocab, dtype, changes, word",
    [
        (36, 72, jnp.bfloat16, {}, "multiple of 8, got 36"),
        (32, 72, jnp.float32, {}, "float16 weight, got float32"),
        (32, 72, jnp.float16, {"fp32_head": True}, "fp32_head needs bfloat16 x float16"),
        (32, 72, jnp.bfloat16, {"vocab_size": 2**19}, "vocabulary of at most 262144"),
    ],
)
def test_what_the_kernels_cannot_take_is_refused_with_the_reason(hidden_size, vocab, dtype, changes, word):
    data = hopper_case.case(4, hidden_size, vocab)
    data["weight"] = data["weight"].astype(dtype)
    with pytest.raises(ValueError, match=f"engine: expected .*'triton' takes.*{word}"):
        hopper_case.run(data, hopper_case.local_targets(data), engine(), options(vocab, **changes))


@pytest.mark.bad_input
@pytest.mark.skipif(INTERPRET, reason="of the engine as it is")
def test_by_name_without_a_gpu_is_refused_with_the_reason():
    data = hopper_case.case(4, 32, 72)
    with pytest.raises(ValueError, match="engine: expected .*'triton' takes.* NVIDIA GPU, the default device is cpu"):
        linear_log_probs(data["hidden"], data["weight"], data["targets"], engine="triton")


def device(capability, platform="gpu"):
    return types.SimpleNamespace(platform=platform, device_kind="a GPU", compute_capability=capability, core_count=1)


def choose(monkeypatch, engine, capability, installed=None, weight=jnp.bfloat16, axis_name=None):
    monkeypatch.setattr(jax, "devices", lambda: [device(capability)])
    for module in (availability, engine_module):
        monkeypatch.setattr(module, "why_not_installed", lambda: installed)
    hidden, weight = jax.ShapeDtypeStruct((4, 64), jnp.bfloat16), jax.ShapeDtypeStruct((72, 64), weight)
    return engines.choose_engine(engine, hidden, weight, None, options(72, axis_name=axis_name))


@pytest.mark.parametrize("capability", ["8.0", "8.6", "8.7", "8.9"])
def test_auto_picks_it_on_compute_capability_8(monkeypatch, capability):
    chosen, reason = choose(monkeypatch, "auto", capability)
    assert chosen.name == "triton" and "compute capability 8" in reason


@pytest.mark.parametrize(
    "capability, changes, words",
    [
        ("9.0", {}, "by name only"),
        ("7.5", {}, r"capability 8\.0, .*, got 7\.5"),
        ("12.0", {}, r"got 12\.0"),
        ("gfx942", {}, "needs an NVIDIA GPU"),
        ("8.0", {"installed": "jax_triton is not installed"}, "jax_triton is not installed"),
        ("8.0", {"weight": jnp.float32}, "float16 weight, got float32"),
        ("8.0", {"axis_name": "tensor"}, "not been tested over several GPUs"),
    ],
)
def test_auto_says_why_it_does_not(monkeypatch, capability, changes, words):
    # A Hopper GPU on which the Hopper kernels refuse.
    monkeypatch.setattr("jaxlogp.head.hopper.engine.why_not_available", lambda: "no Mosaic here")
    monkeypatch.setattr("jax.lax.axis_size", lambda axis: 2)
    chosen, reason = choose(monkeypatch, "auto", capability, **changes)
    assert chosen.name == "chunked"
    assert re.search(words, reason), reason
    assert reason.startswith("auto: hopper not used: no Mosaic here; triton not used: ")


def test_auto_picks_the_hopper_kernels_over_shards_too(monkeypatch):
    monkeypatch.setattr("jaxlogp.head.hopper.engine.why_not_available", lambda: None)
    monkeypatch.setattr("jax.lax.axis_size", lambda axis: 2)
    for axis_name in (None, "tensor"):
        chosen, reason = choose(monkeypatch, "auto", "9.0", axis_name=axis_name)
        assert chosen.name == "hopper" and "a Hopper GPU" in reason


def test_policy_gradients_in_one_pass_are_not_its_own(monkeypatch):
    data = hopper_case.case(4, 64, 72)
    arguments = data["hidden"], data["weight"], data["targets"], data["g_lp"], data["g_lp"], data["mask"]
    monkeypatch.setattr(
        "jaxlogp.head.policy_loss.choose_engine", lambda engine, *_: (TritonEngine(), "as on compute capability 8")
    )
    with record_head_runs() as runs:
        linear_policy_gradients(*arguments)
    assert runs[0].engine == "chunked" and "triton not used" in runs[0].reason
    with pytest.raises(ValueError, match="engine: expected 'auto', 'chunked' or 'hopper'.*'triton'"):
        linear_policy_gradients(*arguments, engine="triton")


def test_why_not_installed_names_the_package(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install" in availability.why_not_installed.__wrapped__()
