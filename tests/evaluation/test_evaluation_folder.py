"""Evaluation sets on disk, and their batches sharded over ranks."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
from evaluation_sets import write_shards

from neuclip_ds.errors import UserError
from neuclip_ds.evaluation.folder import EvaluationFolder, Sample
from neuclip_ds.evaluation.sharded_batches import sharded_batches


def numbered(folder: Path, count: int, shards: int = 2) -> EvaluationFolder:
    return EvaluationFolder.read(write_shards(folder, [{"txt": str(n).encode()} for n in range(count)], shards))


def number(sample: Sample) -> int:
    return int(sample.text("txt"))


def test_yields_what_webdataset_yields(tmp_path: Path) -> None:
    import webdataset

    folder = numbered(tmp_path, 11, 3)
    theirs = webdataset.WebDataset([str(shard) for shard in folder.shards], shardshuffle=False, empty_check=False)
    assert [int(sample["txt"]) for sample in theirs] == [number(sample) for sample in folder.samples()]


def test_kind_comes_from_the_file(tmp_path: Path) -> None:
    assert numbered(tmp_path, 1).kind == "classification"
    (tmp_path / "dataset_type.txt").write_text("Retrieval\n")
    assert EvaluationFolder.read(tmp_path).kind == "retrieval"


def test_no_shard_stays_open(tmp_path: Path) -> None:
    folder = numbered(tmp_path, 40, 20)
    kept = [sample for sample in folder.samples() if sample.text("txt") == "3"]
    gc.collect()
    opened = [str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    assert len([path for path in opened if path.startswith(str(tmp_path))]) == 1
    assert number(kept.pop()) == 3


def test_damaged_shard_is_refused(tmp_path: Path) -> None:
    folder = numbered(tmp_path, 6, 1)
    data = bytearray(folder.shards[0].read_bytes())
    data[1024:1200] = b"x" * 176  # the second header
    folder.shards[0].write_bytes(data)
    with pytest.raises(UserError, match=r"0\.tar is damaged at byte 1024; download it again"):
        list(folder.samples())


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("count", [0, 1, 2, 7, 12, 13])
def test_every_sample_goes_to_one_rank_once(tmp_path: Path, run_ranks: Any, count: int, world_size: int) -> None:
    folder = numbered(tmp_path, count)
    sharded = run_ranks(world_size, lambda rank: list(sharded_batches(folder, number, rank, 2)))
    assert len({len(batches) for batches in sharded}) == 1
    assert all(batch.rows for batches in sharded for batch in batches)
    valid = [row for batches in sharded for batch in batches for row in batch.rows[: batch.n_valid]]
    assert sorted(valid) == list(range(count))


def test_different_copies_are_refused(tmp_path: Path, run_ranks: Any) -> None:
    copies = [numbered(tmp_path / name, count) for name, count in (("a", 5), ("b", 30))]
    with pytest.raises(UserError, match="the same copy"):
        run_ranks(2, lambda rank: list(sharded_batches(copies[rank.rank], number, rank, 2)))


def test_unreadable_shard_stops_all_ranks(tmp_path: Path, run_ranks: Any) -> None:
    folder = numbered(tmp_path, 9)
    folder.shards[1].unlink()
    folder.shards[1].mkdir()
    with pytest.raises(UserError, match=r"rank 0: .*1\.tar cannot be"):
        run_ranks(2, lambda rank: list(sharded_batches(folder, number, rank, 2)))
