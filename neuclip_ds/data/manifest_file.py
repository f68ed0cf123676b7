"""Read and write manifests on disk, and find shards that occur more than once.

A manifest is a folder that contains these files:

    shards.parquet                      one row per shard; metadata: the version, sample count and content hash
    samples/part-*.parquet              optional: the samples' offsets and keys (neuclip_ds/data/sample_table.py)
"""

import filecmp
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from neuclip_ds.data.manifest import Manifest, Shard, check_size, hash_of_shards, shards_from_columns, shards_to_columns
from neuclip_ds.data.sample_table import SampleTables, TableLocation
from neuclip_ds.data.shards import is_local
from neuclip_ds.errors import UserError, counted, redact
from neuclip_ds.files import atomic_write, exists

_VERSION = 4
_TABLE = "shards.parquet"
_META = "neuclip_ds."  # prefix of the keys in the table's metadata
SAMPLES = "samples"  # folder of the sample tables
_SCHEMA = pa.schema(
    [
        # the fields of `Shard`
        ("path", pa.string()),
        ("start", pa.int64()),
        ("n", pa.int64()),
        ("bytes", pa.int64()),
        ("n_bad", pa.int64()),
        ("crc32", pa.int64()),
        ("selection", pa.int64()),
        ("layout", pa.int64()),
        # the location of the shard's sample table: a file name and a row group
        ("part", pa.string()),
        ("group", pa.int64()),
    ]
)
_OPTIONAL = ("crc32", "selection", "layout", "part", "group")
_PART = re.compile(r"part-[\w-]+\.parquet")
MIN_SAMPLE_BYTES = 512  # a sample has at least one member, whose header has this size
_MAX_SHARD_BYTES = 1 << 40


def check_distinct(manifest: Manifest) -> None:
    """Raise UserError if two shards of a manifest are found to contain the same samples, which would count twice.

    A copy is not found if either shard has no `layout`, or if either shard is remote and either has no checksum.
    """
    for first, second in _repeats(manifest.shards):
        same = "is listed more than once"
        fix = "list every shard once"
        if first.path != second.path:
            same = f"has the same content as {first.path}"
            fix = "omit one of the two shards"
        raise UserError(f"{second.path} {same}, so its samples would count twice; {fix}.")


def check_separate(training: Manifest, validation: Manifest) -> None:
    """Raise UserError if any validation shard is also a training shard; copies are found as in `check_distinct`."""
    shared = [second for _, second in _repeats([*training.shards, *validation.shards])]
    if shared:
        raise UserError(
            f"{len(shared)} of {validation.n_shards} validation shards (data.val) are among the training shards, such "
            f"as {shared[0].path}: recall would be measured on training pairs. Choose different shards, or set "
            "data.val= (empty) to train without validation data."
        )


def _repeats(shards: Sequence[Shard]) -> Iterator[tuple[Shard, Shard]]:
    """Yield pairs of shards that contain the same samples; in each pair, the shards are in list order."""
    seen: dict[object, Shard] = {}
    for shard in shards:
        if not shard.n:
            continue
        keys: list[object] = [shard.path]
        if shard.layout is not None:
            keys.append((shard.bytes, shard.layout))
        candidates = [seen[key] for key in keys if key in seen]
        for key in keys:
            seen.setdefault(key, shard)
        same = next((other for other in candidates if _is_same(other, shard)), None)
        if same is not None:
            yield same, shard


def _is_same(one: Shard, other: Shard) -> bool:
    """Return whether two shards with the same path or layout contain the same samples; compare all bytes if needed.

    Returns False if the bytes cannot be compared, because a shard is remote or cannot be read.
    """
    if None not in (one.selection, other.selection) and one.selection != other.selection:
        return False  # different samples of the same shard
    if one.path == other.path:
        return True
    if one.crc32 is not None and other.crc32 is not None:
        return one.crc32 == other.crc32
    try:
        return is_local(one.path) and is_local(other.path) and filecmp.cmp(one.path, other.path, shallow=False)
    except OSError:  # the reader reports a missing shard
        return False


def is_manifest(path: str | os.PathLike[str]) -> bool:
    """Return whether `path` is a manifest folder; `path` may be any source of data, such as many paths joined by ::."""
    return exists(Path(path) / _TABLE)


def write_shards(manifest: Manifest, folder: Path, locations: Sequence[TableLocation] = ()) -> None:
    """Write or replace the manifest's shard table atomically; the sample tables at `locations` must already exist.

    If any shard URL contains a secret, only the owner of the file can read the shard table.
    """
    columns = shards_to_columns(manifest.shards)
    no_tables = [None] * manifest.n_shards
    columns["part"] = [location.file.name for location in locations] or no_tables
    columns["group"] = [location.row_group for location in locations] or no_tables
    meta = {"version": _VERSION, "n": manifest.n, "content_hash": manifest.content_hash}
    schema = _SCHEMA.with_metadata({f"{_META}{key}": str(value) for key, value in meta.items()})
    with atomic_write(folder / _TABLE) as temporary:
        pq.write_table(pa.table(columns, schema=schema), temporary, write_page_checksum=True)
        if any(redact(shard.path) != shard.path for shard in manifest.shards):
            temporary.chmod(0o600)  # the secrets in the URLs are needed to fetch the shards


def load_manifest(folder: str | os.PathLike[str]) -> Manifest:
    """Read a manifest folder, and check the file sizes of two shards: the first, and the one with the most samples.

    A remote shard is not checked.

    Raises:
        UserError: the folder is not a valid manifest, or one of the two shards is missing or has a different size.
    """
    folder = Path(folder)
    if not is_manifest(folder):
        raise UserError(f"{folder} is not a manifest folder (it lacks {_TABLE}); run neuclip-ds build-manifest first.")
    try:
        with pq.ParquetFile(folder / _TABLE, page_checksum_verification=True) as file:  # read_table imports pandas
            table = file.read()
        meta = {key.decode(): value.decode() for key, value in (table.schema.metadata or {}).items()}
        if (version := meta.get(f"{_META}version")) != str(_VERSION):
            raise UserError(
                f"The manifest in {folder} has version {version}, not {_VERSION}; remove it and build it again."
            )
        rows = table.select(_SCHEMA.names).cast(_SCHEMA)
    except (ValueError, KeyError, OSError, pa.ArrowException) as error:
        raise _unreadable(folder, error) from error
    if any(rows.column(name).null_count for name in _SCHEMA.names if name not in _OPTIONAL):
        raise _unreadable(folder, "values are missing")
    columns = rows.to_pydict()
    shards = shards_from_columns(columns)
    _check_possible(folder, shards)
    if meta.get(f"{_META}content_hash") != hash_of_shards(shards):
        raise UserError(f"The manifest in {folder} does not match its own hash; remove it and build it again.")
    samples = None
    parts = columns["part"]
    groups = columns["group"]
    if any(parts):
        if None in parts or None in groups or not all(map(_PART.fullmatch, parts)):
            raise _unreadable(folder, "it omits a sample table, or names a file that cannot contain sample tables")
        tables = folder / SAMPLES
        locations = [TableLocation(tables / part, group) for part, group in zip(parts, groups, strict=True)]
        samples = SampleTables.open(locations, [shard.n for shard in shards])
    if shards:
        largest = max(shards, key=lambda shard: shard.n)
        for shard in (shards[0], largest):
            if not is_local(shard.path):
                continue
            try:
                check_size(shard, Path(shard.path).stat().st_size)
            except (OSError, ValueError) as error:
                raise UserError(
                    f"Shard {shard.path} of the manifest {folder} does not exist or cannot be accessed; restore the "
                    "shard, or build the manifest again."
                ) from error
    return Manifest(shards, samples)


def _check_possible(folder: Path, shards: Sequence[Shard]) -> None:
    """Raise UserError if a sample count or size is impossible: these values determine how much memory is allocated."""
    start = 0
    for shard in shards:
        # a selection may list a sample several times
        fewest_bytes = 0 if shard.selection is not None else shard.n * MIN_SAMPLE_BYTES
        if shard.start != start or shard.n < 0 or not fewest_bytes <= shard.bytes <= _MAX_SHARD_BYTES:
            raise UserError(
                f"The manifest in {folder} lists {counted(shard.n, 'sample')} in {counted(shard.bytes, 'byte')} of "
                f"{shard.path} from index {shard.start}, which is impossible; remove it and build it again."
            )
        start += shard.n


def _unreadable(folder: Path, error: Exception | str) -> UserError:
    reason = " ".join(str(error).split())[:200]
    fix = "remove it and build it again"
    if isinstance(error, OSError) and error.errno is not None:  # for damaged files, pyarrow's OSError has no errno
        fix = "check the permissions and the storage"
    return UserError(f"The manifest in {folder} cannot be read ({reason}); {fix}.")
