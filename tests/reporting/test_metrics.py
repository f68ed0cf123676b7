"""metrics.jsonl is valid JSON for all numbers, and the logs of a resumed run equal those of an uninterrupted run."""

import json
import logging
import math
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from neuclip_ds.reporting.metrics import MetricsLog, read_metrics

STEPS = range(0, 60, 10)


def metrics_of(step: int) -> dict[str, float]:
    return {"loss": 1 / (step + 3), "tau": 0.07, "lr": math.inf if step == 20 else 1e-4, "samples": step * 256}


def run(folder: Path, resume_step: int | None = None, last: int = STEPS[-1]) -> bytes:
    """Write the metrics of a run after `resume_step`; return the content of metrics.jsonl."""
    first = 0 if resume_step is None else resume_step + 1
    with MetricsLog(folder, resume_step) as metrics:
        for step in STEPS:
            if first <= step <= last:
                metrics.write(step, metrics_of(step))
    return (folder / "metrics.jsonl").read_bytes()


def points(folder: Path, tag: str) -> list[tuple[int, float]]:
    accumulator = EventAccumulator(str(folder / "tensorboard"))
    accumulator.Reload()
    return [(event.step, event.value) for event in accumulator.Scalars(tag)]


def test_lines_are_flat_records_that_are_written_at_once(tmp_path):
    with MetricsLog(tmp_path) as metrics:
        metrics.write(10, {"loss": 2.5, "pairs": 256})
        assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 10, "loss": 2.5, "pairs": 256}\n'
        metrics.write(20, {"loss": 2.0})
        assert points(tmp_path, "loss") == [(10, 2.5), (20, 2.0)]
    assert list(read_metrics(tmp_path / "metrics.jsonl")) == [
        {"step": 10, "loss": 2.5, "pairs": 256},
        {"step": 20, "loss": 2.0},
    ]


def test_numbers_that_json_lacks_are_written_as_text_and_come_back(tmp_path):
    with MetricsLog(tmp_path) as metrics:
        metrics.write(1, {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 0.1})

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    record = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert record == {"step": 1, "a": "nan", "b": "inf", "c": "-inf", "d": 0.1}
    (restored,) = read_metrics(tmp_path / "metrics.jsonl")
    assert math.isnan(restored.pop("a"))
    assert restored == {"step": 1, "b": math.inf, "c": -math.inf, "d": 0.1}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return run(tmp_path_factory.mktemp("uninterrupted"))


@settings(deadline=None, max_examples=15)
@given(resume_step=st.sampled_from([*STEPS, 5, 35]), lost_bytes=st.integers(0, 1000))
@example(resume_step=20, lost_bytes=1)
def test_resumed_file_equals_an_uninterrupted_one(tmp_path_factory, uninterrupted, resume_step, lost_bytes):
    # the checkpoint of `resume_step` is saved after its line is written, so a kill can cut off only later bytes
    lines_before = sum(step <= resume_step for step in STEPS)
    safe_bytes = len(b"".join(uninterrupted.splitlines(keepends=True)[:lines_before]))
    folder = tmp_path_factory.mktemp("killed")
    (folder / "metrics.jsonl").write_bytes(uninterrupted[: max(safe_bytes, len(uninterrupted) - lost_bytes)])
    assert run(folder, resume_step) == uninterrupted
    assert {path.name for path in folder.iterdir()} == {"metrics.jsonl", "tensorboard"}


@pytest.mark.parametrize(
    "garbled",
    [
        b"\0\0\0\n",
        b"[1, 2]\n",
        b"12\n",
        b'{"loss": 1}\n',
        b"\xff\xfe\n",
        b'{"step": null}\n',
        b'{"step": "20"}\n',
        b'{"step": [20]}\n',
        b"[" * 5000 + b"\n",
    ],
)
def test_garbled_lines_are_skipped_with_a_warning(tmp_path, caplog, garbled):
    written = run(tmp_path, last=20)
    (tmp_path / "metrics.jsonl").write_bytes(garbled + written)
    with caplog.at_level(logging.WARNING, logger="neuclip_ds"):
        assert run(tmp_path, resume_step=20, last=20) == written
    assert "skipped 1 line that is not a JSON object with an integer 'step'" in caplog.text


def test_edited_records_are_read(tmp_path):
    """An editor may add a byte order mark, remove the last newline, and write null for missing values."""
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"step": 1, "loss": 2.0, "tau": null, "note": "mine"}\r\n{"step": 2, "loss": "nan"}')
    first, second = read_metrics(path)
    assert first == {"step": 1, "loss": 2.0}
    assert second["step"] == 2 and math.isnan(second["loss"])
    with MetricsLog(tmp_path, 2) as metrics:
        metrics.write(3, {"loss": 1.0})
    assert [record["step"] for record in read_metrics(path)] == [1, 2, 3]


@pytest.mark.parametrize(("resume_step", "kept"), [(20, [(0, 100.0), (10, 110.0), (20, 120.0)]), (None, [])])
def test_tensorboard_shows_the_resumed_points_only(tmp_path, resume_step, kept):
    """A resumed run keeps the points up to its checkpoint; a new run in an old folder keeps none."""
    with MetricsLog(tmp_path) as metrics:
        for step in STEPS:
            metrics.write(step, {"loss": 100.0 + step})
    with MetricsLog(tmp_path, resume_step) as metrics:
        metrics.write(30, {"loss": 3.0})
    assert points(tmp_path, "loss") == [*kept, (30, 3.0)]
    steps = [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")]
    assert steps == [step for step, _ in kept] + [30]
