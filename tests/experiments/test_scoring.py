"""What the trainer's own forward pass says of documents: the KL between two policies, document by document."""

import dataclasses
import math
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.learner.learner import Learner
from experiments.learner.packing import Packing
from experiments.learner.scoring import kl_between, log_probs_of
from jaxlogp import Document
from tests.experiments.stacked import stacked

LENGTHS = (3, 1, 4, 2, 5)
LOG_PROBS = {"policy": lambda token: -0.1 * token, "reference": lambda token: -0.1 * token + 0.01 * (token - 6)}
"""Under either policy a token has the same log-prob wherever it stands."""


class Sums:
    """Scores by the table above."""

    def score(self, params, scored):
        batch = stacked(scored)
        log_probs = np.where(batch.mask, LOG_PROBS[params](batch.targets.astype(np.float32)), 0.0)
        return log_probs.astype(np.float32)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_kl_is_a_mean_over_the_tokens_of_all_documents(ranks):
    completions = [list(range(1, length + 1)) for length in LENGTHS]
    documents = [Document.of_completion([11, 11], tokens, np.zeros(len(tokens))) for tokens in completions]
    packing = Packing(ranks=ranks, rows=1, row_length=8, vocab_size=12, pad_id=0)
    ours, theirs = (log_probs_of(documents, Sums(), each, packing) for each in ("policy", "reference"))
    found = kl_between(ours, theirs)
    differences = [0.01 * (token - 6) for tokens in completions for token in tokens]
    wanted = math.fsum(math.exp(each) - 1.0 - each for each in differences) / sum(LENGTHS)
    # A log-ratio is the difference of two fp32 numbers below 1, each half an ulp off: 1.2e-7 × |d| ≤ 0.05.
    assert found == pytest.approx(wanted, abs=6e-9)
    assert kl_between(ours, ours) == 0.0
    # A learner asks for it at temperature 1, whatever it trains at, over the whole vocabulary.
    asked = []
    for temperature in (1.0, 0.5):
        sums = lambda objective, temperature: asked.append(temperature) or Sums()  # noqa: E731
        learner = SimpleNamespace(
            state=SimpleNamespace(params="policy"), reference="reference", gradients=Sums() if temperature == 1.0 else None,
            _temperature=temperature, _backend=SimpleNamespace(gradients=sums), _objective=None,
            _scored_packing=dataclasses.replace(packing, support_capacity=8),
        )  # fmt: skip
        assert Learner.kl_to_reference(learner, documents) == found
    assert asked == [1.0] and kl_between(theirs, ours) != pytest.approx(wanted, abs=6e-9)


def test_a_reference_keeps_its_numbers_when_a_step_takes_over_the_memory_of_the_parameters():
    learner = SimpleNamespace(state=SimpleNamespace(params={"w": jnp.arange(3.0)}), keeps_reference=True)
    Learner.keep_reference(learner)
    learner.state.params["w"].delete()
    np.testing.assert_array_equal(learner.reference["w"], [0.0, 1.0, 2.0])
    learner.keeps_reference = False
    Learner.keep_reference(learner)
    assert learner.reference is None
