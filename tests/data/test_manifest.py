"""Indices, identity, files of manifests, and the refusal of unusable ones."""

import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from tars import manifest_of, write_pairs

from neuclip_ds.data.build import build_manifest
from neuclip_ds.data.manifest import Manifest, Shard
from neuclip_ds.data.manifest_file import load_manifest, write_shards
from neuclip_ds.data.shards import resolve_shards
from neuclip_ds.errors import UserError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_pairs(tmp_path / "shards", [4, 3, 2])


def save(manifest: Manifest, folder: Path) -> Path:
    folder.mkdir(parents=True)
    write_shards(manifest, folder)
    return folder


def test_locate_skips_empty_shards():
    manifest = Manifest([Shard("a", 0, 2, 1), Shard("b", 2, 0, 1), Shard("c", 2, 3, 1), Shard("d", 5, 0, 1)])
    assert [manifest.locate(i) for i in range(5)] == [(0, 0), (0, 1), (2, 0), (2, 1), (2, 2)]
    for outside in (-1, 5):
        with pytest.raises(IndexError):
            manifest.locate(outside)


def test_saved_and_loaded_is_equal(folder, tmp_path):
    shards = list(manifest_of(folder).shards)
    shards[1] = shards[1]._replace(crc32=2**32 - 1, selection=0)
    manifest = Manifest(shards)
    loaded = load_manifest(save(manifest, tmp_path / "deep" / "manifest"))
    assert loaded.shards == manifest.shards
    assert loaded.content_hash == manifest.content_hash
    assert np.array_equal(loaded.starts, manifest.starts)
    assert [p.name for p in (tmp_path / "deep" / "manifest").iterdir()] == ["shards.parquet"]


def test_content_hash_follows_content_not_place(folder, tmp_path):
    original = manifest_of(folder)
    moved = manifest_of(shutil.copytree(folder, tmp_path / "moved"))
    assert moved.content_hash == original.content_hash
    backwards = build_manifest(resolve_shards(str(folder))[::-1], processes=1)
    changes = ({"path": "x"}, {"bytes": 512}, {"selection": 7})
    others = {Manifest([shard._replace(**change) for shard in original.shards]).content_hash for change in changes}
    assert len({original.content_hash, backwards.content_hash, *others}) == 5


def test_unusable_manifest_folders(folder, tmp_path):
    with pytest.raises(UserError, match="not a manifest folder"):
        load_manifest(folder)
    manifest = manifest_of(folder)

    def damaged(name: str, **metadata: str) -> Path:
        target = save(manifest, tmp_path / name)
        table = pq.read_table(target / "shards.parquet")
        meta = {**table.schema.metadata, **{f"neuclip_ds.{key}".encode(): value for key, value in metadata.items()}}
        pq.write_table(table.replace_schema_metadata(meta), target / "shards.parquet")
        return target

    with pytest.raises(UserError, match="hash"):
        load_manifest(damaged("hash", content_hash="0" * 32))
    with pytest.raises(UserError, match="version 9"):
        load_manifest(damaged("version", version="9"))
    gone = save(manifest, tmp_path / "gone")
    shutil.rmtree(folder)
    with pytest.raises(UserError, match="does not exist"):
        load_manifest(gone)
    assert load_manifest(gone, check_shards=False).n == 9
