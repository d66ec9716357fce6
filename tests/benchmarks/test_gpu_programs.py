"""The programs for GPUs, as far as a CPU can tell: the timed functions are correct, and what they launch can be lowered."""

import functools

import jax
import jax.numpy as jnp
import pytest

from benchmarks import beside_product, engines, layouts, module_text
from benchmarks.beside_product import PRODUCT, Timed
from benchmarks.cases import make_case
from benchmarks.clock import Timing
from benchmarks.hopper import train_head
from jaxlogp import ChunkedEngine, linear_policy_loss
from jaxlogp.mosaic_gpu import why_not_available

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


@pytest.mark.slow
def test_both_layouts_of_the_weight_beside_one_product(capsys):
    layouts.measure(case(), ChunkedEngine(), turns=1)
    lines = capsys.readouterr().out.splitlines()
    assert sum("bits of both layouts the same: " in line for line in lines) == 3
    assert sum(" ms " in line for line in lines) == 7


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


def lowered(function, *operands):
    return (
        jax.jit(function)
        .trace(*operands)
        .lower(lowering_platforms=("cuda",))
        .as_text()
        .count("custom_call @mosaic_gpu")
    )


@pytest.mark.slow
@pytest.mark.skipif(why_not_available() is not None, reason=str(why_not_available()))
def test_the_parts_that_are_timed_lower_for_gpus():
    from benchmarks.hopper import backward_parts, forward_variants, one_pass_parts
    from jaxlogp.head.hopper.tiles import TileConfig, head_tiles

    some = make_case("", 256, 64, 4 * backward_parts.CHUNK, "bfloat16")
    tiles, config = head_tiles(64), TileConfig()
    dz = jnp.zeros((256, backward_parts.CHUNK), jnp.bfloat16)
    assert lowered(backward_parts.dz(some, config), some.hidden, some.weight) == 1
    # One more makes the result without writing it.
    assert lowered(backward_parts.d_hidden(some, config), dz, some.weight) == backward_parts.CHUNKS
    assert lowered(backward_parts.d_weight(some, config), dz, some.hidden) == backward_parts.CHUNKS + 1
    assert lowered(forward_variants.variant(some, config), some.hidden, some.weight, some.targets) == 1
    for part in (one_pass_parts.statistics(some, tiles, True), one_pass_parts.statistics(some, tiles, False)):
        assert lowered(part.func, *part.args) == 1
    exp = jnp.zeros((256, 4 * backward_parts.CHUNK), jnp.bfloat16)
    for part in (one_pass_parts.d_hidden(exp, some, tiles), one_pass_parts.d_weight(exp, some, tiles)):
        assert lowered(part.func, *part.args) > 1
