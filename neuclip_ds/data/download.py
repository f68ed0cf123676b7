"""Download one URL with fsspec, as a separate program that `fetch` starts for every shard.

A blocked read can thus be killed, and the process inherits neither threads nor locks of a parent that has used fsspec:
in forked processes fsspec can block for ever.

    NEUCLIP_DS_URL=URL python -m neuclip_ds.data.download FILE TIMEOUT

The URL may hold a secret, and all users of the machine can read command lines. The exit code is 0, or 1 after one line
of JSON: the reason, and whether it is final (a retry would fail too).
"""

import errno
import json
import os
import sys
from pathlib import Path
from typing import Any

import fsspec

URL = "NEUCLIP_DS_URL"
_RETRYABLE = (408, 425, 429)  # HTTP 4xx codes that are worth a retry


def main() -> None:
    """Download the URL of the environment to the file that the command line names."""
    url, (target, timeout) = os.environ[URL], sys.argv[1:]
    try:
        fs, path = fsspec.core.url_to_fs(url, **_options(url, float(timeout)))
        Path(target).touch(exist_ok=False)  # the timeout starts here: backends take seconds to import
        fs.get_file(path, target)
    except Exception as error:  # backends raise many types: botocore's, aiohttp's, OSError
        reason, final = describe_error(error)
        print(json.dumps({"reason": reason, "final": final}))
        sys.exit(1)


def _options(url: str, timeout: float) -> dict[str, Any]:
    """Return options of the file system that stream the file without a limit on the total time."""
    if url.startswith(("http://", "https://")):
        import aiohttp

        # aiohttp ends every transfer after five minutes by default; `fetch` detects stalls
        return {"client_kwargs": {"timeout": aiohttp.ClientTimeout(sock_connect=2 * timeout, sock_read=2 * timeout)}}
    if url.startswith("s3://"):
        return {"max_concurrency": 1}  # by default it holds ten parts of 50 MB in memory
    return {}


def describe_error(error: BaseException) -> tuple[str, bool]:
    """Return a message for a backend's error, and whether it is final (a retry would fail too)."""
    status = _http_status(error)
    if isinstance(error, FileNotFoundError) or status in (404, 410):
        return "the file does not exist", True
    if isinstance(error, ImportError):
        return f"{error} (pip install s3fs, gcsfs, huggingface_hub or aiohttp)", True
    refused = status is not None and 400 <= status < 500 and status not in _RETRYABLE
    is_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    final = refused or is_full or isinstance(error, PermissionError | ValueError)
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}".rstrip(": "), final


def _http_status(error: BaseException) -> int | None:
    """Return the HTTP status of an error of aiohttp (`status`), gcsfs (`code`), requests or httpx (`response`)."""
    response = getattr(error, "response", None)
    found = (getattr(error, "status", None), getattr(error, "code", None), getattr(response, "status_code", None))
    return next((value for value in found if isinstance(value, int)), None)


if __name__ == "__main__":
    main()
