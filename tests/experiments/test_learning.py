"""Learning, seeded and small: the reward of a tiny decoder rises by more than chance or a wrong loss could explain.

Tried once with each of these deliberately wrong; in parentheses the mean reward of the first and the last steps: the
sign of the loss (0.34 to 0.00), the mask moved to the prompts (0.44 to 0.37), advantages dealt to the next completion
(0.44 to 0.03). Each fails this test.
"""

import numpy as np
import pytest

from experiments.loop.run import train
from tests.experiments.tiny import tiny, train_records


@pytest.mark.slow
def test_the_reward_rises(tmp_path):
    options = {"model": {"num_layers": 2}, "schedule": {"steps": 40, "docs_per_step": 128}}
    options |= {"rollout": {"num_generations": 8}, "optimizer": {"learning_rate": 2e-3}}
    rewards = [record["reward_mean"] for record in train_records(train(tiny(tmp_path, "learning", **options)))]
    first, last = np.mean(rewards[:5]), np.mean(rewards[-10:])
    # 640 completions at the start and 1280 at the end: standard errors of 0.02 and 0.015. The run gains about 0.3.
    assert last - first > 0.15, (first, last)
