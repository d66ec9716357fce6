"""The triton engine's parts separately, and its two kernels with other tiles: `python -m benchmarks.triton.head --sweep`.

A part's time is its share of one call of the engine, over all windows of the backward: the forward kernel without the
fold after it, dz, dH += dz · W and dW = dzᵀ · H. Every time is given relative to the product's, measured interleaved
with it.
"""

import concurrent.futures
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.beside_product import Timed, print_times, say
from benchmarks.cases import Case
from jaxlogp.head.projection import dot
from jaxlogp.head.row_scalars import RowScalars
from jaxlogp.head.triton import launch
from jaxlogp.head.triton.operands import Launch, Operands
from jaxlogp.head.triton.tiles import HeadTiles, TileConfig, window_columns

# On compute capability 9.0 a program takes the shared memory of all of its stages, out of 227 KiB. The last three leave
# room for a second program, whose products run while the first one finishes its tile.
TILES = {
    "128x256 3 stages": TileConfig(stages=3),
    "128x256 4 stages group 8": TileConfig(stages=4, group=8),
    "128x256 depth 128 2 stages": TileConfig(depth=128, stages=2),
    "256x128 4 stages": TileConfig(rows=256, columns=128, stages=4),
    "64x256 4 warps 2 stages": TileConfig(rows=64, warps=4, stages=2),
    "128x128 4 warps 3 stages": TileConfig(columns=128, warps=4, stages=3),
    "128x128 8 warps 3 stages": TileConfig(columns=128, stages=3),
}
# Number of kernels compiled at a time.
THREADS = 4


def forward_kernel(case: Case, config: TileConfig):
    """Tile statistics of the whole vocabulary."""

    def run(hidden, weight, targets):
        bounds = jnp.asarray([0, weight.shape[0], hidden.shape[0]], jnp.int32)
        return launch.forward_statistics(Operands(hidden, weight, None), targets, bounds, True, Launch(config))

    return jax.jit(run), (case.hidden, case.weight, case.targets)


def dz_kernel(case: Case, config: TileConfig):
    """dz of every window, one after the other in the same buffer."""
    window, g = window_columns(case.hidden.shape[0], case.weight.shape[0]), case.g_log_probs
    # A largest logit and log2 Σ e^(z - max) typical of logits with standard deviation 2, so that dz has the usual size.
    scalars = RowScalars(jnp.full(g.shape, 9.0), jnp.full(g.shape, 7.0), -g, -case.g_entropy, g, case.targets)

    def run(hidden, weight, scalars):
        def step(index, _):
            start = jnp.minimum(index * window, weight.shape[0] - window)
            bounds = jnp.stack([start, jnp.int32(weight.shape[0]), jnp.int32(hidden.shape[0])]).astype(jnp.int32)
            operands = Operands(hidden, weight, None)
            return launch.window_gradient(operands, scalars, bounds, window, True, Launch(config))

        return windows(step, jnp.zeros((hidden.shape[0], window), weight.dtype), weight, window)

    return jax.jit(run), (case.hidden, case.weight, scalars)


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


def compiled(part: tuple) -> Callable | Exception:
    """A call that has run once, or what went wrong."""
    try:
        function, operands = part
        call = function.lower(*operands).compile()
        jax.block_until_ready(call(*operands))
    except Exception as error:
        return error
    return lambda: call(*operands)


def print_parts(case: Case, calls: Mapping[str, Callable | Exception]) -> dict[str, float]:
    """Times, relative to the product, of the calls that did not fail; the exceptions of the others are printed."""
    for name, call in calls.items():
        if isinstance(call, Exception):
            say(f"  {name} failed: {str(call)[:300]}")
    working = {name: Timed(call) for name, call in calls.items() if not isinstance(call, Exception)}
    return print_times(case, working, turns=2)


def sweep(case: Case, table: HeadTiles, with_backward: bool = True) -> HeadTiles:
    """Measures the parts and the variants; the fastest tiles of each kernel."""
    if with_backward:
        _print_products(case, table.gradient)
    forward = _fastest(case, "forward", forward_kernel, table.forward)
    gradient = _fastest(case, "dz", dz_kernel, table.gradient) if with_backward else table.gradient
    return HeadTiles(forward, gradient)


def _print_products(case: Case, config: TileConfig) -> None:
    """Times of the two products that read dz."""
    dz = compiled(dz_kernel(case, config))
    if isinstance(dz, Exception):
        say(f"  dz failed: {str(dz)[:300]}")
        return
    dz = dz()
    products = {"dH": d_hidden_product(dz, case.weight), "dW": d_weight_product(dz, case.hidden, case.weight)}
    # One at a time: XLA times candidate algorithms for a product while it compiles.
    print_parts(case, {f"{name}, windows of {dz.shape[1]}": compiled(part) for name, part in products.items()})


def _fastest(case: Case, kind: str, build: Callable, table: TileConfig) -> TileConfig:
    """The fastest tiles of one kernel."""
    variants = {f"{kind} table": table} | {f"{kind} {name}": tiles for name, tiles in TILES.items() if tiles != table}
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        calls = list(pool.map(lambda config: compiled(build(case, config)), variants.values()))
    say(f"  {kind}: {len(calls)} kernels compiled")
    ratios = print_parts(case, dict(zip(variants, calls, strict=True)))
    best = min((name for name in variants if name in ratios), key=ratios.get, default=f"{kind} table")
    say(f"  {kind}: fastest {variants[best]}")
    return variants[best]
