"""The filtered backward of the Hopper kernels, through the Mosaic GPU interpreter, against the oracle of the filter."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxlogp import linear_log_probs
from jaxlogp._mosaic_gpu import interpreter, why_not_available
from jaxlogp.head import GradientFilter, HopperEngine, skipped_tiles
from jaxlogp.head.hopper.tiles import ALTERNATE, FILTERED, SHARED_PAIR, HeadTiles
from tests import oracle
from tests.head import cases
from tests.head.test_gradient_filter import numpy_filter

pytestmark = pytest.mark.skipif(why_not_available() is not None, reason=str(why_not_available()))

# dz is rounded to bf16 (2^-9 at most) before the products, and the results once more.
GRADIENT_ERROR = 5e-3
THRESHOLD = 2.0**-12
HIDDEN, COLUMNS = 64, 256


def engine(threshold=THRESHOLD, **changes):
    chosen = None if threshold is None else GradientFilter(threshold)
    settings = {"interpret": interpreter(), "num_sms": 2, "chunk": 512, "gradient_filter": chosen}
    return HopperEngine(**{**settings, **changes})


def case(tokens, vocab, block=64, seed=0, bias=True):
    """Each block of tokens looks at few tiles: its hidden states point at one direction, which rows of those tiles share."""
    data = cases.case((tokens,), HIDDEN, vocab, bias=jnp.float32 if bias else None, spread=0.5, seed=seed)
    rng = np.random.default_rng(seed)
    weight, hidden = oracle.f64(data["weight"]), oracle.f64(data["hidden"])
    tiles = -(-vocab // COLUMNS)
    targets = np.empty(tokens, np.int32)
    for first in range(0, tokens, block):
        # The first block sees every second tile, the next every third …
        axis, seen = first // block, list(range(0, tiles, 2 + first // block))
        hidden[first : first + block, axis] = 25.0
        for tile in seen:
            weight[tile * COLUMNS : tile * COLUMNS + 3, axis] += 1.0
        count = len(targets[first : first + block])
        targets[first : first + block] = rng.choice(seen, count) * COLUMNS + rng.integers(0, 3, count)
    data.update(weight=jnp.asarray(weight, jnp.bfloat16), hidden=jnp.asarray(hidden, jnp.bfloat16))
    data["targets"] = jnp.asarray(np.minimum(targets, vocab - 1))
    return data


def check(data, block, run_with=None, **options):
    wanted, _, skipped = numpy_filter(data, options, chunk=block, tile=COLUMNS, near=1e-3)
    _, gradients = cases.run(data, run_with or engine(), **options)
    for name, gradient in zip(("hidden", "weight", "bias"), gradients, strict=True):
        if gradient is not None:
            error = oracle.relative_error(gradient, getattr(wanted, name))
            assert error < GRADIENT_ERROR, f"{name}: {error}"
    assert skipped > 0
    # What is left out is exact zeros, not small numbers.
    d_weight = np.asarray(gradients[1], np.float32)
    np.testing.assert_array_equal(d_weight.any(axis=1), wanted.weight.any(axis=1))
    return gradients, skipped


def test_the_filtered_gradient_is_the_oracles():
    # Three blocks of tokens, the last one short; seven tiles in two chunks, the last of both short.
    data = case(150, 1544)
    _, skipped = check(data, 64)
    assert skipped > 8


def test_threshold_zero_is_the_unfiltered_gradient():
    # With the same tiles: others may sum the hidden gradient in two parts.
    data = case(5, 264, bias=False)
    cases.same_bits(cases.run(data, engine(0.0)), cases.run(data, engine(None, tiles=FILTERED)))


def test_shared_tiles_one_block_and_the_soft_cap():
    shared = dataclasses.replace(SHARED_PAIR, stages=3)
    # Without a filter these tiles would sum the hidden gradient in two parts.
    tiles = HeadTiles(ALTERNATE, logit_gradient=shared, d_hidden=shared, d_weight=shared, d_hidden_parts=2)
    data = case(200, 1024, block=128, seed=1)
    check(data, 128, engine(tiles=tiles, num_sms=1, chunk=1024), softcap=40.0, temperature=0.8, logit_scale=1.1)


def test_more_blocks_than_tiles_that_count():
    data = case(64, 512, seed=2, bias=False)
    check(data, 64, engine(num_sms=5, chunk=256))


def test_masked_tokens_keep_no_tile_and_nothing_kept_is_all_zeros():
    data = case(140, 768, seed=3)
    data["mask"] = jnp.arange(140) % 2 == 0
    data["hidden"] = jnp.where(data["mask"][:, None], data["hidden"], jnp.nan)
    _, gradients = cases.run(data, engine(), with_entropy=False)
    # Live tokens are packed together: 70 of them, two blocks.
    live = np.flatnonzero(np.asarray(data["mask"]))
    packed = {**data, **{name: data[name][live] for name in ("hidden", "targets", "mask", "g_lp")}}
    packed["g_entropy"] = jnp.zeros(len(live))
    wanted, _, skipped = numpy_filter(packed, chunk=64, tile=COLUMNS, near=1e-3)
    assert skipped > 0
    assert oracle.relative_error(gradients[0][live], wanted.hidden) < GRADIENT_ERROR
    assert oracle.relative_error(gradients[1], wanted.weight) < GRADIENT_ERROR
    assert oracle.relative_error(gradients[2], wanted.bias) < GRADIENT_ERROR
    assert not np.asarray(gradients[0], np.float32)[1::2].any()
    operands = data["hidden"], data["weight"], data["targets"]
    counted = skipped_tiles(*operands, mask=data["mask"], bias=data["bias"], engine=engine())
    # The third block has no live token: it is not computed without a filter either.
    assert (float(counted.sum), int(counted.count)) == (skipped, 6)
    nobody = {**data, "mask": jnp.zeros(140, bool)}
    _, zeros = cases.run(nobody, engine(), with_entropy=False)
    assert not any(np.asarray(x, np.float32).any() for x in zeros)


def test_tiles_that_do_not_line_up_are_refused():
    narrow = dataclasses.replace(ALTERNATE, columns=128)
    data = case(64, 512)
    refused = engine(tiles=HeadTiles(logit_gradient=narrow))
    with pytest.raises(ValueError, match="tiles: expected columns of the forward that divide 128 columns"):
        cases.run(data, refused)


def test_the_filtered_kernels_lower_for_cuda_without_a_gpu():
    data = cases.case((300,), 1024, 1032, bias=jnp.float32)
    chosen = HopperEngine(gradient_filter=GradientFilter(), chunk=512, check_device=False)
    text = cases.lowered_for_cuda(data, chosen)
    # One fewer than without: the weight's gradient starts from zeros.
    assert text.count("custom_call @mosaic_gpu") == 4


def test_the_filtered_kernels_have_the_types_that_shard_map_checks():
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    rows, columns, chosen = (
        P("data"),
        P("tensor"),
        HopperEngine(gradient_filter=GradientFilter(), chunk=512, check_device=False),
    )

    def local(hidden, weight, bias, targets):
        def total(hidden, weight, bias):
            settings = {"axis_name": "tensor", "with_entropy": True, "engine": chosen}
            result = linear_log_probs(hidden, weight, targets, bias=bias, **settings)
            return result.log_probs.sum() + result.entropy.sum()

        count = skipped_tiles(hidden, weight, targets, bias=bias, axis_name="tensor", engine=chosen)
        return jax.grad(total, (0, 1, 2))(hidden, weight, bias), count.psum("data")

    specs = rows, columns, columns
    mapped = jax.shard_map(local, mesh=mesh, in_specs=(*specs, rows), out_specs=(specs, P()))
    shapes = [(600, 1024), (2064, 1024), (2064,)]
    operands = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    traced = jax.jit(mapped).trace(*operands, jax.ShapeDtypeStruct((600,), jnp.int32))
    assert traced.lower(lowering_platforms=("cuda",)).as_text().count("custom_call @mosaic_gpu") >= 4
