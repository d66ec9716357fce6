"""The part of ``benchmarks.head_speed`` with ratios to one product: every engine and installed peer on every shape.

For a device that is available only briefly: each step is printed when it is done, the caller is notified after every
shape, no shape is begun that would exceed the time budget, and a program that fails becomes a row with the reason.
"""

import importlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import jax

from benchmarks.beside_product import compile_product
from benchmarks.cases import Case, errors, exact, make_case
from benchmarks.clock import SETTLE_SECONDS, Timing, time_in_turns
from benchmarks.head_speed.peers import PEERS, JaxPeer, TorchPeer
from benchmarks.head_speed.programs import Prepared, compile_all, operands, our_programs, prepare_jax
from benchmarks.head_speed.report import NotRun, ShapeRow, product_dtype
from jaxlogp.head import why_not
from jaxlogp.head.registry import ENGINES

EVERY = "every program"


@dataclass(frozen=True)
class Plan:
    """What to measure.

    Attributes:
        shapes: (H, V) by label.
        tokens: numbers of tokens.
        dtype: dtype of hidden states and weight.
        repeats: number of turns; the median is reported.
        names: programs to measure; the others are listed as excluded.
        settle_seconds: duration of each untimed and each timed run.
        time_budget: seconds after which no further shape is begun; 0 means no limit.
        threads: programs that are compiled at the same time, at most one per core.
    """

    shapes: Mapping[str, tuple[int, int]]
    tokens: Sequence[int]
    dtype: str
    repeats: int
    names: Sequence[str]
    settle_seconds: float = SETTLE_SECONDS
    time_budget: float = 0.0
    threads: int = 16


Rows = tuple[list[ShapeRow], tuple[NotRun, ...]]


def our_names() -> list[str]:
    """Names of the baseline, our engines and the policy losses, in the order of tables."""
    return list(our_programs())


def peer_names() -> list[str]:
    """Names of the peers, in the order of tables."""
    return [peer.name for peer in PEERS]


def measure_shapes(
    plan: Plan,
    after_shape: Callable[[list[ShapeRow], tuple[NotRun, ...]], None] = lambda rows, not_run: None,
    started: float | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Rows:
    """Rows of every shape and number of tokens, and what was not run.

    Args:
        plan: what to measure.
        after_shape: called with all rows so far, and everything not run, when a shape is done.
        started: start of the time budget, by default now.
        clock: seconds since some moment.
    """
    started = clock() if started is None else started
    wanted = [(number, label, *size) for number in plan.tokens for label, size in plan.shapes.items()]
    rows: list[ShapeRow] = []
    not_run: list[NotRun] = []
    begun, last = 0, 0.0
    for number, model, hidden_size, vocab_size in wanted:
        label, began = f"{model}, N={number}", clock()
        spent = began - started
        # The first shape shows what one costs, so it is always begun.
        if plan.time_budget and begun and spent + last > plan.time_budget:
            reason = (
                f"not begun: {spent:.0f} s of {plan.time_budget:.0f} s were spent and the last shape took {last:.0f} s"
            )
            print(f"{label}: {reason}", flush=True)
            not_run.append(NotRun(label, EVERY, reason))
        else:
            begun += 1
            print(f"{label}: H={hidden_size}, V={vocab_size}", flush=True)
            try:
                some, left = _measure(make_case(label, number, hidden_size, vocab_size, plan.dtype), plan)
            except Exception as error:  # A shape too large for its own operands must not end the run.
                some, left = [], [NotRun(label, EVERY, _words(error), failed=True)]
            _empty_torch_cache()
            rows += some
            not_run += left
            last = clock() - began
            print(f"{label}: done in {last:.0f} s", flush=True)
        after_shape(rows, _merged(not_run, begun))
    return rows, _merged(not_run, begun)


def _merged(not_run: list[NotRun], begun: int) -> tuple[NotRun, ...]:
    """A program that was not run on any shape, for one and the same reason, becomes one line."""
    reasons = [(left.program, left.reason, left.failed) for left in not_run]
    merged = [
        NotRun("" if reasons.count(one) == begun and not left.failed and left.program != EVERY else left.shape, *one)
        for left, one in zip(not_run, reasons, strict=True)
    ]
    return tuple(dict.fromkeys(merged))


def _left_out(case: Case, names: Sequence[str]) -> dict[str, str]:
    """Why programs cannot, or should not, run on the case."""
    reasons = {name: why_not(engine, case.hidden, case.weight) for name, engine in ENGINES.items()}
    reasons.update({peer.name: peer.why_not() for peer in PEERS})
    reasons.update({name: "left out by an option" for name in (*our_names(), *peer_names()) if name not in names})
    return {name: reason for name, reason in reasons.items() if reason is not None}


def _measure(case: Case, plan: Plan) -> tuple[list[ShapeRow], list[NotRun]]:
    reasons = _left_out(case, plan.names)
    not_run = [NotRun(case.label, name, reason) for name, reason in reasons.items()]
    wanted = exact(case)
    # Before anything else might run at the same time.
    base_dtype = product_dtype(plan.dtype)
    one_product, chosen = compile_product(case.hidden.astype(base_dtype), case.weight.astype(base_dtype))
    print(f"  exact values known, product by {chosen}", flush=True)
    names = [name for name in (*our_names(), *peer_names()) if name not in reasons]
    prepared, failures = _prepare(case, names, operands(case, wanted), plan.threads)
    found = {name: errors(ready.outputs, wanted) for name, ready in prepared.items()}
    calls = {("product", ""): (one_product, jax.block_until_ready)}
    for name, ready in prepared.items():
        if ready.forward is not None:
            calls[name, "forward"] = ready.forward, ready.wait
        calls[name, "both"] = ready.forward_backward, ready.wait
    began = time.monotonic()
    timings, broken = time_in_turns(
        calls,
        plan.repeats,
        plan.settle_seconds,
        after_turn=lambda turn: print(f"  turn {turn} ended after {time.monotonic() - began:.0f} s", flush=True),
    )
    if ("product", "") in broken:
        raise broken["product", ""]
    failures.update({name: error for (name, _), error in broken.items()})
    base = timings["product", ""]
    rows = [
        _row(case, name, ready, found[name], base, chosen, timings.get((name, "forward")), timings[name, "both"])
        for name, ready in prepared.items()
        if name not in failures
    ]
    for row in rows:
        forward = "" if row.forward_ratio is None else f"forward {row.forward_ratio:.3f}, "
        print(f"  {row.program}: {forward}forward + backward {row.forward_backward_ratio:.3f} × product", flush=True)
    not_run += [NotRun(case.label, name, _words(error), failed=True) for name, error in failures.items()]
    return rows, not_run


def _prepare(
    case: Case, names: Sequence[str], arguments: tuple[jax.Array, ...], threads: int
) -> tuple[dict[str, Prepared], dict[str, Exception]]:
    """Programs ready to be timed, in the order of ``names``, and the exceptions of the others."""
    programs = {name: program for name, program in our_programs().items() if name in names}
    failures: dict[str, Exception] = {}
    for peer in PEERS:
        if isinstance(peer, JaxPeer) and peer.name in names:
            try:
                programs[peer.name] = peer.program()
            except Exception as error:  # A third-party import may fail in any way.
                failures[peer.name] = error
    began = time.monotonic()
    compiled = compile_all(programs, arguments, threads)
    print(f"  {len(programs)} JAX programs compiled in {time.monotonic() - began:.0f} s", flush=True)
    peers = {peer.name: peer for peer in PEERS if isinstance(peer, TorchPeer)}
    prepared: dict[str, Prepared] = {}
    for name in (name for name in names if name not in failures):
        began = time.monotonic()
        try:
            if name in peers:
                prepared[name] = peers[name].prepare(case)
            elif isinstance(compiled[name], Exception):
                raise compiled[name]
            else:
                prepared[name] = prepare_jax(programs[name], compiled[name], case, arguments)
        except Exception as error:
            failures[name] = error
            _empty_torch_cache()
        outcome = "ran" if name in prepared else _words(failures[name])
        print(f"  {name}: {outcome} ({time.monotonic() - began:.1f} s)", flush=True)
    return prepared, failures


def _empty_torch_cache() -> None:
    # Memory that PyTorch keeps from a failed program, or from the last shape, is not available to the others.
    if "torch" in sys.modules:
        torch = importlib.import_module("torch")
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _row(
    case: Case, name: str, ready: Prepared, found, base: Timing, chosen: str, forward: Timing | None, both: Timing
) -> ShapeRow:
    return ShapeRow(
        case.label,
        *case.hidden.shape,
        case.weight.shape[0],
        name,
        base.seconds,
        chosen,
        None if forward is None else forward.seconds,
        both.seconds,
        None if forward is None else forward.seconds / base.seconds,
        both.seconds / base.seconds,
        ready.forward_bytes,
        ready.forward_backward_bytes,
        found.log_prob,
        found.entropy,
        found.d_hidden,
        found.d_weight,
        min(both.turns, both.turns if forward is None else forward.turns),
        ready.gives,
        both.ratio_spread(base),
    )


def _words(error: Exception) -> str:
    """The exception, in one line."""
    return f"failed: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
