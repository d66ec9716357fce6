"""Sequence parallelism at the head: hidden states split over the vocabulary axis, against the unsharded float64 oracle."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxlogp import VocabShards, linear_log_probs, linear_policy_loss
from jaxlogp.head import ChunkedEngine
from jaxlogp.losses import grpo, gspo
from tests import oracle
from tests.head.test_shards import collectives

ROWS, LENGTH, HIDDEN, VOCAB, TENSOR = 4, 12, 16, 257, 4
CHUNKED = ChunkedEngine(token_chunk=16, vocab_tile=100)
SHARDS = VocabShards.even(VOCAB, TENSOR)
# fp32 on the same inputs, against float64 (contract); the reduce-scatter adds 3 roundings of 2^-24. bf16 gradients are
# rounded once at the end: contract 5e-3.
VALUE_ERROR = 1e-5
GRADIENT_ERROR = {jnp.float32: 2e-5, jnp.bfloat16: 5e-3}
OPERANDS = (P("data", "tensor"), P("tensor"), P("tensor"))
TOKENS = P("data")


def case(dtype=jnp.float32):
    rng = np.random.default_rng(0)
    shape = (ROWS, LENGTH)
    return {
        "hidden": jnp.asarray(rng.normal(size=(*shape, HIDDEN)), dtype),
        "weight": jnp.asarray(rng.normal(0.0, 0.5, (VOCAB, HIDDEN)), dtype),
        "bias": jnp.asarray(rng.normal(size=VOCAB), jnp.float32),
        "targets": jnp.asarray(rng.integers(0, VOCAB, shape), jnp.int32),
        "mask": jnp.asarray(rng.random(shape) < 0.8),
        "g_lp": jnp.asarray(rng.normal(size=shape), jnp.float32),
        "g_entropy": jnp.asarray(rng.normal(size=shape), jnp.float32),
    }


def on_mesh(local, out_specs, num_tokens):
    """`local(hidden, weight, bias, *per token)` on two rows of the mesh by four parts of the vocabulary."""
    mesh = jax.make_mesh((2, TENSOR), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    return jax.shard_map(local, mesh=mesh, in_specs=(*OPERANDS, *[TOKENS] * num_tokens), out_specs=out_specs)


def operands(data):
    return data["hidden"], SHARDS.shard_rows(data["weight"]), SHARDS.shard_rows(data["bias"])


HEAD = {"axis_name": "tensor", "vocab": SHARDS, "engine": CHUNKED, "sequence_dim": 1}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_values_and_gradients_are_those_of_one_device(dtype):
    data = case(dtype)

    def local(hidden, weight, bias, targets, mask, g_lp, g_entropy):
        def total(hidden, weight, bias):
            values = linear_log_probs(hidden, weight, targets, mask=mask, bias=bias, with_entropy=True, **HEAD)
            return jnp.sum(values.log_probs * g_lp + values.entropy * g_entropy), values

        return jax.grad(total, argnums=(0, 1, 2), has_aux=True)(hidden, weight, bias)

    tokens = [data[name] for name in ("targets", "mask", "g_lp", "g_entropy")]
    gradients, values = jax.jit(on_mesh(local, (OPERANDS, TOKENS), 4))(*operands(data), *tokens)
    flat = {name: np.asarray(x, np.float64 if x.dtype == dtype else None) for name, x in data.items()}
    flat = {name: x.reshape(-1, *x.shape[2:]) if x.ndim > 1 and name != "weight" else x for name, x in flat.items()}
    log_probs, entropy = oracle.head_log_probs(*(flat[x] for x in ("hidden", "weight", "targets", "mask", "bias")))
    assert oracle.scaled_error(np.ravel(values.log_probs), log_probs) < VALUE_ERROR
    assert oracle.scaled_error(np.ravel(values.entropy), entropy) < VALUE_ERROR
    named = {name: flat[name] for name in ("mask", "bias")}
    wanted = oracle.head_gradients(*(flat[x] for x in ("hidden", "weight", "targets", "g_lp", "g_entropy")), **named)
    mine = (gradients[0].reshape(-1, HIDDEN), SHARDS.unshard_rows(gradients[1]), SHARDS.unshard_rows(gradients[2]))
    for gradient, one in zip(mine, wanted, strict=True):
        assert oracle.relative_error(gradient, one) < GRADIENT_ERROR[dtype]


def step(loss, sequence_dim, engine=CHUNKED):
    """Loss, and gradients of hidden states and weight, of documents of half a row."""
    data = case()
    ids = jnp.asarray(np.arange(ROWS * LENGTH).reshape(ROWS, LENGTH) % (2 * LENGTH) // 6, jnp.int32)
    columns = data["targets"], data["g_lp"] - 5.0, data["g_entropy"], data["mask"], ids
    head = HEAD | {"sequence_dim": sequence_dim, "engine": engine}

    def local(hidden, weight, bias, targets, old, advantages, mask, ids):
        def total(hidden, weight):
            arrays = (hidden, weight, targets, old, advantages, mask)
            documents = {"document_ids": ids, "num_documents": 4}
            return linear_policy_loss(*arrays, loss=loss, bias=bias, **documents, **head)[0].psum("data").mean()

        return jax.value_and_grad(total, argnums=(0, 1))(hidden, weight)

    place = P("data") if sequence_dim is None else OPERANDS[0]
    mesh = jax.make_mesh((2, TENSOR), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    specs = (place, *OPERANDS[1:], *[TOKENS] * len(columns))
    mapped = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=(P(), (place, P("tensor"))))
    return mapped, (*operands(data), *columns)


@pytest.mark.costly
@pytest.mark.parametrize("loss", [grpo(), grpo(entropy_coefficient=0.1), gspo()], ids=["one pass", "entropy", "gspo"])
def test_a_loss_is_that_of_hidden_states_that_every_rank_has(loss):
    (mapped, arguments), (replicated, others) = step(loss, 1), step(loss, None)
    replicated = jax.jit(replicated)
    (value, gradients), (wanted, whole) = jax.jit(mapped)(*arguments), replicated(*others)
    # A log-prob is a logit, of 16 products and a bias with Σ|x| < 16, minus log Σ e^z; a ratio is off by as much relative.
    # With every advantage below 0 no term cancels: their size, but for at most 0.1 log V of the entropy, twice.
    order = 2 * oracle.fp32_bound(16.0, HIDDEN + 1) + oracle.fp32_bound(1.0, VOCAB)
    size, _ = replicated(*others[:5], -jnp.abs(others[5]), *others[6:])
    assert abs(float(value - wanted)) <= order * (float(size) + 0.2 * np.log(VOCAB))
    for gradient, one in zip(gradients, whole, strict=True):
        assert float(jnp.max(jnp.abs(one))) > 0.0
        assert oracle.relative_error(gradient, one) < 2 * GRADIENT_ERROR[jnp.float32]  # each is within it of float64


def test_the_gradient_is_summed_and_split_by_one_collective():
    of_split, of_whole = (
        collectives(jax.make_jaxpr(mapped)(*args)) for mapped, args in (step(grpo(), 1), step(grpo(), None))
    )
    assert [of_split.count(name) for name in ("reduce_scatter", "all_gather")] == [1, 1]
    assert [of_whole.count(name) for name in ("reduce_scatter", "all_gather")] == [0, 0]
    sums = [sum(name.startswith("psum") for name in names) for names in (of_split, of_whole)]
    assert sums[0] == sums[1] - 1


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("changes", "place", "sentence"),
    [
        (
            {"axis_name": None, "vocab": None},
            P(),
            "axis_name: expected the mesh axis that splits hidden along sequence_dim",
        ),
        ({"sequence_dim": 2}, OPERANDS[0], "sequence_dim: expected a dimension of the tokens"),
        ({"sequence_dim": -1}, OPERANDS[0], "sequence_dim: expected a dimension of the tokens"),
        ({}, TOKENS, "hidden: expected the local shard of each rank of axis 'tensor'"),
        ({"engine": "fixed_order"}, OPERANDS[0], "engine: expected a call that 'fixed_order' takes, got it sums"),
        ({"sequence_dim": 0}, OPERANDS[0], "targets: expected shape"),
    ],
)
def test_what_is_refused(changes, place, sentence):
    data = case()

    def local(hidden, weight, targets):
        return linear_log_probs(hidden, weight, targets, **HEAD | changes).log_probs

    mesh = jax.make_mesh((2, TENSOR), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    mapped = jax.shard_map(local, mesh=mesh, in_specs=(place, P("tensor"), TOKENS), out_specs=TOKENS, check_vma=True)
    with pytest.raises(ValueError, match=f"^{sentence}"):
        jax.eval_shape(mapped, data["hidden"], SHARDS.shard_rows(data["weight"]), data["targets"])
