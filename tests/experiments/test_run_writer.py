"""What a run keeps on disk, with a state of a few numbers: one writer, identity, logs, full disks, planted links."""

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.config import Config, identity_options
from experiments.experience.scoring import Sample
from experiments.loop.load import load_run
from experiments.runs import files, identity
from experiments.runs.checkpoint import complete_steps
from experiments.runs.config_file import load_config, save_config
from experiments.runs.folder import RunFolder, read_metrics, run_and_step
from experiments.runs.identity import RunParts, identity_of, require_settings
from experiments.runs.lock import RunLock
from experiments.runs.run_writer import RunWriter, read_checkpoint
from tests.experiments.tiny import contents, tiny

LINE = Sample("1+1=", "2", "2", 1.0, {"correct": 1.0}, 2, True)._asdict()


def state(step):
    return {"w": jnp.arange(1000, dtype=jnp.float32) + step, "count": jnp.int32(step)}


@contextlib.contextmanager
def opened(path, mesh="data=1"):
    folder = RunFolder.open(path)
    with RunLock(folder.lock), RunWriter(folder, 2, identity_in(folder, mesh)) as writer:
        yield writer


def identity_in(folder, mesh="data=1"):
    options = identity_options(load_config(folder.config, Config))
    options = {name: value for name, value in options.items() if name not in ("name", "out")}
    return identity_of(options, mesh, RunParts())


def read(path, step=None):
    """As commands do that do not train."""
    folder = RunFolder.open(path)
    return read_checkpoint(folder.checkpoints, identity_in(folder), state(0), step)


def work(writer, steps):
    """Two lines and a checkpoint a step, as the loop does."""
    for step in steps:
        writer.write(step, "train", {"loss": 1.0 / step})
        writer.write_samples(step, "train", [LINE])
        writer.save(step, state(step), progress={"step": step}, learner={}, feed={}, before=None)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run of three steps; tests that touch it work on a copy."""
    folder = RunFolder.create(parent := tmp_path_factory.mktemp("made"), "run", parts=RunParts())
    save_config(folder.config, tiny(parent, "run"))
    with opened(folder.path) as writer:
        writer.begin()
        work(writer, [1, 2, 3])
    return folder.path


@pytest.fixture
def run(made, tmp_path):
    return RunFolder(Path(shutil.copytree(made, tmp_path / "copied" / "run", symlinks=True)))


def went_on(path, **options):
    """Resumes and makes a step; returns the restored step and what was said."""
    with opened(path, **options) as writer:
        restored = writer.restore(state(0))
        np.testing.assert_array_equal(restored.arrays["w"], state(restored.step)["w"])
        said = writer.discard_newer()
        work(writer, [restored.step + 1])
    return restored.step, (*restored.warnings, *said)


def test_goes_on_where_it_was_also_in_another_place(run, tmp_path):
    moved = tmp_path / "another place"
    run.path.rename(moved)
    assert went_on(moved) == (3, ())
    assert [record["step"] for record in read_metrics(moved / "metrics.jsonl").records] == [1, 2, 3, 4]
    assert complete_steps(moved / "checkpoints") == [3, 4]


@pytest.mark.bad_input
def test_what_a_source_began_with_is_kept_until_a_checkpoint_is_durable(tmp_path):
    folder = RunFolder.create(tmp_path, "run", parts=RunParts())
    save_config(folder.config, tiny(tmp_path, "run"))
    with opened(folder.path) as writer:
        writer.begin()
        writer.wait_until_finished()
        assert writer.beginning({"calls": 3}) is None and writer.beginning({"calls": 5}) == {"calls": 3}
        with pytest.raises(ValueError, match="^source: expected a state that JSON returns unchanged, got another one$"):
            writer.beginning({"calls": (3,)})
        work(writer, [1])
        writer.wait_until_finished()
        assert not folder.beginning.exists()


def test_nothing_names_the_folder_but_the_option_out(made):
    """As it was given on the command line, in config.json, and in the command in env.json; and a note of Orbax's."""
    for file in made.rglob("*"):
        if file.is_file() and file.name not in ("config.json", "env.json", "commit_success.txt"):
            assert str(made.parent).encode() not in file.read_bytes(), file


def test_a_second_writer_is_refused_with_the_holder(run):
    with opened(run.path) as writer:
        writer.restore(state(0))
        before = run.metrics.read_bytes()
        holder = f"process {os.getpid()} on "
        with pytest.raises(ValueError, match=rf"one that no other process writes, got it in use by {holder}.*\Z"):
            went_on(run.path)
        assert run.metrics.read_bytes() == before
        # Readers need no lock.
        assert read(run.path).step == 3
    assert went_on(run.path)[0] == 3


def test_a_killed_writer_leaves_no_lock(run):
    program = (
        "import sys, signal, os; from experiments.runs.lock import RunLock; from pathlib import Path;"
        "lock = RunLock(Path(sys.argv[1])); print('held', flush=True); signal.pause()"
    )
    child = subprocess.Popen([sys.executable, "-c", program, str(run.lock)], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match=f"process {child.pid} on"):
            RunLock(run.lock)
    finally:
        child.kill()
        child.communicate()
    RunLock(run.lock).release()


@pytest.mark.parametrize("plant", [lambda lock, canary: lock.symlink_to(canary), lambda lock, canary: os.mkfifo(lock)])
def test_a_planted_lock_is_refused(tmp_path, plant):
    canary = tmp_path / "canary"
    canary.write_text("mine")
    plant(tmp_path / "lock", canary)
    with pytest.raises(ValueError, match="expected a lock file, got a (link|device)"):
        RunLock(tmp_path / "lock")
    assert canary.read_text() == "mine"


def test_what_is_written_into_a_lock_is_data(tmp_path):
    with RunLock(tmp_path / "lock"):
        (tmp_path / "lock").write_bytes(b"\x1b[31m\n\xff" + b"a" * 1000)
        with pytest.raises(ValueError, match=r"in use by \[31m") as caught:
            RunLock(tmp_path / "lock")
    assert "\x1b" not in str(caught.value) and len(str(caught.value)) < 500


def test_other_versions_devices_and_meshes_are_said_in_one_line(run, monkeypatch):
    versions = {**identity.library_versions(), "jax": "0.9.9"}
    monkeypatch.setattr(identity, "library_versions", lambda: versions)
    monkeypatch.setenv("XLA_FLAGS", f"{os.environ['XLA_FLAGS']} --xla_cpu_enable_fast_math=true")
    step, warnings = went_on(run.path, mesh="data=2")
    (warning,) = warnings
    assert step == 3 and "\n" not in warning
    for words in (f"jax '{jax.__version__}' -> '0.9.9'", "mesh 'data=1' -> 'data=2'", "fast_math", "not bitwise"):
        assert words in warning
    assert "force_host_platform" not in warning
    # The next checkpoint is of the new ones.
    assert went_on(run.path, mesh="data=2") == (4, ())


SETTINGS = {"jax_threefry_partitionable": False, "jax_default_prng_impl": "rbg", "jax_enable_x64": True}


@pytest.mark.parametrize("setting, value", SETTINGS.items())
def test_other_random_numbers_are_refused(run, setting, value):
    before, old = run.metrics.read_bytes(), getattr(jax.config, setting)
    jax.config.update(setting, value)
    try:
        with pytest.raises(ValueError, match=f"checkpoint step 3: expected the settings of JAX .* got {setting} "):
            went_on(run.path)
        if setting != "jax_threefry_partitionable":
            with pytest.raises(ValueError, match="JAX_[A-Z0-9_]+: expected .*, got "):
                require_settings()
    finally:
        jax.config.update(setting, old)
    assert run.metrics.read_bytes() == before and complete_steps(run.checkpoints) == [2, 3]


def test_an_edited_configuration_is_refused_though_its_hash_is_right(run):
    save_config(run.config, tiny(run.path.parent, "run", seed=5, schedule={"steps": 3, "rows": 4}))
    with pytest.raises(ValueError, match=r"options that it was saved with, got schedule.rows 16 -> 4, seed 0 -> 5"):
        went_on(run.path)


def test_what_may_change_may(run):
    changes = {"schedule": {"steps": 77}, "evaluation": {"every": 7}, "optimizer": {"learning_rate": 0.5}}
    save_config(run.config, tiny(run.path.parent, "run", **changes))
    assert went_on(run.path) == (3, ())


def test_an_older_step_by_name(run):
    assert run_and_step(f"{run.path}@2") == (run.path, 2)
    assert run_and_step(str(run.path)) == (run.path, None)
    odd = run.path.with_name("run@2")
    run.path.rename(odd)
    assert run_and_step(str(odd)) == (odd, None), "a folder of that name comes first"
    with opened(odd) as writer:
        restored = writer.restore(state(0), step=2)
        moved, *cut = writer.discard_newer()
        work(writer, [3])
    assert restored.step == 2 and "step 3: the run went back to step 2; moved to" in moved
    assert (odd / "checkpoints" / "quarantine" / "3-0.txt").read_text() == "the run went back to step 2\n"
    assert cut == [f"{log}.jsonl: 1 lines written after the checkpoint dropped" for log in ("metrics", "samples")]
    assert [record["step"] for record in read_metrics(odd / "metrics.jsonl").records] == [1, 2, 3]


@pytest.mark.parametrize("name", ["RUN@9", "RUN@x", "RUN@\u0663", "RUN@03"])
def test_no_such_step(run, name):
    with pytest.raises(ValueError, match="(step: expected one of|run folder: expected an existing folder)"):
        path, step = run_and_step(name.replace("RUN", str(run.path)))
        read(path, step)


@pytest.mark.parametrize("log", ["metrics", "samples"])
def test_a_log_that_was_changed_is_refused_before_anything_is_moved_or_cut(run, log):
    # Step 3 would go to the quarantine, its lines, and half a step that a killed process left, away.
    path = getattr(run, log)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([b"{" + lines[0], *lines[1:]]))
    (run.checkpoints / "3" / "manifest.json").write_text("{")
    (run.checkpoints / f"4.unfinished-{'0a' * 8}").mkdir()
    before = contents(run)
    with pytest.raises(ValueError, match=f"{log}.jsonl: expected the first .* got a change before this mark"):
        went_on(run.path)
    assert contents(run) == before


def test_a_damaged_newest_step_falls_back_with_its_lines(run):
    shutil.rmtree(run.checkpoints / "3")
    (run.checkpoints / "3").symlink_to(run.checkpoints / "2")
    step, warnings = went_on(run.path)
    assert step == 2 and len(warnings) == 3 and "/3: expected a folder, got a link" in warnings[0]
    assert [record["step"] for record in read_metrics(run.metrics).records] == [1, 2, 3]


class FullDisk:
    """os.write and FileIO.write that fail once a number of bytes has been written, as on a full disk."""

    def __init__(self, monkeypatch, size):
        self.left = size
        monkeypatch.setattr(files, "FileIO", self._file)

    def _file(self, *arguments, **options):
        disk = self

        class Limited(OriginalFile):
            def write(self, content):
                if disk.left <= 0:
                    raise OSError(28, os.strerror(28))
                part = memoryview(content)[: disk.left]
                disk.left -= len(part)
                return super().write(part)

        return Limited(*arguments, **options)


OriginalFile = files.FileIO


@pytest.mark.parametrize("size", [0, 150, 700, 3000, 5200, 9000])
def test_a_full_disk_is_one_error_and_the_run_goes_on_later(run, size):
    """At the first byte, in a log, in the arrays, in the manifest: what was durable stays, and no thread hangs."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        FullDisk(monkeypatch, size)
        with pytest.raises(OSError, match="No space left on device"), opened(run.path) as writer:
            writer.restore(state(0))
            work(writer, range(4, 10))
    saved = complete_steps(run.checkpoints)
    assert saved[-1] >= 3 and len(list(run.checkpoints.iterdir())) <= 3
    step, _ = went_on(run.path)
    assert step == saved[-1]
    steps = [record["step"] for record in read_metrics(run.metrics).records]
    assert steps == list(range(1, step + 2))


@pytest.mark.parametrize("call", ["mkdir", "open"])
def test_a_folder_that_cannot_be_written(run, monkeypatch, call):
    def refused(*arguments, **options):
        raise PermissionError(13, os.strerror(13), str(arguments[0]))

    monkeypatch.setattr(os, call, refused)
    with pytest.raises(PermissionError), opened(run.path) as writer:
        writer.restore(state(0))
        work(writer, [4])
    monkeypatch.undo()
    assert went_on(run.path)[0] == 3


LINKED = ["metrics.jsonl", "samples.jsonl", "config.json", "env.json", "lock", "checkpoints", "tb", "tb/train"]
LINKED += ["checkpoints/quarantine", "checkpoints/4", "checkpoints/3", "warm_start"]
REPLACED = ["summary.json", "curves.png", "metrics.jsonl.unfinished", "env.json.unfinished", "samples.jsonl.unfinished"]
REPLACED += ["config.json.unfinished", "summary.json.unfinished", "checkpoints/4.unfinished"]


def plant(run, name, target):
    place = run.path / name
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place)
    else:
        place.unlink(missing_ok=True)
    place.symlink_to(target)


@pytest.mark.parametrize("name", LINKED + REPLACED)
@pytest.mark.parametrize("kind", ["file", "folder", "nothing"])
def test_planted_links_are_never_written_through(run, tmp_path, name, kind):
    """Whether it is refused or goes on: nothing outside of the folder changes."""
    outside = tmp_path / "outside"
    outside.mkdir()
    target = outside / kind
    if kind == "file":
        target.write_text("mine")
    elif kind == "folder":
        # What is behind the link is as the run would want it.
        original = run.path / name
        shutil.copytree(original, target) if original.is_dir() else target.mkdir()
    before = {path: path.read_bytes() if path.is_file() else None for path in outside.rglob("*")}
    # Something to put into the quarantine.
    (run.checkpoints / "3" / "manifest.json").write_text("{")
    plant(run, name, target)
    # A name that the run writes under and never reads is no reason to end.
    with contextlib.nullcontext() if name in REPLACED else contextlib.suppress(ValueError):
        went_on(run.path)
        files.write_json(run.summary, {"step": 3})
        files.replace_file(run.curves, b"PNG")
        run.record_resume(3)
    assert {path: path.read_bytes() if path.is_file() else None for path in outside.rglob("*")} == before


def test_a_reader_writes_nothing(run):
    """`evaluate`, `export` and `chat` read a run that may be training."""
    (run.checkpoints / "3" / "manifest.json").write_text("{")
    (run.checkpoints / f"4.unfinished-{'0' * 16}").mkdir()
    before = sorted((path, path.lstat().st_mtime_ns) for path in run.path.rglob("*"))
    assert read(run.path).step == 2
    with pytest.raises(ValueError, match="checkpoint step 2: expected the leaves of the template"):
        load_run(run.path)
    assert sorted((path, path.lstat().st_mtime_ns) for path in run.path.rglob("*")) == before
