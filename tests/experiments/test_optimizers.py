"""Optimizers against float64 forms written here, schedules against numbers computed by hand, and bf16 parameters."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from experiments.config import OptimizerConfig
from experiments.learner.optimizers import OPTIMIZERS, Optimizer, learning_rate, with_bf16_moment
from experiments.models.decoder_config import DecoderConfig
from experiments.models.mesh import MeshSpec, make_mesh
from experiments.models.parameters import INPUT_AXES, abstract_decoder
from experiments.models.sharding import parameter_shardings
from tests.oracle import fp32_bound

pytestmark = pytest.mark.costly

SIZES = dict(vocab_size=10, hidden_size=12, intermediate_size=20, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=6)
MODEL = DecoderConfig(**SIZES, qk_norm=True, attention_bias=True)
# Axes of one layer's matrix that are its inputs; what follows are its outputs.
MATRICES = {"q_proj": 1, "k_proj": 1, "v_proj": 1, "o_proj": 2, "gate_proj": 1, "up_proj": 1, "down_proj": 1}
RATES = (0.01, 0.03)
DECAY = 0.1


def parameters(seed):
    """A decoder's parameters, or gradients for them, all random: no norm of ones, no bias of zeros."""
    _, state = abstract_decoder(MODEL)
    leaves, structure = jax.tree.flatten(state)
    rng = np.random.default_rng(seed)
    return jax.tree.unflatten(structure, [jnp.asarray(rng.standard_normal(x.shape), jnp.float32) for x in leaves])


def paths(state):
    """Leaves as float64 by their path."""
    flat = jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(state))
    return {tuple(entry.key for entry in path): np.asarray(leaf, np.float64) for path, leaf in flat}


def run(optimizer, params, gradients):
    state = optimizer.init(params)
    step = jax.jit(optimizer.update)
    rates = []
    for each in gradients:
        params, state, rate = step(each, state, params)
        rates.append(float(rate))
    return params, state, rates


def two_steps(name, wrap=lambda make: make()):
    params, *gradients = map(parameters, range(3))
    transformation = wrap(functools.partial(OPTIMIZERS[name], weight_decay=DECAY))
    new, _, rates = run(Optimizer(transformation, lambda n: jnp.asarray(RATES)[n], 1e9), params, gradients)
    np.testing.assert_allclose(rates, RATES, rtol=1e-6)  # one rounding to fp32
    return paths(params), [paths(each) for each in gradients], paths(new)


def adam_steps(value, gradients, *, nesterov=False, b1=0.9, b2=0.99):
    first, second = np.zeros_like(value), np.zeros_like(value)
    for t, (gradient, rate) in enumerate(zip(gradients, RATES, strict=True), start=1):
        first, second = b1 * first + (1 - b1) * gradient, b2 * second + (1 - b2) * gradient**2
        mean = first / (1 - b1**t)
        if nesterov:
            mean = b1 * first / (1 - b1 ** (t + 1)) + (1 - b1) * gradient / (1 - b1**t)
        value = value - rate * (mean / (np.sqrt(second / (1 - b2**t)) + 1e-8) + DECAY * value)
    return value


def orthogonalised(matrix):
    """Five steps of Newton-Schulz; singular values end between about 0.7 and 1.2."""
    wide = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    wide = wide / np.linalg.norm(wide)
    for _ in range(5):
        square = wide @ wide.T
        wide = 3.4445 * wide + (-4.7750 * square + 2.0315 * square @ square) @ wide
    return wide.T if matrix.shape[0] > matrix.shape[1] else wide


def muon_steps(value, gradients, inputs, momentum=0.95):
    """Of stacked layers, each layer's matrix by itself."""
    rows = math.prod(value.shape[1 : 1 + inputs])
    matrices = [x.reshape(len(x), rows, -1) for x in (value, *gradients)]
    for layer in range(len(value)):
        theta, *grads = (x[layer] for x in matrices)
        mean = np.zeros_like(theta)
        for t, (gradient, rate) in enumerate(zip(grads, RATES, strict=True), start=1):
            mean = momentum * mean + (1 - momentum) * gradient
            ahead = momentum * mean / (1 - momentum ** (t + 1)) + (1 - momentum) * gradient / (1 - momentum**t)
            theta = theta - rate * (0.2 * math.sqrt(max(theta.shape)) * orthogonalised(ahead) + DECAY * theta)
        matrices[0][layer] = theta
    return matrices[0].reshape(value.shape)


def adafactor_steps(value, gradients):
    """Without factors: no parameter here has two axes of 128."""
    second = np.zeros_like(value)
    for t, (gradient, rate) in enumerate(zip(gradients, RATES, strict=True), start=1):
        decay = 1 - t**-0.8
        second = decay * second + (1 - decay) * (gradient**2 + 1e-30)
        direction = gradient / np.sqrt(second)
        direction = direction / max(1.0, np.sqrt(np.mean(direction**2)))
        value = value - rate * (direction + DECAY * value)
    return value


def test_muon_orthogonalises_every_layers_matrix_by_itself_and_adamw_has_the_rest():
    before, gradients, after = two_steps("muon")
    names = {path: next((part for part in path if part in MATRICES and path[-1] != "bias"), None) for path in before}
    assert sorted(name for name in names.values() if name) == sorted(MATRICES) and len(names) > 10
    for path, value in before.items():
        given, name = [each[path] for each in gradients], names[path]
        if name is None:
            expected = adam_steps(value, given, nesterov=True)
        else:
            expected = muon_steps(value, given, MATRICES[name])
        # fp32: a product of up to 24 terms rounds by 24 · 2^-24, which five steps of slope 3.4445 make 485 times as
        # large: 7e-4 of a direction of at most 1, at rates of 0.04 together. AdamW's are a few roundings of values
        # below 4.
        np.testing.assert_allclose(after[path], expected, atol=3e-5, rtol=1e-6, err_msg=str(path))


def test_adamw_and_adafactor_are_their_formulas():
    for name, steps in (("adamw", adam_steps), ("adafactor", adafactor_steps)):
        before, gradients, after = two_steps(name)
        for path, value in before.items():
            expected = steps(value, [each[path] for each in gradients])
            # Eight roundings of parameters below 4 and of directions, at rates of 0.04 together, that Adafactor divides by
            # a root mean square of up to 576 entries.
            bound = fp32_bound(4.0, 8) + 0.04 * fp32_bound(4.0, value.size)
            np.testing.assert_allclose(after[path], expected, rtol=0, atol=bound, err_msg=f"{name} {path}")


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_first_moment_in_bf16_is_rounded_once_a_step(name):
    """At most 2^-8 of 0.1 g₁ is lost, times b1 / (1 - b1²), over a divisor of at least √(0.0099 / 0.0199) |g₁|."""
    before, gradients, after = two_steps(name, wrap=with_bf16_moment)
    exact = two_steps(name)[2]
    bound = 0.03 * 2**-8 * (0.1 * 0.9 / 0.19) / math.sqrt(0.0099 / 0.0199) + 2 * fp32_bound(4.0, 8)
    differ = 0.0
    for path, value in before.items():
        if name == "adamw" or MATRICES.keys().isdisjoint(path):
            expected = adam_steps(value, [each[path] for each in gradients], nesterov=name == "muon")
            np.testing.assert_allclose(after[path], expected, rtol=0, atol=bound, err_msg=str(path))
            differ = max(differ, np.abs(after[path] - exact[path]).max())
    assert differ > bound / 4
    params = parameters(0)
    optimizer = OptimizerConfig(name=name, learning_rate=1.0, first_moment_dtype="bfloat16").optimizer(1)
    state = optimizer.init(params)
    # The second step finds what the first one has left.
    types = lambda tree: jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)  # noqa: E731
    assert types(jax.eval_shape(optimizer.update, params, state, params)[1]) == types(state)
    narrow = sum(leaf.size for leaf in jax.tree.leaves(state) if leaf.dtype == jnp.bfloat16)
    assert narrow == sum(leaf.size for leaf in jax.tree.leaves(params))


def test_adafactor_keeps_row_and_column_means_of_large_matrices():
    params = {"w": jnp.ones((2, 128, 130))}
    gradient = np.random.default_rng(0).standard_normal((2, 128, 130))
    optimizer = Optimizer(OPTIMIZERS["adafactor"](), lambda _: 1.0, 1e9)
    new, state, _ = run(optimizer, params, [{"w": jnp.asarray(gradient, jnp.float32)}])
    assert max(leaf.size for leaf in jax.tree.leaves(state)) == 2 * 130
    square = gradient**2
    rows, columns = square.mean(2, keepdims=True), square.mean(1, keepdims=True)
    direction = gradient / np.sqrt(rows * columns / rows.mean(1, keepdims=True))
    direction /= max(1.0, np.sqrt(np.mean(direction**2)))
    np.testing.assert_allclose(np.asarray(new["w"]), 1.0 - direction, atol=1e-4)


def test_the_global_norm_is_clipped_before_everything():
    params = {"w": jnp.zeros(4)}
    optimizer = Optimizer(OPTIMIZERS["adafactor"](momentum=0.5), lambda _: 1.0, max_grad_norm=2.0)
    huge, clipped = {"w": jnp.full(4, 1e6)}, {"w": jnp.full(4, 1.0)}
    first, second = (run(optimizer, params, [each, clipped])[0]["w"] for each in (huge, clipped))
    np.testing.assert_allclose(first, second, rtol=1e-6)  # a norm of four equal numbers and a division more


def test_the_norm_is_that_of_the_option():
    params, huge = {"w": jnp.zeros(4)}, {"w": jnp.full(4, 1e6)}
    optimizer = OptimizerConfig(learning_rate=1.0, max_grad_norm=2.0).optimizer(1)
    _, state, _ = optimizer.update(huge, optimizer.init(params), params)
    # Of a gradient of ones, whose norm is 2: 1 - b1 and 1 - b2 of it and of its square.
    moments = [leaf for leaf in jax.tree.leaves(state.inner) if leaf.shape == (4,)]
    np.testing.assert_allclose(moments, [[0.1] * 4, [0.01] * 4], rtol=1e-5)


@pytest.mark.parametrize("name", ["adafactor", "muon"])
def test_the_state_is_split_like_the_parameters(name):
    mesh = make_mesh(MeshSpec(tensor=2))
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), parameters(0))
    state = Optimizer(OPTIMIZERS[name](), lambda _: 1.0).init(params)
    placed = jax.device_put((params, state), parameter_shardings((params, state), mesh))
    split, exact = (jax.tree.leaves(each) for each in (placed[0], placed[1].exact))
    assert any(leaf.sharding.spec for leaf in split)
    assert [leaf.sharding.spec for leaf in exact] == [leaf.sharding.spec for leaf in split]
    # Of a parameter's shape Adafactor keeps a second moment here, AdamW two moments, and Muon one of each matrix.
    kept = sum(leaf.sharding.spec != P() for leaf in jax.tree.leaves(placed[1].inner))
    number = sum(leaf.sharding.spec != P() for leaf in split)
    assert kept == {"adafactor": number, "muon": 2 * number - len(MATRICES)}[name]


def few(seed):
    """A norm and a matrix of two layers, under the name that it has in the decoder."""
    (name,) = (name for name in INPUT_AXES if name.startswith("gate_proj"))
    rng = np.random.default_rng(seed)
    norm, matrix = (jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in ((6,), (2, 6, 8)))
    for part in reversed(name.split(".")):
        matrix = {part: matrix}
    return {"norm": norm, "layers": matrix}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_bf16_parameters_are_a_rounded_copy_of_what_is_trained(name):
    narrow = few(0)
    wide, *gradients = (jax.tree.map(lambda x: x.astype(jnp.float32), few(seed)) for seed in range(4))
    optimizer = Optimizer(OPTIMIZERS[name](), lambda _: 1e-4)
    expected, _, _ = run(optimizer, wide, gradients)
    got, state, _ = run(optimizer, narrow, gradients)
    assert {leaf.dtype for leaf in jax.tree.leaves(got)} == {jnp.dtype("bfloat16")}
    floating = {leaf.dtype for leaf in jax.tree.leaves(state) if jnp.issubdtype(leaf.dtype, jnp.floating)}
    assert floating == {jnp.dtype("float32")}
    for mine, exact, other in zip(*map(jax.tree.leaves, (got, state.exact, expected)), strict=True):
        np.testing.assert_array_equal(exact, other)
        np.testing.assert_array_equal(mine, other.astype(jnp.bfloat16))


OPTIONS = {
    "adamw": {"b1": {"norm", "layers"}, "b2": {"norm", "layers"}},
    "adafactor": {"momentum": {"norm", "layers"}},
    "muon": {"b1": {"norm"}, "b2": {"norm"}, "momentum": {"layers"}},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_changes_the_parameters_that_it_is_for(name):
    wide, *gradients = (jax.tree.map(lambda x: x.astype(jnp.float32), few(seed)) for seed in range(3))

    def after(**options):
        config = OptimizerConfig(name=name, learning_rate=1e-2, warmup_steps=0, **options)
        return run(config.optimizer(4), wide, gradients)[0]

    plain = after()
    for option, wanted in (OPTIONS[name] | {"weight_decay": {"norm", "layers"}}).items():
        new = after(**{option: 0.5})
        same = {part: jax.tree.map(np.array_equal, new[part], plain[part]) for part in new}
        assert {part for part in same if not all(jax.tree.leaves(same[part]))} == wanted, option


@pytest.mark.parametrize(
    ("schedule", "final", "expected"),
    [
        ("constant", {}, [0.5, 1, 1, 1, 1, 1, 1, 1]), ("linear", {}, [0.5, 1, 0.775, 0.55, 0.325, 0.1, 0.1, 0.1]),
        # (1 + cos 45°) / 2 = 0.853553
        ("cosine", {}, [0.5, 1, 0.868198, 0.55, 0.231802, 0.1, 0.1, 0.1]),
        ("linear", {"final_rate": 0.0}, [0.5, 1, 0.75, 0.5, 0.25, 0, 0, 0]),
    ],
)  # fmt: skip
def test_schedules_by_hand(schedule, final, expected):
    """Two updates of warm-up of six."""
    rate = learning_rate(schedule, 2.0, warmup_steps=2, steps=6, **final)
    # Constants of six digits, times 2.
    np.testing.assert_allclose([float(rate(n)) for n in range(8)], 2 * np.array(expected), atol=2e-6)


def test_schedules_without_warm_up_or_shorter_than_it():
    # Here and below: three or four roundings of numbers of at most 1.
    linear = learning_rate("linear", 1.0, warmup_steps=0, steps=4, final_rate=0.4)
    np.testing.assert_allclose([float(linear(n)) for n in range(4)], [1, 0.8, 0.6, 0.4], rtol=1e-6)
    short = learning_rate("cosine", 1.0, warmup_steps=4, steps=2)
    np.testing.assert_allclose([float(short(n)) for n in range(4)], [0.25, 0.5, 0.75, 1], rtol=1e-6)


def test_another_number_of_steps_decides_the_rates_from_there_on():
    params, options = {"w": jnp.ones(2)}, {"schedule": "linear", "warmup_steps": 2, "learning_rate": 1.0}
    _, state, rates = run(OptimizerConfig(**options).optimizer(6), params, [{"w": jnp.ones(2)}] * 3)
    np.testing.assert_allclose(rates, [0.5, 1, 0.775], rtol=1e-6)
    longer = OptimizerConfig(**options).optimizer(20)
    _, state, rate = longer.update({"w": jnp.ones(2)}, state, params)
    assert int(state.count) == 4
    # Update 4 of a run of 20: two of eighteen updates after the peak.
    assert math.isclose(rate, 1 - 0.9 * 2 / 18, rel_tol=1e-6)
    half = OptimizerConfig(**options, final_rate=0.5).optimizer(20)
    _, _, rate = half.update({"w": jnp.ones(2)}, state._replace(count=jnp.int32(3)), params)
    assert math.isclose(rate, 1 - 0.5 * 2 / 18, rel_tol=1e-6)


@pytest.mark.bad_input
def test_muon_needs_a_matrix():
    with pytest.raises(ValueError, match="^--optimizer.name: expected an optimizer other than muon"):
        OptimizerConfig(name="muon", learning_rate=1e-3).optimizer(10).init({"w": jnp.ones((4, 4))})


@pytest.mark.bad_input
@pytest.mark.parametrize("option", ["b1", "momentum"])
def test_a_decay_that_bf16_would_round_away_is_refused(option):
    options = {"name": "muon", "learning_rate": 1e-3, "first_moment_dtype": "bfloat16"}
    OptimizerConfig(**options, **{option: 0.98}).optimizer(1)
    with pytest.raises(ValueError, match=f"^--optimizer.{option}: expected at most 0.98 with "):
        OptimizerConfig(**options, **{option: 0.981}).optimizer(1)
    OptimizerConfig(**options | {"first_moment_dtype": "float32"}, **{option: 0.99}).optimizer(1)
