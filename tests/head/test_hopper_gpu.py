"""The hopper engine on a Hopper GPU: `pytest -m gpu`. Everything here is skipped where there is none.

JAXLOGP_TEST_GPU=1 must be set, else tests/conftest.py hides the GPU.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlogp import linear_log_probs, linear_policy_loss, policy_loss
from jaxlogp._mosaic_gpu import why_not_available
from jaxlogp.head import ChunkedEngine, GradientFilter, HopperEngine, skipped_tiles
from jaxlogp.head.hopper.forward import forward_statistics
from jaxlogp.head.hopper.operands import Launch, Operands
from jaxlogp.head.hopper.tiles import ALTERNATE, FILTERED
from jaxlogp.losses import grpo

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        why_not_available() is not None or jax.devices()[0].platform != "gpu", reason="needs a Hopper GPU"
    ),
]
VALUE_ERROR = 5e-5
GRADIENT_ERROR = 5e-3
SHAPES = [
    (1937, 3584, 152064),
    (2169, 896, 151936),
    (1530, 2048, 32256),
    (1388, 4096, 102400),
    (600, 1024, 129920),
    (600, 1024, 262144),
]


def inputs(tokens, hidden_size, vocab, spread=2.0):
    keys = jax.random.split(jax.random.key(0), 5)
    hidden = jax.random.normal(keys[0], (tokens, hidden_size), jnp.bfloat16)
    weight = jax.random.normal(keys[1], (vocab, hidden_size), jnp.float32) * jnp.float32(spread / hidden_size**0.5)
    targets = jax.random.randint(keys[2], (tokens,), 0, vocab, jnp.int32).at[0].set(vocab - 1)
    g, g_entropy = (jax.random.normal(key, (tokens,), jnp.float32) for key in keys[3:])
    return hidden, weight.astype(jnp.bfloat16), targets, g, g_entropy


def both(engine, options, hidden, weight, targets, mask, g, g_entropy):
    options = {"mask": mask, "with_entropy": g_entropy is not None, "engine": engine, **options}
    out, pull = jax.vjp(lambda h, w: linear_log_probs(h, w, targets, **options), hidden, weight)
    return out, pull(type(out)(g, g_entropy))


def float64(hidden, weight, targets, mask, g, g_entropy):
    """Values and gradients in float64, on the GPU: the oracle's formulas (NumPy takes minutes at these sizes)."""
    with jax.enable_x64(True):

        @jax.jit
        def formulas(hidden, weight, targets, mask, g, g_entropy):
            hidden, weight, g, g_entropy = (x.astype(jnp.float64) for x in (hidden, weight, g, g_entropy))
            z = hidden @ weight.T
            lse = jax.nn.logsumexp(z, axis=1)
            p = jnp.exp(z - lse[:, None])
            mean = (p * z).sum(1)
            g, g_entropy = (jnp.where(mask, x, 0.0) for x in (g, g_entropy))
            dz = p * (-g[:, None] + g_entropy[:, None] * (mean[:, None] - z))
            dz = dz.at[jnp.arange(z.shape[0]), targets].add(g)
            chosen = jnp.take_along_axis(z, targets[:, None], 1)[:, 0]
            log_probs, entropy = (jnp.where(mask, x, 0.0) for x in (chosen - lse, lse - mean))
            return log_probs, entropy, dz @ weight, dz.T @ hidden

        return jax.block_until_ready(formulas(hidden, weight, targets, mask, g, g_entropy))


def relative(actual, wanted):
    with jax.enable_x64(True):
        wide, wanted = (jnp.asarray(x).astype(jnp.float64) for x in (actual, wanted))
        return float(jnp.linalg.norm(wide - wanted) / jnp.linalg.norm(wanted))


def check_values_gradients_and_repeatability(engine, tokens, hidden_size, vocab):
    """Against float64 where four of five tokens have a label, and bit by bit against a second run."""
    hidden, weight, targets, g, g_entropy = inputs(tokens, hidden_size, vocab)
    mask = jnp.arange(tokens) % 5 != 1
    run = jax.jit(lambda *args: both(engine, {}, *args))
    rest = weight, targets, mask, g, g_entropy
    args = jnp.where(mask[:, None], hidden, jnp.nan), *rest
    out, (d_hidden, d_weight) = run(*args)
    out_again, (d_hidden_again, d_weight_again) = run(*args)
    wanted = float64(jnp.where(mask[:, None], hidden, 0), *rest)
    for name, actual, value in (("log_probs", out.log_probs, wanted[0]), ("entropy", out.entropy, wanted[1])):
        assert np.abs(np.asarray(actual, np.float64) - np.asarray(value)).max() < VALUE_ERROR, name
    assert relative(d_hidden, wanted[2]) < GRADIENT_ERROR
    assert relative(d_weight, wanted[3]) < GRADIENT_ERROR
    assert bool((out.log_probs == out_again.log_probs).all() & (out.entropy == out_again.entropy).all())
    assert bool((d_hidden == d_hidden_again).all() & (d_weight == d_weight_again).all())
    assert not np.asarray(d_hidden.astype(jnp.float32))[~np.asarray(mask)].any()


@pytest.mark.parametrize("tokens, hidden_size, vocab", SHAPES)
def test_values_gradients_and_repeatability(tokens, hidden_size, vocab):
    check_values_gradients_and_repeatability(HopperEngine(), tokens, hidden_size, vocab)


@pytest.mark.parametrize("with_entropy", [False, True], ids=["log-probs", "entropy"])
def test_the_filtered_gradient_is_that_of_the_portable_engine(with_entropy):
    # Peaked rows, and a threshold so high that a block is mostly kept for its targets.
    tokens, vocab, threshold = 600, 129920, 0.05
    hidden, weight, targets, g, g_entropy = inputs(tokens, 1024, vocab, spread=4.0)
    mask = jnp.ones(tokens, bool)
    args = hidden, weight, targets, mask, g, g_entropy if with_entropy else None
    hopper, portable, off = (
        jax.jit(functools.partial(both, engine, {}))
        for engine in (
            HopperEngine(gradient_filter=GradientFilter(threshold)),
            ChunkedEngine(128, 256, GradientFilter(threshold)),
            HopperEngine(gradient_filter=GradientFilter(0.0)),
        )
    )
    out, gradients = hopper(*args)
    _, again = hopper(*args)
    _, wanted = portable(*args)
    filtered = HopperEngine(gradient_filter=GradientFilter(threshold))
    counted = skipped_tiles(hidden, weight, targets, mask=mask, engine=filtered)
    assert 0.1 < float(counted.mean()) < 0.99
    for actual, same, portable_gradient in zip(gradients, again, wanted, strict=True):
        assert relative(actual, portable_gradient) < GRADIENT_ERROR
        assert bool((actual == same).all())
    # Rows of the weight that no block touches: exact zeros in both, but for a block that rounding decides.
    touched = [np.asarray(jnp.any(x[1] != 0, axis=1)) for x in (gradients, wanted)]
    assert (touched[0] != touched[1]).sum() <= 2 * 256
    # With the same tiles: the table's sum the hidden gradient in two parts.
    unfiltered = jax.jit(functools.partial(both, HopperEngine(tiles=FILTERED), {}))
    exact_out, exact = unfiltered(*args)
    assert bool((out.log_probs == exact_out.log_probs).all())
    for actual, value in zip(off(*args)[1], exact, strict=True):
        assert bool((actual == value).all())


def test_tile_statistics_are_bitwise_invariant():
    hidden, weight, column, _, _ = inputs(2048, 1024, 131072)

    @jax.jit
    def statistics(hidden, weight, column):
        operands = Operands(hidden, weight, None, jnp.int32(weight.shape[0]))
        return forward_statistics(operands, column, Launch(ALTERNATE, 132), with_entropy=True)

    whole = np.asarray(statistics(hidden, weight, column))
    for shards in (2, 4):
        width = weight.shape[0] // shards
        for shard in range(shards):
            start = shard * width
            local = jnp.where((column >= start) & (column < start + width), column - start, -1)
            part = np.asarray(statistics(hidden, weight[start : start + width], local))
            np.testing.assert_array_equal(part, whole[start // 256 : (start + width) // 256])
    np.testing.assert_array_equal(np.asarray(statistics(hidden[1024:], weight, column[1024:])), whole[:, :, 1024:])


@pytest.mark.parametrize("extra", [{}, {"temperature": 0.7, "logit_scale": 1.3, "softcap": 30.0}], ids=["plain", "all"])
def test_log_probs_are_bitwise_invariant_to_programs_shards_masks_and_batches(extra):
    # 512 tiles and a tail; the whole batch takes several blocks of statistics, the part of it one.
    tokens, vocab = 12500, 131072 + 8
    hidden, weight, targets, g, g_entropy = inputs(tokens, 512, vocab)
    options = {"with_entropy": True, "engine": HopperEngine(), **extra}

    @jax.jit
    def forward(hidden, weight, targets, mask):
        return linear_log_probs(hidden, weight, targets, mask=mask, **options)

    mask = jnp.ones(tokens, bool)
    whole = forward(hidden, weight, targets, mask)
    _, (d_hidden, _) = jax.jit(lambda *x: both(HopperEngine(), extra, *x))(hidden, weight, targets, mask, g, g_entropy)
    with_backward, _ = jax.jit(lambda *x: both(HopperEngine(), extra, *x))(hidden, weight, targets, mask, g, g_entropy)
    part = slice(2001, 4501)
    partly = jax.jit(lambda *x: both(HopperEngine(), extra, *x))
    some, (d_some, _) = partly(
        *(x[part] if x is not weight else x for x in (hidden, weight, targets, mask, g, g_entropy))
    )
    third = jnp.arange(tokens) % 3 == 0
    masked = forward(hidden, weight, targets, third)
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((1,), ("tensor",), axis_types=auto, devices=jax.devices()[:1])

    def local_forward(hidden, weight, targets, mask):
        return linear_log_probs(hidden, weight, targets, mask=mask, axis_name="tensor", **options)

    p = jax.P
    sharded = jax.shard_map(local_forward, mesh=mesh, in_specs=(p(), p("tensor"), p(), p()), out_specs=p())
    over_mesh = jax.jit(sharded)(hidden, weight, targets, mask)
    for name in ("log_probs", "entropy"):
        wanted = np.asarray(getattr(whole, name))
        np.testing.assert_array_equal(np.asarray(getattr(with_backward, name)), wanted)
        np.testing.assert_array_equal(np.asarray(getattr(over_mesh, name)), wanted)
        np.testing.assert_array_equal(np.asarray(getattr(some, name)), wanted[part])
        np.testing.assert_array_equal(np.asarray(getattr(masked, name))[::3], wanted[::3])
    assert bool((d_some == d_hidden[part]).all())


def test_a_call_without_a_mask_is_one_with_every_label():
    hidden, weight, targets, g, g_entropy = inputs(600, 1024, 50000)

    def objective(hidden, weight, mask):
        out = linear_log_probs(hidden, weight, targets, mask=mask, with_entropy=True, engine=HopperEngine())
        return jnp.sum(out.log_probs * g) + jnp.sum(out.entropy * g_entropy), out

    run = jax.jit(jax.grad(objective, (0, 1), has_aux=True))
    without, given = run(hidden, weight, None), run(hidden, weight, jnp.ones(600, bool))
    for left, right in zip(jax.tree.leaves(without), jax.tree.leaves(given), strict=True):
        np.testing.assert_array_equal(np.asarray(left, np.float32), np.asarray(right, np.float32))


@pytest.mark.parametrize("way", ["ratios", "entropy bonus", "a token far off", "on policy"])
@pytest.mark.parametrize(
    "tokens, hidden_size, vocab", [(1937, 3584, 152064), (600, 1024, 129920), (3001, 2304, 262144)]
)
def test_one_pass_gives_the_gradients_of_two_steps(tokens, hidden_size, vocab, way):
    hidden, weight, targets, advantages, noise = inputs(tokens, hidden_size, vocab)
    mask = jnp.arange(tokens) % 5 != 1
    engine = HopperEngine()
    here = linear_log_probs(hidden, weight, targets, mask=mask, engine=engine).log_probs
    loss, known, bias = grpo(entropy_coefficient=0.01 if way == "entropy bonus" else 0.0), {}, None
    if way != "on policy":
        old = jnp.minimum(here + 0.2 * noise, 0.0)
        if way == "a token far off":
            # A ratio of about e^-70 that counts: dz is computed once more.
            bias, advantages = jnp.zeros(vocab).at[targets[5]].set(-70.0), advantages.at[5].set(1e30)
    else:
        old = here
        known = {"lse": linear_log_probs(hidden, weight, targets, mask=mask, with_lse=True, engine=engine).lse}

    def objective(hidden, weight):
        out = linear_log_probs(hidden, weight, targets, mask=mask, bias=bias, with_entropy=True, engine=engine)
        return policy_loss(
            out.log_probs, old, advantages, mask, loss=loss, entropy=out.entropy
        ).sum / 7.0, out.log_probs

    wanted, log_probs = jax.jit(jax.grad(objective, (0, 1), has_aux=True))(hidden, weight)

    def at_once(hidden, weight):
        total, values = linear_policy_loss(
            hidden, weight, targets, old, advantages, mask, loss=loss, bias=bias, engine=engine, **known
        )
        return total.sum / 7.0, values.log_probs

    one_pass = jax.jit(jax.grad(at_once, (0, 1), has_aux=True))
    (got, values), (again, _) = one_pass(hidden, weight), one_pass(hidden, weight)
    np.testing.assert_array_equal(np.asarray(values)[np.asarray(mask)], np.asarray(log_probs)[np.asarray(mask)])
    for actual, same, value in zip(got, again, wanted, strict=True):
        assert relative(actual, value) < GRADIENT_ERROR
        assert bool((actual == same).all())
    assert not np.asarray(got[0].astype(jnp.float32))[~np.asarray(mask)].any()


def values_and_gradients(layout, coefficient, hidden, weight, targets, old, advantages, mask, g, g_entropy):
    """Of two steps and of one pass, gradients of the weight as [V, H]."""

    def one_pass(hidden, weight):
        loss = grpo(entropy_coefficient=coefficient)
        options = {"loss": loss, "engine": HopperEngine(), "weight_layout": layout}
        total, values = linear_policy_loss(hidden, weight, targets, old, advantages, mask, **options)
        return total.sum, values.log_probs

    options = {"weight_layout": layout}
    out, gradients = both(HopperEngine(), options, hidden, weight, targets, mask, g, g_entropy)
    loss, of_one_pass = jax.value_and_grad(one_pass, (0, 1), has_aux=True)(hidden, weight)
    return out, loss, *(d if layout == "vh" else (d[0], d[1].T) for d in (gradients, of_one_pass))


@pytest.mark.parametrize("coefficient", [0.0, 0.01])
@pytest.mark.parametrize(
    "tokens, hidden_size, vocab", [(1937, 3584, 152064), (3001, 2304, 262144), (1530, 2048, 32256), (600, 896, 129920)]
)
def test_a_weight_of_the_other_layout_gives_the_same_bits(tokens, hidden_size, vocab, coefficient):
    hidden, weight, targets, g, g_entropy = inputs(tokens, hidden_size, vocab)
    mask = jnp.arange(tokens) % 5 != 1
    old = linear_log_probs(hidden, weight, targets, mask=mask, engine=HopperEngine()).log_probs + 0.1 * g
    rest = targets, old, g, mask, g, g_entropy
    operands = {"vh": (hidden, weight), "hv": (hidden, weight.T)}
    compiled = {
        layout: jax.jit(functools.partial(values_and_gradients, layout, coefficient)).lower(*x, *rest).compile()
        for layout, x in operands.items()
    }
    plain, turned = (compiled[layout](*operands[layout], *rest) for layout in ("vh", "hv"))
    for one, other in zip(jax.tree.leaves(plain), jax.tree.leaves(turned), strict=True):
        assert one.dtype == other.dtype and bool((one == other).all())


def test_a_weight_of_the_other_layout_is_not_copied():
    tokens, hidden_size, vocab = 8192, 1024, 151936
    shapes = {"vh": (vocab, hidden_size), "hv": (hidden_size, vocab)}

    def temporaries(layout):
        def loss(hidden, weight, targets, g, mask):
            call = {"engine": HopperEngine(), "weight_layout": layout}
            total, _ = linear_policy_loss(hidden, weight, targets, g, g, mask, **call)
            return total.sum + jnp.sum(linear_log_probs(hidden, weight, targets, mask=mask, **call).log_probs)

        kinds = [((tokens, hidden_size), jnp.bfloat16), (shapes[layout], jnp.bfloat16), ((tokens,), jnp.int32)]
        operands = [jax.ShapeDtypeStruct(*x) for x in (*kinds, ((tokens,), jnp.float32), ((tokens,), bool))]
        compiled = jax.jit(jax.grad(loss, (0, 1))).lower(*operands).compile()
        return compiled.memory_analysis().temp_size_in_bytes, compiled.as_text()

    (plain, _), (turned, text) = (temporaries(layout) for layout in shapes)
    assert turned < plain + 16 * 2**20
    assert f"bf16[{hidden_size},{vocab}]" in text and f"bf16[{vocab},{hidden_size}]" not in text


@pytest.mark.parametrize("with_entropy", [False, True], ids=["log-probs", "entropy"])
@pytest.mark.parametrize("layout", ["vh", "hv"])
def test_columns_of_minus_infinity_are_as_if_they_were_not_there(layout, with_entropy):
    """A whole tile and a single column; as a target they have log-prob -inf, and the rest is as if they were not there."""
    tokens, hidden_size, vocab = 600, 1024, 8192
    hidden, weight, targets, g, g_entropy = inputs(tokens, hidden_size, vocab)
    gone = jnp.zeros(vocab, bool).at[256:512].set(True).at[4000].set(True)
    bias = jnp.where(gone, -jnp.inf, 0.0)
    targets = jnp.where(gone[targets], 7, targets)
    options = {"bias": bias, "weight_layout": layout}
    operands = hidden, weight if layout == "vh" else weight.T
    mask = jnp.ones(tokens, bool)
    rest = mask, g, g_entropy if with_entropy else None
    out, (d_hidden, d_weight) = jax.jit(functools.partial(both, HopperEngine(), options))(*operands, targets, *rest)
    d_weight = d_weight if layout == "vh" else d_weight.T
    kept = jnp.flatnonzero(~gone)
    zero = jnp.zeros_like(g_entropy)
    place = jnp.searchsorted(kept, targets).astype(jnp.int32)
    wanted = float64(hidden, weight[kept], place, mask, g, g_entropy if with_entropy else zero)
    assert np.abs(np.asarray(out.log_probs, np.float64) - np.asarray(wanted[0])).max() < VALUE_ERROR
    if with_entropy:
        assert np.abs(np.asarray(out.entropy, np.float64) - np.asarray(wanted[1])).max() < VALUE_ERROR
    assert relative(d_hidden, wanted[2]) < GRADIENT_ERROR and relative(d_weight[kept], wanted[3]) < GRADIENT_ERROR
    assert not np.asarray(d_weight[gone], np.float32).any()
    there = linear_log_probs(*operands, targets.at[3].set(300), **options, with_entropy=True, engine=HopperEngine())
    assert np.isneginf(there.log_probs[3]) and np.isfinite(np.asarray(there.entropy)).all()


@pytest.mark.parametrize("coefficient", [0.0, 0.01])
def test_one_pass_inside_of_a_shard_map_gives_the_bits_of_the_plain_call(coefficient):
    hidden, weight, targets, advantages, noise = inputs(1937, 1024, 151936)
    mask = jnp.arange(1937) % 5 != 1
    old = linear_log_probs(hidden, weight, targets, mask=mask, engine=HopperEngine()).log_probs + 0.2 * noise
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((1, 1), ("data", "tensor"), axis_types=auto, devices=jax.devices()[:1])

    def loss(hidden, weight, *per_token, **options):
        options |= {"loss": grpo(entropy_coefficient=coefficient), "engine": HopperEngine()}
        part, values = linear_policy_loss(hidden, weight, *per_token, **options)
        return (part.psum("data") if "axis_name" in options else part).sum, values.log_probs

    rows = jax.P("data")
    local = functools.partial(loss, axis_name="tensor")
    specs = rows, jax.P("tensor"), *[rows] * 4
    mapped = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=(jax.P(), rows))
    # Differentiated outside of the shard_map, as the trainer does.
    results = [
        jax.jit(jax.value_and_grad(function, (0, 1), has_aux=True))(hidden, weight, targets, old, advantages, mask)
        for function in (loss, mapped)
    ]
    for one, other in zip(*map(jax.tree.leaves, results), strict=True):
        assert bool((one == other).all())
