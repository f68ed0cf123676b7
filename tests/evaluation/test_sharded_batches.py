"""Check that the same workers load evaluation sets and pairs, with the same results as in this process."""

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from evaluation_sets import captioned_set, labeled_set, transform, write_shards
from tars import manifest_of, tokenize, write_pairs
from torch import Tensor

from neuclip_ds.data.dataset import PairDataset
from neuclip_ds.data.images import EvalTransform
from neuclip_ds.data.loader import IN_PROCESS, Loader, LoaderOptions, eval_jobs
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.errors import UserError
from neuclip_ds.evaluation.retrieval import read_captions
from neuclip_ds.evaluation.sets import Sample, open_shards
from neuclip_ds.evaluation.sharded_batches import ShardedBatch, decode, sharded_batches

OPTIONS = LoaderOptions(workers=2, prefetch=2, timeout=60)


@pytest.fixture(scope="module")
def loader() -> Iterator[Loader]:
    with closing(Loader(OPTIONS)) as loader:
        yield loader


def pixels_and_process(sample: Sample) -> tuple[Tensor, int]:
    return decode(sample, transform), os.getpid()


def load(folder: Path, loader: Loader, size: int = 50) -> list[ShardedBatch[tuple[Tensor, int]]]:
    return list(sharded_batches(open_shards(folder), pixels_and_process, Communicator(), size, loader))


def test_batches_from_workers_equal_those_of_this_process(tmp_path: Path, loader: Loader) -> None:
    labeled_set(tmp_path, 130)
    from_workers = load(tmp_path, loader)
    expected = load(tmp_path, IN_PROCESS)
    assert [batch.n_valid for batch in expected] == [50, 50, 30]
    for batch, expected_batch in zip(from_workers, expected, strict=True):
        assert batch.n_valid == expected_batch.n_valid
        for (pixels, _), (expected_pixels, _) in zip(batch.rows, expected_batch.rows, strict=True):
            assert torch.equal(pixels, expected_pixels)


def worker_processes(folder: Path, loader: Loader) -> set[int]:
    """Return the ids of the processes that load the set in a folder."""
    processes: set[int] = set()
    for batch in load(folder, loader):
        processes |= {process for _, process in batch.rows}
    return processes


def test_sets_and_pairs_share_processes(tmp_path: Path) -> None:
    captioned_set(tmp_path / "captioned", [1, 2, 3])
    labeled_set(tmp_path / "labeled", 70)
    manifest = manifest_of(write_pairs(tmp_path / "pairs", [7, 4]))
    pairs = PairDataset(manifest, EvalTransform(16), tokenize)
    with closing(Loader(OPTIONS, {"val": pairs})) as loader:
        processes = worker_processes(tmp_path / "labeled", loader)
        assert worker_processes(tmp_path / "labeled", loader) == processes
        for _ in range(2):
            batches = list(loader.batches("val", eval_jobs(manifest, 0, 1, 4)))
            assert torch.cat([batch.index for batch in batches]).tolist() == [*range(11), -1]
        captions: list[list[str]] = []
        captioned = open_shards(tmp_path / "captioned")
        for captioned_batch in sharded_batches(captioned, read_captions, Communicator(), 2, loader):
            captions += captioned_batch.rows
        assert [len(row) for row in captions] == [1, 3, 2]  # in the order of the shards
        assert worker_processes(tmp_path / "labeled", loader) == processes
    assert os.getpid() not in processes


@pytest.mark.parametrize("broken", [b"1 2 x", None], ids=["undecodable", "absent"])
def test_a_broken_sample_is_the_same_error_as_in_this_process(
    broken: bytes | None, tmp_path: Path, loader: Loader
) -> None:
    samples = [{"jpg": b"1 2 3", "cls": b"0"} for _ in range(90)]
    samples[40] = {"cls": b"0"} if broken is None else {"jpg": broken, "cls": b"0"}
    write_shards(tmp_path, samples)
    messages = []
    for loader_or_this_process in (loader, IN_PROCESS):
        with pytest.raises(UserError, match="sample s0000040") as raised:
            load(tmp_path, loader_or_this_process)
        messages.append(str(raised.value))
    assert messages[0].removeprefix("rank 0: ") == messages[1].removeprefix("rank 0: ")
