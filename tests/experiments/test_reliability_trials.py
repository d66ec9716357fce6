"""The trials of benchmarks/trials, each cut to a few stops or steps; and the slope that the long one prints."""

import numpy as np
import pytest

from benchmarks.trials.kills import trials
from benchmarks.trials.long_run import measured_run, slope_of
from benchmarks.trials.meshes import along, config_of, difference
from experiments.loop.run import train


@pytest.mark.slow
def test_runs_that_are_stopped_end_as_if_they_had_not_been(tmp_path, cheap_processes):
    done = trials(tmp_path, kills=1, terms=1, steps=3, seed=1)
    assert sum(len(trial.moments) for trial in done) == 3
    assert [trial.faults for trial in done] == [[]] * len(done)


@pytest.mark.slow
def test_supervised_runs_of_two_processes_too(tmp_path, cheap_processes):
    """By the draws of this seed the second process is killed, while a checkpoint is being written."""
    done = trials(tmp_path, kills=1, terms=0, steps=3, seed=0, processes=2, supervised=True)
    assert sum(len(trial.moments) for trial in done) == 1
    assert [trial.faults for trial in done] == [[]] * len(done)


@pytest.mark.slow
def test_an_invariant_run_goes_from_mesh_to_mesh_without_a_bit_of_difference(tmp_path):
    whole = train(config_of(tmp_path, "whole", "data=1,tensor=1", 4, invariant=True))
    path = ("data=2,tensor=1", "data=1,tensor=2")
    assert difference(along(path, tmp_path, invariant=True), whole) == (True, 0.0)


@pytest.mark.slow
def test_a_long_run_is_measured_before_every_step(tmp_path):
    measured = measured_run(tmp_path, 30, 10)
    assert all(len(values) == 30 and (values > 0).all() for values in measured.values())


def test_the_slope_has_the_error_of_the_medians_around_it():
    """Of a line with noise of standard deviation 1 on every block: sd / sqrt(sum of squares of the blocks' centres)."""
    block, slope, noise = 100, 0.01, np.random.default_rng(0).normal(size=18)
    values = slope * np.arange(18.0 * block) + np.repeat(noise, block)
    found = slope_of(values)
    centres = block * (np.arange(18.0) - 8.5)
    error = 1.0 / np.sqrt(centres @ centres)
    assert abs(found.per_step - slope) <= 4 * error and 0.5 * error <= found.error <= 2 * error
    assert slope_of(np.ones(1800)) == (1.0, 0.0, 0.0)
