"""Training experiments built on jaxlogp: tasks, a small language model, rollouts and a GRPO trainer."""
