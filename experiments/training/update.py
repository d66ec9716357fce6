"""The one update: sums divided once by the totals of the whole step, guarded, applied."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Bool, Float

from experiments.config import OptimizerConfig
from experiments.training.sums import MicroSums


class TrainState(NamedTuple):
    """Parameters and optimizer state, placed on the mesh."""

    params: nnx.State
    opt_state: optax.OptState


class AppliedStep(NamedTuple):
    """A step after its update, as numbers; ``finite`` False means that it was refused and the state is the old one."""

    loss: Float[Array, ""]
    grad_norm: Float[Array, ""]
    drift: Float[Array, ""]
    learning_rate: Float[Array, ""]
    finite: Bool[Array, ""]
    metrics: dict[str, Array]


class Optimizer(NamedTuple):
    """An optax transformation whose last part scales by the learning rate of the schedule, at optax's own count."""

    transformation: optax.GradientTransformation
    learning_rate: optax.Schedule


def adamw(options: OptimizerConfig, learning_rate: optax.Schedule) -> Optimizer:
    """Global-norm clipping, then AdamW."""
    transformation = optax.chain(
        optax.clip_by_global_norm(options.max_grad_norm),
        optax.scale_by_adam(b1=options.b1, b2=options.b2),
        optax.add_decayed_weights(options.weight_decay),
        optax.scale_by_learning_rate(learning_rate),
    )
    return Optimizer(transformation, learning_rate)


class Update:
    """Applies sums to a state.

    Args:
      optimizer: what makes updates of gradients.
      place: puts parameters, or optimizer state for them, where gradients and parameters live.
    """

    def __init__(self, optimizer: Optimizer, place: Callable[[Any], Any]) -> None:
        self._optimizer, self._place = optimizer, place
        self._apply = None

    def init(self, params: nnx.State, *, copy: bool = True) -> TrainState:
        """Brings ``params`` to their places and makes the optimizer's state beside them.

        A step gives its state's memory to the next one: without a copy the caller's parameters are gone then.
        """
        if copy:
            params = jax.tree.map(jnp.copy, params)
        return self.place(TrainState(params, self._optimizer.transformation.init(params)))

    def place(self, state: TrainState) -> TrainState:
        """Puts both parts of a state where they are wanted."""
        return TrainState(*map(self._place, state))

    def __call__(self, state: TrainState, step: MicroSums) -> tuple[TrainState, AppliedStep]:
        """Divides by the step's totals and updates; a loss or gradient that is not finite leaves the values as they were.

        The memory of ``state`` goes to the new one: nobody may read the old one afterwards.
        """
        if self._apply is None:
            places = jax.tree.map(lambda x: x.sharding, state)
            self._apply = jax.jit(self._applied, out_shardings=(places, None), donate_argnums=0)
        return self._apply(state, step)

    def _applied(self, state: TrainState, step: MicroSums) -> tuple[TrainState, AppliedStep]:
        finished = step.sums.finish()
        norm = optax.tree.norm(finished.gradients)
        finite = jnp.isfinite(norm) & jnp.isfinite(finished.loss)
        gradients = jax.tree.map(lambda g, p: g.astype(p.dtype), finished.gradients, state.params)
        updates, opt_state = self._optimizer.transformation.update(gradients, state.opt_state, state.params)
        new = TrainState(optax.apply_updates(state.params, updates), opt_state)
        # A refused update leaves optax's count, and so the learning rate of the next one.
        rate = self._optimizer.learning_rate(_schedule_count(state.opt_state))
        state = jax.tree.map(lambda old, new: jnp.where(finite, new, old), state, new)
        rate = jnp.asarray(rate, jnp.float32)
        return state, AppliedStep(finished.loss, norm, step.drift, rate, finite, finished.metrics)


def _schedule_count(opt_state: optax.OptState) -> Array:
    """How many updates the schedule has seen."""
    is_schedule = lambda node: isinstance(node, optax.ScaleByScheduleState)  # noqa: E731
    (found,) = [node for node in jax.tree.leaves(opt_state, is_leaf=is_schedule) if is_schedule(node)]
    return found.count
