"""The hopper engine, forward and forward + backward, beside one cuBLAS product in the same run, with errors and memory.

    python benchmarks/hopper/head.py [H,V ...]

Times are medians of interleaved turns, each at settled clocks; logits have standard deviation 2. Errors are against
float64 on the same bf16 inputs: values and hidden gradients for every 128th token, weight gradients for 64 rows of the
vocabulary.
"""

import functools
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from jaxlogp.head.hopper import HopperEngine
from jaxlogp.head.projection import HeadOptions
from jaxlogp.targets import LocalTargets

TOKENS = 8192
SHAPES = [(4096, 151936), (4096, 128256), (2304, 256000), (1024, 151936)]
SPREAD = 2.0
VARIANTS: dict[str, HopperEngine] = {"table": HopperEngine()}


def seconds(call, at_least=0.12):
    """Seconds a call once the card's clocks have settled on it: as long untimed before as timed."""
    start = time.perf_counter()
    jax.block_until_ready(call())
    repeats = max(2, round(at_least / (time.perf_counter() - start)))
    for _ in range(2):
        start = time.perf_counter()
        for _ in range(repeats):
            out = call()
        jax.block_until_ready(out)
    return (time.perf_counter() - start) / repeats


def inputs(hidden_size, vocab):
    keys = jax.random.split(jax.random.key(0), 5)
    hidden = jax.random.normal(keys[0], (TOKENS, hidden_size), jnp.bfloat16)
    weight = jax.random.normal(keys[1], (vocab, hidden_size), jnp.float32) * (SPREAD / hidden_size**0.5)
    targets = jax.random.randint(keys[2], (TOKENS,), 0, vocab, jnp.int32)
    g = jax.random.normal(keys[3], (TOKENS,), jnp.float32), 0.1 * jax.random.normal(keys[4], (TOKENS,), jnp.float32)
    return hidden, weight.astype(jnp.bfloat16), targets, *g


def oracle(hidden, weight, targets, g_lp, g_entropy, rows, columns):
    """(log-probs, entropy, hidden gradient) of some rows and the weight gradient of some columns, in float64."""
    with jax.enable_x64(True):
        wide = weight.astype(jnp.float64)

        @jax.jit
        def some(h, t, wide, g, g_h):
            z = h.astype(jnp.float64) @ wide.T
            lse = jax.nn.logsumexp(z, axis=1)
            p = jnp.exp(z - lse[:, None])
            mean = (p * z).sum(1)
            dz = p * (-g[:, None] + g_h[:, None] * (mean[:, None] - z))
            dz = dz.at[jnp.arange(z.shape[0]), t].add(g)
            lp = jnp.take_along_axis(z, t[:, None], 1)[:, 0] - lse
            return lp, lse - mean, dz, lse, mean

        g64, h64 = g_lp.astype(jnp.float64), g_entropy.astype(jnp.float64)
        lp, entropy, dz, _, _ = some(hidden[rows], targets[rows], wide, g64[rows], h64[rows])
        d_hidden = dz @ wide
        d_weight = 0.0
        for block in range(0, TOKENS, 1024):
            part = slice(block, block + 1024)
            dz = some(hidden[part], targets[part], wide, g64[part], h64[part])[2][:, columns]
            d_weight = d_weight + dz.T @ hidden[part].astype(jnp.float64)
        return tuple(np.asarray(x) for x in (lp, entropy, d_hidden, d_weight))


def relative(a, b):
    return float(np.linalg.norm(np.asarray(a, np.float64) - b) / np.linalg.norm(b))


def main():
    print(jax.devices()[0].device_kind, "JAX", jax.__version__, flush=True)
    shapes = [tuple(int(x) for x in a.split(",")) for a in sys.argv[1:] if "," in a] or SHAPES
    for hidden_size, vocab in shapes:
        hidden, weight, targets, g_lp, g_entropy = inputs(hidden_size, vocab)
        options = HeadOptions(with_entropy=True, vocab_size=vocab, all_live=True)
        local = LocalTargets(targets, jnp.ones(TOKENS, bool), None, jnp.int32(vocab))
        rows, columns = np.arange(0, TOKENS, 128), np.r_[0:32, vocab - 32 : vocab]
        wanted = oracle(hidden, weight, targets, g_lp, g_entropy, rows, columns)
        gemm = jax.jit(lambda h, w: jax.lax.dot_general(h, w, (((1,), (1,)), ((), ()))))
        calls = {"cuBLAS product": functools.partial(gemm, hidden, weight)}
        jax.block_until_ready(gemm(hidden, weight))
        memory = {"cuBLAS product": 0.0}
        for name, engine in VARIANTS.items():

            def forward(h, w, t, engine=engine, options=options, local=local):
                return engine.log_probs(h, w, None, local._replace(column=t), options)

            def both(h, w, t, g, g_h, forward=forward):
                out, pull = jax.vjp(lambda h, w: forward(h, w, t), h, w)
                return out, pull(type(out)(g, g_h))

            try:
                compiled = jax.jit(forward).lower(hidden, weight, targets).compile()
                compiled_both = jax.jit(both).lower(hidden, weight, targets, g_lp, g_entropy).compile()
                result = compiled(hidden, weight, targets)
                _, (d_hidden, d_weight) = compiled_both(hidden, weight, targets, g_lp, g_entropy)
                _, (again_h, again_w) = compiled_both(hidden, weight, targets, g_lp, g_entropy)
            except Exception as error:  # A variant that does not compile must not end the run.
                print(f"  {name} failed: {str(error)[:600]}", flush=True)
                continue
            same = bool((d_hidden == again_h).all()) and bool((d_weight == again_w).all())
            errors = abs(result.log_probs[rows] - wanted[0]).max(), abs(result.entropy[rows] - wanted[1]).max()
            errors += relative(d_hidden[rows], wanted[2]), relative(d_weight[columns], wanted[3])
            print(
                f"  {name}: errors {' '.join(f'{float(e):.1e}' for e in errors)}, run to run bitwise {same}", flush=True
            )
            del d_hidden, d_weight, again_h, again_w, result
            calls[f"{name} forward"] = functools.partial(compiled, hidden, weight, targets)
            calls[f"{name} fwd+bwd"] = functools.partial(compiled_both, hidden, weight, targets, g_lp, g_entropy)
            memory[f"{name} forward"] = compiled.memory_analysis().temp_size_in_bytes / 2**30
            memory[f"{name} fwd+bwd"] = compiled_both.memory_analysis().temp_size_in_bytes / 2**30
        times = {name: [] for name in calls}
        for _ in range(4):
            for name, call in calls.items():
                times[name].append(seconds(call))
        base = statistics.median(times["cuBLAS product"])
        for name, values in times.items():
            median = statistics.median(values)
            print(
                f"H {hidden_size} V {vocab} {name:28s} {median * 1e3:7.2f} ms  {median / base:.3f} x"
                f"  min {min(values) / base:.3f}  temp {memory[name]:.3f} GiB",
                flush=True,
            )


if __name__ == "__main__":
    sys.exit(main())
