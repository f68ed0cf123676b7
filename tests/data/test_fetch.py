"""Fetching from real servers and commands with injected faults."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import fsspec
import pytest
from servers import Proxy, files_server

from neuclip_ds.data.failures import FailureKind
from neuclip_ds.data.fetch import FetchError, Request, fetch
from neuclip_ds.data.shards import resolve_shards
from neuclip_ds.errors import UserError

DATA = os.urandom(300_000)


@pytest.fixture(scope="module")
def http():
    with files_server() as server:
        yield server


@pytest.fixture
def shard(http):
    """Return the URL and name of a separate file of this test on the HTTP server."""
    name = f"{len(http.files)}/00000.tar"
    http.files[name] = DATA
    return http.url(name), name


@pytest.fixture(scope="module")
def s3():
    """Start an S3 server with the bucket `pairs` behind a proxy, and configure fsspec for it."""
    boto3, moto_server = pytest.importorskip("boto3"), pytest.importorskip("moto.server")
    pytest.importorskip("s3fs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "key")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        server.start()
        direct = f"http://127.0.0.1:{server.get_host_and_port()[1]}"
        client = boto3.client("s3", endpoint_url=direct)
        client.create_bucket(Bucket="pairs")
        for number in range(3):
            client.put_object(Bucket="pairs", Key=f"train/{number:05d}.tar", Body=DATA)
        proxy = Proxy(server.get_host_and_port()[1])
        config = {"endpoint_url": f"http://127.0.0.1:{proxy.port}", "config_kwargs": {"read_timeout": 30}}
        patch.setitem(fsspec.config.conf, "s3", config)  # of this process
        patch.setenv("FSSPEC_S3", json.dumps(config))  # of those that download
        yield proxy
        proxy.close()
        server.stop()


def fetch_here(url: str, folder: Path, **options) -> bytes:
    """Return the fetched bytes; check that nothing but the target is left, or nothing at all."""
    target = folder / "shard.tar"
    request = Request(url, **{"bytes": len(DATA), "timeout": 5, "retries": 2, "backoff": 0.01, **options})
    try:
        fetch(request, target)
    except BaseException:
        assert list(folder.iterdir()) == []
        raise
    assert list(folder.iterdir()) == [target]
    return target.read_bytes()


def test_http(shard, http, tmp_path):
    assert fetch_here(shard[0], tmp_path) == DATA
    assert http.gets[shard[1]] == 1


@pytest.mark.parametrize("expected_bytes", [len(DATA), None])
@pytest.mark.parametrize("fault", ["cut", 500, 503, 429])
def test_http_faults_are_tried_again(shard, http, tmp_path, fault, expected_bytes):
    http.faults[shard[1]] = [fault, fault]
    assert fetch_here(shard[0], tmp_path, bytes=expected_bytes) == DATA
    assert http.gets[shard[1]] == 3


@pytest.mark.parametrize(
    ("fault", "message"),
    [("cut", "ClientPayloadError"), (500, "500"), ("short", "100000 bytes arrived, expected 300000")],
)
def test_http_faults_that_stay(shard, http, tmp_path, fault, message):
    http.faults[shard[1]] = [fault] * 9
    with pytest.raises(FetchError, match=rf"^{shard[0]} cannot be fetched: .*{message}.* \(3 attempts\)\.$"):
        fetch_here(shard[0], tmp_path)
    assert http.gets[shard[1]] == 3


def test_a_stalled_transfer_is_given_up_and_tried_again(shard, http, tmp_path):
    http.faults[shard[1]] = ["stall"]
    assert fetch_here(shard[0], tmp_path, timeout=0.4) == DATA
    assert http.gets[shard[1]] == 2


def test_a_server_that_always_stalls(shard, http, tmp_path):
    http.faults[shard[1]] = ["stall"] * 2
    with pytest.raises(FetchError, match=r"no byte arrived for 0.3 s \(after \d+ bytes\) \(2 attempts\)"):
        fetch_here(shard[0], tmp_path, timeout=0.3, retries=1)


LARGE = os.urandom(9_000_001)


@pytest.fixture
def large(http):
    """Return the URL and name of a file that is fetched in ranges."""
    name = f"{len(http.files)}/large.tar"
    http.files[name] = LARGE
    return http.url(name), name


def test_a_large_file_arrives_in_ranges(large, http, tmp_path):
    before = http.ranged
    assert fetch_here(large[0], tmp_path, bytes=len(LARGE)) == LARGE
    assert http.ranged - before >= 3
    assert http.gets[large[1]] == 1


def test_a_server_without_ranges_sends_one_stream(large, http, tmp_path, monkeypatch):
    monkeypatch.setattr(http, "ranges", False)
    assert fetch_here(large[0], tmp_path, bytes=len(LARGE)) == LARGE
    assert http.gets[large[1]] == 1


@pytest.mark.parametrize("fault", ["cut", "short", 503])
def test_a_range_that_fails_is_tried_again(large, http, tmp_path, fault):
    http.faults[large[1]] = [None, None, fault]
    assert fetch_here(large[0], tmp_path, bytes=len(LARGE)) == LARGE
    assert http.gets[large[1]] == 2


def test_a_large_file_of_another_size(large, http, tmp_path):
    for size in (len(LARGE) - 1, len(LARGE) + 1):
        with pytest.raises(FetchError, match=r"bytes .*arrived|416") as caught:
            fetch_here(large[0], tmp_path, bytes=size, retries=0)
        assert caught.value.kind is FailureKind.DAMAGED


def test_a_transfer_below_the_minimum_rate_is_tried_again(shard, http, tmp_path):
    http.faults[shard[1]] = ["drip"]
    assert fetch_here(shard[0], tmp_path, timeout=1.5, min_rate=1000) == DATA
    assert http.gets[shard[1]] == 2


def test_a_slow_transfer_that_goes_on_is_not_given_up(tmp_path):
    command = "for i in 1 2 3 4 5 6; do head -c 1000 /dev/zero; sleep 0.2; done"
    assert len(fetch_here(f"pipe:{command}", tmp_path, bytes=6000, timeout=0.6, retries=0)) == 6000


@pytest.mark.parametrize("status", [404, 410])
def test_what_cannot_change_is_not_tried_again(shard, http, tmp_path, status):
    http.faults[shard[1]] = [status] * 9
    with pytest.raises(FetchError, match=r"\(1 attempt\)\.$"):
        fetch_here(shard[0], tmp_path)
    assert http.gets[shard[1]] == 1


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("nosuch://bucket/x.tar", "Protocol not known: nosuch"),
        ("file:///nowhere/x.tar", "the file does not exist"),
        ("oci://bucket/x.tar", "Install ocifs .*pip install"),
        ("pipe:nosuchcommand", "code 127: .*nosuchcommand: command not found"),
        ("pipe:cat /nowhere/x.tar", "No such file or directory"),
    ],
)
def test_hopeless_urls(tmp_path, url, message):
    with pytest.raises(FetchError, match=rf"{message}.* \(1 attempt\)\.$"):
        fetch_here(url, tmp_path)


def test_a_dead_host_is_tried_again(tmp_path):
    with pytest.raises(FetchError, match=r"127.0.0.1:9.*\(3 attempts\)"):
        fetch_here("http://127.0.0.1:9/x.tar", tmp_path)


def test_pipe(tmp_path):
    source = tmp_path / "source.tar"
    source.write_bytes(DATA)
    (folder := tmp_path / "cache").mkdir()
    assert fetch_here(f"pipe:cat {source}", folder) == DATA
    assert fetch_here(f"pipe:cat {source} | cat", folder, bytes=None) == DATA


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("false", "the command exited with code 1"),
        ("false | cat", "the command exited with code 1"),
        ("echo first >&2; echo no route >&2; echo >&2; exit 3", "exited with code 3: no route"),
        ("true", "the command wrote nothing"),
        ("head -c 20 /dev/zero", "20 bytes arrived, expected 300000"),
        ("cat /dev/zero", "longer than the expected 300000 bytes"),
        ("sleep 1000.25", "no byte arrived for 0.3 s"),
        ("head -c 50 /dev/zero; sleep 1000.25", r"no byte arrived for 0.3 s \(after 50 bytes\)"),
        ("kill -9 $$", "code 137"),
    ],
)
def test_pipe_failures(tmp_path, command, message):
    with pytest.raises(FetchError, match=rf"^pipe:.* cannot be fetched: .*{message}.*\(2 attempts\)\.$"):
        fetch_here(f"pipe:{command}", tmp_path, timeout=0.3, retries=1)
    assert not still_running("sleep 1000.25")


def still_running(command: str) -> list[str]:
    """Return command lines of live processes that contain `command`, after a moment for them to end."""
    for _ in range(100):
        found = []
        for entry in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                line = entry.read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if command in line and f"/{os.getpid()}/" not in str(entry):
                found.append(line)
        if not found:
            break
        time.sleep(0.02)
    return found


def test_commands_end_with_a_process_that_is_killed(tmp_path):
    command = "sleep 4321.5"
    code = f"""if True:
        from pathlib import Path
        from neuclip_ds.data.fetch import Request, fetch
        fetch(Request("pipe:{command} | cat", None, 100), Path({str(tmp_path)!r}) / "x.tar")"""
    process = subprocess.Popen([sys.executable, "-c", code])
    end = time.monotonic() + 20
    while not any(tmp_path.iterdir()):
        assert time.monotonic() < end
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not still_running(command)


def test_s3(s3, tmp_path):
    assert fetch_here("s3://pairs/train/00001.tar", tmp_path) == DATA


@pytest.mark.parametrize("fault", ["cut", "stall"])
def test_s3_faults_are_got_over(s3, tmp_path, fault):
    s3.met.clear()
    s3.faults.append(fault)
    assert fetch_here("s3://pairs/train/00000.tar", tmp_path, timeout=2) == DATA
    assert s3.met == [fault]


@pytest.mark.parametrize("url", ["s3://pairs/train/nosuch.tar", "s3://nosuchbucket/x.tar"])
def test_s3_without_the_file(s3, tmp_path, url):
    with pytest.raises(FetchError, match=r"the file does not exist \(1 attempt\)"):
        fetch_here(url, tmp_path)


def test_resolving_shards_on_real_servers(s3, http):
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


def test_other_processes_can_fetch_after_this_one_has(shard, tmp_path):
    """Processes are spawned: fsspec keeps a thread and locks, which break under fork."""
    assert fetch_here(shard[0], tmp_path) == DATA
    arguments = (Request(shard[0], len(DATA), timeout=5, retries=0), tmp_path / "again.tar")
    process = multiprocessing.get_context("spawn").Process(target=fetch, args=arguments)
    process.start()
    process.join()
    assert process.exitcode == 0
    assert (tmp_path / "again.tar").read_bytes() == DATA
