"""Both readers give the same samples; caches stay within bounds; changed shards are refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tars import write_pairs, write_tar

from neuclip_ds.data.build import build_manifest, open_manifest, write_manifest
from neuclip_ds.data.children import process_pool
from neuclip_ds.data.manifest import Manifest
from neuclip_ds.data.readers import ChecksumError, RecentlyUsed, TarReader, WebdatasetReader
from neuclip_ds.data.scan import ScanOptions
from neuclip_ds.data.shards import resolve_shards
from neuclip_ds.errors import UserError

FLICKR = Path(__file__).parents[3] / "shared/data/flickr8k/val"


def test_both_readers_agree_on_incomplete_and_odd_samples(tmp_path):
    write_tar(
        tmp_path / "0.tar",
        [("d/a.JPG", b"1"), ("d/a.txt", b"2"), ("b.png", b"3"), ("b.jpeg", b"4"), ("c.txt", b"5"), ("e.json", b"6")],
    )
    write_tar(tmp_path / "1.tar", [("f.webp", b"7"), ("f.txt", b"")])
    manifest = build_manifest(resolve_shards(str(tmp_path)), processes=1)
    expected = [(b"1", {"txt": b"2"}), (b"4", {}), (None, {"txt": b"5"}), (None, {}), (b"7", {"txt": b""})]
    for reader in (TarReader(manifest), WebdatasetReader(manifest)):
        assert [reader.read(i) for i in range(5)] == expected
        assert [reader.key(i) for i in range(5)] == ["d/a", "b", "c", "e", "f"]
        assert reader.read(0, with_image=False) == (None, {"txt": b"2"})


@pytest.mark.skipif(not FLICKR.is_dir(), reason="no flickr8k here")
def test_both_readers_agree_on_real_shards():
    manifest = build_manifest(resolve_shards(str(FLICKR)), processes=1)
    ours, theirs = TarReader(manifest), WebdatasetReader(manifest)
    assert manifest.n == 1000
    assert manifest.n_bad == 0
    for index in range(0, 1000, 7):
        assert ours.read(index) == theirs.read(index)
        assert ours.key(index) == theirs.key(index)


def test_a_shard_that_is_not_the_manifests_is_refused(tmp_path):
    write_pairs(tmp_path, [3])
    manifest = build_manifest(resolve_shards(str(tmp_path)), processes=1)
    write_pairs(tmp_path, [2])
    with pytest.raises(UserError, match=r"00000.tar has \d+ bytes where the manifest has \d+"):
        TarReader(manifest).read(0)
    same_size = Manifest([manifest.shards[0]._replace(bytes=(tmp_path / "00000.tar").stat().st_size)])
    for reader in (TarReader, WebdatasetReader):
        with pytest.raises(UserError, match=r"00000.tar yields 2 samples where the manifest has 3"):
            reader(same_size).read(0)


def test_webdataset_refuses_what_it_would_lose(tmp_path):
    """After a damaged header webdataset silently drops the rest; our reader continues."""
    path = write_pairs(tmp_path, [4]) / "00000.tar"
    raw = bytearray(path.read_bytes())
    second = build_manifest([str(path)], processes=1)
    offset = TarReader(second)._tables.get(0).extents[2, 0, 0] - 512
    raw[offset : offset + 100] = b"\xff" * 100
    path.write_bytes(bytes(raw))
    manifest = build_manifest([str(path)], processes=1)
    assert TarReader(manifest).read(3).texts == {"txt": b"caption 3"}
    with pytest.raises(UserError, match=r"data\.reader=tar"):
        WebdatasetReader(manifest).read(0)


def test_an_open_file_that_fails_is_opened_anew(tmp_path):
    manifest = build_manifest(resolve_shards(str(write_pairs(tmp_path, [2]))), processes=1)
    reader = TarReader(manifest)
    pair = reader.read(0)
    os.close(reader._files.get(0))
    with pytest.raises(OSError, match="Bad file descriptor"):
        reader.read(0)
    assert reader.read(0) == pair


def test_samples_are_announced_by_their_extents(tmp_path, monkeypatch):
    write_tar(tmp_path / "0.tar", [("a.jpg", b"1" * 700), ("a.txt", b"22"), ("b.txt", b"333")])
    reader = TarReader(build_manifest(resolve_shards(str(tmp_path)), processes=1))
    advised = []
    monkeypatch.setattr(os, "posix_fadvise", lambda _, offset, size, advice: advised.append((offset, size, advice)))
    reader.announce([0, 1])
    assert advised == [(offset, size, os.POSIX_FADV_WILLNEED) for offset, size in ((512, 700), (2048, 2), (3072, 3))]


def test_announcing_leaves_errors_to_the_read(tmp_path):
    write_pairs(tmp_path, [3])
    reader = TarReader(build_manifest(resolve_shards(str(tmp_path)), processes=1))
    (tmp_path / "00000.tar").unlink()
    reader.announce([0, 1, 2])
    with pytest.raises(FileNotFoundError):
        reader.read(0)


def test_recently_used_keeps_to_its_capacity():
    loaded, released = [], []
    cache = RecentlyUsed(lambda shard: loaded.append(shard) or shard, 5, weigh=lambda v: v, release=released.append)
    for shard in (2, 3, 2, 1):
        cache.get(shard)
    assert (loaded, released) == ([2, 3, 1], [3])
    cache.get(9)  # heavier than the capacity: kept alone
    assert released == [3, 2, 1]
    cache.drop(9)
    cache.drop(9)
    assert released == [3, 2, 1, 9]


def test_file_descriptors_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr("neuclip_ds.data.readers.OPEN_SHARDS", 2)
    manifest = build_manifest(resolve_shards(str(write_pairs(tmp_path, [1] * 6))), processes=1)
    reader = TarReader(manifest)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for index in [*range(6), *range(6)]:
        assert reader.read(index).texts["txt"] == f"caption {index}".encode()
    assert len(list(Path("/proc/self/fd").iterdir())) == before + 2


def recaptioned(folder: Path) -> Path:
    """Four pairs, of which the second has no synthetic caption and the third nothing else."""
    folder.mkdir()
    members = [
        *(("a.jpg", b"1"), ("a.txt", b"2"), ("a.SYN.txt", b"3"), ("b.jpg", b"4"), ("b.txt", b"5")),
        *(("c.jpg", b"6"), ("c.syn.txt", b"7"), ("d.jpg", b"8"), ("d.json", b"{}")),
    ]
    return write_tar(folder / "0.tar", members).parent


def test_members_of_any_name_with_sample_tables_and_without(tmp_path: Path) -> None:
    texts = ("txt", "syn.txt")
    paths, options = resolve_shards(str(recaptioned(tmp_path / "shards"))), ScanOptions(texts, checksum=True)
    manifest = build_manifest(paths, processes=1, options=options)
    with process_pool(1) as pool:
        stored = write_manifest(tmp_path / "m", paths, pool, options)
    assert stored.samples is not None and stored.has_checksums
    assert (manifest.n_bad, stored.n_bad, stored.shards[0].layout) == (1, 1, manifest.shards[0].layout)
    expected = [{"txt": b"2", "syn.txt": b"3"}, {"txt": b"5"}, {"syn.txt": b"7"}, {}]
    for reader in (TarReader(manifest, texts), TarReader(stored, texts), WebdatasetReader(manifest, texts)):
        assert [reader.read(index).texts for index in range(4)] == expected
    assert TarReader(stored).read(0).texts == {"txt": b"2"}
    assert TarReader(manifest, ("json",)).read(3).texts == {"json": b"{}"}
    damaged = Path(paths[0]).read_bytes().replace(b"3" + bytes(511), b"x" + bytes(511))
    Path(paths[0]).write_bytes(damaged)
    with pytest.raises(ChecksumError, match=r"syn\.txt is not what"):
        TarReader(stored, texts).read(0)


def test_a_manifest_without_a_member_is_refused_where_it_is_opened(tmp_path: Path) -> None:
    paths = resolve_shards(str(recaptioned(tmp_path / "shards")))
    with process_pool(1) as pool:
        write_manifest(tmp_path / "m", paths, pool, samples=True)
    options = ScanOptions(("txt", "syn.txt"))
    with pytest.raises(UserError, match=r"does not know where syn\.txt members are.* --captions txt syn\.txt"):
        open_manifest(str(tmp_path / "m"), tmp_path, options=options)
    assert open_manifest(str(tmp_path / "shards"), tmp_path / "cache", processes=1, options=options).n == 4
