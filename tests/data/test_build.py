"""Building manifests: in memory, on disk, interrupted, grown, from subsets of uids."""

from __future__ import annotations

import json
import os
import uuid
import zlib
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from tars import jpeg, write_pairs, write_tar

from neuclip_ds.data.build import build_manifest, find_changes, open_manifest, write_manifest
from neuclip_ds.data.manifest import Manifest
from neuclip_ds.data.readers import TarReader, WebdatasetReader
from neuclip_ds.data.scan import ScanOptions
from neuclip_ds.data.shards import resolve_shards
from neuclip_ds.errors import UserError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    incomplete = {3: {"jpg": jpeg(3)}, 5: {"txt": b"no image"}, 6: {"json": b"{}"}}
    return write_pairs(tmp_path / "shards", [4, 3, 2], replace=incomplete)


class Here(Executor):
    """Run the work in this process up to a number of groups, then fail as a killed build would."""

    def __init__(self, pieces: int = 1_000_000) -> None:
        self.pieces, self.done = pieces, 0

    def submit(self, fn, /, *args, **kwargs):
        if self.done == self.pieces:
            raise KeyboardInterrupt
        self.done += 1
        future: Future = Future()
        future.set_result(fn(*args, **kwargs))
        return future


def paths_of(folder: Path) -> list[str]:
    return resolve_shards(str(folder))


def test_counts_starts_and_bad_samples(folder):
    manifest = build_manifest(paths_of(folder), processes=2)
    assert (manifest.n, manifest.n_shards, manifest.n_bad) == (9, 3, 3)
    assert manifest.starts.tolist() == [0, 4, 7]
    assert manifest.sizes.tolist() == [4, 3, 2]
    assert [shard.n_bad for shard in manifest.shards] == [1, 2, 0]
    assert [shard.bytes for shard in manifest.shards] == [Path(s.path).stat().st_size for s in manifest.shards]


def test_progress_and_processes_do_not_change_the_result(folder):
    paths, seen = paths_of(folder), []
    alone = build_manifest(paths, processes=1, on_progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 3), (2, 3), (3, 3)]
    assert alone.shards == build_manifest(paths, processes=3).shards


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([], "No samples in .*0.tar"),
        ([("readme", b"")], "No samples in .*0.tar"),
        ([("a.npy", b""), ("a.txt", b"")], "No sample has an image in .*0.tar .*npy, txt"),
        ([("a.jpg", b""), ("a.json", b"")], "No captions in .*0.tar .*jpg, json"),
    ],
)
def test_shards_that_cannot_be_trained_on(tmp_path, members, message):
    path = write_tar(tmp_path / "0.tar", members)
    with pytest.raises(UserError, match=message):
        build_manifest([str(path)])
    with pytest.raises(UserError, match=message):
        write_manifest(tmp_path / "m", [str(path)], Here())


def test_damage_is_logged_and_counted_out(folder, caplog):
    path = folder / "00000.tar"
    raw = path.read_bytes()
    path.write_bytes(raw[: len(raw) // 3])
    manifest = build_manifest(paths_of(folder), processes=1)
    assert manifest.shards[0].n < 4
    assert "00000.tar is damaged" in caplog.text


def test_what_a_run_builds_is_used_until_a_shard_changes(folder, tmp_path):
    cache, built = tmp_path / "cache", []

    def opened(**options) -> Manifest:
        return open_manifest(
            str(folder), cache, processes=1, on_progress=lambda done, total: built.append(done), **options
        )

    first = opened()
    assert opened().shards == first.shards
    assert built == [1, 2, 3]
    opened(options=ScanOptions(("txt", "json:caption")))  # which could count other samples as bad
    assert built == [1, 2, 3] * 2
    os.utime(folder / "00001.tar", ns=(0, 0))
    assert opened().shards == first.shards
    assert built == [1, 2, 3] * 3
    write_pairs(folder, [4, 3, 5])
    assert opened().n == 12


def test_open_manifest_takes_a_manifest_folder_and_no_remote_shards(folder, tmp_path):
    manifest = write_manifest(tmp_path / "m", paths_of(folder), Here())
    assert open_manifest(str(tmp_path / "m"), tmp_path / "cache").shards == manifest.shards
    with pytest.raises(UserError, match=r"s3://b/0.tar is remote: build .*neuclip-ds build-manifest"):
        open_manifest("s3://b/{0..3}.tar", tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_on_disk_equals_in_memory_whoever_does_the_work(folder, tmp_path):
    paths, seen = paths_of(folder), []
    with ProcessPoolExecutor(2) as pool:
        by_two = write_manifest(tmp_path / "two", paths, pool, on_progress=lambda *at: seen.append(at))
    assert by_two.shards == build_manifest(paths, processes=1).shards
    assert seen == [(0, 3), (1, 3), (2, 3), (3, 3)]
    assert [path.name for path in (tmp_path / "two").iterdir()] == ["shards.parquet"]


def test_checksums_and_sample_tables(folder, tmp_path):
    options = ScanOptions(checksum=True)
    manifest = write_manifest(tmp_path / "m", paths_of(folder), Here(), options, samples=True)
    assert [shard.crc32 for shard in manifest.shards] == [
        zlib.crc32(Path(s.path).read_bytes()) for s in manifest.shards
    ]
    with_tables, by_walk = TarReader(manifest), TarReader(build_manifest(paths_of(folder), processes=1))
    for index in range(9):
        assert with_tables.read(index) == by_walk.read(index)
        assert with_tables.key(index) == by_walk.key(index)


def test_a_changed_shard_is_refused_also_with_sample_tables(folder, tmp_path):
    manifest = write_manifest(tmp_path / "m", paths_of(folder), Here(), samples=True)
    write_pairs(folder, [5, 3, 2])
    with pytest.raises(UserError, match=r"00000.tar has \d+ bytes where the manifest has \d+"):
        TarReader(manifest).read(0)


def test_an_interrupted_build_goes_on_where_it_was(folder, tmp_path):
    paths, target = paths_of(folder), tmp_path / "m"
    with pytest.raises(KeyboardInterrupt):
        write_manifest(target, paths, Here(2), samples=True)
    assert not (target / "shards.parquet").exists()
    second, seen = Here(), []
    manifest = write_manifest(target, paths, second, samples=True, on_progress=lambda *at: seen.append(at))
    assert (second.done, seen) == (1 + 3, [(2, 3), (3, 3)]), "a shard, and the files of tables"
    assert manifest.shards == build_manifest(paths, processes=1).shards
    assert {path.name for path in target.iterdir()} == {"shards.parquet", "samples"}


def test_other_shards_keep_what_is_known_and_other_options_do_not(folder, tmp_path):
    paths, target = paths_of(folder), tmp_path / "m"
    with pytest.raises(KeyboardInterrupt):
        write_manifest(target, paths, Here(2), samples=True)
    write_pairs(folder / "other", [6])
    (folder / "other" / "00000.tar").replace(paths[0])  # of another size than the one in the journal
    again = Here()
    manifest = write_manifest(target, paths[::-1], again, samples=True)
    assert again.done == 2 + 3, "the changed shard, the missing one, and the files of tables"
    assert [Path(shard.path).name for shard in manifest.shards] == ["00002.tar", "00001.tar", "00000.tar"]
    assert [TarReader(manifest).key(row) for row in (0, 2, 5, 10)] == ["000007", "000004", "000000", "000005"]
    with pytest.raises(KeyboardInterrupt):
        write_manifest(tmp_path / "n", paths, Here(2))
    again = Here()
    write_manifest(tmp_path / "n", paths, again, ScanOptions(verify=True))
    assert again.done == 3


def unreadable(path: Path) -> Path:
    """Put a folder in a shard's place, and return where the shard is now."""
    moved = path.with_suffix(".aside")
    path.rename(moved)
    path.mkdir()
    return moved


@pytest.mark.parametrize("remedy", ["fix", "omit"])
@pytest.mark.parametrize("samples", [False, True])
def test_an_unreadable_shard_is_named_and_costs_no_other(folder, tmp_path, samples, remedy):
    paths, target = paths_of(folder), tmp_path / "m"
    moved = unreadable(folder / "00001.tar")
    with pytest.raises(UserError, match=r"1 of 3 shards cannot be used.*00001.tar cannot be read: Is a directory"):
        write_manifest(target, paths, Here(), samples=samples)
    for name in ("00000", "00002"):  # bytes that would not be found again
        path = folder / f"{name}.tar"
        (tmp_path / name).write_bytes(path.read_bytes())
        path.write_bytes(bytes(path.stat().st_size))
    if remedy == "fix":
        (folder / "00001.tar").rmdir()
        moved.rename(folder / "00001.tar")
    else:
        del paths[1]
    manifest = write_manifest(target, paths, Here(), samples=samples)
    for name in ("00000", "00002"):
        (folder / f"{name}.tar").write_bytes((tmp_path / name).read_bytes())
    assert manifest.shards == build_manifest(paths, processes=1).shards
    reader, expected = TarReader(manifest), TarReader(build_manifest(paths, processes=1))
    assert [reader.read(index) for index in range(manifest.n)] == [expected.read(index) for index in range(manifest.n)]
    assert not (target / "unreadable_shards.jsonl").exists()


def test_unreadable_shards_may_be_omitted_and_come_back(folder, tmp_path, caplog):
    paths, target = paths_of(folder), tmp_path / "m"
    moved = unreadable(folder / "00001.tar")
    manifest = write_manifest(target, paths, Here(), samples=True, skip_unreadable=True)
    assert [Path(shard.path).name for shard in manifest.shards] == ["00000.tar", "00002.tar"]
    listed = [json.loads(line) for line in (target / "unreadable_shards.jsonl").read_text().splitlines()]
    assert [entry["shard"] for entry in listed] == [paths[1]]
    assert "Is a directory" in listed[0]["reason"]
    assert f"1 shards cannot be used and are omitted; {target}/unreadable_shards.jsonl lists them" in caplog.text
    (folder / "00001.tar").rmdir()
    moved.rename(folder / "00001.tar")
    grown = write_manifest(target, paths, Here(), update=True, skip_unreadable=True)
    assert [Path(shard.path).name for shard in grown.shards] == ["00000.tar", "00002.tar", "00001.tar"]
    assert TarReader(grown).key(6) == "000004"
    assert not (target / "unreadable_shards.jsonl").exists()


def test_a_shard_that_changes_while_it_is_scanned_is_not_lost(folder, tmp_path):
    class Grows(Here):
        def submit(self, fn, /, *args, **kwargs):
            if args[1].endswith("00001.tar"):
                with Path(args[1]).open("ab") as file:
                    file.write(bytes(512))
            return super().submit(fn, *args, **kwargs)

    with pytest.raises(UserError, match=r"00001.tar has changed while it was scanned; run the same command again"):
        write_manifest(tmp_path / "m", paths_of(folder), Grows())
    assert write_manifest(tmp_path / "m", paths_of(folder), Here(0)).n == 9


def test_a_build_of_nothing_but_unreadable_shards_fails(folder, tmp_path):
    unreadable(folder / "00001.tar")
    with pytest.raises(UserError, match="1 of 1 shards cannot be used"):
        write_manifest(tmp_path / "m", [str(folder / "00001.tar")], Here(), skip_unreadable=True)


def test_a_manifest_is_not_overwritten(folder, tmp_path):
    write_manifest(tmp_path / "m", paths_of(folder), Here())
    with pytest.raises(UserError, match="--update"):
        write_manifest(tmp_path / "m", paths_of(folder), Here())
    with pytest.raises(UserError, match="holds no manifest"):
        write_manifest(tmp_path / "other", paths_of(folder), Here(), update=True)
    with pytest.raises(UserError, match="has no sample tables"):
        write_manifest(tmp_path / "m", paths_of(folder), Here(), update=True, samples=True)
    with pytest.raises(UserError, match=r"00000\.tar is listed more than once"):
        write_manifest(tmp_path / "n", paths_of(folder)[:1] * 2, Here())


@pytest.mark.parametrize("samples", [False, True])
def test_updates_never_move_an_index(folder, tmp_path, samples):
    target, paths = tmp_path / "m", paths_of(folder)

    def update(paths: list[str]) -> Manifest:
        return write_manifest(target, paths, Here(), samples=samples, update=True)

    first = write_manifest(target, paths, Here(), samples=samples)
    keys = [TarReader(first).key(index) for index in range(9)]

    gone = update([paths[0], paths[2]])
    assert (gone.n, gone.n_used, gone.content_hash) == (9, 6, first.content_hash)
    assert update(paths).shards == first.shards  # it is back

    write_tar(folder / "00000.tar", [("new/a.jpg", jpeg(1)), ("new/a.txt", b"changed")])
    write_pairs(tmp_path / "more", [2])
    wanted = [*paths_of(tmp_path / "more"), *paths]
    assert list(find_changes(first, wanted).new) == wanted[:2]
    grown = update(wanted)
    assert grown.hash_of_first(3) == first.content_hash
    assert [shard.removed for shard in grown.shards] == [True, False, False, False, False]
    assert grown.starts.tolist() == [0, 4, 7, 9, 11]
    reader = TarReader(grown)
    assert [reader.key(index) for index in range(4, 9)] == keys[4:]
    assert [reader.key(index) for index in range(9, 12)] == ["000000", "000001", "new/a"]
    assert update(wanted).shards == grown.shards  # nothing left to do


def test_verify_decodes_everything(tmp_path):
    bad = {1: {"jpg": jpeg(1)[:-100], "txt": b"cut"}, 2: {"jpg": jpeg(2), "txt": b" "}, 4: {"txt": b"alone"}}
    folder = write_pairs(tmp_path / "shards", [3, 3], replace=bad)
    assert write_manifest(tmp_path / "quick", paths_of(folder), Here()).n_bad == 1
    manifest = write_manifest(tmp_path / "m", paths_of(folder), Here(), ScanOptions(verify=True))
    assert [shard.n_bad for shard in manifest.shards] == [2, 1]
    lines = [json.loads(line) for line in (tmp_path / "m" / "bad_samples.jsonl").read_text().splitlines()]
    assert [(line["index"], line["key"], line["reason"].split(":")[0]) for line in lines] == [
        (1, "000001", "image cannot be decoded"),
        (2, "000002", "no caption"),
        (4, "000004", "no image"),
    ]
    assert lines[0]["shard"] == manifest.shards[0].path
    write_pairs(tmp_path / "more", [1], replace={0: {"txt": b"alone"}})
    wanted = [*paths_of(folder), *paths_of(tmp_path / "more")]
    write_manifest(tmp_path / "m", wanted, Here(), ScanOptions(verify=True), update=True)
    lines = [json.loads(line) for line in (tmp_path / "m" / "bad_samples.jsonl").read_text().splitlines()]
    assert [line["index"] for line in lines] == [1, 2, 4, 6]


def uid_shards(folder: Path, sizes: list[int]) -> tuple[Path, list[str]]:
    uids = [uuid.UUID(int=(i * 0x9E3779B97F4A7C15F39CC0605CEDC835) % 2**128).hex for i in range(sum(sizes))]
    replace = {
        i: {"jpg": jpeg(i), "txt": f"caption {i}".encode(), "json": json.dumps({"uid": uid, "key": "x"}).encode()}
        for i, uid in enumerate(uids)
    }
    return write_pairs(folder, sizes, replace=replace), uids


def write_uids(path: Path, uids: list[str]) -> str:
    pairs = [(int(uid[:16], 16), int(uid[16:], 16)) for uid in uids]
    np.save(path, np.sort(np.array(pairs, dtype=np.dtype("u8,u8"))))
    return str(path)


def test_a_subset_by_uids_has_dense_indices(tmp_path):
    folder, uids = uid_shards(tmp_path / "pool", [5, 4, 6])
    chosen = [1, 3, 10, 12, 14]
    files = (
        write_uids(tmp_path / "a.npy", [uids[i] for i in chosen[:3]]),
        write_uids(tmp_path / "b.npy", [uids[i] for i in chosen[3:]] + ["f" * 32]),
    )
    manifest = write_manifest(tmp_path / "m", paths_of(folder), Here(), ScanOptions(uids=files))
    assert manifest.n == 5
    assert manifest.sizes.tolist() == [2, 0, 3]
    for reader in (TarReader(manifest), WebdatasetReader(manifest)):
        assert [reader.read(i).texts["txt"] for i in range(5)] == [f"caption {i}".encode() for i in chosen]
        assert [reader.key(i) for i in range(5)] == [f"{i:06d}" for i in chosen]
    other = (write_uids(tmp_path / "c.npy", [uids[i] for i in (0, 3, 10, 12, 14)]),)
    assert (
        write_manifest(tmp_path / "o", paths_of(folder), Here(), ScanOptions(uids=other)).content_hash
        != manifest.content_hash
    )


def test_a_uid_listed_twice_is_kept_twice(tmp_path):
    """DataComp's own resharder repeats such samples."""
    folder, uids = uid_shards(tmp_path / "pool", [3])
    files = (write_uids(tmp_path / "a.npy", [uids[2], uids[0], uids[2]]),)
    manifest = write_manifest(tmp_path / "m", paths_of(folder), Here(), ScanOptions(uids=files))
    assert [TarReader(manifest).key(i) for i in range(manifest.n)] == ["000000", "000002", "000002"]


def test_uids_that_fit_nothing(folder, tmp_path):
    uids = (write_uids(tmp_path / "a.npy", ["0" * 31 + "1"]),)
    with pytest.raises(UserError, match=r"has a uid under the key 'uid'.*--uid-key"):
        write_manifest(tmp_path / "m", paths_of(folder), Here(), ScanOptions(uids=uids))
    pool, _ = uid_shards(tmp_path / "pool", [3])
    with pytest.raises(UserError, match="None of the uids is in"):
        write_manifest(tmp_path / "n", paths_of(pool), Here(), ScanOptions(uids=uids))
