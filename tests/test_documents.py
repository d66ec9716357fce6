"""Packing: the contents of every position, the documents returned, and no leaks between documents."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlogp import Support, linear_policy_loss, losses
from jaxlogp.policy.documents import Document, MicroBatch, Trajectory, pack_documents


def document(length, prompt_length=1, seed=0, **changes):
    rng = np.random.default_rng([seed, length])
    tokens = rng.integers(1, 100, length)
    log_probs = -rng.exponential(2.0, max(length - prompt_length, 0)).astype(np.float32)
    fields = {"advantages": float(rng.normal()), "reward": float(rng.normal()), "versions": int(rng.integers(1000))}
    return Document.of_completion(tokens[:prompt_length], tokens[prompt_length:], log_probs, **{**fields, **changes})


def documents(lengths, prompts):
    return [document(n, p, seed=i) for i, (n, p) in enumerate(zip(lengths, prompts, strict=True))]


def test_every_field_of_a_small_pack():
    lse = [{"lse": np.float32(values)} for values in ([3, 4], [5], [6, 7])]
    first = Document.of_completion(
        [5, 6], [7, 8], np.float32([-0.5, -0.25]), advantages=1.5, reward=1.0, versions=40, columns=lse[0]
    )
    second = Document.of_completion([9], [10], np.float32([-0.125]), advantages=-1.0, versions=41, columns=lse[1])
    third = Document.of_completion(
        [11], [12, 13], np.float32([-1.0, -2.0]), advantages=0.5, reward=0.5, versions=42, columns=lse[2]
    )
    batch, rest = pack_documents([first, second, third], rows=3, row_length=7, pad_id=99, columns=("lse",))
    assert rest == ()
    expected = {
        "tokens": [[5, 6, 7, 8, 9, 10, 99], [11, 12, 13, 99, 99, 99, 99], [99] * 7],
        "targets": [[6, 7, 8, 0, 10, 0, 0], [12, 13, 0, 0, 0, 0, 0], [0] * 7],
        "positions": [[0, 1, 2, 3, 0, 1, 0], [0, 1, 2, 0, 0, 0, 0], [0] * 7],
        "document_ids": [[0, 0, 0, 0, 1, 1, 1], [2] * 7, [2] * 7],
        "segment_ids": [[0, 0, 0, 0, 1, 1, -1], [2, 2, 2, -1, -1, -1, -1], [-1] * 7],
        "mask": [[0, 1, 1, 0, 1, 0, 0], [1, 1, 0, 0, 0, 0, 0], [0] * 7],
        "versions": [[0, 40, 40, 0, 41, 0, 0], [42, 42, 0, 0, 0, 0, 0], [0] * 7],
        "rewards": [1.0, 0.0, 0.5] + [0.0] * 18,
        "model_versions": [40, 41, 42] + [0] * 18,
        "num_documents": 3,
        "support": None,
    }
    per_token = {
        "old_log_probs": [[0, -0.5, -0.25, 0, -0.125, 0, 0], [-1, -2, 0, 0, 0, 0, 0], [0] * 7],
        "advantages": [[0, 1.5, 1.5, 0, -1, 0, 0], [0.5, 0.5, 0, 0, 0, 0, 0], [0] * 7],
        "lse": [[0, 3, 4, 0, 5, 0, 0], [6, 7, 0, 0, 0, 0, 0], [0] * 7],
    }
    assert {*expected, "per_token"} == {field.name for field in dataclasses.fields(MicroBatch)}
    assert batch.per_token.keys() == per_token.keys()
    for name, values in per_token.items():
        np.testing.assert_array_equal(batch.per_token[name], values, err_msg=name)
    for name, values in expected.items():
        np.testing.assert_array_equal(getattr(batch, name), values, err_msg=name)
    np.testing.assert_array_equal(batch.document_mask, [True] * 3 + [False] * 18)


def test_the_document_mask_of_stacked_micro_batches_is_that_of_each():
    packs = [pack_documents(documents([3] * n, [1] * n), rows=2, row_length=6)[0] for n in (1, 3)]
    stacked = jax.tree.map(lambda *parts: np.stack(parts), *packs)
    assert stacked.document_mask.shape == stacked.rewards.shape
    np.testing.assert_array_equal(stacked.document_mask, [pack.document_mask for pack in packs])


def conversation():
    """Three turns of the policy with context between them, and an advantage, a version and a column of every label."""
    game = Trajectory([3, 4])
    for ids, context in (([5, 6], [7]), ([8], [9, 10, 11]), ([12, 13, 14], [])):
        game.add_drawn(ids, [-0.1 * token for token in ids])
        game.add_context(context)
    rest = {"advantages": np.float32([1, 1, -2, 3, 3, 3]), "versions": np.array([20, 20, 21, 22, 22, 22])}
    return game.document(**rest, reward=0.5, columns={"lse": np.arange(6, dtype=np.float32)})


def test_every_field_of_a_document_of_several_turns():
    document = conversation()
    assert document.tokens.tolist() == list(range(3, 15))
    assert document.labels.astype(int).tolist() == [0, 0, 1, 1, 0, 1, 0, 0, 0, 1, 1, 1]
    batch, _ = pack_documents([document], rows=1, row_length=13, columns=("lse", "sampler_log_probs"))
    assert batch.mask[0].astype(int).tolist() == [0, 1, 1, 0, 1, 0, 0, 0, 1, 1, 1, 0, 0]
    assert batch.targets[batch.mask].tolist() == [5, 6, 8, 12, 13, 14]
    old = np.float32([-0.5, -0.6, -0.8, -1.2, -1.3, -1.4])
    expected = {
        "old_log_probs": old,
        "sampler_log_probs": old,
        "lse": np.arange(6.0),
        "advantages": [1, 1, -2, 3, 3, 3],
    }
    assert batch.per_token.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(batch.per_token[name][batch.mask], values, rtol=1e-6)
        assert not batch.per_token[name][~batch.mask].any()
    assert batch.versions[batch.mask].tolist() == [20, 20, 21, 22, 22, 22] and not batch.versions[~batch.mask].any()
    assert batch.model_versions[0] == 20, "a document is as old as its oldest label"


def test_old_log_probs_stand_before_those_of_the_sampler():
    document = Document.of_completion([1], [2, 3], [-0.5, -0.25], old_log_probs=np.float32([-0.125, -1.0]))
    batch, _ = pack_documents([document], rows=1, row_length=3, columns=("sampler_log_probs",))
    np.testing.assert_array_equal(batch.per_token["old_log_probs"], [[-0.125, -1.0, 0]])
    np.testing.assert_array_equal(batch.per_token["sampler_log_probs"], [[-0.5, -0.25, 0]])


def test_a_ratio_of_a_supervised_document_is_nan():
    """It has no log-probs to take ratios to; a cross-entropy does not read them."""
    batch, _ = pack_documents([Document.of_completion([1], [2, 3])], rows=1, row_length=4)
    np.testing.assert_array_equal(batch.per_token["old_log_probs"], [[np.nan, np.nan, 0, 0]])


@pytest.mark.parametrize("preset", ["grpo", "reinforce"])
def test_turns_of_one_document_are_the_same_labels_as_documents_of_their_own(preset):
    """With the same context: each turn's labels alone, behind everything that stood before them."""
    whole = dataclasses.replace(conversation(), columns={})
    turns, first = [], 0
    for labels in ([2, 3], [5], [9, 10, 11]):
        here = slice(first, first + len(labels))
        first += len(labels)
        fields = {"advantages": whole.advantages[here], "sampler_log_probs": whole.sampler_log_probs[here]}
        length = labels[-1] + 1
        turns.append(Document(whole.tokens[:length], np.isin(np.arange(length), labels), **fields))
    table = jax.random.normal(jax.random.key(0), (16, 8))

    def loss(table, documents):
        batch, rest = pack_documents(documents, rows=4, row_length=12, share_rows=False)
        assert not rest
        # Every position sees all tokens of its row so far, so that the context matters.
        counts = np.arange(1, 13, dtype=np.float32)[:, None]
        real = (batch.segment_ids >= 0).astype(np.float32)[..., None]
        hidden = jnp.cumsum(table[batch.tokens] * real, axis=1) / counts[None]
        inputs = batch.per_token["old_log_probs"], batch.per_token["advantages"], batch.mask
        chosen = getattr(losses, preset)()
        return linear_policy_loss(hidden, table, batch.targets, *inputs, loss=chosen)[0].mean()

    one, apart = (jax.value_and_grad(loss)(table, documents) for documents in ([whole], turns))
    # Sums of at most 12 tokens in another order.
    np.testing.assert_allclose(one[0], apart[0], rtol=1e-5)
    np.testing.assert_allclose(one[1], apart[1], rtol=1e-4, atol=1e-6)
    assert abs(float(one[0])) > 0.01


LENGTHS, PROMPTS = (5, 1, 4, 6, 2, 1, 3, 6, 2, 5), (2, 1, 4, 0, 1, 0, 1, 3, 1, 2)


def test_packing_in_turns_keeps_every_document_whole_and_in_order():
    waiting, seen = documents(LENGTHS, PROMPTS), []
    originals = list(waiting)
    while waiting:
        batch, rest = pack_documents(waiting, rows=2, row_length=8)
        assert len(rest) < len(waiting), "every turn must pack something"
        for index in range(int(batch.num_documents)):
            rows, columns = np.nonzero(batch.segment_ids == index)
            assert len(set(rows)) == 1 and (np.diff(columns) == 1).all(), "a document is one run within one row"
            seen.append(batch.tokens[rows, columns])
        waiting = rest
    assert len(seen) == len(originals)
    for tokens, original in zip(seen, originals, strict=True):
        np.testing.assert_array_equal(tokens, original.tokens)


def test_labels_are_the_completion_tokens_and_carry_their_own_log_probs():
    originals = documents(LENGTHS, PROMPTS)
    batch, rest = pack_documents(originals, rows=6, row_length=8)
    assert not rest
    for index, original in enumerate(originals):
        here = batch.mask & (batch.segment_ids == index)
        # A document without a prompt loses its first token as a label: nothing predicts it.
        start = max(PROMPTS[index], 1)
        np.testing.assert_array_equal(batch.targets[here], original.tokens[start:])
        np.testing.assert_array_equal(batch.per_token["old_log_probs"][here], original.sampler_log_probs)
        assert original.sampler_log_probs.size == max(LENGTHS[index] - start, 0)
        assert (batch.per_token["advantages"][here] == np.float32(original.advantages)).all()
        if original.tokens.size == 1:
            assert not here.any()


def test_every_label_is_the_next_token_of_its_own_document():
    originals = documents(LENGTHS, PROMPTS)
    batch, _ = pack_documents(originals, rows=6, row_length=8)
    for index, original in enumerate(originals):
        here = batch.segment_ids == index
        np.testing.assert_array_equal(batch.targets[here], np.append(original.tokens[1:], 0))
        assert not batch.mask[tuple(np.argwhere(here)[-1])], "the last token has no target"
    assert not batch.targets[batch.segment_ids < 0].any() and not batch.mask[batch.segment_ids < 0].any()


def test_nothing_but_padding_is_a_legal_micro_batch():
    batch, rest = pack_documents([], rows=2, row_length=4, pad_id=7)
    full, _ = pack_documents([document(4)], rows=2, row_length=4, pad_id=7)
    assert rest == () and int(batch.num_documents) == 0
    assert not batch.mask.any() and (batch.tokens == 7).all() and (batch.segment_ids == -1).all()
    assert (batch.document_ids == 0).all(), "clamped: 0 stays usable as an index"
    assert not np.asarray(batch.document_mask).any()
    shapes = [[(x.shape, x.dtype) for x in jax.tree.leaves(b)] for b in (batch, full)]
    assert jax.tree.leaves(shapes[0]) == jax.tree.leaves(shapes[1]), "one compiled step serves both"


def test_a_document_as_long_as_a_row_fits_and_a_longer_one_is_an_error():
    batch, rest = pack_documents([document(4), document(4)], rows=2, row_length=4)
    assert not rest and int(batch.num_documents) == 2
    with pytest.raises(ValueError, match="^documents: expected at most 4 tokens each, got 5 in document 1"):
        pack_documents([document(4), document(5)], rows=2, row_length=4)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"lse": np.zeros(3, np.float32)}, "lse: expected shape"),
        ({"lse": np.zeros(2, np.int32)}, "lse: expected a floating dtype"),
        ({"lse": np.float32([0, np.nan])}, "lse: expected finite values"),
        ({"advantages": np.zeros(2, np.float32)}, "columns: expected names other than"),
        ({"sampler_log_probs": np.zeros(2, np.float32)}, "columns: expected names other than"),
    ],
)
def test_a_further_column_is_checked_like_the_first(columns, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        Document.of_completion([3], [4, 5], np.zeros(2, np.float32), columns=columns)


@pytest.mark.bad_input
def test_documents_of_one_micro_batch_have_the_same_columns():
    with pytest.raises(ValueError, match="^columns: expected .* of document 1, got"):
        pack_documents([document(4), document(4, columns={"lse": np.zeros(3, np.float32)})], rows=2, row_length=4)


def test_a_micro_batch_passes_through_jit():
    batch, _ = pack_documents([document(4), document(3)], rows=2, row_length=4)
    same = jax.jit(lambda b: jax.tree.map(lambda x: x, b))(batch)
    assert isinstance(same, MicroBatch)
    for a, b in zip(jax.tree.leaves(batch), jax.tree.leaves(same), strict=True):
        np.testing.assert_array_equal(a, b)
        assert a.dtype == b.dtype


def recorded(completion, others=(8, 9), prompt=(1,)):
    """A document whose first label was drawn from itself alone, and the others from two ids more."""
    kept = [[token, *others] if number else [token] for number, token in enumerate(completion)]
    log_probs = [-0.5] * len(completion)
    return Document.of_completion(prompt, completion, log_probs, support=Support.from_lists(kept))


def test_supports_are_packed_at_the_positions_that_predict():
    documents = [recorded([2, 3]), recorded([4, 5, 6]), recorded([7])]
    batch, rest = pack_documents(documents, rows=2, row_length=6, support_capacity=13)
    assert not rest and batch.support.counts.tolist() == [[1, 3, 0, 0, 0, 0], [1, 3, 3, 0, 1, 0]]
    assert batch.support.ids.tolist() == [2, 3, 8, 9, 4, 5, 8, 9, 6, 8, 9, 7, -1]
    # The second one has no room for its ids, and the order is kept.
    batch, rest = pack_documents(documents, rows=2, row_length=6, support_capacity=8)
    assert rest == tuple(documents[1:]) and batch.num_documents == 1
    assert batch.support.counts.sum() == 4 and batch.support.ids.tolist() == [2, 3, 8, 9, -1, -1, -1, -1]
    batch, rest = pack_documents(documents[:2], rows=1, row_length=7, support_capacity=11)
    assert not rest and batch.support.ids[-1] == 9
    batch, rest = pack_documents(documents[:1], rows=1, row_length=6, support_capacity=4)
    assert not rest and batch.support.ids.tolist() == [2, 3, 8, 9]
    empty, _ = pack_documents([], rows=1, row_length=4, support_capacity=2)
    assert empty.support.ids.tolist() == [-1, -1] and not empty.support.counts.any()


def test_a_trajectory_carries_the_supports_of_its_turns():
    game = Trajectory([1])
    game.add_drawn([2], [-0.5], Support.from_lists([[2, 8]]))
    game.add_context([4])
    game.add_drawn([3, 5], [0.0, -0.1], Support.from_lists([[3], [9, 5]], capacity=7))
    support = game.document().support
    assert support.ids.tolist() == [2, 8, 3, 9, 5] and support.counts.tolist() == [2, 1, 2]
    # The first token of a document without a prompt is no label.
    assert recorded([4, 5], prompt=()).support.ids.tolist() == [5, 8, 9]


def half_recorded():
    game = Trajectory([1])
    game.add_drawn([2], [-0.5])
    game.add_drawn([3], [-0.5], Support.from_lists([[3]]))


DOCUMENT = {
    "tokens": np.array([1, 2, 3]),
    "labels": np.array([False, True, True]),
    "sampler_log_probs": np.zeros(2),
}
SUPPORT = Support.from_lists([[2, 7], [3]])
BAD_DOCUMENTS = {
    "tokens": {"tokens": np.zeros(0, np.int32)},
    "tokens ": {"tokens": np.zeros((1, 3), np.int32)},
    "tokens  ": {"tokens": np.zeros(3)},
    "tokens   ": {"tokens": np.array([1, -2, 3])},
    "tokens    ": {"tokens": np.array([1, 2**31, 3])},
    "tokens     ": {"tokens": np.array([1, -2, 3], np.int8)},
    "tokens      ": {"tokens": np.array([1, 2**31, 3], np.uint32)},
    "labels": {"labels": np.ones(4, bool)},
    "labels ": {"labels": np.array([0, 1, 1])},
    "labels  ": {"labels": np.array([True, True, False])},
    "sampler_log_probs": {"sampler_log_probs": np.zeros(3)},
    "sampler_log_probs ": {"sampler_log_probs": np.array([0.0, np.nan])},
    "sampler_log_probs  ": {"sampler_log_probs": np.zeros(2, np.int32)},
    "sampler_log_probs   ": {"sampler_log_probs": np.array([0.0, 0.1])},
    "old_log_probs": {"old_log_probs": np.zeros(1)},
    "advantages": {"advantages": float("inf")},
    "advantages ": {"advantages": np.zeros(3)},
    "advantages  ": {"advantages": np.array([0.0, np.inf])},
    "reward": {"reward": float("nan")},
    "versions": {"versions": -1},
    "versions ": {"versions": 2**31},
    "versions  ": {"versions": np.array([1, 2, 3])},
    "versions   ": {"versions": 1.5},
    "support.counts": {"support": Support.from_lists([[2, 3]])},
    "support.counts ": {"support": Support.from_lists([[2], []])},
    "support.ids": {"support": Support.from_lists([[2], [3]], capacity=3)},
    "support.ids ": {"support": Support.from_lists([[2], [4, 5]])},
    "support.ids  ": {"support": Support(np.array([2, 3, 3]), np.array([1, 2]))},
    "support.ids   ": {"support": Support(np.array([2, -1, 3]), np.array([2, 1]))},
}


def test_a_sound_document_costs_no_message(monkeypatch):
    """A step makes and packs hundreds: what a refusal would say is worked out only for a refusal."""

    def called(*args):
        raise AssertionError(args)

    monkeypatch.setattr("jaxlogp.policy.documents.describe", called)
    documents = [Document(**DOCUMENT)] * 2
    assert len(pack_documents(documents, rows=1, row_length=8)[1]) == 0
    monkeypatch.setattr("jaxlogp.policy.documents.require", called)
    Document(**DOCUMENT, support=SUPPORT)
    for dtype in (np.int8, np.uint8, np.int32, np.uint32, np.int64):
        Document(**{**DOCUMENT, "tokens": np.array([1, 2, 3], dtype)})


@pytest.mark.parametrize("name", BAD_DOCUMENTS)
@pytest.mark.bad_input
def test_a_bad_document_names_the_field(name):
    Document(**DOCUMENT)
    with pytest.raises(ValueError, match=f"^{name.strip()}: expected .*, got "):
        Document(**{**DOCUMENT, **BAD_DOCUMENTS[name]})


BAD_CALLS = {
    "log_probs": lambda: Document.of_completion([1], [2, 3], [-0.5]),
    "log_probs ": lambda: Trajectory([1]).add_drawn([2, 3], [-0.5]),
    "ids": lambda: Trajectory().add_drawn([2], [-0.5]),
    "ids ": lambda: Trajectory([1]).add_context([2, -100]),
    "ids  ": lambda: Trajectory([1, 2**31]),
    "support": lambda: half_recorded(),
    "support.counts": lambda: Document.of_completion([1], [2, 3], support=Support.from_lists([[3]])),
    "rows": lambda: pack_documents([], rows=0, row_length=4),
    "row_length": lambda: pack_documents([], rows=1, row_length=0),
    "pad_id": lambda: pack_documents([], rows=1, row_length=4, pad_id=-1),
    "pad_id ": lambda: pack_documents([], rows=1, row_length=4, pad_id=2**31),
    "columns": lambda: pack_documents([document(4)], rows=1, row_length=4, columns=("lse",)),
    "support_capacity": lambda: pack_documents([], rows=1, row_length=4, support_capacity=0),
    "documents": lambda: pack_documents([recorded([2, 3])], rows=1, row_length=4),
    "documents ": lambda: pack_documents([document(3)], rows=1, row_length=4, support_capacity=9),
    "documents  ": lambda: pack_documents([recorded([2, 3])], rows=1, row_length=4, support_capacity=2),
}


@pytest.mark.parametrize("name", BAD_CALLS)
@pytest.mark.bad_input
def test_bad_input_names_the_argument(name):
    with pytest.raises(ValueError, match=f"^{name.strip()}: expected .*, got "):
        BAD_CALLS[name]()
