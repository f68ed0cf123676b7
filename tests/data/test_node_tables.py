"""Check that a node makes each sample table once, for all its processes, and replaces damaged or stale files."""

import multiprocessing
import os
import signal
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from tars import manifest_of, write_pairs

from neuclip_ds.data.build import build_manifest, write_manifest
from neuclip_ds.data.cache import ShardCache
from neuclip_ds.data.manifest import Manifest
from neuclip_ds.data.node_tables import NodeTables, dump_table, view_table
from neuclip_ds.data.readers import TarReader
from neuclip_ds.data.sample_table import MEMBERS, SampleTable
from neuclip_ds.data.scan import ScanOptions
from neuclip_ds.data.shards import resolve_shards
from neuclip_ds.data.tar import read_index
from neuclip_ds.errors import UserError

FORK = multiprocessing.get_context("fork")


def table_of(n: int, checksums: bool = True, others: tuple[str, ...] = ()) -> SampleTable:
    rng, members = np.random.default_rng(n), (*MEMBERS, *others)
    extents = rng.integers(0, 2**40, (n, len(members), 2))
    keys = b"\0".join(b"folder/%d\xff" % row for row in range(n))
    crc32 = rng.integers(0, 2**32, (n, len(members)), dtype=np.uint32) if checksums else None
    ordinals = np.arange(n, dtype=np.int32)
    return SampleTable(ordinals=ordinals, extents=extents, keys=keys, crc32=crc32, members=members)


def same(one: SampleTable, other: SampleTable) -> bool:
    return dump_table(one) == dump_table(other)


def mapped(folder: Path) -> list[str]:
    """Return the lines of /proc/self/maps that name files in a folder."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if str(folder) in line]


@pytest.mark.parametrize("n", [0, 1, 1000])
@pytest.mark.parametrize(("checksums", "others"), [(False, ()), (True, ("syn.txt", "bl\u00efp.json"))])
def test_a_table_survives_its_bytes(n: int, checksums: bool, others: tuple[str, ...]) -> None:
    table = table_of(n, checksums, others)
    seen = view_table(dump_table(table))
    assert seen.members == table.members
    assert np.array_equal(seen.extents, table.extents) and np.array_equal(seen.ordinals, table.ordinals)
    assert (bytes(seen.keys), seen.n, seen.layout) == (table.keys, n, table.layout)
    assert (seen.crc32 is None) == (not checksums) and (seen.crc32 is None or np.array_equal(seen.crc32, table.crc32))
    if n:
        assert seen.key(n - 1) == f"folder/{n - 1}\udcff"


def make_slowly(log: Path) -> SampleTable:
    with log.open("a") as file:
        file.write(f"{os.getpid()}\n")
    time.sleep(0.3)
    return table_of(100)


def get(folder: Path, log: Path) -> bool:
    table = NodeTables(folder).get("shard.tar", 1, partial(make_slowly, log))
    return same(table, table_of(100)) and len(mapped(folder)) == 1


def test_processes_that_need_a_table_at_once_make_one(tmp_path: Path) -> None:
    with ProcessPoolExecutor(4, FORK) as pool:
        results = [pool.submit(get, tmp_path / "t", tmp_path / "log") for _ in range(8)]
        assert all(one.result() for one in results)
    assert len((tmp_path / "log").read_text().splitlines()) == 1
    assert len([path for path in (tmp_path / "t").iterdir() if path.stat().st_size]) == 1


def hold(folder: Path, begun: Path) -> None:
    NodeTables(folder).get("shard.tar", 1, lambda: begun.touch() or time.sleep(1000))


def test_a_process_killed_while_it_makes_a_table_holds_nobody_up(tmp_path: Path) -> None:
    holder = FORK.Process(target=hold, args=(tmp_path / "t", tmp_path / "begun"))
    holder.start()
    while not (tmp_path / "begun").exists():
        time.sleep(0.01)
    os.kill(holder.pid or 0, signal.SIGKILL)
    holder.join()
    assert get(tmp_path / "t", tmp_path / "log")


def test_another_source_and_a_discarded_shard_need_another_table(tmp_path: Path) -> None:
    tables = NodeTables(tmp_path)
    assert tables.get("a", 1, lambda: table_of(1)).n == 1
    assert tables.get("a", 2, lambda: table_of(2)).n == 2
    assert tables.get("b", 1, lambda: table_of(3)).n == 3
    kept = tables.get("a", 1, lambda: table_of(4))
    assert kept.n == 1
    tables.discard("a")
    assert same(kept, table_of(1)), "still mapped"
    assert [tables.get("a", source, lambda: table_of(5)).n for source in (1, 2)] == [5, 5]
    assert tables.get("b", 1, lambda: table_of(5)).n == 3


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "longer", "link", "folder"])
def test_a_damaged_file_is_made_again(tmp_path: Path, damage: str) -> None:
    tables = NodeTables(tmp_path / "t")
    tables.get("a", 1, lambda: table_of(50))
    (path,) = (path for path in (tmp_path / "t").iterdir() if path.stat().st_size)
    data = path.read_bytes()
    path.unlink()
    if damage == "link":
        (tmp_path / "elsewhere").write_bytes(dump_table(table_of(7)))
        path.symlink_to(tmp_path / "elsewhere")
    elif damage == "folder":
        path.mkdir()
    elif damage != "flip":
        path.write_bytes({"cut": data[:-1], "empty": b"", "longer": data + b"x"}[damage])
    for at in range(0, len(data), 97) if damage == "flip" else [0]:
        if damage == "flip":
            path.write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
        assert same(tables.get("a", 1, lambda: table_of(50)), table_of(50))
        assert damage == "folder" or (path.read_bytes() == data and not path.is_symlink())


def test_the_least_recently_used_tables_make_room(tmp_path: Path) -> None:
    size = len(dump_table(table_of(100)))
    tables = NodeTables(tmp_path, 3 * size + 100)
    for number, name in enumerate("abcad"):
        tables.get(name, 1, lambda: table_of(100))
        for path in tmp_path.iterdir():  # make each file older, as file times are coarse
            age = time.time_ns() - path.stat().st_mtime_ns
            os.utime(path, ns=(0, time.time_ns() - age - 10**9))
        assert number < 4 or sum(path.stat().st_size for path in tmp_path.iterdir()) == 3 * size
    made = []
    for name in "acdb":
        tables.get(name, 1, lambda name=name: made.append(name) or table_of(100))
    assert made == ["b"]


def test_where_no_file_can_be_written_tables_are_private(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    tables = NodeTables(tmp_path / "file")
    assert all(same(tables.get(name, 1, lambda: table_of(9)), table_of(9)) for name in "ab")
    assert caplog.text.count("cannot share them") == 1


def test_an_unsafe_folder_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / f"neuclip_ds_shards-{os.getuid()}").symlink_to(tmp_path / "elsewhere")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    reader = TarReader(manifest_of(write_pairs(tmp_path / "shards", [2, 2])))
    assert [reader.read(index).texts["txt"] for index in range(4)] == [f"caption {i}".encode() for i in range(4)]
    assert caplog.text.count("are not shared between processes") == 1
    assert "; set TMPDIR to another folder." in caplog.text
    assert not any((tmp_path / "elsewhere").iterdir())


def cached(folder: Path, tar: Path, **changes: object) -> tuple[Manifest, ShardCache]:
    """Return a manifest without tables, in which one shard is named by its URL, and a node's cache."""
    (shard,) = build_manifest([str(tar)], 1).shards
    return Manifest([replace(shard, path=tar.as_uri(), **changes)]), ShardCache(folder / "cache", 10**6)


def read_all(manifest: Manifest, cache: ShardCache) -> list[bytes]:
    reader = TarReader(manifest, cache=cache)
    return [reader.read(index).texts["txt"] for index in range(manifest.n)]


def test_headers_are_walked_once_a_node(tmp_path: Path) -> None:
    manifest, cache = cached(tmp_path, write_pairs(tmp_path / "shards", [5]) / "00000.tar", layout=None)
    expected = [f"caption {index}".encode() for index in range(5)]
    with ProcessPoolExecutor(1, FORK) as pool:
        assert pool.submit(read_all, manifest, cache).result() == expected
    (copy,) = (tmp_path / "cache" / "shards").iterdir()
    with copy.open("r+b") as file:  # erase all headers
        for sample in read_index(file.fileno()).samples:
            for extent in sample.members.values():
                file.seek(extent.offset - 512)
                file.write(bytes(512))
    with ProcessPoolExecutor(1, FORK) as pool:
        assert pool.submit(read_all, manifest, cache).result() == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n": 6}, r"00000.tar contains 5 samples, but the manifest lists 6: .*side file.*Build the manifest again"),
        ({"bytes": 999_936}, r"00000.tar cannot be fetched: .* bytes arrived, expected .*build the manifest again"),
    ],
)
def test_a_wrong_count_or_size_of_a_manifest_from_side_files(tmp_path: Path, changes: dict, message: str) -> None:
    manifest, _ = cached(tmp_path, write_pairs(tmp_path / "shards", [5]) / "00000.tar", layout=None, **changes)
    with pytest.raises(UserError, match=message):
        read_all(manifest, ShardCache(tmp_path / "cache", 10**6, backoff=0.01))


def test_tables_of_a_manifest_are_mapped_too(tmp_path: Path) -> None:
    paths = resolve_shards(str(write_pairs(tmp_path / "shards", [5, 4])))
    manifest = write_manifest(tmp_path / "m", paths, ThreadPoolExecutor(1), ScanOptions(checksum=True))
    reader = TarReader(manifest, cache=ShardCache(tmp_path / "cache", 10**6))
    assert [reader.read(index).texts["txt"] for index in range(9)] == [f"caption {n}".encode() for n in range(9)]
    assert len({line.split()[-1] for line in mapped(tmp_path / "cache" / "tables")}) == 2
