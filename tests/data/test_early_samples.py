"""Check that the first batches' samples arrive before their shards, no byte arrives twice, and failures are handled."""

import logging
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from servers import Files, files_server, wait_for
from tars import write_tar

from neuclip_ds.data.build import write_manifest
from neuclip_ds.data.cache import ShardCache
from neuclip_ds.data.early_samples import EarlySamples
from neuclip_ds.data.interleave import Interleave
from neuclip_ds.data.manifest import Manifest
from neuclip_ds.data.manifest_file import load_manifest
from neuclip_ds.data.order import GlobalOrder
from neuclip_ds.data.partial_shard import BLOCK, PartialShard
from neuclip_ds.data.prefetch import Prefetcher, ShardRequest, early_samples, shards_ahead
from neuclip_ds.data.range_reader import server_of
from neuclip_ds.data.readers import ChecksumError, RawSample, TarReader
from neuclip_ds.data.scan import ScanOptions
from neuclip_ds.data.shards import resolve_shards

SHARDS = 3
SAMPLES = 20  # per shard
IMAGE_BYTES = 6000
BATCH = 6


class Remote:
    """Shards on a server, with their manifest and the contents of their samples."""

    def __init__(self, http: Files, folder: Path) -> None:
        self.http = http
        shards = folder / "shards"
        shards.mkdir()
        for shard in range(SHARDS):
            members = []
            for number in range(shard * SAMPLES, (shard + 1) * SAMPLES):
                members.append((f"{number:04d}.jpg", bytes([number]) * IMAGE_BYTES))
                members.append((f"{number:04d}.json", b"{}" * 1000))
                members.append((f"{number:04d}.txt", f"caption {number}".encode()))
            write_tar(shards / f"{shard:05d}.tar", members)
        paths = resolve_shards(str(shards))
        http.files = {Path(path).name: Path(path).read_bytes() for path in paths}
        self.total_bytes = sum(map(len, http.files.values()))
        write_manifest(
            folder / "m", [http.url(name) for name in http.files], ThreadPoolExecutor(1), ScanOptions(checksum=True)
        )
        self.manifest = load_manifest(folder / "m")
        self.order = GlobalOrder(self.manifest.starts, self.manifest.sizes, BATCH, 0, Interleave(3, 100))
        self.cache = ShardCache(folder / "cache", 10**8, timeout=20, backoff=0.01)
        self.reader = TarReader(self.manifest, cache=self.cache)
        http.gets.clear()
        http.sent = 0

    def early(self, manifest: Manifest | None = None) -> EarlySamples:
        found = early_samples(self.cache, manifest or self.manifest, ("txt",), self.order, [slice(0, BATCH)])
        assert found is not None
        return found

    def prefetcher(self, begin: int = 0) -> Prefetcher:
        rows = [slice(0, BATCH)]
        requests = partial(shards_ahead, self.order, 0, begin, rows)
        end = self.order.steps_per_epoch
        return Prefetcher(
            self.cache, requests, self.manifest.shards, begin=begin, end=end, ahead=end, early_samples=self.early()
        )

    def indices(self, batch: int) -> list[int]:
        return self.order.batch(0, batch).tolist()

    def read(self, batch: int) -> list[RawSample]:
        return [self.reader.read(index) for index in self.indices(batch)]

    def expected(self, batch: int) -> list[RawSample]:
        return [
            RawSample(bytes([index]) * IMAGE_BYTES, {"txt": f"caption {index}".encode()})
            for index in self.indices(batch)
        ]

    def cached(self) -> int:
        return sum(self.cache.touch(shard.path, shard.bytes) for shard in self.manifest.shards)


@pytest.fixture
def remote(tmp_path: Path) -> Iterator[Remote]:
    with files_server() as http:
        yield Remote(http, tmp_path)


@pytest.mark.parametrize("begin", [0, 4])
def test_the_first_batches_arrive_before_any_shard_and_no_byte_is_fetched_twice(remote: Remote, begin: int) -> None:
    early = remote.early()
    early.begin(range(SHARDS))
    early.fetch_batches(begin, begin + 2, in_turn=True)
    assert remote.read(begin) == remote.expected(begin)
    assert remote.read(begin + 1) == remote.expected(begin + 1)
    assert remote.cached() == 0 and remote.http.sent < remote.total_bytes / 2
    early.fetch_batches(begin + 1, begin + 3, in_turn=True)
    assert [early.fetch_rest(number) for number in range(SHARDS)] == [True] * SHARDS
    assert remote.cached() == SHARDS
    assert remote.http.sent == remote.total_bytes + 1, "one more byte shows that the server supports ranges"
    for batch in range(remote.order.steps_per_epoch):
        assert remote.read(batch) == remote.expected(batch)


@pytest.mark.parametrize("begin", [0, 5])
def test_an_epoch_during_the_download_fetches_every_byte_once(remote: Remote, begin: int) -> None:
    with remote.prefetcher(begin) as ahead:
        for batch in range(begin, remote.order.steps_per_epoch):
            ahead.advance(batch)
            assert remote.read(batch) == remote.expected(batch)
        wait_for(lambda: remote.cached() == SHARDS)
    assert remote.http.sent == remote.total_bytes + 1


def test_a_server_that_ignores_ranges_sends_whole_shards_once_and_is_named_once(
    remote: Remote, caplog: pytest.LogCaptureFixture
) -> None:
    remote.http.ignores_ranges = True
    early = remote.early()
    early.begin(range(SHARDS))
    with caplog.at_level(logging.WARNING):
        early.fetch_batches(0, 2, in_turn=True)
        early.begin(range(SHARDS))
        early.fetch_batches(2, 4, in_turn=True)
    assert [early.fetch_rest(number) for number in range(SHARDS)] == [False] * SHARDS
    assert remote.http.gets.total() == 1, "later samples do not try again"
    assert caplog.text.count("ignores range requests") == 1
    for batch in range(remote.order.steps_per_epoch):
        assert remote.read(batch) == remote.expected(batch)
    assert remote.http.gets.total() == SHARDS + 1


def test_the_name_of_a_server_has_a_port_only_if_the_url_has_one() -> None:
    urls = ("https://a.org/b/0.tar", "http://a.org:80/0.tar", "s3://bucket/b/0.tar")
    assert list(map(server_of, urls)) == ["https://a.org", "http://a.org:80", "s3://bucket"]


def test_a_server_that_ignores_ranges_later_is_asked_for_no_more(
    remote: Remote, caplog: pytest.LogCaptureFixture
) -> None:
    """One server of several behind the same name may ignore ranges."""
    early = remote.early()
    early.begin(range(SHARDS))
    early.fetch_batches(0, 1, in_turn=True)
    remote.http.ignores_ranges = True
    with caplog.at_level(logging.WARNING):
        early.fetch_batches(1, 2, in_turn=True)
    assert caplog.text.count("ignores range requests") == 1
    before = remote.http.sent
    early.begin(range(SHARDS))
    early.fetch_batches(2, 8, in_turn=True)
    assert remote.http.sent == before
    for batch in range(remote.order.steps_per_epoch):
        assert remote.read(batch) == remote.expected(batch)


@pytest.mark.parametrize("fault", [404, 503, "short", "cut"])
def test_a_shard_that_fails_in_pieces_is_fetched_whole(remote: Remote, fault: int | str) -> None:
    name = "00001.tar"
    early = remote.early()
    early.begin([0])
    early.fetch_batches(0, 1, in_turn=True)  # now the server is known to support ranges
    remote.http.faults[name] = [fault] * 50  # enough for all attempts of the backend
    early.begin(range(SHARDS))
    early.fetch_batches(1, 3, in_turn=True)
    remote.http.faults.clear()
    assert [early.fetch_rest(number) for number in range(SHARDS)] == [True, False, True]
    assert remote.read(1) == remote.expected(1)
    assert remote.cached() == SHARDS


def test_a_longer_file_is_not_taken_for_the_shard(remote: Remote) -> None:
    for name, data in remote.http.files.items():
        remote.http.files[name] = data + b"x"
    early = remote.early()
    early.begin([0])
    assert not early.fetch_rest(0)
    assert remote.cached() == 0


def test_damaged_pieces_are_noticed_and_fetched_again(remote: Remote) -> None:
    intact = dict(remote.http.files)
    for name, data in intact.items():
        remote.http.files[name] = data.replace(b"caption", b"damaged")
    early = remote.early()
    early.begin(range(SHARDS))
    early.fetch_batches(0, 1, in_turn=True)
    remote.http.files.update(intact)
    with ThreadPoolExecutor(1) as pool:
        attempt = pool.submit(remote.read, 0)  # waits for the whole shard, to compare the names in it
        assert [early.fetch_rest(number) for number in range(SHARDS)] == [False] * SHARDS
        with pytest.raises(ChecksumError, match="txt does not match"):
            attempt.result(timeout=60)
    assert remote.read(0) == remote.expected(0), "the second attempt reads the whole shard"


def test_a_reader_does_not_wait_for_a_process_that_was_killed(remote: Remote) -> None:
    with ThreadPoolExecutor(1) as pool:
        remote.http.gate.clear()
        with remote.prefetcher() as ahead:
            waiting = pool.submit(remote.read, 0)
            wait_for(lambda: remote.http.sent > 0)
            ahead.kill()
        remote.http.gate.set()
        assert waiting.result(timeout=60) == remote.expected(0)


def test_a_full_cache_leaves_shards_to_the_readers(remote: Remote, tmp_path: Path) -> None:
    shards = remote.manifest.shards
    remote.cache = ShardCache(tmp_path / "small", shards[0].bytes + shards[1].bytes, timeout=20)
    remote.reader = TarReader(remote.manifest, cache=remote.cache)
    early = remote.early()
    early.begin(range(SHARDS))
    early.fetch_batches(0, 1, in_turn=True)
    assert [early.fetch_rest(number) for number in range(SHARDS)] == [True, True, False]
    assert remote.read(0) == remote.expected(0)


def test_a_begun_shard_that_training_has_passed_leaves_the_cache(remote: Remote) -> None:
    early = remote.early()
    ahead = remote.prefetcher()
    ahead._early_samples = early
    early.begin(range(SHARDS))
    early.fetch_batches(0, 1, in_turn=True)
    waiting = remote.expected(0)
    ahead.advance(2)
    for number in range(SHARDS):
        ahead._fetch(ShardRequest(first=0, last=1, shard=number))
    assert remote.cached() == 0
    assert remote.cache.arrived() == 0, "the space is free for other shards"
    assert remote.read(0) == waiting, "readers can fetch the shards"


def test_shards_without_sample_tables_are_not_fetched_in_pieces(remote: Remote) -> None:
    without_tables = Manifest(remote.manifest.shards)
    assert early_samples(remote.cache, without_tables, ("txt",), remote.order, [slice(0, BATCH)]) is None


def test_bytes_that_a_full_disk_did_not_take_at_once_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_all = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: write_all(fd, data[:1000], offset))
    shard = PartialShard("s3://a", 5000, tmp_path, lock=None)
    for start, end in shard.claim(0, 5000):
        shard.write(start, b"x" * (end - start))
    assert shard.is_complete
    assert (shard.folder / "data").read_bytes() == b"x" * 5000


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 40_000), st.lists(st.tuples(st.integers(0, 40_000), st.integers(1, 9000)), max_size=6))
def test_claims_cover_the_shard_once(tmp_path_factory: pytest.TempPathFactory, size: int, wanted: list) -> None:
    shard = PartialShard("s3://a", size, tmp_path_factory.mktemp("partial"), lock=None)
    claimed: list[tuple[int, int]] = []
    for offset, length in wanted:
        start = min(offset, size - 1)
        claimed += shard.claim(start, min(start + length, size))
    while pieces := shard.claim_next(2, 2 * BLOCK):
        assert len(pieces) <= 2 and all(end - start <= 2 * BLOCK for start, end in pieces)
        claimed += pieces
    claimed.sort()
    assert claimed[0][0] == 0 and claimed[-1][1] == size
    assert [end for _, end in claimed[:-1]] == [start for start, _ in claimed[1:]]
    for start, end in claimed:
        assert not shard.is_complete
        shard.write(start, b"x" * (end - start))
    assert shard.is_complete and (shard.folder / "data").read_bytes() == b"x" * size
