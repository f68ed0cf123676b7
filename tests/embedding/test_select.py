"""Which uids a rule keeps, and that the files are those that the data engine and DataComp read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from embedded_shards import uid, write

from neuclip_ds.data.build import build_manifest
from neuclip_ds.data.manifest import Manifest
from neuclip_ds.data.scan import ScanOptions, scan_shard
from neuclip_ds.data.uids import UID, UidFiles, parse_uid
from neuclip_ds.embedding.parts import Parts
from neuclip_ds.embedding.select import Rule, Selection, Table, select
from neuclip_ds.errors import UserError

SCORES = [0.5, None, 0.1, 0.9, float("nan"), 0.9, 0.3, 0.7]


@pytest.fixture
def pool(tmp_path: Path) -> Path:
    """Metadata in two files; number 7 has no uid, number 5 that of number 3."""
    uids = [uid(n) for n in (0, 1, 2, 3, 4, 3, 6)] + [None]
    table = pa.table({"uid": uids, "score": SCORES, "words": ["a"] * 8})
    (tmp_path / "pool" / "deep").mkdir(parents=True)
    pq.write_table(table[:3], tmp_path / "pool" / "a.parquet")
    pq.write_table(table[3:], tmp_path / "pool" / "deep" / "b.parquet")
    return tmp_path / "pool"


def listed(path: Path) -> list[tuple[int, int]]:
    return [tuple(pair) for pair in np.load(path).tolist()]


def words(*numbers: int) -> list[tuple[int, int]]:
    return sorted(found for n in numbers if (found := parse_uid(uid(n))) is not None)


@pytest.mark.parametrize(
    ("rule", "kept"),
    [
        (Rule(minimum=0.5), (0, 3)),
        (Rule(maximum=0.3), (2, 6)),
        (Rule(0.2, 0.5), (0, 6)),
        (Rule(top=0.5), (3,)),  # 0.9, 0.9 and 0.7, which has no uid
        (Rule(top=1 / 6), (3,)),  # one of two equal values
        (Rule(top=1.0), (0, 2, 3, 6)),
        (Rule(minimum=0.2, top=1.0), (0, 3, 6)),
    ],
)
def test_rules(tmp_path: Path, pool: Path, rule: Rule, kept: tuple[int, ...]) -> None:
    found = select(Table([pool], "score", "uid"), rule, tmp_path / "kept.npy")
    assert listed(tmp_path / "kept.npy") == words(*kept)
    assert found.kept == len(kept) and (found.samples, found.without_value) == (8, 2)
    UidFiles([tmp_path / "kept.npy"]).check_order()
    assert np.load(tmp_path / "kept.npy").dtype == np.dtype("u8,u8")


def test_a_summary(tmp_path: Path, pool: Path) -> None:
    found = select(Table([pool], "score", "uid"), Rule(top=0.5), tmp_path / "kept.npy")
    assert found == Selection(kept=1, samples=8, without_value=2, without_uid=1, minimum=0.7)


def test_within_other_lists(tmp_path: Path, pool: Path) -> None:
    np.save(tmp_path / "list.npy", np.array(words(0, 1, 6), dtype=UID))
    np.save(tmp_path / "other.npy", np.array(words(0, 3), dtype=UID))
    table = Table([pool], "score", "uid")
    select(table, Rule(minimum=0.0), tmp_path / "kept.npy", [tmp_path / "list.npy"])
    assert listed(tmp_path / "kept.npy") == words(0, 6)
    select(table, Rule(minimum=0.0), tmp_path / "kept.npy", [tmp_path / "list.npy", tmp_path / "other.npy"])
    assert listed(tmp_path / "kept.npy") == words(0)


def test_mistakes(tmp_path: Path, pool: Path) -> None:
    with pytest.raises(UserError, match="has no column similarity: choose --column from uid, score, words"):
        Table([pool], "similarity", "uid")
    with pytest.raises(UserError, match="holds no numbers"):
        select(Table([pool], "words", "uid"), Rule(minimum=0.0), tmp_path / "kept.npy")
    with pytest.raises(UserError, match="None of 8 samples is kept"):
        select(Table([pool], "score", "uid"), Rule(minimum=2.0), tmp_path / "kept.npy")
    with pytest.raises(UserError, match="has a uid of 32 hex digits"):
        select(Table([pool], "score", "words"), Rule(minimum=0.0), tmp_path / "kept.npy")
    with pytest.raises(UserError, match="is no parquet file and no folder that holds one"):
        Table([tmp_path / "absent"], "score", "uid")


@pytest.mark.parametrize("file_format", ["parquet", "npy"])
def test_a_data_set_of_the_best_by_similarity(tmp_path: Path, manifest: Manifest, file_format: str) -> None:
    out = tmp_path / "out"
    write(out, manifest, file_format=file_format)
    (out / "manifests").mkdir()
    pq.write_table(pa.table({"path": ["a.tar"]}), out / "manifests" / "shards.parquet")
    parts = Parts(out)
    rows = [row for number in parts.numbers for row in parts.table(number).to_pylist() if row["uid"]]
    best = sorted(rows, key=lambda row: -row["similarity"])[:5]
    rule = Rule(minimum=best[-1]["similarity"])
    select(Table([out], "similarity", "uid"), rule, tmp_path / "kept.npy")
    options = ScanOptions(uids=(str(tmp_path / "kept.npy"),))
    tables = [scan_shard(shard.path, options)[1] for shard in manifest.shards]
    keys = {key.decode() for table in tables for key in table.split_keys()}
    assert keys == {row["key"] for row in best}
    assert build_manifest([manifest.shards[0].path], 1).n == 5
