"""The part of ``experiments.head_speed`` with ratios to one product: every engine and installed peer on every shape."""

import functools
from collections.abc import Callable, Mapping, Sequence

import jax

from experiments.head_cases import (
    Case,
    Prepared,
    engine_program,
    exact,
    interleaved_medians,
    make_case,
    materialised,
    prepare_jax,
    product,
)
from experiments.head_peers import PEERS, largest_error
from experiments.head_report import NotRun, ShapeRow, product_dtype
from jaxlogp.head.engines import ENGINES
from jaxlogp.head.projection import HeadOptions


def program_names() -> list[str]:
    """Names of everything that can be measured, in the order of tables."""
    return ["materialised", *ENGINES, *(peer.name for peer in PEERS)]


def measure_shapes(
    shapes: Mapping[str, tuple[int, int]], tokens: Sequence[int], dtype: str, repeats: int, skip: Sequence[str]
) -> tuple[list[ShapeRow], tuple[NotRun, ...]]:
    """Rows of every shape and number of tokens, and what was not run.

    Args:
      shapes: (H, V) by label.
      tokens: numbers of tokens.
      dtype: of hidden states and weight.
      repeats: turns; the median counts.
      skip: programs to leave out.
    """
    rows, not_run = [], []
    for number in tokens:
        for label, (hidden_size, vocab_size) in shapes.items():
            case = make_case(f"{label}, N={number}", number, hidden_size, vocab_size, dtype)
            some, left = _measure(case, dtype, repeats, skip)
            rows += some
            not_run += left
    return rows, _merged(not_run, len(tokens) * len(shapes))


def _merged(not_run: list[NotRun], cases: int) -> tuple[NotRun, ...]:
    """A program that was left out of every shape for one reason is one line."""
    reasons = [(left.program, left.reason) for left in not_run]
    merged = [
        NotRun("" if reasons.count(pair) == cases else left.shape, *pair)
        for left, pair in zip(not_run, reasons, strict=True)
    ]
    return tuple(dict.fromkeys(merged))


def _programs(case: Case, skip: Sequence[str]) -> tuple[dict[str, Callable[[], Prepared]], list[NotRun]]:
    """How to prepare every program that can run on the case, and why the others cannot."""
    options = HeadOptions(with_entropy=True, vocab_size=case.weight.shape[0])
    found: dict[str, Callable[[], Prepared]] = {"materialised": functools.partial(prepare_jax, materialised, case)}
    reasons: dict[str, str | None] = {"materialised": None}
    for name, engine in ENGINES.items():
        why_not = getattr(engine, "why_not", None)
        reasons[name] = None if why_not is None else why_not(case.hidden, case.weight, None, options)
        found[name] = functools.partial(prepare_jax, engine_program(name), case)
    for peer in PEERS:
        reasons[peer.name] = peer.why_not()
        found[peer.name] = functools.partial(peer.prepare, case)
    reasons.update(dict.fromkeys(skip, "left out by --skip"))
    left = [NotRun(case.label, name, reason) for name, reason in reasons.items() if reason is not None]
    return {name: prepare for name, prepare in found.items() if reasons[name] is None}, left


def _measure(case: Case, dtype: str, repeats: int, skip: Sequence[str]) -> tuple[list[ShapeRow], list[NotRun]]:
    programs, not_run = _programs(case, skip)
    wanted = exact(case)
    prepared: dict[str, Prepared] = {}
    for name, prepare in programs.items():
        try:
            ready = prepare()
            ready.wait(ready.forward_backward())
        except Exception as error:  # A program that does not fit or compile must not end the run.
            words = str(error).strip().splitlines() or [""]
            not_run.append(NotRun(case.label, name, f"failed: {type(error).__name__}: {words[0][:200]}"))
        else:
            prepared[name] = ready
    multiplied = product_dtype(dtype)
    operands = case.hidden.astype(multiplied), case.weight.astype(multiplied)
    one_product = functools.partial(jax.jit(product).lower(*operands).compile(), *operands)
    calls = {"product": (one_product, jax.block_until_ready)}
    for name, ready in prepared.items():
        calls[name, "forward"] = ready.forward, ready.wait
        calls[name, "both"] = ready.forward_backward, ready.wait
    medians = interleaved_medians(calls, repeats)
    base = medians["product"]
    rows = [
        ShapeRow(
            case.label,
            *case.hidden.shape,
            case.weight.shape[0],
            name,
            base,
            medians[name, "forward"],
            medians[name, "both"],
            medians[name, "forward"] / base,
            medians[name, "both"] / base,
            ready.forward_bytes,
            ready.forward_backward_bytes,
            largest_error(ready.log_probs, wanted[0]),
            largest_error(ready.entropy, wanted[1]),
        )
        for name, ready in prepared.items()
    ]
    return rows, not_run
