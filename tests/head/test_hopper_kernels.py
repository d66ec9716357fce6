"""What is particular to the Hopper kernels (tiles, chunks, packed tokens), on the CPU through JAX's Mosaic GPU interpreter.

The common cases: test_engines.py.
"""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlogp import linear_log_probs, linear_policy_loss
from jaxlogp._mosaic_gpu import interpreter, why_not_available
from jaxlogp.head import HopperEngine, why_not
from jaxlogp.head.hopper import values as hopper_values
from jaxlogp.head.hopper.forward import forward_statistics
from jaxlogp.head.hopper.operands import Launch, Operands
from jaxlogp.head.hopper.tiles import ALTERNATE, SHARED_PAIR, HeadTiles
from tests.head import cases
from tests.head.cases import ALL_OPTIONS, hopper

pytestmark = pytest.mark.skipif(why_not_available() is not None, reason=str(why_not_available()))


def check(data, engine=None, **options):
    result, gradients = cases.run(data, engine or hopper(), **options)
    cases.check(result, gradients, cases.expected(data, **options))
    return result, gradients


def test_several_row_tiles_and_chunks_the_last_ones_short():
    # 70 tokens and 600 columns: neither fills its last tile, and the last of three chunks is short.
    check(cases.case((70,), 64, 600, bias=jnp.float32), **ALL_OPTIONS)


@pytest.mark.parametrize("vocab", [104, 256])
def test_vocabularies_around_one_tile(vocab):
    check(cases.case((5,), 64, vocab, seed=1))


def test_shared_tiles_and_several_steps():
    shared = dataclasses.replace(SHARED_PAIR, stages=2)
    tiles = HeadTiles(forward=shared, logit_gradient=shared, d_hidden=shared, d_weight=shared)
    check(cases.case((40,), 320, 512, seed=2), hopper(tiles=tiles))


def test_tokens_without_a_label_are_in_no_product():
    # A broken row of the weight reaches every token that is computed, and none without a label.
    data = cases.case((20,), 64, 272, seed=3)
    data["mask"] = jnp.arange(20) % 3 != 0
    data["weight"] = data["weight"].at[5].set(jnp.nan)
    d_hidden = np.asarray(cases.run(data, hopper())[1].hidden, np.float32)
    masked = ~np.asarray(data["mask"])
    assert np.isnan(d_hidden[~masked]).all() and not d_hidden[masked].any()


def test_hidden_states_are_not_copied_for_their_mask():
    # A block of them is gathered at a time; a selection of all would stay in memory beside it.
    data = cases.case((70,), 64, 272)

    def forward(hidden, mask):
        return linear_log_probs(hidden, data["weight"], data["targets"], mask=mask, engine=hopper())

    program = str(jax.make_jaxpr(forward)(data["hidden"], data["mask"]))
    assert "bf16[70,64]" in program
    assert "bf16[70,64] = select_n" not in program


@pytest.mark.parametrize("all_live", [False, True])
def test_blocks_of_tokens_change_no_bit(monkeypatch, all_live):
    data = cases.case((150,), 64, 272, seed=5)
    if all_live:
        data["mask"] = None
    else:
        data["mask"] = jnp.arange(150) % 3 != 0
        data["hidden"] = jnp.where(data["mask"][:, None], data["hidden"], jnp.nan)
    forward = lambda: jax.jit(lambda data: cases.call(data, hopper()))  # noqa: E731
    wanted = forward()(data)
    monkeypatch.setattr(hopper_values, "WHOLE_BYTES", 4096)
    monkeypatch.setattr(hopper_values, "BLOCK_BYTES", 4096)
    cases.same_bits(forward()(data), wanted)


def test_tile_statistics_are_bitwise_those_of_a_shard_and_of_a_part_of_the_batch():
    data = cases.case((128,), 64, 1024, seed=8)
    column = data["targets"]

    def statistics(hidden, weight, column):
        operands = Operands(hidden, weight, None, jnp.int32(weight.shape[0]))
        return np.asarray(forward_statistics(operands, column, Launch(ALTERNATE, 2, interpreter()), with_entropy=True))

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
    data = cases.case((4,), hidden_size, vocab, dtypes=(jnp.bfloat16, dtype))
    with pytest.raises(ValueError, match=f"'hopper' takes.*{word}"):
        cases.run(data, hopper())


@pytest.mark.bad_input
@pytest.mark.parametrize("chunk", [0, -256, 300])
def test_a_chunk_that_cuts_tiles_is_refused(chunk):
    data = cases.case((4,), 64, 600)
    with pytest.raises(ValueError, match=f"chunk: expected None or a positive multiple of 256, .* got {chunk}"):
        cases.run(data, hopper(chunk=chunk))


def test_without_a_hopper_gpu_the_reason_says_so():
    data = cases.case((4,), 64, 256)
    reason = why_not("hopper", data["hidden"], data["weight"])
    assert "GPU" in reason and "cpu" in reason


@pytest.mark.parametrize("layout", ["vh", "hv"])
def test_no_program_turns_the_weight_round(layout):
    """Neither a transposed weight nor a transposed gradient of it exists in what is lowered for a GPU."""
    data = cases.case((300,), 128, 576)
    data["weight"] = data["weight"] if layout == "vh" else data["weight"].T
    options = {"engine": HopperEngine(check_device=False), "weight_layout": layout}
    old = jnp.zeros(300)

    def loss(hidden, weight):
        total = linear_policy_loss(hidden, weight, data["targets"], old, old, old == 0.0, **options)[0]
        result = linear_log_probs(hidden, weight, data["targets"], **options)
        return total.sum + jnp.sum(result.log_probs)

    traced = jax.jit(jax.grad(loss, (0, 1))).trace(data["hidden"], data["weight"])
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") > 8
    shapes = {"x".join(map(str, shape)) for shape in re.findall(r"tensor<(\d+)x(\d+)xbf16>", text)}
    given, turned = ("576x128", "128x576") if layout == "vh" else ("128x576", "576x128")
    assert given in shapes and turned not in shapes


def test_the_kernels_lower_for_cuda_without_a_gpu():
    data = cases.case((64,), 1024, 520, bias=jnp.float32)
    text = cases.lowered_for_cuda(data, HopperEngine(check_device=False), **ALL_OPTIONS)
    assert text.count("custom_call @mosaic_gpu") == 5
    assert jax.default_backend() == "cpu"
