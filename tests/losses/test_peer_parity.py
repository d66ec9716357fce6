"""Losses, advantages and importance weights against TRL and verl, in float64; needs the extra parity, and verl in a folder.

pip install --no-deps --target FOLDER verl==0.9.1
JAXLOGP_TEST_VERL=FOLDER python -m pytest -m parity tests/losses/test_peer_parity.py
"""

import dataclasses
import functools
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import jaxlogp
from jaxlogp import losses, policy_loss
from tests.losses.peer_code import VerlConfig, trl_loss, verl_module

torch = pytest.importorskip("torch", reason="the extra parity is not installed")
pytest.importorskip("trl", reason="the extra parity is not installed")
pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("default")]

LENGTHS = (9, 4, 1, 7, 9, 3)
# Sums of at most 33 labels of size below 10, in float64; verl adds 1e-8 to numbers of labels and to variances.
ROUNDING, VERL = 33 * 10 * 2.0**-51, 2e-7


@pytest.fixture(autouse=True)
def float64():
    """Of both; TRL makes numbers of its options of the default dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    with jax.enable_x64(True):
        yield
    torch.set_default_dtype(before)


def case_of(seed=0, rows=LENGTHS, per_label=False):
    """Documents in rows, ratios on both sides of every bound, and advantages of both signs, or one for each label."""
    rng = np.random.default_rng(seed)
    shape = len(rows), max(rows)
    new = -rng.exponential(1.5, shape) - 0.02
    return SimpleNamespace(
        new=new,
        old=np.minimum(new + rng.normal(0.0, 0.5, shape), -1e-3),
        ref=np.minimum(new + rng.normal(0.0, 0.4, shape), -1e-3),
        sampler=np.minimum(new + rng.normal(0.0, 0.3, shape), -1e-3),
        # Values of fp32, as TRL compares with a quantile in fp32.
        entropy=rng.exponential(1.0, shape).astype(np.float32).astype(np.float64),
        advantages=rng.normal(size=shape if per_label else shape[0]),
        mask=np.arange(shape[1]) < np.array(rows)[:, None],
    )


def in_torch(case):
    parts = {name: torch.tensor(value) for name, value in vars(case).items()}
    return SimpleNamespace(**parts | {"mask": parts["mask"].double()})


def ours(case, loss, **more):
    """The loss of the documents as one step, and its gradient in the log-probs."""

    def whole(new):
        advantages = more.pop("advantages", case.advantages)
        return policy_loss(new, case.old, advantages, case.mask, loss=loss, **more).mean()

    return jax.value_and_grad(whole)(case.new)


def require_same(ours, theirs, log_probs, rounding):
    theirs.backward()
    value, gradient = ours
    assert value.dtype == np.float64
    np.testing.assert_allclose(value, theirs.item(), rtol=0, atol=rounding)
    np.testing.assert_allclose(gradient, log_probs.grad.numpy(), rtol=0, atol=rounding)
    assert np.abs(log_probs.grad.numpy()).max() > 1e-3


def log_probs_of(case):
    return torch.tensor(case.new, requires_grad=True)


SEQUENCE = {"importance_sampling_level": "sequence"}
TRL = {
    "grpo": ({"loss_type": "grpo"}, losses.grpo_paper()),
    "bnpo": ({"loss_type": "bnpo"}, losses.grpo()),
    "dapo": ({"loss_type": "dapo"}, losses.grpo()),
    "dapo, clip higher": ({"loss_type": "dapo", "epsilon_high": 0.28}, losses.dapo()),
    "dr_grpo": ({"loss_type": "dr_grpo"}, losses.dr_grpo(length=16)),
    "delta": ({"loss_type": "dapo", "delta": 1.5}, losses.grpo(delta=1.5)),
    "gspo": ({"loss_type": "grpo", **SEQUENCE, "epsilon": 3e-4, "epsilon_high": 4e-4}, losses.gspo()),
    "gspo, wide": ({"loss_type": "grpo", **SEQUENCE}, losses.gspo(epsilon=0.2)),
    "luspo": ({"loss_type": "luspo", **SEQUENCE}, losses.gspo(weighting="length")),
    "cispo": ({"loss_type": "cispo", "epsilon_high": 5.0}, losses.cispo()),
    "cispo, tight": ({"loss_type": "cispo", "epsilon_high": 1.2}, losses.cispo(max_weight=1.2)),
    "sapo": ({"loss_type": "sapo"}, losses.sapo()),
    "vespo": ({"loss_type": "vespo"}, losses.vespo()),
    "kl": ({"loss_type": "dapo", "beta": 0.1, "use_bias_correction_kl": False}, losses.grpo(kl_coefficient=0.1)),
    "unbiased kl": (
        {"loss_type": "grpo", "beta": 0.1},
        losses.grpo_paper(kl_coefficient=0.1, kl_unbiased=True),
    ),
    "off-policy mask": (
        {"loss_type": "dapo", "off_policy_mask_threshold": 0.05},
        losses.grpo(rejection=losses.Rejection(negative_kl=0.05, keep_denominator=True)),
    ),
}


@pytest.mark.parametrize("empty", [False, True], ids=["", "and a document without labels"])
@pytest.mark.parametrize("name", TRL)
def test_a_loss_of_trl(name, empty):
    options, loss = TRL[name]
    case = case_of(rows=(*LENGTHS, 0) if empty else LENGTHS)
    log_probs = log_probs_of(case)
    theirs = trl_loss(log_probs, in_torch(case), **options)
    require_same(ours(case, loss, ref_log_probs=case.ref), theirs, log_probs, ROUNDING)


def test_trl_learns_from_the_same_labels_of_high_entropy():
    case = case_of()
    log_probs = log_probs_of(case)
    theirs = trl_loss(log_probs, in_torch(case), loss_type="dapo", top_entropy_quantile=0.2)
    threshold = jaxlogp.entropy_threshold(case.entropy, case.mask, share=0.2)
    chosen = jaxlogp.high_entropy_advantages(case.advantages, case.entropy, case.mask, threshold=threshold)
    assert 0 < np.count_nonzero(chosen) < sum(LENGTHS) / 2
    require_same(ours(case, losses.grpo(), advantages=chosen), theirs, log_probs, ROUNDING)


@pytest.mark.parametrize("loss_type, preset", [("dapo", losses.grpo), ("grpo", losses.grpo_paper)])
def test_the_entropy_bonus_of_trl_is_a_mean_over_labels(loss_type, preset):
    case = case_of()
    theirs = trl_loss(log_probs_of(case), in_torch(case), loss_type=loss_type, entropy_coef=0.1)
    loss = preset(entropy_coefficient=0.1, entropy_weights="labels")
    spread = sum(LENGTHS) / len(LENGTHS)
    value, _ = ours(case, loss, entropy=case.entropy, labels_per_document=spread)
    np.testing.assert_allclose(value, theirs.item(), rtol=0, atol=ROUNDING)


MEAN, DOCUMENTS, SUMS = "token-mean", "seq-mean-token-mean", "seq-mean-token-sum"
NARROW = {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4}
BOUNDS, WEIGHT = {"epsilon": 0.05, "epsilon_high": 0.1, "max_weight": 1.8}, {"clip_ratio_c": 1.8}
VERL_LOSSES = {
    "token-mean": ("vanilla", MEAN, {}, losses.grpo()),
    "clip higher": ("vanilla", MEAN, {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}, losses.dapo()),
    "dual clip": ("vanilla", MEAN, {"clip_ratio_c": 1.5}, losses.grpo(delta=1.5)),
    "seq-mean-token-mean": ("vanilla", DOCUMENTS, {}, losses.grpo_paper()),
    "seq-mean-token-sum": ("vanilla", SUMS, {}, dataclasses.replace(losses.grpo(), reduction="documents")),
    "seq-mean-token-sum-norm": (
        "vanilla",
        "seq-mean-token-sum-norm",
        {"global_batch_info": {"loss_scale_factor": 16}},
        losses.dr_grpo(length=16),
    ),
    "gspo": ("gspo", DOCUMENTS, NARROW, losses.gspo_token()),
    "sapo": ("sapo", DOCUMENTS, {}, losses.sapo()),
    "gpg": ("gpg", MEAN, {}, losses.gpg()),
    "cispo": ("cispo", MEAN, {"clip_ratio_high": 0.28}, losses.cispo(max_weight=1.28, min_weight=0.8)),
    "dppo_tv": ("dppo_tv", MEAN, {"clip_ratio_low": 0.05, "clip_ratio_high": 0.1, **WEIGHT}, losses.dppo_tv(**BOUNDS)),
    "dppo_kl": ("dppo_kl", MEAN, {"clip_ratio_low": 0.05, "clip_ratio_high": 0.1, **WEIGHT}, losses.dppo_kl(**BOUNDS)),
    "geo_mean": ("geo_mean", DOCUMENTS, {"clip_ratio": 0.4}, losses.gmpo()),
}


@pytest.mark.parametrize("name", VERL_LOSSES)
def test_a_loss_of_verl(name):
    mode, reduction, options, loss = VERL_LOSSES[name]
    # geo_mean takes the mean advantage of a document with 1e-8 in its divisor.
    case = case_of(per_label=mode == "gspo")
    log_probs, theirs = verl_policy_loss(case, mode, reduction, VerlConfig(**options))
    require_same(ours(case, loss), theirs, log_probs, VERL)


def verl_policy_loss(case, mode, reduction, config, weights=None, mask=None):
    """The log-probs and the loss of verl."""
    given, log_probs = in_torch(case), log_probs_of(case)
    advantages = torch.as_tensor(np.broadcast_to(case.advantages.reshape(len(case.new), -1), case.new.shape).copy())
    function = verl_module("core_algos").get_policy_loss_fn(mode)
    mask = given.mask if mask is None else mask
    options = {"loss_agg_mode": reduction, "config": config, "rollout_is_weights": weights}
    return log_probs, function(given.old, log_probs, advantages, mask, **options)[0]


def test_dro_of_verl_is_gpg_with_the_k2_kl_to_the_old_policy():
    case = case_of()
    config = VerlConfig(policy_loss=SimpleNamespace(dro_beta=0.3))
    log_probs, theirs = verl_policy_loss(case, "dro", MEAN, config)
    loss = losses.gpg(kl_coefficient=0.3, kl_estimator="k2")
    require_same(ours(case, loss, ref_log_probs=case.old), theirs, log_probs, ROUNDING)


@pytest.mark.parametrize("share", [2e-4, 0.2, 1.0])
def test_kl_cov_of_verl(share):
    case = case_of()
    config = VerlConfig(policy_loss=SimpleNamespace(kl_cov_ratio=share, ppo_kl_coef=0.7))
    log_probs, theirs = verl_policy_loss(case, "kl_cov", MEAN, config)
    penalized = jaxlogp.high_covariance_labels(case.new, case.advantages, case.mask, share=share)
    require_same(ours(case, losses.kl_cov(drift_coefficient=0.7), penalized=penalized), theirs, log_probs, ROUNDING)


def test_clip_cov_of_verl_where_nothing_is_clipped():
    """A draw of all labels between the bounds does not depend on the generator; verl leaves clipped ones out of it."""
    case = case_of()
    case.old = np.minimum(case.new + np.random.default_rng(1).uniform(-0.15, 0.15, case.new.shape), -1e-3)
    parts = SimpleNamespace(clip_cov_ratio=1.0, clip_cov_lb=0.1, clip_cov_ub=1.0)
    log_probs, theirs = verl_policy_loss(case, "clip_cov", MEAN, VerlConfig(policy_loss=parts))
    key, bounds = jax.random.key(0), {"share": 1.0, "low": 0.1, "high": 1.0}
    chosen = jaxlogp.clip_cov_advantages(case.advantages, case.new, case.mask, key=key, **bounds)
    assert 0 < np.count_nonzero(chosen) < sum(LENGTHS)
    require_same(ours(case, losses.grpo(), advantages=chosen), theirs, log_probs, ROUNDING)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("reduction, preset", [(MEAN, losses.grpo), (DOCUMENTS, losses.grpo_paper)])
def test_the_kl_and_the_entropy_bonus_of_verl(reduction, preset, estimator):
    case, core = case_of(), verl_module("core_algos")
    given = in_torch(case)
    log_probs, theirs = verl_policy_loss(case, "vanilla", reduction, VerlConfig())
    kl = core.agg_loss(core.kl_penalty(log_probs, given.ref, estimator), given.mask, reduction)
    bonus = core.agg_loss(given.entropy, given.mask, reduction)
    loss = preset(kl_coefficient=0.1, kl_estimator=estimator, entropy_coefficient=0.01)
    mine = ours(case, loss, ref_log_probs=case.ref, entropy=case.entropy)
    require_same(mine, theirs + 0.1 * kl - 0.01 * bonus, log_probs, VERL)


CORRECTIONS = {
    "token": ({"rollout_is": "token", "rollout_is_threshold": 1.2}, losses.Correction("token", high=1.2)),
    "sequence": ({"rollout_is": "sequence", "rollout_is_threshold": 2.0}, losses.Correction("sequence", high=2.0)),
    "IcePop": (
        {"rollout_is": "token", "rollout_is_threshold": "0.7_1.4"},
        losses.Correction("token", "mask", low=0.7, high=1.4),
    ),
    "normalized": (
        {"rollout_is": "token", "rollout_is_threshold": 1.2, "rollout_is_batch_normalize": True},
        losses.Correction("token", high=1.2, normalize=True),
    ),
}


@pytest.mark.parametrize("name", CORRECTIONS)
def test_importance_weights_of_verl(name):
    options, correction = CORRECTIONS[name]
    case, helper = case_of(), verl_module("rollout_corr_helper")
    given = in_torch(case)
    weights, _ = helper.compute_rollout_correction_weights(given.old - given.sampler, given.mask, **options)
    log_probs, theirs = verl_policy_loss(case, "vanilla", MEAN, VerlConfig(), weights)
    mean = losses.correction_weight_sum(correction, case.old, case.sampler, case.mask).mean()
    mine = ours(case, losses.grpo(correction=correction), sampler_log_probs=case.sampler, mean_weight=mean)
    require_same(mine, theirs, log_probs, VERL)


# verl compares -log w with the logarithms of its bounds.
REJECTIONS = {
    "token": ("token_k1", "0.7_1.3", losses.Rejection(token=(1 / 1.3, 1 / 0.7))),
    "sequence": ("seq_sum_k1", "0.5_1.5", losses.Rejection(sequence=(1 / 1.5, 2.0))),
    "geometric": ("seq_mean_k1", "0.8_1.2", losses.Rejection(geometric=(1 / 1.2, 1 / 0.8))),
    "k2": ("seq_mean_k2", "0.15", losses.Rejection(k2=0.15)),
    "k3": ("seq_mean_k3", "0.15", losses.Rejection(k3=0.15)),
    "two": ("token_k1,seq_mean_k3", "0.7_1.3,0.2", losses.Rejection(token=(1 / 1.3, 1 / 0.7), k3=0.2)),
}


@pytest.mark.parametrize("name", REJECTIONS)
def test_rejection_of_verl(name):
    rules, bounds, rejection = REJECTIONS[name]
    case, helper = case_of(), verl_module("rollout_corr_helper")
    given = in_torch(case)
    mask, _ = helper.compute_rollout_rejection_mask(given.old - given.sampler, given.mask, rules, bounds)
    assert 0 < mask.sum() < given.mask.sum()
    log_probs, theirs = verl_policy_loss(case, "vanilla", MEAN, VerlConfig(), mask=mask)
    require_same(
        ours(case, losses.grpo(rejection=rejection), sampler_log_probs=case.sampler), theirs, log_probs, ROUNDING
    )


GROUPS = np.array([3, 1, 3, 1, 1, 3])
LABELS = np.array(LENGTHS, np.int32)
by_group = functools.partial(jaxlogp.group_advantages, group_ids=GROUPS)
ADVANTAGES = {
    "grpo": ({"index": GROUPS}, lambda r: by_group(r, epsilon=1e-6)),
    "grpo, centred": ({"index": GROUPS, "norm_adv_by_std_in_grpo": False}, lambda r: by_group(r, scale_rewards="none")),
    "rloo": ({"index": GROUPS}, lambda r: jaxlogp.leave_one_out_advantages(r, group_ids=GROUPS)),
    "opo": ({"index": GROUPS}, lambda r: jaxlogp.length_weighted_advantages(r, LABELS, group_ids=GROUPS)),
    "reinforce_plus_plus": ({}, lambda r: jaxlogp.batch_advantages(r, group_ids=GROUPS, lengths=LABELS)),
    "reinforce_plus_plus_baseline": (
        {"index": GROUPS},
        lambda r: jaxlogp.batch_advantages(r, group_ids=GROUPS, lengths=LABELS, baseline=True),
    ),
    "remax": (
        {"reward_baselines": torch.linspace(0.0, 1.0, 6).double()},
        lambda r: jaxlogp.greedy_baseline_advantages(r, np.linspace(0.0, 1.0, 6), group_ids=GROUPS),
    ),
    # No reward is 0: verl's count of those is that of the rewards in active groups.
    "gpg": ({"index": GROUPS}, lambda r: jaxlogp.active_group_advantages(r, group_ids=GROUPS)),
}


@pytest.mark.parametrize("name", ADVANTAGES)
def test_advantages_of_verl(name):
    options, function = ADVANTAGES[name]
    rewards, mask = np.random.default_rng(3).uniform(0.1, 2.0, len(LENGTHS)), case_of().mask
    at_the_end = np.zeros(mask.shape)
    at_the_end[np.arange(len(LENGTHS)), LABELS - 1] = rewards
    estimate = verl_module("core_algos").get_adv_estimator_fn(name.split(",")[0])
    given = {"token_level_rewards": torch.tensor(at_the_end), "response_mask": torch.tensor(mask).double()}
    theirs = estimate(**given, **options, config=VerlConfig())[0].numpy()
    mine = np.where(mask, np.asarray(function(rewards).advantages)[:, None], 0.0)
    np.testing.assert_allclose(mine, theirs, rtol=0, atol=VERL)


def test_gdpo_of_verl_where_all_completions_have_as_many_labels():
    """It normalizes over labels, in place of completions: L labels of each of N make the deviation another one."""
    count, length, weights = len(GROUPS), 5, [1.0, 0.3]
    rewards = np.random.default_rng(4).uniform(0.1, 2.0, (count, 2))
    whole = torch.ones(count, length).double()
    config = VerlConfig(gdpo_reward_keys=["a", "b"], gdpo_reward_weights=weights)
    config.get = lambda name, default=None: getattr(config, name, default)
    theirs, _ = verl_module("core_algos").get_adv_estimator_fn("gdpo")(
        token_level_rewards=whole,
        response_mask=whole,
        index=GROUPS,
        config=config,
        non_tensor_batch={"a": rewards[:, 0], "b": rewards[:, 1]},
        batch={"prompts": torch.zeros(count, 3), "attention_mask": torch.ones(count, 3 + length, dtype=torch.long)},
    )
    mine = jaxlogp.decoupled_advantages(rewards, weights=weights, group_ids=GROUPS, epsilon=1e-6).advantages
    wider = np.sqrt((count * length - 1) / (length * (count - 1)))
    # Here the deviation, of about 1, has an epsilon of 1e-6; verl's rewards are of fp32.
    np.testing.assert_allclose(np.asarray(mine)[:, None] * wider, theirs.numpy()[:, :1], rtol=0, atol=4e-6)
    assert np.abs(theirs.numpy()).max() > 0.5
