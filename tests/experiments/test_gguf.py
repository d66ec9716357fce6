"""The reader of GGUF files: weights, tokenizer and refusals.

The file is a tiny one that is written here; the forward pass that it is compared with is float64 NumPy in the file's
own convention, whose rotary pairs are adjacent.
"""

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.models.pretrained import open_pretrained
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
        ({"architecture": "falcon"}, "gguf, general.architecture: expected 'llama', got 'falcon'"),
        ({"pre": "default"}, "gguf, tokenizer.ggml.pre: expected 'smollm', got 'default'"),
        ({"merges": ("h x",)}, "gguf, tokenizer.ggml.merges: expected pairs of tokens that make a token, got Error"),
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


@pytest.mark.bad_input
def test_a_file_that_is_no_whole_gguf_is_refused(tiny, tmp_path):
    for content, words in (
        (b"hello there", "gguf: expected a GGUF file, which begins with b'GGUF', got it.gguf"),
        (tiny.path.read_bytes()[:-5000], "gguf: expected a whole GGUF file, got it.gguf"),
    ):
        (path := tmp_path / "it.gguf").write_bytes(content)
        with pytest.raises(ValueError, match=f"^{words}"):
            open_pretrained(path, chat_template=False)
