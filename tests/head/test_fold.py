"""The fold of tile statistics: exact sums, so equal bits in any order, any number of shards and any program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlogp.head.fold import TileSums, block_tokens, finish_sums, from_limbs, limbs, sum_shards, sum_tiles
from tests import oracle

TOKENS = 37


def partials(tiles=24, seed=0, spread=4.0):
    """Statistics of tiles of 256 columns, the target in the last, and the same in float64."""
    rng = np.random.default_rng(seed)
    z = rng.normal(0.0, spread, (tiles, 256, TOKENS)).astype(np.float32)
    m = z.max(1)
    e = np.exp(z.astype(np.float64) - m[:, None])
    stats = np.stack([m, e.sum(1), (e * (z - m[:, None])).sum(1), np.zeros_like(m)], 1).astype(np.float32)
    stats[-1, 3] = z[-1, 17]
    wide = z.reshape(-1, TOKENS).astype(np.float64)
    lse = np.log(np.exp(wide - wide.max(0)).sum(0)) + wide.max(0)
    p = np.exp(wide - lse)
    return jnp.asarray(stats), z[-1, 17] - lse, lse - (p * wide).sum(0)


def fold(stats, column=None):
    column = jnp.zeros(TOKENS, jnp.int32) if column is None else column
    sums = sum_tiles(stats, jnp.max(stats[:, 0], axis=0), column, True)
    return finish_sums(sums, jnp.ones(TOKENS, bool), 24 * 256, None)[0]


def equal(left, right):
    for a, b in zip(left, right, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize(
    "tokens, blocks, size",
    [(8192, 1, 8192), (8192, 3, 2048), (8192, 2, 4096), (1000, 3, 512), (1000, 1, 1024), (1, 1, 256)],
)
def test_blocks_hold_the_tokens_exactly_if_a_few_more_of_them_do(tokens, blocks, size):
    assert block_tokens(tokens, blocks, 256) == size
    assert -(-tokens // size) <= 2 * blocks


@pytest.mark.parametrize("spread", [0.1, 4.0, 40.0])
def test_values(spread):
    stats, log_probs, entropy = partials(spread=spread)
    out = jax.jit(fold)(stats)
    # Sums are exact: what is rounded is the statistics, exp, log and differences. At most 3 roundings of a result, and 4 of
    # log Σ e^(z - max) and Σ p (z - max), which lie below 9.
    rounding = {"rtol": oracle.fp32_bound(1.0, 3), "atol": oracle.fp32_bound(9.0, 4)}
    np.testing.assert_allclose(out.log_probs, log_probs, **rounding)
    np.testing.assert_allclose(out.entropy, entropy, **rounding)


def test_programs_and_orders_of_tiles():
    stats, _, _ = partials()
    wanted = jax.jit(fold)(stats)
    equal(fold(stats), wanted)
    equal(jax.jit(lambda x: fold(x[np.random.default_rng(1).permutation(24)]))(stats), wanted)
    equal(jax.jit(lambda x: fold(x * 1.0 + 0.0))(stats), wanted)
    # A part of the tokens, inside of a loop.
    alone = jax.jit(lambda x: jax.lax.map(lambda t: fold(jnp.broadcast_to(t[..., None], (24, 4, TOKENS))), x))
    equal((x[:, 0] for x in alone(jnp.moveaxis(stats, 2, 0))), wanted)


@pytest.mark.parametrize("shards", [2, 3, 4])
def test_shards(shards):
    stats, _, _ = partials(seed=shards)
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((shards,), ("tensor",), axis_types=auto, devices=jax.devices()[:shards])

    def local(stats):
        column = jnp.where(jax.lax.axis_index("tensor") == shards - 1, 0, -1) + jnp.zeros(TOKENS, jnp.int32)
        maximum = jax.lax.pmax(jnp.max(stats[:, 0], axis=0), "tensor")
        sums = sum_shards(sum_tiles(stats, maximum, column, True), "tensor", jnp.ones(TOKENS, jnp.int32))
        return finish_sums(sums, jnp.ones(TOKENS, bool), 24 * 256, None)[0]

    mapped = jax.shard_map(local, mesh=mesh, in_specs=jax.P("tensor"), out_specs=jax.P())
    equal(jax.jit(mapped)(stats), jax.jit(fold)(stats))


def test_limbs_hold_every_bit_down_to_the_last_limb():
    rng = np.random.default_rng(5)
    x = (rng.normal(size=2000) * np.exp(rng.normal(0.0, 8.0, 2000))).astype(np.float32)
    x = np.concatenate([x[np.abs(x) < 2**13], np.float32([0.0, -0.0, 1e-40, 1.0, -1.0, 2.0**-36, 8191.5])])
    pieces = jax.jit(limbs)(x)
    value = sum(np.asarray(piece, np.float64) * 2.0 ** (-18 * place) for place, piece in enumerate(pieces))
    assert np.abs(value - x).max() < 2.0**-36
    # Three limbs are added: two roundings.
    np.testing.assert_allclose(jax.jit(from_limbs)(np.stack(pieces)), x, rtol=1.2e-7, atol=2.0**-36)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_shows(bad):
    stats, _, _ = partials()
    out = fold(stats.at[3, 1, 5].set(bad))
    for x in out:
        assert np.isnan(x[5]) and np.isfinite(np.delete(np.asarray(x), 5)).all()


def test_sums_of_masked_tiles_are_zero():
    stats, _, _ = partials()
    masked = np.array(stats)
    masked[:4] = np.float32([-1e30, 256.0, 0.0, 0.0])[None, :, None]
    out = jax.jit(fold)(masked)
    assert all(np.isfinite(x).all() for x in out)
    maximum, column = masked[4:, 0].max(axis=0), np.zeros(TOKENS, np.int32)
    sums = jax.jit(sum_tiles, static_argnums=3)(masked[:4], maximum, column, True)
    assert isinstance(sums, TileSums) and not np.asarray(sums.sum_exp).any()
