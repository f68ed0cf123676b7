"""The signals that ask a run to save and end."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def stop_signals(handler: Callable[[], None]) -> Iterator[None]:
    """SIGTERM (launchers, schedulers), SIGUSR1 (SLURM's warning) and one Ctrl-C ask for a checkpoint and an end."""

    def ask(number: int, frame: object) -> None:
        handler()
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)  # the second one does not wait

    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
    before = [signal.signal(number, ask) for number in numbers]
    try:
        yield
    finally:
        for number, old in zip(numbers, before, strict=True):
            signal.signal(number, old)
