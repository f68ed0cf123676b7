"""Fetch one shard from a URL that fsspec supports, or from the output of a command (`pipe:COMMAND`)."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

from neuclip_ds.checksum import checksum_of
from neuclip_ds.data.download import URL, describe_error

_PIPE = "pipe:"
_PIPE_BYTES = 1 << 20  # pipe buffer of a command, Linux's maximum
_MAX_BACKOFF = 60.0  # seconds between two attempts
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

_ROOT = Path(__file__).parents[2]  # folder of the package, which may be a checkout that is not installed
_numbers = itertools.count()


class FetchError(OSError):
    """A shard could not be fetched; the message has its URL, the reason and the number of attempts."""


class _Failure(Exception):
    """A failed attempt; `final` if a retry would fail too."""

    def __init__(self, reason: str, final: bool = False) -> None:
        super().__init__(reason)
        self.final = final


def fetch(
    url: str,
    target: Path,
    *,
    expected_bytes: int | None,
    timeout: float,
    expected_crc32: int | None = None,
    retries: int = 4,
    backoff: float = 1.0,
) -> None:
    """Fetch `url` into the file `target`, which appears complete or not at all.

    Args:
        url: a URL that fsspec supports, or `pipe:COMMAND`, which bash runs (with pipefail).
        target: a file in an existing folder; partial data go to a temporary file in that folder.
        expected_bytes: required size of the file; None accepts any.
        timeout: seconds without a byte after which an attempt fails.
        expected_crc32: required checksum of the file; None accepts any.
        retries: attempts after the first one; none if the file does not exist, access is denied, or fsspec lacks the
            protocol.
        backoff: seconds before the second attempt, doubled for each further one.

    Raises:
        FetchError: all attempts failed; neither `target` nor a temporary file is left.
    """
    for attempt in range(retries + 1):
        if attempt:
            time.sleep(_backoff(url, attempt, backoff))
        try:
            return _attempt(url, target, expected_bytes, expected_crc32, timeout)
        except _Failure as failure:
            if failure.final or attempt == retries:
                attempts = "1 attempt" if attempt == 0 else f"{attempt + 1} attempts"
                raise FetchError(f"{url} cannot be fetched: {failure} ({attempts}).") from failure.__cause__
    raise ValueError(f"retries={retries}")


def _backoff(url: str, attempt: int, backoff: float) -> float:
    """Return the seconds before an attempt: exponential backoff with jitter, a hash of the URL and the attempt."""
    digest = hashlib.blake2b(f"{attempt} {url}".encode(), digest_size=8).digest()
    return min(backoff * 2 ** (attempt - 1), _MAX_BACKOFF) * (1 + int.from_bytes(digest, "little") / 2**64) / 2


def _attempt(url: str, target: Path, expected_bytes: int | None, expected_crc32: int | None, timeout: float) -> None:
    part = target.with_name(f".{target.name}.{os.getpid()}.{next(_numbers)}.part")
    transfer = (_Command if url.startswith(_PIPE) else _Download)(url, part, timeout)
    try:
        transfer.start()
        _watch(transfer, part, expected_bytes, timeout)
        if isinstance(transfer.error, _Failure):
            raise transfer.error
        if transfer.error is not None:  # it may be one of this machine (disk full, no bash)
            raise _Failure(*describe_error(transfer.error)) from transfer.error
        size = part.stat().st_size
        if expected_bytes is not None and size != expected_bytes:
            raise _Failure(f"{size} bytes arrived, expected {expected_bytes}")
        if expected_crc32 is not None and checksum_of(part).crc32 != expected_crc32:
            raise _Failure("what arrived differs from the checksum in the manifest")
        part.replace(target)
    finally:
        transfer.close()


def _watch(transfer: _Transfer, part: Path, expected_bytes: int | None, timeout: float) -> None:
    """Wait for the transfer to end; raise _Failure if it writes nothing for `timeout` seconds."""
    seen, since = _state(part), time.monotonic()
    while transfer.is_alive():
        transfer.join(min(timeout / 10, 0.5))
        now = _state(part)
        if now != seen:
            seen, since = now, time.monotonic()
        streaming = now[1] and now[0] != expected_bytes
        limit = timeout if streaming else timeout + transfer.overhead
        if now == seen and time.monotonic() - since > limit:
            raise _Failure(f"no byte arrived for {limit:g} s (after {now[0]} bytes)")
        if expected_bytes is not None and now[0] > expected_bytes:
            raise _Failure(f"it is longer than the expected {expected_bytes} bytes")


def _state(part: Path) -> tuple[int, int]:
    """Return size and modification time of the partial file; (0, 0) if it does not exist yet."""
    try:
        status = part.stat()
    except FileNotFoundError:
        return 0, 0
    return status.st_size, status.st_mtime_ns


class _Transfer(threading.Thread):
    """A thread that runs a process which writes the shard to `part`.

    Attributes:
        overhead: extra seconds allowed before the file is opened and after it is complete.
        error: the error of a failed transfer.
    """

    overhead = 0.0

    def __init__(self, url: str, part: Path, timeout: float) -> None:
        super().__init__(name=f"fetch {url}", daemon=True)
        self.error: BaseException | None = None
        self._url, self._part, self._timeout = url, part, timeout
        self._closed = False
        self._process: subprocess.Popen[bytes] | None = None

    def run(self) -> None:
        try:
            with tempfile.TemporaryFile() as messages:
                self._copy(messages)
        except BaseException as error:
            self.error = error
        if self._closed:
            self._part.unlink(missing_ok=True)  # it may have been opened after `close`

    def close(self) -> None:
        """Kill the process group if it still runs, and remove the temporary file."""
        self._closed = True
        if self.is_alive():
            self._kill()
        self._part.unlink(missing_ok=True)

    def _copy(self, messages: IO[bytes]) -> None:
        process = self._process = subprocess.Popen(
            ["bash", "-c", _GUARDED, self._command()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=messages,
            bufsize=0,
            pipesize=_PIPE_BYTES,
            start_new_session=True,
            env={**os.environ, URL: self._url, "PYTHONPATH": f"{_ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
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

    def _command(self) -> str:
        """Return the command that bash runs."""
        raise NotImplementedError

    def _drain(self, output: IO[bytes]) -> None:
        """Read the command's output to the end."""
        raise NotImplementedError

    def _check(self, code: int, messages: IO[bytes]) -> None:
        """Raise _Failure if the command has failed."""
        raise NotImplementedError


class _Download(_Transfer):
    """Transfer with fsspec, in a program that writes the file itself and prints its error as JSON."""

    overhead = 60.0
    _outcome = b""

    def _command(self) -> str:
        program = [sys.executable, "-m", "neuclip_ds.data.download"]
        return shlex.join([*program, str(self._part), str(self._timeout)])

    def _drain(self, output: IO[bytes]) -> None:
        self._outcome = output.read()

    def _check(self, code: int, messages: IO[bytes]) -> None:
        if code == 0:
            return
        try:
            outcome = json.loads(self._outcome.splitlines()[-1])
        except (ValueError, IndexError):
            raise _Failure(f"the download exited with code {code}: {_last_line(messages)}") from None
        raise _Failure(outcome["reason"], outcome["final"])


class _Command(_Transfer):
    """Transfer from a command's standard output."""

    _size = 0

    def _command(self) -> str:
        return self._url.removeprefix(_PIPE)

    def _drain(self, output: IO[bytes]) -> None:
        with self._part.open("xb", buffering=0) as out:
            while piece := output.read(_PIPE_BYTES):
                self._size += out.write(piece)

    def _check(self, code: int, messages: IO[bytes]) -> None:
        if code:
            message = _last_line(messages)
            raise _Failure(f"the command exited with code {code}{message and f': {message}'}", code in _CANNOT_RUN)
        if not self._size:
            raise _Failure("the command wrote nothing")


def _last_line(messages: IO[bytes]) -> str:
    messages.seek(max(0, messages.seek(0, os.SEEK_END) - 1000))
    lines = messages.read().decode("utf-8", "replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
