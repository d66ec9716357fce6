"""Padded rows [B, T]: advantages per row, rows as documents, on policy, optional masks; against the long forms."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxlogp
from jaxlogp import PolicyLoss, linear_policy_loss, losses, policy_loss, policy_metric_terms, policy_metrics
from jaxlogp.losses.objectives import LogLikelihood

ROWS, LENGTH, HIDDEN, VOCAB = 4, 5, 6, 24
LOSSES = {
    "grpo": losses.grpo(),
    "grpo_paper": losses.grpo_paper(),
    "gspo": losses.gspo(),
    "dr_grpo": losses.dr_grpo(length=LENGTH),
}


@functools.cache
def batch():
    """(new, old, advantages [B], mask [B, T] with a row without labels)."""
    rng = np.random.default_rng(0)
    new, old = -rng.uniform(0.1, 2.0, (2, ROWS, LENGTH)).astype(np.float32)
    advantages = np.float32([1.0, -0.5, 2.0, 0.3])
    lengths = np.array([5, 2, 0, 3])
    return new, old, advantages, np.arange(LENGTH) < lengths[:, None]


def long_form(advantages=None):
    """The advantages of every token, and the rows as documents, written out."""
    rows = np.broadcast_to(np.arange(ROWS, dtype=np.int32)[:, None], (ROWS, LENGTH))
    spread = np.repeat(batch()[2][:, None], LENGTH, axis=1) if advantages is None else advantages
    return spread, {"document_ids": rows, "num_documents": ROWS}


def head_operands():
    rng = np.random.default_rng(1)
    hidden = rng.normal(0.0, 1.0, (ROWS, LENGTH, HIDDEN)).astype(np.float32)
    weight = rng.normal(0.0, 1.0, (VOCAB, HIDDEN)).astype(np.float32)
    targets = rng.integers(0, VOCAB, (ROWS, LENGTH)).astype(np.int32)
    return jnp.asarray(hidden), jnp.asarray(weight), jnp.asarray(targets)


def same(left, right):
    jax.tree.map(np.testing.assert_array_equal, left, right)


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("column", [False, True], ids=["[B]", "[B, 1]"])
def test_rows_are_documents_with_one_advantage(loss, column):
    new, old, advantages, mask = batch()
    spread, documents = long_form()
    advantages = advantages[:, None] if column else advantages
    same(
        policy_loss(new, old, advantages, mask, loss=loss), policy_loss(new, old, spread, mask, loss=loss, **documents)
    )
    metrics = policy_metrics(new, old, advantages, mask, loss=loss)
    same(metrics, policy_metrics(new, old, spread, mask, loss=loss, **documents))
    assert int(metrics["num_documents"]) == ROWS and int(metrics["num_documents_labelled"]) == ROWS - 1


def test_grpo_of_the_paper_against_float64():
    new, old, advantages, mask = batch()
    ratio = np.exp(np.float64(new) - np.float64(old))
    limited = np.clip(ratio, 0.8, 1.2)
    value = np.minimum(ratio * advantages[:, None], limited * advantages[:, None])
    rows = [value[row][mask[row]].mean() if mask[row].any() else 0.0 for row in range(ROWS)]
    mean = policy_loss(new, old, advantages, mask, loss=losses.grpo_paper()).mean()
    # Values up to 14 of 10 labels: products, exp and sums round by a few 2^-24 of them.
    np.testing.assert_allclose(mean, -np.mean(rows), atol=14 * 8 * 2.0**-24)


def test_an_advantage_of_a_row_without_labels_means_nothing():
    new, old, advantages, mask = batch()
    broken = np.where(mask.any(axis=1), advantages, np.nan).astype(np.float32)
    same(policy_loss(new, old, broken, mask), policy_loss(new, old, advantages, mask))


@pytest.mark.parametrize("shape", [(LENGTH,), (1, LENGTH), (ROWS, 2), (1,), ()])
def test_other_shapes_of_advantages_are_refused(shape):
    new, old, _, mask = batch()
    with pytest.raises(ValueError, match=r"^advantages: expected shape \(4, 5\) of mask, or \(4,\) or \(4, 1\)"):
        policy_loss(new, old, np.ones(shape, np.float32), mask)


def test_flat_tokens_have_no_rows():
    new, old, _, mask = (x[0] for x in batch())
    with pytest.raises(ValueError, match="^document_ids: expected .* for loss 'gspo'"):
        policy_loss(new, old, np.ones(LENGTH, np.float32), mask, loss=losses.gspo())
    assert "num_documents" not in policy_metrics(new, old, np.ones(LENGTH, np.float32), mask)


@pytest.mark.parametrize("name", ["grpo", "gspo"])
def test_the_head_takes_rows_too(name):
    loss, (hidden, weight, targets) = LOSSES[name], head_operands()
    _, old, advantages, mask = batch()
    spread, documents = long_form()

    def sums(advantages, **options):
        def total(hidden, weight):
            return linear_policy_loss(hidden, weight, targets, old, advantages, mask, loss=loss, **options)[0].mean()

        return jax.jit(jax.value_and_grad(total, argnums=(0, 1)))(hidden, weight)

    short, full = sums(advantages), sums(spread, **documents)
    same(short, full)
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    arguments = hidden, weight, targets, old, advantages, mask
    sharded = jaxlogp.sharded_linear_policy_loss(*arguments, mesh=mesh, loss=loss)[0]
    # Losses up to 2, means of 10 labels; the log-probs behind them, up to 8, round by a few 2^-24 of their size.
    np.testing.assert_allclose(sharded.mean(), full[0], atol=8 * 8 * 2.0**-24)


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
def test_rows_split_over_a_data_axis(kind):
    """Every rank's rows are documents of its own, and a psum adds their numbers up."""
    new, old, advantages, mask = batch()
    mesh = jax.make_mesh((2,), ("data",), axis_types=(kind,))
    loss = LOSSES["grpo_paper"]

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=P("data"), out_specs=P())
    def split(new, old, advantages, mask):
        terms = policy_metric_terms(new, old, advantages, mask, loss=loss).psum("data")
        unmasked = policy_loss(new, old, advantages, loss=loss).psum("data")
        return policy_loss(new, old, advantages, mask, loss=loss).psum("data"), unmasked, terms.values["num_documents"]

    put = [jax.device_put(x, jax.NamedSharding(mesh, P("data"))) for x in batch()]
    total, unmasked, documents = split(*put)
    whole = policy_loss(new, old, advantages, mask, loss=loss)
    assert int(total.count) == int(unmasked.count) == int(documents) == ROWS
    # Two orders of a sum of 4 means of size up to 28.
    np.testing.assert_allclose(total.sum, whole.sum, atol=4 * 28 * 2.0**-24)
    with jax.set_mesh(mesh):
        explicit = jax.jit(functools.partial(policy_loss, loss=loss))(*put)
    np.testing.assert_allclose(explicit.sum, whole.sum, atol=4 * 28 * 2.0**-24)


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_on_policy_is_the_call_with_the_log_probs_as_old_ones(loss):
    new, _, advantages, mask = batch()
    new = jnp.asarray(new)

    def total(new, old):
        return policy_loss(new, old, advantages, mask, loss=loss).sum

    same(jax.value_and_grad(total)(new, None), jax.value_and_grad(total)(new, new))
    metrics = policy_metrics(new, None, advantages, mask, loss=loss)
    same(metrics, policy_metrics(new, new, advantages, mask, loss=loss))


@pytest.mark.parametrize("name", ["grpo", "gspo"])
def test_the_head_on_policy(name):
    loss, (hidden, weight, targets) = LOSSES[name], head_operands()
    _, _, advantages, mask = batch()
    old = jaxlogp.linear_log_probs(hidden, weight, targets).log_probs

    def total(hidden, weight, old):
        return linear_policy_loss(hidden, weight, targets, old, advantages, mask, loss=loss)[0].sum

    with jaxlogp.head.record_head_runs() as runs:
        short = jax.jit(jax.value_and_grad(total, argnums=(0, 1)))(hidden, weight, None)
    assert runs[0].gradient.startswith("in one pass" if name == "grpo" else "in two steps")
    full = jax.value_and_grad(total, argnums=(0, 1))(hidden, weight, old)
    # The other call's ratios are 1 within the rounding of log-probs up to 8, and so are gradients of size up to 10.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=10 * 8 * 4 * 2.0**-24), short, full)
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    arguments = hidden, weight, targets, None, advantages, mask
    sharded = jaxlogp.sharded_linear_policy_loss(*arguments, mesh=mesh, loss=loss)[0]
    np.testing.assert_allclose(sharded.sum, short[0], atol=10 * 8 * 2.0**-24)


def test_the_log_sum_exps_need_the_log_probs_that_belong_to_them():
    hidden, weight, targets = head_operands()
    lse = jnp.zeros((ROWS, LENGTH))
    with pytest.raises(ValueError, match="^old_log_probs: expected the log-probs that lse belongs to, got None"):
        linear_policy_loss(hidden, weight, targets, None, batch()[2], batch()[3], lse=lse)


@pytest.mark.parametrize("name", ["ratio", "log_ratio", "kl_k1", "kl_k2", "kl_k3"])
def test_without_a_mask_every_token_counts(name):
    new, old, _, mask = batch()
    function = getattr(jaxlogp, name)
    same(function(new, old), function(new, old, np.ones_like(mask)))
    same(function(new, old, mask=mask), function(new, old, mask))


def test_without_a_mask_every_token_is_a_label():
    new, old, advantages, mask = batch()
    hidden, weight, targets = head_operands()
    every = np.ones_like(mask)
    same(policy_loss(new, old, advantages), policy_loss(new, old, advantages, every))
    same(policy_metrics(new, old, advantages), policy_metrics(new, old, advantages, every))
    short = linear_policy_loss(hidden, weight, targets, old, advantages)[0]
    same(short, linear_policy_loss(hidden, weight, targets, old, advantages, every)[0])
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    given = hidden, weight, targets, old, advantages
    sharded = jaxlogp.sharded_linear_policy_loss
    same(sharded(*given, mesh=mesh)[0].count, sharded(*given, every, mesh=mesh)[0].count)
    head = functools.partial(jaxlogp.linear_log_probs, hidden, weight, targets)
    active = jnp.asarray(mask)
    same(head(active), head(mask=active))


@pytest.mark.parametrize("reduction", ["labels", "documents", "document_mean", "constant_length"])
def test_reduced_losses_are_those_of_a_loss_with_the_same_tokens(reduction):
    """The objective A log π of each token, given as its loss."""
    new, old, _, mask = batch()
    length = {"length": 7} if reduction == "constant_length" else {}
    loss = PolicyLoss("mine", objective=LogLikelihood(), reduction=reduction, grad_divisor=3.0, **length)
    given = np.where(mask, -new, np.nan)  # whatever stands at masked tokens
    reduced = losses.reduce_losses(given, mask, loss=loss)
    same(reduced, policy_loss(new, old, np.ones(ROWS, np.float32), mask, loss=loss))
    assert reduced.grad_divisor == 3.0
    _, documents = long_form()
    same(reduced, losses.reduce_losses(given, mask, loss=loss, **documents))


def test_reduced_losses_are_differentiable_and_checked():
    new, _, _, mask = batch()
    gradient = jax.grad(lambda x: losses.reduce_losses(x, mask, loss=losses.grpo_paper()).mean())(jnp.asarray(new))
    counts = np.maximum(mask.sum(axis=1, keepdims=True), 1)
    # 1 / (N_d M), each division within half an ulp.
    np.testing.assert_allclose(gradient, np.where(mask, 1.0 / (counts * ROWS), 0.0), rtol=2.0**-22)
    with pytest.raises(ValueError, match="^losses: expected a finite value at every label"):
        losses.reduce_losses(np.full_like(new, np.nan), mask, loss=losses.grpo())
    # The ratio of a loss is its own matter: "sequence" with a mean over labels needs no documents here.
    loss = PolicyLoss("mine", ratio="sequence")
    assert int(losses.reduce_losses(new.ravel(), mask.ravel(), loss=loss).count) == mask.sum()


def test_terms_without_a_mask_are_those_of_every_entry():
    rewards, versions = np.float32([1.0, 0.0]), np.int32([3, 5])
    every = jnp.ones(2, bool)
    same(jaxlogp.reward_terms(rewards), jaxlogp.reward_terms(rewards, every))
    same(jaxlogp.staleness_terms(9, versions), jaxlogp.staleness_terms(9, versions, every))


def test_a_mask_is_the_last_positional_argument_and_optional():
    functions = [*vars(jaxlogp).values(), losses.reduce_losses]
    signatures = [inspect.signature(function).parameters for function in functions if inspect.isfunction(function)]
    masked = [parameters for parameters in signatures if "mask" in parameters]
    assert len(masked) >= 20
    for parameters in masked:
        by_position = [x for x in parameters.values() if x.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
        assert by_position[-1].name == "mask" and by_position[-1].default is None, parameters


@pytest.mark.parametrize("given", [3.5, np.float32(3.5)], ids=["number", "array"])
def test_the_sharded_loss_takes_the_labels_per_document(given):
    hidden, weight, targets = head_operands()
    _, old, advantages, mask = batch()
    loss = losses.grpo_paper(entropy_coefficient=0.5, entropy_weights="labels")
    options = {"loss": loss, "labels_per_document": given}
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    arguments = targets, old, advantages, mask
    whole = linear_policy_loss(hidden, weight, *arguments, **options)[0]
    sharded = jaxlogp.sharded_linear_policy_loss(hidden, weight, *arguments, mesh=mesh, **options)[0]
    split = jax.device_put(weight, jax.NamedSharding(mesh, P("tensor")))
    known = linear_policy_loss(hidden, split, *arguments, **options)[0]
    # Sums of 10 terms of size up to 8 in other orders.
    for total in (sharded.sum, known.sum):
        np.testing.assert_allclose(total, whole.sum, atol=10 * 8 * 2.0**-24)
