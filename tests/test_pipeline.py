"""From tokens to the gradient of a step: packed, split into micro-batches, sharded over data and tensor ranks, tied head.

The float64 side never packs, splits or shards anything: it goes through the documents one by one. So a label that leaks
across a document boundary, a sum added twice over the mesh, a missing part of the tied gradient, or the denominator of
a micro-batch makes the two differ.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxlogp import VocabShards, embedding_lookup, linear_log_probs, losses, policy_loss, policy_metric_terms
from jaxlogp.head import ChunkedEngine
from jaxlogp.policy.accumulate import StepSums
from jaxlogp.policy.documents import Document, pack_documents
from tests import oracle

VOCAB, HIDDEN, TEMPERATURE = 1027, 16, 0.7
ROWS, ROW_LENGTH = 10, 12
LENGTHS = (7, 1, 12, 4, 9, 2, 5, 12, 3, 8, 1, 6)
PROMPTS = (2, 1, 3, 4, 1, 1, 2, 5, 0, 1, 0, 3)
CUTS = (1, 2, 3, 5, 7)
KINDS = [("grpo", "length"), ("gspo", "length"), ("gspo", "document")]
# In the default run one uneven mesh, whose programs all tests share.
UNEVEN = (2, 3)
QUICK = [(UNEVEN, KINDS[1]), (UNEVEN, KINDS[2])]
# A mesh does not know the loss: each of the others has one kind, and every kind meets the uneven one too.
SLOW = [(UNEVEN, KINDS[0]), ((1, 8), KINDS[0]), ((2, 4), KINDS[2]), ((4, 2), KINDS[1])]
GRID = [*QUICK, *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW)]
# Contract: values within 1e-5 and gradients within 2e-5 of float64 for fp32 operands.
VALUE_ERROR = 1e-5
GRADIENT_ERROR = 2e-5


def make_table():
    return np.random.default_rng(3).normal(0.0, 0.4, (VOCAB, HIDDEN)).astype(np.float32)


@functools.lru_cache
def make_documents():
    """Old log-probs lie around the true ones, so that some ratios are clipped and some are not."""
    rng, table = np.random.default_rng(4), make_table()
    documents = []
    for length, prompt in zip(LENGTHS, PROMPTS, strict=True):
        tokens = rng.integers(0, VOCAB, length)
        old = rng.normal(-6.0, 0.4, length - prompt)
        start = max(prompt, 1)
        if length > start:
            new, _ = oracle.head_log_probs(
                table[tokens[start - 1 : -1]], table, tokens[start:], head=oracle.Head(temperature=TEMPERATURE)
            )
            old[start - prompt :] = new + rng.normal(0.0, 0.3, length - start)
        advantage = float(np.float32(rng.normal()))
        completed = Document.of_completion(
            tokens[:prompt], tokens[prompt:], old.astype(np.float32), advantages=advantage
        )
        documents.append(completed)
    return tuple(documents)


@functools.lru_cache
def expected_step(kind, weighting):
    """Loss, gradient of the tied table, and metrics, in float64 from the documents alone."""
    table, head = make_table(), oracle.Head(temperature=TEMPERATURE)
    inputs, targets, old, advantages, ids = [], [], [], [], []
    for index, document in enumerate(make_documents()):
        labels = int(document.labels.sum())
        start = len(document.tokens) - labels
        inputs += list(document.tokens[start - 1 : -1])
        targets += list(document.tokens[start:])
        old += list(document.sampler_log_probs)
        advantages += [document.advantages] * labels
        ids += [index] * labels
    inputs, targets, ids = np.array(inputs), np.array(targets), np.array(ids)
    hidden, mask = table[inputs], np.ones(len(ids), bool)
    log_probs, entropy = oracle.head_log_probs(hidden, table, targets, head=head)
    if kind == "grpo":
        result = oracle.grpo(log_probs, old, advantages, mask)
    else:
        result = oracle.gspo(log_probs, old, advantages, mask, ids, len(LENGTHS), weighting=weighting)
    parts = oracle.head_gradients(hidden, table, targets, result.gradient, head=head)
    gradient = parts.weight + oracle.embedding_gradient(inputs, parts.hidden, VOCAB)
    weights = 1.0 / np.bincount(ids, minlength=len(LENGTHS))[ids] / len(LENGTHS)
    metrics = {"new_logprobs": weights @ log_probs, "entropy": weights @ entropy, "num_tokens": len(ids)}
    return result.loss, gradient, metrics


@functools.lru_cache
def micro_step(data, tensor, kind, weighting):
    """Sums of one micro-batch on a mesh, as a trainer writes them: the gradient is taken through the shard_map."""
    axes = ("data", "tensor")
    mesh = jax.make_mesh((data, tensor), axes, axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[: data * tensor])
    shards = VocabShards.even(VOCAB, tensor)
    vocab = {"axis_name": "tensor", "vocab": shards}
    # Chunks of 50 tokens and tiles of 60 columns divide nothing here.
    head = {"temperature": TEMPERATURE, "with_entropy": True, "engine": ChunkedEngine(50, 60), **vocab}

    def local(table, batch):
        batch = jax.tree.map(lambda x: x[0], batch)
        hidden = embedding_lookup(table, batch.tokens, **vocab)
        log_probs, entropy, _ = linear_log_probs(hidden, table, batch.targets, mask=batch.mask, **head)
        tokens = (batch.per_token["old_log_probs"], batch.per_token["advantages"], batch.mask)
        loss = losses.grpo() if kind == "grpo" else losses.gspo(weighting=weighting, epsilon=0.2)
        options = {"loss": loss, "document_ids": batch.document_ids, "num_documents": batch.num_documents}
        loss = policy_loss(log_probs, *tokens, **options)
        terms = policy_metric_terms(log_probs, *tokens, entropy=entropy, level="with_entropy", **options)
        return loss.psum("data"), terms.psum("data")

    mapped = jax.shard_map(local, mesh=mesh, in_specs=(P("tensor"), P("data")), out_specs=P())

    def loss_sum(table, batch):
        loss, terms = mapped(shards.shard_rows(table), batch)
        return loss.sum, (loss, terms)

    def sums(table, batch):
        gradient, (loss, terms) = jax.grad(loss_sum, has_aux=True)(table, batch)
        return StepSums.of(gradient, loss, terms)

    return jax.jit(sums)


def micro_batches(cut, ranks):
    """The documents in `cut` micro-batches of uneven sizes on each of `ranks` ranks; some hold none."""
    documents = list(make_documents())
    edges = np.round(np.linspace(0, 1, cut * ranks + 1) ** 1.5 * len(documents)).astype(int)
    packed = []
    for start, end in zip(edges[:-1], edges[1:], strict=True):
        batch, rest = pack_documents(documents[start:end], rows=ROWS, row_length=ROW_LENGTH)
        assert not rest
        packed.append(batch)
    return [jax.tree.map(lambda *x: np.stack(x), *packed[i : i + ranks]) for i in range(0, len(packed), ranks)]


def run(mesh_shape, cut, kind, weighting):
    step, table = micro_step(*mesh_shape, kind, weighting), jnp.asarray(make_table())
    # One program in flight: simulated devices share a pool of threads, and collectives could wait for each other.
    return [jax.block_until_ready(step(table, batch)) for batch in micro_batches(cut, mesh_shape[0])]


def assert_step(finished, kind, weighting):
    loss, gradient, metrics = expected_step(kind, weighting)
    assert oracle.scaled_error(finished.loss, loss) < VALUE_ERROR
    assert oracle.relative_error(finished.gradients, gradient) < GRADIENT_ERROR
    for name, value in metrics.items():
        assert oracle.scaled_error(finished.metrics[name], value) < VALUE_ERROR, name
    assert int(finished.metrics["num_documents"]) == len(LENGTHS)


@pytest.mark.parametrize(("mesh_shape", "kind"), GRID)
def test_mesh_and_micro_batches_give_the_step_of_the_documents(mesh_shape, kind):
    for cut in CUTS:
        parts = run(mesh_shape, cut, *kind)
        assert_step(sum(parts[1:], parts[0]).finish(), *kind)


def test_the_case_has_clipped_and_unclipped_labels():
    """Otherwise the comparison above could not see a wrong clip."""
    parts = run(UNEVEN, 1, "grpo", "length")
    assert 0.2 < float(sum(parts[1:], parts[0]).finish().metrics["clipped_ratio_fraction"]) < 0.8


@pytest.mark.parametrize(("kind", "weighting"), KINDS)
def test_a_mean_of_micro_batch_means_is_rejected_by_the_same_check(kind, weighting):
    means = [part.finish() for part in run(UNEVEN, 3, kind, weighting)]
    gradients, loss = (sum(getattr(part, name) for part in means) / 3 for name in ("gradients", "loss"))
    wrong = dataclasses.replace(means[0], gradients=gradients, loss=loss)
    with pytest.raises(AssertionError):
        assert_step(wrong, kind, weighting)
