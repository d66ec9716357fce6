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
# # Log-probs without logits
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/jaxlogp/jaxlogp/blob/main/notebooks/log_probs_without_logits.ipynb)
#
# RL post-training needs one log-prob and one entropy for every token: two numbers. The plain way stores a row of
# logits per token, one number for every entry of the vocabulary, and the same again for its gradient. Here both ways
# run side by side on whatever device there is: what they compute, how much memory they need, and how long they take.

# %% [markdown]
# ## Install
#
# On Colab this fetches the project; in a checkout that is already installed it does nothing.

# %%
import importlib.util
import subprocess
import sys

if importlib.util.find_spec("jaxlogp") is None:
    source = "jaxlogp[experiments] @ git+https://github.com/jaxlogp/jaxlogp"
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", source], check=True)

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
# ## Two programs for one function
#
# The gradient is that of a loss that uses both results, as a policy gradient with an entropy bonus does.


# %%
def naive(hidden, weight, targets):
    logits = jnp.matmul(hidden, weight.T, precision="highest", preferred_element_type=jnp.float32)
    log_softmax = jax.nn.log_softmax(logits)
    log_probs = jnp.take_along_axis(log_softmax, targets[:, None], axis=1)[:, 0]
    return log_probs, -jnp.sum(jnp.exp(log_softmax) * log_softmax, axis=1)


def ours(hidden, weight, targets):
    result = linear_log_probs(hidden, weight, targets, with_entropy=True)
    return result.log_probs, result.entropy


def with_gradients(program):
    def loss(hidden, weight, targets, advantages):
        log_probs, entropy = program(hidden, weight, targets)
        return -jnp.mean(advantages * log_probs + 0.01 * entropy), (log_probs, entropy)

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))


def operands(tokens, hidden_size, vocab):
    keys = jax.random.split(jax.random.key(0), 4)
    hidden = jax.random.normal(keys[0], (tokens, hidden_size), DTYPE)
    weight = (jax.random.normal(keys[1], (vocab, hidden_size)) * 2 / hidden_size**0.5).astype(DTYPE)
    targets = jax.random.randint(keys[2], (tokens,), 0, vocab)
    return hidden, weight, targets, jax.random.normal(keys[3], (tokens,))


PROGRAMS = {"naive": with_gradients(naive), "ours": with_gradients(ours)}

# %% [markdown]
# ## The same numbers
#
# The vocabulary is not a multiple of any tile. In fp32 the programs differ only by rounding. In bf16 both programs
# round the gradients of the logits to 8 bits before the products, hence the wider tolerance.

# %%
arguments = operands(300, 128, 5000)
results = {}
with record_head_runs() as runs:
    for name, program in PROGRAMS.items():
        (_, values), gradients = program(*arguments)
        results[name] = (*values, *gradients)
print(f"engine: {runs[0].engine} ({runs[0].reason})")
for index, (what, tolerance) in enumerate(
    (("log-probs", 1e-4), ("entropy", 1e-4), ("gradient of hidden", 1e-2), ("gradient of weight", 1e-2))
):
    tolerance = tolerance if ON_GPU else 1e-5
    plain, fused = (np.asarray(results[name][index].astype(jnp.float32)) for name in PROGRAMS)
    difference = np.linalg.norm(fused - plain) / np.linalg.norm(plain)
    print(f"{what:18}: relative difference {difference:.1e}, allowed {tolerance:.0e}")
    assert difference < tolerance, what

# %% [markdown]
# ## Memory
#
# The compiler says how much memory it reserves for temporaries, excluding arguments and gradients; nothing has to run.
# First more tokens, then a larger vocabulary.

# %%
HIDDEN = 1024 if ON_GPU else 64
SMALL = (2048, 32768) if ON_GPU else (512, 8192)
TOKENS = [SMALL[0] * 2**power for power in range(4)]
VOCABS = [SMALL[1] * 2**power for power in range(4)]
SWEEPS = {
    "N, tokens": [(tokens, SMALL[1]) for tokens in TOKENS],
    "V, vocabulary": [(SMALL[0], vocab) for vocab in VOCABS],
}
REPEATS = 3


def compiled(program, tokens, vocab):
    shapes = jax.eval_shape(lambda: operands(tokens, HIDDEN, vocab))
    return program.lower(*shapes).compile()


calls = {
    (name, size): compiled(program, *size)
    for size in sorted({size for sizes in SWEEPS.values() for size in sizes})
    for name, program in PROGRAMS.items()
}
memory = {key: call.memory_analysis().temp_size_in_bytes / 2**20 for key, call in calls.items()}
for sizes in SWEEPS.values():
    for size in sizes:
        logits = size[0] * size[1] * 4 / 2**20
        plain, fused = memory["naive", size], memory["ours", size]
        print(f"N {size[0]:6} V {size[1]:7}: logits {logits:6.0f} MiB; naive {plain:6.0f} MiB, ours {fused:5.0f} MiB")

# %% [markdown]
# ## Time
#
# Loss and gradients; the two are called in turn, so that other load on the machine affects both, and the median is
# taken after a first call that is not counted.

# %%
seconds = {}
for size in sorted({size for _, size in calls}):
    arguments = operands(size[0], HIDDEN, size[1])
    samples = {name: [] for name in PROGRAMS}
    for repeat in range(REPEATS + 1):
        for name in PROGRAMS:
            started = time.perf_counter()
            jax.block_until_ready(calls[name, size](*arguments))
            if repeat:
                samples[name].append(time.perf_counter() - started)
    for name, values in samples.items():
        seconds[name, size] = statistics.median(values)
    print(
        f"N {size[0]:6} V {size[1]:7}: ours takes {seconds['ours', size] / seconds['naive', size]:.2f} x naive's time"
    )

# %%
figure, panels = plt.subplots(2, 2, figsize=(10, 7), layout="constrained")
for column, (axis, sizes) in enumerate(SWEEPS.items()):
    places = [size[column] for size in sizes]
    for row, (figures, unit) in enumerate(((memory, "temporary memory [MiB]"), (seconds, "time [s]"))):
        axes = panels[row, column]
        for name, colour, marker in (("naive", "#d1661c", "s"), ("ours", "#1f5fa8", "o")):
            axes.plot(places, [figures[name, size] for size in sizes], marker=marker, color=colour, label=name)
        if figures is memory:
            logits = [size[0] * size[1] * 4 / 2**20 for size in sizes]
            axes.plot(places, logits, color="#7a7a7a", linestyle="--", label="fp32 logits alone")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(places, [str(place) for place in places])
        axes.minorticks_off()
        axes.set_xlabel(axis)
        axes.set_ylabel(unit)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
figure.suptitle(f"Log-probs, entropy and gradients, H = {HIDDEN}, {device.device_kind}")
plt.show()

# %% [markdown]
# The vocabulary is processed in tiles: a tile's logits are kept until their maximum, their sum of exponentials and, for
# the entropy, their weighted sum are known. The backward pass recomputes them, and so trades a product for memory. All
# engines on the heads of real models, compared with a single product: `python -m benchmarks.head_speed --model all`.
