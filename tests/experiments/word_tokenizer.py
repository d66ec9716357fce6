"""Byte-level tokenizers with a few whole words, and chat templates of three families."""

from experiments.models.huggingface.chat_template import ChatTemplate
from experiments.models.huggingface.tokenizer import PretrainedTokenizer

SPECIAL = {
    "chatml": ("<|im_end|>", "<|im_start|>"),
    "llama3": ("<|eot|>", "<|begin|>", "<|start_header|>", "<|end_header|>"),
    "mistral": ("</s>", "<s>", "[INST]", "[/INST]"),
}
"""Special tokens by family; the first one ends an answer."""
WORDS = "system user assistant Be brief Hi Yo Bye Add One two Ġtwo Ġbrief ĠYo ĊĊ"
"""Ġ is a space and Ċ a line break; with one of them in front, a word comes after the word itself."""
TEMPLATES = {
    "chatml": """\
{% for m in messages %}
{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}
{%- endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}""",
    "llama3": """\
{{- bos_token }}
{%- for m in messages %}
{{- '<|start_header|>' + m['role'] + '<|end_header|>\n\n' + m['content'] | trim + '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header|>assistant<|end_header|>\n\n' }}{% endif %}""",
    "mistral": """\
{%- set ns = namespace(system='') %}
{{- bos_token }}
{%- for m in messages %}
{%- if m['role'] == 'system' %}{% set ns.system = m['content'] + '\n\n' %}
{%- elif m['role'] == 'user' %}{{ '[INST] ' + ns.system + m['content'] + '[/INST]' }}{% set ns.system = '' %}
{%- else %}{{ ' ' + m['content'] + eos_token }}
{%- endif %}
{%- endfor %}""",
}


def word_tokenizer(family, source=None, *, words="", trim_offsets=True):
    """The tokenizer of a family, with its template or another one, and with further words."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    vocabulary = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = []
    for word in f"{WORDS} {words}".split():
        pairs = [(word[: end - 1], word[end - 1]) for end in range(2, len(word) + 1)]
        pairs = [(word[0], word[1:])] if word[0] in "ĠĊ" else pairs
        merges += [pair for pair in pairs if pair not in merges]
        vocabulary += [token for token in map("".join, pairs) if token not in vocabulary]
    inner = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(vocabulary)}, merges=merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL[family]])
    end = inner.token_to_id(SPECIAL[family][0])
    named = {"eos_token": SPECIAL[family][0], "bos_token": SPECIAL[family][1]}
    return PretrainedTokenizer(inner, (end,), end, ChatTemplate(source or TEMPLATES[family], named))
