"""Warnings of steps that teach nothing and of spikes, and drawing further prompts where groups have no difference."""

import dataclasses
from types import SimpleNamespace

import pytest

from experiments.config import GuardsConfig, RolloutConfig
from experiments.experience.prompts import PromptStream, fits_completion
from experiments.experience.rollout_metrics import RolloutMetrics
from experiments.experience.rollouts import Rollouts
from experiments.loop import alerts
from experiments.loop.alerts import WINDOW, StepMonitor, over_median, with_norm
from experiments.models.tokenizer import tokenizer_for
from experiments.sampling.options import SamplingOptions
from experiments.tasks import Rewards, RewardTerm, make_task
from tests.experiments.scripted import ScriptedPolicy

TASK = make_task("addition:1")
TOKENIZER = tokenizer_for(TASK.alphabet)
POLICY = ScriptedPolicy(TOKENIZER, ("7", "8"))
PROMPTS, COPIES = 4, 2


def rollouts(reward=lambda example, completion: 0.0, *, longest=3, epochs=None, task=TASK, **options):
    config = RolloutConfig(prompts_per_rollout=PROMPTS, num_generations=COPIES, **options)
    rewards = Rewards((RewardTerm("odd", reward),))
    return Rollouts(PromptStream(task, 0, epochs), rewards, config, SamplingOptions(longest), 5, "centred")


def warnings_of(made, steps, policy=POLICY):
    """What is warned of, by step."""
    watch, found = StepMonitor(GuardsConfig(), 3), {}
    for step in range(1, steps + 1):
        for warning in watch.warnings(step, {}, made.next(policy).counts):
            found[step] = warning
    return found


def test_steps_that_teach_nothing_are_warned_of_and_then_less_often():
    found = warnings_of(rollouts(), 21)
    assert list(found) == [5, 10, 20]
    words = "every group had equal rewards for 5 steps in a row: no learning signal (every reward is 0)"
    assert found[5] == f"step 5: {words}"


def test_a_loss_that_rewards_do_not_enter_has_nothing_to_learn_from_them():
    watch, made = StepMonitor(GuardsConfig(), 3, rewarded=False), rollouts()
    assert not any(watch.warnings(step, {}, made.next(POLICY).counts) for step in range(1, 7))


def test_steps_of_a_source_without_any_advantage_are_warned_of_too():
    watch, none = StepMonitor(GuardsConfig(), 3), RolloutMetrics()
    nothing, other, supervised = ({"max_advantage": x, "min_advantage": 0.0} for x in (0.0, 1.0, None))
    steps = [*[nothing] * 4, other, *[nothing] * 5, *[supervised, {}] * 5]
    found = {step: watch.warnings(step, values, none) for step, values in enumerate(steps, 1)}
    assert {step: each for step, each in found.items() if each} == {
        10: ["step 10: every document had advantage 0 for 5 steps in a row: no learning signal"]
    }


def test_one_group_with_a_difference_is_enough():
    right = TASK.example(2, "train")
    reward = lambda example, completion: float(example == right and completion == "7")  # noqa: E731
    # The third prompt is in the first of these rollouts.
    assert list(warnings_of(rollouts(reward=reward), 7)) == [6]


def test_after_a_step_that_teaches_the_next_warning_comes_as_early_as_the_first():
    same, other = (RolloutMetrics(groups=2, degenerate=number, completions=4) for number in (2, 1))
    watch = StepMonitor(GuardsConfig(), 3)
    steps = [*[same] * 10, other, *[same] * 5]
    assert [step for step, counts in enumerate(steps, 1) if watch.warnings(step, {}, counts)] == [5, 10, 16]


def test_many_truncated_completions_are_warned_of_at_once_and_then_less_often():
    counts = RolloutMetrics(groups=2, completions=10, truncated=3)
    watch = StepMonitor(GuardsConfig(), 7)
    warned = {step: watch.warnings(step, {}, counts) for step in range(1, 6)}
    assert [step for step, found in warned.items() if found] == [1, 2, 4]
    assert warned[1] == ["step 1: 3 of 10 completions were truncated at 7 tokens; raise --rollout.max-new-tokens"]
    assert StepMonitor(GuardsConfig(), 7).warnings(1, {}, RolloutMetrics(groups=2, completions=10, truncated=2)) == []


CAUSES = {
    "each group its own": (
        {"reward": lambda example, completion: float(len(example.answer))},
        ("7", "8"),
        "within each group rewards are equal",
    ),
    "empty": ({}, ("", ""), "every reward is 0, and every completion is empty"),
    "cut": ({}, ("777", "888"), "every reward is 0, and every completion was truncated at 3 tokens"),
    "too short": (
        {"longest": 1},
        ("7", "8"),
        "every reward is 0, and no answer can be written in the 3 tokens of a completion",
    ),
}


@pytest.mark.parametrize("name", CAUSES)
def test_a_warning_says_what_is_the_same(name, monkeypatch):
    monkeypatch.setattr(alerts, "DEGENERATE_STEPS", 1)
    options, answers, words = CAUSES[name]
    (warning,) = warnings_of(rollouts(**options), 1, ScriptedPolicy(TOKENIZER, answers)).values()
    assert warning.endswith(f" ({words})")


def test_a_cause_is_one_of_all_draws_of_a_step():
    """Each draw for itself has one reward alone."""
    one, other = (
        RolloutMetrics(groups=2, degenerate=2, completions=4, lowest=reward, highest=reward, rewards={"odd": reward})
        for reward in (0.0, 1.0)
    )
    for both in (RolloutMetrics() + one + other, other + one):
        assert both.why_no_signal(3) == "within each group rewards are equal"
        assert both.metrics()["reward/odd"] == 1 / 8 and both.metrics()["degenerate_groups"] == 1.0
    some = RolloutMetrics() + dataclasses.replace(one, unfit=1, empty=3, truncated=3)
    assert some.why_no_signal(3) == "every reward is 0"
    assert RolloutMetrics(groups=2, degenerate=2).why_no_signal(3) == "within each group rewards are equal"


def test_an_answer_in_characters_that_the_model_lacks_does_not_fit():
    example = TASK.example(0, "train")
    assert fits_completion(TOKENIZER, example, 3)
    assert not fits_completion(TOKENIZER, dataclasses.replace(example, answer="x"), 3)


def test_a_spike_is_a_multiple_of_the_median_before_it():
    norms, found = [], []
    watch = StepMonitor(GuardsConfig(spike_factor=10.0), 3)
    for step, norm in enumerate([*[1.0, 2.0, 3.0] * 4, 21.0, float("nan"), 2.0], start=1):
        values = {"grad_norm": norm, "grad_norm_over_median": over_median(norms, norm)}
        norms = with_norm(norms, norm)
        found += watch.warnings(step, values, RolloutMetrics())
        assert (values["grad_norm_over_median"] is None) == (step <= 8 or step == 14)
    assert found == ["step 13: gradient norm 21, 10.5 times the median of the norms before it"]
    for norm in range(100):
        before, norms = norms, with_norm(norms, float(norm))
        assert before is not norms, "a checkpoint may still be written of the former"
    assert norms == [float(norm) for norm in range(100 - WINDOW, 100)]
    assert over_median([0.0] * 9, 1.0) is None
    for norm in (float("nan"), float("inf")):
        assert with_norm([1.0, 2.0], norm) == [1.0, 2.0], "no median could be taken of it"
    values = {"grad_norm": 21.0, "grad_norm_over_median": 10.5}
    assert StepMonitor(GuardsConfig(spike_factor=0.0), 3).warnings(1, values, RolloutMetrics()) == []


def differs_for(prompts):
    """A reward that tells two answers apart for these examples alone, and notes which were asked for."""
    seen = []

    def reward(example, completion):
        seen.append(example.prompt)
        return float(example.prompt in prompts and completion == "7")

    return reward, seen


def test_further_prompts_take_the_place_of_groups_without_a_difference():
    order = [TASK.example(index, "train").prompt for index in range(12)]
    reward, seen = differs_for({order[1], *order[5:8], order[8], order[11]})
    made = rollouts(reward=reward, resample_degenerate=True)
    drawn = made.next(POLICY)
    documents, values = drawn.documents, drawn.counts.metrics()
    prompts = [TOKENIZER.decode(each.tokens[: each.label_positions[0]].tolist()) for each in documents]
    wanted = [order[1], *order[5:8]]
    assert [prompt.strip() for prompt in prompts] == [each for each in wanted for _ in range(COPIES)]
    assert all(document.advantages != 0.0 for document in documents)
    assert made.state() == {"rollouts": 2, "cursor": 8}, "all that a resume needs"
    assert values["degenerate_groups"] == 4 / 8 and values["resampled_rollouts"] == 1
    assert values["filled_groups"] == values["unused_groups"] == 0
    assert "resampled_rollouts" not in RolloutMetrics(groups=1, completions=1).metrics()


def test_the_bound_is_kept_and_groups_without_a_difference_fill_the_rest():
    """What is drawn beyond the number is counted."""
    order = [TASK.example(index, "train").prompt for index in range(12)]
    reward, _ = differs_for(set(order[1:8]))
    drawn = rollouts(reward=reward, resample_degenerate=True).next(POLICY)
    assert len(drawn.documents) == PROMPTS * COPIES and drawn.counts.metrics()["unused_groups"] == 3
    reward, _ = differs_for({order[6]})
    made = rollouts(reward=reward, resample_degenerate=True, max_resamples=2)
    drawn = made.next(POLICY)
    documents, values = drawn.documents, drawn.counts.metrics()
    assert len(documents) == PROMPTS * COPIES and made.state()["rollouts"] == 3
    assert [document.advantages != 0.0 for document in documents] == [True] * 2 + [False] * 6
    assert values["resampled_rollouts"] == 2 and values["filled_groups"] == 3
    assert values["degenerate_groups"] == 11 / 12


def test_at_the_end_of_the_data_no_further_prompts_are_asked_for():
    """Of six prompts, four and two are drawn."""
    six = SimpleNamespace(num_examples=lambda split: 6, example=TASK.example)
    made = rollouts(task=six, epochs=1, resample_degenerate=True, max_resamples=4)
    drawn = made.next(POLICY)
    values = drawn.counts.metrics()
    assert len(drawn.documents) == PROMPTS * COPIES and made.state()["cursor"] == 6
    assert (values["resampled_rollouts"], values["filled_groups"], drawn.counts.groups) == (1, PROMPTS, 6)
    assert made.next(POLICY) is None
