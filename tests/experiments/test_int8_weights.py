"""A sampler whose matrices have 8 bits: what it draws is what a model of the rounded matrices draws."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments import train
from experiments.invariant.leaf_sampler import InvariantSampler
from experiments.models.decoder import Decoder
from experiments.models.decoder_config import DecoderConfig
from experiments.models.layers import Int8Matrix, Projection
from experiments.models.lora import LoraConfig
from experiments.models.mesh import MeshSpec, make_mesh
from experiments.models.sharding import parameter_shardings
from experiments.sampling.decoder_sampler import DecoderSampler
from experiments.sampling.recompute import RecomputeSampler
from experiments.sampling.sample_token import logits_of
from experiments.sampling.sampler import SampledModel
from tests.experiments.samples import rule
from tests.experiments.tiny import parity, tiny

VOCAB, NEW = 24, 5
SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_layers": 2, "num_heads": 4}
SIZES |= {"num_kv_heads": 2, "head_dim": 8, "tie_embeddings": False}
CAPS = {"attention_bias": True, "logit_softcap": 3.0, "logit_scale": 2.0}
CONFIGS = {
    "qwen3": DecoderConfig.qwen3(**SIZES),
    "biases and caps": DecoderConfig(**SIZES, **CAPS),
    "adapters": DecoderConfig.qwen3(**SIZES, lora=LoraConfig(rank=2, modules=("q_proj", "down_proj"))),
}
# Two programs of the same numbers in fp32: sums of at most 48 products in each of 2 · 7 matrices and the head, each rounded
# to 2^-24 of values of size up to 8.
ROUNDING = 15 * 48 * 2.0**-24 * 8


def model_of(name, mesh=None):
    graph, state = nnx.split(Decoder(CONFIGS[name], rngs=nnx.Rngs(0), mesh=mesh))
    # As initialised, biases and adapters add nothing.
    leaves, tree = jax.tree.flatten(state)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    noise = (0.1 * jax.random.normal(key, leaf.shape) for key, leaf in zip(keys, leaves, strict=True))
    state = jax.tree.unflatten(tree, [leaf + more for leaf, more in zip(leaves, noise, strict=True)])
    return graph, state if mesh is None else jax.device_put(state, parameter_shardings(state, mesh))


def rounded(matrix, inputs):
    """In float64: every value of an output is a whole number of 127ths of its largest."""
    matrix = np.asarray(matrix, np.float64)
    largest = np.abs(matrix).max(axis=inputs, keepdims=True)
    return np.round(matrix * 127 / largest) * largest / 127


def with_rounded_matrices(state):
    """The parameters of a model that multiplies exactly by what 8 bits hold."""
    parts = dict(nnx.to_flat_state(state))
    for path, leaf in parts.items():
        if path[-1] == "kernel":
            # Layers first, then one axis of inputs; o_proj has two.
            inputs = (1, 2) if "o_proj" in path else (1,)
        elif path == ("lm_head", "weight"):
            inputs = (1,)
        else:
            continue
        parts[path] = leaf.replace(jnp.asarray(rounded(leaf[...], inputs), jnp.float32))
    return nnx.from_flat_state(parts)


PROMPTS, LENGTHS = np.random.default_rng(0).integers(0, VOCAB, (4, 3), np.int32), np.asarray([3, 1, 2, 3], np.int32)


@functools.partial(jax.jit, static_argnums=(0, 4, 5))
def decoded(graph, state, decoding, tokens, int8, join):
    """Logits after each further token of four rows, their prompts read with `state`, the tokens with `decoding`."""
    _, cache = nnx.merge(graph, state).prefill(PROMPTS, LENGTHS, slots=tokens.shape[1])
    model = nnx.merge(graph, decoding)
    layers = model.layers_apart(int8=int8 and not join)
    if join:
        for layer in layers:
            layer.join_projections()
            layer.to_int8()
    logits = []
    for each in tokens.T:
        hidden, cache = model.decode_step(each, cache, layers)
        logits.append(logits_of(hidden, *model.head_apart(int8=int8)))
    return jnp.stack(logits, axis=1)


@pytest.mark.parametrize("join", [False, True])
@pytest.mark.parametrize("name", ["qwen3", *(pytest.param(name, marks=pytest.mark.costly) for name in [*CONFIGS][1:])])
def test_a_step_is_that_of_a_model_of_the_rounded_matrices(name, join):
    graph, state = model_of(name)
    tokens = jnp.asarray([[3, 7], [1, 1], [20, 9], [0, 23]])
    found = decoded(graph, state, state, tokens, True, join)
    wanted = decoded(graph, state, with_rounded_matrices(state), tokens, False, False)
    np.testing.assert_allclose(found, wanted, atol=ROUNDING, rtol=0)
    plain = decoded(graph, state, state, tokens, False, False)
    assert np.abs(plain - wanted).max() > 20 * ROUNDING


def test_values_are_within_half_a_scale_and_what_is_not_finite_stays_so():
    sizes = np.logspace(-30, 30, 9, dtype=np.float32)
    matrix = np.random.default_rng(0).normal(size=(64, 9)).astype(np.float32) * sizes
    matrix[:, 3] = 0.0
    values, scales = Int8Matrix.of(jnp.asarray(matrix))
    assert values.dtype == jnp.int8
    error = np.abs(np.asarray(values.T, np.float64) * np.asarray(scales, np.float64) - matrix)
    # Dividing and multiplying by a scale is rounded in fp32, by 127 · 2^-24 of it each.
    assert (error <= np.asarray(scales, np.float64) * (0.5 + 3 * 127 * 2.0**-24)).all()
    largest = np.abs(np.asarray(values)).max(axis=1)
    assert largest.tolist() == [127 if column != 3 else 0 for column in range(9)]
    broken = Projection({"embed": 4, "mlp": 3}, "float32", nnx.Rngs(0))
    broken.kernel[...] = broken.kernel[...].at[1, 0].set(jnp.inf).at[2, 2].set(jnp.nan)
    broken.to_int8()
    assert np.isfinite(broken(jnp.ones((2, 4)))).tolist() == [[False, True, False]] * 2


def drawn(mesh, copies=1, **options):
    mesh = make_mesh(mesh)
    graph, state = model_of("qwen3", mesh)
    sampler = DecoderSampler(SampledModel(graph, mesh), rule(NEW, **options))
    return sampler(state, PROMPTS, LENGTHS, copies, jax.random.key(0))


@pytest.mark.costly
def test_the_option_reaches_every_step_but_not_the_prompts():
    exact, eight_bits = (drawn(MeshSpec(), int8_weights=chosen) for chosen in (False, True))
    np.testing.assert_array_equal(exact.log_probs[:, 0], eight_bits.log_probs[:, 0])
    assert (exact.log_probs[:, 1:] != eight_bits.log_probs[:, 1:]).all()
    graph, state = model_of("qwen3")
    tokens = jnp.asarray(eight_bits.tokens)
    logits = decoded(graph, state, with_rounded_matrices(state), tokens[:, :-1], False, False)
    log_probs = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], axis=2)[..., 0]
    np.testing.assert_allclose(eight_bits.log_probs[:, 1:], log_probs, atol=2 * ROUNDING, rtol=0)


@pytest.mark.costly
def test_a_mesh_draws_the_same():
    alone, split = (
        drawn(spec, copies=2, int8_weights=True) for spec in (MeshSpec(), MeshSpec(data=1, fsdp=2, tensor=2))
    )
    np.testing.assert_array_equal(alone.tokens, split.tokens)
    np.testing.assert_allclose(alone.log_probs, split.log_probs, atol=ROUNDING, rtol=0)


@pytest.mark.costly
def test_a_run_draws_with_it_and_reports_its_drift(tmp_path):
    options = {"warm_start": {"max_steps": 0}, "schedule": {"steps": 1}, "drift": {"every": 1}}
    largest = []
    for name, chosen in (("exact", False), ("rounded", True)):
        result = train(tiny(tmp_path, name, rollout={"int8_weights": chosen}, **options), reward=parity)
        largest += [record["max"] for record in result.metrics if record["kind"] == "drift"]
    assert largest[0] < 1e-5 and 1e-4 < largest[1] < 0.1


@pytest.mark.bad_input
def test_samplers_without_it_refuse_it():
    graph, _ = model_of("qwen3")
    eight_bits = rule(NEW, int8_weights=True)
    with pytest.raises(ValueError, match=r"^int8_weights \(--rollout.int8-weights\): expected False for a model"):
        RecomputeSampler(SampledModel(graph, make_mesh(MeshSpec())), eight_bits)
    with pytest.raises(ValueError, match="^int8_weights: expected False with --invariant"):
        InvariantSampler(None, eight_bits, 8, 2)
