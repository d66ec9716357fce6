"""The processes of one run: what they tell each other between two steps, and one end for all of them.

    python -m experiments.grpo --distributed ...        the same command in every process, see docs/scaling.md

Every process runs the same program over the same documents, on one mesh of all their devices; JAX moves the arrays. What
one process alone knows (a signal, a clock, its part of the decoded and scored completions) goes through `gather`, over the
key-value store of `jax.distributed`. Process 0 writes the run folder; the others read it.

A process that fails says why before it ends, and all others end with its reason and its exit code, instead of waiting for
it in a collective for ever. One that is killed can say nothing: JAX misses its heartbeats and ends the others.
"""

import atexit
import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

# The key-value store has no public name.
from jax._src import distributed
from jaxtyping import Int

from experiments.terminal import printable
from jaxlogp.errors import require

T = TypeVar("T")

ROOM = "jaxlogp"
FAILURE = f"{ROOM}/failure"
HEARTBEAT_TIMEOUT_SECONDS = 20
"""After so long without a sign of life, JAX takes a process for dead and ends the others."""
START_TIMEOUT_SECONDS = 300
SLOW_SECONDS = 30.0
"""A process that the others have waited for this long is named."""
GRACE_SECONDS = 5.0
"""A process in which nothing has failed has this long to arrive at the end by itself."""
LEAVE_SECONDS = 15.0
"""A process that ends for a fault waits at most so long for the others, to leave with them."""
FINISH_SECONDS = 300.0
"""A process whose run went well waits at most so long for the others: the first still draws the curves."""
_POLL_MS = 1000


class Failure(NamedTuple):
    process: int
    code: int
    sentence: str

    def __str__(self) -> str:
        return f"process {self.process} ended: {self.sentence}"


@dataclass
class Processes:
    """All processes of a run, seen from one of them; calls of one `channel` come from one thread."""

    index: int = 0
    count: int = 1
    _store: Any = None
    channel: str = ""
    _gathers: int = 0
    _ending: threading.Event = field(default_factory=threading.Event)

    @property
    def first(self) -> bool:
        """Whether this is the process that writes and prints."""
        return self.index == 0

    def gather(self, what: str, value: Any) -> list[Any]:
        """Returns every process's value, as JSON returns it unchanged, by their numbers; infinities and NaN are allowed.

        All of them have to call it, in the same order, with the same name for the value; else RuntimeError.
        """
        if self.count == 1:
            return [value]
        self._gathers += 1
        self._store.key_value_set(self._key(self._gathers, self.index), json.dumps([what, value]))
        values = [self._value_of(process, what) for process in range(self.count)]
        # Whoever has all values of this gather knows that all have read those of the one before.
        if self._gathers > 1:
            self._store.key_value_delete(self._key(self._gathers - 1, self.index))
        return values

    def attempt(self, what: str, make: Callable[[], T]) -> list[T]:
        """Returns what `make` returns in every process, as `gather` does; an OSError in one is raised in all of them."""
        if self.count == 1:
            return [make()]
        try:
            result = {"value": make()}
        except OSError as error:
            result = {"failure": [error.errno, error.strerror or str(error)]}
        gathered = self.gather(what, result)
        for process, theirs in enumerate(gathered):
            if "failure" in theirs:
                number, text = theirs["failure"]
                raise OSError(number, text if process == self.index else f"process {process}: {text}")
        return [theirs["value"] for theirs in gathered]

    def split_map(self, what: str, count: int, make: Callable[[range], list[Any]]) -> list[Any]:
        """Returns values of `count` things in all processes, each of which makes its part, as `gather` takes them."""
        return self.interleave(self.gather(what, make(self.own_indices(count))))

    def interleave(self, parts: Sequence[Sequence[T]]) -> list[T]:
        """Returns what every process made of its `own_indices` some things, in the order of the things."""
        values: list[Any] = [None] * sum(map(len, parts))
        for process, made in enumerate(parts):
            values[process :: self.count] = made
        return values

    def own_indices(self, count: int) -> range:
        """Returns the numbers of those of `count` things that are this process's to make."""
        return range(self.index, count, self.count)

    def from_first(self, what: str, make: Callable[[], T]) -> T:
        """Calls `make` on process 0, and returns its result in all processes."""
        return self.gather(what, make() if self.first else None)[0]

    def require_same(self, what: str, values: Mapping[str, Any]) -> None:
        """Raises ValueError unless values, by the names of arguments, are the same in every process."""
        for process, theirs in enumerate(self.gather(what, dict(values))):
            for name in values.keys() | theirs.keys():
                mine, found = values.get(name), theirs.get(name)
                require(
                    found == mine, name, f"in process {process} that of process {self.index}, {mine!r}", repr(found)
                )

    def require_equal_counts(self, counts: Int[np.ndarray, " values"]) -> Int[np.ndarray, " values"]:
        """Returns counts of a round, which has the documents of all ranks in every process; RuntimeError if they differ."""
        told = self.gather("documents of a round", counts.tolist())
        different = [process for process, theirs in enumerate(told) if theirs != told[0]]
        if different:
            raise RuntimeError(
                f"process {different[0]} has different documents from process 0: {told[different[0]]}, {told[0]}"
            )
        return counts

    def _value_of(self, process: int, what: str) -> Any:
        key, started, said = self._key(self._gathers, process), time.monotonic(), False
        witness = 1 if process == 0 else 0
        while (text := self._read(key)) is None:
            waited = time.monotonic() - started
            if self.index == witness and not said and waited >= SLOW_SECONDS:
                said = True
                _say(f"WARNING: process {process} keeps the others waiting at {what}, for {waited:.0f} s so far")
        theirs, value = json.loads(text)
        if theirs != what:
            raise RuntimeError(f"process {process} is at {theirs!r} where process {self.index} is at {what!r}")
        return value

    def _key(self, gather: int, process: int) -> str:
        return f"{ROOM}/{self.channel}{gather}/{process}"

    def _read(self, key: str) -> str | None:
        """Returns the value of a key, waited for a moment; None where there is none yet."""
        try:
            return self._store.blocking_key_value_get(key, _POLL_MS)
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            return None

    def watch(self) -> None:
        """Ends this process, from a thread, where another one has failed: the main thread may wait for it for ever."""
        if self.count == 1:
            return
        thread = threading.Thread(target=self._watch, name="processes", daemon=True)
        thread.start()

        def stop() -> None:
            self._ending.set()
            thread.join()

        # A thread that is still in the store's code when the interpreter ends would abort the process.
        atexit.register(stop)

    def _watch(self) -> None:
        while (failure := self._failure()) is None:
            if self._ending.is_set():
                return
        if failure.process != self.index and not self._ending.wait(GRACE_SECONDS):
            _say(f"error: {failure}")
            self._leave(failure.code, LEAVE_SECONDS)

    def _failure(self) -> Failure | None:
        try:
            text = self._read(FAILURE)
        except jax.errors.JaxRuntimeError:
            # Process 0 has the store, and is gone; JAX ends this process, and says so.
            time.sleep(_POLL_MS / 1000)
            return None
        return None if text is None else Failure(*json.loads(text))

    def end(self, code: int, sentence: str, *, is_origin: bool) -> None:
        """Ends this process for a fault, and tells the others why; returns where it is the only one.

        What may be the consequence of a fault elsewhere, such as a broken connection, is not `is_origin`.
        """
        if self.count == 1:
            return
        self._ending.set()
        failure = Failure(self.index, code, sentence)
        if not is_origin:
            # The process at fault says so before it ends; of one that was killed, JAX says so, and ends this one.
            line = f"process {self.index}: the connection to another process is broken"
            _say(f"{line}; JAX reports within {HEARTBEAT_TIMEOUT_SECONDS} s which process ended: {sentence[:200]}")
            failure = self._told_within(2 * HEARTBEAT_TIMEOUT_SECONDS) or failure
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            if failure.process == self.index:
                failure = self._tell(failure)
        if failure.process == self.index:
            _say(f"error: {sentence}" if self.first else f"error: process {self.index}: {sentence}")
        elif failure.sentence != sentence:
            _say(f"error: {failure}")
        self._leave(failure.code, LEAVE_SECONDS)

    def _told_within(self, seconds: float) -> Failure | None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if (failure := self._failure()) is not None:
                return failure
        return None

    def _tell(self, failure: Failure) -> Failure:
        """Returns the failure that the others are told: the first one."""
        try:
            self._store.key_value_set(FAILURE, json.dumps(failure))
        except jax.errors.JaxRuntimeError as error:
            if "ALREADY_EXISTS" not in str(error):
                raise
            return self._failure() or failure
        return failure

    def finish(self) -> None:
        """Ends one of several processes after a run that went well.

        The interpreter's own end takes the connections down while JAX still watches them, and JAX logs that as errors.
        """
        if self.count > 1:
            self._ending.set()
            self._leave(0, FINISH_SECONDS)

    def _leave(self, code: int, seconds: float) -> None:
        """Ends the process without the interpreter's own end, which would wait for the others, and they for it."""
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._store.key_value_set(f"{ROOM}/left/{self.index}", "left")
        # JAX aborts all others once it misses one, which may be half a heartbeat's timeout after that one has gone: all go
        # together.
        deadline = time.monotonic() + seconds
        for process in range(self.count):
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                while self._read(f"{ROOM}/left/{process}") is None and time.monotonic() < deadline:
                    pass
        if self.first:
            # It has the store that the others read this from, and without which JAX aborts them.
            time.sleep(1.0)
        os._exit(code)


_CHANNELS: dict[str, Processes] = {}


def processes(channel: str = "") -> Processes:
    """Returns the processes that this one has been started with; itself alone if `jax.distributed` was not initialized.

    The main thread has the channel without a name.
    """
    state = distributed.global_state
    if state.client is None or state.num_processes == 1:
        return Processes()
    if channel not in _CHANNELS:
        _CHANNELS[channel] = Processes(state.process_id, state.num_processes, state.client, channel)
    return _CHANNELS[channel]


def start(coordinator: str | None, num_processes: int | None, process_id: int | None) -> None:
    """Joins the other processes; before anything has asked JAX for its devices.

    The coordinator is host:port of process 0; all three are None where the cluster says it (SLURM, Open MPI, Kubernetes, a
    Cloud TPU). OSError if the others did not come, or process 0 is not where it was said to be.
    """
    given = {"--coordinator": coordinator, "--num-processes": num_processes, "--process-id": process_id}
    missing = [name for name, value in given.items() if value is None]
    expected = "--coordinator, --num-processes and --process-id together, or none of them"
    require(len(missing) in (0, 3), "--distributed", expected, f"no {' and no '.join(missing)}")
    if num_processes is not None and process_id is not None and coordinator is not None:
        require(num_processes >= 1, "--num-processes", "at least 1", num_processes)
        require(0 <= process_id < num_processes, "--process-id", f"in [0, {num_processes})", process_id)
        host, _, port = coordinator.rpartition(":")
        require(bool(host) and port.isdecimal(), "--coordinator", "host:port", repr(coordinator))
    try:
        jax.distributed.initialize(
            coordinator,
            num_processes,
            process_id,
            initialization_timeout=START_TIMEOUT_SECONDS,
            heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT_SECONDS,
        )
    except jax.errors.JaxRuntimeError as error:
        raise OSError(f"--distributed: the processes did not connect: {error}") from error
    except ValueError as error:
        if not missing:
            raise
        seen = f"an environment without them ({error})"
        require(False, "--distributed", "--coordinator, --num-processes and --process-id, or a cluster", seen)
    processes().watch()


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        print(printable(text), file=sys.stderr, flush=True)
