"""Bad input over the whole public API: a ValueError that names the argument, what was expected and what was seen."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxlogp
from jaxlogp.invariance import nan_unless_equal

pytestmark = pytest.mark.bad_input

TOKENS, HIDDEN, VOCAB = (2, 3), 4, 10


def head(**changes):
    """linear_log_probs on good arguments, except for the changed ones."""
    return jaxlogp.linear_log_probs(**{**good_head(), **changes})


def good_head():
    return {
        "hidden": jnp.ones((*TOKENS, HIDDEN), jnp.float32),
        "weight": jnp.ones((VOCAB, HIDDEN), jnp.float32),
        "targets": jnp.zeros(TOKENS, jnp.int32),
    }


def logits(**changes):
    good = {"logits": jnp.ones((*TOKENS, VOCAB), jnp.float32), "targets": jnp.zeros(TOKENS, jnp.int32)}
    return jaxlogp.log_probs_from_logits(**{**good, **changes})


def mesh():
    return jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)


def sharded_head(**changes):
    good = {
        "hidden": jnp.ones((4, 3, HIDDEN), jnp.float32),
        "weight": jnp.ones((12, HIDDEN), jnp.float32),
        "targets": jnp.zeros((4, 3), jnp.int32),
        "mesh": mesh(),
    }
    return jaxlogp.sharded_linear_log_probs(**{**good, **changes})


def sharded_loss(**changes):
    given = jnp.ones((4, 3, HIDDEN)), jnp.ones((12, HIDDEN)), ids(4, 3), -jnp.ones((4, 3)), jnp.ones(4)
    return jaxlogp.sharded_linear_policy_loss(*given, mesh=mesh(), **changes)


def head_in_shard_map(rows, vocab):
    """The local shard of the weight has `rows` rows on each of 4 ranks."""
    return jax.shard_map(
        lambda h, w, t: jaxlogp.linear_log_probs(h, w, t, axis_name="tensor", vocab=vocab).log_probs,
        mesh=mesh(),
        in_specs=(P(), P("tensor"), P()),
        out_specs=P(),
    )(jnp.ones((3, HIDDEN), jnp.float32), jnp.ones((4 * rows, HIDDEN), jnp.float32), jnp.zeros(3, jnp.int32))


def log_probs_of(hidden, weight, targets, axis_name):
    return jaxlogp.linear_log_probs(hidden, weight, targets, axis_name=axis_name).log_probs


def loss_sum(hidden, weight, targets, axis_name):
    given = -jnp.ones(3), jnp.ones(3), jnp.ones(3, bool)
    return jaxlogp.linear_policy_loss(hidden, weight, targets, *given, axis_name=axis_name)[1].log_probs


def logits_of(hidden, weight, targets, axis_name):
    return jaxlogp.log_probs_from_logits(hidden @ weight.T, targets, axis_name=axis_name).log_probs


def rows_of(hidden, weight, targets, axis_name):
    return jaxlogp.embedding_lookup(weight, targets, axis_name=axis_name)[:, 0]


def whole_logits_of(hidden, weight, targets, axis_name):
    return logits_of(hidden, hidden, targets, axis_name)


def whole_rows_of(hidden, weight, targets, axis_name):
    return rows_of(hidden, hidden, targets, axis_name)


def compared(hidden, weight, targets, axis_name):
    return nan_unless_equal(hidden, axis_name)[:, 0]


def named_axis(axis_name, function=log_probs_of, mesh=mesh):
    """Traced, on shards of the weight and tokens that all ranks have."""
    run = functools.partial(function, axis_name=axis_name)
    mapped = jax.shard_map(run, mesh=mesh(), in_specs=(P(), P("tensor"), P()), out_specs=P("tensor"))
    return jax.eval_shape(mapped, floats(3, HIDDEN), floats(12, HIDDEN), ids(3))


def unchecked_gradient(function, spec):
    """The gradient of a call under shard_map(check_vma=False), with respect to what is split over the vocabulary."""
    run = functools.partial(function, axis_name="tensor", vocab=jaxlogp.VocabShards.even(12, 4))
    mapped = jax.shard_map(run, mesh=mesh(), in_specs=(spec, P()), out_specs=P(), check_vma=False)
    return jax.eval_shape(jax.grad(lambda x: jax.tree.leaves(mapped(x, ids(12)))[0].sum()), floats(12, 12))


def embedding(**changes):
    good = {"table": jnp.ones((VOCAB, HIDDEN), jnp.float32), "token_ids": jnp.zeros(TOKENS, jnp.int32)}
    return jaxlogp.embedding_lookup(**{**good, **changes})


def sharded_embedding(**changes):
    good = {"table": jnp.ones((12, HIDDEN), jnp.float32), "token_ids": jnp.zeros((4, 3), jnp.int32), "mesh": mesh()}
    return jaxlogp.sharded_embedding_lookup(**{**good, **changes})


def policy(**changes):
    good = {name: jnp.zeros(TOKENS, jnp.float32) for name in ("log_probs", "old_log_probs", "advantages")}
    return jaxlogp.policy_loss(**{**good, "mask": jnp.ones(TOKENS, bool), **changes})


def floats(*shape):
    return jnp.zeros(shape, jnp.float32)


def ids(*shape, fill=0):
    return jnp.full(shape, fill, jnp.int32)


# name: call, argument named, fragments of the message
CASES = {
    # vocabulary shards
    "even, no vocabulary": (lambda: jaxlogp.VocabShards.even(0, 1), "vocab_size", ["0"]),
    "even, more shards than ids": (lambda: jaxlogp.VocabShards.even(3, 8), "num_shards", ["3", "8"]),
    "even, fraction": (lambda: jaxlogp.VocabShards.even(10, 2.5), "num_shards", ["2.5"]),
    "ranges with a hole": (
        lambda: jaxlogp.VocabShards.from_ranges([(0, 4), (5, 9)], 9),
        "ranges",
        ["(0, 4)", "(5, 9)"],
    ),
    "range that is no pair": (lambda: jaxlogp.VocabShards.from_ranges([(0, 4, 9)], 9), "ranges", ["(0, 4, 9)"]),
    "edges in place of ranges": (lambda: jaxlogp.VocabShards.from_ranges([0, 4, 9], 9), "ranges", ["pairs", "int 0"]),
    # linear_log_probs
    "hidden of another width": (lambda: head(hidden=floats(*TOKENS, 5)), "hidden", ["4", "5"]),
    "hidden of integers": (lambda: head(hidden=ids(*TOKENS, HIDDEN)), "hidden", ["int32"]),
    "hidden with no axis": (lambda: head(hidden=floats()), "hidden", ["()"]),
    "weight of rank 1": (lambda: head(weight=floats(VOCAB)), "weight", ["(10,)"]),
    "weight of rank 3": (lambda: head(weight=floats(2, 5, HIDDEN)), "weight", ["(2, 5, 4)"]),
    "weight of integers": (lambda: head(weight=ids(VOCAB, HIDDEN)), "weight", ["int32"]),
    "weight without rows": (lambda: head(weight=floats(0, HIDDEN)), "weight", ["0"]),
    "targets of another shape": (lambda: head(targets=ids(3, 2)), "targets", ["(2, 3)", "(3, 2)"]),
    "targets of floats": (lambda: head(targets=floats(*TOKENS)), "targets", ["float32"]),
    "an active target too large": (lambda: head(targets=ids(*TOKENS).at[1, 2].set(10)), "targets", ["10", "(1, 2)"]),
    "a known target too large, with traced hidden states": (
        lambda: jax.eval_shape(lambda h: head(hidden=h, targets=np.full(TOKENS, 10)), floats(*TOKENS, HIDDEN)),
        "targets",
        ["10", "(0, 0)"],
    ),
    "an active target below 0": (lambda: head(targets=ids(*TOKENS).at[0, 1].set(-1)), "targets", ["-1", "(0, 1)"]),
    "an unmasked ignore index": (
        lambda: head(targets=ids(*TOKENS, fill=-100), mask=jnp.zeros(TOKENS, bool).at[1, 0].set(True)),
        "targets",
        ["-100", "(1, 0)"],
    ),
    "targets in a list": (lambda: head(targets=[[0] * 3] * 2), "targets", ["integer", "list"]),
    "mask in a list": (lambda: head(mask=[[True] * 3] * 2), "mask", ["bool", "list"]),
    "a fused loss, targets in a list": (
        lambda: jaxlogp.linear_policy_loss(*[*good_head().values()][:2], [[0] * 3] * 2, *[-floats(*TOKENS)] * 2),
        "targets",
        ["integer", "list"],
    ),
    "a fused loss, a text in place of a support": (
        lambda: jaxlogp.linear_policy_loss(*good_head().values(), *[-floats(*TOKENS)] * 2, support="ids"),
        "support",
        ["Support", "'ids'"],
    ),
    "mask of another shape": (lambda: head(mask=jnp.ones((2, 2), bool)), "mask", ["(2, 3)", "(2, 2)"]),
    "mask of numbers": (lambda: head(mask=floats(*TOKENS)), "mask", ["bool", "float32"]),
    "bias of another length": (lambda: head(bias=floats(9)), "bias", ["10", "9"]),
    "bias of integers": (lambda: head(bias=ids(VOCAB)), "bias", ["int32"]),
    "temperature 0": (lambda: head(temperature=0.0), "temperature", ["0"]),
    "temperature below 0": (lambda: head(temperature=-1.5), "temperature", ["-1.5"]),
    "temperature NaN": (lambda: head(temperature=float("nan")), "temperature", ["nan"]),
    "temperature infinite": (lambda: head(temperature=float("inf")), "temperature", ["inf"]),
    "temperature whose reciprocal is infinite": (lambda: head(temperature=1e-44), "temperature", ["1e-44"]),
    "temperature that is infinite in fp32": (lambda: head(temperature=1e39), "temperature", ["1e+39"]),
    "soft cap that is 0 in fp32": (lambda: head(softcap=1e-60), "softcap", ["1e-60"]),
    "logits, a subnormal temperature": (lambda: logits(temperature=1e-44), "temperature", ["1e-44"]),
    "soft cap 0": (lambda: head(softcap=0.0), "softcap", ["0"]),
    "soft cap below 0": (lambda: head(softcap=-30.0), "softcap", ["-30"]),
    "logit scale NaN": (lambda: head(logit_scale=float("nan")), "logit_scale", ["nan"]),
    "logit scale that is 0 in fp32": (lambda: head(logit_scale=1e-60), "logit_scale", ["1e-60"]),
    "logit scale that is infinite in fp32": (lambda: logits(logit_scale=-1e300), "logit_scale", ["-1e+300"]),
    "unknown out_of_vocab": (lambda: head(out_of_vocab="ignore"), "out_of_vocab", ["error", "zero", "ignore"]),
    "a flag of text": (lambda: head(frozen_head="no"), "frozen_head", ["True or False", "'no'"]),
    "a flag of numbers": (lambda: logits(with_entropy=1), "with_entropy", ["True or False", "1"]),
    "a fused loss, a flag of text": (
        lambda: jaxlogp.linear_policy_loss(*good_head().values(), *[-floats(*TOKENS)] * 2, with_lse="no"),
        "with_lse",
        ["'no'"],
    ),
    "embedding, a flag of text": (lambda: embedding(fixed_order="no"), "fixed_order", ["'no'"]),
    "a baseline that is a number": (lambda: jaxlogp.batch_advantages(floats(2, 2), baseline=0.5), "baseline", ["0.5"]),
    "packing, a flag of text": (
        lambda: jaxlogp.pack_documents([], rows=1, row_length=4, share_rows="no"),
        "share_rows",
        ["'no'"],
    ),
    "unknown engine": (lambda: head(engine="fastest"), "engine", ["chunked", "fastest"]),
    "an unknown engine that is not reached": (lambda: head(engine=["chunked", "hoper"]), "engine", ["'hoper'"]),
    "a wrong global vocabulary": (lambda: head(vocab=jaxlogp.VocabShards.even(11, 1)), "vocab", ["10", "11"]),
    "vocab that is a number": (lambda: head(vocab=10), "vocab", ["VocabShards", "10"]),
    "token_chunk 0": (lambda: jaxlogp.head.ChunkedEngine(token_chunk=0), "token_chunk", ["0"]),
    "vocab_tile below 0": (lambda: jaxlogp.head.ChunkedEngine(vocab_tile=-8), "vocab_tile", ["-8"]),
    "token_chunk a bool": (lambda: jaxlogp.head.ChunkedEngine(token_chunk=True), "token_chunk", ["True"]),
    "chunk a bool": (
        lambda: jaxlogp.check_invariance(lambda h, w, t: h[:, 0], floats(8, 4), floats(9, 4), ids(8), chunk=True),
        "chunk",
        ["True"],
    ),
    "documents_seen a bool": (lambda: jaxlogp.staleness_terms(True, ids(2)), "documents_seen", ["bool True"]),
    # the sharded head
    "a wrong global vocabulary in shard_map": (
        lambda: head_in_shard_map(3, jaxlogp.VocabShards.even(20, 4)),
        "vocab",
        ["3", "5"],
    ),
    "another number of shards than ranks": (
        lambda: head_in_shard_map(3, jaxlogp.VocabShards.even(6, 2)),
        "vocab",
        ["2", "4"],
    ),
    "an axis the mesh does not have": (lambda: sharded_head(vocab_axis="model"), "vocab_axis", ["model", "tensor"]),
    "a list of vocabulary axes": (lambda: sharded_head(vocab_axis=["tensor"]), "vocab_axis", ["['tensor']"]),
    "a list of token axes": (lambda: sharded_head(token_axes=["data"]), "token_axes", ["tuple", "['data']"]),
    "one token axis without a tuple": (lambda: sharded_head(token_axes="data"), "token_axes", ["tuple", "'data'"]),
    "no mesh": (lambda: sharded_head(mesh=None), "mesh", ["Mesh", "None"]),
    "a token axis the mesh does not have": (
        lambda: sharded_head(token_axes=("batch",)),
        "token_axes",
        ["batch", "data"],
    ),
    "vocabulary and tokens over one axis": (
        lambda: sharded_head(vocab_axis="data"),
        "token_axes",
        ["'data'", "vocab_axis"],
    ),
    "vocabulary and tokens of a loss over one axis": (
        lambda: sharded_loss(vocab_axis="data"),
        "token_axes",
        ["'data'", "vocab_axis"],
    ),
    "tokens twice over one axis": (lambda: sharded_head(token_axes=("data", "data")), "token_axes", ["'data'"]),
    "a weight axis the mesh does not have": (lambda: sharded_head(weight_axis="fsdp"), "weight_axis", ["fsdp", "data"]),
    "tokens that the mesh cannot cut": (
        lambda: sharded_head(hidden=floats(3, 3, HIDDEN), targets=ids(3, 3)),
        "hidden",
        ["2", "3"],
    ),
    "a width that the weight axis cannot cut": (
        lambda: sharded_head(hidden=floats(4, 3, 5), weight=floats(12, 5), weight_axis="data"),
        "weight",
        ["2", "(12, 5)"],
    ),
    "sharded, a wrong global vocabulary": (
        lambda: sharded_head(vocab=jaxlogp.VocabShards.even(16, 4)),
        "weight",
        ["16", "12"],
    ),
    "sharded, sequence_dim a bool": (lambda: sharded_head(sequence_dim=False), "sequence_dim", ["False"]),
    "sharded, axis_name given": (lambda: sharded_head(axis_name="tensor"), "axis_name", ["vocab_axis", "tensor"]),
    "sharded, an active target too large": (
        lambda: sharded_head(targets=ids(4, 3).at[3, 2].set(12)),
        "targets",
        ["12", "(3, 2)"],
    ),
    "axis_name forgotten": (lambda: named_axis(None), "axis_name", ["'tensor'", "weight varies"]),
    "axis_name forgotten in a loss": (lambda: named_axis(None, loss_sum), "axis_name", ["'tensor'", "weight varies"]),
    "axis_name of no mesh": (lambda: named_axis("model"), "axis_name", ["('data', 'tensor')", "'model'"]),
    "logits, axis_name of no mesh": (lambda: named_axis("model", logits_of), "axis_name", ["'model'"]),
    "logits differentiated without replication types": (
        lambda: unchecked_gradient(jaxlogp.log_probs_from_logits, P(None, "tensor")),
        "axis_name",
        ["shard_map(check_vma=True)", "'tensor'"],
    ),
    "a table differentiated without replication types": (
        lambda: unchecked_gradient(jaxlogp.embedding_lookup, P("tensor")),
        "axis_name",
        ["shard_map(check_vma=True)", "'tensor'"],
    ),
    "a sequence that data and tensor do not divide together": (
        lambda: sharded_head(sequence_dim=0),
        "hidden",
        ["a dimension 0 divisible by 8", "(4, 3, "],
    ),
    "a number of shards in place of the shards": (
        lambda: sharded_head(vocab=12),
        "vocab",
        ["a VocabShards or None", "int 12"],
    ),
    "logits that all ranks have": (
        lambda: named_axis("tensor", whole_logits_of),
        "logits",
        ["the local shard of each rank of axis 'tensor'"],
    ),
    "a table that all ranks have": (
        lambda: named_axis("tensor", whole_rows_of),
        "table",
        ["the local shard of each rank of axis 'tensor'"],
    ),
    "equality over no axis of the mesh": (lambda: named_axis("model", compared), "axis_name", ["'model'"]),
    "equality over two axes": (lambda: named_axis(("data", "tensor"), compared), "axis_name", ["('data', 'tensor')"]),
    "embedding, axis_name of no mesh": (lambda: named_axis("model", rows_of), "axis_name", ["'model'"]),
    "axis_name outside of shard_map": (lambda: head(axis_name="tensor"), "axis_name", ["shard_map", "'tensor'"]),
    "axis_name of a vmap": (
        lambda: jax.vmap(lambda w: head(weight=w, axis_name="tensor"), axis_name="tensor")(floats(2, VOCAB, HIDDEN)),
        "axis_name",
        ["shard_map", "'tensor'"],
    ),
    # log_probs_from_logits
    "logits of integers": (lambda: logits(logits=ids(*TOKENS, VOCAB)), "logits", ["int32"]),
    "logits without columns": (lambda: logits(logits=floats(*TOKENS, 0)), "logits", ["0"]),
    "logits, targets of another shape": (lambda: logits(targets=ids(6)), "targets", ["(2, 3)", "(6,)"]),
    "logits, targets of floats": (lambda: logits(targets=floats(*TOKENS)), "targets", ["float32"]),
    "logits, mask of another shape": (lambda: logits(mask=jnp.ones((3, 2), bool)), "mask", ["(2, 3)", "(3, 2)"]),
    "logits, temperature 0": (lambda: logits(temperature=0.0), "temperature", ["0"]),
    "logits, target too large": (lambda: logits(targets=ids(*TOKENS).at[1, 1].set(99)), "targets", ["99", "(1, 1)"]),
    "logits, a wrong vocabulary": (lambda: logits(vocab=jaxlogp.VocabShards.even(12, 1)), "vocab", ["10", "12"]),
    # embedding
    "token id too large": (lambda: embedding(token_ids=ids(*TOKENS).at[0, 2].set(10)), "token_ids", ["10", "(0, 2)"]),
    "token id below 0": (lambda: embedding(token_ids=ids(*TOKENS).at[1, 0].set(-100)), "token_ids", ["-100", "(1, 0)"]),
    "token ids of floats": (lambda: embedding(token_ids=floats(*TOKENS)), "token_ids", ["float32"]),
    "table of rank 1": (lambda: embedding(table=floats(VOCAB)), "table", ["(10,)"]),
    "a wrong vocabulary of the table": (
        lambda: embedding(vocab=jaxlogp.VocabShards.even(11, 1)),
        "vocab",
        ["10", "11"],
    ),
    "sharded table, unknown axis": (lambda: sharded_embedding(vocab_axis="model"), "vocab_axis", ["model", "tensor"]),
    "sharded table, vocabulary and tokens over one axis": (
        lambda: sharded_embedding(vocab_axis="data"),
        "token_axes",
        ["'data'", "vocab_axis"],
    ),
    "sharded table, id too large": (
        lambda: sharded_embedding(token_ids=ids(4, 3).at[2, 1].set(12)),
        "token_ids",
        ["12", "(2, 1)"],
    ),
    # reductions
    "sum, mask of another shape": (
        lambda: jaxlogp.masked_sum(floats(4), jnp.ones(3, bool)),
        "mask",
        ["(4,)", "(3,)"],
    ),
    "mean, mask of another shape": (
        lambda: jaxlogp.masked_mean(floats(2, 2), jnp.ones(4, bool)),
        "mask",
        ["(2, 2)", "(4,)"],
    ),
    "mean, mask of numbers": (lambda: jaxlogp.masked_mean(floats(4), floats(4)), "mask", ["bool", "float32"]),
    "count, mask of numbers": (lambda: jaxlogp.masked_count(floats(4), floats(4)), "mask", ["bool", "float32"]),
    "maximum, mask of another shape": (
        lambda: jaxlogp.masked_max(floats(4), jnp.ones(3, bool)),
        "mask",
        ["(4,)", "(3,)"],
    ),
    "weighted sum, mask of another shape": (
        lambda: jaxlogp.weighted_sum(floats(4), jnp.ones((4, 1), bool)),
        "mask",
        ["(4,)", "(4, 1)"],
    ),
    "count, mask of another shape": (
        lambda: jaxlogp.masked_count(floats(4), jnp.ones(3, bool)),
        "mask",
        ["(4,)", "(3,)"],
    ),
    "adding weighted sums of different shapes": (
        lambda: jaxlogp.WeightedSum(floats(3), ids(3)) + jaxlogp.WeightedSum(floats(), ids()),
        "other",
        ["(3,)", "()"],
    ),
    "packing what is no document": (
        lambda: jaxlogp.pack_documents([[1, 2, 3]], rows=1, row_length=4),
        "documents",
        ["Document", "list [1, 2, 3]"],
    ),
    "packing, one column's name": (
        lambda: jaxlogp.pack_documents([], rows=1, row_length=4, columns="ref_log_probs"),
        "columns",
        ["sequence", "'ref_log_probs'"],
    ),
    "packing, a padding beyond int32": (
        lambda: jaxlogp.pack_documents([], rows=1, row_length=4, pad_id=2**31),
        "pad_id",
        ["2147483648"],
    ),
    "rows that are no integer": (lambda: jaxlogp.pack_documents([], rows=1.5, row_length=4), "rows", ["1.5"]),
    "gradient sums of integers": (
        lambda: jaxlogp.StepSums.of(floats(2), jaxlogp.weighted_sum(floats(2)), gradient_dtype=jnp.int32),
        "gradient_dtype",
        ["floating", "int32"],
    ),
    "a mean in place of a sum": (lambda: jaxlogp.StepSums.of(floats(2), floats()), "loss", ["WeightedSum", "float32"]),
    "a negative gradient divisor": (
        lambda: jaxlogp.StepSums.of(floats(2), jaxlogp.weighted_sum(floats(2))).finish(-2.0),
        "grad_divisor",
        ["-2.0"],
    ),
    "a schedule of a text": (lambda: jaxlogp.DocumentSchedule("512"), "docs_per_step", ["integer", "'512'"]),
    "a turn of floats": (lambda: jaxlogp.Trajectory([1.5]), "ids", ["integers", "1.5"]),
    "a turn beyond int32": (lambda: jaxlogp.Trajectory([2**40]), "ids", ["2147483647", "1099511627776"]),
    "a drawn id that is no sequence": (lambda: jaxlogp.Trajectory([5]).add_drawn(6, -0.5), "ids", ["sequence", "6"]),
    "a log-prob that is no sequence": (
        lambda: jaxlogp.Trajectory([5]).add_drawn([6], -0.5),
        "log_probs",
        ["1 numbers", "-0.5"],
    ),
    "a column in a list": (
        lambda: jaxlogp.Document.of_completion([5], [6], columns={"ref_log_probs": [-0.5]}),
        "ref_log_probs",
        ["array", "list [-0.5]"],
    ),
    "lists in place of a document's support": (
        lambda: jaxlogp.Document.of_completion([5], [6], support=[[6]]),
        "support",
        ["Support", "list [[6]]"],
    ),
    "a turn of text": (lambda: jaxlogp.Trajectory("ab"), "ids", ["integers", "'ab'"]),
    "lengths beyond int32": (
        lambda: jaxlogp.length_weighted_advantages(floats(1, 2), np.array([[3, 2**40]])),
        "lengths",
        ["2147483647", "1099511627776"],
    ),
    "a punished length beyond int32": (
        lambda: jaxlogp.soft_overlong_punishment(np.array([2**40]), max_length=8, buffer=2),
        "lengths",
        ["2147483647", "1099511627776"],
    ),
    # policy loss
    "a name in place of a loss": (lambda: policy(loss="grpo"), "loss", ["PolicyLoss", "grpo"]),
    "a preset that was not called": (lambda: policy(loss=jaxlogp.losses.grpo), "loss", ["PolicyLoss", "function"]),
    "a fused loss that was not called": (
        lambda: jaxlogp.linear_policy_loss(*good_head().values(), *[-floats(*TOKENS)] * 2, loss=jaxlogp.losses.grpo),
        "loss",
        ["PolicyLoss", "function"],
    ),
    "a fused loss, a mean weight of text": (
        lambda: jaxlogp.linear_policy_loss(*good_head().values(), *[-floats(*TOKENS)] * 2, mean_weight="1"),
        "mean_weight",
        ["number", "'1'"],
    ),
    "an objective that was not called": (
        lambda: jaxlogp.PolicyLoss("mine", objective=jaxlogp.losses.Clipped),
        "objective",
        ["class", "Clipped"],
    ),
    "a length that is a bool": (lambda: jaxlogp.losses.dr_grpo(length=True), "length", ["integer", "True"]),
    "epsilon 0": (lambda: policy(loss=jaxlogp.losses.grpo(epsilon=0.0)), "epsilon", ["0"]),
    "advantages of another shape": (lambda: policy(advantages=floats(6)), "advantages", ["(2, 3)", "(6,)"]),
    "NaN at a label": (lambda: policy(log_probs=floats(*TOKENS).at[1, 2].set(np.nan)), "log_probs", ["nan", "(1, 2)"]),
    "GSPO without documents": (
        lambda: jaxlogp.policy_loss(*[jnp.zeros(3)] * 3, loss=jaxlogp.losses.gspo()),
        "document_ids",
        ["gspo"],
    ),
    "unknown document weighting": (
        lambda: policy(loss=jaxlogp.losses.gspo(weighting="equal")),
        "weighting",
        ["length", "document", "equal"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_named(name):
    call, argument, fragments = CASES[name]
    with pytest.raises(ValueError) as raised:
        call()
    message = str(raised.value)
    assert re.match(rf"{argument}(\[\d+\])?: expected ", message), message
    expected, separator, seen = message.partition(", got ")
    assert separator and seen, message
    missing = [fragment for fragment in fragments if fragment not in message]
    assert not missing, f"{missing} not in {message}"


@pytest.mark.parametrize("preset", jaxlogp.losses.PRESETS)
def test_options_of_losses_are_numbers(preset):
    """What is none is named, whatever is expected of the number."""
    make = functools.partial(jaxlogp.losses.PRESETS[preset], **({"length": 3} if preset == "dr_grpo" else {}))
    loss = make()
    options = {**vars(loss), **vars(loss.objective)}
    names = [name for name, value in options.items() if type(value) is float]
    assert {"kl_coefficient", "entropy_coefficient"} <= set(names)
    for name in names:
        kept = loss if hasattr(loss, name) else loss.objective
        for wrong in ("0.1", [0.1], True, float("nan"), None):
            if wrong is None and name in ("epsilon_high", "delta"):
                continue
            with pytest.raises(ValueError, match=f"^{name}: expected "):
                dataclasses.replace(kept, **{name: wrong})


def test_the_good_arguments_are_good():
    """The controls: what the cases change is all that is wrong with them."""
    assert head().log_probs.shape == logits().log_probs.shape == TOKENS
    assert jax.eval_shape(sharded_head).log_probs.shape == (4, 3)
    assert jax.eval_shape(lambda: head_in_shard_map(3, jaxlogp.VocabShards.even(12, 4))).shape == (3,)
    assert named_axis("tensor").shape == (12,)
    one_rank = jax.make_mesh((2, 1), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:2])
    assert named_axis(None, mesh=lambda: one_rank).shape == (3,)
    assert embedding().shape == (*TOKENS, HIDDEN)
    assert jax.eval_shape(sharded_embedding).shape == (4, 3, HIDDEN)
    assert int(policy().count) == 6
