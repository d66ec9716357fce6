"""Optimizers and learning-rate schedules by name: optax's own, at one learning rate, count and precision.

    direction_n = optax's update at learning rate 1, of the clipped fp32 gradient
    θ_n = θ_{n-1} + rate(n) · direction_n

n counts the updates that were applied, once for all parts of an optimizer. Every state is fp32, but for a first moment that
an option keeps in bf16. Parameters that are stored in fewer bits are what the model reads of an fp32 copy in the state, to
which the updates are added: a step of 1e-4 of a weight, a fortieth of the distance between two bf16 numbers or less, is
not lost.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Float, Int
from optax.contrib import MuonDimensionNumbers

from experiments.models.parameters import INPUT_AXES
from experiments.options import AtLeast, OneOf, Positive, Range
from jaxlogp.errors import require

MUON_RMS = 0.2
"""Root mean square of Muon's direction, whatever a matrix' shape: about that of AdamW's, so that learning rates agree."""


def adamw(
    *, b1: float = 0.9, b2: float = 0.99, weight_decay: float = 0.0, mu_dtype: jnp.dtype | None = None
) -> optax.GradientTransformation:
    """Returns AdamW at learning rate 1; `weight_decay` is decoupled, a share of each parameter per unit of learning rate.

    `mu_dtype`, here and for Muon, is optax' own dtype of the first moment; see `with_bf16_moment`.
    """
    return optax.adamw(1.0, b1=b1, b2=b2, weight_decay=weight_decay, mu_dtype=mu_dtype)


def adafactor(*, momentum: float | None = None, weight_decay: float = 0.0) -> optax.GradientTransformation:
    """Returns Adafactor at learning rate 1, which is absolute like AdamW's rather than a share of the parameter's scale.

    The second moment of a matrix of at least 128 × 128 is kept as its row and column means. A direction's root mean
    square is clipped to 1 over each parameter, which here holds all layers. Momentum costs another fp32 copy.
    """
    return optax.adafactor(
        1.0, multiply_by_parameter_scale=False, momentum=momentum, weight_decay_rate=weight_decay or None
    )


def muon(
    *,
    momentum: float = 0.95,
    b1: float = 0.9,
    b2: float = 0.99,
    weight_decay: float = 0.0,
    mu_dtype: jnp.dtype | None = None,
) -> optax.GradientTransformation:
    """Returns Muon for the matrices of the layers, AdamW (with Nesterov's momentum, as optax has it) for all else.

    Every layer's matrix is orthogonalised by itself, a projection to or from heads as the matrix between the residual
    stream and all heads' features; see `matrix_axes`. On GPUs those products are in TF32, XLA's default.

    References:
        Jordan et al., Muon: an optimizer for hidden layers in neural networks, 2024.
        Liu et al., Muon is scalable for LLM training, arXiv:2502.16982 (the scale `MUON_RMS`).
    """
    return optax.contrib.muon(
        1.0,
        beta=momentum,
        mu_dtype=mu_dtype,
        weight_decay=weight_decay,
        adam_b1=b1,
        adam_b2=b2,
        adam_weight_decay=weight_decay,
        muon_weight_dimension_numbers=matrix_axes,
        consistent_rms=MUON_RMS,
    )


OPTIMIZERS: dict[str, Callable[..., optax.GradientTransformation]] = {
    "adamw": adamw,
    "adafactor": adafactor,
    "muon": muon,
}
"""Functions of their own options, all keywords."""
ELEMENTWISE = ("adamw",)
"""Those whose new numbers are each made of the numbers at one place, and so in one pass over memory."""


def with_bf16_moment(make: Callable[..., optax.GradientTransformation]) -> optax.GradientTransformation:
    """Returns the transformation that `make` makes, with its first moment kept in bf16 between updates, in fp32 within one.

    (Optax' own `mu_dtype` rounds the decay to bf16 too: 0.999 to 1. It only makes the first state here: cast afterwards,
    that would be in memory in fp32, and leave a hole there.)
    """
    transformation = make()

    def cast(state: optax.OptState, dtype: jnp.dtype) -> optax.OptState:
        moment = jax.tree_util.GetAttrKey("mu")
        return jax.tree_util.tree_map_with_path(lambda path, x: x.astype(dtype) if moment in path else x, state)

    def update(gradients: Any, state: optax.OptState, params: Any = None) -> tuple[Any, optax.OptState]:
        directions, state = transformation.update(gradients, cast(state, jnp.float32), params)
        return directions, cast(state, jnp.bfloat16)

    return optax.GradientTransformation(make(mu_dtype=jnp.bfloat16).init, update)


def matrix_axes(params: Any) -> Any:
    """Returns input and output axes of the layers' stacked matrices; None for embeddings, head, norms and biases."""

    def axes(path, leaf):
        first, *names = (str(getattr(entry, "key", getattr(entry, "name", ""))) for entry in path)
        # A Flax variable is a node of its own above its value.
        inputs = INPUT_AXES.get(".".join(names).removesuffix(".value"))
        if first != "layers" or inputs is None:
            return None
        first_output = 1 + inputs
        return MuonDimensionNumbers(tuple(range(1, first_output)), tuple(range(first_output, leaf.ndim)))

    found = jax.tree_util.tree_map_with_path(axes, params)
    is_axes = lambda node: isinstance(node, MuonDimensionNumbers)  # noqa: E731
    some = any(is_axes(node) for node in jax.tree.leaves(found, is_leaf=is_axes))
    require(some, "--optimizer.name", "an optimizer other than muon for parameters without a layer's matrix", "muon")
    return found


SCHEDULES = ("constant", "cosine", "linear")


def learning_rate(
    schedule: str, peak: float, *, warmup_steps: int, steps: int, final_rate: float = 0.1
) -> optax.Schedule:
    """Returns the rate of update n = count + 1, which depends on n and these arguments alone.

        peak · n / W                                  up to n = W = max(warmup_steps, 1)
        peak · (final + (1 - final) · f((n - W) / (steps - W)))      from there to n = steps, constant after it

    with f(t) = 1 (constant), (1 + cos πt) / 2 (cosine) or 1 - t (linear).
    """
    warm_up = max(warmup_steps, 1)
    decay = max(steps - warm_up, 1)
    after = {
        "constant": optax.constant_schedule(peak),
        "cosine": optax.cosine_decay_schedule(peak, decay, alpha=final_rate),
        "linear": optax.linear_schedule(peak, peak * final_rate, decay),
    }[schedule]
    before = optax.linear_schedule(peak / warm_up, peak, max(warm_up - 1, 1))
    return optax.join_schedules([before, after], [warm_up - 1])


class OptimizerState(NamedTuple):
    count: Int[Array, ""]
    exact: nnx.State | None
    inner: optax.OptState


class Optimizer:
    """Global-norm clipping, a transformation of `OPTIMIZERS` at learning rate 1, and a schedule, the rate at a count."""

    def __init__(
        self,
        transformation: optax.GradientTransformation,
        schedule: optax.Schedule,
        max_grad_norm: float = 1.0,
        *,
        elementwise: bool = False,
    ) -> None:
        self.elementwise = elementwise
        self._transformation = optax.chain(optax.clip_by_global_norm(max_grad_norm), transformation)
        self._schedule = schedule

    def init(self, params: nnx.State) -> OptimizerState:
        narrow = any(leaf.dtype.itemsize < 4 for leaf in jax.tree.leaves(params))
        # Copies, also of what is fp32: a step takes over the memory of both.
        exact = jax.tree.map(lambda x: jnp.array(x, jnp.float32, copy=True), params) if narrow else None
        return OptimizerState(jnp.int32(0), exact, self._transformation.init(exact if narrow else params))

    def update(
        self, gradients: nnx.State, state: OptimizerState, params: nnx.State
    ) -> tuple[nnx.State, OptimizerState, Float[Array, ""]]:
        """Returns new parameters, in the dtypes of the old ones, the new state, and the learning rate that was applied."""
        exact = params if state.exact is None else state.exact
        directions, inner = self._transformation.update(gradients, state.inner, exact)
        rate = jnp.asarray(self._schedule(state.count), jnp.float32)
        exact = optax.apply_updates(exact, jax.tree.map(lambda direction: rate * direction, directions))
        params = jax.tree.map(lambda new, old: new.astype(old.dtype), exact, params)
        kept = None if state.exact is None else exact
        return params, OptimizerState(state.count + 1, kept, inner), rate


# fp32 rounds what is nearer to 1 up to it: Adam's moments would be divided by 1 - 1 = 0.
DECAY = Range("a decay in [0, 1), in fp32 too", lambda value: 0.0 <= value < 1.0 - 2.0**-25)


@dataclass(frozen=True)
class OptimizerConfig:
    """Optimizer. None keeps the optimizer's own value."""

    name: Annotated[str, OneOf(*OPTIMIZERS)] = "adamw"
    """Optimizer: adamw, adafactor, or muon (Muon for the layers' matrices, AdamW for embeddings, head, norms and biases).
    The same learning rate suits all three."""
    learning_rate: Annotated[float | None, Positive()] = None
    """Peak learning rate. None: 5e-4 for a new model, 1e-6 for one from disk, 1e-5 for adapters of one.
    Supervised: 1e-3, 2e-5 and 2e-4."""
    schedule: Annotated[str, OneOf(*SCHEDULES)] = "constant"
    """Learning rate from the end of warm-up to --schedule.steps: constant, cosine or linear.
    It depends on the number of the update and --schedule.steps alone, even after a resume that changes --schedule.steps."""
    warmup_steps: Annotated[int, AtLeast(0)] = 5
    """Updates of linear warm-up; the last has the peak learning rate."""
    final_rate: Annotated[float | None, Range("a share in [0, 1]", lambda share: 0.0 <= share <= 1.0)] = None
    """cosine, linear: learning rate of the last update, as a share of the peak. None: 0.1."""
    b1: Annotated[float | None, DECAY] = None
    """adamw, muon: decay of AdamW's first moment. None: 0.9."""
    b2: Annotated[float | None, DECAY] = None
    """adamw, muon: decay of AdamW's second moment. None: 0.99."""
    first_moment_dtype: Annotated[str, OneOf("float32", "bfloat16")] = "float32"
    """adamw, muon: dtype in which the first moment (Muon: the momentum too) is kept between steps.
    bfloat16 saves 2 bytes a parameter. The second moment is float32."""
    momentum: Annotated[float | None, DECAY] = None
    """muon, adafactor: decay of the momentum. None: 0.95 for muon, no momentum for adafactor."""
    weight_decay: Annotated[float, AtLeast(0.0)] = 0.0
    """Decoupled weight decay, of every parameter: norms and biases too."""
    max_grad_norm: Annotated[float, Positive()] = 1.0
    """Global gradient norm above which the gradient is scaled down."""

    def resolved(self, *, loaded: bool, adapters: bool, supervised: bool) -> "OptimizerConfig":
        """Returns the options with a learning rate: that of a new model, of one from disk, or of adapters of one."""
        if self.learning_rate is not None:
            return self
        default = (1e-5 if adapters else 1e-6) if loaded else 5e-4
        if supervised:
            default = (2e-4 if adapters else 2e-5) if loaded else 1e-3
        return replace(self, learning_rate=default)

    def optimizer(self, steps: int) -> Optimizer:
        """Returns the optimizer object; a schedule ends at `steps`, the optimizer steps of the whole run.

        Raises:
            ValueError: if the optimizer or schedule lacks a given option, or the weight decay is too large for the rate.
        """
        known = inspect.signature(OPTIMIZERS[self.name]).parameters
        given = {name: getattr(self, name) for name in ("b1", "b2", "momentum") if getattr(self, name) is not None}
        for name, value in given.items():
            expected = f"no value for optimizer {self.name!r}, which has no such option"
            require(name in known, f"--optimizer.{name}", expected, value)
        final = {} if self.final_rate is None else {"final_rate": self.final_rate}
        if final:
            expected = "None for schedule 'constant', which has no such option"
            require(self.schedule != "constant", "--optimizer.final-rate", expected, self.final_rate)
        require(self.learning_rate is not None, "--optimizer.learning-rate", "a resolved configuration", None)
        expected = f"at most {1.0 / self.learning_rate:g}, which is 1 / --optimizer.learning-rate"
        require(self.weight_decay * self.learning_rate <= 1.0, "--optimizer.weight-decay", expected, self.weight_decay)
        rate = learning_rate(self.schedule, self.learning_rate, warmup_steps=self.warmup_steps, steps=steps, **final)
        make = functools.partial(OPTIMIZERS[self.name], weight_decay=self.weight_decay, **given)
        if self.first_moment_dtype == "bfloat16":
            self._check_narrow_moment("b1" in known, given)
            transformation = with_bf16_moment(make)
        else:
            transformation = make()
        return Optimizer(transformation, rate, self.max_grad_norm, elementwise=self.name in ELEMENTWISE)

    @staticmethod
    def _check_narrow_moment(has_moment: bool, given: dict[str, float]) -> None:
        option, expected = "--optimizer.first-moment-dtype", "float32 for adafactor, whose state is float32"
        require(has_moment, option, expected, "bfloat16")
        for name in ("b1", "momentum"):
            # Neighbours in bf16 are up to 0.8 % apart: less than half of that is rounded away.
            expected = f"at most 0.98 with {option} bfloat16, where a slower decay would be none"
            require(given.get(name, 0.0) <= 0.98, f"--optimizer.{name}", expected, given.get(name))
