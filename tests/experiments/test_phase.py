"""What the phases of a run are made of: their ends, checks and sources, with a stand-in for the learner."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from experiments.experience.prompts import PromptStream, encode_answer, encode_prompt
from experiments.learner.objectives import CrossEntropy
from experiments.learner.packing import Packing
from experiments.loop import phase
from experiments.loop.assemble import Setup
from experiments.loop.evaluation import CHECK_PROMPTS, AnswerEvaluation
from experiments.models.tokenizer import tokenizer_for
from experiments.sampling.options import SamplingOptions
from experiments.tasks import make_task
from experiments.tasks.rewards import rewards_of
from tests.experiments.lines import write
from tests.experiments.tiny import tiny

PROMPT = 8


def setup_of(task, learner, evaluation, /, **changes):
    """A setup of which a phase reads little more than its options."""
    given = {"config": tiny("unused", "unused", **changes), "task": task, "learner": learner, "evaluation": evaluation}
    given["sizes"] = SimpleNamespace(prompt=PROMPT)
    given["samplers"] = SimpleNamespace(tokenizer=tokenizer_for(task.alphabet))
    return Setup(**{field.name: given.get(field.name) for field in dataclasses.fields(Setup)})


def learner_of(packing, params, objective=None):
    """What makes a policy and gives its parameters away."""
    state = SimpleNamespace(params=params)
    kept = {"log_probs": None, "reference_log_probs": None, "release": lambda: params}
    return SimpleNamespace(packing=packing, state=state, version=0, objective=objective, **kept)


def test_a_warm_start_learns_examples_until_enough_of_other_prompts_are_answered(tmp_path, monkeypatch):
    records = ({"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(40))
    task = make_task(f"jsonl:{write(tmp_path / 'sums.jsonl', *records)}")
    evaluation, asked = AnswerEvaluation(task, rewards_of(task.verify), 8, PROMPT, SamplingOptions(3)), []
    check = lambda self, examples, policy, step: asked.append((examples, step)) or 0.5  # noqa: E731
    monkeypatch.setattr(AnswerEvaluation, "exact_match_on", check)
    make = lambda backend, objective, optimizer, packing, params: learner_of(packing, params, objective)  # noqa: E731
    monkeypatch.setattr(phase, "Learner", make)
    packing = Packing(1, rows=4, row_length=16, vocab_size=99, pad_id=0, columns=("ref_log_probs",), support_capacity=8)
    options = {"max_steps": 7, "target": 0.75, "batch_size": 6, "check_every": 3}
    trained = setup_of(task, learner_of(packing, "first"), evaluation, warm_start=options, seed=4)
    made = phase.warm_start_phase(trained)
    assert (made.steps, made.evaluate_every, made.evaluates_ends, made.evaluation_name) == (
        7,
        3,
        False,
        "warm_start_eval",
    )
    assert [made.is_reached(right) for right in (0.74, 0.75)] == [False, True]
    learner = made.setup.learner
    assert isinstance(learner.objective, CrossEntropy) and learner.state.params == "first"
    assert learner.packing == dataclasses.replace(packing, columns=(), support_capacity=None)
    assert made.evaluate(5) == (0.5, {"exact_match": 0.5}, [])
    assert asked == [(PromptStream(task, 6, None).take(CHECK_PROMPTS), 5)]
    tokenizer = trained.samplers.tokenizer
    policy = SimpleNamespace(tokenizer=tokenizer)
    wanted = PromptStream(task, 5, None).take(6)
    taken = made.feed.take(policy).documents
    for document, example in zip(taken, wanted, strict=True):
        prompt, answer = encode_prompt(tokenizer, example, PROMPT), encode_answer(tokenizer, example)
        assert document.tokens.tolist() == [*prompt, *answer] and document.num_labels == len(answer)


@pytest.mark.parametrize("kl", [True, False])
def test_the_training_is_evaluated_by_the_present_parameters_with_a_kl_where_it_is_asked_for(kl):
    task, asked = make_task("addition:1"), []
    documents = [object()]
    found = SimpleNamespace(scores="scores", samples=["sample"], documents=documents, metrics=lambda: {"one": 1.0})
    evaluation = SimpleNamespace(of=lambda policy: asked.append(policy) or found)
    learner = learner_of(Packing(1, 1, 8, 99, 0), params := np.zeros(1))
    learner.kl_to_reference = lambda given: 0.25 if given is documents else None
    changes = {"evaluation": {"kl": kl, "every": 3}, "drift": {"every": 5}, "schedule": {"steps": 9}}
    made = phase.training_phase(setup_of(task, learner, evaluation, source=None, **changes))
    assert (made.steps, made.evaluate_every, made.drift_every, made.evaluates_ends) == (9, 3, 5, True)
    wanted = {"one": 1.0, "kl_reference": 0.25} if kl else {"one": 1.0}
    assert made.evaluate(2) == ("scores", wanted, ["sample"]) and asked[0]._params is params
    assert (made.evaluation_name, made.at(2), made.is_reached("scores")) == ("eval", "step 2", False)
