"""The arrays of a round over two real processes with two devices each: every process makes those of its own ranks."""

import json

import pytest

from benchmarks.trials.processes import start_together, wait

PROGRAM = """
import json, sys
import jax
import numpy as np
from flax import nnx
from experiments.models.mesh import make_mesh, num_ranks, parse_mesh
from experiments.processes import start
from experiments.learner.packing import Packing
from experiments.learner.gradients import GspmdGradients
from experiments.learner.objectives import CrossEntropy
from jaxlogp import Document

arguments = sys.argv[1:]
value = lambda name: arguments[arguments.index(name) + 1]
start(value("--coordinator"), int(value("--num-processes")), int(value("--process-id")))
log_probs = [np.full(3 + k % 3, -0.1 * k - 0.1, np.float32) for k in range(9)]
documents = [Document.of_completion([3], np.arange(4, 7 + k % 3), log_probs[k], advantages=float(k)) for k in range(9)]
made = {}
for text in json.loads(value("--meshes")):
    mesh = make_mesh(parse_mesh(text))
    ranks = num_ranks(mesh)
    sums = GspmdGradients(None, mesh, CrossEntropy(), temperature=1.0, engine="auto")
    (taken,) = Packing(ranks, 9, 16, 99, 0).rounds(documents)
    placed = sums._placed(taken)
    made[text] = sorted(taken._made)
    wanted = [np.concatenate([np.atleast_1d(x) for x in leaves]) for leaves in
              zip(*(jax.tree.leaves(taken.micro_batch(rank)) for rank in range(ranks)))]
    for leaf, whole in zip(jax.tree.leaves(placed), wanted, strict=True):
        assert leaf.shape == whole.shape and leaf.dtype == whole.dtype, text
        for shard in leaf.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), whole[shard.index], err_msg=text)
with open(value("--out") + f"/{value('--process-id')}.json", "w") as stream:
    json.dump(made, stream)
"""
RANKS = {
    "data=4": ([0, 1], [2, 3]), "data=2,fsdp=2": ([0, 1], [2, 3]), "data=2,sequence=2": ([0], [1]),
    "fsdp=2,tensor=2": ([0], [1]), "sequence=2,tensor=2": ([0], [0]), "tensor=4": ([0], [0]),
}  # fmt: skip
"""Of each process; one whose devices belong to both is made by both."""


@pytest.mark.slow
def test_every_device_has_its_part_and_no_process_makes_the_arrays_of_another(tmp_path):
    arguments = ["--out", str(tmp_path), "--meshes", json.dumps(list(RANKS))]
    both = start_together(arguments, tmp_path / "cache", 2, main=PROGRAM, devices=2)
    ends = [wait(each) for each in both]
    assert [end.code for end in ends] == [0, 0], ends
    found = [json.loads((tmp_path / f"{index}.json").read_text()) for index in range(2)]
    assert {mesh: tuple(each[mesh] for each in found) for mesh in RANKS} == RANKS
