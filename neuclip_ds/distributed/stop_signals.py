"""Signals that stop a program: raised as `Interrupted`, or only recorded so that the program chooses when to stop.

Python runs a signal's handler in the main thread, between two bytecode instructions. A rank that is waiting in a
collective therefore reacts only when the collective ends, or when another rank that received a signal ends all ranks.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

from neuclip_ds.errors import Interrupted

# sent by launchers, by SLURM as a warning, by Ctrl-C, and by a terminal that closes
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
# seconds after which the same signal counts as a second request; some launchers send it twice in a row
_SECOND_REQUEST_AFTER = 1.0


class _StopSignals:
    """The stop signals that this process has received so far."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None  # the first signal
        self.deferred = False
        self._times: dict[int, float] = {}

    def receive(self, number: int, frame: object) -> None:
        """Handle a signal; if the same signal arrives again more than a second later, end the process at once."""
        now = time.monotonic()
        if now - self._times.setdefault(number, now) > _SECOND_REQUEST_AFTER:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        if self.received is None:
            self.received = signal.Signals(number)
            self.raise_received()

    def raise_received(self) -> None:
        """Raise `Interrupted` if a signal was received, unless signals are deferred."""
        if self.received is not None and not self.deferred:
            raise Interrupted(self.received)


_installed: _StopSignals | None = None


def _report_unless_interrupted(report: Callable[[Any], object], unraisable: Any) -> None:
    """Report an exception that Python ignores, but not `Interrupted`: the signal is recorded and acted on later.

    Python ignores exceptions in finalizers and in functions that run at a fork, and would print a traceback.
    """
    if not isinstance(unraisable.exc_value, Interrupted):
        report(unraisable)


@contextmanager
def raising_interrupted() -> Iterator[None]:
    """Raise `Interrupted` in the main thread when the first stop signal arrives in the block, unless it is deferred.

    If the same signal arrives again more than a second later, the process ends at once. SIGHUP stays ignored under
    `nohup`. Nested blocks, and blocks outside the main thread, have no effect on signals.
    """
    global _installed
    if _installed is not None or threading.current_thread() is not threading.main_thread():
        yield
        return
    _installed = _StopSignals()
    numbers = [number for number in STOP_SIGNALS if not _is_ignored_hangup(number)]
    handlers = {number: signal.signal(number, _installed.receive) for number in numbers}
    report_unraisable = sys.unraisablehook
    sys.unraisablehook = partial(_report_unless_interrupted, report_unraisable)
    try:
        yield
    finally:
        sys.unraisablehook = report_unraisable
        for number, handler in handlers.items():
            signal.signal(number, handler)
        _installed = None


def _is_ignored_hangup(number: signal.Signals) -> bool:
    """Return whether this is SIGHUP and the program ignores it, because it was started under `nohup`."""
    return number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN


def ignore_stop_signals() -> None:
    """Ignore stop signals while the interpreter shuts down; called by `atexit`, when the program's work is done.

    Otherwise, Ctrl-C would print a traceback of some library's exit function.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def deferring() -> AbstractContextManager[None]:
    """Record stop signals for `take_signal` during the block, except in a nested `raising_at_once`.

    A recorded signal that `take_signal` has not returned raises `Interrupted` when the deferral ends.
    """
    return _with_deferral(True)


def raising_at_once() -> AbstractContextManager[None]:
    """Raise `Interrupted` before the block if a stop signal has been recorded, and at once if one arrives during it.

    Use this within `deferring` for work that may take long, such as waiting for storage.
    """
    return _with_deferral(False)


@contextmanager
def _with_deferral(deferred: bool) -> Iterator[None]:
    signals = _installed or _StopSignals()
    deferred_before = signals.deferred
    signals.deferred = deferred
    try:
        signals.raise_received()
        yield
    finally:
        signals.deferred = deferred_before
    signals.raise_received()


def raise_received_signal() -> None:
    """Raise `Interrupted` if a stop signal has been recorded, even within `deferring`."""
    with raising_at_once():
        pass


def take_signal() -> signal.Signals | None:
    """Return the recorded stop signal, if any, and clear the record."""
    signals = _installed or _StopSignals()
    received = signals.received
    signals.received = None
    return received
