"""Specific to the triton engine: tiles, windows, packed tokens, availability. The common cases are in test_engines.py.

By default the kernels' plain stand-in runs, so everything but the kernels is tested; with TRITON_INTERPRET=1 the
kernels' source runs in Triton's interpreter (test_triton_kernels.py does so).
"""

import math
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlogp import linear_log_probs, linear_policy_loss
from jaxlogp._targets import LocalTargets
from jaxlogp.head import TritonEngine, record_head_runs
from jaxlogp.head.call import HeadCall
from jaxlogp.head.registry import choose_engine
from jaxlogp.head.triton import availability, launch, tiles
from jaxlogp.head.triton import engine as engine_module
from jaxlogp.head.triton.operands import Launch, Operands
from jaxlogp.head.triton.tiles import TABLE
from tests.head import cases
from tests.head.cases import ALL_OPTIONS, TRITON_INTERPRETED, TRITON_TILES, triton

SLOW = pytest.mark.slow
NO_TARGETS = LocalTargets(None, None, None, None)


def check(data, engine=None, **options):
    result, gradients = cases.run(data, engine or triton(), **options)
    cases.check(result, gradients, cases.expected(data, **options))
    return result, gradients


def test_the_last_tile_of_every_dimension_is_partly_filled():
    # Neither 70 tokens, 600 columns nor a hidden size of 40 fills its last tile, and the last of five windows overlaps.
    check(cases.case((70,), 40, 600, bias=jnp.float32), **ALL_OPTIONS)


@pytest.mark.parametrize("live", [65, *(pytest.param(n, marks=SLOW) for n in (0, 1, 64, 128, 129, 193, 200))])
def test_only_tokens_with_a_cotangent_reach_the_products(live):
    # 200 tokens are 7 tiles of 32 rows, so the products take 64, 128, 192 or 224 rows.
    data = cases.case((200,), 32, 136, bias=jnp.float32, seed=6)
    order = np.random.default_rng(0).permutation(200)
    wanted = jnp.asarray(order < live)
    data.update(g_lp=jnp.where(wanted, data["g_lp"], 0.0), g_entropy=jnp.where(wanted, data["g_entropy"], 0.0))
    _, gradients = check(data)
    assert not np.asarray(gradients.hidden, np.float32)[~np.asarray(wanted)].any()
    # A token whose logits are NaN spoils no gradient as long as it has no cotangent.
    data["hidden"] = jnp.where(wanted[:, None], data["hidden"], jnp.bfloat16(np.nan))
    _, same = cases.run(data, triton())
    cases.same_bits(gradients, same)


@SLOW
def test_blocks_of_tokens(monkeypatch):
    data = cases.case((100,), 32, 136, seed=13)
    data["mask"] = jnp.arange(100) % 2 == 0
    monkeypatch.setattr(engine_module, "STATISTICS_BYTES", 3 * 16 * 40)
    check(data, triton(window=64))


@pytest.mark.skipif(not TRITON_INTERPRETED, reason="the stand-in's products are those of the whole call")
@SLOW
def test_tile_statistics_are_bitwise_those_of_a_shard_and_of_a_part_of_the_batch():
    data = cases.case((64,), 32, 256, seed=14)
    column = data["targets"]

    def statistics(hidden, weight, column):
        bounds = jnp.asarray([0, weight.shape[0], hidden.shape[0]], jnp.int32)
        return np.asarray(
            launch.forward_statistics(
                Operands(hidden, weight, None), column, bounds, True, Launch(TRITON_TILES.forward)
            )
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
    """Results of the kernels' shapes that read the weight, so that what stands between them can be looked at."""

    @staticmethod
    def forward_statistics(operands, column, bounds, with_slope, launch):
        tiles = -(-operands.num_columns // launch.config.columns)
        return jnp.full((tiles, 4, operands.hidden.shape[0]), operands.weight[0, 0], jnp.float32)

    @staticmethod
    def window_gradient(operands, scalars, bounds, window, with_slope, launch):
        return jnp.full((operands.hidden.shape[0], window), operands.weight[0, 0])


@pytest.mark.parametrize("layout", ["vh", "hv"])
def test_no_array_of_tokens_times_vocabulary_and_no_turned_weight(layout):
    tokens, hidden_size, vocab = 8192, 1024, 151936
    fake = TritonEngine(tiles=TABLE[90], functions=NoKernels)

    def objective(hidden, weight, targets):
        call = {"with_entropy": True, "engine": fake, "weight_layout": layout}
        return jnp.sum(linear_log_probs(hidden, weight, targets, **call).log_probs)

    given, turned = ((vocab, hidden_size), (hidden_size, vocab))[:: 1 if layout == "vh" else -1]
    operands = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in [(tokens, hidden_size), given]]
    operands.append(jax.ShapeDtypeStruct((tokens,), jnp.int32))
    text = jax.jit(jax.grad(objective, argnums=(0, 1))).lower(*operands).as_text()
    found = set(re.findall(r"tensor<((?:\d+x)+)[a-z0-9]+>", text))
    shapes = {tuple(int(n) for n in shape.split("x")[:-1]) for shape in found}
    window = tiles.window_columns(tokens, vocab)
    assert tokens * window * 2 <= 240 * 2**20 and vocab % window, "several windows, the last one overlapping"
    assert max(map(math.prod, shapes)) == vocab * hidden_size, "the weight's gradient is the largest"
    assert given in shapes and turned not in shapes


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
        (8, 2**18 + 8, jnp.bfloat16, {}, "vocabulary of at most 262144"),
        (32, 76, jnp.bfloat16, {"weight_layout": "hv"}, "vocabulary columns that is a multiple of 8, got 76"),
    ],
)
def test_what_the_kernels_cannot_take_is_refused_with_the_reason(hidden_size, vocab, dtype, changes, word):
    data = cases.case((4,), hidden_size, vocab, dtypes=(jnp.bfloat16, dtype))
    data["weight"] = data["weight"].T if "weight_layout" in changes else data["weight"]
    with pytest.raises(ValueError, match=f"engine: expected .*'triton' takes.*{word}"):
        cases.run(data, triton(), **changes)


@pytest.mark.bad_input
@pytest.mark.parametrize("window", [0, -64, 100])
def test_a_window_that_cuts_loads_is_refused(window):
    with pytest.raises(ValueError, match=f"^window: expected None or a positive multiple of 64, got {window}"):
        triton(window=window)


@pytest.mark.bad_input
@pytest.mark.skipif(TRITON_INTERPRETED, reason="of the engine as it is")
def test_by_name_without_a_gpu_is_refused_with_the_reason():
    data = cases.case((4,), 32, 72)
    with pytest.raises(ValueError, match="engine: expected .*'triton' takes.* NVIDIA GPU, the default device is cpu"):
        linear_log_probs(data["hidden"], data["weight"], data["targets"], engine="triton")


def device(capability, platform="gpu"):
    return types.SimpleNamespace(platform=platform, device_kind="a GPU", compute_capability=capability, core_count=1)


def choose(monkeypatch, capability, installed=None, weight=jnp.bfloat16, shards=1):
    """What "auto" takes on a device of that compute capability, and why."""
    monkeypatch.setattr(jax, "devices", lambda: [device(capability)])
    for module in (availability, engine_module):
        monkeypatch.setattr(module, "why_not_installed", lambda: installed)
    hidden, weight = jax.ShapeDtypeStruct((4, 64), jnp.bfloat16), jax.ShapeDtypeStruct((72, 64), weight)
    axis_name = None if shards == 1 else "tensor"
    call = HeadCall(hidden, weight, None, NO_TARGETS, vocab_size=72 * shards, axis_name=axis_name, num_shards=shards)
    chosen, reason = choose_engine("auto", call)
    return chosen.name, reason


@pytest.mark.parametrize("capability", ["8.0", "8.6", "8.7", "8.9"])
def test_auto_picks_it_on_compute_capability_8(monkeypatch, capability):
    name, reason = choose(monkeypatch, capability)
    assert name == "triton" and reason.startswith("auto; hopper not used: ")


def test_auto_picks_it_on_a_hopper_gpu_whose_own_kernels_this_jax_does_not_have(monkeypatch):
    for engine in ("hopper", "triton"):
        monkeypatch.setattr(f"jaxlogp.head.{engine}.engine.why_not_available", lambda: "JAX is too old")
    name, reason = choose(monkeypatch, "9.0")
    assert name == "triton" and reason == "auto; hopper not used: JAX is too old"


@pytest.mark.parametrize(
    "capability, changes, words",
    [
        ("9.0", {}, "by name only"),
        ("7.5", {}, r"capability 8\.0, .*, got 7\.5"),
        ("12.0", {}, r"got 12\.0"),
        ("gfx942", {}, "needs an NVIDIA GPU"),
        ("8.0", {"installed": "jax_triton is not installed"}, "jax_triton is not installed"),
        ("8.0", {"weight": jnp.float32}, "float16 weight, got float32"),
        ("8.0", {"shards": 2}, "not been tested over several GPUs"),
    ],
)
def test_auto_says_why_it_does_not(monkeypatch, capability, changes, words):
    # A Hopper GPU on which the Hopper kernels could run, and refuse.
    monkeypatch.setattr("jaxlogp.head.hopper.engine.why_not_available", lambda: "no Mosaic here")
    monkeypatch.setattr("jaxlogp.head.triton.engine.why_not_available", lambda: None)
    name, reason = choose(monkeypatch, capability, **changes)
    assert name == "chunked"
    assert re.search(words, reason), reason
    assert re.match(r"auto; hopper not used: (no Mosaic here|it needs .*); triton not used: ", reason), reason


@pytest.mark.parametrize("shards", [1, 2])
def test_auto_picks_the_hopper_kernels_over_shards_too(monkeypatch, shards):
    monkeypatch.setattr("jaxlogp.head.hopper.engine.why_not_available", lambda: None)
    assert choose(monkeypatch, "9.0", shards=shards) == ("hopper", "auto")


def test_a_policy_loss_takes_two_steps_and_says_why():
    data = cases.case((4,), 64, 72)
    operands = data["hidden"], data["weight"], data["targets"], data["g_lp"], data["g_lp"], data["mask"]
    with record_head_runs() as runs:
        jax.eval_shape(lambda *x: linear_policy_loss(*x, engine=triton()), *operands)
    assert [(x.engine, x.gradient) for x in runs] == [("triton", "in two steps: it has no one-pass gradient")]


def test_why_not_installed_names_the_package(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install" in availability.why_not_installed.__wrapped__()
