"""The parts of a loss-aware step, one chunk of tokens, each at settled clocks, as ratios to one cuBLAS product.

python benchmarks/hopper/loss_aware_parts.py [H,V ...]
"""

import sys

import jax
import jax.numpy as jnp
from head import SHAPES, TOKENS, inputs, seconds

from jaxlogp.head.hopper import HopperEngine
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
from jaxlogp.head.hopper.tiles import head_tiles
from jaxlogp.head.projection import HeadOptions
from jaxlogp.head.row_scalars import RowScalars
from jaxlogp.stats import Normaliser


def main():
    print(jax.devices()[0].device_kind, "JAX", jax.__version__, flush=True)
    for hidden_size, vocab in [tuple(int(x) for x in a.split(",")) for a in sys.argv[1:]] or SHAPES:
        hidden, weight, targets, g, g_entropy = inputs(hidden_size, vocab)
        tiles = head_tiles(hidden_size)
        options, zero, live = HeadOptions(with_entropy=True, vocab_size=vocab), jnp.int32(0), jnp.int32(TOKENS)
        normaliser = Normaliser(jnp.full(TOKENS, 9.0), jnp.full(TOKENS, 4.0), jnp.full(TOKENS, -6.0))
        scalars = RowScalars(normaliser.max, normaliser.log_sum_exp, g, g_entropy, g, targets)

        def exponentials(hidden, weight, targets, config, with_exp=True, vocab=vocab, options=options):
            width = jnp.int32(vocab)
            return forward_statistics(
                hidden, weight, None, targets, width, options, config, 132, None, None, with_exp=with_exp
            )

        def turn(exp, maxima, normaliser=normaliser, scalars=scalars, live=live):
            ref = jax.new_ref(exp)
            exp_to_gradient(ref, maxima, normaliser, scalars, scalars.constant, live)
            return jax.freeze(ref)

        def d_hidden(dz, weight, hidden_size=hidden_size, tiles=tiles):
            columns, parts = windows(weight.shape[0], dz.shape[1], tiles, HopperEngine())
            ref = hidden_gradient_sums(TOKENS, hidden_size, tiles.d_hidden, parts, zeros=False)
            for start in range(0, dz.shape[1], columns):
                how = {"window": min(columns, dz.shape[1] - start), "parts": parts, "first": start == 0}
                add_hidden_gradient(ref, dz, weight, jnp.int32(start), tiles.d_hidden, 132, **how)
            return finish_hidden_gradient(ref, hidden_size, parts)

        def d_weight(dz, hidden, shape=weight.shape, zero=zero, tiles=tiles):
            ref = jax.new_ref(uninitialised(shape, jnp.bfloat16))
            write_weight_gradient(ref, dz, hidden, zero, tiles.one_pass_d_weight, 132)
            return jax.freeze(ref)

        gemm = jax.jit(lambda h, w: jax.lax.dot_general(h, w, (((1,), (1,)), ((), ()))))
        base = seconds(lambda: gemm(hidden, weight))  # noqa: B023
        with_exp = jax.jit(lambda *x: exponentials(*x, tiles.exponentials))  # noqa: B023
        plain = jax.jit(lambda *x: exponentials(*x, tiles.forward, False))  # noqa: B023
        partials, exp = with_exp(hidden, weight, targets)
        maxima = partials[:, 0]
        in_place, product_h, product_w = jax.jit(turn, donate_argnums=0), jax.jit(d_hidden), jax.jit(d_weight)
        state = [exp]

        def again():
            state[0] = in_place(state[0], maxima)  # noqa: B023
            return state[0]

        like_dz = with_exp(hidden, weight, targets)[1]
        times = {
            "statistics alone": seconds(lambda: plain(hidden, weight, targets)),  # noqa: B023
            "exponentials": seconds(lambda: with_exp(hidden, weight, targets)),  # noqa: B023
            "to dz": seconds(again),
            "dH": seconds(lambda: product_h(like_dz, weight)),  # noqa: B023
            "dW": seconds(lambda: product_w(like_dz, hidden)),  # noqa: B023
        }
        print(f"H {hidden_size} V {vocab} product {base * 1e3:.2f} ms; ", end="")
        print(", ".join(f"{name} {value / base:.3f}" for name, value in times.items()), flush=True)


if __name__ == "__main__":
    sys.exit(main())
