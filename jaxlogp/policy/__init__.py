"""Tools for a policy update: documents packed into micro-batches, advantages, accumulation over a step, metrics."""
