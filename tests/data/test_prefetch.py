"""Check that the prefetcher fetches shards in order of use, within the cache's limits, and ends with its block."""

import logging
import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from servers import Files, files_server, wait_for

from neuclip_ds.data.cache import ShardCache
from neuclip_ds.data.fetch import FetchError
from neuclip_ds.data.interleave import Interleave
from neuclip_ds.data.manifest import Shard
from neuclip_ds.data.order import GlobalOrder
from neuclip_ds.data.prefetch import Prefetcher, RequestWindow, ShardRequest, shards_ahead

SIZE, SAMPLES, SHARDS = 1000, 8, 16


@pytest.fixture
def http() -> Iterator[Files]:
    with files_server() as server:
        server.files = {f"{number:05d}.tar": bytes([number]) * SIZE for number in range(SHARDS)}
        yield server


@pytest.fixture
def log_file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """File with the package's log messages, also those of the prefetching process, which pytest cannot see."""
    path = tmp_path_factory.mktemp("log") / "log.txt"
    logger = logging.getLogger("neuclip_ds")
    level_before = logger.level
    logger.setLevel(logging.INFO)  # an earlier test in this process may have silenced the package
    handler = logging.FileHandler(path)
    logger.addHandler(handler)
    yield path
    logger.removeHandler(handler)
    logger.setLevel(level_before)
    handler.close()


def stored(http: Files) -> list[Shard]:
    return [Shard(path=http.url(f"{number:05d}.tar"), start=0, n=0, bytes=SIZE) for number in range(SHARDS)]


def order_of(batch_size: int = 4, streams: int = 1, shards: int = 1) -> GlobalOrder:
    """Return an order; by default, it has one stream and one shard per block, so it reads one shard after another."""
    sizes = np.full(SHARDS, SAMPLES)
    return GlobalOrder(np.cumsum(sizes) - sizes, sizes, batch_size, 0, Interleave(streams, shards * SAMPLES))


def shards_of(order: GlobalOrder, number: int) -> set[int]:
    return set((order.batch(*divmod(number, order.steps_per_epoch)) // SAMPLES).tolist())


def held(folder: Path) -> set[int]:
    found = set()
    for path in (folder / "shards").glob("*.tar"):
        with suppress(FileNotFoundError):  # the cache may have evicted the shard
            found.add(path.read_bytes()[0])
    return found


def settle(http: Files) -> None:
    """Wait until no further shard is requested for 0.3 s, which is three polling intervals."""
    seen = -1
    while seen != (seen := http.gets.total()):
        time.sleep(0.3)


def prefetcher(cache: ShardCache, order: GlobalOrder, shards: list[Shard], **options) -> Prefetcher:
    requests = partial(shards_ahead, order, 0, 0, [slice(0, order.batch_size)])
    arguments = {"begin": 0, "end": 10_000, "ahead": order.steps_per_epoch, **options}
    return Prefetcher(cache, arguments.pop("requests", requests), shards, **arguments)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 4), st.integers(3, 20), st.integers(1, 12))
def test_the_window_holds_what_batches_read_and_never_more_than_fits(streams: int, block: int, capacity: int) -> None:
    sizes = np.full(12, 5)
    order = GlobalOrder(np.cumsum(sizes) - sizes, sizes, 8, 0, Interleave(4 // streams, block))
    window = RequestWindow(shards_ahead(order, 0, 0, [slice(0, 8)]), [10] * 12, 10 * capacity)
    admitted: list[ShardRequest] = []
    for reached in range(3 * order.steps_per_epoch):
        admitted = [request for request in admitted if request.last >= reached] + window.move(reached, reached + 6)
        assert window.shards == {request.shard for request in admitted}
        assert window.bytes == 10 * len(window.shards) <= 10 * capacity
        needed = set((order.batch(*divmod(reached, order.steps_per_epoch)) // 5).tolist()) - {-1}
        assert needed <= window.shards or window.is_too_small


def test_the_cache_is_filled_in_order_of_use_and_no_shard_in_use_is_evicted(http: Files, tmp_path: Path) -> None:
    """Each shard is in use for two steps; the cache has room for six shards, of which the prefetcher may fill five."""
    cache, order = ShardCache(tmp_path, 6 * SIZE, timeout=5), order_of()
    needed = [shards_of(order, 2 * turn).pop() for turn in range(SHARDS)]
    with prefetcher(cache, order, stored(http)) as ahead:
        wait_for(lambda: held(tmp_path) == set(needed[:5]))
        settle(http)
        assert http.gets.total() == 5
        for turn in range(SHARDS):
            wait_for(lambda turn=turn: set(needed[turn : turn + 5]) <= held(tmp_path))
            assert len(held(tmp_path)) <= 6
            ahead.advance(2 * turn + 2)
        assert max(http.gets.values()) == 1


def test_shards_that_are_no_longer_needed_are_evicted_first(http: Files, tmp_path: Path) -> None:
    """A block has three shards and the cache holds eight, so a new block must evict only shards of finished blocks."""
    order, turns = order_of(shards=3), SHARDS // 3
    needed = [set().union(*(shards_of(order, 6 * turn + step) for step in range(6))) for turn in range(turns)]
    with prefetcher(ShardCache(tmp_path, 8 * SIZE, timeout=5), order, stored(http), end=6 * turns) as ahead:
        for turn in range(turns - 1):
            ahead.advance(6 * turn)
            wait_for(lambda turn=turn: needed[turn + 1] <= held(tmp_path))
            settle(http)
            assert needed[turn] | needed[turn + 1] <= held(tmp_path)


def test_a_start_in_the_middle_fetches_the_nodes_own_shards_that_are_still_needed(http: Files, tmp_path: Path) -> None:
    cache, order = ShardCache(tmp_path, 100 * SIZE), order_of(batch_size=4, streams=4)

    def read(begin: int, end: int) -> set[int]:
        rows = [order.batch(*divmod(number, order.steps_per_epoch))[2:] for number in range(begin, end)]
        return set((np.concatenate(rows) // SAMPLES).tolist())

    expected, blocks = read(50, 53), read(50 - SAMPLES, 53 + SAMPLES)
    shards = stored(http)
    local = min(expected)
    shards[local] = Shard(path="/data/local.tar", start=0, n=0, bytes=SIZE)
    later = partial(shards_ahead, order, 0, 50, [slice(2, 4)])
    with prefetcher(cache, order, shards, requests=later, begin=50, end=53):
        wait_for(lambda: held(tmp_path) >= expected - {local})
        settle(http)
    assert expected and len(blocks) < SHARDS
    assert held(tmp_path) <= blocks - {local}


def test_a_failed_prefetch_is_logged_and_left_to_the_readers(http: Files, tmp_path: Path, log_file: Path) -> None:
    cache, order = ShardCache(tmp_path, 100 * SIZE, timeout=5), order_of()
    http.faults["00003.tar"] = [404]
    shards = stored(http)
    shards[6] = Shard(path="file:///nowhere/00006.tar", start=0, n=0, bytes=SIZE)
    with prefetcher(cache, order, shards):
        wait_for(lambda: held(tmp_path) == set(range(SHARDS)) - {3, 6})
        wait_for(lambda: log_file.read_text().count("could not be prefetched") == 2)
    logged = log_file.read_text()
    assert "00003.tar" in logged and "/nowhere/00006.tar" in logged
    with pytest.raises(FetchError, match="does not exist"):
        cache.path(shards[3].path, SIZE)


def test_a_cache_that_is_too_small_is_named_once(http: Files, tmp_path: Path, log_file: Path) -> None:
    """Each batch reads all shards, so the first six that an epoch reads fill the cache; the epochs' orders differ."""
    order, cache = order_of(batch_size=16, streams=16), ShardCache(tmp_path, 6 * SIZE)
    later = order.steps_per_epoch + 1
    requested = [request.shard for request in islice(shards_ahead(order, 0, 0, [slice(0, 16)]), 2 * SHARDS)]
    first, second = set(requested[:6]), set(requested[SHARDS : SHARDS + 6])
    assert first != second
    with prefetcher(cache, order, stored(http)) as ahead:
        wait_for(lambda: held(tmp_path) == first)
        # the shards may arrive before the warning, which would be lost if the block ended at once
        wait_for(lambda: "data.cache_gb" in log_file.read_text())
        ahead.advance(later)
        wait_for(lambda: held(tmp_path) == second)
        settle(http)
    assert log_file.read_text().count("data.cache_gb") == 1


def test_it_ends_with_the_block_even_when_it_is_stuck(http: Files, tmp_path: Path, caplog) -> None:
    http.gate.clear()
    with prefetcher(ShardCache(tmp_path, 100 * SIZE, timeout=600), order_of(), stored(http)) as ahead:
        wait_for(lambda: http.gets.total() >= 4)
        os.kill(ahead.pid, signal.SIGUSR1)
        time.sleep(0.05)
        assert ahead.is_alive(), "launchers send it to the whole tree"
    assert ahead.exitcode == -signal.SIGKILL
    for number in range(3):  # training continues without the prefetcher
        ahead.advance(number)
    assert caplog.text.count("fetched only when they are read") == 1
