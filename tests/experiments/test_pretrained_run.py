"""A run that begins with a model from disk: trained, resumed, scored, exported and talked to."""

import contextlib
import dataclasses
import io
import json
import struct
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from flax import nnx

from experiments import chat, evaluate, export, grpo
from experiments.config import ModelConfig, WarmStartConfig
from experiments.loop.assemble import assemble
from experiments.loop.load import load_model
from experiments.loop.run import train
from experiments.models.huggingface import export as export_module
from experiments.models.huggingface.tokenizer import PretrainedTokenizer
from experiments.models.pretrained import open_pretrained
from experiments.sampling.token_stream import StreamOptions, stream_tokens
from tests.experiments.samples import rule, sample
from tests.experiments.tiny import tiny, train_records
from tests.experiments.tiny_directory import write_tiny_directory
from tests.experiments.tiny_gguf import METADATA, write_tiny_gguf

SMALL = {
    "task": "comparison:1", "model": {}, "rollout": {"prompts_per_rollout": 4, "num_generations": 2, "max_new_tokens": 3},
    "loss": {"kl_coefficient": 0.01}, "evaluation": {"num_prompts": 4},
    "warm_start": WarmStartConfig(),
    "schedule": {"docs_per_step": 8, "rows": 8, "row_length": 16, "steps": 2},
}  # fmt: skip


def options(path, out, name, **changes):
    config = tiny(out, name, **SMALL)
    model = ModelConfig(path=str(path), **changes)
    return dataclasses.replace(config, model=model)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A bf16 directory."""
    path = tmp_path_factory.mktemp("models") / "gemma2"
    return write_tiny_directory(path, "gemma2", dtype="bfloat16", num_hidden_layers=2)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of two steps that began with a bf16 directory, which is gone afterwards."""
    folder = tmp_path_factory.mktemp("run")
    path = write_tiny_directory(folder / "model", "gemma2", dtype="bfloat16", num_hidden_layers=2)
    result = train(options(path, folder, "a"))
    path.rename(folder / "moved")
    return result, folder / "moved"


def test_the_trainer_takes_parameters_tokenizer_and_sizes_from_the_directory(directory, tmp_path):
    trainer = assemble(options(directory, tmp_path, "a", param_dtype="bfloat16"))
    assert trainer.model.decoder.attention_softcap == 5.0 and trainer.model.decoder.sliding.window == 6
    assert trainer.sizes.prompt == trainer.tokenizer.longest_prompt(trainer.task.max_prompt_tokens)
    loaded = load_model(directory, dtype="bfloat16")
    jax.tree.map(np.testing.assert_array_equal, trainer.learner.state.params, loaded.params)


@pytest.mark.slow
def test_a_loaded_model_is_trained_without_a_warm_start(trained):
    result, _ = trained
    records = train_records(result)
    assert len(records) == 2 and all(record["update_applied"] for record in records)
    assert not [record for record in result.metrics if record["kind"] == "warm_start"]
    # Sampler and trainer are one model: windows, soft caps and templates alike.
    assert max(record["drift_max"] for record in records) < 1e-4


@pytest.mark.slow
def test_the_run_is_exported_without_the_original(trained, tmp_path):
    result, _ = trained
    out = export.run_cli([str(result.run.path), str(tmp_path / "out")])
    again = load_model(out)
    jax.tree.map(np.testing.assert_array_equal, again.params, result.params)
    assert json.loads((out / "config.json").read_text())["dtype"] == "float32"


def test_stored_bits_come_back(directory, tmp_path, monkeypatch):
    from safetensors.numpy import load_file

    # fp32 in memory on the way; three files, so that the index is written and read.
    monkeypatch.setattr(export_module, "MAX_SHARD_BYTES", 30_000)
    back = export.run_cli([str(directory), str(tmp_path / "back"), "--dtype", "bfloat16"])
    stored = load_file(directory / "model.safetensors")
    files = sorted(back.glob("*.safetensors"))
    seen = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert len(files) > 1 and stored.keys() == seen.keys()
    for name in stored:
        np.testing.assert_array_equal(stored[name].view(np.uint16), seen[name].view(np.uint16))
    jax.tree.map(np.testing.assert_array_equal, load_model(back).params, load_model(directory).params)


@pytest.mark.slow
def test_evaluate_and_resume_read_the_runs_own_copy(trained, capsys):
    result, original = trained
    scores = evaluate.run_cli([str(result.run.path)])
    assert scores == result.after
    sizes = ["--task", "comparison:1", "--max-new-tokens", "3", "--num-prompts", "4"]
    first = evaluate.run_cli(["--model", str(original), *sizes])
    assert first == result.before
    resumed = grpo.run_cli(["--resume", str(result.run.path), "--schedule.steps", "3", "--quiet"])
    assert resumed.before == result.before and resumed.steps == 3


@pytest.mark.slow
def test_chat_streams_what_the_sampler_draws(directory):
    loaded = load_model(directory)
    prompt = np.array([loaded.tokenizer.encode_prompt("1 or 2?")], np.int32)
    inputs = (loaded.graph, loaded.params, prompt[0].tolist(), jax.random.key(0))
    drawn = list(stream_tokens(*inputs, StreamOptions(6, 0.0)))
    lengths = np.array([prompt.shape[1]], np.int32)
    model = nnx.merge(loaded.graph, loaded.params)
    wanted = sample(model, prompt, lengths, jax.random.key(0), rule(6, greedy=True))
    assert drawn == wanted.tokens[0].tolist()


def test_a_conversation_goes_on_and_ends_with_its_input(directory, capsys, monkeypatch):
    seen = []
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\nand now?\n"))
    encode = PretrainedTokenizer.encode_messages
    spy = lambda self, texts: seen.append([*texts]) or encode(self, texts)  # noqa: E731
    monkeypatch.setattr(PretrainedTokenizer, "encode_messages", spy)
    chat.run_cli([str(directory), "--max-new-tokens", "3", "--temperature", "0"])
    printed = capsys.readouterr().out
    first, second = seen
    assert first == [{"role": "user", "content": "hello"}]
    answer = second[1]
    assert second == [*first, answer, {"role": "user", "content": "and now?"}] and answer["role"] == "assistant"
    assert printed.startswith(answer["content"] + "\n") and len(printed) > len(answer["content"]) + 1


@pytest.mark.parametrize("is_person", [True, False])
def test_a_person_may_write_another_line_after_one_that_is_refused(is_person, capsys, monkeypatch):
    def answer(text):
        if text == "é":
            raise ValueError("text: expected other characters, got 'é'")
        return iter([text.upper()])

    lines = io.StringIO("é\nab\n")
    monkeypatch.setattr(lines, "isatty", lambda: is_person, raising=False)
    monkeypatch.setattr("sys.stdin", lines)
    monkeypatch.setattr(chat, "start", lambda config: SimpleNamespace(answer=answer))
    with contextlib.nullcontext() if is_person else pytest.raises(SystemExit, match="2"):
        chat.run_cli(["model"])
    printed = capsys.readouterr()
    assert printed.err.splitlines() == ["error: text: expected other characters, got 'é'"]
    assert ("AB" in printed.out) is is_person


def test_an_answer_is_printed_without_control_characters(capsys, monkeypatch):
    pieces = ["a\x1b[", "2J\x07", "\r\n\té", "\x9b\u202e"]
    monkeypatch.setattr(chat, "start", lambda config: SimpleNamespace(answer=lambda text: iter(pieces)))
    chat.run_cli(["model", "--prompt", "hello"])
    assert capsys.readouterr().out == "a\\x1b[2J\\x07\\r\n\té\\x9b\\u202e\n"


@pytest.mark.bad_input
@pytest.mark.parametrize(
    "key, value, wanted", [("block_count", 10**9, "at most 1000"), ("attention.head_count", 0, "a positive integer")]
)
def test_sizes_of_a_gguf_file_are_refused_before_anything_is_made_of_them(key, value, wanted, tmp_path, monkeypatch):
    monkeypatch.setitem(METADATA, key, value)
    with pytest.raises(ValueError, match=f"^tiny.gguf, llama.{key}: expected {wanted}, got {value}$"):
        open_pretrained(write_tiny_gguf(tmp_path / "tiny.gguf").path, chat_template=False)


@pytest.mark.bad_input
@pytest.mark.parametrize("kind", [0, 9])
def test_an_array_of_a_gguf_file_ends_with_the_file(kind, tmp_path):
    """2^40 bytes, or arrays of arrays, in the place of the tokens."""
    path = write_tiny_gguf(tmp_path / "tiny.gguf").path
    content = bytearray(path.read_bytes())
    key = b"tokenizer.ggml.tokens"
    place = content.index(key) + len(key)
    # After the key: that of an array, the type of its elements, their number.
    content[place + 4 :] = struct.pack("<IQ", kind, 2**40) * 2000
    path.write_bytes(content)
    with pytest.raises(ValueError, match="^gguf: expected a whole GGUF file, got tiny.gguf, which ends in "):
        open_pretrained(path, chat_template=False)


def test_a_gguf_file_goes_through_the_same_door(tmp_path):
    tiny_gguf = write_tiny_gguf(tmp_path / "tiny.gguf")
    out = export.run_cli([str(tiny_gguf.path), str(tmp_path / "out")])
    one, other = load_model(tiny_gguf.path), load_model(out)
    jax.tree.map(np.testing.assert_array_equal, one.params, other.params)
    text = "hello there 12<|im_end|>"
    assert one.tokenizer.encode(text) == other.tokenizer.encode(text)
    assert one.tokenizer.eos_ids == other.tokenizer.eos_ids
    assert other.config == one.config
    # Without it, vLLM would serve what transformers takes a Llama to be made for.
    assert one.config.context_length == json.loads((out / "config.json").read_text())["max_position_embeddings"] == 512
