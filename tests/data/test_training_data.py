"""Test download options, missing shards, unused caption sources and the choice of the tokenizer."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import open_clip
import pytest
from servers import files_server
from small_runs import train
from tars import jpeg, manifest_of, write_pairs

from neuclip_ds.config import DataConfig
from neuclip_ds.data import training_data
from neuclip_ds.data.build import open_manifest, write_manifest
from neuclip_ds.data.manifest import Manifest, Shard
from neuclip_ds.data.open_data import loader_options, open_data, unused_sources
from neuclip_ds.data.scan import ScanOptions
from neuclip_ds.data.shards import resolve_shards
from neuclip_ds.data.training_data import open_training_data
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.errors import UserError
from neuclip_ds.models.source import FromConfig
from neuclip_ds.models.tokenizer import CaptionTokenizer
from neuclip_ds.recipe import parse

SIZES = [7, 9, 6, 8, 10, 10]


def test_downloads_follow_the_config(tmp_path: Path) -> None:
    data = DataConfig(cache_dir=tmp_path, downloads=3, max_outage=1, timeout=1)
    with files_server() as server:
        server.files["0.tar"] = b"x"
        server.gate.clear()
        shard = Shard(path=server.url("0.tar"), start=0, n=1, bytes=1)
        cache = loader_options(data, Communicator(), Manifest([shard]), Manifest([])).cache
        assert cache is not None and cache.downloads == 3
        with pytest.raises(UserError, match=r"no byte arrived for 0.1 s .* has failed for 1 s, .*data.max_outage"):
            cache.path(shard.path, shard.bytes)


def test_the_samples_of_a_missing_remote_shard_are_bad_samples(tmp_path: Path) -> None:
    local = write_pairs(tmp_path / "local", SIZES)
    with files_server() as server:
        for path in local.iterdir():
            server.files[path.name] = path.read_bytes()
        manifest = str(tmp_path / "manifest")
        shards = resolve_shards(server.url("{00000..00005}.tar"))
        write_manifest(tmp_path / "manifest", shards, ThreadPoolExecutor(1))
        del server.files["00002.tar"]
        cache = [f"--data.cache_dir={tmp_path}/cache", "--data.cache_gb=0.001"]
        train(tmp_path / "runs", manifest, 6, *cache, "--objective.temperature.minimum=0.02")
        listed = (tmp_path / "runs" / "run" / "bad_samples.jsonl").read_text().splitlines()
        samples = [json.loads(line) for line in listed]
        assert {sample["index"] for sample in samples} <= set(range(16, 22))
        assert all("the file does not exist" in sample["reason"] for sample in samples)
        metrics = (tmp_path / "runs" / "run" / "metrics.jsonl").read_text()
        assert f'"bad_samples/read failed": {len(samples)}' in metrics


@pytest.mark.parametrize(
    ("captions", "unused"),
    [
        (["txt", "syn.txt", "json:caption"], ["syn.txt", "json:caption"]),
        ({"json:long": 0.5, "json:short": 0.5}, ["json:short"]),
        (["json:none"], []),  # not reported: a dataset without captions is refused elsewhere
    ],
)
def test_caption_sources_that_no_sample_has_are_found(captions: Any, unused: list[str], tmp_path: Path) -> None:
    pair = {"jpg": jpeg(0), "txt": b"a", "json": b'{"long": "b"}'}
    folder = write_pairs(tmp_path, [3, 3], {5: pair})
    manifest = manifest_of(folder)
    assert unused_sources(manifest, captions) == unused
    for tar in folder.glob("*.tar"):
        tar.unlink()
    assert unused_sources(manifest, captions) == []


def test_a_shard_that_is_missing_on_a_node_is_refused(tmp_path: Path) -> None:
    shards = write_pairs(tmp_path / "shards", [3, 3])
    open_manifest(str(shards), tmp_path / "manifests", options=ScanOptions())
    (table,) = (tmp_path / "manifests").rglob("*.parquet")
    manifest, run = str(table.parent), tmp_path / "run"
    assert open_data(manifest, DataConfig(), Communicator(), run).n == 6
    (shards / "00001.tar").rename(tmp_path / "elsewhere.tar")
    with pytest.raises(UserError, match=r"This node lacks 1 of 2 local shards, such as .*/00001.tar. .* every node"):
        open_data(manifest, DataConfig(), Communicator(), run)


def test_recipes_of_papers_use_clips_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Paper recipes use open_clip's tokenizer; without it, the run trains a BPE on the captions and logs why."""
    shards = write_pairs(tmp_path / "shards", [6, 6])
    captions = ["Two DOGS, 3 cats", "it's a caf\u00e9!", "word " * 90, ""]

    caplog.set_level("INFO")

    def tokenizer(name: str, *options: str) -> CaptionTokenizer:
        config = parse(["cc12m_openclip", f"--data.train={shards}", "--data.batch_size=4", *options]).config
        (tmp_path / name).mkdir()
        found = open_training_data(config, FromConfig(config.model), Communicator(), tmp_path / name, None).tokenizer
        assert isinstance(found, CaptionTokenizer)
        return found

    ours, theirs = tokenizer("named"), open_clip.get_tokenizer("ViT-B-32")(captions)
    ids = ours(captions)
    ids[ids.eq(ours.eos_id).cumsum(1).gt(1)] = 0  # open_clip pads rows with 0
    assert ours.vocab_size == 49408 and ids.equal(theirs) and "captions" not in caplog.text
    monkeypatch.setattr(training_data, "find_spec", lambda name: None)
    assert tokenizer("absent").vocab_size < 49408
    assert "on the captions, because open_clip_torch, which has CLIP's vocabulary, is not installed" in caplog.text
    assert tokenizer("none", "--model.text.tokenizer=null").vocab_size < 49408
    assert "on the captions, because model.text.tokenizer is not set" in caplog.text
