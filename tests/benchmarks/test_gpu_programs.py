"""The programs for GPUs, as far as a CPU can tell: the timed functions are correct."""

import functools

import jax
import pytest

from benchmarks import beside_product, engines, module_text
from benchmarks.beside_product import PRODUCT, Timed
from benchmarks.cases import make_case
from benchmarks.clock import Timing
from benchmarks.hopper import train_head
from jaxlogp import linear_policy_loss
from jaxlogp.head import ChunkedEngine

WEIGHT = (200, 48)


@functools.cache
def case():
    return make_case("small", 64, WEIGHT[1], WEIGHT[0], "float32")


@pytest.mark.slow
def test_engines_beside_one_product_and_what_fails_is_said(capsys):
    class Broken(ChunkedEngine):
        def backward(self, call, kept, g):
            raise RuntimeError("no room")

    engines.measure(case(), {"chunked": ChunkedEngine(), "broken": Broken()}, turns=1)
    lines = capsys.readouterr().out.splitlines()
    (errors,) = [line for line in lines if "chunked fwd+bwd: errors" in line]
    # fp32 roundings of logits of size about 6; of log-probs, entropies and both gradients.
    assert all(float(x) < 1e-5 for x in errors.split("errors ")[1].split(",")[0].split())
    assert errors.endswith("run to run bitwise True")
    assert any("broken fwd+bwd failed: no room" in line for line in lines)
    for name in (PRODUCT, "chunked forward", "chunked fwd+bwd", "broken forward"):
        assert sum(f"small {name} " in line and " ms " in line for line in lines) == 1


def test_times_are_of_what_is_done_once(capsys, monkeypatch):
    def known(calls, turns, at_least):
        return {name: Timing(0.002 if name == PRODUCT else 0.012, turns) for name in calls}, {}

    monkeypatch.setattr(beside_product, "time_in_turns", known)
    found = beside_product.print_times(case(), {"some": Timed(lambda: None, "a note", repeats=4)})
    assert found == {PRODUCT: 1.0, "some": pytest.approx(1.5)}
    assert "3.000 ms  1.500 x  a note" in capsys.readouterr().out


def multiplications(function, sizes):
    """How often the compiled function of a train head's operands multiplies the gradient of a shard of the weight."""
    text = jax.jit(function).lower(*train_head.operands(case(), packed=False)).compile().as_text()
    return module_text.multiplications(text, (WEIGHT[0] // sizes[1], WEIGHT[1]))


@pytest.mark.parametrize("sizes", [(1, 1), (1, 2)])
def test_a_cotangent_of_one_multiplies_no_gradient_of_the_weight(sizes):
    loss = train_head.head_loss(linear_policy_loss, "chunked", sizes=sizes)
    assert multiplications(train_head.head_step(loss), sizes) == 0

    def of_a_multiple(hidden, weight, *per_token):
        return jax.grad(lambda h, w: 3.0 * loss(h, w, *per_token)[0], (0, 1))(hidden, weight)

    assert multiplications(of_a_multiple, sizes) > 0
