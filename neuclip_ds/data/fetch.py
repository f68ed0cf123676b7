"""Fetch one shard from a URL that fsspec supports, or from the output of a command (`pipe:COMMAND`)."""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import threading
import time
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from pathlib import Path
from typing import Literal, NamedTuple

from neuclip_ds.checksum import checksum_of
from neuclip_ds.data.failures import FailureKind, TransferFailure
from neuclip_ds.data.transfer import Command, Download, is_command

_MAX_BACKOFF = 60.0  # seconds between two attempts
_FINAL = (FailureKind.MISSING, FailureKind.SETUP)  # a retry would fail too
_BLOCK = 512  # bytes that `st_blocks` counts in

Verdict = Literal["retry", "wait", "give up"]

_numbers = itertools.count()


class FetchError(OSError):
    """A shard could not be fetched; the message has its URL, the reason and the number of attempts.

    Attributes:
        kind: of the last failure.
    """

    def __init__(self, message: str, kind: FailureKind) -> None:
        super().__init__(message)
        self.kind = kind


class Request(NamedTuple):
    """A shard to fetch, and what its transfer must satisfy."""

    url: str  # that fsspec supports, or `pipe:COMMAND`, which bash runs (with pipefail)
    bytes: int | None  # required size of the file; None accepts any
    timeout: float  # seconds without a byte after which an attempt fails
    crc32: int | None = None  # required checksum of the file; None accepts any
    retries: int = 4  # attempts after the first one
    backoff: float = 1.0  # seconds before the second attempt, doubled for each further one
    min_rate: float = 0.0  # bytes per second, over `timeout`, below which an attempt fails


class FetchPolicy:
    """When the attempts of a fetch may start, and what follows when one fails; this one knows no other fetches."""

    def turn(self) -> AbstractContextManager[object]:
        """Return a context manager that waits until an attempt may start, and lasts as long as the attempt."""
        return nullcontext()

    def succeed(self, began: float, size: int) -> None:
        """Report an attempt that began at `began` (Unix time) and has fetched `size` bytes, within its turn."""

    def judge(self, failure: TransferFailure, began: float, request: Request, attempt: int) -> Verdict:
        """Return what follows a failed attempt, within its turn: `wait` retries when `turn` allows it."""
        return "retry" if attempt <= request.retries else "give up"

    def hedge_after(self, size: int | None) -> float:
        """Return after how many seconds a second transfer of a shard of `size` bytes may start."""
        return math.inf

    def spare(self) -> AbstractContextManager[object] | None:
        """Return what a second transfer holds while it runs, or None where it may not start now."""
        return None


def fetch(request: Request, target: Path, policy: FetchPolicy | None = None) -> None:
    """Fetch a shard into the file `target`, which appears complete or not at all.

    Args:
        target: a file in an existing folder; partial data go to temporary files in that folder.
        policy: by default every failure is retried `request.retries` times, except those that a retry cannot change:
            the file does not exist, or no backend knows the URL.

    Raises:
        FetchError: an attempt failed, and the policy gives up; neither `target` nor a temporary file is left.
    """
    policy = policy or FetchPolicy()
    attempt = 0
    while True:
        attempt += 1
        with policy.turn():
            began = time.time()
            try:
                _attempt(request, target, policy)
                policy.succeed(began, target.stat().st_size)
                return
            except TransferFailure as failure:
                final = failure.kind in _FINAL
                verdict = "give up" if final else policy.judge(failure, began, request, attempt)
                if verdict == "give up":
                    attempts = "1 attempt" if attempt == 1 else f"{attempt} attempts"
                    message = f"{request.url} cannot be fetched: {failure} ({attempts})."
                    raise FetchError(message, failure.kind) from failure.__cause__
        if verdict == "retry":
            time.sleep(backoff_of(request.url, attempt, request.backoff))


def backoff_of(key: str, attempt: int, first: float) -> float:
    """Return the seconds after an attempt: exponential backoff with jitter, a hash of the key and the attempt."""
    digest = hashlib.blake2b(f"{attempt} {key}".encode(), digest_size=8).digest()
    return min(first * 2 ** min(attempt - 1, 30), _MAX_BACKOFF) * (1 + int.from_bytes(digest, "little") / 2**64) / 2


def _attempt(request: Request, target: Path, policy: FetchPolicy) -> None:
    """Transfer a shard; a second transfer joins one that takes unusually long, and the first to be complete counts."""
    ended, began, hedge_after = threading.Event(), time.monotonic(), policy.hedge_after(request.bytes)
    with ExitStack() as stack:

        def start() -> _Monitored:
            return stack.enter_context(closing(_Monitored(request, target, ended)))

        running = [start()]
        while True:
            ended.wait(min(request.timeout / 10, 0.5))
            ended.clear()
            for transfer in list(running):
                try:
                    if transfer.is_complete():
                        transfer.part.replace(target)
                        return
                except TransferFailure:
                    transfer.close()
                    running.remove(transfer)
                    if not running:
                        raise
            if time.monotonic() - began > hedge_after and (spare := policy.spare()) is not None:
                hedge_after = math.inf
                stack.enter_context(spare)
                running.append(start())


class _Monitored:
    """A transfer under way into a temporary file next to the target, and how it progresses."""

    def __init__(self, request: Request, target: Path, ended: threading.Event) -> None:
        self.part = target.with_name(f".{target.name}.{os.getpid()}.{next(_numbers)}.part")
        self._request = request
        kind = Command if is_command(request.url) else Download
        self._transfer = kind(request.url, self.part, request.timeout, request.bytes, ended.set)
        self._transfer.start()
        self._seen, self._since = self._state(), time.monotonic()
        self._window: tuple[int, float] | None = None  # bytes and time at its beginning

    def close(self) -> None:
        """End the transfer and remove its temporary file."""
        self._transfer.close()

    def is_complete(self) -> bool:
        """Return whether the file is complete and right.

        Raises:
            TransferFailure: the transfer has failed, stalls or is too slow, or something else arrived.
        """
        if self._transfer.is_alive():
            self._check_progress()
            return False
        error = self._transfer.error
        if isinstance(error, TransferFailure):
            raise error
        if isinstance(error, OSError):  # of this machine: a full disk, too many processes
            raise TransferFailure(f"{type(error).__name__}: {error}", FailureKind.DISK) from error
        if error is not None:
            raise error
        size = self.part.stat().st_size
        if self._request.bytes not in (None, size):
            raise TransferFailure(f"{size} bytes arrived, expected {self._request.bytes}", FailureKind.DAMAGED)
        if self._request.crc32 is not None and checksum_of(self.part).crc32 != self._request.crc32:
            raise TransferFailure("what arrived differs from the checksum in the manifest", FailureKind.DAMAGED)
        return True

    def _check_progress(self) -> None:
        expected, timeout = self._request.bytes, self._request.timeout
        now, state = time.monotonic(), self._state()
        arrived, changed, size = state
        if state != self._seen:
            self._seen, self._since = state, now
        streaming = changed and arrived != expected
        limit = timeout if streaming else timeout + self._transfer.overhead
        if now - self._since > limit:
            raise TransferFailure(f"no byte arrived for {limit:g} s (after {arrived} bytes)", FailureKind.OUTAGE)
        if expected is not None and size > expected:
            raise TransferFailure(f"it is longer than the expected {expected} bytes", FailureKind.DAMAGED)
        if streaming:
            self._check_rate(arrived, now)

    def _check_rate(self, arrived: int, now: float) -> None:
        """Compare the bytes of each `timeout` seconds with the minimum."""
        if self._window is None:
            self._window = arrived, now
        elapsed = now - self._window[1]
        if elapsed < self._request.timeout:
            return
        rate = (arrived - self._window[0]) / elapsed
        if rate < self._request.min_rate:
            slow = f"{rate / 1e6:.3g} MB/s arrived for {elapsed:.0f} s, less than {self._request.min_rate / 1e6:g}"
            raise TransferFailure(slow, FailureKind.THROTTLED)
        self._window = arrived, now

    def _state(self) -> tuple[int, int, int]:
        """Return bytes that have arrived, time of the last one and size; zeros if the file does not exist yet.

        A file that arrives in ranges has holes.
        """
        try:
            status = self.part.stat()
        except FileNotFoundError:
            return 0, 0, 0
        return min(status.st_size, status.st_blocks * _BLOCK), status.st_mtime_ns, status.st_size
