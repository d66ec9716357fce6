"""What a run chooses where its options leave it open: recomputation, micro-batches and completions at a time that fit."""

import gc
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp

from experiments.config import Config
from experiments.experience.prompts import LengthLimits
from experiments.learner.model_source import ModelSource
from experiments.loop.assemble import Setup
from experiments.loop.found import Found
from experiments.loop.inference import completions_at_a_time
from experiments.loop.loop import Progress
from experiments.loop.memory import DoesNotFit, device_limit, say_memory, size, training_bytes
from experiments.models.decoder_config import DecoderConfig
from experiments.models.mesh import parse_mesh
from experiments.models.parameters import abstract_decoder
from experiments.processes import processes
from experiments.runs.console import RunConsole

FROM_LEAST = ("products", "attention", "full")
"""Policies of `experiments.models.remat` by what they compute again. What the compiler would keep by itself is not known
before it has compiled, and was 3 % faster than products. Fewer rows come last: a quarter of them cost 16 %, as full does,
and saved less."""
ROOM = 0.75
"""Part of a device's memory that may be predicted to be taken; the head's blocks and what a layer works with come on top."""
MOST_OF_A_LEAF = 12 * 2**30
"""Bytes that the layers may keep of a leaf of `--invariant`. The bits of such a run depend on the recomputation, which is
therefore chosen by the sizes of the run alone, whatever memory a device has."""
DRAWN = ("rollout", "evaluation")
"""Parts of a need that take less where fewer completions are drawn at a time."""


class Plan(NamedTuple):
    """How a step is computed: its recomputation, and rows of a micro-batch; None for those of the options."""

    remat: str | None
    rows: int | None
    reason: str

    def __str__(self) -> str:
        rows = () if self.rows is None else (f"micro-batches of {self.rows} rows",)
        remat = () if self.remat is None else (f"recomputation in the backward pass: {self.remat}",)
        return f"{', '.join((*rows, *remat))} ({self.reason})"


def set_up_what_fits(found: Found, *, chooses_remat: bool) -> tuple[Found, Setup]:
    """Compiles a run as it is planned, and again with the next plan or fewer completions at a time, until it fits.

    DoesNotFit if nothing is left to try.
    """
    console, choices = RunConsole(found.config.quiet), _Choices(found, chooses_remat)
    found = choices.first(found, console)
    while True:
        setup = found.assemble()
        try:
            say_memory(setup, Progress(), console)
            return found, setup
        except DoesNotFit as error:
            at_a_time = completions_at_a_time(found.config.rollout, setup.backend.rollout_ranks)
            cheaper = choices.cheaper(found, error, at_a_time, console)
            if cheaper is None:
                raise
            found = cheaper
        # Its arrays make room for those of the next. Its parts refer to each other: only the collector frees them.
        del setup
        gc.collect()


class _Choices:
    """What the options of a run leave open."""

    def __init__(self, found: Found, chooses_remat: bool) -> None:
        is_decoder = found.model.decoder is not None
        self._begins_with_plan = chooses_remat and is_decoder
        self._draws_fewer = is_decoder and found.config.rollout.rows is None and not found.config.invariant
        given = found.config, found.sizes, found.model
        self._plans = plans_of(*given, chooses_remat=self._begins_with_plan)

    def first(self, found: Found, console: RunConsole) -> Found:
        plan = next(self._plans, None) if self._begins_with_plan else None
        return found if plan is None else _planned(found, plan, console)

    def cheaper(self, found: Found, error: DoesNotFit, at_a_time: int, console: RunConsole) -> Found | None:
        """Returns a run that needs less of all that was too large; None if there is no choice left."""
        drawn = [share for part, share in error.shares.items() if part in DRAWN]
        others = error.shares.keys() - set(DRAWN)
        if not error.shares or others - {"micro-batch"} or (drawn and not (self._draws_fewer and at_a_time > 1)):
            return None
        plan = next(self._plans, None) if others else None
        if others and plan is None:
            return None
        instead = ["a plan that needs less"] if others else []
        if drawn:
            at_a_time = fewer(at_a_time, min(drawn))
            found = found.with_options(at_a_time=at_a_time)
            instead.append(f"{at_a_time} completions at a time on each data rank")
        console.warn(f"{error.found}; trying {' and '.join(instead)}")
        return found if plan is None else _planned(found, plan, console)


def _planned(found: Found, plan: Plan, console: RunConsole) -> Found:
    console.say(str(plan))
    return found.with_options(remat=plan.remat, rows=plan.rows)


def fewer(at_a_time: int, share: float) -> int:
    """Returns a power of two, at most this share of so many completions."""
    return 1 << max(0, int(at_a_time * share).bit_length() - 1)


def plans_of(config: Config, sizes: LengthLimits, model: ModelSource, *, chooses_remat: bool) -> Iterator[Plan]:
    """Yields plans from the fastest that is expected to fit; those with fewer rows than by default if no option names them.

    None on a CPU. With `--invariant` there is one, by the run's sizes alone.
    """
    decoder = model.decoder
    limits = processes().gather("memory for a plan", device_limit(jax.local_devices()))
    limit = min((each for each in limits if each is not None), default=None)
    if limit is None:
        return
    if config.invariant:
        if decoder is not None and chooses_remat:
            yield _plan_of_leaves(decoder, sizes)
        return
    fewer_rows = [] if config.schedule.rows is not None else _halves(sizes.rows)
    if decoder is None or not chooses_remat:
        for rows in fewer_rows:
            yield Plan(None, rows, f"{sizes.rows} rows need too much")
        return
    mesh = parse_mesh(config.mesh)
    # Gradients of micro-batches: their sum, and those that are added.
    held = training_bytes(config, abstract_decoder(decoder)[1], gradients=2) // (mesh.fsdp * mesh.tensor)
    fitted, tried = False, [(policy, sizes.rows) for policy in FROM_LEAST]
    tried += [(FROM_LEAST[-1], rows) for rows in fewer_rows]
    for policy, rows in tried:
        kept = kept_bytes(decoder, policy, rows * sizes.row // mesh.sequence, mesh.tensor)
        fitted = fitted or held + kept <= ROOM * limit or (policy, rows) == tried[-1]
        if fitted:
            parts = f"{size(kept)} of a micro-batch is kept, beside {size(held)} of state and gradients"
            yield Plan(policy, None if rows == sizes.rows else rows, f"{parts}, of {size(limit)}")


def _plan_of_leaves(decoder: DecoderConfig, sizes: LengthLimits) -> Plan:
    kept = {policy: kept_bytes(decoder, policy, sizes.rows * sizes.row) for policy in FROM_LEAST}
    policy = next((each for each in FROM_LEAST if kept[each] <= MOST_OF_A_LEAF), FROM_LEAST[-1])
    return Plan(policy, None, f"{size(kept[policy])} of a leaf is kept; at most {size(MOST_OF_A_LEAF)} by choice")


def _halves(rows: int) -> list[int]:
    return [] if rows == 1 else [rows // 2, *_halves(rows // 2)]


def kept_bytes(decoder: DecoderConfig, policy: str, tokens: int, tensor: int = 1) -> int:
    """What the layers keep of so many tokens for the backward pass, on one of `tensor` ranks."""
    wide, narrow = jnp.dtype(decoder.stream_dtype).itemsize, jnp.dtype(decoder.dtype).itemsize
    attended = decoder.num_heads * decoder.head_dim * narrow + 4 * decoder.num_heads
    projected = (decoder.num_heads + 2 * decoder.num_kv_heads) * decoder.head_dim + 2 * decoder.intermediate_size
    of_layer = decoder.hidden_size * wide
    if policy in ("attention", "products"):
        of_layer += attended // tensor
    if policy == "products":
        of_layer += decoder.hidden_size * wide + projected * narrow // tensor
    return decoder.num_layers * tokens * of_layer
