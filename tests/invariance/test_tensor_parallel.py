"""Invariance over the mesh: TP 2, 3, 4, 6, 8 give the bytes of TP 1, for uneven vocabularies, dtypes, options, values."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxlogp.head.call import head_call
from jaxlogp.head.projection import HeadSpec
from tests import oracle
from tests.invariance.harness import CHUNKED, FIXED, FIXED_EIGHT, HIDDEN, NAIVE, Setting, broken, case, run, tensor_mesh

TOKENS = 72  # one whole block of 64 rows and part of a second
FAMILIES = ("normal", "confident", "shifted", "tiny")
ALL_OPTIONS = (("temperature", 0.7), ("logit_scale", 1.3), ("softcap", 40.0))
SETTINGS = {
    # name: setting, dtype of hidden and weight, numbers of shards to compare with one
    "fp32 V=257": (Setting(FIXED, 257), jnp.float32, (6, 8)),
    "bf16 V=4099": (Setting(FIXED, 4099), jnp.bfloat16, (3, 8)),
    "fp32 V=1027, temperature, scale, soft cap": (Setting(FIXED, 1027, ALL_OPTIONS), jnp.float32, (3, 8)),
    "bf16 V=257, fp32 head, out of vocabulary is zero": (
        Setting(FIXED, 257, (("fp32_head", True), ("out_of_vocab", "zero"))),
        jnp.bfloat16,
        (4,),
    ),
    # One granule, one tile and one block a shard: every loop has one turn on 8 shards, and compilers unroll those.
    "fp32 V=258, 8 granules": (Setting(FIXED_EIGHT, 258, ALL_OPTIONS), jnp.float32, (2, 8)),
}
# Every program that is not slow stands for others of its kind: those are.
SLOW = {
    ("fp32 V=257", 6),
    *(("bf16 V=4099", size) for size in (3, 8)),
    *(("fp32 V=1027, temperature, scale, soft cap", size) for size in (3, 8)),
    ("fp32 V=258, 8 granules", 2),
}
DEFAULT = ("fp32 V=257", 8)
PROGRAMS = [
    pytest.param(
        name,
        size,
        marks=pytest.mark.slow if (name, size) in SLOW else pytest.mark.costly if (name, size) != DEFAULT else [],
    )
    for name, (_, _, sizes) in SETTINGS.items()
    for size in sizes
]


def data_for(name, family):
    setting, dtype, _ = SETTINGS[name]
    data = case(setting.vocab, TOKENS, dtype, family)
    if dict(setting.options).get("out_of_vocab") == "zero":
        data["targets"] = data["targets"].at[3].set(setting.vocab).at[40].set(-7)
    return data


@pytest.mark.parametrize("name, size", PROGRAMS)
def test_every_size_gives_the_bytes_of_one_shard(name, size):
    """Four families of values on each of 9 programs: 36 configurations."""
    setting, _, _ = SETTINGS[name]
    for family in FAMILIES:
        data = data_for(name, family)
        wanted = run(setting, 1, data)
        assert all(np.isfinite(value.astype(np.float32)).all() for value in wanted.values()), family
        assert broken(run(setting, size, data), wanted) == [], family


@pytest.mark.costly
@pytest.mark.parametrize("engine", [CHUNKED, NAIVE], ids=["chunked", "naive"])
def test_the_fast_path_and_the_naive_design_break_in_this_harness(engine, few_optimizations):
    """Negative controls: without them "0 broken" could mean that nothing was compared."""
    setting = Setting(engine, 1027)
    found = set()
    for seed in range(4):  # two orders of a sum of four often agree on all log-probs of one batch
        data = case(1027, TOKENS, seed=seed)
        found |= set(broken(run(setting, 4, data), run(setting, 1, data)))
    assert {"log_probs", "entropy", "hidden"} <= found, found


@pytest.mark.costly
def test_range_laws_hold_exactly():
    for name, (setting, _, _) in SETTINGS.items():
        for family in FAMILIES:
            found = run(setting, 1, data_for(name, family))
            assert (found["log_probs"] <= 0.0).all(), (name, family)
            assert (found["entropy"] >= 0.0).all(), (name, family)
            assert (found["entropy"].astype(np.float64) <= np.log(setting.vocab)).all(), (name, family)


@pytest.mark.parametrize("name", ["fp32 V=257", pytest.param("bf16 V=4099", marks=pytest.mark.costly)])
def test_uniform_logits_reach_the_bound_of_entropy_and_do_not_pass_it(name):
    setting, _, _ = SETTINGS[name]
    data = data_for(name, "normal")
    data["weight"], data["bias"] = jnp.zeros_like(data["weight"]), jnp.zeros_like(data["bias"])
    entropy = run(setting, 1, data)["entropy"][np.asarray(data["mask"])].astype(np.float64)
    # log V is of the order of 8: half an ulp of the result and one rounding of the sum.
    assert (np.log(setting.vocab) - entropy < 2e-6).all() and (entropy <= np.log(setting.vocab)).all()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "name", ["fp32 V=257", pytest.param("fp32 V=1027, temperature, scale, soft cap", marks=pytest.mark.costly)]
)
def test_accuracy_against_float64_is_that_of_the_plain_path(name, family):
    """Relation A: no worse than twice the plain path's error plus what fp32 inputs of that size resolve."""
    setting, _, _ = SETTINGS[name]
    data = data_for(name, family)
    options = dict(setting.options)
    head = oracle.Head(**options)
    args = (data["hidden"], data["weight"], data["targets"])
    bias = np.maximum(oracle.f64(data["bias"]), -3e4)  # the oracle multiplies p by z: 0 * -inf
    log_probs, entropy = oracle.head_log_probs(*args, data["mask"], bias, head)
    gradients = oracle.head_gradients(*args, data["g_lp"], data["g_entropy"], data["mask"], bias, head)
    wanted = {"log_probs": log_probs, "entropy": entropy, **gradients._asdict()}
    seen, plain = run(setting, 1, data), run(setting._replace(engine="reference"), 1, data)
    for key, truth in wanted.items():
        measure = oracle.scaled_error if key in ("log_probs", "entropy") else oracle.relative_error
        errors = measure(seen[key], truth), measure(plain[key], truth)
        # What fp32 resolves in products of 32 terms, relative to the largest result; the plain path may have been lucky.
        assert errors[0] < 2 * errors[1] + oracle.fp32_bound(1.0, HIDDEN), (key, errors)


@functools.cache
def normaliser_program(name, size):
    """What log Σ_v e^z is kept as for the backward: the largest logit, the logarithm of the rest, and Σ p z."""
    setting, _, _ = SETTINGS[name]
    order, vocab = setting.engine.order, setting.vocab
    layout = {"axis_name": "tensor", "vocab": order.shards(vocab, size), "weight_layout": "vh", "sequence_dim": None}
    spec = HeadSpec(**{key: value for key, value in setting.options if key != "out_of_vocab"})

    def local(hidden, weight, bias, targets, mask):
        call = head_call(hidden, weight, bias, targets, mask, spec, out_of_vocab="error", with_entropy=True, **layout)
        return setting.engine.forward(call)[1]

    specs = (P(), P("tensor"), P("tensor"), P(), P())
    return jax.jit(jax.shard_map(local, mesh=tensor_mesh(size), in_specs=specs, out_specs=P()))


@pytest.mark.parametrize(
    "name, size",
    [
        pytest.param("fp32 V=257", 8, marks=pytest.mark.costly),
        *(
            pytest.param(name, size, marks=pytest.mark.slow)
            for name, size in (("bf16 V=4099", 6), ("fp32 V=258, 8 granules", 8))
        ),
    ],
)
def test_the_log_sum_exp_has_the_bytes_of_one_shard(name, size):
    setting, _, _ = SETTINGS[name]
    for family in FAMILIES:
        data = data_for(name, family)

        def run_on(shards, data=data):
            rows = [
                setting.engine.order.shards(setting.vocab, shards).shard_rows(data[key]) for key in ("weight", "bias")
            ]
            return normaliser_program(name, shards)(data["hidden"], *rows, data["targets"], data["mask"])

        wanted, seen = run_on(1), run_on(size)
        for field in wanted._fields:
            assert np.asarray(getattr(seen, field)).tobytes() == np.asarray(getattr(wanted, field)).tobytes(), (
                family,
                field,
            )
        logits = oracle.f64(data["hidden"]) @ oracle.f64(data["weight"]).T + oracle.f64(data["bias"])
        options = dict(setting.options)
        logits = logits * options.get("logit_scale", 1.0)
        if cap := options.get("softcap"):
            logits = cap * np.tanh(logits / cap)
        logits = logits / options.get("temperature", 1.0)
        truth = np.logaddexp.reduce(logits, axis=1)
        found = np.asarray(wanted.max, np.float64) + np.asarray(wanted.log_sum_exp, np.float64)
        # 32 products and a bias a logit; the sum of exponentials is exact, and its log a rounding or two of 10.
        bias = np.abs(np.where(np.isfinite(data["bias"]), oracle.f64(data["bias"]), 0.0))
        sizes = np.abs(oracle.f64(data["hidden"])) @ np.abs(oracle.f64(data["weight"])).T + bias
        bound = oracle.fp32_bound(sizes.max(axis=1) * 1.3 / 0.7, 32 + 1) + oracle.fp32_bound(10.0, 2)
        active = np.asarray(data["mask"])
        assert (np.abs(found.reshape(-1)[:TOKENS] - truth) < bound)[active].all()
