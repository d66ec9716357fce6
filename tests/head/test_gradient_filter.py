"""The gradient filter against a float64 oracle of the filtered gradient, block by block; counts; bad input."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxlogp import linear_log_probs, linear_policy_loss
from jaxlogp.head import ChunkedEngine, GradientFilter, record_head_runs, skipped_tiles
from jaxlogp.losses import grpo, gspo
from tests import oracle

pytestmark = pytest.mark.costly

# fp32 against float64 on the same inputs (contract E).
GRADIENT_ERROR = 2e-5
THRESHOLD = 2.0**-12
TOKENS, HIDDEN, VOCAB, CHUNK, TILE = 22, 16, 240, 4, 20  # neither the tokens nor, below, 230 columns fill their blocks
OPERANDS = ("hidden", "weight", "bias", "targets", "mask", "g_lp", "g_entropy")
ALL_OPTIONS = (("temperature", 0.7), ("logit_scale", 1.3), ("softcap", 30.0))


def engine(threshold=THRESHOLD, chunk=CHUNK, tile=TILE):
    return ChunkedEngine(chunk, tile, None if threshold is None else GradientFilter(threshold))


def case(vocab=VOCAB, sharpness=14.0, seed=0, bias=True):
    """Peaked rows: each hidden state points at one row of the weight, and at its neighbour half as much."""
    rng = np.random.default_rng(seed)
    weight = rng.normal(size=(vocab, HIDDEN))
    weight /= np.linalg.norm(weight, axis=1, keepdims=True)
    # Chunks of tokens that look at a few tiles each.
    seen = (np.arange(TOKENS) // CHUNK * 37 + rng.integers(0, 2, TOKENS)) % vocab
    hidden = sharpness * weight[seen] + 0.5 * sharpness * weight[(seen + 1) % vocab]
    targets = np.where(rng.random(TOKENS) < 0.8, seen, rng.integers(0, vocab, TOKENS)).astype(np.int32)
    targets[:2] = 0, vocab - 1
    mask = np.ones(TOKENS, bool)
    mask[-3:], targets[-3:] = False, -100
    return {
        "hidden": jnp.asarray(hidden, jnp.float32),
        "weight": jnp.asarray(weight, jnp.float32),
        "bias": jnp.asarray(rng.normal(size=vocab), jnp.float32) if bias else None,
        "targets": jnp.asarray(targets),
        "mask": jnp.asarray(mask),
        "g_lp": jnp.asarray(rng.normal(size=TOKENS), jnp.float32),
        "g_entropy": jnp.asarray(rng.normal(size=TOKENS), jnp.float32),
    }


def objective(hidden, weight, bias, targets, mask, g_lp, g_entropy, **options):
    result = linear_log_probs(hidden, weight, targets, mask=mask, bias=bias, with_entropy=True, **options)
    return jnp.sum(result.log_probs * g_lp + result.entropy * g_entropy), result


@functools.partial(jax.jit, static_argnames=("engine", "options"))
def run(data, *, engine, options=()):
    gradient = jax.grad(functools.partial(objective, engine=engine, **dict(options)), argnums=(0, 1, 2), has_aux=True)
    # By name: jit hands dictionaries on in the order of their keys.
    gradients, result = gradient(*(data[name] for name in OPERANDS))
    return result, oracle.HeadGradients(*gradients)


@functools.partial(jax.jit, static_argnames="engine")
def counted(hidden, weight, targets, mask, bias=None, *, engine):
    return skipped_tiles(hidden, weight, targets, mask=mask, bias=bias, engine=engine)


def numpy_filter(data, options=(), threshold=THRESHOLD, chunk=CHUNK, tile=TILE, near=1e-4):
    """(filtered gradients, dz left out [tokens, V], blocks left out), in float64 and block by block."""
    options = dict(options)
    head = oracle.Head(**options)
    mask = np.asarray(data["mask"])
    hidden = np.where(mask[:, None], oracle.f64(data["hidden"]), 0.0)
    weight, bias = oracle.f64(data["weight"]), data["bias"]
    logits = oracle.head_logits(hidden, weight, bias, head)
    probs = oracle.softmax(logits)
    dz = oracle.logits_gradient(logits, data["targets"], data["g_lp"], data["g_entropy"], mask) / head.temperature
    if head.softcap is not None:
        dz *= 1.0 - np.tanh(oracle.raw_logits(hidden, weight, bias, head) / head.softcap) ** 2
    dz *= head.logit_scale
    kept, skipped, nearest = dz.copy(), 0, np.inf
    live = mask & ((np.asarray(data["g_lp"]) != 0) | (np.asarray(data["g_entropy"]) != 0))
    for first in range(0, len(dz), chunk):
        for start in range(0, dz.shape[1], tile):
            rows, columns = slice(first, first + chunk), slice(start, start + tile)
            inside = (np.asarray(data["targets"])[rows] >= start) & (np.asarray(data["targets"])[rows] < start + tile)
            largest = probs[rows, columns].max(axis=1, where=live[rows, None], initial=0.0).max()
            if not (largest >= threshold or np.any(live[rows] & inside)):
                kept[rows, columns], skipped = 0.0, skipped + 1
            if threshold and largest:
                nearest = min(nearest, abs(np.log(largest / threshold)))
    assert nearest > near, "no block may be so near the threshold that rounding decides"
    gradients = oracle.HeadGradients(kept @ weight, kept.T @ hidden, kept.sum(axis=0))
    return gradients, dz - kept, skipped


def check(gradients, wanted):
    for name, gradient in gradients._asdict().items():
        if gradient is not None:
            error = oracle.relative_error(gradient, getattr(wanted, name))
            assert error < GRADIENT_ERROR, f"{name}: {error}"


def same_bytes(left, right):
    for one, other in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


@pytest.mark.parametrize(
    "vocab, options",
    [(VOCAB, ()), (VOCAB - 10, ALL_OPTIONS)],
    ids=["plain", "temperature, scale, soft cap, short tile"],
)
def test_the_filtered_gradient_is_the_oracles(vocab, options):
    data = case(vocab)
    result, gradients = run(data, engine=engine(), options=options)
    wanted, omitted, skipped = numpy_filter(data, options)
    assert skipped > 10 and np.abs(omitted).max() > 0
    check(gradients, wanted)
    if options:
        return
    unfiltered, exact = run(data, engine=engine(None), options=options)
    same_bytes(result, unfiltered)
    assert oracle.relative_error(exact.weight, wanted.weight) > 2 * GRADIENT_ERROR, "the filter must be seen"


def test_threshold_zero_changes_no_byte():
    data = case()
    same_bytes(run(data, engine=engine(0.0)), run(data, engine=engine(None)))


def test_what_is_left_out_is_within_the_bound_and_the_bound_is_near():
    """|dz| < θ |g| + |g_H| max(θ log(1/θ), θ H), entry by entry, for every threshold."""
    data = case(sharpness=9.0)
    entropy = oracle.head_log_probs(*(data[x] for x in ("hidden", "weight", "targets", "mask", "bias")))[1]
    closest = 0.0
    for threshold in (2.0**-16, THRESHOLD, 2.0**-8, 0.3, 0.5):
        _, omitted, skipped = numpy_filter(data, threshold=threshold)
        tail = threshold * math.log(1 / threshold) if threshold < 1 / math.e else 1 / math.e
        g, g_entropy = np.abs(data["g_lp"]), np.abs(data["g_entropy"])
        bound = threshold * g + g_entropy * np.maximum(tail, threshold * entropy)
        assert skipped > 0 and np.all(np.abs(omitted) < bound[:, None] * (1 + 1e-6))  # float64
        closest = max(closest, float((np.abs(omitted).max(axis=1) / bound).max()))
    assert closest > 0.3, closest


def test_the_gradient_of_a_flat_distribution_loses_its_softmax_term_and_nothing_else():
    """A bound on entries is none on sums: every p is 1/240 < 2^-6, so only tiles with targets are left."""
    data = case()
    data["hidden"], data["bias"] = jnp.zeros((TOKENS, HIDDEN), jnp.float32), None
    data["hidden"] = data["hidden"].at[:, 0].set(1e-3)
    _, gradients = run(data, engine=engine(2.0**-6, 1, 1))
    onehot = oracle.one_hot(np.where(data["mask"], data["targets"], -1), VOCAB)
    dz = np.where(onehot > 0, oracle.f64(data["g_lp"])[:, None] * (1 - 1 / VOCAB), 0.0)
    assert oracle.relative_error(gradients.hidden, dz @ oracle.f64(data["weight"])) < 1e-4


def test_a_block_with_a_target_is_kept_however_unlikely_the_target():
    data = case()
    logits = oracle.head_logits(data["hidden"], data["weight"], data["bias"])
    least = int(np.argmin(logits[5]))
    data["targets"] = data["targets"].at[5].set(least)
    assert oracle.softmax(logits)[5, least] < 2.0**-20
    _, gradients = run(data, engine=engine(0.9, 1, TILE))
    wanted, _, _ = numpy_filter(data, threshold=0.9, chunk=1)
    check(gradients, wanted)
    row = oracle.f64(data["g_lp"])[5] * oracle.f64(data["hidden"])[5]
    assert oracle.relative_error(gradients.weight[least], row) < 1e-3


def test_masked_tokens_and_tokens_without_cotangent_keep_nothing():
    data = case()

    def count(mask):
        return counted(data["hidden"], data["weight"], data["targets"], mask, data["bias"], engine=engine())

    some, fewer = count(data["mask"]), count(data["mask"] & (jnp.arange(TOKENS) >= CHUNK))
    assert float(fewer.sum) > float(some.sum) and int(fewer.count) == int(some.count)
    assert float(count(jnp.zeros(TOKENS, bool)).mean()) == 1.0
    # NaN behind the mask touches nothing; a cotangent of 0 works as a mask does.
    broken = {**data, "hidden": jnp.where(data["mask"][:, None], data["hidden"], jnp.nan)}
    same_bytes(run(broken, engine=engine()), run(data, engine=engine()))
    silent = {**data, **{name: data[name].at[:CHUNK].set(0.0) for name in ("g_lp", "g_entropy")}}
    check(run(silent, engine=engine())[1], numpy_filter(silent)[0])
    assert not np.asarray(run(silent, engine=engine())[1].hidden[:CHUNK]).any()


def test_a_cotangent_of_the_entropy_alone_keeps_blocks():
    data = {**case(), "g_lp": jnp.zeros(TOKENS)}
    wanted, _, skipped = numpy_filter(data)
    assert 0 < skipped < 60
    check(run(data, engine=engine())[1], wanted)


def test_errors_are_never_filtered():
    data = case()
    for name, change in {
        "hidden": lambda x: x.at[5].set(jnp.nan),
        "targets": lambda x: x.at[5].set(VOCAB),  # out of the vocabulary: its cotangent is NaN under jit
        "g_lp": lambda x: x.at[5].set(jnp.inf),
        "g_entropy": lambda x: x.at[5].set(jnp.inf),
    }.items():
        _, gradients = run({**data, name: change(data[name])}, engine=engine(0.9))
        assert not np.isfinite(np.asarray(gradients.hidden[5])).any(), name
        assert not np.isfinite(np.asarray(gradients.weight)).all(axis=1).any(), name


def test_the_count_of_skipped_tiles():
    for vocab in (VOCAB, VOCAB - 10):
        data = case(vocab)
        arguments = data["hidden"], data["weight"], data["targets"], data["mask"], data["bias"]
        seen = counted(*arguments, engine=engine())
        assert int(seen.count) == -(-TOKENS // CHUNK) * -(-vocab // TILE)
        assert float(seen.sum) == numpy_filter(data)[2] > 0
    none = counted(*arguments, engine=engine(0.0, TOKENS, vocab))
    assert (float(none.sum), int(none.count)) == (0.0, 1)


def test_skipped_tiles_has_no_gradient():
    data = case()

    def skipped(hidden):
        return counted(hidden, data["weight"], data["targets"], data["mask"], data["bias"], engine=engine()).sum

    assert not np.asarray(jax.grad(skipped)(data["hidden"])).any()


def test_bf16_operands():
    data = case()
    for name in ("hidden", "weight"):
        data[name] = data[name].astype(jnp.bfloat16)
    _, gradients = run(data, engine=engine())
    wanted, _, _ = numpy_filter(data)
    # dz is rounded to bf16 before the products and the result once more (contract E: 5e-3).
    for name in ("hidden", "weight"):
        assert oracle.relative_error(getattr(gradients, name), getattr(wanted, name)) < 5e-3


@pytest.mark.slow
def test_under_vmap():
    data = {name: x for name, x in case().items() if name != "bias"}
    batched = {
        name: jnp.stack([x, x[::-1] if name in ("hidden", "targets", "mask") else x]) for name, x in data.items()
    }

    def gradients(hidden, weight, targets, mask, g_lp, g_entropy):
        return jax.grad(
            lambda h: objective(h, weight, None, targets, mask, g_lp, g_entropy, engine=engine(), out_of_vocab="zero")[
                0
            ]
        )(hidden)

    seen = jax.jit(jax.vmap(gradients))(*batched.values())
    for index in range(2):
        one = gradients(*(x[index] for x in batched.values()))
        assert oracle.relative_error(seen[index], one) < 2 * GRADIENT_ERROR  # each is within it of float64


# --- vocabulary shards -------------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_over_vocabulary_shards_whose_tiles_line_up(shards):
    mesh = jax.make_mesh((2, shards), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    rows, columns = P("data"), P("tensor")
    specs = (rows, columns, columns, rows, rows, rows, rows)
    data = case()
    # Eight tokens a rank would not be whole chunks of the others; 24 tokens, the last two of them masked, are.
    data = {
        name: x if name in ("weight", "bias") else jnp.pad(x, [(0, 2)] + [(0, 0)] * (x.ndim - 1))
        for name, x in data.items()
    }

    def local(*operands):
        gradient = jax.grad(
            functools.partial(objective, axis_name="tensor", engine=engine()), argnums=(0, 1, 2), has_aux=True
        )
        gradients, result = gradient(*operands)
        hidden, weight, bias, targets, mask = operands[:5]
        count = skipped_tiles(hidden, weight, targets, mask=mask, bias=bias, axis_name="tensor", engine=engine())
        return gradients, result, count.psum("data")

    mapped = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=(specs[:3], rows, P()))
    gradients, result, count = jax.jit(mapped)(*data.values())
    wanted, _, skipped = numpy_filter(data)
    check(oracle.HeadGradients(*gradients), wanted)
    assert (float(count.sum), int(count.count)) == (skipped, 24 // CHUNK * VOCAB // TILE)
    alone = run(data, engine=engine())[0]
    # Rows of the weight have norm 1, so Σ|h w| of a logit is at most the norm of a hidden state.
    hidden = np.linalg.norm(oracle.f64(data["hidden"]), axis=1).max() + np.abs(data["bias"]).max()
    bound = 2 * oracle.fp32_bound(hidden, HIDDEN + 1) + oracle.fp32_bound(1.0, VOCAB)
    assert np.abs(np.asarray(result.log_probs) - np.asarray(alone.log_probs)).max() < bound


# --- bad input ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [-1e-9, 1.0, 2, math.nan, math.inf, "0.1", None, True, jnp.float32(0.1)], ids=repr)
@pytest.mark.bad_input
def test_a_threshold_that_is_no_number_in_range_is_refused(value):
    with pytest.raises(ValueError, match=r"threshold: expected a Python number in \[0, 1\), got"):
        GradientFilter(value)


@pytest.mark.parametrize("loss", [grpo(), gspo()], ids=lambda loss: loss.name)
def test_a_policy_loss_is_filtered_in_two_steps(loss):
    """Recorded as such, also where the loss alone would take two steps."""
    data = case()
    operands = (data[name] for name in ("hidden", "weight", "targets", "g_lp", "g_entropy", "mask"))
    ids = {"document_ids": jnp.zeros(TOKENS, jnp.int32), "num_documents": 1}
    with record_head_runs() as runs:
        jax.eval_shape(lambda *x: linear_policy_loss(*x, loss=loss, engine=engine(), **ids)[0].sum, *operands)
    assert runs[0].gradient == "in two steps: its gradient filter needs the maxima of all tiles first"


REFUSED = {
    "a filter that is a number": (lambda: ChunkedEngine(gradient_filter=0.1), "gradient_filter: expected"),
    "counting without a filter": (
        lambda: skipped_tiles(jnp.ones((2, 4)), jnp.ones((5, 4)), jnp.zeros(2, int), engine=ChunkedEngine()),
        "engine: expected an engine object with a gradient_filter",
    ),
    "counting with a name": (
        lambda: skipped_tiles(jnp.ones((2, 4)), jnp.ones((5, 4)), jnp.zeros(2, int), engine="chunked"),
        "engine: expected an engine object with a gradient_filter",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.bad_input
def test_other_bad_input_is_refused(name):
    call, words = REFUSED[name]
    with pytest.raises(ValueError, match=words):
        call()
