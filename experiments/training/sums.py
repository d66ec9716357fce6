"""The result of both kinds of gradient sums: sums of a step, to be divided once by `experiments.training.update`."""

from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from experiments.models.ahead import Ahead
from experiments.sampling.packing import Round
from jaxlogp import StepSums
from jaxlogp.head import HeadRun


class MicroSums(NamedTuple):
    """Sums of one or more micro-batches, and the largest |log-prob of the trainer - of the sampler| under the same
    parameters at a label, in nats; -inf without such a label."""

    sums: StepSums
    drift: Float[Array, ""]


class Scores(NamedTuple):
    """Values of every label under some parameters, 0 elsewhere; entropy and log-sum-exp where available."""

    log_probs: Float[np.ndarray, "ranks rows row_length"]
    entropy: Float[np.ndarray, "ranks rows row_length"] | None
    lse: Float[np.ndarray, "ranks rows row_length"] | None


class GradientSums(Protocol):
    """Sums over the rounds of a step for one objective; of a round, a process makes the arrays of its own ranks."""

    head_run: HeadRun | None
    compiler_options: dict[str, Any] | None
    """What XLA is told when the sums, and the update made of them, are compiled."""

    @property
    def num_compilations(self) -> int:
        """How many shapes of micro-batch have been compiled."""

    def place(self, tree: Any) -> Any:
        """Parameters, or an optimizer's state for them, where the sums need them."""

    def trace(self, params: nnx.State, padding: Round) -> None:
        """Raises ValueError for anything that cannot run here, before training starts."""

    def ahead(self, params: nnx.State, padding: Round) -> Ahead | None:
        """The program of one round, compiled before its first call; None where it is not a single one."""

    def sums_of(self, params: nnx.State, rounds: Iterable[Round], documents_seen: int) -> MicroSums | None:
        """Sums of a step, nothing divided; None without rounds."""

    def score(self, params: nnx.State, scored: Round) -> Scores:
        """Log-probs of the labels of one round, by the forward pass that the gradients start from; the same in every
        process."""


def add_sums(left: MicroSums, right: MicroSums) -> MicroSums:
    """Sums of two disjoint parts of a step, added."""
    return MicroSums(left.sums + right.sums, jnp.maximum(left.drift, right.drift))
