"""The trainer end to end on tiny runs: first step, meshes, resume, schedule, the run folder, and the command lines."""

import json
import os
import signal

import jax
import pytest

from experiments import evaluate, grpo
from experiments.config import Config
from experiments.experience.worked_examples import WorkedExamples
from experiments.loop import plan
from experiments.loop.resume import resume
from experiments.loop.run import set_up, train
from experiments.runs.config_file import load_config
from experiments.runs.ends import Interrupted
from experiments.runs.lock import RunLock
from tests.experiments.lines import write
from tests.experiments.tiny import assert_same_state, refusal, tiny, train_records

# Metrics that are times or depend on the number of data ranks, not on the numbers of the run.
TIMES = {"data_wait_seconds", "rollout_seconds", "step_seconds", "tokens_per_second", "time"}
# fp32: sampler (one token a row, cache) and trainer (packed rows) order a few hundred additions differently.
DRIFT = 2e-5


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def plain(runs):
    """Four steps on one device, and the numbers that other runs must reproduce."""
    return train(tiny(runs, "plain", schedule={"steps": 4}))


def without_times(record):
    return {name: value for name, value in record.items() if name not in TIMES and name != "seconds"}


def test_the_first_step_is_on_policy(plain):
    first = train_records(plain)[0]
    assert abs(first["computed/ratio_new_old"] - 1.0) <= DRIFT
    assert 0.0 <= first["computed/kl_new_old"] <= DRIFT**2
    assert first["computed/clipped_ratio_fraction"] == 0.0
    assert first["staleness_max"] == 0.0
    # Without a right and a wrong completion in one group there would be nothing to learn, and nothing to compare.
    assert 0.0 < first["reward_mean"] < 1.0 and first["max_advantage"] > 0.0 > first["min_advantage"]


def test_every_step_logs_drift_head_and_counts(plain):
    for step, record in enumerate(train_records(plain), start=1):
        assert 0.0 < record["computed/drift_max"] <= DRIFT
        assert (record["head_path"], record["head_engine"]) == ("linear_policy_loss", "chunked")
        assert record["head_reason"].startswith("auto; hopper not used: ")
        assert record["head_gradient"] == "in one pass"
        assert record["num_documents"] == 64 and record["documents_seen"] == 64 * step
        assert record["num_tokens"] > 64 and record["tokens"] > record["num_tokens"]
        assert record["update_applied"] == 1


def test_the_run_folder_is_complete(plain):
    run = plain.run
    for path in (run.config, run.env, run.metrics, run.samples, run.summary, run.curves):
        assert path.stat().st_size > 0, path
    assert any(run.tensorboard.rglob("events*"))
    summary = json.loads(run.summary.read_text())
    assert summary["after"]["sampled"] == plain.after.sampled
    assert summary["dtype"] == "float32 (auto: cpu, not a GPU)"
    assert {record["kind"] for record in plain.metrics} == {"warm_start", "warm_start_eval", "eval", "train"}
    assert not run.warm_start.exists()


def test_a_result_is_shown_in_a_few_lines(plain):
    before, after = plain.before, plain.after
    assert str(plain) == repr(plain)
    assert str(plain).splitlines() == [
        f"run folder: {plain.run.path}",
        "optimizer steps: 4",
        f"held-out exact match (temperature 1): {before.sampled:.2f} -> {after.sampled:.2f}",
        f"held-out exact match (greedy): {before.greedy:.2f} -> {after.greedy:.2f}",
        f"seconds: {plain.seconds:.1f}",
    ]


def test_resume_equals_the_run_without_a_break(plain, runs, monkeypatch):
    """Stopped in the warm start, and after two steps of the training."""
    plain_next = WorkedExamples.next

    def stop(examples, policy):
        if examples.state()["prompts"] == 4 * plain.setup.config.warm_start.batch_size:
            os.kill(os.getpid(), signal.SIGTERM)
        return plain_next(examples, policy)

    with monkeypatch.context() as patched, pytest.raises(Interrupted, match="step 5 of the warm start is saved; "):
        patched.setattr(WorkedExamples, "next", stop)
        train(tiny(runs, "broken", schedule={"steps": 2}))
    with pytest.raises(ValueError, match="^--resume: expected .*, which has no step of its training yet, got @5$"):
        resume(f"{runs / 'broken'}@5", {"quiet": True})
    halfway = resume(str(runs / "broken"), {"quiet": True})
    resumed = resume(str(runs / "broken"), {"schedule.steps": 4, "quiet": True})
    assert [*map(without_times, resumed.metrics[:12])] == [*map(without_times, plain.metrics[:12])]
    assert_same_state(resumed, plain)
    for mine, whole in zip(train_records(resumed), train_records(plain), strict=True):
        assert without_times(mine) == without_times(whole)
    # An older step, while the run is being written.
    with RunLock(resumed.run.lock):
        assert evaluate.run_cli([f"{resumed.run.path}@2"]) == halfway.after


@pytest.mark.slow
def test_resume_in_the_middle_of_a_rollout(runs):
    """Half a rollout per step: queued documents, which are off-policy in the second half, belong to the checkpoint."""
    schedule = {"steps": 3, "docs_per_step": 32, "rows": 4}
    options = {"drift": {"every": 2}, "rollout": {"rescore": False}, "checkpoint": {"every": 1, "keep": 4}}
    whole = train(tiny(runs, "half", schedule=schedule, **options))
    resumed = resume(f"{whole.run.path}@1", {"quiet": True})
    assert_same_state(resumed, whole)
    drifts = [[without_times(each) for each in run.metrics if each["kind"] == "drift"] for run in (whole, resumed)]
    assert drifts[0] == drifts[1] and [each["step"] for each in drifts[0]] == [1, 3]
    second = train_records(whole)[1]
    assert second["staleness_max"] > 0 and second["computed/ratio_new_old"] != 1.0
    assert second["computed/drift_max"] is None, "under which parameters nobody has scored"


@pytest.mark.slow
def test_documents_per_step_may_take_any_number_of_micro_batches_and_one_compilation(runs):
    result = train(tiny(runs, "many", schedule={"steps": 2, "rows": 3}))
    records = train_records(result)
    assert all(record["micro_batches"] > 3 and record["num_documents"] >= 64 for record in records)
    assert result.setup.learner.gradients.num_compilations == 1


@pytest.mark.slow
def test_the_data_ends_with_a_partial_step_and_its_true_counts(runs, tmp_path):
    questions = write(tmp_path / "a", *({"prompt": f"{a}{b}=", "answer": str(b)} for a in range(5) for b in range(10)))
    # Micro-batches of at most 10 documents, so that a step ends close to its target and the last one falls short of it.
    schedule = {"steps": 50, "epochs": 1, "docs_per_step": 100, "rows": 2, "row_length": 32}
    result = train(tiny(runs, "ending", task=f"jsonl:{questions}", schedule=schedule))
    records = train_records(result)
    documents = 4 * result.setup.task.num_examples("train")
    assert sum(record["num_documents"] for record in records) == documents == records[-1]["documents_seen"]
    assert len(records) < 50 and 0 < records[-1]["num_documents"] < 100


def test_evaluate_reproduces_the_final_scores(plain, capsys):
    scores = evaluate.run_cli([str(plain.run.path)])
    assert scores == plain.after
    assert "held-out exact match (greedy)" in capsys.readouterr().out
    asked = evaluate.EvaluateConfig(str(plain.run.path), num_prompts=2, samples=3)
    assert evaluate.load(asked).inference.evaluation.shape[:3:2] == (2, 4), (
        "prompts, and with the greedy one completions"
    )


def test_a_second_resume_ends_with_one_sentence(plain, capsys):
    before = plain.run.metrics.read_bytes()
    with RunLock(plain.run.lock):
        line = refusal(capsys, grpo, ["--resume", str(plain.run.path), "--schedule.steps", "9", "--quiet"])
    assert "in use by process " in line
    assert plain.run.metrics.read_bytes() == before and load_config(plain.run.config, Config).schedule.steps == 4


@pytest.mark.parametrize(
    "engine, wanted", [("abacus", "'auto', one of .*, got 'abacus'"), ("hopper", "an engine that can run here, got ")]
)
def test_an_engine_that_cannot_run_here_is_refused_before_there_is_a_folder(engine, wanted, tmp_path):
    # Everything else that is refused is in test_wrong_inputs.py; this takes a trainer.
    with pytest.raises(ValueError, match=f"^--loss.engine: expected {wanted}"):
        set_up(tiny(tmp_path, "refused", loss={"engine": engine}))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("backend, dtype", [("cpu", "float32"), ("gpu", "bfloat16")])
def test_the_dtype_follows_the_device_and_is_kept(tmp_path, monkeypatch, backend, dtype):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setattr(plan, "say_memory", lambda *given: None)
    run = set_up(tiny(tmp_path, backend))
    assert run.setup.config.model.dtype == dtype
    assert load_config(run.folder.config, Config).model.dtype == dtype
