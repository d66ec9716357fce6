"""A KL over the whole vocabulary in the loss: its value and gradient against a walk over documents in float64."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments.config import LossConfig, ModelConfig, RejectionConfig, validate
from experiments.loop.assemble import assemble
from experiments.loop.resume import resume
from experiments.loop.run import train
from experiments.models.pretrained import open_pretrained
from jaxlogp import Document
from tests import oracle
from tests.experiments.decoder_oracle import oracle_forward
from tests.experiments.tiny import TINY, assert_same_state, tiny, train_records
from tests.experiments.tiny_directory import write_tiny_directory

KINDS = ("reverse", "forward", "jensen_shannon")
COEFFICIENT, VOCAB, COUNT = 0.3, 24, 12


def options(kind, **changes):
    return {"name": "dapo", "kl_coefficient": COEFFICIENT, "kl_estimator": kind, **changes}


def documents(advantage):
    """Old log-probs of any value. The third has no label."""
    random, made = np.random.default_rng(0), []
    for number in range(COUNT):
        tokens = random.integers(0, VOCAB, random.integers(4, 12)).astype(np.int32)
        labels = np.arange(tokens.size) >= (tokens.size if number == 2 else 2)
        made.append(Document(tokens, labels, np.float32(advantage), np.full(labels.sum(), -3.0, np.float32)))
    return made


def moved(params, seed, size):
    """Every number of the parameters moved by about `size`, in float64, and the moves."""
    random = np.random.default_rng(seed)
    moves = [random.normal(0.0, size, leaf.shape) for leaf in jax.tree.leaves(params)]
    return jax.tree.unflatten(jax.tree.structure(params), moves)


def plus(params, moves, share=1.0):
    return jax.tree.map(lambda x, move: np.float64(x) + share * move, params, moves)


def wanted(params, reference, made, decoder, kind):
    """The divergences of all labels, by document."""

    def logits(params, tokens):
        pure = nnx.to_pure_dict(params) if isinstance(params, nnx.State) else params
        return oracle_forward(pure, tokens, decoder) @ np.float64(pure["lm_head"]["weight"]).T

    found = []
    for each in made:
        both = (logits(state, each.tokens)[np.flatnonzero(each.labels) - 1] for state in (params, reference))
        found.append(oracle.divergence(*both, kind))
    return found


def learner_apart(kind, mesh=""):
    """A learner whose reference is apart from its policy."""
    changes = {"warm_start": {"max_steps": 0}, "evaluation": {"kl": False}, "loss": options(kind)}
    # For two sequence ranks and two tensor ranks.
    changes["model"] = {"num_heads": 4, "num_kv_heads": 4}
    setup = assemble(tiny("unused", "unused", mesh=mesh, **changes))
    learner = setup.learner
    learner.keep_reference()
    apart = plus(jax.device_get(learner.state.params), moved(learner.state.params, 1, 0.1))
    learner.reference = jax.tree.map(
        lambda x, like: jax.device_put(jnp.float32(x), like.sharding), apart, learner.reference
    )
    return setup, learner


class Sums(Exception):
    """Those of a step, in place of its update."""


def sums_of_step(learner, advantage):
    def update(state, total, further):
        raise Sums(total.sums)

    learner._update = update
    with pytest.raises(Sums) as found:
        learner.step(documents(advantage))
    return found.value.args[0]


CASES = ("reverse", ""), ("forward", ""), ("jensen_shannon", ""), ("reverse", "fsdp=2,sequence=2,tensor=2")


@pytest.mark.parametrize(
    ("kind", "mesh"), [CASES[0], *(pytest.param(*case, marks=pytest.mark.costly) for case in CASES[1:])]
)
def test_value_and_gradient_of_a_step_against_float64(kind, mesh):
    setup, learner = learner_apart(kind, mesh)
    assert "reference" in learner.saved().arrays
    params, reference = (jax.device_get(state) for state in (learner.state.params, learner.reference))
    made, decoder = documents(0.0), setup.model.decoder
    by_document = wanted(params, reference, made, decoder, kind)
    labels = np.concatenate(by_document)
    assert labels.min() > 1e-3
    # Along a line through the parameters, by a difference whose error is the square of the distance.
    line, step = moved(params, 2, 1.0), 1e-5
    sides = (wanted(plus(params, line, share), reference, made, decoder, kind) for share in (step, -step))
    ahead, behind = (np.concatenate(side).sum() for side in sides)
    # The objective of advantages of 0 is 0.
    gradient = jax.device_get(sums_of_step(learner, 0.0).gradients)
    mine, along = (np.concatenate([np.float64(x).ravel() for x in jax.tree.leaves(tree)]) for tree in (gradient, line))
    # A gradient in fp32 is off by 2e-5 of its norm, along a line of normal numbers by at most five times that.
    error = 5 * 2e-5 * np.linalg.norm(mine)
    np.testing.assert_allclose(mine @ along, COEFFICIENT * (ahead - behind) / (2 * step), rtol=0, atol=error)
    finished = sums_of_step(learner, 1.0).finish()
    metrics = finished.metrics
    assert metrics["loss_objective"] < -0.1
    np.testing.assert_allclose(finished.loss - metrics["loss_objective"], COEFFICIENT * labels.mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics["loss_kl"], COEFFICIENT * labels.mean(), rtol=1e-5)
    means = [np.mean(each) for each in by_document if each.size]
    np.testing.assert_allclose(metrics["kl_new_ref_labelled"], np.mean(means), rtol=1e-5)


def distilled(folder, **changes):
    """Options of a run whose student and teacher are of two families; the teacher's head has a soft cap."""
    student = write_tiny_directory(folder / "student", "qwen3", tie_word_embeddings=False)
    teacher = write_tiny_directory(folder / "teacher", "gemma2", hidden_size=48)
    changes = {
        "warm_start": {"max_steps": 0},
        "evaluation": {"num_prompts": 4},
        "rollout": {"max_new_tokens": 4},
        **changes,
    }
    base = tiny(folder, "run", loss=options("reverse", teacher=str(teacher)), **changes)
    return dataclasses.replace(base, model=ModelConfig(path=str(student)))


@pytest.mark.costly
def test_a_teacher_of_another_family_is_what_the_kl_is_measured_from(tmp_path):
    setup = assemble(distilled(tmp_path, mesh="fsdp=2,tensor=2"))
    learner, config = setup.learner, open_pretrained(tmp_path / "teacher").config
    assert "reference" not in learner.saved().arrays
    teacher = nnx.to_pure_dict(jax.device_get(learner.teacher.params))
    student = nnx.to_pure_dict(jax.device_get(learner.state.params))
    found = []
    for each in documents(0.0):
        at = np.flatnonzero(each.labels) - 1
        ours = oracle_forward(student, each.tokens, setup.model.decoder) @ np.float64(student["lm_head"]["weight"]).T
        theirs = oracle_forward(teacher, each.tokens, config) @ np.float64(teacher["embed_tokens"]["embedding"]).T
        capped = 3.0 * np.tanh(theirs / 3.0)
        found.append(oracle.divergence(ours[at], capped[at], "reverse"))
    labels = np.concatenate(found)
    assert labels.min() > 0.1
    metrics = sums_of_step(learner, 0.0).finish().metrics
    np.testing.assert_allclose(metrics["loss_kl"], COEFFICIENT * labels.mean(), rtol=1e-5)


@pytest.mark.costly
def test_a_distilled_run_comes_closer_and_resumes_with_its_teacher_alone(tmp_path, capsys):
    changes = {"optimizer": {"learning_rate": 3e-3}, "checkpoint": {"every": 2}}
    config = distilled(tmp_path, schedule={"steps": 4, "row_length": 32, "docs_per_step": 64}, **changes)
    config = dataclasses.replace(config, loss=dataclasses.replace(config.loss, advantages="none"))
    result = train(config)
    apart = [record["kl_new_ref"] for record in train_records(result)]
    assert apart == sorted(apart, reverse=True) and all(
        record["loss_objective"] == 0.0 for record in train_records(result)
    )
    run, away = str(tmp_path / "run"), tmp_path / "away"
    (tmp_path / "teacher").rename(away)
    write_tiny_directory(tmp_path / "teacher", "gemma2", hidden_size=48, intermediate_size=64)
    with pytest.raises(
        ValueError, match="^--loss.teacher: expected the parameters that the run began with, got others$"
    ):
        resume(run)
    with pytest.raises(ValueError, match="^--resume: these options cannot be changed: --loss.teacher: .*, given None"):
        resume(run, {"loss.teacher": None})
    capsys.readouterr()
    assert_same_state(resume(f"{run}@2", {"loss.teacher": str(away), "quiet": False}), result)
    said = capsys.readouterr().out
    assert f"loss dapo, KL (reverse) to {away}\n" in said
    (row,) = [line.split() for line in said.splitlines() if line.startswith("     4 ")]
    assert row[1] == f"{apart[-1]:.4f}"


@pytest.mark.bad_input
def test_a_teacher_of_other_ids_is_refused(tmp_path):
    config = distilled(tmp_path)

    def check(words, teacher, **loss):
        loss = dataclasses.replace(config.loss, teacher=str(teacher), **loss)
        with pytest.raises(ValueError, match=f"^{words}"):
            assemble(dataclasses.replace(config, loss=loss))

    wider = write_tiny_directory(tmp_path / "wider", "gemma2", vocab_size=272)
    check("--loss.teacher: expected a model whose embedding has the policy's 264 rows, got 272$", wider)
    check(
        "--loss.teacher: model: expected a Hugging Face directory or a GGUF file, got .*nowhere", tmp_path / "nowhere"
    )
    file = tmp_path / "teacher" / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    ids = tokenizer["model"]["vocab"]
    ids["a"], ids["b"] = ids["b"], ids["a"]
    file.write_text(json.dumps(tokenizer))
    words = r"--loss.teacher: expected a tokenizer in which token \d+ is 'a', as in the policy's, got 'b'$"
    check(words, tmp_path / "teacher")
    words = "--loss.kl-estimator: expected reverse, forward or jensen_shannon with --loss.teacher, got k3"
    check(words, tmp_path, kl_estimator="k3")
    check("--loss.reference-every: expected None with --loss.teacher", tmp_path, reference_every=2)


@pytest.mark.bad_input
def test_what_has_no_such_divergence_refuses_it_by_name():
    def check(words, **changes):
        sections = {"loss": LossConfig(**options("reverse", **changes.pop("loss", {})))}
        with pytest.raises(ValueError, match=f"^{words}"):
            validate(dataclasses.replace(TINY, **sections, **changes))

    expected = "--loss.kl-estimator: expected k1, k2 or k3 with "
    check(expected + "--rejection, .* got reverse$", rejection=RejectionConfig(veto=0.1))
    check(expected + "--invariant, .* got reverse$", invariant=True)
    rollout = dataclasses.replace(TINY.rollout, top_p=0.9)
    check(expected + "--loss.on-support, .* got reverse$", rollout=rollout)
    check(
        "--loss.kl-unbiased: expected None with --loss.kl-estimator reverse, .* got True$", loss={"kl_unbiased": True}
    )
    check(
        "--loss.kl-estimator: expected None without --loss.kl-coefficient, got reverse$", loss={"kl_coefficient": None}
    )
    expected = "--loss.skip-zero-advantages: expected None or False for loss 'dapo'"
    check(expected, loss={"skip_zero_advantages": True})
