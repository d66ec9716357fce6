"""Choice of the engine for a head call, and records of the choice.

A named engine is used or an error is raised. ``"auto"`` tries the engines of :data:`AUTOMATIC` in turn, and a sequence
those that it lists. The record names the engine that ran and the reasons against those before it.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Generator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxlogp._targets import LocalTargets
from jaxlogp._vocab import VocabShards
from jaxlogp.errors import EngineUnavailable, describe, require
from jaxlogp.head.call import HeadCall, check_operands
from jaxlogp.head.chunked.engine import ChunkedEngine
from jaxlogp.head.engine import Engine
from jaxlogp.head.fixed_order.engine import FixedOrderEngine
from jaxlogp.head.hopper.engine import HopperEngine
from jaxlogp.head.projection import HeadSpec
from jaxlogp.head.reference import ReferenceEngine
from jaxlogp.head.support.engine import SupportEngine
from jaxlogp.head.support.kernel_engine import SupportKernelEngine
from jaxlogp.head.triton.engine import TritonEngine

EngineChoice = str | Engine | Sequence[str | Engine]

ENGINES: dict[str, Engine] = {
    "reference": ReferenceEngine(),
    "chunked": ChunkedEngine(),
    "fixed_order": FixedOrderEngine(),
    "hopper": HopperEngine(),
    "triton": TritonEngine(),
    "support": SupportEngine(),
    "support_kernels": SupportKernelEngine(),
}
# hopper before triton, because it is faster where both run; chunked takes every call.
AUTOMATIC = ("hopper", "triton", "chunked")
# The kernels first, because their bits repeat and they are faster; support takes every call on a support.
AUTOMATIC_ON_SUPPORT = ("support_kernels", "support")


# Static, so that a compiled program can return the records of its trace.
@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class HeadRun:
    """One traced head call.

    Attributes:
        path: the public function.
        engine: name of the engine.
        reason: why this engine was chosen.
        num_vocab_shards: number of vocabulary shards.
        gradient: how a loss computes its gradient: "in one pass", "from the known log-sum-exp", or "in two steps" with
            the reason; always "in two steps" for log-probs, whose loss is the caller's.
    """

    path: str
    engine: str
    reason: str
    num_vocab_shards: int
    gradient: str = "in two steps"


_records: contextvars.ContextVar[tuple[list[HeadRun], ...]] = contextvars.ContextVar("head_runs", default=())


def register_engine(name: str, engine: Engine) -> None:
    """Makes ``engine`` available as ``engine=name``.

    Args:
        name: new name.
        engine: an object with the methods of :class:`jaxlogp.head.Engine`.

    Raises:
        ValueError: if the name is taken or reserved, or the object is not an engine.
    """
    ok = isinstance(name, str) and name != "auto" and name not in ENGINES
    require(ok, "name", f"a name other than 'auto' and {sorted(ENGINES)}", repr(name))
    ENGINES[name] = _checked(engine)


def named_engine(engine: str | Engine) -> Engine:
    """Returns the engine of a name, or the engine object itself.

    Raises:
        ValueError: if the name is unknown, or the object is not an engine.
    """
    if not isinstance(engine, str):
        return _checked(engine)
    expected = f"'auto', one of {sorted(ENGINES)}, an engine object, or a sequence of these"
    require(engine in ENGINES, "engine", expected, repr(engine))
    return ENGINES[engine]


def _checked(engine: object) -> Engine:
    expected = f"'auto', one of {sorted(ENGINES)}, an engine object (jaxlogp.head.Engine), or a sequence of these"
    require(isinstance(engine, Engine) and not isinstance(engine, type), "engine", expected, describe(engine))
    return engine


def choose_engine(engine: EngineChoice, call: HeadCall) -> tuple[Engine, str]:
    """Returns the engine to run and the reason for it.

    Args:
        engine: "auto", a name, an engine object, or a sequence of names and objects, of which the first that can take the
            call is used.
        call: the call; only shapes, dtypes and static properties matter.

    Raises:
        ValueError: if a name is unknown.
        EngineUnavailable: if no engine takes the call; the message has the reasons.
    """
    automatic = isinstance(engine, str) and engine == "auto"
    if isinstance(engine, str | Engine) and not automatic:
        chosen = named_engine(engine)
        refusal = _why_not(chosen, call)
        if refusal is not None:
            raise EngineUnavailable(f"engine: expected a call that {chosen.name!r} takes, got {refusal}")
        return chosen, "named by the caller"
    candidates = (AUTOMATIC if call.support is None else AUTOMATIC_ON_SUPPORT) if automatic else _sequence(engine)
    refusals = []
    for candidate in [named_engine(each) for each in candidates]:
        # Checks without an import first: importing jax-triton changes Triton's settings for the whole process.
        refusal = (candidate.why_not_automatic(call) if automatic else None) or _why_not(candidate, call)
        if refusal is None:
            return candidate, "; ".join([f"{'auto' if automatic else 'first of the sequence that can'}", *refusals])
        refusals.append(f"{candidate.name} not used: {refusal}")
    raise EngineUnavailable(f"engine: expected an engine that takes the call, got {'; '.join(refusals)}")


def _why_not(engine: Engine, call: HeadCall) -> str | None:
    if call.support is None and engine.needs_support:
        return "one without support"
    if call.support is not None and not engine.takes_support:
        return "one on a support (engine='auto' takes it)"
    if call.split is not None and engine.reduces_gradients:
        return "it sums gradients over mesh axes in its own order, so it takes no sequence_dim"
    return engine.why_not(call)


def _sequence(engine: object) -> Sequence[str | Engine]:
    ok = isinstance(engine, list | tuple) and len(engine) > 0
    expected = f"'auto', one of {sorted(ENGINES)}, an engine object (jaxlogp.head.Engine), or a sequence of these"
    require(ok, "engine", expected, describe(engine))
    return engine


def first_choice(engine: EngineChoice) -> Engine | None:
    """Returns the named engine or the first of a sequence; None for "auto", whose choice depends on the call."""
    if isinstance(engine, str) and engine == "auto":
        return None
    return named_engine(engine if isinstance(engine, str | Engine) else _sequence(engine)[0])


def default_shards(engine: EngineChoice, vocab_size: int, num_shards: int) -> VocabShards:
    """Returns the default vocabulary shards: those of the engine, or `VocabShards.aligned` for "auto".

    Example:
        >>> default_shards("auto", 1000, 2).ranges, default_shards("fixed_order", 1000, 2).ranges
        (((0, 512), (512, 1000)), ((0, 500), (500, 1000)))
    """
    chosen = first_choice(engine)
    return (VocabShards.aligned if chosen is None else chosen.shards)(vocab_size, num_shards)


def why_not(
    engine: str | Engine,
    hidden: Float[Array, "*tokens hidden"] | jax.ShapeDtypeStruct,
    weight: Float[Array, "vocab hidden"] | jax.ShapeDtypeStruct,
    *,
    bias: Float[Array, " vocab"] | jax.ShapeDtypeStruct | None = None,
    spec: HeadSpec | None = None,
    num_shards: int = 1,
) -> str | None:
    """Returns why an engine cannot take a head on this device, or None if it can.

    Nothing is computed.

    Args:
        engine: a name or an engine object.
        hidden: [*tokens, H]; only shape and dtype matter, here and in the other arrays.
        weight: [V_local, H].
        bias: [V_local] or None.
        spec: the arithmetic; None for plain logits.
        num_shards: number of ranks over which the vocabulary is sharded.

    Raises:
        ValueError: if the engine is unknown or shapes do not match.

    Example:
        >>> hidden, weight = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in [(8, 64), (256, 64)])
        >>> why_not("chunked", hidden, weight) is None, why_not("triton", hidden, weight) is None
        (True, False)
    """
    check_operands(hidden, weight, bias)
    token = jax.ShapeDtypeStruct(hidden.shape[:-1], jnp.int32)
    targets = LocalTargets(token, token, None, jax.ShapeDtypeStruct((), jnp.int32))
    spec = HeadSpec() if spec is None else spec
    axis_name = None if num_shards == 1 else "the vocabulary axis"
    call = HeadCall(
        hidden, weight, bias, targets, spec, weight.shape[0] * num_shards, axis_name=axis_name, num_shards=num_shards
    )
    return named_engine(engine).why_not(call)


def report(run: HeadRun) -> None:
    """Adds ``run`` to every open :func:`record_head_runs`."""
    for record in _records.get():
        record.append(run)


def with_head_runs(function: Callable[[], Any]) -> tuple[Any, tuple[HeadRun, ...]]:
    """Returns the result of ``function`` and its head runs, hidden from all open records."""
    record: list[HeadRun] = []
    token = _records.set((record,))
    try:
        return function(), tuple(record)
    finally:
        _records.reset(token)


@contextlib.contextmanager
def record_head_runs() -> Generator[list[HeadRun], None, None]:
    """Collects a :class:`HeadRun` for every head call that is traced (or run eagerly) inside the ``with`` block.

    A function compiled before the block is not traced again and leaves no record.
    """
    record: list[HeadRun] = []
    token = _records.set((*_records.get(), record))
    try:
        yield record
    finally:
        _records.reset(token)
