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

from neuclip_ds.data.feature_parts import EMBEDDING, PART_SUFFIX, map_part
from neuclip_ds.data.uids import UidArray, parse_uid
from neuclip_ds.embedding.select import feature_tables
from neuclip_ds.errors import UserError, explained


def drop_near_duplicates(
    folders: Sequence[Path], column: str, threshold: float, uids: UidArray, chunk: int = 4096
) -> UidArray:
    """Return the uids of the samples to keep, in the order of the n distinct `uids`.

    Larger values in `column` take precedence; near-duplicates have a cosine similarity of at least `threshold`. All n
    features stay in memory, in their stored dtype; chunks of `chunk` samples are compared at once. Raises UserError if
    a folder has no features or cannot be read.
    """
    row_of_uid = {}
    for row, (high, low) in enumerate(uids.tolist()):
        row_of_uid[high, low] = row
    best_values = np.full(len(uids), -np.inf)
    features = np.empty((len(uids), 0))  # (n, d), allocated when d is known
    for table, part_features in _parts(folders, column):
        width = part_features.shape[1]
        if features.shape[1] == 0:
            features = np.zeros((len(uids), width), part_features.dtype)
        if width != features.shape[1]:
            raise UserError(f"The folders have features of widths {width} and {features.shape[1]}; name one.")

        # find the requested samples of this part, and where to store them
        part_rows = []
        target_rows = []
        for part_row, text in enumerate(table.column("uid").to_pylist()):
            uid = parse_uid(text)
            if uid is not None and uid in row_of_uid:
                part_rows.append(part_row)
                target_rows.append(row_of_uid[uid])
        sources = np.array(part_rows, dtype=np.int64)
        targets = np.array(target_rows, dtype=np.int64)

        # a uid may occur several times: store its best row
        values = table.column(column).cast(pa.float64()).to_numpy()[sources]
        is_better = values > best_values[targets]
        ascending = np.argsort(values[is_better], kind="stable")  # of several rows of a uid, the best is stored last
        sources = sources[is_better][ascending]
        targets = targets[is_better][ascending]
        features[targets] = part_features[sources]
        best_values[targets] = values[is_better][ascending]

    descending = np.argsort(-best_values, kind="stable")
    kept_positions = _distinct(torch.from_numpy(features[descending]), threshold, chunk).numpy()
    is_kept = np.zeros(len(uids), dtype=bool)
    is_kept[descending[kept_positions]] = True
    return uids[is_kept]


def _parts(folders: Sequence[Path], column: str) -> Iterator[tuple[pa.Table, NDArray[np.floating]]]:
    """Yield each part's table of uids and values, and the part's (n, d) image features, of the first views."""
    for folder in folders:
        if not (folder / EMBEDDING).is_file():
            raise UserError(f"{folder} lacks features: name the --out folder of neuclip-ds embed.")
        for path in feature_tables(folder):
            with explained(f"The features in {path} cannot be read", "run embed again"):
                table = pq.read_table(path, columns=["uid", column])
                with path.with_suffix(PART_SUFFIX).open("rb", buffering=0) as file:
                    part = map_part(file)
                if part.image is None:
                    raise UserError(f"{folder} has no features of images: embed the images.")
            if table.num_rows:
                yield table, part.image[:, 0]


def _distinct(features: Tensor, threshold: float, chunk: int) -> Tensor:
    """Return the indices of the (n, d) L2-normalized features to keep: those not near any feature kept before them."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kept = features.new_empty(features.shape, device=device)  # the first `count` rows are in use
    count = 0
    kept_indices = []
    for start in range(0, len(features), chunk):
        block = features[start : start + chunk].to(device)

        # compare the block with the features kept from earlier blocks
        is_near = torch.zeros(len(block), dtype=torch.bool, device=device)
        for kept_start in range(0, count, chunk):
            earlier = kept[kept_start : min(kept_start + chunk, count)]
            is_near |= (block.float() @ earlier.float().T >= threshold).any(dim=1)
        indices = torch.arange(start, start + len(block))[~is_near.cpu()]
        block = block[~is_near]

        # compare the rest of the block with itself, row by row
        near_earlier_row = (block.float() @ block.float().T >= threshold).tril(-1).cpu()
        is_kept = torch.ones(len(block), dtype=torch.bool)
        for row in near_earlier_row.any(dim=1).nonzero().flatten().tolist():
            is_kept[row] = not (near_earlier_row[row] & is_kept).any()
        indices = indices[is_kept]
        block = block[is_kept.to(device)]

        kept[count : count + len(block)] = block
        count += len(block)
        kept_indices.append(indices)
    return torch.cat(kept_indices)
