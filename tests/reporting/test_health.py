"""Warnings with step, values and samples, in the log and in events.jsonl, which a resumed run truncates."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest

from neuclip_ds.errors import RollBack, TrainingDiverged
from neuclip_ds.reporting.events import Event, EventLog, read_events
from neuclip_ds.reporting.health import SampleLookup, StepHealth

METRICS = {"skipped_steps": 1, "tau": 0.05, "feature_grad_norm": 0.3, "grad_norm": 1.5, "lr": 1e-3}
SAMPLES = SampleLookup(
    lambda step: [10 * step + row for row in range(9)] + [-1], lambda index: f"{index // 100:05d}.tar"
)


def health(folder: Path, rank: int = 0, done: int = 0) -> tuple[StepHealth, EventLog]:
    events = EventLog(folder, rank, done)
    return StepHealth(events, SAMPLES, rank, workers=2, patience=10), events


def test_a_spike_is_reported_once_with_step_values_and_indices(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    watch, _ = health(tmp_path)
    losses = 2 + np.random.default_rng(0).normal(0, 0.02, 200)
    losses[149] = 5.0
    calls = []
    with caplog.at_level(logging.INFO, "neuclip_ds"):
        for step, loss in enumerate(losses, start=1):
            watch.check_loss(step, float(loss), lambda: calls.append(1) or METRICS)  # type: ignore[func-returns-value]
    assert calls == [1]  # metrics are on the GPU: they are read only when they are reported
    warning, info = caplog.records
    assert (warning.levelname, info.levelname) == ("WARNING", "INFO")
    for part in (
        "step 150: loss 5 is far above its level 2",
        "temperature 0.05",
        "learning rate 0.001",
        "the encoders' gradient norm 1.5",
        "indices [1500, 1501, 1502",
    ):
        assert part in warning.getMessage()
    spike, back = read_events(tmp_path)
    assert spike == Event(150, 0, "loss_spike", warning.getMessage(), SAMPLES.batch(150))
    assert (back.step, back.kind) == (170, "loss_back")


def test_a_stall_of_any_rank_is_logged_and_reaches_the_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (_, first), (watch, second) = health(tmp_path, 0), health(tmp_path, 1)
    for step in range(1, 40):
        watch.check_times(step, 0.01, 0.5, [-1, 250, 17])
    for step in range(40, 44):
        watch.check_times(step, 8.0, 9.0, [-1, 250, 17])
    logged = [record.getMessage() for record in caplog.records]
    assert [text.split(" waited")[0] for text in logged] == ["step 40", "step 41", "step 43"]  # the 1st, 2nd and 4th
    assert "8.0 s for its batch, 89% of the step; a usual step takes 0.5 s (stall 1 since the start)" in logged[0]
    assert "indices [250, 17], the first in 00002.tar. If this recurs, set more data.workers (now 2)" in logged[0]
    assert list(read_events(tmp_path)) == []
    shares = [first._pending, second._pending]
    first.merge(lambda own: shares)
    second.merge(lambda own: shares)
    assert [(event.step, event.rank, event.kind, event.indices) for event in read_events(tmp_path)] == [
        (step, 1, "data_stall", [-1, 250, 17]) for step in range(40, 44)
    ]


def test_a_slow_loader_is_reported_with_the_steps_of_the_interval(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    watch, _ = health(tmp_path)
    for step in range(1, 62):
        watch.check_times(step, 0.4, 1.0, [1])
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith(
        "steps 2 to 61: waiting for data took 40% of the time (24.0 of 60 s). Set more data.workers"
    )


def test_skipped_steps_are_reported_with_their_samples_and_counted_in_a_row(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    watch, _ = health(tmp_path)
    metrics = {**METRICS, "loss": np.nan}
    applied = {1, 2, 5}
    for step in range(1, 15):
        assert watch.check_update(step, step in applied, lambda: metrics, [30, 33] if step == 3 else []) is None
    found = [(event.step, event.indices) for event in read_events(tmp_path)]
    assert found == [
        (step, [30, 33] if step == 3 else SAMPLES.batch(step)) for step in range(1, 15) if step not in applied
    ]
    assert (
        "step 3 is skipped and changes nothing: the features of samples [30, 33] are not finite (loss nan, "
        in caplog.text
    )
    problem = watch.check_update(15, False, lambda: metrics, [])
    assert problem is not None
    assert problem.startswith("steps 6 to 15 were skipped: in the last, loss or gradient is not finite (loss nan")
    assert "indices [150, 151" in problem
    watch.rolled_back(5, RollBack("back", tmp_path))
    back = next(event for event in read_events(tmp_path) if event.kind == "rolled_back")
    assert (back.step, back.indices) == (5, [index for step in range(6, 16) for index in SAMPLES.batch(step)])


def test_other_ranks_leave_the_loss_to_rank_zero(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    watch, events = health(tmp_path, rank=1)
    for step in range(1, 100):
        watch.check_loss(step, 2.0 + 1e-3 * (step % 5), dict)
    watch.check_loss(100, 9.0, dict)
    watch.check_update(100, False, lambda: {**METRICS, "loss": np.inf}, [])
    watch.diverged(100, TrainingDiverged("message"))
    assert not caplog.records
    assert not events._pending


def test_events_beyond_the_resumed_step_are_dropped(tmp_path: Path) -> None:
    watch, _ = health(tmp_path)
    for step in (10, 20, 30):
        watch.diverged(step, TrainingDiverged(f"step {step}"))
    EventLog(tmp_path, 1, 10)  # other ranks leave the file alone
    assert len(list(read_events(tmp_path))) == 3
    EventLog(tmp_path, 0, 20)
    assert [event.step for event in read_events(tmp_path)] == [10, 20]
    EventLog(tmp_path, 0, 0)  # a new run
    assert list(read_events(tmp_path)) == []
