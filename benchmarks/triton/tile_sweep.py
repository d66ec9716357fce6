"""The triton engine's parts one by one, and its two kernels with other tiles; run by `benchmarks/triton/head.py --sweep`.

A part is what one call of the engine spends on it, all windows of the backward together: the forward kernel without the fold
behind it, dz, dH += dz · W and dW = dzᵀ · H. Every time stands beside the product's, taken in turns with it.
"""

import concurrent.futures
import statistics

import jax
import jax.numpy as jnp
from jax import lax

from jaxlogp.head.projection import HeadOptions, dot
from jaxlogp.head.row_scalars import RowScalars
from jaxlogp.head.triton import launch
from jaxlogp.head.triton.tiles import HeadTiles, TileConfig, window_columns

# On compute capability 9.0 a program takes the shared memory of all of its stages, of 227 KiB. The last three leave room for
# a second program, whose products run while the first one finishes its tile.
TILES = {
    "128x256 3 stages": TileConfig(stages=3),
    "128x256 4 stages group 8": TileConfig(stages=4, group=8),
    "128x256 depth 128 2 stages": TileConfig(depth=128, stages=2),
    "256x128 4 stages": TileConfig(rows=256, columns=128, stages=4),
    "64x256 4 warps 2 stages": TileConfig(rows=64, warps=4, stages=2),
    "128x128 4 warps 3 stages": TileConfig(columns=128, warps=4, stages=3),
    "128x128 8 warps 3 stages": TileConfig(columns=128, stages=3),
}
# Kernels that are compiled at a time.
THREADS = 4


def forward_kernel(hidden, weight, targets, options, config):
    """Tile statistics of the whole vocabulary."""

    def run(hidden, weight, targets):
        bounds = jnp.asarray([0, weight.shape[0], hidden.shape[0]], jnp.int32)
        return launch.forward_statistics(hidden, weight, None, targets, bounds, options, config, None)

    return jax.jit(run), (hidden, weight, targets)


def dz_kernel(hidden, weight, targets, g, g_entropy, options, config, window):
    """dz of every window, one after the other in one place."""
    # A largest logit and log2 Σ e^(z - max) as logits of standard deviation 2 have them: dz is of the usual size.
    scalars = jnp.full(g.shape, 9.0), jnp.full(g.shape, 7.0), -g, -g_entropy, g, targets

    def run(hidden, weight, scalars):
        def step(index, _):
            start = jnp.minimum(index * window, weight.shape[0] - window)
            bounds = jnp.stack([start, jnp.int32(weight.shape[0]), jnp.int32(hidden.shape[0])]).astype(jnp.int32)
            here = RowScalars(*scalars)
            return launch.window_gradient(hidden, weight, None, here, bounds, window, options, config, None)

        return windows(step, jnp.zeros((hidden.shape[0], window), weight.dtype), weight, window)

    return jax.jit(run), (hidden, weight, scalars)


def d_hidden_product(dz, weight):
    """dH of every window, from one window's dz."""

    def run(dz, weight):
        def step(index, d_hidden):
            start = jnp.minimum(index * dz.shape[1], weight.shape[0] - dz.shape[1])
            return d_hidden + dot(dz, lax.dynamic_slice_in_dim(weight, start, dz.shape[1]), contract=(1, 0))

        return windows(step, jnp.zeros((dz.shape[0], weight.shape[1]), jnp.float32), weight, dz.shape[1])

    return jax.jit(run), (dz, weight)


def d_weight_product(dz, hidden, weight):
    """dW of every window, from one window's dz."""

    def run(dz, hidden):
        def step(index, d_weight):
            start = jnp.minimum(index * dz.shape[1], weight.shape[0] - dz.shape[1])
            rounded = lax.dot_general(dz, hidden, (((0,), (0,)), ((), ())), preferred_element_type=weight.dtype)
            return lax.dynamic_update_slice_in_dim(d_weight, rounded, start, axis=0)

        return windows(step, jnp.zeros(weight.shape, weight.dtype), weight, dz.shape[1])

    return jax.jit(run), (dz, hidden)


def windows(step, start, weight, window):
    return lax.fori_loop(0, -(-weight.shape[0] // window), step, start)


def compiled(part):
    """A call that has run once, or what went wrong."""
    try:
        function, operands = part
        call = function.lower(*operands).compile()
        jax.block_until_ready(call(*operands))
    except Exception as error:
        return error
    return lambda: call(*operands)


def timed(name, call, gemm, seconds, say):
    """Milliseconds beside the product, or None where the part failed."""
    if isinstance(call, Exception):
        say(f"  {name} failed: {str(call)[:300]}")
        return None
    bases, values = zip(*((seconds(gemm), seconds(call)) for _ in range(2)), strict=True)
    took, base = statistics.median(values), statistics.median(bases)
    say(f"  {name:40s} {took * 1e3:7.2f} ms  {took / base:.3f} x")
    return took / base


def sweep(hidden, weight, targets, g, g_entropy, table, gemm, seconds, say, only_forward=False):
    """Measures the parts and the variants; the fastest tiles of each kernel."""
    window = window_columns(hidden.shape[0], weight.shape[0])
    options = HeadOptions(with_entropy=True, vocab_size=weight.shape[0])
    kinds = {"forward": lambda config: forward_kernel(hidden, weight, targets, options, config)}
    if not only_forward:
        operands = hidden, weight, targets, g, g_entropy, options
        kinds["dz"] = lambda config: dz_kernel(*operands, config, window)
        dz = compiled(kinds["dz"](table.gradient))
        if isinstance(dz, Exception):
            say(f"  dz failed: {str(dz)[:300]}")
        else:
            dz = dz()
            # One at a time: XLA times its candidates for a product while it compiles.
            for name, part in (("dH", d_hidden_product(dz, weight)), ("dW", d_weight_product(dz, hidden, weight))):
                timed(f"{name}, windows of {window}", compiled(part), gemm, seconds, say)
        del dz
    best = {"forward": table.forward, "dz": table.gradient}
    for kind, build in kinds.items():
        variants = {"table": best[kind]} | {name: tiles for name, tiles in TILES.items() if tiles != best[kind]}
        with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
            calls = list(pool.map(lambda config: compiled(build(config)), variants.values()))  # noqa: B023
        say(f"  {kind}: {len(calls)} kernels compiled")
        least = None
        for (name, config), call in zip(variants.items(), calls, strict=True):
            took = timed(f"{kind} {name}", call, gemm, seconds, say)
            if took is not None and (least is None or took < least):
                least, best[kind] = took, config
        say(f"  {kind}: fastest {best[kind]}")
    return HeadTiles(best["forward"], best["dz"])
