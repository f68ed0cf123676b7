"""Flipped bits, replaced shards, shards that are listed twice, and validation on training shards are detected."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from small_runs import train
from tars import tokenize, write_pairs
from test_build import Worker

from neuclip_ds.cli.main import main
from neuclip_ds.data.build import open_manifest, write_manifest
from neuclip_ds.data.cache import ShardCache
from neuclip_ds.data.dataset import PairDataset
from neuclip_ds.data.fetch import FetchError
from neuclip_ds.data.images import EvalTransform
from neuclip_ds.data.manifest import Manifest
from neuclip_ds.data.manifest_file import check_separate, load_manifest
from neuclip_ds.data.scan import ScanOptions
from neuclip_ds.data.shards import resolve_shards
from neuclip_ds.data.tar import read_index
from neuclip_ds.errors import UserError

SIZES = [6, 5]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with shards and a manifest that `build-manifest` made with its default options."""
    folder = tmp_path_factory.mktemp("built")
    write_pairs(folder / "shards", SIZES)
    main(["build-manifest", str(folder / "m"), str(folder / "shards"), "--processes=1"])
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
    for offset in range(extent.offset, extent.offset + extent.size, max(1, extent.size // 15)):
        flip(path, offset, offset % 8)
        batch = dataset(manifest).batch([(0, row) for row in range(6)])
        flip(path, offset, offset % 8)
        assert batch.valid.tolist() == [True, True, False, True, True, True]
        assert batch.bad[0].cause == "checksum differs"
    assert dataset(manifest).batch([(0, row) for row in range(11)]).valid.all()


def replace_by_equal_size(path: Path) -> None:
    """Replace a shard with a different shard that has the same number of samples, size and modification time."""
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
        manifest = write_manifest(tmp_path / "m", resolve_shards(str(shards)), Worker(), ScanOptions(checksum=True))
    replace_by_equal_size(shards / "00000.tar")
    with pytest.raises(
        UserError, match=r"00000.tar has the size that the manifest lists, but contains different samples"
    ):
        dataset(manifest).batch([(0, 1)])


def test_a_remote_shard_is_compared_on_arrival(built: Path, tmp_path: Path) -> None:
    shard = load_manifest(built / "m").shards[0]
    cache = ShardCache(tmp_path / "cache", 10**6, backoff=0.01)
    cache.path(f"file://{shard.path}", shard.bytes, shard.crc32)
    damaged = shutil.copy(shard.path, tmp_path / "damaged.tar")
    flip(Path(damaged), 700, 3)
    with pytest.raises(FetchError, match="does not match the checksum in the manifest"):
        cache.path(f"file://{damaged}", shard.bytes, shard.crc32)
    assert len(list((tmp_path / "cache" / "shards").iterdir())) == 1


@pytest.mark.parametrize("how", ["path", "symlink", "hard link", "copy"])
def test_a_shard_named_twice_is_refused(built: Path, tmp_path: Path, how: str) -> None:
    first, second = built / "shards" / "00000.tar", tmp_path / "again.tar"
    if how == "path":
        second = first
    else:
        {"symlink": second.symlink_to, "hard link": second.hardlink_to}.get(how, lambda _: None)(first)
        shutil.copy(first, second) if how == "copy" else None
    refused = r"again.tar has the same content as .*00000.tar|00000.tar is listed more than once"
    with pytest.raises(UserError, match=refused):
        open_manifest(f"{first}::{second}", tmp_path / "cache", 1)
    for options in (ScanOptions(), ScanOptions(checksum=True)):
        with pytest.raises(UserError, match=refused):
            write_manifest(tmp_path / "m", [str(first), str(second)], Worker(), options)


def test_other_shards_of_equal_layout_are_kept(tmp_path: Path) -> None:
    """Names and sizes may be equal by chance, so the shards' bytes are compared."""
    for name in "ab":
        write_pairs(tmp_path / name, [1], {0: {"jpg": b"image " + name.encode(), "txt": b"text"}})
    manifest = open_manifest(f"{tmp_path}/a::{tmp_path}/b", tmp_path / "cache", 1)
    assert manifest.shards[0].layout == manifest.shards[1].layout
    assert manifest.n == 2


def test_validation_on_training_shards_is_refused(built: Path, tmp_path: Path) -> None:
    copied = Path(shutil.copytree(built / "shards", tmp_path / "copied"))
    (copied / "00001.tar").unlink()
    for training, options in (("m", []), ("shards", ["--dry-run"])):
        done = train(tmp_path / "runs", str(built / training), 2, f"--data.val={copied}", *options, code=2)
        assert "1 of 1 validation shards (data.val) are among the training shards, such as" in done.stderr
    assert not list((tmp_path / "runs" / "run").glob("checkpoints/step_*"))


def test_subsets_of_a_shard_may_be_apart(built: Path) -> None:
    shard = load_manifest(built / "m").shards[0]
    one, other = (Manifest([replace(shard, selection=number)]) for number in (1, 2))
    check_separate(one, other)
    for same in (one, Manifest([shard])):
        with pytest.raises(UserError, match="among the training shards"):
            check_separate(same, one)
