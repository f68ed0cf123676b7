"""Progress on a terminal and in a file, with a clock that the tests set."""

from __future__ import annotations

import io
import logging
import math

import pytest
from rich.console import Console

from neuclip_ds.reporting.log import IN_BAR
from neuclip_ds.reporting.progress import Progress, SlidingRate


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.INFO, logger="neuclip_ds")
    return lambda: [record.getMessage() for record in caplog.records]


def file_console() -> Console:
    return Console(file=io.StringIO(), width=120)


def advance(progress: Progress, clock: Clock, steps: range, seconds: float) -> None:
    for step in steps:
        clock.now += seconds
        progress.update(step, loss=2.0, tau=0.07, samples_per_second=1234.4)


def test_rate_forgets_start_up_and_what_left_the_window(clock):
    rate = SlidingRate(window=3, clock=clock)
    clock.now += 500  # launch and compilation
    assert math.isnan(rate.update(1))
    clock.now += 100  # a slow stretch
    assert rate.update(2) == pytest.approx(1 / 100)
    for step in (3, 4):
        clock.now += 2
        rate.update(step)
    clock.now += 2
    assert rate.update(5) == pytest.approx(0.5)  # three updates on, the slow stretch has slid out


def test_rate_of_a_clock_that_stands_still_is_unknown(clock):
    rate = SlidingRate(clock=clock)
    rate.update(0)
    assert math.isnan(rate.update(100))


def test_off_a_terminal_lines_come_at_a_bounded_rate_and_at_the_end(clock, lines):
    with Progress(100, console=file_console(), clock=clock, seconds_between_lines=10) as progress:
        advance(progress, clock, range(1, 101), seconds=0.5)
    assert [line.split()[1] for line in lines()] == ["1/100", "21/100", "41/100", "61/100", "81/100", "100/100"]


def test_line_has_the_status(clock, lines):
    with Progress(4000, console=file_console(), clock=clock, seconds_between_lines=0) as progress:
        advance(progress, clock, range(10, 30, 10), seconds=5)
    assert lines() == [
        "step 10/4000  loss 2.0000  tau 0.0700  1,234 samples/s  ETA ?",
        "step 20/4000  loss 2.0000  tau 0.0700  1,234 samples/s  ETA 0:33:10",  # 3980 steps at 2 a second
    ]


def test_eta_of_a_resumed_run_counts_its_own_steps_only(clock, lines):
    with Progress(1000, first_step=900, console=file_console(), clock=clock, seconds_between_lines=0) as progress:
        clock.now += 300  # start-up
        advance(progress, clock, range(901, 904), seconds=1)
    assert lines()[-1].endswith("ETA 0:01:37")


@pytest.mark.parametrize("force_color", [False, True])
def test_a_file_gets_no_bar_even_where_colour_is_forced(clock, lines, monkeypatch, force_color):
    if force_color:
        monkeypatch.setenv("FORCE_COLOR", "1")
    console = file_console()
    with Progress(10, console=console, clock=clock) as progress:
        advance(progress, clock, range(1, 11), seconds=1)
    assert console.file.getvalue() == ""
    assert len(lines()) == 2


def test_on_a_terminal_a_bar_shows_the_status_and_lines_are_for_the_file(clock, lines, caplog, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    with Progress(40, first_step=10, console=Console(file=terminal, width=120), clock=clock) as progress:
        advance(progress, clock, range(11, 41), seconds=1)
    shown = terminal.getvalue()
    assert "40/40" in shown
    assert "loss 2.0000  tau 0.0700  1,234 samples/s  ETA 0:00:00" in shown
    assert [line.split()[1] for line in lines()] == ["11/40", "21/40", "31/40", "40/40"]
    assert all(getattr(record, IN_BAR) for record in caplog.records)


def test_bar_of_a_resumed_run_starts_where_it_left_off(clock, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    with Progress(40, first_step=10, console=Console(file=terminal, width=120), clock=clock):
        pass
    assert "10/40" in terminal.getvalue()


def test_other_ranks_are_silent(clock, lines, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    with Progress(10, enabled=False, console=Console(file=terminal), clock=clock) as progress:
        advance(progress, clock, range(1, 11), seconds=60)
    assert terminal.getvalue() == ""
    assert lines() == []


def test_numbers_that_are_not_finite_do_not_stop_a_run(clock, lines):
    with Progress(10, console=file_console(), clock=clock) as progress:
        progress.update(10, loss=math.nan, tau=math.inf, samples_per_second=math.nan)
    assert lines() == ["step 10/10  loss nan  tau inf  ? samples/s  ETA ?"]
