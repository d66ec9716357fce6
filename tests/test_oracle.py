"""The oracle's analytic gradients against central finite differences, and its values against hand-computed ones."""

import numpy as np
import pytest

from tests import oracle

STEP = 1e-5
# Central differences in float64 with step 1e-5: truncation ~ step^2 = 1e-10, rounding ~ 1e-16 / step = 1e-11.
FINITE_DIFFERENCE = 1e-8


def finite_difference(function, point):
    gradient = np.zeros_like(point)
    for index in np.ndindex(point.shape):
        shift = np.zeros_like(point)
        shift[index] = STEP
        gradient[index] = (function(point + shift) - function(point - shift)) / (2 * STEP)
    return gradient


def case(seed=0, tokens=(2, 3), vocab=7, width=4):
    rng = np.random.default_rng(seed)
    return {
        "hidden": rng.normal(size=(*tokens, width)),
        "weight": rng.normal(size=(vocab, width)),
        "bias": rng.normal(size=vocab),
        "targets": rng.integers(0, vocab, tokens),
        "g_lp": rng.normal(size=tokens),
        "g_entropy": rng.normal(size=tokens),
        "mask": np.array([[True, False, True], [True, True, True]]),
    }


def test_a_known_log_prob_and_entropy():
    logits = np.array([[0.1, -0.2, 1.7, 0.3, 1.2, -0.5]])
    assert oracle.token_log_probs(logits, [4])[0] == pytest.approx(-1.3395806963, abs=1e-10)
    # A uniform row of 8: log-prob -log 8, entropy log 8.
    assert oracle.token_log_probs(np.zeros((1, 8)), [3])[0] == pytest.approx(-np.log(8))
    assert oracle.token_entropy(np.zeros((1, 8)))[0] == pytest.approx(np.log(8))


def test_masked_and_uncovered_tokens():
    logits = np.array([[1.0, 2.0], [np.nan, np.inf], [3.0, 1.0]])
    mask = np.array([True, False, True])
    values = oracle.token_log_probs(logits, [1, -100, 2], mask)
    assert values[1] == 0.0 and values[2] == 0.0 and values[0] < 0.0
    gradient = oracle.logits_gradient(logits, [1, -100, 2], np.ones(3), mask=mask)
    assert not gradient[1].any()
    np.testing.assert_allclose(gradient[2], -oracle.softmax(logits[2:3])[0])


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logits_gradient(temperature):
    data = case()
    logits = np.random.default_rng(1).normal(size=(2, 3, 7))
    targets = data["targets"].copy()
    targets[1, 1] = 9  # uncovered: its value is constant 0, so compare the gradient without its log-prob cotangent

    def objective(z):
        log_probs, entropy = oracle.scaled_logits_log_probs(z, targets, data["mask"], temperature)
        return float(np.sum(log_probs * data["g_lp"] + entropy * data["g_entropy"]))

    g_lp = data["g_lp"].copy()
    g_lp[1, 1] = 0.0
    analytic = oracle.scaled_logits_gradient(logits, targets, g_lp, data["g_entropy"], data["mask"], temperature)
    assert oracle.relative_error(analytic, finite_difference(objective, logits)) < FINITE_DIFFERENCE


@pytest.mark.parametrize("head", [oracle.Head(), oracle.Head(0.7, 1.3, 2.5)])
@pytest.mark.parametrize("name", ["hidden", "weight", "bias"])
def test_head_gradients(head, name):
    data = case()

    def objective(value):
        inputs = {**{k: data[k] for k in ("hidden", "weight", "bias")}, name: value}
        log_probs, entropy = oracle.head_log_probs(targets=data["targets"], mask=data["mask"], head=head, **inputs)
        return float(np.sum(log_probs * data["g_lp"] + entropy * data["g_entropy"]))

    analytic = oracle.head_gradients(
        data["hidden"],
        data["weight"],
        data["targets"],
        data["g_lp"],
        data["g_entropy"],
        data["mask"],
        data["bias"],
        head,
    )
    assert oracle.relative_error(getattr(analytic, name), finite_difference(objective, data[name])) < FINITE_DIFFERENCE


@pytest.mark.parametrize("kind", ["reverse", "forward", "jensen_shannon"])
def test_divergence_gradient(kind):
    logits, reference = np.random.default_rng(1).normal(size=(2, 3, 7))
    analytic = oracle.divergence_gradient(logits, reference, kind, 0.3)
    found = finite_difference(lambda z: float(oracle.divergence(z, reference, kind, 0.3).sum()), logits)
    assert oracle.relative_error(analytic, found) < FINITE_DIFFERENCE
    # Certain of one of two ids against uniform: log 2; the other way round infinite.
    certain, uniform = np.array([[0.0, -np.inf]]), np.zeros((1, 2))
    shared = 0.5 * np.log(1 / 0.75) + 0.5 * (0.5 * np.log(0.5 / 0.75) + 0.5 * np.log(0.5 / 0.25))
    wanted = {"reverse": np.log(2), "forward": np.inf, "jensen_shannon": shared}
    assert oracle.divergence(certain, uniform, kind)[0] == pytest.approx(wanted[kind])


def test_embedding_gradient():
    ids = np.array([[1, 3, 1], [0, 3, 3]])
    cotangent = np.random.default_rng(2).normal(size=(2, 3, 4))

    def objective(table):
        return float(np.sum(table[ids] * cotangent))

    numeric = finite_difference(objective, np.zeros((5, 4)))
    assert oracle.relative_error(oracle.embedding_gradient(ids, cotangent, 5), numeric) < FINITE_DIFFERENCE


def policy_case():
    rng = np.random.default_rng(3)
    old = rng.normal(-2.0, 0.5, 12)
    return {
        "log_probs": old + rng.normal(0.0, 0.4, 12),
        "old_log_probs": old,
        "advantages": rng.normal(size=12),
        "mask": np.arange(12) % 5 != 0,
    }


def test_grpo_gradient():
    data = policy_case()
    point = data.pop("log_probs")
    result = oracle.grpo(point, **data, epsilon_low=0.1, epsilon_high=0.3)
    numeric = finite_difference(lambda x: oracle.grpo(x, **data, epsilon_low=0.1, epsilon_high=0.3).loss, point)
    assert oracle.relative_error(result.gradient, numeric) < FINITE_DIFFERENCE
    assert (result.gradient[data["mask"]] == 0).any(), "the case must hold clipped tokens"


@pytest.mark.parametrize("weighting", ["length", "document"])
def test_gspo_gradient(weighting):
    data = policy_case()
    point = data.pop("log_probs")
    documents = {"document_ids": np.repeat([0, 1, 2, 3], [4, 1, 5, 2]), "num_documents": 5, "weighting": weighting}
    result = oracle.gspo(point, **data, **documents)
    numeric = finite_difference(lambda x: oracle.gspo(x, **data, **documents).loss, point)
    assert np.linalg.norm(result.gradient) > 0
    assert oracle.relative_error(result.gradient, numeric) < FINITE_DIFFERENCE


def test_masked_reductions():
    values, mask = np.array([1.0, np.nan, 3.0, np.inf]), np.array([True, False, True, False])
    assert oracle.masked_sum(values, mask) == 4.0
    assert oracle.masked_count(mask) == 2
    assert oracle.masked_mean(values, mask) == 2.0
    assert oracle.masked_mean(values, np.zeros(4, bool)) == 0.0
