"""Derivatives of the head's gradients: right where an engine promises them, refused everywhere else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxlogp import linear_log_probs, linear_policy_loss
from jaxlogp.head import ChunkedEngine, GradientFilter
from jaxlogp.losses import grpo
from tests import oracle
from tests.head import cases

TOKENS, HIDDEN, VOCAB = 6, 5, 30
HEAD = {"temperature": 0.7, "softcap": 5.0}
# A product of two first derivatives, each within the contract's 2e-5 of float64.
ERROR = 2 * cases.FP32_GRADIENT_ERROR
STEP = 1e-5  # of the central difference in float64: its error is about STEP^2 = 1e-10
RIGHT = ["reference", ChunkedEngine(token_chunk=4, vocab_tile=16)]
CASE = cases.case(TOKENS, HIDDEN, VOCAB, dtypes=jnp.float32, bias=jnp.float32)
MASK = np.arange(TOKENS) != 2
OPERANDS = tuple(CASE[name] for name in ("hidden", "weight", "bias"))
DIRECTION = tuple(jnp.asarray(np.random.default_rng(8).normal(size=x.shape), jnp.float32) for x in OPERANDS)
OLD = jnp.asarray(np.random.default_rng(9).normal(-3.0, 0.3, TOKENS), jnp.float32)
ADVANTAGES = jnp.asarray(np.random.default_rng(10).normal(size=TOKENS), jnp.float32)


def values64(hidden, weight, bias):
    return oracle.head_log_probs(hidden, weight, CASE["targets"], MASK, bias, oracle.Head(**HEAD))


def gradient64(operands, g_log_probs, g_entropy=None):
    hidden, weight, bias = operands
    arguments = CASE["targets"], g_log_probs, g_entropy, MASK, bias, oracle.Head(**HEAD)
    return oracle.head_gradients(hidden, weight, *arguments)


def difference64(function):
    """Central difference of a function of float64 operands, along DIRECTION."""
    ahead, behind = (
        function([oracle.f64(x) + sign * STEP * oracle.f64(d) for x, d in zip(OPERANDS, DIRECTION, strict=True)])
        for sign in (1, -1)
    )
    return [(a - b) / (2 * STEP) for a, b in zip(ahead, behind, strict=True)]


def curvature(function, operands=OPERANDS, direction=DIRECTION):
    """The Hessian of ``function`` times DIRECTION."""
    return jax.jit(lambda x, d: jax.jvp(jax.grad(function, (0, 1, 2)), x, d)[1])(operands, direction)


def check(actual, wanted):
    for name, one, other in zip(("hidden", "weight", "bias"), actual, wanted, strict=True):
        assert oracle.relative_error(one, other) < ERROR, name


def head(hidden, weight, bias, engine, **options):
    options = {"mask": MASK, "with_entropy": True, **HEAD, **options}
    return linear_log_probs(hidden, weight, CASE["targets"], bias=bias, engine=engine, **options)


def product(values):
    """A loss in which both cotangents depend on both values."""
    return jnp.sum(values.log_probs * (values.log_probs / 2 + values.entropy))


def product_gradient64(operands):
    log_probs, entropy = values64(*operands)
    return gradient64(operands, log_probs + entropy, log_probs)


@pytest.mark.parametrize("engine", RIGHT, ids=str)
def test_log_probs_and_entropies_against_float64(engine):
    check(curvature(lambda *x: product(head(*x, engine))), difference64(product_gradient64))


@pytest.mark.parametrize("engine", RIGHT, ids=str)
def test_a_squared_error_at_its_minimum_keeps_its_curvature(engine):
    """The cotangent is 0 at every token there, and the Hessian is JᵀJ: it came out as 0."""

    def squared(*operands):
        log_probs = head(*operands, engine).log_probs
        return jnp.sum((log_probs - jax.lax.stop_gradient(log_probs)) ** 2) / 2

    moved = difference64(lambda operands: [values64(*operands)[0]])[0]
    check(curvature(squared), gradient64(OPERANDS, moved))


@pytest.mark.parametrize("engine", RIGHT, ids=str)
def test_the_policy_loss_against_float64(engine):
    def loss(hidden, weight, bias):
        arguments = hidden, weight, CASE["targets"], OLD, ADVANTAGES, MASK
        return linear_policy_loss(*arguments, bias=bias, loss=grpo(epsilon=0.9), engine=engine, **HEAD)[0].mean()

    def gradient(operands):
        wide = {"epsilon_low": 0.9, "epsilon_high": 0.9}
        of_loss = oracle.grpo(values64(*operands)[0], OLD, ADVANTAGES, MASK, **wide).gradient
        return gradient64(operands, of_loss)

    wanted = difference64(gradient)
    assert all(np.abs(each).max() > 0 for each in wanted)
    check(curvature(loss), wanted)


def test_over_vocabulary_shards_and_data_ranks():
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])

    def local(hidden, weight, bias, targets, mask):
        options = {"mask": mask, "with_entropy": True, "axis_name": "tensor", "engine": RIGHT[1], **HEAD}
        return jax.lax.psum(product(linear_log_probs(hidden, weight, targets, bias=bias, **options)), "data")

    split, rows = P("data"), P("tensor")
    mapped = jax.shard_map(local, mesh=mesh, in_specs=(split, rows, rows, split, split), out_specs=P())
    check(curvature(lambda *x: mapped(*x, CASE["targets"], MASK)), difference64(product_gradient64))


# --- refused ------------------------------------------------------------------------------------------------------

REFUSAL = "^engine: expected one whose gradient can be differentiated again .*got '"
OTHERS = [entry for entry in cases.ENGINES if entry.name not in ("reference", "chunked")]


def log_prob_squares(case, engine):
    return lambda hidden: jnp.sum(cases.call({**case, "hidden": hidden}, engine).log_probs ** 2)


def policy_loss(case, engine, **options):
    def loss(hidden):
        old = jnp.full(case["targets"].shape, -3.0)
        arguments = case["weight"], case["targets"], old, jnp.ones_like(old), case["mask"]
        return linear_policy_loss(hidden, *arguments, bias=case["bias"], engine=engine, **options)[0].mean()

    return loss


def of_engines():
    filtered = cases.Entry("chunked", ChunkedEngine(gradient_filter=GradientFilter()))
    for entry in [*OTHERS, filtered]:
        skip = pytest.mark.skipif(entry.missing is not None, reason=str(entry.missing))
        yield pytest.param(entry, id=entry.name, marks=skip)


@pytest.mark.bad_input
@pytest.mark.parametrize("function", [log_prob_squares, policy_loss])
@pytest.mark.parametrize("entry", list(of_engines()))
def test_other_engines_refuse(entry, function):
    case = entry.case()
    of_hidden = function(case, entry.engine)
    for derivative in (jax.hessian, lambda f: jax.grad(lambda x: jnp.vdot(jax.grad(f)(x), x).astype(jnp.float32))):
        with pytest.raises(ValueError, match=REFUSAL + entry.name):
            jax.eval_shape(derivative(of_hidden), case["hidden"])


@pytest.mark.bad_input
def test_values_and_cotangents_of_a_gradient_count_as_well():
    """Not the backward alone: the forward rule of fixed_order gave wrong derivatives of its values too."""
    entry = OTHERS[0]
    case = entry.case()
    of_hidden = log_prob_squares(case, entry.engine)

    def by_cotangent(advantages):
        def total(hidden):
            return jnp.sum(cases.call({**case, "hidden": hidden}, entry.engine).log_probs * advantages)

        return jnp.sum(jax.grad(total)(case["hidden"]))

    for function, x in ((lambda x: jax.vjp(of_hidden, x)[0], case["hidden"]), (by_cotangent, case["g_lp"])):
        with pytest.raises(ValueError, match=REFUSAL):
            jax.eval_shape(jax.grad(function), x)


@pytest.mark.bad_input
def test_a_known_log_sum_exp_is_refused():
    case = cases.ENGINES[1].case()
    of_hidden = policy_loss(case, "chunked", lse=jnp.full(case["targets"].shape, 5.0))
    with pytest.raises(ValueError, match="^lse: expected None where the gradient is differentiated again"):
        jax.eval_shape(jax.hessian(of_hidden), case["hidden"])


@pytest.mark.costly
def test_programs_around_a_first_derivative_keep_working():
    """Whatever differentiates, traces or repeats a gradient once; bits are those that docs/invariance.md promises."""
    entry = OTHERS[0]
    case = entry.case()
    function, hidden = log_prob_squares(case, entry.engine), case["hidden"]
    wanted = jax.jit(jax.grad(function))(hidden)
    constant = jax.lax.stop_gradient

    def repeated(x):
        return jax.lax.scan(lambda total, _: (total + function(x), None), jnp.float32(0), None, length=1)[0]

    programs = {
        "checkpoint": jax.grad(jax.checkpoint(function)),
        "scan": jax.grad(repeated),
        "gradients in a scan": lambda x: jax.lax.scan(lambda c, _: (c, jax.grad(function)(c)), x, None, length=1)[1][0],
        "linearize": lambda x: jax.linear_transpose(jax.linearize(function, x)[1], x)(jnp.float32(1))[0],
        "a constant gradient": jax.grad(lambda x: function(x) + jnp.sum(jax.grad(function)(constant(x)))),
    }
    for name, program in programs.items():
        np.testing.assert_array_equal(jax.jit(program)(hidden), wanted, err_msg=name)
