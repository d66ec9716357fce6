"""Files for supervised fine-tuning: prompts with completions, conversations, their split, and every refusal of a line."""

import json
import os
import re

import numpy as np
import pytest

from experiments.experience.conversations import load_conversations
from experiments.experience.limits import Limits
from experiments.models.tokenizer import ByteTokenizer, CharTokenizer
from experiments.tasks import Message, split_of
from experiments.tasks.protocol import prompt_text
from tests.experiments.lines import write
from tests.experiments.word_tokenizer import word_tokenizer

CHARS = CharTokenizer("0123456789+=")
MESSAGE = "an object with role and content"
USER, ASSISTANT = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}
TRAINED = {**USER, "train": True}


@pytest.fixture(scope="module")
def chatml():
    return word_tokenizer("chatml")


def load(path, tokenizer, *lines, **limits):
    return load_conversations(write(path / "a.jsonl", *lines), tokenizer, Limits(**limits))


def only(file):
    ((document,),) = filter(None, file.documents.values())
    return document


def test_completions_end_with_the_end_token(tmp_path):
    document = only(load(tmp_path, CHARS, {"prompt": "3+4=", "completion": "7", "metadata": [1]}))
    assert document.tokens.tolist() == [1, *CHARS.encode("3+4="), *CHARS.encode("7"), 2]
    assert document.tokens.dtype == np.int32 and document.sampler_log_probs is None
    assert document.labels.tolist() == [False] * 5 + [True] * 2


def test_completions_of_prompts_that_are_messages(tmp_path, chatml):
    document = only(load(tmp_path, chatml, {"prompt": [USER], "completion": "One two"}))
    prompt = chatml.encode_messages([USER])
    assert document.tokens.tolist() == [*prompt, *chatml.encode("One two<|im_end|>")]
    assert document.labels.tolist() == [False] * len(prompt) + [True] * 3
    # A text is the user's only message.
    text = only(load(tmp_path, chatml, {"prompt": "Hi", "completion": "One two"}))
    assert text.tokens.tolist() == document.tokens.tolist()


TALK = [USER, ASSISTANT, {"role": "user", "content": "Add"}, {"role": "assistant", "content": "two"}]


@pytest.mark.parametrize(
    ("flags", "labels"),
    [
        ({}, "Yo <|im_end|> two <|im_end|>"), ({1: False}, "two <|im_end|>"), ({1: True, 3: False}, "Yo <|im_end|>"),
        ({0: True, 3: False}, "Hi <|im_end|> Yo <|im_end|>"), ({0: False, 2: True, 1: False, 3: False}, "Add <|im_end|>"),
    ],
)  # fmt: skip
def test_turns_of_a_conversation(tmp_path, chatml, flags, labels):
    messages = [{**each, "train": flags[n]} if n in flags else each for n, each in enumerate(TALK)]
    document = only(load(tmp_path, chatml, {"messages": messages}))
    assert document.tokens.tolist() == chatml.encode(chatml.template.render(TALK, to_answer=False))
    assert [chatml.inner.id_to_token(token) for token in document.tokens[document.labels]] == labels.split()


@pytest.mark.parametrize("role", ["system", "tool"])
def test_turns_of_other_roles_are_context(tmp_path, chatml, role):
    document = only(load(tmp_path, chatml, {"messages": [{"role": role, "content": "Add"}, USER, ASSISTANT]}))
    assert [chatml.inner.id_to_token(token) for token in document.tokens[document.labels]] == ["Yo", "<|im_end|>"]


def test_the_first_token_is_no_label(tmp_path):
    tokenizer = word_tokenizer("chatml", "{% for m in messages %}{{ m['content'] + '\n' }}{% endfor %}")
    document = only(load(tmp_path, tokenizer, {"messages": [ASSISTANT]}))
    assert document.labels.tolist() == [False, True]
    with pytest.raises(ValueError, match="line 1: 'messages' has no token to train on"):
        tokenizer = word_tokenizer("chatml", "{% for m in messages %}{{ m['content'] }}{% endfor %}")
        load(tmp_path, tokenizer, {"messages": [ASSISTANT]})


def test_the_split_is_that_of_the_prompt_as_a_task(tmp_path, chatml):
    texts = [f"{number}+1=" for number in range(60)]
    file = load(tmp_path, ByteTokenizer(), *({"prompt": text, "completion": f"a{n}"} for n, text in enumerate(texts)))
    for split, documents in file.documents.items():
        wanted = [number for number, text in enumerate(texts) if split_of("jsonl", text) == split]
        drawn = [ByteTokenizer().decode(each.tokens[each.labels]) for each in documents]
        assert drawn == [f"a{number}" for number in wanted] and drawn
    for number in range(30):
        context = [{"role": "user", "content": f"{number}"}]
        split = split_of("jsonl", prompt_text((Message("user", f"{number}"),)))
        for line in ({"prompt": context, "completion": "Yo"}, {"messages": [*context, ASSISTANT]}):
            assert len(load(tmp_path, chatml, line).documents[split]) == 1


def test_the_digest_is_of_the_content(tmp_path):
    line = {"prompt": "1+1=", "completion": "2"}
    first, second = load(tmp_path, CHARS, line), load(tmp_path, CHARS, line, line)
    assert len(first.digest) == 64 and first.digest != second.digest
    # Several completions of a prompt are as good as one.
    assert sum(map(len, second.documents.values())) == 2


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"", "invalid JSON: Expecting value at character 0"),
        (["prompt"], "expected a JSON object, got list"),
        ({}, "missing key 'prompt'; a line has prompt and completion, or messages"),
        ({"prompt": "1"}, "missing key 'completion'; a line has prompt and completion, or messages"),
        ({"prompt": "1", "answer": "1"}, "unknown key 'answer'; a line has prompt, completion, metadata"),
        ({"prompt": "1", "messages": [USER]}, "unknown key 'prompt'; a line has messages, metadata"),
        ({"prompt": 1, "completion": "1"}, "'prompt' must be a string, got int"),
        ({"prompt": " ", "completion": "1"}, "'prompt' is empty"),
        ({"prompt": "1", "completion": ""}, "'completion' is empty"),
        ({"prompt": "1", "completion": [ASSISTANT]}, "'completion' must be a string, got list"),
        ({"prompt": "1", "completion": "\ud800"}, "'completion' holds half of a surrogate pair at character 0"),
        ({"prompt": [], "completion": "1"}, "'prompt' is empty"),
        ({"prompt": [TRAINED], "completion": "1"}, f"'prompt[0]' must be {MESSAGE}, got keys content, role, train"),
        ({"messages": "Hi"}, "'messages' must be a list of messages, got str"),
        ({"messages": []}, "'messages' is empty"),
        ({"messages": [USER]}, "'messages' has no turn to train on, neither of the assistant nor with 'train': true"),
        ({"messages": [{**ASSISTANT, "train": False}]}, "'messages' has no turn to train on, neither"),
        ({"messages": [USER, {**ASSISTANT, "train": 1}]}, "'messages[1].train' must be true or false, got int"),
        (
            {"messages": [USER, {**ASSISTANT, "weight": 1}]},
            f"'messages[1]' must be {MESSAGE}, and perhaps train, got keys content, role, weight",
        ),
        ({"messages": [USER, {**ASSISTANT, "content": None}]}, "'messages[1].content' must be a string, got NoneType"),
        ({"messages": [USER, ASSISTANT]}, "messages: expected a model with a chat template (--model.path) for prompts"),
        ({"prompt": "1", "completion": "x"}, "text: expected characters of '0123456789+=', got 'x' at 0"),
        ({"prompt": "12345", "completion": "678"}, "expected at most 9 tokens, the length of a row, got 10"),
    ],
)
def test_refuses_lines(tmp_path, line, reason):
    good = {"prompt": "1234", "completion": "678"}
    with pytest.raises(ValueError, match=rf"^file {tmp_path}/a.jsonl, line 2: {re.escape(reason)}.*\Z"):
        load(tmp_path, CHARS, good, line, good, row_length=9)


@pytest.mark.bad_input
def test_refuses_ids_beyond_the_vocabulary_and_templates_with_the_line(tmp_path):
    line = {"prompt": "1", "completion": "="}
    assert only(load(tmp_path, CHARS, line, vocab_size=15)).tokens.max() == 14
    with pytest.raises(ValueError, match="line 1: expected ids below 14, the size of the vocabulary, got 14$"):
        load(tmp_path, CHARS, line, vocab_size=14)
    source = "{% for m in messages %}{{ m['content'] + ('!' if loop.last else '') }}{% endfor %}"
    words = r"line 1: chat template, messages\[1\] \(assistant\): expected a turn that does"
    with pytest.raises(ValueError, match=words):
        load(tmp_path, word_tokenizer("chatml", source), {"messages": TALK})


@pytest.mark.bad_input
def test_refuses_files(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "empty").touch()
    with (tmp_path / "large").open("wb") as file:
        file.truncate(2**30 + 1)
    for name, seen in (
        ("pipe", "expected a readable file, got a pipe, socket or device"),
        ("empty", "expected one JSON object a line, got an empty file"),
        ("large", "expected a readable file, got 1073741825 bytes, more than 1073741824"),
        ("none", "expected a readable file, got No such file or directory"),
    ):
        with pytest.raises(ValueError, match=f"^file {tmp_path / name}: {seen}$"):
            load_conversations(str(tmp_path / name), CHARS)


def test_lines_with_carriage_returns_and_without_a_last_line_break(tmp_path):
    path = tmp_path / "a.jsonl"
    line = json.dumps({"prompt": "1+1=", "completion": "2"})
    path.write_bytes(f"{line}\r\n{line}".encode())
    assert sum(map(len, load_conversations(str(path), CHARS).documents.values())) == 2
