"""Checkpoints of two processes: each writes and reads its shards, and holds no whole array on the way."""

import os
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from experiments.models.mesh import make_mesh, parse_mesh
from experiments.runs.checkpoint import restore

pytestmark = pytest.mark.slow

LEAF_BYTES = 1 << 23
PROGRAM = """
import sys
from pathlib import Path
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from experiments.models.mesh import make_mesh, parse_mesh
from experiments.processes import processes, start
from experiments.runs.checkpoint import Checkpoints, restore
from experiments.runs.identity import Identity
from experiments.runs.log_file import LogMarks
from experiments.runs.step_files import CheckpointRecord

coordinator, index, folder, leaves = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])
folder_is_there = folder.exists()
start(coordinator, 2, index)
mesh = make_mesh(parse_mesh("fsdp=2"))

def bytes_held(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))

def measured(function):
    # Linux forgets the peak.
    Path("/proc/self/clear_refs").write_text("5")
    before = bytes_held("VmRSS")
    return function(), bytes_held("VmHWM") - before

def rows(number, columns, index):
    return np.arange(2048 * 1024, dtype=np.float32).reshape(2048, 1024)[index] + number

def state(number, place):
    shape = (2048, 1024)
    make = lambda leaf: jax.make_array_from_callback(shape, place, lambda index: rows(leaf, 1024, index))
    return {f"{leaf:03d}": make(leaf) for leaf in range(number)}

def save(step, arrays):
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(step, arrays, CheckpointRecord(Identity({}, {}, {}, {}), LogMarks(), {}, {}, {}, None))

split, across = (NamedSharding(mesh, PartitionSpec(*spec)) for spec in (("fsdp", None), (None, "fsdp")))
if not folder_is_there:
    # Both are ready to work.
    save(1, state(1, split))
    arrays = state(leaves, split)
    _, peak = measured(lambda: save(2, arrays))
else:
    template = {f"{leaf:03d}": jax.ShapeDtypeStruct((2048, 1024), np.float32, sharding=across) for leaf in range(leaves)}
    restore(folder, {"000": template["000"]}, 1)
    restored, peak = measured(lambda: restore(folder, template, 2).arrays)
    for number, leaf in enumerate(restored.values()):
        (shard,) = leaf.addressable_shards
        assert shard.data.shape == (2048, 512)
        np.testing.assert_array_equal(shard.data, rows(number, 1024, shard.index))
print(peak, flush=True)
processes().finish()
"""


def peak(folder, leaves):
    """Bytes that a save, or the restore after it, adds at most, in the process that takes more."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    settings = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=1"}
    pair = [[sys.executable, "-c", PROGRAM, coordinator, str(index), folder, str(leaves)] for index in range(2)]
    both = [subprocess.Popen(each, stdout=subprocess.PIPE, text=True, env={**os.environ, **settings}) for each in pair]
    texts = [each.communicate(timeout=120)[0] for each in both]
    assert [each.returncode for each in both] == [0, 0]
    return max(int(text.splitlines()[-1]) for text in texts)


def test_a_process_holds_its_shards_and_one_leaf_and_one_process_reads_them(tmp_path):
    """Of 24 more leaves it holds 24 more shards, each half a leaf, and what the allocator keeps; whole ones are twice."""
    shards = 24 * LEAF_BYTES // 2
    for work, times in (("save", 1), ("restore", 2)):
        # Threads that happen to hold more at once add to a peak: 1.04 to 1.42 shards were seen, where whole leaves are 2.
        few, many = (
            min(peak(tmp_path / name, count) for _ in range(times)) for name, count in (("few", 12), ("many", 36))
        )
        assert many - few < 1.5 * shards, (work, few, many)
    # On a CPU a save looks at the memory of the arrays themselves, and takes none.
    assert many - few > 0.8 * shards, "the peak of a restore is seen"
    mesh = make_mesh(parse_mesh("data=2,tensor=2"))
    place = NamedSharding(mesh, PartitionSpec("tensor", "data"))
    template = {f"{leaf:03d}": jax.ShapeDtypeStruct((2048, 1024), np.float32, sharding=place) for leaf in range(12)}
    for number, leaf in enumerate(restore(tmp_path / "few", template).arrays.values()):
        np.testing.assert_array_equal(leaf, np.arange(1 << 21, dtype=np.float32).reshape(2048, 1024) + number)
