"""Weighted sources of a run: shares, blocks, indices, and training on them over ranks and restarts."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from small_runs import train
from tars import write_pairs

from neuclip_ds.config import DataConfig
from neuclip_ds.data.interleave import Interleave
from neuclip_ds.data.manifest import Shard, extend
from neuclip_ds.reporting.sample_log import read_samples
from neuclip_ds.training.data_sources import TrainingSet, facts_of

SETS = {
    "a": extend(None, [Shard("a0.tar", 0, 60, 1), Shard("a1.tar", 0, 40, 1, removed=False)]),
    "b": extend(None, [Shard("b.tar", 0, 300, 1)]),
}


def set_of(**sources: dict) -> TrainingSet:
    return TrainingSet(DataConfig.model_validate({"sources": sources}), SETS.__getitem__)


def test_indices_of_sources_follow_one_another():
    found = set_of(a={"train": "a"}, b={"train": "b"})
    assert [shard.start for shard in found.manifest.shards] == [0, 60, 100]
    assert found.manifest.n == 400
    assert [part.tolist() for part in found.parts] == [[60, 40, 0], [0, 0, 300]]


def test_weights():
    assert set_of(a={"train": "a"}, b={"train": "b"}).weights() == {0: [100.0, 300.0]}
    assert set_of(a={"train": "a", "upsample": 6}, b={"train": "b"}).weights() == {0: [600.0, 300.0]}
    stages = set_of(a={"train": "a", "weight": [[0, 1], [50, 3]]}, b={"train": "b", "weight": [[0, 1], [20, 0]]})
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
        ({"a": {"train": "a", "weight": [[5, 1]]}}, "begin with step 0"),
        ({"a": {"train": "a", "weight": 1, "upsample": 2}}, "exclude each other"),
        ({"a": {"train": "a", "weight": 1}, "b": {"train": "b"}}, "give each one, or none"),
        ({"a": {"train": "a", "weight": -1}}, "greater than or equal to 0"),
    ],
)
def test_mistakes(sources, words):
    with pytest.raises(ValueError, match=words):
        DataConfig.model_validate({"sources": sources})
    with pytest.raises(ValueError, match="both set"):
        DataConfig(train="x", sources={"a": {"train": "a"}})


def test_training_on_a_mixture_and_resuming_it(tmp_path: Path) -> None:
    for name, sizes in (("large", [30, 31]), ("small", [12])):
        write_pairs(tmp_path / name, sizes)
    sources = {
        "large": {"train": str(tmp_path / "large"), "weight": 3},
        "small": {"train": str(tmp_path / "small"), "weight": [[0, 1], [10, 3]]},
    }
    option = f"--data.sources={json.dumps(sources)}"
    runs = tmp_path / "runs"
    for steps, ranks in ((7, 1), (14, 2)):
        done = train(runs, "", steps, option, ranks=ranks)
        assert done.returncode == 0, done.stderr
    whole = train(tmp_path / "whole", "", 14, option)
    assert whole.returncode == 0, whole.stderr
    seen, expected = (dict(read_samples(tmp_path / name / "run" / "samples")) for name in ("runs", "whole"))
    assert seen == expected
    shares = [Counter("small" if index >= 61 else "large" for index in seen[step]) for step in range(1, 15)]
    assert shares == [{"large": 6, "small": 2}] * 10 + [{"large": 4, "small": 4}] * 4
    visits = Counter(index for step in seen for index in seen[step] if index >= 61)
    assert set(visits) == set(range(61, 73)), "36 rows of 12 samples"
    assert set(visits.values()) == {3}

    sources["small"]["weight"] = 1
    refused = train(runs, "", 20, f"--data.sources={json.dumps(sources)}")
    assert refused.returncode == 2
    assert "was written with sources=" in refused.stderr
