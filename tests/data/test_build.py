"""Check manifests built in memory or on disk, interrupted builds, subsets selected by uid, and sorted files of uids."""

import bz2
import gzip
import json
import lzma
import os
import uuid
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tars import jpeg, write_pairs, write_tar

from neuclip_ds.data import build
from neuclip_ds.data.build import build_manifest, open_manifest, write_manifest
from neuclip_ds.data.manifest import Manifest
from neuclip_ds.data.readers import TarReader
from neuclip_ds.data.scan import ScanOptions
from neuclip_ds.data.shards import resolve_shards
from neuclip_ds.data.uids import UID, UidFiles, parse_uid, uid_of
from neuclip_ds.errors import UserError

CHECKED = ScanOptions(checksum=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    incomplete = {3: {"jpg": jpeg(3)}, 5: {"txt": b"no image"}, 6: {"json": b"{}"}}
    return write_pairs(tmp_path / "shards", [4, 3, 2], replace=incomplete)


class Worker(ThreadPoolExecutor):
    """An executor with one thread that counts the groups of shards submitted to it."""

    def __init__(self) -> None:
        super().__init__(1)
        self.groups = 0

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.groups += 1
        return super().submit(fn, *args, **kwargs)


def interrupt_after(shards: int) -> Callable[[int, int], None]:
    def on_progress(done: int, total: int) -> None:
        if done == shards:
            raise KeyboardInterrupt

    return on_progress


def paths_of(folder: Path) -> list[str]:
    return resolve_shards(str(folder))


def test_counts_starts_and_bad_samples(folder):
    paths = paths_of(folder)
    manifest = build_manifest(paths, processes=1)
    assert (manifest.n, manifest.n_shards, manifest.n_bad) == (9, 3, 3)
    assert manifest.starts.tolist() == [0, 4, 7]
    assert manifest.sizes.tolist() == [4, 3, 2]
    assert [shard.n_bad for shard in manifest.shards] == [1, 2, 0]
    assert [shard.bytes for shard in manifest.shards] == [Path(path).stat().st_size for path in paths]
    assert build_manifest(paths, processes=2).shards == manifest.shards


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([], "No samples in .*0.tar"),
        ([("readme", b"")], "No samples in .*0.tar"),
        ([("a.npy", b""), ("a.txt", b"")], "No sample in .*0.tar has an image .*npy, txt"),
        ([("a.jpg", b""), ("a.json", b"")], "No captions in .*0.tar .*jpg, json"),
    ],
)
def test_shards_that_cannot_be_trained_on(tmp_path, members, message):
    path = write_tar(tmp_path / "0.tar", members)
    with pytest.raises(UserError, match=message):
        build_manifest([str(path)])
    with pytest.raises(UserError, match=message):
        write_manifest(tmp_path / "m", [str(path)], Worker())


def test_tars_of_several_folders_are_named_by_the_first_of_them(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    paths = [str(write_tar(tmp_path / folder / f"{number}.tar", [])) for folder in ("a", "b") for number in (0, 1)]
    with pytest.raises(UserError, match=rf"No samples in 4 tars, such as {paths[0]};"):
        build_manifest(paths, 1)
    with pytest.raises(UserError, match=rf"No samples in 2 tars in {tmp_path}/a;"):
        build_manifest(paths[:2], 1)


def test_paths_that_are_joined_to_a_name_longer_than_that_of_a_file_are_opened(tmp_path: Path) -> None:
    write_pairs(tmp_path / "shards", [1] * 120)
    joined = "::".join(str(tmp_path / f"shards/{number:05d}.tar") for number in range(120))
    assert len(joined) > 4096
    assert open_manifest(joined, tmp_path / "cache").n == 120


def test_what_a_run_builds_is_used_until_a_shard_changes(folder, tmp_path, monkeypatch):
    cache, scanned, scan_shard = tmp_path / "cache", [], build.scan_shard
    monkeypatch.setattr(build, "scan_shard", lambda path, options: scanned.append(path) or scan_shard(path, options))

    def opened(**options) -> Manifest:
        return open_manifest(str(folder), cache, processes=1, **options)

    first = opened()
    assert opened().shards == first.shards
    assert len(scanned) == 3
    opened(options=ScanOptions(captions=("txt", "json:caption")))  # with other captions, other samples may be bad
    assert len(scanned) == 6
    os.utime(folder / "00001.tar", ns=(0, 0))
    assert opened().shards == first.shards
    assert len(scanned) == 9
    write_pairs(folder, [4, 3, 5])
    assert opened().n == 12


@pytest.mark.parametrize("change", ["nothing", "shards", "options"])
def test_an_interrupted_build_continues_with_what_it_knows(folder, tmp_path, change):
    paths, target, options = paths_of(folder), tmp_path / "m", CHECKED
    with pytest.raises(KeyboardInterrupt), Worker() as first:  # at its exit, waits for running scans
        write_manifest(target, paths, first, options, on_progress=interrupt_after(2))
    assert not (target / "shards.parquet").exists()
    if change == "shards":
        write_pairs(folder / "other", [6])
        (folder / "other" / "00000.tar").replace(paths[0])  # its size differs from the scanned shard's
        paths = paths[::-1]
    options = replace(options, uid_key="other" if change == "options" else "uid")
    again, seen = Worker(), []
    manifest = write_manifest(target, paths, again, options, on_progress=lambda *at: seen.append(at))
    known = {"nothing": 2, "shards": 1, "options": 0}[change]
    assert (again.groups, seen) == (3 - known, [(done, 3) for done in range(known, 4)])
    assert manifest.shards == build_manifest(paths, processes=1, options=options).shards
    expected = TarReader(build_manifest(paths, processes=1))
    assert [TarReader(manifest).key(row) for row in range(manifest.n)] == [expected.key(n) for n in range(manifest.n)]
    kept = {path.name for path in target.iterdir()}
    assert kept == {"shards.parquet", "samples"} and len(list((target / "samples").iterdir())) == 3


def test_a_group_of_shards_shares_a_file_of_tables(tmp_path, monkeypatch):
    """An unreadable shard does not shift the tables of the other shards in its group."""
    monkeypatch.setattr(build, "GROUPS", 4)
    monkeypatch.setattr(build, "as_completed", iter)  # the real function's order varies
    paths = paths_of(write_pairs(tmp_path / "shards", [1, 2, 3, 0, 1, 2, 3, 1]))
    unreadable(Path(paths[4]))
    with pytest.raises(KeyboardInterrupt), Worker() as first:
        write_manifest(tmp_path / "m", paths, first, CHECKED, on_progress=interrupt_after(6))
    manifest = write_manifest(tmp_path / "m", paths, Worker(), CHECKED, skip_unreadable=True)
    assert len(list((tmp_path / "m" / "samples").iterdir())) == 4, "of three shards, of two, and of one each"
    reader = TarReader(manifest)
    assert [reader.key(index) for index in range(manifest.n)] == [f"{n:06d}" for n in range(13) if n != 6]


def unreadable(path: Path) -> None:
    """Replace a shard with a folder of the same name."""
    path.unlink()
    path.mkdir()


def test_an_unreadable_shard_costs_no_other_and_may_be_omitted(folder, tmp_path, caplog):
    paths, target = paths_of(folder), tmp_path / "m"
    unreadable(folder / "00001.tar")
    with pytest.raises(UserError, match=r"1 of 1 shards cannot be used\. .* Fix the shards, or pass other sources\.$"):
        write_manifest(tmp_path / "n", paths[1:2], Worker(), skip_unreadable=True)
    with pytest.raises(UserError, match=r"1 of 3 shards cannot be used.*00001.tar cannot be read: Is a directory"):
        write_manifest(target, paths, Worker(), CHECKED)
    again = Worker()
    manifest = write_manifest(target, paths, again, CHECKED, skip_unreadable=True)
    assert again.groups == 1
    assert [shard.path for shard in manifest.shards] == [paths[0], paths[2]]
    (listed,) = (target / "unreadable_shards.jsonl").read_text().splitlines()
    assert json.loads(listed)["shard"] == paths[1] and "Is a directory" in json.loads(listed)["reason"]
    assert f"1 of 3 shards cannot be used and are omitted; {target}/unreadable_shards.jsonl lists them" in caplog.text


NOT_TARS = {
    "a web page": (b"<!DOCTYPE html><html>Not found</html>" * 40, "is a web page"),
    "a short answer": (b'\n{"error": "expired"}', "is JSON"),
    "nothing": (b"", r"is empty \(0 bytes\)"),
    "noise": (b"\x01" * 5000, "has no valid header"),
    "zeros": (bytes(20480), "contains only zeros"),
    "gzip": (gzip.compress, r"gunzip"),
    "xz": (lzma.compress, r"unxz"),
    "bzip2": (bz2.compress, r"bunzip2"),
    "a pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
}


@pytest.mark.parametrize("case", NOT_TARS)
def test_a_file_that_is_not_a_tar_is_unusable(tmp_path, case):
    """Neither a build on disk nor one in memory omits its samples silently."""
    content, message = NOT_TARS[case]
    paths = paths_of(write_pairs(tmp_path / "shards", [2, 2]))
    if callable(content):
        content = content((tmp_path / "shards/00001.tar").read_bytes())
    (tmp_path / "shards/00001.tar").write_bytes(content)
    with pytest.raises(UserError, match=rf"1 of 2 shards cannot be used.*00001\.tar.*{message}"):
        write_manifest(tmp_path / "m", paths, Worker())
    with pytest.raises(UserError, match=rf"00001\.tar.*{message}"):
        build_manifest(paths, 1)
    assert write_manifest(tmp_path / "m", paths, Worker(), skip_unreadable=True).n == 2


def test_a_link_to_nothing_is_unusable(tmp_path):
    paths = paths_of(write_pairs(tmp_path / "shards", [2, 2]))
    (tmp_path / "shards/00001.tar").unlink()
    (tmp_path / "shards/00001.tar").symlink_to("nowhere.tar")
    with pytest.raises(UserError, match=r"1 of 2 shards cannot be used.*00001\.tar cannot be read: No such file"):
        write_manifest(tmp_path / "m", paths, Worker())
    assert write_manifest(tmp_path / "m", paths, Worker(), skip_unreadable=True).n == 2


def test_shards_without_a_complete_sample_are_refused_with_the_cause(tmp_path):
    names = [f"{i}.{extension}" for extension in ("jpg", "txt") for i in range(5)]
    paths = [str(write_tar(tmp_path / "0.tar", [(name, b"x") for name in names]))]
    message = r"No sample in .*0\.tar has both .*not adjacent, .*--sort=name"
    with pytest.raises(UserError, match=message):
        build_manifest(paths, 1)
    with pytest.raises(UserError, match=message):
        write_manifest(tmp_path / "m", paths, Worker())
    write_tar(tmp_path / "0.tar", [("a.jpg", b"x"), ("b.txt", b"x")])
    with pytest.raises(UserError, match=r"has both an image and a caption: .*the same key"):
        build_manifest(paths, 1)


@pytest.mark.parametrize("resumes", [False, True])
def test_lost_members_are_counted_with_their_cause(tmp_path, caplog, resumes):
    names = ["a.jpg", "a.txt", "a.jpg", "a.txt", "b.jpg", "c.txt", "b.txt"]
    paths = [str(write_tar(tmp_path / "0.tar", [(name, b"x") for name in names]))]
    both = (tmp_path / "0.tar").read_bytes() + write_tar(tmp_path / "1.tar", [("d.jpg", b"x")]).read_bytes()
    (tmp_path / "0.tar").write_bytes(both)
    if resumes:
        with pytest.raises(UserError, match="cannot be used"):
            write_manifest(tmp_path / "m", [*paths, str(tmp_path)], Worker())
        caplog.clear()
    worker = Worker()
    manifest = write_manifest(tmp_path / "m", paths, worker)
    assert worker.groups == (0 if resumes else 1)
    assert (manifest.n, manifest.n_bad) == (5, 4)
    assert "only 1 of 5 samples" in caplog.text
    assert "1 sample has the key of an earlier sample" in caplog.text
    assert "2 members are ignored, because an earlier member of the same sample has the same extension" in caplog.text
    assert "bytes between members are zeros. If several tars were joined, this is harmless" in caplog.text
    assert "is damaged" not in caplog.text


def test_a_shard_that_changes_while_it_is_scanned_is_not_lost(folder, tmp_path):
    def grow(done: int, total: int) -> None:  # before any shard is scanned
        if done == 0:
            with (folder / "00001.tar").open("ab") as file:
                file.write(bytes(512))

    with pytest.raises(UserError, match=r"00001.tar changed while it was being scanned; run the same command again"):
        write_manifest(tmp_path / "m", paths_of(folder), Worker(), on_progress=grow)
    again = Worker()
    assert write_manifest(tmp_path / "m", paths_of(folder), again).n == 9
    assert again.groups == 0


def test_a_manifest_is_not_overwritten(folder, tmp_path):
    write_manifest(tmp_path / "m", paths_of(folder), Worker())
    with pytest.raises(UserError, match="contains a manifest"):
        write_manifest(tmp_path / "m", paths_of(folder), Worker())


@pytest.mark.parametrize("checksum", [True, False])
def test_files_of_the_user_in_the_folder_of_the_manifest_are_kept(tmp_path, checksum):
    """The shards may be in FOLDER/samples, which also contains the sample tables."""
    samples = write_pairs(tmp_path / "samples", [2, 3])
    shards = paths_of(samples)
    notes = [samples / "part-1.parquet", samples / "notes/a.txt", tmp_path / ".building/a.json"]
    for note in notes:
        note.parent.mkdir(exist_ok=True)
        note.touch()
    abandoned = samples / "part-00000000-0123abcd.parquet"
    abandoned.touch()
    (samples / f".{abandoned.name}.12").touch()
    manifest = write_manifest(tmp_path, shards, Worker(), ScanOptions(checksum=checksum))
    tables = [] if manifest.samples is None else [str(location.file) for location in manifest.samples.locations]
    files = {str(path) for path in tmp_path.rglob("*") if path.is_file()}
    assert files == {*shards, *map(str, notes), *tables, str(tmp_path / "shards.parquet")}


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
    """A sample whose uid is listed twice occurs twice in the manifest, as with DataComp's resharder."""
    folder, uids = uid_shards(tmp_path / "pool", [5, 4, 6])
    chosen = [1, 3, 10, 12, 12, 14]
    files = (
        write_uids(tmp_path / "a.npy", [uids[i] for i in chosen[:3]]),
        write_uids(tmp_path / "b.npy", [uids[i] for i in chosen[3:]] + ["f" * 32]),
    )
    manifest = write_manifest(tmp_path / "m", paths_of(folder), Worker(), ScanOptions(uids=files))
    assert (manifest.n, manifest.sizes.tolist()) == (6, [2, 0, 4])
    reader = TarReader(manifest)
    assert [reader.read(i).texts["txt"] for i in range(6)] == [f"caption {i}".encode() for i in chosen]
    assert [reader.key(i) for i in range(6)] == [f"{i:06d}" for i in chosen]
    other = (write_uids(tmp_path / "c.npy", [uids[i] for i in (0, 3, 10, 12, 12, 14)]),)
    others = write_manifest(tmp_path / "o", paths_of(folder), Worker(), ScanOptions(uids=other))
    assert others.content_hash != manifest.content_hash
    none = (write_uids(tmp_path / "d.npy", ["0" * 31 + "1"]),)
    with pytest.raises(UserError, match=r"None of the uids is in .*--uid-key"):
        write_manifest(tmp_path / "n", paths_of(folder), Worker(), ScanOptions(uids=none))


def test_images_that_occur_twice_are_counted(tmp_path, caplog):
    again = {5: {"jpg": jpeg(0), "txt": b"another caption"}, 6: {"jpg": jpeg(1)}, 8: {"txt": b"no image"}}
    paths = paths_of(write_pairs(tmp_path / "shards", [4, 3, 2], replace=again))
    write_manifest(tmp_path / "m", paths, Worker(), CHECKED)
    assert "2 of 8 samples have the image of an earlier sample" in caplog.text
    caplog.clear()
    write_manifest(tmp_path / "fewer", paths[::2], Worker(), CHECKED)
    write_manifest(tmp_path / "unknown", paths, Worker())
    assert "have the image" not in caplog.text


@pytest.mark.parametrize("selects", [False, True])
def test_uids_that_occur_twice_are_counted_with_an_example(tmp_path, caplog, selects):
    pool, uids = uid_shards(tmp_path / "pool", [3, 2])
    members = [{"json": json.dumps({"uid": uids[1]}).encode()}, {"json": b"{}"}, {"json": b"{}"}]
    paths = [*paths_of(pool), *paths_of(write_pairs(tmp_path / "more", [3], dict(enumerate(members))))]
    options = ScanOptions(uids=(write_uids(tmp_path / "a.npy", uids),) if selects else (), checksum=not selects)
    write_manifest(tmp_path / "first", paths[:2], Worker(), options)
    assert "have the same uid" not in caplog.text
    write_manifest(tmp_path / "m", paths, Worker(), options)
    # 6 samples have a uid, but the uid of the first sample is 0, which counts as none
    assert "1 of 5 samples have the uid of an earlier sample" in caplog.text
    assert uids[1] in caplog.text


def test_a_sample_whose_uid_is_listed_twice_is_no_repeat(tmp_path, caplog):
    folder, uids = uid_shards(tmp_path / "pool", [3])
    options = ScanOptions(uids=(write_uids(tmp_path / "a.npy", [uids[1], uids[1], uids[2]]),))
    assert write_manifest(tmp_path / "m", paths_of(folder), Worker(), options).n == 3
    assert "have the uid of an earlier sample" not in caplog.text


def test_a_uid_that_is_the_first_of_two_shards_is_a_repeat(tmp_path, caplog):
    _, uids = uid_shards(tmp_path / "pool", [2])
    uid = json.dumps({"uid": uids[1]}).encode()
    samples = {number: {"jpg": jpeg(number), "txt": b"caption", "json": uid} for number in range(2)}
    paths = paths_of(write_pairs(tmp_path / "shards", [1, 1], replace=samples))
    write_manifest(tmp_path / "m", paths, Worker(), CHECKED)
    assert "1 of 2 samples have the uid of an earlier sample" in caplog.text


def test_an_interrupted_build_with_uids_scans_again_after_these_have_changed(tmp_path):
    folder, uids = uid_shards(tmp_path / "pool", [3, 3, 3])
    options = ScanOptions(uids=(write_uids(tmp_path / "a.npy", uids[:1]),))
    with pytest.raises(KeyboardInterrupt), Worker() as worker:
        write_manifest(tmp_path / "m", paths_of(folder), worker, options, on_progress=interrupt_after(1))
    write_uids(tmp_path / "a.npy", uids[:2])
    assert write_manifest(tmp_path / "m", paths_of(folder), Worker(), options).n == 2


WORD = st.integers(0, 3) | st.integers(2**64 - 3, 2**64 - 1)
OTHERS = ("uids.npz", "floats.npy", "numbers.npy")
WORDS = st.lists(st.tuples(WORD, WORD), max_size=12)


def test_only_32_hex_digits_are_a_uid():
    assert parse_uid("0123456789abcdef" + "f" * 16) == (0x0123456789ABCDEF, 2**64 - 1)
    for other in (None, 5, "", "0" * 31, "0" * 33, "g" * 32):
        assert parse_uid(other) is None
    assert uid_of(b'{"id": "' + b"0" * 31 + b'7"}', "id") == (0, 7)
    for data in (b"", b"[]", b"{}", b"{cut", b"[" * 100_000, b"1" * 5000, b"\xff\xfe{", b'{"id": "-%030d1"}' % 0):
        assert uid_of(data, "id") is None


@given(listed=st.lists(WORDS, min_size=1, max_size=3), asked=WORDS)
def test_counts_are_those_of_a_plain_search(tmp_path_factory, listed, asked):
    folder = tmp_path_factory.mktemp("uids")
    for number, words in enumerate(listed):
        np.save(folder / f"{number}.npy", np.array(sorted(words), dtype=np.dtype("u8,u8")))
    files = UidFiles(sorted(folder.iterdir()))
    files.check_order()
    counts = files.count(np.array(asked, dtype=UID))
    assert counts.tolist() == [sum(words.count(uid) for words in listed) for uid in asked]


def test_unusable_uid_files_are_refused(tmp_path):
    path = tmp_path / "uids.npy"
    np.save(path, np.array([(1, 2)], dtype=np.dtype("u8,u8")))
    good = path.read_bytes()
    np.savez(tmp_path / "uids.npz", np.load(path))
    np.save(tmp_path / "floats.npy", np.array([(1, 2)], dtype=np.dtype("f8,f8")))
    np.save(tmp_path / "numbers.npy", np.arange(3))
    contents = [
        b"",
        good[:20],
        good[:-1],
        good.replace(b"(1,)", b"(9" + b"9" * 10 + b",)"),
        b"\x93NUMPY" + b"\xff" * 99,
    ]
    contents += [good.replace(b"'shape'", b"'shape"), *((tmp_path / name).read_bytes() for name in OTHERS)]
    for content in contents:
        path.write_bytes(content)
        with pytest.raises(
            UserError, match=r"uids.npy (cannot be read|contains an array of dtype .*; save a one-dimensional array)"
        ) as caught:
            UidFiles([path])
        assert "\n" not in str(caught.value)
    path.unlink()
    with pytest.raises(UserError, match=r"uids.npy cannot be read"):
        UidFiles([path])
    np.save(path, np.array([(1, 2), (1, 1), (3, 0)], dtype=np.dtype("u8,u8")))
    with pytest.raises(UserError, match=r"uids.npy is not sorted"):
        UidFiles([path]).check_order()
