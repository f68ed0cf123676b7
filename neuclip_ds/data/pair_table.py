"""Tables of image-caption pairs: CSV, TSV, JSON lines and parquet files, and data sets of the library `datasets`.

A cell of the image column holds a path (relative to the table's folder), a URL that fsspec knows, the encoded image, or
both as `datasets` stores them, {bytes, path}. A cell of a caption column holds a text or a list of texts.
"""

from __future__ import annotations

import glob
import hashlib
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import fsspec
import pyarrow as pa
import pyarrow.csv
import pyarrow.dataset
import pyarrow.parquet as pq

from neuclip_ds.data.shards import is_local
from neuclip_ds.errors import UserError

IMAGE_COLUMNS = ("image", "filepath", "file_name", "filename", "image_path", "image_file", "path", "file", "jpg", "png")
CAPTION_COLUMNS = ("caption", "text", "title", "captions", "sentence", "sentences", "txt", "alt_text")
TABLES = (".csv", ".tsv", ".jsonl", ".parquet")
_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_HUB = "hf:"
_BATCH = 256  # rows that are read at once: they may hold images


class Rows(Protocol):
    """Consecutive rows of a table, which can be sent to another process."""

    def __len__(self) -> int:
        """Return their number."""

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield the rows, few at a time; raise UserError if they cannot be read."""


class PairTable(Protocol):
    """Rows with images and captions, in a fixed order."""

    name: str  # for messages
    columns: list[str]
    rows: int
    folder: Path  # that relative paths of images begin at
    identity: str  # tells tables with other contents apart

    def slices(self, size: int, begin: int = 0, columns: Sequence[str] | None = None) -> Iterator[Rows]:
        """Yield the rows from `begin` on, `size` at a time, with all columns or some; raise UserError if that fails."""


class ImageCell(NamedTuple):
    """Encoded image, or where it is."""

    source: bytes | str
    folder: Path

    @classmethod
    def of(cls, value: Any, folder: Path) -> ImageCell | None:
        """Return the image of a cell's value, None if there is none."""
        if isinstance(value, dict):
            value = value.get("bytes") or value.get("path")
        if isinstance(value, str):
            value = value.strip()
        return cls(value, folder) if value and isinstance(value, bytes | str) else None

    def read(self) -> bytes:
        """Return the encoded image; raise OSError if it cannot be read."""
        if isinstance(self.source, bytes):
            return self.source
        if is_local(self.source):
            return (self.folder / self.source).read_bytes()
        try:
            with fsspec.open(self.source, "rb") as file:
                return bytes(file.read())
        except Exception as error:  # backends raise many types: botocore's, aiohttp's, OSError
            raise OSError(f"{self.source}: {type(error).__name__}: {error}") from error


def captions_of(value: Any) -> list[str]:
    """Return the captions of a cell's value, each in one line if there may be several, without blank ones."""
    if isinstance(value, list):
        return [" ".join(one.split()) for one in value if isinstance(one, str) and one.strip()]
    return [value.strip()] if isinstance(value, str) and value.strip() else []


def find_column(table: PairTable, usual: Sequence[str], what: str, option: str) -> str:
    """Return the first of the usual names that a table has a column of, in whatever case.

    Raises:
        UserError: there is none; names `what` is missing, and the option to name it with.
    """
    by_name = {column.lower(): column for column in reversed(table.columns)}
    found = next((by_name[name] for name in usual if name in by_name), None)
    if found is None:
        raise UserError(
            f"{table.name} has no column of {what} with a usual name ({', '.join(usual)}), but "
            f"{', '.join(table.columns)}: {option}."
        )
    return found


def open_table(source: str, split: str | None = None) -> PairTable:
    """Open a table of pairs.

    Args:
        source: a CSV, TSV, JSON lines or parquet file, a folder or a glob of files of one kind; a folder written by
            `Dataset.save_to_disk`; or `hf:NAME` or `hf:NAME:CONFIG`, where `datasets.load_dataset` takes NAME.
        split: split of a data set with several.

    Raises:
        UserError: there is nothing of that name, it has several splits, or it cannot be read.
    """
    path = Path(source).expanduser()
    if source.startswith(_HUB) or any((path / name).is_file() for name in ("dataset_info.json", "dataset_dict.json")):
        return _LibraryTable(source, split)
    if split is not None:
        raise UserError(f"{source} is a file or folder of files, which has no splits; omit --split.")
    if path.is_dir():
        paths = sorted(file for file in path.rglob("*") if file.suffix.lower() in TABLES)
    else:
        paths = [path] if path.is_file() else [Path(name) for name in sorted(glob.glob(str(path), recursive=True))]  # noqa: PTH207 - absolute
    if not paths:
        raise UserError(f"{source} names no table; name a file, folder or glob ({', '.join(TABLES)}), or hf:DATASET.")
    kinds = sorted({file.suffix.lower() for file in paths})
    if len(kinds) > 1 or kinds[0] not in TABLES:
        raise UserError(f"{source} names files of {', '.join(kinds)}; name files of one of {', '.join(TABLES)}.")
    return (_ParquetTable if kinds == [".parquet"] else _TextTable)(source, paths)


@dataclass(frozen=True)
class _HeldRows:
    table: pa.Table

    def __len__(self) -> int:
        return len(self.table)

    def batches(self) -> Iterator[pa.RecordBatch]:
        yield from self.table.to_batches(max_chunksize=_BATCH)


class _TextTable:
    """CSV, TSV or JSON lines, read once from the start; they hold paths of images."""

    def __init__(self, name: str, paths: Sequence[Path]) -> None:
        self.name, self.folder, self.identity = name, paths[0].parent.absolute(), _identity(paths)
        with _explaining(name):
            self._dataset = _open_text(paths)
            self.rows = self._dataset.count_rows()
        self.columns = self._dataset.schema.names

    def slices(self, size: int, begin: int = 0, columns: Sequence[str] | None = None) -> Iterator[Rows]:
        """Yield the rows in parts."""
        waiting, held = list[pa.RecordBatch](), 0
        with _explaining(self.name):
            for batch in self._dataset.to_batches(columns=columns and list(columns), fragment_readahead=1):
                batch, begin = batch.slice(min(begin, len(batch))), max(0, begin - len(batch))
                while held + len(batch) >= size:
                    waiting, batch = [*waiting, batch.slice(0, size - held)], batch.slice(size - held)
                    yield _HeldRows(pa.Table.from_batches(waiting))
                    waiting, held = [], 0
                waiting, held = [*waiting, batch], held + len(batch)
            if held:
                yield _HeldRows(pa.Table.from_batches(waiting))


@dataclass(frozen=True)
class _ParquetRows:
    name: str  # of the table
    pieces: tuple[tuple[Path, int, int], ...]  # files, with the first row in each and the number of rows
    columns: list[str] | None

    def __len__(self) -> int:
        return sum(count for _, _, count in self.pieces)

    def batches(self) -> Iterator[pa.RecordBatch]:
        with _explaining(self.name):
            for path, first, count in self.pieces:
                yield from _parquet_batches(path, first, count, self.columns)


class _ParquetTable:
    """Parquet files, whose rows are read where they are needed: they may hold images."""

    def __init__(self, name: str, paths: Sequence[Path]) -> None:
        self.name, self.folder, self.identity = name, paths[0].parent.absolute(), _identity(paths)
        with _explaining(name):
            found = [(path, pq.read_metadata(path)) for path in paths]
        self.columns = found[0][1].schema.to_arrow_schema().names
        for path, metadata in found:
            if metadata.schema.to_arrow_schema().names != self.columns:
                raise UserError(f"{path} has other columns than {paths[0]}; name files with the same ones.")
        self._files = [(path, metadata.num_rows) for path, metadata in found]
        self.rows = sum(rows for _, rows in self._files)

    def slices(self, size: int, begin: int = 0, columns: Sequence[str] | None = None) -> Iterator[Rows]:
        """Yield the rows in parts, which are not read yet."""
        for low in range(begin, self.rows, size):
            pieces, start = [], 0
            for path, rows in self._files:
                first, last = max(low - start, 0), min(low + size - start, rows)
                if first < last:
                    pieces.append((path, first, last - first))
                start += rows
            yield _ParquetRows(self.name, tuple(pieces), None if columns is None else list(columns))


def _parquet_batches(path: Path, first: int, count: int, columns: list[str] | None) -> Iterator[pa.RecordBatch]:
    """Yield `count` rows of a file from `first` on; row groups without any of them are not read."""
    with pq.ParquetFile(path) as file:
        sizes = [file.metadata.row_group(number).num_rows for number in range(file.num_row_groups)]
        ends = list(itertools.accumulate(sizes))
        groups = [n for n, end in enumerate(ends) if end > first and end - sizes[n] < first + count]
        skipped = first - (ends[groups[0]] - sizes[groups[0]])
        for batch in file.iter_batches(_BATCH, row_groups=groups, columns=columns):
            batch, skipped = batch.slice(min(skipped, len(batch))), max(0, skipped - len(batch))
            batch = batch.slice(0, count)
            count -= len(batch)
            yield batch


@dataclass(frozen=True)
class _LibraryRows:
    dataset: Any  # in Arrow's format; a process that it is sent to maps its files
    first: int
    count: int

    def __len__(self) -> int:
        return self.count

    def batches(self) -> Iterator[pa.RecordBatch]:
        end = self.first + self.count
        for start in range(self.first, end, _BATCH):
            yield from self.dataset[start : min(start + _BATCH, end)].to_batches()


class _LibraryTable:
    """Data set of the library `datasets`."""

    def __init__(self, source: str, split: str | None) -> None:
        try:
            import datasets
        except ImportError as error:
            raise UserError(f"{source} needs the package datasets: pip install datasets.") from error
        name, _, config = source.removeprefix(_HUB).partition(":")
        try:
            if source.startswith(_HUB):
                found = datasets.load_dataset(name, config or None, split=split)
            else:
                found = datasets.load_from_disk(name)
        except Exception as error:  # the library raises many types
            reason = " ".join(str(error).split())[:300]
            raise UserError(f"{source} cannot be opened ({type(error).__name__}: {reason}); check the name.") from error
        if isinstance(found, datasets.DatasetDict):
            if split not in found and (split is not None or len(found) > 1):
                raise UserError(f"{source} has the splits {', '.join(found)}; choose one with --split.")
            found = found[split or next(iter(found))]
        self._dataset = found.with_format("arrow")
        self.name, self.columns, self.rows = source, list(found.column_names), len(found)
        self.folder, self.identity = Path(name).absolute(), str(found._fingerprint)

    def slices(self, size: int, begin: int = 0, columns: Sequence[str] | None = None) -> Iterator[Rows]:
        """Yield the rows in parts, which are not read yet."""
        chosen = self._dataset if columns is None else self._dataset.select_columns(list(columns))
        for start in range(begin, self.rows, size):
            yield _LibraryRows(chosen, start, min(size, self.rows - start))


def _open_text(paths: Sequence[Path]) -> pyarrow.dataset.Dataset:
    names, delimiter = [str(path) for path in paths], _DELIMITERS.get(paths[0].suffix.lower())
    if delimiter is None:
        return pyarrow.dataset.dataset(names, format="json")
    parsing = pyarrow.csv.ParseOptions(delimiter=delimiter, newlines_in_values=True)
    with pyarrow.csv.open_csv(names[0], parse_options=parsing) as first:
        schema = pa.schema([(name, pa.string()) for name in first.schema.names])  # or a caption "7" would be a number
    converting = pyarrow.csv.ConvertOptions(column_types=schema, strings_can_be_null=False)
    form = pyarrow.dataset.CsvFileFormat(parsing, convert_options=converting)
    return pyarrow.dataset.dataset(names, schema=schema, format=form)


def _identity(paths: Sequence[Path]) -> str:
    status = [(str(path.absolute()), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    return hashlib.sha256(repr(status).encode()).hexdigest()[:32]


@contextmanager
def _explaining(name: str) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"The table {name} cannot be read ({reason}); fix or remove that file.") from error
