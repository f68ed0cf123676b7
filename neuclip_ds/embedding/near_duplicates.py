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
from torch.nn.functional import normalize

from neuclip_ds.data.feature_parts import EMBEDDING, PART_SUFFIX, map_part
from neuclip_ds.data.uids import UidArray, parse_uid
from neuclip_ds.embedding.select import feature_tables
from neuclip_ds.errors import UserError, explained
from neuclip_ds.files import atomic_write, explain_disk


def drop_near_duplicates(
    folders: Sequence[Path], column: str, threshold: float, list_path: Path, uids: UidArray, chunk: int = 4096
) -> UidArray:
    """Return the uids of the samples to keep, in the order of the n distinct `uids`.

    Samples with larger values in `column` take precedence; near-duplicates have a cosine similarity of at least
    `threshold`. Writes a CSV file with a line for each dropped sample to `list_path`: its uid, the uid of a near sample
    that was kept before it, and their cosine similarity. The kept sample is the nearest one in earlier chunks or, if no
    sample there is near, in the same chunk. Features that are not normalized, such as those of a single encoder, are
    normalized for the comparison. The host's memory holds two copies of the n features, in their stored dtype, and the
    GPU's memory (or the host's, without a GPU) another one; chunks of `chunk` samples are compared at once. Raises
    UserError if a folder contains no image features or cannot be read, if the widths of features differ, or if
    `list_path` cannot be written.
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
            raise UserError(
                f"The folders {', '.join(map(str, folders))} contain features of different widths "
                f"({features.shape[1]} and {width}); pass features of one model."
            )

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
    nearest, cosines = _nearest_kept(torch.from_numpy(features[descending]), threshold, chunk)
    is_dropped = nearest >= 0
    _write_list(list_path, uids[descending], nearest, cosines)
    is_kept = np.zeros(len(uids), dtype=bool)
    is_kept[descending[~is_dropped]] = True
    return uids[is_kept]


def _write_list(path: Path, uids: UidArray, nearest: NDArray[np.int64], cosines: NDArray[np.float32]) -> None:
    """Write the dropped samples, for which `nearest` is not -1; row i of all arrays (n,) is the same sample."""

    def text_of(row: int) -> str:
        return f"{int(uids['high'][row]):016x}{int(uids['low'][row]):016x}"

    with explain_disk(path, "choose another --out"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as temporary, temporary.open("w", encoding="utf-8", newline="\n") as file:
            file.write("dropped,kept,cosine\n")
            for row in np.flatnonzero(nearest >= 0).tolist():
                file.write(f"{text_of(row)},{text_of(int(nearest[row]))},{cosines[row]:.4f}\n")


def _parts(folders: Sequence[Path], column: str) -> Iterator[tuple[pa.Table, NDArray[np.floating]]]:
    """Yield each part's table of uids and values, and the (n, d) features of the first view of its images."""
    for folder in folders:
        if not (folder / EMBEDDING).is_file():
            raise UserError(
                f"--near-duplicates needs image features, but {folder} contains none: pass the --out folder of "
                "`neuclip-ds embed`."
            )
        for path in feature_tables(folder):
            with explained(
                f"The features in {path} cannot be read", "delete this file, and run `neuclip-ds embed` again"
            ):
                table = pq.read_table(path, columns=["uid", column])
                with path.with_suffix(PART_SUFFIX).open("rb", buffering=0) as file:
                    part = map_part(file)
                if part.image is None:
                    raise UserError(
                        f"{folder} contains only features of captions: run `neuclip-ds embed` with a model that "
                        "encodes images."
                    )
            if table.num_rows:
                yield table, part.image[:, 0]


def _nearest_kept(features: Tensor, threshold: float, chunk: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Find the rows of (n, d) features to drop, which are near a feature that was kept before them.

    Returns:
        For each row, a near row that was kept before it, (n,), as in `drop_near_duplicates`, and their cosine
        similarity, (n,); -1 and 0 for a row that is kept.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kept = features.new_empty(features.shape, device=device)  # the first `count` rows are in use
    kept_rows = torch.empty(len(features), dtype=torch.int64)  # their rows in `features`
    count = 0
    nearest = torch.full((len(features),), -1, dtype=torch.int64)
    cosines = torch.zeros(len(features))
    for start in range(0, len(features), chunk):
        block = features[start : start + chunk].to(device)
        block = normalize(block.float(), dim=1).to(features.dtype)

        # compare the block with the features kept from earlier blocks
        best = torch.full((len(block),), -torch.inf, device=device)
        best_position = torch.zeros(len(block), dtype=torch.int64, device=device)
        for kept_start in range(0, count, chunk):
            earlier = kept[kept_start : min(kept_start + chunk, count)]
            values, positions = (block.float() @ earlier.float().T).max(dim=1)
            best_position = torch.where(values > best, positions + kept_start, best_position)
            best = torch.maximum(values, best)
        is_near = (best >= threshold).cpu()
        rows = torch.arange(start, start + len(block))
        nearest[rows[is_near]] = kept_rows[best_position.cpu()[is_near]]
        cosines[rows[is_near]] = best.cpu()[is_near]

        # compare the rest of the block with itself, row by row
        rows = rows[~is_near]
        block = block[~is_near.to(device)]
        similarity = (block.float() @ block.float().T).cpu()
        near_earlier_row = (similarity >= threshold).tril(-1)
        is_kept = torch.ones(len(block), dtype=torch.bool)
        for row in near_earlier_row.any(dim=1).nonzero().flatten().tolist():
            near_kept = near_earlier_row[row] & is_kept
            if near_kept.any():
                is_kept[row] = False
                closest = torch.where(near_kept, similarity[row], -torch.inf).argmax()
                nearest[rows[row]] = rows[closest]
                cosines[rows[row]] = similarity[row, closest]
        rows = rows[is_kept]
        block = block[is_kept.to(device)]

        kept[count : count + len(block)] = block
        kept_rows[count : count + len(block)] = rows
        count += len(block)
    return nearest.numpy(), cosines.numpy()
