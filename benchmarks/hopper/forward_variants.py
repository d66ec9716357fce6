"""Times variants of the forward kernel beside one cuBLAS product, interleaved, with the error against float64.

python benchmarks/hopper/forward_variants.py
"""

import functools
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from jaxlogp.head.hopper.forward import forward_statistics
from jaxlogp.head.hopper.tiles import TileConfig
from jaxlogp.head.projection import HeadOptions

TOKENS = 8192
SHAPES = [(4096, 151936), (2304, 256000), (1024, 151936)]
OPTIONS = HeadOptions(with_entropy=True)
VARIANTS = {
    "shared": TileConfig(),
    "alternate": TileConfig(64, 256, 64, 5, 16, True),
    "cluster shared": TileConfig(cluster=2),
    "cluster alternate": TileConfig(64, 256, 64, 5, 16, True, 2),
    "cluster alternate group 32": TileConfig(64, 256, 64, 5, 32, True, 2),
}


def seconds(call, repeats):
    start = time.perf_counter()
    for _ in range(repeats):
        out = call()
    jax.block_until_ready(out)
    return (time.perf_counter() - start) / repeats


def fold(stats):
    maximum = stats[:, 0].max(0)
    factor = jnp.exp(stats[:, 0] - maximum)
    total = (factor * stats[:, 1]).sum(0)
    mean = (factor * (stats[:, 2] + (stats[:, 0] - maximum) * stats[:, 1])).sum(0) / total
    return stats[:, 3].sum(0) - maximum - jnp.log(total), jnp.log(total) - mean


def main():
    print(jax.devices(), jax.__version__)
    for hidden_size, vocab in SHAPES:
        keys = jax.random.split(jax.random.key(0), 3)
        hidden = jax.random.normal(keys[0], (TOKENS, hidden_size), jnp.bfloat16)
        weight = (jax.random.normal(keys[1], (vocab, hidden_size), jnp.bfloat16) * (3.0 / hidden_size**0.5)).astype(
            jnp.bfloat16
        )
        column = jax.random.randint(keys[2], (TOKENS,), 0, vocab, jnp.int32)
        width = jnp.int32(vocab)
        gemm = jax.jit(lambda h, w: jax.lax.dot_general(h, w, (((1,), (1,)), ((), ()))))
        calls = {"cuBLAS": functools.partial(gemm, hidden, weight)}
        with jax.enable_x64(True):
            rows = np.arange(0, TOKENS, 128)
            logits = hidden[rows].astype(jnp.float64) @ weight.astype(jnp.float64).T
            lse = jax.nn.logsumexp(logits, axis=1)
            wanted = np.asarray(jnp.take_along_axis(logits, column[rows][:, None], 1)[:, 0] - lse)
            entropy = np.asarray(lse - (jax.nn.softmax(logits, axis=1) * logits).sum(1))
        for name, config in VARIANTS.items():

            @jax.jit
            def run(h, w, c, config=config):
                return fold(forward_statistics(h, w, None, c, width, OPTIONS, config, 132))

            try:
                got = jax.block_until_ready(run(hidden, weight, column))
            except Exception as error:
                print(name, "failed:", str(error)[:300], flush=True)
                continue
            again = run(hidden, weight, column)
            same = all(bool((a == b).all()) for a, b in zip(got, again, strict=True))
            print(
                f"  {name}: error {abs(np.asarray(got[0])[rows] - wanted).max():.2e}"
                f" {abs(np.asarray(got[1])[rows] - entropy).max():.2e} bitwise {same}",
                flush=True,
            )
            calls[name] = functools.partial(run, hidden, weight, column)
        times = {name: [] for name in calls}
        jax.block_until_ready(gemm(hidden, weight))
        for _ in range(8):
            for name, call in calls.items():
                times[name].append(seconds(call, 3))
        base = statistics.median(times["cuBLAS"])
        for name, values in times.items():
            median = statistics.median(values)
            flops = 2 * TOKENS * hidden_size * vocab
            print(
                f"H {hidden_size} V {vocab} {name:12s} {median * 1e3:7.2f} ms {median / base:.3f} x"
                f" {flops / median / 1e12:.0f} TFLOP/s",
                flush=True,
            )


if __name__ == "__main__":
    sys.exit(main())
