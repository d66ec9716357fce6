"""The learner: parameters, optimizer state and reference, and the one optimizer step that changes them."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Float

from experiments.learner.backend import Backend, CompiledSums, LabelValues
from experiments.learner.computed import of_all
from experiments.learner.diagnosis import check_documents, explain_refusal
from experiments.learner.drift import StepDrift, measure_drift
from experiments.learner.entropy_control import EntropyControl
from experiments.learner.model_source import ModelParts
from experiments.learner.moving_reference import MovingReference
from experiments.learner.objectives import Objective
from experiments.learner.optimizers import Optimizer
from experiments.learner.packing import GlobalMicroBatch, Packing
from experiments.learner.replicas import fingerprint, require_same_frozen
from experiments.learner.scoring import kl_between, log_probs_of, require_finite_scores, scores_of
from experiments.learner.selection import Selection
from experiments.learner.update import TrainState, Update, UpdateOutcome
from experiments.models.placement import bytes_a_device
from experiments.refusal import NotFinite, Refusal
from jaxlogp import Document
from jaxlogp.errors import require

REFERENCE_COLUMN = "ref_log_probs"


@dataclass(frozen=True)
class StepResult:
    """What a step has done: why its update was refused, if it was, metrics by name unless its documents were refused, and
    the drift report if one was asked for and a token tells the difference."""

    metrics: Mapping[str, Any] = field(default_factory=dict)
    refusal: Refusal | None = None
    drift: StepDrift | None = None


class LearnerState(NamedTuple):
    """Arrays and JSON of a learner, from which it goes on."""

    arrays: dict[str, Any]
    counters: dict[str, Any]


class StepNeed(NamedTuple):
    """Most bytes per device that the programs of a step take beside the state: of a micro-batch, and of the update with the
    sums, of which `sums` are the bytes. None where the compiler does not say."""

    micro_batch: int | None
    sums: int
    update: int | None


class Learner:
    """Trains parameters on documents; raises EngineUnavailable for a head that cannot run here.

    It takes over the memory of `params`, and each step that of the `state` before it. `version` is the number of documents
    seen, which names the parameters. `temperature` is the sampler's. With `skips`, documents whose advantages are all 0 are
    counted and not computed, where they change nothing else. `selection` chooses labels that learn, or whose drift is
    penalized; None takes all alike. Its keys follow from `seed` and `version`. `entropy_control` rules the coefficient of
    the entropy bonus, which the objective takes as `entropy_scale`; None for a constant bonus. `keeps_reference` keeps a
    copy of the parameters of the last `begin` for `kl_to_reference`, even if the objective has no KL; `moving_reference`
    lets it follow the policy. The reference of an objective that reads its head is `teacher`, if there is one.
    `labels` are `reduction` and `dtype` of drift reports.
    """

    def __init__(
        self,
        backend: Backend,
        objective: Objective,
        optimizer: Optimizer,
        packing: Packing,
        params: nnx.State,
        *,
        temperature: float = 1.0,
        skips: bool = False,
        selection: Selection | None = None,
        entropy_control: EntropyControl | None = None,
        seed: int = 0,
        keeps_reference: bool = False,
        moving_reference: MovingReference | None = None,
        teacher: ModelParts | None = None,
        labels: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self._backend, self._objective, self._temperature = backend, objective, temperature
        self._labels = {"vocab": backend.vocab, **labels}
        self._skips, self._selection, self._key = skips, selection, jax.random.key(seed)
        self.teacher = teacher
        reads_reference = objective.needs_reference or objective.reads_reference_head and teacher is None
        self.packing, self.keeps_reference = packing, keeps_reference or reads_reference
        self._scored_packing = replace(packing, columns=())
        reference = (REFERENCE_COLUMN,) if objective.needs_reference else ()
        self._selected_packing = replace(packing, columns=reference)
        penalized = () if selection is None or selection.column is None else (selection.column,)
        self._step_packing = replace(packing, columns=(*packing.columns, *reference, *penalized))
        self.gradients = backend.gradients(objective, temperature, teacher)
        self._update = Update(optimizer, backend.place, self.gradients.compiler_options)
        self.state = self._update.init(params)
        self.reference: nnx.State | None = None
        self._moving_reference, self._reference_age = moving_reference, 0
        self.version = 0
        self._entropy_control = entropy_control
        self.entropy_coefficient = None if entropy_control is None else entropy_control.first
        self.gradients.trace(self.state.params, self._step_packing.padding())

    def lower(self) -> Callable[[], StepNeed]:
        """Lowers the programs of a micro-batch; what is returned compiles them and that of the update."""
        lowered = self.gradients.lower(self.state.params, self._step_packing.padding())
        return functools.partial(self._compiled, lowered)

    def _compiled(self, lowered: Callable[[], CompiledSums]) -> StepNeed:
        _, micro_batch, sums = lowered()
        update = self._update.ahead(self.state, sums)
        return StepNeed(micro_batch, bytes_a_device(sums), update.bytes_beside(bytes_a_device(self.state)))

    def begin(self, params: nnx.State) -> None:
        """Goes on from other parameters, which are the reference, with a fresh optimizer state."""
        self.state = self._update.init(params)
        self.keep_reference()

    def keep_reference(self) -> None:
        """Takes the present parameters as the reference, where one is kept."""
        # A copy: the next step takes over the memory of the parameters.
        self.reference = jax.tree.map(jnp.copy, self.state.params) if self.keeps_reference else None
        self._reference_age = 0

    def release(self) -> nnx.State:
        """Gives the parameters away, without optimizer state, to a phase with an optimizer of its own, until `begin`."""
        params = self.state.params
        self.state = TrainState(params, None)
        return params

    def step(self, documents: Sequence[Document], *, report_drift: bool = False) -> StepResult:
        """Takes one optimizer step, or refuses it: whatever is not finite, the state stays as it is."""
        try:
            documents = self._with_reference(documents)
            check_documents(documents)
            documents = self._with_selection(documents)
        except NotFinite as error:
            return StepResult(refusal=error.refusal.explained_by(self.fault()))
        if self._skips:
            computed, rounds = self.gradients.without_zeros(documents, self._step_packing)
        else:
            computed, rounds = documents, self._step_packing.rounds(documents)
        constants = self._objective.constants(documents)
        if self.entropy_coefficient is not None:
            constants = constants._replace(entropy_scale=np.asarray(self.entropy_coefficient, np.float32))
        if self._objective.reads_reference_head:
            constants = constants._replace(reference=self.reference)
        observed: list[tuple[GlobalMicroBatch, LabelValues]] = []
        observe = (lambda *each: observed.append(each)) if report_drift else None
        of_step = (self.version, constants, observe)
        total = self.gradients.accumulate(self.state.params, rounds, *of_step)
        if total is None:
            # No document is computed: the sums of padding are 0.
            total = self.gradients.accumulate(self.state.params, [self._step_packing.padding()], *of_step)
        assert total is not None, "padding is a round"
        count = self._objective.count(documents)
        self.state, outcome = self._update(self.state, total, count - self._objective.count(computed))
        outcome = jax.device_get(outcome)
        drift = self._drift(documents, observed) if observed else None
        refusal = None
        if not outcome.applied:
            refusal = explain_refusal(outcome.sound, self.state, documents, rounds, self._update, self.gradients)
        metrics = self._metrics(outcome)
        if self._skips:
            metrics = of_all(metrics, documents, count, self.version)
        self.version += len(documents)
        counts = {"num_documents": len(documents), "micro_batches": len(rounds)}
        counts["tokens"] = sum(document.tokens.size for document in documents)
        if self._selection is not None:
            counts["selected_fraction"] = self._selection.fraction(documents)
        metrics |= self._facts(outcome) | counts
        if self._entropy_control is not None and self.entropy_coefficient is not None:
            metrics["entropy_coefficient"] = self.entropy_coefficient
            # A refused step leaves the state as it is, and the entropy of one may not be finite.
            if outcome.applied:
                self.entropy_coefficient = self._entropy_control.after(self.entropy_coefficient, metrics)
        if self._moving_reference is not None and self.reference is not None:
            metrics["reference_age"] = self._reference_age
            if outcome.applied:
                moved = self._moving_reference.after(self._reference_age + 1, self.reference, self.state.params)
                self._reference_age, self.reference = moved
        return StepResult(metrics, refusal, drift)

    def log_probs(self, documents: Sequence[Document]) -> list[Float[np.ndarray, " labels"]]:
        """Returns log-probs of each document's labels under the present parameters, in nats; NotFinite if some are not."""
        found = log_probs_of(documents, self.gradients, self.state.params, self._scored_packing)
        require_finite_scores("trainer", documents, found)
        return found

    def reference_log_probs(self, documents: Sequence[Document]) -> list[Float[np.ndarray, " labels"]]:
        """Returns log-probs under the reference, in nats; ValueError if none is kept, NotFinite if some are not."""
        expected = "a run that keeps one (--evaluation.kl, or a KL in the loss or the reward)"
        require(self.reference is not None, "reference", expected, "none")
        scores = log_probs_of(documents, self.gradients, self.reference, self._scored_packing)
        require_finite_scores("reference", documents, scores)
        return scores

    def kl_to_reference(self, documents: Sequence[Document]) -> float:
        """Returns KL(policy ‖ reference) at temperature 1 over the whole vocabulary, in nats per sampled token."""
        gradients, packing = self.gradients, replace(self._scored_packing, support_capacity=None)
        if self._temperature != 1.0:
            gradients = self._backend.gradients(self._objective, 1.0)
        both = (self.state.params, self.reference)
        return kl_between(*(log_probs_of(documents, gradients, params, packing) for params in both))

    def fault(self) -> str | None:
        """Returns a phrase that names what of parameters and optimizer state is not finite; None where all is."""
        return self._update.first_non_finite(self.state)

    def mismatch(self) -> str | None:
        """Returns a phrase that names a part of the state of which devices hold different copies; None where all agree."""
        return self._backend.replicas.first_mismatch(self.state._asdict())

    def saved(self) -> LearnerState:
        """Returns what a checkpoint holds: parameters, optimizer state, and the reference where there is one; as JSON the
        version, a fingerprint of what is not trained, a controlled entropy coefficient, and a moving reference's age."""
        counters = {"version": self.version, "frozen": fingerprint(self._backend.frozen)}
        if self.entropy_coefficient is not None:
            counters["entropy_coefficient"] = self.entropy_coefficient
        if self._moving_reference is not None:
            counters["reference_age"] = self._reference_age
        if self.teacher is not None:
            counters["teacher"] = self._teacher_fingerprint
        return LearnerState(self._arrays(), counters)

    def template(self) -> dict[str, Any]:
        """Returns arrays of the shapes and places of those to restore."""
        arrays = self._arrays()
        return {**arrays, "reference": arrays["params"]} if self.keeps_reference else arrays

    def restore(self, arrays: Mapping[str, Any], counters: Mapping[str, Any]) -> None:
        """Takes over what `saved` returned; ValueError if what is not trained differs."""
        require_same_frozen(counters, self._backend.frozen)
        same = counters.get("teacher") == (None if self.teacher is None else self._teacher_fingerprint)
        require(same, "--loss.teacher", "the parameters that the run began with", "others")
        params, opt_state = self.state.params, self.state.opt_state
        opt_leaves = [leaf for _, leaf in sorted(arrays["opt_state"].items())]
        opt_state = jax.tree.unflatten(jax.tree.structure(opt_state), opt_leaves)
        self.state = self._update.place(TrainState(_like(params, arrays["params"]), opt_state))
        saved = arrays.get("reference")
        self.reference = None if saved is None else self._backend.place(_like(params, saved))
        self.version = counters["version"]
        if self._entropy_control is not None:
            self.entropy_coefficient = counters["entropy_coefficient"]
        if self._moving_reference is not None:
            self._reference_age = counters["reference_age"]

    @functools.cached_property
    def _teacher_fingerprint(self) -> list[int]:
        assert self.teacher is not None, "the run has one"
        return fingerprint(self.teacher.params)

    def _arrays(self) -> dict[str, Any]:
        leaves = jax.tree.leaves(self.state.opt_state)
        arrays = {
            "params": nnx.to_pure_dict(self.state.params),
            "opt_state": {f"{index:04d}": leaf for index, leaf in enumerate(leaves)},
        }
        return arrays if self.reference is None else {**arrays, "reference": nnx.to_pure_dict(self.reference)}

    def _with_reference(self, documents: Sequence[Document]) -> Sequence[Document]:
        if not self._objective.needs_reference:
            return documents
        pairs = zip(documents, self.reference_log_probs(documents), strict=True)
        return [replace(each, columns={**each.columns, REFERENCE_COLUMN: values}) for each, values in pairs]

    def _with_selection(self, documents: Sequence[Document]) -> Sequence[Document]:
        selection, params = self._selection, self.state.params
        if selection is None:
            return documents
        program = self.gradients.entropies if selection.reads_entropy else self.gradients.score
        scores = scores_of(documents, functools.partial(program, params), self._selected_packing)
        name = "entropies" if selection.reads_entropy else "log-probs"
        require_finite_scores("trainer", documents, scores, name)
        return selection(documents, scores, jax.random.fold_in(self._key, self.version))

    def _drift(
        self, documents: Sequence[Document], observed: list[tuple[GlobalMicroBatch, LabelValues]]
    ) -> StepDrift | None:
        return measure_drift(documents, observed, self.version, head=self.gradients.head_run, **self._labels)

    def _metrics(self, outcome: UpdateOutcome) -> dict[str, Any]:
        drift = None if np.isneginf(outcome.drift) else float(outcome.drift)
        return {name: value.item() for name, value in outcome.metrics.items()} | {"drift_max": drift}

    def _facts(self, outcome: UpdateOutcome) -> dict[str, Any]:
        head_run = self.gradients.head_run
        assert head_run is not None, "a micro-batch has been traced"
        return {
            "loss": float(outcome.loss),
            "grad_norm": float(outcome.grad_norm),
            "learning_rate": float(outcome.learning_rate),
            "head_path": head_run.path,
            "head_engine": head_run.engine,
            "head_reason": head_run.reason,
            "head_gradient": head_run.gradient,
        }


def _like(params: nnx.State, arrays: Any) -> nnx.State:
    return jax.tree.unflatten(jax.tree.structure(params), jax.tree.leaves(arrays))
