"""Manifests that are cut, empty, lack a part or are impossible: one sentence, and nothing is allocated."""

from __future__ import annotations

import json
import random
import resource
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from small_runs import train
from tars import write_pairs
from test_build import Here

from neuclip_ds.data.build import open_manifest, write_manifest
from neuclip_ds.data.manifest import Manifest, Shard, load_manifest, write_shards
from neuclip_ds.data.readers import TarReader
from neuclip_ds.data.sample_table import SampleParts
from neuclip_ds.data.scan import ScanOptions
from neuclip_ds.data.shards import resolve_shards
from neuclip_ds.data.uids import UidFiles
from neuclip_ds.errors import UserError

CHECKED = ScanOptions(checksum=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shards = write_pairs(tmp_path / "shards", [4, 3])
    write_manifest(tmp_path / "m", resolve_shards(str(shards)), Here(), CHECKED)
    return tmp_path / "m"


def one_sentence(error: pytest.ExceptionInfo[UserError]) -> None:
    message = str(error.value)
    assert "\n" not in message and "Traceback" not in message and len(message) < 600


def rewritten(path: Path, change: Callable[[pa.Table], pa.Table]) -> None:
    table = pq.read_table(path)
    pq.write_table(change(table).replace_schema_metadata(table.schema.metadata), path)


def without(name: str) -> Callable[[pa.Table], pa.Table]:
    return lambda table: table.drop_columns([name])


def as_text(name: str) -> Callable[[pa.Table], pa.Table]:
    return lambda table: table.set_column(table.column_names.index(name), name, pa.array(["x"] * len(table)))


def as_null(name: str) -> Callable[[pa.Table], pa.Table]:
    kind = {"path": pa.string(), "removed": pa.bool_(), "key": pa.binary()}.get(name, pa.int64())
    return lambda table: table.set_column(table.column_names.index(name), name, pa.nulls(len(table), kind))


CUTS = {
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-20]),
    "half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "text": lambda path: path.write_text("not parquet at all, but long enough to be read as such"),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
}
TABLES = {
    **{f"without {name}": without(name) for name in ("path", "n", "bytes", "start", "removed")},
    **{f"text as {name}": as_text(name) for name in ("n", "crc32", "removed")},
    **{f"no {name}": as_null(name) for name in ("path", "n", "bytes", "removed")},
    "no rows": lambda table: table.slice(0, 0),
}
PARTS = {
    **{f"without {name}": without(name) for name in ("key", "image_offset", "ordinal")},
    **{f"text as {name}": as_text(name) for name in ("image_size", "ordinal")},
    **{f"no {name}": as_null(name) for name in ("key", "txt_offset")},
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
    """Page checksums find those in the data; the footer's are found, or name what nobody reads."""
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


def impossible(folder: Path, *shards: Shard) -> Path:
    folder.mkdir()
    write_shards(Manifest(shards), folder)
    return folder


@pytest.mark.parametrize(
    "shard",
    [
        Shard("{tar}", 0, 10**12, 10**15),
        Shard("{tar}", 0, 10**12, 20_480),
        Shard("{tar}", 0, 4, 10**12),
        Shard("s3://b/0.tar", 0, 10**12, 10**15),
        Shard("{tar}", 0, -4, 20_480),
        Shard("{tar}", 7, 4, 20_480),
        Shard("{tar}", 0, 4, -1),
        Shard("a\0b", 0, 4, 20_480),
    ],
)
def test_impossible_numbers_are_refused_before_anything_is_allocated(tmp_path: Path, shard: Shard) -> None:
    tar = write_pairs(tmp_path / "shards", [4]) / "00000.tar"
    folder = impossible(tmp_path / "m", shard._replace(path=shard.path.replace("{tar}", str(tar))))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UserError) as caught:
        open_manifest(str(folder), tmp_path / "cache")
    one_sentence(caught)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KB


def test_an_offset_or_size_of_10_to_the_12_is_a_bad_read(folder: Path) -> None:
    huge = {"image_size": 10**12, "txt_offset": 10**12}

    def change(table: pa.Table) -> pa.Table:
        for name, value in huge.items():
            table = table.set_column(table.column_names.index(name), name, pa.array([value] * len(table)))
        return table

    rewritten(sorted((folder / "samples").iterdir())[1], change)
    with pytest.raises(OSError, match=r"more than the limit|truncated"):
        TarReader(load_manifest(folder)).read(5)


def test_a_run_says_one_sentence(folder: Path, tmp_path: Path) -> None:
    sorted((folder / "samples").iterdir())[1].write_bytes(b"")
    done = train(tmp_path, str(folder), 1)
    assert (done.returncode, done.stderr.count("Traceback")) == (2, 0)
    assert "cannot be read" in done.stderr.splitlines()[-1]


def test_results_of_an_interrupted_build(tmp_path: Path) -> None:
    paths = resolve_shards(str(write_pairs(tmp_path / "shards", [2, 2, 2])))
    with pytest.raises(KeyboardInterrupt):
        write_manifest(tmp_path / "m", paths, Here(2))
    (journal,) = (tmp_path / "m" / ".building").glob("scans-*.jsonl")
    good = journal.read_bytes()
    for content in (b"", b"[", b"[1]", b"{}", b"[[[1], 2]]", b"\xff", b"[]", b"[" * 99_999, good[1:-1]):
        journal.write_bytes(content + b"\n")
        with pytest.raises(UserError, match=r"scans-.*.jsonl.* is damaged; remove it") as caught:
            write_manifest(tmp_path / "m", paths, Here())
        one_sentence(caught)
    journal.unlink()
    journal.with_name("scans-killed.jsonl").write_bytes(good[:-1])  # its last line is unfinished
    assert write_manifest(tmp_path / "m", paths, Here(2)).n == 6
    (tmp_path / "m" / "bad_samples.jsonl").write_text(json.dumps([1]) + "\n")
    with pytest.raises(UserError, match=r"bad_samples.jsonl.* is damaged"):
        write_manifest(tmp_path / "m", paths, Here(), update=True)


def test_tables_and_options_of_an_interrupted_build(tmp_path: Path) -> None:
    paths = resolve_shards(str(write_pairs(tmp_path / "shards", [2, 2, 2])))
    with pytest.raises(KeyboardInterrupt):
        write_manifest(tmp_path / "m", paths, Here(3), CHECKED)
    (tables,) = (tmp_path / "m" / ".building").glob("tables-*.bin")
    good = tables.read_bytes()
    for content in (b"", good[:-1], good[:9] + b"\0" + good[10:]):
        tables.write_bytes(content)
        with pytest.raises(UserError, match=r"tables-.*.bin.* is damaged; remove it") as caught:
            write_manifest(tmp_path / "m", paths, Here(), CHECKED)
        one_sentence(caught)
    (tmp_path / "m" / ".building" / "options.json").write_bytes(b"\xff{")
    again = Here()
    assert write_manifest(tmp_path / "m", paths, again, CHECKED).n == 6
    assert again.done == 3 + 3, "shards, and files of tables"


def test_uid_files_of_every_wrong_kind(tmp_path: Path) -> None:
    path = tmp_path / "uids.npy"
    good = np.array([(1, 2)], dtype=np.dtype("u8,u8"))
    np.save(path, good)
    header = path.read_bytes()
    np.savez(tmp_path / "uids.npz", good)
    np.save(tmp_path / "floats.npy", np.array([(1, 2)], dtype=np.dtype("f8,f8")))
    contents = [
        *(
            b"",
            header[:20],
            header[:-1],
            header.replace(b"(1,)", b"(9" + b"9" * 10 + b",)"),
            b"\x93NUMPY" + b"\xff" * 99,
        ),
        *(header.replace(b"'shape'", b"'shape"), (tmp_path / "uids.npz").read_bytes()),
        (tmp_path / "floats.npy").read_bytes(),
    ]
    for content in contents:
        path.write_bytes(content)
        with pytest.raises(UserError, match="uid file") as caught:
            UidFiles([path])
        one_sentence(caught)


def test_a_name_that_is_not_utf_8(tmp_path: Path) -> None:
    shard = write_pairs(tmp_path / "shards", [2]) / "00000.tar"
    shard.rename(tmp_path / "shards" / "\udcff.tar")
    with pytest.raises(UserError, match="is not UTF-8; rename it") as caught:
        open_manifest(str(tmp_path / "shards"), tmp_path / "cache", 1)
    assert str(caught.value).encode()


def test_parts_with_odd_names_are_no_parts(folder: Path) -> None:
    (folder / "samples" / "part-x-y.parquet").write_bytes(b"")
    SampleParts(folder / "samples").check([4, 3])
