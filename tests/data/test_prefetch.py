"""The prefetching process: it fetches ahead, within the cache's limits, and ends with its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from servers import Files, files_server

from neuclip_ds.data.cache import ShardCache
from neuclip_ds.data.interleave import Interleave
from neuclip_ds.data.manifest import Shard
from neuclip_ds.data.order import GlobalOrder
from neuclip_ds.data.prefetch import Prefetcher, _Window

SIZE, SAMPLES, SHARDS = 1000, 8, 16


@pytest.fixture
def http():
    with files_server() as server:
        server.files = {f"{number:05d}.tar": bytes([number]) * SIZE for number in range(SHARDS)}
        yield server


def stored(http: Files) -> list[Shard]:
    return [Shard(http.url(f"{number:05d}.tar"), 0, 0, SIZE) for number in range(SHARDS)]


def order_of(batch_size: int = 4, streams: int = 1) -> GlobalOrder:
    """By default one stream and blocks of a shard's size, so that a shard is read after the other."""
    sizes = np.full(SHARDS, SAMPLES)
    return GlobalOrder(np.cumsum(sizes) - sizes, sizes, batch_size, 0, Interleave(streams, SAMPLES))


def shards_of(order: GlobalOrder, number: int) -> set[int]:
    return set((order.batch(*divmod(number, order.steps_per_epoch)) // SAMPLES).tolist())


def held(folder: Path) -> set[int]:
    found = set()
    for path in (folder / "shards").glob("*.tar"):
        with suppress(FileNotFoundError):  # the cache makes room meanwhile
            found.add(path.read_bytes()[0])
    return found


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds, or raise AssertionError."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.01)


def settle(http: Files) -> None:
    """Wait until no further shard is requested for two polling intervals."""
    seen = -1
    while seen != (seen := http.gets.total()):
        time.sleep(0.3)


def prefetcher(cache: ShardCache, order: GlobalOrder, shards: list[Shard], **options) -> Prefetcher:
    requests = partial(order.shards_ahead, 0, 0, [slice(0, order.batch_size)])
    arguments = {"begin": 0, "end": 10_000, "ahead": order.steps_per_epoch, **options}
    return Prefetcher(cache, arguments.pop("requests", requests), shards, **arguments)


def test_half_of_the_cache_is_filled_ahead_of_each_step(http, tmp_path):
    """One shard at a time is in use, for two steps; the cache has room for eight."""
    cache, order = ShardCache(tmp_path, 8 * SIZE, timeout=5), order_of()
    needed = [shards_of(order, 2 * turn).pop() for turn in range(SHARDS)]
    with prefetcher(cache, order, stored(http)) as ahead:
        wait_for(lambda: held(tmp_path) == set(needed[:5]))
        settle(http)
        assert http.gets.total() == 5, "that in use and half of eight ahead"
        for turn in range(SHARDS):
            wait_for(lambda turn=turn: set(needed[turn : turn + 5]) <= held(tmp_path))
            assert len(held(tmp_path)) <= 8
            ahead.advance(2 * turn + 2)
        assert max(http.gets.values()) == 1


def test_a_set_that_fits_is_fetched_once(http, tmp_path):
    cache, order = ShardCache(tmp_path, 100 * SIZE), order_of()
    with prefetcher(cache, order, stored(http)) as ahead:
        for number in (0, 7, order.steps_per_epoch, 3 * order.steps_per_epoch + 5):
            ahead.advance(number)
            wait_for(lambda: len(held(tmp_path)) == SHARDS)
        assert set(http.gets.values()) == {1}


def test_a_start_in_the_middle_fetches_what_is_still_needed_until_the_end(http, tmp_path):
    cache, order = ShardCache(tmp_path, 100 * SIZE), order_of()
    expected = set.union(*(shards_of(order, number) for number in range(50, 57)))
    later = partial(order.shards_ahead, 0, 50, [slice(0, 4)])
    with prefetcher(cache, order, stored(http), requests=later, begin=50, end=57):
        wait_for(lambda: held(tmp_path) == expected)
        settle(http)
    assert held(tmp_path) == expected


def test_only_the_nodes_own_shards(http, tmp_path):
    cache, order = ShardCache(tmp_path, 100 * SIZE), order_of(batch_size=4, streams=4)
    expected = {
        index // SAMPLES for step in range(order.steps_per_epoch) for index in order.batch(0, step)[2:].tolist()
    }
    shards = stored(http)
    local = min(expected)
    shards[local] = Shard("/data/local.tar", 0, 0, SIZE)
    rows = partial(order.shards_ahead, 0, 0, [slice(2, 4)])
    with prefetcher(cache, order, shards, requests=rows, end=order.steps_per_epoch):
        wait_for(lambda: held(tmp_path) == expected - {local})
        settle(http)
    assert 0 < len(expected) < SHARDS
    assert held(tmp_path) == expected - {local}


def test_what_fails_is_logged_and_left_to_the_readers(http, tmp_path, capfd):
    cache, order = ShardCache(tmp_path, 100 * SIZE, timeout=5, retries=0), order_of()
    http.faults["00003.tar"] = [404]
    shards = stored(http)
    shards[6] = Shard("pipe:echo no such key >&2; exit 1", 0, 0, SIZE)
    with prefetcher(cache, order, shards):
        wait_for(lambda: held(tmp_path) == set(range(SHARDS)) - {3, 6})
    logged = capfd.readouterr().err
    assert "cannot prefetch a shard" in logged
    assert "the file does not exist" in logged
    assert "no such key" in logged
    with pytest.raises(OSError, match="the file does not exist"):
        cache.path(shards[3].path, SIZE)


def test_a_cache_that_is_too_small_is_named(http, tmp_path, caplog):
    order = order_of(batch_size=16, streams=16)
    cache = ShardCache(tmp_path, 6 * SIZE, retries=0)
    window = _Window(cache, stored(http), order.shards_ahead(0, 0, [slice(0, 16)]))
    for _ in range(3):
        window.move(0, order.steps_per_epoch)
    assert [record.message for record in caplog.records] == [
        "data.cache_gb=6e-06 is too small for the shards that one batch reads (more than 0.00 GB), which are "
        "therefore fetched repeatedly: raise data.cache_gb"
    ]
    wait_for(lambda: len(held(tmp_path)) == 6)
    assert http.gets.total() == 6
    later = order.steps_per_epoch + 1
    needed = shards_of(order, later)
    window.move(later, later + 1)
    wait_for(lambda: len(held(tmp_path) & needed) == 6)


def test_it_ends_with_the_block_even_when_it_is_stuck(http, tmp_path):
    http.gate.clear()
    with prefetcher(ShardCache(tmp_path, 100 * SIZE, timeout=600), order_of(), stored(http)) as ahead:
        wait_for(lambda: http.gets.total() >= 4)
        process = ahead._process
        os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.05)
        assert process.is_alive(), "launchers send it to the whole tree"
    assert process.exitcode == -signal.SIGKILL


def test_its_end_is_logged_once_and_training_continues(http, tmp_path, caplog):
    with prefetcher(ShardCache(tmp_path, 100 * SIZE), order_of(), stored(http)) as ahead:
        os.kill(ahead._process.pid, signal.SIGKILL)
        wait_for(lambda: not ahead._process.is_alive())
        for number in range(3):
            ahead.advance(number)
    assert [record.message for record in caplog.records] == [
        "the prefetching process has ended (code -9): shards are now fetched only when they are read"
    ]


def test_it_ends_when_its_parent_is_killed(tmp_path):
    """The commands that it runs end too."""
    code = f"""if True:
        import time
        from pathlib import Path
        from neuclip_ds.data.cache import ShardCache
        from neuclip_ds.data.order import GlobalOrder
        from functools import partial
        from neuclip_ds.data.manifest import Shard
        from neuclip_ds.data.prefetch import Prefetcher
        cache = ShardCache(Path({str(tmp_path)!r}), 100)
        shards = [Shard("pipe:echo $$ $PPID > {tmp_path}/pids; exec sleep 1000", 0, 0, 10)]
        order = GlobalOrder([0], [8], 4)
        requests = partial(order.shards_ahead, 0, 0, [slice(0, 4)])
        with Prefetcher(cache, requests, shards, begin=0, end=9, ahead=2) as prefetcher:
            print(prefetcher._process.pid, flush=True)
            time.sleep(1000)"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    pid = int(parent.stdout.readline())
    pids = tmp_path / "pids"
    wait_for(lambda: pids.exists() and len(pids.read_text().split()) == 2)
    parent.kill()
    parent.communicate()
    for number in (pid, *map(int, pids.read_text().split())):
        wait_for(lambda number=number: not is_running(number))


def is_running(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
