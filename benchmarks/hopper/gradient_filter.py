"""The gradient filter of the hopper engine on peaked policies, beside the unfiltered backward and one cuBLAS product.

    python benchmarks/hopper/gradient_filter.py [H,V ...]

Policies are those of experiments/gradient_filter.py (Zipf frequencies, hidden states that point at a token drawn from them),
made on the GPU. Times are medians of interleaved turns, each at settled clocks (see head.py). Errors are relative, in norm,
against the unfiltered gradient. "shuffled" is a vocabulary in no order, "ordered" one by mean logit, renumbered beforehand.
"""

import functools
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
from head import SHAPES, TOKENS, seconds

from jaxlogp import GradientFilter, VocabOrder, linear_log_probs, skipped_tiles, vocab_order_by_mean_logit
from jaxlogp.head.hopper import HopperEngine

THRESHOLDS = (2.0**-8, 2.0**-12, 2.0**-16)
ENTROPY = 0.5
LEVER = 8.0
# Tokens that stand for all in the search for a mean entropy.
SAMPLE = 1024


def relative(a, b):
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b))


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
    """Threshold or None -> (gradients, skipped blocks), compiled side by side."""
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


def main():
    print(jax.devices()[0].device_kind, "JAX", jax.__version__, flush=True)
    shapes = [tuple(int(x) for x in a.split(",")) for a in sys.argv[1:] if "," in a] or SHAPES
    for hidden_size, vocab in shapes:
        hidden, weight, targets, entropy = policy(hidden_size, vocab)
        g = jax.random.normal(jax.random.key(1), (TOKENS,))
        order = VocabOrder(vocab_order_by_mean_logit(hidden, weight))
        operands = {
            "shuffled": (hidden, weight, targets, g),
            "ordered": (hidden, order.rows(weight), order.places(targets), g),
        }
        print(f"H {hidden_size} V {vocab} mean entropy {entropy:.2f} nat", flush=True)
        gemm = jax.jit(lambda h, w: jax.lax.dot_general(h, w, (((1,), (1,)), ((), ()))))
        calls = {"cuBLAS product": functools.partial(gemm, hidden, weight)}
        notes = {"cuBLAS product": ""}
        forward = jax.jit(lambda h, w, t: linear_log_probs(h, w, t, with_entropy=True, engine=HopperEngine()))
        calls["forward"], notes["forward"] = functools.partial(forward, hidden, weight, targets), ""
        for name, arguments in operands.items():
            compiled, exact = compile_all(arguments), None
            for threshold, (run, count) in compiled.items():
                label = f"{name}, {'off' if threshold is None else f'{threshold:.1e}'}"
                result = jax.block_until_ready(run(*arguments))
                memory = run.memory_analysis().temp_size_in_bytes / 2**30
                calls[label], notes[label] = functools.partial(run, *arguments), f"temp {memory:.3f} GiB"
                if threshold is None:
                    exact = result
                else:
                    errors = [relative(a, b) for a, b in zip(result, exact, strict=True)]
                    notes[label] += f"  left out {float(count(*arguments).mean()):.1%}"
                    notes[label] += f"  dH, dW differ by {errors[0]:.1e} {errors[1]:.1e}"
                print(f"  {label}: {notes[label]}", flush=True)
            del exact, result
        times = {name: [] for name in calls}
        for _ in range(3):
            for name, call in calls.items():
                times[name].append(seconds(call))
        base = statistics.median(times["cuBLAS product"])
        for name, values in times.items():
            median = statistics.median(values)
            print(f"  {name:20s} {median * 1e3:7.2f} ms  {median / base:.3f} x  {notes[name]}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
