"""Attention alone, forward and with its gradient, at Qwen3-0.6B's heads: milliseconds of each implementation.

python -m benchmarks.step_speed.attention_times [ROWSxTOKENSxDOCUMENT ...]
"""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.clock import time_in_turns
from experiments.models.attention import IMPLEMENTATIONS, AttentionCall, attend_packed, choose_attention, first_keys

HEADS, KV_HEADS, HEAD_DIM = 16, 8, 128
SHAPES = ("4x2048x700", "16x2048x700", "16x2048x2048", "4x8192x700", "4x8192x8192", "1x32768x700")
# Scores of a whole row: too large for long ones.
EINSUM_TOKENS = 4096


def programs(rows, length, document, name):
    """(forward, forward and gradient) of random operands, compiled."""
    rng = np.random.default_rng(0)
    shapes = [(rows, length, n, HEAD_DIM) for n in (HEADS, KV_HEADS, KV_HEADS)]
    operands = [jnp.asarray(rng.standard_normal(shape, np.float32), jnp.bfloat16) for shape in shapes]
    ids = jnp.broadcast_to(jnp.arange(length) // document, (rows, length)).astype(jnp.int32)
    run = choose_attention(name, AttentionCall(rows, length, HEADS, KV_HEADS, HEAD_DIM, "bfloat16"))

    def attended(q, k, v):
        return attend_packed(q, k, v, run.allow(first_keys(ids)), scale=HEAD_DIM**-0.5)

    def gradient(q, k, v):
        out, pull_back = jax.vjp(attended, q, k, v)
        return pull_back(out)

    return [functools.partial(jax.jit(f).lower(*operands).compile(), *operands) for f in (attended, gradient)]


def main() -> None:
    """Prints a line for each shape and implementation."""
    for text in sys.argv[1:] or SHAPES:
        rows, length, document = map(int, text.split("x"))
        calls = {}
        for name in IMPLEMENTATIONS:
            if name == "einsum" and length > EINSUM_TOKENS:
                continue
            try:
                for part, program in zip(
                    ("forward", "with gradient"), programs(rows, length, document, name), strict=True
                ):
                    calls[name, part] = (program, jax.block_until_ready)
            except Exception as error:
                print(f"{text} {name}: {str(error)[:1500]}", flush=True)
        medians, failed = time_in_turns(calls, turns=3, at_least=0.05)
        for key, error in failed.items():
            print(text, *key, f"failed: {str(error)[:300]}", flush=True)
        for name in IMPLEMENTATIONS:
            times = [
                medians[name, part].seconds * 1e3 for part in ("forward", "with gradient") if (name, part) in medians
            ]
            if times:
                print(f"{text:16s} {name:8s}", *(f"{time:8.3f} ms" for time in times), flush=True)


if __name__ == "__main__":
    main()
