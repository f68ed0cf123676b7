"""Drop each sample whose image is nearly identical to a kept image, based on features from `neuclip-ds embed`.

Samples are visited in decreasing order of a column's values, and a sample is dropped if the cosine similarity between
its image and a kept image reaches the threshold. SemDeDup (Abbas et al., 2023) does this within clusters. Here, all n
samples are compared, on a GPU if one is available; with features of width d, this takes at most n^2 d multiplications.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from torch import Tensor

from neuclip_ds.data.uids import UidArray, parse_uid
from neuclip_ds.embedding.select import IDENTITY, feature_tables
from neuclip_ds.errors import UserError, explained

_ROWS = 4096  # samples in a block


def drop_near_duplicates(folders: Sequence[Path], column: str, threshold: float, uids: UidArray) -> UidArray:
    """Return the uids of the samples to keep, in the order of the n distinct `uids`.

    Larger values in `column` take precedence; near-duplicates have a cosine similarity of at least `threshold`. All n
    features stay in memory, in their stored dtype. Raises UserError if a folder has no features or cannot be read.
    """
    places = {(int(high), int(low)): place for place, (high, low) in enumerate(uids.tolist())}
    values, features = np.full(len(uids), -np.inf), np.empty((0, 0))
    for table, image in _parts(folders, column):
        features = features if features.size else np.zeros((len(uids), image.shape[1]), image.dtype)
        if image.shape[1] != features.shape[1]:
            raise UserError(f"The folders have features of widths {image.shape[1]} and {features.shape[1]}; name one.")
        found = [places.get(uid, -1) if (uid := parse_uid(text)) else -1 for text in table.column("uid").to_pylist()]
        rows, place = np.arange(table.num_rows), np.array(found, dtype=np.int64)
        value = table.column(column).cast(pa.float64()).to_numpy()
        rows = rows[place >= 0]
        rows = rows[value[rows] > values[place[rows]]]
        rows = rows[np.argsort(value[rows], kind="stable")]  # a uid may occur several times: its best row comes last
        features[place[rows]], values[place[rows]] = image[rows], value[rows]
    order = np.argsort(-values, kind="stable")
    kept = np.zeros(len(uids), dtype=bool)
    kept[order[_distinct(torch.from_numpy(features[order]), threshold).numpy()]] = True
    return uids[kept]


def _parts(folders: Sequence[Path], column: str) -> Iterator[tuple[pa.Table, NDArray[np.floating]]]:
    """Yield each part's table of uids and values, and the part's (n, d) image features."""
    for folder in folders:
        if not (folder / IDENTITY).is_file():
            raise UserError(f"{folder} lacks features: name the --out folder of neuclip-ds embed.")
        for path in feature_tables(folder):
            with explained(f"The features in {path} cannot be read", "run embed again"):
                table = pq.read_table(path, columns=["uid", column, "image"])
            if table.num_rows:
                image = table.column("image").combine_chunks()
                yield table, image.flatten().to_numpy().reshape(table.num_rows, -1)


def _distinct(features: Tensor, threshold: float) -> Tensor:
    """Return the indices of the (n, d) L2-normalized features to keep: those not near any feature kept before them."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kept = features.new_empty(features.shape, device=device)
    numbers, count = list[Tensor](), 0
    for start in range(0, len(features), _ROWS):
        block = features[start : start + _ROWS].to(device)
        near = torch.zeros(len(block), dtype=torch.bool, device=device)
        for begin in range(0, count, _ROWS):
            earlier = kept[begin : min(begin + _ROWS, count)]
            near |= (block.float() @ earlier.float().T >= threshold).any(dim=1)
        block, places = block[~near], torch.arange(start, start + len(block))[~near.cpu()]
        pairs = (block.float() @ block.float().T >= threshold).tril(-1).cpu()
        stays = torch.ones(len(block), dtype=torch.bool)
        for row in pairs.any(dim=1).nonzero().flatten().tolist():
            stays[row] = not (pairs[row] & stays).any()
        block, places = block[stays.to(device)], places[stays]
        kept[count : count + len(block)] = block
        numbers.append(places)
        count += len(block)
    return torch.cat(numbers)
