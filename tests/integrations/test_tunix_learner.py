"""Whole runs of Tunix's GRPOLearner, with its own log-probs and with those of jaxlogp."""

import importlib.util
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("tunix") is None, reason="NOT RUN: needs the extra tunix"),
    pytest.mark.filterwarnings("ignore"),
]
METRICS = ("kl_loss", "kl", "entropy", "is_ratio/mean", "is_ratio/max")


def distinct_words(prompts, completions, **kwargs):
    return [float(len(set(text.split()))) - 4.0 for text in completions]


def train(updates=6):
    """Metrics of every update, first and last parameters: three steps of two iterations on a small Qwen3."""
    import grain.python as grain
    import optax
    from flax import nnx
    from tunix.rl import rl_cluster
    from tunix.rl.grpo import grpo_learner
    from tunix.rl.rollout import base_rollout
    from tunix.tests import test_common

    from tests.integrations.tunix_models import make_model

    class Prompts(grain.RandomAccessDataSource):
        rows = ["input string", "hello world", "My name", "hello there"] * updates

        def __getitem__(self, index):
            return self.rows[index]

        def __len__(self):
            return len(self.rows)

    tokenizer = test_common.MockVocab()
    mesh = jax.make_mesh(
        (1, 1), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2, devices=jax.devices()[:1]
    )
    with mesh:
        actor, reference = (make_model("qwen3", tokenizer.GetPieceSize()) for _ in range(2))
        role = rl_cluster.Role
        config = rl_cluster.ClusterConfig(
            role_to_mesh={role.ACTOR: mesh, role.REFERENCE: mesh, role.ROLLOUT: mesh},
            rollout_engine="vanilla",
            offload_to_cpu=False,
            training_config=rl_cluster.RLTrainingConfig(
                actor_optimizer=optax.sgd(0.05), eval_every_n_steps=100, max_steps=updates
            ),
            rollout_config=base_rollout.RolloutConfig(
                max_tokens_to_generate=8,
                max_prompt_length=8,
                kv_cache_size=32,
                temperature=0.9,
                top_p=1.0,
                top_k=None,
                seed=0,
                return_logprobs=True,
            ),
        )
        engine = getattr(rl_cluster, "RLCluster", None) or rl_cluster.RLEngine
        cluster = engine(actor=actor, reference=reference, tokenizer=tokenizer, cluster_config=config)
        names = inspect.signature(grpo_learner.GRPOLearner.__init__).parameters
        learner = grpo_learner.GRPOLearner(
            **{"rl_cluster" if "rl_cluster" in names else "rl_engine": cluster},
            reward_fns=distinct_words,
            algo_config=grpo_learner.GRPOConfig(num_generations=4, num_iterations=2, beta=0.04),
        )
        log = record_metrics(cluster.actor_trainer)
        prompts = grain.MapDataset.source(Prompts()).batch(2).map(lambda rows: {"prompts": rows, "answer": rows})
        learner.train(prompts)
    first, last = (jax.tree.leaves(nnx.state(model, nnx.Param)) for model in (reference, cluster.actor_trainer.model))
    return log, first, last


def distance(one, other):
    """The largest difference of any parameter."""
    return max(float(jnp.max(jnp.abs(x - y))) for x, y in zip(one, other, strict=True))


def record_metrics(trainer):
    """Returns a list that gets the metrics of every update."""
    log, inner = [], trainer._post_process_train_step

    def record(aux):
        metrics = getattr(aux, "aux_metrics", aux)
        values = {name: metrics[name] for name in METRICS}
        log.append({name: float(x.compute() if hasattr(x, "compute") else x) for name, x in values.items()})
        return inner(aux)

    trainer._post_process_train_step = record
    return log


def test_six_updates_have_the_metrics_of_tunix():
    from jaxlogp.integrations import tunix as jaxlogp_tunix

    stock, start, stock_parameters = train()
    with jaxlogp_tunix.installed():
        ours, _, parameters = train()
        callers, engines = zip(*[call[:2] for call in jaxlogp_tunix.report().calls], strict=True)
    assert set(callers) == {"compute_per_token_logps"} and set(engines) == {"chunked"}
    assert len(stock) == len(ours) == 6
    for one, other in zip(stock, ours, strict=True):
        for name in METRICS:
            np.testing.assert_allclose(other[name], one[name], rtol=1e-4, atol=1e-5, err_msg=name)
    moved, apart = (distance(one, stock_parameters) for one in (start, parameters))
    assert moved > 1e-3 and apart < 1e-3 * moved
