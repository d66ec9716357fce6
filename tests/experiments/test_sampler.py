"""The sampler: its log-probs are the trainer's, its draws follow them, and a row does not depend on its batch."""

import functools
import math
import re
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments.models.compiled_program import LIBRARY_ALONE
from experiments.models.decoder import Decoder
from experiments.models.decoder_config import DecoderConfig
from experiments.models.mesh import MeshSpec, make_mesh, split_rows
from experiments.models.sharding import parameter_shardings
from experiments.models.tokenizer import CharTokenizer
from experiments.sampling import decoder_sampler
from experiments.sampling import sample_token as sample_token_module
from experiments.sampling.decoder_sampler import DecoderSampler
from experiments.sampling.options import SamplingOptions
from experiments.sampling.policy import SamplerPolicy, Samplers
from experiments.sampling.recompute import RecomputeSampler
from experiments.sampling.sample_token import BLOCK
from experiments.sampling.sampler import SampledModel
from jaxlogp import linear_log_probs
from tests.experiments.samples import rule, sample

VOCAB, PAD, EOS = 8, 0, 1
CONFIG = DecoderConfig.qwen3(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8
)
ROWS, WIDTH, NEW = 6, 5, 7
ENDS = {"eos_ids": (EOS,), "pad_id": PAD}
RULE = rule(NEW, **ENDS)
# Products of other numbers of rows may be summed in another order. A log-prob of size up to 8 is z - log Σ e^z; the products
# behind it have two layers of 32 + 32 + 64 terms and 32 in the head, each rounded to 2^-24 of the sum, in both programs.
ROUNDING = 2 * (2 * (32 + 32 + 64) + 32) * 2.0**-24 * 8


@functools.cache
def decoder():
    return Decoder(CONFIG, rngs=nnx.Rngs(3))


def on_mesh(mesh, config=CONFIG):
    graph, state = nnx.split(Decoder(config, rngs=nnx.Rngs(3), mesh=mesh))
    return nnx.merge(graph, jax.device_put(state, parameter_shardings(state, mesh)))


def prompts(seed=0):
    drawn = np.random.default_rng(seed)
    lengths = np.array([5, 1, 3, 5, 2, 4], np.int32)
    ids = drawn.integers(2, VOCAB, (ROWS, WIDTH)).astype(np.int32)
    return np.where(np.arange(WIDTH) < lengths[:, None], ids, PAD).astype(np.int32), lengths


@functools.partial(jax.jit, static_argnames="temperature")
def trainer_log_probs(state, row, positions, document_ids, temperature=1.0):
    """Log-prob of every token but the first of one packed row, by the path that the trainer takes."""
    model = nnx.merge(nnx.split(decoder())[0], state)
    hidden = model.hidden_states(row[None], positions[None], document_ids[None])[0]
    return linear_log_probs(hidden[:-1], model.head()[1], row[1:], temperature=temperature).log_probs


@jax.jit
def logits_of(state, row):
    """Of every token of one document, by the path that the trainer takes."""
    model = nnx.merge(nnx.split(decoder())[0], state)
    hidden = model.hidden_states(row[None], jnp.arange(len(row))[None], jnp.zeros_like(row)[None])[0]
    return hidden @ model.head()[1].T


def packed(prompt_ids, lengths, samples):
    """All rows as documents of one packed row; also, for each, where its completion starts."""
    documents = [
        np.concatenate([prompt_ids[i, : lengths[i]], samples.tokens[i, : samples.lengths[i]]]) for i in range(ROWS)
    ]
    starts = np.cumsum([0] + [len(document) for document in documents[:-1]]) + lengths
    size = ROWS * (WIDTH + NEW)
    row, positions, document_ids = (np.full(size, fill, np.int32) for fill in (PAD, 0, -1))
    total = sum(len(document) for document in documents)
    row[:total] = np.concatenate(documents)
    positions[:total] = np.concatenate([np.arange(len(document)) for document in documents])
    document_ids[:total] = np.repeat(np.arange(ROWS), [len(document) for document in documents])
    return row, positions, document_ids, starts


@pytest.mark.parametrize(
    ("temperature", "greedy"),
    [(0.7, False), *(pytest.param(*each, marks=pytest.mark.costly) for each in ((1.0, False), (0.7, True)))],
)
def test_log_probs_are_those_of_the_packed_trainer_forward(temperature, greedy):
    ids, lengths = prompts()
    how = rule(NEW, **ENDS, temperature=temperature, greedy=greedy)
    samples = sample(decoder(), ids, lengths, jax.random.key(1), how)
    row, positions, document_ids, starts = packed(ids, lengths, samples)
    wanted = np.asarray(trainer_log_probs(nnx.state(decoder()), row, positions, document_ids, temperature))
    assert samples.log_probs.dtype == np.float32
    for i, start in enumerate(starts):
        count = samples.lengths[i]
        # Two fp32 forwards of the same tokens: rounding of logits of size up to about 10.
        np.testing.assert_allclose(samples.log_probs[i, :count], wanted[start - 1 : start - 1 + count], atol=2e-5)


def test_a_completion_ends_with_its_eos_and_padding_of_log_prob_zero_follows():
    ids, lengths = prompts()
    short = long = 0
    for seed in range(8):
        samples = sample(decoder(), ids, lengths, jax.random.key(seed), RULE)
        for tokens, log_probs, length in zip(*samples[:3], strict=True):
            assert EOS not in tokens[: length - 1]
            assert tokens[length - 1] == EOS or length == NEW
            assert (tokens[length:] == PAD).all() and (log_probs[length:] == 0.0).all()
            assert (log_probs[:length] < 0.0).all()
            short, long = short + (length < NEW), long + (length == NEW)
    assert short > 5 and long > 5


def test_one_new_token():
    ids, lengths = prompts()
    one = sample(decoder(), ids, lengths, jax.random.key(1), rule(1, **ENDS))
    many = sample(decoder(), ids, lengths, jax.random.key(1), RULE)
    np.testing.assert_array_equal(one.tokens[:, 0], many.tokens[:, 0])
    np.testing.assert_array_equal(one.lengths, np.ones(ROWS))


def test_greedy_takes_the_likeliest_token_whatever_the_key():
    ids, lengths = prompts()
    greedy = rule(NEW, **ENDS, greedy=True)
    samples = sample(decoder(), ids, lengths, jax.random.key(1), greedy)
    other = sample(decoder(), ids, lengths, jax.random.key(2), greedy)
    jax.tree.map(np.testing.assert_array_equal, samples, other)
    row = np.concatenate([ids[2, : lengths[2]], samples.tokens[2, : samples.lengths[2]]])
    likeliest = logits_of(nnx.state(decoder()), row).argmax(axis=-1)
    np.testing.assert_array_equal(row[lengths[2] :], likeliest[lengths[2] - 1 : -1])


@pytest.mark.costly
def test_the_last_copy_of_a_prompt_may_be_greedy_beside_draws():
    inputs = (decoder(), *prompts(), jax.random.key(1))
    both, drawn = (sample(*inputs, rule(NEW, **ENDS, greedy_last=last), copies=3) for last in (True, False))
    greedy = sample(*inputs, rule(NEW, **ENDS, greedy=True))
    assert (both.tokens[2::3] != drawn.tokens[2::3]).any()
    np.testing.assert_array_equal(both.tokens[2::3], greedy.tokens)
    for copy in range(2):
        np.testing.assert_array_equal(both.tokens[copy::3], drawn.tokens[copy::3])


def test_a_row_is_the_same_in_any_batch_and_with_any_padding():
    ids, lengths = prompts()
    whole = sample(decoder(), ids, lengths, jax.random.key(5), RULE)
    part = sample(decoder(), ids[:2], lengths[:2], jax.random.key(5), RULE)
    np.testing.assert_array_equal(part.tokens, whole.tokens[:2])
    np.testing.assert_allclose(part.log_probs, whole.log_probs[:2], atol=ROUNDING)
    repadded = np.where(np.arange(WIDTH) < lengths[:, None], ids, 6).astype(np.int32)
    jax.tree.map(np.testing.assert_array_equal, sample(decoder(), repadded, lengths, jax.random.key(5), RULE), whole)
    others = prompts(seed=9)[0]
    others[4] = ids[4]
    changed = sample(decoder(), others, lengths, jax.random.key(5), RULE)
    np.testing.assert_array_equal(changed.tokens[4], whole.tokens[4])
    assert (changed.tokens != whole.tokens).any()


def test_rows_and_keys_draw_differently():
    ids, lengths = (np.repeat(array[:1], ROWS, axis=0) for array in prompts())
    first, second = (sample(decoder(), ids, lengths, jax.random.key(seed), RULE) for seed in (0, 1))
    assert len(np.unique(first.tokens, axis=0)) > 1
    assert (first.tokens != second.tokens).any()


def chi_square(counts, probabilities):
    expected = counts.sum() * probabilities
    return ((counts - expected) ** 2 / expected).sum()


def test_frequencies_follow_the_distribution():
    draws, temperature = 4096, 0.6
    ids = np.tile(np.array([[2, 5, 3]], np.int32), (draws, 1))
    lengths = np.full(draws, 3, np.int32)
    samples = sample(decoder(), ids, lengths, jax.random.key(0), rule(2, **ENDS, temperature=temperature))
    followers = samples.tokens[samples.tokens[:, 0] == 4]  # the second draw, given one value of the first
    for place, drawn in ((0, samples.tokens), (1, followers)):
        context = [2, 5, 3, 4][: 3 + place]
        logits = np.asarray(logits_of(nnx.state(decoder()), np.array(context, np.int32)))[-1]
        counts = np.bincount(drawn[:, place], minlength=VOCAB)
        assert counts.sum() > 100
        # 7 degrees of freedom: a right sampler exceeds 29.9 once in 10,000 keys; at temperature 1 it is far above.
        assert chi_square(counts, softmax(logits / temperature)) < 29.9
        assert chi_square(counts, softmax(logits)) > 29.9


def softmax(logits):
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def test_new_parameters_keys_prompts_and_samplers_do_not_trace_again(monkeypatch):
    traces = []
    plain = sample_token_module.head_logits

    def counting(*args, **kwargs):
        traces.append(None)
        return plain(*args, **kwargs)

    monkeypatch.setattr(sample_token_module, "head_logits", counting)
    graph, state = nnx.split(decoder())
    how = rule(NEW, **ENDS, temperature=1.25)
    sampler = DecoderSampler(SampledModel(graph, make_mesh(MeshSpec())), how)
    first = sampler(state, *prompts(), 1, jax.random.key(0))
    traced = len(traces)
    assert traced == 2  # the first token's and the loop's
    later = jax.tree.map(lambda leaf: leaf * 1.5, state)
    second = sampler(later, *prompts(seed=1), 1, jax.random.key(1))
    third = sample(nnx.merge(graph, later), *prompts(seed=1), jax.random.key(1), how)
    assert len(traces) == traced
    jax.tree.map(np.testing.assert_array_equal, second, third)
    assert (first.log_probs != second.log_probs).any()


@pytest.mark.costly
@pytest.mark.parametrize("rows", [ROWS, ROWS - 1])
def test_a_mesh_draws_the_same_tokens_also_of_rows_that_its_ranks_do_not_divide(rows):
    mesh = make_mesh(MeshSpec(data=2, tensor=4))
    few = [x[:rows] for x in prompts()]
    sharded = sample(on_mesh(mesh), *few, jax.random.key(5), RULE)
    whole = sample(decoder(), *few, jax.random.key(5), RULE)
    np.testing.assert_array_equal(sharded.tokens, whole.tokens)
    np.testing.assert_allclose(sharded.log_probs, whole.log_probs, atol=2e-5)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("max_new_tokens", 0),
        ("temperature", 0.0),
        ("temperature", float("nan")),
        ("top_k", 0),
        ("top_p", 0.0),
        ("min_p", 1.5),
        ("rows", 0),
        ("stop", ("a", "")),
    ],
)
def test_an_option_out_of_range_is_named(argument, value):
    with pytest.raises(ValueError, match=f"^{argument}: expected "):
        SamplingOptions(**{"max_new_tokens": NEW, argument: value})


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("ids", "options", "words"),
    [
        ([], {}, "prompts: expected at least one, got 0"),
        ([[2], []], {}, r"prompts\[1\]: expected at least one id, got none"),
        ([[2, -1]], {}, r"prompts\[0\]: expected ids in \[0, 16\), got \(-1, 2\)"),
        ([[2], [16]], {}, r"prompts\[1\]: expected ids in \[0, 16\), got \(16, 16\)"),
        ([[2]], {"copies": 0}, "copies: expected at least 1, got 0"),
        ([[2], [3]], {"pad_to": (1, 8)}, "pad_to: expected at least 2 prompts, got 1"),
        ([[2, 3, 4]], {"pad_to": (1, 2)}, "pad_to: expected at least 3 tokens, for the longest prompt, got 2"),
    ],
)
def test_a_bad_prompt_is_named_before_anything_is_drawn(ids, options, words):
    samplers = Samplers(None, CharTokenizer("0123456789"), 1.0, 8)
    policy = SamplerPolicy(samplers, nnx.State({}), 0, None, jax.random.key(0))
    with pytest.raises(ValueError, match=f"^{words}$"):
        policy.generate(ids, SamplingOptions(NEW), **options)


@pytest.mark.costly
@pytest.mark.parametrize("spec", [None, MeshSpec(data=2, tensor=2)])
def test_a_batch_that_is_narrowed_draws_what_the_whole_batch_draws(spec, monkeypatch):
    repeated = [np.repeat(array, 3, axis=0) for array in prompts()]
    long = rule(4 * NEW, **ENDS)
    whole = sample(decoder(), *repeated, jax.random.key(2), long)
    assert len(set(whole.lengths.tolist())) > 2
    sizes = []
    kept = decoder_sampler._kept
    monkeypatch.setattr(decoder_sampler, "SHORTEST_NARROWED", 1)
    monkeypatch.setattr(decoder_sampler, "FEWEST_ROWS", 2)
    monkeypatch.setattr(decoder_sampler, "_kept", lambda rows, some: sizes.append(some.shape) or kept(rows, some))
    mesh = None if spec is None else make_mesh(spec)
    narrowed = sample(decoder() if mesh is None else on_mesh(mesh), *repeated, jax.random.key(2), long)
    assert sizes[:2] == [(1, 9), (1, 4)] if mesh is None else sizes[0] == (2, 4)
    assert set(sizes) <= ({(1, 9), (1, 4), (1, 2)} if mesh is None else {(2, 4), (2, 2)})
    np.testing.assert_array_equal(narrowed.tokens, whole.tokens)
    np.testing.assert_array_equal(narrowed.lengths, whole.lengths)
    np.testing.assert_allclose(narrowed.log_probs, whole.log_probs, atol=ROUNDING)


def steps_of_schedule(lengths, rows):
    """Steps of a loop that gives each row the next completion once its own has ended; the first tokens are drawn before."""
    ends = [length - 1 for length in lengths[:rows]]
    for length in lengths[rows:]:
        first = ends.index(min(ends))
        ends[first] += length
    return max(ends)


@pytest.mark.costly
@pytest.mark.parametrize(
    ("rows", "options"),
    [
        (1, {}),
        (5, {}),
        (3, {"greedy_last": True}),
        (4, {"top_k": 3, "record_support": True, "support_room": 2}),
    ],
)
def test_few_rows_at_a_time_draw_what_all_rows_draw(rows, options, monkeypatch):
    ids, lengths = prompts()
    inputs = decoder(), ids, lengths, jax.random.key(4)
    whole = sample(*inputs, rule(3 * NEW, **ENDS, **options), copies=3)
    steps = []
    plain = Decoder.decode_step

    def counting(*given):
        jax.debug.callback(lambda: steps.append(None))
        return plain(*given)

    monkeypatch.setattr(Decoder, "decode_step", counting)
    few = sample(*inputs, rule(3 * NEW, **ENDS, **options, rows=rows), copies=3)
    np.testing.assert_array_equal(few.tokens, whole.tokens)
    np.testing.assert_array_equal(few.lengths, whole.lengths)
    np.testing.assert_allclose(few.log_probs, whole.log_probs, atol=ROUNDING)
    if whole.support is not None:
        jax.tree.map(np.testing.assert_array_equal, few.support[:3], whole.support[:3])
        assert whole.support.cut.any()
    jax.effects_barrier()
    assert len(set(whole.lengths.tolist())) > 3
    assert len(steps) == steps_of_schedule(whole.lengths.tolist(), rows)


@pytest.mark.costly
def test_ranks_refill_rows_of_their_own_and_narrow_what_is_left(monkeypatch):
    narrowed, kept = [], decoder_sampler._kept
    monkeypatch.setattr(decoder_sampler, "SHORTEST_NARROWED", 1)
    monkeypatch.setattr(decoder_sampler, "FEWEST_ROWS", 1)
    monkeypatch.setattr(decoder_sampler, "_kept", lambda rows, some: narrowed.append(some.shape) or kept(rows, some))
    few = [x[:5] for x in prompts()]
    long = rule(3 * NEW, **ENDS)
    whole = sample(decoder(), *few, jax.random.key(6), replace(long, options=replace(long.options)), copies=4)
    narrowed.clear()
    refilled = replace(long, options=replace(long.options, rows=4))
    for spec in (MeshSpec(data=2, tensor=2), MeshSpec()):
        drawn = sample(on_mesh(make_mesh(spec)), *few, jax.random.key(6), refilled, copies=4)
        np.testing.assert_array_equal(drawn.tokens, whole.tokens)
        np.testing.assert_allclose(drawn.log_probs, whole.log_probs, atol=2e-5)
    assert {(2, 2), (1, 2)} <= set(narrowed)


@pytest.mark.costly
@pytest.mark.parametrize("spec", [MeshSpec(), MeshSpec(data=2)])
def test_completions_that_wait_are_drawn_when_all_rows_end_at_once(spec, monkeypatch):
    monkeypatch.setattr(decoder_sampler, "SHORTEST_NARROWED", 1)
    monkeypatch.setattr(decoder_sampler, "FEWEST_ROWS", 1)
    # No token ends a completion: all rows reach the longest one together, with fewer waiting than rows are narrowed to.
    inputs = on_mesh(make_mesh(spec)), *prompts(), jax.random.key(2)
    whole, few = (sample(*inputs, rule(NEW, rows=rows), copies=1) for rows in (None, 4 // spec.ranks))
    np.testing.assert_array_equal(few.tokens, whole.tokens)
    np.testing.assert_allclose(few.log_probs, whole.log_probs, atol=ROUNDING)


def test_a_gpus_library_multiplies_prompts_and_many_rows_alone(monkeypatch):
    monkeypatch.setattr(decoder_sampler, "_jitted", lambda function, static, donated, by_library: by_library)

    def by_library(rows, int8=False):
        program = decoder_sampler._Program(None, rule(NEW, **ENDS, int8_weights=int8), 4, make_mesh(MeshSpec(data=2)))
        return decoder_sampler._decoding(program, SimpleNamespace(done=np.zeros(2 * rows)))

    assert not decoder_sampler._prefilling() and not by_library(64)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert decoder_sampler._prefilling() and by_library(64)
    assert not by_library(63) and not by_library(64, int8=True)
    # An option that this version's compiler does not know is an error.
    jax.jit(jnp.sin, compiler_options=LIBRARY_ALONE)(1.0)


@pytest.mark.costly
@pytest.mark.parametrize("options", [{}, {"top_k": 3, "top_p": 0.9, "record_support": True}])
@pytest.mark.parametrize("rows", [None, 4])
def test_ranks_tell_each_other_only_how_many_completions_are_left(rows, options):
    sent = sent_between(MeshSpec(data=2), rule(NEW, **ENDS, **options, rows=rows))
    # The number of completions, and whether any row has too little room for its support.
    assert sent and set(sent) <= {"s32[]", "pred[]"}


@pytest.mark.costly
def test_tensor_ranks_send_nothing_of_the_length_of_a_vocabulary():
    """Half a block more on each rank than whole ones, which a compiler would send to the rank before it."""
    vocab = 2 * 8 * BLOCK + BLOCK
    sent = sent_between(MeshSpec(tensor=2), rule(NEW, **ENDS), replace(CONFIG, vocab_size=vocab))
    sizes = [math.prod(map(int, re.findall(r"\d+", shape.partition("[")[2]))) for shape in sent]
    # Of each of 4 completions a rank sends hidden states, of 32 features, and numbers.
    assert sizes and max(sizes) < 4 * ROWS * 64


def sent_between(spec, drawing_rule, config=CONFIG):
    """Types of all that devices send each other in the program that draws, four completions a prompt."""
    mesh = make_mesh(spec)
    graph, state = nnx.split(on_mesh(mesh, config))
    program = decoder_sampler._Program(graph, drawing_rule, 4, mesh)
    drawing = decoder_sampler._prefilling()(program, state, *split_rows(prompts(), mesh), jax.random.key(0))
    text = decoder_sampler._decoding(program, drawing).lower(program, 0, state, drawing).compile().as_text()
    return re.findall(r"= (\S+?)(?:\{\S*)? (?:all-\w+|collective-\w+|reduce-scatter)(?:-start)?\(", text)


@pytest.mark.costly
def test_few_rows_at_a_time_have_the_cache_of_few():
    graph, state = nnx.split(decoder())
    options = SampledModel(graph, make_mesh(MeshSpec()))
    all_rows, few = (
        DecoderSampler(options, rule(512, **ENDS, rows=rows)).lower(state, 16, 8, 4)() for rows in (None, 8)
    )
    # 64 rows and 8 of keys and values of 511 tokens, two layers of two heads of 8 numbers of four bytes.
    of_row = 511 * 2 * 2 * 2 * 8 * 4
    assert all_rows > 64 * of_row and few < 16 * of_row


@pytest.mark.costly
def test_prompts_that_wait_take_the_memory_of_their_cache():
    graph, state = nnx.split(decoder())
    sampler = DecoderSampler(SampledModel(graph, make_mesh(MeshSpec())), rule(16, **ENDS, rows=8))
    # 128 prompts of 256 tokens: keys and values of two layers and two heads. Four prompts at a time, each with the scores of
    # four heads, and smaller things.
    cache, scores = 128 * 256 * 2 * 2 * 2 * 8 * 4, 4 * 4 * 256**2 * 4
    assert cache < sampler.lower(state, 128, 256, 2)() < cache + 1.2 * scores


@pytest.mark.bad_input
def test_rows_at_a_time_are_refused_where_nothing_is_kept_of_a_row():
    with pytest.raises(
        ValueError, match=r"^rows \(--rollout.rows\): expected None for a model without a key-value cache"
    ):
        RecomputeSampler(SampledModel(nnx.split(decoder())[0], make_mesh(MeshSpec())), rule(NEW, **ENDS, rows=2))


def test_copies_of_a_prompt_are_rows_of_it():
    ids, lengths = prompts()
    copied = sample(decoder(), ids, lengths, jax.random.key(3), RULE, copies=2)
    apart = sample(decoder(), *(np.repeat(x, 2, axis=0) for x in (ids, lengths)), jax.random.key(3), RULE)
    np.testing.assert_array_equal(copied.tokens, apart.tokens)
