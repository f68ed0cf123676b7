"""Compare the tar reader with webdataset on well-formed shards, and test the reader alone on damaged shards."""

import io
import os
import subprocess
import tarfile
import time
from pathlib import Path

import pytest
import webdataset
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tars import jpeg, tokenize, write_tar

from neuclip_ds.data import tar
from neuclip_ds.data.build import build_manifest
from neuclip_ds.data.dataset import PairDataset
from neuclip_ds.data.images import EvalTransform
from neuclip_ds.data.readers import read_at
from neuclip_ds.data.tar import ShardIndex

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}
KEYS = ("__key__", "__url__", "__local_path__")

# These names test every rule: dots, folders, metadata, upper case, non-ASCII, and names longer than 100 bytes.
component = st.text(alphabet="ab.A_é ", min_size=1, max_size=6) | st.sampled_from(
    ["__meta__", "__x", "a" * 60, "b" * 120, "..", "a.", ".a", "é" * 70]
)
extension = st.sampled_from([".jpg", ".JPG", ".txt", ".a.b", "", ".", ".tar.gz"])
member_name = st.builds(
    lambda parts, end: "/".join(parts) + end, st.lists(component, min_size=1, max_size=3), extension
)
members = st.lists(st.tuples(member_name, st.binary(max_size=1500)), max_size=12)


def read_index(path: Path) -> ShardIndex:
    with path.open("rb") as file:
        return tar.read_index(file.fileno())


def as_samples(path: Path, index: ShardIndex) -> list[tuple[str, dict[str, bytes]]]:
    fd = os.open(path, os.O_RDONLY)
    try:
        return [
            (key, {extension: read_at(fd, *extent) for extension, extent in entry.items()})
            for key, entry in index.samples
        ]
    finally:
        os.close(fd)


def webdataset_samples(path: Path) -> list[tuple[str, dict[str, bytes]]]:
    samples = webdataset.tariterators.tarfile_samples([{"url": str(path)}])
    return [(s["__key__"], {name: data for name, data in s.items() if name not in KEYS}) for s in samples]


def without_duplicates(entries: list[tuple[str, bytes]]) -> list[tuple[str, bytes]]:
    """Remove repeated names, which a well-formed shard does not have and for which webdataset raises an error."""
    unique: dict[str, tuple[str, bytes]] = {}
    for name, data in entries:
        unique.setdefault(name.lower().rstrip("/"), (name, data))
    return list(unique.values())


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(members, st.sampled_from(sorted(FORMATS)))
@example([("x" * 99 + ".jpg", b"1"), ("folder/.hidden", b"2"), ("a.JPG", b"3"), ("a.b/c", b"4")], "gnu")
@example([(name, b"5") for name in ("/.a", "a./.b", "_/.b.c", "..//a", "a//b.c", "./a.b", ".")], "gnu")
@example([("d" * 80 + "/" + "f" * 90 + ".txt", b"prefix field")], "ustar")
def test_equals_webdataset_on_well_formed_shards(tmp_path, entries, tar_format):
    path = tmp_path / "shard.tar"
    kept = []
    for name, data in without_duplicates(entries):
        if name.rpartition("/")[2].startswith("._"):  # the files of macOS, which webdataset takes for samples
            continue
        try:
            write_tar(path, [(name, data)], FORMATS[tar_format])
        except ValueError:  # this format cannot store the name
            continue
        kept.append((name, data))
    write_tar(path, kept, FORMATS[tar_format])
    index = read_index(path)
    assert index.gaps == []
    assert as_samples(path, index) == webdataset_samples(path)


def header_of(name: str, kind: bytes = tarfile.REGTYPE, size: int = 0) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, size
    return info


def test_folders_links_pax_headers_and_contiguous_files_as_webdataset(tmp_path):
    path = tmp_path / "odd.tar"
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT, pax_headers={"comment": "for all members"}) as archive:
        archive.addfile(header_of("folder", tarfile.DIRTYPE))
        archive.addfile(header_of("folder/a.jpg", size=3), io.BytesIO(b"jpg"))
        link = header_of("folder/a.png", tarfile.SYMTYPE)
        link.linkname = "l" * 150
        archive.addfile(link)
        archive.addfile(header_of("folder/a.txt", tarfile.CONTTYPE, 4), io.BytesIO(b"text"))
        overridden = header_of("short.txt", size=2)
        overridden.pax_headers = {"path": "given/by=pax.txt", "size": "2", "mtime": "1.5"}
        archive.addfile(overridden, io.BytesIO(b"ok"))
    assert as_samples(path, read_index(path)) == webdataset_samples(path)
    assert read_index(path).samples[0].members.keys() == {"jpg", "txt"}
    assert read_index(path).samples[1].key == "given/by=pax"


def with_field(block: bytes, start: int, field: bytes) -> bytes:
    """Return the header with one field replaced and the checksum updated."""
    block = block[:start] + field + block[start + len(field) :]
    total = sum(block[:148]) + sum(block[156:]) + 256
    return block[:148] + b"%06o\0 " % total + block[156:]


def test_base_256_sizes_and_signed_checksums(tmp_path):
    path = write_tar(tmp_path / "a.tar", [("a.jpg", b"x" * 700), ("é.txt", b"signed")])
    raw = bytearray(path.read_bytes())
    raw[:512] = with_field(bytes(raw[:512]), 124, b"\x80" + (700).to_bytes(11, "big"))
    second = bytes(raw[1536:2048])
    signed = sum(b - 256 if b > 127 else b for b in second[:148] + second[156:]) + 256
    raw[1536 + 148 : 1536 + 156] = b"%06o\0 " % signed
    path.write_bytes(bytes(raw))
    assert as_samples(path, read_index(path)) == webdataset_samples(path)
    assert as_samples(path, read_index(path)) == [("a", {"jpg": b"x" * 700}), ("é", {"txt": b"signed"})]


def test_hard_links_are_read_as_the_files_that_they_name(tmp_path: Path) -> None:
    """GNU tar writes them for files with equal inodes."""
    folder = tmp_path / ("long" * 40)
    (folder / "in").mkdir(parents=True)
    for number in range(3):
        image = folder / "in" / f"{number}.jpg"
        image.write_bytes(b"image") if number == 0 else os.link(folder / "in/0.jpg", image)
        (folder / "in" / f"{number}.txt").write_bytes(b"text %d" % number)
    for tar_format in ("gnu", "posix"):
        command = [
            "tar",
            f"--format={tar_format}",
            "--sort=name",
            "-cf",
            tmp_path / "a.tar",
            "-C",
            tmp_path,
            folder.name,
        ]
        subprocess.run(command, check=True)
        index = read_index(tmp_path / "a.tar")
        members = [sample for _, sample in as_samples(tmp_path / "a.tar", index)]
        assert members == [{"jpg": b"image", "txt": b"text %d" % number} for number in range(3)]
        assert (index.gaps, index.unreadable) == ([], 0)


def test_links_to_other_files_and_sparse_files_are_counted(tmp_path: Path) -> None:
    for name in ("0.txt", "1.txt"):
        (tmp_path / name).write_text("text")
    (tmp_path / "0.jpg").symlink_to("/elsewhere/0.jpg")
    with (tmp_path / "1.jpg").open("wb") as file:
        file.truncate(1 << 20)
    command = ["tar", "--sparse", "-cf", "a.tar", "0.jpg", "0.txt", "1.jpg", "1.txt"]
    subprocess.run(command, check=True, cwd=tmp_path)
    index = read_index(tmp_path / "a.tar")
    assert [sample.members.keys() for sample in index.samples] == [{"txt"}, {"txt"}]
    assert index.unreadable == 2


@pytest.mark.parametrize("pieces", [4, 5, 30, 60])
@pytest.mark.parametrize("tar_format", ["gnu", "oldgnu", "pax"])
def test_the_maps_of_sparse_files_are_skipped(tmp_path: Path, pieces: int, tar_format: str) -> None:
    """In the GNU formats, the header has room for four pieces, and each of the blocks that follow it for 21."""
    with (tmp_path / "0.jpg").open("wb") as file:
        for piece in range(pieces):
            file.seek(piece << 16)
            file.write(b"x" * 4096)
        file.truncate(pieces << 16)
    (tmp_path / "0.txt").write_text("text")
    command = ["tar", f"--format={tar_format}", "--hole-detection=raw", "--sparse", "-cf", "a.tar", "0.jpg", "0.txt"]
    subprocess.run(command, check=True, cwd=tmp_path)
    index = read_index(tmp_path / "a.tar")
    assert [sample.members.keys() for sample in index.samples] == [{"txt"}]
    assert (index.gaps, index.unreadable) == ([], 1)


@pytest.mark.parametrize("folder", ["", "data/", "a/b/"])
def test_files_of_mac_os_do_not_come_between_the_members(tmp_path: Path, folder: str) -> None:
    names = ["._0.jpg", "0.jpg", "._0.txt", "0.txt"]
    entries = [(folder + name, b"x") for name in names] + [("__MACOSX/" + folder + "._0.jpg", b"x")]
    index = read_index(write_tar(tmp_path / "a.tar", entries))
    assert [(sample.key, set(sample.members)) for sample in index.samples] == [(f"{folder}0", {"jpg", "txt"})]


def test_split_samples_and_repeated_members_are_counted(tmp_path: Path) -> None:
    names = [f"{i}.jpg" for i in range(4)] + [f"{i}.txt" for i in range(4)]
    assert read_index(write_tar(tmp_path / "a.tar", [(name, b"x") for name in names])).split == 4
    names = ["image.jpg", "image.txt"] * 6
    index = read_index(write_tar(tmp_path / "a.tar", [(name, b"x") for name in names]))
    assert (index.split, index.repeated) == (0, 10)
    assert read_index(write_tar(tmp_path / "a.tar", PAIRS))[2:] == (0, 0, 0)


PAIRS = [(f"{i:03d}.{e}", f"{i}{e}".encode() * 300) for i in range(6) for e in ("jpg", "txt")]


def expected(entries: list[tuple[str, bytes]]) -> list[tuple[str, dict[str, bytes]]]:
    samples: dict[str, dict[str, bytes]] = {}
    for name, data in entries:
        key, _, extension = name.partition(".")
        samples.setdefault(key, {})[extension] = data
    return list(samples.items())


@pytest.mark.parametrize("damage", ["flipped", "zeros", "noise"])
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(position=st.integers(0, len(PAIRS) - 1))
def test_a_damaged_header_costs_its_member_only(tmp_path, damage, position):
    path = write_tar(tmp_path / "a.tar", PAIRS)
    extents = [extent for sample in read_index(path).samples for extent in sample.members.values()]
    raw = bytearray(path.read_bytes())
    start = extents[position].offset - 512
    bad = {"flipped": bytes([raw[start] ^ 1]) + bytes(raw[start + 1 : start + 512]), "zeros": bytes(512)}
    raw[start : start + 512] = bad.get(damage, os.urandom(512))
    path.write_bytes(bytes(raw))

    index = read_index(path)
    after = extents[position + 1 :]
    member_end = after[0].offset - 512 if after else len(raw)
    assert index.gaps == [(start, member_end - start)]
    assert as_samples(path, index) == expected([m for i, m in enumerate(PAIRS) if i != position])


def test_a_hole_of_zeros_does_not_end_the_shard(tmp_path):
    path = write_tar(tmp_path / "a.tar", PAIRS)
    raw = bytearray(path.read_bytes())
    hole = [sample.members["jpg"].offset - 512 for sample in read_index(path).samples][1:3]
    raw[hole[0] : hole[1]] = bytes(hole[1] - hole[0])
    path.write_bytes(bytes(raw))
    index = read_index(path)
    assert index.gaps == [(hole[0], hole[1] - hole[0])]
    assert as_samples(path, index) == expected([m for m in PAIRS if not m[0].startswith("001")])


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data(), st.sampled_from(sorted(FORMATS)))
def test_a_truncated_shard_keeps_every_complete_member(tmp_path, data, tar_format):
    entries = [("n" * 110 + name, content) for name, content in PAIRS]
    try:
        path = write_tar(tmp_path / "a.tar", entries, FORMATS[tar_format])
    except ValueError:
        entries = PAIRS
        path = write_tar(tmp_path / "a.tar", entries, FORMATS[tar_format])
    extents = [extent for sample in read_index(path).samples for extent in sample.members.values()]
    raw = path.read_bytes()
    cut = data.draw(st.integers(0, extents[-1].offset + extents[-1].size))
    path.write_bytes(raw[:cut])

    index = read_index(path)
    complete = [m for m, extent in zip(entries, extents, strict=True) if sum(extent) <= cut]
    assert as_samples(path, index) == expected(complete)
    assert all(gap.offset + gap.size == cut for gap in index.gaps)
    assert len(index.gaps) <= 1


def test_junk_is_one_gap_and_no_samples(tmp_path):
    path = tmp_path / "junk.tar"
    path.write_bytes(b"\x01" * 5000)
    assert read_index(path) == ShardIndex([], [(0, 5000)])
    path.write_bytes(b"")
    assert read_index(path) == ShardIndex([], [])


GOOD = [("a.jpg", jpeg(1)), ("a.txt", b"caption")]


def shard(folder: Path, odd: bytes) -> Path:
    """Write a shard with a good sample before and after the odd bytes."""
    first, last = (write_tar(folder / f"{name}.part", [(f"{name}{e[1:]}", data) for e, data in GOOD]) for name in "xz")
    path = folder / "0.tar"
    good = first.read_bytes().rstrip(b"\0")
    path.write_bytes(good + bytes(-len(good) % 512) + odd + last.read_bytes())
    return path


def record(keyword: bytes, value: bytes) -> bytes:
    rest = b" " + keyword + b"=" + value + b"\n"
    length = len(rest) + 1
    while len(str(length)) + len(rest) != length:
        length += 1
    return str(length).encode() + rest


def member(name: str, kind: bytes, data: bytes = b"", size: int | None = None) -> bytes:
    """Return a header and its data, which may be invalid."""
    header = header_of(name, kind, len(data) if size is None else size)
    return header.tobuf(tarfile.GNU_FORMAT) + data + bytes(-len(data) % 512)


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
    began = time.process_time()
    found = [sample.key for sample in read_index(path).samples]
    manifest = build_manifest([str(path)], 1)
    batch = PairDataset(manifest, EvalTransform(16), tokenize).batch([(0, row) for row in range(manifest.n)])
    assert time.process_time() - began < 5, "what grows with the square of the headers takes minutes"
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
