"""Weights & Biases, with a stand-in for its module: one run however often resumed, and failures never end training."""

from __future__ import annotations

import json
import logging
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import wandb_stand_in

from neuclip_ds.errors import UserError
from neuclip_ds.reporting.metrics import MetricsLog
from neuclip_ds.reporting.weights_and_biases import WeightsAndBiases, require_wandb

CONFIG = {"optimizer": {"lr": 0.001}}


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "site").mkdir()
    shutil.copy(wandb_stand_in.SOURCE, tmp_path / "site" / "wandb.py")
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setenv("WANDB_CALLS", str(tmp_path / "calls.jsonl"))
    monkeypatch.setenv("WANDB_FINISH_TIMEOUT", "5")
    yield tmp_path / "calls.jsonl"
    sys.modules.pop("wandb", None)


def made(calls: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in calls.read_text().splitlines()]


def log_of(folder: Path, done: int | None = None) -> MetricsLog:
    folder.mkdir(exist_ok=True)
    online = WeightsAndBiases("team/clip", folder, "cc3m_neuclip", CONFIG, resumed=done is not None)
    return MetricsLog(folder, done, [online])


def test_metrics_go_to_the_project_under_the_runs_name_with_its_config(calls: Path, tmp_path: Path) -> None:
    require_wandb()
    with log_of(tmp_path / "run") as metrics:
        metrics.write(10, {"loss": 2.5})
    init, *definitions, log, finish = made(calls)
    identity = init.pop("id")
    assert len(identity) == 8
    assert init == {
        "call": "init",
        "project": "clip",
        "entity": "team",
        "name": "cc3m_neuclip",
        "resume": "allow",
        "dir": str(tmp_path / "run"),
        "config": CONFIG,
    }
    assert {"call": "define_metric", "name": "*", "step_metric": "step"} in definitions
    assert log == {"call": "log", "step": 10, "loss": 2.5}
    assert finish == {"call": "finish", "exit_code": 0}


def test_a_resumed_run_continues_and_a_new_one_gets_another_id(calls: Path, tmp_path: Path) -> None:
    for done in (None, 20, 40, None):
        with log_of(tmp_path / "run", done):
            pass
    first, second, third, fresh = [call["id"] for call in made(calls) if call["call"] == "init"]
    assert first == second == third != fresh


def test_a_run_that_fails_is_marked_so(calls: Path, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), log_of(tmp_path / "run"):
        raise RuntimeError
    assert made(calls)[-1] == {"call": "finish", "exit_code": 1}


def test_a_failure_is_logged_once_and_the_other_sinks_continue(
    calls: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WANDB_BREAKS", "1")
    with caplog.at_level(logging.INFO, "neuclip_ds"), log_of(tmp_path / "run") as metrics:
        for step in (10, 20, 30):
            metrics.write(step, {"loss": 1.0})
    (record,) = caplog.records
    assert "OSError: the network is gone" in record.getMessage()
    assert "WANDB_MODE=offline" in record.getMessage()
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 3


def test_a_failed_start_is_logged_once(
    calls: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "site" / "wandb.py").write_text("def init(**options):\n    raise ValueError('no API key')\n")
    with log_of(tmp_path / "run") as metrics:
        metrics.write(1, {"loss": 1.0})
    assert [record.getMessage().split(";")[0] for record in caplog.records] == [
        "Weights & Biases failed (ValueError: no API key)"
    ]


@pytest.mark.parametrize("with_folder", [False, True])
def test_requested_but_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_folder: bool) -> None:
    if with_folder:
        (tmp_path / "wandb" / "offline-run-1").mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(UserError, match="pip install wandb"):
        require_wandb()
