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
# # Log-probs without logits
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/jaxlogp/jaxlogp/blob/main/notebooks/log_probs_without_logits.ipynb)
#
# RL post-training needs two numbers per token: a log-prob and an entropy. The naive way stores a row of logits for every
# token, with one number for each entry of the vocabulary, and later a gradient of the same size. This notebook runs
# the naive way and this project's side by side, and compares their results, their memory and their time.
#
# The outputs below come from two CPU cores. On a GPU the sizes are larger and the operands are in bf16.

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

# %%
import statistics
import time

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from jaxlogp import linear_log_probs
from jaxlogp.head import record_head_runs

device = jax.devices()[0]
ON_GPU = device.platform == "gpu"
DTYPE = jnp.bfloat16 if ON_GPU else jnp.float32
print(f"JAX {jax.__version__} on {device.device_kind} ({device.platform}), operands in {DTYPE.__name__}")

# %% [markdown]
# ## One function, two programs
#
# Both programs return log-probs and entropies, and the gradients of a loss that uses both: a policy gradient with an
# entropy bonus.


# %%
def naive(hidden, weight, targets):
    logits = jnp.matmul(hidden, weight.T, precision="highest", preferred_element_type=jnp.float32)
    log_softmax = jax.nn.log_softmax(logits)
    log_probs = jnp.take_along_axis(log_softmax, targets[:, None], axis=1)[:, 0]
    return log_probs, -jnp.sum(jnp.exp(log_softmax) * log_softmax, axis=1)


def fused(hidden, weight, targets):
    result = linear_log_probs(hidden, weight, targets, with_entropy=True)
    return result.log_probs, result.entropy


def with_gradients(program):
    def loss(hidden, weight, targets, advantages):
        log_probs, entropy = program(hidden, weight, targets)
        return -jnp.mean(advantages * log_probs + 0.01 * entropy), (log_probs, entropy)

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))


def make_operands(tokens, hidden_size, vocab):
    keys = jax.random.split(jax.random.key(0), 4)
    hidden = jax.random.normal(keys[0], (tokens, hidden_size), DTYPE)
    weight = (jax.random.normal(keys[1], (vocab, hidden_size)) * 2 / hidden_size**0.5).astype(DTYPE)
    targets = jax.random.randint(keys[2], (tokens,), 0, vocab)
    return hidden, weight, targets, jax.random.normal(keys[3], (tokens,))


PROGRAMS = {"naive": with_gradients(naive), "jaxlogp": with_gradients(fused)}

# %% [markdown]
# ## The same results
#
# The vocabulary of this comparison is not a multiple of any tile. In fp32 the two programs differ only by rounding. In
# bf16 both round the gradients of the logits to 8 bits before they multiply them, so the tolerance is wider.

# %%
operands = make_operands(300, 128, 5000)
results = {}
with record_head_runs() as runs:
    for name, program in PROGRAMS.items():
        (_, values), gradients = program(*operands)
        results[name] = (*values, *gradients)
print(f"engine: {runs[0].engine} ({runs[0].reason})")
for index, (what, bf16_tolerance) in enumerate(
    (("log-probs", 1e-4), ("entropy", 1e-4), ("gradient of hidden", 1e-2), ("gradient of weight", 1e-2))
):
    tolerance = bf16_tolerance if ON_GPU else 1e-5
    expected, actual = (np.asarray(results[name][index].astype(jnp.float32)) for name in PROGRAMS)
    difference = np.linalg.norm(actual - expected) / np.linalg.norm(expected)
    print(f"{what:18}: relative difference {difference:.1e}, allowed {tolerance:.0e}")
    assert difference < tolerance, what

# %% [markdown]
# ## Memory
#
# The compiler reports how much memory a program reserves for temporaries, in addition to its arguments and results, so
# nothing has to run. First the number of tokens N doubles, then the size of the vocabulary V.

# %%
HIDDEN = 1024 if ON_GPU else 64
TOKENS, VOCAB = (2048, 32768) if ON_GPU else (512, 8192)
SWEEPS = {
    "tokens N": [(TOKENS * 2**power, VOCAB) for power in range(4)],
    "vocabulary V": [(TOKENS, VOCAB * 2**power) for power in range(4)],
}
SIZES = sorted({size for sizes in SWEEPS.values() for size in sizes})


def compile_program(program, tokens, vocab):
    shapes = jax.eval_shape(lambda: make_operands(tokens, HIDDEN, vocab))
    return program.lower(*shapes).compile()


compiled = {(name, size): compile_program(PROGRAMS[name], *size) for name in PROGRAMS for size in SIZES}
memory = {key: program.memory_analysis().temp_size_in_bytes / 2**20 for key, program in compiled.items()}
logits = {size: size[0] * size[1] * 4 / 2**20 for size in SIZES}

figure, panels = plt.subplots(1, 2, figsize=(8, 3.2), sharey=True, layout="constrained")
for column, (label, sizes) in enumerate(SWEEPS.items()):
    axes = panels[column]
    places = [size[column] for size in sizes]
    axes.plot(places, [memory["naive", size] for size in sizes], color="#d1661c", marker="s", label="naive")
    axes.plot(places, [logits[size] for size in sizes], color="#7a7a7a", linestyle="--", label="fp32 logits alone")
    axes.plot(places, [memory["jaxlogp", size] for size in sizes], color="#1f5fa8", marker="o", label="jaxlogp")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(places, [str(place) for place in places])
    axes.set_xlabel(f"{label} (at {'V' if column == 0 else 'N'} = {sizes[0][1 - column]})")
    axes.grid(alpha=0.3)
panels[0].set_ylabel("temporary memory [MiB]")
panels[0].yaxis.set_major_formatter("{x:.0f}")
panels[0].legend(frameon=False, fontsize=9)
plt.show()
largest = SWEEPS["vocabulary V"][-1]
print(f"V = {largest[1]}: naive {memory['naive', largest]:.0f} MiB, jaxlogp {memory['jaxlogp', largest]:.0f} MiB")

# %% [markdown]
# ## Time
#
# A call computes loss and gradients. The two programs take turns, so other work on the machine slows both. The first
# call of each does not count; the median of the other three does. In parentheses: the time of jaxlogp divided by naive.

# %%
for size in SIZES:
    operands = make_operands(size[0], HIDDEN, size[1])
    seconds = {name: [] for name in PROGRAMS}
    for _ in range(4):
        for name, samples in seconds.items():
            started = time.perf_counter()
            jax.block_until_ready(compiled[name, size](*operands))
            samples.append(time.perf_counter() - started)
    plain, ours = (1000 * statistics.median(samples[1:]) for samples in seconds.values())
    print(f"N {size[0]:5}, V {size[1]:6}: naive {plain:6.1f} ms, jaxlogp {ours:6.1f} ms ({ours / plain:.2f} x)")

# %% [markdown]
# ## How it works
#
# `linear_log_probs` processes the vocabulary in tiles. It keeps the logits of a tile only until they are part of three
# numbers per token: the maximum, the sum of exponentials and, for the entropy, their weighted sum. The backward pass
# computes the tiles again, so it trades one more matrix product for the memory.
#
# To measure every engine on the heads of real models: `python -m benchmarks.head_speed --model all`.
