"""Chats with a model in the terminal and prints its answers word by word.

    python -m experiments.chat DIRECTORY
    python -m experiments.chat runs/NAME --prompt "37+48="

The model is a run folder, a Hugging Face directory or a GGUF file. With a chat template every line continues the
conversation; without one every line is a separate prompt. An empty line or the end of the input ends the chat. Control
characters in answers are printed as escapes, such as ESC as \\x1b.
"""

if __name__ == "__main__":
    # Before the imports, which Ctrl-C ends in one line too.
    from experiments.entry import run_module

    run_module("experiments.chat")

import sys
from collections.abc import Iterator
from dataclasses import dataclass

import jax
import tyro

from experiments.command_line import run_command
from experiments.loop.load import LoadedModel, load_model
from experiments.models.decoder_config import DTYPES
from experiments.models.huggingface.tokenizer import PretrainedTokenizer
from experiments.models.tokenizer import UNKNOWN
from experiments.sampling.token_stream import StreamOptions, stream_tokens
from experiments.terminal import printable
from jaxlogp.errors import require


@dataclass(frozen=True)
class ChatConfig:
    """Options of a conversation."""

    model: tyro.conf.Positional[str]
    """Run folder, Hugging Face directory or GGUF file."""
    prompt: str | None = None
    """Prompt to answer before the command ends. None: read prompts line by line."""
    max_new_tokens: int = 256
    """Longest answer in tokens."""
    temperature: float = 0.7
    """Divisor of the logits. 0: the most likely token."""
    seed: int = 0
    """Seed of the answers."""
    dtype: str | None = None
    """Dtype in memory of a model on disk: float32 or bfloat16. None: float32. A run has its own."""


class Chat:
    def __init__(self, loaded: LoadedModel, options: StreamOptions, seed: int) -> None:
        self._loaded, self._options, self._graph = loaded, options, loaded.graph
        self._key, self._answers = jax.random.key(seed), 0
        self._messages: list[dict[str, str]] = []

    def answer(self, text: str) -> Iterator[str]:
        """Yields pieces of the answer to a text; both become part of the conversation."""
        tokenizer = self._loaded.tokenizer
        prompt = self._prompt(text)
        key = jax.random.fold_in(self._key, self._answers)
        self._answers += 1
        ids: list[int] = []
        said = ""
        for token in stream_tokens(self._graph, self._loaded.params, prompt, key, self._options):
            if token in tokenizer.eos_ids:
                break
            ids.append(token)
            whole = tokenizer.decode(ids)
            # A character of several bytes may still lack some of them.
            if not whole.endswith(UNKNOWN):
                yield whole[len(said) :]
                said = whole
        rest = tokenizer.decode(ids)
        if len(rest) > len(said):
            yield rest[len(said) :]
        self._messages.append({"role": "assistant", "content": rest})

    def _prompt(self, text: str) -> list[int]:
        tokenizer = self._loaded.tokenizer
        if not isinstance(tokenizer, PretrainedTokenizer) or tokenizer.template is None:
            return tokenizer.encode_prompt(text)
        messages = [*self._messages, {"role": "user", "content": text}]
        ids = tokenizer.encode_messages(messages)
        self._messages = messages
        return ids


def start(config: ChatConfig) -> Chat:
    require(config.dtype in (None, *DTYPES), "--dtype", " or ".join(DTYPES), config.dtype)
    require(0 <= config.seed < 2**31, "--seed", "a number of at least 0, below 2^31", config.seed)
    options = StreamOptions(config.max_new_tokens, config.temperature)
    return Chat(load_model(config.model, dtype=config.dtype), options, config.seed)


def _say(chat: Chat, text: str) -> None:
    for piece in chat.answer(text):
        print(printable(piece), end="", flush=True)
    print()


def main(config: ChatConfig) -> None:
    """Answers one prompt, or lines until an empty one."""
    chat = start(config)
    if config.prompt is not None:
        _say(chat, config.prompt)
        return
    is_person = sys.stdin.isatty()
    mark = "> " if is_person else ""
    while True:
        try:
            text = input(mark)
        except EOFError:
            return
        if not text:
            return
        try:
            _say(chat, text)
        except ValueError as error:
            # A person can write another line.
            if not is_person:
                raise
            print(printable(f"error: {error}"), file=sys.stderr)


def run_cli(arguments: list[str] | None = None) -> None:
    run_command(ChatConfig, main, program="experiments.chat", description=__doc__, arguments=arguments)
