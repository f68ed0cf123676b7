"""Samples keep their index in the dataset through the page's pipelines and webdataset's usual stages."""

from pathlib import Path
from typing import Any

import pytest
import torch
from replay import code_blocks, pairs
from tars import write_pairs, write_tar

from neuclip_ds.losses import IndexedDataset, add_index

TORCH, DATASETS, WEBDATASET = code_blocks("Give samples their index")


def run(code: str, **names: Any) -> dict[str, Any]:
    exec(compile(code, "page", "exec"), names)
    return names


def test_a_torch_dataset() -> None:
    names = run(TORCH, pairs=pairs())
    assert torch.equal(names["images"], torch.stack([pairs()[i][0] for i in names["index"]]))
    assert IndexedDataset([{"text": "a"}, {"text": "b"}])[1] == {"text": "b", "index": 1}


def test_hugging_face_datasets() -> None:
    datasets = pytest.importorskip("datasets")
    train_set = run(DATASETS, train_set=datasets.Dataset.from_dict({"text": list("abcd")}))["train_set"]
    rows = list(train_set.shuffle(seed=0))
    assert rows != list(train_set)
    assert {row["text"]: row["index"] for row in rows} == {"a": 0, "b": 1, "c": 2, "d": 3}
    added = train_set.remove_columns("index").add_column("index", list(range(4)))
    assert list(added) == list(train_set)
    assert list(IndexedDataset(train_set.remove_columns("index"))[2].items()) == [("text", "c"), ("index", 2)]


def shards(folder: Path, sizes: list[int]) -> list[str]:
    paths = []
    for number, size in enumerate(sizes):
        texts = {f"{place:03d}": f"{number}/{place}".encode() for place in range(size)}
        members = [(f"{key}.{ending}", text) for key, text in texts.items() for ending in ("jpg", "txt")]
        paths.append(str(write_tar(folder / f"{number}.tar", members)))
    return paths


def test_webdataset(tmp_path: Path) -> None:
    pytest.importorskip("webdataset")
    sizes = [3, 4, 2]
    names = run(WEBDATASET, urls=shards(tmp_path, sizes))
    assert names["samples"] == 9
    found = {text: index for _, texts, places in names["pipeline"] for text, index in zip(texts, places, strict=True)}
    order = [f"{number}/{place}".encode() for number, size in enumerate(sizes) for place in range(size)]
    assert found == {text: index for index, text in enumerate(order)}


def test_samples_of_shards_get_their_index_through_the_usual_stages(tmp_path: Path) -> None:
    write_pairs(tmp_path, (3, 2), replace={1: {"json": b"{}"}})  # the second sample has no caption
    first, second = (str(tmp_path / f"{number:05d}.tar") for number in range(2))
    webdataset = pytest.importorskip("webdataset")
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
