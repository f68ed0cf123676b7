"""Run the process that transfers a shard into a file, in a thread that can be stopped at any time."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import IO

from neuclip_ds.data.download_server import DownloadProcess
from neuclip_ds.data.failures import FailureKind, TransferFailure, kind_of_message

_PIPE = "pipe:"
_PIPE_BYTES = 1 << 20  # pipe buffer of a command, Linux's maximum
_CANNOT_RUN = (126, 127)  # bash: not executable, not found
# A guard process reads from a pipe that this process holds open. When this process ends, even by kill -9, the read
# returns and the guard kills its process group, the command included.
_GUARDED = """
exec 3<&0
bash -o pipefail -c "$0" 3<&- </dev/null & command=$!
{ read -r <&3; kill -KILL 0; } >/dev/null 2>&1 & guard=$!
wait $command; code=$?
exec 2>/dev/null; kill -KILL $guard; wait $guard
exit $code
"""


def is_command(url: str) -> bool:
    """Whether a URL is the output of a command (`pipe:COMMAND`)."""
    return url.startswith(_PIPE)


class Transfer(threading.Thread):
    """A thread that runs a process which writes the shard to `part`.

    Attributes:
        overhead: extra seconds allowed before the file is opened and after it is complete.
        error: the error of a failed transfer.
    """

    overhead = 0.0

    def __init__(self, url: str, part: Path, timeout: float, size: int | None, on_end: Callable[[], None]) -> None:
        """
        Args:
            part: file to write, which must not exist.
            timeout: seconds without a byte after which the caller closes the transfer.
            size: bytes that are expected, if known.
            on_end: called in the thread when the transfer has ended.
        """
        super().__init__(name=f"fetch {url}", daemon=True)
        self.error: BaseException | None = None
        self._size, self._on_end = size, on_end
        self._url, self._part, self._timeout = url, part, timeout
        self._closed = False

    def run(self) -> None:
        try:
            self._copy()
        except BaseException as error:
            self.error = error
        if self._closed:
            self._part.unlink(missing_ok=True)  # it may have been opened after `close`
        self._on_end()

    def close(self) -> None:
        """Kill the process if it still runs, and remove the temporary file."""
        self._closed = True
        if self.is_alive():
            self._kill()
        self._part.unlink(missing_ok=True)

    def _copy(self) -> None:
        """Run the process to its end; raise TransferFailure if it fails."""
        raise NotImplementedError

    def _kill(self) -> None:
        """Kill the process, with what it has started, if it runs."""
        raise NotImplementedError


class Download(Transfer):
    """Transfer with fsspec, in a process that writes the file itself."""

    overhead = 60.0
    _process: DownloadProcess | None = None

    def _copy(self) -> None:
        with closing(DownloadProcess(self._url)) as process:
            self._process = process
            if self._closed:
                return
            process.download(self._part, self._timeout, self._size)

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()


class Command(Transfer):
    """Transfer from a command's standard output."""

    _process: subprocess.Popen[bytes] | None = None
    _written = 0

    def _copy(self) -> None:
        with tempfile.TemporaryFile() as messages:
            process = self._process = subprocess.Popen(
                ["bash", "-c", _GUARDED, self._url.removeprefix(_PIPE)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=messages,
                bufsize=0,
                pipesize=_PIPE_BYTES,
                start_new_session=True,
            )
            if self._closed:
                self._kill()
            with process:
                try:
                    assert process.stdout is not None
                    self._drain(process.stdout)
                    code = process.wait()
                finally:
                    self._kill()
            self._check(code, messages)

    def _kill(self) -> None:
        if self._process is not None and self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _drain(self, output: IO[bytes]) -> None:
        with self._part.open("xb", buffering=0) as out:
            while piece := output.read(_PIPE_BYTES):
                self._written += out.write(piece)

    def _check(self, code: int, messages: IO[bytes]) -> None:
        if code:
            message = _last_line(messages)
            kind = FailureKind.SETUP if code in _CANNOT_RUN else kind_of_message(message)
            raise TransferFailure(f"the command exited with code {code}{message and f': {message}'}", kind)
        if not self._written:
            raise TransferFailure("the command wrote nothing", FailureKind.OUTAGE)


def _last_line(messages: IO[bytes]) -> str:
    messages.seek(max(0, messages.seek(0, os.SEEK_END) - 1000))
    lines = messages.read().decode("utf-8", "replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
