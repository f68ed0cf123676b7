"""Shards that a node lacks are named; those behind a server that fails now and then train as from the disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from servers import files_server
from small_runs import call, train
from tars import write_pairs

from neuclip_ds.config import DataConfig
from neuclip_ds.data.build import open_manifest
from neuclip_ds.data.manifest import Manifest, Shard
from neuclip_ds.data.scan import ScanOptions
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.errors import UserError
from neuclip_ds.training.data import loader_options, open_data

SIZES = [7, 9, 6, 8, 10, 10]


def test_options_of_downloads(tmp_path: Path) -> None:
    data = DataConfig(cache_dir=tmp_path, downloads=3, max_outage=1, timeout=1)
    shard = Shard("pipe:sleep 4321", 0, 1, 1)
    cache = loader_options(data, Manifest([shard]), Communicator()).cache
    assert cache is not None and cache.downloads == 3
    with pytest.raises(UserError, match=r"no byte arrived for 0.1 s .* data.max_outage=1 s"):
        cache.path(shard.path, shard.bytes)


def test_a_shard_that_cannot_be_had_is_bad_samples(tmp_path: Path) -> None:
    local = write_pairs(tmp_path / "local", SIZES)
    with files_server() as server:
        for path in local.iterdir():
            server.files[path.name] = path.read_bytes()
        manifest = str(tmp_path / "manifest")
        assert call("tools/build_manifest.py", manifest, server.url("{00000..00005}.tar")).returncode == 0
        del server.files["00002.tar"]
        cache = [f"--data.cache_dir={tmp_path}/cache", "--data.cache_gb=0.001"]
        done = train(tmp_path / "runs", manifest, 6, *cache, "--objective.temperature.minimum=0.02")
        assert done.returncode == 0, done.stderr
        listed = (tmp_path / "runs" / "run" / "bad_samples.jsonl").read_text().splitlines()
        samples = [json.loads(line) for line in listed]
        assert {sample["index"] for sample in samples} <= set(range(16, 22))
        assert all("the file does not exist" in sample["reason"] for sample in samples)
        metrics = (tmp_path / "runs" / "run" / "metrics.jsonl").read_text()
        assert f'"bad_samples/read failed": {len(samples)}' in metrics


def test_a_shard_that_is_not_here(tmp_path: Path) -> None:
    shards = write_pairs(tmp_path / "shards", [3, 3])
    open_manifest(str(shards), tmp_path / "manifests", options=ScanOptions())
    (table,) = (tmp_path / "manifests").rglob("*.parquet")
    manifest, run = str(table.parent), tmp_path / "run"
    assert open_data(manifest, DataConfig(), Communicator(), run).n == 6
    (shards / "00001.tar").rename(tmp_path / "elsewhere.tar")
    with pytest.raises(UserError, match=r"1 of 2 shards are missing on this node, such as .*/00001.tar. .* every node"):
        open_data(manifest, DataConfig(), Communicator(), run)
