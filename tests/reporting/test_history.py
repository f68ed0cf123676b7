"""The history records when each launch of a run began and ended, and which options it changed, however it ended."""

from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path

import pytest

from neuclip_ds.errors import UserError
from neuclip_ds.reporting.history import FILE, changed_options, duration, read_launches, recorded_launch
from neuclip_ds.training.checks import check_length

ENVIRONMENT = {"command": "train.py demo", "commit": "abc"}


@dataclass
class Steps:
    done: int


def test_changed_options_are_named_with_both_values() -> None:
    before = {"optimizer": {"lr": 2e-3, "betas": [0.9, 0.98]}, "data": {"captions": ["txt"]}, "old": 1, "empty": {}}
    after = {"optimizer": {"lr": 1e-3, "betas": [0.9, 0.98]}, "data": {"captions": {"txt": 1.0}}, "empty": {}}
    assert changed_options(before, after) == {
        "optimizer.lr": (2e-3, 1e-3),
        "data.captions.txt": (None, 1.0),
        "old": (1, None),
        "data.captions": (["txt"], None),
    }
    assert changed_options(before, before) == {}


def test_launches_that_end_fail_or_are_killed(tmp_path: Path) -> None:
    loop = Steps(0)
    with pytest.raises(KeyboardInterrupt), recorded_launch(tmp_path, ENVIRONMENT, {}, loop):
        loop.done = 7
        raise KeyboardInterrupt
    killed = recorded_launch(tmp_path, ENVIRONMENT, {"optimizer.lr": (2.0, 1.0)}, loop)
    killed.__enter__()
    with (tmp_path / FILE).open("a") as file:
        file.write('{"step": 9, "event": "start"}\n{"damaged\n')
    with recorded_launch(tmp_path, ENVIRONMENT, {}, loop):
        loop.done = 20
    first, second, last = read_launches(tmp_path)
    assert (first.first_step, first.last_step, first.command) == (0, 7, "train.py demo")
    assert second.end is None and second.last_step is None
    assert second.changes == {"optimizer.lr": (2.0, 1.0)}
    assert (last.first_step, last.last_step) == (7, 20)
    assert timedelta(0) <= duration([first, second, last]) < timedelta(seconds=60)
    assert read_launches(tmp_path / "none") == []


def test_times_without_a_zone_and_dates_among_the_options_are_no_error(tmp_path: Path) -> None:
    with recorded_launch(tmp_path, ENVIRONMENT, {"data.train": (date(2026, 1, 2), "shards")}, Steps(1)):
        pass
    (launch,) = read_launches(tmp_path)
    assert launch.changes == {"data.train": ("2026-01-02", "shards")}
    path = tmp_path / FILE
    start, end = path.read_text().splitlines()
    path.write_text(f"{start}\n{end.replace('+00:00', '')}\n")
    assert read_launches(tmp_path) == []


def test_a_run_that_is_longer_than_its_config_is_refused() -> None:
    check_length(141, 141)
    with pytest.raises(UserError, match=r"329 steps, more than the 141 .* raise max_steps"):
        check_length(329, 141)
