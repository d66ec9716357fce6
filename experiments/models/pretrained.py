"""The door for models on disk, `--model PATH`: a Hugging Face directory, or a GGUF file of Llama's family.

What is small (sizes, options, tokenizer) is read and checked at once. Weights are read when their places on the devices
are known, straight into them.
"""

from dataclasses import dataclass
from pathlib import Path

from experiments.models import gguf
from experiments.models.decoder_config import DecoderConfig
from experiments.models.gguf_tokenizer import load_gguf_tokenizer
from experiments.models.huggingface.config import decoder_config
from experiments.models.huggingface.export import SMALL_FILES, made_files
from experiments.models.huggingface.files import read_object
from experiments.models.huggingface.tokenizer import PretrainedTokenizer, load_tokenizer
from experiments.models.huggingface.weights import SafetensorsDirectory
from experiments.models.packaged import located
from experiments.models.parameters import GGUF, HUGGING_FACE, WeightReader
from jaxlogp.errors import require


@dataclass(frozen=True)
class Pretrained:
    """A model on disk, and its opened GGUF file, where it is one."""

    path: Path
    config: DecoderConfig
    tokenizer: PretrainedTokenizer
    file: gguf.GgufFile | None = None

    def weights(self) -> WeightReader:
        """Opens the weights, and reads none yet; ValueError if files are missing or damaged, or have other tensors."""
        if self.file is not None:
            return WeightReader(self.config, self.file, GGUF)
        source = SafetensorsDirectory(self.path)
        if self.config.tie_embeddings:
            source.drop_copy("lm_head.weight", "model.embed_tokens.weight")
        return WeightReader(self.config, source, HUGGING_FACE)


def small_files(pretrained: Pretrained) -> dict[str, bytes]:
    """Returns all of a checkpoint directory but the weights: as they are, or made of what a GGUF file says."""
    if pretrained.path.is_dir():
        return {
            name: (pretrained.path / name).read_bytes() for name in SMALL_FILES if (pretrained.path / name).is_file()
        }
    return made_files(pretrained.config, pretrained.tokenizer)


def open_pretrained(path: str | Path, *, chat_template: bool | None = True) -> Pretrained:
    """Opens a model on disk: a directory with config.json, a GGUF file, or `package:NAME`.

    Prompts go through the chat template, which then has to be there; with None they do where there is one. ValueError if
    there is no such path, the model cannot be expressed, or the tokenizer has more ids than the embedding.
    """
    path = located(path)
    require(path.exists(), "model", "a Hugging Face directory or a GGUF file", f"{path}, which does not exist")
    file = gguf.read_gguf(path) if path.is_file() else None
    if file is not None:
        config, tokenizer = gguf.decoder_config(file), load_gguf_tokenizer(file, chat_template=chat_template)
    else:
        config = decoder_config(read_object(path / "config.json"))
        tokenizer = load_tokenizer(path, chat_template=chat_template)
    expected = f"at most {config.vocab_size} ids, the rows of the embedding"
    require(tokenizer.vocab_size <= config.vocab_size, "tokenizer", expected, tokenizer.vocab_size)
    known = all(token < config.vocab_size for token in (*tokenizer.eos_ids, tokenizer.pad_id))
    seen = (*tokenizer.eos_ids, tokenizer.pad_id)
    require(known, "tokenizer, end and padding tokens", f"ids below {config.vocab_size}", seen)
    return Pretrained(path, config, tokenizer, file)
