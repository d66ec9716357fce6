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


def test_ids_follow_the_alphabet_and_the_bytes():
    assert CHAR.encode(CHAR.alphabet) == list(range(3, 15))
    for text in ("é", "漢字", "\N{GRINNING FACE}", "a\nb\0", "".join(map(chr, range(128)))):
        ids = BYTE.encode(text)
        assert [token - 3 for token in ids] == list(text.encode()) and BYTE.decode(ids) == text
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


def test_vocab_size_and_unused_ids():
    abc = CharTokenizer("abcde"), CharTokenizer("abcdef")
    for tokenizer, symbols, vocab_size in zip((CHAR, BYTE, *abc), (12, 256, 5, 6), (16, 264, 8, 16), strict=True):
        assert tokenizer.vocab_size == vocab_size
        unused = [tokenizer.decode([each]) for each in range(3 + symbols, vocab_size)]
        assert unused == ["\ufffd"] * len(unused)


@BOTH
def test_refuses_ids_out_of_range_and_what_is_not_an_integer(tokenizer):
    for bad in (-1, tokenizer.vocab_size):
        with pytest.raises(ValueError, match=rf"ids: expected ids in \[0, {tokenizer.vocab_size}\), got {bad} at 1"):
            tokenizer.decode([4, bad])
        assert tokenizer.decode([2, bad]) == ""
    for bad in (1.0, "4", None):
        with pytest.raises(ValueError, match="ids: expected integers, got .* at 0"):
            tokenizer.decode([bad])


def test_refuses_unknown_characters_and_alphabets():
    with pytest.raises(ValueError, match=r"text: expected characters of '0123456789\+=', got 'x' at 2"):
        CHAR.encode("37x48")
    with pytest.raises(ValueError, match=r"text: expected text that UTF-8 can hold, got '\\ud800' at 1"):
        BYTE.encode("a\ud800")
    for alphabet in ("", "abca", "a\ufffd", None, ["a"]):
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
