"""config.json to `DecoderConfig` and back, for the model types in `FAMILIES`.

Both spellings are read: transformers 5 writes `rope_parameters` with the base inside (Gemma 3 one for each kind of
layer), 4 wrote `rope_theta` next to `rope_scaling`. What a model type decides by itself, in transformers' code, is in
`FAMILIES`; a field that would change the arithmetic in a way that `Decoder` does not know is refused by its name.
"""

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

from experiments.models.decoder_config import DecoderConfig, SlidingLayers
from experiments.models.huggingface.files import JsonObject, is_integer
from experiments.models.rope import LinearScaling, Llama3Scaling, RopeScaling
from jaxlogp.errors import require

MAX_LAYERS = 1000
DEFAULT_WINDOW = 4096
CONTEXT = "max_position_embeddings"
SLIDING, FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True)
class Family:
    """What a model type, by its class in transformers, decides that config.json does not say, or need not say.

    `tied` (head and embedding are one) and `head_dim` are defaults; a `head_dim` of None is hidden_size /
    num_attention_heads. `activation_key` is where the activation is named, and `decoder` has the fields of `DecoderConfig`
    that follow from the type.
    """

    architecture: str
    tied: bool = False
    head_dim: int | None = None
    activation_key: str = "hidden_act"
    decoder: dict[str, Any] = field(default_factory=dict)

    @property
    def is_gemma(self) -> bool:
        """Whether it scales embeddings and queries as Gemma does."""
        return self.decoder.get("norm_plus_one", False)


_GEMMA: dict[str, Any] = {"tied": True, "head_dim": 256, "activation_key": "hidden_activation"}
_GEMMA_NORMS = {"norm_plus_one": True, "post_norms": True}
FAMILIES = {
    "llama": Family("LlamaForCausalLM"),
    "qwen2": Family("Qwen2ForCausalLM", decoder={"attention_bias": True}),
    "qwen3": Family("Qwen3ForCausalLM", head_dim=128, decoder={"qk_norm": True}),
    "mistral": Family("MistralForCausalLM"),
    "gemma2": Family("Gemma2ForCausalLM", **_GEMMA, decoder=_GEMMA_NORMS),
    "gemma3_text": Family("Gemma3ForCausalLM", **_GEMMA, decoder={**_GEMMA_NORMS, "qk_norm": True}),
}
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
REFUSED = {
    "quantization_config": "weights that are not quantised",
    "auto_map": "a model type of transformers without code of its own",
    "num_experts": "no mixture of experts",
    "num_local_experts": "no mixture of experts",
    "attention_bias": "no bias on the attention's output",
    "mlp_bias": "no biases in the gated products",
    "use_bidirectional_attention": "attention to earlier tokens only",
}
"""Fields that must be missing, null or false, and what they would have to say."""


def decoder_config(file: JsonObject) -> DecoderConfig:
    """Returns sizes and options of the model that config.json describes; fp32 activations and parameters.

    ValueError names the field that is out of range or cannot be expressed, such as another model type.

    Example:
        >>> sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
        ...          "num_attention_heads": 2, "rms_norm_eps": 1e-5}
        >>> decoder_config(JsonObject("config.json", {"model_type": "llama", **sizes})).num_kv_heads
        2
    """
    model_type = file.text("model_type")
    expected = f"one of {', '.join(FAMILIES)}"
    require(model_type in FAMILIES, f"{file.place}, model_type", expected, repr(model_type))
    family = FAMILIES[model_type]
    for name, wanted in REFUSED.items():
        require(not file.values.get(name), f"{file.place}, {name}", wanted, repr(file.values.get(name)))
    activation = file.text(family.activation_key, "gelu_pytorch_tanh" if family.is_gemma else "silu")
    known = activation in ACTIVATIONS
    require(known, f"{file.place}, {family.activation_key}", f"one of {', '.join(ACTIVATIONS)}", repr(activation))
    hidden, layers, heads = (file.integer(key) for key in ("hidden_size", "num_hidden_layers", "num_attention_heads"))
    require(layers <= MAX_LAYERS, f"{file.place}, num_hidden_layers", f"at most {MAX_LAYERS}", layers)
    if not file.has("head_dim") and family.head_dim is None:
        require(hidden % heads == 0, f"{file.place}, num_attention_heads", f"a divisor of {hidden}", heads)
    theta, scaling, sliding_theta = _rope(file, model_type)
    return DecoderConfig(
        vocab_size=file.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=file.integer("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=file.integer("num_key_value_heads", heads),
        head_dim=file.integer("head_dim", family.head_dim or hidden // heads),
        context_length=file.integer(CONTEXT) if file.has(CONTEXT) else None,
        rope_theta=theta,
        rope_scaling=scaling,
        sliding=_sliding(file, model_type, layers, sliding_theta),
        activation=ACTIVATIONS[activation],
        rms_norm_eps=file.number("rms_norm_eps"),
        tie_embeddings=file.flag("tie_word_embeddings", family.tied),
        **(_gemma(file, model_type, hidden) if family.is_gemma else {}),
        **family.decoder,
    )


def _gemma(file: JsonObject, model_type: str, hidden: int) -> dict[str, Any]:
    is_second = model_type == "gemma2"
    allowed = is_second or not file.has("attn_logit_softcapping")
    require(allowed, f"{file.place}, attn_logit_softcapping", f"none in {model_type}", "one")

    def cap(key: str, of_second: float) -> float | None:
        # Gemma 2 caps unless it says null; Gemma 3 does not unless it says how.
        default = of_second if is_second else None
        return None if file.values.get(key, default) is None else file.number(key, default)

    return {
        "embed_scale": math.sqrt(hidden),
        "query_scale": file.number("query_pre_attn_scalar", 256) ** -0.5,
        "attention_softcap": cap("attn_logit_softcapping", 50.0),
        "logit_softcap": cap("final_logit_softcapping", 30.0),
    }


def _rope(file: JsonObject, model_type: str) -> tuple[float, RopeScaling | None, float | None]:
    """Returns base and stretch of the rotary frequencies, and the base of sliding layers if it is another."""
    _require_whole_heads(file)
    # A base next to the objects is the default of one inside of them.
    if model_type != "gemma3_text":
        parameters = file.object("rope_parameters" if file.has("rope_parameters") else "rope_scaling")
        return parameters.number("rope_theta", file.number("rope_theta", 10_000.0)), _scaling(parameters), None
    theta, sliding_theta = file.number("rope_theta", 1e6), file.number("rope_local_base_freq", 1e4)
    if file.has("rope_parameters"):
        by_kind = file.object("rope_parameters")
        full, sliding = by_kind.object(FULL), by_kind.object(SLIDING)
        unscaled = _scaling(sliding) is None
        require(unscaled, f"{sliding.place}, rope_type", "default in sliding layers", sliding.values.get("rope_type"))
        return full.number("rope_theta", theta), _scaling(full), sliding.number("rope_theta", sliding_theta)
    return theta, _scaling(file.object("rope_scaling")), sliding_theta


def _require_whole_heads(file: JsonObject) -> None:
    rotated = file.values.get("partial_rotary_factor", 1)
    require(rotated in (None, 1), f"{file.place}, partial_rotary_factor", "whole heads that are rotated", rotated)


def _scaling(parameters: JsonObject) -> RopeScaling | None:
    _require_whole_heads(parameters)
    kind = parameters.text("rope_type", parameters.text("type", "default"))
    known = kind in ("default", "linear", "llama3")
    require(known, f"{parameters.place}, rope_type", "default, linear or llama3", repr(kind))
    if kind == "default":
        named = parameters.has("rope_type") or parameters.has("type") or not parameters.has("factor")
        require(named, parameters.place, "the key rope_type next to factor", "none")
        return None
    if kind == "linear":
        return LinearScaling(parameters.number("factor"))
    return Llama3Scaling(
        parameters.number("factor"),
        parameters.number("low_freq_factor"),
        parameters.number("high_freq_factor"),
        parameters.integer("original_max_position_embeddings"),
    )


def _sliding(file: JsonObject, model_type: str, layers: int, theta: float | None) -> SlidingLayers | None:
    # Qwen names a window that counts only where the switch next to it is on; the others have one unless told otherwise.
    switched = model_type in ("qwen2", "qwen3")
    counts = file.flag("use_sliding_window", False) if switched else model_type != "llama"
    if not counts or (file.values.get("sliding_window", DEFAULT_WINDOW) is None):
        kinds = file.values.get("layer_types") or []
        fits = isinstance(kinds, list) and SLIDING not in kinds
        expected = f"a list without {SLIDING}, as there is no window"
        require(fits, f"{file.place}, layer_types", expected, repr(kinds)[:100])
        return None
    sliding = tuple(kind == SLIDING for kind in _layer_types(file, model_type, layers))
    return SlidingLayers(file.integer("sliding_window", DEFAULT_WINDOW), sliding, theta) if any(sliding) else None


def _layer_types(file: JsonObject, model_type: str, layers: int) -> list[str]:
    """Returns the kind of every layer, as written or by the rule of the type."""
    kinds = file.values.get("layer_types")
    if kinds is not None:
        fits = isinstance(kinds, list) and len(kinds) == layers and all(kind in (SLIDING, FULL) for kind in kinds)
        require(fits, f"{file.place}, layer_types", f"{layers} of {SLIDING} and {FULL}", repr(kinds)[:100])
        return kinds
    if model_type == "mistral":
        return [SLIDING] * layers
    if model_type in ("qwen2", "qwen3"):
        first = file.values.get("max_window_layers", 28)
        is_count = is_integer(first) and first >= 0
        require(is_count, f"{file.place}, max_window_layers", "an integer of at least 0", repr(first))
        return [SLIDING if layer >= first else FULL for layer in range(layers)]
    period = 2 if model_type == "gemma2" else file.integer("sliding_window_pattern", 6)
    return [SLIDING if (layer + 1) % period else FULL for layer in range(layers)]


def config_json(config: DecoderConfig) -> dict[str, Any]:
    """Returns config.json of the first model type that reads back as the same model; ValueError if there is none."""
    # Without dtypes and how it is computed, which are not the model's.
    computed = ("dtype", "param_dtype", "residual_dtype", "fp32_head", "remat", "attention")
    defaults = {each.name: each.default for each in dataclasses.fields(config)}
    plain = dataclasses.replace(config, **{name: defaults[name] for name in computed})
    for model_type in FAMILIES:
        values = _as_family(plain, model_type)
        try:
            if decoder_config(JsonObject("config.json", values)) == plain:
                return values
        except ValueError:
            # A type that refuses these options, such as an odd window: it is not the one.
            continue
    options = {name: value for name, value in defaults.items() if value is not dataclasses.MISSING}
    changed = {name: getattr(plain, name) for name, value in options.items() if getattr(plain, name) != value}
    expected = f"a model that transformers has as one of {', '.join(FAMILIES)}"
    raise ValueError(f"export: expected {expected}, got one with {changed}")


def _as_family(config: DecoderConfig, model_type: str) -> dict[str, Any]:
    """Returns config.json in the spelling of transformers 5, of what the type can say about the model."""
    family = FAMILIES[model_type]
    names = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}
    values: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        family.activation_key: names[config.activation],
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "rope_parameters": _rope_json(config, model_type),
    }
    sliding = config.sliding
    if model_type != "llama":
        values["sliding_window"] = None if sliding is None else sliding.window
    if config.context_length is not None:
        values[CONTEXT] = config.context_length
    if model_type not in ("llama", "mistral"):
        kinds = (False,) * config.num_layers if sliding is None else sliding.layers
        values["layer_types"] = [SLIDING if each else FULL for each in kinds]
    if model_type in ("qwen2", "qwen3"):
        values["use_sliding_window"] = sliding is not None
    if family.is_gemma:
        # Taken from the scale, and rounded where that is the inverse root of an integer.
        scalar = config.attention_scale**-2
        values["query_pre_attn_scalar"] = round(scalar) if math.isclose(scalar, round(scalar)) else scalar
        values["attn_logit_softcapping"] = config.attention_softcap
        values["final_logit_softcapping"] = config.logit_softcap
    return values


def _rope_json(config: DecoderConfig, model_type: str) -> dict[str, Any]:
    scaling = config.rope_scaling
    kind = {type(None): "default", LinearScaling: "linear", Llama3Scaling: "llama3"}[type(scaling)]
    stretch = {} if scaling is None else dataclasses.asdict(scaling)
    full = {"rope_type": kind, "rope_theta": config.rope_theta, **stretch}
    if model_type != "gemma3_text":
        return full
    theta = config.rope_theta if config.sliding is None else config.sliding.rope_theta
    return {FULL: full, SLIDING: {"rope_type": "default", "rope_theta": theta}}
