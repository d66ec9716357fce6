"""A Flax model of one's own: drawn without a cache, trained, resumed and refused."""

import dataclasses
import functools
import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments import Config, resume, train
from experiments.config import RolloutConfig
from experiments.loop.load import load_model
from experiments.models.decoder import Decoder
from experiments.models.decoder_config import DecoderConfig
from experiments.models.mesh import MeshSpec, make_mesh
from experiments.models.protocol import check_model
from experiments.models.tokenizer import CharTokenizer
from experiments.sampling.recompute import RecomputeSampler
from experiments.sampling.sampler import SampledModel
from jaxlogp.head import HeadSpec
from tests.experiments.samples import rule, sample
from tests.experiments.tiny import assert_same_state, parity, tiny, train_records

PATH = Path(__file__).parents[2] / "examples" / "own_model.py"
SPEC = importlib.util.spec_from_file_location("own_model", PATH)
example = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(example)

TOKENIZER = CharTokenizer("0123456789")
PROMPTS = np.array([[4, 5, 6, 7, 8], [9, 4, 0, 0, 0], [6, 6, 6, 0, 0]], np.int32)
LENGTHS = np.array([5, 2, 3], np.int32)


def decoder():
    sizes = dict(hidden_size=32, intermediate_size=48, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=16)
    config = DecoderConfig(vocab_size=TOKENIZER.vocab_size, logit_softcap=3.0, **sizes)
    return nnx.split(Decoder(config, rngs=nnx.Rngs(5)))


def rule_of(temperature=0.7, **options):
    return rule(6, eos_ids=TOKENIZER.eos_ids, pad_id=TOKENIZER.pad_id, temperature=temperature, **options)


def draw(graph, state, *, mesh=None, copies=2, **options):
    model = SampledModel(graph, mesh or make_mesh(MeshSpec()))
    return RecomputeSampler(model, rule_of(**options))(state, PROMPTS, LENGTHS, copies, jax.random.key(3))


def log_softmax(logits):
    logits = logits - logits.max(axis=-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def test_log_probs_of_an_uncached_draw_are_those_of_the_whole_row():
    graph, state = decoder()
    samples = draw(graph, state)
    assert samples.tokens.shape == (6, 6) and (samples.lengths >= 1).all() and len(set(samples.lengths.tolist())) > 1
    whole = np.zeros((6, 11), np.int32)
    weight = np.asarray(nnx.merge(graph, state).head()[1], np.float64)
    for row in range(6):
        prompt, length = PROMPTS[row // 2, : LENGTHS[row // 2]], samples.lengths[row]
        completion = samples.tokens[row, :length]
        assert TOKENIZER.eos_ids[0] not in completion[:-1] and (completion[-1] in TOKENIZER.eos_ids or length == 6)
        assert (samples.tokens[row, length:] == TOKENIZER.pad_id).all() and (samples.log_probs[row, length:] == 0).all()
        whole[row, : len(prompt) + length] = [*prompt, *completion]
    places = jnp.broadcast_to(jnp.arange(11), whole.shape)
    forward = jax.jit(lambda rows: nnx.merge(graph, state).hidden_states(rows, places, places * 0))
    states = np.asarray(forward(whole), np.float64)
    for row in range(6):
        start, length = LENGTHS[row // 2], samples.lengths[row]
        logits = 3.0 * np.tanh(states[row] @ weight.T / 3.0) / 0.7
        places = np.arange(start - 1, start + length - 1)
        wanted = log_softmax(logits[places])[np.arange(length), samples.tokens[row, :length]]
        # fp32 states of size 1 and logits of at most 3 / 0.7, against float64 from the same states.
        np.testing.assert_allclose(samples.log_probs[row, :length], wanted, atol=1e-5, rtol=0)


@pytest.mark.slow
def test_an_uncached_draw_takes_the_tokens_of_the_cached_one_when_both_are_greedy():
    graph, state = decoder()
    ours = draw(graph, state, copies=1, greedy=True)
    theirs = sample(nnx.merge(graph, state), PROMPTS, LENGTHS, jax.random.key(3), rule_of(greedy=True))
    np.testing.assert_array_equal(ours.tokens, theirs.tokens)
    np.testing.assert_array_equal(ours.lengths, theirs.lengths)
    np.testing.assert_allclose(ours.log_probs, theirs.log_probs, atol=1e-5, rtol=0)


@pytest.mark.slow
def test_the_last_copy_of_an_uncached_draw_may_be_greedy():
    graph, state = decoder()
    both, drawn = (draw(graph, state, greedy_last=last) for last in (True, False))
    np.testing.assert_array_equal(both.tokens[1::2], draw(graph, state, copies=1, greedy=True).tokens)
    np.testing.assert_array_equal(both.tokens[::2], drawn.tokens[::2])


@pytest.mark.slow
def test_the_draws_of_a_row_do_not_depend_on_the_mesh():
    graph, state = decoder()
    # Six rows: four ranks do not divide them.
    one, four = draw(graph, state), draw(graph, state, mesh=make_mesh(MeshSpec(data=4)))
    assert four.log_probs.shape == one.log_probs.shape
    np.testing.assert_array_equal(one.tokens, four.tokens)


def short(out, name, **changes):
    schedule = {"steps": 1, **changes.pop("schedule", {})}
    return tiny(out, name, model=Config().model, warm_start={"max_steps": 0}, schedule=schedule, **changes)


class Shifted(example.Gru):
    """With an array that is not a parameter."""

    def __init__(self, vocab_size, features, *, rngs):
        super().__init__(vocab_size, features, rngs=rngs)
        self.shift = nnx.Variable(jnp.full(features, 0.25))

    def hidden_states(self, tokens, positions, segment_ids):
        return super().hidden_states(tokens, positions, segment_ids) + self.shift[...]


def leaves(tree):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


@pytest.mark.slow
def test_the_example_trains_and_is_left_as_it_is(tmp_path, capsys):
    code = [line for line in PATH.read_text().split('"""', 2)[2].splitlines() if line.strip()]
    assert len(code) <= 40
    model = example.model()
    # Copies: JAX does not give away the memory of arrays that NumPy is looking at.
    first = leaves(jax.tree.map(jnp.copy, nnx.state(model)))
    result = train(short(tmp_path, "whole"), reward=parity, model=model)
    assert "WARNING: Gru has no key-value cache" in capsys.readouterr().out
    (record,) = train_records(result)
    assert record["update_applied"] == 1 and record["attention"] == "own" and record["loss"] != 0.0
    # Sampler and trainer run the same recurrence over rows of other lengths, in fp32.
    assert record["computed/drift_max"] < 1e-4
    jax.tree.map(np.testing.assert_array_equal, leaves(nnx.state(model)), first)
    assert all((mine != other).any() for mine, other in zip(leaves(result.params), first, strict=True))
    nnx.update(model, result.params)
    np.testing.assert_array_equal(model.head()[1], result.params["head_weight"][...])
    with pytest.raises(ValueError, match="^--model.own: expected your own model Gru, as the run began .*, got none"):
        load_model(result.run.path)


@pytest.mark.slow
def test_what_is_no_parameter_is_kept_on_a_mesh_and_in_a_resume(tmp_path):
    model = Shifted(example.model().embed.num_embeddings, 32, rngs=nnx.Rngs(0))
    two = {"schedule": {"steps": 2}, "checkpoint": {"every": 1}}
    meshes = ("data=1", "data=2,tensor=2")
    one, four = (train(short(tmp_path, mesh, mesh=mesh, **two), reward=parity, model=model) for mesh in meshes)
    assert "shift" not in one.params and np.all(np.asarray(model.shift[...]) == 0.25)
    for record, other in zip(train_records(one), train_records(four), strict=True):
        # The same tokens are drawn and scored; sums of a few hundred labels in another order.
        assert abs(record["loss"] - other["loss"]) < 1e-5 and record["reward_mean"] == other["reward_mean"]
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=2e-4), leaves(one.params), leaves(four.params))
    other = Shifted(example.model().embed.num_embeddings, 32, rngs=nnx.Rngs(1))
    resumed = resume(f"{one.run.path}@1", reward=parity, model=other)
    assert_same_state(resumed, one)


class Half(nnx.Module):
    def hidden_states(self, tokens, positions, segment_ids):
        return jnp.zeros((*tokens.shape, 4))


class Other(Half):
    def __init__(self, spec, weight):
        self.spec, self.weight = spec, nnx.Param(weight)

    def head(self):
        return self.spec, self.weight[...]


@pytest.mark.bad_input
def test_a_model_that_is_not_one_is_named(tmp_path):
    fine = HeadSpec()
    for model, words in [
        (Half(), "model: expected an nnx.Module with hidden_states.*, got a Half"),
        (Other(None, jnp.zeros((24, 4))), "model, head: expected a HeadSpec and a weight, got NoneType"),
        (Other(fine, jnp.zeros((23, 4))), r"model, head: expected a weight \[24, H\], .*, got \[23, 4\]"),
        (Other(fine, jnp.zeros((24, 5))), r"model, hidden_states .*: expected \[1, 2, 5\], got \[1, 2, 4\]"),
    ]:
        with pytest.raises(ValueError, match=f"^{words}"):
            check_model(model, 24)
    for method, answer, words in [
        ("head", None, "model, head: expected a HeadSpec and a weight, got NoneType"),
        ("head", (fine, None), "model, head: expected a HeadSpec and a weight, got NoneType for the weight"),
        ("hidden_states", (), r"model, hidden_states .*: expected \[1, 2, 4\], got tuple"),
    ]:
        answering = type("Answering", (Other,), {method: lambda self, *given, answer=answer: answer})
        with pytest.raises(ValueError, match=f"^{words}"):
            check_model(answering(fine, jnp.zeros((24, 4))), 24)
    raising = type("Raising", (Other,), {"head": lambda self: 1 / 0})
    with pytest.raises(ValueError, match="^model: expected head and hidden_states to be traced, got ZeroDivisionError"):
        check_model(raising(fine, jnp.zeros((24, 4))), 24)
    constant = type("Constant", (Half,), {"head": lambda self: (fine, jnp.zeros((24, 4)))})
    with pytest.raises(ValueError, match="^model: expected parameters of type nnx.Param, got none"):
        check_model(constant(), 24)
    model = example.model()
    with pytest.raises(ValueError, match="^--model: expected no other options where train is given a model"):
        train(dataclasses.replace(short(tmp_path, "a"), model=tiny(tmp_path, "a").model), model=model)
    with pytest.raises(ValueError, match="^--invariant: expected the project's own decoder, got a Gru"):
        train(short(tmp_path, "b", invariant=True, schedule={"row_length": None}), model=model)
    with pytest.raises(ValueError, match="^--model.own: expected your own model Gru, as the run began .*, got none"):
        train(dataclasses.replace(tiny(tmp_path, "c"), model=dataclasses.replace(Config().model, own="own:Gru")))


@pytest.mark.bad_input
@pytest.mark.parametrize("source", [pytest.param(None, marks=pytest.mark.slow), lambda policy, step: None])
def test_rows_at_a_time_are_refused_of_a_model_without_a_cache(tmp_path, source):
    config = short(tmp_path, "rows", rollout=RolloutConfig(rows=4))
    words = r"rows \(--rollout.rows\): expected None for a model without a key-value cache"
    with pytest.raises(ValueError, match=f"^{words}"):
        train(config, model=example.model(), source=source)
