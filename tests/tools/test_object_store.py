"""The S3 server of the benchmarks: what it serves and counts, how slow it is, and when it ends."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from benchmarking.object_store import Counters, Store, object_store
from small_runs import ROOT

DATA = os.urandom(300_000)
KEYS = ("0.tar", "train/0.tar", "train/1.tar")


@pytest.fixture(scope="module")
def buckets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("store")
    for key in KEYS:
        (folder / "pairs" / key).parent.mkdir(parents=True, exist_ok=True)
        (folder / "pairs" / key).write_bytes(DATA)
    (folder.parent / "secret").write_text("outside")
    return folder


@pytest.fixture(scope="module")
def store(buckets: Path) -> Iterator[Store]:
    with object_store(buckets, latency_ms=0, bandwidth_mb=0) as running:
        yield running


def get(store: Store, path: str, **headers: str) -> tuple[int, bytes]:
    with urlopen(Request(f"{store.endpoint}/{path}", headers=headers)) as answer:
        return answer.status, answer.read()


def test_objects_and_ranges_alone_are_served_and_counted(store: Store) -> None:
    before = store.counters()
    assert get(store, "pairs/train/0.tar") == (200, DATA)
    assert get(store, "pairs/train/0.tar", Range="bytes=1000-1999") == (206, DATA[1000:2000])
    assert get(store, "pairs/train/0.tar", Range="bytes=299990-") == (206, DATA[-10:])
    assert store.counters().since(before) == Counters(3, len(DATA) + 1010)
    for path in ("pairs/nosuch.tar", "nosuch/0.tar", "pairs/%2e%2e/%2e%2e/secret", "pairs/train"):
        with pytest.raises(HTTPError, match="404"):
            get(store, path)


def test_latency_and_bandwidth_are_lower_limits_of_the_time(buckets: Path) -> None:
    with object_store(buckets, latency_ms=100, bandwidth_mb=1) as slow:
        began = time.monotonic()
        assert get(slow, "pairs/0.tar") == (200, DATA)
        # a lower limit, which no busy machine can break: 300 kB at 1 MB/s, less the burst of 0.05 s
        assert time.monotonic() - began > 0.1 + 0.3 - 0.05


def test_it_ends_with_the_program_that_started_it(buckets: Path) -> None:
    program = f"""
import os, sys
sys.path.insert(0, {str(ROOT / "tools" / "benchmarking")!r})
from pathlib import Path
from object_store import object_store
with object_store(Path({str(buckets)!r}), 0, 0) as store:
    print(store.endpoint, flush=True)
    os.kill(os.getpid(), 9)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    endpoint = done.stdout.strip()
    assert done.returncode == -9 and endpoint.startswith("http://127.0.0.1:")
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            Store(endpoint).counters()
        except OSError:
            return
        time.sleep(0.02)
    raise AssertionError("it still answers")
