"""Fine-tuning pairs: scenes that repeat, and captions of other images."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from neuclip_ds.reproduction.cold_start_data import copy_shards, mismatch_captions, render_pairs
from neuclip_ds.reproduction.data import shrunken


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cold_start") / "tuning"
    render_pairs(folder, 60, 0.5)
    return folder


def test_a_share_of_the_scenes_repeat(rendered: Path) -> None:
    originals = [json.loads(pair["json"])["near_duplicate_of"] for pair in shrunken(rendered)]
    assert len(originals) == 60
    assert 15 < sum(original is not None for original in originals) < 45
    assert [path.name for path in rendered.parent.iterdir()] == ["tuning"]


def test_a_share_of_the_captions_is_mismatched(rendered: Path, tmp_path: Path) -> None:
    mismatch_captions(rendered, tmp_path / "noisy", 0.5)
    before, after = ([pair["txt"] for pair in shrunken(folder)] for folder in (rendered, tmp_path / "noisy"))
    assert sorted(before) == sorted(after)
    assert 15 < sum(one != other for one, other in zip(before, after, strict=True)) < 45


def test_shards_are_copied_once(rendered: Path, tmp_path: Path) -> None:
    shards = sorted(rendered.iterdir())
    copy_shards(shards, tmp_path / "copy")
    copy_shards([], tmp_path / "copy")
    assert [path.name for path in (tmp_path / "copy").iterdir()] == [path.name for path in shards]
