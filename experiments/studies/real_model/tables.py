"""The markdown of the study: the origin of the states, then one table for each of the three questions."""

import platform
from typing import TYPE_CHECKING

import jax
import numpy as np

from experiments.studies.gradient_filter import threshold_label
from experiments.studies.real_model.checks import Drift, Filtered, Masked
from experiments.studies.real_model.states import HeadStates

if TYPE_CHECKING:
    from experiments.studies.real_model.__main__ import Result


def markdown(result: "Result", states: HeadStates, token_chunk: int, vocab_tile: int, repeats: int) -> str:
    """All tables of a result."""
    device = jax.devices()[0]
    (vocab_size, hidden_size), facts = states.weight.values.shape, result.facts
    lines = [
        f"H={hidden_size}, V={vocab_size}, bf16 hidden states and weight; JAX {jax.__version__}, NumPy {np.__version__}, "
        f"Python {platform.python_version()}, {device.platform} ({device.device_kind}); times: median of {repeats}",
        "",
        *_load_lines(facts),
        "",
        "| tokens | number | mean entropy, nats |",
        "|---|---|---|",
        *(f"| {one.name} | {len(one.targets)} | {result.entropies[one.name]:.2f} |" for one in states.sets),
        "",
        "## Drift: against float64 on the same bf16 operands, nats",
        "",
        *_drift_lines(result.drift),
        *(f"\nNot run: `{name}`: {reason}." for name, reason in result.not_run.items()),
        "",
        "The library's report of every engine:",
        "",
        "```",
        *(f"{row.tokens}, against float64\n{row.log_prob}" for row in result.drift),
        *(f"{row.tokens}, against the sampler\n{row.sampler}" for row in result.drift if row.sampler is not None),
        "```",
        "",
        "## Masks: a label on half of the tokens; NaN and target -100 behind the mask",
        "",
        *_mask_lines(result.masks),
        "",
        f"## Gradient filter: engine chunked, blocks of {token_chunk} tokens × {vocab_tile} columns",
        "",
        *_filter_lines(result.filter),
    ]
    return "\n".join(lines)


def _load_lines(facts: dict) -> list[str]:
    versions = ", ".join(f"{name} {version}" for name, version in facts.get("versions", {}).items())
    lines = [
        f"Model: {facts.get('model')}, {facts.get('file')} (sha256 {str(facts.get('sha256'))[:16]}); read with {versions}.",
        "",
        "| text | tokens | perplexity of the fp32 model |",
        "|---|---|---|",
        *(f"| {one['name']} | {one['tokens']} | {one['perplexity']:.1f} |" for one in facts.get("texts", [])),
        "",
        f"Greedy continuation: {facts.get('greedy')!r}",
    ]
    if "samples" in facts:
        samples = facts["samples"]
        lines += [
            "",
            f"Samples: {samples['answers']} answers, {samples['finished']} finished; the sampler's fp32 log-probs and those "
            f"of one forward pass differ by at most {samples['fp32_sampler_against_forward']:.1e}. The first, to "
            f"{samples['example'][0]!r}: {samples['example'][1]!r}",
        ]
    return lines


def _drift_lines(rows: list[Drift]) -> list[str]:
    lines = [
        "| tokens | engine | log-prob, max | mean | entropy, max | mean | log-prob against `reference`, max "
        "| against the fp32 sampler, max | p99 |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        sampler = "– | –"
        if row.sampler is not None:
            sampler = f"{row.sampler.max_abs_error:.1e} | {row.sampler.abs_error_quantiles[2]:.1e}"
        report = row.log_prob
        lines.append(
            f"| {row.tokens} | {row.engine} | {report.max_abs_error:.1e} | {report.mean_abs_error:.1e} "
            f"| {row.entropy_max:.1e} | {row.entropy_mean:.1e} | {row.against_reference:.1e} | {sampler} |"
        )
    return lines


def _mask_lines(rows: list[Masked]) -> list[str]:
    lines = [
        "| engine | tokens | with a label | rows computed | values of live tokens | their hidden gradients | masked rows "
        "| weight gradient against the live tokens alone | time, × all labels |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        values, gradients = (
            "same bits" if equal else f"differ, up to {row.live_largest:.1e}"
            for equal in (row.live_values_equal, row.live_gradients_equal)
        )
        zeros = "exactly 0" if row.masked_zero else "NOT 0"
        lines.append(
            f"| {row.engine} | {row.tokens} | {row.labels} | {row.rows_computed} | {values} | {gradients} | {zeros} "
            f"| {row.weight_gradient_error:.1e} | {row.time_ratio:.2f} |"
        )
    return lines


def _filter_lines(rows: list[Filtered]) -> list[str]:
    lines = [
        "| tokens | vocabulary | threshold | blocks left out | dHidden against unfiltered | dWeight "
        "| dHidden against float64 | dWeight | forward+backward | × unfiltered |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    base = {row.tokens: row.seconds for row in rows if row.threshold is None}
    for row in rows:
        errors = row.hidden_error, row.weight_error, row.hidden_float64, row.weight_float64
        cells = " | ".join(f"{error:.1e}" for error in errors)
        lines.append(
            f"| {row.tokens} | {row.order} | {threshold_label(row.threshold)} | {row.skipped:.1%} | {cells} "
            f"| {row.seconds * 1e3:.0f} ms | {row.seconds / base[row.tokens]:.2f} |"
        )
    return lines
