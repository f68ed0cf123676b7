"""Shards on file systems that nodes share: copied to the node's disk as file:/// URLs."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from tars import manifest_of, write_pairs

from neuclip_ds.config import DataConfig
from neuclip_ds.data.build import open_manifest, write_manifest
from neuclip_ds.data.cache import ShardCache
from neuclip_ds.data.manifest import Manifest
from neuclip_ds.data.manifest_file import load_manifest
from neuclip_ds.data.order import GlobalOrder
from neuclip_ds.data.prefetch import Prefetcher, shards_ahead
from neuclip_ds.data.readers import TarReader
from neuclip_ds.data.scan import ScanOptions
from neuclip_ds.data.shards import resolve_shards
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.errors import UserError
from neuclip_ds.training.data import loader_options

SIZES = [3, 4, 2]


def copies(cache: Path) -> int:
    return len(list((cache / "shards").glob("*.tar")))


def test_files_are_read_from_copies_on_request(tmp_path: Path) -> None:
    manifest = manifest_of(write_pairs(tmp_path / "shards", SIZES))
    expected = [TarReader(manifest).read(index) for index in range(manifest.n)]
    in_place = TarReader(manifest, cache=ShardCache(tmp_path / "cache", 10**6))
    assert [in_place.read(index) for index in range(manifest.n)] == expected
    assert copies(tmp_path / "cache") == 0
    by_url = Manifest([shard._replace(path=f"file://{shard.path}") for shard in manifest.shards])
    config = DataConfig(cache_dir=tmp_path / "cache", cache_gb=0.001)
    cache = loader_options(config, Communicator(), by_url).cache
    order = GlobalOrder(manifest.starts, manifest.sizes, 3, 0)
    requests = partial(shards_ahead, order, 0, 0, [slice(0, 3)])
    with Prefetcher(cache, requests, by_url.shards, begin=0, end=9, ahead=9) as ahead:
        for _ in range(1200):
            if copies(tmp_path / "cache") < len(SIZES):
                ahead.join(0.05)
    assert copies(tmp_path / "cache") == len(SIZES)
    for shard in manifest.shards:
        Path(shard.path).unlink()
    later = TarReader(by_url, cache=cache)
    assert [later.read(index) for index in range(manifest.n)] == expected


def test_file_urls_are_remote_shards(tmp_path: Path) -> None:
    manifest = manifest_of(write_pairs(tmp_path / "shards", SIZES))
    url = f"file://{tmp_path}/shards/{{00000..00002}}.tar"
    with pytest.raises(UserError, match=r"file:///.*00000\.tar is remote: build the manifest once"):
        open_manifest(url, tmp_path / "manifests")
    write_manifest(tmp_path / "manifest", resolve_shards(url), ThreadPoolExecutor(1), ScanOptions(checksum=True))
    found = load_manifest(tmp_path / "manifest")
    assert [shard.path for shard in found.shards] == [f"file://{shard.path}" for shard in manifest.shards]
    assert found.content_hash == manifest.content_hash
    assert resolve_shards(f"file://{tmp_path}/shards/*.tar") == resolve_shards(url)
