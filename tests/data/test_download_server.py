"""Downloads of one process share a server, and end one by one or with it."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from servers import Files, files_server

from neuclip_ds.data import download_server
from neuclip_ds.data.download_server import DownloadProcess
from neuclip_ds.data.failures import TransferFailure
from neuclip_ds.data.fetch import Request, fetch
from neuclip_ds.distributed.stop_signals import STOP_SIGNALS

DATA = os.urandom(100_000)


@pytest.fixture
def http(monkeypatch: pytest.MonkeyPatch) -> Iterator[Files]:
    """Start a server of files; downloads have a separate download server in each test."""
    monkeypatch.setattr(download_server, "_server", download_server._Server())
    with files_server() as server:
        server.files = {f"{number}.tar": DATA for number in range(4)}
        yield server


def get(url: str, target: Path, **options: float) -> bytes:
    fetch(Request(url, len(DATA), **{"timeout": 30, "retries": 0, "backoff": 0.01, **options}), target)
    return target.read_bytes()


def wait_for(condition: Callable[[], object]) -> None:
    limit = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.01)


def server_process() -> psutil.Process:
    assert download_server._server._process is not None
    return psutil.Process(download_server._server._process.pid)


def running(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [process for process in processes if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


def test_downloads_of_several_threads_run_at_the_same_time(http: Files, tmp_path: Path) -> None:
    http.gate.clear()
    with ThreadPoolExecutor(4) as pool:
        found = [pool.submit(get, http.url(name), tmp_path / name) for name in http.files]
        wait_for(lambda: http.active == 4)
        assert len(running(server_process().children())) == 4
        http.gate.set()
    assert [future.result() for future in found] == [DATA] * 4
    wait_for(lambda: not server_process().children())  # not even zombies


def test_a_stalled_download_is_killed_and_others_continue(http: Files, tmp_path: Path) -> None:
    """By itself it would end after 40 s."""
    http.gate.clear()
    http.faults["0.tar"] = ["stall"]
    stalled = DownloadProcess(http.url("0.tar"))
    with ThreadPoolExecutor(2) as pool, closing(stalled):
        other = pool.submit(get, http.url("1.tar"), tmp_path / "1.tar")
        failed = pool.submit(stalled.download, tmp_path / "0.tar", 20, None)
        wait_for(lambda: http.active == 2)
        stalled.kill()
        with pytest.raises(TransferFailure, match="was killed"):
            failed.result(30)
        wait_for(lambda: len(server_process().children()) == 1)
        http.gate.set()
        assert other.result() == DATA
    assert http.gets == {"0.tar": 1, "1.tar": 1}


def test_nothing_is_left_of_a_process_that_is_killed(http: Files, tmp_path: Path) -> None:
    http.faults["0.tar"] = ["stall"]
    code = f"""if True:
        from pathlib import Path
        from neuclip_ds.data.fetch import Request, fetch
        fetch(Request({http.url("0.tar")!r}, None, 100), Path({str(tmp_path)!r}) / "0.tar")"""
    process = subprocess.Popen([sys.executable, "-c", code])
    wait_for(lambda: http.gets["0.tar"])
    helpers = psutil.Process(process.pid).children(recursive=True)
    assert len(helpers) == 2
    process.kill()
    process.wait()
    wait_for(lambda: not running(helpers))


def test_a_server_that_is_killed_is_replaced(http: Files, tmp_path: Path) -> None:
    http.gate.clear()
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(get, http.url("0.tar"), tmp_path / "0.tar", retries=1)
        wait_for(lambda: http.gets["0.tar"])
        server = server_process()
        (download,) = server.children()
        server.kill()
        wait_for(lambda: not running([download]))
        http.gate.set()
        assert found.result() == DATA
    assert http.gets["0.tar"] == 2
    assert server_process() != server


def test_a_download_that_is_killed_is_tried_again(http: Files, tmp_path: Path) -> None:
    http.gate.clear()
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(get, http.url("0.tar"), tmp_path / "0.tar", retries=1)
        wait_for(lambda: http.gets["0.tar"])
        server_process().children()[0].kill()
        wait_for(lambda: http.gets["0.tar"] == 2)
        http.gate.set()
        assert found.result() == DATA


def test_signals_that_stop_a_run_do_not_end_downloads(http: Files, tmp_path: Path) -> None:
    """Launchers send them to every process of the tree."""
    http.gate.clear()
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(get, http.url("0.tar"), tmp_path / "0.tar")
        wait_for(lambda: http.gets["0.tar"])
        for helper in (*server_process().children(), server_process()):
            for number in STOP_SIGNALS:
                helper.send_signal(number)
        http.gate.set()
        assert found.result() == DATA


def test_no_command_line_holds_a_url(http: Files, tmp_path: Path) -> None:
    http.gate.clear()
    http.files = {"0.tar?sig=planted-signature": DATA}
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(get, http.url("0.tar?sig=planted-signature"), tmp_path / "0.tar")
        wait_for(lambda: http.active)
        helpers = [server_process(), *server_process().children()]
        lines = [" ".join(helper.cmdline()) for helper in helpers]
        http.gate.set()
        assert found.result() == DATA
    assert len(lines) == 2
    assert all("download_server" in line and "planted" not in line for line in lines)


def test_every_download_reads_credentials_anew(http: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server is started before the environment names the file, and then the file is replaced."""
    pytest.importorskip("s3fs")
    assert get(http.url("0.tar"), tmp_path / "first.tar") == DATA
    server, credentials = server_process(), tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(credentials))
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("FSSPEC_S3_ENDPOINT_URL", http.url("").rstrip("/"))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    http.files["pairs/0.tar"] = DATA
    for key in ("OLDKEY", "NEWKEY"):
        credentials.write_text(f"[default]\naws_access_key_id = {key}\naws_secret_access_key = secret\n")
        http.authorizations.clear()
        assert get("s3://pairs/0.tar", tmp_path / f"{key}.tar") == DATA
        assert http.authorizations
        assert all(f"Credential={key}/" in authorization for authorization in http.authorizations)
    assert server_process() == server


def test_a_forked_process_has_a_separate_server(http: Files, tmp_path: Path) -> None:
    assert get(http.url("0.tar"), tmp_path / "0.tar") == DATA
    server = server_process()
    arguments = (http.url("1.tar"), tmp_path / "1.tar")
    process = multiprocessing.get_context("fork").Process(target=get, args=arguments)
    with download_server._server._lock:  # which a thread may hold in the moment of the fork
        process.start()
    process.join(30)
    assert process.exitcode == 0
    assert (tmp_path / "1.tar").read_bytes() == DATA
    assert server.is_running()


@pytest.mark.parametrize("backend", download_server._IMPORTED)
def test_imported_backends_start_no_thread(backend: str) -> None:
    pytest.importorskip("s3fs")
    code = f"import fsspec, os; fsspec.get_filesystem_class({backend!r}); print(len(os.listdir('/proc/self/task')))"
    assert subprocess.check_output([sys.executable, "-c", code]) == b"1\n"
