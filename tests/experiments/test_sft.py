"""Supervised runs: the loss of a step, held-out loss, resumes, adapters of a model from disk, and what is refused."""

import json
import shutil

import jax
import numpy as np
import pytest
from flax import nnx

from experiments import Config, chat, evaluate, export, resume, sft, train
from experiments.config import (
    CheckpointConfig,
    EvaluationConfig,
    LossConfig,
    ModelConfig,
    RolloutConfig,
    ScheduleConfig,
)
from experiments.experience.order import EpochOrder
from experiments.loop.assemble import assemble
from experiments.loop.load import load_model
from experiments.loop.loop import take_step
from experiments.loop.supervised import SupervisedFile
from experiments.models.lora import LoraConfig
from experiments.models.tokenizer import ByteTokenizer
from tests.experiments.tiny import TINY, assert_same_state, refusal, train_records
from tests.experiments.tiny_directory import write_tiny_directory

DOCUMENTS = 12


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """Sums of two digits, completions of different lengths."""
    path = tmp_path_factory.mktemp("data") / "sums.jsonl"
    lines = ({"prompt": f"{a}+{b}=", "completion": str(a + b) * (1 + a % 3)} for a in range(10) for b in range(10))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def options(out, name, path, *, rows=4, **changes):
    given = {
        "schedule": ScheduleConfig(steps=3, docs_per_step=DOCUMENTS, rows=rows, row_length=24),
        "evaluation": EvaluationConfig(every=0),
        "checkpoint": CheckpointConfig(every=1, keep=5),
        "model": TINY.model,
        "quiet": True,
    }
    return Config(task=f"sft:{path}", out=str(out), name=name, **{**given, **changes})


@pytest.fixture(scope="module")
def whole(tmp_path_factory, path):
    return train(options(tmp_path_factory.mktemp("runs"), "whole", path))


def cross_entropy(setup, params, documents):
    """-Σ log p of the labels in float64, from hidden states of single documents; and the number of labels."""
    model = nnx.merge(setup.model.graph(setup.mesh), params)
    weight, length = np.asarray(model.head()[1], np.float64), max(each.tokens.size for each in documents)
    rows = np.stack([np.pad(each.tokens, (0, length - each.tokens.size)) for each in documents])
    places = np.broadcast_to(np.arange(length, dtype=np.int32), rows.shape)
    hidden = np.asarray(jax.jit(lambda model: model.hidden_states(rows, places, places * 0))(model), np.float64)
    logits = hidden @ weight.T
    logits -= logits.max(axis=-1, keepdims=True)
    log_probs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    labels = [(row, at, token) for row, each in enumerate(documents) for at, token in labels_of(each)]
    return -sum(log_probs[row, at - 1, token] for row, at, token in labels), len(labels)


def labels_of(document):
    return [(at, document.tokens[at]) for at in np.flatnonzero(document.labels)]


def test_the_loss_of_a_step_is_the_cross_entropy_of_all_its_labels_however_it_is_split(whole, tmp_path, path):
    setup = whole.setup
    other = assemble(options(tmp_path, "x", path, rows=1, mesh="data=2"))
    # The step takes over the memory of what the run begins with.
    begun = jax.device_get(other.params)
    record = take_step(other, other.feed())[0].metrics
    assert record["num_documents"] == DOCUMENTS and record["micro_batches"] > 1
    documents = setup.task.load(setup.tokenizer).documents["train"]
    order = EpochOrder(len(documents), setup.config.seed)
    nats, count = cross_entropy(setup, begun, [documents[order[number]] for number in range(DOCUMENTS)])
    # fp32 log-probs of size 6 and a sum of about a hundred of them, against float64 from the same hidden states.
    np.testing.assert_allclose([train_records(whole)[0]["loss"], record["loss"]], nats / count, rtol=2e-6)


def test_the_held_out_loss_falls_and_is_that_of_the_command(whole, capsys):
    before, after = whole.before, whole.after
    assert after.loss < before.loss and after.perplexity == pytest.approx(np.exp(after.loss), rel=1e-12)
    documents = whole.setup.task.load(whole.setup.tokenizer).documents["held_out"]
    nats, count = cross_entropy(whole.setup, whole.params, documents)
    np.testing.assert_allclose(after.loss, nats / count, rtol=2e-6)
    found = evaluate.run_cli([str(whole.run.path)])
    np.testing.assert_allclose(found.loss, after.loss, rtol=1e-6)
    first, second, _ = capsys.readouterr().out.splitlines()
    assert first == f"step 3, {len(documents)} of {len(documents)} held-out documents"
    assert second == f"held-out loss: {found.loss:.3f}"


def test_a_resume_goes_on_to_the_same_bits(whole):
    resumed = resume(f"{whole.run.path}@1", {"quiet": True})
    assert_same_state(resumed, whole)
    assert (resumed.before, resumed.after) == (whole.before, whole.after)
    assert [record["loss"] for record in train_records(resumed)] == [record["loss"] for record in train_records(whole)]


@pytest.mark.costly
def test_bits_are_the_same_on_every_mesh_with_invariant(tmp_path, path):
    schedule = ScheduleConfig(steps=2, docs_per_step=DOCUMENTS, row_length=24)
    given = {"schedule": schedule, "invariant": True}
    runs = [train(options(tmp_path, f"a{mesh}", path, mesh=mesh, **given)) for mesh in ("", "data=2,tensor=2")]
    assert_same_state(*runs)
    assert runs[0].after == runs[1].after


@pytest.mark.costly
def test_adapters_of_a_model_from_disk_are_trained_exported_and_loaded(tmp_path, path):
    directory = write_tiny_directory(tmp_path / "model", "qwen3")
    schedule = ScheduleConfig(steps=6, docs_per_step=DOCUMENTS, rows=4, row_length=32)
    model, lora = ModelConfig(path=str(directory), chat_template=False), LoraConfig(rank=4)
    result = train(options(tmp_path, "lora", path, model=model, lora=lora, schedule=schedule))
    assert result.after.loss < result.before.loss
    kept = path.rename(tmp_path / "away.jsonl")
    out = export.run_cli([str(result.run.path), str(tmp_path / "out")])
    chat.run_cli([str(result.run.path), "--prompt", "3+4=", "--max-new-tokens", "2"])
    kept.rename(path)
    model = ModelConfig(path=str(out), chat_template=False)
    scored = train(options(tmp_path, "again", path, model=model, schedule=schedule))
    # W + scale · A · B rounded to fp32: a few roundings of a loss of about 6.
    np.testing.assert_allclose(scored.before.loss, result.after.loss, rtol=2e-5)


@pytest.mark.costly
def test_the_command_trains_for_one_pass_and_prints_the_command_that_goes_on(tmp_path, path, capsys):
    sizes = "--model.hidden-size 32 --model.intermediate-size 64 --model.num-layers 1 --model.num-heads 2 "
    command = f"--data.path {path} --out {tmp_path} --name run --schedule.steps 2 --schedule.docs-per-step 32 {sizes}"
    result = sft.run_cli([*command.split(), "--model.num-kv-heads", "2", "--model.head-dim", "16"])
    assert result.steps == 2 and result.setup.config.schedule.epochs == 1
    # A new model has the tokenizer of bytes, for which the file is not needed.
    kept = path.rename(tmp_path / "away.jsonl")
    assert load_model(result.run.path).tokenizer.decode(list(b"")) == ""
    kept.rename(path)
    said = capsys.readouterr().out
    assert f"data:       {path}, " in said and "held-out loss" in said and "reward" not in said
    assert said.splitlines()[-1].endswith(f"python -m experiments.sft --resume {result.run.path} --schedule.steps N")
    resumed = sft.run_cli(["--resume", str(result.run.path), "--schedule.steps", "50", "--quiet"])
    documents = len(resumed.setup.task.load(resumed.setup.tokenizer).documents["train"])
    counts = [record["num_documents"] for record in train_records(resumed)]
    assert sum(counts) == documents and resumed.steps == len(counts) == -(-documents // 32)
    assert json.loads(resumed.run.summary.read_text())["data ended"] is True


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rollout": RolloutConfig(temperature=0.7)}, "--rollout: expected no options in supervised learning"),
        ({"loss": LossConfig(name="gspo")}, "--loss: expected no options in supervised learning"),
        ({"source": "examples.guess_number:rollouts"}, "--source: expected no options in supervised learning"),
        ({"evaluation": EvaluationConfig(kl=True)}, "--evaluation.kl: expected no options in supervised learning"),
        ({"evaluation": EvaluationConfig(samples=2)}, "--evaluation.samples: expected 1 in supervised learning, which"),
        (
            {"schedule": ScheduleConfig(row_length=7)},
            r"--schedule.row-length: expected at least 12, the longest document of .*sums.jsonl, line 29, got 7$",
        ),
        ({"schedule": ScheduleConfig(docs_per_step=0)}, "--schedule.docs-per-step: expected at least 1 in supervised"),
    ],
)  # fmt: skip
def test_options_that_would_do_nothing_are_refused(tmp_path, path, changes, words):
    with pytest.raises(ValueError, match=f"^{words}"):
        train(options(tmp_path, "refused", path, **changes))
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="^reward: expected none in supervised learning, got your own$"):
        train(options(tmp_path, "refused", path), reward=len)


@pytest.mark.bad_input
def test_what_cannot_be_learnt_from_is_refused_in_one_line(tmp_path, capsys):
    few = tmp_path / "few.jsonl"
    few.write_text('{"prompt": "1+1=", "completion": "2"}\n')
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"prompt": "1+1="}\n')
    cases = {
        "": "--data.path: expected a file, or --resume, got none",
        f"--data.path {tmp_path}/none.jsonl": f"file {tmp_path}/none.jsonl: expected a readable file, got No such file",
        f"--data.path {broken}": f"file {broken}, line 1: missing key 'completion'",
        f"--data.path {few}": "--data.path: expected at least one document ",
    }
    for arguments, words in cases.items():
        assert refusal(capsys, sft, [*arguments.split(), "--out", str(tmp_path / "runs")]).startswith(words)


@pytest.mark.bad_input
def test_a_file_that_changes_is_another_run(whole, tmp_path, path):
    run, content = shutil.copytree(whole.run.path, tmp_path / "run"), path.read_bytes()
    path.write_bytes(changed := content.replace(b'"completion": "0"', b'"completion": "5"'))
    try:
        with pytest.raises(ValueError, match="^--task: expected the examples that the run began with"):
            resume(str(run), {"schedule.steps": 9, "quiet": True})
    finally:
        path.write_bytes(content)
    own = tmp_path / "own.jsonl"
    own.write_bytes(changed)
    stale = SupervisedFile(str(own))
    assert stale.digest != SupervisedFile(str(path)).digest
    own.write_bytes(path.read_bytes())
    with pytest.raises(ValueError, match="^--data.path: expected a file that does not change"):
        stale.load(ByteTokenizer())
