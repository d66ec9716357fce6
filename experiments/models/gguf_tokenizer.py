"""The byte-level BPE tokenizer of a GGUF file, from the vocabulary and the merges that the file holds.

Needs the extra `gguf` (package tokenizers). What is not in the file is how text is cut into words before the merges; the
file only names it. The name known here is "smollm": every digit on its own, the rest by GPT-2's pattern.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from experiments.models.gguf import GgufFile
from jaxlogp.errors import require

MODEL, SPLIT = "gpt2", "smollm"
CONTROL = 3
"""Type of a token that stands for no text, such as the end of a document."""


@dataclass(frozen=True)
class BpeTokenizer:
    """Text to token ids and back.

    Attributes:
        inner: a `tokenizers.Tokenizer`.
        eos_id: token that ends an answer.
        pad_id: token behind the end.
    """

    inner: Any
    eos_id: int
    pad_id: int

    def encode(self, text: str) -> list[int]:
        """Ids of a text; control tokens spelled out in it become their ids, none is added."""
        return self.inner.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, control tokens spelled out."""
        return self.inner.decode(list(ids), skip_special_tokens=False)

    def has_token(self, token: str) -> bool:
        """Whether a token is in the vocabulary."""
        return self.inner.token_to_id(token) is not None


def load_tokenizer(file: GgufFile) -> BpeTokenizer:
    """The tokenizer in a file.

    Raises:
        ValueError: a tokenizer of another kind, or the extra is not installed.
    """
    try:
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    except ImportError:
        require(False, "--gguf", 'the extra gguf (pip install -e ".[experiments,gguf]")', "no package tokenizers")
    for key, expected in (("tokenizer.ggml.model", MODEL), ("tokenizer.ggml.pre", SPLIT)):
        require(file.value(key) == expected, f"--gguf, {key}", repr(expected), repr(file.value(key)))
    tokens, types = file.value("tokenizer.ggml.tokens"), file.value("tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in file.value("tokenizer.ggml.merges")]
    inner = Tokenizer(models.BPE(vocab={token: place for place, token in enumerate(tokens)}, merges=merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    inner.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    inner.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL]
    inner.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    eos_id = int(file.value("tokenizer.ggml.eos_token_id"))
    return BpeTokenizer(inner, eos_id, int(file.metadata.get("tokenizer.ggml.padding_token_id", eos_id)))
