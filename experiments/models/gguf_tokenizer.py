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
    metadata = file.metadata
    for key, expected in (("tokenizer.ggml.model", MODEL), ("tokenizer.ggml.pre", SPLIT)):
        seen = metadata.text(key)
        require(seen == expected, f"{metadata.place}, {key}", repr(expected), repr(seen))
    tokens, types = metadata.texts("tokenizer.ggml.tokens"), metadata.integers("tokenizer.ggml.token_type")
    vocabulary = {token: place for place, token in enumerate(tokens)}
    for key, count, expected in (
        ("tokens", len(vocabulary), f"{len(tokens)} different tokens"),
        ("token_type", len(types), f"one for each of {len(tokens)} tokens"),
    ):
        require(count == len(tokens), f"{metadata.place}, tokenizer.ggml.{key}", expected, count)
    merges = [tuple(merge.split(" ")) for merge in metadata.texts("tokenizer.ggml.merges")]
    try:
        inner = package.Tokenizer(package.models.BPE(vocab=vocabulary, merges=merges))
    # The package raises bare exceptions for all that it cannot read.
    except Exception as error:
        expected = "pairs of tokens that make a token"
        raise ValueError(f"{metadata.place}, tokenizer.ggml.merges: expected {expected}, got {error}") from None
    before = package.pre_tokenizers
    digits, byte_level = before.Digits(individual_digits=True), before.ByteLevel(add_prefix_space=False)
    inner.pre_tokenizer = before.Sequence([digits, byte_level])
    inner.decoder = package.decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL]
    inner.add_special_tokens([package.AddedToken(token, special=True, normalized=False) for token in control])
    start = "tokenizer.ggml.add_bos_token"
    require(
        not metadata.flag(start, False), f"{metadata.place}, {start}", "False, for prompts without a start token", True
    )
    eos_id = metadata.index("tokenizer.ggml.eos_token_id", len(tokens))
    pad_id = metadata.index("tokenizer.ggml.padding_token_id", len(tokens), eos_id)
    template = None
    if chat_template or (chat_template is None and metadata.has("tokenizer.chat_template")):
        named = {"bos_token": "tokenizer.ggml.bos_token_id", "eos_token": "tokenizer.ggml.eos_token_id"}
        special = {name: tokens[metadata.index(key, len(tokens))] for name, key in named.items() if metadata.has(key)}
        template = ChatTemplate(metadata.text("tokenizer.chat_template"), special)
    return PretrainedTokenizer(inner, (eos_id,), pad_id, template)
