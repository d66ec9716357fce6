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
# Each of eight simulated devices holds one shard of the head's weight. First this notebook computes log-probs from the
# shards by hand, with every collective written out. Then it does the same with one call, with gradients. At the end it
# asks what decides whether a sampler and a trainer on different meshes can agree: are the numbers bitwise equal?
#
# It needs no GPU, and would not use one.

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
# Two variables must be set before JAX is imported: the CPU as the backend, and the number of devices to simulate.

# %%
import os

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
# Eight does not divide 1003, so the first three shards own one id more than the others. A mesh axis can only split an
# array into equal parts, so `shard_rows` pads all shards of the weight to the same number of rows.

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
# log p(target) = z[target] - logsumexp(z), where z are the logits. The maximum and the sum of exponentials come from
# all shards, the logit of the target from its one owner. The last two share a psum. Nothing of size
# [tokens, vocabulary] is communicated.


# %%
def by_hand(hidden, rows, targets):
    rank = lax.axis_index("tensor")
    start, width = (jnp.asarray(x, jnp.int32)[rank] for x in (vocab.starts, vocab.widths))
    columns = jnp.arange(rows.shape[0], dtype=jnp.int32)
    logits = jnp.where(columns < width, hidden @ rows.T, -jnp.inf)  # rows of padding must not count

    maximum = lax.pmax(logits.max(axis=1), "tensor")
    local_sum = jnp.exp(logits - maximum[:, None]).sum(axis=1)

    mine = (targets >= start) & (targets < start + width)
    column = jnp.where(mine, targets - start, 0)  # JAX would clamp the id of another shard to a wrong column
    local_target = jnp.where(mine, jnp.take_along_axis(logits, column[:, None], axis=1)[:, 0], 0.0)

    total, target = lax.psum(jnp.stack([local_sum, local_target]), "tensor")
    return (target - maximum) - jnp.log(total)


over_mesh = {"mesh": mesh, "in_specs": (P(), P("tensor"), P()), "out_specs": P()}
manual = jax.jit(jax.shard_map(by_hand, **over_mesh))(hidden, vocab.shard_rows(weight), targets)

logits64 = np.asarray(hidden, np.float64) @ np.asarray(weight, np.float64).T
peak = logits64.max(axis=1, keepdims=True)
truth = logits64[np.arange(TOKENS), targets] - peak[:, 0] - np.log(np.exp(logits64 - peak).sum(axis=1))
error = np.abs(manual - truth).max()
print(f"largest error against float64: {error:.1e} nats")
assert error < 1e-5

# %% [markdown]
# Two reductions look right but are wrong: taking the logsumexp of the target's shard alone, and averaging the
# logsumexps of the shards.

# %%
shard_lse = np.stack([np.log(np.exp(logits64[:, start:end]).sum(axis=1)) for start, end in vocab.ranges])
owner = np.asarray(vocab.owners(targets))
target_logits = logits64[np.arange(TOKENS), targets]
for name, wrong in (
    ("the logsumexp of the target's shard", target_logits - shard_lse[owner, np.arange(TOKENS)]),
    ("the mean of the logsumexps", target_logits - shard_lse.mean(axis=0)),
):
    print(f"{name}: off by {np.abs(wrong - truth).mean():.2f} nats on average")

# %% [markdown]
# ## With one call, entropy and gradients included
#
# Every shard uses the same hidden states, so their gradient is a sum over the shards and needs exactly one psum. JAX
# adds it, because the type of the hidden states says that they do not vary over "tensor". Without this psum, or with
# two, the error of their gradient would be of order 1.


# %%
def loss(hidden, rows, targets):
    result = linear_log_probs(hidden, rows, targets, with_entropy=True, axis_name="tensor", vocab=vocab)
    return jnp.sum(result.log_probs) + 0.1 * jnp.sum(result.entropy), result


mapped = jax.shard_map(loss, **over_mesh)
(value, result), (d_hidden, d_rows) = jax.jit(jax.value_and_grad(mapped, argnums=(0, 1), has_aux=True))(
    hidden, vocab.shard_rows(weight), targets
)

probs = np.exp(logits64 - peak) / np.exp(logits64 - peak).sum(axis=1, keepdims=True)
one_hot = np.eye(VOCAB)[np.asarray(targets)]
mean_logit = (probs * logits64).sum(axis=1, keepdims=True)
d_logits = one_hot - probs + 0.1 * probs * (mean_logit - logits64)
gradients = {
    "hidden": (d_hidden, d_logits @ np.asarray(weight, np.float64)),
    "weight": (vocab.unshard_rows(d_rows), d_logits.T @ np.asarray(hidden, np.float64)),
}
for name, (actual, expected) in gradients.items():
    error = np.linalg.norm(actual - expected) / np.linalg.norm(expected)
    print(f"gradient of {name}: relative error {error:.1e}")
    assert error < 1e-5
print("log-probs at most 0:", bool((result.log_probs <= 0).all()))
print("entropies in [0, log V]:", bool(((result.entropy >= 0) & (result.entropy <= np.log(VOCAB))).all()))

# %% [markdown]
# ## Bitwise equal?
#
# `check_invariance` changes what must not matter: the other tokens of a batch, their order, padding, the number of
# devices. It then compares the bytes of the log-probs that stay. Three functions are checked:
#
# - naive JAX, on one device, as it has no shards of unequal size;
# - the fast path, the default engine on a CPU;
# - the fixed order, an engine that adds in the same order on every mesh.


# %%
def naive(hidden, weight, targets):
    log_softmax = jax.nn.log_softmax(hidden @ weight.T)
    return jnp.take_along_axis(log_softmax, targets[:, None], axis=1)[:, 0]


MESH_SIZES = (2, 3, 4, 6, 8)
order = ReductionOrder(granules=24, vocab_tile=64, row_block=64)
ENGINES = {
    "fast path": ("chunked", lambda size: VocabShards.even(VOCAB, size)),
    "fixed order": (FixedOrderEngine(order), lambda size: order.shards(VOCAB, size)),
}


def whole(engine):
    return lambda h, w, t: linear_log_probs(h, w, t, engine=engine).log_probs


def sharded(engine, vocab):
    size = vocab.num_shards
    mesh = jax.make_mesh((size,), ("tensor",), axis_types=(AxisType.Auto,), devices=jax.devices()[:size])

    def local(hidden, rows, targets):
        options = {"axis_name": "tensor", "vocab": vocab, "engine": engine, "out_of_vocab": "zero"}
        return linear_log_probs(hidden, rows, targets, **options).log_probs

    mapped = jax.shard_map(local, mesh=mesh, in_specs=(P(), P("tensor"), P()), out_specs=P())
    return lambda h, w, t: mapped(h, vocab.shard_rows(w), t)


reports = [check_invariance(naive, hidden, weight, targets, name="naive JAX", num_shards=())]
functions = {}
for name, (engine, shards_for) in ENGINES.items():
    meshes = {size: sharded(engine, shards_for(size)) for size in MESH_SIZES}
    functions[name] = {1: whole(engine), **meshes}
    reports.append(
        check_invariance(whole(engine), hidden, weight, targets, name=name, num_shards=MESH_SIZES, sharded=meshes)
    )
print(reports[1], end="\n\n")
for report in reports:
    print(f"{report.name}: {len(report.broken)} of {len(report.differences)} changes changed a bit")
assert reports[0].broken and reports[1].broken and not reports[2].broken and not reports[2].not_run

# %% [markdown]
# The same as a picture, without the changes that changed no bit in any of the three.

# %%
shares = {(report.name, d.change): d.num_differing / d.num_tokens for report in reports for d in report.differences}
names = [report.name for report in reports]
changes = [d.change for d in reports[2].differences if any(shares.get((name, d.change)) for name in names)]
table = np.array([[shares.get((name, change), np.nan) for change in changes] for name in names])

figure, axes = plt.subplots(figsize=(8, 2.8), layout="constrained")
axes.imshow(table, cmap="OrRd", vmin=0, vmax=1, aspect="auto")
for (row, column), share in np.ndenumerate(table):
    text = "not run" if np.isnan(share) else f"{share:.0%}"
    axes.text(column, row, text, ha="center", va="center", color="w" if share > 0.5 else "k")
axes.set_xticks(range(len(changes)), [change.replace("vocabulary over ", "") for change in changes])
axes.set_yticks(range(len(names)), names)
axes.tick_params(axis="x", labelsize=8)
axes.set_title("Share of tokens whose log-prob changed in any bit")
plt.show()

# %% [markdown]
# ## Why
#
# A sum of floats depends on its order, and on the fast path every mesh picks a different one. Below are the bits of the
# token that changed most, as integers relative to one device: the distance in units in the last place.

# %%
for name, by_size in functions.items():
    log_probs = [np.asarray(jax.jit(function)(hidden, weight, targets)) for function in by_size.values()]
    bits = np.stack([values.view(np.int32).astype(np.int64) for values in log_probs])
    distances = bits - bits[0]
    worst = int(np.argmax(np.abs(distances).max(axis=0)))
    listed = ", ".join(f"{distance:+d}" for distance in distances[:, worst])
    print(f"{name:11}, token {worst:2}, on {', '.join(map(str, by_size))} devices: {listed}")

# %% [markdown]
# `docs/invariance.md` states what is promised, what is not, and what it costs. A whole training run with the same
# property: `python -m experiments.grpo --invariant`. To check a function of your own, import `check_invariance` from
# `jaxlogp`.
