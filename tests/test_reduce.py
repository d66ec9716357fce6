"""WeightedSum and the masked reductions: sums and counts stay together, masked entries have no effect."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxlogp import WeightedSum, masked_count, masked_max, masked_mean, masked_min, masked_sum, weighted_sum
from tests import oracle

# At most 58 labels; the sum of their magnitudes is at most 8 times that of the values, or 1.
SUM_ERROR = oracle.fp32_bound(8.0, 58)


def case(shape=(8, 12), seed=0):
    rng = np.random.default_rng(seed)
    mask = rng.random(shape) < 0.6
    values = rng.normal(size=shape).astype(np.float32)
    values[~mask] = rng.choice([np.nan, np.inf, -np.inf, 1e38], size=int((~mask).sum()))
    return values, mask


def data_mesh(size=8):
    return jax.make_mesh((size,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:size])


class MaskedReductions(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True)
    def test_values_match_the_oracle_with_nan_and_inf_at_masked_places(self):
        values, mask = case()
        total, count, mean, top, bottom = self.variant(
            lambda v, m: (masked_sum(v, m), masked_count(v, m), masked_mean(v, m), masked_max(v, m), masked_min(v, m))
        )(jnp.asarray(values), jnp.asarray(mask))
        assert oracle.scaled_error(total, oracle.masked_sum(values, mask)) < SUM_ERROR
        assert int(count) == oracle.masked_count(mask) and count.dtype == jnp.int32
        assert oracle.scaled_error(mean, oracle.masked_mean(values, mask)) < SUM_ERROR
        assert float(top) == values[mask].max() and float(bottom) == values[mask].min()

    @chex.variants(with_jit=True, without_jit=True)
    def test_weighted_sum_is_the_sum_and_the_count(self):
        values, mask = case()
        result = self.variant(weighted_sum)(jnp.asarray(values), jnp.asarray(mask))
        assert isinstance(result, WeightedSum)
        assert result.sum.dtype == jnp.float32 and result.count.dtype == jnp.int32
        assert oracle.scaled_error(result.sum, oracle.masked_sum(values, mask)) < SUM_ERROR
        assert int(result.count) == oracle.masked_count(mask)
        chex.assert_trees_all_close(result.mean(), jnp.float32(oracle.masked_mean(values, mask)), rtol=SUM_ERROR)


def test_all_masked_gives_zero_and_the_identities():
    values, mask = jnp.full((4,), jnp.nan, jnp.float32), jnp.zeros((4,), bool)
    assert float(masked_sum(values, mask)) == 0.0
    assert int(masked_count(values, mask)) == 0
    assert float(masked_mean(values, mask)) == 0.0
    assert float(weighted_sum(values, mask).mean()) == 0.0
    assert float(masked_max(values, mask)) == -np.inf
    assert float(masked_min(values, mask)) == np.inf


def test_gradients_are_the_mask_and_zero_where_masked():
    values, mask = case()
    values, mask = jnp.asarray(values), jnp.asarray(mask)
    np.testing.assert_array_equal(jax.grad(masked_sum)(values, mask), np.asarray(mask, np.float32))
    gradient = jax.grad(masked_mean)(values, mask)
    np.testing.assert_allclose(gradient, np.asarray(mask) / np.asarray(mask).sum(), rtol=1e-6)  # one fp32 division
    all_masked = jax.grad(masked_mean)(values, jnp.zeros_like(mask))
    np.testing.assert_array_equal(all_masked, np.zeros(values.shape))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_low_precision_values_are_summed_in_fp32(dtype):
    # 4096 ones and 4096 quarters: a bf16 or fp16 accumulator stops growing long before 5120.
    values = jnp.asarray(np.repeat([1.0, 0.25], 4096), dtype)
    total = masked_sum(values, jnp.ones(values.shape, bool))
    assert total.dtype == jnp.float32
    assert float(total) == 5120.0


def test_counts_beyond_the_integers_of_float32():
    mask = jnp.ones((2**24 + 3,), bool)
    assert int(masked_count(mask, mask)) == 2**24 + 3
    part = WeightedSum(jnp.float32(1.0), jnp.int32(2**24))
    assert int((part + WeightedSum(jnp.float32(0.0), jnp.int32(1))).count) == 2**24 + 1


def test_added_parts_equal_the_whole_and_a_mean_of_means_does_not():
    values, mask = case((12,), seed=3)
    mask[:6] = [True, False, False, False, False, False]
    mask[6:] = True
    values = np.where(mask, np.abs(np.nan_to_num(values, posinf=1.0, neginf=1.0)).clip(0, 5) + np.arange(12), np.nan)
    values = values.astype(np.float32)
    parts = [weighted_sum(jnp.asarray(values[cut]), jnp.asarray(mask[cut])) for cut in (slice(0, 6), slice(6, 12))]
    whole = oracle.masked_mean(values, mask)
    assert oracle.scaled_error((parts[0] + parts[1]).mean(), whole) < SUM_ERROR
    assert abs(float(parts[0].mean() + parts[1].mean()) / 2 - whole) > 0.1


def test_sum_builtin_and_tree_functions_work():
    part = WeightedSum(jnp.float32(1.5), jnp.int32(2))
    doubled = jax.tree.map(lambda x: x + x, part)
    assert isinstance(doubled, WeightedSum) and float(doubled.sum) == 3.0 and int(doubled.count) == 4
    total = part + part + part
    assert float(total.mean()) == 0.75 and int(total.count) == 6


def test_grad_divisor_changes_the_gradient_and_not_the_value():
    values, mask = jnp.asarray([1.0, 2.0, 6.0], jnp.float32), jnp.asarray([True, True, True])

    def mean(v, divisor):
        plain = weighted_sum(v, mask)
        return WeightedSum(plain.sum, plain.count, divisor).mean()

    for divisor, slope in ((None, 1 / 3), (6, 1 / 6), (0.5, 2.0)):
        value, gradient = jax.value_and_grad(functools.partial(mean, divisor=divisor))(values)
        assert float(value) == 3.0
        np.testing.assert_allclose(gradient, np.full(3, slope), rtol=1e-6)  # one fp32 division
        nothing = jax.grad(lambda x, divisor=divisor: WeightedSum(x, jnp.int32(0), divisor).mean())
        assert float(nothing(jnp.float32(1.0))) == 0.0


@pytest.mark.bad_input
def test_a_count_that_overflows_over_all_ranks_is_refused():
    """Each of eight ranks has 2^29 elements, and an int32 count holds fewer than 2^31."""
    count = over_data(functools.partial(masked_count, axis_name="data"))
    assert jax.eval_shape(count, jax.ShapeDtypeStruct((2**30,), np.bool_)).dtype == np.int32
    with pytest.raises(ValueError, match="^mask: expected at most 2147483647 elements over all ranks"):
        jax.eval_shape(count, jax.ShapeDtypeStruct((2**32,), np.bool_))


@pytest.mark.parametrize("reduction", [masked_sum, masked_mean, masked_max, masked_min])
def test_values_of_16_bits_are_reduced_in_fp32(reduction):
    assert reduction(jnp.asarray([1.0, 2.0], jnp.bfloat16)).dtype == jnp.float32


@pytest.mark.bad_input
@pytest.mark.parametrize("divisor", [0, 0.0, -1.0, np.inf, np.nan, True, jnp.float32(2.0), "2"], ids=repr)
def test_a_grad_divisor_that_cannot_divide_is_refused(divisor):
    with pytest.raises(ValueError, match="^grad_divisor: expected a finite Python number above 0, or None, got "):
        WeightedSum(jnp.float32(1.0), jnp.int32(1), divisor)


def test_a_psum_of_the_tree_leaves_the_grad_divisor_alone():
    """A collective or a sum over a stacked tree sees two leaves: a divisor among them was multiplied by the ranks."""
    part = WeightedSum(jnp.float32(1.5), jnp.int32(2), 6)
    assert [x.shape for x in jax.tree.leaves(part)] == [(), ()]
    mapped = jax.shard_map(lambda x: jax.lax.psum(x, "data"), mesh=data_mesh(8), in_specs=P(), out_specs=P())
    total = jax.jit(mapped)(part)
    assert (float(total.sum), int(total.count), total.grad_divisor) == (12.0, 16, 6)
    assert (total + total).grad_divisor == 6
    with pytest.raises(ValueError, match="^other.grad_divisor: expected the same as self's, 6, got None"):
        total + WeightedSum(jnp.float32(1.0), jnp.int32(1))


@pytest.mark.bad_input
@pytest.mark.parametrize("reduction", [masked_sum, masked_mean, masked_max, masked_min, weighted_sum])
@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.uint32, np.bool_])
def test_integers_that_fp32_would_round_are_refused(reduction, dtype):
    """uint8 values had a minimum of -253, and 2^24 + 1 lost its last bit."""
    with pytest.raises(ValueError, match="^values: expected an array of a floating-point dtype, got "):
        reduction(jnp.asarray([1, 0, 1], dtype), jnp.asarray([True, False, True]))


@pytest.mark.bad_input
@pytest.mark.parametrize("reduction", [masked_sum, masked_count, masked_mean, masked_max, masked_min, weighted_sum])
def test_lists_and_arrays_without_elements_are_refused(reduction):
    with pytest.raises(ValueError, match="^values: expected an array"):
        reduction([1.0, 2.0])
    with pytest.raises(ValueError, match=r"^values: expected at least one element, got an empty array of shape \(0,\)"):
        reduction(jnp.zeros(0, jnp.float32))
    with pytest.raises(ValueError, match="^mask: expected an array of dtype bool"):
        reduction(jnp.zeros(2, jnp.float32), [True, False])


def over_data(function, **options):
    """function(values) under shard_map over eight ranks, the result declared the same on all of them."""
    return jax.shard_map(function, mesh=data_mesh(8), in_specs=P("data"), out_specs=P(), **options)


UNCHECKED = {
    "psum, mean": lambda v: weighted_sum(v).psum("data").mean(),
    "psum, sum": lambda v: weighted_sum(v).psum(("data",)).sum,
    "weighted_sum": lambda v: weighted_sum(v, axis_name="data").mean(),
    "masked_sum": lambda v: masked_sum(v, axis_name="data"),
    "masked_mean": lambda v: masked_mean(v, axis_name="data"),
}


@pytest.mark.bad_input
@pytest.mark.parametrize("name", UNCHECKED)
def test_a_gradient_without_replication_types_is_refused(name):
    """There a psum is its own transpose: gradients taken inside came out eight times too large."""
    function, values = UNCHECKED[name], jnp.arange(16, dtype=jnp.float32)
    refusal = r"^axis_name: expected shard_map\(check_vma=True\) to differentiate over axis 'data', got check_vma=False"
    with pytest.raises(ValueError, match=refusal):
        jax.jit(jax.grad(over_data(function, check_vma=False)))(values)
    inside = jax.shard_map(
        jax.grad(function), mesh=data_mesh(8), in_specs=P("data"), out_specs=P("data"), check_vma=False
    )
    with pytest.raises(ValueError, match=refusal):
        jax.jit(inside)(values)
    # Values alone are right, and so is a gradient with types, in both modes of differentiation.
    value = jax.jit(over_data(function, check_vma=False))(values)
    wanted, slope = jax.jit(jax.value_and_grad(over_data(function)))(values)
    assert float(value) == float(wanted) and len(set(np.asarray(slope).tolist())) == 1
    forward = jax.jit(lambda v: jax.jvp(over_data(function), (v,), (jnp.ones_like(v),))[1])(values)
    np.testing.assert_allclose(forward, slope[0] * values.size, rtol=1e-6)  # one fp32 division


@pytest.mark.bad_input
@pytest.mark.parametrize("reduction", [masked_sum, masked_count, masked_mean, masked_max, masked_min, weighted_sum])
def test_values_and_mask_on_two_devices_are_refused(reduction):
    values = jax.device_put(jnp.ones(4, jnp.float32), jax.devices()[0])
    mask = jax.device_put(jnp.ones(4, bool), jax.devices()[1])
    with pytest.raises(ValueError, match="device"):
        reduction(values, mask)


@pytest.mark.parametrize("size", [2, 8])
def test_over_a_mesh_every_reduction_is_the_global_one(size):
    values, mask = case()
    mask[: 8 // size] = False  # the first rank has no active token at all
    values[np.isnan(values) & mask] = 0.0

    def local(v, m):
        weighted = weighted_sum(v, m).psum("data")
        return (
            masked_sum(v, m, axis_name="data"),
            masked_count(v, m, axis_name="data"),
            masked_mean(v, m, axis_name="data"),
            masked_max(v, m, axis_name="data"),
            masked_min(v, m, axis_name="data"),
            weighted_sum(v, m, axis_name="data").mean(),
            weighted.mean(),
        )

    run = jax.jit(jax.shard_map(local, mesh=data_mesh(size), in_specs=(P("data"), P("data")), out_specs=P()))
    total, count, mean, top, bottom, mean_of_weighted, mean_of_psum = run(jnp.asarray(values), jnp.asarray(mask))
    assert oracle.scaled_error(total, oracle.masked_sum(values, mask)) < SUM_ERROR
    assert int(count) == oracle.masked_count(mask)
    expected = oracle.masked_mean(values, mask)
    for seen in (mean, mean_of_weighted, mean_of_psum):
        assert oracle.scaled_error(seen, expected) < SUM_ERROR
    assert float(top) == values[mask].max() and float(bottom) == values[mask].min()


def test_over_two_mesh_axes_and_the_gradient_is_counted_once():
    values, mask = case()
    mesh = jax.make_mesh((4, 2), ("data", "sequence"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    spec = P("data", "sequence")
    mean = jax.shard_map(
        lambda v, m: masked_mean(v, m, axis_name=("data", "sequence")), mesh=mesh, in_specs=(spec, spec), out_specs=P()
    )
    value, gradient = jax.jit(jax.value_and_grad(mean))(jnp.asarray(values), jnp.asarray(mask))
    assert oracle.scaled_error(value, oracle.masked_mean(values, mask)) < SUM_ERROR
    np.testing.assert_allclose(gradient, mask / mask.sum(), rtol=1e-6)  # one fp32 division


def test_the_mean_of_nothing_is_zero_but_does_not_hide_a_nan():
    assert WeightedSum(jnp.float32(0.0), jnp.int32(0)).mean() == 0.0
    assert jnp.isnan(WeightedSum(jnp.float32(jnp.nan), jnp.int32(0)).mean())
