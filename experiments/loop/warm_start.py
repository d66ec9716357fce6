"""The warm start: supervised learning on worked answers until some of the sampled ones are right."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import numpy as np
import optax
from flax import nnx

from experiments.config import WarmStartConfig
from experiments.experience.prompts import PromptOrder, encode_prompt
from experiments.learner.backend import Backend, GradientBackend
from experiments.learner.diagnosis import explain_refusal
from experiments.learner.objectives import CrossEntropy
from experiments.learner.optimizers import Optimizer, adamw
from experiments.learner.packing import Packing
from experiments.learner.update import TrainState, Update
from experiments.runs.console import RunConsole
from experiments.runs.folder import MetricsWriter
from experiments.runs.stops import GuardAbort
from experiments.tasks import Example
from experiments.tasks.tokenizer import Tokenizer
from jaxlogp import Document

MAX_WARM_UP_STEPS = 50


class WorkedExamples:
    """Prompts with their answers as documents; all tokens of the answer are labels."""

    def __init__(self, prompts: PromptOrder, tokenizer: Tokenizer, prompt_tokens: int) -> None:
        self._prompts, self._prompt_tokens = prompts, prompt_tokens
        self.tokenizer = tokenizer

    def take(self, number: int) -> list[Document]:
        """The next documents."""
        return [self._document(example) for example in self._prompts.take(number)]

    def _document(self, example: Example) -> Document:
        prompt = encode_prompt(self.tokenizer, example, self._prompt_tokens)
        answer = [*self.tokenizer.encode(example.answer), self.tokenizer.eos_ids[0]]
        return Document.of_completion(np.array(prompt, np.int32), np.array(answer, np.int32))


def warm_start_optimizer(options: WarmStartConfig) -> Optimizer:
    """AdamW at a rate that rises to its highest and stays there."""
    warm_up = max(1, min(MAX_WARM_UP_STEPS, options.max_steps // 4))
    return Optimizer(adamw(), optax.linear_schedule(0.0, options.learning_rate, warm_up), elementwise=True)


@dataclass(frozen=True)
class WarmStart:
    """Trains on examples until the score, the share of right answers at a step, reaches the target, or max_steps."""

    options: WarmStartConfig
    backend: Backend
    examples: WorkedExamples
    packing: Packing
    score: Callable[[nnx.State, int], float]

    def run(
        self, params: nnx.State, console: RunConsole, metrics: MetricsWriter, between: Callable[[], None]
    ) -> nnx.State:
        """The trained parameters. `between` is called after every step; what it raises ends the phase.

        Raises:
            GuardAbort: a step with something that is not finite.
        """
        options, max_steps = self.options, self.options.max_steps
        if not max_steps:
            return params
        sums = self.backend.gradients(CrossEntropy(), 1.0)
        update = Update(warm_start_optimizer(options), self.backend.place, sums.compiler_options)
        state = update.init(params)
        with console.progress("warm start", max_steps, rows=10) as advance:
            for step in range(1, max_steps + 1):
                state, values = self._step(sums, update, state, step)
                if step % options.check_every == 0:
                    values["exact_match_train"] = self.score(state.params, step)
                metrics.write(step, "warm_start", values)
                advance(f"loss {values['loss']:.3f}")
                between()
                if values.get("exact_match_train", -1.0) >= options.target:
                    break
        console.say(f"warm start: {step} steps, loss {values['loss']:.3f}")
        return state.params

    def _step(
        self, sums: GradientBackend, update: Update, state: TrainState, step: int
    ) -> tuple[TrainState, dict[str, float]]:
        """One step, and its metrics."""
        rounds = self.packing.rounds(self.examples.take(self.options.batch_size))
        total = sums.accumulate(state.params, rounds, 0)
        assert total is not None, "a warm start step has at least one document"
        state, applied = update(state, total)
        if not applied.applied:
            sound = jax.device_get(applied.sound)
            found = explain_refusal(sound, state, rounds, update, sums)
            raise GuardAbort(f"warm start step {step}: {found.sentence(self.examples.tokenizer)}")
        return state, {"loss": float(applied.loss), "grad_norm": float(applied.grad_norm)}
