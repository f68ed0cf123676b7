"""Copy a run's checkpoints to a remote store while training continues."""

import threading
from collections.abc import Sequence
from pathlib import Path

from neuclip_ds.checkpoint.remote_process import RemoteCall
from neuclip_ds.data.failures import TransferFailure
from neuclip_ds.redaction import redact


class Mirror:
    """Copies in a thread, one after the other; a checkpoint that waits for its turn gives way to a newer one.

    Args:
        folder: the run's folder.
        url: folder of its copy in the remote store.
        keep: number of newest checkpoints that stay there; None keeps all.
    """

    def __init__(self, folder: Path, url: str, keep: int | None) -> None:
        self._folder, self._url, self._keep = folder, url, keep
        self._waiting: Sequence[str] | None = None  # names of the next turn
        self._running: Sequence[str] = ()
        self._call: RemoteCall | None = None
        self._failures: list[str] = []
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="copies of checkpoints", daemon=True)
        self._thread.start()

    def copy(self, checkpoints: Sequence[Path]) -> None:
        """Have these checkpoints copied, the most important first, instead of those that still wait."""
        with self._changed:
            self._waiting = [path.name for path in checkpoints]
            self._changed.notify_all()

    def uses(self, checkpoint: Path) -> bool:
        """Return whether a checkpoint is to be copied, or is being copied, so that it must not be deleted."""
        with self._changed:
            return checkpoint.name in (*self._running, *(self._waiting or ()))

    def take_failures(self) -> list[str]:
        """Return a message for each failure since the last call."""
        with self._changed:
            found, self._failures = self._failures, []
            return found

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until all is copied, or has failed; return False if that takes longer."""
        with self._changed:
            return self._changed.wait_for(lambda: self._waiting is None and self._call is None, seconds)

    def close(self) -> None:
        """Stop what is in progress."""
        with self._changed:
            self._closed, self._waiting = True, None
            if self._call is not None:
                self._call.kill()
            self._changed.notify_all()
        self._thread.join()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._waiting is not None)
                if self._closed or self._waiting is None:
                    return
                self._running, self._waiting = self._waiting, None
                call = self._call = RemoteCall(self._url, "copy", str(self._folder), self._running, self._keep)
            failure = None
            try:
                call.result()
            except TransferFailure as error:
                failure = redact(f"{self._running[0]} was not copied to {self._url}: {error}.")
            with self._changed:
                if failure and not self._closed:
                    self._failures.append(failure)
                self._running, self._call = (), None
                self._changed.notify_all()
