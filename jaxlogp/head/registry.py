"""Which engine runs a head call, and a record of what ran.

A named engine is used or an error is raised; ``"auto"`` picks one and the record says why: the Hopper
kernels where the device and the operands allow them, the Triton kernels likewise on GPUs of compute capability 8,
``chunked`` elsewhere.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from jaxlogp.errors import describe, require
from jaxlogp.head.chunked.engine import ChunkedEngine
from jaxlogp.head.fixed_order.engine import FixedOrderEngine
from jaxlogp.head.hopper import HopperEngine
from jaxlogp.head.projection import HeadOptions
from jaxlogp.head.reference import ReferenceEngine
from jaxlogp.head.triton import TritonEngine
from jaxlogp.head.triton.availability import device_capability
from jaxlogp.stats import TokenLogProbs
from jaxlogp.targets import LocalTargets


@runtime_checkable
class Engine(Protocol):
    """Fills tile statistics its own way; operands are flat and checked.

    Attributes:
      name: by which callers ask for it.
      reduces_gradients: False, the operands are typed as varying over every axis in play, and the transpose of that cast
        sums their gradients; True, they come as they are, and the engine sums.
      masks_hidden: False, hidden states of masked tokens come as zeros; True, they may hold anything, NaN too, and the
        engine leaves them out of every product.
    """

    name: str
    reduces_gradients: bool
    masks_hidden: bool

    def log_probs(
        self,
        hidden: Float[Array, "tokens hidden"],
        weight: Float[Array, "vocab hidden"],
        bias: Float[Array, " vocab"] | None,
        targets: LocalTargets,
        options: HeadOptions,
    ) -> TokenLogProbs:
        """Log-probs and entropy of flat tokens."""
        ...


def mask_hidden(
    engine: Engine, hidden: Float[Array, "*tokens hidden"], mask: Bool[Array, "*tokens"]
) -> Float[Array, "*tokens hidden"]:
    """Hidden states as the engine takes them: those of masked tokens are zeros unless it leaves them out itself.

    Selected out before any product: 0 * NaN from a masked row would reach every row of the weight's gradient.
    """
    return hidden if engine.masks_hidden else jnp.where(mask[..., None], hidden, jnp.zeros_like(hidden))


@dataclasses.dataclass(frozen=True)
class HeadRun:
    """One traced head call.

    Attributes:
      path: the public function.
      engine: name of the engine.
      reason: why this engine.
      num_vocab_shards: over how many shards the vocabulary was split.
    """

    path: str
    engine: str
    reason: str
    num_vocab_shards: int


ENGINES: dict[str, Engine] = {
    "reference": ReferenceEngine(),
    "chunked": ChunkedEngine(),
    "fixed_order": FixedOrderEngine(),
    "hopper": HopperEngine(),
    "triton": TritonEngine(),
}

_records: contextvars.ContextVar[tuple[list[HeadRun], ...]] = contextvars.ContextVar("head_runs", default=())


def choose_engine(
    engine: str | Engine, hidden: Any, weight: Any, bias: Any, options: HeadOptions
) -> tuple[Engine, str]:
    """The engine to run and the reason.

    Args:
      engine: "auto", a name, or an engine object.
      hidden: [*tokens, H] as the engine will get it; shape and dtype count.
      weight: [V_local, H].
      bias: [V_local] or None.
      options: options of the call.

    Raises:
      ValueError: the name is not known.
    """
    if isinstance(engine, str) and engine == "auto":
        hopper = ENGINES["hopper"]
        reason = hopper.why_not(hidden, weight, bias, options)
        if reason is None:
            return hopper, "auto: a Hopper GPU and operands that its kernels take"
        triton = ENGINES["triton"]
        # First what needs no import of jax-triton, which changes Triton's settings for the whole process.
        other = _not_automatic(options) or triton.why_not(hidden, weight, bias, options)
        if other is None:
            return triton, "auto: a GPU of compute capability 8 and operands that the Triton kernels take"
        return ENGINES["chunked"], f"auto: hopper not used: {reason}; triton not used: {other}"
    return named_engine(engine), "named by the caller"


def named_engine(engine: str | Engine) -> Engine:
    """The engine of that name, or the engine object itself.

    Raises:
      ValueError: the name is not known.
    """
    if isinstance(engine, (ChunkedEngine, ReferenceEngine, FixedOrderEngine, HopperEngine, TritonEngine)):
        return engine
    known = isinstance(engine, str) and engine in ENGINES
    expected = f"'auto', one of {sorted(ENGINES)}, or an engine object"
    require(known, "engine", expected, repr(engine) if isinstance(engine, str) else describe(engine))
    return ENGINES[engine]


def _not_automatic(options: HeadOptions) -> str | None:
    """Why the Triton kernels are not the choice for a device that they run on."""
    if device_capability() == 90:
        return "on Hopper GPUs it is used by name only"
    if options.axis_name is not None and lax.axis_size(options.axis_name) > 1:
        return "it has not been tested over several GPUs; name it to use it"
    return None


def report(run: HeadRun) -> None:
    """Adds ``run`` to every open :func:`record_head_runs`."""
    for record in _records.get():
        record.append(run)


@contextlib.contextmanager
def record_head_runs() -> Iterator[list[HeadRun]]:
    """Collects a :class:`HeadRun` for every head call that is traced (or run eagerly) inside of the ``with`` block.

    A function compiled before the block is not traced again and leaves no record.
    """
    record: list[HeadRun] = []
    token = _records.set((*_records.get(), record))
    try:
        yield record
    finally:
        _records.reset(token)
