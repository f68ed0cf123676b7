"""Read tables of image-caption pairs: CSV, TSV, JSON Lines or Parquet files with columns of images and captions.

A folder of images, each with a .txt file of the same name (dog.jpg and dog.txt), is also read as a table.
"""

from __future__ import annotations

import base64
import binascii
import csv
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import fsspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from neuclip_ds.data.fetch import explain
from neuclip_ds.data.listing import IMAGES, TABLES, files_below, matching_files
from neuclip_ds.data.shards import is_local
from neuclip_ds.errors import UserError, counted, explained
from neuclip_ds.files import expand_user, read_text

if TYPE_CHECKING:
    import pyarrow.dataset

IMAGE_COLUMNS = ("image", "filepath", "file_name", "filename", "image_path", "image_file", "path", "file", "jpg", "png")
CAPTION_COLUMNS = ("caption", "text", "title", "captions", "sentence", "sentences", "txt", "alt_text")
Quotes = Literal["auto", "on", "off"]
"""Whether quotes enclose cells in CSV and TSV files.

`auto` means `on`, but also refuses a cell that seems to contain other rows, unless the file is comma-separated and
all of its quotes are valid.
"""

_TEXT = ".txt"
_COMMA = ","
_DELIMITERS = {".csv": _COMMA, ".tsv": "\t"}
_MAX_HEADER = 100_000  # characters of a table's first line that are read to find its delimiter
_BLOCK_BYTES = 32 << 20  # bytes of a CSV or TSV file that are parsed at once; a row, with its image, must fit into them
_BATCH = 256  # rows read at once; few, because they may contain images
_FIX = "write or download that file again, or remove it"
_LINE_BREAK = re.compile(r"\r\n|\r|\n")
_DATA_URI = "data:"
# JPEG, PNG, WebP, GIF and BMP in base64; so many characters are not a path
_BASE64_IMAGE = re.compile(r"(?:/9j/|iVBORw0KGgo|UklGR|R0lGOD|Qk)[A-Za-z0-9+/\s]{80,}=*\s*")


class Row(NamedTuple):
    """A row of a table, and the base folder of its relative image paths."""

    folder: Path
    cells: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class PairTable(ABC):
    """A table of image-caption pairs, with its rows in a fixed order."""

    name: str  # for messages
    columns: Sequence[str]  # names of all columns
    binary_columns: Sequence[str] = ()  # names of the columns of bytes, which JSON cannot contain
    rows: int

    @abstractmethod
    def read(self, columns: Sequence[str]) -> Iterator[Row]:
        """Yield every row with only the given columns, in order.

        Raises UserError if the table cannot be read, or if a stray quote seems to put other rows into a cell.
        """

    def find_column(self, usual: Sequence[str], what: str, advice: str) -> str:
        """Return the first column in `usual` that exists, ignoring case; raise UserError with `advice` if none does.

        `what` is the content of the column: `image` or `caption`.
        """
        by_lowercase_name = {column.lower(): column for column in reversed(self.columns)}
        for name in usual:
            if name in by_lowercase_name:
                return by_lowercase_name[name]
        if not self.columns:
            raise UserError(f"{self.name} is empty: pass a table with rows.")
        raise UserError(
            f"{self.name} has no {what} column with a recognized name ({', '.join(usual)}); its columns are "
            f"{', '.join(self.columns)}: {advice}."
        )


@dataclass(frozen=True, kw_only=True)
class _JsonLines(PairTable):
    """A table of JSON Lines files.

    pyarrow is not used: it derives the columns and their types from the first block of the first file, reads texts such
    as 2020-01-01 as dates, and refuses rows that are longer than a block.
    """

    files: Sequence[str]

    def read(self, columns: Sequence[str]) -> Iterator[Row]:
        for file in self.files:
            folder = Path(file).parent.absolute()
            for record in _records(file):
                yield Row(folder, {name: record.get(name) for name in columns})


@dataclass(frozen=True, kw_only=True)
class _FolderTable(PairTable):
    """The images and texts of a folder; pyarrow is not used, because it refuses file names that are not UTF-8."""

    folder: Path
    cells: Sequence[dict[str, Any]]

    def read(self, columns: Sequence[str]) -> Iterator[Row]:
        for cells in self.cells:
            yield Row(self.folder, {name: cells[name] for name in columns})


@dataclass(frozen=True, kw_only=True)
class _ArrowTable(PairTable):
    """A table of CSV, TSV or Parquet files, which pyarrow reads."""

    data: pyarrow.dataset.Dataset
    delimiter: str | None  # set for CSV and TSV files whose quotes are checked
    has_quotes_option: bool = False  # whether messages may suggest --quotes

    def read(self, columns: Sequence[str]) -> Iterator[Row]:
        read_columns = list(columns) if self.delimiter is None else None  # any column may contain a stray quote
        for fragment in self.data.get_fragments():
            fix = _FIX if self.delimiter is None else _fix_of_quotes(self.has_quotes_option)
            with explained(f"The table {fragment.path} cannot be read", fix):
                batches = fragment.to_batches(
                    schema=self.data.schema, columns=read_columns, batch_size=_BATCH, fragment_readahead=1
                )
                folder = Path(fragment.path).parent.absolute()
                checks_quotes = self.delimiter is not None
                for batch in batches:
                    if checks_quotes and (problem := _find_missing_quote(batch, str(self.delimiter))):
                        if self.delimiter != _COMMA or not _is_strict_csv(fragment.path):
                            raise UserError(f"{fragment.path}: {problem}{self._advice_on_quotes()}")
                        checks_quotes = False  # the cells are captions with commas and line breaks
                    for cells in batch.select(list(columns)).to_pylist():
                        yield Row(folder, cells)

    def _advice_on_quotes(self) -> str:
        if not self.has_quotes_option:
            return ""
        return " To pack a table without quoted cells, set --quotes=off; if the cell is correct, set --quotes=on."


def _records(file: str) -> Iterator[Mapping[str, Any]]:
    """Yield the records of a JSON Lines file, skipping blank lines; raise UserError if the file cannot be read."""
    with (
        explained(f"The table {file} cannot be read", _FIX),
        Path(file).open(encoding="utf-8-sig", newline="\n") as lines,
    ):
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"line {number} is not JSON: {error}") from error
            if not isinstance(record, dict):
                raise ValueError(f"line {number} is not a JSON object")
            yield record


def open_table(source: str, quotes: Quotes | None = None) -> PairTable:
    """Open a table of image-caption pairs; raise UserError if there is no table or it cannot be read.

    `source` is a CSV, TSV, JSON Lines or Parquet file, a folder or glob of such files, all of the same format, or a
    folder of images with a .txt file of the same name next to each. `quotes=None` means `auto` for a caller that has no
    --quotes option: error messages then do not suggest the option.
    """
    from pyarrow import dataset  # slow to import, because it imports pandas

    has_quotes_option = quotes is not None
    quotes = quotes or "auto"
    path = Path(expand_user(source))
    try:
        if path.is_dir():
            paths = list(map(str, files_below(path, TABLES)))
            if not paths and (images := files_below(path, IMAGES)):
                return _open_folder(path, images)
        else:
            paths = [str(path)] if path.is_file() else matching_files(str(path))
    except OSError as error:
        raise UserError(f"{source} cannot be listed ({error}); check the folders and their permissions.") from error
    extensions = {Path(file).suffix.lower() for file in paths}
    if len(extensions) != 1 or not extensions <= set(TABLES):
        problem = "is not a table" if paths else "contains no table, or does not exist"
        if len(extensions) > 1:
            problem = f"includes files of several formats ({', '.join(sorted(extensions))})"
        raise UserError(
            f"{source} {problem}; pass files of one format ({', '.join(TABLES)}), or a folder of images with .txt "
            "files."
        )
    (extension,) = extensions
    if extension == ".jsonl":
        return _open_json_lines(source, paths)
    delimiter = None
    if extension in _DELIMITERS:
        delimiter = _find_delimiter(Path(paths[0]), _DELIMITERS[extension])
    fix = _FIX if delimiter is None else _fix_of_quotes(has_quotes_option and quotes != "off")
    with explained(f"The table {source} cannot be read", fix):
        if delimiter is None:
            data = dataset.dataset(paths, format="parquet")
        else:
            data = _open_delimited(paths, delimiter, quotes, fix)
        rows = _count_rows(data)
    return _ArrowTable(
        name=source,
        columns=data.schema.names,
        binary_columns=[field.name for field in data.schema if "binary" in str(field.type)],
        rows=rows,
        data=data,
        delimiter=delimiter if quotes == "auto" else None,
        has_quotes_option=has_quotes_option,
    )


def _open_json_lines(source: str, files: Sequence[str]) -> PairTable:
    """Return the table of JSON Lines files, whose columns are the keys of all records, in the order of first use."""
    columns: dict[str, None] = {}
    rows = 0
    for file in files:
        for record in _records(file):
            columns.update(dict.fromkeys(record))
            rows += 1
    return _JsonLines(name=source, columns=list(columns), rows=rows, files=files)


def _open_folder(folder: Path, images: Sequence[Path]) -> PairTable:
    """Return a table with a row for each pair of an image and a text of the same name, and for each unpaired file.

    Raises UserError if there is no .txt file, or one of them is not UTF-8.
    """
    texts = {path.with_suffix(""): path for path in files_below(folder, [_TEXT])}
    if not texts:
        raise UserError(
            f"{folder} contains {counted(len(images), 'image')}, but neither a .txt file nor a table "
            f"({', '.join(TABLES)}): write the caption of each image NAME.jpg to NAME.txt, or write a table of image "
            "paths and captions."
        )
    rows: list[tuple[str | None, str | None]] = []
    for image in images:
        text = texts.get(image.with_suffix(""))
        caption = None if text is None else read_text(text)
        rows.append((str(image.relative_to(folder)), caption))
    with_image = {image.with_suffix("") for image in images}
    for name, text in texts.items():
        if name not in with_image:
            rows.append((None, read_text(text)))
    columns = (IMAGE_COLUMNS[0], CAPTION_COLUMNS[0])
    cells = [dict(zip(columns, row, strict=True)) for row in rows]
    return _FolderTable(name=str(folder), columns=columns, rows=len(rows), folder=folder.absolute(), cells=cells)


def _find_delimiter(file: Path, usual: str) -> str:
    """Return the most frequent delimiter in a table's first line; open_clip's .csv files use tabs."""
    try:
        with file.open(encoding="utf-8-sig", errors="replace") as lines:
            header = lines.readline(_MAX_HEADER)
    except OSError:  # reported when the table is read
        return usual
    return max((usual, "\t", _COMMA, ";"), key=header.count)


def _count_rows(data: pyarrow.dataset.Dataset) -> int:
    """Return the number of rows; if a file cannot be read, raise a ValueError that names the file."""
    try:
        return int(data.count_rows())
    except (OSError, ValueError):
        for fragment in data.get_fragments():
            try:
                fragment.count_rows()
            except (OSError, ValueError) as error:
                raise ValueError(f"{fragment.path}: {error}") from error
        raise


def _fix_of_quotes(suggests_option: bool) -> str:
    """Return advice on a CSV or TSV file that cannot be read, as the end of a sentence; it may suggest --quotes=off."""
    if suggests_option:
        return (
            "correct that file, set --quotes=off if its quotes are ordinary characters, or write the table as .jsonl "
            "or .parquet"
        )
    return "correct that file, or write the table as .jsonl or .parquet"


def _open_delimited(paths: list[str], delimiter: str, quotes: Quotes, fix: str) -> pyarrow.dataset.Dataset:
    from pyarrow import dataset  # slow to import

    quote = False if quotes == "off" else '"'
    parsing = pyarrow.csv.ParseOptions(delimiter=delimiter, quote_char=quote, newlines_in_values=quotes != "off")
    reading = pyarrow.csv.ReadOptions(block_size=_BLOCK_BYTES)
    with (
        explained(f"The table {paths[0]} cannot be read", fix),
        pyarrow.csv.open_csv(paths[0], read_options=reading, parse_options=parsing) as first,
    ):
        names = first.schema.names
    schema = pa.schema([(name, pa.string()) for name in names])  # so that the caption "7" is text
    return dataset.dataset(paths, schema=schema, format=dataset.CsvFileFormat(parsing, read_options=reading))


def _find_missing_quote(batch: pa.RecordBatch, delimiter: str) -> str:
    """Describe a cell that seems to contain several rows because of a stray quote; return "" if there is none.

    A cell that contains k more rows has at least k line breaks, and at least as many delimiters as k rows.
    """
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        cells = column.filter(pc.fill_null(pc.match_substring_regex(column, "[\r\n]"), False))
        for cell in cells.to_pylist():
            first, *others = _LINE_BREAK.split(cell.strip("\r\n"))
            if others and cell.count(delimiter) >= len(others) * (batch.num_columns - 1) > 0:
                return (
                    f"a quote opens the cell of column {name} that begins with {first[:60]!r}, and the cell seems to "
                    f'contain {counted(len(others), "more row")}. Write the cell as "...", with two quotes in place of '
                    "each quote in it, or write the table as .jsonl or .parquet."
                )
    return ""


def _is_strict_csv(file: str) -> bool:
    """Return whether every quoted cell of a CSV file ends at a delimiter or a line break, as in valid CSV."""
    try:
        with Path(file).open(encoding="utf-8-sig", errors="replace", newline="") as lines:
            for _ in csv.reader(lines, strict=True):
                pass
    except csv.Error:
        return False
    return True


def image_of(value: Any) -> bytes | str | None:
    """Return the encoded image in a table cell, or the path or URL of the image; None if the cell contains neither.

    Images in base64, alone or in a data: URI, are decoded.
    """
    if isinstance(value, dict):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, str):
        value = _decode_base64(value.strip())
    return value if value and isinstance(value, bytes | str) else None


def _decode_base64(text: str) -> bytes | str:
    """Return the bytes of a data: URI or of an image in base64; return any other text as it is."""
    encoded = text
    if text.startswith(_DATA_URI):
        header, _, encoded = text.partition(",")
        if not header.endswith(";base64"):
            return text
    elif not _BASE64_IMAGE.fullmatch(text):
        return text
    try:
        return base64.b64decode("".join(encoded.split()), validate=True)
    except binascii.Error:
        return text


def source_of(row: Row, column: str) -> bytes | str | None:
    """Return `image_of` for a row's cell; a relative path is joined to the row's folder."""
    image = image_of(row.cells[column])
    if isinstance(image, str) and is_local(image) and not image.startswith(_DATA_URI):
        return str(row.folder / image)
    return image


class Outage(OSError):
    """Raised if the storage of an image fails; a later attempt may succeed."""


def read_image(source: bytes | str) -> bytes:
    """Return the image bytes for a result of `source_of`.

    Raises Outage if the image may be readable later, and OSError or ValueError if it cannot be read.
    """
    if isinstance(source, bytes):
        return source
    if source.startswith(_DATA_URI):
        raise ValueError("the data: URI does not contain valid base64")
    if is_local(source):
        path = Path(source)
        if path.exists() and not path.is_file():
            raise OSError(f"{source} is a folder, a pipe or a device, not a file")  # reading a pipe would not end
        return path.read_bytes()
    try:
        file_system, path = fsspec.core.url_to_fs(source)
        return bytes(file_system.cat_file(path))
    except Exception as error:  # backends raise many types: botocore's, aiohttp's, OSError
        problem = f"{source}: {type(error).__name__}: {error}"
        raise (Outage if explain(error).kind == "outage" else OSError)(problem) from error


def captions_of(value: Any) -> list[str]:
    """Return the nonblank captions in a table cell; in a list of captions, runs of whitespace become single spaces.

    Numbers and dates, except NaN, are captions too, as in CSV files, in which every cell is read as text.
    """
    if isinstance(value, list):
        return [" ".join(caption.split()) for cell in value for caption in captions_of(cell)]
    if isinstance(value, int | float | date) and not isinstance(value, bool) and value == value:  # not NaN
        value = str(value)
    if isinstance(value, str) and value.strip():
        return [value.strip()]
    return []
