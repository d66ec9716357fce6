"""Runs of a log-prob function in several processes on simulated CPU devices, with the vocabulary sharded over all of them.

    python -m jaxlogp.invariance.processes RANK PROCESSES PORT FOLDER MODULE:FUNCTION

`run_in_processes` starts them. They communicate over the loopback address, and exchange data with the caller through
files in a temporary folder.
"""

import importlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Float, Int

from jaxlogp._arrays import AnyArray
from jaxlogp.errors import require

NAMES = ("hidden", "weight", "targets")


def run_in_processes(
    path: str,
    hidden: Float[AnyArray, "tokens hidden"],
    weight: Float[AnyArray, "vocab hidden"],
    targets: Int[AnyArray, " tokens"],
    *,
    num_processes: int = 2,
    devices_per_process: int = 4,
    timeout: float = 120.0,
) -> np.ndarray:
    """Runs a function whose devices belong to several processes, and returns its result.

    Each process compiles ``function(hidden, weight, targets)`` with the rows of the weight placed over all devices of
    all processes (mesh axis "tensor") and everything else replicated.

    Args:
        path: "module:function", importable on this process's path.
        hidden: [tokens, H].
        weight: [V, H], V divisible by the number of devices.
        targets: [tokens], ids in [0, V).
        num_processes: number of processes.
        devices_per_process: simulated CPU devices per process.
        timeout: seconds after which the processes are terminated.

    Returns:
        The function's result, from the first process.

    Raises:
        ValueError: if ``path`` is not module:function, or the devices do not divide V.
        RuntimeError: if a process failed or took too long; the message ends with its last output.
    """
    require(path.count(":") == 1, "path", "module:function", repr(path))
    total = num_processes * devices_per_process
    require(weight.shape[0] % total == 0, "weight", f"rows that {total} devices divide", weight.shape[0])
    with tempfile.TemporaryDirectory() as folder:
        arrays = dict(zip(NAMES, (np.asarray(x) for x in (hidden, weight, targets)), strict=True))
        for name, array in arrays.items():
            _save(Path(folder) / name, array)
        said = _run_all(path, folder, num_processes, devices_per_process, timeout)
        if said is not None:
            raise RuntimeError(f"{path} in {num_processes} processes: {said}")
        return _load(Path(folder) / "result")


def _run_all(path: str, folder: str, num_processes: int, devices: int, timeout: float) -> str | None:
    """Runs the processes to completion; returns a message about a failure, or None."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}".strip()
    search = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": search}
    command = [sys.executable, "-m", "jaxlogp.invariance.processes"]
    processes = []
    logs = [Path(folder) / f"log{rank}" for rank in range(num_processes)]
    try:
        for rank, log in enumerate(logs):
            arguments = [str(rank), str(num_processes), str(port), folder, path]
            with open(log, "wb") as output:
                processes.append(
                    subprocess.Popen([*command, *arguments], env=environment, stdout=output, stderr=output)
                )
        return _wait(processes, logs, timeout)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _wait(processes: list[subprocess.Popen], logs: list[Path], timeout: float) -> str | None:
    """Waits for all processes or the first failure: the others may wait for the failed one forever."""
    deadline = time.monotonic() + timeout
    while True:
        codes = [process.poll() for process in processes]
        for rank, code in enumerate(codes):
            if code:
                return f"process {rank} ended with status {code}: {_last_line(logs[rank])}"
        if None not in codes:
            return None
        if time.monotonic() > deadline:
            waiting = [rank for rank, code in enumerate(codes) if code is None]
            last = "; ".join(f"{rank} said last: {_last_line(logs[rank])}" for rank in waiting)
            return f"no result after {timeout:g} seconds; of processes {waiting} still running, {last}"
        time.sleep(0.02)


def _last_line(log: Path) -> str:
    said = log.read_text(errors="replace").strip().splitlines()
    return said[-1] if said else "nothing"


def _save(path: Path, array: np.ndarray) -> None:
    # NumPy's file format does not support bfloat16.
    header = json.dumps({"dtype": str(array.dtype), "shape": array.shape})
    path.write_bytes(header.encode() + b"\n" + np.ascontiguousarray(array).tobytes())


def _load(path: Path) -> np.ndarray:
    header, _, data = path.read_bytes().partition(b"\n")
    described = json.loads(header)
    return np.frombuffer(data, jax.numpy.dtype(described["dtype"])).reshape(described["shape"])


def main(rank: int, num_processes: int, port: int, folder: str, path: str) -> None:
    """Runs one of the processes."""
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes, rank, initialization_timeout=60)
    try:
        module, name = path.split(":")
        function = getattr(importlib.import_module(module), name)
        mesh = jax.make_mesh((len(jax.devices()),), ("tensor",), axis_types=(AxisType.Auto,))
        whole = NamedSharding(mesh, PartitionSpec())
        places = (whole, NamedSharding(mesh, PartitionSpec("tensor")), whole)
        arrays = [_load(Path(folder) / name) for name in NAMES]
        placed = [
            jax.make_array_from_callback(array.shape, place, lambda index, array=array: array[index])
            for array, place in zip(arrays, places, strict=True)
        ]
        # Every process waits for its own devices: shutdown, a barrier, must not begin in the middle of a collective.
        result = jax.block_until_ready(jax.jit(function, out_shardings=whole)(*placed))
        if rank == 0:
            _save(Path(folder) / "result", np.asarray(result.addressable_data(0)))
    finally:
        jax.distributed.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5])
