# ---
# jupyter:
#   accelerator: GPU
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
# # Tunix without logits
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/jaxlogp/jaxlogp/blob/main/notebooks/tunix_without_logits.ipynb)
#
# [Tunix](https://github.com/google/tunix) computes a log-prob from logits that it stores: one number for each entry of the
# vocabulary, for every token of the micro-batch, and as many again for the gradient. One line replaces that by jaxlogp,
# which goes from hidden states to log-probs and stores no logits. This notebook shows that the loss stays the same, what it
# saves, and a whole GRPO run of Tunix both ways.
#
# The outputs below come from two CPU cores.

# %% [markdown]
# ## Install
#
# On Colab this cell clones the project and installs it with Tunix. In a checkout that is installed with the extra `tunix` it
# does nothing. It never replaces JAX: pip is told to keep the installed version, and stops with an error if that is not one
# of 0.10 to 0.12. In that case update JAX, restart the runtime, and run this cell again.

# %%
import subprocess
import sys
from importlib.metadata import distributions, version
from pathlib import Path

here = Path.cwd()
checkout = next(
    (folder for folder in (here, here.parent) if (folder / "experiments/grpo.py").exists()), here / "checkout"
)
if not checkout.exists():
    source = "https://github.com/jaxlogp/jaxlogp"
    subprocess.run(["git", "clone", "--quiet", "--depth=1", source, checkout], check=True)
installed = {package.name: package.version for package in distributions()}
if "google-tunix" not in installed:
    keep = [f"{name}=={installed[name]}" for name in ("jax", "jaxlib") if name in installed]
    packages = ["-e", f"{checkout}[experiments,tunix]", *keep]
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *packages], check=True)
sys.path.insert(0, str(checkout))

# %%
import logging
import os
import warnings

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)

# %%
import grain.python as grain
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import nnx
from tunix.models.qwen3 import model as qwen3
from tunix.rl import algo_core, common, rl_cluster
from tunix.rl.grpo import grpo_learner
from tunix.rl.rollout import base_rollout
from tunix.tests import test_common

from jaxlogp.integrations import tunix as jaxlogp_tunix

UPDATES = 2 * int(os.environ.get("JAXLOGP_NOTEBOOK_STEPS", 30))


def small_qwen(vocab: int) -> qwen3.Qwen3:
    """A Qwen3 of two layers with random weights."""
    sizes = dict(num_layers=2, embed_dim=64, hidden_dim=128, num_heads=4, head_dim=16, num_kv_heads=2)
    config = qwen3.ModelConfig(vocab_size=vocab, rope_theta=1_000_000, norm_eps=1e-6, use_tied_embedding=True, **sizes)
    model = qwen3.Qwen3(config, rngs=nnx.Rngs(0))

    def filled(x):
        # Some matrices begin as zeros, where a checkpoint would have weights.
        return x if np.asarray(x).any() else 0.1 * jax.random.normal(jax.random.key(3), x.shape)

    nnx.update(model, jax.tree.map(filled, nnx.state(model, nnx.Param)))
    return model


print(f"JAX {jax.__version__} on {jax.devices()[0].platform}, Tunix {version('google-tunix')}")

# %% [markdown]
# ## The same loss and gradient
#
# Tunix's own GRPO loss for one micro-batch, with a KL term and an entropy metric: first as it is, then with
# `jaxlogp_tunix.install()`.


# %%
def micro_batch(vocab: int, rows: int = 4, prompt: int = 16, completion: int = 112) -> common.TrainExample:
    """Random prompts and completions, with old and reference log-probs near uniform."""
    rng = np.random.default_rng(0)

    def near():
        return jnp.asarray(0.1 * rng.normal(size=(rows, completion)) - np.log(vocab), jnp.float32)

    def ids(length):
        return jnp.asarray(rng.integers(3, vocab, (rows, length)), jnp.int32)

    return common.TrainExample(
        prompt_ids=ids(prompt),
        prompt_mask=jnp.ones((rows, prompt), bool),
        completion_ids=ids(completion),
        completion_mask=jnp.ones((rows, completion), jnp.int32),
        advantages=jnp.asarray(rng.normal(size=rows), jnp.float32),
        ref_per_token_logps=near(),
        old_per_token_logps=near(),
    )


def compiled_loss(vocab: int):
    """Tunix's loss and gradient, compiled, with a model and a micro-batch to call it with."""
    config = grpo_learner.GRPOConfig(beta=0.04)
    config.temperature = 1.0

    @nnx.jit
    def program(model, batch):
        def loss(model):
            return algo_core.grpo_loss_fn(model, batch, algo_config=config, pad_id=0, eos_id=1)

        return nnx.value_and_grad(loss, has_aux=True)(model)

    arguments = small_qwen(vocab), micro_batch(vocab)
    return program.lower(*arguments).compile(), arguments


def mebibytes(program) -> float:
    return program.compiled.memory_analysis().temp_size_in_bytes / 2**20


stock, arguments = compiled_loss(vocab=4096)
with jaxlogp_tunix.installed():
    ours, _ = compiled_loss(vocab=4096)
    report = jaxlogp_tunix.report()

(loss, metrics), gradient = stock(*arguments)
(our_loss, our_metrics), our_gradient = ours(*arguments)


def apart(x, y):
    return float(jnp.linalg.norm((x - y).ravel()) / jnp.linalg.norm(y.ravel()))


worst = max(jax.tree.leaves(jax.tree.map(apart, our_gradient, gradient)))
assert abs(our_loss - loss) < 1e-5 * abs(loss) and worst < 1e-4
print(f"loss {float(loss):.5f} and {float(our_loss):.5f}, gradient apart by at most a part in ten thousand")
print(report)

# %% [markdown]
# ## What it saves
#
# Temporary memory of the compiled loss and gradient, 4 rows of 128 tokens.

# %%
vocabularies = 4096, 16384, 32768, 65536
memory = {"Tunix": [], "with jaxlogp": []}
for vocab in vocabularies:
    memory["Tunix"].append(mebibytes(compiled_loss(vocab)[0]))
    with jaxlogp_tunix.installed():
        memory["with jaxlogp"].append(mebibytes(compiled_loss(vocab)[0]))

figure, axes = plt.subplots(figsize=(6, 3), dpi=90)
for name, values in memory.items():
    axes.plot(vocabularies, values, "o-", label=name)
axes.set(xlabel="vocabulary", ylabel="temporaries, MiB", ylim=(0, None))
axes.legend()
plt.show()

# %% [markdown]
# ## A GRPO run of Tunix
#
# A toy task on the 22 words that Tunix's tests use: the reward is the number of times that the completion says "Tunix".
# Nothing but the line with `installed` differs between the two runs.


# %%
def count_tunix(prompts, completions, **kwargs):
    return [float(text.split().count("Tunix")) for text in completions]


class Prompts(grain.RandomAccessDataSource):
    rows = ["input string", "hello world", "My name", "hello there"] * UPDATES

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


def train() -> list[float]:
    """Mean reward of every rollout of a GRPO run."""
    rewards = []

    def reward(prompts, completions, **kwargs):
        values = count_tunix(prompts, completions)
        rewards.append(float(np.mean(values)))
        return values

    tokenizer = test_common.MockVocab()
    mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    role = rl_cluster.Role
    rollout = base_rollout.RolloutConfig(
        max_tokens_to_generate=8, max_prompt_length=8, kv_cache_size=32, temperature=1.0, top_p=1.0, top_k=None, seed=0
    )
    training = rl_cluster.RLTrainingConfig(
        actor_optimizer=optax.adam(2e-3), eval_every_n_steps=10**6, max_steps=UPDATES
    )
    with mesh:
        actor, reference = (small_qwen(tokenizer.GetPieceSize()) for _ in range(2))
        cluster = rl_cluster.RLCluster(
            actor=actor,
            reference=reference,
            tokenizer=tokenizer,
            cluster_config=rl_cluster.ClusterConfig(
                role_to_mesh={role.ACTOR: mesh, role.REFERENCE: mesh, role.ROLLOUT: mesh},
                rollout_engine="vanilla",
                offload_to_cpu=False,
                training_config=training,
                rollout_config=rollout,
            ),
        )
        algorithm = grpo_learner.GRPOConfig(num_generations=8, num_iterations=2, beta=0.04)
        learner = grpo_learner.GRPOLearner(rl_cluster=cluster, reward_fns=reward, algo_config=algorithm)
        learner.train(grain.MapDataset.source(Prompts()).batch(2).map(lambda rows: {"prompts": rows}))
    return rewards


# Tunix draws a progress bar and logs to stderr.
with open(os.devnull, "w") as nowhere:
    stderr, sys.stderr = sys.stderr, nowhere
    stock_rewards = train()
    with jaxlogp_tunix.installed():
        our_rewards = train()
        report = jaxlogp_tunix.report()
    sys.stderr = stderr

figure, axes = plt.subplots(figsize=(6, 3), dpi=90)
axes.plot(stock_rewards, lw=4, alpha=0.4, label="Tunix")
axes.plot(our_rewards, lw=1.2, label="with jaxlogp")
axes.set(xlabel="rollout", ylabel="mean reward")
axes.legend()
plt.show()
print(report)

# %% [markdown]
# ## In your own run
#
# ```python
# from jaxlogp.integrations import tunix as jaxlogp_tunix
#
# jaxlogp_tunix.install()  # before a learner is built
# ```
#
# [The page about Tunix](https://github.com/jaxlogp/jaxlogp/blob/main/docs/tunix.md) lists what is replaced, what is refused,
# how to use a loss of `jaxlogp.losses`, and what a 0.6B model saves on a GPU.
