"""Tars made to break their reader: each costs its own member and little time, never the run."""

import os
import tarfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tars import jpeg, tokenize, write_tar

from neuclip_ds.data import tar
from neuclip_ds.data.build import build_manifest
from neuclip_ds.data.dataset import PairDataset
from neuclip_ds.data.images import EvalTransform
from neuclip_ds.data.readers import read_at

GOOD = [("a.jpg", jpeg(1)), ("a.txt", b"caption")]


def member(name: str, kind: bytes, data: bytes = b"", size: int | None = None) -> bytes:
    """A header with its data, whatever they are."""
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, len(data) if size is None else size
    return info.tobuf(tarfile.GNU_FORMAT) + data + bytes(-len(data) % 512)


def shard(folder: Path, odd: bytes) -> Path:
    """A shard with a good sample before and after the odd bytes."""
    first, last = (write_tar(folder / f"{name}.part", [(f"{name}{e[1:]}", data) for e, data in GOOD]) for name in "xz")
    path = folder / "0.tar"
    path.write_bytes(first.read_bytes().rstrip(b"\0") + bytes(0))
    padding = -path.stat().st_size % 512
    path.write_bytes(path.read_bytes() + bytes(padding) + odd + last.read_bytes())
    return path


def keys(path: Path) -> list[str]:
    with path.open("rb") as file:
        return [sample.key for sample in tar.read_index(file.fileno()).samples]


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Of this process's CPU time, which other load on the machine does not change."""
    began = time.process_time()
    yield
    assert time.process_time() - began < seconds


def record(keyword: bytes, value: bytes) -> bytes:
    rest = b" " + keyword + b"=" + value + b"\n"
    length = len(rest) + 1
    while len(str(length)) + len(rest) != length:
        length += 1
    return str(length).encode() + rest


PAX = tarfile.XHDTYPE
MANY_RECORDS = record(b"a", b"b") * (1_250_000 // 6)
ODD = {
    "a length of 4,400 digits": (member("p", PAX, b"9" * 4400 + b" path=b.jpg\n") + member("y.jpg", b"0", b"1"), ["y"]),
    "a size of 5,000 digits": (member("p", PAX, record(b"size", b"9" * 5000)) + member("y.jpg", b"0", b"1"), ["y"]),
    "a NUL in a path": (member("p", PAX, record(b"path", b"b\0c.jpg")) + member("y.jpg", b"0", b"1"), []),
    "1.25 MB of records": (member("p", PAX, MANY_RECORDS) + member("y.jpg", b"0", b"1"), ["y"]),
    "8 MB of records": (member("p", PAX, MANY_RECORDS * 7) + member("y.jpg", b"0", b"1"), ["y"]),
    "a global header of 200,000 records": (
        member("p", tarfile.XGLTYPE, MANY_RECORDS) + member("y.jpg", b"0", b"1") * 2000,
        ["y"],
    ),
    "a name of 60,000 folders": (member("p", b"L", b"d/" * 60_000 + b"x") + member("y.jpg", b"0", b"1"), []),
    "20,000 extension headers": (member("p", PAX, record(b"path", b"b.jpg")) * 20_000 + bytes(512), []),
    "20,000 sizes beyond the end": (member("y.jpg", b"0", size=10**12) * 20_000, []),
    "20,000 extensions beyond the end": (member("p", PAX, size=2 << 20) * 20_000, []),
    "names that leave the folder": (member("../../y.jpg", b"0", b"1") + member("/etc/passwd.jpg", b"0", b"1"), None),
    "a negative size": (member("p", PAX, record(b"size", b"-512")) + member("y.jpg", b"0", b"1"), ["y"]),
}


@pytest.mark.parametrize("case", ODD)
def test_an_odd_member_costs_itself_and_little_time(tmp_path: Path, case: str) -> None:
    odd, between = ODD[case]
    path = shard(tmp_path, odd)
    with at_most(5):  # what grows with the square of the headers takes minutes
        found = keys(path)
        manifest = build_manifest([str(path)], 1)
        batch = PairDataset(manifest, EvalTransform(16), tokenize).batch([(0, row) for row in range(manifest.n)])
    assert (found[0], found[-1]) == ("x", "z")
    assert between is None or found[1:-1] == between
    assert batch.valid[0] and batch.valid[-1]
    assert not batch.valid[1:-1].any()


def test_a_member_larger_than_any_image_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "0.tar"
    with path.open("wb") as out:
        out.write(member("a.jpg", b"0", size=10**12))
        out.truncate(10**12 + 4096)  # sparse on disk
    with path.open("rb") as file, pytest.raises(OSError, match=r"1000000000000 bytes .* more than the limit"):
        read_at(file.fileno(), *tar.read_index(file.fileno()).samples[0].members["jpg"])
    os.truncate(path, 0)
