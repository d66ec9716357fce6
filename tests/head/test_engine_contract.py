"""The contract between the head and its engines: custom engines, names, sequences, reasons, layouts, psums."""

import dataclasses
import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxlogp
from jaxlogp import TokenLogProbs, VocabShards, linear_log_probs, linear_policy_loss, sharded_linear_log_probs
from jaxlogp.head import (
    ChunkedEngine,
    Engine,
    FixedOrderEngine,
    HeadCall,
    HeadGradients,
    HopperEngine,
    ReferenceEngine,
    record_head_runs,
    register_engine,
)
from jaxlogp.head.registry import ENGINES
from jaxlogp.invariance import ReductionOrder, nan_unless_equal

pytestmark = pytest.mark.costly

N, H, V = 12, 16, 48
# Logits are sums of 16 products, in an order that CPUs choose by layout and program: two of them differ by at most
# 2 · 16 · 2^-24 · Σ|h w| / 0.7 < 5e-5, the softmax by that share, and gradients by that share of 48 terms below 3.
ORDER = 1e-4


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


HIDDEN, WEIGHT, TARGETS = normal(0, N, H), normal(1, V, H), jnp.asarray(np.arange(N) * 4 % V, jnp.int32)
MASK = jnp.asarray(np.arange(N) % 3 > 0)


def mesh(data, tensor, kind=AxisType.Auto):
    devices = jax.devices()[: data * tensor]
    return jax.make_mesh((data, tensor), ("data", "tensor"), axis_types=(kind, kind), devices=devices)


@dataclasses.dataclass(frozen=True)
class PlainEngine(Engine):
    """What a user would write: plain JAX, no vocabulary shards."""

    name = "plain"

    def why_not(self, call: HeadCall):
        return "it takes no vocabulary shards" if call.num_shards > 1 else None

    def forward(self, call: HeadCall):
        logits = (call.hidden @ call.weight.T).astype(jnp.float32) / call.spec.temperature
        lse = jax.nn.logsumexp(logits, axis=1)
        chosen = jnp.take_along_axis(logits, jnp.maximum(call.targets.column, 0)[:, None], axis=1)[:, 0]
        log_probs = jnp.where(call.targets.mask, chosen - lse, 0.0)
        return TokenLogProbs(log_probs, None, lse), logits

    def backward(self, call: HeadCall, kept, g):
        onehot = jax.nn.one_hot(call.targets.column, kept.shape[1])
        dz = g.log_probs[:, None] * (onehot - jax.nn.softmax(kept)) / call.spec.temperature
        return HeadGradients(dz @ call.weight, dz.T @ call.hidden, None)


def mean(engine, temperature=0.7):
    def function(hidden, weight):
        result = linear_log_probs(hidden, weight, TARGETS, mask=MASK, temperature=temperature, engine=engine)
        return jnp.sum(result.log_probs)

    return jax.jit(jax.value_and_grad(function, (0, 1)))(HIDDEN, WEIGHT)


def test_an_engine_of_ones_own_gives_values_and_gradients():
    (value, gradients), (wanted, wanted_gradients) = mean(PlainEngine()), mean("reference")
    np.testing.assert_allclose(value, wanted, rtol=0, atol=N * ORDER)
    for gradient, other in zip(gradients, wanted_gradients, strict=True):
        np.testing.assert_allclose(gradient, other, atol=ORDER)


@dataclasses.dataclass(frozen=True)
class CoarseEngine(ReferenceEngine):
    """Multiplies hidden states that are rounded to ten bits, as TF32 has them, in one of the two passes."""

    coarse_pass: str = "forward"

    def forward(self, call: HeadCall):
        return super().forward(self.rounded(call, "forward"))

    def backward(self, call: HeadCall, kept, g):
        return super().backward(self.rounded(call, "backward"), kept, g)

    def rounded(self, call: HeadCall, of_pass):
        if of_pass != self.coarse_pass:
            return call
        return dataclasses.replace(call, hidden=jax.lax.reduce_precision(call.hidden, 8, 10))


@pytest.mark.parametrize("coarse_pass", ["forward", "backward"])
def test_the_bound_of_another_order_is_no_bound_of_tf32(coarse_pass):
    """The negative control of ORDER: the least error that it has to tell from another order of the same sums."""
    (_, gradients), (_, wanted) = mean(CoarseEngine(coarse_pass)), mean("reference")
    assert max(np.abs(one - other).max() for one, other in zip(gradients, wanted, strict=True)) > 5 * ORDER


def test_an_engine_of_ones_own_serves_the_policy_loss_in_two_steps():
    @functools.partial(jax.jit, static_argnames="engine")
    def run(hidden, weight, engine):
        return linear_policy_loss(hidden, weight, TARGETS, jnp.full(N, -3.0), jnp.ones(N), MASK, engine=engine)

    with record_head_runs() as runs:
        loss, _ = run(HIDDEN, WEIGHT, engine=PlainEngine())
    wanted, _ = run(HIDDEN, WEIGHT, engine="chunked")
    np.testing.assert_allclose(loss.sum, wanted.sum, rtol=ORDER)  # of ratios: no term is below 0
    assert runs[0].gradient == "in two steps: it has no one-pass gradient"


def test_a_registered_engine_has_a_name(monkeypatch):
    monkeypatch.setattr("jaxlogp.head.registry.ENGINES", dict(ENGINES))
    register_engine("plain", PlainEngine())
    with record_head_runs() as runs:
        linear_log_probs(HIDDEN, WEIGHT, TARGETS, engine="plain")
    assert (runs[0].engine, runs[0].reason) == ("plain", "named by the caller")
    with pytest.raises(ValueError, match="^name: expected a name other than"):
        register_engine("plain", PlainEngine())
    with pytest.raises(ValueError, match="^name: expected a name other than"):
        register_engine("auto", PlainEngine())


@pytest.mark.bad_input
@pytest.mark.parametrize("engine", ["fastest", 3, object(), [], PlainEngine, None])
def test_what_is_no_engine_is_refused(engine):
    with pytest.raises(ValueError, match="^engine: expected"):
        linear_log_probs(HIDDEN, WEIGHT, TARGETS, engine=engine)
    with pytest.raises(ValueError, match="^engine: expected"):
        register_engine("other", engine)


def test_a_sequence_takes_the_first_engine_that_can_and_says_why_not_the_others():
    with record_head_runs() as runs:
        linear_log_probs(HIDDEN, WEIGHT, TARGETS, engine=("triton", "chunked", "reference"))
    assert runs[0].engine == "chunked"
    assert runs[0].reason.startswith("first of the sequence that can; triton not used: it needs")
    with pytest.raises(
        ValueError, match="^engine: expected an engine that takes the call, got triton not used: it needs"
    ):
        linear_log_probs(HIDDEN, WEIGHT, TARGETS, engine=["triton"])


def test_why_not_says_what_is_in_the_way_without_computing():
    hidden, weight = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in [(8, 64), (256, 64)])
    assert jaxlogp.head.why_not("chunked", hidden, weight) is None
    assert "needs" in jaxlogp.head.why_not("triton", hidden, weight)
    assert jaxlogp.head.why_not(PlainEngine(), hidden, weight, num_shards=2) == "it takes no vocabulary shards"


@pytest.mark.parametrize(
    "order, columns, num_shards, words",
    [
        ({}, 16, 1, "vocab_size: expected at least one id for each of 24 granules, got int 16"),
        ({}, 100, 5, "num_shards: expected a divisor of granules 24, got 5"),
        ({"vocab_tile": 64}, 300_000, 1, "vocab_tile: expected at most 4096 tiles in the vocabulary, got"),
    ],
)
def test_an_order_that_does_not_fit_is_a_sentence_and_no_error(order, columns, num_shards, words):
    hidden, weight = (jax.ShapeDtypeStruct((rows, 64), jnp.float32) for rows in (8, columns))
    engine = FixedOrderEngine(ReductionOrder(**order))
    refusal = jaxlogp.head.why_not(engine, hidden, weight, num_shards=num_shards)
    assert refusal.startswith(f"its order does not fit: {words}")


@pytest.mark.parametrize("tensor", [1, 2])
def test_the_choice_sees_the_dtype_of_the_hidden_states_over_an_axis_too(tensor):
    """With fp32_head bf16 operands suit the kernels; hidden states seen as fp32 over an axis made them refuse."""
    seen = []

    @dataclasses.dataclass(frozen=True)
    class Asked(ChunkedEngine):
        def why_not(self, call):
            # Neither JAX's version nor the device, which are other reasons.
            seen.append((call.hidden.dtype, call.num_shards, HopperEngine()._why_not_operands(call)))
            return None

    hidden, weight = normal(0, N, 64).astype(jnp.bfloat16), normal(1, V, 64).astype(jnp.bfloat16)
    run = functools.partial(sharded_linear_log_probs, mesh=mesh(1, tensor), fp32_head=True, engine=Asked())
    jax.eval_shape(run, hidden, weight, TARGETS)
    assert seen == [(jnp.bfloat16, tensor, None)]


@pytest.mark.parametrize("choice", ["named", "first of a sequence", "auto"])
def test_the_default_shards_begin_at_multiples_of_a_tile(choice, monkeypatch):
    seen = []

    @dataclasses.dataclass(frozen=True)
    class Seen(ChunkedEngine):
        def why_not(self, call):
            seen.append(call.shards)
            return None

    monkeypatch.setitem(ENGINES, "hopper", Seen())
    engine = {"named": Seen(), "first of a sequence": [Seen(), "chunked"], "auto": "auto"}[choice]
    run = functools.partial(sharded_linear_log_probs, mesh=mesh(1, 2), engine=engine)
    jax.eval_shape(run, HIDDEN, normal(1, 1000, H), TARGETS)
    assert seen == [VocabShards.from_ranges([(0, 512), (512, 1000)], 1000)]


FIXED_ORDER = FixedOrderEngine(ReductionOrder(granules=8, vocab_tile=64, row_block=64))


@pytest.mark.parametrize("engine", ["reference", "chunked", ChunkedEngine(5, 16), FIXED_ORDER], ids=str)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_both_layouts_of_the_weight_give_the_same(engine, dtype):
    def both(weight, layout):
        options = {"mask": MASK, "weight_layout": layout, "engine": engine}
        values = linear_log_probs(HIDDEN, weight, TARGETS, with_entropy=True, **options)
        one_pass, _ = linear_policy_loss(
            HIDDEN, weight, TARGETS, jnp.full(N, -4.0), jnp.ones(N), MASK, engine=engine, weight_layout=layout
        )
        return jnp.sum(values.log_probs) + jnp.sum(values.entropy) + one_pass.sum

    weight = WEIGHT.astype(dtype)
    gradients = jax.jit(jax.value_and_grad(both), static_argnums=1)
    (value, gradient), (other, transposed) = gradients(weight, "vh"), gradients(weight.T, "hv")
    if engine == FIXED_ORDER:
        chex.assert_trees_all_equal((value, gradient), (other, transposed.T))
        return
    np.testing.assert_allclose(value, other, rtol=0, atol=3 * N * ORDER)  # log-probs, entropies and ratios
    # The gradient of a bf16 weight is rounded to bf16.
    wide = (np.asarray(each, np.float32) for each in (gradient, transposed.T))
    np.testing.assert_allclose(*wide, atol=ORDER, rtol=0 if dtype == jnp.float32 else 2**-7)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_both_layouts_of_several_blocks_in_the_fixed_order_give_the_same_bits(dtype):
    """Loops of one block are unrolled by the compiler; those of three are not."""
    hidden, weight, targets = normal(2, 150, H), normal(3, V, H).astype(dtype), jnp.arange(150, dtype=jnp.int32) % V

    @functools.partial(jax.jit, static_argnames="layout")
    def run(hidden, weight, layout):
        def total(hidden, weight):
            options = {"with_entropy": True, "engine": FIXED_ORDER, "weight_layout": layout}
            values = linear_log_probs(hidden, weight, targets[: len(hidden)], **options)
            return jnp.sum(values.log_probs) + jnp.sum(values.entropy), values

        (_, values), gradients = jax.value_and_grad(total, (0, 1), has_aux=True)(hidden, weight)
        return values, gradients

    values, (d_hidden, d_weight) = run(hidden, weight, "vh")
    turned, (d_turned, d_weight_turned) = run(hidden, weight.T, "hv")
    some, (d_some, _) = run(hidden[:5], weight.T, "hv")
    np.testing.assert_array_equal(d_weight_turned.T, d_weight)
    for whole, same, part in zip((*values[:2], d_hidden), (*turned[:2], d_turned), (*some[:2], d_some), strict=True):
        np.testing.assert_array_equal(same, whole)
        np.testing.assert_array_equal(part, whole[:5])


@pytest.mark.parametrize("engine", [ChunkedEngine(64, 512), FIXED_ORDER], ids=str)
def test_a_transposed_weight_is_not_copied(engine):
    """Temporaries of the whole step stay below one copy of the weight."""
    hidden, weight = jnp.ones((64, 128)), jnp.ones((128, 8192))
    targets, ones = jnp.zeros(64, jnp.int32), jnp.ones(64)

    def loss(weight):
        result = linear_log_probs(hidden, weight, targets, engine=engine, weight_layout="hv")
        return jnp.sum(result.log_probs * ones)

    compiled = jax.jit(jax.grad(loss)).lower(weight).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < weight.nbytes // 2


@pytest.mark.bad_input
def test_an_unknown_layout_is_refused():
    with pytest.raises(ValueError, match=r"^weight_layout: expected one of \('vh', 'hv'\), got 'HV'"):
        linear_log_probs(HIDDEN, WEIGHT, TARGETS, weight_layout="HV")


# Explicit psums


def over_mesh(function, data=2, tensor=2):
    """``function(hidden, weight, targets)`` over both axes, with the sum over "data" of what it returns."""
    return jax.shard_map(
        lambda *operands: jax.lax.psum(function(*operands), "data"),
        mesh=mesh(data, tensor),
        in_specs=(P("data"), P("tensor"), P("data")),
        out_specs=P(),
    )


def all_reduces(function, *operands):
    """Shapes of the all-reduces of the compiled module, scalars left out; one of several operands counts each."""
    text = jax.jit(function).lower(*operands).compile().as_text()
    lines = re.findall(r"= (.*?) all-reduce(?:-start)?\(", text)
    shapes = [shape for line in lines for shape in re.findall(r"\w+\[([\d,]*)\]", line)]
    return sorted(shape for shape in shapes if shape)


def log_prob_sum(hidden, weight, targets):
    return jnp.sum(linear_log_probs(hidden, weight, targets, axis_name="tensor", engine="chunked").log_probs)


def one_pass_sum(hidden, weight, targets):
    ones = jnp.ones_like(hidden[:, 0])
    arguments = targets, -3.0 * ones, ones, ones > 0
    return linear_policy_loss(hidden, weight, *arguments, axis_name="tensor", engine="chunked")[0].sum


@pytest.mark.parametrize("function", [log_prob_sum, one_pass_sum])
def test_the_backward_has_one_psum_of_each_gradient(function):
    forward = all_reduces(over_mesh(function), HIDDEN, WEIGHT, TARGETS)
    both = all_reduces(jax.grad(over_mesh(function), (0, 1)), HIDDEN, WEIGHT, TARGETS)
    tokens = [shape for shape in both if shape not in (f"{N // 2},{H}", f"{V // 2},{H}")]
    assert len(forward) == 2, forward  # one pmax and one psum of token-sized vectors
    assert tokens == forward, "the backward adds no collective of its own but the two gradients'"
    assert both.count(f"{N // 2},{H}") == 1, "dHidden over the vocabulary axis"
    assert both.count(f"{V // 2},{H}") == 1, "dWeight over the data axis"


@pytest.mark.bad_input
@pytest.mark.parametrize("function", [log_prob_sum, one_pass_sum])
def test_a_weight_that_is_the_same_on_all_shards_is_refused(function):
    """It gave log-probs that were low by the logarithm of the number of shards, without a word."""
    mapped = jax.shard_map(function, mesh=mesh(1, 2), in_specs=(P(), P(), P()), out_specs=P())
    with pytest.raises(ValueError, match="^weight: expected the local shard of each rank of axis 'tensor'"):
        jax.eval_shape(mapped, HIDDEN, WEIGHT, TARGETS)


def test_over_an_axis_of_one_rank_a_whole_weight_is_right():
    mapped = jax.shard_map(log_prob_sum, mesh=mesh(1, 1), in_specs=(P(), P(), P()), out_specs=P())
    wanted = jnp.sum(linear_log_probs(HIDDEN, WEIGHT, TARGETS, engine="chunked").log_probs)
    np.testing.assert_array_equal(jax.jit(mapped)(HIDDEN, WEIGHT, TARGETS), wanted)


def test_hidden_states_that_differ_over_the_vocabulary_axis_are_found():
    def local(hidden, weight, targets):
        moved = jnp.where(jnp.arange(N) == 5, jax.lax.axis_index("tensor").astype(jnp.float32), 0.0)
        hidden = nan_unless_equal(hidden + moved[:, None], "tensor")
        return linear_log_probs(hidden, weight, targets, axis_name="tensor", engine="chunked").log_probs

    mapped = jax.shard_map(local, mesh=mesh(1, 2), in_specs=(P(), P("tensor"), P()), out_specs=P())
    found = np.asarray(jax.jit(mapped)(HIDDEN, WEIGHT, TARGETS))
    assert np.flatnonzero(np.isnan(found)).tolist() == [5]
