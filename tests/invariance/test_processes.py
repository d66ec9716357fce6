"""Invariance over processes: two processes with four devices each give the bytes of one process with eight."""

import os
import socket
import subprocess
import sys

import numpy as np
import pytest

from tests import oracle
from tests.invariance import two_processes

pytestmark = [pytest.mark.slow, pytest.mark.both_ends]

SECONDS = 120  # a few are needed; a process that waits for a dead one must not wait for ever


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Results of process 0 by mesh and name, and each process's refusal of differing orders."""
    out = tmp_path_factory.mktemp("two") / "results.npz"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    path = os.pathsep.join(path for path in sys.path if path)
    environment = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, "-m", "tests.invariance.two_processes"]
    started = [
        subprocess.Popen(
            [*command, str(rank), "2", str(port), str(out)],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        outputs = [process.communicate(timeout=SECONDS)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], "\n".join(outputs)
    refusals = [out.with_name(f"{out.name}.refusal{rank}").read_text() for rank in range(2)]
    return dict(np.load(out)), refusals


@pytest.fixture(scope="module")
def one():
    return {mesh: two_processes.results(*mesh) for mesh in two_processes.MESHES}


@pytest.mark.parametrize("mesh", two_processes.MESHES, ids=str)
def test_two_processes_give_the_bytes_of_one(mesh, one, two):
    wanted = one[mesh]
    for name in set(two_processes.NAMES) - {"psum"}:
        seen = two[0][f"{mesh[0]}x{mesh[1]}/{name}"]
        assert seen.tobytes() == wanted[name].tobytes(), name


def test_data_ranks_that_hold_two_to_the_k_blocks_give_the_same_gradient_of_the_weight(one):
    for name in ("log_probs", "entropy", "hidden", "weight"):
        assert one[1, 8][name].tobytes() == one[4, 2][name].tobytes(), name


def test_a_float_all_reduce_is_told_apart(one, two):
    """The negative control: what psum adds in another order on two processes, fixed_order_sum does not."""
    wanted, seen = one[1, 8]["psum"], two[0]["1x8/psum"]
    np.testing.assert_allclose(seen, wanted, rtol=0, atol=oracle.fp32_bound(8.0, 8))  # eight sines
    assert seen.tobytes() != wanted.tobytes()


def test_the_fixed_order_sum_is_the_tree_over_ranks(one):
    hidden = two_processes.arrays()[0]
    np.testing.assert_allclose(
        one[1, 8]["fixed_order_sum"],
        sum(np.sin(hidden.astype(np.float64) * (1.0 + rank)) for rank in range(8)),
        rtol=1e-4,
        atol=1e-5,
    )


@pytest.mark.bad_input
def test_processes_that_disagree_about_the_order_all_refuse(two):
    for refusal in two[1]:
        assert "order" in refusal and "[1]" in refusal, refusal
