"""Calls timed together with one cuBLAS product of the same operands; shared by the programs under ``benchmarks``."""

import functools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
from jax.stages import Compiled, Lowered

from benchmarks.cases import MODELS, Case, make_case
from benchmarks.clock import SETTLE_SECONDS, time_in_turns

TOKENS = 8192
PRODUCT = "one product"
# Number of programs compiled at a time.
THREADS = 8
BEGUN = time.perf_counter()


def say(line: str) -> None:
    """Prints a line with the seconds since the start, unbuffered, so that a run that is cut off has shown its results."""
    print(f"[{time.perf_counter() - BEGUN:5.1f} s] {line}", flush=True)


def cases(arguments: Sequence[str], tokens: int = TOKENS, dtype: str = "bfloat16") -> Iterator[Case]:
    """The shapes among the arguments of a command line, each as ``H,V``; the heads of all models if there are none."""
    device = jax.devices()[0]
    say(f"{device.device_kind}, JAX {jax.__version__}")
    named = [tuple(int(number) for number in word.split(",")) for word in arguments if "," in word and word[0] != "-"]
    for hidden_size, vocab_size in named or MODELS.values():
        yield make_case(f"N {tokens} H {hidden_size} V {vocab_size}", tokens, hidden_size, vocab_size, dtype)


def product(hidden: jax.Array, weight: jax.Array) -> jax.Array:
    """One product hidden · weightᵀ, in the dtype of its operands: the denominator of every ratio."""
    return jax.lax.dot_general(hidden, weight, (((1,), (1,)), ((), ())))


def compile_product(hidden: jax.Array, weight: jax.Array) -> tuple[Callable[[], jax.Array], str]:
    """The product of these operands, by cuBLAS where the device is a GPU, and the compiler's choice for it.

    Compiled by itself: the compiler picks its algorithm by timing, and nothing else may run meanwhile.
    """
    lowered = jax.jit(product).lower(hidden, weight)
    if jax.devices()[0].platform != "gpu":
        return functools.partial(lowered.compile(), hidden, weight), "XLA"
    try:
        compiled = lowered.compile({"xla_gpu_enable_triton_gemm": False})
    except Exception as error:  # The compiler option may disappear; the choice is printed in either case.
        print(f"  the product is not forced to be cuBLAS: {type(error).__name__}", flush=True)
        compiled = lowered.compile()
    chosen = "cuBLAS" if "__cublas" in compiled.as_text() else "XLA's own kernel"
    return functools.partial(compiled, hidden, weight), chosen


class Timed(NamedTuple):
    """A call to be timed.

    Attributes:
        call: runs it.
        note: added to its line.
        repeats: how often the call repeats the timed work.
    """

    call: Callable[[], Any]
    note: str = ""
    repeats: int = 1


def memory_note(program: Compiled) -> str:
    """Temporaries of a compiled program, without arguments and results."""
    return f"temp {program.memory_analysis().temp_size_in_bytes / 2**30:.3f} GiB"


def compile_or_say(programs: Mapping[str, tuple[Callable, tuple]]) -> dict[str, Compiled]:
    """Every (function, operands), lowered in turn and compiled in parallel; failures are printed and dropped."""

    def outcome(stage: Callable[[], Any]) -> Any:
        try:
            return stage()
        except Exception as error:  # One program must not end the run.
            return error

    lowered = {
        name: outcome(functools.partial(jax.jit(f).lower, *operands)) for name, (f, operands) in programs.items()
    }
    with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as pool:
        stages = (functools.partial(_compiled, one) for one in lowered.values())
        found = dict(zip(lowered, pool.map(outcome, stages), strict=True))
    for name in [name for name, one in found.items() if isinstance(one, Exception)]:
        say(f"  {name} failed: {str(found.pop(name))[:600]}")
    say(f"  {len(found)} of {len(programs)} programs compiled")
    return found


def _compiled(lowered: Lowered | Exception) -> Compiled:
    if isinstance(lowered, Exception):
        raise lowered
    return lowered.compile()


def compiled_or_said(functions: Mapping[str, Callable], *operands: Any) -> dict[str, Timed]:
    """Every function of the same operands by name, compiled; failures are printed and dropped."""
    programs = compile_or_say({name: (function, operands) for name, function in functions.items()})
    return {name: Timed(functools.partial(one, *operands), memory_note(one)) for name, one in programs.items()}


def print_times(
    case: Case, calls: Mapping[str, Timed], turns: int = 4, at_least: float = SETTLE_SECONDS
) -> dict[str, float]:
    """Times the calls and one product, interleaved, at settled clocks, and prints medians.

    Args:
        case: operands of the product.
        calls: by name.
        turns: number of turns; the median is reported.
        at_least: seconds of each untimed and each timed run.

    Returns:
        Times of the calls divided by that of the product.
    """
    base, chosen = compile_product(case.hidden, case.weight)
    timed = {PRODUCT: Timed(base, f"by {chosen}"), **calls}
    pairs = {name: (one.call, jax.block_until_ready) for name, one in timed.items()}
    medians, failed = time_in_turns(pairs, turns, at_least)
    for name, error in failed.items():
        say(f"  {name} failed: {str(error)[:300]}")
    ratios = {}
    for name, timing in medians.items():
        seconds = timing.seconds / timed[name].repeats
        ratios[name] = seconds / medians[PRODUCT].seconds
        say(f"{case.label} {name:28s} {seconds * 1e3:8.3f} ms  {ratios[name]:.3f} x  {timed[name].note}")
    return ratios
