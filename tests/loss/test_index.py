"""Samples carry their place in the data set, in map-style datasets and through webdataset's stages."""

from __future__ import annotations

from pathlib import Path

import pytest
import webdataset
from tars import write_pairs
from torch.utils.data import DataLoader

from neuclip_ds.loss import IndexedDataset, add_index


def test_samples_of_a_dataset_get_their_index() -> None:
    tuples = DataLoader(IndexedDataset([("a", 1.0), ("b", 2.0), ("c", 3.0)]), batch_size=2)
    assert [(list(text), index.tolist()) for text, _, index in tuples] == [(["a", "b"], [0, 1]), (["c"], [2])]
    mappings = IndexedDataset([{"text": "a"}, {"text": "b"}])
    assert len(mappings) == 2 and mappings[1] == {"text": "b", "index": 1}


def test_samples_of_shards_get_their_index_through_the_usual_stages(tmp_path: Path) -> None:
    write_pairs(tmp_path, (3, 2), replace={1: {"json": b"{}"}})  # the second sample has no caption
    first, second = (str(tmp_path / f"{number:05d}.tar") for number in range(2))
    pipeline = webdataset.DataPipeline(
        webdataset.SimpleShardList([second, first, first, second]),  # a shard may be drawn twice in a row
        webdataset.tarfile_to_samples(),
        lambda samples: add_index(samples, {first: 0, second: 3}),
        webdataset.shuffle(5),
        webdataset.select(lambda sample: "txt" in sample),
        webdataset.decode("pilrgb"),
        webdataset.to_tuple("txt", "__index__"),
        webdataset.batched(4),
    )
    found = [pair for texts, index in pipeline for pair in zip(texts, index.tolist(), strict=True)]
    assert sorted(found) == sorted([(f"caption {index}", index) for index in (0, 2, 3, 4)] * 2)


def test_an_unknown_shard_is_named() -> None:
    with pytest.raises(KeyError, match=r"b\.tar"):
        list(add_index([{"__url__": "b.tar", "__key__": "0"}], {"a.tar": 0}))
