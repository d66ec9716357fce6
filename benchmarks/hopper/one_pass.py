"""The policy loss with its gradients in the forward pass, and tokens without a label, against two steps and one product.

    python -m benchmarks.hopper.one_pass [H,V ...]

Times are medians of interleaved turns, each at settled clocks. "half" has a label on every other token. "bonus" is an
entropy bonus, "known lse" a strictly on-policy step. Errors are relative, of one pass against two steps.
"""

import functools
import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp

from benchmarks.beside_product import Timed, cases, compile_or_say, memory_note, print_times, say
from benchmarks.cases import ENTROPY_BONUS, Case
from jaxlogp import linear_log_probs, linear_policy_loss, policy_loss
from jaxlogp.head import HopperEngine
from jaxlogp.losses import grpo

ENGINE = HopperEngine()
# Standard deviation of the difference between the policy's log-probs and the sampler's.
NOISE = 0.1


def relative(a: jax.Array, b: jax.Array) -> float:
    """Norm of the difference divided by that of b."""
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b))


def operands(case: Case, mask: jax.Array) -> tuple[jax.Array, ...]:
    """hidden, weight, targets, the sampler's log-probs, advantages, mask and log Σ e^z."""
    values = linear_log_probs(case.hidden, case.weight, case.targets, with_lse=True, engine=ENGINE)
    noise = NOISE * jax.random.normal(jax.random.key(1), values.log_probs.shape)
    return case.hidden, case.weight, case.targets, values.log_probs + noise, case.g_log_probs, mask, values.lse


def forward(hidden, weight, targets, old, advantages, mask, lse):
    """Values alone."""
    return linear_log_probs(hidden, weight, targets, mask=mask, with_entropy=True, engine=ENGINE)


def two_steps(hidden, weight, targets, old, advantages, mask, lse, loss):
    """The loss of differentiable log-probs."""
    values = linear_log_probs(hidden, weight, targets, mask=mask, with_entropy=True, engine=ENGINE)
    return policy_loss(values.log_probs, old, advantages, mask, loss=loss, entropy=values.entropy).sum, values


def one_pass(hidden, weight, targets, old, advantages, mask, lse, loss):
    """The loss that computes its own gradient."""
    per_token = targets, old, advantages, mask
    part, values = linear_policy_loss(hidden, weight, *per_token, loss=loss, with_entropy=True, engine=ENGINE)
    return part.sum, values


def known_lse(hidden, weight, targets, old, advantages, mask, lse, loss):
    """The same where the sampler's log Σ e^z is the policy's."""
    part, values = linear_policy_loss(hidden, weight, targets, old, advantages, mask, loss=loss, lse=lse, engine=ENGINE)
    return part.sum, values


def differentiated(program: Callable, bonus: float = 0.0) -> Callable:
    """((loss sum, values), (dH, dW)) of a program."""
    loss = grpo(entropy_coefficient=bonus)

    def both(hidden, weight, *per_token):
        total = functools.partial(program, loss=loss)
        return jax.value_and_grad(lambda h, w: total(h, w, *per_token), (0, 1), has_aux=True)(hidden, weight)

    return both


PROGRAMS = {
    "forward": forward,
    "two steps": differentiated(two_steps),
    "one pass": differentiated(one_pass),
    "one pass, bonus": differentiated(one_pass, ENTROPY_BONUS),
    "known lse": differentiated(known_lse),
}


def say_errors(calls: dict[str, dict[str, Timed]]) -> None:
    """One pass against two steps, and half of the labels against all labels."""
    for label, found in calls.items():
        if {"one pass", "two steps"} <= found.keys():
            ((_, values), got), ((_, expected), wanted) = (found[x].call() for x in ("one pass", "two steps"))
            errors = " ".join(f"{relative(a, b):.1e}" for a, b in zip(got, wanted, strict=True))
            same = bool((values.log_probs == expected.log_probs).all())
            say(f"  {label}: dH, dW differ by {errors}, log-probs bitwise {same}")
    if all("two steps" in found for found in calls.values()):
        ((_, some), (d_some, _)), ((_, whole), (d_whole, _)) = (calls[x]["two steps"].call() for x in ("half", "all"))
        half = jnp.arange(d_some.shape[0]) % 2 == 0
        same = bool((some.log_probs[half] == whole.log_probs[half]).all())
        same_rows = bool((d_some[half] == d_whole[half]).all())
        say(f"  labels of half equal those of all: log-probs {same}, rows of dH {same_rows}")


def main() -> None:
    for case in cases(sys.argv[1:]):
        every = jnp.ones(case.targets.shape, bool)
        first = operands(case, every)
        masks = {"all": every, "half": jnp.arange(every.shape[0]) % 2 == 0}
        programs = compile_or_say({name: (program, first) for name, program in PROGRAMS.items()})
        calls: dict[str, dict[str, Timed]] = {}
        for label, mask in masks.items():
            arguments = *first[:5], mask, first[6]
            calls[label] = {
                name: Timed(functools.partial(one, *arguments), memory_note(one)) for name, one in programs.items()
            }
        say_errors(calls)
        print_times(case, {f"{name}, {label}": one for label, found in calls.items() for name, one in found.items()}, 3)


if __name__ == "__main__":
    main()
