"""Downloads one URL by fsspec; a program of its own, which `fetch` starts for every shard.

A read that blocks can so be ended, and neither the threads nor the locks of a parent that has used fsspec before are
inherited: in forked processes it was seen to block for ever.

    python -m neuclip_ds.data.download URL FILE TIMEOUT

It ends with code 0, or with 1 and one line of JSON: what happened, and whether another try is hopeless.
"""

from __future__ import annotations

import errno
import json
import sys
from pathlib import Path
from typing import Any

import fsspec

_MAY_PASS = (408, 425, 429)  # HTTP's 4xx that are worth another try


def main() -> None:
    url, target, timeout = sys.argv[1:]
    try:
        fs, path = fsspec.core.url_to_fs(url, **_options(url, float(timeout)))
        Path(target).touch()  # from here on bytes are expected: backends take seconds to be imported
        fs.get_file(path, target)
    except Exception as error:  # backends raise what they like: botocore's, aiohttp's, OSError
        reason, final = describe(error)
        print(json.dumps({"reason": reason, "final": final}))
        sys.exit(1)


def _options(url: str, timeout: float) -> dict[str, Any]:
    """What the file system must be told so that a transfer goes on piece by piece and takes what time it needs."""
    if url.startswith(("http://", "https://")):
        import aiohttp

        # aiohttp would end every transfer after five minutes; `fetch` looks after stalls
        return {"client_kwargs": {"timeout": aiohttp.ClientTimeout(sock_connect=2 * timeout, sock_read=2 * timeout)}}
    if url.startswith("s3://"):
        return {"max_concurrency": 1}  # or it holds ten parts of 50 MB in memory before it writes them
    return {}


def describe(error: BaseException) -> tuple[str, bool]:
    """What a backend raised, in words, and whether it would do so again."""
    status = _http_status(error)
    if isinstance(error, FileNotFoundError) or status in (404, 410):
        return "there is no such file", True
    if isinstance(error, ImportError):
        return f"{error} (pip install s3fs, gcsfs, huggingface_hub or aiohttp)", True
    refused = status is not None and 400 <= status < 500 and status not in _MAY_PASS
    final = refused or isinstance(error, PermissionError | ValueError) or _is_full(error)
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}".rstrip(": "), final


def _http_status(error: BaseException) -> int | None:
    """The status in aiohttp's errors (`status`), gcsfs's (`code`), requests' and httpx's (`response.status_code`)."""
    response = getattr(error, "response", None)
    found = (getattr(error, "status", None), getattr(error, "code", None), getattr(response, "status_code", None))
    return next((value for value in found if isinstance(value, int)), None)


def _is_full(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


if __name__ == "__main__":
    main()
