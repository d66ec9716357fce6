"""Supports with `--invariant` on a GPU; run with JAXLOGP_TEST_GPU=1 and -m gpu."""

import functools

import jax
import numpy as np
import pytest

from experiments.invariant.leaf_programs import compiler_options
from experiments.loop.run import train
from experiments.sampling.support import RecordedSupport, flat_support
from tests.experiments.tiny import tiny, train_records

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(jax.devices()[0].platform != "gpu", reason="needs an NVIDIA GPU")]


def test_recorded_ids_are_those_that_were_kept():
    """Compiled as `--invariant` does: XLA then loses ids where a scatter may write a place twice."""
    rng = np.random.default_rng(0)
    kept = rng.random((64, 300)) < rng.random((64, 1))
    kept[:, 7] = True
    compiled = functools.partial(jax.jit, compiler_options=compiler_options("gpu"))
    empty, rows, step = RecordedSupport.empty(64, 4, 128), np.arange(64)[None], np.zeros(64, np.int32)
    support = compiled(RecordedSupport.extended)(empty, rows, step, kept, kept[:, 0], np.ones(64, np.float32))
    assert np.asarray(support.counts)[:, 0].tolist() == kept.sum(axis=1).tolist()
    flat = compiled(flat_support)(support)
    assert np.asarray(flat.ids)[: kept.sum()].tolist() == np.nonzero(kept)[1].tolist()


def test_sampler_and_trainer_have_the_same_numbers(tmp_path):
    options = {"rollout": {"top_p": 0.8}, "loss": {"entropy_coefficient": 0.01}}
    options["schedule"] = {"steps": 2, "row_length": None}
    records = train_records(train(tiny(tmp_path, "run", invariant=True, mesh="data=1,tensor=1", **options)))
    for record in records:
        assert record["drift_max"] == 0.0 and record["min_ratio_new_old"] == record["max_ratio_new_old"] == 1.0
        assert record["update_applied"] == 1 and 0.0 < record["grad_norm"] < np.inf
    assert 1.0 < records[0]["support_ids"] < 20.0
