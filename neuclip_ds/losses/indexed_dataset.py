"""Add to each sample the index that losses with per-sample statistics need."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch.utils.data import Dataset


class IndexedDataset(Dataset[Any]):
    """A map-style dataset that wraps another one and adds each sample's index to the sample.

    A sample that is a mapping gets the key `index`; a tuple or list gets the index as its last element.

    Example:
        ```python
        dataset = IndexedDataset(CocoCaptions(...))
        images, texts, index = next(iter(DataLoader(dataset, batch_size=64, shuffle=True)))
        ```
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        sample = self._dataset[index]
        if isinstance(sample, Mapping):
            return {**sample, "index": index}
        return (*sample, index)


def add_index(samples: Iterable[dict[str, Any]], starts: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    """Add `__index__` to webdataset samples: the shard's first index plus the sample's position in the shard.

    Apply this function right after `wds.tarfile_to_samples()`, before samples are shuffled, dropped or renamed.
    `wds.decode` ignores keys that start with `__`; `wds.to_tuple("image", "text", "__index__")` selects the index.

    Args:
        samples: webdataset samples with `__url__` and `__key__`, in their order in the tar files.
        starts: maps each shard's URL to the index of its first sample; the shards' index ranges must not overlap.

    Raises:
        KeyError: a shard is not in `starts`.

    Example:
        ```python
        read = [wds.SimpleShardList(urls), wds.tarfile_to_samples(), partial(add_index, starts=starts)]
        pipeline = wds.DataPipeline(*read, wds.shuffle(1000), wds.to_tuple("jpg", "txt", "__index__"))
        ```
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
