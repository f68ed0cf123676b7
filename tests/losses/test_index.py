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


def test_samples_of_a_torch_dataset_get_their_position() -> None:
    names = run(TORCH, pairs=pairs())
    assert torch.equal(names["images"], torch.stack([pairs()[i][0] for i in names["index"]]))
    assert IndexedDataset([{"text": "a"}, {"text": "b"}])[1] == {"text": "b", "index": 1}


def test_samples_of_a_hugging_face_dataset_keep_their_index_when_shuffled() -> None:
    datasets = pytest.importorskip("datasets")
    train_set = run(DATASETS, train_set=datasets.Dataset.from_dict({"text": list("abcd")}))["train_set"]
    rows = list(train_set.shuffle(seed=0))
    assert rows != list(train_set)
    assert {row["text"]: row["index"] for row in rows} == {"a": 0, "b": 1, "c": 2, "d": 3}
    added = train_set.remove_columns("index").add_column("index", list(range(4)))
    assert list(added) == list(train_set)
    assert list(IndexedDataset(train_set.remove_columns("index"))[2].items()) == [("text", "c"), ("index", 2)]


def shards(folder: Path, sizes: list[int]) -> list[str]:
    """Write shards whose samples contain the number of the shard and their position in it."""
    paths = []
    for number, size in enumerate(sizes):
        members: list[tuple[str, bytes]] = []
        for position in range(size):
            text = f"{number}/{position}".encode()
            members.append((f"{position:03d}.jpg", text))
            members.append((f"{position:03d}.txt", text))
        paths.append(str(write_tar(folder / f"{number}.tar", members)))
    return paths


def test_samples_of_a_webdataset_are_numbered_in_the_order_of_the_shards(tmp_path: Path) -> None:
    pytest.importorskip("webdataset")
    sizes = [3, 4, 2]
    names = run(WEBDATASET, urls=shards(tmp_path, sizes))
    assert names["samples"] == 9
    index_of_text: dict[bytes, int] = {}
    for _, texts, index in names["pipeline"]:
        index_of_text.update(zip(texts, index, strict=True))
    order: list[bytes] = []
    for number, size in enumerate(sizes):
        order.extend(f"{number}/{position}".encode() for position in range(size))
    assert index_of_text == {text: index for index, text in enumerate(order)}


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
    captions_and_indices: list[tuple[str, int]] = []
    for texts, index in pipeline:
        captions_and_indices.extend(zip(texts, index.tolist(), strict=True))
    assert sorted(captions_and_indices) == sorted([(f"caption {index}", index) for index in (0, 2, 3, 4)] * 2)


def test_an_unknown_shard_is_named() -> None:
    with pytest.raises(KeyError, match=r"b\.tar"):
        list(add_index([{"__url__": "b.tar", "__key__": "0"}], {"a.tar": 0}))
