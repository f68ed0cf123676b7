"""Checkpoints are complete or absent, and belong to their run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from small_checkpoints import DATA, FACTS, PlainEngine, fresh, keeper, trained

from neuclip_ds.errors import UserError


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    saved = trained()
    keeper(tmp_path).save(7, PlainEngine(3.0), saved, FACTS, DATA)
    newest = keeper(tmp_path).newest()
    assert newest is not None
    engine, read = PlainEngine(), fresh()
    assert keeper(tmp_path).read(newest, FACTS) == (7, DATA)
    keeper(tmp_path).load(newest, engine, read)
    assert engine.value == 3.0
    for key, value in saved.replicated_state().items():
        assert torch.equal(read.replicated_state()[key], value)
    for key, value in saved.row_tables()["npn"].tensors.items():
        assert torch.equal(read.row_tables()["npn"].tensors[key], value)


def test_a_save_that_broke_off_is_never_seen(tmp_path: Path) -> None:
    checkpoints, built = keeper(tmp_path), trained()

    class Breaks(PlainEngine):
        def zero_optimization_stage(self) -> int:  # asked after the fragments have been written
            raise OSError("no space left")

    checkpoints.save(1, PlainEngine(), built, FACTS, DATA)
    with pytest.raises(OSError, match="no space"):
        checkpoints.save(2, Breaks(), built, FACTS, DATA)
    newest = keeper(tmp_path).newest()
    assert newest is not None
    assert newest.name == "step_000000001"
    checkpoints.save(3, PlainEngine(), built, FACTS, DATA)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step_000000001", "step_000000003"], "what the broken save left is gone"


def test_the_newest_are_kept(tmp_path: Path) -> None:
    checkpoints, built = keeper(tmp_path, keep=2), trained()
    for number in (1, 2, 10, 3):
        checkpoints.save(number, PlainEngine(), built, FACTS, DATA)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step_000000003", "step_000000010"]


def test_a_step_saved_again_replaces_the_old(tmp_path: Path) -> None:
    checkpoints, built = keeper(tmp_path), trained()
    for value in (1.0, 2.0):
        path = checkpoints.save(5, PlainEngine(value), built, FACTS, DATA)
    engine = PlainEngine()
    checkpoints.load(path, engine, built)
    assert engine.value == 2.0


def test_no_checkpoint_yet(tmp_path: Path) -> None:
    assert keeper(tmp_path).newest() is None


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    built = trained()
    path = keeper(tmp_path).save(1, PlainEngine(), built, FACTS, DATA)
    with pytest.raises(UserError, match="seed=0, but this run has seed=xyz: set it back, or give the run another"):
        keeper(tmp_path).read(path, {**FACTS, "seed": "xyz"})


def test_weights_that_are_missing(tmp_path: Path) -> None:
    built = trained()
    path = keeper(tmp_path).save(1, PlainEngine(), built, FACTS, DATA)
    (path / "engine" / "fragments.00000-of-00001.safetensors").unlink()
    with pytest.raises(UserError, match=r"fragments\.00000-of-00001\.safetensors is missing; restore the folder"):
        keeper(tmp_path).load(path, PlainEngine(), built)


def test_buffers_are_part_of_it(tmp_path: Path) -> None:
    built, engine = trained(), PlainEngine()
    engine.module.register_buffer("mean", torch.tensor(4.0))
    path = keeper(tmp_path).save(1, engine, built, FACTS, DATA)
    engine.module.get_buffer("mean").zero_()
    keeper(tmp_path).load(path, engine, built)
    assert engine.module.get_buffer("mean") == 4.0
    engine.module.register_buffer("scale", torch.tensor(4.0))
    with pytest.raises(UserError, match=r"lacks the buffers \['scale'\] of this run's model"):
        keeper(tmp_path).load(path, engine, built)


def test_a_checkpoint_of_an_older_version_is_refused(tmp_path: Path) -> None:
    built = trained()
    path = keeper(tmp_path).save(1, PlainEngine(), built, FACTS, DATA)
    (path / "meta.json").write_text(json.dumps({"step": 1, "facts": {**FACTS, "world_size": 1}}))
    with pytest.raises(UserError, match=r"written in format None.*--run\.name"):
        keeper(tmp_path).read(path, FACTS)


def test_nothing_in_it_can_run_code(tmp_path: Path) -> None:
    path = keeper(tmp_path).save(1, PlainEngine(), trained(), FACTS, DATA)
    assert {file.suffix for file in path.rglob("*") if file.is_file()} == {".json", ".yaml", ".safetensors"}
