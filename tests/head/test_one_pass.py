"""linear_policy_gradients against the two-step path and against float64, portable and through the Hopper kernels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxlogp import VocabShards, linear_log_probs, policy_loss
from jaxlogp.head import policy_loss as loss_aware
from jaxlogp.head.chunked import one_pass as chunked_loss_aware
from jaxlogp.head.hopper import HopperEngine
from jaxlogp.head.hopper import one_pass as hopper_loss_aware
from jaxlogp.head.hopper._pallas_compat import interpreter, why_not_available
from jaxlogp.head.hopper.tiles import head_tiles
from jaxlogp.head.policy_loss import linear_policy_gradients
from jaxlogp.head.projection import HeadOptions
from tests import oracle
from tests.head import cases

GRADIENT_ERROR = 5e-3
needs_interpreter = pytest.mark.skipif(why_not_available() is not None, reason=str(why_not_available()))
ALL_OPTIONS = {"temperature": 0.7, "logit_scale": 1.3}


def problem(tokens=70, hidden_size=64, vocab=600, bias=False, dtype=jnp.bfloat16, seed=0):
    data = cases.case((tokens,), hidden_size, vocab, bias=jnp.float32 if bias else None, seed=seed)
    rng = np.random.default_rng(seed + 100)
    mask = jnp.asarray(rng.random(tokens) < 0.6).at[:2].set(True)
    hidden = data["hidden"].astype(dtype)
    # Masked rows may hold anything.
    hidden = jnp.where(mask[:, None], hidden, jnp.nan)
    weight = data["weight"].astype(dtype)
    head = {"bias": data["bias"], **(ALL_OPTIONS if bias else {})}
    clean = jnp.where(mask[:, None], hidden, 0)
    log_probs = linear_log_probs(clean, weight, data["targets"], mask=mask, engine="reference", **head).log_probs
    old = jnp.where(mask, log_probs + jnp.asarray(rng.normal(0.0, 0.3, tokens), jnp.float32), jnp.nan)
    advantages = jnp.where(mask, jnp.asarray(rng.normal(size=tokens), jnp.float32), jnp.nan)
    return (hidden, weight, data["targets"], old, advantages, mask), head


def two_steps(arguments, head, coefficient, denominator, engine):
    hidden, weight, targets, old, advantages, mask = arguments

    def objective(hidden, weight, bias):
        options = {**head, "bias": bias, "mask": mask, "with_entropy": True, "engine": engine}
        values = linear_log_probs(hidden, weight, targets, **options)
        loss = policy_loss(values.log_probs, old, advantages, mask)
        total = loss.sum - coefficient * jnp.sum(values.entropy)
        return total / denominator, (total, values)

    argnums = (0, 1) if head["bias"] is None else (0, 1, 2)
    return jax.jit(jax.grad(objective, argnums, has_aux=True))(hidden, weight, head["bias"])


def compare(out, wanted, value_error, gradient_error):
    gradients, (total, values) = wanted
    np.testing.assert_allclose(out.loss.sum, total, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(out.values.log_probs, values.log_probs, atol=value_error)
    if out.values.entropy is not None:
        np.testing.assert_allclose(out.values.entropy, values.entropy, atol=value_error)
    for actual, gradient in zip((out.hidden, out.weight, out.bias), gradients, strict=False):
        assert actual.dtype == gradient.dtype and actual.shape == gradient.shape
        assert oracle.relative_error(actual, np.asarray(gradient, np.float64)) < gradient_error


@pytest.mark.parametrize(
    "bias, coefficient",
    [(False, 0.0), (True, 0.1)],
    ids=["plain, policy", "temperature, scale, bias, policy and entropy"],
)
def test_portable_equals_the_two_step_path(monkeypatch, bias, coefficient):
    monkeypatch.setattr(chunked_loss_aware, "CHUNK_ELEMENTS", 600 * 16)
    arguments, head = problem(bias=bias, dtype=jnp.float32)
    options = {"denominator": 37.0, "entropy_coefficient": coefficient, "engine": "chunked", **head}
    out = jax.jit(lambda *x: linear_policy_gradients(*x, **options))(*arguments)
    compare(out, two_steps(arguments, head, coefficient, 37.0, "reference"), 1e-5, 1e-5)
    masked = ~np.asarray(arguments[-1])
    assert not np.asarray(out.hidden)[masked].any() and not np.asarray(out.values.log_probs)[masked].any()


def test_portable_with_a_soft_cap_and_bf16():
    arguments, head = problem()
    head = {**head, "softcap": 5.0}
    out = linear_policy_gradients(*arguments, engine="chunked", **head)
    compare(out, two_steps(arguments, head, 0.0, 1.0, "reference"), 1e-5, GRADIENT_ERROR)


def test_no_label_at_all():
    (*operands, mask), head = problem(tokens=6)
    out = linear_policy_gradients(*operands, jnp.zeros_like(mask), engine="chunked", with_entropy=True)
    assert float(out.loss.sum) == 0.0 and int(out.loss.count) == 0
    for x in (out.hidden, out.weight, out.values.log_probs, out.values.entropy):
        assert not np.asarray(x, np.float32).any()


def documents_problem(rows=4, length=20, seed=0):
    """[rows, length, H] with one to three documents a row, document numbers in no order."""
    flat, head = problem(tokens=rows * length, dtype=jnp.float32, seed=seed)
    rng = np.random.default_rng(seed + 7)
    names, ids = list(rng.permutation(70)), np.zeros((rows, length), np.int32)
    for row in ids:
        cuts = np.sort(rng.choice(np.arange(1, length), rng.integers(0, 3), replace=False))
        for part in np.split(np.arange(length), cuts):
            row[part] = names.pop()
    hidden, weight, *tokens = flat
    shaped = hidden.reshape(rows, length, -1), weight, *(x.reshape(rows, length) for x in tokens)
    return shaped, head, {"kind": "gspo", "document_ids": jnp.asarray(ids), "num_documents": 70}


def documents_two_steps(arguments, head, documents, denominator=1.0):
    hidden, weight, targets, old, advantages, mask = arguments

    def objective(hidden, weight):
        values = linear_log_probs(hidden, weight, targets, mask=mask, with_entropy=True, engine="reference", **head)
        loss = policy_loss(values.log_probs, old, advantages, mask, **documents)
        return loss.sum / denominator, (loss.sum, values)

    return jax.jit(jax.grad(objective, (0, 1), has_aux=True))(hidden, weight)


@pytest.mark.parametrize("weighting, traced", [("length", True), ("document", False)], ids=str)
def test_ratios_of_documents_equal_the_two_step_path(monkeypatch, weighting, traced):
    monkeypatch.setattr(chunked_loss_aware, "CHUNK_ELEMENTS", 600 * 20)  # a chunk a row: fewer tokens than documents
    arguments, head, documents = documents_problem()
    documents["document_weighting"] = weighting
    if traced:
        documents["num_documents"] = jnp.asarray(documents["num_documents"])
    out = jax.jit(lambda *x: linear_policy_gradients(*x, denominator=12, engine="chunked", **documents, **head))(
        *arguments
    )
    compare(out, documents_two_steps(arguments, head, documents, 12.0), 1e-5, 1e-5)
    assert int(out.loss.count) == 70


def test_a_label_with_a_wrong_document_makes_its_loss_and_gradient_nan():
    arguments, head, documents = documents_problem()
    ids = documents.pop("document_ids")
    place = tuple(np.argwhere(np.asarray(arguments[-1]))[0])
    run = jax.jit(
        lambda ids: linear_policy_gradients(*arguments, document_ids=ids, engine="chunked", **documents, **head)
    )
    out = run(ids.at[place].set(99))
    assert np.isnan(float(out.loss.sum)) and np.isnan(np.asarray(out.hidden)[place]).all()


def log_sum_exp(arguments, head):
    hidden, weight, *_, mask = arguments
    clean = jnp.where(mask[..., None], hidden, 0).astype(jnp.float32)
    logits = (
        clean @ weight.astype(jnp.float32).T
        + (0.0 if head["bias"] is None else head["bias"].astype(jnp.float32)[None, :])
    ) * head.get("logit_scale", 1.0)
    if head.get("softcap"):
        logits = head["softcap"] * jnp.tanh(logits / head["softcap"])
    lse = jax.nn.logsumexp(logits / head.get("temperature", 1.0), axis=-1)
    return jnp.where(mask, lse, jnp.nan)


def on_policy(arguments, head):
    """The arguments with old log-probs that the head itself gives, and its log-sum-exp."""
    hidden, weight, targets, _, advantages, mask = arguments
    clean = jnp.where(mask[..., None], hidden, 0)
    old = linear_log_probs(clean, weight, targets, mask=mask, engine="reference", **head).log_probs
    return (hidden, weight, targets, old, advantages, mask), log_sum_exp(arguments, head)


@pytest.mark.parametrize(
    "options", [{}, {"softcap": 5.0}, ALL_OPTIONS], ids=["plain", "soft cap", "temperature, scale"]
)
def test_on_policy_with_the_log_sum_exp(options):
    arguments, head = problem(dtype=jnp.float32)
    head = {**head, **options}
    arguments, lse = on_policy(arguments, head)
    run = jax.jit(lambda lse, *x: linear_policy_gradients(*x, denominator=37.0, lse=lse, engine="chunked", **head))
    out = run(lse, *arguments)
    wanted = two_steps(arguments, head, 0.0, 37.0, "reference")
    compare(out, wanted, 1e-5, 1e-5)
    assert not np.asarray(out.hidden)[~np.asarray(arguments[-1])].any()


def test_on_policy_documents():
    arguments, head, documents = documents_problem()
    arguments, lse = on_policy(arguments, head)
    out = linear_policy_gradients(*arguments, lse=lse, engine="chunked", **documents, **head)
    compare(out, documents_two_steps(arguments, head, documents), 1e-5, 1e-5)


def test_on_policy_stores_no_logits():
    tokens, vocab = 1024, 32768
    floats, ids = jax.ShapeDtypeStruct((tokens,), jnp.float32), jax.ShapeDtypeStruct((tokens,), jnp.int32)
    operands = [jax.ShapeDtypeStruct((rows, 64), jnp.float32) for rows in (tokens, vocab)]
    arguments = floats, *operands, ids, floats, floats, jax.ShapeDtypeStruct((tokens,), jnp.bool_)
    run = jax.jit(lambda lse, *x: linear_policy_gradients(*x, lse=lse, engine="chunked"))
    memory = run.lower(*arguments).compile().memory_analysis().temp_size_in_bytes
    assert memory < 0.2 * 4 * tokens * vocab, memory


@pytest.mark.parametrize(
    "data, tensor, case, check_vma",
    [
        (1, 3, "tokens and entropy", True),
        (2, 4, "tokens and entropy", False),
        (2, 4, "documents", True),
        (1, 3, "on policy", False),
        pytest.param(2, 4, "on policy", True, marks=pytest.mark.slow),
        pytest.param(2, 4, "tokens and entropy", True, marks=pytest.mark.slow),
        pytest.param(1, 3, "documents", False, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_vocabulary_shards_give_the_unsharded_result(monkeypatch, data, tensor, case, check_vma):
    monkeypatch.setattr(chunked_loss_aware, "CHUNK_ELEMENTS", 600 * 20)
    arguments, head, documents = documents_problem()
    options = {"denominator": 37.0, "engine": "chunked"}
    lse = None
    if case == "on policy":
        arguments, lse = on_policy(arguments, head)
    if case == "documents":
        options |= documents
    if case == "tokens and entropy":
        options |= {"entropy_coefficient": 0.1}
    ids = options.pop("document_ids", None)
    shards = VocabShards.even(600, tensor)
    mesh = jax.make_mesh(
        (data, tensor), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[: data * tensor]
    )

    def local(hidden, weight, targets, old, advantages, mask, ids, lse):
        out = linear_policy_gradients(
            hidden, weight, targets, old, advantages, mask, document_ids=ids, lse=lse, axis_name="tensor", vocab=shards,
            **options,
        )  # fmt: skip
        loss = out.loss.sum if ids is None else jnp.where(mask.any(), out.loss.sum, 0.0)
        return jax.lax.psum(loss, "data"), out.values, out.hidden, jax.lax.psum(out.weight, "data")

    split, rows = P("data"), P("tensor")
    in_specs = (split, rows, split, split, split, split, split, split)
    out_specs = (P(), split, split, rows)
    mapped = jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma)
    loss, values, d_hidden, d_weight = jax.jit(mapped)(
        arguments[0], shards.shard_rows(arguments[1]), *arguments[2:], ids, lse
    )
    wanted = linear_policy_gradients(*arguments, document_ids=ids, lse=lse, **options, **head)
    np.testing.assert_allclose(loss, wanted.loss.sum, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(values.log_probs, wanted.values.log_probs, atol=1e-5)
    assert oracle.relative_error(d_hidden, np.asarray(wanted.hidden, np.float64)) < 1e-5
    assert oracle.relative_error(shards.unshard_rows(d_weight), np.asarray(wanted.weight, np.float64)) < 1e-5


def in_two_rows(ids, **_):
    return {"document_ids": ids.at[1].set(ids[0])}


@pytest.mark.bad_input
@pytest.mark.parametrize(
    "change, message",
    [
        ({"kind": "ppo"}, "kind: expected"),
        ({"document_ids": None, "num_documents": None}, "document_ids: expected the document index"),
        ({"num_documents": None}, "num_documents: expected"),
        ({"lse": 0.0, "with_entropy": True}, "lse: expected None along with entropy"),
        ({"lse": np.inf}, "lse: expected a finite value at every label"),
        ({"engine": "reference"}, "engine: expected 'auto', 'chunked' or 'hopper'"),
        (in_two_rows, "document_ids: expected every document in one row"),
    ],
    ids=["kind", "no ids", "no count", "entropy", "infinite", "engine", "two rows"],
)
def test_bad_input(change, message):
    arguments, head, documents = documents_problem()
    changed = change(documents["document_ids"]) if callable(change) else dict(change)
    if isinstance(changed.get("lse"), float):
        changed["lse"] = jnp.full(arguments[2].shape, changed["lse"])
    with pytest.raises(ValueError, match=message):
        linear_policy_gradients(*arguments, **{**head, **documents, **changed})


@pytest.mark.bad_input
@pytest.mark.parametrize("position, name", [(3, "old_log_probs"), (4, "advantages")])
def test_arrays_of_another_shape_are_refused(position, name):
    arguments, head, _ = documents_problem()
    arguments = [x.reshape(-1) if index == position else x for index, x in enumerate(arguments)]
    with pytest.raises(ValueError, match=f"{name}: expected shape"):
        linear_policy_gradients(*arguments, **head)


@needs_interpreter
@pytest.mark.parametrize(
    "chunk_rows, bias, coefficient",
    [
        (64, False, 0.1),
        (64, True, 0.0),
        (1024, True, 0.1),
        (1024, False, 0.0),
    ],
)
def test_hopper_kernels_equal_the_two_step_path(monkeypatch, chunk_rows, bias, coefficient):
    fp32_weight = 4 * 768 * 64
    several = chunk_rows * 2 * 768 - (fp32_weight if chunk_rows > 300 else 0)
    monkeypatch.setattr(hopper_loss_aware, "CHUNK_BYTES", several)
    arguments, head = problem(tokens=300, bias=bias, seed=1)
    # The windows of the vocabulary do not divide it.
    engine = HopperEngine(interpret=interpreter(), num_sms=2, chunk=512)
    options = {"denominator": 37.0, "entropy_coefficient": coefficient, "with_entropy": True, "engine": engine, **head}
    out = jax.jit(lambda *x: linear_policy_gradients(*x, **options))(*arguments)
    compare(out, two_steps(arguments, head, coefficient, 37.0, "reference"), 1e-5, GRADIENT_ERROR)
    assert not np.asarray(out.hidden)[~np.asarray(arguments[-1])].any()
    values = linear_log_probs(*arguments[:3], mask=arguments[-1], with_entropy=True, engine=engine, **head)
    np.testing.assert_array_equal(np.asarray(out.values.log_probs), np.asarray(values.log_probs))
    np.testing.assert_array_equal(np.asarray(out.values.entropy), np.asarray(values.entropy))


@needs_interpreter
@pytest.mark.parametrize("coefficient", [0.1, 0.0], ids=["entropy bonus", "none"])
def test_hopper_kernels_that_sum_windows_of_the_vocabulary_apart(monkeypatch, coefficient):
    # Three windows of 384 columns, and 128 more that make no step of each. Chunks of 256 tokens; the last one has 48 labels.
    monkeypatch.setattr(hopper_loss_aware, "CHUNK_BYTES", 256 * (2 * 1280 + 4 * 64 * 3))
    arguments, head = problem(tokens=500, vocab=1200, bias=True, seed=5)
    assert 256 < int(arguments[-1].sum()) <= 384
    tiles = head_tiles(2304)
    assert tiles.windows_apart
    engine = HopperEngine(tiles, interpret=interpreter(), num_sms=2, chunk=512)
    assert hopper_loss_aware.windows(1200, 1280, tiles, engine) == (1152, 3)
    options = {"entropy_coefficient": coefficient, "engine": engine, **head}
    out = jax.jit(lambda *x: linear_policy_gradients(*x, **options))(*arguments)
    compare(out, two_steps(arguments, head, coefficient, 1.0, "reference"), 1e-5, GRADIENT_ERROR)
    assert not np.asarray(out.hidden, np.float32)[~np.asarray(arguments[-1])].any()


@needs_interpreter
def test_hopper_kernels_where_the_sampler_is_far_from_the_policy(monkeypatch):
    # A ratio of about e^-80, and an advantage that makes it count: exponentials against such an estimate are cut off.
    monkeypatch.setattr(hopper_loss_aware, "CHUNK_BYTES", 64 * 2 * 768)
    (*operands, old, advantages, mask), head = problem(tokens=500, bias=True, seed=3)
    # The second of four chunks holds the token; the third has no label.
    mask = mask.at[300:].set(False)
    token = int(np.flatnonzero(np.asarray(mask))[140])
    assert 140 < int(mask.sum()) < 256
    arguments = *operands, old.at[token].add(80.0), advantages.at[token].set(5e34), mask
    engine = HopperEngine(interpret=interpreter(), num_sms=2, chunk=512)
    out = jax.jit(lambda *x: linear_policy_gradients(*x, engine=engine, **head))(*arguments)
    compare(out, two_steps(arguments, head, 0.0, 1.0, "reference"), 1e-5, GRADIENT_ERROR)


@needs_interpreter
@pytest.mark.parametrize("coefficient", [0.1, 0.0], ids=["entropy bonus", "none"])
def test_hopper_kernels_keep_the_small_gradient_of_a_confident_target(coefficient):
    (hidden, weight, targets, old, advantages, mask), head = problem(tokens=40, vocab=256, seed=4)
    # z_target is about 11, the other logits 0.2 at most; and a target that no column owns, and tokens without a label.
    weight = (0.02 * weight.astype(jnp.float32)).at[7].set(1.0).astype(weight.dtype)
    hidden = jnp.where(mask[:, None], jnp.full_like(hidden, 11 / 64), jnp.nan)
    targets = jnp.full_like(targets, 7).at[1].set(999)
    values = linear_log_probs(
        jnp.where(mask[:, None], hidden, 0), weight, targets, mask=mask, out_of_vocab="zero", engine="reference"
    )
    assert np.exp(values.log_probs[0]) > 1 - 2.0**-7, "p must be near 1"
    arguments = hidden, weight, targets, jnp.where(mask, values.log_probs, jnp.nan), advantages, mask
    head = {**head, "out_of_vocab": "zero"}
    options = {"entropy_coefficient": coefficient, "with_entropy": True, **head}
    out = linear_policy_gradients(*arguments, engine=HopperEngine(interpret=interpreter(), num_sms=2), **options)
    compare(out, two_steps(arguments, head, coefficient, 1.0, "reference"), 1e-5, GRADIENT_ERROR)
    wanted = two_steps(arguments, head, coefficient, 1.0, "reference")[0][0]
    sure = np.asarray(mask) & (np.asarray(targets) == 7)
    assert oracle.relative_error(out.hidden[sure], np.asarray(wanted, np.float64)[sure]) < GRADIENT_ERROR


@needs_interpreter
def test_hopper_kernels_without_a_label():
    (*operands, mask), _ = problem(tokens=6)
    engine = HopperEngine(interpret=interpreter(), num_sms=2)
    out = linear_policy_gradients(*operands, jnp.zeros_like(mask), engine=engine)
    for x in (out.hidden, out.weight, out.values.log_probs):
        assert not np.asarray(x, np.float32).any()


@needs_interpreter
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "temperature, scale, bias"])
def test_hopper_kernels_on_policy(bias):
    arguments, head = problem(tokens=300, bias=bias, seed=2)
    arguments, lse = on_policy(arguments, head)
    engine = HopperEngine(interpret=interpreter(), num_sms=2)
    out = jax.jit(lambda lse, *x: linear_policy_gradients(*x, lse=lse, denominator=37.0, engine=engine, **head))(
        lse, *arguments
    )
    compare(out, two_steps(arguments, head, 0.0, 37.0, "reference"), 1e-5, GRADIENT_ERROR)


@pytest.mark.parametrize(
    "hidden_size, parts, tokens, rows",
    [(2304, 2, 8192, 1792), (2304, 10, 8192, 2048), (1024, 2, 8192, 2048), (2304, 2, 1500, 1536)],
)
def test_chunks_of_tokens_fill_the_blocks(hidden_size, parts, tokens, rows):
    # 132 blocks; tiles of dH are 128 tokens by 256 columns: 9 columns of them or 4, each in parts.
    size = hopper_loss_aware.chunk_rows(tokens, 2560, 256, hidden_size, head_tiles(hidden_size), parts, 132)
    assert size == rows


@needs_interpreter
@pytest.mark.parametrize("tokens, coefficient", [(300, 0.0), (9000, 0.0), (9000, 0.1)])
def test_the_kernels_of_one_pass_lower_for_cuda_without_a_gpu(tokens, coefficient):
    shapes = [(tokens, 256), (129920, 256)]
    operands = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    per_token = [jax.ShapeDtypeStruct((tokens,), dtype) for dtype in (jnp.int32, jnp.float32, jnp.float32, jnp.bool_)]

    def one_pass(*x):
        return linear_policy_gradients(*x, entropy_coefficient=coefficient, engine=HopperEngine())

    jax.jit(one_pass).trace(*operands, *per_token).lower(lowering_platforms=("cuda",))


@needs_interpreter
@pytest.mark.parametrize(
    "changes, on_policy, rows, words",
    [
        ({}, False, False, None),
        ({"axis_name": "tensor"}, False, False, "takes no vocabulary shards"),
        ({"axis_name": "tensor"}, True, False, None),
        ({"softcap": 5.0}, False, False, "soft cap"),
        ({}, False, True, "may part a document"),
    ],
)
def test_auto_leaves_the_kernels_where_their_pass_lacks_something(monkeypatch, changes, on_policy, rows, words):
    monkeypatch.setattr(loss_aware, "choose_engine", lambda *_: (HopperEngine(), "a Hopper GPU"))
    hidden, weight = (jax.ShapeDtypeStruct((8, 64), jnp.bfloat16) for _ in range(2))
    options = HeadOptions(vocab_size=8, **changes)
    chosen, reason = loss_aware._choose("auto", hidden, weight, None, options, on_policy, rows)
    assert chosen.name == ("hopper" if words is None else "chunked")
    assert (words or "a Hopper GPU") in reason
