"""Check fetches from real servers with injected faults, and how failures are classified."""

import errno
import multiprocessing
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from servers import Files, files_server, wait_for

from neuclip_ds.data.fetch import AttemptFailed, FetchError, Kind, Retries, attempt, explain
from neuclip_ds.data.shards import resolve_shards
from neuclip_ds.errors import UserError

DATA = os.urandom(300_000)


@pytest.fixture(scope="module")
def http() -> Iterator[Files]:
    with files_server() as server:
        yield server


@pytest.fixture
def shard(http: Files) -> tuple[str, str]:
    """Create a file on the HTTP server for one test; return the file's URL and name."""
    name = f"{len(http.files)}/00000.tar"
    http.files[name] = DATA
    return http.url(name), name


@pytest.fixture
def s3(http: Files, monkeypatch: pytest.MonkeyPatch) -> Files:
    """Configure fsspec to use the HTTP server as an S3 server with the bucket `pairs`."""
    pytest.importorskip("s3fs")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setitem(fsspec.config.conf, "s3", {"endpoint_url": http.url("").rstrip("/")})
    http.files |= {f"pairs/train/{number:05d}.tar": DATA for number in range(3)}
    return http


def fetch(url: str, folder: Path, size: int | None = len(DATA), timeout: float = 5) -> bytes:
    return attempt(url, folder, timeout, size).read_bytes()


def failure(url: str, folder: Path, size: int | None = len(DATA), timeout: float = 5) -> tuple[Kind, str]:
    with pytest.raises(AttemptFailed) as caught:
        attempt(url, folder, timeout, size)
    return caught.value.kind, str(caught.value)


@pytest.mark.parametrize(
    ("faults", "kind"),
    [
        (["cut", 500, 503, 408, 425, 429], "outage"),
        (["short"], "damaged"),
        ([404, 410], "missing"),
        ([400, 401, 402, 403, 405, 407, 451], "refused"),
    ],
)
def test_http_faults(shard: tuple[str, str], http: Files, tmp_path: Path, faults: list[int | str], kind: Kind) -> None:
    http.faults[shard[1]] = faults.copy()
    assert [failure(shard[0], tmp_path)[0] for _ in faults] == [kind] * len(faults)
    before = http.gets[shard[1]]
    assert [fetch(shard[0], tmp_path, size) for size in (len(DATA), None)] == [DATA] * 2
    assert http.gets[shard[1]] - before == 2
    assert failure(shard[0], tmp_path, size=len(DATA) - 1)[0] == "damaged", "a longer file"


def test_a_slow_download_that_proceeds_is_not_abandoned(http: Files, tmp_path: Path) -> None:
    http.files["slow.tar"] = bytes(1 << 20)
    http.faults["slow.tar"] = ["slow"]
    assert len(fetch(http.url("slow.tar"), tmp_path, None, timeout=0.5)) == 1 << 20
    assert http.gets["slow.tar"] == 1


def test_a_download_that_stalls_is_abandoned(shard: tuple[str, str], http: Files, tmp_path: Path) -> None:
    http.faults[shard[1]] = ["stall"]
    kind, reason = failure(shard[0], tmp_path, timeout=0.4)
    assert kind == "outage" and "no byte arrived for 0.4 s" in reason
    assert fetch(shard[0], tmp_path) == DATA, "the one that hangs is in nobody's way"


def test_an_abandoned_download_writes_nowhere_and_ends(shard: tuple[str, str], http: Files, tmp_path: Path) -> None:
    """An abandoned download writes nothing, even if its folder is removed and a new folder takes its place."""
    before, folder = threading.active_count(), tmp_path / "folder"
    folder.mkdir()
    http.gate.clear()
    failure(shard[0], folder, timeout=0.3)
    for part in folder.iterdir():
        part.unlink()
    folder.rmdir()
    folder.mkdir()
    http.gate.set()
    wait_for(lambda: threading.active_count() <= before + 1)  # 1 for fsspec's thread
    assert not list(folder.iterdir())


def test_credentials_are_read_anew(s3: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    credentials = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(credentials))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for key in ("OLDKEY", "NEWKEY"):
        credentials.write_text(f"[default]\naws_access_key_id = {key}\naws_secret_access_key = secret\n")
        s3.authorizations.clear()
        assert fetch("s3://pairs/train/00000.tar", tmp_path) == DATA
        assert s3.authorizations
        assert all(f"Credential={key}/" in authorization for authorization in s3.authorizations)


@pytest.mark.parametrize(
    ("url", "kind", "message"),
    [
        ("nosuch://bucket/x.tar", "setup", "Protocol not known: nosuch"),
        ("oci://bucket/x.tar", "setup", "Install ocifs"),
        ("http://[::1/x.tar", "setup", "Invalid IPv6 URL"),
        ("file:///nowhere/x.tar", "missing", "does not exist"),
        ("http://127.0.0.1:9/x.tar", "outage", "127.0.0.1:9"),
    ],
)
def test_failures_of_urls(tmp_path: Path, url: str, kind: Kind, message: str) -> None:
    found, reason = failure(url, tmp_path, timeout=0.3)
    assert found == kind and message in reason


def test_shards_are_fetched_from_s3_and_failures_are_classified(s3: Files, tmp_path: Path) -> None:
    assert fetch("s3://pairs/train/00001.tar", tmp_path) == DATA
    s3.faults["pairs/train/00000.tar"] = ["cut"]
    assert fetch("s3://pairs/train/00000.tar", tmp_path) == DATA, "s3fs tries again by itself"
    s3.faults["pairs/train/00000.tar"] = ["stall"]
    assert failure("s3://pairs/train/00000.tar", tmp_path, timeout=1)[0] == "outage"
    for missing in ("s3://pairs/train/nosuch.tar", "s3://nosuchbucket/x.tar"):
        assert failure(missing, tmp_path)[0] == "missing"
    s3.faults["pairs/train/00000.tar"] = [400, 401]  # as for a wrong region, and for anonymous access
    assert [failure("s3://pairs/train/00000.tar", tmp_path)[0] for _ in range(2)] == ["refused"] * 2


def test_resolving_shards_on_servers(s3: Files, http: Files) -> None:
    urls = [f"s3://pairs/train/{number:05d}.tar" for number in range(3)]
    assert resolve_shards("s3://pairs/train/*.tar") == urls
    assert resolve_shards("s3://pairs/train/{00002,00000}.tar") == [urls[2], urls[0]]
    assert resolve_shards("s3://pairs/train/0000{1,2}*.tar::s3://pairs/train/00000.tar") == [*urls[1:], urls[0]]
    with pytest.raises(UserError, match="Nothing matches s3://pairs/val/"):
        resolve_shards("s3://pairs/val/*.tar")
    http.files |= {"listed/b.tar": b"", "listed/a.tar": b"", "listed/c.txt": b""}
    assert resolve_shards(http.url("listed/*.tar")) == [http.url("listed/a.tar"), http.url("listed/b.tar")]
    with pytest.raises(UserError, match=r"Nothing matches|cannot be listed"):
        resolve_shards(http.url("unlisted/*.tar"))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_other_processes_can_fetch_after_this_one_has(
    shard: tuple[str, str], http: Files, tmp_path: Path, method: str
) -> None:
    """A new process, such as a forked loader process, can fetch even while a download hangs in its parent."""
    assert fetch(shard[0], tmp_path) == DATA
    http.faults[shard[1]] = ["stall"]
    failure(shard[0], tmp_path, timeout=0.3)
    process = multiprocessing.get_context(method).Process(target=fetch, args=(shard[0], tmp_path))
    process.start()
    process.join(60)
    assert process.exitcode == 0


class StatusError(Exception):
    """An error of a backend, with the attributes that carry the server's answer."""

    def __init__(self, message: str = "A message.", **attributes: object) -> None:
        super().__init__(message)
        self.__dict__.update(attributes)


def wrapped(error: Exception, cause: Exception) -> Exception:
    """Return an error as `raise error from cause` makes it."""
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (TimeoutError(), "outage"),
        (OSError(errno.ENOSPC, "No space left on device"), "outage"),
        (OSError(errno.EIO, "Input/output error"), "outage"),
        (OSError(errno.EREMCHG, "The bucket must be addressed using the specified endpoint"), "refused"),
        (OSError("An error occurred (404) when calling the HeadObject operation: Key does not exist"), "missing"),
        (OSError("An error occurred (403) when calling the HeadObject operation: Forbidden"), "refused"),
        (OSError("Forbidden: bucket/x.tar\nno storage.objects.get access"), "refused"),
        (ValueError("Bad Request: bucket/x.tar\nUser project specified in the request is invalid."), "refused"),
        (OSError("Could not connect to the endpoint URL: https://bucket/404.tar"), "outage"),
        (OSError(""), "outage"),
        (
            StatusError("Anonymous caller does not have storage.objects.get access, or it may not exist", code=401),
            "refused",
        ),
        (StatusError("Bucket is a requester pays bucket but no user project provided.", code=400), "refused"),
        (StatusError("The token was not found", code="503"), "outage"),
        (StatusError("does not exist", status_code=403, error_code="AuthorizationPermissionMismatch"), "refused"),
        (StatusError(status_code=403, error_code="AuthenticationFailed"), "refused"),
        (StatusError(status_code=400, error_code="OperationTimedOut"), "outage"),
        (StatusError(status_code=404, error_code="ContainerNotFound"), "missing"),
        (StatusError("Access denied", status=502), "outage"),
        (StatusError(response=StatusError(status_code=410)), "missing"),
        (StatusError(response=StatusError(status_code=429)), "outage"),
        (wrapped(FileNotFoundError("x.tar"), StatusError(status=403)), "refused"),
        (wrapped(OSError("failed"), wrapped(RuntimeError("retried"), StatusError(status=404))), "missing"),
        (StatusError("The metadata server did not answer", retryable=True), "outage"),
        (StatusError("The value of status is no HTTP status", status=7), "outage"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_failures_mean(error: Exception, kind: Kind) -> None:
    assert explain(error).kind == kind


def test_too_few_open_files_are_named_and_not_an_outage() -> None:
    connect = wrapped(OSError("Cannot connect to host [Too many open files]"), OSError(errno.EMFILE, "Too many"))
    for error in (OSError(errno.EMFILE, os.strerror(errno.EMFILE)), connect):
        failure = explain(error)
        assert failure.kind == "limit" and "ulimit -n" in str(failure)


@pytest.mark.parametrize(
    ("kind", "codes"),
    [
        ("missing", {"NoSuchKey": 404, "NoSuchBucket": 404}),
        ("refused", {"AccessDenied": 403, "ExpiredToken": 400, "InvalidToken": 400, "SignatureDoesNotMatch": 403}),
        ("refused", {"RequestTimeTooSkewed": 403, "InvalidAccessKeyId": 403, "InvalidObjectState": 403}),
        ("refused", {"AuthorizationHeaderMalformed": 400, "PermanentRedirect": 301, "301": 301, "400": 400}),
        ("outage", {"SlowDown": 503, "ServiceUnavailable": 503, "InternalError": 500, "RequestTimeout": 400}),
        ("outage", {"TemporaryRedirect": 307, "Throttling": 400, "OperationAborted": 409, "503": 503}),
    ],
)
def test_errors_of_s3(kind: Kind, codes: dict[str, int]) -> None:
    """Classify S3 errors translated by s3fs (https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html)."""
    errors, exceptions = pytest.importorskip("s3fs.errors"), pytest.importorskip("botocore.exceptions")
    for code, status in codes.items():
        response = {"Error": {"Code": code, "Message": "A message."}, "ResponseMetadata": {"HTTPStatusCode": status}}
        raised = exceptions.ClientError(response, "GetObject")
        assert explain(errors.translate_boto_error(raised)).kind == kind, code
    settings = [
        exceptions.NoCredentialsError(),
        exceptions.NoRegionError(),
        exceptions.ProfileNotFound(profile="mine"),
        exceptions.SSOTokenLoadError(profile_name="mine", error_msg="the token does not exist"),
        exceptions.UnauthorizedSSOTokenError(),
    ]
    assert [explain(error).kind for error in settings] == ["refused"] * len(settings)
    assert explain(exceptions.EndpointConnectionError(endpoint_url="https://pairs/403")).kind == "outage"


def test_errors_of_gcs_and_azure() -> None:
    """Classify errors that the real backends raise, if these are installed."""
    gcs = pytest.importorskip("gcsfs.retry")
    azure = pytest.importorskip("azure.core.exceptions")
    kinds: dict[int, Kind] = {
        400: "refused",
        401: "refused",
        403: "refused",
        404: "missing",
        429: "outage",
        500: "outage",
    }
    for status, kind in kinds.items():
        body = f'{{"error": {{"code": {status}, "message": "Anonymous caller has no access to the object"}}}}'
        with pytest.raises(Exception) as caught:
            gcs.validate_response(status, body, "bucket/x.tar")
        assert explain(caught.value).kind == kind
        error = azure.HttpResponseError("This request is not authorized.")
        error.status_code = status
        assert explain(error).kind == kind
    assert explain(azure.ClientAuthenticationError("no token")).kind == "refused"


@pytest.mark.parametrize(
    ("kind", "attempts", "error", "message"),
    [
        ("missing", 1, FetchError, "a reason"),
        ("damaged", 5, FetchError, "a reason"),
        ("refused", 5, UserError, "credentials"),
        ("setup", 1, UserError, "pip install"),
    ],
)
def test_what_does_not_pass_has_few_attempts(kind: Kind, attempts: int, error: type[Exception], message: str) -> None:
    retries = Retries("s3://bucket/x.tar", max_outage=1e9)
    retries.pause_after(AttemptFailed("an outage"))
    for _ in range(attempts - 1):
        retries.pause_after(AttemptFailed("a reason", kind))
    with pytest.raises(error, match=rf"s3://bucket/x.tar .*{message}"):
        retries.pause_after(AttemptFailed("a reason", kind))
