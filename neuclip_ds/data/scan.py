"""Scan one shard: index its samples, count those without an image or a caption, and optionally compute checksums.

A scan with checksums first reads the whole file, so that the later passes (header walk, checksums of the members) read
from the page cache.
"""

import logging
import os
import tempfile
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from neuclip_ds.data.decoders import Captions
from neuclip_ds.data.fetch import AttemptFailed, FetchError, Retries, attempt
from neuclip_ds.data.manifest import Shard
from neuclip_ds.data.readers import TooLarge, read_at
from neuclip_ds.data.sample_table import IMAGE_EXTENSIONS, SampleTable, tabulate
from neuclip_ds.data.shards import is_local
from neuclip_ds.data.tar import ShardIndex, is_blank, read_index
from neuclip_ds.data.uids import UID, UidFiles, uid_of, uid_of_location
from neuclip_ds.errors import UserError, counted
from neuclip_ds.files import checksum_of
from neuclip_ds.limits import fix_of_limit

log = logging.getLogger(__name__)

_STALL_TIMEOUT = 300.0  # seconds without new data after which a remote shard is fetched again
_MAX_OUTAGE = 30.0  # seconds for which a fetch is retried while the storage fails
_EMPTY_TAR_SIZE = 10_240  # size in bytes of a tar without files, as tar programs write it by default
_OTHER_FORMATS = {  # first bytes of a file that is not a tar -> what the file is, and what to do
    b"\x1f\x8b": "is compressed with gzip; decompress it (gunzip)",
    b"\x28\xb5\x2f\xfd": "is compressed with zstd; decompress it (unzstd)",
    b"\xfd7zXZ": "is compressed with xz; decompress it (unxz)",
    b"BZh": "is compressed with bzip2; decompress it (bunzip2)",
    b"PK": "is a zip archive; write its files to a tar",
    b"<": "is a web page, not a tar; the server may have answered with an error: download the shard again",
    b"{": "is JSON, not a tar; the server may have answered with an error: download the shard again",
    b"version https://git-lfs": "is a Git LFS pointer, not a tar; download its content (git lfs pull)",
}


@dataclass(frozen=True, kw_only=True)
class ScanOptions:
    """The options of a scan."""

    captions: tuple[str, ...] = ("txt",)  # sources as in `data.captions`; a sample without any of their members is bad
    checksum: bool = False  # whether to compute the CRC-32 of the file and of each sample's members
    uids: tuple[str, ...] = ()  # files that list the uids to keep; if empty, all samples are kept
    uid_key: str = "uid"  # key of the uid in a sample's JSON
    side_files: bool = False  # whether to count samples from img2dataset's side files, without reading tars

    @property
    def has_tables(self) -> bool:
        """Whether to keep the offsets and keys of the samples."""
        return self.checksum or bool(self.uids)


@dataclass(frozen=True, kw_only=True)
class Scan:
    """The result of scanning one shard."""

    shard: Shard  # with start 0; the actual start is assigned later
    n_images: int  # samples with an image
    n_captions: int  # samples with a caption
    extensions: Sequence[str] = ()  # extensions of the first samples, for messages
    lost_bytes: int = 0  # bytes in damaged regions
    causes: Sequence[str] = ()  # other problems of the shard, each with a fix
    table: tuple[str, int] | None = None  # (file name, row group) of the sample table


Scans = tuple[list[Scan], dict[str, str]]  # the scans, and the reason for each unusable shard by path


def scan_shard(path: str, options: ScanOptions) -> tuple[Scan, SampleTable]:
    """Scan the tar at `path` (a file or a URL), and return the scan and the table of the tar's samples.

    Raises UserError if the file is not a tar, if it or a uid file cannot be read, if its name is not UTF-8, or if a
    caption source is invalid.
    """
    try:
        path.encode()
        with local_copy(path) as file:
            return _scan(path, file, options)
    except UnicodeEncodeError as error:
        raise UserError(f"The shard {path!a} has a name that is not UTF-8; rename it.") from error
    except FetchError as error:
        advice = "" if fix_of_limit(error) else " Correct the address, or omit the shard."
        raise UserError(f"{error}{advice}") from error
    except OSError as error:
        reason = error.strerror or str(error)
        fix = fix_of_limit(error) or "check the file and its permissions"
        raise UserError(f"Shard {path} cannot be read: {reason}; {fix}.") from error


@contextmanager
def local_copy(path: str) -> Iterator[Path]:
    """Yield a shard as a local file; a remote shard is fetched, and the copy is removed when the `with` block ends.

    Raises FetchError if a remote shard does not exist or a limit of this machine is reached, and UserError if the shard
    cannot be fetched for another reason.
    """
    if is_local(path):
        yield Path(path)
        return
    retries = Retries(path, _MAX_OUTAGE)
    with tempfile.TemporaryDirectory(prefix="neuclip_ds_shard_", ignore_cleanup_errors=True) as folder:
        fetched = None
        while fetched is None:
            try:
                fetched = attempt(path, Path(folder), _STALL_TIMEOUT)
            except AttemptFailed as failure:
                time.sleep(retries.pause_after(failure))
        yield fetched


def _scan(path: str, file: Path, options: ScanOptions) -> tuple[Scan, SampleTable]:
    crc32 = checksum_of(file).crc32 if options.checksum else None
    text_members = Captions(options.captions).extensions
    selection = None
    with file.open("rb") as opened:
        fd = opened.fileno()
        index = read_index(fd)
        _check_tar(path, fd, index)
        blank_gaps = [gap for gap in index.gaps if is_blank(fd, gap)]
        table = tabulate(index.samples, text_members)
        layout = table.layout
        if options.has_tables:
            uids = [uid_of(_read(fd, table, row, "json"), options.uid_key) for row in range(table.n)]
            words = np.array([uid or (0, 0) for uid in uids], dtype=np.uint64).reshape(table.n, 2)
            table = replace(table, uids=words)
        if options.uids:
            # list each sample as often as the files list its uid
            known_uids = [uid or uid_of_location(path, table.main_extents(row)) for row, uid in enumerate(uids)]
            counts = UidFiles(options.uids).count(np.array(known_uids, dtype=UID))
            table = table.take(np.repeat(np.arange(table.n), counts))
            selection = zlib.crc32(table.ordinals.tobytes())
        if options.checksum:
            table = replace(table, crc32=_member_checksums(fd, table))
    has_image = table.has("image")
    has_caption = np.logical_or.reduce([table.has(member) for member in text_members])

    extensions: set[str] = set()
    for entry in index.samples[:100]:
        extensions.update(entry.members)
    shard = Shard(
        path=path,
        start=0,
        n=table.n,
        bytes=file.stat().st_size,
        n_bad=int((~(has_image & has_caption)).sum()),
        crc32=crc32,
        selection=selection,
        layout=layout,
    )
    scan = Scan(
        shard=shard,
        n_images=int(has_image.sum()),
        n_captions=int(has_caption.sum()),
        extensions=sorted(extensions),
        lost_bytes=sum(gap.size for gap in index.gaps if gap not in blank_gaps),
        causes=_causes_of(index, sum(gap.size for gap in blank_gaps)),
    )
    return scan, table


def _check_tar(path: str, fd: int, index: ShardIndex) -> None:
    """Raise UserError if a file is empty or has no tar header; up to 10,240 zero bytes are a tar without files."""
    size = os.fstat(fd).st_size
    has_only_zeros = size > _EMPTY_TAR_SIZE and index.gaps == [] and not any(os.pread(fd, _EMPTY_TAR_SIZE, 0))
    if size and index.gaps != [(0, size)] and not has_only_zeros:
        return
    problem = "is empty (0 bytes); download it again"
    if has_only_zeros:
        problem = f"contains only zeros ({size} bytes), so it was probably not written completely; download it again"
    elif size:
        start = os.pread(fd, 512, 0).lstrip(b"\xef\xbb\xbf \t\r\n")
        problem = "is not a tar: it has no valid header; download it again"
        problem = next((text for magic, text in _OTHER_FORMATS.items() if start.startswith(magic)), problem)
    raise UserError(f"Shard {path} {problem}.")


def _causes_of(index: ShardIndex, blank_bytes: int) -> list[str]:
    """Return the problems of a shard other than damaged regions, each with a fix."""
    causes = []
    if index.split:
        causes.append(
            f"{counted(index.split, 'sample has', 'samples have')} the key of an earlier sample. If the members of a "
            "sample are not adjacent, write the tar again, sorted by name (tar --sort=name); otherwise, give each "
            "sample its own key"
        )
    if index.repeated:
        causes.append(
            f"{counted(index.repeated, 'member is', 'members are')} ignored, because an earlier member of the same "
            "sample has the same extension: give each sample its own key"
        )
    if index.unreadable:
        causes.append(
            f"{counted(index.unreadable, 'member is', 'members are')} ignored as sparse or as a link to another file: "
            "write the tar again with the files' contents (tar --dereference --hard-dereference, without --sparse)"
        )
    if blank_bytes:
        causes.append(
            f"{blank_bytes} bytes between members are zeros. If several tars were joined, this is harmless; if not, "
            "download the shard again"
        )
    return causes


def _member_checksums(fd: int, table: SampleTable) -> NDArray[np.uint32]:
    """Return the CRC-32 of each member of each sample, (n, m)."""
    checksums = np.zeros((table.n, len(table.members)), dtype=np.uint32)
    for row in range(table.n):
        for column, member in enumerate(table.members):
            checksums[row, column] = zlib.crc32(_read(fd, table, row, member))
    return checksums


def _read(fd: int, table: SampleTable, row: int, member: str) -> bytes:
    """Return the bytes of a sample's member, or no bytes if it is absent or too large."""
    extent = table.extent(row, member)
    try:
        return b"" if extent is None else read_at(fd, *extent)
    except TooLarge:  # a bad sample, not a bad shard
        return b""


def log_loss(scan: Scan) -> None:
    """Log one warning if a shard is damaged, is empty or has bad samples, and one more for each of its `causes`."""
    shard = scan.shard
    if scan.lost_bytes:
        log.warning(
            "Shard %s is damaged: %d of %d bytes are lost; download it again", shard.path, scan.lost_bytes, shard.bytes
        )
    elif shard.n == 0 and shard.selection is None:
        log.warning("Shard %s contains no samples; check how it was written, or omit it", shard.path)
    elif shard.n_bad:
        good = shard.n - shard.n_bad
        log.warning(
            "Shard %s: only %d of %d samples have both an image and a caption; training skips the others",
            shard.path,
            good,
            shard.n,
        )
    for cause in scan.causes:
        log.warning("Shard %s: %s", shard.path, cause)


def check_usable(scans: Sequence[Scan], paths: Sequence[str]) -> None:
    """Raise UserError if the shards at `paths` together have no sample with an image and a caption."""
    folders = {path.rpartition("/")[0] for path in paths}
    source = f"{len(paths)} tars in {min(folders)}" if len(folders) == 1 else f"{len(paths)} tars, such as {paths[0]}"
    if len(paths) == 1:
        source = paths[0]
    all_extensions = sorted(set().union(*(scan.extensions for scan in scans)))
    extensions = ", ".join(all_extensions[:10])
    if not any(scan.shard.n for scan in scans):
        if any(scan.shard.selection is not None for scan in scans):
            raise UserError(
                f"None of the uids is in {source}; check --uid-key, and that the uid files were made for these shards."
            )
        raise UserError(f"No samples in {source}; a sample has members such as 000000001.jpg and 000000001.txt.")
    if not any(scan.n_images for scan in scans):
        raise UserError(
            f"No sample in {source} has an image (extensions found: {extensions}); the extension of an image must be "
            f"one of {', '.join(IMAGE_EXTENSIONS)}."
        )
    if not any(scan.n_captions for scan in scans):
        raise UserError(
            f"No captions in {source} (extensions found: {extensions}); set data.captions (or --captions) to the "
            "members that contain captions, such as txt or json:caption, or add such members."
        )
    if not any(scan.shard.n > scan.shard.n_bad for scan in scans):
        causes = [cause for scan in scans for cause in scan.causes]
        cause = causes[0] if causes else "give the image and the caption of a sample the same key"
        raise UserError(f"No sample in {source} has both an image and a caption: {cause}.")
