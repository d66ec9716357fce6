"""Cases for the hopper engine, shared by the interpreted tests and the ones on a GPU; expected values are the oracle's."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxlogp.head.projection import HeadOptions
from jaxlogp.targets import LocalTargets
from tests import oracle


@contextlib.contextmanager
def several_interpreted_devices():
    """Lets the interpreter run kernels on several devices at once.

    As a kernel ends it asserts that no barrier is left in its memory, which all devices share: one that is still inside of
    its kernel has some.
    """
    from jax._src.pallas.mosaic_gpu.interpret import shared_memory

    name = "assert_no_barriers_allocated"
    memories = [x for x in vars(shared_memory).values() if isinstance(x, type) and name in vars(x)]
    kept = [getattr(memory, name) for memory in memories]
    for memory in memories:
        setattr(memory, name, lambda self: None)
    try:
        yield
    finally:
        for memory, method in zip(memories, kept, strict=True):
            setattr(memory, name, method)


def case(tokens, hidden_size, vocab, bias=False, spread=2.0, seed=0):
    """Operands, targets on both edges, and cotangents; logits of standard deviation ``spread``."""
    rng = np.random.default_rng(seed)
    targets = rng.integers(0, vocab, tokens).astype(np.int32)
    targets[:2] = 0, vocab - 1
    return {
        "hidden": jnp.asarray(rng.normal(size=(tokens, hidden_size)), jnp.bfloat16),
        "weight": jnp.asarray(rng.normal(0.0, spread / hidden_size**0.5, (vocab, hidden_size)), jnp.bfloat16),
        "bias": jnp.asarray(rng.normal(size=vocab), jnp.float32) if bias else None,
        "targets": jnp.asarray(targets),
        "mask": jnp.ones(tokens, bool),
        "g_lp": jnp.asarray(rng.normal(size=tokens), jnp.float32),
        "g_entropy": jnp.asarray(rng.normal(size=tokens), jnp.float32),
    }


def local_targets(data, start=0, width=None):
    """Targets as the shard of rows [start, start + width) sees them."""
    width = data["weight"].shape[0] if width is None else width
    column = data["targets"] - start
    owned = data["mask"] & (column >= 0) & (column < width)
    return LocalTargets(jnp.where(owned, column, -1), data["mask"], None, jnp.int32(width))


@functools.partial(jax.jit, static_argnames=("engine", "options"))
def run(data, local, engine, options):
    """(TokenLogProbs, gradients) of Σ g log_prob + Σ g_H entropy."""

    def objective(hidden, weight, bias):
        result = engine.log_probs(hidden, weight, bias, local, options)
        total = jnp.sum(result.log_probs * data["g_lp"])
        if options.with_entropy:
            total = total + jnp.sum(result.entropy * data["g_entropy"])
        return total, result

    operands = data["hidden"], data["weight"], data["bias"]
    gradients, result = jax.grad(objective, argnums=(0, 1, 2), has_aux=True)(*operands)
    return result, gradients


def expected(data, options: HeadOptions):
    """((log_probs, entropy), gradients) in float64."""
    head = oracle.Head(options.temperature, options.logit_scale, options.softcap)
    args = data["hidden"], data["weight"], data["targets"]
    g_entropy = data["g_entropy"] if options.with_entropy else None
    values = oracle.head_log_probs(*args, data["mask"], data["bias"], head)
    return values, oracle.head_gradients(*args, data["g_lp"], g_entropy, data["mask"], data["bias"], head)


def check(result, gradients, wanted, value_error, gradient_error):
    (log_probs, entropy), wanted_gradients = wanted
    assert oracle.scaled_error(result.log_probs, log_probs) < value_error
    if result.entropy is not None:
        assert oracle.scaled_error(result.entropy, entropy) < value_error
    for name, gradient in zip(("hidden", "weight", "bias"), gradients, strict=True):
        if gradient is not None:
            error = oracle.relative_error(gradient, getattr(wanted_gradients, name))
            assert error < gradient_error, f"{name}: {error}"
