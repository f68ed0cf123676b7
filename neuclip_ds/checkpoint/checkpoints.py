"""Save checkpoints atomically, and load them.

`checkpoints/step_000000100/` contains

    meta.json                       step, records of the data and the hooks (`data`), fingerprint of the run (`facts`),
                                    and the checksums of all other files (checkpoint/integrity.py)
    state/                          weights (in float32 if trained), optimizer state and state of the loss; one file per
                                    rank and an index (checkpoint/sharded_state.py)
    config.yaml, tokenizer/, model/ config, tokenizer and description of the model

A checkpoint is written under `.partial-...`, synced to disk and read back; rank 0 renames it when all ranks are done.
The format does not depend on the number of ranks, the ZeRO stage or the precision, so a resumed run may change any
of them. States of random number generators are not saved: the data order and augmentation depend only on (seed, step),
and dropout only on (seed, step, rank, micro-batch). Loading a checkpoint never runs code from it: no file is a pickle.

`checkpoints/best.json` records the step with the best evaluation (`run.best_metric`).
"""

import logging
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from neuclip_ds.checkpoint.engine_state import engine_metadata, engine_shards, load_engine
from neuclip_ds.checkpoint.integrity import (
    META,
    DamagedCheckpoint,
    SaveFailed,
    explain_failure,
    is_complete,
    problem_of,
    read_meta,
    read_sealed,
    sealed,
    verify,
    write_files,
)
from neuclip_ds.checkpoint.sharded_state import OBJECTIVE, STATE
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.engine.engine import Engine
from neuclip_ds.errors import UserError
from neuclip_ds.files import Checksum, atomic_write, sync, sync_folders
from neuclip_ds.losses.base import LossFunction
from neuclip_ds.state.shards import replicated_shards, shard_files, table_shards
from neuclip_ds.state.tensor_file import BytesFile, StateFile

log = logging.getLogger(__name__)

Fingerprint = Mapping[str, Any]
"""Settings that a resumed run must share with the run that wrote the checkpoint."""

_OPTIONS = {  # option of each setting that has a different name in checkpoints
    "batch_size": "data.batch_size",
    "sources": "data.train",
    "shard_streams": "data.shard_streams",
    "shuffle_block_size": "data.shuffle_block_size",
    "decoder": "data.decoder",
    "drop_last": "data.drop_last",
    "seed": "run.seed",
    "method": "objective.method",
    "optimizer": "optimizer.name",
}
_PARTIAL = ".partial-"  # prefix of a folder that is being written or deleted


class Best(NamedTuple):
    """The best evaluation: the step at which a metric was highest, the metric's name, and its value at that step."""

    step: int
    metric: str
    value: float


def read_best(folder: Path) -> Best | None:
    """Read the best evaluation from a run's `checkpoints` folder; return None if none has been recorded.

    Raises `DamagedCheckpoint` if the record is damaged.
    """
    path = folder / "best.json"
    if not path.is_file():
        return None
    fix = "Restore it from a copy; otherwise, training writes it again when an evaluation is the best so far"
    fields = read_sealed(path, fix)
    best = Best(fields.get("step", 0), fields.get("metric", ""), fields.get("value", 0.0))
    types = [type(value) for value in best]
    if fields.keys() != set(Best._fields) or types not in ([int, str, float], [int, str, int]):
        raise DamagedCheckpoint(f"{path} is damaged (its fields are not the expected ones). {fix}.")
    return best


def find_best(folder: Path) -> Best | None:
    """Return the best evaluation as `read_best` does; log a warning and return None if its record is damaged."""
    try:
        return read_best(folder)
    except DamagedCheckpoint as error:
        log.warning("%s", error)
        return None


def step_folder(folder: Path, step: int) -> Path:
    """Return the folder of a step's checkpoint in a run's `checkpoints` folder."""
    return folder / f"step_{step:09d}"


def all_checkpoints(folder: Path) -> list[Path]:
    """List all checkpoints in a run's `checkpoints` folder, intact or damaged, newest first.

    Copies with other names, such as `step_000000100_backup`, belong to the user and are not listed.
    """
    checkpoints = [path for path in folder.glob("step_*") if re.fullmatch(r"step_\d+", path.name)]
    return sorted(checkpoints, reverse=True)


def complete_checkpoints(folder: Path) -> list[Path]:
    """List the complete checkpoints in a run's `checkpoints` folder, newest first."""
    return [path for path in all_checkpoints(folder) if is_complete(path)]


def set_aside(path: Path) -> None:
    """Rename a damaged checkpoint, if it exists, so that another checkpoint can use its name."""
    if path.exists():
        renamed = path.with_name(f"damaged-{path.name}")
        _delete(renamed)
        path.rename(renamed)
        log.warning(
            "the damaged checkpoint %s was renamed to %s; delete this folder when you no longer need it",
            path,
            renamed.name,
        )


class Checkpoints:
    """The checkpoints of one run; all ranks must call each method together.

    Args:
        folder: the run's `checkpoints` folder, created when the first checkpoint is saved.
        communicator: communicator between the run's ranks.
        keep: number of newest checkpoints to keep.
        extra_files: files to add to each checkpoint (config, tokenizer, model description): name -> content.

    Attributes:
        changes: number of times that this object has completed a checkpoint or recorded a new best evaluation.
    """

    def __init__(
        self,
        folder: Path,
        communicator: Communicator,
        keep: int,
        extra_files: Mapping[str, bytes] | None = None,
    ) -> None:
        self._folder = folder
        self._communicator = communicator
        self._keep = keep
        self._extra_files = extra_files or {}
        self.changes = 0
        self._in_use: Callable[[Path], bool] | None = None

    def protect(self, in_use: Callable[[Path], bool]) -> None:
        """Keep checkpoints while they are in use, regardless of their age; `CopyRun` protects those that it copies.

        `in_use` is called on rank 0 only, with the path of a checkpoint, and returns whether the checkpoint is in use.
        It replaces the function that an earlier call passed.
        """
        self._in_use = in_use

    def newest(self) -> Path | None:
        """Return the newest intact checkpoint, or None if there are no checkpoints.

        Logs a warning for each newer checkpoint that is damaged; raises `UserError` if all are damaged.
        """
        problem = None
        names = self._communicator.on_rank_zero(lambda: [path.name for path in all_checkpoints(self._folder)])
        for name in names:
            path = self._folder / name
            problem = find_damage(path, self._communicator, alternative="the next older one")
            if problem is None:
                return path
        if problem is not None:
            raise UserError(
                f"No checkpoint in {self._folder} can be read. The problem with the oldest one: {problem} Restore a "
                "checkpoint from a copy, or start a new run under a new run.name."
            )
        return None

    def set_aside_beyond(self, step: int) -> None:
        """Rename the checkpoints of steps after `step`, which are damaged, so that new ones can use their names."""

        def rename() -> None:
            for path in all_checkpoints(self._folder):
                if path > step_folder(self._folder, step):
                    set_aside(path)

        self._communicator.on_rank_zero(rename)

    def save(
        self, step: int, engine: Engine, loss: LossFunction, fingerprint: Fingerprint, data: Mapping[str, Any]
    ) -> Path:
        """Save and verify the state after `step` steps, and return the checkpoint's folder.

        If more than `keep` checkpoints then exist, the oldest are deleted, except the best one and one that is being
        copied (`protect`). `data` is stored in meta.json: the record of the training data, the states of the hooks, and
        the compiled parts of the towers.

        Raises `SaveFailed` on all ranks if the disk has too little space or any rank fails to write its files; the
        partial checkpoint is then removed.
        """
        target = step_folder(self._folder, step)
        partial = _partial(target)
        files = self._files(engine, loss)
        self._make_room(partial, sum(file.bytes for file in files))
        meta = {"step": step, "facts": dict(fingerprint), "data": dict(data)}
        try:
            checksums: dict[str, Checksum] = {}
            for written in self._communicator.gather_objects(_write(partial, files)):
                if isinstance(written, str):
                    raise SaveFailed(written)
                for name, checksum in written.items():
                    checksums[name] = Checksum(*checksum)
            self._communicator.on_rank_zero(lambda: self._complete(target, meta, checksums))
        except SaveFailed:
            self._communicator.on_rank_zero(lambda: shutil.rmtree(partial, ignore_errors=True))
            raise
        self.changes += 1
        return target

    def best(self) -> Best | None:
        """Return, on all ranks, the best evaluation so far.

        Returns None if no best evaluation has been recorded, its record is damaged, or its checkpoint does not exist.
        """
        return self._communicator.value_from_rank_zero(Best | None, self._find_best)

    def keep_best(self, best: Best) -> None:
        """Record a new best evaluation, whose checkpoint is then kept regardless of its age.

        Raises `SaveFailed` if best.json cannot be written.
        """

        def write() -> None:
            with explain_failure(self._folder), atomic_write(self._folder / "best.json") as path:
                path.write_text(sealed(best._asdict()), encoding="utf-8")

        self._communicator.on_rank_zero(write)
        self.changes += 1
        log.info("best so far: %s is %.4g at step %d", best.metric, best.value, best.step)

    def check(self, path: Path, fingerprint: Fingerprint) -> None:
        """Raise `UserError` if the checkpoint's fingerprint differs from `fingerprint`, or if its meta.json is damaged.

        All ranks call this together.
        """
        self._read_meta(path, fingerprint)

    def read(self, path: Path, fingerprint: Fingerprint) -> tuple[int, Mapping[str, Any]]:
        """Return a checkpoint's number of completed steps, and the `data` that `save` stored; raise as `check` does."""
        meta = self._read_meta(path, fingerprint)
        return int(meta["step"]), meta["data"]

    def _read_meta(self, path: Path, fingerprint: Fingerprint) -> dict[str, Any]:
        """Return the content of a checkpoint's meta.json; raise as `check` does."""
        meta = self._communicator.on_rank_zero(lambda: read_meta(path))
        _require_fingerprint(path, meta["facts"], fingerprint)
        return meta

    def load(self, path: Path, engine: Engine, loss: LossFunction) -> None:
        """Load a verified checkpoint into `engine` and `loss`; raise `UserError` if it does not match them."""
        files = load_engine(path / STATE, engine, self._communicator)
        files.fill(loss.row_tables())
        loss.load_replicated_state(files.replicated(OBJECTIVE))

    def _files(self, engine: Engine, loss: LossFunction) -> list[StateFile]:
        """Return the files that this rank writes; their tensors are views of the state, not copies."""
        is_rank_zero = self._communicator.rank == 0
        shards = engine_shards(engine, self._communicator) | table_shards(loss.row_tables())
        if is_rank_zero:
            shards |= replicated_shards(OBJECTIVE, loss.replicated_state())
        state_files = shard_files(shards, engine_metadata(engine), self._communicator)
        files = [file._replace(name=f"{STATE}/{file.name}") for file in state_files]
        if is_rank_zero:
            files += [BytesFile(name, content) for name, content in self._extra_files.items()]
        return files

    def _make_room(self, partial: Path, size: int) -> None:
        """Delete old partial checkpoints and create `partial`.

        Raises `SaveFailed` if this fails or if the disk has too little space.
        """
        needed = sum(self._communicator.gather_objects(size))

        def make() -> None:
            with explain_failure(self._folder):
                self._folder.mkdir(exist_ok=True)
                for stale in self._folder.glob(f"{_PARTIAL}*"):
                    remove(stale)
                free = shutil.disk_usage(self._folder).free
                if free < needed:
                    raise SaveFailed(
                        f"A checkpoint in {self._folder} needs {needed / 1e9:.3g} GB, but the disk has only "
                        f"{free / 1e9:.3g} GB of free space."
                    )
                for name in (f"{STATE}/files", *self._extra_files):
                    (partial / name).parent.mkdir(parents=True, exist_ok=True)

        self._communicator.on_rank_zero(make)

    def _complete(self, target: Path, meta: Mapping[str, Any], checksums: Mapping[str, Checksum]) -> None:
        """Write meta.json, rename the partial folder, and delete the oldest checkpoints if more than `keep` exist."""
        partial = _partial(target)
        with explain_failure(target):
            text = sealed({**meta, "files": dict(sorted(checksums.items()))})
            write_files(partial, [BytesFile(META, text.encode())])
            sync_folders(partial)
            _delete(target)  # the same step, saved by an earlier launch of this run
            partial.rename(target)
            sync(self._folder)
            self._delete_old()
        log.info("saved checkpoint %s", target)

    def _delete_old(self) -> None:
        """Delete the oldest checkpoints beyond `keep`, except the best one and one in use.

        If best.json is damaged, log a warning and delete none.
        """
        try:
            best = read_best(self._folder)
        except DamagedCheckpoint as error:
            log.warning("%s Until then, no checkpoint is deleted, because any of them may be the best.", error)
            return
        best_path = None if best is None else step_folder(self._folder, best.step)
        for path in all_checkpoints(self._folder)[self._keep :]:
            is_in_use = self._in_use is not None and self._in_use(path)
            if path != best_path and not is_in_use:
                _delete(path)

    def _find_best(self) -> Best | None:
        best = find_best(self._folder)
        if best is None or not is_complete(step_folder(self._folder, best.step)):
            return None
        return best


def _require_fingerprint(path: Path, saved: Fingerprint, fingerprint: Fingerprint) -> None:
    """Raise `UserError` if a setting in `fingerprint` differs from the one that a checkpoint was saved with."""
    for key, value in fingerprint.items():
        saved_value = saved.get(key)
        if saved_value != value and key == "parameters":
            raise UserError(
                f"The checkpoint {path} was written with a model of {saved_value} parameters, but this run's model "
                f"has {value}: use the model options (model.*) of the run that wrote the checkpoint, or give the "
                "run a different name (run.name)."
            )
        if saved_value != value:
            option = _OPTIONS.get(key, key)
            raise UserError(
                f"The checkpoint {path} was written with {option}={saved_value}, but this run uses "
                f"{option}={value}: use the checkpoint's {option}, or give the run a different name (run.name)."
            )


def verify_together(path: Path, communicator: Communicator) -> None:
    """Verify a checkpoint's files, split among ranks; raise `UserError` on all ranks if one is missing or damaged."""
    communicator.on_every_rank(lambda: verify(path, communicator.rank, communicator.world_size))


def find_damage(path: Path, communicator: Communicator, alternative: str) -> str | None:
    """Verify a checkpoint as `verify_together` does; return the problem, or None if the checkpoint is intact.

    If there is a problem, rank 0 logs it with the `alternative` that the caller tries next.
    """
    try:
        verify_together(path, communicator)
        return None
    except UserError as error:
        problem = problem_of(error)
    if communicator.rank == 0:
        log.warning("checkpoint %s is damaged; trying %s. The problem: %s", path.name, alternative, problem)
    return problem


def _partial(target: Path) -> Path:
    return target.with_name(f"{_PARTIAL}{target.name}")


def _write(folder: Path, files: Sequence[StateFile]) -> dict[str, list[int]] | str:
    """Write this rank's files; return the size and CRC-32 of each file, or the reason why writing failed."""
    try:
        return {name: list(checksum) for name, checksum in write_files(folder, files).items()}
    except SaveFailed as error:
        return str(error)


def _delete(path: Path) -> None:
    """Delete a checkpoint; an interrupted deletion never leaves a partial folder under the checkpoint's name."""
    if path.exists():
        renamed = path.with_name(f"{_PARTIAL}deleted-{path.name}")
        remove(renamed)
        path.rename(renamed)
        remove(renamed)


def remove(path: Path) -> None:
    """Remove a folder or a file, if it exists."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
