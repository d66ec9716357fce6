"""An engine on a weight [V, H] and on [H, V], beside one product: times, memory, and whether the bits are the same.

    python -m benchmarks.layouts hopper|triton [H,V ...]

Times are medians of interleaved turns, each at settled clocks; entropy included. One pass is that of a step whose policy is
still the sampler's.
"""

import argparse
from collections.abc import Callable

import jax
import jax.numpy as jnp

from benchmarks.beside_product import Timed, cases, compiled_or_said, print_times, say
from benchmarks.cases import Case
from benchmarks.engines import operands
from jaxlogp import Engine, HopperEngine, TokenLogProbs, TritonEngine, linear_log_probs, linear_policy_loss

ENGINES = {"hopper": HopperEngine, "triton": TritonEngine}
LAYOUTS = ("vh", "hv")


def programs(engine: Engine, layout: str) -> dict[str, Callable]:
    """Functions of hidden, weight, targets, g_log_probs, g_entropy and old log-probs."""
    options = {"engine": engine, "weight_layout": layout, "with_entropy": True}

    def forward(hidden, weight, targets, *_):
        return linear_log_probs(hidden, weight, targets, **options)

    def both(hidden, weight, targets, g_log_probs, g_entropy, _):
        out, pull = jax.vjp(lambda h, w: linear_log_probs(h, w, targets, **options), hidden, weight)
        return out, pull(TokenLogProbs(g_log_probs, g_entropy))

    def one_pass(hidden, weight, targets, advantages, _, old):
        def loss(hidden, weight):
            mask = jnp.ones(targets.shape, bool)
            return linear_policy_loss(hidden, weight, targets, old, advantages, mask, **options)[0].sum

        return jax.value_and_grad(loss, (0, 1))(hidden, weight)

    return {"forward": forward, "fwd+bwd": both, "one pass": one_pass}


def measure(case: Case, engine: Engine, turns: int = 4) -> None:
    """Says which bits differ between the layouts, then the times of both."""
    _, weight, *rest = operands(case)
    old = linear_log_probs(case.hidden, weight, case.targets, engine=engine).log_probs
    weights = dict(zip(LAYOUTS, (weight, jax.block_until_ready(weight.T)), strict=True))
    calls: dict[str, Timed] = {}
    for layout in LAYOUTS:
        functions = {f"{name} {layout}": function for name, function in programs(engine, layout).items()}
        calls |= compiled_or_said(functions, case.hidden, weights[layout], *rest, old)
    for name in programs(engine, "vh"):
        if all(f"{name} {layout}" in calls for layout in LAYOUTS):
            say(f"  {name}: bits of both layouts the same: {_same(*(calls[f'{name} {x}'].call() for x in LAYOUTS))}")
    print_times(case, calls, turns)


def _same(left: object, right: object) -> bool:
    """Whether all arrays of both are the same; one of another shape is compared with the transposed one."""
    pairs = zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    return all(bool((a == (b if a.shape == b.shape else b.T)).all()) for a, b in pairs)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument(
        "shapes", nargs="*", metavar="H,V", help="sizes of the head; those of all models where left out"
    )
    given = parser.parse_args()
    engine = ENGINES[given.engine]()
    for case in cases(given.shapes):
        measure(case, engine)


if __name__ == "__main__":
    main()
