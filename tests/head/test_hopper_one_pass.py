"""What is particular to linear_policy_loss by the Hopper kernels: chunks of tokens, windows, estimates that are lost.

On the CPU through JAX's Mosaic GPU interpreter, against the two steps by the reference engine.
"""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlogp import linear_log_probs, linear_policy_loss
from jaxlogp._mosaic_gpu import kernel, why_not_available
from jaxlogp.head import HopperEngine, record_head_runs
from jaxlogp.head.hopper import gradient_products, product
from jaxlogp.head.hopper import one_pass as hopper_one_pass
from jaxlogp.head.hopper.tiles import head_tiles
from jaxlogp.losses import grpo, reinforce
from tests import oracle
from tests.head.cases import GRADIENT_ERROR, hopper, same_bits
from tests.head.policy_problem import HEAD, compare, differentiated, one_call, problem, two_calls

needs_interpreter = pytest.mark.skipif(why_not_available() is not None, reason=str(why_not_available()))
# The kernels of one pass take no soft cap.
OPTIONS = {"temperature": 0.7, "logit_scale": 1.3}
BONUS = pytest.mark.parametrize("coefficient", [0.1, 0.0], ids=["entropy bonus", "none"])


def bf16_problem(tokens, vocab=600, bias=False, seed=0):
    options = OPTIONS if bias else {}
    return problem((tokens,), 64, vocab, options=options, bias=bias, dtype=jnp.bfloat16, seed=seed), options


def program(function, loss, engine, options):
    """Compiled anew: sizes of chunks are read where a call is traced."""
    return jax.jit(lambda data: differentiated(data, functools.partial(function, loss=loss, engine=engine, **options)))


def check(data, engine, loss, **options):
    return check_program(program(one_call, loss, engine, options), data, loss, **options)


def check_program(one_pass, data, loss, **options):
    with record_head_runs() as runs:
        actual = one_pass(data)
    assert {run.gradient for run in runs} == {"in one pass"}
    wanted = program(two_calls, loss, "reference", {x: y for x, y in options.items() if x != "with_entropy"})(data)
    compare(actual, wanted, gradient_error=GRADIENT_ERROR)
    assert not np.asarray(actual[2].hidden, np.float32)[~np.asarray(data["mask"])].any()
    return actual, wanted


@needs_interpreter
def test_chunks_share_kernels_that_do_the_same(monkeypatch):
    """First chunk, loop and last one trace a kernel once: one that is traced again is lowered and compiled again."""
    monkeypatch.setattr(hopper_one_pass, "CHUNK_BYTES", 64 * 2 * 512)
    traced = collections.Counter()

    def counted(body, *, name, **options):
        traced[name] += 1
        return kernel(body, name=name, **options)

    for module in (product, gradient_products):
        monkeypatch.setattr(module, "kernel", counted)
    # No other test has this vocabulary, whose kernels would be known.
    data, options = bf16_problem(300, vocab=504)
    jax.eval_shape(program(one_call, grpo(), hopper(), options), data)
    del traced["head_uninitialised"]
    # Of dH the first window is written and what is left of the columns added; of dW the first chunk is written, the next
    # ones are added, and the last one is rounded.
    assert traced == {
        "head_exponentials": 1,
        "head_logit_gradient": 1,
        "head_hidden_gradient": 2,
        "head_weight_gradient": 3,
    }


@needs_interpreter
@pytest.mark.parametrize(
    "tokens, chunk_rows, bias, coefficient", [(300, 64, False, 0.1), (150, 1024, True, 0.0)], ids=["three", "one"]
)
def test_chunks_of_tokens(monkeypatch, tokens, chunk_rows, bias, coefficient):
    """Three of 128 tokens, the second short, the last without a label. Several without a bonus: the far sampler, below."""
    fp32_weight = 4 * 768 * 64
    monkeypatch.setattr(
        hopper_one_pass, "CHUNK_BYTES", chunk_rows * 2 * 768 - (fp32_weight if chunk_rows > tokens else 0)
    )
    data, options = bf16_problem(tokens, bias=bias, seed=1)
    assert tokens == 150 or 128 < int(data["mask"].sum()) < 256
    # The windows of the vocabulary do not divide it.
    engine = hopper(chunk=512)
    (_, values, _), _ = check(data, engine, grpo(entropy_coefficient=coefficient), with_entropy=True, **options)

    @jax.jit
    def alone_of(data):
        operands, known = (data[x] for x in ("hidden", "weight", "targets")), {x: data[x] for x in ("mask", "bias")}
        return linear_log_probs(*operands, **known, with_entropy=True, engine=engine, **options)

    alone = alone_of(data)
    for name in ("log_probs", "entropy"):
        np.testing.assert_array_equal(np.asarray(getattr(values, name)), np.asarray(getattr(alone, name)))


@needs_interpreter
@pytest.mark.parametrize("way", ["one pass", "known lse", "two steps"])
def test_a_frozen_head_has_no_weight_gradient(monkeypatch, way):
    monkeypatch.setattr(hopper_one_pass, "CHUNK_BYTES", 64 * 2 * 768)
    data, options = bf16_problem(300, bias=True, seed=1)
    if way == "known lse":
        operands, known = (data[x] for x in ("hidden", "weight", "targets")), {x: data[x] for x in ("mask", "bias")}
        options = options | {"lse": linear_log_probs(*operands, **known, with_lse=True, **options).lse}

    def total(hidden, weight, bias, frozen_head):
        given = {**data, "hidden": hidden, "weight": weight, "bias": bias}
        call = two_calls if way == "two steps" else one_call
        return call(given, grpo(), hopper(chunk=512), frozen_head=frozen_head, **options)[0].sum

    gradients = jax.grad(total, (0, 1, 2))
    operands = [data[name] for name in HEAD]
    programs = [jax.jit(gradients, static_argnums=3).trace(*operands, frozen) for frozen in (True, False)]
    assert ["head_weight_gradient" in str(program.jaxpr) for program in programs] == [False, True]
    alone, with_weight = (program.lower().compile()(*operands) for program in programs)
    same_bits(alone[0], with_weight[0])
    assert not np.any(alone[1]) and not np.any(alone[2]) and np.any(with_weight[1])


@needs_interpreter
def test_windows_of_the_vocabulary_that_are_summed_apart(monkeypatch):
    # Three windows of 384 columns, and 128 more that make no step of each. Chunks of 256 tokens; the last one is short.
    monkeypatch.setattr(hopper_one_pass, "CHUNK_BYTES", 256 * (2 * 1280 + 4 * 64 * 3))
    data, options = bf16_problem(500, vocab=1200, bias=True, seed=5)
    assert 256 < int(data["mask"].sum()) <= 384
    tiles = head_tiles(2304)
    assert tiles.windows_apart
    engine = hopper(tiles=tiles, chunk=512)
    assert hopper_one_pass.windows(1200, 1280, tiles, engine) == (1152, 3)
    check(data, engine, grpo(entropy_coefficient=0.1), **options)


@needs_interpreter
def test_a_sampler_that_is_far_from_the_policy(monkeypatch):
    # A ratio of about e^-80, and an advantage that makes it count: exponentials against such an estimate are cut off.
    monkeypatch.setattr(hopper_one_pass, "CHUNK_BYTES", 64 * 2 * 768)
    data, options = bf16_problem(500, bias=True, seed=3)
    # The second of four chunks holds the token; the third has no label.
    data["mask"] = data["mask"].at[300:].set(False)
    token = int(np.flatnonzero(np.asarray(data["mask"]))[140])
    assert 140 < int(data["mask"].sum()) < 256
    data["old"], data["advantages"] = data["old"].at[token].add(80.0), data["advantages"].at[token].set(5e34)
    check(data, hopper(chunk=512), grpo(), **options)


@needs_interpreter
@pytest.mark.slow
def test_a_weight_of_the_other_layout(monkeypatch):
    """The same from [H, V], over several chunks of tokens, one of which loses its estimate."""
    monkeypatch.setattr(hopper_one_pass, "CHUNK_BYTES", 64 * (2 * 768 + 4 * 64 * 2))
    data, options = bf16_problem(200, vocab=640, bias=True, seed=6)
    token = int(np.flatnonzero(np.asarray(data["mask"]))[70])
    data["old"], data["advantages"] = data["old"].at[token].add(80.0), data["advantages"].at[token].set(5e34)
    loss, engine = grpo(entropy_coefficient=0.1), hopper(chunk=512)
    wanted = program(one_call, loss, engine, options)(data)
    turned = {**data, "weight": data["weight"].T}
    *values, gradients = program(one_call, loss, engine, {**options, "weight_layout": "hv"})(turned)
    same_bits((*values, gradients.hidden, gradients.bias), (*wanted[:2], wanted[2].hidden, wanted[2].bias))
    # The interpreter multiplies by NumPy, whose order of summation depends on which operand stands left.
    seen, want = (np.asarray(x, np.float32) for x in (gradients.weight.T, wanted[2].weight))
    assert (seen != want).mean() < 1e-3
    np.testing.assert_allclose(seen, want, rtol=2.0**-7, atol=1e-3 * np.abs(want).max())


@needs_interpreter
def test_columns_of_minus_infinity():
    """The second tile of 256 columns, one more column, and a target there, which the policy never draws.

    With a bonus, where p z is 0 times infinity.
    """
    data, options = bf16_problem(20, bias=True, seed=7)
    gone = np.r_[256:512, 3]
    data["bias"] = data["bias"].at[gone].set(-jnp.inf)
    data["targets"] = jnp.where(jnp.isin(data["targets"], jnp.asarray(gone, jnp.int32)), 5, data["targets"])
    loss = reinforce(entropy_coefficient=0.1)
    one_pass = program(one_call, loss, hopper(), {**options, "with_entropy": True})
    check_program(one_pass, data, loss, **options)
    data["targets"] = data["targets"].at[0].set(300)
    _, values, from_logits = one_pass(data)
    assert np.isneginf(values.log_probs[0])
    assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in (*from_logits, values.log_probs[1:]))
    # With a cotangent at that target, from logits and from exponentials: the one-hot drops out, as in two steps.
    from_exponentials = program(one_call, reinforce(), hopper(), options)(data)[2]
    for each, gradients in (loss, from_logits), (reinforce(), from_exponentials):
        wanted = program(two_calls, each, "reference", options)(data)[2]
        assert not np.asarray(gradients.bias[gone]).any()
        for gradient, want in zip(gradients, wanted, strict=True):
            assert oracle.relative_error(gradient, oracle.f64(want)) < GRADIENT_ERROR


@needs_interpreter
@BONUS
def test_a_confident_target_keeps_its_small_gradient(coefficient):
    data, _ = bf16_problem(40, vocab=256, seed=4)
    mask = data["mask"]
    # z_target is about 11, the other logits 0.2 at most; and a target that no column owns.
    weight = (0.02 * data["weight"].astype(jnp.float32)).at[7].set(1.0)
    data["weight"] = weight.astype(jnp.bfloat16)
    data["hidden"] = jnp.where(mask[:, None], jnp.full_like(data["hidden"], 11 / 64), jnp.nan)
    data["targets"] = jnp.full_like(data["targets"], 7).at[1].set(999)
    operands = data["hidden"], data["weight"], data["targets"]
    values = linear_log_probs(*operands, mask=mask, out_of_vocab="zero", engine="reference")
    assert np.exp(values.log_probs[0]) > 1 - 2.0**-7, "p must be near 1"
    data["old"] = jnp.where(mask, values.log_probs, jnp.nan)
    options = {"out_of_vocab": "zero", "with_entropy": True}
    actual, wanted = check(data, hopper(), grpo(entropy_coefficient=coefficient), **options)
    sure = np.asarray(mask) & (np.asarray(data["targets"]) == 7)
    error = oracle.relative_error(actual[2].hidden[sure], oracle.f64(wanted[2].hidden)[sure])
    assert error < GRADIENT_ERROR


@needs_interpreter
def test_no_label_at_all():
    data, _ = bf16_problem(6)
    data["mask"] = jnp.zeros_like(data["mask"])
    _, values, gradients = program(one_call, grpo(), hopper(), {})(data)
    for x in (*jax.tree.leaves(gradients), values.log_probs):
        assert not np.asarray(x, np.float32).any()


@needs_interpreter
def test_on_policy():
    data, options = bf16_problem(150, bias=True, seed=2)
    operands = data["hidden"], data["weight"], data["targets"]
    call = {"mask": data["mask"], "bias": data["bias"], "with_lse": True, "engine": hopper(), **options}
    values = linear_log_probs(*operands, **call)
    data = {**data, "old": values.log_probs}
    known = {**options, "lse": jnp.where(data["mask"], values.lse, jnp.nan)}
    actual = program(one_call, grpo(), hopper(), known)(data)
    compare(actual, program(two_calls, grpo(), "reference", options)(data), gradient_error=GRADIENT_ERROR)


@needs_interpreter
def test_on_policy_without_the_samplers_log_probs():
    data, options = bf16_problem(150, bias=True, seed=2)
    check({**data, "old": None}, hopper(), grpo(), **options)


@pytest.mark.parametrize(
    "hidden_size, parts, tokens, rows",
    [(2304, 2, 8192, 1792), (2304, 10, 8192, 2048), (1024, 2, 8192, 2048), (2304, 2, 1500, 1536)],
)
def test_chunks_of_tokens_fill_the_blocks(hidden_size, parts, tokens, rows):
    # 132 blocks; tiles of dH are 128 tokens by 256 columns: 9 columns of them or 4, each in parts.
    size = hopper_one_pass.chunk_rows(tokens, 2560, 256, hidden_size, head_tiles(hidden_size), parts, 132)
    assert size == rows


@needs_interpreter
@pytest.mark.parametrize("tokens, coefficient", [(9000, 0.0), (9000, 0.1)])
def test_the_kernels_of_one_pass_lower_for_cuda_without_a_gpu(tokens, coefficient):
    operands = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in [(tokens, 256), (129920, 256)]]
    per_token = [jax.ShapeDtypeStruct((tokens,), dtype) for dtype in (jnp.int32, jnp.float32, jnp.float32, jnp.bool_)]

    def total(*x):
        loss, engine = grpo(entropy_coefficient=coefficient), HopperEngine(check_device=False)
        return linear_policy_loss(*x, loss=loss, engine=engine)[0].sum

    traced = jax.jit(jax.grad(total, (0, 1))).trace(*operands, *per_token)
    assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


@needs_interpreter
@pytest.mark.parametrize(
    "changes, words",
    [
        ({"softcap": 5.0}, "in two steps: it keeps exponentials"),
        ({"lse": jnp.zeros(8)}, "from the known log-sum-exp"),
        ({}, "in one pass"),
    ],
)
def test_where_the_pass_lacks_something_two_steps_are_taken(changes, words):
    data, _ = bf16_problem(8, vocab=256)
    with record_head_runs() as runs:
        jax.eval_shape(lambda x: one_call({**data, **x}, grpo(), hopper(), **changes), {x: data[x] for x in HEAD})
    assert runs[0].engine == "hopper" and runs[0].gradient.startswith(words)
