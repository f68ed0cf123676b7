"""Progress of a run: log lines at a bounded rate, and on a terminal a live bar in place of these lines."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta

import rich
from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar

from neuclip_ds.reporting.log import IN_BAR

logger = logging.getLogger(__name__)


class SlidingRate:
    """Units per second over the last `window` updates.

    The first update only starts the clock, so what came before it (launch, compilation, the first step) does not count.
    """

    def __init__(self, window: int = 50, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._marks: deque[tuple[float, float]] = deque(maxlen=window + 1)  # (seconds, position)

    def update(self, position: float) -> float:
        """Return the rate, given that `position` units (steps, samples) are done now; NaN until the second update."""
        self._marks.append((self._clock(), position))
        (start, first), (now, last) = self._marks[0], self._marks[-1]
        return (last - first) / (now - start) if now > start else math.nan


class Progress:
    """Display of step, loss, temperature, throughput and time left.

    Used as a context manager; the bar is shown from its entry to its exit.

    Args:
        total_steps: the step at which the run ends.
        first_step: steps that were done before the run was resumed.
        enabled: whether to show anything; False on all ranks but 0.
        seconds_between_lines: least time between log lines; the last step is always logged.
        console: of the bar; by default the one to which `configure_logging` sends the log.
        clock: seconds; tests pass their own.
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
        self._total, self._enabled, self._clock = total_steps, enabled, clock
        self._seconds_between_lines, self._next_line = seconds_between_lines, -math.inf
        self._steps = SlidingRate(clock=clock)
        console = console or rich.get_console()
        # checked on the stream itself: rich takes FORCE_COLOR, which many CI systems set, for a terminal
        self._bar = None
        if enabled and console.is_interactive and console.file.isatty():
            step, status = TextColumn("step {task.completed:.0f}/{task.total:.0f}"), "{task.fields[status]}"
            self._bar = Bar(step, BarColumn(bar_width=20), TextColumn(status, markup=False), console=console)
            self._task = self._bar.add_task("step", total=total_steps, completed=first_step, status="")

    def update(self, step: int, *, loss: float, tau: float, samples_per_second: float) -> None:
        """Show that `step` steps are done, with this step's loss and temperature and the throughput of all ranks."""
        if not self._enabled:
            return
        time_left = _duration((self._total - step) / (self._steps.update(step) or math.nan))
        throughput = f"{samples_per_second:,.0f}" if math.isfinite(samples_per_second) else "?"
        status = f"loss {loss:.4f}  tau {tau:.4f}  {throughput} samples/s  ETA {time_left}"
        if self._bar is not None:
            self._bar.update(self._task, completed=step, status=status)
        if self._clock() >= self._next_line or step >= self._total:
            extra = {IN_BAR: self._bar is not None}
            logger.info("step %d/%d  %s", step, self._total, status, extra=extra)
            self._next_line = self._clock() + self._seconds_between_lines

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.stop()


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds))) if math.isfinite(seconds) else "?"
