"""Hugging Face directories: what transformers computes of them, how weights reach a mesh, and what is refused."""

import dataclasses
import json
import re
import resource
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from experiments import grpo
from experiments.models import decoder as decoder_module
from experiments.models.huggingface import chat_template
from experiments.models.huggingface.chat_template import _PROCESS, ChatTemplate
from experiments.models.huggingface.config import config_json, decoder_config
from experiments.models.huggingface.files import JsonObject
from experiments.models.mesh import MeshSpec, make_mesh
from experiments.models.parameters import abstract_decoder
from experiments.models.pretrained import open_pretrained
from experiments.models.sharding import parameter_shardings
from experiments.sampling.sample_token import logits_of
from tests.experiments.tiny import refusal
from tests.experiments.tiny_directory import CONFIGS, END, SPECIAL, random_tensors, write_tiny_directory

GOLDEN = Path(__file__).parent / "golden" / "family_logits.npz"
FAMILIES = ("llama3", "qwen2", "qwen3", "mistral", "gemma2", "gemma3")


def one_device(state):
    return jax.tree.map(lambda _: jax.sharding.SingleDeviceSharding(jax.devices()[0]), state)


def load(path, shardings=one_device, **changes):
    """Graph and parameters of a directory."""
    found = open_pretrained(path)
    config = dataclasses.replace(found.config, **changes)
    return abstract_decoder(config)[0], found.weights().load(config, shardings)


def family_logits(family, folder, **changes):
    """Some of our logits of a family's tiny directory, and those of transformers."""
    graph, params = load(write_tiny_directory(folder / family, family), **changes)
    golden = np.load(GOLDEN, allow_pickle=False)

    @jax.jit
    def logits(params, tokens):
        model = nnx.merge(graph, params)
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
        spec, weight = model.head()
        hidden = model.hidden_states(tokens, positions, jnp.zeros_like(tokens))
        return logits_of(hidden.reshape(-1, hidden.shape[-1]), spec, weight)

    return np.asarray(logits(params, golden["tokens"])).reshape(2, 24, -1)[..., ::5], golden[family]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(family, tmp_path, monkeypatch):
    # One layer is traced for all, which compiles faster and shows that windows and tables reach each layer of a scan.
    monkeypatch.setattr(decoder_module, "MAX_UNROLLED_LAYERS", 0)
    # fp32 on both sides, logits of up to about 7.
    np.testing.assert_allclose(*family_logits(family, tmp_path), atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", CONFIGS)
def test_config_json_is_written_so_that_it_reads_back_the_same(family):
    config = decoder_config(JsonObject("config.json", CONFIGS[family]))
    assert decoder_config(JsonObject("config.json", config_json(config))) == config
    computed = dataclasses.replace(config, dtype="bfloat16", residual_dtype="float32", remat="full")
    assert config_json(computed) == config_json(config), "how a model is computed is not its own"


def test_both_spellings_of_rotary_options_are_one():
    scaling = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    plain = {key: value for key, value in CONFIGS["llama3"].items() if key != "rope_parameters"}
    older = plain | {"rope_theta": 500.0, "rope_scaling": {"type": "llama3", **scaling}}
    newer = CONFIGS["llama3"]
    assert decoder_config(JsonObject("a", older)) == decoder_config(JsonObject("a", newer))
    gemma = {key: value for key, value in CONFIGS["gemma3"].items() if key != "rope_parameters"}
    scaling = {"rope_type": "linear", "factor": 4.0}
    older = {"rope_theta": 1000.0, "rope_local_base_freq": 100.0, "rope_scaling": scaling}
    assert decoder_config(JsonObject("a", gemma | older)) == decoder_config(JsonObject("a", CONFIGS["gemma3"]))


def test_bases_next_to_rope_parameters_count_where_these_have_none():
    unscaled = {"rope_type": "default"}
    bases = {"rope_theta": 500.0, "rope_local_base_freq": 50.0}
    llama = decoder_config(JsonObject("a", CONFIGS["llama3"] | {"rope_parameters": unscaled} | bases))
    assert llama.rope_theta == 500.0
    by_kind = {"full_attention": unscaled, "sliding_attention": unscaled}
    gemma = decoder_config(JsonObject("a", CONFIGS["gemma3"] | {"rope_parameters": by_kind} | bases))
    assert (gemma.rope_theta, gemma.sliding.rope_theta) == (500.0, 50.0)


def test_windows_belong_to_the_layers_that_the_type_says():
    layers = {name: decoder_config(JsonObject("a", CONFIGS[name])).sliding for name in CONFIGS}
    assert layers["mistral"].layers == (True, True, True) and layers["mistral"].window == 7
    assert layers["qwen2"].layers == (False, True, True) and layers["qwen2.5"] is None and layers["llama3"] is None
    assert layers["gemma2"].layers == (True, False, True) and layers["gemma3"].layers == (True, True, False)
    none = CONFIGS["mistral"] | {"sliding_window": None}
    assert decoder_config(JsonObject("a", none)).sliding is None


@pytest.mark.parametrize(("family", "missing"), [("gemma2", (50.0, 30.0)), ("gemma3", (None, None))])
def test_soft_caps_that_are_not_named_are_those_of_the_type(family, missing):
    keys = ("attn_logit_softcapping", "final_logit_softcapping")
    unnamed = {key: value for key, value in CONFIGS[family].items() if key not in keys}
    for values, caps in ((unnamed, missing), (unnamed | dict.fromkeys(keys), (None, None))):
        config = decoder_config(JsonObject("a", values))
        assert (config.attention_softcap, config.logit_softcap) == caps


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("llama3", {"model_type": "mixtral"}, "config.json, model_type: expected one of llama"),
        ("llama3", {"model_type": None}, "config.json: expected the key model_type, got none"),
        ("llama3", {"quantization_config": {"bits": 4}}, "quantization_config: expected weights that are not quantised"),
        ("qwen3", {"num_experts": 8}, "num_experts: expected no mixture of experts, got 8"),
        ("llama3", {"attention_bias": True}, "attention_bias: expected no bias on the attention's output, got True"),
        ("llama3", {"mlp_bias": True}, "mlp_bias: expected no biases in the gated products"),
        ("llama3", {"partial_rotary_factor": 0.5}, "partial_rotary_factor: expected whole heads that are rotated"),
        (
            "qwen3", {"rope_parameters": {"partial_rotary_factor": 0.5}},
            "rope_parameters, partial_rotary_factor: expected whole heads",
        ),
        ("qwen3", {"rope_parameters": {"rope_type": "yarn"}}, "rope_type: expected default, linear or llama3, got 'yarn'"),
        ("llama2", {"rope_scaling": {"type": "dynamic"}}, "rope_type: expected default, linear or llama3"),
        (
            "llama2", {"rope_scaling": {"factor": 4.0}},
            "config.json, rope_scaling: expected the key rope_type next to factor, got none",
        ),
        ("llama3", {"hidden_act": "relu"}, "hidden_act: expected one of silu"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention: expected attention to earlier"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping: expected none in gemma3_text, got one"),
        ("gemma2", {"layer_types": ["full_attention"]}, "layer_types: expected 3 of sliding_attention"),
        ("llama3", {"layer_types": 3}, "layer_types: expected a list without sliding_attention, as there is no window"),
        ("llama3", {"hidden_size": "32"}, "hidden_size: expected a positive integer, got '32'"),
        ("llama3", {"num_hidden_layers": 10**6}, "num_hidden_layers: expected at most 1000, got 1000000"),
        ("llama3", {"num_key_value_heads": 3}, "num_kv_heads: expected a divisor of 4 query heads, got 3"),
        ("llama3", {"auto_map": {"AutoModel": "own.py"}}, "auto_map: expected a model type of transformers without code"),
    ],
)  # fmt: skip
def test_what_cannot_be_expressed_is_refused_by_name(family, changes, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        decoder_config(JsonObject("config.json", CONFIGS[family] | changes))


@pytest.mark.bad_input
def test_a_model_that_transformers_does_not_have_is_not_written():
    config = decoder_config(JsonObject("a", CONFIGS["llama3"]))
    words = "export: expected a model that transformers has .* got one with .*logit_scale"
    with pytest.raises(ValueError, match=words):
        config_json(dataclasses.replace(config, logit_scale=0.5))


def test_shards_reach_a_mesh_as_one_file_reaches_one_device(tmp_path):
    _, whole = load(write_tiny_directory(tmp_path / "whole"))
    mesh = make_mesh(MeshSpec(data=2, tensor=2))
    _, split = load(write_tiny_directory(tmp_path / "split", shards=4), lambda state: parameter_shardings(state, mesh))
    places = jax.tree.leaves(parameter_shardings(whole, mesh))
    assert [leaf.sharding for leaf in jax.tree.leaves(split)] == places
    assert any(not place.is_fully_replicated for place in places)
    jax.tree.map(np.testing.assert_array_equal, split, whole)


@pytest.mark.parametrize("stored, wanted", [("float32", "bfloat16"), ("bfloat16", "float32"), ("float16", "float32")])
def test_dtypes_are_converted(stored, wanted, tmp_path):
    _, params = load(write_tiny_directory(tmp_path / "a", dtype=stored), param_dtype=wanted)
    expected = jnp.asarray(random_tensors(CONFIGS["llama3"])["model.norm.weight"]).astype(stored).astype(wanted)
    seen = nnx.to_pure_dict(params)["norm"]["scale"]
    assert seen.dtype == wanted
    np.testing.assert_array_equal(seen, expected)


@pytest.mark.bad_input
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_found_in_bf16_too(bad, tmp_path):
    path = write_tiny_directory(tmp_path / "a", dtype="bfloat16")
    tensors, name = load_file(path / "model.safetensors"), "model.layers.1.mlp.up_proj.weight"
    tensors[name][2:4] = jnp.finfo(jnp.bfloat16).max
    save_file(tensors, path / "model.safetensors")
    load(path, param_dtype="bfloat16")
    tensors[name][3, 7] = bad
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(
        ValueError, match=rf"^weights, tensor {name}: expected finite .* in bfloat16, got .* at \[3, 7\]"
    ):
        load(path, param_dtype="bfloat16")


def test_a_tied_head_may_be_stored_again_but_only_as_a_copy(tmp_path):
    path = write_tiny_directory(tmp_path / "a", "smollm2")
    tensors = load_file(path / "model.safetensors")
    copy = tensors["model.embed_tokens.weight"].copy()
    save_file({**tensors, "lm_head.weight": copy}, path / "model.safetensors")
    load(path)
    save_file({**tensors, "lm_head.weight": copy + 1}, path / "model.safetensors")
    with pytest.raises(ValueError, match="lm_head.weight: expected a copy of model.embed_tokens.weight"):
        load(path)


PEAK_MEMORY = """
import re, sys
from pathlib import Path
import jax, numpy as np
from experiments.models.pretrained import open_pretrained
found = open_pretrained(sys.argv[1])
place = lambda state: jax.tree.map(lambda _: jax.sharding.SingleDeviceSharding(jax.devices()[0]), state)
# Of this program alone; getrusage counts what the process was before it.
peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
before = peak()
params = found.weights().load(found.config, place)
after = peak()
size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
print((after - before) / size, size)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
@pytest.mark.costly
def test_the_host_never_holds_a_second_copy(tmp_path):
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 32, "head_dim": 128}
    path = write_tiny_directory(tmp_path / "a", shards=2, **sizes)
    command = [sys.executable, "-c", PEAK_MEMORY, str(path)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    ratio, size = map(float, done.stdout.split())
    assert size > 200e6
    # The parameters themselves, on a CPU in the same memory, one stacked matrix of a fifth of them, and a quarter of it for
    # each of: the layers on their way, as they are stored, and what their threads keep of freed ones. Copies to the device
    # go on beside the reading: on a busy machine two matrices more are on their way. A second copy would make it 2.
    assert 1.0 <= ratio < 1.8


def test_prompts_go_through_the_chat_template_and_end_tokens_come_from_both_files(tmp_path):
    tokenizer = open_pretrained(write_tiny_directory(tmp_path / "a")).tokenizer
    user, model = (tokenizer.inner.token_to_id(token) for token in SPECIAL[1:])
    assert tokenizer.encode_prompt("2+2=") == [user, *tokenizer.encode("2+2="), END, model]
    assert (tokenizer.eos_ids, tokenizer.pad_id, tokenizer.vocab_size) == ((END, END + 1), END, 259)
    assert tokenizer.decode([*tokenizer.encode("é42"), END + 1, 7]) == "é42"
    assert tokenizer.decode([*tokenizer.encode("4"), 262, *tokenizer.encode("2")]) == "4\ufffd2"
    assert len(tokenizer.encode_prompt("é" * 20)) <= tokenizer.longest_prompt(40)
    messages = [{"role": role, "content": text} for role, text in (("user", "a"), ("assistant", "b"), ("user", "c"))]
    text = tokenizer.inner.decode(tokenizer.encode_messages(messages), skip_special_tokens=False)
    assert text == "<|user|>a<|end|><|model|>b<|end|><|user|>c<|end|><|model|>"


def test_a_template_cannot_reach_out_of_its_sandbox(tmp_path):
    path = write_tiny_directory(tmp_path / "a")
    (path / "chat_template.jinja").write_text("{{ ''.__class__.__mro__[1].__subclasses__() }}", encoding="utf-8")
    with pytest.raises(ValueError, match="chat template: expected text for 1 messages, got SecurityError"):
        open_pretrained(path).tokenizer.encode_prompt("a")
    (path / "chat_template.jinja").write_text("{{ messages[0].content }}", encoding="utf-8")
    assert open_pretrained(path).tokenizer.longest_prompt(5) == 5


WITHOUT_BOUND = {
    "{{ 'A' * 1000000000 }}": "more than 160 MiB of memory",
    "{{ ('a\\n' * 100000) | indent(100000) }}": "more than 160 MiB of memory",
    "{{ 'a' | center(10 ** 9) }}": "more than 160 MiB of memory",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}": "more than 1 s of computing",
    "{{ 10 ** (10 ** 9) }}": "more than 1 s of computing",
    "{% for a in range(99999) %}{{ 'b' * 1000 }}{% endfor %}": "more than 4194304 characters",
}


@pytest.mark.bad_input
@pytest.mark.parametrize("source", WITHOUT_BOUND)
def test_a_template_has_so_much_time_memory_and_output(source, monkeypatch):
    if "memory" in WITHOUT_BOUND[source]:
        # Taken page by page, where a page is slow to come by: the time would be up first.
        monkeypatch.setattr(chat_template, "MAX_SECONDS", 60)
        _PROCESS.close()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match=f"^chat template: expected .*, got {WITHOUT_BOUND[source]}$"):
        ChatTemplate(source, {}).render([{"role": "user", "content": "a"}])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # KiB; the renderer is another process
    # The next one is rendered, in a new process where the kernel has ended the old one.
    assert ChatTemplate("{{ messages[0].content }}{{ b }}", {"b": "é\n"}).render([{"content": "a"}]) == "aé\n"
    # That of the next test has its second again.
    _PROCESS.close()


def test_an_interrupted_rendering_leaves_no_reply_to_the_next(monkeypatch):
    template = ChatTemplate("{{ messages[0].content }}", {})

    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr(_PROCESS._process.stdout, "readline", interrupt)
    with pytest.raises(KeyboardInterrupt):
        template.render([{"content": "first"}])
    monkeypatch.undo()
    assert template.render([{"content": "second"}]) == "second"


def change_json(name, change):
    def spoil(path):
        change(values := json.loads((path / name).read_text(encoding="utf-8")))
        (path / name).write_text(json.dumps(values), encoding="utf-8")

    return spoil


INDEX = "model.safetensors.index.json"
HEAD = f"{INDEX}, tensor lm_head.weight"


def change_map(change):
    """Another file for the head."""
    names = lambda index: index["weight_map"]  # noqa: E731
    return change_json(INDEX, lambda index: names(index).update({"lm_head.weight": change(names(index))}))


def remove(name):
    return lambda path: (path / name).unlink()


def layers(number):
    return change_json("config.json", lambda config: config.update(num_hidden_layers=number))


def cut_short(path):
    file = path / "model-00002-of-00003.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


EMBEDDING = "model.embed_tokens.weight"
THIRD = "model-00003-of-00003.safetensors"


def change_embedding(change):
    def spoil(path):
        weight_map = json.loads((path / "model.safetensors.index.json").read_text(encoding="utf-8"))["weight_map"]
        file = path / weight_map[EMBEDDING]
        tensors = load_file(file)
        save_file({**tensors, EMBEDDING: change(tensors[EMBEDDING].copy())}, file)

    return spoil


def with_nan(table):
    table[3, 5] = np.nan
    return table


WORDS = {f"word{number}": 300 + number for number in range(3)}
BAD = {
    "config.json: expected JSON, got Exceeds the limit (4300 digits)": lambda path: (path / "config.json").write_text(
        f'{{"hidden_size": {"1" * 4301}}}'
    ),
    "model-00002-of-00003.safetensors: expected a whole safetensors file, got": cut_short,
    f"model weights: expected a directory with {THIRD}": remove(THIRD),
    f"{HEAD}: expected the name of a safetensors file": change_map(lambda names: "../other/model.safetensors"),
    f"{HEAD}: expected the name of a safetensors file of this directory, got 'xxx": change_map(
        lambda names: f"{'x' * 5000}.safetensors"
    ),
    f"{HEAD}: expected to be in": change_map(lambda names: names["model.norm.weight"]),
    f"weights, tensor {EMBEDDING}: expected shape [264, 32], got [263, 32]": change_embedding(lambda x: x[:-1].copy()),
    f"weights, tensor {EMBEDDING}: expected finite numbers in float32, got nan at [3, 5]": change_embedding(with_nan),
    "model weights: expected no other tensors than the model's, got model.layers.2.input_layernorm.weight": layers(2),
    "model weights: expected every tensor of the model, got no model.layers.3.": layers(4),
    "tokenizer: expected at most 264 ids, the rows of the embedding, got 303": change_json(
        "tokenizer.json", lambda tokenizer: tokenizer["model"]["vocab"].update(WORDS)
    ),
    "tokenizer, end and padding tokens: expected ids below 264, got (256, 9000, 256)": change_json(
        "generation_config.json", lambda config: config.update(eos_token_id=[9000])
    ),
    "tokenizer: expected a chat template (or --model.no-chat-template": change_json(
        "tokenizer_config.json", lambda config: config.pop("chat_template")
    ),
    "tokenizer: expected a chat template (or --model.no-chat-template, for prompts as they are), got none": change_json(
        "tokenizer_config.json", lambda config: config.update(chat_template=[{"name": ["default"], "template": "a"}])
    ),
    "tokenizer_config.json, eos_token: expected text that UTF-8 can hold, got '\\ud800'": change_json(
        "tokenizer_config.json", lambda config: config.update(eos_token="\ud800")
    ),
    "tokenizer_config.json, eos_token: expected a token of tokenizer.json, got '</s>'": change_json(
        "tokenizer_config.json", lambda config: config.update(eos_token="</s>")
    ),
    "tokenizer_config.json, bos_token: expected a token of tokenizer.json, got '<s>'": change_json(
        "tokenizer_config.json", lambda config: config.update(bos_token="<s>")
    ),
    "chat template: expected a Jinja program, got": lambda path: (path / "chat_template.jinja").write_text("{% for %}"),
    "model directory: expected one with tokenizer": remove("tokenizer.json"),
}


@pytest.mark.bad_input
@pytest.mark.parametrize("words", BAD)
def test_a_bad_directory_ends_in_one_line_exit_code_2_and_no_run(words, tmp_path, capsys):
    path = write_tiny_directory(tmp_path / "model", shards=3)
    BAD[words](path)
    # Little to do, where it is not refused.
    short = ["--schedule.steps", "0", "--evaluation.num-prompts", "1", "--rollout.max-new-tokens", "2"]
    assert refusal(capsys, grpo, ["--model.path", str(path), "--out", str(tmp_path / "runs"), *short]).startswith(words)
    assert not (tmp_path / "runs").exists()


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("", "chat template: expected text for 1 messages, got an empty text"),
        ("{{ '\\ud800' }}", "chat template: expected text that UTF-8 can hold, got half of a surrogate pair"),
    ],
)
def test_a_template_that_writes_nothing_to_read_is_refused(source, words, tmp_path):
    path = write_tiny_directory(tmp_path / "model")
    (path / "chat_template.jinja").write_text(source, encoding="utf-8")
    with pytest.raises(ValueError, match=f"^{words}$"):
        open_pretrained(path).tokenizer.encode_prompt("a")
    (path / "chat_template.jinja").write_text("{{ messages[0].content }}", encoding="utf-8")
    assert open_pretrained(path).tokenizer.longest_prompt(5) == 5
