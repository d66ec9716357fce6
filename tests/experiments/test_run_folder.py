"""The run folder: environment, metrics and samples survive a crash, a resume and a careless edit."""

import json
import math
import os
import re
import shutil
import struct
import subprocess
import sys
import tracemalloc
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event

from experiments.command_line import exit_code
from experiments.experience.scoring import Sample
from experiments.runs import environment, log_file
from experiments.runs.config_file import save_config
from experiments.runs.environment import describe_git
from experiments.runs.folder import MetricsWriter, RunFolder, read_metrics
from experiments.runs.lock import RunLock


@dataclass(frozen=True)
class Config:
    steps: int = 10


@pytest.fixture
def run(tmp_path):
    folder = RunFolder.create(tmp_path / "runs", "first")
    save_config(folder.config, Config())
    return folder


def test_environment(run, monkeypatch):
    monkeypatch.setenv("SERVICE_TOKEN", "hunter2")
    run.record_resume(step=12)
    env = json.loads(run.env.read_text())
    assert env["versions"]["jax"] == jax.__version__
    assert env["versions"]["numpy"] == np.__version__
    assert env["versions"].keys() == {"python", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy"}
    assert env["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert env["devices"] == {"platform": "cpu", "count": len(jax.devices()), "kinds": {"cpu": len(jax.devices())}}
    assert "--xla_force_host_platform_device_count" in env["xla_flags"]
    assert env["command"] == sys.orig_argv
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", env["started"])
    assert env["git"].keys() == {"revision", "dirty", "reason"}
    assert [resume["step"] for resume in env["resumes"]] == [12]
    monkeypatch.setattr(environment, "LIBRARIES", ("jax", "no-such-library"))
    assert environment.describe_environment()["versions"]["no-such-library"] is None
    assert env["resumes"][0]["versions"] == env["versions"]
    assert "hunter2" not in run.env.read_text()


def test_git_revision_and_dirty_flag(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    outside = describe_git(tmp_path)
    assert outside["revision"] is outside["dirty"] is None
    assert "not a git repository" in outside["reason"]

    def git(*arguments):
        identity = ("-c", "user.name=test", "-c", "user.email=test@example.org")
        done = subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    git("init", "--quiet")
    assert describe_git(tmp_path)["revision"] is None
    assert describe_git(tmp_path)["reason"]
    (tmp_path / "code.py").write_text("x = 1\n")
    git("add", "code.py")
    git("commit", "--quiet", "--message=first")
    clean = {"revision": git("rev-parse", "HEAD"), "dirty": False, "reason": None}
    assert describe_git(tmp_path) == clean
    (tmp_path / "code.py").write_text("x = 2\n")
    assert describe_git(tmp_path) == {**clean, "dirty": True}
    monkeypatch.setenv("PATH", "")
    assert "git could not run" in describe_git(tmp_path)["reason"]


@pytest.mark.parametrize("name", ["lr[0.1]", "a]", "*", "what?"])
def test_paths_that_could_not_be_read_again_are_refused_at_once(tmp_path, run, name):
    with pytest.raises(ValueError, match="run folder: expected a path without any of "):
        RunFolder.create(tmp_path, name)
    run.path.rename(tmp_path / name)
    with pytest.raises(ValueError, match="run folder: expected a path without any of "):
        RunFolder.open(tmp_path / name)
    assert RunFolder.open((tmp_path / name).rename(tmp_path / "good")).path == tmp_path / "good"


@pytest.mark.parametrize("plant", ["folder", "link", "file"])
def test_create_leaves_alone_what_takes_its_name_meanwhile(tmp_path, plant):
    path, outside = tmp_path / "runs" / "second", tmp_path / "outside"
    outside.mkdir()

    def fill(folder):
        assert not path.exists(), "killed here, it would leave nothing under the name"
        if plant == "folder":
            path.mkdir()
            (path / "mine").touch()
        else:
            path.symlink_to(outside) if plant == "link" else path.touch()

    with pytest.raises(ValueError, match="run folder: expected a path that does not exist yet, got .*second$"):
        RunFolder.create(path.parent, path.name, fill)
    assert [each.name for each in path.parent.iterdir()] == ["second"] and not list(outside.iterdir())
    assert plant != "folder" or (path / "mine").is_file()


def test_what_killed_processes_left_of_a_folder_is_removed(tmp_path):
    """But not what another process is making, other names, or what a link leads to."""
    left, empty, held, linked = (tmp_path / f"run.unfinished-{digit * 16}" for digit in "abcd")
    other, outside = tmp_path / f"run-2.unfinished-{'a' * 16}", tmp_path / "outside"
    for folder in (empty, held, other, outside):
        folder.mkdir()
    linked.symlink_to(outside)
    (outside / "lock").touch()
    with RunLock(held / "lock"):
        RunFolder.create(tmp_path, "run", lambda folder: shutil.copytree(folder.path, left) and None)
        assert left.is_dir() and not empty.exists()
        with pytest.raises(KeyError):
            RunFolder.create(tmp_path, "run-3", lambda folder: {}[folder])
        (tmp_path / "run").rename(tmp_path / "moved")
        RunFolder.create(tmp_path, "run")
    names = {"run", "moved", held.name, linked.name, other.name, "outside"}
    assert {each.name for each in tmp_path.iterdir()} == names and (outside / "lock").is_file()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda run: run.config.unlink(), "config.json: expected a file, got nothing"),
        (lambda run: run.env.write_text("[]"), "env.json: expected a JSON object, got list"),
        (lambda run: run.env.write_text('{"resumes": 3}'), "env.json: expected a list of objects as resumes, got 3"),
        (lambda run: (run.samples.unlink(), run.samples.symlink_to("/etc/passwd")), "a file, got a link"),
        (lambda run: (run.metrics.unlink(), os.mkfifo(run.metrics)), "metrics.jsonl: expected a file, got a device"),
        (lambda run: (run.tensorboard.rmdir(), run.tensorboard.symlink_to("/")), "tb: expected a folder, got a link"),
        (lambda run: run.env.write_bytes(b"\xff\xfe\x00"), "env.json: expected a JSON object"),
        (lambda run: run.checkpoints.rmdir(), "checkpoints: expected a folder, got nothing"),
    ],
)
def test_open_says_what_is_wrong(run, damage, words):
    damage(run)
    with pytest.raises(ValueError, match=rf"^.*{words}.*\Z"):
        RunFolder.open(run.path)


ODD = Sample("inf", "nan", "\ud800", 1.0, {"a": float("inf"), "b": 1.0}, 5, False)


def sample_of(step):
    return Sample("1+1=", str(step), "2", 0.0, {"correct": 0.0}, 2, True)._asdict()


def write_steps(writer, steps, kind="train"):
    for step in steps:
        writer.write(step, kind, {"reward": step / 10})
        writer.write_samples(step, kind, [sample_of(step), ODD._asdict()])


def written(run):
    return [(record["kind"], record["step"]) for record in read_metrics(run.metrics).records]


def test_values_come_back(run):
    values = {
        "loss": 0.1, "array": jnp.float32(0.5), "half": jnp.bfloat16(1.5), "count": np.int64(1 << 40),
        "nan": math.nan, "up": jnp.float32(math.inf), "down": -math.inf, "head": "chunked", "resumed": True,
        "none": None,
    }  # fmt: skip
    with MetricsWriter(run) as writer:
        writer.write(3, "train", values)
        # Flushed already: a kill after this line would lose nothing.
        (line,) = run.metrics.read_text().splitlines()
    plain = json.loads(line, parse_constant=pytest.fail)
    assert (plain["nan"], plain["up"], plain["down"], plain["loss"]) == ("nan", "inf", "-inf", 0.1)
    log = read_metrics(run.metrics)
    assert log.torn is None
    (record,) = log.records
    assert math.isnan(record.pop("nan"))
    expected = {"array": 0.5, "half": 1.5, "count": 1 << 40, "up": math.inf, "step": 3, "kind": "train"}
    assert record == {**{name: value for name, value in values.items() if name != "nan"}, **expected}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"loss": jnp.zeros(1)}, r"value 'loss': expected a scalar, got shape \(1,\)"),
        ({"loss": [1.0]}, "value 'loss': expected a scalar, got list"),
        ({"loss": "nan"}, "value 'loss': expected text"),
        ({"step": 1}, r"names other than step and kind, got \['step'\]"),
    ],
)
def test_refuses_values_it_could_not_give_back(run, values, words):
    with MetricsWriter(run) as writer, pytest.raises(ValueError, match=words):
        writer.write(0, "train", values)
    assert run.metrics.read_text() == ""


def test_each_step_is_written_once(run):
    with MetricsWriter(run) as writer:
        write_steps(writer, [1, 2])
        writer.write(2, "eval", {})
        for step in (2, 1):
            with pytest.raises(ValueError, match="step of kind 'train': expected a step after 2"):
                writer.write(step, "train", {})


def test_resume_repeats_no_step(run):
    with MetricsWriter(run) as writer:
        for kind, steps in (("warm-start", [0, 9]), ("eval", [0]), ("train", [1, 2])):
            write_steps(writer, steps, kind)
        marks = writer.marks()
        write_steps(writer, [3, 4])
        write_steps(writer, [3], "eval")
    with run.metrics.open("ab") as stream:
        stream.write(b'{"step": 5, "ki')
    before = os.stat(run.metrics).st_ino
    with MetricsWriter(run, marks) as writer:
        words = "lines written after the checkpoint dropped"
        assert writer.cut() == [f"metrics.jsonl: 4 {words}", f"samples.jsonl: 6 {words}"]
        with pytest.raises(ValueError, match="expected a step after 2"):
            writer.write(2, "train", {})
        write_steps(writer, [3, 4, 5])
    assert os.stat(run.metrics).st_ino == before, "replaced, it would lose the lines of whoever has it open"
    warm_start = [("warm-start", 0), ("warm-start", 9)]
    expected = [*warm_start, ("eval", 0), *(("train", step) for step in (1, 2, 3, 4, 5))]
    assert written(run) == expected
    assert read_metrics(run.metrics).torn is None
    samples = [json.loads(line) for line in run.samples.read_text().splitlines()]
    assert [(sample["phase"], sample["step"]) for sample in samples] == [pair for pair in expected for _ in range(2)]
    last = {"step": 5, "phase": "train"}
    assert samples[-2] == {**last, **sample_of(5)}
    assert samples[-1] == {**last, **ODD._asdict(), "rewards": {"a": "inf", "b": 1.0}}


@pytest.mark.parametrize(
    ("change", "seen"),
    [
        (lambda content: content[5:], "a file that ends after"),
        (lambda content: b"", "a file that ends after 0"),
        (lambda content: content[:30] + b"X" + content[31:], "a change before this mark"),
        (lambda content: b"{}\n" + content, "a change before this mark"),
    ],
)
@pytest.mark.parametrize("log", ["metrics", "samples"])
def test_a_log_must_be_what_it_was_up_to_the_checkpoint(run, log, change, seen):
    with MetricsWriter(run) as writer:
        write_steps(writer, [1, 2, 3, 4])
        marks = writer.marks()
    path = getattr(run, log)
    whole = path.read_bytes()
    changed = change(whole)
    path.write_bytes(changed)
    with pytest.raises(ValueError, match=rf"{log}.jsonl: expected the first {len(whole)} bytes .* got {seen}"):
        MetricsWriter(run, marks)
    assert path.read_bytes() == changed


@pytest.mark.parametrize("rest", [b"[" * 100_000, b"\xff\x00\n\n", b'{"step": 9, "kind": "train"}\n{"st'])
def test_damage_after_the_checkpoint_is_cut_off_with_a_sentence(run, rest):
    with MetricsWriter(run) as writer:
        writer.write(1, "train", {})
        marks = writer.marks()
    good = run.metrics.read_bytes()
    run.metrics.write_bytes(good + rest)
    with MetricsWriter(run, marks) as writer:
        number = rest.count(b"\n") + (not rest.endswith(b"\n"))
        assert run.metrics.read_bytes() == good + rest, "nothing is written before"
        assert writer.cut() == [f"metrics.jsonl: {number} lines written after the checkpoint dropped"]
    assert run.metrics.read_bytes() == good


def test_a_log_larger_than_the_memory_is_cut_or_refused(run, monkeypatch):
    with MetricsWriter(run) as writer:
        write_steps(writer, [1])
        marks = writer.marks()
    good = run.metrics.read_bytes()
    os.truncate(run.metrics, 2**32 + 1)
    with pytest.raises(ValueError, match="metrics.jsonl: expected at most 4294967296 bytes, got 4294967297"):
        read_metrics(run.metrics)
    # A thousand times what is read at a time.
    os.truncate(run.metrics, 2**22)
    monkeypatch.setattr(log_file, "CHUNK_BYTES", 2**12)
    tracemalloc.start()
    with MetricsWriter(run, marks) as writer:
        assert writer.cut() == ["metrics.jsonl: 1 lines written after the checkpoint dropped"]
        assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()
    assert run.metrics.read_bytes() == good


def test_without_a_checkpoint_the_logs_begin_again(run):
    with MetricsWriter(run) as writer:
        assert writer.cut() == []
        write_steps(writer, [1, 2], "warm_start")
    with MetricsWriter(run) as writer:
        assert writer.cut()[0] == "metrics.jsonl: 2 lines written before there was a checkpoint dropped"
        write_steps(writer, [1], "warm_start")
    assert written(run) == [("warm_start", 1)]


CHANGES = {
    "cut": (lambda log: os.truncate(log, 3), "it has 3 bytes"),
    "gone": (lambda log: log.unlink(), "it is gone"),
    "folder": (lambda log: log.parent.rename(log.parent.with_name("moved")), "it is gone"),
    "other": (lambda log: (log.rename(log.with_name("x")), log.write_bytes(b"")), "another file has its name"),
    "link": (lambda log: (log.rename(log.with_name("x")), log.symlink_to(log.with_name("x"))), "another file has"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_log_that_somebody_changes_during_the_run_is_noticed_at_the_next_line(run, name):
    change, words = CHANGES[name]
    with MetricsWriter(run) as writer:
        write_steps(writer, [1])
        size = run.metrics.stat().st_size
        change(run.metrics)
        expected = f"the log was changed during the run: expected the {size} bytes that were written, but {words}"
        with pytest.raises(OSError, match=expected) as caught:
            write_steps(writer, [2])
    assert exit_code(caught.value) == 3


def test_a_torn_last_line_is_reported(run):
    with MetricsWriter(run) as writer:
        write_steps(writer, [1, 2, 3])
    whole = run.metrics.read_bytes()
    start = whole.rindex(b"\n", 0, -1) + 1
    for end in range(start + 1, len(whole) - 1):
        run.metrics.write_bytes(whole[:end])
        log = read_metrics(run.metrics)
        assert [record["step"] for record in log.records] == [1, 2]
        assert f"line 3: cut short after {end - start} bytes" in log.torn
    # Only the line break is missing: the record is whole.
    run.metrics.write_bytes(whole[:-1])
    assert (len(read_metrics(run.metrics).records), read_metrics(run.metrics).torn) == (3, None)


@pytest.mark.parametrize(
    "line", [b"[" * 99_999, b"{", b"", b"[]", b'{"step": 2}', b'{"step": "2", "kind": ""}', b"\xff"]
)
def test_damage_elsewhere_names_the_line(run, line):
    good = b'{"step": 1, "kind": "train"}'
    run.metrics.write_bytes(b"\n".join([good, line, good, b""]))
    with pytest.raises(ValueError, match=r"metrics.jsonl line 2: expected"):
        read_metrics(run.metrics)
    with pytest.raises(ValueError, match="expected a readable file, got FileNotFoundError"):
        read_metrics(run.path / "none.jsonl")


def scalars_of(folder):
    """(tag, step, value) of every event file, by the record framing: length, checksum, message, checksum."""
    events = []
    for file in sorted(folder.glob("events.*"), key=lambda file: file.stat().st_mtime_ns):
        content, position = file.read_bytes(), 0
        while position < len(content):
            (length,) = struct.unpack_from("<Q", content, position)
            event = Event.FromString(content[position + 12 : position + 12 + length])
            position += 16 + length
            events += [(value.tag, event.step, value.simple_value) for value in event.summary.value]
            events += [("start", event.step, 0.0)] if event.session_log.status == 1 else []
    return events


def test_tensorboard_has_the_numbers_by_kind(run):
    with MetricsWriter(run) as writer:
        writer.write(1, "train", {"reward": 0.5, "head": "chunked", "resumed": False})
        writer.write(1, "eval", {"greedy": 0.25})
        marks = writer.marks()
    with MetricsWriter(run, marks) as writer:
        writer.write(2, "train", {"reward": 0.75})
    assert scalars_of(run.tensorboard / "eval") == [("greedy", 1, 0.25)]
    # The start marker hides what an earlier process wrote from step 2 on.
    assert scalars_of(run.tensorboard / "train") == [("reward", 1, 0.5), ("start", 2, 0.0), ("reward", 2, 0.75)]
