"""Checkpoints restore what was saved, are refused by a different run, and cannot execute code."""

import shutil
from pathlib import Path

import pytest
import torch
from small_checkpoints import DATA, FACTS, PlainEngine, fresh, keeper, trained

from neuclip_ds.checkpoint.checkpoints import complete_checkpoints
from neuclip_ds.checkpoint.saved_model import find_checkpoint
from neuclip_ds.errors import UserError


def test_a_saved_checkpoint_is_restored_by_the_same_run_only(tmp_path: Path) -> None:
    saved = trained()
    assert keeper(tmp_path).newest() is None
    keeper(tmp_path).save(7, PlainEngine(3.0), saved, FACTS, DATA)
    newest = keeper(tmp_path).newest()
    assert newest is not None
    engine, read = PlainEngine(), fresh()
    assert keeper(tmp_path).read(newest, FACTS) == (7, DATA)
    with pytest.raises(
        UserError,
        match=r"run\.seed=0, but this run uses run\.seed=xyz: use the checkpoint's run\.seed, or give the run",
    ):
        keeper(tmp_path).read(newest, {**FACTS, "seed": "xyz"})
    with pytest.raises(
        UserError, match=r"a model of None parameters, but this run's model has 5: use the model options"
    ):
        keeper(tmp_path).read(newest, {**FACTS, "parameters": 5})
    keeper(tmp_path).load(newest, engine, read)
    assert engine.value == 3.0
    for key, value in saved.replicated_state().items():
        assert torch.equal(read.replicated_state()[key], value)
    for key, value in saved.row_tables()["npn"].tensors.items():
        assert torch.equal(read.row_tables()["npn"].tensors[key], value)


def test_only_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    checkpoints, built = keeper(tmp_path, keep=2), trained()
    for number in (1, 2, 10, 3):
        checkpoints.save(number, PlainEngine(), built, FACTS, DATA)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step_000000003", "step_000000010"]


def test_saving_a_step_again_replaces_its_checkpoint(tmp_path: Path) -> None:
    checkpoints, built = keeper(tmp_path), trained()
    for value in (1.0, 2.0):
        path = checkpoints.save(5, PlainEngine(value), built, FACTS, DATA)
    engine = PlainEngine()
    checkpoints.load(path, engine, built)
    assert engine.value == 2.0


def test_buffers_are_restored_and_a_missing_buffer_is_an_error(tmp_path: Path) -> None:
    built, engine = trained(), PlainEngine()
    engine.module.register_buffer("mean", torch.tensor(4.0))
    path = keeper(tmp_path).save(1, engine, built, FACTS, DATA)
    engine.module.get_buffer("mean").zero_()
    keeper(tmp_path).load(path, engine, built)
    assert engine.module.get_buffer("mean") == 4.0
    engine.module.register_buffer("scale", torch.tensor(4.0))
    with pytest.raises(UserError, match=r"lacks 1 buffer of this run's model \(scale\)"):
        keeper(tmp_path).load(path, engine, built)


def test_no_file_of_a_checkpoint_can_run_code(tmp_path: Path) -> None:
    path = keeper(tmp_path).save(1, PlainEngine(), trained(), FACTS, DATA)
    assert {file.suffix for file in path.rglob("*") if file.is_file()} == {".json", ".yaml", ".safetensors"}


def test_a_users_copy_of_a_checkpoint_is_left_alone(tmp_path: Path) -> None:
    checkpoints = keeper(tmp_path, keep=1)
    first = checkpoints.save(1, PlainEngine(1.0), trained(), FACTS, DATA)
    copies = [first.with_name(name) for name in ("step_000000001_copy", "step_000000009.old", "step_old")]
    for copy in copies:
        shutil.copytree(first, copy)
    checkpoints.set_aside_beyond(1)
    second = checkpoints.save(2, PlainEngine(2.0), trained(), FACTS, DATA)
    assert sorted(path.name for path in second.parent.iterdir()) == sorted(path.name for path in [*copies, second])
    assert checkpoints.newest() == find_checkpoint(tmp_path) == second
    assert complete_checkpoints(second.parent) == [second]
