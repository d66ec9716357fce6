"""What a learner computes with: sums of gradients over micro-batches, scores, and where its numbers lie."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from experiments.learner.model_source import ModelParts
from experiments.learner.objectives import NO_CONSTANTS, LossConstants, Objective
from experiments.learner.packing import GlobalMicroBatch, Packing
from experiments.learner.replicas import Replicas
from experiments.models.compiled_program import CompiledProgram
from jaxlogp import Document, StepSums, VocabShards
from jaxlogp.head import HeadRun

LabelValues = Float[np.ndarray, "ranks rows row_length"]


class StepGradient(NamedTuple):
    """Sums of one or more micro-batches, and the largest |log-prob of the trainer - of the sampler| under the same
    parameters at a label, in nats; -inf without such a label."""

    sums: StepSums
    drift: Float[Array, ""]


class CompiledSums(NamedTuple):
    """The programs of one round before their first call: the most bytes that they take per device beside the parameters,
    None if the compiler does not say, and shapes, dtypes and places of the sums of a step."""

    programs: tuple[CompiledProgram, ...]
    bytes_beside: int | None
    sums: StepGradient


class GradientBackend(Protocol):
    """Sums over the rounds of a step for one objective; of a round, a process makes the arrays of its own ranks."""

    @property
    def head_run(self) -> HeadRun | None:
        """The head call; None before it is traced."""

    @property
    def compiler_options(self) -> dict[str, Any] | None:
        """What XLA is told when the sums, and the update made of them, are compiled."""

    @property
    def num_compilations(self) -> int:
        """Number of shapes of micro-batch that have been compiled; 1, whatever the number of micro-batches."""

    def trace(self, params: nnx.State, padding: GlobalMicroBatch) -> None:
        """Makes `head_run` known without compiling, and raises EngineUnavailable for a head that cannot run here."""

    def lower(self, params: nnx.State, padding: GlobalMicroBatch) -> Callable[[], CompiledSums]:
        """Lowers the programs of one round, and returns what compiles them before their first call."""

    def sums_waiting(self, rounds: int) -> int:
        """Returns how many sums of earlier rounds a device holds while it computes one of so many, at most."""

    def without_zeros(
        self, documents: Sequence[Document], packing: Packing
    ) -> tuple[list[Document], list[GlobalMicroBatch]]:
        """Returns the documents that are computed where those whose advantages are all 0 add nothing, and their rounds."""

    def accumulate(
        self,
        params: nnx.State,
        rounds: Iterable[GlobalMicroBatch],
        version: int,
        constants: LossConstants = NO_CONSTANTS,
        observe: Callable[[GlobalMicroBatch, LabelValues], None] | None = None,
    ) -> StepGradient | None:
        """Returns the sums of a step, nothing divided; None without documents. `version` is that of the parameters.

        `observe` is told the log-probs of each round, as `score` returns them, that the sums were computed from.
        """

    def score(self, params: nnx.State, scored: GlobalMicroBatch) -> LabelValues:
        """Returns log-probs of the labels of one round in every process, 0 elsewhere, by the gradients' own forward pass."""

    def entropies(self, params: nnx.State, scored: GlobalMicroBatch) -> LabelValues:
        """Returns entropies of the labels of one round in nats, otherwise as `score`."""


class Backend(Protocol):
    """A way to compute the same learner: its model in parts (`frozen` is not trained), and the sums for an objective."""

    frozen: nnx.State
    vocab: VocabShards
    replicas: Replicas

    def take_params(self) -> nnx.State:
        """Gives away the first parameters, once: a second reference would keep them in memory next to the state."""

    def place(self, tree: Any) -> Any:
        """Puts parameters, or an optimizer's state for them, where the sums need them."""

    def gradients(self, objective: Objective, temperature: float, teacher: ModelParts | None = None) -> GradientBackend:
        """Returns the sums for an objective: each time the same object, whose programs are compiled once.

        `teacher` is the model whose parameters are the reference, if that is no policy of the run.
        """


class BaseBackend(Backend):
    """What backends share: parameters that are given away once, and sums that are made once."""

    _params: nnx.State | None

    def __init__(self) -> None:
        self._gradients: dict[tuple[Objective, float], GradientBackend] = {}

    def take_params(self) -> nnx.State:
        params, self._params = self._params, None
        assert params is not None, "they are given away once"
        return params

    def gradients(self, objective: Objective, temperature: float, teacher: ModelParts | None = None) -> GradientBackend:
        key = objective, temperature
        if key not in self._gradients:
            self._gradients[key] = self._make_gradients(objective, temperature, teacher)
        return self._gradients[key]

    def _make_gradients(self, objective: Objective, temperature: float, teacher: ModelParts | None) -> GradientBackend:
        raise NotImplementedError


def add_gradients(left: StepGradient, right: StepGradient) -> StepGradient:
    return StepGradient(left.sums + right.sums, jnp.maximum(left.drift, right.drift))
