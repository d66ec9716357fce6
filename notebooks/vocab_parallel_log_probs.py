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
# # Log-probs over a sharded vocabulary, bit by bit
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/jaxlogp/jaxlogp/blob/main/notebooks/vocab_parallel_log_probs.ipynb)
#
# Eight simulated devices hold one shard of the head each. First the log-prob of a token is computed from them by hand,
# with every collective written out. Then the same with one call, with gradients. Then the question that decides whether
# a sampler and a trainer on different meshes can agree: are the numbers bitwise equal?

# %% [markdown]
# ## Install
#
# On Colab this fetches the project; in a checkout that is already installed it does nothing.

# %%
import importlib.util
import os
import subprocess
import sys

if importlib.util.find_spec("jaxlogp") is None:
    source = "jaxlogp[experiments] @ git+https://github.com/jaxlogp/jaxlogp"
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", source], check=True)

# Both must be set before JAX is imported: the CPU as backend, and the number of devices that it simulates.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxlogp import VocabShards, check_invariance, linear_log_probs
from jaxlogp.head import FixedOrderEngine
from jaxlogp.invariance import ReductionOrder

print(f"JAX {jax.__version__}, {len(jax.devices())} {jax.devices()[0].platform} devices")

# %% [markdown]
# ## A vocabulary in eight shards
#
# 1003 is not divisible by eight: the first three shards own one more id. `shard_rows` pads the shards of the weight to
# one width, because a mesh axis can only split equal parts.

# %%
TOKENS, HIDDEN, VOCAB, SHARDS = 64, 64, 1003, 8
keys = jax.random.split(jax.random.key(0), 3)
hidden = jax.random.normal(keys[0], (TOKENS, HIDDEN))
weight = jax.random.normal(keys[1], (VOCAB, HIDDEN)) * 3 / HIDDEN**0.5
targets = jax.random.randint(keys[2], (TOKENS,), 0, VOCAB)

vocab = VocabShards.even(VOCAB, SHARDS)
mesh = jax.make_mesh((SHARDS,), ("tensor",), axis_types=(AxisType.Auto,))
for rank, (start, end) in enumerate(vocab.ranges):
    owned = int((vocab.owners(targets) == rank).sum())
    print(f"device {rank} owns ids {start:4} to {end - 1:4} and {owned:2} of the {TOKENS} targets")

# %% [markdown]
# ## By hand: one pmax, one psum
#
# log p(target) = z[target] - logsumexp(z). The maximum comes from all shards, the sum of exponentials from all shards,
# the target's logit from its one owner. The last two share a psum. Nothing of size [tokens, vocabulary] is
# communicated.


# %%
def by_hand(hidden, rows, targets):
    rank = lax.axis_index("tensor")
    start, width = (jnp.asarray(x, jnp.int32)[rank] for x in (vocab.starts, vocab.widths))
    columns = jnp.arange(rows.shape[0], dtype=jnp.int32)
    logits = jnp.where(columns < width, hidden @ rows.T, -jnp.inf)  # padding rows must not count

    maximum = lax.pmax(logits.max(axis=1), "tensor")
    local_sum = jnp.exp(logits - maximum[:, None]).sum(axis=1)

    mine = (targets >= start) & (targets < start + width)
    column = jnp.where(mine, targets - start, 0)  # never index with an id that another shard owns: JAX would clamp it
    local_target = jnp.where(mine, jnp.take_along_axis(logits, column[:, None], axis=1)[:, 0], 0.0)

    total, target = lax.psum(jnp.stack([local_sum, local_target]), "tensor")
    return (target - maximum) - jnp.log(total)


over_mesh = {"mesh": mesh, "in_specs": (P(), P("tensor"), P()), "out_specs": P()}
manual = jax.jit(jax.shard_map(by_hand, **over_mesh))(hidden, vocab.shard_rows(weight), targets)

logits64 = np.asarray(hidden, np.float64) @ np.asarray(weight, np.float64).T
peak = logits64.max(axis=1, keepdims=True)
truth = logits64[np.arange(TOKENS), targets] - peak[:, 0] - np.log(np.exp(logits64 - peak).sum(axis=1))
print(f"largest error against float64: {np.abs(manual - truth).max():.1e} nats")

# %% [markdown]
# Two reductions that look right but are wrong: a shard's own logsumexp instead of the global one, and the shards' mean.

# %%
shard_lse = np.stack([np.log(np.exp(logits64[:, start:end]).sum(axis=1)) for start, end in vocab.ranges])
owner = np.asarray(vocab.owners(targets))
chosen = logits64[np.arange(TOKENS), targets]
for name, wrong in (
    ("the owner's own logsumexp", chosen - shard_lse[owner, np.arange(TOKENS)]),
    ("the mean of the logsumexps", chosen - shard_lse.mean(axis=0)),
):
    print(f"{name}: off by {np.abs(wrong - truth).mean():.2f} nats on average")

# %% [markdown]
# ## The same with one call, with entropy and gradients
#
# Hidden states are the same on all shards, so their gradient is a sum over shards: exactly one psum, which is there
# because their type says that they do not vary over "tensor". Without that psum, or with two of them, the error below
# would not be 1e-7 but of order 1.


# %%
def loss(hidden, rows, targets):
    result = linear_log_probs(hidden, rows, targets, with_entropy=True, axis_name="tensor", vocab=vocab)
    return jnp.sum(result.log_probs) + 0.1 * jnp.sum(result.entropy), result


mapped = jax.shard_map(loss, **over_mesh)
(value, result), (d_hidden, d_rows) = jax.jit(jax.value_and_grad(mapped, argnums=(0, 1), has_aux=True))(
    hidden, vocab.shard_rows(weight), targets
)

probs = np.exp(logits64 - peak) / np.exp(logits64 - peak).sum(axis=1, keepdims=True)
onehot = np.eye(VOCAB)[np.asarray(targets)]
mean_logit = (probs * logits64).sum(axis=1, keepdims=True)
d_logits = onehot - probs + 0.1 * probs * (mean_logit - logits64)
wanted = d_logits @ np.asarray(weight, np.float64), d_logits.T @ np.asarray(hidden, np.float64)
for name, seen, exact in zip(("hidden", "weight"), (d_hidden, vocab.unshard_rows(d_rows)), wanted, strict=True):
    print(f"gradient of {name}: relative error {np.linalg.norm(seen - exact) / np.linalg.norm(exact):.1e}")
print("log-probs at most 0:", bool((result.log_probs <= 0).all()))
print("entropies in [0, log V]:", bool(((result.entropy >= 0) & (result.entropy <= np.log(VOCAB))).all()))

# %% [markdown]
# ## Bitwise equal?
#
# `check_invariance` runs a function under changes that must not matter and compares bytes. First naive JAX: one token
# alone, small chunks and every other mesh give different bits.


# %%
def naive(hidden, weight, targets):
    log_softmax = jax.nn.log_softmax(hidden @ weight.T)
    return jnp.take_along_axis(log_softmax, targets[:, None], axis=1)[:, 0]


SIZES = (2, 3, 4, 6, 8)
order = ReductionOrder(granules=24, vocab_tile=64, row_block=64)


def sharded(engine, shards_for):
    def over(size):
        vocab = shards_for(size)
        small = jax.make_mesh((size,), ("tensor",), axis_types=(AxisType.Auto,), devices=jax.devices()[:size])

        def local(hidden, rows, targets):
            options = {"axis_name": "tensor", "vocab": vocab, "engine": engine, "out_of_vocab": "zero"}
            return linear_log_probs(hidden, rows, targets, **options).log_probs

        specs = {"mesh": small, "in_specs": (P(), P("tensor"), P()), "out_specs": P()}
        return lambda h, w, t: jax.shard_map(local, **specs)(h, vocab.shard_rows(w), t)

    return {size: over(size) for size in SIZES}


def whole(engine):
    return lambda h, w, t: linear_log_probs(h, w, t, engine=engine).log_probs


def even(size):
    return VocabShards.even(VOCAB, size)


reports = [
    # Naive JAX has no uneven shards: its sharded program is a general form of the one written by hand above.
    check_invariance(naive, hidden, weight, targets, name="naive JAX", num_shards=()),
    check_invariance(
        whole("chunked"),
        hidden,
        weight,
        targets,
        name="fast path",
        num_shards=SIZES,
        sharded=sharded("chunked", even),
    ),
    check_invariance(
        whole(FixedOrderEngine(order)),
        hidden,
        weight,
        targets,
        name="fixed order",
        num_shards=SIZES,
        sharded=sharded(FixedOrderEngine(order), lambda size: order.shards(VOCAB, size)),
    ),
]
for report in reports:
    print(report, end="\n\n")
assert reports[0].broken and reports[1].broken and not reports[2].broken and not reports[2].not_run

# %% [markdown]
# Each cell is the share of tokens whose bits changed. With the fixed order none change, on any mesh and in any batch.

# %%
changes = [difference.change for difference in reports[2].differences]
shares = np.full((len(reports), len(changes)), np.nan)
for row, report in enumerate(reports):
    for difference in report.differences:
        shares[row, changes.index(difference.change)] = difference.num_differing / difference.num_tokens
figure, axes = plt.subplots(figsize=(10, 3.8), layout="constrained")
image = axes.imshow(shares, cmap="OrRd", vmin=0, vmax=1, aspect="auto")
for row, column in zip(*np.nonzero(np.nan_to_num(shares)), strict=True):
    share = shares[row, column]
    axes.text(column, row, f"{share:.0%}", ha="center", va="center", fontsize=8, color="w" if share > 0.5 else "k")
axes.set_xticks(range(len(changes)), changes, rotation=45, ha="right")
axes.set_yticks(range(len(reports)), [report.name for report in reports])
axes.set_title("Tokens whose log-prob changed in any bit (blank: not run)")
figure.colorbar(image, ax=axes, label="share")
plt.show()

# %% [markdown]
# ## Why
#
# A sum of floats depends on its order, and each mesh picks a different one. Here is the token that changed most: its
# bits as integers, relative to the first column.

# %%
paths = {
    "fast path": (whole("chunked"), sharded("chunked", even)),
    "fixed order": (whole(FixedOrderEngine(order)), sharded(FixedOrderEngine(order), lambda n: order.shards(VOCAB, n))),
}
for name, (alone, meshes) in paths.items():
    runs = [np.asarray(jax.jit(f)(hidden, weight, targets)) for f in (alone, *meshes.values())]
    bits = [run.view(np.int32).astype(np.int64) for run in runs]
    worst = int(np.argmax(np.max([np.abs(b - bits[0]) for b in bits], axis=0)))
    distances = ", ".join(f"{int(b[worst] - bits[0][worst]):+d}" for b in bits)
    print(f"{name:12} token {worst:2}, units in the last place on 1, 2, 3, 4, 6, 8 devices: {distances}")

# %% [markdown]
# What is promised, what is not, and what it costs: `docs/invariance.md`. A whole training run with the same property:
# `python -m experiments.grpo --invariant`. Your own function: `from jaxlogp import check_invariance`.
