"""Pack a table of pairs into tar shards, with many processes; an interrupted one resumes.

    OUT/pack.json                       what is packed, and how
    OUT/00000.tar  00000_stats.json     a shard of `shard_size` rows, and when it is complete, what became of them
    OUT/broken.jsonl                    rows that could not be used, with the reason, written at the end

A sample's key is the number of its row, its uid that of a column `uid` or a hash of image and captions. Images keep
their bytes; GIF and BMP, which shards do not hold, become PNG. Every row is in a shard or in the list of broken ones.
"""

import hashlib
import io
import json
import re
import tarfile
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any, NamedTuple

from neuclip_ds.data.atomic_write import atomic_write, check_unused
from neuclip_ds.data.captions import JSON, TEXT
from neuclip_ds.data.decoders import DecodeError, decode_pil
from neuclip_ds.data.disk import explain_disk
from neuclip_ds.data.journal import RESUME
from neuclip_ds.data.pair_table import (
    CAPTION_COLUMNS,
    IMAGE_COLUMNS,
    ImageCell,
    PairTable,
    Rows,
    captions_of,
    find_column,
)
from neuclip_ds.errors import UserError
from neuclip_ds.redaction import redact

OnProgress = Callable[[int, int], None]  # (rows done, total rows)

_ABOUT, _BROKEN, _STATS = "pack.json", "broken.jsonl", "_stats.json"
_MAGIC = {"jpg": re.compile(rb"\xff\xd8"), "png": re.compile(rb"\x89PNG"), "webp": re.compile(rb"RIFF....WEBP", re.S)}
_MEMBER = re.compile(rf"([^.:/]+\.)*{TEXT}")
_AHEAD = 2  # shards of each process that are read before they are packed


class Columns(NamedTuple):
    """Columns of a table that are packed; all others that hold no bytes go to the sample's JSON."""

    image: str
    captions: tuple[tuple[str, str], ...]  # (member, column): ("txt", "caption"), ("syn.txt", "recaption")


class Broken(NamedTuple):
    """A row that cannot be used, and why."""

    row: int
    image: str  # where it is, if the table says
    reason: str

    @property
    def cause(self) -> str:
        """The kind of error, by which rows are counted."""
        return self.reason.partition(":")[0]


class Packed(NamedTuple):
    """What became of all rows."""

    rows: int
    pairs: int
    shards: int
    causes: Counter[str]  # of the broken ones
    several: int  # rows with several captions in a member, one on each line


class _Job(NamedTuple):
    out: Path
    number: int  # of the shard
    first: int  # row of the table
    folder: Path  # that relative paths of images begin at
    columns: Columns

    @property
    def stem(self) -> str:
        return f"{self.number:05d}"


def choose_columns(table: PairTable, image: str | None = None, captions: Sequence[str] = ()) -> Columns:
    """Return the columns to pack.

    Args:
        image: column of images, by default the first with a usual name.
        captions: MEMBER=COLUMN, or COLUMN for the member txt; by default the first column with a usual name.

    Raises:
        UserError: a column does not exist, or a member is no text or named twice.
    """
    image = image or find_column(table, IMAGE_COLUMNS, "images", "name it with --image")
    captions = captions or [find_column(table, CAPTION_COLUMNS, "captions", "name it with --captions")]
    pairs = [(member or TEXT, column) for member, _, column in (text.rpartition("=") for text in captions)]
    for column in (image, *(column for _, column in pairs)):
        if column not in table.columns:
            raise UserError(f"{table.name} has no column {column}; its columns are {', '.join(table.columns)}.")
    for member, count in Counter(member for member, _ in pairs).items():
        if count > 1 or not _MEMBER.fullmatch(member):
            raise UserError(
                f"--captions has {member}={dict(pairs)[member]}: each needs a separate member, txt or syn.txt."
            )
    return Columns(image, tuple(pairs))


def pack(
    table: PairTable,
    out: Path,
    columns: Columns,
    executor: Executor,
    processes: int,
    shard_size: int = 10_000,
    on_progress: OnProgress = lambda done, total: None,
) -> Packed:
    """Write the shards of a table that are not there yet.

    Args:
        out: folder of the shards, created if absent.
        executor: its workers write the shards, `processes` at a time.

    Raises:
        UserError: `out` holds other shards, the disk is full, the table changes meanwhile, or no row can be used.
    """
    with explain_disk(out, "name another folder"):
        _claim(out, table, columns, shard_size)
    total = -(-table.rows // shard_size)
    missing = [number for number in range(total) if _read_stats(out, number) is None]
    done = table.rows - sum(min(shard_size, table.rows - number * shard_size) for number in missing)
    on_progress(done, table.rows)
    running, wanted = deque[Future[int]](), set(missing)
    begin = missing[0] if missing else total
    for number, rows in enumerate(table.slices(shard_size, begin * shard_size) if missing else (), start=begin):
        if number in wanted:
            job = _Job(out, number, number * shard_size, table.folder, columns)
            running.append(executor.submit(_write_shard, job, rows))
        while len(running) >= _AHEAD * processes:
            done += running.popleft().result()
            on_progress(done, table.rows)
    for future in running:
        done += future.result()
        on_progress(done, table.rows)
    return _finish(out, table, total)


def _claim(out: Path, table: PairTable, columns: Columns, shard_size: int) -> None:
    """Note in a folder what is packed there; raise UserError where it is something else."""
    about = {"table": table.identity, "rows": table.rows, "columns": columns, "shard_size": shard_size}
    text = json.dumps({"source": table.name, "id": hashlib.sha256(repr(about).encode()).hexdigest()[:32]}) + "\n"
    path = out / _ABOUT
    if path.is_file() and path.read_text(encoding="utf-8") != text:
        raise UserError(f"{out} holds shards of another table, or with other options; name another folder.")
    if not path.is_file():
        check_unused(out)
        out.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as temporary:
            temporary.write_text(text, encoding="utf-8")


def _read_stats(out: Path, number: int) -> dict[str, Any] | None:
    """Return what became of a shard's rows, None if it is not complete."""
    path = out / f"{number:05d}{_STATS}"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def _write_shard(job: _Job, rows: Rows) -> int:
    """Write a shard in a worker; return the number of its rows."""
    broken, packed, several = list[Broken](), 0, 0
    path = job.out / f"{job.stem}.tar"
    with explain_disk(job.out, RESUME):
        with atomic_write(path) as temporary, tarfile.open(temporary, "w") as archive:
            values_of = (values for batch in rows.batches() for values in batch.to_pylist())
            for number, values in enumerate(values_of, start=job.first):
                image = ImageCell.of(values[job.columns.image], job.folder)
                captions = {member: captions_of(values[column]) for member, column in job.columns.captions}
                try:
                    members = _members(image, captions)
                except DecodeError as error:
                    where = image.source if image is not None and isinstance(image.source, str) else ""
                    broken.append(Broken(number, redact(where), redact(str(error))))
                    continue
                packed += 1
                several += any(len(found) > 1 for found in captions.values())
                _add(archive, f"{number:09d}", {**members, JSON: _metadata(values, job.columns, members)})
        if not packed:
            path.unlink()
        # img2dataset's names, from which build-manifest --from-side-files counts
        stats = {"count": packed + len(broken), "successes": packed, "several": several, "broken": broken}
        with atomic_write(job.out / f"{job.stem}{_STATS}") as temporary:
            temporary.write_text(json.dumps(stats), encoding="utf-8")
    return len(rows)


def _members(image: ImageCell | None, captions: Mapping[str, Sequence[str]]) -> dict[str, bytes]:
    """Return image and captions as a shard has them; raise DecodeError where there is none, or the image is broken."""
    if image is None:
        raise DecodeError("no image")
    texts = {member: "\n".join(found).encode("utf-8", "replace") for member, found in captions.items() if found}
    if not texts:
        raise DecodeError("no caption")
    extension, data = _encoded(image)
    return {extension: data, **texts}


def _metadata(values: Mapping[str, Any], columns: Columns, members: Mapping[str, bytes]) -> bytes:
    """Return the other columns, but those that hold bytes, as JSON; with a uid of what is packed if they have none."""
    taken = {columns.image, *(column for _, column in columns.captions)}
    others = {name: value for name, value in values.items() if name not in taken and not _holds_bytes(value)}
    if "uid" not in others:
        others = {"uid": _uid(members), **others}
    return json.dumps(others, default=str, ensure_ascii=False).encode("utf-8", "replace")


def _uid(members: Mapping[str, bytes]) -> str:
    """Return 32 hex digits that belong to these contents, by which `filter` and `build-manifest --uids` select."""
    digest = hashlib.blake2b(digest_size=16)
    for part in (part for name, data in members.items() for part in (name.encode(), data)):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def _holds_bytes(value: Any) -> bool:
    if isinstance(value, dict | list):
        return any(_holds_bytes(part) for part in (value.values() if isinstance(value, dict) else value))
    return isinstance(value, bytes)


def _add(archive: tarfile.TarFile, key: str, members: Mapping[str, bytes]) -> None:
    for extension, data in members.items():
        described = tarfile.TarInfo(f"{key}.{extension}")  # of a fixed time and owner: equal samples give equal files
        described.size = len(data)
        archive.addfile(described, io.BytesIO(data))


def _encoded(image: ImageCell) -> tuple[str, bytes]:
    """Return the extension and the bytes of an image that decodes; raise DecodeError for any other."""
    try:
        data = image.read()
    except (OSError, ValueError) as error:
        raise DecodeError(f"image cannot be read: {error}") from error
    try:
        decoded = decode_pil(data).image
    except DecodeError as error:
        raise DecodeError(f"image cannot be decoded: {error}") from error
    extension = next((name for name, magic in _MAGIC.items() if magic.match(data)), None)
    if extension is not None:
        return extension, data
    decoded.save(out := io.BytesIO(), "PNG")  # type: ignore[union-attr]
    return "png", out.getvalue()


def _finish(out: Path, table: PairTable, shards: int) -> Packed:
    """List the broken rows of all shards, and count."""
    found = [stats for number in range(shards) if (stats := _read_stats(out, number)) is not None]
    rows, pairs, several = (sum(stats[name] for stats in found) for name in ("count", "successes", "several"))
    broken = [Broken(*one) for stats in found for one in stats["broken"]]
    if rows != table.rows:
        raise UserError(f"{table.name} has changed while it was packed ({rows} of {table.rows} rows); pack it again.")
    if broken:
        with explain_disk(out, RESUME), atomic_write(out / _BROKEN) as temporary:
            temporary.write_text("".join(json.dumps(one._asdict()) + "\n" for one in broken), encoding="utf-8")
    causes = Counter(one.cause for one in broken)
    if not pairs:
        listed = f" (most often: {causes.most_common(1)[0][0]}; {out / _BROKEN})" if broken else ""
        raise UserError(f"No row of {table.name} can be used{listed}; check the columns, and where the images are.")
    return Packed(rows, pairs, sum(stats["successes"] > 0 for stats in found), causes, several)
