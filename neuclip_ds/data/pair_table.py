"""Tables of image-caption pairs: CSV, TSV, JSON lines and parquet files, and data sets of the library `datasets`.

A cell of the image column holds a path (relative to the table's folder), a URL that fsspec knows, the encoded image, or
both as `datasets` stores them, {bytes, path}. A cell of a caption column holds a text or a list of texts.
"""

from __future__ import annotations

import glob
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import fsspec
import pyarrow as pa
import pyarrow.csv
import pyarrow.dataset

from neuclip_ds.data.shards import is_local
from neuclip_ds.errors import UserError

IMAGE_COLUMNS = ("image", "filepath", "file_name", "filename", "image_path", "image_file", "path", "file", "jpg", "png")
CAPTION_COLUMNS = ("caption", "text", "title", "captions", "sentence", "sentences", "txt", "alt_text")
TABLES = (".csv", ".tsv", ".jsonl", ".parquet")
_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_HUB = "hf:"
_BATCH = 1024  # rows of a file that are read at once, at most: they may hold images


class PairTable(Protocol):
    """Rows with images and captions, in a fixed order."""

    name: str  # for messages
    columns: list[str]
    rows: int
    folder: Path  # that relative paths of images begin at
    identity: str  # tells tables with other contents apart

    def slices(self, size: int, begin: int = 0, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
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
            return (self.folder / self.source).expanduser().read_bytes()
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
    return _FileTable(source, paths)


class _FileTable:
    """Files of one kind with the same columns, one after the other."""

    def __init__(self, name: str, paths: Sequence[Path]) -> None:
        self.name, self.folder = name, paths[0].parent.absolute()
        kinds = sorted({path.suffix.lower() for path in paths})
        if len(kinds) > 1 or kinds[0] not in TABLES:
            raise UserError(f"{name} names files of {', '.join(kinds)}; name files of one of {', '.join(TABLES)}.")
        with _explaining(name):
            self._dataset = _open_files(paths, kinds[0])
            self.rows = self._dataset.count_rows()
        self.columns = self._dataset.schema.names
        status = [(str(path.absolute()), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
        self.identity = hashlib.sha256(repr(status).encode()).hexdigest()[:32]

    def slices(self, size: int, begin: int = 0, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        waiting, held = list[pa.RecordBatch](), 0
        with _explaining(self.name):
            for batch in self._batches(begin, min(size, _BATCH), columns):
                while held + len(batch) >= size:
                    waiting, batch = [*waiting, batch.slice(0, size - held)], batch.slice(size - held)
                    yield pa.Table.from_batches(waiting)
                    waiting, held = [], 0
                waiting, held = [*waiting, batch], held + len(batch)
            if held:
                yield pa.Table.from_batches(waiting)

    def _batches(self, begin: int, size: int, columns: Sequence[str] | None) -> Iterator[pa.RecordBatch]:
        """Yield the rows from `begin` on; of parquet files, row groups before it are not read."""
        pieces = [
            piece
            for fragment in self._dataset.get_fragments()
            for piece in (fragment.split_by_row_group() if hasattr(fragment, "row_groups") else [fragment])
        ]
        for piece in pieces:
            if begin and begin >= (rows := _rows_of(piece)):
                begin -= rows
                continue
            options = {"batch_size": size, "batch_readahead": 1, "schema": self._dataset.schema}
            for batch in piece.to_batches(columns=columns and list(columns), **options):
                yield batch.slice(min(begin, len(batch)))
                begin -= min(begin, len(batch))


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
            if split not in found and len(found) > 1:
                raise UserError(f"{source} has the splits {', '.join(found)}; choose one with --split.")
            found = found[split or next(iter(found))]
        self._dataset = found.with_format("arrow")
        self.name, self.columns, self.rows = source, list(found.column_names), len(found)
        self.folder, self.identity = Path(name).absolute(), str(found._fingerprint)

    def slices(self, size: int, begin: int = 0, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        chosen = self._dataset if columns is None else self._dataset.select_columns(list(columns))
        for start in range(begin, self.rows, size):
            yield chosen[start : start + size]


def _open_files(paths: Sequence[Path], kind: str) -> pyarrow.dataset.Dataset:
    names = [str(path) for path in paths]
    if kind not in _DELIMITERS:
        return pyarrow.dataset.dataset(names, format="json" if kind == ".jsonl" else "parquet")
    parsing = pyarrow.csv.ParseOptions(delimiter=_DELIMITERS[kind], newlines_in_values=True)
    with pyarrow.csv.open_csv(names[0], parse_options=parsing) as first:
        schema = pa.schema([(name, pa.string()) for name in first.schema.names])  # or a caption "7" would be a number
    converting = pyarrow.csv.ConvertOptions(column_types=schema, strings_can_be_null=False)
    form = pyarrow.dataset.CsvFileFormat(parsing, convert_options=converting)
    return pyarrow.dataset.dataset(names, schema=schema, format=form)


def _rows_of(piece: pyarrow.dataset.Fragment) -> int:
    """Return the rows of a file or of some of its row groups, where pyarrow's `count_rows` counts the whole file."""
    if hasattr(piece, "row_groups"):
        return sum(group.num_rows for group in piece.row_groups)
    return int(piece.count_rows())


@contextmanager
def _explaining(name: str) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"The table {name} cannot be read ({reason}); fix or remove that file.") from error
