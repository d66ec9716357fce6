"""The Hopper kernels with the vocabulary over several simulated devices, and what is lowered for several GPUs."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxlogp import TokenLogProbs, VocabShards, linear_log_probs
from jaxlogp._mosaic_gpu import why_not_available
from jaxlogp.head import FixedOrderHopperEngine, HopperEngine
from jaxlogp.head.hopper import values as hopper_values
from jaxlogp.invariance import ReductionOrder
from tests.head import cases

pytestmark = pytest.mark.skipif(why_not_available() is not None, reason=str(why_not_available()))

TOKENS, HIDDEN, VOCAB = 20, 64, 528
MASK = jnp.asarray(np.arange(TOKENS) % 3 != 0)
# Granules of one tile; the fourth has no column.
ORDER = ReductionOrder.for_hopper(4)


@functools.cache
def data():
    return cases.case((TOKENS,), HIDDEN, VOCAB, seed=3)


def program(shards, engine, masked=False):
    """Values and gradients of hidden states and weight, taken inside of the shard_map."""
    size = shards.num_shards
    mesh = jax.make_mesh((size,), ("tensor",), axis_types=(AxisType.Auto,), devices=jax.devices()[:size])

    def local(hidden, weight, targets, g, g_entropy, mask=None):
        options = {"axis_name": "tensor", "vocab": shards, "with_entropy": True, "engine": engine}
        call = functools.partial(linear_log_probs, targets=targets, mask=mask, **options)
        out, pull = jax.vjp(lambda h, w: call(h, w), hidden, weight)
        return out, pull(TokenLogProbs(g, g_entropy))

    specs = P(), P("tensor"), P(), P(), P(), *([P()] if masked else [])
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=(P(), (P(), P("tensor")))))


def fixed_order():
    return FixedOrderHopperEngine(order=ORDER, **{**vars(cases.hopper()), "chunk": None})


@functools.cache
def interpreted(size, masked=False, fixed=False):
    """The same through the interpreter, as NumPy arrays, with the weight's gradient in the vocabulary's order."""
    shards = ORDER.shards(VOCAB, size) if fixed else VocabShards.aligned(VOCAB, size)
    engine, dtype = (fixed_order(), jnp.float32) if fixed else (cases.hopper(), jnp.bfloat16)
    operands = (
        # The gradient of fp32 is not rounded: a different order of its sum would show.
        data()["hidden"].astype(dtype),
        shards.shard_rows(data()["weight"]),
        *(data()[x] for x in ("targets", "g_lp", "g_entropy")),
        *([MASK] if masked else []),
    )
    with cases.interpreted_together():
        out, (d_hidden, d_weight) = jax.block_until_ready(program(shards, engine, masked)(*operands))
    arrays = out.log_probs, out.entropy, d_hidden, shards.unshard_rows(d_weight)
    return tuple(np.asarray(x.astype(jnp.float32)) for x in arrays)


def test_the_default_shards_give_the_bits_of_one_device():
    log_probs, entropy, d_hidden, d_weight = interpreted(2)
    cases.check(TokenLogProbs(log_probs, entropy), (d_hidden, d_weight, None), cases.expected(data()))
    one = interpreted(1)
    for index, name in ((0, "log-probs"), (1, "entropy"), (3, "weight's gradient")):
        np.testing.assert_array_equal(interpreted(2)[index], one[index], err_msg=name)


@pytest.mark.slow
def test_in_a_fixed_order_shards_give_all_bits_of_one_device():
    one, two = (interpreted(size, masked=True, fixed=True) for size in (1, 2))
    for name, mine, other in zip(("log-probs", "entropy", "d_hidden", "d_weight"), two, one, strict=True):
        np.testing.assert_array_equal(mine.view(np.int32), other.view(np.int32), err_msg=name)
    # Values and the weight's gradient are those of the engine without a fixed order, to the last bit.
    plain = interpreted(1, masked=True)
    for index in (0, 1, 3):
        np.testing.assert_array_equal(one[index], plain[index])
    np.testing.assert_allclose(one[2], plain[2], rtol=2**-7, atol=2**-9 * np.abs(plain[2]).max())


def test_masked_tokens_over_shards_by_blocks(monkeypatch):
    wanted = [interpreted(size, masked=True) for size in (1, 2)]
    # Blocks of one row tile, the largest logit of each taken over the shards inside of the loop.
    monkeypatch.setattr(hopper_values, "WHOLE_BYTES", 1)
    monkeypatch.setattr(hopper_values, "BLOCK_BYTES", 4096)
    interpreted.cache_clear()
    by_blocks = interpreted(2, masked=True)
    interpreted.cache_clear()
    for index in (0, 1, 3):
        np.testing.assert_array_equal(wanted[1][index], wanted[0][index])
        np.testing.assert_array_equal(by_blocks[index], wanted[0][index])
    for values in (*wanted[1][:2], wanted[1][2]):
        assert not values[~np.asarray(MASK)].any() and values[np.asarray(MASK)].any()


def lowered_collectives(engine):
    """All-reduces of a step on four shards as they are lowered for GPUs, and the names of other collectives."""
    tokens, hidden_size, vocab = LOWERED
    run = program(engine.shards(vocab, 4), engine)
    shapes = [((tokens, hidden_size), jnp.bfloat16), ((vocab, hidden_size), jnp.bfloat16), ((tokens,), jnp.int32)]
    shapes += [((tokens,), jnp.float32)] * 2
    traced = run.trace(*(jax.ShapeDtypeStruct(*shape) for shape in shapes))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    sums = re.findall(r'"stablehlo.all_reduce".*?\) : \((tensor<\S+>)\) -> tensor', text, flags=re.DOTALL)
    return sums, re.findall("all_gather|reduce_scatter|all_to_all|collective_permute", text)


LOWERED = 256, 1024, 4096


def test_three_collectives_are_lowered_for_gpus():
    tokens, hidden_size, _ = LOWERED
    sums, others = lowered_collectives(HopperEngine(chunk=512, check_device=False))
    # Maxima, then integers that hold everything else (3 of them the targets' bits); and dH, in fp32.
    assert sums == [f"tensor<{tokens}xf32>", f"tensor<12x{tokens}xi32>", f"tensor<{tokens}x{hidden_size}xf32>"]
    assert not others


def test_no_float_is_added_by_a_collective_in_a_fixed_order():
    tokens, hidden_size, _ = LOWERED
    sums, others = lowered_collectives(FixedOrderHopperEngine(order=ORDER, check_device=False))
    # Maxima, integers, and the bits of dH, each number sent to the rank that adds it and back to all.
    assert sums == [f"tensor<{tokens}xf32>", f"tensor<12x{tokens}xi32>", f"tensor<4x{tokens * hidden_size // 4}xi32>"]
    assert others == ["all_to_all"]
