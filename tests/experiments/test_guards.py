"""Numbers that cannot be trained on, planted in one small run: the state keeps every bit, and the culprit is named."""

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
from experiments.learner.soundness import finite_leaves, name_non_finite, path_name
from experiments.learner.update import TrainState, Update
from experiments.loop.loop import take_step
from experiments.loop.queue import DocumentQueue
from experiments.loop.run import set_up
from experiments.loop.run_parts import UserParts
from experiments.sampling.policy import SamplerPolicy
from experiments.tasks.rewards import RewardFailed
from jaxlogp import PolicyMetricTerms, StepSums, WeightedSum
from tests.experiments.tiny import parity, tiny

HEAD = "lm_head/weight"


class Verifier:
    """The parity, until something else is wanted."""

    __name__ = "odd"

    def __init__(self):
        self.answer = None

    def __call__(self, example, completion):
        return parity(example, completion) if self.answer is None else self.answer()


class Run:
    """Everything for steps, without a run folder."""

    def __init__(self, setup):
        self.setup, self.feed, self.learner, self.tokenizer = setup, setup.feed(), setup.learner, setup.tokenizer

    def step(self):
        """What the next step has done."""
        return take_step(self.setup, self.feed)[0]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run after one step, so that no moment of its optimizer is zero, and its reward."""
    verifier = Verifier()
    out = tmp_path_factory.mktemp("guards")
    run = Run(set_up(tiny(out, "run", warm_start={"max_steps": 0}), UserParts(reward=verifier)).setup)
    assert run.step().refusal is None
    return run, verifier


@pytest.fixture
def run(made):
    """The same with its first state, and a reward that works."""
    run, verifier = made
    kept = jax.tree.map(jnp.copy, run.learner.state)
    yield run
    run.learner.state, verifier.answer = kept, None


def state_bytes(run):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(run.learner.state)]


def refusal(run):
    """What the next step is refused for; no bit of the state may have changed."""
    before = state_bytes(run)
    result = run.step()
    assert state_bytes(run) == before
    return result.refusal.sentence(run.tokenizer)


def planted(tree, name, value):
    """The tree with one element of the leaf `name` replaced."""

    def leaf(path, x):
        return x.at[(0,) * x.ndim].set(value) if path_name(path).endswith(name) else x

    return jax.tree_util.tree_map_with_path(leaf, tree)


def in_state(run, part, name, value):
    run.learner.state = run.learner.state._replace(**{part: planted(getattr(run.learner.state, part), name, value)})


PLANTS = {
    "a parameter": ("params", HEAD, np.nan),
    "an infinite parameter": ("params", "layers/q_proj/kernel", np.inf),
    "a first moment": ("opt_state", f"mu/{HEAD}", np.nan),
    "a negative second moment": ("opt_state", f"nu/{HEAD}", -1.0),
    "an infinite second moment": ("opt_state", f"nu/{HEAD}", np.inf),
}


@pytest.mark.parametrize("name", PLANTS)
def test_a_state_that_cannot_be_trained_on_is_named_and_stays_as_it_is(run, name):
    part, leaf, value = PLANTS[name]
    moments = f"optimizer state negative or not finite in inner/1/0/{leaf}"
    words = f"parameters not finite in {leaf}" if part == "params" else moments
    assert run.learner.fault() is None
    in_state(run, part, leaf, value)
    assert refusal(run) == words and run.learner.fault() == words


@pytest.mark.parametrize("leaf", ["v_row/w", "v_col/w", "v/b"])
def test_a_negative_second_moment_of_adafactor_is_not_sound(leaf):
    optimizer = OptimizerConfig(name="adafactor", learning_rate=1.0).optimizer(5)
    shapes = jax.eval_shape(optimizer.init, {"w": np.ones((128, 128), np.float32), "b": np.ones(2, np.float32)})

    def sound(value):
        named = lambda path: path_name(path).endswith(leaf)  # noqa: E731
        full = lambda path, x: np.full(x.shape, value if named(path) else 0, x.dtype)  # noqa: E731
        return finite_leaves(jax.tree_util.tree_map_with_path(full, shapes))

    assert sound(0.0).all() and np.sum(~sound(-1.0)) == 1


def test_three_leaves_are_all_named():
    found = name_non_finite("gradient", dict.fromkeys("abc", 0), np.zeros(3, bool))
    assert found == "gradient not finite in a, b, c"


def with_sums(monkeypatch, run, **changes):
    """The sums of the next step, with fields changed by functions."""
    plain = run.learner.gradients.accumulate

    def accumulate(*arguments):
        total = plain(*arguments)
        changed = {name: change(getattr(total.sums, name)) for name, change in changes.items()}
        return total._replace(sums=dataclasses.replace(total.sums, **changed))

    monkeypatch.setattr(run.learner.gradients, "accumulate", accumulate)


NAMED = "embed_tokens/embedding, layers/down_proj/kernel, layers/gate_proj/kernel"
OVERFLOW = "norm of the gradient not finite: its square overflows, while every leaf is finite"
GRADIENTS = {
    "gradient not finite in layers/up_proj/kernel": lambda tree: planted(tree, "layers/up_proj/kernel", np.nan),
    f"gradient not finite in {NAMED} and 11 more leaves": lambda tree: jax.tree.map(lambda x: x * np.inf, tree),
    OVERFLOW: lambda tree: jax.tree.map(lambda x: jnp.full_like(x, 1e30), tree),
}


@pytest.mark.parametrize("words", GRADIENTS)
def test_a_gradient_is_named_by_its_leaves(run, monkeypatch, words):
    with_sums(monkeypatch, run, gradients=GRADIENTS[words])
    assert refusal(run) == words


def loss_of(value):
    return lambda _: WeightedSum(jnp.float32(value), jnp.int32(1))


def test_a_loss(run, monkeypatch):
    with_sums(monkeypatch, run, loss=loss_of(np.inf))
    assert refusal(run) == "loss not finite, of finite log-probs"


def spoilt(document, name, value):
    """The document, which was sound when it was made, with the value in its first label."""
    if name in ("advantages", "reward"):
        object.__setattr__(document, name, value)
    else:
        object.__setattr__(document, name, np.array([value, *document.sampler_log_probs[1:]]))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("sampler_log_probs", "old log-probs"),
        # Beside old ones, which ratios are taken to: weights of a correction read them.
        ("sampler_log_probs", "log-probs of the sampler"),
        ("advantages", "advantages"),
        ("reward", "rewards"),
    ],
)
# The last one is finite, until it is fp32.
@pytest.mark.parametrize("value", [np.nan, np.inf, 1e39])
def test_what_a_document_brings_is_named_with_its_prompt(run, monkeypatch, name, words, value):
    plain = DocumentQueue.add
    prompts = []

    def poisoned(queue, documents):
        document = documents[3]
        prompts.append(run.tokenizer.decode(document.tokens[: document.label_positions[0]].tolist()))
        if words == "log-probs of the sampler":
            object.__setattr__(document, "old_log_probs", document.sampler_log_probs)
        spoilt(document, name, value)
        plain(queue, documents)

    monkeypatch.setattr(DocumentQueue, "add", poisoned)
    found = refusal(run)
    (prompt,) = prompts
    assert len(prompt) > 2 and found == f"{words} not finite in document 3 (prompt {prompt!r})"


def test_a_state_is_named_before_documents(run, monkeypatch):
    """What is not finite in them may come of it."""
    plain = DocumentQueue.add
    in_state(run, "opt_state", f"mu/{HEAD}", np.nan)
    monkeypatch.setattr(
        DocumentQueue, "add", lambda queue, given: spoilt(given[3], "reward", np.nan) or plain(queue, given)
    )
    assert refusal(run).startswith("optimizer state negative or not finite in ")


def test_log_probs_of_the_sampler_are_named_with_prompts(run, monkeypatch):
    plain, seen = SamplerPolicy.generate, []

    def poisoned(policy, prompts, options, *, copies, **rest):
        drawn = plain(policy, prompts, options, copies=copies, **rest)
        for number in (2, 5, 7, 11):
            drawn[number] = drawn[number]._replace(log_probs=np.full_like(drawn[number].log_probs, np.nan))
        seen.extend(run.tokenizer.decode(prompts[number // copies]) for number in (2, 5, 7))
        return drawn

    monkeypatch.setattr(SamplerPolicy, "generate", poisoned)
    found = refusal(run)
    named = ", ".join(f"document {number} (prompt {prompt!r})" for number, prompt in zip((2, 5, 7), seen, strict=True))
    assert found == f"log-probs of the sampler not finite in {named} and 1 more"


def test_log_probs_of_the_trainer_are_named_with_prompts(run, monkeypatch):
    """Of a step whose loss is not finite they are computed again, but for documents without an advantage."""
    plain, add = run.learner.gradients.score, DocumentQueue.add

    def two_without_advantage(queue, documents):
        for document, advantage in zip(documents, (0.0, 0.0, 1.0), strict=False):
            spoilt(document, "advantages", advantage)
        add(queue, documents)

    def poisoned(params, scored):
        log_probs = np.array(plain(params, scored))
        log_probs[0, 0, np.flatnonzero(scored.micro_batch(0).mask[0])[0]] = -np.inf
        return log_probs

    monkeypatch.setattr(run.learner.gradients, "score", poisoned)
    monkeypatch.setattr(DocumentQueue, "add", two_without_advantage)
    with_sums(monkeypatch, run, loss=loss_of(np.nan))
    assert refusal(run).startswith("log-probs of the trainer not finite in document 2 (prompt '")


def test_a_ratio_that_fp32_does_not_hold_is_named_with_its_prompt(run, monkeypatch):
    """Of log-probs that are finite: e^(1000 - …) is not. The document before it is not computed."""
    plain = DocumentQueue.add

    def far_off(queue, documents):
        for document, advantage in zip(documents, (0.0, 1.0), strict=False):
            spoilt(document, "advantages", advantage)
        spoilt(documents[1], "sampler_log_probs", -1000.0)
        plain(queue, documents)

    monkeypatch.setattr(DocumentQueue, "add", far_off)
    with_sums(monkeypatch, run, loss=loss_of(np.nan))
    assert refusal(run).startswith("ratios of new to old probabilities not finite in document 1 (prompt '")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), np.float32("nan"), 1e39])
def test_a_reward_that_is_not_finite_refuses_the_step(run, made, value):
    made[1].answer = lambda: value
    found = refusal(run)
    assert found.startswith("reward 'odd': expected a finite number for document 0 (prompt '") and repr(value) in found
    made[1].answer = None
    assert run.step().refusal is None


@pytest.mark.bad_input
def test_a_reward_that_raises_leaves_everything_as_before_the_step(run, made):
    def broken():
        raise KeyError("answer")

    made[1].answer = broken
    before = state_bytes(run), run.feed.state()
    words = "reward 'odd': expected a finite number for document 0 .*, got KeyError: 'answer'"
    with pytest.raises(RewardFailed, match=f"^{words}$"):
        run.step()
    assert before == (state_bytes(run), run.feed.state())


def sums_of(gradients, count=1):
    """The sums of a step with a loss of 1."""
    parts = StepSums(gradients, WeightedSum(jnp.float32(1), jnp.int32(count)), PolicyMetricTerms({}))
    return StepGradient(parts, jnp.float32(0))


@pytest.mark.parametrize("elementwise", [True, False])
@pytest.mark.parametrize("part", ["params", "opt_state"])
def test_what_an_update_would_make_is_checked_before_it_counts(part, elementwise):
    weight_decay, longest, gradient = (-1e3, 1.0, 1.0) if part == "params" else (0.0, 1e38, 1e21)
    options = {"max_grad_norm": longest, "elementwise": elementwise}
    optimizer = Optimizer(adamw(weight_decay=weight_decay), optax.constant_schedule(1.0), **options)
    update = Update(optimizer, lambda tree: jax.device_put(tree))
    state = update.init({"w": jnp.float32(1e36)})
    before = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)]
    state, applied = update(state, sums_of({"w": jnp.float32(gradient)}))
    assert [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)] == before
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
    params = {name: jnp.asarray(random.normal(size=size), jnp.float32) for name, size in (("w", (64, 33)), ("b", 7))}
    state, plain = update.init(params), update.init(jax.tree.map(jnp.copy, params))
    for _ in range(5):
        gradients = jax.tree.map(lambda x: jnp.asarray(random.normal(size=x.shape), jnp.float32), params)
        plain = unchecked(optimizer)(plain, sums_of(gradients, count=4))
        state, applied = update(state, sums_of(gradients), further=3)
        norm = np.sqrt(sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(gradients))) / 4
        assert applied.applied and applied.loss == 0.25 and applied.grad_norm == pytest.approx(norm, rel=1e-5)
        jax.tree.map(np.testing.assert_array_equal, state, plain)
