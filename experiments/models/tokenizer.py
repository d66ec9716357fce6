"""Text to token ids and back: one id a character for small alphabets, one id a byte for any text.

Both tokenizers begin with the same three special ids, then count through their symbols, and round the vocabulary up to
a multiple of 8, so that a head split over 2, 4 or 8 devices has equal shards. The ids after the last symbol stand for
nothing: `encode` never returns them, and a model that samples one reads it back as U+FFFD, which no answer contains.
"""

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Protocol

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
        """What the model reads before it answers, special ids included.

        Raises:
            ValueError: as `encode`.
        """

    def encode_messages(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """What the model reads of a conversation, up to where it is to speak.

        Args:
            messages: `role` and `content` of each.

        Raises:
            ValueError: no chat template, or one that refuses the messages.
        """

    def encode_turns(self, messages: Sequence[Mapping[str, str]], turns: Sequence[int]) -> tuple[list[int], list[bool]]:
        """Returns the ids of a whole conversation, and which of them are labels: those of the given turns.

        Args:
            messages: `role` and `content` of each.
            turns: indices of the messages to train on.

        Raises:
            ValueError: no chat template, or one that refuses the messages or does not tell the turns apart.
        """

    def longest_prompt(self, text_tokens: int) -> int:
        """Most ids of a prompt whose text has so many characters, or bytes where any text is allowed."""

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without special ids.

        Raises:
            ValueError: a character has no id; the message has the character and its position.
        """

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids up to the first of `eos_ids`; other special ids are skipped, unused ids read as U+FFFD.

        Raises:
            ValueError: an id before the first end is not an integer in [0, vocab_size).
        """


class _StartToken:
    """Prompts after one start token, for the tokenizers of this file."""

    pad_id: ClassVar[int] = PAD_ID
    eos_ids: ClassVar[tuple[int, ...]] = (EOS_ID,)

    def encode_prompt(self: Tokenizer, text: str) -> list[int]:
        """See `Tokenizer.encode_prompt`."""
        return [BOS_ID, *self.encode(text)]

    def encode_messages(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Raises ValueError: these tokenizers have no chat template."""
        raise ValueError(_NO_TEMPLATE)

    def encode_turns(self, messages: Sequence[Mapping[str, str]], turns: Sequence[int]) -> tuple[list[int], list[bool]]:
        """Raises ValueError: these tokenizers have no chat template."""
        raise ValueError(_NO_TEMPLATE)

    def longest_prompt(self, text_tokens: int) -> int:
        """See `Tokenizer.longest_prompt`."""
        return 1 + text_tokens


@dataclass(frozen=True)
class CharTokenizer(_StartToken):
    """One id for each character of an alphabet, in the alphabet's order.

    Args:
        alphabet: the characters, each once.
        num_ids: of a model whose vocabulary is larger; None takes as many as are needed.

    Raises:
        ValueError: the alphabet is empty, repeats a character, or contains U+FFFD; or fewer ids than are needed.

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
    num_ids: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.alphabet, str) or not self.alphabet or len(set(self.alphabet)) < len(self.alphabet):
            raise ValueError(f"alphabet: expected one or more characters, each once, got {self.alphabet!r}")
        if UNKNOWN in self.alphabet:
            raise ValueError("alphabet: expected characters other than U+FFFD, which marks unused ids")
        _check_num_ids(self.num_ids, len(self.alphabet))

    @property
    def vocab_size(self) -> int:
        """See `Tokenizer.vocab_size`."""
        return self.num_ids or _round_up(NUM_SPECIAL + len(self.alphabet))

    def encode(self, text: str) -> list[int]:
        """See `Tokenizer.encode`."""
        for position, character in enumerate(text):
            if character not in self._ids:
                raise ValueError(f"text: expected characters of {self.alphabet!r}, got {character!r} at {position}")
        return [self._ids[character] for character in text]

    def decode(self, ids: Iterable[int]) -> str:
        """See `Tokenizer.decode`."""
        numbers = _symbol_numbers(ids, self.vocab_size)
        return "".join(self.alphabet[number] if number < len(self.alphabet) else UNKNOWN for number in numbers)

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {character: number for number, character in enumerate(self.alphabet, start=NUM_SPECIAL)}


@dataclass(frozen=True)
class ByteTokenizer(_StartToken):
    """One id for each byte of UTF-8 text; bytes that are not valid UTF-8 read as U+FFFD.

    Args:
        num_ids: of a model whose vocabulary is larger; None takes as many as are needed.

    Raises:
        ValueError: fewer ids than are needed.

    Example:
        >>> tokenizer = ByteTokenizer()
        >>> tokenizer.encode("é")
        [198, 172]
        >>> tokenizer.vocab_size
        264
    """

    num_ids: int | None = None

    def __post_init__(self) -> None:
        _check_num_ids(self.num_ids, 256)

    @property
    def vocab_size(self) -> int:
        """See `Tokenizer.vocab_size`."""
        return self.num_ids or _round_up(NUM_SPECIAL + 256)

    def encode(self, text: str) -> list[int]:
        """See `Tokenizer.encode`."""
        try:
            return [NUM_SPECIAL + byte for byte in text.encode("utf-8")]
        except UnicodeEncodeError as error:
            character, position = text[error.start], error.start
            raise ValueError(f"text: expected text that UTF-8 can hold, got {character!r} at {position}") from error

    def decode(self, ids: Iterable[int]) -> str:
        """See `Tokenizer.decode`."""
        # 0xFF occurs nowhere in UTF-8, so it turns into U+FFFD like every other invalid byte.
        data = bytes(min(number, 0xFF) for number in _symbol_numbers(ids, self.vocab_size))
        return data.decode("utf-8", errors="replace")


def tokenizer_for(alphabet: str | None, num_ids: int | None = None) -> Tokenizer:
    """Returns the tokenizer of a task's alphabet: one id a character, or one a byte if the alphabet is None."""
    return ByteTokenizer(num_ids) if alphabet is None else CharTokenizer(alphabet, num_ids)


def _check_num_ids(num_ids: int | None, symbols: int) -> None:
    needed = NUM_SPECIAL + symbols
    if num_ids is not None and num_ids < needed:
        raise ValueError(f"num_ids: expected at least {needed}, got {num_ids}")


def _round_up(size: int) -> int:
    return -(-size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


def _symbol_numbers(ids: Iterable[int], vocab_size: int) -> Iterator[int]:
    """Numbers of the symbols, counted from 0, before the first EOS; other special ids are left out."""
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
