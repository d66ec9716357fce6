"""The loop of a run: documents from a source, steps of a learner, evaluations and checkpoints."""
