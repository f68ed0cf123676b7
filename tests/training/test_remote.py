"""Training on shards behind a server that fails now and then equals training on the same shards from the disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file
from servers import files_server
from small_runs import call, newest_checkpoint, train
from tars import write_pairs

from neuclip_ds.config import DataConfig
from neuclip_ds.data.manifest import Manifest, Shard
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.reporting.sample_log import read_samples
from neuclip_ds.training.data import loader_options

SIZES = [7, 9, 6, 8, 10, 10]


def fragments(runs: Path) -> dict[str, bytes]:
    (path,) = newest_checkpoint(runs).glob("engine/fragments.*.safetensors")
    return {key: value.numpy().tobytes() for key, value in load_file(path).items()}


def test_options_of_transfers() -> None:
    data = DataConfig(transfers=3, min_rate=2, max_outage=7, timeout=20)
    cache = loader_options(data, Manifest([Shard("s3://bucket/0.tar", 0, 1, 1)]), Communicator()).cache
    assert cache is not None
    assert (cache.storage.transfers, cache.storage.max_outage) == (3, 7)
    assert (cache.request.min_rate, cache.request.timeout) == (2e6, 2)


@pytest.mark.slow
def test_over_http(tmp_path: Path) -> None:
    local = write_pairs(tmp_path / "local", SIZES)
    with files_server() as server:
        for path in local.iterdir():
            server.files[path.name] = path.read_bytes()
        source, manifest = server.url("{00000..00005}.tar"), str(tmp_path / "manifest")
        built = call("tools/build_manifest.py", manifest, source, "--samples", "--processes", "2")
        assert built.returncode == 0, built.stderr
        assert "50 samples" in built.stdout

        server.faults["00001.tar"] = [500, "cut"]
        server.faults["00003.tar"] = ["short"]
        before = dict(server.gets)
        cache = [f"--data.cache_dir={tmp_path}/cache", "--data.cache_gb=0.001", "--data.workers=2", "--data.timeout=60"]
        remote = train(tmp_path / "remote", manifest, 16, *cache)
        assert remote.returncode == 0, remote.stderr
        assert "bad sample" not in remote.stderr
        tries = {name: server.gets[name] - before[name] for name in before}
        assert tries == {f"{i:05d}.tar": {1: 3, 3: 2}.get(i, 1) for i in range(6)}, "each fetched once, but for faults"
        kept = list((tmp_path / "cache" / "shards").iterdir())
        assert len(kept) == 6

    assert train(tmp_path / "disk", str(local), 16).returncode == 0
    found, wanted = (list(read_samples(tmp_path / name / "run" / "samples")) for name in ("remote", "disk"))
    assert found == wanted
    assert fragments(tmp_path / "remote") == fragments(tmp_path / "disk")


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
        assert all("the file does not exist (1 attempt)" in sample["reason"] for sample in samples)
        metrics = (tmp_path / "runs" / "run" / "metrics.jsonl").read_text()
        assert f'"bad_samples/read failed": {len(samples)}' in metrics
        refused = train(tmp_path / "strict", manifest, 6, *cache, "--data.max_bad_fraction=0")
        assert refused.returncode == 2
        assert "most often" in refused.stderr
        assert "Traceback" not in refused.stderr
