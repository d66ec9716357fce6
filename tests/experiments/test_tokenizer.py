"""Tokenizers: round trips, special and unused ids, refusals, and saving in a run folder."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from experiments.models.huggingface.tokenizer import PretrainedTokenizer
from experiments.models.tokenizer import ByteTokenizer, CharTokenizer, tokenizer_for
from experiments.tasks import make_task

CHAR = CharTokenizer("0123456789+=")
BYTE = ByteTokenizer()
BOTH = pytest.mark.parametrize("tokenizer", [CHAR, BYTE], ids=["char", "byte"])


@BOTH
@pytest.mark.parametrize("text", ["", "37+48=", "0", "=+9"])
def test_round_trip(tokenizer, text):
    ids = tokenizer.encode(text)
    assert len(ids) == len(text)
    assert all(3 <= token < tokenizer.vocab_size for token in ids)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(np.array(ids, np.int32)) == text


def test_char_ids_follow_the_alphabet():
    assert CHAR.encode(CHAR.alphabet) == list(range(3, 15))


@pytest.mark.parametrize("text", ["é", "漢字", "\N{GRINNING FACE}", "a\nb\0"])
def test_bytes_round_trip(text):
    ids = BYTE.encode(text)
    assert [token - 3 for token in ids] == list(text.encode())
    assert BYTE.decode(ids) == text


def test_every_byte_has_its_own_id():
    assert [BYTE.decode([3 + byte]) for byte in range(128)] == [chr(byte) for byte in range(128)]
    assert {BYTE.decode([3 + byte]) for byte in range(128, 256)} == {"\ufffd"}


@BOTH
def test_special_ids(tokenizer):
    assert (tokenizer.pad_id, tokenizer.eos_ids) == (0, (2,))
    assert tokenizer.encode_prompt("42") == [1, *tokenizer.encode("42")]
    assert tokenizer.longest_prompt(2) == 3
    four, two = tokenizer.encode("42")
    assert tokenizer.decode([1, 0, four, 0, 1, two, 2, four, 0]) == "42"
    assert tokenizer.decode([2, four]) == ""
    assert tokenizer.decode([]) == ""


@pytest.mark.parametrize(
    ("tokenizer", "symbols", "vocab_size"),
    [(CHAR, 12, 16), (BYTE, 256, 264), (CharTokenizer("abcde"), 5, 8), (CharTokenizer("abcdef"), 6, 16)],
)
def test_vocab_size_and_unused_ids(tokenizer, symbols, vocab_size):
    assert tokenizer.vocab_size == vocab_size
    for unused in range(3 + symbols, vocab_size):
        assert tokenizer.decode([unused]) == "\ufffd"


@BOTH
@pytest.mark.parametrize("bad", [-1, 10**6])
def test_refuses_ids_out_of_range(tokenizer, bad):
    with pytest.raises(ValueError, match=rf"ids: expected ids in \[0, {tokenizer.vocab_size}\), got {bad} at 1"):
        tokenizer.decode([4, bad])
    with pytest.raises(ValueError, match="ids: expected ids in"):
        tokenizer.decode([tokenizer.vocab_size])
    assert tokenizer.decode([2, bad]) == ""


@BOTH
@pytest.mark.parametrize("bad", [1.0, "4", None])
def test_refuses_what_is_not_an_integer(tokenizer, bad):
    with pytest.raises(ValueError, match="ids: expected integers, got .* at 0"):
        tokenizer.decode([bad])


def test_refuses_unknown_characters():
    with pytest.raises(ValueError, match=r"text: expected characters of '0123456789\+=', got 'x' at 2"):
        CHAR.encode("37x48")
    with pytest.raises(ValueError, match=r"text: expected text that UTF-8 can hold, got '\\ud800' at 1"):
        BYTE.encode("a\ud800")


@pytest.mark.parametrize("alphabet", ["", "abca", "a\ufffd", None, ["a"]])
def test_refuses_alphabets(alphabet):
    with pytest.raises(ValueError, match="alphabet: expected"):
        CharTokenizer(alphabet)


def test_tokenizer_of_a_task(tmp_path):
    assert tokenizer_for(make_task("addition").alphabet) == CHAR
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{n}?", "answer": "é"}) + "\n" for n in range(50)))
    assert tokenizer_for(make_task(f"jsonl:{path}").alphabet) == BYTE


def test_the_size_of_a_vocabulary_is_counted_once():
    """It is read for every prompt of a rollout, and counting takes 30 ms at 50,000 entries."""
    counted = []
    inner = SimpleNamespace(get_vocab=lambda with_added_tokens: counted.append(1) or {"a": 3, "b": 7})
    tokenizer = PretrainedTokenizer(inner, (0,), 0, None)
    assert [tokenizer.vocab_size for _ in range(3)] == [8] * 3 and len(counted) == 1
