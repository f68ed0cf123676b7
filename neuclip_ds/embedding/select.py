"""Select samples by a column of parquet files, as DataComp and DFN filter their pools, and write the samples' uids.

The files may be features written by `neuclip-ds embed`, or any other parquet files with a column of uids, such as
DataComp's or img2dataset's metadata. Only the column of values and the column of uids are read.
"""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from numpy.typing import NDArray

from neuclip_ds.data.feature_parts import EMBEDDING, PART_BYTES
from neuclip_ds.data.listing import files_below
from neuclip_ds.data.uids import UID, UidArray, UidFiles, parse_uids
from neuclip_ds.errors import UserError, counted, explained
from neuclip_ds.files import atomic_write, explain_disk

_BATCH_ROWS = 1 << 17  # rows that are read at once


class Rule(NamedTuple):
    """Rule that selects values within inclusive bounds and, if `top` is not None, among the largest ones.

    `top` is a fraction of all numeric values in the column, including those outside the bounds.
    """

    minimum: float = -math.inf
    maximum: float = math.inf
    top: float | None = None


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Row and uid counts of a selection, and the lower bound of the values that its rule keeps."""

    kept: int  # distinct uids written
    samples: int  # rows in the files
    without_value: int  # rows whose value is absent or NaN
    without_uid: int  # rows that the rule keeps but that have no valid uid
    minimum: float  # lower bound of the rule; with `top`, the smallest of the top values if it is larger
    refined: int = 0  # distinct uids that `refine` dropped


def select(
    sources: Sequence[Path],
    column: str,
    rule: Rule,
    out: Path,
    uid_column: str = "uid",
    within: Sequence[Path] = (),
    refine: Callable[[UidArray], UidArray] = lambda uids: uids,
) -> Selection:
    """Write the sorted, distinct uids of the rows that a rule keeps, in the format that `build-manifest --uids` reads.

    A rule with `top` needs about 25 bytes of memory per row, and each kept uid takes 56 bytes. Sources are parquet
    files, or folders that contain parquet files at any depth. `out` and the files in `within` are .npy files of pairs
    of 64-bit words (dtype `u8,u8`). Only uids that are in every `within` file are kept, and `refine` may drop more.
    Raises UserError if a source contains unfinished features or no parquet files, if a file cannot be read, if the
    first file lacks a column (where another file lacks one, its values count as missing), if `column` is not numeric or
    `uid_column` is not a column of texts, if a file in `within` is not sorted, if no uid remains before `refine`, if
    `refine` raises it, or if `out` cannot be written.
    """
    files: list[Path] = []
    for source in sources:
        files += _files(source)
    data = _open(files)
    for name, option in ((column, "--column"), (uid_column, "--uid-column")):
        if name not in data.schema.names:
            raise UserError(f"{files[0]} has no column {name}: choose {option} from {', '.join(data.schema.names)}.")
    uid_lists = [UidFiles([path]) for path in within]
    for uid_list in uid_lists:
        uid_list.check_order()
    minimum = rule.minimum
    if rule.top is not None:
        minimum = max(minimum, _threshold(data, column, rule.top))

    # collect the uids of the rows that the rule keeps
    samples = 0
    without_value = 0
    without_uid = 0
    with_uid = 0  # of the rows that the rule keeps
    collected: list[UidArray] = []
    for values, texts in _rows(data, column, uid_column):
        is_kept = (values >= minimum) & (values <= rule.maximum)  # both false for NaN
        samples += len(values)
        without_value += int(np.isnan(values).sum())
        with explained(f"The column {uid_column} does not contain texts", "choose another --uid-column"):
            batch_uids = parse_uids(texts.filter(pa.array(is_kept)))
        without_uid += int(is_kept.sum()) - len(batch_uids)
        with_uid += len(batch_uids)
        for uid_list in uid_lists:
            batch_uids = batch_uids[uid_list.count(batch_uids) > 0]
        collected.append(batch_uids)

    uids = _sorted_distinct(np.concatenate(collected) if collected else np.empty(0, UID))
    if without_uid and not with_uid:
        raise UserError(
            f"None of the {counted(without_uid, 'sample')} to keep has a uid of 32 hex digits: pass the column of uids "
            "with --uid-column."
        )
    if not len(uids):
        choices = "choose wider bounds (--min, --max, --top) or another --column"
        if within:
            choices += ", or check that the files in --within contain uids of these samples"
        raise UserError(
            f"None of the {counted(samples, 'sample')} is kept ({counted(without_value, 'has', 'have')} no value in "
            f"{column}): {choices}."
        )
    refined_uids = refine(uids)
    with explain_disk(out, "choose another --out"):
        out.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(out) as temporary, temporary.open("wb") as file:
            np.save(file, refined_uids.view(np.dtype("u8,u8")))  # the field names in DataComp's files
    return Selection(
        kept=len(refined_uids),
        samples=samples,
        without_value=without_value,
        without_uid=without_uid,
        minimum=minimum,
        refined=len(uids) - len(refined_uids),
    )


def _open(files: Sequence[Path]) -> ds.Dataset:
    """Open parquet files as one table; raise a UserError that names the first file that cannot be read."""
    try:
        return ds.dataset([str(file) for file in files], format="parquet")
    except (OSError, ValueError, pa.ArrowException):
        for file in files:
            with explained(f"{file} cannot be read as parquet", "write or download the file again, or omit it"):
                pq.read_schema(file)
        raise


def _sorted_distinct(uids: UidArray) -> UidArray:
    """Return the uids in ascending order, each once."""
    uids = uids[np.lexsort((uids["low"], uids["high"]))]  # numpy sorts pairs far more slowly
    is_new = np.ones(len(uids), dtype=bool)
    is_new[1:] = uids[1:] != uids[:-1]
    return uids[is_new]


def _rows(data: ds.Dataset, column: str, other_column: str) -> Iterator[tuple[NDArray[np.float64], pa.Array]]:
    """Yield, for each batch of rows, the values of a numeric column (NaN if missing) and those of a second column."""
    columns = [column] if column == other_column else [column, other_column]
    files = data.files
    name = files[0] if len(files) == 1 else f"One of the {len(files)} parquet files"
    with explained(f"{name} cannot be read", "write or download the file again"):
        for batch in data.to_batches(columns=columns, batch_size=_BATCH_ROWS):
            with explained(f"The column {column} is not numeric", "choose another --column"):
                values = pc.cast(batch.column(column), pa.float64())
            values_or_nan = pc.fill_null(values, math.nan).to_numpy(zero_copy_only=False)
            yield values_or_nan, batch.column(other_column)


def _threshold(data: ds.Dataset, column: str, share: float) -> float:
    """Return the smallest of the top `share` of a column's values, or infinity if the column has no values.

    With ties, a larger share of the values may be at or above it.
    """
    batches = [values for values, _ in _rows(data, column, column)]
    values = np.concatenate(batches) if batches else np.empty(0)
    values = values[~np.isnan(values)]
    count = math.ceil(share * len(values))
    if not count:
        return math.inf
    values.partition(len(values) - count)
    return float(values[len(values) - count])


def feature_tables(folder: Path) -> list[Path]:
    """Return the tables of samples in a folder of features, one for each complete part."""
    return sorted(folder.glob("part-*.parquet"))


def _complete_tables(folder: Path) -> list[Path]:
    """Return the tables in a folder of features.

    Raises UserError if `neuclip-ds embed` has not written all parts, if the folder contains no features, or if its
    embedding.json cannot be read.
    """
    path = folder / EMBEDDING
    with explained(f"{path} cannot be read", "run `neuclip-ds embed` again with another --out"):
        embedding = json.loads(path.read_text(encoding="utf-8"))
        # at its end, embed lists the parts' sizes, which are 0 for unreadable and unused shards
        sizes = embedding.get(PART_BYTES, [1] * embedding["shards"])
    tables = feature_tables(folder)
    names = {table.name for table in tables}
    missing = [shard for shard, size in enumerate(sizes) if size and f"part-{shard:08d}.parquet" not in names]
    if not sizes or (not tables and not missing):
        raise UserError(f"{folder} contains no features: run `neuclip-ds embed` on readable shards.")
    if missing:
        raise UserError(
            f"{folder} lacks the features of {len(missing)} of {counted(len(sizes), 'shard')}: let `neuclip-ds embed` "
            "finish first, by running the same command again, or, if the folder is a copy, copy it again."
        )
    return tables


def _files(source: Path) -> list[Path]:
    if (source / EMBEDDING).is_file():
        return _complete_tables(source)
    files = []
    if source.is_dir():
        with explained(f"{source} cannot be listed", "check the folders and their permissions"):
            files = files_below(source, [".parquet"])
        for folder in sorted({file.parent for file in files}):
            if (folder / EMBEDDING).is_file():
                _complete_tables(folder)
    elif source.is_file():
        files = [source]
    if not files:
        raise UserError(f"{source} is neither a parquet file nor a folder with one; check the path.")
    return files
