"""One step from many micro-batches: the split changes nothing, and all ranks end the step together."""

import dataclasses
import functools
import re
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxlogp._reduce import WeightedSum
from jaxlogp.losses import grpo, gspo, policy_loss
from jaxlogp.policy.accumulate import CollectedStep, DocumentSchedule, StepSums
from jaxlogp.policy.documents import Document, pack_documents
from jaxlogp.policy.metrics import policy_metric_terms, reward_terms
from tests import oracle

VOCAB, ROWS, ROW_LENGTH = 6, 9, 12
LENGTHS = (7, 1, 12, 4, 9, 2, 5, 12, 3, 8, 1, 6)
PROMPTS = (2, 1, 3, 4, 1, 1, 2, 5, 0, 1, 0, 3)
KINDS = [("grpo", "length"), ("gspo", "length"), ("gspo", "document")]

# 45 labels and 14 micro-batches or ranks in another order for every cut. Σ|x| is at most 1.3 times the loss, and the
# largest entry of a gradient.
ERROR = oracle.fp32_bound(1.3, 45 + 14)


def make_documents():
    rng = np.random.default_rng(11)
    made = []
    for n, p in zip(LENGTHS, PROMPTS, strict=True):
        tokens, old = rng.integers(0, VOCAB, n), rng.normal(-1.0, 0.4, n - p).astype(np.float32)
        numbers = {name: float(np.float32(rng.normal())) for name in ("advantages", "reward")}
        made.append(Document.of_completion(tokens[:p], tokens[p:], old, **numbers))
    return made


def make_table():
    return np.random.default_rng(12).normal(0.0, 0.4, (VOCAB, VOCAB)).astype(np.float32)


def expected_loss(table, kind, weighting):
    """The loss of the whole step in float64, straight from the documents: nothing is packed, cut or padded."""
    total, labels, documents = 0.0, 0, make_documents()
    for document in documents:
        start = len(document.tokens) - int(document.labels.sum())
        pairs = np.stack([document.tokens[start - 1 : -1], document.tokens[start:]])
        if pairs.shape[1] == 0:
            continue
        new = -1.0 + table[pairs[0], pairs[1]]
        x = new - np.float64(document.sampler_log_probs)
        labels += len(x)
        weights = np.ones(len(x))
        if kind == "gspo":
            weights = np.full(1, len(x) if weighting == "length" else 1)
            x = x.mean(keepdims=True)
        r, a = np.exp(x), document.advantages
        total -= (weights * np.minimum(r * a, np.clip(r, 0.8, 1.2) * a)).sum()
    return total / (labels if kind == "grpo" else len(documents))


@functools.lru_cache
def expected_step(kind, weighting):
    """Loss, and its gradient by central differences of the float64 loss (error about 1e-9)."""
    table, step = np.float64(make_table()), 1e-5
    gradient = np.zeros_like(table)
    for i in np.ndindex(table.shape):
        shift = np.zeros_like(table)
        shift[i] = step
        up, down = (expected_loss(table + sign * shift, kind, weighting) for sign in (1, -1))
        gradient[i] = (up - down) / (2 * step)
    return expected_loss(table, kind, weighting), gradient


def micro_sums(table, batch, kind, weighting, grad_divisor=None):
    """Unreduced sums of one micro-batch of a bigram model: the log-prob of a token depends on it and the one before."""
    loss = (
        grpo(grad_divisor=grad_divisor)
        if kind == "grpo"
        else gspo(weighting=weighting, epsilon=0.2, grad_divisor=grad_divisor)
    )
    options = {"loss": loss, "document_ids": batch.document_ids, "num_documents": batch.num_documents}
    tokens = (batch.per_token["old_log_probs"], batch.per_token["advantages"], batch.mask)

    def loss_of(parameters):
        log_probs = -1.0 + parameters[batch.tokens, batch.targets]
        loss = policy_loss(log_probs, *tokens, **options)
        return loss.sum, (loss, log_probs)

    gradients, (loss, log_probs) = jax.grad(loss_of, has_aux=True)(table)
    metrics = policy_metric_terms(log_probs, *tokens, **options)
    return StepSums.of(gradients, loss, metrics | reward_terms(batch.rewards, batch.document_mask))


@functools.lru_cache
def micro_step(ranks, kind, weighting):
    """The compiled micro-batch step over `ranks` data ranks, which counts how often it is traced."""
    mesh = Mesh(np.array(jax.devices()[:ranks]), ("data",))
    traces = []

    def local(table, batch):
        traces.append(1)
        # Gradients are of the rank's own sum; the psum below is the only one that adds the ranks up.
        table = jax.lax.pcast(table, "data", to="varying")
        return micro_sums(table, jax.tree.map(lambda x: x[0], batch), kind, weighting).psum("data")

    mapped = jax.shard_map(local, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    return jax.jit(mapped), traces


def cut(pieces):
    """The documents in `pieces` micro-batches of uneven sizes; more pieces than documents leave some empty."""
    documents = make_documents()
    edges = np.linspace(0, 1, pieces + 1) ** 1.5 * len(documents)
    edges = np.round(edges).astype(int)
    batches = []
    for start, end in zip(edges[:-1], edges[1:], strict=True):
        batch, rest = pack_documents(documents[start:end], rows=ROWS, row_length=ROW_LENGTH)
        assert not rest
        batches.append(batch)
    return batches


def run_step(micro_batches, ranks, kind, weighting):
    step, _ = micro_step(ranks, kind, weighting)
    batches, sums = cut(micro_batches * ranks), []
    for index in range(micro_batches):
        of_ranks = batches[index * ranks : (index + 1) * ranks]
        sums.append(step(jnp.asarray(make_table()), jax.tree.map(lambda *x: np.stack(x), *of_ranks)))
    return sums


def assert_step(finished, kind, weighting, metrics=None):
    loss, gradient = expected_step(kind, weighting)
    assert abs(float(finished.loss) - loss) < ERROR * max(abs(loss), 0.1)
    assert np.max(np.abs(np.asarray(finished.gradients) - gradient)) < ERROR * np.max(np.abs(gradient))
    for name, value in (metrics or {}).items():
        assert abs(float(finished.metrics[name]) - float(value)) <= ERROR * max(abs(float(value)), 0.1), name


@pytest.mark.parametrize(("kind", "weighting"), KINDS)
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow), 4])
def test_the_cut_into_micro_batches_and_ranks_changes_nothing(kind, weighting, ranks):
    whole = run_step(1, 1, kind, weighting)[0].finish()
    assert_step(whole, kind, weighting)
    assert int(whole.metrics["num_documents"]) == int(whole.metrics["num_rewards"]) == len(LENGTHS)
    rewards = np.float64([document.reward for document in make_documents()])
    np.testing.assert_allclose(whole.metrics["reward_mean"], rewards.mean(), rtol=1e-5)
    for micro_batches in (1, 2, 3, 7):
        sums = run_step(micro_batches, ranks, kind, weighting)
        assert_step(sum(sums[1:], sums[0]).finish(), kind, weighting, whole.metrics)


@pytest.mark.parametrize(("kind", "weighting"), KINDS)
def test_a_mean_of_micro_batch_means_is_rejected_by_the_same_check(kind, weighting):
    means = [sums.finish() for sums in run_step(3, 2, kind, weighting)]
    gradients, loss = (sum(getattr(part, name) for part in means) / 3 for name in ("gradients", "loss"))
    wrong = dataclasses.replace(means[0], gradients=gradients, loss=loss)
    with pytest.raises(AssertionError):
        assert_step(wrong, kind, weighting)


def test_another_number_of_micro_batches_does_not_trace_again():
    _, traces = micro_step(2, "gspo", "length")
    added = []

    @jax.jit
    def add(a, b):
        added.append(1)
        return a + b

    for micro_batches in (1, 2, 3, 7, 2):
        functools.reduce(add, run_step(micro_batches, 2, "gspo", "length"))
    assert len(traces) == 1 and len(added) == 1


def test_gradients_are_kept_in_fp32_and_divided_once():
    gradients = {"a": jnp.asarray([1.0, 2.0], jnp.bfloat16), "b": jnp.float32(6.0)}
    part = StepSums.of(gradients, WeightedSum(jnp.float32(3.0), jnp.int32(2)))
    assert part.gradients["a"].dtype == jnp.float32 and part.metrics.values == {}
    # 256 + 1 is not a bf16 number: adding 256 parts of 1 in bf16 would stop growing.
    total = functools.reduce(lambda a, b: a + b, [part] * 300)
    finished = total.finish()
    assert float(total.gradients["a"][0]) == 300.0
    np.testing.assert_allclose(finished.gradients["a"], [0.5, 1.0], rtol=1e-6)  # one fp32 division
    assert float(finished.gradients["b"]) == 3.0 and float(finished.loss) == 1.5 and finished.metrics == {}


def test_sums_in_bf16_are_divided_in_fp32():
    part = StepSums.of(
        {"a": jnp.float32(512.0)}, WeightedSum(jnp.float32(3.0), jnp.int32(257)), gradient_dtype=jnp.bfloat16
    )
    assert part.gradients["a"].dtype == (part + part).gradients["a"].dtype == jnp.bfloat16
    # 257 is not a bf16 number: divided in bf16 the gradient would be 2.
    gradient = part.finish().gradients["a"]
    assert gradient.dtype == jnp.float32 and float(gradient) == np.float32(512) / np.float32(257)
    assert float((part + part).loss.sum) == 6.0 and int((part + part).loss.count) == 514


def test_grad_divisor_divides_the_gradients_alone():
    sums = []
    for batch in cut(2):
        sums.append(micro_sums(jnp.asarray(make_table()), batch, "grpo", "length", grad_divisor=10.0))
    finished = (sums[0] + sums[1]).finish()
    loss, gradient = expected_step("grpo", "length")
    labels = int(sums[0].loss.count + sums[1].loss.count)
    assert abs(float(finished.loss) - loss) < ERROR * abs(loss)
    np.testing.assert_allclose(finished.gradients, gradient * labels / 10.0, atol=ERROR * np.abs(gradient).max() * 10)


def test_a_grad_divisor_may_follow_from_the_step():
    """As gradients come out where a sum is divided by the documents of the step twice."""
    finish = jax.jit(lambda sums: sums.finish(sums.metrics.values["num_documents"] ** 2))
    for parts in (1, 3):
        sums = sum(micro_sums(jnp.asarray(make_table()), batch, "grpo", "length") for batch in cut(parts))
        loss, gradient = expected_step("grpo", "length")
        labels, documents = int(sums.loss.count), int(sums.metrics.values["num_documents"])
        assert documents > 1
        finished = finish(sums)
        assert abs(float(finished.loss) - loss) < ERROR * abs(loss)
        wanted = gradient * labels / documents**2
        np.testing.assert_allclose(finished.gradients, wanted, atol=ERROR * np.abs(wanted).max() * 10)
    np.testing.assert_array_equal(sums.finish(0).gradients, sums.gradients)


def test_a_traced_grad_divisor_below_0_gives_nan():
    """As the square of 50 000 documents is one in int32; its sign would turn the gradient around, and a step with it."""
    sums = StepSums.of(jnp.float32(6.0), WeightedSum(jnp.float32(8.0), jnp.int32(50_000)))
    finish = jax.jit(lambda divisor: sums.finish(divisor).gradients)
    assert np.isnan(finish(sums.loss.count**2)) and float(finish(jnp.int32(3))) == 2.0 and float(finish(0)) == 6.0


@pytest.mark.bad_input
def test_a_grad_divisor_of_the_step_is_one_number_and_the_only_one():
    part = micro_sums(jnp.asarray(make_table()), cut(1)[0], "grpo", "length", grad_divisor=3.0)
    with pytest.raises(ValueError, match="^grad_divisor: expected None, since the loss has one, 3.0, got "):
        part.finish(2.0)
    plain = micro_sums(jnp.asarray(make_table()), cut(1)[0], "grpo", "length")
    with pytest.raises(ValueError, match="^grad_divisor: expected one number, finite and at least 0, got "):
        plain.finish(jnp.ones(2))
    with pytest.raises(ValueError, match="^grad_divisor: expected one number, finite and at least 0, got -1.0"):
        plain.finish(-1.0)


def test_a_step_without_anything_is_zero():
    padding, _ = pack_documents([], rows=ROWS, row_length=ROW_LENGTH)
    for kind, weighting in KINDS:
        finished = micro_sums(jnp.asarray(make_table()), padding, kind, weighting).finish()
        assert float(finished.loss) == 0.0
        np.testing.assert_array_equal(finished.gradients, np.zeros((VOCAB, VOCAB)))


def varying_sums(table, batch):
    return micro_sums(jax.lax.pcast(table, "data", to="varying"), batch, "grpo", "length")


@pytest.mark.parametrize("ranks", [1, 2])
def test_zeros_are_the_first_carry_of_a_scan(ranks):
    """All advantages are below 0: a maximum that starts at 0 would stay there."""
    batches = jax.tree.map(lambda *x: np.stack(x), *cut(4))
    batches.per_token["advantages"] = -1.0 - np.abs(batches.per_token["advantages"])
    mesh = Mesh(np.array(jax.devices()[:ranks]), ("data",))

    def local(table, batches):
        first = jax.tree.map(lambda x: x[0], batches)
        zero = StepSums.zeros_like(jax.eval_shape(varying_sums, table, first))
        sums, _ = jax.lax.scan(lambda sums, batch: (sums + varying_sums(table, batch), None), zero, batches)
        return sums.psum("data")

    mapped = jax.shard_map(local, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    sums = jax.jit(mapped)(make_table(), batches)
    advantages = batches.per_token["advantages"][batches.mask]
    assert float(sums.metrics.values["max_advantage"]) == advantages.max() < -1.0
    assert float(sums.metrics.values["min_advantage"]) == advantages.min()
    assert int(sums.loss.count) == advantages.size
    parts = [
        micro_sums(make_table(), jax.tree.map(lambda x, i=i: np.asarray(x[i]), batches), "grpo", "length")
        for i in range(4)
    ]
    np.testing.assert_allclose(sums.gradients, sum(parts).gradients, atol=ERROR * np.abs(sums.gradients).max())


def test_zeros_of_sums_change_no_bit_and_keep_every_dtype():
    part = micro_sums(jnp.asarray(make_table()), cut(1)[0], "grpo", "length", grad_divisor=3.0)
    part = dataclasses.replace(part, gradients={"a": part.gradients.astype(jnp.bfloat16)})
    for whole in (StepSums.zeros_like(part) + part, sum([part])):
        assert jax.tree.structure(whole) == jax.tree.structure(part)
        for one, other in zip(jax.tree.leaves(whole), jax.tree.leaves(part), strict=True):
            assert one.dtype == other.dtype
            np.testing.assert_array_equal(one, other)


def test_finished_steps_have_no_methods_of_a_tuple():
    finished = micro_sums(jnp.asarray(make_table()), cut(1)[0], "grpo", "length").finish()
    assert not hasattr(finished, "count") and jax.tree.leaves(finished)[1] is finished.loss


@pytest.mark.bad_input
@pytest.mark.parametrize(
    "gradients, message",
    [
        ({"a": np.zeros(2, np.float32)}, "expected leaves ['b'] [3], got no other leaves"),
        (
            {"a": np.zeros(1, np.float32), "b": np.zeros(3, np.float32)},
            "expected leaves ['a'] [2], got leaves ['a'] [1]",
        ),
        (
            {"a": np.zeros(2, np.float32), "b": np.zeros(3, np.float32), "c": np.zeros(1, np.float32)},
            "expected no other leaves, got leaves ['c'] [1]",
        ),
    ],
)
def test_sums_of_another_tree_are_refused_in_a_sentence(gradients, message):
    one = WeightedSum(jnp.float32(1.0), jnp.int32(1))
    part = StepSums.of({"a": np.zeros(2, np.float32), "b": np.zeros(3, np.float32)}, one)
    with pytest.raises(ValueError, match=f"^other.gradients: {re.escape(message)}$"):
        part + StepSums.of(gradients, one)
    with pytest.raises(ValueError, match="^other: expected StepSums, got WeightedSum"):
        part + one
    with pytest.raises(TypeError, match="unsupported operand"):
        1 + part
    with pytest.raises(ValueError, match="^gradient_dtype: expected a floating-point dtype, or None, got "):
        StepSums.of({"a": np.zeros(2, np.float32)}, one, gradient_dtype=jnp.int32)


# --- the schedule ------------------------------------------------------------------------------------------


@functools.lru_cache
def batch_of(count):
    one = Document.of_completion([1], [2], [0.0], advantages=1.0)
    batch, rest = pack_documents([one] * count, rows=1, row_length=32)
    assert not rest
    return batch


PADDING = batch_of(0)


def stream(*counts):
    return iter([batch_of(count) for count in counts])


def counts_of(step: CollectedStep):
    return [tuple(int(batch.num_documents) for batch in of_ranks) for of_ranks in step.micro_batches]


def test_a_step_ends_with_the_micro_batch_that_reaches_the_target():
    schedule = DocumentSchedule(docs_per_step=8)
    local = [stream(3, 3, 3, 3, 3, 3)]
    first = schedule.collect(local, padding=PADDING)
    assert counts_of(first) == [(3,), (3,), (3,)] and first.num_documents == 9 and not first.exhausted
    exact = DocumentSchedule(docs_per_step=6).collect(local, padding=PADDING)
    assert counts_of(exact) == [(3,), (3,)] and exact.num_documents == 6 and not exact.exhausted
    assert type(exact.num_documents) is int


def test_one_stream_may_hold_the_stacked_micro_batches_of_all_ranks():
    stacked = jax.tree.map(lambda *parts: np.stack(parts), batch_of(3), batch_of(0), batch_of(2))
    step = DocumentSchedule(docs_per_step=6).collect([iter([stacked] * 3)], padding=PADDING)
    assert len(step.micro_batches) == 2 and step.num_documents == 10


def test_documents_of_all_local_ranks_count_together_and_empty_ranks_do_not_matter():
    step = DocumentSchedule(docs_per_step=7).collect([stream(2, 0, 3), stream(0, 2, 1)], padding=PADDING)
    assert counts_of(step) == [(2, 0), (0, 2), (3, 1)] and step.num_documents == 8


def test_zero_documents_per_step_means_a_fixed_number_of_micro_batches():
    local = [stream(5, 0, 1, 2, 4)]
    schedule = DocumentSchedule(micro_batches=3)
    step = schedule.collect(local, padding=PADDING)
    assert counts_of(step) == [(5,), (0,), (1,)] and step.num_documents == 6 and not step.exhausted
    last = schedule.collect(local, padding=PADDING)
    assert counts_of(last) == [(2,), (4,)] and last.num_documents == 6 and last.exhausted


def test_a_rank_that_ended_contributes_padding_until_the_others_have_ended_too():
    local = [stream(2), stream(2, 2, 2)]
    schedule = DocumentSchedule(docs_per_step=6)
    first = schedule.collect(local, padding=PADDING)
    assert counts_of(first) == [(2, 2), (0, 2)] and first.num_documents == 6 and not first.exhausted
    assert first.micro_batches[1][0] is PADDING
    partial = schedule.collect(local, padding=PADDING)
    assert counts_of(partial) == [(0, 2)] and partial.num_documents == 2 and partial.exhausted
    nothing = schedule.collect(local, padding=PADDING)
    assert nothing.micro_batches == () and nothing.num_documents == 0 and nothing.exhausted


def test_the_end_of_the_data_behind_a_full_step_shows_in_the_next_one():
    local = [stream(4)]
    schedule = DocumentSchedule(docs_per_step=4)
    assert not schedule.collect(local, padding=PADDING).exhausted
    nothing = schedule.collect(local, padding=PADDING)
    assert nothing.exhausted and nothing.micro_batches == ()


def test_nothing_but_empty_micro_batches_at_the_end_is_no_step():
    step = DocumentSchedule(docs_per_step=4).collect([stream(0, 0)], padding=PADDING)
    assert step.exhausted and step.micro_batches == () and step.num_documents == 0


def test_too_many_empty_micro_batches_in_a_row_are_an_error():
    schedule = DocumentSchedule(docs_per_step=4, max_empty_micro_batches=2)
    step = schedule.collect([stream(0, 0, 1, 0, 0, 3)], padding=PADDING)
    assert counts_of(step) == [(0,), (0,), (1,), (0,), (0,), (3,)], "two in a row are allowed, and again"
    with pytest.raises(ValueError, match="^streams: expected a document within 2 .*, got 3 micro-batches without one"):
        schedule.collect([stream(1, 0, 0, 0, 3)], padding=PADDING)

    def endless():
        while True:
            yield batch_of(0)

    with pytest.raises(ValueError, match="got 3 micro-batches without one after 0 documents"):
        schedule.collect([endless(), stream()], padding=PADDING)


def test_the_wait_for_the_data_is_measured():
    def slow():
        yield batch_of(1)
        threading.Event().wait(0.05)
        yield batch_of(1)
        yield batch_of(1)

    local = [slow()]
    quick = DocumentSchedule(docs_per_step=1).collect(local, padding=PADDING).data_wait_seconds
    # That of every micro-batch, not that of the last one alone.
    waited = DocumentSchedule(docs_per_step=2).collect(local, padding=PADDING).data_wait_seconds
    assert 0.0 <= quick < 0.04 < waited < 5.0

    def slow_sum(values):
        threading.Event().wait(0.05)
        return values

    # The wait for other processes is none for the data.
    step = DocumentSchedule(docs_per_step=1).collect([stream(1)], padding=PADDING, all_reduce=slow_sum)
    assert 0.0 <= step.data_wait_seconds < 0.04


class Processes:
    """Threads that stand for processes, with a sum over all of them that fails instead of hanging."""

    def __init__(self, count):
        self.count, self.values = count, {}
        self.barrier = threading.Barrier(count, timeout=20)

    def all_reduce(self, rank, values):
        assert values.dtype == np.int64 and values.ndim == 1
        self.values[rank] = values.copy()
        self.barrier.wait()
        total = sum(self.values.values())
        self.barrier.wait()
        return total

    def run(self, function):
        results = [None] * self.count

        def work(rank):
            try:
                results[rank] = function(rank, functools.partial(self.all_reduce, rank))
            except Exception as error:
                results[rank] = error

        threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(self.count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=30)
            assert not thread.is_alive()
        return results


def test_every_process_stops_after_the_same_micro_batch():
    data = [[(3, 1), (1,)], [(1, 1, 1, 1), ()], [(), (2, 0, 0, 5)]]  # [process][local rank]

    def one_process(rank, all_reduce):
        local = [stream(*counts) for counts in data[rank]]
        schedule = DocumentSchedule(docs_per_step=7)
        return [schedule.collect(local, padding=PADDING, all_reduce=all_reduce) for _ in range(4)]

    steps = Processes(3).run(one_process)
    # Rounds sum to 7, 2, 1 and 6 documents over all processes.
    for process in steps:
        assert [step.num_documents for step in process] == [7, 9, 0, 0]
        assert [len(step.micro_batches) for step in process] == [1, 3, 0, 0]
        assert [step.exhausted for step in process] == [False, False, True, True]
    assert counts_of(steps[2][1]) == [(0, 0), (0, 0), (0, 5)]


def test_a_stream_that_raises_ends_the_step_on_every_process():
    def broken():
        yield batch_of(1)
        raise OSError("disk gone")

    def one_process(rank, all_reduce):
        local = [broken() if rank == 1 else stream(1, 1, 1, 1)]
        return DocumentSchedule(docs_per_step=100).collect(local, padding=PADDING, all_reduce=all_reduce)

    other, broken_one = Processes(2).run(one_process)
    assert isinstance(broken_one, OSError) and "disk gone" in str(broken_one)
    assert isinstance(other, RuntimeError) and "1 other process" in str(other)


BAD = {
    "docs_per_step": lambda: DocumentSchedule(docs_per_step=-1),
    "micro_batches": lambda: DocumentSchedule(micro_batches=0),
    "max_empty_micro_batches": lambda: DocumentSchedule(max_empty_micro_batches=-1),
    "streams": lambda: DocumentSchedule().collect([], padding=PADDING),
    "padding": lambda: DocumentSchedule().collect([stream(1)], padding=batch_of(1)),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.bad_input
def test_bad_input_names_the_argument(name):
    with pytest.raises(ValueError, match=f"^{name}: expected .*, got "):
        BAD[name]()
