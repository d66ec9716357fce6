"""Calls beside one cuBLAS product of the same operands: what the programs under ``benchmarks`` compile, time and print."""

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from benchmarks.cases import MODELS, Case, make_case
from benchmarks.clock import SETTLE_SECONDS, time_in_turns

TOKENS = 8192
PRODUCT = "one product"
BEGUN = time.perf_counter()


def say(line: str) -> None:
    """A line with the seconds since the start, at once: a run that is cut off has said what it knew."""
    print(f"[{time.perf_counter() - BEGUN:5.1f} s] {line}", flush=True)


def cases(arguments: Sequence[str], tokens: int = TOKENS, dtype: str = "bfloat16") -> Iterator[Case]:
    """The shapes among the words of a command line, each as ``H,V``; the heads of all models if there is none."""
    device = jax.devices()[0]
    say(f"{device.device_kind}, JAX {jax.__version__}")
    named = [tuple(int(number) for number in word.split(",")) for word in arguments if "," in word and word[0] != "-"]
    for hidden_size, vocab_size in named or MODELS.values():
        yield make_case(f"N {tokens} H {hidden_size} V {vocab_size}", tokens, hidden_size, vocab_size, dtype)


def product(hidden: jax.Array, weight: jax.Array) -> jax.Array:
    """One product hidden · weightᵀ, in the dtype of its operands: what every ratio refers to."""
    return jax.lax.dot_general(hidden, weight, (((1,), (1,)), ((), ())))


def compile_product(hidden: jax.Array, weight: jax.Array) -> tuple[Callable[[], jax.Array], str]:
    """The product of these operands, by cuBLAS where the device is a GPU, and what the compiler chose for it.

    Compiled by itself: the compiler picks its algorithm by timing, which nothing may run beside.
    """
    lowered = jax.jit(product).lower(hidden, weight)
    if jax.devices()[0].platform != "gpu":
        return functools.partial(lowered.compile(), hidden, weight), "XLA"
    try:
        compiled = lowered.compile({"xla_gpu_enable_triton_gemm": False})
    except Exception as error:  # An option of the compiler may go; what was chosen is said in either case.
        print(f"  the product is not forced to be cuBLAS: {type(error).__name__}", flush=True)
        compiled = lowered.compile()
    chosen = "cuBLAS" if "__cublas" in compiled.as_text() else "XLA's own kernel"
    return functools.partial(compiled, hidden, weight), chosen


class Timed(NamedTuple):
    """A call to be timed.

    Attributes:
      call: runs it.
      note: for its line.
      repeats: how often the call does what is timed.
    """

    call: Callable[[], Any]
    note: str = ""
    repeats: int = 1


def compiled(function: Callable, *operands: Any) -> Timed:
    """A jitted function of operands, compiled, with the memory of its temporaries."""
    program = jax.jit(function).lower(*operands).compile()
    memory = program.memory_analysis().temp_size_in_bytes / 2**30
    return Timed(functools.partial(program, *operands), f"temp {memory:.3f} GiB")


def compiled_or_said(functions: Mapping[str, Callable], *operands: Any) -> dict[str, Timed]:
    """Every function by name, compiled and run once; what fails is said and left out: it must not end the run."""
    found = {}
    for name, function in functions.items():
        try:
            found[name] = compiled(function, *operands)
            jax.block_until_ready(found[name].call())
        except Exception as error:
            say(f"  {name} failed: {str(error)[:600]}")
            found.pop(name, None)
    return found


def print_times(
    case: Case, calls: Mapping[str, Timed], turns: int = 4, at_least: float = SETTLE_SECONDS
) -> dict[str, float]:
    """Times the calls and one product in turns, at settled clocks, and prints medians.

    Args:
      case: operands of the product.
      calls: by name.
      turns: how many; the median counts.
      at_least: seconds of each untimed and each timed run.

    Returns:
      Times of the calls over that of the product.
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
