"""The gradient filter of the hopper engine on peaked policies, against the unfiltered backward and one cuBLAS product.

    python -m benchmarks.hopper.gradient_filter [H,V ...]

Policies are those of benchmarks/studies/gradient_filter.py (Zipf frequencies, hidden states that point at a token
drawn from them), generated on the GPU. Times are medians of interleaved turns, each at settled clocks. Errors are
relative, in norm, against the unfiltered gradient.
"""

import dataclasses
import functools
import sys
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp

from benchmarks.beside_product import TOKENS, Timed, cases, print_times, say
from benchmarks.hopper.one_pass import relative
from jaxlogp import linear_log_probs
from jaxlogp.head import GradientFilter, HopperEngine, skipped_tiles

THRESHOLDS = (2.0**-8, 2.0**-12, 2.0**-16)
ENTROPY = 0.5
LEVER = 8.0
# Number of tokens that represent all in the search for a mean entropy.
SAMPLE = 1024


def policy(hidden_size, vocab):
    """Hidden states, weight and targets of a policy whose mean entropy is ENTROPY nats, and that entropy."""
    keys = jax.random.split(jax.random.key(0), 4)
    frequency = 1.0 / (1.0 + jax.random.permutation(keys[0], vocab).astype(jnp.float32))
    log_frequency = jnp.log(frequency / frequency.sum())
    rows = jax.random.normal(keys[1], (vocab, hidden_size - 1))
    rows = rows / jnp.linalg.norm(rows, axis=1, keepdims=True)
    column = (log_frequency - log_frequency.mean()) / LEVER
    weight = jnp.concatenate([column[:, None], rows], axis=1).astype(jnp.bfloat16)
    called = jax.random.categorical(keys[2], log_frequency, shape=(TOKENS,))

    def hidden_of(pull, rows, called):
        lever = jnp.full((TOKENS, 1), LEVER)
        return jnp.concatenate([lever, pull * rows[called]], axis=1).astype(jnp.bfloat16)

    @jax.jit
    def entropy_of(pull, rows, called, weight):
        some = hidden_of(pull, rows, called)[:SAMPLE]
        zeros = jnp.zeros(SAMPLE, jnp.int32)
        return linear_log_probs(some, weight, zeros, with_entropy=True, engine=HopperEngine()).entropy.mean()

    low, high = jnp.float32(0.0), jnp.float32(60.0)
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (middle, high) if entropy_of(middle, rows, called, weight) > ENTROPY else (low, middle)
    hidden = hidden_of(high, rows, called)

    @jax.jit
    def draw(index, hidden, weight):
        some = jax.lax.dynamic_slice_in_dim(hidden, index * SAMPLE, SAMPLE)
        logits = jnp.dot(some, weight.T, preferred_element_type=jnp.float32)
        return jax.random.categorical(jax.random.fold_in(keys[3], index), logits)

    blocks = [draw(index, hidden, weight) for index in range(TOKENS // SAMPLE)]
    targets = jnp.concatenate(blocks).astype(jnp.int32)
    return hidden, weight, targets, float(entropy_of(high, rows, called, weight))


def gradients(engine, hidden, weight, targets, g):
    def objective(hidden, weight):
        values = linear_log_probs(hidden, weight, targets, with_entropy=True, engine=engine)
        return jnp.sum(values.log_probs * g) + 0.01 * jnp.sum(values.entropy)

    return jax.grad(objective, (0, 1))(hidden, weight)


def compile_all(arguments):
    """Threshold or None -> (gradients, skipped blocks), compiled in parallel."""
    lowered = {}
    for threshold in (None, 0.0, *THRESHOLDS):
        engine = HopperEngine(gradient_filter=None if threshold is None else GradientFilter(threshold))

        def count(hidden, weight, targets, g, engine=engine):
            return skipped_tiles(hidden, weight, targets, engine=engine)

        lowered[threshold, "run"] = jax.jit(functools.partial(gradients, engine)).lower(*arguments)
        if threshold is not None:
            lowered[threshold, "count"] = jax.jit(count).lower(*arguments)
    with ThreadPoolExecutor() as pool:
        done = dict(zip(lowered, pool.map(lambda x: x.compile(), lowered.values()), strict=True))
    return {threshold: (done[threshold, "run"], done.get((threshold, "count"))) for threshold, _ in done}


def filtered(arguments):
    """Timed calls of every threshold, by label; prints how much they skip, and their errors."""
    calls, exact = {}, None
    for threshold, (run, count) in compile_all(arguments).items():
        label = "off" if threshold is None else f"{threshold:.1e}"
        result = jax.block_until_ready(run(*arguments))
        note = f"temp {run.memory_analysis().temp_size_in_bytes / 2**30:.3f} GiB"
        if threshold is None:
            exact = result
        else:
            errors = [relative(a, b) for a, b in zip(result, exact, strict=True)]
            note += f"  left out {float(count(*arguments).mean()):.1%}"
            note += f"  dH, dW differ by {errors[0]:.1e} {errors[1]:.1e}"
        calls[label] = Timed(functools.partial(run, *arguments), note)
        say(f"  {label}: {note}")
    return calls


def main() -> None:
    for case in cases(sys.argv[1:]):
        hidden, weight, targets, entropy = policy(case.hidden.shape[1], case.weight.shape[0])
        case = dataclasses.replace(case, hidden=hidden, weight=weight, targets=targets)
        say(f"{case.label}: mean entropy {entropy:.2f} nat")
        forward = jax.jit(lambda h, w, t: linear_log_probs(h, w, t, with_entropy=True, engine=HopperEngine()))
        calls = {"forward": Timed(functools.partial(forward, hidden, weight, targets))}
        calls |= filtered((hidden, weight, targets, case.g_log_probs))
        print_times(case, calls, turns=3)


if __name__ == "__main__":
    main()
