"""Projections that are computed as one product."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments.models.layers import JoinedProjections, Projection


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("adapted", [False, True])
def test_joined_projections_give_what_each_gives(adapted, shards):
    rngs = nnx.Rngs(0)
    modules = [
        Projection({"embed": 6, "heads": heads, "head_dim": 4}, "float32", rngs, bias=adapted) for heads in (6, 2)
    ]
    if adapted:
        modules[0].adapt(2, 0.5, rngs)
        for each in (modules[0].lora.lora_b, modules[0].bias, modules[1].bias):
            each[...] = jax.random.normal(rngs.params(), each.shape)
    x = jax.random.normal(jax.random.key(1), (5, 6))
    wanted = [module(x) for module in modules]
    joined = JoinedProjections(modules, shards)
    # fp32 sums of six products, in any order.
    for part, exact in zip(joined(x), wanted, strict=True):
        np.testing.assert_allclose(part, exact, atol=1e-5)
    together = jnp.concatenate([each.reshape(5, shards, -1) for each in wanted], axis=-1)
    np.testing.assert_allclose(joined.concatenated(x), together, atol=1e-5)
