"""Text to token ids and back: one id a character for small alphabets, one id a byte for any text.

Both tokenizers begin with the same three special ids, then count through their symbols, and round the vocabulary up to
a multiple of 8, so that a head split over 2, 4 or 8 devices has equal shards. The ids after the last symbol stand for
nothing: `encode` never returns them, and a model that samples one reads it back as U+FFFD, which no answer contains.
"""

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, Protocol

from jaxlogp.errors import require

PAD_ID, BOS_ID, EOS_ID = 0, 1, 2
NUM_SPECIAL = 3
VOCAB_MULTIPLE = 8
UNKNOWN = "\N{REPLACEMENT CHARACTER}"
_NO_TEMPLATE = (
    "messages: expected a model with a chat template (--model.path) for prompts that are conversations, "
    "got the tokenizer of a model from nothing"
)


class Tokenizer(Protocol):
    """What the trainer needs of a tokenizer."""

    @property
    def pad_id(self) -> int:
        """Fills rows after the end."""

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Each of them ends an answer; the first is the one that worked answers end with."""

    @property
    def vocab_size(self) -> int:
        """Number of ids."""

    def encode_prompt(self, text: str) -> list[int]:
        """Returns what the model reads before it answers, special ids included; raises as `encode`."""

    def encode_messages(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Returns what the model reads of a conversation (`role` and `content` of each message), up to where it is to speak.

        ValueError without a chat template, or if it refuses the messages.
        """

    def encode_turns(self, messages: Sequence[Mapping[str, str]], turns: Sequence[int]) -> tuple[list[int], list[bool]]:
        """Returns the ids of a whole conversation, and which of them are labels: those of the messages with indices `turns`.

        ValueError without a chat template, or if it refuses the messages or does not tell the turns apart.
        """

    def longest_prompt(self, text_tokens: int) -> int:
        """Returns the most ids of a prompt whose text has so many characters, or bytes where any text is allowed."""

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text, without special ids; ValueError names a character that has no id, and its position."""

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of ids up to the first of `eos_ids`; other special ids are skipped, unused ids read as U+FFFD.

        ValueError if an id before the first end is not an integer in [0, vocab_size).
        """


@dataclass(frozen=True)
class _SymbolTokenizer:
    """What the tokenizers of this file share: special ids, prompts after one start token, and no chat template.

    `num_ids` is that of a model whose vocabulary is larger; None takes as many ids as are needed.
    """

    num_ids: int | None = field(default=None, kw_only=True)

    pad_id: ClassVar[int] = PAD_ID
    eos_ids: ClassVar[tuple[int, ...]] = (EOS_ID,)

    def __post_init__(self) -> None:
        needed = NUM_SPECIAL + self.num_symbols
        require(self.num_ids is None or self.num_ids >= needed, "num_ids", f"at least {needed}", self.num_ids)

    @property
    def num_symbols(self) -> int:
        raise NotImplementedError

    @property
    def vocab_size(self) -> int:
        return self.num_ids or -(-(NUM_SPECIAL + self.num_symbols) // VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    def encode(self, text: str) -> list[int]:
        raise NotImplementedError

    def encode_prompt(self, text: str) -> list[int]:
        return [BOS_ID, *self.encode(text)]

    def encode_messages(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        raise ValueError(_NO_TEMPLATE)

    def encode_turns(self, messages: Sequence[Mapping[str, str]], turns: Sequence[int]) -> tuple[list[int], list[bool]]:
        raise ValueError(_NO_TEMPLATE)

    def longest_prompt(self, text_tokens: int) -> int:
        return 1 + text_tokens

    def _symbol_numbers(self, ids: Iterable[int]) -> Iterator[int]:
        """Yields the numbers of the symbols before the first EOS, counted from 0, without other special ids."""
        vocab_size = self.vocab_size
        for position, token in enumerate(ids):
            try:
                token = operator.index(token)
            except TypeError as error:
                raise ValueError(f"ids: expected integers, got {token!r} at {position}") from error
            if not 0 <= token < vocab_size:
                raise ValueError(f"ids: expected ids in [0, {vocab_size}), got {token} at {position}")
            if token == EOS_ID:
                return
            if token >= NUM_SPECIAL:
                yield token - NUM_SPECIAL


@dataclass(frozen=True)
class CharTokenizer(_SymbolTokenizer):
    """One id for each character of an alphabet, in its order; ValueError unless each is in it once, and none is U+FFFD.

    Example:
        >>> tokenizer = CharTokenizer("0123456789+=")
        >>> tokenizer.encode("37+48=")
        [6, 10, 13, 7, 11, 14]
        >>> tokenizer.decode([11, 8, EOS_ID, 8])
        '85'
        >>> tokenizer.vocab_size
        16
    """

    alphabet: str

    def __post_init__(self) -> None:
        if not isinstance(self.alphabet, str) or not self.alphabet or len(set(self.alphabet)) < len(self.alphabet):
            raise ValueError(f"alphabet: expected one or more characters, each once, got {self.alphabet!r}")
        if UNKNOWN in self.alphabet:
            raise ValueError("alphabet: expected characters other than U+FFFD, which marks unused ids")
        super().__post_init__()

    @property
    def num_symbols(self) -> int:
        return len(self.alphabet)

    def encode(self, text: str) -> list[int]:
        for position, character in enumerate(text):
            if character not in self._ids:
                raise ValueError(f"text: expected characters of {self.alphabet!r}, got {character!r} at {position}")
        return [self._ids[character] for character in text]

    def decode(self, ids: Iterable[int]) -> str:
        numbers = self._symbol_numbers(ids)
        return "".join(self.alphabet[number] if number < len(self.alphabet) else UNKNOWN for number in numbers)

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {character: number for number, character in enumerate(self.alphabet, start=NUM_SPECIAL)}


@dataclass(frozen=True)
class ByteTokenizer(_SymbolTokenizer):
    """One id for each byte of UTF-8 text; bytes that are not valid UTF-8 read as U+FFFD.

    Example:
        >>> tokenizer = ByteTokenizer()
        >>> tokenizer.encode("é")
        [198, 172]
        >>> tokenizer.vocab_size
        264
    """

    num_symbols: ClassVar[int] = 256

    def encode(self, text: str) -> list[int]:
        try:
            return [NUM_SPECIAL + byte for byte in text.encode("utf-8")]
        except UnicodeEncodeError as error:
            character, position = text[error.start], error.start
            raise ValueError(f"text: expected text that UTF-8 can hold, got {character!r} at {position}") from error

    def decode(self, ids: Iterable[int]) -> str:
        # 0xFF occurs nowhere in UTF-8, so it turns into U+FFFD like every other invalid byte.
        data = bytes(min(number, 0xFF) for number in self._symbol_numbers(ids))
        return data.decode("utf-8", errors="replace")


def tokenizer_for(alphabet: str | None, num_ids: int | None = None) -> Tokenizer:
    """Returns the tokenizer of a task's alphabet: one id a character, or one a byte if the alphabet is None."""
    return ByteTokenizer(num_ids=num_ids) if alphabet is None else CharTokenizer(alphabet, num_ids=num_ids)
