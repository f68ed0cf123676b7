"""Give samples the index by which a loss keeps their statistics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch.utils.data import Dataset


class IndexedDataset(Dataset[Any]):
    """A map-style dataset whose samples carry their index.

    A mapping gets the key `index`, a tuple or list gets the index as its last element.

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
    """Add `index` to webdataset samples: the shard's first index plus the sample's place in the shard.

    Use it as the stage after `wds.tarfile_to_samples()`, before samples are shuffled, dropped or renamed.

    Args:
        samples: webdataset's, with `__url__` and `__key__`, in the order of their tars.
        starts: shard URL -> index of its first sample; shards must not overlap.

    Raises:
        KeyError: a shard is not in `starts`.
    """
    url, first, place = "", "", 0
    for sample in samples:
        place += 1
        if sample["__url__"] != url or sample["__key__"] == first:  # a shard may also come twice in a row
            url, first, place = sample["__url__"], sample["__key__"], 0
        yield {**sample, "index": starts[url] + place}
