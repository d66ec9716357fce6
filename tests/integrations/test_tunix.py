"""Tunix with its log-probs from jaxlogp: the same losses and gradients as with its own, in less memory."""

import collections
import dataclasses
import importlib.metadata
import importlib.util

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("tunix") is None, reason="NOT RUN: needs the extra tunix"),
    # Of Tunix and its dependencies.
    pytest.mark.filterwarnings("ignore"),
]
FAMILIES = ("qwen3", "qwen3 untied", "qwen2", "qwen2 untied", "llama3", "llama3 untied", "gemma2", "gemma3")
LORA = ".*q_proj|.*gate_proj"


@pytest.fixture
def jaxlogp_tunix():
    from jaxlogp.integrations import tunix

    yield tunix
    tunix.uninstall()


def loss_program(loss):
    """A jitted function from a model to ((loss, metrics), gradient)."""
    from flax import nnx

    def scalar(model):
        out = loss(model)
        if hasattr(out, "primary_loss"):
            return out.primary_loss.compute(), dict(out.aux_metrics)
        return out if isinstance(out, tuple) else (out, {})

    def gradient(model):
        lora = bool(jax.tree.leaves(nnx.state(model, nnx.LoRAParam)))
        wrt = nnx.DiffState(0, nnx.LoRAParam if lora else nnx.Param)
        return nnx.value_and_grad(scalar, argnums=wrt, has_aux=True)(model)

    return nnx.jit(gradient)


def leaves(gradient):
    from flax import nnx

    return [np.asarray(x, np.float64) for x in jax.tree.leaves(nnx.to_pure_dict(gradient))]


def compare(stock, ours, beta=0.0):
    """Losses within 1e-6, gradients within 1e-5 of their norm: fp32 sums in another order.

    A DPO loss -log σ(x), x = `beta` times a difference of two log-probs, is off relative by what x is off: 1e-6 of both.
    """
    ((loss, metrics), gradient), ((our_loss, our_metrics), our_gradient) = stock, ours
    nats = sum(abs(value_of(metrics[f"log_probs/{each}"])) for each in ("chosen", "rejected")) if beta else 0.0
    assert abs(float(our_loss) - float(loss)) <= 1e-6 * (1 + beta * nats) * abs(float(loss))
    for name in {"entropy", "kl", "loss/entropy"} & set(metrics):
        np.testing.assert_allclose(value_of(our_metrics[name]), value_of(metrics[name]), rtol=1e-5, atol=1e-6)
    scale = np.sqrt(sum(np.sum(x**2) for x in leaves(gradient)))
    assert scale > 0.0
    for one, other in zip(leaves(gradient), leaves(our_gradient), strict=True):
        # A leaf whose gradient cancels almost entirely has the rounding of the others.
        assert np.linalg.norm(one - other) <= 1e-5 * max(np.linalg.norm(one), 0.1 * scale)


def value_of(metric):
    return float(metric.compute() if hasattr(metric, "compute") else metric)


def grpo_loss(**options):
    from tunix.rl import algo_core
    from tunix.rl.grpo.grpo_learner import GRPOConfig

    from tests.integrations.tunix_models import rl_example

    config = GRPOConfig(beta=0.04, **options)
    config.temperature = 0.9
    example = rl_example()
    return lambda model: algo_core.grpo_loss_fn(model, example, algo_config=config, pad_id=0, eos_id=1)


def ppo_loss():
    from tunix.rl import algo_core
    from tunix.rl.ppo.ppo_learner import PPOConfig

    from tests.integrations.tunix_models import rl_example

    config = PPOConfig(entropy_coef=0.01)
    example = rl_example()
    example = dataclasses.replace(example, advantages=jnp.broadcast_to(example.advantages[:, None], (4, 12)))
    return lambda model: algo_core.ppo_policy_loss_fn(model, example, config, pad_id=0, eos_id=1)


def supervised_loss():
    from tunix.sft import peft_trainer

    from tests.integrations.tunix_models import full_inputs

    inputs = full_inputs()
    return lambda model: peft_trainer._default_loss_fn(model, **inputs)


BETA = 0.1
"""Tunix' default weight of DPO."""


def preference_loss(algorithm):
    from tunix.sft.dpo import dpo_trainer

    from tests.integrations.tunix_models import full_inputs

    inputs = full_inputs()
    fields = {name: None for name in ("ref_chosen_logps", "ref_rejected_logps")}
    example = dpo_trainer.TrainExample(
        input_ids=inputs["input_tokens"],
        positions=inputs["positions"],
        attention_mask=inputs["attention_mask"],
        completion_mask=inputs["input_mask"][:, 6:],
        logits_to_keep=10,
        **fields,
    )
    return lambda model: dpo_trainer.dpo_loss_fn(model, example, algorithm=algorithm)


def losses():
    return {
        "grpo": grpo_loss(),
        "gspo-token": grpo_loss(loss_algo="gspo-token"),
        "ppo": ppo_loss(),
        "dpo": preference_loss("dpo"),
        "orpo": preference_loss("orpo"),
        "sft": supervised_loss(),
    }


# Every loss with one family, one of each kind with the others.
CASES = [(FAMILIES[0], loss) for loss in ("grpo", "gspo-token", "ppo", "dpo", "orpo", "sft")]
CASES += [(family, loss) for family in FAMILIES[1:] for loss in ("grpo", "dpo", "sft")]


@pytest.mark.parametrize("family, name", CASES)
def test_loss_and_gradient_equal_those_of_tunix(jaxlogp_tunix, family, name):
    from tests.integrations.tunix_models import make_model

    model = make_model(family)
    stock = loss_program(losses()[name])(model)
    jaxlogp_tunix.install()
    # Made anew, because supervised losses are looked up when a trainer is made.
    compare(stock, loss_program(losses()[name])(model), BETA if name == "dpo" else 0.0)
    assert jaxlogp_tunix.report().calls, "the loss did not go through jaxlogp"


def with_lora(model, module_path=LORA):
    import qwix
    from flax import nnx

    provider = qwix.LoraProvider(module_path=module_path, rank=4, alpha=8.0)
    model = qwix.apply_lora_to_model(model, provider, **model.get_model_input(), rngs=nnx.Rngs(7))
    state = nnx.state(model, nnx.LoRAParam)
    keys = iter(jax.random.split(jax.random.key(5), len(jax.tree.leaves(state))))
    # B begins as zeros, where A would have no gradient.
    nnx.update(model, jax.tree.map(lambda x: x + 0.1 * jax.random.normal(next(keys), x.shape, x.dtype), state))
    return model


@pytest.mark.parametrize("name", ["grpo", "dpo", "sft"])
def test_adapters_get_the_same_gradient(jaxlogp_tunix, name):
    from tests.integrations.tunix_models import make_model

    model = with_lora(make_model("qwen3"))
    stock = loss_program(losses()[name])(model)
    jaxlogp_tunix.install()
    compare(stock, loss_program(losses()[name])(model), BETA if name == "dpo" else 0.0)


@pytest.mark.parametrize("family", ["qwen3", "llama3 untied"])
@pytest.mark.parametrize("name", ["grpo", "sft"])
def test_on_a_mesh(jaxlogp_tunix, family, name):
    from tests.integrations.tunix_models import make_model

    model = make_model(family)
    stock = loss_program(losses()[name])(model)
    mesh = two_by_two()
    jaxlogp_tunix.install()
    with mesh:
        sharded = on_mesh(model, mesh)
        compare(stock, loss_program(losses()[name])(sharded))
    ((_, _, _, shards, note, _),) = set(jaxlogp_tunix.report().calls)
    assert (shards, note) == (2, "")


def two_by_two():
    axes = (jax.sharding.AxisType.Auto,) * 2
    return jax.make_mesh((2, 2), ("fsdp", "tp"), axis_types=axes, devices=jax.devices()[:4])


def on_mesh(model, mesh):
    from tunix.rl import reshard

    return reshard.reshard_model_to_mesh(model, mesh)


def test_rows_that_a_mesh_does_not_divide(jaxlogp_tunix):
    from flax import nnx
    from tunix.rl import common

    from tests.integrations.tunix_models import make_model, rl_example

    model, mesh, example = make_model("qwen3"), two_by_two(), rl_example(rows=3)
    tokens = example.prompt_ids, example.completion_ids, 0, 1
    stock = common.compute_per_token_logps(*nnx.split(model), *tokens)
    jaxlogp_tunix.install()
    with mesh:
        ours = common.compute_per_token_logps(*nnx.split(on_mesh(model, mesh)), *tokens)
    np.testing.assert_allclose(ours, stock, atol=2e-5)
    ((_, _, _, _, note, _),) = jaxlogp_tunix.report().calls
    assert note.startswith("3 rows are not divided by 2 ranks")


def test_packed_examples(jaxlogp_tunix):
    from flax import nnx
    from tunix.rl import common

    from tests.integrations.tunix_models import make_model

    model = make_model("qwen3")
    rng = np.random.default_rng(3)
    packed = jnp.asarray(rng.integers(3, 512, (2, 12)).astype(np.int32))
    segments = jnp.asarray([[1] * 5 + [2] * 7, [1] * 12])
    options = {"segment_ids": segments, "segment_positions": jnp.asarray([[*range(5), *range(7)], [*range(12)]])}
    arguments = (*nnx.split(model), jnp.zeros((2, 0), jnp.int32), packed, 0, 1)
    stock = common.compute_per_token_logps(*arguments, **options)
    jaxlogp_tunix.install()
    ours = common.compute_per_token_logps(*arguments, **options)
    assert ours.shape == stock.shape == packed.shape
    np.testing.assert_allclose(ours, stock, atol=2e-5)


def test_a_program_that_was_compiled_before_is_compiled_again(jaxlogp_tunix):
    from tunix.sft.dpo import dpo_trainer

    from tests.integrations.tunix_models import full_inputs, make_model

    model, inputs = make_model("qwen3"), full_inputs()
    arguments = (inputs["input_tokens"], inputs["positions"], inputs["attention_mask"], 10, inputs["input_mask"][:, 6:])
    stock = dpo_trainer.compute_logps(model, *arguments)
    jaxlogp_tunix.install()
    ours = dpo_trainer.compute_logps(model, *arguments)
    assert [call[0] for call in jaxlogp_tunix.report().calls] == ["get_per_token_logps"]
    chex.assert_trees_all_close(ours, stock, rtol=1e-6)
    jaxlogp_tunix.uninstall()
    jaxlogp_tunix.install()
    jaxlogp_tunix.uninstall()
    dpo_trainer.compute_logps(model, *arguments)
    assert not jaxlogp_tunix.report().calls, "after uninstall the stock function runs"


def test_uninstall_restores_everything(jaxlogp_tunix):
    from tunix.rl import common, function_registry
    from tunix.sft import peft_trainer

    from jaxlogp import losses as jaxlogp_losses

    def functions():
        stock = common.compute_per_token_logps, common.get_per_token_logps, peft_trainer._default_loss_fn
        return (*stock, function_registry.get_policy_loss_fn("grpo"))

    before = functions()
    with jaxlogp_tunix.installed(policy_loss=jaxlogp_losses.gspo()):
        assert all(one is not other for one, other in zip(before, functions(), strict=True))
        text = str(jaxlogp_tunix.report())
        assert "replaced: tunix.rl.common.get_per_token_logps" in text and "traced: nothing yet" in text
    assert functions() == before
    assert str(jaxlogp_tunix.report()).endswith(": not installed")


def test_in_bf16_the_log_probs_are_those_of_the_hidden_states(jaxlogp_tunix):
    """Against float64 on the same bf16 hidden states and head; Tunix rounds the logits, up to 32 here, to bf16."""
    from tunix.rl import common

    from jaxlogp.integrations.tunix import head_calls
    from jaxlogp.integrations.tunix.model_head import hidden_and_head
    from tests import oracle
    from tests.integrations.tunix_models import full_inputs, make_model

    model, inputs = make_model("qwen3 bf16"), full_inputs()
    embedding = model.embedder.input_embedding
    embedding[...] = embedding[...] * jnp.bfloat16(60.0)
    hidden, head = hidden_and_head(
        model, inputs["input_tokens"], positions=inputs["positions"], attention_mask=inputs["attention_mask"]
    )
    assert hidden.dtype == head.weight.dtype == jnp.bfloat16
    targets = jnp.roll(inputs["input_tokens"], -1, axis=-1)
    logits = model.embedder.decode(hidden)
    assert 16 < np.max(np.abs(np.asarray(logits, np.float64))) < 32
    exact, _ = oracle.head_log_probs(hidden, head.weight, targets)
    stock = common.selective_log_softmax(logits, targets)
    ours = head_calls.log_probs("this test", hidden, head, targets, "auto").log_probs
    errors = [np.max(np.abs(np.asarray(values, np.float64) - exact)) for values in (stock, ours)]
    print(f"largest error: stock {errors[0]:.2g} nats, jaxlogp {errors[1]:.2g} nats")
    # Half an ulp from 4 to 32 is 2^-7 to 2^-5 in bf16, 2^-22 to 2^-20 in fp32; each logit sums 32 products.
    assert errors[0] > 2.0**-7 and errors[1] < 32 * 2.0**-20


def temporary_bytes(model, loss):
    """Bytes of temporaries per device of the compiled loss and gradient."""
    return loss_program(loss).lower(model).compile().compiled.memory_analysis().temp_size_in_bytes


@pytest.fixture
def optimized():
    """Compiled as users compile; tests after this one cheaply again."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.mark.parametrize("meshed", [False, True])
def test_temporary_memory(jaxlogp_tunix, meshed, optimized):
    """At least 4 times less for a vocabulary of 32768: stock keeps several arrays of [rows, tokens, vocabulary]."""
    from tunix.rl import algo_core
    from tunix.rl.grpo.grpo_learner import GRPOConfig

    from tests.integrations.tunix_models import make_model, rl_example

    config = GRPOConfig(beta=0.04)
    config.temperature = 1.0
    vocab = 32768
    example = rl_example(rows=4, prompt=16, completion=112, vocab=vocab)
    loss = lambda model: algo_core.grpo_loss_fn(model, example, algo_config=config, pad_id=0, eos_id=1)  # noqa: E731
    model, mesh = make_model("qwen3", vocab), two_by_two()
    if meshed:
        model = on_mesh(model, mesh)
        rows = NamedSharding(mesh, PartitionSpec("fsdp"))
        example = jax.tree.map(lambda x: jax.device_put(x, rows), example)
    with mesh if meshed else jax.default_device(jax.devices()[0]):
        stock = temporary_bytes(model, loss)
        jaxlogp_tunix.install()
        ours = temporary_bytes(model, loss)
    print(f"temporaries per device: stock {stock / 2**20:.1f} MiB, jaxlogp {ours / 2**20:.1f} MiB")
    assert 4 * ours <= stock


@pytest.mark.parametrize("preset", ["grpo", "grpo_paper", "gspo", "dr_grpo"])
def test_policy_losses_equal_those_of_the_library(jaxlogp_tunix, preset):
    """Against `policy_loss` on log-probs that Tunix itself computes."""
    from flax import nnx
    from tunix.rl import common
    from tunix.rl.grpo.grpo_learner import GRPOConfig

    from jaxlogp import losses as jaxlogp_losses
    from jaxlogp import policy_loss
    from tests.integrations.tunix_models import make_model, rl_example

    loss = getattr(jaxlogp_losses, preset)(**({"length": 12} if preset == "dr_grpo" else {}))
    model, example, config = make_model("qwen3"), rl_example(), GRPOConfig(beta=0.04)
    config.temperature = 0.9

    def expected(model):
        tokens = example.prompt_ids, example.completion_ids, 0, 1
        values = common.compute_per_token_logps(*nnx.split(model), *tokens, stop_gradient=False, temperature=0.9)
        arguments = example.old_per_token_logps, example.advantages, example.completion_mask != 0
        with_kl = dataclasses.replace(loss, kl_coefficient=0.04)
        return policy_loss(values, *arguments, loss=with_kl, ref_log_probs=example.ref_per_token_logps).mean()

    stock = loss_program(expected)(model)
    function = jaxlogp_tunix.policy_loss_fn(loss)
    ours = loss_program(lambda m: function(m, example, algo_config=config, pad_id=0, eos_id=1))(model)
    compare(stock, ours)
    assert {"kl", "pg_clipfrac", "entropy"} <= set(ours[0][1])


def test_the_newer_version_gets_sums_and_counts(jaxlogp_tunix, monkeypatch):
    """Tunix 0.1.8 adds these over micro-batches and divides once; 0.1.7 has no such classes."""
    from tunix.rl.grpo.grpo_learner import GRPOConfig
    from tunix.sft import utils

    from jaxlogp import losses as jaxlogp_losses
    from tests.integrations.tunix_models import make_model, rl_example

    monkeypatch.setattr(
        utils, "WeightedMetric", collections.namedtuple("WeightedMetric", "sum count eps"), raising=False
    )
    monkeypatch.setattr(
        utils, "LossOutput", collections.namedtuple("LossOutput", "primary_loss aux_metrics"), raising=False
    )
    config = GRPOConfig(beta=0.0)
    config.temperature = 1.0
    function, model, example = jaxlogp_tunix.policy_loss_fn(jaxlogp_losses.grpo()), make_model("qwen3"), rl_example()
    first, rest = jax.tree.map(lambda x: x[:1], example), jax.tree.map(lambda x: x[1:], example)

    def primary(rows):
        return function(model, rows, algo_config=config, pad_id=0, eos_id=1).primary_loss

    whole, *parts = map(primary, (example, first, rest))
    assert int(whole.count) == int(jnp.sum(example.completion_mask)) == sum(int(part.count) for part in parts)
    np.testing.assert_allclose(sum(part.sum for part in parts), whole.sum, rtol=1e-5)
    assert int(parts[0].count) != int(parts[1].count)


REFUSED = {
    "LoRA on the head": "lm_head: expected a",
    "a quantized head": "lm_head.w: expected an array",
    "a head that is not known": "model: expected lm_head or embedder.input_embedding",
    "logits": "logits: expected only their entropy",
    "epsilon": "epsilon: expected Tunix's default 0.2",
    "loss_algo": "loss_algo: expected Tunix's default 'grpo'",
    "beta": "beta: expected 0 or the loss's",
    "grad_divisor": "loss.grad_divisor: expected None",
}


def refusals():
    from flax import nnx
    from tunix.rl import common
    from tunix.rl.grpo.grpo_learner import GRPOConfig

    from tests.integrations.tunix_models import make_model, rl_example

    example = rl_example()

    def log_probs(model):
        return common.compute_per_token_logps(*nnx.split(model), example.prompt_ids, example.completion_ids, 0, 1)

    def policy(**options):
        from jaxlogp import losses as jaxlogp_losses
        from jaxlogp.integrations import tunix

        loss = jaxlogp_losses.grpo(**options.pop("loss", {}))
        config = GRPOConfig(**options)
        config.temperature = 1.0
        return tunix.policy_loss_fn(loss)(make_model("qwen3"), example, algo_config=config, pad_id=0, eos_id=1)

    def headless():
        model = make_model("qwen3")
        del model.embedder.input_embedding
        return log_probs(model)

    def quantized():
        import qwix

        provider = qwix.PtqProvider([qwix.QuantizationRule(module_path=".*lm_head", weight_qtype=jnp.int8)])
        model = make_model("qwen3 untied")
        return log_probs(qwix.quantize_model(model, provider, **model.get_model_input()))

    def logits():
        arguments = (example.prompt_ids, example.completion_ids, 0, 1)
        _, logits = common.compute_per_token_logps(*nnx.split(make_model("qwen3")), *arguments, return_logits=True)
        return jnp.max(logits)

    return {
        "LoRA on the head": lambda: log_probs(with_lora(make_model("qwen3 untied"), ".*lm_head")),
        "a quantized head": quantized,
        "a head that is not known": headless,
        "logits": logits,
        "epsilon": lambda: policy(epsilon=0.1),
        "loss_algo": lambda: policy(loss_algo="gspo-token"),
        "beta": lambda: policy(beta=0.1, loss={"kl_coefficient": 0.2}),
        "grad_divisor": lambda: policy(loss={"grad_divisor": 2.0}),
    }


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(jaxlogp_tunix, name):
    jaxlogp_tunix.install()
    calls = refusals()
    assert calls.keys() == REFUSED.keys()
    with pytest.raises(ValueError, match=REFUSED[name]):
        calls[name]()


def test_a_refused_installation_replaces_nothing(jaxlogp_tunix):
    from jaxlogp import losses as jaxlogp_losses

    with pytest.raises(ValueError, match="loss.grad_divisor: expected None"):
        jaxlogp_tunix.install(policy_loss=jaxlogp_losses.grpo(grad_divisor=2.0))
    assert not jaxlogp_tunix.report().replaced


def test_installation_is_refused(jaxlogp_tunix, monkeypatch):
    with pytest.raises(ValueError, match="engine: expected"):
        jaxlogp_tunix.install(engine="fast")
    with pytest.raises(ValueError, match="policy_loss: expected a loss of jaxlogp.losses"):
        jaxlogp_tunix.install(policy_loss="gspo")
    jaxlogp_tunix.install()
    with pytest.raises(ValueError, match="one installation at a time"):
        jaxlogp_tunix.install()
    jaxlogp_tunix.uninstall()
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.2.0")
    with pytest.raises(ValueError, match="google-tunix: expected version 0.1.7 or 0.1.8, got 0.2.0"):
        jaxlogp_tunix.install()
