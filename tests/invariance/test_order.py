"""The numeric identity, the tree, exact arithmetic, and gradients through fixed_order_sum."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxlogp import VocabShards, linear_log_probs
from jaxlogp import sharded_linear_log_probs as sharded
from jaxlogp.head import FixedOrderEngine, FixedOrderHopperEngine
from jaxlogp.invariance import ReductionOrder, fixed_order_sum
from jaxlogp.invariance.exact import no_negative_zero, one_minus_square, product, split
from jaxlogp.invariance.order import fold_tree
from tests.invariance.harness import FIXED, ORDER, broken, case, tensor_mesh

floats = st.floats(-1e6, 1e6, width=32).filter(lambda x: x == 0 or abs(x) > 1e-20)


# --- the identity ------------------------------------------------------------------------------------------


@given(vocab=st.integers(24, 200_000), size=st.sampled_from((1, 2, 3, 4, 6, 8, 12, 24)))
@settings(max_examples=25)
def test_every_shard_owns_whole_granules(vocab, size):
    order = ReductionOrder()
    edges, shards = order.edges(vocab), order.shards(vocab, size)
    assert edges[0] == 0 and edges[-1] == vocab and len(edges) == 25
    assert {start for start, _ in shards.ranges} <= set(edges)
    widths = np.diff(edges)
    assert widths.max() - widths.min() <= 1
    if vocab % size == 0:
        assert shards == VocabShards.even(vocab, size)
    tile = order.tile(vocab)
    assert tile % 16 == 0 and tile <= order.vocab_tile
    assert -(-int(widths.max()) // tile) * tile <= 1.1 * widths.max() + 16


def test_tiles_of_known_vocabularies():
    """A tile is part of the arithmetic: with other columns stored results would have other bits."""
    order = ReductionOrder()
    assert [order.tile(vocab) for vocab in (1000, 32_000, 128_256, 262_144)] == [48, 672, 896, 912]


def test_the_identity_survives_a_configuration_file():
    order = ReductionOrder(granules=8, vocab_tile=256, row_block=64, dtype="bfloat16")
    assert ReductionOrder.from_dict(order.to_dict()) == order
    assert ReductionOrder.from_dict(order.to_dict()).digest() == order.digest()
    others = [ReductionOrder(16, 256, 64, "bfloat16"), ReductionOrder(8, 128, 64, "bfloat16")]
    others += [ReductionOrder(8, 256, 128, "bfloat16"), ReductionOrder(8, 256, 64, "float32")]
    assert len({order.digest(), *(other.digest() for other in others)}) == 5


@given(vocab=st.integers(14_337, 200_000), size=st.sampled_from((1, 2, 4, 8)))
@settings(max_examples=25)
def test_granules_of_hopper_are_whole_tiles_and_never_meet_in_one(vocab, size):
    order = ReductionOrder.for_hopper()
    columns, shards = order.granule_columns(vocab), order.shards(vocab, size)
    assert columns % 256 == 0 and columns * 8 >= vocab
    # Every rank's granules begin at multiples of the same width, whatever the number of ranks.
    assert {start % (columns * (8 // size)) for start, _ in shards.ranges} == {0}
    assert shards.max_width <= columns * (8 // size)


@pytest.mark.bad_input
def test_an_order_of_hopper_has_its_sizes_and_no_other_engines():
    order = ReductionOrder.for_hopper(4)
    assert order.digest() != ReductionOrder(4, 256, 128, "bfloat16").digest()
    assert ReductionOrder.from_dict(order.to_dict()) == order
    for changes in ({"vocab_tile": 512}, {"row_block": 64}, {"dtype": "float32"}, {"dtype": None}):
        with pytest.raises(ValueError, match="^(vocab_tile|row_block|dtype): expected .* of engine hopper"):
            dataclasses.replace(order, **changes)
    with pytest.raises(ValueError, match="^engine: expected fixed_order or hopper, got str 'triton'"):
        dataclasses.replace(order, engine="triton")
    # Four granules of one tile hold these ids: the last of four shards would have none.
    with pytest.raises(ValueError, match="^num_shards: expected fewer, so that each has one of the 700 ids"):
        order.shards(700, 4)
    operands = jnp.ones((4, 8)), jnp.ones((512, 8)), jnp.zeros(4, jnp.int32)
    for engine, other in ((FixedOrderEngine(order), "hopper"), (FixedOrderHopperEngine(order=ORDER), "fixed_order")):
        with pytest.raises(ValueError, match=f"its order is of engine {other}"):
            linear_log_probs(*operands, engine=engine)


def test_one_process_agrees_with_itself():
    ORDER.check_across_processes()


@pytest.mark.bad_input
def test_ranks_that_disagree_are_named():
    digests = np.asarray([ORDER.digest(), ReductionOrder(8).digest(), ORDER.digest()], np.uint32)
    with pytest.raises(ValueError, match=r"order.*granules=24.*\[1\]"):
        ORDER.require_agreement(digests)


def in_shard_map(engine, size, vocab_size, vocab=None, grad=False, **options):
    """One call on ``size`` shards whose blocks have vocab_size / size rows."""
    data = case(vocab_size, 8)

    def local(hidden, weight, targets):
        def total(hidden):
            found = linear_log_probs(
                hidden, weight, targets, axis_name="tensor", vocab=vocab, engine=engine, out_of_vocab="zero"
            )
            return jnp.sum(found.log_probs)

        return jax.grad(total)(hidden) if grad else total(hidden)

    mapped = jax.shard_map(local, mesh=tensor_mesh(size), in_specs=(P(), P("tensor"), P()), out_specs=P(), **options)
    return jax.jit(mapped)(data["hidden"], data["weight"], data["targets"])


REFUSED = {
    "no granules": (lambda: ReductionOrder(granules=0), "granules"),
    "granules that are a truth value": (lambda: ReductionOrder(granules=True), "granules"),
    "a tile that is no multiple of 64": (lambda: ReductionOrder(vocab_tile=100), "vocab_tile"),
    "a tile whose sum would not fit": (lambda: ReductionOrder(vocab_tile=4160), "vocab_tile"),
    "more tiles than can be added up": (
        lambda: in_shard_map(FixedOrderEngine(ReductionOrder(granules=4100)), 1, 4100),
        "vocab_tile",
    ),
    "a block of one row": (lambda: ReductionOrder(row_block=1), "row_block"),
    "an unknown dtype": (lambda: ReductionOrder(dtype="int8"), "dtype"),
    "a number of shards that does not divide": (lambda: ORDER.shards(257, 5), "num_shards"),
    "more granules than ids": (lambda: ORDER.shards(23, 1), "vocab_size"),
    "a field missing": (lambda: ReductionOrder.from_dict({"granules": 24}), "values"),
    "shards off the granules": (lambda: in_shard_map(FIXED, 4, 256, VocabShards.from_ranges(
        [(0, 64), (64, 127), (127, 191), (191, 256)], 256)), "vocab"),
    "a mesh of five": (lambda: in_shard_map(FIXED, 5, 255), "num_shards"),
    "operands of another dtype": (
        lambda: in_shard_map(FixedOrderEngine(ReductionOrder(dtype="bfloat16")), 2, 256),
        "engine",
    ),
    "a weight sharded over the data axis": (
        lambda: sharded(*(case(256, 8)[name] for name in ("hidden", "weight", "targets")), engine=FIXED,
                        mesh=jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2),
                        weight_axis="data"),
        "weight_axis",
    ),
    "differentiation without replication types": (
        lambda: in_shard_map(FIXED, 4, 256, VocabShards.even(256, 4), grad=True, check_vma=False),
        "axis_name",
    ),
    "a sum of integers": (lambda: fixed_order_sum(jnp.arange(3), "tensor"), "x"),
}  # fmt: skip


@pytest.mark.bad_input
@pytest.mark.parametrize("name", REFUSED)
def test_what_would_break_the_promise_is_refused(name):
    call, argument = REFUSED[name]
    with pytest.raises(ValueError, match=rf"^(engine: .* does not fit: )?{argument}: expected .*, got "):
        call()


@pytest.mark.bad_input
def test_hidden_states_typed_as_varying_over_the_vocabulary_axis_have_no_fixed_order_gradient():
    data = case(256, 8)

    def local(hidden, weight, targets):
        hidden = jax.lax.pcast(hidden, ("tensor",), to="varying")
        return jax.grad(
            lambda h: jnp.sum(
                linear_log_probs(h, weight, targets, axis_name="tensor", engine=FIXED, out_of_vocab="zero").log_probs
            )
        )(hidden)

    mapped = jax.shard_map(local, mesh=tensor_mesh(4), in_specs=(P(), P("tensor"), P()), out_specs=P("tensor"))
    with pytest.raises(ValueError, match="^hidden: expected an array that is the same on all vocabulary shards"):
        jax.jit(mapped)(data["hidden"], data["weight"], data["targets"])


@pytest.mark.costly
def test_the_forward_without_replication_types_is_the_same():
    wanted = np.asarray(jax.jit(lambda: in_shard_map(FIXED, 4, 256))())
    assert (
        np.asarray(jax.jit(lambda: in_shard_map(FIXED, 4, 256, VocabShards.even(256, 4), check_vma=False))()).tobytes()
        == wanted.tobytes()
    )


@functools.cache
def global_results(sizes, axis_type):
    """128 tokens: on two data ranks one block of rows each, so that even the weight's gradient is that of one rank."""
    data = case(257, 128)
    mesh = jax.make_mesh(
        sizes, ("data", "tensor"), axis_types=(axis_type,) * 2, devices=jax.devices()[: math.prod(sizes)]
    )

    def total(hidden, weight, bias):
        found = sharded(
            hidden, weight, data["targets"], mesh=mesh, mask=data["mask"], bias=bias, with_entropy=True, engine=FIXED
        )
        return jnp.sum(found.log_probs * data["g_lp"] + found.entropy * data["g_entropy"]), found

    with jax.set_mesh(mesh):
        run = jax.jit(jax.grad(total, argnums=(0, 1, 2), has_aux=True))
        parts, found = run(data["hidden"], data["weight"], data["bias"])
    names = ("log_probs", "entropy", "hidden", "weight", "bias")
    return {
        name: np.asarray(value) for name, value in zip(names, (found.log_probs, found.entropy, *parts), strict=True)
    }


@pytest.mark.slow
@pytest.mark.parametrize("sizes, axis_type", [((2, 4), AxisType.Auto), ((2, 3), AxisType.Explicit)], ids=str)
def test_global_arrays_on_data_and_tensor_meshes(sizes, axis_type):
    assert broken(global_results(sizes, axis_type), global_results((1, 1), AxisType.Auto)) == []


# --- the tree ----------------------------------------------------------------------------------------------


@given(values=st.lists(floats, min_size=1, max_size=40), padding=st.integers(0, 20))
@settings(max_examples=25)
def test_zeros_at_the_end_change_nothing_and_aligned_halves_may_be_folded_first(values, padding):
    values = np.asarray(values, np.float32)[:, None]
    whole = np.asarray(fold_tree(values, np.add))
    assert (
        np.asarray(fold_tree(np.pad(values, [(0, padding), (0, 0)]), np.add) + 0.0).tobytes() == (whole + 0.0).tobytes()
    )
    for size in (2, 4, 8):
        groups = [values[start : start + size] for start in range(0, len(values), size)]
        nodes = np.stack([fold_tree(group, np.add) for group in groups])
        assert np.asarray(fold_tree(nodes, np.add)).tobytes() == whole.tobytes()


def test_the_tree_is_not_a_running_sum():
    """(1 + e) + (e + e) in fp32 with e half an ulp: the running sum stays at 1."""
    e = 2.0**-24
    values = jnp.asarray([1.0, e, e, e], jnp.float32)
    assert float(fold_tree(values, jnp.add)) == 1.0 + 2 * e
    assert float(np.add.accumulate(np.asarray(values))[-1]) == 1.0


@pytest.mark.parametrize("outside", [False, True], ids=["inside", "outside"])
def test_the_gradient_of_a_fixed_order_sum_is_not_counted_once_a_rank(outside):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 5)), jnp.float32)
    specs = {"mesh": tensor_mesh(8), "in_specs": P("tensor")}
    if outside:
        mapped = jax.shard_map(lambda x: jnp.sum(fixed_order_sum(x[0], "tensor") ** 2), out_specs=P(), **specs)
        gradient = jax.jit(jax.grad(mapped))(x)
    else:
        local = jax.grad(lambda x: jnp.sum(fixed_order_sum(x[0], "tensor") ** 2))
        gradient = jax.jit(jax.shard_map(local, out_specs=P("tensor"), **specs))(x)
    wanted = np.broadcast_to(2 * np.asarray(x, np.float64).sum(axis=0), x.shape)
    np.testing.assert_allclose(gradient, wanted, rtol=1e-5)


@pytest.mark.bad_input
def test_the_gradient_of_a_fixed_order_sum_needs_replication_types():
    local = jax.grad(lambda x: jnp.sum(fixed_order_sum(x, "tensor")))
    mapped = jax.shard_map(local, mesh=tensor_mesh(2), in_specs=P("tensor"), out_specs=P("tensor"), check_vma=False)
    with pytest.raises(ValueError, match="check_vma"):
        mapped(jnp.ones(4, jnp.float32))


# --- exact arithmetic --------------------------------------------------------------------------------------


def significant_bits(x):
    mantissa = abs(int(math.ldexp(math.frexp(float(x))[0], 24)))
    return 0 if mantissa == 0 else 24 - (mantissa & -mantissa).bit_length() + 1


@given(x=floats)
@settings(max_examples=100)
def test_halves_are_short_and_add_up(x):
    high, low = (np.asarray(half) for half in split(jnp.float32(x)))
    assert float(high) + float(low) == np.float32(x)
    assert max(significant_bits(high), significant_bits(low)) <= 12


@given(a=floats, b=floats)
@example(a=5.595257104696671e-20, b=5.595257104696671e-20)
@example(a=1.1e-19, b=1.3e-19)  # a normal product of parts whose own products are none
@settings(max_examples=100)
def test_products_are_products(a, b):
    a, b = np.float32(a), np.float32(b)
    wanted = float(a) * float(b)
    # Below fp32's smallest normal number a result may be flushed to 0.
    bound = 2 * 2**-24 * abs(wanted) if abs(wanted) > 2.0**-126 else 2.0**-126
    assert abs(float(product(jnp.float32(a), jnp.float32(b))) - wanted) <= bound


def test_products_of_infinities_are_infinite():
    seen = product(jnp.float32([np.inf, -np.inf, 3e38, np.inf]), jnp.float32([2.0, 0.5, 3e38, 0.0]))
    np.testing.assert_array_equal(seen, np.float32([np.inf, -np.inf, np.inf, np.nan]))


@given(x=st.floats(-1, 1, width=32))
@settings(max_examples=50)
def test_one_minus_square(x):
    assert abs(float(one_minus_square(jnp.float32(x))) - (1 - np.float64(np.float32(x)) ** 2)) <= 3 * 2**-24


def test_negative_zeros_go_and_everything_else_stays():
    x = np.asarray([-0.0, 0.0, -1.5, np.nan, -np.inf, 1e-30], np.float32)
    seen = np.asarray(jax.jit(no_negative_zero)(x))
    assert seen.tobytes() == np.where(x == 0, np.float32(0), x).tobytes() and not np.signbit(seen[0])
    # Parts that are all -0.0 and padding of 0.0 must meet as they would without padding.
    run = jax.shard_map(
        lambda x: fixed_order_sum(x, "tensor"), mesh=tensor_mesh(3), in_specs=P("tensor"), out_specs=P()
    )
    assert not np.signbit(jax.jit(run)(jnp.full(3, -0.0))).any()
