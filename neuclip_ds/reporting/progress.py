"""How far a run has come: a live bar on a terminal, plain log lines at a bounded rate anywhere else."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType

import rich
from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar

logger = logging.getLogger(__name__)


class SlidingRate:
    """Units per second over the last `window` updates.

    The first update only starts the clock, so what came before it (launch, compilation, the first step) does not
    weigh in, and neither does anything that has slid out of the window.
    """

    def __init__(self, window: int = 50, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._marks: deque[tuple[float, float]] = deque(maxlen=window + 1)  # (seconds, position)

    def update(self, position: float) -> float:
        """Notes that `position` units (steps, samples) are done by now; NaN until two updates have been seen."""
        self._marks.append((self._clock(), position))
        (began, first), (now, last) = self._marks[0], self._marks[-1]
        return (last - first) / (now - began) if now > began else math.nan


class Progress:
    """Shows step, loss, temperature, throughput and the time left.

    Used as a context manager; the bar lives from its entry to its exit.
    """

    def __init__(
        self,
        total_steps: int,
        first_step: int = 0,
        *,
        enabled: bool = True,
        seconds_between_lines: float = 10.0,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            total_steps: the step at which the run ends.
            first_step: steps that were done before, by the run that this one resumes.
            enabled: False on all ranks but 0; nothing is shown then.
            seconds_between_lines: least time between log lines; the last step is always logged.
            console: where the bar goes; by default where `configure_logging` sends the log.
            clock: seconds; tests hand in their own.
        """
        self._total = total_steps
        self._enabled = enabled
        self._seconds_between_lines = seconds_between_lines
        self._clock = clock
        self._next_line = -math.inf
        self._steps = SlidingRate(clock=clock)
        console = console or rich.get_console()
        # asked of the stream itself: rich takes FORCE_COLOR, which CI likes to set, for a terminal
        self._bar = _bar(console) if enabled and console.is_interactive and console.file.isatty() else None
        if self._bar is not None:
            self._task = self._bar.add_task("step", total=total_steps, completed=first_step, facts="")

    def update(self, step: int, *, loss: float, tau: float, samples_per_second: float) -> None:
        """Reports that `step` of `total_steps` steps are done.

        Args:
            loss, tau: of this step.
            samples_per_second: over all ranks, such as `SlidingRate.update(samples)` gives.
        """
        if not self._enabled:
            return
        time_left = _duration((self._total - step) / (self._steps.update(step) or math.nan))
        throughput = f"{samples_per_second:,.0f}" if math.isfinite(samples_per_second) else "?"
        facts = f"loss {loss:.4f}  tau {tau:.4f}  {throughput} samples/s  ETA {time_left}"
        if self._bar is not None:
            self._bar.update(self._task, completed=step, facts=facts)
        elif self._clock() >= self._next_line or step >= self._total:
            logger.info("step %d/%d  %s", step, self._total, facts)
            self._next_line = self._clock() + self._seconds_between_lines

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()


def _bar(console: Console) -> Bar:
    return Bar(
        TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
        BarColumn(bar_width=20),
        TextColumn("{task.fields[facts]}", markup=False),
        console=console,
    )


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds))) if math.isfinite(seconds) else "?"
