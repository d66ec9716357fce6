"""The JAX programs of ``benchmarks.head_speed``: those that store the logits, our engines, the policy loss in one pass.

A program is compiled for one case, all of a case's programs at the same time in threads, and then run once, so that its
errors are known before it is timed.
"""

import functools
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.stages import Compiled, Lowered

from benchmarks.cases import ENTROPY_BONUS, Case, Exact, Outputs
from jaxlogp import linear_log_probs, linear_policy_loss
from jaxlogp.head.registry import ENGINES
from jaxlogp.losses import grpo

Program = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array | None]]
BOTH, NO_ENTROPY, GRADIENTS = "log-probs, entropy", "log-probs, no entropy", "gradients alone"


@dataclass(frozen=True)
class Prepared:
    """A program ready to be timed on one case.

    Attributes:
        forward: values only; None where the program has no such part.
        forward_backward: values and both gradients.
        wait: returns once its argument has been computed.
        forward_bytes: temporaries of the forward pass, without arguments and results.
        forward_backward_bytes: the same with the backward pass, without the gradients.
        outputs: its results, for its errors.
        gives: what it computes, for tables.
    """

    forward: Callable[[], Any] | None
    forward_backward: Callable[[], Any]
    wait: Callable[[Any], Any]
    forward_bytes: int | None
    forward_backward_bytes: int
    outputs: Outputs
    gives: str


@dataclass(frozen=True)
class JaxProgram:
    """A JAX program that has not been compiled.

    Attributes:
        forward: (hidden, weight, targets) -> (log-probs, entropy or None), or None where there is no forward pass.
        both: (*operands) of :func:`operands` -> ((log-probs or None, entropy or None), (d_hidden, d_weight)).
        gives: what it computes, for tables.
        through_entropy: whether an entropy that it computes contributes to the gradients.
    """

    forward: Program | None
    both: Callable[..., tuple[tuple[Any, Any], tuple[jax.Array, jax.Array]]]
    gives: str
    through_entropy: bool = True


def materialised(hidden: jax.Array, weight: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A trainer without a fused head: fp32 logits, log_softmax, gather, entropy."""
    dimensions = (((1,), (1,)), ((), ()))
    logits = jax.lax.dot_general(
        hidden, weight, dimensions, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )
    log_softmax = jax.nn.log_softmax(logits)
    log_probs = jnp.take_along_axis(log_softmax, targets[:, None], axis=1)[:, 0]
    return log_probs, -jnp.sum(jnp.exp(log_softmax) * log_softmax, axis=1)


def engine_program(name: str) -> Program:
    """:func:`jaxlogp.linear_log_probs` with one engine, as a program."""

    def program(hidden, weight, targets):
        result = linear_log_probs(hidden, weight, targets, with_entropy=True, engine=name)
        return result.log_probs, result.entropy

    return program


def differentiated(program: Program, gives: str = BOTH) -> JaxProgram:
    """A program whose gradients follow from the case's upstream gradients."""

    def both(hidden, weight, targets, g_log_probs, g_entropy, old_log_probs, lse):
        (log_probs, entropy), pull = jax.vjp(lambda h, w: program(h, w, targets), hidden, weight)
        upstream = g_log_probs.astype(log_probs.dtype), None if entropy is None else g_entropy
        return (log_probs, entropy), pull(upstream)

    return JaxProgram(program, both, gives)


def policy_loss_program(gives: str, bonus: float | None = None, known_lse: bool = False) -> JaxProgram:
    """:func:`jaxlogp.linear_policy_loss` of the loss whose upstream gradients are the case's.

    Every ratio is 1 up to rounding, and advantages are -g.

    Args:
        gives: what it computes, for tables.
        bonus: coefficient of an entropy bonus; None means no bonus, so that the entropy does not contribute to the
          gradients.
        known_lse: whether the sampler's log Σ e^z is given, so that only the gradients are computed.
    """
    loss = grpo(entropy_coefficient=bonus or 0.0)

    def both(hidden, weight, targets, g_log_probs, g_entropy, old_log_probs, lse):
        def total(hidden, weight):
            options = {"lse": lse} if known_lse else {"with_entropy": True}
            mask = jnp.ones(targets.shape, bool)
            operands = hidden, weight, targets, old_log_probs, -g_log_probs, mask
            part, values = linear_policy_loss(*operands, loss=loss, **options)
            return part.sum, (None, None) if known_lse else (values.log_probs, values.entropy)

        gradients, values = jax.grad(total, argnums=(0, 1), has_aux=True)(hidden, weight)
        return values, gradients

    return JaxProgram(None, both, gives, through_entropy=bonus is not None)


def our_programs() -> dict[str, JaxProgram]:
    """All our programs and the baseline, in the order of tables."""
    return {
        "materialised": differentiated(materialised),
        **{name: differentiated(engine_program(name)) for name in ENGINES},
        "one pass": policy_loss_program("log-probs, entropy without gradient"),
        "one pass, bonus": policy_loss_program(BOTH, bonus=ENTROPY_BONUS),
        "known lse": policy_loss_program(GRADIENTS, known_lse=True),
    }


def operands(case: Case, wanted: Exact) -> tuple[jax.Array, ...]:
    """Arguments of ``JaxProgram.both``; the sampler's log-probs and log-sum-exp are the exact ones, rounded to fp32."""
    sampler = (jnp.asarray(x, jnp.float32) for x in (wanted.log_probs, wanted.lse))
    return case.hidden, case.weight, case.targets, case.g_log_probs, case.g_entropy, *sampler


def compile_all(
    programs: Mapping[str, JaxProgram], arguments: tuple[jax.Array, ...], threads: int = 16
) -> dict[str, tuple[Compiled | None, Compiled] | Exception]:
    """(forward, both) of every program, or its exception; traced one by one, compiled in parallel threads."""
    found: dict[str, Any] = {}
    with ThreadPoolExecutor(min(threads, os.cpu_count() or 1)) as pool:
        for name, program in programs.items():
            try:
                forward = None if program.forward is None else jax.jit(program.forward).lower(*arguments[:3])
                both = jax.jit(program.both).lower(*arguments)
            except Exception as error:  # A program that refuses the operands is a row of the table.
                found[name] = error
            else:
                found[name] = pool.submit(_compiled, forward), pool.submit(_compiled, both)
        for name, futures in found.items():
            if isinstance(futures, Exception):
                continue
            results, seconds = zip(*(future.result() for future in futures), strict=True)
            failed = [result for result in results if isinstance(result, Exception)]
            found[name] = failed[-1] if failed else results
            print(f"  {name}: {'not ' if failed else ''}compiled ({max(seconds):.1f} s)", flush=True)
    return found


def _compiled(stage: Lowered | None) -> tuple[Compiled | Exception | None, float]:
    """A compiled stage or the compiler's exception, and the seconds it took."""
    started = time.monotonic()
    try:
        result = None if stage is None else stage.compile()
    except Exception as error:
        result = error
    return result, time.monotonic() - started


def prepare_jax(
    program: JaxProgram, pair: tuple[Compiled | None, Compiled], case: Case, arguments: tuple[jax.Array, ...]
) -> Prepared:
    """Runs a compiled program once and keeps what its errors are computed from.

    Raises:
        MemoryError: its temporaries and results are more than the device has.
    """
    forward, both = pair
    _require_room(both)
    (log_probs, entropy), (d_hidden, d_weight) = both(*arguments)
    outputs = Outputs(
        None if log_probs is None else np.asarray(log_probs),
        None if entropy is None else np.asarray(entropy),
        np.asarray(d_hidden[case.rows].astype(jnp.float32)),
        np.asarray(d_weight[case.columns].astype(jnp.float32)),
        entropy is not None and program.through_entropy,
    )
    return Prepared(
        None if forward is None else functools.partial(forward, *arguments[:3]),
        functools.partial(both, *arguments),
        jax.block_until_ready,
        None if forward is None else int(forward.memory_analysis().temp_size_in_bytes),
        int(both.memory_analysis().temp_size_in_bytes),
        outputs,
        program.gives,
    )


def _require_room(compiled: Compiled) -> None:
    # Checked first: a failed allocation on the device is slow, and leaves the memory pool fragmented.
    sizes, stats = compiled.memory_analysis(), jax.devices()[0].memory_stats()
    need = sizes.temp_size_in_bytes + sizes.output_size_in_bytes
    if stats and need > (room := stats["bytes_limit"] - stats["bytes_in_use"]):
        raise MemoryError(f"it needs {need / 2**30:.0f} GiB, {room / 2**30:.0f} GiB are free")
