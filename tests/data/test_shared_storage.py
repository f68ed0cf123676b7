"""Shards on file systems that nodes share: copied to the node's disk on request, by path or as file:/// URLs."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from tars import write_pairs

from neuclip_ds.config import DataConfig
from neuclip_ds.data import file_systems
from neuclip_ds.data.build import build_manifest, open_manifest, write_manifest
from neuclip_ds.data.cache import ShardCache
from neuclip_ds.data.file_systems import shared_file_system
from neuclip_ds.data.manifest import Manifest, load_manifest
from neuclip_ds.data.order import GlobalOrder
from neuclip_ds.data.prefetch import Prefetcher
from neuclip_ds.data.readers import TarReader, WebdatasetReader
from neuclip_ds.data.shards import resolve_shards
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.errors import UserError
from neuclip_ds.training.data import _advise_on_cache, loader_options

SIZES = [3, 4, 2]


def copies(cache: Path) -> int:
    return len(list((cache / "shards").glob("*.tar")))


def local_shards(folder: Path) -> Manifest:
    return build_manifest(resolve_shards(str(write_pairs(folder, SIZES))), processes=1)


@pytest.mark.parametrize("reader", [TarReader, WebdatasetReader])
def test_files_are_read_from_copies_on_request(reader: type[TarReader | WebdatasetReader], tmp_path: Path) -> None:
    manifest = local_shards(tmp_path / "shards")
    expected = [reader(manifest).read(index) for index in range(manifest.n)]
    in_place = reader(manifest, cache=ShardCache(tmp_path / "cache", 10**6))
    assert [in_place.read(index) for index in range(manifest.n)] == expected
    assert copies(tmp_path / "cache") == 0
    config = DataConfig(cache_local=True, cache_dir=tmp_path / "cache", cache_gb=0.001)
    cache = loader_options(config, manifest, Communicator()).cache
    first = reader(manifest, cache=cache)
    assert [first.read(index) for index in range(manifest.n)] == expected
    assert copies(tmp_path / "cache") == len(SIZES)
    for shard in manifest.shards:
        Path(shard.path).unlink()
    later = reader(manifest, cache=cache)
    assert [later.read(index) for index in range(manifest.n)] == expected


def test_files_are_prefetched(tmp_path: Path) -> None:
    manifest = local_shards(tmp_path / "shards")
    order = GlobalOrder(manifest.starts, manifest.sizes, 3, 0)
    cache = ShardCache(tmp_path / "cache", 10**6, copies_files=True)
    requests = partial(order.shards_ahead, 0, 0, [slice(0, 3)])
    with Prefetcher(cache, requests, manifest.shards, begin=0, end=9, ahead=9) as ahead:
        for _ in range(1200):
            if copies(tmp_path / "cache") == len(SIZES):
                return
            ahead._process.join(0.05)
    raise AssertionError("not all shards were copied")


def test_file_urls_are_remote_shards(tmp_path: Path) -> None:
    manifest = local_shards(tmp_path / "shards")
    url = f"file://{tmp_path}/shards/{{00000..00002}}.tar"
    with pytest.raises(UserError, match=r"file:///.*00000\.tar is remote: build the manifest once"):
        open_manifest(url, tmp_path / "manifests")
    write_manifest(tmp_path / "manifest", resolve_shards(url), ThreadPoolExecutor(1), samples=True)
    found = load_manifest(tmp_path / "manifest")
    assert [shard.path for shard in found.shards] == [f"file://{shard.path}" for shard in manifest.shards]
    assert found.content_hash == manifest.content_hash
    assert resolve_shards(f"file://{tmp_path}/shards/*.tar") == resolve_shards(url)
    cache = loader_options(DataConfig(cache_dir=tmp_path / "cache", cache_gb=0.001), found, Communicator()).cache
    reader, expected = TarReader(found, cache=cache), TarReader(manifest)
    assert [reader.read(index) for index in range(found.n)] == [expected.read(index) for index in range(found.n)]
    assert copies(tmp_path / "cache") == len(SIZES)


def mounts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *pairs: tuple[str, str]) -> None:
    """Let the system report these mount points and types."""
    lines = [f"{n} 1 0:{n} / {point} rw,relatime shared:1 - {kind} source rw" for n, (point, kind) in enumerate(pairs)]
    (tmp_path / "mountinfo").write_text("\n".join(lines) + "\n")
    monkeypatch.setattr(file_systems, "_MOUNTS", tmp_path / "mountinfo")


def test_the_type_of_a_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert shared_file_system("/proc/self") is None, "of the real table"
    mounts(
        tmp_path,
        monkeypatch,
        *(("/", "ext4"), ("/scratch", "lustre"), ("/scratch/local", "xfs"), ("/two\\040words", "fuse.juicefs")),
        *(("/home", "autofs"), ("/home", "nfs4"), ("/fuse", "fuseblk")),
    )
    expected = {"/a.tar": None, "/scratch/a/b.tar": "lustre", "/scratch/local/a.tar": None, "/scratchy": None}
    expected |= {"/two words/a": "fuse.juicefs", "/home/me": "nfs4", "/fuse/a": None}
    assert {path: shared_file_system(path) for path in expected} == expected
    (tmp_path / "mountinfo").unlink()
    assert shared_file_system("/scratch/a") is None


class RankOfTwoNodes(Communicator):
    def __init__(self, rank: int = 0, nodes: int = 2) -> None:
        super().__init__()
        self.rank, self.world_size, self._nodes = rank, 2, nodes

    def ranks_of_node(self) -> list[int]:
        return [self.rank] if self._nodes == 2 else [0, 1]


def test_a_run_on_several_nodes_is_advised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    manifest = local_shards(tmp_path / "shards")

    def logged(config: DataConfig, communicator: Communicator) -> str:
        caplog.clear()
        with caplog.at_level(logging.WARNING, "neuclip_ds"):
            _advise_on_cache(config, manifest, communicator)
        return caplog.text

    mounts(tmp_path, monkeypatch, ("/", "lustre"))
    assert "the shards are on lustre" in logged(DataConfig(), RankOfTwoNodes())
    assert "--data.cache-local=true" in logged(DataConfig(), RankOfTwoNodes())
    assert logged(DataConfig(), RankOfTwoNodes(rank=1)) == ""
    assert logged(DataConfig(), RankOfTwoNodes(nodes=1)) == ""
    assert logged(DataConfig(cache_local=True), RankOfTwoNodes()) == ""
    on_it = logged(DataConfig(cache_local=True, cache_dir=tmp_path), RankOfTwoNodes())
    assert f"data.cache_dir={tmp_path} is on lustre; name a folder on each node's own disk" in on_it
    mounts(tmp_path, monkeypatch, ("/", "ext4"))
    assert logged(DataConfig(), RankOfTwoNodes()) == ""
