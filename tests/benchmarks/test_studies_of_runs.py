"""The source of another sampler, and the figure of learning curves."""

import json

import numpy as np
import pytest

from benchmarks.studies import learning_curves, other_sampler
from experiments.models.tokenizer import tokenizer_for
from experiments.sampling.policy import Generation
from experiments.tasks.arithmetic import Addition
from jaxlogp import Support


class FakePolicy:
    """Answers every prompt right, with log-probs of -version."""

    def __init__(self, version):
        self.version, self.tokenizer = version, tokenizer_for(Addition.alphabet)

    def generate(self, prompts, options, *, copies, seed, pad_to):
        assert pad_to[1] >= max(map(len, prompts))
        answers = [self.tokenizer.encode(str(sum(self._numbers(prompt)))) for prompt in prompts]
        drawn = [[*answer, self.tokenizer.eos_ids[0]] for answer in answers for _ in range(copies)]
        return [
            Generation(
                np.array(ids, np.int32),
                np.full(len(ids), -float(self.version), np.float32),
                "stop",
                Support.from_lists([[each] for each in ids]) if options.record_support else None,
            )
            for ids in drawn
        ]

    def _numbers(self, prompt):
        return map(int, self.tokenizer.decode(prompt).rstrip("=").split("+"))


@pytest.mark.parametrize("support", [0, 1])
def test_documents_are_those_of_the_policy_of_so_many_calls_ago(monkeypatch, support):
    monkeypatch.setenv(other_sampler.VARIABLE, f"top_p=0.8,lag=2,support={support}")
    source = other_sampler.Rollouts()
    calls = [source.next(FakePolicy(version)) for version in range(5)]
    assert [{int(document.versions) for document in call} for call in calls] == [{0}, {0}, {0}, {1}, {2}]
    prompts = [tuple(document.tokens[: document.label_positions[0]]) for call in calls for document in call]
    assert len(set(prompts)) > 4 * other_sampler.PROMPTS, "each call has prompts of its own"
    for document in calls[-1]:
        np.testing.assert_array_equal(document.sampler_log_probs, -2.0)
        assert float(document.reward) == 1.0 and (document.support is not None) == bool(support)


def test_a_panel_for_each_group_of_seeds(tmp_path):
    for name, values in (("a-0", (0.1, 0.5)), ("a-1", (0.2, 0.6)), ("b-0", (0.3, 0.4))):
        (tmp_path / name).mkdir()
        lines = [
            json.dumps({"kind": "eval", "step": 100 * step, "exact_match_sampled": value})
            for step, value in enumerate(values)
        ]
        (tmp_path / name / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    runs = tuple(str(tmp_path / name) for name in ("a-0", "a-1", "b-0"))
    config = learning_curves.LearningCurvesConfig(runs=runs, figure=str(tmp_path / "curves.png"))
    path = learning_curves.main(config)
    assert path.read_bytes().startswith(b"\x89PNG")
    means = {name: learning_curves.mean_of(seeds) for name, seeds in learning_curves.read_groups(config).items()}
    assert means == {"a": pytest.approx({0: 0.15, 100: 0.55}), "b": {0: 0.3, 100: 0.4}}
