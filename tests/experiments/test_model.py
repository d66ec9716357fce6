"""The decoder against a float64 forward of one document at a time."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from experiments.models import decoder as model_module
from experiments.models.decoder import Decoder
from experiments.models.decoder_config import DecoderConfig, SlidingLayers
from experiments.models.mesh import MeshSpec, make_mesh
from experiments.models.rope import LinearScaling, Llama3Scaling
from experiments.models.sharding import RULES, parameter_shardings
from tests.experiments.decoder_oracle import oracle_forward

SIZES = dict(vocab_size=24, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=8, num_kv_heads=4)
# Wavelengths of 6, 29 and 135: below the stretch (shorter than 24 / 3), inside it, and beyond (longer than 24 / 0.5).
SCALING = Llama3Scaling(factor=4.0, low_freq_factor=0.5, high_freq_factor=3.0, original_max_position_embeddings=24)
CONFIGS = {
    "qwen3": DecoderConfig.qwen3(**SIZES, head_dim=8, rope_theta=100.0),
    "llama3": DecoderConfig.llama3(**SIZES, head_dim=6, rope_theta=100.0, tie_embeddings=False, rope_scaling=SCALING),
    "qwen2": DecoderConfig(**SIZES, head_dim=6, rope_theta=50.0, attention_bias=True),
    # Gemma 2 and 3 at once: whatever either has, with numbers at which it counts.
    "gemma": DecoderConfig(
        **SIZES, head_dim=6, rope_theta=400.0, rope_scaling=LinearScaling(4.0), qk_norm=True, activation="gelu_tanh",
        sliding=SlidingLayers(3, (True, False), rope_theta=50.0), query_scale=0.3, attention_softcap=1.5,
        norm_plus_one=True, post_norms=True, embed_scale=32**0.5, tie_embeddings=True,
    ),
    "mistral": DecoderConfig(**SIZES, head_dim=6, rope_theta=50.0, sliding=SlidingLayers(4, (True, True))),
}  # fmt: skip

# 5 + 4 + 1 tokens and two of padding; one document of the whole row; padding alone.
DOCUMENT_IDS = np.array([[0] * 5 + [1] * 4 + [2] + [-1] * 2, [3] * 12, [-1] * 12], np.int32)
POSITIONS = np.array([[*range(5), *range(4), 0, 0, 1], [*range(12)], [*range(12)]], np.int32)


def tokens(seed=0):
    return np.random.default_rng(seed).integers(0, SIZES["vocab_size"], DOCUMENT_IDS.shape).astype(np.int32)


@functools.cache
def decoder(name, **changes):
    """Graph and state of a model whose norms and biases are drawn too: ones and zeros would hide a mistake."""
    graph, state = nnx.split(Decoder(dataclasses.replace(CONFIGS[name], **changes), rngs=nnx.Rngs(0)))
    leaves, structure = jax.tree.flatten(state)
    noise = np.random.default_rng(7)
    leaves = [leaf + 0.2 * noise.normal(size=leaf.shape).astype(np.float32) for leaf in leaves]
    return graph, jax.tree.unflatten(structure, leaves)


@functools.partial(jax.jit, static_argnums=0)
def forward(graph, state, token_ids, positions, document_ids):
    return nnx.merge(graph, state).hidden_states(token_ids, positions, document_ids)


@pytest.mark.parametrize(("name", "attention"), [*((name, "auto") for name in CONFIGS), ("gemma", "chunked")])
def test_packed_rows_equal_the_float64_forward_of_each_document(name, attention):
    graph, state = decoder(name, attention=attention)
    ids = tokens()
    hidden = np.asarray(forward(graph, state, ids, POSITIONS, DOCUMENT_IDS))
    assert hidden.dtype == np.float32 and hidden.shape == (*ids.shape, SIZES["hidden_size"])
    for row, document in [(0, 0), (0, 1), (0, 2), (1, 3)]:
        place = DOCUMENT_IDS[row] == document
        wanted = oracle_forward(nnx.to_pure_dict(state), ids[row, place], CONFIGS[name])
        # Norms keep every value near 1; a few hundred fp32 operations between input and output lose about 1e-6.
        np.testing.assert_allclose(hidden[row, place], wanted, atol=2e-5, rtol=0)


@pytest.mark.costly
def test_scanned_layers_and_recomputed_layers_equal_the_unrolled_ones(monkeypatch):
    graph, state = decoder("qwen3")

    def value_and_gradient(graph):
        def loss(state):
            return jnp.sum(jnp.sin(nnx.merge(graph, state).hidden_states(tokens(), POSITIONS, DOCUMENT_IDS)))

        return jax.jit(jax.value_and_grad(loss))(state)

    unrolled = value_and_gradient(graph)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(unrolled)), "of a row of padding, too"
    monkeypatch.setattr(model_module, "MAX_UNROLLED_LAYERS", 0)
    recomputed = (decoder("qwen3", remat=each)[0] for each in ("full", "products"))
    for other in map(value_and_gradient, (graph, *recomputed)):
        # The same sums in another order: rounding of gradients of size up to about 10.
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4, rtol=2e-4), other, unrolled)


@functools.partial(jax.jit, static_argnums=0)
def through_the_cache(graph, state, token_ids, lengths):
    """Hidden states of prompts [B, 6], and of 4 more tokens a row read one by one."""
    model = nnx.merge(graph, state)
    prompt, cache = model.prefill(token_ids[:, :6], lengths, slots=4)

    def step(cache, index):
        following = jax.lax.dynamic_index_in_dim(token_ids, 6 + index, axis=1, keepdims=False)
        hidden, cache = model.decode_step(following, cache)
        return cache, hidden

    _, later = jax.lax.scan(step, cache, jnp.arange(4))
    return prompt, later.swapaxes(0, 1)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_cache_gives_the_hidden_states_of_the_full_forward(name):
    graph, state = decoder(name)
    ids, lengths = tokens(), np.array([3, 6, 1], np.int32)
    prompt, later = through_the_cache(graph, state, ids, lengths)
    for row, length in enumerate(lengths):
        sequence = np.concatenate([ids[row, :length], ids[row, 6:10]])
        wanted = oracle_forward(nnx.to_pure_dict(state), sequence, CONFIGS[name])
        np.testing.assert_allclose(prompt[row, :length], wanted[:length], atol=2e-5, rtol=0)
        np.testing.assert_allclose(later[row], wanted[length:], atol=2e-5, rtol=0)


def test_bf16_activations_over_fp32_parameters():
    graph, state = decoder("qwen3", dtype="bfloat16")
    hidden = forward(graph, state, tokens(), POSITIONS, DOCUMENT_IDS)
    wide = np.asarray(forward(decoder("qwen3")[0], state, tokens(), POSITIONS, DOCUMENT_IDS))
    assert hidden.dtype == jnp.bfloat16
    assert nnx.merge(graph, state).head()[1].dtype == jnp.bfloat16
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(state))
    error = np.linalg.norm(np.asarray(hidden, np.float32) - wide) / np.linalg.norm(wide)
    assert 1e-4 < error < 0.03  # a bf16 rounding is up to 2^-9, and about ten follow each other


def mesh_of(data, tensor):
    devices = jax.devices()[: data * tensor]
    return jax.make_mesh((data, tensor), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2, devices=devices)


def test_the_sharded_forward_and_gradient_equal_the_single_device_ones():
    mesh = mesh_of(2, 4)
    graph, state = decoder("qwen3")
    meshed, _ = nnx.split(Decoder(CONFIGS["qwen3"], rngs=nnx.Rngs(0), mesh=mesh))
    placed = jax.device_put(state, parameter_shardings(state, mesh))
    inputs = [np.repeat(array, 2, axis=0)[:4] for array in (tokens(), POSITIONS, DOCUMENT_IDS)]

    def loss(state, graph, *inputs):
        hidden = nnx.merge(graph, state).hidden_states(*inputs)
        return jnp.sum(jnp.sin(hidden)), hidden

    both = jax.jit(jax.value_and_grad(loss, has_aux=True), static_argnums=1)
    (_, wanted), wanted_gradient = both(state, graph, *inputs)
    split = jax.device_put(inputs, NamedSharding(mesh, P("data")))
    (_, hidden), gradient = both(placed, meshed, *split)
    # The tensor axis cuts sums of 32 and 64 products in four, which reorders fp32 additions.
    np.testing.assert_allclose(hidden, wanted, atol=2e-5, rtol=0)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4, rtol=2e-4), gradient, wanted_gradient)


def test_shardings_split_what_the_tensor_axis_divides_and_nothing_else():
    mesh = mesh_of(1, 4)
    model = Decoder(dataclasses.replace(CONFIGS["qwen3"], vocab_size=26, num_kv_heads=2), rngs=nnx.Rngs(0))
    shardings = parameter_shardings(model, mesh)
    assert jax.tree.structure(shardings) == jax.tree.structure(nnx.state(model))
    layers = nnx.to_pure_dict(shardings)["layers"]
    specs = {name: sharding.spec for name, module in layers.items() for sharding in module.values()}
    assert specs["q_proj"] == P(None, None, "tensor") and specs["o_proj"] == P(None, "tensor")
    assert specs["k_proj"] == specs["v_proj"] == P()  # 2 key-value heads on 4 devices
    assert specs["gate_proj"] == specs["up_proj"] == P(None, None, "tensor") and specs["down_proj"] == P(None, "tensor")
    assert specs["input_layernorm"] == specs["q_norm"] == P()
    # 26 rows on 4 devices.
    assert nnx.to_pure_dict(shardings)["embed_tokens"]["embedding"].spec == P(None, "tensor")
    three_axes = parameter_shardings(model, make_mesh(MeshSpec(fsdp=2, tensor=4)))
    assert nnx.to_pure_dict(three_axes)["embed_tokens"]["embedding"].spec == P(None, ("tensor", "fsdp"))
    divisible = nnx.to_pure_dict(parameter_shardings(decoder("llama3")[1], mesh))
    assert divisible["embed_tokens"]["embedding"].spec == divisible["lm_head"]["weight"].spec == P("tensor")


def test_every_parameter_names_its_axes_and_flax_reads_the_same_table():
    for name in CONFIGS:
        for path, leaf in nnx.to_flat_state(decoder(name)[1]):
            names = leaf.get_metadata("out_sharding")
            assert len(names) == leaf.ndim and (names[0] == "layers") == (path[0] == "layers"), path
    _, state = decoder("llama3")
    with nnx.logical_axis_rules(RULES):
        theirs = nnx.to_flat_state(nnx.get_partition_spec(state))
    # Two and four ranks divide every axis that has a rule, so that Flax places every parameter where this project does.
    ours = nnx.to_flat_state(parameter_shardings(state, make_mesh(MeshSpec(fsdp=2, sequence=2, tensor=2))))
    for (path, spec), (_, sharding) in zip(theirs, ours, strict=True):
        axes, trimmed = tuple(spec.get_value()), tuple(sharding.get_value().spec)
        assert axes == trimmed + (None,) * (len(axes) - len(trimmed)), path


@pytest.mark.bad_input
def test_an_axis_without_a_rule_is_named():
    state = nnx.State({"w": nnx.Param(jnp.ones((2, 3)), out_sharding=("embed", "expert"), eager_sharding=False)})
    with pytest.raises(ValueError, match="^parameter w: expected axes named vocab, .*, got 'expert'"):
        parameter_shardings(state, mesh_of(1, 2))


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("vocab_size", 0), ("hidden_size", 32.0), ("num_layers", -1), ("num_kv_heads", 3), ("head_dim", 7),
        ("rope_theta", float("nan")), ("rms_norm_eps", 0.0), ("qk_norm", "yes"), ("dtype", "float16"),
        ("param_dtype", "fp32"), ("activation", "relu"), ("attention_softcap", 0.0), ("logit_softcap", 0.0),
        ("remat", "some"), ("residual_dtype", "bfloat16"), ("attention", "flash"),
    ],
)  # fmt: skip
def test_a_wrong_field_is_named_with_its_value(field, value):
    with pytest.raises(ValueError, match=field) as raised:
        dataclasses.replace(CONFIGS["qwen3"], **{field: value})
    assert str(value) in str(raised.value)


@pytest.mark.bad_input
def test_inputs_of_different_shapes_are_refused():
    model = nnx.merge(*decoder("qwen3"))
    with pytest.raises(ValueError, match="positions"):
        model.hidden_states(jnp.asarray(tokens()), jnp.asarray(POSITIONS[:2]), jnp.asarray(DOCUMENT_IDS))
    with pytest.raises(ValueError, match="high_freq_factor"):
        Llama3Scaling(low_freq_factor=2.0, high_freq_factor=2.0)
