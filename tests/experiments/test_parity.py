"""Against Hugging Face transformers itself, on tiny random models of every family; needs the extra parity.

python -m pytest -m parity tests/experiments/test_parity.py
"""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import jinja2
import numpy as np
import pytest
from flax import nnx

from experiments.loop.load import load_model
from experiments.models.huggingface.chat_template import ChatTemplate
from experiments.models.huggingface.export import export
from experiments.models.huggingface.own_tokenizers import pretrained_form
from experiments.models.huggingface.turn_spans import render_turns
from experiments.models.parameters import abstract_decoder
from experiments.models.pretrained import open_pretrained, small_files
from experiments.models.tokenizer import ByteTokenizer, CharTokenizer
from experiments.sampling.options import SamplingOptions
from experiments.sampling.sample_token import logits_of, sample_token
from tests.experiments.samples import rule, sample
from tests.experiments.tiny_directory import CONFIGS, VOCAB, decoder_on_disk, write_tiny_directory

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("default")]
transformers = pytest.importorskip("transformers", reason="the extra parity is not installed")
chat_template_utils = pytest.importorskip(
    "transformers.utils.chat_template_utils", reason="the extra parity is not installed"
)
torch = pytest.importorskip("torch", reason="the extra parity is not installed")

TOKENS = np.random.RandomState(2).randint(0, VOCAB, (3, 24)).astype(np.int32)
NEW = 32
ROWS, IDS = 400, 500


def theirs(path):
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    return transformers.AutoModelForCausalLM.from_pretrained(path, **options).eval()


def their_logits(model, tokens):
    with torch.no_grad():
        return model(input_ids=torch.tensor(tokens).long()).logits.numpy()


@jax.jit
def hidden_of(model, tokens):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    return model.hidden_states(tokens, positions, jnp.zeros_like(tokens))


def our_logits(model, tokens):
    spec, weight = model.head()
    hidden = hidden_of(model, jnp.asarray(tokens))
    return np.asarray(logits_of(hidden.reshape(-1, hidden.shape[-1]), spec, weight)).reshape(*tokens.shape, -1)


@pytest.fixture(scope="module", params=CONFIGS)
def directory(request, tmp_path_factory):
    return write_tiny_directory(tmp_path_factory.mktemp("models") / request.param, request.param)


def test_logits_and_greedy_continuations_through_the_cache_are_equal(directory):
    model, reference = decoder_on_disk(directory), theirs(directory)
    seen, wanted = our_logits(model, TOKENS), their_logits(reference, TOKENS)
    np.testing.assert_allclose(seen, wanted, atol=1e-4, rtol=0)
    # Prompts of three lengths, so that windows pass the empty slots behind the shorter ones. No token is the end.
    lengths = np.array([24, 9, 1], np.int32)
    drawn = sample(model, TOKENS, lengths, jax.random.key(0), rule(NEW, greedy=True))
    for row, length in enumerate(lengths):
        prompt = torch.tensor(TOKENS[row : row + 1, :length]).long()
        settings = transformers.GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0)
        with torch.no_grad():
            generated = reference.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=settings)
        np.testing.assert_array_equal(drawn.tokens[row], generated[0, length:].numpy())


def test_an_exported_directory_has_the_logits_of_the_first(directory, tmp_path):
    loaded = load_model(directory)
    export(loaded.params, loaded.config, loaded.files(), tmp_path / "out", "float32")
    first, again = (their_logits(theirs(path), TOKENS) for path in (directory, tmp_path / "out"))
    np.testing.assert_array_equal(again, first)


@pytest.mark.parametrize("family", CONFIGS)
def test_a_written_config_json_is_the_same_model_in_transformers(family, tmp_path):
    from experiments.models.huggingface.export import made_files

    directory = write_tiny_directory(tmp_path / "in", family)
    found = open_pretrained(directory)
    params = load_model(directory).params
    export(params, found.config, made_files(found.config, found.tokenizer), tmp_path / "out", "float32")
    seen, wanted = their_logits(theirs(tmp_path / "out"), TOKENS), their_logits(theirs(directory), TOKENS)
    np.testing.assert_allclose(seen, wanted, atol=1e-6, rtol=0)


def test_prompts_are_those_of_transformers(tmp_path):
    directory = write_tiny_directory(tmp_path / "in")
    ours, reference = open_pretrained(directory).tokenizer, transformers.AutoTokenizer.from_pretrained(directory)
    messages = [{"role": "user", "content": "2 + 2 = é"}, {"role": "assistant", "content": "4"}]
    messages.append({"role": "user", "content": "and 3?\n"})
    wanted = reference.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ours.encode_messages(messages) == wanted
    # Without the first, a special token that generation_config.json has among those that end an answer.
    assert ours.decode(wanted[1:8]) == reference.decode(wanted[1:8], skip_special_tokens=True) == "2 + 2 ="


CONVERSATION = [
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "It is 4."},
    {"role": "user", "content": " And 3 + é?\n"},
    {"role": "assistant", "content": "6."},
]


def test_published_templates_are_rendered_as_by_transformers_and_their_marks_are_followed():
    """Those that TRL has of some 30 models, but for those that ask for the day, which is not told here."""
    trl = pytest.importorskip("trl", reason="the extra parity is not installed")
    sources = {path.stem: path.read_text() for path in (Path(trl.__file__).parent / "chat_templates").glob("*.jinja")}
    tokens = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    system = {"role": "system", "content": "Be brief."}
    differing, marked = [], 0
    for name, source in sources.items():
        if "strftime_now" in source:
            continue
        for messages in (CONVERSATION, [system, *CONVERSATION]):
            for to_answer in (True, False):
                given = messages[:-1] if to_answer else messages
                wanted, marks = render_in_transformers(given, source, to_answer, tokens)
                if rendered(source, tokens, given, to_answer) != wanted:
                    differing.append((name, len(given)))
            turns = [number for number, each in enumerate(messages) if each["role"] == "assistant"]
            # Several marks for a turn are refused here.
            if len(marks) == len(turns):
                marked += 1
                _, spans = render_turns(ChatTemplate(source, tokens), messages, turns)
                if [tuple(span) for span in spans] != marks:
                    differing.append((name, "marks"))
    assert differing == [] and len(sources) > 60 and marked > 40


def render_in_transformers(messages, source, to_answer, tokens):
    """The text and the marks of a template; None and none if it refuses the messages."""
    options = {"add_generation_prompt": to_answer, "return_assistant_tokens_mask": True, **tokens}
    try:
        texts, marks = chat_template_utils.render_jinja_template([messages], chat_template=source, **options)
    except jinja2.exceptions.TemplateError:
        return None, []
    return texts[0], marks[0]


def rendered(source, tokens, messages, to_answer):
    try:
        return ChatTemplate(source, tokens).render(messages, to_answer=to_answer)
    except ValueError:
        return None


@pytest.mark.parametrize("tokenizer", [CharTokenizer("0123456789+="), ByteTokenizer()])
def test_the_own_tokenizers_read_the_same_in_transformers(tokenizer, tmp_path):
    from experiments.models.huggingface.export import made_files

    config = open_pretrained(write_tiny_directory(tmp_path / "in")).config
    config = dataclasses.replace(config, vocab_size=tokenizer.vocab_size)
    params = nnx.state(nnx.merge(*zeros(config)))
    export(params, config, made_files(config, pretrained_form(tokenizer)), tmp_path / "out", "bfloat16")
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "37+48=" if isinstance(tokenizer, CharTokenizer) else "37 + é = \n"
    assert reference(text)["input_ids"] == tokenizer.encode_prompt(text)
    assert reference.decode(tokenizer.encode(text)) == text
    again = open_pretrained(tmp_path / "out", chat_template=False)
    assert again.tokenizer.encode_prompt(text) == tokenizer.encode_prompt(text)
    assert again.tokenizer.decode([*again.tokenizer.encode(text), 2, 5]) == text
    assert small_files(again)["config.json"].count(b"bfloat16") == 1


def zeros(config):
    graph, state = abstract_decoder(config)
    return graph, jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), state)


def kept_here(logits, temperature=1.0, **filters):
    keys, room = jax.random.split(jax.random.key(0), ROWS), np.full(ROWS, IDS, np.int32)
    return np.asarray(sample_token(logits, keys, SamplingOptions(1, temperature, **filters), room).kept)


def kept_there(logits, top_k=0, **options):
    """By the processors of transformers, in the order in which its `generate` applies them."""
    config = transformers.GenerationConfig(do_sample=True, top_k=top_k, **options)
    processors = transformers.GenerationMixin()._get_logits_processor(config)
    return torch.isfinite(processors(None, torch.tensor(logits))).numpy()


def on_the_edge(logits, temperature=1.0, top_k=IDS, top_p=1.0, min_p=0.0):
    """Ids that a rounding in fp32 may keep or leave out, found in float64."""
    scaled = logits.astype(np.float64) / temperature
    scaled -= scaled.max(axis=1, keepdims=True)
    weights = np.where(scaled >= np.sort(scaled)[:, -min(top_k, IDS), None], np.exp(scaled), 0.0)
    order = np.argsort(-weights, axis=1)
    in_order = np.take_along_axis(weights / weights.sum(axis=1, keepdims=True), order, axis=1)
    before = np.take_along_axis(np.cumsum(in_order, axis=1) - in_order, np.argsort(order, axis=1), axis=1)
    edge = np.zeros_like(before, bool)
    if top_p < 1.0:
        # Each side adds n numbers that sum to 1: n independent roundings, of which this is four deviations.
        edge |= np.abs(before - top_p) <= 2 * 4 * np.sqrt(np.count_nonzero(weights, axis=1).max()) * 2.0**-24
    if min_p > 0.0:
        # Each side rounds at most four numbers below 32.
        edge |= np.abs(scaled - np.log(min_p)) <= 8 * 32 * 2.0**-24
    return edge


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 20},
        {"top_k": IDS + 1, "top_p": 0.9},
        {"top_p": 0.3, "temperature": 1.5},
        {"min_p": 0.05, "temperature": 0.7},
        {"top_k": 5, "top_p": 0.6},
        {"top_p": 0.9, "min_p": 0.1, "temperature": 1.3},
        {"top_k": 30, "top_p": 0.95, "min_p": 0.02, "temperature": 0.6},
    ],
    ids=str,
)
def test_the_sampler_keeps_the_ids_that_transformers_keeps(options):
    logits = (3 * np.random.default_rng(0).normal(size=(ROWS, IDS))).astype(np.float32)
    edge, here, there = on_the_edge(logits, **options), kept_here(logits, **options), kept_there(logits, **options)
    np.testing.assert_array_equal(here[~edge], there[~edge])
    assert edge.sum() <= 0.02 * ROWS and there.sum(axis=1).min() < IDS / 10


def test_ties_with_the_last_id_are_kept_as_in_transformers_and_by_top_p_too_of_which_it_keeps_the_first_sorted():
    logits = np.round(3 * np.random.default_rng(0).normal(size=(ROWS, IDS))).astype(np.float32)
    for options in ({"top_k": 20}, {"min_p": 0.03}, {"top_k": 20, "min_p": 0.2}):
        np.testing.assert_array_equal(kept_here(logits, **options), kept_there(logits, **options))
    here, there = kept_here(logits, top_p=0.7), kept_there(logits, top_p=0.7)
    lowest = np.where(there, logits, np.inf).min(axis=1, keepdims=True)
    np.testing.assert_array_equal(here, logits >= lowest)
    assert (here.sum(axis=1) > there.sum(axis=1)).mean() > 0.5
