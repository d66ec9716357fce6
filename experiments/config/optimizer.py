"""Options of the optimizer."""

import dataclasses
import inspect
from dataclasses import dataclass

from experiments.learner.optimizers import ELEMENTWISE, OPTIMIZERS, SCHEDULES, Optimizer, learning_rate
from jaxlogp.errors import require


@dataclass(frozen=True)
class OptimizerConfig:
    """Optimizer. None keeps the optimizer's own value."""

    name: str = "adamw"
    """Optimizer: adamw, adafactor, or muon (Muon for the layers' matrices, AdamW for embeddings, head, norms and biases).
    The same learning rate suits all three."""
    learning_rate: float | None = None
    """Peak learning rate. None: 5e-4 for a new model, 1e-6 for one from disk, 1e-5 for adapters of one.
    Supervised: 1e-3, 2e-5 and 2e-4."""
    schedule: str = "constant"
    """Learning rate from the end of warm-up to --schedule.steps: constant, cosine or linear.
    It depends on the number of the update and --schedule.steps alone, even after a resume that changes --schedule.steps."""
    warmup_steps: int = 5
    """Updates of linear warm-up; the last has the peak learning rate."""
    final_rate: float | None = None
    """cosine, linear: learning rate of the last update, as a share of the peak. None: 0.1."""
    b1: float | None = None
    """adamw, muon: decay of AdamW's first moment. None: 0.9."""
    b2: float | None = None
    """adamw, muon: decay of AdamW's second moment. None: 0.99."""
    momentum: float | None = None
    """muon, adafactor: decay of the momentum. None: 0.95 for muon, no momentum for adafactor."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    max_grad_norm: float = 1.0
    """Global gradient norm above which the gradient is scaled down."""

    def resolved(self, *, loaded: bool, adapters: bool, supervised: bool) -> "OptimizerConfig":
        """Returns the options with a learning rate: that of a new model, of one from disk, or of adapters of one."""
        if self.learning_rate is not None:
            return self
        default = (1e-5 if adapters else 1e-6) if loaded else 5e-4
        if supervised:
            default = (2e-4 if adapters else 2e-5) if loaded else 1e-3
        return dataclasses.replace(self, learning_rate=default)

    def optimizer(self, steps: int) -> Optimizer:
        """Returns the optimizer object; a schedule ends at `steps`, the optimizer steps of the whole run.

        Raises:
            ValueError: if a name is unknown, the optimizer or schedule lacks a given option, or a value is out of range.
        """
        for option, choices in (("name", tuple(OPTIMIZERS)), ("schedule", SCHEDULES)):
            value = getattr(self, option)
            require(value in choices, f"--optimizer.{option}", f"one of {', '.join(choices)}", value)
        known = inspect.signature(OPTIMIZERS[self.name]).parameters
        given = {name: getattr(self, name) for name in ("b1", "b2", "momentum") if getattr(self, name) is not None}
        for name, value in given.items():
            expected = f"None for optimizer {self.name!r}, which has no such option"
            require(name in known, f"--optimizer.{name}", expected, value)
            require(0.0 <= value < 1.0, f"--optimizer.{name}", "a decay in [0, 1)", value)
        final = {} if self.final_rate is None else {"final_rate": self.final_rate}
        if final:
            expected = "None for schedule 'constant', which has no such option"
            require(self.schedule != "constant", "--optimizer.final-rate", expected, self.final_rate)
            require(0.0 <= self.final_rate <= 1.0, "--optimizer.final-rate", "a share in [0, 1]", self.final_rate)
        require(self.learning_rate is not None, "--optimizer.learning-rate", "a resolved configuration", None)
        expected = f"at most {1.0 / self.learning_rate:g}, which is 1 / --optimizer.learning-rate"
        require(self.weight_decay * self.learning_rate <= 1.0, "--optimizer.weight-decay", expected, self.weight_decay)
        rate = learning_rate(self.schedule, self.learning_rate, warmup_steps=self.warmup_steps, steps=steps, **final)
        transformation = OPTIMIZERS[self.name](weight_decay=self.weight_decay, **given)
        return Optimizer(transformation, rate, self.max_grad_norm, elementwise=self.name in ELEMENTWISE)
