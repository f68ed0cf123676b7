"""Check which steps the recorder profiles in one process, and that a failing profile does not end a run."""

import json
from pathlib import Path

import pytest
import torch

from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.profiling.recorder import BREAKDOWN, REPORT, Recorder


def run(folder: Path, total: int, steps: int, after: int) -> None:
    x = torch.ones(200, 200)
    with Recorder(folder, Communicator(), steps, after, {"method": "a product"}) as recorder:
        for _ in range(total):
            with recorder.step():
                x @ x


def test_the_recorder_profiles_the_requested_steps(tmp_path: Path) -> None:
    run(tmp_path, total=7, steps=3, after=2)
    breakdown = json.loads((tmp_path / BREAKDOWN).read_text())
    assert (breakdown["steps"], breakdown["world_size"], breakdown["purposes"]) == (3, 1, {})
    seconds = breakdown["seconds"]
    assert 0 < seconds["computation"]["mean"] < seconds["total"]["mean"]
    assert seconds["communication"]["mean"] == 0
    assert "| a product | - | 1 | 3 |" in (tmp_path / REPORT).read_text()


@pytest.mark.parametrize(("steps", "message"), [(0, ""), (3, "this launch ran 3 steps, but the profile needs 5")])
def test_without_the_steps_there_is_no_profile(
    steps: int, message: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(tmp_path, total=3, steps=steps, after=2)
    assert message in caplog.text if message else not caplog.text
    assert not list(tmp_path.iterdir())


def test_an_error_of_the_step_passes_through(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, Communicator(), steps=2, after=1)
    with pytest.raises(ZeroDivisionError), recorder:
        for number in range(3):
            with recorder.step():
                1 / (1 - number)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_created_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    run(tmp_path / "file" / "profile", total=4, steps=2, after=1)
    assert "could not be written" in caplog.text


def test_a_gpu_does_nothing_else_in_a_profiled_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("wait"))
    with Recorder(tmp_path, Communicator("cuda"), steps=2, after=1) as recorder:
        for number in range(4):
            with recorder.step():
                calls.append(number)
    assert calls == [0, "wait", 1, "wait", "wait", 2, "wait", 3]
