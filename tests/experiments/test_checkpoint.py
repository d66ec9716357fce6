"""Checkpoints: a restore returns what was saved, on any mesh, or the reason why not."""

import contextlib
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

from experiments.models.mesh import MeshSpec, make_mesh
from experiments.runs import checkpoint
from experiments.runs.checkpoint import Checkpoints, SavedSteps, restore_template
from experiments.runs.files import digest_of_json

EXTRA = {"iterator": [3, 1], "documents_seen": 96, "learning_rate": 0.1, "config": {"name": "tiny"}}
OPTIMIZER = optax.adam(1e-2)


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
        checkpoints.save(10, make_state(mesh, 0), {**EXTRA, "step": 10})
        checkpoints.save(20, make_state(mesh, 1), {**EXTRA, "step": 20})
    return folder


@pytest.fixture
def copied(two_steps, tmp_path):
    return Path(shutil.copytree(two_steps, tmp_path / "checkpoints"))


def test_gives_back_what_was_saved(two_steps, mesh):
    saved = SavedSteps(two_steps)
    assert saved.steps() == [10, 20]
    restored = saved.restore(restore_template(make_state(mesh), mesh))
    older = saved.restore(restore_template(make_state(mesh), mesh), step=10)
    assert (restored.step, restored.warnings) == (20, ())
    assert restored.extra == {**EXTRA, "step": 20}
    assert_equal_states(restored.arrays, make_state(mesh, 1))
    assert older.step == older.extra["step"] == 10
    assert_equal_states(older.arrays, make_state(mesh, 0))


@pytest.mark.parametrize("spec", [MeshSpec(2, 2), MeshSpec(1, 8), MeshSpec(4, 1), MeshSpec(1, 1)], ids=str)
def test_restores_onto_any_mesh_and_trains_on(two_steps, mesh, spec):
    onto = make_mesh(spec)
    with Checkpoints(two_steps) as checkpoints:
        arrays = checkpoints.restore(restore_template(make_state(mesh), onto)).arrays
    assert all(leaf.sharding.mesh == onto for leaf in jax.tree.leaves(arrays))
    assert arrays["params"]["table"].sharding.spec == PartitionSpec("tensor", None)
    assert len(arrays["opt"][0].count.sharding.device_set) == spec.num_devices
    # Elementwise arithmetic only, so the bits do not depend on the mesh.
    assert_equal_states(train_step(arrays), train_step(restore_on(make_state(mesh, 1), mesh)))


def restore_on(state, mesh):
    return jax.device_put(state, jax.tree.map(lambda leaf: leaf.sharding, restore_template(state, mesh)))


def test_keeps_the_newest(tmp_path, mesh):
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        assert checkpoints.latest_step() is None
        for step in (1, 2, 5):
            checkpoints.save(step, {"w": jnp.float32(step)}, {})
        checkpoints.wait_until_finished()
        assert checkpoints.steps() == [2, 5]
        assert checkpoints.latest_step() == 5
        for step in (5, 4):
            with pytest.raises(ValueError, match="step: expected a step after 5"):
                checkpoints.save(step, {"w": jnp.float32(0)}, {})


@contextlib.contextmanager
def full_disk():
    """Files end at 4 KiB, the nearest thing to a full disk that needs no file system of its own."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_save_that_fails_in_the_background_is_loud_and_does_not_count(copied, mesh):
    noise = {"noise": jax.random.bits(jax.random.key(0), (1 << 18,))}
    with Checkpoints(copied) as checkpoints:
        with full_disk(), pytest.raises(OSError, match="checkpoint step 30 could not be written: File too large"):
            checkpoints.save(30, noise, {})
            checkpoints.wait_until_finished()
        assert checkpoints.latest_step() == 20 and not list(copied.glob("30*"))
        assert checkpoints.restore(restore_template(make_state(mesh), mesh)).step == 20
        checkpoints.save(30, noise, {})
        assert checkpoints.restore(noise).step == 30


def test_a_failed_save_does_not_push_a_good_step_out(copied):
    noise = {"noise": jax.random.bits(jax.random.key(0), (1 << 18,))}
    with Checkpoints(copied, keep=2) as checkpoints:
        with full_disk(), pytest.raises(OSError, match="File too large"):
            checkpoints.save(30, noise, {})
            checkpoints.save(31, noise, {})
        checkpoints.save(40, noise, {})
        checkpoints.wait_until_finished()
        assert checkpoints.steps() == [20, 40]


def other_shape(state):
    state["params"]["table"] = jnp.zeros((4, 8), jnp.bfloat16)


def other_dtype(state):
    state["params"]["table"] = jnp.zeros((8, 4), jnp.float16)


def vector_for_scalar(state):
    state["opt"] = (state["opt"][0]._replace(count=jnp.zeros((1,), jnp.int32)), *state["opt"][1:])


def extra_leaf(state):
    state["params"]["scale"] = jnp.float32(1)


def missing_leaf(state):
    del state["key"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (other_shape, r"leaf 'params/table': expected bfloat16\[4, 8\], got bfloat16\[8, 4\]"),
        (other_dtype, r"leaf 'params/table': expected float16\[8, 4\], got bfloat16\[8, 4\]"),
        (vector_for_scalar, r"leaf 'opt/0/count': expected int32\[1\], got int32\[\]"),
        (extra_leaf, r"the leaves of the template, got missing \['params/scale'\], unknown \[\]"),
        (missing_leaf, r"got missing \[\], unknown \['key'\]"),
    ],
)
def test_a_template_that_does_not_fit_is_an_error_not_damage(two_steps, mesh, change, words):
    state = make_state(mesh)
    change(state)
    with Checkpoints(two_steps) as checkpoints:
        with pytest.raises(ValueError, match=words) as caught:
            checkpoints.restore(restore_template(state, mesh))
        assert checkpoints.steps() == [10, 20]
    assert "\n" not in str(caught.value)


def test_a_template_must_place_every_leaf_on_the_same_devices(two_steps, mesh):
    state = make_state(mesh)
    with Checkpoints(two_steps) as checkpoints:
        with pytest.raises(ValueError, match="template leaf 'key': expected a sharding"):
            checkpoints.restore({"key": jax.ShapeDtypeStruct((2,), jnp.uint32)})
        # The state itself is no template: its counter sits on one device, its parameters on four.
        with pytest.raises(ValueError, match="template leaf 'opt/0/mu/.*expected the devices of 'key'"):
            checkpoints.restore(state)


@pytest.mark.parametrize(
    ("arrays", "extra", "words"),
    [
        ({"key": lambda: jax.random.key(0)}, {}, "leaf 'key': expected uint32 data from jax.random.key_data"),
        ({"w": lambda: np.zeros(2)}, {}, "leaf 'w': expected a jax Array, got ndarray"),
        ({"w": lambda: 3}, {}, "leaf 'w': expected a jax Array, got int"),
        ({}, {}, "arrays: expected at least one array"),
        ({"w": lambda: jnp.float32(1)}, {1: "a"}, "extra: expected a dict that JSON returns unchanged"),
        ({"w": lambda: jnp.float32(1)}, {"a": (1, 2)}, "extra: expected"),
        ({"w": lambda: jnp.float32(1)}, {"a": float("inf")}, "extra: expected"),
        ({"w": lambda: jnp.float32(1)}, {"a": object()}, "extra: expected"),
    ],
)
def test_refuses_what_it_could_not_give_back(tmp_path, arrays, extra, words):
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(ValueError, match=words):
            checkpoints.save(1, {name: make() for name, make in arrays.items()}, extra)
        assert checkpoints.steps() == []


def test_says_when_there_is_nothing(tmp_path, two_steps, mesh):
    template = restore_template(make_state(mesh), mesh)
    with Checkpoints(tmp_path) as checkpoints, pytest.raises(ValueError, match="at least one complete step in"):
        checkpoints.restore(template)
    with Checkpoints(two_steps) as checkpoints, pytest.raises(ValueError, match=r"expected one of \[10, 20\]"):
        checkpoints.restore(template, step=15)
    with pytest.raises(ValueError, match="keep"):
        Checkpoints(tmp_path, keep=0)


def flip_a_bit_of(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def largest_file(step):
    return max((file for file in (step / "arrays").rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)


def flip_array_bit(step):
    flip_a_bit_of(largest_file(step))


def truncate_array(step):
    file = largest_file(step)
    file.write_bytes(file.read_bytes()[:20])


def delete_array(step):
    largest_file(step).unlink()


def delete_arrays(step):
    shutil.rmtree(step / "arrays")


def pipe_for_array(step):
    file = largest_file(step)
    file.unlink()
    os.mkfifo(file)


def deep_metadata(step):
    (step / "arrays" / "_CHECKPOINT_METADATA").write_bytes(b"[" * 100_000)


def further_file(step):
    (step / "arrays" / "d" / "more").write_bytes(b"1")


def link_to_a_folder(step):
    (step / "arrays" / "more").symlink_to(step.parent)


def edit_extra(step):
    file = step / "manifest.json"
    text = file.read_text()
    assert '"documents_seen": 96' in text
    file.write_text(text.replace('"documents_seen": 96', '"documents_seen": 97'))


def empty_manifest(step):
    (step / "manifest.json").write_bytes(b"")


def deep_manifest(step):
    (step / "manifest.json").write_bytes(b"[" * 100_000)


def foreign_manifest(step):
    content = {"step": 20, "extra": {}, "leaves": [{"path": "a"}]}
    (step / "manifest.json").write_text(json.dumps({"content": content, "sha256": digest_of_json(content)}))


def empty_step(step):
    shutil.rmtree(step)
    step.mkdir()


def older_content(step):
    shutil.rmtree(step)
    shutil.copytree(step.parent / "10", step)


def arrays_of_the_older_step(step):
    shutil.rmtree(step / "arrays")
    shutil.copytree(step.parent / "10" / "arrays", step / "arrays")


def link_for_step(step):
    step.rename(step.parent.parent / "elsewhere")
    step.symlink_to(step.parent.parent / "elsewhere")


def file_for_step(step):
    shutil.rmtree(step)
    step.write_text("20")


NOT_WRITTEN = "/arrays/.*: expected the file that was written, of sha256"
DAMAGE = {
    flip_array_bit: NOT_WRITTEN,
    truncate_array: NOT_WRITTEN,
    deep_metadata: f"_CHECKPOINT_METADATA{NOT_WRITTEN[9:]}",
    delete_array: r"/arrays: expected the files that were written, got missing \['.*'\], unknown \[\]",
    further_file: r"got missing \[\], unknown \['d/more'\]",
    link_to_a_folder: r"unknown \['more'\]",
    arrays_of_the_older_step: "got missing .*, unknown ",
    delete_arrays: "/arrays: expected a folder, got nothing",
    pipe_for_array: "/arrays/.*: expected a file, got a device",
    edit_extra: "/manifest.json: expected values with sha256 .*: edited or damaged",
    empty_manifest: "/manifest.json: expected a JSON object",
    deep_manifest: "/manifest.json: expected a JSON object.* nested at most 64 deep",
    foreign_manifest: "/manifest.json: expected every key of Manifest, got none named files",
    empty_step: "/manifest.json: expected a file, got nothing",
    older_content: "/manifest.json: expected that of step 20, got that of step 10",
    link_for_step: "/20: expected a folder, got a link",
    file_for_step: "/20: expected a folder, got a file",
}


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
def test_damage_is_named_quarantined_and_survived(copied, mesh, damage):
    damage(copied / "20")
    template = restore_template(make_state(mesh), mesh)
    with Checkpoints(copied) as checkpoints:
        with pytest.raises(ValueError, match=DAMAGE[damage]) as caught:
            checkpoints.restore(template, step=20)
        assert "\n" not in str(caught.value)
        assert sorted(entry.name for entry in copied.iterdir()) == ["10", "20"]
        reader = SavedSteps(copied).restore(template)
        assert reader.step == 10 and sorted(entry.name for entry in copied.iterdir()) == ["10", "20"]
        assert "step 20 is damaged" in reader.warnings[0] and len(reader.warnings) == 1

        restored = checkpoints.restore(template)
        assert restored.step == restored.extra["step"] == 10
        assert_equal_states(restored.arrays, make_state(mesh, 0))
        assert checkpoints.steps()[0] == 10 and not (copied / "quarantine").exists(), "a restore moves nothing"
        (warning,) = checkpoints.continue_from(restored)
        assert "step 20 is damaged" in warning and "continuing from step 10" in warning and "\n" not in warning
        assert warning.endswith(f"; moved to {copied / 'quarantine' / '20-0'}")
        assert checkpoints.steps() == [10]
        assert os.path.lexists(copied / "quarantine" / "20-0")
        assert (copied / "quarantine" / "20-0.txt").read_text().strip() in warning

        checkpoints.save(20, make_state(mesh, 2), {})
        again = checkpoints.restore(template)
    assert (again.step, again.warnings) == (20, ())
    assert_equal_states(again.arrays, make_state(mesh, 2))


def test_all_steps_damaged_is_an_error_that_moves_nothing(copied, mesh):
    for step in (10, 20):
        edit_extra(copied / str(step))
    with Checkpoints(copied) as checkpoints, pytest.raises(ValueError, match="step 20: .*; step 10: "):
        checkpoints.restore(restore_template(make_state(mesh), mesh))
    assert sorted(entry.name for entry in copied.iterdir() if entry.is_dir()) == ["10", "20"]


def test_a_half_written_step_is_not_a_step(copied, mesh):
    half = copied / f"30.unfinished-{'0a' * 8}"
    half.mkdir()
    assert SavedSteps(copied).steps() == [10, 20] and half.exists(), "a reader leaves the save of a writer alone"
    with Checkpoints(copied) as checkpoints:
        assert checkpoints.latest_step() == 20
        assert checkpoints.restore(restore_template(make_state(mesh), mesh)).warnings == () and half.exists()
        checkpoints.save(30, {"w": jnp.float32(3)}, {})
    assert not half.exists() and SavedSteps(copied).steps() == [20, 30]


def test_a_save_returns_before_it_is_durable_and_keeps_what_it_was_given(tmp_path, monkeypatch):
    """The thread is held until the caller has reused the memory of what it saves, as the next training step does."""
    held, write = threading.Event(), checkpoint.write_step
    monkeypatch.setattr(checkpoint, "write_step", lambda *arguments: held.wait(60) and write(*arguments))
    extra = {"queued": [1]}
    # Large enough that the CPU backend lends its memory to NumPy.
    state = {"w": jnp.arange(1 << 16, dtype=jnp.float32)}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, extra)
        assert checkpoints.steps() == [] and checkpoints.latest_step() is None
        extra["queued"].append(2)
        taken = jax.jit(lambda state: {"w": state["w"] * 0 - 1}, donate_argnums=0)(state)
        held.set()
        checkpoints.wait_until_finished()
        assert checkpoints.steps() == [1]
        restored = checkpoints.restore(taken)
    assert restored.extra == {"queued": [1]}
    np.testing.assert_array_equal(restored.arrays["w"], np.arange(1 << 16, dtype=np.float32))


def test_other_names_are_data(copied, mesh):
    """int() takes 031 and Arabic digits; neither of them is a step."""
    for name in ("031", "\u0663\u0663", "-1", "+40", "4_0", "40 "):
        shutil.copytree(copied / "20", copied / name)
    template = restore_template(make_state(mesh), mesh)
    with Checkpoints(copied) as checkpoints:
        assert checkpoints.steps() == [10, 20]
        restored = checkpoints.restore(template)
        checkpoints.save(30, make_state(mesh), {})
    assert restored.step == 20
    assert [warning.split(" in ")[0] for warning in restored.warnings] == ["'031'", r"'\u0663\u0663'"]


def test_going_back_to_an_older_step_puts_newer_ones_aside(copied, mesh):
    template = restore_template(make_state(mesh), mesh)
    with Checkpoints(copied) as checkpoints:
        (sentence,) = checkpoints.continue_from(checkpoints.restore(template, step=10))
        assert checkpoints.steps() == [10] and "step 20: the run went back to step 10; moved to" in sentence
        checkpoints.save(11, make_state(mesh, 5), {})
    assert SavedSteps(copied).steps() == [10, 11]
    assert (copied / "quarantine" / "20-0.txt").read_text() == "the run went back to step 10\n"


def test_a_planted_quarantine_is_not_followed(copied, tmp_path, mesh):
    (tmp_path / "elsewhere").mkdir()
    (copied / "quarantine").symlink_to(tmp_path / "elsewhere")
    edit_extra(copied / "20")
    with (
        Checkpoints(copied) as checkpoints,
        pytest.raises(ValueError, match="quarantine: expected a folder, got a link"),
    ):
        checkpoints.restore(restore_template(make_state(mesh), mesh))
    assert not list((tmp_path / "elsewhere").iterdir()) and (copied / "20").is_dir()


@pytest.mark.parametrize("name", ["a b", "%41", "{a,b}", "a~$x"])
def test_odd_paths_can_be_read_back(tmp_path, name):
    with Checkpoints(tmp_path / name / "checkpoints") as checkpoints:
        checkpoints.save(1, {"w": jnp.float32(3)}, {})
        assert checkpoints.restore({"w": jnp.float32(0)}).arrays["w"] == 3


@pytest.mark.parametrize("name", ["lr[0.1]", "a\\b", "*", "gs:"])
def test_paths_that_could_not_be_read_back_are_refused(two_steps, tmp_path, name):
    moved = shutil.copytree(two_steps, tmp_path / name)
    for opened in (Checkpoints, SavedSteps):
        with pytest.raises(ValueError, match="run folder: expected a path without any of"):
            opened(moved)
