"""The warm start: supervised learning on worked answers until some of the sampled ones are right."""

from collections.abc import Callable

import jax
import numpy as np
import optax
from flax import nnx

from experiments.config import WarmStartConfig
from experiments.runs.console import RunConsole
from experiments.runs.folder import MetricsWriter
from experiments.runs.stops import GuardAbort
from experiments.sampling.prompts import PromptOrder, Sizes, encode_prompt
from experiments.sampling.stream import Packing
from experiments.tasks import Example
from experiments.tasks.tokenizer import Tokenizer
from experiments.training.diagnosis import why_refused
from experiments.training.optimizers import Optimizer, adamw
from experiments.training.sums import GradientSums
from experiments.training.update import Update
from jaxlogp import Document

MAX_WARM_UP_STEPS = 50


def warm_start(
    params: nnx.State,
    sums: GradientSums,
    documents: Callable[[int], list[Document]],
    packing: Packing,
    options: WarmStartConfig,
    score: Callable[[nnx.State, int], float],
    console: RunConsole,
    metrics: MetricsWriter,
    between: Callable[[], None],
    tokenizer: Tokenizer,
) -> nnx.State:
    """Trains until the score reaches the target, or max_steps.

    Args:
      params: parameters to begin with.
      sums: gradient sums of cross-entropy.
      documents: returns the next n worked examples.
      packing: makes rounds of them.
      options: the resolved options of this phase.
      score: share of right answers with given parameters, at a step.
      console: shows the progress.
      metrics: where records are written.
      between: called after every step; what it raises ends the phase.
      tokenizer: shows prompts.

    Returns:
      The parameters.

    Raises:
      GuardAbort: a step with something that is not finite.
    """
    max_steps = options.max_steps
    if not max_steps:
        return params
    warm_up = max(1, min(MAX_WARM_UP_STEPS, max_steps // 4))
    schedule = optax.linear_schedule(0.0, options.learning_rate, warm_up)
    update = Update(Optimizer(adamw(), schedule, elementwise=True), sums.place, sums.compiler_options)
    state = update.init(params)
    with console.progress("warm start", max_steps) as advance:
        for step in range(1, max_steps + 1):
            rounds = packing.rounds(documents(options.batch_size))
            total = sums.sums_of(state.params, rounds, 0)
            assert total is not None, "a warm start step has at least one document"
            state, applied = update(state, total)
            values = {"loss": float(applied.loss), "grad_norm": float(applied.grad_norm)}
            if not applied.applied:
                found = why_refused(jax.device_get(applied.sound), state, rounds, update, sums, tokenizer)
                raise GuardAbort(f"warm start step {step}: {found}")
            if step % options.check_every == 0:
                values["exact_match_train"] = score(state.params, step)
            metrics.write(step, "warm_start", values)
            advance(f"loss {values['loss']:.3f}")
            between()
            if values.get("exact_match_train", -1.0) >= options.target:
                break
    console.say(f"warm start: {step} steps, loss {values['loss']:.3f}")
    return state.params


class WorkedExamples:
    """Prompts with their answers as documents; all tokens of the answer are labels."""

    def __init__(self, prompts: PromptOrder, tokenizer: Tokenizer, sizes: Sizes) -> None:
        self._prompts, self._tokenizer, self._sizes = prompts, tokenizer, sizes

    def take(self, number: int) -> list[Document]:
        """The next documents."""
        return [self._document(example) for example in self._prompts.take(number)]

    def _document(self, example: Example) -> Document:
        prompt = encode_prompt(self._tokenizer, example, self._sizes)
        answer = [*self._tokenizer.encode(example.answer), self._tokenizer.eos_ids[0]]
        tokens = np.array(prompt + answer, np.int32)
        return Document(tokens, len(prompt), np.zeros(len(answer), np.float32), advantage=0.0)
