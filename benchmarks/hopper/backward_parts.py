"""Times the three products of the backward for one chunk, each beside cuBLAS on the same shapes, interleaved.

python benchmarks/hopper/backward_parts.py [H,V ...]
"""

import functools
import statistics
import sys
import time

import jax
import jax.numpy as jnp
from jax import lax

from jaxlogp.head.hopper.gradient_products import add_hidden_gradient, uninitialised, write_weight_gradient
from jaxlogp.head.hopper.logit_gradient import chunk_gradient
from jaxlogp.head.hopper.tiles import TileConfig
from jaxlogp.head.projection import HeadOptions
from jaxlogp.head.row_scalars import RowScalars

TOKENS, CHUNK, SMS = 8192, 25344, 132
SHAPES = [(4096, 151936), (2304, 256000), (1024, 151936)]
A, S = TileConfig(64, 256, 64, 5, 16, True), TileConfig()
X = TileConfig(256, 128, 64, 4, 8)
C = TileConfig(cluster=2)
CA = TileConfig(64, 256, 64, 5, 16, True, 2)
CX = TileConfig(256, 128, 64, 4, 8, False, 2)
SOME = {"alternate": A, "shared": S, "256x128": X, "cluster shared": C, "cluster alternate": CA, "cluster 256x128": CX}
CONFIGS = {"dz": {k: v for k, v in SOME.items() if "x128" not in k}, "dH": SOME, "dW": SOME}


def seconds(call, repeats):
    start = time.perf_counter()
    for _ in range(repeats):
        out = call()
    jax.block_until_ready(out)
    return (time.perf_counter() - start) / repeats


def main():
    print(jax.devices()[0].device_kind, "JAX", jax.__version__, flush=True)
    for hidden_size, vocab in [tuple(int(x) for x in a.split(",")) for a in sys.argv[1:]] or SHAPES:
        keys = jax.random.split(jax.random.key(0), 3)
        hidden = jax.random.normal(keys[0], (TOKENS, hidden_size), jnp.bfloat16)
        weight = (jax.random.normal(keys[1], (vocab, hidden_size)) * (2.0 / hidden_size**0.5)).astype(jnp.bfloat16)
        gradient = (jax.random.normal(keys[2], (TOKENS, CHUNK)) * 1e-3).astype(jnp.bfloat16)
        index, repeats = jnp.int32(3), 4
        ones = jnp.ones(TOKENS, jnp.float32)
        rows = RowScalars(5 * ones, 12 * ones, ones, ones, ones, jnp.arange(TOKENS, dtype=jnp.int32) * 16)
        options = HeadOptions(with_entropy=True)
        part = weight[3 * CHUNK : 4 * CHUNK]

        def cublas(left, right, contract, left_out=jnp.bfloat16):
            dims = (((contract[0],), (contract[1],)), ((), ()))
            return jax.jit(lambda a, b: lax.dot_general(a, b, dims, preferred_element_type=left_out)), left, right

        f, a, b = cublas(hidden, part, (1, 1))
        calls = {"dz cuBLAS": functools.partial(f, a, b)}
        f, a, b = cublas(gradient, part, (1, 0), jnp.float32)
        calls["dH cuBLAS"] = functools.partial(f, a, b)
        f, a, b = cublas(gradient, hidden, (0, 0))
        calls["dW cuBLAS"] = functools.partial(f, a, b)
        wide = hidden_size + -hidden_size % 256

        for name, config in CONFIGS["dz"].items():
            run = jax.jit(
                lambda h, w, r, c=config: chunk_gradient(h, w, None, r, jnp.int32(vocab), index, CHUNK, options, c, SMS)
            )
            calls[f"dz {name}"] = functools.partial(run, hidden, weight, rows)
        for name, config in CONFIGS["dH"].items():

            @jax.jit
            def run(g, w, config=config, wide=wide):
                ref = jax.new_ref(jnp.zeros((TOKENS, wide), jnp.float32))
                for step in range(repeats):
                    add_hidden_gradient(ref, g, w, jnp.int32(step), config, SMS)
                return jax.freeze(ref)

            calls[f"dH {name} /{repeats}"] = functools.partial(run, gradient, weight)
        for name, config in CONFIGS["dW"].items():

            @jax.jit
            def run(g, h, config=config, vocab=vocab, hidden_size=hidden_size):
                ref = jax.new_ref(uninitialised((vocab, hidden_size), jnp.bfloat16))
                for step in range(repeats):
                    write_weight_gradient(ref, g, h, jnp.int32(step), config, SMS)
                return jax.freeze(ref)

            calls[f"dW {name} /{repeats}"] = functools.partial(run, gradient, hidden)
        for name in list(calls):
            try:
                jax.block_until_ready(calls[name]())
            except Exception as error:
                print(name, "failed:", str(error)[:300], flush=True)
                del calls[name]
        times = {name: [] for name in calls}
        for _ in range(6):
            for name, call in calls.items():
                many = 2 if "/" in name else 8
                times[name].append(seconds(call, many) / (repeats if "/" in name else 1))
        for name, values in times.items():
            median, base = statistics.median(values), statistics.median(times["dz cuBLAS"])
            flops = 2 * TOKENS * hidden_size * CHUNK
            print(
                f"H {hidden_size} {name:22s} {median * 1e3:6.3f} ms {median / base:.3f} x"
                f" {flops / median / 1e12:.0f} TFLOP/s"
            )


if __name__ == "__main__":
    sys.exit(main())
