"""Check that the training set and its order are chosen once and stored in checkpoints, also for weighted sources."""

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sample_log import read_samples
from small_runs import newest_checkpoint, train
from tars import manifest_of, write_pairs

from neuclip_ds.checkpoint.integrity import read_meta
from neuclip_ds.config import Config, DataConfig
from neuclip_ds.data.interleave import Interleave
from neuclip_ds.data.manifest import Manifest, Shard, from_shards, indices_at
from neuclip_ds.data.training_set import TrainingSet, find_split, interleave_settings, open_order, source_settings
from neuclip_ds.errors import UserError
from neuclip_ds.recipe import parse
from neuclip_ds.training.checks import fingerprint

LOCAL = from_shards([Shard(path=f"/data/{number}.tar", start=0, n=100, bytes=4_500_000) for number in range(60)])
REMOTE = Manifest([replace(shard, path=f"s3://bucket{shard.path}") for shard in LOCAL.shards])
SETS = {
    "a": from_shards([Shard(path="a0.tar", start=0, n=60, bytes=1), Shard(path="a1.tar", start=0, n=40, bytes=1)]),
    "b": from_shards([Shard(path="b.tar", start=0, n=300, bytes=1)]),
}


def config_of(*options: str) -> Config:
    return parse(["demo", "--data.batch_size=32", *options]).config


def set_of(manifest: Manifest) -> TrainingSet:
    return TrainingSet(config_of("--data.train=x").data, lambda source: manifest)


def mixture_of(*sources: dict) -> TrainingSet:
    return TrainingSet(DataConfig.model_validate({"train": list(sources)}), SETS.__getitem__)


def test_a_resumed_run_keeps_the_order_on_any_number_of_nodes():
    order = open_order(config_of(), set_of(LOCAL))
    assert order.interleave == Interleave(32, 250_000)
    facts = interleave_settings(order.interleave)
    assert facts == {"shard_streams": 32, "shuffle_block_size": 250_000}
    again = open_order(config_of(), set_of(LOCAL), nodes=7, saved=Interleave(*facts.values()))
    assert np.array_equal(again.batch(1, 3), order.batch(1, 3))
    chosen = fingerprint(config_of("--data.shard_streams=16", "--data.shuffle_block_size=10"))
    assert (chosen["shard_streams"], chosen["shuffle_block_size"]) == (16, 10), "a resume with others is refused"
    assert not facts.keys() & fingerprint(config_of()).keys()


def test_a_cache_that_is_too_small_is_refused_at_first_and_reported_later(caplog):
    """The remote set has 60 shards of 4.5 MB each."""
    explicit = ["--data.cache_gb=0.1", "--data.shard_streams=32", "--data.shuffle_block_size=1000"]
    with pytest.raises(UserError, match=r"0.27 GB .* set data.cache_gb=0.3 or more"):
        open_order(config_of(*explicit), set_of(REMOTE))
    saved = Interleave(32, 1000)
    assert open_order(config_of("--data.cache_gb=0.1"), set_of(REMOTE), saved=saved).interleave == saved
    assert "fetched repeatedly: set data.cache_gb=0.3 or more" in caplog.text
    assert math.prod(open_order(config_of("--data.cache_gb=0.1"), set_of(REMOTE)).interleave) < 6000
    assert "the cache limits the shuffle buffer to " in caplog.text
    assert "raise data.cache_gb (now 0.1)" in caplog.text


def test_the_cache_is_not_blamed_for_a_shuffle_buffer_that_an_option_sets(caplog):
    open_order(config_of("--data.cache_gb=10", "--data.shuffle_block_size=10"), set_of(REMOTE))
    assert "shuffle buffer" not in caplog.text


@pytest.mark.parametrize(("manifest", "needed"), [("local", "0.06 GB"), ("remote", "0.33 GB")])
def test_remote_features_need_room_in_the_cache(manifest: str, needed: str) -> None:
    """The features of each of the 60 shards take 1 MB; if the shards are remote too, each of them takes 4.5 MB."""
    explicit = ["--data.cache_gb=0.05", "--data.shard_streams=32", "--data.shuffle_block_size=1000"]
    opened = set_of({"local": LOCAL, "remote": REMOTE}[manifest])
    feature_bytes = np.full(opened.manifest.n_shards, 1_000_000)
    with pytest.raises(UserError, match=f"{needed} .* set data.cache_gb="):
        open_order(config_of(*explicit), opened, feature_bytes=feature_bytes)


def test_weights_set_the_share_of_each_source():
    """The sources' indices are consecutive, and weights set each source's share of a batch."""
    found = mixture_of({"path": "a"}, {"path": "b"})
    assert [shard.start for shard in found.manifest.shards] == [0, 60, 100]
    assert [sizes.tolist() for sizes in found.sizes_by_source] == [[60, 40, 0], [0, 0, 300]]
    assert found.weights() == [100.0, 300.0]
    weighted = mixture_of({"path": "a", "weight": 3}, {"path": "b", "weight": 1})
    assert weighted.weights() == [3, 1]
    assert weighted.interleaves(Interleave(4, 1000)) == [Interleave(4, 750), Interleave(4, 250)]
    assert weighted.describe() == [
        "  a            100 samples, 75.0% of each batch",
        "  b            300 samples, 25.0% of each batch",
    ]
    assert source_settings(DataConfig()) == {}


def test_sets_next_to_training_data_in_the_home_folder_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("train", "val", "zero_shot"):
        (tmp_path / name).mkdir()
    for source in ("~/train", '[{"path": "~/train"}, {"path": "/other"}]'):
        data = config_of(f"--data.train={source}").data
        assert find_split(data.val, "val", data.train_paths) == str(tmp_path / "val")
        assert find_split(data.zero_shot, "zero_shot", data.train_paths) == str(tmp_path / "zero_shot")


@pytest.mark.parametrize(
    ("sizes", "val", "wanted"),
    [
        ([1000, 999], "auto", {}),
        ([1000, 1000], "auto", {0: 100, 1: 100}),
        ([100] * 5000, "auto", dict.fromkeys(range(0, 5000, 50), 5)),
        ([10] * 50_000, "auto", {number: 1 for number in range(50_000) if number % 100 == 99}),
        ([2_750_000] * 4, "auto", dict.fromkeys(range(4), 2500)),
        ([1000, 1000], "", {}),
        ([1000, 1000], 0, {}),
        ([3, 0, 1], 2, {0: 1, 2: 1}),
        ([1000, 1000], "other", {}),
    ],
)
def test_held_out_pairs_leave_all_other_indices_as_they_are(sizes, val, wanted):
    whole = from_shards([Shard(path=f"{number}.tar", start=0, n=size, bytes=1) for number, size in enumerate(sizes)])
    found = TrainingSet(DataConfig(train="x", val=val), lambda source: whole).manifest
    assert (found.held_out, found.n, found.content_hash) == (wanted, sum(sizes), whole.content_hash)
    occurrences = np.zeros(found.n, dtype=np.uint8)
    for manifest, used in ((found, found.n - sum(wanted.values())), (found.validation(), sum(wanted.values()))):
        indices = indices_at(manifest.starts, manifest.sizes, np.arange(manifest.n_used))
        assert len(indices) == used
        occurrences[indices] += 1
    assert occurrences.min() == 1, "each sample is in exactly one of the two sets"


def test_a_resumed_run_keeps_its_held_out_pairs():
    whole = from_shards([Shard(path="a.tar", start=0, n=1000, bytes=1)])
    assert TrainingSet(DataConfig(train="x", val=4), lambda source: whole, {0: 4}).manifest.n_used == 996
    with pytest.raises(UserError, match=r"held out 4 training pairs when it started: set data\.val=4"):
        TrainingSet(DataConfig(train="x", val=3), lambda source: whole, {0: 4})


def test_a_small_source_of_a_mixture_limits_the_streams(monkeypatch, caplog):
    """A stream without samples of a source would fill that source's rows with padding; one sample is held out."""
    monkeypatch.setitem(SETS, "large", LOCAL)
    monkeypatch.setitem(SETS, "small", from_shards([Shard(path="small.tar", start=0, n=20, bytes=1)]))
    found = mixture_of({"path": "large", "weight": 1}, {"path": "small", "weight": 1})
    order = open_order(config_of(), found)
    assert order.interleave.streams == 16
    for step in range(20):
        indices = order.batch(0, step)
        assert indices.min() >= 0
        assert (indices >= LOCAL.n).sum() == 16
    unused = mixture_of({"path": "large", "weight": 1}, {"path": "small", "weight": 0})
    assert open_order(config_of(), unused).interleave.streams == 32
    with pytest.raises(UserError, match=r"source small .* contains 19 samples, fewer than the 32 .* at most 19"):
        open_order(config_of("--data.shard_streams=32"), found)

    # a run of an earlier version continues
    resumed = open_order(config_of(), found, saved=Interleave(32, 1000))
    assert (resumed.batch(0, 0) < 0).any()
    assert "to avoid this, start a new run" in caplog.text


@pytest.mark.parametrize(
    ("sources", "words"),
    [
        ([{"path": "a", "weight": 1}, {"path": "b"}], "set all weights, or none"),
        ([{"path": "a", "weight": -1}], "greater than or equal to 0"),
        ([{"path": ""}], "at least 1 character"),
        (["a"], "valid dictionary"),
    ],
)
def test_invalid_sources_are_refused(sources, words):
    with pytest.raises(ValueError, match=words):
        DataConfig.model_validate({"train": sources})


def test_a_mixture_refuses_drop_last():
    with pytest.raises(ValueError, match="drop_last has no effect on a mixture of sources"):
        DataConfig.model_validate({"train": [{"path": "a"}, {"path": "b"}], "drop_last": True})


@pytest.mark.parametrize("path", ["/a/{a,b}.tar", "/a,b", "/a/[ab].tar", "[ab].tar", "a::b", "7"])
def test_a_path_as_an_option_stays_as_it_is(path):
    assert parse(["demo", f"--data.train={path}"]).config.data.train == path


def test_a_source_with_braces_and_commas_as_an_option():
    sources = [{"path": "/a,{b,c}/*.tar", "weight": 3}, {"path": "d", "weight": 2.5}]
    found = parse(["demo", f"--data.train={json.dumps(sources)}"]).config.data
    assert [source.model_dump(mode="json") for source in found.sources] == sources
    assert found.train_paths == ["/a,{b,c}/*.tar", "d"]


def test_a_resumed_run_on_a_mixture_continues_its_order(tmp_path: Path) -> None:
    for name, sizes in (("large", [30, 31]), ("small", [12])):
        write_pairs(tmp_path / name, sizes)
    sources = [{"path": str(tmp_path / "large"), "weight": 3}, {"path": str(tmp_path / "small"), "weight": 1}]
    captions = '--data.captions={"txt": 0.7, "syn.txt": 0.3}'
    runs = tmp_path / "runs"
    for steps in (7, 14):
        train(runs, json.dumps(sources), steps, captions)
    seen = dict(read_samples(runs / "run" / "samples"))
    config = DataConfig.model_validate({"train": sources})
    paths = {source["path"]: manifest_of(source["path"]) for source in sources}
    facts = facts_of(runs)
    interleave = Interleave(facts["shard_streams"], facts["shuffle_block_size"])
    order = TrainingSet(config, paths.__getitem__).mixture(8, 0, interleave)
    assert seen == {step: order.batch(*divmod(step - 1, order.steps_per_epoch)).tolist() for step in range(1, 15)}
    shares = [Counter("small" if index >= 61 else "large" for index in seen[step]) for step in range(1, 15)]
    assert shares == [{"large": 6, "small": 2}] * 14
    visits = Counter(index for step in seen for index in seen[step] if index >= 61)
    assert set(visits) == set(range(61, 73)), "28 rows of 12 samples"
    assert set(visits.values()) == {2, 3}
    assert facts["sources"] == source_settings(config)["sources"], "other weights are refused"


def facts_of(runs: Path) -> dict[str, Any]:
    return read_meta(newest_checkpoint(runs))["facts"]
