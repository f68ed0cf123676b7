"""Why a transfer failed: the fault of one shard, of this machine, or of the storage as a whole."""

import errno
import json
import re
from collections.abc import Iterator
from enum import Enum

_MISSING = (404, 410)
_REFUSED = (401, 403, 407)
_THROTTLED = (429, 503)
_RANGE = 416  # the file is shorter than a range of it
_LOCAL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
_NO_FILE = re.compile(r"no ?such ?(key|file|object|bucket)|not ?found|does not exist", re.I)
_NO_ACCESS = re.compile(
    r"credential|expired|access ?denied|forbidden|unauthorized|invalid[ _]?(token|grant|access ?key)|"
    r"signature ?does ?not ?match|time ?too ?skewed",
    re.I,
)
_TOO_MANY = re.compile(r"slow ?down|throttl|too many requests|reduce your request rate|rate ?limit|rate exceeded", re.I)
_STATUS = re.compile(r"(?:error|http(?:/[\d.]+)?|status|code|returned)\W{0,3}(?:code\W{0,2})?\(?([1-5]\d\d)\b", re.I)


class FailureKind(str, Enum):
    """What a failure is the fault of."""

    MISSING = "missing"  # the shard does not exist
    DAMAGED = "damaged"  # other bytes arrived than the manifest describes
    SETUP = "setup"  # this machine lacks a package or a program, or no backend knows the URL
    CREDENTIALS = "credentials"  # the storage refuses access
    THROTTLED = "throttled"  # the storage wants fewer requests, or is slow
    OUTAGE = "outage"  # the storage does not answer, breaks off or fails
    DISK = "disk"  # the shard cannot be written here


class TransferFailure(Exception):
    """A transfer failed; the message is the reason."""

    def __init__(self, reason: str, kind: FailureKind) -> None:
        super().__init__(reason)
        self.kind = kind


def describe_error(error: BaseException) -> TransferFailure:
    """Return the failure that a backend's error means."""
    kind = _kind_of_error(error)
    if kind is FailureKind.MISSING:
        return TransferFailure("the file does not exist", kind)
    if isinstance(error, ImportError):
        return TransferFailure(f"{error} (pip install s3fs, gcsfs, huggingface_hub or aiohttp)", kind)
    text = " ".join(str(error).split())[:300]
    return TransferFailure(f"{type(error).__name__}: {text}".rstrip(": "), kind)


def kind_of_message(message: str) -> FailureKind:
    """Return what the last line that a failed command has printed tells; an outage where it tells nothing."""
    status = _STATUS.search(message)
    known = _kind_of_status(int(status[1])) if status else None
    if known is not None:
        return known
    if not _NO_ACCESS.search(message) and _NO_FILE.search(message):
        return FailureKind.MISSING
    return _kind_of_text(message)


def _kind_of_error(error: BaseException) -> FailureKind:
    if isinstance(error, TransferFailure):
        return error.kind
    if isinstance(error, FileNotFoundError):
        return FailureKind.MISSING
    if isinstance(error, ImportError) or (
        isinstance(error, ValueError) and not isinstance(error, json.JSONDecodeError)
    ):
        return FailureKind.SETUP
    if isinstance(error, OSError) and error.errno in _LOCAL:
        return FailureKind.DISK
    chain = [error, *filter(None, [error.__cause__])]  # s3fs translates the errors of botocore
    statuses = (status for link in chain for status in _statuses(link))
    known = next(filter(None, map(_kind_of_status, statuses)), None)
    if known is not None:
        return known
    if isinstance(error, PermissionError):
        return FailureKind.CREDENTIALS
    return _kind_of_text(" ".join(f"{type(link).__name__} {link}" for link in chain))


def _kind_of_status(status: int) -> FailureKind | None:
    if status in _MISSING:
        return FailureKind.MISSING
    if status in _REFUSED:
        return FailureKind.CREDENTIALS
    if status in _THROTTLED:
        return FailureKind.THROTTLED
    return FailureKind.DAMAGED if status == _RANGE else None


def _kind_of_text(text: str) -> FailureKind:
    if _TOO_MANY.search(text):
        return FailureKind.THROTTLED
    return FailureKind.CREDENTIALS if _NO_ACCESS.search(text) else FailureKind.OUTAGE


def _statuses(error: BaseException) -> Iterator[int]:
    """Yield the HTTP status of an error of aiohttp (`status`), gcsfs (`code`), requests, httpx or botocore."""
    response = getattr(error, "response", None)
    found = [getattr(error, "status", None), getattr(error, "code", None), getattr(response, "status_code", None)]
    if isinstance(response, dict):
        found.append(response.get("ResponseMetadata", {}).get("HTTPStatusCode"))
    yield from (status for status in found if isinstance(status, int))
