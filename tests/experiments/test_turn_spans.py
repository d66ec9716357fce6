"""Labels of conversations: tables of tokens and labels of three chat templates, marked templates, borders, refusals."""

import pytest

from tests.experiments.word_tokenizer import TEMPLATES, word_tokenizer

SYSTEM = {"role": "system", "content": "Be brief"}
TALK = [
    SYSTEM, {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"},
    {"role": "user", "content": "Add"}, {"role": "assistant", "content": "One two"},
]  # fmt: skip
CHATML = """
    <|im_start|> system Ċ Be Ġbrief <|im_end|> Ċ
    <|im_start|> user Ċ Hi <|im_end|> Ċ
    <|im_start|> assistant Ċ Yo+ <|im_end|>+ Ċ
    <|im_start|> user Ċ Add <|im_end|> Ċ
    <|im_start|> assistant Ċ One+ Ġtwo+ <|im_end|>+ Ċ
"""
LLAMA3 = """
    <|begin|>
    <|start_header|> system <|end_header|> ĊĊ Be Ġbrief <|eot|>
    <|start_header|> user <|end_header|> ĊĊ Hi <|eot|>
    <|start_header|> assistant <|end_header|> ĊĊ Yo+ <|eot|>+
    <|start_header|> user <|end_header|> ĊĊ Add <|eot|>
    <|start_header|> assistant <|end_header|> ĊĊ One+ Ġtwo+ <|eot|>+
"""
MISTRAL = """
    <s> [INST] Ġ Be Ġbrief ĊĊ Hi [/INST] ĠYo+ </s>+
    [INST] Ġ Add [/INST] Ġ+ One+ Ġtwo+ </s>+
"""
# "+" behind a token says that it is a label.
TABLES = {
    "chatml": ("chatml", [2, 4], CHATML),
    "chatml, last turn": ("chatml", [4], CHATML.replace("Yo+ <|im_end|>+", "Yo <|im_end|>")),
    "chatml, a turn of the user": ("chatml", [1, 4], CHATML.replace("Yo+ <|im_end|>+", "Yo <|im_end|>")
                                   .replace("Hi <|im_end|>", "Hi+ <|im_end|>+")),
    "chatml, system": ("chatml", [0], CHATML.replace("+", "").replace("Be Ġbrief <|im_end|>", "Be+ Ġbrief+ <|im_end|>+")),
    "llama3": ("llama3", [2, 4], LLAMA3),
    "llama3, first turn": ("llama3", [2], LLAMA3.replace("One+ Ġtwo+ <|eot|>+", "One Ġtwo <|eot|>")),
    "llama3, all turns": ("llama3", [0, 1, 2, 3, 4], LLAMA3.replace("Be Ġbrief <|eot|>", "Be+ Ġbrief+ <|eot|>+")
                          .replace("Hi <|eot|>", "Hi+ <|eot|>+").replace("Add <|eot|>", "Add+ <|eot|>+")),
    "mistral": ("mistral", [2, 4], MISTRAL),
    "mistral, first turn": ("mistral", [2], MISTRAL.replace("Ġ+ One+ Ġtwo+ </s>+", "Ġ One Ġtwo </s>")),
    "mistral, a turn of the user": ("mistral", [3], MISTRAL.replace("+", "").replace("Add [/INST]", "Add+ [/INST]+")),
}  # fmt: skip
MARKED = TEMPLATES["chatml"].replace(
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}",
    "{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}",
)


def table(tokenizer, messages, turns):
    ids, labels = tokenizer.encode_turns(messages, turns)
    names = map(tokenizer.inner.id_to_token, ids)
    return [f"{name}+" if label else name for name, label in zip(names, labels, strict=True)]


@pytest.mark.parametrize(("family", "turns", "wanted"), TABLES.values(), ids=TABLES)
def test_labels_by_token(family, turns, wanted):
    tokenizer = word_tokenizer(family)
    assert table(tokenizer, TALK, turns) == wanted.split()
    ids, _ = tokenizer.encode_turns(TALK, turns)
    assert ids == tokenizer.encode(tokenizer.template.render(TALK, to_answer=False))


def test_the_ids_before_a_turn_are_those_of_its_prompt():
    for family in TEMPLATES:
        tokenizer = word_tokenizer(family)
        ids, labels = tokenizer.encode_turns(TALK, [4])
        assert ids[: labels.index(True)] == tokenizer.encode_messages(TALK[:4])


@pytest.mark.parametrize("turns", [[2, 4], [4], [2], [1, 4]])
def test_marks_of_the_template_say_the_same(turns):
    marked, plain = word_tokenizer("chatml", MARKED), word_tokenizer("chatml")
    assert marked.encode_turns(TALK, turns) == plain.encode_turns(TALK, turns)
    assert marked.encode_messages(TALK[:4]) == plain.encode_messages(TALK[:4])


def test_marks_serve_templates_that_write_a_turn_by_what_follows():
    thinking = "{{ '<think></think>' if loop.last else '' }}"
    assert MARKED.count("{{ m['content'] + '<|im_end|>' }}{% endgen") == 1
    marked = word_tokenizer("chatml", MARKED.replace("{% generation %}", "{% generation %}" + thinking))
    wanted = CHATML.replace("One+", "".join(f"{each}+ " for each in "<think></think>") + "One+")
    assert table(marked, TALK, [2, 4]) == wanted.split()


def test_marks_within_a_macro():
    block = "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}"
    source = f"{{% macro say(m) %}}{block}{{% endmacro %}}" + MARKED.replace(block, "{{ say(m) }}")
    assert table(word_tokenizer("chatml", source), TALK, [2, 4]) == CHATML.split()


SPACED = """\
{% for m in messages %}
{{- m['role'] + (': ' if m['role'] == 'assistant' else ':') + m['content'] + '\n' }}
{%- endfor %}"""


@pytest.mark.parametrize("trim_offsets", [True, False])
def test_a_token_over_the_border_belongs_to_the_turn_in_which_it_begins(trim_offsets):
    source = SPACED + "{% if add_generation_prompt %}assistant: {% endif %}"
    talk = [*(dict(each) for each in TALK[1:3]), {"role": "user", "content": "Bye"}]
    # "ĠYo" begins in the header; "Ċuser" begins in the turn and runs into the next one.
    wanted = "user : Hi Ċ assistant : ĠYo Ċuser+ : Bye Ċ"
    tokenizer = word_tokenizer("chatml", source, words="Ċuser", trim_offsets=trim_offsets)
    assert table(tokenizer, talk, [1]) == wanted.split()
    # Without such words, the tokens end where the turn begins and ends.
    talk[1]["content"] = "Hi"
    tokenizer = word_tokenizer("chatml", source, trim_offsets=trim_offsets)
    assert table(tokenizer, talk, [1]) == "user : Hi Ċ assistant : Ġ Hi+ Ċ+ user : Bye Ċ".split()


def test_an_end_token_within_the_content_does_not_end_a_turn_of_another_end():
    source = SPACED + "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    talk = [TALK[1], {"role": "assistant", "content": "One<|im_end|>two"}]
    wanted = "user : Hi Ċ assistant : Ġ One+ <|im_end|>+ two+ Ċ+"
    assert table(word_tokenizer("chatml", source), talk, [1]) == wanted.split()


def test_characters_of_several_bytes():
    talk = [{"role": "user", "content": "ü漢"}, {"role": "assistant", "content": "é\N{GRINNING FACE}"}]
    ids, labels = (tokenizer := word_tokenizer("chatml")).encode_turns(talk, [1])
    drawn = [number for number, label in zip(ids, labels, strict=True) if label]
    assert tokenizer.inner.decode(drawn, skip_special_tokens=False) == "é\N{GRINNING FACE}<|im_end|>"
    assert len(drawn) == 2 + 4 + 1


CHATML_LAST = TEMPLATES["chatml"].replace("m['content']", "m['content'] + ('!' if loop.last else '')")
OTHER_HEADER = TEMPLATES["chatml"].replace("assistant\n", "model\n")
EMPTY = "{% generation %}{% endgeneration %}"
ALONE = "expected a turn that does not depend on those after it, got another text without them"
MARK = "mark the turns of the assistant by {% generation %} in the template"
HEADER = "expected a turn that begins as its prompt ends, got another text; .*"
FOUR = "expected one block {% generation %} for each of 2 turns of the assistant, got 4 blocks"
CHANGED = MARKED.replace("{% generation %}", "{% generation %}{{ generation_start | length }}")
SHORT = "{% if messages | length == 0 %}{{ raise_exception('too short') }}{% endif %}"
REFUSED = {
    "by what follows": (CHATML_LAST, [2, 4], rf"messages\[2\] \(assistant\): {ALONE}; {MARK}"),
    "a user's turn by what follows": (CHATML_LAST, [1], rf"messages\[1\] \(user\): {ALONE}"),
    "another header": (OTHER_HEADER, [2], rf"messages\[2\] \(assistant\): {HEADER}"),
    "no content": ("{{ bos_token }}", [1], r"messages\[1\] \(user\): expected to write its content, got a text without it"),
    "two blocks": (MARKED.replace("{% endgeneration %}", "{% endgeneration %}" + EMPTY), [2], FOUR),
    "nested blocks": (MARKED.replace("{% generation %}", "{% generation %}" + EMPTY), [2], FOUR),
    "marks change the text": (CHANGED, [2], "expected the same text with and without marks, got another one with them"),
    "no empty conversation": (SHORT, [0], r"expected text for 0 messages, got ValueError\('too short'\)"),
}  # fmt: skip


@pytest.mark.bad_input
@pytest.mark.parametrize(("source", "turns", "words"), REFUSED.values(), ids=REFUSED)
def test_refuses_templates_that_do_not_tell_turns_apart(source, turns, words):
    talk = TALK[2:] if turns == [0] else TALK
    with pytest.raises(ValueError, match=f"^chat template[:,] {words}$"):
        word_tokenizer("chatml", source).encode_turns(talk, turns)
