"""What every rank of `--invariant` reads of the parameters."""

import jax
import numpy as np
import pytest

from experiments.loop.assemble import assemble
from experiments.loop.loop import take_step
from tests.experiments.tiny import tiny

pytestmark = pytest.mark.costly


def leaves(**options):
    run = {"invariant": True, "warm_start": {"max_steps": 0}, "schedule": {"row_length": None}, **options}
    return assemble(tiny("unused", "unused", **run))


@pytest.mark.parametrize("tied", [True, False])
def test_every_rank_reads_the_same_bits_where_it_is(tied):
    setup = leaves(mesh="data=3,tensor=2", model={"dtype": "bfloat16", "tie_embeddings": tied})
    programs = setup.learner.gradients._programs
    # No vector is left at ones or zeros, which bfloat16 has too.
    params = jax.tree.map(lambda x: x + 0.3, setup.learner.state.params)
    loaded = programs.load(params)
    assert len(loaded.weights) == len(loaded.heads) == 3
    first = loaded.weights[0], loaded.heads[0]
    assert {np.dtype(x.dtype).name for x in first[0]} == {"bfloat16", "float32"}
    for *held, device in zip(loaded.weights, loaded.heads, programs.ranks.devices, strict=True):
        for mine, other in zip(jax.tree.leaves(held), jax.tree.leaves(first), strict=True):
            assert mine.devices() == {device} and mine.dtype == other.dtype
            assert np.asarray(mine).tobytes() == np.asarray(other).tobytes()


def test_what_rollouts_have_copied_a_step_reads_and_drops():
    # With an entropy term all documents are computed.
    setup = leaves(loss={"entropy_coefficient": 0.1})
    programs, params = setup.learner.gradients._programs, setup.learner.state.params
    loaded = programs.load(params)
    assert programs.load(params) is loaded
    copies = []
    programs._copied, copied = lambda params: copies.append(params) or copied(params), programs._copied
    assert take_step(setup, setup.feed()) is not None
    assert not copies, "drawn and computed with the parameters that were copied"
    assert programs._loaded is None, "an update has the memory"
    assert programs.load(setup.learner.state.params) is not loaded
    assert len(copies) == 1
