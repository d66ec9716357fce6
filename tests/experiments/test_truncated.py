"""Completions without an end token, and what a rollout counts: reward parts, lengths, masked documents, denominators."""

from dataclasses import replace

import numpy as np
import pytest

from experiments.config import RewardConfig, RolloutConfig
from experiments.experience.prompts import PromptStream, held_out_examples
from experiments.experience.rollout_metrics import RolloutMetrics
from experiments.experience.rollouts import ROLLOUTS, Rollouts
from experiments.experience.scoring import score, to_completion, to_samples
from experiments.loop.evaluation import CHECKS, EVALUATION, AnswerEvaluation
from experiments.models.tokenizer import tokenizer_for
from experiments.sampling.options import SamplingOptions
from experiments.sampling.policy import SamplerPolicy, Samplers
from experiments.sampling.sampler import Samples
from experiments.tasks import Rewards, RewardTerm, make_task
from jaxlogp import Support, pack_documents, policy_loss
from jaxlogp.losses import grpo, grpo_paper
from tests.experiments.scripted import ScriptedPolicy

TASK = make_task("addition:1")
TOKENIZER = tokenizer_for(TASK.alphabet)
ANSWERS = ("7", "12", "123", "9")
"""The third is cut: it has no end token."""
POLICY = ScriptedPolicy(TOKENIZER, ANSWERS)


DIGITS = RewardTerm("digits", lambda example, completion: len(completion), 1.0)
REWARDS = Rewards((DIGITS, RewardTerm("ended", lambda example, completion: completion.ended, 0.5)))


def rollouts(advantages="centred", reward=None, **options):
    config = RolloutConfig(prompts_per_rollout=2, num_generations=4, **options)
    return Rollouts(PromptStream(TASK, 0, None), REWARDS, config, SamplingOptions(3), 5, advantages, reward)


def test_a_completion_knows_whether_it_ended():
    examples = [TASK.example(0, "train")] * 4
    drawn = POLICY.generate([[5]], SamplingOptions(3), copies=4)
    texts = [to_completion(TOKENIZER, each) for each in drawn]
    assert texts == list(ANSWERS)
    assert [(text.num_tokens, text.ended) for text in texts] == [(2, True), (3, True), (3, False), (2, True)]
    (scored,), empty = score(TOKENIZER, examples, drawn, REWARDS)
    assert scored.rewards.tolist() == [1.5, 2.5, 3.0, 1.5] and not empty.any()
    assert scored.parts.tolist() == [[1, 1], [2, 1], [3, 0], [1, 1]]
    (sample,) = to_samples(TOKENIZER, examples[:1], drawn, scored, REWARDS.names)
    assert sample[1:] == ("7", examples[0].answer, 1.5, {"digits": 1.0, "ended": 1.0}, 2, True)
    assert sample.prompt == examples[0].prompt and type(sample.completion) is str


class Noting(ScriptedPolicy):
    """Notes how it was asked."""

    def generate(self, prompts, options, *, copies=1, seed=(), pad_to=None):
        self.asked = len(prompts), options, copies, seed, pad_to
        return super().generate(prompts, options, copies=copies)


def test_an_evaluation_tells_drawn_answers_from_greedy_ones():
    """Every prompt is answered with 7 by a draw, and with 123 greedily, which is cut."""
    policy, options = Noting(TOKENIZER, ("7", "123")), SamplingOptions(3)
    evaluation = AnswerEvaluation(TASK, REWARDS, 8, 5, options)
    found, examples = evaluation.of(policy), held_out_examples(TASK, 8)
    assert policy.asked == (8, replace(options, greedy_last=True), 2, (EVALUATION,), (8, 5))
    share = np.mean([example.answer == "7" for example in examples])
    assert found.scores == (share, 0.0, None) and 0.0 < share < 1.0
    drawn = {"exact_match": share, "reward": 1.5, "completion_length": 2.0, "truncated_share": 0.0}
    greedy = {"exact_match": 0.0, "reward": 3.0, "completion_length": 3.0, "truncated_share": 1.0}
    wanted = {f"{name}_sampled": value for name, value in drawn.items()}
    assert found.metrics() == wanted | {f"{name}_greedy": value for name, value in greedy.items()}
    assert [(each.prompt, each.completion) for each in found.samples] == [(each.prompt, "7") for each in examples]
    for prompt, document in zip(found.prompts, found.documents, strict=True):
        assert document.label_positions.tolist() == [len(prompt), len(prompt) + 1]
        assert document.tokens[: len(prompt)].tolist() == prompt
    # A check of the warm start draws anew at each step.
    assert evaluation.exact_match_on(examples, policy, 12) == share
    assert policy.asked == (8, options, 1, (CHECKS, 12), (8, 5))


def test_several_samples_of_a_prompt_are_averaged_and_one_of_them_suffices():
    """Every prompt is answered with 7 and with 12 by draws, and with 12 greedily."""
    policy = Noting(TOKENIZER, ("7", "12"))
    evaluation, examples = AnswerEvaluation(TASK, REWARDS, 12, 5, SamplingOptions(3), 2), held_out_examples(TASK, 12)
    found = evaluation.of(policy)
    assert evaluation.shape.copies == policy.asked[2] == 3
    sevens, twelves = (np.mean([example.answer == text for example in examples]) for text in ("7", "12"))
    assert sevens > 0.0 and twelves > 0.0
    # Verdicts are 0 and 1, and shares of 12 and 24 of them are rounded once.
    assert found.scores == pytest.approx(((sevens + twelves) / 2, twelves, sevens + twelves), rel=1e-15)
    assert found.metrics()["exact_match_any_sample"] == found.scores.any_sample
    assert f", any sample {sevens + twelves:.3f}, greedy" in str(found.scores) and len(found.scores.named()) == 3
    assert [each.completion for each in found.samples] == ["7", "12"] * 8
    assert [each.prompt for each in found.samples] == [example.prompt for example in examples[:8] for _ in range(2)]
    for prompt, one, other in zip(found.prompts, found.documents[::2], found.documents[1::2], strict=True):
        assert one.tokens[: len(prompt)].tolist() == other.tokens[: len(prompt)].tolist() == prompt
        assert (one.num_labels, other.num_labels) == (2, 3)


def test_a_stop_text_ends_a_completion_at_the_token_that_completes_it():
    def make_sampler(options, row_length):
        assert (options, row_length) == (SamplingOptions(3, temperature=0.5), 11)

        def draw(params, prompts, lengths, copies, key):
            drawn = [each.ids.tolist() for each in POLICY.generate(prompts, SamplingOptions(3), copies=copies)]
            tokens = np.array([row + [0] * (3 - len(row)) for row in drawn], np.int32)
            log_probs = np.full(tokens.shape, -0.5, np.float32)
            return Samples(tokens, log_probs, np.array([len(row) for row in drawn], np.int32))

        return draw

    policy = SamplerPolicy(Samplers(make_sampler, TOKENIZER, 0.5, 8), {}, 0, None, None)
    drawn = policy.generate([[5]], SamplingOptions(3, stop=("12", "3")), copies=4)
    texts = [to_completion(TOKENIZER, each) for each in drawn]
    assert texts == ["7", "12", "12", "9"]
    assert [(text.num_tokens, text.ended) for text in texts] == [(2, True), (2, True), (2, True), (2, True)]
    assert [len(each.ids) for each in drawn] == [len(each.log_probs) for each in drawn] == [2, 2, 2, 2]


@pytest.mark.parametrize(
    "advantages, expected",
    [
        ("greedy_baseline", [-1.0, 0.0, 0.5, -1.0]), ("length_weighted", [-3 / 7, 4 / 7, 15 / 14, -3 / 7]),
        ("leave_one_out", [-5 / 6, 0.5, 7 / 6, -5 / 6]),
        # Of digits -3/4, 1/4, 5/4, -3/4 over √(11/12), of ended 1/4, 1/4, -3/4, 1/4 over 1/2, with half the weight; then
        # both groups over the deviation of all eight.
        ("decoupled", [-0.934843, 0.895791, 0.973894, -0.934843]),
    ],
)  # fmt: skip
def test_advantages_are_those_of_the_algorithm(advantages, expected):
    """Rewards are 1.5, 2.5, 3 (masked) and 1.5, of 2, 3 and 2 labels; the greedy completion is the second answer."""
    made = rollouts(advantages, mask_truncated=True).next(POLICY)
    # Differences of numbers below 4 and a quotient, in fp32.
    np.testing.assert_allclose([each.advantages for each in made.documents], 2 * expected, rtol=0.0, atol=1e-6)
    assert made.counts.degenerate == 0, "a group may have an advantage of 0 among others"


class WithReference(ScriptedPolicy):
    """Its reference has log-probs of the tokens that are further and further from the policy's."""

    def reference_log_probs(self, documents):
        self.asked = [each.tokens.tolist() for each in documents]
        return [each.sampler_log_probs - np.float32(0.25) * np.arange(1, each.num_labels + 1) for each in documents]


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_a_kl_in_the_reward_is_the_sum_over_the_tokens(estimator):
    reward = RewardConfig(kl_coefficient=0.5, kl_estimator=estimator)
    policy = WithReference(TOKENIZER, ANSWERS)
    made = rollouts(reward=reward).next(policy)
    assert policy.asked == [each.tokens.tolist() for each in made.documents]
    steps = {"k1": lambda d: d, "k2": lambda d: d * d / 2, "k3": lambda d: np.exp(-d) - 1.0 + d}[estimator]
    kl = [sum(steps(0.25 * (place + 1)) for place in range(count)) for count in (2, 3, 3, 2)]
    rewards = np.array([1.5, 2.5, 3.0, 1.5]) - 0.5 * np.array(kl)
    advantages = [each.advantages for each in made.documents]
    # Differences of numbers below 4 in fp32.
    np.testing.assert_allclose(advantages, 2 * (rewards - rewards.mean()).tolist(), atol=1e-6)
    assert [each.reward for each in made.documents[:4]] == [1.5, 2.5, 3.0, 1.5], "those of the functions"
    assert made.counts.metrics()["reward_kl"] == pytest.approx(np.mean(kl), rel=1e-6)


def test_a_kl_that_fp32_does_not_hold_is_bounded():
    """Otherwise every advantage of its group would be NaN."""
    far = np.array([[1000.0, 0.0], [0.0, -1.0]], np.float32)
    found = RewardConfig(kl_coefficient=1.0, kl_estimator="k3").kl(far)
    assert np.isfinite(found).all() and found[0] > 1e6
    np.testing.assert_allclose(found[1], np.exp(-1.0), rtol=1e-6)


def test_rollouts_are_counted():
    made, policy = rollouts(), Noting(TOKENIZER, ANSWERS)
    assert RolloutMetrics().metrics() == {}
    first = made.next(policy).counts
    assert policy.asked == (2, SamplingOptions(3), 4, (ROLLOUTS, 0), (2, 5))
    once, twice = first.metrics(), (first + made.next(policy).counts).metrics()
    assert policy.asked[3] == (ROLLOUTS, 1), "each rollout has random numbers of its own"
    wanted = {"degenerate_groups": 0.0, "truncated_share": 0.25, "completion_length_mean": 2.5}
    assert once == {**wanted, "truncated_completions": 2, "reward/digits": 1.75, "reward/ended": 0.75}
    assert twice == {**once, "truncated_completions": 4}


def test_completions_of_a_source_that_draws_no_groups_are_counted():
    counted = RolloutMetrics(completions=4, tokens=10, truncated=1).metrics()
    assert counted == {"truncated_completions": 1, "truncated_share": 0.25, "completion_length_mean": 2.5}
    empty = RolloutMetrics(completions=4, support_ids=0).metrics()
    assert empty == {"truncated_completions": 0, "truncated_share": 0.0, "completion_length_mean": 0.0}


def test_masked_completions_have_no_labels_and_stay_in_their_group():
    plain, masked = (rollouts(mask_truncated=each).next(POLICY).documents for each in (False, True))
    assert [document.num_labels for document in plain[:4]] == [2, 3, 3, 2], "without the option nothing is masked"
    for number, (one, other) in enumerate(zip(plain, masked, strict=True)):
        cut = number % 4 == 2
        assert (one.advantages, one.reward) == (other.advantages, other.reward)
        assert other.num_labels == (0 if cut else one.num_labels)
        assert other.tokens.tolist() == one.tokens[: len(one.tokens) - one.num_labels if cut else None].tolist()
    # Rewards 1.5, 2.5, 3.0, 1.5 of each group: the masked one is part of the mean 2.125.
    np.testing.assert_allclose([document.advantages for document in masked[:4]], [-0.625, 0.375, 0.875, -0.625])


class Recording(ScriptedPolicy):
    """Draws every token but the last of an answer from two ids, not from all that it should, and the first from half."""

    version = 7

    def _generation(self, text, longest):
        drawn = super()._generation(text, longest)
        rows, last = drawn.ids.tolist(), np.arange(drawn.ids.size) == drawn.ids.size - 1
        support = Support.from_lists(
            [[token] if end else [token, token + 1] for token, end in zip(rows, last, strict=True)]
        )
        return drawn._replace(support=support, cut=~last, mass=np.float32([0.5, *[0.95] * (len(rows) - 1)]))


def test_supports_are_counted_by_the_token_and_documents_keep_those_of_their_labels():
    """Of answers of 2, 3, 3 (masked) and 2 tokens."""
    source, policy = rollouts(mask_truncated=True), Recording(TOKENIZER, ANSWERS)
    first, second = source.next(policy), source.next(policy)
    wanted = {"support_ids": 1.6, "support_mass": 0.77, "support_narrow": 0.4, "support_cut": 0.6}
    for counts in (first.counts, first.counts + second.counts):
        values = counts.metrics()
        assert {name: values[name] for name in wanted} == pytest.approx(wanted, rel=1e-6)
    assert [each.support.counts.tolist() for each in first.documents[:4]] == [[2, 1], [2, 2, 1], [], [2, 1]]
    assert {each.versions for each in first.documents} == {7}


def sums(documents, loss):
    """The loss where the ratio of every label is 2."""
    batch, rest = pack_documents(documents, rows=8, row_length=8)
    assert not rest and batch.num_documents == 8
    log_probs = batch.per_token["old_log_probs"] + np.float32(np.log(2.0))
    inputs = (batch.per_token["old_log_probs"], batch.per_token["advantages"], batch.mask)
    documents = {"document_ids": batch.document_ids, "num_documents": batch.num_documents}
    return policy_loss(log_probs, *inputs, loss=loss, **documents)


@pytest.mark.parametrize(("loss", "count"), [(grpo(), 2 * 7), (grpo_paper(), 8)])
def test_labels_are_divided_by_what_is_left_and_documents_by_all(loss, count):
    """Two groups of 2, 3, (3 masked) and 2 labels; the clipped objective of a label is min(2 A, 1.2 A)."""
    found = sums(rollouts(mask_truncated=True).next(POLICY).documents, loss)
    labels, advantages = np.array([2, 3, 0, 2]), np.array([-0.625, 0.375, 0.875, -0.625])
    of_label = -np.minimum(2 * advantages, 1.2 * advantages)
    total = 2 * np.sum(of_label * (labels if loss == grpo() else labels > 0))
    assert int(found.count) == count
    # 14 terms below 4, and one rounding of the ratio each.
    np.testing.assert_allclose(float(found.sum), total, atol=14 * 4 * 2**-22)
    np.testing.assert_allclose(float(found.mean()), total / count, atol=4 * 2**-22)
