"""Signals that stop a program: raised as `Interrupted`, or noted where the program chooses the moment itself.

Python runs a signal's handler in the main thread, between two instructions. Where that is stuck in a library, such as
in a collective that waits for another rank, a thread ends the program instead.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from neuclip_ds.errors import Interrupted

log = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)  # launchers, SLURM's warning, Ctrl-C
_STUCK = 3.0  # seconds within which the main thread runs a handler unless it is stuck
_AGAIN = 1.0  # seconds after which the same signal counts as a second request; some launchers send it twice at once
_LATER = 0.05  # seconds after which a signal is sent again


class _StopSignals:
    """The signals that this process has received so far."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None  # the first one
        self.deferred = False
        self.noticed = threading.Event()
        self.unraisablehook = sys.unraisablehook
        self._times: dict[int, float] = {}
        self._process = os.getpid()

    def receive(self, number: int, frame: Any) -> None:
        """Handle a signal in the main thread."""
        now = time.monotonic()
        if now - self._times.setdefault(number, now) > _AGAIN:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.noticed.set()
        if self.received is None:
            self.received = signal.Signals(number)
            if not self.deferred:
                raise Interrupted(self.received)

    def send_again(self, dropped: Any) -> None:
        """Replace `sys.unraisablehook`: Python drops what is raised in a finalizer or in a callback of fork."""
        if not isinstance(dropped.exc_value, Interrupted):
            self.unraisablehook(dropped)
        elif os.getpid() == self._process:
            self.received = None
            self._times.clear()
            threading.Timer(_LATER, os.kill, [self._process, dropped.exc_value.number]).start()

    def watch(self, wakeups: socket.socket) -> None:
        """End the program when the main thread does not come to handle a signal, until the socket is closed."""
        while numbers := wakeups.recv(1):
            if numbers[0] in STOP_SIGNALS and not self.noticed.wait(_STUCK) and not self.deferred:
                _end(Interrupted(numbers[0]))


def _exit(error: Interrupted) -> None:
    log.warning("%s", error)
    os._exit(error.code)


_installed: _StopSignals | None = None
_end: Callable[[Interrupted], object] = _exit


@contextmanager
def raising_interrupted() -> Iterator[None]:
    """Raise `Interrupted` in the main thread when a stop signal arrives during the block.

    The same signal again, a second later or more, ends the process at once. The former handlers come back after the
    block. Within another such block, or outside the main thread, this does nothing.
    """
    global _installed
    if _installed is not None or threading.current_thread() is not threading.main_thread():
        yield
        return
    signals = _installed = _StopSignals()
    read, write = socket.socketpair()
    write.setblocking(False)
    threading.Thread(target=signals.watch, args=(read,), name="stop signals", daemon=True).start()
    wakeup = signal.set_wakeup_fd(write.fileno(), warn_on_full_buffer=False)
    sys.unraisablehook = signals.send_again
    handlers = {number: signal.signal(number, signals.receive) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(wakeup)
        sys.unraisablehook = signals.unraisablehook
        _installed = None
        write.close()  # ends the thread


@contextmanager
def deferring(deferred: bool = True) -> Iterator[None]:
    """Only note stop signals during the block, for `take_signal`; `deferring(False)` within it raises them again.

    A signal that was noted and not taken is raised where the deferral ends.
    """
    signals = _installed
    if signals is None:
        yield
        return
    before, signals.deferred = signals.deferred, deferred
    try:
        if not deferred and signals.received is not None:
            raise Interrupted(signals.received)
        yield
        if not before and signals.received is not None:
            raise Interrupted(signals.received)
    finally:
        signals.deferred = before


def take_signal() -> signal.Signals | None:
    """Return the stop signal that was noted, if any, and forget it."""
    if _installed is None:
        return None
    received, _installed.received = _installed.received, None
    return received


@contextmanager
def ending_by(end: Callable[[Interrupted], object]) -> Iterator[None]:
    """End the program by `end`, called in a thread, where the main thread is stuck during the block."""
    global _end
    before, _end = _end, end
    try:
        yield
    finally:
        _end = before
