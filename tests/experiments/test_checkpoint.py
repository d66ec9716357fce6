"""Checkpoints: a restore returns what was saved, on any mesh, or the reason why not."""

import contextlib
import dataclasses
import json
import os
import resource
import shutil
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from experiments.models import placement
from experiments.models.mesh import MeshSpec, make_mesh
from experiments.models.placement import copies_to_pinned
from experiments.runs import checkpoint
from experiments.runs.checkpoint import Checkpoints, complete_steps, restore, restore_template
from experiments.runs.files import digest_of_json
from experiments.runs.identity import Identity
from experiments.runs.log_file import LogMarks
from experiments.runs.step_files import CheckpointRecord

OPTIMIZER = optax.adam(1e-2)


def nested(levels):
    return json.loads("[" * levels + "]" * levels)


def record(step, **feed):
    options = {"seed": 0, "optimizer.learning_rate": 0.1}
    return CheckpointRecord(Identity(options, {}, {}, {}), LogMarks(), {"step": step}, {"version": 96}, feed, None)


def make_state(mesh, offset=0):
    """Parameters over the mesh; the counter of adam and the key stay uncommitted on the first device."""
    table = jnp.arange(32, dtype=jnp.bfloat16).reshape(8, 4) + jnp.bfloat16(offset)
    bias = jnp.linspace(-1.0, 1.0, 4, dtype=jnp.float32)
    params = {
        "table": jax.device_put(table, NamedSharding(mesh, PartitionSpec("tensor", None))),
        "dotted.name/slash": {"bias": jax.device_put(bias, NamedSharding(mesh, PartitionSpec()))},
    }
    return {"params": params, "opt": OPTIMIZER.init(params), "key": jax.random.key_data(jax.random.key(7))}


def assert_equal_states(seen, expected):
    assert jax.tree.structure(seen) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(seen), jax.tree.leaves(expected), strict=True):
        assert one.dtype == other.dtype
        # Bytes, so that -0.0 and NaN count too.
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


@jax.jit
def train_step(state):
    grads = jax.tree.map(jnp.ones_like, state["params"])
    updates, opt = OPTIMIZER.update(grads, state["opt"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt, "key": state["key"]}


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(MeshSpec(data=2, tensor=2))


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory, mesh):
    """A folder with steps 10 and 20; tests that damage it work on a copy."""
    folder = tmp_path_factory.mktemp("saved") / "checkpoints"
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(10, make_state(mesh, 0), record(10, deep=nested(60)))
        checkpoints.save(20, make_state(mesh, 1), record(20, deep=nested(60)))
    return folder


@pytest.fixture
def copied(two_steps, tmp_path):
    return Path(shutil.copytree(two_steps, tmp_path / "checkpoints"))


def test_gives_back_what_was_saved(two_steps, mesh):
    template = restore_template(make_state(mesh), mesh)
    assert complete_steps(two_steps) == [10, 20]
    restored, older = restore(two_steps, template), restore(two_steps, template, step=10)
    assert (restored.step, restored.warnings, restored.damaged) == (20, (), {})
    assert restored.record == record(20, deep=nested(60))
    assert_equal_states(restored.arrays, make_state(mesh, 1))
    part = restore(two_steps, {"key": template["key"]}, whole=False).arrays
    assert_equal_states(part, {"key": make_state(mesh, 1)["key"]})
    assert older.step == older.record.progress["step"] == 10
    assert_equal_states(older.arrays, make_state(mesh, 0))


@pytest.mark.gpu
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs an NVIDIA GPU")
def test_what_went_through_pinned_memory_is_given_back_though_its_arrays_are_gone(tmp_path):
    mesh = make_mesh(MeshSpec(1, 1))
    with Checkpoints(tmp_path) as checkpoints:
        for step in (1, 2):
            state = make_state(mesh, step)
            assert copies_to_pinned(state)
            checkpoints.save(step, state, record(step))
            checkpoints.wait_until_copied()
            jax.tree.map(lambda leaf: leaf.delete(), state)
    for step in (1, 2):
        restored = restore(tmp_path, restore_template(make_state(mesh), mesh), step)
        assert_equal_states(restored.arrays, make_state(mesh, step))


def test_pinned_memory_is_for_a_gpu_and_at_most_a_quarter_of_the_machine(monkeypatch):
    arrays = [jnp.zeros(256, jnp.float32)] * 4
    assert not copies_to_pinned(arrays)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert copies_to_pinned(arrays)
    for machine, pinned in ((4 * 4096, True), (4 * 4096 - 1, False), (0, False)):
        monkeypatch.setattr(placement, "machine_bytes", lambda machine=machine: machine)
        assert copies_to_pinned(arrays) is pinned


@pytest.mark.parametrize("spec", [MeshSpec(2, 2), MeshSpec(1, 8), MeshSpec(4, 1), MeshSpec(1, 1)], ids=str)
def test_restores_onto_any_mesh_and_trains_on(two_steps, mesh, spec):
    onto = make_mesh(spec)
    arrays = restore(two_steps, restore_template(make_state(mesh), onto)).arrays
    assert all(leaf.sharding.mesh == onto for leaf in jax.tree.leaves(arrays))
    assert arrays["params"]["table"].sharding.spec == PartitionSpec("tensor", None)
    assert len(arrays["opt"][0].count.sharding.device_set) == spec.num_devices
    # Elementwise arithmetic only, so the bits do not depend on the mesh.
    assert_equal_states(train_step(arrays), train_step(restore_on(make_state(mesh, 1), mesh)))


def restore_on(state, mesh):
    return jax.device_put(state, jax.tree.map(lambda leaf: leaf.sharding, restore_template(state, mesh)))


def test_keeps_the_newest(tmp_path):
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        for step in (1, 2, 5):
            checkpoints.save(step, {"w": jnp.float32(step)}, record(step))
        checkpoints.wait_until_finished()
        assert complete_steps(tmp_path) == [2, 5]
        for step in (5, 4):
            with pytest.raises(ValueError, match="step: expected a step after 5"):
                checkpoints.save(step, {"w": jnp.float32(0)}, record(step))


@contextlib.contextmanager
def full_disk():
    """Files end at 4 KiB, the nearest thing to a full disk that needs no file system of its own."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_save_that_fails_in_the_background_is_loud_and_pushes_no_good_step_out(copied):
    noise = {"noise": jax.random.bits(jax.random.key(0), (1 << 18,))}
    with Checkpoints(copied, keep=2) as checkpoints:
        with full_disk(), pytest.raises(OSError, match="checkpoint step 30 could not be written: File too large"):
            checkpoints.save(30, noise, record(30))
            checkpoints.save(31, noise, record(31))
        assert complete_steps(copied) == [10, 20] and not list(copied.glob("30*"))
        with full_disk():
            checkpoints.save(30, noise, record(30))
            assert checkpoints._pending.exception(60) is not None
        with pytest.raises(OSError, match="checkpoint step 30 could not be written: File too large"):
            checkpoints.wait_until_copied()
        checkpoints.save(40, noise, record(40))
        checkpoints.wait_until_finished()
    assert complete_steps(copied) == [20, 40] and restore(copied, noise).step == 40


def with_table(*kind):
    return lambda state: {**state, "params": {**state["params"], "table": jnp.zeros(*kind)}}


LEAVES = "the leaves of the template, got missing"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (with_table((4, 8), "bfloat16"), r"leaf 'params/table': expected bfloat16\[4, 8\], got bfloat16\[8, 4\]"),
        (with_table((8, 4), "float16"), r"leaf 'params/table': expected float16\[8, 4\], got bfloat16\[8, 4\]"),
        (lambda state: {**state, "scale": jnp.float32(1)}, rf"{LEAVES} \['scale'\], unknown \[\]"),
        (lambda state: {"params": state["params"], "opt": state["opt"]}, rf"{LEAVES} \[\], unknown \['key'\]"),
    ],
)
def test_a_template_that_does_not_fit_is_an_error_not_damage(two_steps, mesh, change, words):
    with pytest.raises(ValueError, match=rf"^.*{words}.*\Z"):
        restore(two_steps, restore_template(change(make_state(mesh)), mesh))


@pytest.mark.parametrize(
    ("arrays", "feed", "words"),
    [
        ({"a": {"b": 1.0}, "a/b": 2.0}, {}, "arrays: expected leaves with distinct paths, got 'a/b' twice"),
        ({"w": 1.0}, {1: "a"}, "record.feed: expected names that are text"),
        ({"w": 1.0}, {"a": (1, 2)}, "record: expected values that JSON returns unchanged, got others in feed"),
        ({"w": 1.0}, {"a": float("inf")}, "record: expected values that JSON returns unchanged, got others in feed"),
        ({"w": 1.0}, {"a": np.zeros(2)}, "record.feed.a: expected a JSON value, .*, got ndarray"),
        ({"w": 1.0}, {"a": nested(61)}, "record.feed.a: expected values that are not nested so deep"),
    ],
)
def test_refuses_what_it_could_not_give_back(tmp_path, arrays, feed, words):
    with Checkpoints(tmp_path) as checkpoints, pytest.raises(ValueError, match=words):
        checkpoints.save(1, jax.tree.map(jnp.float32, arrays), dataclasses.replace(record(1), feed=feed))
    assert complete_steps(tmp_path) == []


def largest_file(step):
    return max((file for file in (step / "arrays").rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)


def flip_a_bit(step):
    content = bytearray(largest_file(step).read_bytes())
    content[len(content) // 2] ^= 1
    largest_file(step).write_bytes(content)


def put_a_pipe(step):
    file = largest_file(step)
    file.unlink()
    os.mkfifo(file)


def edit_record(step):
    text = (step / "manifest.json").read_text()
    assert '"version": 96' in text
    (step / "manifest.json").write_text(text.replace('"version": 96', '"version": 97'))


def resealed(change):
    """The seal has no key: anybody can write one."""

    def damage(step):
        content = json.loads((step / "manifest.json").read_text())["content"]
        change(content)
        (step / "manifest.json").write_text(json.dumps({"content": content, "sha256": digest_of_json(content)}))

    return damage


def put_the_older_step(step):
    shutil.rmtree(step)
    shutil.copytree(step.parent / "10", step)


def put_a_link(step):
    step.rename(step.parent.parent / "elsewhere")
    step.symlink_to(step.parent.parent / "elsewhere")


def named(step, name):
    return step / "arrays" / name


NOT_WRITTEN = "/arrays: expected the files that were written, got missing"
MANIFEST, RECORD = "/manifest.json: expected", "/manifest.json.record"
DAMAGE = {
    "/arrays/.*: expected the file that was written, of sha256": flip_a_bit,
    rf"{NOT_WRITTEN} \['_METADATA'\], unknown \[\]": lambda step: named(step, "_METADATA").unlink(),
    rf"{NOT_WRITTEN} \[\], unknown \['d/more'\]": lambda step: named(step, "d/more").touch(),
    rf"{NOT_WRITTEN} \[\], unknown \['more'\]": lambda step: named(step, "more").symlink_to(step.parent),
    "/arrays: expected a folder, got nothing": lambda step: shutil.rmtree(step / "arrays"),
    "/arrays/.*: expected a file, got a device": put_a_pipe,
    f"{MANIFEST} values with sha256 .*: edited or damaged": edit_record,
    f"{MANIFEST} a JSON object": lambda step: (step / "manifest.json").write_bytes(b""),
    f"{MANIFEST} every key of Manifest, got none named files": resealed(lambda content: content.pop("files")),
    f"{RECORD}.identity: expected the fields of Identity, got 3": resealed(lambda x: x["record"].update(identity=3)),
    f"{RECORD}.logs.metrics.size: expected int, got '0'": resealed(
        lambda x: x["record"]["logs"]["metrics"].update(size="0")
    ),
    f"{MANIFEST} a file, got nothing": lambda step: (step / "manifest.json").unlink(),
    f"{MANIFEST} that of step 20, got that of step 10": put_the_older_step,
    "/20: expected a folder, got a link": put_a_link,
}


@pytest.mark.parametrize("words", DAMAGE)
def test_damage_is_named_quarantined_and_survived(copied, mesh, words):
    DAMAGE[words](copied / "20")
    template = restore_template(make_state(mesh), mesh)
    with pytest.raises(ValueError, match=rf"^.*{words}.*\Z"):
        restore(copied, template, step=20)
    restored = restore(copied, template)
    assert restored.step == restored.record.progress["step"] == 10 and list(restored.damaged) == [20]
    assert_equal_states(restored.arrays, make_state(mesh, 0))
    assert sorted(entry.name for entry in copied.iterdir()) == ["10", "20"], "a restore moves nothing"
    with Checkpoints(copied) as checkpoints:
        (warning,) = checkpoints.quarantine_newer(restored)
        assert "step 20 is damaged" in warning and "continuing from step 10" in warning and "\n" not in warning
        assert warning.endswith(f"; moved to {copied / 'quarantine' / '20-0'}")
        assert complete_steps(copied) == [10] and os.path.lexists(copied / "quarantine" / "20-0")
        reason = (copied / "quarantine" / "20-0.txt").read_text().strip()
        assert reason in warning.replace(f"{copied}/", "") and str(copied) not in reason
        checkpoints.save(20, make_state(mesh, 2), record(20))
    again = restore(copied, template)
    assert (again.step, again.damaged) == (20, {})
    assert_equal_states(again.arrays, make_state(mesh, 2))


def test_arrays_that_are_not_those_of_the_manifest_are_refused(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"w": jnp.zeros(4)}, record(1))
    resealed(lambda content: content["leaves"].update(w="float32[8]"))(tmp_path / "1")
    with pytest.raises(ValueError, match=r"step 1: array 'w': expected float32\[8\], got float32\[4\]"):
        restore(tmp_path, {"w": jnp.zeros(8)})


def test_all_steps_damaged_is_an_error_that_moves_nothing(copied, mesh):
    for step in (10, 20):
        edit_record(copied / str(step))
    with pytest.raises(ValueError, match="step 20: .*; step 10: "):
        restore(copied, restore_template(make_state(mesh), mesh))


def test_a_half_written_step_is_not_a_step(copied, mesh):
    half = copied / f"30.unfinished-{'0a' * 8}"
    half.mkdir()
    # Nothing of ours.
    (kept := half.with_name(f"40{half.suffix}")).touch()
    assert complete_steps(copied) == [10, 20]
    with Checkpoints(copied) as checkpoints:
        restored = restore(copied, restore_template(make_state(mesh), mesh))
        assert restored.step == 20 and half.exists(), "a reader leaves the save of a writer alone"
        checkpoints.save(30, {"w": jnp.float32(3)}, record(30))
    assert not half.exists() and kept.is_file() and complete_steps(copied) == [20, 30]


@pytest.mark.bad_input
def test_a_quarantine_that_is_no_folder_is_refused_before_it_is_needed(tmp_path):
    (tmp_path / "quarantine").touch()
    with pytest.raises(ValueError, match="quarantine: expected a folder, got a file$"):
        Checkpoints(tmp_path)


@pytest.mark.costly
def test_a_save_returns_before_it_is_durable_and_keeps_what_it_was_given(tmp_path, monkeypatch):
    """The memory of what is saved is taken over while it is written, as by the next training step."""
    held, copy = threading.Event(), checkpoint.over_processes
    monkeypatch.setattr(checkpoint, "over_processes", lambda leaf: held.wait(60) and copy(leaf))
    queued = [1]
    # Large enough that the CPU backend lends its memory to NumPy, and that a disk takes a while.
    state = {"w": jnp.arange(1 << 24, dtype=jnp.int32)}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, record(1, queued=queued))
        queued.append(2)
        threading.Timer(0.2, held.set).start()
        checkpoints.wait_until_copied()
        assert held.is_set() and complete_steps(tmp_path) == []
        taken = jax.jit(lambda state: {"w": state["w"] * 0 - 1}, donate_argnums=0)(state)
        checkpoints.wait_until_finished()
        assert complete_steps(tmp_path) == [1]
    restored = restore(tmp_path, taken)
    assert restored.record.feed == {"queued": [1]}
    np.testing.assert_array_equal(restored.arrays["w"], np.arange(1 << 24, dtype=np.int32))


def test_other_names_are_data(copied, mesh):
    """int() takes 031 and Arabic digits; neither of them is a step."""
    for name in ("031", "\u0663\u0663", "-1", "+40", "4_0", "40 "):
        shutil.copytree(copied / "20", copied / name)
    assert complete_steps(copied) == [10, 20]
    restored = restore(copied, restore_template(make_state(mesh), mesh))
    assert restored.step == 20
    assert [warning.split(" in ")[0] for warning in restored.warnings] == ["'031'", r"'\u0663\u0663'"]


@pytest.mark.parametrize("name", ["a b", "%41", "{a,b}", "a~$x"])
def test_odd_paths_can_be_read_back(tmp_path, name):
    with Checkpoints(tmp_path / name) as checkpoints:
        checkpoints.save(1, {"w": jnp.float32(3)}, record(1))
    assert restore(tmp_path / name, {"w": jnp.float32(0)}).arrays["w"] == 3
