"""Copy a run to a remote store while it trains, and resume it from there (`run.remote`)."""

from __future__ import annotations

import logging
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from neuclip_ds.checkpoint.checkpoints import (
    all_checkpoints,
    complete_checkpoints,
    find_best,
    find_damage,
    remove,
    set_aside,
    step_folder,
)
from neuclip_ds.checkpoint.integrity import META, DamagedCheckpoint, is_complete, problem_of, read_meta, verify
from neuclip_ds.checkpoint.remote import RemoteRun, start_push
from neuclip_ds.config import Config, RunConfig
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.distributed.stop_signals import raising_at_once
from neuclip_ds.errors import UserError, explained
from neuclip_ds.files import sync_folders
from neuclip_ds.training.hooks import Hook
from neuclip_ds.training.run_folder import RECOVERY

if TYPE_CHECKING:
    from neuclip_ds.training.trainer import Loop, StepResult

log = logging.getLogger(__name__)

_COPY_TIMEOUT = 3600.0  # seconds after which a copy is considered stalled
_MAX_FINAL_WAIT = 1500.0  # seconds that the last copies may take; other ranks wait at most 30 minutes for rank 0


class CopyRun(Hook):
    """Copies metrics, logs, and the newest and best checkpoints from rank 0 to the remote store, one copy at a time.

    Each copy contains the checkpoints that are the newest and the best when it starts, so checkpoints saved during an
    earlier copy may be skipped. A failed copy is recorded as an event and does not end the run. A run starts from the
    newest intact checkpoint in its folder or its copy, and ends by copying its final files.
    """

    in_recovery = True

    def __init__(self, remote: str) -> None:
        self._remote = remote
        self._push: subprocess.Popen[str] | None = None  # on rank 0
        self._names: list[str] = []  # checkpoints in the current copy
        self._started_at = 0.0  # when the current copy was started, in seconds of `time.monotonic`
        # number of checkpoint changes when the last copy was started; None if the next copy does not need a change
        self._copied_changes: int | None = None

    def before_run(self, config: Config, communicator: Communicator, folder: Path) -> None:
        folders = [folder]
        if config.recovery.epochs:
            folders.append(folder / RECOVERY)
        restore(config.run, communicator, *folders)

    def start(self, loop: Loop) -> None:
        loop.checkpoints.protect(self._is_copying)
        if loop.done == 0:
            self._copied_changes = loop.checkpoints.changes
        else:
            self._copied_changes = None  # the last checkpoint may not have been copied yet

    def after_step(self, loop: Loop, result: StepResult) -> None:
        if self._push is not None:
            has_ended = self._push.poll() is not None
            has_stalled = time.monotonic() > self._started_at + _COPY_TIMEOUT
            if has_ended or has_stalled:
                self._end_copy(loop, timeout=1.0)
        if loop.context.communicator.rank == 0:
            self._start_copy(loop)

    def close(self, loop: Loop, error: BaseException | None) -> None:
        """On all ranks, wait for the last copy, unless the loop failed; a signal ends the wait."""
        try:
            if error is None:
                loop.context.communicator.on_rank_zero(lambda: self._finish(loop))
        finally:
            if self._push is not None:
                self._push.kill()
                self._push.wait()
                self._push = None

    def after_run(self, loop: Loop) -> None:
        if loop.context.communicator.rank == 0:  # the other ranks need not wait
            self._copied_changes = None  # copy once more, because files of the run have changed
            self._finish(loop)

    def _is_copying(self, checkpoint: Path) -> bool:
        """Return whether the copy in progress, if any, contains a checkpoint."""
        return self._push is not None and checkpoint.name in self._names

    def _finish(self, loop: Loop) -> None:
        """Wait for the copy in progress, and make another one if anything has changed since it was started."""
        with raising_at_once():
            self._end_copy(loop, timeout=_MAX_FINAL_WAIT / 2)
            self._start_copy(loop)
            self._end_copy(loop, timeout=_MAX_FINAL_WAIT / 2)

    def _start_copy(self, loop: Loop) -> None:
        """Start copying the newest and the best checkpoint and the run's other files, unless a copy is in progress.

        Nothing is copied if no checkpoint has changed since the last copy was started.
        """
        if self._push is not None or self._copied_changes == loop.checkpoints.changes:
            return
        self._copied_changes = loop.checkpoints.changes
        self._started_at = time.monotonic()
        checkpoints = loop.folder / "checkpoints"
        self._names = []
        newest = max(complete_checkpoints(checkpoints), default=None)
        if newest is not None:
            self._names.append(newest.name)
        best = find_best(checkpoints)
        if best is not None:
            best_checkpoint = step_folder(checkpoints, best.step)
            if best_checkpoint != newest and is_complete(best_checkpoint):
                self._names.append(best_checkpoint.name)
        self._push = start_push(_url_of_copy(loop.context.config.run, loop.folder), loop.folder, self._names)

    def _end_copy(self, loop: Loop, timeout: float) -> None:
        """Wait for the copy in progress, if any, and report a failure; kill the copy after `timeout` seconds."""
        if self._push is None:
            return
        try:
            output, _ = self._push.communicate(timeout=timeout)
            reason = output.strip() or "its process exited without a message"
        except subprocess.TimeoutExpired:
            self._push.kill()
            reason = f"it took more than {time.monotonic() - self._started_at:.0f} s"
        if self._push.wait() != 0:
            copied = " and ".join(self._names) or "the run"
            loop.events.add(
                loop.done,
                "copy_failed",
                f"{copied} could not be copied to {self._remote} ({reason}). The run tries again after its "
                "next checkpoint, at its end, and at its next launch.",
            )
        self._push = None


def restore(run: RunConfig, communicator: Communicator, *folders: Path) -> None:
    """Fetch the newest intact checkpoint from a run's copy, unless an intact local checkpoint is at least as new.

    The best checkpoint is also fetched, and so are the records that the folder lacks. If the fetched checkpoint is
    newer than all local ones, the copy's records also replace local ones. A damaged local checkpoint of the same step
    is renamed. All ranks call this together.

    Args:
        run: section of the config with the store's URL.
        communicator: communicator between the ranks.
        folders: the run's folder, then folders to restore only if the run's folder and its copy have no checkpoint.

    Raises:
        UserError: the store cannot be read or written, or the folder cannot be written; the copy would be in the run's
            own folder; or the copy is not empty, but neither it nor the folder contains an intact checkpoint.
    """
    for folder in folders:
        if _restore_folder(_url_of_copy(run, folder), communicator, folder):
            return


def _restore_folder(url: str, communicator: Communicator, folder: Path) -> bool:
    """Restore one folder; return whether it contains a checkpoint now, local or fetched; raise as `restore` does."""

    def list_both() -> list[list[str]]:
        local_names = [path.name for path in all_checkpoints(folder / "checkpoints")]
        with _explained(url):
            remote = RemoteRun(url)
            if remote.is_folder(folder):
                raise UserError(
                    f"run.remote would put the copy into the run's own folder ({url}): choose another folder or a "
                    "store, or omit run.remote."
                )
            remote.check_writable()
            return [local_names, remote.names(), remote.records()]

    local_names, remote_names, records = communicator.on_rank_zero(list_both)
    if not remote_names and not records:
        return bool(local_names)  # the run itself chooses among its local checkpoints
    newest_local = max(local_names, default="")
    problem = f"the copy in {url} contains records but no complete checkpoint"
    for name in sorted({*local_names, *remote_names}, reverse=True):
        if name in local_names:
            path = folder / "checkpoints" / name
            local_problem = find_damage(path, communicator, alternative="its copy or an older checkpoint")
            if local_problem is None:
                return True
            problem = local_problem
        if name in remote_names:
            fetch = partial(_fetch, url, name, folder, is_newer=name > newest_local)
            remote_problem = communicator.on_rank_zero(fetch)
            if remote_problem is None:
                return True
            problem = remote_problem
    raise UserError(
        f"No checkpoint of this run is intact, either in {folder} or in its copy {url} ({problem.rstrip('.')}). "
        "Restore a checkpoint from a backup, start a new run under a new run.name, or delete both folders to start "
        "again at step 0."
    )


def _fetch(url: str, name: str, folder: Path, is_newer: bool) -> str | None:
    """Fetch a checkpoint, records and the best checkpoint; return the problem if the checkpoint is damaged.

    Called on one rank. `is_newer` says whether the checkpoint is of a later step than all local checkpoints.
    """
    checkpoints = folder / "checkpoints"
    with _explained(url):
        remote = RemoteRun(url)
        with _partial_folder(checkpoints, name) as downloaded:
            problem = _download(remote, name, downloaded)
            if problem is not None:
                return problem
            # records before the checkpoint, so that the next launch fetches both again if this one is killed in between
            remote.pull_records(folder, replace=is_newer)
            set_aside(checkpoints / name)
            downloaded.rename(checkpoints / name)
        log.info("fetched checkpoint %s from the copy in %s", name, url)

        best = find_best(checkpoints)
        if best is None or step_folder(checkpoints, best.step).exists():
            return None
        best_checkpoint = step_folder(checkpoints, best.step)
        with _partial_folder(checkpoints, best_checkpoint.name) as downloaded:
            best_problem = _download(remote, best_checkpoint.name, downloaded)
            if best_problem is None:
                downloaded.rename(best_checkpoint)
    return None


@contextmanager
def _partial_folder(checkpoints: Path, name: str) -> Iterator[Path]:
    """Yield a new folder next to a run's checkpoints, and remove it at the end, unless it has been renamed."""
    folder = checkpoints / f".partial-fetched-{name}"
    remove(folder)  # left by a launch that was killed
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _download(remote: RemoteRun, name: str, folder: Path) -> str | None:
    """Download a checkpoint; if it is damaged, log a warning and return the problem."""
    try:
        remote.pull(name, [META], folder)
        remote.pull(name, list(read_meta(folder)["files"]), folder)
        verify(folder)
        sync_folders(folder)
    except (DamagedCheckpoint, FileNotFoundError, ValueError) as error:
        problem = problem_of(error)
        log.warning("the copy of checkpoint %s in run.remote is damaged and is not used: %s", name, problem)
        return f"the copy of {name}: {problem}"
    return None


def _explained(url: str) -> AbstractContextManager[None]:
    """Turn any exception of fsspec's backend or the disk into a `UserError` that names the store."""
    problem = f"run.remote: the copy in {url} cannot be read or written"
    return explained(problem, "check the address and your access to it, and the disk with the run's folder")


def _url_of_copy(run: RunConfig, folder: Path) -> str:
    """Return the URL of a folder's copy."""
    return f"{str(run.remote).rstrip('/')}/{folder.relative_to(run.output_dir).as_posix()}"
