"""The reader of GGUF files: weights, tokenizer and refusals.

The file is a tiny one that is written here; the forward pass that it is compared with is float64 NumPy in the file's
own convention, whose rotary pairs are adjacent.
"""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.models.pretrained import open_pretrained
from experiments.models.rope import LinearScaling
from tests.experiments.tiny_directory import decoder_on_disk
from tests.experiments.tiny_gguf import oracle_hidden, write_tiny_gguf

pytestmark = pytest.mark.slow

PROSE = "hello there, it is 17 past 3; the héron tells the others. " * 3


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_tiny_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def test_hidden_states_equal_the_forward_pass_in_the_convention_of_the_file(tiny):
    ids = np.random.default_rng(1).integers(0, len(tiny.vocabulary), 20).astype(np.int32)
    tokens = jnp.asarray(ids)[None]
    decoder = decoder_on_disk(tiny.path, chat_template=False)
    seen = decoder.hidden_states(tokens, jnp.arange(20)[None], jnp.zeros_like(tokens))
    # Hidden states have a root mean square of about 1; fp32 roundings of two layers.
    np.testing.assert_allclose(np.asarray(seen)[0], oracle_hidden(tiny.tensors, ids), atol=2e-5)


def test_tokenizer_reads_the_vocabulary_and_the_merges_of_the_file(tiny):
    tokenizer = open_pretrained(tiny.path, chat_template=False).tokenizer
    words = [tiny.vocabulary[token] for token in tokenizer.encode("hello there 12<|im_end|>")]
    # Digits stand alone, although a merge would join these two; a space belongs to the word behind it, not to a digit.
    assert words == ["hello", "Ġt", "he", "r", "e", "Ġ", "1", "2", "<|im_end|>"]
    assert tokenizer.decode(tokenizer.encode(PROSE)) == PROSE
    assert (tokenizer.eos_ids, tokenizer.pad_id) == ((2,), 2)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architecture": "falcon"}, "tiny.gguf, general.architecture: expected 'llama', got 'falcon'"),
        ({"pre": "default"}, "tiny.gguf, tokenizer.ggml.pre: expected 'smollm', got 'default'"),
        (
            {"merges": ("h x",)},
            "tiny.gguf, tokenizer.ggml.merges: expected pairs of tokens that make a token, got Error",
        ),
        (
            {"without": "blk.1.ffn_up.weight"},
            "model weights: expected every tensor of the model, got no blk.1.ffn_up.weight",
        ),
        (
            {"extra": "blk.0.attn_q.bias"},
            "model weights: expected no other tensors than the model's, got blk.0.attn_q.bias",
        ),
    ],
)
def test_a_file_that_the_decoder_cannot_express_is_refused(changes, words, tmp_path):
    path = write_tiny_gguf(tmp_path / "tiny.gguf", **changes).path
    with pytest.raises(ValueError) as refused:
        open_pretrained(path, chat_template=False).weights()
    assert str(refused.value).startswith(words)


TOKENS, TYPES, MERGES = (f"tokenizer.ggml.{name}" for name in ("tokens", "token_type", "merges"))
END, START, PADDING = (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "bos", "padding"))
EPS, SCALING = "llama.attention.layer_norm_rms_epsilon", "llama.rope.scaling"


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("general.architecture", 3, ", general.architecture: expected a string, got 3"),
        ("llama.block_count", "2", ", llama.block_count: expected a positive integer, got '2'"),
        ("llama.block_count", True, ", llama.block_count: expected a positive integer, got True"),
        (
            "llama.attention.head_count_kv",
            [2, 2],
            ", llama.attention.head_count_kv: expected a positive integer, got [2, 2]",
        ),
        ("llama.attention.head_count", None, ": expected the key llama.attention.head_count, got none"),
        ("llama.attention.key_length", "8", ", llama.attention.key_length: expected a positive integer, got '8'"),
        ("llama.rope.dimension_count", [8], ", llama.rope.dimension_count: expected a positive integer, got [8]"),
        ("llama.rope.freq_base", "5000", ", llama.rope.freq_base: expected a finite number above 0, got '5000'"),
        (EPS, [1e-5], f", {EPS}: expected a finite number above 0, got [9.99"),
        (EPS, math.nan, f", {EPS}: expected a finite number above 0, got nan"),
        (TOKENS, 5, f", {TOKENS}: expected a list of strings, got 5"),
        (TOKENS, [1, 2], f", {TOKENS}: expected a list of strings, got [1, 2]"),
        (TOKENS, ["a", "b", "a"], f", {TOKENS}: expected 3 different tokens, got 2"),
        (TYPES, None, f": expected the key {TYPES}, got none"),
        (TYPES, "normal", f", {TYPES}: expected a list of integers, got 'normal'"),
        (TYPES, [3, 1], f", {TYPES}: expected one for each of 265 tokens, got 2"),
        (MERGES, "h e", f", {MERGES}: expected a list of strings, got 'h e'"),
        (MERGES, [1], f", {MERGES}: expected a list of strings, got [1]"),
        ("tokenizer.ggml.pre", ["smollm"], ", tokenizer.ggml.pre: expected a string, got ['smollm']"),
        (END, "two", f", {END}: expected an integer in [0, 265), got 'two'"),
        (PADDING, -1, f", {PADDING}: expected an integer in [0, 265), got -1"),
        (START, -1, f", {START}: expected an integer in [0, 265), got -1"),
        (START, 265, f", {START}: expected an integer in [0, 265), got 265"),
        ("tokenizer.chat_template", 7, ", tokenizer.chat_template: expected a string, got 7"),
        (
            "tokenizer.ggml.add_bos_token",
            True,
            ", tokenizer.ggml.add_bos_token: expected False, for prompts without a start",
        ),
        (f"{SCALING}.type", "yarn", f", {SCALING}.type: expected none or linear, got 'yarn'"),
        (f"{SCALING}.type", 1, f", {SCALING}.type: expected a string, got 1"),
        (f"{SCALING}.factor", "4", f", {SCALING}.factor: expected a finite number above 0, got '4'"),
    ],
)
def test_metadata_of_another_type_is_refused_by_file_and_key(key, value, words, tmp_path):
    template = {"tokenizer.chat_template": "{{ messages[0].content }}"}
    path = write_tiny_gguf(tmp_path / "tiny.gguf", metadata={**template, key: value}).path
    with pytest.raises(ValueError) as refused:
        open_pretrained(path)
    assert str(refused.value).startswith(f"tiny.gguf{words}")


@pytest.mark.bad_input
def test_a_tensor_of_a_type_that_cannot_be_read_is_named(tmp_path):
    path = write_tiny_gguf(tmp_path / "tiny.gguf", quantised=False, stored_as=np.float64).path
    source = open_pretrained(path, chat_template=False).weights().source
    with pytest.raises(
        ValueError, match="^tiny.gguf, tensor blk.0.attn_q.weight: expected a type that the package gguf "
    ):
        source.read("blk.0.attn_q.weight")


@pytest.mark.parametrize(
    ("metadata", "factor"),
    [
        # As llama.cpp reads them: a factor without a type is linear, and the type none takes no factor.
        ({f"{SCALING}.factor": 4.0}, 4.0),
        ({f"{SCALING}.factor": 4.0, f"{SCALING}.type": "linear"}, 4.0),
        ({"llama.rope.scale_linear": 2.0}, 2.0),
        ({f"{SCALING}.factor": 4.0, f"{SCALING}.type": "none"}, None),
        ({f"{SCALING}.factor": 1.0}, None),
        ({f"{SCALING}.type": "linear"}, None),
    ],
)
def test_a_factor_scales_the_rotary_frequencies(metadata, factor, tmp_path):
    path = write_tiny_gguf(tmp_path / "tiny.gguf", metadata=metadata).path
    scaling = open_pretrained(path, chat_template=False).config.rope_scaling
    assert scaling == (None if factor is None else LinearScaling(factor))


@pytest.mark.bad_input
def test_a_file_that_is_no_whole_gguf_is_refused(tiny, tmp_path):
    for content, words in (
        (b"hello there", "gguf: expected a GGUF file, which begins with b'GGUF', got it.gguf"),
        (tiny.path.read_bytes()[:-5000], "gguf: expected a whole GGUF file, got it.gguf"),
    ):
        (path := tmp_path / "it.gguf").write_bytes(content)
        with pytest.raises(ValueError, match=f"^{words}"):
            open_pretrained(path, chat_template=False)
