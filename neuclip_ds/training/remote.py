"""Resume a run from its copy in a remote store, and complete the copy at its end (`run.remote`)."""

import logging
import shutil
from pathlib import Path

from neuclip_ds.checkpoint.checkpoints import complete_checkpoints
from neuclip_ds.checkpoint.remote_process import RemoteCall
from neuclip_ds.checkpoint.writing import sync_folders
from neuclip_ds.config import Config
from neuclip_ds.data.disk import explain_disk
from neuclip_ds.data.failures import FailureKind, TransferFailure
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.errors import UserError
from neuclip_ds.redaction import redact

log = logging.getLogger(__name__)


def copy_of(remote: str, folder: Path, runs: Path) -> str:
    """Return the URL of a folder's copy; `runs` is the folder of all runs."""
    return f"{remote.rstrip('/')}/{folder.relative_to(runs).as_posix()}"


def restore(config: Config, communicator: Communicator, folder: Path, *parts: str) -> None:
    """Fetch the newest intact checkpoint of a run where the copy has a newer one than the run's folder.

    All ranks call it together and share the work; their folder is one that all nodes share. `parts` are folders within
    the run's that are runs themselves; they are fetched where the run has no checkpoint.

    Raises:
        UserError: the store cannot be read and written, or holds checkpoints that `run.resume=never` must not use.
    """
    run = config.run
    if run.remote is None:
        return
    for place in (folder, *(folder / part for part in parts)):
        if _restore(copy_of(run.remote, place, run.folder), place / "checkpoints", run.resume, communicator):
            return


def _restore(url: str, checkpoints: Path, resume: str, communicator: Communicator) -> bool:
    """Restore one folder; return whether it holds a checkpoint then."""
    names, best = communicator.on_rank_zero(lambda: _open(url))
    if names and resume == "never":
        raise UserError(
            f"{redact(url)} holds checkpoints and run.resume=never. Choose another --run.name, or delete it."
        )
    present = communicator.on_rank_zero(lambda: {path.name for path in complete_checkpoints(checkpoints)})
    newest = max(present, default="")
    fetched = next(
        (name for name in reversed(names) if name > newest and _fetch(url, name, checkpoints, communicator)), ""
    )
    if fetched:
        if best not in (None, fetched, *present):
            _fetch(url, str(best), checkpoints, communicator)
        communicator.on_rank_zero(lambda: _fetch_records(url, checkpoints.parent))
    return bool(fetched or newest)


def complete_copy(config: Config, folder: Path) -> None:
    """Copy what a run's end has written, and its newest checkpoint if that is missing; called on rank 0.

    Logs a warning where that fails.
    """
    run = config.run
    if run.remote is None:
        return
    url = copy_of(run.remote, folder, run.folder)
    newest = sorted(path.name for path in complete_checkpoints(folder / "checkpoints"))[-1:]
    try:
        RemoteCall(url, "copy", str(folder), newest, run.keep_remote).result()
    except TransferFailure as failure:
        log.warning("The copy in %s is not complete: %s. The same command tries again.", redact(url), failure)
    else:
        log.info("a copy is in %s", redact(url))


def _open(url: str) -> tuple[list[str], str | None]:
    try:
        names, best = RemoteCall(url, "open").result()
        return names, best
    except TransferFailure as failure:
        raise UserError(
            f"run.remote: {redact(f'{url} cannot be read and written: {failure}')}. Check the address, and your access "
            "to it."
        ) from failure


def _fetch(url: str, name: str, checkpoints: Path, communicator: Communicator) -> bool:
    """Fetch a checkpoint, which appears complete; return False, with a warning, if the copy is damaged."""
    partial = checkpoints / f".partial-fetched-{name}"

    def begin() -> None:
        with explain_disk(checkpoints):
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)

    def end() -> None:
        with explain_disk(checkpoints):
            sync_folders(partial)
            partial.rename(checkpoints / name)

    communicator.on_rank_zero(begin)
    try:
        failures = communicator.gather_objects(_fetch_share(url, name, partial, communicator))
        failure = next((found for found in failures if found is not None), None)
        if failure is None:
            communicator.on_rank_zero(end)
            log.info("fetched %s from %s", name, redact(url))
            return True
    finally:
        if communicator.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
    reason, kind = failure
    if kind is FailureKind.DAMAGED:
        log.warning("%s in %s is not used: %s", name, redact(url), reason)
        return False
    raise UserError(f"{name} cannot be fetched from {redact(url)}: {reason}. The same command tries again.")


def _fetch_share(url: str, name: str, partial: Path, communicator: Communicator) -> tuple[str, FailureKind] | None:
    """Fetch this rank's files; return the failure, if any."""
    call = RemoteCall(url, "fetch_checkpoint", name, str(partial), communicator.rank, communicator.world_size)
    try:
        call.result()
    except TransferFailure as failure:
        return redact(str(failure)), failure.kind
    return None


def _fetch_records(url: str, folder: Path) -> None:
    """Fetch metrics, log and the like, for the curves and the report to be whole."""
    try:
        RemoteCall(url, "fetch_records", str(folder)).result()
    except TransferFailure as failure:
        log.warning("metrics and log of earlier steps cannot be fetched from %s: %s", redact(url), failure)
