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
from neuclip_ds.training.recovery import RECOVERY

if TYPE_CHECKING:
    from neuclip_ds.training.loop import Loop, StepResult

log = logging.getLogger(__name__)

_STALLED = 3600.0  # seconds after which a copy is considered stalled
_LONGEST_WAIT = 1500.0  # seconds at the end; other ranks wait in a collective for up to 30 minutes


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
        self._began = 0.0
        self._seen = 0  # number of checkpoint changes at the last copy

    def before_run(self, config: Config, communicator: Communicator, folder: Path) -> None:
        recovery = [folder / RECOVERY] if config.recovery.epochs else []
        communicator.on_rank_zero(lambda: restore(config.run, folder, *recovery))

    def start(self, loop: Loop) -> None:
        loop.checkpoints.in_use = lambda path: self._push is not None and path.name in self._names
        self._seen = loop.checkpoints.changes - bool(loop.done)  # the last checkpoint may not have been copied yet

    def after_step(self, loop: Loop, result: StepResult) -> None:
        if self._push is not None and (self._push.poll() is not None or time.monotonic() > self._began + _STALLED):
            self._end(loop, 1.0)
        if loop.context.communicator.rank == 0:
            self._begin(loop)

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
            self._seen = -1
            self._finish(loop)

    def _finish(self, loop: Loop) -> None:
        with deferring(False):
            self._end(loop, _LONGEST_WAIT / 2)
            self._begin(loop)
            self._end(loop, _LONGEST_WAIT / 2)

    def _begin(self, loop: Loop) -> None:
        """Start copying the newest and the best checkpoint if either has changed and no copy is in progress."""
        if self._push is None and self._seen != loop.checkpoints.changes:
            self._seen, self._began, folder = loop.checkpoints.changes, time.monotonic(), loop.folder / "checkpoints"
            newest, best = max(complete_checkpoints(folder), default=None), read_best(folder)
            wanted = [newest, best and step_folder(folder, best.step)]
            self._names = [path.name for path in dict.fromkeys(wanted) if path and path.is_dir()]
            self._push = start_push(_copy_of(loop.context.config.run, loop.folder), loop.folder, self._names)

    def _end(self, loop: Loop, seconds: float) -> None:
        """Wait for the copy in progress, if any, and report a failure; kill the copy after the timeout."""
        if self._push is None:
            return
        try:
            reason = self._push.communicate(timeout=seconds)[0].strip() or "its process was killed"
        except subprocess.TimeoutExpired:
            self._push.kill()
            reason = f"it took more than {time.monotonic() - self._began:.0f} s"
        if self._push.wait():
            message = f"{' and '.join(self._names) or 'the run'} could not be copied to {self._remote} ({reason}). "
            loop.events.add(loop.done, "copy_failed", f"{message}The next copy, or the next launch, tries again.")
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
        url, checkpoints = _copy_of(run, folder), folder / "checkpoints"
        try:
            remote = RemoteRun(url)
            names, present = remote.names(), max((path.name for path in complete_checkpoints(checkpoints)), default="")
            newer = [name for name in reversed(names) if name > present]
            if any(_fetched(remote, name, checkpoints) for name in newer):
                remote.pull_records(folder)
                try:
                    best = read_best(checkpoints)
                    if best is not None and not step_folder(checkpoints, best.step).exists():
                        _fetched(remote, step_folder(checkpoints, best.step).name, checkpoints)
                except DamagedCheckpoint as error:  # the copy was interrupted
                    log.warning("the copy of best.json is not used: %s", error)
                    (checkpoints / "best.json").unlink()
        except Exception as error:  # raised by fsspec's backend or the disk
            raise UserError(
                f"run.remote: the copy in {url} cannot be read or written ({type(error).__name__}: {error}). Check "
                "the address, and your access to it."
            ) from error
        if complete_checkpoints(checkpoints):
            return


def _fetched(remote: RemoteRun, name: str, checkpoints: Path) -> bool:
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


def _copy_of(run: RunConfig, folder: Path) -> str:
    """Return the URL of a folder's copy."""
    return f"{str(run.remote).rstrip('/')}/{folder.relative_to(run.output_dir).as_posix()}"
