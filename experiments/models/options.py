"""Options of the model."""

import dataclasses
from dataclasses import dataclass
from typing import Annotated

import jax

from experiments.models.attention import NAMES
from experiments.models.decoder_config import RESIDUAL_DTYPES, DecoderConfig
from experiments.models.dtype_choice import dtype_here
from experiments.models.named_shapes import NAMED_SHAPES
from experiments.models.remat import POLICIES
from experiments.options import OneOf, option_name
from jaxlogp.errors import require


@dataclass(frozen=True)
class ModelConfig:
    """Decoder (experiments/models/decoder_config.py)."""

    path: str | None = None
    """Model to start from: a Hugging Face directory, a GGUF file, or package:NAME for the GGUF file in a Python package.
    It decides tokenizer, sizes and every option but dtypes, --model.fp32-head, --model.attention and --model.remat.
    It has no warm start unless --warm-start.max-steps is set."""
    own: str | None = None
    """Your own Flax model: module:name of a function or class, called with the size of the vocabulary if it takes one
    argument (docs/models.md). Instead of the other options of the model. For a model passed to train(): own:CLASS."""
    chat_template: bool = True
    """Apply the chat template of --model.path to prompts; otherwise prompts are plain text after its start token."""
    name: str | None = None
    """Published model whose sizes and options to use, with random weights.
    One of qwen3-0.6b, qwen3-1.7b, qwen3-4b, qwen3-8b and llama-3.2-1b.
    It keeps its vocabulary size; the task's tokens are its first ones."""
    hidden_size: int = 64
    """Features of the residual stream."""
    intermediate_size: int = 128
    """Hidden features of the SwiGLU."""
    num_layers: int = 3
    """Number of layers."""
    num_heads: int = 4
    """Query heads."""
    num_kv_heads: int = 4
    """Key-value heads, a divisor of --model.num-heads."""
    head_dim: int = 16
    """Features per head, an even number."""
    tie_embeddings: bool = True
    """Use the embedding table as the head."""
    fp32_head: bool = False
    """Compute the head in float32, in trainer and sampler. Does not remove bf16 drift (docs/numerics.md)."""
    dtype: Annotated[str, OneOf("auto", "float32", "bfloat16")] = "auto"
    """Dtype of activations and head: float32, bfloat16 or auto.
    auto: bfloat16 on GPUs that multiply it (NVIDIA of compute capability 8 and later), otherwise float32."""
    param_dtype: Annotated[str, OneOf("float32", "bfloat16")] = "float32"
    """Dtype of the parameters that the model reads: float32 or bfloat16.
    With bfloat16 the optimizer updates a separate float32 copy."""
    residual_dtype: Annotated[str, OneOf(*RESIDUAL_DTYPES)] = "auto"
    """Dtype of the residual stream, in trainer and sampler: float32 or auto (that of --model.dtype)."""
    attention: Annotated[str, OneOf(*NAMES)] = "auto"
    """Attention over packed rows: einsum, chunked, hopper, tokamax, cudnn, repeatable or auto (the fastest that can run).
    repeatable, and auto with --invariant: hopper if it can run, otherwise einsum; their gradients repeat bitwise."""
    remat: Annotated[str, OneOf("auto", *POLICIES)] = "auto"
    """Recomputation in the backward pass: none, products, attention, full or auto.
    none keeps what the compiler chooses, products the results of all matrix products, full the layers' inputs alone.
    auto: the least that fits among products, attention and full, with --invariant by a leaf's size alone; none on a CPU."""

    def decoder(self, vocab_size: int, invariant: bool = False) -> DecoderConfig:
        """Returns the configuration of a new model for a vocabulary of at least ``vocab_size`` tokens.

        Raises:
            ValueError: if a named shape is unknown or has a smaller vocabulary, or an option is set that it decides.
        """
        options = vars(self.resolved(invariant))
        if self.name is None:
            own = {name: options[name] for name in options if name not in _NOT_OF_THE_DECODER}
            return DecoderConfig(vocab_size=vocab_size, qk_norm=True, **own)
        require(self.name in NAMED_SHAPES, "--model.name", f"one of {', '.join(NAMED_SHAPES)}", self.name)
        self._refuse_decided_by("name")
        shape = NAMED_SHAPES[self.name]
        expected = f"a shape for at least {vocab_size} tokens"
        require(shape.vocab_size >= vocab_size, "--model.name", expected, f"{self.name}, {shape.vocab_size}")
        return dataclasses.replace(shape, **{name: options[name] for name in _OF_ANY_MODEL})

    def of_pretrained(self, config: DecoderConfig, invariant: bool = False) -> DecoderConfig:
        """Returns the configuration of a model from disk, with the dtypes, attention and recomputation of these options.

        ValueError if an option is set that the model on disk decides.
        """
        self._refuse_decided_by("path")
        return self.in_disk_model(config, invariant)

    def in_disk_model(self, config: DecoderConfig, invariant: bool = False) -> DecoderConfig:
        """Returns the configuration with what these options say of any model."""
        options = vars(self.resolved(invariant))
        return dataclasses.replace(config, **{name: options[name] for name in _OF_ANY_MODEL})

    def _refuse_decided_by(self, option: str) -> None:
        """Raises ValueError where another option than `option` says what that one decides."""
        for each in dataclasses.fields(self):
            value = getattr(self, each.name)
            mine = each.name in (option, "chat_template", *_OF_ANY_MODEL) or value == each.default
            expected = f"no value together with --model.{option}, which decides it"
            require(mine, option_name(f"model.{each.name}"), expected, value)

    @property
    def has_task_vocabulary(self) -> bool:
        """Whether the vocabulary is the task's own, which is small."""
        return self.path is None and self.name is None

    def resolved(self, invariant: bool = False) -> "ModelConfig":
        """Returns the options with "auto" replaced by its value here; for the dtype see `experiments.models.dtype_choice`.

        Invariant runs use attention of a fixed order.
        """
        dtype = dtype_here(self.dtype).dtype
        attention = "repeatable" if invariant and self.attention == "auto" else self.attention
        here = "none" if jax.default_backend() == "cpu" else "attention"
        remat = here if self.remat == "auto" else self.remat
        return dataclasses.replace(self, dtype=dtype, attention=attention, remat=remat)


_NOT_OF_THE_DECODER = ("path", "own", "chat_template", "name")
_OF_ANY_MODEL = ("fp32_head", "dtype", "param_dtype", "residual_dtype", "attention", "remat")
