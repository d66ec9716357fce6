"""The trainer's own tokenizers in the form of tokenizer.json, for models from nothing that are exported."""

from experiments.extras import import_extra
from experiments.models.huggingface.tokenizer import PretrainedTokenizer
from experiments.models.tokenizer import BOS_ID, EOS_ID, NUM_SPECIAL, PAD_ID, ByteTokenizer, CharTokenizer

SPECIAL = {"<pad>": PAD_ID, "<bos>": BOS_ID, "<eos>": EOS_ID}


def pretrained_form(tokenizer: CharTokenizer | ByteTokenizer) -> PretrainedTokenizer:
    """Returns a byte-pair tokenizer without any merges: its symbols stay single, and prompts begin with the start token."""
    package = import_extra("tokenizers", "tokenizer", "hf")
    symbols = list(tokenizer.alphabet) if isinstance(tokenizer, CharTokenizer) else _byte_symbols()
    vocabulary = SPECIAL | {symbol: number for number, symbol in enumerate(symbols, start=NUM_SPECIAL)}
    inner = package.Tokenizer(package.models.BPE(vocab=vocabulary, merges=[]))
    if isinstance(tokenizer, ByteTokenizer):
        inner.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        inner.decoder = package.decoders.ByteLevel()
    else:
        inner.decoder = package.decoders.Fuse()
    inner.add_special_tokens([package.AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    inner.post_processor = package.processors.TemplateProcessing("<bos> $A", special_tokens=[("<bos>", BOS_ID)])
    return PretrainedTokenizer(inner, tokenizer.eos_ids, tokenizer.pad_id, None)


def _byte_symbols() -> list[str]:
    """Returns the character that stands for each byte in byte-level vocabularies: itself where it is printable."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    symbols = {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    return [symbols[byte] for byte in range(256)]
