"""Gradient sums of both kinds against a loss written out over stored logits, for every part of the loss object."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments.config import LossConfig
from experiments.invariant.leaf_programs import LeafPrograms
from experiments.invariant.leaf_sums import LeafSums
from experiments.learner.gradients import GspmdGradients
from experiments.learner.objectives import CrossEntropy, PolicyObjective
from experiments.learner.packing import Packing
from experiments.models.decoder import Decoder
from experiments.models.decoder_config import DecoderConfig
from experiments.models.mesh import MeshSpec, make_mesh
from jaxlogp import Document
from jaxlogp.head import FixedOrderEngine
from jaxlogp.invariance import ReductionOrder
from tests.experiments.stacked import stacked
from tests.experiments.tiny import SIZES

pytestmark = pytest.mark.costly

VOCAB, LENGTH, ROWS = 24, 8, 8

COLUMNS = ("ref_log_probs",)
# fp32 sums of a few dozen labels in another order, relative to the largest entry of a gradient.
TOLERANCE = 2e-5


def documents(count=7):
    drawn = np.random.default_rng(0)
    made = []
    for index in range(count):
        length = int(drawn.integers(2, 6))
        # Old log-probs apart from the policy's by up to 0.6: ratios on both sides of the clip range.
        old, reference = np.float32(drawn.uniform(-3.8, -2.6, (2, length)))
        tokens = drawn.integers(0, VOCAB, length + 2).astype(np.int32)
        given = {"advantages": (-1.0) ** index * (1 + index), "columns": {"ref_log_probs": reference}}
        made.append(Document.of_completion(tokens[:2], tokens[2:], old, **given))
    return made


def packing(ranks=1):
    return Packing(ranks, ROWS, LENGTH, VOCAB, pad_id=0, share_rows=False, columns=COLUMNS)


@functools.cache
def decoder(**changes):
    config = DecoderConfig(vocab_size=VOCAB, **SIZES, **changes)
    return config, *nnx.split(Decoder(config, rngs=nnx.Rngs(3)))


def written_out(params, graph, batch, temperature, per_label):
    """Loss sum by stored logits; `per_label(log_prob, entropy, old, reference, advantage)` is the loss of one label."""
    model = nnx.merge(graph, params)
    hidden = model.hidden_states(batch.tokens, batch.positions, batch.segment_ids)
    spec, weight = model.head()
    logits = spec.logit_scale * jnp.einsum("rth,vh->rtv", hidden, weight, precision="highest")
    logits = logits if spec.softcap is None else spec.softcap * jnp.tanh(logits / spec.softcap)
    log_p = jax.nn.log_softmax(logits / temperature)
    chosen = jnp.take_along_axis(log_p, batch.targets[..., None], axis=-1)[..., 0]
    entropy = -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)
    columns = [batch.per_token[name] for name in ("old_log_probs", "ref_log_probs", "advantages")]
    return jnp.sum(jnp.where(batch.mask, per_label(chosen, entropy, *columns), 0.0))


def clipped(log_prob, old, advantage, low, high):
    ratio = jnp.exp(log_prob - old)
    return jnp.minimum(ratio * advantage, jnp.clip(ratio, low, high) * advantage)


def grpo(log_prob, entropy, old, reference, advantage, low=0.8, high=1.2):
    return -clipped(log_prob, old, advantage, low, high)


def with_kl(log_prob, entropy, old, reference, advantage):
    distance = reference - log_prob
    return grpo(log_prob, entropy, old, reference, advantage) + 0.3 * (jnp.exp(distance) - distance - 1)


CASES = {
    "grpo": (LossConfig(), {}, 1.0, grpo),
    "epsilon_high": (LossConfig(epsilon_high=0.5, metrics="none"), {}, 0.6, functools.partial(grpo, high=1.5)),
    "entropy": (LossConfig(entropy_coefficient=0.7), {}, 1.0, lambda *x: grpo(*x) - 0.7 * x[1]),
    "kl": (LossConfig(kl_coefficient=0.3), {}, 1.0, with_kl),
    "scale and cap": (LossConfig(metrics="basic"), {"logit_scale": 3.0, "logit_softcap": 2.0}, 1.3, grpo),
}


def sums_of_micro_batches(config, graph, objective, temperature):
    mesh = make_mesh(MeshSpec())
    return GspmdGradients(graph, mesh, objective, temperature=temperature, engine="auto")


def sums_of_leaves(config, graph, objective, temperature):
    engine = FixedOrderEngine(ReductionOrder(24, 64, 64, "float32"))
    programs = LeafPrograms(graph, config, make_mesh(MeshSpec()), engine, block=4, temperature=temperature)
    return LeafSums(programs, objective)


def check_gradient(make_sums, objective, case_model, temperature, per_label):
    config, graph, params = decoder(**case_model)
    (batch,) = packing().rounds(documents())
    sums = make_sums(config, graph, objective, temperature)
    result = sums.accumulate(params, [batch], 0).sums
    flat = batch.micro_batch(0)
    reference = jax.jit(lambda params: jax.value_and_grad(written_out)(params, graph, flat, temperature, per_label))
    value, gradient = reference(params)
    np.testing.assert_allclose(result.loss.sum, value, rtol=TOLERANCE)
    assert int(result.loss.count) == flat.mask.sum()
    for mine, wanted in zip(jax.tree.leaves(result.gradients), jax.tree.leaves(gradient), strict=True):
        scale = np.abs(np.asarray(wanted)).max()
        np.testing.assert_allclose(np.asarray(mine), np.asarray(wanted), atol=TOLERANCE * scale)


# Of leaves "entropy" has the gradient by the entropies, "kl" a column, "scale and cap" the head's arithmetic.
SUMS = [(sums_of_micro_batches, name) for name in CASES] + [
    (sums_of_leaves, name) for name in ("entropy", "scale and cap")
]
SUMS += [pytest.param(sums_of_leaves, "kl", marks=pytest.mark.slow)]


@pytest.mark.parametrize("make_sums, name", SUMS)
def test_micro_batch_sums_are_the_gradient_of_the_loss_written_out(make_sums, name):
    """Sums of leaves are, too."""
    loss, model, temperature, per_label = CASES[name]
    objective = PolicyObjective(loss.policy_loss(LENGTH), loss.metrics)
    check_gradient(make_sums, objective, model, temperature, per_label)


def test_cross_entropy_is_an_objective_like_another():
    check_gradient(sums_of_micro_batches, CrossEntropy(), {}, 1.0, lambda log_prob, *_: -log_prob)


def test_a_round_goes_from_the_host_to_each_device():
    """A detour over the first device would be a copy between devices."""
    config, graph, params = decoder()
    (batch,) = packing(ranks=2).rounds(documents())
    sums = GspmdGradients(graph, make_mesh(MeshSpec(data=2)), CrossEntropy(), temperature=1.0, engine="auto")
    with jax.transfer_guard_device_to_device("disallow_explicit"):
        placed = sums._placed(batch)
    assert {shard.device.id for shard in placed.tokens.addressable_shards} == {0, 1}
    np.testing.assert_array_equal(placed.tokens, stacked(batch).tokens.reshape(2 * ROWS, LENGTH))


OPTIONS = {
    "dapo": (LossConfig(name="dapo"), dict(reduction="labels")),
    "gspo": (LossConfig(name="gspo", weighting="length"), dict(ratio="sequence", reduction="documents")),
    "dr_grpo": (LossConfig(name="dr_grpo"), dict(reduction="constant_length", length=9)),
    "another length": (LossConfig(name="dr_grpo", length=5), dict(length=5)),
    "another reduction": (LossConfig(reduction="constant_length"), dict(reduction="constant_length", length=9)),
    "k2": (LossConfig(kl_coefficient=0.1, kl_estimator="k2"), dict(kl_coefficient=0.1, kl_estimator="k2")),
    "another ratio": (LossConfig(ratio="product"), dict(ratio="product", reduction="labels", name="grpo")),
    "grad_divisor": (LossConfig(grad_divisor=7.0), dict(grad_divisor=7.0)),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_reach_the_loss_object(name):
    config, wanted = OPTIONS[name]
    loss = config.policy_loss(9)
    assert {field: getattr(loss, field) for field in wanted} == wanted


def test_clip_options_reach_the_objective():
    clip = LossConfig(epsilon=0.1, epsilon_high=0.4, delta=3.0).policy_loss(9).objective
    assert (clip.epsilon, clip.epsilon_high, clip.delta) == (0.1, 0.4, 3.0)
    assert LossConfig(name="cispo", max_weight=2.0).policy_loss(9).objective.max_weight == 2.0
