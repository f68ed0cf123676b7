"""Weighted sources of a run: shares, blocks, indices, and training on them over ranks and restarts."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import yaml
from small_runs import train
from tars import write_pairs

from neuclip_ds.config import DataConfig
from neuclip_ds.data.interleave import Interleave
from neuclip_ds.data.manifest import Shard, extend
from neuclip_ds.errors import UserError
from neuclip_ds.recipe import load_saved, parse, recipe_config
from neuclip_ds.reporting.sample_log import read_samples
from neuclip_ds.training.data_sources import TrainingSet, facts_of

SETS = {
    "a": extend(None, [Shard("a0.tar", 0, 60, 1), Shard("a1.tar", 0, 40, 1, removed=False)]),
    "b": extend(None, [Shard("b.tar", 0, 300, 1)]),
}


def set_of(*sources: dict) -> TrainingSet:
    return TrainingSet(DataConfig.model_validate({"train": list(sources)}), SETS.__getitem__)


def test_indices_of_sources_follow_one_another():
    found = set_of({"path": "a"}, {"path": "b"})
    assert [shard.start for shard in found.manifest.shards] == [0, 60, 100]
    assert found.manifest.n == 400
    assert [part.tolist() for part in found.parts] == [[60, 40, 0], [0, 0, 300]]


def test_weights():
    assert set_of({"path": "a"}, {"path": "b"}).weights() == {0: [100.0, 300.0]}
    assert set_of({"path": "a", "upsample": 6}, {"path": "b"}).weights() == {0: [600.0, 300.0]}
    stages = set_of({"path": "a", "weight": [[0, 1], [50, 3]]}, {"path": "b", "weight": [[0, 1], [20, 0]]})
    assert stages.weights() == {0: [1, 1], 20: [1, 0], 50: [3, 0]}
    assert stages.interleaves(Interleave(4, 1000)) == [Interleave(4, 1000), Interleave(4, 500)]
    assert stages.describe() == [
        "  a            100 samples, 50.0%, 100.0% from step 20, 100.0% from step 50 of each batch",
        "  b            300 samples, 50.0%, 0.0% from step 20, 0.0% from step 50 of each batch",
    ]
    assert facts_of(DataConfig()) == {}


@pytest.mark.parametrize(
    ("sources", "words"),
    [
        ([{"path": "a", "weight": [[5, 1]]}], "begin with step 0"),
        ([{"path": "a", "weight": 1, "upsample": 2}], "exclude each other"),
        ([{"path": "a", "weight": 1}, {"path": "b"}], "give each one, or none"),
        ([{"path": "a", "weight": -1}], "greater than or equal to 0"),
        ([{"path": ""}], "at least 1 character"),
        (["a"], "valid dictionary"),
    ],
)
def test_mistakes(sources, words):
    with pytest.raises(ValueError, match=words):
        DataConfig.model_validate({"train": sources})


def test_no_source_is_no_data():
    with pytest.raises(UserError, match="Name the training data"):
        set_of()


@pytest.mark.parametrize("path", ["/a/{a,b}.tar", "/a,b", "/a/[ab].tar", "[ab].tar", "{a,b}/*.tar", "a::b", "7"])
def test_a_path_as_an_option_stays_as_it_is(path):
    assert parse(["demo", f"--data.train={path}"]).config.data.train == path


def test_a_source_with_braces_and_commas_as_an_option():
    sources = [{"path": "/a,{b,c}/*.tar", "weight": 3}, {"path": "d", "weight": [[0, 1], [9, 2]]}]
    found = parse(["demo", f"--data.train={json.dumps(sources)}"]).config.data
    assert [source.model_dump(exclude={"upsample"}, mode="json") for source in found.sources] == sources
    assert found.train_paths == ["/a,{b,c}/*.tar", "d"]


def test_the_former_form_is_read_from_runs_and_refused_from_users(tmp_path: Path) -> None:
    tree = recipe_config("demo", {}).model_dump(mode="json")
    tree["data"] |= {"train": "", "sources": {"a": {"train": "x", "weight": 3.0}, "b": {"train": "y", "weight": 1.0}}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(tree))
    assert [(source.path, source.weight) for source in load_saved(tmp_path / "config.yaml").data.sources] == [
        ("x", 3.0),
        ("y", 1.0),
    ]
    tree["data"] |= {"train": "z", "sources": {}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(tree))
    assert load_saved(tmp_path / "config.yaml").data.train == "z"
    with pytest.raises(UserError, match=r"data\.sources is now called"):
        parse(["demo", '--data.sources={"a": {"train": "x"}}'])


def test_training_on_a_mixture_and_resuming_it(tmp_path: Path) -> None:
    for name, sizes in (("large", [30, 31]), ("small", [12])):
        write_pairs(tmp_path / name, sizes)
    sources = [
        {"path": str(tmp_path / "large"), "weight": 3},
        {"path": str(tmp_path / "small"), "weight": [[0, 1], [10, 3]]},
    ]
    captions = '--data.captions={"txt": 0.7, "syn.txt": 0.3}'
    runs = tmp_path / "runs"
    for steps, ranks in ((7, 1), (14, 2)):
        done = train(runs, json.dumps(sources), steps, captions, ranks=ranks)
        assert done.returncode == 0, done.stderr
    whole = train(tmp_path / "whole", json.dumps(sources), 14, captions)
    assert whole.returncode == 0, whole.stderr
    seen, expected = (dict(read_samples(tmp_path / name / "run" / "samples")) for name in ("runs", "whole"))
    assert seen == expected
    shares = [Counter("small" if index >= 61 else "large" for index in seen[step]) for step in range(1, 15)]
    assert shares == [{"large": 6, "small": 2}] * 10 + [{"large": 4, "small": 4}] * 4
    visits = Counter(index for step in seen for index in seen[step] if index >= 61)
    assert set(visits) == set(range(61, 73)), "36 rows of 12 samples"
    assert set(visits.values()) == {3}

    sources[1]["weight"] = 1
    refused = train(runs, json.dumps(sources), 20, captions)
    assert refused.returncode == 2
    assert "was written with sources=" in refused.stderr
