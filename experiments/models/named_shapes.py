"""Published models by name: sizes and options alone, for benchmarks and for runs from random weights at real sizes."""

from experiments.models.decoder_config import DecoderConfig

NAMED_SHAPES: dict[str, DecoderConfig] = {
    "qwen3-0.6b": DecoderConfig.qwen3(),
    "qwen3-1.7b": DecoderConfig.qwen3(hidden_size=2048, intermediate_size=6144),
    "qwen3-4b": DecoderConfig.qwen3(hidden_size=2560, intermediate_size=9728, num_layers=36, num_heads=32),
    "qwen3-8b": DecoderConfig.qwen3(
        hidden_size=4096, intermediate_size=12288, num_layers=36, num_heads=32, tie_embeddings=False
    ),
    "llama-3.2-1b": DecoderConfig.llama3(),
}
"""Each with its own vocabulary, and fp32 throughout unless replaced."""
