"""Add to each sample its index in the dataset, which some losses need, such as those with per-sample statistics."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch.utils.data import Dataset, IterableDataset


class IndexedDataset(Dataset[Any]):
    """A map-style dataset that wraps another one and adds each sample's index to the sample.

    A sample that is a mapping gets the key `index`; a tuple or list gets the index as its last element; any other
    sample, such as a tensor, becomes a pair of the sample and the index. All other attributes are taken from the
    wrapped dataset.

    Example:
        import torch
        from torch.utils.data import DataLoader, TensorDataset
        from neuclip_ds import IndexedDataset

        pairs = TensorDataset(torch.randn(100, 3, 8, 8), torch.randint(50, (100, 5)))
        loader = DataLoader(IndexedDataset(pairs), batch_size=16, shuffle=True)
        images, texts, index = next(iter(loader))  # index: (16,) int64
    """

    def __init__(self, dataset: Any) -> None:
        """
        Args:
            dataset: dataset with `__getitem__` and `__len__`, such as a torch `Dataset` or a list.

        Raises:
            TypeError: the dataset is an iterable-style dataset, whose samples have no index.
        """
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
            raise TypeError(
                f"{type(dataset).__name__} is an iterable-style dataset, whose samples have no index: yield each "
                "sample's index from the dataset, or use neuclip_ds.add_index for webdataset shards."
            )
        self._dataset = dataset

    def __getattr__(self, name: str) -> Any:
        # `_dataset` is missing in a copy under construction; the wrapped dataset's `__getitems__` would omit the index
        if name == "_dataset" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        sample = self._dataset[index]
        if isinstance(sample, Mapping):
            return {**sample, "index": index}
        if isinstance(sample, tuple | list):
            return (*sample, index)
        return sample, index


def add_index(samples: Iterable[dict[str, Any]], starts: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    """Add `__index__` to webdataset samples: the shard's first index plus the sample's position in the shard.

    Apply this function right after `wds.tarfile_to_samples()`, before samples are shuffled, dropped or renamed.
    `wds.decode` ignores keys that start with `__`; `wds.to_tuple("image", "text", "__index__")` selects the index.

    Args:
        samples: webdataset samples with `__url__` and `__key__`, in their order in the tar files.
        starts: mapping from each shard's URL to the index of its first sample; the shards' index ranges must not
            overlap.

    Returns:
        An iterator over the samples, each with the int `__index__`.

    Raises:
        KeyError: while iterating, a shard is not in `starts`.

    Example:
        from functools import partial
        import webdataset as wds
        from neuclip_ds import add_index

        index = partial(add_index, starts={"00000.tar": 0, "00001.tar": 1000})
        to_tuple = wds.to_tuple("jpg", "txt", "__index__")
        read = [wds.SimpleShardList(["00000.tar", "00001.tar"]), wds.tarfile_to_samples(), index]
        pipeline = wds.DataPipeline(*read, wds.shuffle(1000), to_tuple)

        sample = {"__url__": "00001.tar", "__key__": "cat"}
        print(next(index([sample]))["__index__"])  # 1000
    """
    shard = ""
    first_key = ""
    position = 0
    for sample in samples:
        url = sample["__url__"]
        key = sample["__key__"]
        if url != shard or key == first_key:  # a shard may be drawn twice in a row
            shard = url
            first_key = key
            position = 0
        yield {**sample, "__index__": starts[url] + position}
        position += 1
