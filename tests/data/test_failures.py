"""What failures of backends and commands mean: the fault of a shard, of this machine, or of the storage."""

from __future__ import annotations

import errno
from collections.abc import Iterator

import pytest

from neuclip_ds.data.failures import FailureKind, describe_error, kind_of_message

MISSING, SETUP, CREDENTIALS = FailureKind.MISSING, FailureKind.SETUP, FailureKind.CREDENTIALS
THROTTLED, OUTAGE, DISK = FailureKind.THROTTLED, FailureKind.OUTAGE, FailureKind.DISK


class Response(Exception):
    """An error with an HTTP status, as aiohttp's; gcsfs calls it `code`."""

    def __init__(self, **attributes: int) -> None:
        super().__init__("https://bucket/00404.tar")
        self.__dict__.update(attributes)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (FileNotFoundError("x"), MISSING),
        (Response(status=404), MISSING),
        (Response(code=410), MISSING),
        (Response(status=401), CREDENTIALS),
        (Response(code=403), CREDENTIALS),
        (PermissionError("Access Denied"), CREDENTIALS),
        (Response(status=429), THROTTLED),
        (Response(status=503), THROTTLED),
        (Response(status=500), OUTAGE),
        (Response(status=400), OUTAGE),
        (Response(status=416), FailureKind.DAMAGED),
        (ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"), OUTAGE),
        (OSError("Temporary failure in name resolution"), OUTAGE),
        (TimeoutError(), OUTAGE),
        (OSError(errno.ENOSPC, "No space left on device"), DISK),
        (ImportError("Install s3fs to access S3"), SETUP),
        (ValueError("Protocol not known: nosuch"), SETUP),
    ],
    ids=repr,
)
def test_errors(error: Exception, kind: FailureKind) -> None:
    assert describe_error(error).kind is kind


def s3_errors() -> Iterator[tuple[str, int, FailureKind]]:
    """Yield S3's code, status and what it means (https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html)."""
    yield from [("NoSuchKey", 404, MISSING), ("NoSuchBucket", 404, MISSING)]
    yield from [("AccessDenied", 403, CREDENTIALS), ("ExpiredToken", 400, CREDENTIALS)]
    yield from [("InvalidToken", 400, CREDENTIALS), ("SignatureDoesNotMatch", 403, CREDENTIALS)]
    yield from [("RequestTimeTooSkewed", 403, CREDENTIALS), ("InvalidAccessKeyId", 403, CREDENTIALS)]
    yield from [("SlowDown", 503, THROTTLED), ("ServiceUnavailable", 503, THROTTLED)]
    yield from [("InternalError", 500, OUTAGE), ("RequestTimeout", 400, OUTAGE)]


@pytest.mark.parametrize(("code", "status", "kind"), s3_errors())
def test_errors_of_s3(code: str, status: int, kind: FailureKind) -> None:
    """As s3fs translates them, and as botocore raises them."""
    errors = pytest.importorskip("s3fs.errors")
    exceptions = pytest.importorskip("botocore.exceptions")
    response = {"Error": {"Code": code, "Message": "A message."}, "ResponseMetadata": {"HTTPStatusCode": status}}
    raised = exceptions.ClientError(response, "GetObject")
    assert describe_error(raised).kind is kind
    assert describe_error(errors.translate_boto_error(raised)).kind is kind


def test_no_credentials_at_all() -> None:
    exceptions = pytest.importorskip("botocore.exceptions")
    assert describe_error(exceptions.NoCredentialsError()).kind is CREDENTIALS


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ("fatal error: An error occurred (404) when calling the HeadObject operation: Key x does not exist", MISSING),
        ("curl: (22) The requested URL returned error: 404", MISSING),
        ("ERROR 404: Not Found.", MISSING),
        ("cat: /data/x.tar: No such file or directory", MISSING),
        ("An error occurred (403) when calling the HeadObject operation: Forbidden", CREDENTIALS),
        ("curl: (22) The requested URL returned error: 403", CREDENTIALS),
        ("An error occurred (ExpiredToken) when calling the GetObject operation: The token has expired", CREDENTIALS),
        ("Unable to locate credentials. You can configure credentials by running aws configure.", CREDENTIALS),
        ("An error occurred (SlowDown) when calling the GetObject operation: Please reduce your rate", THROTTLED),
        ("HTTP/1.1 503 Service Unavailable", THROTTLED),
        ("curl: (22) The requested URL returned error: 502", OUTAGE),
        ("curl: (6) Could not resolve host: storage", OUTAGE),
        ("Could not connect to the endpoint URL: https://bucket/404.tar", OUTAGE),
        ("", OUTAGE),
    ],
)
def test_messages_of_commands(message: str, kind: FailureKind) -> None:
    assert kind_of_message(message) is kind
