"""Operands of the Hopper kernels, their launch options, and the tokens that count."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxlogp.head.call import HeadCall, HeadWeight
from jaxlogp.head.hopper.tiles import TileConfig
from jaxlogp.head.projection import HeadSpec


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("hidden", "weight", "bias", "width"),
    meta_fields=("spec", "vocab_dim"),
)
@dataclasses.dataclass(frozen=True)
class Operands:
    """hidden · weightᵀ + bias, as the kernels read it.

    Attributes:
        hidden: bf16 [tokens, H], tokens a multiple of the tiles' rows.
        weight: bf16 [V, H], or [H, V] where ``vocab_dim`` is 1. What tiles read past its end arrives as 0.
        bias: fp32, or None. Filled up to whole tiles: it is read by plain loads, and not by the copy engine.
        width: int32, number of columns that are real ids; those after them are masked.
        spec: scale, soft cap and temperature.
        vocab_dim: the dimension of the weight that counts vocabulary columns.
    """

    hidden: Float[Array, "tokens hidden"]
    weight: HeadWeight
    bias: Float[Array, " columns"] | None
    width: Int[Array, ""]
    spec: HeadSpec = HeadSpec()
    vocab_dim: int = 0

    @classmethod
    def of(cls, call: HeadCall, hidden: Float[Array, "tokens hidden"], columns: int) -> "Operands":
        """Those of a call, with its hidden states packed and its bias filled up to ``columns``."""
        bias = None if call.bias is None else jnp.pad(call.bias.astype(jnp.float32), (0, columns - call.num_columns))
        return cls(hidden, call.weight, bias, call.targets.width, call.spec, call.vocab_dim)

    def with_hidden(self, hidden: Float[Array, "tokens hidden"]) -> "Operands":
        """The same of other hidden states."""
        return dataclasses.replace(self, hidden=hidden)

    @property
    def num_columns(self) -> int:
        """V."""
        return self.weight.shape[self.vocab_dim]

    def weight_index(self, columns: Any, depth: Any) -> tuple[Any, Any]:
        """The block of the weight of some vocabulary columns and a part of the hidden size."""
        return (columns, depth) if self.vocab_dim == 0 else (depth, columns)


class Launch(NamedTuple):
    """How a kernel is launched.

    Attributes:
        config: tile shapes.
        num_sms: number of persistent blocks.
        interpret: None, or what runs the kernel on the CPU.
    """

    config: TileConfig
    num_sms: int
    interpret: Any = None


class Work(NamedTuple):
    """Which of its work a kernel does.

    Attributes:
        live: int32, how many tokens, from the first, count; None means all. Row tiles, or steps over tokens, after them are
            left out, and what would be written for them may be anything. With 0 nothing is written at all.
        plan: int32, a list of :mod:`jaxlogp.head.hopper.work_lists` in place of ``live``: tiles that it does not name are
            not written, steps that it does not name are not read. None means all of ``live``.
        plan_steps: how many steps make one of the plan's blocks of steps; None where it lists tiles alone.
    """

    live: Int[Array, ""] | None = None
    plan: Int[Array, " n"] | None = None
    plan_steps: int | None = None


EVERYTHING = Work()
