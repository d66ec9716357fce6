"""Sources of one's own: what they get and give, what is refused, and a resume to the same bits."""

import dataclasses

import numpy as np
import pytest

from experiments import Experience, SamplingOptions
from experiments.config import Config, LossConfig, OptimizerConfig, ScheduleConfig, validate
from experiments.experience.own_source import OwnSource, SourceFailed, resolve_source
from experiments.experience.stored import write_documents
from experiments.loop.resume import resume
from experiments.loop.run import train
from experiments.runs.ends import GuardAbort
from jaxlogp import Document, Support
from tests.experiments.tiny import assert_same_state, tiny, train_records

OPTIONS = SamplingOptions(max_new_tokens=3)


class Stub:
    """A policy that draws nothing."""

    version = 4


def document(tokens=(3, 4), **changes):
    return Document.of_completion(tokens[:1], tokens[1:], [-0.5] * (len(tokens) - 1), **changes)


def own(answer, **limits):
    source = OwnSource(answer, "mine", **({"vocab_size": 9, "row_length": 4} | limits))
    return source.next(Stub())


def test_documents_come_as_a_list_or_as_an_experience():
    documents = [document(versions=4), document((5, 6, 7, 8)), Document(np.array([3]), np.array([False]))]
    assert own(lambda policy, step: documents).documents == tuple(documents)
    assert own(lambda policy, step: Experience(tuple(documents))).documents == tuple(documents)
    assert own(lambda policy, step: None) is None


def test_a_function_is_told_how_often_it_was_called_also_after_a_resume():
    steps = []
    first, second = (
        OwnSource(lambda policy, step: steps.append(step) or [document()], "mine", vocab_size=9, row_length=4)
        for _ in range(2)
    )
    first.next(Stub()), first.next(Stub())
    second.restore(first.state())
    second.next(Stub())
    assert steps == [0, 1, 2]


def raises(policy, step):
    raise KeyError("game")


BAD = {
    "raises": (raises, "KeyError: 'game'"),
    "empty": (lambda policy, step: [], "documents: expected at least one, or None at the end of the data, got none"),
    "no list": (lambda policy, step: 3, "documents: expected a list of jaxlogp.Document, an Experience, or None, got int 3"),
    "no experience": (lambda policy, step: Experience(None), "documents: expected a list of .*, got NoneType None"),
    "generator": (lambda *_: Experience(document() for _ in range(2)), "documents: expected a list of .*, got generator"),
    "counts": (lambda *_: Experience((document(),), None), "counts: expected RolloutMetrics of the Experience, got None"),
    "no document": (lambda policy, step: ["x"], r"documents\[0\]: expected a jaxlogp.Document, got str 'x'"),
    "too long": (
        lambda *_: [document(), document((1, 2, 3, 4, 5))],
        r"documents\[1\]: expected at most 4 tokens \(--schedule.row-length\), got 5",
    ),
    "an id": (lambda policy, step: [document((3, 9))], r"documents\[0\]: expected ids below 9, got 9"),
    "the future": (lambda policy, step: [document(versions=5)], r"documents\[0\]: expected versions of at most 4"),
    "supervised": (
        lambda *_: [Document.of_completion([3], [4])],
        r"documents\[0\]: expected sampler_log_probs of its labels, got None",
    ),
    "columns": (
        lambda *_: [document(columns={"x": np.zeros(1)})],
        r"documents\[0\]: expected no further columns, got \['x'\]",
    ),
    "support": (
        lambda *_: [document(support=Support.from_lists([[4]]))],
        r"documents\[0\]: expected no support without --loss.on-support, got Support",
    ),
    "lengths": (lambda policy, step: [Document.of_completion([3], [4, 5], [-0.5])], "ValueError: log_probs: expected"),
}  # fmt: skip


@pytest.mark.bad_input
@pytest.mark.parametrize("name", BAD)
def test_a_bad_source_is_told_in_one_sentence(name):
    answer, words = BAD[name]
    with pytest.raises(SourceFailed, match=f"^source mine: {words}"):
        own(answer)


SUPPORTS = {
    "none": (None, "the support of its labels with --loss.on-support .*, got None"),
    "large": ([4, 8, 7], "a support of at most 2 ids, got 3"),
    "an id": ([4, 9], "a support of ids below 9, got 9"),
}


@pytest.mark.bad_input
@pytest.mark.parametrize("name", SUPPORTS)
def test_a_support_has_to_fit(name):
    fits = document(support=Support.from_lists([[4, 8]]))
    assert own(lambda *_: [fits], support_capacity=2).documents == (fits,)
    ids, words = SUPPORTS[name]
    other = document(support=ids and Support.from_lists([ids]))
    with pytest.raises(SourceFailed, match=rf"^source mine: documents\[1\]: expected {words}$"):
        own(lambda *_: [fits, other], support_capacity=2)


@pytest.mark.bad_input
def test_a_state_that_cannot_be_read_or_restored_names_the_source():
    class Broken(Counter):
        def __init__(self):
            pass

    source = OwnSource(Broken(), "mine", vocab_size=9, row_length=4)
    with pytest.raises(ValueError, match="^source mine: state raised AttributeError: .* no attribute 'count'"):
        source.state()
    with pytest.raises(ValueError, match="^source mine: restore raised KeyError: 'count'"):
        source.restore({"calls": 1, "own": {"number": 3}})


@pytest.mark.bad_input
def test_a_source_is_given_by_name_or_from_python():
    assert resolve_source(None, None) == (None, None)
    assert resolve_source(f"{__name__}:digits", None) == (f"{__name__}:digits", digits)
    assert resolve_source(None, digits) == ("own:digits", digits) == resolve_source("own:digits", digits)
    with pytest.raises(ValueError, match="^--source: expected None where train is given a source"):
        resolve_source("a:b", digits)
    words = r"your own source digits, .*source=\), or a module of another name than own, got none"
    with pytest.raises(ValueError, match=f"^--source: expected {words}"):
        resolve_source("own:digits", None)


CHANGES = {"warm_start": {"max_steps": 0}, "schedule": {"steps": 2, "docs_per_step": None}, "checkpoint": {"every": 1}}


def source_config(out, name, **changes):
    rollout = {"prompts_per_rollout": 64, "num_generations": 8} | changes.pop("rollout", {})
    return tiny(out, name, rollout=rollout, **(CHANGES | changes))


def digits(policy, step):
    """Two drawn answers to each of four prompts; a digit is rewarded."""
    prompts = [policy.tokenizer.encode_prompt(f"{number}?{step}=") for number in range(4)]
    drawn = policy.generate(prompts, OPTIONS, copies=2, seed=(step,))
    again = policy.generate(prompts, OPTIONS, copies=2, seed=(step,))
    for one, two in zip(drawn, again, strict=True):
        assert one.finish_reason == ("stop" if one.ids[-1] in policy.tokenizer.eos_ids else "length")
        assert len(one.ids) == len(one.log_probs) <= 3
        np.testing.assert_array_equal(one.ids, two.ids)
    assert any(one.ids.tolist() != two.ids.tolist() for one, two in zip(drawn[::2], drawn[1::2], strict=True))
    pairs = zip([prompt for prompt in prompts for _ in range(2)], drawn, strict=True)
    given = {"reward": 1.0, "versions": policy.version}
    documents = [
        Document.of_completion(prompt, each.ids, each.log_probs, advantages=float((-1) ** number), **given)
        for number, (prompt, each) in enumerate(pairs)
    ]
    scores = policy.log_probs(documents)
    for made, score in zip(documents, scores, strict=True):
        # Sampler and trainer: fp32 on a CPU, 2e-5 in test_grpo.py.
        np.testing.assert_allclose(score, made.sampler_log_probs, atol=1e-4)
    return documents


class Counter:
    """A source with a state of its own."""

    def __init__(self):
        self.count = 0

    def next(self, policy):
        self.count += 1
        return digits(policy, self.count)

    def state(self):
        return {"count": self.count}

    def restore(self, state):
        self.count = state["count"]


@pytest.mark.costly
@pytest.mark.parametrize("source", [f"{__name__}:digits", f"{__name__}:Counter"])
def test_a_run_from_a_source_by_name_resumes_to_the_same_bits(tmp_path, source):
    whole = train(source_config(tmp_path, "whole", source=source))
    records = train_records(whole)
    assert [record["num_documents"] for record in records] == [8, 8] and records[0]["grad_norm"] > 0.0
    assert all(record["update_applied"] == 1 and record["reward_mean"] == 1.0 for record in records)
    assert records[0]["computed/drift_max"] < 1e-4
    resumed = resume(f"{whole.run.path}@1", {"quiet": True})
    assert_same_state(resumed, whole)
    assert train_records(resumed)[1]["loss"] == records[1]["loss"]


@pytest.mark.costly
def test_stored_documents_train_like_those_that_a_function_gives(tmp_path):
    """Of another run, whose versions mean nothing here; two passes, of which a resume makes the second."""
    documents = [document((3, 4, 5), advantages=(-1.0) ** number, versions=7) for number in range(8)]
    path = tmp_path / "documents.safetensors"
    write_documents(path, documents)
    schedule = {"steps": 5, "docs_per_step": 0, "epochs": 2}
    stored = train(source_config(tmp_path, "stored", source=f"stored:{path}", schedule=schedule))
    again = [dataclasses.replace(each, versions=0) for each in documents]
    given = train(source_config(tmp_path, "given"), source=lambda policy, step: again if step < 2 else None)
    assert stored.steps == given.steps == 2
    assert_same_state(stored, given)
    resumed = resume(f"{stored.run.path}@1", {"quiet": True})
    assert resumed.steps == 2
    assert_same_state(resumed, stored)
    write_documents(path, documents[:-1])
    with pytest.raises(ValueError, match="^source stored:.*: documents: expected those of digest"):
        resume(f"{stored.run.path}@1", {"quiet": True, "schedule.steps": 9})


@pytest.mark.costly
def test_a_source_that_breaks_ends_the_run_with_a_checkpoint(tmp_path):
    kept = []

    def broken(policy, step):
        kept.append(policy)
        return digits(policy, step) if step == 0 else kept[0].generate([[3]], OPTIONS)

    words = "source own:broken: ValueError: policy: expected that of this step, .* step 1 is saved"
    with pytest.raises(GuardAbort, match=f"^{words}"):
        train(source_config(tmp_path, "broken"), source=broken)
    with pytest.raises(ValueError, match="^--source: expected your own source broken, as the run began"):
        resume(str(tmp_path / "broken"), {"quiet": True})


REFUSED = {
    "--schedule.row-length": {"schedule": {"row_length": None}},
    "--loss.advantages": {"loss": {"advantages": "centred"}},
    "--schedule.epochs": {"schedule": {"epochs": 1}},
    "--rollout.num-generations": {"rollout": {"num_generations": 4}},
    "--rollout.mask-truncated": {"rollout": {"mask_truncated": True}},
}


@pytest.mark.bad_input
@pytest.mark.parametrize("option", REFUSED)
def test_options_that_a_source_does_not_read_are_refused(tmp_path, option):
    config = source_config(tmp_path, "refused", source="a:b", **REFUSED[option])
    with pytest.raises(ValueError, match=f"^{option}: expected "):
        validate(config)


@pytest.mark.costly
@pytest.mark.slow
def test_the_example_of_several_turns_learns(tmp_path):
    """From 0.05 of a random player; a perfect one has 0.83."""
    loss, optimizer = LossConfig(entropy_coefficient=0.02), OptimizerConfig(learning_rate=1e-3)
    config = tiny(
        tmp_path, "game", source="examples.guess_number:rollouts", model=Config().model, rollout=Config().rollout,
        warm_start={"max_steps": 0}, schedule=ScheduleConfig(steps=45, row_length=16), loss=loss, optimizer=optimizer,
    )  # fmt: skip
    rewards = [record["reward_mean"] for record in train_records(train(config))]
    assert np.mean(rewards[:3]) < 0.2 and np.mean(rewards[-5:]) > 0.45
