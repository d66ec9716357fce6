"""Sizes and options of a `Decoder`: every architecture that it can be is a choice of these."""

import math
from dataclasses import dataclass, fields

from jax.sharding import Mesh

from experiments.models.attention import NAMES, AttentionCall, AttentionRun, choose_attention, choose_cached
from experiments.models.lora import LoraConfig
from experiments.models.remat import POLICIES
from experiments.models.rope import Llama3Scaling, RopeScaling
from jaxlogp.errors import require
from jaxlogp.head import HeadSpec

DTYPES = ("float32", "bfloat16")
RESIDUAL_DTYPES = ("auto", "float32")
_CHOICES = {
    "activation": ("silu", "gelu_tanh"),
    "dtype": DTYPES,
    "param_dtype": DTYPES,
    "residual_dtype": RESIDUAL_DTYPES,
    "attention": NAMES,
    "remat": tuple(POLICIES),
}


@dataclass(frozen=True)
class SlidingLayers:
    """Layers whose tokens read the last `window` tokens of their document only, themselves included.

    `layers` says of every layer of the model whether it is one of these. `rope_theta` is the base of their rotary
    frequencies, which nothing stretches; None takes the model's own.
    """

    window: int
    layers: tuple[bool, ...]
    rope_theta: float | None = None

    def __post_init__(self) -> None:
        require(self.window >= 1, "sliding.window", "a positive integer", self.window)
        require(any(self.layers), "sliding.layers", "True or False a layer, once True", self.layers)
        if self.rope_theta is not None:
            require(1.0 < self.rope_theta < math.inf, "sliding.rope_theta", "a finite number above 1", self.rope_theta)


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes and options of a `Decoder`.

    Args:
        vocab_size: rows of the embedding and of the head.
        intermediate_size: features inside the gated products.
        num_kv_heads: key-value heads, a divisor of the query heads `num_heads`.
        head_dim: features of one head, even; need not be hidden_size / num_heads.
        context_length: tokens of the longest document that its files say it is made for; None where they do not say.
        sliding: layers with a window (Mistral, Gemma), or None.
        query_scale: multiplier of the products of queries and keys; None takes 1 / √head_dim.
        attention_softcap: soft cap of the scores, cap · tanh(scores / cap), or None (Gemma 2).
        qk_norm: RMSNorm over each head's queries and keys before the rotation (Qwen3, Gemma 3).
        attention_bias: biases on queries, keys and values, none on the output (Qwen2).
        activation: of the gate, "silu" or "gelu_tanh", the tanh form of GELU (Gemma).
        rms_norm_eps: added to the mean square inside every RMSNorm.
        norm_plus_one: RMSNorms multiply by 1 + weight (Gemma).
        post_norms: RMSNorms of what attention and gated products add to the residual stream as well (Gemma 2 and 3).
        embed_scale: multiplier of the embeddings (√hidden_size in Gemma), not of a tied head.
        tie_embeddings: the head is the embedding table.
        logit_softcap: the head's soft cap, cap · tanh(logits / cap), or None.
        fp32_head: multiply hidden states and head as fp32 whatever their dtype.
        dtype: of the activations, "float32" or "bfloat16".
        param_dtype: of the stored parameters, likewise; each is cast to `dtype` where it is used.
        residual_dtype: of the residual stream, "float32" or "auto": that of the activations.
        remat: what a layer keeps for the backward pass, a policy of `experiments.models.remat`.
        attention: how whole rows are attended to: one of `experiments.models.attention.NAMES`.

    Example:
        >>> config = DecoderConfig.qwen3(vocab_size=24, hidden_size=32, intermediate_size=64, num_layers=2,
        ...                              num_heads=4, num_kv_heads=2, head_dim=8)
        >>> config.qk_norm, config.tie_embeddings
        (True, True)
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_length: int | None = None
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    sliding: SlidingLayers | None = None
    query_scale: float | None = None
    attention_softcap: float | None = None
    qk_norm: bool = False
    attention_bias: bool = False
    activation: str = "silu"
    rms_norm_eps: float = 1e-6
    norm_plus_one: bool = False
    post_norms: bool = False
    embed_scale: float = 1.0
    tie_embeddings: bool = False
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    fp32_head: bool = False
    dtype: str = "float32"
    param_dtype: str = "float32"
    residual_dtype: str = "auto"
    remat: str = "none"
    attention: str = "auto"
    lora: LoraConfig = LoraConfig()

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type is int:
                is_size = isinstance(value, int) and not isinstance(value, bool) and value >= 1
                require(is_size, field.name, "a positive integer", repr(value))
            elif field.type is bool:
                require(isinstance(value, bool), field.name, "True or False", repr(value))
        divides = self.num_heads % self.num_kv_heads == 0
        require(divides, "num_kv_heads", f"a divisor of {self.num_heads} query heads", self.num_kv_heads)
        require(self.head_dim % 2 == 0, "head_dim", "an even number", self.head_dim)
        require(1.0 < self.rope_theta < math.inf, "rope_theta", "a finite number above 1", self.rope_theta)
        require(0.0 < self.rms_norm_eps < 1.0, "rms_norm_eps", "a number between 0 and 1", self.rms_norm_eps)
        layers = self.num_layers if self.sliding is None else len(self.sliding.layers)
        require(layers == self.num_layers, "sliding.layers", f"one for each of {self.num_layers} layers", layers)
        for name in ("query_scale", "attention_softcap", "logit_softcap", "embed_scale"):
            value = getattr(self, name)
            require(value is None or 0.0 < value < math.inf, name, "a finite number above 0", value)
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            require(value in choices, name, f"one of {', '.join(choices)}", repr(value))

    @property
    def attention_scale(self) -> float:
        """Multiplier of the products of queries and keys."""
        return self.head_dim**-0.5 if self.query_scale is None else self.query_scale

    @property
    def stream_dtype(self) -> str:
        """Dtype of the residual stream."""
        return self.dtype if self.residual_dtype == "auto" else self.residual_dtype

    def window_of(self, layer: int) -> int | None:
        """Returns how many tokens a query of this layer reads at most, itself included, or None."""
        return self.sliding.window if self.sliding is not None and self.sliding.layers[layer] else None

    def attention_run(self, rows: int, length: int, mesh: Mesh | None = None) -> AttentionRun:
        """Returns the implementation that attends over packed rows of this shape here, and why; ValueError if none can."""
        sizes = (rows, length, self.num_heads, self.num_kv_heads, self.head_dim)
        call = AttentionCall(*sizes, dtype=self.dtype, softcap=self.attention_softcap, mesh=mesh)
        return choose_attention(self.attention, call)

    def cached_attention_run(self, mesh: Mesh | None = None) -> AttentionRun:
        """Returns how the sampler's cache is attended to here, and why."""
        return choose_cached(self.attention, self.num_kv_heads, self.head_dim, self.dtype, mesh)

    @property
    def head_spec(self) -> HeadSpec:
        """The head's arithmetic at temperature 1."""
        return HeadSpec(logit_scale=self.logit_scale, softcap=self.logit_softcap, fp32_head=self.fp32_head)

    @property
    def head_name(self) -> str:
        """Name of the module that holds the head's weight."""
        return "embed_tokens" if self.tie_embeddings else "lm_head"

    @classmethod
    def qwen3(cls, **changes) -> "DecoderConfig":
        """Returns Qwen3-0.6B, with any field replaced."""
        published = dict(
            vocab_size=151_936, hidden_size=1024, intermediate_size=3072, num_layers=28, num_heads=16, num_kv_heads=8,
            head_dim=128, rope_theta=1_000_000.0, rms_norm_eps=1e-6, qk_norm=True, tie_embeddings=True,
        )  # fmt: skip
        return cls(**(published | changes))

    @classmethod
    def llama3(cls, **changes) -> "DecoderConfig":
        """Returns Llama-3.2-1B, with any field replaced."""
        published = dict(
            vocab_size=128_256, hidden_size=2048, intermediate_size=8192, num_layers=16, num_heads=32, num_kv_heads=8,
            head_dim=64, rope_theta=500_000.0, rope_scaling=Llama3Scaling(factor=32.0), rms_norm_eps=1e-5,
            tie_embeddings=True,
        )  # fmt: skip
        return cls(**(published | changes))
