"""Divergence of two heads over the whole vocabulary: ``linear_kl`` beside stored logits and beside the head alone.

    python -m benchmarks.divergence_speed [H,V ...] [--tokens N]        # heads of real models, N = 8192, bf16, on a GPU

Both heads have the same shape. The programs give [N] divergences, and with backward the gradients of the first head's hidden
states and weight. Stored logits are what trainers elsewhere compute: fp32 logits of both heads, their log-softmax, and a
sum over the vocabulary. Ratios are to one product of the operands; medians of interleaved turns, at settled clocks.
Errors are against float64, of the tokens of ``benchmarks.cases``: of values absolute, in nats, of the gradient of their
hidden states relative, in norm.
"""

import functools
import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from benchmarks.beside_product import TOKENS, Timed, cases, compiled_or_said, print_times, say
from benchmarks.cases import Case
from jaxlogp import linear_kl, linear_log_probs
from jaxlogp.head.divergence import KINDS

Divergence = Callable[[Array, Array, Array, Array], Array]
# Standard deviation of the difference of the two heads' logits, of logits of size 2.
APART = 0.5


def log_softmax(hidden: Array, weight: Array) -> Array:
    return jax.nn.log_softmax(jnp.dot(hidden, weight.T, preferred_element_type=jnp.float32))


def stored(hidden: Array, weight: Array, ref_hidden: Array, ref_weight: Array) -> Array:
    """KL(policy ‖ reference) from the logits of both."""
    ours, theirs = log_softmax(hidden, weight), jax.lax.stop_gradient(log_softmax(ref_hidden, ref_weight))
    return jnp.sum(jnp.exp(ours) * (ours - theirs), axis=1)


def head_alone(hidden: Array, weight: Array, ref_hidden: Array, ref_weight: Array) -> Array:
    """Entropy and log-probs of one id: what a training step computes without a reference."""
    del ref_hidden, ref_weight
    values = linear_log_probs(hidden, weight, jnp.zeros(hidden.shape[0], jnp.int32), with_entropy=True)
    return values.log_probs + values.entropy


def programs() -> dict[str, Divergence]:
    ours = {f"linear_kl {kind}": functools.partial(linear_kl, kind=kind) for kind in KINDS}
    return {"linear_log_probs": head_alone, "stored logits": stored, **ours}


def operands(case: Case) -> tuple[Array, ...]:
    """Both heads, and an upstream gradient: the reference is the policy, and something of its own."""
    hidden_size = case.hidden.shape[1]
    change = jax.random.normal(jax.random.key(1), case.weight.shape, jnp.float32) * (APART / hidden_size**0.5)
    ref_weight = (case.weight.astype(jnp.float32) + change).astype(case.weight.dtype)
    return case.hidden, case.weight, case.hidden, ref_weight, case.g_log_probs


def parts(divergence: Divergence) -> dict[str, Callable]:
    """Functions of :func:`operands`: values, and values with gradients."""

    def both(hidden, weight, ref_hidden, ref_weight, g):
        values, pull = jax.vjp(lambda h, w: divergence(h, w, ref_hidden, ref_weight), hidden, weight)
        return values, *pull(g)

    return {"forward": lambda *given: divergence(*given[:4]), "fwd+bwd": both}


@functools.partial(jax.jit, static_argnames="kind")
def _exact(rows: Array, given: tuple[Array, ...], kind: str) -> tuple[Array, Array]:
    hidden, weight, ref_hidden, ref_weight, g = (x.astype(jnp.float64) for x in given)

    def total(hidden: Array) -> tuple[Array, Array]:
        ours, theirs = (jax.nn.log_softmax(x) for x in (hidden @ weight.T, ref_hidden[rows] @ ref_weight.T))
        middle = jnp.logaddexp(ours, theirs) - jnp.log(2.0)
        pairs = {"reverse": ((ours, theirs),), "forward": ((theirs, ours),)}
        terms = pairs.get(kind) or ((ours, middle), (theirs, middle))
        values = sum(jnp.sum(jnp.exp(a) * (a - b), axis=1) for a, b in terms) / len(terms)
        return jnp.sum(values * g[rows]), values

    gradient, values = jax.grad(total, has_aux=True)(hidden[rows])
    return values, gradient


def print_errors(case: Case, given: tuple[Array, ...], name: str, timed: Timed) -> None:
    kind = name.split()[1] if name.startswith("linear_kl") else "reverse"
    found, d_hidden, _ = (np.asarray(x, np.float64) for x in jax.block_until_ready(timed.call()))
    with jax.enable_x64(True):
        values, gradient = (np.asarray(x) for x in _exact(jnp.asarray(case.rows), given, kind))
    value_error = np.max(np.abs(found[case.rows] - values))
    error = np.linalg.norm(d_hidden[case.rows] - gradient) / np.linalg.norm(gradient)
    say(f"  {name}: mean {values.mean():.4f} nats, largest error {value_error:.1e}, gradient of hidden {error:.1e}")


def main(arguments: list[str]) -> None:
    tokens = int(arguments[arguments.index("--tokens") + 1]) if "--tokens" in arguments else TOKENS
    for case in cases(arguments, tokens):
        given = operands(case)
        timed = {}
        for name, divergence in programs().items():
            found = compiled_or_said({f"{name} {part}": f for part, f in parts(divergence).items()}, *given)
            if (both := f"{name} fwd+bwd") in found and name != "linear_log_probs":
                print_errors(case, given, name, found[both])
            timed |= found
        print_times(case, timed, turns=3)


if __name__ == "__main__":
    main(sys.argv[1:])
