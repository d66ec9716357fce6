"""What a run needs of each device's memory: asked of its compiled programs before the first of them runs."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from experiments.compilation_cache import cache_report
from experiments.config import Config, is_changeable
from experiments.loop.assemble import Setup
from experiments.loop.evaluation import AnswerEvaluation
from experiments.loop.loop import Progress
from experiments.loop.phase import WARM_START, warm_start_packing
from experiments.models.compiled_program import largest
from experiments.models.lora import trained_part
from experiments.models.mesh import parse_mesh
from experiments.models.placement import bytes_a_device, bytes_of_process, machine_bytes, total_bytes
from experiments.processes import processes
from experiments.runs.console import RunConsole

ACCURACY = 1.1
"""The need is within a tenth of the peak: a run is refused if it is further above what there is, or its state is above."""
CURES = {
    "schedule.rows": "fewer --schedule.rows",
    "model.remat": "--model.remat full",
    "rollout.rows": "--rollout.rows (fewer completions at a time)",
    "rollout.prompts_per_rollout": "fewer --rollout.prompts-per-rollout",
    "evaluation.num_prompts": "fewer --evaluation.num-prompts",
    "schedule.accumulate": "--schedule.accumulate bfloat16",
    "mesh": "--mesh with more fsdp or tensor ranks",
}
CURES_OF_LEAVES = {"invariance.leaf_rows": "fewer --invariance.leaf-rows", "model.remat": CURES["model.remat"]}
"""With `--invariant`: a leaf is computed, or drawn, at a time."""


class MemoryNeed(NamedTuple):
    """Bytes of one device: held all the time, and on top of that at different moments, by name.

    In small runs the compiler takes most, to try out products: `compiling` is the most that was held so far. `host` is what
    a checkpoint takes of a process until it is written, or for good where it is pinned.
    """

    state: int
    parts: Mapping[str, int] = MappingProxyType({})
    compiling: int = 0
    host: int = 0

    @property
    def total(self) -> int:
        """Bytes at the moment that takes most."""
        return max(self.state + max(self.parts.values(), default=0), self.compiling)

    def __str__(self) -> str:
        if not self.parts:
            return f"at least {size(self.state)} (state alone, without its programs)"
        beyond = ", ".join(f"{name} {size(number)}" for name, number in self.parts.items())
        most = f"; set-up and compilation took {size(self.compiling)}" if self.compiling == self.total else ""
        return f"{size(self.total)} (state {size(self.state)}; beyond it: {beyond}{most})"


class DoesNotFit(ValueError):
    """A run needs more memory than its devices have: `found` says how much."""

    def __init__(self, need: MemoryNeed, limit: int, cures: str) -> None:
        self.need, self.limit = need, limit
        self.found = f"memory: a device needs {need} and has {size(limit)}"
        super().__init__(f"{self.found}; try {cures}")

    @property
    def shares(self) -> dict[str, float]:
        """How much there is room for of each part that is too large beside the state; empty if the state alone is."""
        room = self.limit - self.need.state
        return {name: room / part for name, part in self.need.parts.items() if 0 < room < part}


def say_memory(setup: Setup, progress: Progress, console: RunConsole, *, resumed: bool = False) -> None:
    """Compiles the programs of a step, a rollout and an evaluation, as their first calls would, and prints what they need.

    DoesNotFit if that is clearly more than there is, with what may make it fit; in a resume, what can still be changed.
    """
    if progress.step >= setup.config.schedule.steps:
        return
    warm_start_to_come = setup.warms_up and progress.evaluated < 0
    with console.waiting("compiling the programs of a step, a rollout and an evaluation"):
        need = memory_need(setup, warm_start_to_come=warm_start_to_come)
    # Each process knows its own devices, and all of them have to decide alike.
    told = {"limit": device_limit(setup.mesh.local_devices), "need": need._replace(parts=dict(need.parts))}
    everywhere = processes().gather("memory of devices", told)
    limit = min((each["limit"] for each in everywhere if each["limit"] is not None), default=None)
    need = max((MemoryNeed(*each["need"]) for each in everywhere), key=lambda each: each.total)
    of_device = f"memory per device: {need}" + ("" if limit is None else f"; limit: {size(limit)}")
    console.say(of_device + (f"; on the host, for a checkpoint: {size(need.host)}" if need.host else ""))
    programs = cache_report()
    if programs is not None:
        console.say(programs)
    if limit is None or need.total <= limit:
        return
    possible = CURES_OF_LEAVES if setup.config.invariant else CURES
    cures = [cure for option, cure in possible.items() if not resumed or is_changeable(option)]
    error = DoesNotFit(need, limit, ", ".join([*cures, "a device with more memory"]))
    if need.state > limit or need.total > ACCURACY * limit:
        raise error
    console.warn(str(error))


def memory_need(setup: Setup, *, warm_start_to_come: bool) -> MemoryNeed:
    """What a run needs, its warm start included; the state alone where the compiler does not say more."""
    state, params = _state(setup, warm_start_to_come), setup.learner.state.params
    alone = MemoryNeed(state, host=bytes_of_process(setup.learner.template()))
    drawing = functools.partial(setup.samplers.lower, params)
    others = [(name, functools.partial(drawing, shape)) for name, shape in setup.shapes.items()]
    if warm_start_to_come:
        # Last: the programs of a run that is resumed after its warm start are numbered as before.
        assert isinstance(setup.evaluation, AnswerEvaluation), "answers are rewarded"
        others.append(("micro-batch", functools.partial(_lower_warm_start, setup)))
        others.append(("evaluation", functools.partial(drawing, setup.evaluation.check_shape)))
    lowerings = [setup.learner.lower, *(lower for _, lower in others)]
    need, *found = _side_by_side(lowerings)
    parts = {"micro-batch": need.micro_batch, "update": need.update}
    for (name, _), beside in zip(others, found, strict=True):
        parts[name] = largest(parts.get(name, 0), beside)
    if None in parts.values():
        return alone
    waiting = setup.learner.gradients.sums_waiting(_micro_batches(setup, warm_start_to_come))
    parts["micro-batch"] += waiting * need.sums
    return alone._replace(parts=parts, compiling=peak_bytes(setup.mesh.local_devices) or 0)


def _lower_warm_start(setup: Setup) -> Callable[[], int | None]:
    """Lowers a micro-batch of the warm start, whose first step would otherwise wait for it alone."""
    sums = setup.backend.gradients(WARM_START, 1.0)
    compiled = sums.lower(setup.learner.state.params, warm_start_packing(setup).padding())
    return lambda: compiled().bytes_beside


def _side_by_side(lowerings: Sequence[Callable[[], Callable[[], Any]]]) -> list[Any]:
    """Returns what is compiled of each program: XLA uses few cores for one.

    Programs are lowered one after the other: JAX 0.11 numbers the kernels that it lowers, and a cache of compiled programs
    knows one with other numbers as another program. Compilations of several processes may wait for each other's.

    What a caller has set for its own thread alone, such as `jax.default_matmul_precision`, is unknown there: a program is
    then compiled again for its first call.
    """
    with ThreadPoolExecutor(None if processes().count == 1 else 1) as pool:
        compilations = [pool.submit(lower()) for lower in lowerings]
        return [compiled.result() for compiled in compilations]


def _state(setup: Setup, warm_start_to_come: bool) -> int:
    params = bytes_a_device(setup.learner.state.params)
    teacher = None if setup.learner.teacher is None else setup.learner.teacher.params
    held = params + bytes_a_device((setup.backend.frozen, teacher))
    if setup.backend.sampled_frozen is not setup.backend.frozen:
        # A copy for rollouts on a mesh of their own.
        held += bytes_a_device(setup.backend.sampled_frozen)
    steps = bytes_a_device(setup.learner.state.opt_state) + (params if setup.learner.keeps_reference else 0)
    if not warm_start_to_come:
        return held + steps
    # It has an optimizer of its own, and no reference yet.
    optimizer, trained = setup.config.warm_start.optimizer(), setup.learner.state.params
    moments = params * total_bytes(jax.eval_shape(optimizer.init, trained)) // total_bytes(trained)
    return held + max(steps, moments)


def _micro_batches(setup: Setup, warm_start_to_come: bool) -> int:
    """Returns how many a step may take, where every document is the longest possible one."""
    sizes, rollout = setup.sizes, setup.config.rollout
    step = setup.config.schedule.docs_per_step or rollout.prompts_per_rollout * rollout.num_generations
    warm = setup.config.warm_start.batch_size if warm_start_to_come else 0
    rows = parse_mesh(setup.config.mesh).ranks * sizes.rows
    return math.ceil(max(step, warm) / (rows * (sizes.row // (sizes.prompt + sizes.completion))))


def training_bytes(config: Config, params: nnx.State, gradients: int = 1) -> int:
    """Bytes of parameters, of the optimizer's state of what is trained of them, and of so many copies of its gradients."""
    trained = trained_part(params)
    optimizer = jax.eval_shape(config.optimizer.optimizer(config.schedule.steps).init, trained)
    numbers = sum(leaf.size for leaf in jax.tree.leaves(trained))
    of_gradients = gradients * numbers * jnp.dtype(config.schedule.accumulate).itemsize
    return total_bytes(params) + total_bytes(optimizer) + of_gradients


def require_room(least: int, devices: int) -> None:
    """Refuses a run that needs more bytes than all its devices have; a CPU's are those of the machine."""
    if jax.default_backend() == "cpu":
        here = machine_bytes() or None
    else:
        limit = device_limit(jax.local_devices())
        here = None if limit is None else limit * devices
    if here is not None and least > here:
        needs = f"parameters, optimizer state, gradients and the sampler's cache need at least {size(least)}"
        remedy = "try a smaller model or more memory"
        raise ValueError(f"memory: {needs}, available: {size(here)}; {remedy}")


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
    for power, unit in ((30, "GiB"), (20, "MiB")):
        if number >= 2**power:
            return f"{number / 2**power:.1f} {unit}"
    return f"{number / 2**10:.1f} KiB"
