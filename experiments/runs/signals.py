"""SIGTERM and SIGINT as a flag that a loop reads between two steps, so that none ends in the middle of one."""

import contextlib
import os
import signal
import threading
from collections.abc import Generator
from types import FrameType

import jax

from experiments.processes import processes
from experiments.runs.ends import Interrupted

STOPPING = (signal.SIGINT, signal.SIGTERM)


class Signals:
    """The first signal that has been received, or None."""

    received: signal.Signals | None = None

    def note(self, number: int, frame: FrameType | None) -> None:
        """Notes the first signal, as its handler; Ctrl-C after it interrupts at once, as it does without a handler."""
        if self.received is None:
            self.received = signal.Signals(number)
            # Not by print, which cannot be entered again from a handler that came in the middle of a print.
            with contextlib.suppress(OSError):
                os.write(2, f"{self.received.name}: the step in progress ends first; Ctrl-C ends it at once\n".encode())
        elif number == signal.SIGINT:
            signal.default_int_handler(number, frame)


@contextlib.contextmanager
def caught_signals() -> Generator[Signals, None, None]:
    """Notes SIGTERM and SIGINT while the block runs, and puts the handlers back that were there.

    Only the main thread may install handlers, so that in another nothing is caught; nor is a signal that the process
    ignores, as SIGINT under nohup or in a shell's background. A SIGINT after the first signal is a KeyboardInterrupt. A
    failure of JAX after a signal is Interrupted: a signal to a group of processes reaches those of a compilation too.
    """
    signals, before = Signals(), {}
    if threading.current_thread() is threading.main_thread():
        for number in STOPPING:
            if signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, signals.note)
    try:
        yield signals
    except jax.errors.JaxRuntimeError as error:
        if signals.received is None:
            raise
        failed = " ".join(str(error).split())[:200]
        sentence = f"{signals.received.name}: the step in progress is lost ({failed}); --resume repeats it"
        # The others would wait for this process.
        processes().end(128 + signals.received, sentence, is_origin=True)
        raise Interrupted(signals.received, sentence) from error
    finally:
        for number, handler in before.items():
            # None stands for a handler that was not installed by Python, and cannot be put back by it.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
