"""The step of many GPUs on paper against those that were measured."""

import pytest

from benchmarks.scaling_model import MEASURED, QWEN_SHORT, Mesh, main, of_linear, points, state_bytes, step_seconds


def test_every_measured_point_is_predicted_within_15_percent(capsys):
    found = points()
    assert len(found) == 8 and all(abs(point.error) < 0.15 for point in found)
    main()
    assert capsys.readouterr().out.count("|\n") == 2 + len(found) + 2 + 7


@pytest.mark.parametrize("shape, mesh, seconds", MEASURED)
def test_a_mesh_of_one_axis_costs_something(shape, mesh, seconds):
    assert step_seconds(shape, Mesh()) == shape.step
    assert 0.5 < of_linear(shape, mesh) < 1.0


def test_bytes_are_counted_by_hand():
    # Ranks of fsdp receive half of the parameters three times; the update takes half as long.
    sent = 3 * 4 * 0.596e9 / 2 / 294e9
    assert step_seconds(QWEN_SHORT, Mesh(fsdp=2)) == pytest.approx(0.3229 + sent - 5.3e-3 / 2)
    # Of data=2 over fsdp=2, on one host, half of the gradient goes to the neighbour and back.
    more = 2 * (4 * 0.596e9 / 2) / 2 / 294e9
    assert step_seconds(QWEN_SHORT, Mesh(data=2, fsdp=2)) == pytest.approx(0.3229 + sent - 5.3e-3 / 2 + more)
    # Nine ranks do not fit on a host.
    assert step_seconds(QWEN_SHORT, Mesh(data=9)) > step_seconds(QWEN_SHORT, Mesh(data=8)) + 0.05
    assert state_bytes(QWEN_SHORT, Mesh(data=3, fsdp=2, tensor=2)) == 3 * 0.596e9
