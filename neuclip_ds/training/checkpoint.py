"""Checkpoints that are complete or absent.

`checkpoints/step_000000100/` holds

    meta.json                       step, and the facts of the run that a resumed one must share
    engine/                         DeepSpeed's own files: weights, float32 masters, moments (one a rank)
    objective.safetensors           what is equal on all ranks: temperature, counters
    NAME.START-STOP.safetensors     partitioned tables: per-sample statistics, NPN columns (state/partition.py)

It is written under `.partial-...`, synced to disk, and renamed by rank 0 when all ranks are done. Random numbers
need no place in it: data order, augmentation and dropout are functions of (seed, step).
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address
from safetensors.torch import load_file, save_file

from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.errors import UserError
from neuclip_ds.objectives.base import Objective
from neuclip_ds.state.partition import load_rows, save_rows

log = logging.getLogger(__name__)

Facts = Mapping[str, Any]


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, folder: Path, communicator: Communicator, keep: int) -> None:
        self._folder = folder
        self._communicator = communicator
        self._keep = keep

    def newest(self) -> Path | None:
        """The newest complete checkpoint, the same on all ranks."""
        return self._communicator.on_rank_zero(lambda: max(self._complete(), default=None))

    def save(self, step: int, engine: Any, objective: Objective, facts: Facts) -> Path:
        """Writes the state after `step` steps, on all ranks together, and drops the oldest beyond `keep`."""
        target = self._folder / f"step_{step:09d}"
        partial = self._folder / f".partial-{target.name}"
        self._communicator.on_rank_zero(lambda: _empty(partial))
        engine.save_checkpoint(str(partial), tag="engine", save_latest=False)
        for name, table in objective.row_tables().items():
            save_rows(partial, name, table)
        if self._communicator.rank == 0:
            state = {key: value.detach().cpu().contiguous() for key, value in objective.replicated_state().items()}
            save_file(state, partial / "objective.safetensors")
            meta = {"step": step, "facts": dict(facts)}
            (partial / "meta.json").write_text(json.dumps(meta, indent=2), encoding="utf-8")
        _sync(partial)
        self._communicator.barrier()
        self._communicator.on_rank_zero(lambda: self._publish(partial, target))
        return target

    def load(self, path: Path, engine: Any, objective: Objective, facts: Facts) -> int:
        """Fills engine and objective from a checkpoint; the number of steps done.

        Raises:
            UserError: the checkpoint belongs to other data, another method or world size.
        """
        meta = json.loads((path / "meta.json").read_text(encoding="utf-8"))
        for key, wanted in facts.items():
            found = meta["facts"].get(key)
            if found != wanted:
                raise UserError(
                    f"The checkpoint {path} was written with {key}={found}, but this run has {key}={wanted}: "
                    "set it back, or give the run another name (--run.name)."
                )
        try:
            with weights_only():
                loaded, _ = engine.load_checkpoint(str(path), tag="engine")
        except pickle.UnpicklingError as error:
            raise UserError(
                f"The checkpoint {path} holds more than tensors and could run code, so it is not loaded; "
                "if it is not this program's own, delete it."
            ) from error
        if loaded is None:
            raise UserError(
                f"DeepSpeed found no weights in {path}/engine; delete the folder to go on from an older one."
            )
        for name, table in objective.row_tables().items():
            load_rows(path, name, table)
        objective.load_replicated_state(load_file(path / "objective.safetensors"))
        return int(meta["step"])

    def _complete(self) -> list[Path]:
        return [path for path in self._folder.glob("step_*") if (path / "meta.json").is_file()]

    def _publish(self, partial: Path, target: Path) -> None:
        if target.exists():  # the same step, saved by an earlier start of this run
            shutil.rmtree(target)
        partial.rename(target)
        _sync_folder(self._folder)
        for path in sorted(self._complete())[: -self._keep]:
            shutil.rmtree(path)
        log.info("checkpoint %s", target)


@contextmanager
def weights_only() -> Iterator[None]:
    """Has torch read DeepSpeed's files as data: a checkpoint from elsewhere cannot run code."""
    name = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        with torch.serialization.safe_globals([LossScaler, ZeroStageEnum, fragment_address]):
            yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _empty(folder: Path) -> None:
    """A new folder; whatever an interrupted save left goes."""
    for stale in folder.parent.glob(".partial-*"):
        shutil.rmtree(stale)
    folder.mkdir(parents=True)


def _sync(folder: Path) -> None:
    """Forces the files to disk, so that a power cut after the rename cannot leave empty ones."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
