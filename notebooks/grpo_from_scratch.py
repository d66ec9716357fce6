# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # GRPO from scratch in five minutes
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/jaxlogp/jaxlogp/blob/main/notebooks/grpo_from_scratch.ipynb)
#
# A decoder with about 124,000 parameters learns to add two-digit numbers. It first imitates worked examples, until about
# a third of its sampled answers are right. From then on it sees no answers. For every prompt it samples eight
# completions, a verifier marks each as right or wrong, and the policy moves toward those that scored above the mean of
# their group.
#
# The outputs below come from two CPU cores.

# %% [markdown]
# ## Install
#
# On Colab this cell clones the project and installs it. In a checkout that is installed with the extra `experiments` it
# does nothing. It never replaces JAX: pip is told to keep the installed version, and stops with an error if that is not
# one of 0.10 to 0.12. In that case update JAX, restart the runtime, and run this cell again.

# %%
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

here = Path.cwd()
checkout = next(
    (folder for folder in (here, here.parent) if (folder / "experiments/grpo.py").exists()), here / "checkout"
)
if not checkout.exists():
    source = "https://github.com/jaxlogp/jaxlogp"
    subprocess.run(["git", "clone", "--quiet", "--depth=1", source, checkout], check=True)
installed = {package.name: package.version for package in distributions()}
if "jaxlogp" not in installed:
    keep = [f"{name}=={installed[name]}" for name in ("jax", "jaxlib") if name in installed]
    packages = ["-e", f"{checkout}[experiments]", *keep]
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *packages], check=True)
sys.path.insert(0, str(checkout))

# %% [markdown]
# ## The run
#
# This is the default run of `python -m experiments.grpo`, with fewer lines printed. Set `JAXLOGP_NOTEBOOK_STEPS` to a
# small number for a run that only shows that everything works.
#
# The columns of the table: the mean reward of a step, the share of groups whose rewards are all equal, entropy in nats
# per token, clipped tokens, the mean ratio of new to old probabilities, the largest difference between sampler and
# trainer, documents, and speed.

# %%
import dataclasses
import os

from experiments import Config, train
from experiments.config import DriftConfig
from experiments.runs.folder import metric_of

config = Config(log_every=100, drift=DriftConfig(every=0))
steps = os.environ.get("JAXLOGP_NOTEBOOK_STEPS")
if steps is not None:
    config = dataclasses.replace(
        config,
        warm_start=dataclasses.replace(config.warm_start, max_steps=int(steps)),
        schedule=dataclasses.replace(config.schedule, steps=int(steps)),
        evaluation=dataclasses.replace(config.evaluation, num_prompts=32, every=0),
    )

result = train(config)

# %% [markdown]
# ## What it learned
#
# Exact match is measured on held-out prompts: a hash of the prompt decides which prompts no training step may use. The
# reward is that of the sampled completions, on training prompts.

# %%
import statistics

import matplotlib.pyplot as plt

training = [record for record in result.metrics if record["kind"] == "train"]
evaluations = [record for record in result.metrics if record["kind"] == "eval"]
blocks = [training[start : start + 20] for start in range(0, len(training), 20)]
block_ends = [block[-1]["step"] for block in blocks]

figure, axes = plt.subplots(figsize=(8, 3.4), layout="constrained")
rewards = [statistics.fmean(record["reward_mean"] for record in block) for block in blocks]
axes.plot(block_ends, rewards, color="#8c959f", linewidth=1, label="training reward, mean of 20 steps")
for decoding, label, color in (
    ("sampled", "held-out, temperature 1", "#1f5fa8"),
    ("greedy", "held-out, greedy", "#d1661c"),
):
    scores = [record[f"exact_match_{decoding}"] for record in evaluations]
    axes.plot([record["step"] for record in evaluations], scores, color=color, marker="o", label=label)
axes.set_ylim(0, 1)
axes.set_xlabel("optimizer step of GRPO")
axes.set_ylabel("share of right answers")
axes.legend(loc="lower right", frameon=False)
plt.show()

# %% [markdown]
# The run folder, printed above, has more curves in `curves.png`. It also has a checkpoint, every metric of every step in
# `metrics.jsonl`, and samples.

# %%
import json

samples = [json.loads(line) for line in result.run.samples.read_text().splitlines()]
sampled_at = [sample["step"] for sample in samples]
for title, step in (("before", min(sampled_at)), ("after", max(sampled_at))):
    print(title)
    for sample in [sample for sample in samples if sample["step"] == step][:8]:
        verdict = "right" if sample["reward"] == 1.0 else f"wrong, the answer is {sample['answer']}"
        print(f"  {sample['prompt']}{sample['completion']}   ({verdict})")

# %% [markdown]
# ## Can the numbers be trusted?
#
# The sampler computes log-probs one token at a time, the trainer from packed rows. The two should agree up to rounding.
# `computed/drift_max` is the largest difference over the tokens of a step that are computed: completions of a prompt
# whose rewards are all equal have no advantage, and are not. Each rollout is used for one update, so apart from this
# drift the ratio of new to old probabilities is 1.


# %%
def logged(records, name):
    """Returns a metric of the steps that computed any document."""
    return [value for record in records if (value := metric_of(record, name)) is not None]


drift = [max(logged(block, "drift_max"), default=0.0) for block in blocks]
ratios = logged(training, "ratio_new_old")
figure, axes = plt.subplots(figsize=(8, 2.6), layout="constrained")
axes.semilogy(block_ends, drift, color="#1f5fa8", linewidth=1)
axes.set_ylim(1e-7, 1)
axes.set_xlabel("optimizer step of GRPO")
axes.set_ylabel("drift_max [nats]")
axes.set_title("Sampler against trainer, largest of 20 steps")
plt.show()
print(f"largest drift of any step: {max(drift):.1e} nats")
print(f"largest |ratio - 1| of any step: {max((abs(ratio - 1) for ratio in ratios), default=0.0):.1e}")
print(f"head: {training[0]['head_path']}, engine {training[0]['head_engine']}")

# %% [markdown]
# More options, your own data and your own reward: `docs/training.md`.
