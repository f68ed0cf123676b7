"""Checkpoints are complete or absent, belong to their run, and are read as data."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from build import batch, objective, pairs, step

from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.errors import UserError
from neuclip_ds.objectives.base import Objective
from neuclip_ds.training.checkpoint import Checkpoints

FACTS = {"data": "abc", "method": "neuclip"}


class FakeEngine:
    """Keeps one tensor, with the calls that DeepSpeed's engine has."""

    def __init__(self, value: object = 0.0) -> None:
        self.value = value

    def save_checkpoint(self, folder: str, tag: str, save_latest: bool) -> None:
        (Path(folder) / tag).mkdir()
        torch.save(self.value, Path(folder) / tag / "weights.pt")

    def load_checkpoint(self, folder: str, tag: str) -> tuple[str | None, dict[str, Any]]:
        path = Path(folder) / tag / "weights.pt"
        if not path.is_file():
            return None, {}
        self.value = torch.load(path, weights_only=False)  # as DeepSpeed does
        return str(path), {}


def trained() -> Objective:
    npn = {"prototypes": 6, "updates": 1, "lr": 0.1}
    built = objective("neuclip", Communicator(), 4, torch.float32, npn=npn)
    for number in range(2):
        image, text = pairs(8, 4, seed=number)
        built(batch(image.float(), text.float()), step(number))
    return built


def keeper(folder: Path, keep: int = 2) -> Checkpoints:
    return Checkpoints(folder / "checkpoints", Communicator(), keep)


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    saved = trained()
    keeper(tmp_path).save(7, FakeEngine(torch.tensor(3.0)), saved, FACTS)
    newest = keeper(tmp_path).newest()
    assert newest is not None
    engine, fresh = FakeEngine(), objective("neuclip", Communicator(), 4, torch.float32, npn={"prototypes": 6})
    assert keeper(tmp_path).load(newest, engine, fresh, FACTS) == 7
    assert engine.value == 3.0
    for key, value in saved.replicated_state().items():
        assert torch.equal(fresh.replicated_state()[key], value)
    for key, value in saved.row_tables()["npn"].tensors.items():
        assert torch.equal(fresh.row_tables()["npn"].tensors[key], value)


def test_a_save_that_broke_off_is_never_seen(tmp_path: Path) -> None:
    checkpoints, built = keeper(tmp_path), trained()

    class Breaks(FakeEngine):
        def save_checkpoint(self, folder: str, tag: str, save_latest: bool) -> None:
            super().save_checkpoint(folder, tag, save_latest)
            raise OSError("no space left")

    checkpoints.save(1, FakeEngine(), built, FACTS)
    with pytest.raises(OSError, match="no space"):
        checkpoints.save(2, Breaks(), built, FACTS)
    newest = keeper(tmp_path).newest()
    assert newest is not None
    assert newest.name == "step_000000001"
    checkpoints.save(3, FakeEngine(), built, FACTS)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step_000000001", "step_000000003"], "what the broken save left is gone"


def test_the_newest_are_kept(tmp_path: Path) -> None:
    checkpoints, built = keeper(tmp_path, keep=2), trained()
    for number in (1, 2, 10, 3):
        checkpoints.save(number, FakeEngine(), built, FACTS)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step_000000003", "step_000000010"]


def test_a_step_saved_again_replaces_the_old(tmp_path: Path) -> None:
    checkpoints, built = keeper(tmp_path), trained()
    for value in (1.0, 2.0):
        path = checkpoints.save(5, FakeEngine(torch.tensor(value)), built, FACTS)
    engine = FakeEngine()
    checkpoints.load(path, engine, built, FACTS)
    assert engine.value == 2.0


def test_no_checkpoint_yet(tmp_path: Path) -> None:
    assert keeper(tmp_path).newest() is None


def test_a_checkpoint_of_other_data_is_refused(tmp_path: Path) -> None:
    built = trained()
    path = keeper(tmp_path).save(1, FakeEngine(), built, FACTS)
    with pytest.raises(UserError, match="data=abc, but this run has data=xyz: set it back, or give the run another"):
        keeper(tmp_path).load(path, FakeEngine(), built, {**FACTS, "data": "xyz"})


def test_weights_that_are_missing(tmp_path: Path) -> None:
    built = trained()
    path = keeper(tmp_path).save(1, FakeEngine(), built, FACTS)
    (path / "engine" / "weights.pt").unlink()
    with pytest.raises(UserError, match="no weights"):
        keeper(tmp_path).load(path, FakeEngine(), built, FACTS)


class RunsCode:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("exit 0",)


def test_a_checkpoint_cannot_run_code(tmp_path: Path) -> None:
    built = trained()
    path = keeper(tmp_path).save(1, FakeEngine(RunsCode()), built, FACTS)
    with pytest.raises(UserError, match="holds more than tensors"):
        keeper(tmp_path).load(path, FakeEngine(), built, FACTS)
    with pytest.raises(pickle.UnpicklingError):
        torch.load(path / "engine" / "weights.pt", weights_only=True)
    assert torch.load(path / "engine" / "weights.pt", weights_only=False) == 0, "the environment is as it was"
