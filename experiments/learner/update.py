"""The one update: sums divided once by the totals of the whole step, guarded, applied."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from experiments.learner.backend import StepGradient
from experiments.learner.optimizers import Optimizer, OptimizerState
from experiments.learner.soundness import OPTIMIZER_STATE, FiniteReport, finite_leaves, name_non_finite
from experiments.models.compiled_program import CompiledProgram, compile_program
from jaxlogp import StepSums
from jaxlogp.policy.accumulate import FinishedStep


class TrainState(NamedTuple):
    """Parameters and optimizer state, placed on the mesh; None instead of that of an optimizer that is not at work."""

    params: nnx.State
    opt_state: OptimizerState | None


class UpdateOutcome(NamedTuple):
    """A step after its update, as numbers; ``applied`` False means that the update was refused and the state is unchanged,
    because of what `sound` says of the state that it would have been."""

    loss: Float[Array, ""]
    grad_norm: Float[Array, ""]
    drift: Float[Array, ""]
    learning_rate: Float[Array, ""]
    applied: Bool[Array, ""]
    sound: FiniteReport
    metrics: dict[str, Array]


class _Updated(NamedTuple):
    finished: FinishedStep
    norm: Float[Array, ""]
    params: nnx.State
    opt_state: OptimizerState
    rate: Float[Array, ""]


class Update:
    """Applies sums to a state; `place` puts parameters, or optimizer state for them, where gradients and parameters live."""

    def __init__(
        self, optimizer: Optimizer, place: Callable[[Any], Any], compiler_options: dict[str, Any] | None = None
    ) -> None:
        self._optimizer, self._place, self._compiler_options = optimizer, place, compiler_options
        self._apply = None
        self._sound = jax.jit(lambda state: TrainState(*map(finite_leaves, state)))

    def init(self, params: nnx.State) -> TrainState:
        """Places ``params`` and creates the optimizer's state for them; the first step takes over their memory."""
        # First the parameters: an optimizer's numbers lie where theirs do, and need not fit into one device.
        params = self._place(params)
        return TrainState(params, self._place(self._optimizer.init(params)))

    def place(self, state: TrainState) -> TrainState:
        return TrainState(*map(self._place, state))

    def __call__(self, state: TrainState, step: StepGradient, further: int = 0) -> tuple[TrainState, UpdateOutcome]:
        """Divides by the step's totals and updates; the loss counts `further` labels or documents, which are not computed.

        Where anything is not finite (loss, gradient, the new parameters or the new optimizer state) every bit of the state
        stays as it was. The memory of ``state`` goes to the new one: nothing may read the old one afterwards.
        """
        return self._program(state)(state, step, np.int32(further))

    def ahead(self, state: TrainState, step: StepGradient) -> CompiledProgram:
        """Compiles the program before its first call; of `step` types and places matter."""
        return compile_program(self._program(state), state, step, np.int32(0))

    def _program(self, state: TrainState) -> Callable[..., tuple[TrainState, UpdateOutcome]]:
        if self._apply is None:
            places = jax.tree.map(lambda x: x.sharding, state)
            how = {"donate_argnums": 0, "compiler_options": self._compiler_options}
            self._apply = jax.jit(self._applied, out_shardings=(places, None), **how)
        return self._apply

    def _applied(
        self, state: TrainState, step: StepGradient, further: Int[Array, ""]
    ) -> tuple[TrainState, UpdateOutcome]:
        updated = self._updated(state, step.sums, further)
        finished, norm, params, opt_state, rate = updated
        checked = self._checked(state, step.sums, further, updated)
        sound = self._soundness(finished.loss, norm, checked)
        applied = sound.all()
        # A refused update leaves every count unchanged, and with it the learning rate of the next one.
        state = jax.tree.map(lambda old, new: jnp.where(applied, new, old), state, TrainState(params, opt_state))
        return state, UpdateOutcome(finished.loss, norm, step.drift, rate, applied, sound, finished.metrics)

    def _updated(self, state: TrainState, sums: StepSums, further: Array) -> _Updated:
        finished = replace(sums, loss=replace(sums.loss, count=sums.loss.count + further)).finish()
        norm = optax.tree.norm(finished.gradients)
        return _Updated(finished, norm, *self._optimizer.update(finished.gradients, state.opt_state, state.params))

    def _checked(self, state: TrainState, sums: StepSums, further: Array, updated: _Updated) -> tuple[Any, Any, Any]:
        """Returns gradient, parameters and optimizer state that are looked at before the new ones are taken.

        They are computed twice where that is one pass that stores nothing: kept until all of them have been checked, they
        would take as much memory as the old ones again. The barriers keep the arithmetic of the update as it would be
        without a check, to the last bit.
        """
        if self._optimizer.elementwise:
            updated = self._updated(*lax.optimization_barrier((state, sums, further)))
            return updated.finished.gradients, updated.params, updated.opt_state
        return updated.finished.gradients, *lax.optimization_barrier((updated.params, updated.opt_state))

    def _soundness(self, loss: Array, norm: Array, trees: tuple[Any, ...]) -> FiniteReport:
        return FiniteReport(jnp.isfinite(loss), jnp.isfinite(norm), *map(finite_leaves, trees))

    def first_non_finite(self, state: TrainState) -> str | None:
        """Returns a phrase that names what of a state is not finite, parameters first; None if all is."""
        sound = jax.device_get(self._sound(state))
        parts = zip(("parameters", OPTIMIZER_STATE), state, sound, strict=True)
        return next((found for part in parts if (found := name_non_finite(*part)) is not None), None)
