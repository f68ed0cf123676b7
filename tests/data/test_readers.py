"""Check that the reader returns the same samples as webdataset, limits its caches, and refuses changed shards."""

import os
import resource
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from io import FileIO
from pathlib import Path

import pytest
import webdataset
from tars import manifest_of, write_pairs, write_tar

from neuclip_ds.config import DataConfig
from neuclip_ds.data import readers
from neuclip_ds.data.build import build_manifest, open_manifest, write_manifest
from neuclip_ds.data.cache import ShardCache
from neuclip_ds.data.children import process_pool
from neuclip_ds.data.dataset import SampleReader
from neuclip_ds.data.manifest import Manifest
from neuclip_ds.data.manifest_file import load_manifest
from neuclip_ds.data.open_data import loader_options
from neuclip_ds.data.order import GlobalOrder
from neuclip_ds.data.prefetch import Prefetcher, shards_ahead
from neuclip_ds.data.readers import ChecksumError, RawSample, TarReader
from neuclip_ds.data.sample_table import IMAGE_EXTENSIONS
from neuclip_ds.data.scan import ScanOptions
from neuclip_ds.data.shards import resolve_shards
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.errors import UserError


def opened() -> int:
    """Return the number of files that this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


@contextmanager
def open_file_limit(files: int) -> Iterator[None]:
    """Allow this process only so many open files during the block (ulimit -n)."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def of_webdataset(manifest: Manifest, texts: tuple[str, ...] = ("txt",)) -> list[tuple[str, RawSample]]:
    """Return the key and contents of every sample, as read by webdataset."""
    found = webdataset.tariterators.tarfile_samples([{"url": shard.path} for shard in manifest.shards])
    return [
        (
            sample["__key__"],
            RawSample(
                next((sample[extension] for extension in IMAGE_EXTENSIONS if extension in sample), None),
                {name: sample[name] for name in texts if name in sample},
            ),
        )
        for sample in found
    ]


def test_a_reader_leaves_most_of_few_open_files_to_others(tmp_path: Path) -> None:
    manifest = manifest_of(write_pairs(tmp_path, [1] * 40))
    before = opened()
    limit = max(80, before + 30)
    with open_file_limit(limit):
        reader = TarReader(manifest)
        for index in range(40):
            reader.read(index)
        assert opened() - before <= limit // 4 + 1
    del reader


def test_a_sample_is_not_bad_because_too_many_files_are_open(tmp_path: Path) -> None:
    reader = SampleReader(manifest_of(write_pairs(tmp_path, [2])), ("txt",))
    with open_file_limit(3), pytest.raises(UserError, match="ulimit -n"):  # stdin, stdout and stderr only
        reader.read(0)
    assert isinstance(reader.read(0), RawSample)


def test_incomplete_and_odd_samples_are_those_of_webdataset(tmp_path):
    write_tar(
        tmp_path / "0.tar",
        [("d/a.JPG", b"1"), ("d/a.txt", b"2"), ("b.png", b"3"), ("b.jpeg", b"4"), ("c.txt", b"5"), ("e.json", b"6")],
    )
    write_tar(tmp_path / "1.tar", [("f.webp", b"7"), ("f.txt", b"")])
    manifest = manifest_of(tmp_path)
    expected = [(b"1", {"txt": b"2"}), (b"4", {}), (None, {"txt": b"5"}), (None, {}), (b"7", {"txt": b""})]
    reader = TarReader(manifest)
    assert [reader.read(i) for i in range(5)] == expected
    assert [reader.key(i) for i in range(5)] == ["d/a", "b", "c", "e", "f"]
    assert [(reader.key(i), reader.read(i)) for i in range(5)] == of_webdataset(manifest)
    assert reader.read(0, with_image=False) == (None, {"txt": b"2"})


def test_a_shard_that_is_not_the_manifests_is_refused(tmp_path):
    write_pairs(tmp_path, [3])
    manifest = manifest_of(tmp_path)
    write_pairs(tmp_path, [2])
    with pytest.raises(UserError, match=r"00000.tar is \d+ bytes long, but the manifest lists \d+"):
        TarReader(manifest).read(0)
    same_size = Manifest([replace(manifest.shards[0], bytes=(tmp_path / "00000.tar").stat().st_size)])
    with pytest.raises(UserError, match=r"00000.tar contains 2 samples, but the manifest lists 3"):
        TarReader(same_size).read(0)


def test_a_file_that_fails_is_opened_anew(tmp_path, monkeypatch):
    reader = TarReader(manifest_of(write_pairs(tmp_path, [2])))
    pair = reader.read(0)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", lambda *_: b"")
        with pytest.raises(OSError, match="the shard is truncated"):
            reader.read(0)
    paths = []
    monkeypatch.setattr(readers, "FileIO", lambda path: paths.append(path) or FileIO(path))
    assert reader.read(0) == pair and len(paths) == 1


def test_file_descriptors_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr("neuclip_ds.data.readers.OPEN_SHARDS", 2)
    manifest = manifest_of(write_pairs(tmp_path, [1] * 6))
    reader = TarReader(manifest)
    for index in [*range(6), *range(6)]:
        assert reader.read(index).texts["txt"] == f"caption {index}".encode()
    opened = [os.path.realpath(descriptor) for descriptor in Path("/proc/self/fd").iterdir()]
    assert sum(path.startswith(str(tmp_path)) for path in opened) == 2


def recaptioned(folder: Path) -> Path:
    """Write a shard of four samples with both captions, only `txt`, only `syn.txt`, and neither; return its folder."""
    folder.mkdir()
    members = [
        *(("a.jpg", b"1"), ("a.txt", b"2"), ("a.SYN.txt", b"3"), ("b.jpg", b"4"), ("b.txt", b"5")),
        *(("c.jpg", b"6"), ("c.syn.txt", b"7"), ("d.jpg", b"8"), ("d.json", b"{}")),
    ]
    return write_tar(folder / "0.tar", members).parent


def test_members_of_any_name_with_sample_tables_and_without(tmp_path: Path) -> None:
    texts = ("txt", "syn.txt")
    paths, options = resolve_shards(str(recaptioned(tmp_path / "shards"))), ScanOptions(captions=texts, checksum=True)
    manifest = build_manifest(paths, processes=1, options=options)
    with process_pool(1) as pool:
        stored = write_manifest(tmp_path / "m", paths, pool, options)
    assert stored.samples is not None and stored.has_checksums
    assert (manifest.n_bad, stored.n_bad, stored.shards[0].layout) == (1, 1, manifest.shards[0].layout)
    expected = [{"txt": b"2", "syn.txt": b"3"}, {"txt": b"5"}, {"syn.txt": b"7"}, {}]
    for reader in (TarReader(manifest, texts), TarReader(stored, texts)):
        assert [reader.read(index).texts for index in range(4)] == expected
    assert [sample.texts for _, sample in of_webdataset(manifest, texts)] == expected
    assert TarReader(stored).read(0).texts == {"txt": b"2"}
    assert TarReader(manifest, ("json",)).read(3).texts == {"json": b"{}"}
    damaged = Path(paths[0]).read_bytes().replace(b"3" + bytes(511), b"x" + bytes(511))
    Path(paths[0]).write_bytes(damaged)
    with pytest.raises(ChecksumError, match=r"syn\.txt does not match"):
        TarReader(stored, texts).read(0)


def test_a_manifest_without_a_member_is_refused_where_it_is_opened(tmp_path: Path) -> None:
    paths = resolve_shards(str(recaptioned(tmp_path / "shards")))
    with process_pool(1) as pool:
        write_manifest(tmp_path / "m", paths, pool, ScanOptions(checksum=True))
    options = ScanOptions(captions=("txt", "syn.txt"))
    with pytest.raises(UserError, match=r"does not list the members syn\.txt.* --captions txt syn\.txt"):
        open_manifest(str(tmp_path / "m"), tmp_path, options=options)
    assert open_manifest(str(tmp_path / "shards"), tmp_path / "cache", processes=1, options=options).n == 4


SIZES = [3, 4, 2]


def copies(cache: Path) -> int:
    return len(list((cache / "shards").glob("*.tar")))


def test_files_are_read_from_copies_on_request(tmp_path: Path) -> None:
    manifest = manifest_of(write_pairs(tmp_path / "shards", SIZES))
    expected = [TarReader(manifest).read(index) for index in range(manifest.n)]
    in_place = TarReader(manifest, cache=ShardCache(tmp_path / "cache", 10**6))
    assert [in_place.read(index) for index in range(manifest.n)] == expected
    assert copies(tmp_path / "cache") == 0
    by_url = Manifest([replace(shard, path=f"file://{shard.path}") for shard in manifest.shards])
    config = DataConfig(cache_dir=tmp_path / "cache", cache_gb=0.001)
    cache = loader_options(config, Communicator(), by_url).cache
    order = GlobalOrder(manifest.starts, manifest.sizes, 3, 0)
    requests = partial(shards_ahead, order, 0, 0, [slice(0, 3)])
    with Prefetcher(cache, requests, by_url.shards, begin=0, end=9, ahead=9) as ahead:
        for _ in range(1200):
            if copies(tmp_path / "cache") < len(SIZES):
                ahead.join(0.05)
    assert copies(tmp_path / "cache") == len(SIZES)
    for shard in manifest.shards:
        Path(shard.path).unlink()
    later = TarReader(by_url, cache=cache)
    assert [later.read(index) for index in range(manifest.n)] == expected


def test_file_urls_are_remote_shards(tmp_path: Path) -> None:
    manifest = manifest_of(write_pairs(tmp_path / "shards", SIZES))
    url = f"file://{tmp_path}/shards/{{00000..00002}}.tar"
    with pytest.raises(UserError, match=r"file:///.*00000\.tar is remote: run neuclip-ds build-manifest once"):
        open_manifest(url, tmp_path / "manifests")
    write_manifest(tmp_path / "manifest", resolve_shards(url), ThreadPoolExecutor(1), ScanOptions(checksum=True))
    found = load_manifest(tmp_path / "manifest")
    assert [shard.path for shard in found.shards] == [f"file://{shard.path}" for shard in manifest.shards]
    assert found.content_hash == manifest.content_hash
    assert resolve_shards(f"file://{tmp_path}/shards/*.tar") == resolve_shards(url)
