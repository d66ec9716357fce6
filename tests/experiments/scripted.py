"""A policy that always says the same, in the place of a model."""

import numpy as np

from experiments.models.tokenizer import EOS_ID
from experiments.sampling.policy import Generation


class ScriptedPolicy:
    """Completes every prompt with the same answers, the second of them greedily, each drawn with log-probs of -0.5."""

    version = 0

    def __init__(self, tokenizer, answers):
        self.tokenizer, self.answers = tokenizer, answers

    def generate(self, prompts, options, *, copies=1, seed=(), pad_to=None):
        """See `Policy`."""
        answers = self.answers[: copies - options.greedy_last] + self.answers[1 : 1 + options.greedy_last]
        return [self._generation(text, options.max_new_tokens) for text in answers] * len(prompts)

    def _generation(self, text, longest):
        ids = np.array([*self.tokenizer.encode(text), EOS_ID][:longest], np.int32)
        reason = "stop" if ids[-1] == EOS_ID else "length"
        return Generation(ids, np.full(ids.shape, -0.5, np.float32), reason)
