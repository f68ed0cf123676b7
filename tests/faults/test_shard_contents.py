"""Flipped bits, replaced shards, shards that count twice, and validation on what was trained on are found."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from small_runs import call, train
from tars import tokenize, write_pairs

from neuclip_ds.data.build import open_manifest
from neuclip_ds.data.dataset import PairDataset
from neuclip_ds.data.fetch import FetchError, Request, fetch
from neuclip_ds.data.manifest import Manifest, load_manifest
from neuclip_ds.data.repeats import check_separate
from neuclip_ds.data.tar import read_index
from neuclip_ds.data.transforms import EvalTransform
from neuclip_ds.errors import UserError

SIZES = [6, 5]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards and a manifest as `build-manifest` makes it, with its defaults."""
    folder = tmp_path_factory.mktemp("built")
    write_pairs(folder / "shards", SIZES)
    done = call("tools/build_manifest.py", str(folder / "m"), str(folder / "shards"), "--processes=1")
    assert done.returncode == 0, done.stderr
    return folder


def dataset(manifest: Manifest) -> PairDataset:
    return PairDataset(manifest, EvalTransform(16), tokenize)


def flip(path: Path, offset: int, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1 << bit]))


@pytest.mark.parametrize("member", ["jpg", "txt"])
def test_every_flipped_bit_of_a_sample_is_a_bad_sample(built: Path, member: str) -> None:
    path, manifest = built / "shards" / "00000.tar", load_manifest(built / "m")
    with path.open("rb") as file:
        extent = read_index(file.fileno()).samples[2].members[member]
    for offset in range(extent.offset, extent.offset + extent.size, max(1, extent.size // 40)):
        flip(path, offset, offset % 8)
        batch = dataset(manifest).__getitems__([(0, row) for row in range(6)])
        flip(path, offset, offset % 8)
        assert batch.valid.tolist() == [True, True, False, True, True, True]
        assert batch.bad[0].cause == "checksum differs"
    assert dataset(manifest).__getitems__([(0, row) for row in range(11)]).valid.all()


def replace_by_equal_size(path: Path) -> None:
    """Put another shard of as many samples and bytes in a shard's place, with its time."""
    times = path.stat()
    other = write_pairs(
        path.parent / "other", [6], {index: {"jpg": b"other" * index, "txt": b"x"} for index in range(6)}
    )
    data = (other / "00000.tar").read_bytes()
    path.write_bytes(data[: times.st_size].ljust(times.st_size, b"\0"))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


@pytest.mark.parametrize("kind", ["with sample tables", "of a run"])
def test_a_shard_replaced_by_one_of_equal_size_is_one_sentence(built: Path, tmp_path: Path, kind: str) -> None:
    shards = Path(shutil.copytree(built / "shards", tmp_path / "shards"))
    if kind == "of a run":
        manifest = open_manifest(str(shards), tmp_path / "cache", 1)
    else:
        assert call("tools/build_manifest.py", str(tmp_path / "m"), str(shards), "--processes=1").returncode == 0
        manifest = load_manifest(tmp_path / "m")
    replace_by_equal_size(shards / "00000.tar")
    with pytest.raises(UserError, match=r"00000.tar has other samples than the manifest, in as many bytes"):
        dataset(manifest)[0, 1]


@pytest.mark.parametrize("samples", [False, True])
def test_manifests_without_checksums_stay_readable(built: Path, tmp_path: Path, samples: bool) -> None:
    """As older versions wrote them: without the columns of checksums and layouts."""
    old = Path(shutil.copytree(built / "m", tmp_path / "m"))
    for path in old.rglob("*.parquet"):
        table = pq.read_table(path)
        kept = [name for name in table.column_names if name != "layout" and not name.endswith("_crc32")]
        pq.write_table(table.select(kept), path, row_group_size=SIZES[int(path.stem[-1])] if "part" in path.stem else 9)
    if not samples:
        shutil.rmtree(old / "samples")
    manifest = load_manifest(old)
    assert not manifest.has_checksums and load_manifest(built / "m").has_checksums
    assert dataset(manifest).__getitems__([(0, row) for row in range(11)]).valid.all()


def test_a_remote_shard_is_compared_on_arrival(built: Path, tmp_path: Path) -> None:
    shard = load_manifest(built / "m").shards[0]
    request = Request(f"pipe:cat {shard.path}", shard.bytes, timeout=9, crc32=shard.crc32, retries=0)
    fetch(request, tmp_path / "good")
    damaged = shutil.copy(shard.path, tmp_path / "damaged.tar")
    flip(Path(damaged), 700, 3)
    with pytest.raises(FetchError, match="what arrived differs from the checksum in the manifest"):
        fetch(request._replace(url=f"pipe:cat {damaged}"), tmp_path / "bad")
    assert not (tmp_path / "bad").exists()


@pytest.mark.parametrize("how", ["path", "symlink", "hard link", "copy"])
def test_a_shard_named_twice_is_refused(built: Path, tmp_path: Path, how: str) -> None:
    first, second = built / "shards" / "00000.tar", tmp_path / "again.tar"
    if how == "path":
        second = first
    else:
        {"symlink": second.symlink_to, "hard link": second.hardlink_to}.get(how, lambda _: None)(first)
        shutil.copy(first, second) if how == "copy" else None
    with pytest.raises(
        UserError, match=r"again.tar has the same content as .*00000.tar|00000.tar is listed more than once"
    ):
        open_manifest(f"{first}::{second}", tmp_path / "cache", 1)
    done = call("tools/build_manifest.py", str(tmp_path / "m"), str(first), str(second), "--processes=1")
    assert done.returncode == 2
    assert "same content" in done.stderr or "more than once" in done.stderr


def test_other_shards_of_equal_layout_are_kept(tmp_path: Path) -> None:
    """Names and sizes may be equal by chance; then bytes decide."""
    for name in "ab":
        write_pairs(tmp_path / name, [1], {0: {"jpg": b"image " + name.encode(), "txt": b"text"}})
    manifest = open_manifest(f"{tmp_path}/a::{tmp_path}/b", tmp_path / "cache", 1)
    assert manifest.shards[0].layout == manifest.shards[1].layout
    assert manifest.n == 2


def test_validation_on_training_shards_is_refused(built: Path, tmp_path: Path) -> None:
    copied = Path(shutil.copytree(built / "shards", tmp_path / "copied"))
    (copied / "00001.tar").unlink()
    for training in (str(built / "shards"), str(built / "m")):
        done = train(tmp_path / "runs", training, 2, f"--data.val={copied}")
        assert done.returncode == 2
        assert "1 of 1 shards of data.val are among the training shards, such as" in done.stderr
        assert not list((tmp_path / "runs" / "run").glob("checkpoints/step_*"))
    dry = train(tmp_path / "runs", str(built / "shards"), 2, f"--data.val={copied}", "--dry-run")
    assert dry.returncode == 2
    assert "among the training shards" in dry.stderr


def test_subsets_of_a_shard_may_be_apart(built: Path) -> None:
    shard = load_manifest(built / "m").shards[0]
    one, other = (Manifest([shard._replace(selection=number)]) for number in (1, 2))
    check_separate(one, other)
    for same in (one, Manifest([shard])):
        with pytest.raises(UserError, match="among the training shards"):
            check_separate(same, one)
