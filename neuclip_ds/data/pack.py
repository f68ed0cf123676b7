"""Pack tables of image-caption pairs into tar shards; neuclip_ds/cli/pack.py describes the columns of the tables.

    OUT/00000.tar       samples 000000000.jpg (or png, webp), .txt (or syn.txt ...), .json; the key is the row number
    OUT/broken.jsonl    rows that could not be used: the row's number (from 0, without the header), image and reason
    OUT/retry.jsonl     the rows whose images could not be fetched because the storage failed: a table to pack later

Rows with the same image path or bytes become one sample, because separate samples would be negatives of each other. The
sample's key and its other columns come from the first of these rows. The columns of images and captions are read twice:
first to find these rows and the members that contain several captions, one per line. Every caption in such a member is
a single line. If the storage of an image fails, the request is repeated for 30 s. Once a host has failed for that long,
each of its images is requested only once, until a request succeeds.

A sample's uid comes from the `uid` column or, if there is no such column, is a hash of the image and the captions. GIF
and BMP images are converted to PNG, because shards cannot contain these formats. OUT is not created if packing fails.
"""

import hashlib
import io
import itertools
import json
import math
import re
import time
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np

from neuclip_ds.data.decoders import JSON, TEXT, DecodeError, decode_pil
from neuclip_ds.data.tables import (
    CAPTION_COLUMNS,
    IMAGE_COLUMNS,
    Outage,
    PairTable,
    Row,
    captions_of,
    image_of,
    read_image,
    source_of,
)
from neuclip_ds.errors import UserError, redact
from neuclip_ds.files import new_folder

_MAGIC = {"jpg": re.compile(rb"\xff\xd8"), "png": re.compile(rb"\x89PNG"), "webp": re.compile(rb"RIFF....WEBP", re.S)}
_MEMBER = re.compile(rf"(?!_)([^.:/]+\.)*{TEXT}")  # webdataset does not write members that begin with _
_GROUPS_AT_ONCE = 256  # groups of rows that are encoded at once; few, because they may contain images
PAUSES = (1.0, 2.0, 4.0, 8.0, 15.0)  # seconds between the attempts to fetch an image while its storage fails
_MAX_CHARACTERS = 200  # maximum length of a name or reason in broken.jsonl; a cell may contain an image
RETRY = "retry.jsonl"  # name of the file with the rows whose storage failed
_OUTAGE = "storage failed"


class Columns(NamedTuple):
    """The image and caption columns of a table. All other non-binary columns are stored in the sample's JSON."""

    image: str
    captions: dict[str, str]  # maps each member to a column: {"txt": "caption", "syn.txt": "recaption"}


@dataclass(frozen=True, kw_only=True)
class Packed:
    """Statistics of a packed table."""

    rows: int
    pairs: int  # samples; all rows with the same image count as one
    causes: Counter[str]  # number of broken rows by cause
    several: int  # samples with several captions in a text member, one per line
    members_of_lines: Collection[str]  # the text members that contain one caption per line
    lost: int  # broken rows that retry.jsonl lists, because the storage of their images failed


def choose_columns(table: PairTable, image: str | None = None, captions: Sequence[str] = ()) -> Columns:
    """Return the columns to pack; by default, the first image and caption columns with recognized names.

    Each of `captions` is MEMBER=COLUMN, or COLUMN for the member txt. Members become lowercase, as readers expect.
    Raises UserError if a column does not exist, if no column has a recognized name, if a member is neither txt nor
    PREFIX.txt (where PREFIX contains no : or / and does not begin with an underscore), or if two columns have the same
    member.
    """
    image = image or table.find_column(IMAGE_COLUMNS, "image", "pass the name of the column with --image")
    captions = captions or [
        table.find_column(CAPTION_COLUMNS, "caption", "pass the name of the column with --captions")
    ]
    by_member = {}
    for text in captions:
        member, _, column = text.rpartition("=")
        by_member[member.lower() or TEXT] = column
    for column in (image, *by_member.values()):
        if column not in table.columns:
            known = ", ".join(table.columns)
            raise UserError(f"{table.name} has no column {column}; name one of its columns ({known}).")
    if len(by_member) < len(captions) or not all(map(_MEMBER.fullmatch, by_member)):
        raise UserError(
            f"--captions {' '.join(captions)} is not valid: write MEMBER=COLUMN, with a different member for each "
            "column. A member is txt or PREFIX.txt, such as syn.txt; PREFIX must not contain : or /, or begin with _."
        )
    return Columns(image, by_member)


def pack(
    table: PairTable,
    out: Path,
    columns: Columns,
    shard_size: int = 10_000,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    pauses: Sequence[float] = PAUSES,
) -> Packed:
    """Write a table's samples to `out`, `shard_size` per shard; `on_progress` is called with (rows done, total rows).

    While the storage of an image fails, the image is fetched again after each of the `pauses`, in seconds. Raises
    UserError if `out` is not empty or cannot be written, the table cannot be read, or no row can be used.
    """
    import webdataset  # imports torch, which takes seconds

    # read the columns of pairs, and all other columns that fit in JSON
    names = list(dict.fromkeys([columns.image, *columns.captions.values()]))
    for name in table.columns:
        if name not in names and name not in table.binary_columns:
            names.append(name)
    contents = _survey(table, columns)
    groups = _group_rows(table, columns.image, names, contents.repeated)

    rows = 0
    pairs = 0
    several = 0
    broken: list[_Broken] = []
    lost: list[str] = []  # lines of retry.jsonl
    images = _ImageReader(pauses)
    with new_folder(out) as folder, ThreadPoolExecutor() as threads:
        pattern = f"{folder.absolute()}/".replace("%", "%%") + "%05d.tar"
        # a fixed time, so that equal tables give equal files
        with webdataset.ShardWriter(pattern, shard_size, math.inf, verbose=0, encoder=False, mtime=0) as shards:
            while batch := list(itertools.islice(groups, _GROUPS_AT_ONCE)):
                captions = [_captions(columns, contents.members_of_lines, group.values()) for group in batch]
                encoded = threads.map(partial(_encode, columns, images), batch, captions)
                for group, texts, sample in zip(batch, captions, encoded, strict=True):
                    first_row = min(group)
                    image = image_of(group[first_row].cells[columns.image])
                    if isinstance(sample, str):
                        reasons = dict.fromkeys(group, sample)  # by row that cannot be used
                        if sample.startswith(_OUTAGE):
                            lost += [_line({**row.cells, columns.image: image}) for row in group.values()]
                    else:
                        shards.write({"__key__": f"{first_row:09d}", **sample})
                        pairs += 1
                        several += any(len(lines) > 1 for lines in texts.values())
                        reasons = {}
                        for number, row in group.items():
                            if not any(captions_of(row.cells[column]) for column in columns.captions.values()):
                                reasons[number] = "no caption"
                    name = image if isinstance(image, str) else ""
                    broken += [_Broken(number, name, reason) for number, reason in reasons.items()]
                    rows += len(group)
                on_progress(rows, table.rows)
        lines = []
        for entry in sorted(broken):
            report = {"row": entry.number, "image": _shown(entry.image), "reason": _shown(entry.reason)}
            lines.append(_line(report))
        if not pairs:
            first = f" (the first row: {lines[0].strip()})" if lines else ""
            raise UserError(f"No row of {table.name} can be used{first}; check the columns and the image paths.")
        if lines:
            (folder / "broken.jsonl").write_text("".join(lines), encoding="utf-8")
        if lost:
            retry = folder / RETRY
            retry.touch(mode=0o600)  # the secrets in the URLs are needed to fetch the images
            retry.write_text("".join(lost), encoding="utf-8")
    causes = Counter(entry.reason.partition(":")[0] for entry in broken)
    return Packed(
        rows=rows,
        pairs=pairs,
        causes=causes,
        several=several,
        members_of_lines=contents.members_of_lines,
        lost=len(lost),
    )


class _Broken(NamedTuple):
    """A row that cannot be used, with the path or URL of its image, if any, and the reason."""

    number: int
    image: str
    reason: str


def _line(record: Mapping[str, Any]) -> str:
    """Return a line of a JSON Lines file."""
    return json.dumps(record, default=str) + "\n"


def _shown(text: str) -> str:
    """Redact a text for broken.jsonl, and cut it after 200 characters, because it may be a whole image."""
    shown = redact(text)
    return shown if len(shown) <= _MAX_CHARACTERS else f"{shown[:_MAX_CHARACTERS]}..."


class _ImageReader:
    """Reads images, and tries again after each of the `pauses` if their storage fails; several threads may use it."""

    def __init__(self, pauses: Sequence[float]) -> None:
        self._pauses = tuple(pauses)
        self._failing: set[str] = set()  # hosts that failed after all pauses and have not answered since

    def read(self, source: bytes | str) -> bytes:
        """Return the image's bytes; raise the same errors as `read_image`."""
        host = urlsplit(source).netloc if isinstance(source, str) else ""
        pauses = [] if host in self._failing else list(self._pauses)
        while True:
            try:
                data = read_image(source)
            except Outage:
                if not pauses:
                    self._failing.add(host)
                    raise
                time.sleep(pauses.pop(0))
            else:
                self._failing.discard(host)
                return data


class _Contents(NamedTuple):
    """What must be known about a table before its samples are written."""

    repeated: Mapping[int, int]  # number of rows by the hash of the image, for images of several rows
    members_of_lines: frozenset[str]  # text members that contain several captions of an image, one per line


def _survey(table: PairTable, columns: Columns) -> _Contents:
    """Find the images of several rows and the members with several captions of an image, by reading their columns.

    Keeps 8 bytes per cell in memory. Raises UserError if the table cannot be read.
    """
    image_hashes = array("Q")
    caption_hashes = {member: array("Q") for member in columns.captions}  # 0 for rows without a caption or an image
    members_of_lines: set[str] = set()
    for row in table.read(list(dict.fromkeys([columns.image, *columns.captions.values()]))):
        image_hashes.append(_hash_of_image(row, columns.image))
        has_image = image_of(row.cells[columns.image]) is not None
        for member, column in columns.captions.items():
            captions = captions_of(row.cells[column]) if has_image else []
            if len(captions) > 1:
                members_of_lines.add(member)
            caption_hashes[member].append(_hash_of(_as_line(captions[0])) if captions else 0)

    images, counts = np.unique(np.array(image_hashes), return_counts=True)
    is_repeated = counts > 1
    repeated = dict(zip(images[is_repeated].tolist(), counts[is_repeated].tolist(), strict=True))
    rows = np.flatnonzero(np.isin(np.array(image_hashes), images[is_repeated]))  # the rows whose image has several rows
    for member, hashes in caption_hashes.items():
        pairs = np.stack([np.array(image_hashes)[rows], np.array(hashes)[rows]], axis=1)
        pairs = np.unique(pairs[pairs[:, 1] != 0], axis=0)  # each caption of an image once
        if len(np.unique(pairs[:, 0])) < len(pairs):
            members_of_lines.add(member)
    return _Contents(repeated, frozenset(members_of_lines))


def _hash_of(source: bytes | str) -> int:
    data = source if isinstance(source, bytes) else source.encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def _hash_of_image(row: Row, image: str) -> int:
    return _hash_of(source_of(row, image) or b"")


def _as_line(caption: str) -> str:
    return " ".join(caption.split())


def _group_rows(
    table: PairTable, image: str, columns: Sequence[str], repeated: Mapping[int, int]
) -> Iterator[dict[int, Row]]:
    """Group rows by image path or bytes; yield each group as {row number: row} after its last row has been read."""
    unfinished = defaultdict[int, dict[int, Row]](dict)
    for number, row in enumerate(table.read(columns)):
        key = _hash_of_image(row, image)
        if image_of(row.cells[image]) is None or key not in repeated:
            yield {number: row}
            continue
        group = unfinished[key]
        group[number] = row._replace(cells={**row.cells, image: None}) if group else row  # the image may be large
        if len(group) == repeated[key]:
            yield unfinished.pop(key)


def _captions(columns: Columns, members_of_lines: Collection[str], rows: Collection[Row]) -> dict[str, list[str]]:
    """Return the captions of one image's rows, keyed by member.

    Runs of whitespace become single spaces in the members in `members_of_lines` or, if there are several rows, in all
    members. Duplicate captions of several rows are omitted.
    """
    by_member = {}
    for member, column in columns.captions.items():
        captions_of_rows = [captions_of(row.cells[column]) for row in rows]
        if len(captions_of_rows) == 1:
            by_member[member] = captions_of_rows[0]
            if member in members_of_lines:
                by_member[member] = [_as_line(caption) for caption in captions_of_rows[0]]
        else:
            captions = itertools.chain.from_iterable(captions_of_rows)
            by_member[member] = list(dict.fromkeys(map(_as_line, captions)))
    return by_member


def _encode(
    columns: Columns, images: _ImageReader, group: Mapping[int, Row], captions: Mapping[str, list[str]]
) -> dict[str, bytes] | str:
    """Return a sample's members, or the reason why the sample cannot be used, such as a missing or unreadable image."""
    row = group[min(group)]
    source = source_of(row, columns.image)
    texts = {member: "\n".join(lines) for member, lines in captions.items()}
    if source is None or not any(texts.values()):
        return "no caption" if source else "no image"
    try:
        extension, data = _image_member(images.read(source))
    except Outage as error:
        return f"{_OUTAGE}: {error}"
    except (OSError, ValueError) as error:
        return f"image cannot be read: {error}"
    except DecodeError as error:
        return f"image cannot be decoded: {error}"
    members = {extension: data}
    for member, text in texts.items():
        if text:
            members[member] = text.encode("utf-8", "replace")

    # 32 hex digits, which `filter` and `build-manifest --uids` use to select samples
    content = hashlib.blake2b(digest_size=16)
    for member, value in members.items():
        for part in (member.encode(), value):
            content.update(len(part).to_bytes(8, "little"))
            content.update(part)

    # the other columns; a `uid` column replaces the hash
    metadata: dict[str, Any] = {"uid": content.hexdigest()}
    for name, value in row.cells.items():
        if name not in (columns.image, *columns.captions.values()):
            metadata[name] = value
    return {**members, JSON: json.dumps(metadata, default=str, ensure_ascii=False).encode("utf-8", "replace")}


def _image_member(data: bytes) -> tuple[str, bytes]:
    """Return the extension and the bytes of an image as stored in shards; raise DecodeError if decoding fails."""
    decoded = decode_pil(data).image
    extension = next((name for name, magic in _MAGIC.items() if magic.match(data)), None)
    if extension is not None:
        return extension, data
    png = io.BytesIO()
    decoded.save(png, "PNG")  # type: ignore[union-attr]
    return "png", png.getvalue()
