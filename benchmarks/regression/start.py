"""The start of a run of `experiments.grpo`: seconds from the command to its first optimizer step, by the lines it prints.

As a program, `experiments.grpo` itself, with one line more once the first optimizer step is computed: the seconds of JAX's
stages so far. Reading a compiled program counts as compiling.
"""

import itertools
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from experiments import grpo
from experiments.loop import loop
from jaxlogp.errors import require

COMPUTED = "first optimizer step computed"
MOMENTS = {"memory line printed": "memory per device:", "first step computed": COMPUTED, "first step logged": "     1 "}
"""What the console's lines begin with; a step is logged just before its row is printed."""
STAGES = {
    "/jax/core/compile/jaxpr_trace_duration": "tracing",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lowering",
    "/jax/core/compile/backend_compile_duration": "compiling",
}
_CALLS = itertools.count()


class Start(NamedTuple):
    """Seconds since the command by moment, and the line before the longest time without one."""

    seconds: dict[str, float]
    silent_after: str


def read_start(lines: Sequence[tuple[float, str]], ended: float) -> Start:
    """Reads the console of a run that ended, each line with the seconds since the command."""
    seconds = {}
    for moment, begins in MOMENTS.items():
        found = next((at for at, line in lines if line.startswith(begins)), None)
        if found is None:
            raise ValueError(f"console of a run: expected a line {begins!r}, got {len(lines)} others")
        seconds[moment] = found
    # The line that tells of the computed step is not the run's own.
    own = [(0.0, "the command"), *(each for each in lines if not each[1].startswith(COMPUTED)), (ended, "")]
    silence, after = max((later - sooner, line) for (sooner, line), (later, _) in itertools.pairwise(own))
    return Start({**seconds, "process ended": ended, "longest silence": silence}, after)


def run_timed(command: Sequence[str]) -> Start:
    """Runs a command in a process of its own, and shows its console with the seconds since the command."""
    started, lines = time.perf_counter(), []
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append((time.perf_counter() - started, line.rstrip()))
            print(f"  [{lines[-1][0]:6.1f} s] {lines[-1][1]}", flush=True)
    ended = time.perf_counter() - started
    require(process.returncode == 0, "start of a run", "exit code 0", process.returncode)
    return read_start(lines, ended)


def start_command(options: str, folder: str) -> list[str]:
    """Returns the command of a run that keeps everything in a folder, compiled programs too."""
    reward = f"{differing_reward.__module__}:{differing_reward.__name__}"
    kept = ["--out", f"{folder}/runs", "--cache", f"{folder}/programs", "--reward.functions", reward]
    return [sys.executable, "-m", "benchmarks.regression.start", *options.split(), *kept]


def differing_reward(example: object, completion: str) -> float:
    """A reward that differs within every group, whatever is drawn: otherwise a step computes no micro-batch."""
    del example, completion
    return next(_CALLS) % 7 / 7.0


def main() -> None:
    seconds: Counter[str] = Counter()
    take_step = loop.take_step

    def add(event: str, duration: float, **_: Any) -> None:
        if event in STAGES:
            seconds[STAGES[event]] += duration

    def first_step(*given: Any, **options: Any) -> Any:
        done = take_step(*given, **options)
        loop.take_step = take_step
        stages = ", ".join(f"{stage} {seconds[stage]:.1f} s" for stage in STAGES.values())
        print(f"{COMPUTED}; so far {stages}", flush=True)
        return done

    jax.monitoring.register_event_duration_secs_listener(add)
    loop.take_step = first_step
    grpo.run_cli()


if __name__ == "__main__":
    main()
