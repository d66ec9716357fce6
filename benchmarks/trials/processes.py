"""A tiny run as a process of its own, watched from outside and stopped at a chosen moment."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import tyro

from experiments.config import Config

TINY = (
    "--task comparison:1 --quiet --model.hidden-size 32 --model.intermediate-size 64 --model.num-layers 1 "
    "--model.num-heads 2 --model.num-kv-heads 2 --model.no-tie-embeddings --warm-start.max-steps 4 "
    "--warm-start.batch-size 32 --warm-start.check-every 4 --warm-start.target 1 --rollout.prompts-per-rollout 16 "
    "--rollout.num-generations 4 --schedule.docs-per-step 32 --schedule.rows 8 --schedule.row-length 32 "
    "--evaluation.every 4 --evaluation.num-prompts 16 --drift.every 3 --checkpoint.every 1"
).split()
"""Half a rollout a step, so that checkpoints hold queued documents; every step is saved."""
TIMEOUT_SECONDS = 600
SUPERVISED = (
    "--quiet --model.hidden-size 32 --model.intermediate-size 64 --model.num-layers 1 --model.num-heads 2 "
    "--model.num-kv-heads 2 --schedule.docs-per-step 8 --schedule.rows 2 --schedule.epochs 4 --evaluation.every 4 "
    "--evaluation.num-prompts 16 --checkpoint.every 1"
).split()
"""Options of `experiments.sft`, without a file."""


def main_of(program: str) -> str:
    """Returns `python -m program` as a program text, also where this process ignores SIGINT, as in a shell's background."""
    return (
        "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        f"runpy.run_module('{program}', run_name='__main__', alter_sys=True)"
    )


MAIN = main_of("experiments.grpo")


def tiny_config(*options: str) -> Config:
    """The run of TINY in this process, with further options."""
    return tyro.cli(Config, args=[*TINY, *options])


@dataclass(frozen=True)
class Ended:
    """A process that is over.

    Attributes:
        code: its exit code; minus the number of the signal that killed it.
        last: the last line on stderr.
        traceback: whether there was one.
        errors: all of stderr.
    """

    code: int
    last: str
    traceback: bool
    errors: str


def start(arguments: list[str], cache: Path, *, main: str = MAIN, devices: int | None = None) -> subprocess.Popen:
    """The command line as a process, whose compiled programs are kept in `cache`, on as many simulated devices; None leaves
    their number as XLA_FLAGS say it."""
    settings = {"JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": str(cache)}
    settings["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    if devices is not None:
        others = os.environ.get("XLA_FLAGS", "")
        settings["XLA_FLAGS"] = f"{others} --xla_force_host_platform_device_count={devices}"
    command = [sys.executable, "-c", main, *arguments]
    environment = {**os.environ, **settings}
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def start_together(
    arguments: list[str], cache: Path, count: int, main: str = MAIN, devices: int = 1
) -> list[subprocess.Popen]:
    """The command line as several processes of one run.

    Args:
        arguments: of every one of them.
        cache: as for `start`.
        count: how many.
        main: their program.
        devices: of each.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = ["--distributed", "--coordinator", f"127.0.0.1:{port}", "--num-processes", str(count), "--process-id"]
    return [start([*arguments, *place, str(index)], cache, main=main, devices=devices) for index in range(count)]


def stop_when(process: subprocess.Popen, moment: Callable[[], bool], delay: float, number: signal.Signals) -> bool:
    """Sends a signal `delay` seconds after `moment` says so; False if the process ended before."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while process.poll() is None and not moment():
        if time.monotonic() > deadline:
            process.kill()
            raise TimeoutError(f"the run did not come to the moment in {TIMEOUT_SECONDS} seconds")
        time.sleep(0.0005)
    time.sleep(delay)
    if process.poll() is not None:
        return False
    process.send_signal(number)
    return True


def wait(process: subprocess.Popen) -> Ended:
    """The end of a process."""
    _, errors = process.communicate(timeout=TIMEOUT_SECONDS)
    lines = errors.strip().splitlines() or [""]
    return Ended(process.returncode, lines[-1], any(line.startswith("Traceback") for line in lines), errors)
