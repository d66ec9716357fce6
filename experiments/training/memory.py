"""What a run needs of each device's memory, from its compiled programs, said before the first of them runs."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

import jax

from experiments.config import Config
from experiments.config.changes import may_change
from experiments.models.mesh import MeshSpec, parse_mesh
from experiments.models.placement import bytes_a_device, total_bytes
from experiments.options import field_of
from experiments.runs.console import RunConsole
from experiments.runs.processes import processes
from experiments.training.trainer import EVALUATION, ROLLOUT, WARM_START_CHECK, Trainer

WORTH_NAMING = 0.2
"""Share of the need from which on a part of it is worth a remedy."""


class StepMemory(NamedTuple):
    """Bytes of one device.

    Attributes:
      state: held all the time: parameters, what is not trained, optimizer state, the reference.
      intermediate: what a micro-batch computes with.
      gradients: of one micro-batch, or of several, added up.
      several: whether a step may have several micro-batches: their sum is held beside the gradients of one that is added
        and of the next, which runs already.
      update: what the update takes beside the gradients.
      draws: what a rollout, an evaluation or a check of the warm start takes, by these names, which are what is printed.
      compiling: most bytes that were held so far: in small runs the compiler takes most, to try out products.
      phase: said before the numbers, where they are not those of the run's own steps.
    """

    state: int
    intermediate: int = 0
    gradients: int = 0
    several: bool = False
    update: int = 0
    draws: Mapping[str, int] = MappingProxyType({})
    compiling: int = 0
    phase: str = ""

    @property
    def micro_batch(self) -> int:
        """What one micro-batch takes beside the state, the sum of those before it included."""
        return self.intermediate + self.gradients * (3 if self.several else 1)

    @property
    def need(self) -> int:
        """Bytes at the moment that takes most."""
        steps = self.state + max(self.micro_batch, self.gradients + self.update, *self.draws.values())
        return max(steps, self.compiling)

    @property
    def least(self) -> int:
        """The same of steps of one micro-batch."""
        return self._replace(several=False).need

    def __str__(self) -> str:
        parts = {
            "a micro-batch": self.micro_batch,
            "the update": self.gradients + self.update if self.gradients else 0,
            **self.draws,
        }
        beside = ", ".join(f"{name} {size(number)}" for name, number in parts.items() if number)
        compiling = (
            f"; set-up and compilation took {size(self.compiling)}"
            if self.compiling > self._replace(compiling=0).need
            else ""
        )
        return f"{self.phase}state {size(self.state)}{f'; beside it {beside}' if beside else ''}{compiling}"


def say_memory(trainer: Trainer, console: RunConsole, *, resumed: bool = False) -> None:
    """Compiles the programs of a step, of a rollout and of evaluations, which their first calls would do anyway, and prints
    what they need of a device.

    Nothing where no step is left.

    Args:
      trainer: with its state.
      console: where to print.
      resumed: whether the run goes on, so that most of its options cannot be changed.

    Raises:
      ValueError: more than there is, with what would make it fit.
    """
    if trainer.progress.step >= trainer.config.schedule.steps:
        return
    memory = memory_of(trainer)
    # Of all processes: each knows its own devices.
    limits = processes().gather("memory of devices", device_limit(trainer.mesh.local_devices))
    limit = min((each for each in limits if each is not None), default=None)
    partial = "" if memory.gradients else "at least "
    here = "" if limit is None else f" of {size(limit)}"
    console.say(f"memory a device: {partial}{size(memory.need)}{here} ({memory})")
    if limit is None or memory.need <= limit:
        return
    decoder, config = trainer.origin.decoder, trainer.config
    # Of the prompts that there are, which may be fewer than asked for.
    config = replace(config, evaluation=replace(config.evaluation, num_prompts=trainer.num_held_out))
    cures = remedies(memory, limit, config, trainer.sizes.rows, None if decoder is None else decoder.remat)
    cures = [cure for cure in cures if not resumed or may_change(field_of(cure.split()[0]))]
    fits = ", or ".join(cures) or "a device with more memory"
    sentence = (
        f"a device needs {partial}{size(memory.need)} and has {size(limit)} ({memory}); what may make it fit: {fits}"
    )
    if memory.least > limit:
        raise ValueError(f"memory: {sentence}")
    console.warn(f"memory, in a step of several micro-batches: {sentence}")


def memory_of(trainer: Trainer) -> StepMemory:
    """What a run's steps need, or its warm start where that is still to come and needs more; of `--invariant`, whose
    programs are many small ones, the state alone."""
    config, params = trainer.config, bytes_a_device(trainer.state.params)
    held = params + bytes_a_device(trainer.frozen)
    # A copy for rollouts on a mesh of their own stays there.
    copy = 0 if trainer.sampled_frozen is trainer.frozen else bytes_a_device(trainer.sampled_frozen)
    state = held + copy + bytes_a_device(trainer.state.opt_state) + (params if trainer.has_reference else 0)
    programs = trainer.ahead()
    if programs is None:
        return StepMemory(state)
    micro_batch, update = (program.compiled.memory_analysis() for program in programs)
    draws = trainer.memory_of_draws()
    if micro_batch is None or update is None or draws is None:
        return StepMemory(state)
    check = {name: draws.pop(name) for name in [WARM_START_CHECK] if name in draws}
    batch = max(0, micro_batch.argument_size_in_bytes - held)
    schedule = config.schedule
    several = schedule.micro_batches != 1 if schedule.docs_per_step == 0 else _several(trainer, schedule.docs_per_step)
    steps = StepMemory(
        state,
        intermediate=micro_batch.temp_size_in_bytes + batch,
        gradients=micro_batch.output_size_in_bytes,
        several=several,
        update=update.temp_size_in_bytes + update.output_size_in_bytes - update.alias_size_in_bytes,
        draws=draws,
        # The programs have just been compiled.
        compiling=peak_bytes(trainer.mesh.local_devices) or 0,
    )
    if not trainer.warm_start_to_come:
        return steps
    # Its programs differ by the loss and the optimizer, which is AdamW whatever that of the run is.
    moments = params * total_bytes(trainer.warm_start_moments()) // total_bytes(trainer.state.params)
    several = _several(trainer, config.warm_start.batch_size)
    warm = steps._replace(state=held + copy + moments, several=several, draws=check, phase="in the warm start: ")
    return max(steps, warm, key=lambda memory: memory.need)


def _several(trainer: Trainer, documents: int) -> bool:
    """Whether so many documents of a step, each the longest possible one, need several micro-batches."""
    sizes = trainer.sizes
    rows = parse_mesh(trainer.config.mesh).ranks * sizes.rows
    return documents > rows * (sizes.row // (sizes.prompt + sizes.completion))


def remedies(memory: StepMemory, limit: int, config: Config, rows: int, remat: str | None) -> list[str]:
    """Options that make a step smaller, those against the largest part of the need first.

    Args:
      memory: the need.
      limit: bytes that a device has.
      config: the options.
      rows: of a micro-batch.
      remat: what layers keep for the backward pass; None where the model decides that itself.
    """
    sums = memory.micro_batch - memory.intermediate
    drawing = max(memory.draws, key=lambda name: memory.draws[name], default="")
    of_draw = memory.draws.get(drawing, 0)
    if memory.micro_batch >= max(memory.gradients + memory.update, of_draw):
        beside = memory.intermediate
        parts = [(beside, _smaller_micro_batch(rows, remat)), (sums, _narrower_sums(config))]
    elif of_draw > memory.gradients + memory.update:
        sums, beside, parts = 0, of_draw, [(of_draw, [_smaller_draw(drawing, config)])]
    else:
        beside, parts = memory.update, [(sums, _narrower_sums(config))]
    parts.append((memory.state + sums, _more_shards(memory.state + sums, limit - beside, config)))
    in_order = sorted(parts, key=lambda part: -part[0])
    return [cure for number, cures in in_order if number > WORTH_NAMING * memory.need for cure in cures]


def _smaller_draw(name: str, config: Config) -> str:
    return {
        ROLLOUT: f"--rollout.prompts-per-rollout below {config.rollout.prompts_per_rollout}",
        EVALUATION: f"--evaluation.num-prompts below {config.evaluation.num_prompts}",
        WARM_START_CHECK: f"--warm-start.check-every above {config.warm_start.max_steps}",
    }[name]


def _smaller_micro_batch(rows: int, remat: str | None) -> list[str]:
    fewer = [f"--schedule.rows below {rows}"] if rows > 1 else []
    return [*fewer, *(["--model.remat full"] if remat not in (None, "full") else [])]


def _narrower_sums(config: Config) -> list[str]:
    wide = config.schedule.accumulate == "float32" and not config.invariant
    return ["--schedule.accumulate bfloat16"] if wide else []


def _more_shards(split: int, room: int, config: Config) -> list[str]:
    """For what lies in shards."""
    cures = []
    if not config.invariant and 0 < room < split:
        mesh = _with_more_shards(parse_mesh(config.mesh), math.ceil(split / room))
        missing = mesh.num_devices - jax.device_count()
        cures.append(f"--mesh {mesh}{f' ({missing} more devices)' if missing > 0 else ''}")
    if config.model.path is not None and not config.lora.rank and not config.invariant:
        cures.append("--lora.rank 16")
    return cures


def _with_more_shards(mesh: MeshSpec, factor: int) -> MeshSpec:
    """The mesh with at least `factor` times the shards of the parameters, on the same devices where that is possible."""
    taken = next((copies for copies in range(factor, mesh.data + 1) if mesh.data % copies == 0), None)
    if taken is not None:
        return replace(mesh, data=mesh.data // taken, fsdp=mesh.fsdp * taken)
    return replace(mesh, data=1, fsdp=mesh.fsdp * factor)


def device_limit(devices: Sequence[jax.Device]) -> int | None:
    """Bytes that a program may take of each of the devices; None where nothing says so, as on a CPU."""
    return min(_stats(devices, "bytes_limit"), default=None)


def peak_bytes(devices: Sequence[jax.Device]) -> int | None:
    """Most bytes that any of the devices has held so far; None where nothing says so, as on a CPU."""
    return max(_stats(devices, "peak_bytes_in_use"), default=None)


def _stats(devices: Sequence[jax.Device], name: str) -> list[int]:
    stats = [device.memory_stats() or {} for device in devices if device.platform != "cpu"]
    return [each[name] for each in stats if name in each]


def size(number: int) -> str:
    """A number of bytes, for people."""
    for power, unit in ((30, "GiB"), (20, "MiB")):
        if number >= 2**power:
            return f"{number / 2**power:.1f} {unit}"
    return f"{number / 2**10:.1f} KiB"
