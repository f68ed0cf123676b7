"""Save and load checkpoints, which are complete or absent.

`checkpoints/step_000000100/` holds

    meta.json                       format, step, position in the data, fingerprint of the run (`facts`)
    engine/                         float32 weights and moments, one file a rank (checkpoint/sharded_state.py)
    objective.safetensors           what is equal on all ranks: temperature, counters
    NAME.START-STOP.safetensors     partitioned tables: per-sample statistics, NPN columns (state/partition.py)

It is written under `.partial-...`, synced to disk, and renamed by rank 0 when all ranks are done. Nothing in it depends
on how many ranks wrote it, nor on their ZeRO stage and precision: a run may resume with others. No random state is
kept: data order and augmentation are functions of (seed, step), dropout of (seed, step, rank). No file can run code:
all are JSON or safetensors.

`checkpoints/best.json` names the step with the best evaluation (`run.best_metric`).
"""

import json
import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.torch import load_file, save_file

from neuclip_ds.checkpoint.engine_state import load_engine, save_engine
from neuclip_ds.data.atomic_write import atomic_write
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.errors import UserError
from neuclip_ds.objectives.base import Objective
from neuclip_ds.state.partition import load_rows, save_rows

log = logging.getLogger(__name__)

Fingerprint = Mapping[str, Any]
"""What a resumed run must share with the one that wrote a checkpoint."""

_FORMAT = 2  # 1 held DeepSpeed's own files
_RENAMED = {"slots": "shard_streams"}  # in facts of checkpoints written before the name changed


class Best(NamedTuple):
    """The step at which a metric was largest, and its value there."""

    step: int
    metric: str
    value: float


def read_best(folder: Path) -> Best | None:
    """Read which checkpoint was the best from a run's folder `checkpoints`; None where none was kept."""
    path = folder / "best.json"
    return Best(**json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else None


def step_folder(folder: Path, step: int) -> Path:
    """Return the folder of a step's checkpoint in a run's folder `checkpoints`."""
    return folder / f"step_{step:09d}"


def is_complete(path: Path) -> bool:
    """Return whether a folder is a checkpoint."""
    return (path / "meta.json").is_file()


def complete_checkpoints(folder: Path) -> list[Path]:
    """List the checkpoints in a run's folder `checkpoints`; the newest is the largest path."""
    return [path for path in folder.glob("step_*") if is_complete(path)]


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, folder: Path, communicator: Communicator, keep: int) -> None:
        self._folder, self._communicator, self._keep = folder, communicator, keep

    def newest(self) -> Path | None:
        """Return the newest complete checkpoint, the same on all ranks."""
        return self._communicator.on_rank_zero(lambda: max(complete_checkpoints(self._folder), default=None))

    def save(
        self, step: int, engine: Any, objective: Objective, fingerprint: Fingerprint, data: Mapping[str, Any]
    ) -> Path:
        """Write the state after `step` steps, on all ranks together, and delete the oldest beyond `keep`."""
        target = step_folder(self._folder, step)
        partial = self._folder / f".partial-{target.name}"
        self._communicator.on_rank_zero(lambda: _empty(partial))
        save_engine(partial / "engine", engine, self._communicator)
        for name, table in objective.row_tables().items():
            save_rows(partial, name, table)
        if self._communicator.rank == 0:
            state = {key: value.detach().cpu().contiguous() for key, value in objective.replicated_state().items()}
            save_file(state, partial / "objective.safetensors")
            meta = {"format": _FORMAT, "step": step, "facts": dict(fingerprint), "data": dict(data)}
            (partial / "meta.json").write_text(json.dumps(meta, indent=2), encoding="utf-8")
        _sync(partial)
        self._communicator.barrier()
        self._communicator.on_rank_zero(lambda: self._publish(partial, target))
        return target

    def best(self) -> Best | None:
        """Return the last argument of `keep_best`, the same on all ranks."""
        return self._communicator.on_rank_zero(lambda: read_best(self._folder))

    def keep_best(self, best: Best) -> None:
        """Keep the checkpoint of this step, however old, instead of the former best."""

        def write() -> None:
            with atomic_write(self._folder / "best.json") as path:
                path.write_text(json.dumps(best._asdict()), encoding="utf-8")

        self._communicator.on_rank_zero(write)
        log.info("best so far: %s is %.4g at step %d", best.metric, best.value, best.step)

    def read(self, path: Path, fingerprint: Fingerprint) -> tuple[int, Mapping[str, Any]]:
        """Return the number of steps done, and the position in the data (training/data_position.py).

        Raises `UserError` if the run that wrote the checkpoint has another fingerprint.
        """
        meta = read_meta(path)
        for key, wanted in fingerprint.items():
            found = meta["facts"].get(key)
            if found != wanted:
                raise UserError(
                    f"The checkpoint {path} was written with {key}={found}, but this run has {key}={wanted}: "
                    "set it back, or give the run another name (--run.name)."
                )
        return int(meta["step"]), meta["data"]

    def load(self, path: Path, engine: Any, objective: Objective) -> None:
        """Fill engine and objective from a checkpoint; raise `UserError` where files are missing or damaged."""
        load_engine(path / "engine", engine, self._communicator)
        for name, table in objective.row_tables().items():
            load_rows(path, name, table)
        objective.load_replicated_state(load_file(path / "objective.safetensors"))

    def _publish(self, partial: Path, target: Path) -> None:
        if target.exists():  # the same step, saved by an earlier start of this run
            shutil.rmtree(target)
        partial.rename(target)
        _sync_folder(self._folder)
        best = read_best(self._folder)
        kept = step_folder(self._folder, best.step) if best else None
        for path in sorted(complete_checkpoints(self._folder))[: -self._keep]:
            if path != kept:
                shutil.rmtree(path)
        log.info("checkpoint %s", target)


def read_meta(path: Path) -> dict[str, Any]:
    """Read meta.json of a checkpoint, `step`, `facts` and `data`; raise `UserError` if it has another format."""
    meta: dict[str, Any] = json.loads((path / "meta.json").read_text(encoding="utf-8"))
    if meta.get("format") != _FORMAT:
        raise UserError(
            f"The checkpoint {path} was written in format {meta.get('format')}, this version reads {_FORMAT}. "
            "Finish the run with the version that wrote it, or start a new run under another --run.name."
        )
    meta["facts"] = {_RENAMED.get(name, name): value for name, value in meta["facts"].items()}
    return meta


def _empty(folder: Path) -> None:
    """Make a new folder, and delete what an interrupted save left."""
    for stale in folder.parent.glob(".partial-*"):
        shutil.rmtree(stale)
    (folder / "engine").mkdir(parents=True)


def _sync(folder: Path) -> None:
    """Force the files to disk, so that a power cut after the rename cannot leave empty ones."""
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
