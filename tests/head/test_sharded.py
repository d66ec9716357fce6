"""The sharded functions with every layout of their arrays, on four devices, against float64 on the whole arrays."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxlogp import (
    VocabShards,
    linear_kl,
    linear_log_probs,
    linear_policy_loss,
    sharded_linear_kl,
    sharded_linear_log_probs,
    sharded_linear_policy_loss,
)
from jaxlogp.head import ChunkedEngine, over_mesh, record_head_runs
from jaxlogp.losses import Correction, grpo, grpo_paper, gspo, kl_cov
from tests import oracle
from tests.head import policy_problem
from tests.head.policy_problem import DOCUMENTS, HEAD, OPTIONS, problem

pytestmark = pytest.mark.costly

# fp32 on the same inputs (contract): values 1e-5, gradients 2e-5; the psums add four roundings of 2^-24.
VALUE_ERROR, GRADIENT_ERROR = 1e-5, 2e-5
LAYOUTS = {
    "vh": {},
    "hv": {"weight_layout": "hv"},
    "hv, H over data": {"weight_layout": "hv", "weight_axis": "data"},
    "vh, H over data": {"weight_axis": "data"},
    "sequence parallel": {"sequence_dim": 1},
    "sequence parallel in the first dimension": {"sequence_dim": 0},
    "no token axes": {"token_axes": ()},
}


def mesh(kind):
    """Both axes of one kind, or each of its own."""
    kinds = kind if isinstance(kind, tuple) else (kind,) * 2
    return jax.make_mesh((2, 2), ("data", "tensor"), axis_types=kinds, devices=jax.devices()[:4])


def operands(data, layout):
    weight = data["weight"].T if layout.get("weight_layout") == "hv" else data["weight"]
    return data["hidden"], weight, data["bias"]


def check_gradients(gradients, wanted, layout):
    for name, gradient in zip(HEAD, gradients, strict=True):
        gradient = gradient.T if name == "weight" and layout.get("weight_layout") == "hv" else gradient
        assert oracle.relative_error(gradient, getattr(wanted, name)) < GRADIENT_ERROR, name


@pytest.mark.parametrize("name", LAYOUTS)
def test_log_probs_against_float64(name):
    data, layout = problem(), LAYOUTS[name]
    mask = np.asarray(data["mask"])

    def objective(hidden, weight, bias):
        options = {"mesh": mesh(AxisType.Auto), "mask": data["mask"], **layout, **OPTIONS}
        log_probs = sharded_linear_log_probs(hidden, weight, data["targets"], bias=bias, **options).log_probs
        return log_probs.sum(), log_probs

    gradients, log_probs = jax.grad(objective, (0, 1, 2), has_aux=True)(*operands(data, layout))
    arguments = data["hidden"], data["weight"], data["targets"]
    wanted, _ = oracle.head_log_probs(*arguments, mask, data["bias"], oracle.Head(**OPTIONS))
    assert oracle.scaled_error(log_probs, wanted) < VALUE_ERROR
    head = oracle.head_gradients(*arguments, mask * 1.0, None, mask, data["bias"], oracle.Head(**OPTIONS))
    check_gradients(gradients, head, layout)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize(
    "loss", [grpo(), gspo(weighting="length", epsilon=0.2, epsilon_high=0.2)], ids=lambda x: x.name
)
@pytest.mark.parametrize("name", ["vh", "hv, H over data", "sequence parallel"])
def test_policy_loss_against_float64(name, loss, kind):
    """A document begins on one data rank and ends on the other."""
    data, layout = problem(), LAYOUTS[name]
    mask = np.asarray(data["mask"])

    def objective(hidden, weight, bias):
        given = (data[argument] for argument in ("targets", "old", "advantages", "mask"))
        options = {"mesh": mesh(kind), "loss": loss, **policy_problem.of_the_loss(data, loss), **layout, **OPTIONS}
        total, values = sharded_linear_policy_loss(hidden, weight, *given, bias=bias, **options)
        return 3.0 * total.mean(), (total, values)

    # Outside of a mesh context JAX itself cannot differentiate a number on Explicit axes.
    with jax.set_mesh(mesh(kind)):
        given = jax.device_put(operands(data, layout), NamedSharding(mesh(kind), P()))
        gradients, (total, values) = jax.grad(objective, (0, 1, 2), has_aux=True)(*given)
    arguments = data["hidden"], data["weight"], data["targets"]
    log_probs, _ = oracle.head_log_probs(*arguments, mask, data["bias"], oracle.Head(**OPTIONS))
    documents = (data["ids"], len(DOCUMENTS)) if loss.needs_documents else ()
    wanted = getattr(oracle, loss.name.split(",")[0])(log_probs, data["old"], data["advantages"], mask, *documents)
    assert abs(float(total.mean()) - wanted.loss) < VALUE_ERROR
    assert oracle.scaled_error(values.log_probs, log_probs) < VALUE_ERROR
    head = oracle.head_gradients(*arguments, 3 * wanted.gradient, None, mask, data["bias"], oracle.Head(**OPTIONS))
    check_gradients(gradients, head, layout)


@pytest.mark.bad_input
def test_values_are_checked_before_the_program_runs():
    data = problem()
    given = [data[argument] for argument in ("hidden", "weight", "targets", "old", "advantages", "mask")]
    place = tuple(np.argwhere(np.asarray(data["mask"]))[0])
    bad = [*given[:4], data["advantages"].at[place].set(np.nan), given[5]]
    with pytest.raises(ValueError, match="^advantages: expected a finite value"):
        sharded_linear_policy_loss(*bad, mesh=mesh(AxisType.Auto))
    with pytest.raises(ValueError, match="^document_axis_name: expected not to be given"):
        sharded_linear_policy_loss(*given, mesh=mesh(AxisType.Auto), document_axis_name="data")
    with pytest.raises(ValueError, match="^temperature: expected a hashable value"):
        sharded_linear_log_probs(*given[:2], data["targets"] % 41, mesh=mesh(AxisType.Auto), temperature=np.ones(1))
    with pytest.raises(ValueError, match=r"^weight_axis: expected one of token_axes \(\), or None, got 'data'"):
        sharded_linear_log_probs(*given[:3], mesh=mesh(AxisType.Auto), token_axes=(), weight_axis="data")


@pytest.mark.bad_input
@pytest.mark.parametrize(
    "shapes, options, sentence",
    [
        (((3, 4, 8), (16, 8)), {}, r"hidden: expected a first dimension divisible by 2, got shape \(3, 4, 8\)"),
        (((2, 4, 8), (16, 8)), {"sequence_dim": 0}, "hidden: expected a dimension 0 divisible by 4, got shape"),
        (((2, 4, 8), (16, 8)), {"sequence_dim": -1}, r"sequence_dim: expected a dimension of the tokens \(2, 4\)"),
        (((2, 4, 8), (16, 8)), {"sequence_dim": True}, r"sequence_dim: expected a dimension of the tokens \(2, 4\)"),
        (((2, 4, 9), (16, 9)), {"weight_axis": "data"}, "weight: expected a hidden dimension divisible by 2, got "),
        (
            ((2, 4, 8), (16, 8)),
            {"weight_axis": "data", "engine": "fixed_order"},
            "weight_axis: expected None with an engine that sums gradients itself, got 'data'",
        ),
    ],
)
def test_what_a_mesh_does_not_divide_is_refused(shapes, options, sentence):
    hidden, weight = map(jnp.ones, shapes)
    with pytest.raises(ValueError, match=f"^{sentence}"):
        sharded_linear_log_probs(hidden, weight, jnp.zeros(shapes[0][:2], jnp.int32), mesh=over((2, 2)), **options)


def test_a_weight_split_over_an_axis_that_splits_no_tokens():
    data = problem(vocab=512, bias=False)
    hidden, weight, targets = (data[name] for name in ("hidden", "weight", "targets"))
    weight = jax.device_put(weight, NamedSharding(mesh(AxisType.Auto), P("tensor", "data")))
    given = [jax.device_put(x, NamedSharding(mesh(AxisType.Auto), P())) for x in (hidden, targets)]
    mask = np.asarray(data["mask"])
    values = linear_log_probs(given[0], weight, given[1], jax.device_put(data["mask"], given[1].sharding))
    wanted, _ = oracle.head_log_probs(hidden, data["weight"], targets, mask, None, oracle.Head())
    assert oracle.scaled_error(values.log_probs, wanted) < VALUE_ERROR


def split(kind, vocab_dim=0, data=None):
    """Operands and the data of a loss on a mesh, the weight split along V and tokens over data."""
    data = problem(vocab=512, bias=False) if data is None else dict(data)
    spec = P(*(None if dim != vocab_dim else "tensor" for dim in range(2)))
    specs = {"weight": spec} | dict.fromkeys(("hidden", "targets", "old", "advantages", "mask"), P("data"))
    data["weight"] = data["weight"] if vocab_dim == 0 else data["weight"].T
    return [jax.device_put(data[name], NamedSharding(mesh(kind), specs[name])) for name in WHOLE]


WHOLE = ("hidden", "weight", "targets", "old", "advantages", "mask")
TILED = ChunkedEngine(token_chunk=16, vocab_tile=64)
PLAIN = {
    "log-probs": lambda h, w, targets, old, advantages, mask, **options: linear_log_probs(
        h, w, targets, mask=mask, **options
    ).log_probs.sum(),
    "loss": lambda *given, **options: linear_policy_loss(*given, **options)[0].sum,
    "divergence": lambda h, w, targets, old, advantages, mask, **options: linear_kl(h, w, -h, w, mask, **options).sum(),
}


@pytest.mark.parametrize("layout", ["vh", "hv"])
@pytest.mark.parametrize("name", PLAIN)
def test_a_plain_call_on_explicit_axes_gathers_no_weight(name, layout):
    given = split(AxisType.Explicit, ["vh", "hv"].index(layout))
    step = jax.jit(jax.value_and_grad(lambda *given: PLAIN[name](*given, weight_layout=layout, engine=TILED), (0, 1)))
    text = step.lower(*given).compile().as_text()
    assert "all-reduce" in text
    assert "all-gather" not in text
    # The control: without a sharding in the types XLA gathers it.
    automatic = jax.jit(jax.grad(lambda *given: PLAIN[name](*given, weight_layout=layout, engine=TILED), (0, 1)))
    assert "all-gather" in automatic.lower(*split(AxisType.Auto, ["vh", "hv"].index(layout))).compile().as_text()
    value, gradients = step(*given)
    alone = [jnp.asarray(np.asarray(x)) for x in given]
    wanted, wanted_gradients = jax.value_and_grad(
        lambda *given: PLAIN[name](*given, weight_layout=layout, engine="reference"), (0, 1)
    )(*alone)
    # Two fp32 computations, each within the contract's error of float64.
    assert abs(float(value) - float(wanted)) < 2 * VALUE_ERROR * np.prod(given[2].shape)
    for seen, want in zip(gradients, wanted_gradients, strict=True):
        assert oracle.relative_error(seen, oracle.f64(want)) < 2 * GRADIENT_ERROR


MIXED = (AxisType.Auto, AxisType.Explicit), (AxisType.Explicit, AxisType.Auto)


@functools.cache
def value_alone(name):
    return float(PLAIN[name](*(jnp.asarray(np.asarray(x)) for x in split(AxisType.Auto))))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit, *MIXED], ids=str)
@pytest.mark.parametrize("name", PLAIN)
def test_a_plain_call_on_concrete_arrays_is_sharded(name, kind):
    given = split(kind)
    with record_head_runs() as runs:
        value = PLAIN[name](*given)
    assert [run.num_vocab_shards for run in runs] == [2] * (2 if name == "divergence" else 1)
    # Two fp32 computations, each within the contract's error of float64.
    assert abs(float(value) - value_alone(name)) < 2 * VALUE_ERROR * given[2].size


def over(sizes, names=("data", "tensor"), kind=AxisType.Explicit, order=1):
    """A mesh of four devices, in their order or, with -1, in the reverse of it."""
    return Mesh(np.array(jax.devices()[:4])[::order].reshape(sizes), names, axis_types=(kind,) * len(names))


def on_two_meshes(tokens, weight, of_tokens=None, of_weight=None, rows=8):
    """Hidden states [rows, 4, 8] and targets on a mesh, and the weight [16, 8] on one of its own."""
    rng = np.random.default_rng(0)
    hidden, head = (rng.normal(size=shape).astype(np.float32) for shape in ((rows, 4, 8), (16, 8)))
    targets = rng.integers(0, 16, (rows, 4)).astype(np.int32)
    on_tokens = NamedSharding(tokens, of_tokens or P("data"))
    on_vocab = NamedSharding(weight, of_weight or P("tensor"))
    return [jax.device_put(x, on) for x, on in ((hidden, on_tokens), (head, on_vocab), (targets, on_tokens))]


@pytest.mark.parametrize(
    "tokens, of_tokens, of_weight, rows",
    [
        (((2, 2), ("data", "tensor")), P("tensor"), P("tensor"), 8),
        (((2, 2), ("data", "tensor")), P("data"), P(("data", "tensor")), 8),
        (((2, 2), ("data", "tensor")), P(None, "data"), P("tensor"), 8),
        (((4,), ("rows",), AxisType.Auto), P("rows"), P("tensor"), 8),
        (((1, 4), ("data", "tensor"), AxisType.Auto), P("data"), P("tensor"), 3),
    ],
    ids=["tokens over the axis of V", "V over two axes", "a later dimension", "another axis", "another size"],
)
def test_other_placements_are_left_to_xla(tokens, of_tokens, of_weight, rows):
    """No sharded function has them; the values stay split as the tokens are."""
    kind = tokens[2] if len(tokens) > 2 else AxisType.Explicit
    given = on_two_meshes(over(*tokens), over((2, 2), kind=kind), of_tokens, of_weight, rows)
    with record_head_runs() as runs:
        log_probs = linear_log_probs(*given).log_probs
    assert [run.num_vocab_shards for run in runs] == [1]
    assert log_probs.sharding.is_equivalent_to(given[2].sharding, 2)
    wanted, _ = oracle.head_log_probs(*map(np.asarray, given), None, None, oracle.Head())
    assert oracle.scaled_error(log_probs, wanted) < VALUE_ERROR


@pytest.mark.bad_input
@pytest.mark.parametrize("wrap", [lambda function: function, jax.jit], ids=["concrete", "traced"])
def test_types_of_two_meshes_are_refused(wrap):
    given = on_two_meshes(over((4,), ("data",)), over((2, 2)))
    sentence = r"^hidden: expected the mesh of weight, \{'data': 2, 'tensor': 2\}, got a mesh \{'data': 4\}"
    with pytest.raises(ValueError, match=sentence):
        wrap(linear_log_probs)(*given)
    with pytest.raises(ValueError, match=sentence):
        wrap(linear_policy_loss)(*given, None, jnp.ones((8, 4)))


@pytest.mark.parametrize(
    "kind, of_tokens, of_weight, shards",
    [
        (AxisType.Auto, P("data"), P(("data", "tensor")), 1),
        (AxisType.Explicit, P(None), P("tensor"), 2),
        (AxisType.Explicit, P("data"), P(None), 1),
    ],
    ids=["tokens without types", "whole tokens", "whole weight"],
)
def test_two_meshes_are_taken_where_types_of_both_do_not_meet(kind, of_tokens, of_weight, shards):
    given = on_two_meshes(over((4,), ("data",), kind), over((2, 2)), of_tokens, of_weight)
    with record_head_runs() as runs:
        assert jax.eval_shape(linear_log_probs, *given).log_probs.shape == (8, 4)
    assert [run.num_vocab_shards for run in runs] == [shards]


@pytest.mark.bad_input
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_devices_in_two_orders_are_refused(kind):
    given = on_two_meshes(over((2, 2), kind=kind, order=-1), over((2, 2), kind=kind))
    sentence = r"^hidden: expected the devices of weight, in the order \[0, 1, 2, 3\], got devices \[3, 2, 1, 0\]$"
    with pytest.raises(ValueError, match=sentence):
        linear_log_probs(*given)


def test_penalized_labels_reach_a_sharded_loss():
    """Called by its name, and by the plain call on arrays that are known to be split."""
    data, loss = problem(vocab=512, bias=False), kl_cov(drift_coefficient=0.5)
    wanted = policy_problem.two_calls(data, loss)[0].sum
    bare = policy_problem.two_calls(data, kl_cov(drift_coefficient=0.0))[0].sum
    options = {"loss": loss, "penalized": data["penalized"]}
    given = split(AxisType.Auto)
    for total, _ in (
        linear_policy_loss(*given, **options),
        sharded_linear_policy_loss(*given, mesh=mesh(AxisType.Auto), **options),
    ):
        assert (
            abs(float(total.sum) - float(wanted)) < 2 * VALUE_ERROR * given[2].size < abs(float(bare) - float(wanted))
        )


def test_every_argument_of_a_plain_call_reaches_the_sharded_one():
    """A frozen head, entropies of another scale, a KL, weights of mean 1 and documents, on arrays known to be split."""
    data = problem(vocab=512)
    correction = Correction(high=1.2, normalize=True)
    loss = grpo_paper(kl_coefficient=0.2, entropy_coefficient=0.1, entropy_weights="labels", correction=correction)
    options = policy_problem.of_the_loss(data, loss) | {"loss": loss, "bias": data["bias"], "with_lse": True, **OPTIONS}
    options |= {"sampler_log_probs": data["old"] - 0.1, "mean_weight": 1.05, "entropy_scale": 0.5}
    place = tuple(np.argwhere(np.asarray(data["mask"]))[3])
    data["targets"] = data["targets"].at[place].set(512)

    def step(*given):
        def total(hidden, weight):
            total, values = linear_policy_loss(
                hidden, weight, *given[2:], frozen_head=True, out_of_vocab="zero", **options
            )
            return total.sum, (total.count, values)

        return jax.value_and_grad(total, (0, 1), has_aux=True)(*given[:2])

    with record_head_runs() as runs, jax.set_mesh(mesh(AxisType.Explicit)):
        (total, (count, values)), gradients = jax.jit(step)(*split(AxisType.Explicit, data=data))
    assert {run.num_vocab_shards for run in runs} == {2}
    (wanted, (wanted_count, wanted_values)), (wanted_hidden, _) = jax.jit(step)(*(data[name] for name in WHOLE))
    # Two fp32 computations, each within the contract's error of float64.
    assert abs(float(total) - float(wanted)) < 2 * VALUE_ERROR * data["targets"].size and int(count) == wanted_count
    assert np.asarray(values.log_probs)[place] == 0.0
    for seen, want in zip(values, wanted_values, strict=True):
        assert oracle.scaled_error(seen, oracle.f64(want)) < 2 * VALUE_ERROR
    assert oracle.relative_error(gradients[0], oracle.f64(wanted_hidden)) < 2 * GRADIENT_ERROR
    assert not np.asarray(gradients[1]).any()


AUTO, EXPLICIT = (AxisType.Auto,) * 2, (AxisType.Explicit,) * 2


def manual(axes, function):
    """The function in a shard_map over some axes of the context, with every operand whole on every rank."""
    return jax.shard_map(function, in_specs=P(), out_specs=P(), axis_names=axes)


def sentences_of(function, kinds=AUTO, sizes=(2, 2)):
    """What a traced call under jax.set_mesh warns with."""
    count = sizes[0] * sizes[1]
    context = jax.make_mesh(sizes, ("data", "tensor"), axis_types=kinds, devices=jax.devices()[:count])
    data = problem(vocab=512, bias=False)
    with warnings.catch_warnings(record=True) as caught, jax.set_mesh(context):
        warnings.simplefilter("always")
        jax.eval_shape(function, *(data[argument] for argument in WHOLE))
    assert all(each.category is UserWarning for each in caught)
    return [str(each.message) for each in caught]


@pytest.fixture
def no_warning_yet(monkeypatch):
    monkeypatch.setattr(over_mesh, "_WARNED", set())


@pytest.mark.parametrize(
    "axes, wrap, context",
    [
        (("data", "tensor"), jax.jit, {}),
        (("data", "tensor"), jax.grad, {}),
        (("tensor",), jax.jit, {"sizes": (1, 2)}),
        (("tensor",), jax.jit, {"kinds": (AxisType.Explicit, AxisType.Auto)}),
        (("tensor",), lambda function: manual({"data"}, function), {}),
    ],
    ids=["jit", "a gradient", "an axis of one device", "an Explicit axis", "a shard_map over the other axis"],
)
@pytest.mark.parametrize("name", PLAIN)
def test_a_traced_call_on_auto_axes_of_a_context_warns_once(no_warning_yet, name, axes, wrap, context):
    functions = {"log-probs": "linear_log_probs", "loss": "linear_policy_loss", "divergence": "linear_kl"}
    function = functions[name]
    (sentence,) = sentences_of(wrap(PLAIN[name]), **context)
    assert str(axes) in sentence and f"call sharded_{function}(..., mesh=...)" in sentence
    assert sentences_of(wrap(lambda *given: PLAIN[name](*given)), **context) == []


SHARDED = {
    "log-probs": lambda h, w, targets, old, advantages, mask: sharded_linear_log_probs(
        h, w, targets, mask=mask, mesh=mesh(AxisType.Auto)
    ).log_probs.sum(),
    "loss": lambda *given: sharded_linear_policy_loss(*given, mesh=mesh(AxisType.Auto))[0].sum,
    "divergence": lambda h, w, *_: sharded_linear_kl(h, w, -h, w, mesh=mesh(AxisType.Auto)).sum(),
}


@pytest.mark.parametrize("name", PLAIN)
def test_no_other_traced_call_in_a_context_warns(no_warning_yet, name):
    plain = PLAIN[name]
    assert sentences_of(plain, EXPLICIT) == []
    assert sentences_of(plain, sizes=(1, 1)) == []
    assert sentences_of(manual({"data", "tensor"}, plain)) == []
    assert sentences_of(SHARDED[name]) == []
    assert sentences_of(lambda *given: plain(*given, vocab=VocabShards.even(512, 1))) == []
    # Untraced arrays say how they are split.
    with jax.set_mesh(mesh(AxisType.Auto)):
        plain(*split(AxisType.Auto))
