"""Head calls for a Tunix model, on one device or over the mesh that Tunix runs under, and a record of them."""

import collections
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.interpreters import pxla
from jax.sharding import AbstractMesh, Mesh

from jaxlogp import (
    TokenLogProbs,
    WeightedSum,
    linear_log_probs,
    linear_policy_loss,
    sharded_linear_log_probs,
    sharded_linear_policy_loss,
)
from jaxlogp.head import HeadRun, record_head_runs
from jaxlogp.integrations.tunix.model_head import ModelHead


class TracedCall(NamedTuple):
    """A head call as it was traced: the function of Tunix that made it, the run, and what its mesh cost it."""

    caller: str
    run: HeadRun
    note: str


TRACED: collections.Counter[TracedCall] = collections.Counter()
"""How often each call was traced since `install`."""


def current_mesh() -> Mesh | AbstractMesh | None:
    """Returns the mesh that Tunix runs under (`with mesh:`, or `jax.set_mesh`), or None."""
    mesh = pxla.thread_resources.env.physical_mesh
    if mesh.empty:
        mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty else mesh


def log_probs(
    caller: str, hidden: jax.Array, head: ModelHead, targets: jax.Array, engine: Any, **options: Any
) -> TokenLogProbs:
    """Returns log-probs and entropies [B, T] of `targets`."""
    functions = linear_log_probs, sharded_linear_log_probs
    return _recorded(caller, functions, hidden, head, (targets,), engine, options)


def policy_loss(
    caller: str, hidden: jax.Array, head: ModelHead, operands: tuple, engine: Any, **options: Any
) -> tuple[WeightedSum, TokenLogProbs]:
    """Returns the loss as a sum and a count, and the log-probs; `operands` follow the weight in `linear_policy_loss`."""
    functions = linear_policy_loss, sharded_linear_policy_loss
    return _recorded(caller, functions, hidden, head, operands, engine, options)


def _recorded(
    caller: str,
    functions: tuple[Callable[..., Any], Callable[..., Any]],
    hidden: jax.Array,
    head: ModelHead,
    operands: tuple,
    engine: Any,
    options: dict[str, Any],
) -> Any:
    """Calls the plain or the sharded one of two functions, and adds its head runs to `TRACED`."""
    arguments, note = _arguments(hidden, head, engine)
    function = functions["mesh" in arguments]
    with record_head_runs() as runs:
        result = function(hidden, head.weight, *operands, **arguments, **options)
    TRACED.update(TracedCall(caller, run, note) for run in runs)
    return result


def _arguments(hidden: jax.Array, head: ModelHead, engine: Any) -> tuple[dict[str, Any], str]:
    """Returns the keyword arguments of a head call, and what the mesh cost it in words."""
    arguments = {
        "bias": head.bias,
        "softcap": head.softcap,
        "weight_layout": head.weight_layout,
        "frozen_head": head.frozen,
        "fp32_head": head.in_fp32,
        "engine": engine,
    }
    mesh = current_mesh()
    if mesh is None or mesh.size == 1:
        return arguments, ""
    if head.vocab_axis not in mesh.shape:
        note = f"mesh {dict(mesh.shape)} has no axis {head.vocab_axis!r} for the vocabulary: XLA splits the call"
        return arguments, note
    token_axes = tuple(axis for axis in head.token_axes if axis in mesh.shape)
    shards = math.prod(mesh.shape[axis] for axis in token_axes)
    note = ""
    if hidden.shape[0] % shards:
        note = f"{hidden.shape[0]} rows are not divided by {shards} ranks of {token_axes}: every rank computes all rows"
        token_axes = ()
    hidden_dim = 1 if head.weight_layout == "vh" else 0
    weight_shards = mesh.shape.get(head.weight_axis, 1)
    divided = head.weight.shape[hidden_dim] % weight_shards == 0
    split = weight_shards > 1 and divided and head.weight_axis in token_axes
    arguments |= {"mesh": mesh, "vocab_axis": head.vocab_axis, "token_axes": token_axes}
    arguments["weight_axis"] = head.weight_axis if split else None
    return arguments, note
