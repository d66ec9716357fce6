"""The parts of one pass, one chunk of tokens, each at settled clocks, as ratios to one cuBLAS product.

python -m benchmarks.hopper.one_pass_parts [H,V ...]
"""

import functools
import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp

from benchmarks.beside_product import Timed, cases, print_times
from benchmarks.cases import Case
from jaxlogp import HopperEngine
from jaxlogp.head.hopper.exponentials import exp_to_gradient
from jaxlogp.head.hopper.forward import forward_statistics
from jaxlogp.head.hopper.gradient_products import (
    add_hidden_gradient,
    finish_hidden_gradient,
    hidden_gradient_sums,
    uninitialised,
    write_weight_gradient,
)
from jaxlogp.head.hopper.one_pass import windows
from jaxlogp.head.hopper.operands import Launch, Operands
from jaxlogp.head.hopper.tiles import HeadTiles, head_tiles
from jaxlogp.head.row_scalars import RowScalars
from jaxlogp.stats import Normaliser

SMS = 132


def statistics(case: Case, tiles: HeadTiles, with_exp: bool) -> Callable:
    """Tile statistics of a case, with or without the exponentials."""
    config = tiles.exponentials if with_exp else tiles.forward
    width = jnp.int32(case.weight.shape[0])

    @jax.jit
    def run(hidden, weight, targets):
        operands = Operands(hidden, weight, None, width)
        return forward_statistics(operands, targets, Launch(config, SMS), with_entropy=True, with_exp=with_exp)

    return functools.partial(run, case.hidden, case.weight, case.targets)


def to_dz(case: Case, exp: jax.Array, maxima: jax.Array) -> Callable:
    """Exponentials turned into dz in place, repeatedly."""
    tokens = case.targets.shape[0]
    normaliser = Normaliser(jnp.full(tokens, 9.0), jnp.full(tokens, 4.0), jnp.full(tokens, -6.0))
    scalars = RowScalars(
        normaliser.max, normaliser.log_sum_exp, case.g_log_probs, case.g_entropy, case.g_log_probs, case.targets
    )

    @functools.partial(jax.jit, donate_argnums=0)
    def turn(exp, maxima):
        ref = jax.new_ref(exp)
        exp_to_gradient(ref, maxima, normaliser, scalars, scalars.constant, jnp.int32(tokens))
        return jax.freeze(ref)

    state = [exp]

    def again():
        state[0] = turn(state[0], maxima)
        return state[0]

    return again


def d_hidden(dz: jax.Array, case: Case, tiles: HeadTiles) -> Callable:
    """dz · W by windows of the vocabulary."""
    (tokens, width), (vocab, hidden_size) = dz.shape, case.weight.shape
    columns, parts = windows(vocab, width, tiles, HopperEngine())

    @jax.jit
    def run(dz, weight):
        operands = Operands(case.hidden, weight, None, jnp.int32(vocab))
        ref = hidden_gradient_sums(tokens, hidden_size, tiles.d_hidden, parts, zeros=False)
        for start in range(0, width, columns):
            how = {"window": min(columns, width - start), "parts": parts, "first": start == 0}
            add_hidden_gradient(ref, dz, operands, jnp.int32(start), Launch(tiles.d_hidden, SMS), **how)
        return finish_hidden_gradient(ref, hidden_size, parts)

    return functools.partial(run, dz, case.weight)


def d_weight(dz: jax.Array, case: Case, tiles: HeadTiles) -> Callable:
    """dzᵀ · H."""

    @jax.jit
    def run(dz, hidden):
        ref = jax.new_ref(uninitialised(case.weight.shape, jnp.bfloat16))
        operands = Operands(hidden, case.weight, None, jnp.int32(case.weight.shape[0]))
        write_weight_gradient(ref, dz, operands, jnp.int32(0), Launch(tiles.one_pass_d_weight, SMS))
        return jax.freeze(ref)

    return functools.partial(run, dz, case.hidden)


def main() -> None:
    for case in cases(sys.argv[1:]):
        tiles = head_tiles(case.hidden.shape[1])
        exponentials = statistics(case, tiles, with_exp=True)
        (partials, exp), (_, like_dz) = exponentials(), exponentials()
        calls = {
            "statistics alone": statistics(case, tiles, with_exp=False),
            "exponentials": exponentials,
            "to dz": to_dz(case, exp, partials[:, 0]),
            "dH": d_hidden(like_dz, case, tiles),
            "dW": d_weight(like_dz, case, tiles),
        }
        print_times(case, {name: Timed(call) for name, call in calls.items()}, turns=1)


if __name__ == "__main__":
    main()
