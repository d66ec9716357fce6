"""The drift report of a step: which tokens it is about, and what it says of the worst one."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.config import Config, CorrectionConfig, RolloutConfig, ScheduleConfig
from experiments.learner.backend import StepGradient, add_gradients
from experiments.learner.drift import END, measure_drift
from experiments.learner.objectives import _drift
from experiments.learner.packing import Packing
from experiments.models.tokenizer import EOS_ID, tokenizer_for
from experiments.tasks import make_task
from jaxlogp import Document, StepSums, VocabShards, WeightedSum
from jaxlogp.head import HeadRun
from jaxlogp.policy.documents import SAMPLER_COLUMN
from tests.experiments.stacked import stacked

TOKENIZER = tokenizer_for(make_task("addition:1").alphabet)
VOCAB = VocabShards.even(TOKENIZER.vocab_size, 3)
SEEN = 12
"""Documents before the step: the version of its parameters."""
TEXTS = ("1+2=", "3"), ("4+5=", "9"), ("7+8=", "15"), ("2+2=", "4"), ("3+4=", "7"), ("9+9=", "18")


def documents(versions, sampler_offset=None):
    """One for each text, with log-probs of which no two are equal; with an offset they are rescored ones."""
    made = []
    for number, ((prompt, answer), version) in enumerate(zip(TEXTS, versions, strict=True)):
        tokens = [*TOKENIZER.encode_prompt(prompt), *TOKENIZER.encode(answer), EOS_ID]
        labels = len(answer) + 1
        log_probs = -np.arange(1, labels + 1, dtype=np.float32) - number / 8
        rescored = sampler_offset is not None
        sampler, old = (log_probs + sampler_offset, log_probs) if rescored else (log_probs, None)
        given = {"old_log_probs": old, "advantages": 1.0, "versions": version}
        made.append(Document.of_completion(np.int32(tokens[:-labels]), np.int32(tokens[-labels:]), sampler, **given))
    return made


def rounds_of(made, columns=()):
    """Two data ranks, rows of two documents at most, several rounds."""
    sizes = {"ranks": 2, "rows": 1, "row_length": 16, "vocab_size": TOKENIZER.vocab_size}
    return Packing(**sizes, pad_id=TOKENIZER.pad_id, columns=columns).rounds(made)


HEAD = HeadRun("linear_policy_loss", "spy", "named by the caller", 3)


def computed(each, offsets):
    """The sampler's log-probs of a round, but for the last token of each answer, which is off."""
    batch = stacked(each)
    log_probs = np.where(batch.mask, batch.per_token["old_log_probs"], 0.0)
    for index in np.argwhere(batch.mask & (batch.targets == EOS_ID)):
        log_probs[tuple(index)] += offsets.get(int(batch.versions[tuple(index)]), np.nan)
    return log_probs.astype(np.float32)


def report(made, offsets, columns=(), computes=lambda document: True):
    rounds = rounds_of([each for each in made if computes(each)], tuple(columns))
    assert len(rounds) >= 2
    observed = [(each, computed(each, offsets)) for each in rounds]
    labels = {"head": HEAD, "vocab": VOCAB, "reduction": "mesh data=2", "dtype": "bfloat16"}
    return measure_drift(made, observed, SEEN, **labels)


def test_only_documents_of_the_present_parameters_count_and_the_worst_is_named():
    """Under the older parameters of 0 the tokens differ by far more: that is learning, not drift."""
    drift = report(documents([SEEN, 0, SEEN, SEEN, 0, SEEN]), {SEEN: -0.25, 0: 3.0})
    found = drift.metrics(TOKENIZER)
    labels = 2 + 3 + 2 + 3
    assert found["tokens"] == labels == 10
    assert found["max"] == found["p99_9"] * 1.0 == 0.25 and found["p50"] == 0.0
    assert found["mean"] == pytest.approx(4 * 0.25 / labels) and found["share_outside"] == 4 / labels
    # The first of equal ones: the end of the first document.
    assert (found["worst_token_id"], found["worst_owner"]) == (EOS_ID, 0)
    assert (found["worst_owner_start"], found["worst_owner_end"]) == VOCAB.ranges[0]
    assert found["worst_trainer"] - found["worst_sampler"] == -0.25
    assert (found["worst_document"], found["worst_position"]) == (0, 6)
    assert (found["worst_token"], found["worst_context"]) == (END, "'1+2=3'")
    assert (drift.report.backend, drift.report.reduction) == ("engine spy", "mesh data=2")
    quantiles, share, worst = drift.lines(TOKENIZER)
    assert quantiles == "drift, |trainer - sampler|: p50 0, p90 0.25, p99 0.25, p99.9 0.25, max 0.25 nats"
    assert share == "drift, ratios outside [0.9, 1.1]: 40.00% of 10 tokens"
    place = "an end token after '1+2=3', position 6 of document 0, vocabulary shard 0"
    values = f"trainer {found['worst_trainer']:.9g}, sampler {found['worst_sampler']:.9g} nats"
    assert worst == f"drift, worst token: {place}: {values}"


def test_the_worst_token_of_a_later_round_and_rank_is_found():
    made = documents([SEEN] * 6)
    place = next(number for number, each in enumerate(made) if TEXTS[number][1] == "18")
    made[place].sampler_log_probs[1] += 0.5
    rescored = [dataclasses.replace(each, old_log_probs=each.sampler_log_probs.copy()) for each in made]
    rescored[place].sampler_log_probs[1] -= 2.0
    drift = report(rescored, {}, ("sampler_log_probs",))
    found = drift.metrics(TOKENIZER)
    assert found["tokens"] == 14 and found["max"] == 2.0 and found["worst_token"] == "'8'"
    assert found["worst_context"] == "'9+9=1'" and found["worst_position"] == 6
    # Dealt to two ranks in turn, three each: the last document of the last round.
    assert found["worst_document"] == 5


def test_the_worst_token_is_in_a_document_of_the_step_whichever_are_computed():
    made = documents([SEEN] * 6)
    drift = report(made, {SEEN: -0.25}, computes=lambda document: document is not made[0])
    assert drift.metrics(TOKENIZER)["tokens"] == 12 and drift.worst.document == 1


@pytest.mark.parametrize(("off", "wanted"), [({SEEN: -0.25}, 0.25), ({SEEN: 0.25}, 0.25), ({SEEN: 0.0}, 0.0)])
def test_the_metric_of_a_step_is_the_largest_distance_under_the_present_parameters(off, wanted):
    """Documents of earlier parameters are much further off."""
    found = []
    for each in rounds_of(documents([SEEN, 4, SEEN, 4, SEEN, SEEN])):
        log_probs = computed(each, {4: -5.0, **off})
        found += [_drift(log_probs[rank], each.micro_batch(rank), jnp.int32(SEEN)) for rank in range(2)]
    assert max(map(float, found)) == wanted


@pytest.mark.parametrize("drifts", [(0.25, 0.5), (0.5, 0.25), (-np.inf, 0.5), (0.5, -np.inf)])
def test_the_metric_of_several_micro_batches_is_the_largest(drifts):
    sums = StepSums.of({"w": jnp.ones(1)}, WeightedSum(jnp.float32(1.0), jnp.int32(1)))
    added = add_gradients(*(StepGradient(sums, jnp.float32(drift)) for drift in drifts))
    assert float(added.drift) == 0.5 and int(added.sums.loss.count) == 2


@pytest.mark.parametrize("offset", [-0.5, 0.5])
def test_the_metric_of_rescored_documents_is_their_distance_to_the_sampler(offset):
    """Whatever their age, and whatever the policy says now."""
    made = documents([4] * 6, sampler_offset=offset)
    (each, *_) = rounds_of(made, (SAMPLER_COLUMN,))
    batch = each.micro_batch(0)
    assert float(_drift(jnp.zeros(batch.mask.shape), batch, jnp.int32(SEEN))) == 0.5


def test_the_context_begins_after_the_newest_turn():
    """A chat template writes an end token after every turn, at which decoding stops."""
    (made, *_) = documents([0] * 6)
    turn = [*TOKENIZER.encode_prompt("1+2="), EOS_ID, *TOKENIZER.encode("4+5=")]
    old = made.sampler_log_probs
    one = Document.of_completion(np.int32(turn), made.tokens[-2:], old - 1.0, old_log_probs=old)
    drift = report([one] * 6, {}, ("sampler_log_probs",))
    assert drift.worst.texts(TOKENIZER) == ("'3'", "'4+5='") and drift.worst.position == len(turn)


def test_rescored_documents_count_whatever_their_age_and_no_older_ones():
    made = documents([0] * 6, sampler_offset=-0.125)
    drift = report(made, {}, ("sampler_log_probs",))
    assert drift.metrics(TOKENIZER)["tokens"] == 14 and drift.metrics(TOKENIZER)["max"] == 0.125
    assert report(documents([0] * 6), {0: 3.0}) is None


def test_tokens_that_are_not_finite_are_counted_and_the_first_is_named():
    drift = report(documents([SEEN] * 6), {SEEN: np.nan})
    assert drift.metrics(TOKENIZER)["num_non_finite"] == 6 and drift.metrics(TOKENIZER)["max"] == 0.0
    assert len(lines := drift.lines(TOKENIZER)) == 3
    first = "the first an end token after '1+2=3', position 6 of document 0"
    assert lines[1] == f"drift, ratios outside [0.9, 1.1]: 0.00% of 14 tokens; 6 NOT FINITE, {first}"


@pytest.mark.parametrize(("docs", "expected"), [(512, False), (1024, False), (256, True), (768, True), (0, False)])
def test_old_log_probs_are_rescored_where_a_rollout_feeds_several_steps(docs, expected):
    config = Config(rollout=RolloutConfig(64, 8), schedule=ScheduleConfig(docs_per_step=docs))
    assert config.resolved().rollout.rescore is expected
    named = dataclasses.replace(config, rollout=RolloutConfig(64, 8, rescore=not expected))
    assert named.resolved().rollout.rescore is not expected
    # An older policy may have drawn what is stored.
    stored = dataclasses.replace(config, source="stored:documents.jsonl")
    assert stored.resolved().rollout.rescore is False
    corrected = dataclasses.replace(stored, correction=CorrectionConfig(level="token"))
    assert corrected.resolved().rollout.rescore is True
