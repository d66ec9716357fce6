"""Named shapes, the dtype that "auto" stands for, and a vocabulary larger than a task's."""

import dataclasses

import jax
import numpy as np
import pytest

from experiments.config import ModelConfig
from experiments.loop.run import set_up
from experiments.loop.run_parts import UserParts
from experiments.models import named_shapes
from experiments.models.dtype_choice import choose_dtype
from experiments.models.named_shapes import NAMED_SHAPES
from experiments.models.parameters import abstract_decoder
from experiments.models.tokenizer import ByteTokenizer, CharTokenizer
from tests.experiments.tiny import SIZES, tiny

pytestmark = pytest.mark.costly

PUBLISHED = {
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
}
PUBLISHED |= {"llama-3.2-1b": 1_235_814_400}


@pytest.mark.parametrize("name", NAMED_SHAPES)
def test_parameters_are_as_many_as_published(name):
    _, state = abstract_decoder(NAMED_SHAPES[name])
    count = sum(leaf.size for leaf in jax.tree.leaves(state))
    assert count == PUBLISHED[name]


def test_a_name_decides_sizes_and_vocabulary_and_leaves_the_dtypes():
    config = ModelConfig(name="qwen3-0.6b", param_dtype="bfloat16", remat="products").decoder(16)
    expected = dataclasses.replace(NAMED_SHAPES["qwen3-0.6b"], param_dtype="bfloat16", remat="products")
    assert config == expected and config.vocab_size == 151_936


@pytest.mark.bad_input
def test_a_name_of_a_smaller_vocabulary_and_options_that_the_path_decides():
    with pytest.raises(ValueError, match="^--model.name: expected a shape for at least 200000 tokens, got qwen3-0.6b"):
        ModelConfig(name="qwen3-0.6b").decoder(200_000)
    for option, value in (("name", "qwen3-0.6b"), ("hidden_size", 128)):
        words = f"^--model.{option.replace('_', '-')}: expected no value together with --model.path"
        with pytest.raises(ValueError, match=words):
            ModelConfig(path="somewhere", **{option: value}).of_pretrained(NAMED_SHAPES["qwen3-0.6b"])


def test_a_run_reads_back_any_token_of_the_larger_vocabulary(tmp_path, monkeypatch):
    shape = dataclasses.replace(NAMED_SHAPES["qwen3-0.6b"], vocab_size=64, **SIZES)
    monkeypatch.setitem(named_shapes.NAMED_SHAPES, "tiny", shape)
    config = tiny(tmp_path, "named", warm_start={"max_steps": 0}, schedule={"steps": 1}, model=ModelConfig(name="tiny"))
    setup = set_up(config, UserParts(reward=lambda example, text: float("\ufffd" in text))).setup
    assert setup.tokenizer.vocab_size == setup.model.decoder.vocab_size == 64
    drawn = setup.source.next(setup.policy()).documents
    # Of 64 tokens the task's are the first 16: an untrained model samples the others more often than not.
    assert np.mean([document.reward for document in drawn]) > 0.5
    assert max(int(document.tokens.max()) for document in drawn) >= 16


def test_ids_after_the_symbols_stand_for_nothing_and_fewer_than_symbols_are_refused():
    for tokenizer in (CharTokenizer("0123456789", num_ids=64), ByteTokenizer(num_ids=1000)):
        last = tokenizer.vocab_size - 1
        assert last in (63, 999) and tokenizer.decode([last, *tokenizer.encode("7"), last]) == "\ufffd7\ufffd"
    with pytest.raises(ValueError, match="^num_ids: expected at least 13, got 12"):
        CharTokenizer("0123456789", num_ids=12)
    with pytest.raises(ValueError, match="^num_ids: expected at least 259, got 256"):
        ByteTokenizer(num_ids=256)


@pytest.mark.parametrize(
    ("platform", "capability", "dtype"),
    [
        ("cpu", None, "float32"), ("tpu", None, "float32"), ("gpu", (7, 5), "float32"), ("gpu", (8, 0), "bfloat16"),
        ("gpu", (12, 0), "bfloat16"), ("gpu", None, "bfloat16"),
    ],
)  # fmt: skip
def test_auto_is_bfloat16_where_it_is_multiplied(platform, capability, dtype):
    """AMD's GPUs have no compute capability."""
    choice = choose_dtype(platform, capability)
    assert choice.dtype == dtype and choice.reason.startswith("auto: ")
    if capability == (7, 5):
        assert "7.5 emulates bfloat16" in str(choice)
