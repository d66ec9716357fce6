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
# A decoder with under half a million parameters learns two-digit addition. First it imitates worked examples, until
# about a third of its sampled answers are right. From then on it is shown no answers: it samples eight completions for
# every prompt, a verifier says which of them are right, and the policy moves towards those that did better than their
# group.

# %% [markdown]
# ## Install
#
# The trainer runs from a checkout. On Colab this fetches one; in a checkout that is already installed it finds it.

# %%
import subprocess
import sys
from pathlib import Path

here = Path.cwd()
checkout = next(
    (folder for folder in (here, here.parent) if (folder / "experiments/grpo.py").exists()), here / "checkout"
)
if not checkout.exists():
    source = "https://github.com/jaxlogp/jaxlogp"
    subprocess.run(["git", "clone", "--quiet", "--depth=1", source, checkout], check=True)
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "-e", f"{checkout}[experiments]"], check=True)
sys.path.insert(0, str(checkout))

# %% [markdown]
# ## The run
#
# The same run as `python -m experiments.grpo`. `JAXLOGP_NOTEBOOK_STEPS` shortens it, for tests of this notebook;
# without it the run is the default one.

# %%
import dataclasses
import os
import tempfile

from IPython.display import Image, display

from experiments import Config, train

config = Config(out=tempfile.mkdtemp(), name="notebook")
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
# The scores are exact match on prompts that no training step has seen; a hash of the prompt decides which.

# %%
for name in ("sampled", "greedy"):
    print(f"{name:8} {getattr(result.before, name):.2f} -> {getattr(result.after, name):.2f}")
display(Image(filename=str(result.run.curves), width=1000))

# %% [markdown]
# ## Samples before and after

# %%
import json

samples = [json.loads(line) for line in result.run.samples.read_text().splitlines()]
steps_sampled = [sample["step"] for sample in samples]
for title, step in (("before", min(steps_sampled)), ("after", max(steps_sampled))):
    print(title)
    for sample in [sample for sample in samples if sample["step"] == step][:8]:
        verdict = "right" if sample["reward"] == 1.0 else f"wrong, {sample['answer']}"
        print(f"  {sample['prompt']}{sample['completion']}   ({verdict})")

# %% [markdown]
# ## Whether the numbers can be trusted
#
# `drift_max` is the largest difference, over all sampled tokens of a step, between the log-prob under which the sampler
# drew the token and the one that the trainer computes from packed rows. With one update per rollout the ratio is 1 up
# to that drift.

# %%
steps = [record for record in result.metrics if record["kind"] == "train"]
print(f"largest drift of any step: {max(record['drift_max'] for record in steps):.1e} nats")
print(f"ratio of the first step: {steps[0]['ratio_new_old']:.7f}")
print(f"head: {steps[0]['head_path']}, engine {steps[0]['head_engine']}")
