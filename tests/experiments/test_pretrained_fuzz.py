"""Damaged files of a checkpoint directory raise the one declared error, ValueError in one sentence, or load."""

import json
import random
import struct

import numpy as np
import pytest

from experiments.models.pretrained import open_pretrained
from tests.experiments.tiny_directory import write_tiny_directory

STRANGE = [None, True, -1, 0, 1.5, 2**63, 1e400, "", "F32", "é\u0000", [], [[]], {}, {"a": 1}, [-1, 2], [2**40, 2**40]]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_tiny_directory(tmp_path_factory.mktemp("fuzz") / "a", "smollm2", num_hidden_layers=1)


def outcome(read):
    """Whether a file was read; anything but a ValueError of one sentence is a failure."""
    try:
        read()
    except ValueError as error:
        assert str(error) and ": expected " in str(error), repr(error)
        return False
    return True


def mutated_json(value, draw):
    """A JSON value with one place in it replaced, removed or doubled."""
    places = []

    def walk(node):
        items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
        for key, child in list(items)[:40]:
            places.append((node, key))
            walk(child)

    value = json.loads(json.dumps(value))
    walk(value)
    node, key = draw.choice(places)
    kind = draw.random()
    if kind < 0.7:
        node[key] = draw.choice(STRANGE)
    elif kind < 0.9:
        del node[key]
    elif isinstance(node, dict):
        node[str(key) + "2"] = node[key]
    return value


def mutated_bytes(content, draw):
    """Bytes cut short, changed, or with some taken out."""
    start = draw.randrange(len(content))
    kind = draw.randrange(3)
    if kind == 0:
        return content[:start]
    if kind == 1:
        return content[:start] + bytes([draw.randrange(256)]) + content[start + 1 :]
    return content[:start] + content[start + draw.randrange(1, 9) :]


def safetensors_cases(content, draw):
    (length,) = struct.unpack("<Q", content[:8])
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    for _ in range(200):
        text = json.dumps(mutated_json(header, draw)).encode()
        yield struct.pack("<Q", len(text)) + text + data
    for _ in range(100):
        yield mutated_bytes(content[: 8 + length], draw) + data
    for number in (0, 1, 7, length - 1, length + 1, length + len(data), 10**8, 2**32, 2**63, 2**64 - 1):
        yield struct.pack("<Q", number) + content[8:]


def test_damaged_safetensors_headers(directory):
    file = directory / "model.safetensors"
    content, draw = file.read_bytes(), random.Random(0)
    found = open_pretrained(directory)
    cases = list(safetensors_cases(content, draw))
    read = 0
    for damaged in cases:
        file.write_bytes(damaged)

        def load():
            weights = found.weights()
            for name in weights.source.shapes:
                assert weights.source.read(name).shape == weights.source.shapes[name]

        read += outcome(load)
    file.write_bytes(content)
    assert len(cases) >= 300 and 0 < read < 100
    found.weights()


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json"])
def test_damaged_small_files(directory, name):
    file = directory / name
    content, draw = file.read_bytes(), random.Random(1)
    values, read = json.loads(content), 0
    for number in range(160 if name == "tokenizer.json" else 60):
        damaged = mutated_bytes(content, draw) if number % 4 == 0 else json.dumps(mutated_json(values, draw)).encode()
        file.write_bytes(damaged)

        def load():
            tokenizer = open_pretrained(directory).tokenizer
            assert all(isinstance(token, int) for token in tokenizer.encode_prompt("2 + 2 é"))
            assert isinstance(tokenizer.decode([1, 2, 3]), str)

        read += outcome(load)
    file.write_bytes(content)
    assert 0 < read < number
    np.testing.assert_equal(open_pretrained(directory).config.hidden_size, 32)
