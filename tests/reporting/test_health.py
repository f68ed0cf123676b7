"""Trouble in words: the step, the numbers and the samples, in the log and in events.jsonl, dropped on a resume."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest

from neuclip_ds.errors import TrainingDiverged
from neuclip_ds.reporting.events import Event, EventLog, read_events
from neuclip_ds.reporting.health import Samples, StepHealth

FACTS = {"tau": 0.05, "feature_grad_norm": 0.3, "grad_norm": 1.5, "lr": 1e-3}
SAMPLES = Samples(lambda step: [10 * step + row for row in range(9)] + [-1], lambda index: f"{index // 100:05d}.tar")


def health(folder: Path, rank: int = 0, done: int = 0) -> tuple[StepHealth, EventLog]:
    events = EventLog(folder, rank, done)
    return StepHealth(events, SAMPLES, rank, workers=2), events


def test_a_spike_is_named_once_with_step_values_and_indices(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    watch, _ = health(tmp_path)
    losses = 2 + np.random.default_rng(0).normal(0, 0.02, 200)
    losses[149] = 5.0
    asked = []
    with caplog.at_level(logging.INFO, "neuclip_ds"):
        for step, loss in enumerate(losses, start=1):
            watch.check_loss(step, float(loss), lambda: asked.append(1) or FACTS)  # type: ignore[func-returns-value]
    assert asked == [1]  # facts are on the GPU: they are asked for when they are told
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


def test_a_stall_of_any_rank_is_told_and_reaches_the_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (_, first), (watch, second) = health(tmp_path, 0), health(tmp_path, 1)
    for step in range(1, 40):
        watch.check_times(step, 0.01, 0.5, [-1, 250, 17])
    for step in range(40, 44):
        watch.check_times(step, 8.0, 9.0, [-1, 250, 17])
    told = [record.getMessage() for record in caplog.records]
    assert [text.split(" waited")[0] for text in told] == ["step 40", "step 41", "step 43"]  # the 1st, 2nd and 4th
    assert "8.0 s for its batch, 89% of the step, where one usually takes 0.5 s" in told[0]
    assert "indices [250, 17], the first in 00002.tar. If it recurs: more data.workers (now 2)" in told[0]
    assert list(read_events(tmp_path)) == []
    shares = [first._pending, second._pending]
    first.settle(lambda own: shares)
    second.settle(lambda own: shares)
    assert [(event.step, event.rank, event.kind, event.indices) for event in read_events(tmp_path)] == [
        (step, 1, "data_stall", [-1, 250, 17]) for step in range(40, 44)
    ]


def test_a_slow_loader_is_told_with_the_steps_of_the_interval(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    watch, _ = health(tmp_path)
    for step in range(1, 62):
        watch.check_times(step, 0.4, 1.0, [1])
    (told,) = [record.getMessage() for record in caplog.records]
    assert told.startswith(
        "steps 2 to 61: the loader took 40% of the time (24.0 of 60 s), while the model waited: more"
    )


def test_skipped_updates_are_told_once_in_a_row_and_end_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    watch, _ = health(tmp_path)
    watch.check_update(1, 1.5, applied=True)
    watch.check_update(2, None, applied=True)
    assert not caplog.records
    watch.check_update(3, np.inf, applied=False)
    watch.check_update(4, np.inf, applied=False)
    watch.check_update(5, 1.5, applied=True)
    watch.check_update(6, np.inf, applied=False)
    assert [(event.step, event.kind) for event in read_events(tmp_path)] == [
        (3, "update_skipped"),
        (6, "update_skipped"),
    ]
    assert "DeepSpeed has skipped the update: the encoders are as before" in caplog.records[0].getMessage()
    for step in range(7, 15):
        watch.check_update(step, np.inf, applied=False)
    with pytest.raises(TrainingDiverged, match=r"step 15: .* the 10th step .* those before step 6; .* \[150, 151"):
        watch.check_update(15, np.inf, applied=False)


@pytest.mark.parametrize("norm", [np.nan, np.inf, -1.0])
def test_weights_that_took_a_bad_gradient_end_the_run_on_every_rank(tmp_path: Path, norm: float) -> None:
    for rank in (0, 1):
        watch, _ = health(tmp_path, rank)
        with pytest.raises(TrainingDiverged, match=r"step 3: .* the weights are spoilt; its samples begin with"):
            watch.check_update(3, norm, applied=True)


def test_other_ranks_leave_what_all_know_to_rank_zero(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    watch, events = health(tmp_path, rank=1)
    for step in range(1, 100):
        watch.check_loss(step, 2.0 + 1e-3 * (step % 5), dict)
    watch.check_loss(100, 9.0, dict)
    watch.check_update(100, np.inf, applied=False)
    watch.diverged(100, TrainingDiverged("words"))
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
    EventLog(tmp_path, 0, 0)  # a run that starts anew
    assert list(read_events(tmp_path)) == []
