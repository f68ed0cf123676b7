"""Copy a run to a remote store while it trains, and resume it from there (`run.remote`)."""

from __future__ import annotations

import logging
import shutil
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

from neuclip_ds.checkpoint.checkpoints import complete_checkpoints, read_best, step_folder
from neuclip_ds.checkpoint.integrity import DamagedCheckpoint, verify
from neuclip_ds.checkpoint.remote import RemoteRun, start_push
from neuclip_ds.config import Config, RunConfig
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.distributed.stop_signals import deferring
from neuclip_ds.errors import UserError
from neuclip_ds.files import sync_folders
from neuclip_ds.training.hooks import Hook
from neuclip_ds.training.run_folder import RECOVERY

if TYPE_CHECKING:
    from neuclip_ds.training.trainer import Loop, StepResult

log = logging.getLogger(__name__)

_COPY_TIMEOUT = 3600.0  # seconds after which a copy is considered stalled
_MAX_FINAL_WAIT = 1500.0  # seconds at the end; other ranks wait in a collective for up to 30 minutes


class CopyRun(Hook):
    """Copies metrics, logs, and the newest and best checkpoints from rank 0, one copy at a time.

    A checkpoint saved during a copy is skipped unless it is the newest or best. A failure is recorded as an event and
    does not end the run. A run starts by fetching checkpoints newer than its own, and ends by copying its final files.
    """

    in_recovery = True

    def __init__(self, remote: str) -> None:
        self._remote = remote
        self._push: subprocess.Popen[str] | None = None  # on rank 0
        self._names: list[str] = []  # checkpoints in the current copy
        self._started_at = 0.0  # when the current copy was started, in seconds of `time.monotonic`
        self._copied_changes = 0  # number of checkpoint changes when the last copy was started

    def before_run(self, config: Config, communicator: Communicator, folder: Path) -> None:
        folders = [folder]
        if config.recovery.epochs:
            folders.append(folder / RECOVERY)
        communicator.on_rank_zero(lambda: restore(config.run, *folders))

    def start(self, loop: Loop) -> None:
        loop.checkpoints.in_use = lambda path: self._push is not None and path.name in self._names
        self._copied_changes = loop.checkpoints.changes
        if loop.done > 0:
            self._copied_changes -= 1  # the last checkpoint may not have been copied yet

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
            self._copied_changes = -1  # copy once more, because files of the run have changed
            self._finish(loop)

    def _finish(self, loop: Loop) -> None:
        """Wait for the copy in progress, and make another one if anything has changed since it was started."""
        with deferring(False):
            self._end_copy(loop, timeout=_MAX_FINAL_WAIT / 2)
            self._start_copy(loop)
            self._end_copy(loop, timeout=_MAX_FINAL_WAIT / 2)

    def _start_copy(self, loop: Loop) -> None:
        """Start copying the newest and the best checkpoint if either has changed and no copy is in progress."""
        if self._push is not None or self._copied_changes == loop.checkpoints.changes:
            return
        self._copied_changes = loop.checkpoints.changes
        self._started_at = time.monotonic()
        checkpoints = loop.folder / "checkpoints"
        self._names = []
        newest = max(complete_checkpoints(checkpoints), default=None)
        if newest is not None:
            self._names.append(newest.name)
        best = read_best(checkpoints)
        if best is not None:
            best_checkpoint = step_folder(checkpoints, best.step)
            if best_checkpoint != newest and best_checkpoint.is_dir():
                self._names.append(best_checkpoint.name)
        self._push = start_push(_url_of_copy(loop.context.config.run, loop.folder), loop.folder, self._names)

    def _end_copy(self, loop: Loop, timeout: float) -> None:
        """Wait for the copy in progress, if any, and report a failure; kill the copy after `timeout` seconds."""
        if self._push is None:
            return
        try:
            output, _ = self._push.communicate(timeout=timeout)
            reason = output.strip() or "its process was killed"
        except subprocess.TimeoutExpired:
            self._push.kill()
            reason = f"it took more than {time.monotonic() - self._started_at:.0f} s"
        if self._push.wait() != 0:
            copied = " and ".join(self._names) or "the run"
            loop.events.add(
                loop.done,
                "copy_failed",
                f"{copied} could not be copied to {self._remote} ({reason}). The next copy, or the next launch, tries "
                "again.",
            )
        self._push = None


def restore(run: RunConfig, *folders: Path) -> None:
    """If a run's copy is newer than the run, fetch the copy's best and newest intact checkpoints; called on one rank.

    Args:
        run: section of the config with the store's URL.
        folders: the run's folder, then folders to fetch only if the run's folder still has no checkpoint.

    Raises:
        UserError: the store cannot be read or written.
    """
    for folder in folders:
        url = _url_of_copy(run, folder)
        try:
            _restore_folder(RemoteRun(url), folder)
        except Exception as error:  # raised by fsspec's backend or the disk
            raise UserError(
                f"run.remote: the copy in {url} cannot be read or written ({type(error).__name__}: {error}). Check "
                "the address, and your access to it."
            ) from error
        if complete_checkpoints(folder / "checkpoints"):
            return


def _restore_folder(remote: RemoteRun, folder: Path) -> None:
    """If a folder's copy has newer checkpoints, fetch the newest intact one, the records and the best checkpoint."""
    checkpoints = folder / "checkpoints"
    remote_names = remote.names()
    newest_local = max((path.name for path in complete_checkpoints(checkpoints)), default="")
    newer = [name for name in reversed(remote_names) if name > newest_local]
    if not any(_fetch_checkpoint(remote, name, checkpoints) for name in newer):  # stops after the first intact one
        return
    remote.pull_records(folder)
    try:
        best = read_best(checkpoints)
    except DamagedCheckpoint as error:  # the copy was interrupted
        log.warning("the copy of best.json is not used: %s", error)
        (checkpoints / "best.json").unlink()
        return
    if best is not None:
        best_checkpoint = step_folder(checkpoints, best.step)
        if not best_checkpoint.exists():
            _fetch_checkpoint(remote, best_checkpoint.name, checkpoints)


def _fetch_checkpoint(remote: RemoteRun, name: str, checkpoints: Path) -> bool:
    """Fetch a checkpoint atomically; log a warning and return False if the copy is damaged."""
    partial = checkpoints / f".partial-fetched-{name}"
    try:
        partial.mkdir(parents=True, exist_ok=True)
        remote.pull(name, partial)
        verify(partial)
        sync_folders(partial)
        partial.rename(checkpoints / name)
    except (DamagedCheckpoint, FileNotFoundError, ValueError, KeyError) as error:
        log.warning("the copy of %s is not used: %s", name, error)
        return False
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    log.info("fetched %s from the copy", name)
    return True


def _url_of_copy(run: RunConfig, folder: Path) -> str:
    """Return the URL of a folder's copy."""
    return f"{str(run.remote).rstrip('/')}/{folder.relative_to(run.output_dir).as_posix()}"
