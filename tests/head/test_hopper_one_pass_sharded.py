"""The Hopper kernels' one pass inside of shard_map: on simulated devices against float64, and as it is lowered for GPUs."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxlogp import VocabShards, linear_log_probs, linear_policy_loss
from jaxlogp._mosaic_gpu import why_not_available
from jaxlogp.head import HopperEngine, record_head_runs
from jaxlogp.head.hopper import one_pass as hopper_one_pass
from jaxlogp.losses import grpo
from tests import oracle
from tests.head import cases

pytestmark = pytest.mark.skipif(why_not_available() is not None, reason=str(why_not_available()))

# The first shard is a tile of 256 columns; the second has a tail.
TOKENS, HIDDEN, SHARDS = 40, 64, VocabShards.from_ranges([(0, 256), (256, 528)], 528)
ARITHMETIC = {"temperature": 0.7, "logit_scale": 1.3}
BONUS = 0.1


def mesh_of(data, tensor):
    count = data * tensor
    return jax.make_mesh(
        (data, tensor), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:count]
    )


def train_head(mesh, **options):
    """(sum, values, gradients) of global operands, differentiated inside of the shard_map as a train step does it."""

    def local(hidden, weight, bias, per_token):
        def total(*operands):
            operands, bias = operands[:2], operands[2]
            loss, values = linear_policy_loss(*operands, *per_token, bias=bias, axis_name="tensor", **options)
            return loss.psum("data").sum, values

        operands = hidden, weight, bias
        argnums = (0, 1) if bias is None else (0, 1, 2)
        (loss, values), gradients = jax.value_and_grad(total, argnums, has_aux=True)(*operands)
        return loss, values, gradients

    rows, columns = P("data"), P("tensor")

    def run(hidden, weight, bias, *per_token):
        blocks = (columns, columns) if bias is not None else (columns,)
        in_specs = rows, columns, None if bias is None else columns, rows
        outs = P(), rows, (rows, *blocks)
        return jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=outs)(hidden, weight, bias, per_token)

    return jax.jit(run)


@functools.cache
def problem(tokens=TOKENS):
    """A case with a third of its tokens masked, the sampler's log-probs, advantages, and what float64 says."""
    data = cases.case((tokens,), HIDDEN, SHARDS.vocab_size, bias=jnp.float32, seed=3)
    data["mask"] = jnp.arange(tokens) % 3 != 0
    rng = np.random.default_rng(4)
    (log_probs, _), _ = cases.expected(data, **ARITHMETIC)
    old = jnp.asarray(log_probs + rng.normal(0.0, 0.3, tokens), jnp.float32)
    return data, old, jnp.asarray(rng.normal(size=tokens), jnp.float32)


def expected(data, old, advantages, coefficient):
    """(loss sum, values, gradients) in float64; the loss is summed, not divided."""
    (log_probs, entropy), _ = cases.expected(data, **ARITHMETIC)
    loss = oracle.grpo(log_probs, old, advantages, data["mask"], num_labels=1)
    g_entropy = np.where(data["mask"], -coefficient, 0.0)
    values, gradients = cases.expected({**data, "g_lp": loss.gradient, "g_entropy": g_entropy}, **ARITHMETIC)
    return loss.loss + float((g_entropy * entropy).sum()), values, gradients


def run(mesh, data, old, advantages, engine, coefficient, **more):
    """Values and gradients of the whole vocabulary by the kernels, and how they were made."""
    options = more | {
        "loss": grpo(entropy_coefficient=coefficient),
        "vocab": SHARDS,
        "with_entropy": True,
        **ARITHMETIC,
    }
    operands = data["hidden"], SHARDS.shard_rows(data["weight"]), SHARDS.shard_rows(data["bias"])
    # Hidden states without a label may hold anything.
    hidden = jnp.where(data["mask"][:, None], operands[0], jnp.nan)
    per_token = data["targets"], old, advantages, data["mask"]
    with cases.interpreted_together(), record_head_runs() as record:
        out = jax.block_until_ready(train_head(mesh, engine=engine, **options)(hidden, *operands[1:], *per_token))
    loss, values, (d_hidden, d_weight, d_bias) = out
    gradients = oracle.HeadGradients(d_hidden, SHARDS.unshard_rows(d_weight), SHARDS.unshard_rows(d_bias))
    return loss, values, gradients, {one.gradient for one in record}


def check(out, wanted):
    loss, values, gradients, how = out
    assert how == {"in one pass"}
    np.testing.assert_allclose(loss, wanted[0], rtol=1e-5)
    cases.check(values, gradients, wanted[1:])


def test_one_pass_with_a_bonus_over_vocabulary_shards():
    data, old, advantages = problem()
    out = run(mesh_of(1, 2), data, old, advantages, cases.hopper(), BONUS)
    check(out, expected(data, old, advantages, BONUS))
    masked = ~np.asarray(data["mask"])
    assert not np.asarray(out[2].hidden, np.float32)[masked].any()


def test_the_weights_gradient_is_summed_over_the_data_axis():
    data, old, advantages = problem()
    check(run(mesh_of(2, 2), data, old, advantages, cases.hopper(), 0.0), expected(data, old, advantages, 0.0))


def test_a_frozen_head_over_shards():
    data, old, advantages = problem()
    one, other = (
        run(mesh_of(1, 2), data, old, advantages, cases.hopper(), 0.0, frozen_head=frozen) for frozen in (True, False)
    )
    cases.same_bits(one[:2] + (one[2].hidden,), other[:2] + (other[2].hidden,))
    assert not np.any(one[2].weight) and not np.any(one[2].bias)


def test_chunks_over_shards_and_an_estimate_that_is_far_off(monkeypatch):
    # Two chunks of 128 tokens, the second of which has few labels; one token's ratio is about e^-80.
    data, old, advantages = problem(tokens=250)
    monkeypatch.setattr(hopper_one_pass, "CHUNK_BYTES", 128 * (2 * 512 + 4 * HIDDEN * 2))
    token = int(np.flatnonzero(np.asarray(data["mask"]))[140])
    old, advantages = old.at[token].add(80.0), advantages.at[token].set(5e34)
    out = run(mesh_of(1, 2), data, old, advantages, cases.hopper(), 0.0)
    check(out, expected(data, old, advantages, 0.0))


@functools.cache
def program_of_masks(layout):
    _, old, advantages = problem()

    def local(hidden, weight, targets, masks):
        def total(hidden, weight):
            options = {"axis_name": "tensor", "engine": cases.hopper(), "weight_layout": layout}
            loss, values = linear_policy_loss(hidden, weight, targets, old, advantages, masks[0], **options)
            return jax.lax.psum(loss.sum, "tensor"), values.log_probs[None]

        return jax.value_and_grad(total, (0, 1), has_aux=True)(hidden, weight)

    block = P("tensor") if layout == "vh" else P(None, "tensor")
    specs, outs = (P(), block, P(), P("tensor")), ((P(), P("tensor")), (P(), block))
    return jax.jit(jax.shard_map(local, mesh=mesh_of(1, 2), in_specs=specs, out_specs=outs))


def masks_apart(targets, masks, layout="vh"):
    """(loss, log-probs of both ranks, d hidden, d weight): each of two vocabulary ranks has a row of masks."""
    data = problem()[0]
    operands = data["hidden"], data["weight"][:512] if layout == "vh" else data["weight"][:512].T
    with cases.interpreted_together():
        found = jax.block_until_ready(program_of_masks(layout)(*operands, targets, jnp.asarray(masks)))
    return jax.tree.map(np.asarray, found)


def test_masks_that_differ_are_nan_though_counts_and_targets_are_the_same():
    masks = np.tile(np.arange(TOKENS) % 3 != 0, (2, 1))
    targets = jnp.full(TOKENS, 7, jnp.int32)
    (loss, log_probs), gradients = masks_apart(targets, masks)
    assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in (loss, log_probs, *gradients))
    masks[1, 3:5] = True, False
    (loss, log_probs), (d_hidden, d_weight) = masks_apart(targets, masks)
    assert np.isnan(loss) and np.isnan(log_probs[masks]).all()
    assert np.isnan(np.asarray(d_hidden, np.float32)[masks.any(axis=0)]).all()
    assert np.isnan(np.asarray(d_weight, np.float32)).all()


def test_a_weight_of_the_other_layout_over_shards():
    masks = np.tile(np.arange(TOKENS) % 3 != 0, (2, 1))
    targets = problem()[0]["targets"] % 512
    plain, turned = (masks_apart(targets, masks, layout) for layout in ("vh", "hv"))
    cases.same_bits((turned[0], (turned[1][0], turned[1][1].T.copy())), plain)


# --- lowered for NVIDIA GPUs ----------------------------------------------------------------------------------------

ENGINE = HopperEngine(check_device=False, num_sms=132, chunk=512)
N, H, V = 256, 1024, 4096


def abstract_operands():
    """hidden, weight, targets, two fp32 vectors, mask."""
    shapes = [((N, H), jnp.bfloat16), ((V, H), jnp.bfloat16), ((N,), jnp.int32)]
    return [jax.ShapeDtypeStruct(*x) for x in (*shapes, ((N,), jnp.float32), ((N,), jnp.float32), ((N,), jnp.bool_))]


def two_steps(mesh, with_backward):
    """linear_log_probs, and its gradients for given cotangents."""

    def local(hidden, weight, targets, g, g_entropy, mask):
        def head(hidden, weight):
            options = {"mask": mask, "with_entropy": True, "axis_name": "tensor", "engine": ENGINE}
            return linear_log_probs(hidden, weight, targets, **options)

        if not with_backward:
            return head(hidden, weight), None
        out, pull = jax.vjp(head, hidden, weight)
        return out, pull(out._replace(log_probs=g, entropy=g_entropy))

    specs, outs = (P(), P("tensor"), *[P()] * 4), (P(), (P(), P("tensor")) if with_backward else None)
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=outs))


def lowered(run, *operands):
    """Shapes of the all-reduces, in their order, and the number of kernels, of a program for NVIDIA GPUs."""
    text = run.trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
    found = re.findall(r'"stablehlo.all_reduce".*?\) : \(tensor<(\S+)>\) -> tensor', text, flags=re.DOTALL)
    assert not re.search("all_gather|reduce_scatter|all_to_all|collective_permute", text)
    return found, text.count("custom_call @mosaic_gpu")


def integers(rows, size):
    """Type of the psum of integers: sums, and where there are several ranks two rows that compare their targets."""
    return f"{rows + 2 * (size > 1)}x{N}xi32"


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("with_backward, kernels", [(False, 1), (True, 5)])
def test_the_two_steps_lower_for_gpus_inside_of_a_shard_map(size, with_backward, kernels):
    found = lowered(two_steps(mesh_of(1, size), with_backward), *abstract_operands())
    # Maxima, then integers that hold everything else; and dH, in fp32 where there is something to add.
    gradient = [f"{N}x{H}x{'f32' if size > 1 else 'bf16'}"] if with_backward else []
    assert found == ([f"{N}xf32", integers(9, size), *gradient], kernels)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    "options, vectors, rows, kernels",
    [
        ({}, 2, 6, 7),
        ({"loss": grpo(entropy_coefficient=BONUS)}, 1, 9, 7),
        ({"lse": np.zeros(N, np.float32)}, 0, 0, 4),
    ],
    ids=["one pass", "one pass, bonus", "known lse"],
)
def test_the_policy_loss_lowers_for_gpus_inside_of_a_shard_map(size, options, vectors, rows, kernels):
    hidden, weight, *per_token = abstract_operands()
    found = lowered(train_head(mesh_of(1, size), engine=ENGINE, **options), hidden, weight, None, *per_token)
    # The estimate of log Σ e^z without a bonus, maxima, integers; the loss; dH over the vocabulary axis, dW over data.
    values = [f"{N}xf32"] * vectors + ([integers(rows, size)] if rows else [])
    gradients = [f"{N}x{H}x{'f32' if size > 1 else 'bf16'}", f"{V // size}x{H}xbf16"]
    assert found == ([*values, "f32", *gradients], kernels)
