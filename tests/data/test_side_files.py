"""Check that manifests are built from img2dataset's side files without reading shards, and that errors are clear."""

import io
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from servers import Files, files_server
from tars import write_pairs

from neuclip_ds.data import side_files
from neuclip_ds.data.build import write_manifest
from neuclip_ds.data.cache import ShardCache
from neuclip_ds.data.manifest import Manifest
from neuclip_ds.data.readers import TarReader
from neuclip_ds.data.scan import ScanOptions
from neuclip_ds.data.shards import resolve_shards
from neuclip_ds.errors import UserError

OPTIONS = ScanOptions(side_files=True)
SIZES = [4, 0, 3, 5]


def stats(n: int) -> bytes:
    return json.dumps({"count": n + 2, "successes": n, "failed_to_download": 2, "status_dict": {"success": n}}).encode()


def parquet(n: int) -> bytes:
    out = io.BytesIO()
    status = ["success"] * n + ["failed_to_download", "failed_to_resize"]
    pq.write_table(pa.table({"url": ["u"] * (n + 2), "status": status, "caption": ["c" * 999] * (n + 2)}), out)
    return out.getvalue()


@pytest.fixture
def local(tmp_path: Path) -> Path:
    """Write shards and side files as img2dataset does; one shard has only a parquet file."""
    folder = write_pairs(tmp_path / "shards", SIZES)
    for number, n in enumerate(SIZES):
        stem = f"{number:05d}"
        (folder / f"{stem}.parquet").write_bytes(parquet(n))
        if number != 2:
            (folder / f"{stem}_stats.json").write_bytes(stats(n))
    return folder


@pytest.fixture
def http(local: Path) -> Iterator[Files]:
    with files_server() as server:
        server.files = {path.name: path.read_bytes() for path in local.iterdir()}
        yield server


def build(folder: Path, source: str, **options: bool) -> Manifest:
    return write_manifest(folder, resolve_shards(source), ThreadPoolExecutor(1), OPTIONS, **options)


def check(manifest: Manifest, local: Path) -> None:
    assert [shard.n for shard in manifest.shards] == SIZES
    assert [shard.bytes for shard in manifest.shards] == [path.stat().st_size for path in sorted(local.glob("*.tar"))]
    assert manifest.samples is None


def test_local_shards_may_be_unreadable(local: Path, tmp_path: Path) -> None:
    for path in local.glob("*.tar"):
        path.write_bytes(bytes(path.stat().st_size))  # leaves no samples to count
    check(build(tmp_path / "m", str(local)), local)


def test_no_shard_is_requested_from_a_server(http: Files, local: Path, tmp_path: Path) -> None:
    manifest = build(tmp_path / "m", http.url("{00000..00003}.tar"))
    check(manifest, local)
    assert http.gets == {f"{number:05d}_stats.json": 1 for number in range(4)} | {"00002.parquet": 1}
    assert http.heads == {f"{number:05d}.tar": 1 for number in range(4)} | {"00002.parquet": 1}
    reader = TarReader(manifest, cache=ShardCache(tmp_path / "cache", 10**6))
    assert [reader.read(index).texts["txt"] for index in range(12)] == [f"caption {i}".encode() for i in range(12)]


@pytest.fixture
def bucket(http: Files, monkeypatch: pytest.MonkeyPatch) -> Files:
    """Serve the same files from the folder `a` of an S3 bucket."""
    pytest.importorskip("s3fs")
    http.files = {f"pool/a/{name}": data for name, data in http.files.items()}
    monkeypatch.setitem(fsspec.config.conf, "s3", {"endpoint_url": http.url(""), "key": "k", "secret": "s"})
    return http


def test_no_shard_is_read_from_a_bucket(bucket: Files, local: Path, tmp_path: Path) -> None:
    check(build(tmp_path / "m", "s3://pool/a/{00000..00003}.tar"), local)
    assert not [name for name in bucket.gets if name.endswith(".tar")]
    assert [bucket.heads[f"pool/a/{number:05d}.tar"] for number in range(4)] == [1] * 4


@pytest.mark.parametrize(
    ("store", "name", "data", "reason"),
    [
        ("local", "00000_stats.json", b"[" * 99_999, 'it is not JSON with the key "successes"'),
        ("local", "00000_stats.json", b"[3]", 'it is not JSON with the key "successes"'),
        ("http", "00000_stats.json", b'{"successes": "3"}', "\"successes\" is '3'"),
        ("local", "00000_stats.json", b'{"successes": -1}', '"successes" is -1'),
        ("local", "00000_stats.json", b'{"successes": 999999}', "lists 999999 samples, but the shard is only"),
        ("local", "00002.parquet", b"PAR1", "00002.parquet: it is not a parquet file"),
        ("http", "00002.parquet", b"PAR1" * 9, "00002.parquet: it is not a parquet file"),
        (
            "local",
            "00002.parquet",
            None,
            "neither 00002_stats.json nor 00002.parquet, which img2dataset writes, is next to the tar",
        ),
        (
            "http",
            "00002.parquet",
            None,
            "neither 00002_stats.json nor 00002.parquet, which img2dataset writes, is next to the tar",
        ),
        (
            "s3",
            "00002.parquet",
            None,
            "neither 00002_stats.json nor 00002.parquet, which img2dataset writes, is next to the tar",
        ),
        ("http", "00003.tar", None, "the file does not exist"),
        ("s3", "00003.tar", None, "the file does not exist"),
    ],
)
def test_a_side_file_that_cannot_be_used(
    store: str, name: str, data: bytes | None, reason: str, request: pytest.FixtureRequest, local: Path, tmp_path: Path
) -> None:
    if store == "local":
        (local / name).write_bytes(data) if data is not None else (local / name).unlink()
        source = str(local)
    else:
        server = request.getfixturevalue("http" if store == "http" else "bucket")
        prefix, source = ("", server.url("")) if store == "http" else ("pool/a/", "s3://pool/a/")
        source += "{00000..00003}.tar"
        server.files.pop(prefix + name) if data is None else server.files.update({prefix + name: data})
    with pytest.raises(UserError, match=r"1 of 4 shards cannot be used\. The first: .*--skip-unreadable") as caught:
        build(tmp_path / "m", source)
    assert reason in str(caught.value) and name[:5] in str(caught.value)
    assert build(tmp_path / "m", source, skip_unreadable=True).n_shards == 3
    (line,) = (tmp_path / "m" / "unreadable_shards.jsonl").read_text().splitlines()
    assert reason in json.loads(line)["reason"] and json.loads(line)["shard"].endswith(f"{name[:5]}.tar")


def test_errors_that_pass_are_tried_again(http: Files, local: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(side_files.time, "sleep", lambda seconds: None)
    http.faults["00000_stats.json"] = [500, "cut", 429]
    http.faults["00001_stats.json"] = [403]
    with pytest.raises(UserError, match=r"1 of 4 shards cannot be used.*00001_stats.json: .*403"):
        build(tmp_path / "m", http.url("{00000..00003}.tar"))
    before = http.gets.copy()
    check(build(tmp_path / "m", http.url("{00000..00003}.tar")), local)
    assert http.gets - before == {"00001_stats.json": 1}, "the others have been counted"


def test_what_has_no_side_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"does not end in \.tar"):
        build(tmp_path / "m", "https://host/00000.tar?signature=x")
    for options in ({"checksum": True}, {"uids": ("a.npy",)}):
        with pytest.raises(UserError, match="cannot be read from side files; omit --from-side-files"):
            write_manifest(tmp_path / "m", [], ThreadPoolExecutor(1), replace(OPTIONS, **options))
