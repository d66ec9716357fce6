"""The decoder in float64, one document at a time, written from the architecture's definition."""

import numpy as np
from flax.nnx.traversals import flatten_mapping

from experiments.models.rope import LinearScaling


def oracle_rms(x, scale, config):
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + config.rms_norm_eps) * (scale + config.norm_plus_one)


def oracle_frequencies(config, is_sliding):
    sliding = config.sliding
    if is_sliding and sliding.rope_theta is not None:
        return np.array([sliding.rope_theta ** (-2 * i / config.head_dim) for i in range(config.head_dim // 2)])
    frequencies = np.array([config.rope_theta ** (-2 * i / config.head_dim) for i in range(config.head_dim // 2)])
    scaling = config.rope_scaling
    if isinstance(scaling, LinearScaling):
        return frequencies / scaling.factor
    if scaling is not None:
        for i, frequency in enumerate(frequencies):
            wavelength = 2 * np.pi / frequency
            context = scaling.original_max_position_embeddings
            if wavelength > context / scaling.low_freq_factor:
                frequencies[i] = frequency / scaling.factor
            elif wavelength > context / scaling.high_freq_factor:
                smooth = (context / wavelength - scaling.low_freq_factor) / (
                    scaling.high_freq_factor - scaling.low_freq_factor
                )
                frequencies[i] = (1 - smooth) * frequency / scaling.factor + smooth * frequency
    return frequencies


def oracle_rotate(x, frequencies):
    """Each pair (i, i + D/2) of x [T, heads, D] as a complex number times exp(1j * position * frequency)."""
    half = x.shape[-1] // 2
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * np.arange(len(x))[:, None] * frequencies)[:, None]
    return np.concatenate([turned.real, turned.imag], axis=-1)


def oracle_gate(x, config):
    if config.activation == "silu":
        return x / (1 + np.exp(-x))
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def oracle_layer(x, layer, config, is_sliding):
    heads_per_group = config.num_heads // config.num_kv_heads
    normed = oracle_rms(x, layer["input_layernorm.scale"], config)
    q, k, v = (np.tensordot(normed, layer[f"{name}_proj.kernel"], axes=1) for name in "qkv")
    if config.attention_bias:
        q, k, v = q + layer["q_proj.bias"], k + layer["k_proj.bias"], v + layer["v_proj.bias"]
    if config.qk_norm:
        q, k = oracle_rms(q, layer["q_norm.scale"], config), oracle_rms(k, layer["k_norm.scale"], config)
    frequencies = oracle_frequencies(config, is_sliding)
    q, k = oracle_rotate(q, frequencies), oracle_rotate(k, frequencies)
    scale = config.query_scale or 1 / np.sqrt(config.head_dim)
    attended = np.zeros_like(q)
    for t in range(len(x)):
        first = max(0, t + 1 - config.sliding.window) if is_sliding else 0
        for head in range(config.num_heads):
            group = head // heads_per_group
            scores = k[first : t + 1, group] @ q[t, head] * scale
            if config.attention_softcap is not None:
                scores = config.attention_softcap * np.tanh(scores / config.attention_softcap)
            weights = np.exp(scores - scores.max())
            attended[t, head] = (weights / weights.sum()) @ v[first : t + 1, group]
    added = np.tensordot(attended, layer["o_proj.kernel"], axes=2)
    if config.post_norms:
        x = x + oracle_rms(added, layer["post_attention_layernorm.scale"], config)
        normed = oracle_rms(x, layer["pre_feedforward_layernorm.scale"], config)
    else:
        x = x + added
        normed = oracle_rms(x, layer["post_attention_layernorm.scale"], config)
    added = (oracle_gate(normed @ layer["gate_proj.kernel"], config) * (normed @ layer["up_proj.kernel"])) @ layer[
        "down_proj.kernel"
    ]
    return x + (oracle_rms(added, layer["post_feedforward_layernorm.scale"], config) if config.post_norms else added)


def oracle_forward(tree, token_ids, config):
    """Hidden states [T, H] of one document, from the nested dictionary of a decoder's parameters."""
    parameters = {".".join(path): np.asarray(leaf, np.float64) for path, leaf in flatten_mapping(tree).items()}
    x = parameters["embed_tokens.embedding"][token_ids] * config.embed_scale
    for index in range(config.num_layers):
        layer = {name: value[index] for name, value in parameters.items() if name.startswith("layers.")}
        layer = {name.removeprefix("layers."): value for name, value in layer.items()}
        x = oracle_layer(x, layer, config, config.sliding is not None and config.sliding.layers[index])
    return oracle_rms(x, parameters["norm.scale"], config)
