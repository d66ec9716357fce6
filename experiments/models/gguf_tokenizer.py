"""The byte-level BPE tokenizer of a GGUF file, from the vocabulary and the merges that the file holds.

Needs the extra `gguf` (package tokenizers). What is not in the file is how text is cut into words before the merges; the
file only names it. The name known here is "smollm": every digit on its own, the rest by GPT-2's pattern.
"""

from experiments.extras import import_extra
from experiments.models.gguf import GgufFile
from experiments.models.huggingface.chat_template import ChatTemplate
from experiments.models.huggingface.tokenizer import PretrainedTokenizer
from jaxlogp.errors import require

MODEL, SPLIT = "gpt2", "smollm"
CONTROL = 3
"""Type of a token that stands for no text, such as the end of a document."""


def load_gguf_tokenizer(file: GgufFile, *, chat_template: bool | None = True) -> PretrainedTokenizer:
    """Returns the tokenizer in a file; ValueError for another kind, or without the extra or a chat template it needs."""
    package = import_extra("tokenizers", "gguf", "gguf")
    for key, expected in (("tokenizer.ggml.model", MODEL), ("tokenizer.ggml.pre", SPLIT)):
        require(file.value(key) == expected, f"gguf, {key}", repr(expected), repr(file.value(key)))
    tokens, types = file.value("tokenizer.ggml.tokens"), file.value("tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in file.value("tokenizer.ggml.merges")]
    vocabulary = {token: place for place, token in enumerate(tokens)}
    try:
        inner = package.Tokenizer(package.models.BPE(vocab=vocabulary, merges=merges))
    # The package raises bare exceptions for all that it cannot read.
    except Exception as error:
        expected = "pairs of tokens that make a token"
        raise ValueError(f"gguf, tokenizer.ggml.merges: expected {expected}, got {error}") from None
    before = package.pre_tokenizers
    digits, byte_level = before.Digits(individual_digits=True), before.ByteLevel(add_prefix_space=False)
    inner.pre_tokenizer = before.Sequence([digits, byte_level])
    inner.decoder = package.decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL]
    inner.add_special_tokens([package.AddedToken(token, special=True, normalized=False) for token in control])
    eos_id = int(file.value("tokenizer.ggml.eos_token_id"))
    pad_id = int(file.metadata.get("tokenizer.ggml.padding_token_id", eos_id))
    template = None
    if chat_template or (chat_template is None and "tokenizer.chat_template" in file.metadata):
        named = {"bos_token": "tokenizer.ggml.bos_token_id", "eos_token": "tokenizer.ggml.eos_token_id"}
        special = {name: tokens[int(file.metadata[key])] for name, key in named.items() if key in file.metadata}
        template = ChatTemplate(str(file.value("tokenizer.chat_template")), special)
    return PretrainedTokenizer(inner, (eos_id,), pad_id, template)
