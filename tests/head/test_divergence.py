"""Divergences of two heads against float64 on the same operands: values, gradients, shards, and the memory they take."""

import contextlib
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxlogp import VocabShards, linear_kl, sharded_linear_kl
from jaxlogp.head import ChunkedEngine, HeadSpec
from jaxlogp.head.chunked import blocks
from tests import oracle
from tests.head.cases import FP32_GRADIENT_ERROR, GRADIENT_ERROR, VALUE_ERROR

KINDS = ("reverse", "forward", "jensen_shannon")
SHARE = {"jensen_shannon": {"ref_share": 0.3}}
OPTIONS, REF_OPTIONS = (0.7, 1.3, 5.0), (1.4, 0.8, 6.0)
# Tails: 20 tokens are no multiple of 8, nor 264 ids of 64.
TOKENS, VOCAB = (2, 10), 264
UNEVEN = [(0, 100), (100, VOCAB)]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    # Programs are kept by their shapes: no test runs one of another with other blocks.
    monkeypatch.setattr(blocks, "SMALL", blocks.BlockSizes(8, 64))


def problem(dtype=jnp.float32, seed=0, size=16, ref_size=24):
    rng = np.random.default_rng(seed)

    def operands(size):
        weight = rng.normal(0.0, 2.0 / size**0.5, (VOCAB, size))
        drawn = rng.normal(size=(*TOKENS, size)), weight, rng.normal(size=VOCAB)
        return tuple(jnp.asarray(x, dtype) for x in drawn)

    mask = rng.random(TOKENS) < 0.8
    return operands(size), operands(ref_size), jnp.asarray(mask), jnp.asarray(rng.normal(size=TOKENS), jnp.float32)


def wanted(policy, reference, mask, g, kind, share=0.5, options=(), ref_options=()):
    """Value and gradients, from whole logits in float64."""
    head, ref_head = oracle.Head(*options), oracle.Head(*ref_options)
    logits, others = oracle.head_logits(*policy, head), oracle.head_logits(*reference, ref_head)
    value = np.where(mask, oracle.divergence(logits, others, kind, share), 0.0)
    upstream = np.where(mask, g, 0.0)[..., None] * oracle.divergence_gradient(logits, others, kind, share)
    clean = np.where(np.asarray(mask)[..., None], oracle.f64(policy[0]), 0.0)
    return value, oracle.product_gradients(upstream, clean, *policy[1:], head)


def both(policy, reference, mask, g, **options):
    """Value at every token, and the gradients of its sum with g."""

    def total(hidden, weight, bias):
        bias = {} if bias is None else {"bias": bias, "ref_bias": reference[2]}
        value = linear_kl(hidden, weight, *reference[:2], mask, **bias, **options)
        return jnp.sum(value * g), value

    (_, value), gradients = jax.value_and_grad(total, argnums=(0, 1, 2), has_aux=True)(*policy)
    return value, gradients


def check(value, gradients, expected, error=FP32_GRADIENT_ERROR):
    value_expected, gradients_expected = expected
    assert oracle.scaled_error(value, value_expected) < VALUE_ERROR
    for name, found in zip(("hidden", "weight", "bias"), gradients, strict=True):
        assert oracle.relative_error(found, getattr(gradients_expected, name)) < error, name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [False, True], ids=["plain", "options"])
def test_value_and_gradients_against_float64(kind, options):
    policy, reference, mask, g = problem()
    heads = {"head": HeadSpec(*OPTIONS), "ref_head": HeadSpec(*REF_OPTIONS)} if options else {}
    found = both(policy, reference, mask, g, kind=kind, **heads, **SHARE.get(kind, {}))
    of_oracle = {"options": OPTIONS, "ref_options": REF_OPTIONS} if options else {}
    share = SHARE.get(kind, {}).get("ref_share", 0.5)
    check(*found, wanted(policy, reference, mask, g, kind, share, **of_oracle))
    assert not np.asarray(found[0])[~np.asarray(mask)].any() and not np.asarray(found[1][0])[~np.asarray(mask)].any()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_products_of_narrow_operands(dtype):
    """Cotangents of 1e-6 would be 0 in fp16."""
    policy, reference, mask, g = problem(dtype, seed=1)
    found = both(policy, reference, mask, 1e-6 * g)
    assert [each.dtype for each in found[1]] == [dtype] * 3 and found[0].dtype == jnp.float32
    value, gradients = wanted(policy, reference, mask, 1e-6 * g, "reverse")
    assert oracle.scaled_error(found[0], value) < VALUE_ERROR
    # fp16 has steps of 6e-8 there.
    smallest = 2.0**-25 if dtype == jnp.float16 else 0.0
    for name, mine in zip(("hidden", "weight", "bias"), found[1], strict=True):
        other = getattr(gradients, name)
        bound = GRADIENT_ERROR * np.linalg.norm(other) + smallest * math.sqrt(other.size)
        assert np.linalg.norm(oracle.f64(mine) - other) < bound, name


@pytest.mark.parametrize("kind", KINDS)
def test_equal_heads_have_none_and_nearly_equal_ones_what_float64_has(kind):
    policy, _, mask, g = problem(seed=2)
    value, gradients = both(policy, policy, mask, g, kind=kind)
    assert not np.asarray(value).any() and not any(np.asarray(each).any() for each in gradients)
    near = (policy[0] * (1.0 + 2.0**-10), *policy[1:])
    expected, _ = wanted(policy, near, mask, g, kind)
    value, _ = both(policy, near, mask, g, kind=kind)
    live = np.asarray(mask)
    # A few 1e-7 of divergence each: sums of log-probs would be off by as much.
    assert 0.0 < expected[live].min() < 1e-6
    # An error of some 2^-22 of a logit, of differences of about 2^-10.
    np.testing.assert_allclose(np.asarray(value)[live], expected[live], rtol=8 * 2.0**-12)


@pytest.mark.parametrize("kind", KINDS)
def test_what_masked_tokens_hold_has_no_effect(kind):
    policy, reference, mask, g = problem(seed=3)
    hole = jnp.where(mask[..., None], 0.0, jnp.nan)
    dirty = [(own[0] + hole, *own[1:]) for own in (policy, reference)]
    clean, found = both(policy, reference, mask, g, kind=kind), both(*dirty, mask, g, kind=kind)
    jax.tree.map(np.testing.assert_array_equal, found, clean)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_a_number_stays_one_at_its_token(kind):
    policy, reference, _, g = problem(seed=8)
    clean, _ = both(policy, reference, jnp.ones(TOKENS, bool), g, kind=kind)
    for of_policy in (True, False):
        heads = [policy, reference]
        own = heads[not of_policy]
        heads[not of_policy] = own[0].at[0, 3, 1].set(jnp.nan), *own[1:]
        value, gradients = both(*heads, jnp.ones(TOKENS, bool), g, kind=kind)
        wrong = np.zeros(TOKENS, bool)
        wrong[0, 3] = True
        np.testing.assert_array_equal(np.isnan(value), wrong)
        np.testing.assert_array_equal(np.asarray(value)[~wrong], np.asarray(clean)[~wrong])
        assert np.isnan(gradients[0])[wrong].all() and np.isfinite(gradients[0])[~wrong].all()


@pytest.mark.parametrize("kind", KINDS)
def test_ids_that_a_bias_excludes(kind):
    """By both heads: as if the id were not there. By the reference alone: infinite, but for Jensen-Shannon and forward."""
    policy, reference, mask, g = problem(seed=4)
    without = [(own[0], own[1][:-1], own[2][:-1]) for own in (policy, reference)]
    excluding = [(*own[:2], own[2].at[-1].set(-jnp.inf)) for own in (policy, reference)]
    value, gradients = both(*excluding, mask, g, kind=kind)
    check(value, (gradients[0], *(each[:-1] for each in gradients[1:])), wanted(*without, mask, g, kind))
    assert not any(np.asarray(each)[-1].any() for each in gradients[1:])
    for of_policy, of_reference in ((policy, excluding[1]), (excluding[0], reference)):
        value, _ = both(of_policy, of_reference, mask, g, kind=kind)
        expected = oracle.divergence(oracle.head_logits(*of_policy), oracle.head_logits(*of_reference), kind)
        expected, live = np.where(mask, expected, 0.0), np.asarray(mask)
        infinite = (kind == "reverse") if of_policy is policy else (kind == "forward")
        assert np.isinf(expected[live]).all() == np.isinf(np.asarray(value)[live]).all() == infinite
        assert infinite or oracle.scaled_error(value, expected) < VALUE_ERROR


@pytest.mark.costly
def test_both_layouts_of_the_weight_and_a_call_without_bias():
    policy, reference, mask, g = problem(seed=5)
    plain = both((*policy[:2], None), reference, mask, g)
    turned = [(own[0], own[1].T, None) for own in (policy, reference)]
    value, gradients = both(*turned, mask, g, weight_layout="hv")
    np.testing.assert_allclose(value, plain[0], atol=VALUE_ERROR)
    for mine, other in ((gradients[0], plain[1][0]), (gradients[1].T, plain[1][1])):
        assert oracle.relative_error(mine, other) < FP32_GRADIENT_ERROR
    expected, _ = wanted((*policy[:2], None), (*reference[:2], None), mask, g, "reverse")
    assert oracle.scaled_error(value, expected) < VALUE_ERROR


@pytest.mark.costly
@pytest.mark.parametrize(
    ("kind", "shards"),
    [("reverse", VocabShards.even(VOCAB, 2)), *((kind, VocabShards.from_ranges(UNEVEN, VOCAB)) for kind in KINDS)],
)
def test_shards_of_the_vocabulary_and_of_the_tokens(kind, shards):
    policy, reference, mask, g = problem(seed=6)
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    of_head = P("data"), P("tensor"), P("tensor")
    of_shards = functools.partial(linear_kl, kind=kind, axis_name="tensor", vocab=shards)

    @functools.partial(jax.jit, static_argnums=0)
    def run(checked, policy, reference):
        def local(policy, reference, mask):
            named = {"bias": policy[2], "ref_bias": reference[2]}
            return of_shards(*policy[:2], *reference[:2], mask, **named)

        specs = of_head, of_head, P("data")
        mapped = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P("data"), check_vma=checked)
        padded = [(own[0], shards.shard_rows(own[1]), shards.shard_rows(own[2])) for own in (policy, reference)]
        value = mapped(*padded, mask)
        return jnp.sum(value * g), value

    (_, value), gradients = jax.value_and_grad(functools.partial(run, True), has_aux=True)(policy, reference)
    check(value, gradients, wanted(policy, reference, mask, g, kind))
    np.testing.assert_allclose(run(False, policy, reference)[1], value, atol=VALUE_ERROR)
    with pytest.raises(
        ValueError, match="axis_name: expected shard_map\\(check_vma=True\\) to differentiate over axis 'tensor'"
    ):
        jax.grad(functools.partial(run, False), has_aux=True)(policy, reference)


@pytest.mark.costly
@pytest.mark.parametrize(("kind", "layout"), [(AxisType.Auto, "vh"), (AxisType.Explicit, "hv")])
def test_global_arrays_on_a_mesh(kind, layout):
    """Also by the plain function, which sees how they lie; no rank has the whole of a weight."""
    policy, reference, mask, g = problem(seed=8)
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(kind, kind))
    of_weight = P("tensor", "data") if layout == "vh" else P("data", "tensor")

    def placed(own):
        weight = own[1] if layout == "vh" else own[1].T
        return [
            jax.device_put(x, NamedSharding(mesh, s))
            for x, s in zip((own[0], weight), (P("data"), of_weight), strict=True)
        ]

    biases = {"bias": policy[2], "ref_bias": reference[2]}

    def total(hidden, weight, ref_hidden, ref_weight):
        over = {"mesh": mesh, "weight_axis": "data", "weight_layout": layout}
        value = sharded_linear_kl(hidden, weight, ref_hidden, ref_weight, mask, **biases, **over)
        return jnp.sum(value * g), value

    with jax.set_mesh(mesh) if kind is AxisType.Explicit else contextlib.nullcontext():
        split = *placed(policy), *placed(reference)
        (_, value), gradients = jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True))(*split)
        plain = functools.partial(linear_kl, weight_layout=layout, **biases)
        # Where axes are Auto, only concrete arrays say how they lie.
        seen = jax.jit(plain) if kind is AxisType.Explicit else plain
        np.testing.assert_array_equal(seen(*split, mask), value)
        if kind is AxisType.Explicit:
            text = seen.lower(*split, mask).compile().as_text()
            assert f"{VOCAB}]" not in text.replace(f"[{VOCAB}]", ""), "a rank gathers its own ids alone"
    expected = wanted(policy, reference, mask, g, "reverse")
    turned = gradients[1] if layout == "vh" else gradients[1].T
    check(value, (gradients[0], turned, expected[1].bias), expected)


def test_ranks_add_their_parts_of_the_hidden_gradient_in_fp32():
    policy, reference, *_ = problem(jnp.bfloat16)
    mesh = jax.make_mesh((2,), ("tensor",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])

    def local(hidden, weight, ref_weight):
        return linear_kl(hidden, weight, reference[0], ref_weight, axis_name="tensor").sum()

    mapped = jax.shard_map(local, mesh=mesh, in_specs=(P(), P("tensor"), P("tensor")), out_specs=P())
    program = str(jax.make_jaxpr(jax.grad(mapped))(policy[0], policy[1], reference[1]))
    added = [line for line in program.splitlines() if "= psum" in line]
    assert any("f32[20,16]" in line for line in added) and not any("bf16" in line for line in added), added


@pytest.mark.costly
def test_explicit_axes_and_a_reference_that_is_a_constant():
    policy, reference, mask, g = problem(seed=7)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        split = [(jax.sharding.reshard(own[0], P("data")), *own[1:]) for own in (policy, reference)]
        value, gradients = jax.jit(functools.partial(both, mask=mask, g=g))(*split)
        assert jax.typeof(value).sharding.spec[0] == "data"
    check(value, gradients, wanted(policy, reference, mask, g, "reverse"))
    of_reference = jax.grad(lambda weight: linear_kl(*policy[:2], reference[0], weight).sum())(reference[1])
    assert not np.asarray(of_reference).any()


def test_neither_pass_takes_what_logits_would():
    """The blocks are those of the engine, not the small ones of this module."""
    tokens, size, vocab = 512, 32, 8192
    engine = ChunkedEngine(token_chunk=64, vocab_tile=1024)
    shapes = (tokens, size), (vocab, size), (tokens, size), (vocab, size)
    given = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    gradient = jax.grad(
        lambda *operands: linear_kl(*operands, kind="jensen_shannon", engine=engine).sum(), argnums=(0, 1)
    )
    compiled = jax.jit(gradient).lower(*given).compile().memory_analysis()
    # Blocks of [64, 1024] and the gradients' sums, not one [512, 8192] of fp32.
    assert 64 * 1024 * 4 < compiled.temp_size_in_bytes < tokens * vocab * 4 / 2


@pytest.mark.bad_input
def test_wrong_arguments():
    policy, reference, mask, _ = problem()
    call = functools.partial(linear_kl, *policy[:2])
    cases = [
        ((reference[0][:1], reference[1]), {}, r"^ref_hidden: expected the tokens of hidden, \(2, 10\), got "),
        ((reference[0], reference[1][:9]), {}, "^ref_weight: expected the vocabulary of weight, 264 ids, got "),
        ((reference[0][..., :3], reference[1]), {}, "^ref_hidden: expected a last dimension of H = 24, as in weight"),
        (
            reference[:2],
            {"kind": "jsd"},
            r"^kind: expected one of \('reverse', 'forward', 'jensen_shannon'\), got 'jsd'",
        ),
        (reference[:2], {"ref_share": 0.3}, "^ref_share: expected no value with kind 'reverse', got 0.3"),
        (
            reference[:2],
            {"kind": "jensen_shannon", "ref_share": 1.0},
            r"^ref_share: expected a number in \(0, 1\), got float 1.0",
        ),
        (reference[:2], {"head": 0.7}, "^head: expected a HeadSpec, got "),
        (reference[:2], {"mask": mask[0]}, "^mask: expected "),
        (reference[:2], {"axis_name": "tensor"}, "^axis_name: expected an axis of the surrounding shard_map"),
    ]
    with pytest.raises(ValueError, match="^hidden: expected at least one token, got "):
        linear_kl(policy[0][:0], policy[1], reference[0][:0], reference[1])
    for operands, options, words in cases:
        with pytest.raises(ValueError, match=words):
            call(*operands, **options)
