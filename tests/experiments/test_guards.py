"""Numbers that cannot be trained on, planted in one small trainer: the state keeps every bit, and the culprit is named."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments.config import OptimizerConfig
from experiments.learner.backend import StepGradient
from experiments.learner.optimizers import Optimizer, adamw
from experiments.learner.soundness import path_name
from experiments.learner.update import TrainState, Update
from experiments.sampling.policy import SamplerPolicy
from experiments.tasks.rewards import RewardFailed
from experiments.training.queue import DocumentQueue
from experiments.training.run import set_up
from jaxlogp import PolicyMetricTerms, StepSums, WeightedSum
from tests.experiments.tiny import tiny

HEAD = "lm_head/weight"


class Verifier:
    """A reward that an untrained model earns half of the time, until something else is wanted."""

    __name__ = "odd"

    def __init__(self):
        self.answer = None

    def __call__(self, example, completion):
        if self.answer is not None:
            return self.answer()
        return float(ord(completion[0]) % 2) if completion else 0.0


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A trainer after one step, so that no moment of its optimizer is zero, and its reward."""
    verifier = Verifier()
    out = tmp_path_factory.mktemp("guards")
    trainer = set_up(tiny(out, "run", warm_start={"max_steps": 0}), reward=verifier).trainer
    assert trainer.train_step().refusal is None
    return trainer, verifier


@pytest.fixture
def trainer(made):
    """The same with its first state, and a reward that works."""
    trainer, verifier = made
    kept = jax.tree.map(jnp.copy, trainer.learner.state)
    yield trainer
    trainer.learner.state, verifier.answer = kept, None
    trainer.progress.refused = 0


def state_bytes(trainer):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(trainer.learner.state)]


def refusal(trainer):
    """What the next step is refused for; no bit of the state may have changed, nor may any count but that of steps."""
    before, counts = state_bytes(trainer), (trainer.progress.step, trainer.progress.refused)
    result = trainer.train_step()
    assert state_bytes(trainer) == before
    assert result.metrics["update_applied"] == 0 and result.metrics["refused"] == result.refusal
    assert (trainer.progress.step, trainer.progress.refused) == (counts[0] + 1, counts[1] + 1)
    return result.refusal


def planted(tree, name, value):
    """The tree with one element of the leaf `name` replaced."""

    def leaf(path, x):
        return x.at[(0,) * x.ndim].set(value) if path_name(path).endswith(name) else x

    return jax.tree_util.tree_map_with_path(leaf, tree)


def in_state(trainer, part, name, value):
    trainer.learner.state = trainer.learner.state._replace(
        **{part: planted(getattr(trainer.learner.state, part), name, value)}
    )


PLANTS = {
    "a parameter": ("params", HEAD, np.nan, f"parameters not finite in {HEAD}"),
    "an infinite parameter": (
        "params",
        "layers/q_proj/kernel",
        np.inf,
        "parameters not finite in layers/q_proj/kernel",
    ),
    "a first moment": (
        "opt_state",
        f"mu/{HEAD}",
        np.nan,
        f"optimizer state negative or not finite in inner/1/0/mu/{HEAD}",
    ),
    "a negative second moment": (
        "opt_state",
        f"nu/{HEAD}",
        -1.0,
        f"optimizer state negative or not finite in inner/1/0/nu/{HEAD}",
    ),
    "an infinite second moment": (
        "opt_state",
        f"nu/{HEAD}",
        np.inf,
        f"optimizer state negative or not finite in inner/1/0/nu/{HEAD}",
    ),
}


@pytest.mark.parametrize("name", PLANTS)
def test_a_state_that_cannot_be_trained_on_is_named_and_stays_as_it_is(trainer, name):
    part, leaf, value, words = PLANTS[name]
    assert trainer.learner.fault() is None
    in_state(trainer, part, leaf, value)
    assert refusal(trainer) == words and trainer.learner.fault() == words


def with_sums(monkeypatch, trainer, change):
    """The sums of the next step, changed."""
    plain = trainer.learner.gradients.accumulate

    def accumulate(*arguments):
        total = plain(*arguments)
        return total._replace(sums=change(total.sums))

    monkeypatch.setattr(trainer.learner.gradients, "accumulate", accumulate)


def test_a_gradient_is_named_by_its_leaf(trainer, monkeypatch):
    def change(sums):
        return dataclasses.replace(sums, gradients=planted(sums.gradients, "layers/up_proj/kernel", np.nan))

    with_sums(monkeypatch, trainer, change)
    assert refusal(trainer) == "gradient not finite in layers/up_proj/kernel"


def test_many_leaves_are_counted(trainer, monkeypatch):
    def change(sums):
        return dataclasses.replace(sums, gradients=jax.tree.map(lambda x: x * np.inf, sums.gradients))

    with_sums(monkeypatch, trainer, change)
    named = "embed_tokens/embedding, layers/down_proj/kernel, layers/gate_proj/kernel"
    assert refusal(trainer) == f"gradient not finite in {named} and 11 more leaves"


def test_a_norm_that_overflows(trainer, monkeypatch):
    def change(sums):
        return dataclasses.replace(sums, gradients=jax.tree.map(lambda x: jnp.full_like(x, 1e30), sums.gradients))

    with_sums(monkeypatch, trainer, change)
    assert refusal(trainer).startswith("norm of the gradient not finite: its square overflows")


def test_a_loss(trainer, monkeypatch):
    with_sums(
        monkeypatch,
        trainer,
        lambda sums: dataclasses.replace(sums, loss=WeightedSum(jnp.float32(np.inf), jnp.int32(1))),
    )
    assert refusal(trainer) == "loss not finite, of finite log-probs"


def spoilt(document, name, value):
    """The document, which was sound when it was made, with the value in its first label."""
    if name == "advantages":
        object.__setattr__(document, name, value)
    else:
        object.__setattr__(document, name, np.array([value, *document.sampler_log_probs[1:]]))


@pytest.mark.parametrize(("name", "words"), [("sampler_log_probs", "old log-probs"), ("advantages", "advantages")])
# The last one is finite, until it is fp32.
@pytest.mark.parametrize("value", [np.nan, np.inf, 1e39])
def test_what_a_document_brings_is_named_with_its_prompt(trainer, monkeypatch, name, words, value):
    plain = DocumentQueue.add
    prompts = []

    def poisoned(queue, documents):
        document = documents[3]
        prompts.append(trainer.tokenizer.decode(document.tokens[: document.label_positions[0]].tolist()))
        spoilt(document, name, value)
        plain(queue, documents)

    monkeypatch.setattr(DocumentQueue, "add", poisoned)
    found = refusal(trainer)
    (prompt,) = prompts
    assert len(prompt) > 2 and found == f"{words} not finite in document 3 (prompt {prompt!r})"


def test_log_probs_of_the_sampler_are_named_with_prompts(trainer, monkeypatch):
    plain, seen = SamplerPolicy.generate, []

    def poisoned(policy, prompts, options, *, copies, **rest):
        drawn = plain(policy, prompts, options, copies=copies, **rest)
        for number in (2, 5, 7, 11):
            drawn[number] = drawn[number]._replace(log_probs=np.full_like(drawn[number].log_probs, np.nan))
        seen.extend(trainer.tokenizer.decode(prompts[number // copies]) for number in (2, 5, 7))
        return drawn

    monkeypatch.setattr(SamplerPolicy, "generate", poisoned)
    found = refusal(trainer)
    two, five, seven = seen
    assert found == (
        f"log-probs of the sampler not finite in document 2 (prompt {two!r}), document 5 (prompt {five!r}), "
        f"document 7 (prompt {seven!r}) and 1 more"
    )


def test_log_probs_of_the_trainer_are_named_with_prompts(trainer, monkeypatch):
    """Of a step whose loss is not finite they are computed again."""
    plain = trainer.learner.gradients.score

    def poisoned(params, scored):
        log_probs = np.array(plain(params, scored))
        log_probs[0, 0, np.flatnonzero(scored.micro_batch(0).mask[0])[0]] = -np.inf
        return log_probs

    monkeypatch.setattr(trainer.learner.gradients, "score", poisoned)
    with_sums(
        monkeypatch,
        trainer,
        lambda sums: dataclasses.replace(sums, loss=WeightedSum(jnp.float32(np.nan), jnp.int32(1))),
    )
    assert refusal(trainer).startswith("log-probs of the trainer not finite in document 0 (prompt '")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), np.float32("nan"), 1e39])
def test_a_reward_that_is_not_finite_refuses_the_step(trainer, made, value):
    made[1].answer = lambda: value
    found = refusal(trainer)
    assert found.startswith("reward 'odd': expected a finite number for document 0 (prompt '") and repr(value) in found
    made[1].answer = None
    assert trainer.train_step().metrics["update_applied"] == 1 and trainer.progress.refused == 0


@pytest.mark.bad_input
def test_a_reward_that_raises_leaves_everything_as_before_the_step(trainer, made):
    def broken():
        raise KeyError("answer")

    made[1].answer = broken
    before = state_bytes(trainer), trainer.source.state(), trainer.progress.step
    with pytest.raises(
        RewardFailed, match=r"^reward 'odd': expected a finite number for document 0 .*, got KeyError: 'answer'$"
    ):
        trainer.train_step()
    assert before == (state_bytes(trainer), trainer.source.state(), trainer.progress.step)


def sums_of(gradient):
    """The sums of a step with one parameter."""
    parts = StepSums({"w": jnp.float32(gradient)}, WeightedSum(jnp.float32(1), jnp.int32(1)), PolicyMetricTerms({}))
    return StepGradient(parts, jnp.float32(0))


@pytest.mark.parametrize("elementwise", [True, False])
@pytest.mark.parametrize(
    ("weight_decay", "max_grad_norm", "gradient", "words"),
    [
        (-1e3, 1.0, 1.0, ("params", "w")),
        (0.0, 1e38, 1e21, ("opt_state", "nu")),
    ],
)
def test_what_an_update_would_make_is_checked_before_it_counts(
    weight_decay, max_grad_norm, gradient, words, elementwise
):
    options = {"max_grad_norm": max_grad_norm, "elementwise": elementwise}
    optimizer = Optimizer(adamw(weight_decay=weight_decay), optax.constant_schedule(1.0), **options)
    update = Update(optimizer, lambda tree: jax.device_put(tree))
    state = update.init({"w": jnp.float32(1e36)})
    before = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)]
    state, applied = update(state, sums_of(gradient))
    assert [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)] == before
    part, _ = words
    assert not applied.applied and applied.sound.gradients.all() and applied.sound.norm
    assert not getattr(applied.sound, part).all()


@functools.cache
def unchecked(optimizer):
    """The update as it would be without a check."""

    def step(state, total):
        params, opt_state, _ = optimizer.update(total.sums.finish().gradients, state.opt_state, state.params)
        return TrainState(params, opt_state)

    return jax.jit(step)


@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_the_checks_change_no_bit_of_a_good_step(name):
    optimizer = OptimizerConfig(name=name, weight_decay=0.1, learning_rate=1e-2).optimizer(5)
    assert optimizer.elementwise == (name == "adamw")
    update = Update(optimizer, lambda tree: jax.device_put(tree))
    random = np.random.default_rng(0)
    params = {
        "w": jnp.asarray(random.normal(size=(64, 33)), jnp.float32),
        "b": jnp.asarray(random.normal(size=7), jnp.float32),
    }
    state, plain = update.init(params), update.init(jax.tree.map(jnp.copy, params))
    for _ in range(5):
        gradients = jax.tree.map(lambda x: jnp.asarray(random.normal(size=x.shape), jnp.float32), params)
        parts = StepSums(gradients, WeightedSum(jnp.float32(1), jnp.int32(3)), PolicyMetricTerms({}))
        total = StepGradient(parts, jnp.float32(0))
        plain = unchecked(optimizer)(plain, total)
        state, applied = update(state, total)
        assert applied.applied
        for mine, other in zip(jax.tree.leaves(state), jax.tree.leaves(plain), strict=True):
            np.testing.assert_array_equal(mine, other)
