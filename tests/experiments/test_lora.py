"""Adapters of a model from disk: gradients, what is trained and saved, merged weights, refusals."""

import dataclasses
import functools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments import evaluate, export
from experiments.config import ModelConfig
from experiments.loop.assemble import assemble
from experiments.loop.load import load_model, load_run
from experiments.loop.resume import resume
from experiments.loop.run import train
from experiments.models.decoder import Decoder
from experiments.models.decoder_config import DecoderConfig, SlidingLayers
from experiments.models.lora import ADAPTABLE, LoraConfig, merged
from experiments.models.parameters import abstract_decoder
from tests.experiments.decoder_oracle import oracle_forward
from tests.experiments.tiny import tiny, train_records
from tests.experiments.tiny_directory import write_tiny_directory

RANK, ALPHA = 2, 3.0
BASE = DecoderConfig(
    vocab_size=24, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=6,
    rope_theta=50.0, attention_bias=True, qk_norm=True, sliding=SlidingLayers(4, (True, False)),
)  # fmt: skip
LORA = LoraConfig(RANK, ALPHA)
TOKENS = np.random.default_rng(0).integers(0, 24, 9).astype(np.int32)


def parts_of(config):
    """Graph, adapters and base of a decoder, with every parameter drawn: zeros would hide a mistake."""
    graph, *states = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))), nnx.LoRAParam, ...)
    noise = np.random.default_rng(1)
    draw = lambda leaf: jnp.asarray(0.3 * noise.normal(size=leaf.shape) + (leaf.ndim == 1), jnp.float32)  # noqa: E731
    return graph, *(jax.tree.map(draw, state) for state in states)


@functools.cache
def adapted():
    return parts_of(dataclasses.replace(BASE, lora=LORA))


@functools.partial(jax.jit, static_argnums=0)
def hidden_of(graph, adapters, base):
    row = jnp.asarray(TOKENS)[None]
    return nnx.merge(graph, adapters, base).hidden_states(row, jnp.arange(row.size)[None], row * 0)[0]


def in_float64(adapters, base):
    """Hidden states by the float64 forward, with the sum W + scale · A · B written out."""
    pure = jax.tree.map(lambda x: np.asarray(x, np.float64), nnx.to_pure_dict(base))
    for name, module in nnx.to_pure_dict(adapters)["layers"].items():
        a, b = (np.asarray(module["lora"][part], np.float64) for part in ("lora_a", "lora_b"))
        kernel = pure["layers"][name]["kernel"]
        pure["layers"][name]["kernel"] = kernel + ALPHA / RANK * np.matmul(a, b).reshape(kernel.shape)
    return oracle_forward(pure, TOKENS, BASE)


def test_adapted_projections_equal_the_float64_forward_of_the_sum():
    graph, adapters, base = adapted()
    wanted = in_float64(adapters, base)
    # As for the plain decoder: values near 1 after a few hundred fp32 operations.
    np.testing.assert_allclose(hidden_of(graph, adapters, base), wanted, atol=5e-5, rtol=0)
    assert np.abs(wanted - in_float64(jax.tree.map(jnp.zeros_like, adapters), base)).max() > 0.1


def test_gradients_of_adapters_equal_differences_of_the_float64_forward():
    graph, adapters, base = adapted()
    weights = np.random.default_rng(2).normal(size=(len(TOKENS), BASE.hidden_size))

    def loss(adapters):
        return jnp.sum(jnp.asarray(weights, jnp.float32) * hidden_of(graph, adapters, base))

    gradient = jax.grad(loss)(adapters)
    leaves, structure = jax.tree.flatten(adapters)
    noise = np.random.default_rng(3)
    for number, leaf in enumerate(leaves):
        direction = noise.normal(size=leaf.shape)

        def moved(step, number=number, direction=direction):
            wide = [np.asarray(each, np.float64) for each in leaves]
            wide[number] = wide[number] + step * direction
            return np.sum(weights * in_float64(jax.tree.unflatten(structure, wide), base))

        # Central differences in float64 with a step of 1e-5: an error of about 1e-9 relative.
        wanted = (moved(1e-5) - moved(-1e-5)) / 2e-5
        seen = np.sum(np.asarray(jax.tree.leaves(gradient)[number], np.float64) * direction)
        scale = np.linalg.norm(np.asarray(jax.tree.leaves(gradient)[number])) * np.linalg.norm(direction)
        assert abs(seen - wanted) < 2e-5 * scale, structure


def test_adapters_without_a_product_leave_the_base_and_stand_where_they_were_asked_for():
    config = dataclasses.replace(BASE, lora=dataclasses.replace(LORA, modules=("q_proj", "o_proj")))
    graph, adapters, base = parts_of(config)
    flat = dict(nnx.to_flat_state(adapters))
    assert {path: leaf.shape for path, leaf in flat.items()} == {
        ("layers", "q_proj", "lora", "lora_a"): (2, 16, RANK),
        ("layers", "q_proj", "lora", "lora_b"): (2, RANK, 24),
        ("layers", "o_proj", "lora", "lora_a"): (2, 24, RANK),
        ("layers", "o_proj", "lora", "lora_b"): (2, RANK, 16),
    }
    for path, leaf in flat.items():
        if path[-1] == "lora_b":
            leaf.set_value(jnp.zeros(leaf.shape))
    plain, _, params = parts_of(BASE)
    assert jax.tree.structure(params) == jax.tree.structure(base)
    np.testing.assert_array_equal(hidden_of(graph, adapters, base), hidden_of(plain, nnx.State({}), base))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_merged_weights_are_the_sum_rounded_once(dtype):
    _, adapters, base = adapted()
    base = jax.tree.map(lambda x: x.astype(dtype), base)
    whole = merged(adapters, base, ALPHA / RANK)
    assert jax.tree.structure(whole) == jax.tree.structure(base)
    a, b = (np.asarray(adapters["layers"]["k_proj"]["lora"][part][...], np.float64) for part in ("lora_a", "lora_b"))
    kernel = np.asarray(base["layers"]["k_proj"]["kernel"][...], np.float64)
    wanted = kernel + 1.5 * np.matmul(a, b).reshape(kernel.shape)
    seen = whole["layers"]["k_proj"]["kernel"][...]
    # One rounding to the stored dtype, and a few in fp32.
    ulp = {"float32": 2.0**-22, "bfloat16": 2.0**-8}[dtype]
    assert seen.dtype == dtype and np.abs(np.asarray(seen, np.float64) - wanted).max() <= ulp * np.abs(wanted).max()
    np.testing.assert_array_equal(whole["norm"]["scale"][...], base["norm"]["scale"][...])


SMALL = {
    "task": "comparison:1", "rollout": {"prompts_per_rollout": 4, "num_generations": 2, "max_new_tokens": 3},
    "loss": {"kl_coefficient": 0.01, "kl_estimator": "reverse"},
    "evaluation": {"num_prompts": 4}, "lora": {"rank": RANK, "alpha": ALPHA},
    "optimizer": {"learning_rate": 3e-2}, "warm_start": {"max_steps": 0},
    "schedule": {"docs_per_step": 8, "rows": 8, "row_length": 16, "steps": 2}, "checkpoint": {"every": 1},
}  # fmt: skip


def options(path, out, name, **changes):
    config = tiny(out, name, **(SMALL | changes))
    return dataclasses.replace(config, model=ModelConfig(path=str(path)))


def by_letters(example, text):
    """A reward that differs between random texts."""
    return sum(map(ord, text)) % 5 / 4


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_tiny_directory(tmp_path_factory.mktemp("models") / "qwen3", "qwen3", num_hidden_layers=2)


@pytest.fixture(scope="module")
def trained(directory, tmp_path_factory):
    return train(options(directory, tmp_path_factory.mktemp("run"), "a"), reward=by_letters)


def test_adapters_alone_have_optimizer_state_and_begin_without_a_product(directory, tmp_path):
    setup = assemble(options(directory, tmp_path, "a"))
    flat = nnx.to_flat_state(setup.learner.state.params)
    assert len(flat) == 2 * len(ADAPTABLE) and all(isinstance(leaf, nnx.LoRAParam) for _, leaf in flat)
    assert all((np.asarray(leaf[...]) == 0).all() == (path[-1] == "lora_b") for path, leaf in flat)
    adapters = sum(leaf[...].nbytes for _, leaf in flat)
    state = sum(leaf.nbytes for leaf in jax.tree.leaves(setup.learner.state.opt_state))
    # Two moments, and the counts of Adam and of the schedule.
    assert 2 * adapters <= state <= 2 * adapters + 16
    assert adapters < 0.5 * sum(leaf.nbytes for leaf in jax.tree.leaves(setup.backend.frozen))


@pytest.mark.slow
def test_adapters_alone_are_trained(trained, directory):
    records = train_records(trained)
    assert all(record["update_applied"] and record["grad_norm"] > 0.0 for record in records)
    jax.tree.map(np.testing.assert_array_equal, trained.setup.backend.frozen, load_model(directory).params)
    assert all((np.asarray(leaf[...]) != 0).any() for _, leaf in nnx.to_flat_state(trained.params))
    # The sampler draws from the adapted model: in the second step too.
    assert max(record["drift_max"] for record in records) < 1e-4


@pytest.mark.slow
def test_a_run_begins_as_its_base_and_the_reference_stays_it(trained, directory, tmp_path):
    whole = assemble(options(directory, tmp_path, "b", lora={}))
    fresh = assemble(options(directory, tmp_path, "a"))
    scores = [setup.evaluation.of(setup.policy_of(setup.learner.state.params)).scores for setup in (fresh, whole)]
    assert scores == [trained.before] * 2
    reference = nnx.to_flat_state(trained.setup.learner.reference)
    assert all((np.asarray(leaf[...]) == 0).all() for path, leaf in reference if path[-1] == "lora_b")


@pytest.mark.slow
def test_an_export_has_the_logits_of_the_adapted_model(trained, tmp_path):
    out = export.run_cli([str(trained.run.path), str(tmp_path / "out")])
    loaded = load_model(out)
    assert loaded.config.lora.rank == 0 and json.loads((out / "config.json").read_text())["model_type"] == "qwen3"
    row = jnp.asarray(np.random.default_rng(0).integers(0, 256, (1, 12)).astype(np.int32))

    @functools.partial(jax.jit, static_argnums=0)
    def logits(graph, *states):
        model = nnx.merge(graph, *states)
        hidden = model.hidden_states(row, jnp.arange(12)[None], row * 0)
        return jnp.einsum("bth,vh->btv", hidden, model.head()[1], precision="highest")

    setup = trained.setup
    graph, _ = abstract_decoder(setup.model.decoder)
    seen, wanted = logits(loaded.graph, loaded.params), logits(graph, trained.params, setup.backend.frozen)
    base = logits(loaded.graph, setup.backend.frozen)
    # W + scale · A · B rounded to fp32, instead of a sum of two products: a few roundings of logits of this size.
    assert np.abs(wanted - base).max() > 1e-2 and np.abs(seen - wanted).max() < 2e-5 * np.abs(wanted).max()


@pytest.mark.slow
def test_a_run_is_scored_and_resumed_with_its_base_alone(trained, tmp_path):
    assert evaluate.run_cli([str(trained.run.path)]) == trained.after
    # Base split over heads and features, adapters on every device.
    split = load_run(trained.run.path, lambda stored: dataclasses.replace(stored, mesh="data=2,tensor=2"))
    kernel = split.inference.backend.frozen["layers"]["q_proj"]["kernel"][...]
    scored = split.inference.evaluation.of(split.inference.policy_of(split.params)).scores
    assert not kernel.sharding.is_fully_replicated and scored == trained.after
    shutil.copytree(trained.run.path, tmp_path / "back")
    resumed = resume(f"{tmp_path / 'back'}@1", {"quiet": True}, reward=by_letters)
    jax.tree.map(np.testing.assert_array_equal, resumed.setup.learner.state, trained.setup.learner.state)


@pytest.mark.slow
@pytest.mark.bad_input
def test_another_base_is_noticed(directory, tmp_path):
    from safetensors.numpy import load_file, save_file

    path = write_tiny_directory(tmp_path / "model", "qwen3", num_hidden_layers=2)
    run = train(options(path, tmp_path, "d", schedule={**SMALL["schedule"], "steps": 0})).run
    tensors = load_file(path / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"] + np.float32(0.5)
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ValueError, match="^model: its frozen parameters differ from those that the run began with"):
        load_model(run.path)
    path.rename(tmp_path / "moved")
    with pytest.raises(ValueError, match="^model: expected a Hugging Face directory .*, which does not exist"):
        load_model(run.path)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lora": {"rank": 2, "modules": ("q_proj", "lm_head")}}, "--lora.modules: .*one matrix.*, got q_proj lm_head"),
        ({"lora": {"rank": 2, "modules": ()}}, "--lora.modules: expected .*, got none"),
        ({"lora": {"rank": 2, "modules": ("q_proj", "q_proj")}}, "--lora.modules: expected different names"),
        ({"lora": {"rank": 2}, "invariant": True}, "--lora.rank: expected 0 with --invariant"),
    ],
)
def test_an_adapter_that_cannot_be_is_refused(changes, words, directory, tmp_path):
    with pytest.raises(ValueError, match=f"^{words}"):
        assemble(options(directory, tmp_path, "e", **changes))
