"""Resolving sources, building, keeping and refusing manifests."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from tars import jpeg, write_pairs, write_tar

from neuclip_ds.data.manifest import (
    Manifest,
    Shard,
    build_manifest,
    is_manifest,
    load_manifest,
    open_manifest,
    resolve_shards,
)
from neuclip_ds.errors import UserError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    incomplete = {3: {"jpg": jpeg(3)}, 5: {"txt": b"no image"}, 6: {"json": b"{}"}}
    return write_pairs(tmp_path / "shards", [4, 3, 2], replace=incomplete)


def test_counts_starts_and_bad_samples(folder):
    manifest = build_manifest(resolve_shards(str(folder)), processes=2)
    assert (manifest.n, manifest.n_shards, manifest.n_bad) == (9, 3, 3)
    assert manifest.starts.tolist() == [0, 4, 7]
    assert manifest.sizes.tolist() == [4, 3, 2]
    assert [shard.n_bad for shard in manifest.shards] == [1, 2, 0]
    assert [shard.bytes for shard in manifest.shards] == [Path(s.path).stat().st_size for s in manifest.shards]


def test_locate_skips_empty_shards():
    manifest = Manifest(
        [Shard("a", 0, 2, 1, 0), Shard("b", 2, 0, 1, 0), Shard("c", 2, 3, 1, 0), Shard("d", 5, 0, 1, 0)]
    )
    assert [manifest.locate(i) for i in range(5)] == [(0, 0), (0, 1), (2, 0), (2, 1), (2, 2)]
    for outside in (-1, 5):
        with pytest.raises(IndexError):
            manifest.locate(outside)


def test_progress_and_processes_do_not_change_the_result(folder):
    paths, seen = resolve_shards(str(folder)), []
    alone = build_manifest(paths, processes=1, on_progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 3), (2, 3), (3, 3)]
    assert alone.shards == build_manifest(paths, processes=3).shards


def test_saved_and_loaded_is_equal(folder, tmp_path):
    manifest = build_manifest(resolve_shards(str(folder)), processes=1)
    manifest.save(tmp_path / "deep" / "manifest")
    loaded = load_manifest(tmp_path / "deep" / "manifest")
    assert loaded.shards == manifest.shards
    assert loaded.content_hash == manifest.content_hash
    assert np.array_equal(loaded.starts, manifest.starts)
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["manifest"]
    with pytest.raises(UserError, match="exists already"):
        manifest.save(tmp_path / "deep" / "manifest")


def test_content_hash_follows_content_not_place(folder, tmp_path):
    original = build_manifest(resolve_shards(str(folder)), processes=1)
    moved = build_manifest(resolve_shards(str(shutil.copytree(folder, tmp_path / "moved"))), processes=1)
    assert moved.content_hash == original.content_hash
    backwards = build_manifest(resolve_shards(str(folder))[::-1], processes=1)
    renamed = [shard._replace(path=shard.path + "x") for shard in original.shards]
    grown = [shard._replace(bytes=shard.bytes + 512) for shard in original.shards]
    hashes = {original.content_hash, backwards.content_hash, *(Manifest(s).content_hash for s in (renamed, grown))}
    assert len(hashes) == 4


def test_sources(folder, tmp_path, monkeypatch):
    tars = [str(folder / f"{i:05d}.tar") for i in range(3)]
    (folder / "notes.txt").write_text("not a shard")
    (folder / "below").mkdir()
    shutil.copy(tars[0], folder / "below" / "00009.tar")
    assert resolve_shards(str(folder)) == tars
    assert resolve_shards(str(folder / "*.tar")) == tars
    assert resolve_shards(str(folder / "{00000..00002}.tar")) == tars
    assert resolve_shards(str(folder / "{00002,00000}.tar")) == [tars[2], tars[0]]
    assert resolve_shards(str(folder / "0000{1,2}*.tar")) == tars[1:]
    assert resolve_shards(tars[1]) == [tars[1]]
    assert resolve_shards(str(tmp_path)) == [*tars, str(folder / "below" / "00009.tar")]
    monkeypatch.chdir(folder)
    assert resolve_shards("00001.tar") == [tars[1]]


def test_a_literal_name_with_special_characters_is_taken_as_it_is(folder, tmp_path):
    odd = shutil.copytree(folder, tmp_path / "{a}[1]")
    assert resolve_shards(str(odd)) == [str(odd / f"{i:05d}.tar") for i in range(3)]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("", "is empty"),
        ("{tmp}/absent", "absent does not exist"),
        ("{tmp}/absent/*.tar", "Nothing matches"),
        ("{tmp}/{{a,b", "do not match"),
        ("{tmp}/none", "No \\*.tar in .*none"),
        ("{tmp}/shards/{{00001..00004}}.tar", "2 of the 4 shards .*00003.tar"),
    ],
)
def test_bad_sources(folder, tmp_path, source, message):
    (tmp_path / "none").mkdir()
    with pytest.raises(UserError, match=message):
        resolve_shards(source.format(tmp=tmp_path))


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([], "No samples in .*0.tar"),
        ([("readme", b"")], "No samples in .*0.tar"),
        ([("a.npy", b""), ("a.txt", b"")], "No sample has an image in .*0.tar .*npy, txt"),
        ([("a.jpg", b""), ("a.json", b"")], "No captions in .*0.tar .*jpg, json"),
    ],
)
def test_shards_that_cannot_be_trained_on(tmp_path, members, message):
    path = write_tar(tmp_path / "0.tar", members)
    with pytest.raises(UserError, match=message):
        build_manifest([str(path)])


def test_damage_is_logged_and_counted_out(folder, caplog):
    path = folder / "00000.tar"
    raw = path.read_bytes()
    path.write_bytes(raw[: len(raw) // 3])
    manifest = build_manifest(resolve_shards(str(folder)), processes=1)
    assert manifest.shards[0].n < 4
    assert "00000.tar is damaged" in caplog.text


def test_cache_is_used_until_a_shard_changes(folder, tmp_path):
    cache, built = tmp_path / "cache", []

    def opened() -> Manifest:
        return open_manifest(str(folder), cache, processes=1, on_progress=lambda done, total: built.append(done))

    first = opened()
    assert opened().shards == first.shards
    assert built == [1, 2, 3]
    os.utime(folder / "00001.tar", ns=(0, 0))
    assert opened().shards == first.shards
    assert built == [1, 2, 3] * 2
    write_pairs(folder, [4, 3, 5])
    assert opened().n == 12


def test_open_manifest_takes_a_manifest_folder(folder, tmp_path):
    manifest = build_manifest(resolve_shards(str(folder)), processes=1)
    manifest.save(tmp_path / "m")
    assert open_manifest(str(tmp_path / "m"), tmp_path / "cache").shards == manifest.shards
    assert not (tmp_path / "cache").exists()


def test_unusable_manifest_folders(folder, tmp_path):
    with pytest.raises(UserError, match="not a manifest folder"):
        load_manifest(folder)
    manifest = build_manifest(resolve_shards(str(folder)), processes=1)
    for name, damage in {
        "hash": ("meta.json", lambda raw: raw.replace(manifest.content_hash.encode(), b"0" * 32)),
        "version": ("meta.json", lambda raw: raw.replace(b'"version": 1', b'"version": 9')),
        "cannot be read": ("shards.parquet", lambda raw: raw[: len(raw) // 2]),
    }.items():
        target = tmp_path / name
        manifest.save(target)
        assert is_manifest(target)
        file, change = damage
        (target / file).write_bytes(change((target / file).read_bytes()))
        with pytest.raises(UserError, match=name):
            load_manifest(target)
    manifest.save(tmp_path / "gone")
    shutil.rmtree(folder)
    with pytest.raises(UserError, match="does not exist"):
        load_manifest(tmp_path / "gone")
