"""Check the indices, hashes and files of manifests, and that damaged or impossible manifests give one-line errors."""

import errno
import random
import resource
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tars import manifest_of, write_pairs
from test_build import Worker, interrupt_after

from neuclip_ds.data.build import build_manifest, open_manifest, write_manifest
from neuclip_ds.data.manifest import Manifest, Shard
from neuclip_ds.data.manifest_file import load_manifest, write_shards
from neuclip_ds.data.readers import TarReader
from neuclip_ds.data.scan import ScanOptions
from neuclip_ds.data.shards import resolve_shards
from neuclip_ds.errors import UserError

CHECKED = ScanOptions(checksum=True)


def save(manifest: Manifest, folder: Path) -> Path:
    folder.mkdir(parents=True)
    write_shards(manifest, folder)
    return folder


def test_locate_skips_empty_shards():
    manifest = Manifest(
        [
            Shard(path="a", start=0, n=2, bytes=1),
            Shard(path="b", start=2, n=0, bytes=1),
            Shard(path="c", start=2, n=3, bytes=1),
            Shard(path="d", start=5, n=0, bytes=1),
        ]
    )
    assert [manifest.locate(i) for i in range(5)] == [(0, 0), (0, 1), (2, 0), (2, 1), (2, 2)]
    for outside in (-1, 5):
        with pytest.raises(IndexError):
            manifest.locate(outside)


def test_saved_and_loaded_is_equal(tmp_path):
    shards = list(manifest_of(write_pairs(tmp_path / "shards", [4, 3, 2])).shards)
    shards[1] = replace(shards[1], crc32=2**32 - 1, selection=0)
    manifest = Manifest(shards)
    loaded = load_manifest(save(manifest, tmp_path / "deep" / "manifest"))
    assert loaded.shards == manifest.shards
    assert loaded.content_hash == manifest.content_hash
    assert np.array_equal(loaded.starts, manifest.starts)
    assert [p.name for p in (tmp_path / "deep" / "manifest").iterdir()] == ["shards.parquet"]


def test_content_hash_follows_content_not_place(tmp_path):
    folder = write_pairs(tmp_path / "shards", [4, 3, 2])
    original = manifest_of(folder)
    moved = manifest_of(shutil.copytree(folder, tmp_path / "moved"))
    assert moved.content_hash == original.content_hash
    backwards = build_manifest(resolve_shards(str(folder))[::-1], processes=1)
    changes = ({"path": "x"}, {"bytes": 512}, {"selection": 7})
    others = {Manifest([replace(shard, **change) for shard in original.shards]).content_hash for change in changes}
    assert len({original.content_hash, backwards.content_hash, *others}) == 5


def test_folders_that_are_no_manifests_of_this_version(folder, tmp_path):
    with pytest.raises(UserError, match="not a manifest folder"):
        load_manifest(tmp_path / "shards")
    path = folder / "shards.parquet"
    table = pq.read_table(path)
    for key, value, words in (("content_hash", "0" * 32, "hash"), ("version", "9", "version 9")):
        meta = {**table.schema.metadata, f"neuclip_ds.{key}".encode(): value}
        pq.write_table(table.replace_schema_metadata(meta), path)
        with pytest.raises(UserError, match=words):
            load_manifest(folder)
    pq.write_table(table, path)
    shutil.rmtree(tmp_path / "shards")
    with pytest.raises(UserError, match="does not exist"):
        load_manifest(folder)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shards = write_pairs(tmp_path / "shards", [4, 3])
    write_manifest(tmp_path / "m", resolve_shards(str(shards)), Worker(), CHECKED)
    return tmp_path / "m"


def one_sentence(error: pytest.ExceptionInfo[UserError]) -> None:
    message = str(error.value)
    assert "\n" not in message and "Traceback" not in message and len(message) < 600


def rewritten(path: Path, change: Callable[[pa.Table], pa.Table]) -> None:
    table = pq.read_table(path)
    pq.write_table(change(table).replace_schema_metadata(table.schema.metadata), path)


def without(name: str) -> Callable[[pa.Table], pa.Table]:
    return lambda table: table.drop_columns([name])


def replaced(name: str, value: object, kind: pa.DataType | None = None) -> Callable[[pa.Table], pa.Table]:
    """Return a function that sets a column to a value in all rows; only the value None needs `kind`."""
    return lambda table: table.set_column(
        table.column_names.index(name), name, pa.array([value] * len(table), kind or None)
    )


CUTS = {
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-20]),
    "half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "text": lambda path: path.write_text("not parquet at all, but long enough to be read as such"),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
}
TABLES = {
    **{f"without {name}": without(name) for name in ("path", "n", "n_bad")},
    **{f"text as {name}": replaced(name, "x") for name in ("n", "crc32", "n_bad")},
    **{f"no {name}": replaced(name, None, kind) for name, kind in (("path", pa.string()), ("n", pa.int64()))},
    "no rows": lambda table: table.slice(0, 0),
}
PARTS = {
    **{f"without {name}": without(name) for name in ("key", "image_offset", "ordinal")},
    **{f"text as {name}": replaced(name, "x") for name in ("image_size", "ordinal")},
    **{f"no {name}": replaced(name, None, kind) for name, kind in (("key", pa.binary()), ("txt_offset", pa.int64()))},
    "no rows": lambda table: table.slice(0, 0),
}


@pytest.mark.parametrize("damage", [*CUTS, *TABLES])
def test_a_damaged_shard_table(folder: Path, damage: str) -> None:
    path = folder / "shards.parquet"
    CUTS[damage](path) if damage in CUTS else rewritten(path, TABLES[damage])
    with pytest.raises(UserError) as caught:
        load_manifest(folder)
    one_sentence(caught)


@pytest.mark.parametrize("damage", [*CUTS, *PARTS, "missing"])
def test_a_damaged_sample_table(folder: Path, damage: str) -> None:
    _, second = sorted((folder / "samples").iterdir())
    if damage == "missing":
        second.unlink()
    else:
        CUTS[damage](second) if damage in CUTS else rewritten(second, PARTS[damage])
    with pytest.raises(UserError) as caught:
        TarReader(load_manifest(folder)).read(5)
    one_sentence(caught)
    assert str(folder) in str(caught.value)


def test_every_flipped_bit_is_found_or_harmless(folder: Path) -> None:
    """Page checksums detect flipped bits in the data; flipped bits in the footer are detected or have no effect."""
    expected = [TarReader(load_manifest(folder)).read(index) for index in range(7)]
    rng, found = random.Random(15), 0
    for path in (folder / "shards.parquet", *sorted((folder / "samples").iterdir())):
        good = path.read_bytes()
        for _ in range(60):
            damaged = bytearray(good)
            damaged[rng.randrange(len(good))] ^= 1 << rng.randrange(8)
            path.write_bytes(damaged)
            try:
                reader = TarReader(load_manifest(folder))
                assert [reader.read(index) for index in range(7)] == expected
            except UserError as error:
                found += 1
                assert "\n" not in str(error)
        path.write_bytes(good)
    assert found > 60


@pytest.mark.parametrize(
    "shard",
    [
        Shard(path="{tar}", start=0, n=10**12, bytes=10**15),
        Shard(path="{tar}", start=0, n=10**12, bytes=20_480),
        Shard(path="{tar}", start=0, n=4, bytes=10**12),
        Shard(path="s3://b/0.tar", start=0, n=10**12, bytes=10**15),
        Shard(path="{tar}", start=0, n=-4, bytes=20_480),
        Shard(path="{tar}", start=7, n=4, bytes=20_480),
        Shard(path="{tar}", start=0, n=4, bytes=-1),
        Shard(path="a\0b", start=0, n=4, bytes=20_480),
    ],
)
def test_impossible_numbers_are_refused_before_anything_is_allocated(tmp_path: Path, shard: Shard) -> None:
    tar = write_pairs(tmp_path / "shards", [4]) / "00000.tar"
    (tmp_path / "m").mkdir()
    write_shards(Manifest([replace(shard, path=shard.path.replace("{tar}", str(tar)))]), tmp_path / "m")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UserError) as caught:
        open_manifest(str(tmp_path / "m"), tmp_path / "cache")
    one_sentence(caught)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KB


def test_results_of_an_interrupted_build(tmp_path: Path) -> None:
    """A build reuses the results of an interrupted build, but scans shards again if their results are unreadable."""
    paths, target = resolve_shards(str(write_pairs(tmp_path / "shards", [2, 2, 2]))), tmp_path / "m"
    with pytest.raises(KeyboardInterrupt), Worker() as first:
        write_manifest(target, paths, first, CHECKED, on_progress=interrupt_after(2))
    expected = write_manifest(tmp_path / "whole", paths, Worker(), CHECKED).shards
    finished = sorted((target / ".building").iterdir())
    assert len(finished) == 2 and (target / ".building").stat().st_mode & 0o77 == 0, "addresses may hold secrets"
    for groups, odd in ((2, b""), (2, b"[" * 99), (2, b"\xff"), (1, None)):
        copy = Path(shutil.copytree(target, tmp_path / "copy"))
        if odd is not None:
            (copy / ".building" / finished[0].name).write_bytes(odd)
        again = Worker()
        assert write_manifest(copy, paths, again, CHECKED).shards == expected
        assert again.groups == groups
        assert len(list((copy / "samples").iterdir())) == 3, "files of tables that nothing names are removed"
        shutil.rmtree(copy)
    tables = sorted((target / "samples").iterdir())[0]
    tables.write_bytes(tables.read_bytes()[:-1])
    with pytest.raises(UserError, match=rf"{tables.name} cannot be read") as caught:
        write_manifest(target, paths, Worker(), CHECKED)
    one_sentence(caught)
    tables.unlink()
    assert write_manifest(target, paths, Worker(), CHECKED).shards == expected


def test_a_name_that_is_not_utf_8(tmp_path: Path) -> None:
    shard = write_pairs(tmp_path / "shards", [2]) / "00000.tar"
    shard.rename(tmp_path / "shards" / "\udcff.tar")
    with pytest.raises(UserError, match="is not UTF-8; rename it") as caught:
        open_manifest(str(tmp_path / "shards"), tmp_path / "cache", 1)
    assert str(caught.value).encode()


def test_a_manifest_without_permission_need_not_be_removed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(pq, "ParquetFile", refuse)
    with pytest.raises(UserError, match=r"Permission denied\); check the permissions and the storage\.$"):
        load_manifest(folder)


@pytest.mark.parametrize("name", ["../shards.parquet", "part-x.txt", "/etc/passwd", None])
def test_only_files_of_the_folder_are_opened(folder: Path, name: str | None) -> None:
    rewritten(folder / "shards.parquet", replaced("part", name, pa.string()))
    if name is None:
        assert load_manifest(folder).samples is None
    else:
        with pytest.raises(UserError, match="a file that cannot contain sample tables"):
            load_manifest(folder)
