"""Fetch one shard from a URL that fsspec supports.

A transfer runs in a daemon thread, because a call to the backend may never return. A stalled transfer is
abandoned; it can write only to a separate file, which the caller removes.
"""

import errno
import json
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http import HTTPStatus
from inspect import getattr_static
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

import fsspec

from neuclip_ds.errors import UserError, install_command
from neuclip_ds.files import checksum_of
from neuclip_ds.limits import fix_of_limit

Kind = Literal["outage", "damaged", "refused", "missing", "setup", "limit"]

_LONGEST_PAUSE = 60.0  # maximum seconds between two attempts
_ATTEMPTS = {"damaged": 5, "refused": 5, "limit": 5}  # attempts until an error counts as permanent
FIX_OF_ADDRESS = f"Fix the address, or install its backend ({install_command('remote')})"
_FIXES = {
    "refused": "Check the credentials, the region, the billing project and whether the file exists; then start again",
    "setup": FIX_OF_ADDRESS,
}
_S3_CONNECTIONS = 10  # botocore's default for the connections to a server
_IMPORT = 60.0  # extra seconds allowed for importing fsspec's backend
_REFUSED = {301, 308}  # a bucket in another region; redirects that clients can follow never get here
_WAITED_OUT = {408, 409, 425, 429, 499}  # timeouts, conflicts, too many requests, and requests that a client gave up
_REFUSED_ERRNOS = {errno.EINVAL, errno.EPERM, errno.EACCES, errno.ENOSYS, getattr(errno, "EREMCHG", errno.EINVAL)}
_WAITED_OUT_CODE = re.compile(
    r"timeout|throttl|slow_?down|limit_?exceeded|prior_?request|busy|aborted|timed_?out", re.I
)
_HTTP_ERROR = re.compile("[345][0-9][0-9]")
_PARSER = "aiohttp.http_exceptions"  # aiohttp's errors about malformed answers; their `code` is not the server's status
_LONGEST_CHAIN = 5  # maximum number of errors that are examined if errors wrap each other
# types of errors of botocore, azure and google about credentials and settings, some of which say "not found"
_REFUSED_TYPE = re.compile(
    r"Credential|Token|SSO|Profile|ConfigNotFound|ConfigParse|NoRegion|NoAuth|ClientAuthentication|RefreshError"
)
# texts, for errors without a status
_STATUS = r"(?:error|http(?:/[\d.]+)?|status|code|returned)\W{0,3}(?:code\W{0,2})?\(?"
_MISSING_TEXT = re.compile(
    _STATUS + r"(?:404|410)\b|no ?such ?(?:key|file|object|bucket)|not ?found|does not exist", re.I
)
_REFUSED_TEXT = re.compile(
    _STATUS + r"(?:401|403|407)\b|credential|expired ?token|token (?:has|is) expired|access ?denied|forbidden|"
    r"unauthorized|bad request|requester ?pays|authorization ?header|permission ?mismatch|authentication ?failed|"
    r"invalid[ _]?(?:token|grant|access ?key)|signature ?does ?not ?match|time ?too ?skewed",
    re.I,
)
_URL = re.compile(r"\S+://\S+")

_jitter = random.Random()  # separate from the global generator, on which a run's results may depend


class FetchError(OSError):
    """Raised if a shard does not exist, if it does not match the manifest, or if a limit of this machine was reached.

    `damaged` is true if the shard does not match the manifest.
    """

    def __init__(self, message: str, damaged: bool = False) -> None:
        super().__init__(message)
        self.damaged = damaged


class AttemptFailed(Exception):
    """Raised if an attempt to fetch a shard fails; `kind` classifies the cause, such as an outage or damaged data."""

    def __init__(self, reason: str, kind: Kind = "outage") -> None:
        super().__init__(reason)
        self.kind: Kind = kind


class Retries:
    """Exponential backoff between attempts to fetch a shard.

    The pauses have random lengths of up to 1, 2, 4 ... times `backoff` seconds, and at most 60 s. Retries end when the
    storage has failed for `max_outage` seconds; at the fifth error of one of three kinds (access is refused, the data
    is damaged, or a limit of this machine is reached); or at once if the shard does not exist, the address is invalid,
    or its backend is not installed.
    """

    def __init__(self, url: str, max_outage: float, backoff: float = 1.0) -> None:
        self.url = url
        self.failures = 0
        self._max_outage = max_outage
        self._backoff = backoff
        self._counts: Counter[Kind] = Counter()
        self._outage_began = 0.0  # time of the first failure of the storage

    def pause_after(self, failure: AttemptFailed) -> float:
        """Return how many seconds to wait after a failed attempt.

        Raises:
            FetchError: the shard does not exist or is damaged, or a limit of this machine has been reached.
            UserError: the storage refuses access or has failed for too long, the address is invalid, or its backend is
                not installed.
        """
        kind = failure.kind
        message = f"{self.url} cannot be fetched: {failure}."
        self.failures += 1
        self._counts[kind] += 1
        if kind == "outage":
            now = time.monotonic()
            self._outage_began = self._outage_began or now
            if now - self._outage_began >= self._max_outage:
                message += (
                    f" The storage has failed for {self._max_outage:g} s, the longest time allowed (data.max_outage in "
                    "a run): check the storage (or make room, if the local disk is full), and start again."
                )
                raise UserError(message)
        elif self._counts[kind] == _ATTEMPTS.get(kind, 1):
            if kind in _FIXES:
                raise UserError(f"{message} {_FIXES[kind]}.")
            raise FetchError(message, kind == "damaged")
        longest_pause = min(self._backoff * 2 ** min(self.failures - 1, 30), _LONGEST_PAUSE)
        return longest_pause * _jitter.uniform(0.5, 1)


def attempt(url: str, folder: Path, timeout: float, size: int | None = None, crc32: int | None = None) -> Path:
    """Try once to fetch a shard into a new file in `folder`, and return the path of the file.

    Raises AttemptFailed if the transfer fails, no data arrives for `timeout` seconds (60 s more for importing the
    backend), or the file does not have the expected size or checksum (None: not checked). The caller must then remove
    the file.
    """
    part = folder / uuid4().hex
    errors: list[BaseException] = []
    thread = threading.Thread(target=_transfer, args=(url, part, timeout, errors), daemon=True)
    arrived = -1  # bytes; -1 until the transfer has begun
    last_progress = time.monotonic()
    thread.start()
    while thread.is_alive():
        thread.join(min(timeout / 10, 0.5))
        arrived_before = arrived
        arrived = part.stat().st_size if part.exists() else -1
        if arrived != arrived_before:
            last_progress = time.monotonic()
        if size is not None and arrived > size:
            raise AttemptFailed(f"it is longer than the expected {size} bytes", "damaged")
        limit = timeout if arrived >= 0 else timeout + _IMPORT
        if time.monotonic() - last_progress > limit:
            raise AttemptFailed(f"no byte arrived for {limit:g} s (after {max(arrived, 0)} bytes)")
    if errors:
        raise explain(errors[0]) from errors[0]
    arrived = part.stat().st_size
    if size not in (None, arrived):
        raise AttemptFailed(f"{arrived} bytes arrived, expected {size}", "damaged")
    if crc32 is not None and checksum_of(part).crc32 != crc32:
        raise AttemptFailed("the data does not match the checksum in the manifest", "damaged")
    return part


def _transfer(url: str, part: Path, timeout: float, errors: list[BaseException]) -> None:
    """Download a shard to the file `part`; runs in a thread and appends any error to `errors`."""
    try:
        fs, path = open_remote(url, timeout)
        part.touch(exist_ok=False)  # the timeout starts here: backends can take seconds to import
        fs.get_file(path, str(part))
    except BaseException as error:  # backends raise many types: botocore's, aiohttp's, OSError
        errors.append(error)


def open_remote(url: str, timeout: float, connections: int = 1) -> tuple[Any, str]:
    """Return the file system of a URL, for up to `connections` simultaneous requests, and the path in it.

    HTTP requests fail after twice `timeout` seconds without progress; other backends have their own timeouts.
    """
    # a new instance reads credentials again and does not reuse a broken connection
    options: dict[str, Any] = {"skip_instance_cache": True}
    if url.startswith("s3://"):
        # by default, s3fs keeps ten parts of 50 MB in memory, and requests a file's size before it reads the file
        options["max_concurrency"] = 1
        if connections > _S3_CONNECTIONS:
            configured = fsspec.config.conf.get("s3", {}).get("config_kwargs", {})
            options["config_kwargs"] = {"max_pool_connections": connections, **configured}
    elif url.startswith(("http://", "https://")):
        import aiohttp

        limits = aiohttp.ClientTimeout(sock_connect=2 * timeout, sock_read=2 * timeout)  # default: 5 min in total
        options["client_kwargs"] = {"timeout": limits}
    return fsspec.core.url_to_fs(url, **options)


def explain(failure: BaseException) -> AttemptFailed:
    """Return an `AttemptFailed` that describes and classifies an error from a storage backend."""
    text = f"{type(failure).__name__}: {' '.join(str(failure).split())[:300].rstrip('.')}"
    if fix := fix_of_limit(failure):
        return AttemptFailed(f"{text}; {fix}", "limit")
    kind = _kind(failure)
    if kind == "missing":
        text = f"the file does not exist ({text})"
    return AttemptFailed(text, kind)


def _kind(failure: BaseException) -> Kind:
    """Classify an error by the server's answer, else by its type, and by its text only if neither decides."""
    if isinstance(failure, ImportError):
        return "setup"
    for error in reversed(list(_chain(failure))):  # the server's answer first; backends translate it
        kind = _kind_of_answer(error)
        if kind is not None:
            return kind
    if isinstance(failure, FileNotFoundError):
        return "missing"
    if getattr(failure, "retryable", False):  # an attribute of google's errors
        return "outage"
    types = [base.__name__ for base in type(failure).__mro__]
    if isinstance(failure, PermissionError) or any(_REFUSED_TYPE.search(name) for name in types):
        return "refused"
    if isinstance(failure, OSError) and failure.errno in _REFUSED_ERRNOS:
        return "refused"
    # without URLs, whose digits could be taken for a status
    known = _URL.sub("", " ".join(f"{type(error).__name__}: {error}" for error in _chain(failure)))
    if _REFUSED_TEXT.search(known):
        return "refused"
    if isinstance(failure, ValueError) and not isinstance(failure, json.JSONDecodeError):
        return "setup"
    return "missing" if _MISSING_TEXT.search(known) else "outage"


def _chain(failure: BaseException) -> Iterator[BaseException]:
    """Yield an error and those that it wraps, outermost first: s3fs, for example, wraps the errors of botocore."""
    error: BaseException | None = failure
    for _ in range(_LONGEST_CHAIN):
        if error is None:
            return
        yield error
        error = error.__cause__


def _kind_of_answer(error: BaseException) -> Kind | None:
    """Classify an error by the code and the HTTP status of the server's answer; return None if there is no status.

    Storage libraries keep the code and the status in different attributes: `status` (aiohttp), `status_code` and
    `error_code` (azure), `code` (gcsfs, google, urllib) and `response` (botocore, requests and huggingface_hub).
    """
    if type(error).__module__ == _PARSER:
        return None
    response = getattr_static(error, "response", None)
    # aiohttp's `code` is a deprecated property, which `getattr` would warn of
    values = [getattr_static(error, name, None) for name in ("status", "status_code", "code", "error_code")]
    if isinstance(response, dict):  # botocore's
        values += [response.get("ResponseMetadata", {}).get("HTTPStatusCode"), response.get("Error", {}).get("Code")]
    else:
        values.append(getattr(response, "status_code", None))
    texts = [str(int(value)) if isinstance(value, int) else str(value) for value in values]
    statuses = [int(text) for text in texts if _HTTP_ERROR.fullmatch(text)]
    if not statuses:
        return None
    if any(_WAITED_OUT_CODE.search(text) for text in texts):
        return "outage"
    return _kind_of_status(statuses[0])


def _kind_of_status(status: int) -> Kind:
    """Classify the HTTP status of an error; 5xx, temporary redirects and `_WAITED_OUT` are outages."""
    if status in (HTTPStatus.NOT_FOUND, HTTPStatus.GONE):
        return "missing"
    is_client_error = 400 <= status < 500 and status not in _WAITED_OUT
    return "refused" if is_client_error or status in _REFUSED else "outage"
