"""Options of the trainer in short runs, and its warnings at the start."""

import importlib.util
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import Config, train
from experiments.config import LossConfig, ModelConfig
from experiments.experience.prompts import length_limits
from experiments.loop import assemble as assemble_module
from experiments.loop.assemble import slower_head
from experiments.loop.loop import take_step
from experiments.loop.resume import resume
from experiments.loop.run import set_up
from experiments.loop.run_parts import UserParts
from experiments.models.decoder_config import DecoderConfig
from experiments.models.mesh import MeshSpec
from experiments.models.named_shapes import NAMED_SHAPES
from experiments.models.tokenizer import tokenizer_for
from experiments.sampling import sample_token
from experiments.tasks import Example, make_task
from jaxlogp.head import ChunkedEngine, HeadRun, registry
from jaxlogp.policy.algorithms import ALGORITHMS
from tests.experiments.tiny import TINY, assert_same_state, parity, tiny, train_records

SHORT = {"max_steps": 0}
# As in test_grpo.py: fp32, sums in another order.
DRIFT = 2e-5


def short(out, name, **changes):
    return tiny(out, name, warm_start=SHORT, **changes)


@pytest.mark.slow
def test_nothing_is_compiled_after_the_second_step(tmp_path, caplog):
    setup = set_up(short(tmp_path, "steady", drift={"every": 1}), UserParts(reward=parity)).setup
    feed = setup.feed()

    def compiled_by(work):
        caplog.clear()
        with jax.log_compiles():
            work()
        return [each.getMessage()[:80] for each in caplog.records if "Compiling" in each.getMessage()]

    assert compiled_by(lambda: jax.jit(lambda x: 3 * x)(np.ones(2))), "the log says what is compiled"
    compiled = [compiled_by(lambda: take_step(setup, feed, report_drift=True)) for _ in range(4)]
    ahead = [each for each in compiled[0] if "_of_micro_batch" in each or "_applied" in each]
    assert ahead == [], "compiled before the first step, for its memory"
    assert compiled[2:] == [[], []]


@pytest.mark.slow
def test_few_rows_at_a_time_make_the_same_rollouts_and_evaluations(tmp_path):
    def drawn(rows):
        options = {"rollout": {"rows": rows, "max_new_tokens": 6}, "mesh": "data=2", "schedule": {"steps": 1}}
        result = train(short(tmp_path, str(rows), **options), reward=parity)
        before, step, _ = result.metrics
        (record,) = train_records(result)
        assert step is record and record["num_documents"] == 64 and 64 < record["num_tokens"] < 64 * 6
        return record["num_tokens"], record["reward_mean"], {**before, "seconds": None}

    assert drawn(None) == drawn(3)


@pytest.mark.slow
def test_a_whole_rollout_makes_a_step_and_metrics_may_be_off(tmp_path):
    schedule = {"steps": 2, "docs_per_step": 0, "rows": 4}
    result = train(short(tmp_path, "none", schedule=schedule, loss={"metrics": "none"}), reward=parity)
    for record in train_records(result):
        assert record["num_documents"] == 64 and record["micro_batches"] > 2
        assert "computed/entropy" not in record and "computed/ratio_new_old" not in record
        assert record["update_applied"] == 1 and record["loss"] != 0.0
    assert not result.setup.config.rollout.rescore, "every step is on policy"


@pytest.mark.costly
def test_rescored_log_probs_are_the_trainers(tmp_path):
    """Half a rollout a step: the first half is strictly on policy, the second is not."""
    schedule = {"steps": 2, "docs_per_step": 32, "rows": 4}
    scored = train(short(tmp_path, "rescored", schedule=schedule, drift={"every": 1}), reward=parity)
    assert scored.setup.config.rollout.rescore, "two steps for each rollout"
    first, second = train_records(scored)
    assert first["computed/ratio_new_old"] == 1.0 and first["computed/kl_new_old"] == 0.0 and first["loss"] != 0.0
    # The sampler's log-probs stay for the drift, which is no larger once the policy has moved.
    assert 0.0 < first["computed/drift_max"] <= DRIFT and 0.0 < second["computed/drift_max"] <= DRIFT
    drifts = [record for record in scored.metrics if record["kind"] == "drift"]
    assert [record["step"] for record in drifts] == [1, 2]
    for record, wanted in zip(drifts, (first, second), strict=True):
        assert (record["max"], record["tokens"]) == (wanted["computed/drift_max"], wanted["computed/num_tokens"])
        assert 0.0 <= record["p50"] <= record["p90"] <= record["p99"] <= record["p99_9"] <= record["max"]


@pytest.mark.slow
def test_a_gradient_filter_reaches_the_head(tmp_path):
    config = short(tmp_path, "filtered", loss={"gradient_filter": 2.0**-16}, mesh="tensor=2")
    run = assemble_module.assemble(config).learner.gradients.head_run
    assert run.engine == "chunked" and run.reason.startswith("first of the sequence that can; hopper not used: ")
    assert run.gradient == "in two steps: its gradient filter needs the maxima of all tiles first"


@pytest.mark.costly
@pytest.mark.parametrize("invariant", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_reference_is_frozen_and_survives_a_resume(tmp_path, invariant):
    loss = {"kl_coefficient": 0.5, "metrics": "basic"}
    options = {"loss": loss, "invariant": invariant, "evaluation": {"kl": True}, "checkpoint": {"every": 1}}
    schedule = {"row_length": None} if invariant else {}
    whole = train(short(tmp_path, "whole", schedule={"steps": 2, **schedule}, **options), reward=parity)
    resumed = resume(f"{whole.run.path}@1", {"quiet": True}, reward=parity)
    assert_same_state(resumed, whole)
    reference = whole.setup.learner.reference
    jax.tree.map(np.testing.assert_array_equal, resumed.setup.learner.reference, reference)
    assert any(jax.tree.leaves(jax.tree.map(lambda x, y: (x != y).any(), reference, whole.params)))
    distances = [[each["kl_reference"] for each in run.metrics if each["kind"] == "eval"] for run in (whole, resumed)]
    assert distances[0][0] == 0.0 < distances[0][-1] == distances[1][-1] < 1.0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adafactor", "muon"])
def test_a_resume_takes_over_every_optimizers_state_and_the_exact_copy_of_bf16_parameters(tmp_path, name):
    """On two tensor ranks, with gradient sums in bf16 too, and Muon's moments."""
    moment = "bfloat16" if name == "muon" else "float32"
    options = {
        "optimizer": {"name": name, "first_moment_dtype": moment},
        "model": {"param_dtype": "bfloat16"},
        "mesh": "tensor=2",
    }
    schedule = {"steps": 2, "accumulate": "bfloat16", "rows": 4}
    config = short(tmp_path, "whole", schedule=schedule, checkpoint={"every": 1}, **options)
    whole = train(config, reward=parity)
    resumed = resume(f"{whole.run.path}@1", {"quiet": True}, reward=parity)
    assert_same_state(resumed, whole)
    state = whole.setup.learner.state
    assert int(state.opt_state.count) == 2
    assert any(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(state.opt_state)) == (moment == "bfloat16")
    for stored, exact in zip(*map(jax.tree.leaves, (state.params, state.opt_state.exact)), strict=True):
        assert stored.dtype == jnp.bfloat16 and exact.dtype == jnp.float32
        assert stored.sharding.is_equivalent_to(exact.sharding, stored.ndim)
        np.testing.assert_array_equal(stored, exact.astype(jnp.bfloat16))
    assert [record["learning_rate"] for record in train_records(whole)] == [np.float32(5e-4), np.float32(1e-3)]


@dataclass(frozen=True)
class Spy(ChunkedEngine):
    """The portable engine, with a note of every call that it was asked about."""

    name = "spy"
    seen = []  # noqa: RUF012

    def why_not(self, call):
        self.seen.append((str(call.hidden.dtype), str(call.weight.dtype), call.spec.fp32_head, call.num_shards))
        return super().why_not(call)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["auto", "chunked", "reference", "spy"])
def test_the_fp32_head_reaches_every_engine_with_the_operands_own_dtypes(tmp_path, monkeypatch, engine):
    """An engine for bf16 operands must see them as they are: a mesh axis of size 1 is no reason to widen them."""
    monkeypatch.setitem(registry.ENGINES, "spy", Spy())
    Spy.seen.clear()
    model = {"dtype": "bfloat16", "fp32_head": True}
    loss = {"engine": engine, "skip_zero_advantages": False}
    run = set_up(short(tmp_path, engine, model=model, loss=loss, schedule={"steps": 1}))
    assert run.setup.learner.gradients.head_run.engine == {"auto": "chunked"}.get(engine, engine)
    if engine == "spy":
        assert set(Spy.seen) == {("bfloat16", "bfloat16", True, 1)}
        # Sampler and trainer share the products, so drift is what other shapes of bf16 bodies make it.
        record = take_step(run.setup, run.setup.feed())[0].metrics
        assert record["head_engine"] == "spy" and 0.0 < record["drift_max"] < 0.1


def test_the_invariant_sampler_draws_from_the_head_that_the_trainer_scores(tmp_path, monkeypatch):
    specs, plain = [], sample_token.logits_of
    monkeypatch.setattr(sample_token, "logits_of", lambda *operands: specs.append(operands[1]) or plain(*operands))
    shape = DecoderConfig(24, 32, 64, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=16, logit_softcap=5.0)
    monkeypatch.setitem(NAMED_SHAPES, "capped", shape)
    model = ModelConfig(name="capped", fp32_head=True)
    options = {"schedule": {"steps": 0, "row_length": None}, "rollout": {"temperature": 0.8}}
    setup = set_up(short(tmp_path, "draws", invariant=True, model=model, **options)).setup
    setup.source.next(setup.policy())
    assert specs and all((s.fp32_head, s.softcap, s.temperature) == (True, 5.0, 0.8) for s in specs)


def test_a_slower_head_on_a_gpu_is_said_with_what_to_do(monkeypatch):
    slow = HeadRun("linear_policy_loss", "chunked", "auto; hopper not used: JAX 0.10.2 is older than 0.11", 1)
    assert slower_head(slow, "float32") is None, "nothing is faster on a CPU"
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")

    def advice(capability, version, dtype):
        monkeypatch.setattr(assemble_module, "capability_of", lambda device: capability)
        monkeypatch.setattr(jax, "__version_info__", version)
        text = slower_head(slow, dtype)
        assert "hopper not used: JAX 0.10.2" in text and "\n" not in text
        return text.partition("; try ")[2]

    both = "JAX 0.11 or newer (Python 3.12 or newer) and --model.dtype bfloat16"
    assert advice((9, 0), (0, 10, 2), "float32") == both
    assert advice((9, 0), (0, 11, 2), "bfloat16") == "", "both hold: the reason is another"
    assert advice((8, 0), (0, 10, 2), "bfloat16") == 'pip install -e ".[triton]"'
    filtered = replace(slow, reason=slow.reason.replace("auto", "first of the sequence that can"))
    assert slower_head(filtered, "bfloat16").endswith("older than 0.11; try a run without --loss.gradient-filter")
    assert slower_head(replace(slow, engine="hopper"), "float32") is None
    assert slower_head(replace(slow, reason="named by the caller"), "float32") is None


def test_rows_that_are_not_given_cut_a_step_into_equal_micro_batches():
    config, task = Config(), make_task("addition")
    tokenizer = tokenizer_for(task.alphabet)
    sizes = length_limits(task, tokenizer, config.rollout, config.schedule, mesh=MeshSpec())
    # 512 documents of at most 11 tokens: six micro-batches of 86 rows, four rows too many.
    assert (sizes.row, sizes.rows) == (11, 86)
    assert length_limits(task, tokenizer, config.rollout, config.schedule, mesh=MeshSpec(data=4)).rows == 64
    assert length_limits(task, tokenizer, config.rollout, config.schedule, mesh=MeshSpec(), leaf_rows=8).rows == 8
    whole = replace(config.schedule, docs_per_step=0)
    rollout = replace(config.rollout, prompts_per_rollout=10, num_generations=10)
    assert length_limits(task, tokenizer, rollout, whole, mesh=MeshSpec()).rows == 50


@pytest.mark.costly
def test_the_example_of_a_reward_of_ones_own(tmp_path):
    path = Path(__file__).parents[2] / "examples" / "own_reward.py"
    code = [line for line in path.read_text().split('"""', 2)[2].splitlines() if line.strip()]
    assert len(code) <= 15
    spec = importlib.util.spec_from_file_location("own_reward", path)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    assert [example.reward(Example("1+1=", "12"), text) for text in ("12", "32", "1", "")] == [1.0, 0.5, 0.0, 0.0]
    (record,) = train_records(train(short(tmp_path, "own", schedule={"steps": 1}), reward=example.reward))
    assert record["reward_max"] in (0.0, 0.5, 1.0) and record["num_rewards"] == 64
    assert record["reward/reward"] == record["reward_mean"], "multiples of a half: sums are exact"
    assert 0.0 <= record["truncated_share"] == record["truncated_completions"] / 64 <= 1.0


def test_every_algorithm_is_reachable_by_its_name():
    for name, algorithm in ALGORITHMS.items():
        assert LossConfig(name=name).policy_loss(4).name == algorithm.loss.__name__
        assert Config(loss=LossConfig(name=name)).resolved().loss.advantages == algorithm.advantages
    assert TINY.loss == LossConfig()
