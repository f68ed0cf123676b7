"""Fetches one shard from where it is stored: a URL that fsspec knows, or the output of a command (`pipe:COMMAND`)."""

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

from neuclip_ds.data.download import describe

_PIPE = "pipe:"
_PIPE_BYTES = 1 << 20  # what a command may be ahead of the disk, and the most that Linux gives
_LONGEST_PAUSE = 60.0  # seconds between two tries
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

_ROOT = Path(__file__).parents[2]  # where the package is, also for a checkout that is not installed
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
    """Return when the transfer has ended; _Failure if it has written nothing for `timeout` seconds."""
    seen, since = _state(part), time.monotonic()
    while transfer.is_alive():
        transfer.join(min(timeout / 10, 0.5))
        now = _state(part)
        if now != seen:
            seen, since = now, time.monotonic()
        at_work = now[1] and now[0] != expected_bytes
        limit = timeout if at_work else timeout + transfer.overhead
        if now == seen and time.monotonic() - since > limit:
            raise _Failure(f"no byte came for {limit:g} s (after {now[0]} bytes)")
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
    """Has a process write the shard to `part`, in a thread that waits for it.

    Attributes:
        overhead: seconds that it may take until it opens the file, and when that is complete.
        error: what it ended with, if it failed.
    """

    overhead = 0.0

    def __init__(self, url: str, part: Path, timeout: float) -> None:
        super().__init__(name=f"fetch {url}", daemon=True)
        self.error: BaseException | None = None
        self._url, self._part, self._timeout = url, part, timeout
        self._left = False
        self._process: subprocess.Popen[bytes] | None = None

    def run(self) -> None:
        try:
            with tempfile.TemporaryFile() as messages:
                self._copy(messages)
        except BaseException as error:
            self.error = error
        if self._left:
            self._part.unlink(missing_ok=True)  # it may have been opened after `leave`

    def leave(self) -> None:
        """End the process, if it still runs, with all that it has started, and remove the temporary file."""
        self._left = True
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
            env={**os.environ, "PYTHONPATH": f"{_ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
        )
        if self._left:
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
        """For bash."""
        raise NotImplementedError

    def _drain(self, output: IO[bytes]) -> None:
        """Read the command's output to its end."""
        raise NotImplementedError

    def _check(self, code: int, messages: IO[bytes]) -> None:
        """_Failure where the command has failed."""
        raise NotImplementedError


class _Download(_Transfer):
    """By fsspec, in a program that writes the file itself and says what went wrong."""

    overhead = 60.0
    _said = b""

    def _command(self) -> str:
        program = [sys.executable, "-m", "neuclip_ds.data.download"]
        return shlex.join([*program, self._url, str(self._part), str(self._timeout)])

    def _drain(self, output: IO[bytes]) -> None:
        self._said = output.read()

    def _check(self, code: int, messages: IO[bytes]) -> None:
        if code == 0:
            return
        try:
            told = json.loads(self._said.splitlines()[-1])
        except (ValueError, IndexError):
            raise _Failure(f"the download ended with code {code}: {_last_line(messages)}") from None
        raise _Failure(told["reason"], told["final"])


class _Command(_Transfer):
    """By the command's standard output."""

    _size = 0

    def _command(self) -> str:
        return self._url.removeprefix(_PIPE)

    def _drain(self, output: IO[bytes]) -> None:
        with self._part.open("wb", buffering=0) as out:
            while piece := output.read(_PIPE_BYTES):
                self._size += out.write(piece)

    def _check(self, code: int, messages: IO[bytes]) -> None:
        if code:
            said = _last_line(messages)
            raise _Failure(f"the command ended with code {code}{said and f': {said}'}", code in _CANNOT_RUN)
        if not self._size:
            raise _Failure("the command wrote nothing")


def _last_line(messages: IO[bytes]) -> str:
    messages.seek(max(0, messages.seek(0, os.SEEK_END) - 1000))
    lines = messages.read().decode("utf-8", "replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _as_failure(error: BaseException) -> _Failure:
    """What the thread ended with: a failure, or an error of this machine (the disk is full, bash is missing)."""
    if isinstance(error, _Failure):
        return error
    return _Failure(*describe(error))
