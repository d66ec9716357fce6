"""What a resume may change, what it keeps in the run folder, and when there is nothing to do."""

import dataclasses
import hashlib
import json
import shlex
from types import SimpleNamespace

import pytest

from experiments import grpo
from experiments.config import Config, apply_changes, identity_options, is_changeable
from experiments.loop import found, plan
from experiments.loop import resume as module
from experiments.loop import run as run_module
from experiments.loop.loop import Progress
from experiments.loop.resume import Resumption, resume
from experiments.loop.run import set_up
from experiments.loop.run_parts import require_same_parts
from experiments.options import flat_fields, typed_options
from experiments.runs.config_file import load_config, read_config, save_config, write_json
from experiments.runs.ends import AlreadyFinished
from experiments.runs.folder import RunFolder
from experiments.runs.identity import RunParts
from experiments.tasks import make_task
from experiments.tasks.protocol import data_digest
from tests.experiments.tiny import tiny

STEPS = 200


@pytest.fixture
def folder(tmp_path):
    """A run that began with 200 steps of gspo."""
    folder = RunFolder.create(tmp_path, "run")
    save_config(folder.config, tiny(tmp_path, "run", schedule={"steps": STEPS}, loss={"name": "gspo"}))
    return folder


def resumption(folder, **changes):
    stored = load_config(folder.config, Config)
    return Resumption(folder, stored, apply_changes(stored, changes))


def at(step):
    """What a run consists of, and that it was restored at a step."""
    return SimpleNamespace(config=SimpleNamespace(quiet=True)), Progress(step)


@pytest.fixture(autouse=True)
def compiles_nothing(monkeypatch):
    """Nothing here runs: what it would need of memory is in test_memory.py."""
    for each in (module, plan):
        monkeypatch.setattr(each, "say_memory", lambda *given, **options: None)


def finish(folder, step, *, exhausted=False):
    write_json(folder.summary, {"optimizer steps": step, "data ended": exhausted})


def test_what_was_typed_counts_whatever_the_default_is(folder, monkeypatch):
    """--schedule.steps 1000 is the default, and another goal for a run of 200 steps."""
    seen = []
    run = SimpleNamespace(finish=lambda: None)
    monkeypatch.setattr(grpo, "set_up_resume", lambda path, typed: seen.append((path, typed)) or run)
    grpo.run_cli(shlex.split(f"--resume {folder.path} --schedule.steps 1000 --seed=0 --evaluation.no-kl --quiet"))
    typed = {"schedule.steps": 1000, "seed": 0, "evaluation.kl": False, "quiet": True}
    assert seen == [(str(folder.path), typed)] and Config().schedule.steps == 1000 and Config().seed == 0
    assert resumption(folder, **typed).kept.schedule.steps == 1000
    grpo.run_cli(["--resume", str(folder.path)])
    assert seen[-1] == (str(folder.path), {})


def test_differences_are_refused_with_a_list_and_equal_values_taken(folder):
    stored = load_config(folder.config, Config)
    words = "--loss.name: the run has gspo, given grpo; --optimizer.b2: the run has None, given 0.5; start a new run"
    with pytest.raises(ValueError, match=words):
        apply_changes(stored, {"loss.name": "grpo", "seed": 0, "schedule.steps": 7, "optimizer.b2": 0.5})
    same = {"loss.name": "gspo", "model.num_layers": 1, "schedule.steps": STEPS, "rollout.stop": ()}
    assert apply_changes(stored, same) == stored


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"task": 3}, "changes.task: expected str, got 3"),
        ({"task": None}, "changes.task: expected str, got None"),
        ({"guards.max_refused_steps": 0}, "--guards.max-refused-steps: expected at least 1, got 0"),
        ([("schedule.steps", 3)], "changes: expected a dictionary of options by dotted name, got list"),
    ],
)
def test_changes_of_other_types_or_out_of_range_are_refused(folder, changes, words):
    with pytest.raises(ValueError, match=f"^{words}"):
        resume(str(folder.path), changes)


def test_auto_is_what_the_run_made_of_it(folder):
    stored = load_config(folder.config, Config).resolved()
    assert stored.model.dtype == "float32" and stored.rollout.rescore is False
    assert apply_changes(stored, {"model.dtype": "auto", "rollout.rescore": None, "warm_start.max_steps": 12}) == stored
    with pytest.raises(ValueError, match="--model.dtype: the run has float32, given bfloat16"):
        apply_changes(stored, {"model.dtype": "bfloat16"})


def test_what_may_change():
    free = {field for field in flat_fields(Config) if is_changeable(field)}
    assert free == {
        *("mesh", "rollout.mesh", "rollout.rows", "quiet", "log_every", "schedule.steps", "optimizer.learning_rate"),
        "loss.teacher",
        *("evaluation.every", "evaluation.num_prompts", "evaluation.samples", "drift.every"),
        *("checkpoint.every", "checkpoint.every_minutes", "checkpoint.keep"),
        *("guards.max_refused_steps", "guards.spike_factor", "guards.replica_every"),
    }
    assert identity_options(Config()).keys() == flat_fields(Config).keys() - free


def test_the_new_goal_is_kept_in_the_run_folder(folder):
    """A run that is resumed with another goal, and killed before it, goes on to that goal."""
    goes_on = resumption(folder, **{"schedule.steps": 300, "mesh": "data=2", "log_every": 7, "quiet": True})
    goes_on.check(*at(39))
    goes_on.keep()
    kept = load_config(folder.config, Config)
    assert (kept.schedule.steps, kept.mesh, kept.log_every) == (300, "data=2", 7)
    assert resumption(folder).kept == kept
    content = json.loads(folder.config.read_text())
    values = json.dumps(content["config"], sort_keys=True).encode()
    assert content["sha256"] == hashlib.sha256(values).hexdigest() and read_config(folder.config)


def test_a_plain_resume_leaves_the_options_alone(folder):
    before = folder.config.read_bytes(), folder.config.stat().st_mtime_ns
    goes_on = resumption(folder)
    goes_on.check(*at(39))
    goes_on.keep()
    assert (folder.config.read_bytes(), folder.config.stat().st_mtime_ns) == before


@pytest.mark.parametrize(
    ("step", "changes", "exhausted", "words"),
    [
        (STEPS, {}, False, "has reached step 200 of 200; raise --schedule.steps to continue"),
        (STEPS, {"schedule.steps": STEPS}, False, "has reached step 200 of 200"),
        (12, {}, True, "ended with its training data at step 12$"),
        (12, {"schedule.steps": 300}, True, "ended with its training data at step 12$"),
    ],
)
def test_a_finished_run_has_nothing_to_do(folder, step, changes, exhausted, words):
    finish(folder, step, exhausted=exhausted)
    before = folder.summary.read_bytes(), folder.config.read_bytes()
    with pytest.raises(AlreadyFinished, match=f"nothing to do: {folder.path} {words}"):
        resumption(folder, **changes).check(*at(step))
    assert (folder.summary.read_bytes(), folder.config.read_bytes()) == before


def test_a_goal_behind_the_run_is_refused_and_nothing_is_written(folder):
    finish(folder, 40)
    before = folder.config.read_bytes()
    with pytest.raises(ValueError, match="^--schedule.steps: expected at least 40, the step .* reached, got 30"):
        resumption(folder, **{"schedule.steps": 30}).check(*at(40))
    assert folder.config.read_bytes() == before


@pytest.mark.parametrize("summary", [None, 100])
def test_a_run_that_was_killed_before_its_summary_is_finished(folder, summary):
    if summary is not None:
        finish(folder, summary)
    resumption(folder).check(*at(STEPS))


def write(path, answers=str):
    lines = [{"prompt": f"{a}{b}=", "answer": answers(b)} for a in range(10) for b in range(10)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def test_data_is_known_by_its_absolute_path_and_its_content(tmp_path, monkeypatch):
    path = tmp_path / "questions.jsonl"
    write(path)
    monkeypatch.chdir(tmp_path)
    task = make_task("jsonl:questions.jsonl")
    assert task.name == f"jsonl:{path}" and data_digest(task) == hashlib.sha256(path.read_bytes()).hexdigest()
    assert data_digest(make_task("addition")) is None
    began_with = RunParts(examples=data_digest(task))
    monkeypatch.chdir("/")
    assert require_same_parts(began_with, RunParts(examples=data_digest(make_task(task.name)))) == []
    lines = path.read_text().splitlines()
    for changed_lines in (lines[::-1], [lines[0].replace('"0"', '"7"', 1), *lines[1:]]):
        path.write_text("\n".join(changed_lines) + "\n")
        with pytest.raises(ValueError, match="^--task: expected the examples that the run began with"):
            require_same_parts(began_with, RunParts(examples=data_digest(make_task(task.name))))


def test_the_command_resumes_from_another_folder_and_names_changed_data(tmp_path, monkeypatch, capsys):
    """Set up for real, up to what a run consists of, which a stand-in replaces."""
    write(tmp_path / "questions.jsonl")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(found, "assemble", lambda *given, **options: None)
    monkeypatch.setattr(module.Run, "finish", lambda self: self)
    options = tiny(tmp_path, "run", task="jsonl:questions.jsonl", schedule={"steps": 3}, quiet=False)
    run = set_up(options)
    run.lock.release()
    path = str(run.folder.path)
    assert load_config(run.folder.config, Config).task == f"jsonl:{tmp_path}/questions.jsonl"
    said = capsys.readouterr().out
    examples = make_task("jsonl:questions.jsonl").num_examples("train")
    counts = f"{examples} training examples, {min(16, 100 - examples)} distinct held-out prompts"
    for words in (
        counts,
        " parameters, float32",
        "1 of 8 cpu, mesh data=1,fsdp=1,sequence=1,tensor=1",
        "3 of 64 documents",
        path,
    ):
        assert words in said
    monkeypatch.chdir("/")
    again = resume(path, {"task": f"jsonl:{tmp_path}/questions.jsonl", "schedule.steps": 9, "quiet": True})
    assert again.resumption.kept.schedule.steps == 9 and not again.resumption.kept.quiet
    again.lock.release()
    write(tmp_path / "questions.jsonl", answers=lambda b: str(b + 1))
    # Twice: a resume that is refused holds no lock, though somebody still has its exception.
    refusals = []
    for _ in range(2):
        with pytest.raises(ValueError, match="expected the examples that the run began with") as refused:
            resume(path)
        refusals.append(refused)


@pytest.mark.parametrize("saved, own", [(None, False), ("checkpoints", True), ("warm_start", True)])
@pytest.mark.parametrize("rank", [0, 4])
def test_a_model_from_disk_is_the_runs_own_copy_once_a_checkpoint_holds_its_parameters(folder, saved, own, rank):
    """That of a warm start too; with adapters a checkpoint holds these alone."""
    config = Config()
    model = dataclasses.replace(config.model, path="elsewhere")
    config = dataclasses.replace(config, model=model, lora=dataclasses.replace(config.lora, rank=rank))
    (folder.path / "warm_start").mkdir()
    if saved is not None:
        (folder.path / saved / "0").mkdir()
    assert module.has_checkpoint(folder) is own
    expected = str(folder.model) if own and rank == 0 else "elsewhere"
    assert module.with_saved_model(config, folder).model.path == expected


def test_a_process_that_ends_before_the_run_folder_is_whole_leaves_its_name_free(tmp_path, monkeypatch):
    monkeypatch.setattr(found, "assemble", lambda *given, **options: None)
    monkeypatch.setattr(run_module, "save_config", lambda path, config: {}[path])
    for _ in range(2):
        with pytest.raises(KeyError):
            set_up(tiny(tmp_path, "run"))
        assert not list(tmp_path.iterdir())


def test_typed_options_are_fields():
    arguments = "--no-such --data.other-keys --data.no-other-keys --name=--seed --rollout.max_new_tokens 3 extra -h"
    assert typed_options(arguments.split(), Config) == ["data.other_keys", "name", "rollout.max_new_tokens"]
