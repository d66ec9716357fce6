"""Engines of ``linear_log_probs``, forward and forward + backward, against one product: errors, memory, reproducibility."""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.beside_product import Timed, compiled_or_said, print_times, say
from benchmarks.cases import Case, Exact, Outputs, errors, exact
from jaxlogp import TokenLogProbs, linear_log_probs
from jaxlogp.head import Engine


def operands(case: Case) -> tuple[jax.Array, ...]:
    """Arguments of the functions of :func:`programs`."""
    return case.hidden, case.weight, case.targets, case.g_log_probs, case.g_entropy


def programs(engine: Engine, with_backward: bool = True) -> dict[str, Callable]:
    """Functions of :func:`operands`: values, and values with the gradients of hidden states and weight."""

    def forward(hidden, weight, targets, g_log_probs, g_entropy):
        return linear_log_probs(hidden, weight, targets, with_entropy=True, engine=engine)

    def both(hidden, weight, targets, g_log_probs, g_entropy):
        out, pull = jax.vjp(lambda h, w: forward(h, w, targets, None, None), hidden, weight)
        return out, pull(TokenLogProbs(g_log_probs, g_entropy))

    return {"forward": forward} | ({"fwd+bwd": both} if with_backward else {})


def measure(case: Case, engines: Mapping[str, Engine], with_backward: bool = True, turns: int = 4) -> None:
    """Prints the errors of every engine against float64, then its times; failures are printed and dropped."""
    wanted = exact_or_said(case)
    calls: dict[str, Timed] = {}
    for name, engine in engines.items():
        functions = {f"{name} {part}": f for part, f in programs(engine, with_backward).items()}
        for label, timed in compiled_or_said(functions, *operands(case)).items():
            try:
                say(f"  {label}: {_checked(case, timed, wanted)}")
            except Exception as error:  # One engine that runs out of memory must not end the run.
                say(f"  {label} failed: {str(error)[:600]}")
            else:
                calls[label] = timed
    print_times(case, calls, turns)


def exact_or_said(case: Case) -> Exact | None:
    """The answer in float64, or None where the device has too little memory for it."""
    try:
        return exact(case)
    except Exception as error:
        say(f"no float64 values: {str(error)[:300]}")
        return None


def _checked(case: Case, timed: Timed, wanted: Exact | None) -> str:
    """Errors of log-probs, entropy, dH and dW, and whether a second run gives the same bits."""
    first, second = (jax.block_until_ready(timed.call()) for _ in range(2))
    pairs = zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    same = f"run to run bitwise {all(bool((a == b).all()) for a, b in pairs)}"
    if wanted is None:
        return same
    values, gradients = (first, None) if isinstance(first, TokenLogProbs) else first
    rows = (None, None) if gradients is None else _some(gradients, case)
    found = errors(Outputs(np.asarray(values.log_probs), np.asarray(values.entropy), *rows, True), wanted)
    listed = (found.log_prob, found.entropy, found.d_hidden, found.d_weight)
    return f"errors {' '.join(f'{error:.1e}' for error in listed if error is not None)}, {same}"


def _some(gradients: tuple[jax.Array, jax.Array], case: Case) -> tuple[np.ndarray, np.ndarray]:
    """The rows of both gradients that are compared with float64."""
    d_hidden, d_weight = gradients
    return tuple(np.asarray(x.astype(jnp.float32)) for x in (d_hidden[case.rows], d_weight[case.columns]))
