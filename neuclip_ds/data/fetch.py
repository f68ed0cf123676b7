"""Fetches one shard from where it is stored: a URL that fsspec knows, or the output of a command (`pipe:COMMAND`)."""

from __future__ import annotations

import errno
import hashlib
import itertools
import os
import signal
import subprocess
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import fsspec

_PIPE = "pipe:"
_PIPE_BYTES = 1 << 20  # what a command may be ahead of the disk, and the most that Linux gives
_LONGEST_PAUSE = 60.0  # seconds between two tries
_MAY_PASS = (408, 425, 429)  # HTTP's 4xx that are worth another try
_CANNOT_RUN = (126, 127)  # bash: not executable, not found
# Beside the command runs a guard, which reads from a pipe that this process holds. It ends when this process does,
# however it does (kill -9 too), and the guard then kills its group, the command included.
_GUARDED = """
exec 3<&0
bash -o pipefail -c "$0" 3<&- </dev/null & command=$!
{ read -r <&3; kill -KILL 0; } >/dev/null 2>&1 & guard=$!
wait $command; code=$?
exec 2>/dev/null; kill -KILL $guard; wait $guard
exit $code
"""

_numbers = itertools.count()


class FetchError(OSError):
    """A shard could not be fetched; the message is a sentence with its URL, what happened, and the number of tries."""


class _Failure(Exception):
    """A try that failed; `final` where another one would fail alike."""

    def __init__(self, reason: str, final: bool = False) -> None:
        super().__init__(reason)
        self.final = final


def fetch(
    url: str, target: Path, *, expected_bytes: int | None, timeout: float, retries: int = 4, backoff: float = 1.0
) -> None:
    """Write what is at `url` to `target`, which appears complete or not at all.

    Not for processes that were forked after their parent had used fsspec: now and then fsspec blocks in them, in each
    try until the timeout. Spawned ones are well, and so are `pipe:` commands everywhere.

    Args:
        url: a URL that fsspec knows, or `pipe:COMMAND`, which bash runs (with pipefail).
        target: a file in an existing folder; a temporary one beside it holds what has come so far.
        expected_bytes: the file's size, another one being a failure; None takes any.
        timeout: seconds without a byte after which a try is given up.
        retries: further tries after the first one. None is made where the file does not exist, access is denied, or
            fsspec lacks the protocol.
        backoff: seconds before the second try, doubled for each further one.

    Raises:
        FetchError: it failed; neither `target` nor a temporary file has been left.
    """
    for attempt in range(retries + 1):
        if attempt:
            time.sleep(_pause(url, attempt, backoff))
        try:
            return _try(url, target, expected_bytes, timeout)
        except _Failure as failure:
            if failure.final or attempt == retries:
                tries = "1 try" if attempt == 0 else f"{attempt + 1} tries"
                raise FetchError(f"{url} cannot be fetched: {failure} ({tries}).") from failure.__cause__
    raise ValueError(f"retries={retries}")


def _pause(url: str, attempt: int, backoff: float) -> float:
    """Seconds before a try: a half to the whole of the doubled back-off, by a hash that spreads the shards' tries."""
    digest = hashlib.blake2b(f"{attempt} {url}".encode(), digest_size=8).digest()
    return min(backoff * 2 ** (attempt - 1), _LONGEST_PAUSE) * (1 + int.from_bytes(digest, "little") / 2**64) / 2


def _try(url: str, target: Path, expected_bytes: int | None, timeout: float) -> None:
    part = target.with_name(f".{target.name}.{os.getpid()}.{next(_numbers)}.part")
    transfer = (_Command if url.startswith(_PIPE) else _Download)(url, part, timeout)
    try:
        transfer.start()
        _watch(transfer, part, expected_bytes, timeout)
        if transfer.error is not None:
            raise _as_failure(transfer.error) from transfer.error
        _check_size(part, expected_bytes)
        part.replace(target)
    finally:
        transfer.leave()


def _watch(transfer: _Transfer, part: Path, expected_bytes: int | None, timeout: float) -> None:
    """Return when the transfer has ended; _Failure if nothing has been written for `timeout` seconds."""
    seen, since = _state(part), time.monotonic()
    while transfer.is_alive():
        transfer.join(min(timeout / 10, 0.5))
        now = _state(part)
        if now != seen:
            seen, since = now, time.monotonic()
        elif time.monotonic() - since > timeout and transfer.is_alive():
            raise _Failure(f"no byte came for {timeout:g} s (after {now[0]} bytes)")
        if expected_bytes is not None and now[0] > expected_bytes:
            raise _Failure(f"it is longer than the {expected_bytes} bytes that it should have")


def _state(part: Path) -> tuple[int, int]:
    """Size and time of the last write; (0, 0) where there is no file yet."""
    try:
        status = part.stat()
    except FileNotFoundError:
        return 0, 0
    return status.st_size, status.st_mtime_ns


def _check_size(part: Path, expected_bytes: int | None) -> None:
    size = part.stat().st_size
    if expected_bytes is not None and size != expected_bytes:
        raise _Failure(f"{size} bytes came where {expected_bytes} were expected")


class _Transfer(threading.Thread):
    """Writes the shard to `part` in a thread of its own: a read that blocks for ever cannot be ended, only left.

    Attributes:
        error: what it ended with, if it failed.
    """

    def __init__(self, url: str, part: Path, timeout: float) -> None:
        super().__init__(name=f"fetch {url}", daemon=True)
        self.error: BaseException | None = None
        self._url, self._part, self._timeout = url, part, timeout
        self._left = False

    def run(self) -> None:
        try:
            self._copy()
        except BaseException as error:  # backends raise what they like: botocore's, aiohttp's, OSError
            self.error = error
        if self._left:
            self._part.unlink(missing_ok=True)  # it may have been opened after `leave`

    def leave(self) -> None:
        """Remove the temporary file; a transfer that still goes on ends by itself, or is left blocked."""
        self._left = True
        self._part.unlink(missing_ok=True)

    def _copy(self) -> None:
        raise NotImplementedError


class _Download(_Transfer):
    """By fsspec."""

    def _copy(self) -> None:
        fs, path = fsspec.core.url_to_fs(self._url, **_options(self._url, self._timeout))
        fs.get_file(path, str(self._part))


def _options(url: str, timeout: float) -> dict[str, Any]:
    """What the file system must be told so that a transfer goes on piece by piece and takes what time it needs."""
    if url.startswith(("http://", "https://")):
        import aiohttp

        # aiohttp would end every transfer after five minutes. What it has instead ends those that `_watch` has left.
        return {"client_kwargs": {"timeout": aiohttp.ClientTimeout(sock_connect=2 * timeout, sock_read=2 * timeout)}}
    if url.startswith("s3://"):
        return {"max_concurrency": 1}  # or it holds ten parts of 50 MB in memory before it writes them
    return {}


class _Command(_Transfer):
    """By a command's standard output."""

    _process: subprocess.Popen[bytes] | None = None

    def _copy(self) -> None:
        command = ["bash", "-c", _GUARDED, self._url.removeprefix(_PIPE)]
        with tempfile.TemporaryFile() as messages:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=messages,
                bufsize=0,
                pipesize=_PIPE_BYTES,
                start_new_session=True,
            )
            if self._left:
                self._kill()
            with self._process as process:
                try:
                    size = self._drain(process)
                    code = process.wait()
                finally:
                    self._kill()
            if code:
                said = _last_line(messages)
                raise _Failure(f"the command ended with code {code}{said and f': {said}'}", code in _CANNOT_RUN)
            if not size:
                raise _Failure("the command wrote nothing")

    def _drain(self, process: subprocess.Popen[bytes]) -> int:
        size = 0
        assert process.stdout is not None
        with self._part.open("wb", buffering=0) as out:
            while piece := process.stdout.read(_PIPE_BYTES):
                size += out.write(piece)
        return size

    def _kill(self) -> None:
        """End the command with all that it has started."""
        if self._process is not None and self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def leave(self) -> None:
        super().leave()
        if self.is_alive():
            self._kill()


def _last_line(messages: IO[bytes]) -> str:
    messages.seek(max(0, messages.seek(0, os.SEEK_END) - 1000))
    lines = messages.read().decode("utf-8", "replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _as_failure(error: BaseException) -> _Failure:
    """What a backend raised, in words."""
    if isinstance(error, _Failure):
        return error
    status = _http_status(error)
    if isinstance(error, FileNotFoundError) or status in (404, 410):
        return _Failure("there is no such file", final=True)
    if isinstance(error, ImportError):
        return _Failure(f"{error} (pip install s3fs, gcsfs, huggingface_hub or aiohttp)", final=True)
    refused = status is not None and 400 <= status < 500 and status not in _MAY_PASS
    final = refused or isinstance(error, PermissionError | ValueError) or _is_full(error)
    return _Failure(f"{type(error).__name__}: {_one_line(error)}".rstrip(": "), final)


def _http_status(error: BaseException) -> int | None:
    """The status in aiohttp's errors (`status`), gcsfs's (`code`), requests' and httpx's (`response.status_code`)."""
    response = getattr(error, "response", None)
    found = (getattr(error, "status", None), getattr(error, "code", None), getattr(response, "status_code", None))
    return next((value for value in found if isinstance(value, int)), None)


def _is_full(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
