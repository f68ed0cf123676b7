"""Read tables of image-caption pairs: CSV, TSV, JSON Lines or Parquet files with a column of images and of captions."""

import glob
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.csv
import pyarrow.dataset

from neuclip_ds.data.shards import is_local
from neuclip_ds.errors import UserError, explained

IMAGE_COLUMNS = ("image", "filepath", "file_name", "filename", "image_path", "image_file", "path", "file", "jpg", "png")
CAPTION_COLUMNS = ("caption", "text", "title", "captions", "sentence", "sentences", "txt", "alt_text")
TABLES = (".csv", ".tsv", ".jsonl", ".parquet")
_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_BATCH = 256  # rows read at once; few, because they may contain images
_FIX = "fix or remove that file"


@dataclass(frozen=True, kw_only=True)
class PairTable:
    """A table of image-caption pairs, with its rows in a fixed order."""

    name: str  # for messages
    data: pyarrow.dataset.Dataset
    rows: int
    folder: Path  # base of relative image paths

    def read(self, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
        """Yield every row with only the given columns; raise UserError if the table cannot be read."""
        with explained(f"The table {self.name} cannot be read", _FIX):
            for batch in self.data.to_batches(columns=list(columns), batch_size=_BATCH, fragment_readahead=1):
                yield from batch.to_pylist()

    def find_column(self, usual: Sequence[str], what: str, advice: str) -> str:
        """Return the first column in `usual` that exists, ignoring case; raise UserError with `advice` if none does."""
        by_lowercase_name = {column.lower(): column for column in reversed(self.data.schema.names)}
        for name in usual:
            if name in by_lowercase_name:
                return by_lowercase_name[name]
        raise UserError(
            f"{self.name} has no column of {what} with a usual name ({', '.join(usual)}), but "
            f"{', '.join(self.data.schema.names)}: {advice}."
        )


def open_table(source: str) -> PairTable:
    """Open a table of image-caption pairs; raise UserError if there is no table or it cannot be read.

    `source` is a CSV, TSV, JSON Lines or Parquet file, or a folder or glob of such files, all of the same format.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        paths = sorted(str(file) for file in path.rglob("*") if file.suffix.lower() in TABLES)
    else:
        paths = [str(path)] if path.is_file() else sorted(glob.glob(str(path), recursive=True))  # noqa: PTH207 - absolute
    extensions = {Path(file).suffix.lower() for file in paths}
    if len(extensions) != 1 or not extensions <= set(TABLES):
        raise UserError(f"{source} is not a table; name files of one kind ({', '.join(TABLES)}).")
    (extension,) = extensions
    with explained(f"The table {source} cannot be read", _FIX):
        data = _open_files(paths, extension)
        return PairTable(name=source, data=data, rows=data.count_rows(), folder=Path(paths[0]).parent.absolute())


def _open_files(paths: list[str], extension: str) -> pyarrow.dataset.Dataset:
    if extension not in _DELIMITERS:
        return pyarrow.dataset.dataset(paths, format="json" if extension == ".jsonl" else "parquet")
    parsing = pyarrow.csv.ParseOptions(delimiter=_DELIMITERS[extension], newlines_in_values=True)
    with pyarrow.csv.open_csv(paths[0], parse_options=parsing) as first:
        schema = pa.schema([(name, pa.string()) for name in first.schema.names])  # so that the caption "7" is text
    return pyarrow.dataset.dataset(paths, schema=schema, format=pyarrow.dataset.CsvFileFormat(parsing))


def image_of(value: Any) -> bytes | str | None:
    """Return the encoded image in a table cell, or the path or URL of the image; None if the cell has neither."""
    if isinstance(value, dict):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, str):
        value = value.strip()
    return value if value and isinstance(value, bytes | str) else None


def read_image(source: bytes | str, folder: Path) -> bytes:
    """Return the image bytes for a result of `image_of`, with paths relative to `folder`; raise OSError on failure."""
    if isinstance(source, bytes):
        return source
    if is_local(source):
        return (folder / source).read_bytes()
    try:
        with fsspec.open(source, "rb") as file:
            return bytes(file.read())
    except Exception as error:  # backends raise many types: botocore's, aiohttp's, OSError
        raise OSError(f"{source}: {type(error).__name__}: {error}") from error


def captions_of(value: Any) -> list[str]:
    """Return the nonblank captions in a table cell; in a list of captions, line breaks become spaces."""
    if isinstance(value, list):
        return [" ".join(caption.split()) for caption in value if isinstance(caption, str) and caption.strip()]
    if isinstance(value, str) and value.strip():
        return [value.strip()]
    return []
